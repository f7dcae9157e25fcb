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
           by all machines. A stranger wrote the checkpoint: PyTorch unpickles its list of parts,
           which can run any code. A disk flips bits: PyTorch reads no checksums.
In production   `torch.distributed.checkpoint.save/load/async_save`, as torchtitan and Lightning use
           them; `torchrun --max-restarts 3` starts all ranks again when one died;
           `TrainingArguments(fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"})`.
Source     PyTorch, "Getting started with Distributed Checkpoint" and "Asynchronous saving with
           Distributed Checkpoint"; how often to save: Young, "A first order approximation to the
           optimum checkpoint interval", Communications of the ACM 1974.

    runs/a/LATEST                           one line: step-00000300
    runs/a/step-00000300/run.json           step, ranks, and the facts of the run (run_state.py)
    runs/a/step-00000300/rank-0.pt          random states and parts, such as the schedule
    runs/a/step-00000300/__0_0.distcp       rank 0's parts of weights and states
    runs/a/step-00000300/.metadata          which part is where; PyTorch writes it last
    runs/a/step-00000400/                   being written, or left by a run that was killed

export  safetensors files from shards, for every other program
restarts  what a rank has to know of torchrun, which starts it again
state  facts of all ranks, and this rank's parts of weights and states, by name
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import distributed, nn
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
    check_same_run,
    in_python_numbers,
    random_states,
    replaced_at_once,
    save_loadable,
    set_random_states,
)
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.ranks import rank, world_size
from recipes_lib.core.ranks.agreement import agree, same_error_on_all_ranks
from recipes_lib.parallel.checkpoint.state import (
    facts_of_all_ranks,
    make_stager,
    set_state,
    state_of,
)

NO_PARTS: Mapping[str, Any] = MappingProxyType({})

# --- the idea: what a learner can copy ------------------------------------------------------------


def save_by_hand(place: Path | str, model: nn.Module, optimizer: Any) -> None:
    """Every rank writes its part. The same call works in one process."""
    state = {
        "model": get_model_state_dict(model),  # parts, with their places in the whole
        "optimizer": get_optimizer_state_dict(model, optimizer),  # by names, not by numbers
    }
    dcp.save(state, checkpoint_id=place)


def load_by_hand(place: Path | str, model: nn.Module, optimizer: Any) -> None:
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
    model: nn.Module,
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
        run: facts that a resumed run must share, as JSON takes them: settings, length of the data.
        parts: what else has `state_dict()` and `load_state_dict()` and is the same on all ranks:
            schedule, loss scaling.
        keep: how many checkpoints stay.
    Raises ValueError on every rank if the folder holds this step or a later one already, if the
    ranks differ, if something could not be loaded, or if a rank cannot write.
    """
    folder = Path(folder)
    place = _begin(folder, step, model, optimizer, run, parts, keep)
    with files_of_all_ranks():
        dcp.save(state_of(model, optimizer), storage_writer=dcp.FileSystemWriter(place))
    with same_error_on_all_ranks():
        if rank() == 0:
            _set_latest(place, keep)


def save_checkpoint_async(
    folder: Path | str,
    *,
    step: int,
    model: nn.Module,
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
    return PendingSave(upload, group, stager, place, keep)


class PendingSave:
    """A checkpoint that is being written. LATEST names it as soon as it is whole."""

    def __init__(
        self,
        upload: Future,
        group: distributed.ProcessGroup | None,
        stager: DefaultStager,
        place: Path,
        keep: int,
    ) -> None:
        self.group = group
        self.stager = stager
        self._place = place
        self._keep = keep
        self._named: Future = Future()
        upload.add_done_callback(self._name)

    def _name(self, upload: Future) -> None:
        """In the thread, when the parts of all ranks are written, or when one has failed."""
        try:
            upload.result()
            if rank() == 0:
                _set_latest(self._place, self._keep)
        except BaseException as error:
            self._named.set_exception(error)
        else:
            self._named.set_result(None)

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
        place = _latest(Path(folder))
    if not _alone():
        agree(latest_checkpoint=str(place))
    return place


def load_checkpoint(
    folder: Path | str,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    parts: Mapping[str, Any] = NO_PARTS,
) -> int:
    """Put the last whole checkpoint below `folder` back. Returns the number of steps done.

    All ranks call it; there may be more or fewer than have saved, and sharded in another way.
    Random states come back if there are as many ranks as have saved, else they stay as they are:
    dropout then draws other numbers. Gradients are dropped.

    All facts are compared before anything is changed. Raises ValueError on every rank if there is
    no checkpoint, if a fact of the run, the model, its frozen base, the optimizer or the parts
    differs, or if ranks do not see the same checkpoint.
    """
    place = latest_checkpoint(folder)
    if place is None:
        raise ValueError(f"there is no checkpoint in {folder}: start the run without resuming")
    facts = facts_of_all_ranks(run, model, optimizer, parts)
    with same_error_on_all_ranks():
        shared = json.loads((place / "run.json").read_text(encoding="utf-8"))
        check_same_run(place, saved=shared["facts"], given=facts)
        same_ranks = shared["ranks"] == world_size()
        number = rank() if same_ranks else 0
        own = torch.load(place / f"rank-{number}.pt", map_location="cpu", weights_only=True)

    # Gradients of before would be those of other weights. PyTorch, too, wants none: it makes the
    # states of a fresh optimizer by a step with gradients of zero.
    optimizer.zero_grad(set_to_none=True)
    state = state_of(model, optimizer)
    with files_of_all_ranks():
        dcp.load(state, storage_reader=dcp.FileSystemReader(place))
    set_state(model, optimizer, state)
    for name, part in parts.items():
        part.load_state_dict(own["parts"][name])
    if same_ranks:
        set_random_states(own["random"])
    return shared["step"]


def _begin(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    parts: Mapping[str, Any],
    keep: int,
) -> Path:
    """Check on every rank, and write the small files. Returns the new folder."""
    if not _alone():
        agree(step=step, keep=keep)
    check_whole(step=step, keep=keep)
    facts = facts_of_all_ranks(run, model, optimizer, parts)
    place = folder / f"step-{step:08d}"
    with same_error_on_all_ranks():
        before = _latest(folder)
        if before is not None and before.name >= place.name:
            raise ValueError(
                f"{folder} holds a checkpoint of {before.name}, and this is {place.name}: resume "
                f"from it, or use another folder"
            )
        place.mkdir(parents=True, exist_ok=True)
        states = {name: in_python_numbers(part.state_dict()) for name, part in parts.items()}
        with replaced_at_once(place / f"rank-{rank()}.pt") as file:
            save_loadable({"random": random_states(), "parts": states}, file)
        if rank() == 0:
            shared = {"step": step, "ranks": world_size(), "facts": facts}
            (place / "run.json").write_text(json.dumps(shared, indent=1), encoding="utf-8")
    return place


# --- folders and files ----------------------------------------------------------------------------


def _latest(folder: Path) -> Path | None:
    """What LATEST names, or None if there is none. ValueError if it is not whole."""
    file = folder / "LATEST"
    if not file.is_file():
        return None
    place = folder / file.read_text(encoding="utf-8").strip()
    if not (place / ".metadata").is_file():
        raise ValueError(
            f"{file} names {place.name}, which is not there or not whole: write the name of "
            f"another folder into it, or remove it to begin from the start"
        )
    return place


def _set_latest(place: Path, keep: int) -> None:
    """Name a whole checkpoint as the last one, and remove all but the last `keep`."""
    with replaced_at_once(place.parent / "LATEST") as file:
        file.write(place.name.encode())
    until_here = sorted(path for path in place.parent.glob("step-*") if path.name <= place.name)
    for old in until_here[:-keep]:
        shutil.rmtree(old)


@contextlib.contextmanager
def files_of_all_ranks(*, group: distributed.ProcessGroup | None = None) -> Iterator[None]:
    """Around calls of PyTorch that write or read: they raise a ValueError on every rank."""
    with same_error_on_all_ranks(group=group), warnings.catch_warnings():
        # It warns in a process that is alone, which is no mistake.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except dcp.CheckpointException as raised:  # which is no Exception
            raise ValueError(str(raised)) from raised


def _alone() -> bool:
    return not distributed.is_initialized()


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_written_bytes(model: nn.Module, *, ranks: int) -> int:
    """Bytes of tensors that each rank writes, with AdamW in the dtype of the weights.

    The weights and two averages, divided by the ranks, also where ranks hold copies, as in DDP.
    PyTorch adds about a kilobyte to each part of a tensor. `model` is not sharded yet.
    """
    check_whole(ranks=ranks)
    return 3 * sum(tensor_bytes(p) for p in model.parameters() if p.requires_grad) // ranks


def predicted_interval_seconds(*, save_seconds: float, failure_seconds: float) -> float:
    """How often to save, so that saving and repeating lost steps together cost least.

    Young's formula: sqrt(2 x save x failure). A save costs save / interval of the time, and a
    failure half an interval.

    Args:
        save_seconds: for which a save stalls the training.
        failure_seconds: between two failures of the run. With N times the machines it is an N-th.
    """
    check_number(above=0, save_seconds=save_seconds, failure_seconds=failure_seconds)
    return math.sqrt(2 * save_seconds * failure_seconds)
