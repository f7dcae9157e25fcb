"""Text runs through a model, and what goes into and out of its parts is looked at.

Part of student: all that it measures is a mean over positions, of which padding is none.

Shapes: B batch, S sequence, T positions of a batch that count, D features of what is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from recipes_lib.core.checks import check_several
from recipes_lib.core.data.evaluation import evaluating
from recipes_lib.core.data.token_ids import check_batch

# see(number of the module, its input [T, D], its output [T, D]), in the model's dtype
See = Callable[[int, torch.Tensor, torch.Tensor], None]


@torch.no_grad()
def watch(
    model: Any, modules: Sequence[nn.Module], batches: Iterable[dict[str, torch.Tensor]], see: See
) -> int:
    """Run all batches and call `see` after each module's forward; returns how many positions count.

    All do, or with an `attention_mask` those that it shows. Every module keeps its mode. Raises
    ValueError for no batch, and for batches that are no token ids [B, S] of the model.
    """
    check_several(batches=batches)
    positions = 0
    mask = torch.empty(0)

    def look(number: int, before: torch.Tensor, after: torch.Tensor) -> None:
        # [B, S, D]; some models flatten it to [B * S, D]
        shown = [each.reshape(*mask.shape, -1)[mask] for each in (before, after)]
        see(number, *shown)

    with _Hooks(modules, look):
        for number, batch in enumerate(batches):
            _check_batch(model, batch, number)
            mask = _shown(batch)  # [B, S]
            positions += int(mask.sum())
            _run(model, batch)
    if positions == 0:
        raise ValueError("there is no text to measure on: give batches with input_ids [B, S]")
    return positions


class _Hooks:
    """Context: after each module's forward, `look(number, input, output)` is called."""

    def __init__(self, modules: Sequence[nn.Module], look: See) -> None:
        self._modules = modules
        self._look = look
        self._handles: list[Any] = []

    def __enter__(self) -> _Hooks:
        for number, module in enumerate(self._modules):
            hook = self._hook_of(number)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook_of(self, number: int) -> Any:
        def hook(_module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            self._look(number, before, after)

        return hook


def _run(model: Any, batch: dict[str, torch.Tensor]) -> None:
    """A forward of the inputs alone: with labels there would be all logits."""
    inputs = {name: batch[name].to(model.device) for name in batch if name != "labels"}
    with evaluating(model):
        model(**inputs, use_cache=False, logits_to_keep=1)


def _shown(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Which positions count: bool [B, S]."""
    mask = batch.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(batch["input_ids"])
    return mask.bool()


def _check_batch(model: Any, batch: Any, number: int) -> None:
    vocabulary = model.get_input_embeddings().num_embeddings
    check_batch(batch, vocabulary=vocabulary, name=f"batch {number}")
