"""Groups of blocks keep one input each, and loss and gradients are the same to the last bit."""

import functools

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.mixins import take_out
from recipes_lib.memory.nested_checkpointing import (
    Nested,
    apply_nested_checkpointing,
    best_group,
)
from tests.conftest import assert_equal, run
from tests.small_models import small_model


@pytest.fixture
def llama():
    return model_of_shape("tiny-llama", layers=5, device="cpu")


# --- the same training ----------------------------------------------------------------------------


@pytest.mark.parametrize("group", [2, 5])
def test_with_a_cache_and_taken_out_again(batch, group):
    """Groups with a rest, and all blocks as one group; keys a second and a third time."""
    model = model_of_shape("tiny-gpt2", layers=5, device="cpu", dtype=torch.bfloat16)
    expected = run(model, batch)
    apply_nested_checkpointing(model, group=group)
    assert_equal(run(model, batch, use_cache=True), expected)
    assert_equal(run(take_out(model, Nested), batch), expected)


def test_every_block_gets_its_own_arguments(batch):
    """Gemma 3: sliding and full layers differ in their masks and in their position embeddings."""
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = small_model("Gemma3Text", sliding_window=4, layer_types=kinds, **sizes).train()
    expected = run(model, batch)
    assert_equal(run(apply_nested_checkpointing(model, group=3), batch), expected)


def test_generation_uses_the_cache(llama):
    """Also in training mode, where a block that waits for its group would cache nothing."""
    prompt = torch.randint(1, 128, (2, 5))
    generate = functools.partial(
        llama.train().generate, prompt, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    expected = generate()
    apply_nested_checkpointing(llama, group=2)
    assert torch.equal(generate(), expected)
    with torch.no_grad():
        cache = llama(prompt, use_cache=True).past_key_values
    assert cache.get_seq_length() == 5
    # In eval mode even a forgotten no_grad leaves a decoding loop its cache.
    assert llama.eval()(prompt, use_cache=True).past_key_values.get_seq_length() == 5
    with pytest.raises(ValueError, match="filled KV cache"):
        llama.train()(prompt, past_key_values=cache)


def test_after_a_forward_that_failed(llama, batch):
    """What the first block has written down must not run in the next forward."""

    def fail(*_):
        raise RuntimeError("power")

    expected = run(llama, batch)
    apply_nested_checkpointing(llama, group=3)
    hook = llama.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="power"):
        run(llama, batch)
    hook.remove()
    with torch.no_grad():
        llama(**batch)
    assert_equal(run(llama, batch), expected)


def test_best_group():
    """The square root is near the fewest inputs, and not always there."""
    assert [best_group(layers) for layers in (1, 4, 9, 30, 100)] == [1, 2, 2, 4, 8]
    for layers in (2, 7, 12, 24, 39):
        # Walk through backward: inputs of groups, and of the blocks of the group that it is in.
        alive = []
        for group in range(1, layers + 1):
            alive.append(max(block // group + 1 + block % group for block in range(layers)))
        assert alive[best_group(layers) - 1] == min(alive) <= 2 * layers**0.5


# --- what is refused ------------------------------------------------------------------------------


def test_collecting_hidden_states_is_refused(llama, batch):
    """It would be the input of the group, several times."""
    apply_nested_checkpointing(llama, group=2)
    with pytest.raises(ValueError, match="output_hidden_states"):
        llama(**batch, output_hidden_states=True)
    with torch.no_grad():
        assert len(llama(**batch, output_hidden_states=True).hidden_states) == 6


def test_work_between_the_blocks_is_refused(llama, batch):
    """It would run before the blocks that it follows."""
    apply_nested_checkpointing(llama, group=2)
    hook = llama.model.layers[0].register_forward_hook(lambda module, args, out: out + 1)
    with pytest.raises(ValueError, match="block 1 did not get"):
        run(llama, batch)
    hook.remove()
    llama.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="block 3 did not get"):
        run(llama, batch)
