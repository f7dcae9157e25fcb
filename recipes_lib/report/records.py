"""Results that are recorded in benchmarks/results: for what takes too long to run here.

losses = recorded("rope")["losses"]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def recorded(part: str) -> dict[str, Any] | None:
    """The newest recorded result of a part of `benchmarks`, of any machine, or None.

    `measured_on` in it names the machine and the day.
    """
    runs = []
    for path in RESULTS.glob("*.json"):
        run = json.loads(path.read_text())
        if part in run["parts"]:
            runs.append(run)
    if not runs:
        return None
    newest = max(runs, key=lambda run: run["date"])  # as text, ISO dates are in order
    where = f"recorded on {newest['name']}, {newest['date']}"
    return newest["parts"][part] | {"measured_on": where}
