"""8-bit Adam: the two averages of AdamW in one byte per element each.

Problem    AdamW keeps two fp32 averages per parameter: 8 bytes, twice the fp32 weights themselves.
Idea       Store each average as an 8-bit code and one fp32 scale per block of 256 elements:

               m[i] = scale[i // 256] * table[code[i]]      scale = largest |m| of the block

           A block confines the damage of an outlier to 256 elements. The table is spaced finely
           near zero and coarsely near one, because the averages span many orders of magnitude. A
           step decodes a block, does the usual AdamW update in fp32 and encodes it again.
Saves      6 of 8 bytes per parameter: 2 x (1 + 4/256) = 2.03 stay. Tensors under 4,096 elements
           and embeddings keep their 32 bits: few or sparse gradients make their averages hard to
           encode.
Costs      The update is close to AdamW's, not equal. On a CPU the step takes much longer than
           fused AdamW's and decodes one tensor at a time into fp32: 20 bytes per element of the
           largest, inside an operator, so no account of tensors sees them. With bf16 weights there
           is no fp32 copy: small updates round away, as in plain bf16 AdamW.
Use when   Full fine-tuning, where the states are the largest term of the budget.
Not when   With LoRA, whose states are small; on a CPU that has the memory. `paged=True` helps only
           where long batches spill over a GPU's memory: it moves states to host memory on demand.
In production   `TrainingArguments(optim="adamw_8bit")`, or `"paged_adamw_8bit"`: this same
           optimizer, 32 bits for embeddings included; `optim="adamw_torch_8bit"` is torchao's.
Source     "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861; bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from recipes_lib.core.checks import check_choice
from recipes_lib.core.measure.machine import require
from recipes_lib.core.model.trainable import parameters_to_train

BLOCK = 256  # elements that share one scale
SMALLEST = 4096  # elements: below this a tensor keeps 32-bit states


# --- the idea: what a learner can copy ------------------------------------------------------------


def code_table(*, signed: bool) -> torch.Tensor:
    """The 256 numbers that 8 bits can stand for: seven decades, each with twice as many steps.

    The first average has a sign. The second has none, and takes twice as many steps instead.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        steps = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, steps + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        numbers += middles.tolist()
        if signed:
            numbers += (-middles).tolist()
    return torch.tensor(sorted(numbers))  # [256]


def encode(average: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes and scales of an average [N], where N is a multiple of 256."""
    blocks = average.view(-1, BLOCK)  # [N / 256, 256]
    scales = blocks.abs().amax(dim=1, keepdim=True)  # [N / 256, 1]
    relative = blocks / scales.clamp(min=1e-30)  # from -1 to 1; a block of zeros stays one
    distances = (relative[:, :, None] - table).abs()  # [N / 256, 256, 256]
    return distances.argmin(dim=-1).to(torch.uint8), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The average [N] that `encode` stored in 8 bits."""
    return (scales * table[codes.long()]).flatten()


def plain_eight_bit_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """The whole idea: decode both averages, do a step of AdamW in fp32, encode them again.

    `first` and `second` are [codes, scales, table] of the two averages, and are updated, as
    `weight` [N] is. `step` counts from 1.
    """
    beta1, beta2 = betas
    mean = decode(*first).lerp(gradient, 1 - beta1)  # [N]
    square = decode(*second).lerp(gradient.square(), 1 - beta2)
    spread = (square / (1 - beta2**step)).sqrt()
    weight.mul_(1 - lr * weight_decay)
    weight.sub_(lr * (mean / (1 - beta1**step)) / (spread + eps))
    first[:2] = encode(mean, first[2])
    second[:2] = encode(square, second[2])


# --- the technique --------------------------------------------------------------------------------


def eight_bit_adamw(
    model_or_params: torch.nn.Module | Iterable[Any],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    paged: bool = False,
    embedding_bits: int = 32,
) -> torch.optim.Optimizer:
    """Make an AdamW whose states take 8 bits; use it like any other optimizer, with any model.

    Args:
        model_or_params: a model (its trainable parameters), or parameters or groups of them.
            Embeddings are known only from a model; a group may say `optim_bits` itself, 8 or 32.
        paged: keep the states in memory that moves between GPU and host on demand.
        embedding_bits: 32 or 8, for the embedding and for an output layer tied to it.
    """
    check_choice([8, 32], embedding_bits=embedding_bits)
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    params = model_or_params
    if isinstance(model_or_params, torch.nn.Module):
        params = _groups_of_tables_and_others(model_or_params, embedding_bits)
    optimizer = _bitsandbytes_adamw()(params, min_8bit_size=SMALLEST, is_paged=paged, **options)
    if paged and _has_cpu_parameters(optimizer):
        raise ValueError("paged=True moves states between GPU and host: on a CPU pass paged=False")
    return optimizer


def _groups_of_tables_and_others(
    model: torch.nn.Module, embedding_bits: int
) -> list[dict[str, Any]]:
    """For 8-bit Adam: trainable parameters, those of the embeddings apart, in 32 bits."""
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    trainable = parameters_to_train(model)
    groups = [
        {"params": [p for p in trainable if p not in tables], "optim_bits": 8},
        {"params": [p for p in trainable if p in tables], "optim_bits": embedding_bits},
    ]
    return [group for group in groups if group["params"]]


def _has_cpu_parameters(optimizer: torch.optim.Optimizer) -> bool:
    for group in optimizer.param_groups:
        if any(parameter.device.type == "cpu" for parameter in group["params"]):
            return True
    return False


def _bitsandbytes_adamw() -> type[torch.optim.Optimizer]:
    # The class is made here, because its base class is imported only when it is needed.
    class AdamW8bitByGroup(require("bitsandbytes").optim.AdamW8bit):
        """Reads `optim_bits` from the parameter group.

        The library's own way, `GlobalOptimManager`, is one table per process keyed by position: the
        embedding of one optimizer makes the first parameter of the next one 32-bit, silently.
        """

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            config = super().get_config(gindex, pindex, group)
            return config | {"optim_bits": group.get("optim_bits", 8)}

    return AdamW8bitByGroup
