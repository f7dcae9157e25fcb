"""The command of notebook 05 in processes of its own: killed, resumed, and given bad data."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from recipes_lib.core.machine import seed_everything
from recipes_lib.core.model import load_tokenizer, model_of_shape
from recipes_lib.training.sequence_packing import pack_sequences
from recipes_lib.training.tracking import read_back
from recipes_lib.workflows.finetune.command import check_output, check_packing, run_command
from recipes_lib.workflows.finetune.data import load_data
from recipes_lib.workflows.finetune.libraries import write_production
from tests.test_finetune import RUN


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A random model with the real tokenizer, as a folder: a process of its own can load it."""
    folder = tmp_path_factory.mktemp("model")
    seed_everything(0)
    model = model_of_shape("smollm2-135m", layers=1, device="cpu")
    small = model.config
    small.hidden_size, small.intermediate_size, small.head_dim = 36, 64, 4
    type(model)(small).save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    lines = [
        {"prompt": f"What is {i} plus {i}?", "completion": f"It is {2 * i}, of course."}
        for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def command(small_model, pairs, output, *more, steps=8):
    return ["--model", str(small_model), "--data", str(pairs), "--output", str(output), "--steps", str(steps),
            "--save-steps", "2", "--rows-per-step", "2", "--seq-len", "64", "--precision", "fp32",
            "--dropout", "0.1", *more]  # fmt: skip


def test_command_is_killed_and_resumed_with_the_identical_losses(small_model, pairs, tmp_path):
    """SIGKILL between two steps; the log shows each step once; the folder holds all that was promised."""
    expected = run_command(*command(small_model, pairs, tmp_path / "whole"))
    assert sorted(expected) == list(range(8))
    killed = tmp_path / "killed"
    before = run_command(*command(small_model, pairs, killed), kill_at=4)
    assert 4 in before and 7 not in before
    after = run_command(*command(small_model, pairs, killed, "--resume"))
    assert before | after == expected and min(after) >= 4
    assert all(before[step] == after[step] for step in before.keys() & after.keys())

    log = read_back(killed / "log", backend="tensorboard")
    assert [step for step, _ in log["loss"]] == list(range(8))
    assert [loss for _, loss in log["loss"]] == pytest.approx(
        [float(expected[s]) for s in range(8)], abs=1e-5
    )
    assert {
        "loss",
        "tokens_per_second",
        "peak_bytes",
        "gradient_norm",
        "learning_rate",
    } <= log.keys()
    files = {path.name for path in killed.iterdir()}
    assert {
        "adapter",
        "axolotl.yml",
        "accelerate.yml",
        "train.jsonl",
        "checkpoint.pt",
        "log",
    } <= files
    same = [
        (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes()
        for name in ("whole", "killed")
    ]
    assert same[0] == same[1]

    with pytest.raises(RuntimeError, match="is there already, a finished run"):
        run_command(*command(small_model, pairs, killed))
    assert run_command(*command(small_model, pairs, tmp_path / "new", "--resume", steps=2)), (
        "nothing there: it begins"
    )


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "(no rows)"),
        (
            [{"prompt": f"{i}", "completion": "b " * 200} for i in range(30)],
            "longer than seq_len=64",
        ),
        ([{"text": "a"}], "`prompt` and `completion` are needed"),
        ([{"prompt": f"{i}", "completion": "b"} for i in range(5)], "held-out rows"),
        (
            [{"prompt": "a", "completion": "b"}] * 30,
            "the data set is empty",
        ),  # all of it is held out
    ],
)
def test_command_refuses_bad_data(small_model, tmp_path, lines, error):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(RuntimeError, match=f"error: .*{re.escape(error)}"):
        run_command(*command(small_model, path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_killed_before_its_first_checkpoint_begins_again(
    small_model, pairs, tmp_path
):
    line = command(small_model, pairs, tmp_path / "run", "--save-steps", "4", steps=4)
    before = run_command(*line, kill_at=1)
    with pytest.raises(RuntimeError, match="log would be overwritten: resume"):
        run_command(*line)
    after = run_command(*line, "--resume")
    assert sorted(after) == [0, 1, 2, 3] and {step: after[step] for step in before} == before
    log = read_back(tmp_path / "run" / "log", backend="tensorboard")
    assert [step for step, _ in log["loss"]] == [0, 1, 2, 3]


def test_no_file_of_the_user_is_overwritten(pairs, tmp_path):
    result = tmp_path / "adapter"
    for name in ("train.jsonl", "axolotl.yml"):
        (tmp_path / name).write_text(pairs.read_text())
        with pytest.raises(ValueError, match=f"{name} would be overwritten"):
            check_output(tmp_path, result, inputs=["", None], resume=False)
        with pytest.raises(ValueError, match=f"{name} would be overwritten"):
            check_output(tmp_path, result, inputs=[str(tmp_path / name), None], resume=True)
        (tmp_path / name).unlink()
    check_output(tmp_path, result, inputs=[str(pairs), None], resume=False)


def test_what_is_held_out_is_not_trained_on(pairs, tmp_path, capsys):
    tokenizer, run = load_tokenizer(), dataclasses.replace(RUN, seq_len=64, data_file=str(pairs))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(pairs.read_text().splitlines()[:5]))
    trained, rows, _ = load_data(tokenizer, run=run, held_out_file=str(held_out))
    assert len(trained) == len(rows) == 35 and "held out too: 5 pairs" in capsys.readouterr().out
    assert len(load_data(tokenizer, run=run, limit=20)[0]) == 18
    with pytest.raises(ValueError, match="give the file of pairs to train on"):
        load_data(
            tokenizer, run=dataclasses.replace(run, data_file=""), held_out_file=str(held_out)
        )
    with pytest.raises(ValueError, match="limit=0"):
        load_data(tokenizer, run=run, limit=0)


def test_packing_is_refused_where_documents_are_not_kept_apart():
    rows = pack_sequences([{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 2, length=8)
    model = model_of_shape("tiny-llama", device="cpu")
    check_packing(model, rows, run=RUN, pad_token_id=0)
    forward = model.forward
    model.forward = lambda position_ids, **inputs: forward(**inputs)
    with pytest.raises(ValueError, match=r"a document sees its neighbour.*--no-packing"):
        check_packing(model, rows, run=RUN, pad_token_id=0)


PAIR = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize("rows", [[PAIR, PAIR], [PAIR, CHAT], [CHAT, PAIR], [CHAT, CHAT]])
def test_production_files_name_the_rows_that_were_trained_on(tmp_path, rows):
    write_production(
        dataclasses.replace(RUN, output_dir=str(tmp_path), data_file="mine.jsonl", method="lora"),
        rows,
    )
    assert f"path: {tmp_path}/train.jsonl" in (tmp_path / "axolotl.yml").read_text()
    written = [
        json.loads(line)["messages"] for line in (tmp_path / "train.jsonl").read_text().splitlines()
    ]
    assert written == [CHAT["messages"]] * 2
