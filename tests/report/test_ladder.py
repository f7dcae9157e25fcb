"""The mechanism of all ladders: fastest turns, ranges, units, records, models that go."""

import gc
import json
import weakref

import pytest

from recipes_lib.core.measure import taking_turns
from recipes_lib.report.ladder import RATIO, TIME, Column, Ladder, Row
from recipes_lib.report.style import MIB, mib


class Model:
    """A turn whose times are given, and which fails when there are no more."""

    def __init__(self, times):
        self.times = times

    def __call__(self):
        return {"seconds": self.times.pop(0)}


def build(*times, made=None):
    """A build of a turn; `made` gets a weak reference to each that it makes."""
    times = list(times)

    def again():
        model = Model(times)
        if made is not None:
            made.append(weakref.ref(model))
        return model

    return again


@pytest.fixture
def ladder():
    columns = [Column("peak_bytes", "peak", "B", mib), TIME, RATIO, Column("losses")]
    return Ladder("steps", columns)


def saved(ladder):
    return json.loads(ladder.path.read_text())


def test_the_fastest_turn_counts_and_the_range_stands_beside_it(ladder):
    """The mistake: a median of turns, which one slow neighbour on the machine moves."""
    ladder.climb("first", build(9, 1.0, 2.0, 1.1), peak_bytes=2 * MIB)
    ladder.climb("other", build(9, 1.5, 2.2, 1.4), peak_bytes=MIB)
    ladder.take_turns(rounds=3)
    other = ladder["other"]
    assert (other.seconds, other.seconds_low, other.seconds_high) == (1.4, 1.4, 2.2)
    assert other.turns == 3
    # Of the fastest turns; the range is that of the rounds: 1.5/1.0, 2.2/2.0, 1.4/1.1.
    assert (other.ratio, other.ratio_low, other.ratio_high) == pytest.approx((1.4, 1.1, 1.5))
    first = ladder["first"]
    assert (first.ratio, first.ratio_low, first.ratio_high) == (1.0, 1.0, 2.0)
    name, *cells = ladder.table()[2]
    assert name == "other (disturbed: a turn took 1.6×)"
    assert cells == ["1.0 MiB", "1.40 (1.40–2.20)", "1.40 (1.10–1.50)"]
    marked = [record for record in saved(ladder)["rows"] if record["metric"] == "disturbed"]
    assert [record["row"] for record in marked] == ["first", "other"]


def test_rows_are_saved_as_flat_records(ladder):
    """The mistake: a reader of the file has to know which kind of ladder wrote it."""
    ladder.append(Row(name="a", group="alone", peak_bytes=5, losses=[3.0, 2.0], calls={"send": 7}))
    ladder.set_times({"a": [2.0, 2.5]})
    ladder.note(held_out=3.25)
    content = saved(ladder)
    records = {record["metric"]: record for record in content["rows"]}
    who = {"notebook": "steps", "row": "a"}
    assert records["peak_bytes"] == who | {"metric": "peak_bytes", "value": 5, "unit": "B"}
    times = {"value": 2.0, "low": 2.0, "high": 2.5, "unit": "s"}
    assert records["seconds"] == who | {"metric": "seconds"} | times
    assert records["ratio"]["unit"] == "×" and records["losses"]["value"] == [3.0, 2.0]
    assert records["group"]["value"] == "alone" and records["calls · send"]["value"] == 7
    assert "disturbed" not in records
    assert content["facts"] == {"held_out": 3.25}
    assert {"name", "versions", "date", "commit", "fast"} <= content.keys()


def test_later_rows_take_their_turns_with_the_first(ladder):
    """The mistake: a ratio beside a first row that ran in a faster hour."""
    ladder.climb("first", build(9, 1.0, 4.0))
    ladder.take_turns(rounds=1)
    ladder.climb("later", build(9, 6.0))
    ladder.take_turns(rounds=1)
    later = ladder["later"]
    assert (later.seconds, later.ratio, later.ratio_low, later.ratio_high) == (6.0, 1.5, 1.5, 1.5)
    assert (ladder["first"].seconds, ladder["first"].turns) == (1.0, 2)
    with pytest.raises(ValueError, match="no row can take turns"):
        ladder.take_turns(rounds=1)


def test_a_row_without_turns_has_no_time(ladder, capsys):
    """The mistake: a first impression stands in the table beside times that were compared."""
    ladder.climb("first", build(9, 1.0))
    ladder.climb("apart", build(9), peak_bytes=MIB, in_turns=False)
    ladder.take_turns(rounds=1)
    assert ladder.table()[2] == ["apart", "1.0 MiB", "", ""]
    assert {record["metric"] for record in saved(ladder)["rows"] if record["row"] == "apart"} == {
        "peak_bytes",
        "turns",
    }


def test_each_group_has_its_own_first_row(ladder):
    ladder.in_groups = True
    ladder.as_fast = True
    for name, group, seconds in (("a", "one", 1.0), ("b", "two", 4.0), ("c", "two", 2.0)):
        ladder.climb(name, build(seconds, seconds), group=group)
    ladder.take_turns(rounds=1)
    assert [row.ratio for row in ladder.rows] == [1.0, 1.0, 2.0]
    assert str(ladder).count("two") == 1 and ladder._repr_html_().count("two") == 1


def test_a_row_that_fails_keeps_its_first_time(ladder, capsys):
    """The mistake: one that runs out of memory ends a notebook of an hour."""
    ladder.climb("first", build(1.0, 1.0, 1.0))
    ladder.climb("fails", build(7.0, 3.0))
    ladder.take_turns(rounds=2)
    assert (ladder["first"].turns, ladder["fails"].turns) == (2, 1)
    assert "fails takes no more turns: IndexError" in capsys.readouterr().out


def test_models_wait_only_where_there_is_room_and_go_after_their_turns(ladder, monkeypatch):
    """The mistake: models wait for their turns until the memory is full."""
    monkeypatch.setattr(taking_turns, "free_memory_bytes", lambda: 20)
    made = []
    ladder.climb("first", build(1, 1, 1, 1, made=made), kept=10, peak=10)
    ladder.climb("second", build(1, 1, made=made), kept=10, peak=10)
    assert made[0]() is not None, "both fit into three quarters of what is free or theirs"
    ladder.climb("third", build(1, 1, made=made), kept=10, peak=12)
    assert [model() is None for model in made] == [True, True, False]
    ladder.take_turns(rounds=1)
    gc.collect()
    assert [model() for model in made] == [None] * len(made)
    assert [row.turns for row in ladder.rows] == [2, 1, 1], "in two parts, the first one in each"


def test_the_file_is_whole_after_every_round_and_the_last_run_is_kept(ladder, runs):
    """The mistake: an interrupted run loses its rows, or overwrites those of the last run."""
    ladder.climb("first", build(9, 2.0, 1.0))

    def interrupted():
        raise KeyboardInterrupt

    ladder.climb("second", build(9, 2.0))
    ladder._turns.alive["second"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        ladder.take_turns(rounds=2)
    assert [record["row"] for record in saved(ladder)["rows"]].count("second") > 0
    again = Ladder("steps")
    assert len(list(runs.iterdir())) == 1, "a run without rows leaves the file alone"
    again.append(Row(name="other"))
    assert len(list(runs.iterdir())) == 2


def test_a_table_for_the_terminal_and_for_jupyter(ladder):
    """The mistake: a step that is named like a tag, or a column that nobody measured."""
    ladder.append(Row(name="<b>[bold]", peak_bytes=1000 * MIB))
    assert ladder.table() == [["step", "peak"], ["<b>[bold]", "1,000 MiB"]]
    assert "<b>[bold]" in str(ladder) and "1,000 MiB" in str(ladder)
    assert "<b>" not in ladder._repr_html_() and "1,000 MiB" in ladder._repr_html_()
    assert ladder.line("<b>[bold]") == "<b>[bold]: peak 1,000 MiB"


def test_a_name_that_is_taken(ladder):
    ladder.append(Row(name="a"))
    with pytest.raises(ValueError, match="already has a row 'a'"):
        ladder.climb("a", build(1))
    with pytest.raises(KeyError, match="no row 'b'"):
        ladder["b"]
