"""Activation offload: what forward saves for backward waits in host memory or on disk.

Problem    Activations do not fit, and recomputing them (activation checkpointing) costs a forward.
Idea       Autograd asks a pair of hooks where to keep each saved tensor, and they move it away:

               forward    block 0 -> block 1 -> … -> block L-1 -> loss     copied out beside the
                             |          |            (stays: it is          computation, and back
               backward   block 0 <- block 1 <- … <- needed first)          ahead of its use
Saves      What L-1 of L blocks save, but for `in_flight` storages that are on their way.
Costs      Two transfers of every byte, which hide behind the computation if the link is fast enough.
Use when   Checkpointing is not enough; on top of it only block inputs travel. Not when it is: it is simpler.
In production   `torch.autograd.graph.save_on_cpu(pin_memory=True)`; torchtune and TRL `activation_offloading`.
Source     torch.autograd.graph.saved_tensors_hooks, PyTorch docs; ZeRO-Infinity, arXiv 2104.07857.
Traps      /tmp may be memory; a hook that returns its input leaks the graph; in-place writes race with a copy.
"""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from recipes_lib.core.budget import Budget
from recipes_lib.core.causal_lm import decoder_blocks

DIRECTORY = "/var/tmp" if Path("/var/tmp").is_dir() else tempfile.gettempdir()


@contextlib.contextmanager
def offload_activations(
    model: Any,
    *,
    to: str = "host",
    min_bytes: int = 65536,
    in_flight: int = 4,
    directory: str | None = None,
) -> Any:
    """Run forward and backward of `model` inside this; the handle's `moved_bytes` says what went out.

    Args:
        to: "host" copies to pinned memory on a second CUDA stream, "disk" to an unnamed file in `directory` (/var/tmp).
        min_bytes: smaller storages stay. in_flight: at a time in one direction; 1 if each is large beside the memory.
    Raises ValueError for what cannot work here ("host" without CUDA, a directory in memory) or moves nothing,
    OSError for a disk without room, RuntimeError for in-place changes of saved tensors and a backward outside.
    """
    blocks, devices = (
        decoder_blocks(model),
        list({parameter.device for parameter in model.parameters()}),
    )
    if to not in ("host", "disk") or min(min_bytes, in_flight) < 1:
        raise ValueError(
            f"{to=}, {min_bytes=}, {in_flight=}: `to` is host or disk, the others 1 or more"
        )
    if len(blocks) < 2 or len(devices) > 1:
        raise ValueError(
            f"{len(blocks)} block(s) on {len(devices)} device(s): two blocks on one device are needed"
        )
    if to == "host" and devices[0].type != "cuda":
        raise ValueError(
            f"to='host': the activations of a model on {devices[0]} are there already; use to='disk'"
        )
    store = _Host(devices[0]) if to == "host" else _Disk(devices[0], Path(directory or DIRECTORY))
    offloader = Offloader(model, store, min_bytes, in_flight)
    first = blocks[0].register_forward_pre_hook(lambda *_: offloader.switch(True))
    last = blocks[-1].register_forward_pre_hook(lambda *_: offloader.switch(False))
    with (
        contextlib.closing(store),
        first,
        last,
        saved_tensors_hooks(offloader.pack, offloader.unpack),
    ):
        yield offloader
    if 0 < offloader.largest < min_bytes:
        raise ValueError(
            f"min_bytes={min_bytes}: nothing moved, the largest saved storage has {offloader.largest}"
        )


class _Saved:
    """One storage that is away. It moves whole, so views, strides and sharing need no care."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.origin, self.version = weakref.ref(tensor.untyped_storage()), tensor._version
        self.source: torch.Tensor | None = (
            tensor.detach()
        )  # until the copy is out; it shares the version
        self.bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            tensor.untyped_storage()
        )
        self.size, self.copy, self.wait = (
            self.bytes.numel(),
            None,
            None,
        )  # copy and wait are set by the store

    def arrive(self) -> _Saved:
        wait, self.wait = (
            self.wait,
            lambda: None,
        )  # first: an error would refer to the graph, and the graph to us
        wait()
        return self


class Offloader:
    """The pair of hooks: storages go out in the order of forward and come back in reverse."""

    def __init__(self, model: Any, store: _Host | _Disk, min_bytes: int, in_flight: int) -> None:
        self.moved_bytes, self.largest, self._min_bytes, self._in_flight = (
            0,
            0,
            min_bytes,
            in_flight,
        )
        self._store, self._device, self._going, self._ahead = store, None, [], set()
        self._weights = {
            t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())
        }
        self._known, self._order = (
            weakref.WeakValueDictionary(),
            [],
        )  # both weak: the graph owns what it saved

    def switch(self, active: bool) -> None:
        self._device = self._store.device if active else None  # the one to take tensors from
        self._finish(0)

    def _finish(self, remaining: int) -> None:
        while len(self._going) > remaining:
            saved = self._going.pop(0).arrive()
            _unmodified(saved.source, saved.version)
            saved.source = saved.bytes = None

    def pack(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        storage = (
            tensor.untyped_storage()
            if tensor.device == self._device and type(tensor) is torch.Tensor
            else None
        )
        size = 0 if storage is None or storage._cdata in self._weights else storage.nbytes()
        self.largest = max(self.largest, size)
        if size < self._min_bytes:
            return (
                tensor.detach(),
                tensor._version,
            )  # `detach`: given its own input, the graph would own itself
        saved = self._known.get(storage._cdata)
        # An address may be another storage's by now, and an in-place operator makes another value.
        if saved is None or saved.origin() is not storage or saved.version != tensor._version:
            self._finish(self._in_flight - 1)
            saved = self._known[storage._cdata] = _Saved(tensor)
            self._store.move(saved, out=True)
            self._going.append(saved)
            self.moved_bytes += size
        self._order.append(weakref.ref(saved))
        return saved, (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def unpack(self, packed: tuple[Any, Any]) -> torch.Tensor:
        saved, how = packed
        if isinstance(saved, torch.Tensor):
            return _unmodified(saved, how)
        self._finish(0)
        if saved.bytes is None:
            self._store.move(saved, out=False)
        self._ahead.discard(saved)
        while self._order and len(self._ahead) < self._in_flight:
            if (earlier := self._order.pop()()) is not None and earlier.bytes is None:
                self._store.move(earlier, out=False)
                self._ahead.add(earlier)
        saved.bytes = saved.arrive().bytes.to(self._store.device)
        return torch.empty(0, dtype=how[0], device=saved.bytes.device).set_(
            saved.bytes.untyped_storage(), *how[1:]
        )


class _Host:
    """Pinned memory, copied to and from on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream, self.computing = (
            device,
            torch.cuda.Stream(device),
            torch.cuda.current_stream(device),
        )

    def move(self, saved: _Saved, *, out: bool) -> None:
        target = torch.empty(
            saved.size, dtype=torch.uint8, device="cpu" if out else self.device, pin_memory=out
        )
        source = saved.bytes if out else saved.copy
        setattr(saved, "copy" if out else "bytes", target)
        self.stream.wait_stream(self.computing)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        # Device memory is the computing stream's, which waits before it frees any: no need for `record_stream`.
        event = self.stream.record_event()
        saved.wait = lambda: self.computing.wait_event(event)

    def close(self) -> None:
        self.computing.wait_stream(self.stream)


class _Disk:
    """An unnamed file, of which even a killed process leaves nothing, and one thread that serves it."""

    def __init__(self, device: torch.device, directory: Path) -> None:
        self.device, self.directory, self.end, self.live = (
            device,
            directory.resolve(),
            0,
            weakref.WeakSet(),
        )
        if Path("/proc/mounts").exists():  # Linux, where /tmp may be memory
            mounts = dict(
                line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()
            )
            kinds = [
                mounts[str(path)]
                for path in (self.directory, *self.directory.parents)
                if str(path) in mounts
            ]
            if kinds[:1] == ["tmpfs"]:
                raise ValueError(
                    f"{self.directory} is a RAM disk, which saves no memory: give `directory` on a disk"
                )
        self.file, self.worker = tempfile.TemporaryFile(dir=directory), ThreadPoolExecutor(1)  # noqa: SIM115

    def move(self, saved: _Saved, *, out: bool) -> None:
        if self.file.closed:
            raise RuntimeError(
                "backward came after the end of offload_activations(): call it inside the context"
            )
        if out:
            saved.copy = self.end if self.live else 0  # when all is back, the file starts anew
            self.end = saved.copy + saved.size
            self.live.add(saved)
        else:
            saved.bytes = torch.empty(saved.size, dtype=torch.uint8)
        saved.wait = self.worker.submit(
            self._run, saved.copy, memoryview(saved.bytes.cpu().numpy()), out
        ).result

    def _run(self, place: int, view: memoryview, out: bool) -> None:
        try:
            with (
                view
            ):  # released here, so that this thread never holds the last reference to a tensor
                self.file.seek(place)
                self.file.write(view) if out else self.file.readinto(view)
                self.file.flush()
        except OSError as error:
            raise OSError(
                error.errno, f"{error.strerror}: {self.end:,} bytes in {self.directory}"
            ) from error

    def close(self) -> None:
        self.worker.shutdown(cancel_futures=True)
        with contextlib.suppress(OSError):  # of a full disk, which is known
            self.file.close()


def estimate_activation_offload(
    budget: Budget, model: Any, *, batch_size: int, seq_len: int
) -> Budget:
    """What the last block keeps, or what backward holds in it when the loss (`budget.loss` be final) is free."""
    elsewhere = (len(decoder_blocks(model)) - 1) * budget.one_block
    in_block = budget.one_block + budget.block_gradients
    return budget.change(
        activations=max(budget.activations - elsewhere, in_block - budget.after_activations)
    )


def _unmodified(tensor: torch.Tensor, version: int) -> torch.Tensor:
    if tensor._version != version:  # autograd leaves its own check to those who set hooks
        raise RuntimeError(
            "a tensor needed for backward was modified by an in-place operation after it was saved"
        )
    return tensor
