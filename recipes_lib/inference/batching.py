"""Batched decoding: several prompts at once, each read of the weights serves all of them.

Problem    A step for one row reads all weights for one row of arithmetic. The arithmetic units wait
           for memory most of the time.
Idea       Put B prompts into one batch: a step reads the weights once, and gives B tokens. Prompts
           of different lengths are padded **on the left**, so that all rows end, and go on, at the
           same place:

               row 0    .  .  .  the cat | sat  on          start = 3
               row 1    once upon a  time | there was       start = 0

           Attention of a row begins at its start, and positions count from there. Padding on the
           right would put padding between a prompt and its answer.
Saves      Time per token over all rows: up to a number of rows, a step takes as long as one.
           time(B) = max(B · flops / rate, (weights + B · cache) / bandwidth)
Costs      Every row waits for the step of all: the time between two tokens of one answer grows as
           soon as arithmetic limits it. Each row has a cache. Padding is computed in the prefill,
           and rows that end early are computed until the last one ends.
Use when   Many answers are wanted and nobody waits for a single one: evaluations, labels for
           distillation, documents of a night.
Not when   One user waits for one answer. Nor for a service: requests come and go, and a server
           gives the place of a row that has ended to the next request (continuous batching).
In production   `tokenizer(prompts, padding=True, padding_side="left")` and `model.generate`; a
           service: `vllm serve MODEL`, or llama.cpp `llama-server --parallel 8`.
Source     Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models",
           OSDI 2022 (continuous batching); Pope et al., arXiv 2211.05102 (the arithmetic).

A row gets the tokens of a run of its own if no near tie decides: a kernel may round a row in a
batch differently. In fp32 near ties are rare. In 16 bits, and with the 8-bit and 4-bit layers that
compute in them, they are frequent, and a row may take another turn. With activations that are
quantized with one scale per call, a row depends on the others of its batch.

Shapes: B rows, S tokens of the longest prompt, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes_lib.core.measure import in_turns
from recipes_lib.core.model.decoding import CausalDecoder, require_decoder, stop_ids, token_row

# --- the idea: what a learner can copy ------------------------------------------------------------


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [B, S] with zeros on the left, and where each row starts, [B]."""
    longest = max(len(row) for row in rows)
    starts = torch.tensor([longest - len(row) for row in rows])  # [B]
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)  # [B, S]
    for number, row in enumerate(rows):
        tokens[number, longest - len(row) :] = torch.as_tensor(row)
    return tokens, starts


# --- the technique --------------------------------------------------------------------------------


def generate_batch(
    decoder: CausalDecoder,
    prompts: Sequence[Sequence[int] | Tensor],
    *,
    new_tokens: int,
    stop: Collection[int] = (),
) -> list[list[int]]:
    """Answer all prompts greedily, in one batch. Returns the answers, without the prompts."""
    require_decoder(decoder)
    stop = stop_ids(stop)
    rows = [token_row(prompt, vocabulary=decoder.vocabulary)[0].tolist() for prompt in prompts]
    tokens, starts = left_padded(rows)  # [B, S], [B]
    cache = decoder.new_cache(batch=len(rows), max_tokens=tokens.shape[1] + new_tokens)
    if starts.any():
        cache.starts = starts.to(cache.device)  # equal lengths need no mask
    answers: list[list[int]] = [[] for _ in rows]
    while True:
        logits = decoder(tokens, cache, last_only=True)  # [B, 1, V]
        tokens = logits.argmax(-1)  # [B, 1]
        for answer, token in zip(answers, tokens[:, 0].tolist()):
            # A row that has ended is computed on, because a batch keeps its shape.
            if not _row_has_ended(answer, new_tokens, stop):
                answer.append(token)
        if all(_row_has_ended(answer, new_tokens, stop) for answer in answers):
            return answers


def _row_has_ended(answer: list[int], new_tokens: int, stop: Collection[int]) -> bool:
    return len(answer) == new_tokens or (len(answer) > 0 and answer[-1] in stop)


@dataclass(frozen=True)
class BatchSpeed:
    """How fast batches of one size are: a step is the time between two tokens of a row."""

    batch: int
    seconds_per_step: float  # median of the rounds

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.seconds_per_step


def throughput_table(
    decoder: CausalDecoder,
    sizes: Iterable[int],
    *,
    prompt: Sequence[int] | Tensor,
    steps: int = 8,
    rounds: int = 3,
) -> list[BatchSpeed]:
    """Measure decoding at these batch sizes, in turns; every row is this prompt."""
    require_decoder(decoder)
    row = token_row(prompt, vocabulary=decoder.vocabulary)  # [1, S]
    runs = {str(size): _steps_behind(decoder, row, size, steps) for size in sizes}
    for run in runs.values():
        run()
    table = []
    for name, seconds in in_turns(runs, rounds=rounds).items():
        table.append(BatchSpeed(int(name), statistics.median(seconds) / steps))
    return table


def _steps_behind(decoder: CausalDecoder, row: Tensor, size: int, steps: int) -> Callable[[], None]:
    """What decodes `steps` tokens for a batch of `size` rows, each time from the prompt's end."""
    tokens = row.expand(size, -1).contiguous()  # [B, S]
    length = row.shape[1]
    cache = decoder.new_cache(batch=size, max_tokens=length + steps)
    first = decoder(tokens, cache, last_only=True).argmax(-1)  # [B, 1]

    def run() -> None:
        cache.truncate(length)
        newest = first
        for _ in range(steps):
            newest = decoder(newest, cache, last_only=True).argmax(-1)  # [B, 1]

    return run
