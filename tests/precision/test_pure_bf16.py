import copy
import io

import pytest
import torch

from recipes_lib.core.measure import PeakMemory, measure
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.precision import pure_bf16
from recipes_lib.precision.pure_bf16 import (
    bf16_adamw,
    estimate_pure_bf16,
    random_bits,
    stochastic_round,
)
from tests.conftest import make_batch

ROUNDINGS = ["stochastic", "nearest", "master"]


def ones(*shape):
    return torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))


def repeat(optimizer, weight, gradients):
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


def round_in_all_ways(value):
    """[2**16]: one fp32 number, rounded with each of the possible random numbers."""
    return stochastic_round(
        value.repeat(2**16), torch.arange(2**16, dtype=torch.int32, device=value.device)
    )


@pytest.mark.parametrize(
    "value", [1.2345, 0.9999, 3e38, 1e-30, 1.1e-38, 3e-40, 1e-45, 1.0, 0.0, 2.0**127]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_mean_over_all_random_numbers_is_the_value_exactly(value, sign):
    value = torch.tensor(sign * value)
    rounded, nearest = round_in_all_ways(value), value.bfloat16()
    assert rounded.dtype is torch.bfloat16 and torch.equal(rounded.double().mean(), value.double())
    if nearest == value:
        assert torch.equal(rounded.unique(), nearest[None])
    else:
        across = nearest.nextafter(
            torch.tensor(torch.inf if nearest < value else -torch.inf).bfloat16()
        )
        assert torch.equal(rounded.unique(), torch.stack([nearest, across]).sort().values)


def check_edge_cases(device):
    nan = [
        0x7FFFFFFF,
        -1,
        0x7FC00000,
        0x7FFFFFFF - 2**15,
    ]  # the first is CUDA's, the second its negative
    for number in torch.tensor(nan, dtype=torch.int32, device=device).view(torch.float32):
        assert round_in_all_ways(number).isnan().all()
    limit = torch.finfo(torch.bfloat16).max
    for number in torch.tensor([torch.inf, -torch.inf, limit, -limit, -0.0], device=device):
        rounded = round_in_all_ways(number)
        assert (
            rounded.view(torch.int16) == number.bfloat16().view(torch.int16)
        ).all()  # the bits: 0 equals -0
    beyond = torch.tensor(torch.finfo(torch.float32).max, device=device)
    assert set(round_in_all_ways(beyond).tolist()) == {limit, torch.inf}


def test_nan_infinities_and_the_largest_numbers():
    check_edge_cases("cpu")


@pytest.mark.parametrize("count", [0, 1, 6, 40_000])
def test_random_bits(count):
    bits, again = (random_bits(count, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert bits.shape == (count,) and torch.equal(bits, again)
    for lane in (
        bits.view(4, -1) if count == 40_000 else []
    ):  # each quarter of the 64-bit numbers, all 16 bits of it
        shares = torch.stack([(lane >> bit & 1).float().mean() for bit in range(32)])
        assert ((shares[:16] - 0.5).abs() < 5 * 0.5 / 100).all() and not shares[16:].any()


def test_a_weight_of_one_and_a_small_learning_rate():
    """100 steps of 1e-4 move an fp32 weight by 0.01. In bf16 each is a 39th of the spacing below 1."""
    reference = torch.nn.Parameter(torch.ones(4096))
    repeat(torch.optim.AdamW([reference], lr=1e-4, fused=True), reference, [0.5] * 100)
    assert reference[0].item() == pytest.approx(0.99, abs=1e-3)
    weights = {rounding: ones(4096) for rounding in ROUNDINGS}
    for rounding, weight in weights.items():
        repeat(bf16_adamw([weight], lr=1e-4, rounding=rounding, seed=0), weight, [0.5] * 100)
    assert torch.equal(weights["nearest"], ones(4096))
    assert torch.equal(weights["master"], reference.bfloat16())
    # 2.6 moves of 1/256 are expected of each: the standard error of the mean of 4,096 is 1e-4.
    assert weights["stochastic"].float().mean().item() == pytest.approx(
        reference[0].item(), abs=5e-4
    )


def test_weight_and_averages_are_rounded_independently():
    repeat(optimizer := bf16_adamw([weight := ones(2**14)], lr=2e-3, seed=0), weight, [0.7])
    rounded = [
        weight.detach(),
        optimizer.state[weight]["exp_avg"],
        optimizer.state[weight]["exp_avg_sq"],
    ]
    correlation = torch.corrcoef(torch.stack(rounded).double())
    torch.testing.assert_close(correlation, torch.eye(3).double(), rtol=0, atol=5 / 2**7)


def test_the_second_average_can_fall():
    """After 300 gradients of 1 come 1,500 of 0.1. With lr 0 the weights stay, whatever is drawn."""
    before, after = {}, {}
    for rounding in ROUNDINGS:
        optimizer = bf16_adamw([weight := ones(4096)], lr=0.0, rounding=rounding, seed=0)
        for gradient, steps, result in ((1.0, 300, before), (0.1, 1500, after)):
            repeat(optimizer, weight, [gradient] * steps)
            result[rounding] = optimizer.state[weight]["exp_avg_sq"].float().mean().item()
        assert torch.equal(weight, ones(4096))
    assert after["stochastic"] == pytest.approx(after["master"], rel=0.02)
    assert after["master"] < 0.3 * before["master"] and after["nearest"] == before["nearest"]


@pytest.mark.parametrize("rounding", ["nearest", "master"])
@pytest.mark.parametrize("chunk", [2**17, 1000])
def test_equals_torch_adamw(tiny, rounding, chunk, monkeypatch):
    """Bit for bit, with the same gradients: "nearest" a bf16 model under fused AdamW, "master" an fp32 copy."""
    monkeypatch.setattr(pure_bf16, "_chunk", lambda p: chunk)
    model, batch, options = (
        tiny.bfloat16(),
        make_batch(),
        {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.99)},
    )
    reference = copy.deepcopy(model).to(torch.bfloat16 if rounding == "nearest" else torch.float32)
    adamw = torch.optim.AdamW(reference.parameters(), fused=True, **options)
    optimizer = bf16_adamw(model, rounding=rounding, **options)
    for _ in range(20):
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
    model, options = llama.bfloat16(), {"lr": 1e-5, "weight_decay": 0.0}
    start, reference = train(model, None, batch, 0), copy.deepcopy(model).float()
    best = start - train(reference, torch.optim.AdamW(reference.parameters(), **options), batch, 40)
    gained = {}
    for rounding in ROUNDINGS:
        student = copy.deepcopy(model)
        gained[rounding] = start - train(
            student, bf16_adamw(student, rounding=rounding, **options), batch, 40
        )
    assert gained["stochastic"] == pytest.approx(best, rel=0.1) and best > 0.05
    assert gained["master"] == pytest.approx(best, rel=0.1)
    assert gained["nearest"] < 0.5 * best


def test_updates_are_distributed_as_those_of_torchao():
    """20 steps of 16 weights, each 16,384 times: the same mean and the same spread."""
    optim = pytest.importorskip("torchao.optim")
    start, gradients = (
        torch.linspace(-2, 2, 16).bfloat16().expand(2**14, 16),
        torch.randn(20, 16).bfloat16(),
    )
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    repeat(bf16_adamw([ours], lr=3e-4, weight_decay=0.1), ours, gradients)
    with torch.compiler.set_stance("force_eager"):
        adamw = optim._AdamW([theirs], lr=3e-4, weight_decay=0.1, bf16_stochastic_round=True)
        repeat(adamw, theirs, gradients)
    moved, expected = (weight.detach().double() - start.double() for weight in (ours, theirs))
    error = ((moved.var(0) + expected.var(0)) / 2**14).sqrt()  # of the difference between the means
    assert (error > 0).all() and ((moved.mean(0) - expected.mean(0)).abs() < 5 * error).all()
    torch.testing.assert_close(moved.std(0), expected.std(0), rtol=0.2, atol=0)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_resumes_exactly(llama, batch, rounding):
    model = llama.bfloat16()
    train(model, optimizer := bf16_adamw(model, lr=1e-4, rounding=rounding, seed=1), batch, 3)
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    resumed = copy.deepcopy(model)
    other = bf16_adamw(resumed, lr=1.0, rounding=rounding, seed=2)
    other.load_state_dict(torch.load(file))
    assert train(resumed, other, batch, 3) == train(model, optimizer, batch, 3)
    for p, q in zip(model.parameters(), resumed.parameters()):
        assert torch.equal(p, q)
        dtypes = {t.dtype for t in other.state[q].values() if torch.is_tensor(t)}
        assert dtypes == {torch.float32 if rounding == "master" else torch.bfloat16}
    for foreign in (
        torch.optim.AdamW([ones(3)]),
        bf16_adamw([ones(3)], lr=1.0, rounding="nearest"),
    ):
        with pytest.raises(ValueError, match="make it with the same"):
            bf16_adamw([ones(3)], lr=1.0, rounding="master").load_state_dict(foreign.state_dict())


def test_the_seed_decides():
    def weights(**options):
        repeat(bf16_adamw([weight := ones(1000)], lr=1e-3, **options), weight, [1.0] * 3)
        return weight

    assert torch.equal(weights(seed=1), weights(seed=1)) and not torch.equal(
        weights(seed=1), weights(seed=2)
    )
    assert torch.equal(weights(), weights(seed=torch.initial_seed()))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("batch_size", "seq_len"), [(4, 64), (1, 2)])
def test_memory_as_estimated(rounding, batch_size, seq_len):
    model = model_of_shape("tiny-llama", layers=4, dtype=torch.bfloat16, device="cpu")
    optimizer = bf16_adamw(model, lr=1e-3, rounding=rounding)
    ids = torch.randint(0, 128, (batch_size, seq_len))

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = estimate_pure_bf16(
        budget_of(model, batch_size=batch_size, seq_len=seq_len), model, rounding=rounding
    )
    assert plan.peak == pytest.approx(measure(step, repeats=0).peak_bytes, rel=0.03)
    tensors = [
        t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)
    ]
    assert plan.states == sum(t.untyped_storage().nbytes() for t in tensors)


def test_fp32_copies_of_one_chunk_at_a_time():
    (weight := ones(2**20)).grad = ones(2**20).detach()
    (optimizer := bf16_adamw([weight], lr=1e-3)).step()
    with PeakMemory() as memory:
        before = memory.current
        optimizer.step()
    assert memory.peak - before == pytest.approx(
        pure_bf16.STEP_BYTES["stochastic"] * 2**17, rel=0.01
    )


def test_groups_closures_and_frozen_parameters():
    frozen, first, second = torch.nn.Parameter(torch.ones(3), requires_grad=False), ones(3), ones(3)
    optimizer = bf16_adamw(
        [{"params": [frozen, first], "rounding": "master"}, {"params": [second]}], lr=1e-2
    )

    def closure():
        optimizer.zero_grad()
        (loss := ((frozen - first - second) ** 2).sum()).backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert (
        optimizer.state[first]["master"].dtype is torch.float32
        and "master" not in optimizer.state[second]
    )
    assert frozen not in optimizer.state


def test_bad_input(llama):
    budget = budget_of(llama, batch_size=1, seq_len=2)
    for call in (
        lambda: bf16_adamw(llama, lr=1e-3),
        lambda: estimate_pure_bf16(budget, llama, rounding="master"),
    ):
        with pytest.raises(ValueError, match=r"call model\.to\(torch\.bfloat16\)"):
            call()
    with pytest.raises(ValueError, match="choose one of stochastic, nearest, master"):
        bf16_adamw([ones(3)], lr=1e-3, rounding="up")
    with pytest.raises(ValueError, match="no trainable parameter"):
        bf16_adamw(llama.requires_grad_(False), lr=1e-3)


@pytest.mark.gpu
def test_on_gpu():
    check_edge_cases("cuda")
    value = torch.tensor(0.9999, device="cuda")
    assert round_in_all_ways(value).double().mean() == value.double()
    assert (
        len(random_bits(2**20, generator=torch.Generator("cuda").manual_seed(0)).unique())
        > 2**16 - 100
    )
    weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device="cuda"))
    repeat(optimizer := bf16_adamw([weight], lr=1e-4), weight, [0.5] * 100)
    assert weight.float().mean().item() == pytest.approx(0.99, abs=1e-3)
    optimizer.load_state_dict(optimizer.state_dict())
    repeat(optimizer, weight, [torch.nan])
    assert weight.isnan().all()
