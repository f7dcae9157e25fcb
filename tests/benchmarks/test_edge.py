import json

import pytest

from benchmarks import complete, edge, render_edge
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from tests.benchmarks.test_record import machine_facts


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


def test_a_run_that_was_cut_is_not_complete():
    run = {"export": {}, "quality": {}, "load": {}, "times": {"whole-4bit": [{}] * 3}}
    assert complete.lacking_in_edge(run) == ["2 of 5 rounds of whole-4bit"]
    assert complete.lacking_in_edge({"export": {}}) == [f"the part {p}" for p in edge.PARTS[1:]]
    assert set(edge.PARTS) == set(complete.EDGE)


def a_run():
    """Complete, with one file of each size."""

    def file(layers):
        return {"bytes": 100e6, "bf16_bytes": 200e6, "settings": {"layers": layers}}

    perplexity = {"eager fp32": 8.0, "whole-4bit": 12.0, "whole-4bit, rounded in eager": 12.01}
    return {
        "settings": {"rounds": 3, "prompt": 32},
        "export": {
            "short-fp32": file(6),
            "short-4bit-plain-attention": file(6),
            "short-4bit": file(6),
            "whole-4bit": file(30),
        },
        "quality": {"tokens": 2040, "perplexity": perplexity, "equal_tokens": [33, 33]},
        "load": {"whole-4bit.pte": {"rss": 87e6}, "eager fp32": {"rss": 600e6}},
        "times": ROWS
        | {
            "short-fp32": turns([0.02, 0.025, 0.04]),
            "short-4bit-plain-attention": turns([0.02, 0.02, 0.02]),
        },
    }


def test_the_run_in_words_and_numbers():
    run = machine_facts() | a_run()
    text = render_edge.block(run)
    assert "the fp32 file writes 2.0× as fast as `generate`, and 33 of 33 tokens" in text
    assert "So 2.0× is the price of Python" in text
    assert "writes 2.0× as fast as one of plain operators" in text
    assert "100 MB, 50 % of bf16, and writes 10.0× (4.0 to 10.0) as fast" in text
    assert "| `generate`, fp32 | 30 |  |  | 5 |  | 600 MB | 8.00 |" in text
    assert "| 30 | 100.0 | 50 % | 50 | 10.0× (4.0 to 10.0) | 87 MB | 12.00 |" in text
    assert "Test CPU" in text
    assert render_edge.block(None) == render_edge.files(None) == ""
