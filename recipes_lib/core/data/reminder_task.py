"""A made task with a score: a sentence that asks for a reminder, and the reminder as JSON.

    "Remind me to feed the cat on Friday at 8:45 pm."
    {"day": "Fri", "time": "20:45", "do": "feed the cat"}

An answer is right or wrong. The clock has 288 times of five minutes each, and a fifth of them is
only in the pairs of "validation", with things to do that training has never met: so no held-out
answer can be remembered.
"""

from __future__ import annotations

import json
import random

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


def reminder_pairs(*, split: str = "train", limit: int = 1000) -> list[dict[str, str]]:
    """Pairs of `prompt` and `completion`, the same ones each time."""
    times = times_of(split)
    draw = random.Random(f"reminders, {split}")
    pairs = []
    for _ in range(limit):
        hour, minute = draw.choice(times)
        day = draw.choice(DAYS)
        do = draw.choice(THINGS[split])
        sentence = draw.choice(FORMS).format(do=do, day=day, time=spoken(hour, minute))
        answer = {"day": day[:3], "time": f"{hour:02}:{minute:02}", "do": do}
        pairs.append({"prompt": sentence, "completion": json.dumps(answer)})
    return pairs


def times_of(split: str) -> list[tuple[int, int]]:
    """The hours and minutes of a split; no time is in both."""
    clock = [(hour, minute) for hour in range(24) for minute in range(0, 60, 5)]
    random.Random(0).shuffle(clock)
    if split == "validation":
        return clock[::HELD_OUT]
    return [time for number, time in enumerate(clock) if number % HELD_OUT]


def spoken(hour: int, minute: int) -> str:
    """The time as people write it: 20:45 is "8:45 pm", and 00:05 is "12:05 am"."""
    half = "am" if hour < 12 else "pm"
    on_the_dial = (hour - 1) % 12 + 1
    return f"{on_the_dial}:{minute:02} {half}"
