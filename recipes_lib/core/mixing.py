"""Mix a class into one module of a model, and take it out again.

A technique that changes what a block computes could replace the block's `forward` by a function.
That function would stay bound to *this* block: `copy.deepcopy(model)` gives a copy whose blocks
still run the original's weights. A class has no such tie. So the module keeps its identity, its
name, its parameters and its hooks, and only its class changes:

    before    block.__class__ is LlamaDecoderLayer
    after     block.__class__ is LlamaDecoderLayer, a subclass of (Checkpointed, LlamaDecoderLayer)

The new class has the old one's name, because FSDP and device maps find blocks by it. A mixin's
`forward` calls `super().forward(...)` for what the module did before. Hooks run once, outside.

To pickle a whole model (its state dict is unchanged), unmix it first: the new class has no address.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn


def mix_in(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Let `module` be a `mixin` as well, with these attributes on the instance.

    Raises ValueError if one is mixed in already: two of a kind would run the technique twice.
    """
    if isinstance(module, mixin):
        raise ValueError(f"{type(module).__name__} is a {mixin.__name__} already: unmix it first")
    module.__class__ = _mixed_class(mixin, type(module))
    for name, value in attributes.items():
        setattr(module, name, value)


def unmix(module: nn.Module, mixin: type, *, attributes: Iterable[str] = ()) -> None:
    """Give `module` the class back that it had before `mix_in`, and drop the attributes.

    Raises ValueError if another mixin came later: the last one goes first.
    """
    outermost, *rest = type(module).__bases__
    if outermost is not mixin:
        raise ValueError(
            f"{type(module).__name__} is no {mixin.__name__}, or another class was mixed in later"
        )
    module.__class__ = rest[0]
    for name in attributes:
        delattr(module, name)


@functools.cache  # so that all blocks of a model share one new class
def _mixed_class(mixin: type, module_class: type) -> type:
    # Trainer and `generate` read the signature of `forward`: it stays that of the module's class.
    @functools.wraps(module_class.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)

    body = {"forward": forward, "__module__": module_class.__module__}
    return type(module_class.__name__, (mixin, module_class), body)
