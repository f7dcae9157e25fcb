"""Exact resume: a run that was killed goes on from its last checkpoint as if nothing had happened.

Problem    A process dies: a spot instance ends, a driver fails, memory runs out. What was trained is lost, or the run
           goes on with fresh averages, a restarted schedule and data that it has seen: no error, another training.
Idea       Save everything that the next step reads, in one file, at once:

               trainable weights · optimizer states · schedule · loss scale · random states · step · facts of the run

           The data position is the step: `rows_of_step` computes the rows of any step from the seed. The facts
           (settings, data, base model) must be equal when the file is read: another run's checkpoint is refused.
           The file is written beside the old one and put in its place by one rename, so a kill at any moment leaves
           a whole checkpoint.
Saves      All steps up to the last checkpoint.
Costs      12 bytes per trainable parameter on disk with fp32 AdamW, and the time to write them. With LoRA megabytes.
Use when   A run takes longer than you would like to repeat.
Not when   Several processes hold shards of the states: use torch.distributed.checkpoint. bitsandbytes brings paged
           states back as ordinary GPU memory.
In production   `Trainer(...).train(resume_from_checkpoint=True)` with `save_steps`: it skips the rows of the epoch
           that were seen, and checks neither the settings nor the data against those of the checkpoint.
Source     PyTorch documentation, "Reproducibility" and "Serialization semantics".

Exact means: the same losses to the last digit, on the same machine and number of threads, with operators that are
deterministic. Random states of torch and Python are kept; NumPy's is not.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.sizes import tensor_bytes


def save_checkpoint(
    path: Path | str,
    *,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    parts: Mapping[str, Any] | None = None,
) -> None:
    """Write the state after `step` optimizer steps to the file `path`, replacing the one before in one rename.

    Args:
        run: facts that a resumed run must share, numbers and strings: settings, length of the data, base model.
        parts: everything else with `state_dict()` and `load_state_dict()`: schedule, loss scaling.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "run": dict(run),
        "step": step,
        "weights": {name: p.detach() for name, p in model.named_parameters() if p.requires_grad},
        "optimizer": optimizer.state_dict(),
        "parts": {name: part.state_dict() for name, part in (parts or {}).items()},
        "random": {
            "python": random.getstate(),
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        },
    }
    scratch = path.with_name(f"{path.name}.part")
    with scratch.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # a rename may reach the disk before the content does
    os.replace(scratch, path)


def load_checkpoint(
    path: Path | str,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    parts: Mapping[str, Any] | None = None,
) -> int:
    """Put the state of the file `path` back; returns the number of steps that were done.

    Everything is compared before anything is changed. Raises ValueError if the file is missing or damaged, if a fact
    of the run differs, or if the trainable weights have other names or shapes.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no checkpoint at {path}: start the run without resuming")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved, weights = state["run"], state["weights"]
    except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged, or no checkpoint of this kind: {error}") from error
    differ = [name for name in {**saved, **run} if saved.get(name) != run.get(name)]
    if differ:
        pairs = "; ".join(
            f"{name}: {saved.get(name)!r} there, {run.get(name)!r} here" for name in differ
        )
        raise ValueError(
            f"{path} belongs to another run ({pairs}): resume with its settings, or use another folder"
        )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: tuple(p.shape) for name, p in trainable.items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != theirs or set(state["parts"]) != set(parts or {}):
        odd = sorted(
            {name for name in {**shapes, **theirs} if shapes.get(name) != theirs.get(name)}
        )
        raise ValueError(
            f"{path} holds other trainable weights or parts: {odd[:3] or sorted(state['parts'])}"
        )
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(weights[name])
    optimizer.load_state_dict(state["optimizer"])
    for name, part in (parts or {}).items():
        part.load_state_dict(state["parts"][name])
    version, internal, gauss = state["random"]["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["random"]["cpu"])
    for device, random_state in enumerate(state["random"]["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(random_state, device)
    return state["step"]


def rows_of_step(step: int, *, rows: int, rows_per_step: int, seed: int) -> list[int]:
    """The indices that optimizer step `step` (from 0) trains on: the position in the data, without a state.

    Every epoch has its own order, a function of the seed; the rows that do not fill a last step are left out of it.
    Raises ValueError unless 1 <= rows_per_step <= rows.
    """
    if not 1 <= rows_per_step <= rows:
        raise ValueError(f"rows_per_step={rows_per_step}: give 1 to {rows}, the number of rows")
    epoch, within = divmod(step, rows // rows_per_step)
    order = random.Random(f"{seed} {epoch}").sample(range(rows), rows)
    return order[within * rows_per_step : (within + 1) * rows_per_step]


def estimate_checkpoint(model: torch.nn.Module) -> int:
    """Bytes of the file with AdamW in the dtype of the weights: them and two averages, for what is trainable."""
    return 3 * sum(tensor_bytes(p) for p in model.parameters() if p.requires_grad)
