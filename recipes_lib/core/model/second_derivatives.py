"""A backward written by hand gives first derivatives only, and says so.

`torch.autograd.grad(loss, weights, create_graph=True)` asks for gradients that can be
differentiated once more, as penalties on a gradient and Hessians need them. What a hand-written
backward returns has no graph. PyTorch's `once_differentiable` tells only `.backward()`, and only if
the gradient that comes in has a graph. Everywhere else the part of the function is missing from the
second derivative in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_derivatives_only(backward: Callable) -> Callable:
    """Decorate the backward of a Function: with `create_graph=True` it raises a ValueError."""

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        # Only `create_graph` leaves gradients on inside of a backward.
        if torch.is_grad_enabled():
            raise ValueError(
                "a backward of this model is written by hand and has no second derivative: call "
                "backward without create_graph=True, or take the recipe out of the model"
            )
        return backward(ctx, *gradients)

    return refusing
