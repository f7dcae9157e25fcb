"""The ladder of bytes: what its table compares, and that its file is whole after every row."""

import gc
import json
import weakref

import pytest
import torch

from recipes_lib.core.measure import Measurement
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict.budget import TERMS, Budget, Shape
from recipes_lib.core.predict.operations import step_operations
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.fine_tuning.lora import apply_lora, estimate_lora
from recipes_lib.memory.activation_checkpointing import (
    apply_activation_checkpointing,
    estimate_activation_checkpointing,
)
from recipes_lib.report import turns
from recipes_lib.report.ladder import Ladder
from recipes_lib.report.ladder_text import HEADER, what_changes
from recipes_lib.report.style import MIB


@pytest.fixture
def ladder(tmp_path):
    ladder = Ladder("steps", folder=tmp_path)
    ladder.add("baseline", Measurement(2.0, 1000 * MIB, 500), predicted=950 * MIB, loss=3.5)
    ladder.add("half", Measurement(4.0, 500 * MIB, 500), predicted=525 * MIB, loss=3.5)
    ladder.add("less", Measurement(4.0, 250 * MIB, None), predicted=250 * MIB)
    return ladder


def test_table_compares_with_the_baseline(ladder):
    """The mistake: a row is compared with the one above it, which may be another story."""
    header, *rows = ladder.table()
    first, second, third = [dict(zip(header, row, strict=True)) for row in rows]
    # Nobody measured a rate, so no row has a share of the limit: a column without an entry goes.
    assert header == [each for each in HEADER if each != "of limit"]
    assert (first["change"], first["time"]) == ("", "1.00×")
    assert (second["change"], second["time"], second["s/step"]) == ("-50%", "2.00×", "4.00")
    assert third["change"] == "-75%"
    assert third["loss"] == ""  # it was not given
    assert ladder.saved("less") == 0.75


def test_text_and_html_show_every_row(ladder):
    for shown in (str(ladder), ladder._repr_html_()):
        assert all(name in shown for name in ("baseline", "half", "less", "1,000 MiB"))


def test_without_rows_the_header_is_left(tmp_path):
    """The mistake: where no row has an entry, every column was taken for an empty one."""
    assert Ladder("none", folder=tmp_path).table() == [HEADER]
    assert "<table" in Ladder("none", folder=tmp_path)._repr_html_()


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
        "half: predicted 525 MiB, measured 500 MiB (-50% against the baseline), "
        "4.00 s per step, loss 3.5000"
    )
    assert ladder.line("baseline", timed=False) == (
        "baseline: predicted 950 MiB, measured 1,000 MiB, loss 3.5000"
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
    # The machine is slower in the second round, and a step of this row has fewer tokens.
    ladder.retime("baseline", [4.0, 8.0, 4.0], tokens=1200)
    ladder.retime("half", [3.0, 6.2, 2.8], tokens=600)
    after = ladder["half"]
    assert (after.seconds, after.tokens_per_second) == (3.0, 200.0)
    assert (after.ratio, after.ratio_low, after.ratio_high) == pytest.approx((1.5, 1.4, 1.55))
    assert (after.seconds_low, after.seconds_high, after.turns) == (2.8, 6.2, 3)
    assert after.peak_bytes == before.peak_bytes
    assert [row.name for row in ladder.rows] == ["baseline", "half", "less"]
    assert json.loads(ladder.path.read_text())["rows"][1]["seconds"] == 3.0
    with pytest.raises(KeyError, match="no row 'third'"):
        ladder.retime("third", [1.0, 1.0, 1.0], tokens=1)
    with pytest.raises(ValueError, match="'less' has 1 rounds and the first row 3"):
        ladder.retime("less", [1.0], tokens=1)


def test_chart_shows_peaks_and_seconds_of_all_rows(ladder):
    memory, time = ladder.chart().axes
    assert [round(bar.get_width()) for bar in memory.patches] == [1000, 500, 250]
    assert [bar.get_width() for bar in time.patches] == [2.0, 4.0, 4.0]


# --- climb ----------------------------------------------------------------------------------------

SHAPE = Shape(batch=4, seq=64)
RATE = 1e9


def fresh():
    torch.manual_seed(0)
    return model_of_shape("tiny-llama", layers=8, device="cpu")


def plain_step(model, optimizer):
    ids = torch.arange(SHAPE.tokens).view(SHAPE.batch, SHAPE.seq) % 128
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def training(model):
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), plain_step


def plain():
    return training(fresh())


def checkpointed():
    return training(apply_activation_checkpointing(fresh()))


def adapted():
    return training(apply_lora(fresh(), rank=4, alpha=8))


@pytest.fixture
def climbing(tmp_path):
    rates = {torch.float32: RATE}
    return Ladder("steps", folder=tmp_path, tokens=SHAPE.tokens, rates=rates)


def test_climb_measures_what_was_predicted(climbing):
    model = fresh()
    plan = budget_of(model, SHAPE)
    operations = step_operations(model, SHAPE)
    del model
    climbing.climb("baseline", plain, predicted=plan, group="alone", dtype=torch.float32)
    row = climbing["baseline"]
    assert row.predicted_bytes == plan.peak == pytest.approx(row.peak_bytes, rel=0.05)
    assert climbing.timelines["baseline"].peak == row.peak_bytes
    assert climbing.plans["baseline"] == plan
    assert row.operations == operations
    assert row.share_of_limit == pytest.approx(operations / RATE / row.seconds)
    assert row.tokens_per_second == SHAPE.tokens / row.seconds
    saved = json.loads(climbing.path.read_text())
    assert saved["rows"][0]["group"] == "alone"
    assert saved["facts"]["rates"] == {"float32": RATE}


def test_the_loss_is_that_of_the_second_step(climbing):
    """AdamW makes its states in the first. A loss of another step compares unlike with unlike."""
    model, optimizer, step = plain()
    losses = [step(model, optimizer) for _ in range(2)]
    climbing.climb("baseline", plain, predicted=budget_of(model, SHAPE))
    row = climbing["baseline"]
    assert row.loss == pytest.approx(losses[1], rel=1e-6)


def watched(alive):
    """A plain build; `alive` gets a weak reference to each model that it makes."""

    def build():
        model, optimizer, step = plain()
        alive.append(weakref.ref(model))
        return model, optimizer, step

    return build


def test_what_waits_for_its_turn_is_not_in_the_next_row(climbing):
    """The mistake: the ladder keeps the model for the turns, and the next row pays for it."""
    plan = budget_of(fresh(), SHAPE)
    climbing.climb("baseline", plain, predicted=plan)
    climbing.climb("again", plain, predicted=plan)
    first, second = climbing.rows
    assert second.peak_bytes == pytest.approx(first.peak_bytes, rel=1e-3)
    points = climbing.timelines["baseline"].points, climbing.timelines["again"].points
    for before, after in zip(*points, strict=True):
        assert after.bytes == pytest.approx(before.bytes, abs=1e-3 * first.peak_bytes)


def test_the_model_is_built_once_and_dies_after_its_turns(climbing):
    alive = []
    climbing.climb("baseline", watched(alive), predicted=budget_of(fresh(), SHAPE))
    climbing.take_turns(rounds=1)
    gc.collect()
    assert [model() for model in alive] == [None]


def test_without_room_a_model_dies_before_the_next_is_built(climbing, monkeypatch):
    """The mistake: models wait for their turns until the memory is full."""
    alive = []
    plan = budget_of(fresh(), SHAPE)
    monkeypatch.setattr(turns, "free_memory_bytes", lambda: 2 * plan.peak)
    climbing.climb("baseline", watched(alive), predicted=plan)

    def other():
        assert alive[0]() is None
        return plain()

    climbing.climb("other", other, predicted=plan)
    climbing.take_turns(rounds=1)
    assert [row.turns for row in climbing.rows] == [1, 1]


def test_climb_says_what_moved_and_whose_loss_it_is(climbing, capsys):
    model = fresh()
    plan = budget_of(model, SHAPE)
    climbing.climb("baseline", plain, predicted=plan)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  the peak is when backward begins"
    assert lines[2].startswith("  measured 1") and "loss 4." in lines[2]

    kept = estimate_activation_checkpointing(plan, model, SHAPE)
    climbing.climb("activation checkpointing", checkpointed, predicted=kept)
    text = " ".join(capsys.readouterr().out.split())
    assert "activations 10 → 2 MiB; the peak moves to: backward enters the first block" in text
    assert "the baseline's to the last bit" in text

    adapters = estimate_lora(plan, model, SHAPE, rank=4)
    after = "activation checkpointing"
    climbing.climb("LoRA", adapted, predicted=adapters, after=after)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 88 for line in lines)
    assert "against that of activation checkpointing" in " ".join(" ".join(lines).split())


def test_terms_that_are_alive_at_neither_peak_are_not_named():
    """`last_gradients` of a plan without that moment would only be noise."""
    old = plan_of(activations=100, last_gradients=50)
    new = plan_of(activations=60, last_gradients=0)
    text = what_changes(old, new)
    assert text == "activations 100 → 60 MiB; the peak stays at: backward begins"
    same = what_changes(old, old.change(activations=old.activations - 1))
    assert same.startswith("no term changes by more than 1% of the peak")


# --- turns ----------------------------------------------------------------------------------------


def plan_of(**mebibytes):
    terms = dict.fromkeys(TERMS, 0)
    return Budget(**terms | {name: size * MIB for name, size in mebibytes.items()})


class Named(torch.nn.Linear):
    def __init__(self, name):
        super().__init__(1, 1)
        self.name = name


def step_that(name, *, fails_from=10**6):
    """A build of a step that takes no time, and fails after a while."""
    taken = []

    def step(model, optimizer):
        taken.append(name)
        if len(taken) > fails_from:
            raise RuntimeError("out of memory")
        return 1.0

    def build():
        optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
        optimizer.state["made"] = {}
        return Named(name), optimizer, step

    return build


@pytest.fixture
def clock(monkeypatch):
    """The seconds of each step in its turn, in the order of the rounds."""
    seconds = {}

    def timed(step):
        step()
        return seconds[step.model.name].pop(0), None

    monkeypatch.setattr(turns, "timed", timed)
    return seconds


def test_time_is_compared_within_a_round(climbing, clock):
    """The machine is half as fast in the second round: no recipe may pay for that."""
    clock |= {"baseline": [1.0, 2.0, 1.0], "other": [1.1, 2.2, 1.2]}
    for name in clock:
        climbing.climb(name, step_that(name), predicted=plan_of(weights=1))
    climbing.take_turns(rounds=3)
    row = climbing["other"]
    assert (row.seconds, row.seconds_low, row.seconds_high, row.turns) == (1.2, 1.1, 2.2, 3)
    assert (row.ratio, row.ratio_low, row.ratio_high) == pytest.approx((1.1, 1.1, 1.2))
    assert row.tokens_per_second == SHAPE.tokens / 1.2
    assert climbing.table()[2][HEADER.index("time")] == "1.10× (1.10–1.20)"
    assert climbing.table()[1][HEADER.index("time")] == "1.00× (1.00–2.00)"
    assert json.loads(climbing.path.read_text())["rows"][1]["seconds"] == 1.2


def test_a_row_that_fails_keeps_its_first_time(climbing, clock, capsys):
    """The warm-up and the step under the account are two steps: the first turn is the third."""
    clock |= {"baseline": [1.0, 1.0], "fails": [1.0, 1.0], "other": [3.0, 3.0]}
    climbing.climb("baseline", step_that("baseline"), predicted=plan_of(weights=1))
    climbing.climb("fails", step_that("fails", fails_from=2), predicted=plan_of(weights=1))
    climbing.climb("other", step_that("other"), predicted=plan_of(weights=1))
    first = climbing["fails"].seconds
    climbing.take_turns(rounds=2)
    assert climbing["fails"].seconds == first
    assert climbing["fails"].turns == 0
    assert climbing["other"].ratio == 3.0
    assert "fails takes no more turns: RuntimeError: out of memory" in capsys.readouterr().out


def test_an_interrupted_run_keeps_its_finished_rounds(climbing, clock, monkeypatch):
    """The mistake: the file is written when all rounds are done."""
    clock |= {"baseline": [5.0, KeyboardInterrupt]}
    climbing.climb("baseline", step_that("baseline"), predicted=plan_of(weights=1))

    def stopped(step):
        seconds = clock["baseline"].pop(0)
        if seconds is KeyboardInterrupt:
            raise KeyboardInterrupt
        return seconds, None

    monkeypatch.setattr(turns, "timed", stopped)
    with pytest.raises(KeyboardInterrupt):
        climbing.take_turns(rounds=2)
    assert json.loads(climbing.path.read_text())["rows"][0]["seconds"] == 5.0


def test_later_rows_take_their_turns_with_the_baseline(climbing, clock):
    """The mistake: rows that had their turns are timed again, or the baseline forgets its own."""
    clock |= {"baseline": [1.0, 1.0, 2.0], "early": [3.0, 3.0], "late": [3.0]}
    for name in ["baseline", "early"]:
        climbing.climb(name, step_that(name), predicted=plan_of(weights=1))
    climbing.take_turns(rounds=2)
    climbing.climb("late", step_that("late"), predicted=plan_of(weights=1))
    climbing.take_turns(rounds=1)
    assert [row.turns for row in climbing.rows] == [3, 2, 1]
    assert [row.ratio for row in climbing.rows] == [1.0, 3.0, 1.5]


def test_a_profile_is_taken_while_the_model_is_alive(climbing):
    climbing.climb("baseline", plain, predicted=budget_of(fresh(), SHAPE))
    with pytest.raises(ValueError, match="rows that take turns now"):
        climbing.take_turns(rounds=1, profile=["other"])
    climbing.take_turns(rounds=1, profile=["baseline"])
    assert climbing.profiles["baseline"]["matrix products"] > 0


def test_turns_without_a_build(ladder):
    with pytest.raises(ValueError, match="no row can take turns"):
        ladder.take_turns()


# --- groups ---------------------------------------------------------------------------------------


def test_groups_have_a_heading(tmp_path):
    """Before the first row of each group, once, as wide as the table."""
    ladder = Ladder("steps", folder=tmp_path)
    for name, group in [("baseline", "alone"), ("half", "alone"), ("all", "<together>")]:
        ladder.add(name, Measurement(1.0, MIB, 10), predicted=MIB, group=group)
    lines = str(ladder).splitlines()
    assert lines[2].startswith("alone ──") and lines[5].startswith("<together> ──")
    assert len(lines) == 2 + 3 + 2
    page = ladder._repr_html_()
    assert page.count("colspan") == 2
    assert "&lt;together&gt;" in page


def test_bad_input(ladder, tmp_path):
    with pytest.raises(ValueError, match="already has a row 'half'"):
        ladder.add("half", Measurement(1.0, 1, 1), predicted=1)
    with pytest.raises(ValueError, match="plain file name"):
        Ladder("../steps", folder=tmp_path)
    with pytest.raises(KeyError, match="no row 'none'"):
        ladder["none"]
