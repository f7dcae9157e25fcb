import copy

import pytest
import torch

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.precision.eight_bit_adam import (
    eight_bit_adamw,
    estimate_eight_bit_adam,
    held_bytes,
    state_bytes,
)
from tests.conftest import make_batch

bnb = pytest.importorskip("bitsandbytes")


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


def assert_memorises_like_adamw(model, optimizer, batch, lr):
    reference = copy.deepcopy(model)
    adamw = torch.optim.AdamW(reference.parameters(), lr=lr)
    expected = train(reference, adamw, batch, 20)
    losses = train(model, optimizer, batch, 20)
    assert losses[0] == expected[0] and expected[-1] < 0.6 * expected[0]
    assert losses[-1] == pytest.approx(expected[-1], rel=0.05, abs=0.05)


def test_memorises_a_batch_as_fast_as_32_bits(tiny, batch):
    assert_memorises_like_adamw(tiny, eight_bit_adamw(tiny, lr=5e-3), batch, 5e-3)


def test_torchao_does_the_same(llama, batch):
    with torch.compiler.set_stance("force_eager"):  # compiling takes longer than the test
        optimizer = eight_bit_adamw(llama, lr=5e-3, library="torchao", embedding_bits=8)
        assert_memorises_like_adamw(llama, optimizer, batch, 5e-3)
    assert held_bytes(optimizer) == pytest.approx(
        state_bytes(llama, embedding_bits=8), rel=0.2
    )  # a code table each
    codes = [s["exp_avg"].codes for s in optimizer.state.values() if hasattr(s["exp_avg"], "codes")]
    assert codes and all(code.dtype is torch.uint8 for code in codes)


def test_torchao_without_a_compiler(llama, batch, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    train(llama, eight_bit_adamw(llama, lr=1e-3, library="torchao", embedding_bits=8), batch, 1)


def test_torchao_under_the_memory_account(llama, batch):
    """torch.compile refuses a mode that looks at every operator."""
    with PeakMemory():
        train(llama, eight_bit_adamw(llama, lr=1e-3, library="torchao", embedding_bits=8), batch, 1)


def test_bf16_and_eight_bit_embeddings(llama, batch):
    model = llama.bfloat16()
    optimizer = eight_bit_adamw(model, lr=5e-3, embedding_bits=8)
    assert_memorises_like_adamw(model, optimizer, batch, 5e-3)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-mistral", "tiny-gpt2"])
@pytest.mark.parametrize("embedding_bits", [8, 32])
def test_state_bytes_and_where_they_are(shape, embedding_bits, batch):
    model = model_of_shape(shape, device="cpu")
    optimizer = eight_bit_adamw(model, lr=1e-3, embedding_bits=embedding_bits)
    train(model, optimizer, batch, 1)
    expected = state_bytes(model, embedding_bits=embedding_bits)
    assert held_bytes(optimizer) == pytest.approx(expected, rel=0.02)
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    for p in model.parameters():
        exact = p.numel() < 4096 or (embedding_bits == 32 and any(p is table for table in tables))
        assert optimizer.state[p]["state1"].dtype == (torch.float32 if exact else torch.uint8)


def test_small_tensors_are_updated_exactly_as_by_adamw(llama, batch):
    """All states in 32 bits: the same formula as AdamW, with weight decay."""
    reference, options = copy.deepcopy(llama), {"lr": 1e-2, "weight_decay": 0.1}
    train(reference, torch.optim.AdamW(reference.parameters(), **options), batch, 5)
    group = {"params": llama.parameters(), "optim_bits": 32}
    train(llama, eight_bit_adamw([group], **options), batch, 5)
    for got, want in zip(llama.parameters(), reference.parameters()):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


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


def test_resumes(llama, batch):
    train(llama, optimizer := eight_bit_adamw(llama, lr=1e-3), batch, 3)
    resumed = copy.deepcopy(llama)
    other = eight_bit_adamw(resumed, lr=1.0)
    other.load_state_dict(optimizer.state_dict())
    assert train(resumed, other, batch, 3) == train(llama, optimizer, batch, 3)


@pytest.mark.parametrize(("dtype", "embedding_bits"), [(torch.float32, 32), (torch.bfloat16, 8)])
@pytest.mark.parametrize(("batch_size", "seq_len"), [(2, 32), (1, 2)])
def test_peak_as_estimated(dtype, embedding_bits, batch_size, seq_len):
    model = model_of_shape("tiny-llama", layers=4, dtype=dtype, device="cpu")
    optimizer = eight_bit_adamw(model, lr=1e-3, embedding_bits=embedding_bits)
    ids = torch.randint(0, 128, (batch_size, seq_len))
    for _ in range(2):  # the first step creates the states
        with PeakMemory() as memory:
            train(model, optimizer, {"input_ids": ids, "labels": ids}, 1)
    plain = budget_of(model, batch_size=batch_size, seq_len=seq_len)
    plan = estimate_eight_bit_adam(plain, model, embedding_bits=embedding_bits)
    assert plan.peak == pytest.approx(memory.peak, rel=0.05)
    assert plan.states < plain.states


def test_bad_input(llama):
    with pytest.raises(ValueError, match="paged=False"):
        eight_bit_adamw(llama, lr=1e-3, paged=True)
    with pytest.raises(ValueError, match="8 or 32 bits"):
        eight_bit_adamw(llama, lr=1e-3, embedding_bits=4)
    with pytest.raises(ValueError, match="8 or 32 bits"):
        eight_bit_adamw([{"params": llama.parameters(), "optim_bits": 16}], lr=1e-3)
    with pytest.raises(ValueError, match="does not page and stores every state"):
        eight_bit_adamw(llama, lr=1e-3, library="torchao")
    with pytest.raises(ValueError, match="choose 'bitsandbytes' or 'torchao'"):
        eight_bit_adamw(llama, lr=1e-3, library="apex")
    with pytest.raises(ValueError, match="no trainable parameter"):
        eight_bit_adamw(llama.requires_grad_(False), lr=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
def test_memorises_a_batch_on_gpu(paged):
    model = model_of_shape("smollm2-135m", layers=4, device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch(vocab=49152).items()}
    optimizer = eight_bit_adamw(model, lr=1e-3, paged=paged)
    assert_memorises_like_adamw(model, optimizer, batch, 1e-3)
    assert held_bytes(optimizer) == pytest.approx(state_bytes(model), rel=0.02)
