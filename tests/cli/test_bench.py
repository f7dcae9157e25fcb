import json

import pytest

from recipes_lib.workflows.bench.run import Bench


def test_bench_prints_keeps_and_draws_both_rows(command, runs):
    """The mistake: an option that does not reach the model, or a picture of one row."""
    picture = runs / "memory.png"
    options = ["--model", "tiny-llama", "--batch-size", "4", "--seq-len", "32", "--layers", "3"]
    technique = "gradient_accumulation"
    status, out, err = command("bench", technique, *options, "--timeline", str(picture))
    assert status == 0, err

    kept = runs / f"bench_{technique}.json"
    assert f"rows: {kept}" in out
    rows = json.loads(kept.read_text())["rows"]
    peaks = {row["row"]: row["value"] for row in rows if row["metric"] == "peak_bytes"}
    assert list(peaks) == ["baseline", technique]
    assert peaks[technique] < peaks["baseline"]
    losses = [row["value"] for row in rows if row["metric"] == "loss"]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5), "other tokens or weights"
    expected = Bench("tiny-llama", 4, 32, 4, layers=3).predict("baseline").peak
    assert peaks["baseline"] == pytest.approx(expected, rel=0.005)
    assert "loss: on random tokens" in out

    assert f"timeline: {picture}" in out
    assert picture.exists()
