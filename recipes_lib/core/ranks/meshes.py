"""Meshes: places of the ranks along named axes.

    default_mesh()                      ranks     0 1 2 3

    mesh_of(replicate=2, shard=2)       shard   ->
                                        replicate  0 1      rank 2 has a copy of what rank 0 has;
                                            |      2 3      ranks 0 and 1 have parts of one copy

Source: PyTorch, "Getting started with DeviceMesh" (tutorials).
"""

from __future__ import annotations

import math

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from recipes_lib.core.measure.dry_run import real_tensors
from recipes_lib.core.ranks import group_device, world_size


def default_mesh() -> DeviceMesh:
    """All ranks along one axis, which is called "ranks"."""
    return mesh_of(ranks=world_size())


def mesh_of(**dims: int) -> DeviceMesh:
    """All ranks along named axes: `mesh_of(replicate=2, shard=4)`.

    Neighbours on the last axis have consecutive numbers. So the axis with the most traffic comes
    last: its ranks are on one machine. Raises ValueError for sizes whose product is not the
    number of ranks.
    """
    if math.prod(dims.values()) != world_size():
        sizes = " x ".join(f"{name}={size}" for name, size in dims.items())
        raise ValueError(
            f"{sizes} is a mesh of {math.prod(dims.values())}, and there are {world_size()} ranks: "
            f"give sizes whose product is {world_size()}"
        )
    with real_tensors():  # a mesh reads the numbers of its ranks
        return init_device_mesh(
            group_device().type, tuple(dims.values()), mesh_dim_names=tuple(dims)
        )


def one_axis(mesh: DeviceMesh | None, *, such_as: str) -> DeviceMesh:
    """`mesh`, or all ranks. Raises ValueError, with an axis `such_as` an example, for several."""
    if mesh is None:
        return default_mesh()
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}: give one of them, "
            f"such as mesh[{such_as!r}]"
        )
    return mesh
