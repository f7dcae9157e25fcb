import copy
import sys

import pytest
import torch
import transformers

from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.machine import machine
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import load_model, model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.core.sizes import weight_bytes
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import (
    apply_qlora,
    check_gradient_flow,
    estimate_qlora,
    merge_qlora,
    nf4_bytes,
    quantize_nf4,
    quantized_layers,
)
from tests.conftest import FAMILIES, gradients, make_batch

bnb = pytest.importorskip("bitsandbytes")
NN_LINEAR = [family for family in FAMILIES if family != "tiny-gpt2"]


class Block(torch.nn.Module):
    """A model of one block with one linear layer, enough to quantize."""

    def __init__(self, in_features, out_features, bias=False):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(in_features, out_features, bias=bias)])

    def forward(self, x):
        return self.layers[0](x)


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
    """Bytes of all live tensors: torch.compile, which bitsandbytes uses for odd rows, keeps some of its own."""
    with PeakMemory() as memory:
        return memory.current


def evaluate(model, batch):
    """What generation or a validation loss does between training steps."""
    with torch.no_grad():
        model.eval()(**batch)
    model.train()


# in, out: ordinary; not a multiple of the block; odd; a multiple of 32 and not of 64, which is trap 2
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


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize(
    ("compute_dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_layer_equals_dequantized_weight(
    in_features, out_features, compute_dtype, tolerance, double_quant
):
    model = Block(in_features, out_features, bias=True)
    full, bias = model.layers[0].weight.detach().clone(), model.layers[0].bias.detach().clone()
    layer = quantize_nf4(model, compute_dtype=compute_dtype, double_quant=double_quant).layers[0]
    weight = dequantized(layer)
    assert (weight - full).norm() < 0.15 * full.norm()
    x = torch.randn(2, 5, in_features, requires_grad=True)
    upstream = torch.randn(2, 5, out_features)
    out = model(x)
    out.backward(upstream)
    for got, expected in ((out, x @ weight.T + bias), (x.grad, upstream @ weight)):
        torch.testing.assert_close(
            got, expected, atol=tolerance * expected.abs().max().item(), rtol=0
        )
    with torch.no_grad():
        torch.testing.assert_close(model(x), out, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("shape", NN_LINEAR)
def test_bytes_are_predicted_exactly(shape, double_quant):
    before = alive()
    model = model_of_shape(shape, layers=3, device="cpu")
    linear = sum(
        weight.numel() * 4
        for name, weight in decoder_blocks(model).named_parameters()
        if "_proj" in name
    )
    rest, predicted = weight_bytes(model) - linear, nf4_bytes(model, double_quant=double_quant)
    head = model.get_output_embeddings().weight
    quantize_nf4(model, double_quant=double_quant)
    assert weight_bytes(model) == rest + predicted
    assert len(quantized_layers(model)) == 3 * 7 and model.get_output_embeddings().weight is head
    del head
    assert alive() - before == pytest.approx(
        rest + predicted, rel=0.01
    )  # the full weights are gone


def test_weights_are_freed_one_by_one():
    model = model_of_shape("tiny-llama", layers=8, device="cpu")
    before = weight_bytes(model)
    with PeakMemory() as memory:
        others = memory.current - before
        quantize_nf4(model)
    assert (
        memory.peak - others < 1.1 * before
    )  # one layer more than the full model, never a second copy


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("shape", NN_LINEAR)
def test_no_gradient_is_lost_after_an_evaluation(shape, compute_dtype, batch):
    model = train_a_little(
        apply_qlora(model_of_shape(shape, device="cpu"), rank=4, compute_dtype=compute_dtype)
    )
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
    for layer in quantized_layers(model).values():
        assert layer.support_avx512bf16_for_cpu is False
        assert layer.compute_dtype == (
            compute_dtype or (torch.bfloat16 if machine().native_bf16 else torch.float32)
        )


@pytest.fixture
def avx512_bf16(monkeypatch):
    """A CPU with AVX512-BF16: bitsandbytes repacks, and multiplies by a kernel that has no backward."""
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)
    monkeypatch.setattr(
        bnb.functional,
        "gemv_4bit",
        lambda x, weight, out=None, state=None: x.new_ones(*x.shape[:-1], state.shape[0]),
    )


def test_trap_is_real_and_the_guard_holds(avx512_bf16):
    def gradient_after_evaluation(model):
        x = torch.randn(3, 64, requires_grad=True)
        with torch.no_grad():
            model.eval()(x.detach())
        out = model.train()(x)
        if out.requires_grad:
            out.sum().backward()
        return x.grad

    raw = Block(64, 32)
    raw.layers[0] = bnb.nn.Linear4bit(
        64, 32, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    ).to("cpu")
    assert raw.layers[0].support_avx512bf16_for_cpu
    assert gradient_after_evaluation(raw) is None
    guarded = quantize_nf4(Block(64, 32), compute_dtype=torch.float32)
    expected = dequantized(guarded.layers[0]).sum(0).expand(3, 64)
    torch.testing.assert_close(gradient_after_evaluation(guarded), expected)


def test_training_a_repacked_model_is_refused(avx512_bf16, batch):
    model = apply_qlora(
        model_of_shape("tiny-llama", device="cpu"), rank=4, compute_dtype=torch.float32
    )
    for layer in quantized_layers(model).values():
        layer.support_avx512bf16_for_cpu = True  # as if the guard had not been there
    evaluate(model, batch)
    with pytest.raises(RuntimeError, match="passes no gradient on"):
        run(model, batch)


@pytest.mark.parametrize("shape", NN_LINEAR)
def test_check_fails_where_a_layer_cuts_the_gradient(shape, batch):
    model = apply_qlora(model_of_shape(shape, device="cpu"), rank=4)
    check_gradient_flow(model, batch)
    attention = decoder_blocks(model)[0].self_attn
    attention.o_proj.base_layer.register_forward_pre_hook(
        lambda layer, inputs: (inputs[0].detach(),)
    )
    with pytest.raises(RuntimeError, match=r"q_proj.*k_proj.*v_proj"):
        check_gradient_flow(model, batch)


@pytest.mark.parametrize(
    ("dtype", "compute_dtype", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.float32, torch.bfloat16, 2e-2),
        (torch.bfloat16, None, 4e-2),
    ],
)
@pytest.mark.parametrize("shape", NN_LINEAR)
def test_merged_model_computes_the_same(shape, dtype, compute_dtype, tolerance, batch):
    model = model_of_shape(shape, dtype=dtype, device="cpu")
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
    assert (by_peft - expected).abs().max() > 1000 * (
        run(merge_qlora(model), batch) - expected
    ).abs().max()


def test_saved_adapters_give_the_same_logits_on_a_fresh_base(llama, batch, tmp_path):
    from peft import PeftModel

    fresh = copy.deepcopy(llama)
    model = train_a_little(apply_qlora(llama, rank=4, alpha=8))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(quantize_nf4(fresh), tmp_path)
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


def test_learns_like_lora():
    ids = torch.randint(0, 128, (4, 23))
    batch, base, drops = (
        {"input_ids": ids, "labels": ids},
        model_of_shape("tiny-llama", device="cpu"),
        [],
    )
    for apply in (apply_lora, apply_qlora):
        model = apply(copy.deepcopy(base), rank=8)
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True
        )
        losses = []
        for _ in range(25):
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        drops.append(losses[0] - losses[-1])
    assert drops[0] > 0.5 and drops[1] == pytest.approx(drops[0], rel=0.2)


def peak_of_a_step(model, batch_size, seq_len):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    ids = torch.randint(0, 128, (batch_size, seq_len))
    for _ in range(2):  # the first step creates the states
        with PeakMemory() as memory:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", NN_LINEAR)
@pytest.mark.parametrize(
    ("batch_size", "seq_len", "target_modules"),
    [(4, 64, "all-linear"), (1, 37, ["q_proj", "v_proj"]), (1, 8, "all-linear")],
)
def test_peak_is_as_estimated(shape, batch_size, seq_len, target_modules, dtype):
    before, sizes = alive(), {"batch_size": batch_size, "seq_len": seq_len}
    model = model_of_shape(shape, layers=8, dtype=dtype, device="cpu")
    plan = estimate_qlora(
        budget_of(model, **sizes), model, rank=8, target_modules=target_modules, **sizes
    )
    model = apply_qlora(model, rank=8, target_modules=target_modules)
    assert plan.weights == weight_bytes(model)
    assert plan.peak == pytest.approx(peak_of_a_step(model, **sizes) - before, rel=0.05)


@pytest.mark.parametrize("batch_size", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_peak_of_a_real_model_is_as_estimated(batch_size):
    before, model, sizes = (
        alive(),
        load_model(device="cpu"),
        {"batch_size": batch_size, "seq_len": 96},
    )
    full = budget_of(model, **sizes)
    plan = estimate_qlora(full, model, rank=16, **sizes)
    model = apply_qlora(model, rank=16)
    assert (
        plan.weights == weight_bytes(model) < 0.36 * full.weights
    )  # the rest is the fp32 embedding
    assert plan.peak == pytest.approx(peak_of_a_step(model, **sizes) - before, rel=0.01)


def test_one_dequantized_layer_is_the_least_beside_the_activations(llama):
    budget = budget_of(llama, batch_size=1, seq_len=8).change(loss=1)
    assert estimate_qlora(budget, llama, rank=2, batch_size=1, seq_len=8).loss == 4 * 64 * 160


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
    for in_features in (48, 16, 80):
        with pytest.raises(ValueError, match="a multiple of 16 but not of the block size"):
            quantize_nf4(Block(in_features, 8))
    with pytest.raises(ValueError, match="160 inputs"):
        apply_qlora(load_in_4bit(tmp_path, intermediate_size=160))


def test_models_that_cannot_be_quantized(llama):
    with pytest.raises(ValueError, match=r"only nn\.Linear is quantized"):
        quantize_nf4(model_of_shape("tiny-gpt2", device="cpu"))
    special = model_of_shape("tiny-llama", device="cpu")
    special.model.layers[0].self_attn.q_proj.__class__ = type("Special", (torch.nn.Linear,), {})
    with pytest.raises(ValueError, match="is a Special and only"):
        quantize_nf4(special)
    with pytest.raises(ValueError, match="there is none in its blocks"):
        quantize_nf4(torch.nn.Sequential(torch.nn.ModuleList([torch.nn.LayerNorm(8)])))
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
