"""Losses and norms in all ways that are here."""

from functools import partial

import pytest
import torch

from recipes_lib.workflows.bench import kernels
from recipes_lib.workflows.bench.kernels import compare_losses, compare_norms


def test_losses_have_the_same_value_and_the_bytes_beside_the_inputs(monkeypatch):
    """The mistakes: a reference without the last piece of tokens, and other tensors as a cost."""
    _ballast = torch.zeros(20 * 2**20)  # 80 MiB that are nobody's cost
    in_small_chunks = partial(kernels.chunked_cross_entropy, chunk_size=32)
    monkeypatch.setattr(kernels, "chunked_cross_entropy", in_small_chunks)
    costs = compare_losses(tokens=300, hidden=32, vocab=5000, rounds=1)
    assert {"plain", "ours", "TRL"} <= costs.keys()
    for name, cost in costs.items():
        assert cost.error < 1e-5, name
        assert cost.seconds > 0, name
        # What is not seen is not given as a number.
        assert (cost.peak_bytes is None) == name.startswith("torch"), name
        assert ("not seen" in str(cost)) == name.startswith("torch"), name
    logits = 4 * 300 * 5000  # kept are the log-softmax, its gradient and theirs
    assert 2 * logits < costs["plain"].peak_bytes < 4 * logits
    assert costs["ours"].peak_bytes < 0.4 * costs["plain"].peak_bytes


def test_every_way_computes_its_norm(monkeypatch):
    """The mistake: a rate of bytes that were not moved."""
    monkeypatch.setattr(torch, "compile", lambda function: function)  # which takes seconds
    costs = compare_norms(rows=33, hidden=64, rounds=2)
    assert costs.keys() == {"plain", "PyTorch", "LayerNorm", "compiled"}
    for cost in costs.values():
        assert 0 < cost.error < 1e-6
        assert cost.bytes_per_second * cost.seconds == pytest.approx(2 * 33 * 64 * 4)
