"""Perplexity and agreement, of models and of decoders."""

import math

import pytest
import torch

from recipes_lib.core.data.evaluation import decode_quality
from recipes_lib.core.model import model_of_shape
from recipes_lib.inference.decode_loop import apply_decode_loop

DOCUMENTS = [[3, 1, 4, 1, 5, 9, 2, 6], torch.tensor([2, 7, 1])]


def quality_by_hand(model):
    losses, predictions = [], []
    for document in DOCUMENTS:
        row = torch.as_tensor(document)[None]
        with torch.no_grad():
            logits = model.eval()(row).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none"))
        predictions.append(logits.argmax(-1))
    return math.exp(torch.cat(losses).mean()), torch.cat(predictions)


def test_quality_of_a_model_and_of_its_decoder():
    """The mistake: a mean of means, which would weigh the short document more."""
    model = model_of_shape("tiny-qwen3", device="cpu")
    perplexity, predictions = quality_by_hand(model)
    decoder = apply_decode_loop(model)
    found = [decode_quality(model.train(), DOCUMENTS), decode_quality(decoder, DOCUMENTS)]
    found.append(decode_quality(decoder, DOCUMENTS, token_by_token=True))
    for quality in found:
        assert quality.perplexity == pytest.approx(perplexity, rel=1e-5)
        assert torch.equal(quality.predictions, predictions)
        assert (quality.tokens, quality.agreement) == (9, None)
    assert model.training
    reference = predictions.clone()
    reference[:3] += 1
    assert decode_quality(model, DOCUMENTS, reference=reference).agreement == 6 / 9


def test_a_quality_that_would_be_another_one_is_refused(llama):
    """The mistake: all tokens at once in place of one by one, and a NaN that compares as equal."""
    with pytest.raises(ValueError, match="is no decoder"):
        decode_quality(llama, DOCUMENTS, token_by_token=True)
    with pytest.raises(ValueError, match=r"documents\[0\] has 2049 tokens, .* 2048 positions"):
        decode_quality(llama, [[1] * 2049])
    llama.lm_head.weight.data[5] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        decode_quality(llama, DOCUMENTS)
