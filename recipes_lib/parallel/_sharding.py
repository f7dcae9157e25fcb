"""What the techniques that copy or divide a model among ranks have in common.

require_new_on_ranks(model)         what must hold before
require_same_weights(model)         each rank keeps its part of its own weights
sharding_options(mesh, …)           precision and place of the parts, for each `fully_shard`
shard_ends(model, …)                embedding and output layer as groups of their own
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.checks import check_choice
from recipes_lib.core.measure import dry
from recipes_lib.core.model.causal_lm import require_causal_lm
from recipes_lib.core.model.fingerprint import fingerprint
from recipes_lib.core.model.marks import GRADIENT_TAKER, any_marked
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.measured_bytes import is_sharded

DTYPES = (None, torch.bfloat16, torch.float32)  # fp16 would need a scaled loss


def require_new_on_ranks(model: Any) -> None:
    """Before sharding: ValueError for no causal LM, one on ranks, or an optimizer in backward."""
    if isinstance(model, DistributedDataParallel) or is_sharded(model):
        raise ValueError(
            "this model is on several ranks already: build it again; for copies of shards, give "
            "apply_fully_sharded a mesh of two dimensions"
        )
    require_causal_lm(model)
    if any_marked(model.parameters(), GRADIENT_TAKER):
        raise ValueError(
            "the optimizer takes gradients in backward, before the ranks average them, and every "
            "rank would train a model of its own: call its remove() first, and use a plain one"
        )


def require_same_weights(model: Any) -> None:
    """Before sharding: ValueError on every rank if the ranks begin with different weights.

    From different ones a model would be put together that no rank ever had, without an error.
    """
    if not dry() and not any(parameter.is_meta for parameter in model.parameters()):
        agree(weights=fingerprint(model.named_parameters()))


def sharding_options(
    mesh: DeviceMesh,
    parameter_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    offload: bool,
) -> dict[str, Any]:
    """What every `fully_shard` of a model gets. Gradients in bf16 are summed in fp32 by default."""
    check_choice(DTYPES, parameter_dtype=parameter_dtype, reduce_dtype=reduce_dtype)
    if reduce_dtype is None and parameter_dtype == torch.bfloat16:
        reduce_dtype = torch.float32
    place = OffloadPolicy()
    if offload:
        # Pinned memory is memory that a GPU reads by itself. Without a GPU there is none.
        place = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    precision = MixedPrecisionPolicy(parameter_dtype, reduce_dtype)
    return {"mesh": mesh, "mp_policy": precision, "offload_policy": place}


def shard_ends(model: Any, *, reshard_after_forward: bool, **options: Any) -> None:
    """For `fully_shard`: groups of the embedding and of the output layer, unless they share."""
    embedding = model.get_input_embeddings()
    output = model.get_output_embeddings()
    if embedding.weight is output.weight:
        return
    fully_shard(embedding, reshard_after_forward=reshard_after_forward, **options)
    embedding.set_unshard_in_backward(False)  # its gradient needs the tokens, and not the table
    # Backward begins with the output layer: taken apart, it would be fetched again at once.
    fully_shard(output, reshard_after_forward=False, **options)
