"""Write recorded numbers into README.md, CHEATSHEET.md and the notebook sources, between markers.

python -m benchmarks.render            write, and draw the README's chart
python -m benchmarks.render --check    exit 1 if a text differs from the results

    <!-- numbers:headline-01 -->     a block, replaced up to   <!-- end -->
    <!--m 01 + QLoRA-->              inside a line, up to      <!--/m-->

No number enters a text in any other way, so none can disagree with what a run measured.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import sentences, tables
from benchmarks.record import LADDERS, RESULTS, machine_line, newest
from recipes_lib.report.charts import chart
from recipes_lib.report.style import percent

ROOT = Path(__file__).resolve().parents[1]
DEVICES = {"cpu": "cpu", "gpu": "cuda"}  # the name in a marker, and torch's

# --- a block ------------------------------------------------------------------------------------


def block(key: str, *, folder: Path = RESULTS) -> str:
    """The markdown of one block. Raises KeyError for an unknown key.

    headline-01    the result of a notebook in one sentence
    table-01       its ladder, measured on a CPU
    gpu-01         its ladder, measured on a GPU
    versus-gpu     the recipes beside the libraries, on a CPU or GPU
    finetune-cpu   QLoRA by our loop beside the Trainer, likewise
    """
    kind, which = key.rsplit("-", 1)
    if kind == "versus":
        return tables.versus(newest("versus", DEVICES[which], folder=folder))
    if kind == "finetune":
        return tables.finetune(newest("finetune", DEVICES[which], folder=folder))
    if kind == "gpu":
        return ladder(which, newest(LADDERS[which], "cuda", folder=folder))
    run = newest(LADDERS[which], "cpu", folder=folder)
    if kind == "table":
        other = None
        if run is not None:  # there may be a run on the other kind of CPU
            other = newest(LADDERS[which], "cpu", bf16=not run["native_bf16"], folder=folder)
        return ladder(which, run, other)
    if kind == "headline":
        return sentences.headline(which, run)
    raise KeyError(f"numbers:{key} is no block")


def ladder(number: str, run: dict[str, Any] | None, other: dict[str, Any] | None = None) -> str:
    """The ladder of a notebook as a table: notebook 04 counts tokens, the others bytes."""
    if number == "04":
        return tables.lengths(run)
    return tables.ladder(run, other, number=number)


# --- a cell -------------------------------------------------------------------------------------


def cell(number: str, name: str, *, folder: Path = RESULTS) -> str:
    """A row of a ladder, or a fact beside it, as the cell of a table: first on CPU, then on GPU."""
    shown = []
    for device in DEVICES.values():
        text = cell_on(device, number, name, folder=folder)
        if text:
            shown.append(text)
    return "; ".join(shown) or "not measured on this kind of machine yet"


def cell_on(device: str, number: str, name: str, *, folder: Path = RESULTS) -> str:
    """The part of a cell that one kind of machine measured, or nothing."""
    part = LADDERS[number]
    if name == "rope":
        part = "rope"  # a part of its own: it takes too long for a notebook
    if name in sentences.FACTS:
        run = newest(part, device, folder=folder)
        if run is None:
            return ""
        text = sentences.FACTS[name](run.get("facts", run))
    else:
        run = newest(part, device, row=name, folder=folder)
        if run is None:
            return ""
        text = row_in_words(run, name, in_tokens=number == "04")
    return f"{where(run, newest(LADDERS[number], device, folder=folder))}: {text}"


def row_in_words(run: dict[str, Any], name: str, *, in_tokens: bool) -> str:
    """A row against the baseline of its run: length and time, or memory and time."""
    first = run["rows"][0]
    rows = {row["name"]: row for row in run["rows"]}
    row = rows[name]
    if in_tokens:
        length = row["tokens"] / first["tokens"]
        time = row["seconds"] / first["seconds"]
        return f"{length:.1f}× the baseline's length, {time:.2f}× its time per token"
    memory = percent(row["peak_bytes"] / first["peak_bytes"] - 1)
    return f"{memory} peak, {sentences.time_ratio(row, first):.2f}× time"


def where(run: dict[str, Any], latest: dict[str, Any]) -> str:
    """The machine of a run, as short as a cell needs it: a GPU by its name, a CPU by its kind.

    Args:
        latest: the newest run on this kind of machine, of which the texts speak otherwise.
    """
    if run["device"] != "cpu":
        return run["name"]
    if all(run[key] == latest[key] for key in ("name", "native_bf16", "date")):
        return "CPU"
    if run["native_bf16"]:  # the newest run has no such row
        return "CPU with native bf16"
    return "CPU without native bf16"


# --- a text -------------------------------------------------------------------------------------


def render(text: str, *, comment: str = "", folder: Path = RESULTS) -> str:
    """`text` with every marked place filled.

    Args:
        comment: what every line of a block begins with: "# " in the sources of notebooks.
    """

    def fill_block(match: re.Match) -> str:
        begin, key, end = match.groups()
        lines = block(key, folder=folder).splitlines()
        filled = [f"{comment}{line}".rstrip() + "\n" for line in lines]
        return begin + "".join(filled) + end

    def fill_cell(match: re.Match) -> str:
        begin, number, name, end = match.groups()
        return begin + cell(number, name, folder=folder) + end

    prefix = re.escape(comment)
    marked_block = rf"({prefix}<!-- numbers:([\w-]+) -->\n)[\s\S]*?({prefix}<!-- end -->)"
    text = re.sub(marked_block, fill_block, text)
    marked_cell = r"(<!--m (\w+) ([^>]+?)-->).*?(<!--/m-->)"
    return re.sub(marked_cell, fill_cell, text)


# --- the command --------------------------------------------------------------------------------


def texts() -> list[Path]:
    """All texts with numbers."""
    sources = sorted((ROOT / "notebooks" / "source").glob("*.py"))
    return [ROOT / "README.md", ROOT / "CHEATSHEET.md", *sources]


def stale_texts() -> dict[Path, str]:
    """What each text should be that differs from the recorded results."""
    stale = {}
    for path in texts():
        comment = ""
        if path.suffix == ".py":
            comment = "# "
        old = path.read_text(encoding="utf-8")
        new = render(old, comment=comment)
        if new != old:
            stale[path] = new
    return stale


def draw() -> None:
    """The chart of the README, from the same recorded run as its numbers."""
    run = newest(LADDERS["01"], "cpu")
    if run is None:
        return
    folder = ROOT / "docs"
    folder.mkdir(exist_ok=True)
    figure = chart(run["rows"], title=machine_line(run))
    figure.savefig(folder / "ladder-01.png", dpi=110)


def main(arguments: list[str]) -> int:
    """Write the texts, or only check them; gives the exit code."""
    stale = stale_texts()
    names = ", ".join(path.relative_to(ROOT).as_posix() for path in stale) or "nothing"
    if "--check" in arguments:
        print(f"stale: {names}")
        return int(bool(stale))
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    draw()
    print(f"written: {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
