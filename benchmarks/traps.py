"""The rows of TRAPS.md, read once more: the worst for the cheatsheet, the guards for a test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TRAPS = Path(__file__).resolve().parents[1] / "TRAPS.md"


@dataclass(frozen=True)
class Trap:
    """A row of TRAPS.md. The worst are in bold there."""

    symptom: str
    cause: str
    how_to_see: str
    guard: str

    @property
    def is_worst(self) -> bool:
        return self.symptom.startswith("**")


def rows() -> list[Trap]:
    """All rows of all groups. Raises ValueError for a row with more or fewer cells than four."""
    found = []
    for line in TRAPS.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| "):
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) != 4:
            raise ValueError(f"TRAPS.md: give four cells, this row has {len(cells)}: {line}")
        if cells[0] != "symptom":
            found.append(Trap(*cells))
    return found


def worst() -> str:
    """The worst traps as a table in markdown, each with its cause and its guard."""
    lines = ["| symptom | cause | guard |", "|---|---|---|"]
    for trap in rows():
        if trap.is_worst:
            symptom = trap.symptom.strip("*")
            lines.append(f"| {symptom} | {trap.cause} | {trap.guard} |")
    return "\n".join(lines)
