"""Classifiers of images: what they answer, how often it is right, a short training, their work.

A classifier is a Hugging Face model, a module that returns logits, or any function of a batch: a
file that a device's runtime has loaded answers the same questions as the model it comes from.

Shapes: N images, B of them in a batch, C channels, H and W pixels, K classes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes_lib.architecture._convolutions import CONVOLUTIONS
from recipes_lib.core.data.images import Images
from recipes_lib.core.model.evaluating import evaluating

WEIGHT_DECAY = 5e-4
PART_THAT_RISES = 0.25  # of the steps, for the learning rate

# loss(logits [B, K], images [B, C, H, W], labels [B]) -> scalar
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


# --- what a classifier answers --------------------------------------------------------------------


@torch.no_grad()
def image_logits(model: Any, images: Tensor | Images, *, batch_size: int = 250) -> Tensor:
    """Logits [N, K] of images [N, C, H, W], in fp32 on the CPU.

    Args:
        model: a module, which runs in eval mode on its own device and stays in the mode it is in,
            or any function of a batch. Its answer is a tensor, a NumPy array, a Hugging Face output
            with `logits`, or a list or tuple that begins with one of them.
        batch_size: how many images at a time. A file with a fixed batch needs exactly that one.
    """
    if isinstance(images, Images):
        images = images.images
    answers = []
    with _in_eval_mode(model):
        for batch in images.split(batch_size):
            answers.append(_logits_of_images(model(_placed_for(model, batch))).float().cpu())
    return torch.cat(answers)


def accuracy(model: Any, images: Images, *, batch_size: int = 250) -> float:
    """The part of `images`, from 0 to 1, in whose logits the right class is the largest.

    Arguments as in `image_logits`.
    """
    chosen = image_logits(model, images, batch_size=batch_size).argmax(dim=1)  # [N]
    return (chosen == images.labels.cpu()).double().mean().item()


def _logits_of_images(answer: Any) -> Tensor:
    if hasattr(answer, "logits"):
        answer = answer.logits
    if isinstance(answer, list | tuple) and answer:
        answer = answer[0]
    return torch.as_tensor(answer)


def _placed_for(model: Any, batch: Tensor) -> Tensor:
    """Images on the device and in the dtype of a classifier's parameters; else as they are."""
    parameter = None
    if isinstance(model, nn.Module):
        parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is None:
        return batch
    return batch.to(parameter.device, parameter.dtype)


def _in_eval_mode(model: Any) -> contextlib.AbstractContextManager:
    """Modules of a classifier in eval mode, and after that each in the mode it was in."""
    if isinstance(model, nn.Module):
        return evaluating(model)
    return contextlib.nullcontext()  # a function of a batch has no mode


# --- a short training -----------------------------------------------------------------------------


def train_classifier(
    model: nn.Module,
    images: Images,
    *,
    epochs: int,
    learning_rate: float,
    batch_size: int = 64,
    seed: int = 0,
    loss: Loss | None = None,
    shift: int = 2,
) -> list[float]:
    """Train `model` in place by SGD with momentum; returns the mean loss of each epoch.

    The learning rate rises for a quarter of the steps and falls to nothing after that (one cycle).
    Every image moves by a few pixels, to another place in each epoch. The images of an epoch that
    do not fill a last batch are left out. The model is in eval mode afterwards.

    Args:
        learning_rate: the largest one.
        seed: of the order of the images, their shifts, and dropout.
        loss: `loss(logits, images, labels)` of a batch, such as one that asks a teacher about the
            same images. None: cross-entropy with the labels.
        shift: most pixels up, down, left or right. What leaves on one side comes in on the other,
            so let it be no more than the images' border is wide.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    steps = epochs * (len(images) // batch_size)
    if loss is None:
        loss = _cross_entropy
    optimizer = torch.optim.SGD(
        parameters, lr=learning_rate, momentum=0.9, nesterov=True, weight_decay=WEIGHT_DECAY
    )
    share_of_step = partial(_share_of_learning_rate, steps=steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_step)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # of dropout
        # Channels beside each other: depthwise convolutions train about twice as fast on a CPU.
        model.train().to(memory_format=torch.channels_last)
        for _ in range(epochs):
            sum_of_losses = 0.0
            for batch, labels in _batches_of_images(images, batch_size, shift, generator):
                batch = _placed_for(model, batch).contiguous(memory_format=torch.channels_last)
                labels = labels.to(batch.device)
                of_batch = loss(_logits_of_images(model(batch)), batch, labels)
                optimizer.zero_grad()
                of_batch.backward()
                optimizer.step()
                schedule.step()
                sum_of_losses += of_batch.item()
            losses.append(sum_of_losses / (steps // epochs))
            if not math.isfinite(losses[-1]):
                raise ValueError(
                    f"the loss is {losses[-1]} after {len(losses)} epochs with "
                    f"learning_rate={learning_rate}: give a smaller one"
                )
    model.eval().to(memory_format=torch.contiguous_format)
    return losses


def _share_of_learning_rate(step: int, *, steps: int) -> float:
    """A classifier's learning rate at `step` of `steps`, as a part of the largest."""
    rising = (step + 1) / (steps * PART_THAT_RISES)
    falling = (steps - step) / (steps * (1 - PART_THAT_RISES))
    return min(1.0, rising, falling)


def _cross_entropy(logits: Tensor, _images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def _batches_of_images(
    images: Images, batch_size: int, shift: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one epoch in a new order: images [B, C, H, W] and labels [B]."""
    order = torch.randperm(len(images), generator=generator)
    for start in range(0, len(images) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        yield shifted(images.images[chosen], most=shift, generator=generator), images.labels[chosen]


def shifted(images: Tensor, *, most: int, generator: torch.Generator) -> Tensor:
    """Each of images [B, C, H, W] moved by up to `most` pixels, down and to the right or back.

    What leaves on one side comes in on the other.
    """
    count, _, height, width = images.shape
    steps = torch.randint(-most, most + 1, (2, count), generator=generator)
    rows = (torch.arange(height) - steps[0][:, None]) % height  # [B, H]
    columns = (torch.arange(width) - steps[1][:, None]) % width  # [B, W]
    image = torch.arange(count)[:, None, None]  # [B, 1, 1]
    moved = images.movedim(1, -1)[image, rows[:, :, None], columns[:, None, :]]  # [B, H, W, C]
    return moved.movedim(-1, 1)


# --- work -----------------------------------------------------------------------------------------


@torch.no_grad()
def multiply_adds(model: nn.Module, example: Tensor) -> int:
    """Multiplications of a classifier's convolutions and linear layers for `example`, counted.

    Each of them goes with one addition. A forward of `example` [B, C, H, W] runs, and every layer
    is asked how large its output is: so a layer that runs twice counts twice, and pruned layers
    count with the channels that they have left. Normalization, activations and pooling are not
    counted, they are a few per cent.
    """
    layers = [m for m in model.modules() if isinstance(m, (*CONVOLUTIONS, nn.Linear))]
    counted = []

    def count(layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        # The weights of one output: [K / groups, H, W] of a convolution, [K] of a linear layer.
        counted.append(output.numel() * layer.weight[0].numel())

    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        with _in_eval_mode(model):
            model(_placed_for(model, example))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counted)
