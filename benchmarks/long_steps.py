"""Training steps as long as memory allows: of every weight of a model, and QLoRA on one card.

The record is ArcticTraining's: Llama-3.1-8B, all parameters trained, on one H200, from 65 thousand
tokens in plain transformers to 1.2 million with a fused loss, checkpoints on the host and a tiled
MLP. Notebook 04 climbs from one to the other; here is the last step alone, in full size.

Parts of `benchmarks.gpu`. Each yields its content whenever there is more of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.sizes import training_dtype
from recipes_lib.attention.flash import apply_flash_attention
from recipes_lib.attention.head_groups import apply_head_groups
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.machine import GIB, machine, seed_everything
from recipes_lib.core.model import SHAPES, model_of_shape
from recipes_lib.core.predict import Build, predict
from recipes_lib.core.predict.any_size import any_size
from recipes_lib.core.predict.flops import step_operations
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing, best_group
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.pure_bf16 import bf16_adamw
from recipes_lib.workflows.longest_sequence import find_longest, peak_of

LEAST_BYTES = 4096  # of what goes to the host
RANK = 16  # of QLoRA's adapters
LEFT_FREE = 0.1  # of a card: for its context, and for what the allocator cannot use


def made_up_ids(model: Any, tokens: int) -> torch.Tensor:
    """A row of different tokens [1, tokens], of any length."""
    positions = torch.arange(tokens, device=model.device)[None]
    return positions * 7919 % model.config.vocab_size  # a prime: neighbours are far apart


# --- every weight trains --------------------------------------------------------------------------


def longest_step(*, shape: str, layers: int | None, seq_len: int) -> Iterator[dict[str, Any]]:
    """One full-causal, full-parameter step with every recipe for length.

    It is of `seq_len` tokens, or of as many as are predicted to fit: a try that runs out of memory
    would compute for minutes before it does. In bf16 with stochastic rounding where the device
    multiplies it natively.
    """
    asked = {"shape": shape, "layers": layers, "asked": seq_len}
    yield asked  # what a run that is cut leaves
    dtype = training_dtype()
    limit = int((1 - LEFT_FREE) * machine().memory_bytes)
    tokens = predicted_to_fit(shape, layers, limit_bytes=limit, most=seq_len, dtype=dtype)
    group = group_of(shape, layers)
    model, optimizer, step = full_build(shape, layers, group=group, tokens=tokens, dtype=dtype)()
    step(model, optimizer, tokens=256)  # makes the states
    start = time.perf_counter()
    with PeakMemory() as memory:
        loss = step(model, optimizer).item()
    seconds = time.perf_counter() - start
    operations = step_operations(model, rows=1, length=tokens)
    yield asked | {
        "tokens": tokens,
        "peak_gib": memory.peak / GIB,
        "seconds": seconds,
        "tflops": operations / seconds / 1e12,
        "loss": loss,
    }


def full_build(
    shape: str,
    layers: int | None,
    *,
    group: int,
    tokens: int,
    dtype: torch.dtype,
    device: str | None = None,
) -> Build:
    """`build` of `core.predict`: all weights train, and `group` blocks share a checkpoint."""

    def step(model: Any, optimizer: Any, *, tokens: int = tokens) -> torch.Tensor:
        ids = made_up_ids(model, tokens)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    def build() -> tuple[Any, Any, Any]:
        seed_everything(0)
        model = model_of_shape(shape, layers=layers, dtype=dtype, device=device)
        apply_flash_attention(model)
        apply_chunked_cross_entropy(model)
        apply_tiled_mlp(model, tile_size=min(tile_of(shape), tokens), norms=True)
        apply_nested_checkpointing(model, group=group)
        optimizer_class = torch.optim.AdamW
        if dtype == torch.bfloat16:
            optimizer_class = partial(bf16_adamw, rounding="stochastic")
        optimizer = apply_optimizer_in_backward(model, optimizer_class=optimizer_class, lr=1e-5)
        return model, optimizer, step

    return build


def tile_of(shape: str) -> int:
    """Tokens of a tile of the MLP."""
    return 64 if shape.startswith("tiny") else 8192


def group_of(shape: str, layers: int | None) -> int:
    """Blocks of a nested checkpoint."""
    return best_group(layers or SHAPES[shape].layers)


def predicted_to_fit(
    shape: str, layers: int | None, *, limit_bytes: int, most: int, dtype: torch.dtype
) -> int:
    """The longest text, up to `most` tokens, whose step is predicted to stay below a limit."""
    peak = partial(predicted_peak, shape, layers, dtype=dtype)
    few = min(4 * tile_of(shape), most)
    known = {few: peak(few)}
    return find_longest(peak, limit_bytes=limit_bytes, start=most, most=most, known=known).tokens


def predicted_peak(shape: str, layers: int | None, tokens: int, *, dtype: torch.dtype) -> int:
    """Bytes of a step, from a few blocks where it has many."""
    layers = layers or SHAPES[shape].layers
    period = group_of(shape, layers)
    on = {"tokens": tokens, "dtype": dtype, "device": "cpu"}
    build_of = partial(full_build, shape, group=period, **on)
    few = layers % period + 2 * period
    if layers <= few + 2 * period:
        return predict(build_of(layers=layers)).peak
    return any_size(build_of, layers=(few, few + period)).peak(layers=layers)


# --- QLoRA ----------------------------------------------------------------------------------------


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
        # A CPU has no other memory than its own, so there the inputs go to the disk.
        elsewhere = "host" if model.device.type == "cuda" else "disk"
        away = {"to": elsewhere, "min_bytes": LEAST_BYTES, "in_flight": in_flight}
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
