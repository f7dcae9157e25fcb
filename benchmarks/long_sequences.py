"""Long sequences: attention and loss beside the libraries, the ladder of the record, and texts beyond the training.

The parts of `benchmarks.gpu` that belong to notebook 04. Each yields its content whenever there is more of it, so
that a part which is cut keeps what it has.

The record is ArcticTraining's: Llama-3.1-8B, all parameters trained, on one H200, from 65 thousand tokens in plain
transformers to 1.2 million with a fused loss, checkpoints on the host and a tiled MLP.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from recipes_lib import bench
from recipes_lib.architecture.rope import KINDS, apply_rope_scaling, position_losses
from recipes_lib.attention.flash import apply_flash_attention, best_kernel
from recipes_lib.core.budget import Budget
from recipes_lib.core.data import load_text
from recipes_lib.core.machine import GIB, machine, seed_everything
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape
from recipes_lib.core.plain_step import budget_of
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
from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing, best_group
from recipes_lib.memory.optimizer_in_backward import (
    apply_optimizer_in_backward,
    estimate_optimizer_in_backward,
)
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp, estimate_tiled_mlp
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.pure_bf16 import bf16_adamw
from recipes_lib.training.curriculum import flops_per_token
from recipes_lib.workflows.bench.attention import measure_attention
from recipes_lib.workflows.longest import find_longest, peak_of, predicted_longest


def compare_attention(shape: str, lengths: list[int], eager_to: int) -> Iterator[dict[str, Any]]:
    """Eager attention (where its scores fit) and the best kernel: seconds, TFLOP/s and bytes of one layer."""
    model, rows = model_of_shape(shape, layers=1, dtype=_dtype()), []
    for seq_len in lengths:
        costs: dict[str, Any] = {}
        with contextlib.suppress(torch.OutOfMemoryError):
            costs = measure_attention(model, seq_len=seq_len, eager=seq_len <= eager_to)
        # Where eager's scores do not fit, that costs its row and no other.
        costs = costs or measure_attention(model, seq_len=seq_len, eager=False)
        rows += [
            {"tokens": seq_len, "kernel": kernel} | cost._asdict() for kernel, cost in costs.items()
        ]
        yield {"shape": shape, "why": best_kernel(model).why, "rows": rows}


def compare_losses(tokens: int, hidden: int, vocab: int) -> Iterator[dict[str, Any]]:
    """The chunked loss beside plain cross-entropy, PyTorch's own fused one and Liger's."""
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab}
    yield sizes | {
        "ways": {name: vars(c) for name, c in bench.compare_losses(**sizes, dtype=_dtype()).items()}
    }


def stretched(seq_len: int, window: int, texts: int) -> Iterator[dict[str, Any]]:
    """Loss along texts longer than SmolLM2's training, plain and with each RoPE scaling; the mean of `texts` texts."""
    ids = load_tokenizer()(load_text(split="validation")[: 8 * texts * seq_len])["input_ids"]
    rows = torch.tensor(ids[: texts * seq_len], device=machine().device).view(texts, 1, seq_len)
    curves: dict[str, list[float]] = {}
    for kind in ("none", *KINDS):
        model = apply_flash_attention(load_model().eval())
        if kind in KINDS:
            apply_rope_scaling(model, kind=kind, factor=2)
        losses = [position_losses(model, row, window=window) for row in rows]
        curves[kind] = [statistics.fmean(values) for values in zip(*losses)]
        yield {"curves": curves, "window": window, "tokens": seq_len, "texts": texts, "factor": 2}


def full_parameter_step(
    shape: str,
    layers: int | None,
    adapt: Callable[[Any], Any],
    seq_len: int,
    *,
    offload: bool = False,
) -> dict[str, Any]:
    """One step of bf16 weights and stochastic AdamW in backward; what ran out of memory says so."""
    seed_everything(0)
    model = adapt(model_of_shape(shape, layers=layers, dtype=_dtype()))
    make = (
        partial(bf16_adamw, rounding="stochastic")
        if _dtype() == torch.bfloat16
        else torch.optim.AdamW
    )
    handle = apply_optimizer_in_backward(model, optimizer_class=make, lr=1e-5)
    host = "host" if machine().device == "cuda" else "disk"

    def step(tokens: int) -> tuple[float, int]:
        ids = torch.arange(tokens, device=model.device)[None] * 7919 % model.config.vocab_size
        with (
            offload_activations(model, to=host, in_flight=1)
            if offload
            else contextlib.nullcontext() as moved
        ):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        handle.step()
        return loss.item(), moved.moved_bytes if moved else 0

    step(256)  # makes the states
    start = time.perf_counter()
    with PeakMemory() as memory:
        loss, moved = step(seq_len)
    seconds = time.perf_counter() - start
    return {
        "tokens": seq_len,
        "peak_gib": memory.peak / GIB,
        "host_gib": moved / GIB,
        "seconds": seconds,
        "tflops": seq_len * flops_per_token(model, seq_len=seq_len) / seconds / 1e12,
        "loss": loss,
    }


def ablation(shape: str, layers: int | None, cap: int) -> Iterator[dict[str, Any]]:
    """The ladder of the record under a cap of so many bytes, each row at the longest that the arithmetic allows."""
    meta = model_of_shape(shape, layers=layers, device="meta", dtype=_dtype())
    width = meta.dtype.itemsize

    def planned(
        S: int, *, fused: bool = False, tiled: bool = False, offload: bool = False
    ) -> Budget:
        sizes = {"batch_size": 1, "seq_len": S}
        plan = budget_of(meta, **sizes).change(states=2 * width * meta.num_parameters())
        if fused:
            plan = estimate_chunked_cross_entropy(plan, meta, **sizes)
        if tiled:
            plan = estimate_tiled_mlp(plan, meta, tile_size=tile, **sizes)
        plan = estimate_optimizer_in_backward(
            estimate_activation_checkpointing(plan, meta, **sizes), meta
        )
        if offload:
            inputs = len(meta.model.layers) * S * width * meta.config.hidden_size
            plan = plan.change(
                activations=max(plan.activations - inputs, plan.one_block + plan.block_gradients)
            )
        return plan

    tile = 16 if shape.startswith("tiny") else 8192
    flash = lambda model: apply_activation_checkpointing(apply_flash_attention(model))  # noqa: E731
    loss = lambda model: apply_chunked_cross_entropy(flash(model))  # noqa: E731
    tiled = lambda model: apply_tiled_mlp(loss(model), tile_size=tile)  # noqa: E731
    ways = {
        "plain, with checkpointing": (flash, {}),
        "+ chunked loss": (loss, {"fused": True}),
        "+ checkpoints on the host": (loss, {"fused": True, "offload": True}),
        "+ tiled MLP": (tiled, {"fused": True, "offload": True, "tiled": True}),
    }
    rows: dict[str, Any] = {}
    for name, (adapt, recipes) in ways.items():
        longest = predicted_longest(partial(planned, **recipes), limit_bytes=cap)
        step = partial(full_parameter_step, shape, layers, adapt, offload="offload" in recipes)
        with PeakMemory(limit_bytes=int(1.05 * cap)):  # the arithmetic may be off by a little
            rows[name] = {"predicted_tokens": longest} | _until_it_fits(step, longest)
        yield {"shape": shape, "layers": layers, "cap_gib": cap / GIB, "rows": rows}


def longest_step(shape: str, layers: int | None, seq_len: int) -> Iterator[dict[str, Any]]:
    """One full-causal, full-parameter step with nested checkpoints, as long as the card and ten minutes allow."""

    def adapt(model: Any) -> Any:
        model = apply_chunked_cross_entropy(apply_flash_attention(model))
        model = apply_tiled_mlp(model, tile_size=min(8192, seq_len), norms=True)
        return apply_nested_checkpointing(model, group=best_group(model.config.num_hidden_layers))

    asked = {"shape": shape, "layers": layers, "asked": seq_len}
    yield asked  # what a run that is cut leaves
    yield asked | _until_it_fits(lambda S: full_parameter_step(shape, layers, adapt, S), seq_len)


def qlora_context(shape: str, layers: int | None, most: int, cap: int) -> Iterator[dict[str, Any]]:
    """The longest context of QLoRA under a cap of so many bytes, at most `most` tokens, checkpoints on the host."""
    seed_everything(0)
    model = apply_qlora(model_of_shape(shape, layers=layers, dtype=_dtype()), rank=16)
    for parameter in model.parameters():
        if (
            parameter.requires_grad
        ):  # beside adapters in fp32 each layer would keep its input in fp32 as well
            parameter.data = parameter.data.to(_dtype())
    tile = min(4096, most)
    apply_activation_checkpointing(
        apply_tiled_mlp(
            apply_chunked_cross_entropy(apply_flash_attention(model)), tile_size=tile, norms=True
        )
    )
    optimizer, host = (
        eight_bit_adamw(model, lr=1e-4),
        "host" if machine().device == "cuda" else "disk",
    )
    seconds: dict[int, float] = {}

    def step(tokens: int) -> None:
        ids = torch.arange(tokens, device=model.device)[None] * 7919 % model.config.vocab_size
        start = time.perf_counter()
        with offload_activations(model, to=host, min_bytes=4096, in_flight=1):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds[tokens] = time.perf_counter() - start

    step(64)
    peak = peak_of(step, optimizer.zero_grad, limit_bytes=cap)
    asked = {"shape": shape, "layers": layers, "cap_gib": cap / GIB, "asked": most}
    yield asked  # what a run that is cut leaves
    found = find_longest(peak, limit_bytes=cap, start=most, most=most, resolution=0.1)
    tried = {str(tokens): bytes_ and bytes_ / GIB for tokens, bytes_ in found.peaks.items()}
    peak_gib, took = found.peak_bytes / GIB, seconds[found.tokens]
    yield asked | {"tokens": found.tokens, "peak_gib": peak_gib, "seconds": took, "tried": tried}


def _until_it_fits(
    step: Callable[[int], dict[str, Any]], seq_len: int, attempts: int = 4
) -> dict[str, Any]:
    """The step at `seq_len`, or at an eighth less each time that memory runs out."""
    for attempt in range(attempts):
        seq_len = seq_len * 7 // 8 if attempt else seq_len
        with contextlib.suppress(torch.OutOfMemoryError):
            return step(seq_len)
        gc.collect()  # the traceback held the model
        if machine().device == "cuda":
            torch.cuda.empty_cache()
    return {"failed": f"out of memory, {seq_len} tokens and more"}


def _dtype() -> torch.dtype:
    return torch.bfloat16 if machine().device == "cuda" and machine().native_bf16 else torch.float32
