"""The equation against the step itself, on tensors without data: neither knows of the other."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import equation, predict
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.precision.sixteen_bit_adam import sixteen_bit_adamw
from tests.core.predict.recipes import fused_adamw, plain_step

RANK = 16
TILE = 8192


def eager(model):
    model.set_attn_implementation("eager")
    return model


checkpointed = partial(apply_activation_checkpointing, check=False)
nested = partial(apply_nested_checkpointing, group=2, check=False)
lora = partial(apply_lora, rank=RANK, alpha=2 * RANK, check=False)
qlora = partial(apply_qlora, rank=RANK, alpha=2 * RANK)
chunked = partial(apply_chunked_cross_entropy, check=False)
tiled = partial(apply_tiled_mlp, tile_size=TILE, check=False)
tiled_norms = partial(tiled, norms=True)
in_16_bits = partial(sixteen_bit_adamw, lr=2e-5)
in_backward = partial(apply_optimizer_in_backward, lr=2e-5, fused=True)

with_lora = partial(equation.with_adapters, rank=RANK)
with_tiles = partial(equation.with_tiled_mlp, tile=TILE)
with_tiled_norms = partial(with_tiles, norms=True)
with_groups = partial(equation.with_checkpointing, group=2)


@dataclass(frozen=True)
class Stack:
    """What changes the model, what the equation makes of each, the optimizer, and how many inputs
    of blocks are on their way; None where they stay."""

    changes: tuple = ()
    terms: tuple = ()
    optimizer: object = fused_adamw
    in_flight: int | None = None


def offloaded(in_flight):
    elsewhere = partial(equation.with_inputs_elsewhere, in_flight=in_flight)
    terms = (equation.with_chunked_loss, with_tiles, equation.with_checkpointing, elsewhere)
    return Stack((chunked, tiled, checkpointed), terms, in_flight=in_flight)


STACKS = {
    "plain": Stack(),
    "eager": Stack((eager,), (equation.with_eager_attention,)),
    "checkpointed": Stack((checkpointed,), (equation.with_checkpointing,)),
    "chunked": Stack((chunked,), (equation.with_chunked_loss,)),
    "16-bit states": Stack((), (partial(equation.with_states_in, bits=16),), in_16_bits),
    "LoRA": Stack((lora,), (with_lora,)),
    "QLoRA, checkpointed": Stack(
        (qlora, checkpointed), (with_lora, equation.in_four_bits, equation.with_checkpointing)
    ),
    "nested": Stack(
        (chunked, tiled_norms, nested),
        (equation.with_chunked_loss, with_tiled_norms, with_groups, equation.with_step_in_backward),
        in_backward,
    ),
    "offloaded, in turns": offloaded(0),
    "offloaded": offloaded(1),
}


def offloaded_step(batch, in_flight, model, optimizer):
    with offload_activations(model, to="disk", min_bytes=4096, in_flight=in_flight):
        plain_step(batch)(model, optimizer)


def compare(shape, stack, *, rows, length, dtype, layers=5, rel=0.01):
    """Five blocks: two groups of nested checkpoints, and one that is not full."""
    how = STACKS[stack]
    ids = torch.zeros(rows, length, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}

    def build():
        model = model_of_shape(shape, layers=layers, dtype=dtype, device="cpu")
        for change in how.changes:
            model = change(model)
        step = plain_step(batch)
        if how.in_flight is not None:
            step = partial(offloaded_step, batch, how.in_flight)
        return model, how.optimizer(model), step

    model = model_of_shape(shape, layers=layers, dtype=dtype, device="meta")
    step = equation.plain_step(model, rows=rows, length=length)
    for change in how.terms:
        step = change(step)
    assert step.peak == pytest.approx(predict(build).peak, rel=rel)


@pytest.mark.parametrize("stack", ["plain", "checkpointed", "chunked", "QLoRA, checkpointed"])
def test_near_the_step_itself(stack):
    """The mistake: a term that is forgotten, or counted twice."""
    compare("llama-3.1-8b", stack, rows=1, length=2048, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("stack", "tokens"),
    [
        ("eager", 1800),
        ("16-bit states", 256),
        ("nested", 100_000),
        ("offloaded, in turns", 90_000),
        ("offloaded", 90_000),
    ],
)
def test_long_texts_in_fp32(stack, tokens):
    """The mistake: a tensor of the length of the text that a recipe leaves, and the sum does not
    have, or that is free by then."""
    compare("smollm2-135m", stack, rows=1, length=tokens, dtype=torch.float32)


@pytest.mark.parametrize("bits", [8, 16])
def test_adapters_alone_have_states(bits):
    """The mistake: averages in few bits of all weights, where only adapters train."""
    model = model_of_shape("smollm2-135m", dtype=torch.bfloat16, device="meta")
    adapted = with_lora(equation.plain_step(model, rows=1, length=64))
    assert equation.with_states_in(adapted, bits=bits).states == adapted.states * bits // 32


@pytest.mark.survey
@pytest.mark.parametrize(
    "stack", ["plain", "checkpointed", "chunked", "LoRA", "QLoRA, checkpointed"]
)
@pytest.mark.parametrize("shape", ["llama-3.2-1b", "llama-3.2-3b", "qwen2.5-32b", "qwen3-8b"])
def test_near_the_step_itself_for_more_shapes(shape, stack):
    compare(shape, stack, rows=2, length=2048, dtype=torch.bfloat16, layers=8, rel=0.02)
