import itertools

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from recipes_lib.core.data import IGNORED, collate
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.fine_tuning.completion_only_loss import completion_only_loss
from recipes_lib.training.gradient_accumulation import (
    accumulate_gradients,
    estimate_gradient_accumulation,
)
from tests.conftest import assert_same_gradients, gradients, make_batch


def full_batch(model, batch):
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    return loss.detach(), expected


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_equals_the_full_batch(tiny, batch, micro_batches):
    expected_loss, expected = full_batch(tiny, batch)
    loss = accumulate_gradients(tiny, batch, micro_batches=micro_batches)
    torch.testing.assert_close(loss, expected_loss)
    assert_same_gradients(gradients(tiny), expected)


def test_dividing_by_own_mean_is_the_bug(llama, batch):
    _, expected = full_batch(llama, batch)
    for row in range(4):
        (
            llama(**{k: v[row : row + 1] for k, v in batch.items()}, use_cache=False).loss / 4
        ).backward()
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients(llama), expected, atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize("sizes", [(1, 4, 1), (5, 1), (1, 1, 1, 1, 1, 1)])
def test_micro_batches_of_any_sizes_and_lengths_equal_the_whole(tiny, sizes):
    """Each is padded to its own longest row, and only the logits of answers are computed."""
    rows = []
    for length in torch.randint(5, 24, (6,)).tolist():
        ids = torch.randint(1, 128, (length,)).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORED] * (length // 2) + ids[length // 2 :]})
    expected_loss, expected = full_batch(tiny, collate(rows, pad_token_id=0))
    rest = iter(rows)
    micros = [collate(itertools.islice(rest, size), pad_token_id=0) for size in sizes]
    loss = accumulate_gradients(tiny, micros, loss_sum=completion_only_loss)
    torch.testing.assert_close(loss, expected_loss, atol=0, rtol=1e-5)
    assert_same_gradients(gradients(tiny), expected, atol=1e-5)


def test_a_sequence_is_split_already(llama, batch):
    with pytest.raises(ValueError, match="a sequence of micro-batches alone"):
        accumulate_gradients(llama, [batch], micro_batches=2)


def test_bf16_weights(llama):
    model, batch = llama.bfloat16(), make_batch()
    _, expected = full_batch(model, batch)
    accumulate_gradients(model, batch, micro_batches=2)
    assert_same_gradients(gradients(model), expected, atol=2e-2, rtol=5e-2)


@pytest.mark.parametrize("micro_batches", [2, 4, 8, 16])
def test_memory_stays_flat_and_as_estimated(micro_batches):
    """The effective batch grows 2-16x; the peak stays that of k = 2, and the estimate holds."""
    model = model_of_shape("tiny-llama", layers=8, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def peak(k):
        batch = {"input_ids": (ids := torch.randint(0, 128, (k, 64))), "labels": ids}
        for _ in range(2):  # the first step creates the states
            with PeakMemory() as memory:
                accumulate_gradients(model, batch, micro_batches=k)
                optimizer.step()
                optimizer.zero_grad()
        return memory.peak

    plan = budget_of(model, batch_size=micro_batches, seq_len=64)
    plan = estimate_gradient_accumulation(
        plan, model, batch_size=micro_batches, seq_len=64, micro_batches=micro_batches
    )
    assert peak(micro_batches) == pytest.approx(peak(2), rel=0.02)
    assert plan.peak == pytest.approx(peak(micro_batches), rel=0.05)


@pytest.mark.parametrize("micro_batches", [0, -1, 3, 8])
def test_count_that_does_not_divide(llama, batch, micro_batches):
    with pytest.raises(ValueError, match="divide the batch size 4"):
        accumulate_gradients(llama, batch, micro_batches=micro_batches)


def test_no_target_left(llama, batch):
    with pytest.raises(ValueError, match="no token to train on"):
        accumulate_gradients(
            llama, batch | {"labels": torch.full_like(batch["labels"], -100)}, micro_batches=2
        )


def test_optimizer_in_backward_is_refused(llama, batch):
    next(llama.parameters()).steps_in_backward = True
    with pytest.raises(ValueError, match="steps in backward"):
        accumulate_gradients(llama, batch, micro_batches=2)


def test_a_batch_without_labels(llama, batch):
    del batch["labels"]
    with pytest.raises(ValueError, match="input_ids and labels are needed"):
        accumulate_gradients(llama, batch, micro_batches=1)


def test_an_auxiliary_loss_is_not_dropped_silently():
    config = MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=128, num_local_experts=2, output_router_logits=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="auxiliary loss"):
        accumulate_gradients(MixtralForCausalLM(config), make_batch(), micro_batches=2)


@pytest.mark.gpu
def test_equals_the_full_batch_on_gpu():
    model = model_of_shape("tiny-llama", device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch().items()}
    _, expected = full_batch(model, batch)
    accumulate_gradients(model, batch, micro_batches=2)
    assert_same_gradients(gradients(model), expected, atol=1e-5, rtol=1e-3)
