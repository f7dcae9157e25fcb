"""The look of all charts."""

from types import SimpleNamespace

from recipes_lib.report import style


def test_percent():
    """The mistake: a change of nothing reads "-0%"."""
    assert [style.percent(change) for change in (-0.5, 0.126, -0.001)] == ["-50%", "+13%", "+0%"]


def test_unit():
    """The mistake: a number that was divided by MiB and says GiB."""
    sizes = [500 * 2**20, 20 * 2**30, 106 * 2**30]
    texts = [style.Unit(size).text(size) for size in sizes]
    assert texts == ["500 MiB", "20.0 GiB", "106 GiB"]


def test_a_source_names_this_machine(monkeypatch):
    """The mistake: the name of a processor that fills the line."""
    cpu = SimpleNamespace(name="Intel(R) Xeon(R) Processor @ 2.70GHz", device="cpu", cores=2)
    monkeypatch.setattr(style, "machine", lambda: cpu)
    assert style.measured_here().startswith("measured on Intel Xeon, 2 CPU cores, 20")
