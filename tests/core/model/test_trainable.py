from recipes_lib.core.model.trainable import parameters_to_train


def test_a_model_gives_what_trains_in_it(llama):
    """Catches frozen weights that get states as well: with LoRA they would be most of them."""
    frozen, *trained = llama.parameters()
    frozen.requires_grad_(False)
    given = parameters_to_train(llama)
    assert [id(parameter) for parameter in given] == [id(parameter) for parameter in trained]
    groups = [{"params": trained, "lr": 0.1}]
    assert parameters_to_train(groups) is groups, "each group keeps its learning rate"
