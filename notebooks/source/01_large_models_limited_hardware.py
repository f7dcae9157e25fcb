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
# > **One training step, 4,196 MiB → 267 MiB: 94% less memory of tensors, in 0.53× (0.52–0.53) the time**, from full fine-tuning in fp32 to adapters with every term small. Against QLoRA with 16 bits, checkpoints and a loss in chunks, which many have today, it is -37%, in 0.56× the time. Where all weights train, it is -73%, in 1.00× (0.98–1.02) the time. Each row was predicted before it ran, by the same count on tensors without data: off by 0.5% at most.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-26.
# <!-- end -->
#
# A training step runs out of memory, and the error does not say what filled it. This notebook trains one small model in many ways. It predicts the memory of each, measures it, and checks what should be equal: gradients, weights or loss.
#
# **You need** Python and the basics of PyTorch; no GPU, no login. **Minutes**: ten to run on two CPU cores, forty to read. **Has run on** two CPU cores. A GPU gets larger sizes, and no GPU has run them yet.
#
# ## The map
#
# In a hurry? [What fits your card](#What-fits-your-card) has a table for one, three and eight billion weights, and [Which recipe when](#Which-recipe-when) an order to try. A peak at the **start of backward** grows with the tokens: Part A. One at the **end of backward** comes from the number of weights: Part B. A few lines under *What fits your card* tell which it is.
#
# - **Part A, activations and logits**: 1 [gradient accumulation](../recipes_lib/training/gradient_accumulation.py), 2 [activation checkpointing](../recipes_lib/memory/activation_checkpointing.py) with a [loss in chunks](../recipes_lib/memory/chunked_cross_entropy/__init__.py), 3 [activation offloading](../recipes_lib/memory/activation_offload.py)
# - **Time, and some activations**: 4 [mixed precision](../recipes_lib/precision/mixed_precision.py), 5 [compiled blocks](../recipes_lib/training/compiled_blocks.py)
# - **Part B, gradients and states**: 6 [optimizer step in backward](../recipes_lib/memory/optimizer_in_backward.py), 7 states in [16](../recipes_lib/precision/sixteen_bit_adam.py) or [8 bits](../recipes_lib/precision/eight_bit_adam.py), 8 [states in host memory](../recipes_lib/memory/optimizer_offload.py), 9 [LoRA](../recipes_lib/fine_tuning/lora.py)
# - **Part B, weights too**: 10 [QLoRA](../recipes_lib/fine_tuning/qlora.py), 11 [layer streaming](../recipes_lib/memory/layer_streaming.py)
# - **What fits?** 12 [dynamic batch size](../recipes_lib/training/dynamic_batch.py), a table of cards, and a doctor
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
from pathlib import Path

import datasets
import torch
import transformers
from torch.nn import functional as F

from recipes_lib.core.measure.free_memory import keep_freed_memory
from recipes_lib.core.measure.machine import (
    choose_sizes,
    fast,
    machine,
    seed_everything,
)
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape
from recipes_lib.report.show import show
from recipes_lib.report.style import mib

# The output stays short. peft still calls checkpointing by its older name.
warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
logging.disable(logging.WARNING)
datasets.disable_progress_bars()
transformers.utils.logging.disable_progress_bar()
keep_freed_memory()  # else Linux fills freed memory with zeros again and again
device = machine().device
print(machine())

# %% [markdown]
# All sizes stand in one cell. A GPU gets a larger model with random weights. The *tier* in the print is the class of this machine: a CPU, or a GPU of at least 16, 24 or 80 GB.

# %%
full = dict(
    rounds=2,  # of timing
    last_rounds=2,  # of timing the rows that are compared in the end
    compile=True,  # whether blocks are compiled in the rows of the ladder
    learner="smollm2",  # the model of the last experiment
    steps=5,  # that it learns
    learner_rows=4,  # texts per step
    pairs=400,  # texts to learn from
    held_out=10,  # texts to judge it by
    few=8,  # texts of the search for a batch that fits
    large="llama-3.1-8b",  # for predictions
)
# Continuous integration checks that the code works, not how fast it is.
brief = dict(rounds=1, last_rounds=1, compile=False, learner="tiny-smollm2", steps=2)
brief |= dict(learner_rows=4, pairs=40, held_out=6, few=4, large="tiny-llama")
# On a CPU the real SmolLM2-135M. layers=None means all of its 30 blocks.
smollm2 = dict(shape="smollm2-135m", layers=None, pretrained=True, rows=20, tokens=72)
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
# The text is Python's own standard library: the question is a function, the answer its docstring. The loss counts the tokens of the answer only, those after ⟧.

# %%
from recipes_lib.core.data import batches, load_instructions
from recipes_lib.core.data.tokens_and_labels import decode_with_mask
from recipes_lib.core.model.default_model import model_source, resolve, source_note

tokenizer = load_tokenizer()
padding = tokenizer.pad_token_id
options = dict(max_tokens=sizes.tokens)
train = load_instructions(tokenizer, limit=sizes.pairs, **options)
held_out = load_instructions(
    tokenizer, split="validation", limit=sizes.held_out, **options
)
gc.freeze()  # makes the byte counter faster


def batches_of(texts):
    """Endless batches, all of one length, so that compiled blocks compile once."""
    shape = dict(batch_size=texts, length=sizes.tokens)
    return batches(train, pad_token_id=padding, device=device, **shape)


# All rows of the ladder below train on this one batch: 20 texts of 72 tokens on a CPU.
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


def adamw(model):
    """PyTorch's own AdamW. `fused` updates all weights without temporary tensors."""
    return torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)


def train_step(model, optimizer, texts=batch):
    loss = model(**texts, use_cache=False).loss  # forward
    loss.backward()  # a gradient for each weight
    optimizer.step()  # each weight moves a little
    optimizer.zero_grad()  # the gradients are freed
    return loss.item()


# %% [markdown]
# A first recipe is in there, and it is free. Many loops write `out = model(**texts)` and then `out.loss.backward()`. As long as `out` exists, so do its logits, and backward as a rule does not need them.
#
# ## What runs out: one equation
#
# Five things fill the memory of a step.
#
# - **Weights**: in fp32 each takes 4 bytes.
# - **States**: AdamW keeps two averages per weight, of its gradient and of the gradient's square: 8 bytes.
# - **Gradients**: one number per weight, again 4 bytes.
# - **Activations**: what forward keeps so that backward can compute gradients. They grow with the number of tokens. The scores of attention are not among them: PyTorch's fused attention computes them again.
# - **Logits**: one number per token and entry of the vocabulary. Forward keeps the logarithms of their probabilities, and backward begins with the gradients of these and of the logits. So three tables of this size exist at once.
#
# Training in fp32 takes **16 bytes per weight**, however short the text is. But the five are not all there at the same moment. The model is a stack of *blocks* that are built alike. Forward goes through them and piles up activations. Backward goes through them in the other direction: in each block it uses up activations and leaves gradients. Two moments matter:
#
# $$\text{peak} = \text{weights} + \text{states} + \max\begin{cases}\text{activations} + \text{logits} & \text{backward begins}\\ \text{gradients} + \text{embedding copies} & \text{the last gradient arrives}\end{cases}$$
#
# The last term is easily forgotten. SmolLM2 uses one matrix twice, as the embedding at its input and as the output layer at its end: it is *tied*. It gets a gradient from both ends. The first one waits for the second one, and their sum is a third tensor: two **embedding copies** more than the gradients need.
#
# Every term follows from the configuration of the model.


# %%
def bytes_of_a_step(model, tokens):
    """The terms of the equation in fp32, for blocks as in Llama, Qwen and Mistral."""
    config = model.config
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    of_norm = 3 * config.hidden_size  # the input, that normalised, and the output
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
terms = bytes_of_a_step(skeleton, sizes.rows * sizes.tokens)
ground = terms["weights"] + terms["states"]
begins = ground + terms["activations"] + terms["logits"]
ends = ground + terms["gradients"] + terms["embedding copies"]
for name, size in terms.items():
    print(f"{name:<17}{mib(size):>11}")
print(f"one of the three tables of logits: {mib(terms['logits'] / 3)}")
print(f"backward begins  {mib(begins):>11}\nbackward ends    {mib(ends):>11}")
arithmetic = max(begins, ends)

# %% [markdown]
# ## Baseline
#
# Arithmetic knows blocks of one kind. A prediction of any step is the step itself, on PyTorch's *fake tensors*: they have a shape and no memory, and every byte that the step would take is counted.

# %%
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.dry_run import dry_run


def build(*recipes, optimizer_of=adamw, step=train_step, base=fresh):
    """What a row is built from: a model with recipes, its optimizer, and its step."""

    def make():
        model = base()
        for recipe in recipes:
            model = recipe(model)
        return model, optimizer_of(model), step

    return make


def peak_without_data(builder):
    with dry_run():
        model, optimizer, step = builder()
        step(model, optimizer)  # AdamW makes its states
        with PeakMemory() as memory:
            step(model, optimizer)
    return memory.peak


dry_peak = peak_without_data(build())
print(f"predicted: {mib(dry_peak)}")

# %% [markdown]
# Each recipe adds a row to a table, the *ladder*. `ladder.climb` predicts a step in this way, and then takes it for real: once to make the states, and once while every byte of every tensor is counted.
#
# **Guess first.** As a curve, the two moments are two *towers*. Arithmetic has printed the height of both. What does the curve look like between them?

# %%
from recipes_lib.report.ladders.memory import MemoryLadder
from recipes_lib.report.charts.memory_timeline import timeline_chart

ladder = MemoryLadder(
    "01_large_models_limited_hardware", rows=sizes.rows, length=sizes.tokens
)


def towers(name):
    """The bytes at both moments of the equation, in a row of the ladder."""
    first, second = ladder.timelines[name].towers()
    print(f"first tower {mib(first.total)}, second tower {mib(second.total)}")


baseline = ladder.climb("baseline", build(), group="in 32 bits")
towers("baseline")
print(f"arithmetic is off by {arithmetic / baseline.peak_bytes - 1:+.2%}")
print(f"fake tensors are off by {dry_peak / baseline.peak_bytes - 1:+.2%}")
timeline_chart(
    {"baseline": ladder.timelines["baseline"]},
    predicted={"baseline": ladder.predictions["baseline"].timeline},
    both_towers=True,
    title="The plain step: activations pile up, then gradients take their place",
)

# %% [markdown]
# **The answer.** It falls until the embedding's copies make the second tower: backward frees more activations than it makes gradients. (The curve counts the logarithms of the logits among the activations. Their gradients are *other*, and so are the embedding copies.)
#
# **Part A** attacks the first tower, which grows with the tokens. **Part B** attacks the second one, and the ground of both: weights and states. In the prints, *backward begins* and *forward ends* are the first tower.
#
# These are bytes of tensors. A process also has holes between them, and a GPU its context: leave a fifth for them.
#
# ### Something small to try ideas on
#
# Each idea runs on a model with two narrow blocks. Its gradients are compared with those of the plain step and of the library.

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


def gradients_of(model, texts=small_batch):
    def backward():
        model(**texts, use_cache=False).loss.backward()

    return gradients_after(backward, model)


right = gradients_of(small)
print(f"{right.numel():,} gradients")

# %% [markdown]
# ## Part A: what grows with the tokens
#
# ### 1. Gradient accumulation
#
# **What happens.** Split the batch into micro-batches, run one after the other, add up their gradients, and update the weights once. Only one micro-batch has activations and logits at a time.
#
# **Guess first.** With four micro-batches, activations and logits shrink to a quarter. But gradients wait while the next forward runs. Does the peak fall by half?
#
# **The idea** is a loop, because autograd adds to `.grad` by itself. One division needs care: a model returns the *mean* loss over the answer tokens that it sees, and in the whole batch every token weighs the same. transformers' models divide by `num_items_in_batch`, if they get it.


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


in_four_parts = gradients_after(partial(accumulate, small, small_batch, 4))
assert torch.allclose(in_four_parts, right, atol=1e-6)
print("in four parts and at once: the same gradients")


def accumulated_step(model, optimizer):
    loss = accumulate(model, batch, 4)  # micro-batches of five texts on a CPU
    optimizer.step()
    optimizer.zero_grad()
    return loss


accumulated = build(step=accumulated_step)
ladder.climb("gradient accumulation", accumulated, group="in 32 bits")

# %% [markdown]
# **The answer.** By 35 %, to 2,717 MiB. A quarter of activations and logits is left, but weights and states stay, 1,539 MiB, and all gradients wait, 513.
#
# A popular loop divides by the number of micro-batches. A token of a short answer then weighs more than one of a long answer. The hard case are micro-batches of one text each:


# %%
def error_of_the_popular_way():
    model = load_model(sizes.learner)  # a small one: the baseline waits beside it
    few = {name: tensor[:4] for name, tensor in batch.items()}

    def mean_of_means():
        for one in parts_of(few, 4):
            (model(**one, use_cache=False).loss / 4).backward()

    wanted = gradients_of(model, few)
    difference = gradients_after(mean_of_means, model) - wanted
    return (difference.norm() / wanted.norm()).item()


naive_error = error_of_the_popular_way()
print(f"the popular way: the gradient is off by {naive_error:.0%} of its length")

# %% [markdown]
# **In your code.** The Trainer divides right since transformers 4.46. A loop of your own has to pass `num_items_in_batch`, or call [`accumulate_gradients`](../recipes_lib/training/gradient_accumulation.py).
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
# **Guess first.** A token leaves 11,136 numbers in a block of SmolLM2, and 576 go into it. What is left of the activations?
#
# **The idea.** A function with a `forward` and a `backward` of our own keeps only the input, and runs the block again in `backward`. In the comments stand shapes: [B, S, D] are texts, tokens of a text, and the width of the model.

# %%
from recipes_lib.memory.activation_checkpointing import (
    InputOnly,
    apply_activation_checkpointing,
    checkpointed_by_hand,
)

show(checkpointed_by_hand, InputOnly)


def checkpointed_backward():
    """The blocks of the small model, called one by one."""
    hidden = small.model.embed_tokens(words)  # [B, S, D]
    positions = torch.arange(words.shape[1])[None]
    rotary = small.model.rotary_emb(hidden, positions)
    blocks = [partial(b, position_embeddings=rotary) for b in small.model.layers]
    hidden = checkpointed_by_hand(blocks, hidden)
    logits = small.lm_head(small.model.norm(hidden))
    # Token t + 1 is predicted from token t.
    targets = small_batch["labels"][:, 1:].flatten()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), targets).backward()


def checkpointing(model):
    model.activation_checkpointing_enable()  # once called gradient_checkpointing_enable
    return model


assert torch.allclose(gradients_after(checkpointed_backward), right, atol=1e-6)
for library in (checkpointing, apply_activation_checkpointing):
    assert torch.equal(gradients_of(library(copy.deepcopy(small))), right)
print("by hand: equal to rounding; both libraries: equal to the last bit")

ladder.climb("activation checkpointing", build(checkpointing), group="in 32 bits")

# %% [markdown]
# **The answer.** 104 of 1,845 MiB, which are the printed 374 without the 270 of logarithms: the inputs of thirty blocks, and what the last norm keeps. The peak falls by 42 %. What is left of the tower are the logits.
#
# **The logits, too.** Those of a few hundred tokens give their part of the loss and of the gradients, and are freed. Forward computes these gradients at once: the loss is one number, so what comes later only multiplies them. [Notebook 04](../notebooks/04_training_long_sequences.ipynb) builds this *loss in chunks* by hand, beside PyTorch's `F.linear_cross_entropy`. Ours goes into a model of transformers.
#
# **Guess first.** Does the peak fall by most of the logits?

# %%
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy

in_chunks = apply_chunked_cross_entropy(copy.deepcopy(small))
assert torch.allclose(gradients_of(in_chunks), right, atol=1e-6)


def recipe_2(model):
    """Checkpoints around the blocks, and a loss in chunks."""
    return apply_chunked_cross_entropy(checkpointing(model))


ladder.climb("checkpointing, loss in chunks", build(recipe_2), group="in 32 bits")
towers("checkpointing, loss in chunks")

# %% [markdown]
# **The answer.** No, by 185 MiB. The first tower is now 1,826 MiB, and the second one is the peak: no recipe of Part A gets below its 2,269. **In your code** take both together: checkpoints alone leave the logits, a loss in chunks alone the activations.
#
# ### 3. Activation offloading
#
# **What happens.** Keep every activation, but somewhere else: a GPU's in host memory, a CPU's on the disk. Autograd hands each tensor that it saves to one function, and asks another one for it when backward needs it. PyTorch has both as `save_on_cpu`. Ours copies while the GPU computes, leaves the weights where they are, and can use the disk.
#
# **Guess first.** Nothing is computed twice. Will the peak be lower than with checkpointing alone?

# %%
from recipes_lib.memory.activation_offload import offload_activations

with torch.autograd.graph.save_on_cpu(pin_memory=False):
    assert torch.equal(gradients_of(small), right)

elsewhere = "host" if device == "cuda" else "disk"


def offloaded_step(model, optimizer):
    with offload_activations(model, to=elsewhere):  # in place of save_on_cpu
        return train_step(model, optimizer)


offloaded = build(step=offloaded_step)
ladder.climb("activation offloading", offloaded, group="in 32 bits")

# %% [markdown]
# **The answer.** A little: 2,422 MiB in place of 2,454. Offloading keeps the activations of the last block, which backward needs first; checkpointing keeps the inputs of all. Both leave the logits.
#
# **In your code.** Write `with torch.autograd.graph.save_on_cpu(pin_memory=True):` around forward, or `activation_offloading=True` in TRL's `SFTConfig`. Here the system keeps the files in free memory; a real disk is slower.
#
# ## Faster: 16 bits and a compiler
#
# ### 4. Mixed precision
#
# **What happens.** Multiply in 16 bits, where the units for it are faster. Norms, softmax and loss stay in fp32, because they add up many numbers. So do the weights, because an update is often too small for 16 bits.
#
# **Guess first.** Do the activations fall by half?
#
# **The idea.** Both factors of a product are converted. PyTorch's `autocast` does the same.

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
# **The answer.** By far less: the print says 2,116 → 1,786 MiB, 270 of them logarithms. Norms keep what they read in fp32. Queries, keys and values read one tensor, and autocast makes a 16-bit copy for each of them. The 16-bit copies of weights wait for backward, too. Mixed precision is a recipe for time.
#
# **In your code.** bf16 has the range of fp32 and few digits. fp16, the only fast one on a T4, has a small range: small gradients become zero, unless a `GradScaler` multiplies the loss first. `mixed_precision()` chooses for this machine.
#
# ### 5. Compiled blocks
#
# **What happens.** Between two products a block runs dozens of small operators: norms, rotary positions, casts. Each is a program of its own, a *kernel*, which reads its input from memory and writes its output back. A compiler makes one of them.
#
# **Guess first.** That saves time. Does it also save memory?
#
# **The idea** is one line per block. All blocks do the same with other weights, so one is compiled, and the others use its code.

# %%
from recipes_lib.training.compiled_blocks import (
    apply_compiled_blocks,
    break_even_steps,
    can_compile,
    compile_seconds,
    compiled_by_hand,
)

show(compiled_by_hand)

compiles = can_compile(device)
if compiles:
    for library in (compiled_by_hand, apply_compiled_blocks):
        of_compiled = gradients_of(library(copy.deepcopy(small)))
        assert torch.allclose(of_compiled, right, atol=1e-6)
    print("compiled gradients: equal up to rounding, for sums run in another order")
compiles = compiles and sizes.compile


def compiled(model):
    return apply_compiled_blocks(model) if compiles else model


began = compile_seconds()
ladder.climb(
    "mixed precision, compiled",
    build(compiled, step=step_in_16_bits),
    after="mixed precision",
    **in_16_bits,
)
compiling = compile_seconds() - began

# %% [markdown]
# **The answer.** Yes: 3,865 → 3,359 MiB. What is cheap is not kept for backward but computed again, inside the same kernel. That is the compiler's choice, so the prediction asks the compiler about one block. (Inside compiled code the account cannot tell *activations* from *other*: read their sum.)
#
# **In your code.** `block.compile()` for each block, before checkpointing. The Trainer's switch compiles the whole model as one graph, which takes longer.
#
# ### The rows take turns on the clock
#
# Bytes are the same in every run. Times are not, for other programs disturb them. So the models were kept, and now take *turns*. A disturbance only makes a turn longer, so **the fastest turn counts**, and × is the fastest turn of a row divided by that of the baseline. In brackets is the range: of the turns, and of the ratios of single rounds. Where the brackets of s per step overlap, neither row is called faster. (A later set has further turns of the baseline, so × can still change a little.)

# %%
from recipes_lib.report.ladder import RATIO, TIME, cell

ladder.take_turns(rounds=sizes.rounds)
for row in ladder.rows:
    print(f"{row.name:<31}{cell(row, TIME):>19} s{cell(row, RATIO):>19} ×")
earned = break_even_steps(
    compile_seconds=compiling,
    plain_step=ladder["mixed precision"].seconds,
    compiled_step=ladder["mixed precision, compiled"].seconds,
)
print(f"{compiling:.0f} s of compiling are earned after {earned} steps,")
print("and later where no earlier run has left its kernels on the disk.")

# %% [markdown]
# Checkpoints cost one more forward. With the loss in chunks they take less time than alone, because it skips the tokens without a label; where every token has one it will not. Offloading moves every byte, and is the slowest. The compiler may have found kernels of an earlier run on the disk; a first run takes longer.
#
# ## Part B: what every weight costs
#
# From here on the step has 16 bits, checkpoints and a loss in chunks. Each recipe attacks the second tower or the ground.

# %%
lean_row = "16 bits, checkpointing, loss in chunks"
on_lean = {"group": "on top of 16 bits, checkpointing, loss in chunks"}
ladder.climb(lean_row, build(recipe_2, step=step_in_16_bits), **on_lean)
on_lean["after"] = lean_row

# %% [markdown]
# The peak is the second tower, as it was in fp32: at the end of backward all that is there has 32 bits, with autocast or without.
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
# **Guess first.** What is left of the second tower? Think of the tied embedding.
#
# **The idea**, and the real call in it: one optimizer per weight, and a hook that autograd calls when a gradient is complete.

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
    model(**small_batch, use_cache=False).loss.backward()
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
ladder.climb(
    "step in backward",
    build(recipe_2, optimizer_of=in_backward, step=in_one_go),
    **on_lean,
)
towers("step in backward")

# %% [markdown]
# **The answer.** Of its 729 MiB of gradients and copies, 324 stay: the gradient of the tied embedding comes in two parts of 108, and their sum takes 108 more. So this tower is 1,863 MiB, and now the end of forward is higher, 1,882. There a loss in chunks computes its gradients already, and the output layer has one.
#
# **In your code.** Accumulation, clipping by the global norm and a loss scale find no gradients, and PyTorch raises no error. Ours refuses them, and adds a learning-rate schedule and a state dict.
#
# ### 7. Optimizer states in 16 or 8 bits
#
# **What happens.** Store AdamW's two averages in 16 bits, 4 bytes per weight in place of 8; or in 8 bits, 2 bytes. Compute each update in fp32 as before.
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
# **The answer.** Rounded to nearest, it never falls. Updates are divided by its root, so they stay too small, and no error says so. *Stochastic rounding* goes to one of the two neighbours at random, to the nearer one more often, and is right on average. Ours rounds the second average so.
#
# In 8 bits each average becomes a *code*: the number of an entry in a list of 256 values, close together near zero and far apart near one. 256 neighbours share one scale. Ten steps on the same gradients:

# %%
import bitsandbytes

from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.sixteen_bit_adam import sixteen_bit_adamw

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
eight_bits = dict(optimizer_class=bitsandbytes.optim.AdamW8bit)
eight_bits_in_backward = partial(apply_optimizer_in_backward, **eight_bits)
fewer_bits = {
    "16-bit AdamW states": (sixteen_bit_adamw, step_in_16_bits),
    "8-bit AdamW": (eight_bit_adamw, step_in_16_bits),
    "8-bit AdamW in backward": (eight_bits_in_backward, in_one_go),
}
for name, (optimizer_of, step) in fewer_bits.items():
    optimizer_of = partial(optimizer_of, lr=2e-5)
    ladder.climb(name, build(recipe_2, optimizer_of=optimizer_of, step=step), **on_lean)

# %% [markdown]
# States fall from 1,026 MiB to 513, and to 422 in 8 bits. These are not 257, because *8-bit AdamW* keeps the states of the embedding in 32 bits, as the authors of the method advise. So does the Trainer's `optim="adamw_8bit"`. The embedding is a fifth of this model and a small part of a large one. The last row differs in two things: the step is in backward, and bitsandbytes' own class has all states in 8 bits. Its 1,117 MiB are the least of full fine-tuning in this notebook.
#
# Weights in 16 bits halve the ground once more, and every update is then rounded as the averages above: take [`bf16_adamw`](../recipes_lib/precision/pure_bf16.py), which rounds them stochastically.
#
# ### 8. Optimizer states in host memory
#
# On a GPU the states can wait in host memory, where the update runs, too: gradients go down, weights come up, and the host holds 16 bytes per weight and staging buffers. [`offload_optimizer`](../recipes_lib/memory/optimizer_offload.py) does it. On a CPU there is nowhere to move them to, so there is no row. A *paged* optimizer moves them only when memory runs out.
#
# ### 9. LoRA
#
# **What happens.** Freeze the weights, and put a small correction beside each linear layer: two thin matrices `A` and `B`, whose product has the shape of the weight and a low *rank*. Only they, the *adapter* of the layer, get gradients and states.
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


layer = lora(copy.deepcopy(small)).get_base_model().model.layers[0].self_attn.q_proj
a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
torch.nn.init.normal_(b)  # B starts at zero: an untrained adapter changes nothing
hidden = torch.randn(2, 5, layer.in_features)
corrected = plain_lora(hidden, layer.base_layer.weight, a, b, alpha=32)
assert torch.allclose(layer(hidden), corrected, atol=1e-4)
print("one adapted layer by hand and by peft: equal")

ladder.climb("LoRA", build(lora, recipe_2, step=step_in_16_bits), **on_lean)

# %% [markdown]
# **The answer.** Next to nothing: states are 37 MiB in place of 1,026, and gradients are half of that. The peak is the end of forward, 779 MiB, and most of it is the weights, 532 with the adapters. (Its loss is higher. The loss of a row of the ladder is that after one update, which moves an adapter by far less than a whole model. So it says little about adapters.)
#
# **In your code.** Make a new `LoraConfig` for each model: peft writes the names of the layers that it has found into it, and on a deeper model the same object would adapt the first blocks alone. Gradients of frozen weights are left out, but each of 210 layers gets two small products more, so adapters do not always save time.
#
# ### 10. QLoRA
#
# **What happens.** Frozen weights are only read, so few digits suffice. QLoRA keeps each one as one of 16 levels: four bits. 64 neighbours share a scale, which has 8 bits. Each product unpacks its layer for a moment.
#
# ```text
# y = x · unpack(W)ᵀ  +  (alpha / r) · (x Aᵀ) Bᵀ        W: 0.52 bytes per weight instead of 4
# ```
#
# **Guess first.** The embedding stays as it is. Which is then larger, the embedding or all blocks?
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
# With the libraries, on the small model in a folder, where any name of the hub can stand:

# %%
from peft import prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

four_bits = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,  # scales in 8 bits
    bnb_4bit_compute_dtype=torch.bfloat16,
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
ladder.climb("QLoRA", build(qlora, recipe_2, step=step_in_16_bits), **on_lean)

# %% [markdown]
# **The answer.** The embedding. Of 179 MiB of weights, 108 are the embedding in fp32, 52 all packed blocks, and 19 the adapters.
#
# **In your code.** `prepare_model_for_kbit_training` turns every 16-bit weight that is not packed into fp32, the embedding and the output layer too. With a large vocabulary that is much: the table of cards prints it. Without `use_reentrant=False` no gradient reaches the first block. And on CPUs with AVX512-BF16 one forward in evaluation mode, in which `from_pretrained` returns a model, makes bitsandbytes repack the weights for a kernel without a backward. So call `model.train()` before the first forward, and `check_gradient_flow` once, which sees both traps. Ours closes them, and rounds a model that is in memory already.
#
# ### 11. Layer streaming
#
# **What happens.** A frozen weight is needed only while its block is computed. So it can wait elsewhere: a GPU's in host memory, a CPU's on the disk. While one block is computed, the next one is on its way. There is a checkpoint around each block, and the block asks for its weights whenever it runs, in forward and again in backward.
#
# **Guess first.** Two packed blocks are here at a time. Does the peak fall by nearly all blocks, or by much less?

# %%
from recipes_lib.memory.layer_streaming import apply_layer_streaming

# It has checkpoints of its own.
streaming = partial(apply_layer_streaming, to=elsewhere)
streamed = build(qlora, apply_chunked_cross_entropy, streaming, step=step_in_16_bits)
ladder.climb("QLoRA, streamed", streamed, **on_lean | {"after": "QLoRA"})

# %% [markdown]
# **The answer.** By 51 of 52 MiB: at the peak, in the loss, hardly any block is needed. (Inputs of these checkpoints count as *other*.)
#
# **In your code.** DeepSpeed's ZeRO-3 with `offload_param` moves weights that train; for a frozen base in four bits we know of no switch. Each weight crosses the link twice a step: take many tokens per step, so that a block takes longer to compute than the next one to come.
#
# ## Everything combined
#
# Two combinations, one for time and one for memory.
#
# **For time**: 16 bits, compiled blocks, a loss in chunks. All weights train, and no block runs forward twice.
#
# **For memory**: QLoRA with every term small, so only adapters train. Weights: four bits in the blocks, 16 bits in embedding and norms. Activations: checkpoints around compiled blocks, with 16 bits between them. Logits: a loss in chunks. The rest is left out: the batch fits without accumulation, adapters have few gradients and states, and little is left to move elsewhere.
#
# **Guess first.** Which term is the largest one left in the second combination?

# %%
fast_row = "16 bits, compiled, chunked loss"


def whole_model(model):
    return apply_chunked_cross_entropy(compiled(model))


def small_in_every_term(model):
    model = model.to(precision.dtype)  # what is frozen needs no 32 bits
    model = compiled(qlora(model))  # before checkpointing, which stays outside
    model = apply_activation_checkpointing(model)
    return apply_chunked_cross_entropy(model)


combined = build(small_in_every_term, step=step_in_16_bits)
ladder.climb(fast_row, build(whole_model, step=step_in_16_bits), group="together")
ladder.climb("everything combined", combined, group="together")
ladder.take_turns(rounds=sizes.last_rounds)
ladder.chart()

# %% [markdown]
# **The answer.** The weights, 125 of 267 MiB: 54 of embedding in 16 bits, 52 of packed blocks, 19 of adapters. Only predictions of compiled rows are off at all, by half a per cent here: the compiler decides by itself which buffers it uses again.
#
# ## Does it still learn?
#
# The rows to choose from train on the same batches, from the same pretrained weights, adapters at ten times the learning rate. What counts is the loss on functions from modules that are not in the training texts.

# %%
from recipes_lib.core.data.evaluation import evaluate


def learn(recipe, optimizer_of, step):
    """The held-out loss before training and after it."""
    seed_everything(0)
    model = recipe(load_model(sizes.learner))
    optimizer = optimizer_of(model)
    before = evaluate(model, held_out, pad_token_id=padding)
    for _, texts in zip(range(sizes.steps), batches_of(sizes.learner_rows)):
        step(model, optimizer, texts)
    after = evaluate(model, held_out, pad_token_id=padding)
    return [(0, before), (sizes.steps, after)]


def as_it_is(model):
    return model


def lean_qlora(model):
    return recipe_2(qlora(model))


def adamw_at(rate):
    def optimizer_of(model):
        return torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    return optimizer_of


for_weights, for_adapters = adamw_at(5e-5), adamw_at(5e-4)
in_8_bits = partial(eight_bits_in_backward, lr=5e-5)
curves = {
    "baseline": learn(as_it_is, for_weights, train_step),
    "8-bit AdamW in backward": learn(recipe_2, in_8_bits, in_one_go),
    fast_row: learn(whole_model, for_weights, step_in_16_bits),
    "QLoRA": learn(lean_qlora, for_adapters, step_in_16_bits),
    "everything combined": learn(small_in_every_term, for_adapters, step_in_16_bits),
}

# %% [markdown]
# All five ran in the same turns. They are compared with full fine-tuning in fp32, the baseline, and with what many have today, QLoRA with 16 bits, checkpoints and a loss in chunks. *70 % less memory, and faster* is a common promise: the last column says who keeps it against the baseline, in every round.

# %%
print(f"{'':<33}{'to the baseline':>15}{'to QLoRA':>15}   held-out loss   promise")
for name, ((_, first), (_, last)) in curves.items():
    row = ladder[name]
    line = f"{name:<33}"
    for other in (baseline, ladder["QLoRA"]):
        memory = f"{row.peak_bytes / other.peak_bytes - 1:+.0%}"
        line += f"{memory:>8},{row.seconds / other.seconds:>5.2f}×"
    faster = row.ratio_high < 1  # in each round
    kept = "kept" if ladder.saved(name) >= 0.7 and faster else ""
    print(f"{line}   {first:>5.2f} → {last:.2f}   {kept}")

# %% [markdown]
# With room for 2,735 MiB take *16 bits, compiled, chunked loss*: it is the fastest, and trains all weights. With 1,117 take *8-bit AdamW in backward*, which takes as long as the baseline. With 779 take *LoRA*: it avoids the rounding to four bits, and this notebook has no held-out loss of it. (Here its base has 32 bits. No cell runs LoRA on a base in 16 bits: its lines in the table of cards are predicted.) With less take *everything combined*: it is smaller and faster than QLoRA, because its blocks are compiled and nothing but the adapters has 32 bits.
#
# Times of 8-bit AdamW, of offloading to a disk and of streaming are those of CPU implementations, and of files that the system keeps in free memory. They do not carry over to a GPU.
#
# Four bits have a price before training, 3.70 → 4.00 and 4.08. These weights come from a file of four bits, so they are rounded twice; a model in 16 bits pays another one. *Everything combined* rounds them from 16 bits, QLoRA from 32. (Compare the two by these losses, not by those of the ladder, which come after a single update.) The losses are of one run each, with rates that were not tuned: all of them learn, and [notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb) compares which learns best.
#
# <!-- numbers:gpu-01 -->
# <!-- end -->
#
# ## What fits your card
#
# The same equation, for three sizes of Llama on one text of 2,048 tokens; more texts are a matter of accumulation. All four ways have checkpoints and a loss in chunks. *Full* trains all weights, which have 32 bits, with 8-bit AdamW in backward. The others train adapters of rank 16, on a base in 16 bits, in four bits, or in four bits with two blocks at a time on the card.

# %%
from dataclasses import replace

from recipes_lib.core.predict import equation
from recipes_lib.core.predict.any_size import any_size

GIB = 2**30
CARDS = (8, 16, 24, 80)  # GiB
TEXT = dict(rows=1, length=2048)


def lean(step):
    return equation.with_chunked_loss(equation.with_checkpointing(step))


def full_in_8_bits(model):
    step = lean(equation.plain_step(model, **TEXT))
    return equation.with_step_in_backward(equation.with_states_in(step, bits=8))


def with_lora(model, base=as_it_is):
    step = base(equation.with_adapters(equation.plain_step(model, **TEXT), rank=16))
    return equation.with_adapters_made_again(lean(step), rank=16)


def with_qlora(model):
    return with_lora(model, equation.in_four_bits)


def with_streaming(model):
    step = with_qlora(model)
    away = step.sizes.linear_bytes * (1 - 2 / step.sizes.blocks)
    return replace(step, weights=step.weights - round(away))


ways = {
    "full, 8-bit AdamW": (full_in_8_bits, torch.float32),
    "LoRA": (with_lora, torch.bfloat16),
    "QLoRA": (with_qlora, torch.bfloat16),
    "QLoRA, streamed": (with_streaming, torch.bfloat16),
}
cards = "".join(f"{card:>5}" for card in CARDS)
print("predicted by arithmetic, not run; fits: with a fifth more, and half a GiB\n")
print(f"{'':<32}{'GiB':>6}   fits{cards} GiB")
for shape in ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"):
    for name, (way, dtype) in ways.items():
        step = way(model_of_shape(shape, dtype=dtype, device="meta"))
        needed = (1.2 * step.peak + GIB / 2) / GIB
        fits = "".join(f"{'yes' if needed <= card else '–':>5}" for card in CARDS)
        print(f"{shape:<14}{name:<18}{step.peak / GIB:>6.1f}       {fits}")
to_fp32 = 2 * 128_256 * 4_096 * 2 / GIB
print(f"\npeft's fp32 for embedding and output layer of 8B: {to_fp32:.1f} GiB more")

# %% [markdown]
# *Full* counts the states of the embedding in 32 bits, as in the Trainer's `adamw_8bit`; *8-bit AdamW in backward* of the ladder has all of them in 8. The table is not for a T4: it has no bf16, which these bases have, and the loss scale of fp16 excludes the step in backward.
#
# Arithmetic knows no operators. So one line is checked by the step itself, on fake tensors. It needs no 32 blocks: each adds the same bytes at the same moment, so `any_size` takes 2 and 3 blocks, checks itself on a third depth, and goes on to 32.

# %%
ids = torch.zeros(TEXT["rows"], TEXT["length"], dtype=torch.long, device=device)
long_step = partial(train_step, texts={"input_ids": ids, "labels": ids})


def large(layers):
    """What builds the QLoRA step of a large model in 16 bits, with so many blocks."""
    shape = partial(model_of_shape, sizes.large, dtype=torch.bfloat16, layers=layers)
    return build(qlora, recipe_2, step=long_step, base=shape)


peak = any_size(large, layers=(2, 3)).peak(layers=32)
print(f"{sizes.large}, QLoRA: {peak / GIB:.1f} GiB by the step without data")

# %% [markdown]
# **Which tower is higher on your GPU?** Let the allocator tell the peak until the middle of backward, and then the rest:
#
# ```python
# peaks = []
#
# def in_the_middle(*_):
#     peaks.append(torch.cuda.max_memory_allocated())
#     torch.cuda.reset_peak_memory_stats()
#
# blocks = model.model.layers
# blocks[len(blocks) // 2].register_full_backward_pre_hook(in_the_middle)
# train_step(model, optimizer)  # makes the states
# torch.cuda.reset_peak_memory_stats()
# peaks.clear()
# train_step(model, optimizer)  # the measured one
# print("first tower", peaks[-1], "second tower", torch.cuda.max_memory_allocated())
# ```
#
# The first one is higher: Part A. The second one: Part B. Out of memory? Measure with one short text. Above the ground the first tower grows with the tokens, and the second does not: scale the first to your batch. Of what it consists shows `torch.cuda.memory._record_memory_history()` with `_dump_snapshot("s.pickle")`, opened at [pytorch.org/memory_viz](https://pytorch.org/memory_viz).
#
# ### 12. Dynamic batch size
#
# Where nobody knows what fits, halve the micro-batches when memory runs out, and double their number: the gradient stays that of the same batch. Below, a limit stands in for a smaller device: 80 % of what the gradient takes at once.

# %%
from recipes_lib.core.predict import predict
from recipes_lib.training.dynamic_batch import (
    fit_micro_batches,
    halve_until_it_fits,
    predicted_micro_batches,
)

show(halve_until_it_fits)

few_texts = {name: tensor[: sizes.few] for name, tensor in batch.items()}
adapted = build(qlora, checkpointing)


def peak_in_parts(count):
    def step(model, optimizer):
        accumulate(model, few_texts, count)

    return predict(lambda: (adapted()[0], None, step)).peak


limit = int(0.8 * peak_in_parts(1))
expected = predicted_micro_batches(
    peak_in_parts, limit_bytes=limit, batch_size=sizes.few
)
model = adapted()[0]
with PeakMemory(limit_bytes=limit):
    fitted = fit_micro_batches(
        partial(accumulate, model, few_texts), model=model, batch_size=sizes.few
    )
found = fitted.micro_batches
del model, fitted
print(f"limit {mib(limit)}: {expected} micro-batches predicted, {found} found")

# %% [markdown]
# **In your code.** The Trainer's `auto_find_batch_size=True` is something else: it takes a smaller batch, does not accumulate, and so trains with another batch size.
#
# ## Which recipe when
#
# **An order to try.** Start with what changes nothing and costs little: bf16, a loss in chunks, checkpoints, micro-batches. If all weights have to train: 8-bit AdamW, then the step in backward, then states on the host. If not: LoRA, then QLoRA. What is still too large is streamed. Where texts have many lengths, [packing](../recipes_lib/training/sequence_packing.py) comes first: padding fills memory, too.

# %%
ladder

# %% [markdown]
# | recipe | switch in the Trainer, or the call | not when |
# |---|---|---|
# | gradient accumulation | `gradient_accumulation_steps=4` | the batch fits |
# | activation checkpointing | `activation_checkpointing=True`, in older transformers `gradient_checkpointing=True` | activations are not at the peak |
# | loss in chunks | TRL's `SFTTrainer` has one; in the Trainer `use_liger_kernel=True`, on a GPU | you need the logits |
# | activation offloading | `SFTConfig(activation_offloading=True)`; of inputs only: `activation_checkpointing_kwargs={"offload": True}` | checkpointing is enough: it is simpler |
# | mixed precision | `bf16=True`; on a T4 `fp16=True` | 16 bits are not native: emulation is slow |
# | compiled blocks | `torch_compile=True` | each batch has another shape |
# | step in backward | a hook, as above; torchtune's `optimizer_in_bwd` | you accumulate, clip, or scale the loss |
# | 16-bit AdamW states | torchtitan's `fused_opt_states_bf16`; its documents name no stochastic rounding: the trap of recipe 7 | with LoRA: states are small |
# | 8-bit AdamW | `optim="adamw_8bit"`, or `"paged_adamw_8bit"` | with LoRA: states are small |
# | states on the host | DeepSpeed's `offload_optimizer`, FSDP2's `CPUOffloadPolicy` | 8 bits are enough |
# | LoRA | `get_peft_model`, TRL's `peft_config` | much that is new has to be learned |
# | QLoRA | `BitsAndBytesConfig`, as above | the 16-bit weights fit: rounding costs quality |
# | layer streaming | none: `apply_layer_streaming` | the weights fit |
#
# **What does not go together**: the step in backward with accumulation, clipping or fp16; offloading of every activation with checkpointing. More of both: [cheatsheet](../CHEATSHEET.md), [TRAPS.md](../TRAPS.md).
#
# ## Out-of-memory doctor
#
# Given a model, a device and the text of an error, what should be tried first? Each line is a stack of recipes with its predicted peak by arithmetic. (Is much *reserved but unallocated*? Then memory is in pieces, and `PYTORCH_ALLOC_CONF=expandable_segments:True` joins them.)

# %%
from recipes_lib.workflows.out_of_memory_doctor import diagnose

diagnosis = diagnose(
    error="CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity "
    "of 24.00 GiB of which 512.00 MiB is free.",
    model=model_of_shape(sizes.large, dtype=torch.bfloat16, device="meta"),
    batch_size=4,
    seq_len=2048,
    memory_bytes=24 * GIB,
)
for remedy in diagnosis.remedies:
    print(f"{remedy.name:<54}{remedy.outcome}")
print(f"\nfirst that fits: {diagnosis.first_fit.name}")

# %% [markdown]
# The doctor fills the card to 95 % of what CUDA's context leaves. The table of cards keeps a fifth and half a GiB: by its rule, the LoRA and the QLoRA of this list need more than 24 GiB. Where the two differ, trust the table. QLoRA has no loss in chunks in this list, LoRA has one. *As it is*, *checkpointing* and *8-bit AdamW* train all weights in bf16, of which recipe 7 warns.
#
# ## Take this home
#
# QLoRA with checkpoints, by the libraries alone but for the data and the measurement: `four_bits` and `adapters()` are those of recipes 9 and 10; write your model's name in place of `resolve(…)`, and your own rows. With rows of `messages` TRL trains on the prompt, too: set `assistant_only_loss=True`, or give rows with `prompt` and `completion`. [`scripts/train_large_model.py`](../scripts/train_large_model.py) has our recipes, a schedule, checkpoints and the held-out loss in one flat file. As one command, on pairs of your own: `python -m recipes_lib finetune --data pairs.jsonl --method qlora --output runs/mine`.

# %%
from trl import SFTConfig, SFTTrainer

source = resolve("HuggingFaceTB/SmolLM2-135M-Instruct")  # of the hub, or a folder
settings = SFTConfig(
    output_dir="runs/take-away",
    max_steps=2,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,  # recipe 1
    activation_checkpointing=True,  # recipe 2, and TRL's loss is in chunks
    bf16=precision.dtype == torch.bfloat16,  # recipe 4
    fp16=precision.dtype == torch.float16,
    optim="adamw_torch_fused",  # recipe 7, where all weights train: "adamw_8bit"
    learning_rate=2e-4,
    logging_steps=1,
    use_cpu=device == "cpu",
    report_to="none",
    disable_tqdm=True,
)
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(
        source, quantization_config=four_bits, device_map=device
    ),
    args=settings,
    train_dataset=train,  # a datasets.Dataset, with `messages` or with tokens
    processing_class=tokenizer,
    peft_config=adapters(),
)
with PeakMemory() as memory:
    trainer.train()
trainer.save_model()  # the adapters
print(f"peak of tensors: {mib(memory.peak)}")
del trainer

# %% [markdown]
# ## Exercises
#
# 1. Double the tokens per text. Which terms of the equation change, and by what factor?
# 2. From how many tokens on is the first tower of the plain step higher than the second?
# 3. Add the *step in backward* to the LoRA row. Why does almost nothing happen?
#
# <details><summary>Answers</summary>
#
# 1. Activations and logits double, and the rest stays: `bytes_of_a_step(skeleton, 2 * tokens)`.
# 2. Where both are equal: divide gradients and embedding copies by the bytes of activations and logits per token. The last cell prints it.
# 3. Its peak comes at the end of forward, before any gradient. And the gradients of adapters are small.
#
# </details>
#
# ## References
#
# - Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016
# - Micikevicius et al., *Mixed Precision Training*, 2018
# - Rajbhandari et al., *ZeRO*, 2020
# - Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, 2022, and *QLoRA*, 2023
# - Hu et al., *LoRA*, 2021
# - Lv et al., *LOMO*, 2023: the step in backward
# - Ansel et al., *PyTorch 2*, 2024: `torch.compile`
#
# The last cell checks the story on this machine.

# %%
equation_off = abs(arithmetic / baseline.peak_bytes - 1)
ladder.note(
    held_out_loss=curves,
    naive_error=naive_error,
    micro_batches=[expected, found],
    source=model_source(),
    equation_off=equation_off,
)
of_tokens = (terms["activations"] + terms["logits"]) / (sizes.rows * sizes.tokens)
of_weights = terms["gradients"] + terms["embedding copies"]
print(f"exercise 2: from {of_weights / of_tokens:,.0f} tokens on")

assert dry_peak == baseline.predicted_bytes, "the ladder predicts as we did"
in_compiled_code = {fast_row, "mixed precision, compiled", "everything combined"}
for row in ladder.rows:
    # The compiler decides late which buffers it uses again.
    allowed = 0.02 if compiles and row.name in in_compiled_code else 0.005
    assert abs(row.prediction_error) < allowed, f"{row.name} as predicted"
assert naive_error > 0.01, "the popular accumulation trains something else"
if not fast():  # in models as small as those of FAST mode, what is left out counts
    assert equation_off < 0.01, "the equation agrees"
    assert all(last < first for (_, first), (_, last) in curves.values()), "all learn"
peaks = [ladder[name].peak_bytes for name in ("baseline", lean_row, "LoRA", "QLoRA")]
assert peaks == sorted(peaks, reverse=True), "each is lower than the one before"
print(f"all checks passed: {ladder.saved('everything combined'):.0%} less peak memory")
