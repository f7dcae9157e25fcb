"""What a step without data may know: the values of the integers that it was given.

Which rows are padded, where a document begins and which tokens are trained on decides what a step
allocates, and all of these are integers of the batch. So integers keep their values in a dry run:
an operator whose inputs are all known runs a second time on the values. Weights, activations and
losses have none.

    real tensor of the batch     becomes a fake one that knows its values, and that is not counted
    integers of known ones       are known: masks, positions, numbers of documents
    `.item()` of another         a number of no meaning, 1: good for a print, an error in a decision
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

aten = torch.ops.aten

# What makes integers of nothing but numbers.
FACTORIES = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.full.default,
    aten.ones.default,
    aten.zeros.default,
    aten.eye.default,
    aten.scalar_tensor.default,
}
NEW_TENSORS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
MOST_KNOWN = 2**27  # elements of a tensor that is computed: a mask of 11,000 x 11,000 tokens
# Files between an operator and the line that asked for it.
INSIDE_PYTORCH = (
    "torch/_dynamo/",
    "torch/_ops",
    "torch/_tensor",
    "torch/_compile",
    "torch/_subclasses/",
    "torch/utils/_",
)


class Values(TorchDispatchMode):
    """Keeps the values of integers, and answers for all others. It lies on PyTorch's fake mode."""

    def __init__(self) -> None:
        super().__init__()
        self.of_the_host = False  # what operators make now is not on the device
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator on shapes, and on values where all of its inputs have some."""
        kwargs = kwargs or {}
        if active_fake_mode() is None:  # lifted for a moment, as by a mesh that looks for its ranks
            args, kwargs = tree_map_only(FakeTensor, _known_or_itself, (args, kwargs))
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._number_in(args[0])
        if func in NEW_TENSORS:
            return self._tensor_of_numbers(func, *args)
        leaves, form = tree_flatten((args, kwargs))
        leaves = [self._twin_of(leaf) for leaf in leaves]
        known = self._known_inputs(func, leaves)
        if known is not None and func is aten.equal.default:
            return _on_known_values(func, known, form)
        if func is aten.equal.default:
            return True
        if known is not None and torch.Tag.dynamic_output_shape in func.tags:
            # How long the result is depends on values, so it has to be computed first.
            out = tree_map_only(torch.Tensor, self._fake_of, _on_known_values(func, known, form))
        else:
            args, kwargs = tree_unflatten(leaves, form)
            out = func(*args, **kwargs)
            self._give_values_to_outputs(func, leaves, known, form, out)
        if self.of_the_host:
            _let_others_have(out, leaves)
        return out

    def _tensor_of_numbers(self, func: Any, real: torch.Tensor) -> torch.Tensor:
        """What `torch.tensor([…])` makes of its numbers. Unlike a twin it is counted."""
        fake = func(real)
        if type(real) is torch.Tensor and _has_whole_values(real):
            fake.known = real
        return fake

    def _twin_of(self, leaf: Any) -> Any:
        """A fake tensor with known values in the place of a real one: it is not counted."""
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.device.type == "meta":
            return leaf
        if id(leaf) not in self._twins:
            twin = self._fake_of(leaf)
            twin.untyped_storage().of_others = True
            self._twins[id(leaf)] = (leaf, twin)
        return self._twins[id(leaf)][1]

    def _fake_of(self, real: torch.Tensor) -> torch.Tensor:
        twin = active_fake_mode().from_tensor(real)
        if _has_whole_values(real):
            twin.known = real
        return twin

    def _known_inputs(self, func: Any, leaves: list[Any]) -> list[Any] | None:
        """The arguments with their values, or None if one of them has none."""
        found = func in FACTORIES
        known = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                leaf = values_of(leaf)
                if leaf is None:
                    return None
                found = True
            known.append(leaf)
        return known if found else None

    def _give_values_to_outputs(
        self, func: Any, leaves: list[Any], known: list[Any] | None, form: Any, out: Any
    ) -> None:
        """Give the outputs their values, or take those of a tensor that was written to."""
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        if known is not None and made and all(map(_values_worth_knowing, made)):
            # A collective also returns its work, and in a pretended group the values of this rank.
            real = tree_leaves(_on_known_values(func, known, form))
            values = [each for each in real if isinstance(each, torch.Tensor)]
            for fake, value in zip(made, values, strict=True):
                fake.known = value
        elif func._schema.is_mutable:
            for each in written_to(func, leaves, form):
                each.known = None

    def _number_in(self, tensor: torch.Tensor) -> bool | int | float:
        """The number in a tensor of one element."""
        known = values_of(tensor)
        if known is not None:
            with unset_fake_temporarily():
                return known.item()
        where, library = _who_asks()
        if tensor.dtype is torch.bool:
            if not library:
                raise ValueError(
                    f"{where} decides by the values of a tensor, and a step without data has "
                    f"none: predict a step that does not, or measure this one with PeakMemory"
                )
            return False
        if "torch/amp/" in where:  # did gradients overflow? No.
            return 0.0
        # Not 0: a mean over no tokens is an error.
        return 1.0 if tensor.dtype.is_floating_point else 1


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real tensor behind a fake one of whole numbers, if it is known."""
    if not isinstance(tensor, FakeTensor):
        return tensor if type(tensor) is torch.Tensor and _has_whole_values(tensor) else None
    known = getattr(tensor, "known", None)
    if known is None:
        known = tensor.constant  # PyTorch keeps that of a number in a tensor itself
    return known


def _known_or_itself(tensor: torch.Tensor) -> torch.Tensor:
    known = values_of(tensor)
    return tensor if known is None else known


def written_to(func: Any, leaves: list[Any], form: Any) -> Iterable[torch.Tensor]:
    """The tensors among the arguments whose values an operator changes in place."""
    args, kwargs = tree_unflatten(leaves, form)
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        yield from (each for each in tree_leaves(value) if isinstance(each, torch.Tensor))


def _let_others_have(out: Any, inputs: list[Any]) -> None:
    """Mark what an operator has made, and not what it was given, as storages that do not count."""
    given = {_storage_of(leaf)._cdata for leaf in inputs if isinstance(leaf, torch.Tensor)}
    for leaf in tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and _storage_of(leaf)._cdata not in given:
            _storage_of(leaf).of_others = True


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _on_known_values(func: Any, leaves: list[Any], form: Any) -> Any:
    args, kwargs = tree_unflatten(leaves, form)
    with unset_fake_temporarily(), torch.no_grad():
        return func(*args, **kwargs)


def _has_whole_values(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _values_worth_knowing(tensor: torch.Tensor) -> bool:
    if is_traceable_wrapper_subclass(tensor):
        return False
    return (_has_whole_values(tensor) and tensor.numel() <= MOST_KNOWN) or tensor.numel() == 1


def _who_asks() -> tuple[str, bool]:
    """The line that reads a value, as file:line, and whether it is one of a library."""
    for frame in reversed(traceback.extract_stack(limit=40)):
        name = frame.filename.split("site-packages/")[-1]
        if name.startswith(INSIDE_PYTORCH) or name.endswith(("/dry_values.py", "/live_bytes.py")):
            continue
        library = name != frame.filename or "recipes_lib" in name
        return f"{name}:{frame.lineno}", library
    return "a line", False
