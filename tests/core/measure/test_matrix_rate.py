"""The rate of matrix products: of which dtypes, and how it is counted. Never how fast."""

from dataclasses import replace

import pytest
import torch

from recipes_lib.core.measure import matrix_rate
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.measure.matrix_rate import measure_matrix_rates


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(matrix_rate, "SQUARE_ON_CPU", 32)
    monkeypatch.setattr(matrix_rate, "SECONDS", 0.01)


@pytest.mark.parametrize(
    "native, dtypes", [(True, [torch.float32, torch.bfloat16]), (False, [torch.float32])]
)
def test_sixteen_bits_only_where_they_are_native(native, dtypes, monkeypatch):
    """Emulated products take so long that the set-up of a notebook would hang."""
    here = replace(machine(), native_bf16=native)
    monkeypatch.setattr(matrix_rate, "machine", lambda: here)
    assert list(measure_matrix_rates()) == dtypes


def test_the_rate_is_that_of_the_fastest_try(monkeypatch):
    """A multiplication and an addition are two operations."""
    tries = iter([4.0, 2.0, 8.0])
    monkeypatch.setattr(matrix_rate, "SECONDS", 0.0)
    monkeypatch.setattr(matrix_rate, "timed", lambda product: (next(tries), product()))
    assert matrix_rate._rate(torch.float32) == 2 * 32**3 / 2.0


@pytest.mark.gpu
def test_on_gpu_sixteen_bits_are_faster(monkeypatch):
    """The clock has to wait for the device; in fp16 on a T4, which has no bf16."""
    monkeypatch.setattr(matrix_rate, "SQUARE_ON_GPU", 4096)
    rates = measure_matrix_rates()
    assert list(rates) == [torch.float32, machine().compute_dtype]
    assert 1e11 < 2 * rates[torch.float32] < rates[machine().compute_dtype] < 1e16
