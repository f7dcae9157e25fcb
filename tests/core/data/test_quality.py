"""Perplexity and agreement, of models and of decoders."""

import math

import pytest
import torch

from recipes_lib.core.data.quality import decode_quality
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.decoding import KeyValueCache
from recipes_lib.inference.decode_loop import apply_decode_loop

DOCUMENTS = [[3, 1, 4, 1, 5, 9, 2, 6], torch.tensor([2, 7, 1])]


def by_hand(model):
    losses, predictions = [], []
    for document in DOCUMENTS:
        row = torch.as_tensor(document)[None]
        with torch.no_grad():
            logits = model.eval()(row).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none"))
        predictions.append(logits.argmax(-1))
    return math.exp(torch.cat(losses).mean()), torch.cat(predictions)


class Wrapped:
    """A decoder that computes with a Hugging Face model, anew from the first token each time."""

    vocabulary = 128

    def __init__(self, model):
        self.model = model
        self.calls = []

    def modules(self):
        return self.model.modules()

    def eval(self):
        self.model.eval()

    def new_cache(self, *, batch=1, max_tokens):
        self.seen = torch.zeros(1, 0, dtype=torch.int64)
        return KeyValueCache(layers=1, kv_heads=1, head_dim=2, capacity=max_tokens)

    def __call__(self, tokens, cache, *, last_only=False, row_by_row=False):
        self.calls.append(tokens.shape[1])
        cache.reserve(tokens.shape[1])
        self.seen = torch.cat([self.seen, tokens], dim=1)
        return self.model(self.seen).logits[:, -tokens.shape[1] :]


def test_of_a_model(llama):
    """A mean of means would weigh the short document more."""
    perplexity, predictions = by_hand(llama)
    llama.train()
    quality = decode_quality(llama, DOCUMENTS)
    assert quality.perplexity == pytest.approx(perplexity, rel=1e-5)
    assert torch.equal(quality.predictions, predictions)
    assert quality.tokens == 9
    assert quality.agreement is None
    assert llama.training


def test_of_a_decoder_token_by_token(llama):
    perplexity, predictions = by_hand(llama)
    decoder = Wrapped(llama)
    quality = decode_quality(decoder, DOCUMENTS, token_by_token=True)
    assert decoder.calls == [1] * 9
    assert quality.perplexity == pytest.approx(perplexity, rel=1e-5)
    assert torch.equal(quality.predictions, predictions)
    decoder.calls.clear()
    assert decode_quality(decoder, DOCUMENTS).perplexity == pytest.approx(perplexity, rel=1e-5)
    assert decoder.calls == [7, 2]


def test_agreement_counts_equal_choices(llama):
    reference = decode_quality(llama, DOCUMENTS).predictions
    reference[:3] += 1
    assert decode_quality(llama, DOCUMENTS, reference=reference).agreement == 6 / 9


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([], {}, "no documents"),
        ([[1, 2], [3]], {}, r"documents\[1\] .* at least 2 tokens"),
        ("a text", {}, "documents is a text"),
        ([[1, 200]], {}, r"documents\[0\] holds the id 200, and the model knows 128"),
        ([[1] * 2049], {}, r"documents\[0\] has 2049 tokens, .* 2048 positions"),
        ([[1, 2, 3]], {"reference": torch.zeros(5)}, "5 predictions for 2 tokens"),
        ([[1, 2, 3]], {"reference": [1, 2]}, "reference is of type list: give the `predictions`"),
        ([[1, 2, 3]], {"token_by_token": True}, "give a decoder"),
    ],
)
def test_bad_input(llama, documents, options, message):
    with pytest.raises(ValueError, match=message):
        decode_quality(llama, documents, **options)


def test_what_is_no_model():
    with pytest.raises(ValueError, match="NoneType is no Hugging Face model"):
        decode_quality(None, DOCUMENTS)


def test_losses_that_are_not_finite(llama):
    """fp16 that overflows: a perplexity of NaN compares as "no worse" with everything."""
    llama.lm_head.weight.data[5] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        decode_quality(llama, DOCUMENTS)


@pytest.mark.gpu
def test_the_same_quality_on_gpu():
    """Documents, targets and references are on the CPU, logits on the GPU."""
    model = model_of_shape("tiny-llama", device="cpu")
    here = decode_quality(model, DOCUMENTS)
    decoder = apply_decode_loop(model.cuda())
    for options in ({}, {"token_by_token": True}):
        there = decode_quality(decoder, DOCUMENTS, reference=here.predictions, **options)
        assert there.perplexity == pytest.approx(here.perplexity, rel=1e-3)
        assert there.agreement == 1.0
