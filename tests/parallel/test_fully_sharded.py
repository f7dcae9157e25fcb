import copy

import pytest
import torch
import transformers
from torch import distributed
from torch.distributed.fsdp import FSDPModule

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.predict.budget import Shape, compose
from recipes_lib.core.predict.dry_ranks import rank_peak
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.core.ranks import rank, world_size
from recipes_lib.core.ranks.meshes import mesh_of
from recipes_lib.core.ranks.rank_bytes import rank_bytes
from recipes_lib.core.ranks.rank_step import rank_step
from recipes_lib.core.ranks.traffic import count_traffic
from recipes_lib.memory.activation_checkpointing import estimate_activation_checkpointing
from recipes_lib.parallel.fully_sharded import (
    apply_fully_sharded,
    estimate_fully_sharded,
    linear_of_shards,
    load_from_first_rank,
    predicted_sent_bytes,
)
from recipes_lib.parallel.fully_sharded.compile import ORDERS, seconds_by_order
from recipes_lib.parallel.fully_sharded.precision import dtypes_of_step
from recipes_lib.parallel.fully_sharded.strategies import STRATEGIES, measured_strategy
from recipes_lib.training.compiled_blocks import apply_compiled_blocks
from tests.parallel.parity import (
    SIZES,
    TOLERANCE,
    Run,
    adamw,
    global_batch,
    largest_difference,
    own_batches,
    sgd,
    tiny_model,
    train_alone,
    whole_parameters,
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
    losses = []
    for step in range(STEPS):
        batches = own_batches(step, micro_batches)
        losses.append(rank_step(model, optimizer, batches, max_norm=1.0, reduce_each=reduce_each))
    return Run(losses, whole_parameters(model))


def several(runs):
    """Several calls of `train` in one visit of the ranks."""
    return {name: train(**options) for name, options in runs.items()}


def idea_against_fsdp():
    """A linear layer of shards, by hand and by fully_shard: output and gradient of a part."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 8, bias=False)
    torch.manual_seed(1 + rank())
    x = torch.randn(3, 6)
    rows = 8 // world_size()
    shard = linear.weight.detach()[rank() * rows : (rank() + 1) * rows].clone().requires_grad_()
    by_hand = linear_of_shards(x, shard)
    by_hand.square().sum().backward()
    fully_shard(linear)
    expected = linear(x)
    expected.square().sum().backward()
    part = linear.weight.grad.to_local()
    return (by_hand - expected).abs().max().item(), (shard.grad - part).abs().max().item()


def bytes_and_traffic(**options):
    """What a rank holds with gradients and states, and what a step sends; formulas beside them."""
    copies = options.pop("copies", 1)
    plain = tiny_model()
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    predicted = predicted_sent_bytes(plain, ranks=world_size(), copies=copies, **options)
    if copies > 1:
        options["mesh"] = mesh_of(copies=copies, parts=world_size() // copies)
    model = apply_fully_sharded(plain, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    [batch] = own_batches(0)
    with count_traffic() as traffic:
        model(**batch, use_cache=False).loss.backward()
    optimizer.step()
    held = rank_bytes(model, optimizer)
    at_rest = held.parameters + held.gradients + held.states
    return {
        "at rest": at_rest,
        "16P/N": 16 * parameters * copies / world_size(),
        "sent": traffic.sent,
        "predicted": predicted,
        "calls": dict(traffic.calls),
    }


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


def from_the_meta_device():
    """Only rank 0 has weights; the others get their parts. Compared by one forward."""
    found = {}
    for tied in (False, True):
        whole = tiny_model(tie_word_embeddings=tied) if rank() == 0 else None
        model = apply_fully_sharded(model_of_no_weights(tie_word_embeddings=tied))
        load_from_first_rank(model, whole)
        ids = global_batch(0)["input_ids"]
        got = model(input_ids=ids, use_cache=False).logits
        expected = tiny_model(tie_word_embeddings=tied)(input_ids=ids, use_cache=False).logits
        found[tied] = (got - expected).abs().max().item()
    return found


def loads_that_do_not_fit():
    """What every rank is told, seen on rank 0."""
    deeper = apply_fully_sharded(model_of_no_weights(num_hidden_layers=5))
    told = []
    for model, whole in [(deeper, tiny_model()), (deeper, None), (tiny_model(), tiny_model())]:
        with pytest.raises(ValueError) as caught:
            load_from_first_rank(model, whole if rank() == 0 else None)
        told.append(str(caught.value))
    return told


def model_of_no_weights(**changes):
    config = transformers.LlamaConfig(**SIZES | changes)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).train()


def refused(problem):
    """What apply_fully_sharded says to a mistake, and whether the model is still as it was."""
    model = tiny_model(seed=rank() if problem == "other weights" else 0)
    options = {}
    if problem == "other options":
        options["prefetch"] = 1 + rank()
    if problem == "fp16":
        options["parameter_dtype"] = torch.float16
    if problem == "fp16 on one rank":
        options["parameter_dtype"] = torch.float16 if rank() == 1 else None
    if problem == "no model on one rank" and rank() == 1:
        model = torch.nn.Linear(2, 2)
    if problem == "mesh":
        options["mesh"] = mesh_of(a=1, b=1, c=world_size())
    if problem == "dtypes":
        model.model.layers[1].mlp.up_proj.bfloat16()
    if problem == "twice":
        apply_fully_sharded(model)
        sharded_before = True
    else:
        sharded_before = False
    try:
        apply_fully_sharded(model, **options)
    except ValueError as error:
        unchanged = isinstance(model, FSDPModule) == sharded_before
        return str(error) if unchanged else "changed before it was refused"
    return "not refused"


def orders():
    """Both orders of compiling and sharding, without the compiler of kernels: it takes long."""
    [batch] = own_batches(0)
    return seconds_by_order(tiny_model, batch, rounds=2, backend="eager")


def compiled_afterwards():
    """The order that is slower: sharded first, then compiled. By our recipe, and by hand."""
    model = apply_fully_sharded(tiny_model())
    with pytest.raises(ValueError) as by_recipe:
        apply_compiled_blocks(model)
    for block in model.model.layers:
        block.compile(backend="eager")
    [batch] = own_batches(0)
    try:
        model(**batch, use_cache=False)
    except ValueError as error:
        return str(by_recipe.value), str(error)
    return str(by_recipe.value), "not refused"


# --- the same training ----------------------------------------------------------------------------

RUNS = {
    "zero 3": {},
    "adamw": {"make": "adamw"},
    "two micro-batches": {"micro_batches": 2},
    "averaged in each": {"micro_batches": 2, "reduce_each": True},
    "kept whole": {"reshard_after_forward": False},
    "offload": {"offload": True},
    "prefetch": {"prefetch": 2},
    "tied": {"tied": True},
}


def test_two_ranks_train_as_one_process(two_ranks):
    """Every option, with clipping, and rows that count unequal numbers of tokens."""
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
    """HSDP: parts are gathered inside of a copy, and gradients averaged over both."""
    run = four_ranks.run(train, copies=2)
    assert largest_difference(run, train_alone(steps=STEPS)) < TOLERANCE


def test_bf16_stays_near(two_ranks):
    run = two_ranks.run(train, parameter_dtype=torch.bfloat16)
    reference = train_alone(steps=STEPS)
    assert 1e-6 < largest_difference(run, reference) < 0.02


def test_the_idea_is_what_fully_shard_does(two_ranks):
    output, gradient = two_ranks.run(idea_against_fsdp)
    assert output < 1e-6
    assert gradient < 1e-6


# --- bytes and traffic ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"reshard_after_forward": False}, {"parameter_dtype": torch.bfloat16}]
)
def test_a_rank_holds_its_part_and_sends_what_the_formula_says(two_ranks, options):
    measured = two_ranks.run(bytes_and_traffic, **options)
    assert measured["at rest"] == pytest.approx(measured["16P/N"], rel=0.001)
    assert measured["sent"] == pytest.approx(measured["predicted"], rel=0.001)


def test_gathers_are_those_of_the_groups(two_ranks):
    """Four blocks twice, embedding, output layer and rest once: not one more."""
    calls = two_ranks.run(bytes_and_traffic)["calls"]
    assert calls["all_gather"] == 2 * 4 + 3
    assert calls["reduce_scatter"] == 4 + 3


def test_without_averaging_each_rank_keeps_whole_gradients(two_ranks):
    whole = sum(tensor_bytes(parameter) for parameter in tiny_model().parameters())
    assert two_ranks.run(accumulated_bytes, reduce_each=False) >= whole
    assert two_ranks.run(accumulated_bytes, reduce_each=True) < 0.8 * whole


def test_the_strategies_as_they_are(four_ranks):
    """The course's table, in fractions of the whole model."""
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
    # Only DDP has a forward that sends no weights; it sends buffers.
    assert rows["no shard"].sent_in_forward < whole / 1000
    assert rows["hybrid"].sent_in_forward > whole / 3
    assert rows["full"].sent > rows["gradients and states"].sent


# --- the budget -----------------------------------------------------------------------------------


def dry_peak(name, layers, ranks, *, rows=1, seq=256, mesh=None, checkpoint=False, **options):
    def build(device_mesh):
        model = model_of_shape(name, layers=layers, device="cpu")
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        apply_fully_sharded(model, mesh=device_mesh, **options)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.zeros(rows, seq, dtype=torch.long)

        def step():
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return rank_peak(build, ranks=ranks, mesh=mesh)


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.bfloat16), (64, None)])
def test_estimate_against_a_dry_run(ranks, dtype):
    peak = dry_peak("llama-3.1-8b", 2, ranks, parameter_dtype=dtype).total
    predicted = estimate("llama-3.1-8b", 2, ranks, parameter_dtype=dtype).peak
    assert predicted == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-3.2-1b", {}),
        ("llama-3.1-8b", {"reshard_after_forward": False}),
        ("llama-3.1-8b", {"prefetch": 2}),
        ("llama-3.1-8b", {"checkpoint": True}),
    ],
)
def test_estimate_of_options_against_a_dry_run(name, options):
    peak = dry_peak(name, 3, 8, **options).total
    assert estimate(name, 3, 8, **options).peak == pytest.approx(peak, rel=0.03)


def test_estimate_of_offload_and_of_copies():
    on_device = dry_peak("llama-3.1-8b", 2, 8, offload=True).beside_shards
    assert estimate("llama-3.1-8b", 2, 8, offload=True).peak == pytest.approx(on_device, rel=0.03)
    peak = dry_peak("llama-3.1-8b", 2, 8, mesh={"copies": 2, "parts": 4}).total
    assert estimate("llama-3.1-8b", 2, 8, copies=2).peak == pytest.approx(peak, rel=0.03)


def estimate(name, layers, ranks, *, checkpoint=False, seq=256, **options):
    model = model_of_shape(name, layers=layers, device="meta")
    shape = Shape(batch=ranks, seq=seq, ranks=ranks)
    recipes = [(estimate_fully_sharded, options)]
    if checkpoint:
        recipes.append((estimate_activation_checkpointing, {}))
    return compose(budget_of(model, shape), model, shape, recipes)


def test_estimate_refuses_what_it_cannot_know():
    model = model_of_shape("tiny-mistral", device="cpu")
    shape = Shape(batch=4, seq=8, ranks=4)
    budget = budget_of(model, shape)
    with pytest.raises(ValueError, match="give a divisor of the 4 ranks"):
        estimate_fully_sharded(budget, model, shape, copies=3)
    changed = estimate_activation_checkpointing(budget, model, shape)
    with pytest.raises(ValueError, match="give a model in"):
        estimate_fully_sharded(changed, model, shape, parameter_dtype=torch.bfloat16)


# --- precision, loading, refusals -----------------------------------------------------------------


def test_what_stays_in_fp32(two_ranks):
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


def test_weights_from_one_rank(two_ranks):
    """Frequencies of RoPE too, which are in no state dict: after `to_empty` they are garbage."""
    for tied, difference in two_ranks.run(from_the_meta_device).items():
        assert difference < 1e-6, tied


def test_weights_that_do_not_fit_are_refused(two_ranks):
    """The mistake: what has no weight in the whole model keeps what its memory was before."""
    layers, nothing, not_sharded = two_ranks.run(loads_that_do_not_fit, timeout=60)
    assert "model.layers.4" in layers and "build both from one configuration" in layers
    assert "whole=None on rank 0" in nothing
    assert "this model is not sharded" in not_sharded


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ("other weights", "give the same on all ranks"),
        ("other options", "prefetch: rank 0 gives 1, rank 1 gives 2"),
        ("fp16", "choose one of"),
        ("fp16 on one rank", "parameter_dtype: rank 0 gives None, rank 1 gives torch.float16"),
        ("no model on one rank", "rank 1 gives Linear of 6 parameters"),
        ("mesh", "3 dimensions"),
        ("dtypes", "give all that train one dtype"),
        ("twice", "sharded already"),
    ],
)
def test_mistakes_are_refused_on_every_rank(two_ranks, problem, words):
    assert words in two_ranks.run(refused, problem=problem, timeout=30)


def test_compiling_after_sharding_is_refused(two_ranks):
    by_recipe, by_hand = two_ranks.run(compiled_afterwards)
    assert "sharded already: compile the blocks first" in by_recipe
    assert "compile_blocks=True" in by_hand


def test_both_orders_of_compiling_come_to_the_same_loss(two_ranks):
    """`seconds_by_order` compares the losses itself. Times of so small a model say nothing."""
    assert set(two_ranks.run(orders, timeout=120)) == set(ORDERS)


def test_without_ranks_it_says_so():
    with pytest.raises(ValueError, match="no process group"):
        apply_fully_sharded(copy.deepcopy(tiny_model()))
    assert not distributed.is_initialized()
