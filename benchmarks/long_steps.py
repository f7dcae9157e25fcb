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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.long_sequences import training_dtype
from recipes_lib.attention.flash import apply_flash_attention
from recipes_lib.attention.head_groups import apply_head_groups
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.machine import GIB, machine, seed_everything
from recipes_lib.core.measure.memory import release_memory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict.budget import Budget, Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import (
    apply_activation_checkpointing,
    estimate_activation_checkpointing,
)
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import (
    apply_chunked_cross_entropy,
    estimate_chunked_cross_entropy,
)
from recipes_lib.memory.nested_checkpointing import (
    apply_nested_checkpointing,
    best_group,
    estimate_nested_checkpointing,
)
from recipes_lib.memory.optimizer_in_backward import (
    apply_optimizer_in_backward,
    estimate_optimizer_in_backward,
)
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp, estimate_tiled_mlp
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.pure_bf16 import bf16_adamw
from recipes_lib.training.curriculum import flops_per_token
from recipes_lib.workflows.longest import find_longest, peak_of, predicted_longest

# --- one full-parameter step --------------------------------------------------------------------


def full_parameter_step(
    shape: str,
    layers: int | None,
    adapt: Callable[[Any], Any],
    seq_len: int,
    *,
    offload: bool = False,
) -> dict[str, Any]:
    """One step of `seq_len` tokens that trains all weights, in bf16 with stochastic rounding.

    The optimizer steps in backward. A model that runs out of memory says so.

    Args:
        adapt: applies the recipes to a fresh model.
        offload: checkpoints wait on the host, on a machine without GPU on the disk.
    """
    seed_everything(0)
    model = adapt(model_of_shape(shape, layers=layers, dtype=training_dtype()))
    optimizer_class = torch.optim.AdamW
    if training_dtype() == torch.bfloat16:
        optimizer_class = partial(bf16_adamw, rounding="stochastic")
    handle = apply_optimizer_in_backward(model, optimizer_class=optimizer_class, lr=1e-5)

    def step(tokens: int) -> tuple[float, int]:
        """Its loss, and the bytes that were moved."""
        ids = made_up_ids(model, tokens)
        surroundings = contextlib.nullcontext()
        if offload:
            surroundings = offload_activations(model, to=elsewhere(), in_flight=1)
        with surroundings as moved:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        handle.step()
        if moved is None:
            return loss.item(), 0
        return loss.item(), moved.moved_bytes

    step(256)  # makes the states
    start = time.perf_counter()
    with PeakMemory() as memory:
        loss, moved_bytes = step(seq_len)
    seconds = time.perf_counter() - start
    operations = seq_len * flops_per_token(model, seq_len=seq_len)
    return {
        "tokens": seq_len,
        "peak_gib": memory.peak / GIB,
        "host_gib": moved_bytes / GIB,
        "seconds": seconds,
        "tflops": operations / seconds / 1e12,
        "loss": loss,
    }


def made_up_ids(model: Any, tokens: int) -> torch.Tensor:
    """A row of different tokens [1, tokens], of any length."""
    positions = torch.arange(tokens, device=model.device)[None]
    return positions * 7919 % model.config.vocab_size  # a prime: neighbours are far apart


def elsewhere() -> str:
    """Where what is offloaded waits: a CPU has no other memory than its own, so there the disk."""
    if machine().device == "cuda":
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


@dataclass(frozen=True)
class Way:
    """Which recipes a row has, beside flash attention, checkpoints and the step in backward."""

    chunked_loss: bool = False
    tiled_mlp: bool = False
    offload: bool = False  # of the checkpoints


WAYS = {
    "plain, with checkpointing": Way(),
    "+ chunked loss": Way(chunked_loss=True),
    "+ checkpoints on the host": Way(chunked_loss=True, offload=True),
    "+ tiled MLP": Way(chunked_loss=True, offload=True, tiled_mlp=True),
}


def ablation(*, shape: str, layers: int | None, cap: int) -> Iterator[dict[str, Any]]:
    """The ladder of the record under a cap of so many bytes.

    Each row trains at the longest sequence that the arithmetic allows.
    """
    meta = model_of_shape(shape, layers=layers, device="meta", dtype=training_dtype())
    tile_size = 8192
    if shape.startswith("tiny"):
        tile_size = 16
    rows: dict[str, Any] = {}
    for name, way in WAYS.items():
        plan = partial(planned, meta, way, tile_size=tile_size)
        expected = predicted_longest(plan, limit_bytes=cap)
        adapt = partial(adapted, way=way, tile_size=tile_size)
        step = partial(full_parameter_step, shape, layers, adapt, offload=way.offload)
        with PeakMemory(limit_bytes=int(1.05 * cap)):  # the arithmetic may be off by a little
            rows[name] = {"predicted_tokens": expected} | until_it_fits(step, expected)
        yield {"shape": shape, "layers": layers, "cap_gib": cap / GIB, "rows": rows}


def adapted(model: Any, *, way: Way, tile_size: int) -> Any:
    """The model with the recipes of a row."""
    apply_flash_attention(model)
    apply_activation_checkpointing(model)
    if way.chunked_loss:
        apply_chunked_cross_entropy(model)
    if way.tiled_mlp:
        apply_tiled_mlp(model, tile_size=tile_size)
    return model


def planned(model: Any, way: Way, tokens: int, *, tile_size: int) -> Budget:
    """The budget of a row at so many tokens."""
    shape = Shape(batch=1, seq=tokens)
    plan = budget_of(model, shape)
    if way.chunked_loss:
        plan = estimate_chunked_cross_entropy(plan, model, shape)
    if way.tiled_mlp:
        plan = estimate_tiled_mlp(plan, model, shape, tile_size=tile_size)
    plan = estimate_activation_checkpointing(plan, model, shape)
    plan = estimate_optimizer_in_backward(plan, model, shape)
    if way.offload:
        # The inputs of the blocks are elsewhere. One block is whole while backward is inside it.
        config = model.config
        inputs = config.num_hidden_layers * tokens * config.hidden_size * model.dtype.itemsize
        inside_a_block = plan.one_block + plan.block_gradients
        plan = plan.change(activations=max(plan.activations - inputs, inside_a_block))
    return plan


# --- the longest steps --------------------------------------------------------------------------


LEFT_FREE = 0.1  # of a card: for its context, and for what the allocator cannot use


def longest_step(*, shape: str, layers: int | None, seq_len: int) -> Iterator[dict[str, Any]]:
    """One full-causal, full-parameter step with nested checkpoints.

    It is of `seq_len` tokens, or of as many as are predicted to fit: each try that runs out of
    memory would compute for minutes before it does.
    """
    meta = model_of_shape(shape, layers=layers, device="meta", dtype=training_dtype())
    tokens = min(seq_len, predicted_to_fit(meta, machine().memory_bytes))

    def adapt(model: Any) -> Any:
        apply_flash_attention(model)
        apply_chunked_cross_entropy(model)
        apply_tiled_mlp(model, tile_size=min(8192, tokens), norms=True)
        return apply_nested_checkpointing(model, group=best_group(model.config.num_hidden_layers))

    asked = {"shape": shape, "layers": layers, "asked": seq_len}
    yield asked  # what a run that is cut leaves
    yield asked | until_it_fits(partial(full_parameter_step, shape, layers, adapt), tokens)


def predicted_to_fit(meta: Any, memory_bytes: int) -> int:
    """The longest text whose step, as `longest_step` takes it, is predicted to fit a card."""
    group = best_group(meta.config.num_hidden_layers)

    def plan(tokens: int) -> Budget:
        text = Shape(batch=1, seq=tokens)
        budget = estimate_chunked_cross_entropy(budget_of(meta, text), meta, text)
        tile = min(8192, tokens)
        budget = estimate_tiled_mlp(budget, meta, text, tile_size=tile, norms=True)
        budget = estimate_nested_checkpointing(budget, meta, text, group=group)
        return estimate_optimizer_in_backward(budget, meta, text)

    return predicted_longest(plan, limit_bytes=int((1 - LEFT_FREE) * memory_bytes))


def qlora_context(
    *, shape: str, layers: int | None, most: int, cap: int
) -> Iterator[dict[str, Any]]:
    """The longest context of QLoRA under a cap of so many bytes, at most `most` tokens.

    Checkpoints wait on the host.
    """
    model = adapters_for_long_rows(shape, layers, tile_size=min(4096, most))
    optimizer = eight_bit_adamw(model, lr=1e-4)
    seconds: dict[int, float] = {}

    def step(tokens: int) -> None:
        ids = made_up_ids(model, tokens)
        start = time.perf_counter()
        # Nothing comes back ahead: such an input is 2 GiB, and docs/long-card.md has no room.
        with offload_activations(model, to=elsewhere(), min_bytes=4096, in_flight=0):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
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


def adapters_for_long_rows(shape: str, layers: int | None, *, tile_size: int) -> Any:
    """A QLoRA model with every recipe for length."""
    seed_everything(0)
    model = apply_qlora(model_of_shape(shape, layers=layers, dtype=training_dtype()), rank=16)
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Beside adapters in fp32 each layer would keep its input in fp32 as well.
            parameter.data = parameter.data.to(training_dtype())
    apply_flash_attention(model)
    apply_chunked_cross_entropy(model)
    apply_tiled_mlp(model, tile_size=tile_size, norms=True)
    apply_head_groups(model)
    return apply_activation_checkpointing(model)
