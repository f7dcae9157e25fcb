"""Python's own standard library: the same text on every machine with this Python, cleanly split."""

import ast
from pathlib import Path

import pytest

from recipes_lib.core import corpus
from recipes_lib.core.corpus import INSTRUCTION, docstring_pairs, modules


def test_split_by_module_is_deterministic_and_disjoint():
    names = {split: {path.parts for path in modules(split)} for split in ("train", "validation")}
    assert names["train"] and names["validation"] and not names["train"] & names["validation"]
    assert modules("train") == modules("train")
    prompts = [{p["prompt"] for p in docstring_pairs(split)} for split in ("train", "validation")]
    assert len(prompts[0]) > 1000 and len(prompts[1]) > 100 and not prompts[0] & prompts[1]


def test_neither_tests_nor_installed_packages_are_text():
    parts = {part for split in ("train", "validation") for path in modules(split) for part in path.parts}
    assert not parts & {"test", "site-packages", "encodings"}


def test_the_answer_is_not_in_the_question(monkeypatch, tmp_path):
    """The docstring's first paragraph, and the source without the docstring; what says nothing is left out."""
    source = '''
class A:
    def f(self, x):
        """Return twice the given number.

        More.
        """
        y = 2 * x
        return y

    def g(self):
        """Helper."""
        return 1

    def h(self):
        """Only words here, and no code."""
'''
    (tmp_path / "a.py").write_text(source)
    (tmp_path / "broken.py").write_text("print 'Python 2'")
    monkeypatch.setattr(corpus, "modules", lambda split: sorted(tmp_path.glob("*.py")) if split == "train" else [])
    docstring_pairs.cache_clear()
    try:
        (pair,) = docstring_pairs("train")
    finally:
        docstring_pairs.cache_clear()
    code = "def f(self, x):\n    y = 2 * x\n    return y"
    assert pair == {"prompt": INSTRUCTION + code, "completion": "Return twice the given number."}


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_question_is_a_whole_function(split):
    for pair in docstring_pairs(split)[:50]:
        assert isinstance(ast.parse(pair["prompt"].removeprefix(INSTRUCTION)).body[0], ast.FunctionDef)
        assert len(pair["completion"].split()) >= 4
    assert all(isinstance(path, Path) and path.suffix == ".py" for path in modules(split))
