"""Recorded numbers: kept whole, rendered into the texts, and the GPU command runs on CPU sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import record, render
from recipes_lib.core.machine import provenance
from recipes_lib.workflows.bench.run import Bench, techniques

ROOT = Path(__file__).resolve().parents[1]


def row(name, *, predicted, peak, seconds, tokens=100, loss=None):
    sizes = {"predicted_bytes": predicted * 2**20, "peak_bytes": int(peak * 2**20)}
    return {
        "name": name,
        **sizes,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "loss": loss,
    }


def results(folder, rows=2):
    facts = provenance() | {"fast": False, "name": "Test CPU @ 2.50GHz", "date": "2026-01-02"}
    names = ["baseline", "+ QLoRA"][:rows]
    rows = [row(n, predicted=4 - i, peak=4 / (i + 1), seconds=1.0 + i) for i, n in enumerate(names)]
    curves = {"LoRA, fp32": [[0, 4.0], [24, 2.0]], "everything combined": [[0, 4.5], [24, 2.25]]}
    content = {"rows": rows, "facts": {"held_out_loss": curves, "micro_batches": [2, 4]}}
    return record.keep(render.LADDERS["01"], content, facts=facts, folder=folder)


def test_parts_are_added_to_the_file_of_the_machine_and_day(tmp_path):
    path = results(tmp_path)
    assert path.name.startswith("test-") and path.name.endswith("2026-01-02.json")
    facts = provenance() | {"fast": False, "name": "Test CPU @ 2.50GHz", "date": "2026-01-02"}
    record.keep("limits", {"bf16_tflops": 1.0}, facts=facts, folder=tmp_path)
    assert set(json.loads(path.read_text())["parts"]) == {render.LADDERS["01"], "limits"}
    assert list(tmp_path.iterdir()) == [path]  # no half-written file beside it


def test_small_sizes_are_not_recorded(tmp_path):
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps(provenance() | {"fast": True, "name": "x", "facts": {}, "rows": []}))
    with pytest.raises(ValueError, match="run it in full size first"):
        record.keep_ladder(path)


def test_numbers_are_rendered_between_the_markers(tmp_path):
    results(tmp_path)
    old = "<!-- numbers:headline-01 -->\nstale\n<!-- end -->\n| <!--m 01 + QLoRA-->stale<!--/m--> |"
    new = render.render(old, folder=tmp_path)
    assert (
        "stale" not in new and "4 MiB → 2 MiB" in new and "50% less peak memory of tensors" in new
    )
    assert "CPU: -50% peak, 2.00× time" in new
    fact = render.render("<!--m 01 dynamic batch-->stale<!--/m-->", folder=tmp_path)
    assert "CPU: 2 micro-batches expected, 4 found" in fact
    assert render.render(new, folder=tmp_path) == new
    assert render.NONE_YET in render.render(
        "<!-- numbers:gpu-01 -->\n<!-- end -->", folder=tmp_path
    )


def test_notebook_05_in_numbers(tmp_path):
    rows = [row("full fine-tuning", predicted=4, peak=4, seconds=1.0, loss=2.5)]
    rows.append(
        row("everything combined", predicted=1.1, peak=1, seconds=1.0, tokens=400, loss=2.0)
    )
    libraries = {"ours": {"peak_bytes": 50}, "Trainer": {"peak_bytes": 100, "time_ratio": 0.75}}
    facts = {
        "before": 3.0,
        "verdict": {"difference": -1.0, "low": -1.2, "high": -0.8},
        "production": libraries,
    }
    facts |= {"steps": 3, "useful": {"packed": 30.0, "padded": 20.0, "by length": 25.0}}
    facts |= {"changed": {"nearest": 0.1, "stochastic": 1, "master": 0.5}}
    machine = provenance() | {"fast": False, "device": "cpu", "date": "2026-01-02"}
    record.keep(
        render.LADDERS["05"], {"rows": rows, "facts": facts}, facts=machine, folder=tmp_path
    )
    headline = render.block("headline-05", folder=tmp_path)
    assert (
        "**Held-out loss 3.00 → 2.00** (-1.00 nats per token, 95 % interval -1.20 to -0.80)"
        in headline
    )
    assert "Full fine-tuning reached 2.50; each took 3 steps." in headline
    assert "75% less peak memory" in headline and "in 0.25× the time per token" in headline
    assert "0.75× its time, 0.50× its peak" in headline
    assert "off by 10.0% at most" in headline
    assert (
        render.cell("05", "everything combined", folder=tmp_path) == "CPU: -75% peak, 0.25× time"
    )  # per token
    assert (
        render.cell("05", "packing", folder=tmp_path)
        == "CPU: 1.50× useful tokens/s, by sorting 1.25×"
    )
    assert "nearest 10%, stochastic 100%, master 50%" in render.cell(
        "05", "pure bf16", folder=tmp_path
    )


def test_a_row_that_the_newest_machine_lacks_comes_from_one_that_has_it(tmp_path):
    """A CPU that emulates 16-bit products has no row for them."""
    facts = provenance() | {"fast": False, "device": "cpu"}
    both = ["baseline", "mixed precision"]
    for date, bf16, names in (("2026-01-02", True, both), ("2026-01-03", False, both[:1])):
        content = {
            "rows": [row(name, predicted=4, peak=4, seconds=1.0) for name in names],
            "facts": {},
        }
        record.keep(
            render.LADDERS["01"],
            content,
            facts=facts | {"date": date, "native_bf16": bf16},
            folder=tmp_path,
        )
    cell = render.cell("01", "mixed precision", folder=tmp_path)
    assert cell == "CPU with native bf16: +0% peak, 1.00× time"
    assert render.cell("01", "baseline", folder=tmp_path).startswith("CPU: ")
    assert "not measured" in render.cell("01", "+ QLoRA", folder=tmp_path)


def test_source_lines_keep_their_comment_prefix(tmp_path):
    results(tmp_path)
    lines = render.render(
        "# <!-- numbers:table-01 -->\n# <!-- end -->\n", comment="# ", folder=tmp_path
    ).splitlines()
    assert all(line.startswith("#") for line in lines) and any(
        "| + QLoRA |" in line for line in lines
    )


def test_texts_show_the_recorded_numbers():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.render", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + "run: python -m benchmarks.render"


@pytest.mark.parametrize(
    "technique", [name for name in techniques() if name != "optimizer_offload"]
)
def test_bench_of_every_technique(technique, tmp_path, monkeypatch):
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path))
    ladder = Bench("tiny-llama", 8, 64, micro_batches=8, layers=8).run(technique, repeats=1)
    assert [row.name for row in ladder.rows] == ["baseline", technique]
    assert abs(ladder[technique].prediction_error) < 0.15


def test_bench_bad_input():
    with pytest.raises(ValueError, match="must divide"):
        Bench("tiny-llama", 4, 32, micro_batches=3)
    with pytest.raises(ValueError, match="at least 1 row"):
        Bench("tiny-llama", 0, 32, micro_batches=1)
    with pytest.raises(ValueError, match="only a shape"):
        Bench("smollm2", 4, 32, micro_batches=4, layers=2)
    with pytest.raises(ValueError, match=r"only nn\.Linear is quantized"):
        Bench("tiny-gpt2", 4, 32, micro_batches=4).run("qlora", repeats=1)
    with pytest.raises(ValueError, match="choose one of"):
        Bench("tiny-llama", 4, 32, micro_batches=4).run("magic")
    with pytest.raises(ValueError, match="in host memory already"):
        Bench("tiny-llama", 4, 32, micro_batches=4).run("optimizer_offload", repeats=1)


def test_gpu_command_on_cpu_sizes(tmp_path):
    """The command that a GPU machine runs, with the same code on small shapes (the notebook runs by itself)."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--tier", "cpu", "--fast", "--parts"]
    environment = os.environ | {"RECIPES_RUNS": str(tmp_path)}
    parts = ["limits", "ladder", "versus", "qlora"]
    done = subprocess.run(
        [*command, *parts], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "results").glob("*.json")
    found = json.loads(file.read_text())["parts"]
    assert set(found) == set(parts)
    for technique, pair in found["versus"][
        "pairs"
    ].items():  # the library trains the same: same loss after 5 steps
        assert pair["loss"]["recipe"] == pytest.approx(pair["loss"]["library"], abs=1e-4), technique
        assert pair["peak_ratio"] < 1.05, technique
