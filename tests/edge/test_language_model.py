"""Two exports for all tests: the fp32 file, and a quantized one without the custom attention."""

import contextlib
import logging
import socket

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from recipes_lib.core.data.evaluation import GREEDY
from recipes_lib.core.model.integer_grid import on_grid, to_grid
from recipes_lib.edge import language_model
from recipes_lib.edge.language_model import (
    export_language_model,
    load_language_model,
    plain_greedy,
    plain_pairs,
    predicted_bytes,
)
from recipes_lib.edge.language_model.lowering import MODEL_CLASS, llama_parameters
from recipes_lib.edge.language_model.runtime import answer_in_cpp
from recipes_lib.edge.language_model.weights import in_pairs, llama_weights, on_linear_grid
from recipes_lib.precision.int8 import apply_int8
from recipes_lib.precision.quantization_aware import (
    apply_quantization_aware,
    convert_quantization_aware,
)
from tests.small_models import as_if_trained, small_model

LENGTH = 48  # positions of the caches
# An odd number of heads, one of which serves three, and angles that are not the default ones.
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 3e4},
    "rms_norm_eps": 1e-4,
}
GROUP = 32
TEXT = torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(1))
ROWS = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in TEXT]


def model_of(family="Llama", **options):
    torch.manual_seed(0)
    return as_if_trained(small_model(family, **SHAPE | options))


def ascii_tokenizer():
    """256 tokens: printable letters, and numbers of two and three digits."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ"]
    digits = "0123456789"
    merges = [(first, second) for first in digits for second in digits]
    merges += [(first + second, third) for first, second in merges for third in digits]
    merges = merges[: 256 - len(letters)]
    words = letters + ["".join(pair) for pair in merges]
    vocabulary = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="~")


@contextlib.contextmanager
def no_network():
    """An export that asks for anything outside of this machine fails."""

    def refuse(*args, **kwargs):
        raise AssertionError("the export uses the network")

    before = (socket.socket.connect, socket.getaddrinfo)
    socket.socket.connect = socket.getaddrinfo = refuse
    try:
        yield
    finally:
        socket.socket.connect, socket.getaddrinfo = before


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Qwen2 with its biases in fp32: model, file, tokenizer."""
    pytest.importorskip("executorch")
    model = model_of("Qwen2", tie_word_embeddings=False)
    path = tmp_path_factory.mktemp("plain") / "model.pte"
    tokenizer = ascii_tokenizer()
    handlers = list(logging.getLogger().handlers)
    with no_network():
        exported = export_language_model(
            model, path=path, weight_bits=None, max_length=LENGTH, tokenizer=tokenizer
        )
    assert logging.getLogger().handlers == handlers
    return model, exported, tokenizer


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """A tied Llama that trains on a grid: model, file."""
    pytest.importorskip("executorch")
    model = apply_quantization_aware(model_of(tie_word_embeddings=True), group=GROUP).eval()
    path = tmp_path_factory.mktemp("quantized") / "model.pte"
    with no_network():
        exported = export_language_model(
            model, path=path, group=GROUP, custom_attention=False, max_length=LENGTH
        )
    return model, exported


# --- the fp32 file --------------------------------------------------------------------------------


def test_the_file_writes_what_the_model_writes(plain):
    """Rows in the wrong order, a forgotten bias, another angle or another epsilon: other tokens."""
    model, exported, _ = plain
    pte = load_language_model(exported.path)
    prompt = TEXT[:1, :10]
    with torch.no_grad():
        expected = model(prompt, use_cache=False).logits[0, -1]
        answer = model.generate(prompt, **GREEDY, max_new_tokens=30)[0, 10:].tolist()
    torch.testing.assert_close(pte.prefill(prompt), expected, atol=1e-4, rtol=1e-4)
    assert pte.greedy(prompt, 30) == answer
    assert pte.greedy(prompt[0].tolist(), 30) == answer, "a second text begins anew"

    def read(tokens, position):
        if position == 0:
            return pte.prefill(tokens)
        return pte.step(int(tokens), position)

    assert plain_greedy(read, prompt[0].tolist(), 30) == answer


def test_the_runner_in_cpp_writes_the_same(plain, tmp_path, capfd):
    """With the file's own ids of the end, and the two libraries imported that it needs."""
    model, exported, tokenizer = plain
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    pieces = []
    answer_in_cpp(
        exported.path,
        tmp_path / "tokenizer.json",
        "hello",
        new_tokens=8,
        on_token=pieces.append,
    )
    prompt = tokenizer("hello", return_tensors="pt")["input_ids"]
    answer = model.generate(prompt, **GREEDY, max_new_tokens=8)[0, 5:]
    assert "".join(pieces) == tokenizer.decode(answer)
    assert capfd.readouterr() == ("", "")


# --- the quantized file ---------------------------------------------------------------------------


def test_the_quantized_file_is_the_model_on_its_grid(quantized):
    """XNNPACK rounds the scales of groups to bf16, so it is near, and not equal."""
    model, exported = quantized
    pte = load_language_model(exported.path)
    with torch.no_grad():
        on_its_grid = model(TEXT, use_cache=False).logits
        loss = model(TEXT, labels=TEXT, use_cache=False).loss
        unrounded = model_of(tie_word_embeddings=True)(TEXT, use_cache=False).logits
    assert abs(torch.tensor(pte.perplexity(ROWS)).log() - loss) < 0.01
    # Rounding moves the logits five times as far as that, or more.
    error = (torch.stack([pte.prefill(row) for row in TEXT]) - on_its_grid[:, -1]).norm()
    assert error < 0.2 * (unrounded - on_its_grid)[:, -1].norm()


def test_all_linear_layers_are_with_xnnpack(quantized, plain):
    for exported in (quantized[1], plain[1]):
        row = exported.delegation.row("linear")
        assert (row.inside, row.outside) == (7 + 1, 0)
    assert plain[1].delegation.row("llama.custom_sdpa").outside == 1
    assert quantized[1].delegation.row("llama.custom_sdpa").outside == 0


def test_the_bytes_are_those_of_the_arithmetic(quantized, plain):
    """What comes on top is the plan of the graph, which does not grow with the widths."""
    assert 0 < quantized[1].bytes - predicted_bytes(quantized[0], group=GROUP) < 80_000
    assert 0 < plain[1].bytes - predicted_bytes(plain[0], weight_bits=None) < 80_000


def test_a_layer_that_was_left_out_is_an_error(quantized, monkeypatch, tmp_path):
    """As it is with groups that do not divide: the library leaves those layers in fp32."""
    model, exported = quantized

    def skip_some(*args, path, **kwargs):
        path.write_bytes(b"half")
        return exported.delegation, 5

    monkeypatch.setattr(language_model, "lower", skip_some)
    with pytest.raises(RuntimeError, match="5 of 8 linear layers"):
        export_language_model(model, path=tmp_path / "model.pte", group=GROUP)
    assert list(tmp_path.iterdir()) == []


# --- weights and settings -------------------------------------------------------------------------


def test_rows_in_pairs_are_those_of_the_plain_lines():
    weight = torch.randn(24, 5)
    assert torch.equal(in_pairs(weight, head_dim=8), plain_pairs(weight, head_dim=8))
    assert torch.equal(in_pairs(weight[:, 0], head_dim=8), in_pairs(weight, head_dim=8)[:, 0])


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, None)])
def test_torchao_has_the_grid_of_training(bits, group):
    pytest.importorskip("torchao")
    weight = torch.randn(48, 96)
    weight[3] = 0
    theirs = on_linear_grid(weight, bits=bits, group=group)
    levels, scales = to_grid(weight, bits=bits, group=group)
    assert torch.equal(theirs.qdata, levels)
    assert torch.equal(theirs.scale, scales)


def test_the_output_layer_has_bits_of_its_own():
    """It shares its weight with the embedding; in the file each has a copy of its own."""
    pytest.importorskip("torchao")
    model = model_of(tie_word_embeddings=True)
    before = model.lm_head.weight.clone()
    weights = llama_weights(model, weight_bits=4, group=32, output_bits=8, embedding_bits=8)
    assert weights["output.weight"].target_dtype == torch.int8
    assert weights["layers.0.attention.wq.weight"].target_dtype == torch.int4
    assert weights["tok_embeddings.weight"].activation_quantization is None
    assert torch.equal(model.lm_head.weight, before)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_settings_are_all_given():
    """What is missing in them has a silent default, such as 10,000 for the base of the angles."""
    stretched = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
    stretched |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = model_of(rope_parameters=stretched, max_position_embeddings=131072).config
    parameters = llama_parameters(config)
    assert parameters["rope_theta"] == 5e5
    assert parameters["use_scaled_rope"] and parameters["rope_scale_factor"] == 32
    config = model_of(
        rope_parameters=stretched | {"factor": 1.5}, max_position_embeddings=8192
    ).config
    assert llama_parameters(config)["rope_scale_factor"] == 1.5, "cut to 1, the angles are others"
    assert parameters["norm_eps"] == SHAPE["rms_norm_eps"]
    assert llama_parameters(model_of("Qwen2").config)["attention_qkv_bias"]


def test_the_model_class_is_none_that_is_downloaded(plain):
    from executorch.examples.models.llama import export_llama_lib

    assert MODEL_CLASS not in export_llama_lib.HUGGING_FACE_REPO_IDS
    assert MODEL_CLASS in export_llama_lib.EXECUTORCH_DEFINED_MODELS


# --- what is refused ------------------------------------------------------------------------------


def test_other_models_are_refused_before_anything_is_written(tmp_path):
    def refused(model, words, **options):
        with pytest.raises(ValueError, match=words):
            export_language_model(model, path=tmp_path / "model.pte", **options)

    refused(nn.Linear(2, 2), "no Hugging Face model")
    refused(model_of("Qwen3"), "Qwen3ForCausalLM is no model of")
    refused(model_of("Gemma"), "GemmaForCausalLM is no model of")
    refused(model_of(hidden_act="gelu"), "hidden_act='gelu'")
    refused(model_of(attention_bias=True), r"no place for .*o_proj\.bias")
    refused(model_of(mlp_bias=True), r"no place for .*gate_proj\.bias")
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    refused(model_of(rope_parameters=linear), "rope_type='linear'")
    refused(model_of("Mistral", sliding_window=16), "longer than the model's window", group=32)
    refused(apply_int8(model_of()), "quantized by apply_int8 already")
    converted = convert_quantization_aware(apply_quantization_aware(model_of(), group=32))
    refused(converted, "quantized by convert_quantization_aware already", group=32)
    windowed = model_of()
    windowed.config._attn_implementation = "recipes_sliding_window"
    refused(windowed, "would hold full attention", group=32)
    own = model_of()
    own.model.layers[0].mlp.up_proj.__class__ = type(
        "Doubled", (nn.Linear,), {"forward": nn.Linear.extra_repr}
    )
    refused(own, r"layers\.0\.mlp\.up_proj is a Doubled: give a model with nn\.Linear", group=32)
    broken = model_of()
    broken.model.norm.weight.data[0] = float("nan")
    refused(broken, "not finite: the model has diverged", group=32)
    refused(
        model_of(max_position_embeddings=64), "trained for 64 positions", max_length=65, group=32
    )
    assert list(tmp_path.iterdir()) == []


def test_a_text_has_to_end(tmp_path):
    """Without an end in the file, the runner in C++ stops at the token 2, whatever that is."""
    model = model_of(eos_token_id=None)
    tokenizer = ascii_tokenizer()
    tokenizer.eos_token = None
    model.generation_config.eos_token_id = None
    path = tmp_path / "model.pte"
    with pytest.raises(ValueError, match=r"no token that ends a text.*tokenizer\.eos_token"):
        export_language_model(model, path=path, group=32, tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []
    model.generation_config.eos_token_id = [7, 9]
    found = language_model._special_tokens(model, tokenizer)
    assert found["get_eos_ids"] == [7, 9], "those of the model, where the tokenizer has none"
    assert "get_eos_ids" in language_model._special_tokens(model, ascii_tokenizer())


def test_grids_that_do_not_fit_are_refused(tmp_path):
    def refused(model, words, **options):
        with pytest.raises(ValueError, match=words):
            export_language_model(model, path=tmp_path / "model.pte", **options)

    refused(model_of(), "has 96 inputs, which group=64 does not divide")
    refused(model_of(), "group=128 does not divide", group=128)
    refused(model_of(), "multiples of 32", group=16)
    # The least that divides: 16, and XNNPACK would refuse it.
    narrow = model_of(hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    refused(narrow, "divide: give weight_bits=8 and output_bits=8", group=32)
    refused(model_of(), "tokenizer is of type str", group=32, tokenizer="gpt2")
    refused(model_of(), "weight_bits=3", weight_bits=3)
    refused(model_of(), "embedding_bits=4", embedding_bits=4)
    refused(model_of(), "max_length=1", max_length=1)
    refused(model_of(), "output_bits=None", output_bits=None, group=32)
    coarse = apply_quantization_aware(model_of(), group=32, activation_bits=4)
    refused(coarse, "trains with activation_bits=4, and the file has 8", group=32)
    coarse = apply_quantization_aware(model_of(), group=32, embedding_bits=4)
    refused(coarse, "the embedding trains with weight_bits=4", group=32)
    aware = apply_quantization_aware(model_of(intermediate_size=96), group=96)
    refused(aware, "trains with weight_bits=4 and group=96", group=32)
    rounded = model_of()
    for layer in rounded.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = on_grid(layer.weight, bits=4, group=32)
    refused(rounded, "rounded to 4 bits already", group=32)
    with pytest.raises(ValueError, match=r"a file that ends in \.pte"):
        export_language_model(model_of(), path=tmp_path / "model.bin")
    with pytest.raises(ValueError, match="path=None: give the name of a file"):
        export_language_model(model_of(), path=None)
    assert list(tmp_path.iterdir()) == []


def test_texts_that_do_not_fit_are_refused(plain, exported, tmp_path):
    pte = load_language_model(plain[1].path)
    with pytest.raises(ValueError, match=f"room for {LENGTH - 1} and one more"):
        pte.prefill([1] * LENGTH)
    with pytest.raises(ValueError, match="Give fewer"):
        pte.greedy([1] * 20, LENGTH)
    with pytest.raises(ValueError, match=f"position={LENGTH}"):
        pte.step(1, LENGTH)
    with pytest.raises(ValueError, match="token=256"):
        pte.step(256, 0)
    with pytest.raises(ValueError, match="no target"):
        pte.perplexity([])
    with pytest.raises(ValueError, match="does not exist: write it with export_language_model"):
        load_language_model(tmp_path / "missing.pte")
    garbage = tmp_path / "garbage.pte"
    garbage.write_bytes(b"hello" * 100)
    for other in (garbage, exported.path):
        with pytest.raises(ValueError, match=f"{other.name} is no language model"):
            load_language_model(other)
    with pytest.raises(ValueError, match="would crash them"):
        load_language_model(plain[1].path, threads=2)
