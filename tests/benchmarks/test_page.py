"""The printed cheatsheet: all of its text, within the margins, and known to be of today."""

from __future__ import annotations

import pytest

from benchmarks import markdown, page
from benchmarks.typesetting import Sheet, words

TEXT = """# Title

## First

One <!--m 01 LoRA-->number<!--/m--> and a [link](file.py).

| a | b |
|---|--:|
| `x = 1` | **bold** text |

```text
peak = all
```

```bash
make run
```
"""


def test_a_section_has_its_paragraphs_code_and_table():
    section = markdown.sections(TEXT)["First"]
    assert section.paragraphs == ["One number and a [link](file.py)."]
    assert section.table == [["a", "b"], ["`x = 1`", "**bold** text"]]
    assert section.code == ["peak = all"], "commands are not part of the equation"


def test_words_keep_what_sticks_to_them():
    """The mistake: a comma behind code begins a line."""
    found = [[(run.text, run.style) for run in word] for word in words("**A b** `c`, [d](e)")]
    assert found == [
        [("A", "bold")],
        [("b", "bold")],
        [("c", "code"), (",", "plain")],
        [("d", "plain")],
    ]


def test_no_line_is_wider_than_its_column():
    sheet = Sheet()
    text = "short words and `one_very_long(name=that_goes, on=and_on_and_on_and_on)` and an end"
    lines = sheet.lines(text, 80)

    for line in lines:
        assert sum(sheet.width(word) for word in line) <= 80
    drawn = "".join(run.text for line in lines for word in line for run in word)
    assert drawn == text.replace("`", "").replace(" ", ""), "nothing is cut off"


def test_the_page_is_written_whole_and_says_of_which_text_it_is(tmp_path, monkeypatch):
    path = page.write(tmp_path / "page.pdf")
    assert page.is_current(path)
    again = page.write(tmp_path / "again.pdf")
    assert again.read_bytes() == path.read_bytes(), "the same text gives the same file"
    monkeypatch.setattr(page, "measured_on", lambda numbers: ["another machine"])
    assert not page.is_current(path)


def test_what_does_not_fit_is_an_error(tmp_path, monkeypatch):
    """The mistake: the last rows of a table below the end of the paper."""
    monkeypatch.setattr(page, "LOWEST", 300)
    with pytest.raises(ValueError, match="and at most 300 are free"):
        page.write(tmp_path / "page.pdf")
