import copy

import peft
import pytest
import torch
import transformers

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.bytes_of_tensors import weight_bytes
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.fine_tuning.qlora import (
    apply_qlora,
    block_size_of,
    check_gradient_flow,
    merge_qlora,
    nf4_layer,
    nf4_levels,
    plain_nf4,
    quantize_nf4,
    quantized_layers,
)
from tests.conftest import distance, gradients, make_batch
from tests.small_models import small_model, train_a_little

bnb = pytest.importorskip("bitsandbytes")


@pytest.fixture(autouse=True, scope="module")
def without_compiler():
    """bitsandbytes compiles its kernel for odd rows: 18 seconds for what takes 10 milliseconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


def dequantized(layer):
    """The weight [out, in] of a 4-bit layer from its stored parts alone."""
    state = layer.weight.quant_state
    packed = layer.weight.data.view(-1)
    index = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)[: state.shape.numel()].long()
    scales = state.absmax
    if state.nested:
        outer = state.state2.absmax.repeat_interleave(256)[: scales.numel()]
        scales = state.state2.code[scales.long()] * outer + state.offset
    return (state.code[index] * scales.repeat_interleave(state.blocksize)[: len(index)]).view(
        state.shape
    )


def run(model, batch):
    out = model(**batch, use_cache=False)
    out.loss.backward()
    return out.logits.detach()


def alive():
    """Bytes of all live tensors."""
    with PeakMemory() as memory:
        return memory.current


def evaluate(model, batch):
    """What generation or a validation loss does between training steps."""
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    model.train()
    return logits


# --- the idea -------------------------------------------------------------------------------------


def test_the_levels_are_bitsandbytes():
    """The mistake: levels that are nearly NF4, and lose a tenth of a bit."""
    expected = nf4_layer(torch.nn.Linear(64, 1)).weight.quant_state.code
    torch.testing.assert_close(nf4_levels(), expected, atol=1e-4, rtol=0)
    assert 0.0 in nf4_levels()  # a weight of zero stays one


def test_quantizing_by_hand_gives_bitsandbytes_weights():
    """The mistake: another scale than the largest weight of a block."""
    block_size = 64
    linear = torch.nn.Linear(128, 96, bias=False)
    by_hand = plain_nf4(linear.weight.detach(), block_size=block_size)
    layer = nf4_layer(linear, block_size=block_size, double_quant=False)
    state = layer.weight.quant_state
    expected = bnb.functional.dequantize_4bit(layer.weight.data, state)
    torch.testing.assert_close(expected, dequantized(layer), atol=1e-6, rtol=1e-5)
    same = torch.isclose(by_hand, expected, atol=1e-4 * linear.weight.abs().max().item())
    assert same.float().mean() > 0.999


# --- one layer ------------------------------------------------------------------------------------

# in, out: ordinary; odd; a multiple of 32 and not of 64 (trap 2)
SHAPES = [
    (576, 192, torch.float32, True, 1e-5),
    (576, 192, torch.bfloat16, False, 2e-2),
    (13, 7, torch.float32, True, 1e-5),
    (96, 33, torch.float32, False, 1e-5),
]


@pytest.mark.parametrize(
    ("in_features", "out_features", "compute_dtype", "double_quant", "tolerance"), SHAPES
)
def test_layer_equals_dequantized_weight(
    in_features, out_features, compute_dtype, double_quant, tolerance
):
    """The mistake: one of three kernels, of forward, backward and no_grad, has wrong scales."""
    linear = torch.nn.Linear(in_features, out_features)
    full = linear.weight.detach().clone()
    bias = linear.bias.detach().clone()
    layer = nf4_layer(
        linear,
        block_size=block_size_of("layer", linear),
        compute_dtype=compute_dtype,
        double_quant=double_quant,
    )
    weight = dequantized(layer)
    assert (weight - full).norm() < 0.15 * full.norm()
    x = torch.randn(2, 5, in_features, requires_grad=True)
    upstream = torch.randn(2, 5, out_features)
    out = layer(x)
    out.backward(upstream)
    for got, expected in ((out, x @ weight.T + bias), (x.grad, upstream @ weight)):
        absolute = tolerance * expected.abs().max().item()
        torch.testing.assert_close(got, expected, atol=absolute, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), out, atol=tolerance, rtol=tolerance)


# --- the weights of a model -----------------------------------------------------------------------


@pytest.mark.parametrize(("family", "double_quant"), [("tiny-llama", False), ("tiny-gemma2", True)])
def test_a_weight_takes_four_bits_and_its_share_of_a_scale(family, double_quant):
    """The mistake: the full weights stay alive, or the scales are stored twice."""
    # With the first model, the library makes a table of its own that stays.
    quantize_nf4(model_of_shape(family, layers=1, device="cpu"))
    before = alive()
    model = model_of_shape(family, layers=3, device="cpu")
    head = model.get_output_embeddings().weight
    quantize_nf4(model, double_quant=double_quant)
    layers = quantized_layers(model)
    assert len(layers) == 3 * 7
    weights = sum(layer.in_features * layer.out_features for layer in layers.values())
    stored = sum(weight_bytes(layer) for layer in layers.values())
    # In layers as small as these, the table of codes counts, too.
    assert 4 < 8 * stored / weights < 6
    assert model.get_output_embeddings().weight is head
    del head
    # The full weights are gone.
    assert alive() - before == pytest.approx(weight_bytes(model), rel=0.01)


def test_weights_are_freed_one_by_one():
    """The mistake: a list of all full layers doubles the memory while they are quantized."""
    model = model_of_shape("tiny-llama", layers=8, device="cpu")
    before = weight_bytes(model)
    with PeakMemory() as memory:
        others = memory.current - before
        quantize_nf4(model)
    # One layer more than the full model, never a second copy.
    assert memory.peak - others < 1.1 * before


# --- trap 1: a forward that repacks the weights ---------------------------------------------------


@pytest.mark.parametrize(
    ("family", "compute_dtype"), [("tiny-llama", torch.float32), ("tiny-gemma2", None)]
)
def test_no_gradient_is_lost_after_an_evaluation(family, compute_dtype, batch):
    """The mistake, trap 1: an evaluation repacks the weights, and training goes on without them."""
    base = model_of_shape(family, device="cpu")
    model = train_a_little(apply_qlora(base, rank=4, compute_dtype=compute_dtype))
    run(model, batch)
    expected = gradients(model)
    model.zero_grad()
    evaluate(model, batch)
    check_gradient_flow(model, batch)
    assert not gradients(model)
    run(model, batch)
    got = gradients(model)
    assert got.keys() == expected.keys() and expected
    assert all(torch.equal(gradient, expected[name]) for name, gradient in got.items())
    fastest = torch.bfloat16 if machine().native_bf16 else torch.float32
    for layer in quantized_layers(model).values():
        assert layer.support_avx512bf16_for_cpu is False
        assert layer.compute_dtype == (compute_dtype or fastest)


@pytest.fixture
def avx512_bf16(monkeypatch):
    """A CPU with AVX512-BF16: bitsandbytes repacks, and its kernel has no backward."""
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)

    def without_backward(x, weight, out=None, state=None):
        return x.new_ones(*x.shape[:-1], state.shape[0])

    monkeypatch.setattr(bnb.functional, "gemv_4bit", without_backward)


def gradient_after_evaluation(layer):
    x = torch.randn(3, 64, requires_grad=True)
    with torch.no_grad():
        layer.eval()(x.detach())
    out = layer.train()(x)
    if out.requires_grad:
        out.sum().backward()
    return x.grad


def test_trap_is_real_and_the_guard_holds(avx512_bf16):
    """The mistake: bitsandbytes renames its switch, and ours switches nothing off."""
    options = {"bias": False, "compute_dtype": torch.float32, "quant_type": "nf4"}
    raw = bnb.nn.Linear4bit(64, 32, **options).to("cpu")
    assert raw.support_avx512bf16_for_cpu
    assert gradient_after_evaluation(raw) is None
    guarded = nf4_layer(torch.nn.Linear(64, 32), compute_dtype=torch.float32)
    expected = dequantized(guarded).sum(0).expand(3, 64)
    torch.testing.assert_close(gradient_after_evaluation(guarded), expected)


def test_check_fails_where_a_layer_cuts_the_gradient(llama, batch):
    """The mistake: some gradient arrives past the layer, and zeros count as one."""
    model = apply_qlora(llama, rank=4)
    check_gradient_flow(model, batch)
    attention = decoder_blocks(model)[0].self_attn
    attention.o_proj.base_layer.register_forward_pre_hook(
        lambda layer, inputs: (inputs[0].detach(),)
    )
    with pytest.raises(RuntimeError, match=r"q_proj.*k_proj.*v_proj"):
        check_gradient_flow(model, batch)


# --- adapters on top ------------------------------------------------------------------------------

PRECISIONS = [
    ("tiny-qwen2", torch.float32, torch.float32, 1e-5),
    ("tiny-llama", torch.bfloat16, None, 4e-2),
]


@pytest.mark.parametrize(("family", "dtype", "compute_dtype", "tolerance"), PRECISIONS)
def test_merged_model_computes_the_same(family, dtype, compute_dtype, tolerance, batch):
    """The mistake: biases of Q, K and V (Qwen2.5) are lost, or weights come back in fp32."""
    model = model_of_shape(family, dtype=dtype, device="cpu")
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):  # zeros in a new model: nobody would miss them
            torch.nn.init.normal_(parameter, std=0.1)
    model = train_a_little(apply_qlora(model, rank=4, alpha=8, compute_dtype=compute_dtype))
    expected = run(model, batch)
    merged = merge_qlora(model)
    assert not quantized_layers(merged) and {p.dtype for p in merged.parameters()} == {dtype}
    assert all(p.requires_grad for p in merged.parameters())
    torch.testing.assert_close(run(merged, batch), expected, atol=tolerance, rtol=tolerance)


def test_merging_by_peft_rounds_to_four_bits_again(llama, batch):
    """The mistake: what was learnt is smaller than a step of the grid, and is rounded away."""
    model = train_a_little(apply_qlora(llama, rank=4, alpha=8, compute_dtype=torch.float32))
    expected = run(model, batch)
    by_peft = copy.deepcopy(model).merge_and_unload()(**batch).logits
    ours = run(merge_qlora(model), batch)
    assert (by_peft - expected).abs().max() > 1000 * (ours - expected).abs().max()


EVERY_LAYER = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
SOME_LAYERS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
KINDS = {
    "DoRA": peft.LoraConfig(r=4, use_dora=True, **EVERY_LAYER),
    "lora_bias": peft.LoraConfig(r=4, lora_bias=True, **SOME_LAYERS),
    "trained head": peft.LoraConfig(r=4, modules_to_save=["lm_head"], **SOME_LAYERS),
}


def adapted(config, dtype=torch.float32):
    """A Qwen 2, which has biases in Q, K and V, in 4 bits and with adapters that are no zeros."""
    model = model_of_shape("tiny-qwen2", dtype=dtype, device="cpu")
    model = quantize_nf4(model, compute_dtype=dtype)
    model = peft.get_peft_model(model, copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_every_kind_are_merged(kind, dtype, most, batch):
    """The mistake: what DoRA (18 % off) and lora_bias (107 %) do beside B A is left out."""
    model = adapted(KINDS[kind], dtype)
    expected = run(model, batch)
    merged = merge_qlora(model)
    assert not quantized_layers(merged) and not hasattr(merged, "peft_config")
    assert distance(run(merged, batch), expected) < most


def test_what_cannot_be_merged_is_refused_before_anything_changes(batch):
    """Biases where the layer has none, and adapters that peft has merged into four bits."""
    no_place = adapted(peft.LoraConfig(r=4, lora_bias=True, **EVERY_LAYER))
    merged_before = adapted(KINDS["DoRA"])
    merged_before.merge_adapter()
    for model in (no_place, merged_before):
        expected = evaluate(model, batch)
        layers = quantized_layers(model).keys()
        with pytest.raises(ValueError, match="cannot have merge_qlora, and is as it was"):
            merge_qlora(model)
        assert torch.equal(evaluate(model, batch), expected)
        assert quantized_layers(model).keys() == layers and model.is_loaded_in_4bit


# --- models from elsewhere, and bad input ---------------------------------------------------------


def llama_of_width(hidden_size):
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def load_in_4bit(folder, **sizes):
    config = transformers.LlamaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, **sizes)
    config.num_attention_heads = config.num_key_value_heads = 4
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, device_map={"": "cpu"}
    ).train()


def test_model_loaded_in_4_bits_gets_the_guards(tmp_path, batch):
    """The mistake: a model that transformers has quantized keeps the traps, or cannot be saved."""
    model = load_in_4bit(tmp_path, intermediate_size=128)
    model = train_a_little(apply_qlora(model, rank=4))
    assert not any(layer.support_avx512bf16_for_cpu for layer in quantized_layers(model).values())
    evaluate(model, batch)
    check_gradient_flow(model, batch)
    expected = run(model, batch)
    merged = merge_qlora(model)
    torch.testing.assert_close(run(merged, batch), expected, atol=1e-5, rtol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(run(again, batch), expected, atol=1e-5, rtol=1e-5)


def test_rows_that_bitsandbytes_gets_wrong_are_refused(tmp_path):
    """The mistake, trap 2: in a model to be quantized, and in one that comes in 4 bits."""
    model = llama_of_width(48)
    with pytest.raises(ValueError, match="a multiple of 16 but not of the block size"):
        quantize_nf4(model)
    assert not quantized_layers(model)
    with pytest.raises(ValueError, match="160 inputs"):
        apply_qlora(load_in_4bit(tmp_path, intermediate_size=160))


def test_models_that_cannot_be_quantized(llama):
    """The mistake: found in the middle, some weights would be gone."""
    with pytest.raises(ValueError, match=r"only nn\.Linear is quantized"):
        quantize_nf4(model_of_shape("tiny-gpt2", device="cpu"))
    mamba = small_model("Mamba", state_size=8)
    with pytest.raises(ValueError, match="without a call"):
        apply_qlora(mamba)
    assert not quantized_layers(mamba)
    with pytest.raises(ValueError, match="quantized already"):
        quantize_nf4(quantize_nf4(llama))


@pytest.mark.gpu
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizes_trains_and_merges_on_gpu(dtype, streamed):
    batch = {name: tensor.cuda() for name, tensor in make_batch().items()}
    model = model_of_shape("tiny-llama", layers=4, dtype=dtype, device="cpu")
    model = quantize_nf4(model, device="cuda" if streamed else None).to("cuda")
    model = train_a_little(apply_qlora(model, rank=4))
    evaluate(model, batch)
    check_gradient_flow(model, batch)
    expected = run(model, batch)
    torch.testing.assert_close(run(merge_qlora(model), batch), expected, atol=5e-2, rtol=5e-2)
