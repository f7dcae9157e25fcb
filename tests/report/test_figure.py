"""The page, and what stands around the axes."""

import base64
import io

import matplotlib as mpl
import pytest
from matplotlib.image import imread

from recipes_lib.report.figure import CSS_DOTS, DPI, Key, blank_figure, page
from recipes_lib.report.labels import keep_apart, text_width, wrap
from recipes_lib.report.style import DARK, LIGHT, measured_here


@page()
def draw(**options):
    return blank_figure(["a bar"], (4, 2), **options)


def test_a_notebook_shows_it_sharp_and_as_wide_as_its_inches():
    """Catches 200 dpi that make the picture twice as wide."""
    figure, _ = draw(title="A message")
    data, look = figure._repr_mimebundle_()
    picture = imread(io.BytesIO(base64.b64decode(data["image/png"])))
    assert picture.shape[1] == 4 * DPI
    assert look == {"image/png": {"width": 4 * CSS_DOTS}}
    assert data["text/plain"] == "A message"


def test_bars_have_no_frame_and_the_first_is_on_top():
    _, axes = draw(bars=True)
    assert not axes.spines["left"].get_visible() and axes.yaxis_inverted()
    _, axes = draw()
    assert axes.spines["left"].get_visible() and not axes.yaxis_inverted()


def test_title_key_and_source_have_room_of_their_own():
    """Catches a long title that runs out of the paper, and a key that lies on the axes."""
    key = [Key(f"a rather long name of kind {number}", "#000000") for number in range(4)]
    figure, axes = draw(title="A message of many words " * 3, source="measured", key=key)
    figure.draw_without_rendering()
    title, source = figure.texts
    assert "\n" in title.get_text() and title.get_window_extent().x1 < figure.bbox.x1
    top = axes.get_window_extent().y1
    rows = [box.get_window_extent() for box in figure.artists]
    assert len(rows) == 4, "each name takes more than half of the width"
    assert title.get_window_extent().y0 > rows[0].y1 and rows[-1].y0 > top
    assert source.get_window_extent().y1 < axes.get_tightbbox().y0


def test_without_a_source_it_was_measured_here_and_today():
    """Catches a chart of recorded numbers that claims this machine, and one that says nothing."""
    for source, shown in ((None, measured_here()), ("recorded", "recorded"), ("", "")):
        figure, _ = blank_figure(["a"], (8, 2), title="A message", source=source)
        assert figure.texts[1].get_text() == shown


@pytest.mark.parametrize(("dark", "look"), [(True, DARK), (False, LIGHT)])
def test_a_page_has_its_own_paper_and_ink(dark, look):
    """Catches dark ink on dark paper, and a look that stays after the page."""
    before = mpl.rcParams["text.color"]
    with page(dark=dark):
        figure, _ = blank_figure(["a"], (4, 2), title="A message")
    assert mpl.colors.to_hex(figure.get_facecolor()) == look["paper"]
    assert figure.texts[0].get_color() == look["ink"]
    assert mpl.rcParams["text.color"] == before


def test_keep_apart():
    """Catches labels that change their order, and labels that move without need."""
    assert keep_apart([5.0, 0.0], 2) == [5.0, 0.0]
    assert keep_apart([1.0, 1.0, 9.0], 2) == [0.0, 2.0, 9.0]
    assert keep_apart([3.0, 1.0, 2.0], 2) == [4.0, 0.0, 2.0]


def test_wrap():
    """Catches a word that gets lost at the end of a line."""
    words = "one two three four five six"
    lines = wrap(words, 60, size=10)
    assert " ".join(lines) == words and len(lines) > 1
    assert all(text_width(line, size=10) <= 60 for line in lines)
