"""Out-of-memory doctor: what to try, and with what the model fits.

Problem    "CUDA out of memory" names the tensor that did not fit. It does not say what fills the
           memory, nor what to do.
Idea       Read the numbers in the message. Then take the step itself on tensors without data, with
           one stack of recipes after the other:

               asked for <= free + reserved but unallocated     fragmentation: a setting, no recipe
               capacity - free - this process is large          another process: stop it
               "Killed"                                         the host's memory, not the GPU's
               else   predict(build with recipes).peak          until it fits
Saves      Trying the recipes blindly; nothing by itself.
Costs      Some seconds, less when it was asked before. No GPU, no weights: a model on "meta" will
           do.
Use when   A step ran out of memory, or before you rent a GPU.
Not when   Memory grows from step to step: that is a leak (losses kept with their graph), which
           `torch.cuda.memory._snapshot()` shows. The model is made again from its configuration,
           with its adapters: other recipes that it has already are not seen, nor four bits.
In production   `accelerate estimate-memory` counts weights, gradients and states, not activations
           or the loss.
Source     c10/cuda/CUDACachingAllocator.cpp of PyTorch, which writes the message.

message  its reading of the error: which number means what
remedies  its stacks of recipes, each with the predicted peak
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import Any

import psutil

from recipes_lib.core.checks import check_choice, check_number, check_whole
from recipes_lib.core.measure.machine import GIB, machine
from recipes_lib.core.model.causal_lm import require_causal_lm
from recipes_lib.core.predict import CARDS, Card
from recipes_lib.memory.optimizer_offload import host_bytes
from recipes_lib.workflows.out_of_memory_doctor.message import parse_error, was_killed
from recipes_lib.workflows.out_of_memory_doctor.remedies import (
    RECIPES,
    Question,
    Remedies,
    Remedy,
    first_that_fits,
    readable,
)

# Of what is left beside CUDA's own context: holes between tensors take the rest.
FILLED = 0.95
MODERN = (8, 0)  # compute capability of a device of which only the memory is said
COLUMNS = 80  # of a terminal that nobody has made wider

# --- what the doctor says -------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Findings, and remedies from cheap to dear, as text."""

    findings: list[str]
    remedies: list[Remedy]

    @property
    def first_fit(self) -> Remedy | None:
        """The first remedy with which the model fits, or None."""
        return first_that_fits(self.remedies)

    def __repr__(self) -> str:
        """For a terminal of 80 columns: what to try and its peak, and below it the rest."""
        lines = [_wrapped(finding, "") for finding in self.findings]
        for remedy in self.remedies:
            lines.append(_wrapped(": ".join(filter(None, [remedy.name, remedy.outcome])), ""))
            for name in ("saves", "costs", "where"):
                if getattr(remedy, name):
                    lines.append(_wrapped(f"{name}: {getattr(remedy, name)}", "    "))
        return "\n".join(lines)


def _wrapped(text: str, indent: str) -> str:
    indents = {"initial_indent": indent, "subsequent_indent": indent + "  "}
    return textwrap.fill(text, COLUMNS, **indents, break_long_words=False, break_on_hyphens=False)


# --- the diagnosis --------------------------------------------------------------------------------


def diagnose(
    *,
    error: str = "",
    model: Any = None,
    batch_size: int = 0,
    seq_len: int = 0,
    memory_bytes: int | None = None,
    card: str | None = None,
    by_arithmetic: bool = True,
) -> Diagnosis:
    """Say what to try, from the text of an error, from a model and its batch, or from both.

    Args:
        model: a causal LM on any device. Remedies then say what an AdamW step on
            [batch_size, seq_len] takes with them.
        memory_bytes: of the device; default is what the error leaves to us, else this machine's.
        card: one of core.predict.CARDS, whose memory and kernels count.
        by_arithmetic: let arithmetic decide what is far from the limit. It is faster.
    Raises ValueError without error and model, and for an error of another kind.
    """
    if not error and model is None:
        raise ValueError("nothing to diagnose: give the error's text, or a model and its batch")
    said = parse_error(error) if error else {}
    killed = was_killed(error)
    findings = _findings_in(said, killed=killed)
    remedies = _remedies_without_recipe(said)
    if model is None:
        # Killed: the host is what has run out.
        remedies += [each for each in RECIPES.values() if not (killed and "offload" in each.name)]
        return Diagnosis(findings, remedies)

    require_causal_lm(model)
    check_whole(batch_size=batch_size)
    check_whole(least=2, seq_len=seq_len)  # the first token of a row is nobody's target
    device, limit = _device(model, memory_bytes, card, said)
    host = 0 if killed or device is None else psutil.virtual_memory().total
    question = Question(model, batch_size, seq_len, device, limit, host)
    tried = Remedies(question, all_dry=not by_arithmetic)
    rows = tried.rows()
    findings += _findings_about(question, rows, tried, failed=bool(error))
    return Diagnosis(findings, remedies + rows)


def _findings_in(said: dict[str, int], *, killed: bool) -> list[str]:
    """The message in words."""
    if killed:
        held = ""
        if "this process" in said:
            held = f", of which this process held {readable(said['this process'])}"
        return [
            f"Killed is what Linux says when the memory of the host is used up{held}; that of a "
            f"GPU has an error of its own. `dmesg | grep -i killed` shows it. There stay weights "
            f"loaded in 32 bits, an optimizer offload, workers that each hold the data set; and a "
            f"container or a batch job may have a limit below the memory of the machine."
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


def _device(
    model: Any, memory_bytes: int | None, card: str | None, said: dict[str, int]
) -> tuple[Card | None, float]:
    """The GPU that is asked about, or None for a CPU; and the bytes that tensors may take there."""
    here = machine()
    capacity = said.get("capacity", here.memory_bytes)
    memory = said.get("allowed", capacity - said.get("others", 0))
    if memory_bytes is not None:
        check_number(above=0, memory_bytes=memory_bytes)
        memory = memory_bytes
    if card is not None:
        check_choice(CARDS, card=card)
        device = CARDS[card]
    elif here.device == "cuda":
        import torch

        device = Card(here.name, torch.cuda.get_device_capability(), memory)
    elif model.device.type != "cpu" and (memory_bytes is not None or "capacity" in said):
        device = Card(f"a GPU of {readable(memory)}", MODERN, memory)
    else:
        return None, FILLED * memory
    return device, FILLED * device.for_tensors - 2 * device.workspace


def _findings_about(
    question: Question, rows: list[Remedy], tried: Remedies, *, failed: bool
) -> list[str]:
    """What was assumed, and the first remedy that is enough."""
    model, card = question.model, question.card
    on = f"{card.name} (capability {card.capability[0]}.{card.capability[1]})" if card else "a CPU"
    findings = [
        f"Assumed: AdamW on {question.rows} x {question.length:,} tokens, weights in "
        f"{str(model.dtype).removeprefix('torch.')}, on {on}, where tensors may take "
        f"{readable(question.limit)}.",
        "Predicted by the step itself, on tensors without data; about: by arithmetic.",
    ]
    if failed and rows[0].fits:
        findings.append(
            "It should fit: look for tensors that stay from step to step "
            "(loss in place of loss.item())."
        )
    if any("optimizer offload" in row.name for row in rows):
        findings.append(
            f"The optimizer offload needs {readable(host_bytes(model))} of host memory; this "
            f"machine has {readable(psutil.virtual_memory().total)}."
        )
    for name, reason in tried.refused.items():
        findings.append(f"Not with {name}: {reason}.")
    first = first_that_fits(rows)
    words = f"none; {_where_nothing_fits(tried)}" if first is None else first.name
    findings.append(f"First that fits: {words}.")
    return findings


def _where_nothing_fits(tried: Remedies) -> str:
    """What to do then. Shorter rows are no advice where the weights alone are too much."""
    stack, peak = tried.smallest()
    question = tried.question
    beside = 0.0
    if question.card is not None:
        beside = question.card.memory_bytes - question.card.for_tensors
        beside += 2 * question.card.workspace / FILLED
    needed = math.ceil((peak / FILLED + beside) / GIB)
    larger = f"take a device of {needed} GiB or more, or shard over several GPUs (FSDP)"
    length = tried.longest_rows()
    if length is None:
        return f"shorter rows do not help, for {tried.short} tokens are too much already: {larger}"
    return f"shorten the rows to {length:,} tokens, {larger}"
