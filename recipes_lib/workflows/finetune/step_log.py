"""The log of a run: a printed line for each step, and its numbers for the tracker."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.ranks import rank
from recipes_lib.training.tracking import Tracker, track
from recipes_lib.workflows.finetune.checkpoints import keeps_checkpoint
from recipes_lib.workflows.finetune.loop import Step
from recipes_lib.workflows.finetune.settings import MAY_CHANGE_ON_RESUME, Settings


def log_steps(steps: Iterable[Step], run: Settings) -> None:
    """Print every step, and log it to the tracker of `run.report_to`.

    On a CPU the memory account slows every operator, so it ends with the third step: AdamW has
    its states by then.
    """
    seconds: list[float] = []
    with contextlib.ExitStack() as log, contextlib.ExitStack() as account:
        tracker: Tracker | None = None
        memory = account.enter_context(PeakMemory())
        for count, step in enumerate(steps, 1):
            if tracker is None and run.report_to != "none" and rank() == 0:
                # A resumed run says only now at which step it goes on.
                tracker = log.enter_context(open_log(run, first_step=step.number))
            speed = step.tokens / step.seconds  # of text: padding does not count
            if tracker is not None:
                tracker.log(
                    step.number,
                    loss=step.loss,
                    gradient_norm=step.gradient_norm,
                    learning_rate=step.learning_rate,
                    tokens_per_second=speed,
                    peak_bytes=memory.peak,
                )
                if keeps_checkpoint(step.number, run=run):
                    tracker.flush()  # the checkpoint comes next
            seconds.append(step.seconds)
            done = f"{step.number + 1} of {run.steps} done{_time_left(seconds, step.number, run)}"
            line = f"step {step.number}: loss {step.loss:.6f}, {speed:,.0f} tokens/s, {done}"
            if not step.updated:
                line += "; it changed nothing, because gradients overflowed in fp16"
            print(line, flush=True)
            if count == 3 and machine().device == "cpu":
                account.close()


def _time_left(seconds: Sequence[float], number: int, run: Settings) -> str:
    """The time that the steps after step `number` will take: ", 0:03:00 left"."""
    steps = run.steps - number - 1
    if steps == 0:
        return ""
    # The last ones: the first steps of a process are slower.
    left = datetime.timedelta(seconds=round(steps * statistics.median(seconds[-5:])))
    return f", {left} left"


def open_log(run: Settings, *, first_step: int) -> Tracker:
    """The run's log in `<output_dir>/log`; one that is there is continued at `first_step`."""
    folder = Path(run.output_dir) / "log"
    settings = {name: str(value) for name, value in dataclasses.asdict(run).items()}
    for name in MAY_CHANGE_ON_RESUME:
        del settings[name]
    resume_step = None
    if folder.exists():
        resume_step = first_step
        del settings["steps"]  # a longer run; MLflow would refuse another value
    return track(folder, settings=settings, resume_step=resume_step, backend=run.report_to)
