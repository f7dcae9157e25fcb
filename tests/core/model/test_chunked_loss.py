"""Losses in chunks: the dtype of their products. Gradients: see each loss."""

from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.model import chunked_loss
from recipes_lib.core.model.chunked_loss import dtype_of_products


@pytest.mark.parametrize(
    ("dtype", "native", "expected"),
    [
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, True, torch.float32),  # for fp16 no CPU here has units
        (torch.float64, False, torch.float64),
    ],
)
def test_dtype_of_products(monkeypatch, dtype, native, expected):
    """On a CPU without units a 16-bit product takes tens of times as long."""
    machine = SimpleNamespace(native_bf16=native, device="cuda")
    monkeypatch.setattr(chunked_loss, "machine", lambda: machine)
    tensor = torch.zeros(2, 2, dtype=dtype)
    assert dtype_of_products(tensor, tensor) == expected
    on_a_gpu = tensor.to("meta")  # it is planned for this machine, which has a GPU here
    assert dtype_of_products(on_a_gpu, on_a_gpu) == dtype
    with torch.autocast("cpu", torch.bfloat16):
        narrow = torch.bfloat16 if native else torch.float32
        if dtype == torch.float64:
            narrow = dtype  # which autocast leaves alone
        assert dtype_of_products(tensor, tensor) == narrow
