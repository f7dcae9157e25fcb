"""The remedies against running out of memory, each with the predicted peak of the step it makes.

Part of out_of_memory_doctor. A remedy is a stack of recipes, applied together. Its peak is that of
the real step on tensors without data, taken with few blocks and followed to all of them. That costs
some seconds for each stack. So where the arithmetic of core.predict.equation holds, it comes first,
and the step confirms what is close to the limit and what is advised.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from recipes_lib.attention.head_groups import apply_head_groups
from recipes_lib.core.measure.machine import GIB
from recipes_lib.core.model.causal_lm import decoder_blocks, without_adapters
from recipes_lib.core.predict import Build, Card, equation, predict
from recipes_lib.core.predict.any_size import any_size
from recipes_lib.fine_tuning.lora import apply_lora
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
CLOSE = 0.05  # share of the limit: closer than this the arithmetic does not decide
BY_ARITHMETIC = ("llama", "mistral", "qwen2")  # families whose blocks are those of the equation

# --- the recipes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """What a recipe saves and costs, and the file that explains it."""

    saves: str
    costs: str
    where: str


RECIPES = {
    "micro-batches": Recipe(
        "(1 - 1/k) of activations and loss",
        "smaller products",
        "training/gradient_accumulation.py",
    ),
    "loss in chunks": Recipe(
        "logits: 12 bytes x tokens x vocabulary", "little", "memory/chunked_cross_entropy"
    ),
    "checkpointing": Recipe(
        "all but the blocks' inputs", "one more forward", "memory/activation_checkpointing.py"
    ),
    "16-bit AdamW": Recipe(
        "half of fp32 states", "rounded states", "precision/sixteen_bit_adam.py"
    ),
    "8-bit AdamW": Recipe(
        "6 of 8 bytes x parameters", "rounded states", "precision/eight_bit_adam.py"
    ),
    "step in backward": Recipe(
        "all gradients but one",
        "no accumulation, no clipping",
        "memory/optimizer_in_backward.py",
    ),
    "optimizer offload": Recipe(
        "states and gradients", "traffic to the host", "memory/optimizer_offload.py"
    ),
    "LoRA, 16-bit base": Recipe(
        "gradients, states, half of the rest", "only adapters train", "fine_tuning/lora.py"
    ),
    "QLoRA": Recipe("1.5 of 2 bytes x weights", "a rounded base, time", "fine_tuning/qlora.py"),
    "tiled MLP": Recipe("what the MLP keeps of long rows", "little", "memory/tiled_mlp"),
    "head groups": Recipe(
        "what attention keeps of long rows", "smaller products", "attention/head_groups.py"
    ),
    "activation offload": Recipe(
        "the blocks' inputs", "traffic to the host", "memory/activation_offload"
    ),
}

# What leaves the gradient as it is, from cheap to dear: whatever else is done, these go with it.
BESIDE = (
    (),
    ("loss in chunks",),
    ("micro-batches",),
    ("micro-batches", "loss in chunks"),
    ("loss in chunks", "checkpointing"),
    ("micro-batches", "loss in chunks", "checkpointing"),
)
# Where one row alone is too long for all of these.
FOR_LONG_ROWS = (
    (*BESIDE[-1], "tiled MLP"),
    (*BESIDE[-1], "tiled MLP", "activation offload"),
)
ADAPTERS = ("LoRA, 16-bit base", "QLoRA")
# What changes the result, or needs another memory, in the order to try.
PRICED = ("16-bit AdamW", "8-bit AdamW", "step in backward", "optimizer offload", *ADAPTERS)

# --- a step with recipes --------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """The step that has to fit: of which model, on which batch, in which memory.

    `card` is None where a CPU computes, whose memory is the host's.
    """

    model: Any
    rows: int
    length: int
    card: Card | None
    limit: float  # bytes that tensors may take


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
        if "head groups" in stack.names:
            apply_head_groups(model, check=False)
        if "checkpointing" in stack.names:
            apply_activation_checkpointing(model, check=False)
        if "loss in chunks" in stack.names:
            apply_chunked_cross_entropy(model, check=False)
        return model, _optimizer(model, stack, micro_batches), step

    def step(model: Any, optimizer: Any) -> None:
        if "activation offload" in stack.names:
            with offload_activations(model):
                forward_and_backward(model)
        else:
            forward_and_backward(model)
        optimizer.step()
        optimizer.zero_grad()

    def forward_and_backward(model: Any) -> None:
        if micro_batches > 1:
            options = {"micro_batches": micro_batches, "loss_sum": own_loss_sum}
            accumulate_gradients(model, batch, **options)
        else:
            model(**batch, use_cache=False).loss.backward()

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
    "step in backward": functools.partial(replace, gradients=0),
    "optimizer offload": functools.partial(replace, gradients=0, states=0),
}


def arithmetic_peak(question: Question, stack: Stack) -> int | None:
    """The same by the equation, at once; None where it says nothing of this model or recipe."""
    model = question.model
    known = {*BESIDE[-1], *PRICED}
    changed = hasattr(model, "peft_config") or not all(p.requires_grad for p in model.parameters())
    if changed or model.config.model_type not in BY_ARITHMETIC or not known.issuperset(stack.names):
        return None
    rows = question.rows // stack.micro_batches
    if set(ADAPTERS).intersection(stack.names):
        step = equation.plain_step(_on_meta(model), rows=rows, length=question.length)
        step = equation.with_adapters(step, rank=RANK)
    else:
        step = equation.plain_step(model, rows=rows, length=question.length)
    for name, change in BY_EQUATION.items():
        if name in stack.names:
            step = change(step)
    if stack.micro_batches > 1 and "optimizer offload" not in stack.names:
        # Gradients are there all the time.
        step = replace(step, weights=step.weights + step.gradients, gradients=0)
    return step.peak


def _on_meta(model: Any) -> Any:
    """The model as it would be loaded in 16 bits, without data."""
    with torch.device("meta"):
        config = copy.deepcopy(model.config)
        return type(model)._from_config(config, dtype=torch.bfloat16)


# --- the remedies ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remedy:
    """What to apply together. Without a model there are no peaks: then `peak` is None."""

    name: str
    saves: str = ""
    costs: str = ""
    where: str = ""
    peak: int | None = None
    fits: bool | None = None
    by_arithmetic: bool = False

    @property
    def outcome(self) -> str:
        """The predicted peak, and whether it fits: "16.5 GiB, fits"."""
        if self.peak is None:
            return ""
        about = "about " if self.by_arithmetic else ""
        return f"{about}{readable(self.peak)}, {'fits' if self.fits else 'too much'}"

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


class Remedies:
    """The stacks that one would choose among, in the order to try, with reasons for the missing."""

    def __init__(self, question: Question, *, spare_the_host: bool, all_dry: bool) -> None:
        self.question = question
        self.refused: dict[str, str] = {}  # by name of a recipe, in the words of the recipe
        self._all_dry = all_dry
        self._dry: dict[tuple[Stack, int], int | None] = {}
        self._spare_the_host = spare_the_host or question.card is None
        self.short = max(2, min(SHORT, question.length // 2))
        self.stacks = list(self._chosen())

    def rows(self) -> list[Remedy]:
        """The remedies, of which the first that fits is confirmed by a step without data."""
        for stack in self.stacks:
            if self._peak(stack) <= self.question.limit:
                self._confirm(stack)
                if self._peak(stack) <= self.question.limit:
                    break
        return [self._remedy(stack) for stack in self.stacks if self._peak(stack) is not None]

    def _chosen(self) -> Iterator[Stack]:
        """As it is, and for each price the cheapest stack that fits; none where there is no need.

        A stack that does not fit is shown if it comes closer than those before.
        """
        question = self.question
        yield Stack()
        lowest = self._peak(Stack())
        if lowest <= question.limit:
            return
        for priced in ((), *[(name,) for name in self._priced()]):
            stack = self._cheapest(priced)
            peak = None if stack is None else self._peak(stack)
            if peak is None:
                continue
            if peak <= question.limit or peak < lowest:
                yield stack
                lowest = min(lowest, peak)
            if peak <= question.limit and not priced:
                return

    def _priced(self) -> list[str]:
        names = list(PRICED)
        if self.question.model.dtype.itemsize < 4:
            names.remove("16-bit AdamW")  # of 16-bit weights AdamW's states have 16 bits anyway
        if self._spare_the_host:
            names.remove("optimizer offload")
        if hasattr(self.question.model, "peft_config"):
            return ["QLoRA"]
        return names

    def _cheapest(self, priced: tuple[str, ...]) -> Stack | None:
        """The cheapest that fits with `priced`, or that with the smallest peak."""
        strongest = self._peaks(BESIDE[-2:], priced)
        fits = min(strongest.values(), default=math.inf) <= self.question.limit
        if not fits and priced == ("QLoRA",) and self._rows_are_too_long(priced):
            strongest |= self._peaks(FOR_LONG_ROWS, priced)
        if not fits:
            return min(strongest, key=strongest.__getitem__, default=None)
        for names in BESIDE:
            for stack, peak in self._peaks([names], priced).items():
                if peak <= self.question.limit:
                    return stack
        return None

    def _peaks(self, beside: Iterable[tuple[str, ...]], priced: tuple[str, ...]) -> dict:
        """The stacks with `priced` that no recipe refuses, and their peaks."""
        peaks = {}
        for names in beside:
            for stack in self._in_micro_batches((*names, *priced)):
                peaks[stack] = self._peak(stack)
        return {stack: peak for stack, peak in peaks.items() if peak is not None}

    def _in_micro_batches(self, names: tuple[str, ...]) -> Iterator[Stack]:
        """The stack, with each number of micro-batches if it has them; all single rows at least."""
        if "micro-batches" not in names:
            yield Stack(names)
            return
        if "step in backward" in names:
            return  # it leaves no gradients to add up
        rows = self.question.rows
        for count in range(2, rows + 1):
            stack = Stack(names, count)
            quick = not self._all_dry and arithmetic_peak(self.question, stack) is not None
            if rows % count == 0 and (quick or count == rows):
                yield stack

    def _rows_are_too_long(self, priced: tuple[str, ...]) -> bool:
        """Whether the same would fit with short rows."""
        stack = Stack((*BESIDE[-1], *priced), self.question.rows)
        peak = self._peak(stack, length=self.short)
        return peak is not None and peak <= self.question.limit

    def smallest(self) -> tuple[Stack, int]:
        """The stack with the smallest peak, and that peak."""
        peaks = {stack: self._peak(stack) for stack in self.stacks}
        stack = min(peaks, key=peaks.__getitem__)
        self._confirm(stack)
        return stack, self._peak(stack)

    def longest_rows(self) -> int | None:
        """Tokens of a row with which the smallest stack fits, or None if no row is short enough.

        With the tokens a peak grows in a straight line, or faster: between two lengths it is never
        above the straight line through both.
        """
        stack, long_peak = self.smallest()
        limit = self.question.limit
        length, peak = self.short, self._peak(stack, length=self.short)
        if peak is None or peak > limit or long_peak <= peak:
            return None
        share = (limit - peak) / (long_peak - peak)
        return length + int(share * (self.question.length - length)) // 8 * 8

    def _peak(self, stack: Stack, *, length: int | None = None) -> int | None:
        """The peak as far as it is known: by a dry step, else by arithmetic. None: refused."""
        length = length or self.question.length
        if (stack, length) not in self._dry:
            question = replace(self.question, length=length)
            quick = None if self._all_dry else arithmetic_peak(question, stack)
            close = quick is None or abs(quick / self.question.limit - 1) < CLOSE
            if not close:
                return quick
            self._confirm(stack, length)
        return self._dry[stack, length]

    def _confirm(self, stack: Stack, length: int | None = None) -> None:
        length = length or self.question.length
        if (stack, length) in self._dry:
            return
        try:
            peak = dry_peak(replace(self.question, length=length), stack)
        except ValueError as error:
            peak = None
            new = [name for name in stack.names if name not in BESIDE[-1]] or stack.names
            self.refused.setdefault(new[-1], str(error))
        self._dry[stack, length] = peak

    def _remedy(self, stack: Stack) -> Remedy:
        peak = self._peak(stack)
        recipes = [RECIPES[name] for name in stack.names]
        costs = [recipe.costs for recipe in recipes]
        if "optimizer offload" in stack.names:
            costs.append(f"{readable(host_bytes(self.question.model))} of host memory")
        return Remedy(
            name=" + ".join(self._in_words(stack)) or "as it is",
            saves=", ".join(recipe.saves for recipe in recipes),
            costs=", ".join(dict.fromkeys(costs)),
            where=", ".join(recipe.where for recipe in recipes),
            peak=peak,
            fits=peak <= self.question.limit,
            by_arithmetic=(stack, self.question.length) not in self._dry,
        )

    def _in_words(self, stack: Stack) -> Iterable[str]:
        for name in stack.names:
            if name == "micro-batches":
                rows = self.question.rows // stack.micro_batches
                yield f"{stack.micro_batches} micro-batches of {rows}"
            elif name in ADAPTERS and has_experts(self.question.model):
                yield f"{name}, on attention only"
            else:
                yield name


def readable(number: float) -> str:
    """Bytes for people: 16.5 GiB, 320.0 MiB."""
    if number >= GIB:
        return f"{number / GIB:,.1f} GiB"
    return f"{number / MIB:,.1f} MiB"
