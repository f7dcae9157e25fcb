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

from recipes_lib.core.measure.dry_run import dry
from recipes_lib.core.ranks import world_size


def agree(**values: Any) -> None:
    """Raise ValueError on every rank if the ranks have not given the same values.

    Every rank has to call it, before any check that could raise on one rank alone.

    Args:
        values: numbers, strings, and what else has a `repr`. A module stands for the names, shapes
            and dtypes of its parameters, and for which of them train. A mesh stands for its axes.
    """
    # A process that is alone, or one that pretends others, whose tensors have no data to compare.
    if dry() or not distributed.is_initialized():
        return
    mine = {name: _as_comparable_text(value) for name, value in values.items()}
    of_ranks: list[Any] = [None] * world_size()
    distributed.all_gather_object(of_ranks, mine)
    for name in dict.fromkeys(name for given in of_ranks for name in given):
        texts = [given.get(name, "nothing") for given in of_ranks]
        if len(set(texts)) > 1:
            told = ", ".join(f"rank {rank} gives {text}" for rank, text in enumerate(texts))
            raise ValueError(f"{name}: {told}; give the same on all ranks")


def _as_comparable_text(value: Any) -> str:
    """A value as text that ranks can compare."""
    if isinstance(value, DeviceMesh):
        return f"a mesh {value.mesh_dim_names} of {tuple(value.mesh.shape)}"
    if not isinstance(value, nn.Module):
        return repr(value)
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

    No rank leaves before all are done, so that what one of them has written can be read by all.
    Nothing inside may be a collective itself, unless it raises on all ranks alike.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    mine = None if error is None else str(error)
    texts: list[str | None] = [mine]
    if distributed.is_initialized():
        texts = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(texts, mine, group=group)
    told: dict[str, int] = {}
    for number, text in enumerate(texts):
        if text is not None:
            told.setdefault(text, number)  # the same mistake on all ranks is told once
    if told:
        reports = [f"rank {number}: {text}" for text, number in told.items()]
        raise ValueError("; ".join(reports)) from error
