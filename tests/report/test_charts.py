"""What the charts of bars draw, read back from the figures."""

import pytest
from matplotlib.colors import to_hex

from recipes_lib.core.predict.budget import Budget
from recipes_lib.report.charts import budget_chart, chart, length_chart, operator_chart, time_ratio
from recipes_lib.report.style import GIB, MIB, RECIPE, REFERENCE, TERMS


def row(name, peak, predicted, seconds, **more):
    sizes = {"peak_bytes": peak * MIB, "predicted_bytes": predicted * MIB}
    return {"name": name, **sizes, "seconds": seconds, **more}


def texts(axes):
    return [text.get_text() for text in axes.texts]


def names(axes):
    return {label.get_text(): label.get_position()[1] for label in axes.get_yticklabels()}


def widths(axes):
    """Where each bar ends, by its place: bars that do not start at zero would end elsewhere."""
    return {bar.get_y() + bar.get_height() / 2: bar.get_width() for bar in axes.patches}


def test_chart_draws_each_row_at_its_name_from_zero():
    """Catches a heading that takes the place of a row, a cut axis, a tick on another row."""
    rows = [row("baseline", 1000, 950, 2.0, group="alone"), row("half", 500, 525, 14.0, group="b")]
    memory, time = chart(rows).axes
    places = names(memory)
    assert [*places] == ["baseline", "half", "alone", "b"]
    assert places["alone"] < places["baseline"] < places["b"] < places["half"]
    assert widths(memory) == {places["baseline"]: 1000, places["half"]: 500}
    assert widths(time) == {places["baseline"]: 2.0, places["half"]: 14.0}
    for axes in (memory, time):
        assert axes.get_xlim()[0] == 0 and axes.get_xscale() == "linear"
    ticks = {line.get_ydata().mean(): line.get_xdata()[0] for line in memory.get_lines()}
    assert ticks == {places["baseline"]: 950, places["half"]: 525}
    assert texts(memory) == ["1,000", "500  (-50%)"]
    assert memory.texts[1].xy[0] == 525, "the text stands beside the tick where that is further"
    assert texts(time) == ["2.00", "14.0  7.00×"]


def test_chart_shows_the_spread_and_ranks_nothing_within_it():
    """Catches ends of a whisker that are swapped, and a ratio for a difference that is noise."""
    spread = [(2.0, 1.8, 2.5), (2.3, 2.2, 2.9), (5.0, 4.0, 5.1)]
    rows = [
        row(str(number), 100, 100, middle, seconds_low=low, seconds_high=high)
        for number, (middle, low, high) in enumerate(spread)
    ]
    _, time = chart(rows).axes
    ends = [bars.get_segments()[0][:, 0].tolist() for bars in time.collections[:3]]
    assert ends == [pytest.approx([low, high]) for _, low, high in spread]
    assert texts(time) == ["2.00", "2.30  ≈", "5.00  2.50×"]
    assert time.texts[0].xy[0] == 2.5, "the text does not lie on the whisker"


def test_a_ratio_of_turns_decides_before_the_seconds_do():
    """Catches a slow quarter of an hour of the machine that reads like a slow recipe."""
    first = row("a", 9, 9, 2.0, seconds_low=1.9, seconds_high=2.1)
    slow = row("b", 9, 9, 3.0, seconds_low=2.9, seconds_high=3.1)
    assert time_ratio(slow, first) == "1.50×"
    turns = {"ratio": 1.02, "ratio_low": 0.97, "ratio_high": 1.08}
    assert time_ratio(slow | turns, first) == "≈"
    assert time_ratio(slow | turns | {"ratio_low": 1.01}, first) == "1.02×"
    assert time_ratio(row("old", 9, 9, 4.0), row("first", 9, 9, 2.0)) == "2.00×"


def test_chart_leaves_a_share_out_that_nobody_knows():
    """Catches an unknown share that reads as zero."""
    rows = [row("a", 9, 9, 1, share_of_limit=0.75), row("b", 9, 9, 1, share_of_limit=None)]
    _, _, share = chart(rows).axes
    assert texts(share) == ["75%"]
    assert [bar.get_width() for bar in share.patches] == [0.75]
    assert len(chart([row("a", 9, 9, 1)]).axes) == 2, "a panel without any number"


def budgets():
    terms = dict.fromkeys(("carried", "block_gradients", "last_gradients"), 0)
    terms |= {"weights": 10 * MIB, "states": 20 * MIB, "loss": 8 * MIB, "one_block": 3 * MIB}
    forward = Budget(**terms, gradients=5 * MIB, activations=40 * MIB, embedding_gradient=MIB)
    backward = Budget(**terms, gradients=50 * MIB, activations=0, embedding_gradient=4 * MIB)
    return {"a": forward, "b": backward}


def test_budget_chart_stacks_what_is_alive_at_the_peak():
    """Catches terms of different moments on top of each other, and a term without a colour."""
    (axes,) = budget_chart(budgets()).axes
    colors = {color: term for term, color in TERMS.items()}
    for name, place in names(axes).items():
        bars = [bar for bar in axes.patches if bar.get_y() < place < bar.get_y() + bar.get_height()]
        drawn = {colors[to_hex(bar.get_facecolor())]: bar.get_width() for bar in bars}
        wanted = {term: size / MIB for term, size in budgets()[name].at_peak().items()}
        assert {term: size for term, size in drawn.items() if size} == pytest.approx(
            {term: size for term, size in wanted.items() if size}
        )
        ends = [bar.get_x() + bar.get_width() for bar in bars]
        assert max(ends) * MIB == pytest.approx(budgets()[name].peak)
    assert {"78", "84"} <= set(texts(axes)), "each bar ends with its sum"


def test_every_term_of_a_budget_has_a_color():
    """Catches a term that is counted in the peak and missing in the picture."""
    for moment in budgets()["a"].moments().values():
        assert {"weights", "states", *moment} <= set(TERMS)


def test_budget_chart_of_a_large_model_counts_in_gib():
    """Catches labels of six digits, and a limit that is drawn in another unit than the bars."""
    large = {
        name: Budget(**{term: 800 * size for term, size in budget.terms().items()})
        for name, budget in budgets().items()
    }
    (axes,) = budget_chart(large, limits={"24 GiB": 24 * GIB}).axes
    assert "GiB" in axes.get_title(loc="left")
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == pytest.approx(65.6, abs=1)
    (limit,) = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert limit.get_xdata()[0] == 24


def test_operator_chart_keeps_the_seconds_of_each_row():
    """Catches a kind that only one row has, and what is left over in the middle of the bars."""
    profiles = {"a": {"other": 3.0, "matrix products": 2.0}, "b": {"casts": 1.0, "other": 0.5}}
    (axes,) = operator_chart(profiles).axes
    for name, place in names(axes).items():
        bars = [bar for bar in axes.patches if bar.get_y() < place < bar.get_y() + bar.get_height()]
        assert sum(bar.get_width() for bar in bars) == pytest.approx(sum(profiles[name].values()))
        assert bars[-1].get_width() == profiles[name]["other"]
        assert to_hex(bars[-1].get_facecolor()) == REFERENCE


def test_length_chart_is_linear_and_says_how_many_times():
    """Catches bars on a logarithmic axis, whose lengths mean nothing."""
    rows = [
        {"name": "plain", "tokens": 100, "predicted_tokens": 105},
        {"name": "better", "tokens": 2000, "predicted_tokens": 1900},
    ]
    (axes,) = length_chart(rows).axes
    assert axes.get_xscale() == "linear" and axes.get_xlim()[0] == 0
    assert [bar.get_width() for bar in axes.patches] == [100, 2000]
    assert texts(axes) == ["100", "2,000  ×20"]
    assert [to_hex(bar.get_facecolor()) for bar in axes.patches] == [REFERENCE, RECIPE]


@pytest.mark.parametrize("draw", [chart, length_chart, budget_chart, operator_chart])
def test_nothing_to_draw(draw):
    """Catches an empty frame, or an error from deep inside matplotlib."""
    empty = {} if draw in (budget_chart, operator_chart) else []
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(empty)
