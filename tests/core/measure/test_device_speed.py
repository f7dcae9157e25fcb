"""The limits of this device: of which dtypes, and how they are counted. Never how fast."""

from dataclasses import replace

import pytest
import torch

from recipes_lib.core.measure import device_speed, timed
from recipes_lib.core.measure.machine import machine


@pytest.mark.parametrize(
    "native, dtypes", [(True, [torch.float32, torch.bfloat16]), (False, [torch.float32])]
)
def test_sixteen_bits_only_where_they_are_native(native, dtypes, monkeypatch):
    """Emulated products take so long that the set-up of a notebook would hang."""
    here = replace(machine(), native_bf16=native)
    monkeypatch.setattr(device_speed, "machine", lambda: here)
    monkeypatch.setattr(device_speed, "SQUARE_ON_CPU", 32)
    monkeypatch.setattr(device_speed, "SECONDS", 0.0)
    assert list(device_speed.measure_matrix_rates()) == dtypes


def test_the_rate_is_that_of_the_fastest_try(monkeypatch):
    """A multiplication and an addition are two operations; a mean would count the disturbed."""
    tries = iter([4.0, 2.0, 8.0, 4.0, 4.0])
    monkeypatch.setattr(device_speed, "SQUARE_ON_CPU", 32)
    monkeypatch.setattr(device_speed, "SECONDS", 0.0)
    monkeypatch.setattr(device_speed, "timed", lambda product: (next(tries), product()))
    assert device_speed._matrix_rate(torch.float32) == 2 * 32**3 / 2.0


def test_bytes_over_seconds(monkeypatch):
    """Elements counted as bytes would be four times less, a tensor that fits a cache far more."""
    monkeypatch.setattr(device_speed, "SECONDS", 0.0)
    measured = device_speed.measure_read_bandwidth()
    other = torch.ones(device_speed.BYTES_ON_CPU // 4)
    seconds = min(timed(other.sum)[0] for _ in range(5))
    assert 0.4 < measured * seconds / other.nbytes < 2.5


@pytest.mark.gpu
def test_on_gpu_sixteen_bits_are_faster(monkeypatch):
    """The clock has to wait for the device; in fp16 on a T4, which has no bf16."""
    monkeypatch.setattr(device_speed, "SQUARE_ON_GPU", 4096)
    found = device_speed.measure_matrix_rates()
    assert list(found) == [torch.float32, machine().compute_dtype]
    assert 1e11 < 2 * found[torch.float32] < found[machine().compute_dtype] < 1e16
