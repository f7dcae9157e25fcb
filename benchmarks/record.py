"""Keep what a run measured: benchmarks/results/<machine>-<date>.json, one file per machine and day.

python -m benchmarks.record runs/01_large_models_limited_hardware.json
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from recipes_lib.core.machine import provenance

RESULTS = Path(__file__).parent / "results"
FACTS = (
    "device",
    "name",
    "memory_bytes",
    "native_bf16",
    "cores",
    "tier",
    "versions",
    "fast",
    "date",
    "commit",
)


def results_file(facts: dict[str, Any]) -> Path:
    """Where the results of this machine and day belong."""
    plain = re.sub(r"\((R|TM)\)|@.*|NVIDIA|Processor|CPU", " ", facts["name"])
    slug = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")
    # Two kinds of CPU may share a name: the one that multiplies bf16 natively is another machine.
    kind = "-bf16" if facts["device"] == "cpu" and facts["native_bf16"] else ""
    return RESULTS / f"{slug}-{facts['cores']}cores{kind}-{facts['date']}.json"


def keep(
    part: str,
    content: dict[str, Any],
    *,
    facts: dict[str, Any] | None = None,
    folder: Path | None = None,
) -> Path:
    """Add one part to the file, replacing an older one of that name, in one step: never half a file."""
    facts = facts or provenance()
    path = results_file(facts)
    path = (folder or RESULTS) / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    parts = old["parts"] | {
        part: content | {"commit": facts["commit"], "versions": facts["versions"]}
    }
    new = {key: facts[key] for key in FACTS} | {"parts": parts}
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(new, indent=1) + "\n")
    os.replace(scratch, path)
    return path


def keep_ladder(path: Path, *, folder: Path | None = None) -> Path:
    """Keep the ladder that a notebook or a bench wrote into runs/. Raises ValueError for small sizes."""
    ladder = json.loads(path.read_text())
    if ladder["fast"] and folder is None:
        raise ValueError(
            f"{path} was measured in the small sizes of RECIPES_FAST=1: run it in full size first"
        )
    return keep(
        path.stem, {"facts": ladder["facts"], "rows": ladder["rows"]}, facts=ladder, folder=folder
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(keep_ladder(Path(name)))
