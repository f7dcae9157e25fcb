"""What is predicted of steps that a real card has taken."""

import pytest

from benchmarks.card_lengths import build_of, card_lengths
from benchmarks.record import newest
from benchmarks.sizes import FAST
from recipes_lib.core.predict import CARDS, predict


def test_a_prediction_is_what_an_h100_needed():
    """The mistake: adapters that copy what they read to fp32, as if autocast were not on."""
    name = "llama-3.2-1b, QLoRA, chunked loss"
    measured = newest("lengths", gpu=True).rows[name]
    shape, method, stack = name.split(", ")
    build = build_of(shape, method, stack, int(measured["tokens"]))
    predicted = predict(build, card=CARDS["H100"]).allocated
    assert predicted == pytest.approx(measured["peak_bytes"], rel=2e-3)


def test_a_row_for_each_length():
    """The mistake: a stack without its recipes takes the bytes of another one."""
    *_, found = card_lengths(**FAST["lengths"])
    stacks = ("checkpoints", "chunked loss", "all switches", "five lines")
    methods = ("all weights", "QLoRA")
    expected = [f"tiny-llama, {method}, {stack}" for method in methods for stack in stacks]
    assert [row["name"] for row in found["rows"]] == expected
    peaks = [row["peak_bytes"] for row in found["rows"]]
    assert peaks[3] < peaks[0] and peaks[7] < peaks[4]
    assert all(row["fits"] for row in found["rows"])
