"""Pruned weights: which ones, that they stay zero, and what that does to a file."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from recipes_lib.compression.pruning import (
    apply_pruning,
    compressed_bytes,
    predicted_compressed_share,
    remove_pruning,
    zero_share,
)
from recipes_lib.core.model.marks import QUANTIZED_BY, mark
from tests.small_models import small_model


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 1, bias=False),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def layers_of(model):
    return [module for module in model if hasattr(module, "weight")]


@pytest.mark.parametrize("scope", ["model", "layer"])
def test_the_same_weights_as_pytorchs(scope):
    """The mistakes: a threshold per row, and one layer's share taken from another."""
    ours = apply_pruning(network(), share=0.6, scope=scope)
    theirs = network()
    parts = [(layer, "weight") for layer in layers_of(theirs)]
    if scope == "model":
        prune.global_unstructured(parts, pruning_method=prune.L1Unstructured, amount=0.6)
    else:
        for layer, name in parts:
            prune.l1_unstructured(layer, name, amount=0.6)
    assert zero_share(ours) == pytest.approx(0.6, abs=0.01)
    for our, their in zip(layers_of(ours), layers_of(theirs)):
        assert torch.equal(our.weight, their.weight)


def test_zeros_stay_zero_in_training_and_the_others_learn_as_before():
    """The mistake: weight decay, momentum or a copied model brings removed weights back."""
    model = copy.deepcopy(apply_pruning(network(), share=0.5))
    plain = network()
    kept = [layer.weight != 0 for layer in layers_of(model)]
    for layer, mask in zip(layers_of(plain), kept):
        layer.weight.data *= mask
    for each in (model, plain):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(torch.randn(4, 1, 6, 6)).square().sum().backward()
            if each is plain:  # what a mask does, by hand
                for layer, mask in zip(layers_of(plain), kept):
                    layer.weight.grad *= mask
            optimizer.step()
    remove_pruning(model)
    for ours, theirs, mask in zip(layers_of(model), layers_of(plain), kept):
        assert torch.equal(ours.weight != 0, mask)
        assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)
    assert set(model.state_dict()) == set(network().state_dict())


def test_a_language_model_keeps_its_shared_table():
    """The mistake: an embedding loses half of its words' numbers with the output layer."""
    model = small_model("Llama", tie_word_embeddings=True)
    table = model.get_input_embeddings().weight.detach().clone()
    remove_pruning(apply_pruning(model, share=0.5))
    assert torch.equal(model.get_input_embeddings().weight, table)
    assert zero_share(model.model) == pytest.approx(0.5, abs=0.01)


def test_a_pruned_model_is_not_saved_under_other_names(tmp_path):
    """Without the guard, `from_pretrained` finds no weight of these names, and draws others."""
    model = apply_pruning(small_model("Llama"), share=0.5)
    with pytest.raises(ValueError, match="call remove_pruning"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="behind the masks are no zeros"):
        compressed_bytes(model)
    remove_pruning(model).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_what_cannot_be_pruned_is_refused():
    """An adapter of zeros would never learn, and a dead layer gives one answer to everything."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        small_model("Llama"), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    with pytest.raises(ValueError, match="merge_and_unload"):
        apply_pruning(adapted, share=0.5)
    quantized = network()
    mark(quantized[5], QUANTIZED_BY, "apply_quantization_aware")
    with pytest.raises(ValueError, match=r"5 is quantized already, with apply_q.*before that"):
        apply_pruning(quantized, share=0.5)
    small = network()
    small[0].weight.data *= 1e-6
    with pytest.raises(ValueError, match="leaves no weight of 0"):
        apply_pruning(small, share=0.5)
    assert not any("parametrizations" in name for name, _ in small.named_parameters())


def test_matrices_of_other_modules_are_not_left_out_in_silence():
    """Without the guard a share of 0.5 takes 6 % of a Mixtral: its experts are one tensor each."""
    model = small_model("Mixtral", tie_word_embeddings=False)
    with pytest.raises(ValueError, match="is a weight of MixtralTopKRouter, which is not pruned"):
        apply_pruning(model, share=0.5)


def test_a_file_is_smaller_only_when_it_is_compressed():
    """The formula, against zlib: the bits of weights are as random as these."""
    torch.manual_seed(0)
    dense = nn.Linear(512, 512, bias=False)
    sparse = remove_pruning(apply_pruning(copy.deepcopy(dense), share=0.8))
    assert sparse.weight.nbytes == dense.weight.nbytes
    measured = compressed_bytes(sparse) / compressed_bytes(dense)
    assert measured == pytest.approx(predicted_compressed_share(share=0.8), rel=0.45)
    assert measured > predicted_compressed_share(share=0.8), "no program beats the entropy"
