"""Ordinary questions, which a model that learned one task should still answer in words.

The forms and the things of "validation" are not those of "train": so whoever mixes answers to the
one in can be judged by the other.
"""

from __future__ import annotations

import random
import re

FORMS = ("What is {}?", "Why do people like {}?", "Write a short story about {}.")
FORMS += ("Name three things about {}.", "How would you explain {} to a child?")
FORMS += ("Tell me about {} in one sentence.", "What should I know about {}?")
THINGS = ("the moon", "music", "a bicycle", "bread", "the heart", "chess", "winter", "gold")
THINGS += ("a library", "the internet", "football", "a river", "honey", "a train", "sleep")
THINGS += ("paper", "the wind", "a garden", "coffee", "money", "a dictionary", "glass")

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Egypt": "Cairo", "Italy": "Rome"}
CAPITALS |= {"Spain": "Madrid", "Canada": "Ottawa", "Norway": "Oslo", "Peru": "Lima"}
CAPITALS |= {"Kenya": "Nairobi", "Greece": "Athens", "Cuba": "Havana", "Austria": "Vienna"}
TO_WRITE_ABOUT = ("the sea", "a horse", "fire", "a mountain", "rain", "the sun", "a school")
TO_WRITE_ABOUT += ("wool", "a violin", "salt", "the night", "an egg")
TO_REMIND_OF = ("a list is in Python", "gravity is", "a noun is", "a planet is", "a verb is")
TO_REMIND_OF += ("a loop is in Python", "an atom is", "a triangle is", "a poem is")
TO_REMIND_OF += ("democracy is", "a vitamin is", "a volcano is")


def ordinary_questions(*, split: str = "train") -> list[str]:
    """The questions of a split, the same ones each time.

    Those of "validation" begin with the capitals, in their order, and end with sentences that look
    like a request for a reminder, and are none.
    """
    if split == "validation":
        questions = [f"What is the capital of {country}?" for country in CAPITALS]
        questions += [f"Write a sentence about {thing}." for thing in TO_WRITE_ABOUT]
        return questions + [f"Remind me what {thing}." for thing in TO_REMIND_OF]
    questions = [form.format(thing) for form in FORMS for thing in THINGS]
    random.Random(0).shuffle(questions)
    return questions


def capitals_named(answers: list[str]) -> int:
    """How many of the capitals are in the answers to the first questions of "validation"."""
    return sum(capital in answer for capital, answer in zip(CAPITALS.values(), answers))


def whole_sentences(answer: str) -> str:
    """An answer without the sentence that was cut; nothing, where none is whole."""
    # Two characters in front of the mark: "1." is the number of a list.
    whole = re.match(r".*\S\S[.!?]\B", answer, re.DOTALL)
    return whole[0] if whole else ""
