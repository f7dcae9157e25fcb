"""docs/predictions.md: what is predicted, beside what was measured here and published elsewhere.

python -m benchmarks.family_predictions     measure first: some minutes of one core
python -m benchmarks.predictions_page       predict the published peaks, and write the page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import published_peaks
from benchmarks.family_predictions import FILE, SHAPE, error
from benchmarks.render import page as from_template
from recipes_lib.core.measure.runs import runs_dir

PAGE = Path(__file__).parents[1] / "docs" / "predictions.md"


def page(run: dict[str, Any]) -> str:
    """The page, with the families of this run of `benchmarks.family_predictions`."""
    return from_template(
        "predictions.md.j2",
        run=run,
        shape=SHAPE,
        error=error,
        published=[published_peaks.compare(row) for row in published_peaks.PUBLISHED],
        large=published_peaks.LARGE,
    )


def main() -> None:
    """Write the page. Raises ValueError before the families are there."""
    file = runs_dir() / FILE
    if not file.exists():
        raise ValueError(f"{file} is not there: run `python -m benchmarks.family_predictions`")
    PAGE.write_text(page(json.loads(file.read_text())), encoding="utf-8")
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
