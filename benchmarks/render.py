"""Write recorded numbers and docstrings into the texts, between markers.

python -m benchmarks.render            write, and draw the README's pictures and the printed page
python -m benchmarks.render FILE …     write these texts only
python -m benchmarks.render --check    exit 1 if a text differs from what would be written

    <!-- numbers:headline-01 -->     a block, replaced up to   <!-- end -->
    <!-- cards:memory -->            likewise: cards of the techniques in recipes_lib/memory
    <!-- traps:worst -->             likewise: the rows of TRAPS.md that are in bold
    <!--m 01 QLoRA-->                inside a line, up to      <!--/m-->

No number enters a text in any other way, so none can disagree with what a run measured. A place
without a recorded run is left empty.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import arithmetic, cards, page, sentences, tables, traps
from benchmarks.record import LADDERS, RESULTS, newest, plain_name
from recipes_lib.report.style import percent

ROOT = Path(__file__).resolve().parents[1]
NO_BREAK = "\u00a0"  # a space at which no line ends
DEVICES = {"cpu": "cpu", "gpu": "cuda"}  # the name in a marker, and torch's

# --- a block ------------------------------------------------------------------------------------


def block(key: str, *, folder: Path = RESULTS) -> str:
    """The markdown of one block, with its heading; nothing where no run is recorded.

    headline-01    the result of a notebook in a few sentences (no heading)
    table-01       its ladder, measured on a CPU
    gpu-01         its ladder, measured on a GPU
    versus-gpu     the recipes beside the libraries, on a CPU or GPU
    finetune-cpu   QLoRA by our loop beside the Trainer, likewise
    source-01      where the weights of the notebook's run came from (no heading)
    doctor-8b      the doctor's remedies for an 8-billion model, by arithmetic (no heading)

    Raises KeyError for an unknown key.
    """
    kind, _, which = key.partition("-")
    if kind == "headline":
        return sentences.headline(which, newest(LADDERS[which], "cpu", folder=folder))
    if kind == "source":
        return sentences.source(newest(LADDERS[which or "01"], "cpu", folder=folder))
    if key == "doctor-8b":
        return arithmetic.doctor_table()
    if kind not in TABLES:
        raise KeyError(f"numbers:{key} is no block")
    title, table = TABLES[kind](which, folder)
    if not table:
        return ""
    return f"### {title}\n\n{table}"


def cpu_ladder(number: str, folder: Path) -> tuple[str, str]:
    """The ladder of a notebook on a CPU: its heading and its table."""
    run = newest(LADDERS[number], "cpu", folder=folder)
    other = None
    if run is not None:  # there may be a run on the other kind of CPU
        other = newest(LADDERS[number], "cpu", bf16=not run["native_bf16"], folder=folder)
    return f"Notebook {number} on a CPU", ladder(number, run, other)


def gpu_ladder(number: str, folder: Path) -> tuple[str, str]:
    """The ladder of a notebook on a GPU."""
    run = newest(LADDERS[number], "cuda", folder=folder)
    return f"Notebook {number} on a GPU", ladder(number, run)


def ladder(number: str, run: dict[str, Any] | None, other: dict[str, Any] | None = None) -> str:
    """The ladder of a notebook as a table: 03 counts tokens per second, 04 tokens, others bytes."""
    if number == "03":
        return tables.speeds(run)
    if number == "04":
        return tables.lengths(run)
    return tables.ladder(run, other, number=number)


def beside_libraries(device: str, folder: Path) -> tuple[str, str]:
    """The recipes beside the libraries that do the same."""
    title = f"The recipes beside the libraries, on a {device.upper()}"
    return title, tables.versus(newest("versus", DEVICES[device], folder=folder))


def beside_trainer(device: str, folder: Path) -> tuple[str, str]:
    """QLoRA by our loop beside the Trainer."""
    title = f"QLoRA beside the Trainer, on a {device.upper()}"
    return title, tables.finetune(newest("finetune", DEVICES[device], folder=folder))


TABLES = {
    "table": cpu_ladder,
    "gpu": gpu_ladder,
    "versus": beside_libraries,
    "finetune": beside_trainer,
}

# --- a cell -------------------------------------------------------------------------------------


def cell(number: str, name: str, *, folder: Path = RESULTS) -> str:
    """A row of a ladder, or a fact beside it, as the cell of a table: first on CPU, then on GPU.

    Nothing where no run has it.
    """
    if (number, name) == ("doctor", "8b"):
        return arithmetic.doctor_line()
    shown = []
    for device in DEVICES.values():
        text = cell_on(device, number, name, folder=folder)
        if text:
            shown.append(text)
    return "; ".join(shown)


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
        text = WORDS.get(number, row_in_bytes)(run, name)
    machine = where(run, newest(LADDERS[number], device, folder=folder))
    return f"{machine}:{NO_BREAK}{text}"


def row_of(run: dict[str, Any], name: str) -> dict[str, Any]:
    """The row of a run that has this name."""
    rows = {plain_name(row["name"]): row for row in run["rows"]}
    return rows[plain_name(name)]


def row_in_bytes(run: dict[str, Any], name: str) -> str:
    """A row against the baseline of its run: memory and time."""
    first = run["rows"][0]
    row = row_of(run, name)
    memory = percent(row["peak_bytes"] / first["peak_bytes"] - 1)
    return unbroken([f"{memory} peak", f"{sentences.time_in_words(row, first)} time"])


def row_in_tokens(run: dict[str, Any], name: str) -> str:
    """A row against the baseline of its run: length and time."""
    first = run["rows"][0]
    row = row_of(run, name)
    length = row["tokens"] / first["tokens"]
    time = row["seconds"] / first["seconds"]
    return f"{length:.1f}× the baseline's length, {time:.2f}× its time per token"


def row_in_speed(run: dict[str, Any], name: str) -> str:
    """A row against the first of its group: speed, and where both are known, perplexity."""
    row = row_of(run, name)
    first = next(each for each in run["rows"] if each["group"] == row["group"])
    parts = [f"{sentences.speed_in_words(row, first)} as fast"]
    if None not in (row["perplexity"], first["perplexity"]):
        # A perplexity may change by less than a whole per cent, and that is worth knowing.
        parts.append(f"perplexity {row['perplexity'] / first['perplexity'] - 1:+.1%}")
    return unbroken(parts)


# What a row says, by the number of the notebook; all others count bytes.
WORDS = {"03": row_in_speed, "04": row_in_tokens}


def unbroken(parts: list[str]) -> str:
    """In a narrow column a line ends between the parts, and not inside of them."""
    return ", ".join(part.replace(" ", NO_BREAK) for part in parts)


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

    def fill_cards(match: re.Match) -> str:
        begin, room, end = match.groups()
        return f"{begin}\n{cards.of_room(room)}\n{end}"

    def fill_traps(match: re.Match) -> str:
        begin, end = match.groups()
        return f"{begin}{traps.worst()}\n{end}"

    prefix = re.escape(comment)
    rest = r"[\s\S]*?"  # what stood there before
    marked_block = rf"({prefix}<!-- numbers:([\w-]+) -->\n){rest}({prefix}<!-- end -->)"
    text = re.sub(marked_block, fill_block, text)
    text = re.sub(rf"(<!-- cards:(\w+) -->\n){rest}(<!-- end -->)", fill_cards, text)
    # A row of TRAPS.md may have a number, so the cells come last.
    text = re.sub(rf"(<!-- traps:worst -->\n){rest}(<!-- end -->)", fill_traps, text)
    marked_cell = r"(<!--m (\w+) ([^>]+?)-->).*?(<!--/m-->)"
    return re.sub(marked_cell, fill_cell, text)


# --- the command --------------------------------------------------------------------------------


def texts() -> list[Path]:
    """All texts with numbers."""
    pages = [ROOT / name for name in ("README.md", "CHEATSHEET.md", "TRAPS.md")]
    pages += sorted((ROOT / "docs").glob("*.md"))
    pages += sorted((ROOT / "notebooks" / "source").glob("*.py"))
    return [page for page in pages if page.exists()]


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
    """The README's pictures and the printed cheatsheet, from the same results as the numbers."""
    from benchmarks import pictures  # here, because it takes long to import

    pictures.draw()
    page.write()


def main(arguments: list[str]) -> int:
    """Write the texts, or only check them; gives the exit code."""
    only = [Path(given).resolve() for given in arguments if given != "--check"]
    stale = stale_texts()
    if only:
        stale = {path: text for path, text in stale.items() if path in only}
    names = [path.relative_to(ROOT).as_posix() for path in stale]
    if "--check" in arguments:
        if not only and not page.is_current():
            names.append("docs/cheatsheet.pdf")
        print(f"stale: {', '.join(names) or 'nothing'}")
        return int(bool(names))

    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    if not only:
        draw()
    print(f"written: {', '.join(names) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
