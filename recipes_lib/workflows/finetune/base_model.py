"""The base of a run: whole on each device or in parts over them, loaded, and adapted.

Of a model in parts, `whole` is on the first rank, in host memory, and None on the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from recipes_lib.core.data.tokens_and_labels import Row
from recipes_lib.core.measure.machine import GIB, machine
from recipes_lib.core.model import load_model, model_without_weights
from recipes_lib.core.model.bytes_of_tensors import tensor_bytes
from recipes_lib.core.model.vocabulary import grow_vocabulary, stop_at
from recipes_lib.core.ranks import rank
from recipes_lib.core.ranks.agreement import same_error_on_all_ranks
from recipes_lib.fine_tuning.adapter_files import base_fingerprint
from recipes_lib.fine_tuning.qlora import check_gradient_flow
from recipes_lib.parallel.quantized_shards.nf4_linear import pack_layers
from recipes_lib.workflows.finetune import shards
from recipes_lib.workflows.finetune.loop import adapt, micro_batches
from recipes_lib.workflows.finetune.settings import Settings

FOUR_BITS = 0.516  # bytes of a weight, with its part of the scales

# --- where it is ----------------------------------------------------------------------------------


def placed(run: Settings) -> Settings:
    """The run with the place of its base: whole on each device, or in parts where it is too large.

    What counts is what stays on the device: weights, gradients and states, without activations.
    Raises ValueError for what does not fit, before anything is loaded.
    """
    here = machine()
    model = model_without_weights(run.base_model, dtype=_dtype_of_base(run))
    size = sum(tensor_bytes(parameter) for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    what = f"the weights of {run.base_model}"
    if run.method == "full":
        what = f"weights, gradients and states of {run.base_model}"
        states = 2 if "8bit" in run.optimizer else 8
        size += count * (4 + states)
    # A base that is whole is measured on the device before it is quantized.
    in_parts = count * FOUR_BITS if run.method == "qlora" else size

    shard = run.shard
    if shard is None:
        shard = run.processes > 1 and size > here.memory_bytes
    of_device = in_parts / run.processes if shard else size
    if of_device > here.memory_bytes:
        ranks = math.floor(in_parts / here.memory_bytes) + 1
        raise ValueError(
            f"{what} take {size / GIB:.1f} GiB, and {here.name} has "
            f"{here.memory_bytes / GIB:.1f}: several devices divide them, torchrun "
            f"--nproc-per-node {max(2, ranks)} -m recipes_lib finetune … --shard"
        )
    return dataclasses.replace(run, shard=shard)


def _dtype_of_base(run: Settings) -> torch.dtype:
    """Adapters leave the base as it is, so it can have 16 bits.

    Not fp16: its file could name no other base.
    """
    if run.method != "full" and run.precision == "bf16" and machine().native_bf16:
        return torch.bfloat16
    return torch.float32


# --- from the files to the model that trains, and back --------------------------------------------


def load_base(
    run: Settings, *, tokenizer: Any, added: Mapping[str, int], ends: Sequence[int]
) -> tuple[Any, str, str]:
    """The base of a run with its added tokens and end marks, its name, and its fingerprint."""

    def load(device: str | None) -> tuple[Any, str, str]:
        """Load the base, and give it the rows of added tokens."""
        model = load_model(run.base_model, dtype=_dtype_of_base(run), device=device)
        name = model.name_or_path
        fingerprint = base_fingerprint(model)  # adapters, 4 bits and added tokens will hide it
        grow_vocabulary(model, added)
        stop_at(model, tokenizer, ends)
        return model, name, fingerprint

    if run.shard:
        return shards.on_first_rank(load, "cpu")
    return load(None)  # on the device of this machine


def base_to_measure(whole: Any, run: Settings) -> Any:
    """The base as it is. What will have 4 bits waits in host memory, where 16 fit."""
    if not run.shard:
        return whole
    model, _ = shards.in_shards(whole, offload=run.method == "qlora")
    return model


def adapted(
    whole: Any, rows: Sequence[Row], *, run: Settings, pad_token_id: int
) -> tuple[Any, Any]:
    """The base, adapted: the model that trains, and the modules for `model_to_save`.

    Layers in 4 bits that cut the gradient are found before training.
    """
    if run.shard:
        without = dataclasses.replace(run, gradient_checkpointing=False)  # blocks are sent plain
        with same_error_on_all_ranks():
            if rank() == 0:
                whole = adapt(whole, run=without)
                if run.method == "qlora":
                    pack_layers(whole)
        return shards.in_shards(
            whole, four_bits=run.method == "qlora", checkpointing=run.gradient_checkpointing
        )
    model = adapt(whole, run=run)
    if run.method == "qlora":
        device = str(model.device)
        first = micro_batches(rows[:1], run=run, pad_token_id=pad_token_id, device=device)
        check_gradient_flow(model, first[0])
    return model, model


def model_to_save(model: Any, modules: Any, *, run: Settings) -> Any:
    """The adapted base to be saved; of one in parts, `modules` with whole tensors on rank 0.

    Adapters are gathered without their base.
    """
    if not run.shard:
        return model
    return shards.gathered(model, modules, frozen=run.method == "full")
