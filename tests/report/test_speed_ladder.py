"""The ladder of speeds: limits by arithmetic, rounds by a clock that the test turns."""

import json
import weakref
from types import SimpleNamespace

import pytest
import torch

from recipes_lib.report import speed_ladder
from recipes_lib.report.speed_ladder import Phases, SpeedLadder, equal_tokens

BANDWIDTH = 40e9
TEXT = [4, 5, 6, 7, 8]  # the first token comes from the prompt, four from calls of their own


@pytest.fixture
def clock(monkeypatch):
    """Seconds pass only where a test lets them.

    `clock.take[name]` is what the next text takes behind its prompt, `clock.prompt` the prompt.
    """
    clock = SimpleNamespace(take={}, prompt=0.0, built=[])

    def timed(call):
        if isinstance(call, Phases):
            return 0.0, call()  # what it takes by itself
        (new_tokens,) = call.args
        tokens = call()
        if new_tokens == 1:
            return clock.prompt, tokens
        seconds = clock.take[call.func.name]
        if isinstance(seconds, list):
            seconds = seconds.pop(0)
        return clock.prompt + seconds, tokens

    monkeypatch.setattr(speed_ladder, "timed", timed)
    monkeypatch.setattr("recipes_lib.report.turns.timed", timed)
    return clock


@pytest.fixture
def ladder(tmp_path, clock):
    return SpeedLadder("speeds", bandwidth=BANDWIDTH, folder=tmp_path)


def writer(clock, name, tokens=TEXT):
    """A build whose `write` writes these tokens."""

    class Write:
        def __call__(self, new_tokens):
            return torch.tensor(tokens[:new_tokens])

    def build():
        clock.built.append(name)
        write = Write()
        write.name = name
        return write

    return build


def climb(ladder, clock, name, seconds, *, tokens=TEXT, weight_bytes=400_000_000, **options):
    clock.take[name] = seconds
    build = writer(clock, name, tokens)
    options = {"new_tokens": len(TEXT)} | options
    ladder.climb(name, build, weight_bytes=weight_bytes, **options)


def test_a_row_says_what_it_reads_and_how_near_the_limit_it_comes(ladder, clock, capsys):
    """The mistake: seconds of a whole run, its prompt among them, or a share upside down."""
    clock.prompt = 3.0
    climb(ladder, clock, "fp32", 0.16)  # four calls
    row = ladder["fp32"]
    assert row.prompt_seconds == 3.0
    assert row.seconds_per_token == pytest.approx(0.04)
    assert row.tokens_per_second == pytest.approx(25)
    assert row.gigabytes_per_second == pytest.approx(10)
    assert row.share_of_limit == pytest.approx(0.25)
    assert row.equal_tokens is None, "the first row is not compared with itself"
    printed = " ".join(capsys.readouterr().out.split())
    assert "a token reads 400 MB, so it takes 10.0 ms or more at 40 GB/s" in printed
    assert "the prompt took 3,000 ms, each token after the first 40.0 ms" in printed
    assert "(25 tokens/s), 25% of the limit" in printed


def test_tokens_are_counted_up_to_the_first_that_differs(ladder, clock):
    """The mistake: tokens that agree by chance after the texts went apart."""
    climb(ladder, clock, "fp32", 0.16)
    climb(ladder, clock, "int8", 0.08, tokens=[4, 5, 0, 7, 8])
    assert ladder["int8"].equal_tokens == 2
    assert "2/5" in ladder.table()[2]
    assert equal_tokens([], []) == 0


def test_rows_are_compared_within_their_group_and_round(ladder, clock):
    """The mistakes: the first row of all, medians of different rounds, a ratio upside down."""
    climb(ladder, clock, "small", 0.16, group="small model")
    climb(ladder, clock, "large", 0.16, group="large model")
    climb(ladder, clock, "large, int8", 0.16, group="large model")
    clock.take |= {"small": 0.4, "large": [4.0, 8.0, 8.0], "large, int8": [1.0, 4.0, 2.0]}
    ladder.take_turns(rounds=3)
    row = ladder["large, int8"]
    assert (row.ratio_low, row.ratio, row.ratio_high) == (2.0, 4.0, 4.0)
    assert row.seconds_per_token == pytest.approx(2.0 / 4)
    assert (row.seconds_low, row.seconds_high) == (0.25, 1.0)
    assert row.tokens_per_second == pytest.approx(2)
    assert (row.tokens_per_second_low, row.tokens_per_second_high) == (1.0, 4.0)
    assert row.share_of_limit == pytest.approx(0.01 / 0.5)
    assert row.turns == 3
    assert ladder["small"].seconds_per_token == pytest.approx(0.1)
    saved = json.loads(ladder.path.read_text())
    assert saved["rows"][2]["ratio"] == 4.0
    assert saved["facts"]["bandwidth"] == BANDWIDTH


def test_models_wait_for_their_turns_and_are_free_afterwards(ladder, clock, monkeypatch):
    """The mistakes: every row is built twice, or models that do not fit stay alive together."""
    for name in ("a", "b", "c"):
        climb(ladder, clock, name, 0.16)
    ladder.take_turns(rounds=1)
    assert clock.built == ["a", "b", "c"], "nothing is built again while there is room"
    assert not ladder._ready
    with pytest.raises(ValueError, match="no row can take turns"):
        ladder.take_turns()

    # Room for two models: half of what is free.
    def free():
        return 4 * 400_000_000 - ladder._waiting_bytes()

    monkeypatch.setattr("recipes_lib.report.turns.free_memory_bytes", free)
    clock.built.clear()
    most = []
    original = speed_ladder.take_turns

    def watched(steps, *, rounds):
        most.append(len(ladder._ready))
        return original(steps, rounds=rounds)

    monkeypatch.setattr(speed_ladder, "take_turns", watched)
    for name in ("d", "e", "f"):
        climb(ladder, clock, name, 0.16)
    ladder.take_turns(rounds=1)
    assert max(most) == 2
    assert [ladder[name].turns for name in "def"] == [1, 1, 1]
    assert ladder["a"].turns == 4, "the first row takes part in every part"


def test_models_that_builds_hold_are_free_after_the_turns(ladder, clock):
    """A notebook's build often returns a decoder that is there already, and holds it."""
    models = {}
    for name in ("fp32", "int8"):
        build = writer(clock, name)
        build.model = torch.nn.Linear(1, 1)
        models[name] = weakref.ref(build.model)
        clock.take[name] = 0.16
        ladder.climb(name, build, new_tokens=len(TEXT), weight_bytes=400_000_000)
    del build
    ladder.take_turns(rounds=1)
    assert models["int8"]() is None
    assert models["fp32"]() is not None, "later rows are compared with the first"


def test_quality_stands_beside_the_speed(ladder, clock):
    climb(ladder, clock, "fp32", 0.16)
    climb(ladder, clock, "int8", 0.04, tokens=TEXT, weight_bytes=100_000_000)
    ladder.set_quality("int8", SimpleNamespace(perplexity=8.036, agreement=0.945, tokens=100))
    header, _, cells = ladder.table()
    shown = dict(zip(header, cells, strict=True))
    assert shown["perplexity"] == "8.04"
    assert shown["agreement"] == "94.5%"
    assert shown["× first"] == "4.00×"
    assert shown["MB read"] == "100"
    assert ladder.line("int8") == (
        "int8: the prompt took 0 ms, each token after the first 10.0 ms (100 tokens/s), "
        "25% of the limit, 4.00× as fast as fp32; tokens 5/5 equal"
    )
    assert "<td>int8</td>" in ladder._repr_html_()
    with pytest.raises(KeyError, match="no row 'int4'"):
        ladder.set_quality("int4", SimpleNamespace(perplexity=8.0, agreement=1.0))


def test_what_cannot_be_compared_is_refused(ladder, clock, tmp_path):
    climb(ladder, clock, "fp32", 0.16)
    with pytest.raises(ValueError, match="short wrote 3 tokens of 5: let it write as many"):
        climb(ladder, clock, "short", 0.1, tokens=[5, 6, 7])
    with pytest.raises(ValueError, match="new_tokens=3: give 5, as the first row of this group"):
        climb(ladder, clock, "shorter", 0.1, new_tokens=3)
    with pytest.raises(ValueError, match="new_tokens=1: give a whole number"):
        climb(ladder, clock, "nothing", 0.1, new_tokens=1, group="other")
    with pytest.raises(ValueError, match="weight_bytes=0: give a whole number"):
        climb(ladder, clock, "no weights", 0.1, weight_bytes=0)
    with pytest.raises(ValueError, match="already has a row 'fp32'"):
        climb(ladder, clock, "fp32", 0.1)
    with pytest.raises(ValueError, match="bandwidth=0: give a finite number above 0"):
        SpeedLadder("speeds", bandwidth=0, folder=tmp_path)
    assert [row.name for row in ladder.rows] == ["fp32"], "what was refused left no row behind"


def test_the_chart_draws_each_bar_inside_its_limit(ladder, clock):
    climb(ladder, clock, "fp32", 0.16)
    climb(ladder, clock, "int8", 0.08, weight_bytes=100_000_000)
    ladder.take_turns(rounds=1)
    bars, _share = ladder.chart().axes
    widths = [bar.get_width() for bar in bars.patches]
    assert widths == pytest.approx([100, 400, 25, 50]), "two limits, and two speeds before them"
