"""Small models side by side: fair to each of them."""

import pytest
import torch

from recipes_lib.workflows.bench import small_models
from recipes_lib.workflows.bench.small_models import (
    ARCHITECTURES,
    BASELINE,
    SIZES,
    compare_architectures,
    pool_and_heal,
)


@pytest.fixture(autouse=True)
def smaller(monkeypatch):
    for name, size in {"hidden": 32, "layers": 1, "rows": 2, "seq_len": 16}.items():
        monkeypatch.setitem(SIZES, name, size)


def test_all_architectures_beside_the_baseline(monkeypatch):
    """The mistakes: an architecture that is not what its name says, or has more weights; batches or
    weights that depend on who else trains."""
    results = compare_architectures(steps=3, seeds=(0, 1))
    assert list(results) == list(ARCHITECTURES)
    base = results[BASELINE]
    assert base.beyond_baseline == [0, 0]
    assert results["SwiGLU"].parameters == pytest.approx(base.parameters, rel=0.01)
    # Three norms without biases of 32.
    assert base.parameters - results["RMSNorm"].parameters == 3 * 32
    assert results["untied"].parameters - base.parameters == 256 * 32
    assert base.cache_bytes_per_token == 4 * results["one KV head"].cache_bytes_per_token
    assert len({result.loss for result in results.values()}) == len(results)
    assert "bytes of cache per token" in str(base)
    monkeypatch.setattr(small_models, "ARCHITECTURES", {BASELINE: ARCHITECTURES[BASELINE]})
    torch.rand(1)
    assert compare_architectures(steps=3, seeds=(1,))[BASELINE].losses == base.losses[1:]


def test_a_pooled_model_beside_the_one_that_was_never_pooled():
    """A copy that shares its weights with the pooled model would heal with it."""
    (losses,) = pool_and_heal(seeds=(1,), steps=25, healing_steps=10)
    assert losses.pooled != losses.trained
    assert losses.never_pooled < losses.trained < 5.6
    assert losses.healed != losses.never_pooled
