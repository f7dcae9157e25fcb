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
# > **A training step of SmolLM2-135M takes 4,727 MiB with all weights in fp32. With what fits together: 1,141 MiB for all weights (-76%, in 0.87× (0.84–0.87) the time), and 281 MiB for adapters on four bits (-94%, in 0.57× (0.55–0.59) the time).**
# >
# > | what trains | recipes | peak, MiB | memory | time | H100, 1 billion: memory, time |
# > |---|---|--:|--:|--:|--:|
# > | all weights, little time | 16 bits, compiled blocks, a loss in chunks | 2,890 | -39% | 0.50× (0.50–0.51) | -50%, 0.34× |
# > | all weights, the smallest | that, with checkpoints, and 8-bit AdamW that steps in backward | 1,141 | -76% | 0.87× (0.84–0.87) | -82%, 0.56× |
# > | adapters, 16 bits | LoRA, with compiled blocks, checkpoints and a loss in chunks | 431 | -91% | 0.53× (0.51–0.56) | -93%, 0.39× |
# > | adapters, four bits, as peft prepares them | QLoRA, with 16 bits, checkpoints and a loss in chunks | 450 | -90% | 0.75× (0.75–0.93) | -92%, 1.00× |
# > | adapters, the smallest | that, with the embedding in 16 bits, too, and compiled blocks | 281 | -94% | 0.57× (0.55–0.59) | |
# > | *what is often promised for all together* | | | -70% | 0.20× | |
# >
# > The H100 took the shape of Llama 3.2 1B and 8,192 tokens, 57,144 MiB and 0.33 s in fp32 (products as TF32); its times are medians of three steps, without turns. On the CPU each row was predicted before it ran, by the same count on tensors without data: off by 0.1% at most.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-28.
# <!-- end -->
#
# A step on the CPU has 24 texts of 72 tokens. 13 % of the tokens carry a loss; where all do, a loss in chunks saves less time.
#
# A training step runs out of memory, and the error does not say what filled it. This notebook trains one small model, SmolLM2-135M, in many ways, predicts the memory of each way, measures it, and compares gradients, weights or losses with those of the plain step: most recipes leave the gradients as they are, and the prints say which do not.
#
# | | |
# |---|---|
# | **One card of 24 GB** | by arithmetic ([how far it holds](../docs/predictions.md)): 8 billion weights train as LoRA on 16 bits, 16.7 GiB, and 14 billion as QLoRA, 11.7. Copy [these lines](#Take-this-home), give them your model and texts of 1,024 tokens, and compare the peak that they print with [the table of cards](#What-fits-your-card) |
# | **In a hurry?** | [What fits your card](#What-fits-your-card), [which recipe when](#Which-recipe-when), [lines to copy](#Take-this-home) |
# | **You need** | Python and the basics of PyTorch; no GPU, no login |
# | **Time** | ten minutes to a quarter of an hour to run on two CPU cores, by how fast they are in that hour; about forty-five to read |
# | **Hardware that has run this** | two CPU cores. An H100 ran every row but *everything combined*, in [larger sizes](#Notebook-01-on-a-GPU), and nothing after them |
#
# ## Setup
#
# Where the package is missing, as on Colab, this cell installs it.

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
import copy
import gc
import logging
import tempfile
import warnings
from functools import partial

import datasets
import torch
import transformers
from torch.nn import functional as F

from recipes_lib.core.measure.free_memory import keep_freed_memory
from recipes_lib.core.measure.machine import choose_sizes, machine, seed_everything
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape
from recipes_lib.report.show import show
from recipes_lib.report.style import mib

# The output stays short. peft still calls checkpointing by its older name.
warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
logging.disable(logging.WARNING)
datasets.disable_progress_bars()
transformers.utils.logging.disable_progress_bar()
keep_freed_memory()  # a CPU's steps are slower where the system takes freed memory back
device = machine().device
print(machine())

# %% [markdown]
# A GPU gets a larger model. The *tier* is the class of this machine.

# %%
# On a CPU the real SmolLM2-135M. layers=None means all of its 30 blocks.
smollm2 = dict(shape="smollm2-135m", layers=None, pretrained=True, rows=24, tokens=72)
# The model that learns, turns on the clock, and whether blocks compile where they can.
smollm2 |= dict(learner="smollm2", turns=2, compiles=True)
# The shapes of *What fits your card*, and the two of them that also take dry steps.
five = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-14b", "qwen2.5-32b")
smollm2 |= dict(cards=five, second="llama-3.1-8b", largest="qwen3-14b", dry_steps=3)
# On a GPU a shape with random weights, of which plain fp32 training fits.
llama = smollm2 | dict(shape="llama-3.2-1b", pretrained=False, tokens=256)
# Continuous integration checks that the code works, not how fast it is.
tiny = dict(shape="tiny-smollm2", layers=None, pretrained=False, rows=4, tokens=64)
tiny |= dict(learner="tiny-smollm2", turns=1, compiles=False, cards=("tiny-llama",))
tiny |= dict(second="tiny-llama", largest="tiny-llama", dry_steps=1)

sizes = choose_sizes(
    cpu=smollm2,
    gpu16=llama | dict(layers=3, rows=8),
    gpu24=llama | dict(layers=6, rows=16),
    gpu80=llama | dict(layers=None, rows=32),
    fast=tiny,
)
sizes

# %% [markdown]
# The text is Python's own standard library: the question is a function, the answer its docstring. Only the answer carries a loss: what stands after ⟧.

# %%
from recipes_lib.core.data import batches, load_instructions
from recipes_lib.core.data.tokens_and_labels import decode_with_mask
from recipes_lib.core.model.default_model import model_source, resolve, source_note

tokenizer = load_tokenizer()
padding = tokenizer.pad_token_id
options = dict(max_tokens=sizes.tokens)
train = load_instructions(tokenizer, limit=100, **options)
held_out = load_instructions(tokenizer, split="validation", limit=8, **options)


def batches_of(texts):
    """Endless batches, all of one length, so that compiled blocks compile once."""
    shape = dict(batch_size=texts, length=sizes.tokens)
    return batches(train, pad_token_id=padding, device=device, **shape)


# All rows of the ladder below train on this one batch: 24 texts of 72 tokens on a CPU.
batch = next(batches_of(sizes.rows))
answers = (batch["labels"][:, 1:] != -100).sum().item()
print(decode_with_mask(train[1], tokenizer))
print(f"\n{answers} of {batch['labels'].numel():,} tokens in the batch carry a loss")
print(f"SmolLM2 comes from: {model_source()}\n{source_note()}")

# %% [markdown]
# ## The training loop
#
# Every recipe changes this step.


# %%
def fresh():
    """The model of this notebook, each time with the same weights."""
    seed_everything(0)
    if sizes.pretrained:
        return load_model("smollm2")
    return model_of_shape(sizes.shape, layers=sizes.layers)


def adamw(model, lr=2e-5):
    """PyTorch's own AdamW. `fused` updates all weights without temporary tensors."""
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def train_step(model, optimizer, texts=batch):
    loss = model(**texts, use_cache=False).loss  # forward
    loss.backward()  # a gradient for each weight
    optimizer.step()  # each weight moves a little
    optimizer.zero_grad()  # the gradients are freed
    return loss.item()


# %% [markdown]
# A loop that keeps `out = model(**texts)` keeps the logits until the next step. This one keeps the loss alone.
#
# ## What runs out: one equation
#
# Five things fill the memory of a step.
#
# - **Weights**: in fp32 4 bytes each.
# - **States**: AdamW keeps two averages per weight, of its gradient and of the gradient's square: 8 bytes.
# - **Gradients**: one number per weight: 4 bytes.
# - **Activations**: what forward keeps for backward. They grow with the number of tokens. (Not with its square: PyTorch's attention keeps no table of scores. In fp32 on a GPU it does, where a model has fewer heads of keys than of queries.)
# - **Logits**: the scores of all words of the vocabulary, for each token. When backward reaches the loss, three tables of that size exist: the logarithms of the probabilities, their gradients, and the gradients of the logits. So 12 bytes per token and word.
#
# The first three are **16 bytes per weight**, however short the text is. But the five are not all there at the same moment. The model is a stack of *blocks* that are built alike. In each block forward leaves activations. Backward goes the other way, uses them up, and leaves gradients. Two moments matter:
#
# $$\text{peak} = \text{weights} + \text{states} + \max\begin{cases}\text{activations} + \text{logits} & \text{backward begins}\\ \text{gradients} + \text{embedding copies} & \text{the last gradient arrives}\end{cases}$$
#
# SmolLM2 uses one matrix twice, as the embedding at its input and as the output layer at its end: it is *tied*. It gets a gradient from both ends, and the sum of both is a third tensor: two **embedding copies** more than the gradients need.


# %%
def bytes_of_a_step(model, tokens):
    """The terms of the equation in fp32, for blocks as in Llama, Qwen and Mistral."""
    config = model.config
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    of_norm = 3 * config.hidden_size  # x, x / rms(x), and that times its weight
    of_attention = 2 * (queries + keys)  # queries and the result, keys and values
    of_mlp = 4 * config.intermediate_size  # gate, its activation, up, their product
    of_block = 2 * of_norm + of_attention + of_mlp  # numbers that a token leaves
    weights = model.num_parameters()
    copies = 2 * config.vocab_size * config.hidden_size
    numbers = {
        "weights": weights,
        "states": 2 * weights,
        "gradients": weights,
        "embedding copies": copies if config.tie_word_embeddings else 0,
        "activations": tokens * (config.num_hidden_layers * of_block + of_norm),
        "logits": 3 * tokens * config.vocab_size,
    }
    return {name: 4 * count for name, count in numbers.items()}


# On "meta" a model has shapes and takes no memory.
skeleton = model_of_shape(sizes.shape, layers=sizes.layers, device="meta")
terms = bytes_of_a_step(skeleton, tokens=sizes.rows * sizes.tokens)
ground = terms["weights"] + terms["states"]
begins = ground + terms["activations"] + terms["logits"]
ends = ground + terms["gradients"] + terms["embedding copies"]
arithmetic = max(begins, ends)
for name, size in (terms | {"backward begins": begins, "backward ends": ends}).items():
    print(f"{name:<17}{mib(size):>11}")

# %% [markdown]
# ## Baseline
#
# Arithmetic knows blocks of one kind. A prediction of any step is the step itself, on PyTorch's *fake tensors*: they have a shape and no memory, and every byte that the step would take is counted.

# %%
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.dry_run import dry_run

with dry_run():
    model = fresh()
    optimizer = adamw(model)
    train_step(model, optimizer)  # AdamW makes its states
    with PeakMemory() as memory:
        train_step(model, optimizer)
dry_peak = memory.peak
del model, optimizer
print(f"predicted: {mib(dry_peak)}")

# %% [markdown]
# Each recipe is one more word in `build(…)`, and adds a row to a table, the *ladder*. `ladder.climb` predicts a step as the cell above does. Then it takes the step, and counts every byte. The printed loss is that before the first update.
#
# **Guess first.** As a curve, the two moments are two *towers*. What does the curve look like between them?

# %%
from recipes_lib.report.charts.memory_timeline import timeline_chart
from recipes_lib.report.ladders.memory import MemoryLadder

gc.collect()
gc.freeze()  # to count bytes, Python looks at all objects: not at those of the imports
ladder = MemoryLadder("01_large_models_limited_hardware")


def build(*recipes, optimizer_of=adamw, step=train_step, base=fresh):
    """What a row is built from: a model with recipes, its optimizer, and its step."""

    def make():
        model = base()
        for recipe in recipes:
            model = recipe(model)
        return model, optimizer_of(model), step

    return make


def towers(name):
    """The bytes at both moments of the equation, in a row of the ladder."""
    first, second = ladder.timelines[name].towers()
    print(f"first tower {mib(first.total)}, second tower {mib(second.total)}")


baseline = ladder.climb("baseline", build(), group="in 32 bits")
towers("baseline")
print(f"arithmetic is off by {arithmetic / baseline.peak_bytes - 1:+.2%}")
timeline_chart(
    {"baseline": ladder.timelines["baseline"]},
    predicted={"baseline": ladder.predictions["baseline"].timeline},
    both_towers=True,
    title="The plain step: activations pile up, then gradients take their place",
)

# %% [markdown]
# **The answer.** Apart from one short bump just after the loss it falls until the embedding copies make the second tower: backward frees more activations than it makes gradients. (The curve counts the logarithms of the probabilities as activations. *Other* are their gradients, those of the logits, and embedding copies.)
#
# **Part A** attacks the first tower, which grows with the tokens. In the prints it is called *backward begins* or *forward ends*. **Part B** attacks the second one, and the ground of both: weights and states.
#
# **Which tower is higher on your GPU?** Take two steps (of one short text, where yours do not fit), and look at `torch.cuda.max_memory_allocated()`. Then call `torch.cuda.reset_peak_memory_stats()`, and take two with half as many tokens. If it falls by much, the first tower is higher: take Part A. If it stays, take Part B. If not even one short text fits, that is Part B, too.
#
# All bytes here are those of tensors. On a GPU leave a fifth more for holes between them, and half a GiB for CUDA itself. The fifth is a rule of thumb; `torch.cuda.max_memory_reserved()` shows what it is on yours, and `PYTORCH_ALLOC_CONF=expandable_segments:True` in the environment leaves fewer holes.
#
# <!-- numbers:held_elsewhere-01 -->
# **How far predictions of this kind hold elsewhere.** 12 steps on an H100 that was limited to 24 GB, of up to 8 billion weights, are predicted on a CPU to 0.1% at most, after two faults that they showed were mended. Of 41 peaks that others have published, 37 are within 5 %; of 8 of them reserved bytes are known, too, +4% to +25% beside those of tensors, 7 of them by no more than a fifth ([predicted peaks](../docs/predictions.md)).
# <!-- end -->
#
# Each idea is tried on two narrow blocks first. Its gradients are compared with those of the plain step, and with those of the library.

# %%
small = model_of_shape("tiny-llama", device="cpu").train()
words = torch.randint(0, small.config.vocab_size, (4, 12))  # 4 texts of 12 tokens
# A label of -100 says: no loss here. So the texts have answers of unequal lengths.
no_answer = torch.rand(words.shape) < 0.5
small_batch = {"input_ids": words, "labels": words.masked_fill(no_answer, -100)}


def gradients_after(backward, model=small):
    """Call `backward()`, and return the gradients that it left as one vector."""
    model.zero_grad()
    backward()
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found)


def loss_of(model):
    return model(**small_batch, use_cache=False).loss


def gradients_of(model):
    return gradients_after(lambda: loss_of(model).backward(), model)


right = gradients_of(small)
print(f"{right.numel():,} gradients")

# %% [markdown]
# ## Part A: what grows with the tokens
#
# ### 1. Gradient accumulation
#
# **What happens.** Split the batch into micro-batches, run one after the other, add up their gradients, and update the weights once.
#
# **Guess first.** With four micro-batches, activations and logits shrink to a quarter. Does the peak fall by half?
#
# **The idea** is a loop, because autograd adds to `.grad` by itself. One division needs care: a model returns the *mean* loss over the answer tokens that it sees, and in the whole batch every token weighs the same. transformers' models divide by `num_items_in_batch` if they get it. A popular loop divides by the number of micro-batches instead.


# %%
def parts_of(texts, count):
    """The batch in micro-batches."""
    split = {name: tensor.chunk(count) for name, tensor in texts.items()}
    return [dict(zip(split, part)) for part in zip(*split.values())]


def accumulate(model, texts, count):
    # The first label of a text has nothing before it that could predict it.
    targets = (texts["labels"][:, 1:] != -100).sum()
    total = 0.0
    for part in parts_of(texts, count):
        loss = model(**part, use_cache=False, num_items_in_batch=targets).loss
        loss.backward()  # adds to .grad
        total += loss.item()
    return total


def mean_of_means():
    """The popular loop."""
    for part in parts_of(small_batch, 4):
        (small(**part, use_cache=False).loss / 4).backward()


in_four_parts = gradients_after(partial(accumulate, small, small_batch, 4))
assert torch.allclose(in_four_parts, right, atol=1e-6)
naive_error = ((gradients_after(mean_of_means) - right).norm() / right.norm()).item()
print("in four parts and at once: the same gradients")
print(f"the popular loop: they are off by {naive_error:.0%} of their length")


def accumulated_step(model, optimizer, texts=batch):
    loss = accumulate(model, texts, 4)  # micro-batches of six texts on a CPU
    optimizer.step()
    optimizer.zero_grad()
    return loss


# A GPU times all rows. On a CPU some would mislead you, and others would take minutes.
if_on_gpu = {"in_turns": device == "cuda"}
in_32_bits = {"group": "in 32 bits"}
accumulated = build(step=accumulated_step)
ladder.climb("gradient accumulation", accumulated, **in_32_bits, **if_on_gpu)

# %% [markdown]
# **The answer.** No, by 40 %. *Activations* and *other* together fall to a quarter, 3,188 → 797 MiB. Weights and states stay, 1,539 MiB, and all gradients wait while the next forward runs, 513.
#
# **In your code.** The popular loop's error of 40 % is that of four short texts with answers of very unequal lengths; where all micro-batches have as many answer tokens, the popular loop is right. The Trainer divides right since transformers 4.46. A loop of your own passes `num_items_in_batch`.
#
# ### 2. Activation checkpointing
#
# **What happens.** Backward needs the activations of one block at a time. Keep what went *into* each block, throw away the rest, and compute it again when backward arrives. (Then the activations of this one block are there again: a third moment, which on long texts is the highest, see [notebook 04](../notebooks/04_training_long_sequences.ipynb).)
#
# ```text
# plain         x0 [a0]  x1 [a1]  x2 [a2] → loss     all [a] are alive
# checkpointed  x0       x1       x2      → loss     [a2] again, used, freed; then [a1]; then [a0]
# ```
#
# **Guess first.** In a block of SmolLM2 576 numbers go into it per token, and about twenty times as many stay. What is left of the activations?
#
# **The idea.** A function with a `backward` of our own keeps only the input, and runs the block again in `backward`.

# %%
from recipes_lib.memory.activation_checkpointing import (
    InputOnly,
    apply_activation_checkpointing,
    checkpointed_by_hand,
)

# [B, S, D] are texts, tokens of a text, and the width of the model.
show(checkpointed_by_hand, InputOnly)

layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
hidden = torch.randn(4, 12, 8, requires_grad=True)
plainly, by_hand = layers(hidden), checkpointed_by_hand(layers, hidden)
wanted = gradients_after(plainly.sum().backward, layers)
assert torch.equal(gradients_after(by_hand.sum().backward, layers), wanted)


def checkpointing(model):
    model.activation_checkpointing_enable()  # once called gradient_checkpointing_enable
    return model


for library in (checkpointing, apply_activation_checkpointing):
    assert torch.equal(gradients_of(library(copy.deepcopy(small))), right)
print("by hand and by both libraries: the same gradients, to the last bit")

checkpointed_row = build(checkpointing)
ladder.climb("activation checkpointing", checkpointed_row, **in_32_bits, **if_on_gpu)

# %% [markdown]
# **The answer.** About 6 %, 125 of 2,216 MiB. (Prints count by who made a tensor, so the logits of the equation are in two of their kinds: the logarithms of the probabilities, 324 of the printed 449 and 2,540, are *activations*, and the gradients of logits are *other*.) The peak falls by 44 %. Above weights and states 1,098 MiB are left, and 972 of them are logits.
#
# **The logits, too.** Those of a few hundred tokens give their part of the loss and of the gradients, and are freed. [Notebook 04](../notebooks/04_training_long_sequences.ipynb) builds this *loss in chunks* by hand. PyTorch has it as `F.linear_cross_entropy`; ours is one call for a whole model.
#
# **Guess first.** Does the peak fall by most of the logits?

# %%
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy

if hasattr(F, "linear_cross_entropy"):  # since PyTorch 2.13
    # Token t + 1 is predicted from token t.
    hidden = small.model(words).last_hidden_state[:, :-1].flatten(0, 1)
    answer = small_batch["labels"][:, 1:].flatten()
    loss = F.linear_cross_entropy(hidden, small.lm_head.weight, answer)
    assert torch.allclose(loss, loss_of(small))

in_chunks = apply_chunked_cross_entropy(copy.deepcopy(small))
assert torch.allclose(gradients_of(in_chunks), right, atol=1e-6)


# By default it proves itself on every model. Each row compares its loss, so there it need not.
chunked_loss = partial(apply_chunked_cross_entropy, check=False)


def recipe_2(model):
    """Checkpoints around the blocks, and a loss in chunks."""
    return chunked_loss(checkpointing(model))


both = "checkpointing, loss in chunks"
ladder.climb(both, build(recipe_2), **in_32_bits)
towers(both)
timeline_chart(
    {name: ladder.timelines[name] for name in ("baseline", both)},
    both_towers=True,
    title="Without activations and logits, the end of backward is the peak",
)

# %% [markdown]
# **The answer.** By about half of them, 2,637 → 2,164 MiB. The first tower is now 1,858 MiB, and the second one is the peak: no recipe of Part A gets below it. (The loss in chunks saves nearly one embedding copy there, 2,269 → 2,164: it adds up the two gradients in place.) **In your code** take both together, because each leaves what the other removes: in the Trainer `activation_checkpointing=True` (formerly `gradient_checkpointing`, which 5.23 still takes) and, on a GPU, `use_liger_kernel=True`. TRL's default loss is in chunks.
#
# ### 3. Activation offloading
#
# **What happens.** Keep every activation, but somewhere else: a GPU's in host memory, a CPU's on the disk. PyTorch has it as `save_on_cpu`. Ours copies while the GPU computes, and leaves the weights where they are.
#
# **Guess first.** Is the peak lower than with checkpointing alone?

# %%
from recipes_lib.memory.activation_offload import offload_activations

with torch.autograd.graph.save_on_cpu(pin_memory=False):
    assert torch.equal(gradients_of(small), right)

elsewhere = "host" if device == "cuda" else "disk"


def offloaded_step(model, optimizer):
    with offload_activations(model, to=elsewhere):  # in place of save_on_cpu
        return train_step(model, optimizer)


offloaded = build(step=offloaded_step)
ladder.climb("activation offloading", offloaded, **in_32_bits, **if_on_gpu)

# %% [markdown]
# **The answer.** Here, by 39 MiB; on the H100 [below](#Notebook-01-on-a-GPU) no, and it takes three times as long as checkpoints. Offloading keeps the activations of the last block alone, which backward needs first; checkpointing keeps the inputs of all. Both leave the logits. Where blocks can be computed twice, take checkpoints (the H100 had texts of 256 tokens; longer ones were not timed here).
#
# **In your code.** Write `with torch.autograd.graph.save_on_cpu(pin_memory=True):` around forward, or `activation_offloading=True` in TRL's `SFTConfig`. `save_on_cpu` moves saved weights, too; `with offload_activations(model, to="host"):` of this repository does not.
#
# ## Faster: 16 bits and a compiler
#
# ### 4. Mixed precision
#
# **What happens.** Multiply in 16 bits, which is faster. What adds up many numbers stays in fp32: norms, softmax and loss. So do the weights, for an update is often too small for 16 bits.
#
# **Guess first.** Do the activations fall by half?
#
# **The idea.** Both factors of a product are converted, as PyTorch's `autocast` does.

# %%
from recipes_lib.precision.mixed_precision import linear_by_hand, mixed_precision

show(linear_by_hand)

inputs, matrix = torch.randn(5, 64), torch.randn(128, 64)
with torch.autocast("cpu", torch.bfloat16):
    automatic = F.linear(inputs, matrix)
assert torch.equal(automatic, linear_by_hand(inputs, matrix, dtype=torch.bfloat16))
print("by hand and by autocast: equal to the last bit")

precision = mixed_precision()
native = precision.dtype != torch.float32
print(precision)


def step_in_16_bits(model, optimizer, texts=batch):
    # A cache would keep the 16-bit copies of weights for a second product with them.
    with torch.autocast(device, precision.dtype, native, cache_enabled=False):
        loss = model(**texts, use_cache=False).loss
    precision.backward(loss)  # loss.backward(), in fp16 of the scaled loss
    precision.step(optimizer)  # optimizer.step(), in fp16 after the division
    optimizer.zero_grad()
    return loss.item()


in_16_bits = {"group": "in 16 bits, as far as native"}
ladder.climb("mixed precision", build(step=step_in_16_bits), **in_16_bits)

# %% [markdown]
# **The answer.** By far less: 2,540 → 2,092 MiB. Norms keep what they read in fp32, and the 16-bit copies of inputs and weights wait for backward, too. On this model it is a recipe for time. On the H100 below it also saves 22 %: there attention in fp32 keeps its scores.
#
# **In your code.** bf16 has the range of fp32 and few digits. fp16, the only fast one on a T4, turns small gradients into zeros, unless a `GradScaler` multiplies the loss first. `mixed_precision()` chooses for this machine.
#
# ### 5. Compiled blocks
#
# **What happens.** Between two products a block runs dozens of small operators, and each reads from memory and writes back. A compiler makes one program of many, a *kernel*.
#
# **Guess first.** That saves time. Does it also save memory? (Inside compiled code the account cannot tell *activations* from *other*: read their sum.)
#
# **The idea** is one line per block. All blocks do the same, so one is compiled, and the others use its code.

# %%
from recipes_lib.training.compiled_blocks import (
    apply_compiled_blocks,
    can_compile,
    compiled_by_hand,
)

show(compiled_by_hand)

compiles = sizes.compiles and can_compile(device)
if compiles:
    of_compiled = gradients_of(compiled_by_hand(copy.deepcopy(small)))
    assert torch.allclose(of_compiled, right, atol=1e-6)
    print("compiled gradients: equal up to rounding, for sums run in another order")


def compiled(model):
    return apply_compiled_blocks(model) if compiles else model


compiled_row = build(compiled, step=step_in_16_bits)
in_16_bits["after"] = "mixed precision"
ladder.climb("mixed precision, compiled", compiled_row, **in_16_bits, **if_on_gpu)

# %% [markdown]
# **The answer.** Yes: 4,279 → 3,672 MiB. (The loss differs from that of mixed precision by rounding, and is nearer to that in fp32.) On the H100 it took the time from 0.59× to 0.42×; on this CPU the time of *16 bits, compiled, chunked loss* is [below](#Everything-combined). What is cheap is not kept for backward but computed again, inside the same kernel. That is the compiler's choice, so the prediction asks the compiler about one block.
#
# **In your code.** `block.compile()` for each block, before checkpointing (not `torch_compile=True` of the Trainer, which compiles the whole model; ours also leaves generation as it was; this is for a loop of your own, and untried under the Trainer). The first step takes longer, and so does the first one of each further shape of a batch.
#
# ### The rows take turns on the clock
#
# Bytes are the same in every run. Times are not, for other programs disturb them. So rows take *turns*: here, and at the end. A disturbance only makes a turn longer, so **the fastest turn counts**. The baseline takes part each time, and a row is compared with its turns there. The × divides fastest by fastest. The bracket is the range of single rounds, slow ones of the baseline, too.

# %%
from recipes_lib.report.ladder import RATIO, TIME, cell


def take_turns():
    """Time the rows that have climbed since the last turns, beside the baseline."""
    new = [row for row in ladder.rows if not row.turns]
    ladder.take_turns(rounds=sizes.turns)
    for row in filter(lambda row: row.turns, new):
        print(f"{row.name:<39}{cell(row, TIME):>18} s{cell(row, RATIO):>18} ×")


take_turns()

# %% [markdown]
# Checkpoints cost one more forward. The loss in chunks saves time here, because it skips the tokens without a label: 228 of 1,728 have one, and where all have one, this gain is gone. On the H100 [below](#Notebook-01-on-a-GPU) checkpoints alone took 1.24×, and with this loss 1.11×. Rows that are not here took no turns on a CPU.
#
# ## Part B: what every weight costs
#
# From here on the step has 16 bits, checkpoints and a loss in chunks.

# %%
lean_row = "16 bits, checkpointing, loss in chunks"
on_lean = {"group": "on top of 16 bits, checkpointing, loss in chunks"}
ladder.climb(lean_row, build(recipe_2, step=step_in_16_bits), **on_lean, **if_on_gpu)
on_lean["after"] = lean_row

# %% [markdown]
# The peak is that of fp32: under autocast gradients and states still have 32 bits.
#
# ### 6. Optimizer step in backward
#
# **What happens.** Update each weight the moment its gradient is complete, and free the gradient at once.
#
# ```text
# plain   backward: g30 … g2 g1 all alive   →   step: update 30 … 2, 1
# here    backward: g30 → update 30, free;  …  ; g1 → update 1, free
# ```
#
# **Guess first.** What is left of the second tower? Think of the tied embedding.
#
# **The idea**: one optimizer per weight, and a hook that autograd calls when a gradient is complete.

# %%
from recipes_lib.memory.optimizer_in_backward import (
    apply_optimizer_in_backward,
    one_optimizer_per_parameter,
)

show(one_optimizer_per_parameter)


def weights_after_a_step(optimizer_of):
    """The weights of a copy of the small model after one update, as one vector."""
    model = copy.deepcopy(small)
    optimizer = optimizer_of(model)
    loss_of(model).backward()
    if hasattr(optimizer, "step"):  # by hand, the step has happened already
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


usual = weights_after_a_step(adamw)
fused = dict(optimizer_class=torch.optim.AdamW, lr=2e-5, fused=True)
in_backward = partial(apply_optimizer_in_backward, **fused)
for way in (partial(one_optimizer_per_parameter, **fused), in_backward):
    assert torch.equal(weights_after_a_step(way), usual)
print("the same weights after the step, to the last bit")

# A loss scale needs all gradients before the step: on a T4 this row is in fp32.
in_one_go = train_step if precision.dtype == torch.float16 else step_in_16_bits
in_one_step = build(recipe_2, optimizer_of=in_backward, step=in_one_go)
ladder.climb("step in backward", in_one_step, **on_lean, **if_on_gpu)
towers("step in backward")

# %% [markdown]
# **The answer.** Only the embedding's gradient, in its two parts, 216 MiB. Now the end of forward is higher, 1,907 MiB: there the loss in chunks has made the output layer's gradient already.
#
# **In your code.** The hook above is all the code there is; torchtune has it as `optimizer_in_bwd: True`, and the Trainer in layer-wise optimizers only (`optim="galore_adamw_layerwise"`). Accumulation, clipping by the global norm and a loss scale find no gradients, and PyTorch raises no error. Ours refuses them.
#
# ### 7. Optimizer states in 16 or 8 bits
#
# **What happens.** Store AdamW's two averages in 16 bits, or in 8. Compute each update in fp32 as before.
#
# **Guess first.** The averages are rounded after every step. The second one is multiplied by 0.999 in a step, and bf16 has two to three digits. What happens to an average that should fall?
#
# **The idea** in 8 bits: each average becomes a *code*, the number of an entry in a list of 256 values, close together near zero and far apart near one. 256 neighbours share one scale.

# %%
import bitsandbytes

from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.sixteen_bit_adam import sixteen_bit_adamw

average = torch.ones(1, dtype=torch.bfloat16)
for _ in range(1_000):  # a thousand steps without any gradient
    average = (0.999 * average.float()).to(torch.bfloat16)
print(f"it should be {0.999**1_000:.3f}, and is {average.item():.3f}")

optimizers = {
    "fp32": torch.optim.AdamW,
    "16 bits": sixteen_bit_adamw,
    "8 bits": eight_bit_adamw,
    "8 bits, bitsandbytes": bitsandbytes.optim.AdamW8bit,
}
start = torch.randn(65_536, device=device)
ten_gradients = torch.randn(10, 65_536, device=device)
moved = {}
for name, optimizer_of in optimizers.items():
    weight = torch.nn.Parameter(start.clone())
    optimizer = optimizer_of([weight], lr=1e-3)
    for gradient in ten_gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    moved[name] = weight.detach() - start
    off = (moved[name] - moved["fp32"]).norm() / moved["fp32"].norm()
    print(f"{name:<21} the ten updates differ by {off:.1%}")

# %%
fewer_bits = {"16-bit AdamW states": sixteen_bit_adamw, "8-bit AdamW": eight_bit_adamw}
for name, optimizer_of in fewer_bits.items():
    optimizer_of = partial(optimizer_of, lr=2e-5)
    shrunk = build(recipe_2, optimizer_of=optimizer_of, step=step_in_16_bits)
    ladder.climb(name, shrunk, **on_lean, **if_on_gpu)

# %% [markdown]
# **The answer.** Rounded to nearest, it never falls, and no error says so. So `sixteen_bit_adamw` rounds *stochastically*: to one of the two neighbours at random, to the nearer one more often, which is right on average. Weights in 16 bits need the same ([`bf16_adamw`](../recipes_lib/precision/pure_bf16.py)).
#
# (The equal losses prove nothing: they are from before an update. The ten updates above do.) States fall from 1,026 MiB to 513, and to 422 in 8 bits. That is more than a quarter, because *8-bit AdamW* keeps those of the embedding in 32 bits, as its authors advise and the Trainer's `optim="adamw_8bit"` does. bitsandbytes' own class has all of them in 8 bits; a combination below takes it.
#
# ### 8. Optimizer states in host memory
#
# A GPU's states can wait in host memory, where the update runs, too ([`offload_optimizer`](../recipes_lib/memory/optimizer_offload.py)). A CPU has nowhere to move them to, so there is no row. For all weights of 8B on 24 GB it is the line of the doctor [below](#Out-of-memory-doctor): 16.9 GiB on the card, and 136.2 on the host. **In your code**: `optim="paged_adamw_8bit"` lets CUDA move 8-bit states to the host when the card is full.
#
# ### 9. LoRA
#
# **What happens.** Freeze the weights, and put an *adapter* beside each linear layer: two thin matrices `A` and `B`, whose product has the shape of the weight and a low *rank*. Only adapters get gradients and states. No update is added to a frozen weight, so it can have 16 bits.
#
# ```text
# y = x Wᵀ  +  (alpha / r) · (x Aᵀ) Bᵀ        W [576, 576] is frozen, A [16, 576] and B [576, 16] train
# ```
#
# **Guess first.** `W` has 331,776 numbers, `A` and `B` have 18,432 together. What is left of the second tower?

# %%
from peft import LoraConfig, get_peft_model

from recipes_lib.fine_tuning.lora import plain_lora

show(plain_lora)


def adapters():
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")


def lora(model):
    return get_peft_model(model, adapters())


def to_16_bits(model):
    return model.to(precision.dtype)


layer = lora(copy.deepcopy(small)).get_base_model().model.layers[0].self_attn.q_proj
a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
torch.nn.init.normal_(b)  # B starts at zero: an untrained adapter changes nothing
hidden = torch.randn(2, 5, layer.in_features)
corrected = plain_lora(hidden, layer.base_layer.weight, a, b, alpha=32)
assert torch.allclose(layer(hidden), corrected, atol=1e-4)
print("one adapted layer by hand and by peft: equal")

on_16_bits = build(to_16_bits, lora, recipe_2, step=step_in_16_bits)
ladder.climb("LoRA", on_16_bits, **on_lean, **if_on_gpu)

# %% [markdown]
# **The answer.** The weights, 275 MiB with the adapters, and of states and gradients next to nothing: states are 37 MiB in place of 1,026. The peak is where backward begins, 439 MiB.
#
# **In your code.** Make a new `LoraConfig` for each model: peft writes the layers that it has found into it.
#
# ### 10. QLoRA
#
# **What happens.** Frozen weights are only read, so fewer digits suffice. QLoRA keeps each one as one of 16 levels: four bits. 64 neighbours share a scale, which has 8 bits. Each product unpacks its layer for a moment.
#
# **Guess first.** Four bits are a quarter of 16. Does the peak of the LoRA row fall by three quarters of its blocks?
#
# **The idea.** Most weights are close to zero, about as in a normal distribution. So the levels are quantiles of a normal distribution, and each weight takes the nearest one.

# %%
from recipes_lib.fine_tuning.qlora import (
    apply_qlora,
    check_gradient_flow,
    nf4_layer,
    nf4_levels,
    plain_nf4,
)

show(nf4_levels, plain_nf4)

linear = load_model(sizes.learner).model.layers[0].mlp.up_proj.cpu()
rounded = plain_nf4(linear.weight.detach())
packed = nf4_layer(linear, double_quant=False, compute_dtype=torch.float32)
# A product with the identity gives the weights.
unpacked = packed(torch.eye(linear.in_features)).T
close = torch.isclose(rounded, unpacked, atol=1e-5).float().mean()
change = (rounded - linear.weight).norm() / linear.weight.norm()
print(f"{close:.1%} of the weights equal those of bitsandbytes")
print(f"the rounding changes the weights of this layer by {change:.0%}")

# %% [markdown]
# First with the libraries: the small model is saved in a folder, and the name of any model of the hub can stand in its place. Then the row: `apply_qlora` packs a model that is in memory already, and leaves the rest in 32 bits, as peft's `prepare_model_for_kbit_training` does.

# %%
from peft import prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

four_bits = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,  # scales in 8 bits
    bnb_4bit_compute_dtype=precision.dtype,  # fp16 on a T4
)
with tempfile.TemporaryDirectory() as folder:
    small.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=four_bits, device_map=device
    )
loaded = prepare_model_for_kbit_training(  # fp32 for what is not packed; checkpoints
    loaded, gradient_checkpointing_kwargs={"use_reentrant": False}
)
loaded = lora(loaded).train()  # before its first forward: see below
there = {name: tensor.to(device) for name, tensor in small_batch.items()}
check_gradient_flow(loaded, there)
print(loaded.base_model.model.model.layers[0].mlp.up_proj.base_layer)
del loaded

qlora = partial(apply_qlora, rank=16, alpha=32)
on_4_bits = build(qlora, recipe_2, step=step_in_16_bits)
ladder.climb("QLoRA", on_4_bits, **on_lean | {"after": "LoRA"})

# %% [markdown]
# **The answer.** No, it rises by 11 MiB. Weights fall, 275 → 179 MiB. But `prepare_model_for_kbit_training` gives 32 bits to all that is not packed: here that is the embedding, 108 of these 179. And what a 32-bit embedding hands to the blocks is 32 bits wide, too: *activations* and *other* rise together from 127 to 233 MiB, and eat more than the weights have saved. *Everything combined* below keeps the embedding in 16 bits. In Llama 3.1 8B embedding and output layer have 1.05 billion numbers: 3.9 GiB in 32 bits, and half of that in 16.
#
# **In your code.** Load with `quantization_config`, as above: a model that is packed later has been on the card in 16 bits, and CUDA's allocator keeps that room. To keep the embedding in 16 bits, leave `prepare_model_for_kbit_training` out, load with `dtype=torch.bfloat16`, and switch on checkpoints with `use_reentrant=False`. (With `True` the first block gets a gradient only after `model.enable_input_require_grads()`.) On a CPU call `model.train()` before the first forward ([why](../TRAPS.md)). `check_gradient_flow` sees both mistakes.
#
# ### 11. Layer streaming
#
# **What happens.** A frozen weight is needed only while its block is computed. So it waits elsewhere, and while one block is computed, the next one is on its way.
#
# **Guess first.** Two packed blocks are here at a time. Does the peak fall by nearly all blocks?

# %%
from recipes_lib.memory.layer_streaming import apply_layer_streaming

# It has checkpoints of its own.
streaming = partial(apply_layer_streaming, to=elsewhere)
streamed = build(qlora, chunked_loss, streaming, step=step_in_16_bits)
ladder.climb("QLoRA, streamed", streamed, **on_lean | {"after": "QLoRA"}, **if_on_gpu)

# %% [markdown]
# **The answer.** By nearly all: 450 → 399 MiB. What stays of the weights is the embedding and the adapters: at the peak, in the loss, hardly any block is needed.
#
# **In your code.** We know of no switch for a frozen base in four bits; for weights in 16 bits there is DeepSpeed's ZeRO-3 with `offload_param`. Take many tokens per step: each weight travels from the host to the card twice. A model that the card cannot hold in four bits either is packed on the host, and goes from there with `apply_layer_streaming(model, device="cuda", check=False)`; no GPU has run that. For 8B on a card of 4 GB [Soup](https://github.com/MakazhanAlpamys/Soup) has published 3.3 GB and 120 tokens a second; the table below has 3.9 GiB for 2,048 tokens.
#
# ## Everything combined
#
# Two combinations train all weights, and two train adapters. The first keeps all activations, so that no block runs forward twice; the others have checkpoints. *Everything combined* has four bits in the blocks, and 16 in embedding and norms.
#
# In the chart below read ×, not seconds: each × is against the baseline of the same turns.
#
# **Guess first.** Which term is the largest one left in the last combination?

# %%
gc.collect()
gc.freeze()  # nor at those of the rows above, which stay
fast_row = "16 bits, compiled, chunked loss"
whole_row = "8-bit AdamW in backward, compiled"

# Blocks are compiled before checkpointing, which stays outside. With adapters the
# library's checkpoints keep one input more than these.
checkpointed = partial(apply_activation_checkpointing, check=False)
lean = (compiled, checkpointed, chunked_loss)
in_8_bits = partial(
    apply_optimizer_in_backward, optimizer_class=bitsandbytes.optim.AdamW8bit, lr=2e-5
)
combinations = {
    fast_row: build(compiled, chunked_loss, step=step_in_16_bits),
    whole_row: build(*lean, optimizer_of=in_8_bits, step=in_one_go),
    "LoRA, compiled": build(to_16_bits, lora, *lean, step=step_in_16_bits),
    "everything combined": build(to_16_bits, qlora, *lean, step=step_in_16_bits),
}
for name, builder in combinations.items():
    ladder.climb(name, builder, group="together")
take_turns()
ladder.chart()

# %% [markdown]
# **The answer.** The weights, 125 of 281 MiB: 54 are the embedding in 16 bits. *Other*, 110, belongs to the loss: one chunk of 288 rows of logits, in 32 bits, has 54.
#
# ## Does the loss fall?
#
# The rows to choose from train for three steps of four texts, adapters at ten times the learning rate, on one seed: differences of a few hundredths say nothing ([notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb) compares who learns best). The loss is that of eight functions from modules that are not in the training texts. Blocks are not compiled here, so for the rows with *compiled* in their name this tests the recipe and not the compiler.

# %%
from recipes_lib.core.data.losses_and_answers import evaluate


def trained(*recipes, optimizer_of, step=step_in_16_bits):
    """The held-out loss before and after three steps."""
    seed_everything(0)
    base = partial(load_model, sizes.learner)
    builder = build(*recipes, optimizer_of=optimizer_of, step=step, base=base)
    model, optimizer, step = builder()
    before = evaluate(model, held_out, pad_token_id=padding)
    for _, texts in zip(range(3), batches_of(4)):
        step(model, optimizer, texts)
    return before, evaluate(model, held_out, pad_token_id=padding)


for_weights = partial(adamw, lr=5e-5)
for_adapters = partial(adamw, lr=5e-4)
combined = (to_16_bits, qlora, recipe_2)
before_and_after = {
    "baseline": trained(optimizer_of=for_weights, step=train_step),
    fast_row: trained(chunked_loss, optimizer_of=for_weights),
    whole_row: trained(
        recipe_2, optimizer_of=partial(in_8_bits, lr=5e-5), step=in_one_go
    ),
    "LoRA, compiled": trained(to_16_bits, lora, recipe_2, optimizer_of=for_adapters),
    "QLoRA": trained(qlora, recipe_2, optimizer_of=for_adapters),
    "everything combined": trained(*combined, optimizer_of=for_adapters),
}
print(f"{'':<33}{'peak':>10}{'less':>7}{'time':>8}   held-out loss")
for name, (before, after) in before_and_after.items():
    row = ladder[name]
    print(f"{name:<33}{mib(row.peak_bytes):>10}{ladder.saved(name):>7.0%}", end="")
    print(f"{row.ratio:>7.2f}×   {before:.2f} → {after:.2f}")
combined_row = ladder["everything combined"]
for name in ("QLoRA", "LoRA, compiled"):
    change = combined_row.peak_bytes / ladder[name].peak_bytes - 1
    ratio = combined_row.seconds / ladder[name].seconds
    print(f"everything combined beside {name}: {change:+.0%} memory, {ratio:.2f}× time")

# %% [markdown]
# ### Which one to choose
#
# | what trains | with room | with little room |
# |---|---|---|
# | all weights | *16 bits, compiled, chunked loss*: about half of the time | *8-bit AdamW in backward, compiled*: 76 % less memory, in a little less than the time of the plain step, with the compiler and the [lines below](#All-weights) (the embedding's states in 8 bits, too: against its authors' advice, recipe 7) |
# | adapters | *LoRA, compiled* | *everything combined* |
#
# ### Do four bits pay?
#
# - **As peft prepares them**, not on this small model: 450 MiB against LoRA's 439.
# - **With the embedding in 16 bits**, yes: *everything combined* takes 35 % less than *LoRA, compiled*, for 9 % more time here, and 2 % on another CPU. On 8B it is 16.7 → 7.0 GiB ([below](#What-fits-your-card)).
# - **The other price** is the held-out loss: 4.00 in place of 3.57 before training, 3.30 against 3.02 after it, and for *QLoRA* 3.91 and 3.17. (These weights come from a file of four bits, and are rounded a second time.)
# - **A larger model needs them**, by the table below, with 4 GiB for one billion weights, with 6 or 8 GiB for three, with 12 or 16 for eight, with 16, 24 or 32 for fourteen.
#
# ### On a GPU
#
# Bytes are the same wherever the same operators run (attention in fp32 has another one on a GPU), times are not: look at your own. Rows without a time took no turns on this CPU: those of offloading, the step in backward, states in fewer bits and streaming would mislead you on a GPU, and the others cost minutes.
#
# On a GPU the page takes the shape of Llama 3.2 1B with random weights, and 32 texts of 256 tokens. An H100 (by `make gpu`, products of fp32 as TF32) had time for these rows. Bytes are as predicted, to 1 MiB, but for the baseline, in whose step the workspaces of cuBLAS are made, and for two compiled rows, where the compiler keeps up to 3 % less. Beside fp32 states, 8-bit ones take 11 % more time and our 16-bit ones 15 %, and more memory than 8: so take 8. *QLoRA*, not compiled, takes a third more time than *LoRA*, and streaming about 15 % more than *QLoRA*.
#
# <!-- numbers:gpu-01 -->
# ### Notebook 01 on a GPU
#
# | step | predicted | measured | to the baseline | time |
# |---|--:|--:|--:|--:|
# | **in 32 bits** |  |  |  |  |
# | baseline | 57,080 MiB | 57,144 MiB |  | 1.00× |
# | gradient accumulation | 29,591 MiB | 29,591 MiB | -48% | 1.16× |
# | activation checkpointing | 27,383 MiB | 27,383 MiB | -52% | 1.24× |
# | checkpointing, loss in chunks | 21,185 MiB | 21,185 MiB | -63% | 1.11× |
# | activation offloading | 28,280 MiB | 28,280 MiB | -51% | 3.64× |
# | **in 16 bits, as far as native** |  |  |  |  |
# | mixed precision | 44,829 MiB | 44,829 MiB | -22% | 0.59× |
# | mixed precision, compiled | 38,685 MiB | 38,685 MiB | -32% | 0.42× |
# | **on top of 16 bits, checkpointing, loss in chunks** |  |  |  |  |
# | 16 bits, checkpointing, loss in chunks | 20,102 MiB | 20,102 MiB | -65% | 0.65× |
# | step in backward | 17,555 MiB | 17,555 MiB | -69% | 0.64× |
# | 16-bit AdamW states | 15,388 MiB | 15,388 MiB | -73% | 0.75× |
# | 8-bit AdamW | 14,563 MiB | 14,563 MiB | -75% | 0.72× |
# | LoRA | 4,458 MiB | 4,458 MiB | -92% | 0.25 s° |
# | QLoRA | 4,542 MiB | 4,543 MiB | -92% | 0.33 s° |
# | QLoRA, streamed | 4,200 MiB | 4,200 MiB | -93% | 0.38 s° |
# | **together** |  |  |  |  |
# | 16 bits, compiled, chunked loss | 28,388 MiB | 28,388 MiB | -50% | 0.11 s° |
# | 8-bit AdamW in backward, compiled | 10,676 MiB | 10,521 MiB | -82% | 0.18 s° |
# | LoRA, compiled | 4,394 MiB | 4,266 MiB | -93% | 0.13 s° |
#
# *NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, transformers 5.23.0, 2026-11-26. To the baseline: peak memory. Time is relative to the baseline's step. A time is that of the fastest of 2 to 4 turns, against the fastest of the baseline. Not the whole notebook: the lent machine's time was up. ° So these rows had no turns: the median of three steps in a row, where the baseline took 0.33 s.*
# <!-- end -->
#
# ## What fits your card
#
# The equation for five models on one text of 2,048 tokens. With checkpoints it has a third moment, when backward computes a block again: weights + states + inputs of all blocks + all that one block keeps, and the gradients in it. All ways have checkpoints and a loss in chunks.
#
# - *Full, 8-bit AdamW*: all weights train, kept and multiplied in 32 bits. The optimizer steps in backward. (On a GPU take autocast all the same: its attention in 32 bits may keep scores, which are not counted.)
# - *Full, all in 16 bits*: the same with weights and states in 16 bits, by `bf16_adamw`, which rounds stochastically.
# - *Full, states in 8 bits*: weights in 16 bits, states in 8, by torchao's `AdamW8bit(…, bf16_stochastic_round=True)`.
# - *LoRA*, *QLoRA*, *QLoRA, streamed*: adapters of rank 16 train, on a base in 16 bits, in four bits (embedding and output layer in 16), or in four bits with two blocks at a time on the card.

# %%
from dataclasses import replace

from recipes_lib.core.predict import equation

GIB = 2**30
MEMORY = (4, 6, 8, 12, 16, 24, 32, 48, 80)  # GiB, of cards


def room(card):
    """What tensors may take of a card, beside holes and CUDA's context."""
    return (card * GIB - GIB / 2) / 1.2


def fits(peak):
    """The peak, and the smallest card that has room for it."""
    cards = [f"fits {card} GiB" for card in MEMORY if peak <= room(card)]
    smallest = cards[0] if cards else f"more than {MEMORY[-1]} GiB"
    return f"{peak / GIB:>6.1f} GiB, {smallest}"


def lean_step(step):
    return equation.with_chunked_loss(equation.with_checkpointing(step))


def plain_step(shape, dtype):
    model = model_of_shape(shape, dtype=dtype, device="meta")
    return equation.plain_step(model, rows=1, length=2048)


def ways_of(shape):
    """One step by arithmetic, in each of the six ways."""
    in_32 = plain_step(shape, torch.float32)
    in_16 = plain_step(shape, torch.bfloat16)
    states_in_8 = equation.with_states_in(lean_step(in_32), bits=8)
    on_16_bits = lean_step(equation.with_adapters(in_16, rank=16))
    on_4_bits = equation.in_four_bits(on_16_bits)
    away = on_4_bits.sizes.linear_bytes * (1 - 2 / on_4_bits.sizes.blocks)
    return {
        "full, 8-bit AdamW": equation.with_step_in_backward(states_in_8),
        "full, all in 16 bits": equation.with_step_in_backward(lean_step(in_16)),
        "full, states in 8 bits": equation.with_step_in_backward(
            replace(lean_step(in_16), states=lean_step(in_16).states // 2)
        ),
        "LoRA": on_16_bits,
        "QLoRA": on_4_bits,
        "QLoRA, streamed": replace(on_4_bits, weights=on_4_bits.weights - round(away)),
    }


print("predicted by arithmetic, not run; the card has a fifth more, and half a GiB\n")
for shape in sizes.cards:
    for name, step in ways_of(shape).items():
        print(f"{shape:<14}{name:<23}{fits(step.peak)}")

# %% [markdown]
# On a card of 24 GB the largest of these five is 14B, as *QLoRA*. 32B takes a card of 32 GB, or streaming.
#
# Arithmetic knows one precision at a time. So 8B and 14B go through dry steps, too: *full* under autocast, of 8B, and *QLoRA* as peft prepares it, of both. A block more adds the same bytes at the same moments: steps of two to four blocks say what all of them need. (In this *full* the embedding's states have 8 bits, too, and autocast adds copies.)

# %%
from recipes_lib.core.predict import CARDS
from recipes_lib.core.predict.any_size import any_size

ids = torch.zeros(1, 2048, dtype=torch.long, device=device)
one_text = {"input_ids": ids, "labels": ids}
in_32_and_16 = partial(
    build, recipe_2, optimizer_of=in_8_bits, step=partial(in_one_go, texts=one_text)
)
as_peft_prepares = partial(
    build, qlora, recipe_2, step=partial(step_in_16_bits, texts=one_text)
)
too_large_here = (
    ("full, 8-bit AdamW", sizes.second, in_32_and_16),
    ("QLoRA, as peft prepares it", sizes.second, as_peft_prepares),
    ("QLoRA, as peft prepares it", sizes.largest, as_peft_prepares),
)
for name, shape, way in too_large_here[: sizes.dry_steps]:
    blocks = model_of_shape(shape, device="meta").config.num_hidden_layers

    def build_of(layers):
        return way(base=partial(model_of_shape, shape, layers=layers))

    few = any_size(build_of, layers=(2, 3), card=CARDS["RTX 4090"])
    print(f"{shape:<14}{name:<27}{fits(few.peak(layers=blocks))}")

# %% [markdown]
# - **Embedding and output layer**: `prepare_model_for_kbit_training` leaves them in 32 bits. For 8B that decides between a card of 12 GiB and one of 16, and for 14B between 16 and 24. The table has them in 16 bits, and so has TRL's trainer, which does not call it.
# - **All weights of 8B on 24 GB**: torchtune has published 18.9 GiB on an RTX 4090, in bf16, with 8-bit states that wait on the host and a step in backward ([predicted: 19.8](../docs/predictions.md)). It rounds to nearest, so small updates are lost ([TRAPS.md](../TRAPS.md)).
# - **Autocast's cache**, which the Trainer leaves on, adds two bytes for each fp32 weight of a linear layer that trains, until forward ends. *Full* is without it.
# - **Your card**: some show less than their name, an L4 or A10G about 22.5 GiB. Give `room` what `torch.cuda.get_device_properties(0).total_memory / 2**30` says. A row within half a GiB of what `room` gives may not fit: Llama 3.2 3B, *full, all in 16 bits*, has 19.3 of 19.6 GiB on a card of 24. A T4 has no bf16, and the table is not for it: there take *QLoRA* with `half = torch.float16` in the [lines below](#Adapters), and ask the doctor with `--card T4` (for 8B and four texts of 2,048 tokens it [says 9.7 GiB](../notebooks/05_fine_tuning_pretrained_models.ipynb#Which-card?); no T4 has run it).
# - **Your model**: `python -m recipes_lib doctor --model Qwen/Qwen3-4B --dtype bf16 --card "RTX 4090" --batch-size 1 --seq-len 2048`. [Notebook 04](../notebooks/04_training_long_sequences.ipynb) says how long a text may be.
#
# ### 12. Dynamic batch size
#
# Where nobody knows what fits, halve the micro-batches when memory runs out, and double their number: the gradient stays that of the same batch.
#
# **Guess first.** `PeakMemory` raises the error of a full card, here at half of what 32 texts take at once. Do two micro-batches fit?

# %%
from recipes_lib.core.measure import bytes_alive
from recipes_lib.training.dynamic_batch import fit_micro_batches, halve_until_it_fits

show(halve_until_it_fits)

others = bytes_alive()  # of earlier cells
on_device = copy.deepcopy(small).to(device)
# Each of the four texts eight times: the mean loss and its gradients stay the same.
many = {name: tensor.repeat(8, 1) for name, tensor in there.items()}
in_parts = partial(accumulate, on_device, many)
with PeakMemory() as at_once:
    in_parts(1)
on_device.zero_grad()
half = (at_once.peak - others) // 2
with PeakMemory(limit_bytes=others + half):
    found = fit_micro_batches(in_parts, model=on_device, batch_size=32).micro_batches
left = torch.cat([weight.grad.flatten() for weight in on_device.parameters()])
assert torch.allclose(left.cpu(), right, atol=1e-5)
print(f"{found} micro-batches fit, and leave the same gradients")

# %% [markdown]
# **The answer.** No: weights and gradients are not halved. Four fit.
#
# **In your code.** The Trainer's `auto_find_batch_size=True` does not accumulate, so it trains with another batch size.
#
# ## Which recipe when
#
# From the top, until it fits. Costs are times of the H100 [above](#Notebook-01-on-a-GPU), in the order of its rows.
#
# | | recipe | costs | not when |
# |---|---|---|---|
# | **always** | texts of unequal lengths: [pack](../recipes_lib/training/sequence_packing.py) them, padding fills memory, too | | |
# | | 16 bits, by autocast | it saves time | 16 bits are emulated: the setup prints whether bf16 is native |
# | | compiled blocks | it saves time, after a slow first step | each batch has another shape |
# | | a loss in chunks | it saves time beside checkpoints | |
# | **activations at the peak** | micro-batches | 16 % | one text alone does not fit |
# | | checkpoints | 24 % | weights and states are at the peak |
# | | activation offloading | more than three times the step | checkpoints are enough, or there already |
# | **all weights train** | the step in backward | nothing | you accumulate, clip, or train in fp16 |
# | | 8-bit AdamW | 11 % | |
# | | states on the host | the way there and back, each step | the host has no 16 bytes per weight |
# | **adapters train** | LoRA, on 16 bits | it learns more slowly ([notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb)) | much that is new has to be learned |
# | | QLoRA | a third more than LoRA, and rounding | the weights fit in 16 bits |
# | | QLoRA, streamed | 15 % more than QLoRA | the weights fit in four bits |
#
# The [cheatsheet](../CHEATSHEET.md) has the numbers of each recipe and its switch in the libraries, [TRAPS.md](../TRAPS.md) what goes wrong.
#
# ## Out-of-memory doctor
#
# Given a model, a device and the text of an error, what should be tried first? In a terminal it is `python -m recipes_lib doctor --model llama-3.1-8b --dtype bf16 --memory 19.6 --batch-size 4 --seq-len 2048`: the 19.6 GiB that `room` leaves of 24. Each line is a stack of recipes with its peak by arithmetic.

# %%
from recipes_lib.workflows.out_of_memory_doctor import diagnose

diagnosis = diagnose(
    error="CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity "
    "of 24.00 GiB of which 512.00 MiB is free.",
    model=model_of_shape("llama-3.1-8b", dtype=torch.bfloat16, device="meta"),
    batch_size=4,
    seq_len=2048,
    memory_bytes=int(room(24)),
)
for remedy in diagnosis.remedies:
    print(f"{remedy.name}\n    {remedy.outcome}")
print(f"\nfirst that fits: {diagnosis.first_fit.name}")

# %% [markdown]
# The line with the optimizer offload fits the card, and is passed over: it asks too much of the host, 16 bytes per weight for an fp32 copy, its gradient and both averages, and pinned memory for the way. Lines without adapters train all weights in bf16, whose updates need stochastic rounding (recipe 7). The line of QLoRA is without checkpoints, which cost time: with them it takes the 7.0 GiB of the table, for one text.
#
# ## Take this home
#
# ### All weights
#
# The smallest row that trains all weights, as a loop of your own. `NAME` is an id of the hub or a folder; here it is the model of this page, saved.

# %%
folder = tempfile.TemporaryDirectory()
NAME = folder.name
fresh().save_pretrained(NAME)
some_batches = [batch] * 2  # yours: input_ids, attention_mask and labels, on the device
others = bytes_alive()  # of earlier cells; in a program of your own 0

# %%
import bitsandbytes
import torch
from transformers import AutoModelForCausalLM

from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward

model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.float32).to(device)
model.train()
# Faster, where all batches have one shape, and first of all:
# for block in model.model.layers: block.compile()
model.gradient_checkpointing_enable({"use_reentrant": False})
apply_chunked_cross_entropy(model)
optimizer = apply_optimizer_in_backward(
    model, optimizer_class=bitsandbytes.optim.AdamW8bit, lr=2e-5
)
for texts in some_batches:
    with PeakMemory() as memory:  # counts bytes; on a GPU also max_memory_allocated()
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            loss = model(**texts, use_cache=False).loss
        loss.backward()  # each weight moves in here, and its gradient goes
        optimizer.step()  # closes the step
        optimizer.zero_grad()
    whole_peak = memory.peak - others
    print(f"loss {loss.item():.3f}, peak {mib(whole_peak)}")
del model, optimizer, loss
folder.cleanup()

# %% [markdown]
# The second step, with all states, has the peak of *8-bit AdamW in backward, compiled*. These weights have 32 bits. In 16, with half of the states, too, 3B fits 24 GB by the table, narrowly: [notebook 04](../notebooks/04_training_long_sequences.ipynb#Two-ways-for-larger-models) has that loop. Clipping and accumulation need all gradients at once: for them take `bitsandbytes.optim.AdamW8bit(model.parameters(), lr=2e-5)` and the plain loop. A T4 has no bf16: there it is the plain loop with fp16 and a `GradScaler` (recipe 4), which excludes the step in backward.
#
# ### Adapters
#
# QLoRA by the libraries alone, with the embedding in 16 bits: the recipes of *everything combined* without the compiler.
#
# - The second cell uses nothing else of this page. Give it `source` and `half`, and your own pairs.
# - For LoRA in 16 bits, the faster one where it fits, leave out `quantization_config` in both places.
# - It is written for transformers 5.23 and TRL 1.16 (before: `gradient_checkpointing=True`).
# - It ran on a CPU. On a GPU it prints its peak, to compare with [the table](#What-fits-your-card): two texts of at most 1,024 tokens are the table's 2,048.
# - After one step the adapters are loaded again, and the first question is asked: expect no right answer. The loss that it prints is of one-word answers, before any training.
# - Rows of `messages` in place of `prompt` and `completion` train on the question, too, unless `assistant_only_loss=True`.

# %%
source = resolve("HuggingFaceTB/SmolLM2-135M-Instruct")  # an id of the hub, or a folder
half = precision.dtype  # torch.bfloat16; on a T4 torch.float16

# %%
import gc

import torch
import trl
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer


def pair(question, answer):
    """Messages get the model's chat template; plain strings would get none."""
    prompt = [{"role": "user", "content": question}]
    return {
        "prompt": prompt,
        "completion": [{"role": "assistant", "content": answer}],
    }


pairs = [
    pair("Which method of a list adds one item at its end?", "append"),
    pair("Which one adds all items of another list?", "extend"),
    pair("Which one takes the last item away and returns it?", "pop"),
    pair("Which one puts the items in order?", "sort"),
]
four_bits = BitsAndBytesConfig(  # recipe 10
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=half,
)
one = {"": 0 if torch.cuda.is_available() else "cpu"}  # all on one card, or an error
model = AutoModelForCausalLM.from_pretrained(
    source,
    quantization_config=four_bits,
    dtype=half,  # the embedding too stays in 16 bits
    device_map=one,
)
settings = SFTConfig(
    output_dir="runs/take-away",
    max_steps=1,  # to see that it runs; without it: three epochs
    max_length=1024,  # what is longer is cut, in silence
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,  # recipe 1
    activation_checkpointing=True,  # recipe 2; TRL's loss is in chunks, too
    bf16=half == torch.bfloat16,  # recipe 4
    fp16=half == torch.float16,
    optim="adamw_torch_fused",  # recipe 7, where all weights train: "adamw_8bit"
    learning_rate=2e-4,
    logging_steps=1,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
    disable_tqdm=True,
)
trainer = SFTTrainer(
    model=model,
    args=settings,
    train_dataset=Dataset.from_list(pairs),
    peft_config=LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear"
    ),  # recipe 9
)
for weight in trainer.model.parameters():
    if weight.requires_grad:  # TRL gave the adapters 16 bits: they would lose updates
        weight.data = weight.data.float()
trainer.train()
trainer.save_model()  # the adapters
assert model.get_input_embeddings().weight.dtype == half
if torch.cuda.is_available():
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
tokenizer = trainer.processing_class
del trainer, model, weight
gc.collect()  # a trainer refers to itself
torch.cuda.empty_cache()

# Load them again, and ask.
again = AutoPeftModelForCausalLM.from_pretrained(
    settings.output_dir, quantization_config=four_bits, dtype=half, device_map=one
)
asked = tokenizer.apply_chat_template(
    pairs[0]["prompt"],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
).to(again.device)
written = again.generate(**asked, max_new_tokens=8)[0, asked["input_ids"].shape[1] :]
print(f"TRL {trl.__version__}; {tokenizer.decode(written, skip_special_tokens=True)}")

# %% [markdown]
# [`scripts/train_large_model.py`](../scripts/train_large_model.py) has our recipes, a schedule, checkpoints and the held-out loss in one flat file. As one command, on pairs of your own: `python -m recipes_lib finetune --data pairs.jsonl --method qlora --output runs/mine` (the base must fit in 16 bits, too, while it is packed).

# %% [markdown]
# ## Exercise
#
# From how many texts on does accumulation in four parts halve the peak of the plain step, in 32 bits? Take the terms of the [equation](#What-runs-out:-one-equation); all gradients are there while the next forward runs. The cell has the answer, and takes the step in four parts on tensors without data.

# %%
import math

from recipes_lib.core.predict import predict

per_text = (terms["activations"] + terms["logits"]) / sizes.rows
# ground + gradients + n · per_text / 4  =  (ground + n · per_text) / 2
n = math.ceil((2 * ground + 4 * terms["gradients"]) / per_text)
many_texts = next(batches_of(4 * math.ceil(n / 4)))  # parts of one size
in_four = predict(build(step=partial(accumulated_step, texts=many_texts))).peak
at_once = ground + len(many_texts["labels"]) * per_text
print(f"{n} texts; {len(many_texts['labels'])} take {mib(at_once)} at once,", end=" ")
print(f"and {mib(in_four)} in four parts")

# %% [markdown]
# ## References
#
# - Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016
# - Micikevicius et al., *Mixed Precision Training*, 2018
# - Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, 2022, and *QLoRA*, 2023
# - Hu et al., *LoRA*, 2021
# - Lv et al., *LOMO*, 2023: the step in backward
#
# The last cell checks the story on this machine.

# %%
from recipes_lib.core.measure.machine import fast

equation_off = abs(arithmetic / baseline.peak_bytes - 1)
ladder.note(
    held_out_loss={name: after for name, (_, after) in before_and_after.items()}
    | {"untrained": before_and_after["baseline"][0]},
    naive_error=naive_error,
    micro_batches=[found],
    source=model_source(),
    equation_off=equation_off,
)
assert dry_peak == baseline.predicted_bytes, "the ladder predicts as we did"
# A GPU's compiler keeps less than the prediction expects.
close = 0.005 if device == "cpu" else 0.05
for row in ladder.rows:
    assert abs(row.prediction_error) < close, f"{row.name} as predicted"
assert naive_error > 0.01, "the popular accumulation trains something else"
if not fast():  # in models as small as those of FAST mode, what is left out counts
    # In fp32 a GPU's attention keeps all scores, which the equation leaves out.
    assert equation_off < 0.01 or device != "cpu", "the equation agrees"
    untrained, _ = before_and_after["baseline"]
    assert all(after < untrained for _, after in before_and_after.values()), "all learn"
    assert abs(in_four / at_once - 0.5) < 0.02 or device != "cpu", "the exercise"
    least = min(row.peak_bytes for row in ladder.rows)
    assert ladder["everything combined"].peak_bytes == least, "it is the smallest"
    # Elsewhere the row has another precision, or a compiler that keeps less.
    if device == "cpu" and native:
        at_home = whole_peak / ladder[whole_row].peak_bytes
        assert abs(at_home - 1) < 0.01, "the loop at home"
falling = ("baseline", lean_row, whole_row, "LoRA")
peaks = [ladder[name].peak_bytes for name in falling]
assert peaks == sorted(peaks, reverse=True), "each is lower than the one before"
worst = max(abs(row.prediction_error) for row in ladder.rows)
print(f"all checks passed; predictions are off by {worst:.2%} at most")
