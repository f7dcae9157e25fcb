"""Rows of text as bytes, in which each row counts another number of tokens.

A byte is a token, so there is no tokenizer, and the vocabulary is 256. The first tokens of a row
are its prompt and have no loss, as in fine-tuning. Rows with unequal numbers are on purpose: a mean
over the means of the ranks would then be another number than the mean over all tokens.
"""

from __future__ import annotations

import torch

from recipes_lib.core.checks import check_whole
from recipes_lib.core.data import IGNORED, load_text
from recipes_lib.core.ranks.rank_step import Batch

VOCABULARY = 256


def byte_batches(*, steps: int, rows: int, tokens: int, seed: int = 0) -> list[Batch]:
    """One batch per step: input_ids and labels [rows, tokens], from Python's standard library.

    Raises ValueError for numbers below 1, and for more than the text has.
    """
    check_whole(seed=seed, least=0)
    check_whole(steps=steps, rows=rows)
    check_whole(tokens=tokens, least=4)
    text = load_text(split="train").encode()[:4_000_000]
    count = steps * rows
    places = len(text) // tokens
    if count > places:
        raise ValueError(
            f"steps={steps} x rows={rows} of {tokens} tokens: the text has {places} such rows"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(places, generator=generator)[:count].tolist()
    pieces = [list(text[place * tokens : (place + 1) * tokens]) for place in chosen]
    input_ids = torch.tensor(pieces).view(steps, rows, tokens)
    labels = input_ids.clone()
    prompts = torch.randint(0, tokens // 2, (steps, rows), generator=generator)
    positions = torch.arange(tokens)
    labels[positions < prompts[:, :, None]] = IGNORED
    return [
        {"input_ids": inputs, "labels": answers}
        for inputs, answers in zip(input_ids, labels, strict=True)
    ]
