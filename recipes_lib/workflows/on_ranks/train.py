"""A few steps of one strategy on this rank, measured: what it keeps, sends, computes, and how fast.

    with RankPool(ranks=2) as pool:
        run = pool.run(train_on_ranks, strategy="DDP", sizes=SIZES, steps=4, rows=8, tokens=128)

The same function runs on one rank that only pretends to be among 64 others
(`core.dry_ranks.pretended_ranks`): its bytes are right, its losses are not.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.predict.dry_ranks import pretended_ranks
from recipes_lib.core.ranks import group_device, rank, require_group, world_size
from recipes_lib.core.ranks.rank_bytes import RankBytes, rank_bytes
from recipes_lib.core.ranks.rank_run import RankRun
from recipes_lib.core.ranks.traffic import Traffic, count_traffic
from recipes_lib.workflows.on_ranks.batches import VOCABULARY, byte_batches
from recipes_lib.workflows.on_ranks.strategies import STRATEGIES, Options, Training

# A Llama-like model of which every number of ranks up to eight divides everything.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
WARM_UP_STEPS = 2  # the second one counts the traffic, which takes time


def small_llama(*, sizes: dict[str, int], tokens: int, seed: int = 0) -> Any:
    """A Llama-like model over bytes in fp32, the same on every rank for the same seed.

    Args:
        sizes: as in `transformers.LlamaConfig`; what is missing comes from SIZES.
        tokens: the longest row.
    Raises ValueError for a name that SIZES does not have, for sizes that are no whole numbers of 1
    or more, and for heads that do not divide the width.
    """
    import transformers

    config = transformers.LlamaConfig(
        **_checked(sizes),
        vocab_size=VOCABULARY,
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):  # the weights are drawn on the CPU
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def _checked(sizes: dict[str, int]) -> dict[str, int]:
    """All sizes of a model. transformers would take any name, and ignore those it does not know."""
    for name in sizes:
        if name not in SIZES:
            raise ValueError(f"sizes has {name!r}: choose from {', '.join(SIZES)}")
    whole = SIZES | sizes
    check_whole(**whole)
    heads = whole["num_attention_heads"]
    if whole["hidden_size"] % (2 * heads) != 0:
        raise ValueError(
            f"hidden_size={whole['hidden_size']}: give a multiple of {2 * heads}, for {heads} "
            f"heads of pairs of numbers, which RoPE rotates"
        )
    if heads % whole["num_key_value_heads"] != 0:
        raise ValueError(
            f"num_key_value_heads={whole['num_key_value_heads']}: give a divisor of the {heads} "
            f"attention heads"
        )
    return whole


def train_on_ranks(
    *,
    strategy: str,
    sizes: dict[str, int],
    steps: int,
    rows: int,
    tokens: int,
    micro_batches: int = 4,
    seed: int = 0,
) -> RankRun:
    """Train a small model with one strategy. Every rank calls it; rank 0's result holds for all.

    Args:
        strategy: a key of STRATEGIES.
        sizes: of the model, see `small_llama`.
        steps: three or more: the first two warm up, and have losses as the others.
        rows: of the whole batch of a step.
        tokens: of a row.
        micro_batches: of the pipeline.
    Raises ValueError without a process group, for an unknown strategy, for numbers out of range,
    for what the strategy cannot divide, and for "one process" on several ranks.
    """
    require_group()
    check_choice(STRATEGIES, strategy=strategy)
    if strategy == "one process" and world_size() > 1:
        raise ValueError(
            f"strategy='one process' on {world_size()} ranks: each of them would train all rows by "
            f"itself; use one rank, or choose a strategy that divides the work"
        )
    check_whole(least=WARM_UP_STEPS + 1, steps=steps)
    model = small_llama(sizes=sizes, tokens=tokens, seed=seed).to(group_device())
    options = Options(micro_batches=micro_batches)
    training = STRATEGIES[strategy](model, options)
    held = _measured_in_step(training)
    losses = []
    seconds = []
    traffic = Traffic()
    for number, batch in enumerate(byte_batches(steps=steps, rows=rows, tokens=tokens, seed=seed)):
        batch = {name: tensor.to(group_device()) for name, tensor in batch.items()}
        distributed.barrier()
        begin = time.perf_counter()
        if number == 1:
            with count_traffic() as traffic:
                losses.append(training.step(batch))
        else:
            losses.append(training.step(batch))
        distributed.barrier()  # the slowest rank ends the step
        if number >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - begin)
    return _of_the_fullest_rank(held[-1], traffic, losses, seconds)


def bytes_on_one_of(*, strategy: str, ranks: int, sizes: dict[str, int], tokens: int) -> RankBytes:
    """What one of so many ranks would keep, measured on a rank that is alone.

    The other ranks do not exist, and collectives move nothing, so the losses would be wrong. The
    bytes are those of real tensors. Of a pipeline it is the first or the last rank, whichever keeps
    more: those between them have blocks only.

    Raises ValueError as `train_on_ranks`, and in a process that is a rank already.
    """
    check_choice(STRATEGIES, strategy=strategy)
    places = [0]
    if strategy.startswith("pipeline"):
        places = [0, ranks - 1]
    found = []
    for place in places:
        with pretended_ranks(ranks, rank=place):
            found.append(_bytes_of_a_step(strategy, sizes, tokens))
    return max(found, key=_kept)


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


def _kept(held: RankBytes) -> int:
    return held.parameters + held.gradients + held.states


def _measured_in_step(training: Training) -> list[RankBytes]:
    """A list that gets the bytes of this rank in each step: states are there, gradients still."""
    held: list[RankBytes] = []

    def measure(*_: Any) -> None:
        held.append(rank_bytes(training.model, training.optimizer))

    training.optimizer.register_step_post_hook(measure)
    return held


def _of_the_fullest_rank(
    held: RankBytes, traffic: Traffic, losses: list[float], seconds: list[float]
) -> RankRun:
    """The bytes of the rank that holds most; losses and times are those of every rank."""
    of_all: list[Any] = [None] * world_size()
    distributed.all_gather_object(of_all, (_kept(held), -rank(), held, traffic))
    _, _, fullest, its_traffic = max(of_all, key=_by_bytes)
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


def _by_bytes(entry: tuple[int, int, Any, Any]) -> tuple[int, int]:
    return entry[:2]
