"""The Trainer and TRL train what our loop trains."""

import pytest

from recipes_lib.core.model import load_tokenizer
from recipes_lib.training.sequence_packing import pack_sequences
from recipes_lib.workflows.finetune.libraries import hf_trainer, trl_sft
from recipes_lib.workflows.finetune.loop import training_steps
from tests.workflows.finetune.shared import change, fresh, make_rows


def fresh_lora():
    return fresh(method="lora")


def test_trainer_trains_packed_rows_as_we_do(tmp_path):
    """Loss, learning rate, norm and tokens of every step."""
    rows = pack_sequences(make_rows(20), length=64)
    run = change(output_dir=str(tmp_path), packing=True, method="lora")
    ours = list(training_steps(fresh_lora(), rows, run=run, pad_token_id=0))
    theirs = hf_trainer(fresh_lora(), rows, run=run, pad_token_id=0)
    assert len(theirs) == run.steps
    for a, b in zip(ours, theirs, strict=True):
        assert a.loss == pytest.approx(b.loss, abs=2e-4)  # the Trainer rounds to four digits
        assert a.learning_rate == pytest.approx(b.learning_rate)
        assert a.tokens == b.tokens
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-3)


def test_trl_trains_padded_rows_as_we_do(tmp_path):
    """The mistakes: rows in another order; labels that TRL makes anew."""
    run = change(output_dir=str(tmp_path), method="lora", steps=3, warmup_steps=1)
    tokenizer = load_tokenizer()
    pad = tokenizer.pad_token_id
    ours = list(training_steps(fresh_lora(), make_rows(), run=run, pad_token_id=pad))
    theirs = trl_sft(fresh_lora(), make_rows(), run=run, tokenizer=tokenizer)
    losses = [step.loss for step in ours]
    assert [step.loss for step in theirs] == pytest.approx(losses, rel=1e-3)
