"""The terms of a budget, and the protocol by which estimates change them."""

import importlib
import inspect
import itertools
import pkgutil

import pytest

import recipes_lib
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict.budget import Budget, Order, Shape, compose, estimate
from recipes_lib.core.predict.plain_step import budget_of, head_trains
from recipes_lib.fine_tuning.lora import apply_lora, estimate_lora
from recipes_lib.memory.activation_checkpointing import estimate_activation_checkpointing
from recipes_lib.memory.chunked_cross_entropy import estimate_chunked_cross_entropy
from recipes_lib.precision.eight_bit_adam import estimate_eight_bit_adam, predicted_state_bytes
from recipes_lib.training.gradient_accumulation import estimate_gradient_accumulation

SHAPE = Shape(batch=4, seq=32)


def budget(**terms):
    """Numbers small enough to add in the head."""
    plain = {
        "weights": 1,
        "states": 2,
        "gradients": 3,
        "carried": 0,
        "activations": 5,
        "loss": 6,
        "one_block": 4,
        "block_gradients": 1,
        "last_gradients": 1,
        "embedding_gradient": 7,
    }
    return Budget(**plain | terms)


# --- the terms ------------------------------------------------------------------------------------


def test_the_peak_is_the_largest_moment():
    plan = budget()
    assert plan.peak_moment() == "backward begins"
    assert plan.peak == 1 + 2 + 5 + 6
    plan = plan.change(activations=0, loss=0)
    assert plan.peak_moment() == "the last gradient arrives"
    assert plan.peak == 1 + 2 + 3 + 7
    plan = plan.change(one_block=20)
    assert plan.peak_moment() == "backward enters the first block"
    assert plan.peak == 1 + 2 + (3 - 1) + 20 + 1


def test_the_loss_or_the_gradients_inside_a_block_join_the_activations():
    """Not both: the loss is free when backward reaches a block."""
    plan = budget(one_block=0)
    assert plan.change(block_gradients=1).peak == 1 + 2 + 5 + 6
    assert plan.change(block_gradients=9).peak == 1 + 2 + 5 + 9


@pytest.mark.parametrize("block_gradients", [1, 9])  # the loss of 6 joins the activations, or they
def test_a_peak_inside_a_block_is_the_larger_moment(block_gradients):
    """The loss is free by then: added to it, the moment would be too large."""
    plan = budget(one_block=0, block_gradients=block_gradients)
    added = max(6, block_gradients)
    earlier = plan.with_moment_in_a_block(as_backward_begins=30, in_a_block=30)
    assert earlier.peak == 1 + 2 + 30 + added
    later = plan.with_moment_in_a_block(as_backward_begins=30, in_a_block=50)
    assert later.peak == 1 + 2 + 50


def test_the_parts_of_the_peak_add_up_to_it():
    plan = budget(carried=2)
    assert sum(plan.at_peak().values()) == plan.peak
    assert plan.at_peak()["gradients"] == 2


def test_every_part_of_a_moment_has_its_own_name():
    """The mistake: copies of the embedding shown as gradients, or gradients in a block as loss."""
    moments = budget(carried=2, block_gradients=9).moments()
    names = {"gradients", "embedding copies", "activations", "block gradients", "loss"}
    assert all(set(parts) == names for parts in moments.values())
    alive = [{name: size for name, size in parts.items() if size} for parts in moments.values()]
    assert alive == [
        {"gradients": 2, "activations": 5, "block gradients": 9},  # the loss of 6 is free by then
        {"gradients": 2, "activations": 4, "block gradients": 9},
        {"gradients": 3, "embedding copies": 7},
    ]
    assert budget().moments()["backward begins"]["loss"] == 6


# --- the shape ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts", [{"micro_batches": 3}, {"ranks": 16}, {"micro_batches": 4, "ranks": 4}]
)
def test_a_batch_that_does_not_split_evenly(parts):
    """Rounding down would lose rows without a word."""
    with pytest.raises(ValueError, match="batch=8: give a multiple of micro_batches x ranks"):
        Shape(batch=8, seq=16, **parts)


def test_rows_and_tokens_are_those_of_a_micro_batch_on_a_rank():
    shape = Shape(batch=24, seq=10, micro_batches=3, ranks=2)
    assert (shape.rows, shape.tokens) == (4, 40)
    assert shape.whole() == Shape(batch=24, seq=10, ranks=2)
    assert shape.micro() == Shape(batch=4, seq=10)


def test_a_rank_has_the_whole_model_and_its_part_of_the_rows():
    """The mistake: activations of all ranks, or weights of one of them."""
    model = model_of_shape("tiny-llama", layers=4, device="meta")
    recipes = [(estimate_chunked_cross_entropy, {"chunk_size": 16})]
    recipes += [(estimate_activation_checkpointing, {})]
    alone = Shape(batch=2, seq=64)
    of_two = Shape(batch=4, seq=64, ranks=2)
    expected = compose(budget_of(model, alone), model, alone, recipes)
    got = compose(budget_of(model, of_two), model, of_two, recipes)
    assert got.terms() == expected.terms() and got.shape == of_two


# --- the protocol ---------------------------------------------------------------------------------


def recorder(order, calls):
    """An estimate that does nothing but to note its turn."""

    @estimate(order)
    def note(budget, model, shape, **options):
        calls.append((order, options))
        return budget

    return note


def test_compose_keeps_the_order_whatever_is_given():
    """All orders of the first four, and options that stay with their estimate."""
    orders = list(Order)[:4]
    for given in itertools.permutations(orders):
        calls = []
        recipes = [(recorder(order, calls), {"number": int(order)}) for order in given]
        composed = compose(budget(), None, SHAPE, recipes)
        assert calls == [(order, {"number": int(order)}) for order in orders]
        assert [done.order for done in composed.applied] == orders


def test_real_recipes_composed_in_any_order():
    model = model_of_shape("tiny-llama", layers=4, device="meta")
    shape = Shape(batch=8, seq=64, micro_batches=4)
    recipes = [
        (estimate_gradient_accumulation, {}),
        (estimate_lora, {"rank": 4}),
        (estimate_chunked_cross_entropy, {"chunk_size": 16}),
        (estimate_activation_checkpointing, {}),
    ]
    by_hand = budget_of(model, shape)
    for recipe, options in recipes:
        by_hand = recipe(by_hand, model, shape, **options)
    for given in (recipes[::-1], recipes[2:] + recipes[:2]):
        assert compose(budget_of(model, shape), model, shape, given) == by_hand


@pytest.mark.parametrize("late", [Order.BATCH, Order.LOSS])
def test_a_wrong_order_raises(late):
    """It would give a wrong number: a checkpoint of the precision that comes later."""
    checkpointed = recorder(Order.CHECKPOINTS, [])(budget(), None, SHAPE)
    with pytest.raises(ValueError, match=r"note has to come before note.*compose"):
        recorder(late, [])(checkpointed, None, SHAPE)


@pytest.mark.parametrize(
    "other", [Shape(batch=4, seq=64), Shape(batch=8, seq=32), Shape(4, 32, ranks=2)]
)
def test_a_shape_of_other_tokens_is_refused(other):
    """Its activations would be those of one shape, its loss those of another."""
    model = model_of_shape("tiny-llama", device="meta")
    with pytest.raises(ValueError, match="give both the same shape"):
        estimate_chunked_cross_entropy(budget_of(model, SHAPE), model, other)


def test_micro_batches_that_nobody_has_split_are_refused():
    """The budget is still that of the whole batch, and the estimate would see a part of it."""
    model = model_of_shape("tiny-llama", device="meta")
    split = Shape(batch=4, seq=32, micro_batches=2)
    plan = budget_of(model, split)
    with pytest.raises(ValueError, match="apply estimate_gradient_accumulation first"):
        estimate_lora(plan, model, split)
    plan = estimate_gradient_accumulation(plan, model, split)
    assert estimate_lora(plan, model, split).shape == split


# --- which weights train --------------------------------------------------------------------------

# What has no default.
OPTIONS = {
    "estimate_context_parallel": {"ranks": 2},
    "estimate_pipeline_parallel": {"ranks": 2, "micro_batches": 2},
    "estimate_tensor_parallel": {"ranks": 2},
    "estimate_zero": {"stage": 3},
    "estimate_completion_only_loss": {"targets": 10},
    "estimate_nested_checkpointing": {"group": 2},
    "estimate_pure_bf16": {"rounding": "stochastic"},
}


def all_estimates():
    """Every estimate of the package, found by its mark."""
    found = {}
    for module in pkgutil.walk_packages(recipes_lib.__path__, "recipes_lib."):
        # The command line imports what it needs when it runs.
        if module.name.startswith(("recipes_lib.cli", "recipes_lib.__main__")):
            continue
        members = inspect.getmembers(importlib.import_module(module.name), inspect.isfunction)
        for name, function in members:
            if isinstance(getattr(function, "order", None), Order):
                found[name] = function
    return found


ESTIMATES = all_estimates()
AFTER_ADAPTERS = [name for name, each in ESTIMATES.items() if each.order > Order.ADAPTERS]


def test_every_estimate_is_marked():
    """A function that is called estimate_… has a place in the order, and the other way round."""
    assert len(AFTER_ADAPTERS) >= 10
    assert all(name.startswith("estimate_") for name in ESTIMATES)


@pytest.fixture(scope="module")
def base():
    return model_of_shape("tiny-llama", layers=4, device="cpu")


@pytest.fixture(scope="module")
def adapted():
    return apply_lora(model_of_shape("tiny-llama", layers=4, device="cpu"), rank=4)


@pytest.mark.parametrize("name", AFTER_ADAPTERS)
def test_on_the_base_as_on_the_adapted_model(name, base, adapted):
    """After estimate_lora the model at hand still has no adapters, and all of its weights train.

    An estimate that looks at the model alone counts gradients that will not exist, such as that of
    the output layer in a chunked loss. It has to give what it gives for the adapted model, or to
    ask for that one.
    """
    plan = estimate_lora(budget_of(base, SHAPE), base, SHAPE, rank=4)
    options = OPTIONS.get(name, {})
    try:
        got = ESTIMATES[name](plan, base, SHAPE, **options)
    except ValueError as refusal:
        wants_adapters = "give the model that apply_lora or apply_qlora returned" in str(refusal)
        wants_experts = "has no experts" in str(refusal)
        assert wants_adapters or wants_experts
        return
    expected = ESTIMATES[name](plan, adapted, SHAPE, **options)
    # Tiles take a bound for the gradients of the adapters in an MLP: a little more than they are.
    assert got.terms() == pytest.approx(expected.terms(), rel=0.05)


def test_a_chunked_loss_after_lora_sees_a_frozen_head():
    """With a large vocabulary the gradient of the output layer's weight is most of the loss."""
    base = model_of_shape("smollm2-135m", layers=1, device="meta")
    plan = budget_of(base, SHAPE)
    assert head_trains(plan, base)
    full = estimate_chunked_cross_entropy(plan, base, SHAPE, chunk_size=8)
    plan = estimate_lora(plan, base, SHAPE, rank=4)
    assert not head_trains(plan, base)
    chunked = estimate_chunked_cross_entropy(plan, base, SHAPE, chunk_size=8)
    assert full.loss > 4 * 49152 * 576 > 10 * chunked.loss


def test_states_of_adapters_that_are_not_there_yet(base, adapted):
    """Of the base all weights train: 8-bit states of all of them would be a wrong number."""
    plan = estimate_lora(budget_of(base, SHAPE), base, SHAPE, rank=4)
    with pytest.raises(ValueError, match="LlamaForCausalLM has none"):
        estimate_eight_bit_adam(plan, base, SHAPE)
    states = estimate_eight_bit_adam(plan, adapted, SHAPE).states
    assert states == predicted_state_bytes(adapted)
