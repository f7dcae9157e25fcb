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

from recipes_lib.core.checks import check_flag
from recipes_lib.core.data.evaluation import evaluating
from recipes_lib.core.data.token_ids import token_rows
from recipes_lib.core.model.causal_lm import longest_text
from recipes_lib.core.model.decoding import is_decoder, require_causal_lm_or_decoder
from recipes_lib.core.model.output_layer import at_least_fp32


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
    Raises ValueError for no documents, documents that are no token ids of the model, one of fewer
    than two tokens or longer than the model's positions, a reference of another length, losses that
    are not finite, and token_by_token with a Hugging Face model.
    """
    check_flag(token_by_token=token_by_token)
    rows = document_rows(model, documents)
    _check_reference(reference, sum(len(row) - 1 for row in rows))
    if token_by_token and not is_decoder(model):
        raise ValueError(
            f"token_by_token with {type(model).__name__}: give a decoder, as apply_decode_loop "
            f"returns"
        )
    loss = 0.0
    predictions = []
    with evaluating(model):
        for row in rows:
            of_row, likeliest = _read(model, row, token_by_token)
            loss += of_row
            predictions.append(likeliest)
    return _summary(loss, torch.cat(predictions), reference)


def document_rows(model: Any, documents: Sequence[Sequence[int] | Tensor]) -> list[Tensor]:
    """The documents as int64 [S] each, which `model` can read: two tokens or more.

    Raises ValueError for documents that are no token ids of the model, or longer than it can read,
    and for what is neither a causal LM nor a decoder.
    """
    require_causal_lm_or_decoder(model)
    longest = None  # a decoder says it when it makes a cache
    if is_decoder(model):
        vocabulary = model.vocabulary
    else:
        vocabulary = model.get_input_embeddings().num_embeddings
        longest = longest_text(model.config)
    rows = token_rows(documents=documents, vocabulary=vocabulary, least=2)  # [1, S] each
    for number, row in enumerate(rows):
        if longest is not None and row.shape[1] > longest:
            raise ValueError(
                f"documents[{number}] has {row.shape[1]} tokens, and the model was trained for "
                f"{longest} positions (max_position_embeddings): cut it into shorter documents"
            )
    return [row[0] for row in rows]


def _check_reference(reference: Tensor | None, tokens: int) -> None:
    if reference is None:
        return
    if not isinstance(reference, Tensor):
        raise ValueError(
            f"reference is of type {type(reference).__name__}: give the `predictions` of what "
            f"decode_quality returned for the other model"
        )
    if len(reference) != tokens:
        raise ValueError(
            f"reference has {len(reference)} predictions for {tokens} tokens: give those of "
            f"the same documents"
        )


def _read(model: Any, row: Tensor, token_by_token: bool) -> tuple[float, Tensor]:
    """The sum of the losses of one document in nats, and the likeliest tokens [S - 1]."""
    loss = 0.0
    likeliest = []
    for logits, targets in next_token_logits(model, row, token_by_token=token_by_token):
        logits = at_least_fp32(logits)  # [K, V]
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
        agreement = (predictions == reference).double().mean().item()
    return Quality(math.exp(loss / tokens), agreement, tokens, predictions)
