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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    arithmetic,
    cards,
    page,
    render_architecture,
    render_depths,
    render_distillation,
    render_edge,
    render_image_students,
    render_int8_images,
    render_muon,
    render_peers,
    render_quantization_aware,
    sentences,
    tables,
    traps,
)
from benchmarks.cells import DEVICES, cell
from benchmarks.record import LADDERS, RESULTS, newest

Words = Callable[[dict[str, Any] | None], str]  # of a run; nothing where none is recorded

ROOT = Path(__file__).resolve().parents[1]

# --- a block ------------------------------------------------------------------------------------


def block(key: str, *, folder: Path = RESULTS) -> str:
    """The markdown of one block, with its heading; nothing where no run is recorded.

    headline-01    the result of a notebook in a few sentences (no heading)
    table-01       its ladder, measured on a CPU
    gpu-01         its ladder, measured on a GPU
    versus-gpu     the recipes beside the libraries, on a CPU or GPU
    finetune-cpu   QLoRA by our loop beside the Trainer, likewise
    architecture-cpu, healing-cpu, norms-cpu, depths-cpu, distillation-cpu, edge-cpu, grids-cpu,
    int8-cpu, muon-cpu, peers-cpu, students-cpu
                   the runs of their own, likewise
    architecture-03, distillation-03, peers-03
                   the same as notebook 03 shows them (no heading)
    muon-05        the same as notebook 05 shows it
    depths-06, edge-06, grids-06, int8-06, students-06
                   the same as notebook 06 shows them
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
    if (kind, which) in IN_NOTEBOOKS:
        part, text = IN_NOTEBOOKS[kind, which]
        return text(newest(part, "cpu", folder=folder))
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
    """The ladder of a notebook as a table. 02 counts bytes of a rank, 03 tokens per second, 04
    tokens, 06 bytes of files, and the others bytes of memory."""
    if number == "02":
        return tables.ranks(run)
    if number == "03":
        return tables.speeds(run)
    if number == "04":
        return tables.lengths(run)
    if number == "06":
        return tables.files(run)
    return tables.ladder(run, other, number=number)


def beside_libraries(device: str, folder: Path) -> tuple[str, str]:
    """The recipes beside the libraries that do the same."""
    title = f"The recipes beside the libraries, on a {device.upper()}"
    return title, tables.versus(newest("versus", DEVICES[device], folder=folder))


def beside_trainer(device: str, folder: Path) -> tuple[str, str]:
    """QLoRA by our loop beside the Trainer."""
    title = f"QLoRA beside the Trainer, on a {device.upper()}"
    return title, tables.finetune(newest("finetune", DEVICES[device], folder=folder))


def own_run(part: str, title: str, text: Words) -> Callable[[str, Path], tuple[str, str]]:
    """The heading and the table of a run of its own."""

    def titled(device: str, folder: Path) -> tuple[str, str]:
        run = newest(part, DEVICES[device], folder=folder)
        return f"{title}, on a {device.upper()}", text(run)

    return titled


TABLES = {
    "table": cpu_ladder,
    "gpu": gpu_ladder,
    "versus": beside_libraries,
    "finetune": beside_trainer,
    "architecture": own_run(
        "architecture", "Parts of the architecture", render_architecture.small_models
    ),
    "healing": own_run("architecture", "Pooled heads", render_architecture.healing),
    "norms": own_run("architecture", "Norms", render_architecture.norms),
    "depths": own_run("depths", "Deep and thin", render_depths.depths),
    "distillation": own_run(
        "distillation", "A student with and without its teacher", render_distillation.students
    ),
    "edge": own_run("edge", "A language model as a file", render_edge.files),
    "students": own_run(
        "image_students",
        "A classifier with and without its teacher",
        render_image_students.students,
    ),
    "int8": own_run("int8_images", "Images in 8 bits", render_int8_images.both),
    "grids": own_run("quantization_aware", "Training on a grid", render_quantization_aware.grids),
    "muon": own_run("muon", "Muon beside AdamW", render_muon.study),
    "peers": own_run("inference_peers", "Other programs", render_peers.peers),
}

IN_NOTEBOOKS: dict[tuple[str, str], tuple[str, Words]] = {
    ("architecture", "03"): ("architecture", render_architecture.block),
    ("depths", "06"): ("depths", render_depths.block),
    ("distillation", "03"): ("distillation", render_distillation.block),
    ("edge", "06"): ("edge", render_edge.block),
    ("grids", "06"): ("quantization_aware", render_quantization_aware.block),
    ("int8", "06"): ("int8_images", render_int8_images.block),
    ("muon", "05"): ("muon", render_muon.block),
    ("students", "06"): ("image_students", render_image_students.block),
    ("peers", "03"): ("inference_peers", render_peers.block),
}

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
