"""Does what notebook 05 found hold on a task that nobody made? The names of functions.

python -m benchmarks.function_names

A pair is a short function of Python's standard library with its docstring, its name blotted out
wherever it stands, and that name. No module is in training and in the judgement. The pretrained
model may have read the library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from benchmarks import study
from benchmarks.fine_tuning_seeds import WATCHED, Settings, Task, Way, compare
from recipes_lib.core.data.corpus import INSTRUCTION, docstring_pairs

QUESTION = "Which name does this Python function have?"
BLANK = "____"
LONGEST = 240  # characters of a question, which has some 50 tokens on average


def name_pairs(*, split: str, limit: int) -> list[dict[str, str]]:
    """At most `limit` functions as questions, with their names as answers."""
    pairs = map(_name_pair, docstring_pairs(split))
    short = (
        pair
        for pair in pairs
        if len(pair["prompt"]) <= LONGEST and not pair["completion"].startswith("_")
    )
    return list(islice(short, limit))


def _name_pair(pair: dict[str, str]) -> dict[str, str]:
    source = pair["prompt"].removeprefix(INSTRUCTION)
    name = re.search(r"\bdef (\w+)", source).group(1)
    question = f"{QUESTION}\n\n{source}\n\n{pair['completion']}"
    return {"prompt": re.sub(rf"\b{name}\b", BLANK, question), "completion": name}


NAMES = Task(
    "function_names",
    name_pairs,
    {
        "full fine-tuning": Way("none", 3e-5, 2),
        "LoRA": Way("lora", 3e-4, 2, rank=4),
        "LoRA, small rate": Way("lora", 1e-4, 2, rank=4),
    },
)


def compare_names(settings: Settings) -> Iterator[dict[str, Any]]:
    """What there is after each run, and what a rule gets: the first word of the docstring."""
    judged = name_pairs(split="validation", limit=WATCHED + settings.held_out)[WATCHED:]
    right = 0
    for pair in judged:
        docstring = pair["prompt"].split("\n\n")[-1]
        right += docstring.split()[0].lower() == pair["completion"]
    for found in compare(settings, NAMES):
        yield found | {"rule": right}


if __name__ == "__main__":
    settings = Settings(held_out=200)
    study.run("function_names", settings, compare_names, about=__doc__, threads=2)
