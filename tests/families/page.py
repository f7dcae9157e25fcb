"""docs/families.md: which technique runs on which family."""

from __future__ import annotations

import datetime
from collections import Counter
from pathlib import Path

import peft
import torch
import transformers

from tests.families.parity import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
SIGNS = {"equal": "=", "refused": "x", "untested": "?", "wrong": "!", "crash": "!"}
NO_CAUSAL_LM = "-"

HEAD = """# Every technique on every family of causal LMs

`make survey` made this page on {date}, with transformers {transformers}, torch {torch} and peft {peft}, on a CPU in fp32. Each family is a tiny random model, in which every parameter is perturbed. What is compared is the loss and every gradient, or for inference the logits or the text. References: the unmodified eager model, under a dense mask for windows and blocks; each document alone for packing; the merged weights for adapters; rounded weights for quantized layers, and with int4 the 16 bits in which its kernel takes and gives numbers.

{families} families and {techniques} techniques: {equal} cells are equal to the reference, {refused} are refused in one sentence, {untested} are untested, {wrong} are wrong.
"""  # noqa: E501
LEGEND = """
## By family

A column is a technique of the table above. `=` equal, `x` refused, `-` no causal LM as transformers builds it by default, `?` transformers itself fails on the reference, `!` wrong.
"""  # noqa: E501


def write_page(outcomes: dict[tuple[str, str], Outcome]) -> None:
    """Write what was found, by family and technique, to docs/families.md."""
    families = list(dict.fromkeys(family for family, _ in outcomes))
    techniques = list(dict.fromkeys(technique for _, technique in outcomes))
    kinds = Counter(each.kind for each in outcomes.values())
    head = HEAD.format(
        date=datetime.date.today().isoformat(),
        transformers=transformers.__version__,
        torch=torch.__version__,
        peft=peft.__version__,
        families=len(families),
        techniques=len(techniques),
        equal=kinds["equal"],
        refused=kinds["refused"],
        wrong=kinds["wrong"] + kinds["crash"],
        untested=kinds["untested"],
    )
    lines = [head, *_counts(outcomes, techniques), LEGEND, *_grid(outcomes, families, techniques)]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _counts(outcomes: dict[tuple[str, str], Outcome], techniques: list[str]) -> list[str]:
    """How many families run each technique."""
    lines = ["| | technique | equal | refused | untested |", "|--:|---|--:|--:|--:|"]
    for number, technique in enumerate(techniques, start=1):
        kinds = Counter(each.kind for (_, name), each in outcomes.items() if name == technique)
        words = technique.replace("_", " ")
        cells = f"{kinds['equal']} | {kinds['refused']} | {kinds['untested']}"
        lines.append(f"| {number} | {words} | {cells} |")
    return lines


def _grid(
    outcomes: dict[tuple[str, str], Outcome], families: list[str], techniques: list[str]
) -> list[str]:
    """A line per family with one sign per technique, in groups of ten."""
    widest = max(map(len, families))
    groups = range(0, len(techniques), 10)
    numbers = " ".join(f"{start + 1:<{min(10, len(techniques) - start)}}" for start in groups)
    lines = ["```text", " " * widest + " " + numbers.rstrip()]
    for family in families:
        signs = "".join(_sign(outcomes.get((family, name))) for name in techniques)
        lines.append(f"{family:<{widest}} " + " ".join(signs[i : i + 10] for i in groups))
    return [*lines, "```"]


def _sign(found: Outcome | None) -> str:
    if found is None:
        return " "
    if found.kind == "refused" and "give a decoder-only model" in found.text:
        return NO_CAUSAL_LM
    return SIGNS[found.kind]
