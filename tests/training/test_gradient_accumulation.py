import pytest
import torch
from transformers import BatchEncoding, MixtralConfig, MixtralForCausalLM

from recipes_lib.core.data import IGNORED, collate
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.marks import STEPS_IN_BACKWARD, mark
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.core.ranks.rank_step import sum_of_losses
from recipes_lib.fine_tuning.completion_only_loss import completion_only_loss
from recipes_lib.training.gradient_accumulation import (
    accumulate_gradients,
    accumulated_by_hand,
    cross_entropy_sum,
    estimate_gradient_accumulation,
)
from tests.conftest import assert_same_gradients, gradients, make_batch


def full_batch(model, batch):
    """Loss and gradients of the whole batch in one pass."""
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    return loss.detach(), expected


def test_equals_the_full_batch_and_the_loop_by_hand(tiny, batch):
    """Would catch a wrong divisor: the rows have unequal numbers of targets."""
    expected_loss, expected = full_batch(tiny, batch)
    loss = accumulate_gradients(tiny, batch, micro_batches=4)
    torch.testing.assert_close(loss, expected_loss)
    assert_same_gradients(gradients(tiny), expected)

    tiny.zero_grad()
    accumulated_by_hand(tiny, batch, micro_batches=4)
    assert_same_gradients(gradients(tiny), expected)


def test_a_batch_as_a_tokenizer_returns_it(llama, batch):
    """BatchEncoding is no dict: it was taken for a sequence, with a message about the count."""
    expected_loss, _ = full_batch(llama, batch)
    loss = accumulate_gradients(llama, BatchEncoding(batch), micro_batches=2)
    torch.testing.assert_close(loss, expected_loss)


def test_what_has_no_rows_goes_to_every_micro_batch(llama, batch):
    """Positions [1, S] for all rows, and options that are no tensors, cannot be split."""
    positions = 2 * torch.arange(batch["input_ids"].shape[1])[None]  # [1, S], not the default
    batch |= {"position_ids": positions, "output_attentions": False}
    expected_loss, expected = full_batch(llama, batch)
    loss = accumulate_gradients(llama, batch | {"use_cache": False}, micro_batches=2)
    torch.testing.assert_close(loss, expected_loss)
    assert_same_gradients(gradients(llama), expected)
    with pytest.raises(ValueError, match=r"position_ids \[3, .* give tensors with 4 rows"):
        three_rows = batch | {"position_ids": positions.expand(3, -1)}
        accumulate_gradients(llama, three_rows, micro_batches=2)


@pytest.mark.parametrize("loss_sum", [cross_entropy_sum, sum_of_losses])
def test_the_loss_of_an_fp64_model_has_all_its_digits(llama, batch, loss_sum):
    llama.double()
    logits = llama(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.mT, batch["labels"][:, 1:])
    loss = accumulate_gradients(llama, batch, micro_batches=2, loss_sum=loss_sum)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_other_counts_equal_the_full_batch(llama, batch, micro_batches):
    """One micro-batch, and micro-batches of several rows."""
    expected_loss, expected = full_batch(llama, batch)
    loss = accumulate_gradients(llama, batch, micro_batches=micro_batches)
    torch.testing.assert_close(loss, expected_loss)
    assert_same_gradients(gradients(llama), expected)


def test_the_first_token_of_a_row_is_no_target(llama, batch):
    """Nothing predicts it. Counted in the divisor, it would make loss and gradient too small."""
    batch["labels"] = batch["input_ids"]
    expected_loss, expected = full_batch(llama, batch)
    loss = accumulate_gradients(llama, batch, micro_batches=2)
    torch.testing.assert_close(loss, expected_loss)
    assert_same_gradients(gradients(llama), expected)


def test_dividing_by_own_mean_is_the_bug(llama, batch):
    """The popular loop is far off on this batch, so the tests above would see it."""
    _, expected = full_batch(llama, batch)
    for row in range(4):
        micro = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        (llama(**micro, use_cache=False).loss / 4).backward()
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients(llama), expected, atol=1e-4, rtol=1e-2)


def test_micro_batches_of_any_sizes_and_lengths_equal_the_whole(tiny):
    """Each is padded to its own longest row, and only the logits of answers are computed."""
    rows = []
    for length in torch.randint(5, 24, (6,)).tolist():
        ids = torch.randint(1, 128, (length,)).tolist()
        prompt = length // 2
        rows.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    expected_loss, expected = full_batch(tiny, collate(rows, pad_token_id=0))
    micros = [collate(part, pad_token_id=0) for part in (rows[:1], rows[1:5], rows[5:])]
    loss = accumulate_gradients(tiny, micros, loss_sum=completion_only_loss)
    torch.testing.assert_close(loss, expected_loss, atol=0, rtol=1e-5)
    assert_same_gradients(gradients(tiny), expected, atol=1e-5)


def test_bf16_weights(llama):
    """The loss is in fp32 although the logits are not."""
    model = llama.bfloat16()
    batch = make_batch()
    _, expected = full_batch(model, batch)
    loss = accumulate_gradients(model, batch, micro_batches=2)
    assert loss.dtype is torch.float32
    assert_same_gradients(gradients(model), expected, atol=2e-2, rtol=5e-2)


def test_memory_stays_flat_and_as_estimated():
    """The effective batch grows 8 times; a micro-batch that stays alive would show in the peak."""
    model = model_of_shape("tiny-llama", layers=8, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(batch):
        accumulate_gradients(model, batch, micro_batches=len(batch["labels"]))
        optimizer.step()
        optimizer.zero_grad()

    def peak(rows):
        ids = torch.randint(0, 128, (rows, 64))
        with PeakMemory() as memory:
            step({"input_ids": ids, "labels": ids})
        return memory.peak

    def predicted(k):
        shape = Shape(batch=k, seq=64, micro_batches=k)
        return estimate_gradient_accumulation(budget_of(model, shape), model, shape).peak

    step(make_batch())  # creates the states
    few = peak(2)
    many = peak(16)
    assert many == pytest.approx(few, rel=0.02)
    assert predicted(2) == pytest.approx(few, rel=0.05)
    assert predicted(16) == pytest.approx(many, rel=0.05)


def test_one_micro_batch_changes_no_budget_and_a_second_split_is_refused(llama):
    """A budget that is split twice would promise a quarter where a half is left."""
    whole = Shape(batch=8, seq=16)
    halves = Shape(batch=8, seq=16, micro_batches=2)
    plan = budget_of(llama, whole)
    same = estimate_gradient_accumulation(plan, llama, whole)
    assert same.terms() == plan.terms()
    split = estimate_gradient_accumulation(plan, llama, halves)
    assert split.shape == halves
    with pytest.raises(ValueError, match="2 micro-batches already"):
        estimate_gradient_accumulation(split, llama, halves)


@pytest.mark.parametrize(
    ("micro_batches", "message"),
    [(0, "whole number of 1 or more"), (-1, "1 or more"), (2.0, "whole"), (3, "divides"), (8, "4")],
)
def test_count_that_does_not_divide(llama, batch, micro_batches, message):
    with pytest.raises(ValueError, match=message):
        accumulate_gradients(llama, batch, micro_batches=micro_batches)


def test_batches_that_cannot_be_split(llama, batch):
    nothing_left = batch | {"labels": torch.full_like(batch["labels"], IGNORED)}
    without_labels = {"input_ids": batch["input_ids"]}
    no_rows = {name: tensor[:0] for name, tensor in batch.items()}
    for given, count, message in [
        ([batch], 2, "a sequence of micro-batches alone"),  # 2 would be ignored
        ([], None, "a sequence of micro-batches alone"),
        (batch, None, "the number of micro_batches"),
        (nothing_left, 2, "no token to train on"),  # the loss would be NaN
        (without_labels, 1, "input_ids and labels are needed"),
        ([batch, without_labels], None, "input_ids and labels are needed"),
        (no_rows, 1, "divides the batch size 0"),
        (None, None, "give one batch"),
        (3, None, "give one batch"),
        ([None], None, "a micro-batch is of type NoneType"),
        (batch | {"labels": batch["labels"][:, :3]}, 1, "give one label for each token"),
        (batch | {"labels": batch["labels"].tolist()}, 1, "labels is a list: give a tensor"),
        (batch | {"labels": batch["labels"].float()}, 1, "labels is a tensor of torch.float32"),
        ({name: tensor[0] for name, tensor in batch.items()}, 1, r"input_ids is .*\[B, S\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            accumulate_gradients(llama, given, micro_batches=count)
    assert gradients(llama) == {}


def test_optimizer_in_backward_is_refused(llama, batch):
    """It would step after the first micro-batch. With one micro-batch it is right."""
    parameter = next(llama.parameters())
    mark(parameter, STEPS_IN_BACKWARD)
    with pytest.raises(ValueError, match="steps in backward"):
        accumulate_gradients(llama, batch, micro_batches=2)
    accumulate_gradients(llama, batch, micro_batches=1)
    mark(parameter, STEPS_IN_BACKWARD, False)  # an offloaded optimizer that waits for the last one
    accumulate_gradients(llama, batch, micro_batches=2)


def test_an_auxiliary_loss_is_not_dropped_silently():
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=128,
        num_local_experts=2,
        output_router_logits=True,
    )
    with pytest.raises(ValueError, match="auxiliary loss"):
        accumulate_gradients(MixtralForCausalLM(config), make_batch(), micro_batches=2)


@pytest.mark.gpu
def test_equals_the_full_batch_on_gpu():
    model = model_of_shape("tiny-llama", device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch().items()}
    _, expected = full_batch(model, batch)
    accumulate_gradients(model, batch, micro_batches=2)
    assert_same_gradients(gradients(model), expected, atol=1e-5, rtol=1e-3)
