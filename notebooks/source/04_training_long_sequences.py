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
# > **895 → 112,167 tokens:** the longest text on which every weight of smollm2-135m trains within 4 GiB, **81 times as long** as with transformers' default, SDPA, and 125 times as long as with eager attention. At that length a token takes 18.0 times as long as in a plain step of 512 tokens. The loss is the same in every row, to 4e-07. No step of such a length was computed here: its bytes were counted on tensors that have shapes and no data, and its time is that of one block, on a line through texts of up to 16,384 tokens. Every row was predicted first; the arithmetic is off by 2.6% at most.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-26.
# <!-- end -->
#
# A longer text needs more memory, and at some length the training step fails. This notebook asks how long a text can be on which one small model trains in a fixed amount of memory. It predicts the answer for each recipe, searches for it, and checks that the loss of a first step is still the same number. Then it asks what the recipes cost in time, where they are needed. Whether the model can *read* such a text is another question: SmolLM2 has learned positions up to 8,192, and recipe 8 is for what lies beyond.
#
# | | |
# |---|---|
# | **You will learn** | to predict the longest text that fits, and which recipe moves that limit |
# | **You need** | Python and the basics of PyTorch; no GPU, no login |
# | **Minutes to run** | nine on two CPU cores |
# | **Minutes to read** | about 45 |
# | **Which hardware has run this** | two CPU cores; no GPU yet |

# %% [markdown]
# ## The map
#
# | | recipe | makes smaller | the switch of a library |
# |---|---|---|---|
# | 1 | [flash attention](../recipes_lib/attention/flash.py) | scores: tokens × tokens | `attn_implementation="sdpa"` |
# | 2 | [chunked loss](../recipes_lib/memory/chunked_cross_entropy/__init__.py) | logits: tokens × vocabulary | `F.linear_cross_entropy`, Liger, TRL |
# | 3 | [checkpointing](../recipes_lib/memory/activation_checkpointing.py) | activations of all blocks but one | `model.activation_checkpointing_enable()` |
# | 4 | [tiled MLP](../recipes_lib/memory/tiled_mlp.py) | the widest part of that one block | Axolotl `tiled_mlp: true` |
# | 5 | [nested checkpoints](../recipes_lib/memory/nested_checkpointing.py) | inputs of the blocks | none |
# | 6 | [offloaded inputs](../recipes_lib/memory/activation_offload.py) | the same, to the host or the disk | `activation_checkpointing_enable(offload=True)` |
# | 7 | [sliding window](../recipes_lib/attention/sliding_window/__init__.py), [block-sparse](../recipes_lib/attention/block_sparse/__init__.py) | time of attention | FlexAttention |
# | 8 | [RoPE scaling](../recipes_lib/architecture/rope.py) | the loss beyond the trained length | `rope_parameters` in config.json |
#
# Recipes 1 to 6 are **Part A**: the same mathematics, in less memory. Recipes 7 and 8 are **Part B**: they change the model.
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
import time
from functools import partial

import torch
import torch.nn.functional as F

from recipes_lib.core.data import load_text
from recipes_lib.core.measure import dry, dry_run, in_turns
from recipes_lib.core.measure.machine import (
    GIB,
    choose_sizes,
    machine,
    seed_everything,
    synchronize,
)
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape
from recipes_lib.report.show import show

here = machine()
on_gpu = here.device == "cuda"
tokenizer = load_tokenizer()
gc.freeze()  # counting bytes walks through all objects: not through those of the imports
dtype = torch.bfloat16 if on_gpu and here.native_bf16 else torch.float32
print(here)

# %% [markdown]
# All sizes stand in one cell. On a CPU we set a limit of 4 GiB for all tensors together and train all weights of the real SmolLM2-135M in fp32. Nothing fails at the limit: we count bytes and compare. A GPU takes a larger model with random weights, since memory does not depend on what the weights are.

# %%
cpu = dict(
    shape="smollm2-135m",
    layers=None,  # all of them
    limit=4 * GIB,
    common=512,  # tokens of a text that every row can train on
    grows=(2048, 8192),  # lengths between which we see how bytes grow
    tile=256,  # tokens of a tile
    attention=(1024, 4096),  # lengths at which attention alone is timed
    cost=4096,  # tokens at which the rows are timed
    along=(2048, 4096, 8192, 16384),  # lengths at which one block is timed
    loss=(512, 576, 49152),  # tokens, width, vocabulary
    rounds=3,  # of turns on the clock
    checked=2048,  # tokens on which a real step of the last row is counted
    long_text=16384,  # tokens on which windows are timed
    window=1024,
    trained="smollm2",  # the model whose losses say something
    reads=2048,  # tokens on which we ask what reading less costs
    card=("llama-3.2-1b", "L4", 16384, 4096),  # shape, card, tokens and a tile
    stretched=None,  # (tokens, window, texts) for RoPE; None: as recorded
)
gpu16 = cpu | dict(
    shape="llama-3.2-1b",
    layers=4,  # of 16
    limit=11 * GIB,
    common=1024,
    tile=512,
    attention=(4096, 16384),
    cost=16384,
    along=(8192, 16384, 32768, 65536),
    loss=(2048, 2048, 128256),
    stretched=(12288, 1024, 3),
)
gpu24 = gpu16 | dict(layers=None, limit=14 * GIB)
# Continuous integration checks that the code works, not how much it saves.
brief = cpu | dict(
    shape="tiny-smollm2",
    limit=100 * 2**20,
    common=32,
    grows=(32, 256),
    tile=16,
    attention=(256, 512),
    cost=256,
    along=(64, 128, 256),
    loss=(512, 64, 8192),
    rounds=1,
    checked=64,
    long_text=2048,
    window=256,
    trained="tiny-smollm2",
    reads=256,
    card=("tiny-smollm2", "L4", 256, 64),
    stretched=(200, 100, 1),
)
sizes = choose_sizes(cpu=cpu, gpu16=gpu16, gpu24=gpu24, gpu80=gpu24, fast=brief)
sizes

# %% [markdown]
# ## The training loop
#
# This is the whole training, and every row below uses it. A recipe changes one of its lines: how the model is made, which optimizer it gets, or what stands around forward and backward.


# %%
def train(model, optimizer, texts, around=contextlib.nullcontext):
    """One step per text [1, S]: forward, backward, update. Gives the losses."""
    losses = []
    for ids in texts:
        with around():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)


book = tokenizer(load_text(split="validation")[:200_000])["input_ids"]


def text_of(tokens):
    """Real text [1, S]; where tensors have no data, any."""
    if dry():
        return torch.ones(1, tokens, dtype=torch.long)
    ids = torch.tensor([book], device=here.device)
    return ids[:, torch.arange(tokens) % ids.shape[1]]


# %% [markdown]
# ## What runs out: one equation
#
# Weights and optimizer states (AdamW keeps two numbers per weight) take the same bytes for any text. The rest grows with its length $S$:
#
# $$\text{peak}(S) = \text{fixed} + a\,S^2 + b\,S$$
#
# $a$ counts attention *scores*: one number for each pair of tokens, in each head of each layer. $b$ counts what every single token leaves behind: *activations*, which forward keeps for backward, and *logits*, one number per entry of the vocabulary, from which the loss is made. Each recipe of part A makes $a$ or $b$ smaller. *Copies* are two more tensors of the size of the embedding, for a moment of backward, because the embedding is also the output layer. [Notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) explains each term, and [equation.py](../recipes_lib/core/predict/equation.py) has them in lines to read aloud.
#
# **Guess first.** Within 4 GiB, how many tokens can a text have on which SmolLM2-135M trains without any recipe?

# %%
from recipes_lib.core.predict import equation
from recipes_lib.workflows.longest import predicted_longest

build = partial(model_of_shape, sizes.shape, layers=sizes.layers, dtype=dtype)
weightless = build(device="meta")  # weighs nothing: enough for arithmetic


def eager_terms(tokens):
    plain = equation.plain_step(weightless, rows=1, length=tokens)
    return equation.with_eager_attention(plain)


def longest_by(terms):
    """The longest text within the limit by arithmetic."""
    return predicted_longest(lambda tokens: terms(tokens).peak, limit_bytes=sizes.limit)


step = eager_terms(sizes.common)
print(step)
heads = weightless.config.num_attention_heads * weightless.config.num_hidden_layers
a = heads * dtype.itemsize
b = (step.activations + step.loss - a * sizes.common**2) / sizes.common
print(f"fixed {(step.weights + step.states) / 2**20:,.0f} MiB")
print(f"a     {a:,} bytes per pair of tokens")
print(f"b     {b / 1024:,.0f} KiB per token")
print(f"longest text: {longest_by(eager_terms):,} tokens")

# %% [markdown]
# Check it by hand, with the sizes of a CPU. Fixed are weights and states, 513 + 1,026 MiB. The scores are 9 heads × 30 layers × 512² pairs × 4 bytes = 270 MiB, a part of the activations. The loss is 512 tokens × 49,152 logits × 4 bytes × 3 = 288 MiB, because it needs this table three times. With $a$ and $b$ the limit is a quadratic equation for $S$, and its root is the length below.
#
# The peak is when backward begins: activations and loss are complete. By the end of backward the activations are freed, and all gradients exist. With checkpoints there is a third moment: one block is computed again.
#
# ## Baseline: every score is stored
#
# The plain formula of attention is softmax(QKᵀ/√E) V, with a query, a key and a value per token. It is called *eager*: all scores are made, and they wait for backward.
#
# The results go into a table that grows by one row per recipe, the *ladder*. `climb` predicts the longest text by arithmetic. Then it searches: from the prediction it goes up and down until one length fits and another, 2 % longer, does not. *Found* is where a straight line between the two meets the limit; headline and chart show the length that fits. Last comes a real step on a text that every row can do, for the loss. It says that forward is the same; that gradients are, the small examples of recipes 2, 3 and 5 show, and on whole models the package's tests.
#
# A step of the longest texts would take hours here, so on a CPU the search takes **dry steps**: the loop above on PyTorch's fake tensors, which have shapes and no data. Every byte is counted, and nothing is computed.
#
# The equation knows nothing of operators, and a dry step knows nothing of the equation. That both agree says that no term is forgotten. Whether a real step takes the same bytes, we measure at two lengths below *Everything combined*.

# %%
from recipes_lib.report.ladders.length import LengthLadder
from recipes_lib.workflows.longest import peak_of, search

ladder = LengthLadder(
    "04_training_long_sequences",
    loss_at=sizes.common,
    timed_at=sizes.cost,
    against="flash attention",
)
fixed = eager_terms(2).weights + eager_terms(2).states  # bytes
found = {}  # by row: what the search has found
ways = {}  # by row: what changes the model, its optimizer, what is around a step


def climb(row, terms, adapt, make_optimizer=adamw, around=None, also=()):
    """Predict the longest text of a row, search for it, and add the row."""
    seed_everything(0)
    ways[row] = (adapt, make_optimizer, around)
    expected = longest_by(terms)

    def arrange():
        step, optimizer = step_of(row, build())
        return step, optimizer.zero_grad

    options = {"limit_bytes": sizes.limit, "resolution": 0.02, "also": also}
    found[row] = search(arrange, start=expected, **options)
    # And a real step, on a text that every row can do.
    step, _ = step_of(row, a_model())
    ladder.add(
        row,
        tokens=found[row].tokens,
        crossing=found[row].crossing,
        peak_bytes=found[row].peak_bytes,
        predicted=expected,
        loss=step(sizes.common)[0].item(),
    )
    print(ladder.line(row))
    grows = (found[row].peak_bytes - fixed) / found[row].tokens
    print(f"  beside weights and states: {grows / 1024:,.0f} KiB per token")


def a_model():
    """With trained weights on a CPU, and random ones on a GPU."""
    return build() if on_gpu else load_model(sizes.trained)


def step_of(row, model):
    """The loop with the recipes of a row: a function of the number of tokens."""
    adapt, make_optimizer, around = ways[row]
    model = adapt(model)
    optimizer = make_optimizer(model)
    options = {} if around is None else {"around": partial(around, model)}

    def step(tokens):
        return train(model, optimizer, [text_of(tokens)], **options)

    return step, optimizer


def eager(model):
    model.set_attn_implementation("eager")
    return model


climb(
    "baseline", eager_terms, eager, also=sizes.grows
)  # two lengths more, for recipe 1

# %% [markdown]
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
# **The line you will write tomorrow** is `set_attn_implementation("sdpa")`, or nothing, because SDPA is the default of transformers. So this row is what most people have today. `best_kernel` says which kernel runs behind it, and why. Our `apply_flash_attention` does one thing more: it refuses or repairs what would silently take the slow kernel, such as grouped heads in fp32 on CUDA.


# %%
def sdpa(model):
    model.set_attn_implementation("sdpa")
    return model


def sdpa_terms(tokens):
    return equation.plain_step(weightless, rows=1, length=tokens)


print(best_kernel(weightless).why.split(";")[0])
climb("flash attention", sdpa_terms, sdpa, also=sizes.grows)

# %%
import math

from recipes_lib.workflows.bench.kernels import measure_attention


def exponent(peaks, lengths):
    """Bytes beside the fixed ones grow as tokens to this power."""
    small, large = [peaks[tokens] - fixed for tokens in lengths]
    return math.log(large / small) / math.log(lengths[1] / lengths[0])


slopes = {row: exponent(found[row].peaks, sizes.grows) for row in found}
for row, slope in slopes.items():
    print(f"{row:<16} memory grows as S^{slope:.2f}")
layer = model_of_shape(sizes.shape, layers=1, dtype=dtype)
for tokens in sizes.attention:
    both = measure_attention(layer, seq_len=tokens, rounds=sizes.rounds)
    seconds = {}
    for kernel, (forward, backward, _, peak) in both.items():
        seconds[kernel] = forward + backward
        print(
            f"{tokens:>6,} tokens, {kernel:<6}{seconds[kernel]:8.3f} s{peak / 2**20:8,.0f} MiB"
        )
    print(f"        eager takes {seconds['eager'] / seconds['fused']:.1f}× the time")
del layer
gain = ladder["flash attention"].times_previous
print(f"to the guess: {gain:.2f}× as long")

# %% [markdown]
# Without the scores memory grows with S. With them it grows faster, and not yet with S² at these lengths: at 2,048 tokens the part *b S* is still about half. The activations of all layers and the logits stay, so the text is only that much longer. The saving is for what comes next: at 100,000 tokens the scores of a single layer would take 335 GiB.
#
# ### 2. Chunked loss
#
# Now the logits are the largest tensor: one number per token and entry of the vocabulary.
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
from recipes_lib.memory.chunked_cross_entropy import (
    apply_chunked_cross_entropy,
    plain_chunked_loss,
)

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
# **The line you will write tomorrow** is `F.linear_cross_entropy(states, head, labels, options=…)`, new in torch 2.13; or `use_liger_kernel=True` in the Trainer; or TRL, whose `SFTTrainer` has such a loss by default. Here they run beside ours, on the loss alone. *Value off by* is the relative error against fp64. On a CPU we see no tensors inside of one operator.

# %%
from recipes_lib.workflows.bench.kernels import compare_losses

if hasattr(F, "linear_cross_entropy"):
    chunks = torch.nn.LinearCrossEntropyOptions(
        chunking_method=None, batch_chunk_size=16
    )
    theirs = F.linear_cross_entropy(states, head, labels, options=chunks)
    assert torch.allclose(theirs, at_once)

loss_tokens, width, vocabulary = sizes.loss
beside = compare_losses(
    tokens=loss_tokens, hidden=width, vocab=vocabulary, dtype=dtype, rounds=2
)
for which, cost in beside.items():
    print(f"{which:<18}{cost}")


# %% [markdown]
# The row *torch* has default options, whose chunks are small and slow; with chunks of 256 tokens it is about as fast as ours. TRL's chunks are pieces of the vocabulary, by default so large that two of them are all of this one; with 2,048 entries each it needs the least. In bf16 PyTorch's adds in bf16, and ours in fp32. That is what ours does more: it is one call on a model of any family, it checks itself against the model's own loss, and its sums are in fp32. So with TRL look that `loss_type` is `"nll"`, in the Trainer take Liger, and in a loop of your own ours or PyTorch's with chunks of 256 tokens.


# %%
def lean(model):
    return apply_chunked_cross_entropy(sdpa(model))


def lean_terms(tokens):
    return equation.with_chunked_loss(sdpa_terms(tokens))


climb("+ chunked loss", lean_terms, lean)
print(f"to the guess: {ladder['+ chunked loss'].times_previous:.2f}× as long")

# %% [markdown]
# The activations of all layers are now nearly all that grows, so the gain is small, and a larger vocabulary alone does not change that (exercise 2). It becomes large together with checkpoints: then the logits are most of a step, as the table of cards below shows.
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
# **Guess first.** For each number of its input, a block of this model keeps 19 for backward: query, key, value, the inputs of norms and products, and what the MLP multiplies. With the input alone, is the text 19 times as long?
#
# **The idea.** Forward without recording; in backward, forward once more with recording, and backward through that.

# %%
from recipes_lib.memory.activation_checkpointing import (
    InputOnly,
    checkpointed_by_hand,
)

show(checkpointed_by_hand, InputOnly)
blocks = [torch.nn.Linear(8, 8) for _ in range(9)]
hidden = torch.randn(1, 5, 8, requires_grad=True)
plain = torch.nn.Sequential(*blocks)(hidden).sum()
(expected,) = torch.autograd.grad(plain, hidden)
(ours,) = torch.autograd.grad(checkpointed_by_hand(blocks, hidden).sum(), hidden)
assert torch.equal(ours, expected)

# %% [markdown]
# **The line you will write tomorrow** is `model.activation_checkpointing_enable()`, before transformers 5.17 `gradient_checkpointing_enable()`, and `gradient_checkpointing=True` in the Trainer. The row is the library's line. Ours can also keep the products (`mode="selective"`), and refuses a filled KV cache, which a second forward would fill twice.


# %%
def checkpointing(model):
    model.activation_checkpointing_enable()
    return model


def checkpointed(model):
    return checkpointing(lean(model))


def checkpoint_terms(tokens):
    return equation.with_checkpointing(lean_terms(tokens))


climb("+ checkpointing", checkpoint_terms, checkpointed)

# %% [markdown]
# Why not 19 times? Count what one more token adds:


# %%
def inputs_per_token(bytes_of):
    """What one more token adds, in inputs of a block: numbers as wide as the hidden state."""
    more = bytes_of(20_000) - bytes_of(10_000)
    return more / 10_000 / weightless.config.hidden_size / dtype.itemsize


blocks_here = weightless.config.num_hidden_layers
kept = inputs_per_token(lambda tokens: lean_terms(tokens).activations)
inputs = inputs_per_token(lambda tokens: checkpoint_terms(tokens).activations)
again = inputs_per_token(lambda tokens: checkpoint_terms(tokens).one_block)
print(
    f"plain         {kept:4.0f} inputs per token: {kept / blocks_here:.1f} of each block"
)
print(f"checkpointed  {inputs:4.0f}, the inputs of all blocks and of the last norm")
print(f"             + {again:2.0f}, one block once more, and the gradients in it")
print(f"that is {kept / (inputs + again):.1f}× less per token; ", end="")
print(f"the search found {ladder['+ checkpointing'].times_previous:.1f}× the length")

# %% [markdown]
# The inputs stay, and one block is there in full with the gradients in it: with few blocks the second part decides, with many the first, and the factor comes closer to 19. What does not grow with the text, such as the gradient of the output layer, does the rest. The factor belongs to the pair: with checkpoints and without recipe 2 all logits would stay. So switch both on.
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
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp, tiled_by_hand

show(tiled_by_hand)
mlp = torch.nn.Sequential(
    torch.nn.Linear(8, 32), torch.nn.SiLU(), torch.nn.Linear(32, 8)
)
hidden = torch.randn(1, 50, 8)
assert torch.allclose(tiled_by_hand(mlp, hidden, tile_size=16), mlp(hidden), atol=1e-6)


# %%
def tiled(model, **options):
    return apply_tiled_mlp(lean(model), tile_size=sizes.tile, **options)


def tiled_terms(tokens, **options):
    in_tiles = equation.with_tiled_mlp(lean_terms(tokens), tile=sizes.tile, **options)
    return equation.with_checkpointing(in_tiles)


climb("+ tiled MLP", tiled_terms, lambda model: checkpointing(tiled(model)))
tokens = 16_384
before, after = checkpoint_terms(tokens), tiled_terms(tokens)
print(f"to the guess, of {tokens:,} tokens:")
print(f"  inputs of the blocks {before.activations / 2**20:6,.0f} MiB")
print(f"  one block            {before.one_block / 2**20:6,.0f} MiB")
print(f"  one block, tiled     {after.one_block / 2**20:6,.0f} MiB")

# %% [markdown]
# The inputs are larger, and a tile does not touch them: hence the small gain. It is larger where a block is wide and blocks are few.
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
plain = torch.nn.Sequential(*blocks)(hidden).sum()
gradients = torch.autograd.grad(plain, hidden)
by_hand = nested_by_hand(blocks, hidden, group=3).sum()
assert torch.equal(*gradients, *torch.autograd.grad(by_hand, hidden))
group = best_group(blocks_here)
for k in range(1, min(10, blocks_here) + 1):
    # While backward is in block i: the inputs of all groups up to its own, and those of
    # its group's blocks after the first, up to i.
    alive = max(i // k + 1 + i % k for i in range(blocks_here))
    print(f"k = {k:2}: at most {alive:2} inputs at a time")
print(f"taken: k = {group}, the smallest of the best, which computes the least again")


# %%
def nested(model):
    return apply_nested_checkpointing(tiled(model), group=group)


def nested_terms(tokens):
    in_tiles = equation.with_tiled_mlp(lean_terms(tokens), tile=sizes.tile)
    return equation.with_checkpointing(in_tiles, group=group)


climb("+ nested checkpoints", nested_terms, nested)

# %% [markdown]
# **The line you will write tomorrow**: we know of no flag for it in a training library: libraries offload the inputs instead, which is the next recipe.
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
# **Guess first.** Nested checkpoints leave about 2√L inputs; now they are all gone. How many times as long is the text then?
#
# **The idea.** Autograd asks a pair of hooks where to keep each saved tensor.

# %%
from recipes_lib.memory.activation_offload import offload_activations, offloaded_by_hand

show(offloaded_by_hand)
elsewhere = "host" if on_gpu else "disk"


def away(model):
    """Inputs of checkpointed blocks are all that autograd keeps, so they are all that goes."""
    return offload_activations(model, to=elsewhere, min_bytes=4096, in_flight=0)


def inputs_away(tokens):
    return equation.with_inputs_elsewhere(tiled_terms(tokens))


climb(
    "+ offloaded inputs",
    inputs_away,
    lambda model: checkpointing(tiled(model)),
    around=away,
)
away_from = ladder["+ offloaded inputs"].tokens
for row in ("+ nested checkpoints", "+ tiled MLP"):
    print(f"to the guess: {away_from / ladder[row].tokens:.1f}× as long as {row!r}")

# %% [markdown]
# This row has no nested checkpoints: it is the other answer to the same question, without the additional forward pass. Something new is at the peak. Backward reaches the first block last, and by then the gradients of all others are there.
#
# **The line you will write tomorrow**: `model.activation_checkpointing_enable(offload=True)`, since transformers 5.17. It needs a GPU, because it copies to pinned host memory, and the computation waits for each copy. Ours can copy beside it (`in_flight=2`), and can go to disk; this row waits, which takes the least memory.
#
# The host must hold (blocks − 1) × tokens × width × bytes of a number: look at that first. Only on short texts is the link slow beside the computation, because per block computing grows with S², and the transfer with S. Published for transformers' switch ([#48444](https://github.com/huggingface/transformers/pull/48444)): at 8,192 tokens no gain and 1.38 → 1.86 s; at a million tokens 25 % less memory for 0.6 % of time.
#
# ## Everything combined
#
# The best way to the longest text: recipes 1 to 4 and 6, the norms in tiles like the MLP, and the optimizer's step inside of backward, so that each gradient is used and freed at once ([notebook 01](../notebooks/01_large_models_limited_hardware.ipynb), *step in backward*). Nested checkpoints are not in it: with the inputs away they would only cost time.

# %%
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward


def everything(model):
    return checkpointing(tiled(model, norms=True))


def everything_terms(tokens):
    in_backward = equation.with_step_in_backward(tiled_terms(tokens, norms=True))
    return equation.with_inputs_elsewhere(in_backward)


climb(
    "everything combined",
    everything_terms,
    everything,
    partial(apply_optimizer_in_backward, lr=2e-5, fused=True),
    around=away,
)

# %% [markdown]
# None of the long steps was computed. Two shorter ones can be, with the same account of bytes: SDPA at its longest, and the last row on a text of which most bytes are weights and states.

# %%
if not on_gpu:  # there the search has taken real steps
    for row, tokens in (
        ("flash attention", ladder["flash attention"].tokens),
        ("everything combined", sizes.checked),
    ):
        peaks = {}
        for which, tensors in (("dry", dry_run), ("real", contextlib.nullcontext)):
            with tensors():
                step, optimizer = step_of(row, build())
                step(16)  # makes the optimizer's states
                peaks[which] = peak_of(step, optimizer.zero_grad)(tokens)
        del step, optimizer
        off = peaks["dry"] / peaks["real"] - 1
        print(
            f"{row}, {tokens:,} tokens: a real step takes {peaks['real']:,} bytes, ",
            end="",
        )
        print(f"the dry one is off by {off:+.2%}")

# %% [markdown]
# ## What it costs
#
# A price at 512 tokens would say nothing: there the products are small, and nobody needs a recipe. Here forward and backward run through as many blocks as one group of nested checkpoints has, on 4,096 tokens, which is too long for the plain step, without the loss (its price stands at recipe 2). The rows take turns, the fastest turn of each counts, and the range of the rounds stands in brackets.

# %%
timed = [row for row in ways if row != "+ chunked loss"]
slice_of = partial(model_of_shape, sizes.shape, layers=max(group, 2), dtype=dtype)


def blocks_of(row):
    """Forward and backward through some blocks of a row."""
    adapt, _, around = ways[row]
    model = adapt(slice_of())
    surroundings = partial(around, model) if around else contextlib.nullcontext
    ids = text_of(sizes.cost)

    def turn():
        with surroundings():
            model.base_model(
                input_ids=ids, use_cache=False
            ).last_hidden_state.sum().backward()
        model.zero_grad()
        synchronize()

    return turn


took = in_turns({row: blocks_of(row) for row in timed}, rounds=sizes.rounds)
ladder.set_times(took)
ladder

# %% [markdown]
# In the table, *off by* compares the prediction with *found*. *Time* is that of the blocks, against SDPA. A range is that of single rounds, and SDPA beside itself shows the noise. The optimizer is not in it. Two baselines meet below: lengths count from eager attention, times from SDPA.

# %%
forwards = dict.fromkeys(timed[2:], 1) | {"+ nested checkpoints": 2 - 1 / group}
for row, more in forwards.items():
    low, high = ladder[row].ratio_low, ladder[row].ratio_high
    print(
        f"{row:<22} {ladder[row].times_baseline:6.1f}× the length, "
        f"{low - 1:+.0%} to {high - 1:+.0%} time; "
        f"{more:.2f} more forwards are {more / 3:+.0%} of the operations"
    )

# %%
ladder.chart()

# %% [markdown]
# **Before and after.** Both steps fill the same memory, one with the longest text of the first row and one with that of the last.

# %%
from recipes_lib.core.measure.timeline import record_timeline
from recipes_lib.report.timeline import timeline_chart

# As in the search: dry steps on a CPU, real ones on a GPU.
as_searched = contextlib.nullcontext if on_gpu else dry_run


def timeline_of(row):
    """Live bytes over one step at the longest length of a row."""
    with as_searched():
        model = build()
        step, optimizer = step_of(row, model)
        step(16)  # makes the optimizer's states
        longest = partial(step, ladder[row].tokens)
        return record_timeline(longest, model=model, optimizer=optimizer)


before_and_after = {}
for row in ("baseline", "everything combined"):
    before_and_after[f"{row}: {ladder[row].tokens:,} tokens"] = timeline_of(row)
timeline_chart(before_and_after, title="The same memory, filled by two lengths")

# %% [markdown]
# Above, activations pile up in forward, layer upon layer. Below, each block leaves nothing behind, and each tooth in backward is one block, computed again: what fills the memory is one block. *Other* are the results of operators that are on the way to another one. From left to right are the bytes that have come and gone.
#
# ## Time is the next limit
#
# A token takes longer in a long text, because it reads all tokens before it: seconds per token are a straight line in S. Is that so here? One block with the recipes of the last row, the fastest turn of each length:

# %%
import numpy

from recipes_lib.report.lines import lines

one_block = everything(model_of_shape(sizes.shape, layers=1, dtype=dtype))


def through_one_block(tokens):
    ids = text_of(tokens)
    one_block.base_model(
        input_ids=ids, use_cache=False
    ).last_hidden_state.sum().backward()
    one_block.zero_grad()
    synchronize()


through_one_block(sizes.along[0])  # warms up
turns = in_turns(
    {tokens: partial(through_one_block, tokens) for tokens in sizes.along},
    rounds=sizes.rounds,
)
per_token = {tokens: min(each) / tokens for tokens, each in turns.items()}
slope, start = numpy.polyfit([*per_token], [*per_token.values()], deg=1)
on_the_line = {tokens: start + slope * tokens for tokens in sizes.along}
misses = max(abs(on_the_line[tokens] / per_token[tokens] - 1) for tokens in sizes.along)
holds = misses < 0.1
print(f"the line misses what was measured by {misses:.0%} at most")
curves = {
    "measured": [(tokens / 1000, 1e6 * each) for tokens, each in per_token.items()],
    "the line": [(tokens / 1000, 1e6 * each) for tokens, each in on_the_line.items()],
}
lines(
    curves,
    title=f"Seconds per token lie on a line, to {misses:.0%}",
    xlabel="thousand tokens",
    ylabel="µs per token and block",
    ylim=(0, None),
)

# %% [markdown]
# So this is what a step of the longest text would take here, and what a token takes there beside one in a plain step of a short text:

# %%
plain_step, _ = step_of("flash attention", a_model())
turns = []
for _ in range(sizes.rounds):
    started = time.perf_counter()
    plain_step(sizes.common)
    synchronize()
    turns.append(time.perf_counter() - started)
short = min(turns) / sizes.common
tokens = ladder["everything combined"].tokens
loss_per_token = beside["ours"].seconds / loss_tokens
long = blocks_here * (start + slope * tokens) + loss_per_token
print(f"{sizes.common:>8,} tokens, plain step: {1e3 * short:.1f} ms per token")
if holds:
    beyond = tokens / max(sizes.along)
    print(
        f"{tokens:>8,} tokens: {1e3 * long:.1f} ms per token, {long / short:.1f}× as long, "
        f"by the line, {beyond:.0f}× beyond its last dot"
    )
    print(f"one step of {tokens:,} tokens: {tokens * long / 3600:.1f} hours")
else:
    print(f"the line misses its dots: no time is given for {tokens:,} tokens")

# %% [markdown]
# The line has neither disk nor optimizer in it, and the short step has its optimizer. Such a step takes hours here: time stops you before memory does. In a wider model attention overtakes the products at a longer text, but every token is slower.
#
# <!-- numbers:gpu-04 -->
# <!-- end -->
#
# ## Your model, your card
#
# The same question for other models and for cards that are not here, by the equation, with weights in bf16. *Switches* are transformers' two, SDPA and checkpointing; then the chunked loss; then every recipe above. QLoRA keeps the weights in four bits and trains small adapters ([notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb)). None of these steps has run on a card. The cards are an RTX 4080, an L4 and an A100. Gradients and both averages of AdamW are in 16 bits too ([notebook 01](../notebooks/01_large_models_limited_hardware.ipynb), *16-bit AdamW states*); the code at the end keeps them in 32, which takes twice the fixed bytes. The inputs wait on the host, which must hold (blocks − 1) × tokens × width × 2 bytes. Behind each length stand what breaks first and what a step takes at 40 % of the card's rate in its data sheet; for QLoRA that is an upper bound. These models know 131,072 positions: what lies beyond needs recipe 8.

# %%
from recipes_lib.core.predict import CARDS
from recipes_lib.core.predict.flops import step_operations
from recipes_lib.report.ladders.length import duration

shape, card, tokens, tile = sizes.card


def on_a_card(model, method, recipes, tokens):
    """The terms of a step with weights in bf16."""
    step = equation.plain_step(model, rows=1, length=tokens)
    if method == "QLoRA":
        step = equation.in_four_bits(equation.with_adapters(step, rank=16))
    if recipes != "switches":
        step = equation.with_chunked_loss(step)
    if recipes == "every recipe":
        step = equation.with_tiled_mlp(step, tile=tile, norms=True)
    step = equation.with_checkpointing(step)
    if recipes == "every recipe":
        step = equation.with_inputs_elsewhere(equation.with_step_in_backward(step))
    return step


def longest_on(card, model, terms):
    """The longest text on a card in thousands, what breaks first, and a step's time."""
    room = 0.95 * CARDS[card].for_tensors  # holes between tensors take the rest
    if terms(2).peak > room:
        return "weights and states"
    longest = predicted_longest(lambda tokens: terms(tokens).peak, limit_bytes=room)
    step = terms(longest)
    moments = step.moments()
    first = "one block" if step.one_block > step.loss else "logits"
    if max(moments.values()) == moments["the last gradient arrives"]:
        first = "gradients"
    again = 4 / 3  # forward runs twice
    operations = again * step_operations(model, rows=1, length=longest)
    seconds = operations / (0.4 * CARDS[card].rate)
    return f"{longest / 1000:,.0f}K, {first}, {duration(seconds)}"


cards = {"16 GB": "RTX 4080", "24 GB": "L4", "80 GB": "A100-80GB"}
print(" " * 33 + "".join(f"{size:>27}" for size in cards))
for name in ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"):
    large = model_of_shape(name, dtype=torch.bfloat16, device="meta")
    for method in ("full", "QLoRA"):
        for recipes in ("switches", "+ chunked loss", "every recipe"):
            terms = partial(on_a_card, large, method, recipes)
            ends = [longest_on(each, large, terms) for each in cards.values()]
            words = f"{name:<13}{method:<6}{recipes:<14}"
            print(words + "".join(f"{end:>27}" for end in ends))

# %% [markdown]
# With the switches alone it is the logits, because these models have a vocabulary of 128,256: take the chunked loss first. With every recipe it is one block, and the next step would be attention for [a few heads at a time](../recipes_lib/attention/head_groups.py). Where nothing fits, shrink the weights first, in [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb).
#
# One of these steps can run here without data, with the kernels that PyTorch would choose on that card. A few blocks are enough, since bytes at each moment grow evenly with the blocks:

# %%
from recipes_lib.core.predict.any_size import any_size
from recipes_lib.precision.pure_bf16 import bf16_adamw


def step_on_a_card(layers):
    """`build` of `core.predict`: a model, its optimizer, and a function that takes a step."""

    def build():
        model = model_of_shape(shape, layers=layers, dtype=torch.bfloat16, device="cpu")
        model = apply_tiled_mlp(lean(model), tile_size=tile, norms=True)
        rounded = partial(bf16_adamw, rounding="stochastic")
        optimizer = apply_optimizer_in_backward(model, optimizer_class=rounded, lr=2e-5)
        ids = torch.ones(1, tokens, dtype=torch.long)

        def step(model, optimizer):
            train(model, optimizer, [ids], around=partial(away, model))

        return checkpointing(model), optimizer, step

    return build


large = model_of_shape(shape, dtype=torch.bfloat16, device="meta")
counted = any_size(step_on_a_card, layers=(2, 3), card=CARDS[card])
peak = counted.peak(layers=large.config.num_hidden_layers)
by_equation = on_a_card(large, "full", "every recipe", tokens).peak
print(f"{shape}, full, every recipe, {tokens:,} tokens, on the card {card}:")
print(f"  by dry steps    {peak / GIB:6.2f} GiB")
print(f"  by the equation {by_equation / GIB:6.2f} GiB, {by_equation / peak - 1:+.1%}")

# %% [markdown]
# The equation forgets nearly as much as the 5 % of each card that the table leaves free, and this check is at a small part of the longest lengths. On a new card begin at three quarters of them. The command `doctor` asks the same for your own model: `python -m recipes_lib doctor --model llama-3.1-8b --card L4 --batch_size 1 --seq_len 32768 --dtype bf16`.
#
# ### Hybrid models
#
# Qwen3.5, Qwen3-Next, LFM2 and the Mamba hybrids have attention in some layers only. The others are recurrences: they carry a state from token to token, and their time grows with S and not with S². They have two traps. Without the package of their kernels, transformers computes a loop in fp32 (published in [#48718](https://github.com/huggingface/transformers/pull/48718): 1.22 s a step, with the kernels 0.49 s). It says so once, where its messages are on. And a state runs past every mask, so packed documents, which are several short texts in one row, read each other.

# %%
import transformers

from recipes_lib.core.model.recurrence_kernels import missing_kernels
from recipes_lib.training.sequence_packing import check_document_mask

small = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
small |= dict(num_attention_heads=4, num_key_value_heads=2)
small |= dict(initializer_range=0.2)  # with weights near zero every state is near zero
kinds = dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
families = {
    "Llama": transformers.LlamaConfig(**small),
    "LFM2": transformers.Lfm2Config(**small, **kinds),
    "Qwen3-Next": transformers.Qwen3NextConfig(
        **small,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
}
packing = transformers.DataCollatorWithFlattening()
documents = [{"input_ids": list(range(1, 9))}, {"input_ids": list(range(9, 20))}]
packed = packing(documents)  # one row, and positions that begin again in each document
transformers.logging.set_verbosity_error()
for family, config in families.items():
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    lacking = ", ".join(missing_kernels(model)) or "nothing"
    try:
        check_document_mask(model, packed)
        verdict = "keeps packed documents apart"
    except RuntimeError:
        verdict = "packed documents read each other"
    print(f"{family:<11} lacks {lacking:<39} {verdict}")
transformers.logging.set_verbosity_warning()

# %% [markdown]
# `load_model` warns of the loop, once, and `check_document_mask` refuses to pack. With the kernels installed, the borders must still reach them: `DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)`. Chunked loss and checkpointing work on these models as they are.
#
# ## Part B: less time, another model
#
# ### 7. Sliding window and block-sparse attention
#
# Flash attention stores no scores, but it still computes one for every pair of tokens, however far they are apart.
#
# **Guess first.** With a window of a sixteenth of the text: how many times as fast is attention?
#
# **The idea.** Let each token read its last W tokens only: about S × W pairs in place of S²/2. A token still gets something from beyond its window, through the layers. *Sinks* are a few first tokens that stay readable. A *block-sparse* pattern lets a block read the blocks just before it and a few that all read. Each line is a token that reads, each column one that can be read:

# %%
from recipes_lib.attention.block_sparse import (
    apply_block_sparse,
    block_sparse_attention,
    block_sparse_mask,
    predicted_share_of_pairs,
)
from recipes_lib.report.pattern import pattern_chart

positions = torch.arange(64)
distance = positions[:, None] - positions  # of a query (down) from a key (right)
causal = distance >= 0
in_window = causal & (distance < 16)
sinks = causal & (positions < 4)
sparse = block_sparse_mask(seq_len=64, block_size=4, local=3, global_blocks=1)
patterns = {"full": causal, "window of 16": in_window}
patterns |= {"window and 4 sinks": in_window | sinks, "block-sparse": sparse}
pattern_chart(patterns, title="Reading less: which keys each query reads")

# %% [markdown]
# **The line you will write tomorrow** is FlexAttention: a rule for pairs, made into a kernel by `torch.compile` on a GPU. Here it runs without compilation, on 64 tokens, beside ours.

# %%
import warnings

from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from recipes_lib.attention.sliding_window import (
    apply_sliding_window,
    predicted_speedup,
    sliding_window_attention,
)


def in_the_window(batch, head, query, key):
    return (query >= key) & (query - key < 16)


rule = create_block_mask(in_the_window, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
query, key, value = torch.randn(3, 1, 4, 64, 16)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "not compiled": on purpose
    theirs = flex_attention(query, key, value, block_mask=rule)
ours = sliding_window_attention(query, key, value, window=16)
assert torch.allclose(theirs, ours, atol=1e-5)

# %%
tokens = sizes.long_text
config = weightless.config
key_heads = config.num_key_value_heads
heads = [config.num_attention_heads, key_heads, key_heads]  # of Q, K and V
qkv = []
for count in heads:
    shape = (1, count, tokens, config.head_dim)  # [B, H, S, E]
    qkv.append(torch.randn(shape, device=here.device, dtype=dtype, requires_grad=True))
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


steps = {way: partial(forward_and_backward, each) for way, each in attentions.items()}
turns = in_turns(steps, rounds=sizes.rounds)
fewer_pairs = {
    "sliding window": predicted_speedup(seq_len=tokens, window=sizes.window),
    "block-sparse": 1 / predicted_share_of_pairs(seq_len=tokens, **pattern),
}
speedup = {}
for way, fewer in fewer_pairs.items():
    ratios = [full / mine for full, mine in zip(turns["full"], turns[way])]
    speedup[way] = min(turns["full"]) / min(turns[way])
    print(
        f"{way:<14} on {tokens:,} tokens: {speedup[way]:4.1f}× as fast "
        f"({min(ratios):.1f} to {max(ratios):.1f}), {fewer:4.1f}× fewer scores"
    )

# %% [markdown]
# To the guess: a window of a sixteenth leaves about an eighth of the pairs, because of two tokens one only reads the other. Our blocks compute some scores that are masked then, and small products are slower, so the gain is less. The results are exact for what is read, but the model was trained to read more. What does that cost without further training?

# %%
last_quarter = sizes.reads // 4
reads_less = {
    "full": sdpa,
    "window": partial(apply_sliding_window, window=last_quarter),
    "window and 4 sinks": partial(apply_sliding_window, window=last_quarter, sinks=4),
    "block-sparse": partial(
        apply_block_sparse, block_size=sizes.reads // 16, local=3, global_blocks=1
    ),
}
read_ids = text_of(sizes.reads)
price = {}
for which, adapt in reads_less.items():
    model = adapt(load_model(sizes.trained).eval())
    with torch.no_grad():
        price[which] = model(input_ids=read_ids, labels=read_ids).loss.item()
    print(f"{which:<18} loss {price[which]:.3f}")
del model

# %% [markdown]
# Reading less makes the model worse at once, and four sinks repair most of it: a softmax must add up to one, so a head that needs no token sends its attention to the first ones (Xiao et al., 2023). This is one text of Python source and a window of a quarter, so it is not the price of the sixteenth that was timed above. If you take a window, take sinks, and look at the loss on your own texts first. The block-sparse pattern is for documents with parts that all tokens must read. The first Mistral 7B was trained with a window, and so was Gemma 3, in most layers.
#
# **Short texts first** is the other way to save time: a *curriculum* lengthens the rows during training, up to 2,048 tokens in the example below. What it can save is attention's share of a step. At equal compute it buys a few steps more in place of 60. For a large model that is no reason to do it; whether it learns better is another question:

# %%
from recipes_lib.training.curriculum import flops_per_token, steps_at_equal_compute

stages = [(128, 0.4), (512, 0.3), (2048, 0.3)]
bought = {}
for shape in ("smollm2-135m", "llama-3.1-8b"):
    model = model_of_shape(shape, device="meta")
    linear = flops_per_token(model, seq_len=1) / flops_per_token(model, seq_len=2048)
    bought[shape] = steps_at_equal_compute(model, stages, 60, full_length=2048)
    print(
        f"{shape:<13} attention is {1 - linear:3.0%} of a step: {bought[shape]} steps"
    )

# %% [markdown]
# ### 8. RoPE scaling: beyond the trained length
#
# In RoPE, *rotary position embeddings*, each pair of numbers of a query and of a key is turned by an angle: position × frequency. In a text longer than those of the training come angles that the model has never seen. No error is raised there, so `check_length` raises one before the text runs.
#
# **Guess first.** Where does the loss begin to climb: at the trained length, or later?
#
# **The idea.** Turn the pairs more slowly. *linear*: all of them. *dynamic* (NTK): a larger base, the number whose powers are the frequencies. *yarn*: slow the pairs that made less than one full turn in the training, leave those alone that made more than 32, and slow those between by a part.

# %%
from recipes_lib.architecture.rope import (
    KINDS,
    apply_rope_scaling,
    check_length,
    position_losses,
    rope_frequencies,
    rotate,
)

show(rotate)
query, key = torch.randn(2, 1, 1, 1, 16)  # [B, H, S, E] each, one token
frequencies, _ = rope_frequencies(head_dim=16, base=10_000.0)
for near, far in ((3, 7), (1003, 1007)):
    turned = rotate(query, torch.tensor([far]), frequencies)
    turned_key = rotate(key, torch.tensor([near]), frequencies)
    print(f"query at {far}, key at {near}: score {(turned * turned_key).sum():.4f}")
try:
    check_length(load_model(sizes.trained), 16_384)
except ValueError as reason:
    print(reason)

# %% [markdown]
# The score depends on the distance only. Texts of 12,288 tokens take minutes on a CPU, so there the curves are recorded (`python -m benchmarks.gpu --parts rope`). Texts differ more than the scalings do, so the picture shows the difference to no scaling on the same text.

# %%
from recipes_lib.report.records import recorded
from recipes_lib.report.style import INK


def losses_along(kind, tokens, window, texts):
    """The losses along long texts, with this kind of scaling: one list per text."""
    model = sdpa(load_model(sizes.trained).eval())
    if kind in KINDS:
        apply_rope_scaling(model, kind=kind, factor=2)
    rows = torch.tensor(book[: texts * tokens], device=here.device).view(
        texts, 1, tokens
    )
    return [position_losses(model, row, window=window) for row in rows]


if sizes.stretched is None:
    rope = recorded("rope")
else:
    rope = {"window": sizes.stretched[1], "measured_on": f"measured now on {here.name}"}
    rope["losses"] = {
        kind: losses_along(kind, *sizes.stretched) for kind in ("none", *KINDS)
    }
losses = {kind: torch.tensor(each) for kind, each in rope["losses"].items()}
curves = {}
for kind, each in losses.items():
    change = (each - losses["none"]).mean(0).tolist()
    places = [rope["window"] * (number + 0.5) for number in range(len(change))]
    curves[kind] = list(zip(places, change))
figure = lines(
    curves,
    title="Beyond the trained length (dashed) YaRN and a larger base keep the loss low",
    source=rope["measured_on"],
    xlabel="position in the text, tokens",
    ylabel="loss minus 'none', nats",
)
figure.axes[0].axvline(8192, color=INK, linestyle="--", linewidth=1)
figure

# %%
last = {kind: each.mean(0)[-1].item() for kind, each in losses.items()}
print("loss in the last window:", ", ".join(f"{k} {v:.2f}" for k, v in last.items()))
apart = (losses["none"] - losses["yarn"]).mean(0) > 0.1
if apart.any():
    print(f"'none' leaves YaRN at {places[apart.nonzero()[0].item()]:,.0f} tokens")

# %% [markdown]
# All of this is without further training. The loss begins to climb later than the trained length ends. Linear scaling changes every angle, and costs much over most of the text. YaRN and the larger base (*dynamic*) lie on one another, close to the unscaled model in the trained part. *None* is the line at zero: where the others fall below it, its own loss climbs. Take YaRN before a training on long texts, because its frequencies are the same for a text of any length. Its `factor` is your length over the trained one; only 2 is tried here. **The line you will write tomorrow** is `rope_parameters` in config.json, which transformers and vLLM read; ours writes it and checks it.
#
# ## What did not make it into the ladder
#
# - **Attention by groups of heads** ([head_groups.py](../recipes_lib/attention/head_groups.py)): one more forward of attention for a smaller block. It is in [a step of 262,144 tokens](../docs/long-card.md) on 24 GB, which is predicted and has not run.
# - **Several GPUs**: ring attention and Ulysses split one text. [Notebook 02](../notebooks/02_multi_gpu_training.ipynb) runs both on two ranks.
# - **Packing** short texts: [notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb).
#
# ## Take this into your code
#
# These lines are not run here, for they need the hub and a GPU. They are the last row without the step in backward, so that you can clip and accumulate. Weights stay in fp32, and autocast computes in bf16: without it a GPU takes no flash kernel. On a T4 leave autocast out; on a CPU leave out `.cuda()`, too, and write `to="disk"`.
#
# ```python
# import torch
# from transformers import AutoModelForCausalLM, AutoTokenizer
#
# from recipes_lib.architecture.rope import check_length
# from recipes_lib.memory.activation_offload import offload_activations
# from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
# from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
#
# name = "Qwen/Qwen3-0.6B"
# text = open("my_text.txt").read()
# ids = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids.cuda()  # [1, S]
# model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).cuda().train()
# check_length(model, ids.shape[1])  # beyond the trained positions there is no error, only a loss
# apply_chunked_cross_entropy(model)
# apply_tiled_mlp(model, norms=True)
# model.activation_checkpointing_enable()
# optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
# with offload_activations(model, to="host"), torch.autocast("cuda", torch.bfloat16):
#     loss = model(input_ids=ids, labels=ids, use_cache=False).loss
#     loss.backward()
# optimizer.step()
# ```
#
# [train_long_sequences.py](../scripts/train_long_sequences.py) is the same as a program, with checkpoints, on a CPU, a T4 and larger cards.
#
# ## What each recipe gives and costs here, and when not to use it

# %%
not_when = {
    "flash attention": "you need the attention weights, or scores are capped",
    "+ chunked loss": "you need the logits",
    "+ checkpointing": "activations are not at the peak",
    "+ tiled MLP": "no block is checkpointed yet",
    "+ nested checkpoints": "the inputs fit into host memory",
    "+ offloaded inputs": "the link is slow, and the text short",
    "everything combined": "a text of a tenth of this length is long enough",
}
for row, reason in not_when.items():
    each = ladder[row]
    time_there = ""
    if each.ratio is not None:
        time_there = f"{each.ratio_low:.2f}–{each.ratio_high:.2f}× time"
    print(f"{row:<22}{each.tokens:>8,} tokens  {time_there:<16} not when {reason}")

# %% [markdown]
# Tokens are the longest text, with the recipes above it; time is that of the blocks against SDPA. The last row forbids clipping by the norm of all gradients, accumulation and the loss scaling of fp16. A window is another model, to be trained that way: not when far tokens decide. RoPE scaling costs a little in the trained part: not when texts are no longer than that.
#
# ## Exercises
#
# 1. With half the layers, which row gains the most? Predict it with `longest_by`, before you set `layers` in the sizes. *(The rows without checkpoints: their activations are a sum over layers.)*
# 2. Llama 3.2 1B has a vocabulary of 128,256 and 16 layers. Which of recipes 2 and 3 gains more there? *(Change `shape`, and run the first four rows.)*
# 3. From which k on is a larger k of nested checkpoints worse? *(Read the list at recipe 5.)*
#
# The first two in numbers, by the equation:


# %%
def longest_by_rows(model, limit):
    """The longest text plain, with a chunked loss, and with checkpoints on top of it."""

    def plain(tokens):
        return equation.plain_step(model, rows=1, length=tokens)

    def chunked(tokens):
        return equation.with_chunked_loss(plain(tokens))

    def checkpointed(tokens):
        return equation.with_checkpointing(chunked(tokens))

    rows = (plain, chunked, checkpointed)
    return [
        predicted_longest(lambda tokens: row(tokens).peak, limit_bytes=limit)
        for row in rows
    ]


shallow = build(layers=max(blocks_here // 2, 1), device="meta")
whole, half = [longest_by_rows(each, sizes.limit) for each in (weightless, shallow)]
names = ("plain", "+ chunked loss", "+ checkpointing")
for name, before, after in zip(names, whole, half):
    print(f"1. {name:<16} {after / before:.2f}× as long with half the layers")
wide = model_of_shape("llama-3.2-1b", dtype=torch.float32, device="meta")
plain, chunked, checkpointed = longest_by_rows(wide, 24 * GIB)
print(f"2. in 24 GiB the chunked loss gains {chunked / plain:.1f}×, ", end="")
print(f"and checkpointing {checkpointed / chunked:.1f}× on top of it")

# %% [markdown]
# ## References
#
# - Dao et al., *FlashAttention*, 2022; Dao, *FlashAttention-2*, 2023
# - Hsu et al., *Liger Kernel*, 2024; Wijmans et al., *Cut Your Losses*, 2024
# - Bekman et al., *Arctic Long Sequence Training*, 2025: tiled MLP and loss, checkpoints on the host
# - Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016
# - Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, 2023
# - Su et al., *RoFormer*, 2021; Peng et al., *YaRN*, 2023
#
# The last cell checks that the story above is true on this machine: orderings and signs, never absolute speed.

# %%
from recipes_lib.core.measure.machine import fast

rows = ladder.rows
loss_error = max(abs(row.loss - rows[0].loss) for row in rows)
ladder.note(
    model=sizes.shape,
    limit_bytes=sizes.limit,
    timed_at=sizes.cost,
    loss_at=sizes.common,
    loss_error=loss_error,
    slopes=slopes,
    local={"tokens": sizes.long_text, "speedup": speedup, "ideal": fewer_pairs},
    price=price,
    bought=bought,
    loss={which: vars(cost) for which, cost in beside.items()},
)
if holds:
    ladder.note(per_token={"short": short, "long": long}, measured_to=max(sizes.along))
most_error = 2e-2 if on_gpu else 1e-4
assert loss_error < most_error, "the same loss"
lengths = [row.tokens for row in rows]
assert lengths == sorted(lengths), "each row is longer"
if not fast():  # lengths as short as those of FAST mode say nothing
    assert all(abs(row.prediction_error) < 0.1 for row in rows), "the predictions hold"
    if not on_gpu:
        assert slopes["baseline"] > 1.5, "with all scores: towards the square"
        assert slopes["flash attention"] < 1.1, "and without them with the length"
    assert ladder.gain("everything combined") > 10
    assert slope > 0, "a token of a long text takes longer"
    assert min(speedup.values()) > 1, "reading less is faster"
print(f"all checks passed: {ladder.gain('everything combined'):.0f}× as long")
