"""Language models of equal weights, from wide and shallow to deep and thin."""

import pytest

from recipes_lib.architecture.deep_thin import (
    choose_proportions,
    deep_thin_model,
    plain_block_weights,
    predicted_weights,
)

SMALL = dict(weights=420_000, vocabulary=256, head_dim=16)


def test_smollm2_is_one_of_its_family():
    """30 blocks of 135 million weights: the widths that its authors chose, to a few per cent."""
    proportions = choose_proportions(weights=134_515_008, layers=30, vocabulary=49152)
    assert proportions.hidden_size == 576
    assert (proportions.num_attention_heads, proportions.num_key_value_heads) == (9, 3)
    assert proportions.intermediate_size == 1536
    assert predicted_weights(proportions, vocabulary=49152) == 134_515_008


@pytest.mark.parametrize("layers", [2, 16])
def test_every_depth_has_the_same_weights(layers):
    """Catches a depth that wins because its model is larger."""
    model = deep_thin_model(layers=layers, **SMALL)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(SMALL["weights"], rel=0.02)
    proportions = choose_proportions(layers=layers, **SMALL)
    assert predicted_weights(proportions, vocabulary=256) == count
    block = model.model.layers[0]
    kv_share = proportions.num_key_value_heads / proportions.num_attention_heads
    plain = plain_block_weights(proportions.hidden_size, proportions.intermediate_size, kv_share)
    assert sum(parameter.numel() for parameter in block.parameters()) == plain


def test_what_cannot_be():
    """The mistake: a model with a feed-forward of a few channels, which nobody wants."""
    with pytest.raises(ValueError, match="no such model with whole heads"):
        choose_proportions(weights=50_000, layers=100, vocabulary=256)
