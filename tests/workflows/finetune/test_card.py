"""The README.md of a result: a stranger reads off it what it is, and how to make it again."""

import sys

import torch

from recipes_lib.core.model.default_model import SMOLLM2
from recipes_lib.fine_tuning.honest_evaluation import RowLosses
from recipes_lib.workflows.finetune.card import model_card
from tests.workflows.finetune.shared import change

LOSSES = RowLosses(torch.tensor([2.0, 4.0]), torch.tensor([1, 1]))
LOWER = RowLosses(torch.tensor([1.0, 3.0]), torch.tensor([1, 1]))


def card(run, base):
    return model_card(
        run, base=base, rows=90, before=LOSSES, after=LOWER, difference="difference: -1.0"
    )


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
    assert f"- Base: {tmp_path}." in text
