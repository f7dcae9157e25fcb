from recipes_lib.core.measure import provenance


def test_results_lie_where_the_user_wants_them(monkeypatch, tmp_path):
    """The mistake: results of one machine among those of the checkout."""
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path / "mine"))
    assert provenance.runs_dir() == tmp_path / "mine" and provenance.runs_dir().is_dir()


def test_facts_without_a_git_checkout(monkeypatch, tmp_path):
    """The mistake: an installed package has no commit, and no result could be written."""
    monkeypatch.setattr(provenance, "CHECKOUT", tmp_path)
    facts = provenance.provenance()
    assert facts["commit"] is None
    assert {"name", "versions", "date", "tier", "fast"} <= facts.keys()
