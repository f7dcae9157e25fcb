import copy
import sys
import warnings

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaMLP

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.sizes import weight_bytes
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of, features
from recipes_lib.fine_tuning.lora import (
    apply_lora,
    estimate_lora,
    lora_parameters,
    merge_lora,
    plain_lora,
    plain_merge,
    target_linears,
)
from recipes_lib.training.gradient_accumulation import (
    accumulate_gradients,
    estimate_gradient_accumulation,
)
from tests.conftest import FAMILIES, assert_same_gradients, gradients, make_batch

WITH_BIASES = [*FAMILIES, "tiny-qwen2"]  # Qwen2.5: of Q, K and V
LINEARS_PER_BLOCK = {"tiny-gpt2": 4}  # 7 in the other families


def run(model, batch):
    out = model(**batch, use_cache=False)
    out.loss.backward()
    return out.logits.detach()


def adapters_by_name(model):
    """Adapted layers, by the names that they have in the base."""
    return {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def adapters(model):
    return list(adapters_by_name(model).values())


def trainable(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def a_and_b(layer):
    """A [r, in] and B [out, r] of an adapted layer."""
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def train_a_little(model):
    """Give B values of its own, as training does."""
    for layer in adapters(model):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.05)
    return model


def plain_reference(model, *, alpha):
    """The same function without adapters: a copy with W + (alpha / r) B A for its weights."""
    plain = copy.deepcopy(model).unload().requires_grad_(True)
    for name, layer in adapters_by_name(model).items():
        weight = plain.get_submodule(name).weight
        a, b = a_and_b(layer)
        if layer.fan_in_fan_out:
            weight.data = plain_merge(weight.T, a, b, alpha=alpha).T.detach().contiguous()
        else:
            weight.data = plain_merge(weight, a, b, alpha=alpha).detach()
    return plain


# --- the idea -------------------------------------------------------------------------------------


def test_one_layer_by_hand_is_pefts(llama):
    """Output and gradients; the frozen weight gets none."""
    model = train_a_little(apply_lora(llama, rank=3, alpha=8))
    for layer in adapters(model)[:7]:
        a, b = a_and_b(layer)
        x = torch.randn(2, 5, layer.in_features)
        expected = layer(x)
        got = plain_lora(x, layer.base_layer.weight, a, b, alpha=8)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
        upstream = torch.randn_like(got)
        expected = torch.autograd.grad(expected, [a, b], upstream)
        for gradient, reference in zip(torch.autograd.grad(got, [a, b], upstream), expected):
            torch.testing.assert_close(gradient, reference, atol=1e-5, rtol=1e-5)
        assert not got.requires_grad or layer.base_layer.weight.grad is None


# --- the adapted model ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", WITH_BIASES)
def test_equals_the_base_exactly_before_training(shape, dtype, batch):
    model = model_of_shape(shape, dtype=dtype, device="cpu")
    expected = run(copy.deepcopy(model), batch)
    assert torch.equal(run(apply_lora(model, rank=4, alpha=8), batch), expected)


@pytest.mark.parametrize("some", [False, True])
def test_forward_and_gradients_equal_the_plain_formula(tiny, batch, some):
    """alpha / r is not 1, so a scale that is forgotten shows; GPT-2's weights are transposed."""
    target_modules = "all-linear"
    if some:
        here = {name.rsplit(".", 1)[-1] for name in target_linears(tiny)}
        target_modules = sorted(here & {"c_attn", "q_proj", "v_proj"})
    model = train_a_little(apply_lora(tiny, rank=3, alpha=8, target_modules=target_modules))
    plain = plain_reference(model, alpha=8)
    torch.testing.assert_close(run(model, batch), run(plain, batch), atol=1e-5, rtol=1e-4)
    got = gradients(model)
    assert got and all("lora_" in name for name in got)
    for name, layer in adapters_by_name(model).items():
        a, b = a_and_b(layer)
        # By the chain rule, from the gradient of the merged weight.
        merged = plain.get_submodule(name).weight.grad * 8 / 3
        if layer.fan_in_fan_out:
            merged = merged.T
        torch.testing.assert_close(a.grad, b.T @ merged, atol=1e-6, rtol=1e-3)
        torch.testing.assert_close(b.grad, merged @ a.T, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("rank", [1, 5])
def test_parameters_are_predicted_exactly(shape, rank):
    model = model_of_shape(shape, layers=3, device="cpu")
    expected = lora_parameters(model, rank=rank)
    before = weight_bytes(model)
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
    modules = model.named_modules()
    linears = {name for name, module in modules if isinstance(module, torch.nn.Linear)}
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    assert (ends[0] is ends[1]) is tied
    model = apply_lora(model, rank=2)
    adapted = set(adapters_by_name(model))
    assert adapted == linears - {"lm_head"} and len(adapted) == 14
    assert not any(weight.requires_grad for weight in ends)
    assert model.get_output_embeddings().weight is ends[1]


def test_targets_by_name_and_no_router(llama):
    for block in decoder_blocks(llama):
        block.mlp.gate = torch.nn.Linear(64, 4)
    assert len(target_linears(llama)) == 14
    one = target_linears(llama, target_modules=["1.self_attn.q_proj"])
    assert list(one) == ["model.layers.1.self_attn.q_proj"]
    # Two blocks, rank 2: in + out of q_proj and of k_proj.
    parameters = lora_parameters(llama, rank=2, target_modules=["q_proj", "k_proj"])
    assert parameters == 2 * 2 * (64 + 64 + 64 + 32)


def test_the_end_of_a_name_is_a_whole_part_of_it(llama):
    """'proj' is the end of 'q_proj' as letters, and names no layer."""
    with pytest.raises(ValueError, match="each name must match"):
        target_linears(llama, target_modules="proj")


@pytest.mark.parametrize("targets", [None, 3])
def test_targets_are_names(llama, targets):
    with pytest.raises(ValueError, match=r"target_modules.*give a list"):
        apply_lora(llama, target_modules=targets)


def test_blocks_without_a_linear_layer():
    """An adapter on nothing would train nothing."""
    model = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.LayerNorm(8)]))
    with pytest.raises(ValueError, match="there is none in its blocks"):
        target_linears(model)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("shape", WITH_BIASES)
def test_merged_model_computes_the_same(shape, dtype, tolerance, batch):
    base = model_of_shape(shape, dtype=dtype, device="cpu")
    model = train_a_little(apply_lora(base, rank=4, alpha=8))
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
    written = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert written < weight_bytes(fresh) / 4
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


# --- memory ---------------------------------------------------------------------------------------


def alive():
    with PeakMemory() as memory:
        return memory.current


def peak_of_a_step(model, shape):
    """Peak bytes of a step that is not the first, which creates the states."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    ids = torch.randint(0, model.config.vocab_size, (shape.batch, shape.seq))
    for _ in range(2):
        with PeakMemory() as memory:
            accumulate_gradients(
                model, {"input_ids": ids, "labels": ids}, micro_batches=shape.micro_batches
            )
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak


def check_peak(model, shape, *, tolerance=0.05, **options):
    """Adapt `model`, and compare the peak of a step with what was estimated for the base.

    Returns that peak and the one that a plain step would have.
    """
    full = budget_of(model, shape)
    plan = estimate_gradient_accumulation(full, model, shape)
    plan = estimate_lora(plan, model, shape, **options)
    assert all(p.requires_grad for p in model.parameters())  # an estimate changes nothing
    others = alive() - weight_bytes(model)
    model = apply_lora(model, **options)
    measured = peak_of_a_step(model, shape) - others
    assert plan.peak == pytest.approx(measured, rel=tolerance)
    return measured, full.peak


@pytest.mark.parametrize("family", FAMILIES)
def test_peak_is_as_estimated(family):
    """Many tokens: every family saves something else for backward."""
    model = model_of_shape(family, layers=5, device="cpu")
    measured, full = check_peak(model, Shape(4, 64), rank=8)
    assert measured < full


@pytest.mark.parametrize("family", FAMILIES)
def test_peak_on_a_16_bit_base_is_as_estimated(family):
    """Each adapter casts its input to fp32 for itself; an odd row, so that the weights count."""
    model = model_of_shape(family, layers=5, dtype=torch.bfloat16, device="cpu")
    check_peak(model, Shape(1, 37), rank=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["tiny-llama", "tiny-gpt2"])
def test_peak_with_some_targets_is_as_estimated(family, dtype):
    """What a frozen layer without an adapter reads is not saved, unless an adapted one reads it."""
    target_modules = ["c_attn"] if family == "tiny-gpt2" else ["q_proj", "v_proj"]
    model = model_of_shape(family, layers=5, dtype=dtype, device="cpu")
    check_peak(model, Shape(4, 64), rank=4, target_modules=target_modules)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_with_dropout_is_as_estimated(dtype):
    """Each adapter keeps what was dropped, and the mask."""
    model = model_of_shape("tiny-llama", layers=5, dtype=dtype, device="cpu")
    check_peak(model, Shape(4, 64), rank=4, dropout=0.1)


@pytest.mark.parametrize("shape", [Shape(16, 64, micro_batches=4), Shape(4, 2, micro_batches=4)])
def test_peak_after_accumulation_is_as_estimated(shape):
    """Activations of a micro-batch, gradients of adapters that are carried.

    Of many tokens backward's beginning is the peak, of two its end.
    """
    check_peak(model_of_shape("tiny-llama", layers=5, device="cpu"), shape, rank=16)


def test_peak_in_the_proportions_of_a_real_model_is_as_estimated():
    """A large vocabulary beside narrow blocks: no term is lost in the rest."""
    model = model_of_shape("smollm2-135m", layers=6, device="cpu")
    measured, full = check_peak(model, Shape(2, 64), tolerance=0.01, rank=16)
    assert measured < 0.7 * full


def test_carried_gradients_are_the_adapters_only(llama):
    """Before the adapters all weights train, and their gradients would be carried."""
    shape = Shape(8, 8, micro_batches=2)
    plain = estimate_gradient_accumulation(budget_of(llama, shape), llama, shape)
    plan = estimate_lora(plain, llama, shape, rank=2)
    assert plan.carried == plan.gradients == 4 * lora_parameters(llama, rank=2) < plain.carried
    assert plan.last_gradients == 0  # all exist from the first micro-batch on
    assert plan.embedding_gradient == 0 < plain.embedding_gradient
    assert plan.base_frozen and not plain.base_frozen


def test_a_base_that_is_frozen_already_carries_gradients_of_adapters(llama):
    """The budget before the adapters has no gradient, and so none that is carried."""
    shape = Shape(8, 8, micro_batches=2)
    llama.requires_grad_(False)
    plan = estimate_gradient_accumulation(budget_of(llama, shape), llama, shape)
    plan = estimate_lora(plan, llama, shape, rank=2)
    assert plan.carried == plan.gradients > 0


def test_a_smaller_loss_stays(llama):
    """A recipe may have made it smaller than the plain one already."""
    shape = Shape(4, 8)
    budget = budget_of(llama, shape).change(loss=1)
    assert estimate_lora(budget, llama, shape, rank=2).loss == 1


# --- bad input ------------------------------------------------------------------------------------


WRONG = [{"rank": 0}, {"rank": 2.5}, {"alpha": 0}, {"alpha": -2}, {"dropout": 1.0}]


@pytest.mark.parametrize("wrong", WRONG)
def test_numbers_out_of_range(llama, wrong):
    [name] = wrong
    with pytest.raises(ValueError, match=f"{name}=.*: give a"):
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


# --- mixtures of experts --------------------------------------------------------------------------


def mixture_of_experts(family):
    sizes = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts_per_tok": 2,
    }
    if family == "Qwen3Moe":
        config = transformers.Qwen3MoeConfig(moe_intermediate_size=16, num_experts=4, **sizes)
    else:
        config = transformers.MixtralConfig(num_local_experts=4, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_fused_experts_are_not_skipped_silently(batch, family):
    """The attention is adapted when it is named; the router is not even then."""
    model = mixture_of_experts(family)
    fused = r"does not reach .*mlp\.experts\.gate_up_proj.*give target_modules='attention'"
    with pytest.raises(ValueError, match=fused):
        apply_lora(model)
    for router in ("gate", "mlp.gate"):
        with pytest.raises(ValueError, match="each name must match a linear layer"):
            apply_lora(model, target_modules=["q_proj", router])
    expected = run(copy.deepcopy(model), batch)
    model = apply_lora(model, rank=2, target_modules="attention")
    torch.testing.assert_close(run(model, batch), expected)
    assert len(gradients(model)) == 16
    assert all(".self_attn." in name for name in gradients(model))


@pytest.mark.parametrize(("shape", "layers"), [("tiny-gpt2", 4), ("tiny-gemma2", 8)])
def test_attention_is_found_under_all_its_names(shape, layers):
    targets = target_linears(model_of_shape(shape, device="cpu"), target_modules="attention")
    assert len(targets) == layers


def test_layers_that_a_state_space_model_does_not_call():
    """Its kernels read their weights: adapters on them would train nothing."""
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 8}
    model = transformers.AutoModelForCausalLM.from_config(transformers.MambaConfig(**sizes))
    names = {name for name, _ in model.named_modules()}
    for wrong in ("all-linear", ["in_proj", "dt_proj"]):
        with pytest.raises(
            ValueError, match=r"runs .*dt_proj.*others, target_modules=\['in_proj'\]"
        ):
            apply_lora(model, target_modules=wrong)
    with pytest.raises(ValueError, match="no linear layer in an attention"):
        apply_lora(model, target_modules="attention")
    assert {name for name, _ in model.named_modules()} == names
    ids = torch.arange(1, 9)[None]
    model = apply_lora(model, target_modules=["in_proj"])
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(gradient.any() for name, gradient in gradients(model).items() if "lora_B" in name)


# --- options of peft ------------------------------------------------------------------------------


def test_dora_trains_a_length_for_each_row_and_starts_at_the_base(tiny, batch):
    rows = sum(features(layer)[1] for layer in target_linears(tiny).values())
    correction = lora_parameters(tiny, rank=3)
    expected = run(copy.deepcopy(tiny), batch)
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
        weight = plain.get_submodule(name).weight
        a, b = a_and_b(layer)
        moved = plain_merge(weight, a, b, alpha=3)
        weight.data = (length[:, None] * moved / moved.norm(dim=1, keepdim=True)).detach()
    expected = run(plain, batch)
    torch.testing.assert_close(run(model, batch), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(run(merge_lora(model), batch), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rank", [2, 9])
def test_rslora_divides_by_the_root_of_the_rank(llama, batch, rank):
    plain = copy.deepcopy(llama)
    model = train_a_little(apply_lora(llama, rank=rank, alpha=3, use_rslora=True))
    assert trainable(model) == lora_parameters(plain, rank=rank)
    for name, layer in adapters_by_name(model).items():
        weight = plain.get_submodule(name).weight
        a, b = a_and_b(layer)
        weight.data = (weight + 3 / rank**0.5 * b @ a).detach()
    expected = run(plain, batch)
    torch.testing.assert_close(run(model, batch), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(run(merge_lora(model), batch), expected, atol=1e-5, rtol=1e-4)


def test_missing_peft_names_the_command(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="pip install peft"):
        apply_lora(llama)


class ClampsItsWeight(LlamaMLP):
    """As AltUp of Gemma 3n: the weight of a layer is used, and the layer is not called."""

    def forward(self, x):
        weight = self.down_proj.weight.clamp(-1, 1)
        return torch.nn.functional.linear(self.up_proj(x), weight)


def test_layers_whose_weight_others_read(llama):
    """The mistake: adapters that train, while no token ever meets them."""
    llama.model.layers[1].mlp.__class__ = ClampsItsWeight
    with pytest.raises(ValueError, match="down_proj without calling these layers"):
        apply_lora(llama)
    apply_lora(llama, target_modules=["up_proj", "q_proj"])


def test_layers_that_share_a_weight(llama):
    """The mistake: two adapters of one weight, which a merge would both add to both layers."""
    first, second = (layer.mlp for layer in llama.model.layers)
    second.up_proj.weight = first.up_proj.weight
    with pytest.raises(ValueError, match=r"up_proj and .*up_proj of .*share one weight"):
        apply_lora(llama)
    apply_lora(llama, target_modules=["down_proj"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trains_and_merges_on_gpu(dtype):
    batch = {name: tensor.cuda() for name, tensor in make_batch().items()}
    model = apply_lora(model_of_shape("tiny-llama", dtype=dtype, device="cuda"), rank=4, alpha=8)
    first = model(**batch, use_cache=False).loss.item()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    for _ in range(10):
        run(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    expected = run(model, batch)
    assert model(**batch, use_cache=False).loss.item() < first
    torch.testing.assert_close(run(merge_lora(model), batch), expected, atol=5e-2, rtol=5e-2)
