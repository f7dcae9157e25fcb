"""Pure bf16: weights, gradients and optimizer states in 16 bits, without losing the small updates.

Problem    fp32 training holds 16 bytes per parameter: weight, gradient and AdamW's two averages.
Idea       Store all four in bf16 and compute each step in fp32. The difficulty is the end of the
           step, where the result goes back into 8 significant bits:

               a weight of 1 has the neighbours 0.9961 and 1.0078, and the step asks for 0.9999

               "nearest"      1, every time: small learning rates never move it
               "stochastic"   0.9961 in 1 of 39 steps, else 1: right on average
               "master"       0.9999 in an fp32 copy in the optimizer; the model computes with its
                              rounding, 1

           The same happens to the averages: with beta2 = 0.999 a bf16 `exp_avg_sq` can rise but
           never fall, because 0.1% of it is under half a spacing.
Saves      Bytes per parameter: 16 in fp32 -> 8 ("stochastic", "nearest"); "master" stays at 16. The
           activations are those of a bf16 model in all three.
Costs      On a CPU a stochastic step takes several times as long as fused AdamW's. Each rounding
           adds noise of up to one spacing, 0.4 to 0.8% of the number. With "master" the model sees
           small updates only when they have added up to half a spacing: after a few steps its loss
           is still far above that of fp32.
Use when   Full fine-tuning where weights and states are most of the budget ("stochastic"), or long
           training in bf16 that must lose no update ("master").
Not when   fp32 weights fit: mixed precision rounds no update. With LoRA: adapters are small enough
           for fp32. Under FSDP2, whose sharded parameters it does not take. "nearest" is here to
           show what goes wrong.
In production   torchao `_AdamW(bf16_stochastic_round=True)`, which rounds the averages to nearest;
           fp32 masters in DeepSpeed (`"bf16": {"enabled": true}`) and Megatron (`--bf16`).
           `TrainingArguments(bf16=True)` is mixed precision instead: its weights are fp32.
Source     Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192. Its other rescue is
           Kahan summation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.trainable import parameters_to_train
from recipes_lib.precision._adamw_in_bf16 import ChunkedAdamW, averages

# --- the idea: what a learner can copy ------------------------------------------------------------


@torch.no_grad()
def step_with_masters(
    weights: list[torch.Tensor], masters: list[torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """fp32 masters by hand: `optimizer` is any optimizer of the `masters`, and steps with them.

    The model's bf16 `weights` only make the gradients, and take over the masters' rounding.
    """
    for weight, master in zip(weights, masters):
        master.grad = weight.grad.float()
    optimizer.step()
    for weight, master in zip(weights, masters):
        weight.copy_(master)


# --- the technique --------------------------------------------------------------------------------


def bf16_adamw(
    model_or_params: torch.nn.Module | Iterable[Any],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    rounding: str = "stochastic",
    seed: int | None = None,
) -> torch.optim.Optimizer:
    """Make an AdamW for bf16 weights; use it like any other optimizer, with any model.

    Args:
        model_or_params: a model (its trainable parameters), or parameters or groups of them.
        rounding: "stochastic", "nearest" or "master"; a group may have its own.
        seed: of the random bits; None takes `torch.initial_seed()`. Under DDP it must be the same
            on every rank: replicas that round differently drift apart.
    """
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    params = parameters_to_train(model_or_params)
    return BF16AdamW(params, seed=seed, rounding=rounding, **options)


class BF16AdamW(ChunkedAdamW):
    """What `bf16_adamw` returns.

    The first step with "master" copies the weights into fp32. From then on every step overwrites
    them from that copy, so load other weights before the first step.
    """

    cpu_chunk = 2**17

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for weights that are not in bf16, and for an unknown rounding."""
        check_choice(["stochastic", "nearest", "master"], rounding=group["rounding"])
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.dtype is not torch.bfloat16:
                raise ValueError(
                    f"trainable weights in {parameter.dtype}: call model.to(torch.bfloat16) "
                    f"before this"
                )

    def first_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        if group["rounding"] != "master":
            return averages(parameter, torch.bfloat16)
        return averages(parameter, torch.float32) | {"master": parameter.float().contiguous()}

    def stochastic(self, group: dict[str, Any]) -> list[bool]:
        return [group["rounding"] == "stochastic"] * 3
