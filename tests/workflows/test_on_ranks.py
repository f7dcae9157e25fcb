"""The same training under every strategy: losses, bytes and traffic, and what a notebook shows."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch

from recipes_lib.core.ranks.rank_pool import RankPool
from recipes_lib.parallel.pipeline_parallel.timed_actions import BACKWARD, FORWARD
from recipes_lib.workflows.on_ranks import demonstrations, libraries
from recipes_lib.workflows.on_ranks.plans import plan_of
from recipes_lib.workflows.on_ranks.strategies import STRATEGIES
from recipes_lib.workflows.on_ranks.train import (
    byte_batches,
    bytes_on_one_of,
    sharded_peak,
    small_llama,
    train_on_ranks,
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BATCH = {"rows": 8, "tokens": 32}
FOUR_RANKS = ("HSDP", "FSDP × TP")
ON_TWO = [name for name in STRATEGIES if name not in (*FOUR_RANKS, "one process")]


def train_all(*, names, **options):
    """Several strategies in one task."""
    return {name: train_on_ranks(strategy=name, **options) for name in names}


@pytest.fixture(scope="module")
def alone():
    """One process, as a training loop without any ranks: the reference of all strategies."""
    from tests.parallel.parity import counted_tokens, loss_sum

    model = small_llama(sizes=SIZES, tokens=BATCH["tokens"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    losses = []
    for batch in byte_batches(steps=3, **BATCH):
        logits = model(input_ids=batch["input_ids"]).logits
        loss = loss_sum(logits, batch["labels"]) / counted_tokens(batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("ranks", "names"), [(2, ON_TWO), (4, list(FOUR_RANKS))])
def test_every_strategy_is_the_same_training(ranks, names, alone, request):
    """Catches a mean of means, rows that two ranks share, and a plan that forgets what is whole."""
    pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    model = small_llama(sizes=SIZES, tokens=BATCH["tokens"])
    runs = pool.run(train_all, names=names, sizes=SIZES, steps=3, timeout=200, **BATCH)
    for name, run in runs.items():
        assert run.losses == pytest.approx(alone, abs=1e-5), name
        plan = plan_of(name, model, ranks=ranks, **BATCH)
        kept = [run.parameters, run.gradients, run.states]
        assert kept == pytest.approx(list(plan.kept), rel=0.03), name
        assert run.sent_bytes == pytest.approx(plan.sent, rel=0.03), name


def test_a_rank_that_pretends_keeps_what_a_real_one_keeps():
    """Catches states that are those of all ranks; 8 ranks cannot be started for a test."""
    model = small_llama(sizes=SIZES, tokens=BATCH["tokens"])
    for name, ranks in {"DDP": 8, "ZeRO-1": 8, "FSDP (ZeRO-3)": 8, "pipeline (1F1B)": 4}.items():
        held = bytes_on_one_of(strategy=name, ranks=ranks, sizes=SIZES, tokens=32)
        plan = plan_of(name, model, rows=8, tokens=32, ranks=ranks)
        kept = [held.parameters, held.gradients, held.states]
        assert kept == pytest.approx(list(plan.kept), rel=0.03)


def test_the_peak_of_a_rank_of_many():
    """Catches a peak without the blocks that are gathered, which is 16 P / N alone."""
    peak = sharded_peak(shape="llama-3.2-1b", layers=2, ranks=64, tokens=128)
    assert peak.by_arithmetic == pytest.approx(peak.by_a_dry_step, rel=0.03)
    assert peak.by_a_dry_step > 2 * peak.kept


def all_by_hand():
    """The ideas beside the real things."""
    return {
        "ring": demonstrations.ring_by_hand(),
        "data parallel": demonstrations.data_parallel_by_hand(),
        "zero": demonstrations.zero_by_hand(),
        "sharded layer": demonstrations.sharded_layer_by_hand(),
    }


def test_the_ideas_by_hand_are_the_real_things(two_ranks):
    """The mistakes: a sum over ranks in place of the mean, and a rank that keeps an old weight."""
    assert max(two_ranks.run(all_by_hand).values()) < 1e-4


def test_demonstrations(two_ranks, tmp_path):
    """Catches what only a notebook would show: empty lanes, a grid without backward."""
    everyone = two_ranks.run(demonstrations.who_is_there)
    assert [(rank, total) for rank, _, total in everyone] == [(0, 3.0), (1, 3.0)]
    lanes = two_ranks.run(
        demonstrations.lanes_of_a_step, sizes=SIZES, bucket_megabytes=0.1, **BATCH
    )
    assert len(lanes.communication) > 2
    actions = two_ranks.run(
        demonstrations.grid_of_a_pipeline,
        schedule="1f1b",
        sizes=SIZES,
        micro_batches=4,
        **BATCH,
    )
    directions = [action.direction for action in actions]
    assert (directions.count(FORWARD), directions.count(BACKWARD)) == (8, 8)
    dtypes = two_ranks.run(demonstrations.dtypes_in_sixteen_bits, sizes=SIZES, **BATCH)
    assert dtypes["weights at rest"] == "float32"
    assert dtypes["weights in a block"] == "bfloat16"
    stalls = two_ranks.run(
        demonstrations.stalls_of_a_save, folder=str(tmp_path), sizes=SIZES, tokens=32
    )
    assert all(seconds > 0 for seconds in stalls.values())


def test_shared_experts_and_sharded_bases_train_the_same(two_ranks):
    """The mistakes: a mean over ranks of what each has of its own; a base that is whole on each."""
    options = {"steps": 3, **BATCH}
    experts = partial(two_ranks.run, libraries.train_experts, experts=8, **options)
    quantized = partial(two_ranks.run, libraries.train_quantized, sizes=SIZES, **options)
    for train, choice in ((experts, "shared"), (quantized, "shards")):
        whole = train(**{choice: False})
        split = train(**{choice: True})
        assert split["losses"] == pytest.approx(whole["losses"], abs=1e-4), choice
        assert split["parameters"] < 0.7 * whole["parameters"], choice


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_the_same_by_deepspeed(two_ranks, alone):
    options = {"stage": 2, "sizes": SIZES, "steps": 3, **BATCH}
    came = two_ranks.run(libraries.train_with_deepspeed, **options)
    assert came["losses"] == pytest.approx(alone, abs=1e-5)


def test_bad_input(two_ranks):
    """The mistakes: both ranks train the same rows, each by itself; sizes of another model; three
    ranks that are planned as two.
    """
    options = {"sizes": SIZES, "steps": 3, **BATCH}
    with pytest.raises(ValueError, match="strategy='one process' on 2 ranks"):
        two_ranks.run(train_on_ranks, strategy="one process", **options)
    with pytest.raises(ValueError, match="size='hidden': choose one of hidden_size"):
        small_llama(sizes={"hidden": 3}, tokens=8)
    model = small_llama(sizes=SIZES, tokens=BATCH["tokens"])
    with pytest.raises(ValueError, match="ranks=3: HSDP takes pairs"):
        plan_of("HSDP", model, ranks=3, **BATCH)


# --- what one GPU can show: one rank, and NCCL ----------------------------------------------------

# Grids want four ranks, and the kernel of a ring 16 bits.
ON_ONE = [name for name in STRATEGIES if name not in (*FOUR_RANKS, "context parallel (ring)")]
# Losses are near 5, and a GPU adds up the products of fp32 in another order than a CPU.
ROUNDING = 1e-3


@pytest.mark.gpu
def test_one_rank_on_a_gpu_is_the_same_training(alone, tmp_path):
    """Catches tensors of a CPU in a collective of NCCL, and times of events that nobody awaits."""
    shape = {"sizes": SIZES, **BATCH}
    with RankPool(ranks=1, device="cuda") as pool:
        for name in ON_ONE:
            run = pool.run(train_on_ranks, strategy=name, steps=3, timeout=120, **shape)
            assert run.losses == pytest.approx(alone, abs=ROUNDING), name
        lanes = pool.run(demonstrations.lanes_of_a_step, bucket_megabytes=0.1, **shape)
        assert all(0 <= part.start < part.end for part in lanes.compute)
        grid = {"schedule": "interleaved", "micro_batches": 4}
        actions = pool.run(demonstrations.grid_of_a_pipeline, **grid, **shape)
        assert all(action.begin < action.end for action in actions)
        save = {"folder": str(tmp_path), "sizes": SIZES, "tokens": 32}
        stalls = pool.run(demonstrations.stalls_of_a_save, **save)
        assert all(seconds > 0 for seconds in stalls.values())
