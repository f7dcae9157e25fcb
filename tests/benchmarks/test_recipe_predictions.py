"""Recipes beside their predictions."""

from benchmarks import recipe_predictions


def test_what_a_family_refuses_is_no_miss(monkeypatch):
    """The mistakes: a refusal that counts as near, or that ends the program."""
    monkeypatch.setattr(recipe_predictions, "FAMILIES", ["gpt2", "qwen3_moe"])
    row = recipe_predictions.compare("LoRA")
    assert (row["compared"], row["near"], row["refused"]) == (1, 1, ["qwen3_moe"])
