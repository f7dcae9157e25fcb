"""Exports in another process: kept, made anew when they must be, with their errors."""

import pytest
import torch
from torch import nn

from recipes_lib.workflows.on_device.background import in_background, key_of
from tests.workflows.on_device.slow_exports import export_badly, export_quickly

PATIENCE = 120  # seconds, on a machine that computes something else


@pytest.fixture(autouse=True)
def another_process(monkeypatch):
    """FAST mode would take this one."""
    monkeypatch.setenv("RECIPES_FAST", "0")


def test_a_job_works_beside_this_process_and_its_result_is_kept(tmp_path, capfd):
    """The mistake: minutes of export again for the same weights, or an old file for new ones."""
    model = nn.Linear(2, 2)
    calls = tmp_path / "calls"
    arguments = {"model": model, "path": tmp_path / "a.pte", "text": str(calls)}
    assert in_background(export_quickly, **arguments).result(timeout=PATIENCE) == 2
    assert in_background(export_quickly, **arguments).result(timeout=0) == 2
    assert calls.read_text() == "called\n"
    assert "a line of noise" in (tmp_path / "a.pte.log").read_text()
    assert capfd.readouterr() == ("", "")
    with torch.no_grad():
        model.weight[0, 0] += 1
    in_background(export_quickly, **arguments).result(timeout=PATIENCE)
    assert calls.read_text() == "called\ncalled\n"


def test_an_error_arrives_and_nothing_is_kept(tmp_path):
    """The mistake: a file that was written half passes for the result of the next job."""
    for _ in range(2):
        job = in_background(export_badly, path=tmp_path / "b.pte")
        with pytest.raises(ValueError, match="cannot be exported"):
            job.result(timeout=PATIENCE)


def test_every_argument_counts():
    """The mistake: a file in 8 bits is taken for one in 4."""
    model = nn.Linear(2, 2)
    keys = {
        key_of(export_quickly, {"model": model, "bits": 4}),
        key_of(export_quickly, {"model": model, "bits": 8}),
        key_of(export_quickly, {"model": nn.Sequential(model), "bits": 4}),
        key_of(export_badly, {"model": model, "bits": 4}),
    }
    assert len(keys) == 4
    codes = nn.Module()
    codes.register_buffer("codes", torch.zeros(1000, dtype=torch.int8))
    before = key_of(export_quickly, {"model": codes})
    codes.codes[77] = 1
    assert key_of(export_quickly, {"model": codes}) != before, "one weight in whole numbers"
