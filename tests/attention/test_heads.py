"""Queries, keys and values that do not go together."""

import pytest
import torch

from recipes_lib.attention._heads import check_heads


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 4, 5, 8), (2, 2, 5, 8), (2, 4, 5, 8)),  # k and v differ
        ((2, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)),  # another batch, which would broadcast
        ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)),  # another length
        ((2, 4, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)),  # heads without a partner
    ],
)
def test_heads_that_do_not_go_together(q, k, v):
    check_heads(torch.ones(2, 4, 5, 8), torch.ones(2, 2, 5, 8), torch.ones(2, 2, 5, 8), allowed="")
    with pytest.raises(ValueError, match=r"v \[.*\]: give what fits"):
        check_heads(torch.ones(q), torch.ones(k), torch.ones(v), allowed="what fits")
