"""Experiment tracking: the numbers of a training run on disk, through TensorBoard, MLflow or Weights & Biases.

Problem    A loss that is only printed is gone with the terminal, and two runs cannot be compared.
Idea       One call per step hands the numbers to the tracker's own library, which appends them to local files:

               backend      written in the folder         a killed process loses
               tensorboard  <run>/events.out.tfevents.*   the last second
               mlflow       mlruns/                       nothing that `log` returned from
               wandb        <run>/wandb/offline-run-*     the last two seconds

           A run that is killed at step 130 and continues from the checkpoint of step 100 logs 30 steps twice.
           With `resume_step=100` the newer count: once a step is logged again, all older values from it on go.
Saves      The second run that only repeats the first to see its numbers. No memory.
Costs      About a millisecond per call and the wait for a tensor on a GPU; a few seconds to start MLflow or W&B.
           TensorBoard keeps seven digits (float32). On resume its page hides what is replaced; those of MLflow and
           W&B show both, W&B as two runs of a group: it continues a run only online.
Use when   Always, on rank 0 only. TensorBoard needs least, MLflow compares runs in one store, W&B uploads later
           (`wandb sync <folder>/<run>/wandb/offline-run-*`).
Not when   Values per token or per parameter: a tracker takes a few numbers per step.
In production   `TrainingArguments(report_to="tensorboard")`, or `"mlflow"`, `"wandb"`; it hides nothing on resume.
Source     The documentation of the three libraries; the event file is a sequence of TFRecords.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from recipes_lib.core.machine import require


def track(
    folder: str | Path,
    *,
    backend: str = "tensorboard",
    run_name: str = "run",
    settings: dict[str, Any] | None = None,
    resume_step: int | None = None,
) -> Tracker:
    """Start a run, or continue one; use the result in a `with` block.

    Args:
        folder: everything is written here; it holds any number of runs, told apart by `run_name`.
        settings: hyper-parameters, stored with the run. MLflow refuses to change one when the run continues.
        resume_step: continue the run; the first step that may be logged (again).
    Raises ValueError for another backend, a folder that is a file, a name with other than letters, digits and _ . -,
    a run that has values without `resume_step` and the reverse; ImportError without the library.
    """
    with _run(folder, backend, run_name, new=resume_step is None) as (rows, start):
        if bool(rows) != (resume_step is not None):
            state = f"{backend} run {run_name!r} in {folder} has {len(rows)} values"
            raise ValueError(
                f"resume_step={resume_step}, {state}: pass it to continue a run, not to begin one"
            )
        return Tracker(resume_step or 0, *start(settings or {}, resume_step))


def read_back(
    folder: str | Path, *, backend: str, run_name: str = "run"
) -> dict[str, list[tuple[int, float]]]:
    """What the library's own reader finds: name -> (step, value), the newest of each step. Raises as `track` does."""
    with _run(folder, backend, run_name, new=False) as (rows, _):
        if not rows:
            raise ValueError(
                f"{backend} run {run_name!r} in {folder} has no values: check the three"
            )
    last, kept = 0, {}
    for _, step, name, value in sorted(rows):
        if step < last:  # the run was resumed here
            kept = {
                old: {s: v for s, v in values.items() if s < step} for old, values in kept.items()
            }
        kept.setdefault(name, {})[step], last = value, step
    return {name: list(values.items()) for name, values in kept.items() if values}


def estimate_tracking(*, scalars: int, steps: int, tag_length: int = 15) -> int:
    """Bytes of the TensorBoard file of steps 0 to `steps - 1`, without header and settings (a few hundred)."""
    record = (
        16 + 9 + tag_length + 5 + 6
    )  # length and checksums, time, name, float32, what wraps the two
    varints = sum(
        1 + (step.bit_length() + 6) // 7 for step in range(1, steps)
    )  # a step of 0 is left out
    return scalars * (steps * record + varints)


class Tracker(contextlib.AbstractContextManager):
    """A run being written. `with` closes it, and marks it as failed (MLflow, W&B) after an error. `flush()` returns
    when all that was logged outlives this process; W&B has no such call, so it waits two seconds."""

    def __init__(self, first_step: int, write: Callable, flush: Callable, close: Callable):
        self._step, self._write, self.flush, self._close = first_step, write, flush, close
        self._open = True

    def log(self, step: int, **values: float) -> None:
        """Log numbers, or tensors of one element. NaN is kept: it is what one looks for.

        Raises ValueError for no value or another value, for a step below the last one, and after `close`; a name
        begins with a letter and has only letters, digits and _ . / -.
        """
        if not self._open or not values:
            raise ValueError(
                f"log({step}): the tracker is closed, or there is no value such as loss=2.5"
            )
        if int(step) != step or step < self._step:
            raise ValueError(
                f"step {step}: steps are whole and never go back; this one is {self._step} or more"
            )
        if wrong := [name for name in values if not re.fullmatch(r"[^\W\d_][\w./-]*", name)]:
            raise ValueError(
                f"names {wrong}: begin with a letter, go on with letters, digits and _ . / -"
            )
        try:
            numbers = {
                name: float(v.item() if hasattr(v, "item") else v) for name, v in values.items()
            }
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{', '.join(values)}: each is one number, such as loss.mean(); {error}"
            ) from error
        self._step = int(step)
        self._write(self._step, numbers)

    def close(self, *, failed: bool = False) -> None:
        """End the run; a second call does nothing."""
        if self._open:
            self._open = False
            self._close(failed)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(failed=error is not None)


@contextlib.contextmanager
def _run(
    folder: str | Path, backend: str, run_name: str, *, new: bool
) -> Iterator[tuple[list, Callable]]:
    """All (time, step, name, value) of a run, and what starts it. Inside, libraries write only there, send nothing."""
    backends = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}
    if backend not in backends:
        raise ValueError(f"backend={backend!r}: choose one of {', '.join(backends)}")
    if not re.fullmatch(r"\w[\w.-]*", run_name):
        raise ValueError(f"run_name={run_name!r}: letters, digits and _ . - only")
    path = Path(folder).expanduser().resolve() / run_name
    if not path.parent.is_dir() and (path.parent.exists() or not new):
        raise ValueError(f"{folder} is no folder")
    ours = {"WANDB_CACHE_DIR": f"{path}/wandb/cache", "WANDB_ERROR_REPORTING": "false"}
    ours |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    with mock.patch.dict(os.environ, ours):
        yield backends[backend](path, require(backend))


def _tensorboard(path: Path, _: Any) -> tuple[list, Callable]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    # All values, not a sample; and those that a resume drops, because TensorBoard would print a warning.
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    names = events.Reload().Tags()["scalars"] if path.exists() else []

    def start(
        settings: dict[str, Any], resume_step: int | None
    ) -> tuple[Callable, Callable, Callable]:
        writer = SummaryWriter(str(path), purge_step=resume_step, flush_secs=1)  # not 120
        writer.add_text("settings", json.dumps(settings, default=str))

        def write(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return write, writer.flush, lambda failed: writer.close()

    return [
        (e.wall_time, e.step, name, e.value) for name in names for e in events.Scalars(name)
    ], start


def _mlflow(path: Path, mlflow: Any) -> tuple[list, Callable]:
    # A store of files needs no package beside mlflow-skinny; a database needs sqlalchemy and alembic.
    client = mlflow.MlflowClient(tracking_uri=(path.parent / "mlruns").as_uri())
    run = next(iter(client.search_runs(["0"], f"attributes.run_name = '{path.name}'")), None)
    points = (
        [p for name in run.data.metrics for p in client.get_metric_history(run.info.run_id, name)]
        if run
        else []
    )

    def start(
        settings: dict[str, Any], resume_step: int | None
    ) -> tuple[Callable, Callable, Callable]:
        run_id = (run or client.create_run("0", run_name=path.name)).info.run_id
        client.update_run(run_id, status="RUNNING")
        for name, value in settings.items():
            client.log_param(run_id, name, value)

        def write(step: int, values: dict[str, float]) -> None:
            now, metric = int(time.time() * 1000), mlflow.entities.Metric
            client.log_batch(
                run_id, [metric(name, value, now, step) for name, value in values.items()]
            )

        return (
            write,
            lambda: None,
            lambda failed: client.set_terminated(run_id, "FAILED" if failed else "FINISHED"),
        )

    return [(point.timestamp, point.step, point.key, point.value) for point in points], start


def _wandb(path: Path, wandb: Any) -> tuple[list, Callable]:
    items = []
    for file in path.glob("wandb/offline-run-*/*.wandb"):
        text = subprocess.check_output(
            [sys.executable, "-m", "wandb", "leet", "inspect", "--json", file], text=True
        )
        items += [
            record["history"]["item"]
            for record in map(json.loads, text.splitlines())
            if "history" in record
        ]

    def start(settings: dict[str, Any], _: int | None) -> tuple[Callable, Callable, Callable]:
        path.mkdir(
            parents=True, exist_ok=True
        )  # without it wandb writes to the system's temporary folder
        quiet = {"silent": True, "console": "off", "x_disable_stats": True}
        quiet |= {
            "reinit": "create_new",
            "x_transaction_log_flush_interval": 1,
        }  # no run still open; seconds, not 15
        run = wandb.init(
            dir=path,
            name=path.name,
            group=path.name,
            mode="offline",
            config=settings,
            settings=quiet,
        )
        run.define_metric("*", step_metric="step")
        return (
            lambda step, values: run.log(
                {"step": step} | values
            ),  # step=step would hold it back until the next step
            lambda: time.sleep(2),  # no call flushes: wait until it has happened
            lambda failed: run.finish(exit_code=int(failed)),
        )

    rows = [
        (i["_timestamp"], i["step"], n, float(i[n]))
        for i in items
        for n in i
        if n != "step" and n[0] != "_"
    ]
    return rows, start
