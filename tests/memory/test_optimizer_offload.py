import copy
import gc
import weakref

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.core.sizes import tensor_bytes
from recipes_lib.memory.optimizer_offload import (
    estimate_optimizer_offload,
    host_bytes,
    offload_optimizer,
)
from recipes_lib.training.gradient_accumulation import split_budget
from tests.conftest import make_batch

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}


def train(model, optimizer, batches, *, micro_batches=1, max_grad_norm=None):
    """One step per group of `micro_batches` batches, the learning rate warming up. Clips where given a norm."""
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    for start in range(0, len(batches), micro_batches):
        for batch in batches[start : start + micro_batches]:
            model(**batch, use_cache=False).loss.backward()
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def assert_same_parameters(model, expected, **tolerance):
    for (name, got), want in zip(model.named_parameters(), expected.parameters()):
        torch.testing.assert_close(
            got, want, **tolerance or {"rtol": 0, "atol": 0}, msg=lambda m, n=name: f"{n}: {m}"
        )


def plain_copy(model):
    model = copy.deepcopy(model)
    return model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


def test_twenty_steps_equal_plain_adamw_exactly(tiny):
    batches = [make_batch() for _ in range(20)]
    plain, adamw = plain_copy(tiny)
    train(plain, adamw, batches)
    train(tiny, offload_optimizer(tiny, allow_cpu=True, **ADAMW), batches)
    assert_same_parameters(tiny, plain)
    assert all(p.grad is None for p in tiny.parameters())


@pytest.mark.parametrize("micro_batches", [3, None])
def test_accumulation_with_a_short_last_step(llama, micro_batches):
    batches = [make_batch() for _ in range(8)]  # steps of 3, 3 and 2
    plain, adamw = plain_copy(llama)
    train(plain, adamw, batches, micro_batches=3)
    optimizer = offload_optimizer(llama, micro_batches=micro_batches, allow_cpu=True, **ADAMW)
    train(llama, optimizer, batches, micro_batches=3)
    assert_same_parameters(llama, plain, rtol=1e-6, atol=1e-6)


def test_clipping(llama):
    batches = [make_batch() for _ in range(5)]
    plain, adamw = plain_copy(llama)
    train(plain, adamw, batches, max_grad_norm=0.1)
    train(llama, offload_optimizer(llama, max_grad_norm=0.1, allow_cpu=True, **ADAMW), batches)
    assert_same_parameters(llama, plain, rtol=1e-6, atol=1e-6)


def test_bf16_weights_keep_fp32_masters(llama, batch):
    """Updates far below a bf16 step add up in the master; plain bf16 AdamW loses them all."""
    options = {"lr": 1e-6, "weight_decay": 0.0}
    model, plain = llama.bfloat16(), copy.deepcopy(llama)
    before = copy.deepcopy(model)
    train(plain, torch.optim.AdamW(plain.parameters(), **options), [batch] * 5)
    optimizer = offload_optimizer(model, allow_cpu=True, **options)
    train(model, optimizer, [batch] * 5)
    norm = [name for name, _ in model.named_parameters()].index("model.norm.weight")
    assert torch.equal(plain.model.norm.weight, before.model.norm.weight)
    moved = (optimizer.state_dict()["masters"][norm] - 1).abs()
    assert 2e-6 < moved.max() < 4e-6  # the warm-up's 0.2 + 0.4 + 0.6 + 0.8 + 1 times 1e-6


def test_frozen_and_unused_parameters(llama, batch):
    llama.unused = torch.nn.Parameter(torch.ones(3))
    llama.model.norm.weight.requires_grad_(False)
    plain, adamw = plain_copy(llama)
    train(plain, adamw, [batch] * 3)
    train(llama, offload_optimizer(llama, allow_cpu=True, **ADAMW), [batch] * 3)
    assert_same_parameters(llama, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes(batch, dtype):
    model, other = (model_of_shape("tiny-llama", dtype=dtype, device="cpu") for _ in range(2))
    train(model, optimizer := offload_optimizer(model, allow_cpu=True, **ADAMW), [batch] * 3)
    resumed = offload_optimizer(other, allow_cpu=True, lr=1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, resumed)):
        train(m, o, [batch] * 3)
    assert_same_parameters(other, model)


def test_resumes_from_plain_adamw_and_follows_loaded_weights(llama, batch):
    plain, adamw = plain_copy(llama)
    optimizer = offload_optimizer(llama, allow_cpu=True, **ADAMW)
    train(plain, adamw, [batch] * 3)
    optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
    llama.load_state_dict(
        plain.state_dict()
    )  # the master of before must not win over these weights
    train(plain, adamw, [batch] * 3)
    train(llama, optimizer, [batch] * 3)
    assert_same_parameters(llama, plain)


def on_the_host(model):
    """`host_bytes` without the rounding of pinned memory: fp32 master, gradient, two averages, a copy."""
    return sum(16 * p.numel() + tensor_bytes(p) for p in model.parameters())


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-mistral"])  # tied and separate embeddings
@pytest.mark.parametrize("seq_len", [1, 64])
def test_device_memory_as_estimated(shape, seq_len):
    """Here host and device are one memory: the device's part is what stays without the host's tensors."""
    model = model_of_shape(shape, layers=4, device="cpu")
    ids = torch.randint(0, 128, (2, seq_len))
    optimizer = offload_optimizer(model, lr=1e-3, allow_cpu=True)
    for _ in range(2):  # the first step creates the states
        with PeakMemory() as memory:
            train(model, optimizer, [{"input_ids": ids, "labels": ids}])
    budget = budget_of(model, batch_size=2, seq_len=seq_len)
    plan = estimate_optimizer_offload(budget, model)
    assert plan.peak == pytest.approx(memory.peak - on_the_host(model), rel=0.05)
    assert plan.peak <= budget.peak - budget.states


def test_a_second_backward_must_be_announced(llama, batch):
    optimizer = offload_optimizer(llama, allow_cpu=True, lr=1e-3)
    llama(**batch, use_cache=False).loss.backward()
    with pytest.raises(RuntimeError, match="pass micro_batches"):
        llama(**batch, use_cache=False).loss.backward()
    with pytest.raises(RuntimeError, match="applied these gradients"):
        optimizer.zero_grad()
    optimizer.step()
    with pytest.raises(RuntimeError, match="no gradient has arrived"):
        optimizer.step()


def test_zero_grad_drops_what_has_arrived(llama, batch):
    optimizer = offload_optimizer(llama, micro_batches=None, allow_cpu=True, **ADAMW)
    plain, adamw = plain_copy(llama)
    train(plain, adamw, [batch])
    llama(**make_batch(), use_cache=False).loss.backward()
    optimizer.zero_grad()
    train(llama, optimizer, [batch])
    assert_same_parameters(llama, plain)


def test_an_error_in_the_worker_is_raised(llama, batch, monkeypatch):
    def fail(self):
        raise MemoryError("no host memory")

    optimizer = offload_optimizer(llama, allow_cpu=True, lr=1e-3)
    monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    llama(**batch, use_cache=False).loss.backward()
    with pytest.raises(MemoryError, match="no host memory"):
        optimizer.step()


def test_remove_and_garbage_collection(llama, batch):
    offload_optimizer(llama, allow_cpu=True, lr=1e-3).remove()
    llama(**batch, use_cache=False).loss.backward()
    assert all(p.grad is not None for p in llama.parameters())
    model = model_of_shape("tiny-llama", device="cpu")
    train(model, optimizer := offload_optimizer(model, allow_cpu=True, lr=1e-3), [batch])
    master = weakref.ref(optimizer.state_dict()["masters"][0])
    del model, optimizer
    gc.collect()
    assert master() is None, "the model keeps its optimizer alive for ever"


def test_bad_input(llama):
    with pytest.raises(ValueError, match="eight_bit_adam"):
        offload_optimizer(llama, lr=1e-3)
    for numbers in ({"micro_batches": 0}, {"max_grad_norm": 0.0}, {"max_grad_norm": -1.0}):
        with pytest.raises(ValueError, match="positive"):
            offload_optimizer(llama, lr=1e-3, allow_cpu=True, **numbers)
    offload_optimizer(llama, lr=1e-3, allow_cpu=True)
    with pytest.raises(ValueError, match="remove"):
        offload_optimizer(llama, lr=1e-3, allow_cpu=True)
    with pytest.raises(ValueError, match="fp16"):
        offload_optimizer(copy.deepcopy(llama).half(), lr=1e-3, allow_cpu=True)
    with pytest.raises(ValueError, match="0 devices"):
        offload_optimizer(copy.deepcopy(llama).requires_grad_(False), lr=1e-3, allow_cpu=True)


def test_device_memory_with_accumulation_as_estimated():
    model, size = (
        model_of_shape("tiny-llama", layers=4, device="cpu"),
        {"batch_size": 8, "seq_len": 64},
    )
    ids = torch.randint(0, 128, (8, 64))
    optimizer = offload_optimizer(model, lr=1e-3, micro_batches=4, allow_cpu=True)
    batches = [{"input_ids": part, "labels": part} for part in ids.chunk(4)]
    for _ in range(2):  # the first step creates the states
        with PeakMemory() as memory:
            train(model, optimizer, batches, micro_batches=4)
    plan = split_budget(budget_of(model, **size), model, **size, micro_batches=4)
    plan = estimate_optimizer_offload(plan, model)
    assert plan.peak == pytest.approx(memory.peak - on_the_host(model), rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"max_grad_norm": 0.1}])
def test_equals_plain_adamw_on_gpu_and_frees_its_memory(options):
    k, norm = options.get("micro_batches", 1), options.get("max_grad_norm")

    def trained(make, norm):
        """The same start for both: parameters after four batches, and the peak of four more."""
        torch.manual_seed(0)
        model = model_of_shape("smollm2-135m", layers=4, device="cuda")
        batches = [
            {"input_ids": ids, "labels": ids}
            for ids in torch.randint(0, 49152, (4, 2, 16), device="cuda")
        ]
        optimizer = make(model)
        train(model, optimizer, batches, micro_batches=k, max_grad_norm=norm)
        after = copy.deepcopy(model).cpu()
        with PeakMemory() as memory:
            train(model, optimizer, batches, micro_batches=k, max_grad_norm=norm)
        return after, memory.peak

    model, peak = trained(lambda model: offload_optimizer(model, **ADAMW, **options), None)
    plain, plain_peak = trained(
        lambda model: torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), norm
    )
    # AdamW divides by the gradient's size: where that is near zero, a rounding error of it shows.
    pairs = zip(model.parameters(), plain.parameters())
    differing = sum((~torch.isclose(got, want, rtol=1e-3, atol=1e-3)).sum() for got, want in pairs)
    assert differing < 1e-3 * sum(p.numel() for p in model.parameters())
    assert plain_peak - peak > 0.9 * budget_of(plain, batch_size=2, seq_len=16).states


def test_too_little_host_memory(monkeypatch, llama):
    memory = type("Memory", (), {"available": host_bytes(llama)})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(ValueError, match="bytes of host memory are needed"):
        offload_optimizer(llama, lr=1e-3, allow_cpu=True)
