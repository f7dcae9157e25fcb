"""The look of all charts."""

import pytest

from recipes_lib.report import style


def test_a_colour_has_one_meaning():
    colors = [style.REFERENCE, style.RECIPE, style.PREDICTED, style.TIME, *style.TERMS.values()]
    assert len(set(colors)) == len(colors)


@pytest.mark.parametrize(
    ("change", "shown"), [(-0.5, "-50%"), (0.126, "+13%"), (-0.001, "+0%"), (0.0, "+0%")]
)
def test_percent(change, shown):
    """The mistake: a change of nothing reads "-0%"."""
    assert style.percent(change) == shown


def test_a_figure_is_closed_and_has_no_frame():
    """The mistake: a notebook shows a figure twice that is still open."""
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    figure, axes = style.blank_figure(["a bar"], (4, 2), bars=True)
    assert plt.get_fignums() == before
    assert figure.axes == [axes]
    assert not axes.spines["left"].get_visible()
    assert axes.yaxis_inverted(), "the first row is on top"
    _, axes = style.blank_figure(["a point"], (4, 2))
    assert axes.spines["left"].get_visible()
    assert not axes.yaxis_inverted()
