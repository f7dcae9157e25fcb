"""Pruning single weights: the smallest ones become zero and stay zero.

Problem    A trained model has many weights that are close to zero.
Idea       Set the share s of them with the smallest magnitude to zero, and train the others on:

               mask = |W| > the s-quantile of |W|          W * mask in every forward

           One threshold for the whole model takes more from layers with small weights (`scope`),
           down to all of them, which is refused: such a network gives one answer to everything.
Saves      Bytes of a *compressed* file: a run of zeros packs well, and the mask itself needs at
           most one bit per weight. In an ordinary file a zero takes as much room as any number.
Costs      Quality, which some epochs of training with the mask bring back in part. While the model
           trains, the masks are one byte per weight, and each forward makes W * mask anew.
Use when   A download or a flash memory is what is small.
Not when   Time or memory matters: dense kernels multiply zeros as well. Take away whole channels,
           heads or blocks (`channel_pruning`, `student`), or use fewer bits.
In production   `torch.nn.utils.prune`; torchao `sparsify_(model, semi_sparse_weight())` for 2:4 on
           CUDA; SparseGPT and Wanda choose by the activations as well.
Source     Han et al., "Learning both Weights and Connections", arXiv 1506.02626.
"""

from __future__ import annotations

import io
import math
import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from recipes_lib.core.checks import check_choice, check_number
from recipes_lib.core.model.linears import refuse_quantized

SCOPES = ("model", "layer")
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_mask(weight: Tensor, share: float) -> Tensor:
    """True for the weights that stay: all but the `share` with the smallest magnitude."""
    removed = round(share * weight.numel())
    order = weight.abs().flatten().argsort()  # the smallest first
    mask = torch.ones_like(order, dtype=torch.bool)
    mask[order[:removed]] = False
    return mask.view(weight.shape)


# --- the technique --------------------------------------------------------------------------------


def apply_pruning(model: Any, *, share: float, scope: str = "model") -> Any:
    """Let the smallest weights of `model` be zero from now on, in place; returns `model`.

    The masks stay while the model trains, whatever the optimizer does. Pruned are all linear layers
    and convolutions whose weight is their own: a table that is shared with the embedding is left
    alone, and so are biases and norms. Make the optimizer after this. The layers have parameters of
    other names now, so that `save_pretrained` refuses: `remove_pruning` makes an ordinary model of
    it, with the zeros.

    Args:
        model: any module, such as a Hugging Face model.
        share: of the weights that become zero, above 0 and below 1.
        scope: "model", one threshold for all layers together, or "layer", the share of each. For
            one threshold all weights are sorted at once, on the device of the first layer.
    """
    check_number(above=0, below=1, share=share)
    check_choice(SCOPES, scope=scope)
    layers = _layers_to_prune(model)
    if scope == "layer":
        masks = {name: plain_mask(layer.weight.detach(), share) for name, layer in layers.items()}
    else:
        masks = _masks_of_model(layers, share)
    for name, mask in masks.items():
        if not mask.any():  # such a network gives one answer to everything, and learns nothing
            raise ValueError(
                f"share={share} leaves no weight of {name}: give less, or scope='layer'"
            )
    return _with_pruning_masks(model, layers, masks)


def remove_pruning(model: Any) -> Any:
    """Make the zeros ordinary weights and forget the masks, in place; returns `model`."""
    pruned = _pruned_layers(model)
    if not pruned:
        raise ValueError("this model has no masks: apply_pruning() gives it some")
    for layer in pruned:
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    if vars(model).get("save_pretrained") is _refuse_to_save_masks:
        del model.save_pretrained  # that of its class is back
    return model


def zero_share(model: nn.Module) -> float:
    """The part of the weights of linear layers and convolutions that are zero, from 0 to 1."""
    zeros = 0
    weights = 0
    for module in model.modules():
        if isinstance(module, LAYERS):
            zeros += int((module.weight == 0).sum())
            weights += module.weight.numel()
    return zeros / weights


def compressed_bytes(model: nn.Module) -> int:
    """The bytes of a pruned model's state after zlib, which is what zip and gzip do, measured."""
    if _pruned_layers(model):
        raise ValueError("the weights behind the masks are no zeros: call remove_pruning(model)")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return len(zlib.compress(file.getvalue(), level=6))


class _MaskOfWeight(nn.Module):
    """Multiplies a weight by its mask in every forward, and so its gradient in backward."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def _masks_of_model(layers: dict[str, nn.Module], share: float) -> dict[str, Tensor]:
    """Pruning by one order of all weights: each layer's part of the mask."""
    weights = [layer.weight.detach() for layer in layers.values()]
    device = weights[0].device
    whole = plain_mask(torch.cat([weight.flatten().to(device) for weight in weights]), share)
    parts = whole.split([weight.numel() for weight in weights])
    masks = {}
    for name, weight, part in zip(layers, weights, parts):
        masks[name] = part.view(weight.shape).to(weight.device)
    return masks


def _with_pruning_masks(model: Any, layers: dict[str, nn.Module], masks: dict[str, Tensor]) -> Any:
    """`model` with masks on its layers. Saving it is refused until they are gone."""
    for name, layer in layers.items():
        parametrize.register_parametrization(layer, "weight", _MaskOfWeight(masks[name]))
    if hasattr(model, "save_pretrained") and "save_pretrained" not in vars(model):
        model.save_pretrained = _refuse_to_save_masks
    return model


def _refuse_to_save_masks(*_: Any, **__: Any) -> None:
    raise ValueError(
        "the weights of this model have masks, and from_pretrained would put random ones in their "
        "places: call remove_pruning(model) first"
    )


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _layers_to_prune(model: Any) -> dict[str, nn.Module]:
    """The layers whose weights pruning masks, by name. Raises ValueError where it may not be."""
    if hasattr(model, "peft_config"):  # an adapter of zeros never learns
        raise ValueError("the model has adapters: prune it before, or after merge_and_unload()")
    refuse_quantized(model, way_out="prune the model before that")
    if _pruned_layers(model):
        raise ValueError("this model is pruned already: call remove_pruning(model) first")
    _require_all_matrices(model)
    shared = _shared_weights(model)
    every = {name: module for name, module in model.named_modules() if isinstance(module, LAYERS)}
    return {name: module for name, module in every.items() if name not in shared}


def _require_all_matrices(model: nn.Module) -> None:
    """Raise ValueError for matrices that are no weight of the layers that are pruned."""
    for name, module in model.named_modules():
        if isinstance(module, (*LAYERS, nn.Embedding, parametrize.ParametrizationList)):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            # [1, ...] is a token or positions of an image, which every input gets.
            if parameter.dim() >= 2 and len(parameter) > 1:
                raise ValueError(
                    f"{name}.{own} {list(parameter.shape)} is a weight of {type(module).__name__}, "
                    f"which is not pruned: give a model whose matrices are linear layers"
                )


def _shared_weights(model: nn.Module) -> set[str]:
    """What pruning cannot mask: modules whose weight belongs to another module, too."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")  # without computing one that is made of others
        if weight is not None:
            owners.setdefault(id(weight), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _pruned_layers(model: nn.Module) -> list[nn.Module]:
    pruned = []
    for module in model.modules():
        if not parametrize.is_parametrized(module, "weight"):
            continue
        if any(isinstance(each, _MaskOfWeight) for each in module.parametrizations["weight"]):
            pruned.append(module)
    return pruned


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_compressed_share(*, share: float) -> float:
    """The best compressed file of a pruned model in fp32, as a share of the file without zeros.

    What stays needs its bits, and to say which weights stay takes the entropy of the mask,
    H(share) = -share log2 share - (1 - share) log2 (1 - share), at most one bit per weight. A real
    program comes near it; random bits of the weights themselves do not become smaller.
    """
    of_mask = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    return (1 - share) + of_mask / 32
