import copy

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.measure import PeakMemory, dry_run
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.plain_step import budget_of, loss_bytes
from recipes_lib.memory.activation_checkpointing import (
    apply_activation_checkpointing,
    estimate_activation_checkpointing,
    remove_activation_checkpointing,
)
from recipes_lib.memory.nested_checkpointing import (
    apply_nested_checkpointing,
    best_group,
    estimate_nested_checkpointing,
    remove_nested_checkpointing,
)
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp, estimate_tiled_mlp
from recipes_lib.training.gradient_accumulation import split_budget
from tests.conftest import FAMILIES, assert_equal, assert_near, gradients, make_batch, run


@pytest.fixture(params=FAMILIES)
def five(request):
    """Five random blocks of each family: groups of two leave a rest."""
    return model_of_shape(request.param, layers=5, device="cpu")


@pytest.fixture
def llama():
    return model_of_shape("tiny-llama", layers=5, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 2, 5])
def test_same_loss_and_gradients(five, batch, group, dtype):
    five.to(dtype)
    expected = run(five, batch)
    assert_equal(run(apply_nested_checkpointing(five, group=group), batch), expected)
    assert_equal(run(remove_nested_checkpointing(five), batch), expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_with_dropout_and_autocast(batch, attention):
    model = model_of_shape("tiny-gpt2", layers=5, device="cpu")
    model.set_attn_implementation(attention)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    without = run(copy.deepcopy(model).eval(), batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected_autocast = run(model, batch)
    expected = run(model, batch)
    assert not torch.equal(expected["loss"], without["loss"])  # dropout is at work
    apply_nested_checkpointing(model, group=2)
    assert_equal(run(model, batch), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(run(model, batch), expected_autocast)


def test_every_block_gets_its_own_arguments(batch):
    """Gemma 3: sliding and full layers differ in their masks and in their position embeddings."""
    config = transformers.Gemma3TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=4, rope_theta=10_000, bos_token_id=None, eos_token_id=None,
        layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = run(model, batch)
    assert_equal(run(apply_nested_checkpointing(model, group=3), batch), expected)


class Inner(torch.nn.Module):
    """A third level: an MLP that checkpoints parts of the batch by itself."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden):
        return torch.cat(
            [checkpoint(self.mlp, part, use_reentrant=False) for part in hidden.split(3)]
        )


def test_checkpoints_inside_the_blocks(five, batch):
    for block in decoder_blocks(five):
        block.mlp = Inner(block.mlp)
    expected = run(five, batch)
    assert_equal(run(apply_nested_checkpointing(five, group=2), batch), expected)


@pytest.mark.parametrize("adapters_first", [True, False])
def test_gradient_reaches_adapters_on_a_frozen_base(llama, batch, adapters_first):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False)
    if adapters_first:
        model = apply_nested_checkpointing(get_peft_model(llama, config), group=2)
    else:
        model = get_peft_model(apply_nested_checkpointing(llama, group=2), config)
    got = run(model, batch)
    assert_equal(got, run(remove_nested_checkpointing(model), batch))
    adapters = got.keys() - {"loss"}
    assert adapters and all("lora" in name and got[name].any() for name in adapters)


def test_cache_left_on_in_training(five, batch):
    expected = run(five, batch)
    apply_nested_checkpointing(five, group=2)
    assert_equal(run(five, batch, use_cache=True), expected)


@pytest.mark.parametrize("training", [True, False])
def test_generation_uses_the_cache(five, training):
    prompt = torch.randint(1, 128, (2, 5))

    def generate():
        with torch.no_grad():
            return five.train(training).generate(
                prompt, max_new_tokens=8, do_sample=False, pad_token_id=0
            )

    expected = generate()
    apply_nested_checkpointing(five, group=2)
    assert torch.equal(generate(), expected)
    with torch.no_grad():
        cache = five(prompt, use_cache=True).past_key_values
    assert cache.get_seq_length() == 5
    # In eval mode even a forgotten no_grad leaves a decoding loop its cache.
    assert five.eval()(prompt, use_cache=True).past_key_values.get_seq_length() == 5
    with pytest.raises(ValueError, match="filled KV cache"):
        five.train()(prompt, past_key_values=cache)


def test_a_block_in_eval_mode_stays_in_its_group(llama, batch):
    """With a cache in eval mode it would run at once, without the blocks before it."""
    expected = run(llama, batch)
    apply_nested_checkpointing(llama, group=2).model.layers[1].eval()
    assert_equal(run(llama, batch, use_cache=True), expected)


def test_after_a_forward_that_failed(llama, batch):
    expected = run(llama, batch)
    apply_nested_checkpointing(llama, group=3)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="power"):
        patch.setattr(
            llama.model.layers[1],
            "_refuse",
            lambda *_: (_ for _ in ()).throw(RuntimeError("power")),
        )
        run(llama, batch)
    with torch.no_grad():
        llama(**batch)
    assert_equal(run(llama, batch), expected)


def test_deep_copy_is_a_model_of_its_own(five, batch):
    twin = copy.deepcopy(apply_nested_checkpointing(five, group=2))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    got = run(twin, batch)
    assert gradients(five) == {}
    assert_equal(run(remove_nested_checkpointing(twin), batch), got)


def test_names_and_classes_stay(llama):
    names, block_class = list(llama.state_dict()), type(decoder_blocks(llama)[0])
    apply_nested_checkpointing(llama, group=2)
    block = decoder_blocks(llama)[0]
    assert list(llama.state_dict()) == names
    assert isinstance(block, block_class) and type(block).__name__ == block_class.__name__
    assert type(decoder_blocks(remove_nested_checkpointing(llama))[0]) is block_class


def test_best_group():
    assert [best_group(layers) for layers in (1, 4, 9, 30, 100)] == [1, 2, 2, 4, 8]
    for layers in range(1, 40):
        # Walk through backward: inputs of groups, and of the blocks of the group that backward is in.
        alive = [max(n // g + 1 + n % g for n in range(layers)) for g in range(1, layers + 1)]
        assert alive[best_group(layers) - 1] == min(alive) <= 2 * layers**0.5
    with pytest.raises(ValueError, match="1 or more"):
        best_group(0)


def test_what_cannot_be_done_is_refused(llama, batch):
    plan = budget_of(llama, batch_size=1, seq_len=8)
    for group in (0, 6):
        with pytest.raises(ValueError, match="up to 5"):
            apply_nested_checkpointing(llama, group=group)
        with pytest.raises(ValueError, match="up to 5"):
            estimate_nested_checkpointing(plan, llama, batch_size=1, seq_len=8, group=group)
    with pytest.raises(ValueError, match="batch_size=0"):
        estimate_nested_checkpointing(plan, llama, batch_size=0, seq_len=8, group=2)
    with pytest.raises(ValueError, match="no block"):
        remove_nested_checkpointing(llama)
    apply_nested_checkpointing(llama, group=2)
    with pytest.raises(ValueError, match="checkpointed already"):
        apply_nested_checkpointing(llama, group=2)
    with pytest.raises(ValueError, match="checkpointed already"):
        apply_activation_checkpointing(llama)
    apply_activation_checkpointing(remove_nested_checkpointing(llama))
    with pytest.raises(ValueError, match="checkpointed already"):
        apply_nested_checkpointing(llama, group=2)
    remove_activation_checkpointing(llama).gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="checkpointed already"):
        apply_nested_checkpointing(llama, group=2)
    llama.gradient_checkpointing_disable()
    llama.model.layers[1].forward = lambda x: x
    with pytest.raises(ValueError, match="forward of its own"):
        apply_nested_checkpointing(llama, group=2)


def test_forwards_that_would_be_wrong_are_refused(llama, batch):
    apply_nested_checkpointing(llama, group=2)
    for given in ({"output_hidden_states": True}, {}):
        llama.config.output_hidden_states = not given
        with pytest.raises(ValueError, match="output_hidden_states"):
            llama(**batch, **given)
    with torch.no_grad():
        assert len(llama(**batch).hidden_states) == 6
    llama.config.output_hidden_states = False
    hook = llama.model.layers[0].register_forward_hook(lambda module, args, out: out + 1)
    with pytest.raises(ValueError, match="block 1 did not get"):
        run(llama, batch)
    hook.remove()
    llama.model.layers[
        0
    ].eval()  # with a cache it runs at once, as in generation, and the rest of its group cannot
    with pytest.raises(ValueError, match="block 1 did not get"):
        run(llama, batch, use_cache=True)
    llama.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        run(llama, batch)


def test_blocks_that_return_more_than_hidden_states_are_refused(batch):
    config = transformers.FalconConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for group, message in [(1, "hidden states alone"), (2, "did not get")]:
        apply_nested_checkpointing(model, group=group)
        with pytest.raises(ValueError, match=message):
            run(model, batch)
        remove_nested_checkpointing(model)


# --- what it saves and costs ----------------------------------------------------------------------


def test_arithmetic_that_it_costs(llama):
    """One more forward of all blocks but the last of each group: three of the five."""

    def operations(model):
        with FlopCounterMode(display=False) as counter:
            model(
                input_ids=torch.randint(0, 128, (1, 256)), use_cache=False
            ).logits.sum().backward()
        return counter.get_total_flops()

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = torch.randn(1, 256, 64)
        positions = llama.model.rotary_emb(hidden, torch.arange(256)[None])
        decoder_blocks(llama)[0](hidden, position_embeddings=positions)
    once = operations(apply_activation_checkpointing(copy.deepcopy(llama)))
    assert operations(apply_nested_checkpointing(copy.deepcopy(llama), group=1)) == once
    assert (
        operations(apply_nested_checkpointing(llama, group=2))
        == once + 2 * counter.get_total_flops()
    )


def measured_and_planned(model, batch_size, seq_len, *, group, micro_batches=1, tile_size=None):
    """Peak of an AdamW step with a small loss on blocks that train, and the estimate of it; group=0: plain ones."""
    sizes = {"batch_size": batch_size, "seq_len": seq_len}
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):  # their gradients would hide the blocks
            module.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(False)
    plan = budget_of(model, **sizes)
    plan = split_budget(plan, model, **sizes, micro_batches=micro_batches)
    sizes["batch_size"] //= micro_batches
    plan = plan.change(loss=loss_bytes(model, batch_size=sizes["batch_size"], seq_len=1))
    if tile_size:
        plan = estimate_tiled_mlp(plan, model, **sizes, tile_size=tile_size)
        apply_tiled_mlp(model, tile_size=tile_size)
    if group:
        plan = estimate_nested_checkpointing(plan, model, **sizes, group=group)
        apply_nested_checkpointing(model, group=group)
    else:
        plan = estimate_activation_checkpointing(plan, model, **sizes)
        apply_activation_checkpointing(model)
    ids = torch.zeros(sizes["batch_size"], seq_len, dtype=torch.long, device=model.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)

    def step():
        for _ in range(micro_batches):
            model(
                input_ids=ids, use_cache=False, logits_to_keep=1
            ).logits.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # creates the states
    with PeakMemory() as memory:
        step()
    return memory.peak, plan.peak


@pytest.mark.parametrize("group", [3, 8])
def test_inputs_that_it_saves(group):
    """Against plain checkpointing, of eight inputs four stay: of three groups, and one in the last group, of two.

    In one group of eight they are all there when backward enters it. Only norms train: gradients hide nothing.
    """
    peaks = []
    for apply in (
        apply_activation_checkpointing,
        lambda model: apply_nested_checkpointing(model, group=group),
    ):
        model = apply(model_of_shape("tiny-llama", layers=8, device="cpu"))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        with PeakMemory() as memory:
            ids = torch.zeros(4, 256, dtype=torch.long)
            model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.sum().backward()
        peaks.append(memory.peak)
    saved = 4 if group == 3 else 0
    assert (peaks[0] - peaks[1]) / (1024 * 64 * 4) == pytest.approx(saved, abs=0.05)


@pytest.mark.parametrize("shape", FAMILIES)
def test_peak_falls_as_estimated(shape):
    # Gemma 2 has eager attention: in short rows its [S, S] tensors do not hide the rest.
    size, peaks = (64, 16) if shape == "tiny-gemma2" else (4, 256), []
    for group in (0, 3):
        measured, planned = measured_and_planned(
            model_of_shape(shape, layers=8, device="cpu"), *size, group=group
        )
        assert planned == pytest.approx(measured, rel=0.015), group
        peaks.append(measured)
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize(
    ("layers", "seq_len", "group", "tile_size"), [(6, 512, 2, None), (8, 1024, 3, 128)]
)
def test_peak_of_a_public_shape_as_estimated(layers, seq_len, group, tile_size):
    with dry_run():
        model = model_of_shape("smollm2-135m", layers=layers, device="cpu")
        measured, planned = measured_and_planned(
            model, 1, seq_len, group=group, tile_size=tile_size
        )
    assert planned == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("options", "dtype"), [({"micro_batches": 2}, torch.float32), ({}, torch.bfloat16)]
)
def test_peak_with_micro_batches_and_in_bf16_as_estimated(options, dtype):
    model = model_of_shape("tiny-llama", layers=6, dtype=dtype, device="cpu")
    measured, planned = measured_and_planned(model, 4, 256, group=2, **options)
    assert planned == pytest.approx(measured, rel=0.02)


@pytest.mark.gpu
def test_same_loss_and_gradients_for_less_memory_on_gpu():
    model = model_of_shape("tiny-llama", layers=9, dtype=torch.bfloat16, device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch(16, 256).items()}

    def peak():
        with PeakMemory() as memory:
            result = run(model, batch)
        return memory.peak, result

    plain, expected = peak()
    apply_nested_checkpointing(model, group=3)
    less, got = peak()
    assert less < plain
    assert_near(got, expected, 2e-2)  # kernels with atomics do not repeat to the last bit
