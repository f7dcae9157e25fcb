"""Models of the Llama family for programs that have a Llama of their own: llama.cpp, ExecuTorch.

Such a program gets weights and settings. What it computes is written in the program: another
activation, other angles or a window make a file that runs, and talks nonsense.

Shapes: K inputs of a layer, D of a head, H heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.causal_lm import (
    FULL_ATTENTIONS,
    require_causal_lm,
    without_adapters,
)


def require_llama(model: Any, *, families: tuple[str, ...], rope_types: tuple[str, ...]) -> None:
    """Raise ValueError where the program's Llama has to compute something else than `model`."""
    require_causal_lm(model)
    config = without_adapters(model).config
    check_choice(families, model_type=config.model_type)
    check_choice(("silu",), hidden_act=config.hidden_act)
    check_choice(rope_types, rope_type=config.rope_parameters["rope_type"])
    # An attention that a technique has put into the model lives in Python, and in no file.
    kernel = str(config._attn_implementation)
    if not any(part in kernel for part in FULL_ATTENTIONS):
        raise ValueError(
            f"the model computes its attention by {kernel!r}, and the file would hold full "
            f'attention: call model.set_attn_implementation("sdpa") first'
        )


def in_pairs(weight: Tensor, *, head_dim: int) -> Tensor:
    """The rows of a Llama's query or key [N, K], or its bias [N], as these programs turn them."""
    shape = weight.shape
    halves = weight.reshape(-1, 2, head_dim // 2, *shape[1:])  # [H, 2, D/2, K]
    return halves.transpose(1, 2).reshape(shape).contiguous()


def head_width(config: Any) -> int:
    """D, the numbers of a Llama's head."""
    given = getattr(config, "head_dim", None)
    if given is not None:
        return given
    return config.hidden_size // config.num_attention_heads
