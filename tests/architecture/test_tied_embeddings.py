import pytest
import torch
import transformers

from recipes_lib.architecture.tied_embeddings import (
    apply_tied_embeddings,
    tied_logits,
    untie_embeddings,
)
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.bytes_of_tensors import weight_bytes
from tests.families.configs import tiny_model
from tests.small_models import IDS, small_model


def small(family, *, tied, **options):
    options = {"num_key_value_heads": 4, "tie_word_embeddings": tied} | options
    return small_model(family, num_hidden_layers=1, **options)


def shared(model):
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def saved_and_loaded(model, folder):
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


# A scaled embedding (Gemma), a bias in the output layer (Phi), another name of the trunk (GPT-2).
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("Gemma2", torch.float32), ("Phi", torch.float32), ("GPT2", torch.bfloat16)],
)
@torch.no_grad()
def test_untied_and_tied_again(family, dtype, tmp_path):
    """The mistakes: a logit that moves, bytes that stay, a file that loads otherwise."""
    model = small(family, tied=True).to(dtype)
    model.get_input_embeddings().requires_grad_(False)
    expected = model(IDS).logits
    small_size = weight_bytes(model)
    of_a_table = 128 * 64 * dtype.itemsize

    assert untie_embeddings(model) is model
    assert not shared(model)
    assert not model.get_output_embeddings().weight.requires_grad, "what is frozen stays frozen"
    assert torch.equal(model(IDS).logits, expected)
    assert weight_bytes(model) - small_size == of_a_table
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


@pytest.mark.parametrize("keep", ["embedding", "output"])
def test_one_of_two_tables_stays(keep):
    """The mistake: the other one stays, or an optimizer has the table twice."""
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
    assert "lm_head.weight" not in [name for name, _ in model.named_parameters()]


def test_the_idea_is_what_the_model_does():
    """The mistake: the plain line scales or transposes."""
    model = model_of_shape("tiny-llama", device="cpu").eval()
    hidden = model.model(IDS).last_hidden_state
    torch.testing.assert_close(tied_logits(hidden, model.model.embed_tokens), model(IDS).logits)


def test_ties_between_blocks_are_not_lost():
    """The mistake: the word that unties the output layer unties the transformer that Zamba's blocks
    share, and saved and loaded, they are fresh."""
    model = tiny_model("zamba")
    with pytest.raises(ValueError, match=r"is as it was: .* untie .*shared_transf"):
        untie_embeddings(model)
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
