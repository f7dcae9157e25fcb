"""Ordinary questions, and what counts as an answer to them."""

import pytest

from recipes_lib.core.data.ordinary_questions import (
    THINGS,
    TO_WRITE_ABOUT,
    capitals_named,
    ordinary_questions,
    whole_sentences,
)


def test_no_question_trains_and_judges():
    """The mistake: what was mixed in is asked again, and is remembered."""
    train, judges = ordinary_questions(), ordinary_questions(split="validation")
    assert len(set(train)) == len(train) and len(set(judges)) == len(judges)
    assert not set(train) & set(judges)
    assert not {*THINGS} & {*TO_WRITE_ABOUT}


def test_a_capital_counts_for_its_own_country():
    """The mistake: one name that a model says everywhere counts each time."""
    assert capitals_named(["It is Paris.", "It is Paris.", "The capital is Cairo."]) == 2


@pytest.mark.parametrize(
    ("answer", "whole"),
    [
        ("The sea is deep. It is also", "The sea is deep."),
        ("Is it deep? It may", "Is it deep?"),
        ("1. Bread is", ""),  # the number of a list ends no sentence
        ("It has 42. Of them", "It has 42."),
        ("It is 3.14 or", ""),
        ("", ""),
    ],
)
def test_a_sentence_that_was_cut_is_left_out(answer, whole):
    """The mistake: an end mark is learned in the middle of a sentence."""
    assert whole_sentences(answer) == whole
