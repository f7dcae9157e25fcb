"""Tokens per second, beside what the read bandwidth allows (notebook 03)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from recipes_lib.core.measure import timed
from recipes_lib.report.charts.bars import Bars
from recipes_lib.report.ladder import Column, Ladder, Row, cell, ranges_of
from recipes_lib.report.style import (
    FACTOR,
    RECIPE,
    REFERENCE,
    SHARE,
    WHOLE,
    megabytes,
    milliseconds,
    three_digits,
)

Write = Callable[[int], Sequence[int]]


class Writing:
    """A text that a model writes after a fixed prompt; a call times both phases of it.

    The first token comes from the call that reads the prompt, each other one from a call of its
    own:

        prompt_seconds       write(1)
        seconds_per_token    (write(n) - write(1)) / (n - 1)
    """

    def __init__(self, build: Callable[[], Write], new_tokens: int) -> None:
        """Build what writes a row's text, and write it once."""
        self._write = build()
        self._new_tokens = new_tokens
        self.tokens = [int(token) for token in self._write(new_tokens)]  # warms up, too

    def __call__(self) -> dict[str, float]:
        """Write the text once more: seconds per token, and of the prompt."""
        # While others had their turns, the machine may have put this model's memory aside.
        self._write(1)
        prompt, _ = timed(partial(self._write, 1))
        whole, _ = timed(partial(self._write, self._new_tokens))
        per_token = (whole - prompt) / (self._new_tokens - 1)
        if per_token <= 0:  # the text is too short for this clock: its part of the whole
            per_token = whole / self._new_tokens
        return {"seconds_per_token": per_token, "prompt_seconds": prompt}


class SpeedLadder(Ladder):
    """How fast each step writes, compared with the first row of its group.

    To write a token, a model reads each of its weights once. So bytes / bandwidth is the least time
    that a token can take, and `share_of_limit` says how near a row comes. `equal_tokens` counts,
    from the first on, the tokens that are those of the first row of the group.

    Args:
        bandwidth: bytes that the device reads per second.
        rates: operations per second of matrix products by dtype; kept beside the rows.
    """

    columns = (
        Column("weight_bytes", "reads", "B", megabytes),
        Column("prompt_seconds", "prompt", "s", milliseconds),
        Column("tokens_per_second", "tokens/s", "tokens/s", three_digits),
        Column("ratio", "× as fast", "×", FACTOR),
        Column("gigabytes_per_second", "GB/s", "GB/s", three_digits),
        Column("share_of_limit", "of limit", "", SHARE),
        Column("equal_tokens", "equal tokens"),
        Column("perplexity", "perplexity", "", FACTOR),
        Column("agreement", "agreement", "", SHARE),
        Column("tokens"),
        Column("seconds_per_token", unit="s"),
    )
    clock = "seconds_per_token"
    in_groups = True
    as_fast = True

    def __init__(
        self,
        name: str,
        *,
        bandwidth: float,
        rates: Mapping[torch.dtype, float],
    ) -> None:
        """A ladder of speeds beside what reading at this `bandwidth` allows."""
        super().__init__(name)
        self.bandwidth = bandwidth
        self.facts["bandwidth"] = bandwidth
        # A JSON file knows no dtypes: "float32" and the like.
        by_name = {str(dtype).removeprefix("torch."): rate for dtype, rate in rates.items()}
        self.facts["rates"] = by_name
        self._written: dict[str, list[int]] = {}  # what the first row of each group wrote

    def climb(
        self,
        name: str,
        build: Callable[[], Write],
        *,
        new_tokens: int,
        weight_bytes: int,
        group: str = "",
    ) -> Row:
        """Say what the bandwidth allows, write the text twice, and add the row.

        Args:
            build: returns a function of a number: it writes so many tokens after a fixed prompt,
                and returns them.
            new_tokens: to write, two or more.
            weight_bytes: that a token reads: all weights but the rows of the embedding that it
                does not need.
            group: the heading above this row; its first row is what the others are compared with.
        Raises ValueError for a name that is taken, and if another number of tokens was written
        than asked for.
        """
        least = milliseconds(weight_bytes / self.bandwidth)
        # Decimal, as bandwidths are given: 135 MB at 41 GB/s can be divided in the head.
        return super().climb(
            name,
            partial(Writing, build, new_tokens),
            look=partial(self._times_and_equal_tokens, name, new_tokens, group),
            expected=f"a token reads {megabytes(weight_bytes)}, so it takes {least} or more "
            f"at {self.bandwidth / 1e9:,.0f} GB/s",
            kept=weight_bytes,
            peak=weight_bytes,
            group=group,
            weight_bytes=weight_bytes,
            tokens=new_tokens,
        )

    def _times_and_equal_tokens(
        self, name: str, new_tokens: int, group: str, turn: Writing
    ) -> dict[str, Any]:
        """Speeds of a second text, and how many of its tokens are those of the first row."""
        if len(turn.tokens) != new_tokens:
            raise ValueError(f"{name} wrote {len(turn.tokens)} tokens: let it write {new_tokens}")
        reference = self._written.get(group)
        self._written.setdefault(group, turn.tokens)
        equal = None
        if reference is not None:
            equal = equal_tokens(turn.tokens, reference)
        return turn() | {"equal_tokens": equal}

    def derive(self, row: Row, first: Row) -> None:
        """Tokens per second, and their share of what the read bandwidth allows."""
        fastest = row.seconds_per_token
        row.tokens_per_second = 1 / fastest
        if row.turns:
            slowest = 1 / row.seconds_per_token_high
            row.set_range("tokens_per_second", 1 / fastest, slowest, 1 / fastest)
        row.gigabytes_per_second = row.weight_bytes / fastest / 1e9
        row.share_of_limit = row.weight_bytes / self.bandwidth / fastest

    def set_quality(self, name: str, quality: Any) -> None:
        """Give a row of speeds the perplexity and the agreement that were measured elsewhere."""
        self[name].perplexity = quality.perplexity
        self[name].agreement = quality.agreement
        self.save()

    def chart(self) -> Any:
        """Tokens per second, each bar inside the limit of its bytes. The title says how far the
        first group has come.
        """
        rows = self.rows
        labels = []
        colors = []
        for row in rows:
            is_first = row is self.first_of(row)
            labels.append(three_digits(row.tokens_per_second))
            colors.append(REFERENCE if is_first else RECIPE)
            if not is_first:
                labels[-1] += f"  {row.ratio:.2f}×"
        speeds = Bars(
            "tokens per second, inside the limit of the bandwidth",
            [row.tokens_per_second for row in rows],
            labels,
            ranges=[ranges_of(row, "tokens_per_second") for row in rows],
            limits=[self.bandwidth / row.weight_bytes for row in rows],
            colors=colors,
            width=3.2,
        )
        columns = [speeds, Bars("of limit", labels=[SHARE(row.share_of_limit) for row in rows])]
        perplexities = [cell(row, Column("perplexity", words=FACTOR)) for row in rows]
        if any(perplexities):
            columns.append(Bars("perplexity", labels=perplexities))
        fastest = max(
            (row for row in rows if row.group == rows[0].group),
            key=lambda row: row.tokens_per_second,
        )
        change = f"{WHOLE(rows[0].tokens_per_second)} → {WHOLE(fastest.tokens_per_second)}"
        message = f"{change} tokens per second with {fastest.name}"
        return self.draw(*columns, title=message)


def equal_tokens(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """Of texts that were timed: how many tokens, from the first on, are the reference's."""
    equal = 0
    for token, other in zip(tokens, reference, strict=False):
        if token != other:
            break
        equal += 1
    return equal
