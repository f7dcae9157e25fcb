"""`python -m recipes_lib doctor`: out of memory, and what to try against it, in which order."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from recipes_lib.cli.options import MODEL_HELP, BatchSize, SeqLen

Error = Annotated[str, typer.Option(help="the text of the error")]
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Memory = Annotated[
    float | None,
    typer.Option(help="of the device in GiB; default: what the error says, or this machine's"),
]
Dtype = Annotated[Literal["fp32", "bf16"], typer.Option(help="of the weights")]


def doctor(
    error: Error = "",
    model: Model = "",
    memory: Memory = None,
    dtype: Dtype = "fp32",
    batch_size: BatchSize = 8,
    seq_len: SeqLen = 1024,
) -> None:
    """Say what to try against running out of memory, and in which order."""
    from recipes_lib.core.machine import GIB
    from recipes_lib.workflows.out_of_memory_doctor import diagnose

    memory_bytes = None
    if memory is not None:
        if memory <= 0:
            raise ValueError(
                f"--memory {memory:g}: give the GiB of the device, "
                f"or leave it out for this machine's"
            )
        memory_bytes = int(memory * GIB)
    diagnosis = diagnose(
        error=error,
        model=_model(model, dtype),
        batch_size=batch_size,
        seq_len=seq_len,
        memory_bytes=memory_bytes,
    )
    print(diagnosis)


def _model(name: str, dtype: str) -> Any:
    """The model to do arithmetic on. A shape takes no memory: its weights have no data."""
    import torch

    from recipes_lib.core.model import SHAPES, load_model, model_of_shape

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if name in SHAPES:
        return model_of_shape(name, dtype=dtypes[dtype], device="meta")
    if name:
        return load_model(name, dtype=dtypes[dtype], device="cpu")
    return None
