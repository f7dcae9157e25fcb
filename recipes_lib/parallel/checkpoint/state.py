"""What a sharded checkpoint holds: facts for any number of ranks, and the parts of one rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from recipes_lib.core.model.run_state import Facts, facts_of, optimizer_name
from recipes_lib.core.ranks import world_size
from recipes_lib.core.ranks.agreement import same_error_on_all_ranks

# --- facts, the same on any number of ranks -------------------------------------------------------


def facts_of_all_ranks(
    run: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Mapping[str, Any],
) -> Facts:
    """All ranks call it. Stages of a pipeline have names of their own, and are put together."""
    with same_error_on_all_ranks():
        facts = facts_of(run, model, optimizer, parts)
    facts["optimizer"] = {"class": optimizer_name(_inner(optimizer))}
    facts["optimized"] = dict.fromkeys(facts["optimized"], True)  # states go by names here
    if not distributed.is_initialized():
        return facts
    of_ranks: list[Facts] = [{} for _ in range(world_size())]
    distributed.all_gather_object(of_ranks, facts)
    odd = set()
    for given in of_ranks:
        for kind, values in given.items():
            for name, value in values.items():
                if facts[kind].setdefault(name, value) != value:
                    odd.add((kind, name))
    for kind, name in sorted(odd):
        if kind != "base":
            raise ValueError(f"the ranks differ in {kind} {name}: give the same on all ranks")
        # Rows of a frozen embedding, as `quantized_shards` cuts it, are other ones on each rank.
        del facts[kind][name]
    return facts


# --- what is saved of this rank -------------------------------------------------------------------

# Frozen weights come from the base model again. States are named by parameter, so that ranks with
# other parameters, as pipeline stages have them, put them together.
OPTIONS = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's parts of the trainable weights and of their optimizer states, by name."""
    inner = _inner(optimizer)
    _copy_settings(optimizer, inner)
    return {
        "model": get_model_state_dict(model, options=OPTIONS),
        "optimizer": get_optimizer_state_dict(model, inner, options=OPTIONS),
    }


def set_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put them back into a model and an optimizer that may be divided in another way."""
    # Not strict: frozen weights are missing, and names were compared already.
    loose = StateDictOptions(strict=False, flatten_optimizer_state_dict=True)
    set_model_state_dict(model, state["model"], options=loose)
    inner = _inner(optimizer)
    set_optimizer_state_dict(model, inner, state["optimizer"], options=OPTIONS)
    _copy_settings(inner, optimizer)


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that has the states: ZeRO stage 1 keeps one over this rank's parameters."""
    # Who has one has imported its module, which takes a while and warns of other things.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return optimizer.optim
    return optimizer


def _copy_settings(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Learning rate and the like. ZeroRedundancyOptimizer hands them on in its next step only."""
    if source is not target:
        for given, taken in zip(source.param_groups, target.param_groups, strict=True):
            taken |= {name: value for name, value in given.items() if name != "params"}


def make_stager() -> DefaultStager:
    """What copies the parts to host memory before a thread writes them, and keeps that memory."""
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
