import re

import pytest
import torch

from recipes_lib.core.model.second_derivatives import first_derivatives_only
from tests.test_architecture import EVERY_FILE

# Functions that need no refusal: the two that a notebook shows are there to be read, the identity
# has a second derivative, and the tiles of a dry run have no values.
OTHERS = {"InputOnly", "_GatheredLinear", "_ManyTiles", "_SaveInput"}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    @first_derivatives_only
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_a_second_derivative_is_refused():
    """The mistake: `once_differentiable` lets this through, and the sum lacks the square's part."""
    x = torch.ones(3, requires_grad=True)
    (first,) = torch.autograd.grad(Square.apply(x), x)
    assert torch.equal(first, 2 * x)
    loss = Square.apply(x) + x.pow(3).sum()
    with pytest.raises(ValueError, match="without create_graph=True"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_every_function_of_the_package_refuses():
    pattern = r"class (\w+)\(torch\.autograd\.Function\):.*?\n((?:    @[^\n]+\n)+)    def backward"
    found = {}
    for path in EVERY_FILE:
        for name, decorators in re.findall(pattern, path.read_text("utf-8"), re.DOTALL):
            found[name] = "@first_derivatives_only" in decorators
    assert len(found) >= 12
    assert {name for name in found if not found[name]} == OTHERS
