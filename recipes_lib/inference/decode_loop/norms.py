"""The norms of the decode loop, with few operators.

`torch.nn.functional.rms_norm` is ten operators in a row on a CPU, and a step of one token has two
norms per block. The same number is a Euclidean length, for which there is one operator:

    x / sqrt(mean(x²) + eps) * w   =   sqrt(D) * x / sqrt(|x|² + D * eps) * w

and the second root is `hypot(|x|, sqrt(D * eps))`. Sums are in fp32 for 16-bit numbers, too: the
square of 300 is no fp16 number any more.

Shapes: D hidden, H heads, E head dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class RootMeanSquareNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, as `nn.RMSNorm` computes it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """A norm of the decode loop with this weight; `floor` stands for `eps`."""
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)  # [D]
        self.eps = eps
        self.root = math.sqrt(len(weight))
        floor = torch.full((1,), self.root * math.sqrt(eps), device=weight.device)
        self.register_buffer("floor", floor, persistent=False)  # sqrt(D * eps)
        self.register_buffer("zero", torch.zeros_like(floor), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """In the decode loop: [..., E] -> [..., E], the length of each row by one operator."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        length = torch.hypot(length, self.floor)  # [..., 1]
        # zero + root * x / length: a factor and a quotient in one operator.
        normed = torch.addcdiv(self.zero, x, length, value=self.root)
        return (normed * self.weight).to(x.dtype)


class HeadNorm(nn.Module):
    """An RMSNorm over each head [..., H, E], with a weight [H, E] of its own for every head."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight
