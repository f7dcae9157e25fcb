"""Sequence packing: several short documents in one row, each blind to the others.

Problem    Documents have unequal lengths, and the padding that makes them one tensor costs as much
           time as text.
Idea       Fill rows of one length L with whole documents, count positions from 0 in each, and let
           no token look past the start of its own document:

               padded   a a a a . . . .      packed   a a a a b b b c      mask   a a a a . . . .
                        b b b . . . . .      pos      0 1 2 3 0 1 2 0             . . . . b b b .
                        c . . . . . . .                                           . . . . . . . c

           Which documents share a row is bin packing: longest first, each into the fullest row
           that still has room. Attention learns the borders from the positions that restart.
Saves      The padded part of the batch, in time and in activations.
Costs      With SDPA the borders need a mask [L, L], and with a mask transformers repeats grouped KV
           heads; flash-attn's variable lengths need neither. The number of rows is no longer the
           number of documents: divide the loss by targets.
Use when   Lengths vary, as in instruction tuning.
Not when   Documents fill their rows; or batches grouped by length pad hardly more than packing
           leaves free (notebook 05 compares them); or the model cannot keep documents apart, as
           state space models: `check_document_mask` tells.
In production   `SFTConfig(packing=True)` in TRL, `sample_packing: true` in Axolotl,
           `DataCollatorWithFlattening` in transformers. All of them tell the borders by positions.
Source     Krell et al., "Efficient Sequence Packing without Cross-contamination" (arXiv
           2107.02027); best fit: Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv
           2404.10830).

A silent trap: transformers finds the borders only if there is no attention mask and no KV cache.
With the cache on, which is the default, the same batch runs as one long document. Call the model
with `use_cache=False`.

Shapes: N documents, P packed rows, L their length.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from recipes_lib.core.data import check_rows
from recipes_lib.core.data.tokens_and_labels import IGNORED, Row
from recipes_lib.core.model.evaluating import evaluating
from recipes_lib.core.model.loss import require_shifted_loss

# --- the idea: what a learner can copy ------------------------------------------------------------


def fill_rows(lengths: Sequence[int], *, length: int) -> list[list[int]]:
    """Packing: which documents share a row: longest first, each into the fullest that has room."""
    rows = []  # [[document, …], …]
    room = []  # the free tokens of each row
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [row for row in range(len(rows)) if room[row] >= lengths[document]]
        if not fitting:
            fitting = [len(rows)]
            rows.append([])
            room.append(length)
        fullest = min(fitting, key=lambda row: room[row])
        rows[fullest].append(document)
        room[fullest] -= lengths[document]
    return rows


def document_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """Who sees whom in packed rows [P, L]: True where query i (row) may look at key j (column)."""
    documents = (position_ids == 0).cumsum(dim=1)  # [P, L] positions restart: the next document
    same = documents[:, :, None] == documents[:, None, :]  # [P, L, L]
    causal = torch.ones_like(same).tril()  # no key from the future
    return same & causal  # [P, L, L]


# --- the technique --------------------------------------------------------------------------------


def pack_sequences(rows: Iterable[Row], *, length: int, seed: int | None = None) -> list[Row]:
    """Put N rows into P rows of at most `length` tokens, whose `position_ids` restart per document.

    Nothing is cut and nothing is lost. The packed rows come longest document first, or are shuffled
    by `seed`.
    """
    rows = list(rows)
    check_rows(rows)
    lengths = [len(row["input_ids"]) for row in rows]
    packs = []
    for members in best_fit(lengths, length=length):
        packs.append(_join_documents([rows[i] for i in members]))
    if seed is not None:
        random.Random(seed).shuffle(packs)
    return packs


def best_fit(lengths: Sequence[int], *, length: int) -> list[list[int]]:
    """Packing as `fill_rows` does it, by one binary search per document."""
    for row, tokens in enumerate(lengths):
        if not 1 <= tokens <= length:
            raise ValueError(
                f"row {row} has {tokens} tokens, and rows of 1 to length={length} can be packed "
                f"whole: leave it out, split it, or raise length"
            )
    bins: list[list[int]] = []
    # (room, bin), sorted: the first one with enough room is the fullest that fits.
    free: list[tuple[int, int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # -1 is below every number of a bin: bins with exactly this much room count as well.
        place = bisect.bisect_left(free, (lengths[i], -1))
        if place < len(free):
            room, number = free.pop(place)
        else:
            room = length
            number = len(bins)
            bins.append([])
        bins[number].append(i)
        bisect.insort(free, (room - lengths[i], number))
    return bins


def _join_documents(rows: list[Row]) -> Row:
    """Documents packed behind each other in one row, each with positions from 0 on."""
    pack: Row = {"input_ids": [], "labels": [], "position_ids": []}
    for row in rows:
        pack["input_ids"] += row["input_ids"]
        # The token before the first one belongs to the neighbour and must not predict it.
        pack["labels"] += [IGNORED, *row["labels"][1:]]
        pack["position_ids"] += range(len(row["input_ids"]))
    return pack


def collate_packed(
    packs: Sequence[Row], *, pad_token_id: int, length: int | None = None, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Packed rows as tensors [P, L] of `input_ids`, `labels` and `position_ids`.

    They are padded to `length`, or to the longest; the padding is a document of its own. There is
    no attention mask: with one, transformers would take a row for one document.
    """
    longest = max(len(pack["input_ids"]) for pack in packs)
    if length is None:
        length = longest
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    for pack in packs:
        missing = length - len(pack["input_ids"])
        columns["input_ids"].append([*pack["input_ids"], *[pad_token_id] * missing])
        columns["labels"].append([*pack["labels"], *[IGNORED] * missing])
        columns["position_ids"].append([*pack["position_ids"], *range(missing)])
    return {name: torch.tensor(rows, device=device) for name, rows in columns.items()}  # [P, L]


# --- does a model keep documents apart? -----------------------------------------------------------


@torch.no_grad()
def check_document_mask(model: Any, batch: dict[str, torch.Tensor]) -> None:
    """Raise RuntimeError if a document of the packed `batch` [P, L] sees its neighbour.

    Changes every token of the first document and looks whether the logits of the others move.
    Attention that does not know the borders, and state space models, fail here. So does a model
    that does not begin its positions again (Whisper's decoder): the second document is compared
    with itself alone.
    """
    require_shifted_loss(model)
    row, border, end = _second_document(batch["position_ids"])
    ids = batch["input_ids"][row : row + 1]  # [1, L]
    positions = batch["position_ids"][row : row + 1]
    changed = ids.clone()
    changed[:, :border] = (changed[:, :border] + 1) % model.config.get_text_config().vocab_size

    with evaluating(model):  # dropout would differ from pass to pass
        before = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        after = model(input_ids=changed, position_ids=positions, use_cache=False).logits
        second = {"input_ids": ids[:, border:end], "position_ids": positions[:, border:end]}
        alone = model(**second, use_cache=False).logits

    # Where the mask holds, both passes add the same numbers, if perhaps in another order.
    if not _same_logits(after[:, border:], before[:, border:], share=1e-3):
        raise RuntimeError(
            f"a document sees its neighbour: {type(model).__name__} with attention "
            f"{model.config._attn_implementation!r} does not know the borders; train it unpacked"
        )
    # Here the sums come in another order, so 16 bits differ by more.
    share = 1e-3 if alone.dtype.itemsize > 2 else 1e-1
    if not _same_logits(before[:, border:end], alone, share=share):
        raise RuntimeError(
            f"a document in a row is not what it is alone: {type(model).__name__} does not begin "
            f"its positions again; train it unpacked"
        )


def _same_logits(found: torch.Tensor, expected: torch.Tensor, *, share: float) -> bool:
    """Whether a packed document has the logits that it has alone, up to a share of the largest."""
    return ((found - expected).abs().max() <= share * expected.abs().max()).item()


def _second_document(position_ids: torch.Tensor) -> tuple[int, int, int]:
    """The first row with two packed documents, and where the second begins and ends."""
    for row, positions in enumerate(position_ids):
        starts = (positions == 0).nonzero().flatten().tolist()
        if len(starts) > 1:
            _, border, end, *_ = [*starts, len(positions)]
            return row, border, end
    raise ValueError("no row of the batch holds two documents: there is no border to check")
