"""What each notebook is predicted to need on each kind of GPU: docs/on-your-card.md.

python -m benchmarks.on_your_card

Arithmetic only. The sizes are those of the notebooks: the cell that holds them is run here, and
what it would give to a machine is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.render import page as from_template
from recipes_lib.core.measure.machine import GIB, Sizes
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import plain_step
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.precision.mixed_precision import estimate_mixed_precision
from recipes_lib.training.gradient_accumulation import estimate_gradient_accumulation

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "on-your-card.md"
# The smallest card of each tier, with the bytes that PyTorch says it has.
CARDS = {"gpu16": ("T4", 14.6), "gpu24": ("L4, A10G", 22.0), "gpu80": ("A100, H100", 79.1)}
# What mixed precision computes in: a T4 has no bf16.
HALVES = {"gpu16": torch.float16, "gpu24": torch.bfloat16, "gpu80": torch.bfloat16}
# Of a card: the rest is for its context, and for gaps between tensors of many sizes.
USABLE = 0.88


class Need(NamedTuple):
    """What a notebook needs on a card, at its highest row."""

    notebook: str
    row: str
    gib: float


def sizes_of(notebook: str) -> dict[str, Sizes]:
    """The sizes of a notebook for each tier, from the cell of its source that holds them."""
    (source,) = (ROOT / "notebooks" / "source").glob(f"{notebook}_*.py")
    cells = re.split(r"^# %%.*$", source.read_text(encoding="utf-8"), flags=re.M)
    (cell,) = (each for each in cells if "choose_sizes(\n" in each or "= choose_sizes(c" in each)
    found: dict[str, Any] = {}

    def keep(**tiers: dict[str, Any]) -> None:
        found.update(tiers)

    names = {"choose_sizes": keep, "GIB": GIB, "torch": torch}
    exec(compile(cell, str(source), "exec"), names)
    return {tier: Sizes(tier=tier, **found[tier]) for tier in CARDS}


# --- one function per notebook: its highest row ---------------------------------------------------


def training_step(sizes: Sizes) -> tuple[str, float]:
    """Notebook 01: every weight in fp32, in one batch, accumulated, or in mixed precision."""
    model = model_of_shape(sizes.shape, layers=sizes.layers, device="meta")
    whole = Shape(batch=sizes.rows, seq=sizes.tokens)
    parts = Shape(batch=sizes.rows, seq=sizes.tokens, micro_batches=2)
    half = HALVES[sizes.tier]
    with mock.patch.object(plain_step, "without_grouped_heads", partial(as_on, sizes.tier)):
        baseline = budget_of(model, whole)
        peaks = {
            "in fp32": baseline.peak,
            "with accumulation": estimate_gradient_accumulation(baseline, model, parts).peak,
            "in mixed precision": estimate_mixed_precision(baseline, model, whole, dtype=half).peak,
        }
    way = max(peaks, key=peaks.get)
    blocks = model.config.num_hidden_layers
    return f"full fine-tuning {way} of {sizes.shape}, {blocks} blocks", peaks[way] / GIB


def as_on(tier: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention repeats heads there: in fp32, and on a T4 in 16 bits as well."""
    return dtype.itemsize == 4 or HALVES[tier] is torch.float16


def writing(sizes: Sizes) -> tuple[str, float]:
    """Notebook 03: the wider model in fp32, before its weights get fewer bits."""
    model = model_of_shape(sizes.shape, layers=sizes.wide_layers, device="meta")
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    return f"{sizes.shape}, {sizes.wide_layers} blocks, fp32, writing text", size / GIB


def long_texts(sizes: Sizes) -> tuple[str, float]:
    """Notebook 04 searches below a limit of its own."""
    return f"the longest text on which {sizes.shape} trains", sizes.limit / GIB


def fine_tuning(sizes: Sizes) -> tuple[str, float]:
    """Notebook 05: full fine-tuning of SmolLM2 on three rows."""
    model = model_of_shape("smollm2-135m", device="meta")
    shape = Shape(batch=3, seq=192)
    return "full fine-tuning of SmolLM2 in fp32", budget_of(model, shape).peak / GIB


NOTEBOOKS: dict[str, Callable[[Sizes], tuple[str, float]]] = {
    "01": training_step,
    "03": writing,
    "04": long_texts,
    "05": fine_tuning,
}


def needs(tier: str) -> list[Need]:
    """What each notebook needs on a tier. 02 and 06 run on the CPU of a machine with one GPU."""
    found = []
    for notebook, highest in NOTEBOOKS.items():
        row, gib = highest(sizes_of(notebook)[tier])
        found.append(Need(notebook, row, gib))
    return found


# --- the page -------------------------------------------------------------------------------------


def page() -> str:
    """The text of docs/on-your-card.md."""
    return from_template("on-your-card.md.j2", tiers=CARDS, usable=USABLE, needs=needs)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
