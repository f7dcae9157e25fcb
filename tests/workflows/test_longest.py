import json

import pytest
import torch

from recipes_lib import longest
from recipes_lib.core.measure import PeakMemory, dry, dry_run
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from tests.conftest import FAMILIES


def trainer(family, layers=3, **options):
    model = model_of_shape(family, layers=layers, device="cpu")
    model.set_attn_implementation(
        options.get("attention", "eager" if "gemma" in family else "sdpa")
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(tokens):
        ids = torch.ones(1, tokens, dtype=torch.long)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(4)
    return model, step, optimizer.zero_grad


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_dry_run_counts_the_bytes_of_a_real_one(family, attention):
    if "gemma" in family:
        attention = "eager"  # no other kernel has its soft cap
    peaks = {}
    for kind in ("real", "dry"):
        if kind == "dry":
            with dry_run():
                _, step, clear = trainer(family, attention=attention)
                peaks[kind] = longest.peak_of(step, clear)(301)
        else:
            with PeakMemory() as before:
                pass
            model, step, clear = trainer(family, attention=attention)
            peaks[kind] = longest.peak_of(step, clear)(301) - before.peak
    assert peaks["dry"] == pytest.approx(peaks["real"], abs=100_000, rel=0.002)


def test_a_dry_run_has_no_data_and_ends():
    with dry_run():
        assert dry()
        huge = torch.empty(2**50)  # four petabytes
        with PeakMemory() as memory:
            twice = torch.cat([huge, huge])
        assert memory.peak >= 3 * huge.nbytes and twice.shape == (2**51,)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            huge[0].item()
    assert not dry() and torch.ones(2).sum().item() == 2


def cubic(tokens):
    return 1000 + tokens**3


@pytest.mark.parametrize("start", [1, 60, 99, 100, 101, 170, 5000])
def test_bisection_finds_the_longest_from_any_guess(start):
    found = longest.find_longest(cubic, limit_bytes=1000 + 100**3, start=start, resolution=0.001)
    assert found.tokens == 100 and found.peak_bytes == 1000 + 100**3
    assert found.peaks[101] > found.limit_bytes


def test_bisection_within_the_resolution_and_with_few_steps():
    found = longest.find_longest(cubic, limit_bytes=1000 + 10_000**3, start=10_100, resolution=0.01)
    assert 9_900 <= found.tokens <= 10_000
    assert len(found.peaks) <= 4
    assert len(longest.find_longest(cubic, limit_bytes=1000 + 10_000**3, start=10_050).peaks) == 2


@pytest.mark.parametrize(("start", "most"), [(1, 1), (5, 90), (90, 90), (1, 2**30)])
def test_where_everything_fits_the_most_is_the_result(start, most):
    assert (
        longest.find_longest(lambda tokens: 8, limit_bytes=8, start=start, most=most).tokens == most
    )
    found = longest.find_longest(
        cubic, limit_bytes=1000 + 100**3, start=start, resolution=0.001, most=most
    )
    assert found.tokens == min(most, 100)


def test_running_out_of_memory_is_a_length_that_does_not_fit():
    cleared = []

    def step(tokens):
        if tokens > 37:
            raise torch.OutOfMemoryError("full")

    peak = longest.peak_of(step, lambda: cleared.append(1), limit_bytes=2**40)
    found = longest.find_longest(peak, limit_bytes=2**40, start=50)
    assert found.tokens == 37 and found.peaks[38] is None and cleared


def test_a_real_search_under_an_emulated_limit():
    model, step, clear = trainer("tiny-llama")
    with PeakMemory() as now:
        pass
    limit = now.current + 3 * 2**20
    found = longest.find_longest(
        longest.peak_of(step, clear, limit_bytes=limit), limit_bytes=limit, start=100
    )
    assert 100 < found.tokens < 2000
    peak = longest.peak_of(step, clear)
    assert peak(found.tokens) <= limit < peak(int(1.02 * found.tokens) + 1)


def test_a_search_goes_on_after_a_backward_that_ran_out_of_memory():
    """The optimizer has stepped for some weights by then."""
    model = apply_activation_checkpointing(model_of_shape("tiny-llama", layers=3, device="cpu"))
    optimizer = apply_optimizer_in_backward(model, lr=1e-5)

    def step(tokens):
        ids = torch.ones(1, tokens, dtype=torch.long)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    step(4)
    with PeakMemory() as now:
        pass
    limit = now.current + 3 * 2**20
    found = longest.find_longest(
        longest.peak_of(step, optimizer.zero_grad, limit_bytes=limit), limit_bytes=limit, start=3000
    )
    assert found.peaks[3000] is None and found.tokens > 100


def test_where_the_bytes_reach_the_limit():
    search = longest.Search(100, 1000, {100: 900, 110: 1100, 500: 9000})
    assert search.crossing == 105
    assert longest.Search(100, 1000, {100: 900, 110: None}).crossing == 100


def test_prediction_is_the_largest_length_of_the_arithmetic():
    model = model_of_shape("tiny-llama", device="meta")
    plan = lambda tokens: budget_of(model, batch_size=1, seq_len=tokens)  # noqa: E731
    tokens = longest.predicted_longest(plan, limit_bytes=50 * 2**20)
    assert plan(tokens).peak <= 50 * 2**20 < plan(tokens + 1).peak
    with pytest.raises(ValueError, match="two tokens are predicted to take"):
        longest.predicted_longest(plan, limit_bytes=1000)


def test_bad_input():
    with pytest.raises(ValueError, match="not even one token fits"):
        longest.find_longest(cubic, limit_bytes=10, start=8)
    wrong = (
        {"start": 0},
        {"start": 9, "most": 8},
        {"start": 1, "resolution": 0},
        {"start": 1, "resolution": 1},
    )
    for options in wrong:
        with pytest.raises(ValueError, match="1 token or more and at `most`"):
            longest.find_longest(cubic, limit_bytes=10, **options)


def found(tokens):
    return longest.Search(tokens, 2**20, {tokens: 2**20})


def test_ladder_of_lengths(tmp_path):
    ladder = longest.LengthLadder("lengths", folder=tmp_path)
    ladder.add("plain", found(100), predicted=105, loss=3.0)
    ladder.add("better", found(2000), predicted=1900, loss=3.00001)
    with pytest.raises(ValueError, match="already has a row 'better'"):
        ladder.add("better", found(1), predicted=1)
    assert ladder.table()[2][6] == ""
    ladder.retime("plain", 2.0)
    ladder.retime("better", 3.0)
    assert ladder.gain("better") == 20
    assert (
        ladder.line("better")
        == "better: expected 1,900 tokens, found 2,000, 20.0× the baseline; loss 3.00001"
    )
    assert ladder.table()[2] == [
        "better",
        "1,900",
        "2,000",
        "-5.0%",
        "20.00",
        "20.0",
        "1.50×",
        "3.00001",
    ]
    assert [row["tokens"] for row in json.loads(ladder.path.read_text())["rows"]] == [100, 2000]
    assert "longest found" in str(ladder) and "<td>better</td>" in ladder._repr_html_()
    assert [bar.get_width() for bar in ladder.chart().axes[0].patches] == [100, 2000]


def test_charts():
    curves = {
        "square": {10: 110, 100: 10_010, 1000: 10**6 + 10},
        "line": {10: 20, 100: 110, 1000: 1010},
    }
    assert longest.slope(curves["square"], 10) == pytest.approx(2)
    figure = longest.growth_chart(curves, fixed_bytes=10, limit_bytes=10**6)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["square: slope 2.00", "line: slope 1.00", "the limit: 0.0 GiB"]
    figure = longest.position_chart({"plain": [3.0, 4.0]}, window=512, trained=512, title="texts")
    assert list(figure.axes[0].lines[0].get_xdata()) == [256, 768]
