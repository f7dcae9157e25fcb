"""The measurements of notebook 04 in small sizes, and their numbers in the texts."""

import json

import pytest
import torch

from benchmarks import long_sequences, long_steps
from benchmarks.sizes import FAST
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import predict


def last_of(contents):
    """What a part has measured when it is through."""
    *_, last = contents
    return json.loads(json.dumps(last))  # as it will be kept


# --- attention, loss, positions -----------------------------------------------------------------


def test_attention_at_growing_length():
    found = last_of(long_sequences.compare_attention(**FAST["attention"]))
    rows = [(row["tokens"], row["kernel"]) for row in found["rows"]]
    assert rows == [(64, "eager"), (64, "fused"), (128, "eager"), (128, "fused")]
    assert all(row["forward_seconds"] > 0 and row["peak_bytes"] > 0 for row in found["rows"])


def test_scores_that_do_not_fit_cost_their_row_only(monkeypatch):
    real = long_sequences.measure_attention
    tried = []

    def measured(model, *, seq_len, eager):
        tried.append((seq_len, eager))
        if eager and seq_len > 32:
            raise torch.OutOfMemoryError("full")
        return real(model, seq_len=seq_len, eager=eager, rounds=1)

    monkeypatch.setattr(long_sequences, "measure_attention", measured)
    sizes = {"shape": "tiny-llama", "lengths": [32, 64, 96], "eager_to": 64}
    found = last_of(long_sequences.compare_attention(**sizes))
    rows = [(row["tokens"], row["kernel"]) for row in found["rows"]]
    assert rows == [(32, "eager"), (32, "fused"), (64, "fused"), (96, "fused")]
    assert (96, True) not in tried, "beyond `eager_to`, eager attention is not even tried"


def test_losses_beside_the_libraries():
    found = last_of(long_sequences.compare_losses(**FAST["loss"]))
    assert {"plain", "ours"} <= found["ways"].keys()
    assert all(way["error"] < 1e-4 and way["seconds"] > 0 for way in found["ways"].values())


def test_positions_are_measured_plain_and_with_each_scaling(monkeypatch):
    """With a small model: what the real one says about real texts is a result, and no test."""
    monkeypatch.setattr(long_sequences, "load_model", lambda: model_of_shape("tiny-llama"))
    rows = torch.arange(300).view(1, 1, 300) % 128
    monkeypatch.setattr(long_sequences, "_long_rows", lambda seq_len, texts: rows)
    found = last_of(long_sequences.stretched(**FAST["rope"]))
    assert list(found["curves"]) == ["none", *long_sequences.KINDS]
    assert {len(curve) for curve in found["curves"].values()} == {3}


def test_rows_of_real_text():
    rows = long_sequences._long_rows(300, texts=2)
    assert rows.shape == (2, 1, 300)
    assert not torch.equal(rows[0], rows[1]), "two texts, not twice the same"


# --- whole steps --------------------------------------------------------------------------------


def test_the_ladder_of_the_record():
    """Each row at its own length, under its cap; the last fits more than the first."""
    found = last_of(long_steps.ablation(**FAST["ablation"]))
    ways = long_steps.ways("tiny-llama")
    assert list(found["rows"]) == list(ways)
    rows = list(found["rows"].values())
    assert rows[-1]["tokens"] > 1.2 * rows[0]["tokens"]
    for row in rows:
        assert row["tokens"] == row["predicted_tokens"], "it ran out of memory"
        # The emulated cap counts all that is alive, and so do the steps.
        assert row["peak_gib"] <= 1.05 * found["cap_gib"]
    moved = [row["host_gib"] > 0 for row in rows]
    assert moved == [way.offload for way in ways.values()]


def test_the_recipes_of_the_ablation_do_not_change_the_maths(monkeypatch):
    """At one length for all: the loss is that of the same weights."""
    monkeypatch.setattr(long_steps, "predicted_tokens", lambda *_, **__: 300)
    found = last_of(long_steps.ablation(shape="tiny-llama", layers=2, cap=2**30))
    losses = [row["loss"] for row in found["rows"].values()]
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-4)


def test_the_longest_step():
    asked, found = long_steps.longest_step(**FAST["longest"])
    assert asked == {"shape": "tiny-llama", "layers": 4, "asked": 300}
    assert found["tokens"] == 300
    assert found["peak_gib"] > 0


def test_the_longest_step_begins_where_it_fits():
    """The mistake: a line through two lengths that does not meet the bytes of a third."""
    stack = long_steps.longest_stack("tiny-llama", 4)
    on = {"dtype": torch.bfloat16, "device": "cpu"}
    limit = predict(stack.build(layers=4, tokens=1024, **on)).peak
    found = long_steps.predicted_tokens(stack, 4, limit_bytes=limit, dtype=torch.bfloat16)
    assert found == pytest.approx(1024, rel=0.02)


def test_shallow_steps_say_what_a_deep_one_needs():
    """The mistake: blocks that do not repeat with the period of the nested checkpoints."""
    stack = long_steps.longest_stack("tiny-llama", 12)
    tokens = 4 * stack.tile
    on = {"dtype": torch.float32, "device": "cpu"}
    deep = predict(stack.build(layers=12, tokens=tokens, **on)).peak
    assert long_steps.predicted_peak(stack, 12, tokens, **on) == pytest.approx(deep, rel=1e-3)


def test_the_longest_step_is_no_longer_than_the_machine(monkeypatch):
    monkeypatch.setattr(long_steps, "predicted_to_fit", lambda *_: 200)
    _, found = long_steps.longest_step(**FAST["longest"])
    assert found["tokens"] == 200


def test_the_longest_context_of_qlora():
    found = last_of(long_steps.qlora_context(**FAST["context"]))
    assert 64 <= found["tokens"] <= FAST["context"]["most"]
    assert found["peak_gib"] <= found["cap_gib"]
    assert str(found["tokens"]) in found["tried"]


def test_out_of_memory_shortens_the_row():
    def step(tokens):
        if tokens > 800:
            raise torch.OutOfMemoryError("full")
        return {"tokens": tokens}

    assert long_steps.until_it_fits(step, 1000) == {"tokens": 765}
    failed = long_steps.until_it_fits(step, 5000)
    assert failed == {"failed": "out of memory, 3349 tokens and more"}
