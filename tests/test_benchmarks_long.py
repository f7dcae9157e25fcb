"""The measurements of notebook 04 in small sizes, and their numbers in the texts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import long_sequences, record, render
from recipes_lib.core.machine import provenance
from recipes_lib.workflows.bench.losses import compare_losses

ROOT = Path(__file__).resolve().parents[1]


def test_gpu_parts_on_cpu_sizes(tmp_path):
    parts = ["attention", "loss", "rope", "ablation", "longest", "context"]
    command = [sys.executable, "-m", "benchmarks.gpu", "--tier", "cpu", "--fast", "--parts", *parts]
    environment = os.environ | {"RECIPES_RUNS": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "results").glob("*.json")
    found = json.loads(file.read_text())["parts"]
    assert set(found) == set(parts)
    assert [row["tokens"] for row in found["attention"]["rows"]] == [64, 64, 128, 128]
    assert all(way["error"] < 1e-4 for way in found["loss"]["ways"].values())
    assert {len(curve) for curve in found["rope"]["curves"].values()} == {3} and len(
        found["rope"]["curves"]
    ) == 4
    tokens = [row["tokens"] for row in found["ablation"]["rows"].values()]
    assert len(tokens) == 4 and tokens[-1] > 1.2 * tokens[0]
    assert found["longest"]["tokens"] == 512 and found["longest"]["peak_gib"] > 0
    assert found["context"]["tokens"] >= 64


def test_out_of_memory_shortens_the_row():
    def step(tokens):
        if tokens > 800:
            raise torch.OutOfMemoryError("full")
        return {"tokens": tokens}

    assert long_sequences._until_it_fits(step, 1000) == {"tokens": 765}
    assert (
        long_sequences._until_it_fits(step, 5000)["failed"] == "out of memory, 3349 tokens and more"
    )


def test_scores_that_do_not_fit_cost_their_row_only(monkeypatch):
    real = long_sequences.measure_attention

    def measured(model, *, seq_len, eager):
        if eager and seq_len > 32:
            raise torch.OutOfMemoryError("full")
        return real(model, seq_len=seq_len, eager=eager, rounds=1)

    monkeypatch.setattr(long_sequences, "measure_attention", measured)
    *_, found = long_sequences.compare_attention("tiny-llama", [32, 64, 96], 64)
    rows = [(row["tokens"], row["kernel"]) for row in found["rows"]]
    assert rows == [(32, "eager"), (32, "fused"), (64, "fused"), (96, "fused")]


def test_the_recipes_of_the_ablation_do_not_change_the_maths(monkeypatch):
    """At one length for all: the loss is that of the same weights."""
    monkeypatch.setattr(long_sequences, "predicted_longest", lambda plan, limit_bytes: 300)
    *_, found = long_sequences.ablation("tiny-llama", 4, 2**30)
    losses = [row["loss"] for row in found["rows"].values()]
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-4)


def test_losses_side_by_side():
    costs = compare_losses(tokens=300, hidden=32, vocab=5000, rounds=1)
    assert {"plain", "ours"} <= costs.keys()
    assert all(cost.error < 1e-5 and cost.seconds > 0 for cost in costs.values())


def test_notebook_04_in_numbers(tmp_path):
    rows = [
        {
            "name": "baseline",
            "predicted_tokens": 110,
            "tokens": 99,
            "crossing": 100,
            "peak_bytes": 1,
            "seconds": 2.0,
            "loss": 2.5,
        }
    ]
    rows.append(
        rows[0]
        | {
            "name": "everything combined",
            "predicted_tokens": 3000,
            "tokens": 2970,
            "crossing": 3000,
            "seconds": 5.0,
        }
    )
    facts = {"model": "tiny", "limit_bytes": 4 * 2**30, "timed_at": 64, "loss_error": 2e-6}
    facts |= {"slopes": {"baseline": 1.5, "flash attention": 1.0}}
    facts |= {
        "local": {
            "tokens": 16384,
            "speedup": {"sliding window": 5.25},
            "ideal": {"sliding window": 6.5},
        }
    }
    facts |= {"curriculum": {"fixed length": [2.5, 2.75], "curriculum": [2.25, 2.5]}}
    facts["loss"] = {
        "ours": {"seconds": 1.0, "peak_bytes": 5},
        "torch": {"seconds": 4.0},
        "plain": {"seconds": 2.0, "peak_bytes": 10},
    }
    machine = provenance() | {"fast": False, "device": "cpu", "date": "2026-01-02"}
    record.keep(
        render.LADDERS["04"], {"rows": rows, "facts": facts}, facts=machine, folder=tmp_path
    )
    curves = {"none": [1.0, 5.0], "yarn": [1.1, 1.2]}
    record.keep("rope", {"tokens": 12288, "curves": curves}, facts=machine, folder=tmp_path)
    headline = render.block("headline-04", folder=tmp_path)
    assert "**99 → 2,970 tokens:**" in headline and "**30 times as long**" in headline
    assert (
        "within 4 GiB" in headline
        and "with the same loss to 2e-06" in headline
        and "by 10.0% at most" in headline
    )
    table = render.block("table-04", folder=tmp_path)
    assert (
        "| everything combined | 3,000 | +0.0% | 2,970 | 30.0× | 2.50× |" in table
        and "at 64 tokens" in table
    )
    cells = {
        "everything combined": "CPU: 30.0× the baseline's length, 2.50× its time per token",
        "flash": "CPU: the memory grows with the power 1.00 of the length, eager 1.50",
        "loss": "CPU: 0.50× the memory and 0.50× the time of all logits; "
        "of `F.linear_cross_entropy` 0.25× the time with its default",
        "sliding window": "CPU: 5.2× faster at 16,384 tokens, 6.5× fewer pairs",
        "curriculum": "CPU: loss on long rows 2.375, fixed length 2.625, at equal compute",
        "rope": "CPU: loss at 12,288 tokens 5.00, with YaRN 1.20",
    }
    assert {name: render.cell("04", name, folder=tmp_path) for name in cells} == cells
    assert render.block("gpu-04", folder=tmp_path) == render.NONE_YET
