"""The memory of the whole process."""

import pytest
import torch

from recipes_lib.core import process_memory
from recipes_lib.core.launch import launch

MIB = 2**20


def growth(size):
    """Bytes that a tensor of so many MiB adds, and one that is freed before the end."""

    def run():
        kept = torch.ones(size * MIB // 4)
        torch.ones(2 * size * MIB // 4)
        return kept

    _, added = process_memory.added_bytes(run)
    _, nothing = process_memory.added_bytes(lambda: None)
    return added, nothing


@pytest.mark.skipif(not process_memory.can_measure(), reason="only Linux tells a peak")
def test_the_peak_and_not_the_end():
    """Catches the memory that is left instead of the most, and a peak from before."""
    added, nothing = launch(growth, ranks=1, size=64)
    assert added == pytest.approx(3 * 64 * MIB, rel=0.05)
    assert nothing < 2 * MIB


def test_other_systems_get_the_answer_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(process_memory, "CLEAR", tmp_path / "none")
    assert process_memory.added_bytes(lambda: 7) == (7, None)
