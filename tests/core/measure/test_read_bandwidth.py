"""The read bandwidth is a plausible one, and no cache's."""

import pytest
import torch

from recipes_lib.core.measure import read_bandwidth, timed
from recipes_lib.core.measure.read_bandwidth import measure_read_bandwidth


def test_bytes_over_seconds(monkeypatch):
    """Elements counted as bytes would be four times less, a tensor that fits a cache far more."""
    monkeypatch.setattr(read_bandwidth, "SECONDS", 0.0)
    assert read_bandwidth.BYTES_ON_CPU >= 128 * 2**20
    measured = measure_read_bandwidth()
    other = torch.ones(read_bandwidth.BYTES_ON_CPU // 4)
    seconds = min(timed(other.sum)[0] for _ in range(5))
    assert 0.4 < measured * seconds / other.nbytes < 2.5


@pytest.mark.gpu
def test_the_memory_of_the_gpu_and_not_its_cache(monkeypatch):
    """An H100 has 50 MB of cache; a copy, which reads and writes, is no faster than a sum."""
    monkeypatch.setattr(read_bandwidth, "SECONDS", 0.0)
    measured = measure_read_bandwidth()
    numbers = torch.ones(read_bandwidth.BYTES_ON_GPU // 4, device="cuda")
    copy = torch.empty_like(numbers)
    seconds = min(timed(lambda: copy.copy_(numbers))[0] for _ in range(5))
    assert 0.4 < measured * seconds / (2 * numbers.nbytes) < 2.5
