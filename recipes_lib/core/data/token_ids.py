"""Token ids as users give them, checked before a model reads them.

A tokenizer returns a dictionary, a text is a sequence as well, and an id outside the vocabulary
fails deep inside an embedding. So each function that reads tokens asks here first:

    prompt       one text               [1, S]      token_row(prompt, vocabulary=…)
    documents    several texts          [1, S] each token_rows(documents=documents, vocabulary=…)
    batches      rows of one length     [B, S]      check_batch(batch, vocabulary=…, name="batch 0")
    stop         ids that end a text                stop_ids(stop)

Shapes: S tokens of a text, B rows of a batch.
"""

from __future__ import annotations

import numbers
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from recipes_lib.core.checks import check_several

WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def token_row(tokens: Any, *, vocabulary: int, name: str = "prompt", least: int = 1) -> Tensor:
    """One text as int64 [1, S].

    Args:
        tokens: ids as a list or as a tensor, [S] or [1, S].
        vocabulary: how many tokens the model knows.
        name: of the argument, for the message.
        least: the fewest tokens that make sense.
    Raises ValueError for anything but the ids of one text, of at least so many tokens.
    """
    ids = _as_tensor(tokens, name)
    if ids.dim() == 0:
        raise ValueError(f"{name} is a single number: give the token ids of one row as a list")
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or len(ids) != 1 or ids.shape[1] < least:
        raise ValueError(
            f"{name} has the shape {list(ids.shape)}: give token ids of one row, "
            f"at least {_count(least)}"
        )
    _check_ids(ids, vocabulary, name)
    return ids.long()


def token_rows(*, vocabulary: int, least: int = 1, **given: Any) -> list[Tensor]:
    """Several texts as int64 [1, S] each: `token_rows(prompts=prompts, vocabulary=…)`.

    Arguments as in `token_row`. Raises ValueError for no text, and if one of them is wrong.
    """
    [(name, texts)] = given.items()
    _refuse_text_and_dictionary(texts, name, way_out="a list of lists of token ids")
    check_several(**given)
    rows = []
    for number, text in enumerate(texts):
        row = token_row(text, vocabulary=vocabulary, name=f"{name}[{number}]", least=least)
        rows.append(row)
    if not rows:
        raise ValueError(f"no {name}: give at least one, as a list of token ids")
    return rows


def check_batch(batch: Any, *, vocabulary: int, name: str) -> None:
    """Raise ValueError unless `batch` has tensors that a model can read.

    That is a dictionary with `input_ids` [B, S], and an `attention_mask` of the same shape if it
    has one. `name` says in the message which batch it is.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise ValueError(
            f"{name} is {_described(batch)} without input_ids: give dictionaries with input_ids "
            f"[B, S], as a tokenizer returns them"
        )
    ids = batch["input_ids"]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.numel() == 0:
        raise ValueError(
            f"input_ids of {name} is {_described(ids)}: give a tensor [B, S], such as "
            f'tokenizer(texts, return_tensors="pt") makes'
        )
    _check_ids(ids, vocabulary, f"input_ids of {name}")
    mask = batch.get("attention_mask")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask of {name} is {_described(mask)}: give a tensor of the shape of "
            f"input_ids, {list(ids.shape)}"
        )


def stop_ids(stop: Collection[int]) -> frozenset[int]:
    """The ids that end a text. Raises ValueError for anything but a collection of whole numbers."""
    ids = stop
    if isinstance(stop, Tensor):
        ids = stop.flatten().tolist()
    several = isinstance(ids, Iterable) and not isinstance(ids, str | bytes | Mapping)
    if several:
        ids = list(ids)
    if not several or not all(isinstance(token, numbers.Integral) for token in ids):
        raise ValueError(
            f"stop={stop!r}: give a collection of token ids, such as {{tokenizer.eos_token_id}}, "
            f"or () for none"
        )
    return frozenset(ids)


def _as_tensor(tokens: Any, name: str) -> Tensor:
    _refuse_text_and_dictionary(tokens, name, way_out="token ids")
    try:
        return torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is {_described(tokens)}, which makes no row: give token ids of one row, as a "
            f"list of whole numbers or as a tensor [1, S]"
        ) from error


def _refuse_text_and_dictionary(given: Any, name: str, *, way_out: str) -> None:
    if isinstance(given, str | bytes):
        raise ValueError(
            f'{name} is a text: give {way_out}, which tokenizer(text)["input_ids"] makes'
        )
    if isinstance(given, Mapping):
        raise ValueError(
            f'{name} is {_described(given)}: give {way_out}, which stand in its "input_ids"'
        )


def _check_ids(ids: Tensor, vocabulary: int, name: str) -> None:
    """Raise ValueError for numbers that are no tokens of the vocabulary; `ids` are not empty."""
    if ids.dtype not in WHOLE_NUMBERS:
        raise ValueError(f"{name} has numbers of {ids.dtype}: give token ids as whole numbers")
    if ids.is_meta:
        raise ValueError(
            f"{name} is on the device meta, which holds no numbers: give them as a list"
        )
    smallest, largest = ids.aminmax()
    outside = [int(end) for end in (smallest, largest) if not 0 <= end < vocabulary]
    if outside:
        raise ValueError(
            f"{name} holds the id {outside[0]}, and the model knows {vocabulary} tokens, from 0 to "
            f"{vocabulary - 1}: give the ids of the model's own tokenizer"
        )


def _described(given: Any) -> str:
    """What was given, in few words: a tensor may hold millions of numbers."""
    if isinstance(given, Tensor):
        return f"a tensor {list(given.shape)}"
    return f"of type {type(given).__name__}"


def _count(least: int) -> str:
    if least == 1:
        return "one token"
    return f"{least} tokens"
