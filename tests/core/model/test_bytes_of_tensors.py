import copy

import pytest
import torch

from recipes_lib.core.model.bytes_of_tensors import state_tensors, storage_bytes, weight_bytes


def test_parameters_that_share_a_storage_are_one():
    """Tied by hand: two parameters, one storage."""
    first = torch.nn.Linear(4, 4, bias=False)
    second = copy.deepcopy(first)
    second.weight = torch.nn.Parameter(first.weight.data)
    assert weight_bytes(torch.nn.Sequential(first, second)) == 64


def test_states_made_of_tensors_are_taken_apart():
    """torchao's 8-bit states claim to be fp32 tensors: these are codes and scales."""
    optim = pytest.importorskip("torchao.optim")
    weight = torch.nn.Parameter(torch.ones(4096))
    weight.grad = torch.ones(4096)
    optimizer = optim.AdamW8bit([weight])
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    states = list(state_tensors(optimizer))
    assert {tensor.dtype for tensor in states} == {torch.uint8, torch.float32}
    assert storage_bytes(states) < 0.5 * 2 * 4 * 4096
