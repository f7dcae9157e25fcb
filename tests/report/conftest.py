import pytest


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """Ladders write their files here."""
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path))
    return tmp_path
