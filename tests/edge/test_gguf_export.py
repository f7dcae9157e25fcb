import gguf
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipes_lib.compression.pruning import apply_pruning
from recipes_lib.edge.gguf_export import (
    export_to_gguf,
    in_pairs,
    load_gguf,
    plain_q8_0,
    predicted_bytes,
)
from recipes_lib.edge.language_model import plain_pairs
from recipes_lib.precision.int8 import apply_int8
from tests.small_models import IDS, as_if_trained, small_model

GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}
# A rotation that is not the default one: what is forgotten here would be seen.
ROPE = {"rope_type": "default", "rope_theta": 3e4}
FAMILIES = [
    ("Llama", {"tie_word_embeddings": True}),
    ("Llama", {"tie_word_embeddings": False, "rms_norm_eps": 1e-3}),
    ("Qwen2", {"tie_word_embeddings": True}),
]


def model_of(family, **options):
    torch.manual_seed(0)
    return as_if_trained(small_model(family, **GROUPED, rope_parameters=ROPE, **options))


@torch.no_grad()
def logits_of(model):
    return model(IDS, use_cache=False).logits


def tokenizer_of(*, size=128):
    """Bytes, a few merges and a token that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 4]
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    for pair in ("he", "ll", "hell"):
        vocabulary[pair] = len(vocabulary)
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", bos_token="<end>")


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_the_file_gives_the_same_model(family, options, tmp_path):
    """transformers reads it: in fp32 the logits are equal, in 16 and 8 bits they are near."""
    model = model_of(family, **options)
    expected = logits_of(model)
    for kind, tolerance in (("f32", 1e-5), ("f16", 3e-3), ("q8_0", 3e-2)):
        exported = export_to_gguf(model, path=tmp_path / f"{kind}.gguf", kind=kind)
        error = (logits_of(load_gguf(exported.path)) - expected).norm() / expected.norm()
        assert error < tolerance, kind
        settings = exported.bytes - predicted_bytes(model, kind=kind)
        assert 0 < settings < 4096, "names and settings"
    assert torch.equal(logits_of(model), expected), "the model stays as it is"


def test_rounding_is_the_formula(tmp_path):
    """The weights that come back are the levels of the plain lines times their scales."""
    model = model_of("Llama")
    export_to_gguf(model, path=tmp_path / "model.gguf", kind="q8_0")
    weight = model.model.layers[1].mlp.up_proj.weight.detach()
    levels, scales = plain_q8_0(weight)
    expected = (levels * scales[..., None].float()).view_as(weight)
    back = load_gguf(tmp_path / "model.gguf").model.layers[1].mlp.up_proj.weight
    torch.testing.assert_close(back, expected, atol=1e-6, rtol=0)


def test_rows_in_pairs_are_those_of_the_plain_lines():
    weight = torch.randn(24, 5)
    assert torch.equal(in_pairs(weight, head_dim=8), plain_pairs(weight, head_dim=8))


def test_the_tokenizer_travels_with_the_model(tmp_path):
    """The same text has the same tokens, also those that control the model."""
    tokenizer = tokenizer_of()
    model = model_of("Llama")
    export_to_gguf(
        model,
        path=tmp_path / "model.gguf",
        kind="f16",
        tokenizer=tokenizer,
        pre_tokenizer="smollm",
    )
    back = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    text = "hello<end>lhel"
    assert back(text, add_special_tokens=False)["input_ids"] == tokenizer(text)["input_ids"]
    assert back.eos_token_id == tokenizer.eos_token_id


def test_heads_that_were_pruned_away_make_no_other_wider(tmp_path):
    """llama.cpp divides the hidden size by the heads, unless the file says how wide one is."""
    model = small_model("Llama", num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    export_to_gguf(model, path=tmp_path / "model.gguf", kind="f32")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    for name in ("key_length", "value_length"):
        assert fields[f"llama.attention.{name}"].contents() == 16


@pytest.mark.parametrize("begins", [False, True])
def test_the_first_token_of_a_text(begins, tmp_path):
    """Llama 3 puts one before each text; without it in the file llama.cpp would not."""
    tokenizer = tokenizer_of()
    if begins:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<end> $A", special_tokens=[("<end>", tokenizer.bos_token_id)]
        )
    path = tmp_path / "model.gguf"
    export_to_gguf(model_of("Llama"), path=path, tokenizer=tokenizer, pre_tokenizer="smollm")
    field = gguf.GGUFReader(path).fields["tokenizer.ggml.add_bos_token"]
    assert field.contents() is begins  # processors: from tokenizers


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    model = model_of("Llama")
    path = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match="give the name of a file"):
        export_to_gguf(model, path=tmp_path / "model.bin")
    with pytest.raises(ValueError, match="path=None: give the name of a file"):
        export_to_gguf(model, path=None)
    with pytest.raises(ValueError, match="kind='q3'"):
        export_to_gguf(model, path=path, kind="q3")
    with pytest.raises(ValueError, match="Qwen3ForCausalLM is no model of"):
        export_to_gguf(small_model("Qwen3"), path=path)
    with pytest.raises(ValueError, match="32 does not divide"):
        export_to_gguf(small_model("Llama", hidden_size=40), path=path)
    with pytest.raises(ValueError, match="biases"):
        export_to_gguf(small_model("Llama", attention_bias=True), path=path)
    stretched = ROPE | {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ValueError, match="rope_type='linear'"):
        export_to_gguf(small_model("Llama", rope_parameters=stretched), path=path)
    with pytest.raises(ValueError, match="give pre_tokenizer"):
        export_to_gguf(model, path=path, tokenizer=tokenizer_of())
    with pytest.raises(ValueError, match="no tokenizer with merges"):
        export_to_gguf(model, path=path, tokenizer=object())
    with pytest.raises(ValueError, match="token 127, and the model 64"):
        export_to_gguf(small_model("Llama", vocab_size=64), path=path, tokenizer=tokenizer_of())
    with pytest.raises(ValueError, match="quantized by apply_int8"):
        export_to_gguf(apply_int8(model_of("Llama")), path=path)
    with pytest.raises(ValueError, match=r"llama\.cpp computes silu"):
        export_to_gguf(small_model("Llama", hidden_act="gelu"), path=path)
    windowed = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    with pytest.raises(ValueError, match="a window of 4 tokens"):
        export_to_gguf(small_model("Qwen2", **windowed), path=path)
    masked = apply_pruning(model_of("Llama"), share=0.5)
    with pytest.raises(ValueError, match=r"no name for .*original: a technique has changed"):
        export_to_gguf(masked, path=path)
    large = model_of("Llama")
    large.lm_head.weight.data[0, 0] = 1e5
    with pytest.raises(ValueError, match="16 bits end at 65504"):
        export_to_gguf(large, path=path, kind="f16")
    large.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        export_to_gguf(large, path=path)
    with pytest.raises(ValueError, match="does not exist: write it with export_to_gguf"):
        load_gguf(path)
    assert list(tmp_path.iterdir()) == []
