import io
import sys

import pytest

from recipes_lib.cli.progress import counting, working


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def open_terminal(monkeypatch):
    def replace_stdout():
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr(sys, "stdout", Terminal())
        return sys.stdout

    # Called by the test: before it begins, pytest puts its own standard output in place.
    return replace_stdout


def test_a_pipe_gets_a_plain_line_per_part(capsys):
    """Control characters in a log file are garbage."""
    with counting("measuring", total=2) as announce:
        announce("baseline")
        announce("lora")
    with working("fine-tuning") as announce:
        announce("training: 1 of 3 done")
        print("step 0")
    assert capsys.readouterr().out == "measuring baseline\nmeasuring lora\nstep 0\n"


def test_a_terminal_gets_a_bar_that_counts_what_is_done(open_terminal):
    terminal = open_terminal()
    with counting("measuring", total=2) as announce:
        announce("baseline")
        first = terminal.getvalue()
        announce("lora")
        second = terminal.getvalue()[len(first) :]
    assert "measuring baseline" in first
    assert "0/2" in first
    assert "measuring lora" in second
    assert "1/2" in second


def test_what_is_printed_stands_above_the_wheel(open_terminal):
    terminal = open_terminal()
    with working("fine-tuning") as announce:
        announce("held-out loss before: 32 of 400 rows done")
        print("step 0: loss 2.5")
    shown = terminal.getvalue()
    assert "held-out loss before: 32 of 400 rows done" in shown
    assert "step 0: loss 2.5\n" in shown
