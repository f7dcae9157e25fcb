"""The Trainer and TRL train what our loop trains, and are measured beside it."""

import pytest

from recipes_lib.core.model import load_tokenizer
from recipes_lib.training.sequence_packing import pack_sequences
from recipes_lib.workflows.finetune.libraries import hf_trainer, side_by_side, table
from recipes_lib.workflows.finetune.loop import training_steps
from tests.workflows.finetune.shared import change, fresh, make_rows


def fresh_lora():
    return fresh(method="lora")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two runs side by side: with both libraries, and with the second one alone."""
    folder = tmp_path_factory.mktemp("side_by_side")
    run = change(output_dir=str(folder), method="lora", steps=3, warmup_steps=1)
    options = {"run": run, "tokenizer": load_tokenizer()}
    both = side_by_side(fresh_lora, make_rows(), **options)
    alone = side_by_side(fresh_lora, make_rows(), **options, libraries=["SFTTrainer"])
    return both, alone


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


def test_side_by_side_trains_padded_rows_the_same_three_times(measured):
    found, _ = measured
    assert list(found) == ["ours", "Trainer", "SFTTrainer"]
    for name, facts in found.items():
        expected = {"losses", "tokens_per_second", "peak_bytes"}
        if name != "ours":
            expected.add("time_ratio")
        assert facts.keys() == expected
        assert facts["losses"] == pytest.approx(found["ours"]["losses"], rel=1e-3)
        assert len(facts["losses"]) == 3
        assert facts["tokens_per_second"] > 0
        # The libraries compute every logit.
        assert facts["peak_bytes"] >= found["ours"]["peak_bytes"]


def test_the_peak_of_a_library_is_its_own(measured):
    """Nothing of the run before may be alive in the peak of the next one."""
    both, alone = measured
    assert list(alone) == ["ours", "SFTTrainer"]
    assert both["SFTTrainer"]["peak_bytes"] == pytest.approx(
        alone["SFTTrainer"]["peak_bytes"], rel=0.01
    )


def test_the_table_has_a_line_for_each():
    ours = {"tokens_per_second": 1234.4, "peak_bytes": 3 * 2**20, "losses": [1.5, 1.25]}
    theirs = ours | {"time_ratio": 0.5}
    assert table({"ours": ours, "Trainer": theirs}).splitlines() == [
        "ours       1,234 tokens/s, peak 3 MiB, losses 1.5000 1.2500",
        "Trainer    1,234 tokens/s (ours takes 0.50× its time), peak 3 MiB, losses 1.5000 1.2500",
    ]
