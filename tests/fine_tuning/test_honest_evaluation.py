"""Intervals that cover the truth, paired comparisons, and how many rows a difference needs."""

import pytest
import torch

from recipes_lib.core.data.losses_and_answers import evaluate
from recipes_lib.core.data.tokens_and_labels import IGNORED
from recipes_lib.fine_tuning.honest_evaluation import (
    RowLosses,
    compare,
    held_out_losses,
    plain_paired_bootstrap,
    predicted_interval,
    rows_needed,
    score_interval,
)

TRUTH = 3.0  # nats per token, of the rows that are drawn below


def drawn_rows(count, *, generator):
    """Synthetic rows and all their token losses: each row has a difficulty of its own."""
    targets = torch.randint(5, 30, (count,), generator=generator).double()
    difficulty = TRUTH + 0.5 * torch.randn(count, generator=generator).double()
    noise = torch.randn(int(targets.sum()), generator=generator).double()
    tokens = [hard + part for hard, part in zip(difficulty, noise.split(targets.int().tolist()))]
    return RowLosses(torch.stack([row.sum() for row in tokens]), targets), torch.cat(tokens)


def shifted(before, *, by, noise, generator):
    """The same rows under a model whose loss differs by `by`, give or take `noise` per row."""
    change = by + noise * torch.randn(len(before.losses), generator=generator).double()
    return RowLosses(before.losses + change * before.targets, before.targets)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


# --- intervals ----------------------------------------------------------------------------------


def test_losses_of_a_model_have_the_mean_of_evaluate(llama):
    """The mistake: a mean of the means of batches or of rows."""
    rows = []
    for length in (5, 29, 12, 8, 20):
        ids = torch.randint(1, 128, (length,)).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORED] * 4 + ids[4:]})
    found = held_out_losses(llama, rows, pad_token_id=0, batch_size=2)
    assert found.mean == pytest.approx(evaluate(llama, rows, pad_token_id=0), rel=1e-5)
    assert found.targets.tolist() == [1, 25, 8, 4, 16]


@pytest.mark.parametrize(("right", "low", "high"), [(8, 4.902, 9.433), (10, 7.225, 10.0)])
def test_interval_of_a_score_is_wilsons(right, low, high):
    """The mistake: the normal interval, which says 10 to 10 where 10 of 10 are right."""
    answers = torch.tensor([1.0] * right + [0.0] * (10 - right))
    assert score_interval(answers) == pytest.approx((low, high), abs=1e-3)


def test_interval_covers_the_truth_and_one_over_tokens_does_not(generator):
    """The mistake: tokens are drawn, those of one row are alike, and the interval is too narrow."""
    by_row = 0
    by_token = 0
    for seed in range(200):
        rows, tokens = drawn_rows(60, generator=generator)
        low, high = rows.interval(resamples=400, seed=seed)
        by_row += low <= TRUTH <= high
        half_width = 1.96 * tokens.std() / len(tokens) ** 0.5
        by_token += abs(tokens.mean() - TRUTH) <= half_width
    assert 180 <= by_row <= 198
    assert by_token < 160


# --- comparisons --------------------------------------------------------------------------------


def test_comparison_is_the_bootstrap_by_hand(generator):
    """The mistake: parts that draw the same rows, or a difference that is not paired."""
    before, _ = drawn_rows(600, generator=generator)  # resampled in parts
    after = shifted(before, by=-0.1, noise=0.1, generator=generator)
    result = compare(before, after)
    by_hand = plain_paired_bootstrap(before.losses, after.losses, before.targets)
    assert (result.low, result.high) == pytest.approx(by_hand, rel=1e-9)


def test_paired_interval_sees_what_two_intervals_do_not(generator):
    """The mistake: a sign that is turned round, or an interval of each model alone."""
    before, _ = drawn_rows(64, generator=generator)
    after = shifted(before, by=-0.1, noise=0.1, generator=generator)
    assert before.interval()[0] < after.interval()[1]  # they overlap
    result = compare(before, after)
    assert result.verdict == "better"
    assert compare(after, before).verdict == "worse"
    assert result.difference == pytest.approx(after.mean - before.mean)
    low, high = before.interval()
    assert result.high - result.low < (high - low) / 3
    nothing = compare(before, shifted(before, by=0.0, noise=0.1, generator=generator))
    assert nothing.low < 0 < nothing.high
    assert nothing.verdict.startswith("no difference")


# --- predictions --------------------------------------------------------------------------------


def test_prediction_is_the_width_of_the_bootstrap(generator):
    """The mistake: the spread of rows of unequal lengths is taken as that of their means."""
    rows, _ = drawn_rows(150, generator=generator)
    difference = shifted(rows, by=0.1, noise=0.3, generator=generator) - rows
    for pilot in (rows, difference):
        low, high = pilot.interval()
        assert predicted_interval(pilot, rows=150) == pytest.approx((high - low) / 2, rel=0.15)


def test_a_pilot_says_how_many_rows_a_difference_needs(generator):
    """The mistake: so few rows that the difference is found half of the time."""
    pilot, _ = drawn_rows(400, generator=generator)
    paired = shifted(pilot, by=-0.1, noise=0.3, generator=generator) - pilot
    count = rows_needed(paired, difference=-0.1)
    seen = 0
    for seed in range(200):
        before, _ = drawn_rows(count, generator=generator)
        after = shifted(before, by=-0.1, noise=0.3, generator=generator)
        _, high = (after - before).interval(resamples=400, seed=seed)
        seen += high < 0
    assert 140 <= seen <= 180  # 80 %


def test_rows_that_cannot_be_compared():
    """The mistake: other rows, whose difference says nothing."""
    rows = RowLosses(torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([1.0, 2.0, 2.0]).double())
    with pytest.raises(ValueError, match="give the same rows"):
        compare(rows, RowLosses(rows.losses, rows.targets.flip(0)))
