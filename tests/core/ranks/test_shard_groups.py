import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.ranks.shard_groups import require_shardable, summing_dtype
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward


def test_gradients_in_bf16_are_summed_in_fp32():
    """The mistake: a sum over 64 ranks that has three digits."""
    assert summing_dtype(torch.bfloat16, None) == torch.float32
    assert summing_dtype(torch.bfloat16, torch.bfloat16) == torch.bfloat16
    assert summing_dtype(None, None) is None


def test_what_cannot_be_sharded():
    model = model_of_shape("tiny-mistral", device="cpu")
    require_shardable(model)
    with pytest.raises(ValueError, match=r"parameter_dtype=torch\.float16: choose one of"):
        require_shardable(model, parameter_dtype=torch.float16)
    with pytest.raises(ValueError, match="prefetch=0"):
        require_shardable(model, prefetch=0)
    with pytest.raises(ValueError, match="no Hugging Face model"):
        require_shardable(torch.nn.Linear(2, 2))
    model.model.layers[1].mlp.up_proj.bfloat16()
    with pytest.raises(ValueError, match="block 1 trains weights in"):
        require_shardable(model)
    # Its hooks are on the parameters of before: no part would ever be stepped.
    stepping = model_of_shape("tiny-mistral", device="cpu")
    apply_optimizer_in_backward(stepping, lr=1e-3)
    with pytest.raises(ValueError, match="the optimizer steps in backward"):
        require_shardable(stepping)
