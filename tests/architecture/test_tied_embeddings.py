import pytest
import torch
import transformers

from recipes_lib.architecture.tied_embeddings import apply_tied_embeddings, tied_logits
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.sizes import weight_bytes
from tests.small_models import IDS, small_model


def small(family, *, tied):
    options = {"num_key_value_heads": 4, "tie_word_embeddings": tied}
    return small_model(family, num_hidden_layers=1, **options)


def shared(model):
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


# A scaled embedding (Gemma), a bias in the output layer (Phi), another name of the trunk (GPT-2).
@pytest.mark.parametrize("family", ["Gemma2", "Phi", "GPT2"])
@pytest.mark.parametrize("keep", ["embedding", "output"])
@torch.no_grad()
def test_one_of_two_tables_stays(family, keep, tmp_path):
    """The mistakes: the other one stays, bytes that stay, a file that loads otherwise."""
    model = small(family, tied=False)
    kept = {
        "embedding": model.get_input_embeddings().weight.clone(),
        "output": model.get_output_embeddings().weight.clone(),
    }
    before = weight_bytes(model)
    assert apply_tied_embeddings(model, keep=keep) is model
    assert shared(model) and torch.equal(model.get_output_embeddings().weight, kept[keep])
    assert before - weight_bytes(model) == 128 * 64 * 4
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert shared(again) and torch.equal(again(IDS).logits, model(IDS).logits)


def test_the_idea_is_what_the_model_does():
    """The mistake: the plain line scales or transposes."""
    model = model_of_shape("tiny-llama", device="cpu").eval()
    hidden = model.model(IDS).last_hidden_state
    torch.testing.assert_close(tied_logits(hidden, model.model.embed_tokens), model(IDS).logits)


def test_refused():
    """The mistake: a table that is shared is configured twice."""
    with pytest.raises(ValueError, match="already"):
        apply_tied_embeddings(small("Llama", tied=True))
