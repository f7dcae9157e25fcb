"""The held-out loss in parts is that of the whole; the card says what a result is."""

import sys
from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.model.default_model import SMOLLM2
from recipes_lib.fine_tuning.honest_evaluation import RowLosses, held_out_losses
from recipes_lib.workflows.finetune import evaluation
from recipes_lib.workflows.finetune.evaluation import (
    Evaluation,
    lines_that_generate,
    model_card,
    precision_of_base,
    precision_of_result,
)
from tests.workflows.finetune.shared import RUN, change, fresh, make_rows


def test_parts_give_the_losses_of_the_whole_in_its_order(monkeypatch, capsys):
    """The mistake: before and after are paired by row, and a part stands at another place."""
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
    assert announced == [f"held-out loss before: {n} of 12 rows done" for n in (0, 5, 10)]


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
    """The mistake: a base in four bits that is called one of 32."""
    assert precision_of_result(fresh(method=method), change(method=method)) == words


LOSSES = RowLosses(torch.tensor([2.0, 4.0]), torch.tensor([1, 1]))
LOWER = RowLosses(torch.tensor([1.0, 3.0]), torch.tensor([1, 1]))


def card(run, base):
    tokenizer = SimpleNamespace(chat_template="a template")
    facts = {"before": LOSSES, "after": LOWER, "difference": "difference: -1.0", "pair": {}}
    return model_card(run, base=base, rows=90, tokenizer=tokenizer, **facts)


SYSTEM = {"role": "system", "content": 'Answer "yes" or "no".'}


@pytest.mark.parametrize(
    ("pair", "template", "asked"),
    [
        ({"prompt": "a", "completion": "b"}, "t", ['turns = [{"role": "user", "content": "Your']),
        ({"messages": [SYSTEM]}, "t", [r'{"role": "system", "content": "Answer \"yes\"']),
        ({"messages": [], "tools": [{}]}, "t", ["turns, tools=[],  # those of your data\n"]),
        ({"prompt": "a", "completion": "b"}, None, [r'tokenizer("Your question\n\n"']),
        ({"text": "a"}, "t", ['tokenizer("How a text begins"']),
    ],
)
def test_the_lines_ask_as_the_rows_were_written(pair, template, asked):
    """The mistake: a model of texts that is asked by a chat template that it has not learnt."""
    tokenizer = SimpleNamespace(chat_template=template)
    lines = lines_that_generate(RUN, base="smollm2", folder=".", tokenizer=tokenizer, pair=pair)
    compile(lines, "lines", "exec")
    assert all(words in lines for words in asked)


def test_a_card_names_base_data_losses_and_command(monkeypatch, tmp_path):
    arguments = ["finetune", "--data", "my/pairs.jsonl", "--output", "out"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/recipes_lib/__main__.py", *arguments])
    text = card(change(method="lora", base_model="smollm2", data_file="my/pairs.jsonl"), SMOLLM2)
    assert f"base_model: {SMOLLM2}\nlibrary_name: peft\n" in text
    assert "Data: `pairs.jsonl`, 90 rows" in text
    assert "| before | 3.0000 |\n| after | 2.0000 |" in text and "difference: -1.0" in text
    assert "python -m recipes_lib finetune --data my/pairs.jsonl --output out" in text


def test_a_folder_of_this_machine_is_no_base_on_the_hub(tmp_path):
    """The mistake: the hub refuses a card whose base is a path."""
    text = card(change(base_model=str(tmp_path), method="full"), str(tmp_path))
    assert "base_model:" not in text and "library_name" not in text
    assert f"- Base: {tmp_path.name}." in text


def test_a_card_names_no_place_of_this_machine(monkeypatch, tmp_path):
    """The mistake: the name of a user's home on the hub."""
    words = ["finetune", f"--data={tmp_path}/a.jsonl", "--output", f"{tmp_path}/out"]
    for arguments in (["/x/recipes_lib/__main__.py", *words], ["pytest"]):
        monkeypatch.setattr(sys, "argv", arguments)
        places = {"base_model": f"{tmp_path}/base", "data_file": [f"{tmp_path}/a.jsonl", "~/b"]}
        text = card(change(method="lora", output_dir=f"{tmp_path}/out", **places), f"{tmp_path}/b")
        assert str(tmp_path.parent) not in text
        assert "~" not in text
        assert "a.jsonl" in text
