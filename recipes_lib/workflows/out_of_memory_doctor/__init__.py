"""Out-of-memory doctor: what to try, and with what the model fits.

Problem    "CUDA out of memory" names the tensor that did not fit. It does not say what fills the
           memory, nor what to do.
Idea       Read who asked, of which memory, and for how much. Then take the step itself on tensors
           without data, with one stack of recipes after the other:

               asked <= free + reserved but unallocated     fragmentation: a setting, no recipe
               limit - free - this process is large         another process: stop it
               /dev/shm, a paging file, a library           what that memory needs, no recipe
               else   predict(build with recipes).peak      until it fits
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

message  its reading of the error: who asked, of which memory, for how much
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
from recipes_lib.core.model.recurrence import slow_recurrence
from recipes_lib.core.predict import CARDS, Card
from recipes_lib.memory.optimizer_offload import host_bytes
from recipes_lib.workflows.out_of_memory_doctor.message import GPUS, Message, read_message
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
    message = read_message(error) if error else None
    findings = _findings_in(message) if message else []
    remedies = _remedies_without_recipe(message) if message else []
    helpful = _recipes_of(message.place if message else GPUS[0])
    if model is None or not helpful:
        return Diagnosis(findings, remedies + helpful)

    require_causal_lm(model)
    check_whole(batch_size=batch_size)
    check_whole(least=2, seq_len=seq_len)  # the first token of a row is nobody's target
    device, limit = _device(model, memory_bytes, card, message)
    if device is None:
        helpful = _recipes_of("host")
    names = tuple(recipe.name for recipe in helpful)
    host = psutil.virtual_memory().total
    question = Question(model, batch_size, seq_len, device, limit, host, names)
    tried = Remedies(question, all_dry=not by_arithmetic)
    rows = tried.rows()
    findings += _findings_about(question, rows, tried, failed=bool(error))
    return Diagnosis(findings, remedies + rows)


def _findings_in(message: Message) -> list[str]:
    """The message in words."""
    words = [f"{name} {readable(size)}" for name, size in message.sizes.items()]
    findings = [f"The error says: {', '.join([message.allocator, message.where, *words])}."]
    if message.place == "host":
        findings.append(
            "The memory of the host is used up, and not that of a GPU: by weights loaded in 32 "
            "bits, an optimizer offload, workers that each hold the data set. A container or a "
            "batch job may have a limit below the memory of the machine."
        )
    return findings


# Where no recipe is the first advice: the source or the place | what to do | saves | costs | where.
ADVICE = """
Triton | smaller blocks | one kernel's tile; no memory of the GPU is missing | other speed | \
block sizes and num_stages of the kernel
shared memory | more of /dev/shm | | | docker run --shm-size=16g, or --ipc=host
shared memory | fewer workers | batches that wait there | slower reading | DataLoader(num_workers=2)
paging file | a larger paging file | | space on the disk | Windows: Performance, Virtual memory
paging file | fewer workers | PyTorch's libraries, once for each | slower reading | \
DataLoader(num_workers=0)
loading | all on one device | what accelerate leaves free | an error if it does not fit | \
from_pretrained(..., device_map={"": 0})
loading | four bits in place of eight | half of the weights | a rounded base | \
BitsAndBytesConfig(load_in_4bit=True)
Linux | look what was ended | | | dmesg -T, the lines with "Killed process"
kernel of a notebook | look who has ended it | | | dmesg -T, the lines with "Killed process"
NumPy | read in parts | the array as a whole | | numpy.load(..., mmap_mode="r"), or streaming=True
paged memory of bitsandbytes | states without pages | host memory | all on the card | \
optim="adamw_8bit"
bitsandbytes | room beside PyTorch's cache | | | torch.cuda.set_per_process_memory_fraction(0.9)
NCCL | room beside PyTorch's cache | | | torch.cuda.set_per_process_memory_fraction(0.9)
cuBLAS or cuDNN | room beside PyTorch's cache | | | torch.cuda.set_per_process_memory_fraction(0.9)
cuBLAS or cuDNN | look for a wrong token id, which ends in this text, too | | slow | \
CUDA_LAUNCH_BLOCKING=1
rocBLAS or MIOpen | room beside PyTorch's cache | | | \
torch.cuda.set_per_process_memory_fraction(0.9)
driver | look who holds the memory | | | {tool}
JAX | no memory in advance | three quarters of the card | | XLA_PYTHON_CLIENT_PREALLOCATE=false
one buffer of Metal | a smaller largest tensor | | | fewer or shorter rows, loss in chunks
one block of XPU | no tensor above 4 GiB | | | fewer or shorter rows, loss in chunks
"""
TOOLS = {"CUDA": "nvidia-smi", "ROCm": "rocm-smi", "XPU": "xpu-smi"}
IN_ONE_PIECE = {
    "CUDA": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "ROCm": "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True",
    "XPU": "torch.xpu.empty_cache()",
}
LARGEST_BLOCK_OF_XPU = 4 * GIB


def _remedies_without_recipe(message: Message) -> list[Remedy]:
    """What no recipe cures: another memory than the GPU's, another process, memory in pieces."""
    remedies = []
    asked = message.asked or 0
    tool = TOOLS.get(message.place, "")
    if message.others:
        saved = readable(message.others)
        remedies.append(Remedy("stop other processes", saves=saved, where=tool))
    pieces = message.unallocated or 0
    free = message.free or 0
    # The bytes were there, but in pieces that PyTorch held.
    if message.place in GPUS and pieces >= free and 0 < asked <= pieces + free:
        where = IN_ONE_PIECE[message.place]
        saved = f"{readable(pieces)} in pieces"
        remedies.append(Remedy("memory in one piece", saved, "a restart", where))
    known = {message.allocator, message.place}
    if message.place == "XPU" and asked >= LARGEST_BLOCK_OF_XPU:
        known.add("one block of XPU")
    for line in ADVICE.strip().splitlines():
        source, *words = [word.strip() for word in line.split("|")]
        if source in known:
            remedies.append(Remedy(*[word.replace("{tool}", tool) for word in words]))
    return remedies


def _recipes_of(place: str) -> list[Remedy]:
    """The recipes that help where this memory is full: no offload to a host that is full itself."""
    if place in GPUS:
        return list(RECIPES.values())
    if place not in ("host", "MPS"):  # a Mac has one memory for both, and no 8-bit optimizer
        return []
    kept = [recipe for recipe in RECIPES.values() if "offload" not in recipe.name]
    if place == "MPS":
        kept.remove(RECIPES["8-bit AdamW"])
    return kept


def _device(
    model: Any, memory_bytes: int | None, card: str | None, message: Message | None
) -> tuple[Card | None, float]:
    """The GPU that is asked about, or None for a CPU; and the bytes that tensors may take there."""
    here = machine()
    said = message.limit if message else None
    memory = said or here.memory_bytes
    if memory_bytes is not None:
        check_number(above=0, memory_bytes=memory_bytes)
        memory = memory_bytes
    if card is not None:
        check_choice(CARDS, card=card)
        device = CARDS[card]
    elif here.device == "cuda":
        import torch

        device = Card(here.name, torch.cuda.get_device_capability(), memory)
    elif model.device.type != "cpu" and (memory_bytes or said):
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
    slow = slow_recurrence(model)
    if slow:
        findings.append(slow)
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
