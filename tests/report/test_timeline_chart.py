"""What the charts of memory over time draw, read back from the figures."""

import pytest

from recipes_lib.core.measure.timeline import KINDS, Point, Timeline
from recipes_lib.report.style import KIND_COLORS, MIB
from recipes_lib.report.timeline_chart import timeline_chart


def timeline(states=8):
    def point(operator, phase, activations):
        sizes = {"weights": 4 * MIB, "states": states * MIB, "gradients": 0, "other": 0}
        return Point(operator, phase, sizes | {"activations": activations * MIB})

    return Timeline([point(0, "forward", 0), point(50, "backward", 6), point(100, "backward", 0)])


def texts(axes):
    return {text.get_text() for text in axes.texts}


def highest(axes):
    """The upper edge of the stack."""
    return max(path.get_paths()[0].vertices[:, 1].max() for path in axes.collections[: len(KINDS)])


def test_large_panels_say_what_the_peak_consists_of():
    """Catches a kind that is missing in the stack, and a prediction at the wrong step."""
    both = {"plain": timeline(), "lean": timeline(states=2)}
    plain, lean = timeline_chart(both, predicted={"plain": 17 * MIB}).axes
    assert (highest(plain), highest(lean)) == (4 + 8 + 6, 4 + 2 + 6)
    assert {"18 MiB", "activations 6 MiB", "states 8 MiB", "forward", "backward"} <= texts(plain)
    assert {"12 MiB", "states 2 MiB"} <= texts(lean)
    dashed = [
        [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"]
        for axes in (plain, lean)
    ]
    assert dashed == [[17], []]


def test_small_multiples_share_one_scale():
    """Catches panels that look alike because each has its own scale, and a peak without number."""
    steps = {str(number): timeline(states=number) for number in range(1, 6)}
    figure = timeline_chart(steps, columns=3)
    assert len(figure.axes) == 6 and not figure.axes[-1].axison
    for axes, (name, step) in zip(figure.axes, steps.items(), strict=False):
        assert axes.get_title(loc="left") == name
        assert axes.get_ylim() == figure.axes[0].get_ylim() and axes.get_ylim()[0] == 0
        assert f"{step.peak / MIB:.0f} MiB" in texts(axes)


def test_every_kind_has_a_color():
    """Catches a kind of the account that the picture leaves out."""
    assert set(KIND_COLORS) == set(KINDS)


def test_wrong_input():
    with pytest.raises(ValueError, match="nothing to draw"):
        timeline_chart({})
    with pytest.raises(ValueError, match="columns=0"):
        timeline_chart({"a": timeline()}, columns=0)
