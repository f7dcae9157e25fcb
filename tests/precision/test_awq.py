"""AWQ loses less than rounding alone. That it changes nothing before, tests/families compares."""

import copy

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.precision.awq import apply_awq, plain_awq_scales, search_scales
from recipes_lib.precision.int4 import apply_int4
from tests.conftest import assert_equal


def with_outliers(model):
    """A few channels of every norm are large, as in trained models; rounding then hurts."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if "Norm" in type(module).__name__ and name.endswith(("layernorm", "layer_norm")):
                module.weight[::13] += 20
    return model.eval()


def text(seed=0, rows=4, length=32):
    ids = torch.randint(1, 128, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids}


def logits(model, batch=None):
    batch = batch or text(seed=9)
    with torch.no_grad():
        return model(**batch, use_cache=False).logits


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# --- the search -----------------------------------------------------------------------------------


def test_equals_the_plain_search(llama):
    """Of down_proj, which alone reads its input. A common factor of all scales does not matter."""
    with_outliers(llama)
    batch = text()
    name = "model.layers.1.mlp.down_proj"
    layer = llama.get_submodule(name)
    seen = []
    with layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1))):
        logits(llama, batch)
    plain = plain_awq_scales(layer.weight.detach(), seen[0])
    [choice] = [c for c in search_scales(llama, [batch]) if c.site.linears == (name,)]
    ratios = choice.scales / plain
    assert choice.alpha > 0
    torch.testing.assert_close(ratios, ratios[:1].expand(160), rtol=1e-4, atol=0)


def test_better_than_rounding_alone_on_other_text(llama):
    """At the same size. The layers that AWQ scales, and the logits of the whole model."""
    with_outliers(llama)
    exact = logits(llama)
    rounded = apply_int4(copy.deepcopy(llama), symmetric=True)
    choices = search_scales(llama, [text()], symmetric=True)
    assert all(choice.error <= choice.rounded for choice in choices)
    assert sum(choice.error for choice in choices) < 0.7 * sum(c.rounded for c in choices)
    apply_awq(llama, [text()], symmetric=True)
    apply_int4(llama, symmetric=True)
    with_awq = (logits(llama) - exact).norm()
    assert with_awq < 0.8 * (logits(rounded) - exact).norm()


def test_padding_does_not_count(llama):
    """The mistake: scales for what padding makes of a channel."""
    batch = text(rows=2)
    ids = torch.nn.functional.pad(batch["input_ids"], (0, 20), value=5)
    mask = torch.nn.functional.pad(torch.ones_like(batch["input_ids"]), (0, 20))
    padded = {"input_ids": ids, "attention_mask": mask}
    for choice, other in zip(search_scales(llama, [batch]), search_scales(llama, [padded])):
        assert choice.alpha == other.alpha
        torch.testing.assert_close(choice.scales, other.scales, rtol=1e-3, atol=0)


# --- what cannot be folded, and bad input ---------------------------------------------------------


def test_something_else_reads_the_norm(llama):
    """A second reader that is no linear layer: the scales would reach it. The model stays as is."""
    with_outliers(llama)
    block = llama.model.layers[1]
    normed = []
    block.input_layernorm.register_forward_hook(lambda *given: normed.append(given[-1]))
    block.register_forward_hook(lambda *given: given[-1] + normed.pop())
    before = state(llama)
    with pytest.raises(ValueError, match="something between"):
        apply_awq(llama, [text()])
    assert_equal(state(llama), before)


def test_refused(llama):
    """The mistakes: scales of 16-bit weights; rounding first."""
    with pytest.raises(ValueError, match=r"call model\.float"):
        apply_awq(llama.bfloat16(), [text()])
    with pytest.raises(ValueError, match=r"with apply_int4: .* after apply_awq comes apply_int4"):
        apply_awq(apply_int4(model_of_shape("tiny-llama", device="cpu")), [text()])
