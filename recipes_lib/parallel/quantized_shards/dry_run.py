"""QLoRA on sharded 4-bit weights, for a model of any size: the memory of one rank, without a GPU.

    peak = dry_quantized_rank("llama-3.1-70b", ranks=2, rows=1, seq=1024)
    peak.total / 2**30

Shapes are enough for that: no weight is drawn, quantized or sent (`core.predict.dry_ranks`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from recipes_lib.core.measure.machine import require
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.predict.dry_ranks import RankPeak, rank_peak
from recipes_lib.core.ranks.rank_step import sum_of_losses
from recipes_lib.parallel.quantized_shards import apply_quantized_shards
from recipes_lib.parallel.quantized_shards.layer import packed_shape


def dry_quantized_rank(
    shape: str,
    *,
    ranks: int,
    rows: int,
    seq: int,
    rank: int = 16,
    layers: int | None = None,
    cut_vocabulary: bool = True,
) -> RankPeak:
    """The peak of rank 0 of `ranks` in a step of QLoRA with AdamW, every block checkpointed.

    With offload the device would hold `beside_shards` of it. All is in bf16.

    Args:
        shape: a key of `core.model.SHAPES`.
        rows: of `seq` tokens, for each rank.
        rank: r, of an adapter on every linear layer of the blocks.
        layers: fewer blocks than the shape has.
        cut_vocabulary: gather embedding and output layer a few rows at a time.
    """

    def build(mesh: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
        model = packed_model(shape, rank=rank, layers=layers)
        _on_cpu(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model = apply_quantized_shards(
            model,
            mesh=mesh,
            adapter_dtype=torch.bfloat16,
            cut_vocabulary=cut_vocabulary,
        )
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(adapters, fused=True)
        ids = torch.zeros(rows, seq, dtype=torch.long)  # [B, S]

        def step() -> None:
            sum_of_losses(model, {"input_ids": ids, "labels": ids}).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return rank_peak(build, ranks=ranks)


def packed_model(shape: str, *, rank: int, layers: int | None = None) -> Any:
    """A bf16 model of a public shape on the meta device, with adapters and packed layers."""
    peft = require("peft")
    # peft moves what it makes from device to device, and fake tensors cannot be moved in a module.
    with unset_fake_temporarily():
        model = model_of_shape(shape, layers=layers, dtype=torch.bfloat16, device="meta")
        names = {
            name.rpartition(".")[2]
            for name, module in decoder_blocks(model).named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        config = peft.LoraConfig(r=rank, target_modules=sorted(names), task_type="CAUSAL_LM")
        with torch.device("meta"):
            model = peft.get_peft_model(model, config)
        for name, module in list(model.named_modules()):
            if name.endswith(".base_layer"):
                model.set_submodule(name, packed_shape(module, compute_dtype=torch.bfloat16))
    return model


def _on_cpu(model: torch.nn.Module) -> None:
    """Give every parameter and buffer on the meta device a tensor of the dry run, on the "cpu"."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # a shared one stays shared
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            if old not in made:
                empty = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                made[old] = torch.nn.Parameter(empty, requires_grad=old.requires_grad)
            setattr(module, name, made[old])
        for name, old in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(old.shape, dtype=old.dtype, device="cpu"))
