"""The command of notebook 05 in processes of its own: killed, resumed, and given bad data."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from recipes_lib.core.machine import seed_everything
from recipes_lib.core.model import load_tokenizer, model_of_shape
from recipes_lib.finetune_command import run_command, write_production
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
    lines = [{"prompt": f"What is {i} plus {i}?", "completion": f"It is {2 * i}, of course."} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def command(small_model, pairs, output, *more, steps=8):
    return ["--model", str(small_model), "--data", str(pairs), "--output", str(output), "--steps", str(steps),
            "--save-steps", "2", "--rows-per-step", "2", "--seq-len", "64", "--precision", "fp32", *more]  # fmt: skip


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

    from recipes_lib.training.tracking import read_back

    log = read_back(killed / "log", backend="tensorboard")
    assert [step for step, _ in log["loss"]] == list(range(8))
    assert [f"{loss:.4f}" for _, loss in log["loss"]] == [f"{float(expected[s]):.4f}" for s in range(8)]
    assert {"loss", "tokens_per_second", "peak_bytes", "gradient_norm", "learning_rate"} <= log.keys()
    files = {path.name for path in killed.iterdir()}
    assert {"adapter", "axolotl.yml", "accelerate.yml", "train.jsonl", "checkpoint.pt", "log"} <= files
    same = [(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert same[0] == same[1]

    with pytest.raises(RuntimeError, match="is there already, a finished run"):
        run_command(*command(small_model, pairs, killed))
    assert run_command(*command(small_model, pairs, tmp_path / "new", "--resume", steps=2)), "nothing there: it begins"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "(no rows)"),
        ([{"prompt": "a", "completion": "b " * 200}] * 30, "longer than seq_len=64"),
        ([{"text": "a"}], "`prompt` and `completion` are needed"),
        ([{"prompt": "a", "completion": "b"}] * 5, "held-out rows"),
    ],
)
def test_command_refuses_bad_data(small_model, tmp_path, lines, error):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(RuntimeError, match=f"error: .*{re.escape(error)}"):
        run_command(*command(small_model, path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


PAIR = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize("rows", [[PAIR, PAIR], [PAIR, CHAT], [CHAT, PAIR], [CHAT, CHAT]])
def test_production_files_name_the_rows_that_were_trained_on(tmp_path, rows):
    write_production(dataclasses.replace(RUN, output_dir=str(tmp_path), data_file="mine.jsonl", method="lora"), rows)
    assert f"path: {tmp_path}/train.jsonl" in (tmp_path / "axolotl.yml").read_text()
    written = [json.loads(line)["messages"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert written == [CHAT["messages"]] * 2
