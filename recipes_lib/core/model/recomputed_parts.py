"""A part of a block that runs in parts of its own, each of them once more in backward.

An MLP can see one tile of tokens after the other, attention one group of heads after the other:

    parts = split(whole)                    tiles of the input, or the same input for every group
    for part in parts:    take(run(index, part))

Each part is checkpointed, so what it saves exists for one part at a time.

How that goes with a checkpoint around the whole block, the outer checkpoint:

In backward, the outer checkpoint runs the block again until it has every tensor that the block
saved, and stops there. With plain checkpoints the last of these tensors is the input of the last
part. On the way to it all other parts run a third time. So of all parts the outer checkpoint shall
see one tensor only, their whole input. It takes four steps:

  1. forward    `_SaveInput` saves the whole input. This the outer checkpoint sees: it drops the
                tensor, and makes it again when somebody asks for it.
  2. forward    Each part runs in a checkpoint of its own. What that saves goes through the hooks
                `_as_it_is`, which lie above those of the outer checkpoint: it sees nothing of it.
  3. forward    No checkpoint of a part may hold the input, or dropping it would free nothing. So
                they share a list of parts, which is emptied at the end, and they know the node of
                `_SaveInput` in autograd's graph, `saved_input`.
  4. backward   The list is empty, so `_run_part` asks `_saved_parts`. With the first question the
                outer checkpoint runs the block again as far as step 1, and stops there. The parts
                of the input are kept at the node for the others, until the last has had its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

Split = Callable[[Tensor], Sequence[Tensor]]  # a whole into its parts
Run = Callable[[int, Tensor], Tensor]  # of a part by its number


# torch.compile would trace `_SaveInput` into a node of its own, without `split` and `parts`.
@torch.compiler.disable
def run_recomputed_parts(
    run: Run, whole: Tensor, *, split: Split, take: Callable[[Tensor], Any]
) -> None:
    """`take(run(index, part))` for each part of `whole`, which backward runs once more.

    Args:
        split: the parts of the whole input, views of it. It is asked again in backward.
        take: gets each output as soon as it is there.
    """
    # The parts reach the checkpoints in a list that autograd does not see. What it sees is this
    # empty tensor. From it `checkpoint` knows the device whose random state it has to restore, and
    # as it needs a gradient, there is a backward even if the input needs none.
    empty = whole.new_empty(0, requires_grad=True)
    whole = _SaveInput.apply(whole, empty, split)  # step 1
    saved_input = whole.grad_fn
    parts = list(split(whole))
    for index in range(len(parts)):
        # Step 2: these hooks take what the part's checkpoint saves.
        with saved_tensors_hooks(_as_it_is, _as_it_is):
            output = checkpoint(
                _run_part, empty, run, parts, saved_input, index, use_reentrant=False
            )
        take(output)
        del output
    # Step 3: the checkpoints hold this list until backward. They must not hold the input with it.
    parts.clear()


def needs_backward(module: nn.Module, hidden: Tensor) -> bool:
    """Whether a backward can follow, which recomputes parts: gradients are on and wanted."""
    if not torch.is_grad_enabled():
        return False
    return hidden.requires_grad or any(p.requires_grad for p in module.parameters())


def refuse_selective_checkpointing(*, parts: str, mixin: type) -> None:
    """Raise ValueError inside it: it keeps what the products of all recomputed parts return.

    Args:
        parts: what the message calls them.
        mixin: what the recipe has mixed in.
    """
    for mode in _get_current_dispatch_mode_stack():
        if "CachingTorchDispatchMode" in type(mode).__name__:
            raise ValueError(
                f"selective checkpointing keeps what the products of all {parts} return, so that "
                f"{parts} save nothing: checkpoint whole blocks, or "
                f"core.model.mixins.take_out(model, {mixin.__name__})"
            )


def _run_part(empty: Tensor, run: Run, parts: list[Tensor], saved_input: Any, index: int) -> Tensor:
    """`run` on part number `index`: one of `parts` in forward, a saved one in backward."""
    if not parts:  # step 4: this is backward
        parts = _saved_parts(saved_input)
    return run(index, parts[index])


class _SaveInput(torch.autograd.Function):
    """The identity, which saves the input once for all recomputed parts."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, empty: Tensor, split: Split) -> Tensor:
        ctx.save_for_backward(whole)
        ctx.split = split
        ctx.parts = None
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.parts = None  # all parts have been through backward
        return gradient, None, None


def _saved_parts(saved_input: Any) -> list[Tensor]:
    """The parts of the input that `_SaveInput` has saved.

    They are made once, for the last part, with which backward begins, and kept for the others.
    """
    if saved_input.parts is None:
        # At this line an outer checkpoint runs the block again, as far as this input.
        (whole,) = saved_input.saved_tensors
        parts: Iterable[Tensor] = saved_input.split(whole)
        saved_input.parts = [part.detach().requires_grad_() for part in parts]
    return saved_input.parts


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
