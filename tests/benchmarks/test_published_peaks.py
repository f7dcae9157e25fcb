"""Published peaks beside ours: the settings of their steps, and what is recorded of them."""

from dataclasses import replace

import pytest
import torch

from benchmarks import published_peaks
from benchmarks.published_peaks import LOSSES, Published, build_of, model_as_published, rows
from benchmarks.record import newest
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import CARDS, predict

SMALL = Published(
    name="small",
    library="",
    source="",
    card="L4",
    gib=1.0,
    published="allocated",
    model="tiny-llama",
    rows=2,
    tokens=64,
)


def requested(**setting):
    return predict(build_of(replace(SMALL, **setting)), card=CARDS["L4"]).peak


def test_the_loss_of_a_shifted_copy_is_that_of_today():
    """The mistake: other targets, or tokens that count twice. Its bytes alone are others."""
    model = model_of_shape("tiny-llama", device="cpu")
    ids = torch.randint(0, 128, (2, 16))
    mask = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]
    losses = [LOSSES[name](model, ids, mask)[0].item() for name in ("plain", "shifted copy")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_every_setting_changes_the_bytes():
    """The mistake: a field of the file that the step does not read."""
    plain = requested()
    for setting in (
        {"loss": "in chunks"},
        {"keeps_gradients": True},
        {"optimizer": "paged 8-bit"},
        {"attention": "sdpa with a mask"},
        {"checkpointing": True},
    ):
        assert requested(**setting) != plain, setting


def test_casts_of_a_row():
    """The mistake: an embedding that stays in 16 bits, or adapters that do not."""
    lora = replace(SMALL, adapters="LoRA", rank=2, targets=["q"])
    for row, of_table, of_adapter in (
        (replace(lora, kbit_casts=True), torch.float32, torch.float32),
        (replace(lora, adapters_in_16_bits=True), torch.bfloat16, torch.bfloat16),
    ):
        model = model_as_published(row)
        trains = next(p for p in model.parameters() if p.requires_grad)
        assert model.get_input_embeddings().weight.dtype == of_table
        assert trains.dtype == of_adapter


def test_every_row_is_recorded():
    """The mistake: a row that was added or changed, and no prediction of it."""
    found = newest("published_peaks").rows
    assert {row.name: round(row.gib * 2**30) for row in rows()} == {
        name: int(row["published_bytes"]) for name, row in found.items()
    }, f"run `python -m {published_peaks.__name__}`"
