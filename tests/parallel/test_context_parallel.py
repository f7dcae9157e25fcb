"""Attention over ranks: exact forward and backward, balanced, and whole models that train."""

import copy

import pytest
import torch
from torch import distributed
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.gradient_norm import clip_gradients
from recipes_lib.core.ranks.launch import launch
from recipes_lib.core.ranks.meshes import default_mesh, mesh_of
from recipes_lib.core.ranks.rank_rows import rank_rows
from recipes_lib.core.ranks.traffic import count_traffic
from recipes_lib.parallel.context_parallel import (
    apply_context_parallel,
    estimate_context_parallel,
    loss_of_all,
    predicted_ring_work,
    predicted_sent_bytes,
    ring_by_hand,
    shard_sequence,
    sum_gradients,
)
from recipes_lib.parallel.context_parallel.kernels import AMPERE, attend, attend_backward
from recipes_lib.parallel.context_parallel.ring import (
    _merge_into,
    ring_attention,
    tokens_of,
)
from recipes_lib.parallel.context_parallel.ulysses import ulysses_attention
from tests.conftest import assert_near
from tests.parallel.parity import (
    MAX_NORM,
    TOLERANCE,
    Run,
    counted_tokens,
    global_batch,
    largest_difference,
    loss_sum,
    sgd,
    tiny_model,
    train_alone,
    whole_parameters,
)
from tests.small_models import small_model

HEAD = 16  # E
SCALE = HEAD**-0.5

# --- what the ranks do ----------------------------------------------------------------------------


def of_all_ranks(value):
    """A list of each rank's value."""
    found = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


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
    for kind, zig_zag, heads, kv_heads, dtype in cases:
        tensors = inputs(heads, kv_heads, 12 * ranks, dtype)
        expected = with_gradients(full_attention, [tensor.double() for tensor in tensors])
        mine = tokens_of(rank, ranks, 12 * ranks, zig_zag=zig_zag)

        def attention(q, k, v, kind=kind, zig_zag=zig_zag):
            if kind == "ring":
                return ring_attention(q, k, v, group=None, scale=SCALE, zig_zag=zig_zag)
            return ulysses_attention(q, k, v, group=None, scale=SCALE)

        got = with_gradients(attention, [tensor[:, :, mine] for tensor in tensors])
        worst = 0.0
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.dtype == dtype
            difference = (ours.double() - theirs[:, :, mine]).abs().max()
            worst = max(worst, (difference / theirs.abs().max()).item())
        found.append(max(of_all_ranks(worst)))
    return found


def train(kind, steps=3):
    """The steps of `train_alone` on parts of the sequences. Returns a Run."""
    model = apply_context_parallel(tiny_model(), kind=kind)
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(steps):
        batch = global_batch(step)
        loss = model(**shard_sequence(model, batch["input_ids"], batch["labels"])).loss
        loss.backward()
        sum_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_of_all(model, loss))
    return Run(losses, whole_parameters(model))


def step_on_a_gpu(dtype, autocast=None):
    """The loss of a model on one rank, in a ring and alone."""
    batch = {name: ids.cuda() for name, ids in global_batch(0).items()}
    model = tiny_model().to("cuda", dtype)
    with torch.autocast("cuda", autocast, enabled=autocast is not None):
        alone = model(**batch, use_cache=False).loss.item()
        model = apply_context_parallel(model)
        loss = model(**shard_sequence(model, batch["input_ids"], batch["labels"])).loss
    loss.backward()
    sum_gradients(model)
    assert all(value.grad.isfinite().all() for value in model.parameters())
    return loss_of_all(model, loss), alone


def dtypes_under_autocast():
    """Of what attention gives to the layer after it, in a ring and with Ulysses."""
    batch = global_batch(0)
    found = {}
    for kind in ("ring", "ulysses"):
        model = apply_context_parallel(tiny_model(), kind=kind)
        layer = model.model.layers[0].self_attn.o_proj
        layer.register_forward_pre_hook(
            lambda _, given, kind=kind: found.update({kind: given[0].dtype})
        )
        with torch.autocast("cpu", torch.bfloat16):
            model(**shard_sequence(model, batch["input_ids"], batch["labels"]))
    return found


def train_both():
    return {kind: train(kind) for kind in ("ring", "ulysses")}


def train_with_replicas():
    """Two groups of two ranks; each group has half of the rows, and cuts them in two."""
    mesh = mesh_of(replicate=2, context=2)
    model = apply_context_parallel(tiny_model(), mesh=mesh["context"])
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(2):
        batch = global_batch(step)
        tokens = counted_tokens(batch["labels"])
        rows = rank_rows(8, mesh=mesh["replicate"])
        part = shard_sequence(model, batch["input_ids"][rows], batch["labels"][rows], tokens=tokens)
        loss = model(**part).loss
        loss.backward()
        sum_gradients(model)
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad, group=mesh.get_group("replicate"))
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sums_over_ranks(loss.item())[0])
    return Run(losses, whole_parameters(model))


def train_sharded():
    """The weights are sharded over the same ranks, and FSDP averages the gradients over them."""
    model = apply_context_parallel(tiny_model())
    for block in decoder_blocks(model):
        fully_shard(block, mesh=default_mesh())
    fully_shard(model, mesh=default_mesh())
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(2):
        batch = global_batch(step)
        loss = model(**shard_sequence(model, batch["input_ids"], batch["labels"])).loss
        (2 * loss).backward()
        clip_gradients(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_of_all(model, loss))
    return Run(losses, whole_parameters(model))


def packed_batch():
    """Rows of several documents: their batch, and positions that restart."""
    batch = global_batch(0)
    position_ids = torch.arange(32).expand(8, 32).clone()
    position_ids[:, 11:] -= 11
    position_ids[3:, 23:] -= 12
    # The first token of a document is not predicted by its neighbour.
    batch["labels"] = batch["labels"].masked_fill(position_ids == 0, -100)
    return batch, position_ids


def packed_step():
    """Loss and gradients of rows of several documents, in Ulysses."""
    model = apply_context_parallel(tiny_model(), kind="ulysses")
    batch, position_ids = packed_batch()
    part = shard_sequence(model, batch["input_ids"], batch["labels"], position_ids=position_ids)
    loss = model(**part).loss
    loss.backward()
    sum_gradients(model)
    gradients = {name: value.grad for name, value in model.named_parameters()}
    return Run([loss_of_all(model, loss)], gradients)


def checkpointed_copy():
    """The gradient of a deep copy whose blocks are computed again in backward."""
    model = copy.deepcopy(apply_context_parallel(tiny_model()))
    model.gradient_checkpointing_enable()
    batch = global_batch(0)
    loss = model(**shard_sequence(model, batch["input_ids"], batch["labels"])).loss
    loss.backward()
    sum_gradients(model)
    return Run(
        [loss_of_all(model, loss)], {name: value.grad for name, value in model.named_parameters()}
    )


def bytes_of_a_step(kind):
    """For each rank: the peak of a step beside weights and states, what it sends; predictions."""
    with PeakMemory() as memory:
        others = memory.current
    model = tiny_model(hidden_size=128, vocab_size=256)
    shape = Shape(batch=8, seq=128)
    budget = estimate_context_parallel(budget_of(model, shape), model, shape, ranks=2, kind=kind)
    sent = predicted_sent_bytes(model, shape, ranks=2, kind=kind)
    model = apply_context_parallel(model, kind=kind)
    batch = global_batch(0, tokens=128)
    with PeakMemory() as memory, count_traffic() as traffic:
        part = shard_sequence(model, batch["input_ids"], batch["labels"])
        traffic_before = traffic.sent
        model(**part).loss.backward()
        sum_gradients(model)
    return of_all_ranks(
        {
            "peak": memory.peak - others,
            "predicted peak": budget.peak - budget.states,
            "sent": traffic.sent - traffic_before,
            "predicted sent": sent,
        }
    )


def refusals():
    """The texts of what one model refuses, on this rank; afterwards it still works."""
    batch = global_batch(0)
    ids, labels = batch["input_ids"], batch["labels"]
    model = apply_context_parallel(tiny_model())
    good = shard_sequence(model, ids, labels)
    other = {name: value for name, value in good.items() if name != "position_ids"}
    documents = packed_batch()[1]
    mine = 8
    if distributed.get_rank() == 1:
        mine = 4
    attempts = {
        "no positions": lambda: model(**other),
        "wrong positions": lambda: model(**good | {"position_ids": good["position_ids"] + 1}),
        "mask": lambda: model(**good, attention_mask=torch.ones_like(good["input_ids"])),
        "unshifted": lambda: model(**good | {"shift_labels": None}),
        "cache": lambda: model(**good | {"use_cache": True}),
        "documents": lambda: shard_sequence(model, ids, labels, position_ids=documents),
        "length": lambda: shard_sequence(model, ids[:, :30], labels[:, :30]),
        "shape": lambda: shard_sequence(model, ids, labels[:, 1:]),
        "no label": lambda: shard_sequence(model, ids, torch.full_like(labels, -100)),
        "ranks differ": lambda: shard_sequence(model, ids[:mine], labels[:mine]),
        "twice": lambda: apply_context_parallel(model, kind="ulysses"),
        "not applied": lambda: shard_sequence(tiny_model(), ids, labels),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            found[name] = str(error)
    return found, loss_of_all(model, model(**good).loss)


def apply_to(make, wrong_rank=None, **options):
    """`apply_context_parallel` on a model that is refused: it has the same attention afterwards."""
    model = make()
    before = model.config._attn_implementation
    if wrong_rank == distributed.get_rank():
        options["kind"] = "ulysses"
    try:
        apply_context_parallel(model, **options)
    finally:
        assert model.config._attn_implementation == before


def with_a_window():
    return small_model("Mistral", sliding_window=5)


def with_a_cap():
    return small_model("Gemma2", layer_types=["full_attention"] * 2)


def with_dropout():
    return small_model("Llama", attention_dropout=0.1)


def with_three_heads():
    return small_model("Llama", num_attention_heads=3, hidden_size=48)


# --- exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_idea_is_full_attention(ranks):
    """Catches a merge that forgets what one of the sums was divided by."""
    q, k, v, _ = inputs(4, 4, 12, torch.float32)
    torch.testing.assert_close(ring_by_hand(q, k, v, ranks=ranks), full_attention(q, k, v))


CASES = [
    # kind, zig-zag, heads, KV heads, dtype
    ("ring", True, 4, 4, torch.float64),
    ("ring", True, 4, 2, torch.float32),
    ("ring", False, 4, 1, torch.float32),
    ("ring", True, 4, 2, torch.bfloat16),
    ("ulysses", False, 4, 4, torch.float64),
    ("ulysses", False, 4, 1, torch.float32),
    ("ulysses", False, 4, 2, torch.bfloat16),
]
# A bf16 number has 8 bits: half a step at the largest one is 0.2 %, and sums have several of them.
EXACT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def test_attention_over_two_ranks_is_full_attention(two_ranks):
    """Catches a mask of the wrong half, heads that meet others' keys, gradients of one block."""
    for case, difference in zip(CASES, two_ranks.run(differences, cases=CASES), strict=True):
        assert difference < EXACT[case[-1]], case


def test_attention_over_four_ranks_is_full_attention(four_ranks):
    """Catches gradients that come home to the wrong rank: with two, forward and back are alike."""
    for case, difference in zip(CASES, four_ranks.run(differences, cases=CASES), strict=True):
        assert difference < EXACT[case[-1]], case


def skip_bf16_before_ampere(dtype):
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < AMPERE:
        pytest.skip("this GPU has no attention in bf16")


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, EXACT[torch.float32]),
        # A GPU computes products in fp32 from three products of fewer bits.
        pytest.param("cuda", torch.float32, 2e-5, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, 2e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 1.5e-2, marks=pytest.mark.gpu),
    ],
)
def test_the_kernels_of_a_ring_in_one_process(device, dtype, tolerance):
    """What the ranks of a ring of two compute, in one piece each, without sending anything.

    Catches a kernel whose log-sum-exp has another form, and a backward that does not take that of
    all keys: on a GPU they are other ones than on a CPU, and others in fp32 than in 16 bits.
    """
    if device == "cuda":
        skip_bf16_before_ampere(dtype)
    half = 40  # no multiple of the 32 queries that some kernels take together
    tensors = [tensor.to(device) for tensor in inputs(4, 2, 2 * half, dtype)]
    expected = with_gradients(full_attention, [tensor.double() for tensor in tensors])
    q, k, v, gradient = tensors
    early, late = slice(0, half), slice(half, 2 * half)
    out, sums, rest = attend(q[:, :, late], k[:, :, late], v[:, :, late], causal=True, scale=SCALE)
    out = out.float()
    more, more_sums, _ = attend(
        q[:, :, late], k[:, :, early], v[:, :, early], causal=False, scale=SCALE
    )
    _merge_into(out, sums, more, more_sums)
    out = out.to(dtype)
    assert_near({"out": out}, {"out": expected[0][:, :, late]}, tolerance)
    dq = torch.zeros_like(out, dtype=torch.float32)
    found = {}
    for keys, causal in ((late, True), (early, False)):
        parts = attend_backward(
            gradient[:, :, late],
            q[:, :, late],
            k[:, :, keys],
            v[:, :, keys],
            out,
            sums,
            rest,
            causal=causal,
            scale=SCALE,
        )
        dq += parts[0]
        found[keys.start] = parts[1]
    assert_near({"dq": dq}, {"dq": expected[1][:, :, late]}, tolerance)
    # No earlier query sees the late keys, so their gradient is that of the late queries alone.
    assert_near({"dk": found[half]}, {"dk": expected[2][:, :, late]}, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [
        (torch.float32, None, 1e-4),
        (torch.bfloat16, None, 0.01),
        (torch.float32, torch.bfloat16, 0.01),
        (torch.float32, torch.float16, 0.01),
    ],
)
def test_one_rank_on_a_gpu_trains(dtype, autocast, tolerance):
    """NCCL, and PyTorch's operators for GPUs in a whole model.

    Catches queries that positions have made fp32 again under autocast.
    """
    skip_bf16_before_ampere(dtype)
    skip_bf16_before_ampere(autocast)
    loss, alone = launch(step_on_a_gpu, ranks=1, device="cuda", dtype=dtype, autocast=autocast)
    assert loss == pytest.approx(alone, rel=tolerance)


def test_under_autocast_attention_is_in_sixteen_bits(two_ranks):
    """As PyTorch's own attention. Positions turn queries and keys in fp32, and values are bf16."""
    found = two_ranks.run(dtypes_under_autocast)
    assert found == {"ring": torch.bfloat16, "ulysses": torch.bfloat16}


def test_whole_models_train_like_one_process(two_ranks):
    """Catches positions, labels or means that are those of a part."""
    for kind, run in two_ranks.run(train_both).items():
        assert largest_difference(run, train_alone(steps=3)) < TOLERANCE, kind


def test_four_ranks_train_like_one_process(four_ranks):
    """Two heads of keys for four ranks."""
    for kind, run in four_ranks.run(train_both).items():
        assert largest_difference(run, train_alone(steps=3)) < TOLERANCE, kind


def test_groups_of_ranks_with_rows_of_their_own(four_ranks):
    """Catches a ring over all ranks instead of those of its mesh, and neighbours of another one."""
    assert largest_difference(four_ranks.run(train_with_replicas), train_alone(steps=2)) < TOLERANCE


def test_weights_are_sharded_over_the_same_ranks(two_ranks):
    """Catches a loss that FSDP's mean over the ranks divides once more."""
    assert largest_difference(two_ranks.run(train_sharded), train_alone(steps=2)) < TOLERANCE


def loss_and_gradients_alone(batch, **options):
    model = tiny_model()
    logits = model(batch["input_ids"], use_cache=False, **options).logits
    loss = loss_sum(logits, batch["labels"]) / counted_tokens(batch["labels"])
    loss.backward()
    return Run([loss.item()], {name: value.grad for name, value in model.named_parameters()})


def test_ulysses_keeps_documents_apart(two_ranks):
    """Catches a document that sees its neighbour, in forward or in backward."""
    batch, position_ids = packed_batch()
    alone = loss_and_gradients_alone(batch, position_ids=position_ids)
    together = loss_and_gradients_alone(batch)
    assert largest_difference(together, alone) > 100 * TOLERANCE, "documents make a difference"
    assert largest_difference(two_ranks.run(packed_step), alone) < TOLERANCE


def test_a_copy_with_checkpoints_has_the_same_gradients(two_ranks):
    """Catches a model that cannot be copied, and messages that the second forward mixes up."""
    alone = loss_and_gradients_alone(global_batch(0))
    assert largest_difference(two_ranks.run(checkpointed_copy), alone) < TOLERANCE


# --- balance, time and bytes ----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_zig_zag_is_balanced(ranks):
    """Catches a layout in which some ranks wait for others in every step."""
    balanced = predicted_ring_work(ranks)
    in_one_piece = predicted_ring_work(ranks, zig_zag=False)
    assert balanced == [[0.5] * ranks] * ranks
    assert sum(map(sum, in_one_piece)) == sum(map(sum, balanced)), "the same work in all"
    waiting_for = sum(max(step) for step in in_one_piece)
    assert waiting_for / sum(max(step) for step in balanced) == (2 * ranks - 1) / ranks


def test_parts_are_all_tokens_once():
    for zig_zag in (True, False):
        parts = [tokens_of(rank, 4, 24, zig_zag=zig_zag) for rank in range(4)]
        assert sorted(torch.cat(parts).tolist()) == list(range(24))
        assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    assert tokens_of(1, 4, 16, zig_zag=True).tolist() == [2, 3, 12, 13]


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_bytes_are_the_predicted_ones(two_ranks, kind):
    """Catches whole rows that are kept, repeated heads that are sent, and a round too many."""
    for measured in two_ranks.run(bytes_of_a_step, kind=kind):
        assert measured["peak"] == pytest.approx(measured["predicted peak"], rel=0.05)
        assert measured["sent"] == pytest.approx(measured["predicted sent"], rel=0.001)


def test_the_operators_of_a_gpu_take_what_they_are_given():
    """Shapes and arguments only: nothing is computed, and no GPU is needed."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 8, 64, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(2, 2, 24, 64, device="cuda", dtype=torch.bfloat16)
        out, sums, rest = attend(q, k, k, causal=False, scale=0.125)
        dq, dk, dv = attend_backward(out, q, k, k, out, sums, rest, causal=False, scale=0.125)
        assert out.shape == dq.shape == q.shape
        assert dk.shape == dv.shape == k.shape
        assert sums.shape == (2, 4, 8) and sums.dtype == torch.float32


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_parts_are_refused_on_every_rank(two_ranks):
    found, loss = two_ranks.run(refusals, timeout=60)
    expected = {
        "no positions": "without positions it would count from 0 on every rank",
        "wrong positions": "not the positions of rank 0 of 2",
        "mask": "there is no attention_mask and no KV cache",
        "unshifted": "shifted behind the cut lose a token",
        "cache": "give use_cache=False",
        "documents": "take kind='ulysses', or rows of one document",
        "length": "rows of 30 tokens: ring over 2 ranks cuts them into 4 pieces",
        "shape": "labels [8, 31] beside input_ids [8, 32]",
        "no label": "tokens=0: give a whole number of 1 or more",
        "ranks differ": "input_ids: rank 0 gives [8, 32], rank 1 gives [4, 32]",
        "twice": "spread over ranks already",
        "not applied": "call apply_context_parallel(model) first",
    }
    assert found.keys() == expected.keys()
    for name, text in expected.items():
        assert text in found[name], name
    assert loss == pytest.approx(train_alone(steps=1).losses[0], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"make": tiny_model, "kind": "star"}, "kind='star': choose one of ring, ulysses"),
        ({"make": tiny_model, "wrong_rank": 1, "kind": "ring"}, "rank 1 gives 'ulysses'"),
        ({"make": with_a_window}, "has a window of 5 tokens"),
        ({"make": with_a_cap}, "caps its scores"),
        ({"make": with_dropout}, "has dropout in its attention"),
        ({"make": with_three_heads, "kind": "ulysses"}, "3 heads do not divide into 2 ranks"),
    ],
)
def test_models_that_cannot_be_are_refused_on_every_rank(two_ranks, options, message):
    with pytest.raises(ValueError, match=message):
        two_ranks.run(apply_to, timeout=30, **options)


def test_without_ranks_it_says_how_to_start_them():
    with pytest.raises(ValueError, match="there is no process group"):
        apply_context_parallel(tiny_model())
