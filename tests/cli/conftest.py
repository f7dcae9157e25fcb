"""The command line in this process: what it prints, and the status with which it ends."""

import sys

import pytest

from recipes_lib.cli.app import main


@pytest.fixture
def command(capsys, monkeypatch):
    """`command("bench", "lora")` gives (status, standard output, standard error)."""
    monkeypatch.setattr(sys, "argv", ["recipes_lib"])  # named in usage messages

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        status = ended.value.code or 0
        out, err = capsys.readouterr()
        if isinstance(status, str):  # Python prints a text as it ends, and takes status 1
            return 1, out, err + status
        return status, out, err

    return run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path))
    return tmp_path
