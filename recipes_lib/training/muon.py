"""Muon: every weight matrix of a block moves by the same amount in all of its directions.

Problem    AdamW divides each number of a gradient by its own average. It does not know that the
           numbers form a matrix. The gradient of a matrix has a few large directions (singular
           values) and many small ones, and the small ones hardly train. And AdamW keeps two
           averages: 8 bytes per parameter.
Idea       Keep one average M of the gradients. Before a step set all of its singular values to 1:

               M = U S V^T    becomes    U V^T

           Five rounds of three products of matrices come close to that, without computing U, S
           or V. They are steps of Newton and Schulz, with a polynomial of degree 5 in each:

               X = M / |M|
               X = a X + b (X X^T) X + c (X X^T)^2 X      five times

           Its singular values end between about 0.7 and 1.2. A step of such a matrix [m, n] is
           multiplied by 0.2 sqrt(max(m, n)): its numbers are then as large as those of AdamW, and
           a learning rate and a weight decay that were found for AdamW can be used.
           Only the matrices of the linear layers in the blocks are trained so. Embedding, output
           layer, norms and biases are trained by AdamW, in the same optimizer.
Saves      4 of the 8 bytes of states per parameter of these matrices.
Costs      The products of matrices in each step, in bf16. They do not depend on the number of
           tokens: with few tokens per step they are a large share of it. A layer that computes Q, K
           and V at once is one matrix here.
Use when   Pretraining and long training of whole models with many tokens per step.
Not when   With LoRA: its pairs of matrices are left to AdamW, and the states are small. With
           sharded parameters (FSDP2): each rank has only a part of a matrix. For fine-tuning a
           model that AdamW has pretrained measure first: Moonshot's report finds no advantage
           there.
In production   `torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")` beside a
           `torch.optim.AdamW` for the rest.
Source     Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024; the
           scale: Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.adamw import adamw

from recipes_lib.core.checks import check_choice, check_flag, check_number, check_whole
from recipes_lib.core.model.causal_lm import decoder_blocks, require_causal_lm
from recipes_lib.core.model.trainable import check_adamw, parameters_to_train
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import require_adapters

MATRICES = "matrices"  # the kind of a group that Muon trains
REST = "rest"  # and of one that AdamW trains
SCALES = ("match_rms_adamw", "original")

# --- the idea: what a learner can copy ------------------------------------------------------------


def orthogonalized(matrix: torch.Tensor, *, steps: int = 5) -> torch.Tensor:
    """The matrix [m, n] with all singular values near 1, computed in bf16."""
    x = matrix.bfloat16()
    tall = len(x) > x.shape[1]
    if tall:
        x = x.T  # X X^T is then the smaller of the two squares
    x = x / x.norm().clamp(min=1e-7)  # no singular value is above 1
    for _ in range(steps):
        square = x @ x.T
        factor = torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, factor, x, beta=3.4445)  # 3.4445 x + factor @ x
    if tall:
        x = x.T
    return x


def scale_of(shape: Iterable[int], *, adjust_lr_fn: str = "match_rms_adamw") -> float:
    """By what the step of a matrix [m, n] is multiplied, beside the learning rate."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * max(rows, columns) ** 0.5
    return max(1, rows / columns) ** 0.5


# --- the technique --------------------------------------------------------------------------------


def muon_adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    adjust_lr_fn: str = "match_rms_adamw",
    rest_lr: float | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Make an optimizer for a causal LM: Muon for the blocks' matrices, and AdamW for the rest.

    Use it like any other optimizer. Its first group are the matrices, its second one is the rest.

    Args:
        model: a Hugging Face causal LM; frozen parameters are left out.
        momentum: of the average of the matrices' gradients.
        nesterov: whether the step looks ahead: the gradient counts once more beside the average.
        steps: of Newton and Schulz.
        adjust_lr_fn: "match_rms_adamw" for learning rates as AdamW has them, or "original" for
            those of Keller Jordan, as in `torch.optim.Muon`.
        rest_lr: the learning rate of the rest; None takes `lr`.
        betas, eps: of the AdamW for the rest.
    Raises ValueError for trainable parameters that are not fp32 or are sharded, for a model whose
    blocks have no trainable matrix, for "original" with layers that store [inputs, outputs], and
    for numbers outside their bounds. The step raises one for sparse gradients.
    """
    check_flag(nesterov=nesterov)
    if rest_lr is None:
        rest_lr = lr
    split = split_for_muon(model)
    check_choice(SCALES, adjust_lr_fn=adjust_lr_fn)
    _check_orientation(model, split.matrices, adjust_lr_fn)
    groups = [
        {
            "params": split.matrices,
            "kind": MATRICES,
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "steps": steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
    ]
    if split.rest:
        groups.append(
            {
                "params": split.rest,
                "kind": REST,
                "lr": rest_lr,
                "weight_decay": weight_decay,
                "betas": betas,
                "eps": eps,
            }
        )
    return MuonAdamW(groups)


class Split(NamedTuple):
    """The trainable parameters of a model, each in one of the two."""

    matrices: list[nn.Parameter]  # [m, n] each, for Muon
    rest: list[nn.Parameter]  # for AdamW


def split_for_muon(model: nn.Module) -> Split:
    """Which trainable parameters Muon trains: the weights of the linear layers in the blocks.

    Everything else is the rest: embedding and output layer, tied or not, norms, biases,
    convolutions, experts that are stored in one tensor, and LoRA's matrices. `torch.optim.Muon`
    and `torch.optim.AdamW` can take the two. Raises ValueError for what is no causal LM, and if
    there is no matrix.
    """
    require_causal_lm(model)
    trainable = list(parameters_to_train(model))
    in_blocks = _matrices_of_blocks(model)
    matrices = [parameter for parameter in trainable if id(parameter) in in_blocks]
    rest = [parameter for parameter in trainable if id(parameter) not in in_blocks]
    if not matrices:
        raise ValueError(
            f"the blocks of this {type(model).__name__} have no trainable matrix for Muon "
            f"(LoRA's are left to AdamW): use torch.optim.AdamW, or set requires_grad before"
        )
    return Split(matrices, rest)


class MuonAdamW(torch.optim.Optimizer):
    """What `muon_adamw` returns. Each group has a kind, which says how it is trained."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with all options of their kind; raises ValueError as `muon_adamw`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with_gradient = [each for each in group["params"] if each.grad is not None]
            for parameter in with_gradient:
                _check_gradient(parameter)
            if group["kind"] == REST:
                self._update_rest(with_gradient, group)
                continue
            for parameter in with_gradient:
                self._update_matrix(parameter, group)
        return loss

    def _update_matrix(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        """One step of Muon for a matrix [m, n]."""
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad)
        average = state["momentum_buffer"]
        average.lerp_(weight.grad, 1 - group["momentum"])
        direction = average
        if group["nesterov"]:
            direction = weight.grad.lerp(average, group["momentum"])
        update = orthogonalized(direction, steps=group["steps"])
        scale = scale_of(weight.shape, adjust_lr_fn=group["adjust_lr_fn"])
        lr = float(group["lr"])
        weight.mul_(1 - lr * group["weight_decay"])
        weight.add_(update, alpha=-lr * scale)

    def _update_rest(self, weights: list[torch.Tensor], group: dict[str, Any]) -> None:
        """One step of PyTorch's fused AdamW."""
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                state["exp_avg"] = torch.zeros_like(weight)
                state["exp_avg_sq"] = torch.zeros_like(weight)
        states = [self.state[weight] for weight in weights]
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            [weight.grad for weight in weights],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict()`. Raises ValueError if that is of another optimizer."""
        kinds = [group.get("kind") for group in state_dict["param_groups"]]
        if kinds != [group["kind"] for group in self.param_groups]:
            raise ValueError(
                "the checkpoint is that of another optimizer: load it with the one that saved it"
            )
        super().load_state_dict(state_dict)


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _matrices_of_blocks(model: nn.Module) -> set[int]:
    """The ids of the weights of linear layers in the blocks, LoRA's and shared ones left out."""
    found = set()
    for name, module in decoder_blocks(model).named_modules():
        if "lora_" not in name and (isinstance(module, nn.Linear) or _is_conv1d(module)):
            found.add(id(module.weight))
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        found.discard(id(layer.weight))
    return found


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer, whose weight is [inputs, outputs]."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def _check_orientation(model: nn.Module, matrices: list[nn.Parameter], adjust_lr_fn: str) -> None:
    """The original scale divides outputs by inputs. Of Conv1D it would take the inverse."""
    if adjust_lr_fn != "original":
        return
    ids = {id(matrix) for matrix in matrices}
    turned = [each for each in model.modules() if _is_conv1d(each) and id(each.weight) in ids]
    if turned:
        raise ValueError(
            'adjust_lr_fn="original" takes weights as [outputs, inputs], and those of Conv1D are '
            '[inputs, outputs]: choose "match_rms_adamw", which is the same for both'
        )


def _check_group(group: dict[str, Any]) -> None:
    check_choice((MATRICES, REST), kind=group.get("kind"))
    needed = {"lr", "weight_decay", "betas", "eps"}
    if group["kind"] == MATRICES:
        needed = {"lr", "weight_decay", "momentum", "nesterov", "steps", "adjust_lr_fn"}
    missing = sorted(needed - group.keys())
    if missing:
        raise ValueError(f"a group of the kind {group['kind']!r} needs {', '.join(missing)}, too")
    if group["kind"] == REST:
        check_adamw(**{name: group[name] for name in needed})
    else:
        _check_muon(group)
    _check_parameters(group["params"])


def _check_muon(group: dict[str, Any]) -> None:
    check_adamw(lr=group["lr"], weight_decay=group["weight_decay"])
    check_number(least=0, below=1, momentum=group["momentum"])
    check_flag(nesterov=group["nesterov"])
    check_whole(steps=group["steps"], least=1, most=99)
    check_choice(SCALES, adjust_lr_fn=group["adjust_lr_fn"])
    for parameter in group["params"]:
        if parameter.dim() != 2:
            raise ValueError(
                f"a parameter of the shape {[*parameter.shape]}: Muon trains matrices, "
                f"give it to a group of the kind {REST!r}"
            )


def _check_parameters(parameters: Iterable[torch.Tensor]) -> None:
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if any(hasattr(parameter, "device_mesh") for parameter in trainable):
        raise ValueError(
            "sharded parameters (DTensor): give whole ones, or use torch.optim.AdamW under FSDP2"
        )
    wrong = {str(p.dtype) for p in trainable if p.dtype is not torch.float32}
    if wrong:
        raise ValueError(
            f"trainable weights in {', '.join(sorted(wrong))}: call model.float() before this, "
            f"since bf16 rounds small steps away"
        )


def _check_gradient(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    if gradient.layout != torch.strided or gradient.dtype is not torch.float32:
        raise ValueError(
            f"a gradient in {gradient.dtype}, {gradient.layout}: give a dense one in fp32 "
            f"(an embedding with sparse=False)"
        )


# --- the arithmetic -------------------------------------------------------------------------------


@estimate(Order.STATES)
def estimate_muon(budget: Budget, model: Any, shape: Shape) -> Budget:
    """One average per matrix of the blocks, two for the rest; and what the largest matrix needs.

    Raises ValueError as `muon_adamw` does.
    """
    require_adapters(budget, model)
    split = split_for_muon(model)
    _check_parameters([*split.matrices, *split.rest])
    # The products exist beside all gradients, and so do the embedding's copies in backward. The
    # budget has one term for both.
    in_step = predicted_step_bytes(model)
    return budget.change(
        states=predicted_state_bytes(model),
        embedding_gradient=max(budget.embedding_gradient, in_step),
    )


def predicted_state_bytes(model: nn.Module) -> int:
    """Bytes of the states once they exist: 4 per number of a matrix; 8 of the rest, and a count."""
    split = split_for_muon(model)
    in_matrices = sum(matrix.numel() for matrix in split.matrices)
    in_rest = sum(parameter.numel() for parameter in split.rest)
    return 4 * in_matrices + 8 * in_rest + 4 * len(split.rest)


def predicted_step_bytes(model: nn.Module) -> int:
    """Bytes that the step of the largest matrix needs, with Nesterov's momentum.

    The direction is in fp32. X before and after a step of Newton and Schulz is in bf16, and so are
    two squares of the shorter side.
    """
    needed = []
    for matrix in split_for_muon(model).matrices:
        needed.append(8 * matrix.numel() + 4 * min(matrix.shape) ** 2)
    return max(needed)
