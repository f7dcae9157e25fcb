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

from recipes_lib.training.tracking import estimate_tracking, read_back, track

pytest.importorskip("tensorboard")
ROOT = Path(__file__).resolve().parents[2]
FIVE = ["loss", "tokens_per_second", "peak_bytes", "gradient_norm", "learning_rate"]


@pytest.fixture(params=["tensorboard", "mlflow", "wandb"])
def backend(request):
    pytest.importorskip(request.param)
    return request.param


def mlflow_runs(folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=(folder / "mlruns").as_uri()).search_runs(["0"])


def wandb_records(folder, kind):
    """The records of one kind that one start of the run `run` has written."""
    file = next(folder.glob("run/wandb/offline-run-*/*.wandb"))
    text = subprocess.check_output(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", file], text=True
    )
    return [record[kind] for record in map(json.loads, text.splitlines()) if record["type"] == kind]


@pytest.mark.filterwarnings("error:Converting a tensor with requires_grad")
def test_reads_back_what_was_logged_and_keeps_runs_apart(backend, tmp_path):
    environment = dict(os.environ)
    loss = torch.tensor([2.5], requires_grad=True)
    with track(tmp_path / "new" / "folder", backend=backend) as tracker:
        tracker.log(0, loss=loss, peak_bytes=2**34 + 2**12, gradient_norm=math.inf)
        with track(tmp_path / "new" / "folder", backend=backend, run_name="lr-1e-3") as other:
            other.log(0, loss=7)
        tracker.log(
            np.int64(3),
            loss=math.nan,
            **{"eval/loss": np.float32(0.5), "top.5": torch.tensor(0.75)},
        )
        tracker.log(3, learning_rate=1e-3)  # a second call at one step
        tracker.log(200, loss=1 / 3)
    found = read_back(tmp_path / "new" / "folder", backend=backend)
    assert math.isnan(dict(found["loss"])[3])
    exact = (
        {"rel": 1e-7} if backend == "tensorboard" else {"rel": 0, "abs": 0}
    )  # float32 or float64
    expected = {
        "loss": [(0, 2.5), (3, math.nan), (200, 1 / 3)],
        "peak_bytes": [(0, 2**34 + 2**12)],
        "gradient_norm": [(0, math.inf)],
        "eval/loss": [(3, 0.5)],
        "top.5": [(3, 0.75)],
        "learning_rate": [(3, 1e-3)],
    }
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points]
        assert [v for _, v in found[name]] == pytest.approx(
            [v for _, v in points], nan_ok=True, **exact
        )
    assert read_back(tmp_path / "new" / "folder", backend=backend, run_name="lr-1e-3") == {
        "loss": [(0, 7.0)]
    }
    assert dict(os.environ) == environment


def test_resume_shows_each_step_once(backend, tmp_path, monkeypatch):
    """Killed after step 9 with a checkpoint of step 5; then again after step 6, with a checkpoint of step 3."""
    settings = {"lr": 1e-3, "warmup": {"steps": 10}}
    starts = [(0, 10, None), (5, 7, 5), (3, 5, 3)]
    for begin, end, resume_step in (
        starts[::2] if backend == "wandb" else starts
    ):  # each takes wandb two seconds
        with track(
            tmp_path, backend=backend, settings=settings, resume_step=resume_step
        ) as tracker:
            for step in range(begin, end):
                tracker.log(step, loss=begin + step / 100)
                if begin == 0:
                    tracker.log(step, only_at_first=1.0)
        if backend == "tensorboard":
            time.sleep(
                1.1
            )  # its page sorts the files by the second in which they begin, then by process
    found = read_back(tmp_path, backend=backend)
    loss = found["loss"]
    assert [step for step, _ in loss] == [0, 1, 2, 3, 4]
    assert [value for _, value in loss] == pytest.approx([0, 0.01, 0.02, 3.03, 3.04])
    assert found["only_at_first"] == [(0, 1.0), (1, 1.0), (2, 1.0)]
    if backend == "tensorboard":  # its own page hides the old values too, and shows the settings
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "run")).Reload()
        assert [(event.step, event.value) for event in events.Scalars("loss")] == loss
        assert (
            json.loads(events.Tensors("settings/text_summary")[-1].tensor_proto.string_val[0])
            == settings
        )
    if backend == "mlflow":  # one run, continued
        (run,) = mlflow_runs(tmp_path, monkeypatch)
        assert run.data.params == {name: str(value) for name, value in settings.items()}
        assert run.info.status == "FINISHED" and run.info.run_name == "run"
    if backend == "wandb":
        (run,) = wandb_records(tmp_path, "run")
        assert (run["display_name"], run["run_group"]) == ("run", "run")
        assert run["config"]["update"].items() >= settings.items()


def test_an_error_closes_the_run(backend, tmp_path, monkeypatch):
    with pytest.raises(ZeroDivisionError), track(tmp_path, backend=backend) as tracker:
        tracker.log(0, loss=1.0)
        tracker.log(1, loss=1 / 0)
    assert read_back(tmp_path, backend=backend) == {"loss": [(0, 1.0)]}
    with pytest.raises(ValueError, match="closed"):
        tracker.log(2, loss=1.0)
    tracker.close()  # does nothing: the run stays failed
    if backend == "mlflow":
        assert mlflow_runs(tmp_path, monkeypatch)[0].info.status == "FAILED"
    if backend == "wandb":
        assert wandb_records(tmp_path, "exit") == [{"exit_code": 1}]


SCRIPT = """
import os, signal, sys
from recipes_lib.training.tracking import track

tracker = track("../folder", backend=sys.argv[1], settings={"lr": 0.1})
for step in range(5):
    tracker.log(step, loss=step / 4)
if sys.argv[2] == "kill":
    tracker.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("backend", "end"),
    [("tensorboard", "kill"), ("mlflow", "kill"), ("wandb", "kill"), ("wandb", "exit")],
)
def test_a_process_without_close_leaves_its_values_and_nothing_elsewhere(backend, end, tmp_path):
    pytest.importorskip(backend)
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    # Nothing that says "this is a test": the libraries send no telemetry from one.
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, backend, end]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-9 if end == "kill" else 0, "", "")
    assert read_back(tmp_path / "folder", backend=backend) == {
        "loss": [(step, step / 4) for step in range(5)]
    }
    assert sorted(tmp_path.iterdir()) == [tmp_path / "folder", home, work]
    assert [*home.iterdir(), *work.iterdir()] == []


@pytest.mark.parametrize("steps", [1, 300])
def test_file_size_as_estimated(steps, tmp_path):
    with track(tmp_path) as tracker:
        (file,) = (tmp_path / "run").iterdir()
        tracker.flush()
        header = file.stat().st_size
        for step in range(steps):
            tracker.log(step, **dict.fromkeys(FIVE, 1.0))
    size = file.stat().st_size
    tag_length = round(sum(map(len, FIVE)) / 5)
    expected = estimate_tracking(scalars=5, steps=steps, tag_length=tag_length)
    assert expected == pytest.approx(size - header, rel=0.02) and header < 300
    if steps > 100:
        assert expected == pytest.approx(size, rel=0.1)


def test_values_that_are_no_numbers_and_steps_that_go_back(tmp_path):
    with track(tmp_path) as tracker:
        tracker.log(4, loss=1.0)
        for bad in (
            torch.ones(2),
            np.ones(2),
            torch.ones(0),
            "high",
            None,
            [1.0],
            1j,
            torch.tensor(1j),
        ):
            with pytest.raises(ValueError, match=r"gradient_norm.*one number"):
                tracker.log(5, loss=0.5, gradient_norm=bad)
        for step in (3, -1, 4.5):
            with pytest.raises(ValueError, match="never go back; this one is 4 or more"):
                tracker.log(step, loss=1.0)
        with pytest.raises(ValueError, match="no value"):
            tracker.log(5)
        for name in ("train loss", "_step", "/loss", ""):
            with pytest.raises(ValueError, match="begin with a letter"):
                tracker.log(5, **{name: 1.0})
    assert read_back(tmp_path, backend="tensorboard") == {
        "loss": [(4, 1.0)]
    }  # nothing of a refused call
    with (
        track(tmp_path, resume_step=3) as tracker,
        pytest.raises(ValueError, match="this one is 3 or more"),
    ):
        tracker.log(2, loss=1.0)


def test_bad_input(backend, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is no folder"):
        track(tmp_path / "file", backend=backend)
    for name in ("", "a/b", "..", "it's"):
        with pytest.raises(ValueError, match="letters, digits"):
            track(tmp_path, backend=backend, run_name=name)
    with pytest.raises(ValueError, match="is no folder"):
        read_back(tmp_path / "missing", backend=backend)
    assert not (tmp_path / "missing").exists()
    with pytest.raises(ValueError, match="has no values"):
        read_back(tmp_path, backend=backend)
    with pytest.raises(ValueError, match=r"resume_step=5.*has 0 values"):
        track(tmp_path, backend=backend, resume_step=5)
    with track(tmp_path, backend=backend) as tracker:
        tracker.log(0, loss=1.0)
    with pytest.raises(ValueError, match=r"resume_step=None.*has 1 values.*pass it to continue"):
        track(tmp_path, backend=backend)


def test_unknown_backend_and_missing_library(tmp_path, monkeypatch):
    for call in (track, read_back):
        with pytest.raises(ValueError, match="choose one of tensorboard, mlflow, wandb"):
            call(tmp_path, backend="comet")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        track(tmp_path)
