"""Losses in chunks: which tokens count, and how many at a time. Gradients: see each loss."""

from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.measure import dry_run
from recipes_lib.core.model import chunked_loss
from recipes_lib.core.model.chunked_loss import (
    check_labels,
    divisor_of_mean,
    dtype_of_products,
    rows_with_a_target,
)

# --- which tokens count ---------------------------------------------------------------------------


def test_rows_and_divisor():
    labels = torch.tensor([[5, -100, 7], [-100, 0, -100]])
    assert rows_with_a_target(labels, -100).tolist() == [0, 2, 4]
    assert rows_with_a_target(labels, 0).tolist() == [0, 1, 2, 3, 5]
    assert divisor_of_mean(3, None) == 3
    assert divisor_of_mean(3, torch.tensor([8])) == 8  # as the Trainer gives it
    assert divisor_of_mean(0, 8) == 8, "a micro-batch without a target adds nothing"
    with pytest.raises(ValueError, match="a mean over 0 targets"):
        divisor_of_mean(0, None)
    with dry_run():
        assert rows_with_a_target(torch.zeros(2, 3), -100).shape == (6,)


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
