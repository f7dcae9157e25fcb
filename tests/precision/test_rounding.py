"""Stochastic rounding has no bias, and leaves alone what bf16 has."""

import pytest
import torch

from recipes_lib.precision._rounding import random_bits, stochastic_round, stochastic_round_

# --- rounding -------------------------------------------------------------------------------------


def round_in_all_ways(value):
    """[2**16]: one fp32 number, rounded with each of the possible random numbers."""
    every_number = torch.arange(2**16, dtype=torch.int32, device=value.device)
    return stochastic_round(value.repeat(2**16), every_number)


# Ordinary, near the largest, near and below the smallest normal number; then three that bf16 has.
VALUES = [1.2345, 0.9999, 3e38, 1e-30, 1.1e-38, 3e-40, 1e-45, 1.0, 0.0, 2.0**127]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_mean_over_all_random_numbers_is_the_value_exactly(value, sign):
    value = torch.tensor(sign * value)
    rounded = round_in_all_ways(value)
    assert rounded.dtype is torch.bfloat16
    assert torch.equal(rounded.double().mean(), value.double())
    nearest = value.bfloat16()
    if nearest == value:
        assert torch.equal(rounded.unique(), nearest[None])
        return
    # The other neighbour is on the far side of the value.
    direction = torch.inf if nearest < value else -torch.inf
    other = nearest.nextafter(torch.tensor(direction).bfloat16())
    assert torch.equal(rounded.unique(), torch.stack([nearest, other]).sort().values)


def check_edge_cases(device):
    # The first is CUDA's, the second its negative: a carry would make numbers of them.
    nan = [0x7FFFFFFF, -1, 0x7FC00000, 0x7FFFFFFF - 2**15]
    for number in torch.tensor(nan, dtype=torch.int32, device=device).view(torch.float32):
        assert round_in_all_ways(number).isnan().all()
    limit = torch.finfo(torch.bfloat16).max
    for number in torch.tensor([torch.inf, -torch.inf, limit, -limit, -0.0], device=device):
        rounded = round_in_all_ways(number)
        # The bits, because as numbers 0 and -0 are equal.
        assert (rounded.view(torch.int16) == number.bfloat16().view(torch.int16)).all()
    beyond = torch.tensor(torch.finfo(torch.float32).max, device=device)
    assert set(round_in_all_ways(beyond).tolist()) == {limit, torch.inf}


def test_nan_infinities_and_the_largest_numbers():
    check_edge_cases("cpu")


def test_in_place_is_the_same():
    """The mistake: what `stochastic_round_` leaves needs another rounding to get into bf16."""
    values = torch.randn(10_000)
    bits = random_bits(10_000, generator=torch.Generator().manual_seed(3))
    expected = stochastic_round(values, bits)
    assert not torch.equal(values, expected.float())  # `values` are as before
    assert stochastic_round_(values, bits) is values
    assert torch.equal(values, expected.float())


# --- random bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 6, 40_000])
def test_random_bits(count):
    bits = random_bits(count, generator=torch.Generator().manual_seed(3))
    again = random_bits(count, generator=torch.Generator().manual_seed(3))
    assert bits.shape == (count,) and torch.equal(bits, again)


def test_each_of_the_16_bits_is_drawn_evenly():
    """From each quarter of the 64-bit numbers, and none of the 16 bits above."""
    bits = random_bits(40_000, generator=torch.Generator().manual_seed(3))
    for quarter in bits.view(-1, 4).T:
        shares = torch.stack([(quarter >> bit & 1).float().mean() for bit in range(32)])
        # Five standard errors of a share among 10,000.
        assert ((shares[:16] - 0.5).abs() < 5 * 0.5 / 100).all()
        assert not shares[16:].any()


@pytest.mark.gpu
def test_on_gpu():
    check_edge_cases("cuda")
    value = torch.tensor(0.9999, device="cuda")
    assert round_in_all_ways(value).double().mean() == value.double()
    bits = random_bits(2**20, generator=torch.Generator("cuda").manual_seed(0))
    assert len(bits.unique()) > 2**16 - 100
