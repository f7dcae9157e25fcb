"""Measure the attention of one layer: plain attention beside the best kernel of this machine.

Shapes: H heads, KV key and value heads, S sequence, E head dimension.
"""

from __future__ import annotations

import functools
import statistics
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes_lib.attention.flash import best_kernel, kernel_function, plain_attention
from recipes_lib.core.checks import check_flag, check_whole
from recipes_lib.core.measure import PeakMemory, in_turns
from recipes_lib.core.model.causal_lm import projection_widths


class AttentionCost(NamedTuple):
    """What the attention of one layer costs, without its projections."""

    forward_seconds: float
    backward_seconds: float
    tflops: float  # of both passes together
    peak_bytes: int  # beside Q, K and V


def measure_attention(
    model: Any, *, seq_len: int, eager: bool = True, rounds: int = 3
) -> dict[str, AttentionCost]:
    """Attention of one row [1, seq_len] in one layer, in the model's shape, dtype and place.

    The keys are "eager", which is `plain_attention`, and the name of the best kernel. With
    eager=False only that is measured: at some length the scores do not fit any more.
    Raises ValueError for a length or a number of rounds below 1.
    """
    check_flag(eager=eager)
    check_whole(seq_len=seq_len, rounds=rounds)
    qkv = _random_qkv(model, seq_len)
    kernel = best_kernel(model).implementation
    attentions = {kernel: functools.partial(_attend, model, kernel)}
    if eager:
        attentions = {"eager": plain_attention} | attentions

    # The peaks come first: they warm up as well.
    peaks = {name: _peak(attend, qkv) for name, attend in attentions.items()}
    steps = {}
    for name, attend in attentions.items():
        steps[name, "forward"] = functools.partial(_step, attend, qkv, backward=False)
        steps[name, "both"] = functools.partial(_step, attend, qkv, backward=True)
    turns = in_turns(steps, rounds=rounds)
    seconds = {step: statistics.median(times) for step, times in turns.items()}

    operations = _operations(model, seq_len)
    costs = {}
    for name, peak in peaks.items():
        forward = seconds[name, "forward"]
        both = seconds[name, "both"]
        costs[name] = AttentionCost(forward, both - forward, operations / both / 1e12, peak)
    return costs


def _random_qkv(model: Any, seq_len: int) -> list[Tensor]:
    """Q [1, H, S, E], K and V [1, KV, S, E], as views into [1, S, heads, E]: a model's layout."""
    width, kv_width, _ = projection_widths(model.config)
    head_dim = width // model.config.num_attention_heads
    qkv = []
    for each in (width, kv_width, kv_width):
        shape = (1, seq_len, each // head_dim, head_dim)
        tensor = torch.randn(shape, dtype=model.dtype, device=model.device)
        qkv.append(tensor.transpose(1, 2).requires_grad_())
    return qkv


def _attend(model: Any, kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The kernel as a layer of the model would call it, without a mask."""
    module = SimpleNamespace(
        is_causal=True,
        num_key_value_groups=q.shape[1] // k.shape[1],
        config=SimpleNamespace(_attn_implementation=kernel),
    )
    out, _ = kernel_function(kernel)(module, q, k, v, None)
    return out


def _step(attend: Any, qkv: list[Tensor], *, backward: bool) -> None:
    out = attend(*qkv)
    if backward:
        torch.autograd.grad(out.sum(), qkv)


def _peak(attend: Any, qkv: list[Tensor]) -> int:
    """Bytes that a forward and a backward hold at most, beside Q, K and V."""
    with PeakMemory() as memory:
        before = memory.current
        _step(attend, qkv, backward=True)
    return memory.peak - before


def _operations(model: Any, seq_len: int) -> float:
    """Of both passes: forward 4 S^2 H E / 2, because it is causal, and backward 2.5 times that."""
    width, _, _ = projection_widths(model.config)
    forward = 4 * seq_len**2 * width / 2
    return 3.5 * forward
