import re

import pytest

from recipes_lib.cli.doctor import shape_named
from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.out_of_memory_doctor import FINETUNE


def test_the_doctor_takes_a_shape_without_its_weights(command):
    """The mistake: an option that does not reach the arithmetic."""
    options = ["--model", "llama-3.1-8b", "--card", "L4", "--batch-size", "4"]
    status, out, _ = command("doctor", *options, "--seq-len", "2048", "--dtype", "bf16")
    assert status == 0
    imports = [line for line in out.splitlines() if line.startswith("from recipes_lib.")]
    assert max(len(line) for line in out.splitlines() if line not in imports) <= 80
    assert len(imports) > 0
    said = " ".join(out.split())  # it is wrapped for a terminal
    assert "4 x 2,048 tokens, weights in bfloat16, on L4" in said
    assert "as it is: about 105.9 GiB, too much" in said
    assert "needs 136.2 GiB of host memory" in said
    assert "loss in chunks + checkpointing + optimizer offload: " in said
    assert "First that fits: " in said
    assert "First that fits: none" not in said
    assert "Checked by the step itself: loss in chunks + checkpointing" in said
    assert said.endswith("fits.")


def test_the_ready_line_is_one_that_finetune_takes(command):
    """The mistake: a line to copy that the command refuses, or that lacks what it needs."""
    options = set(re.findall(r"--[a-z-]+", FINETUNE))
    _, out, _ = command("finetune", "--help")
    assert {"--data", "--output"} <= options <= set(re.findall(r"--[a-z-]+", out))


def test_the_doctor_reads_a_configuration_and_no_weights(command, tmp_path):
    """The mistake: a model has to be loaded to learn that it does not fit."""
    model_of_shape("tiny-qwen3", device="meta").config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    status, out, err = command("doctor", "--model", str(tmp_path), "--memory", "1")
    assert status == 0, err
    assert "weights in float32" in " ".join(out.split())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("smollm2", "smollm2-135m"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen3-32B", None),
    ],
)
def test_a_name_of_the_hub_is_known_by_its_shape(name, shape):
    """Gated models need a login, and their sizes are here."""
    assert shape_named(name) == shape


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([], "nothing to diagnose"),
        (["--model", "no/such-model"], "cannot load a causal language model"),
        (["--error", "KeyError: 3"], "this is not an out-of-memory error"),
    ],
)
def test_bad_input_is_one_line(command, monkeypatch, options, error):
    """The mistake: a mistyped name of a model in fifty lines of a library."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, _, err = command("doctor", *options)
    assert status == 1
    assert err.splitlines()[-1].startswith(f"error: {error}")
