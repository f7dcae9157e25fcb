"""Bytes that one rank holds: parts of DTensors, shared memory once, and what easily escapes."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.ranks.measured_bytes import RankBytes, rank_bytes
from recipes_lib.core.ranks.meshes import default_mesh

LAYER = 4 * (32 * 32 + 32)  # bytes of an nn.Linear(32, 32) in fp32
WHOLE = 4 * LAYER


def four_layers():
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])


def train(model, optimizer, *, zero_grad=False):
    """One step."""
    model(torch.randn(2, 32)).sum().backward()
    optimizer.step()
    if zero_grad:
        optimizer.zero_grad()


def adam_steps(model):
    """Bytes of Adam's counters of steps: one fp32 number for each parameter."""
    return 4 * len(list(model.parameters()))


def test_one_process_and_tied_weights():
    """The mistake: a tied weight counted twice."""
    model = four_layers()
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    weights = WHOLE - 4 * 32 * 32
    assert rank_bytes(model, optimizer) == RankBytes(weights, 0, 0)
    train(model, optimizer)
    held = rank_bytes(model, optimizer)
    states = 2 * weights + adam_steps(model)
    assert held == RankBytes(weights, weights, states)
    assert rank_bytes(model).states == 0


def replicas():
    """DDP with buckets of its own, then with gradients in them, then ZeRO-1 with Adam."""
    found = {}
    for as_view in (False, True):
        model = DistributedDataParallel(four_layers(), gradient_as_bucket_view=as_view)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        train(model, optimizer)
        found[as_view, "gradients"] = rank_bytes(model, optimizer)
        model.zero_grad()
        found[as_view, "none"] = rank_bytes(model, optimizer)
    return found


def test_buckets_of_replicas_and_states_of_a_part(two_ranks):
    """The mistakes: buckets forgotten; states of all ranks, or of none."""
    found = two_ranks.run(replicas)
    assert found[False, "gradients"].gradients == 2 * WHOLE
    assert found[False, "none"].gradients == WHOLE
    assert found[True, "gradients"].gradients == found[True, "none"].gradients == WHOLE
    for held in found.values():
        assert held.parameters == WHOLE
        # Rank 0 has about half of Adam's two averages: which parameters, its optimizer decides.
        assert held.states == pytest.approx(WHOLE, rel=0.1)


def shards(reshard):
    """`fully_shard` at rest, in the middle of a step, and after micro-batches without a sum."""
    model = four_layers()
    for layer in model:
        fully_shard(layer, mesh=default_mesh(), reshard_after_forward=reshard)
    fully_shard(model, mesh=default_mesh())
    optimizer = torch.optim.Adam(model.parameters())
    found = {"new": rank_bytes(model, optimizer)}
    out = model(torch.randn(2, 32))
    found["after forward"] = rank_bytes(model, optimizer)
    out.sum().backward()
    optimizer.step()
    found["after a step"] = rank_bytes(model, optimizer)
    optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    model(torch.randn(2, 32)).sum().backward()
    found["without a sum"] = rank_bytes(model, optimizer)
    return found


@pytest.mark.parametrize("reshard", [True, False])
def test_parts_and_what_is_gathered(two_ranks, reshard):
    """The mistake: a whole parameter, or a whole gradient, that nobody counts."""
    found = two_ranks.run(shards, reshard=reshard)
    half = WHOLE // 2
    steps = 4 * 8
    assert found["new"] == RankBytes(half, 0, 0)
    gathered = 0 if reshard else WHOLE
    assert found["after forward"] == RankBytes(half, 0, 0, gathered=gathered)
    assert found["after a step"] == RankBytes(half, half, 2 * half + steps)
    waiting = found["without a sum"]
    assert (waiting.parameters, waiting.gradients) == (half, 0)
    assert waiting.gathered == WHOLE  # gradients; backward has freed the parameters


def test_scales_beside_a_quantized_weight():
    """The mistake: scales that are in no parameter are in no count."""
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(64, 64, bias=False, compress_statistics=False)
    layer.weight = layer.weight.to("cpu")
    held = rank_bytes(layer)
    codes = 64 * 64 // 2
    scales = 4 * 64 * 64 // 64
    table = 4 * 16
    assert held.parameters == codes + scales + table
