"""Experts shared by ranks: each rank has E/N of them, and tokens travel to their experts and back.

    rank 0   rows -> sorted by expert -> | to rank 0 | to rank 1 |      all-to-all
    rank 1   rows -> sorted by expert -> | to rank 0 | to rank 1 |
                                              v           v
                                      experts 0 .. E/2   E/2 .. E       grouped products
                                              v           v
    each rank has the results of its own rows again                     all-to-all

Each rank has rows of its own, as under data parallelism, and all other weights whole. The gradient
of an expert is complete in backward: the rows of all ranks have gone through it. The gradients of
the other weights have to be averaged over the ranks, by DistributedDataParallel, by FSDP, or by
`average_gradients`. The gradients of experts are divided by N, so that all of them are those of the
mean of the ranks' losses.

Source: Lepikhin et al., "GShard" (arXiv 2006.16668).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from recipes_lib.architecture.mixture_of_experts import (
    experts_of,
    grouped_experts,
    require_plain_experts,
)
from recipes_lib.core.model.causal_lm import require_causal_lm
from recipes_lib.core.model.mixins import mix_in, require_forward_of_class
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.meshes import default_mesh

# DistributedDataParallel leaves the parameters alone that a model names under this attribute.
LEFT_TO_THEMSELVES = "_ddp_params_and_buffers_to_ignore"


def apply_expert_parallel(model: Any) -> Any:
    """Share the experts of `model` over all ranks, in place; returns `model`.

    All ranks call this, and the weights of the first rank count. Each rank then gives the model its
    own rows. The weights of experts are DTensors: `.full_tensor()` joins them. After backward, call
    `average_gradients(model)`, or wrap the model in DistributedDataParallel before: it leaves the
    experts alone.
    """
    mesh = default_mesh()
    agree(model=model)
    require_causal_lm(model)
    modules = experts_of(model)
    require_forward_of_class(modules)
    require_plain_experts(modules)
    _require_divisible_experts(model, modules, mesh)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), group=mesh.get_group(), group_src=0)
    left = []
    names = {module: name for name, module in model.named_modules()}
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            mine = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            mine = nn.Parameter(mine, requires_grad=parameter.requires_grad)
            module.register_parameter(name, mine)
            left.append(f"{names[module]}.{name}")
        mix_in(module, _Shared)
    setattr(model, LEFT_TO_THEMSELVES, left)
    return model


class _Shared:
    """What is mixed into the experts of a block when ranks share them."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens [T, D] go to the ranks of their k experts and back, with their shares [T, k]."""
        mesh = self.gate_up_proj.device_mesh
        gate_up = _averaged(self.gate_up_proj)  # [E/N, 2F, D]
        down = _averaged(self.down_proj)  # [E/N, D, F]

        count = top_k_index.shape[1]
        order = top_k_index.flatten().argsort(stable=True)  # by expert, and so by rank
        rows = hidden_states[order // count]  # [T k, D]
        sent, received = _exchanged_counts(top_k_index, len(gate_up), mesh)
        to_ranks = sent.sum(dim=1).tolist()
        from_ranks = received.sum(dim=1).tolist()

        rows = _exchange(rows, from_ranks, to_ranks, mesh)
        # What came from one rank is sorted by expert. Each row goes through one expert, whole.
        experts = torch.arange(len(gate_up), device=rows.device).repeat(mesh.size())
        experts = experts.repeat_interleave(received.flatten())[:, None]
        ones = rows.new_ones(experts.shape)
        rows = grouped_experts(rows, experts, ones, gate_up, down, gate=self._apply_gate)
        rows = _exchange(rows, to_ranks, from_ranks, mesh)

        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        out = rows[back].unflatten(0, top_k_index.shape)  # [T, k, D]
        return (out * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


def average_gradients(model: nn.Module) -> None:
    """After backward with shared experts: the mean over ranks of all gradients but DTensors'.

    With several micro-batches call it once, after the last backward.
    """
    mesh = default_mesh()
    plain = {name: p for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    missing = [name for name, each in plain.items() if each.requires_grad and each.grad is None]
    # Their names, not their number: two ranks can lack a gradient of different parameters.
    agree(parameters_without_gradient=missing)
    for parameter in plain.values():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=mesh.get_group())
            parameter.grad.div_(mesh.size())


def _averaged(weight: DTensor) -> Tensor:
    """This rank's experts, whose gradient is divided by N in backward."""
    ranks = weight.device_mesh.size()

    def divide(gradient: Tensor) -> Tensor:
        return gradient / ranks

    mine = weight.to_local()
    if mine.requires_grad:
        mine.register_hook(divide)
    return mine


def _exchanged_counts(chosen: Tensor, per_rank: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """How many rows this rank sends to each expert, and how many come from each rank: [N, E/N]."""
    ranks = mesh.size()
    sent = torch.bincount(chosen.flatten(), minlength=ranks * per_rank).view(ranks, per_rank)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=mesh.get_group())
    return sent, received


def _exchange(rows: Tensor, receive: list[int], send: list[int], mesh: DeviceMesh) -> Tensor:
    """Rows go to the ranks of their experts, others come; backward takes the way back."""
    group = mesh.get_group()
    return wait_tensor(all_to_all_single_autograd(rows.contiguous(), receive, send, group))


def _require_divisible_experts(model: Any, modules: list[nn.Module], mesh: DeviceMesh) -> None:
    """Raise ValueError unless the ranks divide the experts of each block."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            "this model is shared, cut or sharded already: apply expert parallelism once and first"
        )
    for module in modules:
        experts = module.gate_up_proj.shape[0]
        if experts % mesh.size():
            raise ValueError(f"{mesh.size()} ranks do not divide {experts} experts")
