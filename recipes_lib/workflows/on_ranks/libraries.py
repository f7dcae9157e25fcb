"""The same training by DeepSpeed, on quantized shards and with experts: each runs on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from recipes_lib.architecture.mixture_of_experts import small_mixture
from recipes_lib.architecture.mixture_of_experts.parallel import (
    apply_expert_parallel,
    average_gradients,
)
from recipes_lib.core.ranks import group_device, world_size
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.measured_bytes import rank_bytes
from recipes_lib.core.ranks.weighted_step import rank_step, sum_of_losses, tokens_of_all_ranks
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.parallel.data_parallel import apply_data_parallel
from recipes_lib.parallel.quantized_shards import apply_quantized_shards
from recipes_lib.parallel.zero.deepspeed import (
    apply_deepspeed,
    config_file,
    deepspeed_step,
    held_bytes,
)
from recipes_lib.workflows.on_ranks.strategies import EPSILON, Options, adamw, own_rows
from recipes_lib.workflows.on_ranks.train import VOCABULARY, byte_batches, small_llama


def train_with_deepspeed(
    *, stage: int, sizes: dict[str, int], steps: int, rows: int, tokens: int
) -> dict[str, Any]:
    """The same training by DeepSpeed's library: losses, and bytes that rank 0 keeps, by kind."""
    options = Options()
    engine = apply_deepspeed(
        small_llama(sizes=sizes, tokens=tokens).to(group_device()),
        torch.optim.AdamW,
        config=config_file(f"zero{stage}"),
        rows=rows // world_size(),
        max_norm=options.max_norm,
        lr=options.learning_rate,
        eps=EPSILON,
    )
    losses = []
    for batch in byte_batches(steps=steps, rows=rows, tokens=tokens):
        losses.append(deepspeed_step(engine, [own_rows(batch)]))
    return {"losses": losses, **held_bytes(engine)}


def train_quantized(
    *, shards: bool, sizes: dict[str, int], steps: int, rows: int, tokens: int
) -> dict[str, Any]:
    """The same training by QLoRA on bytes: losses, bytes of the base and of all on rank 0."""
    torch.manual_seed(0)  # adapters are drawn, and all ranks need the same
    plain = small_llama(sizes=sizes, tokens=tokens).to(group_device())
    # Products in fp32: those of 16 bits would differ by their rounding.
    model = apply_qlora(plain, rank=8, compute_dtype=torch.float32).train()
    if shards:
        apply_quantized_shards(model)
    elif world_size() > 1:
        model = apply_data_parallel(model)
    optimizer = adamw([each for each in model.parameters() if each.requires_grad], Options())
    losses = []
    for batch in byte_batches(steps=steps, rows=rows, tokens=tokens):
        with warnings.catch_warnings():
            # Of FSDP about peft's output, and of names that PyTorch 2.13 has changed.
            warnings.simplefilter("ignore")
            losses.append(rank_step(model, optimizer, [own_rows(batch)]))
    return {"losses": losses, "parameters": rank_bytes(model).parameters}


def train_experts(
    *, shared: bool, experts: int, steps: int, rows: int, tokens: int
) -> dict[str, Any]:
    """The same training with a small mixture of experts: losses, and bytes on rank 0."""
    model = small_mixture(experts=experts, vocabulary=VOCABULARY).to(group_device())
    step = rank_step
    if shared:
        apply_expert_parallel(model)
        step = _step_of_experts
    elif world_size() > 1:
        model = apply_data_parallel(model)
    optimizer = adamw(model.parameters(), Options())
    batches = byte_batches(steps=steps, rows=rows, tokens=tokens)
    losses = [step(model, optimizer, [own_rows(batch)]) for batch in batches]
    return {"losses": losses, "parameters": rank_bytes(model).parameters}


def _step_of_experts(model: Any, optimizer: torch.optim.Optimizer, batches: list[Any]) -> float:
    """Like `rank_step`: gradients are means over the ranks, and each token weighs the same."""
    tokens = tokens_of_all_ranks(batches)
    own = 0.0
    for batch in batches:
        loss = sum_of_losses(model, batch)
        (loss * world_size() / tokens).backward()
        own += loss.item()
    average_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    (total,) = sums_over_ranks(own)
    return total / tokens
