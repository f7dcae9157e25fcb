"""Move the repository: write its new address wherever the old one stands.

    make address REPO=owner/name

The present address is the `Repository` of pyproject.toml. Badges, links and the cells that clone
the repository repeat it; all of them change together. Python's standard library is enough to run
this, so a fork can do it before any set-up.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Where a reader meets the address. The test searches the whole repository for a place that is
# missing here.
PLACES = (
    "pyproject.toml",
    "*.md",
    "docs/*.md",
    "notebooks/*.ipynb",
    "notebooks/source/*.py",
)

# Letters, digits and hyphens for an owner; for a repository also dots and underscores.
OWNER_AND_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*/[\w.-]*\w", re.ASCII)


def present_address(root: Path) -> str:
    """The owner/name that pyproject.toml holds. Raises ValueError if it holds none."""
    settings = (root / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^Repository = "https://github\.com/([^"]+)"$', settings, re.MULTILINE)
    if not found:
        raise ValueError(
            'pyproject.toml has no line Repository = "https://github.com/owner/name" '
            "below [project.urls]: write it there"
        )
    return found[1]


def check_address(address: str) -> None:
    """Raises ValueError for anything but owner/name."""
    if not OWNER_AND_NAME.fullmatch(address) or address.endswith(".git"):
        raise ValueError(
            f"REPO={address!r} is no address of a repository: "
            f"give the owner and the name, as in make address REPO=ada/recipes"
        )


def pattern_of(address: str) -> re.Pattern[bytes]:
    """The address in a link to GitHub or to Colab, and not as the beginning of a longer name."""
    return re.compile(rb"(github(?:\.com)?/)" + re.escape(address.encode()) + rb"(?![\w-])")


def change_address(root: Path, new: str) -> list[Path]:
    """Write `new`, an owner/name, in place of the present address; gives the files that changed.

    Raises ValueError if `new` is no owner/name; then nothing has changed.
    """
    check_address(new)
    old = pattern_of(present_address(root))
    changed = []
    for place in PLACES:
        for path in sorted(root.glob(place)):
            before = path.read_bytes()  # as bytes: the ends of lines stay as they are
            after = old.sub(rb"\g<1>" + new.encode(), before)
            if after != before:
                path.write_bytes(after)
                changed.append(path)
    return changed


def main(arguments: list[str]) -> None:
    """Change the address to the one that is given, and say where."""
    address = " ".join(arguments)
    try:
        changed = change_address(ROOT, address)
    except ValueError as error:
        sys.exit(str(error))
    for path in changed:
        print(path.relative_to(ROOT).as_posix())
    print(f"The address is {address} in {len(changed)} files. git diff shows the lines.")


if __name__ == "__main__":
    main(sys.argv[1:])
