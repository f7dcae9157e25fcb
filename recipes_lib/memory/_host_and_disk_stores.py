"""Where tensors of a device wait until they are needed: pinned host memory, or a file on a disk.

A store moves one storage at a time, in the background:

    saved = SavedStorage(tensor)
    store.send(saved)     start the way out: `saved.bytes` is being copied away
    store.fetch(saved)    start the way back: `saved.bytes` is being filled again
    saved.arrive()        wait for the way that was started last
    saved.free()          the device has it no longer
    store.close()         nothing comes back after that
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recipes_lib.core.checks import check_choice
from recipes_lib.core.measure.dry_run import dry, pretends_a_card

# Of what is pinned together PyTorch takes the next power of two: 2 GiB for 1.1. In pieces of this
# size only the last one is rounded up.
PIECE = 64 * 2**20  # bytes

# /tmp may be memory; /var/tmp is meant to survive a restart.
DIRECTORY = "/var/tmp" if Path("/var/tmp").is_dir() else tempfile.gettempdir()


class Layout(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]


def layout_of(tensor: torch.Tensor) -> Layout:
    """How a tensor lies in its storage, which may be on the host or on a disk later."""
    return Layout(tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())


class SavedStorage:
    """One storage that is away, or on its way. It moves whole: views and strides need no care."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """The storage of `tensor`, before it goes to the host or to a disk."""
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

    def free(self) -> None:
        """Leave the memory of the device to others."""
        self.source = None
        self.bytes = None

    def tensor(self, layout: Layout, device: torch.device) -> torch.Tensor:
        """A tensor that lies in this storage, when it has come back."""
        self.bytes = self.bytes.to(device)  # from a disk it comes into host memory
        whole = self.size // layout.dtype.itemsize * layout.dtype.itemsize
        elements = self.bytes[:whole].view(layout.dtype)
        return elements.as_strided(layout.shape, layout.strides, layout.offset)


class HostStore:
    """Pinned memory, copied to and from on a second CUDA stream.

    PyTorch keeps it for the next step, which needs the same sizes again;
    `core.measure.free_memory.release_memory` gives it back to the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def send(self, saved: SavedStorage) -> None:
        """Start to copy a storage to the host."""
        there = saved.bytes.split(PIECE)
        saved.copy = [torch.empty_like(each, device="cpu", pin_memory=True) for each in there]
        self._start(saved, sources=there, targets=saved.copy)

    def fetch(self, saved: SavedStorage) -> None:
        """Start to copy a storage back from the host."""
        saved.bytes = torch.empty(saved.size, dtype=torch.uint8, device=self.device)
        self._start(saved, sources=saved.copy, targets=saved.bytes.split(PIECE))

    def _start(
        self,
        saved: SavedStorage,
        *,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        """Start the copies to the host or back, on the store's own stream."""
        self.stream.wait_stream(self._computing())  # which may still write the sources
        with torch.cuda.stream(self.stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        copied = self.stream.record_event()
        # Device memory belongs to the computing stream. It waits before it frees any, so there is
        # no need for `record_stream`.
        saved.wait = functools.partial(self._wait_for, copied)

    def _wait_for(self, copied: torch.cuda.Event) -> None:
        self._computing().wait_event(copied)

    def _computing(self) -> torch.cuda.Stream:
        """The stream of the caller; a model may compute on another one than it was made on."""
        return torch.cuda.current_stream(self.device)

    def close(self) -> None:
        self._computing().wait_stream(self.stream)


class DiskStore:
    """A file without a name, and one thread that serves it. A killed process leaves nothing."""

    def __init__(self, device: torch.device, directory: Path) -> None:
        """A file on a disk that grows by each storage, and the thread that writes it."""
        self.device = device
        self.directory = directory
        self.file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  (`close` closes it)
        self.worker = ThreadPoolExecutor(max_workers=1)
        self.end = 0  # where the next storage goes in the file
        self.away: weakref.WeakSet[SavedStorage] = weakref.WeakSet()

    def send(self, saved: SavedStorage) -> None:
        """Let the thread write a storage to the file on the disk."""
        self._require_open()
        if not self.away:
            self.end = 0  # all is back: the file starts anew
        saved.copy = self.end  # its place in the file
        self.end += saved.size
        self.away.add(saved)
        self._start(saved, self._write)

    def fetch(self, saved: SavedStorage) -> None:
        """Let the thread read a storage from the file on the disk."""
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
        """In the thread: read from disk or write, and say which directory is full if one is."""
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


Store = HostStore | DiskStore | NoStore


def make_store(to: str, device: torch.device, directory: str | None) -> Store:
    """A store for tensors of this device: on the "host", or in a file on the "disk"."""
    check_choice(("host", "disk"), to=to)
    on_a_card = device.type == "cuda" or pretends_a_card()
    if to == "host" and not on_a_card:
        raise ValueError(f"to='host': what is on {device} is there already; use to='disk'")
    if dry():
        return NoStore(device)
    if to == "disk":
        return DiskStore(device, directory_on_disk(directory))
    return HostStore(device)


# --- a folder on a disk, and not one in memory ----------------------------------------------------


def directory_on_disk(directory: str | Path | None) -> Path:
    """`directory`, by default /var/tmp."""
    path = Path(directory or DIRECTORY).resolve()
    if _file_system(path) == "tmpfs":
        raise ValueError(f"{path} is a RAM disk, which saves no memory: give `directory` on a disk")
    return path


def _file_system(directory: Path) -> str | None:
    """The kind of file system under `directory` on Linux, where /tmp may be memory; else None."""
    table = Path("/proc/mounts")
    if not table.exists():
        return None
    kinds = {}
    for line in table.read_text().splitlines():
        _device, mount_point, kind, *_options = line.split()
        kinds[mount_point] = kind
    for path in (directory, *directory.parents):
        if str(path) in kinds:
            return kinds[str(path)]
    return None
