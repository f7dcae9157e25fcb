"""The three libraries behind `track`, each with the same five methods.

    points()   all that the run has, also what a later resume has replaced
    start()    begin writing: a new run, or the continued one
    write()    the numbers of one step
    flush()    return when they outlive this process
    close()    end the run

Each library is imported when its class is made, inside `only_in`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest import mock

from recipes_lib.core.measure.machine import require


class Point(NamedTuple):
    """One logged number. The time comes first: sorted, points are in the order of logging."""

    time: float
    step: int
    name: str
    value: float


class Backend(Protocol):
    """What a tracker asks of a library. `path` is the run's folder, its name the run's name."""

    def __init__(self, path: Path) -> None: ...

    def points(self) -> list[Point]: ...

    def start(self, settings: dict[str, Any], resume_step: int | None) -> None: ...

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self, *, failed: bool) -> None: ...


@contextlib.contextmanager
def only_in(path: Path) -> Iterator[None]:
    """Inside, the libraries write below `path` only, or beside it, and send nothing."""
    environment = {
        "WANDB_CACHE_DIR": f"{path}/wandb/cache",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow asks for a database otherwise
    }
    with mock.patch.dict(os.environ, environment):  # the caller's environment returns
        yield


class TensorBoard:
    """Event files in the run's folder, one per start."""

    def __init__(self, path: Path) -> None:
        require("tensorboard")
        self._path = path

    def points(self) -> list[Point]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        if not self._path.exists():
            return []
        # All values, not a sample. TensorBoard would drop what a resume replaces, with a warning.
        events = EventAccumulator(
            str(self._path), size_guidance={"scalars": 0}, purge_orphaned_data=False
        )
        events.Reload()
        points = []
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                points.append(Point(event.wall_time, event.step, name, event.value))
        return points

    def start(self, settings: dict[str, Any], resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The page hides what is older than `purge_step`. Written every second, not every 120.
        self._writer = SummaryWriter(str(self._path), purge_step=resume_step, flush_secs=1)
        self._writer.add_text("settings", json.dumps(settings, default=str))

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()  # an event file has no place for a failure


class MLflow:
    """A store of files, `mlruns` beside the run's folder, for all runs."""

    def __init__(self, path: Path) -> None:
        self._mlflow = require("mlflow")
        self._path = path
        # For a store of files mlflow-skinny is enough; a database needs sqlalchemy and alembic.
        store = (path.parent / "mlruns").as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=store)
        runs = self._client.search_runs(["0"], f"attributes.run_name = '{path.name}'")
        self._run = None
        if runs:
            self._run = runs[0]

    def points(self) -> list[Point]:
        if self._run is None:
            return []
        points = []
        for name in self._run.data.metrics:
            for metric in self._client.get_metric_history(self._run.info.run_id, name):
                points.append(Point(metric.timestamp, metric.step, metric.key, metric.value))
        return points

    def start(self, settings: dict[str, Any], resume_step: int | None) -> None:
        if self._run is None:
            self._run = self._client.create_run("0", run_name=self._path.name)
        self._run_id = self._run.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        for name, value in settings.items():
            self._client.log_param(self._run_id, name, value)

    def write(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = []
        for name, value in values.items():
            metrics.append(self._mlflow.entities.Metric(name, value, now, step))
        self._client.log_batch(self._run_id, metrics)

    def flush(self) -> None:
        """Nothing to wait for: every call of `write` returns when the file is written."""

    def close(self, *, failed: bool) -> None:
        status = "FAILED" if failed else "FINISHED"
        self._client.set_terminated(self._run_id, status)


class WandB:
    """Offline runs in the run's folder, one per start: W&B continues a run only online."""

    def __init__(self, path: Path) -> None:
        self._wandb = require("wandb")
        self._path = path

    def points(self) -> list[Point]:
        points = []
        for file in self._path.glob("wandb/offline-run-*/*.wandb"):
            for record in self._records(file):
                if "history" in record:
                    points += self._points_of(record["history"]["item"])
        return points

    @staticmethod
    def _records(file: Path) -> list[dict[str, Any]]:
        # The library has no reader to import, only this command.
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        text = subprocess.check_output(command, text=True)
        return [json.loads(line) for line in text.splitlines()]

    @staticmethod
    def _points_of(item: dict[str, Any]) -> list[Point]:
        points = []
        for name, value in item.items():
            if name != "step" and not name.startswith("_"):  # W&B's own begin with _
                points.append(Point(item["_timestamp"], item["step"], name, float(value)))
        return points

    def start(self, settings: dict[str, Any], resume_step: int | None) -> None:
        # Without the folder wandb writes to the system's temporary one.
        self._path.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            dir=self._path,
            name=self._path.name,
            group=self._path.name,  # the starts of one run, together
            mode="offline",
            config=settings,
            settings={
                "silent": True,
                "console": "off",
                "x_disable_stats": True,
                "reinit": "create_new",  # a run of another name may be open
                "x_transaction_log_flush_interval": 1,  # seconds, not 15
            },
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, float]) -> None:
        # The step is one of the values: with the argument `step=`, W&B holds them all back until
        # the next step.
        self._run.log({"step": step} | values)

    def flush(self) -> None:
        time.sleep(2)  # no call flushes: wait until its own interval of one second has passed

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


BACKENDS: dict[str, type[Backend]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
