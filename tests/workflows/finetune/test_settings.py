"""Settings that cannot be are refused as they are made, with the name and the remedy."""

import pytest

from tests.workflows.finetune.shared import change

PARTS = {"shard": True, "processes": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "dora"}, "method='dora': choose one of lora, qlora, full"),
        ({"rank": 0}, "rank=0: give a whole number of 1 or more"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"max_grad_norm": -1}, "max_grad_norm=-1: give a finite number of 0 or more"),
        ({"warmup_steps": 5}, "warmup_steps=5: give a whole number from 0 to 4"),
        ({"processes": 3}, "multiple of micro_batch_size x processes = 6"),
        ({"save_steps": 0}, "save_steps=0"),
        ({"shard": True}, "processes=1: start several with torchrun"),
        (PARTS | {"optimizer": "adamw_bnb_8bit"}, "8 bits are not divided"),
        (PARTS | {"method": "lora", "add_tokens": ["<x>"]}, "take method='full'"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    """The mistake: minutes of loading before the optimizer says it, or a run of another kind."""
    with pytest.raises(ValueError, match=message):
        change(**changes)
