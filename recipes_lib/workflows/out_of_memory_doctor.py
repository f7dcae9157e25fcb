"""Out-of-memory doctor: what to try in which order, and at which point the model fits.

Problem    "CUDA out of memory" names the tensor that did not fit, not what fills the memory nor what to do.
Idea       Read the numbers in the message, lay out the model's budget, apply one recipe after the other:

               asked for <= free + reserved but unallocated     fragmentation: a setting, no recipe
               capacity - free - this process is large          another process: stop it
               else   budget -> micro-batches -> chunked loss -> ... -> QLoRA      until it fits
Saves      Trying the recipes blindly; nothing by itself.
Costs      Nothing runs: arithmetic on shapes. A model of the "meta" device, without weights, will do.
Use when   A step ran out of memory, or before you rent a GPU. Not when memory grows from step to step: that
           is a leak (losses kept with their graph), which `torch.cuda.memory._snapshot()` shows.
In production   `accelerate estimate-memory` counts weights, gradients and states, not activations or the loss.
Source     c10/cuda/CUDACachingAllocator.cpp of PyTorch, which writes the message.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import Any

from recipes_lib.core.budget import Budget
from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.machine import machine
from recipes_lib.core.plain_step import budget_of, free_gradients
from recipes_lib.core.sizes import tensor_bytes
from recipes_lib.memory.activation_checkpointing import checkpoint_budget
from recipes_lib.training.gradient_accumulation import split_budget

FITS = 0.95  # of the memory: the CUDA context, workspaces and rounded allocations take the rest
NF4 = (
    0.5 + 1 / 64 + 4 / (64 * 256)
)  # bytes per weight: the code, a scale per 64, a scale per 256 scales
RECIPES = {  # in the order to try: what it saves and costs, its file; the first five leave the gradient as it is
    "micro-batches": (
        "(1 - 1/k) of activations and loss",
        "smaller products",
        "training/gradient_accumulation.py",
    ),
    "loss in chunks": (
        "logits: 12 bytes x tokens x vocabulary",
        "little",
        "Liger fused_linear_cross_entropy",
    ),
    "checkpointing": (
        "all but the blocks' inputs",
        "one more forward",
        "memory/activation_checkpointing.py",
    ),
    "8-bit AdamW": ("6 of 8 bytes x parameters", "rounded states", "precision/eight_bit_adam.py"),
    "optimizer offload": (
        "states and gradients",
        "traffic to the host",
        "memory/optimizer_offload.py",
    ),
    "LoRA, 16-bit base": (
        "gradients, states, half of the rest",
        "only adapters train",
        "fine_tuning/lora.py",
    ),
    "QLoRA": ("1.5 of 2 bytes x weights", "a rounded base, time", "fine_tuning/qlora.py"),
}
SIZE = r"\d[\d.,]*(?: (?:bytes|[KMG]i?B))?"
MESSAGE = {  # "capacty" is how torch 2.0 spells it; "total capacity;" and "reserved in total" come from torch 1
    "requested": rf"[Tt]ried to allocate {SIZE}",
    "free": rf"of which {SIZE} is free|{SIZE} free",
    "capacity": rf"total capaci?ty of {SIZE}|{SIZE} total capacity|max allowed: {SIZE}|the limit is {SIZE}",
    "allowed": rf"{SIZE} allowed",  # by set_per_process_memory_fraction
    "allocated": rf"{SIZE} is allocated by|{SIZE} already allocated|MPS allocated: {SIZE}|{SIZE} of tensors",
    "unallocated": rf"{SIZE} is reserved by PyTorch but unallocated",
    "reserved": rf"{SIZE} reserved in total",
    "this process": rf"this process has {SIZE}",
}


@dataclass(frozen=True)
class Remedy:
    """One thing to try. `peak` and `fits` hold with everything above it; None where no model was given."""

    name: str
    saves: str = ""
    costs: str = ""
    where: str = ""
    peak: int | None = None
    fits: bool | None = None

    @property
    def outcome(self) -> str:
        return (
            ""
            if self.peak is None
            else f"{_size(self.peak)}, {'fits' if self.fits else 'too much'}"
        )


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Findings, and remedies in the order to try: a table in Jupyter, text in a terminal."""

    findings: list[str]
    remedies: list[Remedy]

    @property
    def first_fit(self) -> Remedy | None:
        """The first remedy with which, on top of all above it, the model fits; None if nothing is enough."""
        return next((remedy for remedy in self.remedies if remedy.fits), None)

    def table(self) -> list[list[str]]:
        """Header and rows, as text."""
        rows = [[r.name, r.outcome, r.costs, r.where, r.saves] for r in self.remedies]
        return [["try", "peak", "costs", "where", "saves"], *rows]

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.table())]
        rows = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in self.table()
        ]
        return "\n".join([*self.findings, *rows])

    def _repr_html_(self) -> str:
        rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.table()]
        findings = [f"<p>{html.escape(finding)}</p>" for finding in self.findings]
        return f"{''.join(findings)}<table><tr>{'</tr><tr>'.join(rows)}</tr></table>"


def diagnose(
    *,
    error: str = "",
    model: Any = None,
    batch_size: int = 0,
    seq_len: int = 0,
    memory_bytes: int | None = None,
) -> Diagnosis:
    """Say what to try, from the text of an out-of-memory error, from a model and its batch, or from both.

    Args:
        model: a causal LM on any device, trained with AdamW on [batch_size, seq_len]: remedies carry bytes.
        memory_bytes: of the device; default is what the error says is left to us, else this machine's.
    Raises ValueError with neither of the two, for a model without its batch, and for an error of another kind.
    """
    if not error and model is None:
        raise ValueError(
            "nothing to diagnose: give the error's text, or a model with batch_size and seq_len, or both"
        )
    said = parse_error(" ".join(error.split())) if error else {}  # a terminal may have wrapped it
    findings, remedies = _read(said)
    if model is None:
        return Diagnosis(
            findings, remedies + [Remedy(name, *texts) for name, texts in RECIPES.items()]
        )
    limit = (
        memory_bytes
        or said.get("allowed")
        or said.get("capacity", machine().memory_bytes) - said.get("others", 0)
    )
    budget = budget_of(model, batch_size=batch_size, seq_len=seq_len)
    parts = ", ".join(f"{name} {_size(part)}" for name, part in budget.at_peak().items() if part)
    findings.append(
        f"Predicted peak in {model.dtype} with AdamW: {_size(budget.peak)} of {_size(limit)}: {parts}."
    )
    remedies += estimate_remedies(
        budget, model, batch_size=batch_size, seq_len=seq_len, memory_bytes=limit
    )
    if error and budget.peak <= FITS * limit:
        findings.append(
            "It should fit: look for tensors that stay from step to step (loss in place of loss.item())."
        )
    first = next(
        (r.name for r in remedies if r.fits),
        "none; shorten the rows, or shard over several GPUs (FSDP)",
    )
    findings.append(
        f"Each row includes those above, and {1 - FITS:.0%} stays free. First that fits: {first}."
    )
    return Diagnosis(findings, remedies)


def parse_error(error: str) -> dict[str, int]:
    """The numbers of the message in bytes, as far as it has them: the keys of MESSAGE and `others`."""
    found = {
        key: match[0] for key, pattern in MESSAGE.items() if (match := re.search(pattern, error))
    }
    if not found and not re.search("out of memory|OutOfMemory|_ALLOC_FAILED", error):
        raise ValueError(f"this is not an out-of-memory error: {error[:200]!r}")
    said = {}
    for key, text in found.items():
        number, _, unit = re.search(SIZE, text)[0].partition(" ")
        said[key] = int(
            float(number.rstrip(".,").replace(",", "")) * 1024 ** "bKMG".index(unit[:1] or "b")
        )
    if "reserved" in said:
        said["unallocated"] = said["reserved"] - said["allocated"]
    if {"capacity", "free", "allocated", "unallocated"} <= said.keys():
        others = (
            said["capacity"]
            - said["free"]
            - said.get("this process", said["allocated"] + said["unallocated"])
        )
        said["others"] = others if others > 2 * 2**30 else 0  # less may be our own CUDA context
    return said


def estimate_remedies(
    budget: Budget, model: Any, *, batch_size: int, seq_len: int, memory_bytes: int
) -> list[Remedy]:
    """The recipes in the order to try, each with the predicted peak of itself and all above it."""
    plan, rows, limit = budget, batch_size, FITS * memory_bytes
    remedies = [Remedy("as it is", peak=budget.peak, fits=budget.peak <= limit)]
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    hidden, width = model.config.hidden_size, model.dtype.itemsize
    trained = [p for p in model.parameters() if p.requires_grad]

    def add(key: str, new: Budget, name: str = "") -> Budget:
        terms = [(term, getattr(plan, term), getattr(new, term)) for term in budget.at_peak()]
        saves = [
            f"{term} {_size(old)} → {_size(after)}" for term, old, after in terms if old > after
        ]
        if saves:  # what saves nothing here is left out
            remedies.append(
                Remedy(
                    name or key, ", ".join(saves), *RECIPES[key][1:], new.peak, new.peak <= limit
                )
            )
        return new

    for k in (k for k in range(2, batch_size + 1) if batch_size % k == 0):
        rows = batch_size // k
        split = split_budget(budget, model, batch_size=batch_size, seq_len=seq_len, micro_batches=k)
        if split.peak <= limit or rows == 1:  # the fewest that fit, or one row at a time
            plan = add("micro-batches", split, f"{k} micro-batches of {rows}")
            break
    tokens = rows * seq_len
    inputs = (
        4 * tokens * hidden
    )  # of the output layer: their gradient is left, and that of a trainable weight
    plan = add(
        "loss in chunks",
        plan.change(loss=min(plan.loss, tensor_bytes(head) * head.requires_grad + inputs)),
    )
    whole, plan = plan, add("checkpointing", checkpoint_budget(plan, model, tokens=tokens))
    states = sum(p.numel() * (8 if p is embedding else 2 + 8 / 256) for p in trained)
    plan = add("8-bit AdamW", plan.change(states=min(plan.states, int(states))))
    if model.device.type != "cpu":  # there, nothing is gained by moving to the host
        plan = add("optimizer offload", free_gradients(plan.change(states=0), model))
    full = (
        2 * sum(map(tensor_bytes, trained)) > budget.weights
    )  # otherwise there are adapters already
    linears = [
        p for p in decoder_blocks(model).parameters() if p.ndim == 2 and p.requires_grad == full
    ]
    if full:
        adapters = 4 * 16 * sum(sum(p.shape) for p in linears)  # fp32, of rank 16
        casts = (
            tokens * 4 * sum(16 + p.shape[1] for p in linears)
        )  # peft casts each adapter's input to fp32
        lora = {
            "activations": whole.activations * 2 // width + casts,
            "loss": min(plan.loss, inputs),
        }
        lora["one_block"] = whole.one_block * 2 // width + casts // len(decoder_blocks(model))
        lora["block_gradients"] = whole.block_gradients * 4 // width  # the adapters' are in fp32
        lora |= {
            "gradients": adapters,
            "states": 2 * adapters,
            "last_gradients": 0,
            "embedding_gradient": 0,
        }
        lora = whole.change(**lora, weights=plan.weights * 2 // width + adapters)
        lora = checkpoint_budget(
            lora, model, tokens=tokens, kept=hidden * 2 // width - hidden
        )  # 16-bit inputs
        plan = add("LoRA, 16-bit base", lora.change(carried=adapters * (rows < batch_size)))
    quantized = sum(
        int(p.numel() * ((2 if full else width) - NF4)) for p in linears if p.is_floating_point()
    )
    add("QLoRA", plan.change(weights=plan.weights - quantized))
    return remedies


def _size(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"


def _read(said: dict[str, int]) -> tuple[list[str], list[Remedy]]:
    """The message in words, and the two causes that no recipe cures."""
    words = [
        f"{name} {_size(number)}" for name, number in said.items() if number and name != "reserved"
    ]
    findings = [f"The error says: {', '.join(words)}."] if words else []
    requested, free, pieces, others = (
        said.get(key, 0) for key in ("requested", "free", "unallocated", "others")
    )
    remedies = [Remedy("stop other processes", _size(others), "", "nvidia-smi")] if others else []
    if (
        pieces >= free and 0 < requested <= pieces + free
    ):  # the bytes were there, in pieces that PyTorch held
        setting, old = (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "before torch 2.1: max_split_size_mb:512",
        )
        remedies.append(
            Remedy(
                "memory in one piece", f"{_size(pieces)} in pieces ({old})", "a restart", setting
            )
        )
    return findings, remedies
