"""Write recorded numbers into the texts: whole pages from templates, and places between markers.

python -m benchmarks.render            write, and draw the README's pictures
python -m benchmarks.render --check    exit 1 if a text differs from what would be written

    <!-- numbers:headline-01 -->     a block, replaced up to   <!-- end -->
    <!--m 01 QLoRA-->                inside a line, up to      <!--/m-->

`templates/tables.j2` has a macro for each block, and `templates/numbers.j2` one for each number
that is not a row of a ladder. The pages of PAGES have a template each and are written whole. No
number enters a text in any other way, so none can disagree with what a run measured. A place
without a recorded run is empty.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.exceptions import UndefinedError

from benchmarks import doctor, traps
from benchmarks.record import RESULTS, Number, Run, every_record, newest

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = Path(__file__).parent / "templates"
PUBLISHED = Path(__file__).parent / "published_peaks.jsonl"
PAGES = ("results.md", "predictions.md", "long-card.md", "on-your-card.md")  # written whole
MARKER = re.compile(r"<!--m (\w+) ([^>]+?)-->")

# --- how numbers are written ----------------------------------------------------------------------


def mib(size: float, digits: int = 0) -> str:
    return f"{size / 2**20:,.{digits}f}"


def gib(size: float, digits: int = 1) -> str:
    return f"{size / 2**30:,.{digits}f}"


def mb(size: float) -> str:
    """Millions of bytes, as files are given on devices."""
    return f"{three(size / 10**6)} MB"


def three(value: float) -> str:
    """Three digits: 84.8, 0.051, 1,583."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    if value >= 0.1:
        return f"{value:.2f}"
    return f"{value:.3f}"


def change(ratio: float, digits: int = 0) -> str:
    """A ratio as a change: "-79%"."""
    percent = round(100 * (ratio - 1), digits)
    return f"{percent + 0:+.{digits}f}%"  # + 0: what rounds to nothing has no minus


def share(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f}%"


def fixed(value: float, digits: int = 2) -> str:
    return f"{value:,.{digits}f}"


def signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}"


def factor(nats: float) -> str:
    """By how much a perplexity grows where the loss rises by so many nats: "1.35"."""
    return f"{math.exp(nats):.2f}"


def small(value: float) -> str:
    """ "6e-07" """
    return f"{value:.0e}"


def times(value: float) -> str:
    """A ratio with the range of its turns: "0.86× (0.82–0.96)"; † behind one that is withdrawn.

    One turn has no range, nor have turns that took equally long.
    """
    text = f"{value:.2f}×"
    if isinstance(value, Number) and value.low is not None:
        low, high = f"{value.low:.2f}", f"{value.high:.2f}"
        if low != high:
            text += f" ({low}–{high})"
        if value.withdrawn:
            text += "†"
    return text


def faster(value: Number) -> str:
    """A ratio of times turned around: how many times as fast, "3.91× (3.27–4.99)"."""
    text = f"{three(1 / value)}×"
    if value.low is not None:
        text += f" ({three(1 / value.high)}–{three(1 / value.low)})"
        if value.withdrawn:
            text += "†"
    return text


def ranged(value: Number, digits: int = 1) -> str:
    """A number with its range: "54.9 (53.8–64.1)"."""
    return f"{value:,.{digits}f} ({value.low:,.{digits}f}–{value.high:,.{digits}f})"


# --- several seeds or turns -----------------------------------------------------------------------


def minus(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """The differences of paired seeds: both began alike and saw the same text."""
    return [value - other for value, other in zip(values, others)]


def over(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratios turn by turn, in rising order: both sides of a turn met the same machine."""
    return sorted(value / other for value, other in zip(values, others))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean, the smallest and the largest: "+0.013 (+0.001 to +0.027)"."""
    low, high = min(values), max(values)
    mean = statistics.fmean(values)
    return f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def middle(values: Sequence[float]) -> str:
    """The median, and where the middle half of many turns lies: "2.09× (2.07 to 2.22)"."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.2f}× ({low:.2f} to {high:.2f})"


def median_of(values: Sequence[float]) -> str:
    """The median and the range of few turns: "8.9× (8.0 to 11.6)"."""
    return f"{statistics.median(values):.1f}× ({min(values):.1f} to {max(values):.1f})"


LEAST_SEEDS = 5
# Quantiles of Student's distribution, 97.5 %, by the number of seeds; of 10 for more of them.
STUDENT = {5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def verdict(differences: Sequence[float]) -> str:
    """What differences of a loss allow to say: a 95 % interval that contains zero decides nothing.

    It is Student's, of five seeds or more. Three signs agree by chance in one case of four.
    """
    seeds = len(differences)
    if seeds < LEAST_SEEDS:
        return f"no verdict from {seeds} seeds"
    reach = STUDENT[min(seeds, max(STUDENT))] * statistics.stdev(differences) / math.sqrt(seeds)
    mean = statistics.fmean(differences)
    if mean + reach < 0:
        return "better"
    if mean - reach > 0:
        return "worse"
    return "undecided"


def quality(row: dict[str, Any]) -> str:
    """Of a file on a device: its accuracy, its agreement with the first row, or its perplexity."""
    if "accuracy" in row:
        return f"{row['accuracy']:.1%} right"
    if "agreement" in row:
        return f"{row['agreement']:.0%} the same"
    return f"perplexity {row['perplexity']:,.1f}"


def where(run: Run) -> str:
    """The machine, versions and date of a run in one line."""
    versions = [each for each in run.versions.split(", ") if each.startswith(("torch", "transf"))]
    return f"{run.machine}, {', '.join(versions)}, {run.date}"


def worst_error(run: Run) -> str:
    """How far predictions were off at most, over all rows of a ladder of bytes or of lengths."""
    errors = []
    for row in run.rows.values():
        # A ladder of lengths is judged where the bytes reach the limit, not at the last try.
        found, predicted = "crossing", "predicted_tokens"
        if predicted not in row:
            found, predicted = "peak_bytes", "predicted_bytes"
        if predicted in row:  # some rows have none
            errors.append(abs(row[predicted] / row[found] - 1))
    return at_most(max(errors))


def bytes_off(row: dict[str, Any], way: str) -> str:
    """Predicted less measured bytes: "0", or with the share that they are."""
    measured = row[f"{way}_measured_bytes"]
    if f"{way}_predicted_bytes" not in row:
        return "no prediction"
    off = row[f"{way}_predicted_bytes"] - measured
    return f"{off:+,.0f} bytes ({off / measured:+.2%})" if off else "0"


def at_most(error: float) -> str:
    """ "1.2% at most", or "less than 0.1%", which would be printed as 0.0%."""
    if error < 0.0005:
        return "less than 0.1%"
    return f"{error:.1%} at most"


FILTERS = (
    mib,
    gib,
    mb,
    bytes_off,
    three,
    change,
    share,
    fixed,
    signed,
    factor,
    small,
    times,
    faster,
    ranged,
    minus,
    over,
)
FILTERS += (spread, middle, median_of, verdict, quality, where, worst_error, at_most)


@functools.cache  # the records and templates of a folder are read once
def environment(folder: Path = RESULTS) -> Environment:
    """Jinja with our filters, and `newest` of the results in this folder."""
    loader = FileSystemLoader(TEMPLATES)
    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    found = Environment(loader=loader, undefined=StrictUndefined, **options)
    found.filters |= {function.__name__: function for function in FILTERS}
    found.filters |= {"mean": statistics.fmean, "median": statistics.median}

    @functools.cache
    def newest_here(notebook: str, **which: Any) -> Run | None:
        return newest(notebook, **which, folder=folder)

    found.globals |= {"newest": newest_here, "doctor_of": doctor}
    found.globals["withdrawn"] = functools.partial(still_withdrawn, folder)
    found.globals |= {"max": max, "abs": abs, "published": published_rows()}
    return found


def still_withdrawn(folder: Path) -> list[dict[str, Any]]:
    """The withdrawn numbers of rows that nobody has measured again since."""
    newest_of = {}
    for record in every_record(folder):
        on_gpu = " CPU cores" not in record["machine"]
        newest_of[record["notebook"], record["row"], record["metric"], on_gpu] = record
    return [record for record in newest_of.values() if "withdrawn" in record]


def published_rows() -> dict[str, Any]:
    """What benchmarks/published_peaks.jsonl says of each row, by name."""
    lines = PUBLISHED.read_text(encoding="utf-8").splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


# --- a place in a text ----------------------------------------------------------------------------


def block(key: str, *, folder: Path = RESULTS) -> str:
    """The markdown of one block: the macro of that name in tables.j2.

    headline-01    the result of a notebook in a few sentences
    table-01, gpu-01, muon-05, …

    Raises KeyError for an unknown key.
    """
    macros = environment(folder).get_template("tables.j2").module
    kind, _, which = key.partition("-")
    if kind in ("headline", "table"):
        return _called(getattr(macros, kind), which)
    if kind == "gpu":
        return _called(macros.table, which, gpu=True)
    if not hasattr(macros, kind):
        raise KeyError(f"numbers:{key} is no block")
    return _called(getattr(macros, kind), which)


def cell(number: str, name: str, *, folder: Path = RESULTS) -> str:
    """What a marker of this notebook and name shows: first on CPU, then on GPU.

    Nothing where no run has it.
    """
    if number == "doctor":
        return doctor.in_words(name)
    here = environment(folder)
    macros = here.get_template("numbers.j2").module
    own = getattr(macros, macro_name(name), None)
    shown = []
    for gpu in (False, True):
        row = None if own else name
        run = here.globals["newest"](macros.PARTS.get(name, number), gpu=gpu, row=row)
        if run is None:
            continue
        if own:
            text = _called(own, run)
        else:
            text = _called(getattr(macros, f"row_{number}", macros.row_in_bytes), run, name)
        if text:
            shown.append(f"{card_of(run.machine)}: {text}" if gpu else text)
    return "; ".join(shown)


def card_of(machine: str) -> str:
    """The name of a GPU without its maker and its memory: "H100", "GeForce RTX 4090"."""
    return re.sub(r"^NVIDIA |[ -]\d+GB.*", "", machine)


def macro_name(name: str) -> str:
    """The name of a marker as that of a macro: "8-bit states" becomes n_8_bit_states."""
    words = re.sub(r"\W+", "_", name)
    if words[0].isdigit():
        return f"n_{words}"
    return words


def _called(macro: Any, *arguments: Any, **options: Any) -> str:
    """The text of a macro; nothing if the run is older than what the text asks for."""
    try:
        text = str(macro(*arguments, **options)).strip("\n")
    except UndefinedError:
        return ""
    return re.sub(r"\n{3,}", "\n\n", text)


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

    def fill_traps(match: re.Match) -> str:
        begin, end = match.groups()
        return f"{begin}{traps.worst()}\n{end}"

    prefix = re.escape(comment)
    rest = r"[\s\S]*?"  # what stood there before
    marked_block = rf"({prefix}<!-- numbers:([\w-]+) -->\n){rest}({prefix}<!-- end -->)"
    text = re.sub(marked_block, fill_block, text)
    # A row of TRAPS.md may have a number, so the cells come last.
    text = re.sub(rf"(<!-- traps:worst -->\n){rest}(<!-- end -->)", fill_traps, text)
    return re.sub(rf"({MARKER.pattern}).*?(<!--/m-->)", fill_cell, text)


# --- the command --------------------------------------------------------------------------------


def page(template: str, folder: Path = RESULTS, **values: Any) -> str:
    """A page that is written whole."""
    text = environment(folder).get_template(template).render(**values)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def stale_texts() -> dict[Path, str]:
    """What each text should be that differs from the recorded results."""
    wanted = {}
    for name in PAGES:
        with contextlib.suppress(UndefinedError):  # without a record a page stays as it is
            wanted[ROOT / "docs" / name] = page(f"{name}.j2")
    marked = [ROOT / name for name in ("README.md", "CHEATSHEET.md", "TRAPS.md")]
    marked += sorted((ROOT / "docs").glob("*.md"))
    for path in marked:
        if path not in wanted and path.exists():
            wanted[path] = render(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "notebooks" / "source").glob("*.py")):
        wanted[path] = render(path.read_text(encoding="utf-8"), comment="# ")
    stale = {}
    for path, text in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale[path] = text
    return stale


def main(arguments: list[str]) -> int:
    """Write the texts, or only check them; gives the exit code."""
    stale = stale_texts()
    names = ", ".join(path.relative_to(ROOT).as_posix() for path in stale) or "nothing"
    if "--check" in arguments:
        print(f"stale: {names}")
        return int(bool(stale))
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    from benchmarks import pictures  # here, because it takes long to import

    pictures.draw()
    print(f"written: {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
