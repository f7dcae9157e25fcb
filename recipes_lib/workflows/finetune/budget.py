"""The arithmetic of a fine-tuning step: the techniques' estimates, one after the other, for its largest micro-batch.

plans = estimate_adapters(model, micros, run=settings)          # of the base, before the adapters
model = adapt(model, run=settings)
plan = estimate_finetune(plans, model, micros, run=settings)    # plan.peak: bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.causal_lm import decoder_blocks, projection_widths
from recipes_lib.core.data import IGNORED
from recipes_lib.core.plain_step import budget_of
from recipes_lib.fine_tuning.completion_only_loss import estimate_completion_only_loss
from recipes_lib.fine_tuning.lora import estimate_lora
from recipes_lib.fine_tuning.qlora import estimate_qlora
from recipes_lib.memory.activation_checkpointing import estimate_activation_checkpointing
from recipes_lib.precision.eight_bit_adam import estimate_eight_bit_adam
from recipes_lib.precision.mixed_precision import estimate_mixed_precision
from recipes_lib.training.gradient_accumulation import estimate_gradient_accumulation
from recipes_lib.training.sequence_packing import estimate_packed_attention
from recipes_lib.workflows.finetune.settings import Settings

Batch = dict[str, torch.Tensor]
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def estimate_adapters(model: Any, micros: Sequence[Batch], *, run: Settings) -> list[Budget]:
    """First half of the arithmetic, on the base `model` before `adapt`: a budget for each micro-batch of a step, as
    if all were like it."""
    plans = []
    for number, micro in enumerate(micros):
        sizes = _sizes(micro, times=len(micros) if number else 1)
        plan = budget_of(model, **sizes)
        if run.method != "full":
            sizes |= {
                "rank": run.rank,
                "dropout": run.dropout,
                "target_modules": run.target_modules or "all-linear",
            }
            plan = (estimate_qlora if run.method == "qlora" else estimate_lora)(
                plan, model, **sizes
            )
        plans.append(plan)
    return plans


def estimate_finetune(
    plans: Sequence[Budget], model: Any, micros: Sequence[Batch], *, run: Settings
) -> Budget:
    """Second half, on the model that `adapt` returned: the budget of a step, which is that of its largest micro-batch.

    `plans` are those of `estimate_adapters`. The first micro-batch finds no gradients that it would have to carry.
    """
    dtype, done = PRECISIONS[run.precision], []
    for number, (plan, micro) in enumerate(zip(plans, micros, strict=True)):
        k, part = len(micros) if number else 1, _sizes(micro)
        plan = estimate_gradient_accumulation(
            plan, model, **_sizes(micro, times=k), micro_batches=k
        )
        if model.dtype is torch.float32:  # a 16-bit base has 16-bit activations already
            plan = estimate_mixed_precision(plan, model, **part, dtype=dtype)
        if run.method != "full" and run.precision != "fp32":
            plan = _autocast_adapters(plan, model, run=run, tokens=micro["input_ids"].numel())
        kept = int((micro["labels"][:, 1:] != IGNORED).any(0).sum())
        plan = estimate_completion_only_loss(plan, model, targets=part["batch_size"] * kept)
        if (
            "position_ids" in micro and (micro["position_ids"][:, 1:] == 0).any()
        ):  # one document needs no mask
            autocast = dtype if model.dtype is torch.float32 else None
            plan = estimate_packed_attention(plan, model, **part, dtype=autocast)
        if "8bit" in run.optimizer:
            plan = estimate_eight_bit_adam(plan, model)
        if run.gradient_checkpointing:
            plan = estimate_activation_checkpointing(plan, model, **part)
        done.append(plan)
    return max(done, key=lambda plan: plan.peak)


def _autocast_adapters(plan: Budget, model: Any, *, run: Settings, tokens: int) -> Budget:
    """What autocast changes in the tensors that an adapted `model` saves."""
    blocks = len(decoder_blocks(model))
    down = [
        layer.lora_A["default"].weight for layer in model.modules() if hasattr(layer, "lora_A")
    ]  # [r, in]
    if (
        model.dtype is torch.float32
    ):  # 16-bit input of the output layer's adapter; 4-bit layers return fp32
        q, _, ff = projection_widths(model.config)
        mask = bool(run.dropout) * (1 if model.device.type == "cuda" else 4)  # of fp32 inputs
        change = tokens * (
            blocks * (2 * q + 6 * ff * (run.method == "qlora"))
            + mask * sum(w.shape[1] for w in down)
        )
    else:  # the inputs that peft casts to fp32 are cast back
        trainable = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
        change = 2 * trainable - 2 * tokens * sum(sum(weight.shape) for weight in down)
    return plan.change(
        activations=plan.activations + change, one_block=plan.one_block + change // blocks
    )


def _sizes(micro: Batch, *, times: int = 1) -> dict[str, int]:
    rows, length = micro["input_ids"].shape
    return {"batch_size": rows * times, "seq_len": length}
