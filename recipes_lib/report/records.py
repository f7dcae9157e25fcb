"""Results that are recorded in benchmarks/results: for what takes too long to run here.

losses = recorded("rope")["losses"]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
BETWEEN = " · "  # the parts of a metric that was nested


def recorded(notebook: str) -> dict[str, Any] | None:
    """The newest recorded run of a notebook, program or part, of any machine, or None.

    Nested as the run wrote it. A number with a range is a dict with its `value`, `low` and `high`.
    `measured_on` names the machine and the day.
    """
    newest: dict[str, Any] | None = None
    # The names of the files end with the day: in this order the last one is the newest.
    for path in sorted(RESULTS.glob("*.jsonl"), key=_day_and_name):
        shared, *records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        own = [record for record in records if record["notebook"] == notebook]
        if own:
            newest = _nested(own)
            machine, *_ = shared["machine"].split(", ")
            newest["measured_on"] = f"recorded on {machine}, {shared['date']}"
    return newest


def _day_and_name(path: Path) -> tuple[str, str]:
    return path.stem[-len("2026-11-25") :], path.name


def _nested(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Records of a run as values by row and metric, those with a range as three."""
    found: dict[str, Any] = {}
    for record in records:
        values = found
        if record["row"]:
            values = found.setdefault(record["row"], {})
        *path, last = record["metric"].split(BETWEEN)
        for part in path:
            values = values.setdefault(part, {})
        values[last] = record["value"]
        if "low" in record:
            values[last] = {key: record[key] for key in ("value", "low", "high")}
    return found
