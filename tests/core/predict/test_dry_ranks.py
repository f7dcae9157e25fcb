import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from recipes_lib.core.measure import dry_run
from recipes_lib.core.predict.dry_ranks import pretended_ranks, rank_peak

WIDTH = 512
LINEAR = 4 * WIDTH * WIDTH  # bytes of one layer


def layers():
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])


def built(model):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.zeros(2, WIDTH)

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def plain(mesh):
    return built(layers())


def sharded(mesh):
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return built(fully_shard(model, mesh=mesh))


def test_a_plain_model_has_its_weights_states_and_gradients():
    peak = rank_peak(plain, ranks=2).total
    assert 16 * LINEAR <= peak < 1.1 * 16 * LINEAR


@pytest.mark.parametrize("ranks", [2, 64])
def test_a_sharded_model_has_its_part_and_what_is_gathered(ranks):
    peak = rank_peak(sharded, ranks=ranks)
    at_rest = 12 * LINEAR / ranks
    assert peak.kinds["sharded param"] + peak.kinds["optstate"] == pytest.approx(at_rest, rel=0.01)
    # Gradients of one layer on their way, a layer, the next one, and gradients: four at most.
    assert LINEAR < peak.beside_shards < 4.2 * LINEAR


def test_copies_are_a_dimension_of_the_mesh():
    def in_copies(mesh):
        assert mesh.mesh_dim_names == ("copies", "parts")
        return sharded(mesh)

    peak = rank_peak(in_copies, ranks=8, mesh={"copies": 4, "parts": 2})
    assert peak.kinds["sharded param"] == pytest.approx(2 * LINEAR, rel=0.01)


def test_the_group_is_gone_afterwards_also_after_an_error():
    with pytest.raises(ZeroDivisionError):
        rank_peak(lambda mesh: 1 / 0, ranks=2)
    assert not distributed.is_initialized()


def test_refusals():
    with pytest.raises(ValueError, match="multiply to 6, not to ranks=8"):
        rank_peak(sharded, ranks=8, mesh={"copies": 3, "parts": 2})
    with pytest.raises(ValueError, match="from 0 to 1"):
        rank_peak(sharded, ranks=2, rank=2)
    with dry_run(), pytest.raises(ValueError, match="a dry run already"):
        rank_peak(sharded, ranks=2)
    with pretended_ranks(4, rank=3):
        assert distributed.get_rank() == 3
        with pytest.raises(ValueError, match="belongs to a group"):
            rank_peak(sharded, ranks=2)
