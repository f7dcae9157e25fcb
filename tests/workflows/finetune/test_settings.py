"""Settings that cannot be are refused as they are made, with the name and the remedy."""

import dataclasses

import pytest

from tests.workflows.finetune.shared import RUN, change


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "dora"}, "method='dora': choose one of lora, qlora, full"),
        ({"optimizer": "adam"}, "optimizer='adam'"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"report_to": "all"}, "report_to='all'"),
        ({"rank": 0}, "rank=0: give a whole number of 1 or more"),
        ({"alpha": 0}, "alpha=0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"max_grad_norm": -1}, "max_grad_norm=-1: give a finite number of 0 or more"),
        ({"warmup_steps": 5}, "warmup_steps=5: give a whole number from 0 to 4"),
        ({"micro_batch_size": 3}, "multiple of micro_batch_size x processes = 3"),
        ({"processes": 3}, "multiple of micro_batch_size x processes = 6"),
        ({"target_modules": "q_proj"}, "give a list"),  # it would be taken letter by letter
        ({"target_modules": []}, "give a list"),  # nothing would train
        ({"target_modules": 3}, "give a list"),
        ({"betas": 0.9}, "betas=0.9: give two numbers"),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
        ({"seed": -1}, "seed=-1: give a whole number of 0 or more"),
        ({"save_steps": 0}, "save_steps=0"),  # it would be taken for none
        ({"packing": "no"}, "packing='no': give True or False"),
        ({"output_dir": ""}, "output_dir='': give a text"),  # it would be the current folder
        ({"output_dir": None}, "output_dir=None: give a text"),
        ({"base_model": ""}, "base_model='': give a text"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        change(**changes)


def test_derived_numbers():
    assert change(rows_per_step=12, micro_batch_size=2, processes=3).micro_batches == 2
    assert RUN.steps_between_checkpoints == RUN.steps
    assert change(save_steps=2).steps_between_checkpoints == 2


def test_they_do_not_change():
    """They are compared with those of a checkpoint: they must be those that the run had."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        RUN.rank = 2
