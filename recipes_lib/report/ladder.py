"""The table of a notebook: one row per step, predicted beside measured, saved after every row.

ladder = Ladder("01_large_models_limited_hardware", tokens=576, rates=measure_matrix_rates())
ladder.climb("baseline", baseline, predicted=plan)    # predict, measure, add a row
ladder.take_turns(rounds=5)                           # the times of these rows, in turns
ladder                                                # a table in Jupyter, text in a terminal
ladder.timelines["baseline"]                          # memory over the step that was measured
ladder.chart()                                        # a matplotlib figure
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.checks import check_several, check_whole
from recipes_lib.core.measure import Measurement, bytes_alive, measure
from recipes_lib.core.measure.machine import machine, release_memory
from recipes_lib.core.measure.operator_profile import profile_operators
from recipes_lib.core.measure.timeline import Timeline, record_timeline
from recipes_lib.core.predict.budget import Budget
from recipes_lib.core.predict.operations import step_operations
from recipes_lib.report import charts
from recipes_lib.report.ladder_text import (
    HEADER,
    cells,
    what_came,
    what_changes,
    wrapped,
)
from recipes_lib.report.rows import Rows
from recipes_lib.report.style import mib, percent
from recipes_lib.report.turns import (
    Build,
    ReadyStep,
    announce,
    groups_that_fit,
    kept_bytes,
    ratio_and_range,
    room_for_models,
    rows_that_wait,
    take_turns,
    warmed_up,
)


@dataclass(frozen=True)
class Row:
    """One step: bytes, seconds and tokens per second as measured.

    `predicted_bytes` were computed before. `seconds` are the median of `turns` steps,
    `seconds_low` and `seconds_high` the fastest and the slowest of them. `ratio` is the time over
    that of the baseline in the same round, with its range likewise. `share_of_limit` is the time
    that the `operations` of the step take at the measured rate of the device, over `seconds`.
    """

    name: str
    predicted_bytes: int
    peak_bytes: int
    seconds: float
    tokens_per_second: float | None
    loss: float | None
    group: str = ""
    seconds_low: float | None = None
    seconds_high: float | None = None
    turns: int = 0
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    operations: int | None = None
    share_of_limit: float | None = None

    @property
    def prediction_error(self) -> float:
        """Relative, positive if the prediction was too high."""
        return self.predicted_bytes / self.peak_bytes - 1


class Ladder(Rows):
    """How many bytes and seconds each step takes.

    Args:
        tokens: that every step trains on, for tokens per second.
        rates: operations per second of matrix products by dtype, for the share of the limit:
            what `core.matrix_rate.measure_matrix_rates` returns.

    `plans` and `timelines` hold the budget and the memory over time of every row that climbed,
    `profiles` the seconds by kind of operator of those that `take_turns` was asked for.
    """

    def __init__(
        self,
        name: str,
        *,
        folder: Path | None = None,
        tokens: int | None = None,
        rates: dict[torch.dtype, float] | None = None,
    ) -> None:
        super().__init__(name, folder=folder)
        self.tokens = tokens
        self.rates = {} if rates is None else rates
        if self.rates:
            self.note_rates(self.rates)
        self.plans: dict[str, Budget] = {}
        self.timelines: dict[str, Timeline] = {}
        self.profiles: dict[str, dict[str, float]] = {}
        # The steps that wait for their turns, with their models.
        self._ready: dict[str, ReadyStep] = {}
        self._baseline_seconds: list[float] = []  # of all turns so far
        self._baseline_per_token: list[float] = []  # of the rounds that `retime` was given
        self._builds: dict[str, Build] = {}
        self._dtypes: dict[str, torch.dtype | None] = {}

    # --- add a row ---

    def climb(
        self,
        name: str,
        build: Build,
        *,
        predicted: Budget,
        group: str = "",
        after: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Predict a step, measure it, and add its row.

        The step warms up until its optimizer has states, then runs once under the memory account.
        Its seconds are a first impression: `take_turns` brings those that can be compared. Until
        then the model stays alive, as long as there is room for it beside the next one. What was
        alive before `build` is called does not count in the row.

        Args:
            build: returns the model, its optimizer and a function `step(model, optimizer)`, which
                takes one training step and returns the loss.
            predicted: the budget of the step.
            group: the heading above this row in the table.
            after: the row with which budget and loss are compared; by default the first one.
            dtype: of the matrix products, for the share of the limit.
        Raises ValueError for a name that is taken, and for a row `after` that does not exist.
        """
        self._check_new(name)
        reference = self._reference(after)
        print(f"{name}: predicted {mib(predicted.peak)}")
        if predicted.dry is not None:
            print(wrapped(predicted.source))
        if reference is None:
            print(f"  the peak is when {predicted.peak_moment()}")
        elif reference.name in self.plans:
            print(wrapped(what_changes(self.plans[reference.name], predicted)))

        self._make_room(predicted)
        row = self._measure(name, build, predicted=predicted, group=group, dtype=dtype)
        self.plans[name] = predicted
        self._builds[name] = build
        self._dtypes[name] = dtype
        self.append(row)
        print(wrapped(what_came(row, baseline=self.rows[0], reference=reference)))

    def _measure(
        self, name: str, build: Build, *, predicted: Budget, group: str, dtype: torch.dtype | None
    ) -> Row:
        alive_before = bytes_alive()
        step = ReadyStep(build)
        losses = []
        measured = measure(
            lambda: losses.append(step()),
            warmup=0,  # it is warm
            repeats=_repeats(),
            model=step.model,
            optimizer=step.optimizer,
        ).without(alive_before)
        timeline = measured.timeline
        if timeline is None:  # compiled blocks have one only where they run as plain ones
            timeline = record_timeline(step, model=step.model, optimizer=step.optimizer)
            timeline = timeline.without(alive_before)
        self.timelines[name] = timeline
        operations = None
        if predicted.shape is not None:
            operations = step_operations(step.model, predicted.shape)
        self._ready[name] = step  # from here on nothing can fail: it waits for its turns
        return Row(
            name=name,
            predicted_bytes=predicted.peak,
            peak_bytes=measured.peak_bytes,
            seconds=measured.seconds,
            tokens_per_second=self._speed(measured.seconds),
            loss=losses[0],  # that of the step under the account, whatever is timed after it
            group=group,
            operations=operations,
            share_of_limit=self._share(operations, dtype, measured.seconds),
        )

    def _make_room(self, predicted: Budget) -> None:
        """Let the steps that wait go, if the next one does not fit beside their models."""
        waiting = self._waiting_bytes()
        if waiting + predicted.peak > room_for_models(waiting_bytes=waiting):
            self._ready.clear()
        release_memory()  # a model may hang in a reference cycle

    def _waiting_bytes(self) -> int:
        """What the models keep that wait for their turns."""
        return sum(kept_bytes(self.plans[name]) for name in self._ready)

    def add(
        self,
        name: str,
        measured: Measurement,
        *,
        predicted: int,
        loss: float | None = None,
        group: str = "",
    ) -> Row:
        """Append a row that was measured elsewhere, save the file and return the row.

        Raises ValueError for a name that is taken.
        """
        row = Row(
            name=name,
            predicted_bytes=int(predicted),
            peak_bytes=measured.peak_bytes,
            seconds=measured.seconds,
            tokens_per_second=measured.tokens_per_second,
            loss=loss,
            group=group,
            seconds_low=measured.seconds_low,
            seconds_high=measured.seconds_high,
        )
        return self.append(row)

    def _reference(self, after: str | None) -> Row | None:
        """The row with which a new one is compared; None if it will be the first."""
        names = [row.name for row in self.rows]
        if after is None:
            return self.rows[0] if self.rows else None
        if after not in names:
            raise ValueError(f"after={after!r}: give the name of a row that is there, of {names}")
        return self[after]

    def _speed(self, seconds: float) -> float | None:
        """Tokens per second, if somebody said how many tokens a step has."""
        return None if self.tokens is None else self.tokens / seconds

    def _share(
        self, operations: int | None, dtype: torch.dtype | None, seconds: float
    ) -> float | None:
        """The part of the device's rate of matrix products that a step reaches; None if unknown."""
        if operations is None or dtype not in self.rates:
            return None
        return operations / self.rates[dtype] / seconds

    # --- time in turns ---

    def take_turns(self, rounds: int = 5, *, profile: Sequence[str] = ()) -> None:
        """Time the rows that climbed since the last turns again, all of them in turns.

        The steps take turns, there and back: what slows the machine for a while slows all of them.
        The baseline takes part, and the others are compared with it round by round. Where their
        models do not fit together into half of the free memory, the rows are put into groups, with
        the baseline in each. A row whose build or step fails keeps its first time. The file is
        saved after every round; the models are free afterwards.

        Args:
            profile: rows of which one more step is profiled; `profiles` holds the result.
        Raises ValueError for less than one round, if no row waits for its turns, and for a row to
        profile that takes none.
        """
        check_whole(rounds=rounds)
        rows = [row.name for row in rows_that_wait(self.rows, self._builds)]
        unknown = [name for name in profile if name not in rows]
        if unknown:
            raise ValueError(f"profile={unknown}: give names of rows that take turns now: {rows}")
        baseline = self.rows[0].name
        if baseline in self._builds and baseline not in rows:
            rows.insert(0, baseline)
        plans = {name: self.plans[name] for name in rows}
        room = room_for_models(waiting_bytes=self._waiting_bytes())
        groups = groups_that_fit(plans, limit_bytes=room)
        for number, names in enumerate(groups, 1):
            announce(names, heading=f"in turns, group {number} of {len(groups)}")
            self._take_turns_together(names, rounds=rounds, profile=profile)

    def _take_turns_together(
        self, names: list[str], *, rounds: int, profile: Sequence[str]
    ) -> None:
        """The turns of one group, whose models are alive beside each other."""
        ready = {name: step for name, step in self._ready.items() if name in names}
        self._ready.clear()  # those of other groups would be in the way
        release_memory()
        steps = warmed_up({name: self._builds[name] for name in names}, ready)
        ready.clear()
        turns: list[dict[str, float]] = []
        for took in take_turns(steps, rounds=rounds):
            turns.append(took)
            self._set_times(turns, baseline=self.rows[0].name)
        for name in profile:
            if name in steps:
                self.profiles[name] = profile_operators(steps[name])
        steps.clear()
        release_memory()

    def _set_times(self, turns: list[dict[str, float]], *, baseline: str) -> None:
        """Give the rows of a group the times of its turns so far, and save."""
        if baseline in turns[-1]:
            self._baseline_seconds.append(turns[-1][baseline])
        for name in turns[-1]:
            seconds = [took[name] for took in turns if name in took]
            ratios = [
                took[name] / took[baseline] for took in turns if {name, baseline} <= took.keys()
            ]
            if name == baseline:
                seconds = self._baseline_seconds
                # What it is compared with is its own median: the range shows the noise.
                ratios = [each / statistics.median(seconds) for each in seconds]
            self._change(name, **self._times(name, seconds), **ratio_and_range(ratios))
        self.save()

    def _times(self, name: str, seconds: list[float]) -> dict[str, Any]:
        median = statistics.median(seconds)
        row = self[name]
        return {
            "seconds": median,
            "seconds_low": min(seconds),
            "seconds_high": max(seconds),
            "turns": len(seconds),
            "tokens_per_second": self._speed(median),
            "share_of_limit": self._share(row.operations, self._dtypes[name], median),
        }

    def retime(self, name: str, seconds: Sequence[float], *, tokens: int) -> None:
        """Give a row the times of its turns, where rows have steps of different numbers of tokens.

        The ratio is that of the times per token, round by round. Give the first row its times
        before the others.

        Args:
            seconds: of each round, as many as the first row has.
            tokens: of a step of this row.
        Raises ValueError for no seconds, and for another number of rounds than the first row has.
        """
        check_several(seconds=seconds)
        per_token = [each / tokens for each in seconds]
        median = statistics.median(seconds)
        if name == self.rows[0].name:
            self._baseline_per_token = per_token
            # What it is compared with is its own median: the range shows the noise.
            ratios = [each / median for each in seconds]
        else:
            rounds = len(self._baseline_per_token)
            if len(per_token) != rounds:
                raise ValueError(
                    f"{name!r} has {len(per_token)} rounds and the first row {rounds}: give the "
                    f"rows the same rounds, the first one before the others"
                )
            ratios = [mine / first for mine, first in zip(per_token, self._baseline_per_token)]
        self._change(
            name,
            seconds=median,
            seconds_low=min(seconds),
            seconds_high=max(seconds),
            turns=len(seconds),
            **ratio_and_range(ratios),
            share_of_limit=None,
            tokens_per_second=tokens / median,
        )
        self.save()

    # --- what it says ---

    def saved(self, name: str) -> float:
        """The part of the baseline's peak that a row saves: 0.85 means 85 % less."""
        return 1 - self[name].peak_bytes / self.rows[0].peak_bytes

    def line(self, name: str, *, timed: bool = True) -> str:
        """One row as a sentence: what was predicted, what came, what it changed.

        Args:
            timed: with the seconds; leave them out where the row will be timed later.
        """
        row = self[name]
        sentence = f"{name}: predicted {mib(row.predicted_bytes)}, measured {mib(row.peak_bytes)}"
        if row is not self.rows[0]:
            sentence += f" ({percent(-self.saved(name))} against the baseline)"
        if timed:
            sentence += f", {row.seconds:.2f} s per step"
        if row.loss is not None:
            sentence += f", loss {row.loss:.4f}"
        return sentence

    def table(self) -> list[list[str]]:
        """Header and rows as text cells. Memory and time are compared with the first row."""
        if not self.rows:
            return [HEADER]
        lines = [HEADER, *[cells(row, self.rows[0]) for row in self.rows]]
        # A column without any entry, as a limit that nobody measured, is left out.
        kept = [column for column in zip(*lines) if any(column[1:])]
        return [list(line) for line in zip(*kept)]

    def chart(self, *, title: str | None = None) -> Any:
        """Bars of the measured peaks with the predictions as ticks. Returns the figure.

        Without a title it says what the ladder has saved as a whole.
        """
        rows = [asdict(row) for row in self.rows]
        return charts.chart(rows, title=title)


def _repeats() -> int:
    """Steps on the clock, for a first time. On a CPU the one under the account is near enough."""
    return 3 if machine().device == "cuda" else 0
