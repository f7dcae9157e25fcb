"""What the doctor says of an error and of a model."""

from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import Card
from recipes_lib.workflows.out_of_memory_doctor import _where_nothing_fits, diagnose
from recipes_lib.workflows.out_of_memory_doctor.remedies import RECIPES
from tests.workflows.test_out_of_memory_doctor_message import (
    FORMS,
    GRAPHS_AND_CAP,
    KERNEL_LOG,
    MPS,
    TORCH_1,
    TORCH_2_0,
    TORCH_2_6,
)

GIB = 2**30
MIB = 2**20
NO_ROOM = 517 * MIB  # CUDA's own context and workspaces take all of it


@pytest.fixture(autouse=True)
def kept_elsewhere(tmp_path, monkeypatch):
    """A test must not find what a run before has kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def tiny_on_meta():
    return model_of_shape("tiny-llama", device="meta")


def names(diagnosis):
    return [remedy.name for remedy in diagnosis.remedies]


def test_names_the_causes_that_no_recipe_cures():
    """The mistake: recipes for memory that another process holds, or that is in pieces."""
    in_pieces = diagnose(error=TORCH_1).remedies[0]
    assert in_pieces.where.endswith("expandable_segments:True")
    assert "7.7 GiB in pieces" in in_pieces.saves
    assert names(diagnose(error=TORCH_2_0))[0] == "memory in one piece"
    assert names(diagnose(error=TORCH_2_6)) == ["stop other processes", *RECIPES]


@pytest.mark.parametrize("form", FORMS, ids=[form.error[:60] for form in FORMS])
def test_the_first_advice_fits_the_place_and_the_brand(form):
    """The mistakes: recipes for a GPU where /dev/shm is full, an offload to a host that is full,
    a variable of CUDA for another brand."""
    found = diagnose(error=form.error)
    first = found.remedies[0]
    assert form.first in f"{first.name} {first.where}"
    listed = [remedy for remedy in found.remedies if remedy.name in RECIPES]
    assert bool(listed) == (form.place in ("CUDA", "ROCm", "XPU", "MPS", "host"))
    if form.place in ("host", "MPS"):
        assert not any("offload" in remedy.name for remedy in listed)
    if form.place != "CUDA":
        assert "PYTORCH_CUDA_" not in str(found)
        assert "nvidia-smi" not in str(found)


def test_says_what_was_assumed_and_the_first_that_fits(tiny_on_meta):
    """The mistakes: advice for a batch, a dtype or a card that nobody can read; a line that a
    terminal breaks."""
    sizes = {"model": tiny_on_meta, "batch_size": 4, "seq_len": 2048}
    on_card = " ".join(str(diagnose(**sizes, card="H100")).split())
    assert "AdamW on 4 x 2,048 tokens, weights in float32, on H100 (capability 9.0)" in on_card
    sizes["model"] = model_of_shape("tiny-llama", dtype=torch.bfloat16, device="meta")
    diagnosis = diagnose(**sizes, memory_bytes=560 * MIB)
    assert not diagnosis.remedies[0].fits
    text = str(diagnosis)
    assert max(map(len, text.splitlines())) <= 80
    first = diagnosis.first_fit
    words = f"{first.name}: {first.outcome} saves: {first.saves} costs: {first.costs} where:"
    assert words in " ".join(text.split())
    assert f"First that fits: {first.name}." in " ".join(text.split())
    with pytest.raises(ValueError, match="card='X1': choose one of"):
        diagnose(**sizes, card="X1")


@pytest.mark.parametrize(
    ("length", "words"), [(8, "shorten the rows to 8 tokens"), (None, "shorter rows do not help")]
)
def test_what_helps_where_nothing_fits(length, words):
    """The mistakes: shorter rows against weights that are too much, or a larger device that is
    too small."""
    peak = 3.5 * GIB  # with CUDA's context and what stays free it is 4.2
    tried = SimpleNamespace(
        question=SimpleNamespace(card=Card("", (8, 0), GIB)),
        smallest=lambda: (None, peak),
        longest_rows=lambda: length,
        short=64,
    )
    advice = _where_nothing_fits(tried)
    assert words in advice
    assert "a device of 5 GiB" in advice


@pytest.mark.parametrize(("error", "refused"), [(KERNEL_LOG, "offload"), (MPS, "8-bit AdamW")])
def test_the_models_remedies_fit_the_place_too(tiny_on_meta, error, refused):
    """The mistake: an offload to the memory of the host, which is what has run out."""
    sizes = {"batch_size": 1, "seq_len": 64, "memory_bytes": NO_ROOM}
    together = diagnose(error=error, model=tiny_on_meta, **sizes)
    assert len(together.remedies) > 1
    assert not any(refused in name for name in names(together))
    assert not any("offload" in name for name in names(together))


def test_error_and_model_together(tiny_on_meta):
    """The mistake: all of the card, of which the error leaves a part to this process."""
    together = diagnose(error=TORCH_2_6, model=tiny_on_meta, batch_size=1, seq_len=64)
    assert names(together) == ["stop other processes", "as it is"]
    assert "tensors may take 2.5 GiB" in together.findings[1]


def test_a_model_that_should_fit_points_at_a_leak(tiny_on_meta):
    """The mistake: recipes where tensors stay from step to step."""
    sizes = {"model": tiny_on_meta, "batch_size": 1, "seq_len": 8}
    assert "loss.item()" in str(diagnose(error=TORCH_2_0, **sizes))
    assert "loss.item()" not in str(diagnose(**sizes))  # nothing has failed


def test_the_memory_is_that_given_else_that_allowed_else_the_machines(tiny_on_meta):
    """The mistake: all of a card where a part of it was allowed."""
    sizes = {"model": tiny_on_meta, "batch_size": 1, "seq_len": 8}
    assert "a GPU of 7.0 GiB" in diagnose(**sizes, memory_bytes=7 * GIB).findings[0]
    assert "a GPU of 20.0 GiB" in diagnose(error=GRAPHS_AND_CAP, **sizes).findings[1]
    here = machine()
    assert (here.device == "cpu") == ("on a CPU" in diagnose(**sizes).findings[0])


def test_nothing_to_diagnose(llama):
    """The mistake: advice on a step of no rows, or of rows that teach nothing."""
    with pytest.raises(ValueError, match="nothing to diagnose"):
        diagnose()
    with pytest.raises(ValueError, match="seq_len=1: give"):
        diagnose(model=llama, batch_size=1, seq_len=1)
