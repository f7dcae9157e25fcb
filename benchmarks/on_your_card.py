"""What each notebook is predicted to need on each kind of GPU, for docs/on-your-card.md.

python -m benchmarks.on_your_card    some minutes of one core, no GPU

The sizes are those of the notebooks: the cell that holds them is run here, and what it would give
to a machine is kept. The steps are dry ones, on a pretended card.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import keep
from benchmarks.sizes import TIER_SIZES
from recipes_lib.core.measure.machine import GIB, Sizes, fast
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import CARDS, Card, Prediction, predict
from recipes_lib.workflows.bench.run import Bench

ROOT = Path(__file__).resolve().parents[1]
# The smallest card of each tier.
TIERS = {"gpu16": CARDS["T4"], "gpu24": CARDS["L4"], "gpu80": CARDS["H100"]}
REMINDER = 80  # tokens of a row of notebook 05, rounded up


def sizes_of(notebook: str) -> dict[str, Sizes]:
    """The sizes of a notebook for each tier, from the cell of its source that holds them."""
    (source,) = (ROOT / "notebooks" / "source").glob(f"{notebook}_*.py")
    cells = re.split(r"^# %%.*$", source.read_text(encoding="utf-8"), flags=re.M)
    (cell,) = (each for each in cells if "choose_sizes(\n" in each or "= choose_sizes(c" in each)
    found: dict[str, Any] = {}

    def keep_them(**tiers: dict[str, Any]) -> None:
        found.update(tiers)

    names = {"choose_sizes": keep_them, "fast": fast, "GIB": GIB, "torch": torch}
    exec(compile(cell, str(source), "exec"), names)
    return {tier: Sizes(tier=tier, **found[tier]) for tier in TIERS}


def in_words(sizes: Sizes) -> str:
    """ "llama-3.2-1b, 5 blocks, 8 × 256 tokens" """
    blocks = "all" if sizes.layers is None else sizes.layers
    return f"{sizes.shape}, {blocks} blocks, {sizes.rows} × {sizes.tokens} tokens"


# --- steps ----------------------------------------------------------------------------------------


# The rows of `bench` that train every weight.
WAYS = {
    "in fp32": "baseline",
    "with accumulation": "gradient_accumulation",
    "in mixed precision": "mixed_precision",
}


def predicted(sizes: Sizes, way: str, card: Card) -> Prediction:
    """A step of full fine-tuning with AdamW; accumulation takes two rows at a time."""
    bench = Bench(sizes.shape, sizes.rows, sizes.tokens, sizes.rows // 2, sizes.layers)
    return predict(partial(bench.build, WAYS[way]), card=card)


def highest(sizes: Sizes, card: Card) -> dict[str, Any]:
    """Notebook 01, and full fine-tuning in `make gpu`: the row that needs most on a card."""
    peaks = {way: predicted(sizes, way, card) for way in WAYS}
    way = max(peaks, key=lambda each: peaks[each].reserved)
    return of_step(f"full fine-tuning {way}", sizes, peaks[way])


def of_step(row: str, sizes: Sizes, found: Prediction) -> dict[str, Any]:
    sized = {"row": row, "sizes": in_words(sizes)}
    return sized | {"allocated_bytes": found.allocated, "reserved_bytes": found.reserved}


# --- what each notebook needs, and `make gpu` -----------------------------------------------------


def writing(sizes: Sizes, card: Card) -> dict[str, Any]:
    """Notebook 03: the wider model in fp32, before its weights get fewer bits."""
    model = model_of_shape(sizes.shape, layers=sizes.wide_layers, device="meta")
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    row = f"{sizes.shape}, {sizes.wide_layers} blocks, fp32, writing text"
    return {"row": row, "allocated_bytes": size}


def long_texts(sizes: Sizes, card: Card) -> dict[str, Any]:
    """Notebook 04 searches below a limit of its own."""
    row = f"the longest text on which {sizes.shape} trains"
    return {"row": row, "allocated_bytes": int(sizes.limit)}


def learner(sizes: Sizes) -> Sizes:
    """Notebook 05: SmolLM2 and the rows of a step."""
    shape = {"shape": "smollm2-135m", "layers": None}
    return Sizes(tier=sizes.tier, rows=sizes.rows, tokens=REMINDER, **shape)


def fine_tuning(sizes: Sizes, card: Card) -> dict[str, Any]:
    """Notebook 05: full fine-tuning. In fp32, where it needs most."""
    learns = learner(sizes)
    return of_step("full fine-tuning in fp32", learns, predicted(learns, "in fp32", card))


NOTEBOOKS: dict[str, Callable[[Sizes, Card], dict[str, Any]]] = {
    "01": highest,
    "03": writing,
    "04": long_texts,
    "05": fine_tuning,
}


def sizes_of_make_gpu(tier: str) -> Sizes:
    """Those of full fine-tuning there."""
    full = TIER_SIZES[tier]["full"]
    shape = {"shape": full["shape"], "layers": full["layers"]}
    return Sizes(tier=tier, rows=full["batch_size"], tokens=full["seq_len"], **shape)


def main() -> None:
    """Predict all of it, and keep it."""
    rows = []
    for tier, card in TIERS.items():
        for notebook, need_of in NOTEBOOKS.items():
            need = need_of(sizes_of(notebook)[tier], card)
            rows.append({"name": f"{tier} {notebook}"} | need)
            print(rows[-1], flush=True)
        rows.append({"name": f"{tier} make gpu"} | highest(sizes_of_make_gpu(tier), card))
        print(rows[-1], flush=True)
    rooms = {tier: {"room_bytes": card.for_tensors} for tier, card in TIERS.items()}
    print(keep("on_your_card", rooms | {"rows": rows}))


if __name__ == "__main__":
    main()
