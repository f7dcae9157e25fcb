import itertools
import re

import pytest
import torch

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.memory.optimizer_offload import offload_optimizer
from recipes_lib.training import dynamic_batch
from recipes_lib.training.dynamic_batch import (
    fit_micro_batches,
    halve_until_it_fits,
    predicted_micro_batches,
)
from recipes_lib.training.gradient_accumulation import accumulate_gradients
from tests.conftest import assert_same_gradients, gradients, make_batch


def trained(family="tiny-llama"):
    """A model, and a batch of eight unequal rows."""
    return model_of_shape(family, device="cpu"), make_batch(batch_size=8, seq_len=48)


def measured_peak(model, batch, micro_batches):
    """Bytes of a step in so many micro-batches."""
    with PeakMemory() as memory:
        accumulate_gradients(model, batch, micro_batches=micro_batches)
    model.zero_grad()
    return memory.peak


def limit_for(micro_batches, model, batch):
    """Bytes between what k and k/2 micro-batches need: k is the first that fits."""
    enough = measured_peak(model, batch, micro_batches)
    return (enough + measured_peak(model, batch, micro_batches // 2)) // 2


def accumulation(model, batch):
    """The step that the tests fit."""

    def step(k):
        return accumulate_gradients(model, batch, micro_batches=k)

    return step


def out_of_memory(k):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_equals_the_full_batch_after_running_out_of_memory():
    """The mistake: a gradient that a failed attempt leaves behind is added to the right one."""
    model, batch = trained("tiny-gpt2")
    expected_loss = accumulate_gradients(model, batch, micro_batches=1)
    expected = gradients(model)
    model.zero_grad()
    limit = limit_for(4, model, batch)
    with PeakMemory(limit_bytes=limit):
        fitted = fit_micro_batches(accumulation(model, batch), model=model, batch_size=8)
    assert fitted.micro_batches == 4
    torch.testing.assert_close(fitted.result, expected_loss)
    assert_same_gradients(gradients(model), expected)


def test_the_loop_by_hand_finds_the_same(llama):
    """The mistake: another k than the plain loop finds, or other gradients."""
    batch = make_batch(batch_size=8)

    def step(k):
        accumulate_gradients(llama, batch, micro_batches=k)
        if k < 4:
            out_of_memory(k)

    fitted = fit_micro_batches(step, model=llama, batch_size=8)
    expected = gradients(llama)
    llama.zero_grad()
    assert halve_until_it_fits(step, llama, batch_size=8) == fitted.micro_batches == 4
    assert_same_gradients(gradients(llama), expected, atol=0, rtol=0)
    with pytest.raises(torch.OutOfMemoryError):
        halve_until_it_fits(out_of_memory, llama, batch_size=8)


def test_the_prediction_is_the_first_that_fits_and_ends_with_one_row():
    """The mistake: 4 micro-batches of six rows, or no end."""
    peaks = {1: 9, 2: 6, 6: 2}
    for limit, expected in [(9, 1), (8, 2), (5, 6)]:
        found = predicted_micro_batches(peaks.__getitem__, batch_size=6, limit_bytes=limit)
        assert found == expected
    with pytest.raises(ValueError, match="one row needs 2 bytes"):
        predicted_micro_batches(peaks.__getitem__, batch_size=6, limit_bytes=1)


def test_failed_attempts_leave_no_memory_behind():
    """The mistake: a traceback is kept, and with it the activations of its frames."""
    model, batch = trained()
    alive = []
    limit = limit_for(4, model, batch)
    with PeakMemory(limit_bytes=limit) as memory:

        def step(k):
            alive.append(memory.current)
            return accumulate_gradients(model, batch, micro_batches=k)

        fit_micro_batches(step, model=model, batch_size=8)
        assert len(alive) == 3
        assert max(alive) - min(alive) < 1024
        model.zero_grad()
        assert memory.current - alive[0] < 1024


def test_dropout_draws_what_a_direct_step_draws():
    """The mistake: a failed attempt moves the random state on."""
    model, batch = trained()
    for block in decoder_blocks(model):
        block.self_attn.attention_dropout = 0.5
    torch.manual_seed(1)
    accumulate_gradients(model, batch, micro_batches=4)
    expected = gradients(model)
    model.zero_grad()
    torch.manual_seed(1)

    def step(k):
        accumulate_gradients(model, batch, micro_batches=k)
        if k < 4:
            out_of_memory(k)

    fit_micro_batches(step, model=model, batch_size=8)
    assert_same_gradients(gradients(model), expected)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 9 bytes",
    ],
)
def test_retries_what_libraries_report_as_out_of_memory(llama, text):
    """The mistake: only torch.OutOfMemoryError is caught, and libraries raise others."""
    failures = itertools.chain([RuntimeError(text)], itertools.repeat(None))

    def step(k):
        failure = next(failures)
        if failure is not None:
            raise failure
        return k

    assert fit_micro_batches(step, model=llama, batch_size=8).result == 2


def test_other_errors_pass_untouched(llama):
    """The mistake: a broken communicator is tried again and again, with smaller batches."""
    text = "NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"
    calls = []

    def step(k):
        calls.append(k)
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match=re.escape(text)):
        fit_micro_batches(step, model=llama, batch_size=8)
    assert calls == [1]


def test_what_a_failed_attempt_would_lose_is_refused(llama, batch):
    """The mistake: gradients of the caller that are dropped with its own."""
    accumulate_gradients(llama, batch, micro_batches=2)
    before = gradients(llama)
    with pytest.raises(ValueError, match="gradients are already there"):
        fit_micro_batches(out_of_memory, model=llama, batch_size=4)
    assert_same_gradients(gradients(llama), before, atol=0, rtol=0)


def test_a_step_that_changed_the_weights_is_not_repeated(llama, batch):
    """The mistake: the optimizer's step runs twice."""
    optimizer = torch.optim.AdamW(llama.parameters())

    def step(k):
        accumulate_gradients(llama, batch, micro_batches=k)
        optimizer.step()
        out_of_memory(k)

    with pytest.raises(ValueError, match=r"call optimizer.step\(\) after"):
        fit_micro_batches(step, model=llama, batch_size=4)


def test_what_cannot_be_taken_back_is_refused(llama, monkeypatch):
    """The mistake: a weight or a gradient on the host keeps what a failed attempt has added."""
    with monkeypatch.context() as patch:
        patch.setattr(dynamic_batch, "world_size", lambda: 2)
        with pytest.raises(ValueError, match="on one process"):
            fit_micro_batches(out_of_memory, model=llama, batch_size=4)
    offload_optimizer(llama, lr=1e-3, micro_batches=None, allow_cpu=True)
    with pytest.raises(ValueError, match="takes gradients in backward"):
        fit_micro_batches(out_of_memory, model=llama, batch_size=4)
