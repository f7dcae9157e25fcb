"""The longest steps of `make gpu` in small sizes, and what is predicted of them."""

import json

import pytest
import torch

from benchmarks import long_steps, rope
from benchmarks.sizes import FAST
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import predict

SHAPE = "tiny-llama"
IN_FP32 = {"dtype": torch.float32}


def last_of(contents):
    """What a part has measured when it is through."""
    *_, last = contents
    return json.loads(json.dumps(last))  # as it will be kept


def test_positions_are_measured_plain_and_with_each_scaling(monkeypatch):
    """With a small model: what the real one says about real texts is a result, and no test."""
    monkeypatch.setattr(rope, "load_model", lambda: model_of_shape(SHAPE))
    rows = torch.arange(300).view(1, 1, 300) % 128
    monkeypatch.setattr(rope, "_long_rows", lambda seq_len, texts: rows)
    found = last_of(rope.stretched(**FAST["rope"]))
    assert list(found["curves"]) == ["none", *rope.KINDS]
    assert {len(curve) for curve in found["curves"].values()} == {3}


@pytest.mark.parametrize("fits", [10_000, 200])
def test_the_longest_step_is_as_long_as_asked_or_as_fits(monkeypatch, fits):
    """The mistake: the first try computes for minutes, and runs out of memory."""
    monkeypatch.setattr(long_steps, "predicted_to_fit", lambda *_, most, **__: min(fits, most))
    asked, found = long_steps.longest_step(shape=SHAPE, layers=2, seq_len=300)
    assert asked == {"shape": SHAPE, "layers": 2, "asked": 300}
    assert found["tokens"] == min(fits, 300)
    assert found["peak_gib"] > 0


def test_the_prediction_is_the_length_whose_step_has_so_many_bytes():
    """The mistake: a length that is not the longest, or beyond the one that is asked for."""
    limit = long_steps.predicted_peak(SHAPE, 2, 256, **IN_FP32)
    for most, expected in ((512, 256), (128, 128)):
        found = long_steps.predicted_to_fit(SHAPE, 2, limit_bytes=limit, most=most, **IN_FP32)
        assert found == pytest.approx(expected, rel=0.02)


def test_shallow_steps_say_what_a_deep_one_needs(monkeypatch):
    """The mistake: blocks that do not repeat with the period of the nested checkpoints."""
    monkeypatch.setattr(long_steps, "group_of", lambda shape, layers: 2)
    deep = long_steps.full_build(SHAPE, 11, group=2, tokens=64, device="cpu", **IN_FP32)
    monkeypatch.setattr(long_steps, "predict", None)  # 11 blocks are not taken as they are
    shallow = long_steps.predicted_peak(SHAPE, 11, 64, **IN_FP32)
    assert shallow == pytest.approx(predict(deep).peak, rel=1e-3)


def test_the_longest_context_of_qlora():
    """The mistake: the cap is passed, or the longest length is none that was tried."""
    found = last_of(long_steps.qlora_context(**FAST["context"]))
    assert 64 <= found["tokens"] <= FAST["context"]["most"]
    assert found["peak_gib"] <= found["cap_gib"]
    assert str(found["tokens"]) in found["tried"]
