import math

import numpy
import pytest
import torch

from recipes_lib.core.checks import (
    check_choice,
    check_existing_file,
    check_file,
    check_folder,
    check_heads,
    check_number,
    check_whole,
)


@pytest.mark.parametrize("value", [0, 2.0])
def test_what_is_no_whole_number_of_one_or_more(value):
    """2.0 comes from a mistake, such as `batch / 2`; NumPy's whole numbers are some."""
    check_whole(rank=numpy.int64(3))
    with pytest.raises(ValueError, match=r"rank=.*: give a whole number of 1 or more"):
        check_whole(rank=value)


def test_bounds_of_whole_numbers():
    check_whole(least=0, most=4, sinks=0)
    check_whole(least=0, most=4, sinks=4)
    with pytest.raises(ValueError, match="sinks=5: give a whole number from 0 to 4"):
        check_whole(least=0, most=4, sinks=5)


def test_the_wrong_one_of_several_is_named():
    with pytest.raises(ValueError, match="seq=0"):
        check_whole(batch=4, seq=0)


@pytest.mark.parametrize("value", [-0.1, 1, math.nan])
def test_numbers_outside_their_bounds(value):
    """NaN is neither below nor above a bound: a check by `<` alone would let it pass."""
    check_number(least=0, below=1, dropout=numpy.float32(0))
    check_number(above=0, alpha=1e-9)
    message = "give a finite number of 0 or more and below 1"
    with pytest.raises(ValueError, match=f"dropout=.*: {message}"):
        check_number(least=0, below=1, dropout=value)


def test_choices():
    check_choice(["block", "selective"], mode="block")
    with pytest.raises(ValueError, match="mode='blok': choose one of block, selective"):
        check_choice(["block", "selective"], mode="blok")


def test_a_folder_that_can_be_written(tmp_path):
    """A run of hours would end in an error when it saves."""
    file = tmp_path / "pairs.jsonl"
    file.touch()
    check_folder(output_dir=tmp_path)
    check_folder(output_dir=str(tmp_path / "new" / "deep"))
    for wrong, error in [
        (file, "is a file: give the name of a folder"),
        (file / "run", "is a place below the file"),
        ("", "output_dir='': give the name of a folder"),
    ]:
        with pytest.raises(ValueError, match=error):
            check_folder(output_dir=wrong)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((4, 5, 8), (4, 5, 8), (4, 5, 8)),  # no batch
        ((2, 4, 5, 8), (2, 2, 5, 8), (2, 4, 5, 8)),  # k and v differ
        ((2, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)),  # another batch, which would broadcast
        ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)),  # another length
        ((2, 4, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)),  # heads without a partner
    ],
)
def test_heads_that_do_not_go_together(q, k, v):
    check_heads(torch.ones(2, 4, 5, 8), torch.ones(2, 2, 5, 8), torch.ones(2, 2, 5, 8), allowed="")
    with pytest.raises(ValueError, match=r"v \[.*\]: give what fits"):
        check_heads(torch.ones(q), torch.ones(k), torch.ones(v), allowed="what fits")


def test_places_where_no_file_can_be(tmp_path):
    """Each of them was an OSError, behind minutes of an export."""
    file = tmp_path / "model.pte"
    file.write_text("x")
    check_file(example="model.pte", path=file)
    check_file(example="model.pte", path=tmp_path / "new" / "deep" / "model.pte")
    for path, message in (
        (tmp_path, "is a folder: give the name of a file"),
        (f"{tmp_path}/new/", "is a folder"),
        (file / "below.pte", "is a place below the file"),
        (tmp_path / "model.onnx", r"ends in \.pte"),
        (tmp_path / "model", r"ends in \.pte"),
    ):
        with pytest.raises(ValueError, match=message):
            check_file(example="model.pte", path=path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", "path='.' is a folder"),
        ("missing.onnx", "does not exist: write it with export_to_onnx"),
    ],
)
def test_files_that_are_not_there(path, message):
    with pytest.raises(ValueError, match=message):
        check_existing_file(made_by="export_to_onnx", path=path)
