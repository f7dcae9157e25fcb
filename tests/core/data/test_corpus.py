"""Python's own standard library: the same text on every machine with this Python, cleanly split."""

from recipes_lib.core.data import corpus
from recipes_lib.core.data.corpus import INSTRUCTION, SPLITS, docstring_pairs, modules


def test_split_by_module_is_deterministic_and_disjoint():
    names = {split: {path.parts for path in modules(split)} for split in SPLITS}
    assert names["train"] and names["validation"] and not names["train"] & names["validation"]
    assert modules("train") == modules("train")
    prompts = [[pair["prompt"] for pair in docstring_pairs(split)] for split in SPLITS]
    assert len(prompts[0]) > 1000 and len(prompts[1]) > 100 and not {*prompts[0]} & {*prompts[1]}
    assert all(len({*some}) == len(some) for some in prompts), "each once"
    assert prompts[1] == [pair["prompt"] for pair in docstring_pairs("validation")]


def test_the_answer_is_not_in_the_question(monkeypatch, tmp_path):
    """The docstring's first paragraph, and the source without the docstring; what says nothing is
    left out.
    """
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
    monkeypatch.setattr(
        corpus, "modules", lambda split: sorted(tmp_path.glob("*.py")) if split == "train" else []
    )
    (pair,) = docstring_pairs("train")
    code = "def f(self, x):\n    y = 2 * x\n    return y"
    assert pair == {"prompt": INSTRUCTION + code, "completion": "Return twice the given number."}
