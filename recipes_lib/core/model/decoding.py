"""Decoding: what a decoder is here, the cache of keys and values, and the greedy loop.

A language model generates in two phases:

    prefill    all S tokens of the prompt in one call     many rows per weight: arithmetic limits it
    decode     one token per call                         one row per weight: memory limits it

Attention looks back at every token before. Their keys and values are the same in each step, so a
cache keeps them, and a step computes those of its own tokens only:

    keys[layer]  [B, Hkv, T, D]     | prompt … | answer … |   free   |
                                                          ^ length

The techniques of inference work on anything that follows `CausalDecoder`.

Shapes: B batch, K new tokens, T capacity, Hkv heads of keys and values, D head dimension, V words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from recipes_lib.core.model.causal_lm import require_causal_lm


class KeyValueCache:
    """Keys and values of all layers, allocated once for `capacity` tokens.

    A call of the decoder writes its K tokens layer by layer with `append`, and then moves the end
    once with `advance`. So every layer of one call sees the same `length`.

        keys, values   lists over the layers of [B, Hkv, T, D]
        dtype          of the keys and values that `append` returns: attention computes in it
        length         tokens that are in, the same number for all rows
        starts         int64 [B], the first real position of each row, if the rows are padded on the
                       left; None if all begin at 0. Set it before the first call.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.batch = batch
        self.dtype = dtype
        self.capacity = capacity
        self.length = 0
        self.starts: Tensor | None = None
        self._allocate(layers, (batch, kv_heads, capacity, head_dim), device)

    def _allocate(
        self, layers: int, shape: tuple[int, int, int, int], device: torch.device | str
    ) -> None:
        """Make the plain cache's tensors [B, Hkv, T, D]; a cache of another form makes others."""
        options = {"dtype": self.dtype, "device": device}
        self.keys = [torch.zeros(shape, **options) for _ in range(layers)]
        self.values = [torch.zeros(shape, **options) for _ in range(layers)]

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, free places included."""
        return sum(tensor.nbytes for tensor in [*self.keys, *self.values])

    def reserve(self, tokens: int) -> None:
        """Raise ValueError unless `tokens` more have room; the decoder asks before it writes."""
        if self.length + tokens > self.capacity:
            raise ValueError(
                f"{self.length} tokens are in the cache and {tokens} more come, but it was made "
                f"for {self.capacity}: give new_cache(max_tokens={self.length + tokens}) or more"
            )

    def positions(self, tokens: int) -> Tensor:
        """Where the next K `tokens` of decoding stand in their rows: int64 [K] or [B, K].

        A row's first real token has position 0. So have the padding tokens before it.
        """
        slots = torch.arange(self.length, self.length + tokens, device=self.device)  # [K]
        if self.starts is None:
            return slots
        return (slots - self.starts[:, None]).clamp(min=0)

    def mask(self, tokens: int) -> Tensor | None:
        """In decoding: what the next K `tokens` may look at, bool [B or 1, 1, K, length + K].

        None where no mask is needed: one token looks at everything before it, and attention has a
        faster way for the first tokens of all, each of which looks at those before.
        """
        if self.starts is None and (tokens == 1 or self.length == 0):
            return None
        slots = torch.arange(self.length + tokens, device=self.device)
        own = slots[self.length :, None]  # [K, 1]: the slot of each new token
        visible = slots <= own  # [K, length + K]
        if self.starts is None:
            return visible[None, None]
        real = slots >= self.starts[:, None]  # [B, length + K]
        # A padding token sees itself: a softmax over nothing would be NaN, and NaN times 0 is NaN.
        return ((visible & real[:, None]) | (slots == own))[:, None]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write K new tokens [B, Hkv, K, D] of one layer into the plain cache of decoding.

        Returns the keys and values up to and with them, [B, Hkv, length + K, D] each.
        """
        tokens = keys.shape[2]
        end = self.length + tokens
        all_keys = self.keys[layer]
        all_values = self.values[layer]
        # `narrow` is what `[:, :, length:end]` does, at half the cost of the call.
        all_keys.narrow(2, self.length, tokens).copy_(keys)
        all_values.narrow(2, self.length, tokens).copy_(values)
        return all_keys.narrow(2, 0, end), all_values.narrow(2, 0, end)

    def advance(self, tokens: int) -> None:
        """Move the end: `tokens` were appended to every layer."""
        self.length += tokens

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens and forget the rest, as speculation does."""
        self.length = length


class CausalDecoder(Protocol):
    """What the techniques of inference ask of a model."""

    vocabulary: int

    def new_cache(self, *, batch: int = 1, max_tokens: int) -> KeyValueCache:
        """An empty cache for `batch` rows of up to `max_tokens` tokens, prompt included."""
        ...

    def __call__(
        self,
        tokens: Tensor,
        cache: KeyValueCache,
        *,
        last_only: bool = False,
        row_by_row: bool = False,
    ) -> Tensor:
        """Append `tokens` [B, K] to the cache and return their logits [B, K, V].

        Args:
            last_only: logits of the last token only, [B, 1, V].
            row_by_row: compute the attention of the K tokens one after the other, without a mask.
                Then each token gets the same operations as in a call of its own.
        """
        ...


def is_decoder(model: Any) -> bool:
    """Whether `model` follows `CausalDecoder`; a Hugging Face model does not."""
    return hasattr(model, "new_cache") and hasattr(model, "vocabulary")


def require_decoder(model: Any) -> None:
    """Raise ValueError for a model without the cache that decoding here needs."""
    if not is_decoder(model):
        raise ValueError(
            f"{type(model).__name__} is no decoder: give what apply_decode_loop(model) returns"
        )


def require_causal_lm_or_decoder(model: Any) -> None:
    """Raise ValueError unless `model` is a Hugging Face causal LM or a decoder."""
    if not is_decoder(model):
        require_causal_lm(model)


def token_row(tokens: Any, *, vocabulary: int, name: str = "prompt", least: int = 1) -> Tensor:
    """One text to decode from, ids as a list or as a tensor [S] or [1, S], as int64 [1, S].

    Raises ValueError for fewer than `least` tokens, several rows, and ids outside the vocabulary:
    they fail deep inside an embedding, and on a GPU without a name.
    """
    ids = torch.as_tensor(tokens)
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or len(ids) != 1 or ids.shape[1] < least:
        raise ValueError(
            f"{name} has the shape {list(ids.shape)}: give token ids of one row, {least} or more"
        )
    smallest, largest = ids.aminmax()
    if smallest < 0 or largest >= vocabulary or ids.is_floating_point():
        raise ValueError(
            f"{name} holds numbers from {smallest} to {largest}, and the model knows the whole "
            f"ones from 0 to {vocabulary - 1}: give the ids of the model's own tokenizer"
        )
    return ids.long()


def stop_ids(stop: Iterable[Any]) -> frozenset[int]:
    """The ids that end decoding. The None of a tokenizer without an end token would never come."""
    return frozenset(int(token) for token in stop)


def greedy(
    decoder: CausalDecoder,
    prompt: Sequence[int] | Tensor,
    *,
    new_tokens: int,
    stop: Collection[int] = (),
) -> list[int]:
    """Greedy decoding: up to `new_tokens` tokens, each the likeliest one, without the prompt.

    The first of the ids in `stop` ends the answer, and is its last token.
    """
    require_decoder(decoder)
    stop = stop_ids(stop)
    tokens = token_row(prompt, vocabulary=decoder.vocabulary)  # [1, S]
    cache = decoder.new_cache(max_tokens=tokens.shape[1] + new_tokens)
    answer: list[int] = []
    while len(answer) < new_tokens:
        logits = decoder(tokens, cache, last_only=True)  # [1, 1, V]
        tokens = logits.argmax(-1)  # [1, 1]
        answer.append(int(tokens))
        if answer[-1] in stop:
            break
    return answer
