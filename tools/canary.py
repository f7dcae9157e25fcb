"""Which release of another library broke what: run the tests with the newest of everything.

    pip install --upgrade --editable ".[notebooks,edge,execute,dev,trackers]"
    python -m tools.canary

The tests run once with what is installed. If some fail, each library that differs from its tested
version in `requirements.txt` goes back to that version, one at a time and alone, and the tests that
failed run again. If more of them pass then, this release is what broke them. A library is put to
its newest version again before the next one is tried, so each stands for itself.

It ends with 0 if all tests pass, and with 1 if not.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile"]
TESTS += ["-m", "not survey", "--nbmake", "--nbmake-timeout=900", "tests", "notebooks"]
AGAIN = ["--last-failed", "--last-failed-no-failures", "none"]
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==([^ ;]+)")
FAILED = re.compile(r"(\d+) (?:failed|errors?)\b")


def pinned(requirements: str) -> dict[str, str]:
    """The tested version of each library, from the text of `requirements.txt`."""
    versions = {}
    for line in requirements.splitlines():
        found = PIN.match(line)
        if found is not None:
            name, tested = found.groups()
            versions[name] = tested
    return versions


def installed(names: Sequence[str]) -> dict[str, str]:
    """The version of each of these libraries on this machine, without those that are missing."""
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def changed(tested: Mapping[str, str], found: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Tested and found version of each library where the two differ."""
    pairs = {name: (tested[name], found[name]) for name in found}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def failures(output: str) -> int:
    """How many tests failed or could not start, from the last line of pytest."""
    lines = output.strip().splitlines()
    if not lines:
        return 0
    return sum(int(count) for count in FAILED.findall(lines[-1]))


def run_tests(arguments: Sequence[str] = ()) -> int:
    """Run them, show what they print, and return how many failed."""
    done = subprocess.run(
        [*TESTS, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout, flush=True)
    count = failures(done.stdout)
    if done.returncode not in (0, 5) and count == 0:
        return 1  # pytest itself ended with an error
    return count


def install(name: str, wanted: str) -> None:
    """Put one library to a version, and leave all others as they are."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"{name}=={wanted}"]
    subprocess.run(command, check=True)


def main() -> int:
    broken = run_tests()
    if broken == 0:
        return 0
    tested = pinned((ROOT / "requirements.txt").read_text(encoding="utf-8"))
    news = changed(tested, installed(list(tested)))
    findings = []
    for name, (old, new) in news.items():
        install(name, old)
        left = run_tests(AGAIN)
        install(name, new)
        if left < broken:
            findings.append(f"{name} {old} -> {new} broke {broken - left} of {broken} tests")
    for line in findings or ["no single release explains the failures: read them above"]:
        print(line)
    return 1


if __name__ == "__main__":
    sys.exit(main())
