"""The Trainer and TRL train what our loop trains, and are measured beside it."""

import pytest

from recipes_lib.core.model import load_tokenizer
from recipes_lib.training.sequence_packing import pack_sequences
from recipes_lib.workflows.finetune.libraries import hf_trainer, side_by_side, table
from recipes_lib.workflows.finetune.loop import training_steps
from tests.workflows.finetune.shared import change, fresh, make_rows


def fresh_lora():
    return fresh(method="lora")


def test_trainer_trains_packed_rows_as_we_do(tmp_path):
    """Loss, learning rate, norm and tokens of every step; `turn` comes before each of them."""
    rows = pack_sequences(make_rows(20), length=64)
    run = change(output_dir=str(tmp_path), packing=True, method="lora")
    turns = []
    ours = list(training_steps(fresh_lora(), rows, run=run, pad_token_id=0))
    theirs = hf_trainer(
        fresh_lora(), rows, run=run, pad_token_id=0, turn=lambda: turns.append("mine")
    )
    assert len(turns) == len(theirs) == run.steps
    for a, b in zip(ours, theirs, strict=True):
        assert a.loss == pytest.approx(b.loss, abs=2e-4)  # the Trainer rounds to four digits
        assert a.learning_rate == pytest.approx(b.learning_rate)
        assert a.tokens == b.tokens
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-3)


def test_side_by_side_trains_padded_rows_the_same_three_times(tmp_path):
    """The mistakes: rows in another order; a model of the run before in the peak of the next."""
    run = change(output_dir=str(tmp_path), method="lora", steps=3, warmup_steps=1)
    options = {"run": run, "tokenizer": load_tokenizer()}
    found = side_by_side(fresh_lora, make_rows(), **options)
    assert list(found) == ["ours", "Trainer", "SFTTrainer"]
    for facts in found.values():
        assert facts["losses"] == pytest.approx(found["ours"]["losses"], rel=1e-3)
        assert len(facts["losses"]) == 3
        assert facts["tokens_per_second"] > 0
        # The libraries compute every logit.
        assert facts["peak_bytes"] >= found["ours"]["peak_bytes"]
    for line, name in zip(table(found).splitlines(), found, strict=True):
        assert line.startswith(name) and ("its time" in line) == (name != "ours")
    alone = side_by_side(fresh_lora, make_rows(), **options, libraries=["SFTTrainer"])
    peak = alone["SFTTrainer"]["peak_bytes"]
    assert found["SFTTrainer"]["peak_bytes"] == pytest.approx(peak, rel=0.01)
