"""The held-out loss in parts is that of the whole, and says what it is of."""

import pytest
import torch

from recipes_lib.fine_tuning.honest_evaluation import held_out_losses
from recipes_lib.workflows.finetune import evaluation
from recipes_lib.workflows.finetune.evaluation import (
    Evaluation,
    in_words,
    precision_of_base,
    precision_of_result,
)
from tests.workflows.finetune.shared import RUN, change, fresh, make_rows


def test_parts_give_the_losses_of_the_whole_in_its_order(monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "ROWS_OF_A_PART", 5)
    rows = make_rows(12)
    model = fresh()
    announced = []
    measured = Evaluation(rows, run=RUN, pad_token_id=0, announce=announced.append)
    found = measured.losses(model, "before", what=precision_of_base(model))
    whole = held_out_losses(model, rows, pad_token_id=0)
    torch.testing.assert_close(found.losses, whole.losses, rtol=1e-5, atol=0)
    assert torch.equal(found.targets, whole.targets)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "measuring the held-out loss before, of 12 rows",
        f"held-out loss before: {found.mean:.4f} nats per token, the base in fp32",
    ]
    assert [words.split(",")[0] for words in announced] == [
        f"held-out loss before: {done} of 12 rows done" for done in (0, 5, 10)
    ]
    assert announced[-1].endswith(" left")


@pytest.mark.parametrize(
    ("micro_batch_size", "longest", "batch_size"), [(1, 64, 1), (2, 64, 2), (2, 20, 6), (4, 9, 8)]
)
def test_a_batch_is_not_larger_than_one_of_the_training(micro_batch_size, longest, batch_size):
    """The mistake: eight rows at a time, where the training fits with one."""
    run = change(micro_batch_size=micro_batch_size)
    rows = make_rows(8, shortest=longest, longest=longest)
    assert Evaluation(rows, run=run, pad_token_id=0).batch_size == batch_size


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("full", "all weights in fp32"),
        ("lora", "the base in fp32 with adapters in fp32"),
        ("qlora", "the base in 4 bits with adapters in fp32"),
    ],
)
def test_the_precision_of_what_was_trained(method, words):
    assert precision_of_result(fresh(method=method), change(method=method)) == words


def test_a_length_of_time_in_words():
    assert [in_words(s) for s in (0.4, 89, 100, 5399, 12_000)] == [
        "0 s",
        "89 s",
        "2 min",
        "1 h 30 min",
        "3 h 20 min",
    ]
