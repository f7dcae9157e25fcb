"""What a model does on rows that it did not train on: losses, perplexity and answers.

    evaluate          one number: the mean loss over all targets
    row_losses        the loss of each row, from which an interval can be drawn
    text_windows      rows of running text: what a fine-tune is not about
    generate_answers  what the model says, greedily
    decode_quality    perplexity and agreement of a model with other weights or kernels

These are numbers without an interval; `recipes_lib.fine_tuning.honest_evaluation` draws one.

Shapes: B rows, S sequence, K kept positions, V vocabulary, N rows of the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recipes_lib.core.checks import check_whole
from recipes_lib.core.data.batching import Batch, check_rows, collate
from recipes_lib.core.data.tokens_and_labels import IGNORED, Row, tokenize_pair
from recipes_lib.core.model.causal_lm import longest_text
from recipes_lib.core.model.decoding import (
    is_decoder,
    require_causal_lm_or_decoder,
    require_decoder,
    token_row,
)
from recipes_lib.core.model.evaluating import evaluating
from recipes_lib.core.model.loss import at_least_fp32, next_tokens

# A model's own generation_config may sample, or penalize repetition, also that of the padding.
GREEDY = {
    "do_sample": False,
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "use_cache": True,
}

# --- losses ---------------------------------------------------------------------------------------


def evaluate(model: Any, data: Iterable[Row], *, pad_token_id: int, batch_size: int = 8) -> float:
    """Held-out loss: the mean over all targets, in nats. A row without a target is left out."""
    rows = [row for row in data if _count_targets(row["labels"][1:]) > 0]
    if not rows:
        raise ValueError(
            f"no row has a target: each label is {IGNORED}, or the first of its row; give rows "
            f"with an answer"
        )
    losses, targets = row_losses(model, rows, pad_token_id=pad_token_id, batch_size=batch_size)
    return (losses.sum() / targets.sum()).item()


def row_losses(
    model: Any, data: Iterable[Row], *, pad_token_id: int, batch_size: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row the sum of its losses in nats, and its number of targets.

    Both are fp64 [N] on the CPU, in the order of `data`: rows with `input_ids` and unshifted
    `labels`, IGNORED where there is no loss. Raises ValueError for a row without a target, and for
    a loss that is not finite.
    """
    rows = list(data)
    check_whole(rows=len(rows))
    check_rows(rows)
    # Nothing predicts the first token: its label does not count.
    counts = [_count_targets(row["labels"][1:]) for row in rows]
    empty = [i for i, count in enumerate(counts) if count == 0]
    if empty:
        raise ValueError(f"rows {empty[:5]} have no target: leave them out")

    losses = torch.zeros(len(rows), dtype=torch.float64)
    for indices in _batches_by_length([row["input_ids"] for row in rows], batch_size):
        part = [rows[i] for i in indices]
        batch = collate(part, pad_token_id=pad_token_id, device=str(model.device))
        losses[indices] = _losses_of_batch(model, batch).double().cpu()
    if not losses.isfinite().all():  # a comparison would call it "no difference"
        raise ValueError(
            f"the losses are not finite: the model diverged, or {model.dtype} overflows"
        )
    return losses, torch.tensor(counts, dtype=torch.float64)


def _count_targets(labels: Sequence[int]) -> int:
    return sum(label != IGNORED for label in labels)


def _losses_of_batch(model: Any, batch: Batch) -> torch.Tensor:
    """The sum of the losses of each row: [B]. Positions before the first target get no logits."""
    labels = next_tokens(batch["labels"])  # [B, S]
    columns_with_targets = (labels != IGNORED).any(0).nonzero()
    keep = labels.shape[1] - int(columns_with_targets[0])
    with evaluating(model):
        output = model(input_ids=batch["input_ids"], use_cache=False, logits_to_keep=keep)

    # A few models ignore `logits_to_keep` and return all logits.
    logits = output.logits[:, -keep:]  # [B, K, V]
    labels = labels[:, -keep:].to(logits.device)  # [B, K]; weights may wait in host memory
    sums = []
    for row_logits, row_labels in zip(logits, labels):
        learnt = row_labels != IGNORED
        # Row by row, the copy in fp32 stays small.
        targets = row_labels[learnt]
        predictions = at_least_fp32(row_logits[learnt])
        sums.append(torch.nn.functional.cross_entropy(predictions, targets, reduction="sum"))
    return torch.stack(sums)


# --- running text ---------------------------------------------------------------------------------


def text_windows(tokenizer: Any, *, text: str, context: int = 256, windows: int = 8) -> list[Row]:
    """Held-out rows of `context` tokens, evenly spaced in `text`. Every token is a target."""
    spacing = len(text) // windows
    # No text has 32 characters per token: the rest of a long piece need not be tokenized.
    size = min(spacing, 32 * context)
    rows = []
    for number in range(windows):
        piece = text[number * spacing : number * spacing + size]
        # The token that begins a text counts among them, where the tokenizer has one.
        ids = tokenizer(piece, truncation=True, max_length=context)["input_ids"]
        rows.append({"input_ids": ids, "labels": ids})
    if min(len(row["input_ids"]) for row in rows) < context:
        raise ValueError(
            f"{len(text)} characters for windows={windows} of context={context} tokens: "
            f"give more text"
        )
    return rows


# --- answers --------------------------------------------------------------------------------------


def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Iterable[str | Row],
    *,
    max_new_tokens: int = 32,
    batch_size: int = 20,
) -> list[str]:
    """Greedy answers to prompts, and to rows without their answers, in batches.

    The answers are those of one prompt at a time, but for ties that rounding decides in 16 bits.
    Prompts are questions, which get the chat template if there is one, or rows, whose answers are
    cut off.
    """
    pad = tokenizer.pad_token_id
    if isinstance(prompts, str | dict):
        prompts = [prompts]
    questions = [_question_of(tokenizer, prompt) for prompt in prompts]
    empty = [number for number, question in enumerate(questions) if not question]
    if empty:
        raise ValueError(f"prompts {empty[:5]} are empty: give questions")
    answers = [""] * len(questions)
    for indices in _batches_by_length(questions, batch_size):
        batch = _padded_on_the_left([questions[i] for i in indices], pad, model.device)
        with evaluating(model):
            out = model.generate(**batch, **GREEDY, max_new_tokens=max_new_tokens, pad_token_id=pad)
        width = batch["input_ids"].shape[1]
        for i, tokens in zip(indices, out[:, width:]):
            answers[i] = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return answers


def _question_of(tokenizer: Any, prompt: str | Row) -> list[int]:
    """The tokens of a prompt up to where its answer begins."""
    row = prompt
    if isinstance(prompt, str):
        row = tokenize_pair(tokenizer, prompt, "?")  # some answer, to be cut off
    learnt = (i for i, label in enumerate(row["labels"]) if label != IGNORED)
    return row["input_ids"][: next(learnt, 0)]


def _padded_on_the_left(questions: Sequence[list[int]], pad: int, device: torch.device) -> Batch:
    """Padding stands on the left of a question: the answer continues it."""
    width = max(map(len, questions))
    ids = [[pad] * (width - len(question)) + question for question in questions]
    # `generate` takes the positions from the mask.
    mask = [[0] * (width - len(question)) + [1] * len(question) for question in questions]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


# --- shared ---------------------------------------------------------------------------------------


def _batches_by_length(sequences: Sequence[list[int]], batch_size: int) -> list[list[int]]:
    """Batches of questions of similar length, as indices; the longest, first, fails at once."""
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


# --- other weights or kernels: perplexity and agreement -------------------------------------------


@dataclass(frozen=True)
class Quality:
    """Perplexity, and the share of positions whose likeliest token is that of the reference."""

    perplexity: float
    agreement: float | None  # None without a reference
    tokens: int
    predictions: torch.Tensor  # int64: the likeliest token at each position of each document


def decode_quality(
    model: Any,
    documents: Sequence[Sequence[int] | torch.Tensor],
    *,
    reference: torch.Tensor | None = None,
    token_by_token: bool = False,
) -> Quality:
    """Losses on `documents` of token ids: how well a model or a decoder predicts the next token.

        fp32 = decode_quality(model, documents)
        int8 = decode_quality(int8_decoder, documents, reference=fp32.predictions)

    Perplexity is exp of the mean loss over the real next tokens. Both numbers are teacher-forced:
    the next token that is read is always the one of the text, so one different choice does not
    change the rest.

    Args:
        model: a Hugging Face causal LM, or a decoder (`core.model.decoding.CausalDecoder`).
        reference: the `predictions` of another model on the same documents.
        token_by_token: read one token per call with the cache, as decoding does. Kernels for one
            row and for many may differ, so this is the quality of the answer, the other one of
            the prompt. Decoders only.
    Raises ValueError for losses that are not finite.
    """
    rows = document_rows(model, documents)
    loss = 0.0
    predictions = []
    with evaluating(model):
        for row in rows:
            for logits, targets in next_token_logits(model, row, token_by_token=token_by_token):
                logits = at_least_fp32(logits)  # [K, V]
                targets = targets.to(logits.device)  # [K]
                loss += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
                predictions.append(logits.argmax(-1).cpu())
    if not math.isfinite(loss):
        raise ValueError("the losses are not finite: a weight or an activation overflows its dtype")
    found = torch.cat(predictions)
    agreement = None
    if reference is not None:
        agreement = (found == reference).double().mean().item()
    return Quality(math.exp(loss / len(found)), agreement, len(found), found)


def document_rows(
    model: Any, documents: Sequence[Sequence[int] | torch.Tensor]
) -> list[torch.Tensor]:
    """Documents whose losses are measured, int64 [S] each: two token ids or more of the model."""
    require_causal_lm_or_decoder(model)
    longest = None  # a decoder says it when it makes a cache
    if is_decoder(model):
        vocabulary = model.vocabulary
    else:
        vocabulary = model.get_input_embeddings().num_embeddings
        longest = longest_text(model.config)
    rows = []
    for number, document in enumerate(documents):
        name = f"documents[{number}]"
        row = token_row(document, vocabulary=vocabulary, name=name, least=2)[0]  # [S]
        if longest is not None and len(row) > longest:
            raise ValueError(
                f"{name} has {len(row)} tokens, and the model was trained for {longest} positions "
                f"(max_position_embeddings): cut it into shorter documents"
            )
        rows.append(row)
    return rows


def next_token_logits(
    model: Any, row: torch.Tensor, *, token_by_token: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For the losses of a document: logits [K, V] of `row` [S], and the tokens [K] that follow."""
    if token_by_token:
        require_decoder(model)  # another model has no cache here, and would read all at once
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
