import random

import numpy as np
import pytest
import torch

from recipes_lib.core.model.run_state import (
    check_facts,
    check_loadable,
    check_same_run,
    random_states,
    read_state,
    set_random_states,
)


def test_the_same_numbers_are_drawn_again():
    states = random_states()
    drawn = (random.random(), torch.rand(()).item())
    set_random_states(states)
    assert (random.random(), torch.rand(()).item()) == drawn


def test_any_difference_of_facts_is_told():
    check_same_run("c.pt", saved={"lr": 1}, given={"lr": 1})
    with pytest.raises(ValueError, match=r"c.pt belongs to another run \(lr: 1 there, 2 here\)"):
        check_same_run("c.pt", saved={"lr": 1}, given={"lr": 2})
    with pytest.raises(ValueError, match="data: None there, 'a' here"):
        check_same_run("c.pt", saved={}, given={"data": "a"})


def test_facts_are_what_comes_back(tmp_path):
    """Bytes were refused with a false sentence, and numbers of NumPy with no way out."""
    facts = {"key": b"x", "phase": 1j, "sizes": {"rows": [1, None]}}
    check_facts(facts)
    torch.save(facts, tmp_path / "facts.pt")
    assert read_state(tmp_path / "facts.pt") == facts
    with pytest.raises(ValueError, match=r"the fact rows .* NumPy, .* give int\(...\) or float"):
        check_facts({"rows": [np.int64(3)]})
    with pytest.raises(ValueError, match=r"the fact limit .* is nan, which is not equal to itself"):
        check_facts({"limit": float("nan")})


def test_only_what_can_be_loaded_stays(tmp_path):
    """A path in the facts was written and could never be read."""
    good = tmp_path / "good.pt"
    torch.save({"rates": [1e-3], "weights": torch.ones(2), "name": None}, good)
    check_loadable(good)
    odd = tmp_path / "odd.pt"
    torch.save({"folder": tmp_path}, odd)
    with pytest.raises(ValueError, match="PosixPath could not be loaded"):
        check_loadable(odd)
    assert list(tmp_path.iterdir()) == [good]
