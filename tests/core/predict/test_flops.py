"""The operations of a step, against PyTorch's own counter of what its operators multiply."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict.flops import step_operations
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing

ROWS, LENGTH = 2, 64
SIZES = {"rows": ROWS, "length": LENGTH}


def counted(model):
    """What one step multiplies, with half of the square of scores: nobody sees what comes later."""
    model.set_attn_implementation("eager")  # whose products are plain ones, of the whole square
    ids = torch.randint(0, model.config.vocab_size, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    by_operator = counter.get_flop_counts()["Global"]
    of_scores = by_operator.pop(torch.ops.aten.bmm)
    return sum(by_operator.values()) + of_scores * (LENGTH + 1) / (2 * LENGTH)


@pytest.mark.parametrize("family", ["tiny-mistral", "tiny-gpt2"])
def test_full_fine_tuning(family):
    """The mistakes: a tied output layer that is left out, ungrouped heads, Conv1D as no layer."""
    model = model_of_shape(family, device="cpu")
    assert step_operations(model, **SIZES) == pytest.approx(counted(model), rel=0.01)


def test_lora():
    """The mistake: a frozen base still counts gradients of its weights, or none of its inputs."""
    model = apply_lora(model_of_shape("tiny-qwen3", layers=4, device="cpu"), rank=4, alpha=8)
    assert step_operations(model, **SIZES) == pytest.approx(counted(model), rel=0.03)


@pytest.mark.parametrize("part", ["layers.3", "norm"])
def test_below_the_first_part_that_trains_there_is_no_backward(part):
    """The mistake: gradients of inputs in blocks that nobody trains."""
    model = model_of_shape("tiny-llama", layers=4, device="cpu").requires_grad_(False)
    model.model.get_submodule(part).requires_grad_(True)
    assert step_operations(model, **SIZES) == pytest.approx(counted(model), rel=0.03)


def test_four_bits_are_the_same_products():
    """The mistake: a packed weight has half as many numbers, and counts half."""
    pytest.importorskip("bitsandbytes")
    adapted = apply_lora(model_of_shape("tiny-llama", device="cpu"), rank=4, alpha=8)
    quantized = apply_qlora(model_of_shape("tiny-llama", device="cpu"), rank=4, alpha=8)
    assert step_operations(quantized, **SIZES) == step_operations(adapted, **SIZES)


def test_what_a_recipe_does_on_top_is_not_useful():
    """The mistake: what a checkpoint computes again counts as work."""
    model = model_of_shape("tiny-llama", device="cpu")
    plain = step_operations(model, **SIZES)
    assert step_operations(apply_activation_checkpointing(model), **SIZES) == plain
