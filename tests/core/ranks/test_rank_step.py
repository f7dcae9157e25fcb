import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.ranks import rank
from recipes_lib.core.ranks.rank_step import rank_step, sum_of_losses, tokens_of_all_ranks
from tests.parallel.parity import (
    MAX_NORM,
    TOLERANCE,
    Run,
    counted_tokens,
    global_batch,
    largest_difference,
    loss_sum,
    own_batches,
    sgd,
    tiny_model,
    train_alone,
    whole_parameters,
)

NO_CLIPPING = 1e9  # a norm that no gradient has


def train_wrapped(steps=4, count=1, reduce_each=False, max_norm=MAX_NORM):
    model = DistributedDataParallel(tiny_model())
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(steps):
        batches = own_batches(step, count)
        loss = rank_step(model, optimizer, batches, max_norm=max_norm, reduce_each=reduce_each)
        losses.append(loss)
    return Run(losses, whole_parameters(model))


def refused():
    """What is refused on both ranks, though only one of them is wrong."""
    batch = own_batches(0)[0]
    empty = dict(batch, labels=torch.full_like(batch["labels"], -100))
    messages = []
    for batches in ([batch] * (1 + rank()), [], [empty]):
        with pytest.raises(ValueError) as caught:
            tokens_of_all_ranks(batches)
        messages.append(str(caught.value))
    counts = tokens_of_all_ranks([batch]), counted_tokens(global_batch(0)["labels"])
    half = tokens_of_all_ranks([[batch, empty][rank()]]), counted_tokens(batch["labels"])
    return messages, counts, half


def test_the_sum_of_losses_is_that_of_the_shifted_labels():
    model, batch = tiny_model(), global_batch(0)
    logits = model(input_ids=batch["input_ids"]).logits
    expected = loss_sum(logits, batch["labels"])
    torch.testing.assert_close(sum_of_losses(model, batch), expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"count": 2, "max_norm": None}, {"count": 2, "reduce_each": True}],
    ids=str,
)
def test_ranks_with_unequal_tokens_train_as_one_process(two_ranks, options):
    """A mean over each rank's own tokens would fail here: the ranks' numbers differ.

    A factor in all gradients shows without clipping only.
    """
    run = two_ranks.run(train_wrapped, **options)
    max_norm = options.get("max_norm", MAX_NORM) or NO_CLIPPING
    assert largest_difference(run, train_alone(max_norm=max_norm)) < TOLERANCE


def test_refused_on_every_rank(two_ranks):
    messages, counts, half = two_ranks.run(refused)
    assert "[1, 2] micro-batches" in messages[0]
    assert "[0, 0] micro-batches" in messages[1]
    assert "no token is left" in messages[2]
    assert counts[0] == counts[1]
    assert half[0] == half[1]  # a rank without tokens is no error while another has some
