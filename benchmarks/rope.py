"""Loss along texts that are longer than SmolLM2's training, plain and with each RoPE scaling.

A part of `benchmarks.gpu` that notebook 04 quotes: such texts take minutes on a CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from recipes_lib.architecture.rope import KINDS, apply_rope_scaling
from recipes_lib.attention.flash import apply_flash_attention
from recipes_lib.core.data import load_text
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import load_model, load_tokenizer


def stretched(*, seq_len: int, window: int, texts: int) -> Iterator[dict[str, Any]]:
    """The result so far, after each scaling.

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


@torch.no_grad()
def position_losses(model: Any, row: torch.Tensor, *, window: int) -> list[float]:
    """Mean loss of every `window` tokens along one text, row [1, S]: where does it get lost?

    The logits are made window by window; 10,000 tokens of them would take gigabytes.
    """
    hidden = model.base_model(row, use_cache=False).last_hidden_state[0, :-1]  # [S - 1, D]
    targets = row[0, 1:]  # [S - 1]: the last token has nothing to predict
    losses = []
    for hidden_part, target_part in zip(hidden.split(window), targets.split(window)):
        logits = model.lm_head(hidden_part).float()  # [window, V]
        losses.append(torch.nn.functional.cross_entropy(logits, target_part).item())
    return losses


def _long_rows(seq_len: int, texts: int) -> torch.Tensor:
    """`texts` rows of real text [texts, 1, S]."""
    # A token has four characters or so: of eight per token, enough are left.
    text = load_text(split="validation")[: 8 * texts * seq_len]
    ids = load_tokenizer()(text)["input_ids"][: texts * seq_len]
    return torch.tensor(ids, device=machine().device).view(texts, 1, seq_len)
