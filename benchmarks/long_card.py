"""docs/long-card.md: does a step of 262,144 tokens of QLoRA on an 8B model fit a card of 24 GB?

python -m benchmarks.long_card    some minutes of one core, no weights and no GPU

The step runs on tensors without data, with every recipe for length, and with the inputs of the
blocks away on the host. With the inputs away, one block after the other needs the same bytes, so
a few blocks have the peak of all 32: `peaks` shows it with one block more. Weights, gradients and
states are arithmetic. `make gpu` runs the same step on a card, in its part `context`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.render import page as from_template
from recipes_lib.attention.flash import apply_flash_attention
from recipes_lib.attention.head_groups import apply_head_groups
from recipes_lib.core.measure import PeakMemory, dry_run, without_data
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import estimate_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.precision.eight_bit_adam import estimate_eight_bit_adam

PAGE = Path(__file__).parents[1] / "docs" / "long-card.md"

SHAPE = "llama-3.1-8b"
TOKENS = 262_144
TILE = 4096
RANK = 16
LEAST_BYTES = 4096  # of what goes to the host
FEW = 3  # blocks of the dry step
CARD = 22.35  # GiB that PyTorch sees of a 24 GB card


def step_bytes(
    *, blocks: int, tokens: int, in_groups: bool, in_flight: int, shape: str = SHAPE
) -> int:
    """Bytes of a step's forward and backward beside weights and states, in bf16.

    Args:
        blocks: of the model; with their inputs away, the peak is that of one block.
        in_groups: let attention work on one group of heads after the other.
        in_flight: as that of `offload_activations`, 0 or 1.
    """
    model = apply_lora(
        model_of_shape(shape, layers=blocks, dtype=torch.bfloat16, device="meta"), rank=RANK
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Beside adapters in fp32 each layer would keep its input in fp32 as well.
            parameter.data = parameter.data.to(torch.bfloat16)
    with dry_run():
        twin = without_data(model).train()
        apply_flash_attention(twin)
        apply_chunked_cross_entropy(twin)
        apply_tiled_mlp(twin, tile_size=min(TILE, tokens), norms=True)
        if in_groups:
            apply_head_groups(twin)
        apply_activation_checkpointing(twin)
        ids = torch.zeros(1, tokens, dtype=torch.long)  # [B, S]
        with PeakMemory() as memory, inputs_away(twin, in_flight=in_flight):
            before = memory.current
            twin(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return memory.peak - before


def fixed_bytes() -> int:
    """Weights in four bits, gradients of the adapters and their 8-bit states, of all blocks."""
    model = model_of_shape(SHAPE, dtype=torch.bfloat16, device="meta")
    shape = Shape(batch=1, seq=FEW)  # none of these bytes depends on the text
    plan = estimate_qlora(budget_of(model, shape), model, shape, rank=RANK)
    plan = estimate_eight_bit_adam(plan, apply_lora(model, rank=RANK), shape)
    return plan.weights + plan.gradients + plan.states


@contextmanager
def inputs_away(model: Any, *, in_flight: int) -> Iterator[None]:
    """As `offload_activations(..., min_bytes=LEAST_BYTES)`, for tensors without data.

    What the blocks save goes away. In backward one storage comes ahead, unless `in_flight` is 0.
    The last block's stays, for backward needs it first.
    """
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    blocks = decoder_blocks(model)
    taking = False
    away: list[tuple[torch.Size, torch.dtype]] = []
    ahead: list[torch.Tensor] = []

    def begin(*_: Any) -> None:
        nonlocal taking
        taking = True

    def end(*_: Any) -> None:
        nonlocal taking
        taking = False

    def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[torch.Size, torch.dtype]:
        stays = not taking or tensor.untyped_storage()._cdata in weights
        if stays or tensor.numel() * tensor.element_size() < LEAST_BYTES:
            return tensor.detach()
        away.append((tensor.shape, tensor.dtype))
        return away[-1]

    def unpack(packed: torch.Tensor | tuple[torch.Size, torch.dtype]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        shape, dtype = packed
        away.pop()
        ahead.clear()
        if away and in_flight > 0:
            next_shape, next_dtype = away[-1]
            ahead.append(torch.empty(next_shape, dtype=next_dtype))
        return torch.empty(shape, dtype=dtype)

    with (
        blocks[0].register_forward_pre_hook(begin),
        blocks[-1].register_forward_pre_hook(end),
        saved_tensors_hooks(pack, unpack),
    ):
        yield


# --- the page -------------------------------------------------------------------------------------

WAYS = {
    ("all heads at once", "fetched ahead"): {"in_groups": False, "in_flight": 1},
    ("in groups", "fetched ahead"): {"in_groups": True, "in_flight": 1},
    ("in groups", "fetched when needed"): {"in_groups": True, "in_flight": 0},
}


def page() -> str:
    """The page: the step with all heads at once, and in groups."""
    steps = {way: step_bytes(blocks=FEW, tokens=TOKENS, **how) for way, how in WAYS.items()}
    last = list(WAYS)[-1]
    one_more = step_bytes(blocks=FEW + 1, tokens=TOKENS, **WAYS[last])
    return from_template(
        "long-card.md.j2",
        rank=RANK,
        tokens=TOKENS,
        tile=TILE,
        card=CARD,
        few=FEW,
        more=one_more / steps[last] - 1,
        steps=steps,
        fixed_bytes=fixed_bytes(),
    )


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
