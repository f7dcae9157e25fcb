import copy

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.ranks import rank
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.gradient_norm import clip_gradients
from recipes_lib.core.ranks.measured_bytes import rank_bytes
from recipes_lib.core.ranks.meshes import default_mesh, mesh_of
from recipes_lib.core.ranks.traffic import count_traffic
from recipes_lib.core.ranks.weighted_step import counted_tokens, rank_rows
from recipes_lib.parallel.fully_sharded import apply_fully_sharded
from recipes_lib.parallel.tensor_parallel import (
    apply_tensor_parallel,
    predicted_rank_bytes,
    predicted_sent_bytes,
)
from recipes_lib.parallel.tensor_parallel.loss import cut_causal_lm_loss
from tests.core.refusal import refusal
from tests.parallel.parity import (
    MAX_NORM,
    ROWS,
    TOKENS,
    TOLERANCE,
    Run,
    adamw,
    global_batch,
    largest_difference,
    sgd,
    tiny_model,
    train_alone,
    whole_parameters,
)
from tests.small_models import as_if_trained

# Those with something that Llama, which the other tests train, does not have.
FAMILIES = ["tiny-qwen3", "tiny-gemma2"]
ODD = {"vocab_size": 257, "tie_word_embeddings": True}  # as GPT-2's 50,257, which is odd


# --- training -------------------------------------------------------------------------------------


def train(steps, *, optimizer=sgd, checkpointed=False, changes=None, data=1):
    """On ranks: a Run, the bytes of this rank, and what it sent in the last backward and forward.

    Only the first rank of a group has the weights of the reference.
    """
    mesh = mesh_of(data=data, tensor=dist.get_world_size() // data)
    whole = tiny_model(seed=mesh["tensor"].get_local_rank(), **changes or {})
    model = apply_tensor_parallel(whole, mesh=mesh["tensor"])
    if data > 1:
        apply_fully_sharded(model, mesh=mesh["data"])
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    updates = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        batch = global_batch(step)
        rows = rank_rows(ROWS, mesh=mesh["data"])
        count = counted_tokens(batch["labels"][rows], mesh=mesh["data"]) / data
        mine = {name: tensor[rows] for name, tensor in batch.items()}
        with count_traffic() as traffic:
            loss = model(**mine, use_cache=False, num_items_in_batch=count).loss
            loss.backward()
        clip_gradients(model.parameters(), MAX_NORM)
        updates.step()
        held = rank_bytes(model, updates)
        updates.zero_grad()
        losses.append(sums_over_ranks(loss.item(), mesh=mesh["data"])[0] / data)
    return Run(losses, whole_parameters(model)), held, traffic.sent


def train_both_ways(steps):
    """With two optimizers, in one call of the pool."""
    return {
        "sgd": train(steps),
        "adamw": train(steps, optimizer=adamw, checkpointed=True)[:1],
    }


def test_training_is_that_of_one_process(two_ranks):
    """The mistakes: a gradient of one part, whole tensors that stay, an exchange too many."""
    got = two_ranks.run(train_both_ways, steps=4)
    run, held, sent = got["sgd"]
    assert largest_difference(run, train_alone(steps=4)) < TOLERANCE
    alone = train_alone(steps=4, optimizer=adamw)
    assert largest_difference(got["adamw"][0], alone) < TOLERANCE

    model = tiny_model()
    kept = predicted_rank_bytes(model, ranks=2)
    assert held.gradients == kept.gradients
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert held.parameters + buffers == kept.weights
    assert held.states == kept.states // 2  # one momentum, and AdamW has two states
    assert sent == predicted_sent_bytes(model, rows=ROWS, tokens=TOKENS, ranks=2)


def train_on_four(steps):
    """Four parts of each layer; and two parts of each, sharded over the two others."""
    heads = {"num_key_value_heads": 4}
    return {
        "four": train(steps, changes=heads)[0],
        "odd": train(steps, changes=heads | ODD, checkpointed=True)[0],
        "two by two": train(steps, data=2),
    }


def test_four_ranks_and_two_by_two(four_ranks):
    """The mistakes: parts of the wrong rank, a norm of one mesh beside another, and a vocabulary
    that four ranks do not divide, whose last rank looks for its tokens at the wrong place."""
    got = four_ranks.run(train_on_four, steps=3)
    alone = train_alone(steps=3, num_key_value_heads=4)
    assert largest_difference(got["four"], alone) < TOLERANCE
    alone = train_alone(steps=3, num_key_value_heads=4, **ODD)
    assert largest_difference(got["odd"], alone) < TOLERANCE
    run, held, _ = got["two by two"]
    assert largest_difference(run, train_alone(steps=3)) < TOLERANCE
    everything = sum(parameter.nbytes for parameter in tiny_model().parameters())
    assert held.parameters == pytest.approx(everything / 4, rel=0.02)


# --- families, and what is easily forgotten -------------------------------------------------------


def compare_families():
    """On ranks: how far loss and gradients are from the whole model, relative to its gradients.

    The rows have an odd number of tokens, so the ranks' parts are unequal.
    """
    found = {}
    for family in FAMILIES:
        whole = as_if_trained(model_of_shape(family, device="cpu"))
        ids = torch.randint(0, 128, (3, 13))
        labels = ids.clone()
        labels[:, :3] = -100
        mask = torch.ones_like(ids)
        mask[1, 9:] = 0
        batch = {"input_ids": ids, "labels": labels, "attention_mask": mask, "use_cache": False}
        expected = whole(**batch).loss
        expected.backward()
        model = copy.deepcopy(whole)
        model.zero_grad()
        apply_tensor_parallel(model)
        loss = model(**batch).loss
        loss.backward()
        distances = [abs(loss.item() - expected.item())]
        parameters = dict(model.named_parameters())
        assert parameters.keys() == dict(whole.named_parameters()).keys(), "ties are lost"
        for name, reference in whole.named_parameters():
            gradient = parameters[name].grad.full_tensor()
            distances.append(float((gradient - reference.grad).norm() / reference.grad.norm()))
        found[family] = max(distances)
    return found


def test_other_families_compute_what_they_did(two_ranks):
    """Tied embeddings, biases, norms of heads, soft caps, padding: gradients of each parameter."""
    distances = two_ranks.run(compare_families)
    assert {case: each for case, each in distances.items() if each > 1e-5} == {}


def norms_of_heads():
    """The trained norms of a cut Qwen 3 after backward: of the stream, and of the heads."""
    model = apply_tensor_parallel(model_of_shape("tiny-qwen3", device="cpu"))
    ids = torch.randint(0, 128, (2, 8))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [each for name, each in model.named_parameters() if "norm" in name]


def look_at_details():
    """On ranks: what parameters are like after a step."""
    whole = tiny_model()
    for norm in [module for module in whole.modules() if "Norm" in type(module).__name__]:
        norm.weight.requires_grad_(False)
    model = apply_tensor_parallel(copy.deepcopy(whole))
    model(**global_batch(0), use_cache=False).loss.backward()
    trained = {name for name, each in model.named_parameters() if each.grad is not None}
    expected = {name for name, each in whole.named_parameters() if each.requires_grad}
    summed = [each.grad.placements == (Replicate(),) for each in norms_of_heads()]
    return {"summed": bool(summed) and all(summed), "frozen": trained == expected}


def test_norms(two_ranks):
    """PyTorch's SequenceParallel lets frozen norms train, and leaves each rank a part of a sum."""
    assert two_ranks.run(look_at_details) == {"summed": True, "frozen": True}


# --- the loss of cut logits -----------------------------------------------------------------------


def compare_losses(dtype):
    """On ranks: loss and gradient of cut logits, and of whole ones. Some logits are very large."""
    mesh = default_mesh()
    logits = 5 * torch.randn(3, 7, 12)
    logits[0, 2] += 1e4
    logits = logits.to(dtype)
    labels = torch.randint(0, 12, (3, 7))
    labels[1, 2:] = -100
    found = []
    for options in ({"num_items_in_batch": 5}, {"shift_labels": labels}):
        whole = logits.clone().requires_grad_()
        targets = labels
        if "shift_labels" not in options:
            targets = F.pad(labels[:, 1:], (0, 1), value=-100)
        expected = F.cross_entropy(
            whole.float().flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100
        )
        expected = expected / options.get("num_items_in_batch", (targets != -100).sum())
        expected.backward()
        cut = distribute_tensor(logits, mesh, [Shard(2)]).requires_grad_()
        loss = cut_causal_lm_loss(cut, labels, 12, **options)
        loss.backward()
        found.append((loss.item() - expected.item()) / expected.item())
        found.append((cut.grad.full_tensor() - whole.grad).abs().max().item())
    return max(abs(each) for each in found)


def test_loss_of_cut_logits(two_ranks):
    """The mistakes: an exponential that overflows, a label that no rank or every rank counts."""
    assert two_ranks.run(compare_losses, dtype=torch.float32) < 1e-6
    assert two_ranks.run(compare_losses, dtype=torch.bfloat16) < 1e-2


# --- what it refuses ------------------------------------------------------------------------------


def misuse():
    """On ranks: what is said about each mistake. None may hang, or change the model before."""
    found = {}
    odd = tiny_model(hidden_size=48, num_attention_heads=3, num_key_value_heads=1)
    found["heads"] = refusal(apply_tensor_parallel, odd)
    found["unchanged"] = str(type(odd.lm_head.weight) is nn.Parameter)
    found["layers"] = refusal(apply_tensor_parallel, model_of_shape("tiny-gpt2", device="cpu"))
    wrapped = tiny_model()
    wrapped.lm_head = nn.Sequential(wrapped.lm_head)
    wrapped.get_output_embeddings = lambda: wrapped.lm_head
    found["wrapped"] = refusal(apply_tensor_parallel, wrapped)
    found["ranks differ"] = refusal(apply_tensor_parallel, tiny_model(vocab_size=64 + rank()))
    model = apply_tensor_parallel(tiny_model())
    found["twice"] = refusal(apply_tensor_parallel, model)
    found["rows"] = refusal(model, input_ids=torch.full((1, 4 + rank()), 1))
    return found


def test_mistakes_are_told_on_every_rank(two_ranks):
    """Other rows on each rank, or a layer that is not plain, would train without an error."""
    told = two_ranks.run(misuse, timeout=60)
    expected = {
        "heads": "2 ranks do not divide 3 heads",
        "unchanged": "True",
        "layers": "has no self_attn.q_proj",
        "wrapped": "only plain layers can be cut",
        "ranks differ": "give the same on all ranks",
        "twice": "not cut or sharded already",
        "rows": "different rows",
    }
    assert {case: told[case] for case, text in expected.items() if text not in told[case]} == {}
