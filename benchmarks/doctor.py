"""What the doctor predicts for an 8-billion model. Nothing is measured.

The model has the shape of Llama 3.1 8B and no weights, so any machine finds the same numbers, by
arithmetic.
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
# What a page compares: the recipes before, and one more.
STEPS = {
    "8b": ((), ("loss in chunks", "checkpointing", "QLoRA")),
    "4 micro-batches of 1": ((), ("micro-batches of 1",)),
    "optimizer offload": (
        ("loss in chunks", "checkpointing"),
        ("loss in chunks", "checkpointing", "optimizer offload"),
    ),
}


@functools.cache
def _model() -> Any:
    import torch

    from recipes_lib.core.model import model_of_shape

    return model_of_shape(SHAPE, dtype=torch.bfloat16, device="meta")


@functools.cache
def _tried() -> Any:
    from recipes_lib.workflows.out_of_memory_doctor import diagnose

    step = {"model": _model(), "batch_size": BATCH, "seq_len": TOKENS}
    return diagnose(**step, memory_bytes=CARD * GIB).tried


def remedies() -> list[Any]:
    """The doctor's remedies, each with its predicted peak; the first is the step as it is."""
    return _tried().rows


def host_gib() -> float:
    """Host memory of the optimizer offload."""
    from recipes_lib.memory.optimizer_offload import host_bytes

    return host_bytes(_model()) / GIB


def in_words(name: str) -> str:
    """The step before a recipe and with it: "61.8 → 50.0 GiB"; in whole GiB from first to last."""
    before, after = [_tried().peak(stack, TOKENS) / GIB for stack in STEPS[name]]
    digits = 0 if name == "8b" else 1
    return f"{before:,.{digits}f} → {after:,.{digits}f} GiB"
