import copy
import io
import pickle

import pytest
import torch

from recipes_lib.core.measure import PeakMemory, measure
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.sizes import state_bytes
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.precision import pure_bf16
from recipes_lib.precision.pure_bf16 import (
    bf16_adamw,
    estimate_pure_bf16,
    step_with_masters,
)

ROUNDINGS = ["stochastic", "nearest", "master"]


def ones(*shape):
    return torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))


def repeat(optimizer, weight, gradients):
    """One step for each of the gradients, which is a number or a row of them."""
    for gradient in gradients:
        weight.grad = torch.zeros_like(weight) + gradient
        optimizer.step()


def train(model, optimizer, batch, steps):
    """The loss after `steps` steps on one batch."""
    for _ in range(steps):
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model(**batch, use_cache=False).loss.item()


# --- the idea: fp32 masters -----------------------------------------------------------------------


def test_masters_by_hand_are_those_of_the_optimizer(llama, batch):
    """To the last bit, with any optimizer for the masters: here PyTorch's fused AdamW."""
    model = llama.bfloat16()
    by_hand = copy.deepcopy(model)
    options = {"lr": 1e-3, "weight_decay": 0.1}
    optimizer = bf16_adamw(model, rounding="master", **options)
    weights = list(by_hand.parameters())
    masters = [weight.detach().float() for weight in weights]
    adamw = torch.optim.AdamW(masters, fused=True, **options)
    for _ in range(3):
        train(model, optimizer, batch, 1)
        by_hand(**batch, use_cache=False).loss.backward()
        step_with_masters(weights, masters, adamw)
        by_hand.zero_grad()
    for weight, expected in zip(weights, model.parameters()):
        assert torch.equal(weight, expected)


# --- small updates --------------------------------------------------------------------------------


def test_a_weight_of_one_and_a_small_learning_rate():
    """100 steps of 1e-4 move fp32 by 0.01. In bf16 each is a 39th of the spacing below 1."""
    reference = torch.nn.Parameter(torch.ones(4096))
    repeat(torch.optim.AdamW([reference], lr=1e-4, fused=True), reference, [0.5] * 100)
    assert reference[0].item() == pytest.approx(0.99, abs=1e-3)
    weights = {rounding: ones(4096) for rounding in ROUNDINGS}
    for rounding, weight in weights.items():
        repeat(bf16_adamw([weight], lr=1e-4, rounding=rounding, seed=0), weight, [0.5] * 100)
    assert torch.equal(weights["nearest"], ones(4096))
    assert torch.equal(weights["master"], reference.bfloat16())
    # 2.6 moves of 1/256 are expected of each: the standard error of the mean of 4,096 is 1e-4.
    mean = weights["stochastic"].float().mean().item()
    assert mean == pytest.approx(reference[0].item(), abs=5e-4)


def test_weight_and_averages_are_rounded_independently():
    """They share one draw: read from the same place, all three would be rounded up together."""
    weight = ones(2**14)
    optimizer = bf16_adamw([weight], lr=2e-3, seed=0)
    repeat(optimizer, weight, [0.7])
    state = optimizer.state[weight]
    rounded = [weight.detach(), state["exp_avg"], state["exp_avg_sq"]]
    correlation = torch.corrcoef(torch.stack(rounded).double())
    torch.testing.assert_close(correlation, torch.eye(3).double(), rtol=0, atol=5 / 2**7)


def test_the_second_average_can_fall():
    """After 100 gradients of 1 come 500 of 0.1. With lr 0 the weights stay, whatever is drawn."""
    before = {}
    after = {}
    for rounding in ROUNDINGS:
        weight = ones(4096)
        optimizer = bf16_adamw([weight], lr=0.0, rounding=rounding, seed=0)
        for gradient, steps, result in ((1.0, 100, before), (0.1, 500, after)):
            repeat(optimizer, weight, [gradient] * steps)
            result[rounding] = optimizer.state[weight]["exp_avg_sq"].float().mean().item()
        assert torch.equal(weight, ones(4096))
    assert after["stochastic"] == pytest.approx(after["master"], rel=0.02)
    assert after["master"] < 0.7 * before["master"]
    assert after["nearest"] == before["nearest"]


# --- the optimizer --------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["nearest", "master"])
@pytest.mark.parametrize("chunk", [2**17, 1000])
@pytest.mark.parametrize("family", ["tiny-llama", "tiny-gpt2"])
def test_equals_torch_adamw(family, rounding, chunk, batch, monkeypatch):
    """Bit for bit, with the same gradients.

    "nearest" is a bf16 model under fused AdamW, "master" an fp32 copy of it. In whole tensors
    and in chunks, of which the last one is not full.
    """
    monkeypatch.setattr(pure_bf16, "_chunk", lambda parameter: chunk)
    model = model_of_shape(family, dtype=torch.bfloat16, device="cpu")
    options = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.99)}
    reference = copy.deepcopy(model)
    if rounding == "master":
        reference = reference.float()
    adamw = torch.optim.AdamW(reference.parameters(), fused=True, **options)
    optimizer = bf16_adamw(model, rounding=rounding, **options)
    for _ in range(10):
        model(**batch, use_cache=False).loss.backward()
        for p, q in zip(model.parameters(), reference.parameters()):
            q.grad = p.grad.to(q.dtype)
        for one in (optimizer, adamw):
            one.step()
            one.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters()):
        assert torch.equal(p, q.bfloat16())


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_transposed_scalar_and_empty_parameters(rounding):
    weights = [ones(300, 7), torch.nn.Parameter(ones(7, 300).detach().t()), ones(), ones(0)]
    optimizer = bf16_adamw(weights, lr=0.01, rounding=rounding, seed=0)
    for _ in range(10):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert not weights[1].is_contiguous()
    for weight in weights[:3]:
        assert weight.float().mean().item() == pytest.approx(0.9, abs=0.02)


def test_trains_as_fp32_where_nearest_stays_behind(llama, batch):
    model = llama.bfloat16()
    options = {"lr": 1e-5, "weight_decay": 0.0}
    start = train(model, None, batch, 0)
    reference = copy.deepcopy(model).float()
    adamw = torch.optim.AdamW(reference.parameters(), **options)
    best = start - train(reference, adamw, batch, 40)
    gained = {}
    for rounding in ROUNDINGS:
        student = copy.deepcopy(model)
        optimizer = bf16_adamw(student, rounding=rounding, **options)
        gained[rounding] = start - train(student, optimizer, batch, 40)
    assert gained["stochastic"] == pytest.approx(best, rel=0.1) and best > 0.05
    assert gained["master"] == pytest.approx(best, rel=0.1)
    assert gained["nearest"] < 0.5 * best


def test_updates_are_distributed_as_those_of_torchao():
    """20 steps of 16 weights, each 16,384 times: the same mean and the same spread."""
    optim = pytest.importorskip("torchao.optim")
    start = torch.linspace(-2, 2, 16).bfloat16().expand(2**14, 16)
    gradients = torch.randn(20, 16).bfloat16()
    ours = torch.nn.Parameter(start.clone())
    theirs = torch.nn.Parameter(start.clone())
    repeat(bf16_adamw([ours], lr=3e-4, weight_decay=0.1), ours, gradients)
    with torch.compiler.set_stance("force_eager"):
        adamw = optim._AdamW([theirs], lr=3e-4, weight_decay=0.1, bf16_stochastic_round=True)
        repeat(adamw, theirs, gradients)
    moved = ours.detach().double() - start.double()
    expected = theirs.detach().double() - start.double()
    # The standard error of the difference between the means.
    error = ((moved.var(0) + expected.var(0)) / 2**14).sqrt()
    assert (error > 0).all()
    assert ((moved.mean(0) - expected.mean(0)).abs() < 5 * error).all()
    torch.testing.assert_close(moved.std(0), expected.std(0), rtol=0.2, atol=0)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_resumes_exactly(llama, batch, rounding):
    """PyTorch's own way of loading casts every state to the parameter's dtype: masters to bf16."""
    model = llama.bfloat16()
    optimizer = bf16_adamw(model, lr=1e-4, rounding=rounding, seed=1)
    train(model, optimizer, batch, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = copy.deepcopy(model)
    other = bf16_adamw(resumed, lr=1.0, rounding=rounding, seed=2)
    other.load_state_dict(torch.load(file))
    assert train(resumed, other, batch, 3) == train(model, optimizer, batch, 3)
    for p, q in zip(model.parameters(), resumed.parameters()):
        assert torch.equal(p, q)
        dtypes = {t.dtype for t in other.state[q].values() if torch.is_tensor(t)}
        assert dtypes == {torch.float32 if rounding == "master" else torch.bfloat16}


def test_states_of_another_optimizer_are_refused():
    nearest = bf16_adamw([ones(3)], lr=1.0, rounding="nearest")
    for foreign in (torch.optim.AdamW([ones(3)]), nearest):
        own = bf16_adamw([ones(3)], lr=1.0, rounding="master")
        with pytest.raises(ValueError, match="make it with the same"):
            own.load_state_dict(foreign.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_goes_on_as_the_original(copied):
    """PyTorch copies groups and states. Without the random stream no copy could step."""
    weight = ones(1000)
    optimizer = bf16_adamw([weight], lr=1e-3, seed=1)
    repeat(optimizer, weight, [0.7] * 3)
    twin = copied(optimizer)
    (other,) = twin.param_groups[0]["params"]
    repeat(optimizer, weight, [0.3] * 3)
    repeat(twin, other, [0.3] * 3)
    assert torch.equal(weight, other)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[weight][name], twin.state[other][name])


def test_a_refused_group_is_not_kept():
    """Who catches the error would train it all the same."""
    optimizer = bf16_adamw([ones(3)], lr=1e-3)
    with pytest.raises(ValueError, match="trainable weights in"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]})
    with pytest.raises(ValueError, match="rounding="):
        optimizer.add_param_group({"params": [ones(3)], "rounding": "up"})
    assert len(optimizer.param_groups) == 1


def test_the_seed_decides():
    def weights(**options):
        weight = ones(1000)
        repeat(bf16_adamw([weight], lr=1e-3, **options), weight, [1.0] * 3)
        return weight

    assert torch.equal(weights(seed=1), weights(seed=1))
    assert not torch.equal(weights(seed=1), weights(seed=2))
    assert torch.equal(weights(), weights(seed=torch.initial_seed()))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("shape", [Shape(4, 64), Shape(1, 2)])
def test_memory_as_estimated(rounding, shape):
    """Of many tokens the activations are the peak, of two the step with its fp32 copies."""
    model = model_of_shape("tiny-llama", layers=4, dtype=torch.bfloat16, device="cpu")
    optimizer = bf16_adamw(model, lr=1e-3, rounding=rounding)
    ids = torch.randint(0, 128, (shape.batch, shape.seq))

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = estimate_pure_bf16(budget_of(model, shape), model, shape, rounding=rounding)
    assert plan.peak == pytest.approx(measure(step, repeats=0).peak_bytes, rel=0.03)
    assert plan.states == state_bytes(optimizer)


def test_fp32_copies_of_one_chunk_at_a_time():
    """Of the whole parameter at once they would take eight times as much."""
    weight = ones(2**20)
    weight.grad = ones(2**20).detach()
    optimizer = bf16_adamw([weight], lr=1e-3)
    optimizer.step()
    with PeakMemory() as memory:
        before = memory.current
        optimizer.step()
    expected = pure_bf16.STEP_BYTES["stochastic"] * 2**17
    assert memory.peak - before == pytest.approx(expected, rel=0.01)


def test_groups_closures_and_frozen_parameters():
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    first = ones(3)
    second = ones(3)
    groups = [{"params": [frozen, first], "rounding": "master"}, {"params": [second]}]
    optimizer = bf16_adamw(groups, lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = ((frozen - first - second) ** 2).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert optimizer.state[first]["master"].dtype is torch.float32
    assert "master" not in optimizer.state[second]
    assert frozen not in optimizer.state


def test_bad_input(llama):
    shape = Shape(1, 2)
    with pytest.raises(ValueError, match=r"call model\.to\(torch\.bfloat16\)"):
        bf16_adamw(llama, lr=1e-3)
    with pytest.raises(ValueError, match=r"call model\.to\(torch\.bfloat16\)"):
        estimate_pure_bf16(budget_of(llama, shape), llama, shape, rounding="master")
    with pytest.raises(ValueError, match="choose one of stochastic, nearest, master"):
        bf16_adamw([ones(3)], lr=1e-3, rounding="up")
    with pytest.raises(ValueError, match=r"seed=1\.5: give a whole number"):
        bf16_adamw([ones(3)], lr=1e-3, seed=1.5)
    for wrong in ({"lr": -1e-3}, {"lr": torch.nan}, {"eps": "3"}, {"betas": (0.9, 1.0)}):
        with pytest.raises(ValueError, match="give a finite number"):
            bf16_adamw([ones(3)], **{"lr": 1e-3} | wrong)
    with pytest.raises(ValueError, match="no trainable parameter"):
        bf16_adamw(llama.requires_grad_(False), lr=1e-3)


@pytest.mark.gpu
def test_on_gpu():
    weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device="cuda"))
    optimizer = bf16_adamw([weight], lr=1e-4)
    repeat(optimizer, weight, [0.5] * 100)
    assert weight.float().mean().item() == pytest.approx(0.99, abs=1e-3)
    optimizer.load_state_dict(optimizer.state_dict())
    repeat(optimizer, weight, [torch.nan])
    assert weight.isnan().all()
