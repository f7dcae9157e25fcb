"""Which pairs of tokens an attention pattern multiplies: one small square per pattern.

pattern_chart({"full": causal, "window": causal & near})
"""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.colors import ListedColormap

from recipes_lib.report.figure import WIDTH, Key, blank_figure, faint, muted, page
from recipes_lib.report.style import RECIPE


@page()
def pattern_chart(
    masks: dict[str, torch.Tensor], *, title: str | None = None, source: str = ""
) -> Any:
    """Draw masks beside each other: queries from top to bottom, keys from left to right.

    Below each square is the share of the causal pairs that it reads.

    Args:
        masks: [S, S] by name, True where a query reads a key. What lies after a query is left out.
        title: the message.
        source: where the masks are from.
    Raises ValueError if there are no masks.
    """
    columns = max(len(masks), 1)
    figure, panels = blank_figure(
        masks,
        (WIDTH, WIDTH / columns + 0.3),
        title=title or "Which keys each query reads",
        source=source,
        key=[Key("read", RECIPE), Key("causal, and not read", faint())],
        ncols=columns,
        squeeze=False,
    )
    colors = ListedColormap([faint(), RECIPE])
    for panel, (name, mask) in zip(panels.flat, masks.items(), strict=True):
        causal = torch.ones_like(mask).tril()
        reads = (mask & causal).float()
        # What is not a number has no colour.
        picture = reads.masked_fill(~causal, float("nan"))
        panel.imshow(picture.numpy(), cmap=colors, vmin=0, vmax=1, interpolation="nearest")
        panel.set_title(name, fontsize=9.5, fontweight="bold")
        panel.set(xticks=[], yticks=[])
        share = reads.sum() / causal.sum()
        panel.set_xlabel(f"{share:.0%} of the pairs", fontsize=9, color=muted())
        for spine in panel.spines.values():
            spine.set_visible(False)
    return figure
