"""`python -m recipes_lib doctor`: out of memory, and what to try against it, in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from recipes_lib.cli.options import MODEL_HELP, BatchSize, SeqLen

Error = Annotated[str, typer.Option(help="the text of the error")]
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Memory = Annotated[
    float | None,
    typer.Option(help="of the device in GiB; default: what the error says, or this machine's"),
]
CardName = Annotated[
    str,
    typer.Option("--card", help="in place of --memory: L4, H100, … or a size that is sold, 24GB"),
]
Gpus = Annotated[int, typer.Option(help="how many of them")]
Dtype = Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="of the weights")]

# What stands behind the name of a shape on the hub, and models that have the shape of another.
ENDINGS = ("-v0.1", "-v0.3", "-hf", "-it", "-instruct", "-chat")
SAME_SHAPE = {"smollm2": "smollm2-135m", "llama-3.3-70b": "llama-3.1-70b"}


def doctor(
    error: Error = "",
    model: Model = "",
    memory: Memory = None,
    card: CardName = "",
    gpus: Gpus = 1,
    dtype: Dtype = "fp32",
    batch_size: BatchSize = 8,
    seq_len: SeqLen = 1024,
) -> None:
    """Say what to try against running out of memory, and in which order.

    Of a hub id or a folder only the configuration is read, and no weights. The list is there at
    once, by arithmetic; some seconds later the row that is advised is checked.
    """
    from recipes_lib.core.measure.machine import GIB
    from recipes_lib.workflows.out_of_memory_doctor import diagnose

    memory_bytes = None if memory is None else int(memory * GIB)
    step = {"model": _model(model, dtype), "batch_size": batch_size, "seq_len": seq_len}
    where = {"memory_bytes": memory_bytes, "card": card or None, "gpus": gpus}
    diagnosis = diagnose(error=error, **step, **where)
    print(diagnosis, flush=True)
    checked = diagnosis.check()
    if checked:
        print(checked)


def shape_named(name: str) -> str | None:
    """The shape that the doctor's option names, or None: "meta-llama/Llama-3.1-70B-Instruct".

    So a gated model needs no login: the weights do not matter here.
    """
    from recipes_lib.core.model import SHAPES

    short = name.rsplit("/", 1)[-1].lower()
    for ending in ENDINGS:
        short = short.removesuffix(ending)
    short = SAME_SHAPE.get(short, short)
    if short in SHAPES:
        return short
    return None


def _model(name: str, dtype: str) -> Any:
    """The model that the doctor does arithmetic on, with weights that have no data."""
    import torch

    from recipes_lib.core.model import model_of_shape, model_without_weights

    if not name:
        return None
    precision = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    path = Path(name).expanduser()
    shape = None
    if not path.exists():
        shape = shape_named(name)
    if shape is None:
        return model_without_weights(str(path), dtype=precision)
    if shape != name:
        print(f"{name}: the shape {shape}")
    return model_of_shape(shape, dtype=precision, device="meta")
