"""A model as a graph of operators: what every exporter starts from.

`torch.export` runs the model once on an example and writes down the operators, with no Python in
between. What Python decides while it runs, it decides for good: the sizes of the example are part
of the graph, and an `if` on the numbers of a tensor cannot be written down at all.

A Hugging Face model returns an object with many entries; a device gets the logits alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from recipes_lib.core.checks import check_flag
from recipes_lib.core.model.linears import quantized_layers, require_module

LARGEST_BATCH = 1024  # of a graph with `any_batch`
EXPLAINED = 200  # characters of another library's message in ours


class TensorsOnly(nn.Module):
    """A model that returns its logits where it would return an object of Hugging Face."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, *inputs: Tensor) -> Any:
        """As the model's; the entry `logits` of what it returns, where there is one."""
        return logits_of(self.model(*inputs))


def logits_of(output: Any) -> Any:
    """The logits of a Hugging Face output; anything else as it is."""
    return getattr(output, "logits", output)


def check_example(example: Any) -> tuple[Tensor, ...]:
    """`example` as a tuple of tensors. Raises ValueError for anything else, and for empty ones."""
    if isinstance(example, Tensor):
        example = (example,)
    several = isinstance(example, Sequence) and not isinstance(example, str)
    if not several or not example or not all(isinstance(part, Tensor) for part in example):
        raise ValueError(
            f"example is of type {type(example).__name__}: give a tuple of tensors, the inputs of "
            f"one call, such as (images[:1],)"
        )
    for number, part in enumerate(example):
        if part.numel() == 0:
            raise ValueError(
                f"input {number} of the example has the shape {list(part.shape)}: give an example "
                f"with numbers in it"
            )
    return tuple(example)


def check_calibration(calibration: Any) -> None:
    """Raise ValueError unless these are inputs [N, ...] from which ranges can be taken."""
    if not isinstance(calibration, Tensor):
        raise ValueError(
            f"calibration is of type {type(calibration).__name__}: give a tensor of inputs [N, ...]"
        )
    if calibration.dim() < 2 or calibration.numel() == 0:
        raise ValueError(
            f"calibration has the shape {list(calibration.shape)}: give at least one example, "
            f"better some hundred, as a tensor [N, ...]"
        )
    if not calibration.isfinite().all():
        raise ValueError("calibration has numbers that are not finite: no grid can hold them")
    if not calibration.any():
        raise ValueError(
            "calibration is zero everywhere, and no range comes of it: give inputs as the model "
            "will see them"
        )


def capture_graph(
    model: nn.Module,
    example: tuple[Tensor, ...],
    *,
    any_batch: bool = False,
    training: bool = False,
) -> torch.export.ExportedProgram:
    """The operators of one forward of `model`, as torch.export writes them down.

    The model itself stays as it is, with its mode and its statistics.

    Args:
        example: the inputs of one call. Their shapes are those of the graph.
        any_batch: the first dimension of all inputs may change from call to call, together. Give
            an example of 2 or more then: torch.export takes a 1 for a fixed size.
        training: the graph of a step of training, with batch norms that use the batch. Otherwise
            that of eval mode.
    Raises ValueError for what is no module, for layers that are quantized or have masks, for
    weights that are not fp32 on a CPU, for an example that the model does not take, for a model
    that returns no tensor, and for Python that decides by the numbers of a tensor.
    """
    require_module(model)
    check_flag(any_batch=any_batch, training=training)
    example = check_example(example)
    _check_layers(model)
    if any_batch and len({len(part) for part in example} | {1}) != 2:
        sizes = ", ".join(str(list(part.shape)) for part in example)
        raise ValueError(
            f"inputs {sizes}: for any batch size give inputs of one batch size of 2 or more"
        )
    _check_weights(model)
    shapes = None
    if any_batch:
        batch = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
        of_each_input = tuple({0: batch} for _ in example)
        shapes = (of_each_input,)  # of one argument, `*inputs`
    with in_eval_mode(model), torch.no_grad():
        _run_once(model, example)
    with in_mode(model, training=training), torch.set_grad_enabled(training):
        wrapped = TensorsOnly(model)
        try:
            return torch.export.export(wrapped, example, dynamic_shapes=shapes)
        except Exception as error:
            raise ValueError(_why_not(model, error)) from error


@contextlib.contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Every module in train or eval mode; afterwards each has the mode that it had.

    A graph that torch.export has made refuses `eval()`: its mode is set without it.
    """
    changed = [module for module in model.modules() if module.training != training]
    for module in changed:
        module.training = training
    try:
        yield
    finally:
        for module in changed:
            module.training = not training


def in_eval_mode(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Every module in eval mode; afterwards each has the mode that it had."""
    return in_mode(model, training=False)


def explained(error: Exception) -> str:
    """The first lines of an error as one line, for a message that goes on in plain words."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line)
    if len(text) > EXPLAINED:
        text = text[:EXPLAINED] + " …"
    return f"{type(error).__name__}: {text}"


def _check_layers(model: nn.Module) -> None:
    """An exporter rounds by itself, and takes a weight for what it computes with."""
    for name, by in quantized_layers(model).items():
        way_out = "export the model as it was before"
        if by == "apply_quantization_aware":
            way_out = "call remove_quantization_aware(model) first"
        raise ValueError(
            f"{name} is quantized by {by} already, and the export would round it again: {way_out}"
        )
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            raise ValueError(
                f"a weight of {name} is computed of others in each forward, and the device would "
                f"do it in each call: call remove_pruning(model) for masks, and "
                f"torch.nn.utils.parametrize.remove_parametrizations for others"
            )


def _check_weights(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if isinstance(weight, nn.UninitializedParameter):
            raise ValueError(
                f"{name} is that of a lazy layer, which has no size yet: call the model once first"
            )
        if weight.device.type != "cpu":
            raise ValueError(f"{name} is on {weight.device}: call model.cpu() before the export")
        if weight.is_floating_point() and weight.dtype is not torch.float32:
            raise ValueError(
                f"{name} is stored in {weight.dtype}: call model.float() before the export"
            )


def _run_once(model: nn.Module, example: tuple[Tensor, ...]) -> None:
    """An example that does not fit fails here, with a message of ours, and not in a compiler."""
    try:
        output = model(*example)
    except Exception as error:
        sizes = ", ".join(str(list(part.shape)) for part in example)
        raise ValueError(
            f"{type(model).__name__} does not run on the example {sizes}: give the inputs of one "
            f"call in the shapes that it was trained on ({explained(error)})"
        ) from error
    leaves = tree_leaves(logits_of(output))
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise ValueError(
            f"{type(model).__name__} returns no tensor, but {type(output).__name__}: return what "
            f"the device is to compute"
        )


def _why_not(model: nn.Module, error: Exception) -> str:
    name = type(model).__name__
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in str(error):
        return (
            f"{name} decides in Python by the numbers of a tensor (an `if`, a loop or `.item()`): "
            f"a graph cannot hold that. Compute both ways and choose with torch.where, or use "
            f"torch.cond ({explained(error)})"
        )
    return (
        f"{name} cannot be written down as a graph of operators: use PyTorch alone in its forward, "
        f"without NumPy, lists that change or other libraries ({explained(error)})"
    )
