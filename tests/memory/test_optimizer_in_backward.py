import copy
import gc
import weakref

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.memory.optimizer_in_backward import (
    apply_optimizer_in_backward,
    estimate_optimizer_in_backward,
)
from recipes_lib.training.gradient_accumulation import accumulate_gradients
from tests.conftest import make_batch

ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}


def train(model, optimizer, batches):
    """The same loop for both: warm-up of the learning rate, one step per batch."""
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    for batch in batches:
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def assert_same_parameters(model, expected):
    for (name, got), want in zip(model.named_parameters(), expected.parameters()):
        assert torch.equal(got, want), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ten_steps_equal_the_plain_optimizer_exactly(tiny, dtype):
    model, batches = tiny.to(dtype), [make_batch() for _ in range(10)]
    plain = copy.deepcopy(model)
    train(plain, torch.optim.AdamW(plain.parameters(), **ADAMW), batches)
    train(model, apply_optimizer_in_backward(model, **ADAMW), batches)
    assert_same_parameters(model, plain)
    assert all(p.grad is None for p in model.parameters())


def test_frozen_and_unused_parameters(llama, batch):
    llama.unused = torch.nn.Parameter(torch.ones(3))
    llama.model.norm.weight.requires_grad_(False)
    plain = copy.deepcopy(llama)
    train(plain, torch.optim.AdamW(plain.parameters(), **ADAMW), [batch] * 3)
    train(llama, apply_optimizer_in_backward(llama, **ADAMW), [batch] * 3)
    assert_same_parameters(llama, plain)
    assert not hasattr(llama.model.norm.weight, "steps_in_backward")


def test_resumes_from_a_plain_run(llama, batch):
    plain = copy.deepcopy(llama)
    train(plain, optimizer := torch.optim.AdamW(plain.parameters(), **ADAMW), [batch] * 3)
    resumed = copy.deepcopy(plain)
    handle = apply_optimizer_in_backward(resumed, **ADAMW)
    handle.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(plain, optimizer, [batch] * 3)
    train(resumed, handle, [batch] * 3)
    assert_same_parameters(resumed, plain)
    torch.testing.assert_close(handle.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def test_eight_bit_adam(llama, batch):
    bnb = pytest.importorskip("bitsandbytes")
    plain, expected = copy.deepcopy(llama), llama
    train(plain, bnb.optim.AdamW8bit(plain.parameters(), lr=1e-2), [batch] * 5)
    handle = apply_optimizer_in_backward(llama, optimizer_class=bnb.optim.AdamW8bit, lr=1e-2)
    train(llama, handle, [batch] * 5)
    assert_same_parameters(plain, expected)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-mistral"])  # tied and separate embeddings
@pytest.mark.parametrize("seq_len", [1, 64])
def test_gradients_vanish_as_estimated(shape, seq_len):
    model = model_of_shape(shape, layers=4, device="cpu")
    ids = torch.randint(0, 128, (2, seq_len))

    def peak(optimizer):
        for _ in range(2):  # the first step creates the states
            with PeakMemory() as memory:
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return memory.peak

    plain = peak(torch.optim.AdamW(model.parameters(), fused=True))
    measured = peak(apply_optimizer_in_backward(model, fused=True))
    budget = budget_of(model, batch_size=2, seq_len=seq_len)
    plan = estimate_optimizer_in_backward(budget, model)
    assert plan.peak == pytest.approx(measured, rel=0.05)
    assert measured <= plain
    if seq_len == 1:  # hardly any activations: the whole saving shows
        assert plain - measured == pytest.approx(budget.gradients - plan.gradients, rel=0.1)


def test_a_second_backward_before_step(llama, batch):
    handle = apply_optimizer_in_backward(llama, lr=1e-3)
    with pytest.raises(ValueError, match="steps in backward"):
        accumulate_gradients(llama, batch, micro_batches=2)
    llama(**batch, use_cache=False).loss.backward()
    updated = copy.deepcopy(llama)
    handle.zero_grad()  # takes nothing back
    with pytest.raises(RuntimeError, match="second backward before step"):
        llama(**batch, use_cache=False).loss.backward()
    assert_same_parameters(llama, updated)
    handle.zero_grad()
    handle.step()
    with pytest.raises(RuntimeError, match="without a backward"):
        handle.step()


def test_clipping_is_refused_and_the_trap_is_as_documented(llama, batch):
    with pytest.raises(ValueError, match="global norm is unknown"):
        apply_optimizer_in_backward(llama, max_grad_norm=1.0)
    apply_optimizer_in_backward(llama, lr=1e-3)
    llama(**batch, use_cache=False).loss.backward()
    assert torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0) == 0


def test_model_and_states_are_collected(llama):
    model = model_of_shape("tiny-llama", device="cpu")
    apply_optimizer_in_backward(model)
    weight = weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    assert weight() is None, "the hooks keep the model alive for ever"


def test_bad_input(llama):
    handle = apply_optimizer_in_backward(llama)
    with pytest.raises(ValueError, match="remove"):
        apply_optimizer_in_backward(llama)
    with pytest.raises(ValueError, match="closure"):
        handle.step(lambda: None)
    handle.remove()
    apply_optimizer_in_backward(llama).remove()
    with pytest.raises(ValueError, match="no trainable parameter"):
        apply_optimizer_in_backward(llama.requires_grad_(False))


def test_remove_gives_plain_training_back(llama, batch):
    before = copy.deepcopy(llama)
    apply_optimizer_in_backward(llama).remove()
    llama(**batch, use_cache=False).loss.backward()
    assert_same_parameters(llama, before)
    assert all(p.grad is not None for p in llama.parameters())


@pytest.mark.gpu
def test_equals_the_plain_optimizer_on_gpu_and_frees_gradients():
    def trained(make):
        """The same start for both: parameters after four steps, and the peak of the fourth."""
        torch.manual_seed(0)
        model = model_of_shape("smollm2-135m", layers=4, dtype=torch.bfloat16, device="cuda")
        ids = torch.randint(0, 49152, (2, 16), device="cuda")
        optimizer, batch = make(model), {"input_ids": ids, "labels": ids}
        train(model, optimizer, [batch] * 3)
        with PeakMemory() as memory:
            train(model, optimizer, [batch])
        return model.cpu(), memory.peak

    model, peak = trained(lambda model: apply_optimizer_in_backward(model, **ADAMW))
    plain, plain_peak = trained(lambda model: torch.optim.AdamW(model.parameters(), **ADAMW))
    # AdamW divides by the gradient's size: where that is near zero, a rounding error of it shows.
    pairs = zip(model.parameters(), plain.parameters())
    differing = sum((~torch.isclose(got, want, rtol=1e-2, atol=1e-3)).sum() for got, want in pairs)
    assert differing < 1e-3 * sum(p.numel() for p in model.parameters())
    budget = budget_of(plain, batch_size=2, seq_len=16)
    saved = budget.gradients - estimate_optimizer_in_backward(budget, plain).gradients
    assert plain_peak - peak > 0.8 * saved
