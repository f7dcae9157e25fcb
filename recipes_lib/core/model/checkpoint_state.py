"""What all checkpoints share: the facts that name a run, its random states, and the last rename.

A checkpoint of another run loads without an error wherever the shapes agree. So each keeps facts,
and they are compared before anything is loaded:

    run         what the user says: settings, the length of the data
    weights     names, shapes and dtypes of what trains, and of the buffers
    base        a fingerprint of each frozen weight, for adapters of another base fit as well
    optimizer   its class
    optimized   its parameters by name
    parts       the class of the schedule, which takes over any other one's state without a word
"""

from __future__ import annotations

import contextlib
import json
import os
import random
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
    """What a resumed run must share. With weights in parts over ranks, every rank must ask."""
    # Ranks that hold parts wait for each other in these two, so what may raise comes behind them.
    weights = what_trains(model)
    base = what_is_frozen(model)
    facts = {
        "run": dict(run),
        "weights": weights,
        "base": base,
        "optimizer": {"class": optimizer_name(optimizer)},
        "optimized": optimized(model, optimizer),
        "parts": {name: type(part).__name__ for name, part in parts.items()},
    }
    return json.loads(json.dumps(facts))  # as they come back from a file: lists, and no tuples


def what_trains(model: nn.Module) -> dict[str, str]:
    """Shape and dtype of each tensor that a checkpoint holds, by name."""
    held = {name: each for name, each in model.named_parameters() if each.requires_grad}
    held |= kept_buffers(model)
    return {plain_name(name): f"{list(each.shape)} in {each.dtype}" for name, each in held.items()}


def what_is_frozen(model: nn.Module) -> dict[str, str]:
    """A fingerprint of each frozen tensor. Not in 4 bits: two devices may round otherwise."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            name = plain_name(name)
            found[name] = fingerprint([(name, parameter)])
    return found


def check_same_run(place: Path, *, saved: Facts, given: Facts) -> None:
    """Raise ValueError if the facts of a checkpoint are not those of this run."""
    odd = []
    for kind, here in given.items():
        there = saved[kind]
        names = list({**there, **here})
        if kind == "base":  # in 4 bits, a base has other names on one rank than on several
            names = [name for name in here if name in there]
        for name in names:
            then, now = there.get(name), here.get(name)
            # Also as text: NaN is not equal to itself.
            if then != now and str(then) != str(now):
                odd.append(f"{kind} {name}: {then!r} there, {now!r} here")
    if odd:
        raise ValueError(
            f"{place} belongs to another run ({'; '.join(odd[:3])}; {len(odd)} in all): resume "
            f"with its settings, model and optimizer, or use another folder"
        )


def plain_name(name: str) -> str:
    """As in the model without the wrappers of DDP and of `torch.compile`."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that `state_dict` has: running statistics, masks of pruning, counters."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in model.state_dict() if name in buffers}


def optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Where the optimizer has each parameter: PyTorch puts states back by these numbers.

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
    """Its class, and that of the one inside it, as `optimizer_in_backward` has one."""
    inside = getattr(optimizer, "optimizer", None)
    if isinstance(inside, torch.optim.Optimizer):
        return f"{type(optimizer).__name__} of {type(inside).__name__}"
    return type(optimizer).__name__


# --- random states --------------------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """The random states of Python and of torch on all devices. NumPy's is not among them."""
    on_cuda = []
    if torch.cuda.is_available():
        on_cuda = torch.cuda.get_rng_state_all()
    return {"python": random.getstate(), "cpu": torch.get_rng_state(), "cuda": on_cuda}


def set_random_states(states: dict[str, Any]) -> None:
    """Put them back. Call it last: nothing may draw after it."""
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    # This machine may have fewer devices than the one that saved.
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)


# --- files ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced_at_once(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` by one rename. A kill leaves `path`."""
    scratch = path.with_name(f"{path.name}.part")
    with scratch.open("w+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())  # a rename may reach the disk before the content does
    os.replace(scratch, path)
