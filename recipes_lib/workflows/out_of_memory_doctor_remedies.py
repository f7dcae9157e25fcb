"""The remedies against running out of memory, in the order to try, each with its predicted peak.

Part of out_of_memory_doctor. The techniques' own estimates do the arithmetic. Here each is put on
top of those before it.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from recipes_lib.core.budget import Budget, Estimate, Shape
from recipes_lib.core.causal_lm import decoder_blocks, without_adapters
from recipes_lib.core.machine import GIB
from recipes_lib.core.measure import dry_run
from recipes_lib.core.plain_step import budget_of, head_of, head_trains, trainable_bytes
from recipes_lib.core.sizes import tensor_bytes
from recipes_lib.fine_tuning.lora import estimate_lora
from recipes_lib.fine_tuning.qlora import estimate_qlora
from recipes_lib.memory.activation_checkpointing import estimate_activation_checkpointing
from recipes_lib.memory.chunked_cross_entropy import estimate_chunked_cross_entropy
from recipes_lib.memory.optimizer_offload import estimate_optimizer_offload
from recipes_lib.precision.eight_bit_adam import estimate_eight_bit_adam
from recipes_lib.training.gradient_accumulation import estimate_gradient_accumulation

MIB = 2**20

# Of the memory. The CUDA context, workspaces and rounded allocations take the rest.
FITS = 0.95

# Bytes per weight in NF4: half a byte for its code, a one-byte scale per block of 64 weights, and a
# scale in fp32 per 256 of those.
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)

# --- the recipes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """What a recipe saves and costs, and the file that explains it."""

    saves: str
    costs: str
    where: str


# In the order to try. The first five leave the gradient as it is.
RECIPES = {
    "micro-batches": Recipe(
        saves="(1 - 1/k) of activations and loss",
        costs="smaller products",
        where="training/gradient_accumulation.py",
    ),
    "loss in chunks": Recipe(
        saves="logits: 12 bytes x tokens x vocabulary",
        costs="little",
        where="memory/chunked_cross_entropy.py",
    ),
    "checkpointing": Recipe(
        saves="all but the blocks' inputs",
        costs="one more forward",
        where="memory/activation_checkpointing.py",
    ),
    "8-bit AdamW": Recipe(
        saves="6 of 8 bytes x parameters",
        costs="rounded states",
        where="precision/eight_bit_adam.py",
    ),
    "optimizer offload": Recipe(
        saves="states and gradients",
        costs="traffic to the host",
        where="memory/optimizer_offload.py",
    ),
    "LoRA, 16-bit base": Recipe(
        saves="gradients, states, half of the rest",
        costs="only adapters train",
        where="fine_tuning/lora.py",
    ),
    "QLoRA": Recipe(
        saves="1.5 of 2 bytes x weights",
        costs="a rounded base, time",
        where="fine_tuning/qlora.py",
    ),
}


@dataclass(frozen=True)
class Remedy:
    """One thing to try. `peak` and `fits` hold with everything above it; None without a model."""

    name: str
    saves: str = ""
    costs: str = ""
    where: str = ""
    peak: int | None = None
    fits: bool | None = None

    @property
    def outcome(self) -> str:
        """The predicted peak, and whether it fits: "16.5 GiB, fits"."""
        if self.peak is None:
            return ""
        verdict = "too much"
        if self.fits:
            verdict = "fits"
        return f"{readable(self.peak)}, {verdict}"


# --- the remedies, one on top of the other --------------------------------------------------------


def remedies_for(model: Any, shape: Shape, *, memory_bytes: int) -> list[Remedy]:
    """The recipes in the order to try, each with the predicted peak of itself and all above it.

    A recipe that would not make the peak smaller here is left out, or its row says that the peak is
    elsewhere. The two with adapters start from the plain step on another base, and take
    micro-batches, chunks and checkpoints from above. They do without 8-bit states and the offload:
    adapters have few states to save. Where that is more than the rows above, they are left out.
    """
    rows = _Rows(budget_of(model, shape), limit=FITS * memory_bytes)
    shape = _enough_micro_batches(rows, model, shape)
    rows.add("loss in chunks", _in_chunks(rows.plan, model, shape))
    rows.add("checkpointing", estimate_activation_checkpointing(rows.plan, model, shape))
    adapters_are_there = 2 * trainable_bytes(model) <= rows.plan.weights

    if rows.plan.states:
        eight_bit = estimate_eight_bit_adam(rows.plan, model, shape)
        # An embedding keeps 32-bit states: those of a small 16-bit model would grow.
        if eight_bit.states < rows.plan.states:
            rows.add("8-bit AdamW", eight_bit)
    if model.device.type != "cpu":  # there, nothing is gained by moving to the host
        rows.add("optimizer offload", estimate_optimizer_offload(rows.plan, model, shape))

    if adapters_are_there:
        rows.add("QLoRA", _with_quantized_base(rows.plan, model))
        return rows.remedies
    base = _sixteen_bit_base(model)
    rows.add("LoRA, 16-bit base", _adapters_on(base, shape, estimate_lora))
    try:
        quantized = _adapters_on(base, shape, estimate_qlora)
    except ValueError:
        return rows.remedies  # some layers cannot be quantized, such as GPT-2's
    rows.add("QLoRA", quantized)
    return rows.remedies


class _Rows:
    """The remedies so far, and `plan`, the budget with all of them."""

    def __init__(self, plan: Budget, *, limit: float) -> None:
        self.plan = plan
        self.limit = limit
        self.remedies = [Remedy("as it is", peak=plan.peak, fits=self.fits(plan))]

    def fits(self, plan: Budget) -> bool:
        return plan.peak <= self.limit

    def add(self, key: str, plan: Budget, *, name: str | None = None) -> bool:
        """Go on with `plan`, and add a row for it, if it makes a term of the budget smaller.

        A plan with a larger peak is no remedy, and is left out. One with the same peak is kept: it
        takes something away that would be the peak after the remedies below it. Its row says so.

        Returns whether it goes on with `plan`.
        """
        if name is None:
            name = key
        saves = _terms_saved(self.plan, plan)
        if not saves or plan.peak > self.plan.peak:
            return False
        if plan.peak == self.plan.peak:
            saves.append("the peak is elsewhere")
        self.plan = plan
        recipe = RECIPES[key]
        remedy = Remedy(
            name=name,
            saves=", ".join(saves),
            costs=recipe.costs,
            where=recipe.where,
            peak=plan.peak,
            fits=self.fits(plan),
        )
        self.remedies.append(remedy)
        return True


def _terms_saved(old: Budget, new: Budget) -> list[str]:
    """The terms that are smaller: "states 14.9 GiB → 0.0 MiB"."""
    saved = []
    for term in ("weights", "states", "gradients", "activations", "loss"):
        before = getattr(old, term)
        after = getattr(new, term)
        if after < before:
            saved.append(f"{term} {readable(before)} → {readable(after)}")
    return saved


def _enough_micro_batches(rows: _Rows, model: Any, shape: Shape) -> Shape:
    """Add a row for the fewest micro-batches that fit, or for one row at a time.

    Gives the shape of the step with them.
    """
    plain = rows.plan
    for count in range(2, shape.batch + 1):
        if shape.batch % count:
            continue
        split = replace(shape, micro_batches=count)
        plan = estimate_gradient_accumulation(plain, model, split)
        if rows.fits(plan) or split.rows == 1:
            name = f"{count} micro-batches of {split.rows}"
            if rows.add("micro-batches", plan, name=name):
                return split
    # One row only, or the gradients that stay between micro-batches cost more than they save.
    return shape


def _in_chunks(budget: Budget, model: Any, shape: Shape) -> Budget:
    """The budget with a loss in chunks; as it is, where chunks would save nothing."""
    plan = estimate_chunked_cross_entropy(budget, model, shape)
    if model.device.type == "meta":
        # The estimate plans the chunks for this machine. A model without weights is a question
        # about another one, whose chunks are small beside what remains on any machine: the
        # gradient of the weight, and that of what the output layer reads [T, D] in fp32.
        remains = 4 * shape.tokens * model.config.hidden_size
        if head_trains(budget, model):
            remains += tensor_bytes(head_of(model))
        plan = plan.change(loss=remains)
    if plan.loss >= budget.loss:
        return budget
    return plan


def _sixteen_bit_base(model: Any) -> Any:
    """The model as it would be loaded in 16 bits: a copy without data, on the same device."""
    from transformers import AutoModelForCausalLM

    # A copy, because from_config writes the dtype into the configuration that it is given.
    config = copy.deepcopy(without_adapters(model).config)
    without_data = dry_run()
    if model.device.type == "meta":
        without_data = contextlib.nullcontext()  # "meta" has no data anyway
    with without_data, torch.device(model.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _adapters_on(base: Any, shape: Shape, adapters: Estimate) -> Budget:
    """The budget of `adapters`, LoRA's or QLoRA's, with micro-batches, chunks and checkpoints."""
    plan = budget_of(base, shape)
    plan = estimate_gradient_accumulation(plan, base, shape)
    plan = adapters(plan, base, shape)
    plan = _in_chunks(plan, base, shape)
    return estimate_activation_checkpointing(plan, base, shape)


def _with_quantized_base(plan: Budget, model: Any) -> Budget:
    """The budget when the frozen weights of the blocks have four bits, below adapters that exist.

    `estimate_qlora` would add a second pair of adapters.
    """
    saved = 0
    for parameter in decoder_blocks(model).parameters():
        frozen_matrix = parameter.ndim == 2 and not parameter.requires_grad
        if frozen_matrix and parameter.is_floating_point():
            saved += int(parameter.numel() * (model.dtype.itemsize - NF4))
    return plan.change(weights=plan.weights - saved)


def readable(number: int) -> str:
    """Bytes for people: 16.5 GiB, 320.0 MiB."""
    if number >= GIB:
        return f"{number / GIB:,.1f} GiB"
    return f"{number / MIB:,.1f} MiB"
