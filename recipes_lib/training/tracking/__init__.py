"""Experiment tracking: a run's numbers on disk, through TensorBoard, MLflow or Weights & Biases.

Problem    A loss that is only printed is gone with the terminal, and two runs cannot be compared.
Idea       One call per step hands the numbers to the tracker's own library, which appends them to
           local files:

               backend      written in the folder         a killed process loses
               tensorboard  <run>/events.out.tfevents.*   the last second
               mlflow       mlruns/                       nothing that `log` returned from
               wandb        <run>/wandb/offline-run-*     the last two seconds

           A run that is killed at step 130 and continues from the checkpoint of step 100 logs 30
           steps twice. With `resume_step=100` the newer count: once a step is logged again, all
           older values from it on go.
Saves      The second run that only repeats the first to see its numbers. No memory.
Costs      About a millisecond per call and the wait for a tensor on a GPU; a few seconds to start
           MLflow or W&B. TensorBoard keeps seven digits (float32). After a resume its page hides
           the replaced values, and that of MLflow shows both. W&B continues a run only online, so
           it shows two runs of a group.
Use when   Always, on rank 0 only. TensorBoard needs least, MLflow compares runs in one store, W&B
           uploads later (`wandb sync <folder>/<run>/wandb/offline-run-*`).
Not when   Values per token or per parameter: a tracker takes a few numbers per step.
In production   `TrainingArguments(report_to="tensorboard")`, or `"mlflow"`, `"wandb"`; it hides
           nothing on resume.
Source     The documentation of the three libraries; the event file is a sequence of TFRecords.

backends  the three libraries behind it, each with the same methods
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from typing import Any

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.training.tracking.backends import BACKENDS, Backend, Point, only_in

# --- the idea: what a learner can copy ------------------------------------------------------------


def append_line(path: Path | str, step: int, **values: float) -> None:
    """Append the numbers of one step as a line of JSON. A killed process loses no earlier line."""
    with open(path, "a") as file:
        file.write(json.dumps({"step": step} | values) + "\n")


def read_lines(path: Path | str) -> dict[int, dict[str, float]]:
    """Step -> its values, the newest of each step."""
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
    """Start a run, or continue one; use the result in a `with` block.

    Args:
        folder: everything is written here; it holds any number of runs, told apart by `run_name`.
        settings: hyper-parameters, stored with the run. MLflow refuses another value on resume.
        resume_step: continue the run; the first step that may be logged (again).
    Raises ValueError for another backend, a folder that is a file, a name with other characters
    than letters, digits and _ . -, a run that has values without `resume_step`, and `resume_step`
    for one that has none; ImportError without the library.
    """
    continues = resume_step is not None
    if continues:
        check_whole(least=0, resume_step=resume_step)
    path = _checked_path(folder, backend, run_name, must_exist=continues)
    with only_in(path):
        writer = BACKENDS[backend](path)
        values = len(writer.points())
        if continues != (values > 0):
            raise ValueError(
                f"resume_step={resume_step}, {backend} run {run_name!r} in {folder} has {values} "
                f"values: pass it to continue a run, not to begin one"
            )
        if settings is None:
            settings = {}
        writer.start(settings, resume_step)
    first_step = 0
    if resume_step is not None:
        first_step = resume_step
    return Tracker(writer, first_step=first_step)


def read_back(
    folder: str | Path, *, backend: str, run_name: str = "run"
) -> dict[str, list[tuple[int, float]]]:
    """What the library's own reader finds: name -> (step, value), the newest of each step.

    Raises as `track` does.
    """
    path = _checked_path(folder, backend, run_name, must_exist=True)
    with only_in(path):
        points = BACKENDS[backend](path).points()
    if not points:
        raise ValueError(
            f"{backend} run {run_name!r} in {folder} has no values: "
            f"check folder, backend and run_name"
        )
    return _newest(points)


def _newest(points: Iterable[Point]) -> dict[str, list[tuple[int, float]]]:
    """As `read_lines`, for values that come one by one."""
    kept: dict[str, dict[int, float]] = {}
    last = 0
    for point in sorted(points):  # in the order of time
        if point.step < last:  # the run was resumed here
            for name, values in kept.items():
                kept[name] = {step: values[step] for step in values if step < point.step}
        kept.setdefault(point.name, {})[point.step] = point.value
        last = point.step
    return {name: list(values.items()) for name, values in kept.items() if values}


class Tracker(contextlib.AbstractContextManager):
    """A run being written. `with` closes it; after an error, MLflow and W&B record a failed run."""

    def __init__(self, backend: Backend, *, first_step: int) -> None:
        self._backend = backend
        self._step = first_step  # the lowest one that may be logged
        self._open = True

    def log(self, step: int, **values: float) -> None:
        """Log numbers, or tensors of one element. NaN is kept: it is what one looks for.

        Raises ValueError for no value or another value, for a step below the last one, and after
        `close`; a name begins with a letter and has only letters, digits and _ . / -.
        """
        if not self._open or not values:
            raise ValueError(
                f"log({step}): the tracker is closed, or there is no value such as loss=2.5"
            )
        whole = isinstance(step, Integral) and not isinstance(step, bool)
        if not whole or step < self._step:
            raise ValueError(
                f"step {step}: steps are whole and never go back; this one is {self._step} or more"
            )
        _check_names(values)
        numbers = _as_numbers(values)  # before anything is written: a refused call leaves nothing
        self._step = int(step)
        self._backend.write(self._step, numbers)

    def flush(self) -> None:
        """Return when all that was logged outlives this process."""
        self._backend.flush()

    def close(self, *, failed: bool = False) -> None:
        """End the run; a second call does nothing."""
        if self._open:
            self._open = False
            self._backend.close(failed=failed)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(failed=error is not None)


def _as_numbers(values: dict[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in values.items():
        try:
            if hasattr(value, "item"):  # a tensor or a NumPy number; waits for the GPU
                value = value.item()
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name}: give one number, such as loss.mean(); {error}") from error
    return numbers


# --- guards ---------------------------------------------------------------------------------------


def _check_names(values: Iterable[str]) -> None:
    wrong = [name for name in values if not re.fullmatch(r"[^\W\d_][\w./-]*", name)]
    if wrong:
        raise ValueError(
            f"names {wrong}: begin with a letter, go on with letters, digits and _ . / -"
        )


def _checked_path(folder: str | Path, backend: str, run_name: str, *, must_exist: bool) -> Path:
    """The run's own folder, absolute: a library may change or read the working directory."""
    check_choice(BACKENDS, backend=backend)
    if not re.fullmatch(r"\w[\w.-]*", run_name):
        raise ValueError(f"run_name={run_name!r}: letters, digits and _ . - only")
    parent = Path(folder).expanduser().resolve()
    is_file = parent.exists() and not parent.is_dir()
    if is_file or (must_exist and not parent.exists()):
        raise ValueError(f"{folder} is no folder")
    return parent / run_name


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_file_bytes(*, scalars: int, steps: int, tag_length: int = 15) -> int:
    """Bytes of the TensorBoard file of steps 0 to `steps - 1`.

    Without header and settings, which are a few hundred.
    """
    check_whole(scalars=scalars, steps=steps, tag_length=tag_length, least=0)
    frame = 16  # a TFRecord's length and two checksums
    wall_time = 9
    value = 5  # float32 and its key
    wrapping = 6  # keys and lengths of what holds tag and value
    record = frame + wall_time + tag_length + value + wrapping

    # The step is a varint, seven bits per byte, behind a byte for its key. A step of 0 is left out.
    step_bytes = 0
    for step in range(1, steps):
        step_bytes += 1 + (step.bit_length() + 6) // 7
    return scalars * (steps * record + step_bytes)
