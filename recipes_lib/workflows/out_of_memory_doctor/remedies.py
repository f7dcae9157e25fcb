"""The remedies against running out of memory, in the order to try, each with its predicted peak.

Part of out_of_memory_doctor. The techniques' own estimates do the arithmetic. Here each is put on
top of those before it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from recipes_lib.core.measure import dry_run
from recipes_lib.core.measure.machine import GIB
from recipes_lib.core.model.causal_lm import decoder_blocks, without_adapters
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.predict.budget import Budget, Shape
from recipes_lib.core.predict.plain_step import budget_of, head_of, head_trains, trainable_bytes
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
        where="memory/chunked_cross_entropy",
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

# These two put adapters beside another base, and take only these recipes from above: adapters have
# few states to save.
ADAPTERS = {"QLoRA": estimate_qlora, "LoRA, 16-bit base": estimate_lora}
BESIDE_ADAPTERS = ("micro-batches", "loss in chunks", "checkpointing")


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
        return f"{readable(self.peak)}, {'fits' if self.fits else 'too much'}"

    def details(self) -> list[str]:
        """What it saves, what it costs and where it is, as far as there is something to say."""
        lines = []
        if self.saves:
            lines.append(f"saves: {self.saves}")
        if self.costs:
            lines.append(f"costs: {self.costs} ({self.where})")
        elif self.where:
            lines.append(f"where: {self.where}")
        return lines


# --- the remedies, one on top of the other --------------------------------------------------------


def remedies_for(
    model: Any, shape: Shape, *, memory_bytes: int, spare_the_host: bool = False
) -> list[Remedy]:
    """The recipes in the order to try, each with the predicted peak of itself and all above it.

    Each row has a smaller peak than the row above. A recipe that would not make the peak smaller
    here is no remedy. It may take something away that would be the peak after the next recipe:
    then the two are one row.

    Args:
        spare_the_host: leave out what moves memory to the host.
    """
    limit = FITS * memory_bytes
    plans = _Plans(model, shape, limit=limit)
    rows = _Rows(plans, limit=limit)
    for name in plans.candidates(spare_the_host=spare_the_host):
        rows.add(name)
    return rows.remedies


def smallest_without_rows(model: Any) -> Budget:
    """The smallest budget that any of the recipes gives, for one row of two tokens.

    What does not fit then will not fit with shorter rows either.
    """
    plans = _Plans(model, Shape(batch=1, seq=2), limit=0)
    budgets = [plans.of(())]
    names: list[str] = []
    for name in plans.candidates(spare_the_host=False):
        names.append(name)
        budgets.append(plans.of(names))
    return min(budgets, key=attrgetter("peak"))


class _Plans:
    """The budget of the step with any choice of recipes, from the techniques' own estimates."""

    def __init__(self, model: Any, shape: Shape, *, limit: float) -> None:
        self.model = model
        self.whole = shape
        self.plain = budget_of(model, shape)
        self.split = self._enough_micro_batches(limit)
        # Adapters that exist already train few of the weights: there is no need of others.
        self.adapters_are_there = 2 * trainable_bytes(model) <= self.plain.weights
        self._base: Any = None  # the model in 16 bits, and the budget of its plain step
        self._plain_base: Budget | None = None

    def candidates(self, *, spare_the_host: bool) -> list[str]:
        """The recipes that can be applied to this model, in the order to try."""
        names = list(RECIPES)
        if self.split is None:
            names.remove("micro-batches")
        if not self._fewer_states():
            names.remove("8-bit AdamW")
        # A CPU gains nothing by moving to the host.
        if self.model.device.type == "cpu" or spare_the_host:
            names.remove("optimizer offload")
        if self.adapters_are_there:
            names.remove("LoRA, 16-bit base")
        possible: list[str] = []
        for name in names:
            if self._has_an_estimate([*possible, name]):
                possible.append(name)
        return possible

    def of(self, names: Iterable[str]) -> Budget:
        """The budget with these recipes, in any order; QLoRA stands in LoRA's place."""
        chosen = set(names)
        model = self.model
        plan = self.plain
        adapters = None
        if not self.adapters_are_there:
            adapters = next((ADAPTERS[name] for name in ADAPTERS if name in chosen), None)
        if adapters is not None:
            chosen.intersection_update(BESIDE_ADAPTERS)
            model, plan = self._sixteen_bits()
        shape = self.whole
        if "micro-batches" in chosen and self.split is not None:
            shape = self.split
            plan = estimate_gradient_accumulation(plan, model, shape)
        if adapters is not None:
            plan = adapters(plan, model, shape)
        if "loss in chunks" in chosen:
            plan = _in_chunks(plan, model, shape)
        if "checkpointing" in chosen:
            plan = estimate_activation_checkpointing(plan, model, shape)
        if "8-bit AdamW" in chosen:
            plan = estimate_eight_bit_adam(plan, model, shape)
        if "optimizer offload" in chosen:
            plan = estimate_optimizer_offload(plan, model, shape)
        if "QLoRA" in chosen and self.adapters_are_there:
            plan = _with_quantized_base(plan, model)
        return plan

    def name(self, recipe: str) -> str:
        """The recipe in a row of its own: micro-batches with their number."""
        if recipe == "micro-batches" and self.split is not None:
            return f"{self.split.micro_batches} micro-batches of {self.split.rows}"
        return recipe

    def _enough_micro_batches(self, limit: float) -> Shape | None:
        """The shape with the fewest micro-batches that fit, or with one row at a time.

        None where there is one row only, and where the gradients that stay between micro-batches
        cost more than they save.
        """
        for count in range(2, self.whole.batch + 1):
            if self.whole.batch % count:
                continue
            split = replace(self.whole, micro_batches=count)
            plan = estimate_gradient_accumulation(self.plain, self.model, split)
            enough = plan.peak <= limit or split.rows == 1
            if enough and plan.peak <= self.plain.peak:
                return split
        return None

    def _fewer_states(self) -> bool:
        """Whether 8-bit states take less: an embedding keeps those of 32 bits.

        Those of a small 16-bit model would grow.
        """
        if not self.plain.states:
            return False
        return self.of(["8-bit AdamW"]).states < self.plain.states

    def _has_an_estimate(self, names: list[str]) -> bool:
        """Whether these go with the model: adapters do not reach experts, nor 4 bits GPT-2."""
        try:
            self.of(names)
        except ValueError:
            return False
        return True

    def _sixteen_bits(self) -> tuple[Any, Budget]:
        """The model as it would be loaded in 16 bits, and the budget of its plain step."""
        if self._plain_base is None:
            self._base = _sixteen_bit_base(self.model)
            self._plain_base = budget_of(self._base, self.whole)
        return self._base, self._plain_base


class _Rows:
    """The remedies so far, the names of the recipes in them, and the budget with all of these."""

    def __init__(self, plans: _Plans, *, limit: float) -> None:
        self.plans = plans
        self.limit = limit
        self.plan = plans.of(())
        self.names: list[str] = []
        # Recipes that have not made the peak smaller so far: the next one may need them.
        self.waiting: list[str] = []
        self.remedies = [Remedy("as it is", peak=self.plan.peak, fits=self.plan.peak <= limit)]

    def add(self, name: str) -> None:
        """Add a row for the recipe, with those that wait and are needed, if it lowers the peak."""
        before = self.plans.of([*self.names, *self.waiting])
        plan = self._with(name, self.waiting)
        saves = _terms_saved(before, plan)
        if not saves or plan.peak > self.plan.peak:
            return
        if plan.peak == self.plan.peak:
            self.waiting.append(name)
            return

        needed = list(self.waiting)
        for other in self.waiting:
            fewer = [each for each in needed if each != other]
            if self._with(name, fewer).peak <= plan.peak:
                needed = fewer
        new = [*needed, name]
        plan = self._with(name, needed)
        self.remedies.append(
            Remedy(
                name=" + ".join(self.plans.name(each) for each in new),
                saves=", ".join(_terms_saved(self.plan, plan)),
                costs=", ".join(RECIPES[each].costs for each in new),
                where=", ".join(RECIPES[each].where for each in new),
                peak=plan.peak,
                fits=plan.peak <= self.limit,
            )
        )
        self.waiting = [each for each in self.waiting if each not in needed]
        self.names += new
        self.plan = plan

    def _with(self, name: str, waiting: Iterable[str]) -> Budget:
        """The budget with all rows so far, with some of those that wait, and with `name`."""
        return self.plans.of([*self.names, *waiting, name])


def _terms_saved(old: Budget, new: Budget) -> list[str]:
    """The terms that are smaller: "states 14.9 GiB → 0.0 MiB".

    Where any of them looks smaller, those that look the same are left out.
    """
    saved = {}
    for term in ("weights", "states", "gradients", "activations", "loss"):
        before = getattr(old, term)
        after = getattr(new, term)
        if after < before:
            saved[f"{term} {readable(before)} → {readable(after)}"] = readable(before - after)
    clearly = [text for text, difference in saved.items() if difference != "0.0 MiB"]
    return clearly or list(saved)


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
    # "meta" has no data anyway.
    without_data = contextlib.nullcontext() if model.device.type == "meta" else dry_run()
    with without_data, torch.device(model.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


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
