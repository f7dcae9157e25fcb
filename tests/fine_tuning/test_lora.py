import copy
import sys
import warnings

import pytest
import torch
import transformers

from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import load_model, model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.core.sizes import weight_bytes
from recipes_lib.fine_tuning.lora import (
    apply_lora,
    estimate_lora,
    lora_parameters,
    merge_lora,
    target_linears,
)
from tests.conftest import FAMILIES, assert_same_gradients, gradients, make_batch

WITH_BIASES = [*FAMILIES, "tiny-qwen2"]  # Qwen2.5: of Q, K and V
LINEARS_PER_BLOCK = {"tiny-gpt2": 4}  # 7 in the other families


def run(model, batch):
    out = model(**batch, use_cache=False)
    out.loss.backward()
    return out.logits.detach()


def adapters_by_name(model):
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def adapters(model):
    return list(adapters_by_name(model).values())


def trainable(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def train_a_little(model):
    """Give B values of its own, as training does."""
    for layer in adapters(model):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.05)
    return model


def plain_reference(model):
    """The same function without adapters: a copy with W + (alpha / r) B A written into its weights."""
    plain = copy.deepcopy(model).unload().requires_grad_(True)
    for name, layer in adapters_by_name(model).items():
        weight = plain.get_submodule(name.removeprefix("base_model.model.")).weight
        change = (
            layer.lora_B["default"].weight
            @ layer.lora_A["default"].weight
            * layer.scaling["default"]
        )
        weight.data += (change.T if layer.fan_in_fan_out else change).data
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", WITH_BIASES)
def test_equals_the_base_exactly_before_training(shape, dtype, batch):
    model = model_of_shape(shape, dtype=dtype, device="cpu")
    expected = run(copy.deepcopy(model), batch)
    assert torch.equal(run(apply_lora(model, rank=4, alpha=8), batch), expected)


@pytest.mark.parametrize("alpha", [3, 8])
@pytest.mark.parametrize("target_modules", ["all-linear", "c_attn q_proj v_proj"])
def test_forward_and_gradients_equal_the_plain_formula(tiny, batch, alpha, target_modules):
    if target_modules != "all-linear":
        here = {name.rsplit(".", 1)[-1] for name in target_linears(tiny)}
        target_modules = [name for name in target_modules.split() if name in here]
    model = train_a_little(apply_lora(tiny, rank=3, alpha=alpha, target_modules=target_modules))
    plain = plain_reference(model)
    torch.testing.assert_close(run(model, batch), run(plain, batch), atol=1e-5, rtol=1e-4)
    got = gradients(model)
    assert got and all("lora_" in name for name in got)
    for name, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            dw = plain.get_submodule(name.removeprefix("base_model.model.")).weight.grad
            dw = (dw.T if layer.fan_in_fan_out else dw) * alpha / 3
            torch.testing.assert_close(a.grad, b.T @ dw, atol=1e-6, rtol=1e-3)
            torch.testing.assert_close(b.grad, dw @ a.T, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("rank", [1, 5])
def test_parameters_are_predicted_exactly(shape, rank):
    model = model_of_shape(shape, layers=3, device="cpu")
    expected, before = lora_parameters(model, rank=rank), weight_bytes(model)
    head = model.get_output_embeddings()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft would warn of GPT-2's transposed weights
        model = apply_lora(model, rank=rank, alpha=1)
    assert trainable(model) == expected
    assert weight_bytes(model) == before + 4 * expected
    assert len(adapters(model)) == 3 * LINEARS_PER_BLOCK.get(shape, 7)
    assert model.get_output_embeddings() is head


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [shape for shape in WITH_BIASES if shape != "tiny-gpt2"])
def test_all_linear_layers_of_the_blocks_and_nothing_else(shape, tied):
    config = model_of_shape(shape, device="cpu").config
    config.tie_word_embeddings = tied
    model = transformers.AutoModelForCausalLM.from_config(config)
    linears = {
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    assert (ends[0] is ends[1]) is tied
    model = apply_lora(model, rank=2)
    adapted = {name.removeprefix("base_model.model.") for name in adapters_by_name(model)}
    assert adapted == linears - {"lm_head"} and len(adapted) == 14
    assert not any(weight.requires_grad for weight in ends)
    assert model.get_output_embeddings().weight is ends[1]


def test_targets_by_name_and_no_router(llama):
    for block in decoder_blocks(llama):
        block.mlp.gate = torch.nn.Linear(64, 4)
    assert len(target_linears(llama)) == 14
    assert list(target_linears(llama, target_modules=["1.self_attn.q_proj"])) == [
        "model.layers.1.self_attn.q_proj"
    ]
    assert lora_parameters(llama, rank=2, target_modules=["q_proj", "k_proj"]) == 2 * 2 * (
        64 + 64 + 64 + 32
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("shape", WITH_BIASES)
def test_merged_model_computes_the_same(shape, dtype, tolerance, batch):
    model = train_a_little(
        apply_lora(model_of_shape(shape, dtype=dtype, device="cpu"), rank=4, alpha=8)
    )
    expected = run(model, batch)
    merged = merge_lora(model)
    assert not adapters(merged) and all(p.requires_grad for p in merged.parameters())
    torch.testing.assert_close(run(merged, batch), expected, atol=tolerance, rtol=tolerance)
    apply_lora(merged, rank=1)  # a plain model: it can be adapted again


def test_saved_adapters_give_the_same_logits_on_a_fresh_base(tiny, batch, tmp_path):
    from peft import PeftModel

    fresh = copy.deepcopy(tiny)
    model = train_a_little(apply_lora(tiny, rank=4, alpha=8))
    model.save_pretrained(tmp_path)
    assert (
        sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
        < weight_bytes(fresh) / 4
    )
    loaded = PeftModel.from_pretrained(fresh, tmp_path)
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


def test_first_block_learns_when_blocks_are_checkpointed(tiny, batch):
    model = train_a_little(apply_lora(tiny, rank=4, alpha=8))
    run(model, batch)
    expected = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    run(model, batch)
    assert all(p.grad.any() for p in decoder_blocks(model)[0].parameters() if p.requires_grad)
    assert_same_gradients(gradients(model), expected, atol=1e-6, rtol=1e-4)


def alive():
    with PeakMemory() as memory:
        return memory.current


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
@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize(
    ("rank", "batch_size", "seq_len", "target_modules"),
    [(8, 4, 64, "all-linear"), (16, 1, 37, "all-linear"), (4, 4, 64, ["q_proj", "v_proj"])],
)
def test_peak_is_as_estimated(shape, rank, batch_size, seq_len, target_modules, dtype):
    if shape == "tiny-gpt2" and target_modules != "all-linear":
        target_modules = ["c_attn"]
    before, sizes = alive(), {"batch_size": batch_size, "seq_len": seq_len}
    model = model_of_shape(shape, layers=8, dtype=dtype, device="cpu")
    full = budget_of(model, **sizes)
    plan = estimate_lora(full, model, rank=rank, target_modules=target_modules, **sizes)
    assert all(p.requires_grad for p in model.parameters())  # an estimate changes nothing
    model = apply_lora(model, rank=rank, target_modules=target_modules)
    measured = peak_of_a_step(model, **sizes) - before
    assert plan.peak == pytest.approx(measured, rel=0.05)
    assert (
        measured < full.peak or dtype is torch.bfloat16
    )  # fp32 adapters outweigh so small a 16-bit model


@pytest.mark.parametrize("batch_size", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_peak_of_a_real_model_is_as_estimated(batch_size):
    before, model, sizes = (
        alive(),
        load_model(device="cpu"),
        {"batch_size": batch_size, "seq_len": 96},
    )
    full = budget_of(model, **sizes)
    plan = estimate_lora(full, model, rank=16, **sizes)
    measured = peak_of_a_step(apply_lora(model, rank=16), **sizes) - before
    assert plan.peak == pytest.approx(measured, rel=0.01)
    assert measured < 0.7 * full.peak


def test_accumulated_gradients_are_the_adapters_only(llama):
    budget = budget_of(llama, batch_size=4, seq_len=8).change(carried=10**9, loss=1)
    plan = estimate_lora(budget, llama, rank=2, batch_size=4, seq_len=8)
    assert plan.carried == plan.gradients == 4 * lora_parameters(llama, rank=2)
    assert plan.loss == 1  # a smaller loss than the plain one stays
    assert plan.embedding_gradient == 0 < budget.embedding_gradient


@pytest.mark.parametrize(
    "wrong", [{"rank": 0}, {"rank": -1}, {"alpha": 0}, {"alpha": -2}, {"dropout": 1.0}]
)
def test_numbers_out_of_range(llama, wrong):
    with pytest.raises(ValueError, match="give rank >= 1, alpha > 0"):
        apply_lora(llama, **wrong)


@pytest.mark.parametrize("names", [["query"], ["q_proj", "lm_head"], [], "embed_tokens"])
def test_names_that_match_no_layer_of_the_blocks(llama, names):
    with pytest.raises(ValueError, match=r"some of .*'q_proj'"):
        apply_lora(llama, target_modules=names)


def test_adapters_twice_and_merging_none(llama):
    with pytest.raises(ValueError, match="no adapters to merge"):
        merge_lora(llama)
    model = apply_lora(llama)
    for adapted in (model, llama):  # peft has changed the base in place
        with pytest.raises(ValueError, match="already has adapters"):
            apply_lora(adapted)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_fused_experts_are_not_skipped_silently(batch, family):
    """The attention is adapted when it is named; the router is not even then."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    sizes |= {"head_dim": 16, "num_experts_per_tok": 2}
    sizes |= (
        {"moe_intermediate_size": 16, "num_experts": 4}
        if family == "Qwen3Moe"
        else {"num_local_experts": 4}
    )
    config = getattr(transformers, f"{family}Config")(
        vocab_size=128, num_key_value_heads=2, **sizes
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ValueError, match=r"does not reach .*mlp\.experts\.gate_up_proj.*name the target_modules"
    ):
        apply_lora(model)
    for router in ("gate", "mlp.gate"):
        with pytest.raises(ValueError, match="each name must match a linear layer"):
            apply_lora(model, target_modules=["q_proj", router])
    expected = run(copy.deepcopy(model), batch)
    model = apply_lora(model, rank=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    torch.testing.assert_close(run(model, batch), expected)
    assert len(gradients(model)) == 16 and all(".self_attn." in name for name in gradients(model))


def test_dora_trains_a_length_for_each_row_and_starts_at_the_base(tiny, batch):
    rows = sum(
        getattr(layer, "out_features", None) or layer.nf for layer in target_linears(tiny).values()
    )
    correction, expected = lora_parameters(tiny, rank=3), run(copy.deepcopy(tiny), batch)
    model = apply_lora(tiny, rank=3, use_dora=True)
    assert trainable(model) == correction + rows
    torch.testing.assert_close(run(model, batch), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen2"])
def test_dora_is_its_formula(shape, batch):
    """The direction of W + (alpha / r) B A, row by row, times a length that is trained."""
    plain = model_of_shape(shape, device="cpu")
    for name, parameter in plain.named_parameters():
        if name.endswith("bias"):  # added as it is
            torch.nn.init.normal_(parameter)
    model = train_a_little(apply_lora(copy.deepcopy(plain), rank=4, alpha=3, use_dora=True))
    for name, layer in adapters_by_name(model).items():
        length = layer.lora_magnitude_vector["default"].weight
        length.data *= torch.rand_like(length) + 0.5
        weight = plain.get_submodule(name.removeprefix("base_model.model.")).weight
        moved = weight + 3 / 4 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        weight.data = (length[:, None] * moved / moved.norm(dim=1, keepdim=True)).data
    expected = run(plain, batch)
    torch.testing.assert_close(run(model, batch), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(run(merge_lora(model), batch), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rank", [2, 9])
def test_rslora_divides_by_the_root_of_the_rank(llama, batch, rank):
    plain = copy.deepcopy(llama)
    model = train_a_little(apply_lora(llama, rank=rank, alpha=3, use_rslora=True))
    assert trainable(model) == lora_parameters(plain, rank=rank)
    for name, layer in adapters_by_name(model).items():
        weight = plain.get_submodule(name.removeprefix("base_model.model.")).weight
        weight.data += (
            3 / rank**0.5 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        ).data
    expected = run(plain, batch)
    torch.testing.assert_close(run(model, batch), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(run(merge_lora(model), batch), expected, atol=1e-5, rtol=1e-4)


def test_missing_peft_names_the_command(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="pip install peft"):
        apply_lora(llama)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trains_and_merges_on_gpu(dtype):
    batch = {name: tensor.cuda() for name, tensor in make_batch().items()}
    model = apply_lora(model_of_shape("tiny-llama", dtype=dtype, device="cuda"), rank=4, alpha=8)
    first = model(**batch, use_cache=False).loss.item()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True
    )
    for _ in range(10):
        run(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    expected = run(model, batch)
    assert model(**batch, use_cache=False).loss.item() < first
    torch.testing.assert_close(run(merge_lora(model), batch), expected, atol=5e-2, rtol=5e-2)
