"""Random weights of a public model's shape, with its sizes by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from recipes_lib.core.checks import check_choice
from recipes_lib.core.measure.machine import machine


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
    head: int | None = None  # its width, where heads and hidden size do not say it


SHAPES = {
    "smollm2-135m": ModelShape(576, 1536, 30, 9, 3, 49152, True, "Llama"),
    "llama-3.2-1b": ModelShape(2048, 8192, 16, 32, 8, 128256, True, "Llama"),
    "llama-3.2-3b": ModelShape(3072, 8192, 28, 24, 8, 128256, True, "Llama"),
    "llama-3.1-8b": ModelShape(4096, 14336, 32, 32, 8, 128256, False, "Llama"),
    "llama-3.1-70b": ModelShape(8192, 28672, 80, 64, 8, 128256, False, "Llama"),
    "llama-2-7b": ModelShape(4096, 11008, 32, 32, 32, 32000, False, "Llama"),
    "llama-2-70b": ModelShape(8192, 28672, 80, 64, 8, 32000, False, "Llama"),
    "mistral-7b": ModelShape(4096, 14336, 32, 32, 8, 32000, False, "Mistral"),
    "qwen2.5-0.5b": ModelShape(896, 4864, 24, 14, 2, 151936, True, "Qwen2"),
    "qwen2.5-1.5b": ModelShape(1536, 8960, 28, 12, 2, 151936, True, "Qwen2"),
    "qwen2.5-3b": ModelShape(2048, 11008, 36, 16, 2, 151936, True, "Qwen2"),
    "qwen2.5-32b": ModelShape(5120, 27648, 64, 40, 8, 152064, False, "Qwen2"),
    "qwen3-8b": ModelShape(4096, 12288, 36, 32, 8, 151936, False, "Qwen3"),
    "qwen3-14b": ModelShape(5120, 17408, 40, 40, 8, 151936, False, "Qwen3"),
    "gemma-2-9b": ModelShape(3584, 14336, 42, 16, 8, 256000, True, "Gemma2", 256),
    # Mixtures of experts, of whose numbers the families' configurations have the same.
    "mixtral-8x7b": ModelShape(4096, 14336, 32, 32, 8, 32000, False, "Mixtral"),
    "qwen3-30b-a3b": ModelShape(2048, 6144, 48, 32, 4, 151936, False, "Qwen3Moe", 128),
    "tiny-llama": ModelShape(64, 160, 2, 4, 2, 128, True, "Llama"),
    "tiny-qwen2": ModelShape(64, 160, 2, 4, 2, 128, True, "Qwen2"),
    "tiny-qwen3": ModelShape(64, 160, 2, 4, 2, 128, True, "Qwen3"),
    "tiny-mistral": ModelShape(64, 160, 2, 4, 2, 128, False, "Mistral"),
    "tiny-gemma2": ModelShape(64, 160, 2, 4, 2, 128, True, "Gemma2"),
    "tiny-gpt2": ModelShape(64, 256, 2, 4, 4, 128, True, "GPT2"),
    # For SmolLM2's tokenizer, where a notebook only has to show that it runs.
    "tiny-smollm2": ModelShape(64, 192, 2, 8, 4, 49152, True, "Llama"),
}


def model_of_shape(
    shape: str,
    *,
    layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
) -> Any:
    """Build random weights of a public model's shape (a key of `SHAPES`), or of fewer layers."""
    import transformers

    check_choice(SHAPES, shape=shape)
    sizes = SHAPES[shape]
    if layers is None:
        layers = sizes.layers
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
    """The sizes of a public shape by the names that the family's configuration has for them."""
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
        "head_dim": sizes.head if sizes.head is not None else sizes.hidden // sizes.heads,
    }
