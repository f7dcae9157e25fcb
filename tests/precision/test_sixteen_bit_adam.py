"""AdamW with bf16 states follows fp32 AdamW, also where the gradients shrink."""

import pytest
import torch

from recipes_lib.precision import _adamw_in_bf16
from recipes_lib.precision.sixteen_bit_adam import (
    plain_sixteen_bit_step,
    sixteen_bit_adamw,
)


def ones(*shape, **options):
    return torch.nn.Parameter(torch.ones(shape, **options))


def repeat(optimizer, weight, gradient, steps):
    for _ in range(steps):
        weight.grad = torch.zeros_like(weight) + gradient
        optimizer.step()


def test_equals_the_plain_step(monkeypatch):
    """Given the same random bits. Of the averages, the last bit may differ: AdamW is fused here."""
    drawn = []

    def recorded(self, count):
        drawn.append(some(self, count))
        return drawn[-1]

    some = _adamw_in_bf16._RoundingBits.some
    monkeypatch.setattr(_adamw_in_bf16._RoundingBits, "some", recorded)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    weight = torch.nn.Parameter(torch.randn(1000))
    optimizer = sixteen_bit_adamw([weight], **options)
    plain = weight.detach().clone()
    exp_avg = torch.zeros(1000, dtype=torch.bfloat16)
    exp_avg_sq = torch.zeros(1000, dtype=torch.bfloat16)
    for step in range(1, 11):
        weight.grad = torch.randn(1000)
        optimizer.step()
        plain_sixteen_bit_step(
            plain, weight.grad, exp_avg, exp_avg_sq, step=step, bits=drawn[-1], **options
        )
    assert len(drawn) == 10  # one of the two averages is rounded stochastically
    torch.testing.assert_close(weight.detach(), plain, rtol=0, atol=1e-4)
    state = optimizer.state[weight]
    torch.testing.assert_close(state["exp_avg"], exp_avg, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(state["exp_avg_sq"], exp_avg_sq, rtol=2**-7, atol=0)


def test_no_element_is_rounded_by_the_same_bits_in_each_step():
    """The mistake: one set of bits for all steps. The mean would be right, and no element."""
    weight = ones(4096)
    optimizer = sixteen_bit_adamw([weight], lr=0.0, seed=0)
    repeat(optimizer, weight, 1.0, 1)
    repeat(optimizer, weight, 0.0, 600)
    stored = optimizer.state[weight]["exp_avg_sq"].double()
    expected = 0.001 * 0.999**600
    # Each rounding adds a variance of at most (spacing / 2) ** 2, and 600 of them a standard
    # deviation of at most sqrt(600) / 2**8, about a tenth. Of the mean it is a 64th of that.
    assert (stored.std() / expected).item() < 0.1
    assert stored.mean().item() == pytest.approx(expected, rel=0.005)


def test_the_first_average_follows_the_gradients():
    """From 1 to 0.3. To nearest, with beta1 0.99, it would stay 0.39 of its value away."""
    weight = ones(4096)
    optimizer = sixteen_bit_adamw([weight], lr=0.0, betas=(0.99, 0.999), seed=0)
    repeat(optimizer, weight, 1.0, 1000)
    repeat(optimizer, weight, 0.3, 1000)
    follows = optimizer.state[weight]["exp_avg"].float().mean().item()
    assert follows == pytest.approx(0.3, rel=0.01)


def test_what_is_not_whole_and_in_fp32_is_refused(llama):
    """The mistake: bf16 weights that round the steps away, and parts of sharded ones."""
    sharded = ones(3)
    sharded.device_mesh = "as a DTensor has one"
    with pytest.raises(ValueError, match="sharded parameters"):
        sixteen_bit_adamw([sharded], lr=1e-3)
    with pytest.raises(ValueError, match=r"model\.float\(\).*pure_bf16"):
        sixteen_bit_adamw(llama.bfloat16(), lr=1e-3)
