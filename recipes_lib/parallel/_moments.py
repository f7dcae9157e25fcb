"""Moments of a rank: seconds of the clock on a CPU, events in the stream of the work on a GPU."""

from __future__ import annotations

import time
from typing import Any

import torch

Moment = Any  # seconds, or an event
MILLISECONDS = 1000  # of a second


def moment_now(device: torch.device) -> Moment:
    """This moment on the device. Nothing waits for an event."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Moment, second: Moment) -> float:
    """From one moment to another one, when the device has come so far (`synchronize`)."""
    if isinstance(first, float):
        return second - first
    return first.elapsed_time(second) / MILLISECONDS
