"""The command of notebook 05: killed and resumed in processes of its own, and what it refuses."""

import dataclasses
import math
import re
import stat
import sys

import pytest
import torch

from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import load_tokenizer, model_of_shape, model_without_weights
from recipes_lib.fine_tuning.adapter_files import base_fingerprint, load_adapter
from recipes_lib.training.sequence_packing import pack_sequences
from recipes_lib.workflows.finetune import base_model as base_of_run
from recipes_lib.workflows.finetune import command
from recipes_lib.workflows.finetune.checkpoints import CHECKPOINT
from recipes_lib.workflows.finetune.checks import check_output, check_packing, check_positions
from recipes_lib.workflows.finetune.command import run_command
from recipes_lib.workflows.finetune.data import Data
from tests.training.events import read_back
from tests.workflows.finetune.shared import (
    SAVE_STEPS,
    STEPS,
    change,
    finetune_here,
    make_rows,
    settings,
)


def as_options(run):
    """The same run on the command line; the options that are left out have the values above."""
    return [
        f"--model={run.base_model}",
        f"--data={run.data_files[0]}",
        f"--output={run.output_dir}",
        f"--steps={run.steps}",
        f"--save-steps={run.save_steps}",
        f"--rows-per-step={run.rows_per_step}",
        f"--seq-len={run.seq_len}",
        f"--precision={run.precision}",
        f"--dropout={run.dropout}",
        f"--learning-rate={run.learning_rate}",
    ]


@pytest.fixture(scope="module")
def whole(small_model, pairs, tmp_path_factory):
    """A run that nobody disturbs: its folder, its losses, what it printed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    losses, printed = finetune_here(settings(small_model, pairs, folder))
    return folder, losses, printed


# --- killed and resumed -------------------------------------------------------------------------


def test_a_run_that_is_killed_twice_has_the_losses_of_one_that_is_not(
    whole, small_model, pairs, tmp_path, monkeypatch
):
    """SIGKILL before the first checkpoint: it begins again. After one: it goes on from there."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other threads sum in another order
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter does: steps stand in lines of their own
    whole_folder, expected, _ = whole
    run = settings(small_model, pairs, tmp_path / "killed")
    folder = tmp_path / "killed"

    # With --resume, and nothing there: it begins.
    first = run_command(*as_options(run), "--resume", kill_at=0)
    assert 0 in first
    assert not (folder / CHECKPOINT).exists()

    second = run_command(*as_options(run), "--resume", kill_at=SAVE_STEPS + 1)
    assert min(second) == 0, "there was no checkpoint: it begins again"
    assert STEPS - 1 not in second
    with pytest.raises(ValueError, match="would be overwritten: resume"):
        finetune_here(run)

    third, printed = finetune_here(run, resume=True)
    assert min(third) >= SAVE_STEPS, "it goes on from the checkpoint"
    assert f"going on from {folder / CHECKPOINT}" in printed
    for part in (first, second, third):
        assert part == {step: expected[step] for step in part}
    assert sorted(second | third) == list(range(STEPS))

    # The log shows each step once, and the weights are those of the run that nobody disturbed.
    log = read_back(folder / "log")
    assert [step for step, _ in log["loss"]] == list(range(STEPS))
    logged = [loss for _, loss in log["loss"]]
    assert logged == pytest.approx([float(expected[s]) for s in range(STEPS)], abs=1e-5)
    names = {"tokens_per_second", "peak_bytes", "gradient_norm", "learning_rate"}
    assert names <= log.keys()
    weights = "adapter/adapter_model.safetensors"
    assert (folder / weights).read_bytes() == (whole_folder / weights).read_bytes()


def test_the_folder_holds_all_that_was_promised(whole, small_model):
    """The mistake: a file that the page names is not there, or Axolotl's names other pairs."""
    folder, losses, printed = whole
    assert sorted(losses) == list(range(STEPS))
    files = {path.name for path in folder.iterdir()}
    assert files == {"adapter", "log", CHECKPOINT, "axolotl", "axolotl.yml"}
    assert "held-out loss" in (folder / "adapter" / "README.md").read_text()
    assert "too few to rely on" in printed  # of 4 rows
    assert "36 rows to train on, 4 held out" in printed
    axolotl = (folder / "axolotl.yml").read_text()
    assert f"path: {folder}/axolotl/train.jsonl" in axolotl


def test_it_says_how_far_it_is_and_what_it_found(whole):
    """The mistake: no total, no time left, and a difference of two losses that nobody sees."""
    _, _, printed = whole
    assert re.search(r"step 3: loss \S+ \S+ tokens/s, 4 of 10 done, 0:00:\d\d left\n", printed)
    assert re.search(r"step 9: loss \S+ \S+ tokens/s, 10 of 10 done\n", printed)
    before = float(re.search(r"held-out loss before: (\S+) nats per token", printed)[1])
    after = float(re.search(r"held-out loss after: (\S+) nats per token", printed)[1])
    difference = float(re.search(r"\ndifference: (\S+) nats per token", printed)[1])
    assert after - before == pytest.approx(difference, abs=1e-3)
    assert after < before
    assert "four bits" not in printed


def test_a_finished_run_is_not_begun_again(whole, small_model, pairs):
    """The mistake: a result that a second run replaces by chance, or refuses late."""
    folder, _, _ = whole
    with pytest.raises(ValueError, match="adapter would be overwritten"):
        finetune_here(settings(small_model, "no file", folder))  # before any data is read
    with pytest.raises(ValueError, match="is there already, a finished run"):
        finetune_here(settings(small_model, pairs, folder), resume=True)


def test_a_finished_run_goes_on_to_more_steps(small_model, pairs, tmp_path, monkeypatch):
    """The mistakes: a rate of 0 for all the steps that follow; other settings that are found after
    minutes of held-out loss."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = settings(small_model, pairs, tmp_path / "run", steps=4, warmup_steps=1)
    finetune_here(run)
    adapter = tmp_path / "run" / "adapter" / "adapter_model.safetensors"
    shorter = adapter.read_bytes()

    longer = dataclasses.replace(run, steps=6)
    for other in (dataclasses.replace(longer, rank=8), dataclasses.replace(longer, seed=1)):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="another run"):
            patch.setattr(command, "load_base", None)  # nothing is loaded, nothing is measured
            finetune_here(other, resume=True)
    with pytest.raises(ValueError, match=r"steps=3: the checkpoint in .* has 4 already"):
        finetune_here(dataclasses.replace(run, steps=3), resume=True)

    losses, printed = finetune_here(longer, resume=True)
    assert list(losses) == [4, 5]
    assert "of a run of 4 steps: from step 4 on the learning rate is that of a run of 6" in printed
    rates = dict(read_back(tmp_path / "run" / "log")["learning_rate"])
    halves = [0.5 * (1 + math.cos(math.pi * (step - 1) / 5)) for step in (4, 5)]
    assert [rates[4], rates[5]] == pytest.approx([1e-3 * half for half in halves], rel=1e-4)
    assert adapter.read_bytes() != shorter


def test_epochs_are_counted_in_the_rows_of_this_run():
    """The mistake: a pass over the pairs where packed rows are fewer."""
    rows = make_rows(36)
    run = change(packing=True, rows_per_step=6)
    packed, run = command._packed_rows(Data([], rows, [], run), epochs=2)
    assert len(packed) < len(rows)
    assert run.steps == 2 * (len(packed) // 6)


def test_the_lines_at_the_end_ask_the_model(whole):
    """The mistake: a prompt without the template, which a trained model answers with nothing."""
    folder, _, printed = whole
    lines = printed.partition("These lines ask it:\n\n")[2]
    assert "apply_chat_template(" in lines
    assert "apply_chat_template(" in (folder / "adapter" / "README.md").read_text()
    names = {}
    exec(lines, names)
    asked = names["ids"]["input_ids"][0]
    assert names["tokenizer"].decode(asked).endswith("<|im_start|>assistant\n")
    assert len(names["tokens"]) > len(asked)


def test_a_full_model_and_a_4_bit_one_are_saved(small_model, pairs, tmp_path):
    """What is saved loads again: the whole model with its tokenizer, or adapters on their base."""
    from transformers import AutoModelForCausalLM

    short = {"steps": 1, "warmup_steps": 0, "report_to": "none"}
    base = AutoModelForCausalLM.from_pretrained(small_model)

    full = settings(small_model, pairs, tmp_path / "full", method="full", **short)
    finetune_here(full)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "full" / "model")
    assert base_fingerprint(saved) != base_fingerprint(base)
    assert (tmp_path / "full" / "model" / "tokenizer.json").exists()
    assert not (tmp_path / "full" / "log").exists()

    adapted = settings(small_model, pairs, tmp_path / "qlora", method="qlora", **short)
    _, printed = finetune_here(adapted)
    assert "what four bits cost" in printed
    assert load_adapter(base, tmp_path / "qlora" / "adapter").peft_config


def test_a_base_learns_where_to_stop(small_model, pairs, tmp_path):
    """The mistakes: padding beyond the table fails on a GPU without a name; what is learnt ends
    with a mark at which the saved model does not stop.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(small_model)
    base.generation_config.eos_token_id = base.config.eos_token_id = 0
    base.save_pretrained(tmp_path / "base")
    tokenizer = load_tokenizer()
    tokenizer.chat_template, tokenizer.eos_token = None, "<|endoftext|>"
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path / "base")
    short = {"steps": 1, "warmup_steps": 0, "report_to": "none", "chat_template": "chatml"}
    run = settings(tmp_path / "base", pairs, tmp_path / "out", method="full", **short)
    with pytest.raises(ValueError, match=r"padding has token 49152 .*--add-token '\[PAD\]'"):
        finetune_here(run)

    finetune_here(dataclasses.replace(run, add_tokens=["[PAD]"]))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert saved.config.vocab_size == 49153
    assert saved.generation_config.eos_token_id == [2, 0]
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "model").eos_token == "<|im_end|>"


# --- a process of its own -----------------------------------------------------------------------


def stand_in(tmp_path, monkeypatch, body):
    """A program in the place of Python."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))


def test_a_command_that_fails_raises_its_last_line(tmp_path, monkeypatch):
    stand_in(
        tmp_path, monkeypatch, "echo 'step 0: loss 1.5, 3'\necho first >&2\necho last >&2\nexit 1"
    )
    with pytest.raises(RuntimeError, match=r"^last; the command ended with 1"):
        run_command()
    stand_in(tmp_path, monkeypatch, "exit 3")
    with pytest.raises(RuntimeError, match=r"no error message.*ended with 3"):
        run_command()


def test_a_command_that_ends_before_it_is_killed_has_failed(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "echo 'step 0: loss 1.5, 3 tokens/s'")
    assert run_command() == {0: "1.5"}
    with pytest.raises(RuntimeError, match="ended with 0"):
        run_command(kill_at=7)


# --- what is refused ----------------------------------------------------------------------------


def test_bad_data_is_refused_before_the_folder_is_made(small_model, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="no rows"):
        finetune_here(settings(small_model, path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_rows_beyond_the_positions_of_the_base_are_refused(small_model, pairs, tmp_path):
    """The mistake: positions that the model has never seen are read without an error."""
    run = settings(small_model, pairs, tmp_path / "out")
    check_positions(run, longest=2048)
    with pytest.raises(ValueError, match=r"2049 tokens, .* knows 2048 positions.*--drop-long"):
        check_positions(run, longest=2049)


def test_a_base_that_one_device_cannot_hold_is_refused(small_model, pairs, tmp_path, monkeypatch):
    """The mistakes: an hour of loading before the memory is full; states that nobody counts."""
    base = model_without_weights(str(small_model))
    weights = 4 * sum(parameter.numel() for parameter in base.parameters())

    def place(times, **values):
        here = dataclasses.replace(machine(), memory_bytes=int(times * weights))
        monkeypatch.setattr(base_of_run, "machine", lambda: here)
        return base_of_run.placed(settings(small_model, pairs, tmp_path / "out", **values)).shard

    assert place(1.1) is False
    with pytest.raises(ValueError, match="several devices divide them, torchrun --nproc-per"):
        place(0.9)
    two = {"processes": 2}
    assert place(0.9, **two) is True
    with pytest.raises(ValueError, match="the weights of"):
        place(0.9, **two, shard=False)
    # AdamW has gradients and two states of each weight: four times the weights.
    assert place(4.1, **two, method="full") is False
    assert place(3.9, **two, method="full") is True
    with pytest.raises(ValueError, match=r"weights, gradients and states .* --nproc-per-node 3"):
        place(1.9, **two, method="full")


def test_no_file_of_the_user_is_overwritten(small_model, pairs, tmp_path):
    """The mistakes: a file of theirs is gone; a run writes over the data that it reads."""
    run = settings(small_model, pairs, tmp_path)
    for name in ("checkpoint.pt", "log", "axolotl.yml", "axolotl"):
        path = tmp_path / name
        path.mkdir()
        with pytest.raises(ValueError, match=f"{name} would be overwritten"):
            check_output(run, None, resume=False)
        check_output(run, None, resume=True)
        with pytest.raises(ValueError, match=f"{name} would be overwritten"):
            check_output(run, str(path / "train.jsonl"), resume=True)
        path.rmdir()
    check_output(run, None, resume=False)
    with pytest.raises(ValueError, match="is a file: give the name of a folder"):
        check_output(dataclasses.replace(run, output_dir=pairs), None, resume=False)


def test_packing_is_refused_where_documents_are_not_kept_apart():
    document = {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}
    rows = pack_sequences([document] * 2, length=8)
    model = model_of_shape("tiny-llama", device="cpu")
    check_packing(model, rows, pad_token_id=0)
    forward = model.forward
    model.forward = lambda position_ids, **inputs: forward(**inputs)
    with pytest.raises(ValueError, match=r"a document sees its neighbour.*--no-packing"):
        check_packing(model, rows, pad_token_id=0)
    with torch.no_grad():  # one document per row has no neighbour
        check_packing(model, pack_sequences([document], length=8), pad_token_id=0)
