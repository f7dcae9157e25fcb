import pytest


def test_the_doctor_reads_an_error(command):
    status, out, _ = command("doctor", "--error", "CUDA error: out of memory")
    assert status == 0
    assert "micro-batches" in out


def test_the_doctor_takes_a_shape_without_its_weights(command):
    options = ["--model", "llama-3.1-8b", "--memory", "24", "--batch-size", "4"]
    status, out, _ = command("doctor", *options, "--seq-len", "2048", "--dtype", "bf16")
    assert status == 0
    assert "torch.bfloat16 with AdamW: 105.9 GiB of 24.0 GiB" in out
    assert "First that fits: optimizer offload" in out


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([], "nothing to diagnose"),
        (["--model", "llama-3.1-8b", "--memory", "-1"], "--memory -1: give the GiB"),
        (["--model", "no/such-model"], "cannot load a causal language model"),
        (["--error", "KeyError: 3"], "this is not an out-of-memory error"),
    ],
)
def test_bad_input_is_one_line(command, monkeypatch, options, error):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, _, err = command("doctor", *options)
    assert status == 1
    assert err.splitlines()[-1].startswith(f"error: {error}")
