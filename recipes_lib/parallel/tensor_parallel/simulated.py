"""Four ranks in one process: an MLP that is cut over them, with every rank's part to print.

    print(simulated_mlp(ranks=4))

`LocalTensorMode` of PyTorch runs one program and keeps a tensor for each rank behind each DTensor;
a collective combines them. No process is started. All numbers are whole, so every sum is exact in
whatever order it is made, and the difference to the uncut layer is 0. The mode is private to
PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

MODE = "torch.distributed._local_tensor.LocalTensorMode"
TOKENS, HIDDEN, FEED_FORWARD = 2, 3, 8


@dataclass(frozen=True)
class SimulatedMLP:
    """y = relu(x up^T) down^T over several ranks, and its largest differences to the whole one."""

    ranks: list[dict[str, Tensor]]  # what each holds and makes: up, down, middle, part
    output: Tensor  # [T, D], after the all-reduce
    output_error: float
    gradient_error: float  # of the gradients of both matrices

    def __str__(self) -> str:
        """The part of every simulated rank, and what their sum differs by."""
        lines = [f"{len(self.ranks)} ranks in this process, by {MODE}"]
        for number, rank in enumerate(self.ranks):
            lines.append(f"\nrank {number}")
            for name, tensor in rank.items():
                lines.append(f"  {name:<7}{[*tensor.shape]!s:<8}{tensor.int().tolist()}")
        lines.append(f"\nsum of the parts  {self.output.int().tolist()}")
        lines.append(f"difference of the outputs   {self.output_error:g}")
        lines.append(f"difference of the gradients {self.gradient_error:g}")
        return "\n".join(lines)


def simulated_mlp(*, ranks: int = 4) -> SimulatedMLP:
    """Cut an MLP of small whole numbers over `ranks` simulated ranks, forward and backward.

    The ranks divide its 8 features. This process may not be a rank itself.
    """
    from torch.distributed._local_tensor import LocalTensorMode, maybe_disable_local_tensor_mode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    numbers = torch.Generator().manual_seed(0)
    sizes = [(TOKENS, HIDDEN), (FEED_FORWARD, HIDDEN), (HIDDEN, FEED_FORWARD)]
    x, up, down = [torch.randint(-2, 3, size, generator=numbers).float() for size in sizes]
    distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with LocalTensorMode(ranks):
            mesh = init_device_mesh("cpu", (ranks,))
            cut_x = distribute_tensor(x, mesh, [Replicate()])
            cut_up = distribute_tensor(up, mesh, [Shard(0)]).requires_grad_()
            cut_down = distribute_tensor(down, mesh, [Shard(1)]).requires_grad_()
            middle = (cut_x @ cut_up.T).relu()  # no exchange: each rank has its features
            part = middle @ cut_down.T  # a DTensor that knows: these are parts of a sum
            output = part.redistribute(placements=[Replicate()])  # the all-reduce
            output.square().sum().backward()
            joined = [output, cut_up.grad, cut_down.grad]
            joined = [tensor.full_tensor().reconcile().detach() for tensor in joined]
            parts = {"up": cut_up, "down": cut_down, "middle": middle, "part": part}
            parts = {name: _parts_by_rank(tensor) for name, tensor in parts.items()}
            with maybe_disable_local_tensor_mode():
                whole = _whole_mlp(x, up, down)
                errors = [(a - b).abs().max().item() for a, b in zip(joined, whole)]
    finally:
        distributed.destroy_process_group()
    of_ranks = [dict(zip(parts, tensors)) for tensors in zip(*parts.values(), strict=True)]
    return SimulatedMLP(of_ranks, joined[0], errors[0], max(errors[1:]))


def _parts_by_rank(tensor: DTensor) -> list[Tensor]:
    """The part of each simulated rank, as a plain tensor."""
    parts = tensor.to_local()._local_tensors
    return [parts[rank].detach().clone() for rank in sorted(parts)]


def _whole_mlp(x: Tensor, up: Tensor, down: Tensor) -> list[Tensor]:
    """Output [T, D] and the gradients of both matrices, of the layer that nobody has cut."""
    up = up.clone().requires_grad_()
    down = down.clone().requires_grad_()
    output = (x @ up.T).relu() @ down.T
    output.square().sum().backward()
    return [output.detach(), up.grad, down.grad]
