"""Tiles give the same loss and gradients, and no tensor that is wide and long."""

import copy
import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.mixing import take_out
from recipes_lib.memory.activation_checkpointing import (
    apply_activation_checkpointing,
)
from recipes_lib.memory.tiled_mlp import (
    Tiled,
    apply_tiled_mlp,
    tiled_by_hand,
)
from tests.conftest import (
    assert_equal,
    assert_near,
    assert_same_gradients,
    gradients,
    make_batch,
    run,
)
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


def test_the_idea_is_the_technique(llama):
    """The loop that a learner copies: the same as the MLP in one piece, and as the real thing."""
    mlp = llama.model.layers[0].mlp
    hidden = torch.randn(3, 23, 64, requires_grad=True)
    gradient = torch.randn(3, 23, 64)

    def result(forward):
        mlp.zero_grad()
        output = forward(hidden)
        (of_input,) = torch.autograd.grad(output, hidden, gradient, retain_graph=True)
        output.backward(gradient, inputs=list(mlp.parameters()))
        return {"output": output.detach(), "input": of_input} | gradients(mlp)

    whole = result(mlp)
    by_hand = result(lambda hidden: tiled_by_hand(mlp, hidden, tile_size=10))
    apply_tiled_mlp(llama, tile_size=10)
    assert_same_gradients(by_hand, whole)
    assert_same_gradients(result(mlp), by_hand)


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


@pytest.mark.parametrize("tokens", [(2, 23), (31,)])
def test_in_double_precision(llama, tokens):
    """The MLP alone, as a whole model has parts in fp32: also without a dimension of rows."""
    mlp = llama.double().model.layers[0].mlp
    results = []
    hidden, gradient = torch.randn(2, *tokens, 64, dtype=torch.double)
    for tile_size in (None, 1, 7):
        if tile_size:
            apply_tiled_mlp(llama, tile_size=tile_size)
        hidden = hidden.detach().requires_grad_()
        llama.zero_grad()
        out = mlp(hidden)
        out.backward(gradient)
        results.append(gradients(llama) | {"input": hidden.grad, "output": out.detach()})
        if tile_size:
            take_out(llama, Tiled)
    assert_same_gradients(results[1], results[0], atol=1e-13, rtol=1e-13)
    assert_same_gradients(results[2], results[0], atol=1e-13, rtol=1e-13)


def test_in_bf16(batch):
    """The gradient of a weight is a sum that rounds after every tile."""
    model = model_of_shape("tiny-gemma2", dtype=torch.bfloat16, device="cpu")
    expected = run(model, batch)
    got = run(apply_tiled_mlp(model, tile_size=23, norms=True), batch)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] - value).norm() <= 0.02 * value.norm(), name


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


def test_under_distributed_data_parallel(llama, batch):
    """DDP allows a parameter to be ready once per backward, not once per tile."""
    expected = run(llama, batch)
    apply_tiled_mlp(llama, tile_size=10)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        run(torch.nn.parallel.DistributedDataParallel(llama), batch)
    finally:
        torch.distributed.destroy_process_group()
    assert_same_gradients({"loss": expected["loss"]} | gradients(llama), expected)


def test_a_compiled_model_has_the_same_gradients(llama, batch):
    """Catches tiles that are traced: the compiler puts a node of its own in the place of ours."""
    expected = run(apply_tiled_mlp(llama, tile_size=10), batch)
    llama.compile(backend="eager")
    assert_same_gradients(run(llama, batch), expected)


def test_backward_twice(llama, batch):
    """The tiles of the first backward must not stay: the second one makes its own."""
    loss = apply_tiled_mlp(llama, tile_size=10, norms=True)(**batch, use_cache=False).loss
    loss.backward(retain_graph=True)
    once = gradients(llama)
    loss.backward()
    twice = {name: 2 * gradient for name, gradient in once.items()}
    assert_same_gradients(gradients(llama), twice)


def test_an_unused_graph_frees_its_activations(llama, batch):
    """At once: in a reference cycle they would stay until the garbage collector runs."""
    inputs = []
    collects = gc.isenabled()
    apply_tiled_mlp(llama, tile_size=10, norms=True)
    for block in llama.model.layers:
        block.mlp.register_forward_hook(
            lambda mlp, args, out: inputs.append(weakref.ref(args[0].untyped_storage()))
        )
    gc.disable()
    try:
        loss = llama(**batch, use_cache=False).loss
        assert all(storage() is not None for storage in inputs)
        del loss
        assert [storage() for storage in inputs] == [None, None]
    finally:
        if collects:
            gc.enable()


def test_deep_copy_is_a_model_of_its_own(llama, batch):
    """A forward that is bound to the first model would use its weights in the copy."""
    twin = copy.deepcopy(apply_tiled_mlp(llama, tile_size=10, norms=True))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    got = run(twin, batch)
    assert gradients(llama) == {}
    assert_same_gradients(run(take_out(twin, Tiled), batch), got)


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "sizes", "reason"),
    [
        # Their router's loss is over all tokens; it may be asked for in a later call.
        ("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 2}, "mixture of experts"),
        ("OPT", {"ffn_dim": 64}, "holds no MLP"),
        ("Bloom", {"n_layer": 1, "n_head": 4}, "3 were given"),  # what its MLP reads as well
    ],
)
def test_other_feed_forwards_are_refused(family, sizes, reason):
    model = small_model(family, **sizes)
    with pytest.raises(ValueError, match=reason):
        apply_tiled_mlp(model)
    assert not any(isinstance(module, Tiled) for module in model.modules())


def test_what_saves_nothing_is_refused(llama, batch):
    with pytest.raises(ValueError, match="tile_size=0: give a whole number of 1 or more"):
        apply_tiled_mlp(llama, tile_size=0)
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


@pytest.mark.parametrize("checkpointed", [False, True])
def test_no_tensor_is_wide_and_long(llama, checkpointed):
    """A tensor [T, F] that is still made somewhere."""
    ids = torch.randint(0, 128, (2, 200))
    if checkpointed:
        apply_activation_checkpointing(llama)
    rows = {"input_ids": ids, "labels": ids}
    with Widest() as plain:
        run(llama, rows)
    apply_tiled_mlp(llama, tile_size=70)
    with Widest() as tiled:
        run(llama, rows)
    assert plain.tokens == 400 and tiled.tokens == 70  # the weights [D, F] have 64 rows


def operations(step):
    with FlopCounterMode(display=False) as counter:
        step().sum().backward()
    return counter.get_total_flops()


def test_arithmetic_that_it_costs(llama):
    """Two of the MLP's three products once more; under block checkpointing, which does them anyway,
    none."""
    ids = torch.randint(0, 128, (1, 256))

    def of(model):
        return operations(lambda: model(input_ids=ids, use_cache=False).logits)

    product = 2 * 2 * 256 * 64 * WIDE  # in both blocks
    plain = of(llama)
    assert of(apply_tiled_mlp(copy.deepcopy(llama), tile_size=64)) == plain + 2 * product
    checkpointed = of(apply_activation_checkpointing(copy.deepcopy(llama)))
    both = apply_activation_checkpointing(apply_tiled_mlp(llama, tile_size=64))
    assert of(both) == checkpointed


@pytest.mark.gpu
def test_same_gradients_for_less_memory_on_gpu():
    """What a kernel there saves beside what autograd does."""
    model = model_of_shape("tiny-llama", layers=4, device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch(16, 256).items()}

    def peak():
        with PeakMemory() as memory:
            result = run(model, batch)
        return memory.peak, result

    plain, expected = peak()
    apply_tiled_mlp(model, tile_size=256, norms=True)
    less, got = peak()
    assert less < plain
    assert_near(got, expected, 1e-3)


@pytest.mark.gpu
def test_dropout_repeats_on_gpu():
    """From the random state of the device, not of the CPU."""
    model = model_of_shape("tiny-gpt2", device="cuda")
    for block in decoder_blocks(model):
        block.mlp.dropout.p = 0.2
    apply_tiled_mlp(model, tile_size=30)
    batch = {name: tensor.cuda() for name, tensor in make_batch().items()}
    expected = run(without_checkpoints(copy.deepcopy(model)), batch)
    got = run(model, batch)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-5, rtol=1e-4)
