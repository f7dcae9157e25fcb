"""The address of the charts about speed. Each chart is tested under the name of its own file."""

from recipes_lib.report import speed_charts


def test_every_name_of_the_table_is_there():
    """The table says where each chart is: a chart that moves on must be found there."""
    table = speed_charts.__doc__
    charts = [name for name in speed_charts.__all__ if name.endswith("_chart")]
    assert len(charts) == 4
    for name in charts:
        (line,) = [line for line in table.splitlines() if line.startswith(f"{name} ")]
        place = getattr(speed_charts, name).__module__
        assert f"in {place.rpartition('.')[2]} " in line
