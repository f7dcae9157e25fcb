"""The limits of this device: of which dtypes, and how they are counted. Never how fast."""

import itertools
from dataclasses import replace

import pytest
import torch

from recipes_lib.core.measure import device_speed
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


def test_operations_and_bytes_over_the_seconds_of_the_fastest_try(monkeypatch):
    """The mistakes: a mean, which counts noise; one operation for two; bytes as elements."""
    tries = itertools.cycle([4.0, 2.0, 8.0])
    monkeypatch.setattr(device_speed, "SQUARE_ON_CPU", 32)
    monkeypatch.setattr(device_speed, "BYTES_ON_CPU", 4096)
    monkeypatch.setattr(device_speed, "VECTOR", 32)
    monkeypatch.setattr(device_speed, "SECONDS", 0.0)
    monkeypatch.setattr(device_speed, "timed", lambda call: (next(tries), call()))
    assert device_speed._rate_of_products(torch.float32) == 2 * 32**3 / 2.0
    assert device_speed.measure_read_bandwidth() == 4096 / 2.0


@pytest.mark.gpu
def test_on_gpu_sixteen_bits_are_faster(monkeypatch):
    """The clock has to wait for the device; in fp16 on a T4, which has no bf16."""
    monkeypatch.setattr(device_speed, "SQUARE_ON_GPU", 4096)
    found = device_speed.measure_matrix_rates()
    assert list(found) == [torch.float32, machine().compute_dtype]
    assert 1e11 < 2 * found[torch.float32] < found[machine().compute_dtype] < 1e16
