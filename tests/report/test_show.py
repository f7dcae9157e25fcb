"""`show` prints today's code, without what the text of a notebook says anyway."""

from recipes_lib.report.labels import wrap
from recipes_lib.report.ladder import Ladder
from recipes_lib.report.show import show


def test_a_function_is_printed_without_its_docstring(capsys):
    show(wrap)
    printed = capsys.readouterr().out
    assert printed.startswith("def wrap(")
    assert "The text in lines" not in printed
    assert "text_width(" in printed
    assert "\n\n" not in printed


def test_a_method_loses_its_indentation(capsys):
    """The mistake: the source of a method on its own is no valid Python, so it cannot be parsed."""
    show(Ladder.append)
    printed = capsys.readouterr().out
    assert printed.startswith("def append(")
    assert "Append a finished" not in printed
    assert "    self.save()" in printed


def test_without_a_docstring_every_line_is_printed(capsys):
    def bare():
        return 1

    show(bare)
    assert capsys.readouterr().out == "def bare():\n    return 1\n"
