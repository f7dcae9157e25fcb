"""An exact account of the bytes of live tensors, on a CPU, on a GPU, or of a dry run.

The resident set size of a process says little about its tensors: the C allocator keeps pages and
uses them again. So this account counts the storages themselves. It starts from every tensor alive,
adds each new storage that an operator returns, and subtracts it when the storage dies. Scratch
buffers inside an operator's C++ code are not tensors and are not seen.

It is a dispatch mode: PyTorch hands every operator to `__torch_dispatch__`, those of backward
included. One change is made by no operator: `fully_shard` empties the storage of a gathered weight,
and fills it again. So `UntypedStorage.resize_` tells this account, too.

One thing would differ under such a mode. Where two gradients of one tensor meet, autograd adds the
second to the first in place, if nobody else holds the first. In a dispatch mode it makes a third
tensor. With a tied embedding, and a loss in chunks or autocast, that is one more table of the
embedding, where backward ends. So this account adds in place where autograd would.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

# What gives the storage that it was given.
SAME_STORAGE = {aten.view.default, aten.detach.default}


class Listener:
    """Who wants to know of each change. Every storage has a number of its own."""

    def changed(self, number: int, change: int) -> None:
        """A storage was made, resized or freed: its bytes changed by `change`."""

    def operator_ended(self) -> None:
        """An operator returned, and what it made has been told."""


@dataclass
class _LiveStorage:
    """A live storage: a number that no later one gets, its bytes, what waits for its end, and the
    node of backward that made it."""

    number: int
    size: int
    finalizer: weakref.finalize
    made_by: int | None


class LiveBytes(TorchDispatchMode):
    """`current` and `peak` bytes of the live storages on one type of device.

    In a dry run the account is of its fake tensors, whatever the device. An operator after which
    more than `limit_bytes` are alive raises `torch.OutOfMemoryError`, as on a smaller device.
    """

    def __init__(
        self, device_type: str, *, limit_bytes: int | None = None, listener: Listener | None = None
    ) -> None:
        """An account of the live bytes on one type of device, or of those of a dry run."""
        super().__init__()
        self._fake_mode = active_fake_mode()
        # Fake tensors say that they are on a device; their storages are on none.
        self._device_type = device_type if self._fake_mode is None else "meta"
        self._limit = limit_bytes
        self._listener = Listener() if listener is None else listener
        self._storages: dict[int, _LiveStorage] = {}
        self._numbers = 0
        self._resizing: Any = None  # the patch, while inside
        self.current = 0
        self.peak = 0

    def ignore_compile_internals(self) -> bool:
        """Asked by torch.compile, which otherwise compiles nothing inside of a dispatch mode.

        On a GPU FlexAttention runs compiled or, with all of its scores, not at all.
        """
        return self._device_type == "cuda"

    def __enter__(self) -> LiveBytes:
        """Count the bytes of the storages that are alive, and begin to watch."""
        _held_by_autograd()  # found here, and not in the middle of a step
        self._storages = {}
        self.current = 0
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                self.see(thing)
                # Until `.grad` is read, the collector does not know the tensor behind it.
                if thing.is_leaf and thing.grad is not None:
                    self.see(thing.grad)
        self.peak = self.current
        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", self._resized())
        self._resizing.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stop_watching()

    def stop_watching(self) -> None:
        """Let go of the storages that are still alive. They would keep the account alive."""
        self._resizing.stop()
        # A list: the garbage collector may free a storage in here, which leaves the account then.
        for storage in list(self._storages.values()):
            storage.finalizer.detach()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and count the live storages that it returns."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return _device_of_fake(args[0])
        is_sum = func is aten.add.Tensor and self._are_gradients(*args)
        if is_sum and _holders(*args) == _held_by_autograd():
            func = aten.add_.Tensor
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not self._is_traced(func, leaf):
                self.see(leaf)
        self.peak = max(self.peak, self.current)
        self._listener.operator_ended()
        if self._limit is not None and self.current > self._limit:
            raise torch.OutOfMemoryError(
                f"emulated out of memory: {self.current:,} bytes of tensors are alive, "
                f"the limit is {self._limit:,}"
            )
        return out

    def _are_gradients(self, first: torch.Tensor, second: Any) -> bool:
        """Whether live bytes are gradients that autograd adds: a node of backward made one."""
        if not in_backward() or torch.is_grad_enabled() or not isinstance(second, torch.Tensor):
            return False
        if is_traceable_wrapper_subclass(first) or is_traceable_wrapper_subclass(second):
            return False
        if first._is_view() or self.see(first) is None:
            return False
        made_by = self._storages[first.untyped_storage()._cdata].made_by
        return made_by != _node_at_work()

    def _is_traced(self, func: Any, out: torch.Tensor) -> bool:
        """Whether `out` only stands for a gradient, while a dry run traces code for a compiler.

        The tracer makes it out of sight of this account, and then takes a view of it in its sight.
        """
        if func not in SAME_STORAGE or not isinstance(out, FakeTensor):
            return False
        return self._fake_mode is not None and out.untyped_storage()._cdata not in self._storages

    def see(self, tensor: torch.Tensor) -> int | None:
        """Enter a live storage that is new; returns its number, or None if it does not count."""
        # Of a DTensor this rank has a part. The tensor around it claims the bytes of the whole.
        tensor = getattr(tensor, "_local_tensor", tensor)
        # A tensor around others, as an optimizer state of torchao, claims bytes that it has not.
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self.see(getattr(tensor, name))
            return None
        # A dry run counts its own fake tensors; those of torch.compile hold no memory.
        of_another_mode = getattr(tensor, "fake_mode", None) is not self._fake_mode
        if tensor.layout != torch.strided or of_another_mode:
            return None
        # Under `torch.vmap` a tensor stands for many, and has no storage of its own.
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None
        storage = tensor.untyped_storage()
        if storage.device.type != self._device_type:
            return None
        if getattr(storage, "of_others", False):  # the twin of a batch that was there before
            return None
        key = storage._cdata
        size = storage.nbytes()
        known = self._storages.get(key)
        if known is None:
            known = self._enter_storage(key, storage)
        if known.size != size:  # new, or resized in place
            self._change_bytes(known, size - known.size)
        return known.number

    def _resized(self) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
        """`UntypedStorage.resize_` as it is now, which then tells this account."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            """Resize, and tell the account the change of live bytes."""
            resize(storage, size)
            known = self._storages.get(storage._cdata)
            if known is not None and known.size != size:
                self._change_bytes(known, size - known.size)
                self.peak = max(self.peak, self.current)
            return storage

        return resize_

    def _enter_storage(self, key: int, storage: torch.UntypedStorage) -> _LiveStorage:
        """From now on the account knows this live storage, until its end."""
        # PyTorch keeps the Python object of a storage alive exactly as long as the storage itself.
        finalizer = weakref.finalize(storage, self._forget_storage, key)
        finalizer.atexit = False
        self._numbers += 1
        self._storages[key] = _LiveStorage(
            number=self._numbers, size=0, finalizer=finalizer, made_by=_node_at_work()
        )
        return self._storages[key]

    def _forget_storage(self, key: int) -> None:
        storage = self._storages.pop(key)
        self._change_bytes(storage, -storage.size)

    def _change_bytes(self, storage: _LiveStorage, change: int) -> None:
        storage.size += change
        self.current += change
        self._listener.changed(storage.number, change)


def in_backward() -> bool:
    """Whether backward runs in this thread: also in a hook, or in a checkpoint that recomputes."""
    return torch._C._current_graph_task_id() != -1


def _node_at_work() -> int | None:
    """The number of the node of backward that computes now, or hands on what it has computed."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def _holders(first: torch.Tensor, second: torch.Tensor) -> tuple[int, int, int]:
    """By how many the `first` of two gradients is held: as a tensor, as a storage, as an object."""
    of_storage = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return first._use_count(), of_storage, sys.getrefcount(first)


class _HoldersOfASum(TorchDispatchMode):
    """Notes by how many the first of two gradients is held."""

    found: tuple[int, int, int] | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.add.Tensor:
            self.found = _holders(*args)
        return func(*args, **(kwargs or {}))


@functools.cache
def _held_by_autograd() -> tuple[int, int, int] | None:
    """The holders of a gradient that waits in autograd for a second one, and is nowhere else.

    How they are counted is up to PyTorch and Python. So they are found in a backward of one weight.
    """
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        weight = torch.ones(1, device="cpu", requires_grad=True)
        total = -weight + -weight
        with _HoldersOfASum() as holders:
            total.backward()
    return holders.found


def _device_of_fake(tensor: FakeTensor) -> torch.device:
    """The answer to two in three calls of a dry run: each would pass through all of its modes."""
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device
