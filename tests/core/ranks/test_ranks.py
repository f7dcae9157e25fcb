"""Who a process is among the ranks, their meshes, and collectives over them."""

import pytest

from recipes_lib.core.ranks import group_device, rank, require_group, world_size
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.meshes import default_mesh, mesh_of, one_axis
from tests.core.refusal import refusal


def test_a_process_that_is_alone():
    assert (rank(), world_size()) == (0, 1)
    assert sums_over_ranks(2, 3.5) == [2, 3.5]
    for needs_others in (require_group, default_mesh, agree, mesh_of, group_device):
        with pytest.raises(ValueError, match=r"there is no process group.*torchrun"):
            needs_others()


def meshes_of_four():
    """Axes, places and sums of a mesh, and what is refused."""
    both = mesh_of(replicate=2, shard=2)
    return {
        "names": (default_mesh().mesh_dim_names, both.mesh_dim_names),
        "table": both.mesh.tolist(),
        "along one": sums_over_ranks(rank(), mesh=both["shard"]),
        "along both": sums_over_ranks(rank(), 1, mesh=both),
        "wrong product": refusal(mesh_of, replicate=2, shard=3),
        "two axes": refusal(one_axis, both, such_as="shard"),
    }


def test_meshes(four_ranks):
    """The mistakes: a sum over all ranks where those of one axis are meant, another order."""
    got = four_ranks.run(meshes_of_four)
    assert got["names"] == (("ranks",), ("replicate", "shard"))
    assert got["table"] == [[0, 1], [2, 3]]
    assert got["along one"] == [0 + 1]
    assert got["along both"] == [0 + 1 + 2 + 3, 4]
    assert "is a mesh of 6, and there are 4 ranks" in got["wrong product"]
    assert "2 dimensions ('replicate', 'shard'): give one of them" in got["two axes"]
