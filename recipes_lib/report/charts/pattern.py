"""Which pairs of tokens an attention pattern multiplies: one small square per pattern."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from matplotlib.colors import ListedColormap, to_rgba

from recipes_lib.report.charts.figure import NARROW, Chart, new_figure
from recipes_lib.report.style import INK, RECIPE


def pattern_chart(masks: Mapping[str, torch.Tensor], *, title: str) -> Chart:
    """Draw masks, two in a row: queries from top to bottom, keys from left to right.

    Below each square is the share of the causal pairs that it reads.

    Args:
        masks: [S, S] by name, True where a query reads a key. What lies after a query is left out.
        title: the message.
    """
    pale = to_rgba(INK, 0.25)
    rows = math.ceil(len(masks) / 2)
    figure, panels = new_figure(
        title,
        height=NARROW / 2 * rows + 0.6,
        width=NARROW,
        source="",
        key={"read": RECIPE, "causal, and not read": pale},
        nrows=rows,
        ncols=2,
        squeeze=False,
    )
    for panel, (name, mask) in zip(panels.flat, masks.items()):
        causal = torch.ones_like(mask).tril()
        reads = (mask & causal).float()
        # What is not a number has no colour.
        picture = reads.masked_fill(~causal, float("nan")).numpy()
        colors = ListedColormap([pale, RECIPE])
        panel.imshow(picture, cmap=colors, vmin=0, vmax=1, interpolation="nearest")
        panel.set(title=name, xticks=[], yticks=[])
        panel.set_xlabel(f"{reads.sum() / causal.sum():.0%} of the pairs")
        panel.spines[:].set_visible(False)
    return figure
