"""Where results are written, and what stands beside each of them: machine, versions, commit."""

from __future__ import annotations

import datetime
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

from recipes_lib.core.measure.machine import fast, machine

CHECKOUT = Path(__file__).resolve().parents[3]


def provenance() -> dict:
    """Machine, versions, date and commit: what every recorded number is stored with."""
    facts = asdict(machine())
    return facts | {"fast": fast(), "date": datetime.date.today().isoformat(), "commit": _commit()}


def runs_dir() -> Path:
    """Where results are written: `$RECIPES_RUNS`, else `runs/` of the checkout, else `./runs`."""
    root = CHECKOUT if (CHECKOUT / "pyproject.toml").exists() else Path.cwd()
    folder = Path(os.environ.get("RECIPES_RUNS") or root / "runs")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _commit() -> str | None:
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
