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
# > **891 → 54,986 tokens:** the longest text on which every weight of smollm2-135m trains within 4 GiB, **62 times as long** as with eager attention, and 40 times as long as with transformers' default, SDPA. The loss on 512 tokens is the same in every row, to 2e-07. No step of such a length was computed here: its bytes were counted on tensors that have shapes and no data. Every row was predicted first; the arithmetic is off by 0.6% at most.
# >
# > Measured on AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-25.
# <!-- end -->
#
# A longer text needs more memory, and at some length the training step fails. This notebook asks how long a text can be on which one small model trains within a fixed memory. For each recipe that saves memory it first predicts the longest text with arithmetic. Then it searches for it. Then it checks, on a short text, whether the loss is still the same number.
#
# | | |
# |---|---|
# | **You will learn** | to predict the longest sequence that a memory holds, and which recipe moves that limit |
# | **You need** | Python and the basics of PyTorch, and the equation of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb); no GPU, no login |
# | **Time** | about ten minutes on two CPU cores |
# | **Cost** | free on a laptop or on a Colab T4 |

# %% [markdown]
# ## The map
#
# | | recipe | makes smaller | file |
# |---|---|---|---|
# | 1 | flash attention | activations: tokens × tokens | [flash.py](../recipes_lib/attention/flash.py) |
# | 2 | chunked cross-entropy | loss: tokens × vocabulary | [chunked_cross_entropy.py](../recipes_lib/memory/chunked_cross_entropy/__init__.py) |
# | 3 | activation checkpointing | activations: tokens × layers | [activation_checkpointing.py](../recipes_lib/memory/activation_checkpointing.py) |
# | 4 | tiled MLP | activations of one block: tokens × feed-forward width | [tiled_mlp.py](../recipes_lib/memory/tiled_mlp.py) |
# | 5 | nested checkpoints | inputs of the blocks | [nested_checkpointing.py](../recipes_lib/memory/nested_checkpointing.py) |
# | 6 | sliding window, block-sparse | time of attention | [sliding_window.py](../recipes_lib/attention/sliding_window/__init__.py), [block_sparse.py](../recipes_lib/attention/block_sparse/__init__.py) |
# | 7 | curriculum | time of early steps | [curriculum.py](../recipes_lib/training/curriculum.py) |
# | 8 | RoPE scaling | the loss beyond the trained length | [rope.py](../recipes_lib/architecture/rope.py) |
#
# The words of the table are explained where they are first needed. Recipes 1 to 5 are **Part A**: they save memory, and the model learns the same. Recipes 6 to 8 are **Part B**: they save time or reach further, and they change the model or its training.
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
    sys.path.insert(0, str(code))
    from recipes_lib.core.set_up import install

    install(code, extra="notebooks")

# %%
import gc
from functools import partial

import torch

from recipes_lib.core.data import load_text
from recipes_lib.core.model.default_model import model_source
from recipes_lib.core.measure.machine import GIB, choose_sizes, machine, seed_everything
from recipes_lib.core.measure.rates import measure_matrix_rates
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape

here = machine()
tokenizer = load_tokenizer()
gc.freeze()  # to count bytes, Python looks at all objects: not at those of the imports
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
# The last line of the print says how fast this machine multiplies large matrices. One TFLOP/s is 1,000 billion operations per second. Later this rate gives a lower bound for the time of a step.
#
# All sizes stand in one cell. On a CPU we set a limit of 4 GiB for all tensors together. The machine has more memory. Nothing fails at the limit: we count the bytes and compare. All weights of the real SmolLM2-135M train, in fp32. A GPU takes a larger model with random weights, since memory does not depend on what the weights are. Its limit leaves some room on the card, because a part of the card's memory lies in pieces that are too small to use.

# %%
cpu = dict(
    shape="smollm2-135m",
    layers=None,  # all of them
    limit=4 * GIB,
    common=512,  # tokens of a text that every row can train on
    lengths=(512, 8192, 32768),  # whose peaks are wanted for the picture
    tile=8192,  # tokens of a tile
    small_tile=128,  # for the real steps of `common` tokens
    one_layer=(1024, 2048, 4096, 8192),  # lengths at which attention alone is timed
    eager_to=4096,  # the longest of them at which eager attention is measured, too
    loss=(512, 576, 49152),  # tokens, width, vocabulary
    rounds=3,  # of turns on the clock
    long_text=16384,  # tokens on which windows are timed
    window=1024,
    trained="smollm2",  # the model whose losses say something
    reads=2048,  # tokens on which we ask what reading less costs
    row=2048,  # characters of a row of the curriculum
    steps=60,  # of the curriculum, at full length
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
    shape="tiny-smollm2",
    limit=100 * 2**20,
    common=32,
    lengths=(32, 256, 1024),
    tile=512,
    small_tile=16,
    one_layer=(256, 512),
    loss=(512, 64, 8192),
    rounds=1,
    long_text=2048,
    window=256,
    trained="tiny-smollm2",
    reads=256,
    row=256,
    steps=6,
    seeds=(0,),
    least_speedup=0,  # such small sizes say nothing
    least_slope=1,
    stretched=(200, 100, 1),
)
sizes = choose_sizes(cpu=cpu, gpu16=gpu16, gpu24=gpu24, gpu80=gpu24, fast=brief)
sizes

# %% [markdown]
# ## What runs out: one equation
#
# Weights and optimizer states (AdamW keeps two numbers per weight) take the same bytes for any text. The rest grows with its length $S$:
#
# $$\text{peak}(S) = \text{fixed} + a\,S^2 + b\,S$$
#
# *fixed* are weights and states. $a$ counts attention *scores*: each token compares itself with the others, so there is one number for each pair of tokens, in each head of each layer. $b$ counts what every single token leaves behind: *activations*, which forward keeps for backward in each layer, and *logits*, one number per entry of the vocabulary, from which the loss is made. Each recipe of part A makes $a$ or $b$ smaller, so the longest $S$ within a given memory grows. The arithmetic is that of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb), solved for $S$.
#
# **Guess first.** Within 4 GiB, how many tokens can a text have on which SmolLM2-135M trains without any recipe?

# %%
from recipes_lib.core.predict import equation
from recipes_lib.workflows.longest import predicted_longest

build = partial(model_of_shape, sizes.shape, layers=sizes.layers, dtype=dtype)
real_weights = sizes.shape == "smollm2-135m" and sizes.layers is None
weightless = build(device="meta")  # weighs nothing: enough for arithmetic


def eager_terms(tokens):
    """The terms of the equation for a text of so many tokens."""
    plain = equation.plain_step(weightless, rows=1, length=tokens)
    return equation.with_eager_attention(plain)


def longest_by(terms):
    """The longest text within the limit by arithmetic."""
    return predicted_longest(lambda tokens: terms(tokens).peak, limit_bytes=sizes.limit)


print(eager_terms(sizes.common))
expected = longest_by(eager_terms)
print(f"longest text within {sizes.limit / GIB:.1f} GiB: {expected:,} tokens")

# %% [markdown]
# Check it by hand, with the sizes of a CPU. Fixed are weights and states, 513 + 1,026 MiB. $a S^2$ are the scores: 9 heads × 30 layers × 512² pairs × 4 bytes = 270 MiB, a part of the activations. $b S$ is the rest of the activations, and the loss: 512 tokens × 49,152 logits × 4 bytes × 3 = 288 MiB, because the loss and its gradient need this table three times. The sum is the predicted peak. [Notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) explains the other lines of the print.
#
# The equation holds for the moment in which backward begins: activations and loss are complete, and there are no gradients yet. Later, when the last gradient arrives, activations and loss are gone, and all gradients are there. In a long text the first moment is the peak. In a short text, or after recipes that make activations and loss smaller, it can be the second, and then no recipe for activations helps. With checkpoints there is a third moment, a little after backward begins: one of the last blocks is computed again, and all its activations are there. The print names the moment of the peak. The terms stand in one file that can be read aloud, [equation.py](../recipes_lib/core/predict/equation.py).
#
# ## Baseline: the plain loop
#
# In attention each token has a query, a key and a value: the rows of Q, K and V. The baseline computes softmax(QKᵀ/√E) V as the formula says, where E is the width of a head. In shapes, B counts texts, H heads and S tokens. This is called *eager*: all scores are made, and what the softmax makes of them waits for backward. The baseline of notebook 01 has flash attention already, because it is the default of transformers. There nothing grows with the square.
#
# The results go into a table that grows by one row per recipe, the *ladder*. `climb` adds a row. First it predicts the longest text by arithmetic. Then it searches for it, and the search does not use the prediction. It takes a step with a short text and one with the longest text of the row before. A straight line through their bytes gives the first guess. From there it goes up and down until one length fits, another does not, and they are at most 1 % apart. The search gives two numbers. The line under each `climb` gives the longest text that was tried and fits, and all factors compare such lengths. The column *found* of the table is a little larger: there a straight line between the two lengths meets the limit. Over so short a distance bytes grow nearly in a straight line, so this number is known much better than to 1 %. The prediction is compared with it.
#
# One step of the longest rows would take many minutes on a CPU. So there the search takes **dry steps**: the same operators on tensors that have shapes but no data. What is counted is the same in both: the bytes of all tensors that are alive, after each operator. So the dry steps know nothing of the equation, and the equation nothing of operators: where they agree, neither is wrong by itself. After each search comes one real step on real text, at a length that every row can do. It shows that the loss is still the same number, and its bytes are printed beside those of the dry step of this length. (In so short a text the later rows have their peak where the last gradient arrives, so for them this comparison says little about activations. The tests of the package compare dry and real steps more closely, for many families of models.)

# %%
from recipes_lib.core.measure import PeakMemory, dry
from recipes_lib.core.predict.operations import step_operations
from recipes_lib.report.ladders.length import LengthLadder
from recipes_lib.workflows.longest import search

ladder = LengthLadder("04_training_long_sequences", timed_at=sizes.common)
text_ids = tokenizer(load_text(split="validation")[:200_000])["input_ids"]
text = torch.tensor([text_ids], device=here.device)  # [1, S] of real text
found = {}  # by row: what the search has found
adapted_by = {}  # by row: the function that applies its recipes
optimizer_by = {}  # by row: what makes its optimizer


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)


def take_step(model, optimizer, tokens):
    """One training step on a text of so many tokens; returns its loss."""
    if dry():
        row = torch.ones(1, tokens, dtype=torch.long)
    else:
        row = text[:, torch.arange(tokens) % text.shape[1]]
    loss = model(input_ids=row, labels=row, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def real_step(adapt, make_optimizer):
    """One step on `common` tokens of real text: its loss, and its peak bytes."""
    model = adapt(load_model() if real_weights else build())
    optimizer = make_optimizer(model)
    take_step(model, optimizer, 16)  # makes the optimizer's states
    with PeakMemory() as memory:
        loss = take_step(model, optimizer, sizes.common).item()
    return loss, memory.peak


# %%
def climb(row, terms, adapt, make_optimizer=adamw, lengths=sizes.lengths):
    """Predict the longest text of a row, search for it, and add the row."""
    seed_everything(0)
    expected = longest_by(terms)
    begin = ladder.rows[-1].tokens if ladder.rows else sizes.common

    def fresh_step():
        model = adapt(build())
        optimizer = make_optimizer(model)
        return partial(take_step, model, optimizer), optimizer.zero_grad

    # The longest texts of the picture are not tried where they are far too long.
    wanted = [tokens for tokens in lengths if tokens < 20 * expected]
    found[row] = search(fresh_step, start=begin, limit_bytes=sizes.limit, also=wanted)
    loss, peak = real_step(adapt, make_optimizer)
    adapted_by[row] = adapt
    optimizer_by[row] = make_optimizer
    longest = found[row].tokens
    ladder.add(
        row,
        tokens=longest,
        crossing=found[row].crossing,
        peak_bytes=found[row].peak_bytes,
        predicted=expected,
        loss=loss,
        least_seconds=step_operations(weightless, rows=1, length=longest) / rate,
    )
    print(ladder.line(row))
    searched = found[row].peaks[sizes.common]
    print(f"{sizes.common} tokens: {searched / 2**20:,.1f} MiB in the search, ", end="")
    print(f"{peak / 2**20:,.1f} MiB in a real step")


def eager(model):
    model.set_attn_implementation("eager")
    return model


climb("baseline", eager_terms, eager)

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
# **The idea.** **Never store the scores: go through the keys block by block and keep a running softmax.** A softmax divides by a sum over *all* keys, and before that the largest score is subtracted, so that exp does not overflow. Block by block, neither is known yet. So we keep the largest score so far and the sum so far. If a later block has a larger score, what was summed before is multiplied by a correction. Backward makes each block of scores again from Q, K and the saved sums, so nothing of size S × S has to wait. The function below shows forward only.
#
# PyTorch has programs that do this, called *kernels*, for CPUs and GPUs, behind one function: `scaled_dot_product_attention`, SDPA for short. `apply_flash_attention` picks the best one here, and `best_kernel` will say which one it is and why.

# %%
from recipes_lib.attention.flash import (
    apply_flash_attention,
    best_kernel,
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
def flash_terms(tokens):
    return equation.plain_step(weightless, rows=1, length=tokens)


climb("flash attention", flash_terms, apply_flash_attention)

# %% [markdown]
# **Why not more?** The line *flash attention* above answers the guess. Something else fills the memory now: the logits, and the activations of all layers.
#
# One layer alone shows what flash attention is for. Here is the memory of one layer over forward and backward, without the output layer. On a CPU all pictures of memory and of lengths in this notebook are drawn from dry steps: their bytes are counted, and nothing is computed. A line *measured on* below a picture names the machine that counted.

# %%
import contextlib

from recipes_lib.core.measure import dry_run
from recipes_lib.core.measure.timeline import record_timeline
from recipes_lib.report.timeline import timeline_chart

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
# The tower is made of the scores, of the probabilities that the softmax makes of them, and in backward of their gradients, which the figure counts as *other*. The ground at the bottom is the layer and the embedding. From left to right are operators, each as wide as any other, however long it takes.
#
# Now time and memory of the attention alone, without its projections, as the text grows. Times are medians of three measurements. TFLOP/s counts only the pairs that causal attention needs. The rows *fused* are flash attention, by the kernel that the first line names:

# %%
from recipes_lib.workflows.bench.kernels import measure_attention

layer = model_of_shape(sizes.shape, layers=1, dtype=dtype)
print(best_kernel(layer).why)
for tokens in sizes.one_layer:
    with_scores = tokens <= sizes.eager_to
    costs = measure_attention(layer, seq_len=tokens, eager=with_scores, rounds=3)
    for kernel, (forward, backward, speed, peak) in costs.items():
        print(
            f"{tokens:>6,} tokens, {kernel:<6}{forward + backward:8.3f} s "
            f"{speed:7.2f} TFLOP/s {peak / 2**20:8,.0f} MiB"
        )
del layer

# %% [markdown]
# With twice the length, eager attention takes about four times the memory, and flash attention twice. The number of products becomes four times as large. The time of flash attention follows it, a little less steeply at short lengths. Eager attention also has to write its scores and to read them back, and its time can grow by more than four times.
#
# **How do I use it?** `attn_implementation="sdpa"`, which most models have by default, or `"flash_attention_2"`. `best_kernel` says which one runs here and why. On an H100, SDPA may choose by itself the kernel of cuDNN, NVIDIA's library; the setup prints its version there.
#
# **What does it cost?** Sums come in another order, which changes the last digits.
#
# ### 2. Chunked cross-entropy
#
# **What is going on?** Now the logits are the largest tensor: as many numbers as the vocabulary has entries, for every token.
#
# **Guess first.** Without all logits at once, by which factor does the text grow?
#
# **The idea.** **Make the logits of a few hundred tokens at a time, and their gradient at once.** For one token that gradient is softmax(logits) minus one-hot(target): the probabilities, with 1 subtracted at the right entry. It needs no other token. The loss is one number, so all that backward adds later is one factor. So a chunk gives its part of the loss and of two gradients, those of the hidden states and of the output weights. Then its logits are freed. (T are tokens, C those of a chunk, D is the width of the model, V the vocabulary.)

# %%
from recipes_lib.memory.chunked_cross_entropy import (
    apply_chunked_cross_entropy,
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


def lean_terms(tokens):
    return equation.with_chunked_loss(flash_terms(tokens))


climb("+ chunked loss", lean_terms, lean)

# %%
from recipes_lib.workflows.bench.kernels import compare_losses

loss_tokens, width, vocabulary = sizes.loss
beside = compare_losses(
    tokens=loss_tokens, hidden=width, vocab=vocabulary, dtype=dtype, rounds=2
)
for which, cost in beside.items():
    print(f"{which:<18}{cost}")

# %% [markdown]
# **Why not more?** To the guess: on a CPU the text becomes about a third longer. The activations of all layers are now nearly all that grows.
#
# The second print compares the loss alone. The time of *ours* is about that of plain cross-entropy, which makes all logits, because the products are the same. PyTorch has such a loss, too, `linear_cross_entropy`. The row *torch* has its default options: their chunks are small, and it is slow. The row *torch, 256 rows* has chunks of 256 tokens. The row *TRL* is the loss of its `SFTTrainer`. It works in tiles of 32,768 entries of the vocabulary, keeps no gradients in forward, and makes all logits once more in backward, which takes time. With so few tokens its tiles take more memory than all logits at once. The row *TRL, 2,048 words* is the same with tiles of 2,048 entries, which need less memory. *Value off by* is the relative error against the same loss in fp64. On a CPU we see the tensors between operators and not those inside of one, so the memory of PyTorch's operator is *not seen*.
#
# **How do I use it?** `use_liger_kernel=True` in the Trainer; TRL's `SFTTrainer` has such a loss by default ([notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb) trains beside it).
#
# **What does it cost?** The model returns a loss and no logits.
#
# ### 3. Activation checkpointing
#
# **What is going on?** Every block keeps its activations for backward.
#
# **Guess first.** Of each block only its input stays. For each number of this input, a plain block keeps about 19 numbers. By which factor does the text grow?
#
# **The idea.** **Keep the input of each block, recompute the rest in backward.** Recipe 2 of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) shows how, by hand. Here it is the recipe that matters most.

# %%
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing


def checkpointed(model):
    return apply_activation_checkpointing(lean(model))


def checkpoint_terms(tokens):
    return equation.with_checkpointing(lean_terms(tokens))


climb("+ checkpointing", checkpoint_terms, checkpointed)

# %% [markdown]
# **Why not more?** No other recipe multiplies the length by so much, as the column *× previous* of the table below will show: on a CPU the text becomes eleven times as long. But all inputs of blocks stay, and during backward one block has all its activations. The largest of these belong to the MLP.
#
# **How do I use it?** `gradient_checkpointing=True` in the Trainer; newer versions call it `activation_checkpointing`.
#
# **What does it cost?** About one more forward pass.
#
# ### 4. Tiled MLP
#
# **What is going on?** In the block that is being recomputed, the MLP holds the widest tensors: tokens × feed-forward width, S × F.
#
# ```text
# whole    x [S, D] -> up, gate [S, F] -> down -> [S, D]       all S rows at once
# tiled    for t rows of x:  the same [t, F]                   one tile at a time, also in backward
# ```
#
# **Guess first.** What is larger now: the inputs of all blocks, or one block with its MLP?
#
# **The idea.** **An MLP treats each token by itself, so it can run tile by tile,** and be recomputed tile by tile in backward. No tensor of length × feed-forward width ever exists.

# %%
from recipes_lib.memory.tiled_mlp import (
    apply_tiled_mlp,
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
    """On a CPU the real steps are so short that one tile would hold them: they get smaller ones."""
    tile_size = sizes.tile
    if here.device == "cpu" and not dry():
        tile_size = sizes.small_tile
    return apply_tiled_mlp(lean(model), tile_size=tile_size, **options)


def tiled_and_checkpointed(model):
    return apply_activation_checkpointing(tiled(model))


def tiled_terms(tokens):
    in_tiles = equation.with_tiled_mlp(lean_terms(tokens), tile=sizes.tile)
    return equation.with_checkpointing(in_tiles)


shortest = sizes.lengths[:1]  # this row is not in the picture of growth
climb("+ tiled MLP", tiled_terms, tiled_and_checkpointed, lengths=shortest)

# %% [markdown]
# **Why not more?** The small gain answers the guess: the inputs of the blocks are larger. They are still there, and a tile does not touch them.
#
# **How do I use it?** Axolotl `tiled_mlp: true`, DeepSpeed's `TiledMLP`.
#
# **What does it cost?** Without checkpointing, the MLP is computed once more. With it no product is added: the block's own recomputation stops where the MLP begins, and the tiles do the rest. But the products become smaller, and each tile adds to the gradients of the weights. On a CPU the short real steps have tiles of 128 tokens only, and the column *time* of the table below is measured with such tiles.
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
# **The idea.** **Checkpoints inside checkpoints: keep the input of every k-th block only.** Backward recomputes a group of k blocks, keeping their inputs, then each block once more. With L blocks, L inputs become about L/k + k - 1: one per group, and those of one group, whose first is counted already. That is fewest near √L. The price is another forward pass, except for the last block of each group, which is computed once less. So among equally good groups the smallest recomputes the least.

# %%
from recipes_lib.memory.nested_checkpointing import (
    apply_nested_checkpointing,
    best_group,
    nested_by_hand,
)

show(nested_by_hand)
blocks = [torch.nn.Linear(8, 8) for _ in range(9)]
hidden = torch.randn(1, 5, 8, requires_grad=True)
plain = torch.nn.Sequential(*blocks)(hidden).sum()
by_hand = nested_by_hand(blocks, hidden, group=3).sum()
gradients = [torch.autograd.grad(loss, hidden)[0] for loss in (plain, by_hand)]
assert torch.equal(*gradients)
print("nested and plain: the same gradient")

# %% [markdown]
# Which group is best? For each k, here are the inputs that are alive at the worst moment of backward:

# %%
group = best_group(weightless.config.num_hidden_layers)
blocks = weightless.config.num_hidden_layers
for k in range(1, 11):
    # When backward is in block i, the inputs of the groups up to its own are alive, and
    # those of its group's blocks after the first, up to i.
    alive = []
    for i in range(blocks):
        of_groups = i // k + 1
        inside_of_its_group = i % k
        alive.append(of_groups + inside_of_its_group)
    print(f"k = {k:2}: {max(alive):2} inputs")
print(f"taken: k = {group}, the smallest of the best, which recomputes the least")


def nested(model, **options):
    return apply_nested_checkpointing(tiled(model, **options), group=group)


def nested_terms(tokens):
    in_tiles = equation.with_tiled_mlp(lean_terms(tokens), tile=sizes.tile)
    return equation.with_checkpointing(in_tiles, group=group)


climb("+ nested checkpoints", nested_terms, nested, lengths=shortest)

# %% [markdown]
# **Why not more?** The inputs that are left still grow with the text, and so does the one block that is computed again.
#
# **How do I use it?** We know of no flag for it in a training library. Megatron-LM comes near: `--recompute-method uniform --recompute-num-layers k` keeps the inputs of groups, but in backward all activations of one group. Other libraries send the inputs of the blocks to host memory instead: the Trainer with `gradient_checkpointing_kwargs={"offload": True}`, TRL with `activation_offloading=True`. Recipe 3 of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) does it with `offload_activations`. On a CPU, host memory is what runs out, and only the disk is left.
#
# **What does it cost?** Nearly one more forward pass.
#
# ## Everything combined
#
# Two things are left. The norms can run in tiles like the MLP. And the optimizer can step in backward and free each gradient, which is recipe 6 of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb).

# %%
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward


def everything_terms(tokens):
    in_tiles = equation.with_tiled_mlp(lean_terms(tokens), tile=sizes.tile, norms=True)
    return equation.with_step_in_backward(equation.with_checkpointing(in_tiles, group=group))


climb(
    "everything combined",
    everything_terms,
    partial(nested, norms=True),
    partial(apply_optimizer_in_backward, lr=2e-5, fused=True),
)

# %% [markdown]
# **Why not more?** What is left is what was left before, a little smaller: the inputs that are kept, and the one block that is computed again.
#
# For still longer texts, [head_groups.py](../recipes_lib/attention/head_groups.py) lets attention work on one group of heads after the other. With it, one step of QLoRA (recipe 10 of notebook 01) on a model of 8 billion weights should hold 262,144 tokens on a card of 24 GB. This is a prediction, from a dry run and arithmetic. [This page](../docs/long-card.md) has the numbers. Nobody has measured it on a card yet. Several GPUs share a text by ring attention, in [notebook 02](../notebooks/02_multi_gpu_training.ipynb).
#
# ## The ladder
#
# What do these recipes cost in time? All rows take *turns*: one forward and backward of each, then all again, three rounds on a CPU. So a change of the machine meets every row. The text has the length that every row can do. The optimizer is not timed.
#
# In the table, *off by* is positive where the prediction was too long. *Time* and *loss* are those of the short text. *Time* is the fastest turn of a row over the fastest of the baseline; in brackets are the lowest and the highest ratio of a single round. *A step there, at least* is a lower bound for one step of the longest text: its operations divided by the rate of the setup.

# %%
import time

ids = text[:, : sizes.common]


def seconds_of(row):
    """Forward and backward of one row, after those of a short text, which warm up."""
    model = adapted_by[row](load_model() if real_weights else build())
    for tokens in (64, sizes.common):
        part = ids[:, :tokens]
        started = time.perf_counter()
        model(input_ids=part, labels=part, use_cache=False).loss.backward()
        if here.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        model.zero_grad()
    return seconds


took = {row: [] for row in adapted_by}
for _ in range(sizes.rounds):
    for row, seconds in took.items():
        seconds.append(seconds_of(row))
ladder.set_times(took)
ladder

# %% [markdown]
# At this length flash attention and the chunked loss cost hardly any time, or save a little. Where a bracket reaches from below 1 to above it, this run does not say whether the row or the baseline is faster. Checkpointing and nested checkpoints each compute a part once more, and tiles make the products smaller. But from *+ checkpointing* on, the brackets of neighbouring rows overlap: this run does not say what tiles and nested checkpoints cost each.
#
# The lower bound assumes that everything runs at the rate of large products. Checkpoints compute some parts twice, nested ones up to three times, and attention is slower (compare the TFLOP/s of recipe 1). Still, at the end of the table a single step takes many minutes on two CPU cores: memory is no longer what limits the length, time is. That is why there is a part B.
#
# ## The pictures
#
# The longest text of each row. The black mark is the prediction. The axis is linear: it shows how many tokens each recipe adds. The factor of each recipe is in the column *× previous*.

# %%
ladder.chart()

# %%
import math

from recipes_lib.report.lines import lines
from recipes_lib.report.style import INK, LINES


def slope(peaks):
    """The exponent of the growth between the two longest texts, without the fixed part."""
    (before, small), (last, large) = sorted(known(peaks).items())[-2:]
    return math.log((large - fixed) / (small - fixed)) / math.log(last / before)


def known(peaks):
    """The lengths that did not run out of memory."""
    return {tokens: size for tokens, size in peaks.items() if size is not None}


shortest_text = eager_terms(2)
fixed = shortest_text.weights + shortest_text.states
shown = ["baseline", "flash attention", "+ chunked loss", "+ checkpointing"]
shown.append("everything combined")
curves = {}
names = {}
slopes = {row: slope(found[row].peaks) for row in shown}
for row in shown:
    peaks = sorted(known(found[row].peaks).items())
    curves[row] = [(tokens, size / 2**30) for tokens, size in peaks]
    names[row] = f"{row}: slope {slopes[row]:.2f}"
figure = lines(
    curves,
    names=names,
    title="How memory grows with the text (dashed: the limit; weights and states)",
    source="each dot is one step under the memory account",
    height=4,
    xscale="log",
    yscale="log",
    ylim=(fixed / 2**31, 1.5 * sizes.limit / 2**30),
    xlabel="tokens in the sequence",
    ylabel="peak, GiB",
)
for size in (sizes.limit, fixed):
    figure.axes[0].axhline(size / 2**30, color=INK, linestyle="--", linewidth=1)
figure

# %% [markdown]
# Each dot is one step: of the search, or at one of the lengths that were asked for. The upper dashed line is the limit. The lower one is what is there at any length: weights and states. The number at the end of a curve is its slope between its last two dots, for the bytes above the lower line. With slope 2, twice the text takes four times the memory; with slope 1 it takes twice the memory. The baseline is on its way to 2, because its scores grow with the square. Without the scores all curves end close to 1. *Everything combined* is a little lower, because a part of its memory does not grow with the text: a tile has the same number of tokens in any long text. So after flash attention a recipe moves the curve down, and hardly changes how steep it becomes in the end. A curve ends early where a longer text would be more than twenty times too long.
#
# **Before and after.** Both steps fill the same memory, one with the text of the first row and one with that of the last:

# %%
def timeline_of(row):
    """Live bytes over one step at the longest length of a row."""
    with as_searched():
        model = adapted_by[row](build())
        optimizer = optimizer_by[row](model)
        take_step(model, optimizer, 16)
        step = partial(take_step, model, optimizer, ladder[row].tokens)
        return record_timeline(step, model=model, optimizer=optimizer)


before_and_after = {}
for row in ("baseline", "everything combined"):
    before_and_after[f"{row}: {ladder[row].tokens:,} tokens"] = timeline_of(row)
timeline_chart(before_and_after, title="The same memory, filled by two lengths")

# %% [markdown]
# In the first picture activations pile up during forward, layer upon layer. In the second, forward leaves only the inputs of groups. The flat part in the middle is the loss, chunk by chunk: it consists of many operators, and each is drawn equally wide. In backward each tooth is a block that is computed again, and k of them are a group. The last group, with which backward begins, can be smaller. There is no phase *step*: each weight is updated during backward.
#
# <!-- numbers:gpu-04 -->
# <!-- end -->
#
# ## Part B: less time, another model
#
# So far the model learned the same: the loss is the same number in each row, and the tests of each recipe compare the gradients. But exact attention still takes S² time. In this narrow model it soon is a large part of a step; in a wide model that point comes later. Recipe 7 prints the shares of three models, in rows of 2,048.
#
# ### 6. Sliding window and block-sparse attention
#
# **What is going on?** Flash attention stores no scores, but it still computes one for every pair of tokens, however far they are apart.
#
# **Guess first.** With a window of a sixteenth of the text: how many times as fast is attention?
#
# **The idea.** **Let each token read its last W tokens only.** That leaves about S × W pairs in place of S²/2. They lie in a band, which is computed as many small dense products. A token still gets something from beyond its window, through the layers: the tokens that it reads have read their own windows one layer below.
#
# *Sinks* are a few first tokens that stay readable beside the window. A *block-sparse* pattern lets a block of tokens read the blocks just before it, and a few that all tokens read. Here are four patterns on a text of 64 tokens. Each line from left to right is one token that reads, each column is a token that can be read:

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
pattern_chart(
    {
        "full": causal,
        "window of 16": in_window,
        "window and 4 sinks": in_window | sinks,
        "block-sparse": block_sparse_mask(
            seq_len=64, block_size=4, local=3, global_blocks=1
        ),
    },
    title="Which keys each query reads",
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
    shape = (1, count, tokens, config.head_dim)  # [B, H, S, E]
    qkv.append(torch.randn(shape, device=here.device, dtype=dtype, requires_grad=True))
# A block reads itself and the 3 blocks before it, and the first block of the text.
pattern = {"block_size": window // 4, "local": 4, "global_blocks": 1}
ways = {
    # With a window as long as the text it is PyTorch's causal attention.
    "full": partial(sliding_window_attention, window=tokens),
    "sliding window": partial(sliding_window_attention, window=window),
    "block-sparse": partial(block_sparse_attention, **pattern),
}


def forward_and_backward(way):
    ways[way](*qkv).sum().backward()


turns = in_turns(
    {way: partial(forward_and_backward, way) for way in ways}, rounds=sizes.rounds
)
fewer_pairs = {
    "sliding window": predicted_speedup(seq_len=tokens, window=window),
    "block-sparse": 1 / predicted_share_of_pairs(seq_len=tokens, **pattern),
}
speedup = {}
all_pairs = tokens * (tokens + 1) / 2  # of one head
for way, fewer in ({"full": 1} | fewer_pairs).items():
    # The fastest turns of both; the range is that of single rounds.
    ratios = [full / mine for full, mine in zip(turns["full"], turns[way])]
    pairs_per_second = heads[0] * all_pairs / fewer / min(turns[way])
    faster = min(turns["full"]) / min(turns[way])
    print(
        f"{way:<14} on {tokens:,} tokens: {faster:4.1f}× as fast "
        f"({min(ratios):.1f} to {max(ratios):.1f}), {fewer:4.1f}× fewer pairs; "
        f"{pairs_per_second / 1e9:.2f} billion pairs per second"
    )
    if way in fewer_pairs:
        speedup[way] = faster

# %% [markdown]
# *As fast* answers the guess: the fastest turns of both, and in brackets the lowest and the highest ratio of a round. A window of a sixteenth leaves about an eighth of the pairs. But both patterns are computed in blocks, and a mask hides a part of what is computed. For the sliding window, *fewer pairs* counts all pairs that are computed, hidden ones too. For block-sparse attention it counts those that are read. With its hidden pairs, it computes about as many as the window. The last column divides the counted pairs by the seconds. A pair that is computed takes about as long in all three ways, and in the two patterns a little less. Why less was not measured.
#
# All these patterns are exact for what they read; but the model was trained to read more. What does that cost without further training? Here is the loss on one text of 2,048 tokens, with a window of 512 (sizes of a CPU).

# %%
last_quarter = sizes.reads // 4
variants = {
    "full": None,
    "window": partial(apply_sliding_window, window=last_quarter),
    "window and 4 sinks": partial(apply_sliding_window, window=last_quarter, sinks=4),
    "block-sparse": partial(
        apply_block_sparse, block_size=sizes.reads // 16, local=3, global_blocks=1
    ),
}
read_ids = text[:, : sizes.reads]
price = {}
for which, adapt in variants.items():
    model = load_model(sizes.trained).eval()
    if adapt is not None:
        adapt(model)
    with torch.no_grad():
        price[which] = model(input_ids=read_ids, labels=read_ids).loss.item()
    print(f"{which:<18} loss {price[which]:.3f}")
del model

# %% [markdown]
# **Why not more?** On this text, reading less makes the model worse at once, and four sinks repair most of it. The usual explanation (Xiao et al., 2023): a softmax must add up to one, so a head that needs no token sends its attention to the first ones. The block-sparse pattern has such first tokens, too, in its global block. Without further training no pattern reaches full attention. They are for models that are trained with them. The first Mistral 7B was trained with a window, and Gemma 3 in most of its layers.
#
# **How do I use it?** `sliding_window` in config.json of a model that was trained with it; FlexAttention for other patterns.
#
# **What does it cost?** Further training, before the model is as good as it was.
#
# ### 7. Curriculum: short texts first
#
# **What is going on?** From the first step on, every row has its full length, and attention its full price.
#
# **Guess first.** At equal compute, how many more steps does a curriculum get?
#
# **The idea.** **Most of what a model learns early should need no long context,** and short rows cost less attention. The schedule lengthens the rows while the tokens of a step stay the same.
#
# Here one small model reads source code as single characters. It is trained in two ways: always on rows of full length, and with a curriculum, which has rows of a sixteenth for 40 % of the steps, of a quarter for 30 %, and of full length for the rest. Both get the same compute, three seeds each. The loss on long held-out rows decides.

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
rows = letters["validation"].unfold(0, row, row)
held_out = rows[:: len(rows) // 8][:8]  # spread over many modules
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
# Compare the two lines seed by seed: in the recorded run on a CPU the curriculum ended lower with each of them. But at equal compute the curriculum also takes more steps. How many more depends on how much of a step is attention, the only part that is cheaper in short rows:

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
# **Why not more?** The model that was trained here is narrow: attention is most of its work, so short rows are much cheaper, and the same compute buys many more steps. In a wide model they are only a little cheaper, and there are few additional steps. The curriculum can then gain only if early steps learn as much from short rows as from long ones. Nothing here measures that for a wide model.
#
# **How do I use it?** DeepSpeed `curriculum_learning`, Composer `SeqLengthWarmup`. By default both cut the rows shorter and keep their number, so a short step has fewer tokens there.
#
# **What does it cost?** A schedule to tune.
#
# ### 8. RoPE scaling: beyond the trained length
#
# **What is going on?** Attention itself does not know the order of the tokens. In RoPE, *rotary position embeddings*, each pair of numbers of a query and of a key is turned by an angle: position × frequency. The first pairs turn fast, the last ones slowly. In a text longer than those of the training come angles that the model has never seen. No error is raised there, so `check_length` raises one before the text runs.
#
# **Guess first.** Where does the loss begin to climb: at the trained length, or later?
#
# **The idea.** **Turn the pairs more slowly, so that the angles stay among those that are known.** There are three ways. *linear*: all pairs turn slower. *dynamic* (NTK): a larger base, which is the number whose powers are the frequencies. It slows the slow pairs most, and how large it becomes depends on the length of the text. *yarn*: slow the pairs that made less than one full turn in the training, leave those alone that made more than 32, and slow those between by a part. It also sharpens the softmax a little.

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
    score = (turned * turned_key).sum()
    print(f"query at {far}, key at {near}: score {score:.4f}")
try:
    check_length(load_model(sizes.trained), 16_384)
except ValueError as reason:
    print(reason)

# %% [markdown]
# The score depends on the distance of the two tokens only. A scaling changes the frequencies. YaRN also multiplies queries and keys by a number a little above 1.
#
# Texts that are longer than those of the training take minutes on a CPU. So on a CPU the curves come from a recorded run of the same steps (`python -m benchmarks.gpu --parts rope`, also on two CPU cores). On a GPU they are measured now. The scalings are made for twice the trained length.


# %%
from recipes_lib.report.figure import new_figure
from recipes_lib.report.lines import draw_lines
from recipes_lib.report.records import recorded


def along(kind, tokens, window, texts):
    """The losses along long texts, with this kind of scaling: one list per text."""
    model = apply_flash_attention(load_model(sizes.trained).eval())
    if kind in KINDS:
        apply_rope_scaling(model, kind=kind, factor=2)
    rows = text[:, : texts * tokens].view(texts, 1, tokens)
    return [position_losses(model, row, window=window) for row in rows]


if sizes.stretched is None:
    rope = recorded("rope")
else:
    rope = {"window": sizes.stretched[1], "measured_on": f"measured now on {here.name}"}
    rope["losses"] = {kind: along(kind, *sizes.stretched) for kind in ("none", *KINDS)}
losses = {kind: torch.tensor(each) for kind, each in rope["losses"].items()}
texts, windows = losses["none"].shape
middles = [rope["window"] * (number + 0.5) for number in range(windows)]
figure, (above, below) = new_figure(
    f"SmolLM2-135M beyond its trained length (dashed); texts: {texts}",
    height=5.4,
    source=rope["measured_on"],
    nrows=2,
)
draw_lines(
    above,
    {kind: list(zip(middles, each.mean(0).tolist())) for kind, each in losses.items()},
    ylabel="loss, nats per token",
)
# Texts differ more than the scalings do, so below is the difference on the same text.
changes = {kind: each - losses["none"] for kind, each in losses.items()}
for color, change in zip(LINES, changes.values()):
    lowest, highest = change.amin(0), change.amax(0)
    below.fill_between(middles, lowest, highest, color=color, alpha=0.2, linewidth=0)
draw_lines(
    below,
    {kind: list(zip(middles, change.mean(0).tolist())) for kind, change in changes.items()},
    xlabel="position in the text, tokens",
    ylabel="minus 'none'",
)
for axes in (above, below):
    axes.axvline(8192, color=INK, linestyle="--", linewidth=1)
figure

# %% [markdown]
# The upper picture shows means over the texts; *none* is the model without scaling. It answers the guess. At the dashed line all curves rise together: that is the text, not the position. About 2,000 tokens behind the line, *none* leaves *yarn* and *dynamic*, and its loss climbs fast. The lower picture shows what a scaling changes on the same text: its mean, and a band from the text with the lowest difference to that with the highest. Linear scaling changes every angle. Without further training it costs much over most of the text; only at the very end it is better than no scaling, because there the unscaled model has lost its way. YaRN and the larger base (*dynamic*) stay close to the unscaled model in the trained part, and keep their loss low behind it. [Notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb) shows that *dynamic* leaves a short text alone, and YaRN does not.
#
# **How do I use it?** `rope_parameters` in config.json; vLLM `--hf-overrides` with the same.
#
# **What does it cost?** A little in the trained part; with linear scaling, much.
#
# ### Several GPUs: context parallelism
#
# When one card is not enough, the sequence itself is split: each of N GPUs holds S/N tokens of every text, and keys and values travel around a ring. In each step of the ring a GPU computes with the keys and values that it has, and meanwhile sends them on to its neighbour. If sending takes less time than computing, it costs nothing: it is *hidden*. Computing grows with the square of the tokens per GPU, sending only with their number. So from a certain length on, sending is hidden. The two rates in the next cell are assumptions: put in yours. The formula counts all pairs of two parts, in forward. With a causal mask and the work dealt out evenly a GPU computes half of them, and needs twice as many tokens.

# %%
config = model_of_shape("llama-3.1-8b", layers=1, device="meta").config
attention_rate = 400e12  # operations per second that attention reaches: an assumption
link = 50e9  # bytes per second between two cards: another one
query_width = config.num_attention_heads * config.head_dim
key_width = config.num_key_value_heads * config.head_dim
# computing:                    4 (S/N)² query_width / attention_rate
# sending K and V in 16 bits:   4 (S/N) key_width / link
hidden_from = attention_rate / link * key_width / query_width
print(f"hidden from {hidden_from:,.0f} tokens per GPU on")

# %% [markdown]
# [Notebook 02](../notebooks/02_multi_gpu_training.ipynb) runs this ring on two ranks, and *Ulysses* as well, which exchanges tokens for heads. It counts the bytes that they send, and compares their loss with that of one process.
#
# ## Take this into your code
#
# These lines are not run here, for they need the hub and a GPU:
#
# ```python
# import torch
# from transformers import AutoModelForCausalLM, AutoTokenizer
#
# from recipes_lib.attention.flash import apply_flash_attention
# from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
# from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing, best_group
# from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
#
# name = "Qwen/Qwen3-0.6B"
# text = open("my_text.txt").read()
# ids = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids.cuda()  # [1, S]
# model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).cuda().train()
# apply_flash_attention(model)
# apply_chunked_cross_entropy(model)
# apply_tiled_mlp(model, norms=True)
# apply_nested_checkpointing(model, group=best_group(model.config.num_hidden_layers))
# optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
# model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
# optimizer.step()
# ```
#
# The same with libraries: `TrainingArguments(gradient_checkpointing=True, use_liger_kernel=True)` and a model that is loaded with `attn_implementation="sdpa"` give recipes 1 to 3. For tiled MLPs there is ALST (*Arctic Long Sequence Training*) in ArcticTraining and DeepSpeed. The [cheatsheet](../CHEATSHEET.md) has all switches side by side.
#
# ## What it costs, and when not to use it
#
# | recipe | price | not when |
# |---|---|---|
# | flash attention | sums in another order; a short text gains little time | you want to look at the attention weights; scores are capped (Gemma 2): other kernels do that |
# | chunked cross-entropy | no logits in the output | you need the logits |
# | activation checkpointing | about one more forward pass | activations are not at the peak |
# | tiled MLP | small products; without checkpointing, the MLP once more | no block is checkpointed yet: do that first |
# | nested checkpoints | another forward pass | block inputs are not what fills the memory |
# | sliding window, block-sparse | another model, to be trained that way | far tokens decide |
# | curriculum | a schedule to tune | fine-tuning on one length |
# | RoPE scaling | a little worse in the trained part (linear: much worse) | the texts are not longer than the training's |
#
# **Two recipes that gain less than one expects.** *Flash attention* alone moves the limit little, as the ladder shows, because the other activations and the logits are there as well. The *curriculum* ended lower here, but in a model in which attention is most of the work. By arithmetic, a wide model gets few additional steps.
#
# **What goes together.** The rows of the ladder, in their order: each is measured on top of those above it. **What does not go together.** The optimizer's step in backward does not go with accumulation or clipping, as [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) says. Packed rows hold several documents ([notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb) explains them). A sliding window refuses them; block-sparse attention keeps the documents of a row apart. Tiles refuse selective checkpointing, which keeps some results of a block.
#
# ## Exercises
#
# 1. Predict, then measure: how does the longest sequence change with half the layers? Set `layers` in the sizes and compare.
# 2. Freeze the embedding (`requires_grad_(False)`). Which terms of the equation shrink, and which rows gain?
# 3. Find the group size from which nested checkpoints stop helping. What does the formula say?
#
# ## References
#
# - Dao et al., *FlashAttention*, 2022; Dao, *FlashAttention-2*, 2023
# - Hsu et al., *Liger Kernel*, 2024; Wijmans et al., *Cut Your Losses*, 2024
# - Bekman et al., *Arctic Long Sequence Training*, 2025: tiled MLP and loss, checkpoints on the host
# - Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016: nested checkpoints
# - Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, 2023
# - Beltagy et al., *Longformer*, and Zaheer et al., *Big Bird*, 2020
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
    timed_at=sizes.common,
    loss_error=loss_error,
    slopes=slopes,
    local={"tokens": sizes.long_text, "speedup": speedup, "ideal": fewer_pairs},
    price=price,
    curriculum=reached,
    loss={which: vars(cost) for which, cost in beside.items()},
)
most_error = 1e-4 if here.device == "cpu" else 2e-2
assert loss_error < most_error, "the same loss"
lengths = [row.tokens for row in rows]
assert lengths == sorted(lengths), "each row is longer"
if not fast():  # lengths as short as those of FAST mode say nothing
    assert all(abs(row.prediction_error) < 0.1 for row in rows), "the predictions hold"
    if here.device == "cpu":
        assert slopes["baseline"] > sizes.least_slope, "with all scores: with the square"
        assert slopes["flash attention"] < 1.1, "and without them with the length"
    assert ladder.gain("everything combined") > 10
    assert min(speedup.values()) > sizes.least_speedup, "reading less is faster"
print(f"all checks passed: {ladder.gain('everything combined'):.0f}× as long")
