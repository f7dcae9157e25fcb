"""What all checkpoints share: the facts that name a run, and the rename that ends a save.

A checkpoint of another run loads without an error wherever the shapes agree. So each keeps facts,
and they are compared before anything is loaded:

    run         what the user says: settings, the length of the data
    weights     shape and dtype of each tensor that is saved: what trains, and the buffers
    base        a fingerprint of each frozen weight, for adapters of another base fit as well
    optimizer   its class
    optimized   where it has each parameter
    parts       the class of the schedule, which takes over any other one's state without a word
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from torch import Tensor, nn

from recipes_lib.core.model.fingerprint import fingerprint
from recipes_lib.core.model.marks import MASTER_OF

Facts = dict[str, dict[str, Any]]
NO_PARTS: Mapping[str, Any] = MappingProxyType({})

# --- facts ----------------------------------------------------------------------------------------


def facts_of(
    run: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Mapping[str, Any],
) -> Facts:
    """The facts in a checkpoint, which a resumed run must share.

    With weights in parts over ranks, every rank must ask.
    """
    base = {}
    for name, parameter in model.named_parameters():
        # Weights in 4 bits are whole numbers: two devices may round them otherwise.
        if not parameter.requires_grad and parameter.is_floating_point():
            # Ranks that hold parts wait for each other here: what may raise comes behind it.
            base[plain_name(name)] = fingerprint([(plain_name(name), parameter)])
    saved = saved_tensors(model)
    facts = {
        "run": dict(run),
        "weights": {plain_name(name): f"{list(t.shape)} in {t.dtype}" for name, t in saved.items()},
        "base": base,
        "optimizer": {"class": optimizer_name(optimizer)},
        "optimized": optimized(model, optimizer),
        "parts": {name: type(part).__name__ for name, part in parts.items()},
    }
    return json.loads(json.dumps(facts))  # as they come back from a file: lists, and no tuples


def check_same_run(place: Path, *, saved: Facts, given: Facts) -> None:
    """Raise ValueError if the facts of a checkpoint are not those of this run."""
    odd = []
    for kind, here in given.items():
        there = saved[kind]
        names = list({**there, **here})
        if kind == "base":  # in 4 bits, a base has other names on one rank than on several
            names = [name for name in here if name in there]
        for name in names:
            then = there.get(name)
            now = here.get(name)
            if then != now:
                odd.append(f"{kind} {name}: {then!r} there, {now!r} here")
    if odd:
        raise ValueError(
            f"{place} belongs to another run ({'; '.join(odd[:3])}; {len(odd)} in all): resume "
            f"with its settings, model and optimizer, or use another folder"
        )


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint has of a model: what trains, and the buffers. Nothing is copied.

    The buffers are those of the `state_dict`: running statistics, masks of pruning, counters.
    """
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    buffers = dict(model.named_buffers())
    return trained | {name: buffers[name] for name in model.state_dict() if name in buffers}


def plain_name(name: str) -> str:
    """A name in a checkpoint, without the wrappers of DDP and of `torch.compile`."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


def optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """For a checkpoint: the numbers of parameters in the optimizer, by which states come back.

    Raises ValueError for parameters that are not in the model, as after an optimizer that was made
    before adapters were: their states would come back and they themselves would not.
    """
    name_of = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    places = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            # A master in host memory has the name of its parameter.
            parameter = getattr(parameter, MASTER_OF, parameter)
            if id(parameter) not in name_of:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} in the optimizer is not in the "
                    f"model: make the optimizer of the model that trains, or put all into one model"
                )
            places[name_of[id(parameter)]] = f"group {number}, place {position}"
    return places


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class in a checkpoint, and that of one inside it, as in backward."""
    inside = getattr(optimizer, "optimizer", None)
    if isinstance(inside, torch.optim.Optimizer):
        return f"{type(optimizer).__name__} of {type(inside).__name__}"
    return type(optimizer).__name__


# --- the file -------------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced_at_once(path: Path) -> Iterator[IO[bytes]]:
    """A checkpoint's file, which takes the place of `path` by one rename. A kill leaves `path`."""
    scratch = path.with_name(f"{path.name}.part")
    with scratch.open("w+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())  # a rename may reach the disk before the content does
    os.replace(scratch, path)
