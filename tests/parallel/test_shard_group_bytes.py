"""Bytes of the groups: every parameter once, padding, dtypes, and ends that are cut."""

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.ranks.shard_groups import ties_weights
from recipes_lib.parallel._shard_group_bytes import sharded_groups


@pytest.mark.parametrize("name", ["tiny-mistral", "tiny-llama", "tiny-gpt2"])
def test_the_groups_hold_every_parameter_once(name):
    """With one rank there is no padding. GPT-2 has positions that are in no other group."""
    model = model_of_shape(name, device="cpu")
    groups = sharded_groups(model, shards=1)
    whole = sum(tensor_bytes(parameter) for parameter in model.parameters())
    assert groups.whole.part == groups.whole.gathered == groups.whole.part_gradients == whole
    assert (groups.head.part == 0) == ties_weights(model)


def test_parts_are_padded_to_the_rows_of_the_first():
    model = model_of_shape("tiny-mistral", device="cpu")
    groups = sharded_groups(model, shards=3)
    vocabulary, width = model.lm_head.weight.shape  # 128 rows on three ranks: 43, 43, 42
    assert groups.head.part == 4 * 43 * width
    assert groups.head.gathered == 3 * groups.head.part
    assert groups.head.gradients == 4 * vocabulary * width


def test_dtypes():
    model = model_of_shape("tiny-mistral", device="meta")
    model.lm_head.weight.requires_grad_(False)
    groups = sharded_groups(model, shards=2, parameter_dtype=torch.bfloat16)
    plain = sharded_groups(model, shards=2)
    assert 2 * groups.block.gathered == plain.block.gathered
    assert groups.block.sent == plain.block.sent  # summed in fp32
    assert groups.head.gradients == groups.head.sent == groups.head.part_gradients == 0


@pytest.mark.parametrize("name", ["tiny-mistral", "tiny-llama"])
def test_ends_that_are_cut_are_never_gathered(name):
    model = model_of_shape(name, device="meta")
    groups = sharded_groups(model, shards=4, cut_ends=True)
    assert groups.whole.part == sharded_groups(model, shards=4).whole.part
    assert groups.whole.gathered <= groups.all_blocks.gathered + 4 * model.config.hidden_size
