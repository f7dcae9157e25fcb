from recipes_lib.core.measure import runs


def test_results_lie_where_the_user_wants_them(monkeypatch, tmp_path):
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path / "mine"))
    assert runs.runs_dir() == tmp_path / "mine" and runs.runs_dir().is_dir()


def test_facts_without_a_git_checkout(monkeypatch, tmp_path):
    """The mistake: an installed package has no commit, and no result could be written."""
    monkeypatch.setattr(runs, "CHECKOUT", tmp_path)
    facts = runs.provenance()
    assert facts["commit"] is None
    assert {"name", "versions", "date", "tier", "fast"} <= facts.keys()
