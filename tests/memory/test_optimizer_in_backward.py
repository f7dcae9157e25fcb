import copy
import gc
import weakref

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.marks import STEPS_IN_BACKWARD, marked
from recipes_lib.memory.optimizer_in_backward import (
    apply_optimizer_in_backward,
    one_optimizer_per_parameter,
)
from recipes_lib.training.gradient_accumulation import accumulate_gradients
from tests.conftest import assert_equal, make_batch

ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}


def train(model, optimizer, batches):
    """The same loop for both: warm-up of the learning rate, one step per batch."""
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    for batch in batches:
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


# --- the idea -------------------------------------------------------------------------------------


def test_by_hand_equals_the_real_one(llama):
    batches = [make_batch() for _ in range(3)]
    by_hand = copy.deepcopy(llama)
    hooks = one_optimizer_per_parameter(by_hand, torch.optim.AdamW, **ADAMW)
    handle = apply_optimizer_in_backward(llama, **ADAMW)
    for batch in batches:
        by_hand(**batch, use_cache=False).loss.backward()
        llama(**batch, use_cache=False).loss.backward()
        handle.step()
    assert_equal(llama.state_dict(), by_hand.state_dict())
    assert all(parameter.grad is None for parameter in by_hand.parameters())
    for hook in hooks:
        hook.remove()


# --- the same training ----------------------------------------------------------------------------


def test_resumes_from_a_plain_run(llama, batch):
    plain = copy.deepcopy(llama)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    train(plain, optimizer, [batch] * 3)
    resumed = copy.deepcopy(plain)
    handle = apply_optimizer_in_backward(resumed, **ADAMW)
    handle.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(plain, optimizer, [batch] * 3)
    train(resumed, handle, [batch] * 3)
    assert_equal(resumed.state_dict(), plain.state_dict())
    torch.testing.assert_close(handle.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


# --- what is refused ------------------------------------------------------------------------------


def test_a_second_backward_before_step(llama, batch):
    handle = apply_optimizer_in_backward(llama, lr=1e-3)
    with pytest.raises(ValueError, match="steps in backward"):
        accumulate_gradients(llama, batch, micro_batches=2)
    llama(**batch, use_cache=False).loss.backward()
    updated = copy.deepcopy(llama)
    handle.zero_grad()  # takes nothing back
    with pytest.raises(RuntimeError, match="second backward before step"):
        llama(**batch, use_cache=False).loss.backward()
    assert_equal(llama.state_dict(), updated.state_dict())
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


def test_model_and_states_are_collected():
    model = model_of_shape("tiny-llama", device="cpu")
    apply_optimizer_in_backward(model)
    weight = weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    assert weight() is None, "the hooks keep the model alive for ever"


def test_a_second_optimizer_is_refused(llama):
    """The mistake: it finds no gradient, and nobody is told."""
    handle = apply_optimizer_in_backward(llama)
    with pytest.raises(ValueError, match="remove"):
        apply_optimizer_in_backward(llama)
    handle.remove()
    apply_optimizer_in_backward(llama).remove()


def test_remove_gives_plain_training_back(llama, batch):
    before = copy.deepcopy(llama)
    handle = apply_optimizer_in_backward(llama)
    assert all(marked(parameter, STEPS_IN_BACKWARD) for parameter in llama.parameters())
    handle.remove()
    llama(**batch, use_cache=False).loss.backward()
    assert_equal(llama.state_dict(), before.state_dict())
    assert all(parameter.grad is not None for parameter in llama.parameters())
    assert not any(vars(parameter) for parameter in llama.parameters())  # no mark is left
