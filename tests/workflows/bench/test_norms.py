import pytest
import torch

from recipes_lib.workflows.bench.norms import compare_norms


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_every_way_computes_its_norm(dtype, error):
    costs = compare_norms(rows=33, hidden=64, dtype=dtype, rounds=2, compiled=False)
    assert costs.keys() == {"plain", "PyTorch", "LayerNorm"}
    for cost in costs.values():
        assert 0 < cost.error < error
        moved = 2 * 33 * 64 * dtype.itemsize
        assert cost.bytes_per_second * cost.seconds == pytest.approx(moved)
    assert "GB/s" in str(costs["plain"])


def test_bad_input():
    with pytest.raises(ValueError, match="rows=0"):
        compare_norms(rows=0, hidden=4)
    with pytest.raises(ValueError, match="rounds=0"):
        compare_norms(rows=1, hidden=4, rounds=0)
