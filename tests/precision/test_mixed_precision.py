"""Mixed precision: fp32 gradients of 16-bit products, scaled where fp16 needs it."""

import copy

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.precision.mixed_precision import (
    mixed_precision,
)
from tests.conftest import gradients, make_batch


def backward(model, batch, mp, factor=1.0):
    """Gradients of `factor` times the loss, as `mp.backward` leaves them, divided by its scale."""
    model.zero_grad()
    with mp.autocast():
        loss = model(**batch, use_cache=False).loss
    mp.backward(loss * factor)
    found = {name: g / mp.scaler.get_scale() for name, g in gradients(model).items()}
    return loss.detach(), found


def relative_error(got, expected):
    square = sum((got[name] - g).square().sum() for name, g in expected.items())
    return (square / sum(g.square().sum() for g in expected.values())).sqrt()


# --- the step -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype"), [("tiny-llama", torch.bfloat16), ("tiny-gpt2", torch.float16)]
)
def test_close_to_fp32_with_fp32_gradients(family, batch, dtype):
    """The mistake: gradients that arrive in 16 bits, or are still scaled."""
    tiny = model_of_shape(family, device="cpu")
    expected_loss, expected = backward(tiny, batch, mixed_precision(dtype=torch.float32))
    loss, got = backward(tiny, batch, mixed_precision(dtype=dtype))
    assert {g.dtype for g in got.values()} == {torch.float32}
    digits = 0.02 if dtype is torch.bfloat16 else 0.003
    torch.testing.assert_close(loss, expected_loss, atol=0, rtol=digits)
    assert 0 < relative_error(got, expected) < digits


# --- fp16: loss scaling ---------------------------------------------------------------------------


def test_the_first_step_is_taken():
    """The mistake: at 2**16 gradients of ordinary size overflow, and runs of few steps do nothing.

    The largest gradient of a weight in SmolLM2 is about 9.
    """
    layer = torch.nn.Linear(4, 4)
    mp = mixed_precision(dtype=torch.float16)
    with mp.autocast():
        loss = 9 * layer(torch.ones(1, 4)).sum()
    mp.backward(loss)
    assert mp.step(torch.optim.SGD(layer.parameters(), lr=0.1))


@pytest.mark.parametrize(("fused", "max_grad_norm"), [(False, 1.0), (True, None)])
def test_infinite_gradients_skip_the_step(llama, batch, fused, max_grad_norm):
    """The mistake: a step with NaN, after which every weight is NaN."""
    mp = mixed_precision(dtype=torch.float16)
    optimizer = torch.optim.AdamW(llama.parameters(), fused=fused)
    before = copy.deepcopy(llama.state_dict())
    backward(llama, batch, mp, factor=1e6)
    assert mp.step(optimizer, max_grad_norm=max_grad_norm) is False
    assert mp.scaler.get_scale() == 2**11
    torch.testing.assert_close(llama.state_dict(), before, atol=0, rtol=0)
    backward(llama, batch, mp)
    assert mp.step(optimizer, max_grad_norm=max_grad_norm) is True
    assert mp.scaler.get_scale() == 2**11
    assert not torch.equal(llama.lm_head.weight, before["lm_head.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_clips_the_norm_of_unscaled_gradients(llama, batch, dtype):
    """SGD at learning rate 1 moves the weights by exactly the clipped norm."""
    mp = mixed_precision(dtype=dtype)
    before = [p.detach().clone() for p in llama.parameters()]
    backward(llama, batch, mp)
    assert mp.step(torch.optim.SGD(llama.parameters(), lr=1.0), max_grad_norm=0.01)
    moved = sum((p - old).square().sum() for p, old in zip(llama.parameters(), before)).sqrt()
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


def test_gradients_that_were_not_scaled_are_refused(llama, batch):
    """Divided by the scale they are far too small, and Adam hides it."""
    mp = mixed_precision(dtype=torch.float16)
    optimizer = torch.optim.AdamW(llama.parameters())
    backward(llama, batch, mp)
    mp.step(optimizer)  # from now on GradScaler itself would not notice
    llama(**batch, use_cache=False).loss.backward()
    with pytest.raises(ValueError, match=r"call mp\.backward"):
        mp.step(optimizer)


def test_resumes_the_scale(llama, batch):
    """The mistake: a resumed run that skips its first steps again."""
    mp = mixed_precision(dtype=torch.float16)
    backward(llama, batch, mp, factor=1e6)
    mp.step(torch.optim.AdamW(llama.parameters()))
    resumed = mixed_precision(dtype=torch.float16)
    resumed.load_state_dict(mp.state_dict())
    assert resumed.scaler.get_scale() == 2**11
    with pytest.raises(ValueError, match="trained in fp16"):
        mixed_precision(dtype=torch.bfloat16).load_state_dict(mp.state_dict())


# --- fp32 master weights --------------------------------------------------------------------------


def test_16_bit_weights_are_refused_unless_frozen():
    """A hundred updates of 0.001 move an fp32 weight by 0.1 and a bf16 weight not at all."""
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    mp = mixed_precision(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="weights without masters"):
        mp.step(torch.optim.SGD([weight]))
    adapter = torch.nn.Parameter(torch.ones(2))
    mp.backward((adapter * weight.detach()).sum())
    assert mp.step(torch.optim.SGD([weight.requires_grad_(False), adapter]))


# --- beside another technique, and on a GPU -------------------------------------------------------


def test_steps_with_an_optimizer_in_backward(llama, batch):
    """Its gradients are gone: nothing is left to clip, or to unscale."""
    mp = mixed_precision(dtype=torch.bfloat16)
    optimizer = apply_optimizer_in_backward(llama, lr=1e-3)
    before = llama.get_input_embeddings().weight.clone()
    with mp.autocast():
        loss = llama(**batch, use_cache=False).loss
    mp.backward(loss)
    with pytest.raises(ValueError, match="too late to unscale or clip"):
        mp.step(optimizer, max_grad_norm=1.0)
    assert mp.step(optimizer) and not torch.equal(before, llama.get_input_embeddings().weight)
    scaled = mixed_precision(dtype=torch.float16)
    with pytest.raises(ValueError, match="too late to unscale or clip"):
        scaled.step(optimizer)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_gpu(dtype):
    model = model_of_shape("tiny-llama", layers=8, device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch().items()}
    _, expected = backward(model, batch, mixed_precision(dtype=torch.float32))
    mp = mixed_precision(dtype=dtype)
    _, got = backward(model, batch, mp)
    assert relative_error(got, expected) < 0.02
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    assert mp.step(optimizer, max_grad_norm=1.0)
    backward(model, batch, mp, factor=1e6)
    assert mp.step(optimizer) is (dtype is torch.bfloat16)
