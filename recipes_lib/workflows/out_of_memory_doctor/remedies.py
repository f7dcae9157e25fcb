"""The remedies against running out of memory, each with the predicted peak of the step it makes.

Part of out_of_memory_doctor. A remedy is a stack of recipes, applied together. Its peak is that of
the real step on tensors without data, taken with few blocks and followed to all of them. That costs
some seconds for each stack. So where the arithmetic of core.predict.equation holds, it comes first,
and the step confirms what is close to the limit and what is advised.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from recipes_lib.core.measure.machine import GIB
from recipes_lib.core.model.causal_lm import decoder_blocks, without_adapters
from recipes_lib.core.predict import Build, Card, equation, predict
from recipes_lib.core.predict.any_size import any_size
from recipes_lib.fine_tuning.lora import apply_lora, without_peft_warnings
from recipes_lib.fine_tuning.qlora import apply_qlora, quantize_nf4
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.optimizer_offload import host_bytes, offload_optimizer
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.sixteen_bit_adam import sixteen_bit_adamw
from recipes_lib.training.gradient_accumulation import accumulate_gradients, own_loss_sum

MIB = 2**20
LR = 1e-4
SHORT = 256  # tokens of a row that is not the problem
RANK = 16
# Share of the limit: closer than this the arithmetic does not decide.
CLOSE = 0.05
CLOSE_WITH_ADAPTERS = 0.25  # it counts what they keep, and not what a checkpoint makes again
BY_ARITHMETIC = ("llama", "mistral", "qwen2")  # families whose blocks are those of the equation

# --- the recipes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remedy:
    """What to apply together. Without a model there are no peaks: then `peak` is None."""

    name: str
    saves: str = ""
    costs: str = ""
    where: str = ""  # the file that explains it
    peak: int | None = None
    fits: bool | None = None  # into the memory of the device
    host_needed: int = 0  # bytes, where they are more than this machine has
    by_arithmetic: bool = False

    @property
    def outcome(self) -> str:
        """The predicted peak, and whether it fits: "16.5 GiB, fits"."""
        if self.peak is None:
            return ""
        about = "about " if self.by_arithmetic else ""
        verdict = "fits" if self.fits else "too much"
        if self.fits and self.host_needed:
            verdict = f"fits the card, needs {readable(self.host_needed)} of host memory"
        return f"{about}{readable(self.peak)}, {verdict}"


def first_that_fits(remedies: list[Remedy]) -> Remedy | None:
    """The first for which device and host are large enough; if there is none, the device alone."""
    fitting = [remedy for remedy in remedies if remedy.fits]
    here = [remedy for remedy in fitting if not remedy.host_needed]
    return next(iter(here + fitting), None)


def readable(number: float) -> str:
    """Bytes for people: 16.5 GiB, 320.0 MiB."""
    if number >= GIB:
        return f"{number / GIB:,.1f} GiB"
    return f"{number / MIB:,.1f} MiB"


TABLE = """
micro-batches | (1 - 1/k) of activations | smaller products | training/gradient_accumulation.py
loss in chunks | logits: 12 bytes x tokens x vocabulary | little | memory/chunked_cross_entropy
checkpointing | all but the blocks' inputs | one more forward | memory/activation_checkpointing.py
16-bit AdamW | half of fp32 states | rounded states | precision/sixteen_bit_adam.py
8-bit AdamW | 6 of 8 bytes x parameters | rounded states | precision/eight_bit_adam.py
step in backward | all gradients but one | no clipping | memory/optimizer_in_backward.py
optimizer offload | states and gradients | traffic to the host | memory/optimizer_offload.py
LoRA, 16-bit base | gradients, states, half of the rest | only adapters train | fine_tuning/lora.py
QLoRA | 1.5 of 2 bytes x weights | a rounded base, time | fine_tuning/qlora.py
tiled MLP | what the MLP keeps of long rows | little | memory/tiled_mlp
head groups | what attention keeps of long rows | smaller products | attention/head_groups.py
activation offload | the blocks' inputs | traffic to the host | memory/activation_offload
"""
RECIPES = {}
for _line in TABLE.strip().splitlines():
    _recipe = Remedy(*_line.split(" | "))
    RECIPES[_recipe.name] = _recipe

# What leaves the gradient as it is, from cheap to dear: whatever else is done, these go with it.
BESIDE = (
    (),
    ("loss in chunks",),
    ("micro-batches",),
    ("micro-batches", "loss in chunks"),
    ("loss in chunks", "checkpointing"),
    ("micro-batches", "loss in chunks", "checkpointing"),
)
ADAPTERS = ("LoRA, 16-bit base", "QLoRA")
# What changes the result, or needs another memory, in the order to try.
PRICED = ("16-bit AdamW", "8-bit AdamW", "step in backward", "optimizer offload", *ADAPTERS)

# --- a step with recipes --------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """The step that has to fit: of which model, on which batch, in which memory."""

    model: Any
    rows: int
    length: int
    card: Card | None  # None where a CPU computes
    limit: float  # bytes that tensors may take
    host: float = math.inf  # bytes of the memory beside it
    recipes: tuple[str, ...] = tuple(RECIPES)  # those that help there


@dataclass(frozen=True)
class Stack:
    """Recipes that are applied together."""

    names: tuple[str, ...] = ()
    micro_batches: int = 1


def build_with(question: Question, stack: Stack, *, layers: int) -> Build:
    """The step of a model of so many blocks with these recipes, for `predict`."""
    micro_batches = min(stack.micro_batches, 2)  # a third one takes the bytes of the second
    rows = micro_batches * question.rows // stack.micro_batches
    ids = torch.zeros(rows, question.length, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}

    def build() -> tuple[Any, Any, Any]:
        model = _shallow(question.model, stack, layers)
        if "tiled MLP" in stack.names:
            apply_tiled_mlp(model, norms=False, check=False)
        if "checkpointing" in stack.names:
            apply_activation_checkpointing(model, check=False)
        if "loss in chunks" in stack.names:
            apply_chunked_cross_entropy(model, check=False)
        return model, _optimizer(model, stack, micro_batches), step

    def step(model: Any, optimizer: Any) -> None:
        around = contextlib.nullcontext()
        if "activation offload" in stack.names:
            around = offload_activations(model)
        with around:
            if micro_batches > 1:
                options = {"micro_batches": micro_batches, "loss_sum": own_loss_sum}
                accumulate_gradients(model, batch, **options)
            else:
                model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return build


def _shallow(model: Any, stack: Stack, layers: int) -> Any:
    """`model` with fewer blocks, made from its configuration; its adapters are there again."""
    plain = without_adapters(model)
    config = copy.deepcopy(plain.config)  # for the dtype is written into it
    text = config.get_text_config()
    for name, values in _per_block(text).items():
        setattr(text, name, values[:layers])
    text.num_hidden_layers = layers
    adapters = set(ADAPTERS).intersection(stack.names)
    dtype = torch.bfloat16 if adapters else model.dtype
    shallow = type(plain)._from_config(config, dtype=dtype).train()
    there = getattr(model, "peft_config", None)
    if there is not None:
        from peft import get_peft_model

        if "QLoRA" in stack.names:
            quantize_nf4(shallow)
        with without_peft_warnings():
            for adapter in copy.deepcopy(there).values():
                shallow = get_peft_model(shallow, adapter)
        return shallow
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in shallow.named_parameters():
        parameter.requires_grad_(trains.get(name, True))
    targets = "attention" if has_experts(model) else "all-linear"
    if "QLoRA" in stack.names:
        return apply_qlora(shallow, rank=RANK, target_modules=targets)
    if "LoRA, 16-bit base" in stack.names:
        return apply_lora(shallow, rank=RANK, target_modules=targets, check=False)
    return shallow


def has_experts(model: Any) -> bool:
    """Whether the blocks have experts, which adapters of linear layers do not reach."""
    names = {type(module).__name__ for module in decoder_blocks(model).modules()}
    return any("Experts" in name or "Moe" in name for name in names)


def _optimizer(model: Any, stack: Stack, micro_batches: int) -> Any:
    if "16-bit AdamW" in stack.names:
        return sixteen_bit_adamw(model, lr=LR)
    if "8-bit AdamW" in stack.names:
        return eight_bit_adamw(model, lr=LR)
    if "step in backward" in stack.names:
        return apply_optimizer_in_backward(model, lr=LR, fused=True)
    if "optimizer offload" in stack.names:
        return offload_optimizer(model, lr=LR, micro_batches=micro_batches)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, fused=True)


# --- its peak -------------------------------------------------------------------------------------


def dry_peak(question: Question, stack: Stack) -> int:
    """Bytes at the peak of the step on tensors without data; what a recipe refuses, it refuses."""
    build_of = functools.partial(build_with, question, stack)
    depth = len(decoder_blocks(question.model))
    few, period = _repetition(question.model)
    if 3 * (few + period) >= depth:
        build = build_of(layers=depth)
        return predict(build, card=question.card, allocator=False).peak
    key = [
        without_adapters(question.model).config.to_dict(),
        str(question.model.dtype),
        str(getattr(question.model, "peft_config", None)),
        [parameter.requires_grad for parameter in question.model.parameters()],
        [question.rows, question.length, stack.names, stack.micro_batches],
    ]
    step = any_size(build_of, key=key, card=question.card, layers=(few, few + period))
    return step.peak(layers=depth)


def _repetition(model: Any) -> tuple[int, int]:
    """The fewest blocks that have all kinds, and how many more end with the same kind."""
    per_block = _per_block(without_adapters(model).config.get_text_config())
    kinds = []
    for number, block in enumerate(decoder_blocks(model)):
        kinds.append((repr(block), [values[number] for values in per_block.values()]))
    depth = len(kinds)
    for period in range(1, depth):
        others = [at for at in range(depth - period) if kinds[at] != kinds[at + period]]
        few = max([2, period, *[at + 1 + period for at in others[-1:]]])
        few += (depth - few) % period
        if few + period < depth:
            return few, period
    return depth, depth


def _per_block(config: Any) -> dict[str, list[Any]]:
    """The lists in a configuration that have an entry for each block."""
    depth = config.num_hidden_layers
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list)}
    return {name: value for name, value in lists.items() if len(value) == depth}


BY_EQUATION = {
    "QLoRA": equation.in_four_bits,
    "checkpointing": equation.with_checkpointing,
    "loss in chunks": equation.with_chunked_loss,
    "16-bit AdamW": functools.partial(equation.with_states_in, bits=16),
    "8-bit AdamW": functools.partial(equation.with_states_in, bits=8),
    "step in backward": equation.with_step_in_backward,
    "optimizer offload": functools.partial(replace, gradients=0, states=0),
}


def arithmetic_peak(question: Question, stack: Stack) -> int | None:
    """The same by the equation, at once; None where it says nothing of this model or recipe."""
    model = question.model
    known = {*BESIDE[-1], *PRICED}
    changed = hasattr(model, "peft_config") or not all(p.requires_grad for p in model.parameters())
    if changed or model.config.model_type not in BY_ARITHMETIC or not known.issuperset(stack.names):
        return None
    adapters = set(ADAPTERS).intersection(stack.names)
    if adapters:
        with torch.device("meta"):  # the base as it would be loaded
            config = copy.deepcopy(model.config)
            model = type(model)._from_config(config, dtype=torch.bfloat16)
    rows = question.rows // stack.micro_batches
    step = equation.plain_step(model, rows=rows, length=question.length)
    if adapters:
        step = equation.with_adapters(step, rank=RANK)
    for name, change in BY_EQUATION.items():
        if name in stack.names:
            step = change(step)
    if stack.micro_batches > 1 and "optimizer offload" not in stack.names:
        # Gradients are there all the time.
        step = replace(step, weights=step.weights + step.gradients, gradients=0)
    return step.peak


# --- the remedies ---------------------------------------------------------------------------------


class Remedies:
    """The stacks that one would choose among, in the order to try, with reasons for the missing."""

    def __init__(self, question: Question, *, all_dry: bool = False) -> None:
        self.question = question
        self.refused: dict[str, str] = {}  # by name of a recipe, in the words of the recipe
        self._all_dry = all_dry
        self._dry: dict[tuple[Stack, int], int | None] = {}
        self.short = max(2, min(SHORT, question.length // 2))
        self.stacks = self._chosen()

    def rows(self) -> list[Remedy]:
        """The remedies, of which the first that fits is confirmed by a step without data."""
        while True:
            rows = [self._remedy(stack) for stack in self.stacks]
            first = first_that_fits(rows)
            if first is None or not first.by_arithmetic:
                return rows
            self._confirmed(self.stacks[rows.index(first)])
            self.stacks = self._chosen()  # by what is known now: the arithmetic may be refuted

    def smallest(self) -> tuple[Stack, int]:
        """The stack with the smallest peak, and that peak."""
        while True:
            stack = min(self.stacks, key=self._peak)
            peak = self._confirmed(stack)
            if stack == min(self.stacks, key=self._peak):  # the step may refute the arithmetic
                return stack, peak

    def longest_rows(self) -> int | None:
        """Tokens of a row with which the smallest stack fits, or None if no row is short enough.

        They are where the straight line through two lengths meets the limit. A step confirms them:
        a peak above the line is the second length of the next one.
        """
        stack, long_peak = self.smallest()
        long = self.question.length
        peak = self._confirmed(stack, self.short)
        limit = self.question.limit
        if peak is None or peak > limit:
            return None
        while long_peak > limit:
            share = (limit - peak) / (long_peak - peak)
            long = self.short + int(share * (long - self.short)) // 8 * 8
            long_peak = self._confirmed(stack, long)
        return long

    def _chosen(self) -> list[Stack]:
        """As it is, and for each price the cheapest stack that fits; none where there is no need.

        A stack that does not fit is shown if it comes closer than those before.
        """
        limit = self.question.limit
        lowest = self._peak(Stack())
        chosen = [Stack()]
        if lowest <= limit:
            return chosen
        for priced in ((), *[(name,) for name in self._priced()]):
            stack = self._cheapest(priced)
            peak = math.inf if stack is None else self._peak(stack)
            if peak <= limit or peak < lowest:
                chosen.append(stack)
                lowest = min(lowest, peak)
            if peak <= limit and not priced:
                break
        return chosen

    def _priced(self) -> list[str]:
        if hasattr(self.question.model, "peft_config"):
            return ["QLoRA"]
        names = [name for name in PRICED if name in self.question.recipes]
        if self.question.model.dtype.itemsize < 4:
            # Of 16-bit weights AdamW's states have 16 bits anyway.
            return [name for name in names if name != "16-bit AdamW"]
        return names

    def _cheapest(self, priced: tuple[str, ...]) -> Stack | None:
        """The cheapest that fits with `priced`, or that with the smallest peak."""
        strongest = {}
        for names in BESIDE[-2:]:
            strongest |= self._peaks((*names, *priced))
            if min(strongest.values(), default=math.inf) > self.question.limit:
                continue
            for cheaper in BESIDE:
                for stack, peak in self._peaks((*cheaper, *priced)).items():
                    if peak <= self.question.limit:
                        return stack
        if strongest and priced == ("QLoRA",):
            # One row alone may be too long.
            names = BESIDE[-1] if self.question.rows > 1 else BESIDE[-2]
            strongest |= self._peaks((*names, "QLoRA", "tiled MLP"))
            if "activation offload" in self.question.recipes:
                strongest |= self._peaks((*names, "QLoRA", "tiled MLP", "activation offload"))
        return min(strongest, key=strongest.__getitem__, default=None)

    def _peaks(self, names: tuple[str, ...]) -> dict[Stack, int]:
        """The peak with `names` unless they are refused, in each number of micro-batches.

        Without arithmetic these are single rows alone: each number would be a dry step.
        """
        rows = self.question.rows
        counts = [1]
        if "micro-batches" in names:
            quick = not self._all_dry and arithmetic_peak(self.question, Stack(names, rows))
            quick = quick and not set(ADAPTERS).intersection(names)
            counts = [
                count
                for count in range(2, rows + 1)
                if count == rows or (quick and rows % count == 0)
            ]
        if "step in backward" in names and counts != [1]:
            counts = []  # it leaves no gradients to add up
        peaks = {Stack(names, count): self._peak(Stack(names, count)) for count in counts}
        return {stack: peak for stack, peak in peaks.items() if peak is not None}

    def _peak(self, stack: Stack) -> int | None:
        """The peak as far as it is known: by a dry step, else by arithmetic. None: refused."""
        if not self._all_dry and (stack, self.question.length) not in self._dry:
            quick = arithmetic_peak(self.question, stack)
            has_adapters = set(ADAPTERS).intersection(stack.names)
            close = CLOSE_WITH_ADAPTERS if has_adapters else CLOSE
            far = quick is not None and abs(quick / self.question.limit - 1) >= close
            # A step would take seconds for what is no advice on this host.
            if far or (quick is not None and self._host_missing(stack)):
                return quick
        return self._confirmed(stack)

    def _confirmed(self, stack: Stack, length: int | None = None) -> int | None:
        """The peak of the dry step, at another length if one is given."""
        if length is None:
            length = self.question.length
        if (stack, length) not in self._dry:
            try:
                peak = dry_peak(replace(self.question, length=length), stack)
            except ValueError as error:
                if not stack.names:
                    raise
                peak = None
                self.refused.setdefault(stack.names[-1], str(error))
            self._dry[stack, length] = peak
        return self._dry[stack, length]

    def _remedy(self, stack: Stack) -> Remedy:
        peak = self._peak(stack)
        recipes = [RECIPES[name] for name in stack.names]
        return Remedy(
            name=" + ".join(self._in_words(stack)) or "as it is",
            saves=", ".join(recipe.saves for recipe in recipes),
            costs=", ".join(dict.fromkeys(recipe.costs for recipe in recipes)),
            where=", ".join(recipe.where for recipe in recipes),
            peak=peak,
            fits=peak <= self.question.limit,
            host_needed=self._host_missing(stack),
            by_arithmetic=(stack, self.question.length) not in self._dry,
        )

    def _host_missing(self, stack: Stack) -> int:
        """Bytes of host memory that the stack needs, where they are more than there are."""
        needed = host_bytes(self.question.model) if "optimizer offload" in stack.names else 0
        return needed if needed > self.question.host else 0

    def _in_words(self, stack: Stack) -> Iterator[str]:
        for name in stack.names:
            if name == "micro-batches":
                rows = self.question.rows // stack.micro_batches
                yield f"{stack.micro_batches} micro-batches of {rows}"
            elif name in ADAPTERS and has_experts(self.question.model):
                yield f"{name}, on attention only"
            else:
                yield name
