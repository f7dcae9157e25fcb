import copy
import inspect

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from torch import nn

from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.mixins import mix_in, take_out, unmix, unmixed_class
from recipes_lib.memory.activation_checkpointing import (
    Checkpointed,
    apply_activation_checkpointing,
)
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.training.compiled_blocks import apply_compiled_blocks


class Doubled(nn.Module):
    def forward(self, *args, **kwargs):
        return self.factor * super().forward(*args, **kwargs)


class Negated(nn.Module):
    def forward(self, *args, **kwargs):
        return -super().forward(*args, **kwargs)


@pytest.fixture
def layer():
    return nn.Linear(3, 3)


X = torch.ones(2, 3)


def test_a_copy_runs_its_own_weights(layer):
    """A forward that was bound to the original would still read the original's."""
    mix_in(layer, Doubled, factor=2)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.fill_(1.0)
    assert torch.equal(twin(X), 2 * torch.ones(2, 3))


def test_what_others_read_of_the_class_stays(layer):
    """FSDP finds blocks by the name of their class, Trainer reads the signature of `forward`."""
    state = list(layer.state_dict())
    mix_in(layer, Doubled, factor=2)
    assert type(layer).__name__ == "Linear" and isinstance(layer, nn.Linear)
    assert inspect.signature(type(layer).forward) == inspect.signature(nn.Linear.forward)
    assert list(layer.state_dict()) == state


def test_unmixing_leaves_nothing_behind(layer):
    before = dict(vars(layer))
    mix_in(layer, Doubled, factor=2)
    unmix(layer, Doubled)
    assert type(layer) is nn.Linear and vars(layer) == before


def test_each_goes_in_once_and_the_last_one_comes_out_first(layer):
    """Taking out the inner class would take the outer one along."""
    mix_in(layer, Doubled, factor=2)
    with pytest.raises(ValueError, match="is a Doubled already"):
        mix_in(layer, Doubled, factor=2)
    mix_in(layer, Negated)
    assert unmixed_class(layer) is nn.Linear
    with pytest.raises(ValueError, match="is no Doubled, or another class was mixed in later"):
        unmix(layer, Doubled)
    unmix(layer, Negated)
    unmix(layer, Doubled)
    assert type(layer) is nn.Linear


# --- an attribute `forward` on a module hides that of its class -----------------------------------


TECHNIQUES = [apply_compiled_blocks, apply_chunked_cross_entropy]


@pytest.mark.parametrize("apply", TECHNIQUES)
def test_a_device_map_is_refused_before_anything_changes(apply, llama):
    """Accelerate replaces the forward of modules. A technique would do nothing, in silence."""
    dispatch_model(llama, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    before = [(type(module), dict(vars(module))) for module in llama.modules()]
    with pytest.raises(ValueError, match="forward of its own"):
        apply(llama)
    assert [(type(module), vars(module)) for module in llama.modules()] == before


def count_runs(model):
    """A list that grows whenever the first MLP begins. A recomputation may not reach its end."""
    runs = []
    decoder_blocks(model)[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


def test_hooks_that_come_later_keep_the_technique_and_hold_it(llama, batch):
    """A class that is taken out from under them would leave a forward that fails."""
    apply_activation_checkpointing(llama)
    dispatch_model(llama, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    runs = count_runs(llama)
    llama(**batch, use_cache=False).loss.backward()
    assert len(runs) == 2
    with pytest.raises(ValueError, match="forward of its own"):
        take_out(llama, Checkpointed)
    remove_hook_from_submodules(llama)  # it leaves the class's own forward on each module
    assert "forward" in vars(decoder_blocks(llama)[0])
    take_out(llama, Checkpointed)
    llama(**batch, use_cache=False).loss.backward()
    assert len(runs) == 3
