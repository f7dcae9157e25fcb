"""A step of any size from a few small ones: bytes at each moment are affine in the sizes.

    def build_of(layers, tokens):
        ...                                        # gives `build` of core.predict
    step = any_size(build_of, layers=(2, 3), tokens=(256, 512))      # four small dry steps
    step.peak(layers=32, tokens=8192)                                # at once

A block more adds the same bytes at the same moment, wherever blocks are alike, and so does a row or
a token more where no mask grows with their square. The *peak* is not affine: it is the largest of
all moments, and with more blocks another moment may be the largest.

    phase of few blocks     ########........########        the k-th operator from the beginning,
    phase of more blocks    ########................########     and the k-th from the end,
                            from the start    from the end       are the same moments in both

What lies in the middle of a phase lies between both ends, and is never more than both.
Blocks of several kinds repeat with a period: take the numbers of layers that many apart, and the
wanted number a multiple of it away.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.measure.timeline import KINDS, Timeline
from recipes_lib.core.predict import Build, predict

Size = tuple[int, ...]


@dataclass(frozen=True)
class AnySize:
    """The moments of a step at the corners of a box of sizes.

    `corners` [corners, moments, kinds] holds bytes, in the order of `itertools.product(*axes)`.
    `ratios` are those of allocated and reserved to requested bytes at the largest corner, if the
    steps were those of a card.
    """

    axes: dict[str, tuple[int, int]]
    moments: list[str]  # the phase of each
    corners: torch.Tensor

    def at(self, **sizes: int) -> dict[str, int]:
        """What the peak of a step of these sizes consists of, by kind."""
        bytes_at = self._extrapolated(sizes)  # [moments, kinds]
        highest = int(bytes_at.sum(1).argmax())
        return dict(zip(KINDS, bytes_at[highest].round().long().tolist(), strict=True))

    def peak(self, **sizes: int) -> int:
        """Bytes at the highest moment of a step of these sizes."""
        return sum(self.at(**sizes).values())

    def _extrapolated(self, sizes: dict[str, int]) -> torch.Tensor:
        if sizes.keys() != self.axes.keys():
            raise ValueError(f"sizes {sorted(sizes)}: give {sorted(self.axes)}")
        shares = torch.ones(1, dtype=torch.float64)
        for name, (few, more) in self.axes.items():
            of_more = (sizes[name] - few) / (more - few)
            share = torch.tensor([1 - of_more, of_more], dtype=torch.float64)
            shares = torch.outer(shares, share).flatten()
        return torch.einsum("c,cmk->mk", shares, self.corners)


def any_size(
    build_of: Callable[..., Build], *, key: Any = None, ranks: int = 1, **axes: tuple[int, int]
) -> AnySize:
    """Dry steps at both values of each axis, and what they say of all other sizes.

    Args:
        build_of: takes one number for each axis, by name.
        key: what the step is, in anything that JSON can write (a configuration, the names of
            recipes). With it the result is kept on disk.
    Raises ValueError where the steps do not consist of the same phases.
    """
    if key is not None:
        path = _kept_at([key, ranks, axes])
        if path.exists():
            kept = json.loads(path.read_text())
            corners = torch.tensor(kept["corners"], dtype=torch.float64)
            return AnySize(axes, kept["moments"], corners)
    timelines = []
    for sizes in itertools.product(*axes.values()):
        build = build_of(**dict(zip(axes, sizes, strict=True)))
        timelines.append(predict(build, ranks=ranks).timeline)
    moments, corners = _aligned(timelines)
    if key is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"moments": moments, "corners": corners.long().tolist()})
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(content)
        os.replace(scratch, path)
    return AnySize(axes, moments, corners)


def _aligned(timelines: list[Timeline]) -> tuple[list[str], torch.Tensor]:
    """The moments that all timelines have: their phases, and bytes [corners, moments, kinds]."""
    names = [[phase for phase, _, _ in timeline.phases()] for timeline in timelines]
    if any(each != names[0] for each in names):
        raise ValueError(
            f"steps of these sizes have other phases ({names[0]} and {names[-1]}): "
            f"predict the wanted size itself"
        )
    moments: list[str] = []
    columns = []
    by_operator = [_by_operator(timeline) for timeline in timelines]
    phases = [timeline.phases() for timeline in timelines]
    for number, name in enumerate(names[0]):
        # A phase ends where the next one begins; the last one has the last operator, too.
        spans = [each[number][1:] for each in phases]
        common = min(end - begin for begin, end in spans) + 1
        for begins in (True, False):
            parts = []
            for table, (begin, end) in zip(by_operator, spans, strict=True):
                start = begin if begins else end + 1 - common
                parts.append(table[start : start + common])
            columns.append(torch.stack(parts))  # [corners, common, kinds]
            moments += [name] * common
    return moments, torch.cat(columns, 1)


def _by_operator(timeline: Timeline) -> torch.Tensor:
    """Bytes of each kind after each operator [operators, kinds]; nothing changes between points."""
    last = timeline.points[-1].operator
    table = torch.zeros(last + 1, len(KINDS), dtype=torch.float64)
    for point in timeline.points:
        table[point.operator :] = torch.tensor([point.bytes[kind] for kind in KINDS])
    return table


# --- kept on disk ---------------------------------------------------------------------------------


def _kept_at(key: Any) -> Path:
    """The file of a result: another one for other code, libraries, configurations and recipes."""
    parts = [json.dumps(key, sort_keys=True, default=str), _code()]
    parts += [metadata.version(name) for name in ("torch", "transformers", "peft")]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "llm-training-recipes" / "predictions" / f"{digest}.json"


def _code() -> str:
    """A digest of this package's sources."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
