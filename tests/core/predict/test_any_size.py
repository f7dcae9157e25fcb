"""A few shallow steps say what a deep one takes."""

import pytest
import torch

from recipes_lib.core.predict import any_size as module
from recipes_lib.core.predict import predict
from recipes_lib.core.predict.any_size import NOTHING, any_size
from tests.core.predict.recipes import RECIPES, build_of

DEPTH = 9
WIDTH = 64


def test_any_depth_from_two_and_three_blocks():
    """The mistake: the peak is extrapolated, and at the full depth another moment is highest."""

    def build_with(layers):
        recipe = RECIPES["in backward, checkpointed"]
        return build_of("llama", recipe, num_hidden_layers=layers)

    step = any_size(build_with, layers=(2, 3))
    whole = predict(build_with(DEPTH))
    assert step.peak(layers=DEPTH) == pytest.approx(whole.peak, abs=NOTHING)
    assert step.at(layers=DEPTH) == pytest.approx(whole.at_peak(), abs=NOTHING)


def narrow_and_wide(layers):
    """Blocks of two kinds, in turns."""

    def build():
        parts = []
        for number in range(layers):
            inside = WIDTH if number % 2 == 0 else 4 * WIDTH
            parts += [torch.nn.Linear(WIDTH, inside), torch.nn.Linear(inside, WIDTH)]
        model = torch.nn.Sequential(*parts)
        return model, torch.optim.AdamW(model.parameters(), fused=True), step

    def step(model, optimizer):
        model(torch.ones(100, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return build


def test_blocks_of_two_kinds_repeat_with_a_period():
    """The mistake: a block of one kind counts as one of the other."""
    step = any_size(narrow_and_wide, layers=(4, 6))
    assert step.peak(layers=10) == predict(narrow_and_wide(10)).peak


def test_clipping_moves_no_moment():
    """The mistake: clipping has operators for each weight, so what lies in front of it is followed
    as another moment of the deeper step."""

    def clipped(layers):
        def build():
            recipe = RECIPES["QLoRA, checkpointed"]
            model, optimizer, step = build_of("llama", recipe, num_hidden_layers=layers)()
            plain_step = optimizer.step

            def clip_and_step():
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                plain_step()

            optimizer.step = clip_and_step
            return model, optimizer, step

        return build

    step = any_size(clipped, layers=(2, 3))
    assert step.at(layers=DEPTH) == pytest.approx(predict(clipped(DEPTH)).at_peak(), abs=NOTHING)


def test_a_result_is_kept_on_disk(tmp_path, monkeypatch):
    """The mistake: it is found again for other sizes, or computed again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    step = any_size(narrow_and_wide, key="a step", layers=(2, 4))

    def not_again(*args, **options):
        raise AssertionError("it was computed before")

    monkeypatch.setattr(module, "predict", not_again)
    again = any_size(narrow_and_wide, key="a step", layers=(2, 4))
    assert again.peak(layers=8) == step.peak(layers=8)
    with pytest.raises(AssertionError):
        any_size(narrow_and_wide, key="a step", layers=(2, 6))
