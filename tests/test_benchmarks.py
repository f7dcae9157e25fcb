"""Recorded numbers: kept whole, rendered into the texts, and the GPU command runs on CPU sizes."""

from __future__ import annotations

import gc
import json
import subprocess

import pytest

from benchmarks import gpu, parts, record, render, tables, versus
from recipes_lib.core.machine import provenance

# --- a recorded run, made up --------------------------------------------------------------------


def machine_facts(**changed):
    facts = provenance() | {"fast": False, "device": "cpu", "date": "2026-01-02"}
    return facts | {"name": "Test CPU @ 2.50GHz"} | changed


def row(name, *, predicted, peak, seconds, tokens=100, loss=None):
    return {
        "name": name,
        "predicted_bytes": predicted * 2**20,
        "peak_bytes": int(peak * 2**20),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "loss": loss,
    }


def keep_notebook_01(folder):
    rows = [
        row("baseline", predicted=4, peak=4, seconds=1.0),
        row("+ QLoRA", predicted=3, peak=2, seconds=2.0),
    ]
    curves = {"LoRA, fp32": [[0, 4.0], [24, 2.0]], "everything combined": [[0, 4.5], [24, 2.25]]}
    facts = {"held_out_loss": curves, "micro_batches": [2, 4]}
    content = {"rows": rows, "facts": facts}
    return record.keep(record.LADDERS["01"], content, facts=machine_facts(), folder=folder)


# --- the files ----------------------------------------------------------------------------------


def test_parts_are_added_to_the_file_of_the_machine_and_day(tmp_path):
    """The mistake: the second part of a day replaces the first, or a half-written file stays."""
    path = keep_notebook_01(tmp_path)
    assert path.name.startswith("test-")
    assert path.name.endswith("2026-01-02.json")
    record.keep("limits", {"bf16_tflops": 1.0}, facts=machine_facts(), folder=tmp_path)
    assert set(json.loads(path.read_text())["parts"]) == {record.LADDERS["01"], "limits"}
    assert list(tmp_path.iterdir()) == [path]


def test_small_sizes_are_not_recorded(tmp_path):
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps(provenance() | {"fast": True, "name": "x", "facts": {}, "rows": []}))
    with pytest.raises(ValueError, match="run it in full size first"):
        record.keep_ladder(path)


# --- into the texts -----------------------------------------------------------------------------


def test_numbers_are_rendered_between_the_markers(tmp_path):
    keep_notebook_01(tmp_path)
    old = "<!-- numbers:headline-01 -->\nstale\n<!-- end -->\n| <!--m 01 + QLoRA-->stale<!--/m--> |"
    new = render.render(old, folder=tmp_path)
    assert "stale" not in new
    assert "4 MiB → 2 MiB" in new
    assert "50% less peak memory of tensors" in new
    assert "CPU: -50% peak, 2.00× time" in new
    assert render.render(new, folder=tmp_path) == new, "a second time changes nothing"
    fact = render.render("<!--m 01 dynamic batch-->stale<!--/m-->", folder=tmp_path)
    assert "CPU: 2 micro-batches expected, 4 found" in fact


def test_a_block_without_a_run_says_how_to_make_one(tmp_path):
    assert render.block("gpu-01", folder=tmp_path) == tables.NONE_YET
    assert render.block("headline-01", folder=tmp_path) == "*No run is recorded yet.*"
    with pytest.raises(KeyError, match="magic-01"):
        render.block("magic-01", folder=tmp_path)


def test_source_lines_keep_their_comment_prefix(tmp_path):
    keep_notebook_01(tmp_path)
    marked = "# <!-- numbers:table-01 -->\n# <!-- end -->\n"
    lines = render.render(marked, comment="# ", folder=tmp_path).splitlines()
    assert all(line.startswith("#") for line in lines)
    assert "# | + QLoRA | 3 MiB | 2 MiB | -50% | 2.00× |" in lines


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
        "Full fine-tuning reached 2.50; each took 3 steps.",
        "75% less peak memory",
        "in 0.25× the time per token",
        "0.75× its time, 0.50× its peak",
        "off by 10.0% at most",
    ):
        assert sentence in headline
    cells = {
        "everything combined": "CPU: -75% peak, 0.25× time",  # per token
        "packing": "CPU: 1.50× useful tokens/s, by sorting 1.25×",
        "pure bf16": "CPU: weights that move: nearest 10%, stochastic 100%, master 50%",
    }
    assert {name: render.cell("05", name, folder=tmp_path) for name in cells} == cells


def test_a_row_that_the_newest_machine_lacks_comes_from_one_that_has_it(tmp_path):
    """A CPU that emulates 16-bit products has no row for them."""
    runs = {
        "2026-01-02": (True, ["baseline", "mixed precision"]),
        "2026-01-03": (False, ["baseline"]),
    }
    for date, (bf16, names) in runs.items():
        rows = [row(name, predicted=4, peak=4, seconds=1.0) for name in names]
        facts = machine_facts(date=date, native_bf16=bf16)
        content = {"rows": rows, "facts": {}}
        record.keep(record.LADDERS["01"], content, facts=facts, folder=tmp_path)
    cell = render.cell("01", "mixed precision", folder=tmp_path)
    assert cell == "CPU with native bf16: +0% peak, 1.00× time"
    assert render.cell("01", "baseline", folder=tmp_path).startswith("CPU: ")
    assert "not measured" in render.cell("01", "+ QLoRA", folder=tmp_path)
    table = render.block("table-01", folder=tmp_path)
    assert "| time, native bf16 |" in table
    assert "| mixed precision | | | | | 1.00× |" in table


def test_the_command_writes_what_the_check_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(render, "draw", lambda: None)
    (tmp_path / "CHEATSHEET.md").write_text("no numbers")
    readme = tmp_path / "README.md"
    readme.write_text("<!--m 01 dynamic batch-->stale<!--/m-->")
    assert render.main(["--check"]) == 1
    assert "stale" in readme.read_text(), "a check writes nothing"
    assert render.main([]) == 0
    assert render.main(["--check"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "stale: README.md",
        "written: README.md",
        "stale: nothing",
    ]


def test_texts_show_the_recorded_numbers():
    stale = [path.name for path in render.stale_texts()]
    assert stale == [], "run: python -m benchmarks.render"


# --- the measurements ---------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Small sizes, and a reader for what the parts keep."""
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path))
    monkeypatch.setenv("RECIPES_FAST", "1")
    monkeypatch.delenv("RECIPES_RESULTS", raising=False)
    # What the test before has imported (peft, a model's code) is walked through no more.
    gc.collect()
    gc.freeze()

    def read():
        (file,) = (tmp_path / "results").glob("*.json")
        return json.loads(file.read_text())["parts"]

    return read


def test_the_command_runs_a_part_in_a_process_of_its_own(results, monkeypatch):
    """As on a GPU machine; the parts themselves are tested in this process, which is faster."""
    monkeypatch.setenv("RECIPES_TIER", "cpu")
    gpu.main(["--tier", "cpu", "--fast", "--parts", "limits"])
    found = results()["limits"]
    assert found["bf16_tflops"] > 0
    assert found["copy_gb_per_s"] > 0


def test_a_part_that_fails_or_hangs_costs_only_itself(results, monkeypatch, capsys):
    started = []

    def run(command, *, timeout, **options):
        part = command[-1]
        started.append(part)
        if part == "loss":
            raise subprocess.CalledProcessError(1, command)
        if part == "rope":
            raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(gpu, "provenance", lambda: {"commit": "none"})  # which runs git
    with pytest.raises(SystemExit, match="failed: loss, rope"):
        gpu.main(["--parts", "loss", "rope", "limits"])
    assert started == ["loss", "rope", "limits"]
    assert "-- rope failed" in capsys.readouterr().out


def test_the_ladder_has_a_row_per_technique(results, monkeypatch):
    """On a CPU without the one that refuses there. Every entry has a test of its own."""
    monkeypatch.setattr(parts, "techniques", lambda: ["lora", "optimizer_offload"])
    parts.ladder()
    found = results()["ladder"]
    assert found["failed"] == {}
    assert [row["name"] for row in found["rows"]] == ["baseline", "lora"]
    assert all(row["predicted_bytes"] > 0 and row["tokens_per_second"] > 0 for row in found["rows"])


def test_a_technique_that_fails_costs_only_its_row(results, monkeypatch):
    class Broken:
        batch_size = 2
        seq_len = 8

        def fresh(self):
            return None

        def arrange(self, name, model):
            raise RuntimeError(f"no {name}")

    monkeypatch.setattr(parts, "full_bench", Broken)
    monkeypatch.setattr(parts, "techniques", lambda: ["lora", "optimizer_offload"])
    parts.ladder()
    failed = {name: f"RuntimeError: no {name}" for name in ("baseline", "lora")}
    assert results()["ladder"]["failed"] == failed


def test_recipes_train_what_the_libraries_train(results):
    """Same loss after three updates, and not more memory."""
    parts.versus()
    found = results()["versus"]["pairs"]
    assert found.keys() == versus.pairs().keys()
    for technique, pair in found.items():
        assert "failed" not in pair, pair
        assert pair["loss"]["recipe"] == pytest.approx(pair["loss"]["library"], abs=1e-4), technique
        assert pair["peak_ratio"] < 1.05, technique


def test_ways_that_train_something_else_are_not_timed():
    class NoModel:
        def fresh(self):
            return None

    def side(loss):
        return lambda model, bench: versus.Side(lambda: loss)

    bench = NoModel()
    with pytest.raises(ValueError, match="do not train the same"):
        versus.compare(bench, side(1.0), side(1.1), rounds=1)


def test_qlora_stays_under_its_cap(results):
    parts.qlora()
    found = results()["qlora"]
    assert 0 < found["weights_gib"] < found["peak_gib"] < found["cap_gib"]
    assert found["tokens_per_second"] > 0
