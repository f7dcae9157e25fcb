"""The checkpoints of a run: when one is kept, which file it is, and which run it belongs to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.data.tokens_and_labels import Row
from recipes_lib.core.measure.machine import machine
from recipes_lib.parallel.checkpoint import latest_checkpoint
from recipes_lib.workflows.finetune.settings import MAY_CHANGE_ON_RESUME, Settings

CHECKPOINT = "checkpoint.pt"
CHECKPOINTS = "checkpoints"  # of a model in parts: a folder with a file of each rank


def keeps_checkpoint(number: int, *, run: Settings) -> bool:
    """Whether a checkpoint follows optimizer step `number`, from 0."""
    done = number + 1
    return done == run.steps or done % run.save_steps == 0


def facts_of_run(run: Settings, rows: Sequence[Row], base: str) -> dict[str, Any]:
    """Facts in the checkpoint of a fine-tuning run: settings that matter, the data, the base."""
    facts = dataclasses.asdict(run)
    for name in MAY_CHANGE_ON_RESUME:
        del facts[name]
    content = hashlib.sha256()
    for row in rows:
        content.update(json.dumps([row["input_ids"], row["labels"]]).encode())
    facts["data"] = content.hexdigest()[:16]
    facts["base"] = base
    facts["device"] = machine().device
    return json.loads(json.dumps(facts, default=str))


def checkpoint_of(run: Settings, folder: Path) -> Path:
    """The file that is there if `run` has a checkpoint in `folder`."""
    return folder / CHECKPOINTS / "LATEST" if run.shard else folder / CHECKPOINT


def facts_in_checkpoint(run: Settings, folder: Path) -> dict[str, Any]:
    """The facts of the run whose checkpoint is in `folder`, and `done`, its number of steps."""
    if run.shard:
        place = latest_checkpoint(folder / CHECKPOINTS)
        saved = json.loads((place / "run.json").read_text(encoding="utf-8"))
    else:
        file = folder / CHECKPOINT
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return saved["facts"]["run"] | {"done": saved["step"]}


def where_it_goes_on(run: Settings) -> str:
    """The checkpoint of a run, and what a longer run than its own means for the learning rate."""
    folder = Path(run.output_dir)
    checkpoint = checkpoint_of(run, folder)
    if not checkpoint.exists():  # a mistyped folder would begin anew in silence
        return f"nothing to go on from, there is no {checkpoint}: beginning at step 0"
    there = facts_in_checkpoint(run, folder)
    words = f"going on from {checkpoint}"
    if there["steps"] == run.steps:
        return words
    return (
        f"{words}, of a run of {there['steps']} steps: from step {there['done']} on the learning "
        f"rate is that of a run of {run.steps}, so it rises where the other had come near 0"
    )
