"""Attention over ranks: exact forward and backward, balanced, and whole models that train."""

import copy

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.gradient_norm import clip_gradients
from recipes_lib.core.ranks.meshes import default_mesh, mesh_of
from recipes_lib.core.ranks.weighted_step import rank_rows
from recipes_lib.parallel.context_parallel import (
    apply_context_parallel,
    loss_of_all,
    shard_sequence,
    sum_gradients,
)
from recipes_lib.parallel.context_parallel.ring import (
    _merge_attention_into,
    attend_backward,
    attend_with_sums,
    ring_attention,
    tokens_of,
)
from recipes_lib.parallel.context_parallel.ulysses import ulysses_attention
from tests.conftest import assert_near
from tests.core.refusal import refusal
from tests.parallel.parity import (
    MAX_NORM,
    TOLERANCE,
    Run,
    counted_tokens,
    global_batch,
    largest_difference,
    of_all_ranks,
    sgd,
    tiny_model,
    train_alone,
    whole_parameters,
)
from tests.small_models import small_model

HEAD = 16  # E
SCALE = HEAD**-0.5

# --- exact ----------------------------------------------------------------------------------------


def inputs(heads, kv_heads, seq, dtype):
    """q, k, v and a gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(heads + kv_heads + seq)
    shapes = [(2, heads, seq, HEAD), (2, kv_heads, seq, HEAD), (2, kv_heads, seq, HEAD)]
    shapes.append(shapes[0])
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def with_gradients(attention, tensors):
    """The output, and the gradients of q, k and v."""
    *qkv, gradient = tensors
    qkv = [tensor.clone().requires_grad_() for tensor in qkv]
    out = attention(*qkv)
    out.backward(gradient)
    return [out.detach(), *[tensor.grad for tensor in qkv]]


def full_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)


def differences(cases):
    """For each case the largest difference to full attention, of out, dq, dk and dv, on any rank.

    Relative to the largest number of each.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    found = []
    for kind, heads, kv_heads, dtype in cases:
        tensors = inputs(heads, kv_heads, 12 * ranks, dtype)
        expected = with_gradients(full_attention, [tensor.double() for tensor in tensors])
        mine = tokens_of(rank, ranks, 12 * ranks, zig_zag=kind == "ring")

        def attention(q, k, v, kind=kind):
            group = distributed.group.WORLD
            if kind == "ring":
                return ring_attention(q, k, v, group=group, scale=SCALE)
            return ulysses_attention(q, k, v, group=group, scale=SCALE)

        got = with_gradients(attention, [tensor[:, :, mine] for tensor in tensors])
        worst = 0.0
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.dtype == dtype
            difference = (ours.double() - theirs[:, :, mine]).abs().max()
            worst = max(worst, (difference / theirs.abs().max()).item())
        found.append(max(of_all_ranks(worst)))
    return found


CASES = [
    # kind, heads, KV heads, dtype
    ("ring", 4, 1, torch.float32),
    ("ring", 4, 2, torch.bfloat16),
    ("ulysses", 4, 1, torch.float32),
    ("ulysses", 4, 2, torch.bfloat16),
]
# A bf16 number has 8 bits: half a step at the largest one is 0.2 %, and sums have several of them.
EXACT = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def test_attention_over_ranks_is_full_attention(four_ranks):
    """The mistakes: a mask of the wrong half, heads that meet others' keys, gradients of one block,
    or, where forward and back are not alike, as with two ranks, that come home wrongly.
    """
    for case, difference in zip(CASES, four_ranks.run(differences, cases=CASES), strict=True):
        assert difference < EXACT[case[-1]], case


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
def test_the_kernels_of_a_ring_on_a_gpu(dtype, tolerance):
    """What rank 1 of a ring of two computes, in one piece each, without sending anything.

    The mistakes: a kernel whose log-sum-exp has another form, a backward that does not take that of
    all keys. On a GPU they are other ones than on a CPU.
    """
    half = 40
    tensors = [tensor.cuda() for tensor in inputs(4, 2, 2 * half, dtype)]
    expected = with_gradients(full_attention, [tensor.double() for tensor in tensors])
    late, early = slice(half, 2 * half), slice(0, half)
    q, k, v, gradient = tensors
    q, gradient = q[:, :, late], gradient[:, :, late]
    out, sums, rest = attend_with_sums(q, k[:, :, late], v[:, :, late], causal=True, scale=SCALE)
    out = out.float()
    more = attend_with_sums(q, k[:, :, early], v[:, :, early], causal=False, scale=SCALE)
    _merge_attention_into(out, sums, *more[:2])
    out = out.to(dtype)
    assert_near({"out": out}, {"out": expected[0][:, :, late]}, tolerance)
    dq = torch.zeros_like(out, dtype=torch.float32)
    for keys, causal in ((late, True), (early, False)):
        qkv = (q, k[:, :, keys], v[:, :, keys])
        options = {"causal": causal, "scale": SCALE}
        dq += attend_backward(gradient, qkv, out, sums, rest, **options)[0]
    assert_near({"dq": dq}, {"dq": expected[1][:, :, late]}, tolerance)


# --- training -------------------------------------------------------------------------------------


def train(kind="ring", steps=2, rows_axis=None, sharded=False, copied=False):
    """The steps of `train_alone` on parts of the sequences. Returns a Run.

    With `rows_axis` two groups of two ranks share the rows, too; `sharded` has FSDP beside it;
    `copied` trains a deep copy, which computes its blocks twice.
    """
    mesh = mesh_of(replicate=2, context=2) if rows_axis else None
    model = apply_context_parallel(tiny_model(), mesh=mesh and mesh["context"], kind=kind)
    if copied:
        model = copy.deepcopy(model)
        model.gradient_checkpointing_enable()
    if sharded:
        for module in (*decoder_blocks(model), model):
            fully_shard(module, mesh=default_mesh())
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(steps):
        batch = global_batch(step)
        rows = rank_rows(8, mesh=mesh["replicate"]) if mesh else slice(0, 8)
        tokens = counted_tokens(batch["labels"])
        own = {name: ids[rows] for name, ids in batch.items()}
        loss = model(**shard_sequence(model, **own, tokens=tokens)).loss
        if sharded:  # FSDP averages over the same ranks
            (loss * distributed.get_world_size()).backward()
        else:
            loss.backward()
            sum_gradients(model)
        if mesh:
            for parameter in model.parameters():
                distributed.all_reduce(parameter.grad, group=mesh.get_group("replicate"))
        clip_gradients(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sums_over_ranks(loss.item())[0])
    return Run(losses, whole_parameters(model))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, {"kind": "ring"}),
        (4, {"kind": "ulysses"}),  # two heads of keys for four ranks
        (4, {"rows_axis": True}),
        (2, {"sharded": True}),
        (2, {"copied": True}),
    ],
)
def test_whole_models_train_like_one_process(ranks, options, request):
    """The mistakes: positions, labels or means of a part; a ring over all ranks instead of those of
    its mesh; a loss that FSDP's mean over the ranks divides once more; a model that cannot be
    copied, and messages that the second forward of a checkpoint mixes up.
    """
    pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    assert largest_difference(pool.run(train, **options), train_alone(steps=2)) < TOLERANCE


# --- what would silently be another model ---------------------------------------------------------


def wrong_parts():
    """The texts of what one model refuses, on this rank; afterwards it still works."""
    batch = global_batch(0)
    ids, labels = batch["input_ids"], batch["labels"]
    model = apply_context_parallel(tiny_model())
    good = shard_sequence(model, ids, labels)
    no_positions = {name: value for name, value in good.items() if name != "position_ids"}
    mine = 8 if distributed.get_rank() == 0 else 4
    capped = small_model("Gemma2", layer_types=["full_attention"] * 2)
    three_heads = small_model("Llama", num_attention_heads=3, hidden_size=48)
    found = {
        "no positions": refusal(model, **no_positions),
        "wrong positions": refusal(model, **good | {"position_ids": good["position_ids"] + 1}),
        "mask": refusal(model, **good, attention_mask=torch.ones_like(good["input_ids"])),
        "unshifted": refusal(model, **good | {"shift_labels": None}),
        "length": refusal(shard_sequence, model, ids[:, :30], labels[:, :30]),
        "ranks differ": refusal(shard_sequence, model, ids[:mine], labels[:mine]),
        "twice": refusal(apply_context_parallel, model, kind="ulysses"),
        "window": refusal(apply_context_parallel, small_model("Mistral", sliding_window=5)),
        "cap": refusal(apply_context_parallel, capped),
        "dropout": refusal(apply_context_parallel, small_model("Llama", attention_dropout=0.1)),
        "heads": refusal(apply_context_parallel, three_heads, kind="ulysses"),
    }
    return found, loss_of_all(model, model(**good).loss)


def test_wrong_parts_are_refused_on_every_rank(two_ranks):
    """Each of them trains on other positions, labels, rows or scores without an error."""
    found, loss = two_ranks.run(wrong_parts, timeout=60)
    expected = {
        "no positions": "without positions every rank would count from 0",
        "wrong positions": "not the positions of rank 0 of 2",
        "mask": "there is no attention_mask and no KV cache",
        "unshifted": "shifted behind the cut lose a token",
        "length": "rows of 30 tokens: ring over 2 ranks cuts them into 4 pieces",
        "ranks differ": "input_ids: rank 0 gives [8, 32], rank 1 gives [4, 32]",
        "twice": "attention already",
        "window": "has a window of 5 tokens",
        "cap": "caps its scores",
        "dropout": "has dropout in its attention",
        "heads": "3 heads do not divide into 2 ranks",
    }
    assert {name: text for name, text in expected.items() if text not in str(found[name])} == {}
    assert loss == pytest.approx(train_alone(steps=1).losses[0], abs=TOLERANCE)
