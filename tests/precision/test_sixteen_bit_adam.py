"""AdamW with bf16 states follows fp32 AdamW, also where the gradients shrink."""

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
from recipes_lib.precision import sixteen_bit_adam as module
from recipes_lib.precision._rounding import stochastic_round_
from recipes_lib.precision.pure_bf16 import bf16_adamw
from recipes_lib.precision.sixteen_bit_adam import (
    estimate_sixteen_bit_adam,
    plain_sixteen_bit_step,
    predicted_state_bytes,
    predicted_step_bytes,
    sixteen_bit_adamw,
)


def ones(*shape, **options):
    return torch.nn.Parameter(torch.ones(shape, **options))


def repeat(optimizer, weight, gradient, steps):
    for _ in range(steps):
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


# --- the idea -------------------------------------------------------------------------------------


def test_equals_the_plain_step(monkeypatch):
    """Given the same random bits. Of the averages, the last bit may differ: AdamW is fused here."""
    drawn = []

    def recorded(values, bits):
        drawn.append(bits.clone())
        return stochastic_round_(values, bits)

    monkeypatch.setattr(module, "stochastic_round_", recorded)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    weight = torch.nn.Parameter(torch.randn(1000))
    optimizer = sixteen_bit_adamw([weight], **options)
    plain = weight.detach().clone()
    exp_avg = torch.zeros(1000, dtype=torch.bfloat16)
    exp_avg_sq = torch.zeros(1000, dtype=torch.bfloat16)
    for step in range(1, 11):
        weight.grad = torch.randn(1000)
        optimizer.step()
        plain_sixteen_bit_step(
            plain, weight.grad, exp_avg, exp_avg_sq, step=step, bits=drawn[-1], **options
        )
    assert len(drawn) == 10  # one of the two averages is rounded stochastically
    torch.testing.assert_close(weight.detach(), plain, rtol=0, atol=1e-4)
    state = optimizer.state[weight]
    torch.testing.assert_close(state["exp_avg"], exp_avg, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(state["exp_avg_sq"], exp_avg_sq, rtol=2**-7, atol=0)


# --- the averages ---------------------------------------------------------------------------------


def test_the_second_average_falls_when_gradients_shrink():
    """100 gradients of 1, then 500 of 0.1. Rounded to nearest the average stays where it was."""
    weight = ones(4096)
    optimizer = sixteen_bit_adamw([weight], lr=0.0, seed=0)
    exact = torch.zeros(())
    nearest = torch.zeros((), dtype=torch.bfloat16)
    for gradient, steps in ((1.0, 100), (0.1, 500)):
        repeat(optimizer, weight, gradient, steps)
        top = nearest.clone()
        for _ in range(steps):
            exact = 0.999 * exact + 0.001 * gradient**2
            nearest = (0.999 * nearest.float() + 0.001 * gradient**2).bfloat16()
    stored = optimizer.state[weight]["exp_avg_sq"]
    assert stored.dtype is torch.bfloat16
    assert stored.float().mean().item() == pytest.approx(exact.item(), rel=0.005)
    assert nearest == top and nearest > 1.5 * exact


def test_no_element_is_rounded_by_the_same_bits_in_each_step():
    """The mistake: one set of bits for all steps. The mean would be right, and no element."""
    weight = ones(4096)
    optimizer = sixteen_bit_adamw([weight], lr=0.0, seed=0)
    repeat(optimizer, weight, 1.0, 1)
    repeat(optimizer, weight, 0.0, 600)
    stored = optimizer.state[weight]["exp_avg_sq"].double()
    expected = 0.001 * 0.999**600
    # Each rounding adds a variance of at most (spacing / 2) ** 2, and 600 of them a standard
    # deviation of at most sqrt(600) / 2**8, about a tenth. Of the mean it is a 64th of that.
    assert (stored.std() / expected).item() < 0.1
    assert stored.mean().item() == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(("beta1", "tolerance"), [(0.9, 0.04), (0.99, 0.01)])
def test_the_first_average_follows_the_gradients(beta1, tolerance):
    """From 1 to 0.3. To nearest, with beta1 0.99, it would stay 0.39 of its value away."""
    weight = ones(4096)
    optimizer = sixteen_bit_adamw([weight], lr=0.0, betas=(beta1, 0.999), seed=0)
    repeat(optimizer, weight, 1.0, 1000)
    repeat(optimizer, weight, 0.3, 1000)
    assert optimizer.state[weight]["exp_avg"].float().mean().item() == pytest.approx(
        0.3, rel=tolerance
    )


def test_trains_as_fp32_adamw(llama, batch):
    """200 steps with gradients that shrink as the loss does."""
    reference = copy.deepcopy(llama)
    options = {"lr": 1e-3, "weight_decay": 0.01}
    start = train(llama, None, batch, 0)
    expected = train(reference, torch.optim.AdamW(reference.parameters(), **options), batch, 200)
    loss = train(llama, sixteen_bit_adamw(llama, **options), batch, 200)
    assert expected < 0.5 * start
    assert loss == pytest.approx(expected, rel=0.05)


# --- the optimizer --------------------------------------------------------------------------------


def without_rounding(monkeypatch):
    """fp32 states, nothing rounded: what is left has to be AdamW."""

    def first_state(parameter):
        return {
            "step": 0,
            "exp_avg": torch.zeros(parameter.shape),
            "exp_avg_sq": torch.zeros(parameter.shape),
        }

    monkeypatch.setattr(module, "_first_state", first_state)
    monkeypatch.setattr(module, "stochastic_round_", lambda values, bits: values)


@pytest.mark.parametrize("chunk", [2**20, 1000, 7])
def test_every_element_is_updated_once(chunk, monkeypatch):
    """Small tensors share a batch, large ones are cut; some have no gradient, or another step."""
    without_rounding(monkeypatch)
    monkeypatch.setattr(module, "_chunk", lambda device: chunk)
    start = [torch.randn(40, 30), torch.randn(30, 20).t(), torch.randn(()), torch.randn(0)]
    start += [torch.randn(3) for _ in range(5)]
    weights = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    others = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    assert not weights[1].is_contiguous()
    optimizers = []
    for parameters, make in ((weights, sixteen_bit_adamw), (others, torch.optim.AdamW)):
        groups = [{"params": parameters[:3], "weight_decay": 0.1}, {"params": parameters[3:]}]
        optimizers.append(make(groups, lr=1e-2, betas=(0.8, 0.99)))
    for step in range(4):
        for number, (ours, theirs) in enumerate(zip(weights, others)):
            ours.grad = None
            if number != 5 + step % 2:
                ours.grad = torch.randn(ours.shape)
            theirs.grad = ours.grad
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(weights, others):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_closures_schedules_and_a_scaler():
    """The mistake: a step that the scaler skips, or a learning rate that the step ignores."""
    weight = ones(3)
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    optimizer = sixteen_bit_adamw([frozen, weight], lr=0.1, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.9))
    schedule.step()
    optimizer.step(closure)
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.85), rtol=0, atol=1e-3)

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = weight.detach().clone()
    scaler.scale((weight * torch.inf).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(weight, before) and optimizer.state[weight]["step"] == 2
    assert frozen not in optimizer.state


def test_resumes_exactly_in_bf16(llama, batch):
    """PyTorch's own way of loading casts the states to fp32: twice the bytes, and no error."""
    optimizer = sixteen_bit_adamw(llama, lr=1e-3, seed=1)
    train(llama, optimizer, batch, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = copy.deepcopy(llama)
    other = sixteen_bit_adamw(resumed, lr=1.0, seed=2)
    other.load_state_dict(torch.load(file))
    assert state_bytes(other) == predicted_state_bytes(llama)
    assert train(resumed, other, batch, 3) == train(llama, optimizer, batch, 3)
    for ours, theirs in zip(llama.parameters(), resumed.parameters()):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_goes_on_as_the_original(copied):
    """PyTorch copies groups and states. Without the random stream no copy could step."""
    weight = ones(1000)
    optimizer = sixteen_bit_adamw([weight], lr=1e-3, seed=1)
    repeat(optimizer, weight, 0.7, 3)
    twin = copied(optimizer)
    (other,) = twin.param_groups[0]["params"]
    repeat(optimizer, weight, 0.3, 3)
    repeat(twin, other, 0.3, 3)
    assert torch.equal(weight, other)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[weight][name], twin.state[other][name])


def test_a_refused_group_is_not_kept():
    """Who catches the error would train it all the same."""
    optimizer = sixteen_bit_adamw([ones(3)], lr=1e-3)
    with pytest.raises(ValueError, match="trainable weights in"):
        optimizer.add_param_group({"params": [ones(4, dtype=torch.bfloat16)]})
    with pytest.raises(ValueError, match="lr=-1"):
        optimizer.add_param_group({"params": [ones(3)], "lr": -1.0})
    assert len(optimizer.param_groups) == 1


def test_the_seed_decides():
    def stored(**options):
        weight = ones(1000)
        optimizer = sixteen_bit_adamw([weight], lr=1e-3, **options)
        repeat(optimizer, weight, 0.7, 3)
        return optimizer.state[weight]["exp_avg_sq"]

    assert torch.equal(stored(seed=1), stored(seed=1))
    assert not torch.equal(stored(seed=1), stored(seed=2))
    assert torch.equal(stored(), stored(seed=torch.initial_seed()))


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [Shape(4, 64), Shape(1, 2)])
def test_memory_as_estimated(shape):
    """Of many tokens the activations are the peak, of two the step."""
    model = model_of_shape("tiny-llama", layers=4, device="cpu")
    optimizer = sixteen_bit_adamw(model, lr=1e-3)
    ids = torch.randint(0, 128, (shape.batch, shape.seq))

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = estimate_sixteen_bit_adam(budget_of(model, shape), model, shape)
    assert plan.peak == pytest.approx(measure(step, repeats=0).peak_bytes, rel=0.02)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert state_bytes(optimizer) == plan.states == 4 * parameters


def test_a_step_needs_room_for_one_chunk():
    """Of the whole parameter at once it would be four times as much."""
    model = torch.nn.Linear(2**12, 2**10, bias=False)
    optimizer = sixteen_bit_adamw(model, lr=1e-3)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    with PeakMemory() as memory:
        before = memory.current
        optimizer.step()
    assert predicted_step_bytes(model) == 16 * 2**20
    assert memory.peak - before == pytest.approx(predicted_step_bytes(model), rel=0.001)


def test_transposed_weights_are_copied_one_at_a_time():
    """All at once they would take as much again as all gradients."""
    model = torch.nn.ParameterList(torch.randn(2**10, 2**10).t() for _ in range(3))
    optimizer = sixteen_bit_adamw(model, lr=1e-3)
    for weight in model:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    with PeakMemory() as memory:
        before = memory.current
        optimizer.step()
    assert predicted_step_bytes(model) == (16 + 8) * 2**20
    assert memory.peak - before == pytest.approx(predicted_step_bytes(model), rel=0.001)


# --- guards ---------------------------------------------------------------------------------------


def test_bad_input(llama):
    shape = Shape(1, 2)
    half = copy.deepcopy(llama).bfloat16()
    with pytest.raises(ValueError, match=r"model\.float\(\).*pure_bf16\.bf16_adamw"):
        sixteen_bit_adamw(half, lr=1e-3)
    with pytest.raises(ValueError, match=r"model\.float\(\).*pure_bf16\.bf16_adamw"):
        estimate_sixteen_bit_adam(budget_of(half, shape), half, shape)
    with pytest.raises(ValueError, match=r"beta2=1\.0: give a finite number"):
        sixteen_bit_adamw(llama, lr=1e-3, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="lr=-1"):
        sixteen_bit_adamw(llama, lr=-1.0)
    for seed in (1.5, "a", -1, 2**64):
        with pytest.raises(ValueError, match="seed="):
            sixteen_bit_adamw(llama, lr=1e-3, seed=seed)
    sharded = ones(3)
    sharded.device_mesh = "as a DTensor has one"
    with pytest.raises(ValueError, match="sharded parameters"):
        sixteen_bit_adamw([sharded], lr=1e-3)
    with pytest.raises(ValueError, match="no trainable parameter"):
        sixteen_bit_adamw(llama.requires_grad_(False), lr=1e-3)


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = sixteen_bit_adamw(embedding, lr=1e-3)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


def test_states_of_another_optimizer_are_refused():
    adamw = torch.optim.AdamW([ones(3)], lr=1e-3)
    own = sixteen_bit_adamw([ones(3)], lr=1e-3)
    with pytest.raises(ValueError, match="another optimizer"):
        own.load_state_dict(adamw.state_dict())


def test_states_of_bf16_adamw_are_refused():
    """They look the same, and bring another learning rate along."""
    weight = ones(3, dtype=torch.bfloat16)
    other = bf16_adamw([weight], lr=1e-3)
    repeat(other, weight, 0.5, 1)
    own = sixteen_bit_adamw([ones(3)], lr=1e-3)
    with pytest.raises(ValueError, match="another optimizer"):
        own.load_state_dict(other.state_dict())


@pytest.mark.gpu
def test_on_gpu():
    weight = ones(4096, device="cuda")
    small = ones(3, device="cuda")
    optimizer = sixteen_bit_adamw([weight, small], lr=0.0, seed=0)
    small.grad = torch.ones_like(small)
    repeat(optimizer, weight, 1.0, 100)
    repeat(optimizer, weight, 0.1, 500)
    expected = 0.01 + 0.999**500 * (1 - 0.999**100 - 0.01)
    stored = optimizer.state[weight]["exp_avg_sq"].float().mean().item()
    assert stored == pytest.approx(expected, rel=0.005)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[small]["exp_avg"].dtype is torch.bfloat16
    repeat(optimizer, weight, torch.nan, 1)
    assert weight.isnan().all() and not small.isnan().any()
