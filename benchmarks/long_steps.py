"""Whole training steps as long as memory allows: the ladder of the record, and QLoRA on one card.

The record is ArcticTraining's: Llama-3.1-8B, all parameters trained, on one H200, from 65 thousand
tokens in plain transformers to 1.2 million with a fused loss, checkpoints on the host and a tiled
MLP.

Like those of `long_sequences`, each part yields its content whenever there is more of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.long_sequences import training_dtype
from recipes_lib.attention.flash import apply_flash_attention
from recipes_lib.attention.head_groups import apply_head_groups
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.machine import GIB, machine, seed_everything
from recipes_lib.core.measure.memory import release_memory
from recipes_lib.core.model import SHAPES, model_of_shape
from recipes_lib.core.predict import Build, predict
from recipes_lib.core.predict.any_size import any_size
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing, best_group
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.pure_bf16 import bf16_adamw
from recipes_lib.training.curriculum import flops_per_token
from recipes_lib.workflows.longest import find_longest, peak_of

LEAST_BYTES = 4096  # of what goes to the host
CLOSE = 0.01  # lengths that differ by less are the same prediction
MOST_TILES = 64  # of a step without data: each has operators of its own, which take seconds

# --- one full-parameter step --------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """A full-parameter step with flash attention, checkpoints and the step in backward.

    `offload` lets the checkpoints wait on the host, on a machine without GPU on the disk.
    """

    shape: str
    tile: int  # tokens
    chunked_loss: bool = False
    tiled_mlp: bool = False
    tiled_norms: bool = False
    offload: bool = False
    group: int = 1  # blocks of a nested checkpoint; 1 checkpoints each by itself

    def build(
        self, *, layers: int | None, tokens: int, dtype: torch.dtype, device: str | None = None
    ) -> Build:
        """`build` of `core.predict`, which trains all weights."""
        return partial(self._built, layers, tokens, dtype, device)

    def _built(
        self, layers: int | None, tokens: int, dtype: torch.dtype, device: str | None
    ) -> tuple[Any, Any, Callable[..., tuple[torch.Tensor, int]]]:
        seed_everything(0)
        model = model_of_shape(self.shape, layers=layers, dtype=dtype, device=device)
        apply_flash_attention(model)
        if self.chunked_loss:
            apply_chunked_cross_entropy(model)
        if self.tiled_mlp:
            apply_tiled_mlp(model, tile_size=min(self.tile, tokens), norms=self.tiled_norms)
        if self.group > 1:
            apply_nested_checkpointing(model, group=self.group)
        else:
            apply_activation_checkpointing(model)
        optimizer_class = torch.optim.AdamW
        if dtype == torch.bfloat16:
            optimizer_class = partial(bf16_adamw, rounding="stochastic")
        optimizer = apply_optimizer_in_backward(model, optimizer_class=optimizer_class, lr=1e-5)
        return model, optimizer, partial(self._step, tokens=tokens)

    def _step(self, model: Any, optimizer: Any, *, tokens: int) -> tuple[torch.Tensor, int]:
        """The loss, and the bytes that were moved."""
        ids = made_up_ids(model, tokens)
        surroundings = contextlib.nullcontext()
        if self.offload:
            away = {"to": elsewhere(model), "min_bytes": LEAST_BYTES, "in_flight": 1}
            surroundings = offload_activations(model, **away)
        with surroundings as moved:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        optimizer.step()
        return loss.detach(), 0 if moved is None else moved.moved_bytes


def full_parameter_step(stack: Stack, layers: int | None, tokens: int) -> dict[str, Any]:
    """Take one step of so many tokens, in bf16 with stochastic rounding where the device has it."""
    model, optimizer, step = stack.build(layers=layers, tokens=tokens, dtype=training_dtype())()
    step(model, optimizer, tokens=256)  # makes the states
    start = time.perf_counter()
    with PeakMemory() as memory:
        loss, moved_bytes = step(model, optimizer)
        loss = loss.item()
    seconds = time.perf_counter() - start
    operations = tokens * flops_per_token(model, seq_len=tokens)
    return {
        "tokens": tokens,
        "peak_gib": memory.peak / GIB,
        "host_gib": moved_bytes / GIB,
        "seconds": seconds,
        "tflops": operations / seconds / 1e12,
        "loss": loss,
    }


def predicted_tokens(
    stack: Stack, layers: int | None, *, limit_bytes: int, dtype: torch.dtype | None = None
) -> int:
    """The longest text whose step is predicted to stay below a limit.

    Bytes at each moment grow evenly with tokens, so the line through two lengths says where they
    reach the limit. Another moment may be the highest there: then the line through that length is
    the right one.
    """
    layers = layers or SHAPES[stack.shape].layers
    on = {"dtype": dtype or training_dtype(), "device": "cpu"}
    few, more = 4 * stack.tile, 8 * stack.tile
    of_few = predicted_peak(stack, layers, few, **on)
    for _ in range(3):
        of_more = predicted_peak(stack, layers, more, **on)
        per_token = (of_more - of_few) / (more - few)
        found = int(more + (limit_bytes - of_more) / per_token)
        nearer = min(found, MOST_TILES * stack.tile)
        if abs(nearer - more) <= CLOSE * more:
            break
        few, more, of_few = more, nearer, of_more
    return found


def predicted_peak(stack: Stack, layers: int, tokens: int, **on: Any) -> int:
    """Bytes of a step, from a few blocks where it has many."""
    build_of = partial(stack.build, tokens=tokens, **on)
    period = stack.group
    few = layers % period + 2 * period
    if layers <= few + 2 * period:
        return predict(build_of(layers=layers)).peak
    return any_size(build_of, layers=(few, few + period)).peak(layers=layers)


def made_up_ids(model: Any, tokens: int) -> torch.Tensor:
    """A row of different tokens [1, tokens], of any length."""
    positions = torch.arange(tokens, device=model.device)[None]
    return positions * 7919 % model.config.vocab_size  # a prime: neighbours are far apart


def elsewhere(model: Any) -> str:
    """Where what is offloaded waits: a CPU has no other memory than its own, so there the disk."""
    if model.device.type == "cuda":
        return "host"
    return "disk"


def until_it_fits(
    step: Callable[[int], dict[str, Any]], seq_len: int, *, attempts: int = 4
) -> dict[str, Any]:
    """The step at `seq_len`, or at an eighth less each time that memory runs out."""
    for attempt in range(attempts):
        if attempt > 0:
            seq_len = seq_len * 7 // 8
        with contextlib.suppress(torch.OutOfMemoryError):
            return step(seq_len)
        release_memory()  # the traceback held the model
    return {"failed": f"out of memory, {seq_len} tokens and more"}


# --- the ladder of the record -------------------------------------------------------------------


def ways(shape: str) -> dict[str, Stack]:
    """Which recipes each row has."""
    tile = 16 if shape.startswith("tiny") else 8192
    plain = Stack(shape, tile)
    return {
        "plain, with checkpointing": plain,
        "+ chunked loss": replace(plain, chunked_loss=True),
        "+ checkpoints on the host": replace(plain, chunked_loss=True, offload=True),
        "+ tiled MLP": replace(plain, chunked_loss=True, offload=True, tiled_mlp=True),
    }


def ablation(*, shape: str, layers: int | None, cap: int) -> Iterator[dict[str, Any]]:
    """The ladder of the record under a cap of so many bytes.

    Each row trains at the longest sequence that is predicted to fit.
    """
    rows: dict[str, Any] = {}
    for name, stack in ways(shape).items():
        expected = predicted_tokens(stack, layers, limit_bytes=cap)
        with PeakMemory(limit_bytes=int(1.05 * cap)):  # the prediction may be off by a little
            found = until_it_fits(partial(full_parameter_step, stack, layers), expected)
        rows[name] = {"predicted_tokens": expected} | found
        yield {"shape": shape, "layers": layers, "cap_gib": cap / GIB, "rows": rows}


# --- the longest steps --------------------------------------------------------------------------


RANK = 16  # of QLoRA's adapters
LEFT_FREE = 0.1  # of a card: for its context, and for what the allocator cannot use


def longest_step(*, shape: str, layers: int | None, seq_len: int) -> Iterator[dict[str, Any]]:
    """One full-causal, full-parameter step with nested checkpoints.

    It is of `seq_len` tokens, or of as many as are predicted to fit: each try that runs out of
    memory would compute for minutes before it does.
    """
    tokens = min(seq_len, predicted_to_fit(shape, layers, machine().memory_bytes))
    asked = {"shape": shape, "layers": layers, "asked": seq_len}
    yield asked  # what a run that is cut leaves
    step = partial(full_parameter_step, longest_stack(shape, layers), layers)
    yield asked | until_it_fits(step, tokens)


def longest_stack(shape: str, layers: int | None) -> Stack:
    """Every recipe for length, and nested checkpoints."""
    group = best_group(layers or SHAPES[shape].layers)
    tile = 64 if shape.startswith("tiny") else 8192
    recipes = {"chunked_loss": True, "tiled_mlp": True, "tiled_norms": True}
    return Stack(shape, tile, group=group, **recipes)


def predicted_to_fit(
    shape: str, layers: int | None, memory_bytes: int, *, dtype: torch.dtype | None = None
) -> int:
    """The longest text whose step, as `longest_step` takes it, is predicted to fit a card."""
    limit = int((1 - LEFT_FREE) * memory_bytes)
    stack = longest_stack(shape, layers)
    return predicted_tokens(stack, layers, limit_bytes=limit, dtype=dtype)


def qlora_context(
    *, shape: str, layers: int | None, most: int, cap: int
) -> Iterator[dict[str, Any]]:
    """The longest context of QLoRA under a cap of so many bytes, at most `most` tokens.

    Checkpoints wait on the host.
    """
    model, optimizer, one_step = qlora_build(
        shape, layers, tokens=most, tile=min(4096, most), dtype=training_dtype()
    )()
    seconds: dict[int, float] = {}

    def step(tokens: int) -> None:
        start = time.perf_counter()
        one_step(model, optimizer, tokens=tokens)
        seconds[tokens] = time.perf_counter() - start

    step(64)  # makes the states
    peak = peak_of(step, optimizer.zero_grad, limit_bytes=cap)
    asked = {"shape": shape, "layers": layers, "cap_gib": cap / GIB, "asked": most}
    yield asked  # what a run that is cut leaves
    found = find_longest(peak, limit_bytes=cap, start=most, most=most, resolution=0.1)
    tried: dict[str, float | None] = {}
    for tokens, peak_bytes in found.peaks.items():
        if peak_bytes is None:  # it ran out of memory
            tried[str(tokens)] = None
        else:
            tried[str(tokens)] = peak_bytes / GIB
    yield asked | {
        "tokens": found.tokens,
        "peak_gib": found.peak_bytes / GIB,
        "seconds": seconds[found.tokens],
        "tried": tried,
    }


def qlora_build(
    shape: str,
    layers: int | None,
    *,
    tokens: int,
    tile: int,
    dtype: torch.dtype,
    device: str | None = None,
    in_groups: bool = True,
    in_flight: int = 0,
) -> Build:
    """`build` of `core.predict`: QLoRA with every recipe for length.

    Args:
        in_groups: attention works on one group of heads after the other.
        in_flight: inputs of blocks that come back from the host ahead. Such an input may be 2 GiB,
            and docs/long-card.md has no room for it.
    """

    def step(model: Any, optimizer: Any, *, tokens: int = tokens) -> None:
        ids = made_up_ids(model, tokens)
        away = {"to": elsewhere(model), "min_bytes": LEAST_BYTES, "in_flight": in_flight}
        with offload_activations(model, **away):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def build() -> tuple[Any, torch.optim.Optimizer, Any]:
        seed_everything(0)
        model = model_of_shape(shape, layers=layers, dtype=dtype, device=device)
        model = apply_qlora(model, rank=RANK)
        for parameter in model.parameters():
            if parameter.requires_grad:
                # Beside adapters in fp32 each layer would keep its input in fp32 as well.
                parameter.data = parameter.data.to(dtype)
        apply_flash_attention(model)
        apply_chunked_cross_entropy(model)
        apply_tiled_mlp(model, tile_size=tile, norms=True)
        if in_groups:
            apply_head_groups(model)
        apply_activation_checkpointing(model)
        return model, eight_bit_adamw(model, lr=1e-4), step

    return build
