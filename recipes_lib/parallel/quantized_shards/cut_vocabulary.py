"""A frozen embedding and output layer, of which each rank keeps rows, gathered a few at a time.

A vocabulary of 128,256 and a width of 8,192 make a table of 2 GiB in bf16, and to gather it as a
group PyTorch takes twice that: in a model in 4 bits, the peak. Nobody needs the whole at once:

    embedding      rows are looked up: gather some rows, take those that were asked for, go on
    output layer   logits stand beside each other: gather some rows, make their logits, go on

Frozen rows get no gradient: backward gathers them once more, for the gradient of the input.

V vocabulary, D width, N ranks, P = V / N rows of a rank, B x S tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from recipes_lib.core.model.bytes_of_tensors import parts_needed
from recipes_lib.core.model.second_derivatives import first_derivatives_only
from recipes_lib.core.ranks.collectives import all_gather

CHUNK_BYTES = 64 * 2**20  # of the rows that are whole at a time


class CutRows(nn.Module):
    """Rows of a frozen weight [V, D]: this rank's `weight` [P, D], the last of them padding."""

    def __init__(self, whole: torch.Tensor, mesh: DeviceMesh, offload: bool) -> None:
        """Cut this rank's rows of a vocabulary from `whole` [V, D], for the mesh's device.

        With `offload` they stay in host memory.
        """
        super().__init__()
        self.group = mesh.get_group(mesh.ndim - 1)  # parts are along the last dimension
        self.parts = mesh.size(mesh.ndim - 1)
        self.vocabulary, width = whole.shape
        self.rows = parts_needed(self.vocabulary, self.parts)
        self.place = mesh.get_local_rank(mesh.ndim - 1)
        device = whole.device
        if mesh.device_type == "cuda":
            device = "cuda"
        if offload:
            device = "cpu"
        if whole.is_meta:  # `take` comes later
            device = "meta"
        part = whole.new_empty(self.rows, width, device=device)
        self.weight = nn.Parameter(part, requires_grad=False)
        self.take(whole)

    @torch.no_grad()
    def take(self, whole: torch.Tensor) -> None:
        """Fill this rank's rows of a vocabulary from `whole` [V, D]; zeros stand behind its end."""
        mine = whole[self.place * self.rows : (self.place + 1) * self.rows]
        self.weight[: len(mine)] = mine
        self.weight[len(mine) :] = 0

    def chunks(self, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
        """(start, rows [N, R, D]) for each R rows of a vocabulary's part: row i is start + i."""
        width = self.weight.shape[1]
        of_all = self.parts * width * self.weight.itemsize
        size = max(1, CHUNK_BYTES // of_all)
        for start in range(0, self.rows, size):
            own = self.weight[start : start + size].to(device).contiguous()
            together = own.new_empty(self.parts * len(own), width)
            all_gather(together, own, group=self.group)
            yield start, together.view(self.parts, len(own), width)


class CutEmbedding(CutRows):
    """`nn.Embedding`, frozen."""

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """From a cut table: ids [B, S] -> [B, S, D]. Every rank calls it as often as the others."""
        owner = ids // self.rows
        row = ids % self.rows
        found = None
        for start, rows in self.chunks(ids.device):
            inside = (row >= start) & (row < start + rows.shape[1])
            # Tokens of other chunks look up any row, and do not take it.
            candidates = rows[owner, (row - start).clamp(0, rows.shape[1] - 1)]  # [B, S, D]
            if found is None:
                found = torch.zeros_like(candidates)
            found = torch.where(inside[..., None], candidates, found)
        return found


class CutOutput(CutRows):
    """`nn.Linear` without bias over the vocabulary, frozen."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """By a cut table: hidden [B, S, D] -> logits [B, S, V]. Every rank calls it as often."""
        return _LogitsOfCutRows.apply(hidden, self)


class _LogitsOfCutRows(torch.autograd.Function):
    """Logits chunk by chunk, and likewise the gradient of what they were made of."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: CutOutput) -> torch.Tensor:
        """hidden [B, S, D] -> logits [B, S, V], of some rows of all ranks at a time."""
        ctx.layer = layer
        logits = hidden.new_empty(*hidden.shape[:-1], layer.parts, layer.rows)
        for start, rows in layer.chunks(hidden.device):
            made = hidden @ rows.flatten(0, 1).to(hidden.dtype).T  # [B, S, N * R]
            logits[..., start : start + rows.shape[1]] = made.unflatten(-1, rows.shape[:2])
        return logits.flatten(-2)[..., : layer.vocabulary].contiguous()

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The rows are gathered once more, for the gradient of hidden alone."""
        layer = ctx.layer
        padding = layer.parts * layer.rows - layer.vocabulary
        if padding:
            gradient = nn.functional.pad(gradient, (0, padding))
        by_part = gradient.unflatten(-1, (layer.parts, layer.rows))  # [B, S, N, P]
        to_hidden = None
        for start, rows in layer.chunks(gradient.device):
            chunk = by_part[..., start : start + rows.shape[1]].flatten(-2)  # [B, S, N * R]
            share = chunk @ rows.flatten(0, 1).to(gradient.dtype)
            to_hidden = share if to_hidden is None else to_hidden + share
        return to_hidden, None


# --- in a model -----------------------------------------------------------------------------------


def ends_can_be_cut(model: Any) -> bool:
    """Whether embedding and output layer can be cut by rows: frozen, plain, without a bias."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    plain = type(embedding) is nn.Embedding and type(head) is nn.Linear
    if not plain or head.bias is not None:
        return False
    return not embedding.weight.requires_grad and not head.weight.requires_grad


def cut_ends(model: Any, mesh: DeviceMesh, offload: bool) -> set[nn.Parameter]:
    """Put `CutEmbedding` and `CutOutput` into `model`; returns their parameters.

    Weights that the two share stay one. The model must have passed `ends_can_be_cut`.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    table = CutEmbedding(embedding.weight, mesh, offload)
    output = CutOutput(head.weight, mesh, offload)
    if embedding.weight is head.weight:
        output.weight = table.weight
    model.set_input_embeddings(table)
    model.set_output_embeddings(output)
    return {table.weight, output.weight}
