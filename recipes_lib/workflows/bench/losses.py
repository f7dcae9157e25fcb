"""Output layer and loss, forward and backward, in all ways that are here: seconds, bytes, error.

    plain              all logits at once, cross-entropy in fp32
    ours               recipes_lib.memory.chunked_cross_entropy
    torch              F.linear_cross_entropy (PyTorch 2.13 and newer) with its default options
    torch, 256 rows    the same with chunks of 256 rows
    TRL                the loss of its SFTTrainer, in tiles of 4,096 tokens and 32,768 words
    TRL, 2,048 words   the same with narrower tiles, which are faster and smaller on a CPU
    Liger              its fused kernel, on NVIDIA GPUs

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from recipes_lib.core.checks import check_whole
from recipes_lib.core.measure import PeakMemory, in_turns
from recipes_lib.core.measure.machine import machine
from recipes_lib.memory.chunked_cross_entropy import chunked_cross_entropy

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LossCost:
    """Seconds, bytes beside the inputs, and the relative error of the value, of one way.

    On a CPU, PyTorch's own fused loss is one operator, whose inside is not seen: its `peak_bytes`
    is None.
    """

    seconds: float
    peak_bytes: int | None
    error: float

    def __str__(self) -> str:
        size = "not seen"
        if self.peak_bytes is not None:
            size = f"{self.peak_bytes / 2**20:,.0f} MiB"
        return f"{self.seconds:8.3f} s {size:>12}   value off by {self.error:.0e}"


def compare_losses(
    *,
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
    chunk_size: int | None = None,
    rounds: int = 3,
) -> dict[str, LossCost]:
    """What each way costs, on random hidden states [T, D] and weights [V, D].

    The error is against fp64.

    Args:
        chunk_size: of our chunks; by default as many tokens as `chunked_cross_entropy` takes.
        rounds: of taking turns, of which the fastest counts.
    """
    check_whole(tokens=tokens, hidden=hidden, vocab=vocab, rounds=rounds)
    hidden_states = _random(tokens, hidden, dtype)  # [T, D]
    weight = _random(vocab, hidden, dtype)  # [V, D]
    targets = torch.randint(vocab, (tokens,), device=machine().device)  # [T]
    exact = _exact_loss(hidden_states, weight, targets)
    hidden_states.requires_grad_()
    weight.requires_grad_()
    inputs = (hidden_states, weight, targets)

    ways = _ways(chunk_size)
    values = {}
    peaks = {}
    for name, way in ways.items():
        values[name], peaks[name] = _value_and_peak(way, inputs)
        inside_is_seen = machine().device == "cuda" or not name.startswith("torch")
        if not inside_is_seen:
            peaks[name] = None

    hidden_states.grad = None
    weight.grad = None
    steps = {name: _step(way, inputs) for name, way in ways.items()}
    seconds = in_turns(steps, rounds=rounds)
    costs = {}
    for name in ways:
        error = abs(values[name] / exact - 1)
        costs[name] = LossCost(min(seconds[name]), peaks[name], error)
    return costs


def _random(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of such a size that the logits, sums over `width` products, have a variance of 1."""
    return torch.randn(rows, width, device=machine().device, dtype=dtype).div_(width**0.25)


def _exact_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> float:
    """The mean cross-entropy in fp64, 256 tokens at a time: all logits would be gigabytes."""
    weight = weight.double()
    total = 0.0
    for states, labels in zip(hidden.split(256), targets.split(256), strict=True):
        logits = states.double() @ weight.T  # [256, V]
        total += functional.cross_entropy(logits, labels, reduction="sum").item()
    return total / len(targets)


def _ways(chunk_size: int | None) -> dict[str, Way]:
    """The ways that are here, by name. Each takes hidden [T, D], weight [V, D], targets [T]."""

    def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy((hidden @ weight.T).float(), targets)

    def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(hidden, weight, targets, chunk_size=chunk_size)

    ways = {"plain": plain, "ours": ours}
    if hasattr(functional, "linear_cross_entropy"):
        ways["torch"] = _torch_way()
        ways["torch, 256 rows"] = _torch_way(chunking_method=None, batch_chunk_size=256)
    if importlib.util.find_spec("trl"):
        ways["TRL"] = _trl_way(words=32_768)
        ways["TRL, 2,048 words"] = _trl_way(words=2048)
    if machine().device == "cuda" and importlib.util.find_spec("liger_kernel"):
        ways["Liger"] = _liger_way()
    return ways


def _torch_way(**options: int | None) -> Way:
    # Without an options object, the function makes all logits.
    chunks = torch.nn.LinearCrossEntropyOptions(**options)

    def way(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.linear_cross_entropy(hidden, weight, targets, options=chunks)

    return way


def _trl_way(*, words: int) -> Way:
    from trl.kernels import ChunkedLogProbFunction

    # Its trainer also asks for entropy and accuracy. They are left out: no other way computes them.
    statistics = ()

    def way(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        bias = softcap = None
        log_probabilities, *_ = ChunkedLogProbFunction.apply(
            hidden, weight, bias, targets, 1.0, words, softcap, 1.0, statistics
        )
        return -log_probabilities.mean()

    return way


def _liger_way() -> Way:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def way(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets)
        return loss

    return way


def _value_and_peak(way: Way, inputs: tuple[torch.Tensor, ...]) -> tuple[float, int]:
    """The loss, and the peak bytes of forward and backward beside the inputs."""
    hidden, weight, _ = inputs
    hidden.grad = None
    weight.grad = None
    with PeakMemory() as memory:
        before = memory.current
        loss = way(*inputs)
        loss.backward()
    return loss.item(), memory.peak - before


def _step(way: Way, inputs: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    """Forward and backward, for the clock."""
    hidden, weight, _ = inputs

    def step() -> object:
        return torch.autograd.grad(way(*inputs), (hidden, weight))

    return step
