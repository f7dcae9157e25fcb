"""What each part of `benchmarks.gpu` is given on each kind of machine, by names of arguments.

The sizes fill a machine of their tier and end within the seconds of `gpu.CALLS`. FAST is for tests:
it proves that the code runs.

    full            full fine-tuning, for `versus`
    qlora           the largest shape for QLoRA
    rope            arguments of `rope.stretched`
    lengths         arguments of `card_lengths.card_lengths`
    longest, context
                    arguments of the functions in `long_steps`

"layers": None takes all layers of the shape.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes_lib.core.measure.machine import fast, machine

GB = 10**9  # what is printed on a card
MIB = 2**20
SMALL = ("llama-3.2-1b", "llama-3.2-3b")
SHAPES = (*SMALL, "llama-3.1-8b")

FAST: dict[str, dict[str, Any]] = {
    "full": {"shape": "tiny-llama", "layers": 4, "batch_size": 4, "seq_len": 32},
    "qlora": {"shape": "tiny-llama", "layers": 2, "rows": 2, "tokens": 32},
    "rope": {"seq_len": 300, "window": 100, "texts": 1},
    "lengths": {"shapes": ("tiny-llama",), "card": "T4", "most": 128, "cut": True},
    "longest": {"shape": "tiny-llama", "layers": 4, "seq_len": 300},
    "context": {"shape": "tiny-llama", "layers": 2, "most": 512, "cap": 3 * MIB},
}

CPU: dict[str, dict[str, Any]] = {
    "full": {"shape": "smollm2-135m", "layers": 30, "batch_size": 4, "seq_len": 64},
    "qlora": {"shape": "smollm2-135m", "layers": None, "rows": 4, "tokens": 64},
    "rope": {"seq_len": 12288, "window": 1024, "texts": 3},
    "lengths": {"shapes": ("smollm2-135m",), "card": "T4", "most": 1024, "cut": True},
    "longest": {"shape": "smollm2-135m", "layers": None, "seq_len": 2048},
    "context": {"shape": "smollm2-135m", "layers": 4, "most": 8192, "cap": 400 * MIB},
}

GPU_16: dict[str, dict[str, Any]] = {
    "full": {"shape": "llama-3.2-1b", "layers": 5, "batch_size": 8, "seq_len": 256},
    "qlora": {"shape": "llama-3.2-3b", "layers": None, "rows": 8, "tokens": 512},
    "rope": {"seq_len": 14336, "window": 1024, "texts": 3},
    "lengths": {"shapes": SMALL, "card": "T4", "most": 65536},
    "longest": {"shape": "llama-3.2-1b", "layers": 4, "seq_len": 65536},
    "context": {"shape": "llama-3.2-1b", "layers": None, "most": 65536, "cap": 14 * GB},
}

GPU_24: dict[str, dict[str, Any]] = {
    "full": {"shape": "llama-3.2-1b", "layers": 11, "batch_size": 8, "seq_len": 256},
    "qlora": {"shape": "llama-3.1-8b", "layers": None, "rows": 8, "tokens": 1024},
    "rope": {"seq_len": 16384, "window": 1024, "texts": 4},
    "lengths": {"shapes": SHAPES, "card": "L4", "most": 65536},
    "longest": {"shape": "llama-3.2-1b", "layers": None, "seq_len": 131072},
    "context": {"shape": "llama-3.1-8b", "layers": None, "most": 65536, "cap": 23 * GB},
}

GPU_80: dict[str, dict[str, Any]] = {
    "full": {"shape": "llama-3.2-3b", "layers": 28, "batch_size": 8, "seq_len": 256},
    "qlora": {"shape": "qwen2.5-32b", "layers": None, "rows": 8, "tokens": 1024},
    "rope": {"seq_len": 16384, "window": 1024, "texts": 8},
    "lengths": {"shapes": SHAPES, "card": "RTX 4090", "most": 140_000},
    "longest": {"shape": "llama-3.1-8b", "layers": None, "seq_len": 393216},
    # QLoRA of an 8B shape as on a card of 24 GB.
    "context": {"shape": "llama-3.1-8b", "layers": None, "most": 262144, "cap": 24 * GB},
}

TIER_SIZES = {"cpu": CPU, "gpu16": GPU_16, "gpu24": GPU_24, "gpu80": GPU_80}


def training_dtype() -> torch.dtype:
    """bf16 on a GPU that multiplies it natively, else fp32."""
    if machine().device == "cuda" and machine().native_bf16:
        return torch.bfloat16
    return torch.float32


def size_of(part: str) -> dict[str, Any]:
    """The sizes of a part on this machine, or the small ones under RECIPES_FAST=1."""
    if fast():
        return FAST[part]
    return TIER_SIZES[machine().tier][part]
