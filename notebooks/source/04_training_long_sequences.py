# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # My texts are too long: training on very long sequences
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your-username/llm-training-recipes/blob/main/notebooks/04_training_long_sequences.ipynb)
#
# <!-- numbers:headline-04 -->
# > **895 → 92,965 tokens with five lines of code:** the longest text on which every weight of smollm2-135m trains within 4 GiB of tensors. That is 67 times as long as with SDPA alone, the default of transformers, and 23 times as long as with its SDPA and checkpointing. It is **2.6 times as long** as with all that the switches of transformers and TRL reach together (36,015 tokens, in fp32). A real step of 16,384 tokens took 2,400 MiB (2,400 in a dry step) and 2.8 minutes; longer ones were counted on tensors that have shapes and no data. In fp32, loss and gradients of 512 tokens are those of eager attention, to 4e-07 and 4e-06. The five lines multiply in bf16, and there gradients differ by 4e-02. Predictions miss by 2.6% at most.
# >
# > Lengths counted in dry steps, times measured, on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-26.
# <!-- end -->
#
# **Its price in time**, in real steps in bf16: at 2,048 tokens a token takes 1.3 times as long as in the plain step (3.9 and 3.1 ms). At 16,384 tokens, for which the plain step would need 31 GiB in fp32, it takes 10.4 ms.
#
# **The five lines**, for any causal language model of transformers, with weights in fp32. They are the three calls and the two `with`:
#
# ```python
# from recipes_lib.memory.activation_offload import offload_activations
# from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
# from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
#
# apply_chunked_cross_entropy(model)                        # no table of logits
# apply_tiled_mlp(model, norms=True)                        # an MLP sees some tokens at a time
# model.activation_checkpointing_enable()                   # of a block only its input stays,
# with offload_activations(model, to="host", in_flight=1):  # and waits in host memory
#     with torch.autocast("cuda", torch.bfloat16):          # products in 16 bits
#         loss = model(input_ids=ids, labels=ids, use_cache=False).loss
#     loss.backward()
# ```
#
# This notebook says what each of them gives, by arithmetic before it is tried, and what it costs. Then it asks the same for your model and your card.
#
# | | |
# |---|---|
# | **You will learn** | to predict the longest text that fits, and which recipe moves that limit |
# | **You need** | Python and the basics of PyTorch; no GPU, no login |
# | **Minutes to run** | ten to eleven on two CPU cores |
# | **Minutes to read** | about 50; about ten up to *The map* |
# | **Which hardware has run this** | two CPU cores, and two others for the curves of recipe 8; no GPU yet |
#
# ## Setup
#
# Where the package is missing, as on Colab, this cell fetches it. After `make run` or `make lab` it does nothing.

# %%
import importlib.util
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("recipes_lib") is None:
    in_checkout = Path("../recipes_lib").exists()
    code = Path(".." if in_checkout else "llm-training-recipes").resolve()
    if not code.exists():
        url = "https://github.com/your-username/llm-training-recipes"
        subprocess.run(["git", "clone", "-q", url, str(code)], check=True)
    sys.path.insert(0, str(code))
    from recipes_lib.core.set_up import install

    install(code, extra="notebooks")

# %%
import contextlib
import gc
import math
import time
from functools import partial

import numpy
import torch
import torch.nn.functional as F

from recipes_lib.core.data import load_text
from recipes_lib.core.measure import PeakMemory, dry, dry_run, in_turns
from recipes_lib.core.measure.machine import (
    GIB,
    choose_sizes,
    fast,
    machine,
    seed_everything,
    synchronize,
)
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape
from recipes_lib.report.show import show

here = machine()
on_gpu = here.device == "cuda"
elsewhere = "host" if on_gpu else "disk"  # where tensors can wait
tokenizer = load_tokenizer()
gc.freeze()  # counting bytes walks through all objects: not through those of the imports
dtype = torch.bfloat16 if on_gpu and here.native_bf16 else torch.float32
print(here)

# %% [markdown]
# All sizes stand in one cell. On a CPU all weights of the real SmolLM2-135M train in fp32, and all tensors together get 4 GiB. Nothing fails at the limit: we count bytes. A GPU takes a larger model with random weights.

# %%
cpu = dict(
    shape="smollm2-135m",
    layers=None,  # all of them
    limit=4 * GIB,
    common=512,  # tokens of a text that every row can train on
    grows=8192,  # tokens up to which we see how bytes grow
    tile=256,  # tokens of a tile
    short=2048,  # tokens of a real step, without the five lines and with them
    long=16384,  # tokens of a real step with them
    cost=3072,  # tokens at which the rows are timed
    along=(2048, 4096, 8192, 12288),  # lengths at which one block is timed
    read=8192,  # tokens at which attention alone is timed
    window=512,  # of them
    rounds=2,  # of turns on the clock
    trained="smollm2",  # the model whose losses say something
    cards=("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"),  # shapes for the cards
    methods=("fp32", "full", "QLoRA"),  # in which they train there
)
gpu16 = cpu | dict(shape="llama-3.2-1b", layers=4, limit=11 * GIB, common=1024)
gpu16 |= dict(tile=512, cost=16384, along=(8192, 16384, 32768, 65536))
gpu16 |= dict(read=65536, window=4096)
gpu24 = gpu16 | dict(layers=None, limit=14 * GIB)
# Continuous integration checks that the code works, not how much it saves.
brief = cpu | dict(shape="tiny-smollm2", trained="tiny-smollm2", limit=200 * 2**20)
brief |= dict(common=32, grows=256, tile=16, short=256, long=512, cost=256)
brief |= dict(read=1024, window=64, along=(64, 256, 1024), rounds=1)
brief |= dict(cards=("tiny-smollm2",), methods=("QLoRA",))
sizes = choose_sizes(cpu=cpu, gpu16=gpu16, gpu24=gpu24, gpu80=gpu24, fast=brief)
sizes

# %% [markdown]
# ## If you have five minutes
#
# The training loop, and the same five lines as functions, so that the rows of a table can share them. Every step of this notebook is one of this loop.


# %%
from recipes_lib.architecture.rope import apply_rope_scaling, check_length
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp


def train(
    model,
    optimizer,
    texts,
    around=contextlib.nullcontext,
    precision=contextlib.nullcontext,
    clip=None,
):
    """One step from several texts [1, S], in which each token counts the same."""
    targets = sum(ids.shape[1] - 1 for ids in texts)
    total = 0.0
    for ids in texts:
        with around():
            with precision():
                mean = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss = mean * ((ids.shape[1] - 1) / targets)
            loss.backward()
        total += loss.detach()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return total


def for_long_texts(model):
    apply_chunked_cross_entropy(model)
    apply_tiled_mlp(model, norms=True)
    model.activation_checkpointing_enable()
    return model


def inputs_wait(model):
    return offload_activations(model, to=elsewhere, in_flight=1)


in_16_bits = partial(
    torch.autocast, here.device, torch.bfloat16, enabled=here.native_bf16
)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)


book = tokenizer(load_text(split="validation")[:200_000])["input_ids"]


def text_of(tokens):
    """Real text [1, S]; where tensors have no data, any."""
    if dry():
        return torch.ones(1, tokens, dtype=torch.long, device=here.device)
    ids = torch.tensor([book], device=here.device)
    return ids[:, torch.arange(tokens) % ids.shape[1]]


# %% [markdown]
# Three real steps on real text. The first step of AdamW makes its averages, so a short one comes before each, with a learning rate of 0. The model knows 8,192 positions. For 16,384 tokens YaRN (recipe 8) is on, so the loss of that step cannot be compared with the others.

# %%
real = {}
for which, tokens in (
    ("plain", sizes.short),
    ("five lines", sizes.short),
    ("five lines", sizes.long),
):
    # Yours: AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    model = load_model(sizes.trained).train()
    positions = model.config.max_position_embeddings
    if tokens > positions:
        apply_rope_scaling(model, kind="yarn", factor=tokens / positions)  # recipe 8
    check_length(model, tokens)  # beyond the positions nothing else raises an error
    options = {"precision": in_16_bits, "clip": 1.0}
    if which == "five lines":
        model = for_long_texts(model)
        options["around"] = partial(inputs_wait, model)
    optimizer = adamw(model)
    optimizer.param_groups[0]["lr"] = 0.0  # the short step changes no weight
    train(model, optimizer, [text_of(16)], **options)
    optimizer.param_groups[0]["lr"] = 2e-5
    start = time.perf_counter()
    with PeakMemory() as memory:
        loss = train(model, optimizer, [text_of(tokens)], **options).item()
    seconds = time.perf_counter() - start
    real[which, tokens] = {"loss": loss, "bytes": memory.peak, "seconds": seconds}
    print(f"{which:<10} {tokens:>6,} tokens: loss {loss:.4f},", end=" ")
    print(f"{memory.peak / 2**20:,.0f} MiB at the peak, {seconds:.0f} s")
del model, optimizer, options, memory  # what is alive would be counted below

# %% [markdown]
# At 2,048 tokens weights, averages and gradients are 2,052 of the 2,269 MiB of the five lines, and eight times as many tokens add 131 MiB. The losses of the first two steps differ by the rounding of bf16: in fp32 the same text has 1.890 (recipe 7), and both are within 0.002 of it. To accumulate, hand `train` several texts. A T4 has no bf16, so autocast stays out there. `in_flight=1` lets one input travel beside the computation; the default of 4 is much for long texts. [train_long_sequences.py](../scripts/train_long_sequences.py) is the same as a program, which can resume.
#
# **With TRL** four of the five are a configuration, for `SFTTrainer(model=…, args=config, train_dataset=…)`. The tiles are missing, and its copies to the host take turns with the computation:

# %%
from trl import SFTConfig

config = SFTConfig(
    max_length=32_768,
    per_device_train_batch_size=1,
    bf16=here.native_bf16,
    activation_checkpointing=True,
    activation_checkpointing_kwargs={"offload": True},
    output_dir="../runs/long-texts",
    use_cpu=not on_gpu,
)
print(config.loss_type, config.activation_checkpointing_kwargs)  # nll: in chunks

# %% [markdown]
# ## The map
#
# | | recipe | makes smaller | the switch of a library |
# |---|---|---|---|
# | 1 | [flash attention](../recipes_lib/attention/flash.py) | scores: tokens × tokens | `attn_implementation="sdpa"`, the default |
# | 2 | [chunked loss](../recipes_lib/memory/chunked_cross_entropy.py) | logits: tokens × vocabulary | `F.linear_cross_entropy`, Liger, TRL |
# | 3 | [checkpointing](../recipes_lib/memory/activation_checkpointing.py) | activations of all blocks but one | `model.activation_checkpointing_enable()` |
# | 4 | [tiled MLP](../recipes_lib/memory/tiled_mlp.py) | the widest part of that one block | Axolotl `tiled_mlp: true` |
# | 5 | [nested checkpoints](../recipes_lib/memory/nested_checkpointing.py) | inputs of the blocks | none |
# | 6 | [offloaded inputs](../recipes_lib/memory/activation_offload.py) | the same, to the host or the disk | `activation_checkpointing_enable(offload=True)` |
# | 7 | [sliding window](../recipes_lib/attention/sliding_window/__init__.py), [block-sparse](../recipes_lib/attention/block_sparse/__init__.py) | time of attention | `config.sliding_window`, FlexAttention |
# | 8 | [RoPE scaling](../recipes_lib/architecture/rope.py) | the loss beyond the trained length | `rope_parameters` in config.json |
#
# Recipes 1 to 6 are **Part A**: the same mathematics, in less memory. Recipes 7 and 8 are **Part B**: they change the model.
#
# ## What runs out: one equation
#
# Weights and optimizer states (AdamW keeps two averages per weight) take the same bytes for any text. The rest grows with its length $S$:
#
# $$\text{peak}(S) = \text{fixed} + a\,S^2 + b\,S$$
#
# $a$ counts attention *scores*: one number for each pair of tokens, in each head of each layer. $b$ counts what every single token leaves behind: *activations*, which forward keeps for backward, and *logits*, one number for each entry of the vocabulary. *Embedding copies* are there for a moment of backward, because the embedding is also the output layer. [equation.py](../recipes_lib/core/predict/equation.py) has every term in lines to read aloud.
#
# **Guess first.** Within 4 GiB, how many tokens can a text have on which SmolLM2-135M trains without any recipe?

# %%
from recipes_lib.core.predict import equation
from recipes_lib.workflows.longest_sequence import predicted_longest

build = partial(model_of_shape, sizes.shape, layers=sizes.layers, dtype=dtype)
weightless = build(device="meta")  # weighs nothing: enough for arithmetic
blocks_here = weightless.config.num_hidden_layers


def eager_terms(tokens):
    plain = equation.plain_step(weightless, rows=1, length=tokens)
    return equation.with_eager_attention(plain)


def longest_by(terms, limit=sizes.limit):
    """The longest text within the limit by arithmetic."""
    return predicted_longest(lambda tokens: terms(tokens).peak, limit_bytes=limit)


common = eager_terms(sizes.common)
print(common)
fixed = common.weights + common.states  # bytes
heads = weightless.config.num_attention_heads * blocks_here
a = heads * dtype.itemsize
b = (common.activations + common.loss - a * sizes.common**2) / sizes.common
print(f"fixed {fixed / 2**20:,.0f} MiB")
print(f"a     {a:,} bytes per pair of tokens")
print(f"b     {b / 1024:,.0f} KiB per token")
print(f"longest text: {longest_by(eager_terms):,} tokens")

# %% [markdown]
# Check it by hand, with the sizes of a CPU. Fixed are weights and states, 513 + 1,026 MiB. The scores are 9 heads × 30 layers × 512² pairs × 4 bytes = 270 MiB, a part of the activations. The loss is 512 tokens × 49,152 logits × 4 bytes × 3 = 288 MiB, because it needs this table three times. With $a$ and $b$ the limit is a quadratic equation for $S$, and its root is the length printed above. The terms of the list add up to more than the peak: when backward begins, neither gradients nor embedding copies are there. With checkpoints the peak can also be when one block is computed again, or when the last gradient arrives.
#
# ## Baseline: every score is stored
#
# The plain formula of attention, softmax(QKᵀ/√E) V with a query, a key and a value per token, is called *eager*: all scores are made, and they wait for backward.
#
# Each recipe is one row of a table, the *ladder*. `climb` makes a row:
#
# - *predicted*: the longest text by arithmetic, before the search.
# - *longest*: the search goes on until one length fits and another, 2 % longer, does not.
# - *off by*: the prediction against the place where a straight line between these two meets the limit.
# - *gradients off by*: from a real forward and backward on a text that every row can do. It is the length of their difference from those of the first row, over the length of those.
#
# All rows but one compute in fp32.
#
# A step of the longest texts takes hours here, so on a CPU the search takes **dry steps**: the loop above on PyTorch's fake tensors, which have shapes and no data. Bytes are counted, and nothing is computed. The equation and a dry step know nothing of each other, so where both agree no term is forgotten. The real step of 16,384 tokens checks the dry one, below *The five lines, and everything combined*.

# %%
from collections.abc import Callable
from typing import NamedTuple

from recipes_lib.report.ladders.length import LengthLadder, counted_here, duration
from recipes_lib.workflows.longest_sequence import peak_of, search

ladder = LengthLadder(
    "04_training_long_sequences", timed_at=sizes.cost, against="flash attention"
)
size_of = numpy.linalg.norm  # the length of a vector


def nothing_around(model):
    return contextlib.nullcontext()


class Way(NamedTuple):
    """How a row makes its model and takes its step."""

    adapt: Callable  # changes the model
    optimizer: Callable = adamw
    around: Callable = nothing_around  # forward and backward
    precision: Callable = contextlib.nullcontext  # of forward
    clip: float | None = None


ways = {}  # by row
found = {}  # by row: what the search has found


def step_of(row, model):
    """The loop with the recipes of a row: a function of the number of tokens."""
    way = ways[row]
    model = way.adapt(model)
    optimizer = way.optimizer(model)
    around = partial(way.around, model)

    def step(tokens):
        text = text_of(tokens)
        return train(model, optimizer, [text], around, way.precision, way.clip)

    return step, optimizer


def climb(row, way, predicted, also=()):
    """Find the longest text of a row, take a real step, and add the row to the ladder."""
    ways[row] = way

    def arrange():
        step, optimizer = step_of(row, build())
        return step, optimizer.zero_grad

    options = {"limit_bytes": sizes.limit, "resolution": 0.02, "also": also}
    found[row] = search(arrange, start=predicted, **options)
    loss, gradient = loss_and_gradient(row)
    ladder.add(
        row,
        tokens=found[row].tokens,
        crossing=found[row].crossing,
        peak_bytes=found[row].peak_bytes,
        predicted=predicted,
        loss=loss,
        gradient_error=float(
            size_of(gradient - first_gradient) / size_of(first_gradient)
        ),
    )
    print(ladder.line(row))
    grows = (found[row].peak_bytes - fixed) / found[row].tokens
    print(f"  beside weights and states: {grows / 1024:,.0f} KiB per token")


def a_model():
    """With trained weights on a CPU, and random ones on a GPU."""
    return build() if on_gpu else load_model(sizes.trained)


def loss_and_gradient(row):
    """Of a real step on a text that every row can do: the loss, and all gradients in one [P]."""
    way = ways[row]
    seed_everything(0)
    model = way.adapt(a_model())
    ids = text_of(sizes.common)
    with way.around(model):
        with way.precision():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    gradients = [each.grad.flatten().float().cpu() for each in model.parameters()]
    # As an array it is not among the tensors that are counted.
    return loss.item(), numpy.concatenate(gradients)


def eager(model):
    model.set_attn_implementation("eager")
    return model


ways["baseline"] = Way(eager)
first_loss, first_gradient = loss_and_gradient("baseline")
print(f"loss of {sizes.common} tokens {first_loss:.4f}")
climb("baseline", Way(eager), longest_by(eager_terms), also=(sizes.grows,))

# %% [markdown]
# The bytes per token are more than $b$: they are $b + aS$ at this length. Where the peak comes late in backward, as with offloaded inputs, up to 513 MiB of gradients are among them.
#
# ## Part A: the same numbers, in less memory
#
# ### 1. Flash attention
#
# Eager attention keeps a score for every pair of tokens, in every head of every layer.
#
# ```text
# eager    scores [H, S, S] -> softmax -> times V        S x S numbers wait for backward
# flash    for each block of keys: scores of a block, running maximum, running sum
# ```
#
# **Guess first.** Without the scores, how many times as long can the text be?
#
# **The idea.** A softmax divides by a sum over *all* keys, and before that the largest score is subtracted, so that exp does not overflow. Block by block, neither is known yet. So keep the largest score so far and the sum so far. If a later block has a larger score, what was summed before is multiplied by a correction.

# %%
from recipes_lib.attention.flash import best_kernel, running_softmax_attention

show(running_softmax_attention)
query, key, value = torch.randn(3, 1, 4, 100, 16)  # [B, H, S, E] each
by_hand = running_softmax_attention(query, key, value, block_size=16)
library = F.scaled_dot_product_attention(query, key, value, is_causal=True)
assert torch.allclose(by_hand, library.transpose(1, 2), atol=1e-5)

# %% [markdown]
# **The line you will write tomorrow** is `set_attn_implementation("sdpa")`, or nothing, because SDPA is the default of transformers. On a GPU `flash_attention_2` and `_3` are faster, and store as little. `best_kernel` says which kernel runs behind SDPA, and why.


# %%
def sdpa(model):
    model.set_attn_implementation("sdpa")
    return model


def sdpa_terms(tokens):
    return equation.plain_step(weightless, rows=1, length=tokens)


def exponent(search):
    """Bytes beside the fixed ones grow as tokens to this power."""
    lengths = (search.tokens, sizes.grows)
    small, large = [search.peaks[tokens] - fixed for tokens in lengths]
    return math.log(large / small) / math.log(lengths[1] / lengths[0])


print(best_kernel(weightless).why)
climb("flash attention", Way(sdpa), longest_by(sdpa_terms), also=(sizes.grows,))
slopes = {row: exponent(each) for row, each in found.items()}
for row, slope in slopes.items():
    print(f"{row:<16} memory grows as S^{slope:.2f}")
print(f"to the guess: {ladder['flash attention'].times_previous:.2f}× as long")

# %% [markdown]
# Without the scores memory grows with S. With them it grows faster, and not yet with S² at these lengths, because *b S* is still a large part. SDPA also has a smaller $b$, because eager attention copies keys and values for each head. Activations and logits stay, so the text is only that much longer. *Not when* you need the attention weights, or when scores are capped.
#
# ### 2. Chunked loss
#
# Now the logits are the largest tensor.
#
# ```text
# at once   hidden [T, D] -> logits [T, V] -> softmax [T, V] -> gradient [T, V]
# chunks    for C tokens: logits [C, V] -> loss and both gradients at once -> free
# ```
#
# **Guess first.** Without all logits at once, by which factor does the text grow?
#
# **The idea.** The gradient of one token's logits is softmax(logits) minus one-hot(target). It needs no other token. The loss is one number, so all that backward adds later is one factor. So a chunk gives its part of the loss and of both gradients, and its logits are freed.

# %%
from recipes_lib.memory.chunked_cross_entropy import plain_chunked_loss

show(plain_chunked_loss)
states = torch.randn(50, 16, requires_grad=True)  # [T, D]
head = torch.randn(40, 16, requires_grad=True)  # [V, D]
labels = torch.randint(0, 40, (50,))
at_once = F.cross_entropy(states @ head.T, labels)
exact = (at_once, *torch.autograd.grad(at_once, (states, head)))
chunked = plain_chunked_loss(states, head, labels, chunk_size=16)
for ours, expected in zip(chunked, exact):
    assert torch.allclose(ours, expected, atol=1e-5)

# %% [markdown]
# **The line you will write tomorrow**, in a loop of your own, is PyTorch's (new in 2.13). Here it runs on the whole model, and its loss is compared:

# %%
model = load_model(sizes.trained)
ids = text_of(sizes.common)
if hasattr(F, "linear_cross_entropy"):
    chunks = torch.nn.LinearCrossEntropyOptions(
        chunking_method=None, batch_chunk_size=256
    )
    with torch.no_grad():
        expected = model(ids, labels=ids).loss
        hidden = model.model(ids).last_hidden_state[:, :-1].flatten(0, 1)
        head = model.lm_head.weight
        loss = F.linear_cross_entropy(
            hidden, head, ids[:, 1:].flatten(), options=chunks
        )
    assert torch.allclose(loss, expected, rtol=1e-4)
    del hidden, head
del model

# %% [markdown]
# | you use | set |
# |---|---|
# | TRL's `SFTTrainer` | nothing: `loss_type="nll"`, the default, is chunked |
# | transformers' `Trainer` | `use_liger_kernel=True` on a GPU |
# | Axolotl | `cut_cross_entropy: true`, or its Liger plugin |
# | a loop of your own | the line above, or `apply_chunked_cross_entropy(model)` |
# | the logits themselves | no chunks |
#
# Ours is one call on a model of any family, checks itself against the model's own loss, and sums in fp32. Side by side, forward and backward of the loss alone (*value off by* is against fp64; the bytes inside of one operator are not seen on a CPU):

# %%
from recipes_lib.workflows.bench.kernels import compare_losses

beside = compare_losses(
    tokens=sizes.common,
    hidden=weightless.config.hidden_size,
    vocab=weightless.config.vocab_size,
    dtype=dtype,
    rounds=1,
)
for which, cost in beside.items():
    print(f"{which:<18}{cost}")


# %% [markdown]
# *torch* has its default options, whose chunks are small and slow: give it chunks of 256 tokens. *TRL* works in tiles of 4,096 tokens × 32,768 *words*, entries of the vocabulary. On a GPU one kernel turns such a tile into its gradient in place: 256 MiB in bf16, for a text of any length. On a CPU it takes plain operators. This text of 512 tokens then takes about ten times one tile (64 MiB), which is more than all logits at once; 2,048 words at a time take less than half of those. TRL has no option for the tile.


# %%
def lean(model):
    # A recipe proves itself on the model. The ladder compares more, so here it need not.
    return apply_chunked_cross_entropy(sdpa(model), check=False)


def lean_terms(tokens):
    return equation.with_chunked_loss(sdpa_terms(tokens))


climb("+ chunked loss", Way(lean), longest_by(lean_terms))
print(f"to the guess: {ladder['+ chunked loss'].times_previous:.2f}× as long")

# %% [markdown]
# The activations of all layers are now nearly all that grows, so the gain is small. It becomes large together with the next recipe.
#
# ### 3. Activation checkpointing
#
# Every block keeps its activations until backward reaches it. But backward visits one block at a time.
#
# ```text
# plain        x0 [a0] x1 [a1] x2 [a2] -> loss      all [a] wait
# checkpoints  x0      x1      x2      -> loss      [a2] once more from x2, used, freed, then [a1] …
# ```
#
# **Guess first.** For each number of its input, a block of this model keeps 19 for backward: query, key, value, the inputs of norms and matmuls, and what the MLP multiplies. With the input alone, is the text 19 times as long?
#
# **The idea.** Forward without recording; in backward, forward once more with recording, and backward through that.

# %%
from recipes_lib.memory.activation_checkpointing import (
    InputOnly,
    checkpointed_by_hand,
)

show(checkpointed_by_hand, InputOnly)
layers = [torch.nn.Linear(8, 8) for _ in range(9)]
hidden = torch.randn(1, 5, 8, requires_grad=True)
plain = torch.nn.Sequential(*layers)(hidden).sum()
(expected,) = torch.autograd.grad(plain, hidden)
(ours,) = torch.autograd.grad(checkpointed_by_hand(layers, hidden).sum(), hidden)
assert torch.equal(ours, expected)

# %% [markdown]
# **The line you will write tomorrow** is `model.activation_checkpointing_enable()`, before transformers 5.17 `gradient_checkpointing_enable()`, and `activation_checkpointing=True` in the Trainer. The rows are the library's line. *SDPA + checkpoints* are *the two switches of the library*: the usual way to train long texts, and our second baseline.


# %%
def checkpointing(model):
    model.activation_checkpointing_enable()
    return model


def switch_terms(tokens):
    return equation.with_checkpointing(sdpa_terms(tokens))


def checkpoint_terms(tokens):
    return equation.with_checkpointing(lean_terms(tokens))


climb(
    "SDPA + checkpoints",
    Way(lambda model: checkpointing(sdpa(model))),
    longest_by(switch_terms),
)
climb(
    "+ checkpointing",
    Way(lambda model: checkpointing(lean(model))),
    longest_by(checkpoint_terms),
)
alone = ladder["SDPA + checkpoints"].tokens / ladder["flash attention"].tokens
both = ladder["+ checkpointing"].tokens / ladder["+ chunked loss"].tokens
print(f"checkpoints alone make the text {alone:.1f}× as long,", end=" ")
print(f"beside the chunked loss {both:.1f}×")

# %% [markdown]
# Without the chunked loss, checkpoints stop at the logits; without checkpoints, the chunked loss gains little. The large factor belongs to the pair: switch both on. Why not 19 times? Count what one more token adds:


# %%
def inputs_per_token(bytes_of):
    """What one more token adds, in inputs of a block: numbers as wide as the hidden state."""
    more = bytes_of(20_000) - bytes_of(10_000)
    return more / 10_000 / weightless.config.hidden_size / dtype.itemsize


kept = inputs_per_token(lambda tokens: lean_terms(tokens).activations)
inputs = inputs_per_token(lambda tokens: checkpoint_terms(tokens).activations)
again = inputs_per_token(lambda tokens: checkpoint_terms(tokens).one_block)
each = kept / blocks_here
print(f"plain        {kept:4.0f} inputs per token: {each:.1f} of each block")
print(f"checkpointed {inputs:4.0f}: one of each block, and 3 that the last norm keeps")
print(f"            + {again:2.0f}: one block once more, and the gradients in it")
print(f"that is {kept / (inputs + again):.1f}× less per token; ", end="")
print(f"the search found {both:.1f}× the length")

# %% [markdown]
# The inputs stay, and one block is there in full: with few blocks the second part decides, with many the first. *Not when* activations are not at the peak: then you pay a forward for nothing.
#
# ### 4. Tiled MLP
#
# In the block that is computed again, the MLP has the widest tensors: tokens × feed-forward width.
#
# ```text
# whole    x [S, D] -> up, gate [S, F] -> down -> [S, D]       all S rows at once
# tiled    for t rows of x:  the same [t, F]                   one tile at a time, also in backward
# ```
#
# **Guess first.** What is larger now: the inputs of all blocks, or one block with its MLP?
#
# **The idea.** An MLP treats each token by itself, so it can run tile by tile, and be computed again tile by tile in backward.

# %%
from recipes_lib.memory.tiled_mlp import tiled_by_hand

show(tiled_by_hand)
mlp = torch.nn.Sequential(
    torch.nn.Linear(8, 32), torch.nn.SiLU(), torch.nn.Linear(32, 8)
)
hidden = torch.randn(1, 50, 8)
assert torch.allclose(tiled_by_hand(mlp, hidden, tile_size=16), mlp(hidden), atol=1e-6)


# %%
def tiled(model, **options):
    return apply_tiled_mlp(lean(model), tile_size=sizes.tile, check=False, **options)


def tiled_terms(tokens, **options):
    in_tiles = equation.with_tiled_mlp(lean_terms(tokens), tile=sizes.tile, **options)
    return equation.with_checkpointing(in_tiles)


climb(
    "+ tiled MLP",
    Way(lambda model: checkpointing(tiled(model))),
    longest_by(tiled_terms),
)
before, after = checkpoint_terms(16_384), tiled_terms(16_384)
print("to the guess, of 16,384 tokens:")
print(f"  inputs of the blocks {before.activations / 2**20:6,.0f} MiB")
print(f"  one block            {before.one_block / 2**20:6,.0f} MiB")
print(f"  one block, tiled     {after.one_block / 2**20:6,.0f} MiB")

# %% [markdown]
# The inputs are larger, and a tile does not touch them: hence the small gain. In a dry step all tiles between the second and the last count as one. Once they are elsewhere, as in recipe 6, the one block is most of what grows. The MLP's forward now runs three times: in forward, when the block is computed again, and when its tile is. *Not when* no block is checkpointed yet.
#
# **The line you will write tomorrow**: Axolotl `tiled_mlp: true`, DeepSpeed's `TiledMLP`. Neither is installed here, and transformers has none, so the row is ours.
#
# ### 5. Nested checkpoints
#
# What still grows is the input of every block: L tensors of tokens × width.
#
# ```text
# checkpoints   x1  x2  x3  x4  x5  x6  x7  x8  x9       L inputs
# nested        x1          x4          x7               L / k, and k - 1 more inside of one group
# ```
#
# **Guess first.** With 30 blocks, which k keeps the fewest inputs?
#
# **The idea.** Checkpoints inside checkpoints. Backward computes a group of k blocks again, keeping their inputs, and then each block once more.

# %%
from recipes_lib.memory.nested_checkpointing import (
    apply_nested_checkpointing,
    best_group,
    nested_by_hand,
)

show(nested_by_hand)
hidden = torch.randn(1, 5, 8, requires_grad=True)
plain = torch.nn.Sequential(*layers)(hidden).sum()
gradients = torch.autograd.grad(plain, hidden)
by_hand = nested_by_hand(layers, hidden, group=3).sum()
assert torch.equal(*gradients, *torch.autograd.grad(by_hand, hidden))
group = best_group(blocks_here)
for k in range(1, min(10, blocks_here) + 1):
    # While backward is in block i: the inputs of all groups up to its own, and those of
    # its group's blocks after the first, up to i.
    alive = max(i // k + 1 + i % k for i in range(blocks_here))
    print(f"k = {k:2}: at most {alive:2} inputs at a time")
print(f"taken: k = {group}, the smallest of the best, which computes the least again")


def nested(model):
    return apply_nested_checkpointing(tiled(model), group=group, check=False)


def nested_terms(tokens):
    in_tiles = equation.with_tiled_mlp(lean_terms(tokens), tile=sizes.tile)
    return equation.with_checkpointing(in_tiles, group=group)


climb("+ nested checkpoints", Way(nested), longest_by(nested_terms))

# %% [markdown]
# We know of no switch for it in a training library: they offload the inputs instead, which is the next recipe. *Not when* the inputs fit into host memory.
#
# ### 6. Offloaded inputs
#
# The same inputs can wait elsewhere: a GPU has the host's memory, a CPU has the disk.
#
# ```text
# forward       block 0  ->  block 1  -> … ->  block L-1  -> loss
#                 | x0         | x1               | stays: backward needs it first
# host or disk    v            v                  |
#                 | back       | back             |
# backward      block 0  <-  block 1  <- … <-  block L-1
# ```
#
# **Guess first.** Nested checkpoints leave about 2√L inputs; with the inputs elsewhere none stay. How many times as long is the text then, and how much of that is left without tiles?
#
# **The idea.** Autograd asks a pair of hooks where to keep each saved tensor.

# %%
from recipes_lib.memory.activation_offload import offloaded_by_hand

show(offloaded_by_hand)


def away(model):
    """Inputs of checkpointed blocks are all that autograd keeps, so they are all that goes."""
    return offload_activations(model, to=elsewhere, min_bytes=4096, in_flight=0)


def untiled_away(tokens):
    return equation.with_inputs_elsewhere(checkpoint_terms(tokens))


def tiled_away(tokens):
    return equation.with_inputs_elsewhere(tiled_terms(tokens))


climb(
    "offloaded, no tiles",
    Way(lambda model: checkpointing(lean(model)), around=away),
    longest_by(untiled_away),
)
climb(
    "+ offloaded inputs",
    Way(lambda model: checkpointing(tiled(model)), around=away),
    longest_by(tiled_away),
)
for row in ("+ nested checkpoints", "offloaded, no tiles", "+ tiled MLP"):
    more = ladder["+ offloaded inputs"].tokens / ladder[row].tokens
    print(f"to the guess: {more:.1f}× as long as {row!r}")

# %% [markdown]
# *+ offloaded inputs* replaces *+ nested checkpoints* and stands on *+ tiled MLP*: it is the other answer to the same question, without the additional forward. *Offloaded, no tiles* is how far the switches of transformers and TRL get together. Both rows have their peak, by the equation, in the first block, where the gradients of all others are there.
#
# **The line you will write tomorrow**: `model.activation_checkpointing_enable(offload=True)`, since [transformers 5.17](https://github.com/huggingface/transformers/pull/48444). It needs a GPU, and the computation waits for each copy. Ours can copy beside it (`in_flight=1`), and can go to disk. These rows wait, which takes the least memory.
#
# *Not when* the link is slow and the text short: computing grows with S² per block, and the transfer with S. Published for the same idea under FSDP2 ([accelerate#4175](https://github.com/huggingface/accelerate/pull/4175), Qwen3-0.6B): a short step goes from 1.38 to 1.86 s with its peak unchanged. At 1,048,576 tokens on eight GPUs 25 % less memory costs 0.6 % of time.
#
# ## The five lines, and everything combined
#
# The five lines are recipes 1 to 4 and 6, with the norms in tiles like the MLP, in 16-bit products, with clipping. How long is their longest text? The equation knows one precision only, so this prediction comes from dry steps of three and of four blocks: bytes grow on a straight line with the number of blocks, and on another with the tokens.

# %%
five_lines = Way(for_long_texts, adamw, inputs_wait, in_16_bits, clip=1.0)
ways["the five lines"] = five_lines


def with_all_blocks(fewer, bytes_of_fewer, bytes_of_one_more, blocks=blocks_here):
    """The bytes of a step with all blocks, on the line through few and one more."""
    of_a_block = bytes_of_one_more - bytes_of_fewer
    return bytes_of_fewer + (blocks - fewer) * of_a_block


def where_it_ends(near, far, limit):
    """The tokens at which the line through two (tokens, bytes) meets the limit."""
    of_a_token = (far[1] - near[1]) / (far[0] - near[0])
    return max(int(near[0] + (limit - near[1]) / of_a_token), 2)


def peaks_of_few(row, layers, lengths):
    """The peaks of dry steps with a few blocks."""
    with dry_run():
        step, optimizer = step_of(row, build(layers=layers))
        step(16)  # makes the optimizer's states
        peak = peak_of(step, optimizer.zero_grad)
        return [peak(tokens) for tokens in lengths]


lengths = (4 * sizes.long, 8 * sizes.long)
of_three = peaks_of_few("the five lines", 3, lengths)
of_four = peaks_of_few("the five lines", 4, lengths)
ends = []
for tokens, three, four in zip(lengths, of_three, of_four):
    ends.append((tokens, with_all_blocks(3, three, four)))
predicted = where_it_ends(*ends, sizes.limit)
climb("the five lines", five_lines, predicted, also=(sizes.long,))

# %% [markdown]
# Its gradients differ by 4e-02. We take this for the rounding of bf16; no row shows a plain step in bf16. None of the longest steps was computed. The step of the first pages was, on real text:

# %%
if not on_gpu:  # there the search has taken real steps
    step = real["five lines", sizes.long]
    dry_bytes = found["the five lines"].peaks[sizes.long]
    print(f"{sizes.long:,} tokens, a real step: {step['bytes']:,} bytes,", end=" ")
    print(f"the dry one is off by {dry_bytes / step['bytes'] - 1:+.2%}")
    plain = sdpa_terms(sizes.long).peak
    print(
        f"the plain step of that length, in fp32: {plain / GIB:.0f} GiB, by arithmetic"
    )

# %% [markdown]
# *Everything combined*, last, is the longest: fp32 again, smaller tiles, no input on its way, and the optimizer's step inside of backward, so that each gradient is used and freed at once ([notebook 01](../notebooks/01_large_models_limited_hardware.ipynb), *step in backward*). With the inputs away, nested checkpoints would only cost time.

# %%
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward


def everything(model):
    return checkpointing(tiled(model, norms=True))


def everything_terms(tokens):
    in_backward = equation.with_step_in_backward(tiled_terms(tokens, norms=True))
    return equation.with_inputs_elsewhere(in_backward)


climb(
    "everything combined",
    Way(everything, partial(apply_optimizer_in_backward, lr=2e-5, fused=True), away),
    longest_by(everything_terms),
)
longest = ladder["everything combined"].tokens
switches = ladder["SDPA + checkpoints"].tokens
print(f"{longest / switches:.1f}× the length of the library's two switches,", end=" ")
print(f"{longest / ladder['flash attention'].tokens:.1f}× that of SDPA alone")
width_in_bytes = weightless.config.hidden_size * dtype.itemsize
away_bytes = (blocks_here - 1) * longest * width_in_bytes
print(f"{away_bytes / GIB:.1f} GiB of block inputs wait elsewhere meanwhile")

# %% [markdown]
# Its text is 1.2 times as long as that of the five lines. By the lines of *Time is the next limit*, a token of it takes 16 to 20 times as long as in a plain step of 512, or more. *Not when* you clip by the norm of all gradients, accumulate, or scale the loss for fp16: a gradient that is used at once allows none of these. The five lines allow them.
#
# ## What it costs
#
# Here forward and backward run through as many blocks as one group of nested checkpoints has, without the loss, on a length that is too long for the plain step. The rows take turns, and the fastest turn of each counts.

# %%
# The first two have the blocks of another row.
untimed = ("+ chunked loss", "SDPA + checkpoints", "offloaded, no tiles")
timed = [row for row in ways if row not in untimed]
slice_of = partial(model_of_shape, sizes.shape, layers=max(group, 2), dtype=dtype)


def blocks_of(row):
    """Forward and backward through some blocks of a row."""
    way = ways[row]
    model = way.adapt(slice_of())
    ids = text_of(sizes.cost)

    def turn():
        with way.around(model):
            with way.precision():
                outputs = model.base_model(input_ids=ids, use_cache=False)
                summed = outputs.last_hidden_state.sum()
            summed.backward()
        model.zero_grad()
        synchronize()

    return turn


took = in_turns({row: blocks_of(row) for row in timed}, rounds=sizes.rounds)
ladder.set_times(took)
ladder

# %% [markdown]
# *Time* is that of the blocks against SDPA in fp32, with the range of single rounds in brackets: what overlaps has no order. Only *the five lines* multiply in bf16: against a plain step in bf16 they take 1.3 times as long at 2,048 tokens. Their *off by* compares dry steps with dry steps, and all others test the equation. One more forward adds a third of the operations. Nested checkpoints add nearly two more forwards. At this length what goes to disk is probably still in the system's page cache, so the price of a slow disk is not in it.

# %%
ladder.chart()

# %% [markdown]
# Two steps that fill the same memory, with the longest text of the first row and of the last. *Other* are results on the way from one operator to the next. From left to right are the bytes that have come and gone.

# %%
from recipes_lib.core.measure.timeline import record_timeline
from recipes_lib.report.charts.figure import NARROW
from recipes_lib.report.charts.memory_timeline import timeline_chart

# As in the search: dry steps on a CPU, real ones on a GPU.
as_searched = contextlib.nullcontext if on_gpu else dry_run


def timeline_of(row):
    """Live bytes over one step at the longest length of a row."""
    with as_searched():
        model = build()
        step, optimizer = step_of(row, model)
        step(16)  # makes the optimizer's states
        return record_timeline(
            partial(step, ladder[row].tokens), model=model, optimizer=optimizer
        )


before_and_after = {}
for row in ("baseline", "everything combined"):
    before_and_after[f"{row}: {ladder[row].tokens:,} tokens"] = timeline_of(row)
timeline_chart(
    before_and_after,
    title="The same memory, filled by two lengths",
    source=counted_here(),
    width=NARROW,
)

# %% [markdown]
# Above, activations pile up in forward. Below, each tooth is one block: in forward it leaves nothing behind, in backward it is computed again.
#
# ## Time is the next limit
#
# A token reads all tokens before it, so seconds per token should be a straight line in S. Is it one? One block of the last row, the fastest turn of each length:

# %%
one_block = everything(model_of_shape(sizes.shape, layers=1, dtype=dtype))


def through_one_block(tokens):
    outputs = one_block.base_model(input_ids=text_of(tokens), use_cache=False)
    outputs.last_hidden_state.sum().backward()
    one_block.zero_grad()
    synchronize()


through_one_block(sizes.along[0])  # warms up
turns = in_turns(
    {tokens: partial(through_one_block, tokens) for tokens in sizes.along},
    rounds=sizes.rounds,
)
per_token = {tokens: min(each) / tokens for tokens, each in turns.items()}
slope, start = numpy.polyfit([*per_token], [*per_token.values()], deg=1)
misses = []
for tokens, measured in per_token.items():
    on_the_line = start + slope * tokens
    misses.append(abs(on_the_line / measured - 1))
    print(
        f"{tokens:>7,} tokens: {1e6 * measured:5.0f} µs per token and block,", end=" "
    )
    print(f"on the line {1e6 * on_the_line:5.0f}")

plain_step, _ = step_of("flash attention", a_model())
turns = in_turns({"plain": partial(plain_step, sizes.common)}, rounds=sizes.rounds)
del plain_step
short = min(turns["plain"]) / sizes.common
loss_per_token = beside["ours"].seconds / sizes.common
long = blocks_here * (start + slope * longest) + loss_per_token
holds = max(misses) < 0.1  # else it says nothing of longer texts
print(f"{sizes.common:,} tokens, plain step: {1e3 * short:.1f} ms per token")
if holds:
    beyond = longest / max(sizes.along)
    print(f"{longest:,} tokens, by the line: {1e3 * long:.0f} ms per token,", end=" ")
    print(f"about {long / short:.0f}× as long; {beyond:.0f}× beyond the last length")
    print(f"one step of {longest:,} tokens: about {longest * long / 3600:.1f} hours")
for (which, tokens), step in real.items():
    print(f"{which}, {tokens:,} tokens in bf16:", end=" ")
    print(f"{1e3 * step['seconds'] / tokens:.1f} ms per token, in the real step")

# %% [markdown]
# The real steps of the five lines say it with disk and optimizer in them: a token of 16,384 takes 10.4 ms, more than three times that of the plain step of 2,048 (3.1 ms).
#
# The line nearly holds: both ends lie above it and the middle below, so longer texts take more time than it says. A line through the last two lengths alone gives a quarter more at the longest text. So a token takes 16 to 20 times as long as in the plain step of 512, or more. Disk and optimizer are not in it. Time stops you before memory does.
#
# <!-- numbers:gpu-04 -->
# <!-- end -->
#
# ## Your model, your card
#
# The same question for other models, and for cards that are not here. None of these steps has run on a card. Three ways to train, and what each adds to the five lines:
#
# | | weights | the code |
# |---|---|---|
# | *fp32* | 32 bits, all train | the five lines |
# | *full* | 16 bits, all train | `from_pretrained(name, dtype=torch.bfloat16)`, and as the optimizer `apply_optimizer_in_backward(model, optimizer_class=partial(bf16_adamw, rounding="stochastic"), lr=2e-5)`, without clipping |
# | *QLoRA* | 4 bits, small adapters train | `model = apply_qlora(model, compute_dtype=torch.bfloat16)` before them ([notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb)) |
#
# A cell has three lengths. First *SDPA and checkpoints*, then the same *with a chunked loss*, which is as far as Liger, TRL's loss, or flash attention 2 and 3 beside them get: both by the equation. Last *the five lines*, on a line through dry steps of 65,536 and 131,072 tokens with the kernels of an A100. Their `in_flight` is 0, which waits for each input.
#
# **Before you use a cell:**
#
# - It counts tensors and nothing else. Holes in an allocator and buffers of a library come on top. On a new card begin at half of a length.
# - It is the limit of the card, and the host has one too: it holds (blocks − 1) × width × 2 bytes a token, and twice that in fp32. The last column says it for 100,000 tokens. For the longest text on the A100 it is 147 GB in 8B *QLoRA* and 167 GB in 3B *full*, and on the T4 12.6 GB in 1B *QLoRA*. Yours is the smaller of the two limits.
# - These models know 131,072 positions. A longer text in a cell is about memory only: Llama 3 is scaled already, so recipe 8 refuses it, and 1,855K is 14 times what it knows.
# - In *full*, the first two lengths keep all gradients and the last keeps none. Part of that arrow is the optimizer's step in backward.
# - A T4 has no bf16. Its *QLoRA* multiplies in fp16. *Full* cannot be trained there: fp16 scales the loss, which a step in backward does not allow. Those cells are about memory only.

# %%
from IPython.display import Markdown

from recipes_lib.core.predict import CARDS, predict
from recipes_lib.core.predict.flops import step_operations
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.precision.pure_bf16 import bf16_adamw

cards = {"T4, 16 GB": "T4", "RTX 4090, 24 GB": "RTX 4090", "A100, 80 GB": "A100-80GB"}
# The doctor's rule: 5 % for holes between tensors, and two workspaces of cuBLAS.
room = {
    title: 0.95 * CARDS[card].for_tensors - 2 * CARDS[card].workspace
    for title, card in cards.items()
}


def by_equation(model, method, chunked):
    """The terms of a step with SDPA and checkpoints, as a function of the tokens."""

    def terms(tokens):
        step = equation.plain_step(model, rows=1, length=tokens)
        if method == "QLoRA":
            step = equation.in_four_bits(equation.with_adapters(step, rank=16))
        if chunked:
            step = equation.with_chunked_loss(step)
        return equation.with_checkpointing(step)

    return terms


def adapted(model, method):
    """The model, and its optimizer."""
    if method == "full":
        rounded = partial(bf16_adamw, rounding="stochastic")
        return model, apply_optimizer_in_backward(
            model, optimizer_class=rounded, lr=2e-5
        )
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.AdamW(trained, lr=2e-5, fused=True)


def dry_step(shape, method, tokens, layers, recipes):
    """`build` of `core.predict`: a model, its optimizer, and a function that takes a step."""

    def build_few():
        kept_in = torch.float32 if method == "fp32" else torch.bfloat16
        model = model_of_shape(shape, layers=layers, dtype=kept_in, device="cpu")
        if method == "QLoRA":
            model = apply_qlora(model, compute_dtype=torch.bfloat16)
        model, optimizer = adapted(recipes(model), method)
        around = contextlib.nullcontext
        if recipes is for_long_texts:
            around = partial(offload_activations, model, to="host", in_flight=0)
        ids = torch.ones(1, tokens, dtype=torch.long)
        in_bf16 = partial(torch.autocast, "cpu", torch.bfloat16)

        def step(model, optimizer):
            train(model, optimizer, [ids], around, in_bf16)

        return model, optimizer, step

    return build_few


def counted(shape, method, blocks, tokens, recipes=for_long_texts):
    """Bytes of a step of the whole model, on the line through dry steps of 2 and 3 blocks."""
    peaks = []
    for layers in (2, 3):
        build_few = dry_step(shape, method, tokens, layers, recipes)
        few = predict(build_few, card=CARDS["A100-80GB"], allocator=False)
        peaks.append(few.timeline.peak)
    return with_all_blocks(2, *peaks, blocks)


def thousands(tokens):
    return f"{tokens / 1000:,.0f}K" if tokens > 1000 else "–"


near, far = 65_536, 131_072  # tokens of the two dry steps
table = [["", *cards, "host, 100K tokens"], ["---", *["--:" for _ in cards], "--:"]]
steps_on_the_a100 = []
for shape in sizes.cards:
    model = model_of_shape(shape, dtype=torch.bfloat16, device="meta")
    blocks = model.config.num_hidden_layers
    for method in sizes.methods:
        # Weights, gradients and both averages.
        if method == "fp32" and 16 * model.num_parameters() > max(room.values()):
            continue
        ends = [
            (tokens, counted(shape, method, blocks, tokens)) for tokens in (near, far)
        ]
        cells = []
        for limit in room.values():
            lengths = []
            if method != "fp32":  # the equation knows one precision only
                for chunked in (False, True):
                    terms = by_equation(model, method, chunked)
                    fits = terms(2).peak < limit
                    lengths.append(longest_by(terms, limit) if fits else 0)
            tokens = where_it_ends(*ends, limit)
            lengths.append(tokens)
            cells.append(" → ".join(thousands(each) for each in lengths))
        of_a_number = 4 if method == "fp32" else 2  # bytes
        on_host = (blocks - 1) * 100_000 * model.config.hidden_size * of_a_number
        table.append([f"{shape} {method}", *cells, f"{on_host / 1e9:,.0f} GB"])
        # 4/3: forward runs twice.
        operations = 4 / 3 * step_operations(model, rows=1, length=max(tokens, 2))
        seconds = operations / (0.4 * CARDS["A100-80GB"].rate)
        steps_on_the_a100.append([shape, method, tokens, duration(seconds)])
Markdown("\n".join(f"| {' | '.join(cells)} |" for cells in table))

# %%
print("a step of the longest text on the A100, at 40 % of its data sheet's rate:")
for shape, method, tokens, words in steps_on_the_a100:
    print(f"  {shape} {method}, {tokens:,} tokens: {words}")
# Do line and equation hold? Dry steps at two lengths that are in none of the others.
shape, method, tokens, _ = steps_on_the_a100[-1]
limit = room["A100, 80 GB"]
model = model_of_shape(shape, dtype=torch.bfloat16, device="meta")
blocks = model.config.num_hidden_layers
tokens = min(tokens * 3 // 4, 400_000)
used = counted(shape, method, blocks, tokens)
print(f"{shape} {method}, the five lines, {tokens:,} tokens: a dry step", end=" ")
print(f"takes {used / GIB:.1f} GiB, the line says", end=" ")
of_a_token = (ends[1][1] - ends[0][1]) / (far - near)
print(f"{(ends[0][1] + (tokens - near) * of_a_token) / GIB:.1f}")
terms = by_equation(model, method, chunked=False)
tokens = longest_by(terms, limit)
used = counted(shape, method, blocks, tokens, lambda model: checkpointing(sdpa(model)))
print(f"{shape} {method}, SDPA and checkpoints, {tokens:,} tokens: a dry step", end=" ")
print(f"takes {used / GIB:.1f} GiB, the equation says {terms(tokens).peak / GIB:.1f}")

# %% [markdown]
# With SDPA and checkpoints alone the logits break first, because these models have a vocabulary of 128,256. QLoRA saves fixed bytes, and takes more for each token. So on the two larger cards the 1B model has the longer text in *full*. The times of a step are a lower bound, because the MLP's third forward is not counted. 40 % of the data sheet is what the training of Llama 3 reached.
#
# **Beside what others have measured.** For Llama 3.1 8B, QLoRA of rank 32 on 80 GB, [Unsloth](https://unsloth.ai/blog/llama3-3) reports 28,000 tokens with Hugging Face and flash attention 2, and 342,000 with Unsloth, which offloads inputs and chunks its loss. Their cells here, for rank 16, are 40,500 and 578,000: 1.4 and 1.7 times as long. What exactly they ran we do not know.
#
# **For your own model** ask the doctor. `--model` is an id of the hub, a folder or a shape. *Fits* says with what, and *costs* at what price; the last line is the step itself, on tensors without data. Its times are at the full rate of the data sheet. It asks LoRA before QLoRA, whose base is rounded; here QLoRA fits without the offload. Its `finetune` command lacks three of the recipes, and says so:

# %%
from recipes_lib.workflows.out_of_memory_doctor import diagnose

shape = sizes.cards[-1]
options = '--card "RTX 4090" --dtype bf16 --batch-size 1 --seq-len 32768'
print(f"$ python -m recipes_lib doctor --model {shape} {options}")
yours = model_of_shape(shape, dtype=torch.bfloat16, device="meta")
diagnosis = diagnose(model=yours, batch_size=1, seq_len=32_768, card="RTX 4090")
print(diagnosis)
print(diagnosis.check())

# %% [markdown]
# ### A trap: hybrid models
#
# Qwen3.5, Qwen3-Next, LFM2 and the Mamba hybrids have attention in some layers only. The others are recurrences, or gated short convolutions in LFM2: their time grows with S. Without the packages of their kernels, transformers computes a loop in fp32; `load_model` says so, and names the packages. Published for Qwen3.5-9B ([#48718](https://github.com/huggingface/transformers/issues/48718)): 1.22 s a step, and 0.70 s with `flash-linear-attention` installed. And their state runs past every mask: short texts that are *packed* into one row read each other, unless the kernel is told where each begins. `check_document_mask(model, batch)` of [sequence packing](../recipes_lib/training/sequence_packing.py) raises an error where they do.
#
# ## Part B: another model, for less time or longer texts
#
# ### 7. Sliding window and block-sparse attention
#
# Flash attention stores no scores, but it still computes one for every pair of tokens.
#
# **Guess first.** With a window of a sixteenth of the text: how many times as fast is attention?
#
# **The idea.** Let each token read its last W tokens only: about S × W pairs in place of S²/2. *Sinks* are a few first tokens that stay readable. A *block-sparse* pattern lets a block read the blocks just before it and a few that all read. Each line is a token that reads, each column one that can be read:

# %%
from recipes_lib.attention.block_sparse import (
    apply_block_sparse,
    block_sparse_attention,
    block_sparse_mask,
    predicted_share_of_pairs,
)
from recipes_lib.attention.sliding_window import (
    apply_sliding_window,
    predicted_speedup,
    sliding_window_attention,
)
from recipes_lib.report.charts.pattern import pattern_chart

positions = torch.arange(64)
distance = positions[:, None] - positions  # of a query (down) from a key (right)
causal = distance >= 0
in_window = causal & (distance < 16)
sinks = causal & (positions < 4)
sparse = block_sparse_mask(seq_len=64, block_size=4, local=3, global_blocks=1)
patterns = {"full": causal, "window of 16": in_window}
patterns |= {"window and 4 sinks": in_window | sinks, "block-sparse": sparse}
pattern_chart(patterns, title="Reading less: which keys each query reads")

# %%
tokens = sizes.read
qkv = []
key_heads = weightless.config.num_key_value_heads
for count in (weightless.config.num_attention_heads, key_heads, key_heads):
    of_heads = (1, count, tokens, weightless.config.head_dim)  # [B, H, S, E]
    made = torch.randn(of_heads, device=here.device, dtype=dtype, requires_grad=True)
    qkv.append(made)
# A block reads itself and the 3 blocks before it, and the first block of the text.
pattern = {"block_size": sizes.window // 4, "local": 4, "global_blocks": 1}
attentions = {
    # With a window as long as the text it is PyTorch's causal attention.
    "full": partial(sliding_window_attention, window=tokens),
    "sliding window": partial(sliding_window_attention, window=sizes.window),
    "block-sparse": partial(block_sparse_attention, **pattern),
}


def forward_and_backward(attention):
    attention(*qkv).sum().backward()


turns = in_turns(
    {way: partial(forward_and_backward, each) for way, each in attentions.items()},
    rounds=sizes.rounds,
)
fewer_pairs = {
    "sliding window": predicted_speedup(seq_len=tokens, window=sizes.window),
    "block-sparse": 1 / predicted_share_of_pairs(seq_len=tokens, **pattern),
}
speedup = {}
for way, fewer in fewer_pairs.items():
    ratios = [full / mine for full, mine in zip(turns["full"], turns[way])]
    speedup[way] = min(turns["full"]) / min(turns[way])
    print(f"{way:<14} on {tokens:,} tokens: {speedup[way]:4.1f}× as fast", end=" ")
    print(f"({min(ratios):.1f} to {max(ratios):.1f}), {fewer:4.1f}× fewer scores")

# %% [markdown]
# To the guess: a window of a sixteenth leaves about an eighth of the pairs, because of two tokens one only reads the other. The *fewer scores* above are not eight times: they count whole blocks. The window gets 5.4 of 6.6, block-sparse 4.5 of 7.4. The model was trained to read more. What does it cost to read less?

# %%
quarter = sizes.short // 4
# No proof on the model: the loss says how much it changes.
windowed = partial(apply_sliding_window, window=quarter, check=False)
blockwise = partial(apply_block_sparse, block_size=sizes.short // 16, check=False)
reads_less = {
    "full": sdpa,
    "window": windowed,
    "window and 4 sinks": partial(windowed, sinks=4),
    "block-sparse": partial(blockwise, local=3, global_blocks=1),
}
read_ids = text_of(sizes.short)
price = {}
for which, adapt in reads_less.items():
    model = adapt(load_model(sizes.trained).eval())
    with torch.no_grad():
        price[which] = model(input_ids=read_ids, labels=read_ids).loss.item()
    print(f"{which:<18} loss {price[which]:.3f}")

# %% [markdown]
# Reading less makes the model worse at once, and four sinks repair most of it in a window: a softmax must add up to one, so a head that needs no token sends its attention to the first ones (Xiao et al., 2023). With sinks the window is better (1.920) than block-sparse (1.984), and without them much worse (2.468). Block-sparse reads fewer pairs than either, so no order follows from this, on one text. Look at the loss on your own texts first. *Not when* far tokens decide.
#
# **The line you will write tomorrow.** Models that were trained with a window (Mistral, Gemma 3) take it from `config.sliding_window`, and `attn_implementation="flex_attention"` makes a kernel of the rule on a GPU. Llama has no such field: there it is `apply_sliding_window(model, window=…, sinks=4)`.
#
# **Short texts first**, a *curriculum* of lengths, can save attention's share of a step, and that is little in a large model:

# %%
from recipes_lib.training.curriculum import steps_at_equal_compute

stages = [(128, 0.4), (512, 0.3), (2048, 0.3)]  # tokens, and a share of the steps
bought = {}
for curriculum_of in ("smollm2-135m", "llama-3.1-8b"):
    model = model_of_shape(curriculum_of, device="meta")
    bought[curriculum_of] = steps_at_equal_compute(model, stages, 60, full_length=2048)
print("in place of 60 steps of 2,048 tokens, at equal compute:", bought)

# %% [markdown]
# ### 8. RoPE scaling: beyond the trained length
#
# In RoPE, *rotary position embeddings*, each pair of numbers of a query and of a key is turned by an angle: position × frequency. A text longer than those of the training has angles that the model has never seen. Nothing raises an error there, so `check_length` does.
#
# **Guess first.** Where does the loss begin to climb: at the trained length, or later?
#
# **The idea.** Turn the pairs more slowly. *linear*: all of them. *dynamic* (NTK): a larger base, the number whose powers are the frequencies. *yarn*: slow the pairs that made less than one full turn in the training, leave those alone that made more than 32, and slow those between by a part. The code is plain RoPE: scaling changes its `frequencies` and nothing else in it.

# %%
from recipes_lib.architecture.rope import rotate

show(rotate)
try:
    check_length(load_model(sizes.trained), 16_384)
except ValueError as reason:
    print(reason)

# %% [markdown]
# These texts take minutes on a CPU, so the curves come from the machine below the picture: the mean of three texts, without further training (`python -m benchmarks.gpu --parts rope`).

# %%
from recipes_lib.report.charts.lines import lines
from recipes_lib.report.records import recorded
from recipes_lib.report.style import INK

rope = recorded("rope")
means = {
    kind: torch.tensor(each).mean(0).tolist() for kind, each in rope["losses"].items()
}
places = [rope["window"] * (number + 0.5) for number in range(len(means["none"]))]
curves = {kind: list(zip(places, means[kind])) for kind in ("none", "linear", "yarn")}
figure = lines(
    curves,
    title="Beyond the trained length (dashed) the loss climbs, not with YaRN",
    source=rope["measured_on"],
    xlabel="position in the text, tokens",
    ylabel="loss, nats",
    ylim=(0, None),
    width=NARROW,
)
figure.axes[0].axvline(8192, color=INK, linestyle="--", linewidth=1)
print(
    "last window:", ", ".join(f"{kind} {each[-1]:.2f}" for kind, each in means.items())
)
figure

# %% [markdown]
# To the guess: later. *Linear* changes every angle, and costs much over most of the text. Training repairs it, published with up to 1,000 steps (Chen et al., 2023); nothing is trained here. *Dynamic*, which the picture leaves out, ends where *yarn* does (1.25 and 1.24). Both cost a little in the trained part, so *not when* your texts are no longer than that. YaRN's `factor` is your length over the trained one; only 2 is tried here. Llama 3.1 and 3.2 are scaled already (`rope_type` is `llama3`), and `apply_rope_scaling` refuses them. **The line you will write tomorrow** is `rope_parameters` in config.json, which transformers and vLLM read. `apply_rope_scaling(model, kind="yarn", factor=2)` writes it and checks it.
#
# **Not shown here**: a text that several GPUs share (ring attention and Ulysses, [notebook 02](../notebooks/02_multi_gpu_training.ipynb)), packing short texts ([notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb)), and [a step of 262,144 tokens](../docs/long-card.md) on 24 GB, which is predicted and has not run.
#
# ## Exercises
#
# 1. With half the layers, which gains the most? *(What keeps the activations of all layers.)*
# 2. Llama 3.2 1B has a vocabulary of 128,256. Which of recipes 2 and 3 gains more there? *(In 24 GiB, for its weights and states alone take more than four. Checkpointing; and the large factor belongs to the pair.)*
# 3. From which k on is a larger k of nested checkpoints worse? *(From 9 on with 30 blocks, by the list at recipe 5.)*


# %%
def longest_with(recipes, model, limit):
    def terms(tokens):
        step = equation.plain_step(model, rows=1, length=tokens)
        if "chunked" in recipes:
            step = equation.with_chunked_loss(step)
        if "checkpointed" in recipes:
            step = equation.with_checkpointing(step)
        return step

    return longest_by(terms, limit)


half = build(layers=blocks_here // 2, device="meta")
wide = model_of_shape("llama-3.2-1b", dtype=torch.float32, device="meta")
for recipes in ("plain", "chunked", "checkpointed", "chunked and checkpointed"):
    gain = longest_with(recipes, half, sizes.limit)
    gain /= longest_with(recipes, weightless, sizes.limit)
    print(f"1. {recipes}: {gain:.1f}× as long with half the layers")
    print(f"2. {recipes}: {longest_with(recipes, wide, 24 * GIB):,} tokens")

# %% [markdown]
# ## References
#
# - Dao et al., *FlashAttention*, 2022; Dao, *FlashAttention-2*, 2023
# - Hsu et al., *Liger Kernel*, 2024; Wijmans et al., *Cut Your Losses*, 2024
# - Bekman et al., *Arctic Long Sequence Training*, 2025: tiled MLP and loss, checkpoints on the host
# - Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016
# - Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, 2023
# - Su et al., *RoFormer*, 2021; Peng et al., *YaRN*, 2023; Chen et al., *Positional Interpolation*, 2023

# %%
in_one_precision = [row for row in ladder.rows if row.name != "the five lines"]
loss_error = max(abs(row.loss - first_loss) for row in in_one_precision)
gradient_error = max(row.gradient_error for row in in_one_precision)
ladder.note(
    model=sizes.shape,
    limit_bytes=sizes.limit,
    timed_at=sizes.cost,
    loss_at=sizes.common,
    loss_error=loss_error,
    gradient_error=gradient_error,
    switches=switches,
    away_bytes=away_bytes,
    slopes=slopes,
    local={"tokens": sizes.read, "speedup": speedup, "ideal": fewer_pairs},
    price=price,
    bought=bought,
    loss={which: vars(cost) for which, cost in beside.items()},
    real=real["five lines", sizes.long] | {"tokens": sizes.long},
)
if not on_gpu:
    ladder.note(predicted={"bytes": dry_bytes})
if holds:
    ladder.note(per_token={"short": short, "long": long}, measured_to=max(sizes.along))
assert loss_error < (2e-2 if on_gpu else 1e-4), "the same loss"
assert gradient_error < (1e-1 if on_gpu else 1e-3), "the same gradients"
if not fast():  # lengths as short as those of FAST mode say nothing
    assert all(abs(row.prediction_error) < 0.1 for row in ladder.rows), "predictions"
    assert ladder.rows[0].tokens < switches < longest, "each is longer"
print(f"all checks passed: loss to {loss_error:.0e}, gradients to {gradient_error:.0e}")
