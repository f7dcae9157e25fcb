"""Text on a PDF page: words in three styles, broken into lines, in columns and tables.

    sheet = Sheet()
    sheet.set_size(8)
    sheet.side()
    bottom = sheet.table(table, x=26, y=60, widths=[200, 150])

Everything is in points, measured from the upper left corner. What is drawn returns where it ends.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.markdown import Cells, Run, runs

WIDTH = 841.89  # A4, landscape
HEIGHT = 595.28
MARGIN = 27.0
GAP = 9.0  # between two columns
PADDING = 1.35  # above and below the text of a row
GREY = 150  # of the rules between rows
SMALLEST = 7.5  # points: less cannot be read on paper

FONTS = {"plain": ("Text", ""), "bold": ("Text", "B"), "code": ("Code", "")}

Word = list[Run]  # what may not be torn apart at a line's end


class Sheet:
    """The pages, and a pen that knows the width of words."""

    def __init__(self) -> None:
        # Here, because only this command needs it.
        from fpdf import FPDF

        self.pdf = FPDF(orientation="landscape", unit="pt", format="A4")
        self.pdf.set_auto_page_break(False)
        for family, style, path in font_files():
            self.pdf.add_font(family, style, path)
        self.set_size(8.0)

    def set_size(self, size: float) -> None:
        """Set the size of the text in points. Letters of the code font are wider: a bit smaller."""
        code = max(SMALLEST, size - 0.5)
        self.sizes = {"plain": size, "bold": size, "code": code}
        self.leading = 1.19 * size  # from one line to the next

    def side(self) -> None:
        """Begin a page."""
        self.pdf.add_page()
        self.pdf.set_text_color(0)

    def use(self, style: str, size: float | None = None) -> None:
        """Choose the font of a style for what comes next."""
        family, weight = FONTS[style]
        self.pdf.set_font(family, weight, size or self.sizes[style])

    # --- lines ------------------------------------------------------------------------------------

    def width(self, word: Word) -> float:
        """How wide a word is."""
        total = 0.0
        for run in word:
            self.use(run.style)
            total += self.pdf.get_string_width(run.text)
        return total

    def lines(self, text: str, width: float) -> list[list[Word]]:
        """The words of `text` in lines of at most `width`."""
        self.use("plain")
        space = self.pdf.get_string_width(" ")
        lines: list[list[Word]] = [[]]
        used = 0.0
        for word in self._short_words(text, width):
            size = self.width(word)
            if lines[-1] and used + space + size > width:
                lines.append([])
                used = 0.0
            if lines[-1]:
                used += space
            lines[-1].append(word)
            used += size
        return lines

    def _short_words(self, text: str, width: float) -> list[Word]:
        """The words of a text; one that is wider than a line is cut behind a sign."""
        short = []
        for word in words(text):
            while self.width(word) > width:
                head, word = self._cut(word, width)
                short.append(head)
            short.append(word)
        return short

    def _cut(self, word: Word, width: float) -> tuple[Word, Word]:
        """The part of a too wide word that fits, and the rest."""
        first = word[0]
        self.use(first.style)
        fits = len(first.text)
        while self.pdf.get_string_width(first.text[:fits]) > width:
            fits -= 1
        # Behind a sign, a reader sees that the word goes on.
        signs = [place for place in range(1, fits + 1) if first.text[place - 1] in "(,._=/-"]
        place = max(signs, default=max(fits, 1))
        head = [Run(first.text[:place], first.style)]
        rest = [Run(first.text[place:], first.style), *word[1:]]
        return head, [run for run in rest if run.text]

    def text(self, text: str, *, x: float, y: float, width: float) -> float:
        """Draw a paragraph below y. Returns where it ends."""
        for line in self.lines(text, width):
            y += self.leading
            at = x
            for word in line:
                for run in word:
                    self.use(run.style)
                    self.pdf.text(at, y - 0.23 * self.leading, run.text)
                    at += self.pdf.get_string_width(run.text)
                self.use("plain")
                at += self.pdf.get_string_width(" ")
        return y

    def title(self, text: str, *, x: float, y: float, width: float, size: float = 11) -> float:
        """Draw a heading with a rule below it. Returns where it ends."""
        self.use("bold", size)
        self.pdf.text(x, y + size, text)
        y += size + 3
        self.rule(x, y, width, thickness=0.9, grey=0)
        return y + 1.5

    def rule(self, x: float, y: float, width: float, *, thickness: float, grey: int) -> None:
        """A horizontal line."""
        self.pdf.set_draw_color(grey)
        self.pdf.set_line_width(thickness)
        self.pdf.line(x, y, x + width, y)

    # --- tables -----------------------------------------------------------------------------------

    def table(self, rows: list[Cells], *, x: float, y: float, widths: list[float]) -> float:
        """Draw rows with thin rules between them. Returns where the last one ends."""
        total = sum(widths)
        for number, row in enumerate(rows):
            if number > 0:
                self.rule(x, y, total, thickness=0.35, grey=GREY)
            y = self._row(row, x=x, y=y + PADDING, widths=widths) + PADDING
        return y

    def _row(self, row: Cells, *, x: float, y: float, widths: list[float]) -> float:
        ends = [y + self.leading]
        for cell, width in zip(row, widths, strict=True):
            if cell:
                ends.append(self.text(cell, x=x, y=y, width=width - GAP))
            x += width
        return max(ends)


def words(text: str) -> list[Word]:
    """What stands between spaces. A comma behind code belongs to its word."""
    found: list[Word] = [[]]
    for run in runs(text):
        for number, piece in enumerate(run.text.split(" ")):
            if number > 0:
                found.append([])
            if piece:
                found[-1].append(Run(piece, run.style))
    return [word for word in found if word]


def font_files() -> list[tuple[str, str, Path]]:
    """Family, weight and file of each font: Source Sans Pro, and matplotlib's for code."""
    import font_source_sans_pro
    import matplotlib

    sans = font_source_sans_pro.font_files_ttf
    code = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"
    return [
        ("Text", "", Path(sans["SourceSansPro"])),
        ("Text", "B", Path(sans["SourceSansProSemibold"])),
        ("Code", "", code),
    ]
