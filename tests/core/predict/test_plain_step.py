"""The budget of a plain step, against the bytes that a step really takes."""

from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.measure import PeakMemory, dry_run
from recipes_lib.core.model import SHAPES, model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.sizes import weight_bytes
from recipes_lib.core.predict import plain_step
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import (
    all_frozen,
    block_bytes,
    budget_of,
    features,
    free_gradients,
    is_linear,
)
from tests.conftest import FAMILIES

# Together with the families, each of the three moments is the peak of one of them.
MANY_TOKENS = Shape(batch=4, seq=64)
ONE_ODD_ROW = Shape(batch=1, seq=33)
FEW_TOKENS = Shape(batch=3, seq=5)


def measured_peak(model, shape):
    """Peak bytes of a step that is not the first, which creates the states."""
    ids = torch.randint(0, model.config.vocab_size, (shape.batch, shape.seq))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    with PeakMemory() as before:
        pass
    for _ in range(2):
        with PeakMemory() as memory:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak - before.peak + weight_bytes(model)


@pytest.mark.parametrize("shape", [MANY_TOKENS, ONE_ODD_ROW, FEW_TOKENS])
@pytest.mark.parametrize("family", FAMILIES)
def test_prediction_of_each_family(family, shape):
    model = model_of_shape(family, layers=8, device="cpu")
    predicted = budget_of(model, shape).peak
    assert predicted == pytest.approx(measured_peak(model, shape), rel=0.03)


@pytest.mark.parametrize("family", FAMILIES)
def test_prediction_in_bf16(family):
    """Norms keep their fp32 input beside the 16-bit output, and the logits stay in fp32."""
    model = model_of_shape(family, layers=8, dtype=torch.bfloat16, device="cpu")
    predicted = budget_of(model, MANY_TOKENS).peak
    assert predicted == pytest.approx(measured_peak(model, MANY_TOKENS), rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_prediction_of_eager_attention_on_a_long_row(family, dtype):
    """The scores are the peak; in 16 bits all families but GPT-2 keep them in fp32 as well."""
    model = model_of_shape(family, layers=4, dtype=dtype, device="cpu")
    model.set_attn_implementation("eager")
    shape = Shape(batch=1, seq=400)
    assert budget_of(model, shape).peak == pytest.approx(measured_peak(model, shape), rel=0.03)


def test_prediction_in_the_proportions_of_a_real_model():
    """A large vocabulary beside narrow blocks: the embedding's terms are not lost in the rest."""
    model = model_of_shape("smollm2-135m", layers=4, device="cpu")
    shape = Shape(batch=2, seq=64)
    assert budget_of(model, shape).peak == pytest.approx(measured_peak(model, shape), rel=0.01)


def test_prediction_where_the_logits_are_the_peak():
    """In the models above one tensor of logits more or less is lost in the tolerance."""
    shape = Shape(batch=1, seq=1024)
    with dry_run():
        model = model_of_shape("smollm2-135m", layers=1, device="cpu")
        plan = budget_of(model, shape)
        assert plan.peak_moment() == "backward begins"
        assert plan.peak == pytest.approx(measured_peak(model, shape), rel=0.01)


def test_the_shapes_of_these_tests_have_three_different_peaks():
    """Otherwise a wrong term could hide behind a larger one."""
    moments = set()
    for family in FAMILIES:
        model = model_of_shape(family, layers=8, device="meta")
        for shape in (MANY_TOKENS, ONE_ODD_ROW, FEW_TOKENS):
            moments.add(budget_of(model, shape).peak_moment())
    assert len(moments) == 3


def test_the_budget_is_that_of_the_whole_batch_on_one_rank():
    """Micro-batches are an estimate's business; ranks share the rows from the start."""
    model = model_of_shape("tiny-llama", device="meta")
    whole = budget_of(model, Shape(batch=8, seq=16))
    assert budget_of(model, Shape(batch=8, seq=16, micro_batches=4)) == whole
    halved = budget_of(model, Shape(batch=16, seq=16, ranks=2))
    assert halved.terms() == whole.terms()


PUBLISHED = [("llama-3.1-8b", 8.03), ("llama-3.2-3b", 3.21), ("qwen2.5-32b", 32.8)]


@pytest.mark.parametrize(("name", "billions"), PUBLISHED)
def test_public_shapes_without_memory(name, billions):
    """A meta model costs nothing: published parameter counts, and the budget of 8B on a laptop."""
    model = model_of_shape(name, dtype=torch.bfloat16, device="meta")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)
    # In bf16: 2 bytes of weights, 2 of gradients and 4 of states.
    assert budget_of(model, Shape(batch=1, seq=2048)).peak > 7.9 * billions * 1e9


def test_every_shape_builds():
    for name in SHAPES:
        model = model_of_shape(name, layers=1, device="meta")
        assert budget_of(model, Shape(batch=1, seq=8)).peak > 0


def test_an_architecture_without_a_formula():
    """A wrong number would be worse than none."""

    class Strange(torch.nn.Module):
        config = type("Config", (), {"hidden_size": 8, "num_attention_heads": 2})()

        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8)])

    with pytest.raises(ValueError, match="no memory formula for the blocks of Strange"):
        block_bytes(Strange(), seq=8)


# --- pieces that several techniques use -----------------------------------------------------------


@pytest.mark.parametrize("capability", [(7, 5), (8, 9)])
def test_without_weights_it_is_the_budget_of_this_machine(monkeypatch, capability):
    """The mistake on a T4: notebook 04 predicts with a model on "meta", which repeats no heads."""
    monkeypatch.setattr(plain_step, "machine", lambda: SimpleNamespace(device="cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = model_of_shape("tiny-llama", device="meta", dtype=torch.bfloat16)
    model.config._attn_implementation = "fused"
    config = model.config
    repeated = 2 * (config.num_attention_heads - config.num_key_value_heads) * config.head_dim
    elsewhere = model_of_shape("tiny-llama", device="cpu", dtype=torch.bfloat16)
    more = block_bytes(model, seq=64) - block_bytes(elsewhere, seq=64)
    assert more == (2 * repeated if capability < (8, 0) else 0)


def test_frozen_for_a_moment(llama):
    """What was frozen before stays frozen, what trained trains again, also after an error."""
    norm = llama.model.norm.weight.requires_grad_(False)
    with pytest.raises(KeyError), all_frozen(llama):
        assert not any(parameter.requires_grad for parameter in llama.parameters())
        raise KeyError
    trainable = [parameter for parameter in llama.parameters() if parameter.requires_grad]
    assert len(trainable) == len(list(llama.parameters())) - 1
    assert not norm.requires_grad


def test_linear_layers_of_both_kinds():
    """Conv1D of GPT-2 stores [in, out]: read as [out, in], every formula would be transposed."""
    for family, name in (("tiny-llama", "mlp.up_proj"), ("tiny-gpt2", "mlp.c_fc")):
        model = model_of_shape(family, device="meta")
        layer = decoder_blocks(model)[0].get_submodule(name)
        wide = 256 if family == "tiny-gpt2" else 160
        assert is_linear(layer) and features(layer) == (64, wide)
        assert not is_linear(model.get_input_embeddings())


@pytest.mark.parametrize("family", ["tiny-llama", "tiny-mistral"])
def test_gradients_that_go_as_soon_as_they_are_complete(family):
    """A tied embedding waits for its second half, and has its first from the beginning."""
    model = model_of_shape(family, device="meta")
    plan = free_gradients(budget_of(model, MANY_TOKENS), model)
    embedding = 4 * 128 * 64
    largest = 4 * 64 * 160
    assert plan.gradients == max(embedding, largest)
    if family == "tiny-llama":
        assert plan.last_gradients == 0
        assert plan.embedding_gradient == 2 * embedding
    else:
        assert plan.last_gradients == largest
        assert plan.embedding_gradient == 0
