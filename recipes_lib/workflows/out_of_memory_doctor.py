"""Out-of-memory doctor: what to try in which order, and at which point the model fits.

Problem    "CUDA out of memory" names the tensor that did not fit. It does not say what fills the
           memory, nor what to do.
Idea       Read the numbers in the message, lay out the model's budget, apply one recipe after the
           other:

               asked for <= free + reserved but unallocated     fragmentation: a setting, no recipe
               capacity - free - this process is large          another process: stop it
               else   budget -> micro-batches -> chunked loss -> ... -> QLoRA      until it fits
Saves      Trying the recipes blindly; nothing by itself.
Costs      Nothing runs: it is arithmetic on shapes. A model on "meta", without weights, will do.
Use when   A step ran out of memory, or before you rent a GPU.
Not when   Memory grows from step to step: that is a leak (losses kept with their graph), which
           `torch.cuda.memory._snapshot()` shows.
In production   `accelerate estimate-memory` counts weights, gradients and states, not activations
           or the loss.
Source     c10/cuda/CUDACachingAllocator.cpp of PyTorch, which writes the message.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from recipes_lib.core.budget import Shape
from recipes_lib.core.causal_lm import require_causal_lm
from recipes_lib.core.checks import check_number, check_whole
from recipes_lib.core.machine import machine
from recipes_lib.core.plain_step import budget_of
from recipes_lib.workflows.out_of_memory_doctor_message import parse_error
from recipes_lib.workflows.out_of_memory_doctor_remedies import (
    FITS,
    RECIPES,
    Remedy,
    readable,
    remedies_for,
)

# --- what the doctor says -------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Findings, and remedies in the order to try: a table in Jupyter, text in a terminal."""

    findings: list[str]
    remedies: list[Remedy]

    @property
    def first_fit(self) -> Remedy | None:
        """The first remedy with which, on top of all above it, the model fits.

        None if nothing is enough.
        """
        return _first_fit(self.remedies)

    def table(self) -> list[list[str]]:
        """Header and rows, as text."""
        rows = [["try", "peak", "costs", "where", "saves"]]
        for remedy in self.remedies:
            rows.append([remedy.name, remedy.outcome, remedy.costs, remedy.where, remedy.saves])
        return rows

    def __repr__(self) -> str:
        table = self.table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = list(self.findings)
        for row in table:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        findings = [f"<p>{html.escape(finding)}</p>" for finding in self.findings]
        rows = []
        for row in self.table():
            cells = [f"<td>{html.escape(cell)}</td>" for cell in row]
            rows.append(f"<tr>{''.join(cells)}</tr>")
        return f"{''.join(findings)}<table>{''.join(rows)}</table>"


# --- the diagnosis --------------------------------------------------------------------------------


def diagnose(
    *,
    error: str = "",
    model: Any = None,
    batch_size: int = 0,
    seq_len: int = 0,
    memory_bytes: int | None = None,
) -> Diagnosis:
    """Say what to try, from the text of an error, from a model and its batch, or from both.

    Args:
        model: a causal LM on any device. Remedies then say what they save of an AdamW step on
            [batch_size, seq_len].
        memory_bytes: of the device; default is what the error leaves to us, else this machine's.
    Raises ValueError without error and model, for a model without its batch, and for an error of
    another kind.
    """
    if not error and model is None:
        raise ValueError(
            "nothing to diagnose: give the error's text, or a model with batch_size and seq_len, "
            "or both"
        )
    said = {}
    if error:
        said = parse_error(error)
    findings = _findings_in(said)
    remedies = _remedies_without_recipe(said)
    if model is None:
        for name, recipe in RECIPES.items():
            remedies.append(Remedy(name, recipe.saves, recipe.costs, recipe.where))
        return Diagnosis(findings, remedies)

    require_causal_lm(model)
    check_whole(batch_size=batch_size)
    check_whole(least=2, seq_len=seq_len)  # the first token of a row is nobody's target
    shape = Shape(batch=batch_size, seq=seq_len)
    limit = _memory_for_us(memory_bytes, said)
    tried = remedies_for(model, shape, memory_bytes=limit)
    findings += _findings_about(model, shape, limit, _first_fit(tried), failed=bool(error))
    return Diagnosis(findings, remedies + tried)


def _findings_in(said: dict[str, int]) -> list[str]:
    """The message in words."""
    words = []
    for name, number in said.items():
        if number and name != "reserved":  # which is said in two parts
            words.append(f"{name} {readable(number)}")
    if not words:
        return []
    return [f"The error says: {', '.join(words)}."]


def _remedies_without_recipe(said: dict[str, int]) -> list[Remedy]:
    """Two causes that no recipe cures: another process, and memory in pieces."""
    remedies = []
    others = said.get("others", 0)
    if others:
        remedies.append(Remedy("stop other processes", saves=readable(others), where="nvidia-smi"))

    requested = said.get("requested", 0)
    free = said.get("free", 0)
    pieces = said.get("unallocated", 0)
    # The bytes were there, but in pieces that PyTorch held.
    if pieces >= free and 0 < requested <= pieces + free:
        remedies.append(
            Remedy(
                "memory in one piece",
                saves=f"{readable(pieces)} in pieces (before torch 2.1: max_split_size_mb:512)",
                costs="a restart",
                where="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            )
        )
    return remedies


def _memory_for_us(memory_bytes: int | None, said: dict[str, int]) -> int:
    """What this process may use: as given, as the error says, or all that the machine has."""
    if memory_bytes is not None:
        check_number(above=0, memory_bytes=memory_bytes)
        return memory_bytes
    if "allowed" in said:
        return said["allowed"]
    capacity = said.get("capacity", machine().memory_bytes)
    return capacity - said.get("others", 0)


def _findings_about(
    model: Any, shape: Shape, limit: int, enough: Remedy | None, *, failed: bool
) -> list[str]:
    """The peak of the plain step and its parts, and the first remedy that is enough."""
    budget = budget_of(model, shape)
    parts = [f"{name} {readable(part)}" for name, part in budget.at_peak().items() if part]
    findings = [
        f"Predicted peak in {model.dtype} with AdamW: "
        f"{readable(budget.peak)} of {readable(limit)}: {', '.join(parts)}."
    ]
    if failed and budget.peak <= FITS * limit:
        findings.append(
            "It should fit: look for tensors that stay from step to step "
            "(loss in place of loss.item())."
        )
    first = "none; shorten the rows, or shard over several GPUs (FSDP)"
    if enough is not None:
        first = enough.name
    findings.append(
        f"Each row includes those above; only adapters do without 8-bit states and the offload. "
        f"{1 - FITS:.0%} of the memory stays free. First that fits: {first}."
    )
    return findings


def _first_fit(remedies: list[Remedy]) -> Remedy | None:
    for remedy in remedies:
        if remedy.fits:
            return remedy
    return None
