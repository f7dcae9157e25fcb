"""Clipping by the norm of all gradients: parts, copies, summands and stages."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from recipes_lib.core.ranks import rank
from recipes_lib.core.ranks.gradient_norm import clip_gradients
from recipes_lib.core.ranks.meshes import default_mesh, mesh_of
from tests.core.refusal import refusal


def parameter_of(value, gradient):
    """A parameter that has this gradient already."""
    parameter = nn.Parameter(value)
    parameter.grad = gradient
    return parameter


def split_everywhere(max_norm):
    """Gradients that are plain, and DTensors of three meshes; the norm, and all gradients whole."""
    both = mesh_of(a=2, b=2)
    line = default_mesh()
    whole = [torch.randn(5, 3) for _ in range(6)]
    places = [
        (line, [Shard(0)]),  # 5 rows on 4 ranks: parts of unequal size
        (both, [Replicate(), Shard(0)]),
        (both, [Shard(0), Shard(1)]),
        (both["b"], [Replicate()]),
    ]
    parameters = [parameter_of(torch.zeros(5, 3), whole[0].clone())]
    for gradient, (mesh, placements) in zip(whole[1:], places):
        shards = distribute_tensor(gradient.clone(), mesh, placements)
        parameters.append(parameter_of(torch.zeros_like(shards), shards))
    # Each rank has a summand: 1/10, 2/10, 3/10 and 4/10 of the gradient.
    summand = DTensor.from_local(whole[5] * (rank() + 1) / 10, line, [Partial()])
    replica = distribute_tensor(torch.zeros(5, 3), line, [Replicate()])
    parameters.append(parameter_of(replica, summand))
    parameters.append(nn.Parameter(torch.zeros(3)))  # without a gradient
    norm = clip_gradients(parameters, max_norm)
    gradients = [parameter.grad for parameter in parameters[:-1]]
    clipped = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return norm, whole, clipped


@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_the_norm_is_that_of_the_whole_gradients(four_ranks, max_norm):
    """The mistakes: a copy counted on every rank, a part on its own rank only."""
    norm, whole, clipped = four_ranks.run(split_everywhere, max_norm=max_norm)
    reference = [nn.Parameter(torch.zeros_like(gradient)) for gradient in whole]
    for parameter, gradient in zip(reference, whole):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(reference, max_norm)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    for mine, parameter in zip(clipped, reference):
        torch.testing.assert_close(mine, parameter.grad)


def stages_and_numbers():
    """Rank r has a stage of its own, whose gradient has the norm 3 or 4; then one not a number."""
    mine = parameter_of(torch.zeros(1), torch.tensor([3.0 + rank()]))
    norm = clip_gradients([mine], 1.0, stages=default_mesh())
    clipped = mine.grad.item()
    mine.grad = torch.tensor([math.nan if rank() == 1 else 1.0])
    of_no_number = clip_gradients([mine], 1.0, stages=default_mesh())
    return norm, clipped, of_no_number, mine.grad.item(), refusal(clip_gradients, [mine], 0.0)


def test_stages_add_up_and_what_is_no_number_reaches_all(two_ranks):
    norm, clipped, of_no_number, gradient, refused = two_ranks.run(stages_and_numbers)
    assert norm == pytest.approx(5)
    assert clipped == pytest.approx(3 / 5, abs=1e-6)
    assert math.isnan(of_no_number) and math.isnan(gradient)
    assert refused == "max_norm=0.0: give a finite number above 0"
