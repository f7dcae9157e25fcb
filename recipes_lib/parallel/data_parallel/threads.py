"""What came before DDP: replicas in threads of one process, as `torch.nn.DataParallel` runs them.

    each step   copy the weights to every replica          (N-1) x P bytes
                one thread per replica: forward, backward  one Python, so one thread runs at a time
                add the gradients up on the first replica  (N-1) x P bytes, into one device
                step there, the others wait

DDP has one process per replica, each with a Python of its own. It sends 2 (N-1) / N x P bytes per
rank, all ranks at once and beside backward, and copies no weights, for all ranks take the same
step.

`torch.nn.DataParallel` itself needs GPUs. On a CPU it calls the model once, on all rows, and says
nothing. So this file does its steps by hand, and they can be timed on any machine.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from recipes_lib.core.checks import check_whole
from recipes_lib.core.ranks.rank_step import Batch, sum_of_losses


def make_replicas(model: Any, count: int) -> list[Any]:
    """`model` itself and `count - 1` copies of it."""
    check_whole(count=count)
    return [model, *(copy.deepcopy(model) for _ in range(count - 1))]


def threaded_step(
    replicas: Sequence[Any], optimizer: torch.optim.Optimizer, batches: Sequence[Batch], tokens: int
) -> float:
    """One step of the first replica on the rows of all: one batch and one thread for each replica.

    Args:
        replicas: those of `make_replicas`; `optimizer` is over the first one's parameters.
        batches: one for each replica, with `input_ids` and `labels` [B, S].
        tokens: of all batches that have a label.
    Returns the mean loss over all tokens.
    """
    first, *others = replicas
    with torch.no_grad():
        for replica in others:
            for target, source in zip(replica.parameters(), first.parameters()):
                target.copy_(source)
    with ThreadPoolExecutor(max_workers=len(replicas)) as threads:
        running = [
            threads.submit(_forward_and_backward, replica, batch, tokens)
            for replica, batch in zip(replicas, batches, strict=True)
        ]
        # An error in a thread is raised here. Without its gradient, the step would be another one.
        losses = [thread.result() for thread in running]
    for replica in others:
        for target, source in zip(first.parameters(), replica.parameters()):
            if source.grad is not None:
                target.grad += source.grad
                source.grad = None
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses)


def _forward_and_backward(replica: Any, batch: Batch, tokens: int) -> float:
    loss = sum_of_losses(replica, batch) / tokens
    loss.backward()
    return loss.item()
