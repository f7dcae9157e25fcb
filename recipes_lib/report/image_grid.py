"""Small images beside each other, each with its class, so that a reader sees what the data is.

image_grid(test.first(24))
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from recipes_lib.core.checks import check_whole
from recipes_lib.report.figure import WIDTH, blank_figure, muted, page


class Labelled(Protocol):
    """Images [N, C, H, W] and their classes [N]."""

    images: Any
    labels: Any


@page()
def image_grid(
    images: Labelled,
    *,
    columns: int = 12,
    title: str | None = None,
    source: str = "",
) -> Any:
    """Draw every image in grey, from its darkest to its lightest pixel, above its class.

    Args:
        columns: images in a row.
        title: the message.
        source: where the images are from.
    Raises ValueError if there are no images, and for less than one column.
    """
    check_whole(columns=columns)
    count = len(images.labels)
    rows = math.ceil(count / columns)
    side = WIDTH / columns
    figure, axes = blank_figure(
        range(count),
        (WIDTH, rows * side * 1.2),
        title=title or "The images",
        source=source,
        nrows=max(rows, 1),
        ncols=columns,
        squeeze=False,
    )
    for place in axes.flat:
        place.set_axis_off()
    for place, image, label in zip(axes.flat, images.images, images.labels):
        grey = image.float().mean(0).cpu().numpy()
        place.imshow(grey, cmap="gray", aspect="equal")
        place.set_title(str(int(label)), fontsize=9, color=muted(), loc="center", pad=2)
    return figure
