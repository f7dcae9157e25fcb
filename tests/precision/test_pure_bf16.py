"""Pure bf16: masters equal AdamW to the last bit, and stochastic rounding loses no update."""

import copy

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.precision.pure_bf16 import BF16AdamW, bf16_adamw, step_with_masters

ROUNDINGS = ["stochastic", "nearest", "master"]


def ones(*shape):
    return torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))


def repeat(optimizer, weight, gradients):
    """One step for each of the gradients, which is a number or a row of them."""
    for gradient in gradients:
        weight.grad = torch.zeros_like(weight) + gradient
        optimizer.step()


@pytest.mark.parametrize(
    ("family", "rounding"), [("tiny-llama", "nearest"), ("tiny-gpt2", "master")]
)
def test_equals_torch_and_the_idea(family, rounding, batch, monkeypatch):
    """Bit for bit: "nearest" is a bf16 model under fused AdamW, "master" the masters by hand.

    The mistake: a last chunk that is not full, or bias corrections that count from another step.
    """
    monkeypatch.setattr(BF16AdamW, "cpu_chunk", 1000)
    model = model_of_shape(family, dtype=torch.bfloat16, device="cpu")
    by_hand = copy.deepcopy(model)
    options = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.99)}
    optimizer = bf16_adamw(model, rounding=rounding, **options)
    weights = list(by_hand.parameters())
    masters = weights
    if rounding == "master":
        masters = [weight.detach().float() for weight in weights]
    adamw = torch.optim.AdamW(masters, fused=True, **options)
    for _ in range(5):
        for each in (model, by_hand):
            each.zero_grad()
            each(**batch, use_cache=False).loss.backward()
        optimizer.step()
        if rounding == "master":
            step_with_masters(weights, masters, adamw)
        else:
            adamw.step()
    for ours, expected in zip(model.parameters(), weights):
        assert torch.equal(ours, expected)


def test_a_weight_of_one_and_a_small_learning_rate():
    """100 steps of 1e-4 move fp32 by 0.01. In bf16 each is a 39th of the spacing below 1."""
    reference = torch.nn.Parameter(torch.ones(4096))
    repeat(torch.optim.AdamW([reference], lr=1e-4, fused=True), reference, [0.5] * 100)
    weights = {rounding: ones(4096) for rounding in ROUNDINGS}
    for rounding, weight in weights.items():
        repeat(bf16_adamw([weight], lr=1e-4, rounding=rounding, seed=0), weight, [0.5] * 100)
    assert torch.equal(weights["nearest"], ones(4096))
    assert torch.equal(weights["master"], reference.bfloat16())
    # 2.6 moves of 1/256 are expected of each: the standard error of the mean of 4,096 is 1e-4.
    mean = weights["stochastic"].float().mean().item()
    assert mean == pytest.approx(reference[0].item(), abs=5e-4)


def test_weight_and_averages_are_rounded_independently():
    """They share one draw: read from the same place, all three would be rounded up together."""
    weight = ones(2**14)
    optimizer = bf16_adamw([weight], lr=2e-3, seed=0)
    repeat(optimizer, weight, [0.7])
    state = optimizer.state[weight]
    rounded = [weight.detach(), state["exp_avg"], state["exp_avg_sq"]]
    correlation = torch.corrcoef(torch.stack(rounded).double())
    torch.testing.assert_close(correlation, torch.eye(3).double(), rtol=0, atol=5 / 2**7)


def test_the_second_average_can_fall():
    """After 100 gradients of 1 come 500 of 0.1: an average that never forgets stops training."""
    before = {}
    after = {}
    for rounding in ROUNDINGS:
        weight = ones(4096)
        optimizer = bf16_adamw([weight], lr=0.0, rounding=rounding, seed=0)
        for gradient, steps, result in ((1.0, 100, before), (0.1, 500, after)):
            repeat(optimizer, weight, [gradient] * steps)
            result[rounding] = optimizer.state[weight]["exp_avg_sq"].float().mean().item()
        assert torch.equal(weight, ones(4096))
    assert after["stochastic"] == pytest.approx(after["master"], rel=0.02)
    assert after["master"] < 0.7 * before["master"]
    assert after["nearest"] == before["nearest"]


def test_fp32_weights_and_another_rounding_are_refused(llama):
    """The mistake: an fp32 model that is rounded without a word."""
    with pytest.raises(ValueError, match=r"call model\.to\(torch\.bfloat16\)"):
        bf16_adamw(llama, lr=1e-3)
    with pytest.raises(ValueError, match="choose one of stochastic, nearest, master"):
        bf16_adamw([ones(3)], lr=1e-3, rounding="up")
