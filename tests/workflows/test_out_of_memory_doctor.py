import pytest

from recipes_lib.core.machine import machine
from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.out_of_memory_doctor import diagnose
from recipes_lib.workflows.out_of_memory_doctor_remedies import RECIPES
from tests.workflows.test_out_of_memory_doctor_message import (
    CPU,
    GRAPHS_AND_CAP,
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
    sizes = {"model": eight_b, "batch_size": 8, "seq_len": 2048}
    diagnosis = diagnose(**sizes, memory_bytes=24 * GIB)
    assert diagnosis.first_fit.name == "LoRA, 16-bit base"
    assert "First that fits: LoRA, 16-bit base" in str(diagnosis)
    hopeless = diagnose(**sizes, memory_bytes=6 * GIB)
    assert hopeless.first_fit is None
    assert "First that fits: none; shorten the rows" in str(hopeless)


def test_error_and_model_together(eight_b):
    """The limit is the memory that the error leaves to this process."""
    together = diagnose(error=TORCH_2_6, model=eight_b, batch_size=1, seq_len=512)
    assert names(together)[:2] == ["stop other processes", "as it is"]
    assert "of 3.1 GiB" in together.findings[1]
    assert together.first_fit is None


def test_a_model_that_should_fit_points_at_a_leak(tiny_on_meta):
    sizes = {"model": tiny_on_meta, "batch_size": 1, "seq_len": 8}
    assert "loss.item()" in str(diagnose(error=TORCH_2_0, **sizes))
    assert "loss.item()" not in str(diagnose(**sizes))  # nothing has failed


def test_the_memory_is_that_given_else_that_allowed_else_the_machines(tiny_on_meta):
    sizes = {"model": tiny_on_meta, "batch_size": 1, "seq_len": 8}
    assert "of 7.0 GiB" in diagnose(**sizes, memory_bytes=7 * GIB).findings[0]
    assert "of 20.0 GiB" in diagnose(error=GRAPHS_AND_CAP, **sizes).findings[1]
    here = machine().memory_bytes / GIB
    assert f"of {here:,.1f} GiB" in diagnose(**sizes).findings[0]


def test_shows_itself_as_text_and_table(eight_b):
    diagnosis = diagnose(
        error=TORCH_1, model=eight_b, batch_size=8, seq_len=2048, memory_bytes=24 * GIB
    )
    text = str(diagnosis)
    page = diagnosis._repr_html_()
    assert repr(diagnosis) == text
    assert "weights 29.9 GiB → 15.1 GiB" in text
    assert diagnosis.remedies[-1].outcome in text
    assert page.count("<tr>") == len(diagnosis.table()) == 10
    assert "fine_tuning/qlora.py" in text
    assert "fine_tuning/qlora.py" in page


def test_bad_input(llama):
    with pytest.raises(ValueError, match="nothing to diagnose"):
        diagnose()
    with pytest.raises(ValueError, match="batch_size=0: give"):
        diagnose(model=llama)
    with pytest.raises(ValueError, match="seq_len=1: give"):
        diagnose(model=llama, batch_size=1, seq_len=1)
    with pytest.raises(ValueError, match="memory_bytes=0: give"):
        diagnose(model=llama, batch_size=1, seq_len=8, memory_bytes=0)
    with pytest.raises(ValueError, match="is no Hugging Face model"):
        diagnose(model=llama.model.layers[0], batch_size=1, seq_len=8)
