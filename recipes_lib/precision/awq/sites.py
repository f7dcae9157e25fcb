"""Where the scales of AWQ can be folded exactly, and folding them.

A site is a layer and the linear layers that read its output, and nothing else reads it:

    norm -> q, k, v       norm -> gate, up       up -> down       v -> o

Which linear layers read a norm is found by running a few tokens: they are handed the very tensor
that the norm returned. The other two are found by the names that families of Llama's kind share.
Whether something else reads that tensor, or a family computes something between, nobody can see
from outside. So this technique has a probe of its own: `check_exact` scales all sites by powers of
two, which fp32 multiplies without rounding, compares the logits, and takes the scales out again to
the last bit.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.model.evaluating import evaluating

KEPT = 256  # tokens of the text, to compute errors with


@dataclass(frozen=True, eq=False)
class Site:
    """The layer `before`, and the linear layers that read it, by their names.

    `sources` [I] says which of the C channels of `before` an input channel comes from. It is None
    where they are the same; heads of queries that share a head of values read the same channels.
    """

    before: str
    linears: tuple[str, ...]
    sources: Tensor | None = None

    def spread(self, scales: Tensor) -> Tensor:
        """What is known of each channel of a site's `before` [C], for each input channel [I]."""
        if self.sources is None:
            return scales
        return scales[self.sources.to(scales.device)]

    def shared(self, values: Tensor) -> Tensor:
        """The mean over a site's input channels [I] that come from one channel of `before`: [C]."""
        if self.sources is None:
            return values
        sources = self.sources.to(values.device)
        sums = values.new_zeros(int(sources.max()) + 1).index_add(0, sources, values)
        return sums / sources.bincount()


@dataclass
class Seen:
    """What the layers of one site have read: mean |x| of each channel [I], and some rows [T, I]."""

    mean: Tensor
    rows: Tensor


# --- where scales can be folded -------------------------------------------------------------------


def find_sites(model: Any, names: Iterable[str]) -> list[Site]:
    """The sites that hold at least one of the linear layers `names`."""
    readers, calls = _readers_of_norms(model)
    # Not those that the text does not run through, for images or for an encoder.
    wanted = {name for name in names if calls[name]}
    found = [*_after_norms(model, readers, calls), *_after_gates(model), *_after_values(model)]
    sites = [site for site in found if wanted.intersection(site.linears)]
    if not sites:
        raise ValueError(
            f"{type(model).__name__}: none of its linear layers follows a layer that can take the "
            f"scales of AWQ: quantize it without them"
        )
    return sites


def _readers_of_norms(model: Any) -> tuple[dict[str, list[str]], Counter[str]]:
    """For sites: the linear layers that read the output of each norm; how often both ran."""
    norm_of: dict[int, str] = {}  # by the id of its output
    alive = []  # as long as a tensor lives, no other gets its id
    readers: dict[str, list[str]] = defaultdict(list)
    calls: Counter[str] = Counter()

    def wrote(name: str, output: Any) -> None:
        alive.append(output)
        norm_of[id(output)] = name
        calls[name] += 1

    def read(name: str, value: Any) -> None:
        calls[name] += 1
        if id(value) in norm_of:
            readers[norm_of[id(value)]].append(name)

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if "Norm" in type(module).__name__:
                hooks.enter_context(_on_output(module, name, wrote))
            elif isinstance(module, nn.Linear):
                hooks.enter_context(_on_input(module, name, read))
        _logits_beside_folding(model)
    return readers, calls


def _after_norms(model: Any, readers: dict[str, list[str]], calls: Counter[str]) -> Iterator[Site]:
    """Sites norm -> q, k, v or gate, up: all that reads a norm."""
    for norm, linears in readers.items():
        # What runs more than once in a pass has several inputs, and one weight.
        once = all(calls[name] == 1 for name in (norm, *linears))
        if once and _offset_of(model.get_submodule(norm)) is not None:
            yield Site(norm, tuple(linears))


def _after_gates(model: Any) -> Iterator[Site]:
    """Sites up -> down of gated feed-forward layers: down reads act(gate) * up."""
    for name, module in model.named_modules():
        gate, up, down = (_linear(module, part) for part in ("gate_proj", "up_proj", "down_proj"))
        if not (gate and up and down):
            continue
        if gate.out_features == up.out_features == down.in_features:
            yield Site(f"{name}.up_proj", (f"{name}.down_proj",))


def _after_values(model: Any) -> Iterator[Site]:
    """Sites v -> o: attention mixes tokens, not channels."""
    for name, module in model.named_modules():
        value = _linear(module, "v_proj")
        for part in ("o_proj", "out_proj"):
            output = _linear(module, part)
            if not (value and output):
                continue
            sources = _heads_of_values(module, value, output)
            if sources is not None:
                yield Site(f"{name}.v_proj", (f"{name}.{part}",), sources)


def _heads_of_values(attention: nn.Module, value: nn.Linear, output: nn.Linear) -> Tensor | None:
    """At a site v -> o: which output of v each input of o comes from [I]; None if unknown."""
    head_dim = getattr(attention, "head_dim", None)
    width = value.out_features
    if not isinstance(head_dim, int) or width % head_dim or output.in_features % width:
        return None
    heads = output.in_features // head_dim
    sharing = output.in_features // width  # heads of queries for each head of values
    head_of = torch.arange(heads) // sharing  # [heads]
    return (head_of[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _linear(module: nn.Module, part: str) -> nn.Linear | None:
    child = getattr(module, part, None)
    return child if isinstance(child, nn.Linear) else None


# --- folding --------------------------------------------------------------------------------------


@torch.no_grad()
def fold_scales(model: Any, site: Site, scales: Tensor) -> None:
    """Multiply the input channels of the site's layers by `scales` [C], and divide before them."""
    for name in site.linears:
        model.get_submodule(name).weight.mul_(site.spread(scales))  # [O, I]
    before = model.get_submodule(site.before)
    if isinstance(before, nn.Linear):
        before.weight.div_(scales[:, None])  # [C, I of before]
    else:
        # Gemma's norms multiply by 1 + weight.
        offset = _offset_of(before)
        before.weight.add_(offset).div_(scales).sub_(offset)
    if getattr(before, "bias", None) is not None:
        before.bias.div_(scales)


def _offset_of(norm: nn.Module) -> float | None:
    """Where scales fold into a norm: what it adds to its weight: 0, 1 in Gemma; None if neither."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.dim() != 1:
        return None
    x = torch.linspace(-1, 2, len(weight), device=weight.device)[None]
    for offset in (0.0, 1.0):
        swapped = {"weight": torch.full_like(weight, -offset)}
        if getattr(norm, "bias", None) is not None:
            swapped["bias"] = torch.zeros_like(norm.bias)
        if not torch.func.functional_call(norm, swapped, (x,)).any():
            return offset
    return None


@torch.no_grad()
def check_exact(model: Any, sites: list[Site]) -> None:
    """Raise ValueError unless scales can be folded into all `sites` without changing the logits.

    The model is as it was afterwards.
    """
    before = _logits_beside_folding(model)
    layers = {site: model.get_submodule(site.before) for site in sites}
    # 1 + weight is rounded, so norms get back what they had.
    norms = [layer.weight for layer in layers.values() if not isinstance(layer, nn.Linear)]
    kept = [weight.clone() for weight in norms]
    scales = {}
    for site, layer in layers.items():  # 1/2, 1 and 2 in turn, for each channel
        channels = torch.arange(len(layer.weight), device=layer.weight.device)
        scales[site] = 2.0 ** (channels % 3 - 1)
        fold_scales(model, site, scales[site])
    try:
        after = _logits_beside_folding(model)
    finally:
        for site, factors in scales.items():
            fold_scales(model, site, 1 / factors)
        for weight, value in zip(norms, kept):
            weight.copy_(value)
    error = (after - before).abs().max()
    # Of powers of two, only norms of 1 + weight leave an error at all: that of fp32.
    if not error <= 1e-3 * before.std():
        raise ValueError(
            f"{type(model).__name__} computes something between its norms and linear layers that "
            f"scales change: quantize it without AWQ"
        )


# --- running it -----------------------------------------------------------------------------------


def read_inputs(model: Any, sites: list[Site], batches: list[dict[str, Tensor]]) -> list[Seen]:
    """What the linear layers of each site read in `batches`, padding left out.

    KEPT rows stay, of every batch the same number, evenly spaced. All count for mean |x|.
    """
    sums: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    count = 0
    real = torch.empty(0, dtype=torch.bool)  # of the batch that runs: no padding, [B * S]
    share = max(1, KEPT // max(1, len(batches)))

    def read(name: str, value: Tensor) -> None:
        """Add up what a site's layer reads of a batch, and keep a share of the rows."""
        every = value.flatten(0, -2)  # [B * S, I]
        if len(every) != len(real):  # a family that puts tokens of its own before the text
            raise ValueError(f"{name} reads {len(every)} rows for {len(real)} tokens: leave it out")
        seen = every[real].float()  # [T, I]
        sums[name] = sums.get(name, 0) + seen.abs().sum(dim=0)
        kept = torch.linspace(0, len(seen) - 1, min(share, len(seen))).long()
        rows.setdefault(name, []).append(seen[kept.to(seen.device)])

    with contextlib.ExitStack() as hooks, evaluating(model):
        for site in sites:
            first = site.linears[0]  # the others read the same
            hooks.enter_context(_on_input(model.get_submodule(first), first, read))
        for batch in batches:
            ids = batch["input_ids"].to(model.device)
            mask = batch.get("attention_mask", torch.ones_like(ids)).to(model.device)
            real = mask.bool().flatten()
            count += int(real.sum())
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    firsts = [site.linears[0] for site in sites]
    return [Seen(sums[name] / count, torch.cat(rows[name])) for name in firsts]


def _logits_beside_folding(model: Any) -> Tensor:
    """The logits of a few tokens, which folding may not change."""
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.arange(1, 9, device=model.device)[None] % vocabulary  # [1, S]
    with evaluating(model):
        return model(input_ids=ids, use_cache=False).logits


@contextlib.contextmanager
def _on_input(module: nn.Module, name: str, act: Callable[[str, Any], None]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(lambda _, inputs: act(name, inputs[0]))
    with handle:
        yield


@contextlib.contextmanager
def _on_output(module: nn.Module, name: str, act: Callable[[str, Any], None]) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _, inputs, output: act(name, output))
    with handle:
        yield
