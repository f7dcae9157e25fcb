"""Activation offload: what forward saves for backward waits in host memory or on disk.

Problem    Activations do not fit, and recomputing them (activation checkpointing) costs a forward.
Idea       Autograd asks a pair of hooks where to keep each saved tensor, and they move it away:

               forward       block 0  ->  block 1  -> … ->  block L-1  -> loss
                               | out        | out             | stays: backward needs it first
               host or disk    v            v                 |
                               | back       | back            |
               backward      block 0  <-  block 1  <- … <-  block L-1

           The copies out run beside the computation, and those back begin before they are needed.
Saves      What L-1 of L blocks keep for backward, but for `in_flight` storages on their way.
Costs      Two transfers of every byte, which hide behind the computation if the link is fast.
Use when   Checkpointing is not enough; on top of it only block inputs travel.
Not when   Checkpointing is enough: it is simpler.
In production   All activations: `torch.autograd.graph.save_on_cpu(pin_memory=True)`; torchtune and
           TRL `activation_offloading`. Only the inputs of checkpointed blocks, since transformers
           5.17: `gradient_checkpointing_kwargs={"offload": True}` in `TrainingArguments`. Its
           copies take turns with the computation. Without a GPU the first block raises an error.
Source     torch.autograd.graph.saved_tensors_hooks, PyTorch docs; ZeRO-Infinity, arXiv 2104.07857.

Traps: /tmp may be memory; a hook that returns its input leaks the graph; in-place writes race
with a copy. All three are handled here. Under autocast a weight is cast again in backward, so it
must not be written to in between: that is a RuntimeError.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recipes_lib.core.model.causal_lm import decoder_blocks, require_causal_lm
from recipes_lib.memory._host_and_disk_stores import (
    Layout,
    SavedStorage,
    Store,
    layout_of,
    make_store,
)

# --- the idea: what a learner can copy ------------------------------------------------------------


def offloaded_by_hand(directory: Path) -> saved_tensors_hooks:
    """Inside this context every tensor that autograd saves waits in a file of its own.

    It waits for each transfer, writes weights and shared tensors again and again, and cleans up
    nothing. The technique below does better, and the hooks are the same two.
    """
    numbers = itertools.count()

    def pack(tensor: torch.Tensor) -> tuple[Path, torch.device]:
        path = directory / f"{next(numbers)}.pt"
        torch.save(tensor.detach().cpu(), path)
        return path, tensor.device  # all that the graph keeps

    def unpack(packed: tuple[Path, torch.device]) -> torch.Tensor:
        path, device = packed
        return torch.load(path).to(device)

    return saved_tensors_hooks(pack, unpack)


# --- the technique --------------------------------------------------------------------------------


@contextlib.contextmanager
def offload_activations(
    model: Any,
    *,
    to: str = "host",
    min_bytes: int = 65536,
    in_flight: int = 4,
    directory: str | None = None,
) -> Iterator[Offloader]:
    """Run forward and backward of `model` inside this context; its `moved_bytes` say what went out.

    Args:
        to: "host" copies to pinned memory on a second CUDA stream, "disk" to an unnamed file.
        min_bytes: smaller storages stay.
        in_flight: how many storages may be on their way in one direction; 1 if they are large.
            With 0 nothing comes back ahead: backward waits for each, and has one less in memory.
        directory: of the file; None is /var/tmp.
    """
    require_causal_lm(model)
    blocks = decoder_blocks(model)
    store = make_store(to, _device_of_blocks(model), directory)
    offloader = Offloader(model, store, min_bytes, in_flight)
    with (
        contextlib.closing(store),
        blocks[0].register_forward_pre_hook(offloader.start_taking),
        blocks[-1].register_forward_pre_hook(offloader.stop_taking),
        saved_tensors_hooks(offloader.pack, offloader.unpack),
    ):
        yield offloader


class Here(NamedTuple):
    """What the graph keeps of a tensor that stays."""

    tensor: torch.Tensor
    version: int


class Away(NamedTuple):
    """What the graph keeps of a tensor that moved: the storage, and how the tensor lies in it."""

    saved: SavedStorage
    layout: Layout


class Cast(NamedTuple):
    """What the graph keeps of a weight that autocast has copied to 16 bits: the weight itself.

    It is cast again when backward needs it. Its copy would travel in both directions, for nothing.
    """

    weight: torch.Tensor
    version: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


class Offloader:
    """The pair of hooks: storages go out in the order of forward and come back in reverse."""

    def __init__(self, model: Any, store: Store, min_bytes: int, in_flight: int) -> None:
        """Prepare to send what `model` saves for backward to the store."""
        self.moved_bytes = 0
        self._parameters = set(model.parameters())
        self._store = store
        self._min_bytes = min_bytes
        self._in_flight = in_flight
        self._taking = False  # between the first block and the last one
        weights = [*model.parameters(), *model.buffers()]
        self._weights = {tensor.untyped_storage()._cdata for tensor in weights}
        self._going_out: list[SavedStorage] = []
        self._coming_back: set[SavedStorage] = set()  # ahead of their use
        # Both weak, since the graph owns what it saved: storages by address, and in their order.
        self._known: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self._order: list[weakref.ref[SavedStorage]] = []

    def start_taking(self, *_: Any) -> None:
        self._taking = True
        self._finish(0)

    def stop_taking(self, *_: Any) -> None:
        """A hook of the last block, which backward needs first: what it saves stays."""
        self._taking = False
        self._finish(0)

    def pack(self, tensor: torch.Tensor) -> Here | Away | Cast:
        """Forward: what shall the graph keep in the place of `tensor`, which may wait elsewhere?"""
        size = self._movable_bytes(tensor)
        weight = weight_that_was_cast(tensor)
        if size >= self._min_bytes and weight in self._parameters:
            return Cast(weight, weight._version, tensor.dtype, tensor.size(), tensor.stride())
        if size < self._min_bytes:
            # `detach`, since with its own output the graph would own itself, and never be free.
            return Here(tensor.detach(), tensor._version)
        saved = self._known_storage(tensor)
        if saved is None:
            self._finish(max(0, self._in_flight - 1))
            saved = SavedStorage(tensor)
            self._store.send(saved)
            self._known[tensor.untyped_storage()._cdata] = saved
            self._going_out.append(saved)
            self.moved_bytes += size
        self._order.append(weakref.ref(saved))
        return Away(saved, layout_of(tensor))

    def unpack(self, packed: Here | Away | Cast) -> torch.Tensor:
        """Backward: the tensor that the graph has kept, which may have to come back."""
        if isinstance(packed, Cast):
            _require_version(packed.weight, packed.version)
            copy = packed.weight.detach().to(packed.dtype)
            return copy.as_strided(packed.shape, packed.strides)
        if isinstance(packed, Here):
            _require_version(packed.tensor, packed.version)
            return packed.tensor
        saved = packed.saved
        self._finish(0)
        if saved.bytes is None:
            self._store.fetch(saved)
        self._coming_back.discard(saved)
        self._fetch_ahead()  # while this one arrives and is used
        saved.arrive()
        return saved.tensor(packed.layout, self._store.device)

    def _movable_bytes(self, tensor: torch.Tensor) -> int:
        """Bytes of a storage that can wait elsewhere, 0 if it has to stay."""
        if not self._taking or tensor.device != self._store.device:
            return 0
        if is_traceable_wrapper_subclass(tensor):  # it is more than its storage
            return 0
        storage = tensor.untyped_storage()
        if storage._cdata in self._weights:
            return 0
        return storage.nbytes()

    def _known_storage(self, tensor: torch.Tensor) -> SavedStorage | None:
        """The tensor's storage if it waits elsewhere already, with the values that it has now."""
        storage = tensor.untyped_storage()
        saved = self._known.get(storage._cdata)
        # By now the address may be another storage's, and an in-place operator makes other values.
        if saved is None or saved.origin() is not storage or saved.version != tensor._version:
            return None
        return saved

    def _finish(self, remaining: int) -> None:
        """Wait until at most `remaining` offloaded storages are on their way; free others."""
        while len(self._going_out) > remaining:
            saved = self._going_out.pop(0)
            saved.arrive()
            _require_version(saved.source, saved.version)
            saved.free()

    def _fetch_ahead(self) -> None:
        """Start the way back of offloaded storages that backward will need next."""
        while self._order and len(self._coming_back) < self._in_flight:
            saved = self._order.pop()()
            if saved is not None and saved.bytes is None:
                self._store.fetch(saved)
                self._coming_back.add(saved)


def weight_that_was_cast(tensor: torch.Tensor) -> torch.Tensor | None:
    """What is not offloaded: the parameter of which `tensor` is a copy, perhaps transposed."""
    node = tensor.grad_fn
    while node is not None and node.name() in ("TBackward0", "TransposeBackward0"):
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return None
    return getattr(node.next_functions[0][0], "variable", None)  # only a leaf's node has it


# --- guards ---------------------------------------------------------------------------------------


def _device_of_blocks(model: Any) -> torch.device:
    """The device from which activations go: the one of all blocks, of which there are two."""
    blocks = decoder_blocks(model)
    devices = {parameter.device for parameter in model.parameters()}
    if len(blocks) < 2 or len(devices) > 1:
        raise ValueError(
            f"{len(blocks)} block(s) on {len(devices)} device(s): "
            f"two blocks on one device are needed"
        )
    return devices.pop()


def _require_version(tensor: torch.Tensor, version: int) -> None:
    """Raise RuntimeError after a saved tensor was changed in place: hooks have to check it."""
    if tensor._version != version:
        raise RuntimeError(
            "a tensor needed for backward was modified by an in-place operation after it was saved"
        )
