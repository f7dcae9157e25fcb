"""Where activation_offload puts what forward saves: pinned host memory, or a file on a disk.

A store moves one storage at a time, in the background:

    store.send(saved)     start the way out: `saved.bytes` is being copied away
    store.fetch(saved)    start the way back: `saved.bytes` is being filled again
    saved.arrive()        wait for the way that was started last
    store.close()         at the end of the context
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch


class SavedStorage:
    """One storage that is away, or on its way. It moves whole: views and strides need no care."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        elements = storage.nbytes() // tensor.itemsize
        self.size = elements * tensor.itemsize
        # By these two a tensor is known again: the same storage, with the same values in it.
        self.origin = weakref.ref(storage)
        self.version = tensor._version
        # Until the copy is out the memory stays in use. `detach` shares the counter of versions.
        self.source: torch.Tensor | None = tensor.detach()
        # All of the storage as bytes [size], whatever the tensor's dtype, shape and place in it.
        everything = tensor.detach().as_strided((elements,), (1,), 0)
        self.bytes: torch.Tensor | None = everything.view(torch.uint8)
        # These two are the store's: where the copy is, and how to wait for it.
        self.copy: Any = None
        self.wait: Callable[[], Any] | None = None

    def arrive(self) -> None:
        """Wait for the transfer that was started last; an error in it is raised here."""
        wait = self.wait
        self.wait = None  # first: an error would refer to the graph, and the graph to us
        if wait is not None:
            wait()


class HostStore:
    """Pinned memory, copied to and from on a second CUDA stream.

    PyTorch takes the next power of two for each storage, and keeps it for the next step, which
    needs the same sizes again. `core.measure.free_memory.release_memory` gives it back to the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.computing = torch.cuda.current_stream(device)

    def send(self, saved: SavedStorage) -> None:
        saved.copy = torch.empty(saved.size, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._start(saved, source=saved.bytes, target=saved.copy)

    def fetch(self, saved: SavedStorage) -> None:
        saved.bytes = torch.empty(saved.size, dtype=torch.uint8, device=self.device)
        self._start(saved, source=saved.copy, target=saved.bytes)

    def _start(self, saved: SavedStorage, *, source: torch.Tensor, target: torch.Tensor) -> None:
        self.stream.wait_stream(self.computing)  # which may still write the source
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        copied = self.stream.record_event()
        # Device memory belongs to the computing stream. It waits before it frees any, so there is
        # no need for `record_stream`.
        saved.wait = functools.partial(self.computing.wait_event, copied)

    def close(self) -> None:
        self.computing.wait_stream(self.stream)


class DiskStore:
    """A file without a name, and one thread that serves it. A killed process leaves nothing."""

    def __init__(self, device: torch.device, directory: Path) -> None:
        self.device = device
        self.directory = directory
        self.file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  (`close` closes it)
        self.worker = ThreadPoolExecutor(max_workers=1)
        self.end = 0  # where the next storage goes in the file
        self.away: weakref.WeakSet[SavedStorage] = weakref.WeakSet()

    def send(self, saved: SavedStorage) -> None:
        self._require_open()
        if not self.away:
            self.end = 0  # all is back: the file starts anew
        saved.copy = self.end  # its place in the file
        self.end += saved.size
        self.away.add(saved)
        self._start(saved, self._write)

    def fetch(self, saved: SavedStorage) -> None:
        self._require_open()
        saved.bytes = torch.empty(saved.size, dtype=torch.uint8, device="cpu")
        self._start(saved, self._read)

    def _require_open(self) -> None:
        if self.file.closed:
            raise RuntimeError(
                "backward came after the end of offload_activations(): call it inside the context"
            )

    def _start(self, saved: SavedStorage, task: Callable[[int, memoryview], None]) -> None:
        view = memoryview(saved.bytes.cpu().numpy())
        saved.wait = self.worker.submit(self._serve, task, saved.copy, view).result

    def _serve(self, task: Callable[[int, memoryview], None], place: int, view: memoryview) -> None:
        """In the thread: read or write, and say which directory is full if one is."""
        try:
            with view:  # released here: this thread must not hold the last reference to a tensor
                task(place, view)
        except OSError as error:
            where = f"{self.end:,} bytes in {self.directory}"
            raise OSError(error.errno, f"{error.strerror}: {where}") from error

    def _write(self, place: int, view: memoryview) -> None:
        self.file.seek(place)
        self.file.write(view)
        self.file.flush()  # what stays in Python's buffer would be an error later, far from here

    def _read(self, place: int, view: memoryview) -> None:
        self.file.seek(place)
        self.file.readinto(view)

    def close(self) -> None:
        self.worker.shutdown(cancel_futures=True)
        with contextlib.suppress(OSError):  # of a full disk: `_serve` has said it
            self.file.close()


class NoStore:
    """In a dry run: what is away takes no memory, and comes back without data."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, saved: SavedStorage) -> None:
        """Nothing has to be kept."""

    def fetch(self, saved: SavedStorage) -> None:
        saved.bytes = torch.empty(saved.size, dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        """Nothing is open."""
