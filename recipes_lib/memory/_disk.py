"""Where techniques of this room put files: a folder on a disk, and not one in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

# /tmp may be memory; /var/tmp is meant to survive a restart.
DIRECTORY = "/var/tmp" if Path("/var/tmp").is_dir() else tempfile.gettempdir()


def directory_on_disk(directory: str | Path | None) -> Path:
    """`directory`, by default /var/tmp."""
    path = Path(directory or DIRECTORY).resolve()
    if _file_system(path) == "tmpfs":
        raise ValueError(f"{path} is a RAM disk, which saves no memory: give `directory` on a disk")
    return path


def _file_system(directory: Path) -> str | None:
    """The kind of file system under `directory` on Linux, where /tmp may be memory; else None."""
    table = Path("/proc/mounts")
    if not table.exists():
        return None
    kinds = {}
    for line in table.read_text().splitlines():
        _device, mount_point, kind, *_options = line.split()
        kinds[mount_point] = kind
    for path in (directory, *directory.parents):
        if str(path) in kinds:
            return kinds[str(path)]
    return None
