"""Texts that others have trained on, beside the equation's."""

import itertools

from benchmarks.published_lengths import lengths


def test_each_recipe_makes_the_predicted_text_longer():
    """The mistake: a recipe that is named and not in the arithmetic."""
    predicted = [row["predicted_tokens"] for row in lengths()]
    assert len(predicted) == 4
    assert all(longer > 1.5 * shorter for shorter, longer in itertools.pairwise(predicted))
