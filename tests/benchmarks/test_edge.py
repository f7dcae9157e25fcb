import json

import pytest

from benchmarks import edge
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks


def turns(seconds):
    return [{"perf_counter_token": one, "process_time_token": one} for one in seconds]


ROWS = {
    "short eager fp32": turns([0.04, 0.05, 0.08]),
    "whole eager fp32": turns([0.2, 0.2, 0.2]),
    "short-4bit": turns([0.01, 0.01, 0.01]),
    "whole-4bit": turns([0.05, 0.02, 0.02]),
}


def test_ratios_are_those_of_the_same_turn():
    """The machine may be slower in one turn than in another: both sides are."""
    found = edge.ratios(ROWS, "short-4bit", "short eager fp32")
    assert found == pytest.approx([4, 5, 8])
    assert edge.tokens_per_second(ROWS["whole-4bit"]) == pytest.approx(50)


def test_each_file_is_compared_with_the_model_of_its_size():
    lines = edge.summary({"times": ROWS}).splitlines()
    assert "5.00 × eager fp32" in lines[2]
    assert "10.00 × eager fp32" in lines[3]


def test_a_short_model_has_the_first_blocks(monkeypatch):
    monkeypatch.setattr(edge, "load_model", lambda: model_of_shape("tiny-llama"))
    whole = edge.load_model()
    assert len(decoder_blocks(whole)) == 2
    assert len(decoder_blocks(edge.model_of(1))) == edge.model_of(1).config.num_hidden_layers == 1


def test_files_that_are_there_are_not_made_again(monkeypatch, tmp_path):
    """An export of the whole model takes many minutes."""
    monkeypatch.setattr(edge, "load_model", lambda: model_of_shape("tiny-llama"))

    def refuse(*args, **kwargs):
        raise AssertionError("it exports")

    monkeypatch.setattr(edge, "in_background", refuse)
    (tmp_path / "short-4bit.json").write_text(json.dumps({"bytes": 1000, "cpu_seconds": 5}))
    rows = edge.export({"short-4bit": edge.FileOf(1, 4)}, tmp_path)
    assert rows["short-4bit"]["bytes"] == 1000
    assert rows["short-4bit"]["settings"]["weight_bits"] == 4
    assert rows["short-4bit"]["predicted_bytes"] > 0
