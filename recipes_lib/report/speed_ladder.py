"""The ladder of a notebook about speed: tokens per second of each step, beside what memory allows.

ladder = SpeedLadder("03_optimizing_inference_speed", bandwidth=measure_read_bandwidth())
ladder.climb("generate, fp32", build, new_tokens=48, weight_bytes=538_000_000)
ladder.take_turns(rounds=5)                  # the times of these rows, in turns
ladder.set_quality("int8", quality)          # perplexity and agreement, measured elsewhere
ladder                                       # a table in Jupyter, text in a terminal
ladder.chart()                               # a matplotlib figure

`build()` returns a function `write(new_tokens)`, which writes so many tokens after a fixed prompt
and returns them. The first token comes from the call that reads the prompt; each other one from a
call of its own. So a row has two times, one for each phase:

    prompt_seconds       write(1)
    seconds_per_token    (write(n) - write(1)) / (n - 1)

To write a token, a model reads each of its weights once. So bytes / bandwidth is the least time
that a token can take, and `share_of_limit` says how near a row comes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recipes_lib.core.checks import check_number, check_whole
from recipes_lib.core.measure import timed
from recipes_lib.core.measure.machine import release_memory
from recipes_lib.report.ladder_text import wrapped
from recipes_lib.report.rows import Rows
from recipes_lib.report.speed_chart import speed_chart
from recipes_lib.report.speed_ladder_text import HEADER, cells, what_came, what_is_allowed
from recipes_lib.report.turns import (
    announce,
    ratio_and_range,
    room_for_models,
    rows_that_wait,
    take_turns,
)

Write = Callable[[int], Sequence[int]]


class PhaseTimes(NamedTuple):
    """Seconds of the call that reads the prompt, and of each token after the first."""

    prompt: float
    per_token: float


class Phases:
    """A text that is written twice on the clock: its first token alone, and all of it.

    While other models had their turns, the machine may have put this one's memory aside. So it
    reads the prompt once before the clock starts.
    """

    def __init__(self, write: Write, new_tokens: int) -> None:
        self._write = write
        self._new_tokens = new_tokens

    def __call__(self) -> None:
        """Take both times."""
        self._write(1)
        self.prompt, _ = timed(partial(self._write, 1))
        self.whole, _ = timed(partial(self._write, self._new_tokens))

    @property
    def per_token(self) -> float:
        """Seconds of each token after the first."""
        decoding = self.whole - self.prompt
        if decoding <= 0:
            # The text is too short for this clock: then each token takes its part of the whole.
            return self.whole / self._new_tokens
        return decoding / (self._new_tokens - 1)

    def times(self) -> PhaseTimes:
        """Those of the last call."""
        return PhaseTimes(self.prompt, self.per_token)


@dataclass(frozen=True)
class SpeedRow:
    """One step: how fast it writes, how much it reads for a token, and what it writes.

    `tokens` is how many were written, and `equal_tokens` how many of them, from the first on, are
    those of the first row of the group; after one that differs, greedy decoding writes another
    text. `prompt_seconds` and `seconds_per_token` are medians of `turns` runs, of the call for the
    prompt and of the calls after it; `_low` and `_high` are the lowest and the highest. `ratio` is
    how many times as fast a token is as in the first row of the group, in the same round, with its
    range likewise. `share_of_limit` is `weight_bytes` over the bandwidth, over the seconds.
    """

    name: str
    weight_bytes: int
    tokens: int
    seconds_per_token: float
    tokens_per_second: float
    gigabytes_per_second: float
    share_of_limit: float
    prompt_seconds: float
    group: str = ""
    note: str = ""
    equal_tokens: int | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    tokens_per_second_low: float | None = None
    tokens_per_second_high: float | None = None
    turns: int = 0
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    perplexity: float | None = None
    agreement: float | None = None


class SpeedLadder(Rows):
    """How fast each step writes, compared with the first row of its group.

    Args:
        bandwidth: bytes that the device reads per second.
        rates: operations per second of matrix products by dtype; kept beside the rows, for a
            roofline.
    Raises ValueError for a bandwidth that is not positive.
    """

    def __init__(
        self,
        name: str,
        *,
        bandwidth: float,
        rates: dict[torch.dtype, float] | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(name, folder=folder)
        check_number(bandwidth=bandwidth, above=0)
        self.bandwidth = bandwidth
        self.facts["bandwidth"] = bandwidth
        if rates:
            self.note_rates(rates)
        self._builds: dict[str, Callable[[], Write]] = {}
        # The functions that wait for their turns, with their models.
        self._ready: dict[str, Write] = {}
        # What the first row of each group wrote.
        self._written: dict[str, list[int]] = {}
        self._first_times: dict[str, list[PhaseTimes]] = {}  # of the first rows, in all turns

    # --- add a row ---

    def climb(
        self,
        name: str,
        build: Callable[[], Write],
        *,
        new_tokens: int,
        weight_bytes: int,
        group: str = "",
        note: str = "",
    ) -> None:
        """Say what the bandwidth allows, write the text twice, and add the row.

        The first run warms up and shows the tokens; the second is on the clock. Its times are a
        first impression: `take_turns` brings those that can be compared. Until then the model
        stays alive, as long as there is room for it beside the next one.

        Args:
            build: returns a function of a number: it writes so many tokens after a fixed prompt,
                and returns them.
            new_tokens: to write, two or more.
            weight_bytes: that a token reads: all weights but the rows of the embedding that it
                does not need.
            group: the heading above this row; its first row is what the others are compared with.
            note: a remark that is kept with the row.
        Raises ValueError for a name that is taken, for fewer than two tokens, for bytes that are no
        whole number above zero, and if another number of tokens was written than asked for, or than
        by the first row of the group.
        """
        self._check_new(name)
        check_whole(weight_bytes=weight_bytes)
        check_whole(new_tokens=new_tokens, least=2)
        print(f"{name}: {what_is_allowed(weight_bytes, self.bandwidth)}")
        self._make_room(weight_bytes)
        write = build()
        tokens = [int(token) for token in write(new_tokens)]
        self._check_tokens(name, tokens, new_tokens, group)
        phases = Phases(write, new_tokens)
        phases()
        equal = None
        if group in self._written:
            equal = equal_tokens(tokens, self._written[group])
        row = SpeedRow(
            name=name,
            weight_bytes=weight_bytes,
            tokens=new_tokens,
            equal_tokens=equal,
            group=group,
            note=note,
            prompt_seconds=phases.prompt,
            **self._speeds(weight_bytes, [phases.per_token]),
        )
        first = self._first_of(group)
        self.append(row)
        self._written.setdefault(group, tokens)
        self._builds[name] = build
        self._ready[name] = write
        print(wrapped(what_came(row, first=first)))

    def _check_tokens(self, name: str, tokens: list[int], new_tokens: int, group: str) -> None:
        """Rows are compared over the same number of tokens."""
        if len(tokens) != new_tokens:
            raise ValueError(
                f"{name} wrote {len(tokens)} tokens of {new_tokens}: let it write as many as asked "
                f"for, without a token that ends the text"
            )
        wanted = len(self._written.get(group, tokens))
        if new_tokens != wanted:
            raise ValueError(
                f"new_tokens={new_tokens}: give {wanted}, as the first row of this group has"
            )

    def _make_room(self, weight_bytes: int, *, keep: Sequence[str] = ()) -> None:
        """Let the models that wait go, but for some, if the next ones do not fit beside them."""
        waiting = self._waiting_bytes()
        if waiting + weight_bytes > room_for_models(waiting_bytes=waiting):
            self._ready = {name: self._ready[name] for name in keep if name in self._ready}
        release_memory()  # a model may hang in a reference cycle

    def _waiting_bytes(self) -> int:
        """What the models keep that wait for their turns."""
        return sum(self[name].weight_bytes for name in self._ready)

    def _first_of(self, group: str) -> SpeedRow | None:
        for row in self.rows:
            if row.group == group:
                return row
        return None

    def _speeds(self, weight_bytes: int, seconds: list[float]) -> dict[str, float]:
        """What follows from the seconds per token of one or several runs."""
        median = statistics.median(seconds)
        return {
            "seconds_per_token": median,
            "tokens_per_second": 1 / median,
            "gigabytes_per_second": weight_bytes / median / 1e9,
            "share_of_limit": weight_bytes / self.bandwidth / median,
        }

    # --- time in turns ---

    def take_turns(self, rounds: int = 5) -> None:
        """Time the rows that climbed since the last turns again, group by group, all in turns.

        The rows of a group take turns, there and back: what slows the machine for a while slows
        all of them. The first row takes part, and the others are compared with it round by round.
        Rows whose models do not fit together into half of the free memory take their turns in
        parts, with the first row in each. The file is saved after every round; the models are free
        afterwards.

        Raises ValueError for less than one round, and if no row waits for its turns.
        """
        check_whole(rounds=rounds)
        waiting = rows_that_wait(self.rows, self._builds)
        for group in dict.fromkeys(row.group for row in waiting):
            rows = [row for row in waiting if row.group == group]
            for names in self._parts(group, rows):
                announce(names)
                self._take_turns_together(names, rounds=rounds)
            for row in self.rows:
                if row.group == group:
                    self._ready.pop(row.name, None)
            self._forget_builds(group)
        release_memory()

    def _forget_builds(self, group: str) -> None:
        """A function that builds a row may hold its model. That of the first row is used again."""
        for row in self.rows:
            if row.group == group and row.turns > 0 and row != self._first_of(group):
                self._builds.pop(row.name, None)

    def _parts(self, group: str, rows: list[SpeedRow]) -> list[list[str]]:
        """The rows of a group in parts that fit into memory, each with the first row in front."""
        first = self._first_of(group)
        room = room_for_models(waiting_bytes=self._waiting_bytes()) - first.weight_bytes
        parts = [[first.name]]
        used = 0
        for row in rows:
            if row is first:
                continue
            if used + row.weight_bytes > room and len(parts[-1]) > 1:
                parts.append([first.name])
                used = 0
            parts[-1].append(row.name)
            used += row.weight_bytes
        return parts

    def _take_turns_together(self, names: list[str], *, rounds: int) -> None:
        """The turns of rows whose models are alive beside each other."""
        missing = [name for name in names if name not in self._ready]
        self._make_room(sum(self[name].weight_bytes for name in missing), keep=names)
        for name in missing:
            self._ready[name] = self._builds[name]()
            self._ready[name](self[name].tokens)  # warms up
        steps = {name: Phases(self._ready[name], self[name].tokens) for name in names}
        turns: list[dict[str, PhaseTimes]] = []
        for took in take_turns(dict(steps), rounds=rounds):
            turns.append({name: steps[name].times() for name in took})
            self._set_times(turns, first=names[0])

    def _set_times(self, turns: list[dict[str, PhaseTimes]], *, first: str) -> None:
        """Give the rows the times of their turns so far, and save."""
        if first in turns[-1]:
            self._first_times.setdefault(first, []).append(turns[-1][first])
        for name in turns[-1]:
            times = [took[name] for took in turns if name in took]
            together = [took for took in turns if {name, first} <= took.keys()]
            ratios = [took[first].per_token / took[name].per_token for took in together]
            if name == first:
                times = self._first_times[first]
                # What it is compared with is its own median: the range shows the noise.
                median = statistics.median(each.per_token for each in times)
                ratios = [median / each.per_token for each in times]
            self._change(name, **self._times(name, times), **ratio_and_range(ratios))
        self.save()

    def _times(self, name: str, times: list[PhaseTimes]) -> dict[str, Any]:
        each = [took.per_token for took in times]
        return {
            **self._speeds(self[name].weight_bytes, each),
            "prompt_seconds": statistics.median(took.prompt for took in times),
            "seconds_low": min(each),
            "seconds_high": max(each),
            "tokens_per_second_low": 1 / max(each),
            "tokens_per_second_high": 1 / min(each),
            "turns": len(each),
        }

    # --- quality ---

    def set_quality(self, name: str, quality: Any) -> None:
        """Give a row the perplexity and the agreement that `core.quality` measured.

        Raises KeyError if there is no such row.
        """
        self._change(name, perplexity=quality.perplexity, agreement=quality.agreement)
        self.save()

    # --- what it says ---

    def line(self, name: str) -> str:
        """One row as a sentence."""
        row = self[name]
        return f"{name}: {what_came(row, first=self._compared_with(row))}"

    def table(self) -> list[list[str]]:
        """Header and rows as text cells. Each row is compared with the first of its group."""
        rows = [cells(row, first=self._compared_with(row)) for row in self.rows]
        return [HEADER, *rows]

    def _compared_with(self, row: SpeedRow) -> SpeedRow | None:
        """The first row of the group; None for that row itself."""
        first = self._first_of(row.group)
        if first is row:
            return None
        return first

    def chart(self, *, title: str | None = None) -> Any:
        """Bars of tokens per second inside the limit of the bandwidth. Returns the figure.

        Without a title it says how far the first group has come.
        """
        return speed_chart([asdict(row) for row in self.rows], title=title)


def equal_tokens(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """How many tokens, from the first on, are those of the reference."""
    count = 0
    for token, other in zip(tokens, reference, strict=False):
        if token != other:
            break
        count += 1
    return count
