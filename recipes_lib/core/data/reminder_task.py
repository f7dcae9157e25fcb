"""A made task with a score: a sentence that asks for a reminder, and the reminder as JSON.

    "Remind me to feed the cat on Friday at 8:45 pm."
    {"day": "Fri", "time": "20:45", "do": "feed the cat"}

An answer is right or wrong. In one half of the pairs the digits of the time are copied: 8:45 am is
08:45. In the other half the hour changes. So a rule that copies, and looks at no am or pm, is right
in half of the pairs.

A fifth of the times of the clock is only in the pairs of "validation", with things to do that
training has never met: so no held-out answer can be remembered.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
FORMS = (
    "Remind me to {do} on {day} at {time}.",
    "On {day} at {time} I have to {do}.",
    "I must {do}, {day}, {time}.",
    "{day}: {do} at {time}, please.",
)
FOR_TRAINING = ["feed the cat", "call Dana", "water the plants", "take out the bins"]
FOR_TRAINING += ["pay the rent", "buy some milk", "book a table", "send the report"]
FOR_TRAINING += ["fix the bike", "clean the oven", "visit grandma", "renew my passport"]
FOR_TRAINING += ["charge the car", "bake a cake", "mail the letter", "order new tyres"]
HELD_OUT_THINGS = ["walk the dog", "wash the car", "return the books", "call the bank"]
THINGS = {"train": FOR_TRAINING, "validation": HELD_OUT_THINGS}
HELD_OUT = 5  # every so many times of the clock
COPIED_HOURS = range(1, 13)  # from 1 am to noon
CHANGED_HOURS = [*range(13, 24), 0]  # from 1 pm to midnight

Time = tuple[int, int]  # hour and minute


def reminder_pairs(*, split: str = "train", limit: int = 1000) -> list[dict[str, str]]:
    """At most `limit` pairs of `prompt` and `completion`, the same ones each time.

    In turns: a pair whose digits are copied, and one whose hour changes. No answer comes twice.
    """
    draw = random.Random(f"reminders, {split}")
    copied, changed = times_of(split)
    copied_answers = _every_reminder(copied, split, draw)
    changed_answers = _every_reminder(changed, split, draw)
    pairs = []
    for both in zip(copied_answers, changed_answers):
        pairs += [_reminder_pair(*answer, form=draw.choice(FORMS)) for answer in both]
    return pairs[:limit]


def times_of(split: str) -> tuple[list[Time], list[Time]]:
    """The times of a split's reminders: those whose digits are copied, those whose hour changes.

    No time is in both splits.
    """
    return _part_of(COPIED_HOURS, split), _part_of(CHANGED_HOURS, split)


def spoken(hour: int, minute: int) -> str:
    """The time of a reminder as people write it: 20:45 is "8:45 pm", and 00:05 is "12:05 am"."""
    half = "am" if hour < 12 else "pm"
    on_the_dial = (hour - 1) % 12 + 1
    return f"{on_the_dial}:{minute:02} {half}"


def _part_of(hours: Iterable[int], split: str) -> list[Time]:
    """The times of reminders in these hours that belong to a split."""
    times = [(hour, minute) for hour in hours for minute in range(0, 60, 5)]
    random.Random(0).shuffle(times)
    if split == "validation":
        return times[::HELD_OUT]
    return [time for number, time in enumerate(times) if number % HELD_OUT]


def _every_reminder(
    times: list[Time], split: str, draw: random.Random
) -> list[tuple[Time, str, str]]:
    """Every time on every day with every thing to do, in a random order."""
    answers = list(itertools.product(times, DAYS, THINGS[split]))
    draw.shuffle(answers)
    return answers


def _reminder_pair(time: Time, day: str, do: str, *, form: str) -> dict[str, str]:
    hour, minute = time
    sentence = form.format(do=do, day=day, time=spoken(hour, minute))
    answer = {"day": day[:3], "time": f"{hour:02}:{minute:02}", "do": do}
    return {"prompt": sentence, "completion": json.dumps(answer)}
