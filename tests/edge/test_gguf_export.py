"""A language model as one file for llama.cpp, read back by transformers."""

import gguf
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipes_lib.compression.pruning import apply_pruning
from recipes_lib.edge.gguf_export import export_to_gguf, load_gguf, plain_q8_0
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


def bytes_of_weights(model, kind):
    bits = {"f32": 32, "f16": 16, "q8_0": 8.5}[kind]
    total = 0
    for parameter in model.parameters():
        total += parameter.numel() * (4 if parameter.dim() == 1 else bits / 8)
    return total


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_the_file_gives_the_same_model(family, options, tmp_path):
    """transformers reads it: in fp32 the logits are equal, in 16 and 8 bits they are near."""
    model = model_of(family, **options)
    expected = logits_of(model)
    for kind, tolerance in (("f32", 1e-5), ("f16", 3e-3), ("q8_0", 3e-2)):
        exported = export_to_gguf(model, path=tmp_path / f"{kind}.gguf", kind=kind)
        error = (logits_of(load_gguf(exported.path)) - expected).norm() / expected.norm()
        assert error < tolerance, kind
        settings = exported.bytes - bytes_of_weights(model, kind)
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


def test_the_file_stops_where_the_model_stops(tmp_path):
    """The mistake: the mark of the base alone, and answers that never end."""
    model, tokenizer = model_of("Llama"), tokenizer_of()
    model.generation_config.eos_token_id = [5, 7]
    options = {"tokenizer": tokenizer, "pre_tokenizer": "smollm"}
    exported = export_to_gguf(model, path=tmp_path / "model.gguf", **options)
    fields = gguf.GGUFReader(exported.path).fields
    stops = [fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("eos", "eot", "eom")]
    assert stops == [5, 7, tokenizer.eos_token_id]


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


ROLLING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
REFUSED = {
    "biases": (lambda: small_model("Llama", attention_bias=True), {}, "biases"),
    "window": (lambda: small_model("Qwen2", **ROLLING), {}, "a window of 4 tokens"),
    "masks": (lambda: apply_pruning(model_of("Llama"), share=0.5), {}, "GGUF has no name for"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_would_compute_differently_is_refused(name, tmp_path):
    """The file would load, and answer something else; nothing is written."""
    make, options, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        export_to_gguf(make(), path=tmp_path / "model.gguf", **options)
    assert list(tmp_path.iterdir()) == []
