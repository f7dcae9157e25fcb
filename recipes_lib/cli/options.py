"""Options that several commands take, and the names that their help shows.

The names are written down, because what knows them imports torch. A test compares the two.
"""

from __future__ import annotations

from typing import Annotated

import typer

PUBLIC_SHAPES = (
    "smollm2-135m",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-2-7b",
    "llama-2-70b",
    "mistral-7b",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-32b",
    "qwen3-8b",
    "gemma-2-9b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
)
# Those of the bench.
TECHNIQUES = (
    "activation_checkpointing",
    "activation_offload",
    "chunked_cross_entropy",
    "compiled_blocks",
    "eight_bit_adam",
    "gradient_accumulation",
    "lora",
    "mixed_precision",
    "nested_checkpointing",
    "optimizer_in_backward",
    "optimizer_offload",
    "qlora",
    "sixteen_bit_adam",
    "tiled_mlp",
)

MODEL_HELP = f"hub id, folder, or a shape: {', '.join(PUBLIC_SHAPES)}"

BatchSize = Annotated[int, typer.Option(help="rows of the batch")]
SeqLen = Annotated[int, typer.Option(help="tokens of a row")]
