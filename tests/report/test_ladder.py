"""The ladder of bytes: what its table compares, and that its file is whole after every row."""

import json

import pytest

from recipes_lib.core.measure import Measurement
from recipes_lib.report.ladder import Ladder
from recipes_lib.report.style import MIB


@pytest.fixture
def ladder(tmp_path):
    ladder = Ladder("steps", folder=tmp_path)
    ladder.add("baseline", Measurement(2.0, 1000 * MIB, 500), predicted=950 * MIB, loss=3.5)
    ladder.add("half", Measurement(4.0, 500 * MIB, 500), predicted=525 * MIB, loss=3.5)
    ladder.add("less", Measurement(4.0, 250 * MIB, None), predicted=250 * MIB)
    return ladder


def test_table_compares_with_the_previous_row_and_the_baseline(ladder):
    """The mistake: both columns compare with the same row, or the error has the wrong sign."""
    _, first, second, third = ladder.table()
    assert first[3] == "-5.0%"
    assert first[4:6] == ["", ""]
    assert second[4:7] == ["-50%", "-50%", "4.00"]
    assert third[4:6] == ["-50%", "-75%"]
    assert third[7:] == ["", ""]  # neither tokens nor loss were given
    assert ladder.saved("less") == 0.75


def test_text_and_html_show_every_row(ladder):
    for shown in (str(ladder), ladder._repr_html_()):
        assert all(name in shown for name in ("baseline", "half", "less", "1,000 MiB"))


def test_columns_of_the_text_stand_below_each_other(ladder):
    header, rule, *rows = str(ladder).splitlines()
    assert set(rule) == {"-"}
    end = header.index("measured") + len("measured")
    assert [row[:end].split()[-1] for row in rows] == ["MiB"] * 3


def test_html_is_escaped(tmp_path):
    ladder = Ladder("steps", folder=tmp_path)
    ladder.add("<b>", Measurement(1.0, MIB, 10), predicted=MIB)
    assert "<b>" not in ladder._repr_html_()


def test_line_says_what_was_expected_and_what_came(ladder):
    assert ladder.line("half") == (
        "half: expected 525 MiB, measured 500 MiB (-50% to the baseline), "
        "4.00 s per step, loss 3.5000"
    )
    assert ladder.line("baseline", timed=False) == (
        "baseline: expected 950 MiB, measured 1,000 MiB, loss 3.5000"
    )


def test_file_is_complete_after_every_row(tmp_path):
    """The mistake: rows are only written at the end, and a run that dies loses them."""
    ladder = Ladder("steps", folder=tmp_path)
    for count in (1, 2):
        ladder.add(f"row {count}", Measurement(1.0, MIB, 10), predicted=MIB)
        saved = json.loads(ladder.path.read_text())
        assert len(saved["rows"]) == count
    assert {"date", "commit", "versions", "tier"} <= saved.keys()
    ladder.note(held_out=2.8)
    assert json.loads(ladder.path.read_text())["facts"] == {"held_out": 2.8}


def test_a_new_run_keeps_the_rows_of_the_last(tmp_path):
    for peak in (MIB, 2 * MIB):
        ladder = Ladder("steps", folder=tmp_path)
        ladder.add("baseline", Measurement(1.0, peak, 10), predicted=MIB)
    new = tmp_path / "steps.json"
    (old,) = [path for path in tmp_path.iterdir() if path != new]
    assert json.loads(new.read_text())["rows"][0]["peak_bytes"] == 2 * MIB
    assert json.loads(old.read_text())["rows"][0]["peak_bytes"] == MIB


def test_a_time_taken_in_turns_replaces_the_first(ladder):
    before = ladder["half"]
    ladder.retime("half", 3.0, tokens=600)
    after = ladder["half"]
    assert (after.seconds, after.tokens_per_second) == (3.0, 200.0)
    assert after.peak_bytes == before.peak_bytes
    assert [row.name for row in ladder.rows] == ["baseline", "half", "less"]
    assert json.loads(ladder.path.read_text())["rows"][1]["seconds"] == 3.0
    with pytest.raises(KeyError, match="no row 'third'"):
        ladder.retime("third", 1.0, tokens=1)


def test_chart_shows_peaks_and_seconds_of_all_rows(ladder):
    memory, time = ladder.chart().axes
    assert [round(bar.get_width()) for bar in memory.patches] == [1000, 500, 250]
    assert [bar.get_width() for bar in time.patches] == [2.0, 4.0, 4.0]


def test_bad_input(ladder, tmp_path):
    with pytest.raises(ValueError, match="already has a row 'half'"):
        ladder.add("half", Measurement(1.0, 1, 1), predicted=1)
    with pytest.raises(ValueError, match="plain file name"):
        Ladder("../steps", folder=tmp_path)
    with pytest.raises(KeyError, match="no row 'none'"):
        ladder["none"]
