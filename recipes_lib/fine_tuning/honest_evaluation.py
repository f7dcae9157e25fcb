"""Honest evaluation: held-out loss with an interval, a paired comparison, answers, and what was forgotten.

Problem    "The loss fell from 1.52 to 1.47" on 50 rows says little: other rows might show the opposite.
Idea       A row (a pair, a document) is the unit that was drawn; its tokens are not independent.

               loss = sum of row losses / sum of row targets           the mean over tokens: a ratio
               interval: draw N of the N rows with replacement, 2,000 times; the middle 95 % of the ratios

           Two models meet on the *same* rows: what makes a row hard for both cancels in the difference.
Saves      Rows: a paired interval is narrower than two separate ones, and the rows needed fall with its square.
Costs      A forward pass over the held-out rows per model. The bootstrap takes milliseconds.
Use when   A number is to decide: keep a fine-tune, choose a rank, believe a small gain.
Not when   There are fewer than about 30 rows: the interval is then too narrow. It covers the choice of rows
           only, not another seed, nor rows that were trained on. Rows of one document count as one: their sums.
In production   lm-evaluation-harness: `simple_evaluate(bootstrap_iters=...)`, a standard error with each metric.
           The Trainer's own `eval_loss` averages means of batches: it changes with the batch size.
Source     Efron and Tibshirani, "An Introduction to the Bootstrap"; Miller, arXiv 2411.00640.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from statistics import NormalDist
from typing import Any

import torch

from recipes_lib.core.data import IGNORED, collate, tokenize_pair


def held_out_losses(
    model: Any, data: Iterable[dict[str, Any]], *, pad_token_id: int, batch_size: int = 8
) -> RowLosses:
    """The loss of each row of `data` (`input_ids` and unshifted `labels`), in its order. Every module keeps its mode.

    Raises ValueError for no rows, batch_size < 1, a row without a target, and a loss that is not finite.
    """
    rows = list(data)
    counts = [
        sum(label != IGNORED for label in row["labels"][1:]) for row in rows
    ]  # nothing predicts the first token
    empty = [i for i, count in enumerate(counts) if not count]
    if batch_size < 1 or not rows or empty:
        raise ValueError(
            f"{len(rows)} rows, batch_size={batch_size}, rows {empty[:5]} have no target: leave them out"
        )
    losses = torch.zeros(len(rows), dtype=torch.float64)
    for indices in _by_length([row["input_ids"] for row in rows], batch_size):
        batch = collate(
            [rows[i] for i in indices], pad_token_id=pad_token_id, device=str(model.device)
        )
        labels = torch.nn.functional.pad(
            batch["labels"][:, 1:], (0, 1), value=IGNORED
        )  # [batch, tokens]
        keep = labels.shape[1] - int((labels != IGNORED).any(0).nonzero()[0])
        with _evaluating(model):
            logits = model(
                input_ids=batch["input_ids"], use_cache=False, logits_to_keep=keep
            ).logits
        # The slices are for the few models that ignore `logits_to_keep`. Row by row, the fp32 copy stays small.
        for i, row_logits, row_labels in zip(indices, logits[:, -keep:], labels[:, -keep:]):
            at = row_labels != IGNORED
            losses[i] = torch.nn.functional.cross_entropy(
                row_logits[at].float(), row_labels[at], reduction="sum"
            )
    if not losses.isfinite().all():  # a comparison would call it "no difference"
        raise ValueError(
            f"the losses are not finite: the model diverged, or {model.dtype} overflows"
        )
    return RowLosses(losses, torch.tensor(counts, dtype=torch.float64))


@dataclasses.dataclass(frozen=True, eq=False)
class RowLosses:
    """Per row the sum of its losses, in nats, and its number of targets: fp64 tensors [N] on the CPU."""

    losses: torch.Tensor
    targets: torch.Tensor

    @property
    def mean(self) -> float:
        """Nats per target token, the number that `recipes_lib.core.data.evaluate` gives."""
        return (self.losses.sum() / self.targets.sum()).item()

    def interval(
        self, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
    ) -> tuple[float, float]:
        """The bootstrap interval of `mean`, by percentiles. Raises ValueError for fewer than 2 rows."""
        rows = len(self.losses)
        if rows < 2 or not 0 < level < 1 or resamples < 100:
            raise ValueError(
                f"{rows} rows, level={level}, resamples={resamples}: give >= 2, in (0, 1), >= 100"
            )
        generator, means = torch.Generator().manual_seed(seed), []
        for part in torch.arange(resamples).split(
            max(1, 2**20 // rows)
        ):  # some megabytes at a time
            drawn = torch.randint(rows, (len(part), rows), generator=generator)
            means.append(self.losses[drawn].sum(1) / self.targets[drawn].sum(1))
        return tuple(
            torch.cat(means)
            .quantile(torch.tensor([1 - level, 1 + level], dtype=torch.float64) / 2)
            .tolist()
        )

    def __str__(self) -> str:
        interval = (
            " (95 % interval {:.2f} to {:.2f})".format(*self.interval())
            if len(self.losses) > 1
            else ""
        )
        return f"{self.mean:.2f} nats per token{interval}"

    def __sub__(self, other: RowLosses) -> RowLosses:
        """The paired difference, row by row. Raises ValueError unless both have the same numbers of targets."""
        if not torch.equal(self.targets, other.targets):
            raise ValueError(
                f"{len(self.targets)} and {len(other.targets)} rows of other targets: give the same rows"
            )
        return RowLosses(self.losses - other.losses, self.targets)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The loss after less the loss before, in nats per token, with its interval; prints with a verdict."""

    difference: float
    low: float
    high: float
    level: float

    def __str__(self) -> str:
        word = (
            "better"
            if self.high < 0
            else "worse"
            if self.low > 0
            else "no difference that this many rows can show"
        )
        interval = f"({100 * self.level:g} % interval {self.low:+#.3g} to {self.high:+#.3g})"
        return f"{self.difference:+#.3g} nats per token {interval}: {word}"


def compare(
    before: RowLosses,
    after: RowLosses,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Compare two models on the same rows. Raises ValueError for other rows, and for what `interval` refuses."""
    paired = after - before
    return Comparison(
        paired.mean, *paired.interval(level=level, resamples=resamples, seed=seed), level
    )


def estimate_held_out_interval(row_losses: RowLosses, *, rows: int) -> float:
    """Half the width of the 95 % interval (nats per token) that `rows` rows will give, from a pilot of 2 or more."""
    if len(row_losses.losses) < 2 or rows < 1:
        raise ValueError(
            f"a pilot of {len(row_losses.losses)} rows, rows={rows}: give a pilot of 2 or more, rows >= 1"
        )
    # The delta method for a ratio: 1.96 * sd(loss - mean * targets) / (mean targets * sqrt(rows)).
    residuals = row_losses.losses - row_losses.mean * row_losses.targets
    return (
        NormalDist().inv_cdf(0.975)
        * (residuals.std() / row_losses.targets.mean()).item()
        / math.sqrt(rows)
    )


def rows_needed(row_losses: RowLosses, *, difference: float, power: float = 0.8) -> int:
    """Rows with which a true `difference` (nats per token) gives an interval without zero, with probability `power`.

    For a comparison the pilot is `after - before`. With power 0.5 half the interval is as wide as the difference.
    """
    if not difference or not 0.5 <= power < 1:
        raise ValueError(
            f"difference={difference}, power={power}: give a difference other than 0, power in [0.5, 1)"
        )
    reach = 1 + NormalDist().inv_cdf(power) / NormalDist().inv_cdf(0.975)
    return max(
        2, math.ceil((estimate_held_out_interval(row_losses, rows=1) * reach / difference) ** 2)
    )


def text_windows(
    tokenizer: Any, *, text: str, context: int = 256, windows: int = 8
) -> list[dict[str, list[int]]]:
    """Rows of `context` tokens from evenly spaced pieces of `text`, every token a target; ValueError if it is short."""
    size = len(text) // max(windows, 1)
    # No text has 32 characters per token: the rest of a long piece need not be tokenized.
    pieces = [text[i * size : i * size + min(size, 32 * context)] for i in range(windows)]
    rows = [
        tokenizer(piece, truncation=True, max_length=context)["input_ids"] for piece in pieces
    ]  # BOS included
    if context < 2 or windows < 1 or min(map(len, rows)) < context:
        raise ValueError(
            f"{len(text)} characters for windows={windows} of context={context} tokens: give more text"
        )
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def perplexity(
    model: Any, tokenizer: Any, *, text: str, context: int = 256, windows: int = 8
) -> float:
    """exp of the mean loss over `text_windows`: before and after, on text that the fine-tune is not about."""
    rows = text_windows(tokenizer, text=text, context=context, windows=windows)
    return math.exp(held_out_losses(model, rows, pad_token_id=0, batch_size=1).mean)


def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Iterable[str | dict],
    *,
    max_new_tokens: int = 32,
    batch_size: int = 20,
) -> list[str]:
    """Answer greedily, in batches: as one at a time would, but for ties that rounding decides in 16 bits.

    A prompt is a question, which gets the chat template if there is one, or a row, whose answer is cut off.
    Raises ValueError for no prompt, a row without a question, sizes below 1, and a tokenizer without a padding token.
    """
    pad, prompts = tokenizer.pad_token_id, [prompts] if isinstance(prompts, str | dict) else prompts
    rows = [
        tokenize_pair(tokenizer, prompt, "?") if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    questions = [
        r["input_ids"][: next((i for i, x in enumerate(r["labels"]) if x != IGNORED), 0)]
        for r in rows
    ]
    if not questions or min(max_new_tokens, batch_size, *map(len, questions)) < 1 or pad is None:
        given = f"{len(questions)} prompts, max_new_tokens={max_new_tokens}, batch_size={batch_size}, pad_token={pad}"
        raise ValueError(
            f"{given}: give questions, sizes of 1 or more, and a tokenizer with a pad_token"
        )
    answers = [""] * len(questions)
    for indices in _by_length(questions, batch_size):
        part, width = [questions[i] for i in indices], len(questions[indices[0]])
        # Padding on the left: an answer continues its own question. The mask also sets the positions.
        ids = torch.tensor([[pad] * (width - len(q)) + q for q in part], device=model.device)
        mask = torch.tensor(
            [[0] * (width - len(q)) + [1] * len(q) for q in part], device=model.device
        )
        # A model's generation_config may penalize repetition, also that of the padding: greedy is without.
        options = {
            "do_sample": False,
            "num_beams": 1,
            "repetition_penalty": 1.0,
            "no_repeat_ngram_size": 0,
        }
        options |= {"max_new_tokens": max_new_tokens, "pad_token_id": pad, "use_cache": True}
        with _evaluating(model):
            out = model.generate(input_ids=ids, attention_mask=mask, **options)
        for i, tokens in zip(indices, out[:, width:]):
            answers[i] = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return answers


def _by_length(sequences: list[list[int]], batch_size: int) -> list[list[int]]:
    """Indices in batches of similar length, the longest first: what does not fit in memory fails at once."""
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation without gradients; afterwards every module has the mode it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
