"""What `make gpu` measures of notebook 02 on one GPU, in small sizes and on a CPU."""

import torch

from benchmarks import one_rank, parts, record
from recipes_lib.core.measure.machine import Machine


def test_the_parts_in_small_sizes(monkeypatch, tmp_path):
    """What a GPU machine runs, with the same code: every row is the training of one process."""
    monkeypatch.setenv("RECIPES_RESULTS", str(tmp_path))
    parts.ranks()
    parts.experts()
    found = record.newest("ranks", folder=tmp_path).facts
    assert set(one_rank.ON_ONE) <= set(found)
    for name in one_rank.ON_ONE:
        row = found[name]
        assert row["difference"] < 1e-5, name
        assert abs(row["kept_bytes"] / row["predicted_bytes"] - 1) < 0.01, name
    ways = record.newest("experts", folder=tmp_path).facts
    assert abs(ways["loop"]["loss"] - ways["grouped"]["loss"]) < 0.01


def test_a_strategy_that_fails_costs_only_its_row(monkeypatch):
    """The mistake: one strategy that this GPU cannot run ends the whole part."""
    monkeypatch.setattr(one_rank, "ON_ONE", ["one process", "HSDP", "DDP"])
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    seen = []
    for content in one_rank.strategies(sizes=small, rows=2, tokens=16, steps=3):
        seen.append(list(content["strategies"]))
    assert seen == [["one process"], ["one process", "HSDP"], ["one process", "HSDP", "DDP"]]
    assert "replicate=0" in content["strategies"]["HSDP"]["failed"]
    assert content["strategies"]["DDP"]["difference"] == 0


def test_one_gpu_does_not_record_the_times_of_its_cpu(monkeypatch, capsys):
    """The mistake: notebook 02 with ranks on the CPU, in the file of a GPU."""
    monkeypatch.setattr(parts, "machine", lambda: type("M", (Machine,), {"device": "cuda"}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(parts, "run_notebook", None)
    parts.notebook_02()
    assert "wants four GPUs" in capsys.readouterr().out
