import itertools

import pytest
import torch

from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.memory.optimizer_offload import offload_optimizer
from recipes_lib.training.dynamic_batch import (
    Attempt,
    estimate_dynamic_batch,
    fit_micro_batches,
    is_out_of_memory,
)
from recipes_lib.training.gradient_accumulation import accumulate_gradients
from tests.conftest import FAMILIES, assert_same_gradients, gradients, make_batch

SIZES = {"batch_size": 8, "seq_len": 48}


def trained(family="tiny-llama"):
    """A model of four blocks, its optimizer with states, and a batch of unequal rows."""
    model = model_of_shape(family, layers=4, device="cpu")
    batch = make_batch(**SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    accumulate_gradients(model, batch, micro_batches=8)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, batch


def limit_for(model, micro_batches):
    """Bytes between what k and k/2 micro-batches need: k is the first that fits."""
    plan, activations = budget_of(model, **SIZES), {}
    for k in (micro_batches, micro_batches // 2):
        activations[k] = plan.activations // k + plan.loss // k + plan.gradients * (k > 1)
    return plan.weights + plan.states + sum(activations.values()) // 2


def out_of_memory(k):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_full_batch_after_running_out_of_memory(family):
    model, _, batch = trained(family)
    expected_loss = accumulate_gradients(model, batch, micro_batches=1)
    expected = gradients(model)
    model.zero_grad()
    with PeakMemory(limit_bytes=limit_for(model, 4)):
        fitted = fit_micro_batches(
            lambda k: accumulate_gradients(model, batch, micro_batches=k), model=model, batch_size=8
        )
    assert fitted.attempts == [
        Attempt(1, False, None),
        Attempt(2, False, None),
        Attempt(4, True, None),
    ]
    assert fitted.micro_batches == 4
    torch.testing.assert_close(fitted.result, expected_loss)
    assert_same_gradients(gradients(model), expected)


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_finds_what_the_arithmetic_predicts(micro_batches):
    model, _, batch = trained()
    limit = limit_for(model, micro_batches)
    with PeakMemory(limit_bytes=limit):
        fitted = fit_micro_batches(
            lambda k: accumulate_gradients(model, batch, micro_batches=k), model=model, batch_size=8
        )
    plan = budget_of(model, **SIZES)
    assert fitted.micro_batches == micro_batches
    assert estimate_dynamic_batch(plan, model, **SIZES, limit_bytes=limit) == micro_batches
    assert estimate_dynamic_batch(plan, model, **SIZES, limit_bytes=plan.peak) == 1
    with pytest.raises(ValueError, match="micro-batches do not help"):
        estimate_dynamic_batch(plan, model, **SIZES, limit_bytes=plan.weights)


def test_failed_attempts_leave_no_memory_behind():
    model, _, batch = trained()
    alive = []
    with PeakMemory(limit_bytes=limit_for(model, 4)) as memory:

        def step(k):
            alive.append(memory.current)
            return accumulate_gradients(model, batch, micro_batches=k)

        fitted = fit_micro_batches(step, model=model, batch_size=8, measure_peaks=True)
        assert len(alive) == 3 and max(alive) - min(alive) < 1024
        model.zero_grad()
        assert memory.current - alive[0] < 1024
    assert alive[0] < fitted.attempts[-1].peak_bytes <= limit_for(model, 4)
    assert str(fitted.attempts[-1]).startswith("4 micro-batches: fits, peak ")


def test_an_error_that_gives_up_leaves_no_memory_behind():
    model, _, batch = trained()
    with PeakMemory(limit_bytes=limit_for(model, 8) - 2**20) as memory:
        before = memory.current
        with pytest.raises(torch.OutOfMemoryError, match="even one row at a time") as error:
            fit_micro_batches(
                lambda k: accumulate_gradients(model, batch, micro_batches=k),
                model=model,
                batch_size=8,
            )
        assert memory.current - before < 1024  # although the error and its traceback are alive
    assert "1 micro-batches: out of memory; 2 micro-batches: out of memory; 4" in str(error.value)
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    assert gradients(model) == {}


def test_dropout_draws_what_a_direct_step_draws():
    model, _, batch = trained()
    for block in decoder_blocks(model):
        block.self_attn.attention_dropout = 0.5
    torch.manual_seed(1)
    accumulate_gradients(model, batch, micro_batches=4)
    expected = gradients(model)
    model.zero_grad()
    torch.manual_seed(1)

    def step(k):
        accumulate_gradients(model, batch, micro_batches=k)
        return out_of_memory(k) if k < 4 else None

    fit_micro_batches(step, model=model, batch_size=8)
    assert_same_gradients(gradients(model), expected)


@pytest.mark.parametrize(
    ("batch_size", "start", "tried"),
    [
        (8, 1, [1, 2, 4, 8]),
        (6, 1, [1, 2, 6]),
        (9, 1, [1, 3, 9]),
        (10, 1, [1, 2, 5, 10]),
        (12, 3, [3, 6, 12]),
    ],
)
def test_goes_through_the_divisors(llama, batch_size, start, tried):
    calls = []
    with pytest.raises(torch.OutOfMemoryError):
        fit_micro_batches(
            lambda k: calls.append(k) or out_of_memory(k),
            model=llama,
            batch_size=batch_size,
            micro_batches=start,
        )
    assert calls == tried


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
    ],
)
def test_retries_what_libraries_report_as_out_of_memory(llama, text):
    failures = itertools.chain([RuntimeError(text)], itertools.repeat(None))

    def step(k):
        if failure := next(failures):
            raise failure
        return k

    assert fit_micro_batches(step, model=llama, batch_size=8).result == 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (RuntimeError, "mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"),
        (
            RuntimeError,
            "NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'",
        ),  # no retry can help
        (RuntimeError, "CUDA error: an illegal memory access was encountered"),
        (ValueError, "CUDA out of memory"),
        (KeyboardInterrupt, ""),
    ],
)
def test_other_errors_pass_untouched(llama, kind, text):
    error = kind(
        text
    )  # here and not among the parameters, which would keep it, its frames and the model alive
    calls = []

    def step(k):
        calls.append(k)
        raise error

    with pytest.raises(kind) as caught:
        fit_micro_batches(step, model=llama, batch_size=8)
    assert caught.value is error and calls == [1] and not is_out_of_memory(error)


@pytest.mark.parametrize(("batch_size", "micro_batches"), [(8, 0), (8, 3), (0, 1), (4, 8)])
def test_count_that_does_not_divide(llama, batch_size, micro_batches):
    with pytest.raises(ValueError, match="must be 1 or more and divide"):
        fit_micro_batches(
            out_of_memory, model=llama, batch_size=batch_size, micro_batches=micro_batches
        )


def test_gradients_from_before_are_refused_and_kept(llama, batch):
    accumulate_gradients(llama, batch, micro_batches=2)
    before = gradients(llama)
    with pytest.raises(ValueError, match="gradients are already there"):
        fit_micro_batches(out_of_memory, model=llama, batch_size=4)
    assert_same_gradients(gradients(llama), before, atol=0, rtol=0)


def test_a_step_that_changed_the_weights_is_not_repeated(llama, batch):
    optimizer = torch.optim.AdamW(llama.parameters())

    def step(k):
        accumulate_gradients(llama, batch, micro_batches=k)
        optimizer.step()
        out_of_memory(k)

    with pytest.raises(ValueError, match=r"call optimizer.step\(\) after"):
        fit_micro_batches(step, model=llama, batch_size=4)


def test_optimizer_in_backward_and_several_processes_are_refused(llama, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(ValueError, match="on one process"):
            fit_micro_batches(out_of_memory, model=llama, batch_size=4)
    next(llama.parameters()).steps_in_backward = True
    with pytest.raises(ValueError, match="takes gradients in backward"):
        fit_micro_batches(out_of_memory, model=llama, batch_size=4)


def test_offloaded_gradients_are_refused(llama):
    """They are on the host, where a failed attempt's could not be told from those before."""
    offload_optimizer(llama, lr=1e-3, micro_batches=None, allow_cpu=True)
    with pytest.raises(ValueError, match="takes gradients in backward"):
        fit_micro_batches(out_of_memory, model=llama, batch_size=4)


@pytest.mark.gpu
def test_under_a_cap_on_gpu():
    model = model_of_shape("smollm2-135m", layers=2, device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch(16, 512, vocab=49152).items()}
    expected_loss = accumulate_gradients(model, batch, micro_batches=1)
    expected = gradients(model)
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    limit = budget_of(
        model, batch_size=4, seq_len=512
    ).peak  # a quarter of the batch, and no states yet
    with PeakMemory(limit_bytes=limit):
        fitted = fit_micro_batches(
            lambda k: accumulate_gradients(model, batch, micro_batches=k),
            model=model,
            batch_size=16,
        )
    assert fitted.micro_batches > 1 and not fitted.attempts[0].fits
    torch.testing.assert_close(fitted.result, expected_loss, atol=1e-4, rtol=1e-4)
    assert_same_gradients(gradients(model), expected, atol=1e-4, rtol=1e-2)
    model.zero_grad()
    assert torch.cuda.memory_allocated() - before < 2**26  # at most the workspace of cuBLAS
