"""Mix a class into one module of a model, and take it out again.

A technique that changes what a block computes could replace the block's `forward` by a function.
That function would stay bound to *this* block: `copy.deepcopy(model)` gives a copy whose blocks
still run the original's weights. A class has no such tie. So the module keeps its identity, its
name, its parameters and its hooks, and only its class changes:

    before    block.__class__ is LlamaDecoderLayer
    after     block.__class__ is LlamaDecoderLayer, a subclass of (Checkpointed, LlamaDecoderLayer)

The new class has the old one's name, because FSDP and device maps find blocks by it. A mixin's
`forward` calls `super().forward(...)` for what the module did before. Hooks run once, outside.

An attribute `forward` on the module itself hides that of its class, and with it all that is mixed
in. Accelerate sets one for a device map, and kernel libraries do. Such a module is refused.

`take_out(model, Checkpointed)` gives all modules their own classes back: to train on without the
technique, or to pickle a whole model (its state dict is unchanged), for the new class has no
address.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from types import MethodType
from typing import Any

from torch import nn


def mix_in(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Let `module` be a `mixin` as well, with these attributes on the instance.

    Raises ValueError if one is mixed in already: two of a kind would run the technique twice.
    """
    require_forward_of_class([module])
    if isinstance(module, mixin):
        raise ValueError(
            f"{type(module).__name__} is a {mixin.__name__} already: take it out first"
        )
    vars(module).pop("forward", None)  # only that of the class is left
    module.__class__ = _mixed_class(mixin, type(module), tuple(attributes))
    for name, value in attributes.items():
        setattr(module, name, value)


def take_out(model: nn.Module, mixin: type) -> nn.Module:
    """`unmix` every module of `model` that is a `mixin`. Returns `model`.

    A mixin with a method `taken_out` has it called before.
    """
    modules = [module for module in model.modules() if isinstance(module, mixin)]
    if not modules:
        raise ValueError(f"this model has no module that is a {mixin.__name__}")
    for module in modules:
        if hasattr(module, "taken_out"):
            module.taken_out()
        unmix(module, mixin)
    return model


def unmix(module: nn.Module, mixin: type) -> None:
    """Give `module` the class back that it had before `mix_in`, and drop the attributes.

    Raises ValueError if another mixin came later: the last one goes first. A forward that was set
    later would hold on to the mixin.
    """
    require_forward_of_class([module])
    outermost, *rest = type(module).__bases__
    if outermost is not mixin:
        raise ValueError(
            f"{type(module).__name__} is no {mixin.__name__}, or another class was mixed in later"
        )
    vars(module).pop("forward", None)
    attributes = type(module).mixed_attributes
    module.__class__ = rest[0]
    for name in attributes:
        delattr(module, name)


def unmixed_class(module: nn.Module) -> type:
    """The class of `module` without all that is mixed in."""
    module_class = type(module)
    while "mixed_in" in vars(module_class):
        module_class = module_class.__bases__[1]
    return module_class


def require_forward_of_class(modules: Iterable[nn.Module]) -> None:
    """Raise ValueError unless each module runs the forward of its class.

    A technique that changes many modules asks for all of them before it changes the first.
    """
    for module in modules:
        if "forward" in vars(module) and not _is_the_classes_own(module):
            raise ValueError(
                f"{type(module).__name__} has a forward of its own, set by a device map or a "
                f"kernel library, and only that of a class can be changed: load the model without "
                f"device_map, or, if one device holds all of it, call "
                f"accelerate.hooks.remove_hook_from_submodules(model) first"
            )


def _is_the_classes_own(module: nn.Module) -> bool:
    """Whether its attribute `forward` hides nothing: accelerate leaves it when its hooks go."""
    return vars(module)["forward"] == MethodType(type(module).forward, module)


@functools.cache  # so that all blocks of a model share one new class
def _mixed_class(mixin: type, module_class: type, attributes: tuple[str, ...]) -> type:
    # Trainer and `generate` read the signature of `forward`: it stays that of the module's class.
    """The class of a module with a mixin in front, whose `forward` is called first."""

    @functools.wraps(module_class.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)

    body = {"forward": forward, "mixed_in": mixin, "__module__": module_class.__module__}
    body["mixed_attributes"] = attributes
    _self, *names = inspect.signature(module_class.forward).parameters
    body["forward_arguments"] = tuple(names)  # in their order, the hidden states first
    return type(module_class.__name__, (mixin, module_class), body)
