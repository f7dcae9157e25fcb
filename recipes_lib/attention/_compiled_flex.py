"""FlexAttention, compiled or not at all. Uncompiled it makes all S x S scores, and says nothing.

    mask = compiled_block_mask(reads, None, None, length, length, device=q.device)
    out = compiled_flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

PyTorch compiles it once per mask. After eight masks in a process it gives up, and runs the plain
code from then on: a text that fitted before runs out of memory. `fullgraph=True` makes that an
error, and the limit here is higher. `torch.compiler.reset()` forgets all masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

LIMIT = 128  # masks in a process
BACKEND = "inductor"


def compiled_block_mask(*args: Any, **options: Any) -> Any:
    """What `create_block_mask` makes, without a tensor [S, S] on the way."""
    return _run_flex_compiled(create_block_mask, *args, **options)


def compiled_flex_attention(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """What `flex_attention` computes, as one kernel."""
    _require_bf16(q)
    return _run_flex_compiled(flex_attention, q, *args, **options)


def _require_bf16(q: torch.Tensor) -> None:
    """FlexAttention needs bf16 on the card: where PyTorch emulates it, it runs plain code."""
    if q.device.type != "cuda" or q.dtype is not torch.bfloat16:
        return
    major, minor = torch.cuda.get_device_capability(q.device)
    if major < 8:
        raise ValueError(
            f"a GPU of compute capability {major}.{minor} has no bf16, and PyTorch compiles none "
            f"for it: take torch.float16 or fp32"
        )


@functools.lru_cache
def _compiled_by(function: Callable, backend: str) -> Callable:
    return torch.compile(function, fullgraph=True, backend=backend)


def _run_flex_compiled(function: Callable, *args: Any, **options: Any) -> Any:
    limits = {"recompile_limit": LIMIT, "accumulated_recompile_limit": 2 * LIMIT}
    with torch._dynamo.config.patch(limits):
        return _compiled_by(function, BACKEND)(*args, **options)
