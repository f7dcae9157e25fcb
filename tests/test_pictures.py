"""The README's picture shows what the newest run measured, on both pages."""

from matplotlib.image import imread

from benchmarks import pictures
from benchmarks.record import newest


def test_the_picture_says_what_the_run_measured():
    """Catches a label that is missing for a row, and a title with other numbers."""
    run = newest("01")
    figure = pictures.memory_picture(run, ink="black", color="blue")
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[0] == "full fine-tuning" and names[-1] == "everything combined"
    last = f"{run.last['peak_bytes'] / 2**20:,.0f}"
    assert last in axes.texts[-1].get_text() and last in axes.get_title(loc="left")


def test_both_pages_have_their_picture(tmp_path):
    """Catches a dark variant that is a copy of the light one, and one that is too large to load."""
    light, dark = pictures.draw(tmp_path)
    assert imread(light)[0, 0, :3].mean() > 0.9 and imread(dark)[0, 0, :3].mean() < 0.1
    assert light.stat().st_size < 60_000
