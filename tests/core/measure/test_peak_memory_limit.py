"""The limit on a GPU's tensors: what counts, and what a failed attempt leaves behind."""

from dataclasses import replace

import pytest
import torch

from recipes_lib.core.measure import PeakMemory, peak_memory
from recipes_lib.core.measure.live_bytes import LiveBytes
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import model_of_shape
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.training.dynamic_batch import fit_micro_batches

MIB = 2**20


class CpuAsCard(LiveBytes):
    """A CPU's account behind the questions that `torch.cuda` answers on a GPU."""

    scratch = 0  # bytes that an operator takes beside its tensors

    def statistics(self):
        return {"allocated_bytes": {"all": {"peak": self.peak + self.scratch}}}

    def restart(self):
        self.peak = self.current


@pytest.fixture
def card(monkeypatch):
    account = CpuAsCard("cpu")
    here = replace(machine(), device="cuda")
    monkeypatch.setattr(peak_memory, "this_machine", lambda: here)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", account.statistics)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: account.peak)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: account.current)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", account.restart)
    with account:
        yield account


def tensor(mib):
    return torch.zeros(mib * MIB // 4)


def test_after_an_error_that_was_caught_the_next_attempt_counts_anew(card):
    """The peak of the failed attempt is still in the allocator's counter."""
    model = torch.nn.Linear(2, 2)
    attempts = []

    def step(micro_batches):
        attempts.append(micro_batches)
        return tensor(16 // micro_batches).numel()

    with PeakMemory(limit_bytes=card.current + 5 * MIB):
        fitted = fit_micro_batches(step, model=model, batch_size=8)
    assert attempts == [1, 2, 4] and fitted.micro_batches == 4


def test_scratch_memory_of_an_operator_counts(card):
    """The tensors that are alive after an operator are not all that it needed."""
    with PeakMemory(limit_bytes=card.current + 8 * MIB):
        tensor(1)
        card.scratch = 8 * MIB
        with pytest.raises(torch.OutOfMemoryError, match="emulated out of memory"):
            tensor(1)
        card.scratch = 0


@pytest.mark.gpu
def test_a_quantized_model_has_the_limit_of_its_tensors():
    """Its weights lie in pieces where the fp32 weights were: freed, and not given back."""
    model = apply_qlora(model_of_shape("llama-3.2-1b", layers=2, device="cuda"), rank=4)
    ids = torch.ones(2, 64, dtype=torch.long, device="cuda")
    # Once before: cuBLAS takes its workspaces and keeps them, 32 MiB on a Hopper card.
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
    with PeakMemory() as memory:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
    assert torch.cuda.memory_reserved() > 2 * memory.peak - torch.cuda.memory_allocated()
    # A tensor may lie in a block that is up to 1 MiB larger, and in another one in each step.
    roughly = memory.peak // 50
    with PeakMemory(limit_bytes=memory.peak + roughly):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with pytest.raises(torch.OutOfMemoryError), PeakMemory(limit_bytes=memory.peak - roughly):
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
