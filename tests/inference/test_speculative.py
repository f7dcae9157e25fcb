import random

import pytest
import torch
from torch import nn

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.decoding import KeyValueCache, greedy
from recipes_lib.core.model.linears import linear_layers
from recipes_lib.core.model.marks import ONE_SCALE_PER_CALL, any_marked
from recipes_lib.inference.decode_loop import apply_decode_loop
from recipes_lib.inference.speculative import (
    looked_up,
    predicted_speedup,
    prompt_lookup_generate,
    row_difference,
    speculative_generate,
)
from recipes_lib.precision.int8 import apply_int8


class Scripted:
    """A decoder by a table: the last two tokens decide, and what it reads stands in its cache.

    Logits are whole numbers below 4, so that most tokens are ties. What `truncate` fails to forget,
    it reads again.
    """

    vocabulary = 12

    def __init__(self, seed):
        self.seed = seed
        self.asked = []

    def new_cache(self, *, batch=1, max_tokens):
        self.asked.append(max_tokens)
        return KeyValueCache(layers=1, kv_heads=1, head_dim=1, capacity=max_tokens, batch=batch)

    def __call__(self, tokens, cache, *, last_only=False, row_by_row=False):
        count = tokens.shape[1]
        cache.reserve(count)
        ids = tokens[:, None, :, None].float()
        seen, _ = cache.append(0, ids, ids)
        text = seen[0, 0, :, 0].long().tolist()
        cache.advance(count)
        ends = range(len(text) - count + 1, len(text) + 1)
        logits = torch.stack([self.logits(text[:end]) for end in ends])[None]
        return logits[:, -1:] if last_only else logits

    def logits(self, text):
        draw = random.Random(f"{self.seed} {text[-2:]}")
        return torch.tensor([float(draw.randrange(4)) for _ in range(self.vocabulary)])


def cases(count):
    """Prompts and options at random, short ones and small numbers among them."""
    draw = random.Random(0)
    for number in range(count):
        prompt = [draw.randrange(12) for _ in range(draw.choice([1, 2, 3, 9]))]
        stop = draw.sample(range(12), draw.choice([0, 0, 1, 2]))
        options = {"new_tokens": draw.choice([1, 2, 3, 5, 30]), "stop": stop}
        yield number, prompt, options, draw.choice([1, 2, 3, 7])


# --- the answer is the greedy one -----------------------------------------------------------------


def test_prompt_lookup_gives_the_greedy_answer():
    """The mistake: a stop token inside a draft, or a draft longer than what is wanted."""
    accepted = 0
    for number, prompt, options, draft_tokens in cases(300):
        decoder = Scripted(number)
        expected = greedy(decoder, prompt, **options)
        got = prompt_lookup_generate(decoder, prompt, draft_tokens=draft_tokens, **options)
        assert got.tokens == expected, (number, prompt, options)
        first, second = decoder.asked
        assert first == second, "it needs no more room than greedy decoding"
        accepted += got.accepted
    assert accepted > 500


@pytest.mark.parametrize("same", [True, False])
def test_a_draft_decoder_gives_the_greedy_answer(same):
    """The mistake: the draft's own cache does not forget what was wrong."""
    for number, prompt, options, draft_tokens in cases(150):
        decoder = Scripted(number)
        draft_decoder = Scripted(number if same else -1)
        expected = greedy(decoder, prompt, **options)
        got = speculative_generate(
            decoder, draft_decoder, prompt, draft_tokens=draft_tokens, **options
        )
        assert got.tokens == expected, (number, prompt, options)
        if same and got.drafted_calls:
            assert got.acceptance == 1.0


def test_a_lookup_copies_the_latest_place_and_goes_on_in_its_copy():
    """The mistake: the first place, or a draft that ends where the text does."""
    sizes = {"ngram": 3, "shortest": 1}
    assert looked_up([1, 2, 3, 9, 1, 2, 4, 1, 2], **sizes, most=2) == [4, 1]
    assert looked_up([5, 6, 5, 6], **sizes, most=5) == [5, 6, 5, 6, 5]
    assert looked_up([5], **sizes, most=5) == []
    assert looked_up([7, 8, 9, 8], ngram=3, shortest=2, most=5) == []


# --- exact with kernels that are exact ------------------------------------------------------------


def bf16_decoder():
    """Deep, and attention matters: a difference in the last bit has many roundings to cross."""
    model = model_of_shape("tiny-llama", layers=16, device="cpu")
    with torch.no_grad():
        for linear in linear_layers(model.model).values():
            linear.weight.mul_(8)
    return apply_decode_loop(model).bfloat16()


def int8_decoder(kind):
    decoder = bf16_decoder()
    return apply_int8(decoder, kind=kind, names=linear_layers(decoder))


def products_are_exact(decoder):
    """Whether this machine computes a row alone as it does among others."""
    x = torch.randn(8, 64).bfloat16()
    layers = [decoder.blocks[0].qkv, decoder.head]
    return all(torch.equal(layer(x)[3:4], layer(x[3:4])) for layer in layers)


def prompts(count):
    for _ in range(count):
        yield torch.randint(0, 128, (60,)).tolist()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("kind", ["bf16", "weight_only"])
def test_row_by_row_is_exact(kind):
    """The mistake: a mask changes the last bit, and a rounding to 16 bits makes 1/256 of it."""
    # With oneDNN the product of a row in bf16 depends on how many rows there are.
    with torch.backends.mkldnn.flags(enabled=False):
        decoder = bf16_decoder() if kind == "bf16" else int8_decoder(kind)
        if not products_are_exact(decoder):
            pytest.skip("the kernels of this machine compute a row differently among others")
        for prompt in prompts(4):
            assert row_difference(decoder, prompt) == 0.0
        text = prompt[:12] * 2
        got = prompt_lookup_generate(decoder, text, new_tokens=30)
        assert got.tokens == greedy(decoder, text, new_tokens=30)


def test_one_scale_for_a_call_is_refused():
    """The mistake: drafts change how a token is rounded, and the text is not the greedy one."""
    exact = int8_decoder("per_token")
    shared = int8_decoder("dynamic")
    assert row_difference(shared, next(prompts(1))) > 0.0
    if not any_marked(shared.modules(), ONE_SCALE_PER_CALL):
        pytest.skip("without packed weights each row has a scale of its own")
    message = 'one scale .*: quantize with kind="weight_only" or "per_token", or use greedy'
    with pytest.raises(ValueError, match=message):
        prompt_lookup_generate(shared, [1, 2, 3], new_tokens=3)
    with pytest.raises(ValueError, match=message):
        speculative_generate(shared, exact, [1, 2, 3], new_tokens=3)
    # Drafts may be rounded as they like: the decoder checks each of them.
    drafted = speculative_generate(exact, shared, [1, 2, 3], new_tokens=3)
    assert drafted.tokens == greedy(exact, [1, 2, 3], new_tokens=3)


# --- the numbers ----------------------------------------------------------------------------------


def test_the_tally_counts_what_was_compared():
    """The mistake: tokens behind a wrong one count, and make the draft look bad."""

    class Counting(Scripted):
        """Counts up, modulo 12."""

        def logits(self, text):
            return nn.functional.one_hot(torch.tensor((text[-1] + 1) % 12), 12).float()

    class Wrong(Counting):
        """Wrong after 3: drafts 0 1 2 3 for the answer 1 2 3 4."""

        def logits(self, text):
            return super().logits([7] if text[-1] == 3 else text)

    got = speculative_generate(Counting(0), Wrong(0), [0], new_tokens=9, draft_tokens=4)
    # 1 from the prefill; 2 3 right, 8 wrong, 9 not compared, 4 corrected; 5 … 9 right
    assert got.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (got.calls, got.drafted_calls) == (2, 2)
    assert (got.accepted, got.compared) == (6, 7)
    assert got.acceptance == 6 / 7 and got.draft_share == 1.0


def test_predicted_speedup_is_the_published_formula():
    for a, k, c in [(0.8, 4, 0.1), (0.3, 7, 0.02), (0.0, 3, 0.2)]:
        published = (1 - a ** (k + 1)) / ((1 - a) * (k * c + 1))
        got = predicted_speedup(a, draft_tokens=k, cost_ratio=c)
        assert got == pytest.approx(published)
    assert predicted_speedup(1.0, draft_tokens=3, cost_ratio=0.0) == 4.0
    dear = {"verify_ratio": 2.0}
    assert predicted_speedup(1.0, draft_tokens=3, cost_ratio=0.0, **dear) == 2.0


# --- guards ---------------------------------------------------------------------------------------


def test_what_cannot_speculate():
    """The mistake: tokens of another vocabulary, which mean nothing to the decoder."""
    decoder = Scripted(0)
    other = Scripted(0)
    other.vocabulary = 13
    with pytest.raises(ValueError, match=r"12 tokens and the draft decoder 13.*prompt_lookup"):
        speculative_generate(decoder, other, [1], new_tokens=3)
