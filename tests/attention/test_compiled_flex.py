"""FlexAttention never runs uncompiled."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from recipes_lib.attention import _compiled_flex as compiled_flex
from recipes_lib.attention._compiled_flex import compiled_block_mask, compiled_flex_attention


@pytest.fixture
def quickly(monkeypatch):
    """Traced as for a kernel, and run as it is. What other tests compiled is forgotten."""
    monkeypatch.setattr(compiled_flex, "BACKEND", "eager")
    torch.compiler.reset()
    yield monkeypatch
    torch.compiler.reset()


def attend(window, q):
    def reads(batch, head, query, key):
        return (key <= query) & (key > query - window)

    # Code of its own, as another pattern has it. Only numbers differ between two windows, and for
    # those one graph serves.
    reads.__code__ = reads.__code__.replace(co_name=f"reads_{window}")
    mask = compiled_block_mask(reads, None, None, len(q[0, 0]), len(q[0, 0]), device=q.device)
    return compiled_flex_attention(q, q, q, block_mask=mask)


def expected(window, q):
    length = q.shape[2]
    near = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=near)


def test_more_masks_than_pytorch_allows_by_itself(quickly):
    """The mistake: the ninth mask runs uncompiled, in the memory of all S x S scores."""
    q = torch.randn(1, 2, 128, 16)
    # As if PyTorch allowed one mask by itself: so three show it, and each takes seconds.
    few = {"recompile_limit": 1, "accumulated_recompile_limit": 1}
    with torch._dynamo.config.patch(few):
        for window in range(3, 6):
            torch.testing.assert_close(attend(window, q), expected(window, q), atol=1e-5, rtol=1e-4)


def test_too_many_masks_are_an_error(quickly):
    """The mistake: a mask that runs uncompiled after all."""
    quickly.setattr(compiled_flex, "LIMIT", 1)
    q = torch.randn(1, 2, 128, 16)
    with pytest.raises(FailOnRecompileLimitHit):
        for window in range(3, 6):
            attend(window, q)


def test_bf16_on_a_card_without_it_is_refused(monkeypatch):
    """The mistake: PyTorch compiles nothing, and the plain code makes all S x S scores."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"7\.5 has no bf16, .* torch\.float16"):
        compiled_flex_attention(q)
