import pytest
import torch

from recipes_lib.core.ranks import rank
from recipes_lib.core.ranks.rank_bytes import rank_bytes
from recipes_lib.core.ranks.rank_step import rank_step
from recipes_lib.parallel.zero import apply_zero, predicted_rank_bytes
from tests.parallel.parity import (
    MAX_NORM,
    TOLERANCE,
    adamw,
    largest_difference,
    of_all_ranks,
    own_batches,
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


# --- what each rank holds -------------------------------------------------------------------------


def held(stage):
    """Bytes on all ranks between the last backward and the step."""
    model, optimizer = apply_zero(tiny_model(vocab_size=255), torch.optim.AdamW, stage=stage)
    rank_step(model, optimizer, own_batches(0))
    between = []

    def before_step(*_):
        of_rank = rank_bytes(model, optimizer)
        between.append((of_rank.parameters, of_rank.gradients, of_rank.states))

    with_hook = optimizer.register_step_pre_hook(before_step)
    rank_step(model, optimizer, own_batches(1))
    with_hook.remove()
    return of_all_ranks(between[0])


def held_in_all_stages():
    return {stage: held(stage) for stage in (1, 2, 3)}


def test_bytes_on_four_ranks_are_as_predicted(four_ranks):
    """The mistakes: another rank's parameters in stage 1, rows that do not divide in 2 and 3."""
    for stage, of_ranks in four_ranks.run(held_in_all_stages).items():
        for number, measured in enumerate(of_ranks):
            model = tiny_model(vocab_size=255)
            expected = predicted_rank_bytes(model, stage=stage, ranks=4, rank=number)
            assert measured == pytest.approx(tuple(expected), rel=0.001)
