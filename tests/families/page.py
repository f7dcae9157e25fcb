"""docs/families.md: which technique runs on which family, and what the refusals say."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from pathlib import Path

import peft
import torch
import transformers

from tests.families.parity import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
PARTS = "Layer|Block|MLP|MoE|Moe|Mixer|Config|Experts|Router|Attention|Model|Decoder|Encoder"
SIGNS = {"equal": "=", "refused": "x", "untested": "?", "wrong": "!", "crash": "!"}
NO_CAUSAL_LM = "-"
RARE = 3  # families, below which a refusal is only counted

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
    lines += ["", "## What the refusals say", "", *_refusals(outcomes, techniques)]
    lines += ["", "## What could not be tested", "", *_untested(outcomes)]
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


def _refusals(outcomes: dict[tuple[str, str], Outcome], techniques: list[str]) -> list[str]:
    """Of each technique the sentences, with the number of families that get them."""
    found: dict[str, dict[str, int]] = {}
    for technique in techniques:
        sentences = Counter(
            _of_any_family(each.text)
            for (_, name), each in outcomes.items()
            if name == technique and _sign(each) == SIGNS["refused"]
        )
        for sentence, families in sentences.items():
            found.setdefault(sentence, {})[technique.replace("_", " ")] = families
    lines = []
    rare = Counter()
    for sentence, of_techniques in found.items():
        if max(of_techniques.values()) < RARE:
            rare.update(of_techniques)
            continue
        where = ", ".join(f"{name} ({count})" for name, count in of_techniques.items())
        lines.append(f"- **{where}**: {sentence}")
    others = ", ".join(f"{name} ({count})" for name, count in rare.items())
    return [*lines, f"- Others, of one or two families each: {others}."]


def _of_any_family(sentence: str) -> str:
    """The sentence without what differs from family to family: names of classes, and numbers."""
    sentence = re.sub(r"\b\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel)\b", "…", sentence)
    sentence = re.sub(r"\b\w*[a-z]\w*(\.\w+){2,}", "…", sentence)
    sentence = re.sub(rf"\b[A-Z]\w+({PARTS})\w*", "…", sentence)
    sentence = re.sub(r"\b\d+(\.\d+)?(e-?\d+)?\b", "N", sentence)
    sentence = re.sub(r"\(([^()]*…[^()]*|[^()]*N[^()]*)\)", "(…)", sentence)
    sentence = re.sub(r"(differs from Llama in) .* of its", r"\1 … of its", sentence)
    return sentence.replace("|", "\\|")


def _untested(outcomes: dict[tuple[str, str], Outcome]) -> list[str]:
    """One line for each reason, with the families and techniques that it concerns."""
    places: dict[str, list[tuple[str, str]]] = {}
    for place, found in outcomes.items():
        if found.kind == "untested":
            places.setdefault(found.text[:120], []).append(place)
    lines = []
    for reason, cells in places.items():
        families = ", ".join(dict.fromkeys(family for family, _ in cells))
        techniques = list(dict.fromkeys(technique for _, technique in cells))
        which = ", ".join(name.replace("_", " ") for name in techniques[:3])
        if len(techniques) > 3:
            which = "all"
        lines.append(f"- {families} ({which}): {reason}")
    return lines
