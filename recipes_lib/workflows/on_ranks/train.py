"""A few steps of one strategy on this rank, measured: what it keeps, sends, computes, and how fast.

    with RankPool(ranks=2) as pool:
        run = pool.run(train_on_ranks, strategy="DDP", sizes=SIZES, steps=4, rows=8, tokens=128)

The same on one rank that only pretends to be among 64 others: its bytes are right, its losses not.

    bytes_on_one_of(strategy="DDP", ranks=64, …)        what it keeps, of real tensors
    sharded_peak(shape="llama-3.1-8b", ranks=64, …)     its peak under FSDP2, without any data
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.checks import check_choice
from recipes_lib.core.data import IGNORED, load_text
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import predict
from recipes_lib.core.predict.equation import plain_step, sharded
from recipes_lib.core.predict.pretended_ranks import pretended_ranks
from recipes_lib.core.ranks import group_device, world_size
from recipes_lib.core.ranks.measured_bytes import RankBytes, rank_bytes
from recipes_lib.core.ranks.run_result import RankRun
from recipes_lib.core.ranks.traffic import Traffic, count_traffic
from recipes_lib.core.ranks.weighted_step import Batch
from recipes_lib.parallel.fully_sharded import apply_fully_sharded, predicted_rank_bytes
from recipes_lib.workflows.on_ranks.strategies import STRATEGIES, Options, Training

VOCABULARY = 256  # bytes
# A Llama-like model of which every number of ranks up to eight divides everything.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
WARM_UP_STEPS = 2  # the second one counts the traffic, which takes time

# --- a model and its batches ----------------------------------------------------------------------


def small_llama(*, sizes: dict[str, int], tokens: int) -> Any:
    """A Llama-like model over bytes in fp32, the same on every rank.

    Args:
        sizes: as in `transformers.LlamaConfig`; what is missing comes from SIZES.
        tokens: the longest row.
    """
    import transformers

    for name in sizes:
        check_choice(SIZES, size=name)  # transformers ignores a name that it does not know
    config = transformers.LlamaConfig(
        **SIZES | sizes,
        vocab_size=VOCABULARY,
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):  # the weights are drawn on the CPU
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def byte_batches(*, steps: int, rows: int, tokens: int) -> list[Batch]:
    """One batch per step: input_ids and labels [rows, tokens], from Python's standard library.

    A byte is a token. The first tokens of a row are its prompt and have no loss. So rows have
    unequal numbers of tokens, and a mean over the means of the ranks would be another number.
    """
    text = load_text(split="train").encode()[:4_000_000]
    count = steps * rows
    places = len(text) // tokens
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(places, generator=generator)[:count].tolist()
    pieces = [list(text[place * tokens : (place + 1) * tokens]) for place in chosen]
    input_ids = torch.tensor(pieces).view(steps, rows, tokens)
    labels = input_ids.clone()
    prompts = torch.randint(0, tokens // 2, (steps, rows), generator=generator)
    positions = torch.arange(tokens)
    labels[positions < prompts[:, :, None]] = IGNORED
    return [
        {"input_ids": inputs, "labels": answers}
        for inputs, answers in zip(input_ids, labels, strict=True)
    ]


# --- on real ranks --------------------------------------------------------------------------------


def train_on_ranks(
    *,
    strategy: str,
    sizes: dict[str, int],
    steps: int,
    rows: int,
    tokens: int,
) -> RankRun:
    """Train a small model with one strategy. Every rank calls it; rank 0's result holds for all.

    Args:
        strategy: a key of STRATEGIES.
        sizes: of the model, see `small_llama`.
        steps: three or more: the first two warm up, and have losses as the others.
        rows: of the whole batch of a step.
    Raises ValueError for what the strategy cannot divide, and for "one process" on several ranks.
    """
    check_choice(STRATEGIES, strategy=strategy)
    if strategy == "one process" and world_size() > 1:
        raise ValueError(
            f"strategy='one process' on {world_size()} ranks: each of them would train all rows by "
            f"itself; use one rank, or choose a strategy that divides the work"
        )
    model = small_llama(sizes=sizes, tokens=tokens).to(group_device())
    training = STRATEGIES[strategy](model, Options())
    held = _measured_in_step(training)
    losses = []
    seconds = []
    traffic = Traffic()
    for number, batch in enumerate(byte_batches(steps=steps, rows=rows, tokens=tokens)):
        batch = {name: tensor.to(group_device()) for name, tensor in batch.items()}
        distributed.barrier()
        begin = time.perf_counter()
        counting = count_traffic() if number == 1 else contextlib.nullcontext(traffic)
        with counting as traffic:
            losses.append(training.step(batch))
        distributed.barrier()  # the slowest rank ends the step
        if number >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - begin)
    return _of_the_fullest_rank(held[-1], traffic, losses, seconds)


def _kept_bytes_of(held: RankBytes) -> int:
    return held.parameters + held.gradients + held.states


def _measured_in_step(training: Training) -> list[RankBytes]:
    """A list that gets the bytes of this rank in each step: states are there, gradients still."""
    held: list[RankBytes] = []

    def measure_rank(*_: Any) -> None:
        held.append(rank_bytes(training.model, training.optimizer))

    training.optimizer.register_step_post_hook(measure_rank)
    return held


def _of_the_fullest_rank(
    held: RankBytes, traffic: Traffic, losses: list[float], seconds: list[float]
) -> RankRun:
    """A training's bytes on the rank that holds most; losses and times are those of every rank."""
    of_all: list[Any] = [None] * world_size()
    distributed.all_gather_object(of_all, (held, traffic))
    fullest, its_traffic = max(of_all, key=lambda pair: _kept_bytes_of(pair[0]))
    return RankRun(
        ranks=world_size(),
        losses=losses,
        seconds=seconds,
        parameters=fullest.parameters,
        gradients=fullest.gradients,
        states=fullest.states,
        sent_bytes=its_traffic.sent,
        calls=its_traffic.calls,
    )


# --- on a rank that is alone ----------------------------------------------------------------------


def bytes_on_one_of(*, strategy: str, ranks: int, sizes: dict[str, int], tokens: int) -> RankBytes:
    """What one of so many ranks would keep, measured on a rank that is alone.

    The other ranks do not exist, and collectives move nothing, so the losses would be wrong. The
    bytes are those of real tensors. Of a pipeline it is the first or the last rank, whichever keeps
    more: those between them have blocks only.

    Raises ValueError in a process that is a rank already.
    """
    found = []
    for place in (0, ranks - 1) if strategy.startswith("pipeline") else (0,):
        with pretended_ranks(ranks, rank=place):
            found.append(_bytes_of_a_step(strategy, sizes, tokens))
    return max(found, key=_kept_bytes_of)


def _bytes_of_a_step(strategy: str, sizes: dict[str, int], tokens: int) -> RankBytes:
    """One step of a pretended rank, with a row for each of the ranks."""
    options = Options(micro_batches=world_size())
    training = STRATEGIES[strategy](small_llama(sizes=sizes, tokens=tokens), options)
    if isinstance(training.model, DistributedDataParallel):
        # DDP asks its collectives for a result, and pretended ones have none.
        training.model.register_comm_hook(None, noop_hook)
    held = _measured_in_step(training)
    (batch,) = byte_batches(steps=1, rows=world_size(), tokens=tokens)
    training.step(batch)
    return held[-1]


class PeakOfRank(NamedTuple):
    """Bytes of one rank at its worst moment, and what of them stays from step to step."""

    by_arithmetic: int
    by_a_dry_step: int
    kept: int


def sharded_peak(*, shape: str, layers: int | None, ranks: int, tokens: int) -> PeakOfRank:
    """The peak of FSDP with one row of `tokens` per rank, in fp32 with AdamW; on shapes alone.

    Args:
        shape: a key of `core.model.SHAPES`.
        layers: fewer blocks than the shape has; None for all.
        ranks: how many there would be.
    """
    ids = torch.zeros(1, tokens, dtype=torch.long)

    def step_of_shards(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def build_shards() -> tuple[Any, torch.optim.Optimizer, Any]:
        model = apply_fully_sharded(model_of_shape(shape, layers=layers, device="cpu"))
        return model, torch.optim.AdamW(model.parameters(), fused=True), step_of_shards

    plain = model_of_shape(shape, layers=layers, device="meta")
    equation = sharded(plain_step(plain, rows=1, length=tokens), ranks=ranks)
    kept = predicted_rank_bytes(plain, ranks=ranks)
    return PeakOfRank(equation.peak, predict(build_shards, ranks=ranks).peak, kept.total)
