import functools

import pytest
import torch

from benchmarks.family_predictions import small_model
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import Card, predict
from recipes_lib.workflows.out_of_memory_doctor.remedies import (
    BESIDE,
    Question,
    Remedies,
    Stack,
    arithmetic_peak,
    build_with,
    dry_peak,
)

GIB = 2**30
CARD = Card("pretended", (8, 0), 24 * GIB)


def question(model, *, rows=2, length=64, card=CARD, limit=0.0):
    return Question(model, rows, length, card, limit)


@functools.cache
def deep():
    """Of so many blocks that they are followed from few."""
    return model_of_shape("smollm2-135m", layers=12, dtype=torch.bfloat16, device="meta")


def asked(limit, *, model=None, **sizes):
    """The remedies, by arithmetic where it decides."""
    step = question(model or deep(), limit=limit, **sizes)
    return Remedies(step, spare_the_host=False, all_dry=False)


@pytest.fixture(autouse=True)
def kept_elsewhere(tmp_path_factory, monkeypatch):
    """A test must not find what a run before has kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize("names", [(), BESIDE[4], (*BESIDE[4], "LoRA, 16-bit base")], ids=" ".join)
def test_few_blocks_say_what_all_say(names):
    """The mistake: a moment of the deep model that the shallow ones do not have."""
    step = question(deep())
    build = build_with(step, Stack(names), layers=12)
    assert dry_peak(step, Stack(names)) == pytest.approx(
        predict(build, card=CARD, allocator=False).peak, rel=1e-4
    )


@pytest.mark.parametrize(
    ("names", "micro_batches"),
    [((), 1), (("micro-batches",), 4), (("checkpointing",), 1)],
)
def test_the_arithmetic_agrees_with_the_step(names, micro_batches):
    """The mistake: an order of remedies by numbers that belong to another step."""
    step = question(deep(), rows=4, length=512)
    stack = Stack(names, micro_batches)
    assert arithmetic_peak(step, stack) == pytest.approx(dry_peak(step, stack), rel=0.08)


def test_a_third_micro_batch_takes_what_the_second_took():
    """The mistake: two micro-batches in place of four, with half of the rows in each."""
    four = dry_peak(question(deep(), rows=4), Stack(("micro-batches",), 4))
    assert four == dry_peak(question(deep(), rows=2), Stack(("micro-batches",), 2))


def test_the_cheapest_that_fits_comes_first_and_ends_the_list():
    """The mistake: adapters where micro-batches are enough."""
    step = question(deep(), rows=8, length=512)
    limit = 1.03 * dry_peak(step, Stack(("micro-batches",), 8))
    rows = asked(limit, rows=8, length=512).rows()
    assert [row.fits for row in rows] == [False, True]
    assert not any("LoRA" in row.name for row in rows)
    assert not rows[-1].by_arithmetic, "what is advised is confirmed by the step"


def test_adapters_are_shown_beside_an_offload_that_fits():
    """The mistake: a strict descent, which hid LoRA below a row with a smaller peak."""
    rows = asked(0.35 * dry_peak(question(deep()), Stack())).rows()
    fitting = [row.name for row in rows if row.fits]
    assert any("optimizer offload" in name for name in fitting)
    assert any("LoRA" in name for name in fitting)
    offload = next(row for row in rows if "optimizer offload" in row.name)
    assert "of host memory" in offload.costs


def test_the_advised_length_fits_and_twice_of_it_does_not():
    """The mistake: "shorten the rows", without saying to what."""
    limit = 1.3 * dry_peak(question(deep(), length=256), Stack((*BESIDE[5], "QLoRA"), 2))
    tried = asked(limit, length=4096)
    stack, _ = tried.smallest()
    length = tried.longest_rows()
    assert dry_peak(question(deep(), length=length), stack) <= limit
    assert dry_peak(question(deep(), length=2 * length), stack) > limit


def test_a_mixture_of_experts_gets_adapters_on_attention():
    """The mistake: LoRA was lost in silence, because it does not reach the experts."""
    names = [row.name for row in asked(1.0, model=small_model("Mixtral")).rows()]
    assert any("LoRA, 16-bit base, on attention only" in name for name in names)


def test_what_a_recipe_refuses_is_a_reason():
    """The mistake: a row that is missing without a word; 4 bits do not reach the experts."""
    tried = asked(1.0, model=small_model("Mixtral"))
    tried.rows()
    assert "QLoRA" in tried.refused


def test_blocks_of_several_kinds_are_all_there():
    """The mistake: two blocks with a window stand for the third, which sees everything."""
    model = small_model("Gemma3Text")
    build = build_with(question(model), Stack(), layers=4)
    expected = predict(build, card=CARD, allocator=False).peak
    assert dry_peak(question(model), Stack()) == expected


def test_adapters_that_exist_are_in_the_prediction():
    """The mistake: a plain step for a model that has adapters, and a second pair of them."""
    peft = pytest.importorskip("peft")
    base = model_of_shape("smollm2-135m", layers=3, device="meta")
    full = dry_peak(question(base), Stack())
    adapters = peft.LoraConfig(target_modules="all-linear", r=8)
    model = peft.get_peft_model(base, adapters)
    assert dry_peak(question(model), Stack()) < 0.6 * full
    names = [row.name for row in asked(1.0, model=model).rows()]
    assert not any("LoRA, 16-bit" in name for name in names)


def test_a_model_keeps_its_configuration():
    """Asking how a shallow 16-bit copy would do must not change the model's configuration."""
    model = model_of_shape("tiny-llama", device="meta")
    before = model.config.to_dict()
    asked(1.0, model=model).rows()
    assert model.config.to_dict() == before
