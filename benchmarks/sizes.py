"""What each part of `benchmarks.gpu` is given on each kind of machine, by names of arguments.

The sizes fill a machine of their tier and end within the seconds of `gpu.CALLS`. FAST is for tests:
it proves that the code runs.

    full        full fine-tuning, for `ladder`, `versus` and the updates in `finetune`
    qlora       the largest shape for QLoRA
    finetune    see `benchmarks.finetune.Sizes`
    ranks, rank_libraries, experts
                arguments of the functions in `one_rank`
    the others  arguments of the functions in `long_sequences` and `long_steps`

"layers": None takes all layers of the shape.
"""

from __future__ import annotations

from typing import Any

from recipes_lib.core.measure.machine import GIB, fast, machine

GB = 10**9  # what is printed on a card
MIB = 2**20

# Llama-like models over bytes for the parts on one rank.
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
SMALL = NARROW | {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
WIDE = SMALL | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
}


def one_rank(model: dict[str, int], *, rows: int, tokens: int, steps: int) -> dict[str, Any]:
    """What the parts with one rank have in common; `model` is one of those above."""
    training = {"sizes": model, "rows": rows, "tokens": tokens, "steps": steps}
    return {"ranks": training, "rank_libraries": training}


def wide(layers: int) -> dict[str, int]:
    """The wide model with so many blocks."""
    return WIDE | {"num_hidden_layers": layers}


FAST: dict[str, dict[str, Any]] = {
    "full": {"shape": "tiny-llama", "layers": 4, "batch_size": 4, "seq_len": 32},
    "qlora": {"shape": "tiny-llama", "layers": 2, "rows": 2, "tokens": 32},
    "finetune": {
        "shape": "tiny-llama",
        "layers": 2,
        "documents": 3,
        "max_tokens": 128,
        "packs": 2,
        "steps": 3,
        "gradient_checkpointing": True,
    },
    "attention": {"shape": "tiny-llama", "lengths": [64, 128], "eager_to": 128},
    "loss": {"tokens": 128, "hidden": 64, "vocab": 1024},
    "rope": {"seq_len": 300, "window": 100, "texts": 1},
    "ablation": {"shape": "tiny-llama", "layers": 3, "cap": 5 * MIB},
    "longest": {"shape": "tiny-llama", "layers": 4, "seq_len": 300},
    "context": {"shape": "tiny-llama", "layers": 2, "most": 512, "cap": 3 * MIB},
    **one_rank(NARROW, rows=4, tokens=32, steps=3),
    "experts": {
        "hidden": 64,
        "width": 32,
        "experts": 8,
        "layers": 2,
        "rows": 2,
        "tokens": 32,
        "rounds": 1,
    },
}

CPU: dict[str, dict[str, Any]] = {
    "full": {"shape": "smollm2-135m", "layers": 30, "batch_size": 4, "seq_len": 64},
    "qlora": {"shape": "smollm2-135m", "layers": None, "rows": 4, "tokens": 64},
    "finetune": {
        "shape": "smollm2-135m",
        "layers": 4,
        "documents": 6,
        "max_tokens": 256,
        "packs": 4,
        "steps": 4,
        "gradient_checkpointing": False,
    },
    "attention": {
        "shape": "smollm2-135m",
        "lengths": [1024, 2048, 4096, 8192, 16384],
        "eager_to": 4096,
    },
    "loss": {"tokens": 2048, "hidden": 576, "vocab": 49152},
    "rope": {"seq_len": 12288, "window": 1024, "texts": 3},
    "ablation": {"shape": "smollm2-135m", "layers": 4, "cap": GIB},
    "longest": {"shape": "smollm2-135m", "layers": None, "seq_len": 2048},
    "context": {"shape": "smollm2-135m", "layers": 4, "most": 8192, "cap": 400 * MIB},
    **one_rank(SMALL, rows=8, tokens=128, steps=5),
    "experts": {
        "hidden": 256,
        "width": 256,
        "experts": 8,
        "layers": 4,
        "rows": 4,
        "tokens": 128,
        "rounds": 3,
    },
}

GPU_16: dict[str, dict[str, Any]] = {
    "full": {"shape": "llama-3.2-1b", "layers": 5, "batch_size": 8, "seq_len": 256},
    "qlora": {"shape": "llama-3.2-3b", "layers": None, "rows": 8, "tokens": 512},
    "finetune": {
        "shape": "llama-3.2-3b",
        "layers": None,
        "documents": 6,
        "max_tokens": 512,
        "packs": 4,
        "steps": 6,
        "gradient_checkpointing": True,
    },
    "attention": {"shape": "llama-3.2-1b", "lengths": [1024, 4096, 16384], "eager_to": 4096},
    "loss": {"tokens": 4096, "hidden": 2048, "vocab": 128256},
    "rope": {"seq_len": 14336, "window": 1024, "texts": 3},
    "ablation": {"shape": "llama-3.2-1b", "layers": 4, "cap": 13 * GB},
    "longest": {"shape": "llama-3.2-1b", "layers": 4, "seq_len": 65536},
    "context": {"shape": "llama-3.2-1b", "layers": None, "most": 65536, "cap": 14 * GB},
    **one_rank(wide(4), rows=8, tokens=256, steps=6),
    "experts": {
        "hidden": 1024,
        "width": 1024,
        "experts": 8,
        "layers": 4,
        "rows": 8,
        "tokens": 256,
        "rounds": 5,
    },
}

GPU_24: dict[str, dict[str, Any]] = {
    "full": {"shape": "llama-3.2-1b", "layers": 11, "batch_size": 8, "seq_len": 256},
    "qlora": {"shape": "llama-3.1-8b", "layers": None, "rows": 8, "tokens": 1024},
    "finetune": {
        "shape": "llama-3.1-8b",
        "layers": None,
        "documents": 8,
        "max_tokens": 512,
        "packs": 6,
        "steps": 6,
        "gradient_checkpointing": True,
    },
    "attention": {
        "shape": "llama-3.1-8b",
        "lengths": [1024, 4096, 16384, 65536],
        "eager_to": 8192,
    },
    "loss": {"tokens": 8192, "hidden": 4096, "vocab": 128256},
    "rope": {"seq_len": 16384, "window": 1024, "texts": 4},
    "ablation": {"shape": "llama-3.2-1b", "layers": None, "cap": 21 * GB},
    "longest": {"shape": "llama-3.2-1b", "layers": None, "seq_len": 131072},
    "context": {"shape": "llama-3.1-8b", "layers": None, "most": 65536, "cap": 23 * GB},
    **one_rank(wide(8), rows=8, tokens=256, steps=6),
    "experts": {
        "hidden": 2048,
        "width": 1024,
        "experts": 8,
        "layers": 4,
        "rows": 8,
        "tokens": 512,
        "rounds": 5,
    },
}

GPU_80: dict[str, dict[str, Any]] = {
    "full": {"shape": "llama-3.2-3b", "layers": 28, "batch_size": 8, "seq_len": 256},
    "qlora": {"shape": "qwen2.5-32b", "layers": None, "rows": 8, "tokens": 1024},
    "finetune": {
        "shape": "llama-3.1-8b",
        "layers": None,
        "documents": 12,
        "max_tokens": 512,
        "packs": 8,
        "steps": 6,
        "gradient_checkpointing": False,
    },
    "attention": {
        "shape": "llama-3.1-8b",
        "lengths": [1024, 4096, 16384, 65536],
        "eager_to": 16384,
    },
    "loss": {"tokens": 8192, "hidden": 4096, "vocab": 128256},
    "rope": {"seq_len": 16384, "window": 1024, "texts": 8},
    "ablation": {"shape": "llama-3.1-8b", "layers": None, "cap": 76 * GB},
    "longest": {"shape": "llama-3.1-8b", "layers": None, "seq_len": 393216},
    # QLoRA of an 8B shape as on a card of 24 GB.
    "context": {"shape": "llama-3.1-8b", "layers": None, "most": 262144, "cap": 24 * GB},
    **one_rank(wide(16), rows=8, tokens=512, steps=6),
    "experts": {
        "hidden": 2048,
        "width": 1024,
        "experts": 8,
        "layers": 8,
        "rows": 8,
        "tokens": 1024,
        "rounds": 5,
    },
}

TIER_SIZES = {"cpu": CPU, "gpu16": GPU_16, "gpu24": GPU_24, "gpu80": GPU_80}


def size_of(part: str) -> dict[str, Any]:
    """The sizes of a part on this machine, or the small ones under RECIPES_FAST=1."""
    if fast():
        return FAST[part]
    return TIER_SIZES[machine().tier][part]
