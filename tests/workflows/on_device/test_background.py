"""Exports in another process, with their noise and their errors."""

import pytest
from torch import nn

from recipes_lib.workflows.on_device.background import in_background
from tests.workflows.on_device.slow_exports import export_badly, export_quickly

PATIENCE = 120  # seconds, on a machine that computes something else


def test_a_job_works_beside_this_process(tmp_path, capfd, monkeypatch):
    """The mistakes: its noise in the notebook; an error that stays in the other process."""
    monkeypatch.setenv("RECIPES_FAST", "0")  # which would take this process
    job = in_background(export_quickly, path=tmp_path / "a.pte", model=nn.Linear(2, 2))
    bad = in_background(export_badly, path=tmp_path / "b.pte")
    assert job.result(timeout=PATIENCE) == 2
    assert "a line of noise" in (tmp_path / "a.pte.log").read_text()
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ValueError, match="cannot be exported"):
        bad.result(timeout=PATIENCE)
