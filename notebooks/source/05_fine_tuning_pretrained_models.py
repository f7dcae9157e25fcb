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
# # My model does not know my task: fine-tuning pretrained models
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your-username/llm-training-recipes/blob/main/notebooks/05_fine_tuning_pretrained_models.ipynb)
#
# <!-- numbers:headline-05 -->
# > **Held-out loss 3.80 → 3.56** (-0.24 nats per token, 95 % interval -0.34 to -0.14) by QLoRA on packed rows, with **73% less peak memory** than full fine-tuning on padded ones, in 0.51× the time per token. Full fine-tuning reached 3.24; each took 3 steps. The same settings in `transformers.Trainer`: the same losses; ours takes 0.88× its time, 0.90× its peak. Every row was predicted first; the arithmetic is off by less than 0.1%.
# >
# > Measured on AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-24.
# <!-- end -->
#
# A pretrained model knows a language, and not your task. This notebook trains one small model on pairs of a question and an answer, in several ways. For each way it predicts the memory, measures it, and asks on pairs that were never trained on whether the model got better, or whether that was luck. At the end the same run becomes a command, and goes to production libraries.
#
# | | |
# |---|---|
# | **You will learn** | to adapt a pretrained model, to prove that it got better, and to take the run to production |
# | **You need** | Python and the basics of PyTorch; no GPU, no login |
# | **Time** | six to ten minutes on two CPU cores |
# | **Cost** | free on a laptop or on a Colab T4 |

# %% [markdown]
# ## The map
#
# | | recipe | its question | file |
# |---|---|---|---|
# | 1 | loss on the answers, and the masking bug | what is learned? | [completion_only_loss.py](../recipes_lib/fine_tuning/completion_only_loss.py) |
# | 2 | held-out loss with an interval | is it better, or is it luck? | [honest_evaluation.py](../recipes_lib/fine_tuning/honest_evaluation.py) |
# | 3 | LoRA and QLoRA, beside full fine-tuning | which weights train? | [lora.py](../recipes_lib/fine_tuning/lora.py), [qlora.py](../recipes_lib/fine_tuning/qlora.py) |
# | 4 | the optimizer: 8 bits, pure bf16, Muon | how do the weights move? | [eight_bit_adam.py](../recipes_lib/precision/eight_bit_adam.py), [pure_bf16.py](../recipes_lib/precision/pure_bf16.py), [muon.py](../recipes_lib/training/muon.py) |
# | 5 | accumulation, clipping and schedule | is a batch in parts the same batch? | [gradient_accumulation.py](../recipes_lib/training/gradient_accumulation.py) |
# | 6 | sequence packing | how much is padding? | [sequence_packing.py](../recipes_lib/training/sequence_packing.py) |
# | 7 | a run that is long enough to see | where does it end? | [loop.py](../recipes_lib/workflows/finetune/loop.py) |
# | 8 | save, merge, deploy | which model is deployed? | [adapter_files.py](../recipes_lib/fine_tuning/adapter_files.py) |
# | 9 | pairs of your own, by one command; killed and resumed | does it work on other pairs, and after a crash? | [command.py](../recipes_lib/workflows/finetune/command.py), [exact_resume.py](../recipes_lib/training/exact_resume.py) |
# | 10 | the same run in production libraries | is it the same in libraries? | [libraries.py](../recipes_lib/workflows/finetune/libraries.py), [export.py](../recipes_lib/workflows/finetune/export.py) |
# | 11 | other families: templates, context, experts, images | does it work for other models? | [chat.py](../recipes_lib/core/chat.py), [rope.py](../recipes_lib/architecture/rope.py) |
#
# [Notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) explains how LoRA, four bits and 8-bit states save memory. Here the question is another one: does the model get better, and how do we know?
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

from recipes_lib.core.default_model import model_source, source_note
from recipes_lib.core.machine import choose_sizes, machine, runs_dir, seed_everything

here = machine()
print(here)
print(f"SmolLM2 comes from: {model_source()}\n{source_note()}")

# %% [markdown]
# All sizes stand in one cell. To fine-tune your own model, write its hub id or folder in the place of `smollm2`: Qwen, Llama, Mistral and Gemma work alike.

# %%
full = dict(
    model="smollm2",
    blocks=None,  # all of them
    tokens=192,  # of a training pair at most; longer ones are left out
    pairs=300,
    held_out=32,  # pairs that are never trained on
    windows=4,  # of Python source, to see what the model forgets
    answer_tokens=20,
    packed_tokens=192,  # of a packed row
    rounds=3,  # of timing
    back=True,  # whether turns go there and back
    steps=3,
    own_steps=24,  # of the command, on pairs of your own
    compile=True,
    certain=True,  # whether the verdicts must be beyond chance
)
# Continuous integration checks that the code runs: two blocks will do.
brief = full | dict(
    blocks=2,
    tokens=64,
    pairs=24,
    held_out=8,
    windows=1,
    answer_tokens=4,
    packed_tokens=128,
    rounds=2,
    back=False,
    own_steps=6,
    compile=False,  # which takes longer than such small sizes
    certain=False,
)
sizes = choose_sizes(cpu=full, gpu16=full, gpu24=full, gpu80=full, fast=brief)
sizes

# %% [markdown]
# ## What runs out: one equation
#
# Fine-tuning spends bytes, like every training, and seconds on tokens. Some tokens are *padding*: they fill short rows up to the length of the longest.
#
# $$\text{seconds} = \frac{\text{useful tokens}}{\text{tokens per second} \times (1 - \text{padding})}$$
#
# *Useful* are all tokens but padding, in every table here.
#
# The data are real: functions of Python's standard library, and their docstrings as the answers. In the print, what stands between ⟦ and ⟧ carries no loss.

# %%
import os
import shutil

from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.chat import IGNORED, decode_with_mask
from recipes_lib.core.data import collate, load_instructions, load_text
from recipes_lib.core.model import load_model, load_tokenizer

# Files of this notebook, made anew in each run.
name = "notebook-05" if sizes.blocks is None else "fast-05"
folder = Path(os.path.relpath(runs_dir() / name))
shutil.rmtree(folder, ignore_errors=True)

tokenizer = load_tokenizer(sizes.model)
padding = {"pad_token_id": tokenizer.pad_token_id}
train = list(load_instructions(tokenizer, max_tokens=sizes.tokens, limit=sizes.pairs))
held_out = list(
    load_instructions(
        tokenizer, split="validation", max_tokens=96, limit=sizes.held_out
    )
)
print(decode_with_mask(train[1], tokenizer))

# %%
base = sizes.model
if sizes.blocks is not None:
    smaller = load_model(sizes.model)
    del decoder_blocks(smaller)[sizes.blocks :]
    smaller.config.num_hidden_layers = sizes.blocks
    base = folder / "base"
    smaller.save_pretrained(base)
    tokenizer.save_pretrained(base)
    del smaller


def fresh(dtype=torch.float32):
    """The pretrained model, each time with the same weights."""
    seed_everything(0)
    return load_model(base, dtype=dtype)


# %% [markdown]
# ## Part A: what is learned, and is it better?
#
# ### 1. Loss on the answers, and the masking bug
#
# **What is going on?** A pair is a question and an answer, in one row of tokens. The model should learn to write the answer, and not the question. So labels of the question are -100, which every loss skips.
#
# **Guess first.** Which share of the tokens carries loss?
#
# **The idea.** Few tokens carry loss, so most logits, the largest tensors of a step, would be computed for nothing. Ask the model for the logits of those positions only.

# %%
from recipes_lib.fine_tuning.completion_only_loss import (
    check_labels,
    completion_only_loss,
)
from recipes_lib.report.show import show

show(completion_only_loss)
targets = check_labels(train, tokenizer)
print(f"tokens that carry loss: {targets:.0%}")

# %% [markdown]
# Three mistakes with labels raise no error in training. The loss falls, and the model learns something else. Here is one row with each of them, and what `check_labels` says:

# %%
row = train[1]
ids = row["input_ids"]
labels = row["labels"]
end = labels[-1]  # the mark with which an answer ends

# The model shifts labels by itself. Shifted twice, each token learns the one after next.
shifted = [*labels[1:], IGNORED]
# The template and the question are learned as well.
unmasked = ids
# A model that never learns the end of an answer does not stop.
without_end = [IGNORED if label == end else label for label in labels]

for wrong in (shifted, unmasked, without_end):
    try:
        check_labels([{"input_ids": ids, "labels": wrong}], tokenizer)
    except ValueError as error:
        print("-", error)

# %% [markdown]
# **How do I use it?** TRL: `completion_only_loss=True`, or `assistant_only_loss=True` for conversations.
#
# **What does it cost?** Nothing. With long questions, short answers and few rows, learning the questions too can help.
#
# ### 2. Held-out loss with an interval
#
# **What is going on?** "The loss fell from 1.52 to 1.47" on some rows says little: other rows might show the opposite. **A number without an interval is an opinion.**
#
# **The idea.** A row is the unit that was drawn, so draw rows again, with replacement, 2,000 times. The middle 95 % of the results is the interval. Two models are compared on the *same* rows: what makes a row hard for both is gone from the difference. *Held-out* rows are never trained on. The unit of a loss is the *nat*: 0.01 nats per token less are about 1 % less perplexity.

# %%
from functools import partial

from recipes_lib.core.evaluation import generate_answers, perplexity
from recipes_lib.fine_tuning.honest_evaluation import (
    compare,
    held_out_losses,
    plain_paired_bootstrap,
)

show(plain_paired_bootstrap)
losses_of = partial(held_out_losses, data=held_out, **padding)
on_python = partial(
    perplexity,
    tokenizer=tokenizer,
    text=load_text(split="validation"),
    windows=sizes.windows,
)
answers_of = partial(
    generate_answers,
    tokenizer=tokenizer,
    prompts=held_out[:20],
    max_new_tokens=sizes.answer_tokens,
)

before = losses_of(fresh())
text_before = on_python(fresh())
answers_before = answers_of(fresh())
print(f"held-out loss {before}")
print(f"perplexity of Python source {text_before:.1f}")

# %% [markdown]
# *Perplexity* is the exponential of the mean loss; [notebook 03](../notebooks/03_optimizing_inference_speed.ipynb) explains it, on other pieces of text, so its numbers are others. That of Python source shows damage: a model that learned docstrings and forgot Python would have paid too much. It does not show all that can be forgotten.
#
# **What does it cost?** A forward pass over the held-out rows. The interval covers the choice of rows. It does not cover another seed of the training.
#
# ## Baseline: full fine-tuning
#
# The results go into a table that grows by one row per recipe, the *ladder*. All its rows go through one loop. Clipping and the schedule count optimizer steps, however many micro-batches a step has.

# %%
from recipes_lib.workflows.finetune import loop

show(loop._optimizer_step)

# %% [markdown]
# The settings of a run are one record. `dataclasses.replace` changes a copy.

# %%
from dataclasses import replace

from recipes_lib.workflows.finetune.settings import Settings

run = Settings(
    base_model=sizes.model,  # what exports and model cards name
    data_file="",  # "" is the standard library
    output_dir=folder,  # of what a run leaves
    method="full",  # all weights; or "lora", "qlora"
    learning_rate=1e-4,  # after the warm-up; then a cosine to zero
    precision="fp32",  # of the products of matrices
    seq_len=sizes.tokens,  # no row may be longer
    steps=sizes.steps,  # optimizer steps
    warmup_steps=0,  # in which the learning rate rises
    rows_per_step=3,  # rows of an optimizer step
    micro_batch_size=3,  # of these, rows in memory at a time
)

# %% [markdown]
# `climb` predicts the bytes of the third step, takes the steps, and compares the held-out losses before and after, row by row.

# %%
from recipes_lib.core.measure import measure
from recipes_lib.report.ladder import Ladder

ladder = Ladder("05_fine_tuning_pretrained_models")
changes = {}  # by row: held-out loss after minus before, with its interval
after = {}  # by row: the held-out losses after
again = {}  # by row: the arguments of its steps, to time them later


def climb(row, run, data=train, dtype=torch.float32):
    """Train as `run` says, add a row to the ladder, and return the trained model."""
    model, plan = loop.prepare(fresh(dtype), data, run=run, **padding)
    trainable = model.num_parameters(only_trainable=True)
    print(f"{trainable:,} trainable, predicted {plan.peak / 2**20:,.0f} MiB")
    print(f"the peak is when {plan.peak_moment()}")

    steps = loop.training_steps(model, data, run=run, **padding)
    # AdamW makes its states in the first step. The last one is measured.
    measured = measure(lambda: next(steps), warmup=run.steps - 1, repeats=0)
    steps.close()
    after[row] = losses_of(model)
    changes[row] = compare(before, after[row])
    ladder.add(row, measured, predicted=plan.peak, loss=after[row].mean)
    again[row] = dict(run=run, data=data, dtype=dtype)
    print(ladder.line(row, timed=False))
    print(f"held-out loss {changes[row]}")
    return model


model = climb("full fine-tuning", run)
del model

# %% [markdown]
# ## Part B: other ways to train
#
# ### 3. LoRA and QLoRA, beside full fine-tuning
#
# **What is going on?** **LoRA** freezes the model. Beside each linear layer W it trains two small matrices, and adds what they give: W x + α/r · B (A x), where A has r rows and B has r columns. **QLoRA** stores the frozen W in four bits as well. [Recipes 9 and 10 of notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) build both by hand. Here they see the same rows as full fine-tuning; adapters take a larger learning rate.
#
# **Guess first.** QLoRA begins with weights that were rounded to four bits. Does it begin at the same loss?

# %%
lora = replace(run, method="lora", learning_rate=1e-3, rank=16, alpha=32)
model = climb("LoRA", lora)
del model

# %%
qlora = replace(lora, method="qlora")
untrained = loop.adapt(fresh(), run=qlora)  # adapters begin as no change at all
in_four_bits = losses_of(untrained)
text_in_four_bits = on_python(untrained)
del untrained
model = climb("QLoRA", qlora)
del model
print(f"what four bits cost     {compare(before, in_four_bits)}")
print(f"what training changed   {compare(in_four_bits, after['QLoRA'])}")
print(f"both together           {changes['QLoRA']}")
print(f"Python source {text_before:.1f}, in four bits {text_in_four_bits:.1f}")

# %% [markdown]
# That answers the guess: the last number of QLoRA is the sum of two. Compare its second line with LoRA's, not its third. These weights were rounded once before, in the file that carries them, so what four bits cost here is not what they cost a model of 16 bits.
#
# **Why not more?** Three steps show that a model moves, not where it ends. Recipe 7 has a longer run.
#
# **Which variant of LoRA?** Three steps cannot judge rank, α, DoRA or rsLoRA, so nothing is ranked here. PEFT publishes [a comparison](https://github.com/huggingface/peft/tree/main/method_comparison). In July 2026 it shows, for Llama-3.2-3B on an L40S GPU: rsLoRA with rank 64 reaches 51.3 % of its test, LoRA with rank 32 47.8 %, full fine-tuning 47.2 %, DoRA 46.9 % at 17 % less speed and 2 GiB more. Tune learning rate and α first, and adapt all linear layers.
#
# **How do I use it?** `LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")` of peft, with `BitsAndBytesConfig(load_in_4bit=True)` for QLoRA.
#
# ### 4. The optimizer: 8 bits, pure bf16, Muon
#
# **What is going on?** This matters when all weights are trained: adapters have hardly any states. Here it is the last four blocks.
#
# **8-bit AdamW** keeps one byte per state and a scale for every 256 of them. Two libraries do it. bitsandbytes has kernels of its own; torchao is PyTorch code that `torch.compile` fuses.

# %%
from recipes_lib.core.sizes import state_bytes as bytes_of_states
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw

if not sizes.compile:
    torch.compiler.set_stance("force_eager")
batch = collate(train[:2], device=here.device, **padding)
fused_adamw = partial(torch.optim.AdamW, fused=True)
optimizers = {
    "fp32, fused": fused_adamw,
    "bitsandbytes": eight_bit_adamw,
    "torchao": partial(eight_bit_adamw, library="torchao", embedding_bits=8),
}
if here.device == "cuda":
    # Moves states to the host when a long batch needs the room.
    optimizers["paged"] = partial(eight_bit_adamw, paged=True)

state_bytes = {}
for name, make in optimizers.items():
    model = fresh().requires_grad_(False)
    trained = decoder_blocks(model)[-4:].requires_grad_(True)
    optimizer = make(trained.parameters(), lr=1e-4)
    losses, seconds, _ = loop.few_steps(model, optimizer, batch)
    parameters = sum(parameter.numel() for parameter in trained.parameters())
    state_bytes[name] = bytes_of_states(optimizer) / parameters
    words = " ".join(f"{loss:.4f}" for loss in losses)
    print(
        f"{name:<13}{state_bytes[name]:.2f} bytes of states per parameter, "
        f"{seconds:.2f} s, losses {words}"
    )
del model, trained, optimizer
torch.compiler.reset()  # what it keeps would count below

# %% [markdown]
# A quarter of the bytes, and losses that agree to three digits.
#
# **Pure bf16** has no fp32 weights. The next bf16 number after 1 is 0.8 % away, and an update of less than half of that is rounded away. *Stochastic rounding*, which [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) uses for states, keeps it on average. *Master weights* in fp32, beside the model, keep it exactly. **Guess first:** after three steps, which share of the last block's weights has changed?

# %%
from recipes_lib.precision.mixed_precision import mixed_precision
from recipes_lib.precision.pure_bf16 import bf16_adamw

if not here.native_bf16:
    # Products in 16 bits are emulated, slowly: few tokens have to do.
    short = collate(train[:1], device=here.device, **padding)
    batch = {name: tensor[:, -6:] for name, tensor in short.items()}


def share_of_changed_weights(name, dtype, make, **options):
    model = fresh(dtype).requires_grad_(False)
    blocks = decoder_blocks(model)[-4:].requires_grad_(True)
    optimizer = make(blocks.parameters(), lr=1e-5)
    losses, seconds, changed = loop.few_steps(model, optimizer, batch, **options)
    print(
        f"{name:<14}{seconds:.2f} s, loss {losses[0]:.3f} → {losses[-1]:.3f}, "
        f"{changed:.1%} of the last block's weights changed"
    )
    return changed


autocast = mixed_precision(dtype=torch.bfloat16).autocast
changed = {
    "fp32": share_of_changed_weights("fp32", torch.float32, fused_adamw),
    "bf16 autocast": share_of_changed_weights(
        "bf16 autocast", torch.float32, fused_adamw, autocast=autocast
    ),
}
for rounding in ("nearest", "stochastic", "master"):
    make = partial(bf16_adamw, rounding=rounding)
    changed[rounding] = share_of_changed_weights(rounding, torch.bfloat16, make)

# %% [markdown]
# With rounding to nearest few weights move at this learning rate. Master weights have all moved, but most of them still round to the same bf16 number; after many steps the model shows it. Stochastic rounding shows it at once, with noise.
#
# #### Muon
#
# **What is going on?** AdamW divides each number of a gradient by its own average. It does not know that the numbers form a matrix, which has a few large directions and many small ones. The small ones hardly train.
#
# ```text
# AdamW   two averages per number                        8 bytes of states
# Muon    one average M per matrix; then M = U S V^T     4 bytes of states
#         becomes U V^T: every direction is as long as any other
# ```
#
# **The idea.** Five products of matrices come close to U Vᵀ, without computing U, S or V.

# %%
from recipes_lib.training.muon import (
    estimate_muon,
    muon_adamw,
    orthogonalized,
    split_for_muon,
)

show(orthogonalized)
seed_everything(0)
left, _, right = torch.linalg.svd(torch.randn(64, 48), full_matrices=False)
sizes_of_directions = torch.logspace(0, -1.5, 48)  # the largest is 32 times the smallest
matrix = left * sizes_of_directions @ right
values = torch.linalg.svdvals(orthogonalized(matrix).float())
print(f"singular values before: {sizes_of_directions[-1]:.2f} to 1.00")
print(f"singular values after:  {values.min():.2f} to {values.max():.2f}")

# PyTorch has an optimizer that does this to matrices.
weight = torch.nn.Parameter(matrix.clone())
torch_muon = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, nesterov=False)
weight.grad = matrix.clone()
torch_muon.step()
update = matrix - weight.detach()
ours = orthogonalized(matrix * 0.05).float()  # its average begins with a twentieth
ours *= max(1, 64 / 48) ** 0.5  # and it scales steps by the shape
assert torch.allclose(update, ours, atol=0.02)
print("by hand and by PyTorch: the same step")

# %% [markdown]
# Only the linear layers in the blocks are trained by Muon. Embedding, output layer and norms keep AdamW; `muon_adamw` splits a model so, and is one optimizer for both.

# %%
from recipes_lib.core.budget import Shape
from recipes_lib.core.plain_step import budget_of

model = fresh()
rows, length = batch["input_ids"].shape
shape = Shape(batch=rows, seq=length)
plan = estimate_muon(budget_of(model, shape), model, shape)
adamw_states = budget_of(model, shape).states
split = split_for_muon(model)
in_matrices = sum(matrix.numel() for matrix in split.matrices)
print(f"{in_matrices / model.num_parameters():.0%} of the parameters are matrices")
print(f"states {adamw_states / 2**20:,.0f} MiB → {plan.states / 2**20:,.0f} MiB")

optimizer = muon_adamw(model, lr=1e-4)


def muon_step(model, optimizer):
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


measured = measure(partial(muon_step, model, optimizer), warmup=1, repeats=0)
muon_error = plan.peak / measured.peak_bytes - 1
print(f"peak predicted {plan.peak / 2**20:,.0f} MiB, off by {muon_error:+.1%}")
del model, optimizer, split

# %% [markdown]
# Does it train better? The public record is divided: large gains in pretraining, none in Moonshot's report for fine-tuning a model that AdamW has pretrained. `python -m benchmarks.muon` trains all weights of this model with both, on the same rows, at the same learning rates, with three seeds.
#
# <!-- numbers:muon-05 -->
# | optimizer | learning rate | held-out loss | mean |
# |---|--:|--:|--:|
# | AdamW | 2e-04 | 3.171 3.150 3.247 | 3.189 |
# | Muon | 2e-04 | 3.226 3.209 3.209 | 3.215 |
# | AdamW | 6e-04 | 3.831 3.452 3.748 | 3.677 |
# | Muon | 6e-04 | 3.179 3.147 3.202 | 3.176 |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-24. 10 steps of 4 rows, of at most 128 tokens. Held-out loss on 48 rows, one number per seed; before: 3.884.*
#
# Each at the better of these rates, Muon's loss minus AdamW's is -0.046 to +0.009: the seeds do not agree.
# <!-- end -->
#
# **How do I use it?** `torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")`, beside a `torch.optim.AdamW` for the rest.
#
# **What does it cost?** The products in each step. They do not depend on the number of tokens, so with few tokens they are most of a step, as here.
#
# ### 5. Accumulation, clipping and schedule
#
# **What is going on?** A batch that does not fit goes through the model in parts, the *micro-batches*, and their gradients add up. [Notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) shows why the loss of each part is divided by the targets of the *whole* batch.
#
# **The idea.** **Clipping and the schedule also belong to the whole:** once per optimizer step. Then the number of micro-batches changes nothing but rounding, although answers have unequal lengths.

# %%
two_rows = replace(lora, steps=2, rows_per_step=2, micro_batch_size=2)
for way in (two_rows, replace(two_rows, micro_batch_size=1)):
    model = loop.adapt(fresh(), run=way)
    for step in loop.training_steps(model, train, run=way, **padding):
        print(
            f"{way.micro_batch_size} rows at a time: loss {step.loss:.5f}, gradient norm "
            f"{step.gradient_norm:.4f}, learning rate {step.learning_rate:.1e}"
        )
del model

# %% [markdown]
# The loss, the gradient norm and the learning rate of each step agree, up to rounding.
#
# **How do I use it?** `gradient_accumulation_steps` and `max_grad_norm` in the Trainer.
#
# **What does it cost?** Time: smaller products use the machine less well.
#
# ### 6. Sequence packing
#
# **What is going on?** Rows of a batch are as long as the longest of them. The rest is padding: computed, and thrown away.
#
# ```text
# padded   [question answer . . . . . .]      packed   [question answer|question answer|q]
#          [question answer           ]                each document blind to the others
# ```
#
# **The idea.** Put several documents into one row. Positions restart at every document, and from them attention learns the borders: a token reads what is before it *and* in its document.

# %%
from recipes_lib.report.pattern_chart import pattern_chart
from recipes_lib.training.sequence_packing import (
    best_fit,
    check_document_mask,
    collate_packed,
    pack_sequences,
    predicted_speedup,
)

documents = train[:3]
in_one_row = pack_sequences(documents, length=3 * sizes.tokens)
packed = collate_packed(in_one_row, device=here.device, **padding)
positions = packed["position_ids"][0].cpu()  # [S]
document = (positions == 0).cumsum(0)  # a new one begins wherever positions restart
causal = torch.ones(len(positions), len(positions), dtype=torch.bool).tril()
same = document[:, None] == document
pattern_chart({"one long text": causal, "three documents": causal & same})

# %% [markdown]
# **Guess first.** What happens to the loss if the positions are forgotten?

# %%
model = fresh().eval()
check_document_mask(model, packed)  # refuses a model whose attention ignores positions
alone = held_out_losses(model, documents, **padding)
leaky = {name: packed[name] for name in ("input_ids", "labels")}
with torch.no_grad():
    together = completion_only_loss(model, packed).item() / alone.targets.sum()
    leaking = completion_only_loss(model, leaky).item() / alone.targets.sum()
print(f"each document alone       {alone.mean:.4f}")
print(f"packed                    {together:.4f}")
print(f"packed without positions  {leaking:.4f}")

# %% [markdown]
# Without positions the loss looks *better*: later documents read earlier ones, and all have the same template. In use no such text stands before the question.
#
# Which documents share a row? `best_fit` puts each into the fullest row that still has room. Then the speed, in useful tokens per second: padded as the data come, sorted by length, and packed.

# %%
from recipes_lib.core.measure import in_turns
from recipes_lib.training.gradient_accumulation import accumulate_gradients

show(best_fit)
rows = train[:8]
lengths = [len(row["labels"]) for row in rows]
arranged = {
    "padded": rows,
    "by length": sorted(rows, key=lambda row: len(row["labels"])),
    "packed": pack_sequences(rows, length=sizes.packed_tokens),
}
fewer = predicted_speedup(
    lengths, length=sizes.packed_tokens, batch_size=4, packs_per_batch=4
)
print(f"predicted: {fewer:.2f}× fewer tokens than padded\n")

# What counts is the ratio, and a third of the blocks show it.
del decoder_blocks(model)[10:]
model = loop.adapt(model.train(), run=lora)
fours = replace(run, rows_per_step=8, micro_batch_size=4)
work = {
    name: loop.micro_batches(data, run=fours, device=here.device, **padding)
    for name, data in arranged.items()
}


def step_of(model, batches):
    accumulate_gradients(model, batches, loss_sum=completion_only_loss)


turns = {name: partial(step_of, model, batches) for name, batches in work.items()}
took = in_turns(turns, rounds=sizes.rounds)
useful = {}
for name, batches in work.items():
    timed = took[name][1:]  # the first one warms up
    useful[name] = sum(lengths) * len(timed) / sum(timed)
    all_tokens = sum(batch["input_ids"].numel() for batch in batches)
    print(
        f"{name:<10}{useful[name]:,.0f} useful tokens/s, "
        f"{1 - sum(lengths) / all_tokens:.0%} padding"
    )
del model, turns  # which hold it, too

# %% [markdown]
# Sorting by length removes padding too, but then short answers meet short ones in a step. Packing leaves the choice of rows free.
#
# **Why not more?** With a mask, attention still computes what it hides, and on a CPU that takes most of the gain. Kernels for variable lengths skip it.
#
# **How do I use it?** `packing=True` in TRL, with flash-attn on a GPU.
#
# **What does it cost?** A mask [S, S], or such a kernel. A model that ignores positions, such as one with ALiBi, is refused.
#
# ## Everything combined
#
# QLoRA on a base in the fastest precision of this machine, packed rows, and the loss on the answers only. Two packed rows hold about as many documents as a padded batch of three.

# %%
combined = replace(
    qlora,
    packing=True,
    seq_len=max(sizes.tokens, 128),
    rows_per_step=2,
    micro_batch_size=2,
)
packs = pack_sequences(train, length=combined.seq_len, seed=0)
trained = climb("everything combined", combined, packs, here.compute_dtype)
answers = answers_of(trained)
text_after = on_python(trained)

# %% [markdown]
# ## The ladder
#
# Seconds come last: one step of each row in turns, there and back, so that what slows the machine slows all rows. The column *time* is that of a step. The last row has steps of other rows, so the first lines of this notebook compare its time per token. *Loss* is the held-out loss after training. In the table of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) it is the loss of the batch, and there LoRA and QLoRA have checkpointing as well, which takes time. QLoRA unpacks its weights in each product and can still be faster than LoRA: where 16 bits are native, its layers multiply in 16 bits, and those of LoRA in 32.

# %%
def step_in_turn(row):
    """The second of two steps of a row: the first one makes the states."""
    options = again[row]
    model = loop.adapt(fresh(options["dtype"]), run=options["run"])
    steps = loop.training_steps(model, options["data"], run=options["run"], **padding)
    next(steps)
    step = next(steps)
    steps.close()
    return step


took = {row: [] for row in again}
order = list(again)
if sizes.back:
    order += reversed(again)
for row in order:
    took[row].append(step_in_turn(row))
for row, steps in took.items():
    seconds = sum(step.seconds for step in steps) / len(steps)
    ladder.retime(row, seconds, tokens=steps[0].tokens)
ladder

# %%
ladder.chart()

# %% [markdown]
# Memory over one step, before and after, on one scale:

# %%
from recipes_lib.core.measure import bytes_alive
from recipes_lib.core.timeline import record_timeline
from recipes_lib.report.timeline_chart import timeline_chart


def timeline_of(row):
    """Live bytes over the second step of a row, without what was alive before."""
    alive = bytes_alive()
    options = again[row]
    settings = options["run"]
    model = loop.adapt(fresh(options["dtype"]), run=settings)
    optimizer, schedule, precision = loop.optimizer_of(model, run=settings)
    chosen = loop.rows_of_optimizer_step(2, options["data"], run=settings)
    micros = loop.micro_batches(chosen, run=settings, device=here.device, **padding)
    step = partial(
        loop._optimizer_step,
        model,
        micros,
        optimizer,
        schedule,
        precision,
        run=settings,
    )
    step()
    timeline = record_timeline(step, model=model, optimizer=optimizer)
    return timeline.without(alive)


ends = ("full fine-tuning", "everything combined")
timeline_chart({row: timeline_of(row) for row in ends})

# %% [markdown]
# And the answers. Three updates begin to teach the form of a docstring: fewer of the twenty answers repeat code.

# %%
from recipes_lib.report.loss_charts import change_chart

codes = [sum("def " in words for words in some) for some in (answers_before, answers)]
print(f"answers with code: {codes[0]} → {codes[1]} of {len(answers)}")
print(f"perplexity of Python source: {text_before:.1f} → {text_after:.1f}")
for old, new, row in zip(answers_before, answers, held_out[:2]):
    wanted = tokenizer.decode([token for token in row["labels"] if token != IGNORED])
    print(f"\nbefore: {old}\nafter:  {new}\nwanted: {wanted}")
change_chart(
    changes,
    source=f"{sizes.steps} steps, one seed; 95 % intervals over {len(held_out)} rows",
)

# %% [markdown]
# To rank neighbours in this picture, compare them row by row: their intervals contain what all rows share.
#
# <!-- numbers:finetune-gpu -->
# <!-- end -->
#
# ## Part C: from the run to production
#
# ### 7. A run that is long enough to see
#
# **What is going on?** Three steps are a check that a model moves. A run that is to be used takes hundreds. This one was recorded (`python -m benchmarks.long_finetune`): full fine-tuning and LoRA on the same rows, with the held-out loss every few steps. **Guess first:** after more than a hundred steps, does one of the two end lower?

# %%
from recipes_lib.report.loss_charts import loss_chart
from recipes_lib.report.records import recorded

long_run = recorded("long_finetune")
settings = long_run["settings"]
names = {"full": "full fine-tuning", "lora": "LoRA"}
loss_chart(
    {names[method]: points for method, points in long_run["curves"].items()},
    title=f"Held-out loss over {settings['steps']} steps of {settings['rows']} rows",
    source=f"{long_run['measured_on']}; one seed, {settings['held_out']} held-out rows",
)

# %%
for method, verdict in long_run["verdicts"].items():
    print(
        f"{names[method]:<17}{verdict['difference']:+.3f} nats per token "
        f"(95 % interval {verdict['low']:+.3f} to {verdict['high']:+.3f})"
    )
for number, wanted in enumerate(long_run["wanted"][:3]):
    print(f"\nwanted: {wanted}")
    print(f"before: {long_run['before']['answers'][number]}")
    for method, texts in long_run["answers"].items():
        print(f"{names[method]}: {texts[number]}")

# %% [markdown]
# The answers are whole: each ends where the model ended it, or after as many tokens as the run allowed. Before, the model repeats the code. After either training it writes a docstring, short and in the right form. What it says is not always true: compare the first answers with what was wanted. A loss does not see that, a reader does. As for the guess: compare the two intervals above. They are of one seed, and one seed cannot prove a small difference between two ways of training.
#
# ### 8. Save, merge, deploy
#
# **What is going on?** **An adapter belongs to one base.** `load_adapter` compares a fingerprint, and refuses another base of the same shape.
#
# **Guess first.** QLoRA was trained on rounded weights. Which model is better: its adapter on the rounded base, or on the one in full precision?

# %%
import copy

from recipes_lib.fine_tuning.adapter_files import (
    base_fingerprint,
    check_merged,
    load_adapter,
    save_adapter,
    save_merged,
)
from recipes_lib.fine_tuning.qlora import merge_qlora

fingerprint = base_fingerprint(fresh(trained.dtype))
size = save_adapter(trained, folder / "adapter", base=fingerprint)
print(f"adapter: {size / 2**20:.0f} MiB")

# The model as it was judged: the four-bit base is unpacked, the adapter added to it.
save_merged(
    merge_qlora(copy.deepcopy(trained)), folder / "merged", tokenizer=tokenizer
)
merge_error = check_merged(folder / "merged", trained, packed["input_ids"])
print(f"merged, in a fresh process: logits off by {merge_error:.1e}")

# The same adapter on the base that was never rounded: another model.
on_full = load_adapter(fresh(here.compute_dtype), folder / "adapter")
on_full_losses = losses_of(on_full)
verdict = compare(after["everything combined"], on_full_losses)
print(f"adapter on the full base, against the judged model: {verdict}")
del on_full, trained

# %% [markdown]
# The full base does not pay what four bits cost. So deploy the adapter on it, if the line above says *better* for your rows, and if its memory fits. Otherwise deploy the merged one, which is the model that was judged. Never the third way: peft's own merge into four-bit weights rounds the sum once more.
#
# ### 9. Pairs of your own, by one command
#
# `python -m recipes_lib finetune` is the loop above as a command. It reads a file of pairs, checks every row, keeps each tenth one out of the training, and says at its end what changed. Here the pairs are sums:

# %%
import json

pairs = folder / "pairs.jsonl"
with pairs.open("w") as file:
    for first in range(20):
        for second in range(20):
            pair = {
                "prompt": f"What is {first} + {second}?",
                "completion": f"The sum of {first} and {second} is {first + second}.",
            }
            print(json.dumps(pair), file=file)
print(pairs.read_text().splitlines()[45])

# %%
from recipes_lib.workflows.finetune import command

options = [
    f"--model={base}",
    f"--data={pairs}",
    f"--output={folder / 'run'}",
    f"--steps={sizes.own_steps}",
    "--save-steps=3",
    "--rows-per-step=2",
    "--seq-len=auto",
    "--dropout=0.1",  # random numbers, which a resumed run must repeat
]
print("python -m recipes_lib finetune", *options, "\n")
# As when the system runs out of memory: SIGKILL, two steps after a checkpoint.
killed = command.run_command(*options, kill_at=4)
resumed = command.run_command(*options, "--resume", echo=True)

# %%
from recipes_lib.training.tracking import read_back

log = read_back(folder / "run" / "log", backend="tensorboard")
print(f"killed   {killed}")
print(f"resumed  {dict(list(resumed.items())[:4])} …")
print(f"steps in the log: {[step for step, _ in log['loss']]}")
print((folder / "run" / "adapter" / "README.md").read_text()[:1400])

# %% [markdown]
# The steps that both processes trained have the same loss, digit for digit: weights, states, schedule, position in the data and random state come back. The log has each step once. The README is the card of the adapter: data, base, losses, and how to load it.
#
# ### 10. The same run in production libraries
#
# `transformers.Trainer` and TRL's `SFTTrainer` on the same rows, in the same order, with the same settings. Each step takes turns with ours.

# %%
from recipes_lib.workflows.finetune import export, libraries

show(export.trainer_arguments)
equal = replace(two_rows, steps=max(2, sizes.steps))
found = libraries.side_by_side(
    lambda: loop.adapt(fresh(), run=equal), train, run=equal, tokenizer=tokenizer
)
print(libraries.table(found))

# %% [markdown]
# The losses are the same. The Trainer computes the logits of every token. TRL's `SFTTrainer` does not: since version 1.16 its usual loss goes through the output layer in chunks, and our loop asks for the logits of the answers alone. What is left of a difference was not taken apart here: beside a step, the Trainers also compute metrics such as entropy and accuracy, call callbacks, and check each batch. In return they have evaluation while training, callbacks, and several GPUs. At a vocabulary and a length where logits are most of the memory, take TRL's loss or ours; the step of a small model says nothing about that.
#
# The command above also wrote the file with which Axolotl repeats its run, and launch settings for `accelerate`:

# %%
print(*(folder / "run" / "axolotl.yml").read_text().splitlines()[:22], "...", sep="\n")

# %% [markdown]
# ### 11. Other families: templates, context, experts, images
#
# The notebook runs with other families as it is. What is special shows in Qwen3.
#
# **Its template drops the thinking of earlier answers.** So a conversation becomes one row per answer, each after the history that the model will really see. Where the hub is reachable, the next cell takes Qwen3's own template, else one with its rule about thinking.

# %%
from recipes_lib.core.chat import tokenize_chat

RULE_OF_QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
try:
    qwen = load_tokenizer("Qwen/Qwen3-0.6B")
    print("the published template of Qwen3-0.6B")
except (OSError, ValueError):
    qwen = load_tokenizer()
    qwen.chat_template = RULE_OF_QWEN3
    print("without the hub: a template with Qwen3's rule about thinking")
chat = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<think>Two and two.</think>4"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "<think>Three and three.</think>6"},
]
for row in tokenize_chat(qwen, chat):
    print(decode_with_mask(row, qwen).replace("\n", " "))

# %% [markdown]
# The second row has the first answer without its thinking.
#
# **Its context is stretched by a factor in the configuration.** [Notebook 04](../notebooks/04_training_long_sequences.ipynb) compares the ways. One property matters for fine-tuning: what happens to short texts?

# %%
from recipes_lib.architecture.rope import apply_rope_scaling
from recipes_lib.core.model import model_of_shape

plain = model_of_shape("tiny-qwen3").eval()
text = torch.arange(1, 33, device=here.device)[None]
for kind in ("dynamic", "yarn"):
    scaled = apply_rope_scaling(copy.deepcopy(plain), kind=kind, factor=4.0)
    difference = (scaled(text).logits - plain(text).logits).abs().max()
    print(f"{kind}: logits of a short text change by {difference:.1e}")

# %% [markdown]
# YaRN changes short texts, too, so switch it on only if you need it. Dynamic NTK changes nothing until a text is longer than the training was.
#
# **Experts, and images.** In Qwen3-VL-MoE a vision tower turns an image into tokens, and each block of the language model has many MLPs, the *experts*, of which a *router* chooses a few per token ([notebook 02](../notebooks/02_multi_gpu_training.ipynb) explains them). The experts of a block are stored as one tensor, which is no linear layer. Here is its smallest relative, with random weights:

# %%
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from recipes_lib.fine_tuning.lora import apply_lora

rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
tiny = Qwen3VLMoeConfig(
    text_config=dict(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        rope_parameters=rotary,
    ),
    vision_config=dict(
        depth=2,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        out_hidden_size=64,
        patch_size=4,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0],
    ),
    image_token_id=120,
    video_token_id=121,
    vision_start_token_id=122,
    vision_end_token_id=123,
)
seed_everything(0)
model = Qwen3VLMoeForConditionalGeneration(tiny)
try:
    apply_lora(model, rank=4)
except ValueError as reason:
    print(reason)
model = apply_lora(model, rank=4, target_modules="attention")
parts = {"vision tower": "visual", "experts": "experts", "routers": "mlp.gate."}
for name, part in parts.items():
    of_part = [p for n, p in model.named_parameters() if part in n]
    trainable = sum(p.numel() for p in of_part if p.requires_grad)
    numbers = sum(p.numel() for p in of_part)
    print(f"{name}: {numbers:,} parameters, of which {trainable} train")
adapted = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(f"adapters on the attention of the language model: {adapted:,} parameters")
ids = torch.randint(0, 100, (2, 12))
loss = model(input_ids=ids, labels=ids).loss
loss.backward()
print(f"a step on text: loss {loss.item():.3f}")
in_vision = any(
    p.grad is not None for n, p in model.named_parameters() if "visual" in n
)

# %% [markdown]
# What trains are the adapters on the attention of the language model. The vision tower, the experts and the router are frozen; they still take their bytes as weights, and the tower takes its forward pass for each image. Four bits do not reach experts that are one tensor. A text-only data set can be trained with this notebook; rows with images need the model's processor.
#
# ## Take this into your code
#
# The loop of this notebook on a model of the hub. `resolve` gives the folder of the embedded model where the hub cannot be reached.

# %%
from transformers import AutoModelForCausalLM

from recipes_lib.core.default_model import resolve

name = resolve("HuggingFaceTB/SmolLM2-135M-Instruct")  # any causal LM of the hub
model = AutoModelForCausalLM.from_pretrained(name, dtype=here.compute_dtype)
model = apply_lora(model.to(here.device).train(), rank=16, alpha=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for start in range(0, 8, 4):  # your rows, four at a time
    batch = collate(train[start : start + 4], device=here.device, **padding)
    loss = accumulate_gradients(model, [batch], loss_sum=completion_only_loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
save_adapter(model, folder / "mine", base=fingerprint)
del model, optimizer

# %% [markdown]
# Without code: `python -m recipes_lib finetune --data pairs.jsonl --output my-adapter`. The [cheatsheet](../CHEATSHEET.md) has the switches of the libraries side by side, and the traps.
#
# ## What it costs, and when not to use it
#
# | recipe | price | not when |
# |---|---|---|
# | full fine-tuning | 16 bytes per weight | forgetting hurts: LoRA learns less and forgets less (Biderman et al.) |
# | LoRA | a low-rank update only | teaching much new knowledge |
# | QLoRA | unpacking in each product; rounded weights | the 16-bit weights fit |
# | 8-bit AdamW | slightly different updates | with adapters |
# | pure bf16 | noise of rounding | fp32 weights fit: autocast |
# | Muon | products of matrices in each step | with adapters; few tokens per step |
# | packing | a mask, or a kernel for variable lengths | rows of one length |
# | loss on the answers | none | long prompts, short answers, few rows: learning prompts too can help |
#
# **Measured here: two recipes that gain less than one expects.** *Packing*: on a CPU, rows that are sorted by length can give more useful tokens per second, as in the print of recipe 6. *Pure bf16* with rounding to nearest: few weights move at all.
#
# **What goes together.** QLoRA, packed rows and the loss on the answers: they are *everything combined*. **What does not.** 8-bit states or Muon with adapters, which have hardly any states to shrink; packing with models that ignore positions.
#
# ## Exercises
#
# 1. Predict, then measure: QLoRA on packed rows with `gradient_checkpointing=True`. Which term is left?
# 2. How many held-out rows would show a difference of 0.02 between LoRA and QLoRA? Ask `rows_needed` in honest_evaluation.py.
# 3. Train on prompts too. Does the held-out loss on answers get better or worse?
#
# ## References
#
# - Hu et al., *LoRA*, 2021; Dettmers et al., *QLoRA*, 2023; Liu et al., *DoRA*, 2024; Kalajdzievski, *rsLoRA*, 2023
# - Biderman et al., *LoRA Learns Less and Forgets Less*, 2024
# - Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, 2022
# - Zamirai et al., *Revisiting BFloat16 Training*, 2020
# - Krell et al., *Efficient Sequence Packing without Cross-contamination*, 2021
# - Miller, *Adding Error Bars to Evals*, 2024
# - Jordan, *Muon*, 2024; Liu et al., *Muon is Scalable for LLM Training*, 2025
#
# The last cell checks that the story above is true on this machine: orderings and signs, never absolute speed.

# %%
qlora_time = ladder["QLoRA"].seconds / ladder["LoRA"].seconds
print(f"QLoRA takes {qlora_time:.2f}× the time of LoRA per step")
exact = killed | resumed == resumed | killed  # where both have a step, they agree
ladder.note(
    targets=targets,
    before=before.mean,
    steps=run.steps,
    verdict=vars(changes["everything combined"]),
    state_bytes=state_bytes,
    changed=changed,
    useful=useful,
    merge_error=merge_error,
    production=found,
    exact=exact,
)
peaks = {row.name: row.peak_bytes for row in ladder.rows}
assert all(abs(row.prediction_error) < 0.1 for row in ladder.rows), "predicted"
assert peaks["QLoRA"] < peaks["LoRA"] < peaks["full fine-tuning"]
assert abs(muon_error) < 0.05, "Muon's peak is predicted, too"
assert max(state_bytes["torchao"], state_bytes["bitsandbytes"]) < 2.2
assert state_bytes["fp32, fused"] > 7.9
assert changed["nearest"] < changed["master"] < changed["stochastic"]
leak = abs(leaking / alone.mean - 1)
assert abs(together / alone.mean - 1) < 1e-4 < leak, "packing is exact"
# A GPU adds in another order from run to run.
assert exact or here.device == "cuda", "the resumed run is the one that was killed"
assert {3, 4} <= killed.keys() & resumed.keys(), "steps that both have trained"
assert [step for step, _ in log["loss"]] == list(range(sizes.own_steps)), "logged once"
for library in ("Trainer", "SFTTrainer"):
    for theirs, ours in zip(found[library]["losses"], found["ours"]["losses"]):
        assert abs(theirs - ours) < 1e-3, "the same training in the library"
assert found["ours"]["peak_bytes"] < found["Trainer"]["peak_bytes"]
assert not in_vision, "the vision tower is frozen"
if sizes.certain:
    assert all(change.high < 0 for change in changes.values()), "better, beyond chance"
print("all checks passed")
