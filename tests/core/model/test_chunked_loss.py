"""Losses in chunks: the gradients that any of them would give, by one whose gradient is simple."""

from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.measure import dry_run
from recipes_lib.core.model import chunked_loss
from recipes_lib.core.model.chunked_loss import (
    ChunkPlan,
    LayerProducts,
    LossWithGradients,
    check_labels,
    divisor_of_mean,
    dtype_of_products,
    rows_of_a_chunk,
    rows_with_a_target,
    zero_gradients,
)

ROWS = torch.tensor([0, 2, 3, 6, 7, 8, 10])  # of 11 tokens; four have no target


class HalfOfSquares(LossWithGradients):
    """The sum of logits² / 2 over a divisor. The gradient of the logits is the logits."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, divisor, plan, training):
        gradients = zero_gradients(ctx, hidden, weight, bias, plan, training=training)
        layer = LayerProducts(weight, bias, plan.products)
        room = layer.room(plan.rows)
        total = hidden.new_zeros((), dtype=plan.sums)
        for index in rows.split(plan.rows):
            inputs = hidden[index].to(plan.products)
            logits = layer.logits(inputs, out=room[: len(index)])
            total += logits.to(plan.sums).square().sum() / 2
            gradients.add_chunk_(index, logits, inputs, layer.factors)
        ctx.divisor = divisor
        ctx.gradients = gradients
        return total / divisor


def plan_of(products, sums, weight_sums, rows=3):
    return ChunkPlan(rows, 1, products=products, sums=sums, weight_sums=weight_sums)


def make_tensors(dtype, *, bias=True):
    """hidden [11, 5], weight [13, 5] and bias [13], all of which train."""
    tensors = [torch.randn(11, 5), torch.randn(13, 5)]
    if bias:
        tensors.append(torch.randn(13))
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def expected_of(tensors, divisor, factor):
    """Loss and gradients in fp64, by autograd, with all logits at once."""
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    logits = torch.nn.functional.linear(exact[0][ROWS], *exact[1:])
    loss = logits.square().sum() / 2 / divisor
    return [loss.detach(), *torch.autograd.grad(loss * factor, exact)]


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "sums", "weight_sums", "tolerance", "bias"),
    [
        (torch.float64, torch.float64, torch.float64, 1e-12, True),
        (torch.bfloat16, torch.float32, torch.float32, 2e-2, True),  # products are added in fp32
        (torch.bfloat16, torch.float32, torch.bfloat16, 2e-2, False),
    ],
)
def test_gradients_of_all_chunks(dtype, sums, weight_sums, tolerance, bias):
    """Three chunks, the last one of one row: one that overwrites the others, or a lost factor."""
    tensors = make_tensors(dtype, bias=bias)
    given = [*tensors, None][:3]
    plan = plan_of(dtype, sums, weight_sums)
    loss = HalfOfSquares.apply(*given, ROWS, torch.tensor(5), plan, True)
    assert loss.dtype == sums
    got = [loss.detach(), *torch.autograd.grad(loss * 0.7, tensors)]
    assert [gradient.dtype for gradient in got[1:]] == [dtype] * len(tensors)
    for ours, exact in zip(got, expected_of(tensors, 5, 0.7), strict=True):
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < tolerance
    without_target = [row for row in range(11) if row not in ROWS]
    assert got[1][without_target].count_nonzero() == 0


def test_what_does_not_train_has_no_gradient():
    """The gradient of a frozen output layer would be as large as the layer."""
    hidden, weight, bias = make_tensors(torch.float32)
    weight.requires_grad_(False)
    plan = plan_of(torch.float32, torch.float32, torch.float32)
    loss = HalfOfSquares.apply(hidden, weight, bias, ROWS, torch.tensor(5), plan, True)
    kept = loss.grad_fn.gradients
    assert kept.weight is None
    assert kept.hidden.shape == hidden.shape and kept.bias.shape == bias.shape
    loss.backward()
    assert weight.grad is None

    ctx = SimpleNamespace(needs_input_grad=(True, True, True))
    in_no_grad = zero_gradients(ctx, hidden, weight, bias, plan, training=False)
    assert [*in_no_grad] == [None, None, None]


# --- which tokens count ---------------------------------------------------------------------------


def test_rows_and_divisor():
    labels = torch.tensor([[5, -100, 7], [-100, 0, -100]])
    assert rows_with_a_target(labels, -100).tolist() == [0, 2, 4]
    assert rows_with_a_target(labels, 0).tolist() == [0, 1, 2, 3, 5]
    assert divisor_of_mean(3, None) == 3
    assert divisor_of_mean(3, torch.tensor([8])) == 8  # as the Trainer gives it
    assert divisor_of_mean(0, 8) == 8, "a micro-batch without a target adds nothing"
    with pytest.raises(ValueError, match="a mean over 0 targets"):
        divisor_of_mean(0, None)
    with dry_run():
        assert rows_with_a_target(torch.zeros(2, 3), -100).shape == (6,)


def test_labels_outside_of_the_vocabulary():
    check_labels(torch.tensor([0, 8]), 9, -100)
    with pytest.raises(ValueError, match="in the vocabulary of 9 nor -100"):
        check_labels(torch.tensor([0, 9]), 9, -100)


# --- the plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "native", "expected"),
    [
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, True, torch.float32),  # for fp16 no CPU here has units
        (torch.float64, False, torch.float64),
    ],
)
def test_dtype_of_products(monkeypatch, dtype, native, expected):
    """On a CPU without units a 16-bit product takes tens of times as long."""
    monkeypatch.setattr(chunked_loss, "machine", lambda: SimpleNamespace(native_bf16=native))
    tensor = torch.zeros(2, 2, dtype=dtype)
    assert dtype_of_products(tensor, tensor, "cpu") == expected
    assert dtype_of_products(tensor, tensor, "cuda") == dtype
    with torch.autocast("cpu", torch.bfloat16):
        narrow = torch.bfloat16 if native else torch.float32
        if dtype == torch.float64:
            narrow = dtype  # which autocast leaves alone
        assert dtype_of_products(tensor, tensor, "cpu") == narrow


def test_rows_of_a_chunk():
    def rows(vocabulary, dtype=torch.float32, chunk_size=None):
        return rows_of_a_chunk(vocabulary, dtype, chunk_size=chunk_size, most_bytes=2**26)

    assert rows(49152) == 320
    assert rows(49152, torch.bfloat16) == 640
    assert rows(2**22) == 64  # however large the vocabulary is
    assert rows(49152, chunk_size=5) == 5
    assert rows(2**20, chunk_size=10**6) * 2**20 < 2**31  # kernels count in 32 bits
