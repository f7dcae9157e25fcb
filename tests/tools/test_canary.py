import re
import tomllib
from pathlib import Path

from tools import canary

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

REQUIREMENTS = """
# a remark
torch>=2.9             # a range
transformers==5.23.0   # the models
rich==15.0.0; python_version >= "3.11"
"""


def test_only_pins_are_compared():
    """Catches a range that is taken for the version that was tested."""
    tested = canary.pinned(REQUIREMENTS)
    assert tested == {"transformers": "5.23.0", "rich": "15.0.0"}
    found = {"transformers": "6.0.0", "rich": "15.0.0"}
    assert canary.changed(tested, found) == {"transformers": ("5.23.0", "6.0.0")}


def test_failures_are_read_from_the_last_line():
    output = "FAILED tests/a.py\n= 2 failed, 10 passed, 1 error in 3.21s =\n"
    assert canary.failures(output) == 3
    assert canary.failures("= 10 passed in 3.21s =") == 0
    assert canary.failures("") == 0


def test_the_release_that_broke_something_is_named(monkeypatch, capsys):
    """Catches a canary that says that something broke, and not what."""
    state = {"transformers": "6.0.0", "rich": "16.0.0"}
    monkeypatch.setattr(canary, "pinned", lambda text: {"transformers": "5.0", "rich": "15.0"})
    monkeypatch.setattr(canary, "installed", lambda names: dict(state))
    monkeypatch.setattr(canary, "install", state.__setitem__)

    def failing(arguments=()):
        if state["rich"] == "16.0.0":
            return 4
        return 1

    monkeypatch.setattr(canary, "run_tests", failing)
    assert canary.main() == 1
    assert "rich 15.0 -> 16.0.0 broke 3 of 4 tests" in capsys.readouterr().out
    assert state == {"transformers": "6.0.0", "rich": "16.0.0"}, "all is new again"
    monkeypatch.setattr(canary, "run_tests", lambda arguments=(): 0)
    assert canary.main() == 0


def test_the_canary_installs_all_that_was_tested():
    """The mistake: without jupytext it can only fail, and `continue-on-error` hides that."""
    workflow = (ROOT / ".github" / "workflows" / "canary.yml").read_text()
    [extras] = re.findall(r'--editable "\.\[(.+)\]"', workflow)
    ranges = list(PROJECT["dependencies"])
    for extra in extras.split(","):
        ranges += PROJECT["optional-dependencies"][extra]
    names = {re.match(r"[\w.-]+", each)[0] for each in ranges}
    tested = canary.pinned((ROOT / "requirements.txt").read_text())
    assert "jupytext" in tested
    assert tested.keys() - names == set()
    assert "continue-on-error" not in workflow


def test_one_floor_of_python_everywhere():
    """The mistake: 3.10 is promised, and a library that is required cannot be installed on it."""
    floor = PROJECT["requires-python"].removeprefix(">=")
    for file in ("README.md", "Makefile", "docs/install.md"):
        promised = re.findall(r"(3\.\d+) or newer", (ROOT / file).read_text())
        assert set(promised) == {floor}, file
    checks = (ROOT / "Makefile").read_text()
    assert f"sys.version_info < ({floor.replace('.', ', ')})" in checks
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    [matrix] = re.findall(r"python: \[(.+)\]", workflow)
    assert matrix.split(", ")[0] == f'"{floor}"'
