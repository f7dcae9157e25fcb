"""The model, and the text that both training scripts train it on, in steps of equal size.

Step `n` reads the same rows on one rank and on many, in whatever order the run was interrupted and
taken up again: the number of the step alone says which rows they are.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.data import load_pairs, load_text, rows_of
from recipes_lib.core.model import SHAPES, load_model, load_tokenizer, model_of_shape

CHARACTERS = 1_000_000  # always the same part of the text, however many steps a run has


def make_model(name: str, *, device: str) -> Any:
    """The model of that name in fp32: `smollm2`, a folder, a hub id, or a shape of `SHAPES`.

    A shape gets random weights, the same ones on all ranks.
    """
    if name not in SHAPES:
        return load_model(name, device=device)
    torch.manual_seed(0)
    return model_of_shape(name, device=device)


def save_tokenizer(name: str, folder: Path) -> None:
    """Write the tokenizer of the model into the folder of an export. A shape has none."""
    if name not in SHAPES:
        load_tokenizer(name).save_pretrained(folder)


@functools.cache  # the text is read once, however many runs a process does
def make_tokens(name: str, data: str | None = None) -> torch.Tensor:
    """Token ids [T] of the running text, by the tokenizer of the model. A shape has none: bytes.

    `data` is a file as docs/finetune.md has them. Every token of it is learnt, questions too.
    """
    if data is not None:
        tokenizer = load_tokenizer(name)
        ids: list[int] = []
        for pair in load_pairs(dataset=data):
            for row in rows_of(tokenizer, pair):
                ids += row["input_ids"]
        return torch.tensor(ids)
    text = load_text()[:CHARACTERS]
    if name in SHAPES:
        return torch.tensor(list(text.encode("ascii", errors="replace")))
    tokenizer = load_tokenizer(name)
    # It warns of a text that is longer than the model's context; the text is cut into rows below.
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])


def rows_of_step(tokens: torch.Tensor, step: int, *, rows: int, length: int) -> torch.Tensor:
    """Token ids [B, S] of one step. After its end the text begins again.

    Args:
        tokens: ids [T]. rows: B, those of all ranks together. length: S.
    """
    first = step * rows * length
    positions = torch.arange(first, first + rows * length) % len(tokens)
    return tokens[positions].view(rows, length)
