import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import Card, predict
from recipes_lib.workflows.out_of_memory_doctor import remedies
from recipes_lib.workflows.out_of_memory_doctor.remedies import (
    BESIDE,
    Question,
    Remedies,
    Remedy,
    Stack,
    _repetition,
    arithmetic_peak,
    build_with,
    dry_peak,
    first_that_fits,
)
from tests.small_models import small_model

CARD = Card("pretended", (8, 0), 24 * 2**30)
ALL_BUT_MICRO_BATCHES = BESIDE[4]


@pytest.fixture(autouse=True)
def kept_elsewhere(tmp_path, monkeypatch):
    """A test must not find what a run before has kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def tiny(**options):
    return model_of_shape("tiny-llama", device="meta", **options)


def question(model, *, rows=1, length=64, limit=1.0, **options):
    return Question(model, rows, length, CARD, limit, **options)


def test_few_blocks_say_what_all_say():
    """The mistake: a moment of the deep model that the shallow ones do not have."""
    step = question(tiny(layers=10))
    stack = Stack(("loss in chunks", "checkpointing"))
    build = build_with(step, stack, layers=10)
    expected = predict(build, card=CARD, allocator=False).peak
    assert dry_peak(step, stack) == pytest.approx(expected, rel=1e-4)


def test_blocks_of_several_kinds_are_all_there():
    """The mistake: two blocks with a window stand for the sixth, which sees everything."""
    with torch.device("meta"):
        model = small_model("Gemma3Text", head_dim=16, sliding_window=32, num_hidden_layers=26)
    assert _repetition(model) == (8, 6)  # 8, 14, 20, 26


@pytest.mark.parametrize(("names", "micro_batches"), [((), 1), (("micro-batches",), 4)])
def test_the_arithmetic_agrees_with_the_step(names, micro_batches):
    """The mistake: an order of remedies by numbers that belong to another step."""
    step = question(tiny(dtype=torch.bfloat16), rows=4, length=512)
    stack = Stack(names, micro_batches)
    assert arithmetic_peak(step, stack) == pytest.approx(dry_peak(step, stack), rel=0.05)


def test_a_third_micro_batch_takes_what_the_second_took():
    """The mistake: two micro-batches in place of four, with half of the rows in each."""
    four = dry_peak(question(tiny(), rows=4), Stack(("micro-batches",), 4))
    assert four == dry_peak(question(tiny(), rows=2), Stack(("micro-batches",), 2))


def test_the_cheapest_that_fits_comes_first_and_ends_the_list():
    """The mistake: adapters where micro-batches are enough, or advice that no step confirms."""
    sizes = {"rows": 4, "length": 512}
    model = tiny(dtype=torch.bfloat16)
    limit = 1.1 * dry_peak(question(model, **sizes), Stack(("micro-batches",), 4))
    rows = Remedies(question(model, limit=limit, **sizes)).rows()
    assert [row.fits for row in rows] == [False, True]
    assert "LoRA" not in rows[-1].name
    assert not rows[-1].by_arithmetic


def test_an_offload_is_no_first_fit_where_the_host_is_too_small(monkeypatch):
    """The mistakes: host memory that is not there as the advice; and a strict descent of peaks,
    which hides the adapters below an offload that fits."""
    monkeypatch.setattr(remedies, "RANK", 1)  # of 16 adapters are as large as this model
    model = tiny()
    before = model.config.to_dict()
    limit = 1.2 * dry_peak(question(model), Stack((*ALL_BUT_MICRO_BATCHES, "optimizer offload")))
    for host, first in [(2**40, "optimizer offload"), (2**10, "LoRA")]:
        rows = Remedies(question(model, limit=limit, host=host)).rows()
        assert first in first_that_fits(rows).name
        offload = next(row for row in rows if "optimizer offload" in row.name)
        assert offload.fits
        assert ("fits the card, needs" in offload.outcome) == (host == 2**10)
        assert any("LoRA" in row.name for row in rows if row.fits)
    assert model.config.to_dict() == before, "a shallow copy in 16 bits has changed the model's"
    alone = [Remedy("as it is", fits=False), Remedy("offload", fits=True, host_needed=1)]
    assert first_that_fits(alone) is alone[1]


def test_the_advised_length_fits_and_twice_of_it_does_not():
    """The mistake: a length by arithmetic, which is wrong by a fifth with adapters."""
    model = tiny(dtype=torch.bfloat16)
    names = (*ALL_BUT_MICRO_BATCHES, "QLoRA", "tiled MLP")
    limit = 1.3 * dry_peak(question(model, length=256), Stack(names))
    tried = Remedies(question(model, length=1024, limit=limit, recipes=("QLoRA",)))
    stack, _ = tried.smallest()
    length = tried.longest_rows()
    assert length > 256
    assert dry_peak(question(model, length=length), stack) <= limit
    assert dry_peak(question(model, length=2 * length), stack) > limit


MAMBA = {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 32}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 2}), ("Mamba2", MAMBA)],
)
def test_a_model_to_which_not_all_recipes_apply(family, sizes):
    """The mistakes: no advice at all; a row that is missing without a word; LoRA lost in silence,
    because it does not reach the experts."""
    tried = Remedies(question(small_model(family, **sizes), length=16))
    names = [row.name for row in tried.rows()]
    assert "QLoRA" in tried.refused
    assert any("8-bit AdamW" in name for name in names)
    on_attention = any("LoRA, 16-bit base, on attention only" in name for name in names)
    assert on_attention == (family == "Mixtral")


def test_adapters_that_exist_are_in_the_prediction():
    """The mistake: a plain step for a model that has adapters, and a second pair of them."""
    peft = pytest.importorskip("peft")
    full = dry_peak(question(tiny()), Stack())
    adapters = peft.LoraConfig(target_modules="all-linear", r=1)
    model = peft.get_peft_model(tiny(), adapters)
    tried = Remedies(question(model))
    rows = tried.rows()
    assert rows[0].peak < 0.6 * full
    assert not any("LoRA, 16-bit" in row.name for row in rows)
