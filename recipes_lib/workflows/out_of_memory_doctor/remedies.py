"""The stacks of recipes that one would choose among, each with the predicted peak of its step.

Part of out_of_memory_doctor. A *stack* is what is applied together: free recipes, which leave the
result as it is, and at most a few that have a price. A *remedy* is a stack with its peak, by
core.predict.equation. The list has, for each price, the cheapest stack that fits:

    as it is                                        105.9 GiB, too much
    checkpointing                                    59.8 GiB, too much
    checkpointing + 8-bit AdamW                      47.8 GiB, too much
    checkpointing + QLoRA                            19.8 GiB, fits
"""

from __future__ import annotations

import bisect
import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from recipes_lib.core.measure.machine import GIB
from recipes_lib.core.model.bytes_of_tensors import parts_needed
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.predict import Card, equation
from recipes_lib.core.predict.card import MODERN
from recipes_lib.memory.nested_checkpointing import best_group
from recipes_lib.memory.optimizer_offload import host_bytes

MIB = 2**20
RANK = 16  # of adapters
CLOSER = 0.95
# Of what is left beside CUDA's own context: holes between tensors take the rest.
FILLED = 0.95
LEAST_TILE = 1024  # tokens, of apply_tiled_mlp
LORA = "LoRA, 16-bit base"
ADAPTERS = (LORA, "QLoRA")

# --- the recipes ----------------------------------------------------------------------------------


Stack = tuple[str, ...]  # names of recipes that are applied together


@dataclass(frozen=True)
class Remedy:
    """A remedy: what to apply together. Without a model there are no peaks: then `peak` is None."""

    name: str
    costs: str = ""
    where: str = ""  # a command or an import
    peak: int | None = None
    fits: bool | None = None  # into the memory of the device
    host_needed: int = 0  # bytes, where they are more than this machine has
    stack: Stack = ()

    @property
    def outcome(self) -> str:
        """A remedy's predicted peak, and whether it fits: "about 16.5 GiB, fits"."""
        if self.peak is None:
            return ""
        verdict = "fits" if self.fits else "too much"
        if self.fits and self.host_needed:
            verdict = f"fits the card, needs {readable(self.host_needed)} of host memory"
        return f"about {readable(self.peak)}, {verdict}"


def in_order_of_advice(remedies: list[Remedy]) -> list[Remedy]:
    """Remedies for which device and host are large enough, and then those with the device alone."""
    fitting = [remedy for remedy in remedies if remedy.fits]
    here = [remedy for remedy in fitting if not remedy.host_needed]
    return here + [remedy for remedy in fitting if remedy.host_needed]


def readable(number: float) -> str:
    """Bytes for people: 16.5 GiB, 320.0 MiB."""
    if number >= GIB:
        return f"{number / GIB:,.1f} GiB"
    return f"{number / MIB:,.1f} MiB"


# Name | what it costs | its module | what is called there.
TABLE = """
micro-batches of 1 | smaller products | training.gradient_accumulation | accumulate_gradients
loss in chunks | little | memory.chunked_cross_entropy | apply_chunked_cross_entropy
checkpointing | one more forward | memory.activation_checkpointing | apply_activation_checkpointing
nested checkpointing | nearly two more forwards | memory.nested_checkpointing | \
apply_nested_checkpointing
16-bit AdamW | rounded states | precision.sixteen_bit_adam | sixteen_bit_adamw
8-bit AdamW | rounded states | precision.eight_bit_adam | eight_bit_adamw
step in backward | no clipping | memory.optimizer_in_backward | apply_optimizer_in_backward
optimizer offload | traffic to the host | memory.optimizer_offload | offload_optimizer
LoRA, 16-bit base | only adapters train | fine_tuning.lora | apply_lora
QLoRA | a rounded base, time | fine_tuning.qlora | apply_qlora
tiled MLP | little | memory.tiled_mlp | apply_tiled_mlp
head groups | smaller products | attention.head_groups | apply_head_groups
activation offload | traffic to the host | memory.activation_offload | offload_activations
FSDP | several GPUs, weights over the network | parallel.fully_sharded | apply_fully_sharded
"""
RECIPES = {}
for _line in TABLE.strip().splitlines():
    _name, _costs, _module, _call = _line.split(" | ")
    RECIPES[_name] = Remedy(_name, _costs, f"from recipes_lib.{_module} import {_call}")

# What leaves the gradient as it is, from cheap to dear. One of these goes with whatever is paid.
FREE = (
    (),
    ("loss in chunks",),
    ("micro-batches of 1",),
    ("micro-batches of 1", "loss in chunks"),
    ("checkpointing",),
    ("loss in chunks", "checkpointing"),
    ("micro-batches of 1", "checkpointing"),
    ("micro-batches of 1", "loss in chunks", "checkpointing"),
    ("loss in chunks", "checkpointing", "tiled MLP"),
    ("loss in chunks", "checkpointing", "tiled MLP", "activation offload"),
    ("micro-batches of 1", "loss in chunks", "checkpointing", "tiled MLP", "activation offload"),
)
# What changes the result, or needs another memory, in the order to try.
PAID = ("16-bit AdamW", "8-bit AdamW", "step in backward", "optimizer offload", *ADAPTERS)


@dataclass(frozen=True)
class Question:
    """What needs a remedy: the step that has to fit, its model, its batch, the memory."""

    model: Any
    rows: int  # of all GPUs together
    length: int
    card: Card | None  # None where a CPU computes
    limit: float  # bytes that tensors may take
    host: float = math.inf  # bytes of the memory beside it
    recipes: tuple[str, ...] = tuple(RECIPES)  # those that help there
    gpus: int = 1

    @property
    def own_rows(self) -> int:
        """Rows of one GPU."""
        return parts_needed(self.rows, self.gpus)


def limit_of(card: Card) -> float:
    """Bytes that tensors of a step may take on a card, for the doctor."""
    return FILLED * card.for_tensors - 2 * card.workspace


def has_experts(model: Any) -> bool:
    """Whether blocks have experts, which remedies by adapters of linear layers do not reach."""
    names = {type(module).__name__ for module in decoder_blocks(model).modules()}
    return any("Experts" in name or "Moe" in name for name in names)


# --- which stacks are tried -----------------------------------------------------------------------


def prices_of(question: Question) -> list[Stack]:
    """What remedies may cost, from cheap to dear: nothing, one recipe, or adapters on shards."""
    names = [name for name in PAID if name in question.recipes]
    if question.model.dtype.itemsize < 4 and "16-bit AdamW" in names:
        names.remove("16-bit AdamW")  # of 16-bit weights the states have 16 bits anyway
    prices = [(name,) for name in names]
    if question.gpus > 1:
        prices = [("FSDP",), *prices, *[("FSDP", name) for name in ADAPTERS]]
    return [(), *prices]


def stacks_of(question: Question, paid: Stack) -> list[Stack]:
    """Remedies as stacks: recipes that are paid with those that are free, from cheap to dear."""
    unfit = {name for name in RECIPES if name not in question.recipes}
    # A step in backward leaves no gradients to add up.
    if question.own_rows == 1 or "step in backward" in paid:
        unfit.add("micro-batches of 1")
    if has_experts(question.model):
        unfit.add("tiled MLP")
    # The output layer is put together when it is called, which no loss in chunks does.
    if "FSDP" in paid:
        unfit.add("loss in chunks")
    return [(*free, *paid) for free in FREE if not unfit.intersection(free)]


# --- the list -------------------------------------------------------------------------------------

# In the order in which the equation takes them.
CHANGES = {
    "optimizer offload": functools.partial(replace, gradients=0, states=0),
    "QLoRA": equation.in_four_bits,
    "tiled MLP": functools.partial(equation.with_tiled_mlp, norms=True),
    "checkpointing": equation.with_checkpointing,
    "nested checkpointing": equation.with_checkpointing,
    "FSDP": equation.sharded,
    "loss in chunks": equation.with_chunked_loss,
    "16-bit AdamW": functools.partial(equation.with_states_in, bits=16),
    "8-bit AdamW": functools.partial(equation.with_states_in, bits=8),
    "step in backward": equation.with_step_in_backward,
    "activation offload": functools.partial(equation.with_inputs_elsewhere, in_flight=1),
}


class Remedies:
    """The rows of the list, in the order to try, and those that are advised."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._plain = functools.cache(self._plain_step)  # its sizes are looked at once
        self.rows = self._rows_of_list()
        self.advised = in_order_of_advice(self.rows)

    def _rows_of_list(self) -> list[Remedy]:
        """The remedies as one list: for each price the cheapest stack that fits.

        A stack that does not fit is shown if it comes clearly closer than those before.
        """
        rows = [self._remedy_of_stack(())]
        if rows[0].fits:
            return rows
        for paid in prices_of(self.question):
            tried = [self._remedy_of_stack(stack) for stack in stacks_of(self.question, paid)]
            fitting = [remedy for remedy in tried if remedy.fits]
            remedy = fitting[0] if fitting else min(tried, key=_peak_of)
            if remedy.fits or remedy.peak < CLOSER * min(map(_peak_of, rows)):
                rows.append(remedy)
            if remedy.fits and not paid:
                break
        return rows

    def _remedy_of_stack(self, stack: Stack) -> Remedy:
        """A remedy for the list: the peak of the step with this stack, and whether it fits."""
        question = self.question
        peak = self.peak(stack, question.length)
        costs = dict.fromkeys(RECIPES[name].costs for name in stack)
        host = host_bytes(question.model) if "optimizer offload" in stack else 0
        return Remedy(
            name=" + ".join(stack) or "as it is",
            costs=", ".join(costs),
            peak=peak,
            fits=peak <= question.limit,
            host_needed=host if host > question.host else 0,
            stack=stack,
        )

    def peak(self, stack: Stack, length: int) -> int:
        """Bytes at the peak of the step with a remedy on one GPU, by arithmetic."""
        return self.terms(stack, length).peak

    def terms(self, stack: Stack, length: int) -> equation.StepBytes:
        """The terms of that step."""
        in_parts = "micro-batches of 1" in stack
        adapters = bool(set(ADAPTERS).intersection(stack))
        step = self._plain(1 if in_parts else self.question.own_rows, length, adapters)
        if adapters:
            copies = "QLoRA" not in stack or self.question.card is None
            step = equation.with_adapters(step, rank=RANK, copies=copies)
        tile = max(self.question.model.config.get_text_config().hidden_size, LEAST_TILE)
        options = {
            "FSDP": {"ranks": self.question.gpus},
            "tiled MLP": {"tile": tile},
            "nested checkpointing": {"group": best_group(step.sizes.blocks)},
        }
        for name, change in CHANGES.items():
            if name in stack:
                step = change(step, **options.get(name, {}))
        if in_parts and "optimizer offload" not in stack:
            # Gradients are there all the time.
            step = replace(step, weights=step.weights + step.gradients, gradients=0)
        return step

    def _plain_step(self, rows: int, length: int, adapters: bool) -> equation.StepBytes:
        """The step without remedies; under adapters the base is as it would be loaded for them."""
        model = self._in_16_bits if adapters else self.question.model
        step = equation.plain_step(model, rows=rows, length=length)
        card = self.question.card
        if card is not None and card.capability >= MODERN:
            step = equation.on_flash_attention(step)
        return step

    @functools.cached_property
    def _in_16_bits(self) -> Any:
        model = self.question.model
        with torch.device("meta"):
            config = copy.deepcopy(model.config)  # for the dtype is written into it
            return type(model)._from_config(config, dtype=torch.bfloat16)

    # --- what the doctor asks besides ---

    @property
    def smallest(self) -> Remedy:
        """The remedy with the smallest peak."""
        return min(self.rows, key=_peak_of)

    def longest_rows(self) -> int | None:
        """The remedy of shorter rows: tokens with which the smallest stack fits, or None."""
        peak = functools.partial(self.peak, self.smallest.stack)
        lengths = range(8, self.question.length, 8)
        fitting = bisect.bisect_right(lengths, self.question.limit, key=peak)
        return lengths[fitting - 1] if fitting > 0 else None

    def check(self) -> Iterator[str]:
        """What the step itself says of the remedy that is advised, or of the next if it fails."""
        # It imports every recipe, which takes as long as the whole answer by arithmetic.
        from recipes_lib.workflows.out_of_memory_doctor.predicted_steps import dry_peak

        for remedy in self.advised:
            try:
                peak = dry_peak(self.question, remedy.stack)
            except ValueError as error:
                yield f"Checked: not {remedy.name}: {error}."
                continue
            fits = peak <= self.question.limit
            verdict = "fits" if fits else "too much"
            yield f"Checked by the step itself: {remedy.name}: {readable(peak)}, {verdict}."
            if fits:
                return


def _peak_of(remedy: Remedy) -> int:
    return remedy.peak
