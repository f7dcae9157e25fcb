from benchmarks import edge
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks


def test_a_short_model_has_the_first_blocks(monkeypatch):
    """The mistake: a configuration of 30 blocks beside one, which the export goes through."""
    monkeypatch.setattr(edge, "load_model", lambda: model_of_shape("tiny-llama"))
    assert len(decoder_blocks(edge.load_model())) == 2
    assert len(decoder_blocks(edge.model_of(1))) == edge.model_of(1).config.num_hidden_layers == 1
