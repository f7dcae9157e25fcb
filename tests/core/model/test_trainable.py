import pytest

from recipes_lib.core.model.trainable import parameters_to_train


def test_a_model_gives_what_trains_in_it(llama):
    """Catches frozen weights that get states as well: with LoRA they would be most of them."""
    frozen, *trained = llama.parameters()
    frozen.requires_grad_(False)
    given = parameters_to_train(llama)
    assert [id(parameter) for parameter in given] == [id(parameter) for parameter in trained]
    with pytest.raises(ValueError, match="set requires_grad before this call"):
        parameters_to_train(llama.requires_grad_(False))


def test_groups_keep_their_options(llama):
    """Catches groups that are flattened into one: each would train with the same learning rate."""
    groups = [{"params": list(llama.parameters()), "lr": 0.1}]
    assert parameters_to_train(groups) is groups
