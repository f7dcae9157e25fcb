"""The ideas of the techniques in plain lines, run on real ranks beside the real thing.

Each function runs on every rank, and returns the largest difference between the two. A notebook
calls them through a pool: `pool.run(data_parallel_by_hand)`.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

from recipes_lib.core.ranks import group_device, rank, world_size
from recipes_lib.core.ranks.rank_step import Batch, averaging, sum_of_losses, tokens_of_all_ranks
from recipes_lib.parallel.bandwidth import ring_all_reduce
from recipes_lib.parallel.data_parallel import apply_data_parallel, averaged_by_hand
from recipes_lib.parallel.fully_sharded import linear_of_shards
from recipes_lib.parallel.zero import apply_zero, owners_of, step_of_own_part
from recipes_lib.workflows.on_ranks.batches import byte_batches
from recipes_lib.workflows.on_ranks.strategies import own_rows
from recipes_lib.workflows.on_ranks.train import small_llama

SMALL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
TOKENS = 32
ROWS_OF_A_RANK = 2


def ring_by_hand(*, numbers: int = 1024) -> float:
    """A ring of sends against the all-reduce of the library."""
    ours = torch.randn(numbers, device=group_device()) + rank()
    theirs = ours.clone()
    ring_all_reduce(ours)
    distributed.all_reduce(theirs)
    return (ours - theirs).abs().max().item()


def data_parallel_by_hand() -> float:
    """Gradients that are averaged after backward against those of DDP's buckets."""
    plain = small_llama(sizes=SMALL, tokens=TOKENS).to(group_device())
    wrapped = apply_data_parallel(copy.deepcopy(plain))
    batch = _rows_of_this_rank()
    for model in (plain, wrapped):
        _backward(model, batch)
    averaged_by_hand(plain)
    return _largest(plain, wrapped.module, of="grad")


def zero_by_hand() -> float:
    """A step in which each rank updates the parameters that it owns, against ZeRO-1."""
    plain = small_llama(sizes=SMALL, tokens=TOKENS).to(group_device())
    trained, theirs = apply_zero(copy.deepcopy(plain), torch.optim.SGD, stage=1, lr=0.1)
    batch = _rows_of_this_rank()
    for model in (plain, trained):
        _backward(model, batch)
    parameters = list(plain.parameters())
    owners = owners_of([each.numel() for each in parameters], ranks=world_size())
    owned = [each for each, owner in zip(parameters, owners, strict=True) if owner == rank()]
    step_of_own_part(parameters, owners, torch.optim.SGD(owned, lr=0.1))
    theirs.step()
    return _largest(plain, trained.module, of="data")


def sharded_layer_by_hand(*, rows: int = 6, inputs: int = 16, outputs: int = 12) -> float:
    """A layer whose weight is gathered when it is used, against the whole layer."""
    device = group_device()
    whole = torch.randn(outputs, inputs, device=device)  # all ranks have the same seed
    x = torch.randn(world_size(), rows, inputs, device=device)
    shard = whole.chunk(world_size())[rank()].clone().requires_grad_()
    with warnings.catch_warnings():
        # PyTorch 2.13 has new names for two collectives. The old ones work in earlier ones, too.
        warnings.simplefilter("ignore", FutureWarning)
        y = linear_of_shards(x[rank()], shard)
        y.square().sum().backward()
    reference = whole.clone().requires_grad_()
    expected = functional.linear(x, reference)
    (expected.square().sum() / world_size()).backward()
    in_output = (y - expected[rank()]).abs().max()
    in_gradient = (shard.grad - reference.grad.chunk(world_size())[rank()]).abs().max()
    return max(in_output, in_gradient).item()


def _rows_of_this_rank() -> Batch:
    rows = ROWS_OF_A_RANK * world_size()
    (batch,) = byte_batches(steps=1, rows=rows, tokens=TOKENS)
    return {name: tensor.to(group_device()) for name, tensor in own_rows(batch).items()}


def _backward(model: Any, batch: Batch) -> None:
    """The gradients of the mean over the tokens of all ranks."""
    tokens = tokens_of_all_ranks([batch])
    with averaging(model, now=True):
        (sum_of_losses(model, batch) * world_size() / tokens).backward()


def _largest(model: Any, other: Any, *, of: str) -> float:
    """The largest difference of parameters (of="data") or gradients (of="grad")."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    differences = [(getattr(a, of) - getattr(b, of)).abs().max() for a, b in pairs]
    return max(differences).item()
