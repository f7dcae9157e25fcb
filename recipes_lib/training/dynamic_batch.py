"""Dynamic batch: out of memory halves the micro-batch and doubles the accumulation.

Problem    The largest micro-batch that fits depends on the device, on what else runs there and on the longest
           sequence of today's batch, and one guess too many ends the run.
Idea       Try, and on out-of-memory try again with smaller micro-batches. The effective batch stays:

               k = 1   [ 8 x S ]                          out of memory: drop its gradients, free its tensors
               k = 2   [ 4 x S ] + [ 4 x S ]              out of memory
               k = 4   [ 2 x S ] + ... + [ 2 x S ]        fits, and is the gradient of the same 8 rows

           What people do instead, a smaller *batch* with the same accumulation, changes the training:
           gradient noise, learning rate and the number of steps per epoch belong to the effective batch.
Saves      (1 - 1/k) of activations and loss, with the smallest k that fits found at run time.
Costs      The failed attempts: each runs until memory ends. Afterwards nothing, if k is kept.
Use when   Memory is unknown or shared, or sequence lengths vary. Not when `estimate_dynamic_batch` tells k in
           advance, and not in several processes: one that repeats its step leaves the others waiting.
In production   `accelerate.utils.find_executable_batch_size` and `TrainingArguments(auto_find_batch_size=True)`
           restart the *whole training* with 0.9 of the batch size and leave the accumulation as it is.
Source     BlackHC/toma, "torch memory-adaptive algorithms", 2020; accelerate/utils/memory.py.

Shapes: B batch, S sequence, k micro-batches.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.measure import PeakMemory
from recipes_lib.training.gradient_accumulation import split_budget

# What torch says when memory ends in a library or driver call instead of its own allocator. An NCCL failure
# is left out on purpose: afterwards its communicator is broken and a repeated step cannot succeed.
OUT_OF_MEMORY = (
    "CUDA out of memory",
    "HIP out of memory",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


@dataclass(frozen=True)
class Attempt:
    """One try: its `micro_batches`, whether it `fits`, and its peak bytes where they were measured."""

    micro_batches: int
    fits: bool
    peak_bytes: int | None

    def __str__(self) -> str:
        peak = f", peak {self.peak_bytes / 2**20:,.0f} MiB" if self.peak_bytes else ""
        return (
            f"{self.micro_batches} micro-batches: {'fits' if self.fits else 'out of memory'}{peak}"
        )


@dataclass(frozen=True)
class FittedStep:
    """The `micro_batches` that fitted, all attempts in order, and what the last one returned."""

    micro_batches: int
    attempts: list[Attempt]
    result: Any


def fit_micro_batches(
    step: Callable[[int], Any],
    *,
    model: Any,
    batch_size: int,
    micro_batches: int = 1,
    measure_peaks: bool = False,
) -> FittedStep:
    """Run `step(k)` with the first k, from `micro_batches` upwards, that fits into memory.

    k goes to the next divisor of the batch size that at least doubles it. A failed attempt leaves nothing:
    its gradients and tensors are freed and the random state returns, so the attempt that fits gives what
    `step(k)` alone would have given.

        k = 1
        for batch in batches:
            fitted = fit_micro_batches(
                lambda k: accumulate_gradients(model, batch, micro_batches=k),
                model=model, batch_size=8, micro_batches=k,
            )
            k = fitted.micro_batches
            optimizer.step(), optimizer.zero_grad()

    Args:
        step: adds the gradient of the whole batch in k micro-batches. It may run several times, so it
            takes the batch as it is given (reads no iterator) and leaves the optimizer's step to the caller.
        micro_batches: where to start; 1 or what fitted last time.
        measure_peaks: record the peak bytes of each attempt; on a CPU, every call then looks through all tensors.
    Raises ValueError if k does not divide the batch, if gradients are already there (a failed attempt could
    not be told from them), if the optimizer steps inside, or in several processes; torch.OutOfMemoryError
    if even micro-batches of one row do not fit. Any other error of `step` passes through.
    """
    _check(model, batch_size, micro_batches)
    cpu_random = torch.get_rng_state()
    cuda_random = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    versions = [p._version for p in model.parameters()]
    attempts: list[Attempt] = []
    while True:
        memory = PeakMemory() if measure_peaks else contextlib.nullcontext()
        failure = None
        try:
            with memory:
                result = step(micro_batches)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        attempts.append(Attempt(micro_batches, failure is None, getattr(memory, "peak", None)))
        if failure is None:
            return FittedStep(micro_batches, attempts, result)
        _release(model, failure)
        if [p._version for p in model.parameters()] != versions:
            raise ValueError(
                "the step changed the weights and then ran out of memory, so it cannot be repeated: call "
                "optimizer.step() after fit_micro_batches, not inside"
            ) from failure
        smaller = _next_divisor(micro_batches, batch_size)
        if smaller is None:
            raise torch.OutOfMemoryError(
                f"even one row at a time does not fit ({'; '.join(map(str, attempts))}). The batch is no longer what "
                f"fills the memory: checkpoint the activations, shorten the sequences or shrink the optimizer states; "
                f"recipes_lib.memory.out_of_memory_doctor.diagnose says what saves how much"
            ) from failure
        micro_batches = smaller
        torch.set_rng_state(cpu_random)
        torch.cuda.set_rng_state_all(cuda_random)


def is_out_of_memory(error: BaseException) -> bool:
    """True for torch.OutOfMemoryError and for a RuntimeError with one of the texts of OUT_OF_MEMORY."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def estimate_dynamic_batch(
    budget: Budget, model: Any, *, batch_size: int, seq_len: int, limit_bytes: int
) -> int:
    """The k that `fit_micro_batches` will find under `limit_bytes`, from the budget of the full batch.

    Raises ValueError if the arithmetic finds none; it is not exact, so near a limit try.
    """
    plan, k = budget, 1
    while plan.peak > limit_bytes:
        smaller = _next_divisor(k, batch_size)
        if smaller is None:
            raise ValueError(
                f"one row needs {plan.peak:,} bytes, limit_bytes={limit_bytes:,}: micro-batches do not help"
            )
        k = smaller
        plan = split_budget(budget, model, batch_size=batch_size, seq_len=seq_len, micro_batches=k)
    return k


def _check(model: Any, batch_size: int, micro_batches: int) -> None:
    if micro_batches < 1 or batch_size < 1 or batch_size % micro_batches:
        raise ValueError(
            f"micro_batches={micro_batches} must be 1 or more and divide batch_size={batch_size}"
        )
    if any(
        getattr(p, "steps_in_backward", False) or hasattr(p, "offloaded_optimizer")
        for p in model.parameters()
    ):
        raise ValueError(
            "the optimizer takes gradients in backward, so a failed step cannot be taken back: use one of the two"
        )
    if any(p.grad is not None for p in model.parameters()):
        raise ValueError(
            "gradients are already there, and a failed attempt must be able to drop its own: call "
            "optimizer.step() and optimizer.zero_grad() first"
        )
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1:
        raise ValueError(
            "one process cannot repeat its step while the others wait for it: find micro_batches on one "
            "process and pass the same number to all"
        )


def _release(model: Any, error: BaseException | None) -> None:
    """Free what a failed attempt holds: gradients, and the tensors in the frames of its traceback."""
    for parameter in model.parameters():
        parameter.grad = None
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()
    torch.cuda.empty_cache()  # the next attempt asks for blocks of other sizes


def _next_divisor(k: int, batch_size: int) -> int | None:
    """The smallest divisor of the batch size that is at least twice k, or None after the last."""
    return next((d for d in range(2 * k, batch_size + 1) if batch_size % d == 0), None)
