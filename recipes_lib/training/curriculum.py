"""Sequence-length curriculum: short rows first, long ones later, the same tokens in every step.

Problem    A token costs more in a long row than in a short one, and an untrained model learns from
           a long context little that a short one would not teach it.
Idea       Training passes through stages of growing length, and rows x length stays
           `tokens_per_step`:

               steps   40 %          30 %           30 %
               rows    16 x 256      4 x 1024       1 x 4096

           The stream is cut into pieces of the longest length, in an order of each epoch's own; a
           step takes the next pieces and cuts them into rows of its stage. So step i holds the same
           tokens under every schedule, each token once per epoch, and the position in the data is
           the number of the step.
Saves      6 L Q S of the 6 P + 6 L Q S operations per token are attention, and shrink with S:
           `steps_at_equal_compute` says how many more steps that buys.
Costs      Rows begin in the middle of a text more often. What needs a long context is learnt in the
           last stage only. The shape of the batch changes: compiled graphs and memory plans are
           made once per stage.
Use when   Training from scratch, or a long continued pre-training, at lengths where attention is a
           large part.
Not when   S is far below P / (L Q): then nothing is saved. Not for a short fine-tuning on long
           inputs.
In production   DeepSpeed: "curriculum_learning" with "curriculum_type": "seqlen", and MosaicML
           Composer's `SeqLengthWarmup`: both cut the rows shorter and keep their number, so a step
           then has fewer tokens.
Source     Li et al., "The Stability-Efficiency Dilemma" (arXiv 2108.06084); Press et al.,
           "Shortformer" (2012.15832); Pouransari et al., "Dataset Decomposition" (2405.13226).

Traps: with a constant number of rows, early steps have few tokens: noisier gradients at the full
learning rate, and a schedule by steps decays it too soon; DeepSpeed's tutorial asks for decay by
tokens. Here a step always has the same.

Shapes: B rows, S tokens in each; L layers, Q width of all query heads, P parameters that multiply a
token.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from recipes_lib.core.data import Batch
from recipes_lib.core.predict.flops import step_operations

Stages = Sequence[tuple[int, float]]  # (length, share of the steps)

# --- the idea: what a learner can copy ------------------------------------------------------------


def rows_that_grow(
    stream: torch.Tensor, *, stages: Stages, tokens_per_step: int, steps: int
) -> Iterator[torch.Tensor]:
    """Cut a stream of ids [tokens] into the rows [B, S] of every step, in its own order."""
    start = 0
    for length, share in stages:
        for _ in range(round(share * steps)):
            # The tokens do not depend on the stage, only how many rows they make.
            step_tokens = stream[start : start + tokens_per_step]  # [B * S]
            yield step_tokens.view(-1, length)  # [B, S], B = tokens_per_step / S
            start += tokens_per_step


# --- the technique --------------------------------------------------------------------------------


def curriculum_batches(
    tokens: torch.Tensor,
    *,
    stages: Stages,
    tokens_per_step: int,
    steps: int,
    seed: int = 0,
    start_step: int = 0,
) -> Iterator[Batch]:
    """Batches {"input_ids", "labels"} [B, S] of the steps `start_step` … `steps` - 1.

    B x S is `tokens_per_step`. After a kill, `start_step` goes on where the run was. Nothing is
    repeated before the stream is used up. Less than one long row is left out of each epoch, another
    one every time.

    Args:
        tokens: a stream of ids [tokens].
        stages: (length, share of the steps), from short to long; each length divides the longest.
    """
    schedule = curriculum_schedule(stages=stages, tokens_per_step=tokens_per_step, steps=steps)
    lengths = []  # of every step's rows
    for length, count in schedule:
        lengths += [length] * count
    # Not inside the generator: the errors come with the call, not with the first batch.
    return _batches_of_stages(tokens, lengths, tokens_per_step, seed=seed, start_step=start_step)


def _batches_of_stages(
    stream: torch.Tensor,
    lengths: list[int],
    tokens_per_step: int,
    *,
    seed: int,
    start_step: int,
) -> Iterator[Batch]:
    """The batch of each step of the curriculum, cut from the pieces of one epoch after another."""
    longest = lengths[-1]
    pieces_per_step = tokens_per_step // longest
    pieces_per_epoch = len(stream) // longest
    known_epoch = None  # only one epoch's order is kept
    for step in range(start_step, len(lengths)):
        pieces = []
        # Pieces are numbered through all epochs, so an epoch may end inside a step.
        for number in range(step * pieces_per_step, (step + 1) * pieces_per_step):
            epoch, place = divmod(number, pieces_per_epoch)
            if epoch != known_epoch:
                starts = _piece_starts(epoch, tokens=len(stream), longest=longest, seed=seed)
                known_epoch = epoch
            start = starts[place]
            pieces.append(stream[start : start + longest])
        ids = torch.cat(pieces).long().view(-1, lengths[step])  # [B, S]
        # The model shifts the labels itself. A copy: who masks labels must not change the input.
        yield {"input_ids": ids, "labels": ids.clone()}


def _piece_starts(epoch: int, *, tokens: int, longest: int, seed: int) -> list[int]:
    """Where the curriculum's pieces of an epoch begin, in the order of that epoch."""
    pieces, left_over = divmod(tokens, longest)
    # A generator of the epoch's own: any step can be computed without those before it.
    generator = random.Random(f"{seed} {epoch}")
    # The left-over tokens are skipped in part before the first piece, in part after the last.
    first = generator.randint(0, left_over)
    order = generator.sample(range(pieces), pieces)
    return [first + piece * longest for piece in order]


def curriculum_schedule(
    *, stages: Stages, tokens_per_step: int, steps: int
) -> list[tuple[int, int]]:
    """The stages of the curriculum as (length, number of steps); the numbers sum to `steps`."""
    lengths = [length for length, _ in stages]
    shares = [share for _, share in stages]
    longest = lengths[-1]
    if lengths != sorted(set(lengths)) or any(longest % length for length in lengths):
        raise ValueError(
            f"stages have the lengths {lengths}: give ascending ones that divide the longest"
        )
    if tokens_per_step % longest:
        raise ValueError(f"tokens_per_step={tokens_per_step}: give a multiple of {longest}")
    if min(shares) <= 0 or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise ValueError(f"stages have the shares {shares}: give positive ones that sum to 1")
    # The ends are rounded and not the counts, so that the counts sum to `steps`.
    ends = [round(steps * share) for share in itertools.accumulate(shares)]
    counts = [end - start for start, end in itertools.pairwise([0, *ends])]
    if min(counts) < 1:
        raise ValueError(
            f"steps={steps} gives the stages {counts} steps: raise it, or drop a stage"
        )
    return list(zip(lengths, counts))


# --- the arithmetic -------------------------------------------------------------------------------


def steps_at_equal_compute(model: Any, stages: Stages, steps: int, *, full_length: int) -> int:
    """How many steps of the schedule cost what `steps` at the full length cost."""
    mean = sum(share * _operations_per_token(model, length) for length, share in stages)
    return round(steps * _operations_per_token(model, full_length) / mean)


def _operations_per_token(model: Any, length: int) -> float:
    """6 P + 6 L Q S where all weights train."""
    return step_operations(model, rows=1, length=length) / length
