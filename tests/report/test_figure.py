"""A figure has no ground of its own, reads on light and dark pages, and is small."""

import io

from PIL import Image

from recipes_lib.report import style
from recipes_lib.report.charts.figure import name_at_right, new_figure, set_up

PAGES = ("#ffffff", "#111111")


def brightness(color):
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(color, other):
    """As the accessibility guidelines of the web define it: from 1 to 21."""
    darker, brighter = sorted(brightness(each) for each in (color, other))
    return (brighter + 0.05) / (darker + 0.05)


def picture(figure):
    return Image.open(io.BytesIO(figure.png()))


def test_every_colour_reads_on_both_pages():
    """The mistake: black ink, or a pale yellow, which one of the two pages swallows."""
    colors = [*style.TERMS.values(), *style.LINES, *style.KIND_COLORS.values()]
    colors += [style.REFERENCE, style.RECIPE, style.TIME, style.LOST, *style.WORK.values()]
    assert min(contrast(color, page) for color in colors for page in PAGES) > 2.4
    assert min(contrast(style.INK, page) for page in PAGES) > 4.3


def test_the_ground_is_transparent_and_the_picture_small():
    figure, axes = new_figure("A message", key={"a": style.RECIPE}, source="somewhere")
    axes.plot(range(100))
    assert picture(figure).convert("RGBA").getpixel((2, 200))[3] == 0
    assert len(picture(figure).getcolors(10**6)) <= 64
    assert len(figure.png()) < 60_000
    assert figure._repr_mimebundle_()["text/plain"] == "A message"


def test_title_key_and_source_do_not_cover_each_other():
    """The mistake: a legend and a title that the layout puts into the same place."""
    figure, axes = new_figure("A message", key={"a": style.RECIPE}, source="somewhere")
    axes.set(xlabel="below")
    figure.png()
    box = figure.legends[0].get_window_extent()
    assert box.y0 >= axes.get_window_extent().y1
    assert box.y1 - box.y0 > 30  # both lines
    assert figure._supxlabel.get_window_extent().y1 <= axes.xaxis.label.get_window_extent().y0


def test_names_at_the_right_keep_apart_and_in_order():
    """The mistake: lines that end at one height, whose names lie on top of each other."""
    figure, axes = new_figure("A message", source="")
    set_up(axes, xlim=(0, 1), ylim=(0, 1))
    names = [("a", (1, 1.0), style.INK), ("b", (1, 0.99), style.INK), ("c", (1, 0.1), style.INK)]
    name_at_right(axes, names)
    heights = {text.get_text(): text.xyann[1] * figure.bbox.height for text in axes.texts}
    assert heights["a"] > heights["b"] + 10 > heights["c"] + 100
