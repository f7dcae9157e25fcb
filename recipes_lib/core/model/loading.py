"""A pretrained model, its configuration and its tokenizer, by name.

A name is `smollm2`, a hub id, a local folder or, for a model, a key of `SHAPES`.
"""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model.default_model import SMOLLM2, offline, quiet, resolve
from recipes_lib.core.model.recurrence_kernels import slow_recurrence
from recipes_lib.core.model.shapes import SHAPES, model_of_shape

LONGEST_REASON = 200  # characters of a library's error, in a message


def load_model(
    name: str = "smollm2", *, dtype: torch.dtype = torch.float32, device: str | None = None
) -> Any:
    """Load a causal LM in training mode: `smollm2`, a hub id, a local folder or a key of `SHAPES`.

    A shape has random weights. Warns of a hybrid model without its kernels. Raises ValueError if
    there is no such model.
    """
    from transformers import AutoModelForCausalLM

    if name in SHAPES:
        return model_of_shape(name, dtype=dtype, device=device)
    where = resolve(name)
    local = {"local_files_only": offline(where)}
    with _explained_file_error("a causal language model", name, where), quiet():
        # transformers also looks for an adapter beside the model: that needs the options, too.
        model = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, adapter_kwargs=local, **_options_of_loading(where)
        )
    sentence = slow_recurrence(model)
    if sentence:
        warnings.warn(sentence, stacklevel=2)
    if name == "smollm2":
        # What is saved later names the hub as its base, and not a folder of this machine.
        model.name_or_path = SMOLLM2
        model.config._name_or_path = SMOLLM2
    # from_pretrained returns eval mode; a recipe trains, and generation asks for eval itself.
    if device is None:
        device = machine().device
    return model.to(device).train()


def load_config(name: str = "smollm2") -> Any:
    """Load the configuration that belongs to `load_model(name)`: its sizes, without its weights."""
    from transformers import AutoConfig

    where = resolve(name)
    with _explained_file_error("a causal language model", name, where):
        return AutoConfig.from_pretrained(where, **_options_of_loading(where))


def model_without_weights(name: str = "smollm2", *, dtype: torch.dtype = torch.float32) -> Any:
    """The model of `load_model(name)` on the device "meta": its sizes, without any data.

    Only the configuration is read. Of a model with images or sounds this is the part for text,
    where that is a model by itself. Weights that are stored in few bits count as those of `dtype`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    kind = AutoModelForCausalLM
    # A copy, because from_config writes the dtype into the configuration that it is given.
    config = copy.deepcopy(load_config(name))
    if type(config.get_text_config()) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        config = config.get_text_config()
    elif type(config) in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        kind = AutoModelForImageTextToText
    try:
        with torch.device("meta"):
            return kind.from_config(config, dtype=dtype).train()
    except ValueError as error:
        raise ValueError(
            f"{name!r} has the configuration of a {config.model_type}, which is no causal language "
            f"model: give one that writes text"
        ) from error


def load_tokenizer(name: str = "smollm2") -> Any:
    """Load the tokenizer that belongs to `load_model(name)`; it always has a padding token."""
    from transformers import AutoTokenizer

    if name in SHAPES and SHAPES[name].vocabulary == SHAPES["smollm2-135m"].vocabulary:
        name = "smollm2"  # random weights for its tokens
    where = resolve(name)
    with _explained_file_error("a tokenizer", name, where):
        tokenizer = AutoTokenizer.from_pretrained(where, **_options_of_loading(where))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def kept_in_fp32(model: Any, dtype: torch.dtype) -> set[str]:
    """The names of the parameters of a Hugging Face model that stay in fp32 beside `dtype`.

    A router that is rounded sends tokens to other experts, and some recurrences lose their memory.
    So many families name such parameters, some for fp16 alone, and `from_pretrained(dtype=…)`
    leaves them in fp32. What is rounded by hand has to.
    """
    patterns = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        patterns |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not patterns:
        return set()
    # As in transformers: a part of the name, in which a star stands for anything.
    parts = [re.escape(pattern).replace(r"\*", ".*") for pattern in sorted(patterns)]
    named = re.compile("|".join(parts))
    return {name for name, _ in model.named_parameters() if named.search(name)}


def _options_of_loading(where: str) -> dict[str, Any]:
    # Code from a stranger's folder is refused: by default the libraries would ask whether to run
    # it, and a program that runs alone would wait for the answer.
    return {"local_files_only": offline(where), "trust_remote_code": False}


@contextlib.contextmanager
def _explained_file_error(part: str, name: str, where: str) -> Iterator[None]:
    """What a library raises for a model's missing or damaged file, as a ValueError."""
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
