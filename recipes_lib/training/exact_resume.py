"""Exact resume: a run that was killed goes on from its last checkpoint as if nothing had happened.

Problem    A process dies: a spot instance ends, a driver fails, memory runs out. What was trained
           is lost, or the run goes on with fresh averages, a restarted schedule and data that it
           has seen: no error, another training.
Idea       Save everything that the next step reads, in one file, at once:

               trainable weights · buffers · optimizer states · schedule · loss scale ·
               random states · step · facts of the run

           The data position is the step: `rows_of_step` (core/data/row_order.py) computes the rows
           of any step from the seed. A file with other facts, of another run, model or base, is
           refused (checkpoint_state.py). One rename puts it in place of the old one, so a kill at
           any moment leaves a whole one.
Saves      All steps up to the last checkpoint.
Costs      12 bytes per trainable parameter on disk with fp32 AdamW, with LoRA megabytes. Buffers of
           the `state_dict` are kept as well, where GPTQ and AWQ have the weights of a frozen base.
Use when   A run takes longer than you would like to repeat.
Not when   Several processes hold shards of the states: parallel/checkpoint. A disk that flips bits:
           torch reads no checksums. bitsandbytes brings paged states back as ordinary GPU memory.
           The optimizer must have its parameters in the same order.
In production   `Trainer(...).train(resume_from_checkpoint=True)` with `save_steps`: it skips the
           rows of the epoch that were seen, and checks neither the settings nor the data.
Source     PyTorch documentation, "Reproducibility" and "Serialization semantics".

Exact means: the same losses to the last digit, on the same machine and number of threads, with
operators that are deterministic. Random states of torch and Python are kept; NumPy's is not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from recipes_lib.core.model.checkpoint_state import (
    NO_PARTS,
    check_same_run,
    facts_of,
    replaced_at_once,
    saved_tensors,
)
from recipes_lib.core.model.random_states import random_states, set_random_states

# --- the idea: what a learner can copy ------------------------------------------------------------


def save_by_hand(
    path: Path | str, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int
) -> None:
    """Save all that the next step of a plain loop reads. A kill while saving loses everything."""
    state = {
        "step": step,  # the position in the data, if the data is a function of it
        "weights": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),  # dropout
    }
    torch.save(state, path)


def load_by_hand(path: Path | str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Put it all back, and return the step. Nothing is checked."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["weights"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return state["step"]


# --- the technique --------------------------------------------------------------------------------


def save_checkpoint(
    path: Path | str,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    parts: Mapping[str, Any] = NO_PARTS,
) -> None:
    """Write the state after `step` optimizer steps to the file `path`, for an exact resume.

    Args:
        run: facts that a resumed run must share, as JSON takes them: settings, length of the data.
        parts: everything else with `state_dict()` and `load_state_dict()`: schedule, loss scaling.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "facts": facts_of(run, model, optimizer, parts),
        "tensors": saved_tensors(model),
        "optimizer": _in_python_numbers(optimizer.state_dict()),
        "parts": {name: _in_python_numbers(part.state_dict()) for name, part in parts.items()},
        "random": random_states(),
    }
    with replaced_at_once(path) as file:
        _save_loadable(state, file)


def load_checkpoint(
    path: Path | str,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    parts: Mapping[str, Any] = NO_PARTS,
) -> int:
    """Resume exactly from the file `path`; returns the number of steps that were done."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    facts = facts_of(run, model, optimizer, parts)
    check_same_run(Path(path), saved=state["facts"], given=facts)
    # Parts first: one that refuses its state by itself, as a loss scaling that was off, leaves the
    # weights as they are.
    for name, part in parts.items():
        part.load_state_dict(state["parts"][name])
    for name, tensor in saved_tensors(model).items():
        tensor.copy_(state["tensors"][name])
    optimizer.load_state_dict(state["optimizer"])
    set_random_states(state["random"])  # last: nothing may draw after it
    return state["step"]


def _save_loadable(state: Any, file: IO[bytes]) -> None:
    """`torch.save`, and a ValueError now, not at the resume, if `torch.load` refuses the file."""
    torch.save(state, file)
    file.seek(0)
    odd = get_unsafe_globals_in_checkpoint(file)
    file.seek(0, os.SEEK_END)
    if odd:
        raise ValueError(
            f"a checkpoint with {', '.join(sorted(odd))} could not be loaded: give the optimizer "
            f"and the parts tensors, numbers and strings, for a path str(path)"
        )


def _in_python_numbers(value: Any) -> Any:
    """The same without numbers of NumPy, which `torch.load` refuses: `numpy.cos` makes one."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {name: _in_python_numbers(inside) for name, inside in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_in_python_numbers(inside) for inside in value)
    return value
