"""Who a process is among the ranks, and where its tensors have to be."""

import pytest

from recipes_lib.core.ranks import group_device, rank, require_group, world_size
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.meshes import default_mesh, mesh_of


def who_am_i():
    require_group()
    return rank(), world_size(), str(group_device())


def test_one_of_two(two_ranks):
    assert two_ranks.run(who_am_i) == (0, 2, "cpu")


def test_a_process_that_is_alone():
    assert (rank(), world_size()) == (0, 1)
    for needs_others in (require_group, default_mesh, agree, mesh_of, group_device):
        with pytest.raises(ValueError, match=r"there is no process group.*torchrun"):
            needs_others()
