"""Less is kept, and loss and gradients are the same to the last bit."""

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.mixins import take_out
from recipes_lib.memory.activation_checkpointing import (
    Checkpointed,
    apply_activation_checkpointing,
)
from tests.conftest import assert_equal, make_batch, run

# --- the same training ----------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "every"), [("block", 2), ("selective", 1)])
def test_with_a_cache_and_taken_out_again(batch, mode, every):
    """The mistake: a block that runs a second time appends its keys a second time."""
    model = model_of_shape("tiny-gpt2", device="cpu", dtype=torch.bfloat16)
    expected = run(model, batch)
    apply_activation_checkpointing(model, mode=mode, every=every)
    assert_equal(run(model, batch, use_cache=True), expected)
    assert_equal(run(take_out(model, Checkpointed), batch), expected)


class Counted(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def expensive_calls_in_backward(model, batch):
    """Matrix products and attention, each with its number of calls."""
    loss = model(**batch, use_cache=False).loss
    with Counted() as counted:
        loss.backward()
    calls = counted.calls.items()
    return {name: count for name, count in calls if "mm" in name or "scaled_dot" in name}


def test_selective_runs_no_product_and_no_attention_again(llama, batch):
    """An operator that is missing among the kept ones is recomputed, and nothing else tells."""
    model = llama
    plain = expensive_calls_in_backward(model, batch)
    assert len(plain) >= 2  # products and the backward of attention
    selective = apply_activation_checkpointing(model, mode="selective")
    assert expensive_calls_in_backward(selective, batch) == plain


def test_gradient_reaches_adapters_on_a_frozen_base(llama, batch):
    """A reentrant checkpoint would give them none: the first block's input needs no gradient."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False)
    model = apply_activation_checkpointing(get_peft_model(llama, config))
    got = run(model, batch)
    assert_equal(got, run(take_out(model, Checkpointed), batch))
    adapters = got.keys() - {"loss"}
    assert adapters and all("lora" in name and got[name].any() for name in adapters)


def test_what_cannot_be_done_is_refused(llama):
    """A second checkpoint around the first would run each block a third time."""
    apply_activation_checkpointing(llama)
    with pytest.raises(ValueError, match="checkpointed already"):
        apply_activation_checkpointing(llama)
    take_out(llama, Checkpointed).gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="checkpointed already"):
        apply_activation_checkpointing(llama)


# --- what it saves --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["block", "selective"])
def test_same_loss_and_gradients_for_less_memory_on_gpu(mode):
    """The kernels of attention have other names there, which "selective" has to keep."""
    model = model_of_shape("tiny-llama", layers=8, dtype=torch.bfloat16, device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch(16, 64).items()}

    def peak():
        with PeakMemory() as memory:
            result = run(model, batch)
        return memory.peak, result

    plain, expected = peak()
    apply_activation_checkpointing(model, mode=mode)
    less, got = peak()
    assert less < plain
    for name, value in expected.items():  # kernels with atomics do not repeat to the last bit
        torch.testing.assert_close(got[name], value, atol=2e-2, rtol=5e-2)
