"""Every technique on every family: equal to an independent reference, or refused in one sentence.

Five families in every run: the tests of a technique need not compare a whole model again. `make
survey` takes every family of the installed transformers, and writes docs/families.md.
`FAMILIES=lfm2,mamba` takes these.
"""

import functools
import os

import pytest

from tests.families.configs import FAMILIES
from tests.families.page import write_page
from tests.families.parity import Family, Outcome, outcome
from tests.families.techniques import TECHNIQUES

# The usual one; learned positions, Conv1D and biases; a window of its own, norms of Q and K and a
# scaled embedding; experts; no attention.
CORE = ("llama", "gpt2", "gemma3_text", "qwen3_moe", "mamba")
ASKED = os.environ.get("FAMILIES", "")


def chosen_families():
    if ASKED == "all":
        return [pytest.param(name, marks=pytest.mark.survey) for name in FAMILIES]
    if ASKED:
        return ASKED.split(",")
    return CORE


@pytest.fixture(scope="module")
def outcomes():
    """What the tests find, by family and technique; all of it becomes the page in the end."""
    found = {}
    yield found
    if ASKED == "all":
        write_page(found)


@functools.lru_cache(maxsize=1)
def family_of(name):
    """The family, or why transformers cannot build a tiny one that has a loss on text."""
    try:
        family = Family(name)
        family.reference()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return family


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("name", chosen_families())
def test_equal_or_refused(name, technique, outcomes):
    """Another loss without a word, or an error that is not ours, is a defect of the package."""
    family = family_of(name)
    if isinstance(family, str):
        outcomes[name, technique] = Outcome("untested", family)
        assert name not in CORE, family
        return
    outcomes[name, technique] = outcome(family, TECHNIQUES[technique])
    kind, text = outcomes[name, technique]
    assert kind in ("equal", "refused", "untested"), f"{kind}: {text}"
    assert (kind, name in CORE) != ("untested", True), text
