"""A model in parts over the ranks of torchrun: loaded on the first, trained on all, saved from one.

    whole  rank 0  the model in host memory        other ranks  None

    in_shards(whole)      rank 0 sends the modules without their tensors; all ranks divide these
                          with FSDP2; each tensor goes to the ranks, which keep their part of it
    gathered              the way back: what has trained, as whole tensors on rank 0

So one host holds the model once, and no GPU ever does. With an adapter the frozen base is divided
like all else; in 4 bits its codes and scales are (`parallel.quantized_shards`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from recipes_lib.core.ranks import group_device, rank
from recipes_lib.core.ranks.agreement import same_error_on_all_ranks
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.parallel.fully_sharded import apply_fully_sharded
from recipes_lib.parallel.quantized_shards import apply_quantized_shards
from recipes_lib.parallel.quantized_shards.cut_vocabulary import CutRows


def on_first_rank(load: Callable[..., tuple[Any, ...]], *given: Any) -> tuple[Any, ...]:
    """For shards: what `load(*given)` returns on rank 0. The others get all but the model: None."""
    found = (None,)
    with same_error_on_all_ranks():
        if rank() == 0:
            found = load(*given)
    words = [found[1:]]
    distributed.broadcast_object_list(words, src=0)
    return found[0], *words[0]


def in_shards(
    whole: Any | None,
    *,
    four_bits: bool = False,
    checkpointing: bool = False,
    offload: bool = False,
) -> tuple[Any, Any]:
    """The model that rank 0 has as `whole`, divided over all ranks; its modules, for `gathered`.

    Args:
        four_bits: its layers are, as `pack_layers` leaves them.
        checkpointing: of the blocks.
        offload: the parts stay in host memory, and a block comes to the GPU when it computes.
    """
    model = _modules_of_first_rank(whole)
    modules = copy.deepcopy(model)  # neither divided nor checkpointed: as they are saved
    if checkpointing:
        apply_activation_checkpointing(model)
    if four_bits:
        apply_quantized_shards(model, offload=offload)
    else:
        apply_fully_sharded(model, offload=offload)
    model.to_empty(device="cpu" if offload else group_device())
    model.tie_weights()  # new tensors took the places of one
    _send_weights(whole, model)
    _send_buffers(whole, model)
    return model, modules


def gathered(model: Any, modules: Any, *, frozen: bool) -> Any:
    """From shards: `modules` with the tensors of `model` in host memory on rank 0, to be saved.

    Args:
        frozen: with what is frozen, too; else those tensors have no data.
    """
    at_rest(model)
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=not frozen
    )
    tensors = get_model_state_dict(model, options=options)  # none on the other ranks
    if not frozen:  # a tied name of a frozen tensor would come along
        trained = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
        tensors = {name: tensor for name, tensor in tensors.items() if name in trained}
    modules.load_state_dict(tensors, strict=False, assign=True)
    modules.tie_weights()
    return modules


def at_rest(model: Any) -> None:
    """Take apart what a forward without a backward has left whole, or it would be no part."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# --- from rank 0 to all ranks ---------------------------------------------------------------------


def _modules_of_first_rank(whole: Any | None) -> Any:
    """The modules of rank 0's model on every rank, with tensors on "meta"."""
    sent = [None]
    if whole is not None:
        without_data = {}
        for tensor in [*whole.parameters(), *whole.buffers()]:
            empty = tensor.detach().to("meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            without_data[id(tensor)] = empty
        # A copy takes what is known already: so no tensor is copied, and tied weights stay tied.
        sent = [copy.deepcopy(whole, without_data)]
    distributed.broadcast_object_list(sent, src=0)
    return sent[0]


def _send_weights(whole: Any | None, model: Any) -> None:
    """Each tensor of the model goes to all ranks, of which each keeps its shard."""
    tensors = {}
    if whole is not None:
        tensors = whole.state_dict()
    # A frozen vocabulary beside layers in 4 bits: each rank has rows of its own.
    tables = {name: each for name, each in model.named_modules() if isinstance(each, CutRows)}
    for name, table in tables.items():
        rows_of_all = table.weight.new_empty(table.vocabulary, table.weight.shape[1])
        table.take(_sent(tensors.pop(f"{name}.weight", None), rows_of_all))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=not tables)
    set_model_state_dict(model, tensors, options=options)


def _send_buffers(whole: Any | None, model: Any) -> None:
    """Buffers are whole beside the shards of every rank. Some are in no state_dict, as RoPE's."""
    buffers = {}
    if whole is not None:
        buffers = dict(whole.named_buffers(remove_duplicate=False))
    for name, empty in list(model.named_buffers(remove_duplicate=False)):
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, _sent(buffers.get(name), empty))


def _sent(tensor: torch.Tensor | None, empty: torch.Tensor) -> torch.Tensor:
    """Rank 0's `tensor` on every rank, before it is sharded: others know its shape from `empty`."""
    found = torch.empty_like(empty, device=group_device())
    if tensor is not None:
        found.copy_(tensor)
    distributed.broadcast(found, src=0)
    return found
