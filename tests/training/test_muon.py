"""Muon follows torch.optim.Muon, trains the right parameters, and keeps half of the states."""

import copy
import io

import pytest
import torch

from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.training.muon import (
    muon_adamw,
    orthogonalized,
    split_for_muon,
)
from tests.small_models import small_model

STEPS = [((48, 16), True), ((16, 48), False)]


def train(model, optimizer, batch, steps):
    """The loss after `steps` steps on one batch."""
    for _ in range(steps):
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model(**batch, use_cache=False).loss.item()


def names_of(model, parameters):
    ids = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


# --- the idea -------------------------------------------------------------------------------------


def test_singular_values_come_near_to_one():
    """The singular vectors stay. Of five steps no value ends outside of the known band."""
    u, _, v = torch.linalg.svd(torch.randn(256, 64), full_matrices=False)
    spread = torch.logspace(0, -1.5, 64)  # the largest is 32 times the smallest
    got = orthogonalized(u * spread @ v).float()
    values = torch.linalg.svdvals(got)
    assert values.min() > 0.65 and values.max() < 1.25
    inside = u.T @ got @ v.T
    torch.testing.assert_close(inside, inside.diagonal().diag(), rtol=0, atol=0.03)


# --- the optimizer --------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "nesterov"), STEPS)
def test_torchs_step_is_the_idea(shape, nesterov):
    """The scale, the strong decay before the step, and the average, of tall and wide matrices."""
    weight = torch.nn.Parameter(torch.randn(shape))
    plain = weight.detach().clone()
    average = torch.zeros(shape)
    options = {"lr": 0.02, "weight_decay": 0.5, "momentum": 0.9, "nesterov": nesterov}
    optimizer = torch.optim.Muon([weight], adjust_lr_fn="match_rms_adamw", **options)
    for _ in range(3):
        weight.grad = torch.randn(shape)
        optimizer.step()
        average = 0.9 * average + 0.1 * weight.grad
        direction = 0.9 * average + 0.1 * weight.grad if nesterov else average
        plain = (1 - 0.02 * 0.5) * plain
        plain -= 0.02 * 0.2 * max(shape) ** 0.5 * orthogonalized(direction).float()
    torch.testing.assert_close(weight.detach(), plain, rtol=0, atol=2e-3)


def test_resumes_exactly(llama, batch):
    """The mistake: the two inside go on with the states and groups from before the loading."""
    optimizer = muon_adamw(llama, lr=1e-3)
    train(llama, optimizer, batch, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = copy.deepcopy(llama)
    other = muon_adamw(resumed, lr=1.0)
    train(resumed, other, batch, 1)
    resumed.load_state_dict(llama.state_dict())
    other.load_state_dict(torch.load(file))
    assert train(resumed, other, batch, 2) == train(llama, optimizer, batch, 2)
    for ours, theirs in zip(llama.parameters(), resumed.parameters()):
        assert torch.equal(ours, theirs)


def test_schedules_and_closures(llama, batch):
    """A learning rate of 0 changes nothing, in both groups."""
    optimizer = muon_adamw(llama, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))

    def closure():
        optimizer.zero_grad()
        loss = llama(**batch, use_cache=False).loss
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    schedule.step()
    before = copy.deepcopy(llama.state_dict())
    assert optimizer.step(closure).item() < first
    assert all(torch.equal(before[name], value) for name, value in llama.state_dict().items())


# --- which parameters -----------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_split_of_a_llama(tied):
    """The mistake: an output layer that is trained as a matrix of a block."""
    model = small_model("Llama", tie_word_embeddings=tied, attention_bias=True)
    matrices, rest = split_for_muon(model)
    expected = {name for name, _ in model.named_parameters() if "_proj.weight" in name}
    assert len(expected) == 2 * 7
    assert names_of(model, matrices) == expected
    assert len(matrices) + len(rest) == len(list(model.parameters()))


def test_without_matrices(llama):
    """The mistake: an AdamW that is called Muon."""
    with pytest.raises(ValueError, match=r"no trainable matrix.*LoRA's are left to AdamW"):
        muon_adamw(apply_lora(llama, rank=4), lr=1e-3)
