"""The ladder of devices: each group against its own first row, in turns."""

import json
import time

import pytest

from recipes_lib.report.edge_ladder import EdgeLadder


def file_of(folder, size):
    path = folder / f"{size}.pte"
    path.write_bytes(bytes(size))
    return path


@pytest.fixture
def ladder(tmp_path):
    ladder = EdgeLadder("edge", folder=tmp_path)
    climb = ladder.climb
    climb("teacher", lambda: None, file=file_of(tmp_path, 4000), accuracy=0.99, group="digits")
    climb(
        "student",
        lambda: None,
        file=file_of(tmp_path, 1000),
        accuracy=0.98,
        predicted_bytes=990,
        group="digits",
    )
    climb("fp32", lambda: None, file=file_of(tmp_path, 9000), perplexity=13.7, group="text")
    return ladder


def test_a_row_is_compared_with_the_first_of_its_group(ladder):
    """Catches one baseline for two tasks."""
    shown = {cells[0]: cells for cells in ladder.table()}
    assert shown["student"][1:5] == ["98.0 % right", "0.00099 MB", "0.0010 MB", "25%"]
    assert shown["fp32"][1] == "perplexity 13.70"
    assert shown["fp32"][4] == "100%"
    assert "25% of teacher" in ladder.line("student")
    assert json.loads(ladder.path.read_text())["rows"][1]["file_bytes"] == 1000


def test_turns_compare_round_by_round(ladder, monkeypatch):
    """Catches a ratio of medians, and one that is taken against another group's row."""
    took = {"teacher": [2.0, 8.0], "student": [1.0, 4.0], "fp32": [5.0, 5.0]}

    def of_next_turn(run, _units):
        return took[run].pop(0)

    monkeypatch.setattr("recipes_lib.report.edge_ladder._seconds_per_unit", of_next_turn)
    ladder._runs = {name: (name, 1) for name in took}
    ladder.take_turns(rounds=2)
    student = ladder["student"]
    assert (student.ratio, student.ratio_low, student.ratio_high) == (0.5, 0.5, 0.5)
    assert (student.seconds, student.seconds_low, student.seconds_high) == (2.5, 1.0, 4.0)
    assert (ladder["fp32"].ratio, ladder["fp32"].turns) == (1.0, 2)
    assert ladder.table()[2][-1] == "2.00× (2.00–2.00)"


def test_a_row_is_compared_with_the_link_before_it(tmp_path, monkeypatch):
    """Catches the gain of one link that has those of all links before it in it."""
    ladder = EdgeLadder("devices", folder=tmp_path)
    shared = {"file": file_of(tmp_path, 100), "accuracy": 0.9, "group": "digits"}
    ladder.climb("teacher", time.time, **shared)
    ladder.climb("student", time.time, **shared)
    ladder.climb("student in 8 bits", time.time, after="student", **shared)
    with pytest.raises(ValueError, match="after='pupil'"):
        ladder.climb("pruned", time.time, after="pupil", **shared)
    took = {"teacher": [9.0, 9.0], "student": [2.0, 6.0], "student in 8 bits": [1.0, 2.0]}

    def of_next_turn(run, _units):
        return took[run].pop(0)

    monkeypatch.setattr("recipes_lib.report.edge_ladder._seconds_per_unit", of_next_turn)
    ladder._runs = {name: (name, 1) for name in took}
    ladder.take_turns(rounds=2)
    row = ladder["student in 8 bits"]
    assert row.after_low == pytest.approx(1 / 3)
    assert row.after_high == 0.5
    assert ladder["student"].after is None


def test_a_call_of_several_units_is_shared_among_them(tmp_path):
    ladder = EdgeLadder("edge", folder=tmp_path)
    file = file_of(tmp_path, 10)
    ladder.climb("ten tokens", lambda: time.sleep(0.06), file=file, perplexity=2.0, units=10)
    assert ladder["ten tokens"].seconds == pytest.approx(0.006, rel=0.5)


def test_the_chart_has_the_rows_of_one_group(ladder):
    (axes,) = ladder.chart("digits").axes
    assert sum(line.get_marker() == "o" for line in axes.lines) == 2


def test_bad_input(ladder, tmp_path):
    file = file_of(tmp_path, 10)
    with pytest.raises(ValueError, match="another name"):
        ladder.climb("student", lambda: None, file=file, accuracy=0.9, group="digits")
    with pytest.raises(ValueError, match="has one quality"):
        ladder.climb("x", lambda: None, file=file, group="digits")
    with pytest.raises(ValueError, match="another kind of quality than perplexity"):
        ladder.climb("x", lambda: None, file=file, perplexity=3.0, group="digits")
    with pytest.raises(ValueError, match="file that was written"):
        ladder.climb("x", lambda: None, file=tmp_path / "none", accuracy=0.9, group="digits")
    ladder.climb("y", lambda: None, file=file, agreement=1.0, group="cut")
    with pytest.raises(ValueError, match="y has an agreement: a chart of size"):
        ladder.chart("cut")
    with pytest.raises(ValueError, match="climb"):
        EdgeLadder("none", folder=tmp_path).take_turns()
