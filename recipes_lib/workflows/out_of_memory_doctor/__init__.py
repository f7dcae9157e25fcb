"""Out-of-memory doctor: what to try in which order, and at which point the model fits.

Problem    "CUDA out of memory" names the tensor that did not fit. It does not say what fills the
           memory, nor what to do.
Idea       Read the numbers in the message, lay out the model's budget, apply one recipe after the
           other:

               asked for <= free + reserved but unallocated     fragmentation: a setting, no recipe
               capacity - free - this process is large          another process: stop it
               "Killed"                                         the host's memory, not the GPU's
               else   budget -> micro-batches -> chunked loss -> ... -> QLoRA      until it fits
Saves      Trying the recipes blindly; nothing by itself.
Costs      Nothing runs: it is arithmetic on shapes. A model on "meta", without weights, will do.
Use when   A step ran out of memory, or before you rent a GPU.
Not when   Memory grows from step to step: that is a leak (losses kept with their graph), which
           `torch.cuda.memory._snapshot()` shows.
In production   `accelerate estimate-memory` counts weights, gradients and states, not activations
           or the loss.
Source     c10/cuda/CUDACachingAllocator.cpp of PyTorch, which writes the message.

message  its reading of the error: which number means what
remedies  its arithmetic: the recipes, one on top of the other
"""

from __future__ import annotations

import html
import math
import textwrap
from dataclasses import dataclass
from typing import Any

from recipes_lib.core.checks import check_number, check_whole
from recipes_lib.core.measure.machine import GIB, machine
from recipes_lib.core.model.causal_lm import require_causal_lm
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.workflows.out_of_memory_doctor.message import parse_error, was_killed
from recipes_lib.workflows.out_of_memory_doctor.remedies import (
    FITS,
    RECIPES,
    Remedy,
    readable,
    remedies_for,
    smallest_without_rows,
)

COLUMNS = 80  # of a terminal that nobody has made wider

# --- what the doctor says -------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Findings, and remedies in the order to try: a table in Jupyter, text in a terminal."""

    findings: list[str]
    remedies: list[Remedy]

    @property
    def first_fit(self) -> Remedy | None:
        """The first remedy with which, on top of all above it, the model fits, or None."""
        return _first_fit(self.remedies)

    def table(self) -> list[list[str]]:
        """Header and rows, as text."""
        rows = [["try", "peak", "costs", "where", "saves"]]
        for remedy in self.remedies:
            rows.append([remedy.name, remedy.outcome, remedy.costs, remedy.where, remedy.saves])
        return rows

    def __repr__(self) -> str:
        """For a terminal of 80 columns: what to try and the peak in a line, the rest below it."""
        lines = []
        for finding in self.findings:
            lines += textwrap.wrap(finding, COLUMNS, subsequent_indent="  ")
        width = max(len(remedy.name) for remedy in self.remedies)
        for remedy in self.remedies:
            lines.append(f"{remedy.name.ljust(width)}  {remedy.outcome}".rstrip())
            for text in remedy.details():
                lines += textwrap.wrap(
                    text,
                    COLUMNS,
                    initial_indent="    ",
                    subsequent_indent="      ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
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
    Raises ValueError without error and model, and for an error of another kind.
    """
    if not error and model is None:
        raise ValueError("nothing to diagnose: give the error's text, or a model and its batch")
    said = parse_error(error) if error else {}
    killed = was_killed(error)
    findings = _findings_in(said, killed=killed)
    remedies = _remedies_without_recipe(said)
    if model is None:
        for name, recipe in RECIPES.items():
            if killed and name == "optimizer offload":
                continue  # the host is what has run out
            remedies.append(Remedy(name, recipe.saves, recipe.costs, recipe.where))
        return Diagnosis(findings, remedies)

    require_causal_lm(model)
    check_whole(batch_size=batch_size)
    check_whole(least=2, seq_len=seq_len)  # the first token of a row is nobody's target
    shape = Shape(batch=batch_size, seq=seq_len)
    limit = _memory_for_us(memory_bytes, said)
    tried = remedies_for(model, shape, memory_bytes=limit, spare_the_host=killed)
    findings += _findings_about(model, shape, limit, tried, failed=bool(error))
    return Diagnosis(findings, remedies + tried)


def _findings_in(said: dict[str, int], *, killed: bool) -> list[str]:
    """The message in words."""
    if killed:
        held = ""
        if "this process" in said:
            held = f", of which this process held {readable(said['this process'])}"
        return [
            f"Killed is what Linux says when the memory of the host is used up{held}; that of a "
            f"GPU has an error of its own. `dmesg | grep -i killed` shows it. A container or a "
            f"batch job may have a limit below the memory of the machine.",
            "On a host with a GPU look at what stays in host memory: weights that are loaded in "
            "32 bits, an optimizer offload, workers that each hold the data set.",
        ]
    # What is reserved is said in two parts.
    shown = {name: number for name, number in said.items() if number and name != "reserved"}
    words = ", ".join(f"{name} {readable(number)}" for name, number in shown.items())
    return [f"The error says: {words}."] if words else []


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
    model: Any, shape: Shape, limit: int, tried: list[Remedy], *, failed: bool
) -> list[str]:
    """The peak of the plain step and its parts, and the first remedy that is enough."""
    budget = budget_of(model, shape)
    parts = [f"{name} {readable(part)}" for name, part in budget.at_peak().items() if part]
    findings = [
        f"Predicted peak in {model.dtype} with AdamW: "
        f"{readable(budget.peak)} of {readable(limit)}: {', '.join(parts)}.",
        f"The prediction is made {budget.source}.",
    ]
    if failed and budget.peak <= FITS * limit:
        findings.append(
            "It should fit: look for tensors that stay from step to step "
            "(loss in place of loss.item())."
        )
    enough = _first_fit(tried)
    if enough is None:
        first = f"none; {_where_nothing_fits(model, limit, tried)}"
    else:
        first = enough.name
    findings.append(
        f"Each row includes those above; only adapters do without 8-bit states and the offload. "
        f"{1 - FITS:.0%} of the memory stays free. First that fits: {first}."
    )
    return findings


def _where_nothing_fits(model: Any, limit: int, tried: list[Remedy]) -> str:
    """What to do then. Shorter rows are no advice where the weights alone are too much."""
    needed = math.ceil(min(remedy.peak for remedy in tried) / FITS / GIB)
    larger = f"take a device of {needed} GiB or more, or shard over several GPUs (FSDP)"
    smallest = smallest_without_rows(model)
    if smallest.peak <= FITS * limit:
        return f"shorten the rows, {larger}"
    return (
        f"shorter rows do not help, for one of two tokens takes {readable(smallest.peak)}, and of "
        f"them the weights {readable(smallest.weights)}: {larger}"
    )


def _first_fit(remedies: list[Remedy]) -> Remedy | None:
    return next((remedy for remedy in remedies if remedy.fits), None)
