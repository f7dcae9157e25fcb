"""The arithmetic of a fine-tuning step: the techniques' estimates, one after the other.

    plans = estimate_adapters(base, micros, run=settings)          # before the adapters are there
    model = adapt(base, run=settings)
    plan = estimate_finetune(plans, model, micros, run=settings)   # plan.peak: bytes

The micro-batches of a step differ in length. Each has a budget of its own, as if all of the step
were like it, and the step's is the largest of them. It takes two halves, because the adapters'
estimate reads the base, and all that come after it read the layers that the adapters have
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recipes_lib.core.data import Batch
from recipes_lib.core.data.chat import IGNORED
from recipes_lib.core.model.causal_lm import decoder_blocks, projection_widths
from recipes_lib.core.predict.budget import Budget, Shape
from recipes_lib.core.predict.plain_step import budget_of, dry_budget, with_activations_of
from recipes_lib.fine_tuning.completion_only_loss import estimate_completion_only_loss
from recipes_lib.fine_tuning.lora import estimate_lora
from recipes_lib.fine_tuning.qlora import estimate_qlora
from recipes_lib.memory.activation_checkpointing import estimate_activation_checkpointing
from recipes_lib.precision.eight_bit_adam import estimate_eight_bit_adam
from recipes_lib.precision.mixed_precision import estimate_mixed_precision
from recipes_lib.training.gradient_accumulation import estimate_gradient_accumulation
from recipes_lib.training.sequence_packing import estimate_sequence_packing
from recipes_lib.workflows.finetune.settings import PRECISIONS, Settings

ADAPTER_ESTIMATES = {"lora": estimate_lora, "qlora": estimate_qlora}


def estimate_adapters(model: Any, micros: Sequence[Batch], *, run: Settings) -> list[Budget]:
    """First half, on the base `model` before `adapt`: a budget for each micro-batch of a step."""
    plans = []
    for shape in shapes_of(micros):
        # The rows of the whole step in one pass, and then in micro-batches.
        plan = budget_of(model, shape)
        plan = estimate_gradient_accumulation(plan, model, shape)
        if run.method != "full":
            estimate = ADAPTER_ESTIMATES[run.method]
            plan = estimate(
                plan,
                model,
                shape,
                rank=run.rank,
                dropout=run.dropout,
                target_modules=run.target_modules or "all-linear",
            )
        plans.append(plan)
    return plans


def estimate_finetune(
    plans: Sequence[Budget], model: Any, micros: Sequence[Batch], *, run: Settings
) -> Budget:
    """Second half, on the model that `adapt` returned: the budget of the largest micro-batch.

    Args:
        plans: what `estimate_adapters` gave for the same micro-batches.
    """
    done = []
    for plan, shape, micro in zip(plans, shapes_of(micros), micros, strict=True):
        done.append(_with_adapters(plan, model, shape, micro, run=run))
    return max(done, key=lambda plan: plan.peak)


def shapes_of(micros: Sequence[Batch]) -> list[Shape]:
    """For each micro-batch the shape of a step in which all are like it.

    The first one finds no gradients that it would have to carry: it is a step of its own.
    """
    shapes = []
    for number, micro in enumerate(micros):
        rows, length = micro["input_ids"].shape  # [B, S]
        count = 1 if number == 0 else len(micros)
        shapes.append(Shape(batch=rows * count, seq=length, micro_batches=count))
    return shapes


def _with_adapters(
    plan: Budget, model: Any, shape: Shape, micro: Batch, *, run: Settings
) -> Budget:
    """All that changes the budget of one micro-batch after the adapters."""
    dtype = PRECISIONS[run.precision]
    full_precision = model.dtype is torch.float32  # a 16-bit base has 16-bit activations already
    if full_precision:
        plan = estimate_mixed_precision(plan, model, shape, dtype=dtype)
    elif plan.dry is not None and dtype is not torch.float32:
        computing = dry_budget(model, shape.micro(), reason=plan.dry.reason, autocast=dtype)
        plan = with_activations_of(plan, computing)
    # That covers the layers of the base. Under autocast the adapters save other tensors as well.
    if run.method != "full" and run.precision != "fp32" and plan.dry is None:
        plan = _with_autocast_adapters(plan, model, shape, run=run)
    if _has_documents(micro):
        autocast = dtype if full_precision else None
        plan = estimate_sequence_packing(plan, model, shape, dtype=autocast)
    plan = estimate_completion_only_loss(plan, model, shape, targets=_kept_logits(micro))
    # From here on it is the sum of the above that is kept, or not.
    if run.gradient_checkpointing:
        plan = estimate_activation_checkpointing(plan, model, shape)
    if "8bit" in run.optimizer:
        paged = run.optimizer.startswith("paged")
        plan = estimate_eight_bit_adam(plan, model, shape, paged=paged)
    return plan


def _has_documents(micro: Batch) -> bool:
    """Whether a row holds more than one document: one alone needs no mask."""
    if "position_ids" not in micro:
        return False
    # Positions begin at 0 with each document; the first one of a row does not count.
    begins = micro["position_ids"][:, 1:] == 0  # [B, S - 1]
    return bool(begins.any())


def _kept_logits(micro: Batch) -> int:
    """Logits that the completion-only loss computes: of all rows, where one row learns."""
    learnt = micro["labels"][:, 1:] != IGNORED  # [B, S - 1]
    return len(learnt) * int(learnt.any(0).sum())


def _with_autocast_adapters(plan: Budget, model: Any, shape: Shape, *, run: Settings) -> Budget:
    """What autocast changes in the tensors that an adapted `model` saves."""
    if model.dtype is torch.float32:
        change = _autocast_change_of_fp32_base(model, shape.tokens, run=run)
    else:
        change = _autocast_change_of_16_bit_base(model, shape.tokens)
    blocks = len(decoder_blocks(model))
    return plan.change(
        activations=plan.activations + change, one_block=plan.one_block + change // blocks
    )


def _autocast_change_of_fp32_base(model: Any, tokens: int, *, run: Settings) -> int:
    """Bytes that the adapters on an fp32 or 4-bit base save in addition."""
    q, _, feed_forward = projection_widths(model.config)
    per_block = 2 * q  # 16-bit input of the output projection's adapter
    if run.method == "qlora":
        per_block += 6 * feed_forward  # 4-bit layers return fp32
    change = tokens * len(decoder_blocks(model)) * per_block
    if run.dropout:
        # The mask of dropout: a byte per input on a GPU, fp32 on a CPU.
        size = 1 if model.device.type == "cuda" else 4
        inputs = sum(weight.shape[1] for weight in _down_projections(model))
        change += tokens * size * inputs
    return change


def _autocast_change_of_16_bit_base(model: Any, tokens: int) -> int:
    """Bytes that autocast adds and takes away where peft casts the adapters' inputs to fp32.

    They are cast back, to 16 bits; and the adapters' own weights get 16-bit copies.
    """
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    inputs_and_outputs = sum(sum(weight.shape) for weight in _down_projections(model))
    return 2 * trainable - 2 * tokens * inputs_and_outputs


def _down_projections(model: Any) -> list[torch.Tensor]:
    """The weight A [r, in] of each adapter."""
    layers = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    return [layer.lora_A["default"].weight for layer in layers]
