"""AWQ: before rounding to four bits, scale up the weights that large activations meet.

Problem    Rounding treats all weights of a group alike, but their errors do not count alike: the
           error of a weight is multiplied by its activation, and in a few channels activations are
           many times larger than in the others.
Idea       Multiply the weights of input channel i by s_i, and divide what comes in by s_i. Without
           rounding nothing changes. With it, the steps of the group stay about the same while the
           weight is s_i times as large, so its error is about s_i times smaller:

               y = W x = (W diag(s)) (x / s)           s_i = mean |x_i| ** alpha

           alpha is between 0 (no scaling) and 1, and the one with the least error of the layer's
           output on some text is taken. Dividing costs nothing at run time, as 1 / s goes into the
           layer before:

               norm -> q, k, v        the weight of the norm
               norm -> gate, up       the weight of the norm
               up   -> down           rows of up, as down reads act(gate) * up
               v    -> o              rows of v; heads of queries that share a head of keys and
                                      values share its scales
Saves      Part of the loss of quality of four bits, at the same size and speed.
Costs      A pass over some calibration text, and a search with a rounding per layer and alpha.
           The scales suit that text. Channels that are scaled up widen the steps of their
           neighbours in the group.
Use when   Rounding to nearest costs quality: large groups, a symmetric grid, small models.
Not when   Rounding costs nothing worth mentioning. Linear layers that follow no norm, or a
           non-linear function: nothing before them can take the scales exactly. Their layers are
           left as they are, and a model that has no others is refused.
In production   `llmcompressor` `AWQModifier`, which writes checkpoints that vLLM reads; torchao
           `AWQConfig`; AutoAWQ (archived). They search the clipping of weights, too.
Source     Lin et al., "AWQ: Activation-aware Weight Quantization", arXiv 2306.00978, section 3.2.
           There v -> o is left out unless both have the same shape.

`apply_awq` scales and does not round. The model computes what it did, and `apply_int4` with the
same group and grid comes next.

I input channels, C channels of the layer before (C = I but for shared heads), O outputs, T tokens.

sites  where these scales can be folded exactly
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipes_lib.core.model.causal_lm import require_causal_lm
from recipes_lib.core.model.linears import layers_to_quantize, linear_layers
from recipes_lib.precision._four_bit_grid import check_groups, in_four_bits
from recipes_lib.precision.awq.sites import (
    Seen,
    Site,
    check_exact,
    find_sites,
    fold_scales,
    read_inputs,
)

ALPHAS = [number / 10 for number in range(11)]  # from 0, no scaling, to 1

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_awq_scales(weight: Tensor, inputs: Tensor, *, group: int = 32) -> Tensor:
    """The best scales [in] for one layer: `weight` [out, in], calibration `inputs` [tokens, in]."""
    importance = inputs.abs().mean(dim=0)  # [in]
    exact = inputs @ weight.T  # [tokens, out]
    errors = {}
    for alpha in ALPHAS:
        scales = importance**alpha
        rounded = in_four_bits(weight * scales, group=group)
        error = ((inputs / scales) @ rounded.T - exact).square().sum()
        errors[alpha] = error.item()
    best = min(errors, key=errors.get)
    return importance**best


# --- the technique --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Choice:
    """What the search has found for the layers that read one input."""

    site: Site
    alpha: float
    scales: Tensor  # [C]
    error: float
    rounded: float


def apply_awq(
    model: Any,
    batches: Iterable[dict[str, Tensor]],
    *,
    group: int = 32,
    symmetric: bool = False,
) -> Any:
    """Scale the weights of `model` in place for `apply_int4` with the same group and grid.

    Args:
        batches: calibration text: tensors [B, S] as the model takes them. Labels are not used,
            padding under an `attention_mask` does not count.
    """
    for choice in search_scales(model, batches, group=group, symmetric=symmetric):
        fold_scales(model, choice.site, choice.scales)
    return model


def search_scales(
    model: Any,
    batches: Iterable[dict[str, Tensor]],
    *,
    group: int = 32,
    symmetric: bool = False,
) -> list[Choice]:
    """What `apply_awq` would fold, one choice for each input that layers share; changes nothing."""
    require_causal_lm(model)
    way_out = "give the model in full precision; after apply_awq comes apply_int4"
    names = layers_to_quantize(model, None, way_out=way_out)
    check_groups(linear_layers(model), names, group)
    if model.dtype is not torch.float32:
        raise ValueError(
            f"weights in {model.dtype}: call model.float() first, as scales that are folded into "
            f"16-bit weights would be rounded"
        )
    sites = find_sites(model, names)
    check_exact(model, sites)

    grid = {"group": group, "symmetric": symmetric}
    inputs = read_inputs(model, sites, list(batches))
    return [_best_alpha(model, site, seen, grid) for site, seen in zip(sites, inputs)]


@torch.no_grad()
def _best_alpha(model: Any, site: Site, seen: Seen, grid: dict[str, Any]) -> Choice:
    """Try every alpha on the layers of one site: the mean squared error of what they put out."""
    importance = site.shared(seen.mean)  # [C]
    errors = dict.fromkeys(ALPHAS, 0.0)
    for alpha in ALPHAS:
        scales = site.spread(scales_of(importance, alpha))  # [I]
        for name in site.linears:
            weight = model.get_submodule(name).weight  # [O, I]
            rounded = in_four_bits(weight * scales, **grid) / scales
            errors[alpha] += (seen.rows @ (rounded - weight).T).square().mean().item()
    alpha = min(errors, key=errors.get)
    return Choice(site, alpha, scales_of(importance, alpha), errors[alpha], errors[0.0])


def scales_of(importance: Tensor, alpha: float) -> Tensor:
    """AWQ's scales: importance [C] to the power of alpha, around 1 in the geometric mean.

    A common factor changes nothing, and numbers around 1 keep the weights of norms in their range.
    A channel that never sees anything gets a small scale instead of 0.
    """
    least = importance.mean() * 1e-4 + torch.finfo(torch.float32).tiny
    logarithms = alpha * importance.clamp(min=least.item()).log()
    return (logarithms - logarithms.mean()).exp()
