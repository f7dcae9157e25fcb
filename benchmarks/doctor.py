"""What the doctor computes for an 8-billion model. Nothing is measured.

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


def host_gib() -> float:
    """Host memory of the optimizer offload: 16 bytes per parameter, and a copy of the weights."""
    from recipes_lib.core.model import model_of_shape

    parameters = sum(p.numel() for p in model_of_shape(SHAPE, device="meta").parameters())
    return (16 + 2) * parameters / GIB


def in_words(name: str) -> str:
    """The step before a remedy and with it: "61.8 → 50.0 GiB". "8b" is all of them together."""
    found = remedies()
    if name == "8b":
        return f"{found[0].peak / GIB:,.0f} → {found[-1].peak / GIB:,.0f} GiB"
    number = [remedy.name for remedy in found].index(name)
    return f"{found[number - 1].peak / GIB:,.1f} → {found[number].peak / GIB:,.1f} GiB"
