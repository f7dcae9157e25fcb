"""What is read back from a figure: its texts, and where its names are."""

import itertools

from matplotlib.text import Text


def texts(axes):
    """All texts inside of a panel, in the order in which they were drawn."""
    return [text.get_text() for text in axes.texts if text.get_text()]


def boxes_of(axes, names):
    """Where names are on the canvas, their lines to the points not counted."""
    axes.figure.draw_without_rendering()
    found = []
    for text in axes.texts:
        if text.get_text() in names:
            found.append(Text.get_window_extent(text))  # an annotation's own counts its line, too
    return found


def assert_apart(boxes):
    """No two of these boxes have a place in common."""
    for box, other in itertools.combinations(boxes, 2):
        assert not box.overlaps(other)
