"""A step of any size from a few small ones: bytes at each moment are affine in the sizes.

    def build_of(layers, tokens):
        ...                                        # gives `build` of core.predict
    step = any_size(build_of, layers=(2, 3), tokens=(256, 512))      # six small dry steps
    step.peak(layers=32, tokens=8192)                                # at once

A block more adds the same bytes at the same moment, wherever blocks are alike, and so does a row or
a token more where no mask grows with their square. The *peak* is not affine: it is the largest of
all moments, and with more blocks another moment may be the largest. So each moment is followed by
itself. The k-th operator of a phase is the same moment in all depths, as long as it lies in front
of the blocks or in the first of them; and the k-th from the end, if it lies in the last or behind:

    2 blocks   ####aaaaAAAA####            from the beginning    ####aaaa
    3 blocks   ####aaaabbbbAAAA####        from the end              AAAA####

Which ones these are is seen at a third depth: their bytes lie on a line. What is in the middle of a
phase lies between both ends, and is never more than both. Blocks of several kinds repeat with a
period: take numbers of layers that are a period apart, and the wanted one a multiple of it away.
"""

from __future__ import annotations

import functools
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

from recipes_lib.core.measure.dry_run import out_of_the_collectors_sight
from recipes_lib.core.measure.timeline import KINDS, Timeline
from recipes_lib.core.predict import Build, Card, predict

NOTHING = 1024  # bytes: a number or two that a library makes once, and keeps


@dataclass(frozen=True)
class AnySize:
    """The moments of a step at the corners of a box of sizes.

    `corners` [corners, moments, kinds] holds bytes, in the order of `itertools.product(*axes)`.
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
    build_of: Callable[..., Build],
    *,
    key: Any = None,
    card: Card | None = None,
    ranks: int = 1,
    **axes: tuple[int, int],
) -> AnySize:
    """Dry steps at both values of each axis, and what they say of all other sizes.

    Args:
        build_of: takes one number for each axis, by name. One axis is `layers`.
        key: what the step is, in anything that JSON can write (a configuration, the names of
            recipes). With it the result is kept on disk.
        card: a GPU that may not be there, whose kernels are chosen.
        ranks: how many share the step.
    Raises ValueError where steps of two sizes do not consist of the same operators, but for those
    of more blocks.
    """
    if key is not None:
        path = _kept_at([key, card and card.capability, ranks, axes])
        if path.exists():
            kept = json.loads(path.read_text())
            corners = torch.tensor(kept["corners"], dtype=torch.float64)
            return AnySize(axes, kept["moments"], corners)
    few, more = axes["layers"]
    others = {name: values for name, values in axes.items() if name != "layers"}
    depths = []
    with out_of_the_collectors_sight():  # once for all steps, each of which would look again
        for layers in (few, more, 2 * more - few):
            timelines = []
            for sizes in itertools.product(*others.values()):
                build = build_of(layers=layers, **dict(zip(others, sizes, strict=True)))
                predicted = predict(build, card=card, allocator=False, ranks=ranks)
                timelines.append(predicted.timeline)
            depths.append(timelines)
    moments, corners = _aligned(depths)
    axes = {"layers": axes["layers"], **others}
    if key is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"moments": moments, "corners": corners.long().tolist()})
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(content)
        os.replace(scratch, path)
    return AnySize(axes, moments, corners)


def _aligned(depths: list[list[Timeline]]) -> tuple[list[str], torch.Tensor]:
    """The moments that the three depths share: their phases, bytes [corners, moments, kinds]."""
    phases = [_phases_of(timelines) for timelines in depths]
    if len({len(each) for each in phases}) > 1:
        raise ValueError("steps of other depths have other phases: predict the wanted size itself")
    moments: list[str] = []
    found = []
    for of_depths in zip(*phases, strict=True):
        names, tables = zip(*of_depths, strict=True)  # three of [others, operators, kinds]
        common = min(table.shape[1] for table in tables)
        for place in (slice(None, common), slice(-common, None)):
            few, more, most = (table[:, place] for table in tables)
            bend = most - 2 * more + few
            on_a_line = (bend.abs() <= NOTHING).all(2).all(0)  # [common]
            both = torch.stack([few, more]).flatten(0, 1)  # [2 x others, common, kinds]
            found.append(both[:, on_a_line])
            moments += [names[0]] * int(on_a_line.sum())
    return moments, torch.cat(found, 1)


def _phases_of(timelines: list[Timeline]) -> list[tuple[str, torch.Tensor]]:
    """The phases of steps of one depth: name, and bytes [steps, operators, kinds]."""
    together = []
    for spans in zip(*[timeline.phases() for timeline in timelines], strict=True):
        lengths = {end - begin for _, begin, end in spans}
        if len(lengths) > 1 or len({name for name, _, _ in spans}) > 1:
            raise ValueError(
                "steps of these sizes do not consist of the same operators (a loss in chunks has "
                "more of them for more tokens): predict the wanted size itself"
            )
        tables = []
        for timeline, (_, begin, end) in zip(timelines, spans, strict=True):
            tables.append(_by_operator(timeline)[begin : end + 1])
        together.append((spans[0][0], torch.stack(tables)))
    return together


def _by_operator(timeline: Timeline) -> torch.Tensor:
    """Bytes of each kind after each operator [operators, kinds]; nothing changes between points."""
    numbers = torch.tensor([point.operator for point in timeline.points])
    values = torch.tensor([tuple(point.bytes.values()) for point in timeline.points])  # as KINDS
    last_change = torch.searchsorted(numbers, torch.arange(int(numbers[-1]) + 1), right=True) - 1
    return values.double()[last_change]


# --- kept on disk ---------------------------------------------------------------------------------


def _kept_at(key: Any) -> Path:
    """The file of a result: another one for other code, libraries, configurations and recipes."""
    parts = [json.dumps(key, sort_keys=True, default=str), _code()]
    parts += [metadata.version(name) for name in ("torch", "transformers", "peft")]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "llm-training-recipes" / "predictions" / f"{digest}.json"


@functools.cache
def _code() -> str:
    """A digest of this package's sources."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
