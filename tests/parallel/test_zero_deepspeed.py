import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import distributed

from recipes_lib.core.measure import bytes_alive
from recipes_lib.core.ranks import rank, world_size
from recipes_lib.core.ranks.traffic import count_traffic
from recipes_lib.parallel.zero.deepspeed import (
    apply_deepspeed,
    config_file,
    deepspeed_step,
    filled_config,
    held_bytes,
    predicted_deepspeed_bytes,
    predicted_deepspeed_sent,
)
from tests.parallel.parity import (
    MAX_NORM,
    TOLERANCE,
    Run,
    adamw,
    largest_difference,
    own_batches,
    tiny_model,
    train_alone,
)

ADAMW = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.01}
CONFIGS = ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]
# Every stage with clipping and with micro-batches, and every file in one of the two.
CLIPPED = ["zero1", "zero2_offload", "zero3"]
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


@pytest.mark.parametrize("name", CONFIGS)
def test_files_have_no_bucket_of_two_gigabytes(name):
    """DeepSpeed takes the memory of its buckets whatever the size of the model is."""
    filled = filled_config(
        json.loads(config_file(name).read_text()), tiny_model(), rows=4, micro_batches=2
    )
    zero = filled["zero_optimization"]
    assert zero["stage"] == int(name.removeprefix("zero")[0])
    assert zero["reduce_bucket_size"] == HIDDEN**2
    assert filled["train_batch_size"] == 8
    assert ("offload_optimizer" in zero) == name.endswith("offload")
    if zero["stage"] == 3:
        assert zero["stage3_param_persistence_threshold"] == 10 * HIDDEN
        assert zero["stage3_gather_16bit_weights_on_model_save"]


def test_the_files_are_all_tested():
    assert sorted(path.stem for path in config_file("zero1").parent.glob("*.json")) == sorted(
        CONFIGS
    )


def test_bad_configurations():
    with pytest.raises(ValueError, match="choose one of zero1, zero2"):
        config_file("zero4")
    good = json.loads(config_file("zero2").read_text())
    with pytest.raises(ValueError, match="stage=None"):
        filled_config({}, tiny_model(), rows=1)
    with pytest.raises(ValueError, match="would compile"):
        filled_config(good | {"optimizer": {"type": "AdamW"}}, tiny_model(), rows=1)
    with pytest.raises(ValueError, match=r'fp16\.enabled of the configuration is "auto"'):
        filled_config(good | {"fp16": {"enabled": "auto"}}, tiny_model(), rows=1)


def test_predicted_bytes_of_each_stage():
    model = tiny_model()
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    totals = []
    for stage in (1, 2, 3):
        parts = predicted_deepspeed_bytes(model, stage=stage, ranks=4)
        totals.append(sum(parts.values()) / whole)
    # Masters and states, 12 bytes per parameter, are split in all stages.
    assert totals == pytest.approx([2 + 3 / 4, 1 + 4 / 4, 5 / 4])


def told_without_deepspeed(missing_on):
    """What rank 0 is told where DeepSpeed cannot be imported on the ranks of these numbers."""
    with pytest.MonkeyPatch.context() as patch:
        if rank() in missing_on:
            patch.setitem(sys.modules, "deepspeed", None)  # an import of it raises ImportError
        with pytest.raises((ImportError, ValueError)) as caught:
            make_engine(tiny_model(), config_file("zero2"))
    return str(caught.value)


def test_without_deepspeed_every_rank_is_told_how_to_install_it(two_ranks):
    told = two_ranks.run(told_without_deepspeed, missing_on=[0, 1], timeout=30)
    assert "pip install deepspeed" in told


@needs_deepspeed
def test_a_rank_without_deepspeed_is_told_to_all(two_ranks):
    """It would raise alone, and the other would wait for it."""
    told = two_ranks.run(told_without_deepspeed, missing_on=[1], timeout=30)
    assert "deepspeed_is_installed: rank 0 gives True, rank 1 gives False" in told


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
def test_ranks_of_unequal_tokens_equal_one_process(two_ranks):
    reference = train_alone(steps=STEPS, optimizer=adamw)
    for name, run in two_ranks.run(train_all, names=CLIPPED, timeout=180).items():
        assert largest_difference(run, reference) < TOLERANCE, name


@needs_deepspeed
def test_micro_batches_equal_one_process(two_ranks):
    """Without clipping, which hides a factor. And rank 1 starts elsewhere: it must not stay there.

    DeepSpeed divides each loss by the number of micro-batches if nobody says otherwise.
    """
    options = {"count": 2, "seed_of_rank": True, "max_norm": None}
    runs = two_ranks.run(train_all, names=IN_MICRO_BATCHES, **options)
    reference = train_alone(steps=STEPS, optimizer=adamw, max_norm=NO_CLIPPING)
    for name, run in runs.items():
        assert largest_difference(run, reference) < TOLERANCE, name


@needs_deepspeed
def test_nothing_is_compiled(two_ranks):
    """DeepSpeed's own all-reduce for CPUs takes minutes to compile, at the first start."""
    assert two_ranks.run(compiled_operators) == []


def compiled_operators():
    make_engine(tiny_model(), config_file("zero2"))
    from deepspeed.comm.comm import cdb

    return [] if cdb.shm_comm_op is None else ["deepspeed_shm_comm"]


def bytes_of_ranks(name):
    """What each rank holds between two steps, by kind, and by the account of all live tensors."""
    model = tiny_model()
    before = bytes_alive()
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    engine = make_engine(model, config_file(name))
    held = {}
    step = engine.step

    def count_and_step():
        held["gradients"] = gradient_bytes(engine)
        step()

    engine.step = count_and_step
    deepspeed_step(engine, own_batches(0))
    after_step = bytes_alive() - before + weights
    held |= held_bytes(engine)
    of_ranks = [None] * world_size()
    distributed.all_gather_object(of_ranks, (held, after_step))
    return of_ranks


def gradient_bytes(engine):
    """Bytes of gradients on this rank between backward and step: DeepSpeed's, and those of PyTorch.

    DeepSpeed takes them out of `.grad`, and keeps its own parts.
    """
    kept = [p.grad for p in engine.module.parameters() if p.grad is not None]
    for parts in engine.optimizer.averaged_gradients.values():
        kept += parts
    return sum(gradient.nbytes for gradient in kept)


def bytes_of_all(names):
    return {name: bytes_of_ranks(name) for name in names}


@needs_deepspeed
def test_bytes_of_each_rank_as_predicted(two_ranks):
    names = ["zero1", "zero2", "zero3"]
    for name, of_ranks in two_ranks.run(bytes_of_all, names=names, timeout=180).items():
        stage = int(name[-1])
        expected = predicted_deepspeed_bytes(
            tiny_model(), stage=stage, ranks=2, persistence=10 * HIDDEN
        )
        at_rest = expected["weights"] + expected["masters"] + expected["states"]
        if stage == 3:
            at_rest += expected["gradients"]  # their memory stays
        for held, alive in of_ranks:
            # In stage 1 all gradients were there in backward, and those of other ranks are gone.
            at_step = expected["gradients"] / (2 if stage == 1 else 1)
            assert held["gradients"] == pytest.approx(at_step, rel=0.001), name
            for kind in ("weights", "masters", "states"):
                assert held[kind] == pytest.approx(expected[kind], rel=0.001), (name, kind)
            # Nothing else is there: the account of all live tensors sees no more than that.
            assert alive == pytest.approx(at_rest, rel=0.02), name


def weights_with_the_default_threshold():
    """Bytes of weights on this rank in stage 3 if the file says nothing of small parameters."""
    config = json.loads(config_file("zero3").read_text())
    del config["zero_optimization"]["stage3_param_persistence_threshold"]
    engine = make_engine(tiny_model(), config)
    deepspeed_step(engine, own_batches(0))  # gathers them for the first time
    return held_bytes(engine)["weights"]


@needs_deepspeed
def test_by_default_stage_3_splits_nothing_of_a_small_model(two_ranks):
    """Each rank has all weights and its parts: half more than without DeepSpeed, and no error."""
    measured = two_ranks.run(weights_with_the_default_threshold)
    model = tiny_model()
    default = predicted_deepspeed_bytes(model, stage=3, ranks=2, persistence=100_000)
    assert measured == default["weights"]
    assert measured == 1.5 * sum(4 * parameter.numel() for parameter in model.parameters())


def sent(name, **settings):
    config = json.loads(config_file(name).read_text())
    config["zero_optimization"].update(settings)
    engine = make_engine(tiny_model(), config)
    deepspeed_step(engine, own_batches(0))
    with count_traffic() as traffic:
        deepspeed_step(engine, own_batches(1))
    return traffic.sent


def sent_of_all():
    """Bytes by stage; and of stage 3 without the parameters that it keeps whole."""
    kept = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    return {name: sent(name) for name in ("zero1", "zero2", "zero3")} | {
        "again": sent("zero3", **kept),
        "to the owner": sent("zero2", use_multi_rank_bucket_allreduce=False),
    }


@needs_deepspeed
def test_sent_bytes_as_predicted(two_ranks):
    """Stage 3 keeps a small model whole until backward, and says nothing: it would send 3 x P."""
    measured = two_ranks.run(sent_of_all)
    model = tiny_model()
    for stage in (1, 2, 3):
        expected = predicted_deepspeed_sent(model, stage=stage, ranks=2)
        assert measured[f"zero{stage}"] == pytest.approx(expected, rel=0.01)
    expected = predicted_deepspeed_sent(model, stage=3, ranks=2, gathered_again=True)
    assert measured["again"] == pytest.approx(expected, rel=0.01)
    assert measured["to the owner"] == pytest.approx(measured["zero2"] * 2 / 3, rel=0.01)


def refusals():
    messages = {}

    def expect(name, function, *args, **options):
        with pytest.raises(ValueError) as caught:
            function(*args, **options)
        messages[name] = str(caught.value)

    expect("another configuration", make_engine, tiny_model(), config_file(f"zero{1 + rank()}"))
    expect("another option", make_engine, tiny_model(), config_file("zero1"), lr=1.0 + rank())
    expect("no file", make_engine, tiny_model(), Path("nowhere.json"))
    only_on_rank_0 = config_file("zero1") if rank() == 0 else Path("nowhere.json")
    expect("no file on one rank", make_engine, tiny_model(), only_on_rank_0)
    expect("no model", make_engine, torch.nn.Linear(2, 2), config_file("zero1"))
    engine = make_engine(tiny_model(), config_file("zero1"), count=2)
    expect("another count", deepspeed_step, engine, own_batches(0, 4))
    return messages


@needs_deepspeed
def test_refused_on_every_rank_and_without_a_hang(two_ranks):
    messages = two_ranks.run(refusals)
    assert "give the same on all ranks" in messages["another configuration"]
    assert "give the same on all ranks" in messages["another option"]
    assert "nowhere.json is no configuration" in messages["no file"]
    assert "rank 1 gives None" in messages["no file on one rank"]
    assert "no Hugging Face model" in messages["no model"]
    assert "4 micro-batches, and the engine steps after 2" in messages["another count"]
