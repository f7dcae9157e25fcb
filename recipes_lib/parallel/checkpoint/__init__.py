"""Sharded checkpoints: each rank writes its part, and any number of ranks reads them.

Problem    Each rank holds a part of weights and optimizer states. One rank has no room for all, and
           parts that are saved as they are can be read by as many ranks only.
Idea       Save parts together with their place in the whole tensor. Who loads asks for places:

               4 ranks save     rows 0-1 | rows 2-3 | rows 4-5 | rows 6-7      of a weight [8, D]
               2 ranks load     rows 0-3            | rows 4-7                 two files each
               1 rank loads     rows 0-7                                       four files

           A folder for each checkpoint, and a file LATEST that names the last whole one and is
           replaced by one rename. In the background: copy the parts, go on training, and write the
           copies from a thread.
Saves      Each of N ranks writes 1/N. In the background a save stalls the training only as long as
           the copy takes. A run that was killed loses the steps since the last checkpoint.
Costs      12 bytes per trainable parameter on disk with fp32 AdamW, as many as `keep` times; in the
           background the same once more in host memory, divided by N. How often costs least: every
           sqrt(2 x seconds of a save x seconds between two failures).
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
    runs/a/step-00000300/run.json           step, ranks, facts of the run (checkpoint_state.py)
    runs/a/step-00000300/__0_0.distcp       what rank 0 writes: weights, states, random numbers …
    runs/a/step-00000300/.metadata          which part is where; PyTorch writes it last
    runs/a/step-00000400/                   being written, or left by a run that was killed

export  safetensors files from shards, for every other program
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from recipes_lib.core.checks import check_whole
from recipes_lib.core.model.checkpoint_state import (
    NO_PARTS,
    Facts,
    check_same_run,
    facts_of,
    optimizer_name,
    replaced_at_once,
)
from recipes_lib.core.model.random_states import random_states, set_random_states
from recipes_lib.core.ranks import rank, world_size
from recipes_lib.core.ranks.agreement import agree, same_error_on_all_ranks

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"

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
    """Each rank writes its part of the state after `step` steps below `folder`; LATEST names it.

    All ranks call it, and it returns when all have written.

    Args:
        folder: of the run, on a disk that all ranks share.
        model: sharded by FSDP2 or tensor parallelism, inside of DDP, or plain.
        run: facts that a resumed run must share, as JSON takes them: settings, length of the data.
        parts: what else has a `state_dict()`, the same on all ranks: schedule, loss scaling.
        keep: how many checkpoints stay.
    """
    folder = Path(folder)
    place = _begin_save(folder, step, model, optimizer, run, parts, keep)
    with files_of_all_ranks():
        state = _state_of(model, optimizer, parts)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(place))
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
    """As `save_checkpoint`, but a thread writes: return as soon as each rank has copied its part.

        pending = None
        for step in range(steps):
            ...
            pending = save_checkpoint_async(..., after=pending)
        pending.wait()

    `after`, the save before this one, is waited for, and its group and its memory are used again.
    The group is the thread's own: in that of the training its collectives would meet those of the
    training, and both would wait for ever.
    """
    folder = Path(folder)
    if after is not None:
        after.wait()
        group = after.group
        stager = after.stager
    else:
        group = distributed.new_group(backend="gloo") if distributed.is_initialized() else None
        on_gpu = torch.cuda.is_available()
        # use_async_staging=False: the copy is complete when this returns, and weights may change.
        stager = DefaultStager(StagingOptions(on_gpu, False, False, on_gpu))
    place = _begin_save(folder, step, model, optimizer, run, parts, keep)
    upload = dcp.async_save(
        _state_of(model, optimizer, parts),
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
        """In the thread, when a checkpoint's parts are written by all ranks, or one failed."""
        try:
            upload.result()
            if rank() == 0:
                _set_latest(self._place, self._keep)
        except BaseException as error:
            self._named.set_exception(error)
        else:
            self._named.set_result(None)

    def wait(self) -> None:
        """Return when all ranks have written and LATEST is replaced. All ranks have to call it."""
        with files_of_all_ranks(group=self.group):
            self._named.result()


def latest_checkpoint(folder: Path | str) -> Path | None:
    """The last whole checkpoint of all ranks below `folder`, or None. All ranks call it."""
    with same_error_on_all_ranks():
        place = _latest(Path(folder))
    agree(latest_checkpoint=str(place))  # machines may share no folder
    return place


def load_checkpoint(
    folder: Path | str,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    parts: Mapping[str, Any] = NO_PARTS,
) -> int:
    """Any number of ranks reads the last whole checkpoint below `folder`. Returns the steps done.

    All ranks call it; there may be more or fewer than have saved, and sharded in another way.
    Random states come back on as many ranks as have saved; on others dropout draws other numbers.
    """
    place = latest_checkpoint(folder)
    if place is None:
        raise ValueError(f"there is no checkpoint in {folder}: start the run without resuming")
    facts = _facts_of_all_ranks(run, model, optimizer, parts)
    with same_error_on_all_ranks():
        shared = json.loads((place / "run.json").read_text(encoding="utf-8"))
        check_same_run(place, saved=shared["facts"], given=facts)

    # Gradients of before would be those of other weights. PyTorch, too, wants none: it makes the
    # states of a fresh optimizer by a step with gradients of zero.
    optimizer.zero_grad(set_to_none=True)
    state = _state_of(model, optimizer, parts)
    same_ranks = shared["ranks"] == world_size()
    if not same_ranks:
        del state["random"]
    with files_of_all_ranks():
        dcp.load(state, storage_reader=dcp.FileSystemReader(place))
    _set_state(model, optimizer, state)
    for name, part in parts.items():
        part.load_state_dict(*state["parts"][name])
    if same_ranks:
        set_random_states(*state["random"][str(rank())])
    return shared["step"]


def _begin_save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    parts: Mapping[str, Any],
    keep: int,
) -> Path:
    """Check on every rank, and write down a checkpoint's facts. Returns its new folder."""
    agree(step=step, keep=keep)
    check_whole(step=step, keep=keep)
    facts = _facts_of_all_ranks(run, model, optimizer, parts)
    place = folder / f"step-{step:08d}"
    with same_error_on_all_ranks():
        before = _latest(folder)
        if before is not None and before.name >= place.name:
            raise ValueError(
                f"{folder} holds a checkpoint of {before.name}, and this is {place.name}: resume "
                f"from it, or use another folder"
            )
        place.mkdir(parents=True, exist_ok=True)
        if rank() == 0:
            shared = {"step": step, "ranks": world_size(), "facts": facts}
            (place / "run.json").write_text(json.dumps(shared, indent=1), encoding="utf-8")
    return place


# --- what is compared, and what is saved of this rank ---------------------------------------------

# Frozen weights come from the base model again. States are named by parameter.
OPTIONS = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True)


def _facts_of_all_ranks(
    run: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Mapping[str, Any],
) -> Facts:
    """The facts in a sharded checkpoint, which hold on any number of ranks."""
    with same_error_on_all_ranks():
        facts = facts_of(run, model, optimizer, parts)
    facts["optimizer"] = {"class": optimizer_name(_optimizer_with_states(optimizer))}
    facts["optimized"] = dict.fromkeys(facts["optimized"], True)  # states go by names here
    if not distributed.is_initialized():
        return facts
    of_ranks: list[Facts] = [{} for _ in range(world_size())]
    distributed.all_gather_object(of_ranks, facts)
    odd = set()
    for given in of_ranks:
        for kind, values in given.items():
            for name, value in values.items():
                if facts[kind].setdefault(name, value) != value:
                    odd.add((kind, name))
    for kind, name in sorted(odd):
        if kind != "base":
            raise ValueError(f"the ranks differ in {kind} {name}: give the same on all ranks")
        # Rows of a frozen embedding, as `quantized_shards` cuts it, are other ones on each rank.
        del facts[kind][name]
    return facts


def _state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: Mapping[str, Any]
) -> dict[str, Any]:
    """What this rank saves: its parts of the trainable weights and of optimizer states, by name."""
    inner = _optimizer_with_states(optimizer)
    _copy_settings(optimizer, inner)
    return {
        "model": get_model_state_dict(model, options=OPTIONS),
        "optimizer": get_optimizer_state_dict(model, inner, options=OPTIONS),
        # What stands in a tuple is written as it is, and is not taken apart by names.
        "parts": {name: (part.state_dict(),) for name, part in parts.items()},
        "random": {str(rank()): (random_states(),)},
    }


def _set_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put saved parts back into a model and an optimizer that may be divided in another way."""
    # Not strict: frozen weights are missing, and names were compared already.
    loose = StateDictOptions(strict=False, flatten_optimizer_state_dict=True)
    set_model_state_dict(model, state["model"], options=loose)
    inner = _optimizer_with_states(optimizer)
    set_optimizer_state_dict(model, inner, state["optimizer"], options=OPTIONS)
    _copy_settings(inner, optimizer)


def _optimizer_with_states(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What is saved: ZeroRedundancyOptimizer keeps an optimizer over this rank's part inside."""
    return getattr(optimizer, "optim", optimizer)


def _copy_settings(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """A loaded learning rate and the like: ZeroRedundancyOptimizer hands them on a step later."""
    if source is not target:
        for given, taken in zip(source.param_groups, target.param_groups, strict=True):
            taken |= {name: value for name, value in given.items() if name != "params"}


# --- folders and files ----------------------------------------------------------------------------


def _latest(folder: Path) -> Path | None:
    """The checkpoint that LATEST names, or None if there is none. ValueError if it is not whole."""
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
    """Around reading and writing of a checkpoint: errors are a ValueError on every rank."""
    with same_error_on_all_ranks(group=group), warnings.catch_warnings():
        # It warns in a process that is alone, which is no mistake.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except dcp.CheckpointException as raised:  # which is no Exception
            raise ValueError(str(raised)) from raised


# --- torchrun, which starts all ranks again when one of them has died -----------------------------


def require_own_store() -> None:
    """Raise ValueError if ranks that start again from a checkpoint meet in torchrun's old store.

    By default ranks meet in the store of torchrun itself, which lives through all attempts, so
    later ranks can read addresses of dead ones, and fail or wait. Call it before
    `init_process_group`. Without restarts, and without torchrun, it does nothing.

    With several machines, `TORCHELASTIC_RESTART_COUNT` does not tell that ranks have died before:
    each torchrun counts the failures of its own ranks. A checkpoint tells.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts > 0 and shared:
        raise ValueError(
            f"torchrun may start these ranks {restarts} more time(s), and would show them "
            f"addresses of ranks that have died: start it as `{OWN_STORE} torchrun …`"
        )
