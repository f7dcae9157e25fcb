"""What a block that runs twice must not leave behind twice."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from recipes_lib.core.model.caches_of_checkpointed_blocks import without_caches


@pytest.fixture
def filled():
    """A cache that holds three tokens of block 1, and none of block 0."""
    cache = DynamicCache()
    keys = torch.zeros(1, 1, 3, 4)  # [B, H, S, head width]
    cache.update(keys, keys, layer_idx=1)
    return cache


def test_caches_are_dropped_wherever_they_stand(filled):
    """GPT-2 gets its cache by position, Llama by name."""
    args = [torch.zeros(1), filled, None]
    kwargs = {"past_key_values": filled, "use_cache": True, "attention_mask": None}
    plain_args, plain_kwargs = without_caches(args, kwargs, index=0)
    assert plain_args == [args[0], None, None]
    assert plain_kwargs == {"past_key_values": None, "use_cache": False, "attention_mask": None}
    assert kwargs["use_cache"] is True  # what the caller holds is as it was


def test_states_of_a_recurrence_count_as_tokens():
    """They have no length, and asking for one ended in an error inside of transformers."""
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["linear_attention", "full_attention"]
    cache = DynamicCache(config=config)
    without_caches([cache], {}, index=0)
    cache.update_conv_state(torch.zeros(1, 4, 3), 0)
    with pytest.raises(ValueError, match="pass use_cache=False"):
        without_caches([cache], {}, index=0)
    without_caches([cache], {}, index=1)


def test_states_that_are_no_cache_are_refused(filled):
    """RWKV and xLSTM give them by name or by position, RecurrentGemma says only `use_cache`."""
    names = ("hidden", "state", "use_cache")
    hidden = torch.zeros(1)
    without_caches([hidden, None, False], {}, index=0, names=names)
    for args, kwargs in [
        ([hidden, [hidden]], {}),
        ([hidden], {"state": [hidden]}),
        ([hidden, None, True], {}),
        ([hidden, None, True], {"past_key_values": filled}),
    ]:
        with pytest.raises(ValueError, match="pass use_cache=False"):
            without_caches(args, kwargs, index=0, names=names)
