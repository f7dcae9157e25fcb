"""Options that several commands take, and the names that their help shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

LIBRARY = Path(__file__).resolve().parents[1]


def keys_in(file: str) -> list[str]:
    """The keys of the table in a file of the package, which imports torch and so is only read."""
    text = (LIBRARY / file).read_text(encoding="utf-8")
    return re.findall(r'^    "([\w.-]+)": ', text, re.MULTILINE)


PUBLIC_SHAPES = [name for name in keys_in("core/model/shapes.py") if not name.startswith("tiny-")]
TECHNIQUES = keys_in("workflows/bench/techniques.py")

MODEL_HELP = f"hub id, folder, or a shape: {', '.join(PUBLIC_SHAPES)}"

BatchSize = Annotated[int, typer.Option(help="rows of the batch")]
SeqLen = Annotated[int, typer.Option(help="tokens of a row")]
