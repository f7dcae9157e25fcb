"""What a cache of keys and values is for: the time of a token against its position in the text.

Without a cache, a step computes the whole text again, and the time grows with it. With a cache it
computes one token. Only attention reads more for a later token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from recipes_lib.core.checks import check_several, check_whole
from recipes_lib.core.measure import in_turns
from recipes_lib.core.model.decoding import CausalDecoder, require_decoder


@dataclass(frozen=True)
class PositionTime:
    """The seconds of one token that stands behind `position` others, medians."""

    position: int
    with_cache: float
    without_cache: float


def time_by_position(
    decoder: CausalDecoder, positions: Iterable[int], *, rounds: int = 3
) -> list[PositionTime]:
    """Measure one step at each of these positions, with the cache and without it, in turns.

    Which tokens these are does not matter for the time, so they are drawn. Raises ValueError for
    no position, for positions or rounds below 1, and for what is no decoder.
    """
    require_decoder(decoder)
    check_several(positions=positions)
    positions = list(positions)
    check_whole(rounds=rounds)
    if not positions:
        raise ValueError("positions is empty: give at least one")
    for position in positions:
        check_whole(position=position)
    steps = _steps(decoder, positions)
    for step in steps.values():
        step()
    seconds = in_turns(steps, rounds=rounds)
    table = []
    for position in positions:
        with_cache = statistics.median(seconds[f"with {position}"])
        without_cache = statistics.median(seconds[f"without {position}"])
        table.append(PositionTime(position, with_cache, without_cache))
    return table


def _steps(decoder: CausalDecoder, positions: list[int]) -> dict[str, Callable[[], None]]:
    longest = max(positions)
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(decoder.vocabulary, (1, longest + 1), generator=draw)  # [1, S]
    filled = decoder.new_cache(max_tokens=longest + 1)
    decoder(text, filled, last_only=True)
    again = decoder.new_cache(max_tokens=longest + 1)

    def with_cache(position: int) -> None:
        # The text before `position` is in the cache, whatever was measured before.
        filled.length = position
        decoder(text[:, position : position + 1], filled, last_only=True)

    def without_cache(position: int) -> None:
        again.truncate(0)
        decoder(text[:, : position + 1], again, last_only=True)

    steps: dict[str, Callable[[], None]] = {}
    for position in positions:
        steps[f"with {position}"] = partial(with_cache, position)
        steps[f"without {position}"] = partial(without_cache, position)
    return steps
