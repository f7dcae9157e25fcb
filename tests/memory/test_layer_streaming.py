import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.mixins import take_out
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora, quantized_layers
from recipes_lib.memory.activation_checkpointing import (
    Checkpointed,
    apply_activation_checkpointing,
)
from recipes_lib.memory.layer_streaming import (
    Streamed,
    apply_layer_streaming,
    streamed_by_hand,
)
from tests.conftest import assert_equal, assert_same_gradients, distance, gradients, run
from tests.small_models import train_a_little

IDS = torch.arange(24).reshape(2, 12) % 96 + 3
BATCH = {"input_ids": IDS, "labels": IDS}


def adapted(shape="tiny-llama", adapt=apply_lora, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = adapt(model_of_shape(shape, dtype=dtype, device="cpu"), rank=4, **options)
    return train_a_little(model, std=0.1)  # zeros would hide the gradients of A


def llama(*, hidden, inside, blocks):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inside,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        vocab_size=99,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("shape", "adapt", "dtype", "options"),
    [
        ("tiny-llama", apply_lora, torch.float32, {"dropout": 0.3}),
        ("tiny-qwen3", apply_lora, torch.bfloat16, {}),
        ("tiny-llama", apply_qlora, torch.float32, {}),
    ],
)
def test_loss_and_gradients_stay_the_same(shape, adapt, dtype, options):
    """Other weights in backward than in forward, or other random numbers the second time."""
    model = adapted(shape, adapt, dtype, **options)
    expected = run(model, BATCH)
    apply_layer_streaming(model, to="disk")
    for _ in range(2):  # the second step finds the files and the order of the first
        assert_equal(run(model, BATCH), expected)
    take_out(model, Streamed)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert_equal(run(model, BATCH), expected)


def test_under_autocast_the_second_forward_computes_in_16_bits_too():
    model = adapted()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**BATCH).loss
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    apply_layer_streaming(model, to="disk")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**BATCH).loss
    loss.backward()  # outside of autocast, as it should be
    assert_equal(gradients(model), expected)


def test_the_weights_of_two_blocks_are_there_at_a_time():
    """The graph holds the weights of all blocks from forward to backward, and nothing is saved.

    So it is in a checkpoint around the 4-bit products of bitsandbytes.
    """
    base = llama(hidden=256, inside=1024, blocks=8)
    peaks = []
    for apply in (apply_activation_checkpointing, lambda m: apply_layer_streaming(m, to="disk")):
        model = apply(apply_qlora(copy.deepcopy(base), rank=4))
        run(model, BATCH)
        with PeakMemory() as memory:
            run(model, BATCH)
        peaks.append(memory.peak)
        del model
    block = (4 * 256**2 + 3 * 256 * 1024) // 2
    assert peaks[0] - peaks[1] > 5 * block  # of eight blocks two are there, and some scales


def test_a_weight_above_170_mib_comes_back_whole():
    """A part of a large weight stays away: a public implementation was wrong above 170 MiB."""
    base = llama(hidden=512, inside=92_000, blocks=1)
    assert base.model.layers[0].mlp.down_proj.weight.nbytes > 170 * 2**20
    model = train_a_little(apply_lora(base, rank=4, check=False), std=0.1)
    expected = run(model, BATCH)
    apply_layer_streaming(model, to="disk", check=False)
    assert_equal(run(model, BATCH), expected)


@pytest.mark.parametrize("adapt", [apply_lora, apply_qlora])
def test_a_model_on_the_host_streams_to_another_device(adapt):
    """The table of angles or the scales of 4-bit weights stay on the host; "meta" is the card."""
    model = adapt(llama(hidden=256, inside=512, blocks=2), rank=4)
    with pytest.raises(ValueError, match="check=False"):
        apply_layer_streaming(model, to="disk", device="meta")
    apply_layer_streaming(model, to="disk", device="meta", check=False)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    for layer in quantized_layers(model).values():
        scales = layer.weight.quant_state
        assert scales.absmax.is_meta and scales.state2.absmax.is_meta
    take_out(model, Streamed)  # the weights come back
    assert all(weight.is_meta and weight.numel() for weight in model.parameters())


def test_generation_works_without_gradients():
    model = adapted().eval()
    expected = model.generate(IDS[:1], max_new_tokens=4, do_sample=False)
    apply_layer_streaming(model, to="disk")
    assert torch.equal(model.generate(IDS[:1], max_new_tokens=4, do_sample=False), expected)


def test_the_plain_idea_does_the_same():
    torch.manual_seed(0)
    weights = [torch.randn(8, 8) for _ in range(3)]

    def block(hidden, weight):
        return torch.tanh(hidden @ weight)

    hidden = torch.randn(2, 8, requires_grad=True)
    plain = hidden
    for weight in weights:
        plain = block(plain, weight)
    expected = torch.autograd.grad(plain.sum(), hidden)[0]
    asked = []

    def fetch(number):
        asked.append(number)
        return [weights[number]]

    streamed_by_hand([block] * 3, fetch, hidden).sum().backward()
    assert torch.equal(hidden.grad, expected)
    assert asked == [0, 1, 2, 2, 1, 0]


def test_a_model_without_frozen_weights_stays_as_it_was():
    model = model_of_shape("tiny-llama", device="cpu")
    with pytest.raises(ValueError, match="no frozen weights"):
        apply_layer_streaming(model, to="disk")
    assert not any(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(ValueError, match="use to='disk'"):
        apply_layer_streaming(adapted())


@pytest.mark.gpu
def test_from_host_memory_on_a_gpu():
    """The computing stream reads weights that the copying stream has not brought yet."""
    model = adapted("smollm2-135m", apply_qlora).cuda()
    ids = torch.randint(0, 49152, (2, 64), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    apply_activation_checkpointing(model)
    expected = run(model, batch)
    take_out(model, Checkpointed)
    apply_layer_streaming(model)
    for _ in range(3):
        assert_same_gradients(run(model, batch), expected, rtol=1e-3)


@pytest.mark.gpu
def test_a_model_in_host_memory_is_never_on_the_gpu_at_once():
    """It is there for a moment, and a card that is smaller than the packed weights is full."""
    model = adapted("smollm2-135m", apply_qlora, compute_dtype=torch.float32)
    expected = run(model, BATCH)
    blocks = sum(weight.nbytes for weight in decoder_blocks(model).parameters())
    with PeakMemory() as memory:
        apply_layer_streaming(model, device="cuda", check=False)
    stays = sum(weight.nbytes for weight in model.parameters() if not weight.is_meta)
    assert memory.peak < stays + blocks / 4
    batch = {name: value.cuda() for name, value in BATCH.items()}
    got = {name: value.cpu() for name, value in run(model, batch).items()}
    for name, value in expected.items():
        assert distance(got[name], value) < 0.05, name
