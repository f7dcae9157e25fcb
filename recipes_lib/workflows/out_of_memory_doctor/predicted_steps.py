"""The step itself with a stack of recipes, on tensors without data: it checks the arithmetic.

Part of out_of_memory_doctor. Where all blocks are alike, a step is taken with few of them and
followed to all: some seconds, and none where the same was asked before.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import torch

from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.predict import Build, predict
from recipes_lib.core.predict.any_size import any_size
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing, best_group
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.optimizer_offload import offload_optimizer
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.parallel.fully_sharded import apply_fully_sharded
from recipes_lib.parallel.quantized_shards import apply_quantized_shards
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.sixteen_bit_adam import sixteen_bit_adamw
from recipes_lib.training.gradient_accumulation import accumulate_gradients, own_loss_sum
from recipes_lib.workflows.out_of_memory_doctor.remedies import (
    ADAPTERS,
    LORA,
    RANK,
    Question,
    Stack,
    has_experts,
)

LR = 1e-4
# Their steps say what a step of all blocks needs. With two blocks no input waits to be fetched
# while another one is used, as in the middle of a step with offloaded inputs.
FEW_BLOCKS = (3, 4)


def dry_peak(question: Question, stack: Stack) -> int:
    """The predicted peak of the step on one GPU; what a recipe refuses, it refuses."""
    build_of = functools.partial(build_with, question, stack)
    options = {"card": question.card, "ranks": question.gpus if "FSDP" in stack else 1}
    depth = len(decoder_blocks(question.model))
    # Of groups, few blocks say nothing.
    whole = "nested checkpointing" in stack or not _all_alike(question.model)
    if depth <= FEW_BLOCKS[1] or whole:
        return predict(build_of(layers=depth), allocator=False, **options).peak
    sizes = [question.own_rows, question.length, stack]
    key = [question.model.config.to_dict(), str(question.model.dtype), *sizes]
    return any_size(build_of, key=key, layers=FEW_BLOCKS, **options).peak(layers=depth)


def _all_alike(model: Any) -> bool:
    """For a predicted step: whether few blocks of the model say what all of them say."""
    lists = _per_block(model.config.get_text_config()).values()
    one_kind = all(values == values[:1] * len(values) for values in lists)
    return one_kind and len({repr(block) for block in decoder_blocks(model)}) == 1


def build_with(question: Question, stack: Stack, *, layers: int) -> Build:
    """The predicted step of a model of so many blocks with these recipes, for `predict`."""
    micro_batches, rows = 1, question.own_rows
    adapters = set(ADAPTERS).intersection(stack)
    if "micro-batches of 1" in stack:
        micro_batches, rows = 2, 2  # a third one takes the bytes of the second
    ids = torch.zeros(rows, question.length, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}

    def build_stack() -> tuple[Any, Any, Any]:
        """For a predicted step: the model with the stack of recipes."""
        model = _with_fewer_blocks(question.model, stack, layers)
        _apply_to_model(model, stack)
        return model, _optimizer_of_stack(model, stack, micro_batches), step_with_stack

    def step_with_stack(model: Any, optimizer: Any) -> None:
        """The step that is predicted, with the stack of recipes."""
        around = contextlib.nullcontext()
        if "activation offload" in stack:
            around = offload_activations(model, in_flight=1)
        # Adapters have 32 bits, and compute in 16, as in every trainer.
        autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=bool(adapters))
        with around:
            if micro_batches > 1:
                options = {"micro_batches": micro_batches, "loss_sum": own_loss_sum}
                accumulate_gradients(model, batch, autocast=autocast, **options)
            else:
                with autocast():
                    loss = model(**batch, use_cache=False).loss
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return build_stack


def _with_fewer_blocks(model: Any, stack: Stack, layers: int) -> Any:
    """For a predicted step: `model` with fewer blocks, by its configuration, and adapters."""
    config = copy.deepcopy(model.config)  # for the dtype is written into it
    text = config.get_text_config()
    for name, values in _per_block(text).items():
        setattr(text, name, values[:layers])
    text.num_hidden_layers = layers
    adapters = set(ADAPTERS).intersection(stack)
    dtype = torch.bfloat16 if adapters else model.dtype
    shallow = type(model)._from_config(config, dtype=dtype).train()
    targets = "attention" if has_experts(model) else "all-linear"
    if "QLoRA" in stack:
        return apply_qlora(shallow, rank=RANK, target_modules=targets)
    if LORA in stack:
        return apply_lora(shallow, rank=RANK, target_modules=targets, check=False)
    return shallow


def _apply_to_model(model: Any, stack: Stack) -> None:
    """For a predicted step: those recipes of the stack that change the model in place."""
    if "tiled MLP" in stack:
        apply_tiled_mlp(model, norms=True, check=False)
    if "checkpointing" in stack:
        apply_activation_checkpointing(model, check=False)
    if "nested checkpointing" in stack:
        group = best_group(len(decoder_blocks(model)))
        apply_nested_checkpointing(model, group=group, check=False)
    if "loss in chunks" in stack:
        apply_chunked_cross_entropy(model, check=False)
    if "FSDP" in stack:
        shard = apply_quantized_shards if "QLoRA" in stack else apply_fully_sharded
        shard(model)


def _optimizer_of_stack(model: Any, stack: Stack, micro_batches: int) -> Any:
    """For a predicted step: the optimizer of the stack, or AdamW."""
    if "16-bit AdamW" in stack:
        return sixteen_bit_adamw(model, lr=LR)
    if "8-bit AdamW" in stack:
        return eight_bit_adamw(model, lr=LR)
    if "step in backward" in stack:
        return apply_optimizer_in_backward(model, lr=LR, fused=True)
    if "optimizer offload" in stack:
        return offload_optimizer(model, lr=LR, micro_batches=micro_batches)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, fused=True)


def _per_block(config: Any) -> dict[str, list[Any]]:
    """For a predicted step: the lists in a configuration that have an entry for each block."""
    depth = config.num_hidden_layers
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list)}
    return {name: value for name, value in lists.items() if len(value) == depth}
