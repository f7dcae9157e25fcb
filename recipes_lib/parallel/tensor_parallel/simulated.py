"""Four ranks in one process: an MLP that is cut over them, with every rank's part to print.

    print(simulated_mlp(ranks=4))

`LocalTensorMode` of PyTorch runs one program and keeps a tensor for each rank behind each DTensor;
a collective combines them. No process is started. All numbers are whole, so every sum is exact in
whatever order it is made, and the difference to the uncut layer is 0.

The mode is private to PyTorch and may go. Without it the same parts are cut by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from recipes_lib.core.checks import check_whole

MODE = "torch.distributed._local_tensor.LocalTensorMode"


@dataclass(frozen=True)
class SimulatedRank:
    """What one rank holds and makes of x [T, D]."""

    up: Tensor  # [F/N, D]: some features of the middle
    down: Tensor  # [D, F/N]: reads those features alone
    middle: Tensor  # [T, F/N]
    part: Tensor  # [T, D]: one of N parts of a sum


@dataclass(frozen=True)
class SimulatedMLP:
    """y = relu(x up^T) down^T over several ranks, and its largest differences to the whole one."""

    ranks: list[SimulatedRank]
    output: Tensor  # [T, D], after the all-reduce
    output_error: float
    gradient_error: float  # of the gradients of both matrices
    how: str

    def __str__(self) -> str:
        lines = [f"{len(self.ranks)} ranks in this process, by {self.how}"]
        for number, rank in enumerate(self.ranks):
            lines.append(f"\nrank {number}")
            for name, tensor in vars(rank).items():
                lines.append(f"  {name:<7}{[*tensor.shape]!s:<8}{_rows(tensor)}")
        lines.append(f"\nsum of the parts  {_rows(self.output)}")
        lines.append(f"difference of the outputs   {self.output_error:g}")
        lines.append(f"difference of the gradients {self.gradient_error:g}")
        return "\n".join(lines)


def simulated_mlp(
    *, ranks: int = 4, tokens: int = 2, hidden: int = 3, feed_forward: int = 8, seed: int = 0
) -> SimulatedMLP:
    """Cut an MLP of these sizes over `ranks` simulated ranks, forward and backward.

    The weights are small whole numbers, drawn with `seed`. Raises ValueError for numbers below 1,
    if the ranks do not divide `feed_forward`, and in a process that is a rank itself.
    """
    check_whole(ranks=ranks, tokens=tokens, hidden=hidden, feed_forward=feed_forward)
    check_whole(seed=seed, least=0)
    if feed_forward % ranks:
        raise ValueError(
            f"{ranks} ranks do not divide feed_forward={feed_forward}: give a multiple of {ranks}"
        )
    if dist.is_initialized():
        raise ValueError(
            "this process is a rank of a process group already: call simulated_mlp elsewhere, or "
            "torch.distributed.destroy_process_group() first"
        )
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (tokens, hidden), generator=numbers).float()
    up = torch.randint(-2, 3, (feed_forward, hidden), generator=numbers).float()
    down = torch.randint(-2, 3, (hidden, feed_forward), generator=numbers).float()
    try:
        from torch.distributed._local_tensor import LocalTensorMode
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        return _cut_by_hand(x, up, down, ranks)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with LocalTensorMode(ranks):
            return _cut_by_mode(x, up, down, ranks)
    finally:
        dist.destroy_process_group()


def _whole(x: Tensor, up: Tensor, down: Tensor) -> list[Tensor]:
    """Output [T, D] and the gradients of both matrices, of the layer that nobody has cut."""
    up = up.clone().requires_grad_()
    down = down.clone().requires_grad_()
    output = (x @ up.T).relu() @ down.T
    output.square().sum().backward()
    return [output.detach(), up.grad, down.grad]


def _cut_by_mode(x: Tensor, up: Tensor, down: Tensor, ranks: int) -> SimulatedMLP:
    from torch.distributed._local_tensor import maybe_disable_local_tensor_mode

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,))
    cut_x = distribute_tensor(x, mesh, [Replicate()])
    cut_up = distribute_tensor(up, mesh, [Shard(0)]).requires_grad_()
    cut_down = distribute_tensor(down, mesh, [Shard(1)]).requires_grad_()
    middle = (cut_x @ cut_up.T).relu()  # no exchange: each rank has its features
    part = middle @ cut_down.T  # a DTensor that knows: these are parts of a sum
    output = part.redistribute(placements=[Replicate()])  # the all-reduce
    output.square().sum().backward()
    joined = [output, cut_up.grad, cut_down.grad]
    joined = [tensor.full_tensor().reconcile().detach() for tensor in joined]
    of_ranks = [_by_rank(tensor) for tensor in (cut_up, cut_down, middle, part)]
    with maybe_disable_local_tensor_mode():
        errors = _errors(joined, _whole(x, up, down))
    each_rank = [SimulatedRank(*tensors) for tensors in zip(*of_ranks, strict=True)]
    return SimulatedMLP(each_rank, joined[0], *errors, how=MODE)


def _by_rank(tensor: DTensor) -> list[Tensor]:
    """The part of each rank, as a plain tensor."""
    parts = tensor.to_local()._local_tensors
    return [parts[rank].detach().clone() for rank in sorted(parts)]


def _cut_by_hand(x: Tensor, up: Tensor, down: Tensor, ranks: int) -> SimulatedMLP:
    ups = [part.clone().requires_grad_() for part in up.chunk(ranks, dim=0)]
    downs = [part.clone().requires_grad_() for part in down.chunk(ranks, dim=1)]
    middles = [(x @ part.T).relu() for part in ups]
    parts = [middle @ part.T for middle, part in zip(middles, downs)]
    output = torch.stack(parts).sum(dim=0)
    output.square().sum().backward()
    gradients = [
        torch.cat([part.grad for part in ups], dim=0),
        torch.cat([part.grad for part in downs], dim=1),
    ]
    errors = _errors([output.detach(), *gradients], _whole(x, up, down))
    each_rank = []
    for tensors in zip(ups, downs, middles, parts):
        each_rank.append(SimulatedRank(*[tensor.detach() for tensor in tensors]))
    how = f"cutting by hand: this PyTorch has no {MODE}"
    return SimulatedMLP(each_rank, output.detach(), *errors, how=how)


def _errors(got: list[Tensor], expected: list[Tensor]) -> tuple[float, float]:
    """The largest difference of the outputs, and that of all gradients."""
    differences = [(a - b).abs().max().item() for a, b in zip(got, expected)]
    return differences[0], max(differences[1:])


def _rows(tensor: Tensor) -> str:
    """Whole numbers, row by row."""
    return str(tensor.int().tolist())
