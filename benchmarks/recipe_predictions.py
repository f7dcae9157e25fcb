"""Predicted and measured peaks of one training step: each recipe on small models of many families.

python -m benchmarks.recipe_predictions               some fifteen minutes of one core

The `build` of a recipe is predicted, on tensors without data, and then measured, both on the CPU.
Recipes and families are those of `make survey`.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.family_predictions import measured_peak
from benchmarks.record import keep
from recipes_lib.core.predict import Build, predict
from tests.core.predict.recipes import FAMILIES, RECIPES, ROWS, TOKENS, build_of

NEAR = 0.005  # of the measured bytes


def compare(recipe: str) -> dict[str, Any]:
    """How far one recipe is off on all families, and which of them refuse it."""
    row: dict[str, Any] = {"name": recipe, "compared": 0, "equal": 0, "near": 0}
    row |= {"furthest": 0.0, "furthest_family": "", "refused": []}
    for family in FAMILIES:
        build = build_of(family, RECIPES[recipe])
        try:
            predicted = predict(build).peak
        except ValueError:
            if not refuses_a_real_step(build):
                raise
            row["refused"].append(family)
            continue
        build()  # libraries make tables once, and keep them
        off = predicted / measured_peak(build) - 1
        row["compared"] += 1
        row["equal"] += off == 0
        row["near"] += abs(off) <= NEAR
        if abs(off) > abs(row["furthest"]):
            row |= {"furthest": off, "furthest_family": family}
    return row


def refuses_a_real_step(build: Build) -> bool:
    """Whether the recipe refuses, and not the prediction alone."""
    try:
        measured_peak(build)
    except ValueError:
        return True
    return False


def main() -> None:
    """Compare all recipes, print each, and keep them."""
    torch.set_num_threads(1)
    rows = []
    for recipe in RECIPES:
        rows.append(compare(recipe))
        print(rows[-1], flush=True)
    content = {"batch_rows": ROWS, "batch_tokens": TOKENS, "families": list(FAMILIES)}
    print(keep("recipe_predictions", content | {"rows": rows}))


if __name__ == "__main__":
    main()
