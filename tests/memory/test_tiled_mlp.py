import copy
import gc
import weakref

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.measure import PeakMemory, dry_run
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.plain_step import budget_of, loss_bytes
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory import tiled_mlp
from recipes_lib.memory.activation_checkpointing import (
    apply_activation_checkpointing,
    estimate_activation_checkpointing,
)
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp, estimate_tiled_mlp, remove_tiled_mlp
from tests.conftest import (
    FAMILIES,
    assert_equal,
    assert_near,
    assert_same_gradients,
    gradients,
    make_batch,
    run,
)

WIDE = 160  # feed-forward width of the small models but GPT-2


def without_checkpoints(model):
    """The control: the same tiles, whose activations autograd keeps."""
    for module in model.modules():
        if isinstance(module, tiled_mlp._Tiled):
            plain, size = type(module).__bases__[1].forward, module.tile_size

            def forward(x, module=module, plain=plain, size=size):
                tiles = x.reshape(1, -1, x.shape[-1]).split(size, dim=1)
                return torch.cat([plain(module, tile) for tile in tiles], dim=1).view(x.shape)

            module.forward = forward
    return model


# Tokens of all rows: 92. Tiles of a few and a rest, of whole rows, and one that is larger than the batch.
@pytest.mark.parametrize("tile_size", [11, 23, 1000])
def test_same_loss_and_gradients(tiny, batch, tile_size):
    expected = run(tiny, batch)
    norms = tiny.config.model_type != "gpt2"
    assert_same_gradients(
        run(apply_tiled_mlp(tiny, tile_size=tile_size, norms=norms), batch), expected
    )
    assert_same_gradients(run(apply_activation_checkpointing(tiny), batch), expected)
    assert_equal(run(remove_tiled_mlp(tiny), batch), expected)


@pytest.mark.parametrize("tokens", [(2, 23), (1, 1), (31,)])
def test_in_double_precision(tiny, tokens):
    """The MLP alone: a whole model has parts in fp32."""
    results, mlp = [], decoder_blocks(tiny.double())[0].mlp
    hidden, gradient = torch.randn(2, *tokens, 64, dtype=torch.double)
    for tile_size in (None, 1, 7):
        if tile_size:
            apply_tiled_mlp(tiny, tile_size=tile_size)
        hidden = hidden.detach().requires_grad_()
        tiny.zero_grad()
        out = mlp(hidden)
        out.backward(gradient)
        results.append(gradients(tiny) | {"input": hidden.grad, "output": out.detach()})
        if tile_size:
            remove_tiled_mlp(tiny)
    assert_same_gradients(results[1], results[0], atol=1e-13, rtol=1e-13)
    assert_same_gradients(results[2], results[0], atol=1e-13, rtol=1e-13)


def test_in_bf16(tiny, batch):
    """The gradient of a weight is a sum that rounds after every tile."""
    expected = run(tiny.bfloat16(), batch)
    got = run(apply_tiled_mlp(tiny, tile_size=23, norms=tiny.config.model_type != "gpt2"), batch)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] - value).norm() <= 0.02 * value.norm(), name


@pytest.mark.parametrize("autocast", [False, True])
def test_every_tile_is_recomputed_as_it_was(batch, autocast):
    """Dropout in the MLP and autocast: to the last bit the gradients of tiles that keep their activations."""
    model = model_of_shape("tiny-gpt2", device="cpu")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    apply_tiled_mlp(model, tile_size=30)
    control, still = without_checkpoints(copy.deepcopy(model)), copy.deepcopy(model).eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, without = run(control, batch), run(still, batch)
        assert not torch.equal(expected["loss"], without["loss"])  # dropout is at work
        assert_equal(run(model, batch), expected)
        assert_equal(run(apply_activation_checkpointing(model), batch), expected)


@pytest.mark.parametrize("adapters_first", [True, False])
@pytest.mark.parametrize("target_modules", ["all-linear", ["gate_proj", "down_proj"]])
def test_adapters_on_a_frozen_base(llama, batch, adapters_first, target_modules):
    """With adapters in the MLPs only, the input of the first one needs no gradient."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, target_modules=target_modules, lora_dropout=0.0, init_lora_weights=False
    )
    if adapters_first:
        model = apply_tiled_mlp(get_peft_model(llama, config), tile_size=30, norms=True)
    else:
        model = get_peft_model(apply_tiled_mlp(llama, tile_size=30, norms=True), config)
    got = run(model, batch)
    assert_same_gradients(got, run(remove_tiled_mlp(model), batch))
    adapters = got.keys() - {"loss"}
    assert adapters and all("lora" in name and got[name].any() for name in adapters)


def test_four_bit_layers(batch):
    pytest.importorskip("bitsandbytes")
    model = apply_qlora(model_of_shape("tiny-llama", device="cpu"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    expected = run(model, batch)
    apply_tiled_mlp(model, tile_size=32)
    assert_same_gradients(run(model, batch), expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        model.eval()(**batch)  # must not repack the weights for inference
    assert_same_gradients(run(model.train(), batch), expected, atol=1e-5, rtol=1e-4)


def test_frozen_blocks_stay_out_of_backward(llama):
    block = apply_tiled_mlp(llama, tile_size=8, norms=True).requires_grad_(False).model.layers[0]
    hidden = torch.randn(1, 23, 64)
    assert not block.mlp(hidden).requires_grad and not block.input_layernorm(hidden).requires_grad


def test_a_hook_sees_one_complete_gradient(tiny, batch):
    expected = run(tiny, batch)
    apply_tiled_mlp(tiny, tile_size=10)
    seen = {}
    for name, parameter in tiny.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, n=name: seen.setdefault(n, []).append(p.grad.clone())
        )
    run(tiny, batch)
    assert {name: len(got) for name, got in seen.items()} == {
        name: 1 for name in expected if name != "loss"
    }
    assert_same_gradients(
        {name: got[0] for name, got in seen.items()} | {"loss": expected["loss"]}, expected
    )


def test_optimizer_in_backward_takes_the_same_step(llama, batch):
    twin = copy.deepcopy(llama)
    apply_tiled_mlp(llama, tile_size=10)
    for model in (llama, twin):
        optimizer = apply_optimizer_in_backward(model, optimizer_class=torch.optim.SGD, lr=0.1)
        run(model, batch)
        optimizer.step()
    for got, expected in zip(llama.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


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


def test_backward_twice(llama, batch):
    loss = apply_tiled_mlp(llama, tile_size=10, norms=True)(**batch, use_cache=False).loss
    loss.backward(retain_graph=True)
    once = gradients(llama)
    loss.backward()
    assert_same_gradients(gradients(llama), {name: 2 * gradient for name, gradient in once.items()})


def test_an_unused_graph_frees_its_activations(llama, batch):
    """At once: in a reference cycle they would stay until the garbage collector runs."""
    inputs, collects = [], gc.isenabled()
    for block in apply_tiled_mlp(llama, tile_size=10, norms=True).model.layers:
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


def test_generation_and_evaluation(tiny, batch):
    with torch.no_grad():
        logits = tiny(**batch).logits
        answer = tiny.generate(
            batch["input_ids"][:1, :5], max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        apply_tiled_mlp(tiny, tile_size=6)
        torch.testing.assert_close(tiny.eval()(**batch).logits, logits)
        again = tiny.generate(
            batch["input_ids"][:1, :5], max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        assert torch.equal(answer, again)


def test_deep_copy_is_a_model_of_its_own(tiny, batch):
    twin = copy.deepcopy(apply_tiled_mlp(tiny, tile_size=10))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    got = run(twin, batch)
    assert gradients(tiny) == {}
    assert_same_gradients(run(remove_tiled_mlp(twin), batch), got)


def test_names_and_classes_stay(llama):
    names, mlp_class = list(llama.state_dict()), type(llama.model.layers[0].mlp)
    mlp = apply_tiled_mlp(llama).model.layers[0].mlp
    assert list(llama.state_dict()) == names and mlp.tile_size == 1024
    assert isinstance(mlp, mlp_class) and type(mlp).__name__ == mlp_class.__name__
    assert type(remove_tiled_mlp(llama).model.layers[0].mlp) is mlp_class


def small(family, **sizes):
    config = getattr(transformers, f"{family}Config")(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def test_what_cannot_be_done_is_refused(llama, batch):
    plan = budget_of(llama, batch_size=1, seq_len=8)
    gpt2 = model_of_shape("tiny-gpt2", device="cpu")
    for tile_size in (0, -5):
        with pytest.raises(ValueError, match="give 1 or more"):
            apply_tiled_mlp(llama, tile_size=tile_size)
        with pytest.raises(ValueError, match="give 1 or more"):
            estimate_tiled_mlp(plan, llama, batch_size=1, seq_len=8, tile_size=tile_size)
    with pytest.raises(ValueError, match="batch_size=0"):
        estimate_tiled_mlp(plan, llama, batch_size=0, seq_len=8)
    with pytest.raises(ValueError, match="pass norms=False"):
        apply_tiled_mlp(gpt2, norms=True)
    with pytest.raises(ValueError, match="no module"):
        remove_tiled_mlp(llama)
    with pytest.raises(ValueError, match="tiled already"):
        apply_tiled_mlp(apply_tiled_mlp(llama))
    remove_tiled_mlp(llama).model.layers[1].mlp.forward = lambda x: x
    with pytest.raises(ValueError, match="forward of its own"):
        apply_tiled_mlp(llama)
    for model in (
        small("Mixtral", num_local_experts=4),
        small("Qwen3Moe", num_experts=4, moe_intermediate_size=32),
    ):
        with pytest.raises(ValueError, match="mixture of experts"):
            apply_tiled_mlp(model)
        assert not any(isinstance(module, tiled_mlp._Tiled) for module in model.modules())
    opt = transformers.OPTConfig(
        vocab_size=128, hidden_size=64, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(ValueError, match="hold its MLP as `mlp`"):
        apply_tiled_mlp(transformers.AutoModelForCausalLM.from_config(opt))
    bloom = transformers.BloomConfig(vocab_size=128, hidden_size=64, n_layer=1, n_head=4)
    with pytest.raises(ValueError, match="residual"):
        apply_tiled_mlp(transformers.AutoModelForCausalLM.from_config(bloom))


def test_selective_checkpointing_is_refused(llama, batch):
    apply_activation_checkpointing(apply_tiled_mlp(llama), mode="selective")
    with pytest.raises(ValueError, match="checkpoint whole blocks"):
        run(llama, batch)


# --- what it saves and costs ----------------------------------------------------------------------


class Widest(TorchDispatchMode):
    """The largest tensor with the feed-forward width as its last dimension that any operator returns."""

    tokens = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[-1] == WIDE:
                self.tokens = max(self.tokens, leaf.numel() // WIDE)
        return out


@pytest.mark.parametrize("checkpointed", [False, True])
def test_no_tensor_is_wide_and_long(llama, checkpointed):
    ids = torch.randint(0, 128, (2, 200))
    if checkpointed:
        apply_activation_checkpointing(llama)
    with Widest() as plain:
        run(llama, {"input_ids": ids, "labels": ids})
    with Widest() as tiled:
        run(apply_tiled_mlp(llama, tile_size=70), {"input_ids": ids, "labels": ids})
    assert plain.tokens == 400 and tiled.tokens == 70  # the weights [D, F] have 64 rows


def test_arithmetic_that_it_costs(llama):
    """Two of the MLP's three products once more; under block checkpointing, which does them anyway, none."""

    def operations(model):
        with FlopCounterMode(display=False) as counter:
            model(
                input_ids=torch.randint(0, 128, (1, 256)), use_cache=False
            ).logits.sum().backward()
        return counter.get_total_flops()

    product = 2 * 2 * 256 * 64 * WIDE  # in both blocks
    plain = operations(llama)
    assert operations(apply_tiled_mlp(copy.deepcopy(llama), tile_size=64)) == plain + 2 * product
    checkpointed = operations(apply_activation_checkpointing(copy.deepcopy(llama)))
    assert (
        operations(apply_activation_checkpointing(apply_tiled_mlp(llama, tile_size=64)))
        == checkpointed
    )


def measured_and_planned(
    model, batch_size, seq_len, *, tile_size=None, norms=False, checkpointed=False
):
    """Peak of an AdamW step with a small loss on blocks that train, and the estimate of it."""
    sizes = {"batch_size": batch_size, "seq_len": seq_len}
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):  # their gradients would hide the blocks
            module.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(False)
    plan = budget_of(model, **sizes).change(
        loss=loss_bytes(model, batch_size=batch_size, seq_len=1)
    )
    if tile_size:
        plan = estimate_tiled_mlp(plan, model, **sizes, tile_size=tile_size, norms=norms)
        apply_tiled_mlp(model, tile_size=tile_size, norms=norms)
    if checkpointed:
        plan = estimate_activation_checkpointing(plan, model, **sizes)
        apply_activation_checkpointing(model)
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device=model.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)

    def step():
        model(
            input_ids=ids, use_cache=False, logits_to_keep=1
        ).logits.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # creates the states
    with PeakMemory() as memory:
        step()
    return memory.peak, plan.peak


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("shape", FAMILIES)
def test_peak_falls_as_estimated(shape, checkpointed):
    # Gemma 2 has eager attention: in short rows its [S, S] tensors do not hide the MLP.
    size, peaks = (64, 16) if shape == "tiny-gemma2" else (4, 256), []
    for options in ({}, {"tile_size": 200}, {"tile_size": 200, "norms": True}):
        if len(options) == 2 and shape not in ("tiny-llama", "tiny-gemma2"):
            continue
        model = model_of_shape(shape, layers=2, device="cpu")
        measured, planned = measured_and_planned(model, *size, **options, checkpointed=checkpointed)
        if options:
            assert planned == pytest.approx(measured, rel=0.03), options
        peaks.append(measured)
    assert peaks[1] < 0.8 * peaks[0] and peaks == sorted(peaks, reverse=True)


def test_peak_of_one_tile_as_estimated():
    """All activations of one MLP at a time: nothing of its weights' gradients is summed."""
    measured, planned = measured_and_planned(
        model_of_shape("tiny-llama", device="cpu"), 1, 48, tile_size=2000
    )
    assert planned == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(("seq_len", "checkpointed"), [(512, True), (1024, False)])
def test_peak_of_a_public_shape_as_estimated(seq_len, checkpointed):
    with dry_run():
        model = model_of_shape("smollm2-135m", layers=2, device="cpu")
        measured, planned = measured_and_planned(
            model, 1, seq_len, tile_size=128, checkpointed=checkpointed
        )
    assert planned == pytest.approx(measured, rel=0.03)


def test_peak_in_bf16_as_estimated():
    model = model_of_shape("tiny-llama", dtype=torch.bfloat16, device="cpu")
    measured, planned = measured_and_planned(
        model, 4, 256, tile_size=200, norms=True, checkpointed=True
    )
    assert planned == pytest.approx(measured, rel=0.04)


@pytest.mark.gpu
def test_same_gradients_for_less_memory_on_gpu():
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
    model = model_of_shape("tiny-gpt2", device="cuda")
    for block in decoder_blocks(model):
        block.mlp.dropout.p = 0.2
    apply_tiled_mlp(model, tile_size=30)
    batch = {name: tensor.cuda() for name, tensor in make_batch().items()}
    expected, got = run(without_checkpoints(copy.deepcopy(model)), batch), run(model, batch)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-5, rtol=1e-4)
