"""Which layers suffer from 8 bits: one group at a time is quantized, and what changes is measured.

    scan = sensitivity(model, documents, kind="dynamic", groups=groups_by_place(model))
    high = sensitive_layers(scan, most_divergence=0.01)
    names = [name for name in linear_layers(model) if name not in high]
    apply_int8(model, kind="dynamic", names=names)

The damage is the Kullback-Leibler divergence between the predictions before and after, per token:

    sum over the vocabulary of  p log(p / q)        p before, q after; in nats, never below zero

Why not the loss? On some text it grows at one token and falls at the next, so the change of its
mean is mostly chance. The divergence is what the loss grows by on the model's own predictions.

The damages of single groups add up nearly, as long as they are small. So the groups that do most
damage stay in high precision, until the sum of the others is small enough.

Source: Hinton et al., arXiv 1503.02531, for the divergence between two models' predictions;
llama.cpp's `perplexity --kl-divergence` compares quantized files by it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from recipes_lib.core.data.losses_and_answers import document_rows, next_token_logits
from recipes_lib.core.model.evaluating import evaluating
from recipes_lib.core.model.linears import layers_to_quantize, linear_layers, replace_linears
from recipes_lib.precision.int8 import int8_linear


class Sensitivity(NamedTuple):
    """What happens when one group is in 8 bits and the rest is as it was."""

    group: str
    names: tuple[str, ...]  # its layers
    divergence: float  # nats per token: 0.01 is 1% of perplexity, on the model's own predictions
    agreement: float  # share of tokens whose likeliest successor stays the same
    weights: int  # how many it has


def groups_by_place(model: Any) -> dict[str, list[str]]:
    """The linear layers by their place in a block, such as "down_proj"; the output layer alone."""
    groups: dict[str, list[str]] = {}
    for name in linear_layers(model):
        groups.setdefault(name.rpartition(".")[2], []).append(name)
    return groups


def sensitivity(
    model: Any,
    documents: Sequence[Sequence[int] | Tensor],
    *,
    kind: str,
    groups: Mapping[str, Iterable[str]],
) -> list[Sensitivity]:
    """Measure each group of layers by itself; the one that does most damage comes first."""
    rows = document_rows(model, documents)
    # All names before the first group: a wrong one would be found after minutes of reading.
    names_of = {group: layers_to_quantize(model, names) for group, names in groups.items()}
    before = _log_probabilities(model, rows)
    found = []
    for group, names in names_of.items():
        originals = {name: model.get_submodule(name) for name in names}
        replace_linears(model, functools.partial(int8_linear, kind=kind), names=names)
        try:
            after = _log_probabilities(model, rows)
        finally:
            for name, layer in originals.items():
                model.set_submodule(name, layer)
        weights = sum(layer.weight.numel() for layer in originals.values())
        agreement = (before.argmax(-1) == after.argmax(-1)).double().mean().item()
        divergence = functional.kl_div(after, before, log_target=True, reduction="batchmean").item()
        divergence = max(0.0, divergence)  # rounding may bring one of nothing below zero
        found.append(Sensitivity(group, tuple(originals), divergence, agreement, weights))
    return sorted(found, key=lambda one: -one.divergence)


def _log_probabilities(model: Any, rows: list[Tensor]) -> Tensor:
    logits = []
    with evaluating(model):
        for row in rows:
            logits += [of_call.float() for of_call, _targets in next_token_logits(model, row)]
    return torch.cat(logits).log_softmax(-1)


def sensitive_layers(scan: Iterable[Sensitivity], *, most_divergence: float) -> list[str]:
    """The layers to keep in high precision, so that the others move the predictions little."""
    left = sorted(scan, key=lambda one: one.divergence / one.weights)
    high: list[str] = []
    while sum(group.divergence for group in left) > most_divergence:
        high += left.pop().names
    return high
