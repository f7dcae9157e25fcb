"""Every technique on every family: equal to an independent reference, or refused in one sentence.

By default a good dozen of families; `make test FAMILIES=all` takes every family of the installed
transformers, and writes docs/families.md. `FAMILIES=lfm2,mamba` takes these.
"""

import functools
import os

import pytest

from tests.families.configs import FAMILIES
from tests.families.page import write_page
from tests.families.parity import Family, Outcome, outcome
from tests.families.techniques import TECHNIQUES

DOZEN = (
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gpt2",
    "phi3",
    "falcon",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "lfm2",
    "mamba",
    "cohere",
    "gpt_neox",
    "bloom",
)


def chosen_families():
    asked = os.environ.get("FAMILIES", "")
    if asked == "all":
        return FAMILIES
    if asked:
        return asked.split(",")
    return DOZEN


@pytest.fixture(scope="module")
def outcomes():
    """What the tests find, by family and technique; all of it becomes the page in the end."""
    found = {}
    yield found
    if os.environ.get("FAMILIES") == "all":
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
        assert name not in DOZEN, family
        return
    outcomes[name, technique] = outcome(family, TECHNIQUES[technique])
    kind, text = outcomes[name, technique]
    assert kind in ("equal", "refused", "untested"), f"{kind}: {text}"
    assert (kind, name in DOZEN) != ("untested", True), text


def test_the_families_are_found():
    """An empty list would pass every test above."""
    assert set(DOZEN) <= set(FAMILIES)
    assert len(FAMILIES) >= 100
    assert len(TECHNIQUES) >= 30
