"""What all checkpoints share: the random states of a process, and the facts that name a run.

A checkpoint of another run loads without an error wherever the shapes agree. So a checkpoint keeps
facts, numbers and strings such as settings and the length of the data, and they are compared before
anything is loaded.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint


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
