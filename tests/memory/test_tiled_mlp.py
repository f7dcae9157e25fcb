"""Tiles give the same loss and gradients, and no tensor that is wide and long."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.mixins import take_out
from recipes_lib.memory.activation_checkpointing import (
    apply_activation_checkpointing,
)
from recipes_lib.memory.tiled_mlp import (
    Tiled,
    apply_tiled_mlp,
)
from tests.conftest import assert_equal, assert_same_gradients, run
from tests.small_models import small_model

WIDE = 160  # feed-forward width of the small models but GPT-2


def without_checkpoints(model):
    """The control: the same tiles, whose activations autograd keeps."""
    for module in model.modules():
        if isinstance(module, Tiled):
            module.forward = plain_tiles(module)
    return model


def plain_tiles(module):
    untiled = type(module).__bases__[1].forward

    def forward(hidden):
        tiles = hidden.reshape(1, -1, hidden.shape[-1]).split(module.tile_size, dim=1)
        return torch.cat([untiled(module, tile) for tile in tiles], dim=1).view(hidden.shape)

    return forward


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-gpt2"])
def test_same_loss_and_gradients(shape, batch):
    """With and without checkpointed blocks; then as before, to the last bit."""
    model = model_of_shape(shape, device="cpu")
    expected = run(model, batch)
    # 92 tokens: eight tiles and a rest.
    apply_tiled_mlp(model, tile_size=11, norms=shape == "tiny-llama")
    assert_same_gradients(run(model, batch), expected)
    assert_same_gradients(run(apply_activation_checkpointing(model), batch), expected)
    assert_equal(run(take_out(model, Tiled), batch), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_every_tile_is_recomputed_as_it_was(batch, autocast):
    """Dropout in the MLP, and autocast: to the last bit as tiles that keep their activations."""
    gpt2 = model_of_shape("tiny-gpt2", device="cpu")
    for module in gpt2.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    apply_tiled_mlp(gpt2, tile_size=30)
    control = without_checkpoints(copy.deepcopy(gpt2))
    still = copy.deepcopy(gpt2).eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = run(control, batch)
        without = run(still, batch)
        assert not torch.equal(expected["loss"], without["loss"])  # dropout is at work
        assert_equal(run(gpt2, batch), expected)
        assert_equal(run(apply_activation_checkpointing(gpt2), batch), expected)


def test_adapters_on_a_frozen_base(llama, batch):
    """With adapters in the MLPs only, the input of the first one needs no gradient."""
    from peft import LoraConfig, get_peft_model

    target_modules = ["gate_proj", "down_proj"]
    config = LoraConfig(
        r=4, target_modules=target_modules, lora_dropout=0.0, init_lora_weights=False
    )
    model = apply_tiled_mlp(get_peft_model(llama, config), tile_size=30, norms=True)
    got = run(model, batch)
    assert_same_gradients(got, run(take_out(model, Tiled), batch))
    adapters = got.keys() - {"loss"}
    assert adapters and all("lora" in name and got[name].any() for name in adapters)


def test_a_hook_sees_one_complete_gradient(llama, batch):
    """A backward per tile would call it once per tile, with a part of the gradient."""
    expected = run(llama, batch)
    apply_tiled_mlp(llama, tile_size=10)
    seen = {name: [] for name in expected if name != "loss"}
    for name, parameter in llama.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, n=name: seen[n].append(p.grad.clone())
        )
    run(llama, batch)
    assert {len(calls) for calls in seen.values()} == {1}
    got = {name: calls[0] for name, calls in seen.items()} | {"loss": expected["loss"]}
    assert_same_gradients(got, expected)


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "sizes", "reason"),
    [
        # Their router's loss is over all tokens; it may be asked for in a later call.
        ("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 2}, "mixture of experts"),
        ("OPT", {"ffn_dim": 64}, "holds no MLP"),
    ],
)
def test_other_feed_forwards_are_refused(family, sizes, reason):
    model = small_model(family, **sizes)
    with pytest.raises(ValueError, match=reason):
        apply_tiled_mlp(model)
    assert not any(isinstance(module, Tiled) for module in model.modules())


def test_what_saves_nothing_is_refused(llama, batch):
    with pytest.raises(ValueError, match="pass norms=False"):
        apply_tiled_mlp(model_of_shape("tiny-gpt2", device="cpu"), norms=True)
    apply_activation_checkpointing(apply_tiled_mlp(llama), mode="selective", check=False)
    with pytest.raises(ValueError, match="checkpoint whole blocks"):
        run(llama, batch)


# --- what it saves and costs ----------------------------------------------------------------------


class Widest(TorchDispatchMode):
    """The most rows of a tensor of the feed-forward width that any operator returns."""

    tokens = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[-1] == WIDE:
                self.tokens = max(self.tokens, leaf.numel() // WIDE)
        return out


def test_no_tensor_is_wide_and_long(llama):
    """A tensor [T, F] that is still made somewhere."""
    ids = torch.randint(0, 128, (2, 200))
    apply_activation_checkpointing(llama)
    rows = {"input_ids": ids, "labels": ids}
    with Widest() as plain:
        run(llama, rows)
    apply_tiled_mlp(llama, tile_size=70)
    with Widest() as tiled:
        run(llama, rows)
    assert plain.tokens == 400 and tiled.tokens == 70  # the weights [D, F] have 64 rows
