"""Out-of-memory doctor: what to try, and with what the model fits.

Problem    "CUDA out of memory" names the tensor that did not fit. It does not say what fills the
           memory, nor what to do.
Idea       Read who asked, of which memory, and for how much. Then add up the bytes of the step with
           one stack of recipes after the other:

               asked <= free + reserved but unallocated     fragmentation: a setting, no recipe
               limit - free - this process is large         another process: stop it
               /dev/shm, a paging file, a library           what that memory needs, no recipe
               else   equation(model, recipes).peak         until it fits

           The list is there at once. `Diagnosis.check()` then takes the step itself, on tensors
           without data, with the row that is advised.
Saves      Trying the recipes blindly; nothing by itself.
Costs      An instant; the check some seconds. No GPU, no weights: a model on "meta" will do.
Use when   A step ran out of memory, or before you rent a GPU.
Not when   Memory grows from step to step: that is a leak (losses kept with their graph), which
           `torch.cuda.memory._snapshot()` shows. Recipes and adapters that the model has already
           are not seen: it is taken by its configuration, and all weights train.
In production   `accelerate estimate-memory` counts weights, gradients and states, not activations
           or the loss.
Source     c10/cuda/CUDACachingAllocator.cpp of PyTorch, which writes the message. "The Llama 3 Herd
           of Models" (arXiv 2407.21783), table 4: the share of a card's rate that was reached.

message          its reading of the error: who asked, of which memory, for how much
remedies         the stacks to choose among, each with the predicted peak
longest_texts    the longest text that fits a card with a stack
predicted_steps  the step itself with a stack, on tensors without data
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field
from typing import Any

import psutil

from recipes_lib.core.checks import check_number, check_whole
from recipes_lib.core.measure.machine import GIB, machine
from recipes_lib.core.model.causal_lm import require_causal_lm, without_adapters
from recipes_lib.core.model.recurrence_kernels import slow_recurrence
from recipes_lib.core.predict import Card
from recipes_lib.core.predict.card import MODERN, card_named, cards_sold_with
from recipes_lib.core.predict.flops import step_operations
from recipes_lib.memory.optimizer_offload import host_bytes
from recipes_lib.workflows.out_of_memory_doctor.message import GPUS, Message, read_message
from recipes_lib.workflows.out_of_memory_doctor.remedies import (
    ADAPTERS,
    FILLED,
    LORA,
    RECIPES,
    Question,
    Remedies,
    Remedy,
    has_experts,
    in_order_of_advice,
    limit_of,
    readable,
)

COLUMNS = 80  # of a terminal that nobody has made wider
COMPARED = ("llama", "mistral", "qwen2", "qwen3")  # with steps on tensors without data
LONG = 32_768  # tokens of a row, for which attention is worth a recipe of its own

# --- what the doctor says -------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Findings, remedies from cheap to dear, and the lines that apply the first that fits."""

    findings: list[str]
    remedies: list[Remedy]
    lines: list[str] = field(default_factory=list)
    tried: Remedies | None = None

    @property
    def first_fit(self) -> Remedy | None:
        """The remedy that is advised, or None."""
        return next(iter(in_order_of_advice(self.remedies)), None)

    def check(self) -> str:
        """What the step itself says of the advice, in some seconds; "" where no row fits."""
        if self.tried is None:
            return ""
        return "\n".join(_in_80_columns(line, "") for line in self.tried.check())

    def __repr__(self) -> str:
        """The doctor's answer in 80 columns: what to try and its peak, and below it the rest."""
        lines = [_in_80_columns(finding, "") for finding in self.findings]
        for remedy in self.remedies:
            lines.append(_in_80_columns(": ".join(filter(None, [remedy.name, remedy.outcome])), ""))
            for name in ("costs", "where"):
                said = getattr(remedy, name)
                if said.startswith("from "):  # a line to copy
                    lines.append(f"    {said}")
                elif said:
                    lines.append(_in_80_columns(f"{name}: {said}", "    "))
        return "\n".join([*lines, *self.lines])


def _in_80_columns(text: str, indent: str) -> str:
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
    gpus: int = 1,
) -> Diagnosis:
    """Say what to try, from the text of an error, from a model and its batch, or from both.

    Args:
        model: a causal LM on any device. Remedies then say what an AdamW step on
            [batch_size, seq_len] takes with them.
        memory_bytes: of the device; default is what the error leaves to us, else this machine's.
        card: one of core.predict.CARDS, or a size such as "24GB": of the cards that are sold with
            it that with the least memory.
        gpus: of them, which share the rows, and the weights if need be.
    Raises ValueError without error and model, and for an error of another kind.
    """
    if not error and model is None:
        raise ValueError(
            "nothing to diagnose: give the error's text (--error), or a model and its batch "
            "(--model, --batch-size, --seq-len)"
        )
    message = read_message(error) if error else None
    findings = _findings_in(message) if message else []
    remedies = _remedies_without_recipe(message) if message else []
    helpful = _recipes_of(message.place if message else GPUS[0])
    if model is None or not helpful:
        return Diagnosis(findings, remedies + helpful, _next_question(message) if helpful else [])

    model = without_adapters(model)
    require_causal_lm(model)
    if not hasattr(model.config.get_text_config(), "num_attention_heads"):
        raise ValueError(
            f"{type(model).__name__} has no attention, which the arithmetic counts: "
            f"recipes_lib.core.predict.predict takes a step of your own"
        )
    check_whole(batch_size=batch_size, gpus=gpus)
    check_whole(least=2, seq_len=seq_len)  # the first token of a row is nobody's target
    device, limit = _card_and_memory(model, memory_bytes, card, message)
    if device is None:
        helpful = _recipes_of("host")
    names = tuple(recipe.name for recipe in helpful)
    host = psutil.virtual_memory().total
    question = Question(model, batch_size, seq_len, device, limit, host, names, gpus)
    tried = Remedies(question)
    findings += _what_it_stands_on(question)
    findings += _findings_about(tried, failed=bool(error), said=memory_bytes)
    lines = []
    if tried.advised:
        lines = _lines_that_apply(question, tried.advised[0])
    return Diagnosis(findings, remedies + tried.rows, lines, tried)


def _findings_in(message: Message) -> list[str]:
    """What the doctor finds in the message, in words."""
    words = [f"{name} {readable(size)}" for name, size in message.sizes.items()]
    findings = [f"The error says: {', '.join([message.allocator, message.where, *words])}."]
    if message.place == "host":
        findings.append(
            "The memory of the host is used up, and not that of a GPU: by weights loaded in 32 "
            "bits, an optimizer offload, workers that each hold the data set. A container or a "
            "batch job may have a limit below the memory of the machine."
        )
    return findings


# Where no recipe is the first advice: sources or places | what to do | costs | where.
ADVICE = """
Triton | smaller blocks of one kernel, no memory is missing | speed | its block sizes, num_stages
shared memory | more of /dev/shm | | docker run --shm-size=16g, or --ipc=host
shared memory | fewer workers | slower reading | DataLoader(num_workers=2)
paging file | a larger paging file | space on the disk | Windows: Performance, Virtual memory
paging file | fewer workers | slower reading | DataLoader(num_workers=0)
loading | all on one device | an error if it does not fit | from_pretrained(device_map={"": 0})
loading | four bits in place of eight | a rounded base | BitsAndBytesConfig(load_in_4bit=True)
Linux, kernel of a notebook | look what was ended | | dmesg -T, the lines with "Killed process"
NumPy | read in parts | | numpy.load(..., mmap_mode="r"), or streaming=True
bitsandbytes, NCCL, cuBLAS or cuDNN, rocBLAS or MIOpen | room beside PyTorch's cache | | \
torch.cuda.set_per_process_memory_fraction(0.9)
cuBLAS or cuDNN | look for a wrong token id, which ends so, too | slow | CUDA_LAUNCH_BLOCKING=1
driver | look who holds the memory | | {tool}
one buffer of Metal | a smaller largest tensor | | fewer or shorter rows, loss in chunks
one block of XPU | no tensor above 4 GiB | | fewer or shorter rows, loss in chunks
"""
TOOLS = {"CUDA": "nvidia-smi", "ROCm": "rocm-smi", "XPU": "xpu-smi"}
IN_ONE_PIECE = {
    "CUDA": "PYTORCH_ALLOC_CONF=expandable_segments:True",
    "ROCm": "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True",
    "XPU": "torch.xpu.empty_cache()",
}


def _remedies_without_recipe(message: Message) -> list[Remedy]:
    """What no recipe of the doctor cures: another memory, another process, memory in pieces."""
    remedies = []
    asked = message.asked or 0
    tool = TOOLS.get(message.place, "")
    if message.others:
        name = f"stop other processes, which hold {readable(message.others)}"
        remedies.append(Remedy(name, where=tool))
    pieces = message.unallocated or 0
    free = message.free or 0
    # The bytes were there, but in pieces that PyTorch held.
    if message.place in GPUS and pieces >= free and 0 < asked <= pieces + free:
        name = f"memory in one piece: {readable(pieces)} are in pieces"
        remedies.append(Remedy(name, "a restart", IN_ONE_PIECE[message.place]))
    known = {message.allocator, message.place}
    for line in ADVICE.strip().splitlines():
        sources, *words = [word.strip() for word in line.split("|")]
        if known.intersection(sources.split(", ")):
            remedies.append(Remedy(*[word.replace("{tool}", tool) for word in words]))
    return remedies


def _recipes_of(place: str) -> list[Remedy]:
    """The doctor's recipes where this memory is full: no offload to a host that is full itself."""
    if place in GPUS:
        return list(RECIPES.values())
    if place not in ("host", "MPS"):  # a Mac has one memory for both, and no 8-bit optimizer
        return []
    kept = [recipe for recipe in RECIPES.values() if "offload" not in recipe.name]
    if place == "MPS":
        kept.remove(RECIPES["8-bit AdamW"])
    return kept


def _card_and_memory(
    model: Any, memory_bytes: int | None, card: str | None, message: Message | None
) -> tuple[Card | None, float]:
    """The doctor's GPU, or None for a CPU; and the bytes that tensors may take there."""
    here = machine()
    said = message.limit if message else None
    memory = said or here.memory_bytes
    if memory_bytes is not None:
        check_number(above=0, memory_bytes=memory_bytes)
        memory = memory_bytes
    if card is not None:
        device = card_named(card)
    elif here.device == "cuda":
        import torch

        device = Card(here.name, torch.cuda.get_device_capability(), memory)
    elif model.device.type != "cpu" and (memory_bytes or said):
        # Of a device of which only the memory is said.
        device = Card(f"a GPU of {readable(memory)}", MODERN, memory)
    else:
        return None, FILLED * memory
    return device, limit_of(device)


def _what_it_stands_on(question: Question) -> list[str]:
    """What the doctor's answer stands on, and how far it can be trusted."""
    model, card = question.model, question.card
    on = f"{card.name} (capability {card.capability[0]}.{card.capability[1]})" if card else "a CPU"
    if question.gpus > 1:
        on = f"{question.gpus} times {on}"
    findings = [
        f"Assumed: AdamW on {question.rows} x {question.length:,} tokens, weights in "
        f"{str(model.dtype).removeprefix('torch.')}, on {on}, where tensors may take "
        f"{readable(question.limit)}.",
        'Predicted by arithmetic, at once, so "about"; a line that begins with "Checked" is the '
        "step itself, on tensors without data.",
    ]
    family = model.config.model_type
    if family not in COMPARED:
        findings.append(
            f"The arithmetic is that of {', '.join(COMPARED)}; of {family} trust what is checked."
        )
    if card is not None and card.capability < MODERN and str(model.dtype) == "torch.bfloat16":
        findings.append(f"{card.name} does not compute in bf16: take fp16, of as many bytes.")
    text = model.config.get_text_config()
    grouped = getattr(text, "num_key_value_heads", None) not in (None, text.num_attention_heads)
    if card is not None and card.capability < MODERN and grouped:
        findings.append(
            f"No fast kernel of {card.name} takes fewer heads of keys than of queries, so scores "
            f"fill the memory: call apply_flash_attention(model) before the step. What is checked "
            f"is without it."
        )
    if has_experts(model):
        findings.append("Adapters go to attention only: experts are no linear layers.")
    if getattr(model.config, "quantization_config", None) is not None:
        findings.append("Its files have fewer bits: to train, they are unpacked, as counted here.")
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    if size > GIB:
        findings.append(
            f"Loading: {readable(size)} of files in 16 bits, {size / 6e9:,.0f} min at 100 MB/s; "
            f"a process that reads them as a whole needs as much host memory."
        )
    return findings


def _findings_about(tried: Remedies, *, failed: bool, said: int | None) -> list[str]:
    """What the doctor advises: the first remedy that is enough, and what speaks against others."""
    question, rows = tried.question, tried.rows
    findings = []
    if failed and rows[0].fits:
        findings.append(
            "It should fit: look for tensors that stay from step to step "
            "(loss in place of loss.item())."
        )
    if any("optimizer offload" in row.name for row in rows):
        findings.append(
            f"The optimizer offload needs {readable(host_bytes(question.model))} of host memory; "
            f"this machine has {readable(question.host)}."
        )
    slow = slow_recurrence(question.model)
    if slow:
        findings.append(slow)
    if not tried.advised:
        findings.append(f"First that fits: none; {_where_nothing_fits(tried)}.")
        return findings
    first = tried.advised[0]
    findings.append(f"First that fits: {first.name}.")
    for smaller in cards_sold_with((said or 0) / GIB):
        if first.peak > limit_of(smaller):
            seen = readable(smaller.memory_bytes)
            findings.append(f"Not on {smaller.name}, which is sold with as much and has {seen}.")
    compared = question.model.config.model_type in COMPARED
    if question.card is not None and question.card.rate and compared:
        rows, length = question.own_rows, question.length
        operations = step_operations(question.model, rows=rows, length=length)
        if set(ADAPTERS).intersection(first.stack):  # a frozen weight has no gradient
            operations *= 2 / 3
        seconds = operations / question.card.rate
        tokens = question.gpus * rows * length
        findings.append(
            f"Time: at least {seconds:.2g} s a step, and {1e6 / tokens * seconds / 3600:.2g} hours "
            f"for a million tokens, at the rate of the data sheet, of which the training of "
            f"Llama 3 reached 38 to 43 %."
        )
    return findings


def _where_nothing_fits(tried: Remedies) -> str:
    """The doctor's advice where nothing fits. Shorter rows are none if weights are too much."""
    question = tried.question
    needed = math.ceil(tried.smallest.peak / FILLED / GIB) + 1  # for CUDA's own context
    larger = f"take a device of {needed} GiB or more, or several (--gpus)"
    if question.length >= LONG:
        larger += "; docs/long-card.md has more for long rows"
    length = tried.longest_rows()
    if length is None:
        return f"shorter rows do not help, the weights alone are too much: {larger}"
    return f"shorten the rows to about {length:,} tokens, {larger}"


# By what is priced in the advice: a command, or the file that has it ready.
FINETUNE = (
    "{start} -m recipes_lib finetune --model YOUR_MODEL --data YOURS.jsonl \\\n"
    "  --output runs/mine --seq-len {length} --rows-per-step {rows} \\\n"
)
READY = {
    (LORA,): FINETUNE + "  --method lora",
    ("QLoRA",): FINETUNE + "  --method qlora",
    ("FSDP",): "{start} launch/train.py --strategy fsdp",
    ("FSDP", LORA): FINETUNE + "  --method lora --shard",
    ("FSDP", "QLoRA"): "axolotl train launch/axolotl/llama-3-70b-qlora-fsdp.yaml",
}


# One long text a step: this script has a loss in chunks, tiles and checkpoints.
LONG_TEXT = """\
python scripts/train_long_sequences.py --model YOUR_MODEL --text YOURS.txt \\
  --method {method} --learning_rate 2e-4 --length {length}"""
LONG_TEXT_METHODS = {(LORA,): "lora", ("QLoRA",): "qlora"}

# Without a model nobody knows which of the recipes is enough.
NEXT = """Which of them is enough, and with how many bytes, says:

  python -m recipes_lib doctor --model YOUR_MODEL \\
    --batch-size ROWS --seq-len TOKENS --dtype bf16"""


def _next_question(message: Message) -> list[str]:
    """The doctor's next command, where only an error was given."""
    lines = NEXT.splitlines()
    if message.place in GPUS and message.limit:
        lines[-1] += f" --memory {message.limit / GIB:.1f}"
    return lines


def _lines_that_apply(question: Question, first: Remedy) -> list[str]:
    """The doctor's lines: the imports of the remedy, and what has it ready."""
    lines = [RECIPES[name].where for name in first.stack]
    start = "python" if question.gpus == 1 else f"torchrun --nproc-per-node {question.gpus}"
    priced = tuple(name for name in first.stack if name in ("FSDP", *ADAPTERS))
    lacking = [name for name in first.stack if name not in ("checkpointing", *priced)]
    one_long_text = question.rows == 1 and question.length >= LONG
    if lacking and one_long_text and priced in LONG_TEXT_METHODS:
        command = LONG_TEXT.format(length=question.length, method=LONG_TEXT_METHODS[priced])
        if "activation offload" in first.stack:
            command += " --inputs host"
        return lines + command.splitlines()
    if priced in READY:
        command = READY[priced].format(start=start, length=question.length, rows=question.rows)
        if "finetune" in command and "checkpointing" in first.stack:
            command += " --gradient-checkpointing"
        lines += command.splitlines()
        if "finetune" in command and lacking:
            lines.append(f"# It has no {' and no '.join(lacking)}.")
            lines.append("# Where memory runs out, apply the lines above in a loop of your own.")
    return lines
