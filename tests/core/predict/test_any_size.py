"""A few shallow steps say what a deep one takes."""

import pytest

from recipes_lib.core.predict import any_size as module
from recipes_lib.core.predict import predict
from recipes_lib.core.predict.any_size import NOTHING, any_size
from tests.core.predict.recipes import RECIPES, build_of

DEPTH = 9


def deep(name, family="llama"):
    def build_with(layers):
        return build_of(family, RECIPES[name], num_hidden_layers=layers)

    return build_with


@pytest.mark.parametrize("name", ["baseline", "in backward, checkpointed"])
def test_any_depth_from_two_and_three_blocks(name):
    """The mistake: the peak is extrapolated, and at the full depth another moment is highest."""
    step = any_size(deep(name), layers=(2, 3))
    whole = predict(deep(name)(DEPTH))
    assert step.peak(layers=DEPTH) == pytest.approx(whole.peak, abs=NOTHING)
    assert step.at(layers=DEPTH) == pytest.approx(whole.at_peak(), abs=NOTHING)


def test_blocks_of_two_kinds_repeat_with_a_period():
    """The mistake: a block of one kind counts as one of the other."""
    kinds = ["sliding_attention", "full_attention"]

    def build_with(layers):
        return build_of(
            "gemma3_text",
            RECIPES["checkpointing"],
            num_hidden_layers=layers,
            layer_types=kinds * (layers // 2),
        )

    step = any_size(build_with, layers=(2, 4))
    assert step.peak(layers=10) == predict(build_with(10)).peak


def test_a_result_is_kept_on_disk(tmp_path, monkeypatch):
    """The mistake: it is found again for other sizes, or computed again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    step = any_size(deep("baseline"), key="a step", layers=(2, 3))

    def not_again(*args, **options):
        raise AssertionError("it was computed before")

    monkeypatch.setattr(module, "predict", not_again)
    again = any_size(deep("baseline"), key="a step", layers=(2, 3))
    assert again.peak(layers=7) == step.peak(layers=7)
    with pytest.raises(AssertionError):
        any_size(deep("baseline"), key="a step", layers=(2, 4))
