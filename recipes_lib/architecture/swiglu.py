"""SwiGLU: a feed-forward layer with a gate, at the same number of weights.

Problem    A feed-forward layer has one way into its wide middle, and a fixed function decides what
           passes: max(0, x) or GELU.
Idea       A second projection decides. Each feature of the middle is a product of two:

               GELU      y = gelu(x W1) W2                  2 x D x F weights
               SwiGLU    y = (silu(x G) * (x U)) W2         3 x D x F weights

           Three matrices instead of two: with two thirds of the width both have equally many.
Saves      Nothing at equal weights. It is meant to reach a lower loss for the same weights and
           tokens; the gain is small, and a comparison needs several seeds.
Costs      The weights of all feed-forward layers are fresh: the model is trained from the start.
           One product of two tensors [T, F] more, and four saved ones instead of two or three.
Use when   A new model is designed: Llama, Mistral, Qwen and most others have it.
Not when   The model is trained already: its feed-forward layers would be lost. To make one smaller,
           distil it. Blocks without an MLP of two projections of its own: mixtures, OPT, Bloom.
In production   `LlamaMLP` of transformers with `hidden_act="silu"`; Liger `LigerSwiGLUMLP` computes
           silu and the product in one kernel; vLLM keeps both first matrices as one.
Source     Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202); the two thirds are its
           section 3.

Shapes: T tokens, D hidden, F width of the middle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.model.causal_lm import decoder_blocks, without_adapters
from recipes_lib.core.model.linears import features, is_linear
from recipes_lib.core.model.probe import proves

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x [T, D], gate and up [F, D], down [D, F] -> [T, D]; the weights as `nn.Linear` has them."""
    opened = x @ gate.T  # [T, F]
    opened = opened * torch.sigmoid(opened)  # silu
    middle = opened * (x @ up.T)  # [T, F]
    return middle @ down.T  # [T, D]


# --- the technique --------------------------------------------------------------------------------


@proves("changes")
def apply_swiglu(model: Any) -> Any:
    """Replace the MLP of every block by a SwiGLU with fresh weights, in place; returns `model`.

    They are as many as the MLP had, drawn with the spread of those that they replace. Biases and
    dropout stay. The class of the model does not know the weights that `save_pretrained` writes:
    build the model from its configuration, apply this, and load the state dict.
    """
    causal = without_adapters(model)
    loaded_from = getattr(causal.config, "_name_or_path", "")
    if loaded_from:
        raise ValueError(
            f"the model was loaded from {loaded_from!r}, and a SwiGLU starts with fresh weights: "
            f"build the model from its configuration"
        )
    for block in decoder_blocks(causal):
        name = _name_of_mlp(block)
        swiglu = _swiglu_like(getattr(block, name))
        setattr(block, name, swiglu)
    return model


class SwiGLU(nn.Module):
    """A feed-forward layer with a gate. Its parts have the names that Llama gives them."""

    def __init__(
        self, hidden: int, width: int, *, bias: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.silu(self.gate_proj(x))  # [..., F]
        middle = gate * self.up_proj(x)  # [..., F]
        return self.dropout(self.down_proj(middle))


def matched_width(hidden: int, width: int, *, bias: bool = False) -> int:
    """F of the SwiGLU that has as many weights as an MLP of this width, or nearly: 2/3 of it."""
    wanted = predicted_parameters(hidden, width, gated=False, bias=bias)
    beside = hidden if bias else 0  # the bias at the end, of any F
    of_one_feature = predicted_parameters(hidden, 1, gated=True, bias=bias) - beside
    return max(1, round((wanted - beside) / of_one_feature))


@torch.no_grad()
def _swiglu_like(mlp: nn.Module) -> SwiGLU:
    """A fresh SwiGLU for the place of an MLP, with as many weights and their spread."""
    first, last = _projections(mlp)
    hidden, middle = features(first)
    bias = first.bias is not None
    width = matched_width(hidden, middle, bias=bias)
    swiglu = SwiGLU(hidden, width, bias=bias, dropout=_dropout_of_mlp(mlp))
    spreads = {
        swiglu.gate_proj: first.weight.std().item(),
        swiglu.up_proj: first.weight.std().item(),
        swiglu.down_proj: last.weight.std().item(),
    }
    for linear, spread in spreads.items():
        nn.init.normal_(linear.weight, std=spread)
        if bias:
            nn.init.zeros_(linear.bias)
    return swiglu.to(device=first.weight.device, dtype=first.weight.dtype).train(mlp.training)


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _name_of_mlp(block: nn.Module) -> str:
    """The part of a block that SwiGLU replaces: from D to F and back, in two projections."""
    for name, part in block.named_children():
        if _projections(part):
            return name
    raise ValueError(
        f"{type(block).__name__} has no MLP of two projections: one with a gate is a SwiGLU "
        f"already, and experts, or projections in the block itself, are not replaced"
    )


def _projections(part: nn.Module) -> list[nn.Module]:
    """The two projections of an MLP that a SwiGLU can replace; empty for anything else."""
    linears = [module for module in part.modules() if is_linear(module)]
    if len(linears) != 2:
        return []
    (hidden, width), (width_again, hidden_again) = [features(linear) for linear in linears]
    # The projections of attention go from D to 3 D, and from D to D.
    if hidden != hidden_again or width != width_again or hidden == width:
        return []
    return linears


def _dropout_of_mlp(mlp: nn.Module) -> float:
    inside = [module.p for module in mlp.modules() if isinstance(module, nn.Dropout)]
    if inside:
        return inside[-1]
    return getattr(mlp, "residual_dropout", 0.0)  # StarCoder 2 keeps the number


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_parameters(hidden: int, width: int, *, gated: bool, bias: bool = False) -> int:
    """Weights of one feed-forward layer: 2 D F, or 3 D F with a gate, and the biases."""
    first_projections = 2 if gated else 1
    weights = (first_projections + 1) * hidden * width
    if bias:
        weights += first_projections * width + hidden
    return weights
