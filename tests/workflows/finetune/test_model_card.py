"""The card says what a result is, and how to ask it."""

import sys
from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.model.default_model import SMOLLM2, model_source
from recipes_lib.fine_tuning.honest_evaluation import RowLosses
from recipes_lib.workflows.finetune.model_card import lines_that_generate, model_card
from tests.workflows.finetune.shared import RUN, change

LOSSES = RowLosses(torch.tensor([2.0, 4.0]), torch.tensor([1, 1]))
LOWER = RowLosses(torch.tensor([1.0, 3.0]), torch.tensor([1, 1]))


def card(run, base):
    tokenizer = SimpleNamespace(chat_template="a template")
    facts = {"before": LOSSES, "after": LOWER, "pair": {}}
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
    text = card(change(method="lora", base_model="smollm2", data_files=["my/pairs.jsonl"]), SMOLLM2)
    assert f"base_model: {SMOLLM2}\nlibrary_name: peft\n" in text
    assert "Data: `pairs.jsonl`, 90 rows" in text
    assert "| before | 3.0000 |\n| after | 2.0000 |" in text and "difference: -1.000 nats" in text
    assert "python -m recipes_lib finetune --data my/pairs.jsonl --output out" in text
    assert f"- Base: {SMOLLM2}, from the {model_source()}.\n" in text


def test_a_card_has_no_command_of_another_program(monkeypatch):
    """The mistake: the command line of a notebook stands there as that of the run."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/ipykernel_launcher.py", "-f", "kernel.json"])
    assert "kernel.json" not in card(change(method="lora"), "org/model")


def test_a_folder_of_this_machine_is_no_base_on_the_hub(tmp_path):
    """The mistake: the hub refuses a card whose base is a path."""
    text = card(change(base_model=str(tmp_path), method="full"), str(tmp_path))
    assert "base_model:" not in text and "library_name" not in text
    assert f"- Base: {tmp_path.name}." in text


def test_a_card_names_no_place_of_this_machine(monkeypatch, tmp_path):
    """The mistake: the name of a user's home on the hub."""
    words = ["finetune", f"--data={tmp_path}/a.jsonl", "--output", f"{tmp_path}/out"]
    monkeypatch.setattr(sys, "argv", ["/x/recipes_lib/__main__.py", *words])
    places = {"base_model": f"{tmp_path}/base", "data_files": [f"{tmp_path}/a.jsonl", "~/b"]}
    text = card(change(method="lora", output_dir=f"{tmp_path}/out", **places), f"{tmp_path}/b")
    assert str(tmp_path.parent) not in text
    assert "~" not in text
    assert "a.jsonl" in text
