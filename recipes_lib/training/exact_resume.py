"""Exact resume: a run that was killed goes on from its last checkpoint as if nothing had happened.

Problem    A process dies: a spot instance ends, a driver fails, memory runs out. What was trained
           is lost, or the run goes on with fresh averages, a restarted schedule and data that it
           has seen: no error, another training.
Idea       Save everything that the next step reads, in one file, at once:

               trainable weights · buffers · optimizer states · schedule · loss scale ·
               random states · step · facts of the run

           The data position is the step: `rows_of_step` in core/data/row_order.py computes the rows
           of any step from the seed. Settings, data and the frozen weights must be equal
           when the file is read: another run's checkpoint is refused. The file is written beside
           the old one and put in its place by one rename, so a kill at any moment leaves a whole
           checkpoint.
Saves      All steps up to the last checkpoint.
Costs      12 bytes per trainable parameter on disk with fp32 AdamW, and the time to write them.
           With LoRA megabytes. Buffers of the model's `state_dict` are kept as well: where a frozen
           base has its weights in buffers (GPTQ, AWQ), the file holds them too.
Use when   A run takes longer than you would like to repeat.
Not when   Several processes hold shards of the states: use torch.distributed.checkpoint.
           bitsandbytes brings paged states back as ordinary GPU memory.
In production   `Trainer(...).train(resume_from_checkpoint=True)` with `save_steps`: it skips the
           rows of the epoch that were seen, and checks neither the settings nor the data against
           those of the checkpoint.
Source     PyTorch documentation, "Reproducibility" and "Serialization semantics".

Exact means: the same losses to the last digit, on the same machine and number of threads, with
operators that are deterministic. Random states of torch and Python are kept; NumPy's is not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import check_whole
from recipes_lib.core.model.fingerprint import fingerprint
from recipes_lib.core.model.marks import MASTER_OF
from recipes_lib.core.model.run_state import (
    check_facts,
    check_in_model,
    check_loadable,
    check_parts,
    check_same_run,
    in_python_numbers,
    part_classes,
    random_states,
    read_state,
    set_random_states,
)
from recipes_lib.core.model.sizes import tensor_bytes

# What a checkpoint holds, and of which type each part is.
CONTENTS = {
    "run": dict,
    "step": int,
    "frozen": str,
    "weights": dict,
    "buffers": dict,
    "optimizer": dict,
    "optimizer_class": str,
    "parameter_names": list,
    "parts": dict,
    "part_classes": dict,
    "random": dict,
}

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
    parts: Mapping[str, Any] | None = None,
) -> None:
    """Write the state after `step` optimizer steps to the file `path`, replacing the one before.

    Args:
        model: any module.
        run: facts that a resumed run must share, numbers and strings: settings, length of the data.
        parts: everything else with `state_dict()` and `load_state_dict()`: schedule, loss scaling,
            a module that trains beside the model.
    Raises ValueError for facts or parts that hold something else than tensors, numbers, strings and
    lists or dictionaries of them, because such a file could not be loaded, and for an optimizer of
    parameters that are in no module given. The checkpoint before stays then.
    """
    check_whole(least=0, step=step)
    check_facts(run)
    if parts is None:
        parts = {}
    check_in_model(optimizer, _names_by_identity(model, optimizer, parts).keys())
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # `detach` shares the memory: nothing is copied before it is written.
    state = {
        "run": dict(run),
        "step": step,
        "frozen": fingerprint(_frozen(model)),
        "weights": {name: p.detach() for name, p in _trainable(model).items()},
        "buffers": _kept_buffers(model),
        "optimizer": in_python_numbers(optimizer.state_dict()),
        "optimizer_class": _class_of(optimizer),
        "parameter_names": _names_by_group(model, optimizer, parts),
        "parts": {name: in_python_numbers(part.state_dict()) for name, part in parts.items()},
        "part_classes": part_classes(parts),
        "random": random_states(),
    }
    # Under another name first: a kill from here on leaves the checkpoint before.
    scratch = path.with_name(f"{path.name}.part")
    with scratch.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # a rename may reach the disk before the content does
    check_loadable(scratch)
    os.replace(scratch, path)


def load_checkpoint(
    path: Path | str,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    parts: Mapping[str, Any] | None = None,
) -> int:
    """Put the state of the file `path` back; returns the number of steps that were done.

    An optimizer with the same parameters in another order gets the states by their names.

    Everything is compared before anything is changed. Raises ValueError if the file is missing or
    damaged, if a fact of the run or a frozen weight differs, if the trainable weights or the
    buffers have other names, shapes or dtypes, or if the optimizer is of another class or has other
    groups.
    """
    if parts is None:
        parts = {}
    # All checks first: a refused checkpoint leaves the model as it is.
    path = Path(path)
    state = _read(path)
    check_same_run(path, saved=state["run"], given=run)
    check_parts(path, state["parts"], state["part_classes"], parts)
    _check_same_tensors(path, "trainable weights", state["weights"], _trainable(model))
    _check_same_tensors(path, "buffers", state["buffers"], _kept_buffers(model))
    _check_frozen(path, state["frozen"], model)
    optimizer_state = _in_order_of(path, state, model, optimizer, parts)

    # Parts first: one that refuses its state by itself, as a loss scaling that was off, leaves the
    # weights as they are.
    for name, part in parts.items():
        part.load_state_dict(state["parts"][name])
    with torch.no_grad():
        for name, parameter in _trainable(model).items():
            parameter.copy_(state["weights"][name])
        for name, buffer in _kept_buffers(model).items():
            buffer.copy_(state["buffers"][name])
    optimizer.load_state_dict(optimizer_state)
    set_random_states(state["random"])  # last: nothing may draw after it
    return state["step"]


def _frozen(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What does not train, by name: of a base in 4 bits its norms and embeddings identify it."""
    return [(name, p) for name, p in model.named_parameters() if not p.requires_grad]


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that `state_dict` has: running statistics, masks of pruning, counters."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in model.state_dict() if name in buffers}


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    """Also of the optimizer that another one has inside, as `optimizer_in_backward` has."""
    inside = getattr(optimizer, "optimizer", None)
    if isinstance(inside, torch.optim.Optimizer):
        return f"{type(optimizer).__name__} of {type(inside).__name__}"
    return type(optimizer).__name__


def _names_by_group(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: Mapping[str, Any]
) -> list[list[str]]:
    """The names of the optimizer's parameters, group by group, in its order."""
    name_of = _names_by_identity(model, optimizer, parts)
    groups = []
    for group in optimizer.param_groups:
        groups.append([name_of.get(id(parameter), "?") for parameter in group["params"]])
    return groups


def _names_by_identity(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: Mapping[str, Any]
) -> dict[int, str]:
    """The name of each parameter of the model and of the modules among the parts.

    A master that the optimizer keeps in host memory has the name of its parameter.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for part_name, part in parts.items():
        if isinstance(part, nn.Module):
            for name, parameter in part.named_parameters():
                name_of.setdefault(id(parameter), f"{part_name}: {name}")
    for group in optimizer.param_groups:
        for master in group["params"]:
            parameter = getattr(master, MASTER_OF, None)
            if id(parameter) in name_of:
                name_of[id(master)] = name_of[id(parameter)]
    return name_of


def _in_order_of(
    path: Path,
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Mapping[str, Any],
) -> dict[str, Any]:
    """The saved optimizer states, numbered as the parameters of this optimizer are.

    PyTorch matches states by position. In another order a weight would get another one's averages,
    without an error if the shapes agree.
    """
    here = _names_by_group(model, optimizer, parts)
    _check_optimizer(path, state, optimizer, here)
    saved = state["optimizer"]
    number_there = {}
    for names, group in zip(state["parameter_names"], saved["param_groups"], strict=True):
        number_there.update(zip(names, group["params"], strict=True))
    states = {}
    groups = []
    number = 0
    for names, group in zip(here, saved["param_groups"], strict=True):
        first = number
        for name in names:
            if number_there[name] in saved["state"]:
                states[number] = saved["state"][number_there[name]]
            number += 1
        groups.append({**group, "params": list(range(first, number))})
    return {**saved, "state": states, "param_groups": groups}


# --- guards ---------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no checkpoint at {path}: start the run without resuming")
    state = read_state(path)
    if not _is_checkpoint(state):
        raise ValueError(f"{path} is no checkpoint of this kind: it needs {sorted(CONTENTS)}")
    return state


def _is_checkpoint(state: Any) -> bool:
    if not isinstance(state, dict):
        return False
    return all(isinstance(state.get(name), kind) for name, kind in CONTENTS.items())


def _check_same_tensors(
    path: Path, what: str, saved: Mapping[str, Tensor], given: Mapping[str, Tensor]
) -> None:
    there = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in saved.items()}
    here = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in given.items()}
    odd = sorted(name for name in {**here, **there} if here.get(name) != there.get(name))
    if odd:
        first = odd[0]
        raise ValueError(
            f"{path} holds other {what}: {len(odd)} differ, the first is {first} "
            f"({_described(there.get(first))} there, {_described(here.get(first))} here)"
        )


def _described(tensor: tuple[Any, ...] | None) -> str:
    if tensor is None:
        return "missing"
    shape, dtype = tensor
    return f"{list(shape)} in {dtype}"


def _check_frozen(path: Path, saved: str, model: nn.Module) -> None:
    if saved != fingerprint(_frozen(model)):
        raise ValueError(
            f"{path} was trained on another base: the frozen weights of this model have other "
            f"names, shapes or values; load the base of that run"
        )


def _check_optimizer(
    path: Path, state: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: list[list[str]]
) -> None:
    given = _class_of(optimizer)
    if state["optimizer_class"] != given:
        raise ValueError(
            f"{path} holds the states of {state['optimizer_class']}, not of {given}: make the "
            f"optimizer of that run"
        )
    there = [sorted(of_group) for of_group in state["parameter_names"]]
    here = [sorted(of_group) for of_group in names]
    if there != here:
        raise ValueError(
            f"{path} holds an optimizer with {_sizes(there)} parameters in its groups, and this "
            f"one has {_sizes(here)}, or others: make the groups of that run"
        )


def _sizes(groups: list[list[str]]) -> str:
    return ", ".join(str(len(names)) for names in groups)


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_checkpoint_bytes(model: nn.Module) -> int:
    """Bytes of the file with AdamW in the dtype of the weights.

    Three copies of what is trainable: the weights and two averages.
    """
    return 3 * sum(tensor_bytes(p) for p in model.parameters() if p.requires_grad)
