"""Meshes of all ranks along named axes."""

from recipes_lib.core.ranks.meshes import default_mesh, mesh_of, require_one_dimension
from tests.core.refusal import refusal


def meshes_of_four():
    """Axes and places of a mesh, and what is refused."""
    both = mesh_of(replicate=2, shard=2)
    return {
        "names": (default_mesh().mesh_dim_names, both.mesh_dim_names),
        "table": both.mesh.tolist(),
        "wrong product": refusal(mesh_of, replicate=2, shard=3),
        "no axis": refusal(mesh_of),
        "no whole number": refusal(mesh_of, shard=4.0),
        "two axes": refusal(require_one_dimension, both, such_as="shard"),
        "one axis": refusal(require_one_dimension, both["shard"], such_as="shard"),
        "no mesh": refusal(require_one_dimension, 4, such_as="shard"),
    }


def test_meshes(four_ranks):
    got = four_ranks.run(meshes_of_four)
    assert got["names"] == (("ranks",), ("replicate", "shard"))
    assert got["table"] == [[0, 1], [2, 3]]
    assert got["wrong product"] == (
        "replicate=2 x shard=3 is a mesh of 6, and there are 4 ranks: give sizes whose product is 4"
    )
    assert "without an axis" in got["no axis"]
    assert "shard=4.0: give a whole number" in got["no whole number"]
    assert "2 dimensions ('replicate', 'shard'): give one of them" in got["two axes"]
    assert got["one axis"] is None
    assert "mesh is of type int: give what default_mesh() or mesh_of(...) made" in got["no mesh"]
