"""Honest evaluation: held-out loss with an interval, and a paired comparison of two models.

Problem    "The loss fell from 1.52 to 1.47" on 50 rows says little: other rows might show the
           opposite.
Idea       A row (a pair, a document) is the unit that was drawn; its tokens are not independent.

               loss      sum of row losses / sum of row targets: the mean over tokens is a ratio
               interval  draw N of the N rows with replacement, 2,000 times;
                         the middle 95 % of the ratios

           Two models meet on the *same* rows: what makes a row hard for both cancels in the
           difference.
Saves      Rows: a paired interval is narrower than two separate ones, and the rows needed fall
           with its square.
Costs      A forward pass over the held-out rows per model. The bootstrap takes milliseconds.
Use when   A number is to decide: keep a fine-tune, choose a rank, believe a small gain.
Not when   There are fewer than about 30 rows: the interval is then too narrow. It covers the
           choice of rows only, not another seed, nor rows that were trained on. Rows of one
           document count as one: their sums.
In production   lm-evaluation-harness: `simple_evaluate(bootstrap_iters=...)`, a standard error
           with each metric. The Trainer's own `eval_loss` averages means of batches: it changes
           with the batch size.
Source     Efron and Tibshirani, "An Introduction to the Bootstrap"; Miller, arXiv 2411.00640.

Shape: N rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from statistics import NormalDist
from typing import Any

import torch

from recipes_lib.core.data.losses_and_answers import row_losses
from recipes_lib.core.data.tokens_and_labels import Row

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_paired_bootstrap(
    before: torch.Tensor, after: torch.Tensor, targets: torch.Tensor
) -> tuple[float, float]:
    """The 95 % interval of `after - before` in nats per token.

    Both are sums of losses per row [N] of one model each, over the same rows with `targets` [N]
    tokens.
    """
    difference = after - before  # [N]: what makes a row hard for both models is gone
    rows = len(difference)
    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(2000):
        drawn = torch.randint(rows, (rows,), generator=generator)  # with replacement
        means.append(difference[drawn].sum() / targets[drawn].sum())
    ends = torch.tensor([0.025, 0.975], dtype=difference.dtype)
    low, high = torch.stack(means).quantile(ends).tolist()
    return low, high


# --- the technique --------------------------------------------------------------------------------


def held_out_losses(
    model: Any, data: Iterable[Row], *, pad_token_id: int, batch_size: int = 8
) -> RowLosses:
    """The loss of each row of `data` (`input_ids` and unshifted `labels`), in its order."""
    losses, targets = row_losses(model, data, pad_token_id=pad_token_id, batch_size=batch_size)
    return RowLosses(losses, targets)


def compare(before: RowLosses, after: RowLosses) -> Comparison:
    """Compare two models on the same rows."""
    paired = after - before
    return Comparison(paired.mean, *paired.interval())


def score_interval(right: torch.Tensor) -> tuple[float, float]:
    """The 95 % interval of how many answers are right, of `right` [N]: 1 or 0 for each.

    Wilson's formula, which is never outside of 0 to N, and has a width also where all are right.
    """
    z = NormalDist().inv_cdf(0.975)
    count = len(right)
    share = right.double().mean().item()
    middle = share + z**2 / (2 * count)
    half_width = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    shrink = count / (1 + z**2 / count)
    return shrink * (middle - half_width), shrink * (middle + half_width)


@dataclasses.dataclass(frozen=True, eq=False)
class RowLosses:
    """Per row the sum of its losses, in nats, and its number of targets: fp64 [N] on the CPU."""

    losses: torch.Tensor
    targets: torch.Tensor

    @property
    def mean(self) -> float:
        """Nats per target token, as `core.data.losses_and_answers.evaluate` gives them."""
        return (self.losses.sum() / self.targets.sum()).item()

    def interval(self, *, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
        """The bootstrap interval of `mean`, 95 %, by percentiles."""
        rows = len(self.losses)
        generator = torch.Generator().manual_seed(seed)
        at_once = max(1, 2**20 // rows)  # so that a part takes some megabytes
        means = []
        for start in range(0, resamples, at_once):
            count = min(at_once, resamples - start)
            drawn = torch.randint(rows, (count, rows), generator=generator)  # [count, N]
            means.append(self.losses[drawn].sum(1) / self.targets[drawn].sum(1))
        ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
        low, high = torch.cat(means).quantile(ends).tolist()
        return low, high

    def __str__(self) -> str:
        mean = f"{self.mean:.2f} nats per token"
        if len(self.losses) < 2:
            return mean
        low, high = self.interval()
        return f"{mean} (95 % interval {low:.2f} to {high:.2f})"

    def __sub__(self, other: RowLosses) -> RowLosses:
        """The paired differences of two models; ValueError for other rows."""
        if not torch.equal(self.targets, other.targets):
            raise ValueError(
                f"{len(self.targets)} and {len(other.targets)} rows of other targets: "
                f"give the same rows"
            )
        return RowLosses(self.losses - other.losses, self.targets)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The loss after less the loss before, in nats per token; prints with a verdict."""

    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """What the interval says: zero inside it means that these rows cannot tell."""
        if self.high < 0:
            return "better"
        if self.low > 0:
            return "worse"
        return "no difference that this many rows can show"

    def __str__(self) -> str:
        interval = f"(95 % interval {self.low:+#.3g} to {self.high:+#.3g})"
        return f"{self.difference:+#.3g} nats per token {interval}: {self.verdict}"


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_interval(pilot: RowLosses, *, rows: int) -> float:
    """Half the width of the 95 % interval (nats per token) that `rows` rows will give."""
    # The delta method for a ratio: 1.96 * sd(loss - mean * targets) / (mean targets *
    # sqrt(rows)).
    residuals = pilot.losses - pilot.mean * pilot.targets  # [N]
    spread = (residuals.std() / pilot.targets.mean()).item()
    return NormalDist().inv_cdf(0.975) * spread / math.sqrt(rows)


def rows_needed(pilot: RowLosses, *, difference: float, power: float = 0.8) -> int:
    """Rows with which a true `difference` (nats per token) gives an interval without zero.

    It does so with probability `power`. For a comparison the pilot is `after - before`. With
    power 0.5 half the interval is as wide as the difference.
    """
    reach = 1 + NormalDist().inv_cdf(power) / NormalDist().inv_cdf(0.975)
    half_width_of_one = predicted_interval(pilot, rows=1)
    return max(2, math.ceil((half_width_of_one * reach / difference) ** 2))
