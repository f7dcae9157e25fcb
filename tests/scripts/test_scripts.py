"""Each script runs as its first line says, and goes on after it was interrupted."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import HfArgumentParser

from recipes_lib.core.data.reminder_task import reminder_pairs

SCRIPTS = Path(__file__).parents[2] / "scripts"
LONG = "--text mine.txt --length 32 --save_every 1"
FIRST_LINES = {  # of each script's text, in small
    "train_large_model": "--rows 2 --held_out 2",
    "train_long_sequences": "--length 32",
    "finetune": "--held_out 2",
}
WAYS = {
    "train_large_model": "--data mine.jsonl --rows 2 --held_out 2 --save_every 1",
    "train_large_model, streamed": "--data mine.jsonl --rows 2 --save_every 1 --streamed disk",
    "train_long_sequences, all weights": LONG,
    "train_long_sequences, adapters": f"{LONG} --method qlora --inputs disk",
    "finetune": "--held_out 2 --save_every 1",
    "finetune, all weights": "--held_out 2 --save_every 1 --method all",
}


def script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def words(options, output):
    return f"--model tiny-smollm2 --steps 2 {options} --output {output}".split()


def settings(module, options, output):
    parser = HfArgumentParser(module.Settings)
    return parser.parse_args_into_dataclasses(words(options, output))[0]


def trained(output):
    (file,) = output.glob("*model.safetensors")
    return load_file(file)


@pytest.mark.parametrize("name", FIRST_LINES)
def test_the_first_line_as_a_user_types_it(name, tmp_path):
    """`main` runs when it is imported, and not as a program; or not on the data of the default."""
    command = [sys.executable, SCRIPTS / f"{name}.py", *words(FIRST_LINES[name], "new")]
    where = os.environ | {"PYTHONPATH": str(SCRIPTS.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step    2" in done.stdout
    assert trained(tmp_path / "new")


@pytest.mark.parametrize("name", WAYS)
def test_two_steps_and_a_resume(name, tmp_path, monkeypatch, capsys):
    """A run that goes on from a checkpoint and trains other rows, or from a fresh state.

    Or `--method all`, which trains adapters after all.
    """
    monkeypatch.chdir(tmp_path)
    pairs = [json.dumps(pair) for pair in reminder_pairs(limit=80)]
    Path("mine.jsonl").write_text("\n".join(pairs))
    Path("mine.txt").write_text("\n".join(pairs[:12]))
    module = script(name.split(",")[0])
    module.main(settings(module, WAYS[name], "whole"))
    assert "step    2" in capsys.readouterr().out

    save = module.save_checkpoint

    def save_and_die(*args, **options):
        save(*args, **options)
        raise KeyboardInterrupt

    cut = settings(module, WAYS[name], "cut")
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_checkpoint", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            module.main(cut)
    module.main(cut)
    expected = trained(Path("whole"))
    assert all("lora" in weight for weight in expected) != name.endswith("all weights")
    for weight, value in trained(Path("cut")).items():
        assert torch.equal(value, expected[weight]), weight
