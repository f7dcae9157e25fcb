"""Bytes and seconds of a training step, beside its prediction (notebooks 01 and 05)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from recipes_lib.core.measure import bytes_alive, measure, timed
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.measure.timeline import Timeline
from recipes_lib.core.model.marks import COMPILED, any_marked
from recipes_lib.core.predict import Build, Prediction, predict
from recipes_lib.report.charts.bars import Bars
from recipes_lib.report.ladder import RATIO, TIME, Column, Ladder, Row, ranges_of, same_to
from recipes_lib.report.style import RECIPE, REFERENCE, Unit, mib, percent, three_digits
from recipes_lib.report.style import TIME as TIME_COLOR

# A step may be skipped, as those of fp16 are while the loss scale is too large. An optimizer that
# keeps no states at all (plain SGD) takes this many steps to warm up.
MOST_WARM_UP_STEPS = 20
SMALL = 0.01  # of the peak: a term that changes by less is not worth a word
SAME_LOSS = 1e-3  # in nats per token: losses that differ by more are not called the same


class ReadyStep:
    """A model, its optimizer and a step that has warmed up; a call times the next one.

    Warm means that the optimizer has its states, that blocks are compiled, and that the weights are
    what they were. `alive_before` are the bytes of others.
    """

    def __init__(self, build: Build) -> None:
        """Build the step of a row of memory; take it only if states come in no shorter way."""
        self.alive_before = bytes_alive()
        self.model, self.optimizer, self._step = build()
        with _rate_of_zero(self.optimizer):
            if not _is_compiled(self.model) and machine().compute_dtype is not torch.float16:
                # In fp16 a scaler skips steps, and has to be warm.
                _make_states(self.model, self.optimizer)
            taken = 0
            while not self.optimizer.state and taken < MOST_WARM_UP_STEPS:
                self.step()
                taken += 1

    def step(self) -> float:
        """Take a step and return its loss."""
        return self._step(self.model, self.optimizer)

    def __call__(self) -> dict[str, float]:
        seconds, _ = timed(self.step)
        return {"seconds": seconds}


@contextlib.contextmanager
def _rate_of_zero(optimizer: Any) -> Iterator[None]:
    """Inside, a step of the optimizer makes its states and leaves the weights as they are."""
    groups = list(getattr(optimizer, "param_groups", []))
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(groups, rates):
            group["lr"] = rate


def _make_states(model: Any, optimizer: Any) -> None:
    """A step with gradients of zero takes a hundredth of the time of a training step."""
    # One around another one, as in backward, steps by rules of its own.
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        return
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    # Copies, as on the host, get their gradients in a backward alone.
    if not {*map(id, weights)} <= {*map(id, model.parameters())}:
        return
    for weight in weights:
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()


def _is_compiled(model: Any) -> bool:
    """The first step compiles, and that is no part of the one that is measured."""
    return isinstance(model, torch.nn.Module) and any_marked(model.modules(), COMPILED)


class MemoryLadder(Ladder):
    """How many bytes and seconds each step takes.

    `predictions` and `timelines` hold what was predicted and measured of every row that climbed.
    Compiled blocks have no timeline of their own: only the allocator knows their bytes.
    """

    columns = (
        Column("predicted_bytes", "predicted", "B", mib),
        Column("peak_bytes", "measured", "B", mib),
        Column("change", "change", "", percent),
        RATIO,
        TIME,
        Column("loss", "loss", "nats", "{:.4f}".format),
        Column("prediction_error"),
    )
    timed = ("predicted_bytes", "ratio", "seconds")  # `climb` says the prediction before

    def __init__(self, name: str) -> None:
        """A ladder of bytes and seconds, with predictions and timelines."""
        super().__init__(name)
        self.predictions: dict[str, Prediction] = {}
        self.timelines: dict[str, Timeline] = {}

    def climb(
        self,
        name: str,
        build: Build,
        *,
        group: str = "",
        after: str | None = None,
        in_turns: bool = True,
    ) -> Row:
        """Predict a step on tensors without data, take it, and add its row.

        The step warms up until its optimizer has states, then runs once under the memory account.
        What was alive before `build` is called does not count. Its seconds are a first impression:
        `take_turns` brings those that can be compared.

        Args:
            build: returns the model, its optimizer and a function `step(model, optimizer)`, which
                takes one training step and returns the loss.
            group: the heading above this row in the table.
            after: the row with which memory and loss are compared; by default the first one.
            in_turns: False for a row whose time would mislead: it gets none.
        Raises ValueError for a name that is taken.
        """
        self._check_new(name)
        if after is None and self.rows:
            after = self.rows[0].name
        predicted = predict(build)
        before = self.predictions.get(after)
        self.predictions[name] = predicted
        row = super().climb(
            name,
            partial(ReadyStep, build),
            look=partial(self._bytes_of_step, name),
            expected=f"predicted {mib(predicted.peak)}, {what_changes(before, predicted)}",
            kept=predicted.kept,
            peak=predicted.peak,
            group=group,
            in_turns=in_turns,
            predicted_bytes=predicted.peak,
        )
        if after is not None:
            print(f"  the loss is {_compared(row.loss, self[after])}")
        return row

    def _bytes_of_step(self, name: str, step: ReadyStep) -> dict[str, Any]:
        """What is measured of a step once for its row: its peak, its time and its loss."""
        losses: list[float] = []
        measured = measure(
            lambda: losses.append(step.step()),
            warmup=0,  # it is warm
            repeats=3 if machine().device == "cuda" else 0,  # on a CPU the account slows it little
            model=step.model,
            optimizer=step.optimizer,
        ).without(step.alive_before)
        if measured.timeline is not None:
            self.timelines[name] = measured.timeline
        return {
            "peak_bytes": measured.peak_bytes,
            "seconds": measured.seconds,
            "loss": losses[0],  # that of the step under the account
        }

    def _take_turns_together(self, names: Sequence[str], rounds: int) -> None:
        # The first turn of all does not count: its memory comes from the system, which fills it
        # with zeros.
        if not self._turns.rounds:
            self._turns.times_of(names[0])
        super()._take_turns_together(names, rounds)

    def derive(self, row: Row, first: Row) -> None:
        """How far the peak is from the first row's, and from its prediction."""
        if row is not first:
            row.change = row.peak_bytes / first.peak_bytes - 1
        if row.predicted_bytes is not None:
            row.prediction_error = row.predicted_bytes / row.peak_bytes - 1

    def saved(self, name: str) -> float:
        """The part of the baseline's peak that a row saves: 0.85 means 85 % less."""
        return 1 - self[name].peak_bytes / self.rows[0].peak_bytes

    def chart(self) -> Any:
        """Peaks with predictions as ticks, times with their ranges. The title says what the ladder
        has saved as a whole.
        """
        rows = self.rows
        first = rows[0]
        lowest = min(rows, key=lambda row: row.peak_bytes)
        unit = Unit(max(row.peak_bytes for row in rows))
        peaks = [unit.number(row.peak_bytes) for row in rows]
        times = [three_digits(row.seconds) if row.seconds else "" for row in rows]
        for number, row in enumerate(rows[1:], 1):
            peaks[number] += f"  ({percent(row.change)})"
            if row.seconds:
                times[number] += f"  {row.ratio:.2f}×"
        columns = [
            Bars(
                f"peak memory of tensors, {unit.name}",
                [unit.of(row.peak_bytes) for row in rows],
                peaks,
                marks=[unit.of(row.predicted_bytes) for row in rows],
                colors=[REFERENCE, *[RECIPE] * (len(rows) - 1)],
                width=2.4,
            ),
            Bars(
                "seconds per step",
                [row.seconds or 0.0 for row in rows],
                times,
                ranges=[ranges_of(row, "seconds") for row in rows],
                colors=[TIME_COLOR] * len(rows),
                width=1.5,
            ),
        ]
        change = f"{unit.number(first.peak_bytes)} → {unit.text(lowest.peak_bytes)}"
        return self.draw(*columns, title=f"{change} of peak memory with {lowest.name}")


def what_changes(before: Prediction | None, new: Prediction) -> str:
    """What is at the peak in place of what: "activations 820 → 103 MiB, gradients 0 → 513 MiB"."""
    moment = moment_of_peak(new.timeline)
    if before is None:
        return f"when {moment}"
    were = before.at_peak()
    changes = []
    for kind, size in new.at_peak().items():
        if abs(size - were[kind]) > SMALL * before.peak:
            was = mib(were[kind]).removesuffix(" MiB")
            changes.append(f"{kind} {was} → {mib(size)}")
    moves = "moves to" if moment != moment_of_peak(before.timeline) else "stays at"
    return "; ".join([f"the peak {moves}: {moment}", ", ".join(changes) or "no kind changes much"])


def moment_of_peak(timeline: Timeline) -> str:
    """For a row of memory: when the highest point comes, in words."""
    highest = timeline.highest
    for phase, begin, end in timeline.phases():
        if begin <= highest.operator <= end and phase == highest.phase:
            half = "begins" if 2 * highest.operator < begin + end else "ends"
            return f"{phase} {half}"
    return highest.phase


def _compared(value: float, reference: Row) -> str:
    """For a row of memory: whether a loss is the reference's, "that of baseline to 1e-07"."""
    difference = value - reference.loss
    if abs(difference) <= SAME_LOSS:
        return f"that of {reference.name} {same_to(abs(difference))}"
    return f"{difference:+.4f} against that of {reference.name}"
