"""16-bit AdamW states: the weights stay fp32, and each of the two averages takes two bytes.

Problem    AdamW keeps two fp32 averages per parameter: 8 bytes, twice the fp32 weights themselves.
Idea       Store both averages in bf16, and compute each step in fp32 as before. The difficulty is
           that bf16 has 8 significant bits. A number keeps its value unless the step changes it by
           more than half a spacing, and that is 0.2 to 0.4% of the number:

                                gradients of 0 take off    rounded to nearest
               exp_avg          1 - beta1 = 10%            it follows the gradients
               exp_avg_sq       1 - beta2 = 0.1%           it never falls: 0.999 rounds to 1

           An average that cannot fall keeps the largest gradients of the past, and the weights
           move too little for ever. So `exp_avg_sq` is rounded stochastically, which is right on
           average. `exp_avg` is rounded to nearest. The rule is the change that a step makes: an
           average with a beta of more than 0.9 is rounded stochastically.
Saves      4 of the 16 bytes per parameter that weight, gradient and two fp32 averages take.
Costs      The update is close to AdamW's, not equal. `exp_avg` may stop up to 4% short of a
           gradient that stays the same. `exp_avg_sq` has a random error with a standard deviation
           of some 5% at beta2 = 0.999, half of that after the root. A step on a CPU takes two to
           three times as long as fused AdamW's. Only a chunk is in fp32 at a time.
Use when   Full fine-tuning in fp32 or with mixed precision, where the states are a large term and
           8 bits are slow or not precise enough. It needs no library.
Not when   With LoRA, whose states are small. Where 8-bit states do: they save 6 bytes instead of
           4. Under FSDP2, whose sharded parameters it does not take.
In production   torchtitan `--optimizer.implementation fused_opt_states_bf16`: PyTorch's fused AdamW
           on CUDA with states made in bf16 before the first step; Megatron
           `--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16`.
           torchtitan's documentation mentions no stochastic rounding.
Source     DeepSeek-V3 technical report, arXiv 2412.19437, section 3.3.2: both averages in bf16.
           Stochastic rounding: Zamirai et al., arXiv 2010.06192.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from recipes_lib.core.model.trainable import parameters_to_train, require_whole_fp32
from recipes_lib.precision._adamw_in_bf16 import ChunkedAdamW, averages, stochastic_round

# Up to this beta, a step changes an average by 10% of what is new in it. That is 25 times half a
# spacing of bf16, and rounding to nearest loses little.
NEAREST_UP_TO = 0.9

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_sixteen_bit_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    bits: torch.Tensor,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """The whole idea: a step of AdamW in fp32 with averages that are stored in bf16.

    `weight` and `gradient` are fp32 [N], `exp_avg` and `exp_avg_sq` bf16 [N]; `bits` int32 [N] are
    random numbers below 2**16, new in every step; `step` counts from 1.
    """
    beta1, beta2 = betas
    mean = beta1 * exp_avg.float() + (1 - beta1) * gradient  # [N], in fp32
    square = beta2 * exp_avg_sq.float() + (1 - beta2) * gradient**2
    spread = (square / (1 - beta2**step)).sqrt()
    weight.mul_(1 - lr * weight_decay)
    weight.sub_(lr * (mean / (1 - beta1**step)) / (spread + eps))
    exp_avg.copy_(mean)  # to the nearest
    exp_avg_sq.copy_(stochastic_round(square, bits))  # to a neighbour, right on average


# --- the technique --------------------------------------------------------------------------------


def sixteen_bit_adamw(
    model_or_params: torch.nn.Module | Iterable[Any],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    seed: int | None = None,
) -> torch.optim.Optimizer:
    """Make an AdamW whose states take 16 bits; use it like any other optimizer, with any model.

    Args:
        model_or_params: a model (its trainable parameters), or parameters or groups of them.
        seed: of the random bits; None takes `torch.initial_seed()`. Under DDP it must be the same
            on every rank: replicas that round differently drift apart.
    """
    params = parameters_to_train(model_or_params)
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return SixteenBitAdamW(params, seed=seed, **options)


class SixteenBitAdamW(ChunkedAdamW):
    """What `sixteen_bit_adamw` returns."""

    cpu_chunk = 2**20

    def check_group(self, group: dict[str, Any]) -> None:
        require_whole_fp32(group["params"])

    def first_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return averages(parameter, torch.bfloat16)

    def stochastic(self, group: dict[str, Any]) -> list[bool]:
        return [False, *(beta > NEAREST_UP_TO for beta in group["betas"])]
