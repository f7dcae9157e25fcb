import copy
import inspect

import pytest
import torch
from torch import nn

from recipes_lib.core.mixing import mix_in, unmix


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


def test_the_mixin_runs_around_the_modules_own_forward(layer):
    expected = 2 * layer(X)
    mix_in(layer, Doubled, factor=2)
    assert torch.equal(layer(X), expected)


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


def test_hooks_run_once(layer):
    calls = []
    layer.register_forward_hook(lambda *args: calls.append(1))
    mix_in(layer, Doubled, factor=2)
    layer(X)
    assert calls == [1]


def test_unmixing_leaves_nothing_behind(layer):
    before = dict(vars(layer))
    mix_in(layer, Doubled, factor=2)
    unmix(layer, Doubled, attributes=["factor"])
    assert type(layer) is nn.Linear and vars(layer) == before


def test_twice_is_refused(layer):
    mix_in(layer, Doubled, factor=2)
    with pytest.raises(ValueError, match="is a Doubled already"):
        mix_in(layer, Doubled, factor=2)


def test_the_last_one_goes_first(layer):
    """Taking out the inner class would take the outer one along."""
    mix_in(layer, Doubled, factor=2)
    mix_in(layer, Negated)
    with pytest.raises(ValueError, match="is no Doubled, or another class was mixed in later"):
        unmix(layer, Doubled, attributes=["factor"])
    unmix(layer, Negated)
    unmix(layer, Doubled, attributes=["factor"])
    assert type(layer) is nn.Linear


def test_only_this_module_changes(layer):
    """The mixed class is shared, the class of other linear layers is not touched."""
    other = nn.Linear(3, 3)
    mix_in(layer, Doubled, factor=2)
    assert type(other) is nn.Linear
