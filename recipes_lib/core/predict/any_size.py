"""A step of any depth from a few shallow ones: bytes at each moment are affine in the blocks.

    def build_of(layers):
        ...                                        # gives `build` of core.predict
    step = any_size(build_of, layers=(2, 3))       # three shallow dry steps
    step.peak(layers=32)                           # at once

A block more adds the same bytes at the same moment, wherever blocks are alike. The *peak* is not
affine: it is the largest of all moments, and with more blocks another moment may be the largest. So
each moment is followed by itself. The k-th operator of a phase is the same moment in all depths, as
long as it lies in front of the blocks or in the first of them; and the k-th from the end, if it
lies in the last or behind:

    2 blocks   ####aaaaAAAA####            from the beginning    ####aaaa
    3 blocks   ####aaaabbbbAAAA####        from the end              AAAA####

Which ones these are is seen at a third depth: their bytes lie on a line. What is in the middle of a
phase lies between both ends, and is never more than both. Blocks of several kinds repeat with a
period: take numbers of layers that are a period apart, and the wanted one a multiple of it away.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.measure.dry_run import out_of_the_collectors_sight
from recipes_lib.core.measure.timeline import KINDS, Timeline
from recipes_lib.core.predict import Build, Card, predict

NOTHING = 1024  # bytes: a number or two that a library makes once, and keeps


@dataclass(frozen=True)
class AnySize:
    """The moments of a step at two depths: bytes [moments, kinds] of each."""

    layers: tuple[int, int]
    few: torch.Tensor
    more: torch.Tensor

    def at(self, *, layers: int) -> dict[str, int]:
        """What the peak of a step with so many blocks consists of, by kind."""
        few, more = self.layers
        steps = (layers - few) / (more - few)
        bytes_at = self.few + steps * (self.more - self.few)  # [moments, kinds]
        highest = int(bytes_at.sum(1).argmax())
        return dict(zip(KINDS, bytes_at[highest].round().long().tolist(), strict=True))

    def peak(self, *, layers: int) -> int:
        """Bytes at the highest moment of a step with so many blocks."""
        return sum(self.at(layers=layers).values())


def any_size(
    build_of: Callable[..., Build],
    *,
    layers: tuple[int, int],
    key: Any = None,
    card: Card | None = None,
    ranks: int = 1,
) -> AnySize:
    """Dry steps at both depths and at a third, and what they say of all others.

    Args:
        build_of: takes the number of `layers`.
        key: what the step is, in anything that JSON can write (a configuration, the names of
            recipes). With it the result is kept on disk.
        card: a GPU that may not be there, whose kernels are chosen.
        ranks: how many share the step.
    Raises ValueError where steps of two depths have other phases.
    """
    if key is None:
        return _from_dry_steps(build_of, layers, card, ranks)
    path = _file_of_result([key, card and card.capability, ranks, layers])
    if path.exists():
        kept = json.loads(path.read_text())
        few, more = (torch.tensor(kept[name], dtype=torch.float64) for name in ("few", "more"))
        return AnySize(layers, few, more)
    found = _from_dry_steps(build_of, layers, card, ranks)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"few": found.few.long().tolist(), "more": found.more.long().tolist()}
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(content))
    os.replace(scratch, path)
    return found


def _from_dry_steps(
    build_of: Callable[..., Build], layers: tuple[int, int], card: Card | None, ranks: int
) -> AnySize:
    """The moments of both depths that lie on a line with those of a third."""
    few, more = layers
    depths = []
    with out_of_the_collectors_sight():  # once for all steps, each of which would look again
        for depth in (few, more, 2 * more - few):
            build = build_of(layers=depth)
            predicted = predict(build, card=card, allocator=False, ranks=ranks)
            depths.append(_phases_of(predicted.timeline))
    if len({len(phases) for phases in depths}) > 1:
        raise ValueError("steps of other depths have other phases: predict the wanted size itself")
    of_few, of_more = [], []
    for tables in zip(*depths, strict=True):  # three of [operators, kinds]
        common = min(len(table) for table in tables)
        for place in (slice(None, common), slice(-common, None)):
            first, second, third = (table[place] for table in tables)
            bend = third - 2 * second + first
            on_a_line = (bend.abs() <= NOTHING).all(1)  # [common]
            of_few.append(first[on_a_line])
            of_more.append(second[on_a_line])
    return AnySize(layers, torch.cat(of_few), torch.cat(of_more))


def _phases_of(timeline: Timeline) -> list[torch.Tensor]:
    """The phases of a shallow step, as bytes [operators, kinds].

    What a loop does between backward and step is apart: clipping has operators for each weight, so
    behind it the k-th operator from the end would be another moment at each depth.
    """
    table = _bytes_by_operator(timeline)
    parts = []
    for _, begin, end in timeline.phases():
        phase = table[begin : end + 1]
        of_backward = phase[:, [KINDS.index("gradients"), KINDS.index("activations")]]
        changes = of_backward.diff(dim=0).any(1).nonzero()
        border = int(changes[-1]) + 2 if len(changes) else 0
        parts += [phase[:border], phase[border:]]
    return parts


def _bytes_by_operator(timeline: Timeline) -> torch.Tensor:
    """Bytes of each kind in a shallow step after each operator: [operators, kinds]."""
    numbers = torch.tensor([point.operator for point in timeline.points])
    values = torch.tensor([tuple(point.bytes.values()) for point in timeline.points])  # as KINDS
    last_change = torch.searchsorted(numbers, torch.arange(int(numbers[-1]) + 1), right=True) - 1
    return values.double()[last_change]


# --- kept on disk ---------------------------------------------------------------------------------


def _file_of_result(key: Any) -> Path:
    """The file of `any_size`'s result: another one for other code, libraries and recipes."""
    parts = [json.dumps(key, sort_keys=True, default=str), _digest_of_code()]
    parts += [metadata.version(name) for name in ("torch", "transformers", "peft")]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "llm-training-recipes" / "predictions" / f"{digest}.json"


@functools.cache
def _digest_of_code() -> str:
    """A digest of this package's sources, by which a result of `any_size` is found again."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
