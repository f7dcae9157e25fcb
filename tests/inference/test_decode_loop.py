"""The decode loop against Hugging Face's greedy `generate`, and the families that it refuses."""

import copy

import pytest
import torch
import transformers

from recipes_lib.core.model.decoding import greedy
from recipes_lib.inference.batching import left_padded
from recipes_lib.inference.decode_loop import apply_decode_loop
from recipes_lib.inference.decode_loop.norms import RootMeanSquareNorm
from recipes_lib.inference.speculative import prompt_lookup_generate

NEW_TOKENS = 12
VOCABULARY = 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Random weights this large make scores and choices that depend on every position.
WILD = {"initializer_range": 0.2}


def model_of(family, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | WILD | options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # norms and biases are 1 and 0 in a new model: a mistake would not show
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"rope_theta": 10_000.0}

READ = {
    "llama": ("Llama", {}),
    "llama, one head of keys": ("Llama", {"num_key_value_heads": 1}),
    "llama, biases everywhere": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen3, norms of queries and keys": ("Qwen3", {"head_dim": 16}),
    "mistral, head_dim": ("Mistral", {"head_dim": 12, "num_key_value_heads": 3}),
}


@pytest.fixture
def plain():
    return model_of("Llama")


def prompt_of(length):
    generator = torch.Generator().manual_seed(length)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


def generated(model, prompt, new_tokens=NEW_TOKENS):
    """What Hugging Face answers, without the prompt."""
    row = torch.tensor([prompt])
    mask = torch.ones_like(row)
    out = model.generate(row, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens)
    return out[0, len(prompt) :].tolist()


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits


# --- equal to generate ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", READ)
def test_tokens_are_those_of_generate(name):
    """The mistake: a head, a bias or a pair of dimensions in the wrong place."""
    family, options = READ[name]
    model = model_of(family, **options)
    decoder = apply_decode_loop(model)
    different = set()
    for length in (1, 2, 17):
        prompt = prompt_of(length)
        expected = generated(model, prompt)
        assert greedy(decoder, prompt, new_tokens=NEW_TOKENS) == expected
        different |= set(expected)
    assert len(different) > 5, "a model that repeats itself would hide mistakes"


def test_logits_in_any_split(plain):
    """The mistake: a mask or a position that starts anew in the second call."""
    tokens = prompt_of(13)
    decoder = apply_decode_loop(plain)
    for split in ([13], [5, 8], [1, 1, 11], [12, 1]):
        cache = decoder.new_cache(max_tokens=13)
        parts = torch.tensor([tokens]).split(split, dim=1)
        logits = torch.cat([decoder(part, cache) for part in parts], dim=1)
        torch.testing.assert_close(logits, logits_of(plain, tokens), atol=2e-4, rtol=1e-4)
        assert cache.length == 13


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 1e-1), (torch.float16, 1e-6)])
def test_the_norm_is_the_rms_norm(dtype, eps):
    """The mistake: squares in fp16, which overflow, or a forgotten eps, which small ones show."""
    weight = torch.rand(48).to(dtype)
    norm = RootMeanSquareNorm(weight, eps)
    for size in (1e-2, 1.0, 1e3):
        x = (size * torch.randn(2, 5, 48)).to(dtype)
        expected = torch.nn.functional.rms_norm(x, (48,), weight, eps)
        torch.testing.assert_close(norm(x), expected)
        single = [norm(row) for row in x.split(1, dim=1)]
        assert torch.equal(norm(x), torch.cat(single, dim=1)), "a row depends on the others"


# --- several rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
def test_row_by_row_is_one_call_per_token(plain, padded):
    """The mistake: a token that sees those behind it, which exact speculation would not survive."""
    decoder = apply_decode_loop(plain)
    tokens, starts = left_padded([prompt_of(9), prompt_of(12)])  # [B, S], [B]
    caches = [decoder.new_cache(batch=2, max_tokens=12) for _ in range(3)]
    for cache in caches:
        if padded:
            cache.starts = starts
        decoder(tokens[:, :7], cache)
    verified = tokens[:, 7:]
    rows = decoder(verified, caches[0], row_by_row=True)
    together = decoder(verified, caches[1])
    single = [decoder(token, caches[2]) for token in verified.split(1, dim=1)]
    single = torch.cat(single, dim=1)
    torch.testing.assert_close(rows, single, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together, single, atol=1e-5, rtol=1e-5)


# --- the weights ----------------------------------------------------------------------------------


def test_the_model_stays_and_shares_what_is_not_fused(plain):
    """The mistake: a decoder in 16 bits rounds the model that it was made of."""
    before = copy.deepcopy(plain.state_dict())
    was_training = plain.train().training
    decoder = apply_decode_loop(plain)
    attention = plain.model.layers[1].self_attn
    assert decoder.blocks[1].output.weight.data_ptr() == attention.o_proj.weight.data_ptr()
    assert decoder.embedding.weight.data_ptr() == plain.model.embed_tokens.weight.data_ptr()
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    decoder.to(torch.bfloat16)
    decoder.blocks[0].down = torch.nn.Identity()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert plain.training == was_training
    assert all(parameter.requires_grad for parameter in plain.parameters())


def test_a_tied_head_is_one_parameter():
    """The mistake: two parameters on one memory, which part with the first change of dtype."""
    decoder = apply_decode_loop(model_of("Llama", tie_word_embeddings=True)).to(torch.bfloat16)
    assert decoder.head.weight is decoder.embedding.weight
    untied = apply_decode_loop(model_of("Llama", tie_word_embeddings=False))
    assert untied.head.weight is not untied.embedding.weight


def test_sixteen_bits(plain):
    """The mistake: attention in 16 bits, which is slow on a CPU, or angles that are rounded."""
    decoder = apply_decode_loop(plain).to(torch.bfloat16)
    cache = decoder.new_cache(max_tokens=20)
    assert cache.keys[0].dtype == torch.float32
    logits = decoder(torch.tensor([prompt_of(20)]), cache)
    assert logits.dtype == torch.bfloat16
    expected = logits_of(plain, prompt_of(20))
    error = (logits.float() - expected).norm() / expected.norm()
    assert error < 4e-2


# --- what is refused ------------------------------------------------------------------------------

TINY = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
REFUSED = {
    "other layers": ("GPT2", {}),
    "layers without positions": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "rotary angles that change": ("Llama", {"rope_parameters": DYNAMIC}),
    "capped scores, which are small yet": ("Llama", {"attn_logit_softcapping": 1e6}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_families_are_refused(name):
    """The mistake: each of them answers fluently, and wrongly."""
    family, options = REFUSED[name]
    model = model_of(family, **TINY | options)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"keep model\.generate\(\) for this model") as refusal:
        apply_decode_loop(model)
    assert "\n" not in str(refusal.value)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])


def test_a_text_longer_than_the_positions():
    """The mistake: angles that the model has never seen, where it writes noise."""
    decoder = apply_decode_loop(model_of("Llama", max_position_embeddings=16))
    assert len(greedy(decoder, prompt_of(10), new_tokens=6)) == 6
    for call in (greedy, prompt_lookup_generate):
        with pytest.raises(ValueError, match=r"max_tokens=17, .* trained for 16 positions"):
            call(decoder, prompt_of(10), new_tokens=7)


def test_a_sliding_window_is_exact_inside_and_refused_beyond():
    """The mistake: one token beyond the window of Mistral, and the answers part."""
    model = model_of("Mistral", sliding_window=16)
    decoder = apply_decode_loop(model)
    prompt = prompt_of(10)
    assert greedy(decoder, prompt, new_tokens=6) == generated(model, prompt, 6)
    with pytest.raises(ValueError, match="max_tokens=17: the model looks back 16"):
        greedy(decoder, prompt, new_tokens=7)
    other_layers = model_of("Qwen2", sliding_window=16, use_sliding_window=False)
    assert apply_decode_loop(other_layers).new_cache(max_tokens=17).capacity == 17


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3, norms of queries and keys"])
def test_the_same_logits_on_gpu(family):
    """Prompts are on the CPU, angles and masks are made there, and groups have another kernel."""
    name, options = READ[family]
    plain = model_of(name, **options)
    moved = apply_decode_loop(copy.deepcopy(plain).cuda())
    tokens = torch.tensor([prompt_of(20), prompt_of(20)])
    expected = logits_of(plain, prompt_of(20))
    for row_by_row in (False, True):
        cache = moved.new_cache(batch=2, max_tokens=20)
        parts = tokens.split([11, 8, 1], dim=1)
        got = [moved(part, cache, row_by_row=row_by_row) for part in parts]
        got = torch.cat(got, dim=1).cpu()
        assert (got - expected).norm() < 1e-3 * got.norm()
