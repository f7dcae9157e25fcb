"""Gives a model back all that it had, without a copy of a weight."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def undone_on_error(model: Any, name: str, snapshot: Snapshot | None = None) -> Iterator[None]:
    """Give `model` everything back that it had if the body raises, with one sentence why."""
    if snapshot is None:
        snapshot = Snapshot(model)
    try:
        yield
    except BaseException as error:
        snapshot.restore()
        if not isinstance(error, Exception):
            raise
        reason = " ".join(str(error).split())
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise ValueError(
            f"{type(model).__name__} cannot have {name}, and is as it was: {reason}"
        ) from error


@contextlib.contextmanager
def restored(model: Any) -> Iterator[None]:
    """Give `model` everything back in the end, whatever happens."""
    snapshot = Snapshot(model)
    try:
        yield
    finally:
        snapshot.restore()


class Snapshot:
    """All that modules, parameters and configurations refer to; no copy of a weight.

    A weight that is changed in place is not given back.
    """

    def __init__(self, model: Any):
        """To undo a technique: note what things refer to, and what may change inside."""
        configs = {}
        for module in model.modules():
            config = vars(module).get("config")
            if config is not None:
                configs[id(config)] = config
        self.things = [*model.modules(), *model.parameters(), *configs.values()]
        self.kept = []
        self.held = []
        for thing in self.things:
            trains = getattr(thing, "requires_grad", None)
            self.kept.append((thing, type(thing), dict(vars(thing)), trains))
            for value in vars(thing).values():
                if isinstance(value, dict | list | set):
                    self.held.append((value, copy.copy(value)))
        self.first_look = self.look()

    def restore(self) -> None:
        for thing, kind, attributes, trains in self.kept:
            thing.__class__ = kind
            vars(thing).clear()
            vars(thing).update(attributes)
            if isinstance(thing, nn.Parameter):
                thing.requires_grad_(trains)
        # In place: the handles of hooks hold on to the dictionary.
        for value, content in self.held:
            value.clear()
            if isinstance(value, list):
                value.extend(content)
            else:
                value.update(content)

    def differs(self) -> bool:
        return self.look() != self.first_look

    def look(self) -> list:
        """Classes, and the identity of everything that things refer to."""
        seen: list = [type(thing) for thing in self.things]
        for thing in self.things:
            for value in vars(thing).values():
                seen.append(id(value))
                if isinstance(value, dict):
                    seen += [id(inner) for inner in value.values()]
        return seen
