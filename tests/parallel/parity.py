"""One process as the reference: a small model, a global batch, and a few steps without any ranks.

    reference = train_alone(steps=4)
    run = two_ranks.run(train_with_the_technique, steps=4)      # returns a Run, too
    assert largest_difference(run, reference) < TOLERANCE

Optimizers: Adam's first step has the size of the learning rate whatever the gradient is, so a
gradient near zero that is summed in another order moves its weight the other way. SGD with momentum
has no such step, nor has AdamW with a large epsilon.
"""

import functools
from dataclasses import dataclass

import torch
import transformers
from torch import distributed
from torch.nn import functional as F

from recipes_lib.core.ranks.weighted_step import rank_rows, rank_step
from tests.small_models import as_if_trained

VOCABULARY = 256
ROWS = 8
TOKENS = 32
MAX_NORM = 1.0  # of the gradients of a step, all together
TOLERANCE = 1e-5

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4 * TOKENS,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass
class Run:
    """What a training run leaves: a loss for each step, and all parameters, whole, on the CPU."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]


def tiny_model(seed=0, **changes):
    """Four Llama layers in fp32, the same for the same seed; `changes` are those of its sizes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(**SIZES | changes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Norms that are all ones would hide that one was forgotten.
        return as_if_trained(model).train()


def global_batch(step, rows=ROWS, tokens=TOKENS):
    """The rows of all ranks in a step: input_ids and labels [rows, tokens].

    Each row counts another number of tokens, so a mean over the ranks' means is not the mean.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    uniform = torch.rand(rows, tokens, generator=generator)
    # Small numbers are frequent, so there is something to learn.
    input_ids = (VOCABULARY * uniform**3).long()
    labels = input_ids.clone()
    for row in range(rows):
        counted = 2 + (5 * row + 3 * step) % (tokens - 4)
        start = 1 + (7 * row + step) % (tokens - counted)
        labels[row, :start] = -100
        labels[row, start + counted :] = -100
    return {"input_ids": input_ids, "labels": labels}


def own_batches(step, count=1):
    """On a rank: its rows of the global batch of a step, in `count` micro-batches."""
    batch = global_batch(step)
    rows = rank_rows(len(batch["labels"]))
    parts = {name: tensor[rows].chunk(count) for name, tensor in batch.items()}
    return [{name: chunks[number] for name, chunks in parts.items()} for number in range(count)]


def counted_tokens(labels):
    """How many tokens of `labels` [rows, tokens] count; the first of a row is never predicted."""
    return int((labels[:, 1:] != -100).sum())


def loss_sum(logits, labels):
    """The sum of the losses of the counted tokens. Logits [rows, tokens, V], labels unshifted."""
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
    )


def sgd(parameters):
    """The optimizer of all parity tests but those of Adam."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    """AdamW without the sign of its first step."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3, weight_decay=0.01)


@functools.cache
def train_alone(steps=4, make=tiny_model, optimizer=sgd, max_norm=MAX_NORM, **options):
    """The reference: `make(**options)` trained on the whole batch of each step. Returns a Run."""
    model = make(**options)
    updates = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        batch = global_batch(step)
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = loss_sum(logits, batch["labels"]) / counted_tokens(batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        updates.step()
        updates.zero_grad()
        losses.append(loss.item())
    return Run(losses, whole_parameters(model))


def train_on_rank(model, optimizer, steps, *, count=1, step=rank_step, **options):
    """On a rank: the same steps by `rank_step` or its like, on this rank's rows. Returns a Run."""
    losses = [
        step(model, optimizer, own_batches(number, count), **options) for number in range(steps)
    ]
    return Run(losses, whole_parameters(model))


def of_all_ranks(value):
    """On a rank: a list of each rank's value."""
    found = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def whole_parameters(model):
    """What trains, by name, as plain tensors on the CPU. On ranks, all of them have to call.

    Names are those of the model itself, without what wrappers put in front.
    """
    found = {}
    trained = [each for each in model.named_parameters() if each[1].requires_grad]
    for name, parameter in trained:
        value = parameter.detach()
        if hasattr(value, "full_tensor"):  # a DTensor, of which each rank has a part
            value = value.full_tensor()
        plain = name.removeprefix("module.").replace("_orig_mod.", "")
        found[plain] = value.cpu().clone()
    return found


def largest_difference(got, expected):
    """The largest difference of two Runs, in any loss or parameter; or of two dicts of tensors."""
    if isinstance(got, Run):
        losses = zip(got.losses, expected.losses, strict=True)
        in_losses = max(abs(mine - reference) for mine, reference in losses)
        return max(in_losses, largest_difference(got.parameters, expected.parameters))
    assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
    differences = [(got[name] - expected[name]).abs().max().item() for name in expected]
    assert all(difference == difference for difference in differences), "not a number"
    return max(differences)
