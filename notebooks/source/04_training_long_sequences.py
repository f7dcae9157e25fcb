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
# > **891 → 54,989 tokens:** the longest text on which every weight of smollm2-135m trains within 4 GiB, **62 times as long**, with the same loss to 2e-07 on 512 tokens, found by dry steps, which count the bytes of real ones. Every row was predicted first; the arithmetic is off by 1.2% at most.
# >
# > Measured on AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-24.
# <!-- end -->
#
# A longer text needs more memory, and at some length the training step fails. This notebook trains one small model within a fixed memory, on texts that become longer and longer. For each recipe it first predicts the longest text with arithmetic, then searches for it, and then checks whether the loss is still the same number.
#
# | | |
# |---|---|
# | **You will learn** | to predict the longest sequence that a memory holds, and which recipe moves that limit |
# | **You need** | Python and the basics of PyTorch, and the equation of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb); no GPU, no login |
# | **Time** | eight to twenty minutes on two CPU cores |
# | **Cost** | free on a laptop or on a Colab T4 |

# %% [markdown]
# ## The map
#
# | | recipe | makes smaller | file |
# |---|---|---|---|
# | 1 | flash attention | activations: tokens × tokens | [flash.py](../recipes_lib/attention/flash.py) |
# | 2 | chunked cross-entropy | loss: tokens × vocabulary | [chunked_cross_entropy.py](../recipes_lib/memory/chunked_cross_entropy.py) |
# | 3 | activation checkpointing | activations: tokens × layers | [activation_checkpointing.py](../recipes_lib/memory/activation_checkpointing.py) |
# | 4 | tiled MLP | activations of one block: tokens × feed-forward width | [tiled_mlp.py](../recipes_lib/memory/tiled_mlp.py) |
# | 5 | nested checkpoints | inputs of the blocks | [nested_checkpointing.py](../recipes_lib/memory/nested_checkpointing.py) |
# | 6 | sliding window, block-sparse | time | [sliding_window.py](../recipes_lib/attention/sliding_window.py), [block_sparse.py](../recipes_lib/attention/block_sparse.py) |
# | 7 | curriculum | time | [curriculum.py](../recipes_lib/training/curriculum.py) |
# | 8 | RoPE scaling | the loss beyond the trained length | [rope.py](../recipes_lib/architecture/rope.py) |
#
# ## Setup
#
# Where the package is missing, as on Colab, this cell fetches the repository and installs what is lacking. It keeps the PyTorch that is there. After `make run` or `make lab` it does nothing.

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
    pip_install = [sys.executable, "-m", "pip", "install", "-q", "-e"]
    subprocess.run([*pip_install, f"{code}[notebooks]"], check=True)
    sys.path.insert(0, str(code))

# %%
from functools import partial

import torch

from recipes_lib.core.data import load_text
from recipes_lib.core.default_model import model_source
from recipes_lib.core.machine import GIB, choose_sizes, machine, seed_everything
from recipes_lib.core.matrix_rate import measure_matrix_rates
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape

here = machine()
tokenizer = load_tokenizer()
print(here)
print("SmolLM2 comes from:", model_source())
if here.device == "cuda":
    print("cuDNN", torch.backends.cudnn.version())
dtype = torch.float32
if here.device == "cuda" and here.native_bf16:
    dtype = torch.bfloat16
rate = measure_matrix_rates()[dtype]  # operations per second, in about a second
print(f"matrix products in {dtype}: {rate / 1e12:.2f} TFLOP/s")

# %% [markdown]
# All sizes stand in one cell. On a CPU the real SmolLM2-135M trains within an exact budget of 4 GiB of tensors, all its weights in fp32. A GPU takes a larger shape with random weights, and leaves room on the card for what the allocator cannot use.

# %%
cpu = dict(
    shape="smollm2-135m",
    layers=None,  # all of them
    limit=4 * GIB,
    common=512,  # tokens of a text that every row can train on
    lengths=(512, 8192, 32768),  # whose peaks are wanted for the picture
    tile=8192,  # tokens of a tile
    small_tile=128,  # for the real steps of `common` tokens
    one_layer=(1024, 2048, 4096, 16384),  # lengths of attention alone
    eager_to=4096,  # the longest of them with all scores
    loss=(1024, 576, 49152),  # tokens, width, vocabulary
    rounds=2,
    long_text=16384,  # of attention that reads less
    window=1024,
    reads=2048,  # tokens with which the model is asked what reading less costs
    row=2048,  # characters of a row of the curriculum
    steps=60,
    seeds=(0, 1, 2),
    least_speedup=1,  # of attention that reads less
    least_slope=1.6,  # of the bytes of the baseline; 2 would be scores alone
    stretched=None,  # (tokens, window, texts) for RoPE; None: as recorded
)
gpu16 = cpu | dict(
    shape="llama-3.2-1b",
    layers=4,  # of 16
    limit=11 * GIB,
    common=1024,
    lengths=(1024,),
    small_tile=256,
    one_layer=(4096, 16384, 65536),
    loss=(2048, 2048, 128256),
    stretched=(12288, 1024, 3),
)
gpu24 = gpu16 | dict(layers=None, limit=14 * GIB)
# Continuous integration checks that the code works, not how much it saves.
brief = cpu | dict(
    layers=3,
    limit=840 * 2**20,
    common=64,
    lengths=(64, 4096, 8192),
    tile=2048,
    small_tile=16,
    one_layer=(256, 512),
    loss=(512, 64, 8192),
    rounds=1,
    long_text=2048,
    window=256,
    reads=256,
    row=256,
    steps=6,
    seeds=(0,),
    least_speedup=0,  # such small sizes say nothing
    least_slope=1.3,
    stretched=(200, 100, 1),
)
sizes = choose_sizes(cpu=cpu, gpu16=gpu16, gpu24=gpu24, gpu80=gpu24, fast=brief)
sizes

# %% [markdown]
# ## What runs out: one equation
#
# Weights and optimizer states do not care how long a text is. The rest does:
#
# $$\text{peak}(S) = \text{fixed} + a\,S^2 + b\,S$$
#
# $a$ counts attention scores: heads × layers numbers for each pair of tokens. $b$ counts what every token leaves behind: activations of each layer, and a row of logits as wide as the vocabulary. Every recipe below removes a part of $a$ or $b$, so the longest $S$ under a given memory moves. The arithmetic is that of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb), solved for $S$.
#
# **Guess first.** Within 4 GiB, how many tokens can a text have on which SmolLM2-135M trains without any recipe?

# %%
from recipes_lib.core.budget import Shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.workflows.longest import predicted_longest

build = partial(model_of_shape, sizes.shape, layers=sizes.layers, dtype=dtype)
real_weights = sizes.shape == "smollm2-135m" and sizes.layers is None
weightless = build(device="meta")  # weighs nothing: enough for arithmetic
weightless.set_attn_implementation("eager")


def base_plan(tokens):
    """A plan: the budget of a step as a function of the length of its text."""
    return budget_of(weightless, Shape(batch=1, seq=tokens))


print(base_plan(sizes.common))
expected = predicted_longest(base_plan, limit_bytes=sizes.limit)
print(f"longest text within {sizes.limit / GIB:.1f} GiB: {expected:,} tokens")

# %% [markdown]
# The peak is at one of the two moments of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb): here when backward begins, with weights, states, activations and loss. Where recipes have taken these two away and the text is short, it is when the last gradient arrives, with all gradients and the embedding copies in their place; no recipe for activations helps there. (The [cheatsheet](../CHEATSHEET.md#the-equation) has a third moment between the two. It is never the highest in these two notebooks.)
#
# ## Baseline: the plain loop
#
# Attention is computed as in the formula, softmax(QKᵀ)V. This is called *eager*. Every number is kept until backward. The baseline of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) has recipe 1 already, because it is the default of transformers: there nothing grows with the square. The results go into a table that grows by one row per recipe, the *ladder*. `climb` first predicts the longest text. Then it searches for it, and the search knows no prediction: it begins with a short step and with the longest text of the row before, draws a straight line through their bytes, and goes on until two lengths that are 1 % apart have the limit between them. The line that is printed for a row says the longest text that was tried and fits, and all factors compare such lengths. The column *found* of the table says where a straight line between the two lengths meets the limit: *off by* compares the prediction with it.
#
# One step of the longest rows would take many minutes on a CPU. So there the search takes **dry steps**: the same operators on tensors that have shapes but no data, counted by the same account. After each search one real step of real text, at a length that every row can do, shows that the loss is still the same number, and that the dry step had the bytes right.

# %%
from recipes_lib.core.measure import PeakMemory, dry
from recipes_lib.core.operations import step_operations
from recipes_lib.report.length_ladder import LengthLadder
from recipes_lib.workflows.longest import search

ladder = LengthLadder("04_training_long_sequences", timed_at=sizes.common)
text_ids = tokenizer(load_text(split="validation")[:200_000])["input_ids"]
text = torch.tensor([text_ids], device=here.device)  # [1, S] of real text
found = {}  # by row: what the search has found
adapted_by = {}  # by row: the function that applies its recipes
optimizer_by = {}  # by row: what makes its optimizer


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)


def take_step(model, states, tokens):
    """One training step on a text of so many tokens; returns its loss."""
    if dry():
        row = torch.ones(1, tokens, dtype=torch.long)
    else:
        row = text[:, torch.arange(tokens) % text.shape[1]]
    loss = model(input_ids=row, labels=row, use_cache=False).loss
    loss.backward()
    states.step()
    states.zero_grad()
    return loss


def real_step(adapt, optimizer):
    """One step on `common` tokens of real text: its loss, and its peak bytes."""
    model = adapt(load_model() if real_weights else build())
    states = optimizer(model)
    take_step(model, states, 16)  # makes the optimizer's states
    with PeakMemory() as memory:
        loss = take_step(model, states, sizes.common).item()
    return loss, memory.peak


# %%
def climb(row, plan, adapt, optimizer=adamw, lengths=sizes.lengths):
    """Predict the longest text of a row, search for it, and add the row."""
    seed_everything(0)
    expected = predicted_longest(plan, limit_bytes=sizes.limit)
    begin = ladder.rows[-1].tokens if ladder.rows else sizes.common

    def anew():
        model = adapt(build())
        states = optimizer(model)
        return partial(take_step, model, states), states.zero_grad

    # The longest texts of the picture are not tried where they are far too long.
    wanted = [tokens for tokens in lengths if tokens < 20 * expected]
    found[row] = search(anew, start=begin, limit_bytes=sizes.limit, also=wanted)
    loss, peak = real_step(adapt, optimizer)
    adapted_by[row] = adapt
    optimizer_by[row] = optimizer
    longest = found[row].tokens
    ladder.add(
        row,
        tokens=longest,
        crossing=found[row].crossing,
        peak_bytes=found[row].peak_bytes,
        predicted=expected,
        loss=loss,
        least_seconds=step_operations(weightless, Shape(batch=1, seq=longest)) / rate,
    )
    print(ladder.line(row))
    searched = found[row].peaks[sizes.common]
    print(f"{sizes.common} tokens: {searched / 2**20:,.1f} MiB in the search, ", end="")
    print(f"{peak / 2**20:,.1f} MiB in a real step")


def eager(model):
    model.set_attn_implementation("eager")
    return model


climb("baseline", base_plan, eager)

# %% [markdown]
# ## Part A: the same numbers, in less memory
#
# ### 1. Flash attention
#
# **What is going on?** Eager attention keeps a score for every pair of tokens, in every head of every layer. Twice the text is four times the scores.
#
# ```text
# eager    scores [H, S, S] -> softmax -> times V        S x S numbers wait for backward
# flash    for each block of keys: scores of a block, running maximum, running sum
# ```
#
# **Guess first.** Without the scores, how many times as long can the text be?
#
# **The idea.** **Never store the scores: go through the keys block by block and keep a running softmax.** Same result, memory proportional to the length. PyTorch carries such kernels for CPUs and GPUs; `apply_flash_attention` picks the best one here and says why.

# %%
from recipes_lib.attention.flash import (
    apply_flash_attention,
    best_kernel,
    estimate_flash_attention,
    running_softmax_attention,
)
from recipes_lib.report.show import show

show(running_softmax_attention)
query, key, value = torch.randn(3, 1, 4, 100, 16)  # [B, H, S, E] each
by_hand = running_softmax_attention(query, key, value, block_size=16)
attention = torch.nn.functional.scaled_dot_product_attention
library = attention(query, key, value, is_causal=True)
assert torch.allclose(by_hand, library.transpose(1, 2), atol=1e-5)
print("by hand and by PyTorch: the same")


# %%
def on(plan, estimate, **options):
    """The plan after one more recipe."""

    def changed(tokens):
        return estimate(plan(tokens), weightless, Shape(batch=1, seq=tokens), **options)

    return changed


flash_plan = on(base_plan, estimate_flash_attention)
climb("flash attention", flash_plan, apply_flash_attention)

# %% [markdown]
# **Why not more?** That answers the guess: the loss is the same number, and the limit moves only a little. Something else fills the memory now. What flash attention is for shows in one layer alone. Here is its memory over forward and backward, without the output layer:

# %%
import contextlib

from recipes_lib.core.measure import dry_run
from recipes_lib.core.timeline import record_timeline
from recipes_lib.report.timeline_chart import timeline_chart

# As in the search: dry steps on a CPU, real ones on a GPU.
as_searched = dry_run if here.device == "cpu" else contextlib.nullcontext


def timeline_of_one_layer(adapt, tokens):
    """Live bytes over forward and backward of one layer."""
    with as_searched():
        model = adapt(build(layers=1)).base_model
        row = torch.ones(1, tokens, dtype=torch.long, device=model.device)

        def forward_and_backward():
            hidden = model(input_ids=row, use_cache=False).last_hidden_state
            hidden.sum().backward()

        return record_timeline(forward_and_backward, model=model)


timeline_chart(
    {
        "eager": timeline_of_one_layer(eager, sizes.eager_to),
        "flash": timeline_of_one_layer(apply_flash_attention, sizes.eager_to),
    },
    title=f"One layer on {sizes.eager_to:,} tokens: the scores are the tower",
)

# %% [markdown]
# The tower is made of the scores, the weights after the softmax, and their gradients. Now time and memory as the text grows:

# %%
from recipes_lib.workflows.bench.attention import measure_attention

layer = model_of_shape(sizes.shape, layers=1, dtype=dtype)
print(best_kernel(layer).why)
for tokens in sizes.one_layer:
    with_scores = tokens <= sizes.eager_to
    costs = measure_attention(layer, seq_len=tokens, eager=with_scores, rounds=1)
    for kernel, (forward, backward, speed, peak) in costs.items():
        print(
            f"{tokens:>6,} tokens, {kernel:<6}{forward + backward:8.3f} s "
            f"{speed:7.2f} TFLOP/s {peak / 2**20:8,.0f} MiB"
        )
del layer

# %% [markdown]
# With twice the length, eager attention takes four times the memory, and flash attention, which is *fused* in the print, twice. The time of both still grows at least with the square: the number of products is the same. Eager attention also has to write its scores and to read them back.
#
# **How do I use it?** `attn_implementation="sdpa"`, which most models have by default, or `"flash_attention_2"`. `best_kernel` says which one runs here and why. On an H100, PyTorch's attention may take cuDNN's kernel by itself.
#
# **What does it cost?** Sums come in another order, which changes the last digits.
#
# ### 2. Chunked cross-entropy
#
# **What is going on?** Now the logits are the largest tensor: a row as wide as the vocabulary for every token. **Make the logits of a few hundred tokens at a time, and their gradient at once.** The loss is a scalar, so the gradient of each chunk is known in the forward pass up to a factor. Logits for all tokens, and two gradients of that size, never exist.
#
# **The idea.** For one chunk, the logits are made, give their part of the loss and of both gradients, and are freed:

# %%
from recipes_lib.memory.chunked_cross_entropy import (
    apply_chunked_cross_entropy,
    estimate_chunked_cross_entropy,
    plain_chunked_loss,
)

show(plain_chunked_loss)
states = torch.randn(50, 16, requires_grad=True)  # [T, D]
head = torch.randn(40, 16, requires_grad=True)  # [V, D]
labels = torch.randint(0, 40, (50,))
chunked = plain_chunked_loss(states, head, labels, chunk_size=16)
at_once = torch.nn.functional.cross_entropy(states @ head.T, labels)
gradients = torch.autograd.grad(at_once, (states, head))
for ours, exact in zip(chunked, (at_once, *gradients)):
    assert torch.allclose(ours, exact, atol=1e-5)
print("in chunks and at once: the same loss and the same gradients")


# %%

def lean(model):
    return apply_chunked_cross_entropy(apply_flash_attention(model))


lean_plan = on(flash_plan, estimate_chunked_cross_entropy)
climb("+ chunked loss", lean_plan, lean)

# %%
from recipes_lib.workflows.bench.losses import compare_losses

loss_tokens, width, vocabulary = sizes.loss
beside = compare_losses(
    tokens=loss_tokens, hidden=width, vocab=vocabulary, dtype=dtype, rounds=2
)
for which, cost in beside.items():
    print(f"{which:<18}{cost}")

# %% [markdown]
# **Why not more?** The saving is memory; the time stays that of plain cross-entropy, which makes all logits, because the products are the same. PyTorch's own `linear_cross_entropy` does the same, with the chunks of its default options, which are small and slow, or of 256 rows. TRL's loss keeps no gradients in forward: it computes all logits once more in backward, and on a CPU its tiles of 32,768 entries of the vocabulary are copied several times, so narrower ones suit it better. The error is against fp64. (On a CPU the memory inside PyTorch's operator is not seen.)
#
# **How do I use it?** `use_liger_kernel=True` in the Trainer; TRL's `SFTTrainer` has such a loss by default ([notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb) trains beside it).
#
# **What does it cost?** The model returns a loss and no logits.
#
# ### 3. Activation checkpointing
#
# **What is going on?** Every block keeps its activations for backward. **Keep the input of each block, recompute the rest in backward.** Recipe 2 of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) shows how, by hand. Here it is the recipe that matters most: with the logits gone, activations of 30 layers are nearly all that grows.

# %%
from recipes_lib.memory.activation_checkpointing import (
    apply_activation_checkpointing,
    estimate_activation_checkpointing,
)


def checkpointed(model):
    return apply_activation_checkpointing(lean(model))


checkpoint_plan = on(lean_plan, estimate_activation_checkpointing)
climb("+ checkpointing", checkpoint_plan, checkpointed)

# %% [markdown]
# **Why not more?** No other recipe moves the limit as far: the column *× previous* of the table below says it. Now one block at a time is whole, and in it the MLP is widest.
#
# **How do I use it?** `gradient_checkpointing=True` in the Trainer.
#
# **What does it cost?** About one more forward pass.
#
# ### 4. Tiled MLP
#
# **What is going on?** In the block that is being recomputed, the MLP holds the widest tensors: tokens × feed-forward width.
#
# ```text
# whole    x [S, D] -> up, gate [S, F] -> down -> [S, D]       all S rows at once
# tiled    for t rows of x:  the same [t, F]                   one tile at a time, also in backward
# ```
#
# **The idea.** **An MLP treats each token by itself, so it can run tile by tile,** and be recomputed tile by tile in backward. No tensor of length × feed-forward width ever exists.

# %%
from recipes_lib.memory.tiled_mlp import (
    apply_tiled_mlp,
    estimate_tiled_mlp,
    tiled_by_hand,
)

show(tiled_by_hand)
wide = torch.nn.Linear(8, 32)
narrow = torch.nn.Linear(32, 8)
mlp = torch.nn.Sequential(wide, torch.nn.SiLU(), narrow)
hidden = torch.randn(1, 50, 8)
assert torch.allclose(tiled_by_hand(mlp, hidden, tile_size=16), mlp(hidden), atol=1e-6)
print("in tiles and whole: the same")


# %%
def tiled(model, **options):
    """In smaller tiles for the short real steps on a CPU: they would be a single one."""
    tile_size = sizes.tile
    if here.device == "cpu" and not dry():
        tile_size = sizes.small_tile
    return apply_tiled_mlp(lean(model), tile_size=tile_size, **options)


def tiled_and_checkpointed(model):
    return apply_activation_checkpointing(tiled(model))


tiled_plan = on(lean_plan, estimate_tiled_mlp, tile_size=sizes.tile)
checkpoint_plan = on(tiled_plan, estimate_activation_checkpointing)
shortest = sizes.lengths[:1]  # this row is not in the picture of growth
climb("+ tiled MLP", checkpoint_plan, tiled_and_checkpointed, lengths=shortest)

# %% [markdown]
# **How do I use it?** Axolotl `tiled_mlp: true`, DeepSpeed's `TiledMLP`.
#
# **What does it cost?** Smaller products. Without checkpointing, also the MLP once more; with it no product is computed again, because its recomputation ends at the MLP's input. On a CPU the real steps of this notebook have very small tiles, and the column *time* of the table below shows what such tiles cost.
#
# ### 5. Nested checkpoints
#
# **What is going on?** What still grows with the text is the input of every block: L tensors of tokens × width.
#
# ```text
# checkpoints   x1  x2  x3  x4  x5  x6  x7  x8  x9       L inputs
# nested        x1          x4          x7               L / k inputs, and k - 1 more inside of one group
# ```
#
# **Guess first.** With 30 blocks, which k keeps the fewest inputs?
#
# **The idea.** **Checkpoints inside checkpoints: keep the input of every k-th block only.** Backward recomputes a group of k blocks, keeping their inputs, then each block once more. With L blocks, L inputs become L/k + k - 1, fewest near √L, for another forward pass.

# %%
from recipes_lib.memory.nested_checkpointing import (
    apply_nested_checkpointing,
    best_group,
    estimate_nested_checkpointing,
)

group = best_group(weightless.config.num_hidden_layers)
nested_plan = on(tiled_plan, estimate_nested_checkpointing, group=group)
blocks = weightless.config.num_hidden_layers
for k in range(1, 11):
    # Backward is in block i: alive are the inputs of the groups up to its own, and
    # those of its group's blocks after the first, up to i.
    alive = [i // k + 1 + i % k for i in range(blocks)]
    print(f"k = {k:2}: {max(alive):2} inputs")
print(f"taken: k = {group}, the smallest of the best, which recomputes the least")


def nested(model, **options):
    return apply_nested_checkpointing(tiled(model, **options), group=group)


climb("+ nested checkpoints", nested_plan, nested, lengths=shortest)

# %% [markdown]
# **How do I use it?** No library has it for causal language models. They send the inputs of the blocks to the host instead: `offload_activations` here, `gradient_checkpointing_kwargs={"offload": True}` in the Trainer, which copies and computes in turn, `activation_offloading=True` in TRL. On a CPU, host memory is what runs out, and only the disk is left: recipe 3 of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) takes it.
#
# **What does it cost?** One more forward pass.
#
# ## Everything combined
#
# Two things are left. The norms can run in tiles like the MLP. And the optimizer can step in backward and free each gradient, which is recipe 6 of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb).

# %%
from recipes_lib.memory.optimizer_in_backward import (
    apply_optimizer_in_backward,
    estimate_optimizer_in_backward,
)

norms_plan = on(lean_plan, estimate_tiled_mlp, tile_size=sizes.tile, norms=True)
nested_plan = on(norms_plan, estimate_nested_checkpointing, group=group)
everything_plan = on(nested_plan, estimate_optimizer_in_backward)
climb(
    "everything combined",
    everything_plan,
    partial(nested, norms=True),
    partial(apply_optimizer_in_backward, lr=2e-5, fused=True),
)

# %% [markdown]
# For still longer texts, [head_groups.py](../recipes_lib/attention/head_groups.py) lets attention work on one group of heads after the other. By a dry run, that is what brings QLoRA of an 8B model to 262,144 tokens on a card of 24 GB: [the account](../docs/long-card.md). Several GPUs share a text by ring attention, in [notebook 02](../notebooks/02_multi_gpu_training.ipynb).
#
# ## The ladder
#
# What do these recipes cost in time? Here all rows take turns on the clock, each with a forward and a backward pass on the text that every row can do. The fastest turn of each counts. One model exists at a time.

# %%
import time

ids = text[:, : sizes.common]


def seconds_of(row):
    """Forward and backward of one row, after one that warms up."""
    model = adapted_by[row](load_model() if real_weights else build())
    for _ in range(2):
        started = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if here.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        model.zero_grad()
    return seconds


took = {row: [] for row in adapted_by}
for _ in range(sizes.rounds):
    for row, seconds in took.items():
        seconds.append(seconds_of(row))
for row, seconds in took.items():
    ladder.retime(row, min(seconds))
ladder

# %% [markdown]
# Flash attention and the chunked loss cost no time. Checkpointing and nested checkpoints each compute a part once more, and tiles make the products smaller.
#
# The column *a step there, at least* divides the operations of a step by the rate that this machine reaches in matrix products. At the end of the table a single step takes many minutes on two CPU cores, at the very least: the memory is no longer what limits the length, time is. That is why there is a part B.
#
# ## The pictures

# %%
ladder.chart()

# %%
from recipes_lib.report.growth_chart import growth_chart, slope

fixed = base_plan(2).weights + base_plan(2).states
shown = ["baseline", "flash attention", "+ chunked loss", "+ checkpointing"]
shown.append("everything combined")
curves = {row: found[row].peaks for row in shown}
growth_chart(curves, fixed_bytes=fixed, limit_bytes=sizes.limit)

# %% [markdown]
# Dots are the peaks of single steps. The upper dashed line is the limit, and the lower one is what weights and states take at any length. The baseline bends towards slope 2, where twice the text takes four times the memory. All others bend towards slope 1, where it takes twice the memory. On short texts they are flatter still: there gradients are a large part, and gradients do not grow with the text. From there on each recipe moves the line down, not its slope.
#
# **Before and after.** Both steps fill the same memory, one with the text of the first row and one with that of the last:

# %%
def timeline_of(row):
    """Live bytes over one step at the longest length of a row."""
    with as_searched():
        model = adapted_by[row](build())
        states = optimizer_by[row](model)
        take_step(model, states, 16)
        step = partial(take_step, model, states, ladder[row].tokens)
        return record_timeline(step, model=model, optimizer=states)


before_and_after = {}
for row in ("baseline", "everything combined"):
    before_and_after[f"{row}: {ladder[row].tokens:,} tokens"] = timeline_of(row)
timeline_chart(before_and_after, title="The same memory, filled by two lengths")

# %% [markdown]
# In the first picture activations pile up during forward, layer upon layer. In the second, forward leaves a few inputs of groups; the teeth in backward are groups that are recomputed block by block, and no gradients wait for the optimizer.
#
# <!-- numbers:gpu-04 -->
# <!-- end -->
#
# ## Part B: less time, another model
#
# So far no number changed. But exact attention still takes S² time: at tens of thousands of tokens it is most of a step.
#
# ### 6. Sliding window and block-sparse attention
#
# **What is going on?** Flash attention stores no scores, but it still computes one for every pair of tokens.
#
# **Guess first.** With a window of a sixteenth of the text: how many times as fast is attention?
#
# **The idea.** **Let each token read its last W tokens only.** In blocks of queries this is a band of small dense products: S × W of them in place of S²/2. More layers see further: what a layer reads, the next passes on. Here are four patterns on a text of 64 tokens:

# %%
from recipes_lib.attention.block_sparse import (
    apply_block_sparse,
    block_sparse_attention,
    block_sparse_mask,
    predicted_share_of_pairs,
)
from recipes_lib.report.pattern_chart import pattern_chart

positions = torch.arange(64)
distance = positions[:, None] - positions  # of a query (down) from a key (right)
causal = distance >= 0
in_window = causal & (distance < 16)
sinks = causal & (positions < 4)
pattern_chart(
    {
        "full": causal,
        "window of 16": in_window,
        "window and 4 sinks": in_window | sinks,
        "block-sparse": block_sparse_mask(
            seq_len=64, block_size=4, local=3, global_blocks=1
        ),
    }
)

# %%
from recipes_lib.attention.sliding_window import (
    apply_sliding_window,
    predicted_speedup,
    sliding_window_attention,
)
from recipes_lib.core.measure import in_turns

tokens = sizes.long_text
window = sizes.window
config = weightless.config
key_heads = config.num_key_value_heads
heads = [config.num_attention_heads, key_heads, key_heads]  # of Q, K and V
qkv = []
for count in heads:
    shape = (1, count, tokens, 64)  # [B, H, S, E]
    qkv.append(torch.randn(shape, device=here.device, dtype=dtype, requires_grad=True))
pattern = {"block_size": window // 4, "local": 4, "global_blocks": 1}
ways = {
    # With a window as long as the text it is PyTorch's causal attention.
    "full": partial(sliding_window_attention, window=tokens),
    "sliding window": partial(sliding_window_attention, window=window),
    "block-sparse": partial(block_sparse_attention, **pattern),
}


def forward_and_backward(way):
    ways[way](*qkv).sum().backward()


turns = in_turns({way: partial(forward_and_backward, way) for way in ways}, rounds=2)
fewer_pairs = {
    "sliding window": predicted_speedup(seq_len=tokens, window=window),
    "block-sparse": 1 / predicted_share_of_pairs(seq_len=tokens, **pattern),
}
speedup = {}
all_pairs = tokens * (tokens + 1) / 2  # of one head
for way, fewer in ({"full": 1} | fewer_pairs).items():
    seconds = min(turns[way])
    pairs_per_second = heads[0] * all_pairs / fewer / seconds
    print(
        f"{way:<14} on {tokens:,} tokens: {min(turns['full']) / seconds:4.1f}× as fast, "
        f"{fewer:4.1f}× fewer pairs; {pairs_per_second / 1e9:.2f} billion pairs per second"
    )
    if way in fewer_pairs:
        speedup[way] = min(turns["full"]) / seconds

# %% [markdown]
# That answers the guess: compare the first numbers with 16. The last column says why the two ratios differ: the ways do not compute a pair at the same speed. A band is cut into many small dense products of one shape; PyTorch's causal kernel goes through one long row. On a CPU the small products can be the faster ones, so that a window gains more than the pairs say.
#
# Block-sparse patterns add a few blocks that all tokens read; *sinks* are a few first tokens that stay readable beside the window. All are exact for what they read; but the model was trained to read more. What does that cost without further training?

# %%
last_quarter = sizes.reads // 4
variants = {
    "full": None,
    "the last quarter": partial(apply_sliding_window, window=last_quarter),
    "and 4 sinks": partial(apply_sliding_window, window=last_quarter, sinks=4),
    "block-sparse": partial(
        apply_block_sparse, block_size=sizes.reads // 16, local=3, global_blocks=1
    ),
}
read_ids = text[:, : sizes.reads]
price = {}
for which, adapt in variants.items():
    model = load_model().eval()
    if adapt is not None:
        adapt(model)
    with torch.no_grad():
        price[which] = model(input_ids=read_ids, labels=read_ids).loss.item()
    print(f"{which:<18} loss {price[which]:.3f}")
del model

# %% [markdown]
# **Why not more?** Reading less makes this model worse at once; four sinks repair most of it: a trained model parks attention there. Such patterns are for models that train with them: Mistral and Gemma were.
#
# **How do I use it?** `sliding_window` in config.json of a model that was trained with it; FlexAttention for other patterns.
#
# **What does it cost?** Another model, which has to be trained so.
#
# ### 7. Curriculum: short texts first
#
# **What is going on?** From the first step on, every row has its full length, and attention its full price.
#
# **The idea.** **Most of what a model learns early needs no long context,** and short rows cost less attention. The schedule lengthens the rows while the tokens of a step stay the same. Here two small models of characters train on source code with equal compute, three seeds each; the loss on long held-out rows decides.

# %%
from recipes_lib.training.curriculum import flops_per_token
from recipes_lib.workflows.bench.curriculum import (
    compare_at_equal_compute,
    steps_at_equal_compute,
)

row = sizes.row
schedules = {
    "fixed length": [(row, 1.0)],
    "curriculum": [(row // 16, 0.4), (row // 4, 0.3), (row, 0.3)],
}
letters = {}
for split in ("train", "validation"):
    characters = load_text(split=split).encode("ascii", "ignore")[:4_000_000]
    letters[split] = torch.tensor(list(characters))
rows = letters["validation"].unfold(0, row, row)  # spread over many modules
held_out = rows[:: len(rows) // 8][:8]
reached = compare_at_equal_compute(
    partial(model_of_shape, "tiny-llama", layers=2, device="cpu"),
    letters["train"],
    held_out,
    schedules=schedules,
    steps=sizes.steps,
    seeds=sizes.seeds,
    learning_rate=3e-3,
)
for schedule, losses in reached.items():
    words = " ".join(f"{loss:.3f}" for loss in losses)
    print(f"{schedule:<13} loss on rows of {row} characters: {words}")

# %% [markdown]
# At equal compute the curriculum takes more steps. How many more depends on how much of a step is attention, which only short rows save:

# %%
for shape, layers in (("tiny-llama", 2), ("smollm2-135m", None), ("llama-3.1-8b", None)):
    model = model_of_shape(shape, layers=layers, device="meta")
    without_attention = flops_per_token(model, seq_len=1)
    attention = 1 - without_attention / flops_per_token(model, seq_len=row)
    steps = steps_at_equal_compute(
        model, schedules["curriculum"], sizes.steps, full_length=row
    )
    print(
        f"{shape:<13} attention is {attention:3.0%} of a step with rows of {row}; "
        f"{sizes.steps} steps buy {steps} of the curriculum"
    )

# %% [markdown]
# **Why not more?** The model that was trained here is so narrow that attention is most of its work. That is where most of its additional steps come from, and a wide model has few of them. What is left for it is the other half of the idea: early steps learn as much from short rows as from long ones. Nothing here measures that for a wide model.
#
# **How do I use it?** DeepSpeed `curriculum_learning`, Composer `SeqLengthWarmup`.
#
# **What does it cost?** A schedule to tune.
#
# ### 8. RoPE scaling: beyond the trained length
#
# **What is going on?** A rotary position turns each pair of dimensions of queries and keys by an angle that grows with the position. Behind the trained length come angles that the model has never seen. Nothing fails there, so `check_length` says it before.
#
# **Guess first.** Twice the trained length: which way of stretching costs the least where the model was good before?
#
# **The idea.** **Rotary positions can be stretched:** by turning all pairs more slowly (linear), by a larger base (dynamic NTK), or by slowing only those pairs that never made a whole turn in training (YaRN).

# %%
from recipes_lib.architecture.rope import (
    KINDS,
    apply_rope_scaling,
    check_length,
    position_losses,
    rope_frequencies,
)

show(rope_frequencies)
try:
    check_length(load_model(), 16_384)
except ValueError as reason:
    print(reason)

# %% [markdown]
# Longer texts than those of the training take SmolLM2 minutes on a CPU, so there the curves come from a recorded run of the same steps (`python -m benchmarks.gpu --parts rope`); a GPU measures them now.


# %%
from recipes_lib.report.loss_charts import position_chart
from recipes_lib.report.records import recorded


def along(kind, tokens, window, texts):
    """The losses along long texts, with this kind of scaling: one list per text."""
    model = apply_flash_attention(load_model().eval())
    if kind in KINDS:
        apply_rope_scaling(model, kind=kind, factor=2)
    rows = text[:, : texts * tokens].view(texts, 1, tokens)
    return [position_losses(model, row, window=window) for row in rows]


if sizes.stretched is None:
    rope = recorded("rope")
    when = "recorded"
else:
    rope = {"window": sizes.stretched[1]}
    rope["losses"] = {kind: along(kind, *sizes.stretched) for kind in ("none", *KINDS)}
    when = "measured now"
texts = len(rope["losses"]["none"])
title = f"SmolLM2-135M beyond its trained length, {when}; texts: {texts}"
position_chart(rope["losses"], window=rope["window"], trained=8192, title=title)

# %% [markdown]
# Above are means over the texts. The curves before the dashed line answer the guess. Below is what a scaling changes on the same text: its mean, and a band from the text with the lowest difference to that with the highest. Without scaling the loss climbs soon behind the dashed line. Linear scaling changes every angle, so it hurts everywhere until the model is trained with it. YaRN and the larger base keep nearly all that it knows: before the dashed line they lose a little. [Notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb) shows which of them leave a text alone that is short as a whole.
#
# **How do I use it?** `rope_parameters` in config.json; vLLM `--hf-overrides` with the same.
#
# **What does it cost?** Quality on short texts, with linear and YaRN.
#
# ### Several GPUs: context parallelism
#
# When one card is not enough, the sequence itself is split: each of N GPUs holds S/N tokens of every row, and keys and values travel around a ring. While a GPU computes with the keys it has, the next ones are on their way. From a certain length per GPU on, this takes no time of its own:

# %%
config = model_of_shape("llama-3.1-8b", layers=1, device="meta").config
attention_rate = 400e12  # operations per second that attention reaches: put in yours
link = 50e9  # bytes per second between two cards
query_width = config.num_attention_heads * config.head_dim
key_width = config.num_key_value_heads * config.head_dim
# computing: 4 (S/N)² Q / rate        sending K and V in 16 bits: 4 (S/N) KV / link
hidden_from = attention_rate / link * key_width / query_width
print(f"hidden from {hidden_from:,.0f} tokens per GPU on")

# %% [markdown]
# [Notebook 02](../notebooks/02_multi_gpu_training.ipynb) runs this ring on two ranks, and *Ulysses* as well, which exchanges tokens for heads, with their bytes and with the loss of one process.
#
# ## Take this into your code
#
# These lines are not run here, for they need the hub and a GPU:
#
# ```python
# from transformers import AutoModelForCausalLM
#
# from recipes_lib.attention.flash import apply_flash_attention
# from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
# from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing, best_group
# from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
#
# model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B").cuda().train()
# apply_flash_attention(model)
# apply_chunked_cross_entropy(model)
# apply_tiled_mlp(model, norms=True)
# apply_nested_checkpointing(model, group=best_group(model.config.num_hidden_layers))
# loss = model(input_ids=ids, labels=ids, use_cache=False).loss  # ids [1, S], as long as fits
# loss.backward()
# ```
#
# The same with the libraries: `attn_implementation="flash_attention_2"` or `"sdpa"` in transformers, `use_liger_kernel=True` for the loss, `gradient_checkpointing=True`, and ALST in ArcticTraining and DeepSpeed for tiled MLPs. The [cheatsheet](../CHEATSHEET.md) has all switches side by side.
#
# ## What it costs, and when not to use it
#
# | recipe | price | not when |
# |---|---|---|
# | flash attention | sums in another order; a short text gains no time | you want to look at the attention weights; scores are capped (Gemma 2): other kernels do that |
# | chunked cross-entropy | no logits in the output | you need the logits |
# | activation checkpointing | about one more forward pass | activations are not at the peak |
# | tiled MLP | small products; without checkpointing, the MLP once more | no block is checkpointed yet: do that first |
# | nested checkpoints | another forward pass | block inputs are not what fills the memory |
# | sliding window, block-sparse | another model, to be trained that way | far tokens decide |
# | curriculum | a schedule to tune | fine-tuning on one length |
# | RoPE scaling | worse on short texts (linear, YaRN) | the texts are not longer than the training's |
#
# **Measured here: two recipes that gain less than one expects.** *Flash attention* alone moves the limit little, because the logits are there as well. The *curriculum* gets its additional steps from a model in which attention is most of the work; a wide model gets few of them.
#
# **What goes together.** The rows of the ladder, in their order: each is measured on top of those above it. **What does not.** The step in backward with accumulation or clipping, as [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) says; a sliding window or block-sparse attention with packed rows, which both refuse.
#
# ## Exercises
#
# 1. Predict, then measure: how does the longest sequence change with half the layers? Set `layers` in the sizes and compare.
# 2. Freeze the embedding (`requires_grad_(False)`). Which terms of the budget shrink, and which rows gain?
# 3. Find the group size from which nested checkpoints stop helping. What does the formula say?
#
# ## References
#
# - Dao et al., *FlashAttention*, 2022; Dao, *FlashAttention-2*, 2023
# - Hsu et al., *Liger Kernel*, 2024; Wijmans et al., *Cut Your Losses*, 2024
# - Bekman et al., *Arctic Long Sequence Training*, 2025: tiled MLP and loss, checkpoints on the host
# - Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016: nested checkpoints
# - Beltagy et al., *Longformer*, and Zaheer et al., *Big Bird*, 2020
# - Su et al., *RoFormer*, 2021; Peng et al., *YaRN*, 2023
#
# The last cell checks that the story above is true on this machine: orderings and signs, never absolute speed.

# %%
rows = ladder.rows
slopes = {row: slope(found[row].peaks, fixed) for row in shown}
loss_error = max(abs(row.loss - rows[0].loss) for row in rows)
ladder.note(
    model=sizes.shape,
    limit_bytes=sizes.limit,
    timed_at=sizes.common,
    loss_error=loss_error,
    slopes=slopes,
    local={"tokens": sizes.long_text, "speedup": speedup, "ideal": fewer_pairs},
    price=price,
    curriculum=reached,
    loss={which: vars(cost) for which, cost in beside.items()},
)
assert all(abs(row.prediction_error) < 0.1 for row in rows), "the predictions hold"
most_error = 1e-4 if here.device == "cpu" else 2e-2
assert loss_error < most_error, "the same loss"
lengths = [row.tokens for row in rows]
assert lengths == sorted(lengths), "each row is longer"
if here.device == "cpu":
    assert slopes["baseline"] > sizes.least_slope, "with all scores, bytes grow with the square"
    assert slopes["flash attention"] < 1.1, "and without them with the length"
assert ladder.gain("everything combined") > 10
assert min(speedup.values()) > sizes.least_speedup, "reading less is faster"
print(f"all checks passed: {ladder.gain('everything combined'):.0f}× longer")
