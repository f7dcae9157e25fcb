"""What keeps ranks from waiting for one that has failed, and from loading what does not fit."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from recipes_lib.core.ranks.agreement import same_error_on_all_ranks
from recipes_lib.parallel.checkpoint.files import read_list
from recipes_lib.parallel.checkpoint.latest import latest_folder, step_of
from recipes_lib.parallel.checkpoint.state import OPTIONS, optimized_names

Form = tuple[tuple[int, ...], torch.dtype]  # the whole shape of a weight, and its dtype


@contextlib.contextmanager
def files_of_all_ranks(*, group: distributed.ProcessGroup | None = None) -> Iterator[None]:
    """Around calls of PyTorch that write or read: they raise a ValueError on every rank."""
    with same_error_on_all_ranks(group=group), warnings.catch_warnings():
        # It warns in a process that is alone, which is no mistake.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except dcp.CheckpointException as raised:  # which is no Exception
            failures = raised.failures.items()
            told = "; ".join(f"rank {number}: {text[0]}" for number, text in failures)
            raise ValueError(told) from raised


def refuse_older_step(folder: Path, step: int) -> None:
    """Raise ValueError if the folder is that of a run that is further already."""
    before = latest_folder(folder)
    if before is not None and step_of(before) >= step:
        raise ValueError(
            f"{folder} holds a checkpoint of step {step_of(before)}, and this is step {step}: "
            f"resume from it, or use another folder"
        )


def weights_of_all_ranks(model: torch.nn.Module) -> list[dict[str, Form]]:
    """Names, whole shapes and dtypes of what trains, for each rank. All ranks call it.

    Ranks share the names, but for pipeline stages: each has those of its own layers.
    """
    own = {}
    for name, tensor in get_model_state_dict(model, options=OPTIONS).items():
        own[name] = (tuple(tensor.shape), tensor.dtype)
    return _of_all_ranks(own)


def check_weights(place: Path, weights: list[dict[str, Form]]) -> None:
    """Raise ValueError if `place` holds other weights, or more, or fewer than all ranks have."""
    there = {}
    for name, entry in read_list(place).state_dict_metadata.items():
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata):
            there[name.removeprefix("model.")] = (tuple(entry.size), entry.properties.dtype)
    here = {}
    for of_rank in weights:
        for name, form in of_rank.items():
            # The first one that does not fit stays, for the message.
            if here.get(name, there.get(name)) == there.get(name):
                here[name] = form
    odd = sorted(name for name in {**here, **there} if here.get(name) != there.get(name))
    if odd:
        name = odd[0]
        raise ValueError(
            f"{place} holds other trainable weights: {name} is {_told(there.get(name))} there and "
            f"{_told(here.get(name))} here ({len(odd)} differ); load it into the model that was "
            f"saved"
        )


def check_optimized(place: Path, model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Raise ValueError if the optimizer of `place` had other parameters than those of all ranks.

    All ranks call it, with what they are about to load into.
    """
    known = set().union(*_of_all_ranks(set(get_model_state_dict(model))))
    own = optimized_names(state["optimizer"], prefix="param_groups.", known=known)
    here = set().union(*_of_all_ranks(own))
    there = optimized_names(
        read_list(place).state_dict_metadata, prefix="optimizer.param_groups.", known=known
    )
    odd = sorted(here ^ there)
    if odd:
        raise ValueError(
            f"{place} holds an optimizer of {len(there)} parameters, and this one has "
            f"{len(here)} ({odd[0]} is in one of them only): make the optimizer of that run"
        )


def _of_all_ranks(own: Any) -> list[Any]:
    if not distributed.is_initialized():
        return [own]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return found


def _told(form: Form | None) -> str:
    if form is None:
        return "missing"
    shape, dtype = form
    return f"{shape} in {dtype}"
