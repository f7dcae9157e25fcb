"""One export for all tests: a quantized model with biases and a tied output layer."""

import contextlib
import logging
import socket

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from benchmarks.edge import perplexity_of
from recipes_lib.core.model.integer_grid import on_grid, to_grid
from recipes_lib.edge import language_model
from recipes_lib.edge._silenced_libraries import noise_to
from recipes_lib.edge.language_model import (
    export_language_model,
    load_language_model,
    predicted_bytes,
)
from recipes_lib.edge.language_model.weights import (
    llama_parameters,
    on_linear_grid,
    require_same_logits,
)
from recipes_lib.precision.int8 import apply_int8
from recipes_lib.precision.quantization_aware import apply_quantization_aware
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
def exported(tmp_path_factory):
    """A tied Qwen2, which has biases, that trains on a grid: model, file, tokenizer.

    An export takes half a minute, so all tests of the file have this one.
    """
    model = model_of("Qwen2", tie_word_embeddings=True)
    model = apply_quantization_aware(model, group=GROUP).eval()
    path = tmp_path_factory.mktemp("quantized") / "model.pte"
    tokenizer = ascii_tokenizer()
    handlers = list(logging.getLogger().handlers)
    with no_network():
        file = export_language_model(
            model, path=path, group=GROUP, max_length=LENGTH, tokenizer=tokenizer
        )
    assert logging.getLogger().handlers == handlers
    return model, file, tokenizer


# --- the file -------------------------------------------------------------------------------------


def test_the_file_is_the_model_on_its_grid(exported):
    """Rows in the wrong order, a forgotten bias, another angle or another epsilon: other logits.

    XNNPACK rounds the scales of groups to bf16, so it is near, and not equal.
    """
    model, file, _ = exported
    pte = load_language_model(file.path)
    with torch.no_grad():
        on_its_grid = model(TEXT, use_cache=False).logits
        loss = model(TEXT, labels=TEXT, use_cache=False).loss
        unrounded = model_of("Qwen2", tie_word_embeddings=True)(TEXT, use_cache=False).logits
    assert abs(torch.tensor(perplexity_of(pte, ROWS)).log() - loss) < 0.01
    # Rounding moves the logits five times as far as that, or more.
    error = (torch.stack([pte.prefill(row) for row in TEXT]) - on_its_grid[:, -1]).norm()
    assert error < 0.2 * (unrounded - on_its_grid)[:, -1].norm()


def test_the_runner_in_cpp_writes_the_same(exported, tmp_path):
    """A cache that does not begin anew; or a runner that does not stop where the file says."""
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    _, file, tokenizer = exported
    pte = load_language_model(file.path)  # registers the operators
    prompt = tokenizer("hello")["input_ids"]
    answer = pte.greedy(prompt, 8)
    assert pte.greedy(prompt, 8) == answer, "a second text begins anew"

    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    pieces = []
    with noise_to():
        runner = TextLLMRunner(str(file.path), str(tmp_path / "tokenizer.json"))
        settings = GenerationConfig(max_new_tokens=8, temperature=0.0, echo=False)
        runner.generate("hello", settings, pieces.append, lambda statistics: None)
    assert "".join(pieces) == tokenizer.decode(answer)


def test_all_linear_layers_are_with_xnnpack(exported):
    """A product outside would be right, and slow; plain attention has no operator of its own."""
    delegation = exported[1].delegation
    row = delegation.row("linear")
    assert (row.inside, row.outside) == (7 + 1, 0)
    assert delegation.row("llama.custom_sdpa").outside == 1


def test_the_bytes_are_those_of_the_arithmetic(exported):
    """What comes on top is the plan of the graph, which does not grow with the widths."""
    model, file, _ = exported
    assert 0 < file.bytes - predicted_bytes(model, group=GROUP) < 80_000


# --- weights and settings -------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, None)])
def test_torchao_has_the_grid_of_training(bits, group):
    """Another scale, such as max / 7.5: what was trained for is not what is stored."""
    weight = torch.randn(48, 96)
    weight[3] = 0
    theirs = on_linear_grid(weight, bits=bits, group=group)
    levels, scales = to_grid(weight, bits=bits, group=group)
    assert torch.equal(theirs.qdata, levels)
    assert torch.equal(theirs.scale, scales)


STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 1.5,  # cut to 1 as a whole number, the angles are others
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_3_stretches_its_angles_by_the_factor_of_the_model():
    """No angle of the sixteen tokens that are compared tells this factor from another."""
    model = model_of(rope_parameters=STRETCHED, max_position_embeddings=8192)
    parameters = llama_parameters(model.config)
    assert parameters["use_scaled_rope"] and parameters["rope_scale_factor"] == 1.5
    require_same_logits(model, None, GROUP)


# --- what the comparison refuses ------------------------------------------------------------------


def aware(**options):
    return apply_quantization_aware(model_of(intermediate_size=96), **options).eval()


DIFFERENT = {
    "biases": lambda: model_of(attention_bias=True, mlp_bias=True),
    "trained in other groups": lambda: aware(group=96),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_model_than_the_file_would_hold_is_refused(name, tmp_path):
    """Names and parts without a place are dropped by ExecuTorch, and the file talks nonsense."""
    with pytest.raises(ValueError, match="logits that are off by"):
        export_language_model(DIFFERENT[name](), path=tmp_path / "model.pte", group=32)
    assert not (tmp_path / "model.pte").exists()


# --- what sixteen tokens do not show --------------------------------------------------------------


def with_its_own_window():
    model = model_of()
    model.config._attn_implementation = "recipes_sliding_window"
    return model


def rounded():
    """Stored on the grid of 4 bits, without a mark."""
    model = model_of()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = on_grid(layer.weight, bits=4, group=32)
    return model


REFUSED = {
    "linear": (
        lambda: model_of(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        {},
        "rope_type='linear'",
    ),
    "angles": (
        lambda: model_of(rope_parameters=STRETCHED | {"low_freq_factor": 2.0}),
        {},
        "low_freq_factor=2.0",
    ),
    "first length": (
        lambda: model_of(rope_parameters=STRETCHED | {"original_max_position_embeddings": 4096}),
        {},
        "original_max_position_embeddings=4096",
    ),
    "window": (lambda: model_of("Mistral", sliding_window=16), {}, "longer than the model's wind"),
    "window of a technique": (with_its_own_window, {}, "would hold full attention"),
    "int8": (lambda: apply_int8(model_of()), {}, "quantized by apply_int8 already"),
    "rounded": (rounded, {}, "rounded to 4 bits already"),
    "group": (model_of, {"group": 64}, "has 96 inputs, which group=64 does not divide"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_comparison_cannot_see_is_refused(name, tmp_path):
    """Longer texts would show it, or nothing would: the file runs in every case."""
    make, options, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        export_language_model(make(), path=tmp_path / "model.pte", **{"group": 32} | options)
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
    model.generation_config.eos_token_id = [7, 9]
    found = language_model._special_tokens(model, tokenizer)
    assert found["get_eos_ids"] == [7, 9], "those of the model, where the tokenizer has none"


def test_texts_that_do_not_fit_are_refused(exported):
    """The runtime would write behind the end of the cache."""
    pte = load_language_model(exported[1].path)
    with pytest.raises(ValueError, match=f"room for {LENGTH - 1} and one more"):
        pte.prefill([1] * LENGTH)
    with pytest.raises(ValueError, match=f"position={LENGTH}"):
        pte.step(1, LENGTH)
