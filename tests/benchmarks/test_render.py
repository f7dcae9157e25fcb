"""Recorded numbers in the texts: right, whole, and none where nothing was recorded."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import cells, record, render
from recipes_lib.report.speed_ladder import SpeedRow
from tests.benchmarks.test_record import machine_facts

# A run of notebook 01 as its ladder writes it, with numbers that are easy to divide.
RUN_01 = Path(__file__).with_name("01_large_models_limited_hardware.json")


@pytest.fixture
def results(tmp_path):
    record.keep_ladder(RUN_01, folder=tmp_path)
    return tmp_path


def row(name, *, predicted, peak, seconds, tokens=100, loss=None):
    return {
        "name": name,
        "predicted_bytes": predicted * 2**20,
        "peak_bytes": int(peak * 2**20),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "loss": loss,
    }


def in_spaces(number, name, folder):
    """A cell with plain spaces, as a reader sees it."""
    return render.cell(number, name, folder=folder).replace(cells.NO_BREAK, " ")


# --- notebook 01 --------------------------------------------------------------------------------


def test_the_headline_names_the_baseline_of_each_number(results):
    """The mistake: memory against full fine-tuning, and beside it the loss against LoRA."""
    headline = render.block("headline-01", folder=results)
    for sentence in (
        "**1,000 MiB → 100 MiB:**",
        "from full fine-tuning in fp32 to everything combined",
        "**90% less**",
        "Held-out loss in 8 steps, one run each: full fine-tuning 3.75 → 2.62; "
        "LoRA 3.75 → 2.50; everything combined 4.00 → 2.75.",
        "by 0.1% at most",
    ):
        assert sentence in headline


def test_the_table_is_grouped_and_shows_the_spread(results):
    table = render.block("table-01", folder=results)
    lines = table.splitlines()
    assert lines[0] == "### Notebook 01 on a CPU"
    rows = [line.split(" | ")[0].strip("| *") for line in lines[4:] if line.startswith("| ")]
    assert rows == [
        "each recipe alone",
        "baseline",
        "activation checkpointing",
        "mixed precision",
        "with activation checkpointing",
        "LoRA",
        "together",
        "everything combined",
    ]
    assert "| baseline | 1,000 MiB | 1,000 MiB |  | 1.00× | 75% |" in lines
    checkpointed = (
        "| activation checkpointing | 800 MiB | 800 MiB | -20% | 1.25× (1.12–1.50) | 60% |"
    )
    assert checkpointed in lines
    assert "| LoRA | 400 MiB | 400 MiB | -60% | 1.00× (0.90–1.10) |  |" in lines
    assert "the median of 5 turns" in table


def test_a_cell_shows_the_spread_too(results):
    cell = in_spaces("01", "activation checkpointing", results)
    assert cell == "CPU: -20% peak, 1.25× (1.12–1.50) time"
    fact = in_spaces("01", "dynamic batch", results)
    assert fact == "CPU: 2 micro-batches expected, 4 found"


def test_the_source_of_the_weights_says_what_it_means(results):
    assert "4-bit" in render.block("source", folder=results)


def test_rows_of_the_other_kind_of_cpu_stand_in_their_group(results):
    """A CPU that emulates 16-bit products has no row for them."""
    run = json.loads(RUN_01.read_text())
    rows = [each for each in run["rows"] if each["name"] != "mixed precision"]
    machine = {"name": "Other CPU", "native_bf16": False, "date": "2026-01-03"}
    content = {"rows": rows, "facts": run["facts"]}
    record.keep(run["ladder"], content, facts=run | machine, folder=results)
    lines = render.block("table-01", folder=results).splitlines()
    assert lines[2].endswith("| time, native bf16 |")
    mixed = lines.index("| mixed precision |  |  |  |  |  | 0.75× (0.70–0.80) |")
    assert mixed < lines.index("| **with activation checkpointing** |  |  |  |  |  |  |")
    cell = in_spaces("01", "mixed precision", results)
    assert cell == "CPU with native bf16: +0% peak, 0.75× (0.70–0.80) time"


def test_runs_of_an_older_form_are_still_read(tmp_path):
    """Without groups, turns or shares, and with a "+" in front of rows with checkpointing."""
    rows = [
        row("baseline", predicted=4, peak=4, seconds=1.0),
        row("+ QLoRA", predicted=3, peak=2, seconds=2.0),
    ]
    curves = {"LoRA, fp32": [[0, 4.0], [24, 2.0]], "everything combined": [[0, 4.5], [24, 2.25]]}
    content = {"rows": rows, "facts": {"held_out_loss": curves}}
    record.keep(record.LADDERS["01"], content, facts=machine_facts(), folder=tmp_path)
    assert "4 MiB → 2 MiB" in render.block("headline-01", folder=tmp_path)
    assert "| + QLoRA | 3 MiB | 2 MiB | -50% | 2.00× |" in render.block("table-01", folder=tmp_path)
    assert in_spaces("01", "QLoRA", tmp_path) == "CPU: -50% peak, 2.00× time"
    assert render.block("source", folder=tmp_path) == ""


# --- notebook 03 --------------------------------------------------------------------------------


def speed_row(name, speed, *, group, **more):
    row = SpeedRow(
        name=name,
        weight_bytes=10**8,
        tokens=96,
        seconds_per_token=1 / speed,
        tokens_per_second=speed,
        gigabytes_per_second=speed / 10,
        share_of_limit=speed / 400,
        prompt_seconds=0.25,
        group=group,
        **more,
    )
    return asdict(row)


def test_notebook_03_compares_each_row_with_the_first_of_its_group(tmp_path):
    """The mistake: a large model that seems slow because a small one is the first row of all."""
    turns = {"turns": 5, "ratio": 4.0, "ratio_low": 3.5, "ratio_high": 4.5}
    rows = [
        speed_row("fp32", 50, group="small", perplexity=8.0),
        speed_row("int8", 200, group="small", perplexity=8.2, equal_tokens=40, **turns),
        # Faster, at a price: no headline.
        speed_row("int4", 300, group="small", perplexity=9.0),
        speed_row("fp32, large", 10, group="large"),
        speed_row("int8, large", 30, group="large", equal_tokens=96),
    ]
    content = {"rows": rows, "facts": {"bandwidth": 40e9}}
    record.keep(record.LADDERS["03"], content, facts=machine_facts(), folder=tmp_path)
    shown = {
        "int8": "CPU: 4.00× (3.50–4.50) as fast, perplexity +2.5%",
        "int8, large": "CPU: 3.00× as fast",
        "student": "",
    }
    assert {name: in_spaces("03", name, tmp_path) for name in shown} == shown
    headline = render.block("headline-03", folder=tmp_path)
    assert "**50 → 200 tokens per second:** small writes 4.00× (3.50–4.50) as fast" in headline
    assert "perplexity 8.00 → 8.20" in headline
    assert "allows 400 on this machine" in headline
    lines = render.block("table-03", folder=tmp_path).splitlines()
    assert "| **large** |  |  |  |  |  |  |  |  |" in lines
    int8 = "| int8 | 200 | 4.00× (3.50–4.50) | 5.0 | 20.0 | 50% | 40/96 | 8.20 | 250 |"
    assert int8 in lines


# --- notebook 05 --------------------------------------------------------------------------------


def test_notebook_05_in_numbers(tmp_path):
    last = row("everything combined", predicted=1.1, peak=1, seconds=1.0, tokens=400, loss=2.0)
    rows = [row("full fine-tuning", predicted=4, peak=4, seconds=1.0, loss=2.5), last]
    facts = {
        "before": 3.0,
        "steps": 3,
        "verdict": {"difference": -1.0, "low": -1.2, "high": -0.8},
        "production": {
            "ours": {"peak_bytes": 50},
            "Trainer": {"peak_bytes": 100, "time_ratio": 0.75},
        },
        "useful": {"packed": 30.0, "padded": 20.0, "by length": 25.0},
        "changed": {"nearest": 0.1, "stochastic": 1, "master": 0.5},
    }
    content = {"rows": rows, "facts": facts}
    record.keep(record.LADDERS["05"], content, facts=machine_facts(), folder=tmp_path)
    headline = render.block("headline-05", folder=tmp_path)
    for sentence in (
        "**Held-out loss 3.00 → 2.00** (-1.00 nats per token, 95 % interval -1.20 to -0.80)",
        "in 3 steps of one seed",
        "After as many steps full fine-tuning has a loss of 2.50.",
        "75% less peak memory",
        "takes 0.25× the time per token",
        "0.75× its time, 0.50× its peak",
        "off by 10.0% at most",
    ):
        assert sentence in headline
    shown = {
        "everything combined": "CPU: -75% peak, 0.25× time",  # per token
        "packing": "CPU: 1.50× useful tokens/s, by sorting 1.25×",
        "pure bf16": "CPU: weights that move: nearest 10%, stochastic 100%, master 50%",
    }
    assert {name: in_spaces("05", name, tmp_path) for name in shown} == shown


# --- texts --------------------------------------------------------------------------------------


def test_numbers_are_rendered_between_the_markers(results):
    old = "<!-- numbers:headline-01 -->\nstale\n<!-- end -->\n| <!--m 01 LoRA-->stale<!--/m--> |"
    new = render.render(old, folder=results)
    assert "stale" not in new
    assert "1,000 MiB → 100 MiB" in new
    assert "| <!--m 01 LoRA-->CPU:\u00a0-60%\u00a0peak, 1.00×" in new
    assert render.render(new, folder=results) == new, "a second time changes nothing"


def test_a_place_without_a_run_is_empty(tmp_path):
    """The mistake: a text that advertises what nobody has measured."""
    for key in (
        "gpu-01",
        "headline-01",
        "table-03",
        "table-04",
        "versus-gpu",
        "finetune-gpu",
        "norms-cpu",
        "architecture-03",
        "distillation-03",
        "peers-03",
        "source",
    ):
        assert render.block(key, folder=tmp_path) == ""
    assert render.cell("01", "QLoRA", folder=tmp_path) == ""
    assert render.cell("03", "distillation", folder=tmp_path) == ""
    with pytest.raises(KeyError, match="magic-01"):
        render.block("magic-01", folder=tmp_path)


def test_source_lines_keep_their_comment_prefix(results):
    marked = "# <!-- numbers:table-01 -->\n# <!-- end -->\n"
    lines = render.render(marked, comment="# ", folder=results).splitlines()
    assert all(line.startswith("#") for line in lines)
    assert any(line.startswith("# | LoRA |") for line in lines)


def test_the_8_billion_line_is_arithmetic_on_any_machine():
    assert render.cell("doctor", "8b") == "106 → 7 GiB"
    table = render.block("doctor-8b")
    assert "Arithmetic, not a run" in table
    assert "| QLoRA | 7" in table


def test_the_command_writes_what_the_check_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(render, "draw", lambda: None)
    monkeypatch.setattr(render.page, "is_current", lambda: True)
    (tmp_path / "CHEATSHEET.md").write_text("no numbers")
    readme = tmp_path / "README.md"
    readme.write_text("<!--m 01 QLoRA of nobody-->stale<!--/m-->")
    assert render.main(["--check"]) == 1
    assert "stale" in readme.read_text(), "a check writes nothing"
    assert render.main(["CHEATSHEET.md"]) == 0
    assert "stale" in readme.read_text(), "another text is left alone"
    assert render.main([]) == 0
    assert render.main(["--check"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "stale: README.md",
        "written: nothing",
        "written: README.md",
        "stale: nothing",
    ]


def test_texts_show_the_recorded_numbers():
    stale = [path.name for path in render.stale_texts()]
    assert stale == [], "run: python -m benchmarks.render"


def test_the_printed_page_shows_the_recorded_numbers():
    assert render.page.is_current(), "run: python -m benchmarks.page"
