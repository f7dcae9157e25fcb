"""Names of files: a mistake is seen before minutes of an export."""

import pytest

from recipes_lib.edge._files import check_existing_file, check_file


def test_places_where_no_file_can_be(tmp_path):
    file = tmp_path / "model.pte"
    file.write_text("x")
    check_file(example="model.pte", path=file)
    check_file(example="model.pte", path=tmp_path / "new" / "deep" / "model.pte")
    for path in (tmp_path, tmp_path / "model.onnx"):
        with pytest.raises(ValueError, match=r"ends in \.pte"):
            check_file(example="model.pte", path=path)
    with pytest.raises(OSError):
        check_file(example="model.pte", path=file / "below.pte")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match="is no file: write it with export_to_onnx"):
        check_existing_file(made_by="export_to_onnx", path=tmp_path)
