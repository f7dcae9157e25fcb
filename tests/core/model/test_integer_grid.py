"""Levels and scales of the symmetric grid: those of torchao, to the last bit."""

import pytest
import torch
from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup

from recipes_lib.core.model.integer_grid import (
    inside_grid,
    levels_of,
    on_grid,
    to_grid,
)


def quantized_by_torchao(weight, *, bits, group):
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    granularity = PerAxis(0)
    if group is not None:
        granularity = PerGroup(group)
    dtype = getattr(torch, f"int{bits}")
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=dtype, weight_granularity=granularity
    )
    quantize_(linear, config)
    return linear.weight


@pytest.mark.parametrize(
    ("bits", "group", "size"), [(4, 64, 1.0), (2, 16, 1e-3), (8, None, 1e-39), (4, None, 0.0)]
)
def test_the_grid_of_torchao(bits, group, size):
    """The mistake: a division, another range or a scale in bf16. The file has other weights."""
    weight = size * torch.randn(50, 192)
    theirs = quantized_by_torchao(weight, bits=bits, group=group)
    ours = to_grid(weight, bits=bits, group=group)
    assert torch.equal(ours.levels, theirs.qdata)
    assert torch.equal(ours.scales, theirs.scale)
    assert torch.equal(ours.weight(), theirs.dequantize())
    assert torch.equal(on_grid(weight, bits=bits, group=group), theirs.dequantize())


def test_the_largest_weight_misses_by_half_a_step():
    low, high = levels_of(4)
    assert (low, high) == (-8, 7)
    weight = torch.tensor([[7.5, -1.0], [-7.5, 1.0]])
    grid = to_grid(weight, bits=4)
    assert grid.levels.tolist() == [[7, -1], [-8, 1]]
    assert grid.scales.tolist() == [[1.0], [1.0]]
    # The one above zero is rounded to 8 first, and cut off.
    assert inside_grid(weight, bits=4).tolist() == [[False, True], [True, True]]
