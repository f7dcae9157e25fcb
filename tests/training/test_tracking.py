import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes_lib.training.tracking import (
    append_line,
    predicted_file_bytes,
    read_back,
    read_lines,
    track,
)
from recipes_lib.training.tracking.backends import BACKENDS, WandB

pytest.importorskip("tensorboard")
ROOT = Path(__file__).resolve().parents[2]
FIVE = ["loss", "tokens_per_second", "peak_bytes", "gradient_norm", "learning_rate"]


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture(autouse=True)
def read_each_file_once(monkeypatch):
    """W&B's reader is a process of half a second. No test reads a file that is still written."""
    monkeypatch.setattr(WandB, "_records", staticmethod(functools.cache(WandB._records)))


@pytest.fixture
def an_hour_later(monkeypatch):
    """A call moves the clock: TensorBoard's page sorts files by the second in which they begin."""
    real = time.time
    hours = []
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * len(hours))

    def call():
        hours.append(1)

    return call


def mlflow_runs(folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=(folder / "mlruns").as_uri()).search_runs(["0"])


def wandb_records(folder, kind):
    """The records of one kind in the file of the first start of the run `run`."""
    first = min(
        folder.glob("run/wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime
    )
    return [record[kind] for record in WandB._records(first) if record["type"] == kind]


@pytest.mark.filterwarnings("error:Converting a tensor with requires_grad")
def test_reads_back_what_was_logged_and_keeps_runs_apart(backend, tmp_path):
    environment = dict(os.environ)
    folder = tmp_path / "new" / "folder"
    loss = torch.tensor([2.5], requires_grad=True)
    others = {"eval/loss": np.float32(0.5), "top.5": torch.tensor(0.75)}
    with track(folder, backend=backend) as tracker:
        tracker.log(0, loss=loss, peak_bytes=2**34 + 2**12, gradient_norm=math.inf)
        # A second run is open at the same time.
        with track(folder, backend=backend, run_name="lr-1e-3") as other:
            other.log(0, loss=7)
        tracker.log(np.int64(3), loss=math.nan, **others)
        tracker.log(3, learning_rate=1e-3)  # a second call at one step
        tracker.log(200, loss=1 / 3)
    found = read_back(folder, backend=backend)
    expected = {
        "loss": [(0, 2.5), (3, math.nan), (200, 1 / 3)],
        "peak_bytes": [(0, 2**34 + 2**12)],
        "gradient_norm": [(0, math.inf)],
        "eval/loss": [(3, 0.5)],
        "top.5": [(3, 0.75)],
        "learning_rate": [(3, 1e-3)],
    }
    tolerance = {"rel": 0, "abs": 0, "nan_ok": True}
    if backend == "tensorboard":
        tolerance = {"rel": 1e-7, "nan_ok": True}  # it keeps float32
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        steps, values = zip(*points)
        found_steps, found_values = zip(*found[name])
        assert found_steps == steps
        assert found_values == pytest.approx(values, **tolerance)
    assert read_back(folder, backend=backend, run_name="lr-1e-3") == {"loss": [(0, 7.0)]}
    assert dict(os.environ) == environment
    with pytest.raises(ValueError, match=r"resume_step=None.*has 1 values.*pass it to continue"):
        track(folder, backend=backend, run_name="lr-1e-3")


def log_steps(tracker, begin, end):
    for step in range(begin, end):
        tracker.log(step, loss=begin + step / 100)
        if begin == 0:
            tracker.log(step, only_at_first=1.0)


def test_a_resume_after_an_error_shows_each_step_once(
    backend, tmp_path, monkeypatch, an_hour_later
):
    """Dead after step 9 with a checkpoint of step 5; then after step 6, with one of step 3."""
    settings = {"lr": 1e-3, "warmup": {"steps": 10}}
    options = {"backend": backend, "settings": settings}
    dead = [(0, 10, None), (5, 7, 5)]
    if backend == "wandb":
        dead = dead[:1]  # each file takes half a second to read
    for begin, end, resume_step in dead:
        resumed = track(tmp_path, resume_step=resume_step, **options)
        with pytest.raises(ZeroDivisionError), resumed as tracker:
            log_steps(tracker, begin, end)
            raise ZeroDivisionError
        tracker.close()  # does nothing: the run stays failed
        an_hour_later()
    with pytest.raises(ValueError, match="closed"):
        tracker.log(20, loss=1.0)
    if backend == "mlflow":
        assert mlflow_runs(tmp_path, monkeypatch)[0].info.status == "FAILED"
    with track(tmp_path, resume_step=3, **options) as tracker:
        log_steps(tracker, 3, 5)

    found = read_back(tmp_path, backend=backend)
    loss = found["loss"]
    assert [step for step, _ in loss] == [0, 1, 2, 3, 4]
    assert [value for _, value in loss] == pytest.approx([0, 0.01, 0.02, 3.03, 3.04])
    assert found["only_at_first"] == [(0, 1.0), (1, 1.0), (2, 1.0)]
    if backend == "tensorboard":
        check_tensorboard_page(tmp_path / "run", loss, settings)
    if backend == "mlflow":  # one run, continued
        (run,) = mlflow_runs(tmp_path, monkeypatch)
        assert run.data.params == {name: str(value) for name, value in settings.items()}
        assert run.info.status == "FINISHED"
        assert run.info.run_name == "run"
    if backend == "wandb":
        (run,) = wandb_records(tmp_path, "run")
        assert (run["display_name"], run["run_group"]) == ("run", "run")
        assert run["config"]["update"].items() >= settings.items()
        assert wandb_records(tmp_path, "exit") == [{"exit_code": 1}]


def check_tensorboard_page(path, loss, settings):
    """What its own page shows: the old values are hidden, the settings are there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == loss
    text = events.Tensors("settings/text_summary")[-1].tensor_proto.string_val[0]
    assert json.loads(text) == settings


def test_the_lines_by_hand_say_the_same(tmp_path):
    """Also that a resume drops what was logged from its step on."""
    log = {}
    for start, end in ((0, 6), (4, 5), (2, 4)):
        resume_step = None if start == 0 else start
        with track(tmp_path, resume_step=resume_step) as tracker:
            for step in range(start, end):
                values = {"loss": start + step / 4}
                if start == 0:
                    values["only_at_first"] = 1.0
                tracker.log(step, **values)
                append_line(tmp_path / "log.jsonl", step, **values)
    for step, values in read_lines(tmp_path / "log.jsonl").items():
        for name, value in values.items():
            log.setdefault(name, []).append((step, value))
    assert log == read_back(tmp_path, backend="tensorboard")
    assert log["only_at_first"] == [(0, 1.0), (1, 1.0)]


# One interpreter for all, because it takes seconds to import torch. The forked process logs to
# every library, flushes and is killed. The other one ends without `close`.
TWO_ENDS = """
import os, signal, sys
from recipes_lib.training.tracking import track

def start(backend, run_name):
    tracker = track("../folder", backend=backend, run_name=run_name, settings={"lr": 0.1})
    for step in range(5):
        tracker.log(step, loss=step / 4)
    return tracker

child = os.fork()
if child == 0:
    os.setsid()
    trackers = [start(backend, backend) for backend in sys.argv[1:]]
    for tracker in trackers:
        tracker.flush()
    os.killpg(0, signal.SIGKILL)  # W&B's own process as well
for backend in sys.argv[1:]:
    if backend == "wandb":  # the one that writes from a process of its own
        start(backend, "not-closed")
_, status = os.waitpid(child, 0)
assert os.WTERMSIG(status) == signal.SIGKILL
"""


def test_a_process_without_close_leaves_its_values_and_nothing_elsewhere(tmp_path):
    home = tmp_path / "home"
    work = tmp_path / "work"
    home.mkdir()
    work.mkdir()
    installed = [backend for backend in BACKENDS if importlib.util.find_spec(backend)]
    # Nothing that says "this is a test": the libraries send no telemetry from one.
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TWO_ENDS, *installed]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    expected = {"loss": [(step, step / 4) for step in range(5)]}
    for backend in installed:
        assert read_back(tmp_path / "folder", backend=backend, run_name=backend) == expected
    if "wandb" in installed:
        assert read_back(tmp_path / "folder", backend="wandb", run_name="not-closed") == expected
    assert sorted(tmp_path.iterdir()) == [tmp_path / "folder", home, work]
    assert [*home.iterdir(), *work.iterdir()] == []


@pytest.mark.parametrize("steps", [1, 300])
def test_file_size_as_predicted(steps, tmp_path):
    with track(tmp_path) as tracker:
        (file,) = (tmp_path / "run").iterdir()
        tracker.flush()
        header = file.stat().st_size
        for step in range(steps):
            tracker.log(step, **dict.fromkeys(FIVE, 1.0))
    size = file.stat().st_size
    tag_length = round(sum(map(len, FIVE)) / 5)
    predicted = predicted_file_bytes(scalars=5, steps=steps, tag_length=tag_length)
    assert header < 300
    assert predicted == pytest.approx(size - header, rel=0.02)
    if steps > 100:
        assert predicted == pytest.approx(size, rel=0.1)


def test_values_that_are_no_numbers_and_steps_that_go_back(tmp_path):
    no_numbers = [torch.ones(2), np.ones(2), torch.ones(0), "high", None, [1.0], 1j]
    no_numbers.append(torch.tensor(1j))
    with track(tmp_path) as tracker:
        tracker.log(4, loss=1.0)
        for bad in no_numbers:
            with pytest.raises(ValueError, match=r"gradient_norm.*one number"):
                tracker.log(5, loss=0.5, gradient_norm=bad)
        for step in (3, -1, 4.5, None, "5", True):
            with pytest.raises(ValueError, match="never go back; this one is 4 or more"):
                tracker.log(step, loss=1.0)
        with pytest.raises(ValueError, match="no value"):
            tracker.log(5)
        for name in ("train loss", "_step", "/loss", ""):
            with pytest.raises(ValueError, match="begin with a letter"):
                tracker.log(5, **{name: 1.0})
    # Nothing of a refused call is written.
    assert read_back(tmp_path, backend="tensorboard") == {"loss": [(4, 1.0)]}
    resumed = track(tmp_path, resume_step=3)
    with resumed as tracker, pytest.raises(ValueError, match="this one is 3 or more"):
        tracker.log(2, loss=1.0)


def test_a_run_without_values_cannot_be_read_or_continued(backend, tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        read_back(tmp_path / "missing", backend=backend)
    with pytest.raises(ValueError, match="is no folder"):
        track(tmp_path / "missing", backend=backend, resume_step=5)
    assert not (tmp_path / "missing").exists()
    with pytest.raises(ValueError, match="has no values"):
        read_back(tmp_path, backend=backend)
    with pytest.raises(ValueError, match=r"resume_step=5.*has 0 values"):
        track(tmp_path, backend=backend, resume_step=5)


def test_folders_and_names_that_are_none(tmp_path):
    (tmp_path / "file").touch()
    for call in (track, functools.partial(read_back, backend="tensorboard")):
        with pytest.raises(ValueError, match="is no folder"):
            call(tmp_path / "file")
        for name in ("", "a/b", "..", "it's"):
            with pytest.raises(ValueError, match="letters, digits"):
                call(tmp_path, run_name=name)


def test_unknown_backend_and_missing_library(tmp_path, monkeypatch):
    for call in (track, read_back):
        with pytest.raises(ValueError, match="choose one of tensorboard, mlflow, wandb"):
            call(tmp_path, backend="comet")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        track(tmp_path)
