"""Sequence packing: several short documents in one row, each blind to the others.

Problem    Documents have unequal lengths, and the padding that makes them one tensor costs as much time as text.
Idea       Fill rows of one length L with whole documents, count positions from 0 in each, and let no token look
           past the start of its own document:

               padded   a a a a . . . .      packed   a a a a b b b c      mask   a a a a . . . .
                        b b b . . . . .      pos      0 1 2 3 0 1 2 0             . . . . b b b .
                        c . . . . . . .                                           . . . . . . . c

           Which documents share a row is bin packing. Best-fit decreasing: longest first, each into the fullest
           row that still has room. The attention kernel learns the borders from the positions that restart.
Saves      The padded part of the batch, in time and in activations.
Costs      With SDPA the borders need a mask [L, L], and with a mask transformers repeats grouped KV heads;
           flash-attn's variable lengths need neither. The number of rows is no longer the number of documents:
           divide the loss by targets.
Use when   Lengths vary, as in instruction tuning. Not when documents fill their rows, and not for a model that
           cannot keep documents apart (state space models): `check_document_mask` tells.
Not when   Batches grouped by length pad hardly more than packing leaves free: see the measurement.
In production   `SFTConfig(packing=True)` in TRL, `sample_packing: true` in Axolotl, `DataCollatorWithFlattening` in
           transformers. All of them tell the borders by positions.
Source     Krell et al., "Efficient Sequence Packing without Cross-contamination" (arXiv 2107.02027); best fit: Ding
           et al., "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830).

A silent trap: transformers finds the borders only if there is no attention mask and no KV cache. With the cache on,
which is the default, the same batch runs as one long document. Call the model with `use_cache=False`.

Shapes: N documents, P packed rows, L their length.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.causal_lm import decoder_blocks, projection_widths
from recipes_lib.core.data import IGNORED

Row = dict[str, list[int]]


def pack_sequences(rows: Iterable[Row], *, length: int, seed: int | None = None) -> list[Row]:
    """Put N rows into P rows of at most `length` tokens, with `position_ids` that restart at every document.

    Best-fit decreasing, in O(N log N) searches; nothing is cut and nothing is lost. The first label of a document is
    IGNORED: otherwise the last token of its neighbour would be trained to predict it.

    Args:
        rows: with `input_ids` and `labels`, as from `load_instructions`.
        seed: shuffles the packed rows, which otherwise come longest document first.
    Raises ValueError for no row, a row without tokens, and one that is longer than `length`.
    """
    rows = list(rows)
    lengths = [len(row["input_ids"]) for row in rows]
    packs = [_join([rows[i] for i in members]) for members in best_fit(lengths, length=length)]
    if seed is not None:
        random.Random(seed).shuffle(packs)
    return packs


def best_fit(lengths: Sequence[int], *, length: int) -> list[list[int]]:
    """The indices of `lengths` in bins of at most `length`: longest first, each into the fullest bin with room."""
    if not lengths:
        raise ValueError("there is no row to pack: the data set is empty")
    longest, shortest = max(lengths), min(lengths)
    if shortest < 1 or longest > length:
        which = lengths.index(longest if longest > length else shortest)
        raise ValueError(
            f"row {which} has {lengths[which]} tokens, and rows of 1 to length={length} can be packed whole: leave "
            f"it out, split it, or raise length"
        )
    bins: list[list[int]] = []
    free: list[
        tuple[int, int]
    ] = []  # (room, bin), sorted: the first that is large enough fits best
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(free, (lengths[i], -1))
        if at == len(free):
            room, b = length, len(bins)
            bins.append([])
        else:
            room, b = free.pop(at)
        bins[b].append(i)
        bisect.insort(free, (room - lengths[i], b))
    return bins


def collate_packed(
    packs: Sequence[Row], *, pad_token_id: int, length: int | None = None, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Packed rows as tensors [P, L] of `input_ids`, `labels` and `position_ids`, padded to `length` or the longest.

    There is no attention mask, by which transformers would take the row for one document. The padding at the end is
    a document of its own. Call the model with `use_cache=False`. Raises ValueError for rows that are not packed.
    """
    longest = max((len(pack["input_ids"]) for pack in packs), default=0)
    length = length or longest
    if not longest or longest > length or not all("position_ids" in pack for pack in packs):
        raise ValueError(
            f"{len(packs)} rows of at most {longest} tokens, length={length}: give what pack_sequences returned"
        )

    def padded(name: str, fill: Any) -> torch.Tensor:
        values = [[*pack[name], *fill(length - len(pack[name]))] for pack in packs]
        return torch.tensor(values, device=device)

    return {
        "input_ids": padded("input_ids", lambda n: [pad_token_id] * n),
        "labels": padded("labels", lambda n: [IGNORED] * n),
        "position_ids": padded("position_ids", range),
    }


@torch.no_grad()
def check_document_mask(model: Any, batch: dict[str, torch.Tensor]) -> None:
    """Raise RuntimeError if a document of the packed `batch` [P, L] sees its neighbour.

    Changes every token of the first document and looks whether the logits of the others move. Attention that does
    not know the borders, and state space models, fail here. Needs a row with two documents, or raises ValueError.
    """
    starts = (batch["position_ids"] == 0).nonzero()  # [documents, 2], row by row
    row = next((r for r in range(len(batch["input_ids"])) if (starts[:, 0] == r).sum() > 1), None)
    if row is None:
        raise ValueError("no row of the batch holds two documents: there is no border to check")
    one = {name: batch[name][row : row + 1] for name in ("input_ids", "position_ids")}
    border = int(starts[starts[:, 0] == row][1, 1])
    changed = one["input_ids"].clone()
    changed[:, :border] = (changed[:, :border] + 1) % model.config.vocab_size
    was_training = model.training
    model.eval()  # dropout would differ from pass to pass
    before = model(**one, use_cache=False).logits[:, border:]
    after = model(**one | {"input_ids": changed}, use_cache=False).logits[:, border:]
    model.train(was_training)
    difference = (after - before).abs().max().item()
    # Where the mask holds, the same numbers meet in the same order; a kernel may still split the sums otherwise.
    if not difference <= 1e-3 * before.abs().max().item():  # NaN proves nothing
        raise RuntimeError(
            f"a document sees its neighbour (logits move by {difference:.2g}): {type(model).__name__} with attention "
            f"{getattr(model.config, '_attn_implementation', None)!r} does not know the borders; train it unpacked"
        )


def padded_tokens(lengths: Sequence[int], *, batch_size: int) -> int:
    """Tokens that a model processes if consecutive batches are padded, each to its longest row."""
    batches = (lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size))
    return sum(len(batch) * max(batch) for batch in batches)


def estimate_sequence_packing(
    lengths: Sequence[int], *, length: int, batch_size: int, packs_per_batch: int = 1
) -> float:
    """How many times fewer tokens are processed than in batches of `batch_size` padded rows: the speed-up as far as
    time is proportional to tokens. `packs_per_batch` packed rows are padded to the longest of them."""
    packs = [sum(lengths[i] for i in members) for members in best_fit(lengths, length=length)]
    return padded_tokens(lengths, batch_size=batch_size) / padded_tokens(
        packs, batch_size=packs_per_batch
    )


def estimate_packed_attention(
    budget: Budget, model: Any, *, batch_size: int, seq_len: int, dtype: torch.dtype | None = None
) -> Budget:
    """The budget when SDPA keeps documents apart, for packed rows [batch_size, seq_len]: each layer keeps its mask
    [L, L], in the `dtype` that attention computes in, and grouped KV heads repeated to all of them."""
    q, kv, _ = projection_widths(model.config)
    block = batch_size * seq_len * (dtype or model.dtype).itemsize * (2 * (q - kv) + seq_len)
    activations = budget.activations + len(decoder_blocks(model)) * block
    return budget.change(activations=activations, one_block=budget.one_block + block)


def _join(rows: list[Row]) -> Row:
    return {
        "input_ids": [token for row in rows for token in row["input_ids"]],
        "labels": [label for row in rows for label in [IGNORED, *row["labels"][1:]]],
        "position_ids": [position for row in rows for position in range(len(row["input_ids"]))],
    }
