"""Tokens per second of a ladder's rows, each bar inside the speed that its bytes allow.

    rows = [{"name": "fp32", "tokens_per_second": 33, "share_of_limit": 0.43}, …]
    speed_chart(rows)

The limit of a row is a bar of its own behind the speed: fewer bytes per token move the limit, a
better kernel moves the speed towards it. Rows are compared within their group, which is a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipes_lib.report.bars import (
    BAR,
    LABEL,
    Slots,
    draw_whisker,
    without_scale,
    write_beside,
    write_labels,
)
from recipes_lib.report.figure import WIDTH, Key, blank_figure, faint, ink, page
from recipes_lib.report.style import RECIPE, REFERENCE


@page()
def speed_chart(
    rows: Sequence[dict[str, Any]], *, title: str | None = None, source: str | None = None
) -> Any:
    """Draw tokens per second, each bar inside the speed that the bandwidth allows its bytes.

    Args:
        rows: as `SpeedLadder` keeps them: name, tokens_per_second, share_of_limit, and where known
            group, ratio, tokens_per_second_low, tokens_per_second_high and perplexity.
        title: the message; by default from the first row to the fastest one of its group.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no rows.
    """
    rows = list(rows)
    slots = Slots(rows)
    widths = [3.2, 0.8]  # of the bars, and of a column of numbers
    if any(row.get("perplexity") is not None for row in rows):
        widths.append(0.8)
    figure, panels = blank_figure(
        rows,
        (WIDTH, slots.inches + 0.3),
        title=title or speed_message(rows),
        source=source,
        key=_key_of_speeds(rows),
        bars=True,
        ncols=len(widths),
        width_ratios=widths,
    )
    slots.write_names(panels[0])
    _write_column(
        panels[1], "of the limit", [f"{row['share_of_limit']:.0%}" for row in rows], slots
    )
    if len(widths) > 2:
        _write_column(panels[2], "perplexity", [_perplexity(row) for row in rows], slots)
    _draw_speeds(panels[0], rows, slots)
    return figure


def speed_message(rows: Sequence[dict[str, Any]]) -> str:
    """From the first row to the fastest one of its group, in one sentence."""
    first = rows[0] if rows else {}
    same_group = [row for row in rows if row.get("group") == first.get("group")]
    if len(same_group) < 2:
        return "Tokens per second"
    speeds = {row["name"]: row["tokens_per_second"] for row in same_group}
    fastest = max(speeds, key=speeds.__getitem__)
    change = f"{first['tokens_per_second']:,.0f} → {speeds[fastest]:,.0f} tokens per second"
    return f"{change} with {fastest}"


def limit_of(row: dict[str, Any]) -> float:
    """Tokens per second that the bandwidth allows: those of the row over its share of the limit."""
    return row["tokens_per_second"] / row["share_of_limit"]


def _key_of_speeds(rows: Sequence[dict[str, Any]]) -> list[Key]:
    key = [Key("the limit: read bandwidth over the bytes of the weights", faint())]
    if any(_has_spread(row) for row in rows):
        key.append(Key("from the slowest to the fastest turn", ink(), "whisker"))
    return key


def _has_spread(row: dict[str, Any]) -> bool:
    return row.get("tokens_per_second_low") is not None


def _draw_speeds(axes: Any, rows: Sequence[dict[str, Any]], slots: Slots) -> None:
    """Each speed on top of its limit: what stays visible of the limit is what a row leaves."""
    speeds = [row["tokens_per_second"] for row in rows]
    limits = [limit_of(row) for row in rows]
    axes.barh(slots.places, limits, color=faint(), height=BAR)
    colors = [_color_of(row, rows) for row in rows]
    axes.barh(slots.places, speeds, color=colors, height=BAR)

    # A row may pass its limit: weights that stay in the processor's cache are not read again.
    ends = [max(pair) for pair in zip(speeds, limits, strict=True)]
    for position, (row, place) in enumerate(zip(rows, slots.places, strict=True)):
        if _has_spread(row):
            slowest = row["tokens_per_second_low"]
            fastest = row["tokens_per_second_high"]
            draw_whisker(axes, slowest, row["tokens_per_second"], fastest, place)
            ends[position] = max(ends[position], fastest)  # no label lies on a whisker
    labels = [_speed_in_words(row, rows) for row in rows]
    write_labels(axes, slots, ends, labels, heading="tokens per second, and the limit")


def _color_of(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Each group has a baseline of its own: another model is not a recipe."""
    if row is _first_of_group(row, rows):
        return REFERENCE
    return RECIPE


def _first_of_group(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in rows if each.get("group") == row.get("group"))


def _speed_in_words(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """ "33" for the first row of a group, "146  4.4×" for the others."""
    words = f"{row['tokens_per_second']:,.0f}"
    first = _first_of_group(row, rows)
    if row is first:
        return words
    # That of the turns, where there were any: both speeds are then of the same round.
    ratio = row.get("ratio") or row["tokens_per_second"] / first["tokens_per_second"]
    return f"{words}  {ratio:.2f}×"


def _perplexity(row: dict[str, Any]) -> str:
    if row.get("perplexity") is None:
        return ""
    return f"{row['perplexity']:.2f}"


def _write_column(axes: Any, heading: str, texts: Sequence[str], slots: Slots) -> None:
    """A column of numbers, each in the line of its row."""
    without_scale(axes, heading)
    axes.set_xlim(0, 1)
    for text, place in zip(texts, slots.places, strict=True):
        write_beside(axes, text, 0, place, gap=0, fontsize=LABEL)
