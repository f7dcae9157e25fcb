"""Which strategy when: the simplest one that fits."""

import pytest

from recipes_lib.workflows.which_strategy import (
    STRATEGIES,
    predicted_bytes_per_rank,
    which_strategy,
)


@pytest.mark.parametrize(
    ("billions", "gpus", "expected"),
    [
        (1, 1, "one GPU"),  # 16 GB of 80
        (8, 1, "does not fit"),
        (1, 8, "DDP"),  # what fits whole is not sharded
        (8, 8, "ZeRO-1"),  # 64 + 8 GB
        (8, 4, "ZeRO-2"),  # 32 + 24
        (8, 2, "FSDP (ZeRO-3)"),  # 64 + 1
        (70, 8, "does not fit"),  # 140
        (32, 1024, "FSDP × TP"),  # too many ranks for one group
    ],
)
def test_the_first_that_fits(billions, gpus, expected):
    assert which_strategy(parameters=billions * 1e9, gpus=gpus) == expected


def test_a_smaller_card_takes_more_sharing():
    """The mistake: the room of a card of 80 GiB, for a card of 24. docs/two-gpus.md says it."""
    assert which_strategy(parameters=3e9, gpus=4) == "DDP"
    assert which_strategy(parameters=3e9, gpus=4, card_bytes=24 * 2**30) == "FSDP (ZeRO-3)"


def test_each_strategy_keeps_less_than_the_one_before():
    """The order of the search is from the one that sends least to the one that keeps least."""
    sizes = [
        predicted_bytes_per_rank(strategy=name, parameters=8e9, gpus=16) for name in STRATEGIES[:-1]
    ]
    assert sizes == sorted(sizes, reverse=True)
