"""QLoRA on sharded 4-bit weights, for a model of any size: the memory of one rank, without a GPU.

    predicted = dry_quantized_rank("llama-3.1-70b", ranks=2, rows=1, seq=1024)
    predicted.peak / 2**30
    beside_parts(predicted)     # what is left on the device with offload

Shapes are enough for that: no weight is drawn, quantized or sent (`core.predict`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recipes_lib.core.measure.machine import require
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.predict import Prediction, predict
from recipes_lib.core.ranks.weighted_step import sum_of_losses
from recipes_lib.parallel.quantized_shards import apply_quantized_shards
from recipes_lib.parallel.quantized_shards.nf4_linear import nf4_linear_like

RANK = 16  # of an adapter on every linear layer of the blocks
AT_REST = ("weights", "gradients", "states")  # in parts, which offload keeps on the host


def dry_quantized_rank(
    shape: str,
    *,
    ranks: int,
    rows: int,
    seq: int,
    layers: int | None = None,
) -> Prediction:
    """Rank 0 of `ranks` in a step of QLoRA with AdamW in bf16, every block checkpointed.

    Args:
        shape: a key of `core.model.SHAPES`.
        rows: of `seq` tokens, for each rank.
        layers: fewer blocks than the shape has.
    """

    def build_quantized_rank() -> tuple[Any, torch.optim.Optimizer, Any]:
        """One rank's QLoRA on shards, and its step."""
        model = packed_model(shape, layers=layers)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model = apply_quantized_shards(model, adapter_dtype=torch.bfloat16)
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        ids = torch.zeros(rows, seq, dtype=torch.long)  # [B, S]

        def quantized_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
            sum_of_losses(model, {"input_ids": ids, "labels": ids}).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, torch.optim.AdamW(adapters, fused=True), quantized_step

    return predict(build_quantized_rank, ranks=ranks)


def beside_parts(predicted: Prediction) -> int:
    """On one rank with 4-bit shards: the most bytes beside weights, gradients, states at rest."""
    sizes = []
    for point in predicted.timeline.points:
        sizes.append(point.total - sum(point.bytes[kind] for kind in AT_REST))
    return max(sizes)


def packed_model(shape: str, *, layers: int | None) -> Any:
    """For one predicted rank: a bf16 model with adapters, its layers packed in 4 bits.

    To quantize whole layers first would take as many operators again.
    """
    peft = require("peft")
    model = model_of_shape(shape, layers=layers, dtype=torch.bfloat16, device="cpu")
    linears = decoder_blocks(model).named_modules()
    names = {name.rpartition(".")[2] for name, each in linears if isinstance(each, nn.Linear)}
    config = peft.LoraConfig(r=RANK, target_modules=sorted(names), task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    for name, module in list(model.named_modules()):
        if name.endswith(".base_layer"):
            model.set_submodule(name, nf4_linear_like(module, compute_dtype=torch.bfloat16))
    return model
