"""The longest text that fits a card: by arithmetic, and by the step itself without data."""

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.out_of_memory_doctor.longest_texts import (
    CHECKPOINTS,
    FIVE_LINES,
    NESTED,
    longest_text,
    share_of_memory,
    what_fills,
)


@pytest.mark.parametrize("stack", [FIVE_LINES, NESTED], ids=["five lines", "nested"])
def test_the_step_itself_fills_the_card_at_the_longest_text(stack):
    """The mistakes: adapters in 32 bits, tiles or groups of another size, no sums of attention's
    backward, few blocks in the place of a group.
    """
    model = model_of_shape("smollm2-135m", layers=9, dtype=torch.bfloat16, device="meta")
    step = {"card": "RTX 4090", "stack": (*stack, "QLoRA")}
    longest = longest_text(model, **step)
    assert longest > longest_text(model, card="RTX 4090", stack=(*CHECKPOINTS, "QLoRA"))
    assert share_of_memory(model, longest, **step) == pytest.approx(1, abs=0.03)


def test_what_fills_the_card_changes_with_the_recipes():
    """The mistakes: the parts of another moment than the peak, or of another stack."""
    model = model_of_shape("smollm2-135m", dtype=torch.bfloat16, device="meta")
    largest = {}
    for stack in ((), CHECKPOINTS, FIVE_LINES):
        on_card = {"card": "RTX 4090", "stack": (*stack, "QLoRA")}
        parts = what_fills(model, longest_text(model, **on_card), **on_card)
        assert sum(parts.values()) == pytest.approx(1)
        largest[stack] = next(iter(parts))
    assert largest == {(): "activations", CHECKPOINTS: "loss", FIVE_LINES: "one block"}


def test_no_text_fits_where_the_weights_are_too_much():
    """The mistake: a length of two tokens, or an error, in a table of cards."""
    model = model_of_shape("llama-3.1-8b", dtype=torch.bfloat16, device="meta")
    assert longest_text(model, card="T4", stack=(*FIVE_LINES, "step in backward")) == 0
