"""Levels, scales and offsets of four bits mean the same by both ways to compute them."""

import pytest
import torch

from recipes_lib.precision._four_bit_grid import GROUPS, in_four_bits, to_four_bits


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_the_fast_way_gives_the_stored_weights(group, symmetric):
    """The mistake: the search of scales rounds on another grid than the one that is stored."""
    weight = torch.randn(3, 2 * group)
    grid = to_four_bits(weight, group=group, symmetric=symmetric)
    assert grid.levels.max() <= 15
    torch.testing.assert_close(
        in_four_bits(weight, group=group, symmetric=symmetric), grid.weight()
    )
    # Half a step, and what rounding scale and offset to bf16 adds.
    step = grid.scales.float().repeat_interleave(group, dim=1)
    assert ((grid.weight() - weight).abs() <= 0.6 * step).all()


def test_bad_weights():
    with pytest.raises(ValueError, match="not finite"):
        to_four_bits(torch.full((1, 32), float("nan")), group=32)
    with pytest.raises(ValueError, match="does not divide"):
        to_four_bits(torch.zeros(1, 33), group=32)
