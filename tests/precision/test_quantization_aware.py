"""Training on a grid: torchao's numbers, forward and backward, and the weights of its file."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.qat import QATConfig

from recipes_lib.compression.distillation import apply_distillation
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.integer_grid import to_grid
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.precision.int8 import apply_int8
from recipes_lib.precision.quantization_aware import (
    apply_quantization_aware,
    apply_rounding,
    convert_quantization_aware,
    plain_fake_quantize,
    plain_fake_quantize_tokens,
    remove_quantization_aware,
)
from tests.conftest import assert_same_gradients, gradients

logging.getLogger("torchao").setLevel(logging.ERROR)
GROUP = 16
IDS = torch.arange(1, 25).view(2, 12)  # two rows of tokens [B, S]


def causal_lm():
    """With an output layer whose rounding shows: weights of different sizes in each row."""
    torch.manual_seed(0)
    model = model_of_shape("tiny-llama", device="cpu")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(torch.linspace(0.2, 5, 128)[:, None])
    return model


def loss_of(model):
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def conv_net(channels=6):
    """A depthwise-separable convolution with BatchNorm, and a classifier."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, stride=2, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU6(),
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
        nn.Conv2d(channels, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


# --- the grid of torchao --------------------------------------------------------------------------


def torchao_configs():
    """Of the linear layers, the output layer and the embedding, in torchao's words."""
    four = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(GROUP)
    )
    eight = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int8, weight_granularity=PerAxis(0)
    )
    table = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    return {"blocks": four, "output": eight, "embedding": table}


def quantize_by_torchao(model, step):
    """Prepare a model for training with torchao, or quantize it where `step` is None."""

    def is_output(module, name):
        return name == "lm_head"

    def in_block(module, name):
        return isinstance(module, nn.Linear) and not is_output(module, name)

    def is_embedding(module, name):
        return isinstance(module, nn.Embedding)

    filters = {"blocks": in_block, "output": is_output, "embedding": is_embedding}
    for part, config in torchao_configs().items():
        if step is not None:
            config = QATConfig(config, step=step)
        quantize_(model, config, filter_fn=filters[part])


def test_a_step_is_that_of_torchao():
    """Loss and all gradients, with the table that embedding and output layer share."""
    ours = causal_lm()
    theirs = copy.deepcopy(ours)
    apply_quantization_aware(ours, group=GROUP)
    quantize_by_torchao(theirs, "prepare")
    # torchao makes a new output layer, and with it the tie goes.
    theirs.lm_head.weight = theirs.get_input_embeddings().weight
    plain = loss_of(causal_lm())
    losses = [loss_of(model) for model in (ours, theirs)]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)
    assert abs(losses[0] - plain) > 1e-3  # something was rounded
    for loss in losses:
        loss.backward()
    assert_same_gradients(gradients(ours), gradients(theirs))


def test_what_is_exported_is_what_was_trained():
    """The mistake: weights that are rounded twice, so that the file is another model."""
    model = causal_lm()
    trained = apply_quantization_aware(copy.deepcopy(model), group=GROUP)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for _ in range(2):
        loss_of(trained).backward()
        optimizer.step()
        optimizer.zero_grad()
    converted = convert_quantization_aware(copy.deepcopy(trained))
    with torch.no_grad():
        expected = trained.eval()(input_ids=IDS).logits
        assert torch.equal(converted(input_ids=IDS).logits, expected)

    masters = remove_quantization_aware(trained)
    assert type(masters.lm_head) is nn.Linear
    rounded = apply_rounding(copy.deepcopy(masters), group=GROUP)
    assert rounded.lm_head.weight is rounded.get_input_embeddings().weight  # with one grid
    masters.lm_head.weight = nn.Parameter(masters.lm_head.weight.detach().clone())
    quantize_by_torchao(masters, None)
    for name, layer in masters.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            exported = layer.weight.dequantize()
            assert torch.equal(converted.get_submodule(name).weight, exported)
            assert torch.equal(rounded.get_submodule(name).weight, exported)
    with torch.no_grad():
        assert torch.allclose(masters(input_ids=IDS).logits, expected, atol=1e-5)


@pytest.mark.parametrize(("activation_bits", "shape"), [(8, (2, 3, 64)), (None, (64,))])
def test_the_layer_is_its_plain_formula(shape, activation_bits):
    """Forward, the gradient of the input and that of the weight, with what was cut off."""
    linear = nn.Linear(64, 24)
    model = wrapped(linear, activation_bits=activation_bits)
    x = (3 * torch.randn(shape)).requires_grad_()
    given = torch.randn(*shape[:-1], 24)
    (model(x) * given).sum().backward()
    found = [x.grad.clone(), linear.weight.grad.clone(), linear.bias.grad.clone()]
    for tensor in (x, linear.weight, linear.bias):
        tensor.grad = None

    tokens = x
    if activation_bits is not None:
        tokens = plain_fake_quantize_tokens(x, bits=activation_bits)
    weight = plain_fake_quantize(linear.weight, bits=4, group=GROUP)
    expected = F.linear(tokens, weight, linear.bias)
    torch.testing.assert_close(model(x), expected)
    (expected * given).sum().backward()
    for ours, plain in zip(found, (x.grad, linear.weight.grad, linear.bias.grad)):
        torch.testing.assert_close(ours, plain)
    # The largest weight of a group may be cut off, and gets no gradient then.
    assert (linear.weight.grad == 0).any()


def wrapped(linear, *, activation_bits):
    """A linear layer as `apply_quantization_aware` makes it of one in a block."""
    from recipes_lib.core.model.mixins import mix_in
    from recipes_lib.precision.quantization_aware.layers import AwareLinear

    mix_in(linear, AwareLinear, weight_bits=4, group=GROUP, activation_bits=activation_bits)
    return linear


def test_under_autocast_masters_and_grids_stay_in_fp32():
    """In bf16, a scale has 3 digits, and the largest weights would land on other levels."""
    model = apply_quantization_aware(causal_lm(), group=GROUP)
    expected = loss_of(model)
    expected.backward()
    in_fp32 = gradients(model)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    for parameter in model.parameters():
        assert parameter.dtype is torch.float32 and parameter.grad.dtype is torch.float32
    for name, gradient in gradients(model).items():
        assert F.cosine_similarity(gradient.flatten(), in_fp32[name].flatten(), dim=0) > 0.95


# --- training -------------------------------------------------------------------------------------


def test_a_saved_model_has_its_weights_in_full_precision(tmp_path):
    """The mistake: a file of rounded weights, which an exporter rounds to another grid."""
    model = causal_lm()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apply_quantization_aware(model, group=GROUP)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path)
    twin = type(model).from_pretrained(tmp_path)
    assert torch.equal(twin.lm_head.weight, before["lm_head.weight"])
    copied = copy.deepcopy(model)
    remove_quantization_aware(model)
    assert loss_of(copied) != loss_of(model)


def test_tables_with_two_grids():
    """One table trains with two kinds of rounding, and becomes two when training is over."""
    model = apply_quantization_aware(causal_lm(), group=GROUP, output_bits=4)
    table = model.get_input_embeddings().weight
    assert model.lm_head.weight is table
    masters = table.detach().clone()
    expected = model.eval()(input_ids=IDS).logits
    convert_quantization_aware(model)
    assert torch.equal(model(input_ids=IDS).logits, expected)
    assert torch.equal(model.get_input_embeddings().weight, to_grid(masters, bits=8).weight())
    assert torch.equal(model.lm_head.weight, to_grid(masters, bits=4).weight())
    assert not model.config.tie_word_embeddings


def test_losses_that_go_past_the_output_layer():
    """They would train a model whose output layer is not rounded, and say nothing."""
    teacher = causal_lm()
    for prepare in (apply_chunked_cross_entropy, lambda model: apply_distillation(model, teacher)):
        student = prepare(causal_lm())
        with pytest.raises(ValueError, match="output_bits=8: this LlamaForCausalLM has another"):
            apply_quantization_aware(student, group=GROUP)
        apply_quantization_aware(student, group=GROUP, output_bits=None)
        loss_of(student.train()).backward()
    with pytest.raises(ValueError, match="scales its logits or changes them"):
        loss_of(apply_chunked_cross_entropy(apply_quantization_aware(teacher, group=GROUP)).train())


# --- convolutions ---------------------------------------------------------------------------------


def test_a_convolution_is_what_pytorch_rounds():
    """Its own operators for fake quantization, with our scales: forward and gradients."""
    bits = 3
    net = conv_net().eval()
    images = torch.randn(4, 3, 9, 9)
    apply_quantization_aware(net, weight_bits=bits, calibration=images)
    first = net[0]
    x = (1.2 * images).requires_grad_()  # a part lies outside the range
    given = torch.randn(4, 6, 5, 5)
    (first(x) * given).sum().backward()
    found = [first(x), x.grad.clone(), first.weight.grad.clone()]
    x.grad = first.weight.grad = None

    scales = to_grid(first.weight, bits=bits).scales[:, 0]
    half = 2 ** (bits - 1)
    zeros = torch.zeros(6, dtype=torch.int32)
    weight = torch.fake_quantize_per_channel_affine(first.weight, scales, zeros, 0, -half, half - 1)
    low, high = images.min(), images.max()
    scale = (high - low) / 255
    zero = int(-128 - (low / scale).round())
    rounded = torch.fake_quantize_per_tensor_affine(x, scale.item(), zero, -128, 127)
    expected = F.conv2d(rounded, weight, first.bias, stride=2, padding=1)
    (expected * given).sum().backward()
    assert (x.grad == 0).any()
    for ours, theirs in zip(found, (expected, x.grad, first.weight.grad)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_ranges_of_training_and_of_images():
    """Training moves the range, eval mode does not, and a converted net keeps it."""
    images = torch.randn(8, 3, 9, 9)
    net = apply_quantization_aware(conv_net())
    with pytest.raises(ValueError, match="train a step first"):
        net.eval()(images)
    net.train()(images)
    limits = net[0].activation_limits.clone()
    assert limits.tolist() == [images.min().item(), images.max().item()]
    net(2 * images)
    assert 1.0 < net[0].activation_limits[1] / limits[1] < 1.2
    limits = net[0].activation_limits.clone()
    expected = net.eval()(3 * images)
    assert torch.equal(net[0].activation_limits, limits)
    again = apply_quantization_aware(conv_net(), calibration=images)
    again.load_state_dict(net.state_dict())
    assert torch.equal(again.eval()(3 * images), expected)
    convert_quantization_aware(net)
    assert torch.equal(net(3 * images), expected)


# --- guards ---------------------------------------------------------------------------------------


def test_what_would_mean_something_else_is_refused(llama):
    """The mistakes: a grid on a grid, adapters that are rounded, weights that are left out."""
    model = apply_quantization_aware(causal_lm(), group=GROUP)
    with pytest.raises(ValueError, match="quantized already, with apply_quantization_aware"):
        apply_int8(model)
    convert_quantization_aware(model)
    with pytest.raises(ValueError, match="with convert_quantization_aware: give a model in full"):
        apply_rounding(model, group=GROUP)
    with pytest.raises(ValueError, match="the model is quantized"):
        model.save_pretrained("nowhere")
    with pytest.raises(ValueError, match=r"q_proj has 64 inputs, which group=48 does not divide"):
        apply_quantization_aware(llama, group=48)
    with pytest.raises(ValueError, match="merge_and_unload"):
        apply_quantization_aware(apply_lora(llama, rank=2), group=GROUP)
    with pytest.raises(ValueError, match=r"c_attn.weight .* is a weight of Conv1D"):
        apply_quantization_aware(model_of_shape("tiny-gpt2", device="cpu"), group=GROUP)
    with pytest.raises(ValueError, match=r"LlamaModel has no nn\.Conv2d and is no causal LM"):
        apply_quantization_aware(causal_lm().model, group=GROUP)


def test_without_ranges_the_network_stays_as_it_is():
    """The mistake: layers that have changed, or weights that are rounded for good."""
    net = conv_net()
    with pytest.raises(ValueError, match=r"is as it was.*has seen no batch"):
        apply_rounding(net)
    assert type(net[0]) is nn.Conv2d
    assert "0.activation_limits" not in net.state_dict()
    apply_quantization_aware(net)
    before = net[0].weight.clone()
    with pytest.raises(ValueError, match="has seen no batch"):
        convert_quantization_aware(net)
    assert torch.equal(net[0].weight, before)
