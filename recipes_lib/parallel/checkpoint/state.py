"""What a sharded checkpoint holds: each rank's parts of weights and optimizer states, by name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Set
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from recipes_lib.core.model.run_state import in_python_numbers

# Frozen weights come from the base model again. States are named by parameter, so that ranks with
# other parameters, as pipeline stages have them, put them together.
OPTIONS = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's parts of the trainable weights and of their optimizer states, by name."""
    inner = inner_optimizer(optimizer)
    _copy_settings(optimizer, inner)
    states = get_optimizer_state_dict(model, inner, options=OPTIONS)
    return {
        "model": get_model_state_dict(model, options=OPTIONS),
        "optimizer": {name: in_python_numbers(value) for name, value in states.items()},
    }


def set_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Put them back into a model and an optimizer that may be divided in another way."""
    # Not strict: frozen weights are missing, and names were compared already.
    loose = StateDictOptions(strict=False, flatten_optimizer_state_dict=True)
    set_model_state_dict(model, state["model"], options=loose)
    inner = inner_optimizer(optimizer)
    set_optimizer_state_dict(model, inner, state["optimizer"], options=OPTIONS)
    _copy_settings(inner, optimizer)


@contextlib.contextmanager
def unchanged_if_refused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around what asks a fresh optimizer for its states: an error leaves it fresh.

    PyTorch makes the states by a step with gradients of zero and a learning rate of zero.
    """
    inner = inner_optimizer(optimizer)
    was_fresh = not inner.state
    settings = [dict(group) for group in inner.param_groups]
    gradients = [
        (parameter, parameter.grad)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    try:
        yield
    except Exception:
        if was_fresh:
            inner.state.clear()
        for group, before in zip(inner.param_groups, settings, strict=True):
            group.update(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        raise


def optimized_names(names: Iterable[str], *, prefix: str, known: Set[str]) -> set[str]:
    """The parameters of an optimizer, from the names of its settings in a flat state.

    Args:
        known: the names of all parameters. PyTorch writes a setting that is a dictionary,
            info={"x": 1}, as weight.info.x, but weight.info is no parameter.
    """
    settings = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return {name.rpartition(".")[0] for name in settings} & known


def _copy_settings(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Learning rate and the like. ZeroRedundancyOptimizer hands them on in its next step only."""
    if source is not target:
        for given, taken in zip(source.param_groups, target.param_groups, strict=True):
            taken |= {name: value for name, value in given.items() if name != "params"}


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that has the states: ZeRO stage 1 keeps one over this rank's parameters."""
    # Who has one has imported its module, which takes a while and warns of other things.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return optimizer.optim
    return optimizer


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Its class. Two optimizers have states of other names, or of the same that mean others."""
    return type(inner_optimizer(optimizer)).__name__


def make_stager() -> DefaultStager:
    """What copies the parts to host memory before a thread writes them, on a CPU, too.

    It keeps its memory for the next save: fetching new pages takes longer than the copy. From a GPU
    it copies into pinned memory.
    """
    on_gpu = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,
            # The copy is complete when the save returns, and the training may change the weights.
            use_async_staging=False,
            use_non_blocking_copy=on_gpu,
        )
    )
