"""The run of `benchmarks.architecture` in the texts: tables, a block of a notebook, and cells.

All losses are held-out, in nats per byte, of small models that read bytes.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.differences import spread, verdict
from benchmarks.record import machine_line
from benchmarks.table_text import line, table

Run = dict[str, Any]

# The ways to compute a norm in the order of the columns; the first is the limit.
NORM_WAYS = ("copy", "plain", "PyTorch", "compiled", "Liger", "LayerNorm")

# --- tables -------------------------------------------------------------------------------------


def small_models(run: Run | None) -> str:
    """What a part of the architecture changes at equal tokens. Nothing where no run is recorded."""
    if run is None:
        return ""
    part = run["small_models"]
    lines = []
    for number, (name, row) in enumerate(part["rows"].items()):
        change = ["", ""]
        if number > 0:  # the first is what the others are compared with
            change = [spread(row["beyond_baseline"]), verdict(row["beyond_baseline"])]
        loss = f"{statistics.fmean(row['losses']):.3f}"
        sizes = [f"{row['parameters']:,}", f"{row['cache_bytes_per_token']:,}"]
        lines.append(line([name, loss, *change, *sizes]))
    notes = [
        f"{machine_line(run)}. {_sizes(part)}, {part['steps']} steps.",
        "Held-out loss: the mean over the seeds, in nats per byte. The difference is to the first "
        "line with the same seed; in brackets are the smallest and the largest.",
        _rule(part),
        "Cache: bytes of keys and values per token.",
    ]
    columns = ["architecture", "held-out loss", "difference", "verdict", "weights", "cache"]
    return table(columns, lines, notes)


def healing(run: Run | None) -> str:
    """What pooling heads costs, and what a short training brings back. Nothing without a run."""
    if run is None:
        return ""
    part = run["healing"]
    lines = []
    for kv_heads, rows in _by_heads(part).items():
        losses = [f"{_mean(rows, name):.3f}" for name in _MOMENTS]
        gap = _gap(rows)
        lines.append(line([f"4 → {kv_heads}", *losses, spread(gap), verdict(gap)]))
    notes = [
        f"{machine_line(run)}. {_sizes(part)}. Trained for {part['steps']} steps, then pooled, "
        f"then healed by {part['healing_steps']} further steps; the model that was never pooled "
        f"takes these steps as well.",
        "Held-out losses: means over the seeds, in nats per byte. The difference is that of "
        "healed to never pooled with the same seed.",
        _rule(part),
    ]
    columns = ["heads of keys and values", "trained", "pooled", "healed", "never pooled"]
    return table([*columns, "difference", "verdict"], lines, notes)


_MOMENTS = ("trained", "pooled", "healed", "never_pooled")


def norms(run: Run | None) -> str:
    """Gigabytes per second of each way to compute a norm. Nothing where no run is recorded."""
    if run is None:
        return ""
    rows = run["norms"]["rows"]
    ways = [way for way in NORM_WAYS if any(row["way"] == way for row in rows)]
    lines = []
    for size, found in _by_size(rows).items():
        lines.append(line([size, *(_rate_and_time(found[way]) for way in ways)]))
    notes = [
        f"{machine_line(run)}. {_threads(run)}.",
        f"In GB/s, and in brackets the time of a call: the fastest of {run['norms']['rounds']} in "
        f"turns. The rate counts that x is read once and y is written once.",
        "A copy does only that, so it is the limit. Plain: operator after operator. Compiled: the "
        "same lines after `torch.compile`. LayerNorm computes something else. One row stays in the "
        "caches, and the price of a call decides.",
    ]
    return table(["numbers", *ways], lines, notes)


# --- a notebook ---------------------------------------------------------------------------------


def block(run: Run | None) -> str:
    """The small models as a table, and the other two parts in words."""
    if run is None:
        return ""
    steps = run["small_models"]["steps"]
    begin = f"The recorded comparison trains each of the small models for {steps} steps:"
    return f"{begin}\n\n{small_models(run)}\n\n{healed_in_words(run)} {norms_in_words(run)}"


def healed_in_words(run: Run) -> str:
    """What pooling to the fewest heads costs before and after healing."""
    part = run["healing"]
    kv_heads, rows = list(_by_heads(part).items())[-1]
    gap = _gap(rows)
    return (
        f"A trained small model has a loss of {_mean(rows, 'trained'):.3f}, and of "
        f"{_mean(rows, 'pooled'):.3f} after its four heads of keys and values are pooled to "
        f"{kv_heads}. Another {part['healing_steps']} steps bring it to "
        f"{_mean(rows, 'healed'):.3f}, and the model that was never pooled to "
        f"{_mean(rows, 'never_pooled'):.3f}: a difference of {spread(gap)} over {len(gap)} seeds."
    )


def norms_in_words(run: Run) -> str:
    """The rates of a norm on a long prompt, and the time of a call for one token."""
    sizes = _by_size(run["norms"]["rows"])
    long, found = next(iter(sizes.items()))
    rates = {way: found[way]["bytes_per_second"] / 1e9 for way in found}
    one = next(rows for rows in sizes.values() if rows["plain"]["rows"] == 1)
    calls = {way: 1e6 * one[way]["seconds"] for way in one}
    return (
        f"On {long}, RMSNorm moves {rates['plain']:.1f} GB/s in plain operators and "
        f"{rates['compiled']:.1f} GB/s compiled, where a copy moves {rates['copy']:.1f}. For one "
        f"token a call takes {calls['plain']:.0f} µs in plain operators and "
        f"{calls['compiled']:.0f} µs compiled."
    )


# --- cells --------------------------------------------------------------------------------------


def rms_norm(run: Run) -> str:
    """The loss, and the rates of a long prompt in fp32."""
    found = next(iter(_by_size(run["norms"]["rows"]).values()))
    rates = {way: found[way]["bytes_per_second"] / 1e9 for way in found}
    return (
        f"{_loss_in_words(run, 'RMSNorm')}; {rates['plain']:.1f} GB/s in plain operators, "
        f"{rates['compiled']:.1f} compiled"
    )


def swiglu(run: Run) -> str:
    return _loss_in_words(run, "SwiGLU")


def untied(run: Run) -> str:
    return _loss_in_words(run, "untied")


def grouped_queries(run: Run) -> str:
    """Pooled to one head: means over the seeds."""
    rows = _by_heads(run["healing"])[1]
    losses = {name: _mean(rows, name) for name in _MOMENTS}
    return (
        f"a quarter of the cache; loss of a tiny model {losses['trained']:.2f}, pooled "
        f"{losses['pooled']:.2f}, healed {losses['healed']:.2f}, never pooled "
        f"{losses['never_pooled']:.2f}"
    )


def _loss_in_words(run: Run, name: str) -> str:
    beyond = run["small_models"]["rows"][name]["beyond_baseline"]
    return f"loss of a tiny model {spread(beyond)} nats per byte: {verdict(beyond)}"


# --- what the tables share ------------------------------------------------------------------------


def _sizes(part: dict[str, Any]) -> str:
    """The model, the tokens of a step and the seeds."""
    sizes = part["sizes"]
    seeds = ", ".join(str(seed) for seed in part["seeds"])
    return (
        f"Tiny models of {sizes['layers']} blocks that are {sizes['hidden']} wide, on "
        f"{sizes['rows']} rows of {sizes['seq_len']} bytes per step; seeds {seeds}"
    )


def _rule(part: dict[str, Any]) -> str:
    return f"A verdict is better or worse only if all {len(part['seeds'])} seeds agree on the sign."


def _threads(run: Run) -> str:
    if run["threads"] == 1:
        return "One thread"
    return f"{run['threads']} threads"


def _by_heads(part: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """The rows of each number of heads."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in part["rows"]:
        found.setdefault(row["kv_heads"], []).append(row)
    return found


def _gap(rows: list[dict[str, Any]]) -> list[float]:
    """Healed less never pooled, for each seed."""
    return [row["healed"] - row["never_pooled"] for row in rows]


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def _by_size(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The ways of each size and dtype: "8,192 × 2,048 numbers in float32"."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        dtype = row["dtype"].removeprefix("torch.")
        size = f"{row['rows']:,} × {row['hidden']:,} numbers in {dtype}"
        found.setdefault(size, {})[row["way"]] = row
    return found


def _rate_and_time(row: dict[str, Any]) -> str:
    rate = f"{row['bytes_per_second'] / 1e9:.1f}"
    milliseconds = 1e3 * row["seconds"]
    if milliseconds < 0.1:
        return f"{rate} ({1e3 * milliseconds:.0f} µs)"
    return f"{rate} ({milliseconds:.1f} ms)"
