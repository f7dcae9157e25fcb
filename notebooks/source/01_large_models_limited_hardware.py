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
# # My model does not fit: training large models on limited hardware
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your-username/llm-training-recipes/blob/main/notebooks/01_large_models_limited_hardware.ipynb)
#
# <!-- numbers:headline-01 -->
# > **4,727 MiB → 254 MiB:** one training step of a real pretrained model, from full fine-tuning in fp32 to everything combined, on the same batch: **95% less memory** of tensors. Where all weights train, 16 bits, a compiler and a loss in chunks change it by -37%. Held-out loss in 8 steps, one run each: baseline 3.69 → 2.76; 16 bits, compiled, chunked loss 3.69 → 2.77; everything combined 4.04 → 2.95. Each row was predicted before it ran, from the same step on tensors without data: off by 3.5% at most.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-26.
# <!-- end -->
#
# A training step runs out of memory, and the error does not say what filled it. This notebook trains one small model in many ways. For each way it first predicts the memory, then measures it, then checks that it is still the same training.
#
# | | |
# |---|---|
# | **You will learn** | to say what fills the memory of a training step, and which recipe removes which part of it |
# | **You need** | Python and the basics of PyTorch; no GPU, no login |
# | **Minutes** | ten to run on two CPU cores, forty to read. The outputs below come from a busy machine: read their bytes, and your own times |
# | **Has run on** | two CPU cores. A GPU gets larger sizes, and no GPU has run them yet |
#
# ## The map
#
# | | recipe | makes smaller | file |
# |---|---|---|---|
# | 1 | gradient accumulation | activations, loss | [gradient_accumulation.py](../recipes_lib/training/gradient_accumulation.py) |
# | 2 | activation checkpointing, with a loss in chunks | activations, loss | [activation_checkpointing.py](../recipes_lib/memory/activation_checkpointing.py), [chunked_cross_entropy](../recipes_lib/memory/chunked_cross_entropy/__init__.py) |
# | 3 | activation offloading | activations | [activation_offload](../recipes_lib/memory/activation_offload/__init__.py) |
# | 4 | mixed precision | time, activations | [mixed_precision.py](../recipes_lib/precision/mixed_precision.py) |
# | 5 | compiled blocks | time, activations | [compiled_blocks.py](../recipes_lib/training/compiled_blocks.py) |
# | 6 | optimizer step in backward | gradients | [optimizer_in_backward.py](../recipes_lib/memory/optimizer_in_backward.py) |
# | 7 | optimizer states in 16 or 8 bits | states | [sixteen_bit_adam.py](../recipes_lib/precision/sixteen_bit_adam.py), [eight_bit_adam.py](../recipes_lib/precision/eight_bit_adam.py) |
# | 8 | optimizer states in host memory | states, gradients | [optimizer_offload.py](../recipes_lib/memory/optimizer_offload.py) |
# | 9 | LoRA | gradients, states | [lora.py](../recipes_lib/fine_tuning/lora.py) |
# | 10 | QLoRA | weights too | [qlora.py](../recipes_lib/fine_tuning/qlora.py) |
# | 11 | layer streaming | weights on the device | [layer_streaming.py](../recipes_lib/memory/layer_streaming.py) |
# | 12 | dynamic batch size | the guesswork | [dynamic_batch.py](../recipes_lib/training/dynamic_batch.py) |
#
# The section *What runs out* explains the words of this table.
#
# ## Setup
#
# Where the package is missing, as on Colab, this cell fetches the repository and installs what is lacking. After `make run` or `make lab` it does nothing.

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
import warnings

import torch
from torch.nn import functional as F

from recipes_lib.core.measure.machine import choose_sizes, machine, seed_everything
from recipes_lib.core.measure.memory import keep_freed_memory
from recipes_lib.core.measure.rates import measure_matrix_rates
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape

# transformers 5 renames gradient checkpointing to activation checkpointing, and warns.
warnings.simplefilter("ignore", FutureWarning)
# On Linux, a step on a CPU is slowed by the system, which takes freed memory away
# and fills it with zeros before it gives it back. This asks to keep it.
keep_freed_memory()
rates = measure_matrix_rates()  # operations per second, in about a second
device = machine().device
print(machine())
for dtype, rate in rates.items():
    print(f"matrix products in {dtype}: {rate / 1e12:.2f} TFLOP/s")

# %% [markdown]
# The last two lines say how fast this machine multiplies large matrices in numbers of 32 and of 16 bits; one TFLOP/s is a million million multiplications or additions per second. No step can be faster than its multiplications.
#
# All sizes stand in one cell. A GPU gets a larger model with random weights, because memory and speed do not depend on what the weights are.

# %%
# Rounds of timing; whether rows are compiled; rows of the large model; and the last
# experiment: its model, its steps, its rows per step, pairs of text.
full = dict(rounds=2, compile=True, large_rows=8)
full |= dict(learner="smollm2", steps=8, learner_rows=6, pairs=400, held_out=12)
# Continuous integration checks that the code works, not how fast it is.
brief = dict(rounds=1, compile=False, large_rows=2)
brief |= dict(learner="tiny-smollm2", steps=2, learner_rows=4, pairs=40, held_out=6)
# On a CPU the real SmolLM2-135M. layers=None means all of its 30 blocks.
smollm2 = dict(shape="smollm2-135m", layers=None, pretrained=True, rows=24, tokens=72)
# On a GPU a larger shape, of which plain fp32 training fits.
llama = dict(shape="llama-3.2-1b", pretrained=False, tokens=256)

sizes = choose_sizes(
    cpu=smollm2 | full,
    gpu16=llama | dict(layers=3, rows=8) | full,
    gpu24=llama | dict(layers=6, rows=16) | full,
    gpu80=llama | dict(layers=None, rows=32) | full,
    fast=dict(shape="tiny-smollm2", layers=None, pretrained=False, rows=8, tokens=64)
    | brief,
)
sizes

# %% [markdown]
# ### A real model and real text
#
# A language model reads text as *tokens*: words and parts of words from a fixed vocabulary. At each token it predicts the next one, and the *loss* says how wrong it is. A training step computes the loss (*forward*), computes for each weight how the loss changes with it, its *gradient* (*backward*), and changes the weights a little (the *optimizer*).
#
# The text is Python's own standard library: the question is a function, the answer is its docstring. Only the answer is trained on. In the print below, the part between ⟦ and ⟧ carries no loss.

# %%
from recipes_lib.core.data import batches, load_instructions
from recipes_lib.core.data.chat import decode_with_mask
from recipes_lib.core.model.default_model import model_source, source_note

tokenizer = load_tokenizer()
train = load_instructions(tokenizer, max_tokens=sizes.tokens, limit=sizes.pairs)
held_out = load_instructions(
    tokenizer, split="validation", max_tokens=sizes.tokens, limit=sizes.held_out
)
padding = tokenizer.pad_token_id
gc.freeze()  # to count bytes, Python looks at all objects: not at those of the imports

# One batch for all rows below: [24 rows, 72 tokens] on a CPU.
data = batches(
    train,
    batch_size=sizes.rows,
    length=sizes.tokens,
    pad_token_id=padding,
    device=device,
)
batch = next(data)
print(decode_with_mask(train[1], tokenizer))
print(f"\nSmolLM2 comes from: {model_source()}\n{source_note()}")

# %% [markdown]
# ## The training loop
#
# This is the step that every recipe changes, in plain PyTorch. A loop calls `train_step` for each batch.


# %%
def fresh():
    """The model of this notebook, each time with the same weights."""
    seed_everything(0)
    if sizes.pretrained:
        return load_model("smollm2")
    return model_of_shape(sizes.shape, layers=sizes.layers)


def adamw(model):
    """PyTorch's own AdamW. `fused` updates all weights without temporary tensors."""
    return torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)


def train_step(model, optimizer, rows=batch):
    loss = model(**rows, use_cache=False).loss  # forward
    loss.backward()  # a gradient for each weight
    optimizer.step()  # each weight moves a little
    optimizer.zero_grad()  # the gradients are freed
    return loss.item()


# %% [markdown]
# ## What runs out: one equation
#
# Five things fill the memory of a step.
#
# - **Weights**: the numbers that the model consists of. In fp32, numbers of 32 bits, each takes 4 bytes.
# - **States**: AdamW keeps two averages per weight, of its gradient and of the gradient's square. That is 8 bytes per weight.
# - **Gradients**: one number per weight, again 4 bytes.
# - **Activations**: what forward keeps so that backward can compute gradients. They grow with the number of tokens.
# - **Loss**: the model gives one number, a *logit*, per token and per entry of the vocabulary. The loss needs this table of logits three times: forward makes one, and backward two. In this list the word *loss* stands for these bytes.
#
# So training in fp32 takes **16 bytes per weight**, however short the text is. But the five are not all there at the same moment. The model is a stack of *blocks* that are built alike. Forward goes through them and builds up activations. Backward walks through the blocks in the other direction: in each block it *uses up* activations and *leaves* gradients. Two moments matter, the one when backward begins and the one when it ends:
#
# $$\text{peak} = \text{weights} + \text{states} + \max\begin{cases}\text{activations} + \text{loss} & \text{backward begins}\\ \text{gradients} + \text{embedding copies} & \text{the last gradient arrives}\end{cases}$$
#
# The last term is easily forgotten. SmolLM2 uses one table twice, as the embedding at its input and as the output layer at its end: the table is *tied*. It gets a gradient from both ends. The first one waits while the second one is computed, and their sum is a third tensor. So for a moment there are two more tables than the gradients alone need: the **embedding copies**.
#
# `equation.py` computes these terms from the shapes of the weights. `skeleton` is a model that has shapes and no numbers, and takes no memory.

# %%
from recipes_lib.core.predict import equation

skeleton = model_of_shape(sizes.shape, layers=sizes.layers, device="meta")
tokens = sizes.rows * sizes.tokens
arithmetic = equation.plain_step(skeleton, rows=sizes.rows, length=sizes.tokens)
print(f"{skeleton.num_parameters():,} weights, {tokens:,} tokens\n")
print(arithmetic)

# %% [markdown]
# Check it by hand, with the sizes of a CPU, as all numbers in the text below are. 134,515,008 weights × 4 bytes are 513 MiB; the states take twice that. The table has 49,152 rows of 576 numbers, so two *copies* of it are 216 MiB. The loss takes 1,728 tokens × 49,152 logits × 4 bytes × 3 = 972 MiB. Of the activations, each token leaves 11,136 numbers in a block:
#
# - 3 × 576 at each of its two norms: the input, the input normalised, and the output,
# - 2 × (576 + 192) in attention: queries and the result are 576 numbers wide, keys and values 192,
# - 4 × 1,536 in the MLP, the widest part of a block: gate, its activation, up, and their product.
#
# That is 1,728 tokens × 30 blocks × 11,136 numbers × 4 bytes = 2,202 MiB; the last norm adds 11 more. (*One block* is what recipe 2 computes again. PyTorch's attention never stores its table of tokens × tokens.)
#
# ## Baseline
#
# The results go into a table that grows by one row per recipe: the *ladder*. `ladder.climb` takes a function that returns a model, its optimizer and a step, and calls it twice. The first time, tensors have shapes and no data: the step runs as it is, computes nothing, and every byte that it would take is counted. That is the prediction. The second time it is real: a first step, in which AdamW makes its states, and then one in which every byte of every tensor is counted. The loss in the table is that of this second step.
#
# **Guess first.** The first moment is the peak, says the equation: draw the whole step as a curve. How high is it at its end, when the last gradient arrives?

# %%
from recipes_lib.report.ladders.memory import MemoryLadder
from recipes_lib.report.timeline import timeline_chart

ladder = MemoryLadder(
    "01_large_models_limited_hardware",
    rows=sizes.rows,
    length=sizes.tokens,
    rates=rates,
)


def plain():
    model = fresh()
    return model, adamw(model), train_step


in_32_bits = dict(group="in 32 bits", dtype=torch.float32)
baseline = ladder.climb("baseline", plain, **in_32_bits)

# %%
timeline_chart(
    {"baseline": ladder.timelines["baseline"]},
    predicted={"baseline": ladder.predictions["baseline"].timeline},
    title="The plain step: activations pile up, then gradients take their place",
)

# %% [markdown]
# **The answer.** 2,269 MiB, not half of the 4,727 in the middle: 1,539 of weights and states, 513 of gradients, 216 of embedding copies. Weights and states are there all the time. Forward adds activations block by block, and at its end comes the loss. One of its three tables is counted among the activations, because forward makes it; the other two are *other*, as the embedding copies are. Backward frees the activations of a block and leaves its gradients, up to a second, lower tower at its end. The dashed line is the prediction. (A GPU shows more in use: its context, and memory that PyTorch keeps for later.)
#
# The figure is also the plan. **Part A** attacks the first tower, which grows with the tokens. **Part B** attacks the second one, and the ground on which both stand: weights and states. The prints name them: *backward begins* or *forward ends* is the first, *backward ends* the second.
#
# The code that predicts is also the code that measures. The equation knows nothing of it, and is an independent witness. It leaves out what is small, such as one number per token and head in attention:

# %%
peaks = {
    "by arithmetic": arithmetic.peak,
    "without data": baseline.predicted_bytes,
    "measured": baseline.peak_bytes,
}
for name, peak in peaks.items():
    print(f"{name:<15}{peak:>13,} bytes  {peak / baseline.peak_bytes - 1:+.3%}")

# %% [markdown]
# ### Something small to try ideas on
#
# Each recipe begins with its idea in a few lines. They run on a model with two narrow blocks, and their gradients are compared with those of the plain step and of the library.

# %%
import copy
import tempfile
from functools import partial

from recipes_lib.report.show import show

small = model_of_shape("tiny-llama", device="cpu").train()
words = torch.randint(0, small.config.vocab_size, (4, 12))  # 4 rows of 12 tokens
# A label of -100 says: no loss here. So the rows have answers of unequal lengths.
no_answer = torch.rand(words.shape) < 0.5
small_batch = {"input_ids": words, "labels": words.masked_fill(no_answer, -100)}


def gradients_after(backward, model=small):
    """Call `backward()`, and return the gradients that it left as one vector."""
    model.zero_grad()
    backward()
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found)


def gradients_of(model):
    def backward():
        model(**small_batch, use_cache=False).loss.backward()

    return gradients_after(backward, model)


right = gradients_of(small)
print(f"{right.numel():,} gradients")

# %% [markdown]
# ## Part A: what grows with the tokens
#
# ### 1. Gradient accumulation
#
# **What happens.** Split the batch into micro-batches, run them one after the other, add up their gradients, and update the weights once. Only one micro-batch has activations and a loss at a time.
#
# ```text
# plain        forward [24 rows]  backward                      step
# accumulated  forward [6]  backward, forward [6]  backward, …  step
#                               gradients stay and add up
# ```
#
# **Guess first.** With four micro-batches, activations and loss shrink to a quarter. But the gradients of the first micro-batches wait while the next forward runs. How far does the peak fall?
#
# **The idea** is a loop, because autograd adds to `.grad` by itself. One division needs care: a model returns the *mean* loss over the answer tokens that it sees, and in the whole batch every token weighs the same. transformers' models divide by `num_items_in_batch`, if they get it.


# %%
def parts_of(rows, count):
    """The batch in micro-batches."""
    split = {name: tensor.chunk(count) for name, tensor in rows.items()}
    return [dict(zip(split, part)) for part in zip(*split.values())]


def accumulate(model, rows, count):
    # The first label of a row has nothing before it that could predict it.
    targets = (rows["labels"][:, 1:] != -100).sum()
    total = 0.0
    for part in parts_of(rows, count):
        loss = model(**part, use_cache=False, num_items_in_batch=targets).loss
        loss.backward()  # adds to .grad
        total += loss.item()
    return total


by_hand = gradients_after(partial(accumulate, small, small_batch, 4))
assert torch.allclose(by_hand, right, atol=1e-6)
print("in four parts and at once: the same gradients")

# %% [markdown]
# A popular way to write this loop divides by the number of micro-batches. It runs, and it trains something else: a token of a short answer weighs more than one of a long answer. How far off is its gradient on four rows of our batch?


# %%
def error_of_the_popular_way():
    # Small on every machine. Both gradients are there at once, and the baseline waits.
    model = load_model(sizes.learner)
    rows = 4  # of the batch
    few = {name: tensor[:rows] for name, tensor in batch.items()}

    def together():
        model(**few, use_cache=False).loss.backward()

    def mean_of_means():  # one row per micro-batch
        for row in range(rows):
            one = {name: tensor[row : row + 1] for name, tensor in few.items()}
            (model(**one, use_cache=False).loss / rows).backward()

    wanted = gradients_after(together, model)
    difference = gradients_after(mean_of_means, model) - wanted
    return (difference.norm() / wanted.norm()).item()


naive_error = error_of_the_popular_way()
print(f"the popular way: the gradient is off by {naive_error:.0%} of its length")


# %%
def accumulated_step(model, optimizer):
    loss = accumulate(model, batch, 4)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def accumulated():
    model = fresh()
    return model, adamw(model), accumulated_step


ladder.climb("gradient accumulation", accumulated, **in_32_bits)

# %% [markdown]
# **The answer.** By 40 %, to 2,850 MiB. Activations and loss are a quarter, and the gradients stand beside them: 1,539 + 513 + 797.
#
# **Tomorrow**: `TrainingArguments(gradient_accumulation_steps=4)`, with the batch per device divided by four; the Trainer passes `num_items_in_batch`. For models whose loss does not know this number there is [`accumulate_gradients`](../recipes_lib/training/gradient_accumulation.py). **Not when** the batch fits.
#
# ### 2. Activation checkpointing
#
# **What happens.** Backward visits one block at a time, so only one block's activations need to exist. Keep what went *into* each block, throw away the rest, and compute it again when backward arrives.
#
# ```text
# plain         x0 [a0]  x1 [a1]  x2 [a2] → loss     all [a] are alive
# checkpointed  x0       x1       x2      → loss     [a2] again, used, freed; then [a1]; then [a0]
# ```
#
# **Guess first.** The model has 30 blocks. The input of a block is 1,728 tokens × 576 numbers × 4 bytes = 3.8 MiB. What is left of the 2,202 MiB?
#
# **The idea.** Autograd lets us write a function with a `forward` and a `backward` of our own. This one keeps only the input in `forward`, and in `backward` it runs the block again.

# %%
from recipes_lib.memory.activation_checkpointing import (
    InputOnly,
    apply_activation_checkpointing,
    checkpointed_by_hand,
)

show(checkpointed_by_hand, InputOnly)

# %% [markdown]
# To try it, we call the blocks of the small model ourselves. Each of them also needs the *rotary embeddings*, which tell it the positions of the tokens.


# %%
def checkpointed_backward():
    hidden = small.model.embed_tokens(words)  # [B, S, D]
    rotary = small.model.rotary_emb(hidden, torch.arange(words.shape[1])[None])
    blocks = [partial(b, position_embeddings=rotary) for b in small.model.layers]
    hidden = checkpointed_by_hand(blocks, hidden)
    logits = small.lm_head(small.model.norm(hidden))  # [B, S, V]
    # Token t + 1 is predicted from token t.
    targets = small_batch["labels"][:, 1:].flatten()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), targets).backward()


assert torch.allclose(gradients_after(checkpointed_backward), right, atol=1e-6)

# The line for tomorrow, and ours.
tomorrow = copy.deepcopy(small)
tomorrow.gradient_checkpointing_enable()
assert torch.equal(gradients_of(tomorrow), right)
ours = apply_activation_checkpointing(copy.deepcopy(small))
assert torch.equal(gradients_of(ours), right)
print("by hand: equal to rounding; both libraries: equal to the last bit")


# %%
def checkpointed():
    model = fresh()
    model.gradient_checkpointing_enable()
    return model, adamw(model), train_step


ladder.climb("activation checkpointing", checkpointed, **in_32_bits)

# %% [markdown]
# **The answer.** 125 MiB: thirty inputs, and what is outside of the blocks. The peak falls by 44 %, and what is left of the tower is the loss, 972 MiB; the print counts a third of it as activations.
#
# **Tomorrow**: the line above, or `TrainingArguments(gradient_checkpointing=True)`. Ours adds checkpoints in every second block and *selective* ones, which keep the matrix products. **Not when** activations are not at the peak: it costs one more forward, a third more multiplications.
#
# **The loss, too.** Its table need not exist at once: the logits of a few hundred tokens give their part of the loss and of the gradients, and are freed. **Guess first:** 972 of 2,637 MiB are the loss. Does the peak fall by most of them?
#
# [Notebook 04](../notebooks/04_training_long_sequences.ipynb) builds this *loss in chunks* by hand. PyTorch 2.13 has a function for it, and `apply_chunked_cross_entropy` puts ours into a model of transformers, so that `model(...).loss` stays as it is.

# %%
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy

in_chunks = apply_chunked_cross_entropy(copy.deepcopy(small))
assert torch.allclose(gradients_of(in_chunks), right, atol=1e-6)

if hasattr(F, "linear_cross_entropy"):
    hidden = small.model(words).last_hidden_state[:, :-1].flatten(0, 1)  # [B (S-1), D]
    targets = small_batch["labels"][:, 1:].flatten()
    loss = F.linear_cross_entropy(hidden, small.lm_head.weight, targets)
    assert torch.allclose(loss, small(**small_batch).loss, atol=1e-5)
    print("PyTorch's function gives the same loss")


def without_first_tower(model):
    """Recipe 2: checkpoints around the blocks, and a loss in chunks."""
    model.gradient_checkpointing_enable()
    return apply_chunked_cross_entropy(model)


def checkpointed_in_chunks():
    model = without_first_tower(fresh())
    return model, adamw(model), train_step


ladder.climb("checkpointing, loss in chunks", checkpointed_in_chunks, **in_32_bits)

# %% [markdown]
# **The answer.** By 368 MiB only. Now the first tower is lower than the second, and no recipe of Part A gets below its 2,269 MiB. **Tomorrow**: `use_liger_kernel=True` on a GPU, or the line above. **Not when** you need the logits: the model does not return them.
#
# ### 3. Activation offloading
#
# **What happens.** Keep every activation, but somewhere else, and fetch it back in time. On a GPU that place is host memory. On a CPU, host memory *is* the device, so only the disk is left.
#
# **Guess first.** Activations leave, and nothing is computed twice. Will the peak be lower than with checkpointing alone, 2,637 MiB?
#
# **The idea.** Autograd lets us decide what it keeps: it calls `pack` when it saves a tensor, and `unpack` when it needs the tensor again.

# %%
from recipes_lib.memory.activation_offload import (
    offload_activations,
    offloaded_by_hand,
)

show(offloaded_by_hand)

with tempfile.TemporaryDirectory() as folder, offloaded_by_hand(Path(folder)):
    from_the_disk = gradients_of(small)
assert torch.allclose(from_the_disk, right, atol=1e-6)

# PyTorch's own: from the GPU into host memory, each tensor when it is saved.
with torch.autograd.graph.save_on_cpu(pin_memory=False):
    assert torch.equal(gradients_of(small), right)
print("from the disk and back: the same gradients")

# %%
elsewhere = "host" if device == "cuda" else "disk"


def offloaded_step(model, optimizer):
    with offload_activations(model, to=elsewhere):  # in place of save_on_cpu
        return train_step(model, optimizer)


def offloaded():
    model = fresh()
    return model, adamw(model), offloaded_step


ladder.climb("activation offloading", offloaded, **in_32_bits)

# %% [markdown]
# **The answer.** By 39 MiB, to 2,598. Both remove the activations, and neither the loss.
#
# **Tomorrow**: `save_on_cpu` as above, or `gradient_checkpointing_kwargs={"offload": True}` in the Trainer, which sends away only the inputs of checkpointed blocks. Ours copies while the GPU computes, leaves the weights where they are, and can use the disk. **Not when** checkpointing is enough: it is simpler.
#
# ### The rows take turns on the clock
#
# Bytes are the same in every run, and times are not: another program on the machine changes them by more than many recipes do. So the models were kept, and now they take *turns*. What disturbs a turn can only make it longer, so the fastest turn of each row counts. In brackets are the smallest and the largest ratio of a single round: where two brackets overlap, this run does not say which row is faster.

# %%
ladder.take_turns(rounds=sizes.rounds)
ladder

# %% [markdown]
# *Of limit* is the share of the limit: the time that the multiplications of the plain step take at the rate of the setup, in the same precision, as a part of the time that the step took.


# %%
def price(*names, after="baseline"):
    """What rows save and cost beside another one."""
    other = ladder[after]
    for name in names:
        row = ladder[name]
        memory = row.peak_bytes / other.peak_bytes - 1
        time = row.ratio / other.ratio
        print(f"{name}: {memory:+.0%} memory, {time:.2f}× the time of {after}")


price(
    "gradient accumulation",
    "activation checkpointing",
    "checkpointing, loss in chunks",
    "activation offloading",
)

# %% [markdown]
# Three ways to about half of the memory. Accumulation computes nothing twice, checkpointing also works where a single row is too large, and offloading pays with traffic. On a CPU with free memory the system keeps the files in memory; a real disk would be slower.
#
# ## Faster: 16 bits and a compiler
#
# ### 4. Mixed precision
#
# **What happens.** Multiply in 16 bits, where the units for it are faster: the setup has measured both rates. The weights stay in fp32, because an update is often too small for 16 bits.
#
# ```text
# weights, states, gradients     fp32      small updates survive
# x16 = x to bf16, W16 = W to bf16         y = x16 · W16ᵀ on the fast units
# norms, softmax, loss           fp32      sums over many numbers
# ```
#
# **Guess first.** Most activations take half the bytes. Does the peak fall by half of them?
#
# **The idea.** Both factors of a product are converted to 16 bits. PyTorch's `autocast` does the same.

# %%
from recipes_lib.precision.mixed_precision import linear_by_hand, mixed_precision

show(linear_by_hand)

x, weight = torch.randn(5, 64), torch.randn(128, 64)
with torch.autocast("cpu", torch.bfloat16):
    automatic = F.linear(x, weight)
assert torch.equal(automatic, linear_by_hand(x, weight, dtype=torch.bfloat16))
difference = (automatic - x @ weight.T).abs().max()
print(f"equal to the last bit, and {difference:.2f} from fp32 at most")

# %% [markdown]
# bf16 has the range of fp32 and few digits. fp16, the only fast one on the T4 of a free Colab, has a small range: small gradients become zero. There PyTorch's `GradScaler` multiplies the loss by a large number, and divides the gradients by it before the update. `mixed_precision()` chooses what is fastest on this machine, and does that where it is needed.

# %%
precision = mixed_precision()
native = precision.dtype != torch.float32
in_16_bits = dict(group="in 16 bits, as far as native", dtype=precision.dtype)
print(precision)


def step_in_16_bits():
    """The training step with two more lines, and a loss scale of its own."""
    precision = mixed_precision()

    def step(model, optimizer, rows=batch):
        # Without the cache, the 16-bit copy of a weight goes when nothing needs it.
        with torch.autocast(device, precision.dtype, native, cache_enabled=False):
            loss = model(**rows, use_cache=False).loss
        precision.backward(loss)  # loss.backward(), in fp16 of the scaled loss
        precision.step(optimizer)  # optimizer.step(), in fp16 after the division
        optimizer.zero_grad()
        return loss.item()

    return step


def mixed():
    model = fresh()
    return model, adamw(model), step_in_16_bits()


ladder.climb("mixed precision", mixed, **in_16_bits)

# %% [markdown]
# **The answer.** No. Half of the blocks' activations are 1,101 MiB, and 448 are gone: norms and loss stay in fp32, and forward keeps 257 MiB of 16-bit weights for backward. The gain is time, see below.
#
# **Tomorrow**: `TrainingArguments(bf16=True)`, or `fp16=True` on a T4. **Not when** 16 bits are not native: a CPU that emulates them is much slower. It costs digits; whether it learns as well is the question of the last experiment.
#
# ### 5. Compiled blocks
#
# **What happens.** Between two products a block runs dozens of small operators: norms, rotary positions, casts, the activation function. Each is a program of its own, a *kernel*, which reads its input from memory and writes its output back. A compiler makes one kernel of them.
#
# ```text
# eager      x → pow → mean → add → rsqrt → mul → mul → [product] → …
# compiled   x →             one kernel              → [product] → …
# ```
#
# **Guess first.** Compiling takes seconds. After how many steps are they earned?
#
# **The idea** is one line per block. All blocks do the same with other weights, so one is compiled, and the others use its code.

# %%
from recipes_lib.training.compiled_blocks import (
    apply_compiled_blocks,
    break_even_steps,
    compile_seconds,
    compiled_by_hand,
)

show(compiled_by_hand)

try:
    ours = apply_compiled_blocks(copy.deepcopy(small))
    can_compile = True
except ValueError as reason:  # a CPU without a C++ compiler
    print(reason)
    can_compile = False

if can_compile:
    tomorrow = compiled_by_hand(copy.deepcopy(small))
    assert torch.allclose(gradients_of(tomorrow), right, atol=1e-6)
    assert torch.allclose(gradients_of(ours), right, atol=1e-6)
    print("compiled gradients: equal up to rounding, for sums run in another order")
can_compile = can_compile and sizes.compile  # in the rows below


def compiled_if_possible(model):
    return apply_compiled_blocks(model) if can_compile else model


# %%
def compiled():
    model = compiled_if_possible(fresh())
    return model, adamw(model), step_in_16_bits()


compiled_row = "mixed precision, compiled"
before = compile_seconds()
ladder.climb(compiled_row, compiled, **in_16_bits | {"after": "mixed precision"})
compiling = compile_seconds() - before
print(f"{compiling:.0f} seconds of compiling")

# %% [markdown]
# A compiled block also keeps less for backward: what is cheap is computed again, inside the same kernel. This is the compiler's choice, so the prediction asks the compiler about one block.

# %%
ladder.take_turns(rounds=sizes.rounds)
price("mixed precision", compiled_row)
price(compiled_row, after="mixed precision")
earned = break_even_steps(
    compile_seconds=compiling,
    plain_step=ladder["mixed precision"].seconds,
    compiled_step=ladder[compiled_row].seconds,
)
print(f"{compiling:.0f} s of compiling are earned after {earned} steps")

# %% [markdown]
# **The answer** is the last line; the compiler's cache of an earlier run makes it smaller. **Tomorrow**: `block.compile()` for each block, before checkpointing; `TrainingArguments(torch_compile=True)` compiles the whole model as one graph, which takes longer. Ours says in one sentence why a model cannot be compiled, instead of running it slowly. **Not when** batches change their shape all the time: each new one may be compiled again.

# %% [markdown]
# ## Part B: what every weight costs
#
# From here on the step has 16 bits, checkpoints and a loss in chunks. The first tower is out of the way, and each recipe attacks the second one or the ground.

# %%
lean_row = "16 bits, checkpointing, loss in chunks"
on_lean = dict(
    group="on top of 16 bits, checkpointing, loss in chunks",
    after=lean_row,
    dtype=precision.dtype,
)


def lean():
    model = without_first_tower(fresh())
    return model, adamw(model), step_in_16_bits()


ladder.climb(lean_row, lean, **on_lean | {"after": "baseline"})

# %% [markdown]
# 2,269 MiB again: at the end of backward all that is there has 32 bits, with autocast or without.
#
# ### 6. Optimizer step in backward
#
# **What happens.** AdamW needs nothing but the gradient of the weight that it updates. So update each weight the moment its gradient is complete, and free the gradient at once.
#
# ```text
# plain   backward: g30 … g2 g1 all alive   →   step: update 30 … 2, 1
# here    backward: g30 → update 30, free;  …  ; g1 → update 1, free
# ```
#
# **Guess first.** If each gradient is freed at once, how many bytes of the second tower are left? Think of the tied table.
#
# **The idea**, and the real call in it: one optimizer per weight, and a hook that autograd calls when a gradient is complete.

# %%
from recipes_lib.memory.optimizer_in_backward import (
    apply_optimizer_in_backward,
    one_optimizer_per_parameter,
)

show(one_optimizer_per_parameter)


# %%
def weights_after_a_step(prepare):
    """The weights of a copy of the small model after one update, as one vector."""
    model = copy.deepcopy(small)
    step = prepare(model)
    model(**small_batch, use_cache=False).loss.backward()
    step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def usual(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3).step


def in_hooks(model):
    one_optimizer_per_parameter(model, torch.optim.AdamW, lr=1e-3)
    return lambda: None  # the step has happened already


def as_in_library(model):
    return apply_optimizer_in_backward(model, lr=1e-3).step


expected = weights_after_a_step(usual)
assert torch.equal(weights_after_a_step(in_hooks), expected)
assert torch.equal(weights_after_a_step(as_in_library), expected)
print("the same weights after the step, to the last bit")


# %%
def stepping_in_backward():
    model = without_first_tower(fresh())
    optimizer = apply_optimizer_in_backward(model, lr=2e-5, fused=True)
    # A loss scale needs all gradients before the step: on a T4 this row is in fp32.
    scaled = precision.dtype == torch.float16
    return model, optimizer, train_step if scaled else step_in_16_bits()


ladder.climb("step in backward", stepping_in_backward, **on_lean)

# %% [markdown]
# **The answer.** Of 729 MiB three tables, 324: the gradient of the tied table comes in two parts, and the first waits until the second one arrives. So the second tower is 1,863 MiB, and the end of forward is higher now, 1,907: there the loss in chunks has made the gradients of the output table and of what it reads.
#
# **Tomorrow**: the hook above; torchtune calls it `optimizer_in_bwd`. Ours adds a learning-rate schedule, a state dict, and refuses what would be silently wrong. **Not when** you need accumulation, clipping by the global norm or a loss scale: they read all gradients, and PyTorch raises no error.
#
# ### 7. Optimizer states in 16 or 8 bits
#
# **What happens.** AdamW's two averages have more digits than they need. Store them in fewer bits, and compute each update in fp32 as before.
#
# ```text
# per weight    weight  gradient  two averages
# fp32            4        4          8         16 bytes
# 16 bits         4        4          4         12 bytes
# 8 bits          4        4          2         10 bytes
# ```
#
# **Guess first.** The averages are rounded after every step. The second one is multiplied by 0.999 in a step, and bf16 has two to three digits. What happens to an average that should fall?

# %%
from recipes_lib.precision._adam import random_bits, stochastic_round

nearest = torch.ones(10_000, dtype=torch.bfloat16)
stochastic = torch.ones(10_000, dtype=torch.bfloat16)
generator = torch.Generator().manual_seed(0)
for _ in range(1_000):  # a thousand steps without any gradient
    nearest = (0.999 * nearest.float()).to(torch.bfloat16)
    bits = random_bits(10_000, generator=generator)
    stochastic = stochastic_round(0.999 * stochastic.float(), bits)

print(f"exact           {0.999**1_000:.3f}")
print(f"to nearest      {nearest.float().mean():.3f}")
print(f"stochastically  {stochastic.float().mean():.3f}, the mean of 10,000")

# %% [markdown]
# **The answer.** Rounded to nearest, it never falls. Updates are divided by its root, so they stay too small, and no error says so. *Stochastic rounding* goes to one of the two neighbours at random, to the nearer one more often, and is right on average. Then 16 bits suffice.
#
# One byte suffices as well. It has 256 values, so each average becomes a *code*: the number of an entry in a table of 256 values, close together near zero and far apart near one. 256 neighbours share one scale. A step decodes each group of 256, updates in fp32, and encodes it again.

# %%
from recipes_lib.precision.eight_bit_adam import (
    decode,
    eight_bit_adamw,
    encode,
)
from recipes_lib.precision.sixteen_bit_adam import sixteen_bit_adamw

show(encode, decode)

# %% [markdown]
# Ten steps on the same gradients, with PyTorch's AdamW, with ours in 16 and in 8 bits, and with the one of bitsandbytes:

# %%
import bitsandbytes

optimizers = {
    "fp32": partial(torch.optim.AdamW, lr=1e-3),
    "16 bits": partial(sixteen_bit_adamw, lr=1e-3),
    "8 bits": partial(eight_bit_adamw, lr=1e-3),
    "8 bits, bitsandbytes": partial(bitsandbytes.optim.AdamW8bit, lr=1e-3),
}
start = torch.randn(65_536, device=device)
gradients = torch.randn(10, 65_536, device=device)
moved = {}
for name, optimizer_of in optimizers.items():
    weight = torch.nn.Parameter(start.clone())
    optimizer = optimizer_of([weight])
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    moved[name] = weight.detach() - start
    error = (moved[name] - moved["fp32"]).norm() / moved["fp32"].norm()
    print(f"{name:<21} the ten updates differ by {error:.1%}")


# %%
def with_16_bit_states():
    model = without_first_tower(fresh())
    return model, sixteen_bit_adamw(model, lr=2e-5), step_in_16_bits()


def with_8_bit_states():
    model = without_first_tower(fresh())
    return model, eight_bit_adamw(model, lr=2e-5), step_in_16_bits()


ladder.climb("16-bit AdamW states", with_16_bit_states, **on_lean)
ladder.climb("8-bit AdamW", with_8_bit_states, **on_lean)

# %% [markdown]
# The losses in the rows are those of fp32 states, because a first update begins with averages of zero: the ten steps above show the rounding. States fall from 1,026 to 513 and to 422 MiB, and not to 257: those of the embedding keep 32 bits, as the authors of the method advise. The embedding is a fifth of this model and a small part of a large one.
#
# **Tomorrow**: `TrainingArguments(optim="adamw_8bit")`; torchtitan's `fused_opt_states_bf16`. bitsandbytes and ours store the same codes; ours also works on sharded weights. **Not when** the states are small, as with LoRA.
#
# ### 8. Optimizer states in host memory
#
# **What happens.** The states are needed for a short moment per step. On a GPU they can wait in host memory, and the update itself can run there. The host also keeps an fp32 copy of each weight, its *master*.
#
# ```text
# GPU     backward: g30 … g2 … g1           next forward
# link           g30 down … g2 down, w30 up … w1 up
# host                 AdamW 30 | AdamW 29 | … | AdamW 1
# ```
#
# By hand, without the overlap:

# %%
from recipes_lib.memory.optimizer_offload import offload_optimizer, step_on_the_host

show(step_on_the_host)


def with_states_on_the_host():
    model = without_first_tower(fresh())
    return model, offload_optimizer(model, lr=2e-5), train_step


on_the_host = on_lean | {"dtype": torch.float32}
try:
    ladder.climb("states on the host", with_states_on_the_host, **on_the_host)
except ValueError as reason:
    print(reason)

# %% [markdown]
# On a CPU there is nowhere to move them to. On a GPU, states and most gradients leave the device; for a model of 8 billion weights the host then needs 136 GiB, says the doctor below. **Tomorrow**: torchao's `CPUOffloadOptimizer`, DeepSpeed's `offload_optimizer`, or FSDP2's `CPUOffloadPolicy`. **Not when** 8 bits are enough.
#
# ### 9. LoRA
#
# **What happens.** Do not train the weights at all. Freeze them, and put a small correction beside each linear layer: two thin matrices `A` and `B`, whose product has the shape of the weight and a low *rank*. Only they get gradients and states. They are called the *adapter* of the layer.
#
# ```text
# y = x Wᵀ  +  (alpha / r) · (x Aᵀ) Bᵀ        W [576, 576] is frozen, A [16, 576] and B [576, 16] train
# ```
#
# **Guess first.** In the drawing `W` has 331,776 numbers, `A` and `B` have 18,432 together. What is left of the 2,269 MiB?
#
# **The idea.** Beside the wide product there are two narrow ones.

# %%
from peft import LoraConfig, get_peft_model

from recipes_lib.fine_tuning.lora import plain_lora

show(plain_lora)


def adapters():
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")


adapted = get_peft_model(copy.deepcopy(small), adapters())
layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
torch.nn.init.normal_(b)  # B starts at zero: an untrained adapter changes nothing
x = torch.randn(2, 5, layer.in_features)
by_hand = plain_lora(x, layer.base_layer.weight, a, b, alpha=32)
assert torch.allclose(layer(x), by_hand, atol=1e-4)
print("one adapted layer by hand and by peft: equal")


# %%
def with_lora():
    model = get_peft_model(fresh(), adapters())
    model = without_first_tower(model)
    return model, adamw(model), step_in_16_bits()


ladder.climb("LoRA", with_lora, **on_lean)

# %% [markdown]
# **The answer.** 802 MiB: 532 of weights and adapters, 37 of states; the rest are activations and loss. Gradients and embedding copies are gone.
#
# **Tomorrow**: the two lines above; here the library does it all. Make a new `LoraConfig` for each model: peft writes the names of the layers that it has found into it, and on a deeper model the same object would adapt the first blocks alone. [`apply_lora`](../recipes_lib/fine_tuning/lora.py) makes its own, and checks that each adapter gets a gradient. **Not when** the model should learn much that is new. The loss in the row is higher, because it is taken after one update, which moves an adapter by far less than a whole model; [notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb) compares what both learn.
#
# ### 10. QLoRA
#
# **What happens.** The frozen weights are only read, so they can be stored with few digits. QLoRA keeps each one as one of 16 levels: four bits. 64 neighbours share a scale. Each product unpacks its layer for a moment and then frees it.
#
# ```text
# y = x · unpack(W)ᵀ  +  (alpha / r) · (x Aᵀ) Bᵀ        W: 0.52 bytes per weight instead of 4
# ```
#
# **Guess first.** The weights of the blocks take an eighth of the bytes, and the table of the embedding stays. How many MiB of weights are left of 532?
#
# **The idea.** Most weights are close to zero, about as in a normal distribution. So the 16 levels are the quantiles of a normal distribution, and each weight takes the nearest level.

# %%
from recipes_lib.fine_tuning.qlora import (
    apply_qlora,
    check_gradient_flow,
    nf4_layer,
    nf4_levels,
    plain_nf4,
)

show(nf4_levels, plain_nf4)

linear = torch.nn.Linear(128, 96, bias=False)
by_hand = plain_nf4(linear.weight.detach())
packed = nf4_layer(linear, double_quant=False, compute_dtype=torch.float32)
unpacked = packed(torch.eye(128)).T  # a product with the identity gives the weights
close = torch.isclose(by_hand, unpacked, atol=1e-5).float().mean()
error = (by_hand - linear.weight).norm() / linear.weight.norm()
print(f"{close:.1%} of the weights equal those of bitsandbytes")
print(f"the rounding changes the weights by {error:.0%}")

# %% [markdown]
# The lines for tomorrow, on the small model in a folder. Any name of the hub can stand in its place.

# %%
from peft import prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

four_bits = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
with tempfile.TemporaryDirectory() as folder:
    small.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=four_bits, device_map=device
    )
loaded = prepare_model_for_kbit_training(loaded)  # norms in fp32, checkpointing on
loaded = get_peft_model(loaded, adapters())
print(loaded.base_model.model.model.layers[0].mlp.up_proj.base_layer)
del loaded


# %%
def with_qlora():
    model = apply_qlora(fresh(), rank=16, alpha=32)
    model = without_first_tower(model)
    check_gradient_flow(model, batch)
    return model, adamw(model), step_in_16_bits()


ladder.climb("QLoRA", with_qlora, **on_lean)

# %% [markdown]
# **The answer.** 179 MiB: 108 of them are the embedding in fp32, 51 the packed blocks.
#
# **Tomorrow**: the lines above. Ours rounds a model that is in memory already, and closes a silent trap: on CPUs with AVX512-BF16, one forward in evaluation mode repacks the weights for a kernel without a backward. From then on no gradient reaches the lower layers, and nothing says so. `check_gradient_flow` refuses to train then. **Not when** the 16-bit weights fit: rounding costs quality, and each product unpacks its weights again.
#
# ### 11. Layer streaming
#
# **What happens.** A frozen weight is only read, and only while its block is computed. So it can wait elsewhere: a GPU's in host memory, a CPU's on the disk. While one block is computed, the next one is on its way. The adapters, which train, stay.
#
# ```text
# host or disk   w0 w1 w2 … w29          all the time
# device         w0, then w1 …           forward;  w29, then w28 … in backward
# ```
#
# **Guess first.** The packed weights of 30 blocks leave, and two blocks are here at a time. Does the peak of QLoRA fall by most of it, or by little?
#
# **The idea.** A checkpoint around each block, which computes it once more in backward, and a block that asks for its weights whenever it runs.

# %%
from recipes_lib.memory.layer_streaming import apply_layer_streaming, streamed_by_hand

show(streamed_by_hand)


# %%
def with_streaming():
    model = apply_qlora(fresh(), rank=16, alpha=32)
    model = apply_chunked_cross_entropy(model)
    model = apply_layer_streaming(model, to=elsewhere)  # has checkpoints of its own
    return model, adamw(model), step_in_16_bits()


ladder.climb("QLoRA, streamed", with_streaming, **on_lean | {"after": "QLoRA"})

# %% [markdown]
# **The answer.** By 51 MiB of 450: the embedding stays, and here it is larger than all packed blocks. (The inputs of its own checkpoints count as *other*.)
#
# **Tomorrow**: DeepSpeed's ZeRO-3 with `offload_param` does it for weights that train as well; for a frozen base in four bits we know of no flag, so it is ours. **Not when** the weights fit. Each of them crosses the link twice a step. That is hidden as long as a block takes longer to compute than the next one to come, so take many tokens per step.

# %%
ladder.take_turns(rounds=sizes.rounds)
price(
    "step in backward",
    "16-bit AdamW states",
    "8-bit AdamW",
    "LoRA",
    "QLoRA",
    "QLoRA, streamed",
    after=lean_row,
)

# %% [markdown]
# On a CPU the update with states in 8 bits takes long. On a GPU it is one kernel.
#
# ### 12. Dynamic batch size
#
# If you do not know what fits, try it. When memory runs out, halve the micro-batches and double their number: the gradient stays that of the same batch. Below, a limit stands in for a smaller device: 70 % of what QLoRA takes with checkpoints and a plain loss. The step without data knows how many micro-batches that needs; the search begins with one.

# %%
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.predict import predict
from recipes_lib.training.dynamic_batch import (
    fit_micro_batches,
    predicted_micro_batches,
)
from recipes_lib.training.gradient_accumulation import accumulate_gradients


def small_model():
    model = apply_qlora(fresh(), rank=16, alpha=32)
    return apply_activation_checkpointing(model)


def gradient(model, micro_batches):
    return accumulate_gradients(model, batch, micro_batches=micro_batches)


def peak_in_parts(micro_batches):
    """Bytes of one gradient in so many micro-batches; no optimizer takes part."""

    def step(model, optimizer):
        gradient(model, micro_batches)

    return predict(lambda: (small_model(), None, step)).peak


limit = int(0.7 * peak_in_parts(1))
expected = predicted_micro_batches(
    peak_in_parts, batch_size=sizes.rows, limit_bytes=limit
)


def fit():
    model = small_model()
    with PeakMemory(limit_bytes=limit):
        step = partial(gradient, model)
        return fit_micro_batches(step, model=model, batch_size=sizes.rows)


fitted = fit()
print(f"limit {limit / 2**20:,.0f} MiB, expected {expected} micro-batches")
for attempt in fitted.attempts:
    print(attempt)

# %% [markdown]
# The Trainer's `auto_find_batch_size=True` starts again with a smaller batch and does not add accumulation, so it trains something else.
#
# ## Everything combined
#
# **For time**: the step in 16 bits, in compiled blocks, with a loss in chunks. All weights train, and nothing is computed twice.
#
# **For memory**, each recipe removes one term:
#
# | term | removed by |
# |---|---|
# | weights | QLoRA: four bits, and 16 for the embedding and the norms |
# | gradients, states, embedding copies | adapters: hardly anything trains; their states take 8 bits |
# | activations | checkpointing around compiled blocks; what goes from block to block has 16 bits, too |
# | loss | loss in chunks |
#
# Streaming stays out: it would move 51 MiB more to the disk. So does the step in backward, because adapters have hardly any gradients.
#
# **Guess first.** Which term is the largest one left in the second combination?

# %%
fast_row = "16 bits, compiled, chunked loss"
together = dict(group="together", dtype=precision.dtype)


def fast_and_whole(model):
    return apply_chunked_cross_entropy(compiled_if_possible(model))


def for_time():
    model = fast_and_whole(fresh())
    return model, adamw(model), step_in_16_bits()


def small_in_every_term(model):
    model = model.to(precision.dtype)  # what is frozen needs no 32 bits
    model = apply_qlora(model, rank=16, alpha=32)
    model = compiled_if_possible(model)  # before checkpointing, which stays outside
    model = apply_activation_checkpointing(model)
    return apply_chunked_cross_entropy(model)


def for_memory():
    model = small_in_every_term(fresh())
    return model, eight_bit_adamw(model, lr=2e-5), step_in_16_bits()


ladder.climb(fast_row, for_time, **together)
ladder.climb("everything combined", for_memory, **together)
ladder.take_turns(rounds=sizes.rounds)
ladder.chart()

# %%
ends = ("baseline", "everything combined")
timeline_chart(
    {name: ladder.timelines[name] for name in ends},
    predicted={name: ladder.predictions[name].timeline for name in ends},
    title="The same batch, before and after",
)

# %% [markdown]
# **The answer.** The weights, half of it: 54 MiB of embedding in 16 bits, 51 of packed blocks, 19 of adapters. On a CPU the account sees operators and not the inside of compiled code, so for this picture the blocks run uncompiled.
#
# ## Does it still learn?
#
# Memory is worth nothing if the model does not get better. The plain step and both combinations train on the same batches, from the same pretrained weights. What counts is the loss on functions from modules that none of them has seen.

# %%
from recipes_lib.core.data.evaluation import evaluate


def learn(recipe, optimizer_of, step):
    """The held-out loss before training and after it."""
    seed_everything(0)
    model = recipe(load_model(sizes.learner))
    optimizer = optimizer_of(model)
    learning = batches(
        train,
        batch_size=sizes.learner_rows,
        length=sizes.tokens,  # one length: compiled blocks compile once
        pad_token_id=padding,
        device=device,
    )
    before = evaluate(model, held_out, pad_token_id=padding)
    for _ in range(sizes.steps):
        step(model, optimizer, next(learning))
    after = evaluate(model, held_out, pad_token_id=padding)
    return [(0, before), (sizes.steps, after)]


whole = partial(torch.optim.AdamW, lr=5e-5, fused=True)
of_adapters = partial(eight_bit_adamw, lr=5e-4)  # about ten times as large


def whole_model(model):
    return whole(model.parameters())


curves = {
    "baseline": learn(lambda model: model, whole_model, train_step),
    fast_row: learn(fast_and_whole, whole_model, step_in_16_bits()),
    "everything combined": learn(small_in_every_term, of_adapters, step_in_16_bits()),
}

# %% [markdown]
# What is often promised for such stacks is *70 % less memory, and faster*. Against that, from the rows above:

# %%
print(f"{'':<33}{'memory':>8}{'time':>8}   held-out loss, {sizes.steps} steps")
for name, curve in curves.items():
    row = ladder[name]
    memory = row.peak_bytes / baseline.peak_bytes - 1
    time = row.ratio
    (_, before), (_, after) = curve
    print(f"{name:<33}{memory:>+8.0%}{time:>7.2f}×   {before:.2f} → {after:.2f}")
cost = [four - full for (_, four), (_, full) in zip(curve, curves["baseline"])]
print(f"four bits cost {cost[0]:+.2f} before training, {cost[-1]:+.2f} after it")

# %% [markdown]
# The second combination takes far less memory than promised, and the table says what it does to the time. Its four bits have a price. (The note on SmolLM2's source above says how to read it.) Whoever has room for all weights takes the first combination. This is one run of each on a few held-out answers, with rates that were not tuned: it shows that each of them learns, and not which learns best. [Notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb) compares with an interval.
#
# <!-- numbers:gpu-01 -->
# <!-- end -->
#
# ## The same ladder for eight billion weights
#
# Such a step does not fit here, but without data it takes no memory. Nor does it need 32 blocks: they are alike, so each adds the same bytes at the same moment. `any_size` takes the steps of three models of a few blocks, and follows every moment to 32. The equation answers at once, where it has the recipe; with states in 8 bits it forgets that those of the embedding stay in 32.

# %%
import time

from recipes_lib.core.predict.any_size import any_size

texts = torch.randint(0, 128_256, (8, 512), device=device)
long_batch = {"input_ids": texts, "labels": texts}  # 4,096 tokens
long_step = partial(train_step, rows=long_batch)


def lora(model):
    return get_peft_model(model, adapters())


def large(layers, recipes=(), optimizer_of=adamw):
    """`build` of a Llama-3.1-8B of so many blocks, with the recipes in their order."""

    def build():
        model = model_of_shape("llama-3.1-8b", layers=layers)
        for recipe in recipes:
            model = recipe(model)
        return model, optimizer_of(model), long_step

    return build


checkpoints = apply_activation_checkpointing
chunks = apply_chunked_cross_entropy
qlora = partial(apply_qlora, rank=16, alpha=32)
streamed = partial(apply_layer_streaming, to="disk")
in_backward = partial(apply_optimizer_in_backward, lr=2e-5, fused=True)
in_8_bits = partial(eight_bit_adamw, lr=2e-5)

plain_8b = model_of_shape("llama-3.1-8b", device="meta")
plain_8b = equation.plain_step(plain_8b, rows=8, length=512)
lean_8b = equation.with_chunked_loss(equation.with_checkpointing(plain_8b))
lora_8b = equation.with_adapters(plain_8b, rank=16)
qlora_8b = equation.in_four_bits(lora_8b)
lean_lora = equation.with_chunked_loss(equation.with_checkpointing(lora_8b))
lean_qlora = equation.with_chunked_loss(equation.with_checkpointing(qlora_8b))

# Of each row the recipes, and the equation's answer.
large_rows = {
    "baseline": (dict(), plain_8b),
    "QLoRA alone": (dict(recipes=[qlora]), qlora_8b),
    "recipe 2": (dict(recipes=[checkpoints, chunks]), lean_8b),
    "recipe 2 and step in backward": (
        dict(recipes=[checkpoints, chunks], optimizer_of=in_backward),
        None,
    ),
    "recipe 2 and 8-bit AdamW": (
        dict(recipes=[checkpoints, chunks], optimizer_of=in_8_bits),
        equation.with_states_in(lean_8b, bits=8),
    ),
    "recipe 2 and LoRA": (dict(recipes=[lora, checkpoints, chunks]), lean_lora),
    "recipe 2 and QLoRA": (dict(recipes=[qlora, checkpoints, chunks]), lean_qlora),
    "QLoRA, streamed": (dict(recipes=[qlora, chunks, streamed]), None),
}
large_peaks, equation_off = {}, {}
began = time.perf_counter()
print(f"{'GiB':<31}without data   by arithmetic")
for name, (options, by_arithmetic) in list(large_rows.items())[: sizes.large_rows]:
    parts = any_size(partial(large, **options), layers=(2, 3)).at(layers=32)
    large_peaks[name] = parts
    peak = sum(parts.values())
    line = f"{name:<31}{peak / 2**30:>12.1f}"
    if by_arithmetic is not None:
        equation_off[name] = by_arithmetic.peak / peak - 1
        line += f"{by_arithmetic.peak / 2**30:>16.1f}  {equation_off[name]:+.1%}"
    print(line)
print(f"in {time.perf_counter() - began:.0f} s")

# %%
from recipes_lib.report.bars import Bars, bars
from recipes_lib.report.style import KIND_COLORS, WITHOUT_DATA, three_digits

kinds = {}
for kind in KIND_COLORS:
    kinds[kind] = [row[kind] / 2**30 for row in large_peaks.values()]
bars(
    list(large_peaks),
    Bars(
        "GiB at the moment of the peak",
        kinds,
        [three_digits(sum(row)) for row in zip(*kinds.values())],
        colors=KIND_COLORS,
    ),
    title="Llama-3.1-8B, 4,096 tokens, fp32 but for QLoRA: not run",
    source=WITHOUT_DATA,
)

# %% [markdown]
# Compare *QLoRA alone* with *recipe 2 and QLoRA*: with recipe 2 the same four bits fit a card of 16 GB, and without it they need one of 80. The same recipe 2 helps full fine-tuning by 15 % only, because weights, states and gradients stand beside the activations. **What a recipe saves depends on the others: ask first what is at the peak.**
#
# ## Out-of-memory doctor
#
# The same as a decision: given a model, a device and the text of an error, what should be tried first? In the example PyTorch holds 2.40 GiB that it cannot use, because they are in pieces. A setting joins them, and it is not enough: the list goes on to what fits. Its lines are predictions. `python -m recipes_lib doctor` does the same in a terminal.

# %%
from recipes_lib.workflows.out_of_memory_doctor import diagnose

in_16_bits_8b = model_of_shape("llama-3.1-8b", dtype=torch.bfloat16, device="meta")
error = (
    "CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of "
    "24.00 GiB of which 512.00 MiB is free. Of the allocated memory 20.10 GiB is "
    "allocated by PyTorch, and 2.40 GiB is reserved by PyTorch but unallocated."
)
diagnose(
    error=error,
    model=in_16_bits_8b,
    batch_size=4,
    seq_len=2048,
    memory_bytes=24 * 2**30,
)

# %% [markdown]
# ## Take this home
#
# On a model of the hub, or on the embedded one where the hub cannot be reached. Loading takes two bytes per weight for a moment; where they do not fit, load in four bits, as in recipe 10. [`scripts/train_large_model.py`](../scripts/train_large_model.py) is the whole of it: data, schedule, checkpoints, held-out loss.

# %%
from recipes_lib.core.model.default_model import resolve

# Any causal LM of the hub, or a folder.
name = resolve("HuggingFaceTB/SmolLM2-135M-Instruct")
loader = batches(train, batch_size=4, pad_token_id=padding, device=device)

precision = mixed_precision()  # the fastest of this machine
model = AutoModelForCausalLM.from_pretrained(name, dtype=precision.dtype).to(device)
model.train()  # from_pretrained returns a model in evaluation mode
model = apply_qlora(model, rank=16, alpha=32)  # weights in four bits, adapters train
apply_chunked_cross_entropy(model)  # no table of all logits
apply_activation_checkpointing(model)  # activations of one block at a time
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
for step, rows in zip(range(2), loader):
    with precision.autocast():
        loss = model(**rows, use_cache=False).loss
    precision.backward(loss)
    precision.step(optimizer, max_grad_norm=1.0)
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")  # of two different batches
del model, optimizer, loss

# %% [markdown]
# The nearest arguments of `Trainer`, or of TRL's `SFTTrainer`, beside `adapters()` and `four_bits` from above:

# %%
from transformers import TrainingArguments

arguments = TrainingArguments(
    output_dir="runs/take-away",
    per_device_train_batch_size=8,
    learning_rate=2e-4,
    gradient_accumulation_steps=1,  # recipe 1
    gradient_checkpointing=True,  # recipe 2; on a GPU also the next line, for recipe 3
    # gradient_checkpointing_kwargs={"offload": True},
    bf16=precision.dtype == torch.bfloat16,  # recipe 4
    fp16=precision.dtype == torch.float16,
    # torch_compile=True,  # recipe 5; the Trainer compiles the whole model
    optim="adamw_torch_fused",  # recipe 7: "adamw_8bit"
    # use_liger_kernel=True,  # the loss in chunks, on a GPU with liger-kernel installed
    use_cpu=device == "cpu",
    report_to="none",
)
print(arguments.optim, arguments.bf16)

# %% [markdown]
# And as one command, on pairs of your own, with the held-out loss before and after:
#
# ```bash
# python -m recipes_lib finetune --data pairs.jsonl --method qlora --output runs/mine
# ```
#
# ## When not
#
# Each recipe says above when it is of no use. **What does not go together**: the step in backward with accumulation, clipping or fp16; offloading of every activation with checkpointing, which leaves little to move. The [cheatsheet](../CHEATSHEET.md) has all recipes side by side, and [TRAPS.md](../TRAPS.md) lists settings that train something else without an error.
#
# ## Exercises
#
# 1. Double the tokens per row. Which terms change, and by what factor? Predict first.
# 2. At how many tokens does the first tower of the plain step become higher than the second? Solve the equation, then check.
# 3. Add *step in backward* to the LoRA row. Why does almost nothing happen?

# %%
# 1. Activations and loss double, the rest stays.
doubled = equation.plain_step(skeleton, rows=sizes.rows, length=2 * sizes.tokens)
assert abs(doubled.activations / arithmetic.activations - 2) < 0.01
assert abs(doubled.loss / arithmetic.loss - 2) < 0.01
assert doubled.weights == arithmetic.weights

# 2. Where both are equal: gradients and copies over bytes per token.
per_token = (arithmetic.activations + arithmetic.loss) / tokens
second = arithmetic.gradients + arithmetic.copies
print(f"from {second / per_token:,.0f} tokens on")

# 3. The gradients are those of the adapters.
trained = equation.with_checkpointing(equation.with_adapters(arithmetic, rank=16))
trained = equation.with_chunked_loss(trained)
print(f"gradients: {trained.gradients / 2**20:.0f} of {trained.peak / 2**20:,.0f} MiB")

# %% [markdown]
# ## References
#
# - Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016: checkpointing
# - Micikevicius et al., *Mixed Precision Training*, 2018
# - Rajbhandari et al., *ZeRO*, 2020: where the bytes of a training step go
# - Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, 2022, and *QLoRA*, 2023
# - Hu et al., *LoRA*, 2021
# - Lv et al., *LOMO*, 2023, and the PyTorch tutorial on fusing the optimizer step into backward
# - Ansel et al., *PyTorch 2*, 2024: `torch.compile`
#
# The last cell checks that the story above is true on this machine: orderings and signs, never absolute speed.

# %%
from recipes_lib.core.measure.machine import fast

ladder.note(
    held_out_loss=curves,
    naive_error=naive_error,
    micro_batches=[expected, fitted.micro_batches],
    source=model_source(),
)

allowed = dict.fromkeys([row.name for row in ladder.rows], 0.005)
if can_compile:
    allowed |= {compiled_row: 0.06, "everything combined": 0.06, fast_row: 0.06}
for row in ladder.rows:
    assert abs(row.prediction_error) < allowed[row.name], f"{row.name} as predicted"
if not fast():  # in models as small as those of FAST mode, what is left out counts
    assert abs(arithmetic.peak / baseline.peak_bytes - 1) < 0.01, "so is the equation"
assert max(map(abs, equation_off.values())) < 0.06, "also for eight billion weights"

# A GPU adds up in another order each time.
tolerance = 1e-3 if device == "cpu" else 2e-2
for name in (
    "gradient accumulation",
    "activation checkpointing",
    "activation offloading",
):
    difference = abs(ladder[name].loss - ladder["baseline"].loss)
    assert difference < tolerance, f"{name} is the same training"
assert naive_error > 0.01, "the popular accumulation is not"

if not fast():
    for name in ("gradient accumulation", "activation checkpointing"):
        assert ladder.saved(name) > 0.25, f"{name} shows what it is for"
staircase = ["baseline", "activation checkpointing", "checkpointing, loss in chunks"]
staircase += ["16-bit AdamW states", "LoRA", "QLoRA"]
peaks = [ladder[name].peak_bytes for name in staircase]
assert peaks == sorted(peaks, reverse=True), "each is lower than the one before"
assert ladder.saved("everything combined") > 0.7, "70 % less memory"
found = fitted.micro_batches
assert 1 < expected <= found <= 2 * expected, "the search finds the prediction"
for name, curve in curves.items():
    assert curve[-1][1] < curve[0][1], f"{name} learns"
print(f"all checks passed: {ladder.saved('everything combined'):.0%} less peak memory")
