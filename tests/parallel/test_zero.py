import pytest
import torch

from recipes_lib.core.ranks import rank
from recipes_lib.parallel.zero import apply_zero
from tests.parallel.parity import (
    MAX_NORM,
    TOLERANCE,
    adamw,
    largest_difference,
    tiny_model,
    train_alone,
    train_on_rank,
)

ADAMW = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.01}
NO_CLIPPING = 1e9  # a norm that no gradient has: a factor in all gradients shows


def train(stage, seed_of_rank=False, max_norm=MAX_NORM, **options):
    model = tiny_model(seed=rank() if seed_of_rank else 0)
    model, optimizer = apply_zero(model, torch.optim.AdamW, stage=stage, **ADAMW)
    return train_on_rank(model, optimizer, 4, max_norm=max_norm, **options)


# --- the same training ----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"count": 2, "max_norm": NO_CLIPPING},
        {"count": 2, "reduce_each": True, "seed_of_rank": True},
    ],
    ids=str,
)
def test_ranks_of_unequal_tokens_equal_one_process(two_ranks, stage, options):
    """The mistake: rank 1 starts elsewhere (`seed_of_rank`), and parts of two models are joined."""
    run = two_ranks.run(train, stage=stage, **options)
    reference = train_alone(optimizer=adamw, max_norm=options.get("max_norm", MAX_NORM))
    assert largest_difference(run, reference) < TOLERANCE
