"""One 4-bit layer under `fully_shard`, as libraries store it: what is cut into parts, what is not.

    parts = parts_by_library(weight, x, mesh)       on every rank
    parts["bitsandbytes"].bytes                     of this rank
    parts["bitsandbytes"].difference                from the same layer in one process

    ours           codes, scales, scales of scales: all parameters
    torchao        NF4Tensor: all inside of one tensor, which knows how to be cut; rows have to
                   divide by the blocks of its scales
    bitsandbytes   codes are the parameter; scales are beside it, and stay whole on every rank

Two silent traps are closed here. In eval mode, bitsandbytes repacks a weight for inference on CPUs
with AVX512-BF16, and a sharded one then gives wrong numbers: the repacking is switched off. And its
8-bit layer loses its scales when it is sharded; here it is not offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.measure.machine import require
from recipes_lib.core.ranks.rank_bytes import rank_bytes
from recipes_lib.parallel.quantized_shards.layer import BLOCK, GROUP, packed

LIBRARIES = ("ours", "torchao", "bitsandbytes")


@dataclass(frozen=True)
class LibraryParts:
    """Bytes that a rank keeps of the layer, scales included, and two differences in one step.

    `difference` and `gradient_difference` are the largest in the output and in the gradient of the
    input, from the same layer before it was sharded.
    """

    bytes: int
    difference: float
    gradient_difference: float


def parts_by_library(
    weight: torch.Tensor, x: torch.Tensor, mesh: DeviceMesh
) -> dict[str, LibraryParts]:
    """Quantize `weight` [O, I] by each of LIBRARIES, shard it over `mesh`, and run `x` [B, I].

    Every rank calls it with the same weight. Raises ValueError for a weight that one of them cannot
    cut into `mesh.size()` parts.
    """
    found = {}
    for library in LIBRARIES:
        layer = four_bit_layer(library, weight, ranks=mesh.size())
        expected, wanted = _run(layer, x)
        fully_shard(layer, mesh=mesh)
        got, gradient = _run(layer, x)
        found[library] = LibraryParts(
            bytes=rank_bytes(layer).parameters,
            difference=(got - expected).abs().max().item(),
            gradient_difference=(gradient - wanted).abs().max().item(),
        )
    return found


def four_bit_layer(library: str, weight: torch.Tensor, *, ranks: int) -> nn.Module:
    """A frozen NF4 layer of `weight` [O, I] as `library` stores it, with quantized scales.

    Raises ValueError for an unknown library, and for a weight that it cannot cut into parts.
    """
    check_choice(LIBRARIES, library=library)
    check_whole(ranks=ranks)
    if library == "torchao":
        return _TorchaoLinear(weight, torchao_group(weight, ranks=ranks))
    layer = _bitsandbytes_layer(weight)
    if library == "ours":
        return packed("the layer", layer)
    return layer


def torchao_group(weight: torch.Tensor, *, ranks: int) -> int:
    """How many scales may share a scale in torchao's NF4Tensor: the largest number up to GROUP.

    Its weights have to divide by 64 x this number x ranks. Its default of 256 fails for layers as
    small as 192 x 576. Raises ValueError if no number fits.
    """
    for group in range(GROUP, 0, -1):
        if weight.numel() % (BLOCK * group * ranks) == 0:
            return group
    raise ValueError(
        f"a weight of {[*weight.shape]} has {weight.numel()} numbers, which {BLOCK} x {ranks} "
        f"ranks do not divide: torchao cannot cut it; use apply_quantized_shards"
    )


class _TorchaoLinear(nn.Module):
    def __init__(self, weight: torch.Tensor, group: int) -> None:
        super().__init__()
        nf4 = _torchao().to_nf4(weight.detach(), BLOCK, group)
        self.weight = nn.Parameter(nf4, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _torchao().linear_nf4(x, self.weight)


def _torchao() -> Any:
    require("torchao")
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

    return nf4_tensor


def _bitsandbytes_layer(weight: torch.Tensor) -> nn.Module:
    bnb = require("bitsandbytes")
    outputs, inputs = weight.shape
    layer = bnb.nn.Linear4bit(inputs, outputs, bias=False, quant_type="nf4")
    layer.weight = bnb.nn.Params4bit(
        weight.detach().clone(), requires_grad=False, quant_type="nf4", module=layer
    )
    layer.compute_dtype = weight.dtype
    layer.compute_type_is_set = True
    layer.support_avx512bf16_for_cpu = False  # never repack
    return layer.to(weight.device).train()  # the move is what quantizes


def _run(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output, and the gradient of its input for the sum of squares."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad
