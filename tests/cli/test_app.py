import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes_lib.cli import app

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("list", "bench", "doctor", "finetune")

WITHOUT_TORCH = """
import sys
from recipes_lib.cli.app import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules, "torch was imported"
"""


def test_help_and_list_answer_at_once():
    """Importing torch takes more than a second, and neither needs it."""
    for arguments in (["--help"], ["bench", "--help"], ["list"]):
        line = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_help_names_every_command(command):
    """The mistake: a command that nobody has put into the program."""
    status, out, _ = command("--help")
    assert status == 0
    for name in COMMANDS:
        assert f" {name} " in out
        assert command(name, "--help")[0] == 0


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such shape"),
        ImportError("this recipe needs bitsandbytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
        OSError(errno.ENOSPC, "No space left on device", "runs/a/checkpoint.pt"),
        PermissionError(errno.EACCES, "Permission denied", "pairs.jsonl"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_user_can_put_right_is_one_line(command, monkeypatch, error):
    """Not a traceback with the values of all variables."""
    monkeypatch.setattr(app, "app", raiser(error))
    assert command("list") == (1, "", f"error: {error}")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes differ"), KeyError("loss"), FileNotFoundError(errno.ENOENT, "no file")],
)
def test_a_defect_of_ours_shows_its_traceback(monkeypatch, error):
    """The mistake: one line about shapes, which no user can put right."""
    monkeypatch.setattr(app, "app", raiser(error))
    with pytest.raises(type(error)):
        app.main(["list"])


def raiser(error):
    def app(args):
        raise error

    return app
