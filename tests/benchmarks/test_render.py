"""Recorded numbers in the texts: right, whole, and none where nothing was recorded."""

from __future__ import annotations

import pytest

from benchmarks import record, render
from tests.benchmarks.test_record import machine_facts

MIB = 2**20


def measured(name, peak, *times):
    """The flat records of a row: its bytes, and a ratio with its range if it took turns."""
    sizes = {"group": "alone", "predicted_bytes": peak * MIB, "peak_bytes": peak * MIB}
    rows = [{"row": name, "metric": metric, "value": value} for metric, value in sizes.items()]
    if times:
        ratio, low, high = times
        rows.append({"row": name, "metric": "turns", "value": 5})
        ends = {"value": ratio, "low": low, "high": high, "unit": "×"}
        rows.append({"row": name, "metric": "ratio"} | ends)
    return rows


@pytest.fixture
def results(tmp_path):
    """A run of notebook 01 with numbers that are easy to divide."""

    rows = [
        *measured("baseline", 1000),
        *measured("LoRA", 400, 1.0, 0.9, 1.1),
        *measured("offload", 970, 5.7, 1.2, 11.2),
        *measured("8-bit AdamW in backward, compiled", 300, 1.3, 1.2, 1.4),
        *measured("QLoRA", 200, 1.6, 1.5, 1.7),
        *measured("16 bits, compiled, chunked loss", 600, 0.5, 0.5, 0.6),
        *measured("everything combined", 100, 0.8, 0.8, 0.9),
    ]
    curves = {"full, fp32": [[0, 3.75], [8, 2.62]]}
    facts = {"held_out_loss": curves, "micro_batches": [2, 4]}
    record.keep("01", {"rows": rows, "facts": facts}, facts=machine_facts(), folder=tmp_path)
    return tmp_path


def test_a_row_and_a_fact_in_a_sentence(results):
    cells = {name: render.cell("01", name, folder=results) for name in ("LoRA", "dynamic batch")}
    assert cells == {
        "LoRA": "-60% peak, 1.00× (0.90–1.10) time",
        "dynamic batch": "4 micro-batches found, with the same gradients",
    }


def test_a_disturbed_time_is_not_quoted_and_stays_listed(results):
    """The mistake: "5.70× (1.20–11.20)" in the cheatsheet, or no trace of it in the results."""
    assert render.cell("01", "offload", folder=results) == "to be measured again"
    assert "5.70× (1.20–11.20)†" in render.block("table-01", folder=results)
    assert "| 01 | offload | 5.70×" in render.page("results.md.j2", folder=results)


def test_the_headline_and_the_table(results):
    headline = render.block("headline-01", folder=results)
    assert "takes 1,000 MiB with all weights in fp32" in headline
    assert "300 MiB for all weights (-70%, in 1.30× (1.20–1.40) the time)" in headline
    assert "100 MiB for adapters on four bits (-90%, in 0.80× (0.80–0.90) the time).**" in headline
    assert "| 100 | -90% | 0.80× (0.80–0.90) |\n> | *what is often promised" in headline
    assert "| -70% | 0.20× |\n>\n> On the CPU each row was predicted" in headline
    assert "steps in backward | 300 | -70% | 1.30× (1.20–1.40) |" in headline
    table = render.block("table-01", folder=results)
    assert "| LoRA | 400 MiB | 400 MiB | -60% | 1.00× (0.90–1.10) |" in table
    assert "| **alone** |" in table and "Test CPU" in table


@pytest.mark.parametrize(
    ("beyond", "verdict"),
    [
        ([-0.1, -0.2, -0.3, -0.2, -0.2], "better"),
        ([0.01, 0.01, 0.01, 0.01, 0.5], "undecided"),  # all of one sign, and far apart
        ([-0.1, -0.2, -0.3], "no verdict from 3 seeds"),
    ],
)
def test_an_interval_with_zero_decides_nothing(beyond, verdict):
    """The mistake: three seeds agree by chance one time in four, and are a verdict."""
    assert render.verdict(beyond) == verdict


def test_ratios_are_those_of_the_same_turn():
    """The mistake: the best turn of one over the best of another, whatever the machine did."""
    assert render.over([2.0, 20.0, 6.0], [1.0, 10.0, 2.0]) == [2.0, 2.0, 3.0]
    assert render.median_of([4, 5, 8]) == "5.0× (4.0 to 8.0)"


def test_a_place_without_a_run_is_empty(tmp_path):
    """The mistake: a text that advertises what nobody has measured."""
    for key in ("gpu-01", "headline-01", "table-03", "versus-gpu", "peers-03", "source"):
        assert render.block(key, folder=tmp_path) == ""
    assert render.cell("01", "QLoRA", folder=tmp_path) == ""
    assert render.cell("03", "distillation", folder=tmp_path) == ""
    with pytest.raises(KeyError, match="magic-01"):
        render.block("magic-01", folder=tmp_path)


def test_source_lines_keep_their_comment_prefix(results):
    marked = "# <!-- numbers:table-01 -->\n# stale\n# <!-- end -->\n"
    new = render.render(marked, comment="# ", folder=results)
    assert "stale" not in new and "# | LoRA |" in new
    assert all(line.startswith("#") for line in new.splitlines())
    assert render.render(new, comment="# ", folder=results) == new, "twice changes nothing"


def test_every_recorded_fact_has_words():
    """The mistake: a marker whose macro no longer fits what the run holds is an empty cell."""
    macros = render.environment().get_template("numbers.j2").module
    for path in (render.ROOT / "CHEATSHEET.md", render.ROOT / "README.md"):
        for number, name in render.MARKER.findall(path.read_text(encoding="utf-8")):
            assert render.cell(number, name), f"{path.name}: {number} {name}"
    assert macros.PARTS


def test_texts_show_the_recorded_numbers():
    stale = [path.name for path in render.stale_texts()]
    assert stale == [], "run: make texts"
