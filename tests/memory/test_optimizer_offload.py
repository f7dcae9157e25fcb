import copy
import gc
import weakref

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.testing import assert_close

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.bytes_of_tensors import tensor_bytes
from recipes_lib.memory.optimizer_offload import (
    host_bytes,
    offload_optimizer,
    step_on_the_host,
)
from tests.conftest import assert_equal, make_batch

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}


def train(model, optimizer, batches, *, micro_batches=1, max_grad_norm=None):
    """Steps of `micro_batches` batches, the learning rate warming up; clips where given a norm."""
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    for start in range(0, len(batches), micro_batches):
        for batch in batches[start : start + micro_batches]:
            model(**batch, use_cache=False).loss.backward()
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def plain_copy(model):
    model = copy.deepcopy(model)
    return model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


# --- the idea -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_hand_equals_the_real_one(llama, dtype):
    llama.to(dtype)
    by_hand = copy.deepcopy(llama)
    parameters = list(by_hand.parameters())
    masters = [parameter.detach().float().clone() for parameter in parameters]
    adamw = torch.optim.AdamW(masters, fused=True, **ADAMW)
    optimizer = offload_optimizer(llama, allow_cpu=True, **ADAMW)
    for batch in [make_batch() for _ in range(3)]:
        by_hand(**batch, use_cache=False).loss.backward()
        step_on_the_host(parameters, masters, adamw)
        llama(**batch, use_cache=False).loss.backward()
        optimizer.step()
    assert_equal(llama.state_dict(), by_hand.state_dict())


# --- the same training ----------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [3, None])
def test_accumulation_with_a_short_last_step(llama, micro_batches):
    batches = [make_batch() for _ in range(8)]  # steps of 3, 3 and 2
    plain, adamw = plain_copy(llama)
    train(plain, adamw, batches, micro_batches=3)
    optimizer = offload_optimizer(llama, micro_batches=micro_batches, allow_cpu=True, **ADAMW)
    train(llama, optimizer, batches, micro_batches=3)
    assert_close(llama.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-6)


def test_clipping(llama):
    batches = [make_batch() for _ in range(5)]
    plain, adamw = plain_copy(llama)
    train(plain, adamw, batches, max_grad_norm=0.1)
    train(llama, offload_optimizer(llama, max_grad_norm=0.1, allow_cpu=True, **ADAMW), batches)
    assert_close(llama.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-6)


def test_resumes(batch):
    """Masters are part of the state: bf16 weights alone would have lost their small updates."""
    dtype = torch.bfloat16
    model = model_of_shape("tiny-llama", dtype=dtype, device="cpu")
    optimizer = offload_optimizer(model, allow_cpu=True, **ADAMW)
    train(model, optimizer, [batch] * 3)
    other = model_of_shape("tiny-llama", dtype=dtype, device="cpu")
    resumed = offload_optimizer(other, allow_cpu=True, lr=1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, [batch] * 3)
    train(other, resumed, [batch] * 3)
    assert_equal(other.state_dict(), model.state_dict())


def test_resumes_from_plain_adamw_and_follows_loaded_weights(llama, batch):
    plain, adamw = plain_copy(llama)
    optimizer = offload_optimizer(llama, allow_cpu=True, **ADAMW)
    train(plain, adamw, [batch] * 3)
    optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
    # The masters of before must not win over these weights.
    llama.load_state_dict(plain.state_dict())
    train(plain, adamw, [batch] * 3)
    train(llama, optimizer, [batch] * 3)
    assert_equal(llama.state_dict(), plain.state_dict())


# --- what is refused, and what an error leaves ----------------------------------------------------


def test_a_second_backward_must_be_announced(llama, batch):
    optimizer = offload_optimizer(llama, allow_cpu=True, lr=1e-3)
    llama(**batch, use_cache=False).loss.backward()
    # The worker updates beside this thread. Otherwise autograd may be the first to notice, and say
    # that a weight of the second forward was changed in place.
    for slot in optimizer._slots.values():
        slot.wait()
    with pytest.raises(RuntimeError, match="pass micro_batches"):
        llama(**batch, use_cache=False).loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="no gradient has arrived"):
        optimizer.step()


def test_remove_gives_plain_training_back(llama, batch):
    offload_optimizer(llama, allow_cpu=True, lr=1e-3).remove()
    llama(**batch, use_cache=False).loss.backward()
    assert all(parameter.grad is not None for parameter in llama.parameters())
    assert not any(vars(parameter) for parameter in llama.parameters())  # no mark is left


def test_model_and_masters_are_collected(batch):
    model = model_of_shape("tiny-llama", device="cpu")
    optimizer = offload_optimizer(model, allow_cpu=True, lr=1e-3)
    train(model, optimizer, [batch])
    master = weakref.ref(optimizer.state_dict()["masters"][0])
    del model, optimizer
    gc.collect()
    assert master() is None, "the model keeps its optimizer alive for ever"


def test_what_would_be_wrong_is_refused(llama):
    """A second optimizer would find no gradient, and fp16 has to see all of them first."""
    with pytest.raises(ValueError, match="eight_bit_adam"):
        offload_optimizer(llama, lr=1e-3)
    # The mark STEPS_IN_BACKWARD would miss this one, whose first backward updates nothing.
    offload_optimizer(llama, lr=1e-3, allow_cpu=True, micro_batches=2)
    with pytest.raises(ValueError, match="remove"):
        offload_optimizer(llama, lr=1e-3, allow_cpu=True)
    with pytest.raises(ValueError, match="fp16"):
        offload_optimizer(copy.deepcopy(llama).half(), lr=1e-3, allow_cpu=True)


def test_too_little_host_memory(monkeypatch, llama):
    memory = type("Memory", (), {"available": host_bytes(llama)})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(ValueError, match="bytes of host memory are needed"):
        offload_optimizer(llama, lr=1e-3, allow_cpu=True)


# --- what it saves --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}])
def test_equals_plain_adamw_on_gpu_and_frees_its_memory(options):
    norm = options.get("max_grad_norm")

    def trained(make, norm):
        """The same start for both: parameters after four batches, and the peak of four more."""
        torch.manual_seed(0)
        model = model_of_shape("smollm2-135m", layers=4, device="cuda")
        batches = [
            {"input_ids": ids, "labels": ids}
            for ids in torch.randint(0, 49152, (4, 2, 16), device="cuda")
        ]
        optimizer = make(model)
        train(model, optimizer, batches, max_grad_norm=norm)
        after = copy.deepcopy(model).cpu()
        with PeakMemory() as memory:
            train(model, optimizer, batches, max_grad_norm=norm)
        return after, memory.peak

    model, peak = trained(lambda model: offload_optimizer(model, **ADAMW, **options), None)
    plain, plain_peak = trained(
        lambda model: torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), norm
    )
    # AdamW divides by the gradient's size: where that is near zero, a rounding error of it shows.
    pairs = zip(model.parameters(), plain.parameters())
    differing = sum((~torch.isclose(got, want, rtol=1e-3, atol=1e-3)).sum() for got, want in pairs)
    assert differing < 1e-3 * sum(p.numel() for p in model.parameters())
    states = 2 * sum(tensor_bytes(parameter) for parameter in plain.parameters())
    assert plain_peak - peak > 0.9 * states
