"""Tokens per second against the wait, read back from the figure."""

from types import SimpleNamespace

import pytest

from recipes_lib.report.throughput_chart import throughput_chart


def step_of(batch, seconds):
    return SimpleNamespace(batch=batch, seconds_per_step=seconds)


def test_throughput_chart_waits_for_a_whole_step():
    """Catches a wait that is divided by the batch: each text waits for all of them."""
    steps = [step_of(32, 0.064), step_of(1, 0.02)]
    (axes,) = throughput_chart({"bf16": steps}).axes
    *batches, line = axes.get_lines()
    assert line.get_xdata() == pytest.approx([20, 64])
    assert line.get_ydata() == pytest.approx([50, 500])
    for batch, diagonal in zip((1, 32), batches, strict=True):
        x, y = diagonal.get_data()
        assert (x * y / 1000).tolist() == pytest.approx([batch, batch])


@pytest.mark.parametrize("wrong", [0.0, float("nan"), -1.0])
def test_points_that_are_none(wrong):
    with pytest.raises(ValueError, match="give a finite number above 0"):
        throughput_chart({"x": [step_of(1, wrong)]})


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="nothing to draw"):
        throughput_chart({})
