import json

import pytest

from recipes_lib.core.budget import Budget
from recipes_lib.core.measure import Measurement
from recipes_lib.fine_tuning.honest_evaluation import Comparison
from recipes_lib.report.charts import budget_chart, change_chart, chart, loss_chart
from recipes_lib.report.ladder import Ladder
from recipes_lib.report.show import show
from recipes_lib.report.style import MIB


@pytest.fixture
def ladder(tmp_path):
    ladder = Ladder("steps", folder=tmp_path)
    ladder.add("baseline", Measurement(2.0, 1000 * MIB, 500), predicted=950 * MIB, loss=3.5)
    ladder.add("half", Measurement(4.0, 500 * MIB, 500), predicted=525 * MIB, loss=3.5)
    ladder.add("less", Measurement(4.0, 250 * MIB, None), predicted=250 * MIB)
    return ladder


def test_table_compares_with_the_previous_row_and_the_baseline(ladder):
    _, first, second, third = ladder.table()
    assert first[4:6] == ["", ""] and first[3] == "-5.0%"
    assert second[4:7] == ["-50%", "-50%", "4.00"]
    assert third[4:6] == ["-50%", "-75%"] and third[7:] == ["", ""]
    assert ladder.saved("less") == 0.75


def test_text_and_html_show_every_row(ladder):
    for shown in (str(ladder), ladder._repr_html_()):
        assert all(name in shown for name in ("baseline", "half", "less", "1,000 MiB"))


def test_file_is_complete_after_every_row(tmp_path):
    ladder = Ladder("steps", folder=tmp_path)
    for count in (1, 2):
        ladder.add(f"row {count}", Measurement(1.0, MIB, 10), predicted=MIB)
        saved = json.loads(ladder.path.read_text())
        assert len(saved["rows"]) == count
    assert {"date", "commit", "versions", "tier"} <= saved.keys()
    ladder.note(held_out=2.8)
    assert json.loads(ladder.path.read_text())["facts"] == {"held_out": 2.8}


def test_a_time_taken_in_turns_replaces_the_first(ladder):
    before = ladder["half"]
    ladder.retime("half", 3.0, tokens=600)
    assert (ladder["half"].seconds, ladder["half"].tokens_per_second) == (3.0, 200.0)
    assert (
        ladder["half"].peak_bytes == before.peak_bytes
        and [row.name for row in ladder.rows][1] == "half"
    )
    assert json.loads(ladder.path.read_text())["rows"][1]["seconds"] == 3.0
    with pytest.raises(KeyError, match="no row 'third'"):
        ladder.retime("third", 1.0, tokens=1)


def test_html_is_escaped(tmp_path):
    ladder = Ladder("steps", folder=tmp_path)
    ladder.add("<b>", Measurement(1.0, MIB, 10), predicted=MIB)
    assert "<b>" not in ladder._repr_html_()


def test_chart_draws_one_bar_per_row(ladder):
    memory, time = ladder.chart().axes
    assert [round(bar.get_width()) for bar in memory.patches] == [1000, 500, 250]
    assert [bar.get_width() for bar in time.patches] == [2.0, 4.0, 4.0]


def test_line_says_what_was_expected_and_what_came(ladder):
    assert ladder.line("half") == (
        "half: expected 525 MiB, measured 500 MiB (-50% to the baseline), 4.00 s per step, loss 3.5000"
    )
    assert ladder.line("half", timed=False).endswith("(-50% to the baseline), loss 3.5000")


def test_budget_chart_stacks_the_phase_of_the_peak():
    forward = Budget(10, 20, 5, 0, 40, 8, 3, 0, 0, 1)
    backward = Budget(10, 20, 50, 0, 30, 8, 3, 0, 0, 4)
    assert forward.at_peak() == {
        "weights": 10,
        "states": 20,
        "gradients": 0,
        "activations": 40,
        "loss": 8,
    }
    assert backward.at_peak() == {
        "weights": 10,
        "states": 20,
        "gradients": 54,
        "activations": 0,
        "loss": 0,
    }
    (axes,) = budget_chart({"a": forward, "b": backward}).axes
    assert sum(bar.get_width() for bar in axes.patches) * MIB == pytest.approx(
        forward.peak + backward.peak
    )


def test_bad_input(ladder, tmp_path):
    with pytest.raises(ValueError, match="already has a row 'half'"):
        ladder.add("half", Measurement(1.0, 1, 1), predicted=1)
    with pytest.raises(ValueError, match="plain file name"):
        Ladder("../steps", folder=tmp_path)
    with pytest.raises(KeyError, match="no row 'none'"):
        ladder["none"]
    empty = (lambda: chart([], title=""), lambda: budget_chart({}), lambda: loss_chart({"a": []}))
    for draw in (*empty, lambda: change_chart({})):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw()


def test_loss_chart_draws_a_line_per_run():
    (axes,) = loss_chart({"a": [(0, 4.0), (5, 3.0)], "b": [(0, 4.5), (5, 2.5)]}).axes
    assert [line.get_label() for line in axes.get_lines()] == ["a", "b"]
    assert axes.get_lines()[1].get_ydata().tolist() == [4.5, 2.5]


def test_change_chart_draws_a_point_with_its_interval_per_run():
    changes = {"a": Comparison(-0.3, -0.5, -0.2, 0.95), "b": Comparison(0.1, -0.1, 0.2, 0.95)}
    (axes,) = change_chart(changes).axes
    bars = [bar for collection in axes.collections for bar in collection.get_segments()]
    assert [bar[:, 0].tolist() for bar in bars] == [
        pytest.approx([-0.5, -0.2]),
        pytest.approx([-0.1, 0.2]),
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "a",
        "b",
    ] and axes.yaxis_inverted()


def test_a_new_run_keeps_the_rows_of_the_last(tmp_path):
    for peak in (MIB, 2 * MIB):
        Ladder("steps", folder=tmp_path).add("baseline", Measurement(1.0, peak, 10), predicted=MIB)
    new, old = (
        tmp_path / "steps.json",
        [path for path in tmp_path.iterdir() if path.name != "steps.json"],
    )
    assert json.loads(new.read_text())["rows"][0]["peak_bytes"] == 2 * MIB
    assert [json.loads(path.read_text())["rows"][0]["peak_bytes"] for path in old] == [MIB]


def test_show_prints_code_without_docstring(capsys):
    show(chart)
    printed = capsys.readouterr().out
    assert printed.startswith("def chart(") and "Draw the rows" not in printed and "barh" in printed
    show(Ladder.append)  # a method, whose docstring is indented
    printed = capsys.readouterr().out
    assert (
        printed.startswith("def append(")
        and "Append a finished" not in printed
        and "    self.save()" in printed
    )
