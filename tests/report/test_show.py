"""`show` shows today's code, without what the text of a notebook says anyway."""

from types import SimpleNamespace

from recipes_lib.report import show as module
from recipes_lib.report.ladder import Ladder
from recipes_lib.report.show import show, shown


def test_a_function_is_printed_without_its_docstring(capsys):
    show(shown)
    printed = capsys.readouterr().out
    assert printed.startswith("def shown(*functions: Any) -> str:\n    sources = []\n")
    assert "The lines that" not in printed
    assert "# A method is indented" in printed  # comments stay


def test_a_method_loses_its_indentation():
    """The mistake: the source of a method on its own is no valid Python, so it cannot be parsed."""
    code = shown(Ladder.append)
    assert code.startswith("def append(")
    assert "Add a finished" not in code
    assert "    self.save()" in code


def test_jupyter_gets_a_highlighted_block(monkeypatch, capsys):
    """And text for what cannot show Markdown. A print on top would show the code twice."""
    displayed = []
    kernel = SimpleNamespace(kernel=object())
    monkeypatch.setattr("IPython.get_ipython", lambda: kernel)
    monkeypatch.setattr("IPython.display.display", lambda data, raw: displayed.append(data))
    show(module.in_markdown)
    code = shown(module.in_markdown)
    assert displayed == [{"text/markdown": f"```python\n{code}\n```", "text/plain": code}]
    assert capsys.readouterr().out == ""
