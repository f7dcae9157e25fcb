"""What the AdamWs in bf16 share: rounding without a bias, and steps that resume exactly."""

import io
import pickle

import pytest
import torch

from recipes_lib.precision._adamw_in_bf16 import random_bits, stochastic_round
from recipes_lib.precision.pure_bf16 import bf16_adamw
from recipes_lib.precision.sixteen_bit_adam import sixteen_bit_adamw

# --- stochastic rounding --------------------------------------------------------------------------


def round_in_all_ways(value):
    """[2**16]: one fp32 number, rounded with each of the possible random numbers."""
    every_number = torch.arange(2**16, dtype=torch.int32, device=value.device)
    return stochastic_round(value.repeat(2**16), every_number)


# Ordinary, near the largest, near and below the smallest normal number; then two that bf16 has.
@pytest.mark.parametrize("value", [-1.2345, 0.9999, 3e38, 1.1e-38, -3e-40, 1.0, 0.0])
def test_the_mean_over_all_random_numbers_is_the_value_exactly(value):
    """The mistake: a bias of a fraction of the spacing, which adds up over thousands of steps."""
    value = torch.tensor(value)
    rounded = round_in_all_ways(value)
    assert rounded.dtype is torch.bfloat16
    assert torch.equal(rounded.double().mean(), value.double())
    nearest = value.bfloat16()
    assert nearest in rounded and len(rounded.unique()) == (1 if nearest == value else 2)


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
    """The mistake: a carry turns a NaN into a number, and training goes on."""
    check_edge_cases("cpu")


def test_each_of_the_16_bits_is_drawn_evenly():
    """The mistake: a quarter of the 64-bit numbers that is not random, or bits above the 16."""
    bits = random_bits(39_999, generator=torch.Generator().manual_seed(3))
    for quarter in bits[:39_996].view(-1, 4).T:
        shares = torch.stack([(quarter >> bit & 1).float().mean() for bit in range(32)])
        # Five standard errors of a share among 10,000.
        assert ((shares[:16] - 0.5).abs() < 5 * 0.5 / 100).all()
        assert not shares[16:].any()


# --- the optimizer --------------------------------------------------------------------------------

MAKERS = {
    "16-bit states": (sixteen_bit_adamw, torch.float32, {}),
    "pure bf16": (bf16_adamw, torch.bfloat16, {"rounding": "stochastic"}),
    "masters": (bf16_adamw, torch.bfloat16, {"rounding": "master"}),
}
for_all = pytest.mark.parametrize(("make", "dtype", "options"), MAKERS.values(), ids=MAKERS)


def repeat(optimizer, weight, gradients):
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()


@for_all
@pytest.mark.parametrize("by", ["state_dict", "pickle"])
def test_goes_on_exactly(make, dtype, options, by):
    """The mistake: states in the dtype of the weight (masters lose their lower half), or a random
    stream that begins anew."""
    weight = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
    optimizer = make([weight], lr=1e-3, seed=1, **options)
    repeat(optimizer, weight, [0.7, 0.1, -0.2])
    if by == "state_dict":
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        other = torch.nn.Parameter(weight.detach().clone())
        twin = make([other], lr=1.0, seed=2, **options)
        twin.load_state_dict(torch.load(file))
    else:
        twin = pickle.loads(pickle.dumps(optimizer))  # as a deep copy is made, too
        (other,) = twin.param_groups[0]["params"]
    repeat(optimizer, weight, [0.3, 0.3])
    repeat(twin, other, [0.3, 0.3])
    assert torch.equal(weight, other)
    for name, value in optimizer.state[weight].items():
        if torch.is_tensor(value):
            assert torch.equal(twin.state[other][name], value)
            assert twin.state[other][name].dtype is value.dtype


@for_all
def test_every_element_is_updated_once(make, dtype, options):
    """The mistake: a chunk, a transposed or an empty parameter, or a group that is left out."""
    weights = [torch.ones(300, 7), torch.ones(7, 300).t(), torch.ones(()), torch.ones(0)]
    weights = [torch.nn.Parameter(weight.to(dtype)) for weight in weights]
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    groups = [{"params": [frozen, *weights[:2]]}, {"params": weights[2:], "lr": 0.02}]
    if dtype is torch.bfloat16:
        groups[0]["params"].remove(frozen)
    optimizer = make(groups, lr=0.01, seed=0, **options)
    type(optimizer).cpu_chunk, before = 1000, type(optimizer).cpu_chunk

    def closure():
        optimizer.zero_grad()
        loss = sum(weight.sum() for weight in weights)
        loss.backward()
        return loss

    try:
        losses = [optimizer.step(closure).item() for _ in range(10)]
    finally:
        type(optimizer).cpu_chunk = before
    assert losses[-1] < losses[0]
    assert not weights[1].is_contiguous()
    for weight, expected in zip(weights, (0.9, 0.9, 0.8)):
        assert (weight.float() - expected).abs().max() < 0.03


@pytest.mark.gpu
def test_on_gpu():
    check_edge_cases("cuda")
    bits = random_bits(2**20, generator=torch.Generator("cuda").manual_seed(0))
    assert len(bits.unique()) > 2**16 - 100
    for make, dtype, options in MAKERS.values():
        weight = torch.nn.Parameter(torch.ones(4096, dtype=dtype, device="cuda"))
        optimizer = make([weight], lr=1e-4, **options)
        repeat(optimizer, weight, [0.5] * 100)
        assert weight.float().mean().item() == pytest.approx(0.99, abs=3e-3)
        optimizer.load_state_dict(optimizer.state_dict())
        repeat(optimizer, weight, [torch.nan])
        assert weight.isnan().all()
