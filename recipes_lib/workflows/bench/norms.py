"""One norm, forward, in all ways that are here: seconds, gigabytes per second, error.

    plain       recipes_lib.architecture.rms_norm.plain_rms_norm, operator after operator
    compiled    the same function under torch.compile
    PyTorch     torch.nn.functional.rms_norm
    Liger       its kernel, on NVIDIA GPUs
    LayerNorm   torch.nn.functional.layer_norm, which computes something else

The rate counts what a norm has to move: x is read once, and y is written once. A way that reads and
writes more than that in between has a lower rate, and none is faster than the memory.

Shapes: N rows, D hidden.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from recipes_lib.architecture.rms_norm import plain_rms_norm, predicted_norm_bytes
from recipes_lib.core.checks import check_flag, check_whole
from recipes_lib.core.measure import there_and_back
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.measure.memory import keep_freed_memory
from recipes_lib.workflows.bench.clock import now

EPS = 1e-6

Way = Callable[[Tensor, Tensor], Tensor]


class NormCost(NamedTuple):
    """Seconds of the fastest forward, the rate, and the largest error relative to fp64."""

    seconds: float
    bytes_per_second: float
    error: float

    def __str__(self) -> str:
        rate = self.bytes_per_second / 1e9
        return f"{1e3 * self.seconds:9.3f} ms {rate:9.1f} GB/s   off by {self.error:.0e}"


@torch.no_grad()
def compare_norms(
    *,
    rows: int,
    hidden: int,
    dtype: torch.dtype = torch.float32,
    rounds: int = 20,
    compiled: bool = True,
) -> dict[str, NormCost]:
    """What each way costs on random x [N, D].

    On Linux the process keeps freed memory from then on. Otherwise each y would be new memory, and
    the system takes longer to hand that out, page by page, than a norm takes to fill it.

    Args:
        rows: take so many that x is larger than the caches, or one to see the price of a call.
        rounds: of taking turns, of which the fastest counts.
        compiled: False leaves that way out, which takes seconds to compile.
    Raises ValueError for sizes below 1.
    """
    check_flag(compiled=compiled)
    check_whole(rows=rows, hidden=hidden, rounds=rounds)
    keep_freed_memory()
    device = machine().device
    x = torch.randn(rows, hidden, device=device).to(dtype)  # [N, D]
    weight = torch.rand(hidden, device=device).add(0.5).to(dtype)  # [D]
    ways = _ways(hidden, compiled=compiled)

    errors = {name: _error(name, way, x, weight) for name, way in ways.items()}  # it warms up, too
    steps = {name: _step(way, x, weight) for name, way in ways.items()}
    moved = predicted_norm_bytes(rows=rows, hidden=hidden, itemsize=dtype.itemsize, fused=True)
    costs = {}
    for name, seconds in _fastest(steps, rounds=rounds).items():
        costs[name] = NormCost(seconds, moved / seconds, errors[name])
    return costs


def _fastest(steps: dict[str, Callable[[], None]], *, rounds: int) -> dict[str, float]:
    """Seconds of the fastest call of each: whatever else runs can only slow one."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for names in there_and_back(list(steps), rounds=rounds):
        for name in names:
            start = now()
            steps[name]()
            seconds[name].append(now() - start)
    return {name: min(times) for name, times in seconds.items()}


def _ways(hidden: int, *, compiled: bool) -> dict[str, Way]:
    """The ways that are here, by name; each takes x [N, D] and weight [D]."""

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return plain_rms_norm(x, weight, EPS)

    def pytorch(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (hidden,), weight, EPS)

    def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.layer_norm(x, (hidden,), weight, None, EPS)

    ways = {"plain": plain, "PyTorch": pytorch, "LayerNorm": layer_norm}
    if compiled:
        ways["compiled"] = torch.compile(plain)
    if machine().device == "cuda" and importlib.util.find_spec("liger_kernel"):
        ways["Liger"] = _liger_way()
    return ways


def _liger_way() -> Way:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def way(x: Tensor, weight: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(x, weight, EPS)

    return way


def _step(way: Way, x: Tensor, weight: Tensor) -> Callable[[], None]:
    def step() -> None:
        way(x, weight)

    return step


def _error(name: str, way: Way, x: Tensor, weight: Tensor) -> float:
    """The largest difference to the formula in fp64, relative to the largest value."""
    wide = x.double()
    if name == "LayerNorm":
        exact = functional.layer_norm(wide, x.shape[-1:], weight.double(), None, EPS)
    else:
        exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
    return ((way(x, weight).double() - exact).abs().max() / exact.abs().max()).item()
