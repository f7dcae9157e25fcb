"""The README's picture shows what the newest run measured, on a light and a dark page."""

from matplotlib.image import imread
from matplotlib.text import Text

from benchmarks import pictures
from benchmarks.record import newest


def test_the_picture_says_what_the_run_measured():
    """Catches a label that is missing for a row, and a title with other numbers."""
    run = newest("01")
    names = list(pictures.rows_that_help(run))
    assert names[0] == "full fine-tuning" and names[-1] == "everything combined"
    figure = pictures.memory_picture(run)
    words = " ".join(text.get_text() for text in figure.findobj(Text))
    last = f"{run.last['peak_bytes'] / 2**20:,.0f}"
    assert all(name in words for name in names)
    assert words.count(last) >= 2  # in the title, and beside its bar


def test_the_picture_has_no_paper(tmp_path):
    """Catches a white page on a dark one, and a file that is too large to load."""
    pictures.draw(tmp_path / "memory.png")
    assert imread(tmp_path / "memory.png")[0, 0, 3] == 0
    assert (tmp_path / "memory.png").stat().st_size < 60_000
