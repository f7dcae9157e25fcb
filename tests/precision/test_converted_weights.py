"""A product in blocks of converted weights is the product with the whole weight."""

import pytest
import torch

from recipes_lib.precision import _converted_weights as converted_weights
from recipes_lib.precision._converted_weights import converted_product, product_dtype


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16])
def test_blocks_make_the_whole_product(dtype, monkeypatch):
    """The mistake: a last block that is not full is lost, or blocks are joined along the rows."""
    monkeypatch.setattr(converted_weights, "BLOCK_WEIGHTS", 3 * 20)  # blocks of 3, 3 and 1 outputs
    x = torch.randn(5, 20)
    weight = torch.randint(-127, 128, (7, 20)).to(dtype)  # exact in each dtype
    expected = x.to(product_dtype(x)).double() @ weight.double().T
    got = converted_product(x, weight)
    assert got.shape == (5, 7)
    torch.testing.assert_close(got.double(), expected, rtol=0.02, atol=2.0)
