import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from recipes_lib.compression.pruning import apply_pruning
from recipes_lib.edge import _export_process as export_process
from recipes_lib.edge._export_process import in_background, key_of, sources_of
from recipes_lib.edge._exported_file import ExportedFile
from recipes_lib.edge.gguf_export import export_to_gguf
from tests.edge.slow_exports import export_badly, export_forever, export_quickly
from tests.edge.test_gguf_export import tokenizer_of
from tests.small_models import small_model

PATIENCE = 120  # seconds, on a machine that computes something else


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def leftovers(folder):
    return [path.name for path in folder.iterdir() if "work-" in path.name]


def pid_of(folder):
    [file] = folder.glob("*work-*/pid")
    return int(file.read_text())


def test_a_job_works_beside_this_process_and_its_result_is_kept(tmp_path, capfd):
    """The second job finds the file. Other weights, or a file that was changed, are another job."""
    model = nn.Linear(2, 2)
    calls = tmp_path / "calls"
    arguments = {"model": model, "path": tmp_path / "a.pte", "text": str(calls)}
    job = in_background(export_quickly, **arguments)
    exported = job.result(timeout=PATIENCE)
    assert exported == ExportedFile(tmp_path / "a.pte", bytes=len(str(calls)), seconds=0.0)
    assert exported.path.read_text() == str(calls)
    assert "a line of noise" in job.log.read_text()
    assert capfd.readouterr() == ("", "")
    again = in_background(export_quickly, **arguments)
    assert again.done
    assert again.result() == exported
    assert calls.read_text() == "called\n"
    exported.path.write_text("shorter")
    changed = in_background(export_quickly, **arguments)
    changed.result(timeout=PATIENCE)
    assert calls.read_text() == "called\ncalled\n"
    assert leftovers(tmp_path) == []


def test_the_key_sees_weights_settings_and_their_borders():
    model = nn.Linear(2, 2)
    key = key_of(export_quickly, {"model": model, "text": "x"})
    assert key == key_of(export_quickly, {"text": "x", "model": model})
    assert key != key_of(export_badly, {"text": "x", "model": model})
    assert key != key_of(export_quickly, {"text": "y", "model": model})
    with torch.no_grad():
        model.weight[0, 0] += 1e-6
    assert key != key_of(export_quickly, {"model": model, "text": "x"})
    split = key_of(export_quickly, {"model": model, "text": [1, 23]})
    assert split != key_of(export_quickly, {"model": model, "text": [12, 3]})


def test_errors_come_back_and_nothing_else(tmp_path):
    bad = in_background(export_badly, path=tmp_path / "bad.pte")
    killed = in_background(export_forever, path=tmp_path / "killed.pte")
    with pytest.raises(TimeoutError, match="not ready after 0 s"):
        killed.result(timeout=0)
    with pytest.raises(ValueError, match="group=7"):
        bad.result(timeout=PATIENCE)
    wait_for(lambda: any(tmp_path.glob("killed.pte.work-*/pid")))
    os.kill(pid_of(tmp_path), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"(?s)code -9.*now it hangs"):
        killed.result(timeout=PATIENCE)
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "bad.pte").exists()
    assert not (tmp_path / "killed.pte").exists()


def test_a_cancelled_job_leaves_nothing(tmp_path):
    job = in_background(export_forever, path=tmp_path / "a.pte")
    job.cancel()
    assert job.done
    assert leftovers(tmp_path) == []


PARENT = """
import sys, time
from recipes_lib.edge._export_process import in_background
from tests.edge.slow_exports import export_forever
job = in_background(export_forever, path=sys.argv[1])
time.sleep(600)
"""


def test_a_job_ends_with_its_parent_even_if_that_is_killed(tmp_path):
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", PARENT, str(tmp_path / "a.pte")]
    with subprocess.Popen(command, cwd=root) as parent:
        wait_for(lambda: any(tmp_path.glob("*work-*/pid")))
        child = pid_of(tmp_path)
        parent.kill()
    wait_for(lambda: not psutil.pid_exists(child))
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "a.pte").exists()


def test_a_function_that_nobody_can_import_is_refused(tmp_path):
    def local(*, path):
        pass

    with pytest.raises(ValueError, match="no function of a module"):
        in_background(local, path=tmp_path / "a.pte")
    assert list(tmp_path.iterdir()) == []


def test_a_job_waits_for_the_one_before_it(tmp_path):
    """Catches two exports that take both cores, and one that waits for a job that has failed."""
    calls = tmp_path / "calls"
    quick = dict(model=nn.Linear(2, 2), text=str(calls))
    first = in_background(export_forever, path=tmp_path / "a.pte")
    second = in_background(export_quickly, path=tmp_path / "b.pte", after=first, **quick)
    with pytest.raises(TimeoutError):
        second.result(timeout=4)
    assert not calls.exists()
    first.cancel()
    second.result(timeout=PATIENCE)
    third = in_background(export_quickly, path=tmp_path / "c.pte", after=second, **quick)
    third.result(timeout=PATIENCE)  # a job that has ended delays nothing
    assert calls.read_text() == "called\ncalled\n"


def test_the_key_sees_what_else_a_file_takes():
    model = small_model("Llama")
    key = key_of(export_quickly, {"model": model})
    model.generation_config.eos_token_id = 7
    assert key != key_of(export_quickly, {"model": model})
    tokenizer = tokenizer_of()
    key = key_of(export_quickly, {"tokenizer": tokenizer})
    tokenizer(["a", "abc"], padding=False, truncation=True, max_length=2)
    assert key == key_of(export_quickly, {"tokenizer": tokenizer})
    tokenizer.eos_token = "hell"
    ended = key_of(export_quickly, {"tokenizer": tokenizer})
    assert key != ended
    tokenizer.chat_template = "{{ messages }}"
    assert ended != key_of(export_quickly, {"tokenizer": tokenizer})


def test_a_model_with_masks_leaves_no_folder(tmp_path):
    masked = apply_pruning(nn.Sequential(nn.Linear(4, 4)), share=0.5)
    with pytest.raises(ValueError, match="cannot be sent to another process"):
        in_background(export_quickly, model=masked, text="x", path=tmp_path / "a.pte")
    assert leftovers(tmp_path) == []


def test_the_record_of_an_older_file_goes_before_the_file(tmp_path, monkeypatch):
    """A process that ends between file and record leaves no other weights under the old key."""
    path = tmp_path / "a.pte"
    old = key_of(export_quickly, {"text": "old"})
    path.write_text("old")
    export_process._keep(path, old, value=None)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.pte").write_text("new")

    def write(*, path):
        path.write_text("new")

    export_process._call(write, folder, path, {})
    assert path.read_text() == "new"
    assert export_process._kept(path, old) is None


def test_two_jobs_for_one_path(tmp_path):
    first = in_background(
        export_quickly, model=nn.Linear(2, 2), text=str(tmp_path / "1"), path=tmp_path / "a.pte"
    )
    second = in_background(
        export_quickly,
        model=nn.Linear(2, 2),
        text=str(tmp_path / "2"),
        path=tmp_path / "a.pte",
        after=first,
    )
    second.result(timeout=PATIENCE)
    with pytest.raises(RuntimeError, match="give each job a path of its own"):
        first.result(timeout=PATIENCE)


def test_the_process_ends_well(tmp_path):
    job = in_background(
        export_quickly, model=nn.Linear(2, 2), text=str(tmp_path / "calls"), path=tmp_path / "a.pte"
    )
    job.result(timeout=PATIENCE)
    assert job._process.returncode == 0
    assert "Fatal" not in job.log.read_text()


def test_the_key_sees_the_code(tmp_path, monkeypatch):
    """Catches a file of yesterday's export that today's code would make otherwise."""
    source = tmp_path / "an_exporter.py"
    source.write_text("def export(*, path):\n    path.write_text('old')\n")
    monkeypatch.syspath_prepend(tmp_path)
    exporter = importlib.import_module("an_exporter")
    key = key_of(exporter.export, {})
    assert key == key_of(exporter.export, {})
    source.write_text("def export(*, path):\n    path.write_text('new')\n")
    assert key != key_of(exporter.export, {})
    files = [path.relative_to(export_process.PACKAGE) for path in sources_of(export_to_gguf)]
    for name in (
        "edge/gguf_export.py",
        "edge/language_model/lowering.py",
        "core/model/integer_grid.py",
    ):
        assert files.count(Path(name)) == 1
