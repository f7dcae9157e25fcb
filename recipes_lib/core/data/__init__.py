"""Real text without a download: Python's own standard library.

`load_instructions` gives instruction pairs (a function's source → its docstring) as tokens and
labels, with the loss on the answer only. `load_text` gives long running text. Data of your own
takes the same way, from a file's row to tokens and labels:

row_sources  rows of a file, of the hub or of a list, each with its place
pair_columns  a row as a pair, a conversation or a text, whatever its columns are called
turns  the turns of a conversation in one form, whatever their fields are called
chat_template  what a chat template makes of a conversation, compared with what it holds
tokens_and_labels  pairs and conversations as tokens and labels, by the model's own template
pairs  the whole way: of the library, a file, the hub or a list, as text and as rows
batching  rows as batches: checked, right-padded, one after the other

corpus  Python's own standard library as text and as instruction pairs
losses_and_answers  losses, perplexity and answers on rows that were not trained on
images  5,000 handwritten digits, to train on and to test with
reminder_task  a made task with a score: a sentence, and the reminder in it as JSON
ordinary_questions  ordinary questions, and which answers to them are whole
row_order  the rows that a step trains on, as a function of the step alone
"""

from __future__ import annotations

from recipes_lib.core.data.batching import Batch, batches, check_rows, collate
from recipes_lib.core.data.corpus import load_text
from recipes_lib.core.data.pairs import (
    PlacedPair,
    load_instructions,
    load_pairs,
    placed_pairs,
    rows_of,
)
from recipes_lib.core.data.tokens_and_labels import IGNORED

__all__ = [
    "IGNORED",
    "Batch",
    "PlacedPair",
    "batches",
    "check_rows",
    "collate",
    "load_instructions",
    "load_pairs",
    "load_text",
    "placed_pairs",
    "rows_of",
]
