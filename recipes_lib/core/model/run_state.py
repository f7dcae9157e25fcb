"""What all checkpoints share: the random states of a process, and the facts that name a run.

A checkpoint of another run loads without an error wherever the shapes agree. So a checkpoint keeps
facts, numbers and strings such as settings and the length of the data, and they are compared before
anything is loaded. So are the checksums of its file, and the classes of its parts.

`torch.load` takes no number of NumPy from a file. Learning rates become such numbers by a formula
with `numpy.cos`, so they are written as Python's own.
"""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

# What is equal to itself after it was written and read. `torch.load` takes no more than these.
FACTS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


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


def check_same_run(path: Path | str, *, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ValueError if a fact that `path` holds is not the given one, or is missing there."""
    differences = []
    # A fact that only one of the two has is a difference as well.
    for name in {**saved, **given}:
        if saved.get(name) != given.get(name):
            differences.append(f"{name}: {saved.get(name)!r} there, {given.get(name)!r} here")
    if differences:
        raise ValueError(
            f"{path} belongs to another run ({'; '.join(differences)}): "
            f"resume with its settings, or use another folder"
        )


def check_facts(run: Mapping[str, Any]) -> None:
    """Raise ValueError for a fact that would differ from itself when it is read: NaN, a tensor."""
    for name, fact in run.items():
        for single in _singles(fact):
            if isinstance(single, np.generic):
                raise ValueError(
                    f"the fact {name} of the run is {fact!r}, with a number of NumPy, which "
                    f"torch.load takes from no file: give int(...) or float(...) of it"
                )
            # Only NaN differs from itself.
            if not isinstance(single, FACTS) or single != single:
                raise ValueError(
                    f"the fact {name} of the run is {fact!r}, which is not equal to itself after "
                    f"it was saved, so that the checkpoint could not be loaded: give numbers, "
                    f"strings, or lists or dictionaries of them, for a path str(path)"
                )


def _singles(fact: Any) -> Iterator[Any]:
    """What is in its lists and dictionaries, the keys as well; of a number, itself."""
    if isinstance(fact, Mapping):
        for key, value in fact.items():
            yield from _singles(key)
            yield from _singles(value)
    elif isinstance(fact, list | tuple | set):
        for value in fact:
            yield from _singles(value)
    else:
        yield fact


def in_python_numbers(value: Any) -> Any:
    """The same, with the numbers of NumPy as Python's own, in lists and dictionaries, too."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {name: in_python_numbers(inside) for name, inside in value.items()}
    if type(value) in (list, tuple):
        return type(value)(in_python_numbers(inside) for inside in value)
    return value


def check_settings(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a setting of the optimizer that `torch.load` would not take back.

    Numbers of NumPy are none of them: they are written by `in_python_numbers`.
    """
    for group in optimizer.param_groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        if _is_loadable(settings):
            continue
        for name, value in settings.items():
            if not _is_loadable(value):
                raise ValueError(
                    f"the optimizer has the setting {name}={value!r}, which torch.load takes from "
                    f"no file, so that the checkpoint could not be loaded: give numbers, strings, "
                    f"or lists or dictionaries of them, for a path str(path)"
                )


def _is_loadable(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(in_python_numbers(value), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    # Python raises the last two for what it cannot write, such as a function without a name.
    except (pickle.PickleError, AttributeError, TypeError):
        return False
    return True


def check_in_model(optimizer: torch.optim.Optimizer, known: Set[int]) -> None:
    """Raise ValueError if the optimizer has parameters that a checkpoint would not hold.

    So has one that was made before the model was changed.

    Args:
        known: `id(parameter)` of all that the checkpoint holds.
    """
    odd = [
        list(parameter.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in known
    ]
    if odd:
        raise ValueError(
            f"{len(odd)} parameters of the optimizer are not in the model, the first of shape "
            f"{odd[0]}: make the optimizer of the model that trains, or put all into one model"
        )


def part_classes(parts: Mapping[str, Any]) -> dict[str, str]:
    """The class of each part. Schedules take over any other one's state without an error."""
    return {name: type(part).__name__ for name, part in parts.items()}


def check_parts(
    path: Path | str, saved: Mapping[str, Any], classes: Mapping[str, str], given: Mapping[str, Any]
) -> None:
    """Raise ValueError if a part, such as the schedule, is only in one of the two, or another."""
    if set(saved) != set(given):
        raise ValueError(f"{path} holds other parts: {sorted(saved)}, not {sorted(given)}")
    here = part_classes(given)
    # A checkpoint of an earlier version has no classes.
    odd = sorted(name for name in here if classes.get(name, here[name]) != here[name])
    if odd:
        name = odd[0]
        raise ValueError(
            f"{path} holds as {name} the state of {classes[name]}, not of {here[name]}: make the "
            f"{name} of that run"
        )


def read_state(path: Path) -> Any:
    """What `torch.save` has written, on the CPU. ValueError if the file is damaged.

    It takes tensors, numbers and strings, but no code that a foreign file brings.
    """
    try:
        check_checksums(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (
        OSError,
        RuntimeError,
        EOFError,
        OverflowError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        raise ValueError(
            f"{path} is damaged ({error}): resume from an older copy, or start again"
        ) from error


def check_checksums(file: Path | IO[bytes]) -> None:
    """Raise BadZipFile if a bit of a file of `torch.save` is not as it was written.

    PyTorch does not compare the checksums that it writes: a flipped bit would be loaded.
    """
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} differs")


def check_loadable(path: Path) -> None:
    """Raise ValueError if `torch.load` would not take the file back, and delete it.

    It takes tensors, numbers, strings, and lists or dictionaries of them, because anything else in
    a file may be code of a stranger.
    """
    odd = get_unsafe_globals_in_checkpoint(path)
    if odd:
        path.unlink()
        raise ValueError(
            f"a checkpoint with {', '.join(sorted(odd))} could not be loaded: give facts and parts "
            f"of tensors, numbers and strings, for a path str(path)"
        )
