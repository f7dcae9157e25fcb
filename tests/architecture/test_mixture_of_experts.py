import copy

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.architecture.mixture_of_experts import (
    Grouped,
    apply_grouped_experts,
    experts_of,
    grouped_experts,
    looped_experts,
    predicted_bytes,
    predicted_parameters,
    small_mixture,
)
from recipes_lib.architecture.mixture_of_experts.parallel import (
    apply_expert_parallel,
    average_gradients,
)
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.mixins import take_out
from recipes_lib.core.ranks import rank
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.gradient_norm import clip_gradients
from recipes_lib.core.ranks.measured_bytes import rank_bytes
from recipes_lib.core.ranks.traffic import count_traffic
from recipes_lib.core.ranks.weighted_step import counted_tokens, rank_rows
from tests.conftest import assert_near, run
from tests.families.configs import tiny_model
from tests.parallel.parity import (
    MAX_NORM,
    ROWS,
    TOKENS,
    TOLERANCE,
    VOCABULARY,
    Run,
    global_batch,
    largest_difference,
    sgd,
    whole_parameters,
)

ACTIVE = 2


def tiny_mixture(seed=0):
    """Two blocks with eight experts each, in the vocabulary of the parity tests."""
    return small_mixture(vocabulary=VOCABULARY, seed=seed)


# --- grouped products -----------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "width"), [(7, 32), (1, 32), (0, 32), (7, 13)])
def test_grouped_is_the_loop(tokens, width):
    """Also without tokens, and for rows that no grouped product takes. Most experts get none."""
    x = torch.randn(tokens, 64)
    gate_up = torch.randn(8, 2 * width, 64) / 8
    down = torch.randn(8, 64, width) / 8
    chosen = torch.tensor([[5, 2]]).expand(tokens, 2).clone()
    chosen[:3, 0] = 7
    shares = torch.rand(tokens, 2)
    results = []
    for compute in (looped_experts, grouped):
        leaves = [each.clone().requires_grad_() for each in (x, shares, gate_up, down)]
        y = compute(leaves[0], chosen, *leaves[1:])
        y.square().sum().backward()
        results.append({str(i): leaf.grad for i, leaf in enumerate(leaves)} | {"y": y.detach()})
    assert_near(results[1], results[0], 1e-6)


def grouped(x, chosen, shares, gate_up, down):
    def gate(both):
        first, second = both.chunk(2, dim=-1)
        return nn.functional.silu(first) * second

    return grouped_experts(x, chosen, shares, gate_up, down, gate=gate)


def test_without_a_grouped_product_of_pytorch(monkeypatch):
    """The model computes what it did, and again after it is removed."""
    model = small_mixture()
    batch = {"input_ids": torch.randint(0, 128, (3, 11))}
    batch["labels"] = batch["input_ids"]
    model.set_experts_implementation("eager")
    expected = run(model, batch)
    monkeypatch.delattr(nn.functional, "grouped_mm")
    apply_grouped_experts(model)
    assert_near(run(model, batch), expected, 1e-5)
    take_out(model, Grouped)
    assert_near(run(model, batch), expected, 0)


def test_experts_are_cast_under_autocast(monkeypatch):
    """transformers' own grouped product stays in fp32 there, where a linear layer does not."""
    model = small_mixture()
    ids = torch.randint(0, 128, (2, 5))
    dtypes = []
    product = nn.functional.grouped_mm

    def noted(x, weights, **options):
        dtypes.append((x.dtype, weights.dtype))
        return product(x, weights, **options)

    monkeypatch.setattr(nn.functional, "grouped_mm", noted)
    found = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=ids)
        found.append(set(dtypes))
        dtypes.clear()
        if len(found) == 1:
            apply_grouped_experts(model, check=False)
    assert found == [{(torch.float32, torch.float32)}, {(torch.bfloat16, torch.bfloat16)}]


# --- experts shared by ranks ----------------------------------------------------------------------


def train_alone(steps):
    """The reference."""
    model = tiny_mixture()
    updates = sgd(model.parameters())
    losses = []
    for step in range(steps):
        loss = model(**global_batch(step), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        updates.step()
        updates.zero_grad()
        losses.append(loss.item())
    return Run(losses, whole_parameters(model))


def train_shared(steps, *, wrapped=False):
    """On ranks, of which only the first has the weights of the reference."""
    model = apply_expert_parallel(tiny_mixture(seed=rank()))
    called = model
    if wrapped:
        called = DistributedDataParallel(model)
    ranks = dist.get_world_size()
    updates = sgd(model.parameters())
    losses = []
    for step in range(steps):
        batch = global_batch(step)
        rows = rank_rows(ROWS)
        mine = {name: tensor[rows] for name, tensor in batch.items()}
        count = counted_tokens(mine["labels"]) / ranks
        with count_traffic() as traffic:
            loss = called(**mine, use_cache=False, num_items_in_batch=count).loss
            loss.backward()
        if not wrapped:
            average_gradients(model)
        clip_gradients(model.parameters(), MAX_NORM)
        updates.step()
        held = rank_bytes(model)
        updates.zero_grad()
        losses.append(sums_over_ranks(loss.item())[0] / ranks)
    return Run(losses, whole_parameters(model)), held, traffic


def check_in_one_go():
    """On ranks: two trainings, and a block whose tokens all go to the experts of one rank."""
    return {
        "shared": train_shared(4),
        "wrapped": train_shared(2, wrapped=True)[0],
        "one-sided": one_sided(),
    }


def one_sided():
    """On ranks: the largest difference of a block's output and gradients, if rank 1 gets no row."""
    whole = tiny_mixture()
    shared = apply_expert_parallel(copy.deepcopy(whole))
    x = torch.randn(5, 64)
    chosen = torch.tensor([[0, 1]]).expand(5, 2)
    shares = torch.rand(5, 2)
    results = []
    for model in (whole, shared):
        experts = experts_of(model)[0]
        rows = x.clone().requires_grad_()
        y = experts(rows, chosen, shares)
        y.square().sum().backward()
        gradient = experts.down_proj.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        results.append([y.detach(), rows.grad, gradient])
    # All ranks have given the same rows, so the mean over ranks is that of one.
    differences = [(a - b).abs().max().item() for a, b in zip(*results, strict=True)]
    return max(differences)


def test_shared_experts_train_as_in_one_process(two_ranks):
    """Bytes and traffic are as predicted: of all experts a part, of all tokens some leave."""
    got = two_ranks.run(check_in_one_go)
    run_of_ranks, held, traffic = got["shared"]
    assert largest_difference(run_of_ranks, train_alone(4)) < TOLERANCE
    assert largest_difference(got["wrapped"], train_alone(2)) < TOLERANCE
    assert got["one-sided"] < 1e-6

    model = tiny_mixture()
    predicted = predicted_bytes(model, ranks=2)
    assert held.parameters == predicted["weights"]
    assert held.gradients == predicted["gradients"]
    # k rows of each token there and back, in forward and backward, of which half stay.
    rows = 2 * 4 * ACTIVE * ROWS // 2 * TOKENS
    assert traffic.sent_by_kind["all_to_all"] == pytest.approx(rows * 4 * 64 / 2, rel=0.15)


# --- what it refuses ------------------------------------------------------------------------------


def test_bad_use_raises():
    """The mistakes: a dense model without a word, biases left out."""
    with pytest.raises(ValueError, match="has no experts"):
        apply_grouped_experts(model_of_shape("tiny-llama", device="cpu"))
    with pytest.raises(ValueError, match="has_bias"):
        apply_grouped_experts(tiny_model("gpt_oss"))


# --- the arithmetic -------------------------------------------------------------------------------


def test_all_experts_take_memory_and_the_active_ones_count_as_active():
    """The mistake: only the active experts take memory, or the router counts as an expert."""
    few = small_mixture(experts=4)
    many = small_mixture(experts=16)
    assert predicted_parameters(many).experts == 4 * predicted_parameters(few).experts
    for model in (few, many):
        sizes = predicted_parameters(model)
        assert sizes.total == sum(parameter.numel() for parameter in model.parameters())
        assert predicted_bytes(model)["weights"] == rank_bytes(model).parameters
        met = sizes.active - (sizes.total - sizes.experts)
        assert met == predicted_parameters(few).experts // 2


@pytest.mark.gpu
def test_grouped_is_the_loop_on_gpu():
    """In bf16, which is what the grouped product of a GPU is for."""
    model = small_mixture().cuda()
    batch = {"input_ids": torch.randint(0, 128, (3, 11), device="cuda")}
    batch["labels"] = batch["input_ids"]
    model.set_experts_implementation("eager")
    with torch.autocast("cuda", torch.bfloat16):
        expected = run(model, batch)
        got = run(apply_grouped_experts(model), batch)
    assert_near(got, expected, 0.03)
