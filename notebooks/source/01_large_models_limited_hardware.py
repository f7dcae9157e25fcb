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
# > **2,336 MiB → 243 MiB:** the peak memory of tensors of one training step of a real pretrained model, from full fine-tuning in fp32 to everything combined, on the same batch: **90% less**. Held-out loss in 4 steps, one run each: full fine-tuning 3.69 → 2.83; LoRA 3.69 → 2.94; everything combined 3.95 → 3.06. Each row was predicted before it ran, from the same step on tensors without data: off by 5.0% at most.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-25.
# <!-- end -->
#
# A training step runs out of memory, and the error does not say what filled it. This notebook trains one small model in a dozen ways. For each way it first predicts the memory, then measures it, then checks whether it is still the same training.
#
# | | |
# |---|---|
# | **You will learn** | to predict the memory of a training step, and which recipe removes which part of it |
# | **You need** | Python and the basics of PyTorch; no GPU, no login |
# | **Time** | about ten minutes on two CPU cores |
# | **Cost** | free on a laptop or on a Colab T4 |

# %% [markdown]
# ## The map
#
# | | recipe | makes smaller | file |
# |---|---|---|---|
# | 1 | gradient accumulation | activations, loss | [gradient_accumulation.py](../recipes_lib/training/gradient_accumulation.py) |
# | 2 | activation checkpointing | activations | [activation_checkpointing.py](../recipes_lib/memory/activation_checkpointing.py) |
# | 3 | activation offloading | activations | [activation_offload.py](../recipes_lib/memory/activation_offload/__init__.py) |
# | 4 | mixed precision | time | [mixed_precision.py](../recipes_lib/precision/mixed_precision.py) |
# | 5 | compiled blocks | time, activations | [compiled_blocks.py](../recipes_lib/training/compiled_blocks.py) |
# | 6 | optimizer step in backward | gradients | [optimizer_in_backward.py](../recipes_lib/memory/optimizer_in_backward.py) |
# | 7 | optimizer states in 16 or 8 bits | states | [sixteen_bit_adam.py](../recipes_lib/precision/sixteen_bit_adam.py), [eight_bit_adam.py](../recipes_lib/precision/eight_bit_adam.py) |
# | 8 | optimizer states in host memory | states, gradients | [optimizer_offload.py](../recipes_lib/memory/optimizer_offload.py) |
# | 9 | LoRA | gradients, states | [lora.py](../recipes_lib/fine_tuning/lora.py) |
# | 10 | QLoRA | weights too | [qlora.py](../recipes_lib/fine_tuning/qlora.py) |
# | 11 | layer streaming | weights on the device | [layer_streaming.py](../recipes_lib/memory/layer_streaming.py) |
# | 12 | dynamic batch size | the guesswork | [dynamic_batch.py](../recipes_lib/training/dynamic_batch.py) |
#
# Each file is short, and its first lines explain the recipe. The words of the table are explained where they are first needed. At the end, the recipes that go well together become a few lines for your own code.
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
import torch

from recipes_lib.core.measure.machine import choose_sizes, machine
from recipes_lib.core.measure.memory import keep_freed_memory
from recipes_lib.core.measure.rates import measure_matrix_rates

# On Linux, a step on a CPU is slowed by the system, which takes freed memory away
# and fills it with zeros before it gives it back. This asks to keep it.
keep_freed_memory()
rates = measure_matrix_rates()  # operations per second, in about a second
print(machine())
for dtype, rate in rates.items():
    print(f"matrix products in {dtype}: {rate / 1e12:.2f} TFLOP/s")

# %% [markdown]
# The last two lines say how fast this machine multiplies large matrices when it does nothing else, with numbers of 32 and of 16 bits. One TFLOP/s is a million million multiplications or additions per second. No training step can be faster than its multiplications. Later we compare each step with this limit.
#
# All sizes of this notebook stand in one cell. A GPU gets a larger model than a CPU, with random weights: memory and speed do not depend on what the weights are. Whether the recipes still learn is tested at the end, always with a pretrained model.

# %%
# Rounds of timing, whether rows are compiled, rows of the large model, and the last
# experiment: its model, its steps, pairs of text.
full = dict(rounds=5, compile=True, large_rows=10)
full |= dict(learner="smollm2", steps=4, pairs=400, held_out=12)
brief = dict(
    rounds=1, compile=False, large_rows=3
)  # which takes longer than such small sizes
brief |= dict(learner="tiny-smollm2", steps=2, pairs=40, held_out=6)
# On a CPU the real SmolLM2-135M. layers=None means all of its 30 blocks.
smollm2 = dict(shape="smollm2-135m", layers=None, pretrained=True, rows=6, tokens=72)
# On a GPU a larger shape, of which plain fp32 training fits.
llama = dict(shape="llama-3.2-1b", pretrained=False, rows=8, tokens=256)

sizes = choose_sizes(
    cpu=smollm2 | full,
    gpu16=llama | dict(layers=5) | full,
    gpu24=llama | dict(layers=11) | full,
    gpu80=llama | dict(shape="llama-3.2-3b", layers=None) | full,
    # Continuous integration checks that the code works, not how fast it is.
    fast=dict(shape="tiny-smollm2", layers=None, pretrained=False, rows=4, tokens=64)
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
import gc

from recipes_lib.core.data.chat import decode_with_mask
from recipes_lib.core.data import batches, load_instructions
from recipes_lib.core.model.default_model import model_source, source_note
from recipes_lib.core.measure.machine import seed_everything
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape

tokenizer = load_tokenizer()
train = load_instructions(tokenizer, max_tokens=sizes.tokens, limit=sizes.pairs)
held_out = load_instructions(
    tokenizer, split="validation", max_tokens=sizes.tokens, limit=sizes.held_out
)
padding = tokenizer.pad_token_id
device = machine().device
gc.freeze()  # to count bytes, Python looks at all objects: not at those of the imports

# One batch for all rows below: [6 rows, 72 tokens] on a CPU.
shaped = dict(batch_size=sizes.rows, length=sizes.tokens)
batch = next(batches(train, **shaped, pad_token_id=padding, device=device))
print(decode_with_mask(train[1], tokenizer))


# %%
def fresh():
    """The model of this notebook, each time with the same weights."""
    seed_everything(0)
    if sizes.pretrained:
        return load_model("smollm2")
    return model_of_shape(sizes.shape, layers=sizes.layers)


print(f"SmolLM2 comes from: {model_source()}\n{source_note()}")

# %% [markdown]
# ## What runs out: one equation
#
# Five things fill the memory of a training step.
#
# - **Weights**: the numbers that the model consists of. In fp32, numbers of 32 bits, each takes 4 bytes.
# - **States**: AdamW, the optimizer used here, keeps two averages per weight, of its gradient and of the gradient's square. That is 8 bytes per weight.
# - **Gradients**: one number per weight, again 4 bytes.
# - **Activations**: what the forward pass keeps so that the backward pass can compute gradients. They grow with the number of tokens.
# - **Loss**: the output of the model is one number, a *logit*, per token and per entry of the vocabulary. The loss and its gradient need this large table three times. In this list the word *loss* stands for these bytes.
#
# So training in fp32 takes **16 bytes per weight**, however short the text is. But the five are not all there at the same moment. The model is a stack of *blocks* that are built alike. The forward pass goes through them and builds up activations. The backward pass walks through the blocks in the other direction: in each block it *uses up* activations and *leaves* gradients. Two moments matter, the one when backward begins and the one when it ends:
#
# $$\text{peak} = \text{weights} + \text{states} + \max\begin{cases}\text{activations} + \text{loss} & \text{backward begins}\\ \text{gradients} + \text{embedding copies} & \text{the last gradient arrives}\end{cases}$$
#
# One term is easily forgotten, and it decides several rows below. SmolLM2 uses one table twice: as the embedding at its input, and as the output layer at its end. We say the table is *tied*. It gets a gradient from both ends. The first one waits while the second one is computed, and their sum is a third tensor. For a moment there are two more tables than the gradients alone need: these are the **embedding copies**.
#
# `equation.py` computes these terms from the shapes of the model's weights. `skeleton` is a model that has shapes and no numbers, and takes no memory.

# %%
from recipes_lib.core.predict import equation

skeleton = model_of_shape(sizes.shape, layers=sizes.layers, device="meta")
tokens = sizes.rows * sizes.tokens
arithmetic = equation.plain_step(skeleton, rows=sizes.rows, length=sizes.tokens)
print(f"{skeleton.num_parameters():,} weights, {tokens} tokens\n")
print(arithmetic)

# %% [markdown]
# Check it by hand: 134,515,008 weights × 4 bytes are 513 MiB on a CPU; the states take twice that. The table has 49,152 rows of 576 numbers, so two *copies* of it are 216 MiB. The loss takes 432 tokens × 49,152 logits × 4 bytes × 3 = 243 MiB. Of the activations, each token leaves 11,136 numbers in a block:
#
# - 3 × 576 at each of its two norms: the input, the input normalised, and the output,
# - 2 × (576 + 192) in attention: queries and the result are 576 numbers wide, keys and values 192,
# - 4 × 1,536 in the MLP, the widest part of a block.
#
# That is 432 tokens × 30 blocks × 11,136 numbers × 4 bytes = 551 MiB; the last norm adds 3 more. *One block* is zero here: it is what recipe 2 computes again.
#
# ## Baseline: the plain loop
#
# This is what every recipe is compared with.


# %%
def adamw(model):
    """PyTorch's own AdamW. `fused` updates all weights without temporary tensors."""
    return torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)


def plain_step(model, optimizer):
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def plain():
    model = fresh()
    return model, adamw(model), plain_step


# %% [markdown]
# The results go into a table that grows by one row per recipe: the *ladder*. `ladder.climb` calls `plain()` twice. The first time, tensors have shapes and no data: the code of the step runs as it is, computes nothing, and every byte that it would take is counted. That is the prediction. The second time it is real: a first step, in which AdamW makes its states, and then one in which every byte of every tensor is counted.
#
# **Guess first.** Draw the memory over one step as a curve: forward, backward, optimizer. Where is the highest point?

# %%
from recipes_lib.report.ladders.memory import MemoryLadder
from recipes_lib.report.timeline import timeline_chart

ladder = MemoryLadder(
    "01_large_models_limited_hardware",
    rows=sizes.rows,
    length=sizes.tokens,
    rates=rates,
)
alone = dict(group="each recipe alone", dtype=torch.float32)
baseline = ladder.climb("baseline", plain, **alone)

# %% [markdown]
# Now there are three numbers for one peak: the equation, which is arithmetic, the same step on tensors without data, and the measured one.

# %%
peaks = {
    "by arithmetic": arithmetic.peak,
    "without data": baseline.predicted_bytes,
    "measured": baseline.peak_bytes,
}
for name, peak in peaks.items():
    print(f"{name:<15}{peak:>13,} bytes  {peak / baseline.peak_bytes - 1:+.3%}")

# %% [markdown]
# The step without data knows every recipe below, but alone it would be the weaker claim, because its code and its account are those that measure: a fault in them would be in both numbers, while the equation knows nothing of either and is an independent witness. The equation leaves out what is small, such as one number per token and head in attention, and one per token and norm. So it is a little lower.

# %%
timeline_chart(
    {"baseline": ladder.timelines["baseline"]},
    predicted={"baseline": ladder.predictions["baseline"].timeline},
    title="The plain step: activations pile up, then gradients take their place",
)

# %% [markdown]
# Read the figure from the left. The dashed line on the edge is the prediction. Weights and states are there all the time. Forward adds activations block by block, and at its end comes the loss: that is the peak. The picture sorts bytes by who made them: one of the three tables of the loss, which forward makes, is among the activations, and the other two are *other*. Backward frees the activations of a block and leaves its gradients. At the very end of backward the embedding copies make a second, lower tower. The optimizer then updates the weights, and the gradients go.
#
# The loss that `climb` prints is that of a batch which the model has already been trained on for a step or two. It is a number to compare with, not a result.
#
# The figure also shows the plan of this notebook. **Part A** attacks the first tower, which grows with the number of tokens. **Part B** attacks the second tower and the ground on which both stand: weights and states.

# %% [markdown]
# ### Something small to try ideas on
#
# Each recipe below begins with its idea in a few lines. They run on a model with two narrow blocks, and the result is compared with that of the real implementation. `gradients_after` collects all gradients in one vector.

# %%
from recipes_lib.report.show import show

small = model_of_shape("tiny-llama", device="cpu")
words = torch.randint(0, small.config.vocab_size, (4, 12))  # 4 rows of 12 tokens
small_batch = {"input_ids": words, "labels": words}


def gradients_after(backward, model=small):
    """Call `backward()`, and return the gradients that it left as one vector."""
    model.zero_grad()
    backward()
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found)


def plain_backward():
    small(**small_batch, use_cache=False).loss.backward()


right = gradients_after(plain_backward)
print(f"{right.numel():,} gradients")

# %% [markdown]
# ## Part A: what grows with the tokens
#
# ### 1. Gradient accumulation
#
# **What is going on?** Split the batch into micro-batches, run them one after the other, add up their gradients, and update the weights once. Only one micro-batch has activations and a loss at a time.
#
# ```text
# plain        forward [6 rows]  backward                       step
# accumulated  forward [2]  backward, forward [2]  backward, …  step
#                              gradients stay and add up
# ```
#
# **Guess first.** With three micro-batches the activations shrink to a third, and the loss shrinks too. But the gradients of the first micro-batches now wait while the next forward pass runs. Where is the peak then?
#
# **The idea.** Autograd adds to `.grad` by itself, so a loop is enough. One division needs care. The model returns the *mean* loss of a micro-batch over its own answer tokens. In the gradient of the whole batch every token weighs the same.

# %%
from recipes_lib.training.gradient_accumulation import (
    accumulate_gradients,
    accumulated_by_hand,
)

show(accumulated_by_hand)

# %%
# A label of -100 says: no loss here. So the rows have answers of unequal lengths.
no_answer = torch.rand(words.shape) < 0.5
small_batch["labels"] = words.masked_fill(no_answer, -100)
right = gradients_after(plain_backward)


def by_hand():
    accumulated_by_hand(small, small_batch, micro_batches=4)


def as_in_the_library():
    accumulate_gradients(small, small_batch, micro_batches=4)


assert torch.allclose(gradients_after(by_hand), right, atol=1e-6)
assert torch.allclose(gradients_after(as_in_the_library), right, atol=1e-6)
print("all three gradients agree")

# %% [markdown]
# A popular way to write this loop divides each micro-batch by its *own* number of tokens, and then by the number of micro-batches. It runs, and it trains something else: a token of a short answer now weighs more than one of a long answer. How far off is its gradient on four rows of our real batch, with the pretrained SmolLM2?


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

# %% [markdown]
# **The row.** Each micro-batch has two rows.

# %%
micro_batches = sizes.rows // 2


def accumulated_step(model, optimizer):
    loss = accumulate_gradients(model, batch, micro_batches=micro_batches)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def accumulated():
    model = fresh()
    return model, adamw(model), accumulated_step


ladder.climb("gradient accumulation", accumulated, **alone)

# %% [markdown]
# **Why not more?** The first tower has shrunk, and the second one is now the peak. It has even grown by one table. The sum of the earlier micro-batches is there, and beside it the two gradients of this one and their own sum: the embedding copies are three tables instead of two. The loss keeps more than a third, because the gradient of the output layer, one more table, is made beside that of the logits.
#
# **How do I use it?** `TrainingArguments(gradient_accumulation_steps=4)`, with the batch size per device divided by four. The Trainer passes the number of tokens of the whole batch to the model, so that it divides as we do.
#
# **What does it cost?** Products of fewer rows, which use the processor less well. The times follow below, when the rows take turns.

# %% [markdown]
# ### 2. Activation checkpointing
#
# **What is going on?** Backward visits one block at a time, so only one block's activations need to exist. Keep what went *into* each block, throw away the rest, and compute it again when backward arrives.
#
# ```text
# plain         x0 [a0]  x1 [a1]  x2 [a2] → loss     all [a] are alive
# checkpointed  x0       x1       x2      → loss     [a2] again, used, freed; then [a1]; then [a0]
# ```
#
# **Guess first.** The model has 30 blocks. The input of a block is 432 tokens × 576 numbers × 4 bytes. How much is left of the activations, and what will the peak be?
#
# **The idea.** PyTorch's autograd lets us write a function with a `forward` and a `backward` of our own. This one keeps only the input in `forward`, and in `backward` it runs the block again.

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
from functools import partial

from torch.nn import functional as F


def checkpointed_backward():
    hidden = small.model.embed_tokens(words)  # [B, S, D]
    positions = torch.arange(words.shape[1])[None]
    rotary = small.model.rotary_emb(hidden, positions)
    blocks = small.model.layers
    blocks = [partial(block, position_embeddings=rotary) for block in blocks]
    hidden = checkpointed_by_hand(blocks, hidden)
    logits = small.lm_head(small.model.norm(hidden))  # [B, S, V]
    # Token t + 1 is predicted from token t.
    predictions = logits[:, :-1].flatten(0, 1)
    targets = small_batch["labels"][:, 1:].flatten()
    F.cross_entropy(predictions, targets).backward()


assert torch.allclose(gradients_after(checkpointed_backward), right, atol=1e-6)
apply_activation_checkpointing(small)  # the real one, on the same model
assert torch.equal(gradients_after(plain_backward), right)
print("by hand: equal to rounding; the library: equal to the last bit")


# %%
def checkpointed():
    model = apply_activation_checkpointing(fresh())
    return model, adamw(model), plain_step


ladder.climb("activation checkpointing", checkpointed, **alone)

# %% [markdown]
# **Why not more?** Most activations are gone: thirty inputs of 0.95 MiB are left, and what is outside of the blocks. So the second tower is the peak again. It is lower than with accumulation by one table, because no gradient of an earlier micro-batch waits. No recipe of Part A gets below it.
#
# **How do I use it?** `TrainingArguments(gradient_checkpointing=True)`, or `model.gradient_checkpointing_enable()`. Newer versions of transformers also call it `activation_checkpointing`.
#
# **What does it cost?** One more forward pass. Backward multiplies twice as much as forward, so that is a third more arithmetic. It costs no accuracy: the loss above is the baseline's.

# %% [markdown]
# ### 3. Activation offloading
#
# **What is going on?** Keep every activation, but somewhere else, and fetch it back in time. On a GPU that place is host memory. On a CPU, host memory *is* the device, so only the disk is left.
#
# ```text
# forward       block 0  →  block 1  →  …  →  block 29  → loss
#                  ↓ out       ↓ out             stays: backward needs it first
# elsewhere        ·           ·
#                  ↑ back      ↑ back
# backward      block 0  ←  block 1  ←  …  ←  block 29
# ```
#
# **Guess first.** Activations leave, and nothing is computed twice. Will the peak be lower than with checkpointing?
#
# **The idea.** Autograd lets us decide what it keeps: it calls `pack` when it saves a tensor, and `unpack` when it needs the tensor again.

# %%
from recipes_lib.memory.activation_offload import (
    offload_activations,
    offloaded_by_hand,
)

show(offloaded_by_hand)

# %%
import tempfile


def offloaded_backward():
    with tempfile.TemporaryDirectory() as folder, offloaded_by_hand(Path(folder)):
        plain_backward()


assert torch.allclose(gradients_after(offloaded_backward), right, atol=1e-6)
print("from the disk and back: the same gradients")

# %%
elsewhere = "host" if device == "cuda" else "disk"


def offloaded_step(model, optimizer):
    with offload_activations(model, to=elsewhere):
        return plain_step(model, optimizer)


def offloaded():
    model = fresh()
    return model, adamw(model), offloaded_step


ladder.climb("activation offloading", offloaded, **alone)

# %% [markdown]
# **Why not more?** The second tower is the peak, as with checkpointing, and no lower.
#
# **How do I use it?** With transformers 5.17 or newer, `gradient_checkpointing_kwargs={"offload": True}` moves the inputs of checkpointed blocks to host memory. In torchtune it is `enable_activation_offloading`.
#
# **What does it cost?** Every byte travels twice. On a CPU with enough free memory the system keeps the files in memory, so the time measured here can be shorter than that of a real disk.
#
# ### The rows take turns on the clock
#
# So far we have looked at bytes. They are the same in every run. Times are not: another program on the machine, or a warm processor, changes them by more than many recipes do. So the models of the rows above were kept, and now they take *turns*: one step of each row, then the same in the other direction, five rounds in all. If memory does not hold all models, the rows take turns in groups, with the baseline in each. What disturbs a turn can only make it longer, so the table shows the fastest turn of each row, and how it compares with the fastest one of the baseline. In brackets are the smallest and the largest ratio of a single round. Where two brackets overlap, this run does not say which row is faster.

# %%
# After its turns, the baseline takes one more step for a profile. We look at it later.
ladder.take_turns(rounds=sizes.rounds, profile=["baseline"])
ladder

# %% [markdown]
# The column *of limit* shows the share of the limit: the time that the multiplications of the step would take at the rate of the setup, in the same precision, as a part of the time that the step took. The multiplications of the plain step count, and no others. The second forward pass of checkpointing takes time and does not count.

# %% [markdown]
# ### 4. Mixed precision
#
# **What is going on?** Multiply in 16 bits, and keep the weights in 32. Multiplications take most of the time, and processors with 16-bit units do them faster: the setup has measured both rates. The weights stay in fp32, because an update is often too small for 16 bits. The 16-bit format of the drawing is called *bf16*.
#
# ```text
# weights, states, gradients     fp32      small updates survive
# x16 = x to bf16, W16 = W to bf16         y = x16 · W16ᵀ on the fast units
# norms, softmax, loss           fp32      sums over many numbers
# ```
#
# **Guess first.** Most activations take half the bytes. Will the peak fall by half of them?
#
# **The idea.** Both factors of a product are converted to 16 bits. PyTorch's `autocast` does the same.

# %%
from recipes_lib.precision.mixed_precision import linear_by_hand, mixed_precision

show(linear_by_hand)

# %%
x, weight = torch.randn(5, 64), torch.randn(128, 64)
with torch.autocast("cpu", torch.bfloat16):
    automatic = F.linear(x, weight)
assert torch.equal(automatic, linear_by_hand(x, weight, dtype=torch.bfloat16))
difference = (automatic - x @ weight.T).abs().max()
print(f"equal to the last bit, and {difference:.2f} from fp32 at most")

# %% [markdown]
# There are two kinds of 16 bits. bf16 has the range of fp32 and few digits. fp16 has more digits and a small range: below its smallest number there is only zero, and gradients are often that small. So in fp16 the loss is multiplied by a large number first, the *loss scale*, and the gradients are divided by it before the update.

# %%
for scale in (1, 65_536):
    x = torch.ones(4, dtype=torch.float16, requires_grad=True)
    tiny_loss = 1e-8 * x.float().sum()  # the gradient of each element should be 1e-08
    (scale * tiny_loss).backward()
    print(f"loss scale {scale:>6,}: the gradient is {x.grad[0].item() / scale:.1e}")

# %% [markdown]
# **The row.** It runs where 16-bit products are native, as the print of the machine above says. A CPU that has to emulate them is much slower, so there the row is left out.

# %%
precision = mixed_precision()  # the fastest here: bf16, fp16 on a T4, or fp32
native = precision.dtype != torch.float32
in_half = dict(group="each recipe alone", dtype=precision.dtype)


def in_mixed_precision():
    """A step of one model, to whose gradients the loss scale of fp16 adapts."""
    of_this_model = mixed_precision()

    def step(model, optimizer):
        with of_this_model.autocast():
            loss = model(**batch, use_cache=False).loss
        of_this_model.backward(loss)
        of_this_model.step(optimizer)
        optimizer.zero_grad()
        return loss.item()

    return step


def mixed():
    model = fresh()
    return model, adamw(model), in_mixed_precision()


if native:
    ladder.climb("mixed precision", mixed, **in_half)
else:
    print("16 bits are not native here")

# %% [markdown]
# **Why not more?** For each product, forward makes a 16-bit copy of the weights and keeps it for backward. The account counts these copies as activations. On a batch this small they take what the activations save. The copies do not grow with the number of tokens, and what the activations save does.
#
# **How do I use it?** `TrainingArguments(bf16=True)`, or `fp16=True` on a T4.
#
# **What does it cost?** Digits. The loss is no longer the baseline's number. AdamW's first update has the same size for every weight, in the direction of the gradient's sign. So where rounding changes the sign of a tiny gradient, it turns a whole update around. Whether it learns as well is a question for text that the model has not seen, at the end.

# %% [markdown]
# ### 5. Compiled blocks
#
# **What is going on?** Between two matrix products a block runs dozens of small operators: norms, rotary positions, casts, the activation function. Each one is a program of its own, a *kernel*, which reads its input from memory and writes its output back. A compiler makes one kernel of the small operators between two products.
#
# ```text
# eager      x → pow → mean → add → rsqrt → mul → mul → [product] → …
# compiled   x →             one kernel              → [product] → …
# ```
#
# All blocks do the same with other weights. So one block is compiled, and the others use its code.
#
# **Guess first.** Compiling takes seconds. After how many steps is that earned? And which profits more: a step in fp32, or one in 16 bits, whose products are faster?
#
# **The idea** is one line per block.

# %%
import copy

from recipes_lib.training.compiled_blocks import (
    apply_compiled_blocks,
    break_even_steps,
    compile_seconds,
    compiled_by_hand,
)

show(compiled_by_hand)


# %%
def gradients_of(model):
    def backward():
        model(**small_batch, use_cache=False).loss.backward()

    return gradients_after(backward, model)


eager = model_of_shape("tiny-llama", device="cpu").train()
expected = gradients_of(eager)
try:
    apply_compiled_blocks(copy.deepcopy(eager))
    can_compile = True
except ValueError as reason:  # a CPU without a C++ compiler
    print(reason)
    can_compile = False


def compiled_if_possible(model):
    return apply_compiled_blocks(model) if can_compile else model


by_hand = expected
if can_compile:
    by_hand = gradients_of(compiled_by_hand(copy.deepcopy(eager)))
library = gradients_of(compiled_if_possible(copy.deepcopy(eager)))
assert torch.allclose(by_hand, expected, atol=1e-6)
assert torch.allclose(library, expected, atol=1e-6)
print("compiled gradients: equal up to rounding, for sums run in another order")
can_compile = can_compile and sizes.compile  # in the rows below

# %% [markdown]
# **The row.** It is the step of recipe 4, with compiled blocks. What a compiled block keeps for backward is the compiler's choice. So the prediction asks the compiler about one block, without compiling it.


# %%
def compiled():
    model = compiled_if_possible(fresh())
    return model, adamw(model), in_mixed_precision()


# Where 16 bits are not native, both rows are steps in fp32.
eager_row = "baseline"
compiled_row = "compiled blocks"
if native:
    eager_row = "mixed precision"
    compiled_row = "mixed precision, compiled"

before = compile_seconds()
ladder.climb(compiled_row, compiled, after=eager_row, **in_half)
compiling = compile_seconds() - before
print(f"{compiling:.0f} seconds of compiling")

# %% [markdown]
# **Why not more?** The compiler leaves the products and the optimizer as they are. It does make the activations smaller: what is cheap to compute is computed again in backward, inside the same kernel, and forward need not keep it.
#
# **How do I use it?** `block.compile()` for each block, before checkpointing and before sharding. `TrainingArguments(torch_compile=True)` compiles the whole model as one graph. That takes longer, because all its blocks are in that graph.
#
# **What does it cost?** Seconds of compiling, and again for a batch of another shape. After how many steps they are earned depends on the times of both rows.
#
# ### The rows take turns on the clock
#
# The fp32 step, the step in 16 bits and the compiled step:

# %%
profiled = ["mixed precision"] if native else []
ladder.take_turns(rounds=sizes.rounds, profile=profiled)
ladder

# %% [markdown]
# Now the guess of recipe 5: after how many steps are the seconds of compiling earned?

# %%
steps = break_even_steps(
    compile_seconds=compiling,
    plain_step=ladder[eager_row].seconds,
    compiled_step=ladder[compiled_row].seconds,
)
print(f"{compiled_row}: {compiling:.0f} s of compiling are earned after {steps} steps")

# %% [markdown]
# ## Part B: what every weight costs
#
# No recipe of Part A gets below the second tower, which stands on weights and states. From here on checkpointing stays on, so that the first tower is out of the way, and each recipe attacks the rest.
#
# ### 6. Optimizer step in backward
#
# **What is going on?** AdamW needs nothing but the gradient of the weight that it updates. So update each weight the moment its gradient is complete, and free the gradient at once.
#
# ```text
# plain   backward: g30 … g2 g1 all alive   →   step: update 30 … 2, 1
# here    backward: g30 → update 30, free;  …  ; g1 → update 1, free
# ```
#
# **Guess first.** Gradients take as many bytes as weights. If each is freed at once, how many bytes of gradients are alive at most? Think of the tied table.
#
# **The idea.** One optimizer per weight, and a hook that autograd calls when a gradient is complete.

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
    hooks = one_optimizer_per_parameter(model, torch.optim.AdamW, lr=1e-3)

    def remove():  # the step has happened: let the hooks go
        for hook in hooks:
            hook.remove()

    return remove


def as_in_library(model):
    return apply_optimizer_in_backward(model, lr=1e-3).step


expected = weights_after_a_step(usual)
assert torch.equal(weights_after_a_step(in_hooks), expected)
assert torch.equal(weights_after_a_step(as_in_library), expected)
print("the same weights after the step, to the last bit")


# %%
def stepping_in_backward():
    model = apply_activation_checkpointing(fresh())
    optimizer = apply_optimizer_in_backward(model, lr=2e-5, fused=True)
    return model, optimizer, plain_step


checkpointed_rows = dict(
    group="with activation checkpointing",
    after="activation checkpointing",
    dtype=torch.float32,
)
ladder.climb("step in backward", stepping_in_backward, **checkpointed_rows)

# %% [markdown]
# **Why not more?** The gradient of the tied table is the largest of all, and it comes in two parts. The first part, from the output layer, has to wait until the second one arrives from the embedding, at the very end of backward. So one table and its two copies remain of the second tower. On a CPU the first tower, the loss and the inputs that checkpointing keeps, now has about the same height.
#
# **How do I use it?** torchtune calls it `optimizer_in_bwd: True`. In plain PyTorch it is the hook above.
#
# **What does it cost?** Whatever needs the gradients to stay until the end of backward is impossible: no accumulation, no clipping by the global norm, no loss scaling. Our functions refuse such a combination and say why, because PyTorch raises no error.

# %% [markdown]
# ### 7. Optimizer states in 16 or 8 bits
#
# **What is going on?** AdamW's two averages have more digits than they need. Store them in fewer bits, and compute each update in fp32 as before.
#
# ```text
# per weight    weight  gradient  two averages
# fp32            4        4          8         16 bytes
# 16 bits         4        4          4         12 bytes
# 8 bits          4        4          2         10 bytes
# ```
#
# **Guess first.** The averages are rounded after every step. The second one, of the squared gradient, is multiplied by 0.999 in a step. bf16 has two to three digits. What happens to an average that should fall?

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
# Rounded to nearest, 0.999 becomes 1 again, in every step: the average can rise and never fall. Each update is divided by the root of this average, so the updates would stay too small, and no error would say so. *Stochastic rounding* goes to one of the two neighbours at random, to the nearer one more often, and is right on average. The first average is multiplied by 0.9 in a step. Such a change is large enough for bf16, so it needs no such care.
#
# **The idea.** An update of AdamW in fp32, between lines that unpack and pack the averages. The library draws other random bits than we do below, so the weights differ a little. In ten steps of `lr=1e-3` a weight moves by about 0.01 at most: compare the difference with that.

# %%
from recipes_lib.precision.sixteen_bit_adam import (
    plain_sixteen_bit_step,
    sixteen_bit_adamw,
)

show(plain_sixteen_bit_step)

# %%
by_hand = torch.randn(1_000)
weight = torch.nn.Parameter(by_hand.clone())
optimizer = sixteen_bit_adamw([weight], lr=1e-3)
averages = [torch.zeros(1_000, dtype=torch.bfloat16) for _ in range(2)]
for step in range(1, 11):
    weight.grad = torch.randn(1_000)
    optimizer.step()
    bits = random_bits(1_000, generator=generator)
    options = dict(step=step, bits=bits, lr=1e-3)
    plain_sixteen_bit_step(by_hand, weight.grad, *averages, **options)
difference = (by_hand - weight).abs().max()
print(f"ten steps by hand and by the library differ by {difference:.0e} at most")


# %%
def with_16_bit_states():
    model = apply_activation_checkpointing(fresh())
    return model, sixteen_bit_adamw(model, lr=2e-5), plain_step


ladder.climb("16-bit AdamW states", with_16_bit_states, **checkpointed_rows)

# %% [markdown]
# Two bytes per average is not the least: one byte is possible as well. A byte has 256 values, so each average becomes a *code*: the number of an entry in a table of 256 values, close together near zero and far apart near one. 256 neighbours share one scale, the largest of their sizes. A step decodes a block, updates as usual in fp32, and encodes it again.

# %%
from recipes_lib.precision.eight_bit_adam import (
    code_table,
    decode,
    eight_bit_adamw,
    encode,
)

show(encode, decode)

# %%
average = torch.randn(4096) * 1e-3
codes, scales = encode(average, code_table(signed=True))
decoded = decode(codes, scales, code_table(signed=True))
stored = codes.numel() + 4 * scales.numel()
error = (decoded - average).norm() / average.norm()
print(f"{stored:,} bytes instead of {4 * average.numel():,}, off by {error:.1%}")

# The library's optimizer beside PyTorch's, ten steps on the same gradients.
one = torch.nn.Parameter(average.clone())
other = torch.nn.Parameter(average.clone())
fp32_states = torch.optim.AdamW([one], lr=1e-3)
eight_bits = eight_bit_adamw([other], lr=1e-3)
for _ in range(10):
    one.grad = torch.randn(4096)
    other.grad = one.grad.clone()
    fp32_states.step()
    eight_bits.step()
moved = one.detach() - average
print(f"the ten updates differ by {(other - one).norm() / moved.norm():.1%}")


# %%
def with_8_bit_states():
    model = apply_activation_checkpointing(fresh())
    return model, eight_bit_adamw(model, lr=2e-5), plain_step


ladder.climb("8-bit AdamW", with_8_bit_states, **checkpointed_rows)

# %% [markdown]
# **Why not more?** Both rows shrink the states and leave the second tower as it is. In the 8-bit row the states of the embedding keep 32 bits, as the authors of the method advise. The embedding is a fifth of this model, and a much smaller part of a large one.
#
# **How do I use it?** `TrainingArguments(optim="adamw_8bit")`. For 16-bit states torchtitan has `--optimizer.implementation fused_opt_states_bf16`. In transformers, hand our optimizer to the Trainer: `Trainer(…, optimizers=(optimizer, None))`.
#
# **What does it cost?** Slightly different updates. On a CPU the 8-bit update takes long, as the times below show.

# %% [markdown]
# ### 8. Optimizer states in host memory
#
# **What is going on?** The states are needed for a short moment per step. On a GPU they can wait in host memory, and the update itself can run there.
#
# ```text
# GPU     backward: g30 … g2 … g1           next forward
# link           g30 down … g2 down, w30 up … w1 up
# host                 AdamW 30 | AdamW 29 | … | AdamW 1
# ```
#
# **Guess first.** What does this save on a machine without a GPU?
#
# **The idea.** The host keeps the states, and an fp32 copy of each weight, its *master*. The gradient goes down, the master is updated, and the weight comes up.

# %%
from recipes_lib.memory.optimizer_offload import offload_optimizer, step_on_the_host

show(step_on_the_host)


# %%
def with_states_on_the_host():
    model = apply_activation_checkpointing(fresh())
    return model, offload_optimizer(model, lr=2e-5), plain_step


try:
    ladder.climb("states on the host", with_states_on_the_host, **checkpointed_rows)
except ValueError as reason:
    print(reason)

# %% [markdown]
# **Why not more?** On a GPU, states and most gradients leave the device. On a CPU there is nowhere to move them to, so the function refuses and names the way that works.
#
# **How do I use it?** DeepSpeed's `offload_optimizer`, torchao's `CPUOffloadOptimizer`, or FSDP2's `CPUOffloadPolicy`.
#
# **What does it cost?** Every gradient travels down and every weight travels up, once per step.

# %% [markdown]
# ### 9. LoRA
#
# **What is going on?** Do not train the weights at all. Freeze them, and put a small correction beside each linear layer: two thin matrices `A` and `B`, whose product has the shape of the weight and a low *rank*. Only they get gradients and states.
#
# ```text
# y = x Wᵀ  +  (alpha / r) · (x Aᵀ) Bᵀ        W [576, 576] is frozen, A [16, 576] and B [576, 16] train
# ```
#
# `A` and `B` are called the *adapter* of the layer.
#
# **Guess first.** In the drawing `W` has 331,776 numbers, `A` and `B` have 18,432 together. What happens to gradients, states and embedding copies?
#
# **The idea.** Beside the wide product there are two narrow ones.

# %%
from recipes_lib.fine_tuning.lora import apply_lora, plain_lora

show(plain_lora)

# %%
adapted = apply_lora(model_of_shape("tiny-llama", device="cpu"), rank=4, alpha=8)
layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
torch.nn.init.normal_(b)  # B starts at zero: an untrained adapter changes nothing
x = torch.randn(2, 5, layer.in_features)
by_hand = plain_lora(x, layer.base_layer.weight, a, b, alpha=8)
assert torch.allclose(layer(x), by_hand, atol=1e-5)
print("one adapted layer by hand and by the library: equal")


# %%
def with_lora():
    model = apply_activation_checkpointing(apply_lora(fresh(), rank=16, alpha=32))
    return model, adamw(model), plain_step


ladder.climb("LoRA", with_lora, **checkpointed_rows)

# %% [markdown]
# **Why not more?** Gradients, states and embedding copies are almost gone. What is left is the model itself, and the loss.
#
# **How do I use it?** `peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")`.
#
# **What does it cost?** It is another optimization problem, because the update of each matrix has a low rank. The loss in the row says nothing about that: `B` begins at zero, and after one or two small steps the model has hardly changed, while the baseline has. The last experiment below compares them on text that neither has seen.

# %% [markdown]
# ### 10. QLoRA
#
# **What is going on?** The frozen weights are only read, so they can be stored with few digits. QLoRA keeps each one as one of 16 levels: four bits. 64 neighbours share a scale. Each product unpacks its layer for a moment and then frees it.
#
# ```text
# y = x · unpack(W)ᵀ  +  (alpha / r) · (x Aᵀ) Bᵀ        W: 0.52 bytes per weight instead of 4
# ```
#
# **Guess first.** The weights of the blocks take an eighth of the bytes. The table of the embedding stays as it is. How many MiB of weights are left?
#
# **The idea.** Most weights are close to zero, about as in a normal distribution. So the 16 levels are the quantiles of a normal distribution, close together near zero, and each weight takes the nearest level.

# %%
from recipes_lib.fine_tuning.qlora import (
    apply_qlora,
    check_gradient_flow,
    nf4_levels,
    nf4_layer,
    plain_nf4,
)

show(nf4_levels, plain_nf4)

# %%
linear = torch.nn.Linear(128, 96, bias=False)
by_hand = plain_nf4(linear.weight.detach())
packed = nf4_layer(linear, double_quant=False, compute_dtype=torch.float32)
unpacked = packed(torch.eye(128)).T  # a product with the identity gives the weights
close = torch.isclose(by_hand, unpacked, atol=1e-5).float().mean()
error = (by_hand - linear.weight).norm() / linear.weight.norm()
print(f"{close:.1%} of the weights equal the library's")
print(f"the rounding changes the weights by {error:.0%}")


# %%
def small_model():
    """QLoRA with checkpointing: what the next experiments train."""
    return apply_activation_checkpointing(apply_qlora(fresh(), rank=16, alpha=32))


def with_qlora():
    model = small_model()
    check_gradient_flow(model, batch)
    return model, adamw(model), plain_step


checkpointed_rows["dtype"] = precision.dtype  # four-bit layers multiply in this one
ladder.climb("QLoRA", with_qlora, **checkpointed_rows)

# %% [markdown]
# **Why not more?** The table of the embedding is 108 MiB in fp32, more than all the packed blocks. In a model of eight billion weights a smaller part of the weights stands in such tables.
#
# **How do I use it?** `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")` in transformers, with a `LoraConfig`.
#
# **What does it cost?** The weights are rounded, and each product unpacks them again. The row can still take less time than that of LoRA: where 16 bits are native, the four-bit layers multiply in 16 bits, and those of LoRA in 32. `check_gradient_flow` is there for a silent trap: on CPUs with AVX512-BF16, one forward pass in evaluation mode repacks the 4-bit weights for a kernel without a backward pass. From then on no gradient reaches the lower layers, and nothing says so. `apply_qlora` switches the repacking off, and the check refuses to train if a gradient is missing.

# %% [markdown]
# ### 11. Layer streaming
#
# **What is going on?** A frozen weight is only read, and only while its block is computed. So it can wait elsewhere: a GPU's in host memory, a CPU's on the disk. In forward the blocks come one after the other, and in backward once more, in the other direction; while one block is computed, the next one is on its way. The adapters, which train, stay.
#
# ```text
# host or disk   w0 w1 w2 … w29          all the time
# device         w0, then w1 …           forward;  w29, then w28 … in backward
# ```
#
# **Guess first.** The packed weights of 30 blocks wait on the disk, and two blocks are here at a time. By how much does the peak of QLoRA fall: by most of it, or by little?
#
# **The idea.** A checkpoint around each block, which computes it once more in backward, and a block that asks for its weights whenever it runs.

# %%
from recipes_lib.memory.layer_streaming import apply_layer_streaming, streamed_by_hand

show(streamed_by_hand)


# %%
def with_streaming():
    model = apply_qlora(fresh(), rank=16, alpha=32)
    elsewhere = "host" if device == "cuda" else "disk"
    model = apply_layer_streaming(model, to=elsewhere)  # with checkpoints of its own
    return model, adamw(model), plain_step


row = ladder.climb(
    "QLoRA, streamed", with_streaming, **checkpointed_rows | {"after": "QLoRA"}
)
fell = 1 - row.peak_bytes / ladder["QLoRA"].peak_bytes
print(f"{fell:.0%} less than QLoRA")

# %% [markdown]
# **The answer** is in the print: by less than one hopes. The table of the embedding stays, and in this small model it is larger than all packed blocks. The ladder for eight billion weights, further down, has a row with streaming where blocks are most of the model.
#
# **How do I use it?** As above. DeepSpeed's ZeRO-3 with `offload_param` does it for weights that train as well.
#
# **What does it cost?** Every weight crosses the link twice a step. On a GPU that is hidden as long as a block takes longer to compute than the next one to come, so take many tokens per step.

# %% [markdown]
# The rows of Part B take their turns, each compared with the baseline.

# %%
ladder.take_turns(rounds=sizes.rounds)

# %% [markdown]
# ### 12. Dynamic batch size
#
# **What is going on?** If you do not know what fits, try it. When memory runs out, halve the micro-batches and double their number. The gradient stays that of the same batch.
#
# **The idea.** Catch the error, and try again after it.

# %%
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.predict import predict
from recipes_lib.training.dynamic_batch import (
    fit_micro_batches,
    halve_until_it_fits,
    predicted_micro_batches,
)

show(halve_until_it_fits)

# %% [markdown]
# An emulated limit stands in for a smaller device: the operator that goes over it raises the error that CUDA would raise. **Guess first:** the limit is 70 % of the peak of the QLoRA row. How many micro-batches does it take? The step without data knows. The search does not: it begins with one.


# %%
def gradient(model, micro_batches):
    return accumulate_gradients(model, batch, micro_batches=micro_batches)


def peak_in_parts(micro_batches):
    """Bytes of one gradient in so many micro-batches; no optimizer takes part."""

    def step(model, optimizer):
        gradient(model, micro_batches)

    def build():
        return small_model(), None, step

    return predict(build).peak


limit = int(0.7 * ladder["QLoRA"].predicted_bytes)
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
# A failed attempt leaves nothing behind: the file shows what that takes.
#
# **How do I use it?** `fit_micro_batches`, as above. `auto_find_batch_size=True` in the Trainer restarts the training with a smaller batch and does not add accumulation, so it changes the training. Ours keeps the batch.
#
# **What does it cost?** The time of the failed attempts.

# %% [markdown]
# ## Everything combined
#
# **What is going on?** There are two combinations. The first one is for time: the step in 16 bits, in compiled blocks, with a loss in chunks. All weights train, and nothing is computed twice. It needs native 16-bit products.
#
# The second one is for memory. Each recipe removes one term, so we put together those that remove different ones:
#
# | term | removed by |
# |---|---|
# | weights | QLoRA: four bits |
# | gradients, states, embedding copies | adapters: hardly anything trains; their states take 8 bits |
# | activations | checkpointing, in compiled blocks, in 16 bits |
# | loss | chunked cross-entropy, the *loss in chunks*: output layer and loss for a few hundred tokens at a time |
#
# The last one is a recipe of [notebook 04](../notebooks/04_training_long_sequences.ipynb), where long texts need it. Accumulation would shrink the loss as well, but each micro-batch unpacks all four-bit weights again. The step in backward stays out: adapters have hardly any gradients to free.
#
# **Guess first.** Which term is the largest one left in the second combination?

# %%
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy

fast_row = "16 bits, compiled, chunked loss"


def fast_and_whole():
    """For time: every weight trains, and nothing is computed twice."""
    model = compiled_if_possible(fresh())
    model = apply_chunked_cross_entropy(model)
    return model, adamw(model), in_mixed_precision()


together = dict(group="together", dtype=precision.dtype)
if native:
    ladder.climb(fast_row, fast_and_whole, **together)


# %%


def small_in_every_term(model):
    """For memory."""
    model = apply_qlora(model, rank=16, alpha=32)
    model = compiled_if_possible(model)  # before checkpointing, which stays outside
    model = apply_activation_checkpointing(model)
    return apply_chunked_cross_entropy(model)


def everything():
    model = small_in_every_term(fresh())
    return model, eight_bit_adamw(model, lr=2e-5), in_mixed_precision()


ladder.climb("everything combined", everything, **together)

# %% [markdown]
# **Why not more?** The prediction of the first combination is a few per cent too high. In this step PyTorch adds the two gradients of the tied table in place, and the account counts a third table for the sum.
#
# In the second combination the weights are the largest term now, and a large part of them is the table of the embedding, which nothing here makes smaller.
#
# ## The ladder
#
# The two combinations take their turns with the baseline, and the table is complete.

# %%
profiled = ["everything combined"]
if native:
    profiled.insert(0, fast_row)
ladder.take_turns(rounds=sizes.rounds, profile=profiled)
ladder

# %%
ladder.chart()

# %% [markdown]
# ### Where does the rest of the time go?
#
# A share of the limit below 100 % says that time goes elsewhere. The profiler of PyTorch times each operator of a step; here they are added up by kind. The dark ticks are the limits: the multiplications of the step at the rate of the setup. *Other* is Python itself, the calls and waiting. The profiler slows the step down, so compare the parts with each other.

# %%
from recipes_lib.core.measure.operator_profile import KINDS
from recipes_lib.report.bars import Bars, bars
from recipes_lib.report.style import OPERATORS, three_digits

profiles = ladder.profiles.values()
rows = [ladder[name] for name in ladder.profiles]
bars(
    list(ladder.profiles),
    Bars(
        "seconds per step, by kind of operator",
        {kind: [profile.get(kind, 0.0) for profile in profiles] for kind in KINDS},
        [three_digits(sum(profile.values())) for profile in profiles],
        # What the multiplications of a row alone would take.
        marks=[row.share_of_limit * row.seconds for row in rows],
        colors=dict(zip(KINDS, OPERATORS)),
    ),
    title="Where the seconds of a step go",
    predicted="the products alone, at the machine's rate",
)

# %% [markdown]
# Three things keep a step from its limit.
#
# 1. **Casts and copies.** In plain mixed precision every product casts what it reads, in an operator of its own. Compiled blocks cast inside of their kernels, and this part nearly vanishes.
# 2. **Products that are small.** The setup measured one large square. Keys and values of this model are 192 numbers wide, and attention multiplies matrices of 64 × 64 for each head: they reach a much lower rate, so even *matrix products* alone take longer than the limit.
# 3. **The optimizer, the loss, and the calls themselves**, which multiply no matrices at all.
#
# One number needs care. The loss in chunks multiplies only for the tokens of the answers, and the share counts the output layer for all tokens. By the operations that it really does, the share is lower:

# %%
from recipes_lib.training.gradient_accumulation import count_targets

if native:
    vocabulary, width = skeleton.get_output_embeddings().weight.shape
    targets = int(count_targets(batch))  # tokens of the answers
    # Forward and two gradients, a multiplication and an addition each.
    left_out = 3 * 2 * vocabulary * width * (tokens - targets)
    done = ladder[fast_row].operations - left_out
    counted = ladder[fast_row].share_of_limit
    print(f"share by the operations of the plain step  {counted:.0%}")
    share = counted * done / ladder[fast_row].operations
    print(f"share by the operations that it does       {share:.0%}")

# %% [markdown]
# ## Does it still learn?
#
# Memory is worth nothing if the model does not get better. Full fine-tuning, LoRA in fp32 and the combination train on the same batches, from the same pretrained weights. What counts is the loss on functions from modules that none of them has seen.

# %%
from recipes_lib.core.data.evaluation import evaluate
from recipes_lib.report.lines import lines


def learn(model, optimizer, step):
    """The held-out loss before training and after every few steps."""
    # All rows are padded to one length: compiled blocks compile once.
    data = batches(train, **shaped, pad_token_id=padding, device=device)
    curve = [(0, evaluate(model, held_out, pad_token_id=padding))]
    for number in range(1, sizes.steps + 1):
        rows = next(data)
        # In fp16 a step is skipped while the loss scale is too large. It does not count.
        for _ in range(20):
            moved = step(model, optimizer, rows)
            if moved:
                break
        assert moved, "no loss scale was small enough"
        if number % 2 == 0 or number == sizes.steps:
            curve.append((number, evaluate(model, held_out, pad_token_id=padding)))
    return curve


def fp32_step(model, optimizer, rows):
    """Returns whether the weights have moved, as the next one does."""
    model(**rows, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return True


def half_step(precision, model, optimizer, rows):
    with precision.autocast():
        loss = model(**rows, use_cache=False).loss
    precision.backward(loss)
    moved = precision.step(optimizer)
    optimizer.zero_grad()
    return moved


# %%
def full_fine_tuning():
    model = load_model(sizes.learner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    return learn(model, optimizer, fp32_step)


def lora_in_fp32():
    model = apply_lora(load_model(sizes.learner), rank=16, alpha=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    return learn(model, optimizer, fp32_step)


def combined_learns():
    model = small_in_every_term(load_model(sizes.learner))
    step = partial(half_step, mixed_precision())
    return learn(model, eight_bit_adamw(model, lr=5e-4), step)


curves = {}
for name, run in {
    "full fine-tuning, fp32": full_fine_tuning,
    "LoRA, fp32": lora_in_fp32,
    "everything combined": combined_learns,
}.items():
    seed_everything(0)
    curves[name] = run()
    points = "   ".join(f"step {step}: {loss:.2f}" for step, loss in curves[name])
    print(f"{name:<23}{points}")

# %%
lines(
    curves,
    title="All three learn",
    xlabel="optimizer step",
    ylabel="held-out loss, nats per token",
)

# %% [markdown]
# All three learn. The combination begins and ends a little higher than the other two, in a tenth of the memory. Read the distances with care: this is one run of each, on a few held-out answers, with learning rates that were not tuned. With other pairs of text the order of the three may change. A curve can also rise between two points: a run of so few steps at a constant rate is noisy. [Notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb) shows how to compare two models with an interval, and the recorded run of recipe 7 in [notebook 03](../notebooks/03_optimizing_inference_speed.ipynb) compares two ways of training with three seeds.
#
# Before training only the combination differs from the other two, and the distance at step 0 is what its four bits cost. The note on SmolLM2's source above says how to read it: weights that come from a file of four-bit groups have paid a part of this price already.

# %% [markdown]
# ## The pictures
#
# **Over time.** The step of the first figure again, and with it the step of everything combined, on the same scale. On a CPU the account sees operators and not the inside of compiled code, so for this picture the blocks run uncompiled: the combination's peak in the picture is a little higher than in the table, and than the dashed line, which is that of the compiled step.

# %%
ends = ("baseline", "everything combined")
timeline_chart(
    {name: ladder.timelines[name] for name in ends},
    predicted={name: ladder.predictions[name].timeline for name in ends},
    title="The same batch, before and after",
)

# %% [markdown]
# **All rows.** In each small picture, look for the highest point. Is it at the end of forward, or at the end of backward? In the first case activations and loss have to shrink, in the second one gradients and their copies. Rows with compiled blocks are drawn with uncompiled ones here, too.

# %%
timeline_chart(ladder.timelines, columns=3, title="Memory over one step, row by row")

# %% [markdown]
# **By kind.** The moment of the peak, as it was predicted: which part does each recipe remove?

# %%
from recipes_lib.report.style import KIND_COLORS, WITHOUT_DATA


def kinds_chart(at_peak, title):
    """What the predicted peak of each row consists of."""
    parts = {}
    for kind in KIND_COLORS:
        parts[kind] = [row[kind] / 2**30 for row in at_peak.values()]
    sums = [three_digits(sum(row)) for row in zip(*parts.values())]
    column = Bars("GiB at the moment of the peak", parts, sums, colors=KIND_COLORS)
    return bars(list(at_peak), column, title=title, source=WITHOUT_DATA)


at_peak = {name: each.at_peak() for name, each in ladder.predictions.items()}
kinds_chart(at_peak, "What the peak consists of")

# %% [markdown]
# <!-- numbers:gpu-01 -->
# <!-- end -->
#
# ## The same ladder for eight billion weights
#
# In the small model the recipes of Part A look weak, because the second tower is almost as high as the first. Is that different with eight billion weights and 4,096 tokens? Such a step does not fit here. Without data it takes no memory, only seconds. And it needs no 32 blocks: they are alike, so each of them adds the same bytes at the same moment. `any_size` takes the steps of models with two, three and four blocks, and follows every moment to 32.

# %%
import time

from recipes_lib.core.predict.any_size import any_size

texts = torch.randint(0, 128_256, (8, 512), device=device)
long_batch = {"input_ids": texts, "labels": texts}  # 4,096 tokens


def long_step(model, optimizer):
    model(**long_batch, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def long_step_in_four(model, optimizer):
    accumulate_gradients(model, long_batch, micro_batches=4)
    optimizer.step()
    optimizer.zero_grad()


def large(layers, recipes=(), optimizer_of=adamw, step=long_step):
    """`build` of a Llama-3.1-8B of so many blocks, with the recipes in their order."""

    def build():
        model = model_of_shape("llama-3.1-8b", layers=layers)
        for recipe in recipes:
            model = recipe(model)
        return model, optimizer_of(model), step

    return build


checkpoints = apply_activation_checkpointing
in_backward = partial(apply_optimizer_in_backward, lr=2e-5, fused=True)
lora = partial(apply_lora, rank=16, alpha=32)
qlora = partial(apply_qlora, rank=16, alpha=32)
chunks = apply_chunked_cross_entropy
streamed = partial(apply_layer_streaming, to="disk")
large_rows = {
    "baseline": dict(),
    "gradient accumulation": dict(step=long_step_in_four),
    "activation checkpointing": dict(recipes=[checkpoints]),
    "… and step in backward": dict(recipes=[checkpoints], optimizer_of=in_backward),
    "… and 16-bit states": dict(
        recipes=[checkpoints], optimizer_of=partial(sixteen_bit_adamw, lr=2e-5)
    ),
    "… and 8-bit states": dict(
        recipes=[checkpoints], optimizer_of=partial(eight_bit_adamw, lr=2e-5)
    ),
    "… and LoRA": dict(recipes=[lora, checkpoints]),
    "QLoRA, no checkpointing": dict(recipes=[qlora]),
    "QLoRA, checkpointing": dict(recipes=[qlora, checkpoints]),
    "… and a loss in chunks": dict(recipes=[qlora, checkpoints, chunks]),
    "… and streamed": dict(recipes=[qlora, chunks, streamed]),
}
large_peaks = {}
began = time.perf_counter()
for name, options in list(large_rows.items())[: sizes.large_rows]:
    step = any_size(partial(large, **options), layers=(2, 3))
    large_peaks[name] = step.at(layers=32)
print(f"{len(large_peaks)} rows in {time.perf_counter() - began:.0f} s")
kinds_chart(large_peaks, "Llama-3.1-8B, 4,096 tokens, fp32 but for QLoRA: not run")

# %% [markdown]
# The equation has eight of the eleven rows, and answers at once.

# %%
skeleton_8b = model_of_shape("llama-3.1-8b", device="meta")
plain_8b = equation.plain_step(skeleton_8b, rows=8, length=512)
checkpointed_8b = equation.with_checkpointing(plain_8b)
lora_8b = equation.with_adapters(plain_8b, rank=16)
qlora_8b = equation.in_four_bits(lora_8b)
small_8b = equation.with_checkpointing(qlora_8b)
by_arithmetic = {
    "baseline": plain_8b,
    "activation checkpointing": checkpointed_8b,
    "… and 16-bit states": equation.with_states_in(checkpointed_8b, bits=16),
    "… and 8-bit states": equation.with_states_in(checkpointed_8b, bits=8),
    "… and LoRA": equation.with_checkpointing(lora_8b),
    "QLoRA, no checkpointing": qlora_8b,
    "QLoRA, checkpointing": small_8b,
    "… and a loss in chunks": equation.with_chunked_loss(small_8b),
}
equation_off = {}
print(f"{'GiB':<26}without data   by arithmetic")
for name, parts in large_peaks.items():
    if name not in by_arithmetic:
        continue
    peak = sum(parts.values())
    expected_peak = by_arithmetic[name].peak
    equation_off[name] = expected_peak / peak - 1
    both = f"{peak / 2**30:12.1f}{expected_peak / 2**30:16.1f}"
    print(f"{name:<26}{both}  {equation_off[name]:+.1%}")

# %% [markdown]
# Two rows differ by more than 1 %. The equation stores all states in 8 bits, and the recipe keeps those of the embedding in 32. And with a loss in chunks the peak is a block that is computed again, which the equation takes a little too large.
#
# Back to the question: are the recipes of Part A weak? With full fine-tuning they are. The activations are a third of the baseline's peak, and checkpointing removes nearly all of them, but the gradients take their place, as in our small model. First weights, states and gradients have to shrink. Compare the three rows of QLoRA. With four bits for the weights, the row *without* checkpointing is more than three times as high as the row with it. Once the activations are gone as well, the loss, all of *other* and half of the activations, is more than a third of what is left, and a loss in chunks removes most of that. Then the weights are most of what is left, and streamed they wait elsewhere, but for the two tables. So what a recipe saves depends on the others: ask first what is at the peak.
#
# ## Out-of-memory doctor
#
# The same as a decision: given a model, a device and the text of an error, what should be tried first? In the example PyTorch holds 2.40 GiB that it cannot use, because they are in pieces. A setting helps, and the first line of the answer names it. The other lines are predictions. `python -m recipes_lib doctor` does the same in a terminal.

# %%
from recipes_lib.workflows.out_of_memory_doctor import diagnose

in_16_bits = model_of_shape("llama-3.1-8b", dtype=torch.bfloat16, device="meta")
error = (
    "CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of "
    "24.00 GiB of which 512.00 MiB is free. Of the allocated memory 20.10 GiB is "
    "allocated by PyTorch, and 2.40 GiB is reserved by PyTorch but unallocated."
)
diagnose(
    error=error, model=in_16_bits, batch_size=4, seq_len=2048, memory_bytes=24 * 2**30
)

# %% [markdown]
# ## Take this into your code
#
# A whole training loop, on a model of the hub. Put your own batches in the place of `loader`. `resolve` gives the folder of the embedded model where the hub cannot be reached; any other name or folder passes through. The two losses that it prints belong to two different batches.

# %%
from transformers import AutoModelForCausalLM

from recipes_lib.core.model.default_model import resolve

# Any causal LM of the hub, or a folder.
name = resolve("HuggingFaceTB/SmolLM2-135M-Instruct")
loader = batches(train, batch_size=8, pad_token_id=padding, device=device)

model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
model.train()  # from_pretrained returns a model in evaluation mode
model = apply_qlora(model, rank=16, alpha=32)  # weights in four bits, adapters train
apply_chunked_cross_entropy(model)  # no table of all logits
apply_activation_checkpointing(model)  # activations of one block at a time
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
precision = mixed_precision()  # the fastest of this machine
for step, rows in zip(range(2), loader):
    with precision.autocast():
        loss = model(**rows, use_cache=False).loss
    precision.backward(loss)
    precision.step(optimizer, max_grad_norm=1.0)
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
del model, optimizer, loss

# %% [markdown]
# The same as arguments of the libraries: `Trainer`, or TRL's `SFTTrainer`, with peft and bitsandbytes. `per_device_train_batch_size × gradient_accumulation_steps` is the batch.

# %%
import warnings

from peft import LoraConfig
from transformers import BitsAndBytesConfig, TrainingArguments

# Newer versions of transformers say activation_checkpointing, and warn.
warnings.simplefilter("ignore", FutureWarning)

arguments = TrainingArguments(
    output_dir="runs/take-away",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=1,  # recipe 1
    gradient_checkpointing=True,  # recipe 2; on a GPU also the next line, for recipe 3
    # gradient_checkpointing_kwargs={"offload": True},
    bf16=precision.dtype == torch.bfloat16,  # recipe 4
    fp16=precision.dtype == torch.float16,
    # torch_compile=True,  # recipe 5; the Trainer compiles the whole model
    optim="adamw_torch_fused",  # recipe 7: "adamw_8bit"; for adapters the states are small
    # use_liger_kernel=True,  # the loss in chunks, on a GPU with liger-kernel installed
    use_cpu=device == "cpu",
    report_to="none",
)
adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
four_bits = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
)
print(arguments.optim, adapters.r, four_bits.bnb_4bit_quant_type)

# %% [markdown]
# And as one command, on pairs of your own, with the held-out loss before and after:
#
# ```bash
# python -m recipes_lib finetune --data pairs.jsonl --method qlora --output runs/mine
# ```
#
# ## What it costs, and when not to use it
#
# | recipe | price | not when |
# |---|---|---|
# | gradient accumulation | gradients stay alive; small products are slower | the batch fits |
# | activation checkpointing | about one more forward pass | activations are not at the peak |
# | activation offloading | every byte travels twice | checkpointing is enough: it is simpler |
# | mixed precision | 16-bit copies of the weights | a CPU without 16-bit units |
# | compiled blocks | seconds of compiling, again for new shapes | a run of a few dozen steps |
# | step in backward | no accumulation, no clipping, no loss scaling | you need one of these |
# | 16-bit states | rounded averages; the update itself takes longer | the states are small, as with LoRA |
# | 8-bit states | slightly different updates; slow on a CPU | the states are small, as with LoRA |
# | states on the host | traffic over the link in every step | there is no GPU, or 8 bits are enough |
# | LoRA | an update of low rank | teaching much new knowledge |
# | QLoRA | rounded weights; unpacking in every product | the 16-bit weights fit |
# | layer streaming | every weight crosses the link twice a step | the weights fit |
#
# **Measured here: two recipes that save less than one expects.** *Activation offloading* ends at the same peak as checkpointing, because both leave the tower of gradients as it is. *Mixed precision* saves no memory on a batch this small; its gain is time. Both stay in the ladder, so that you see it.
#
# **What goes together.** Recipes that remove different terms: see the table of *everything combined*. *8-bit states* go with LoRA, as there, but little is left to save. **What does not.** *Step in backward* with accumulation, clipping or fp16. The [cheatsheet](../CHEATSHEET.md) has all recipes side by side, and [TRAPS.md](../TRAPS.md) lists settings that train something else without an error.
#
# ## Exercises
#
# 1. Double the tokens per row. Which rows change, and by what factor? Predict first, with `equation.plain_step`.
# 2. Checkpoint every second block: `apply_activation_checkpointing(model, every=2)`. When would you choose that?
# 3. Add *step in backward* to the LoRA row. Use the equation to explain why almost nothing happens.
#
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
from itertools import pairwise

from recipes_lib.core.measure.machine import fast

ladder.note(
    held_out_loss=curves,
    naive_error=naive_error,
    micro_batches=[expected, fitted.micro_batches],
    source=model_source(),
)

allowed = dict.fromkeys([row.name for row in ladder.rows], 0.005)
if can_compile:
    allowed |= {compiled_row: 0.02, "everything combined": 0.02, fast_row: 0.06}
for row in ladder.rows:
    assert abs(row.prediction_error) < allowed[row.name], f"{row.name} as predicted"
if not fast():  # in models as small as those of FAST mode, what is left out counts
    assert abs(arithmetic.peak / baseline.peak_bytes - 1) < 0.01, "so is the equation"
assert max(map(abs, equation_off.values())) < 0.05, "also for eight billion weights"

# A GPU adds up in another order each time.
tolerance = 1e-3 if device == "cpu" else 2e-2
same_training = ["gradient accumulation", "activation checkpointing"]
same_training += ["activation offloading", "step in backward"]
for name in same_training:
    difference = abs(ladder[name].loss - ladder["baseline"].loss)
    assert difference < tolerance, f"{name} is the same training"
assert naive_error > 0.01, "the popular accumulation is not"

staircase = ["baseline", "activation checkpointing", "16-bit AdamW states"]
staircase += ["LoRA", "QLoRA", "everything combined"]
peaks = [ladder[name].peak_bytes for name in staircase]
for higher, lower in pairwise(peaks):
    assert lower < 1.01 * higher, "none is higher than the one before"
assert ladder.saved("everything combined") > 0.7
found = fitted.micro_batches
assert 1 < expected <= found <= 2 * expected, "the search finds the prediction"
for name, curve in curves.items():
    assert curve[-1][1] < curve[0][1], f"{name} learns"
print(f"all checks passed: {ladder.saved('everything combined'):.0%} less peak memory")
