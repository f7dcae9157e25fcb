"""Charts of bars, one per row of a ladder. Each takes plain numbers and returns the figure.

chart          measured peaks with predictions as ticks, times with spread, share of the limit
budget_chart   of which terms the predicted peaks consist
operator_chart in which kinds of operators the time of a step goes
length_chart   the longest sequences of a ladder

Charts of curves are in `timeline_chart`, `loss_charts` and `growth_chart`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipes_lib.core.predict.budget import Budget
from recipes_lib.report.bars import (
    BAR,
    LABEL,
    Slots,
    bar_colors,
    draw_ticks,
    draw_whisker,
    without_scale,
    write_beside,
    write_labels,
)
from recipes_lib.report.figure import WIDTH, Key, blank_figure, ink, page
from recipes_lib.report.stacked import stacked_chart
from recipes_lib.report.style import (
    BY_ARITHMETIC,
    OPERATORS,
    REFERENCE,
    SHARE,
    TERMS,
    TIME,
    Unit,
    percent,
    three_digits,
)

SAME = "≈"  # a time that does not differ from the baseline's by more than the turns do

# --- the ladder of bytes --------------------------------------------------------------------------


@page()
def chart(
    rows: Sequence[dict[str, Any]], *, title: str | None = None, source: str | None = None
) -> Any:
    """Draw the rows of a ladder or of a recorded results file, grouped by row["group"].

    Peak memory is on the left, time per step beside it, the share of the limit where it is known.

    Args:
        rows: as `Ladder` keeps them: name, peak_bytes, predicted_bytes, seconds, and where known
            group, seconds_low, seconds_high and share_of_limit.
        title: the message; by default what the ladder as a whole has saved.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no rows.
    """
    rows = list(rows)
    slots = Slots(rows)
    widths = [2.4, 1.5]
    if any(row.get("share_of_limit") for row in rows):
        widths.append(0.9)
    figure, panels = blank_figure(
        rows,
        (WIDTH, slots.inches + 0.3),
        title=title or ladder_message(rows),
        source=source,
        key=_key_of_ladder(rows),
        bars=True,
        ncols=len(widths),
        width_ratios=widths,
    )
    slots.write_names(panels[0])
    draw_peaks(panels[0], rows, slots)
    _draw_seconds(panels[1], rows, slots)
    if len(widths) > 2:
        _draw_shares(panels[2], rows, slots)
    return figure


def ladder_message(rows: Sequence[dict[str, Any]]) -> str:
    """What the rows say, in one sentence: from the baseline's peak to the lowest one."""
    if len(rows) < 2:
        return "Peak memory of a training step"
    first = rows[0]["peak_bytes"]
    peaks = {row["name"]: row["peak_bytes"] for row in rows}
    lowest = min(peaks, key=peaks.__getitem__)
    unit = Unit(first)
    change = f"{unit.number(first)} → {unit.text(peaks[lowest])} of peak memory"
    return f"{change} with {lowest}"


def _key_of_ladder(rows: Sequence[dict[str, Any]]) -> list[Key]:
    key = [Key("predicted before the run", ink(), "tick")]
    if any(_has_spread(row) for row in rows):
        key.append(Key("from the fastest to the slowest turn", ink(), "whisker"))
    if any(time_ratio(row, rows[0]) == SAME for row in rows):
        key.append(Key("its turns do not differ from the baseline's", ink(), SAME))
    return key


def _has_spread(row: dict[str, Any]) -> bool:
    return row.get("seconds_low") is not None and row.get("seconds_high") is not None


def draw_peaks(
    axes: Any,
    rows: Sequence[dict[str, Any]],
    slots: Slots,
    *,
    change: str = "({})",
    size: float = LABEL,
) -> None:
    """Bars of the measured peaks, the predicted ones as ticks, and the change to the first row.

    Args:
        change: how the change is written; its {} becomes "-64%".
        size: of the letters, in points.
    """
    peaks = [row["peak_bytes"] for row in rows]
    unit = Unit(max(peaks))
    labels = [unit.number(peak) for peak in peaks]
    for position in range(1, len(rows)):
        labels[position] += "  " + change.format(percent(peaks[position] / peaks[0] - 1))
    _draw_bars(
        axes,
        slots,
        [unit.of(peak) for peak in peaks],
        [unit.of(row.get("predicted_bytes") or 0) for row in rows],
        labels,
        heading=f"peak memory of tensors, {unit.name}",
        size=size,
    )


def _draw_bars(
    axes: Any,
    slots: Slots,
    measured: Sequence[float],
    predicted: Sequence[float],
    labels: Sequence[str],
    *,
    heading: str,
    size: float = LABEL,
) -> None:
    """A bar per row, a tick where it was predicted to end, and a label beside both."""
    axes.barh(slots.places, measured, color=bar_colors(len(measured)), height=BAR)
    draw_ticks(axes, predicted, slots.places)
    # Beside the bar or the tick, whichever reaches further.
    ends = [max(pair) for pair in zip(measured, predicted, strict=True)]
    write_labels(axes, slots, ends, labels, heading=heading, size=size)


def _draw_seconds(axes: Any, rows: Sequence[dict[str, Any]], slots: Slots) -> None:
    seconds = [row["seconds"] for row in rows]
    axes.barh(slots.places, seconds, color=TIME, height=BAR)
    ends = list(seconds)
    labels = []
    for position, (row, place) in enumerate(zip(rows, slots.places, strict=True)):
        labels.append(_time_in_words(row, rows[0]))
        if _has_spread(row):
            draw_whisker(axes, row["seconds_low"], row["seconds"], row["seconds_high"], place)
            ends[position] = max(row["seconds"], row["seconds_high"])
    write_labels(axes, slots, ends, labels, heading="seconds per step")


def _time_in_words(row: dict[str, Any], first: dict[str, Any]) -> str:
    return f"{three_digits(row['seconds'])}  {time_ratio(row, first)}".rstrip()


def time_ratio(row: dict[str, Any], first: dict[str, Any]) -> str:
    """The time over the baseline's: "1.45×", or "≈" where the turns of the two do not differ."""
    if row is first:
        return ""
    ratio = row.get("ratio") or row["seconds"] / first["seconds"]
    if row.get("ratio_low") is not None:
        same = row["ratio_low"] <= 1 <= row["ratio_high"]
    elif _has_spread(row) and _has_spread(first):
        slower = row["seconds_low"] > first["seconds_high"]
        faster = row["seconds_high"] < first["seconds_low"]
        same = not (slower or faster)
    else:  # a run of the time before the turns: nothing is known about its spread
        same = False
    return SAME if same else f"{ratio:.2f}×"


def _draw_shares(axes: Any, rows: Sequence[dict[str, Any]], slots: Slots) -> None:
    without_scale(axes, "share of the limit")
    slots.draw_zero(axes)
    axes.axvline(1, color=REFERENCE, linewidth=1)  # nothing gets beyond it
    axes.set_xlim(0, 1.12)
    for row, place in zip(rows, slots.places, strict=True):
        share = row.get("share_of_limit")
        if share:
            axes.barh([place], [share], color=SHARE, height=BAR)
            # Inside a long bar: beside it the number would lie on the line.
            gap = -4 if share > 0.5 else 4
            side = "right" if share > 0.5 else "left"
            write_beside(axes, f"{share:.0%}", share, place, gap=gap, ha=side, fontsize=LABEL)


# --- budgets --------------------------------------------------------------------------------------


@page()
def budget_chart(
    budgets: dict[str, Budget],
    *,
    title: str | None = None,
    source: str = BY_ARITHMETIC,
    limits: dict[str, int] | None = None,
) -> Any:
    """Draw predicted peaks as stacked bars, one per step: which term does each recipe shrink?

    Args:
        budgets: by the name of the step. The unit is MiB or GiB, by the largest of them.
        title: the message.
        source: at the bottom; by default that it is arithmetic.
        limits: bytes of devices by name, drawn as lines: what is left of one fits.
    Raises ValueError if there are no budgets.
    """
    unit = Unit(max((budget.peak for budget in budgets.values()), default=0))
    at_peak = [budget.at_peak() for budget in budgets.values()]
    terms = {}
    for term in TERMS:
        sizes = [unit.of(each.get(term, 0)) for each in at_peak]
        if any(sizes):
            terms[term] = sizes
    return stacked_chart(
        list(budgets),
        terms,
        TERMS,
        words=unit.words,
        title=title or "What the predicted peak of each step consists of",
        source=source,
        heading=f"predicted bytes at the moment of the peak, {unit.name}",
        limits={name: unit.of(size) for name, size in (limits or {}).items()},
    )


@page()
def operator_chart(
    profiles: dict[str, dict[str, float]],
    *,
    title: str | None = None,
    source: str | None = None,
    limits: dict[str, float] | None = None,
) -> Any:
    """Draw in which kinds of operators the time of a step goes: a stacked bar per row.

    Args:
        profiles: {name of the row: {kind of operator: seconds}}, see `core.operator_profile`.
        limits: seconds by the name of the row that the step takes at the machine's own rate of
            matrix products; drawn as ticks.
    Raises ValueError if there are no profiles.
    """
    totals: dict[str, float] = {}
    for profile in profiles.values():
        for kind, seconds in profile.items():
            totals[kind] = totals.get(kind, 0) + seconds
    # The kind that takes most comes first; what is left over always comes last.
    kinds = sorted(totals, key=totals.__getitem__, reverse=True)
    kinds.sort(key=_is_rest)
    parts = {}
    for kind in kinds:
        parts[kind] = [profile.get(kind, 0.0) for profile in profiles.values()]
    colors = dict(zip(kinds, OPERATORS * len(kinds), strict=False))
    colors |= {kind: REFERENCE for kind in kinds if _is_rest(kind)}
    return stacked_chart(
        list(profiles),
        parts,
        colors,
        words=three_digits,
        title=title or "Where the time of a step goes",
        source=source,
        heading="seconds per step, by kind of operator",
        ticks=limits or {},
    )


def _is_rest(kind: str) -> bool:
    return kind.startswith(("other", "rest", "everything else"))


# --- lengths --------------------------------------------------------------------------------------


@page()
def length_chart(
    rows: Sequence[dict[str, Any]], *, title: str | None = None, source: str | None = None
) -> Any:
    """Draw the rows of a ladder of lengths or of a recorded results file.

    Each row says how many times the baseline's length it reaches.

    Args:
        rows: name, tokens and predicted_tokens, and where known group.
        title: the message; by default how many times longer the longest is.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no rows.
    """
    rows = list(rows)
    slots = Slots(rows)
    tokens = [row["tokens"] for row in rows]
    longest = max(tokens, default=0)
    figure, axes = blank_figure(
        rows,
        (WIDTH, slots.inches + 0.3),
        title=title or f"The longest sequence that fits: {longest:,} tokens",
        source=source,
        key=[Key("predicted before the search", ink(), "tick")],
        bars=True,
    )
    slots.write_names(axes)
    predicted = [row.get("predicted_tokens") or 0 for row in rows]
    labels = [f"{length:,}" for length in tokens]
    for position in range(1, len(rows)):
        labels[position] += f"  ×{_factor(tokens[position] / tokens[0])}"
    heading = "longest sequence that fits, tokens"
    _draw_bars(axes, slots, tokens, predicted, labels, heading=heading)
    return figure


def _factor(ratio: float) -> str:
    if ratio < 10:
        return f"{ratio:.1f}"
    return f"{ratio:,.0f}"
