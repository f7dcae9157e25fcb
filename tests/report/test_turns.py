"""Steps that take turns: who takes part, what fits into memory, and what a row keeps of it."""

from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.predict.budget import TERMS, Budget
from recipes_lib.report import turns
from recipes_lib.report.style import MIB


def plan_of(**mebibytes):
    terms = dict.fromkeys(TERMS, 0)
    return Budget(**terms | {name: size * MIB for name, size in mebibytes.items()})


# --- who takes part -------------------------------------------------------------------------------


def test_rows_wait_until_they_had_a_turn():
    """The mistakes: rows are timed again, or a row that was only added is to be built."""
    rows = [SimpleNamespace(name=name, turns=count) for name, count in zip("abc", (5, 0, 0))]
    assert turns.rows_that_wait(rows, {"a": None, "b": None}) == [rows[1]]
    with pytest.raises(ValueError, match="no row can take turns: add rows with climb"):
        turns.rows_that_wait(rows, {"a": None})


def test_the_line_is_not_too_long(capsys):
    turns.announce(["baseline", "other"], heading="in turns, group 1 of 2")
    assert capsys.readouterr().out == "in turns, group 1 of 2: baseline, other\n"
    turns.announce(["a long name"] * 20)
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) <= 88 and line.endswith("…")


def test_a_step_that_is_skipped_does_not_warm_up():
    """fp16 skips steps until its scale fits. Before that, the states are missing in the peak."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    taken = []

    def skipped_twice(model, optimizer):
        taken.append(model)
        if len(taken) == 3:
            optimizer.state["made"] = {}

    turns.ReadyStep(lambda: ("model", optimizer, skipped_twice))
    assert taken == ["model"] * 3


# --- what fits ------------------------------------------------------------------------------------


def test_models_that_wait_do_not_make_the_room_smaller(monkeypatch):
    """The mistake: each model that waits is counted as memory that others take."""
    for waiting in (0, 600):
        monkeypatch.setattr(turns, "free_memory_bytes", lambda waiting=waiting: 1000 - waiting)
        assert turns.room_for_models(waiting_bytes=waiting) == 500


def test_rows_whose_models_fit_together_are_a_group():
    """The mistake: a model is left alive that no plan has counted, or a group has no baseline."""
    small = plan_of(weights=10, states=20, loss=10)  # keeps 30, 40 at its peak
    large = plan_of(weights=10, states=70, loss=10)  # keeps 80, 90 at its peak
    plans = {"baseline": small, "b": small, "c": small, "d": large, "e": small}

    def groups(mebibytes):
        return turns.groups_that_fit(plans, limit_bytes=mebibytes * MIB)

    assert groups(1000) == [["baseline", "b", "c", "d", "e"]]
    # Three small ones take 30 + 30 + 40; a small one and the large one 30 + 90.
    assert groups(120) == [["baseline", "b", "c"], ["baseline", "d"], ["baseline", "e"]]
    assert groups(100) == [["baseline", "b", "c"], ["baseline", "e"], ["d"]]
    assert groups(70) == [["baseline", "b"], ["baseline", "c"], ["baseline", "e"], ["d"]]
    assert groups(1) == [["baseline"], ["b"], ["c"], ["d"], ["e"]]


# --- what a row keeps -----------------------------------------------------------------------------


def test_a_row_keeps_the_median_and_the_range():
    """The mistake: a mean, in which one slow round counts as much as all others."""
    kept = turns.ratio_and_range([1.1, 9.0, 1.0])
    assert kept == {"ratio": 1.1, "ratio_low": 1.0, "ratio_high": 9.0}
    assert set(turns.ratio_and_range([]).values()) == {None}
