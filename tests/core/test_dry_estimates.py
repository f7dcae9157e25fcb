"""The techniques' estimates where no formula holds, against the bytes that a step really takes."""

import contextlib
import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from benchmarks.family_predictions import SIZES, small_model
from recipes_lib.attention.flash import apply_flash_attention, estimate_flash_attention
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model.sizes import weight_bytes
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.fine_tuning.lora import apply_lora, estimate_lora
from recipes_lib.fine_tuning.qlora import apply_qlora, estimate_qlora
from recipes_lib.memory.activation_checkpointing import (
    apply_activation_checkpointing,
    estimate_activation_checkpointing,
)
from recipes_lib.memory.activation_offload import estimate_activation_offload, offload_activations
from recipes_lib.memory.nested_checkpointing import (
    apply_nested_checkpointing,
    estimate_nested_checkpointing,
)
from recipes_lib.precision.mixed_precision import estimate_mixed_precision
from recipes_lib.training.gradient_accumulation import estimate_gradient_accumulation
from recipes_lib.training.sequence_packing import estimate_sequence_packing

SHAPE = Shape(batch=4, seq=64)
MICRO = Shape(batch=4, seq=64, micro_batches=2)


def nothing(model):
    return contextlib.nullcontext()


def peak_of(model, *, around=nothing, forward_in=nothing, micro_batches=1, positions=None):
    """Bytes of the second AdamW step, of which the first has made the states.

    `around` is around forward and backward, `forward_in` around forward only: so is autocast.
    """
    ids = torch.randint(0, 256, (SHAPE.batch, SHAPE.seq))  # [B, S]
    options = {"use_cache": False}
    if positions is not None:
        options["position_ids"] = positions
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-5, fused=True)
    with PeakMemory() as before:
        pass
    for _ in range(2):
        with PeakMemory() as memory:
            for rows in ids.chunk(micro_batches):
                with around(model):
                    with forward_in(model):
                        loss = model(input_ids=rows, labels=rows, **options).loss
                    loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak - before.peak + weight_bytes(model)


def plain(model):
    return budget_of(model, SHAPE)


def lora(model):
    plan = estimate_lora(plain(model), model, SHAPE, rank=8)
    return plan, peak_of(apply_lora(model, rank=8))


def lora_with_dropout(model):
    plan = estimate_lora(plain(model), model, SHAPE, rank=8, dropout=0.1)
    return plan, peak_of(apply_lora(model, rank=8, dropout=0.1))


def lora_in_micro_batches(model):
    plan = estimate_gradient_accumulation(plain(model), model, MICRO)
    plan = estimate_lora(plan, model, MICRO, rank=8)
    return plan, peak_of(apply_lora(model, rank=8), micro_batches=2)


def qlora(model):
    plan = estimate_qlora(plain(model), model, SHAPE, rank=8)
    return plan, peak_of(apply_qlora(model, rank=8))


def in_bf16(model):
    return torch.autocast("cpu", torch.bfloat16)


def autocast(model):
    plan = estimate_mixed_precision(plain(model), model, SHAPE)
    return plan, peak_of(model, forward_in=in_bf16)


def autocast_and_checkpoints(model):
    plan = estimate_mixed_precision(plain(model), model, SHAPE)
    plan = estimate_activation_checkpointing(plan, model, SHAPE)
    apply_activation_checkpointing(model)
    return plan, peak_of(model, forward_in=in_bf16)


def lora_under_autocast(model):
    plan = estimate_lora(plain(model), model, SHAPE, rank=8)
    model = apply_lora(model, rank=8)
    plan = estimate_mixed_precision(plan, model, SHAPE)
    return plan, peak_of(model, forward_in=in_bf16)


def qlora_under_autocast(model):
    """The second dry step runs on layers that have 4 bits already."""
    plan = estimate_qlora(plain(model), model, SHAPE, rank=8)
    model = apply_qlora(model, rank=8)
    plan = estimate_mixed_precision(plan, model, SHAPE)
    return plan, peak_of(model, forward_in=in_bf16)


def flash(model):
    model.set_attn_implementation("eager")
    plan = estimate_flash_attention(plain(model), model, SHAPE)
    apply_flash_attention(model)
    return plan, peak_of(model)


def nested(model):
    plan = estimate_nested_checkpointing(plain(model), model, SHAPE, group=2)
    apply_nested_checkpointing(model, group=2)
    return plan, peak_of(model)


def offload(model):
    plan = estimate_activation_offload(plain(model), model, SHAPE)
    # Not the system's temporary directory, which may be in memory. The file has no name.
    here = Path(__file__).parent
    to_disk = functools.partial(offload_activations, to="disk", min_bytes=512, directory=here)
    return plan, peak_of(model, around=to_disk)


def accumulation(model):
    plan = estimate_gradient_accumulation(plain(model), model, MICRO)
    return plan, peak_of(model, micro_batches=2)


def packing(model):
    plan = estimate_sequence_packing(plain(model), model, SHAPE)
    positions = torch.arange(SHAPE.seq // 2).repeat(SHAPE.batch, 2)  # two documents in a row
    return plan, peak_of(model, positions=positions)


# Where backward makes the tensors of a block again, and where a disk's buffers are alive, the
# account of one block knows a little less.
CASES = [
    (lora, "Phi3", 0.01),
    (lora_with_dropout, "OPT", 0.01),
    (lora_in_micro_batches, "Exaone4", 0.01),
    (qlora, "Mistral", 0.01),
    (autocast, "Mixtral", 0.01),
    (autocast_and_checkpoints, "Phi3", 0.01),
    (lora_under_autocast, "GPTNeoX", 0.01),
    (qlora_under_autocast, "Phi3", 0.01),
    (flash, "Cohere2", 0.01),
    (nested, "Mistral", 0.03),
    (offload, "Phi3", 0.03),
    (accumulation, "Mamba2", 0.01),
    (packing, "Mistral", 0.02),
    (packing, "GPTNeoX", 0.02),
]


@pytest.mark.parametrize(("technique", "family", "within"), CASES)
def test_an_estimate_by_a_dry_step(technique, family, within):
    """The mistake: arithmetic of one block, or a step without what the technique adds to it."""
    plan, measured = technique(small_model(family))
    assert plan.dry is not None
    assert plan.peak == pytest.approx(measured, rel=within)


def narrow_gemma2():
    """Gemma 2 with an attention of 256 features beside an MLP of 160, and logits that are capped.

    Its window is longer than the rows.
    """
    config = Gemma2Config(**SIZES | {"head_dim": 64, "sliding_window": 256})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def test_an_attention_that_is_wider_than_its_mlp():
    """The mistake: the worst moment of backward is looked for in the MLP only."""
    model = narrow_gemma2()
    plan = plain(model)
    assert "its attention is wider (256) than its MLP (160)" in plan.source
    assert plan.peak == pytest.approx(peak_of(model), rel=0.01)


def test_capped_logits():
    """The mistake: a loss without what tanh keeps. The vocabulary is large, so the loss decides."""
    config = Gemma2Config(**SIZES | {"head_dim": 16, "sliding_window": 256, "vocab_size": 4096})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    plan = plain(model)
    assert plan.dry is None
    assert plan.peak_moment() == "backward begins"
    assert plan.peak == pytest.approx(peak_of(model), rel=0.02)
