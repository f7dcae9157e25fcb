"""`python -m recipes_lib bench <technique>`: measure one technique beside the plain step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recipes_lib.cli.options import MODEL_HELP, TECHNIQUES, BatchSize, SeqLen

LITTLE = 0.01  # of the baseline's peak: a change that needs a word
Technique = Annotated[str, typer.Argument(help=", ".join(TECHNIQUES), metavar="TECHNIQUE")]
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Layers = Annotated[int | None, typer.Option(help="fewer layers of a shape")]
MicroBatches = Annotated[
    int | None, typer.Option(help="for gradient accumulation; default: one per row")
]
Picture = Annotated[
    Path | None, typer.Option(help="draw the memory over one step of both rows into this file")
]


def bench(
    technique: Technique,
    model: Model = "smollm2",
    layers: Layers = None,
    batch_size: BatchSize = 4,
    seq_len: SeqLen = 256,
    micro_batches: MicroBatches = None,
    timeline: Picture = None,
) -> None:
    """Measure one technique beside the plain step, and print both rows."""
    from recipes_lib.core.measure.machine import fast, machine
    from recipes_lib.workflows.bench.run import Bench

    print(machine())
    # One row at a time shows the most that accumulation can save.
    if micro_batches is None:
        micro_batches = batch_size
    rounds = 1 if fast() else 3  # fast: the sizes of CI
    setting = Bench(model, batch_size, seq_len, micro_batches, layers)
    ladder = setting.run(technique, rounds=rounds, timeline=timeline)
    print(ladder)
    if abs(ladder[technique].change) < LITTLE:
        print(
            "peak: less than 1 % at this size. What activations need grows with --batch-size and "
            "--seq-len; weights, gradients and states stay as they are."
        )
    print("loss: on random tokens, so it says nothing about quality")
    print(f"rows: {ladder.path}")
    if timeline is not None:
        print(f"timeline: {timeline}")
