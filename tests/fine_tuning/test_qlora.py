import copy
import sys

import pytest
import torch
import transformers

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.sizes import weight_bytes
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import (
    apply_qlora,
    block_size_of,
    check_gradient_flow,
    estimate_qlora,
    merge_qlora,
    nf4_bytes,
    nf4_layer,
    nf4_levels,
    plain_nf4,
    quantize_nf4,
    quantized_layers,
)
from tests.conftest import FAMILIES, gradients, make_batch

bnb = pytest.importorskip("bitsandbytes")
NN_LINEAR = [family for family in FAMILIES if family != "tiny-gpt2"]


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


def train_a_little(model):
    """Give B values of its own, as training does."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


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
        model.eval()(**batch)
    model.train()


# --- the idea -------------------------------------------------------------------------------------


def test_the_levels_are_bitsandbytes():
    expected = nf4_layer(torch.nn.Linear(64, 1)).weight.quant_state.code
    torch.testing.assert_close(nf4_levels(), expected, atol=1e-4, rtol=0)
    assert 0.0 in nf4_levels()  # a weight of zero stays one


@pytest.mark.parametrize("block_size", [64, 32])
def test_quantizing_by_hand_gives_bitsandbytes_weights(block_size):
    """Nearest level times the largest weight of the block; few lie between two levels."""
    linear = torch.nn.Linear(128, 96, bias=False)
    by_hand = plain_nf4(linear.weight.detach(), block_size=block_size)
    layer = nf4_layer(linear, block_size=block_size, double_quant=False)
    state = layer.weight.quant_state
    expected = bnb.functional.dequantize_4bit(layer.weight.data, state)
    torch.testing.assert_close(expected, dequantized(layer), atol=1e-6, rtol=1e-5)
    same = torch.isclose(by_hand, expected, atol=1e-4 * linear.weight.abs().max().item())
    assert same.float().mean() > 0.999


# --- one layer ------------------------------------------------------------------------------------

# in, out: ordinary; not a multiple of the block; odd; a multiple of 32 and not of 64: trap 2
SHAPES = [
    (64, 64),
    (576, 192),
    (100, 48),
    (33, 40),
    (13, 7),
    (160, 64),
    (96, 33),
    (1056, 3),
    (2, 3),
]


KINDS = [(torch.float32, True, 1e-5), (torch.float32, False, 1e-5), (torch.bfloat16, True, 2e-2)]


@pytest.mark.parametrize(("compute_dtype", "double_quant", "tolerance"), KINDS)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_layer_equals_dequantized_weight(
    in_features, out_features, compute_dtype, double_quant, tolerance
):
    """Forward, gradient and forward without gradient take three kernels, by the row's length."""
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


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("family", ["tiny-llama", "tiny-gemma2"])
def test_bytes_are_predicted_exactly(family, double_quant):
    # With the first model, the library makes a table of its own that stays.
    quantize_nf4(model_of_shape(family, layers=1, device="cpu"))
    before = alive()
    model = model_of_shape(family, layers=3, device="cpu")
    linears = [
        weight
        for name, weight in decoder_blocks(model).named_parameters()
        if name.endswith("_proj.weight")
    ]
    rest = weight_bytes(model) - sum(4 * weight.numel() for weight in linears)
    predicted = nf4_bytes(model, double_quant=double_quant)
    head = model.get_output_embeddings().weight
    del linears
    quantize_nf4(model, double_quant=double_quant)
    assert weight_bytes(model) == rest + predicted
    assert len(quantized_layers(model)) == 3 * 7
    assert model.get_output_embeddings().weight is head
    del head
    # The full weights are gone.
    assert alive() - before == pytest.approx(rest + predicted, rel=0.01)


def test_weights_are_freed_one_by_one():
    model = model_of_shape("tiny-llama", layers=8, device="cpu")
    before = weight_bytes(model)
    with PeakMemory() as memory:
        others = memory.current - before
        quantize_nf4(model)
    # One layer more than the full model, never a second copy.
    assert memory.peak - others < 1.1 * before


# --- trap 1: a forward that repacks the weights ---------------------------------------------------


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("family", ["tiny-llama", "tiny-gemma2"])
def test_no_gradient_is_lost_after_an_evaluation(family, compute_dtype, batch):
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
    options = {"bias": False, "compute_dtype": torch.float32, "quant_type": "nf4"}
    raw = bnb.nn.Linear4bit(64, 32, **options).to("cpu")
    assert raw.support_avx512bf16_for_cpu
    assert gradient_after_evaluation(raw) is None
    guarded = nf4_layer(torch.nn.Linear(64, 32), compute_dtype=torch.float32)
    expected = dequantized(guarded).sum(0).expand(3, 64)
    torch.testing.assert_close(gradient_after_evaluation(guarded), expected)


def test_training_a_repacked_model_is_refused(avx512_bf16, batch):
    base = model_of_shape("tiny-llama", device="cpu")
    model = apply_qlora(base, rank=4, compute_dtype=torch.float32)
    for layer in quantized_layers(model).values():
        layer.support_avx512bf16_for_cpu = True  # as if the guard had not been there
    evaluate(model, batch)
    with pytest.raises(RuntimeError, match="passes no gradient on"):
        run(model, batch)


@pytest.mark.parametrize("family", ["tiny-llama", "tiny-gemma2"])
def test_check_fails_where_a_layer_cuts_the_gradient(family, batch):
    """The residual stream goes around the layer, so some gradient arrives: zeros count as none."""
    model = apply_qlora(model_of_shape(family, device="cpu"), rank=4)
    check_gradient_flow(model, batch)
    attention = decoder_blocks(model)[0].self_attn
    attention.o_proj.base_layer.register_forward_pre_hook(
        lambda layer, inputs: (inputs[0].detach(),)
    )
    with pytest.raises(RuntimeError, match=r"q_proj.*k_proj.*v_proj"):
        check_gradient_flow(model, batch)


# --- adapters on top ------------------------------------------------------------------------------

PRECISIONS = [
    (torch.float32, torch.float32, 1e-5),
    (torch.float32, torch.bfloat16, 2e-2),
    (torch.bfloat16, None, 4e-2),
]


@pytest.mark.parametrize(("dtype", "compute_dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("family", ["tiny-llama", "tiny-qwen2", "tiny-gemma2"])
def test_merged_model_computes_the_same(family, dtype, compute_dtype, tolerance, batch):
    """Also where Q, K and V have biases (Qwen2.5), which stay as they are."""
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
    model = train_a_little(apply_qlora(llama, rank=4, alpha=8, compute_dtype=torch.float32))
    expected = run(model, batch)
    by_peft = copy.deepcopy(model).merge_and_unload()(**batch).logits
    ours = run(merge_qlora(model), batch)
    assert (by_peft - expected).abs().max() > 1000 * (ours - expected).abs().max()


def test_saved_adapters_give_the_same_logits_on_a_fresh_base(llama, batch, tmp_path):
    from peft import PeftModel

    fresh = copy.deepcopy(llama)
    model = train_a_little(apply_qlora(llama, rank=4, alpha=8))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(quantize_nf4(fresh), tmp_path)
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


def test_learns_like_lora():
    ids = torch.randint(0, 128, (4, 23))
    batch = {"input_ids": ids, "labels": ids}
    base = model_of_shape("tiny-llama", device="cpu")
    drops = []
    for apply in (apply_lora, apply_qlora):
        model = apply(copy.deepcopy(base), rank=8)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        losses = []
        for _ in range(25):
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        drops.append(losses[0] - losses[-1])
    assert drops[0] > 0.5 and drops[1] == pytest.approx(drops[0], rel=0.2)


# --- memory ---------------------------------------------------------------------------------------


def peak_of_a_step(model, shape):
    """Peak bytes of a step that is not the first, which creates the states."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    ids = torch.randint(0, model.config.vocab_size, (shape.batch, shape.seq))
    for _ in range(2):
        with PeakMemory() as memory:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak


def check_peak(model, shape, *, tolerance=0.05, **options):
    """Quantize and adapt `model`; weights and peak are those that were estimated for the base."""
    plan = estimate_qlora(budget_of(model, shape), model, shape, **options)
    others = alive() - weight_bytes(model)
    model = apply_qlora(model, **options)
    assert plan.weights == weight_bytes(model)
    assert plan.base_frozen
    assert plan.peak == pytest.approx(peak_of_a_step(model, shape) - others, rel=tolerance)


@pytest.mark.parametrize("family", NN_LINEAR)
def test_peak_is_as_estimated(family):
    """Many tokens: the activations are the peak."""
    check_peak(model_of_shape(family, layers=5, device="cpu"), Shape(4, 64), rank=8)


@pytest.mark.parametrize("family", ["tiny-llama", "tiny-gemma2"])
def test_peak_with_some_targets_on_a_16_bit_base_is_as_estimated(family):
    """4-bit layers without an adapter do not keep their input either; the others cast it."""
    model = model_of_shape(family, layers=5, dtype=torch.bfloat16, device="cpu")
    check_peak(model, Shape(1, 37), rank=8, target_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_of_few_tokens_is_as_estimated(dtype):
    """One dequantized layer is more than the logits."""
    model = model_of_shape("tiny-llama", layers=5, dtype=dtype, device="cpu")
    check_peak(model, Shape(1, 8), rank=8)


def test_peak_in_the_proportions_of_a_real_model_is_as_estimated():
    """A large vocabulary beside narrow blocks: no term is lost in the rest."""
    model = model_of_shape("smollm2-135m", layers=4, device="cpu")
    check_peak(model, Shape(1, 64), tolerance=0.01, rank=16)


def test_one_dequantized_layer_is_the_least_beside_the_activations(llama):
    shape = Shape(1, 8)
    budget = budget_of(llama, shape).change(loss=1)
    assert estimate_qlora(budget, llama, shape, rank=2).loss == 4 * 64 * 160


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
    """Trap 2, for a model that is to be quantized and for one that comes in 4 bits."""
    for hidden_size in (48, 80):
        model = llama_of_width(hidden_size)
        with pytest.raises(ValueError, match="a multiple of 16 but not of the block size"):
            quantize_nf4(model)
        assert not quantized_layers(model)
    with pytest.raises(ValueError, match="160 inputs"):
        apply_qlora(load_in_4bit(tmp_path, intermediate_size=160))


def test_models_that_cannot_be_quantized(llama):
    with pytest.raises(ValueError, match=r"only nn\.Linear is quantized"):
        quantize_nf4(model_of_shape("tiny-gpt2", device="cpu"))
    special = model_of_shape("tiny-llama", device="cpu")
    special.model.layers[0].self_attn.q_proj.__class__ = type("Special", (torch.nn.Linear,), {})
    with pytest.raises(ValueError, match="is a Special and only"):
        quantize_nf4(special)
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "state_size": 8}
    mamba = transformers.AutoModelForCausalLM.from_config(transformers.MambaConfig(**sizes))
    with pytest.raises(ValueError, match="without calling these layers"):
        apply_qlora(mamba)
    assert not quantized_layers(mamba), "found in the forward, the weights would be gone"
    with pytest.raises(ValueError, match="already has adapters"):
        quantize_nf4(apply_lora(llama))
    model = quantize_nf4(model_of_shape("tiny-llama", device="cpu"))
    with pytest.raises(ValueError, match="quantized already"):
        quantize_nf4(model)
    for wrong in (model, llama):
        with pytest.raises(ValueError, match="nothing to merge"):
            merge_qlora(wrong)
    with pytest.raises(ValueError, match="no trainable adapter"):
        check_gradient_flow(model, make_batch())


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0}, {"target_modules": ["nothing"]}])
def test_bad_arguments_leave_the_weights_alone(llama, wrong):
    """Found after the quantization, they would leave a model that is spoilt."""
    with pytest.raises(ValueError):
        apply_qlora(llama, **wrong)
    assert not quantized_layers(llama)


def test_missing_bitsandbytes_names_the_command(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match="pip install bitsandbytes"):
        quantize_nf4(llama)


@pytest.mark.gpu
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizes_trains_and_merges_on_gpu(dtype, streamed):
    batch = {name: tensor.cuda() for name, tensor in make_batch().items()}
    model = model_of_shape("tiny-llama", layers=4, dtype=dtype, device="cpu")
    rest = weight_bytes(model) - dtype.itemsize * 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    predicted = rest + nf4_bytes(model)
    model = quantize_nf4(model, device="cuda" if streamed else None).to("cuda")
    assert weight_bytes(model) == pytest.approx(predicted, rel=0.01)
    model = train_a_little(apply_qlora(model, rank=4))
    evaluate(model, batch)
    check_gradient_flow(model, batch)
    expected = run(model, batch)
    torch.testing.assert_close(run(merge_qlora(model), batch), expected, atol=5e-2, rtol=5e-2)
