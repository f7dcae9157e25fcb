"""The equation against the step itself, on tensors without data: neither knows of the other."""

from functools import lru_cache, partial

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import equation
from recipes_lib.core.predict.any_size import any_size
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.precision.sixteen_bit_adam import sixteen_bit_adamw
from tests.core.predict.recipes import adamw, plain_step

RANK = 16
# Blocks of the model, rows and length of the batch, dtype.
SHAPES = {
    "smollm2-135m": (30, 6, 72, torch.float32),
    "llama-3.2-1b": (16, 1, 1024, torch.bfloat16),
    "llama-3.2-3b": (28, 2, 2048, torch.bfloat16),
    "llama-3.1-8b": (32, 1, 2048, torch.bfloat16),
    "qwen2.5-32b": (64, 1, 2048, torch.bfloat16),
}
checkpointed = partial(apply_activation_checkpointing, check=False)
lora = partial(apply_lora, rank=RANK, alpha=2 * RANK, check=False)
qlora = partial(apply_qlora, rank=RANK, alpha=2 * RANK)
chunked = partial(apply_chunked_cross_entropy, check=False)
in_16_bits = partial(sixteen_bit_adamw, lr=2e-5)
with_lora = partial(equation.with_adapters, rank=RANK)
# What changes the model, its optimizer, and what the equation makes of it.
STACKS = {
    "plain": ((), adamw, ()),
    "checkpointed": ((checkpointed,), adamw, (equation.with_checkpointing,)),
    "LoRA": ((lora,), adamw, (with_lora,)),
    "QLoRA, checkpointed": (
        (qlora, checkpointed),
        adamw,
        (with_lora, equation.in_four_bits, equation.with_checkpointing),
    ),
    "chunked": ((chunked,), adamw, (equation.with_chunked_loss,)),
    "16-bit states": ((), in_16_bits, (partial(equation.with_states_in, bits=16),)),
}


@lru_cache
def plain(shape):
    blocks, rows, length, dtype = SHAPES[shape]
    model = model_of_shape(shape, dtype=dtype, device="meta")
    return equation.plain_step(model, rows=rows, length=length)


def peak_of_the_step(shape, stack):
    blocks, rows, length, dtype = SHAPES[shape]
    changes, optimizer, _ = STACKS[stack]
    ids = torch.zeros(rows, length, dtype=torch.long)

    def build_of(layers):
        def build():
            model = model_of_shape(shape, layers=layers, dtype=dtype, device="cpu")
            for change in changes:
                model = change(model)
            return model, optimizer(model), plain_step({"input_ids": ids, "labels": ids})

        return build

    return any_size(build_of, layers=(2, 3)).peak(layers=blocks)


OF_8B = ("plain", "checkpointed", "chunked", "QLoRA, checkpointed")


@pytest.mark.parametrize(
    ("shape", "stack"),
    [("smollm2-135m", "16-bit states"), *[("llama-3.1-8b", stack) for stack in OF_8B]],
)
def test_near_the_step_itself(shape, stack):
    """The mistake: a term that is forgotten, or counted twice."""
    step = plain(shape)
    for change in STACKS[stack][2]:
        step = change(step)
    assert step.peak == pytest.approx(peak_of_the_step(shape, stack), rel=0.05)


def eager(model):
    model.set_attn_implementation("eager")
    return model


def nested_terms(step):
    """The terms of nested checkpoints, with tiles of MLPs and norms."""
    in_tiles = equation.with_tiled_mlp(equation.with_chunked_loss(step), tile=8192, norms=True)
    return equation.with_step_in_backward(equation.with_checkpointing(in_tiles, group=5))


def offloaded_terms(step):
    """The terms of inputs on disk, with tiles of MLPs."""
    in_tiles = equation.with_tiled_mlp(equation.with_chunked_loss(step), tile=8192)
    return equation.with_inputs_elsewhere(equation.with_checkpointing(in_tiles))


def offloaded_step(model, optimizer, *, ids):
    away = offload_activations(model, to="disk", min_bytes=4096, in_flight=0)
    with away:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


nested = partial(apply_nested_checkpointing, group=5, check=False)
tiled = partial(apply_tiled_mlp, tile_size=8192, norms=True, check=False)
in_tiles = partial(apply_tiled_mlp, tile_size=8192, check=False)
in_backward = partial(apply_optimizer_in_backward, lr=2e-5, fused=True)
LONG = {
    "eager": ((eager,), adamw, equation.with_eager_attention, 891),
    "nested": ((chunked, tiled, nested), in_backward, nested_terms, 54_000),
    "offloaded": ((chunked, in_tiles, checkpointed), adamw, offloaded_terms, 48_000),
}


@pytest.mark.parametrize("row", LONG)
def test_long_texts(row):
    """The mistake: a tensor of the length of the text that a recipe leaves, and the sum does not
    have, or that is free by then."""
    changes, optimizer, terms, tokens = LONG[row]
    ids = torch.zeros(1, tokens, dtype=torch.long)

    def build_of(layers):
        def build():
            model = model_of_shape("smollm2-135m", layers=layers, device="cpu")
            for change in changes:
                model = change(model)
            step = plain_step({"input_ids": ids, "labels": ids})
            if row == "offloaded":
                step = partial(offloaded_step, ids=ids)
            return model, optimizer(model), step

        return build

    model = model_of_shape("smollm2-135m", device="meta")
    by_arithmetic = terms(equation.plain_step(model, rows=1, length=tokens)).peak
    itself = any_size(build_of, layers=(5, 10)).peak(layers=30)
    assert by_arithmetic == pytest.approx(itself, rel=0.01)


@pytest.mark.survey
@pytest.mark.parametrize("stack", [stack for stack in STACKS if stack != "16-bit states"])
@pytest.mark.parametrize("shape", SHAPES)
def test_near_the_step_itself_for_more_shapes(shape, stack):
    test_near_the_step_itself(shape, stack)
