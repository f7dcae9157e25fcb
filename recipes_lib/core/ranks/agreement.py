"""Do all ranks mean the same, and does one of them fail?

With another batch size or model on one rank, the others wait for it for ever, or train on. A rank
that stops leaves the others waiting in their next collective. So ranks compare before they begin,
and an error of one rank becomes an error of all:

    agree(model=model, stage=stage)          raises on every rank if they differ
    with same_error_on_all_ranks(): ...      raises on every rank if one of them fails inside
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from recipes_lib.core.ranks import require_group, world_size


def agree(**values: Any) -> None:
    """Raise ValueError on every rank if the ranks have not given the same values.

    Every rank has to call it, before any check that could raise on one rank alone. A technique
    calls it first: `agree(model=model, stage=stage)`.

    Args:
        values: numbers, strings, and what else has a `repr`. A module stands for the names, shapes
            and dtypes of its parameters, and for which of them train. A mesh stands for its axes.

    Raises ValueError without a process group, too.
    """
    require_group()
    mine = {name: _described(value) for name, value in values.items()}
    of_ranks: list[Any] = [None] * world_size()
    distributed.all_gather_object(of_ranks, mine)
    names = dict.fromkeys(name for given in of_ranks for name in given)
    for name in names:
        who_gives: dict[str, list[int]] = {}
        for number, given in enumerate(of_ranks):
            who_gives.setdefault(given.get(name, "nothing"), []).append(number)
        if len(who_gives) > 1:
            told = ", ".join(_who(ranks, text) for text, ranks in who_gives.items())
            raise ValueError(f"{name}: {told}; give the same on all ranks")


def _who(ranks: list[int], text: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} gives {text}"
    return f"ranks {ranks} give {text}"


def _described(value: Any) -> str:
    if isinstance(value, DeviceMesh):
        return f"a mesh {value.mesh_dim_names} of {tuple(value.mesh.shape)}"
    if isinstance(value, nn.Module):
        return _described_module(value)
    return repr(value)


def _described_module(value: nn.Module) -> str:
    lines = [
        f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
        for name, parameter in value.named_parameters()
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    count = sum(parameter.numel() for parameter in value.parameters())
    return f"{type(value).__name__} of {count:,} parameters ({digest[:8]})"


@contextlib.contextmanager
def same_error_on_all_ranks(*, group: distributed.ProcessGroup | None = None) -> Iterator[None]:
    """An error inside, on any rank, becomes a ValueError on every rank.

    Without it one rank stops, and the others wait for it in their next collective. No rank leaves
    before all are done, so that what one of them has written can be read by all. Nothing inside may
    be a collective itself, unless it raises on all ranks alike.
    """
    error = None
    mine = None
    try:
        yield
    except Exception as raised:
        error = raised
        mine = str(raised)
    if not distributed.is_initialized():
        if error is not None:
            raise ValueError(mine) from error
        return
    texts: list[str | None] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(texts, mine, group=group)
    told: dict[str, int] = {}
    for number, text in enumerate(texts):
        if text is not None and text not in told:  # the same mistake on all ranks is told once
            told[text] = number
    if told:
        reports = [f"rank {number}: {text}" for text, number in told.items()]
        raise ValueError("; ".join(reports)) from error
