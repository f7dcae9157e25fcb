import pytest
import torch
from transformers import BatchEncoding

from recipes_lib.core.data import IGNORED, collate
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.marks import STEPS_IN_BACKWARD, mark
from recipes_lib.fine_tuning.completion_only_loss import completion_only_loss
from recipes_lib.training.gradient_accumulation import (
    accumulate_gradients,
    accumulated_by_hand,
)
from tests.conftest import assert_same_gradients, gradients


def full_batch(model, batch):
    """Loss and gradients of the whole batch in one pass."""
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    return loss.detach(), expected


@pytest.mark.parametrize(("family", "micro_batches"), [("tiny-llama", 4), ("tiny-gpt2", 2)])
def test_equals_the_full_batch_and_the_loop_by_hand(family, micro_batches, batch):
    """The mistake: a wrong divisor; the rows have unequal numbers of targets."""
    model = model_of_shape(family, device="cpu")
    batch = BatchEncoding(batch)  # as a tokenizer returns it: no dict
    expected_loss, expected = full_batch(model, batch)
    loss = accumulate_gradients(model, batch, micro_batches=micro_batches)
    torch.testing.assert_close(loss, expected_loss)
    assert_same_gradients(gradients(model), expected)

    model.zero_grad()
    accumulated_by_hand(model, batch, micro_batches=micro_batches)
    assert_same_gradients(gradients(model), expected)


def test_what_has_no_rows_goes_to_every_micro_batch(llama, batch):
    """The mistake: positions [1, S] are cut as if they were rows."""
    positions = 2 * torch.arange(batch["input_ids"].shape[1])[None]  # [1, S], not the default
    batch |= {"position_ids": positions, "output_attentions": False}
    expected_loss, expected = full_batch(llama, batch)
    loss = accumulate_gradients(llama, batch, micro_batches=2)
    torch.testing.assert_close(loss, expected_loss)
    assert_same_gradients(gradients(llama), expected)


def test_the_first_token_of_a_row_is_no_target(llama, batch):
    """The mistake: nothing predicts it, and it counts in the divisor."""
    batch["labels"] = batch["input_ids"]
    expected_loss, expected = full_batch(llama, batch)
    loss = accumulate_gradients(llama, batch, micro_batches=2)
    torch.testing.assert_close(loss, expected_loss)
    assert_same_gradients(gradients(llama), expected)


def test_micro_batches_of_any_sizes_and_lengths_equal_the_whole(llama):
    """The mistake: each is padded to its own longest row, and the divisor counts padding."""
    rows = []
    for length in torch.randint(5, 24, (6,)).tolist():
        ids = torch.randint(1, 128, (length,)).tolist()
        prompt = length // 2
        rows.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    expected_loss, expected = full_batch(llama, collate(rows, pad_token_id=0))
    micros = [collate(part, pad_token_id=0) for part in (rows[:1], rows[1:5], rows[5:])]
    loss = accumulate_gradients(llama, micros, loss_sum=completion_only_loss)
    torch.testing.assert_close(loss, expected_loss, atol=0, rtol=1e-5)
    assert_same_gradients(gradients(llama), expected, atol=1e-5)


def test_batches_that_cannot_be_split(llama, batch):
    """The mistake: some rows are left out, or the loss is NaN."""
    nothing_left = batch | {"labels": torch.full_like(batch["labels"], IGNORED)}
    for given, count, message in [
        (batch, 3, "divides the batch size 4"),
        (nothing_left, 2, "no token to train on"),
    ]:
        with pytest.raises(ValueError, match=message):
            accumulate_gradients(llama, given, micro_batches=count)
    assert gradients(llama) == {}


def test_optimizer_in_backward_is_refused(llama, batch):
    """The mistake: it steps after the first micro-batch. With one micro-batch it is right."""
    parameter = next(llama.parameters())
    mark(parameter, STEPS_IN_BACKWARD)
    with pytest.raises(ValueError, match="steps in backward"):
        accumulate_gradients(llama, batch, micro_batches=2)
    accumulate_gradients(llama, batch, micro_batches=1)
    mark(parameter, STEPS_IN_BACKWARD, False)  # an offloaded optimizer that waits for the last one
    accumulate_gradients(llama, batch, micro_batches=2)
