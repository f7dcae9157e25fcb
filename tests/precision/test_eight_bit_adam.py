"""8-bit AdamW is bitsandbytes' and close to AdamW, in the bytes that were predicted."""

import copy

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.precision.eight_bit_adam import (
    BLOCK,
    code_table,
    eight_bit_adamw,
    encode,
    plain_eight_bit_step,
)
from tests.conftest import make_batch

bnb = pytest.importorskip("bitsandbytes")


# --- the idea -------------------------------------------------------------------------------------


OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def test_the_plain_eight_bit_step_is_bitsandbytes():
    """The same weights, and the same codes but for a few averages that lie between two."""
    size = 16 * BLOCK
    weight = torch.nn.Parameter(torch.randn(size))
    by_hand = weight.detach().clone()
    optimizer = eight_bit_adamw([weight], **OPTIONS)
    zeros = torch.zeros(size)
    first = [*encode(zeros, code_table(signed=True)), code_table(signed=True)]
    second = [*encode(zeros, code_table(signed=False)), code_table(signed=False)]
    for step in range(1, 11):
        weight.grad = torch.randn(size)
        optimizer.step()
        plain_eight_bit_step(by_hand, weight.grad, first, second, step=step, **OPTIONS)
    difference = (by_hand - weight.detach()).abs()
    assert difference.mean() < 1e-4 and difference.max() < OPTIONS["lr"]
    state = optimizer.state[weight]
    for codes, theirs in ((first[0], state["state1"]), (second[0], state["state2"])):
        assert (codes.flatten() == theirs).float().mean() > 0.95


# --- the optimizer --------------------------------------------------------------------------------


def train(model, optimizer, batch, steps):
    """Losses of `steps` steps on one batch."""
    losses = []
    for _ in range(steps):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_which_states_take_8_bits(batch):
    """The mistake: the tables in 8 bits, or everything in 32."""
    model = model_of_shape("tiny-gpt2", device="cpu")
    optimizer = eight_bit_adamw(model, lr=1e-3)
    train(model, optimizer, batch, 1)
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    for p in model.parameters():
        exact = p.numel() < 4096 or any(p is table for table in tables)
        assert optimizer.state[p]["state1"].dtype == (torch.float32 if exact else torch.uint8)


def test_another_optimizers_override_does_not_leak_in(batch):
    """Plain AdamW8bit takes it over by position, silently; ours does not."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.index2config[(0, 0)] = {"optim_bits": 32}
    try:
        weight = torch.nn.Parameter(torch.randn(64, 64))
        weight.grad = torch.randn(64, 64)
        for make, dtype in ((bnb.optim.AdamW8bit, torch.float32), (eight_bit_adamw, torch.uint8)):
            optimizer = make([weight], lr=1e-3)
            optimizer.step()
            assert optimizer.state[weight]["state1"].dtype == dtype
    finally:
        del manager.index2config[(0, 0)]


def test_paged_states_on_a_cpu_are_refused(llama):
    """The mistake: bitsandbytes only warns, and pages nothing."""
    with pytest.raises(ValueError, match="paged=False"):
        eight_bit_adamw(llama, lr=1e-3, paged=True)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
def test_memorises_a_batch_on_gpu(paged):
    model = model_of_shape("smollm2-135m", layers=4, device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch(vocab=49152).items()}
    optimizer = eight_bit_adamw(model, lr=1e-3, paged=paged)
    reference = copy.deepcopy(model)
    adamw = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    expected = train(reference, adamw, batch, 20)
    losses = train(model, optimizer, batch, 20)
    assert expected[-1] < 0.6 * expected[0]
    assert losses[-1] == pytest.approx(expected[-1], rel=0.05, abs=0.05)
