"""The list by arithmetic, and the step itself that checks it."""

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import Card, predict
from recipes_lib.workflows.out_of_memory_doctor.predicted_steps import (
    _all_alike,
    build_with,
    dry_peak,
)
from recipes_lib.workflows.out_of_memory_doctor.remedies import (
    LORA,
    Question,
    Remedies,
    Remedy,
    in_order_of_advice,
)
from tests.small_models import small_model

CARD = Card("pretended", (8, 0), 24 * 2**30)
LEAN = ("loss in chunks", "checkpointing")
LONG = (*LEAN, "tiled MLP", "activation offload")


@pytest.fixture(autouse=True)
def kept_elsewhere(tmp_path, monkeypatch):
    """A test must not find what a run before has kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def tiny(**options):
    return model_of_shape("tiny-llama", device="meta", **options)


def question(model, *, rows=1, length=64, limit=1.0, **options):
    return Question(model, rows, length, CARD, limit, **options)


@pytest.mark.parametrize(("stack", "length"), [(LEAN, 64), ((*LONG, "QLoRA"), 8192)])
def test_few_blocks_say_what_all_say(stack, length):
    """The mistake: a moment of the deep model that the shallow ones do not have."""
    step = question(tiny(layers=10), length=length)
    expected = predict(build_with(step, stack, layers=10), card=CARD, allocator=False).peak
    assert dry_peak(step, stack) == pytest.approx(expected, rel=1e-4)


def test_blocks_of_several_kinds_are_all_there():
    """The mistake: two blocks with a window stand for the sixth, which sees everything."""
    with torch.device("meta"):
        gemma = small_model("Gemma3Text", head_dim=16, sliding_window=32, num_hidden_layers=26)
    assert not _all_alike(gemma)
    assert _all_alike(tiny(layers=10))


STACKS = [
    ("llama-3.2-1b", (*LEAN, "8-bit AdamW")),
    ("qwen3-8b", (*LEAN, "QLoRA")),
]
MORE = [
    ("llama-3.1-8b", ()),
    ("llama-3.1-8b", ("micro-batches of 1",)),
    ("llama-3.1-8b", (*LEAN, "optimizer offload")),
    ("llama-3.1-8b", (*LEAN, LORA)),
    ("llama-3.1-8b", ("micro-batches of 1", "checkpointing", LORA)),
    ("qwen3-8b", ()),
    ("qwen2.5-3b", (*LEAN, "step in backward")),
]


def compare(shape, stack, *, rel, **options):
    model = model_of_shape(shape, dtype=torch.bfloat16, device="meta")
    step = question(model, rows=2, length=2048, **options)
    assert Remedies(step).peak(stack, 2048) == pytest.approx(dry_peak(step, stack), rel=rel)


@pytest.mark.parametrize(("shape", "stack"), STACKS)
def test_the_arithmetic_agrees_with_the_step(shape, stack):
    """The mistake: an order of remedies by numbers that belong to another step."""
    compare(shape, stack, rel=0.05)


@pytest.mark.survey
@pytest.mark.parametrize(("shape", "stack"), MORE)
def test_the_arithmetic_agrees_with_more_steps(shape, stack):
    compare(shape, stack, rel=0.05)


@pytest.mark.survey
@pytest.mark.parametrize(
    ("stack", "rel"),
    [
        ((*LONG, "QLoRA"), 0.15),
        (("checkpointing", "FSDP"), 0.15),
        (("checkpointing", "FSDP", LORA), 0.15),
        (("checkpointing", "FSDP", "QLoRA"), 0.25),  # its table is never whole
    ],
)
def test_the_arithmetic_is_about_right_for_long_rows_and_shards(stack, rel):
    """The mistake: weights that are whole on each GPU, or nothing of what is gathered."""
    compare("llama-3.2-1b", stack, rel=rel, gpus=2)


def test_the_cheapest_that_fits_comes_first_and_ends_the_list():
    """The mistake: adapters where micro-batches are enough."""
    sizes = {"rows": 4, "length": 512}
    model = tiny(dtype=torch.bfloat16)
    limit = 1.01 * Remedies(question(model, **sizes)).peak(("micro-batches of 1",), 512)
    rows = Remedies(question(model, limit=limit, **sizes)).rows
    assert [row.fits for row in rows] == [False, True]
    assert rows[-1].stack in [("loss in chunks",), ("micro-batches of 1",)]


def test_an_offload_is_no_first_advice_where_the_host_is_too_small():
    """The mistakes: host memory that is not there as the advice; and a strict descent of peaks,
    which hides the adapters below an offload that fits."""
    model = model_of_shape("llama-3.2-1b", dtype=torch.bfloat16, device="meta")
    limit = 1.2 * Remedies(question(model)).peak((*LEAN, "optimizer offload"), 64)
    for host, first in [(2**40, "optimizer offload"), (2**10, "LoRA")]:
        rows = Remedies(question(model, limit=limit, host=host)).rows
        assert first in in_order_of_advice(rows)[0].name
        offload = next(row for row in rows if "optimizer offload" in row.name)
        assert offload.fits
        assert ("fits the card, needs" in offload.outcome) == (host == 2**10)
        assert any("LoRA" in row.name for row in rows if row.fits)
    alone = [Remedy("as it is", fits=False), Remedy("offload", fits=True, host_needed=1)]
    assert in_order_of_advice(alone) == [alone[1]]


def test_the_advised_length_is_the_longest_that_fits():
    """The mistake: "shorten the rows", and no length."""
    model = tiny(dtype=torch.bfloat16)
    limit = 1.3 * Remedies(question(model, length=256)).peak((*LONG, "QLoRA"), 256)
    tried = Remedies(question(model, length=4096, limit=limit))
    length = tried.longest_rows()
    assert length >= 256
    stack = tried.smallest.stack
    assert tried.peak(stack, length) <= limit < tried.peak(stack, length + 8)


def test_adapters_of_a_mixture_of_experts_are_there():
    """The mistake: LoRA lost in silence, because it does not reach the experts."""
    model = model_of_shape("qwen3-30b-a3b", dtype=torch.bfloat16, device="meta")
    rows = Remedies(question(model, length=1024, limit=76 * 2**30)).rows
    assert any(LORA in row.stack for row in rows if row.fits)
    assert not any("tiled MLP" in row.stack for row in rows)
    small = small_model("Mixtral", num_local_experts=4, num_key_value_heads=2)
    assert dry_peak(question(small, length=16), ("checkpointing", LORA)) > 0
