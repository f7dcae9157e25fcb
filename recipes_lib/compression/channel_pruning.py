"""Pruning channels: whole channels of a network for images are taken out, and it is really smaller.

Problem    A network with many zeros among its weights is as large and as slow as before.
Idea       Take away whole channels. A block of MobileNetV2 is wide inside: a channel there is made
           by one filter, goes through one filter of its own, and is read by one column:

               x -> expand [6C, C] -> 3 x 3 of each -> reduce [K, 6C] -> y
                        row c           filter c           column c         all three go

           So it may leave without a trace outside of the block. Which ones? Without channel c the
           output changes by a[c] W[:, c], where a is what reduce reads:

               importance of channel c = mean(a[c]²) |W[:, c]|²

Saves      Parameters and multiply-adds of the blocks, by the share that goes, for the kernels stay
           dense. Time follows them where layers have much to do: in batches, or with large images.
           With one small image most of the time is what each layer costs to be called, and there
           are as many layers as before.
Costs      Accuracy falls far at once, and comes back with training. The same small network trained
           from the start, for as long as both trainings together, may be as good: compare with it.
Use when   Time or memory is what is small, and a trained model and its data are there.
Not when   There is no data. Where a narrower model of the same family is trained already. For
           8 bits that save as much and need no training. Layers with masks or adapters.
In production   torch-pruning (`tp.pruner.BasePruner` with `GroupMagnitudeImportance`), which traces
           any network for what depends on what; NVIDIA Model Optimizer `mtp.prune(mode="fastnas")`.
Source     Molchanov et al., "Importance Estimation for Neural Network Pruning", arXiv 1906.10771;
           Fang et al., "DepGraph: Towards Any Structural Pruning", arXiv 2301.12900; Liu et al.,
           "Rethinking the Value of Network Pruning", arXiv 1810.05270 (the same from the start).

Shapes: B images, C channels inside of a block, K channels of its output, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import check_number
from recipes_lib.core.model.evaluating import evaluating

MULTIPLE_OF = 8  # channels that stay: kernels compute whole vectors

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_importance(inside: Tensor, reduce: Tensor) -> Tensor:
    """What each channel adds to the output: inside [B, C, H, W], reduce [K, C] -> [C]."""
    return inside.square().mean(dim=(0, 2, 3)) * reduce.square().sum(dim=0)


# --- the technique --------------------------------------------------------------------------------


def apply_channel_pruning(model: Any, *, kept: Mapping[str, Tensor]) -> Any:
    """Take all channels but `kept` out of a MobileNetV2, in place; returns `model`.

    The model computes what it would compute if the others added nothing. It is an ordinary module
    with smaller layers: make the optimizer after this. Its configuration does not know of it, so
    `save_pretrained` refuses: keep the module itself, or its export.

    Args:
        kept: for each name of `inner_channels(model)` the numbers of the channels that stay, in
            rising order, as `choose_channels` returns them. A name that is missing stays whole.
    """
    inner = inner_channels(model)
    for name, channels in kept.items():
        part = inner[name]
        channels = torch.as_tensor(channels, device=part.reader.weight.device)
        for layer in part.makers:
            _keep_output_channels(layer, channels)
        _keep_input_channels(part.reader, channels)
    model.save_pretrained = _refuse_to_save_fewer_channels
    return model


def channel_importance(model: Any, images: Tensor) -> dict[str, Tensor]:
    """What each inner channel adds on average: mean(a²) |W|², fp32 [C] by name.

    Args:
        images: [B, channels, H, W], some hundred of those that the model is to be good at, in any
            floating dtype.
    Give them as in training: of the same size, and not as whole numbers. Every module keeps its
    mode.
    """
    if not images.is_floating_point():  # 0 to 255 would give another importance
        raise ValueError(f"images are stored in {images.dtype}: give images.float() / 255")
    inner = inner_channels(model)
    importance: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def look_at_channels(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            inside = inputs[0].float()
            if inside.dim() == 2:  # the classifier reads one number per channel
                inside = inside[..., None, None]
            importance[name] = plain_importance(inside, layer.weight.float().flatten(1))

        return look_at_channels

    hooks = [part.reader.register_forward_pre_hook(watch(name)) for name, part in inner.items()]
    parameter = next(model.parameters())
    with evaluating(model):
        model(images.to(parameter.device, parameter.dtype))
    for hook in hooks:
        hook.remove()
    return importance


def choose_channels(importance: Mapping[str, Tensor], *, share: float) -> dict[str, Tensor]:
    """For each name the channels that pruning leaves, in rising order: the most important."""
    check_number(above=0, below=1, share=share)
    kept = {}
    for name, values in importance.items():
        count = round((1 - share) * len(values) / MULTIPLE_OF) * MULTIPLE_OF
        count = min(max(count, MULTIPLE_OF), len(values))
        kept[name] = values.topk(count).indices.sort().values
    if all(len(channels) == len(importance[name]) for name, channels in kept.items()):
        raise ValueError(
            f"share={share} takes less than {MULTIPLE_OF} channels of every part: give a larger one"
        )
    return kept


class Inner(NamedTuple):
    """The channels inside of a block that can be pruned: what makes them, and what reads them."""

    makers: tuple[nn.Module, ...]  # a convolution and its normalization each
    reader: nn.Module  # a 1 x 1 convolution or the classifier

    @property
    def channels(self) -> int:
        return self.reader.weight.shape[1]


def inner_channels(model: Any) -> dict[str, Inner]:
    """The parts of a MobileNetV2 classifier whose channels nobody outside of the part reads."""
    _require_mobile_net(model)
    trunk = model.mobilenet_v2
    stem = trunk.conv_stem
    first = stem.expand_1x1
    if first is None:
        first = stem.first_conv
    inner = {"stem": Inner((first, stem.conv_3x3), stem.reduce_1x1.convolution)}
    for number, block in enumerate(trunk.layer):
        makers = (block.expand_1x1, block.conv_3x3)
        inner[f"block {number}"] = Inner(makers, block.reduce_1x1.convolution)
    inner["features"] = Inner((trunk.conv_1x1,), model.classifier)
    return inner


@torch.no_grad()
def _keep_output_channels(layer: Any, kept: Tensor) -> None:
    """Leave these output channels to a convolution and to its norm."""
    convolution = layer.convolution
    depthwise = convolution.groups > 1
    convolution.weight = _kept_channels_of(convolution.weight, kept, dim=0)
    convolution.out_channels = len(kept)
    if depthwise:  # each filter reads the channel that it makes
        convolution.in_channels = len(kept)
        convolution.groups = len(kept)
    norm = layer.normalization
    norm.weight = _kept_channels_of(norm.weight, kept, dim=0)
    norm.bias = _kept_channels_of(norm.bias, kept, dim=0)
    norm.running_mean = norm.running_mean[kept].clone()
    norm.running_var = norm.running_var[kept].clone()
    norm.num_features = len(kept)


@torch.no_grad()
def _keep_input_channels(reader: nn.Module, kept: Tensor) -> None:
    reader.weight = _kept_channels_of(reader.weight, kept, dim=1)
    if isinstance(reader, nn.Linear):
        reader.in_features = len(kept)
    else:
        reader.in_channels = len(kept)


def _kept_channels_of(parameter: nn.Parameter, kept: Tensor, *, dim: int) -> nn.Parameter:
    part = parameter.detach().index_select(dim, kept).clone()
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _require_mobile_net(model: Any) -> None:
    """Raise ValueError for a network whose channels are not pruned here."""
    if not hasattr(model, "mobilenet_v2"):
        raise ValueError(
            f"{type(model).__name__} is no MobileNetV2 classifier of transformers: for other "
            f"networks take torch-pruning, and for language models compression/student"
        )


def _refuse_to_save_fewer_channels(*_: Any, **__: Any) -> None:
    raise ValueError(
        "the channels of this model are pruned, and its configuration does not say so: from_"
        "pretrained could not load it. Use torch.save(model, path), or export it"
    )
