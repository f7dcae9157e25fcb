"""The folders of a sharded checkpoint: which one is the last whole one.

    runs/a/LATEST               one line: step-00000300
    runs/a/step-00000200/       whole
    runs/a/step-00000300/       whole: LATEST names it
    runs/a/step-00000400/       being written, or left by a run that was killed

`LATEST` is replaced by one rename when every rank has written its part. Whenever a run is killed,
`LATEST` therefore names a folder that is whole.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

LATEST = "LATEST"
METADATA = ".metadata"  # PyTorch writes it last of all


def folder_of_step(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return folder / f"step-{step:08d}"


def latest_folder(folder: Path) -> Path | None:
    """The last whole checkpoint, or None if there is none. ValueError if it is not whole."""
    file = folder / LATEST
    if not file.is_file():
        return None
    place = folder / file.read_text(encoding="utf-8").strip()
    if not (place / METADATA).is_file():
        raise ValueError(
            f"{file} names {place.name}, which is not there or not whole: write the name of "
            f"another folder into it, or remove it to begin from the start"
        )
    return place


def step_of(place: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(place.name.removeprefix("step-"))


def set_latest(folder: Path, step: int, *, keep: int) -> None:
    """Name a whole checkpoint as the last one, and remove all but the last `keep` before it."""
    before = latest_folder(folder)
    if before is not None and step_of(before) >= step:
        return  # a later save was faster
    # Under another name first: a kill while writing leaves the file as it was.
    scratch = folder / f"{LATEST}.part"
    with scratch.open("w", encoding="utf-8") as file:
        file.write(folder_of_step(folder, step).name)
        file.flush()
        os.fsync(file.fileno())  # a rename may reach the disk before the content does
    os.replace(scratch, folder / LATEST)
    for place in _folders(folder, before=step)[: 1 - keep or None]:
        shutil.rmtree(place)


def _folders(folder: Path, *, before: int) -> list[Path]:
    """The checkpoints of earlier steps, the oldest first."""
    places = [path for path in folder.iterdir() if re.fullmatch(r"step-\d{8}", path.name)]
    return sorted(place for place in places if step_of(place) < before)
