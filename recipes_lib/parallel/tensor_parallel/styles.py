"""How a table of tokens is cut, and how norms stay whole: what PyTorch's own styles do otherwise.

    ids [B, S] -> rank 0 has the rows of tokens 0 .. V/2, and zeros for the others   [B, S, D]
                  rank 1 has the rows of tokens V/2 .. V, likewise                   [B, S, D]
                  the sum of both is the embedding

PyTorch's RowwiseParallel of an embedding makes the gradient of the whole table [V, D] on each rank,
and it stays there. Its SequenceParallel lets frozen norms train.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from recipes_lib.core.model.bytes_of_tensors import parts_needed
from recipes_lib.core.model.mixins import mix_in


class CutTable(ParallelStyle):
    """An embedding of which each rank has some rows: V/N, rounded up; the last rank has fewer."""

    def __init__(self, *, outputs: Placement) -> None:
        super().__init__()
        self.outputs = outputs

    def __repr__(self) -> str:
        return f"CutTable(outputs={self.outputs})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut the rows of a table of tokens over the mesh."""
        part = distribute_tensor(module.weight.detach(), device_mesh, [Shard(0)])
        module.weight = nn.Parameter(part, requires_grad=module.weight.requires_grad)
        mix_in(module, _OfSomeTokens, outputs=self.outputs)
        return module


class _OfSomeTokens:
    """What is mixed into an embedding."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """From a table cut by tokens: [B, S] -> [B, S, D], laid out as `outputs` says."""
        mesh = self.weight.device_mesh
        rows = self.weight.to_local()  # [V/N, D]
        first = first_of_rank(self.weight.shape[0], mesh)
        place = input_ids - first
        mine = (place >= 0) & (place < len(rows))
        padding = None  # a token whose row does not train
        if self.padding_idx is not None and first <= self.padding_idx < first + len(rows):
            padding = self.padding_idx - first
        vectors = nn.functional.embedding(place.where(mine, 0), rows, padding)
        vectors = vectors * mine[..., None]
        if hasattr(self, "embed_scale"):  # Gemma
            vectors = vectors * torch.as_tensor(self.embed_scale).to(vectors)
        vectors = DTensor.from_local(vectors, mesh, [Partial()], run_check=False)
        return vectors.redistribute(placements=[self.outputs])


def first_of_rank(count: int, mesh: DeviceMesh) -> int:
    """The first of `count` tokens in a table that this rank has: DTensor rounds its parts up."""
    return min(count, mesh.get_local_rank() * parts_needed(count, mesh.size()))


class WholeWeights(ParallelStyle):
    """A module whose weights each rank has whole, and whose input is cut: a norm.

    PyTorch's own SequenceParallel lets frozen weights train, and leaves in `.grad` the part of the
    gradient that this rank's tokens make. Here frozen weights stay frozen, and backward sums up.
    """

    def __init__(self, *, inputs: Placement, local_outputs: bool) -> None:
        super().__init__()
        self.inputs = inputs
        self.local_outputs = local_outputs

    def __repr__(self) -> str:
        return f"WholeWeights(inputs={self.inputs}, local_outputs={self.local_outputs})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Keep a norm's weights whole on every rank, as DTensors."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.detach(), device_mesh, [Replicate()])
            whole = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            if whole.requires_grad:
                whole.register_hook(_sum_over_ranks)
            module.register_parameter(name, whole)

        def as_dtensor(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            first, *rest = inputs
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, device_mesh, [self.inputs], run_check=False)
            return (first, *rest)

        def as_local(_: nn.Module, inputs: tuple[Tensor, ...], output: DTensor) -> Tensor:
            return output.to_local()

        module.register_forward_pre_hook(as_dtensor)
        if self.local_outputs:
            module.register_forward_hook(as_local)
        return module


def _sum_over_ranks(gradient: DTensor) -> DTensor:
    """A whole norm's gradient: each rank has the part that its tokens or heads make."""
    return gradient.redistribute(placements=[Replicate()])
