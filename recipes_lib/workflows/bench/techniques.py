"""One entry per technique: its shortest use in a training step.

    entry = ENTRIES["lora"]
    model = entry.adapt(model)
    optimizer = entry.optimizer_of(model)
    step = entry.step_of(batch, micro_batches=1)
    loss = step(model, optimizer)

An entry says what differs from the plain step: the model, the optimizer or the step itself. The
notebooks explain the techniques; the entries are for a quick look at your own model and sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from recipes_lib.core.data import Batch
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.predict import Step
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing, best_group
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.optimizer_offload import offload_optimizer
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.precision import mixed_precision
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.sixteen_bit_adam import sixteen_bit_adamw
from recipes_lib.training.compiled_blocks import apply_compiled_blocks
from recipes_lib.training.gradient_accumulation import accumulate_gradients

LR = 2e-5


def as_it_is(model: Any) -> Any:
    """The model of the plain step."""
    return model


def plain_adamw(model: Any) -> torch.optim.Optimizer:
    """The optimizer without an entry: PyTorch's own AdamW on all parameters, the yardstick."""
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def plain_training_step(batch: Batch, micro_batches: int = 1) -> Step:
    """The step without an entry: forward, backward, update, on the whole batch at once."""

    def whole_batch_step(model: Any, optimizer: torch.optim.Optimizer) -> float:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return whole_batch_step


@dataclass(frozen=True)
class Entry:
    """What a technique changes. Without changes it is the plain step with AdamW."""

    adapt: Callable[[Any], Any] = as_it_is
    optimizer_of: Callable[[Any], torch.optim.Optimizer] = plain_adamw
    step_of: Callable[[Batch, int], Step] = plain_training_step


# --- steps of their own ---------------------------------------------------------------------------


def accumulating_step(batch: Batch, micro_batches: int) -> Step:
    """An entry's step: the same batch in micro-batches."""

    def micro_batches_step(model: Any, optimizer: torch.optim.Optimizer) -> float:
        loss = accumulate_gradients(model, batch, micro_batches=micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return micro_batches_step


def mixed_step(batch: Batch, micro_batches: int) -> Step:
    """An entry's step: products in 16 bits.

    Where no 16-bit type is native, bf16 is emulated, and the row shows how slow that is.
    """
    dtype = machine().compute_dtype
    if dtype is torch.float32:
        dtype = torch.bfloat16
    precision = mixed_precision.mixed_precision(dtype=dtype)

    def sixteen_bit_step(model: Any, optimizer: torch.optim.Optimizer) -> float:
        with precision.autocast():
            loss = model(**batch, use_cache=False).loss
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        return loss.item()

    return sixteen_bit_step


def offloading_step(batch: Batch, micro_batches: int) -> Step:
    """An entry's step: activations wait elsewhere: a GPU's on the host, a CPU's on the disk."""
    plain = plain_training_step(batch)

    def offloaded_step(model: Any, optimizer: torch.optim.Optimizer) -> float:
        elsewhere = "host" if model.device.type == "cuda" else "disk"
        with offload_activations(model, to=elsewhere):
            return plain(model, optimizer)

    return offloaded_step


def nested(model: Any) -> Any:
    """An entry's change: checkpoints inside checkpoints, in groups of the best size."""
    return apply_nested_checkpointing(model, group=best_group(model.config.num_hidden_layers))


# In alphabetical order, which is that of every table made from it.
ENTRIES: dict[str, Entry] = {
    "activation_checkpointing": Entry(adapt=apply_activation_checkpointing),
    "activation_offload": Entry(step_of=offloading_step),
    "chunked_cross_entropy": Entry(adapt=apply_chunked_cross_entropy),
    "compiled_blocks": Entry(adapt=apply_compiled_blocks),
    "eight_bit_adam": Entry(optimizer_of=partial(eight_bit_adamw, lr=LR)),
    "gradient_accumulation": Entry(step_of=accumulating_step),
    "lora": Entry(adapt=partial(apply_lora, rank=16)),
    "mixed_precision": Entry(step_of=mixed_step),
    "nested_checkpointing": Entry(adapt=nested),
    "optimizer_in_backward": Entry(
        optimizer_of=partial(apply_optimizer_in_backward, lr=LR, fused=True)
    ),
    "optimizer_offload": Entry(optimizer_of=partial(offload_optimizer, lr=LR)),
    "qlora": Entry(adapt=partial(apply_qlora, rank=16)),
    "sixteen_bit_adam": Entry(optimizer_of=partial(sixteen_bit_adamw, lr=LR)),
    "tiled_mlp": Entry(adapt=apply_tiled_mlp),
}
