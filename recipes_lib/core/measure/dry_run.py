"""Tensors without data: the same operators on shapes alone, which cost no memory and little time.

    with dry_run():
        model, optimizer, step = build()      # as always; recipes and libraries included
        with PeakMemory() as memory:
            step(model, optimizer)
    memory.peak                               # bytes that this step would take

Six things do not work on such tensors by themselves. The first four are functions that want data
(`replaced_functions.py`); the others have a place here or in the recipe:

    `module.to(...)`               swaps parameters, which PyTorch refuses without data
    `from_pretrained(...)`         would read a file: the configuration is enough
    weights of bitsandbytes        a class that takes no tensor without data
    grouped products of experts    their shape rule knows bf16 only
    values that are read           see `values.py`
    threads                        see no pretence: recipes work at once while `dry()` is true
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from recipes_lib.core.measure.dry_values import Values
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.measure.replaced_functions import functions_without_data


def dry() -> bool:
    """True inside `dry_run`, where tensors have no data."""
    return active_fake_mode() is not None


class AtOnce:
    """An executor that works when it is handed something, in this thread: the one that is dry."""

    def __init__(self, **ignored: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        """In a dry run: call the function, and give a Future that is done."""
        done: Future = Future()
        done.set_result(function(*args))
        return done

    def shutdown(self, **ignored: Any) -> None:
        """Nothing waits."""


def pretend_a_card() -> None:
    """From here to the end of the dry run the device is a GPU, with a host beside it."""
    active_fake_mode().pretends_a_card = True


def pretends_a_card() -> bool:
    """True inside a dry run whose device is a GPU that may not be there."""
    return getattr(active_fake_mode(), "pretends_a_card", False)


@contextlib.contextmanager
def on_the_host() -> Iterator[None]:
    """In a dry run: what is made inside is on the host, and no account of a GPU counts it.

    In a dry run all tensors count as if on one device. Elsewhere this changes nothing.
    """
    with_a_host = pretends_a_card() or machine().device == "cuda"
    if not dry() or not with_a_host:
        yield
        return
    values = active_fake_mode().values
    before = values.of_the_host
    values.of_the_host = True
    try:
        yield
    finally:
        values.of_the_host = before


def without_repetition(parts: Sequence[Any]) -> Sequence[Any]:
    """In a dry run the first two and the last of parts that differ in nothing but their values.

    Time is per operator there, and a third turn of a loop takes the bytes of the second.
    """
    if not dry() or len(parts) <= 3:
        return parts
    return [*parts[:2], parts[-1]]


def real_tensors() -> contextlib.AbstractContextManager:
    """In a dry run tensors have data inside: those that say where ranks are, for instance."""
    return _disable_current_modes() if dry() else contextlib.nullcontext()


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Inside, tensors have shapes and no data.

    `PeakMemory` counts the bytes that they would take, kernel by kernel as on this device. Raises
    ValueError where a decision hangs on a value.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(functions_without_data())
        stack.enter_context(out_of_the_collectors_sight())
        mode = stack.enter_context(FakeTensorMode())
        mode.values = stack.enter_context(Values())
        yield


@contextlib.contextmanager
def out_of_the_collectors_sight() -> Iterator[None]:
    """For a fast dry run: the collector forgets the objects that are there, until this ends.

    `PeakMemory` walks through all objects to find the tensors that are alive. In a dry run only
    its fake tensors count, and they are made inside: older objects need no look.
    """
    if gc.get_freeze_count() > 0:  # somebody has done so before, and would lose it at our end
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
