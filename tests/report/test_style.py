"""The look of all charts."""

import pytest

from recipes_lib.report import style


def test_a_colour_has_one_meaning():
    """The mistake: purple is the optimizer's states here, and a recipe in the next chart."""
    colors = [style.REFERENCE, style.RECIPE, style.TIME, *style.TERMS.values()]
    assert len(set(colors)) == len(colors)


@pytest.mark.parametrize(
    ("change", "shown"), [(-0.5, "-50%"), (0.126, "+13%"), (-0.001, "+0%"), (0.0, "+0%")]
)
def test_percent(change, shown):
    """The mistake: a change of nothing reads "-0%"."""
    assert style.percent(change) == shown


@pytest.mark.parametrize(
    ("size", "text"), [(500 * 2**20, "500 MiB"), (20 * 2**30, "20.0 GiB"), (106 * 2**30, "106 GiB")]
)
def test_unit(size, text):
    """The mistake: a number that was divided by MiB and says GiB."""
    assert style.Unit(size).text(size) == text


def test_a_source_names_the_machine_of_the_run():
    """The mistake: a recorded chart says that it was measured here and today."""
    run = {"name": "Intel(R) Xeon(R) Processor @ 2.70GHz", "device": "cpu", "cores": 2}
    source = style.measured_on(run | {"date": "2026-11-21"})
    assert source == "measured on Intel Xeon, 2 CPU cores, 2026-11-21"
    card = {"name": "NVIDIA L4", "device": "cuda", "cores": 8, "date": "2026-11-21"}
    assert style.measured_on(card) == "measured on NVIDIA L4, 2026-11-21"
