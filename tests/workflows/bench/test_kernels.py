"""Losses, attention and norms in all ways that are here."""

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.bench.kernels import compare_losses, compare_norms, measure_attention


def test_losses_have_the_same_value_and_the_bytes_beside_the_inputs():
    """The mistakes: a reference without the last piece of tokens, and other tensors as a cost."""
    _ballast = torch.zeros(20 * 2**20)  # 80 MiB that are nobody's cost
    costs = compare_losses(tokens=300, hidden=32, vocab=5000, chunk_size=32, rounds=1)
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


def test_scores_grow_with_the_square_and_the_kernel_with_the_length():
    """The mistake: a kernel beside eager that is eager, or that counts other operations."""
    model = model_of_shape("tiny-llama", device="cpu")
    short = measure_attention(model, seq_len=256, rounds=1)
    long = measure_attention(model, seq_len=512, rounds=1)
    assert short.keys() == {"eager", "fused"}
    assert long["eager"].peak_bytes > 3.8 * short["eager"].peak_bytes
    assert long["fused"].peak_bytes == pytest.approx(2 * short["fused"].peak_bytes, rel=0.01)
    cost = long["fused"]
    operations = 3.5 * 4 * 512 * 512 / 2 * 64
    seconds = cost.forward_seconds + cost.backward_seconds
    assert cost.tflops * 1e12 * seconds == pytest.approx(operations, rel=0.01)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_every_way_computes_its_norm(dtype, error):
    """The mistake: a rate of bytes that were not moved."""
    costs = compare_norms(rows=33, hidden=64, dtype=dtype, rounds=2, compiled=False)
    assert costs.keys() == {"plain", "PyTorch", "LayerNorm"}
    for cost in costs.values():
        assert 0 < cost.error < error
        moved = 2 * 33 * 64 * dtype.itemsize
        assert cost.bytes_per_second * cost.seconds == pytest.approx(moved)
