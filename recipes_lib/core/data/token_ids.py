"""Token ids as users give them, checked before a model reads them.

An id outside the vocabulary fails deep inside an embedding, and on a GPU without a name.

    prompt       one text               [1, S]      token_row(prompt, vocabulary=…)
    documents    several texts          [1, S] each token_rows(documents=documents, vocabulary=…)
    stop         ids that end a text                stop_ids(stop)

Shape: S tokens of a text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def token_row(tokens: Any, *, vocabulary: int, name: str = "prompt", least: int = 1) -> Tensor:
    """One text, ids as a list or as a tensor [S] or [1, S], as int64 [1, S].

    Raises ValueError for fewer than `least` tokens, several rows, and ids that the model, which
    knows `vocabulary` of them, does not have.
    """
    ids = torch.as_tensor(tokens)
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or len(ids) != 1 or ids.shape[1] < least:
        raise ValueError(
            f"{name} has the shape {list(ids.shape)}: give token ids of one row, {least} or more"
        )
    _check_ids(ids, vocabulary, name)
    return ids.long()


def token_rows(*, vocabulary: int, least: int = 1, **given: Any) -> list[Tensor]:
    """Several texts as int64 [1, S] each: `token_rows(prompts=prompts, vocabulary=…)`.

    Raises ValueError for no text, and as `token_row` does.
    """
    [(name, texts)] = given.items()
    rows = []
    for number, text in enumerate(texts):
        row = token_row(text, vocabulary=vocabulary, name=f"{name}[{number}]", least=least)
        rows.append(row)
    if not rows:
        raise ValueError(f"no {name}: give at least one, as a list of token ids")
    return rows


def stop_ids(stop: Iterable[Any]) -> frozenset[int]:
    """The ids that end a text. The None of a tokenizer without an end token would never come."""
    return frozenset(int(token) for token in stop)


def _check_ids(ids: Tensor, vocabulary: int, name: str) -> None:
    smallest, largest = ids.aminmax()
    if smallest < 0 or largest >= vocabulary or ids.is_floating_point():
        raise ValueError(
            f"{name} holds numbers from {smallest} to {largest}, and the model knows the whole "
            f"ones from 0 to {vocabulary - 1}: give the ids of the model's own tokenizer"
        )
