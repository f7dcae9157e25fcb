"""What the doctor says of an error and of a model."""

import re

import pytest
import torch

from benchmarks.family_predictions import small_model
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.out_of_memory_doctor import diagnose
from recipes_lib.workflows.out_of_memory_doctor.remedies import RECIPES
from tests.workflows.test_out_of_memory_doctor_message import (
    CPU,
    GRAPHS_AND_CAP,
    KERNEL_LOG,
    MPS,
    TORCH_1,
    TORCH_2_0,
    TORCH_2_6,
)

GIB = 2**30


@pytest.fixture(scope="module")
def eight_b():
    return model_of_shape("llama-3.1-8b", device="meta")


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


@pytest.mark.parametrize("error", [GRAPHS_AND_CAP, MPS, CPU])
def test_invents_no_cause(error):
    """Little is unallocated, or the message does not say: then there are the recipes only."""
    assert names(diagnose(error=error)) == list(RECIPES)


def test_says_what_was_assumed_and_the_first_that_fits(eight_b):
    """The mistake: advice for a batch, a dtype or a card that nobody can read."""
    sizes = {"model": eight_b, "batch_size": 8, "seq_len": 2048}
    diagnosis = diagnose(**sizes, card="H100")
    said = " ".join(diagnosis.findings)
    assert "AdamW on 8 x 2,048 tokens, weights in float32, on H100 (capability 9.0)" in said
    assert f"First that fits: {diagnosis.first_fit.name}." in said
    with pytest.raises(ValueError, match="card='X1': choose one of"):
        diagnose(**sizes, card="X1")


def test_what_helps_where_nothing_fits():
    """The mistakes: shorter rows against weights that are too much, or a larger device that is
    too small."""
    model = model_of_shape("smollm2-135m", layers=3, dtype=torch.bfloat16, device="meta")
    sizes = {"model": model, "batch_size": 8}
    weights = diagnose(**sizes, seq_len=64, memory_bytes=560 * 2**20).findings[-1]
    assert "shorter rows do not help" in weights
    rows = diagnose(**sizes, seq_len=2**15, memory_bytes=2**30).findings[-1]
    assert "shorten the rows to " in rows
    larger = int(re.search(r"a device of (\d+) GiB", rows)[1])
    assert diagnose(**sizes, seq_len=2**15, memory_bytes=larger * GIB).first_fit is not None


def test_killed_is_the_memory_of_the_host(eight_b):
    """The mistake: the word that Linux has for it was "not an out-of-memory error"."""
    alone = diagnose(error="Killed")
    assert "memory of the host" in alone.findings[0]
    assert names(alone) == [name for name in RECIPES if "offload" not in name]
    sizes = {"batch_size": 1, "seq_len": 512, "memory_bytes": 24 * GIB}
    together = diagnose(error=KERNEL_LOG, model=eight_b, **sizes)
    assert "this process held 23.1 GiB" in together.findings[0]
    assert not any("offload" in name for name in names(together))


def test_error_and_model_together(eight_b):
    """The limit is the memory that the error leaves to this process."""
    together = diagnose(error=TORCH_2_6, model=eight_b, batch_size=1, seq_len=512)
    assert names(together)[:2] == ["stop other processes", "as it is"]
    assert "tensors may take 2.5 GiB" in together.findings[1]
    assert together.first_fit is None


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


def test_shows_itself_as_text_and_table(eight_b):
    """The mistake: a line that a terminal breaks, or a row that Jupyter does not get."""
    diagnosis = diagnose(
        error=TORCH_1, model=eight_b, batch_size=8, seq_len=2048, memory_bytes=24 * GIB
    )
    text = str(diagnosis)
    assert max(map(len, text.splitlines())) <= 80
    page = diagnosis._repr_html_()
    assert repr(diagnosis) == text
    assert diagnosis.remedies[-1].outcome in " ".join(text.split())
    assert page.count("<tr>") == len(diagnosis.table())
    assert "fine_tuning/qlora.py" in text
    assert "fine_tuning/qlora.py" in page


def test_nothing_to_diagnose(llama):
    """The mistake: advice on a step of no rows, or of rows that teach nothing."""
    with pytest.raises(ValueError, match="nothing to diagnose"):
        diagnose()
    with pytest.raises(ValueError, match="seq_len=1: give"):
        diagnose(model=llama, batch_size=1, seq_len=1)


@pytest.mark.parametrize("family", ["Mixtral", "Mamba2"])
def test_a_model_to_which_not_all_recipes_apply(family):
    """The mistake: no diagnosis at all, where a recipe does not reach the experts or the mixers."""
    sizes = {"batch_size": 2, "seq_len": 16, "memory_bytes": 2**20}
    diagnosis = diagnose(model=small_model(family), **sizes)
    assert any(finding.startswith("Not with QLoRA: ") for finding in diagnosis.findings)
    assert len(diagnosis.remedies) > 1
