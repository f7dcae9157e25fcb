"""Muon: every weight matrix of a block moves by the same amount in all of its directions.

Problem    AdamW divides each number of a gradient by its own average. It does not know that they
           form a matrix, whose gradient has a few large directions (singular values) and many small
           ones that hardly train. And it keeps two averages: 8 bytes per parameter.
Idea       Keep one average M of the gradients. Before a step set all of its singular values to 1:

               M = U S V^T    becomes    U V^T

           Five rounds of three products of matrices come close to that (Newton and Schulz): the
           singular values end between about 0.7 and 1.2. A step of a matrix [m, n] is multiplied
           by 0.2 sqrt(max(m, n)). Its numbers are then as large as those of AdamW, and so a
           learning rate and a weight decay that were found for AdamW can be used.
           Only the matrices of the linear layers in the blocks are trained so. Embedding, output
           layer, norms and biases are trained by AdamW, in the same optimizer.
Saves      4 of the 8 bytes of states per parameter of these matrices.
Costs      The products of matrices in each step, in bf16. They do not depend on the number of
           tokens: with few tokens per step they are a large share of it. A layer that computes Q, K
           and V at once is one matrix here.
Use when   Pretraining and long training of whole models with many tokens per step.
Not when   With LoRA: its pairs of matrices are left to AdamW, and the states are small. With
           sharded parameters (FSDP2): each rank has only a part of a matrix. For fine-tuning a
           model that AdamW has pretrained measure first: Moonshot's report finds no advantage.
In production   `torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")` beside a
           `torch.optim.AdamW` for the rest, as below.
Source     Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024; the
           scale: Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recipes_lib.core.model.causal_lm import decoder_blocks, require_causal_lm
from recipes_lib.core.model.linears import is_linear
from recipes_lib.core.model.trainable import parameters_to_train, require_whole_fp32

# --- the idea: what a learner can copy ------------------------------------------------------------


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Muon's step: the matrix [m, n] with all singular values near 1, computed in bf16."""
    x = matrix.bfloat16()
    tall = len(x) > x.shape[1]
    if tall:
        x = x.T  # X X^T is then the smaller of the two squares
    x = x / x.norm().clamp(min=1e-7)  # no singular value is above 1
    for _ in range(5):
        square = x @ x.T
        factor = torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, factor, x, beta=3.4445)  # 3.4445 x + factor @ x
    if tall:
        x = x.T
    return x


# --- the technique --------------------------------------------------------------------------------


def muon_adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
) -> torch.optim.Optimizer:
    """Make an optimizer for a causal LM: Muon for the blocks' matrices, and AdamW for the rest."""
    matrices, rest = split_for_muon(model)
    require_whole_fp32([*matrices, *rest])
    muon = torch.optim.Muon(
        matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    if not rest:
        return muon
    adamw = torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay, betas=betas, fused=True)
    return InOne([muon, adamw])


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable weights of the linear layers in the blocks, for Muon, and all others."""
    require_causal_lm(model)
    in_blocks = _matrices_of_blocks(model)
    matrices = []
    rest = []
    for parameter in parameters_to_train(model):
        part = matrices if id(parameter) in in_blocks else rest
        part.append(parameter)
    if not matrices:
        raise ValueError(
            f"the blocks of this {type(model).__name__} have no trainable matrix for Muon "
            f"(LoRA's are left to AdamW): use torch.optim.AdamW, or set requires_grad before"
        )
    return matrices, rest


def _matrices_of_blocks(model: nn.Module) -> set[int]:
    """For Muon: the ids of the weights of linear layers in blocks, LoRA's and shared ones out."""
    found = set()
    for name, module in decoder_blocks(model).named_modules():
        if "lora_" not in name and is_linear(module):
            found.add(id(module.weight))
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        found.discard(id(layer.weight))
    return found


class InOne(torch.optim.Optimizer):
    """Muon and AdamW as one, with a group each: for schedules, checkpoints and loops."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of Muon and of AdamW; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self.parts, self.param_groups, strict=True):
            # Loading a checkpoint replaces groups and states: the parts take over what is here.
            part.param_groups = [group]
            part.state = self.state
            part.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and pickle take along."""
        return super().__getstate__() | {"parts": self.parts}
