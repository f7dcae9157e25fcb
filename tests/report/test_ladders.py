"""The five ladders: what a row measures, and what follows from it."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.marks import COMPILED, mark
from recipes_lib.core.ranks.run_result import RankRun
from recipes_lib.report.ladder import Row
from recipes_lib.report.ladders import edge, speed
from recipes_lib.report.ladders.edge import EdgeLadder
from recipes_lib.report.ladders.length import LengthLadder, off_by
from recipes_lib.report.ladders.memory import MemoryLadder, ReadyStep
from recipes_lib.report.ladders.ranks import RankLadder
from recipes_lib.report.ladders.speed import SpeedLadder
from recipes_lib.report.style import MIB, RECIPE

ROWS, LENGTH = 4, 64

# --- bytes and seconds ----------------------------------------------------------------------------


def plain():
    torch.manual_seed(0)
    model = model_of_shape("tiny-llama", layers=4, device="cpu")

    def step(model, optimizer):
        ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 128
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), step


def test_climb_measures_what_was_predicted(capsys):
    """The mistake: the row pays for the models that wait, or shows the loss of another step."""
    model, optimizer, step = plain()
    losses = [step(model, optimizer)]
    del model, optimizer
    memory = MemoryLadder("steps")
    memory.climb("baseline", plain, group="alone")
    before = memory.predictions["baseline"]
    memory.climb("again", plain, group="alone")
    first, second = memory.rows
    assert first.predicted_bytes == before.peak == pytest.approx(first.peak_bytes, rel=1e-3)
    assert second.peak_bytes == pytest.approx(first.peak_bytes, rel=1e-3)
    assert memory.timelines["again"].peak == second.peak_bytes
    assert first.loss == pytest.approx(losses[0], rel=1e-6), "the weights are as they were"
    printed = " ".join(capsys.readouterr().out.split())
    assert "when backward begins" in printed and "no kind changes much" in printed
    assert "the loss is that of baseline to the last bit" in printed
    assert "s/step" not in printed, "a first time under the account is no time to quote"


def test_states_come_before_the_measured_step():
    """The mistakes: states missing in it, or of frozen weights; weights that moved; a compiler."""

    def step(model, optimizer):
        taken.append(bool(optimizer.state))
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return 1.0

    def build(optimizer_of, compiled):
        model = torch.nn.Linear(2, 2)
        mark(model, COMPILED, compiled)
        model.bias.requires_grad_(False)
        weights.append((model.weight, model.weight.detach().clone()))
        return model, optimizer_of(model.parameters()), step

    class OfItsOwn:  # no optimizer of PyTorch: a whole step makes its states
        def __init__(self, weights):
            self.state, self.param_groups = {}, [{"lr": 1.0}]

        def step(self):
            self.state["made"] = self.param_groups[0]["lr"]

    adamw = torch.optim.AdamW
    for optimizer_of, compiled, steps in (
        (adamw, False, 0),
        (adamw, True, 1),
        (OfItsOwn, False, 1),
    ):
        taken, weights = [], []
        ready = ReadyStep(partial(build, optimizer_of, compiled))
        assert len(taken) == steps and len(ready.optimizer.state) == 1
        assert torch.equal(*weights[0])
        assert ready.optimizer.param_groups[0]["lr"] > 0


def test_what_a_row_saves():
    """The mistake: a change to the row before, or a bar of another row."""
    memory = MemoryLadder("steps")
    for name, peak, seconds in (("baseline", 1000, 2.0), ("less", 250, 3.0)):
        sizes = {"peak_bytes": peak * MIB, "predicted_bytes": 950 * MIB}
        memory.append(Row(name=name, seconds=seconds, **sizes))
    less = memory["less"]
    assert (less.change, less.ratio, less.seconds) == (-0.75, 1.5, 3.0)
    assert memory["baseline"].prediction_error == pytest.approx(-0.05)
    assert memory.saved("less") == 0.75
    figure = memory.chart()
    assert figure.message == "1,000 → 250 MiB of peak memory with less"
    assert [bar.get_width() for bar in figure.axes[0].containers[0]] == [1000, 250]


# --- ranks ----------------------------------------------------------------------------------------


def test_ranks_keep_and_send_what_was_expected(capsys):
    """The mistake: terms of the budget that are mixed up, or the difference of the last loss."""
    alone = RankRun(1, [3.0, 2.0], [0.5, 0.4], 4 * MIB, 5 * MIB, 8 * MIB, 0)
    sharded = RankRun(2, [3.0 + 3e-8, 2.0], [0.3], 2 * MIB, 3 * MIB, 4 * MIB, 6 * MIB, {"send": 9})
    ranks = RankLadder("ranks")
    for name, came in (("one process", alone), ("sharded", sharded)):
        kept = {"weights": came.parameters, "gradients": came.gradients, "states": came.states}
        plan = SimpleNamespace(**kept)
        ranks.climb(name, lambda came=came: came, predicted=plan, predicted_sent=came.sent_bytes)
    assert "2.0 of weights + 3.0 of gradients + 4.0 of states = 9.0 MiB" in capsys.readouterr().out
    row = ranks["sharded"]
    assert row.kept_bytes == row.predicted_bytes == 9 * MIB
    assert row.loss_difference == pytest.approx(3e-8)
    ranks.take_turns(rounds=2)
    assert (ranks["one process"].seconds, row.ratio) == (0.4, pytest.approx(0.75))
    records = {record["metric"]: record["value"] for record in ranks.records()}
    assert (records["calls · send"], records["losses"]) == (9, sharded.losses)
    assert ranks.chart().message == "17 MiB → 9.0 MiB per rank with sharded"


# --- tokens per second ----------------------------------------------------------------------------

BANDWIDTH = 40e9


def writer(tokens):
    def build():
        return lambda new_tokens: tokens[:new_tokens]

    return build


@pytest.fixture
def speeds(monkeypatch):
    """Each call takes 10 ms for the prompt, and 1 ms for each further token."""

    def timed(write):
        tokens = write()
        return 0.01 + 0.001 * (len(tokens) - 1), tokens

    monkeypatch.setattr(speed, "timed", timed)
    return SpeedLadder("speeds", bandwidth=BANDWIDTH, rates={torch.float32: 2e11})


def test_a_token_is_timed_without_its_prompt_and_beside_its_limit(speeds, capsys):
    """The mistake: the call that reads the prompt counts as a token."""
    options = {"new_tokens": 5, "group": "small"}
    speeds.climb("fp32", writer([4, 5, 6, 7, 8]), weight_bytes=20_000_000, **options)
    speeds.climb("int8", writer([4, 5, 9, 7, 8]), weight_bytes=5_000_000, **options)
    assert "takes 0.50 ms or more at 40 GB/s" in capsys.readouterr().out
    assert speeds.facts["rates"] == {"float32": 2e11}
    speeds.take_turns(rounds=2)
    row = speeds["fp32"]
    assert (row.seconds_per_token, row.prompt_seconds) == pytest.approx((0.001, 0.01))
    assert (row.tokens_per_second, row.share_of_limit) == pytest.approx((1000, 0.5))
    # After one that differs, greedy decoding writes another text.
    assert (row.equal_tokens, speeds["int8"].equal_tokens) == (None, 2)
    speeds.set_quality("int8", SimpleNamespace(perplexity=8.25, agreement=0.9))
    assert speeds.table()[2][-2:] == ["8.25", "90%"]
    figure = speeds.chart()
    limits = [bar.get_width() for bar in figure.axes[0].containers[0]]
    assert limits == pytest.approx([2000, 8000])


def test_a_text_of_another_length_is_refused(speeds):
    """The mistake: a model that ends its text early looks fast."""
    with pytest.raises(ValueError, match="let it write 5"):
        speeds.climb("short", writer([4, 5]), new_tokens=5, weight_bytes=1)


# --- lengths --------------------------------------------------------------------------------------


def test_lengths_are_compared_with_the_crossing():
    """The mistake: the prediction is compared with the last length that was tried."""
    lengths = LengthLadder("lengths", timed_at=512, against="flash")
    same = {"loss": 2.5, "gradient_error": 0.0}
    lengths.add("baseline", tokens=3000, crossing=3100.0, peak_bytes=1, predicted=3100, **same)
    lengths.add("flash", tokens=9000, crossing=9000.0, peak_bytes=1, predicted=9900)
    lengths.set_times({"baseline": [2.0, 1.5], "flash": [1.0, 1.2]})
    assert lengths["baseline"].prediction_error == 0
    assert lengths["flash"].prediction_error == pytest.approx(0.1)
    assert lengths["flash"].times_baseline == 3.0
    assert (lengths["baseline"].ratio, lengths["flash"].ratio) == (1.5, 1.0)
    header, baseline, _ = lengths.table()
    shown = dict(zip(header, baseline, strict=True))
    assert shown["time at 512, ×"] == "1.50 (1.25–2.00)"
    assert (shown["longest"], shown["gradients off by"]) == ("3,000", "0e+00")
    assert lengths.chart().message == "The longest text that fits: 9,000 tokens"


def test_what_rounds_to_nothing_has_no_sign():
    """The mistake: "off by -0.0%"."""
    assert [off_by(error) for error in (-0.0004, 0.0126, -0.02)] == ["0.0%", "+1.3%", "-2.0%"]


def test_lengths_are_drawn_from_short_to_long():
    """The mistake: rows in the order of the search, and a colour for each of them."""
    lengths = LengthLadder("lengths", timed_at=512, against="")
    for name, tokens in (("baseline", 3000), ("long", 9000), ("between", 5000)):
        lengths.add(name, tokens=tokens, crossing=tokens, peak_bytes=1, predicted=tokens)
    (axes,) = lengths.chart(strong=("long",)).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["baseline", "between", "long"]
    assert [point.get_color() == RECIPE for point in axes.lines] == [False, False, True]


# --- devices --------------------------------------------------------------------------------------


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """`devices.climb_file(name, size, seconds)`: files of so many bytes, calls of so long."""
    monkeypatch.setattr(edge, "timed", lambda run: (run(), None))
    devices = EdgeLadder("edge")

    def climb_file(name, size, seconds, **options):
        file = tmp_path / f"{size}.pte"
        file.write_bytes(bytes(size))
        devices.climb(name, lambda: seconds, file=file, **options)

    devices.climb_file = climb_file
    return devices


def test_files_are_compared_within_their_task_and_with_the_link_before(devices):
    """The mistake: one baseline for two tasks, or a ratio to a row that is no link of the chain."""
    devices.climb_file("teacher", 4000, 0.4, accuracy=0.99, group="digits")
    devices.climb_file("student", 1000, 0.2, accuracy=0.985, group="digits", after="teacher")
    devices.climb_file("pruned", 500, 0.1, accuracy=0.98, group="digits", after="student")
    devices.climb_file("fp32", 9000, 3.0, agreement=1.0, units=10, group="text")
    devices.take_turns(rounds=2)
    pruned = devices["pruned"]
    assert (pruned.as_fast, pruned.after_ratio, pruned.share_of_first) == (4.0, 0.5, 0.125)
    assert (devices["fp32"].seconds, devices["fp32"].ratio) == (0.3, 1.0)
    records = {record["metric"]: record for record in devices.records()}
    assert records["agreement"]["row"] == "fp32" and records["after"]["value"] == "student"
