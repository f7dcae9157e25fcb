"""Experiment tracking: a run's numbers on disk, through TensorBoard, MLflow or Weights & Biases.

Problem    A loss that is only printed is gone with the terminal, and two runs cannot be compared.
Idea       One call per step hands the numbers to the tracker's own library, which appends them to
           local files:

               backend      written in the folder         a killed process loses
               tensorboard  <run>/events.out.tfevents.*   the last second
               mlflow       mlruns/                       nothing that `log` returned from
               wandb        <run>/wandb/offline-run-*     the last two seconds

           A run that is killed at step 130 and continues from the checkpoint of step 100 logs 30
           steps twice. With `resume_step=100` the newer count.
Saves      The second run that only repeats the first to see its numbers. No memory.
Costs      About a millisecond per call and the wait for a tensor on a GPU; a few seconds to start
           MLflow or W&B. TensorBoard keeps seven digits (float32).
Use when   Always, on rank 0 only. TensorBoard needs least, MLflow compares runs in one store, W&B
           uploads later (`wandb sync <folder>/<run>/wandb/offline-run-*`).
Not when   Values per token or per parameter: a tracker takes a few numbers per step. After a resume
           MLflow's page shows both values of a step, and W&B, which continues a run only online,
           two runs of a group.
In production   `TrainingArguments(report_to="tensorboard")`, or `"mlflow"`, `"wandb"`; it hides
           nothing on resume.
Source     The documentation of the three libraries.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from recipes_lib.core.checks import check_choice
from recipes_lib.core.measure.machine import require

# --- the idea: what a learner can copy ------------------------------------------------------------


def append_line(path: Path | str, step: int, **values: float) -> None:
    """Track the numbers of one step as a line of JSON. A killed process loses no earlier line."""
    with open(path, "a") as file:
        file.write(json.dumps({"step": step} | values) + "\n")


def read_lines(path: Path | str) -> dict[int, dict[str, float]]:
    """What a run has tracked: step -> its values, the newest of each step."""
    kept: dict[int, dict[str, float]] = {}
    for line in Path(path).read_text().splitlines():
        values = json.loads(line)
        step = values.pop("step")
        # A step that goes back is a resume: what was logged from it on belongs to the lost part.
        kept = {older: kept[older] for older in kept if older < step}
        kept[step] = values
    return kept


# --- the technique --------------------------------------------------------------------------------


def track(
    folder: str | Path,
    *,
    backend: str = "tensorboard",
    run_name: str = "run",
    settings: dict[str, Any] | None = None,
    resume_step: int | None = None,
) -> Tracker:
    """Start to track a run, or continue one; use the result in a `with` block.

    Args:
        folder: everything is written here; it holds any number of runs, told apart by `run_name`.
        settings: hyper-parameters, stored with the run. MLflow refuses another value on resume.
        resume_step: continue the run; the first step that is logged (again).
    """
    check_choice(LIBRARIES, backend=backend)
    path = Path(folder).expanduser().resolve() / run_name
    path.mkdir(parents=True, exist_ok=resume_step is not None)
    if settings is None:
        settings = {}
    return LIBRARIES[backend](path, settings, resume_step)


class Tracker(contextlib.AbstractContextManager):
    """A run being written. `with` closes it; after an error, MLflow and W&B record a failed run."""

    def log(self, step: int, **values: Any) -> None:
        """Track numbers, or tensors of one element. NaN is kept: it is what one looks for."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write what is held back, where a library does: before a checkpoint, for instance."""

    def close(self, *, failed: bool = False) -> None:
        """End the run."""
        raise NotImplementedError

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(failed=error is not None)


class TensorBoard(Tracker):
    """Event files in the run's folder, one per start."""

    def __init__(self, path: Path, settings: dict[str, Any], resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The reader takes files by name, and a name begins with the second of its start: a resume
        # within the same second could be read before what it goes on from.
        while list(path.glob(f"events.out.tfevents.{int(time.time())}.*")):
            time.sleep(0.05)
        # The page hides what is older than `purge_step`. Written every second, not every 120.
        self._writer = SummaryWriter(str(path), purge_step=resume_step, flush_secs=1)
        self._writer.add_text("settings", json.dumps(settings, default=str))

    def log(self, step: int, **values: Any) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()  # an event file has no place for a failure


class MLflow(Tracker):
    """A store of files, `mlruns` beside the run's folder, for all runs."""

    def __init__(self, path: Path, settings: dict[str, Any], resume_step: int | None) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # it asks for a database otherwise
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._mlflow = require("mlflow")
        self._mlflow.set_tracking_uri((path.parent / "mlruns").as_uri())
        runs = self._mlflow.MlflowClient().search_runs(["0"], f"run_name = '{path.name}'")
        run_id = None
        if resume_step is not None and runs:
            run_id = runs[0].info.run_id
        self._mlflow.start_run(run_id, run_name=path.name)
        self._mlflow.log_params(settings)

    def log(self, step: int, **values: Any) -> None:
        self._mlflow.log_metrics({name: float(value) for name, value in values.items()}, step=step)

    def close(self, *, failed: bool = False) -> None:
        status = "FAILED" if failed else "FINISHED"
        self._mlflow.end_run(status)


class WandB(Tracker):
    """Offline runs in the run's folder, one per start: W&B continues a run only online."""

    def __init__(self, path: Path, settings: dict[str, Any], resume_step: int | None) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # Written every second, not every 15.
        options = {"silent": True, "console": "off", "x_transaction_log_flush_interval": 1}
        self._run = require("wandb").init(
            dir=path,
            name=path.name,
            group=path.name,  # the starts of one run, together
            mode="offline",
            config=settings,
            settings=options,
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, **values: Any) -> None:
        # The step is one of the values: with the argument `step=`, W&B holds them all back until
        # the next step.
        self._run.log({"step": step} | {name: float(value) for name, value in values.items()})

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


LIBRARIES = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
