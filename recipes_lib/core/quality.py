"""What a change of weights or kernels does to a model's predictions: perplexity and agreement.

    fp32 = decode_quality(model, documents)
    int8 = decode_quality(int8_decoder, documents, reference=fp32.predictions, token_by_token=True)

Perplexity is exp of the mean loss over the real next tokens. Agreement is the share of positions at
which the likeliest token is the one of the reference. Both are teacher-forced: the next token that
is read is always the one of the text, so that one different choice does not change what follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipes_lib.core.decoding import is_decoder
from recipes_lib.core.evaluation import evaluating


@dataclass(frozen=True)
class Quality:
    """Perplexity, the share of equal top-1 predictions, and on how many tokens.

    `agreement` is None without a reference. `predictions` holds the likeliest token at each
    position of each document but the last, int64, one after the other.
    """

    perplexity: float
    agreement: float | None
    tokens: int
    predictions: Tensor


def decode_quality(
    model: Any,
    documents: Sequence[Sequence[int] | Tensor],
    *,
    reference: Tensor | None = None,
    token_by_token: bool = False,
) -> Quality:
    """Read `documents`, each a list of token ids, and compare what comes next with the text.

    Args:
        model: a Hugging Face causal LM, or a decoder (`core.decoding.CausalDecoder`).
        reference: the `predictions` of another model on the same documents.
        token_by_token: read one token per call with the cache, as decoding does. Kernels for one
            row and for many may differ, so this is the quality of the answer, the other one of
            the prompt. Decoders only.
    Raises ValueError for no documents, one of fewer than two tokens, a reference of another length,
    losses that are not finite, and token_by_token with a Hugging Face model.
    """
    rows = [torch.as_tensor(document, dtype=torch.int64).flatten() for document in documents]
    _check(model, rows, token_by_token)
    loss = 0.0
    predictions = []
    with evaluating(model):
        for row in rows:
            of_row, likeliest = _read(model, row, token_by_token)
            loss += of_row
            predictions.append(likeliest)
    return _summary(loss, torch.cat(predictions), reference)


def _check(model: Any, rows: list[Tensor], token_by_token: bool) -> None:
    if not rows:
        raise ValueError("no documents: give lists of token ids")
    shortest = min(map(len, rows))
    if shortest < 2:
        raise ValueError(f"a document of {shortest} tokens: give two or more, one predicts another")
    if token_by_token and not is_decoder(model):
        raise ValueError(
            f"token_by_token with {type(model).__name__}: give a decoder, as apply_decode_loop "
            f"returns"
        )


def _read(model: Any, row: Tensor, token_by_token: bool) -> tuple[float, Tensor]:
    """The sum of the losses of one document in nats, and the likeliest tokens [S - 1]."""
    loss = 0.0
    likeliest = []
    for logits, targets in next_token_logits(model, row, token_by_token=token_by_token):
        logits = logits.float()  # [K, V]
        targets = targets.to(logits.device)  # [K]
        loss += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        likeliest.append(logits.argmax(-1).cpu())
    return loss, torch.cat(likeliest)


def next_token_logits(
    model: Any, row: Tensor, *, token_by_token: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [K, V] and the tokens [K] that really follow: all at once, or one by one.

    `row` are the token ids of one document, int64 [S]; the other arguments as in `decode_quality`.
    """
    inputs = row[None, :-1]  # [1, S - 1]: nothing follows the last token
    targets = row[1:]
    if not is_decoder(model):
        yield model(inputs.to(model.device), use_cache=False).logits[0], targets
        return
    cache = model.new_cache(max_tokens=len(targets))
    if not token_by_token:
        yield model(inputs, cache)[0], targets
        return
    for position in range(len(targets)):
        here = slice(position, position + 1)
        yield model(inputs[:, here], cache)[0], targets[here]


def _summary(loss: float, predictions: Tensor, reference: Tensor | None) -> Quality:
    tokens = len(predictions)
    if not math.isfinite(loss):
        raise ValueError("the losses are not finite: a weight or an activation overflows its dtype")
    agreement = None
    if reference is not None:
        if len(reference) != tokens:
            raise ValueError(
                f"reference has {len(reference)} predictions for {tokens} tokens: give those of "
                f"the same documents"
            )
        agreement = (predictions == reference).double().mean().item()
    return Quality(math.exp(loss / tokens), agreement, tokens, predictions)
