"""What the doctor says of an error and of a model."""

import re

import pytest

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


def test_says_the_first_that_fits(eight_b):
    """The mistake: the best remedy in place of the first one that is enough."""
    sizes = {"model": eight_b, "batch_size": 8, "seq_len": 2048}
    diagnosis = diagnose(**sizes, memory_bytes=24 * GIB)
    assert diagnosis.first_fit.name == "LoRA, 16-bit base"
    assert "First that fits: LoRA, 16-bit base" in diagnosis.findings[-1]
    hopeless = diagnose(**sizes, memory_bytes=7 * GIB)
    assert hopeless.first_fit is None
    assert "First that fits: none; shorten the rows" in hopeless.findings[-1]


def test_shorter_rows_are_no_advice_where_the_weights_are_too_much():
    """The mistake: 32B in 16 GiB was told to shorten the rows, and four bits of it are 18 GiB."""
    model = model_of_shape("qwen2.5-32b", device="meta")
    diagnosis = diagnose(model=model, batch_size=8, seq_len=1024, memory_bytes=16 * GIB)
    said = diagnosis.findings[-1]
    assert "shorten" not in said
    assert "shorter rows do not help" in said
    assert "the weights 18.4 GiB: take a device of" in said
    larger = int(re.search(r"a device of (\d+) GiB", said)[1])
    sizes = {"model": model, "batch_size": 8, "seq_len": 1024}
    assert diagnose(**sizes, memory_bytes=larger * GIB).first_fit.name == "QLoRA"
    assert diagnose(**sizes, memory_bytes=(larger - 1) * GIB).first_fit is None


def test_killed_is_the_memory_of_the_host(eight_b):
    """The mistake: the word that Linux has for it was "not an out-of-memory error"."""
    alone = diagnose(error="Killed")
    assert "memory of the host" in alone.findings[0]
    assert names(alone) == [name for name in RECIPES if name != "optimizer offload"]
    sizes = {"batch_size": 1, "seq_len": 512, "memory_bytes": 24 * GIB}
    together = diagnose(error=KERNEL_LOG, model=eight_b, **sizes)
    assert "this process held 23.1 GiB" in together.findings[0]
    assert "optimizer offload" not in names(together)


def test_error_and_model_together(eight_b):
    """The limit is the memory that the error leaves to this process."""
    together = diagnose(error=TORCH_2_6, model=eight_b, batch_size=1, seq_len=512)
    assert names(together)[:2] == ["stop other processes", "as it is"]
    assert "of 3.1 GiB" in together.findings[1]
    assert together.first_fit is None


def test_a_model_that_should_fit_points_at_a_leak(tiny_on_meta):
    """The mistake: recipes where tensors stay from step to step."""
    sizes = {"model": tiny_on_meta, "batch_size": 1, "seq_len": 8}
    assert "loss.item()" in str(diagnose(error=TORCH_2_0, **sizes))
    assert "loss.item()" not in str(diagnose(**sizes))  # nothing has failed


def test_the_memory_is_that_given_else_that_allowed_else_the_machines(tiny_on_meta):
    """The mistake: all of a card where a part of it was allowed."""
    sizes = {"model": tiny_on_meta, "batch_size": 1, "seq_len": 8}
    assert "of 7.0 GiB" in diagnose(**sizes, memory_bytes=7 * GIB).findings[0]
    assert "of 20.0 GiB" in diagnose(error=GRAPHS_AND_CAP, **sizes).findings[1]
    here = machine().memory_bytes / GIB
    assert f"of {here:,.1f} GiB" in diagnose(**sizes).findings[0]


def test_shows_itself_as_text_and_table(eight_b):
    """The mistake: a line that a terminal breaks, or a row that Jupyter does not get."""
    diagnosis = diagnose(
        error=TORCH_1, model=eight_b, batch_size=8, seq_len=2048, memory_bytes=24 * GIB
    )
    text = str(diagnosis)
    assert max(map(len, text.splitlines())) <= 80
    page = diagnosis._repr_html_()
    assert repr(diagnosis) == text
    assert "weights 29.9 GiB → 15.1 GiB" in text
    assert diagnosis.remedies[-1].outcome in text
    assert page.count("<tr>") == len(diagnosis.table()) == 10
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
    """The mistake: no diagnosis at all, where adapters do not reach the experts or the mixers."""
    diagnosis = diagnose(
        model=small_model(family), batch_size=2, seq_len=16, memory_bytes=4 * 2**20
    )
    assert "by a dry step, because its blocks have" in diagnosis.findings[1]
    tried = [remedy.name for remedy in diagnosis.remedies]
    assert "8-bit AdamW" in tried
    assert not any("LoRA" in name for name in tried)
