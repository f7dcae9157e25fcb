"""Small models side by side: fair to each of them."""

import pytest

from recipes_lib.workflows.bench.small_models import (
    ARCHITECTURES,
    BASELINE,
    compare_architectures,
    pool_and_heal,
)

SMALL = {"steps": 3, "hidden": 32, "layers": 1, "rows": 2, "seq_len": 16}


def test_all_architectures_beside_the_baseline():
    """The mistake: an architecture that is not what its name says, or has more weights."""
    results = compare_architectures(seeds=(0,), **SMALL)
    assert list(results) == list(ARCHITECTURES)
    base = results[BASELINE]
    assert base.beyond_baseline == [0]
    assert results["SwiGLU"].parameters == pytest.approx(base.parameters, rel=0.01)
    # Three norms without biases of 32.
    assert base.parameters - results["RMSNorm"].parameters == 3 * 32
    assert results["untied"].parameters - base.parameters == 256 * 32
    assert base.cache_bytes_per_token == 4 * results["one KV head"].cache_bytes_per_token
    assert len({result.loss for result in results.values()}) == len(results)
    assert all(result.seconds_per_step > 0 for result in results.values())
    assert "bytes of cache per token" in str(base)


def test_a_run_does_not_depend_on_the_others():
    """Batches or weights that depend on who else trains would make the comparison unfair."""
    alone = compare_architectures(names=[BASELINE], seeds=(0, 1), **SMALL)
    beside = compare_architectures(names=["SwiGLU"], seeds=(0, 1), **SMALL)
    assert list(beside) == [BASELINE, "SwiGLU"]
    assert beside[BASELINE].losses == alone[BASELINE].losses
    first, second = beside["SwiGLU"].losses
    assert first != second
    expected = [loss - base for loss, base in zip((first, second), alone[BASELINE].losses)]
    assert beside["SwiGLU"].beyond_baseline == expected


def test_a_pooled_model_beside_the_one_that_was_never_pooled():
    """A copy that shares its weights with the pooled model would heal with it."""
    options = SMALL | {"steps": 25}
    (losses,) = pool_and_heal(seeds=(1,), healing_steps=10, **options)
    assert losses.pooled != losses.trained
    assert losses.never_pooled < losses.trained < 5.6
    assert losses.healed != losses.never_pooled
    again = compare_architectures(names=[BASELINE], seeds=(1,), **options)
    assert losses.trained == again[BASELINE].losses[0], "it is the baseline that is pooled"


def test_an_unknown_architecture_is_refused():
    """The mistake: a name that trains nothing beside the baseline."""
    with pytest.raises(ValueError, match="name='GRU': choose one of as GPT"):
        compare_architectures(names=["GRU"])
