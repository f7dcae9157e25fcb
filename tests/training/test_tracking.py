import math
import os
import signal
import time

import pytest
import torch

from recipes_lib.training.tracking import append_line, read_lines, track
from tests.training.events import read_back


def test_tensorboard_reads_back_what_was_logged_and_keeps_runs_apart(tmp_path):
    """The mistake: a sample of the values, a NaN that is dropped, or another run's numbers."""
    loss = torch.tensor([2.5], requires_grad=True)
    with track(tmp_path) as tracker:
        tracker.log(0, loss=loss.detach(), peak_bytes=2**34 + 2**12)
        with track(tmp_path, run_name="lr-1e-3") as other:  # open at the same time
            other.log(0, loss=7)
        tracker.log(3, loss=math.nan)
    found = read_back(tmp_path)
    assert found["peak_bytes"] == [(0, 2**34 + 2**12)]
    [(first, value), (second, nan)] = found["loss"]
    assert (first, value, second) == (0, 2.5, 3) and math.isnan(nan)
    assert read_back(tmp_path, run_name="lr-1e-3") == {"loss": [(0, 7.0)]}


def test_a_resumed_log_has_each_step_once_as_the_lines_by_hand(tmp_path):
    """The mistake: two curves, or steps after the last checkpoint that were never trained."""
    for start, end in ((0, 6), (2, 4)):
        resume_step = None if start == 0 else start
        with track(tmp_path, resume_step=resume_step, settings={"lr": 1e-3}) as tracker:
            for step in range(start, end):
                tracker.log(step, loss=start + step / 4)
                append_line(tmp_path / "log.jsonl", step, loss=start + step / 4)
    by_hand = read_lines(tmp_path / "log.jsonl")
    loss = [(step, values["loss"]) for step, values in by_hand.items()]
    assert read_back(tmp_path) == {"loss": loss}
    assert [step for step, _ in loss] == [0, 1, 2, 3]
    with pytest.raises(FileExistsError):
        track(tmp_path)


def test_a_resume_within_the_same_second_is_read_last(tmp_path, monkeypatch):
    """The mistake: files are read by name, and of two that began in one second the older wins."""
    for process, start in (("9", 0), ("1", 2)):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        with track(tmp_path, resume_step=start) as tracker:
            for step in range(start, 4):
                tracker.log(step, loss=start)
    assert read_back(tmp_path)["loss"] == [(0, 0.0), (1, 0.0), (2, 2.0), (3, 2.0)]


def test_mlflow_goes_on_with_the_same_run(tmp_path, monkeypatch):
    """The mistake: a resumed run is a second one, and its failure is forgotten."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    options = {"backend": "mlflow", "settings": {"lr": 1e-3}}
    with pytest.raises(ZeroDivisionError), track(tmp_path, **options) as tracker:
        tracker.log(0, loss=2.5)
        raise ZeroDivisionError
    client = mlflow.MlflowClient()
    [run] = client.search_runs(["0"])
    assert run.info.status == "FAILED"
    with track(tmp_path, resume_step=0, **options) as tracker:
        tracker.log(0, loss=2.0)
        tracker.log(1, loss=1.0)
    [run] = client.search_runs(["0"])
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "0.001"})
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(0, 2.5), (0, 2.0), (1, 1.0)]


def test_wandb_writes_offline(tmp_path):
    """The mistake: a run without a network waits for one, or its values are lost."""
    pytest.importorskip("wandb")
    with track(tmp_path, backend="wandb", settings={"lr": 1e-3}) as tracker:
        tracker.log(0, loss=0.12345)
    [file] = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    ends = time.monotonic() + 20
    # A process of W&B writes, and on a busy machine it ends after `finish`.
    while b"0.12345" not in file.read_bytes() and time.monotonic() < ends:
        time.sleep(0.1)
    assert b"loss" in file.read_bytes() and b"0.12345" in file.read_bytes()


def test_a_killed_process_leaves_what_was_flushed(tmp_path):
    """The mistake: two minutes of values that only `close` would write."""
    # A fork, because a new interpreter would need seconds to import torch.
    child = os.fork()
    if child == 0:
        tracker = track(tmp_path)
        for step in range(5):
            tracker.log(step, loss=step / 4)
        tracker.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert read_back(tmp_path) == {"loss": [(step, step / 4) for step in range(5)]}
