"""The operations of a step, against PyTorch's own counter of what its operators multiply."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict.operations import step_operations
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from tests.conftest import FAMILIES

ROWS, LENGTH = 2, 64
SIZES = {"rows": ROWS, "length": LENGTH}


def counted(model):
    """What one step multiplies, with half of the square of scores: nobody sees what comes later."""
    model.set_attn_implementation("eager")  # whose products are plain ones, of the whole square
    ids = torch.randint(0, model.config.vocab_size, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return halved_scores(counter, LENGTH)


def halved_scores(counter, length):
    by_operator = counter.get_flop_counts()["Global"]
    of_scores = by_operator.pop(torch.ops.aten.bmm)
    return sum(by_operator.values()) + of_scores * (length + 1) / (2 * length)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_fine_tuning(family):
    """Tied and untied output layers, grouped heads, Conv1D."""
    model = model_of_shape(family, device="cpu")
    assert step_operations(model, **SIZES) == pytest.approx(counted(model), rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora(family):
    """The mistake: a frozen base still counts gradients of its weights, or none of its inputs."""
    model = apply_lora(model_of_shape(family, layers=4, device="cpu"), rank=4, alpha=8)
    assert step_operations(model, **SIZES) == pytest.approx(counted(model), rel=0.03)


def test_adapters_in_the_last_block_only():
    """Below them there is no backward."""
    model = model_of_shape("tiny-llama", layers=4, device="cpu")
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    assert step_operations(model, **SIZES) == pytest.approx(counted(model), rel=0.03)


def test_a_prompt_that_trains():
    """All blocks hand gradients down to it, and its tokens go through them as well."""
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=16)
    plain = model_of_shape("tiny-llama", layers=4, device="cpu")
    plain.set_attn_implementation("eager")
    model = peft.get_peft_model(plain, config)
    with FlopCounterMode(display=False) as counter:
        ids = torch.randint(0, 128, (ROWS, LENGTH))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    longer = LENGTH + 16
    assert step_operations(model, **SIZES) == pytest.approx(
        halved_scores(counter, longer), rel=0.03
    )


def test_what_trains_behind_the_blocks_has_no_gradient_below():
    model = model_of_shape("tiny-llama", layers=4, device="cpu").requires_grad_(False)
    model.model.norm.requires_grad_(True)
    assert step_operations(model, **SIZES) == pytest.approx(counted(model), rel=0.03)


def test_four_bits_are_the_same_products():
    pytest.importorskip("bitsandbytes")
    adapted = apply_lora(model_of_shape("tiny-llama", device="cpu"), rank=4, alpha=8)
    quantized = apply_qlora(model_of_shape("tiny-llama", device="cpu"), rank=4, alpha=8)
    assert step_operations(quantized, **SIZES) == step_operations(adapted, **SIZES)


def test_what_a_recipe_does_on_top_is_not_useful():
    """The mistake: what a checkpoint computes again counts as work."""
    model = model_of_shape("tiny-llama", device="cpu")
    plain = step_operations(model, **SIZES)
    assert step_operations(apply_activation_checkpointing(model), **SIZES) == plain
