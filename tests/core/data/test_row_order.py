import pytest

from recipes_lib.core.data.row_order import rows_of_step


def test_rows_of_step_visits_every_row_once_per_epoch():
    def rows(step, seed=0):
        return rows_of_step(step, rows=12, rows_per_step=4, seed=seed)

    first = [rows(0), rows(1), rows(2)]
    second = [rows(3), rows(4), rows(5)]
    for epoch in (first, second):
        assert sorted(row for part in epoch for row in part) == list(range(12))
    assert first != second
    assert rows(1, seed=1) != rows(1, seed=0)
    for rows_per_step in (0, 13):
        with pytest.raises(ValueError, match="from 1 to 12"):
            rows_of_step(0, rows=12, rows_per_step=rows_per_step, seed=0)
