import pytest
import torch

from recipes_lib.core.model.bytes_of_tensors import tensor_bytes
from recipes_lib.core.ranks import world_size
from recipes_lib.core.ranks.measured_bytes import rank_bytes
from recipes_lib.core.ranks.meshes import mesh_of
from recipes_lib.parallel.fully_sharded import apply_fully_sharded
from recipes_lib.parallel.fully_sharded.observed import (
    STRATEGIES,
    dtypes_of_step,
    measured_strategy,
)
from tests.parallel.parity import (
    TOLERANCE,
    adamw,
    largest_difference,
    own_batches,
    sgd,
    tiny_model,
    train_alone,
    train_on_rank,
)

OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
STEPS = 3


# --- functions that run on ranks ------------------------------------------------------------------


def train(make="sgd", micro_batches=1, reduce_each=False, copies=1, tied=False, **options):
    """The steps of `train_alone` on sharded parameters; a Run, and bytes at rest."""
    model = tiny_model(tie_word_embeddings=tied)
    if copies > 1:
        options["mesh"] = mesh_of(copies=copies, parts=world_size() // copies)
    apply_fully_sharded(model, **options)
    optimizer = OPTIMIZERS[make](model.parameters())
    how = {"count": micro_batches, "max_norm": 1.0, "reduce_each": reduce_each}
    return train_on_rank(model, optimizer, STEPS, **how)


def several(runs):
    """Several calls of `train` in one visit of the ranks."""
    return {name: train(**options) for name, options in runs.items()}


def accumulated_bytes(reduce_each):
    """Bytes of gradients, whole ones included, after the first of two micro-batches."""
    model = apply_fully_sharded(tiny_model())
    model.set_requires_gradient_sync(reduce_each)
    [batch] = own_batches(0)
    model(**batch, use_cache=False).loss.backward()
    held = rank_bytes(model)
    return held.gradients + held.gathered


def precision(**options):
    model = apply_fully_sharded(tiny_model(), **options)
    optimizer = torch.optim.AdamW(model.parameters())
    [batch] = own_batches(0)
    return {name: str(dtype) for name, dtype in dtypes_of_step(model, optimizer, batch).items()}


def strategies():
    [batch] = own_batches(0)
    return {name: measured_strategy(tiny_model(), name, batch) for name in STRATEGIES}


# --- the same training ----------------------------------------------------------------------------

RUNS = {
    "zero 3": {},
    "adamw": {"make": "adamw", "micro_batches": 2},
    "averaged in each": {"micro_batches": 2, "reduce_each": True},
    "kept whole": {"reshard_after_forward": False},
    "offload": {"offload": True},
    "tied": {"tied": True},
}


def test_two_ranks_train_as_one_process(two_ranks):
    """The mistake: an option that changes the sums. Rows count unequal numbers of tokens."""
    runs = two_ranks.run(several, runs=RUNS)
    for name, run in runs.items():
        options = RUNS[name]
        reference = train_alone(
            steps=STEPS,
            optimizer=OPTIMIZERS[options.get("make", "sgd")],
            tie_word_embeddings=options.get("tied", False),
        )
        assert largest_difference(run, reference) < TOLERANCE, name


def test_two_copies_of_two_parts_train_as_one_process(four_ranks):
    """The mistake: gradients of HSDP are averaged inside of a copy, and not over both."""
    run = four_ranks.run(train, copies=2)
    assert largest_difference(run, train_alone(steps=STEPS)) < TOLERANCE


# --- bytes and traffic ----------------------------------------------------------------------------


def test_without_averaging_each_rank_keeps_whole_gradients(two_ranks):
    """The mistake: accumulation that takes the memory of the whole model, without a word."""
    whole = sum(tensor_bytes(parameter) for parameter in tiny_model().parameters())
    assert two_ranks.run(accumulated_bytes, reduce_each=False) >= whole
    assert two_ranks.run(accumulated_bytes, reduce_each=True) < 0.8 * whole


def test_the_strategies_as_they_are(four_ranks):
    """The mistake: the courses' table, which says that hybrid keeps a full copy."""
    rows = four_ranks.run(strategies)
    whole = rows["no shard"].weights
    kept = {
        name: [row.weights / whole, row.gradients / whole, row.states / whole / 2]
        for name, row in rows.items()
    }
    expected = {"no shard": 1, "gradients and states": 1 / 4, "hybrid": 1 / 2, "full": 1 / 4}
    for name, fraction in expected.items():
        assert kept[name] == pytest.approx([fraction] * 3, rel=0.01), name
    # Whole from forward to backward is only what does not gather again.
    assert rows["gradients and states"].weights_between > whole
    assert rows["full"].weights_between < 0.7 * whole
    assert rows["full"].sent > rows["gradients and states"].sent


# --- precision ------------------------------------------------------------------------------------


def test_what_stays_in_fp32(two_ranks):
    """The mistake: states or sums in 16 bits, in which a small step changes nothing."""
    fp32, bf16 = "torch.float32", "torch.bfloat16"
    assert two_ranks.run(precision, parameter_dtype=torch.bfloat16) == {
        "weights at rest": fp32,
        "weights in a block": bf16,
        "norms in a block": bf16,
        "residual stream": bf16,
        "logits": bf16,
        "loss": fp32,
        "gradients as they are made": bf16,
        "gradients as they are summed": fp32,
        "gradients at rest": fp32,
        "states": fp32,
        "frequencies of RoPE": fp32,
    }
