"""Keep what a run measured, and find it again: benchmarks/results/<machine>-<date>.json.

python -m benchmarks.record runs/01_large_models_limited_hardware.json runs/distillation.json

There is one file per machine and day. It holds the facts of the machine and the `parts` that were
measured: a part of `benchmarks.gpu`, the ladder of a notebook, or the run of a program of its own:
`benchmarks.architecture`, `benchmarks.distillation`, `benchmarks.inference_peers`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.complete import LACKING
from recipes_lib.core.measure.machine import provenance

RESULTS = Path(__file__).parent / "results"

# The ladders of the notebooks, by the number of the notebook.
LADDERS = {
    "01": "01_large_models_limited_hardware",
    "02": "02_multi_gpu_training",
    "03": "03_optimizing_inference_speed",
    "04": "04_training_long_sequences",
    "05": "05_fine_tuning_pretrained_models",
    "06": "06_training_for_edge_devices",
}

# What a file of results says of its machine; see `core.machine.provenance`.
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

# What has to be the same for parts that stand in one file of a program.
SAME = ("name", "native_bf16", "date", "fast", "threads", "short", "settings")

# --- write --------------------------------------------------------------------------------------


def results_file(facts: dict[str, Any]) -> Path:
    """Where the results of this machine and day belong."""
    # "Intel(R) Xeon(R) Processor @ 2.70GHz" becomes "intel-xeon".
    plain = re.sub(r"\((R|TM)\)|@.*|NVIDIA|Processor|CPU", " ", facts["name"])
    slug = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")
    kind = ""
    if facts["device"] == "cpu" and facts["native_bf16"]:
        # Two kinds of CPU may share a name: one that multiplies bf16 natively is another machine.
        kind = "-bf16"
    return RESULTS / f"{slug}-{facts['cores']}cores{kind}-{facts['date']}.json"


def keep(
    part: str,
    content: dict[str, Any],
    *,
    facts: dict[str, Any] | None = None,
    folder: Path | None = None,
) -> Path:
    """Add one part to the file of this machine and day, and return the file.

    An older part of that name is replaced. The file is written whole or not at all.

    Args:
        facts: of the machine that measured; by default those of this one.
        folder: by default benchmarks/results.
    """
    facts = facts or provenance()
    path = (folder or RESULTS) / results_file(facts).name
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {}
    if path.exists():
        parts = json.loads(path.read_text())["parts"]
    # Parts of one day may come from different commits: each says its own.
    parts[part] = content | {"commit": facts["commit"], "versions": facts["versions"]}
    results = {key: facts[key] for key in FACTS} | {"parts": parts}
    write_whole(path, results)
    return path


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write a file of JSON whole or not at all: who is cut while writing leaves the older file."""
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(scratch, path)


def parts_to_keep(path: Path, facts: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """Those of `parts` that a program's older file holds and that do not run again.

    Args:
        facts: of the run that begins. The older file has to agree with all that are in `SAME`, or
            its parts would get the date and machine of today.
    Raises ValueError where it does not, and holds one of the parts.
    """
    if not path.exists():
        return {}
    old = json.loads(path.read_text())
    kept = {part: old[part] for part in parts if part in old}
    for key in SAME:
        if kept and old.get(key) != facts.get(key):
            raise ValueError(
                f"{path} holds {', '.join(kept)} with {key} {old.get(key)}, and now it is "
                f"{facts.get(key)}: run all parts, or move the file away"
            )
    return kept


def keep_run(path: Path, *, folder: Path | None = None) -> Path:
    """Keep a file from runs/: the ladder of a notebook, or the run of a program of its own.

    Raises ValueError for any other file, for small sizes unless a `folder` is given, and for a run
    that has not ended.
    """
    run = _read(path)
    if path.stem in LACKING:
        return _keep_program(path, run, folder=folder)
    if "ladder" in run and "rows" in run:
        return keep_ladder(path, folder=folder)
    programs = ", ".join(f"{name}.json" for name in LACKING)
    raise ValueError(
        f"{path} is neither the ladder of a notebook nor one of {programs}: only these are recorded"
    )


def keep_ladder(path: Path, *, folder: Path | None = None) -> Path:
    """Keep the ladder that a notebook or a bench wrote into runs/.

    Raises ValueError for small sizes, unless a `folder` is given.
    """
    ladder = _read(path)
    _check_full_size(path, ladder, folder)
    content = {"facts": ladder["facts"], "rows": ladder["rows"]}
    return keep(path.stem, content, facts=ladder, folder=folder)


def _keep_program(path: Path, run: dict[str, Any], *, folder: Path | None) -> Path:
    """Keep the run of a program of its own, if it has ended."""
    _check_full_size(path, run, folder)
    lacking = LACKING[path.stem](run)
    if lacking:
        raise ValueError(
            f"{path} is not complete: it lacks {'; '.join(lacking)}. Record it when "
            f"`python -m benchmarks.{path.stem}` has ended"
        )
    content = {key: value for key, value in run.items() if key not in FACTS}
    return keep(path.stem, content, facts=run, folder=folder)


def _read(path: Path) -> dict[str, Any]:
    """What a run wrote. Raises ValueError for a file that no program of ours has written."""
    try:
        run = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON ({error}): give a file that a run wrote") from error
    lacking = list(FACTS)
    if isinstance(run, dict):
        lacking = [key for key in FACTS if key not in run]
    if lacking:
        raise ValueError(
            f"{path} does not say on which machine it was measured (it lacks "
            f"{', '.join(lacking)}): give a file that a notebook or a benchmark wrote into runs/"
        )
    return run


def _check_full_size(path: Path, run: dict[str, Any], folder: Path | None) -> None:
    if run["fast"] and folder is None:
        raise ValueError(
            f"{path} was measured in the small sizes of RECIPES_FAST=1: run it in full size first"
        )


# --- read ---------------------------------------------------------------------------------------


def newest(
    part: str,
    device: str,
    *,
    bf16: bool | None = None,
    row: str | None = None,
    folder: Path = RESULTS,
) -> dict[str, Any] | None:
    """The latest recorded part, together with the facts of its machine; None if there is none.

    Args:
        device: "cpu" or "cuda".
        bf16: only of machines with, or only of machines without native bf16.
        row: only of runs that have a row of this name.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        if run["device"] != device or run["fast"] or part not in run["parts"]:
            continue
        if bf16 is not None and run["native_bf16"] != bf16:
            continue
        if row is not None and not _has_row(run["parts"][part], row):
            continue
        found.append(run)
    if not found:
        return None
    latest = max(found, key=lambda run: run["date"])
    return latest | latest["parts"][part]


def _has_row(content: dict[str, Any], name: str) -> bool:
    return any(plain_name(row["name"]) == plain_name(name) for row in content["rows"])


def plain_name(name: str) -> str:
    """A row's name without the "+ " that runs before 2026-11-23 wrote in front of some."""
    return name.removeprefix("+ ")


def machine_line(run: dict[str, Any]) -> str:
    """The machine, versions and date of a run in one line."""
    name = re.sub(r"\((R|TM)\)", "", run["name"])
    versions = f"torch {run['versions']['torch']}, transformers {run['versions']['transformers']}"
    bf16 = "no native bf16"
    if run["native_bf16"]:
        bf16 = "native bf16"
    return f"{name}, {run['cores']} CPU cores, {bf16}, {versions}, {run['date']}"


if __name__ == "__main__":
    for given in sys.argv[1:]:
        print(keep_run(Path(given)))
