"""Losses in chunks: which tokens count, and how many at a time. Gradients: see each loss."""

from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.model import chunked_loss
from recipes_lib.core.model.chunked_loss import (
    check_labels,
    dtype_of_products,
)

# --- which tokens count ---------------------------------------------------------------------------


def test_labels_outside_of_the_vocabulary():
    check_labels(torch.tensor([0, 8]), 9, -100)
    with pytest.raises(ValueError, match="in the vocabulary of 9 nor -100"):
        check_labels(torch.tensor([0, 9]), 9, -100)


# --- the plan -------------------------------------------------------------------------------------


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
    monkeypatch.setattr(chunked_loss, "machine", lambda: SimpleNamespace(native_bf16=native))
    tensor = torch.zeros(2, 2, dtype=dtype)
    assert dtype_of_products(tensor, tensor, "cpu") == expected
    assert dtype_of_products(tensor, tensor, "cuda") == dtype
    with torch.autocast("cpu", torch.bfloat16):
        narrow = torch.bfloat16 if native else torch.float32
        if dtype == torch.float64:
            narrow = dtype  # which autocast leaves alone
        assert dtype_of_products(tensor, tensor, "cpu") == narrow
