"""Reminders: answers that are right, and held-out ones that nobody can remember."""

import json
import re

import pytest

from recipes_lib.core.data.reminder_task import THINGS, reminder_pairs, spoken, times_of


def test_the_clock_at_its_corners():
    """The mistakes: midnight as 12:05, noon as 00:05 or 24:05, seven in the evening as 07:00."""
    assert [spoken(0, 5), spoken(12, 5)] == ["12:05 am", "12:05 pm"]
    assert [spoken(19, 0), spoken(11, 55)] == ["7:00 pm", "11:55 am"]


def test_an_answer_says_what_its_question_asks():
    for pair in reminder_pairs(limit=50):
        answer = json.loads(pair["completion"])
        hour, minute = map(int, answer["time"].split(":"))
        assert spoken(hour, minute) in pair["prompt"]
        assert answer["do"] in pair["prompt"] and answer["day"] in pair["prompt"]


def test_held_out_times_and_things_are_never_trained_on():
    """The mistake: a score on what the model has seen."""
    train, held_out = (set().union(*times_of(split)) for split in ("train", "validation"))
    assert not train & held_out
    assert len(train) + len(held_out) == 288
    assert not set(THINGS["train"]) & set(THINGS["validation"])


@pytest.mark.parametrize("split", ["train", "validation"])
def test_who_copies_the_digits_gets_half(split):
    """The mistake: a score that says nothing, because most times need no change."""
    pairs = reminder_pairs(split=split, limit=48)
    copied = 0
    for pair in pairs:
        hour, minute = re.search(r"(\d+):(\d+)", pair["prompt"]).groups()
        copied += f"{int(hour):02}:{minute}" in pair["completion"]
    assert copied == len(pairs) / 2


def test_no_answer_comes_twice():
    """The mistake: a pair that judges is also one that was looked at on the way."""
    answers = [pair["completion"] for pair in reminder_pairs(split="validation", limit=10**4)]
    assert len(answers) == len(set(answers)) == 58 * 7 * 4
