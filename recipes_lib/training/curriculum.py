"""Sequence-length curriculum: short rows first, long ones later, the same number of tokens in every step.

Problem    A token costs more in a long row than in a short one, and an untrained model learns from a long context
           little that a short one would not teach it.
Idea       Training passes through stages of growing length, and rows x length stays `tokens_per_step`:

               steps   40 %          30 %           30 %
               rows    16 x 256      4 x 1024       1 x 4096

           The stream is cut into pieces of the longest length, in an order of each epoch's own; a step takes the next
           pieces and cuts them into rows of its stage. So step i holds the same tokens under every schedule, each
           token once per epoch, and the position in the data is the number of the step.
Saves      6 L Q S of the 6 P + 6 L Q S operations per token are attention: `estimate_curriculum` is the share of the
           compute that is left at equal tokens; divided by it, the steps at equal compute.
Costs      Rows begin in the middle of a text more often. What needs a long context is learnt in the last stage only.
           The shape of the batch changes: compiled graphs and memory plans are made once per stage.
Use when   Training from scratch, or a long continued pre-training, at lengths where attention is a large part.
Not when   S is far below P / (L Q): then nothing is saved. Not for a short fine-tuning on long inputs.
In production   DeepSpeed: "curriculum_learning" with "curriculum_type": "seqlen", and MosaicML Composer's
           `SeqLengthWarmup`: both cut the rows shorter and keep their number, so a step has fewer tokens (see below).
           Megatron: `--variable-seq-lengths` only lets pipeline stages exchange rows of changing length.
Source     Li et al., "The Stability-Efficiency Dilemma" (arXiv 2108.06084); Press et al., "Shortformer" (2012.15832);
           Pouransari et al., "Dataset Decomposition" (2405.13226).

Traps: with a constant number of rows, early steps have few tokens: noisier gradients at the full learning rate, and a
schedule by steps decays it too soon; DeepSpeed's tutorial asks for decay by tokens. Here a step always has the same.

Shapes: B rows, S tokens in each; L layers, Q width of all query heads, P parameters that multiply a token.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from recipes_lib.core.causal_lm import decoder_blocks, projection_widths

Stages = Sequence[tuple[int, float]]


def curriculum_batches(
    tokens: torch.Tensor | Sequence[Sequence[int]],
    *,
    stages: Stages,
    tokens_per_step: int,
    steps: int,
    seed: int = 0,
    start_step: int = 0,
    device: str = "cpu",
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches {"input_ids", "labels"} [B, S] of the steps `start_step` … `steps` - 1; B x S is `tokens_per_step`.

    A function of its arguments: after a kill, `start_step` goes on where the run was. Nothing is repeated before the
    stream is used up, but for less than one long row, which is another one in every epoch.

    Args:
        tokens: a stream of ids [T], or a list of documents, which are joined.
        stages: (length, share of the steps) in ascending order of length; each length divides the longest.
    Raises ValueError for stages that do not fit each other or the sizes, and for a stream below one step.
    """
    schedule = curriculum_schedule(stages=stages, tokens_per_step=tokens_per_step, steps=steps)
    if not isinstance(tokens, torch.Tensor):
        tokens = torch.tensor(list(itertools.chain.from_iterable(tokens)))
    longest = schedule[-1][0]
    pieces, together = len(tokens) // longest, tokens_per_step // longest
    if tokens.ndim != 1 or pieces < together or not 0 <= start_step <= steps:
        raise ValueError(
            f"tokens {[*tokens.shape]}, start_step={start_step}: give a stream [T] of at least one step, "
            f"{tokens_per_step} tokens, and a start_step of 0 to {steps}"
        )
    lengths = [length for length, count in schedule for _ in range(count)]
    # Not inside the generator: the errors come with the call, not with the first batch.
    return _batches(tokens, lengths, pieces, together, seed, start_step, device)


def _batches(tokens, lengths, pieces, together, seed, start_step, device):
    longest, orders = max(lengths), {}
    for step in range(start_step, len(lengths)):
        rows = []
        for number in range(step * together, (step + 1) * together):
            epoch, place = divmod(number, pieces)
            if epoch not in orders:
                rng = random.Random(f"{seed} {epoch}")
                rest = len(tokens) - pieces * longest
                orders = {epoch: (rng.randint(0, rest), rng.sample(range(pieces), pieces))}
            first, order = orders[epoch]
            start = first + order[place] * longest
            rows.append(tokens[start : start + longest])
        ids = torch.cat(rows).long().view(-1, lengths[step]).to(device)  # [B, S]
        yield {"input_ids": ids, "labels": ids.clone()}


def curriculum_schedule(
    *, stages: Stages, tokens_per_step: int, steps: int
) -> list[tuple[int, int]]:
    """The stages as (length, number of steps); the numbers sum to `steps`. Raises ValueError as above."""
    lengths, shares = [length for length, _ in stages], [share for _, share in stages]
    longest = lengths[-1] if lengths else 0
    if not lengths or lengths[0] < 2 or any(b <= a for a, b in itertools.pairwise(lengths)):
        raise ValueError(f"stages have the lengths {lengths}: give ascending ones of 2 or more")
    if (
        any(longest % length for length in lengths)
        or tokens_per_step < 1
        or tokens_per_step % longest
    ):
        raise ValueError(
            f"lengths {lengths}, tokens_per_step={tokens_per_step}: each length must divide the longest, and the "
            f"longest the tokens of a step, so that whole rows fill it"
        )
    if min(shares) <= 0 or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise ValueError(
            f"stages have the shares {shares}: give positive ones that sum to 1, not to {sum(shares):g}"
        )
    ends = [round(steps * share) for share in itertools.accumulate(shares)]
    counts = [end - start for start, end in zip([0, *ends], ends)]
    if min(counts) < 1:
        raise ValueError(
            f"steps={steps} gives the stages {counts} steps: raise it, or drop a stage"
        )
    return list(zip(lengths, counts))


def flops_per_token(model: Any, *, seq_len: int) -> float:
    """Operations of forward and backward per token: 6 P + 6 L Q S. Causal attention reads S/2 keys on average."""
    # What is looked up multiplies nothing, unless it is the output layer as well.
    tables = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    tables -= {id(model.get_output_embeddings().weight)}
    multiplied = sum(p.numel() for p in model.parameters() if id(p) not in tables)
    layers, width = len(decoder_blocks(model)), projection_widths(model.config)[0]
    return 6 * multiplied + 6 * layers * width * seq_len


def estimate_curriculum(model: Any, *, stages: Stages) -> float:
    """The share of the compute of training at the longest length that the stages need for the same tokens. Divide a
    number of steps by it for the steps at equal compute."""
    cost = sum(share * flops_per_token(model, seq_len=length) for length, share in stages)
    return cost / flops_per_token(model, seq_len=stages[-1][0])


def train_curriculum(
    model: Any,
    tokens: torch.Tensor,
    *,
    stages: Stages,
    tokens_per_step: int,
    steps: int,
    learning_rate: float,
    seed: int = 0,
) -> list[float]:
    """Train with AdamW on `curriculum_batches` and return the loss of every step: warm-up, then a cosine to a tenth.

    Small on purpose, to compare schedules: one stage of share 1 is training at a fixed length.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    warmup = max(1, steps // 20)

    def rate(step: int) -> float:
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps))

    schedule, losses = torch.optim.lr_scheduler.LambdaLR(optimizer, rate), []
    sizes = {"stages": stages, "tokens_per_step": tokens_per_step, "steps": steps, "seed": seed}
    for batch in curriculum_batches(tokens, **sizes, device=str(model.device)):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare_at_equal_compute(
    build: Callable[[], Any],
    tokens: torch.Tensor,
    held_out: torch.Tensor,
    *,
    schedules: dict[str, Stages],
    steps: int,
    learning_rate: float,
    seeds: Sequence[int] = (0, 1, 2),
) -> dict[str, list[float]]:
    """Held-out loss on long rows [B, S] of each schedule, one per seed, from equal weights and with equal compute.

    `steps` of one row each are those of training at the full length; a schedule of cheaper steps takes more of them.
    """
    reached: dict[str, list[float]] = {name: [] for name in schedules}
    for seed, (name, stages) in itertools.product(seeds, schedules.items()):
        torch.manual_seed(seed)
        model = build()
        last, full = (
            flops_per_token(model, seq_len=length) for length in (stages[-1][0], held_out.shape[1])
        )
        count = round(steps * full / (last * estimate_curriculum(model, stages=stages)))
        sizes = {"tokens_per_step": held_out.shape[1], "steps": count, "seed": seed}
        train_curriculum(model, tokens, stages=stages, learning_rate=learning_rate, **sizes)
        with torch.no_grad():
            reached[name].append(
                model(input_ids=held_out, labels=held_out, use_cache=False).loss.item()
            )
    return reached
