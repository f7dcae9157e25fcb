"""Compiled decoding: the step of one token as one graph, with shapes that never change.

Problem    A step of one token launches some twenty operators per block. On a GPU a small one is
           done before Python has launched the next, and the card waits.
Idea       A CUDA graph records all launches of a step once, and replays them with one call. It
           replays the same shapes and the same addresses, so the cache must not show its length:

               sliced    keys[:, :, :length]                 another shape for each token
               static    keys, all T places, and a mask      the position is a number on the device

           `torch.compile(mode="reduce-overhead")` writes the kernels between the products and
           records the graph.
Saves      Time per token on a GPU: the gaps between kernels, most of a step for a small model.
Costs      Seconds of compiling, for each batch size and each T, and the attention of each token
           reads all T places of the cache, filled or not.
Use when   A GPU decodes many tokens at few batch sizes.
Not when   On a CPU: there are no CUDA graphs, a call costs little beside the products of its core,
           and the masked attention over all T places costs more than the calls did.
In production   `model.generate(cache_implementation="static")` compiles the step by itself on a
           GPU; vLLM records CUDA graphs for a list of batch sizes (`--enforce-eager` turns them
           off); gpt-fast.
Source     "Accelerating Generative AI with PyTorch II: GPT, Fast", PyTorch blog, November 2023;
           "CUDAGraph Trees", PyTorch documentation.

Shapes: B batch, K new tokens, T places of the cache, Hkv heads, E head dimension, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.model.compiling import compile_apart, require_compiler
from recipes_lib.core.model.decoding import CausalDecoder, KeyValueCache, require_decoder

# --- the idea: what a learner can copy ------------------------------------------------------------


def write_without_a_length(cache: Tensor, new: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Write `new` [B, Hkv, 1, E] at `position`, an int64 tensor [1], into cache [B, Hkv, T, E].

    Returns what attention gets: all T places, and which of them are visible, bool [T]. No shape and
    no number of Python depends on the position. So the graph of one token serves for all.
    """
    cache.index_copy_(2, position, new)
    places = torch.arange(cache.shape[2], device=cache.device)
    return cache, places <= position


# --- the technique --------------------------------------------------------------------------------

MODE = "reduce-overhead"  # CUDA graphs on a GPU; the default kernels on a CPU
BACKEND = "inductor"


def compile_decoder(decoder: CausalDecoder, *, max_tokens: int) -> CompiledDecoder:
    """A decoder whose step of one token is compiled, with caches of `max_tokens` places.

    The first such step compiles, and so does the first one with another batch size. Prompts run
    uncompiled. `decoder` stays as it is, and its layers must not be replaced afterwards. Precision
    comes first, then this.

    """
    require_decoder(decoder)
    plain = decoder.new_cache(max_tokens=max_tokens)  # refuses more than the decoder has room for
    if type(plain) is not KeyValueCache:
        raise ValueError(
            f"the decoder makes caches of class {type(plain).__name__}, and the compiled step has "
            f"one of its own: give a decoder with plain caches"
        )
    require_compiler(plain.device)
    return CompiledDecoder(decoder, max_tokens)


class CompiledDecoder(nn.Module):
    """It follows `core.model.decoding.CausalDecoder`, as the decoder inside does."""

    def __init__(self, decoder: Any, max_tokens: int) -> None:
        """A decoder without a compiled step yet, whose caches have `max_tokens` places."""
        super().__init__()
        self.decoder = decoder
        self.vocabulary = decoder.vocabulary
        self.max_tokens = max_tokens
        self._step = _compiled_step()
        # Tensors of caches that nobody holds any more, by batch size. A CUDA graph belongs to the
        # addresses with which it was recorded: a new cache that takes them needs no new graph.
        self._free: dict[int, list[_StaticStorage]] = defaultdict(list)

    def new_cache(self, *, batch: int = 1, max_tokens: int) -> StaticCache:
        """An empty static cache for `batch` rows; it has all places, however few are needed."""
        if max_tokens > self.max_tokens:
            raise ValueError(
                f"max_tokens={max_tokens}: the compiled step has {self.max_tokens} places, which "
                f"cannot change; give compile_decoder(decoder, max_tokens={max_tokens}) or more"
            )
        free = self._free[batch]
        if free:
            storage = free.pop()
        else:
            storage = _StaticStorage(
                self.decoder.new_cache(batch=batch, max_tokens=self.max_tokens)
            )
        cache = StaticCache(storage, batch=batch, capacity=self.max_tokens)
        weakref.finalize(cache, free.append, storage)
        return cache

    def forward(
        self,
        tokens: Tensor,
        cache: StaticCache,
        *,
        last_only: bool = False,
        row_by_row: bool = False,
    ) -> Tensor:
        """The compiled decoder appends `tokens` [B, K]: logits [B, K, V], or of the last [B, 1, V].

        One token runs compiled, and so do several with `row_by_row`, one after the other.
        """
        count = tokens.shape[1]
        KeyValueCache.reserve(cache, count)
        if count > 1 and not row_by_row:
            logits = self.decoder(tokens, cache, last_only=last_only)
            cache.length += count
            return logits
        rows = []
        for token in tokens.split(1, dim=1):
            rows.append(self._one_token(token, cache))
        if last_only:
            return rows[-1]
        return torch.cat(rows, dim=1)

    def _one_token(self, token: Tensor, cache: StaticCache) -> Tensor:
        """Replay the graph of one token: its logits [B, 1, V]."""
        # What the last replay has written is no longer needed, and this one may overwrite it.
        torch.compiler.cudagraph_mark_step_begin()
        # Tokens of the CPU, or with other strides, would each have a graph of their own.
        cache.token.copy_(token)
        # Layers that are no graph, as int8 ones on a CPU, get PyTorch's own error here.
        logits = self._step(self.decoder, cache)  # [B, 1, V]
        cache.length += 1
        return logits.clone()  # the next replay writes to the same address


def _compiled_step() -> Callable[[Any, StaticCache], Tensor]:
    """The step of one token, `cache.token`, which compiles when it is called."""

    def step(decoder: Any, cache: StaticCache) -> Tensor:
        return decoder(cache.token, cache, last_only=True)

    mode = MODE if BACKEND == "inductor" else None  # an option of inductor alone
    # Eight graphs for each decoder, not for all of them.
    return compile_apart(step, mode=mode, backend=BACKEND, fullgraph=True, dynamic=False)


class _StaticStorage:
    """The tensors of a static cache: those of a plain one, and small ones on the device.

    position int64 [1]; token int64 [B, 1], the newest; first int64 [B, 1], where each row starts.
    """

    def __init__(self, plain: KeyValueCache) -> None:
        """The tensors that a compiled step reads and writes, at addresses that stay."""
        self.keys = plain.keys
        self.values = plain.values
        self.dtype = plain.dtype
        whole = {"dtype": torch.int64, "device": plain.device}
        self.position = torch.zeros(1, **whole)
        self.token = torch.zeros(plain.batch, 1, **whole)
        self.first = torch.zeros(plain.batch, 1, **whole)
        for tensor in self.tensors():
            # Otherwise each replay would copy the whole cache to the place of the recording.
            torch._dynamo.mark_static_address(tensor, guard=False)

    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values, self.position, self.token, self.first]

    def clear(self) -> None:
        """As new. A NaN of the last answer would get through a mask, since NaN times 0 is NaN."""
        for tensor in self.tensors():
            tensor.zero_()


class StaticCache(KeyValueCache):
    """A cache whose shapes and addresses stay: `append` returns all T places, `mask` hides some."""

    def __init__(self, storage: _StaticStorage, *, batch: int, capacity: int) -> None:
        self.batch = batch
        self.capacity = capacity
        self.dtype = storage.dtype
        self.keys = storage.keys
        self.values = storage.values
        self.position = storage.position  # int64 [1]: `length`, on the device
        self.token = storage.token
        self._first = storage.first
        self._starts: Tensor | None = None
        self.length = 0
        storage.clear()

    @property
    def starts(self) -> Tensor | None:
        """As in `KeyValueCache`; what is set here is copied to the graph's own address."""
        return self._starts

    @starts.setter
    def starts(self, starts: Tensor | None) -> None:
        self._starts = starts
        if starts is not None:
            # As a column [B, 1]: PyTorch cannot compile a view of an input in inference mode.
            self._first.copy_(starts[:, None])

    def reserve(self, tokens: int) -> None:
        """Nothing inside the graph: the compiled decoder asks before each step."""

    def positions(self, tokens: int) -> Tensor:
        """Where the compiled step writes, by the position on the device."""
        slots = self.position + torch.arange(tokens, device=self.position.device)  # [K]
        if self.starts is None:
            return slots
        return (slots - self._first).clamp(min=0)

    def mask(self, tokens: int) -> Tensor:
        """For the compiled step: which of all T places K tokens look at, bool [B or 1, 1, K, T]."""
        slots = torch.arange(self.capacity, device=self.position.device)
        own = (self.position + torch.arange(tokens, device=self.position.device))[:, None]
        visible = slots <= own  # [K, T]
        if self.starts is None:
            return visible[None, None]
        real = slots >= self._first  # [B, T]
        return ((visible & real[:, None]) | (slots == own))[:, None]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write K tokens into the compiled step's cache; all T places [B, Hkv, T, E] come back."""
        slots = self.position + torch.arange(keys.shape[2], device=keys.device)  # [K]
        self.keys[layer].index_copy_(2, slots, keys)
        self.values[layer].index_copy_(2, slots, values)
        return self.keys[layer], self.values[layer]

    def advance(self, tokens: int) -> None:
        """Move the position on the device; the compiled decoder counts `length` along."""
        self.position += tokens

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.position.fill_(length)
