"""docs/families.md: the table of families and techniques, and what each refusal says."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import peft
import torch
import transformers

from tests.families.parity import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
PARTS = "Layer|Block|MLP|MoE|Moe|Mixer|Config|Experts|Router|Attention|Model|Decoder|Encoder"
SIGNS = {"equal": "=", "untested": "?", "wrong": "**wrong**", "crash": "**crash**"}

HEAD = """# Every technique on every family of causal LMs

Made by `make test FAMILIES=all` on {date}, with transformers {transformers}, torch {torch} and peft
{peft}, on a CPU in fp32. Each family is a tiny random model, in which every parameter is perturbed.
What is compared is the loss and every gradient, or for inference the logits or the text.

{families} families and {techniques} techniques: {equal} cells are equal to the reference, {refused}
are refused in one sentence, {untested} are untested, {wrong} are wrong.

- `=` equal to an independent reference
- a number: refused, with the sentence of this number below
- `–` no causal LM as transformers builds it by default
- `?` transformers itself fails on the reference, or builds no tiny model of the family

References: the unmodified eager model, under a dense mask for windows and blocks; each document
alone for packing; the merged weights for adapters; rounded weights for quantized layers, and with
int4 the 16 bits in which its kernel takes and gives numbers.
"""


def write_page(outcomes: dict[tuple[str, str], Outcome]) -> None:
    """Write what was found, by family and technique, to docs/families.md."""
    families = list(dict.fromkeys(family for family, _ in outcomes))
    techniques = list(dict.fromkeys(technique for _, technique in outcomes))
    sentences: dict[str, int] = {}
    rows = []
    for family in families:
        cells = [_cell(outcomes.get((family, name)), sentences) for name in techniques]
        rows.append(f"| {family} | " + " | ".join(cells) + " |")
    kinds = [each.kind for each in outcomes.values()]
    head = HEAD.format(
        date=datetime.date.today().isoformat(),
        transformers=transformers.__version__,
        torch=torch.__version__,
        peft=peft.__version__,
        families=len(families),
        techniques=len(techniques),
        equal=kinds.count("equal"),
        refused=kinds.count("refused"),
        wrong=kinds.count("wrong") + kinds.count("crash"),
        untested=kinds.count("untested"),
    )
    titles = " | ".join(name.replace("_", " ") for name in techniques)
    lines = [head, f"| family | {titles} |", "|---" * (len(techniques) + 1) + "|", *rows]
    lines += ["", "## What the refusals say", ""]
    lines += [f"{number}. {sentence}" for sentence, number in sentences.items()]
    lines += ["", "## What could not be tested", "", *_untested(outcomes)]
    PAGE.write_text("\n".join(lines) + "\n")


def _cell(found: Outcome | None, sentences: dict[str, int]) -> str:
    if found is None:
        return ""
    if found.kind != "refused":
        return SIGNS[found.kind]
    if "give a decoder-only model" in found.text:
        return "–"
    sentence = _of_any_family(found.text)
    sentences.setdefault(sentence, len(sentences) + 1)
    return str(sentences[sentence])


def _of_any_family(sentence: str) -> str:
    """The sentence without what differs from family to family: names of classes, and numbers."""
    sentence = re.sub(r"\b\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel)\b", "…", sentence)
    sentence = re.sub(r"\b\w*[a-z]\w*(\.\w+){2,}", "…", sentence)
    sentence = re.sub(rf"\b[A-Z]\w+({PARTS})\w*", "…", sentence)
    sentence = re.sub(r"\b\d+(\.\d+)?(e-?\d+)?\b", "N", sentence)
    sentence = re.sub(r"\(([^()]*…[^()]*|[^()]*N[^()]*)\)", "(…)", sentence)
    return sentence.replace("|", "\\|")


def _untested(outcomes: dict[tuple[str, str], Outcome]) -> list[str]:
    """One line for each reason, with the families and techniques that it concerns."""
    places: dict[str, list[tuple[str, str]]] = {}
    for place, found in outcomes.items():
        if found.kind == "untested":
            places.setdefault(found.text, []).append(place)
    lines = []
    for reason, cells in places.items():
        families = ", ".join(dict.fromkeys(family for family, _ in cells))
        techniques = list(dict.fromkeys(technique for _, technique in cells))
        which = ", ".join(name.replace("_", " ") for name in techniques[:3])
        if len(techniques) > 3:
            which = "all"
        lines.append(f"- {families} ({which}): {reason}")
    return lines
