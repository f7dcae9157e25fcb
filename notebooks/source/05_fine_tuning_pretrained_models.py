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
# > **Held-out loss 3.80 → 3.56** (-0.24 nats per token, 95 % interval -0.34 to -0.14) in 3 steps of one seed, by *everything combined*: QLoRA on packed rows, with the base in the fastest precision of the machine. Beside full fine-tuning in fp32 on padded rows it has **73% less peak memory** and takes 0.61× (0.60–0.63) the time per token. That loss is the highest of four after as many steps: full fine-tuning 3.24, LoRA 3.31, QLoRA 3.48, everything combined 3.56. Times in fp32 and in 16 bits stand beside each other here, so they compare precisions, too. A run of LoRA in fp32 has the same losses in `transformers.Trainer`; ours takes 0.90× its peak. Each row was predicted before it ran, from the same step on tensors without data: off by less than 0.1%.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-25.
# <!-- end -->
#
# A pretrained model knows a language, and not your task. This notebook trains one small model on pairs of a question and an answer, in several ways. For full fine-tuning, LoRA and QLoRA it predicts the memory and measures it. Then it asks whether the model has become better, or whether that was luck. Pairs that are not used for training give the answer. At the end a command does the same with pairs of your own, and two production libraries repeat a run of LoRA.
#
# | | |
# |---|---|
# | **You will learn** | to adapt a pretrained model, to prove that it got better, and to take the run to production |
# | **You need** | Python, the basics of PyTorch, and the equation of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) with its words: states, activations, logits; no GPU, no login |
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
# | 10 | the same run in production libraries | is it the same in libraries? | [libraries.py](../recipes_lib/workflows/finetune/libraries.py), [production.py](../recipes_lib/workflows/finetune/production.py) |
# | 11 | other families: templates, context, experts, images | does it work for other models? | [chat.py](../recipes_lib/core/data/chat.py), [rope.py](../recipes_lib/architecture/rope.py) |
#
# Recipes 1 and 2 are **Part A**: what is learned, and whether it is better. Recipes 3 to 6 are **Part B**: other ways to train. Recipes 7 to 11 are **Part C**: from the run to production.
#
# [Notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) explains how LoRA, four bits and 8-bit states save memory. Here we ask whether the model becomes better, and how we know.
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

from recipes_lib.core.model.default_model import model_source, source_note
from recipes_lib.core.measure.machine import choose_sizes, machine, seed_everything
from recipes_lib.core.measure.runs import runs_dir

here = machine()
print(here)
print(f"SmolLM2 comes from: {model_source()}\n{source_note()}")

# %% [markdown]
# The sizes that you may want to change stand in one cell. To fine-tune a model of your own, write its hub id or folder in the place of `smollm2`. The outputs here are of SmolLM2 only. [docs/families.md](../docs/families.md) lists which recipe is tested on which family, on tiny models with random weights. Some families ask for a login on the hub.

# %%
full = dict(
    model="smollm2",  # or a hub id, or a folder
    shape=None,  # None: the model itself; a shape has random weights
    tokens=192,  # the longest training pair; longer ones are left out
    pairs=300,  # to train on
    held_out=32,  # pairs that are not trained on
    windows=4,  # pieces of Python source, to see what the model forgets
    answer_tokens=20,  # an answer is cut after so many
    packed_tokens=192,  # the length of a packed row in recipe 6
    rounds=3,  # of timing, in recipe 6 and for the ladder
    steps=3,  # optimizer steps of each row of the ladder
    own_steps=24,  # optimizer steps of the command in recipe 9
    own_rows=2,  # pairs in each of them
    compile=True,  # compile torchao's optimizer
    certain=True,  # fail at the end if a verdict could be chance
)
# Continuous integration checks that the code runs: a tiny model will do.
brief = full | dict(
    shape="tiny-smollm2",
    tokens=64,
    pairs=24,
    held_out=8,
    windows=1,
    answer_tokens=4,
    packed_tokens=128,
    rounds=1,
    own_steps=6,
    own_rows=8,  # so that a step takes long enough to be killed in it
    compile=False,  # which takes longer than such small sizes
    certain=False,
)
sizes = choose_sizes(cpu=full, gpu16=full, gpu24=full, gpu80=full, fast=brief)
sizes

# %% [markdown]
# ## What runs out: one equation
#
# Two things run out: bytes and seconds. For the bytes the equation of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) holds. In every row of the ladder below the peak comes when backward begins, before there are gradients:
#
# $$\text{peak} = \text{weights} + \text{states} + \text{activations} + \text{loss}$$
#
# For full fine-tuning these are 513 + 1,026 + 707 + 140 = 2,386 MiB. The picture of the memory over one step shows the same four parts and calls the last one *other*.
#
# The seconds go to tokens. Some tokens are *padding*: they make a short row as long as the longest row of its batch.
#
# $$\text{seconds} = \frac{\text{useful tokens}}{\text{tokens per second} \times (1 - \text{padding})}$$
#
# *Useful* tokens are all tokens but padding, also those of the questions, which carry no loss. Recipe 6 measures them.
#
# The data are real: functions of Python's standard library, and their docstrings as the answers. 300 pairs of at most 192 tokens are for training. 32 pairs of at most 96 tokens, from other modules, are held out. Held out means: not trained on here. What SmolLM2 has read before, we do not know. The recorded runs below take other held-out pairs, so their losses before training differ from the one here. In the print, the part between ⟦ and ⟧ carries no loss.

# %%
import gc
import os
import shutil

from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.data.chat import IGNORED, decode_with_mask
from recipes_lib.core.data import collate, load_instructions, load_text
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.fine_tuning.adapter_files import save_merged

# Files of this notebook, made anew in each run.
name = "notebook-05" if sizes.shape is None else "fast-05"
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
gc.freeze()  # to count bytes, Python looks at all objects: not at those of the imports

# %%
base = sizes.model
# Only in the brief form for continuous integration: a tiny model in a folder.
if sizes.shape is not None:
    base = folder / "base"
    tiny = load_model(sizes.shape)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name) for name in special}
    tiny.config.update(ids)
    tiny.generation_config.update(**ids)
    save_merged(tiny, base, tokenizer=tokenizer, dtype=torch.float32)
    del tiny


def fresh(dtype=torch.float32):
    """The pretrained model, each time with the same weights."""
    seed_everything(0)
    return load_model(base, dtype=dtype)


# %% [markdown]
# ## Part A: what is learned, and is it better?
#
# ### 1. Loss on the answers, and the masking bug
#
# **What is going on?** A pair is a question and an answer, in one row of tokens. The model should learn to write the answer, and not the question. So the labels of the question are -100. The cross-entropy of PyTorch and the losses of the libraries skip this label.
#
# **Guess first.** Which share of the tokens carries loss?
#
# **The idea.** Few tokens carry loss. The logits of all others would be computed for nothing, and they are large. So ask the model for logits only where some row of the batch learns a token. In a padded batch that is more than the share that is printed below, because the answers of its rows stand at different places.

# %%
from recipes_lib.fine_tuning.completion_only_loss import (
    check_labels,
    completion_only_loss,
    plain_answer_loss,
)
from recipes_lib.report.show import show

show(plain_answer_loss)
batch = collate(train[:2], device=here.device, **padding)
model = fresh()
with torch.no_grad():
    by_hand = plain_answer_loss(model, batch)  # from all logits
    ours = completion_only_loss(model, batch)  # from those that are needed
assert torch.allclose(by_hand, ours, rtol=1e-4)
del model

labels = batch["labels"][:, 1:]
needed = (labels != IGNORED).any(0).sum()
targets = check_labels(train, tokenizer)
print(f"tokens that carry loss: {targets:.0%}")
print(f"two rows: logits at {needed} of {labels.shape[1]} positions")
print("the loss from all logits and from these: equal")

# %% [markdown]
# About one token in seven carries loss. Which ones these are is easily got wrong. Three mistakes with labels, the *masking bugs*, raise no error in training: the loss falls, and the model learns something else. Here is the same row three times, with one of the mistakes each, and what `check_labels` says:

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
# **What does it cost?** No time and no memory. It can be the wrong choice: Shi et al. (2024) find that with long prompts, short answers and few examples it helps to learn the prompts as well. Exercise 3 tries it.
#
# ### 2. Held-out loss with an interval
#
# **What is going on?** Imagine that the loss of some rows falls by a few hundredths. Other rows might show the opposite. So a loss needs an interval, which says how much it depends on the choice of the rows.
#
# **Guess first.** With 32 rows: by how much could the loss be different, if we had held out other rows?
#
# **The idea.** Our held-out rows were chosen at random out of many. Imitate that choice: draw as many rows out of them, with replacement, and take the loss of what was drawn. Do this 2,000 times. The middle 95 % of the losses is the interval. To compare two models, take the *same* rows for both, and draw the differences: what makes a row hard for both models is then gone. The unit of a loss is the *nat*. *Perplexity* is the exponential of the mean loss, so 0.01 nats per token less is about 1 % less perplexity.
#
# **How do I use it?** In lm-evaluation-harness `simple_evaluate(bootstrap_iters=…)` gives a standard error with each metric. The Trainer's `eval_loss` has none.

# %%
from functools import partial

from recipes_lib.core.data.evaluation import generate_answers, perplexity
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
# [Notebook 03](../notebooks/03_optimizing_inference_speed.ipynb) explains perplexity. It reads other pieces of text, so its numbers cannot be compared with those here. The perplexity of Python source is a check for damage: a model that learns docstrings should not forget Python. It is taken on four pieces of text and has no interval, so only a large change means something. It does not show all that can be forgotten.
#
# **What does it cost?** A forward pass over the held-out rows. The interval covers the choice of rows. It does not cover another seed of the training. To the guess: the interval of the loss is half a nat wide, wider than most changes below. The paired intervals will be narrower. 32 rows are just enough: with fewer than about 30 the interval is too narrow, as [honest_evaluation.py](../recipes_lib/fine_tuning/honest_evaluation.py) says. They show that a model has become better. They cannot rank two recipes that are close to each other.
#
# ## Baseline: full fine-tuning
#
# The results go into a table that grows by one row per recipe, the *ladder*. In this notebook a row of the ladder is a recipe, and a row of the data is a pair. All recipes go through one loop. The next print shows one of its steps. Read three lines of it: `accumulate_gradients` computes the loss and the gradients of all rows of the step. `precision.step` first shortens the gradients if they are too long, which is called *clipping*, and then changes the weights. `schedule.step` sets the learning rate of the next step. Recipe 5 says why they stand in this order.

# %%
from recipes_lib.workflows.finetune import loop

show(loop._optimizer_step)

# %% [markdown]
# All settings of a run stand in one record. `dataclasses.replace` returns a copy in which some of them are different: so each recipe below says only what it changes.

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
    warmup_steps=0,  # so many steps the learning rate rises; here none
    rows_per_step=3,  # rows of data in one optimizer step
    micro_batch_size=3,  # how many of them are in memory at a time: all
)

# %% [markdown]
# `climb` predicts the bytes of the third step, takes the steps, and compares the held-out losses before and after, row by row. The prediction is the same step on tensors without data, as in notebook 01.

# %%
from recipes_lib.core.measure import bytes_alive, measure
from recipes_lib.report.ladders.memory import MemoryLadder, moment_of_peak

ladder = MemoryLadder("05_fine_tuning_pretrained_models")
predictions = {}  # by row
changes = {}  # by row: held-out loss after minus before, with its interval
after = {}  # by row: the held-out losses after
again = {}  # by row: the arguments of its steps, to time them later


def climb(row, run, data=train, dtype=torch.float32):
    """Train as `run` says, add a row to the ladder, and return the trained model."""
    alive = bytes_alive()  # of other cells
    model, predicted = loop.prepare(fresh(dtype), data, run=run, **padding)
    predictions[row] = predicted
    trainable = model.num_parameters(only_trainable=True)
    print(f"{trainable:,} trainable, predicted {predicted.peak / 2**20:,.0f} MiB")
    print(f"the peak is when {moment_of_peak(predicted.timeline)}")

    steps = loop.training_steps(model, data, run=run, **padding)
    # AdamW makes its states in the first step. The last one is measured.
    measured = measure(lambda: next(steps), warmup=run.steps - 1, repeats=0)
    measured = measured.without(alive)
    steps.close()
    after[row] = losses_of(model)
    changes[row] = compare(before, after[row])
    ladder.add(row, measured, predicted=predicted.peak, loss=after[row].mean)
    again[row] = dict(run=run, data=data, dtype=dtype)
    print(ladder.line(row))
    print(f"change of the held-out loss {changes[row]}")
    return model


model = climb("full fine-tuning", run)
del model

# %% [markdown]
# Here are the bytes of one step, operator by operator. Weights and states are there all the time. In forward, activations pile up; then come the logits and their gradients, which the picture calls *other*. The dashed line on the edge is the prediction.

# %%
from recipes_lib.core.measure.timeline import record_timeline
from recipes_lib.report.timeline import timeline_chart


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


timeline_chart(
    {"full fine-tuning": timeline_of("full fine-tuning")},
    predicted={"full fine-tuning": predictions["full fine-tuning"].timeline},
    title="The peak comes when backward begins",
)

# %% [markdown]
# ## Part B: other ways to train
#
# ### 3. LoRA and QLoRA, beside full fine-tuning
#
# **What is going on?** **LoRA** freezes the model. Beside each linear layer it trains two thin matrices of rank r, the *adapter*. **QLoRA** also stores the frozen weights in four bits. [Recipes 9 and 10 of notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) build both by hand. Here both see the same rows as full fine-tuning. Their learning rate is 1e-3, that of full fine-tuning is 1e-4. Adapters usually take a larger one. None of these rates was tuned, so this is no race.
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
cost = compare(before, in_four_bits)
low, high = plain_paired_bootstrap(before.losses, in_four_bits.losses, before.targets)
assert abs(low - cost.low) + abs(high - cost.high) < 1e-6, "by hand the same"
print(f"what four bits cost     {cost}")
print(f"what training changed   {compare(in_four_bits, after['QLoRA'])}")
print(f"both together           {changes['QLoRA']}")
print(f"Python source {text_before:.1f}, in four bits {text_in_four_bits:.1f}")

# %% [markdown]
# That answers the guess. It does not begin at the same loss: four bits cost 0.27 nats per token before any training. The third line is the sum of the first two: all in all QLoRA ends higher than LoRA. The second line alone is larger than the change of LoRA, −0.59 against −0.49. That does not make QLoRA the better training. It begins at a higher loss, and a part of what its adapters learn may repair the rounding; this run does not separate the two. As the setup says, these weights were rounded once before, so a model in 16 bits pays another price for four bits.
#
# **Which term moved?** LoRA has states for 4.9 million numbers and not for 134.5 million: 37 MiB instead of 1,026. QLoRA shrinks the weights as well.
#
# **What does it cost?** With LoRA, an update of low rank. With QLoRA also the rounding that the first line shows, and unpacking in each product. Python source shows the rounding, too: its perplexity rises before any training.
#
# **Why not more?** After three steps one sees whether the loss falls, and not where it ends. Recipe 7 has a longer run.
#
# **Which variant of LoRA?** Two are known. *rsLoRA* divides α by √r instead of r. *DoRA* also trains the length of each row of the weights. Three steps cannot judge the rank, α or these variants. PEFT publishes [a comparison](https://github.com/huggingface/peft/tree/main/method_comparison): Llama-3.2-3B trains 5,000 steps on MetaMathQA on an L40S GPU, with adapters on two layers of each attention, and then answers the test questions of GSM8K. In July 2026 the share of right answers is 51.3 % for rsLoRA with rank 64, 47.8 % for LoRA with rank 32, 47.2 % for full fine-tuning and 46.9 % for DoRA with rank 32. These are runs of one seed. The same DoRA run had 48.2 % in June 2025 and 49.4 % in January 2026. So a difference of one or two points ranks nothing. What the comparison does show is the price of DoRA: it is 17 % slower than LoRA and takes 2 GiB more memory. Tune the learning rate and α before you choose a variant. The authors of QLoRA advise adapters on all linear layers.
#
# **How do I use it?** `LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")` of peft. For QLoRA load the base with `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)`. Without the second argument it takes other four-bit numbers, fp4.
#
# ### 4. The optimizer: 8 bits, pure bf16, Muon
#
# **What is going on?** Full fine-tuning keeps two states per weight; adapters have hardly any. So the three ways of this section are for full fine-tuning. To be quick, the first two cells train only the last four blocks.
#
# #### 8-bit AdamW
#
# Recipe 7 of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) explains how a state fits into one byte. Two libraries do it. bitsandbytes has kernels of its own. torchao is PyTorch code that `torch.compile` fuses.
#
# **Guess first.** A state of 32 bits becomes one of 8. Will the losses of three steps still agree?

# %%
from recipes_lib.core.model.sizes import state_bytes as bytes_of_states
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw

if not sizes.compile:  # only in the brief form for continuous integration
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
# The states take a quarter of the bytes. The losses differ by 0.0005 at most, over three steps on one batch. The printed seconds are of a single step and did not take turns, so they rank nothing.
#
# **How do I use it?** `TrainingArguments(optim="adamw_8bit")` takes bitsandbytes; `optim="adamw_torch_8bit"` takes torchao.
#
# **What does it cost?** Slightly different updates.
#
# #### Pure bf16
#
# **What is going on?** Weights, gradients and states are all in bf16: 8 bytes per weight instead of 16. The difficulty is the update. The next bf16 number after 1 is 0.8 % away, and an update of less than half of that is lost when it is rounded to the nearest number. *Stochastic rounding* goes up or down at random, and so keeps the update on average. [Notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) uses it for states. *Master weights*, an fp32 copy in the optimizer, keep it exactly, and then nothing is saved: it is 16 bytes again.
#
# **Guess first.** The learning rate is 1e-5. With rounding to nearest, which share of the last block's weights has changed after three steps?

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
# The first two rows have weights in fp32; *bf16 autocast* is the mixed precision of recipe 4 of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb). The last three rows are the three roundings. With *nearest* hardly any weight has changed, and the loss hardly falls. With *master* few weights of the model have changed either, and the loss is where it was. The fp32 copies have moved, as the weights of the first row have, but most of them still round to the same bf16 number. The model sees small updates only when enough of them have added up, and three steps do not show that. With *stochastic* more weights change at once, right on average, and the loss falls almost as far as in fp32. All this is one batch, one seed, four blocks and one learning rate.
#
# **How do I use it?** torchao's `_AdamW(bf16_stochastic_round=True)`. DeepSpeed's `"bf16": {"enabled": true}` and Megatron's `--bf16` keep master weights. `TrainingArguments(bf16=True)` is something else: mixed precision, with weights in fp32.
#
# **What does it cost?** Each rounding adds noise of up to one step between two bf16 numbers.
#
# #### Muon
#
# **What is going on?** AdamW treats each number of a gradient on its own: it divides it by its usual size. It does not know that the numbers form a matrix. A matrix can be written as a sum of *directions*, each with a size, its *singular value*: M = U S Vᵀ, with the directions in U and V, and the sizes in S. In a gradient a few of them are large and many are small. Muon makes all of them about equally large before it takes the step.
#
# ```text
# AdamW   two averages per number                        8 bytes of states
# Muon    one average M per matrix; then M = U S V^T     4 bytes of states
#         becomes about U V^T: all directions are about equally long
# ```
#
# **Guess first.** In the matrix below the largest direction is 32 times the smallest. How far apart are they afterwards?
#
# **The idea.** Five rounds of three products come close to U Vᵀ, without computing U, S or V.

# %%
from recipes_lib.training.muon import (
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
assert torch.allclose(update, ours, atol=1e-6)
print("by hand and by PyTorch: the same step")

# %% [markdown]
# To the guess: the largest direction is now less than twice the smallest. Muon trains only the linear layers in the blocks. Embedding, output layer and norms keep AdamW. `muon_adamw` splits a model in this way, and is one optimizer for both.

# %%
from recipes_lib.core.predict import predict


def muon_step(model, optimizer):
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def with_muon():
    model = fresh()
    return model, muon_adamw(model, lr=1e-4), muon_step


predicted = predict(with_muon)
model, optimizer, _ = with_muon()
split = split_for_muon(model)
in_matrices = sum(matrix.numel() for matrix in split.matrices)
print(f"{in_matrices / model.num_parameters():.0%} of the weights are Muon's")
adamw_states = 2 * 4 * model.num_parameters() / 2**20
states = predicted.at_peak()["states"] / 2**20
print(f"states {adamw_states:,.0f} MiB → {states:,.0f} MiB")

measured = measure(partial(muon_step, model, optimizer), warmup=1, repeats=0)
muon_error = predicted.peak / measured.peak_bytes - 1
peak = measured.peak_bytes / 2**20
print(f"peak predicted {predicted.peak / 2**20:,.0f} MiB, measured {peak:,.0f} MiB")
del model, optimizer, split

# %% [markdown]
# **What moved?** The states: 621 MiB instead of 1,026. Do not compare this peak with the ladder: this step has other rows.
#
# **Does it train better?** Published results differ. Jordan (2024) reports large gains in pretraining. Moonshot's report (Liu et al., 2025) finds no gain when it fine-tunes a model that AdamW has pretrained. `python -m benchmarks.muon` fine-tunes all weights of this model for ten steps with each of the two, on the same rows, at the same two learning rates, with three seeds. **Guess first:** which of the two ends worse with a learning rate that is three times as large?
#
# <!-- numbers:muon-05 -->
# | optimizer | learning rate | held-out loss of each seed | mean |
# |---|--:|--:|--:|
# | AdamW | 2e-04 | 3.171 3.150 3.247 | 3.189 |
# | Muon | 2e-04 | 3.226 3.209 3.209 | 3.215 |
# | AdamW | 6e-04 | 3.831 3.452 3.748 | 3.677 |
# | Muon | 6e-04 | 3.179 3.147 3.202 | 3.176 |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-24. 10 steps of 4 rows of at most 128 tokens. Held-out loss on 48 rows; before: 3.884.*
#
# Each at the better of these rates, Muon's loss minus AdamW's is -0.046 to +0.009: the seeds do not agree.
# <!-- end -->
#
# The table shows one more thing. At the higher rate AdamW loses a large part of its gain with every seed, and Muon does not. Each of the two is best at one end of these rates, so a third rate may be better for either.
#
# **How do I use it?** `torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")`, beside a `torch.optim.AdamW` for the rest.
#
# **What does it cost?** The products in each step. Their number does not depend on the number of tokens, so with few tokens they are a large part of a step. This notebook does not time them.
#
# ### 5. Accumulation, clipping and schedule
#
# **What is going on?** Recipe 1 of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) splits a batch into *micro-batches* and adds up their gradients. It shows why the loss of each micro-batch is divided by the number of learned tokens in the *whole* batch. The question is: does a batch in parts give the same step? It comes back for clipping and for the schedule. *Clipping* shortens the gradient if its norm is above a limit, here 1. The *schedule* lowers the learning rate from step to step.
#
# **Guess first.** If each micro-batch is clipped on its own, is the gradient of the whole batch the same?
#
# **The idea.** No, because a long gradient of one part would count for less. So clip once, when all gradients have been added, and move the schedule once. Both are in the step that is printed in the section *Baseline*. Then the number of micro-batches changes nothing but rounding:

# %%
two_rows = replace(lora, steps=2, rows_per_step=2, micro_batch_size=2)
for way in (two_rows, replace(two_rows, micro_batch_size=1)):
    model = loop.adapt(fresh(), run=way)
    for step in loop.training_steps(model, train, run=way, **padding):
        print(
            f"in parts of {way.micro_batch_size}: loss {step.loss:.5f}, gradient norm "
            f"{step.gradient_norm:.4f}, learning rate {step.learning_rate:.1e}"
        )
del model

# %% [markdown]
# The loss, the gradient norm and the learning rate of each step agree, up to rounding.
#
# **How do I use it?** `gradient_accumulation_steps` and `max_grad_norm` in the Trainer.
#
# **What does it cost?** Time, as in notebook 01.
#
# ### 6. Sequence packing
#
# **What is going on?** In a batch, short rows are padded up to the longest one. Padding is computed and then thrown away.
#
# ```text
# padded   a a a a      packed     a a a a b b b c
#          b b b .      position   0 1 2 3 0 1 2 0      0: a new document begins
#          c . . .
# ```
#
# **The idea.** Put several documents into one row. Positions restart at every document, and from them attention learns the borders: a token reads what is before it *and* in its document.

# %%
from recipes_lib.report.pattern import pattern_chart
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
pattern_chart(
    {"one long text": causal, "three documents": causal & same},
    title="In a packed row a token reads its own document only",
)

# %% [markdown]
# In the picture each token is a line and reads from left to right, at most up to itself. In one long text it reads all tokens before it. With three documents it stops where its own document begins, and a little more than a third of the squares are left. (*Pairs* in the picture are pairs of two tokens.)
#
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
# Without positions the loss looks *better*: a later document reads the earlier ones, which are similar to it. That gain is false. When the model is used, there is no other document in front of the question.
#
# Which documents share a row? `best_fit` puts each into the fullest row that still has room. Then the cell measures three arrangements of the same eight rows, in useful tokens per second: padded as the data come, sorted by length, and packed. To be quick, this is LoRA on a model that keeps ten of its thirty blocks. Each speed is that of the fastest of three forward and backward passes. In brackets are the lowest and the highest. Where two brackets overlap, this run does not say which is faster.

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
took = in_turns(turns, rounds=1 + sizes.rounds)
useful = {}
for name, batches in work.items():
    timed = took[name][1:]  # the first one warms up
    speeds = sorted(sum(lengths) / seconds for seconds in timed)
    useful[name] = speeds[-1]  # the fastest turn
    all_tokens = sum(batch["input_ids"].numel() for batch in batches)
    print(
        f"{name:<10}{useful[name]:,.0f} useful tokens/s "
        f"({speeds[0]:,.0f} to {speeds[-1]:,.0f}), "
        f"{1 - sum(lengths) / all_tokens:.0%} padding"
    )
del model, turns  # which hold it, too

# %% [markdown]
# Sorted and packed rows are both faster than padded ones. The brackets of these two overlap, so this run does not say which of them is faster. Sorting has a price: rows of one length come together in a step, so the steps are no longer random samples of the data. Packing puts long and short rows together.
#
# **Why not more?** Compare the speed of packed and padded rows with the predicted ratio of tokens: only a part of the gain arrives. A likely reason is the mask: attention still computes what the mask hides. Kernels for variable lengths skip it; they were not measured here.
#
# **How do I use it?** `SFTConfig(packing=True)` in TRL. On a GPU install flash-attn: it has kernels for documents of unequal length.
#
# **What does it cost?** Without such a kernel, a mask with one entry for each pair of tokens of a row. And some models cannot tell where a document begins, because they do not read positions; `check_document_mask` refuses them.
#
# ## Everything combined
#
# This row puts four things together: the base loaded in the fastest precision of this machine (here bf16), its linear layers then in four bits, packed rows, and the loss on the answers only. Two packed rows hold about as many documents as a padded batch of three.
#
# **Guess first.** What is the largest part of the peak that is left? And will the loss be lower than that of QLoRA?

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
# The loss of *everything combined* is not lower than that of QLoRA. It, too, begins with four-bit weights, and its three steps see other documents. Three steps do not say more.
#
# The seconds are measured last. In each of three rounds every recipe takes its turn. Every second round has the reverse order. So what slows the machine slows all of them.
#
# Two columns need an explanation. *Time* is the time per useful token, because a step of the last recipe has other documents. It is divided by that of full fine-tuning: the fastest steps of both, and in brackets the lowest and the highest ratio of a single round. (Full fine-tuning is divided by its own fastest step. The factors in the chart are the same numbers; its bars are seconds of a step.) *Loss* is the held-out loss after training. (The column of that name in [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) is the loss of a batch.) The brackets of the last two rows overlap, so this run does not say which of the two is faster.
#
# In the table below QLoRA is faster than LoRA, although it unpacks its weights in each product. Why? Where 16 bits are native, its layers multiply in 16 bits, and those of LoRA in 32. So this row changes two things at once.

# %%
from recipes_lib.core.measure import there_and_back


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
for order in there_and_back(list(again), rounds=sizes.rounds):
    for row in order:
        took[row].append(step_in_turn(row))
ladder.set_times(
    {row: [step.seconds for step in steps] for row, steps in took.items()},
    units={row: steps[0].tokens for row, steps in took.items()},
)
ladder

# %%
ladder.chart()

# %% [markdown]
# The memory over one step, for the first and the last row, on one scale. In full fine-tuning most bytes are states and weights. In the second picture little of them is left, and most of the bytes are activations. That answers the first guess. (The picture shows the second step and the ladder the third one, so a peak can differ by a little.)

# %%
ends = ("full fine-tuning", "everything combined")
timeline_chart(
    {row: timeline_of(row) for row in ends},
    predicted={row: predictions[row].timeline for row in ends},
    title="Hardly any states, small weights: activations are left",
)

# %% [markdown]
# Now look at the answers of *everything combined*. Each is cut after 20 tokens. Before training, all twenty repeat code. After three steps fewer do, and one begins to see the form of a docstring. The perplexity of Python source has risen. Did training make the model forget Python? This check does not show it. Four bits alone, without any training, raise the perplexity about as much (recipe 3).

# %%
from recipes_lib.report.figure import new_figure
from recipes_lib.report.style import INK, RECIPE

codes = [sum("def " in words for words in some) for some in (answers_before, answers)]
print(f"answers with code: {codes[0]} → {codes[1]} of {len(answers)}")
print(f"perplexity of Python source: {text_before:.1f} → {text_after:.1f}")
for old, new, row in zip(answers_before, answers, held_out[:2]):
    wanted = tokenizer.decode([token for token in row["labels"] if token != IGNORED])
    print(f"\nbefore: {old}\nafter:  {new}\nwanted: {wanted}")
figure, axes = new_figure(
    "All four lower the loss; the last two pay for four bits",
    height=2.4,
    source=f"{sizes.steps} steps, one seed; 95 % intervals over {len(held_out)} rows",
)
axes.axvline(0, color=INK, linewidth=1)
for place, change in enumerate(changes.values()):
    axes.plot([change.low, change.high], [place, place], color=INK)
    axes.plot(change.difference, place, "o", color=RECIPE)
axes.set_yticks(range(len(changes)), changes)
axes.invert_yaxis()
axes.set(xlabel="change of the held-out loss, nats per token")
figure

# %% [markdown]
# This picture does not rank two recipes: two intervals can overlap although one recipe is better on almost every pair. To rank them, compare their losses pair by pair: `compare(after["LoRA"], after["QLoRA"])`.
#
# <!-- numbers:finetune-gpu -->
# <!-- end -->
#
# ## Part C: from the run to production
#
# ### 7. A run that is long enough to see
#
# **What is going on?** Three steps are a check that the loss falls. A run that is to be used takes many more. This one takes 120 steps of four rows and was recorded (`python -m benchmarks.long_finetune`): full fine-tuning and LoRA, on the same rows in the same order. Its settings are not those used above: the learning rates are 5e-5 and 5e-4, products are in bf16, and 60 rows are held out. Their loss is taken every twenty steps. **Guess first:** after more than a hundred steps, does one of the two end lower?

# %%
from recipes_lib.report.lines import lines
from recipes_lib.report.records import recorded

long_run = recorded("long_finetune")
settings = long_run["settings"]
names = {"full": "full fine-tuning", "lora": "LoRA"}
lines(
    {names[method]: points for method, points in long_run["curves"].items()},
    title="Full fine-tuning and LoRA end within 0.02 nats",
    xlabel="optimizer step",
    ylabel="held-out loss, nats per token",
    source=f"{long_run['measured_on']}; one seed, {settings['held_out']} held-out rows",
)

# %%
for method, verdict in long_run["verdicts"].items():
    print(
        f"{names[method]:<17}{verdict['value']:+.3f} nats per token "
        f"(95 % interval {verdict['low']:+.3f} to {verdict['high']:+.3f})"
    )
for number, wanted in enumerate(long_run["wanted"][:3]):
    print(f"\nwanted: {wanted}")
    print(f"before: {long_run['before']['answers'][number]}")
    for method, texts in long_run["answers"].items():
        print(f"{names[method]}: {texts[number]}")

# %% [markdown]
# The answers after training are whole: all of them end long before the limit of 80 tokens. Of the answers before training the third one stops at that limit. Before, the model repeats the code. After either training it writes a docstring, short and in the right form. What the docstring says is not always true: compare the first answers with what was wanted. The loss does not show that. Read some answers.
#
# To the guess: LoRA ends lower, by 0.02 nats. This is one seed, and the record has no interval of the difference, pair by pair. So both learn about equally much. This run does not show which one is better. The straight line between step 0 and step 20 is no measurement: the record has no point between them.
#
# ### 8. Save, merge, deploy
#
# **What is going on?** **An adapter belongs to one base.** Put on another model of the same shape, it runs and answers badly. So `save_adapter` keeps a fingerprint of the base beside it, taken before the base is rounded to four bits, and `load_adapter` refuses any other model.
#
# **Guess first.** QLoRA was trained on weights of four bits. Which model is better: its adapter on these weights, or on the base as it was before, here in bf16?

# %%
import copy

from recipes_lib.fine_tuning.adapter_files import (
    base_fingerprint,
    check_merged,
    load_adapter,
    save_adapter,
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
print(f"merged, loaded again: logits differ by {merge_error:.1%} of their norm")

# The same adapter on the base as it was before QLoRA rounded it: another model.
on_full = load_adapter(fresh(here.compute_dtype), folder / "adapter")
on_full_losses = losses_of(on_full)
verdict = compare(after["everything combined"], on_full_losses)
print(f"adapter on the full base, against the judged model: {verdict}")
del on_full, trained

# %% [markdown]
# The full base does not pay what four bits cost: the same adapter is better on it, on these rows and with this one seed. What to deploy?
#
# | your case | deploy |
# |---|---|
# | the line above says *better* for your rows, and 16-bit weights fit | the adapter on the full base; `merge_lora` puts both into one model |
# | it does not say *better*, and 16-bit weights fit | the merged folder: up to rounding it is the model that was judged, and it has 16-bit weights, too |
# | only four bits fit | the four-bit base with the adapter beside it, as it was trained and judged |
#
# The merged folder gives almost the logits of the judged model: the sum of weight and adapter is rounded to 16 bits. Do not let peft merge into the four-bit weights: that rounds the sum to four bits once more.
#
# ### 9. Pairs of your own, by one command; killed and resumed
#
# `python -m recipes_lib finetune` is the loop above as a command. It reads a file of pairs, checks every row, and keeps the first of every ten pairs out of the training. At its end it says how the loss of these has changed. Here the pairs are sums. They are in random order, so that every tenth pair is a fair sample: do the same with a file of your own. The process is killed in the middle of its training, and a second one goes on from the last checkpoint.

# %%
import json
import random

pairs = folder / "pairs.jsonl"
sums = [(first, second) for first in range(20) for second in range(20)]
random.Random(0).shuffle(sums)  # the command holds out the first of every ten pairs
with pairs.open("w") as file:
    for first, second in sums:
        pair = {
            "prompt": f"What is {first} + {second}?",
            "completion": f"The sum of {first} and {second} is {first + second}.",
        }
        print(json.dumps(pair), file=file)
print(pairs.read_text().splitlines()[0])

# %%
from recipes_lib.workflows.finetune import command

options = [
    f"--model={base}",
    f"--data={pairs}",
    f"--output={folder / 'run'}",
    f"--steps={sizes.own_steps}",
    "--save-steps=3",
    f"--rows-per-step={sizes.own_rows}",
    "--seq-len=auto",
    "--dropout=0.1",  # random numbers, which a resumed run must repeat
]
print("python -m recipes_lib finetune", *options, "\n")
# The process is killed two steps after a checkpoint, as the system does out of memory.
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
# Both processes trained steps 3 and 4, and their losses agree in every digit: weights, states, schedule, position in the data and random state come back. The log has each step once. The README is the card of the adapter: base, data, losses before and after, the command and the versions. One line of the output needs an explanation: 360 rows are "packed into 360 rows". Almost all pairs are nearly as long as the longest, so no two fit into one row, and packing does nothing here. The low loss at the end says that the model has learned the form of these answers. Whether it adds, only a look at its answers would show.
#
# ### 10. The same run in production libraries
#
# `transformers.Trainer` and TRL's `SFTTrainer` train on the same rows, in the same order, with the same settings: LoRA in fp32, two rows per step, three steps. Before each of their steps our loop takes the same step, so both see the same machine. The first step makes the states and does not count, so each ratio is the median of two steps. **Guess first:** will the losses be equal? And whose peak is the lowest?

# %%
from recipes_lib.workflows.finetune import libraries, production

show(production.trainer_arguments)
equal = replace(two_rows, steps=max(2, sizes.steps))
found = libraries.side_by_side(
    lambda: loop.adapt(fresh(), run=equal), train, run=equal, tokenizer=tokenizer
)
print(libraries.table(found))

# %% [markdown]
# The losses are the same, to the digits that are printed. The peaks are not: ours is the lowest. The Trainer makes the logits of all tokens at once. Our loop makes only those at positions where one of the rows learns a token. TRL's usual loss (`loss_type="nll"` in version 1.16) never holds all logits: on a GPU it takes the tokens with a label only, and goes through them in tiles. On a CPU it takes every token. Its tiles are 32,768 words wide, which is most of this vocabulary, and in backward it makes them once more ([notebook 04](../notebooks/04_training_long_sequences.ipynb) measures that). Here TRL has the highest peak and takes the most time; on a GPU or with a larger vocabulary that can be different. Both Trainers also run callbacks and check each batch, and TRL computes entropy and accuracy. How much of the time each of these takes was not measured. In return they have evaluation while training, callbacks, and several GPUs. At a vocabulary and a length where logits are most of the memory, take TRL's loss or ours; the step of a small model says nothing about that.
#
# The command of recipe 9 also wrote a file for Axolotl with its settings, and launch settings for `accelerate`. Axolotl was not run here. It loads the base from the hub, so after a run on the rounded weights that the setup names, it begins at other losses. This is how the file begins:

# %%
print(*(folder / "run" / "axolotl.yml").read_text().splitlines()[:22], "...", sep="\n")

# %% [markdown]
# ### 11. Other families: templates, context, experts, images
#
# The recipes are tested on many families, on tiny random models; [docs/families.md](../docs/families.md) has the list. This section trains no other pretrained model. It shows three things to know before you do so, with Qwen3 as the example.
#
# **Its template drops the thinking of earlier answers.** Before an answer, Qwen3 can write its thinking, between `<think>` and `</think>`. The template keeps only that of the last answer. So a conversation becomes one row per answer, each after the history that the model will really see. Where the hub is reachable, the next cell takes Qwen3's own template, else one with its rule about thinking.

# %%
from recipes_lib.core.data.chat import tokenize_chat

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
# The second row has the first answer without its thinking. (Where the print begins with "without the hub", the template is the short one above, which has this rule of Qwen3 and nothing else of it.)
#
# **Its context, the longest text that it can read, is stretched by a factor in the configuration.** [Notebook 04](../notebooks/04_training_long_sequences.ipynb) compares the ways; two of them are *dynamic* and *YaRN*. One property matters for fine-tuning: what happens to short texts?

# %%
from recipes_lib.architecture.rope import apply_rope_scaling
from recipes_lib.core.model import model_of_shape

plain = model_of_shape("tiny-qwen3").eval()
text = torch.arange(1, 33, device=here.device)[None]
for kind in ("dynamic", "yarn"):
    scaled = apply_rope_scaling(copy.deepcopy(plain), kind=kind, factor=4.0)
    before_scaling = plain(text).logits
    difference = (scaled(text).logits - before_scaling).norm() / before_scaling.norm()
    print(f"{kind}: logits of a short text change by {difference:.0%} of their norm")

# %% [markdown]
# YaRN changes the model for short texts, too. How much that costs a trained model, this tiny random one does not say; switch YaRN on only if you need it. *Dynamic* scaling (dynamic NTK) changes nothing as long as a text is not longer than those of the training.
#
# **Experts, and images.** In Qwen3-VL-MoE a vision tower turns an image into tokens, and each block of the language model has many MLPs, the *experts*, of which a *router* chooses a few per token ([notebook 02](../notebooks/02_multi_gpu_training.ipynb) explains them). The experts of a block are stored together in two large tensors, and not as linear layers. So adapters cannot be put on them one by one. The next cell builds a tiny model of this kind with random weights; its long first part is only the configuration.

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
of_experts = replace(lora, rank=4, alpha=8, target_modules="attention")
texts = torch.randint(0, 100, (9, 12)).tolist()
text_rows = [{"input_ids": text, "labels": text} for text in texts]
model, predicted = loop.prepare(model, text_rows, run=of_experts, pad_token_id=0)
parts = {"vision tower": "visual", "experts": "experts", "routers": "mlp.gate."}
for name, part in parts.items():
    of_part = [p for n, p in model.named_parameters() if part in n]
    trainable = sum(p.numel() for p in of_part if p.requires_grad)
    numbers = sum(p.numel() for p in of_part)
    print(f"{name}: {numbers:,} parameters, of which {trainable} train")
adapted = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(f"adapters on the attention of the language model: {adapted:,} parameters")
print(f"predicted {predicted.peak / 2**20:.2f} MiB")
steps = loop.training_steps(model, text_rows, run=of_experts, pad_token_id=0)
print("steps on text: loss", *(f"{step.loss:.3f}" for step in steps))
in_vision = any(
    p.requires_grad for n, p in model.named_parameters() if "visual" in n
)

# %% [markdown]
# Only the adapters on the attention of the language model train. The texts are random, so the losses say nothing but that the steps run. The vision tower, the experts and the router are frozen; they still take their bytes as weights, and the tower takes its forward pass for each image. Four bits do not reach experts that are stored in this way. To train such a model on text, load it with its own class: `load_model` takes models of text only. And say `target_modules="attention"` in the settings. The cell above does so with the loop of this notebook. Its memory is predicted like that of any other model, for the prediction asks nothing of its blocks. Rows with images also need the model's processor.
#
# ## Take this into your code
#
# Here is a short form of this notebook's loop, without a schedule, on a model of the hub. `resolve` gives the folder of the embedded model where the hub cannot be reached.

# %%
from transformers import AutoModelForCausalLM

from recipes_lib.core.data import collate
from recipes_lib.core.model.default_model import resolve
from recipes_lib.fine_tuning.adapter_files import base_fingerprint, save_adapter
from recipes_lib.fine_tuning.completion_only_loss import completion_only_loss
from recipes_lib.fine_tuning.honest_evaluation import compare, held_out_losses
from recipes_lib.fine_tuning.lora import apply_lora

name = resolve("HuggingFaceTB/SmolLM2-135M-Instruct")  # any causal LM of the hub
model = AutoModelForCausalLM.from_pretrained(name, dtype=here.compute_dtype)
model = model.to(here.device).train()
base_of_mine = base_fingerprint(model)
before_mine = held_out_losses(model, held_out, **padding)
model = apply_lora(model, rank=16, alpha=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for start in range(0, 8, 4):  # your rows, four at a time
    batch = collate(train[start : start + 4], device=here.device, **padding)
    loss = accumulate_gradients(model, [batch], loss_sum=completion_only_loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
print(compare(before_mine, held_out_losses(model, held_out, **padding)))
save_adapter(model, folder / "mine", base=base_of_mine)
del model, optimizer

# %% [markdown]
# Here is nearly the same as arguments of TRL, with three things more: a schedule, packing and mixed precision. The adapter goes into the trainer: `SFTTrainer(…, peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))`.
#
# ```python
# SFTConfig(
#     output_dir="my-adapter",
#     completion_only_loss=True,  # recipe 1; for rows with prompt and completion
#     learning_rate=1e-3,
#     lr_scheduler_type="cosine",
#     per_device_train_batch_size=4,
#     gradient_accumulation_steps=1,  # recipe 5
#     max_grad_norm=1.0,  # recipe 5: clipping
#     optim="adamw_torch_fused",  # recipe 4: or "adamw_8bit"
#     packing=True,  # recipe 6
#     max_length=192,
#     bf16=True,  # mixed precision
#     gradient_checkpointing=False,  # TRL's own default is True
# )
# ```
#
# Without code: `python -m recipes_lib finetune --data pairs.jsonl --output my-adapter`. The [cheatsheet](../CHEATSHEET.md) has the switches of the libraries side by side, and the traps.
#
# ## What it costs, and when not to use it
#
# | recipe | price | not when |
# |---|---|---|
# | full fine-tuning | 16 bytes per weight | forgetting hurts: in Biderman et al. LoRA learns less and forgets less (not measured here; in recipe 7 both learn about equally much) |
# | LoRA | a low-rank update only | teaching much new knowledge |
# | QLoRA | unpacking in each product; rounded weights | the 16-bit weights fit |
# | 8-bit AdamW | slightly different updates | with adapters |
# | pure bf16 | noise of rounding | fp32 weights fit: autocast |
# | Muon | products of matrices in each step | with adapters; few tokens per step |
# | packing | a mask, or a kernel for variable lengths | rows of one length |
# | loss on the answers | none | long prompts, short answers, few rows (Shi et al.) |
#
# **Measured here: two recipes that gain less than one expects.** *Packing*: in recipe 6 packed rows are not clearly faster on a CPU than the same eight rows sorted by length. That is one measurement. *Pure bf16* with rounding to nearest: after three steps at a learning rate of 1e-5 hardly any weight has changed.
#
# **What goes together.** QLoRA, packed rows and the loss on the answers: they are *everything combined*. **What does not.** 8-bit states or Muon with adapters, which have hardly any states to shrink; packing with models that ignore positions.
#
# ## Exercises
#
# 1. Predict, then measure: QLoRA on packed rows with `gradient_checkpointing=True`. What is left at the peak?
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
# - Shi et al., *Instruction Tuning With Loss Over Instructions*, 2024
# - Jordan, *Muon*, 2024; Liu et al. (Moonshot), *Muon is Scalable for LLM Training*, 2025
# - PEFT, *method_comparison*; TRL, *Default SFT loss to chunked_nll*, pull request 5846
#
# The last cell checks the main claims above on this machine: orderings, signs, and how exact predictions and losses are. It never checks absolute speed.

# %%
from recipes_lib.core.measure.machine import fast

qlora_time = ladder["QLoRA"].seconds / ladder["LoRA"].seconds
print(f"QLoRA takes {qlora_time:.2f}× the time of LoRA per step")
both = killed.keys() & resumed.keys()
exact = all(killed[step] == resumed[step] for step in both)
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
assert all(abs(row.prediction_error) < 0.005 for row in ladder.rows), "predicted"
assert abs(muon_error) < 0.005, "Muon's peak is predicted, too"
if not fast():  # weights as small as those of FAST mode say nothing
    assert state_bytes["fp32, fused"] > 7.9
    assert abs(leaking / alone.mean - 1) > 1e-4, "without a mask, documents read each other"
    assert peaks["QLoRA"] < peaks["LoRA"] < peaks["full fine-tuning"]
    assert max(state_bytes["torchao"], state_bytes["bitsandbytes"]) < 2.2
    assert changed["nearest"] < changed["master"] < changed["stochastic"]
    assert found["ours"]["peak_bytes"] < found["Trainer"]["peak_bytes"]
assert abs(together / alone.mean - 1) < 1e-4, "packing is exact"
# A GPU adds in another order from run to run.
assert exact or here.device == "cuda", "the resumed run is the one that was killed"
assert {3, 4} <= killed.keys() & resumed.keys(), "steps that both have trained"
assert [step for step, _ in log["loss"]] == list(range(sizes.own_steps)), "logged once"
for library in ("Trainer", "SFTTrainer"):
    for theirs, ours in zip(found[library]["losses"], found["ours"]["losses"]):
        assert abs(theirs - ours) < 1e-3, "the same training in the library"
assert not in_vision, "the vision tower is frozen"
if sizes.certain:
    assert all(change.high < 0 for change in changes.values()), "better, beyond chance"
print("all checks passed")
