"""One entry per technique: its shortest use in a training step, and the budget that it predicts.

Each entry takes a `Bench` and a fresh model and gives the step to measure. The notebooks explain
the techniques; the entries are for a quick look at your own model and sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from recipes_lib.core.measure.machine import machine
from recipes_lib.core.predict.budget import Budget
from recipes_lib.fine_tuning.lora import apply_lora, estimate_lora
from recipes_lib.fine_tuning.qlora import apply_qlora, estimate_qlora
from recipes_lib.memory.activation_checkpointing import (
    apply_activation_checkpointing,
    estimate_activation_checkpointing,
)
from recipes_lib.memory.activation_offload import estimate_activation_offload, offload_activations
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
from recipes_lib.memory.optimizer_offload import estimate_optimizer_offload, offload_optimizer
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp, estimate_tiled_mlp
from recipes_lib.precision import mixed_precision as amp
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw, estimate_eight_bit_adam
from recipes_lib.precision.sixteen_bit_adam import estimate_sixteen_bit_adam, sixteen_bit_adamw
from recipes_lib.training.compiled_blocks import apply_compiled_blocks, estimate_compiled_blocks
from recipes_lib.training.gradient_accumulation import (
    accumulate_gradients,
    estimate_gradient_accumulation,
)

if TYPE_CHECKING:
    from recipes_lib.workflows.bench.run import Bench

LR = 2e-5


@dataclass(frozen=True)
class Arranged:
    """What an entry gives: a step that returns its loss, what it works on, what it should need."""

    step: Callable[[], float]
    model: Any
    optimizer: torch.optim.Optimizer
    plan: Budget


Entry = Callable[["Bench", Any], Arranged]

# --- the step that most entries take --------------------------------------------------------------


def plain_adamw(model: Any) -> torch.optim.Optimizer:
    """PyTorch's own AdamW on all parameters: the yardstick."""
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def training_step(
    model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> Callable[[], float]:
    """The plain step as a function: forward, backward, update. It returns the loss."""

    def step() -> float:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def plain_training(
    bench: Bench, model: Any, plan: Budget, *, optimizer: torch.optim.Optimizer | None = None
) -> Arranged:
    """The plain step on `model` as it is now; without an optimizer, with AdamW."""
    if optimizer is None:
        optimizer = plain_adamw(model)
    step = training_step(model, optimizer, bench.batch(model))
    return Arranged(step=step, model=model, optimizer=optimizer, plan=plan)


def baseline(bench: Bench, model: Any) -> Arranged:
    """No technique: what all others are compared with."""
    return plain_training(bench, model, bench.budget(model))


# --- entries with a step of their own -------------------------------------------------------------


def gradient_accumulation(bench: Bench, model: Any) -> Arranged:
    """The same batch in micro-batches."""
    shape = replace(bench.shape, micro_batches=bench.micro_batches)
    plan = estimate_gradient_accumulation(bench.budget(model), model, shape)
    batch = bench.batch(model)
    optimizer = plain_adamw(model)

    def step() -> float:
        loss = accumulate_gradients(model, batch, micro_batches=bench.micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Arranged(step=step, model=model, optimizer=optimizer, plan=plan)


def mixed_precision(bench: Bench, model: Any) -> Arranged:
    """Products in 16 bits.

    Where no 16-bit type is native, bf16 is emulated, and the row shows how slow that is.
    """
    dtype = machine().compute_dtype
    if dtype is torch.float32:
        dtype = torch.bfloat16
    plan = amp.estimate_mixed_precision(bench.budget(model), model, bench.shape, dtype=dtype)
    precision = amp.mixed_precision(dtype=dtype)
    batch = bench.batch(model)
    optimizer = plain_adamw(model)

    def step() -> float:
        with precision.autocast():
            loss = model(**batch, use_cache=False).loss
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        return loss.item()

    return Arranged(step=step, model=model, optimizer=optimizer, plan=plan)


def activation_offload(bench: Bench, model: Any) -> Arranged:
    """Activations wait for backward elsewhere: a GPU's in host memory, a CPU's on the disk."""
    plan = estimate_activation_offload(bench.budget(model), model, bench.shape)
    plain = plain_training(bench, model, plan)
    elsewhere = "host" if model.device.type == "cuda" else "disk"

    def step() -> float:
        with offload_activations(model, to=elsewhere):
            return plain.step()

    return replace(plain, step=step)


def nested_checkpointing(bench: Bench, model: Any) -> Arranged:
    """Checkpoints inside checkpoints, in groups of the best size."""
    group = best_group(model.config.num_hidden_layers)
    plan = estimate_nested_checkpointing(bench.budget(model), model, bench.shape, group=group)
    return plain_training(bench, apply_nested_checkpointing(model, group=group), plan)


def chunked_cross_entropy(bench: Bench, model: Any) -> Arranged:
    """The output layer and the loss see some tokens at a time."""
    targets = bench.targets
    plan = estimate_chunked_cross_entropy(bench.budget(model), model, bench.shape, targets=targets)
    return plain_training(bench, apply_chunked_cross_entropy(model), plan)


def optimizer_in_backward(bench: Bench, model: Any) -> Arranged:
    """Each weight is updated as soon as its gradient is there."""
    plan = estimate_optimizer_in_backward(bench.budget(model), model, bench.shape)
    optimizer = apply_optimizer_in_backward(model, lr=LR, fused=True)
    return plain_training(bench, model, plan, optimizer=optimizer)


# --- the others differ from the plain step in one call --------------------------------------------


def other_model(estimate: Callable, apply: Callable, **options: Any) -> Entry:
    """The plain step on the model that `apply` gives."""

    def entry(bench: Bench, model: Any) -> Arranged:
        plan = estimate(bench.budget(model), model, bench.shape, **options)
        return plain_training(bench, apply(model, **options), plan)

    return entry


def other_optimizer(estimate: Callable, build: Callable) -> Entry:
    """The plain step with the optimizer that `build` gives."""

    def entry(bench: Bench, model: Any) -> Arranged:
        plan = estimate(bench.budget(model), model, bench.shape)
        return plain_training(bench, model, plan, optimizer=build(model, lr=LR))

    return entry


# In alphabetical order, which is that of every table made from it.
ENTRIES: dict[str, Entry] = {
    "activation_checkpointing": other_model(
        estimate_activation_checkpointing, apply_activation_checkpointing
    ),
    "activation_offload": activation_offload,
    "chunked_cross_entropy": chunked_cross_entropy,
    "compiled_blocks": other_model(estimate_compiled_blocks, apply_compiled_blocks),
    "eight_bit_adam": other_optimizer(estimate_eight_bit_adam, eight_bit_adamw),
    "gradient_accumulation": gradient_accumulation,
    "lora": other_model(estimate_lora, apply_lora, rank=16),
    "mixed_precision": mixed_precision,
    "nested_checkpointing": nested_checkpointing,
    "optimizer_in_backward": optimizer_in_backward,
    "optimizer_offload": other_optimizer(estimate_optimizer_offload, offload_optimizer),
    "qlora": other_model(estimate_qlora, apply_qlora, rank=16),
    "sixteen_bit_adam": other_optimizer(estimate_sixteen_bit_adam, sixteen_bit_adamw),
    "tiled_mlp": other_model(estimate_tiled_mlp, apply_tiled_mlp),
}
