"""Which layers suffer from 8 bits: one group at a time is quantized, and the loss is measured.

    scan = sensitivity(model, documents, kind="dynamic", groups=groups_by_place(model))
    high = sensitive_layers(scan, most_change=0.01)
    names = [name for name in linear_layers(model) if name not in high]
    apply_int8(model, kind="dynamic", names=names)

The changes of single groups add up nearly, as long as they are small. So the groups that do most
damage stay in high precision, until the sum of the others is small enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from recipes_lib.core.checks import check_choice, check_number
from recipes_lib.core.linears import linear_layers, replace_linears
from recipes_lib.core.quality import decode_quality
from recipes_lib.precision.int8 import KINDS, int8_linear


class Sensitivity(NamedTuple):
    """What happens when one group is in 8 bits and the rest is as it was."""

    group: str
    names: tuple[str, ...]  # its layers
    loss_change: float  # nats per token: 0.01 is 1% of perplexity
    agreement: float  # share of tokens whose likeliest successor stays the same
    weights: int  # how many it has


def groups_by_place(model: Any) -> dict[str, list[str]]:
    """The linear layers by their place in a block, such as "down_proj"; the output layer alone."""
    groups: dict[str, list[str]] = {}
    for name in linear_layers(model):
        groups.setdefault(name.rpartition(".")[2], []).append(name)
    return groups


def groups_by_block(model: Any) -> dict[str, list[str]]:
    """The linear layers by the number of their block, such as "block 3"; others by their name."""
    groups: dict[str, list[str]] = {}
    for name in linear_layers(model):
        numbers = [part for part in name.split(".") if part.isdigit()]
        group = f"block {numbers[0]}" if numbers else name
        groups.setdefault(group, []).append(name)
    return groups


def sensitivity(
    model: Any,
    documents: Sequence[Sequence[int] | Tensor],
    *,
    kind: str,
    groups: Mapping[str, Iterable[str]],
    token_by_token: bool = False,
) -> list[Sensitivity]:
    """Measure each group of layers by itself; the one that does most damage comes first.

    `model` is as before when this returns, and when it fails. Of a scan with few documents take the
    order, not the last digit: the loss of the same model changes from text to text.

    Args:
        model: a causal LM in full precision, or a decoder, as `apply_int8` takes them.
        documents: lists of token ids, of text that nobody trained on.
        kind: as in `apply_int8`.
        groups: for each group the names of its layers: `groups_by_place(model)`,
            `groups_by_block(model)`, or one of your own.
        token_by_token: of a decoder: read as it decodes, with the activations of one token per
            call. Without it "dynamic" has one scale for a whole document.
    Raises ValueError for an unknown kind, names that are no linear layers, and no groups.
    """
    check_choice(KINDS, kind=kind)
    if not groups:
        raise ValueError("no groups: give groups_by_place(model) or groups_by_block(model)")
    options = {"token_by_token": token_by_token}
    full = decode_quality(model, documents, **options)
    found = []
    for group, names in groups.items():
        originals = _replace(model, list(names), kind)
        try:
            changed = decode_quality(model, documents, reference=full.predictions, **options)
        finally:
            _put_back(model, originals)
        found.append(
            Sensitivity(
                group,
                tuple(originals),
                math.log(changed.perplexity / full.perplexity),
                changed.agreement,
                sum(layer.weight.numel() for layer in originals.values()),
            )
        )
    return sorted(found, key=lambda one: -one.loss_change)


def sensitive_layers(scan: Iterable[Sensitivity], *, most_change: float) -> list[str]:
    """The layers to keep in high precision, so that the others change the loss by `most_change`.

    Groups are kept by the damage that they do per weight, the worst first, until the sum of the
    changes of the rest is at most `most_change` nats per token. A group whose loss became smaller
    counts as no change: that was luck.
    """
    check_number(least=0, most_change=most_change)
    left = sorted(scan, key=lambda one: one.loss_change / one.weights)
    high: list[str] = []
    while left and _damage(left) > most_change:
        high += left.pop().names
    return high


def _damage(groups: Iterable[Sensitivity]) -> float:
    return sum(max(0.0, group.loss_change) for group in groups)


def _replace(model: Any, names: list[str], kind: str) -> dict[str, Any]:
    """Quantize these layers; returns those that were there."""
    layers = linear_layers(model)
    originals = {name: layers[name] for name in names if name in layers}

    def make(name: str, linear: Any) -> Any:
        return int8_linear(linear, kind=kind)

    replace_linears(model, make, names=names)
    return originals


def _put_back(model: Any, originals: dict[str, Any]) -> None:
    for name, layer in originals.items():
        model.set_submodule(name, layer)
