"""What the doctor computes for an 8-billion model, as a table and as one line. Nothing is measured.

The model has the shape of Llama 3.1 8B and no weights, so any machine finds the same numbers.
"""

from __future__ import annotations

import functools
from typing import Any

from recipes_lib.core.measure.machine import GIB

SHAPE = "llama-3.1-8b"
BATCH = 4
TOKENS = 2048  # in each row of the batch
CARD = 24  # GiB
COMMAND = (
    f"python -m recipes_lib doctor --model {SHAPE} --dtype bf16 --memory {CARD} "
    f"--batch-size {BATCH} --seq-len {TOKENS}"
)


@functools.cache
def remedies() -> list[Any]:
    """The doctor's remedies, each with its predicted peak; the first is the step as it is."""
    import torch

    from recipes_lib.core.model import model_of_shape
    from recipes_lib.workflows.out_of_memory_doctor import diagnose

    model = model_of_shape(SHAPE, dtype=torch.bfloat16, device="meta")
    found = diagnose(model=model, batch_size=BATCH, seq_len=TOKENS, memory_bytes=CARD * GIB)
    return [remedy for remedy in found.remedies if remedy.peak is not None]


def doctor_table() -> str:
    """Every remedy with its peak, as a table that says what it is."""
    lines = [
        f"| try, in this order | predicted peak | fits {CARD} GiB | costs |",
        "|---|--:|---|---|",
    ]
    for remedy in remedies():
        fits = "no"
        if remedy.fits:
            fits = "**yes**"
        lines.append(f"| {remedy.name} | {remedy.peak / GIB:,.1f} GiB | {fits} | {remedy.costs} |")
    lines += [
        "",
        f"*Arithmetic, not a run: one AdamW step of {SHAPE} with weights and states in bf16 on "
        f"{BATCH} rows of {TOKENS:,} tokens. The rows with adapters take micro-batches, chunks and "
        f"checkpoints from above. `{COMMAND}` prints it.*",
    ]
    return "\n".join(lines)


def doctor_line() -> str:
    """The step as it is, and the last remedy: 106 → 7 GiB."""
    first = remedies()[0].peak / GIB
    last = remedies()[-1].peak / GIB
    return f"{first:,.0f} → {last:,.0f} GiB"
