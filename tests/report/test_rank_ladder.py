"""The ladder of ranks: what it expects, what came, and whether the losses are the same."""

import dataclasses
import json

import pytest

from recipes_lib.core.predict.budget import TERMS, Budget
from recipes_lib.core.ranks.rank_run import RankRun
from recipes_lib.report.rank_ladder import RankLadder
from recipes_lib.report.style import MIB

ALONE = RankRun(1, [3.0, 2.0], [0.5], 4 * MIB, 4 * MIB, 8 * MIB, 0)
SHARDED = RankRun(
    2, [3.0, 2.0 + 3e-8], [0.3], 2 * MIB, 2 * MIB, 4 * MIB, 6 * MIB, {"all_gather": 9}
)


def plan(weights, gradients, states):
    kept = {"weights": weights * MIB, "gradients": gradients * MIB, "states": states * MIB}
    return Budget(**dict.fromkeys(TERMS, 0) | kept)


@pytest.fixture
def ladder(tmp_path):
    ladder = RankLadder("ranks", folder=tmp_path)
    ladder.climb("one process", lambda: ALONE, predicted=plan(4, 4, 8))
    ladder.climb("sharded", lambda: SHARDED, predicted=plan(2, 2, 4), predicted_sent=6 * MIB)
    return ladder


def test_a_row_says_what_was_expected_and_what_came(ladder, capsys):
    """Catches terms of the budget that are mixed up, and a difference of the last loss alone."""
    row = ladder["sharded"]
    assert (row.kept_bytes, row.predicted_bytes) == (8 * MIB, 8 * MIB)
    assert row.loss_difference == pytest.approx(3e-8)
    header, _, cells = ladder.table()
    shown = dict(zip(header, cells, strict=True))
    assert (shown["measured"], shown["sends"], shown["expected"]) == ("8 MiB", "6 MiB", "6 MiB")
    assert shown["loss to 1st"] == "to 3e-08"
    assert "9 all_gather" in ladder.line("sharded")
    # Kept in a file after every row.
    assert json.loads(ladder.path.read_text())["rows"][1]["sent_bytes"] == 6 * MIB


def test_turns_compare_round_by_round(ladder):
    """Catches a ratio of medians, which a machine that becomes slower would move."""
    slowdowns = iter([1, 1, 4, 4])  # the second round takes four times as long

    def timed(run):
        return dataclasses.replace(run, seconds=[run.seconds[0] * next(slowdowns)])

    ladder._runs = {"one process": lambda: timed(ALONE), "sharded": lambda: timed(SHARDED)}
    ladder.take_turns(rounds=2)
    row = ladder["sharded"]
    assert (row.ratio, row.ratio_low, row.ratio_high) == pytest.approx((0.6, 0.6, 0.6))
    assert row.turns == 2


def test_the_chart_has_a_bar_and_an_outline_for_each_row(ladder):
    (axes,) = ladder.chart().axes
    widths = sorted(patch.get_width() for patch in axes.patches)
    assert widths[-2:] == [8, 16]  # the outlines: predicted
    assert ladder.chart().message == "16 → 8.0 MiB per rank with sharded"


def test_bad_input(tmp_path):
    ladder = RankLadder("ranks", folder=tmp_path)
    with pytest.raises(ValueError, match="climb"):
        ladder.take_turns()
    ladder.climb("one process", lambda: ALONE, predicted=plan(4, 4, 8))
    shorter = dataclasses.replace(SHARDED, losses=[3.0])
    with pytest.raises(ValueError, match="1 steps and the first row 2"):
        ladder.climb("sharded", lambda: shorter, predicted=plan(2, 2, 4))
    with pytest.raises(ValueError, match="another name"):
        ladder.climb("one process", lambda: ALONE, predicted=plan(4, 4, 8))
