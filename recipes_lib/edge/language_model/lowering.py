"""From weights to a file: ExecuTorch's `export_llama`, told everything that it would guess.

Left alone, `export_llama` downloads a model if there is no checkpoint, takes 10,000 as the base of
the rotation, rounds the output layer to four bits and skips layers that its group does not divide.
None of this says a word. So all of it is given here, and counted afterwards.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes_lib.edge._exported_file import Delegation, read_delegation
from recipes_lib.edge._noise import noise_to
from recipes_lib.edge.language_model.weights import head_width, llama_weights

# One that `export_llama` never downloads. All of them are built from the same source.
MODEL_CLASS = "llama3"
# What a product of a linear layer becomes. One of these outside of XNNPACK is a slow plain loop.
PRODUCTS = ("linear", "addmm", "mm")


def lower(
    model: Any,
    *,
    path: Path,
    log: Path,
    weight_bits: int | None,
    group: int,
    output_bits: int | None,
    embedding_bits: int | None,
    custom_attention: bool,
    max_length: int,
    metadata: dict[str, Any],
) -> tuple[Delegation, int]:
    """Write a `.pte` of a Hugging Face model; arguments as in `export_language_model`.

    Returns which operators XNNPACK has taken, and how many linear layers are quantized. Weights and
    sizes lie beside `path` meanwhile. What the libraries print goes to `log`.
    """
    checkpoint = path.with_name("weights.pth")
    parameters = path.with_name("parameters.json")
    with noise_to(log), _own_logging(), _offline():
        weights = llama_weights(
            model,
            weight_bits=weight_bits,
            group=group,
            output_bits=output_bits,
            embedding_bits=embedding_bits,
        )
        torch.save(weights, checkpoint)
        del weights
        parameters.write_text(json.dumps(llama_parameters(model.config)))
        settings = _settings(
            checkpoint=checkpoint,
            parameters=parameters,
            path=path,
            custom_attention=custom_attention,
            max_length=max_length,
            metadata=metadata,
        )
        return _export(settings)


def llama_parameters(config: Any) -> dict[str, Any]:
    """The sizes of a model by ExecuTorch's names. What is missing there has a silent default."""
    rope = config.rope_parameters
    parameters = {
        "dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": head_width(config),
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "use_scaled_rope": rope["rope_type"] == "llama3",
        "use_hf_rope": False,
        "attention_qkv_bias": has_query_bias(config),
    }
    if rope["rope_type"] == "llama3":
        parameters["rope_scale_factor"] = rope["factor"]
        parameters["high_freq_factor"] = rope["high_freq_factor"]
    return parameters


def has_query_bias(config: Any) -> bool:
    """Whether queries, keys and values have a bias: always in Qwen2, in Llama by its settings."""
    return config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))


def _settings(
    *,
    checkpoint: Path,
    parameters: Path,
    path: Path,
    custom_attention: bool,
    max_length: int,
    metadata: dict[str, Any],
) -> Any:
    from executorch.extension.llm.export.config.llm_config import LlmConfig, ModelType

    settings = LlmConfig()
    settings.base.model_class = ModelType(MODEL_CLASS)
    settings.base.checkpoint = str(checkpoint)
    settings.base.params = str(parameters)
    settings.base.metadata = json.dumps(metadata)
    settings.model.use_kv_cache = True
    settings.model.use_sdpa_with_kv_cache = custom_attention
    settings.export.max_seq_length = max_length
    settings.export.max_context_length = max_length
    settings.export.output_name = str(path)
    settings.backend.xnnpack.enabled = True
    settings.backend.xnnpack.extended_ops = True  # 10 % faster
    # The weights are on their grids already.
    settings.quantization.qmode = None
    settings.quantization.embedding_quantize = None
    return settings


def _export(settings: Any) -> tuple[Delegation, int]:
    from executorch.examples.models.llama import export_llama_lib

    # The public `export_llama` returns only the file's name. This is what it calls: it also
    # returns the lowered program.
    builder = export_llama_lib._export_llama(settings)
    graph_module = builder.edge_manager.exported_program().graph_module
    return read_delegation(graph_module), _quantized_linears(builder.model)


def _quantized_linears(model: nn.Module) -> int:
    from torchao.quantization import IntxUnpackedToInt8Tensor

    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return sum(isinstance(linear.weight, IntxUnpackedToInt8Tensor) for linear in linears)


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """Afterwards the root logger has its own handlers: an import of ExecuTorch gives it others."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    level = root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Should a version of the library ever ask the hub, it is told that there is none."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
