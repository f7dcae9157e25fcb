"""The read bandwidth is a plausible one, and no cache's."""

import torch

from recipes_lib.core import read_bandwidth
from recipes_lib.core.measure import timed
from recipes_lib.core.read_bandwidth import measure_read_bandwidth


def test_bytes_over_seconds(monkeypatch):
    """Elements counted as bytes would be four times less, a tensor that fits a cache far more."""
    monkeypatch.setattr(read_bandwidth, "SECONDS", 0.0)
    assert read_bandwidth.BYTES_ON_CPU >= 128 * 2**20
    measured = measure_read_bandwidth()
    other = torch.ones(read_bandwidth.BYTES_ON_CPU // 4)
    seconds = min(timed(other.sum)[0] for _ in range(5))
    assert 0.4 < measured * seconds / other.nbytes < 2.5
