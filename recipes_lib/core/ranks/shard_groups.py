"""The groups in which a model is sharded: each is gathered, and taken apart again, as one.

    embedding | block 0 | block 1 | …  | output layer | what is left, with the model itself

An embedding and an output layer that share their weight are in the last group, which PyTorch keeps
whole from forward to backward. Here the groups are made; shard_group_bytes.py counts them.

Ranks that would shard other models, or in another way, are told so before anything is changed:

    agree_to_shard(model, ...)          options, shapes and dtypes, first of all
    require_shardable(model, ...)       what no rank can shard
    require_same_weights(model)         each rank keeps its part of its own weights
    shard_in_groups(model, ...)

Source: PyTorch, torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.measure import dry
from recipes_lib.core.model.causal_lm import decoder_blocks, require_causal_lm
from recipes_lib.core.model.fingerprint import fingerprint
from recipes_lib.core.model.marks import GRADIENT_TAKER, any_marked
from recipes_lib.core.ranks import require_group
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.meshes import require_mesh

DTYPES = (None, torch.bfloat16, torch.float32)  # fp16 would need a scaled loss

# --- sharding -------------------------------------------------------------------------------------


def shard_in_groups(
    model: Any,
    *,
    mesh: DeviceMesh,
    parameter_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    offload: bool = False,
    prefetch: int = 1,
    left_out: Collection[nn.Parameter] = (),
) -> None:
    """Give each group of `model` its own `fully_shard`, those inside first, the model itself last.

    Args:
        mesh: of one dimension; or of two, copies along the first and parts along the second.
        parameter_dtype: in which groups are gathered; None leaves the dtype of the parts.
        reduce_dtype: in which gradients are summed; see `summing_dtype`.
        reshard_after_forward: take a block apart again after its forward.
        offload: keep the parts in host memory.
        prefetch: how many blocks are fetched ahead.
        left_out: parameters of the embedding and the output layer that stay as they are.

    Raises ValueError for a mesh of more than two dimensions.
    """
    require_mesh(mesh)
    if mesh.ndim > 2:
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions: give one, or two, copies first and parts second"
        )
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            parameter_dtype, summing_dtype(parameter_dtype, reduce_dtype)
        ),
        "offload_policy": _offload_policy(offload, mesh),
    }
    blocks = decoder_blocks(model)
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    ends_are_groups = not ties_weights(model) and embedding.weight not in set(left_out)
    if ends_are_groups:
        fully_shard(embedding, reshard_after_forward=reshard_after_forward, **options)
        # The gradient of a table needs the tokens, and not the table.
        embedding.set_unshard_in_backward(False)
        # Backward begins with the output layer: taken apart, it would be fetched again at once.
        fully_shard(head, reshard_after_forward=False, **options)
    fully_shard(model, ignored_params=set(left_out), **options)
    if prefetch > 1:
        _fetch_ahead(blocks, prefetch)


def summing_dtype(
    parameter_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> torch.dtype | None:
    """In which dtype gradients are summed over ranks: as asked, else fp32 for those in bf16.

    None is the dtype in which they are made.
    """
    if reduce_dtype is None and parameter_dtype == torch.bfloat16:
        return torch.float32
    return reduce_dtype


def is_sharded(model: nn.Module) -> bool:
    """Whether a part of `model` is sharded by `fully_shard`."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def ties_weights(model: Any) -> bool:
    """Whether the output layer shares the weight of the embedding, so that one group holds both."""
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _fetch_ahead(blocks: nn.ModuleList, count: int) -> None:
    """Fetch the next `count` blocks in forward, and the `count` blocks before in backward."""
    ordered = list(blocks)
    for index, block in enumerate(ordered):
        block.set_modules_to_forward_prefetch(ordered[index + 1 : index + 1 + count])
        before = ordered[max(0, index - count) : index]
        block.set_modules_to_backward_prefetch(before[::-1])


def _offload_policy(offload: bool, mesh: DeviceMesh) -> OffloadPolicy:
    if not offload:
        return OffloadPolicy()
    # Pinned memory is memory that a GPU reads by itself. Without a GPU there is none.
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")


# --- what has to hold before ----------------------------------------------------------------------


def agree_to_shard(model: Any, **options: Any) -> None:
    """Raise ValueError on every rank if the ranks give other options, or models of other shapes.

    A technique calls it first of all, so that no rank waits for one that has raised. In a dry run
    there is nobody to agree with. Raises ValueError without a process group.
    """
    require_group()
    if not dry():
        agree(model=model, **options)


def require_shardable(
    model: Any,
    *,
    parameter_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    prefetch: int = 1,
) -> None:
    """Raise ValueError for a model, or for options, with which nobody can shard.

    The model may be no causal LM, be sharded already, train several dtypes in one block, or have an
    optimizer that steps in backward. A dtype may be none of DTYPES, and `prefetch` be below 1.
    """
    require_causal_lm(model)
    check_choice(DTYPES, parameter_dtype=parameter_dtype, reduce_dtype=reduce_dtype)
    check_whole(prefetch=prefetch)
    if is_sharded(model):
        raise ValueError("this model is sharded already: build it again to shard it otherwise")
    if any_marked(model.parameters(), GRADIENT_TAKER):
        raise ValueError(
            "the optimizer steps in backward, and holds parameters of which each rank will only "
            "keep a part: call its remove() first, and make a plain optimizer after sharding"
        )
    for number, block in enumerate(decoder_blocks(model)):
        dtypes = {parameter.dtype for parameter in block.parameters() if parameter.requires_grad}
        if len(dtypes) > 1:
            names = ", ".join(sorted(str(dtype) for dtype in dtypes))
            raise ValueError(
                f"block {number} trains weights in {names}, and the gradients of a block are "
                f"summed as one: give all that train one dtype"
            )


def require_same_weights(model: Any) -> None:
    """Raise ValueError on every rank if the ranks begin with different weights.

    Each rank keeps its part of its *own* weights. From different ones a model would be put together
    that no rank ever had, without an error.
    """
    if dry():
        return
    weights = "none yet"
    if not any(parameter.is_meta for parameter in model.parameters()):
        weights = fingerprint(model.named_parameters())
    agree(weights=weights)
