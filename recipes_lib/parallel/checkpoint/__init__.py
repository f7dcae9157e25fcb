"""Sharded checkpoints: each rank writes its part, and any number of ranks reads them.

Problem    Each rank holds a part of weights and optimizer states. To collect them on one rank takes
           its memory and everybody's time. If each rank saves its part by itself, only as many
           ranks can go on.
Idea       Save parts together with their place in the whole tensor. Who loads asks for the places
           that it needs:

               4 ranks save     rows 0-1 | rows 2-3 | rows 4-5 | rows 6-7      of a weight [8, D]
               2 ranks load     rows 0-3            | rows 4-7                 two files each
               1 rank loads     rows 0-7                                       four files

           A folder for each checkpoint, and a file LATEST that names the last whole one and is
           replaced by one rename. In the background: copy the parts, go on training, and write the
           copies from a thread.
Saves      With N ranks each one writes 1/N. In the background a save stalls the training for as
           long as the copy takes. A run that was killed loses the steps since the last checkpoint.
Costs      12 bytes per trainable parameter on disk with fp32 AdamW, as many as `keep` times; in the
           background the same once more in host memory, divided by N.
Use when   Weights or states are sharded, a run may be killed, or go on with other GPUs.
Not when   One process trains: `training/exact_resume.py` writes one file. The folder is not shared
           by all machines: each would hold a part that nobody can put together.
In production   `torch.distributed.checkpoint.save/load/async_save`, as torchtitan and Lightning use
           them; `torchrun --max-restarts 3` starts all ranks again when one died;
           `TrainingArguments(fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"})`.
Source     PyTorch, "Getting started with Distributed Checkpoint" and "Asynchronous saving with
           Distributed Checkpoint"; how often to save: Young, "A first order approximation to the
           optimum checkpoint interval", Communications of the ACM 1974.

What ranks share besides is in small files beside the parts: the step, the facts of the run, the
schedule, and the random states of each rank. In checkpoint_*.py are: the folders (latest), what is
saved (state), what keeps ranks from waiting for each other (guards), how damaged files are found
(files) and another base (base), what ranks see of torchrun (restarts), and the export for other
programs (export).

base  which frozen weights were trained on, the same on any number of ranks
export  safetensors files from shards, for every other program
files  are the files what was written: checksums, and no code
guards  no rank waits for one that has failed, and what does not fit is refused
latest  which folder is the last whole checkpoint
restarts  what a rank has to know of torchrun, which starts it again
state  what is saved: each rank's parts of weights and states, by name
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from recipes_lib.core.checks import check_number, check_whole
from recipes_lib.core.model.run_state import (
    check_facts,
    check_in_model,
    check_loadable,
    check_parts,
    check_same_run,
    check_settings,
    in_python_numbers,
    part_classes,
    random_states,
    read_state,
    set_random_states,
)
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.ranks import rank, world_size
from recipes_lib.core.ranks.agreement import agree, same_error_on_all_ranks
from recipes_lib.parallel.checkpoint.base import check_base, frozen_values
from recipes_lib.parallel.checkpoint.files import check_files, seal
from recipes_lib.parallel.checkpoint.guards import (
    check_optimized,
    check_weights,
    files_of_all_ranks,
    refuse_older_step,
    weights_of_all_ranks,
)
from recipes_lib.parallel.checkpoint.latest import (
    folder_of_step,
    latest_folder,
    set_latest,
)
from recipes_lib.parallel.checkpoint.state import (
    make_stager,
    optimizer_name,
    set_state,
    state_of,
    unchanged_if_refused,
)

SHARED_FILE = "run.pt"
NO_PARTS: Mapping[str, Any] = MappingProxyType({})

# --- the idea: what a learner can copy ------------------------------------------------------------


def save_by_hand(place: Path | str, model: torch.nn.Module, optimizer: Any) -> None:
    """Every rank writes its part. The same call works in one process."""
    state = {
        "model": get_model_state_dict(model),  # parts, with their places in the whole
        "optimizer": get_optimizer_state_dict(model, optimizer),  # by names, not by numbers
    }
    dcp.save(state, checkpoint_id=place)


def load_by_hand(place: Path | str, model: torch.nn.Module, optimizer: Any) -> None:
    """Every rank reads what belongs into its part, on any number of ranks. Nothing is checked."""
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=place)  # into the tensors of `state`
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


# --- the technique --------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path | str,
    *,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    parts: Mapping[str, Any] = NO_PARTS,
    keep: int = 2,
) -> None:
    """Write the state after `step` optimizer steps below `folder`, and name it in LATEST.

    All ranks call it, and it returns when all have written.

    Args:
        folder: of the run, on a disk that all ranks share.
        model: any module, sharded by FSDP2 or tensor parallelism, inside of DDP, or plain.
        optimizer: of `torch.optim`, or a ZeroRedundancyOptimizer around one.
        run: facts that a resumed run must share, numbers and strings: settings, length of the data.
        parts: what else has `state_dict()` and `load_state_dict()` and is the same on all ranks:
            schedule, loss scaling.
        keep: how many checkpoints stay.
    Raises ValueError on every rank if the folder holds this step or a later one already, if ranks
    give other steps or facts, if a fact or a setting of the optimizer could not be loaded, or if a
    rank cannot write.
    """
    folder = Path(folder)
    place = _begin(folder, step, model, optimizer, run, parts, keep)
    state = state_of(model, optimizer)
    with files_of_all_ranks():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(place))
    with same_error_on_all_ranks():
        if rank() == 0:
            seal(place)
            set_latest(folder, step, keep=keep)


def save_checkpoint_async(
    folder: Path | str,
    *,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    parts: Mapping[str, Any] = NO_PARTS,
    keep: int = 2,
    after: PendingSave | None = None,
) -> PendingSave:
    """As `save_checkpoint`, but return as soon as the state is copied. A thread writes the copy.

        pending = None
        for step in range(steps):
            ...
            pending = save_checkpoint_async(..., after=pending)
        pending.wait()

    The thread talks to the other ranks by a group of its own. In the group of the training its
    collectives and those of the training would meet each other, and both would wait for ever.

    Args:
        after: the save before this one. It is waited for, and its group and its memory for the
            copy are used again.
    Raises ValueError as `save_checkpoint` does, and what the save before raised.
    """
    folder = Path(folder)
    if after is not None:
        after.wait()
        group = after.group
        stager = after.stager
    else:
        group = None if _alone() else distributed.new_group(backend="gloo")
        stager = make_stager()
    place = _begin(folder, step, model, optimizer, run, parts, keep)
    upload = dcp.async_save(
        state_of(model, optimizer),
        storage_writer=dcp.FileSystemWriter(place),
        process_group=group,
        async_stager=stager,
    )
    return PendingSave(upload, group, stager, folder, step, keep)


class PendingSave:
    """A checkpoint that is being written. LATEST names it as soon as it is whole."""

    def __init__(
        self,
        upload: Future,
        group: distributed.ProcessGroup | None,
        stager: DefaultStager,
        folder: Path,
        step: int,
        keep: int,
    ) -> None:
        self.group = group
        self.stager = stager
        self._folder = folder
        self._step = step
        self._keep = keep
        self._named: Future = Future()
        upload.add_done_callback(self._name)

    def _name(self, upload: Future) -> None:
        """In the thread, when the parts of all ranks are written, or when one has failed."""
        try:
            upload.result()
            if rank() == 0:
                seal(folder_of_step(self._folder, self._step))
                set_latest(self._folder, self._step, keep=self._keep)
        except BaseException as error:
            self._named.set_exception(error)
        else:
            self._named.set_result(None)

    def done(self) -> bool:
        """Whether this rank has nothing left to do. Does not wait."""
        return self._named.done()

    def wait(self) -> None:
        """Return when all ranks have written and LATEST is replaced. All ranks have to call it.

        Raises ValueError on every rank if one of them could not write.
        """
        with files_of_all_ranks(group=self.group):
            self._named.result()


def latest_checkpoint(folder: Path | str) -> Path | None:
    """The last whole checkpoint below `folder`, or None if there is none yet.

    All ranks call it. Raises ValueError on every rank if they do not see the same one, as on
    machines that do not share the folder.
    """
    with same_error_on_all_ranks():
        place = latest_folder(Path(folder))
    if not _alone():
        agree(latest_checkpoint=str(place))
    return place


def load_checkpoint(
    folder: Path | str,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    parts: Mapping[str, Any] = NO_PARTS,
) -> int:
    """Put the last whole checkpoint below `folder` back. Returns the number of steps done.

    All ranks call it; there may be more or fewer than have saved, and sharded in another way.
    Random states come back if there are as many ranks as have saved, else they stay as they are:
    dropout then draws other numbers. Gradients are dropped.

    Everything is compared before anything is changed. Raises ValueError on every rank if there is
    no checkpoint, if a file is damaged, if a fact of the run or the optimizer differs, if trainable
    weights have other names, shapes or dtypes, if frozen ones have other values, or if ranks do not
    see the same checkpoint.
    """
    place = latest_checkpoint(folder)
    weights = weights_of_all_ranks(model)
    frozen = frozen_values(model)
    with same_error_on_all_ranks():
        if place is None:
            raise ValueError(f"there is no checkpoint in {folder}: start the run without resuming")
        shared = read_state(place / SHARED_FILE)
        facts = {**run, "optimizer": optimizer_name(optimizer)}
        check_same_run(place, saved=shared["run"], given=facts)
        check_weights(place, weights)
        check_base(place, shared.get("frozen", {}), frozen)
        check_parts(place, shared["parts"], shared.get("part_classes", {}), parts)
        same_ranks = shared["ranks"] == world_size()
        random = read_state(_random_file(place)) if same_ranks else None
        check_files(place)

    with unchanged_if_refused(optimizer):
        state = _read(place, model, optimizer)
    set_state(model, optimizer, state)
    for name, part in parts.items():
        part.load_state_dict(shared["parts"][name])
    if random is not None:
        set_random_states(random)
    return shared["step"]


def _read(place: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the checkpoint holds of this rank's parts of weights and states."""
    # Gradients of before would be those of other weights. PyTorch, too, wants none: it makes the
    # states of a fresh optimizer by a step with gradients of zero.
    optimizer.zero_grad(set_to_none=True)
    state = state_of(model, optimizer)
    check_optimized(place, model, state)
    with files_of_all_ranks():
        dcp.load(state, storage_reader=dcp.FileSystemReader(place))
    return state


# --- what is saved --------------------------------------------------------------------------------


def _begin(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    parts: Mapping[str, Any],
    keep: int,
) -> Path:
    """Check everything on every rank, and write the small files. Returns the new folder."""
    facts = {**run, "optimizer": optimizer_name(optimizer)}
    if not _alone():
        agree(step=step, run=facts, parts=sorted(parts), keep=keep)
    frozen = frozen_values(model)
    with same_error_on_all_ranks():
        check_whole(step=step, keep=keep)
        check_facts(run)
        check_in_model(optimizer, {id(parameter) for parameter in model.parameters()})
        check_settings(optimizer)
        refuse_older_step(folder, step)
        place = folder_of_step(folder, step)
        place.mkdir(parents=True, exist_ok=True)
        _write(_random_file(place), random_states())
        if rank() == 0:
            states = {name: in_python_numbers(part.state_dict()) for name, part in parts.items()}
            shared = {
                "run": facts,
                "step": step,
                "ranks": world_size(),
                "parts": states,
                "part_classes": part_classes(parts),
                "frozen": frozen,
            }
            _write(place / SHARED_FILE, shared)
    return place


def _random_file(place: Path) -> Path:
    return place / f"random-{rank()}.pt"


def _write(path: Path, content: Any) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    check_loadable(path)


def _alone() -> bool:
    return not distributed.is_initialized()


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_written_bytes(model: torch.nn.Module, *, ranks: int) -> int:
    """Bytes of tensors that each rank writes, with AdamW in the dtype of the weights.

    The weights and two averages, divided by the ranks. Where ranks hold copies, as in DDP, each
    tensor is written by one of them, so that it is the same there. PyTorch adds about a kilobyte
    to each part of a tensor.

    Args:
        model: before it is sharded.
    """
    check_whole(ranks=ranks)
    return 3 * sum(tensor_bytes(p) for p in model.parameters() if p.requires_grad) // ranks


def predicted_interval_seconds(*, save_seconds: float, failure_seconds: float) -> float:
    """How often to save, so that saving and repeating lost steps together cost least.

    Young's formula: sqrt(2 x save x failure).

    Args:
        save_seconds: for which a save stalls the training.
        failure_seconds: between two failures of the run. With N times the machines it is an N-th.
    """
    check_number(above=0, save_seconds=save_seconds, failure_seconds=failure_seconds)
    return math.sqrt(2 * save_seconds * failure_seconds)


def predicted_lost_share(
    *, interval_seconds: float, save_seconds: float, failure_seconds: float
) -> float:
    """The share of the time that goes into saving, and into steps that a failure makes lost.

    A failure loses half an interval on average.
    """
    check_number(
        above=0,
        interval_seconds=interval_seconds,
        save_seconds=save_seconds,
        failure_seconds=failure_seconds,
    )
    return save_seconds / interval_seconds + interval_seconds / (2 * failure_seconds)
