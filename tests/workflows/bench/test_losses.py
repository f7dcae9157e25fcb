import pytest
import torch

from recipes_lib.workflows.bench.losses import LossCost, compare_losses


@pytest.fixture(scope="module")
def costs():
    _ballast = torch.zeros(20 * 2**20)  # 80 MiB that are nobody's cost
    return compare_losses(tokens=300, hidden=32, vocab=5000, chunk_size=32, rounds=1)


def test_every_way_gives_the_same_value(costs):
    """300 tokens are one piece of 256 and a rest: a reference without the rest would be off."""
    assert {"plain", "ours", "TRL"} <= costs.keys()
    for name, cost in costs.items():
        assert cost.error < 1e-5, name
        assert cost.seconds > 0, name


def test_bytes_are_those_beside_the_inputs(costs):
    """Of all logits: the log-softmax, its gradient and theirs, 4 bytes each. Chunks take less."""
    logits = 4 * 300 * 5000
    assert 2 * logits < costs["plain"].peak_bytes < 4 * logits
    assert costs["ours"].peak_bytes < 0.4 * costs["plain"].peak_bytes


def test_what_is_not_seen_is_not_given_as_a_number(costs):
    for name, cost in costs.items():
        assert (cost.peak_bytes is None) == name.startswith("torch"), name
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        assert {"torch", "torch, 256 rows"} <= costs.keys()


def test_a_cost_in_words():
    assert str(LossCost(0.5, 3 * 2**20, 1e-7)) == "   0.500 s        3 MiB   value off by 1e-07"
    assert "not seen" in str(LossCost(0.5, None, 1e-7))


@pytest.mark.gpu
def test_in_bf16_on_gpu():
    """The inside of every way is seen there."""
    costs = compare_losses(tokens=4096, hidden=1024, vocab=32_000, dtype=torch.bfloat16, rounds=3)
    assert all(cost.peak_bytes is not None for cost in costs.values())
    assert costs["ours"].error < 1e-3
