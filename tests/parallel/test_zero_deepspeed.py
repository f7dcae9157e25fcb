import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from recipes_lib.core.ranks import rank, world_size
from recipes_lib.parallel.zero.deepspeed import (
    FOLDER,
    apply_deepspeed,
    config_file,
    deepspeed_step,
    filled_config,
    held_bytes,
)
from tests.core.refusal import refusal
from tests.parallel.parity import (
    MAX_NORM,
    TOLERANCE,
    Run,
    adamw,
    largest_difference,
    of_all_ranks,
    own_batches,
    tiny_model,
    train_alone,
)

ADAMW = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.01}
CONFIGS = sorted(path.stem for path in FOLDER.glob("*.json"))
IN_MICRO_BATCHES = ["zero1", "zero2", "zero3_offload"]
STEPS = 3
HIDDEN = 64
NO_CLIPPING = 1e9  # a norm that no gradient has
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="needs DeepSpeed: `DS_ACCELERATOR=cpu pip install deepspeed`",
)


def make_engine(model, config, count=1, max_norm=MAX_NORM, **options):
    rows = 8 // world_size() // count
    return apply_deepspeed(
        model,
        torch.optim.AdamW,
        config=config,
        rows=rows,
        micro_batches=count,
        max_norm=max_norm,
        **ADAMW | options,
    )


# --- without DeepSpeed ----------------------------------------------------------------------------


def test_files_have_no_bucket_of_two_gigabytes():
    """The mistake: DeepSpeed takes 4 GB for its buckets, whatever the size of the model is."""
    for name in CONFIGS:
        config = json.loads(config_file(name).read_text())
        filled = filled_config(config, tiny_model(), rows=4, micro_batches=2)
        zero = filled["zero_optimization"]
        assert zero["stage"] == int(name.removeprefix("zero")[0])
        assert zero["reduce_bucket_size"] == HIDDEN**2
        assert filled["train_batch_size"] == 8
        if zero["stage"] == 3:
            assert zero["stage3_param_persistence_threshold"] == 10 * HIDDEN


def test_a_stage_that_deepspeed_takes_for_0_is_refused():
    """The mistake: the key is `zero_optimization`; under another name nothing is split."""
    good = json.loads(config_file("zero2").read_text())
    with pytest.raises(ValueError, match="stage=None"):
        filled_config({"ZeRO_optimization": {"stage": 2}}, tiny_model(), rows=1)
    with pytest.raises(ValueError, match="would compile"):
        filled_config(good | {"optimizer": {"type": "AdamW"}}, tiny_model(), rows=1)


# --- with DeepSpeed -------------------------------------------------------------------------------


def train(name, steps=STEPS, count=1, seed_of_rank=False, max_norm=MAX_NORM):
    model = tiny_model(seed=rank() if seed_of_rank else 0)
    engine = make_engine(model, config_file(name), count, max_norm)
    losses = [deepspeed_step(engine, own_batches(step, count)) for step in range(steps)]
    return Run(losses, whole_weights(engine))


def whole_weights(engine):
    """All weights, gathered where stage 3 has split them."""
    import deepspeed

    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: value.detach().cpu().clone() for name, value in parameters.items()}


def train_all(names, **options):
    return {name: train(name, **options) for name in names}


@needs_deepspeed
def test_micro_batches_equal_one_process(two_ranks):
    """The mistake: DeepSpeed divides each loss by the number of micro-batches once more.

    Without clipping, which hides a factor. And rank 1 starts elsewhere: it must not stay there.
    """
    options = {"count": 2, "seed_of_rank": True, "max_norm": None}
    runs = two_ranks.run(train_all, names=IN_MICRO_BATCHES, **options)
    reference = train_alone(steps=STEPS, optimizer=adamw, max_norm=NO_CLIPPING)
    for name, run in runs.items():
        assert largest_difference(run, reference) < TOLERANCE, name


def bytes_of_all(names):
    """What each rank holds between two steps, by kind, for each file."""
    found = {}
    for name in names:
        engine = make_engine(tiny_model(), config_file(name))
        deepspeed_step(engine, own_batches(0))
        found[name] = of_all_ranks(held_bytes(engine))
    return found


@needs_deepspeed
def test_bytes_of_each_rank_are_those_of_the_table(two_ranks):
    """The mistake: masters and states that are whole."""
    sizes = [4 * parameter.numel() for parameter in tiny_model().parameters()]
    whole = sum(sizes)
    small = sum(size for size in sizes if size <= 4 * 10 * HIDDEN)  # stays whole in stage 3
    weights = {"zero1": whole, "zero2": whole, "zero3": whole / 2 + small}
    for name, of_ranks in two_ranks.run(bytes_of_all, names=list(weights), timeout=180).items():
        expected = {"weights": weights[name], "masters": whole / 2, "states": whole}
        for held in of_ranks:
            assert held == pytest.approx(expected, rel=0.001), name


def refusals():
    only_on_rank_0 = config_file("zero1") if rank() == 0 else Path("nowhere.json")
    engine = make_engine(tiny_model(), config_file("zero1"), count=2)
    return {
        "another stage": refusal(make_engine, tiny_model(), config_file(f"zero{1 + rank()}")),
        "no file on one rank": refusal(make_engine, tiny_model(), only_on_rank_0),
        "another count": refusal(deepspeed_step, engine, own_batches(0, 4)),
    }


@needs_deepspeed
def test_refused_on_every_rank_and_without_a_hang(two_ranks):
    """The mistakes: ranks that wait for ever; a step in the middle of the next batch."""
    messages = two_ranks.run(refusals)
    assert "give the same on all ranks" in messages["another stage"]
    assert "nowhere.json" in messages["no file on one rank"]
    assert "4 micro-batches, and the engine steps after 2" in messages["another count"]
