"""Plants known mistakes into a copy of the package, one at a time: which test sees each?

    python tests/plant_mistakes.py                     all of them
    python tests/plant_mistakes.py NAME ...            some of them
    python tests/plant_mistakes.py --list              their names, and what a user would suffer

The list is in tests/mistakes.py. The exit status is 1 if one is not caught. The working tree is
never changed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from mistakes import MISTAKES, Mistake

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(
    ".*", "runs", "build", "__pycache__", "*.egg-info", "*.pyc", "*.ipynb"
)
LONGEST = 900  # seconds that the tests of one mistake may take: it may have made an endless loop


def main() -> int:
    """Plants what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the mistakes to plant")
    parser.add_argument("--list", action="store_true", help="show the mistakes and plant none")
    arguments = parser.parse_args()

    chosen = choose(arguments.names)
    if arguments.list:
        for mistake in chosen:
            print(f"{mistake.name:<36}{mistake.file}\n    {mistake.suffers}")
        return 0
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
        return report(chosen, copy)


def choose(names: Iterable[str]) -> list[Mistake]:
    """The mistakes of these names, or all of them."""
    known = {mistake.name: mistake for mistake in MISTAKES}
    assert len(known) == len(MISTAKES), "every mistake has a name of its own"
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"there is no mistake {', '.join(unknown)}: see --list")
    return [known[name] for name in names] or MISTAKES


def report(chosen: Iterable[Mistake], copy: Path) -> int:
    """Plants each in the copy and prints what became of it; 1 if one was not caught."""
    require_the_copy(copy)
    seen_by = {}
    missed = []
    for mistake in chosen:
        problem, test = plant(mistake, copy)
        if problem:
            missed.append(mistake)
            print(f"NOT CAUGHT  {mistake.name}: {problem}. {mistake.suffers}", flush=True)
        else:
            seen_by[test] = mistake
            print(f"caught      {mistake.name:<36}{test}", flush=True)

    # A test that fails without any mistake proves nothing.
    broken = failing_tests(seen_by, copy, stop=False)
    for test in broken:
        print(f"PROVES NOTHING  {seen_by[test].name}: {test} fails without the mistake, too")
    return int(bool(missed or broken))


def plant(mistake: Mistake, copy: Path) -> tuple[str, str]:
    """What is wrong with the proof ("" if nothing), and the first test that saw the mistake."""
    path = copy / "recipes_lib" / mistake.file
    text = path.read_text(encoding="utf-8")
    occurs = text.count(mistake.right)
    if occurs != 1:
        return f"its text occurs {occurs} times in {mistake.file}, so the list is out of date", ""

    path.write_text(text.replace(mistake.right, mistake.wrong), encoding="utf-8")
    try:
        failed = failing_tests([f"tests/{file}" for file in mistake.tests], copy)
    except subprocess.TimeoutExpired:
        return f"the tests did not end within {LONGEST} seconds", ""
    except RuntimeError as error:
        return str(error), ""
    finally:
        path.write_text(text, encoding="utf-8")
    if not failed:
        return f"all tests pass in {', '.join(mistake.tests)}", ""
    return "", failed[0]


def failing_tests(tests: Iterable[str], copy: Path, *, stop: bool = True) -> list[str]:
    """Runs test files or single tests in the copy; the names of those that fail.

    Raises RuntimeError if the tests cannot run, for instance because nothing can be imported.
    """
    tests = list(tests)
    if not tests:
        return []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", *tests]
    if stop:
        command.append("-x")
    done = subprocess.run(
        command, cwd=copy, env=environment(copy), capture_output=True, text=True, timeout=LONGEST
    )
    # pytest ends with 0 if all tests pass and with 1 if some fail; above, it could not run them.
    tests_ran = done.returncode in (0, 1)
    if not tests_ran:
        last = done.stdout.strip().splitlines()[-1:] or [done.stderr[-200:]]
        raise RuntimeError(f"the tests did not run: {last[0]}")
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)


def environment(copy: Path) -> dict[str, str]:
    """As in `make test`; and the copy is imported, although the working tree is installed."""
    return os.environ | {"PYTHONPATH": str(copy), "RECIPES_FAST": "1", "OMP_NUM_THREADS": "1"}


def require_the_copy(copy: Path) -> None:
    """Otherwise every mistake would be planted where nobody looks."""
    command = [sys.executable, "-c", "import recipes_lib; print(recipes_lib.__file__)"]
    done = subprocess.run(
        command, cwd=copy, env=environment(copy), capture_output=True, text=True, check=True
    )
    imported = Path(done.stdout.strip())
    if not imported.is_relative_to(copy):
        sys.exit(f"the tests would import {imported} instead of the copy in {copy}")


if __name__ == "__main__":
    sys.exit(main())
