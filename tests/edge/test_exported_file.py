"""A file appears whole, or not at all."""

import pytest

from recipes_lib.edge._exported_file import whole_or_none


def test_an_export_that_is_cut_leaves_nothing(tmp_path):
    """Half a file under the name of a whole one, or the old file gone."""
    path = tmp_path / "deep" / "model.pte"
    with whole_or_none(path) as unfinished:
        unfinished.write_text("whole")
    with pytest.raises(KeyboardInterrupt), whole_or_none(path) as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]
