"""What length costs: attention and loss beside the libraries, and texts beyond the training.

Parts of `benchmarks.gpu` that belong to notebook 04; those that train are in `long_steps`. Each
yields its content whenever there is more of it, so that a part which is cut keeps what it has.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from recipes_lib.architecture.rope import KINDS, apply_rope_scaling, position_losses
from recipes_lib.attention.flash import apply_flash_attention, best_kernel
from recipes_lib.core.data import load_text
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape
from recipes_lib.workflows.bench import kernels
from recipes_lib.workflows.bench.kernels import measure_attention


def training_dtype() -> torch.dtype:
    """bf16 on a GPU that multiplies it natively, else fp32."""
    if machine().device == "cuda" and machine().native_bf16:
        return torch.bfloat16
    return torch.float32


def compare_attention(*, shape: str, lengths: list[int], eager_to: int) -> Iterator[dict[str, Any]]:
    """Eager attention and the best kernel: seconds, TFLOP/s and bytes of one layer.

    Args:
        eager_to: the last length at which eager attention is tried, whose scores are [S, S].
    """
    model = model_of_shape(shape, layers=1, dtype=training_dtype())
    rows: list[dict[str, Any]] = []
    for seq_len in lengths:
        for kernel, cost in _attention_costs(model, seq_len, eager=seq_len <= eager_to).items():
            rows.append({"tokens": seq_len, "kernel": kernel} | cost._asdict())
        yield {"shape": shape, "why": best_kernel(model).why, "rows": rows}


def _attention_costs(model: Any, seq_len: int, *, eager: bool) -> dict[str, Any]:
    """Where eager's scores do not fit, that costs its row and no other."""
    if eager:
        try:
            return measure_attention(model, seq_len=seq_len, eager=True)
        except torch.OutOfMemoryError:
            pass
    return measure_attention(model, seq_len=seq_len, eager=False)


def compare_losses(*, tokens: int, hidden: int, vocab: int) -> Iterator[dict[str, Any]]:
    """The chunked loss beside plain cross-entropy, PyTorch's own fused one and Liger's."""
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab}
    costs = kernels.compare_losses(**sizes, dtype=training_dtype())
    yield sizes | {"ways": {name: vars(cost) for name, cost in costs.items()}}


def stretched(*, seq_len: int, window: int, texts: int) -> Iterator[dict[str, Any]]:
    """Loss along texts longer than SmolLM2's training, plain and with each RoPE scaling.

    `curves` are means over `texts` texts, `losses` are those of each text.
    """
    rows = _long_rows(seq_len, texts)  # [texts, 1, S]
    curves: dict[str, list[float]] = {}
    of_each: dict[str, list[list[float]]] = {}
    for kind in ("none", *KINDS):
        # A model of its own for each curve: a scaling stays on the model that it was applied to.
        model = apply_flash_attention(load_model().eval())
        if kind in KINDS:
            apply_rope_scaling(model, kind=kind, factor=2)
        of_each[kind] = [position_losses(model, row, window=window) for row in rows]
        curves[kind] = [statistics.fmean(values) for values in zip(*of_each[kind])]
        asked = {"window": window, "tokens": seq_len, "texts": texts, "factor": 2}
        yield {"curves": curves, "losses": of_each} | asked


def _long_rows(seq_len: int, texts: int) -> torch.Tensor:
    """`texts` rows of real text [texts, 1, S]."""
    # A token has four characters or so: of eight per token, enough are left.
    text = load_text(split="validation")[: 8 * texts * seq_len]
    ids = load_tokenizer()(text)["input_ids"][: texts * seq_len]
    return torch.tensor(ids, device=machine().device).view(texts, 1, seq_len)
