"""Families beside their predictions."""

import pytest

from benchmarks.family_predictions import compare


# A window, experts, a recurrence.
@pytest.mark.parametrize("family", ["Mistral", "Mixtral", "Mamba2"])
def test_a_family_to_the_byte(family):
    """The mistake: a batch that counts on one side only, or states that are made in the step."""
    row = compare(family)
    for way in ("plain", "checkpointed"):
        assert row[f"{way}_predicted_bytes"] == row[f"{way}_measured_bytes"], way
