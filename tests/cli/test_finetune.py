"""How options become settings; what the command then does is tested with the workflow."""

from pathlib import Path

import pytest

from recipes_lib.workflows.finetune import command as workflow
from recipes_lib.workflows.finetune.settings import Settings


@pytest.fixture
def settings_of(command, monkeypatch):
    """The settings, and the other arguments, that the workflow gets for a command line."""
    given = []
    monkeypatch.setattr(workflow, "finetune", lambda run, **others: given.append((run, others)))

    def run(*arguments):
        status, _, err = command("finetune", *arguments)
        assert status == 0, err
        return given.pop()

    return run


ALL_OPTIONS = """
--model a/b --data pairs.jsonl --held-out held.jsonl --limit 9 --drop-long --output out --resume
--method qlora --rank 4 --alpha 8 --dropout 0.1 --learning-rate 0.5 --optimizer adamw_8bit
--max-grad-norm 2 --steps 7 --warmup-steps 3 --rows-per-step 6 --micro-batch-size 2 --seq-len 64
--add-token <x> --chat-template chatml
--prompt-column q --completion-column a
--no-packing --no-shard --precision bf16 --gradient-checkpointing --seed 5 --save-steps 4
--report-to none
"""


def test_options_that_are_given_several_times(settings_of):
    """The mistake: the last one wins, and nothing says so."""
    run, _ = settings_of(
        "--output=out", "--data=a.jsonl", "--data=b.csv", "--add-token=<a>", "--add-token=<b>"
    )
    assert run.data_files == ["a.jsonl", "b.csv"]
    assert run.add_tokens == ["<a>", "<b>"]


def test_every_option_reaches_its_setting(settings_of):
    """An option whose parameter is not named as the field would be lost in silence."""
    run, others = settings_of(*ALL_OPTIONS.split())
    assert run == Settings(
        base_model="a/b",
        data_files=["pairs.jsonl"],
        output_dir="out",
        add_tokens=("<x>",),
        chat_template="chatml",
        method="qlora",
        rank=4,
        alpha=8,
        dropout=0.1,
        learning_rate=0.5,
        optimizer="adamw_8bit",
        max_grad_norm=2,
        steps=7,
        warmup_steps=3,
        rows_per_step=6,
        micro_batch_size=2,
        seq_len=64,
        shard=False,
        packing=False,
        precision="bf16",
        gradient_checkpointing=True,
        seed=5,
        save_steps=4,
        report_to="none",
    )
    assert others == {
        "held_out_file": "held.jsonl",
        "limit": 9,
        "longest": False,
        "drop_long": True,
        "resume": True,
        "epochs": None,
        "columns": {"prompt": "q", "completion": "a"},
    }


def test_epochs_take_the_place_of_steps(settings_of, command):
    """The mistakes: a warm-up that is lost before the steps are counted; both, and one wins."""
    run, others = settings_of("--output=out", "--epochs=3", "--warmup-steps=100")
    assert (others["epochs"], run.warmup_steps) == (3, 100)
    status, _, err = command("finetune", "--output=out", "--epochs=3", "--steps=5")
    assert status == 1
    assert "--steps and --epochs: give one of them" in err


def test_the_length_is_a_number_or_auto(settings_of, command):
    """The mistake: the length 1, which stands for auto, reaches the data."""
    assert settings_of("--output", "out", "--seq-len", "auto")[1]["longest"]
    _, _, err = command("finetune", "--output", "out", "--seq-len", "2k")
    assert "error: --seq-len 2k: give a number of tokens, or auto" in err


def test_a_tilde_is_the_home_folder_in_every_path(settings_of):
    """The shell expands it at the start of a word only."""
    options = ["--output=~/runs", "--data=~/a.jsonl", "--held-out=~/b.jsonl", "--model=~/base"]
    run, others = settings_of(*options)
    home = str(Path.home())
    assert run.output_dir == f"{home}/runs"
    assert run.data_files == [f"{home}/a.jsonl"]
    assert run.base_model == f"{home}/base"
    assert others["held_out_file"] == f"{home}/b.jsonl"


def test_what_is_not_given_follows_the_rest(settings_of):
    """The mistake: the whole model trained with the rate of adapters."""
    run, _ = settings_of("--output", "out", "--method", "full", "--steps", "5")
    assert run.learning_rate == 1e-4
    assert run.warmup_steps == 0  # 5 steps would be nothing but warm-up
