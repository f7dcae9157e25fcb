"""Longest sequences: dry steps count the bytes of real ones, and bisection finds from any guess."""

import pytest
import torch

from recipes_lib.core.measure import dry, dry_run
from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.longest_sequence import (
    Search,
    find_longest,
    peak_of,
    predicted_longest,
    search,
)


def training_step(model, optimizer):
    def step(tokens):
        ids = torch.ones(1, tokens, dtype=torch.long)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(4)  # makes AdamW's states
    return step


def plain_training():
    model = model_of_shape("tiny-llama", layers=1, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return training_step(model, optimizer), optimizer.zero_grad


# --- bisection ----------------------------------------------------------------------------------


def cubic(tokens):
    return 1000 + tokens**3


@pytest.mark.parametrize("start", [1, 100, 5000])
def test_bisection_finds_the_longest_from_any_guess(start):
    """The mistake: one token too few or too many, or thirty steps."""
    found = find_longest(cubic, limit_bytes=1000 + 100**3, start=start, resolution=0.001)
    assert found.tokens == 100
    assert found.peak_bytes == 1000 + 100**3
    assert found.peaks[101] > found.limit_bytes
    assert len(found.peaks) <= 30, "a bad guess is left in growing steps"


def test_bisection_within_the_resolution_and_with_few_steps():
    """The mistake: a search that throws its good guess away takes twenty steps."""
    limit = 1000 + 10_000**3
    found = find_longest(cubic, limit_bytes=limit, start=10_100, resolution=0.01)
    assert 9_900 <= found.tokens <= 10_000
    assert len(found.peaks) <= 4
    assert len(find_longest(cubic, limit_bytes=limit, start=10_050).peaks) == 2


def test_a_search_goes_on_from_what_it_knows():
    """The mistake: two lengths are known, and the border is walked to in ten steps after all."""

    def linear(tokens):
        return max(1000, 10 * tokens)  # short texts all take the same bytes

    known = {16: linear(16), 150: linear(150)}
    for guess in (1_200, 9_000):
        found = find_longest(linear, limit_bytes=50_000, start=guess, known=known)
        assert 4_950 <= found.tokens <= 5_000
        assert len(found.peaks) - len(known) <= 4


@pytest.mark.parametrize(("start", "most"), [(5, 90), (1, 2**30)])
def test_where_everything_fits_the_most_is_the_result(start, most):
    """The mistake: `most` itself is never tried, or a length beyond it is."""
    everything = find_longest(lambda tokens: 8, limit_bytes=8, start=start, most=most)
    assert everything.tokens == most
    assert max(everything.peaks) == most
    limit = 1000 + 100**3
    options = {"start": start, "most": most, "resolution": 0.001}
    assert find_longest(cubic, limit_bytes=limit, **options).tokens == min(most, 100)


def test_where_the_bytes_reach_the_limit():
    """The mistake: a line through a length that is far away, or that ran out of memory."""
    search = Search(100, 1000, {100: 900, 110: 1100, 500: 9000})
    assert search.crossing == 105
    assert Search(100, 1000, {100: 900, 110: None}).crossing == 100
    assert Search(100, 1000, {50: 500, 100: 900}).crossing == 100


def test_prediction_is_the_largest_length_of_the_arithmetic():
    """The mistake: one token less than fits."""
    assert predicted_longest(cubic, limit_bytes=1000 + 700**3) == 700
    with pytest.raises(ValueError, match="two tokens are predicted to take"):
        predicted_longest(cubic, limit_bytes=1000)
    with pytest.raises(ValueError, match="not even one token fits"):
        find_longest(cubic, limit_bytes=10, start=8)


# --- real and dry searches ----------------------------------------------------------------------


def test_running_out_of_memory_is_a_length_that_does_not_fit():
    """The mistake: the search ends there, or its gradients stay."""
    cleared = []

    def step(tokens):
        if tokens > 37:
            raise torch.OutOfMemoryError("full")

    peak = peak_of(step, lambda: cleared.append(1), limit_bytes=2**40)
    found = find_longest(peak, limit_bytes=2**40, start=50)
    assert found.tokens == 37
    assert found.peaks[38] is None
    assert cleared, "what the interrupted step left must go"


def test_a_search_without_a_gpu_is_dry_and_finds_what_fits():
    """The mistake: the model is built outside the dry run, and the steps are real after all."""
    seen = []

    def arrange():
        step, clear = plain_training()

        def watched(tokens):
            seen.append(dry())
            step(tokens)

        return watched, clear

    with dry_run():
        step, clear = plain_training()
        # Less than what one more token takes: the ids of an earlier step may still be alive.
        limit = peak_of(step, clear)(200) + 3000
    found = search(arrange, start=200, limit_bytes=limit, also=[64])
    assert all(seen)
    assert not dry()
    assert found.tokens == 200
    assert found.peaks[64] < found.peak_bytes <= limit
