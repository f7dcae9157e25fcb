"""One entry per technique: its shortest use in a training step, and the budget that it predicts.

Each entry takes a `Bench` and a fresh model and gives the step to measure:

    def lora(bench, model):
        # what should come out
        plan = estimate_lora(bench.budget(model), model, bench.shape, rank=16)
        # the technique
        model = apply_lora(model, rank=16)
        # the step
        return plain_training(bench, model, plan)

The notebooks explain the techniques; the entries are for a quick look at your own model and sizes.
Every entry imports what it uses. So it can be copied whole, and listing the names is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from recipes_lib.core.predict.budget import Budget
    from recipes_lib.workflows.bench.run import Bench

LR = 2e-5
RANK = 16  # of the adapters


@dataclass(frozen=True)
class Arranged:
    """What an entry gives: a step that returns its loss, what it works on, what it should need."""

    step: Callable[[], float]
    model: Any
    optimizer: torch.optim.Optimizer
    plan: Budget


# --- the step that most entries take --------------------------------------------------------------


def plain_adamw(model: Any) -> torch.optim.Optimizer:
    """PyTorch's own AdamW on all parameters: the yardstick."""
    import torch

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


# --- the batch ------------------------------------------------------------------------------------


def gradient_accumulation(bench: Bench, model: Any) -> Arranged:
    """The same batch in micro-batches."""
    from recipes_lib.training.gradient_accumulation import (
        accumulate_gradients,
        estimate_gradient_accumulation,
    )

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


# --- adapters -------------------------------------------------------------------------------------


def lora(bench: Bench, model: Any) -> Arranged:
    """Adapters beside frozen weights."""
    from recipes_lib.fine_tuning.lora import apply_lora, estimate_lora

    plan = estimate_lora(bench.budget(model), model, bench.shape, rank=RANK)
    model = apply_lora(model, rank=RANK)
    return plain_training(bench, model, plan)


def qlora(bench: Bench, model: Any) -> Arranged:
    """Adapters beside frozen weights in four bits."""
    from recipes_lib.fine_tuning.qlora import apply_qlora, estimate_qlora

    plan = estimate_qlora(bench.budget(model), model, bench.shape, rank=RANK)
    model = apply_qlora(model, rank=RANK)
    return plain_training(bench, model, plan)


# --- precision ------------------------------------------------------------------------------------


def mixed_precision(bench: Bench, model: Any) -> Arranged:
    """Products in 16 bits.

    Where no 16-bit type is native, bf16 is emulated, and the row shows how slow that is.
    """
    import torch

    from recipes_lib.core.measure.machine import machine
    from recipes_lib.precision import mixed_precision as recipe

    dtype = machine().compute_dtype
    if dtype is torch.float32:
        dtype = torch.bfloat16
    plan = recipe.estimate_mixed_precision(bench.budget(model), model, bench.shape, dtype=dtype)
    precision = recipe.mixed_precision(dtype=dtype)
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


def eight_bit_adam(bench: Bench, model: Any) -> Arranged:
    """AdamW with states of 8 bits."""
    from recipes_lib.precision.eight_bit_adam import eight_bit_adamw, estimate_eight_bit_adam

    plan = estimate_eight_bit_adam(bench.budget(model), model, bench.shape)
    return plain_training(bench, model, plan, optimizer=eight_bit_adamw(model, lr=LR))


def sixteen_bit_adam(bench: Bench, model: Any) -> Arranged:
    """AdamW with states of 16 bits beside fp32 weights."""
    from recipes_lib.precision.sixteen_bit_adam import (
        estimate_sixteen_bit_adam,
        sixteen_bit_adamw,
    )

    plan = estimate_sixteen_bit_adam(bench.budget(model), model, bench.shape)
    return plain_training(bench, model, plan, optimizer=sixteen_bit_adamw(model, lr=LR))


# --- memory ---------------------------------------------------------------------------------------


def activation_checkpointing(bench: Bench, model: Any) -> Arranged:
    """Each block keeps its input only, and backward computes the rest again."""
    from recipes_lib.memory.activation_checkpointing import (
        apply_activation_checkpointing,
        estimate_activation_checkpointing,
    )

    plan = estimate_activation_checkpointing(bench.budget(model), model, bench.shape)
    model = apply_activation_checkpointing(model)
    return plain_training(bench, model, plan)


def nested_checkpointing(bench: Bench, model: Any) -> Arranged:
    """Checkpoints inside checkpoints, in groups of the best size."""
    from recipes_lib.memory.nested_checkpointing import (
        apply_nested_checkpointing,
        best_group,
        estimate_nested_checkpointing,
    )

    group = best_group(model.config.num_hidden_layers)
    plan = estimate_nested_checkpointing(bench.budget(model), model, bench.shape, group=group)
    model = apply_nested_checkpointing(model, group=group)
    return plain_training(bench, model, plan)


def activation_offload(bench: Bench, model: Any) -> Arranged:
    """Activations wait for backward elsewhere: a GPU's in host memory, a CPU's on the disk."""
    from recipes_lib.memory.activation_offload import (
        estimate_activation_offload,
        offload_activations,
    )

    plan = estimate_activation_offload(bench.budget(model), model, bench.shape)
    plain = plain_training(bench, model, plan)
    elsewhere = "disk"
    if model.device.type == "cuda":
        elsewhere = "host"

    def step() -> float:
        with offload_activations(model, to=elsewhere):
            return plain.step()

    return replace(plain, step=step)


def chunked_cross_entropy(bench: Bench, model: Any) -> Arranged:
    """The output layer and the loss see some tokens at a time."""
    from recipes_lib.memory.chunked_cross_entropy import (
        apply_chunked_cross_entropy,
        estimate_chunked_cross_entropy,
    )

    plan = estimate_chunked_cross_entropy(
        bench.budget(model), model, bench.shape, targets=bench.targets
    )
    model = apply_chunked_cross_entropy(model)
    return plain_training(bench, model, plan)


def compiled_blocks(bench: Bench, model: Any) -> Arranged:
    """Each block as one compiled graph; the first step compiles."""
    from recipes_lib.training.compiled_blocks import (
        apply_compiled_blocks,
        estimate_compiled_blocks,
    )

    plan = estimate_compiled_blocks(bench.budget(model), model, bench.shape)
    return plain_training(bench, apply_compiled_blocks(model), plan)


def tiled_mlp(bench: Bench, model: Any) -> Arranged:
    """The MLP tile by tile along the sequence."""
    from recipes_lib.memory.tiled_mlp import apply_tiled_mlp, estimate_tiled_mlp

    plan = estimate_tiled_mlp(bench.budget(model), model, bench.shape)
    model = apply_tiled_mlp(model)
    return plain_training(bench, model, plan)


def optimizer_in_backward(bench: Bench, model: Any) -> Arranged:
    """Each weight is updated as soon as its gradient is there."""
    from recipes_lib.memory.optimizer_in_backward import (
        apply_optimizer_in_backward,
        estimate_optimizer_in_backward,
    )

    plan = estimate_optimizer_in_backward(bench.budget(model), model, bench.shape)
    optimizer = apply_optimizer_in_backward(model, lr=LR, fused=True)
    return plain_training(bench, model, plan, optimizer=optimizer)


def optimizer_offload(bench: Bench, model: Any) -> Arranged:
    """AdamW's states, and its step, in host memory."""
    from recipes_lib.memory.optimizer_offload import (
        estimate_optimizer_offload,
        offload_optimizer,
    )

    plan = estimate_optimizer_offload(bench.budget(model), model, bench.shape)
    return plain_training(bench, model, plan, optimizer=offload_optimizer(model, lr=LR))


# --- the table ------------------------------------------------------------------------------------

# In alphabetical order, which is that of every table made from it.
ENTRIES: dict[str, Callable[[Bench, Any], Arranged]] = {
    "activation_checkpointing": activation_checkpointing,
    "activation_offload": activation_offload,
    "chunked_cross_entropy": chunked_cross_entropy,
    "compiled_blocks": compiled_blocks,
    "eight_bit_adam": eight_bit_adam,
    "gradient_accumulation": gradient_accumulation,
    "lora": lora,
    "mixed_precision": mixed_precision,
    "nested_checkpointing": nested_checkpointing,
    "optimizer_in_backward": optimizer_in_backward,
    "optimizer_offload": optimizer_offload,
    "qlora": qlora,
    "sixteen_bit_adam": sixteen_bit_adam,
    "tiled_mlp": tiled_mlp,
}
