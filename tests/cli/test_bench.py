import json

import pytest

from recipes_lib.workflows.bench.run import Bench


def test_bench_prints_keeps_and_draws_both_rows(command, runs):
    """The mistake: an option that does not reach the model, or a loss of a later step."""
    picture = runs / "memory.png"
    options = ["--model", "tiny-llama", "--batch-size", "4", "--seq-len", "32", "--layers", "3"]
    technique = "gradient_accumulation"
    status, out, err = command("bench", technique, *options, "--timeline", str(picture))
    assert status == 0, err
    assert f"measuring baseline\nmeasuring {technique}\n" in out

    kept = runs / f"bench_{technique}.json"
    assert f"rows: {kept}" in out
    rows = json.loads(kept.read_text())["rows"]
    losses = {row["row"]: row["value"] for row in rows if row["metric"] == "loss"}
    assert list(losses) == ["baseline", technique]
    assert "loss: of the first step, on random tokens" in out
    bench = Bench("tiny-llama", 4, 32, 4, layers=3)
    model = bench.fresh()
    untrained = model(**bench.batch(model)).loss.item()
    assert losses["baseline"] == pytest.approx(untrained, abs=1e-4)

    assert f"timeline: {picture}" in out
    assert picture.exists()
