"""Each script runs as its first line says, and goes on after it was interrupted."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import HfArgumentParser

from recipes_lib.core.data.reminder_task import reminder_pairs

SCRIPTS = Path(__file__).parents[2] / "scripts"
LONG = "--text mine.txt --length 32 --save_every 1"
SMALL = {
    "train_large_model": "--data mine.jsonl --rows 2 --held_out 2 --save_every 1",
    "train_long_sequences": LONG,
    "train_long_sequences, adapters": f"{LONG} --method qlora --inputs disk",
    "finetune": "--held_out 2 --save_every 1",
}


def script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def settings(module, options, output):
    words = f"--model tiny-smollm2 --steps 2 {options} --output {output}".split()
    return HfArgumentParser(module.Settings).parse_args_into_dataclasses(words)[0]


def trained(output):
    (file,) = output.glob("*model.safetensors")
    return load_file(file)


@pytest.mark.parametrize("name", SMALL)
def test_two_steps_and_a_resume(name, tmp_path, monkeypatch, capsys):
    """A run that goes on from a checkpoint and trains other rows, or from a fresh state."""
    monkeypatch.chdir(tmp_path)
    pairs = [json.dumps(pair) for pair in reminder_pairs(limit=12)]
    Path("mine.jsonl").write_text("\n".join(pairs))
    Path("mine.txt").write_text("\n".join(pairs))
    module = script(name.split(",")[0])
    whole = settings(module, SMALL[name], tmp_path / "whole")
    module.main(whole)
    assert "step    2" in capsys.readouterr().out

    save = module.save_checkpoint

    def save_and_die(*args, **options):
        save(*args, **options)
        raise KeyboardInterrupt

    cut = settings(module, SMALL[name], tmp_path / "cut")
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_checkpoint", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            module.main(cut)
    module.main(cut)
    expected = trained(tmp_path / "whole")
    for weight, value in trained(tmp_path / "cut").items():
        assert torch.equal(value, expected[weight]), weight
