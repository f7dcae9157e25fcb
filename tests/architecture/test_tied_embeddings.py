import pytest
import torch
import transformers
from torch import nn

from recipes_lib.architecture.tied_embeddings import (
    apply_tied_embeddings,
    predicted_bytes_saved,
    tied_logits,
    untie_embeddings,
)
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.sizes import weight_bytes

IDS = torch.arange(1, 25).view(2, 12)

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": None,
}
# Scaled embeddings (Gemma), a bias in the output layer (Phi), another name of the trunk (GPT-2).
FAMILIES = ["Llama", "Qwen2", "Gemma2", "GPT2", "GPTNeoX", "Phi", "Starcoder2"]


def small(family, *, tied, **options):
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**SIZES | {"tie_word_embeddings": tied} | options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def shared(model):
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def saved_and_loaded(model, folder):
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_untied_and_tied_again(family, tmp_path):
    """The logits stay to the last bit, the bytes change as predicted, and both survive a file."""
    model = small(family, tied=True)
    expected = model(IDS).logits
    small_size = weight_bytes(model)
    predicted = predicted_bytes_saved(model)
    assert predicted == 128 * 64 * 4

    assert untie_embeddings(model) is model
    assert not shared(model)
    assert torch.equal(model(IDS).logits, expected)
    assert weight_bytes(model) - small_size == predicted
    again = saved_and_loaded(model, tmp_path / "untied")
    assert not shared(again) and torch.equal(again(IDS).logits, expected)

    assert apply_tied_embeddings(model) is model
    assert shared(model)
    assert torch.equal(model(IDS).logits, expected)
    assert weight_bytes(model) == small_size
    again = saved_and_loaded(model, tmp_path / "tied")
    assert shared(again) and torch.equal(again(IDS).logits, expected)


@torch.no_grad()
def test_the_copy_is_not_thrown_away():
    """Under a configuration that says "tied" the next resize would overwrite the output layer."""
    model = untie_embeddings(small("Llama", tied=True))
    model.lm_head.weight.mul_(2)
    expected = model(IDS).logits
    model.resize_token_embeddings(136)
    assert not shared(model)
    assert torch.equal(model(IDS).logits[..., :128], expected)
    assert model.all_tied_weights_keys == {}


@pytest.mark.parametrize("keep", ["embedding", "output"])
def test_one_of_two_tables_stays(keep):
    model = small("Llama", tied=False)
    kept = {
        "embedding": model.get_input_embeddings().weight.clone(),
        "output": model.get_output_embeddings().weight.clone(),
    }
    with pytest.raises(ValueError, match="keep='embedding' or keep='output'"):
        apply_tied_embeddings(model)
    assert not model.config.tie_word_embeddings and not shared(model)
    apply_tied_embeddings(model, keep=keep)
    assert shared(model) and torch.equal(model.get_output_embeddings().weight, kept[keep])
    model(IDS, labels=IDS).loss.backward()
    names = [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in names, "an optimizer has the table once"
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_frozen_tables_stay_frozen():
    model = small("Llama", tied=True)
    model.get_input_embeddings().requires_grad_(False)
    assert not untie_embeddings(model).get_output_embeddings().weight.requires_grad


def test_the_idea_is_what_the_model_does():
    model = model_of_shape("tiny-llama", device="cpu").eval()
    hidden = model.model(IDS).last_hidden_state
    torch.testing.assert_close(tied_logits(hidden, model.model.embed_tokens), model(IDS).logits)


class Adapted(nn.Linear):
    """A layer whose weight is not all that it does."""


def test_refused():
    wide = small("Llama", tied=False)
    wide.lm_head = nn.Linear(64, 130, bias=False)
    with pytest.raises(ValueError, match=r"different shapes, \(128, 64\) and \(130, 64\)"):
        apply_tied_embeddings(wide, keep="output")
    mixed = small("Llama", tied=False)
    mixed.lm_head.to(torch.bfloat16)
    with pytest.raises(ValueError, match="different dtypes"):
        apply_tied_embeddings(mixed, keep="output")
    with pytest.raises(ValueError, match="already"):
        apply_tied_embeddings(small("Llama", tied=True))
    with pytest.raises(ValueError, match="weights of its own already"):
        untie_embeddings(small("Llama", tied=False))
    with pytest.raises(ValueError, match="choose one of equal, embedding, output"):
        apply_tied_embeddings(small("Llama", tied=False), keep="mean")
    adapted = small("Llama", tied=False)
    adapted.lm_head = Adapted(64, 128, bias=False)
    with pytest.raises(ValueError, match="before it is quantized or gets adapters"):
        apply_tied_embeddings(adapted, keep="output")
    with pytest.raises(ValueError, match="no Hugging Face model"):
        untie_embeddings(nn.Linear(2, 2))
