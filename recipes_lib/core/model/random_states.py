"""The random states of a process: taken away, and put back. NumPy's is not among them."""

from __future__ import annotations

import random
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """The random states of Python and of torch on all devices."""
    on_cuda = []
    if torch.cuda.is_available():
        on_cuda = torch.cuda.get_rng_state_all()
    return {"python": random.getstate(), "cpu": torch.get_rng_state(), "cuda": on_cuda}


def set_random_states(states: dict[str, Any]) -> None:
    """Put the random states back. Call it last: nothing may draw after it."""
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    # This machine may have fewer devices than the one that saved.
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
