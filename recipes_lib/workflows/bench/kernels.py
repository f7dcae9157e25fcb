"""One part of a model in all ways that are here: seconds, bytes, error.

compare_losses   output layer and loss: all logits, chunks, PyTorch's and TRL's
compare_norms    one norm: plain, compiled and PyTorch's

Shapes: T tokens, D hidden, V vocabulary, N rows.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from recipes_lib.architecture.rms_norm import plain_rms_norm
from recipes_lib.core.measure import PeakMemory, in_turns, there_and_back
from recipes_lib.core.measure.free_memory import keep_freed_memory
from recipes_lib.core.measure.machine import machine, synchronize
from recipes_lib.memory.chunked_cross_entropy import chunked_cross_entropy

EPS = 1e-6  # of the norms

LossWay = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [T, D], weight [V, D], targets [T]
NormWay = Callable[[Tensor, Tensor], Tensor]  # x [N, D], weight [D]


def now() -> float:
    """A clock of which only differences mean something, for machines that are shared with others.

    On a CPU it shows the seconds that this thread has computed: what else runs does not count, and
    `torch.set_num_threads(1)` makes it fair. On a GPU it shows the time after all kernels.
    """
    if machine().device == "cpu":
        return time.thread_time()
    synchronize()
    return time.perf_counter()


def _peak_beside_inputs(step: Callable[[], Any]) -> tuple[Any, int]:
    """What a kernel returns, and the bytes that it holds at most beside its inputs."""
    with PeakMemory() as memory:
        before = memory.current
        result = step()
    return result, memory.peak - before


# --- output layer and loss ------------------------------------------------------------------------


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
    rounds: int = 3,
) -> dict[str, LossCost]:
    """What each kernel of the loss costs, forward and backward, on random [T, D] and [V, D].

    The error is against fp64.

    Args:
        rounds: of taking turns, of which the fastest counts.
    """
    hidden_states = _random(tokens, hidden, dtype)  # [T, D]
    weight = _random(vocab, hidden, dtype)  # [V, D]
    targets = torch.randint(vocab, (tokens,), device=machine().device)  # [T]
    exact = _exact_loss(hidden_states, weight, targets)
    inputs = (hidden_states.requires_grad_(), weight.requires_grad_())

    def forward_and_backward(way: LossWay) -> float:
        loss = way(*inputs, targets)
        torch.autograd.grad(loss, inputs)
        return loss.detach()

    steps = {}
    for name, way in _ways_to_lose().items():
        steps[name] = functools.partial(forward_and_backward, way)
    # The peaks come first: they warm up as well.
    found = {name: _peak_beside_inputs(step) for name, step in steps.items()}
    seconds = in_turns(steps, rounds=rounds)
    costs = {}
    for name, (value, peak) in found.items():
        inside_is_seen = machine().device == "cuda" or not name.startswith("torch")
        error = abs(value.item() / exact - 1)
        costs[name] = LossCost(min(seconds[name]), peak if inside_is_seen else None, error)
    return costs


def _random(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random inputs of kernels: logits, sums over `width` products, have a variance of 1."""
    return torch.randn(rows, width, device=machine().device, dtype=dtype).div_(width**0.25)


def _exact_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> float:
    """What kernels are compared with: the mean cross-entropy in fp64, 256 tokens at a time."""
    weight = weight.double()
    total = 0.0
    for states, labels in zip(hidden.split(256), targets.split(256), strict=True):
        logits = states.double() @ weight.T  # [256, V]
        total += functional.cross_entropy(logits, labels, reduction="sum").item()
    return total / len(targets)


def _ways_to_lose() -> dict[str, LossWay]:
    """The kernels of the loss that are here, by name."""

    def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy((hidden @ weight.T).float(), targets)

    ways = {"plain": plain, "ours": chunked_cross_entropy}
    if hasattr(functional, "linear_cross_entropy"):  # PyTorch 2.13 and newer
        ways["torch"] = _torch_way()
        ways["torch, 256 rows"] = _torch_way(chunking_method=None, batch_chunk_size=256)
    if importlib.util.find_spec("trl"):
        ways["TRL"] = _trl_way(words=32_768)  # as in its SFTTrainer
        ways["TRL, 2,048 words"] = _trl_way(words=2048)  # faster and smaller on a CPU
    return ways


def _torch_way(**options: int | None) -> LossWay:
    """A kernel to compare: PyTorch's own loss in chunks."""
    # Without an options object, the function makes all logits.
    chunks = torch.nn.LinearCrossEntropyOptions(**options)
    return functools.partial(functional.linear_cross_entropy, options=chunks)


def _trl_way(*, words: int) -> LossWay:
    """A kernel to compare: TRL's loss in chunks of words."""
    from trl.kernels import ChunkedLogProbFunction

    # Its trainer also asks for entropy and accuracy. They are left out: no other way computes them.
    no_statistics = ()

    def way(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        bias = softcap = None
        log_probabilities, *_ = ChunkedLogProbFunction.apply(
            hidden, weight, bias, targets, 1.0, words, softcap, 1.0, no_statistics
        )
        return -log_probabilities.mean()

    return way


# --- norms ----------------------------------------------------------------------------------------


class NormCost(NamedTuple):
    """Seconds of the fastest forward, the rate, and the largest error relative to fp64.

    The rate counts what a norm has to move: x is read once, and y is written once. A way that reads
    and writes more than that has a lower rate, and none is faster than the memory.
    """

    seconds: float
    bytes_per_second: float
    error: float

    def __str__(self) -> str:
        rate = self.bytes_per_second / 1e9
        return f"{1e3 * self.seconds:9.3f} ms {rate:9.1f} GB/s   off by {self.error:.0e}"


@torch.no_grad()
def compare_norms(*, rows: int, hidden: int, rounds: int = 20) -> dict[str, NormCost]:
    """What each kernel of the norm costs on random x [N, D] in fp32, with LayerNorm beside.

    On Linux the process keeps freed memory from then on. Otherwise each y would be new memory, and
    the system takes longer to hand that out, page by page, than a norm takes to fill it.

    Args:
        rows: take so many that x is larger than the caches, or one to see the price of a call.
        rounds: of taking turns, of which the fastest counts.
    """
    keep_freed_memory()
    device = machine().device
    x = torch.randn(rows, hidden, device=device)  # [N, D]
    weight = torch.rand(hidden, device=device).add(0.5)  # [D]
    ways = _ways_to_normalize(hidden)

    # It warms up, too.
    errors = {name: _error_of_norm(name, way, x, weight) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for names in there_and_back(list(ways), rounds=rounds):
        for name in names:
            start = now()
            ways[name](x, weight)
            seconds[name].append(now() - start)
    moved = 2 * x.nbytes  # read once, written once
    costs = {}
    for name, times in seconds.items():
        fastest = min(times)  # whatever else runs can only slow one
        costs[name] = NormCost(fastest, moved / fastest, errors[name])
    return costs


def _ways_to_normalize(hidden: int) -> dict[str, NormWay]:
    """The kernels of the norm that are here, by name."""

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return plain_rms_norm(x, weight, EPS)

    def pytorch(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (hidden,), weight, EPS)

    def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.layer_norm(x, (hidden,), weight, None, EPS)

    compiled = torch.compile(plain)
    return {"plain": plain, "PyTorch": pytorch, "LayerNorm": layer_norm, "compiled": compiled}


def _error_of_norm(name: str, way: NormWay, x: Tensor, weight: Tensor) -> float:
    """How far a kernel of the norm is from the formula in fp64, relative to the largest value."""
    wide = x.double()
    if name == "LayerNorm":
        exact = functional.layer_norm(wide, x.shape[-1:], weight.double(), None, EPS)
    else:
        exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
    return ((way(x, weight).double() - exact).abs().max() / exact.abs().max()).item()
