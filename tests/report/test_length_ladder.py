"""The ladder of lengths: tokens in place of bytes, and a time that comes later."""

import json

import pytest

from recipes_lib.report.length_ladder import LengthLadder


@pytest.fixture
def ladder(tmp_path):
    ladder = LengthLadder("lengths", timed_at=64, folder=tmp_path)
    plain = {"tokens": 100, "crossing": 100, "peak_bytes": 2**20}
    ladder.add("plain", **plain, predicted=105, loss=3.0)
    better = {"tokens": 2000, "crossing": 2000, "peak_bytes": 2**20}
    ladder.add("better", **better, predicted=1900, loss=3.00001, least_seconds=7200)
    return ladder


def test_table_compares_lengths_and_times(ladder):
    assert ladder.table()[2][7] == "", "nothing is timed yet"
    # The machine is slower in the second round, for both rows.
    ladder.set_times({"plain": [2.0, 4.0, 2.0], "better": [3.0, 6.2, 2.8]})
    expected = ["better", "1,900", "2,000", "-5.0%", "20.00", "20.0", "2.0 h"]
    expected += ["1.50× (1.40–1.55)", "3.00001"]
    assert ladder.table()[2] == expected
    assert ladder.table()[1][4:8] == ["", "1.0", "", "1"]
    assert ladder["better"].seconds == 3.0


def test_times_are_of_the_same_rounds(ladder):
    """One row alone, or rounds that do not belong together, would be compared with nothing."""
    with pytest.raises(ValueError, match="give those of 'plain' as well"):
        ladder.set_times({"better": [3.0]})
    with pytest.raises(ValueError, match="'better' has 1 rounds and the first row 2"):
        ladder.set_times({"plain": [2.0, 4.0], "better": [3.0]})


def test_the_prediction_is_compared_with_the_crossing(tmp_path):
    """The mistake: a search to within 1 % would make an exact prediction look 1 % off."""
    ladder = LengthLadder("lengths", folder=tmp_path)
    row = ladder.add("plain", tokens=100, crossing=104, peak_bytes=1, predicted=104)
    assert row.prediction_error == 0


def test_gain_and_line(ladder):
    assert ladder.gain("better") == 20
    assert ladder.line("better") == (
        "better: predicted 1,900 tokens, found 2,000, 20.0× the baseline; loss 3.00001"
    )
    assert ladder.line("plain") == "plain: predicted 105 tokens, found 100; loss 3.00000"


def test_rows_are_shown_and_kept(ladder):
    saved = json.loads(ladder.path.read_text())["rows"]
    assert [row["tokens"] for row in saved] == [100, 2000]
    assert "loss at 64" in str(ladder)
    assert "<td>better</td>" in ladder._repr_html_()
    assert [bar.get_width() for bar in ladder.chart().axes[0].patches] == [100, 2000]


def test_a_name_that_is_taken(ladder):
    with pytest.raises(ValueError, match="already has a row 'better'"):
        ladder.add("better", tokens=1, crossing=1, peak_bytes=1, predicted=1)
