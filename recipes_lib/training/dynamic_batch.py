"""Dynamic batch: out of memory halves the micro-batch and doubles the accumulation.

Problem    The largest micro-batch that fits depends on the device, on what else runs there and on
           the longest sequence of today's batch, and one guess too many ends the run.
Idea       Try, and on out-of-memory try again with smaller micro-batches. The effective batch
           stays:

               k = 1   [ 8 x S ]                       out of memory: drop gradients and tensors
               k = 2   [ 4 x S ] + [ 4 x S ]           out of memory
               k = 4   [ 2 x S ] + ... + [ 2 x S ]     fits: the gradient of the same 8 rows

           A smaller *batch* with the same accumulation, which is what people do instead, changes
           the training: gradient noise, learning rate and steps per epoch belong to the effective
           batch.
Saves      (1 - 1/k) of activations and loss, where k is the smallest that fits, found by trying.
Costs      The failed attempts: each runs until memory ends. Afterwards nothing, if k is kept.
Use when   Memory is unknown or shared, or sequence lengths vary.
Not when   `predicted_micro_batches` tells k in advance. Not in several processes: one that repeats
           its step leaves the others waiting.
In production   `accelerate.utils.find_executable_batch_size` and
           `TrainingArguments(auto_find_batch_size=True)` restart the *whole training* with 0.9 of
           the batch size and leave the accumulation as it is.
Source     BlackHC/toma, "torch memory-adaptive algorithms", 2020; accelerate/utils/memory.py.

Shapes: B batch, S sequence, k micro-batches.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from recipes_lib.core.model.marks import GRADIENT_TAKER, STEPS_IN_BACKWARD, any_marked
from recipes_lib.core.model.random_states import random_states, set_random_states
from recipes_lib.core.ranks import world_size

# What torch says when memory ends in a library or driver call instead of its own allocator. A
# failure of NCCL is not listed: it breaks the communicator, so a repeated step cannot succeed.
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

# --- the idea: what a learner can copy ------------------------------------------------------------


def halve_until_it_fits(step: Callable[[int], Any], model: Any, *, batch_size: int) -> int:
    """Run `step(k)` with k = 1, 2, 4, … micro-batches until one fits, and return that k.

    What is missing here: other kinds of out-of-memory errors, batch sizes that are no power of two,
    and the random state, which a failed attempt has moved on.
    """
    micro_batches = 1
    while True:
        try:
            step(micro_batches)  # adds the gradient of the whole batch
            return micro_batches
        except torch.OutOfMemoryError:
            model.zero_grad()  # the attempt may have added the gradient of its first micro-batches
            if micro_batches == batch_size:
                raise  # one row at a time, and it does not fit
            micro_batches *= 2
        # Only here, outside of `except`, is the error gone, and with it the tensors it kept alive.


# --- the technique --------------------------------------------------------------------------------


class FittedStep(NamedTuple):
    """The `micro_batches` that fitted, and what the last attempt returned."""

    micro_batches: int
    result: Any


def fit_micro_batches(
    step: Callable[[int], Any],
    *,
    model: Any,
    batch_size: int,
    micro_batches: int = 1,
) -> FittedStep:
    """Run `step(k)` with the first k, from `micro_batches` upwards, that fits into memory.

    k goes to the next divisor of the batch size that at least doubles it. A failed attempt leaves
    nothing: its gradients and tensors are freed and the random state returns, so the attempt that
    fits gives what `step(k)` alone would have given.

        k = 1
        for batch in batches:
            fitted = fit_micro_batches(
                lambda k: accumulate_gradients(model, batch, micro_batches=k),
                model=model, batch_size=8, micro_batches=k,
            )
            k = fitted.micro_batches
            optimizer.step()
            optimizer.zero_grad()

    Args:
        step: adds the gradient of the whole batch in k micro-batches. It may run several times, so
            it reads no iterator, and leaves the optimizer's step to the caller.
        model: the module whose gradients `step` makes, of any kind.
        micro_batches: where to start; 1 or what fitted last time.
    """
    _require_that_it_can_be_repeated(model)
    before = random_states()
    versions = _writes_to_weights(model)  # to see whether `step` updates the weights
    while True:
        fits, outcome = _try_step(step, micro_batches)
        if fits:
            return FittedStep(micro_batches, outcome)

        _release_attempt(model, outcome)
        if _writes_to_weights(model) != versions:
            raise ValueError(
                "the step changed the weights and then ran out of memory, so it cannot be "
                "repeated: call optimizer.step() after fit_micro_batches, not inside"
            ) from outcome
        smaller = _next_divisor(micro_batches, batch_size)
        if smaller is None:
            raise torch.OutOfMemoryError(
                "even one row at a time does not fit, so it is not the batch that fills the "
                "memory: recipes_lib.workflows.out_of_memory_doctor.diagnose says what saves how "
                "much"
            ) from outcome
        micro_batches = smaller
        set_random_states(before)  # dropout draws what the first attempt drew


def _try_step(step: Callable[[int], Any], k: int) -> tuple[bool, Any]:
    """Whether so many micro-batches fit, and what `step` returned, or how memory ran out."""
    # The error leaves this function as a value: while Python handles one, its tensors stay alive.
    try:
        return True, step(k)
    except RuntimeError as error:
        reported = any(text in str(error) for text in OUT_OF_MEMORY)
        if not reported and not isinstance(error, torch.OutOfMemoryError):
            raise
        outcome = error
    return False, outcome


def _release_attempt(model: Any, error: BaseException | None) -> None:
    """Free what a failed attempt at a batch holds: gradients, and tensors in its traceback."""
    for parameter in model.parameters():
        parameter.grad = None
    # An error holds its traceback, that holds the frames of forward, and those their local tensors.
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()
    torch.cuda.empty_cache()  # the next attempt asks for blocks of other sizes


def _writes_to_weights(model: Any) -> list[int]:
    """How often an attempt wrote to each weight: an optimizer's step counts up."""
    return [parameter._version for parameter in model.parameters()]


def _next_divisor(k: int, batch_size: int) -> int | None:
    """The smallest divisor of the batch size that is at least twice k, or None after the last."""
    for larger in range(2 * k, batch_size + 1):
        if batch_size % larger == 0:
            return larger
    return None


def _require_that_it_can_be_repeated(model: Any) -> None:
    """A failed attempt at a batch must be able to take back what it did."""
    parameters = list(model.parameters())
    if any_marked(parameters, STEPS_IN_BACKWARD) or any_marked(parameters, GRADIENT_TAKER):
        raise ValueError("the optimizer takes gradients in backward: use one of the two")
    if any(parameter.grad is not None for parameter in parameters):
        raise ValueError("gradients are already there: call optimizer.zero_grad() first")
    if world_size() > 1:
        raise ValueError(
            "one process cannot repeat its step while the others wait for it: find micro_batches "
            "on one process and pass the same number to all"
        )


# --- in advance -----------------------------------------------------------------------------------


def predicted_micro_batches(
    peak: Callable[[int], int], *, batch_size: int, limit_bytes: int
) -> int:
    """The k that `fit_micro_batches` will find under `limit_bytes`, without running out of memory.

    `peak` gives the bytes of the step in k micro-batches, on tensors without data for instance:

        def peak(micro_batches):
            return predict(build_of(micro_batches)).peak
    """
    micro_batches = 1
    while True:
        needed = peak(micro_batches)
        if needed <= limit_bytes:
            return micro_batches
        smaller = _next_divisor(micro_batches, batch_size)
        if smaller is None:
            raise ValueError(
                f"one row needs {needed:,} bytes, limit_bytes={limit_bytes:,}: "
                f"micro-batches do not help"
            )
        micro_batches = smaller
