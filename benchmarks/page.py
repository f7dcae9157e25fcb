"""The cheatsheet on paper: docs/cheatsheet.pdf, A4 landscape, three sides.

python -m benchmarks.page      write it

Its words are those of CHEATSHEET.md. `is_current` says whether the file was made from the text of
today: the PDF holds the text's digest among its keywords.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks import arithmetic, markdown
from benchmarks.markdown import Cells, Section
from benchmarks.record import LADDERS, machine_line, newest
from benchmarks.typesetting import HEIGHT, MARGIN, SMALLEST, WIDTH, Sheet

Sections = dict[str, Section]  # by their titles
Draw = Callable[[Sheet, Sections], float]  # draws a side and returns where its lowest line ends

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "CHEATSHEET.md"
PAGE = ROOT / "docs" / "cheatsheet.pdf"

ACROSS = WIDTH - 2 * MARGIN
LOWEST = HEIGHT - MARGIN - 3  # where text may end; the footer is below
SIZES = (8.25, 8.0, 7.75, SMALLEST)  # of the letters: the first with which everything fits
SPACE = 7.0  # above a heading
LEFT = 426.0  # the width of the left column on the first side
BETWEEN = 18.0  # two columns
TERM = 100.0  # the width of the names in the equation
TABLE = [174.0, 130.0, 220.0, ACROSS - 524]  # symptom, recipe, measured, production switch

ERRORS = "What does your error or your clock say?"
EQUATION = "The equation"
DOCTOR = "The doctor on a model of 8 billion parameters"
MODELS = "Large models on limited hardware"
RANKS = "Training on many GPUs"
SPEED = "Optimizing inference speed"
TEXTS = "Training on very long sequences"
TUNING = "Fine-tuning pretrained models"
DEVICES = "Training for edge devices"
TRAPS = "The ten worst traps"
FIRST = ("01",)  # the notebooks of each side
SECOND = ("04", "05")
THIRD = ("03",)
FOURTH = ("02", "06")
PRINTED = (ERRORS, EQUATION, DOCTOR, MODELS, RANKS, SPEED, TEXTS, TUNING, DEVICES, TRAPS)


def write(path: Path = PAGE) -> Path:
    """Write the PDF and return its path. Raises ValueError if something does not fit its side."""
    found = printed_sections()
    sheet = Sheet()
    for draw in (first_side, second_side, third_side, fourth_side):
        sheet.set_size(fitting_size(draw, found))
        draw(sheet, found)
    sheet.pdf.set_title("LLM training recipes: the cheatsheet")
    sheet.pdf.set_keywords(digest())
    # The same text gives the same file.
    sheet.pdf.set_creation_date(datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))
    path.parent.mkdir(exist_ok=True)
    sheet.pdf.output(str(path))
    return path


def fitting_size(
    draw: Callable[[Sheet, dict[str, Section]], float], found: dict[str, Section]
) -> float:
    """The largest letters in which a side has room for all that `draw` puts there."""
    sheet = Sheet()  # to try on
    for size in SIZES:
        sheet.set_size(size)
        lowest = draw(sheet, found)
        if lowest <= LOWEST:
            return size
    raise ValueError(
        f"{draw.__name__} ends at {lowest:.0f} points, and at most {LOWEST:.0f} are free: "
        f"shorten {TEXT.name}, or print fewer of its sections"
    )


def is_current(path: Path = PAGE) -> bool:
    """Whether the PDF was made from today's text and numbers."""
    return path.exists() and digest().encode() in path.read_bytes()


def digest() -> str:
    """A short fingerprint of all that is printed."""
    printed = [repr(section) for section in printed_sections().values()]
    words = "\n".join([*printed, *measured_on(FIRST + SECOND + THIRD + FOURTH)])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def printed_sections() -> Sections:
    """The sections of CHEATSHEET.md that fit on paper: all but the cards."""
    found = markdown.sections(TEXT.read_text(encoding="utf-8"))
    return {title: found[title] for title in PRINTED}


# --- the first side: what to do, why, and the recipes of notebook 01 ------------------------------


def first_side(sheet: Sheet, found: Sections) -> float:
    """Draw it. Returns where its lowest line ends."""
    sheet.side()
    footer(sheet, FIRST)
    top = masthead(sheet)
    left = sheet.title(ERRORS, x=MARGIN, y=top, width=LEFT)
    _header, *rows = found[ERRORS].table
    left = sheet.table(rows, x=MARGIN, y=left, widths=[176, LEFT - 176])

    x = MARGIN + LEFT + BETWEEN
    width = ACROSS - LEFT - BETWEEN
    right = equation(sheet, found[EQUATION].code, x=x, y=top, width=width)
    lower = doctor(sheet, found[DOCTOR], y=max(left, right) + 3)
    return recipes(sheet, found[MODELS], y=lower + SPACE)


def masthead(sheet: Sheet) -> float:
    """The name of the sheet, and the way to its source. Returns where it ends."""
    sheet.use("bold", 17)
    sheet.pdf.text(MARGIN, MARGIN + 12, "LLM training recipes: the cheatsheet")
    sheet.use("plain")
    about = "symptom → recipe → what it was measured to do → the switch in production libraries"
    sheet.pdf.text(MARGIN + 300, MARGIN + 12, about)
    return MARGIN + 22


def footer(sheet: Sheet, numbers: tuple[str, ...]) -> None:
    """Say at the lower end of a side where the numbers of these notebooks come from."""
    sheet.use("plain")
    sheet.pdf.text(MARGIN, HEIGHT - MARGIN + 9, " ".join(measured_on(numbers)))


def measured_on(numbers: tuple[str, ...]) -> list[str]:
    """A sentence per notebook that has been recorded on a CPU."""
    sentences = []
    for number in numbers:
        run = newest(LADDERS[number], "cpu")
        if run is not None:
            sentences.append(f"Notebook {number}: {machine_line(run)}.")
    return sentences


def equation(sheet: Sheet, code: list[str], *, x: float, y: float, width: float) -> float:
    """The equation, its moments and its terms as small tables. Returns where they end."""
    y = sheet.title(EQUATION, x=x, y=y, width=width)
    first, moments, terms = paragraphs(code)
    y = sheet.text(f"**{first[0]}**", x=x, y=y + 2, width=width) + 2
    for lines in (moments, terms):
        y = sheet.table(two_columns(lines), x=x, y=y, widths=[TERM, width - TERM])
        y += 2
    return y


def doctor(sheet: Sheet, section: Section, *, y: float) -> float:
    """The doctor's remedies one after the other, as one paragraph. Returns where it ends."""
    _header, *rows = section.table
    steps = []
    for remedy, peak, fits, _costs in rows:
        size = f"{remedy}: {peak}"
        if "yes" in fits:
            size = f"**{size}**"  # it fits
        steps.append(size)
    text = (
        f"**Example: AdamW on 8 billion parameters in bf16, {arithmetic.BATCH} × "
        f"{arithmetic.TOKENS:,} tokens, on {arithmetic.CARD} GiB** "
        f"(arithmetic, not a run; bold fits): {' → '.join(steps)}"
    )
    return sheet.text(text, x=MARGIN, y=y, width=ACROSS)


def paragraphs(lines: list[str]) -> list[list[str]]:
    """Lines in groups that an empty line divides."""
    groups: list[list[str]] = [[]]
    for line in lines:
        if line:
            groups[-1].append(line)
        else:
            groups.append([])
    return groups


def two_columns(lines: list[str]) -> list[Cells]:
    """Each term in bold and what it is; a line that begins with spaces goes on with the last."""
    rows: list[Cells] = []
    for line in lines:
        name, _, meaning = line.partition("  ")
        if name.strip():
            rows.append([f"**{name}**", meaning.strip()])
        else:
            rows[-1][1] += f"; {meaning.strip()}"
    return rows


def recipes(sheet: Sheet, section: Section, *, y: float) -> float:
    """A scenario as a table over the whole width. Returns where it ends."""
    y = sheet.title(section.title, x=MARGIN, y=y, width=ACROSS)
    header, *rows = section.table
    bold = [f"**{name}**" for name in header]
    rows = [[symptom, f"**{plain(recipe)}**", *rest] for symptom, recipe, *rest in rows]
    y = sheet.table([bold, *rows], x=MARGIN, y=y, widths=TABLE)
    sheet.rule(MARGIN, y, ACROSS, thickness=0.35, grey=0)
    return sheet.text(note(section), x=MARGIN, y=y + 1, width=ACROSS)


def note(section: Section) -> str:
    """What the section says of its measurements, in one paragraph."""
    return " ".join(text for text in section.paragraphs if "Measured:" in text)


def plain(cell: str) -> str:
    """The text of a cell without link and code marks, so that all of it can be bold."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", cell).replace("`", "")


# --- the second side: long texts, fine-tuning, traps ----------------------------------------------


def second_side(sheet: Sheet, found: Sections) -> float:
    """Draw it. Returns where its lowest line ends."""
    sheet.side()
    footer(sheet, SECOND)
    y = recipes(sheet, found[TEXTS], y=MARGIN - 8)
    y = recipes(sheet, found[TUNING], y=y + SPACE)
    title = f"{TRAPS}, and → what guards against each"
    y = sheet.title(title, x=MARGIN, y=y + SPACE, width=ACROSS)
    _header, *rows = found[TRAPS].table
    half = (ACROSS - BETWEEN) / 2
    rows = [[f"**{plain(symptom)}**", cause + named(guard)] for symptom, cause, guard in rows]
    bottoms = []
    for place, part in enumerate((rows[:5], rows[5:])):
        x = MARGIN + place * (half + BETWEEN)
        bottoms.append(sheet.table(part, x=x, y=y, widths=[100, half - 100]))
    return max(bottoms)


def named(guard: str) -> str:
    """An arrow to the first name in a guard: who guards, without how."""
    names = re.findall(r"`[^`]+`", guard)
    if not names:
        return ""
    return f" →\u00a0{names[0]}"  # which stay in one line


# --- the third side: inference --------------------------------------------------------------------


def third_side(sheet: Sheet, found: Sections) -> float:
    """Draw it. Returns where its lowest line ends."""
    sheet.side()
    footer(sheet, THIRD)
    return recipes(sheet, found[SPEED], y=MARGIN - 8)


# --- the fourth side: many ranks ------------------------------------------------------------------


def fourth_side(sheet: Sheet, found: Sections) -> float:
    """Draw it. Returns where its lowest line ends."""
    sheet.side()
    footer(sheet, FOURTH)
    lowest = recipes(sheet, found[RANKS], y=MARGIN - 8)
    return recipes(sheet, found[DEVICES], y=lowest + SPACE)


if __name__ == "__main__":
    print(write())
