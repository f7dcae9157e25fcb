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
# > **0 → 32 of 48 answers right**, to the letter, on sentences that the model has never seen: LoRA, 120 steps of one seed. Held-out loss 2.34 → 0.04 nats per token (-2.29, 95 % interval -2.36 to -2.23). QLoRA gets 28 right, full fine-tuning 43, and a prompt with three examples, without any training, 1. A step of QLoRA with logits of the answers only takes **80% less memory** than one of full fine-tuning and 0.95× (0.84–1.06) its time, both in the same precision. Each row was predicted before it ran, by the same count on tensors without data: off by less than 0.1%.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-26.
# <!-- end -->
#
# A pretrained model knows a language, and not your task. This notebook teaches a small model to turn a sentence into a reminder that a program can read, as JSON. It trains all weights, LoRA and QLoRA in one loop. Each time it asks: how much memory, how much time, and how many answers are right on sentences that the model has never seen?
#
# | | |
# |---|---|
# | **You will learn** | to choose what trains, at which learning rate, in how many bits; to prove that the model got better; to save what you have proven |
# | **You need** | Python, the basics of PyTorch; no GPU, no login |
# | **Time to run** | about ten minutes on two CPU cores |
# | **Time to read** | 45 minutes |
# | **Hardware that has run this** | two CPU cores; no GPU yet |

# %% [markdown]
# ## The map
#
# | | recipe | its question | file |
# |---|---|---|---|
# | 1 | held-out loss and score, with intervals | is it better, or is it luck? | [honest_evaluation.py](../recipes_lib/fine_tuning/honest_evaluation.py) |
# | 2 | LoRA | which weights train? | [lora.py](../recipes_lib/fine_tuning/lora.py) |
# | 3 | QLoRA | in how many bits are the others? | [qlora.py](../recipes_lib/fine_tuning/qlora.py) |
# | 4 | logits of the answers only | what fills the rest? | [completion_only_loss.py](../recipes_lib/fine_tuning/completion_only_loss.py) |
# | 5 | a sweep | which learning rate? | [lora.py](../recipes_lib/fine_tuning/lora.py) |
# | 6 | the run | does it learn the task? | [reminders.py](../recipes_lib/core/data/reminders.py) |
# | 7 | experts and images | what does LoRA leave out? | [lora.py](../recipes_lib/fine_tuning/lora.py) |
# | 8 | packing | how much is padding? | [sequence_packing.py](../recipes_lib/training/sequence_packing.py) |
# | 9 | save, merge, deploy | is it still the model that was judged? | [adapter_files.py](../recipes_lib/fine_tuning/adapter_files.py) |
# | 10 | TRL, and a command that survives a crash | how do I run it? | [command.py](../recipes_lib/workflows/finetune/command.py) |
#
# ## Setup
#
# Where the package is missing, as on Colab, this cell fetches the repository and installs what is lacking.

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
import warnings

import torch
import transformers

from recipes_lib.core.measure.machine import choose_sizes, machine, seed_everything
from recipes_lib.core.measure.free_memory import keep_freed_memory
from recipes_lib.core.model.default_model import model_source, source_note

warnings.simplefilter("ignore", FutureWarning)  # about peft's own calls
transformers.utils.logging.disable_progress_bar()
keep_freed_memory()  # a CPU's steps are slower where the system takes freed memory back
here = machine()
print(here)
print(f"SmolLM2 comes from: {model_source()}\n{source_note()}")

# %% [markdown]
# All sizes stand in one cell. For a model of your own write its hub id or its folder in the place of `smollm2`.

# %%
cpu = dict(
    model="smollm2",
    rows=2,  # sentences in a step
    compared=4,  # sentences in the step whose bytes and time are compared
    steps=120,  # of the three long runs
    short=12,  # steps of each run that looks for a learning rate
    held_out=48,  # sentences that judge, and are never trained on
    rounds=3,  # of timing
)
more = dict(rows=16, compared=16, steps=300, short=40, held_out=200)
# Continuous integration checks that the code runs, on a model with random weights.
tiny = dict(model="tiny-smollm2", steps=4, short=2, held_out=8, rounds=1)

sizes = choose_sizes(
    cpu=cpu,
    gpu16=cpu | more,
    gpu24=cpu | more,
    gpu80=cpu | more | dict(rows=32, compared=32),
    fast=cpu | tiny,
)
sizes

# %% [markdown]
# ## The task, and what is learned of it
#
# A program makes the task, so an answer is right or wrong. The clock has 288 times of five minutes. A fifth of them stands in held-out sentences only, with four things to do that no training sentence has, in the same forms of sentence. So no answer can be remembered whole. But the sentences are relatives of each other, so the intervals below are too narrow for other forms.
#
# Sentences that chose a rate cannot judge it. One part of the held-out sentences chooses the learning rates, and another part gives the verdicts.

# %%
import gc
import os
import shutil

from recipes_lib.core.data import collate, load_instructions, load_pairs
from recipes_lib.core.data.chat import decode_with_mask
from recipes_lib.core.data.reminders import reminder_pairs, times_of
from recipes_lib.core.measure.provenance import runs_dir
from recipes_lib.core.model import load_model, load_tokenizer

# Files of this notebook, made anew in each run.
folder = Path(os.path.relpath(runs_dir() / f"notebook-05-{sizes.tier}"))
shutil.rmtree(folder, ignore_errors=True)

tokenizer = load_tokenizer(sizes.model)
padding = {"pad_token_id": tokenizer.pad_token_id}
pairs = reminder_pairs(limit=sizes.rows * sizes.steps)
drawn = reminder_pairs(split="validation", limit=3 * sizes.held_out)
# Each answer once, so that no pair is in both parts.
different = list({pair["completion"]: pair for pair in drawn}.values())
to_choose = different[: sizes.held_out // 2]
questions = different[-sizes.held_out :]
assert len(to_choose) + len(questions) <= len(different)
assert not set(times_of("train")) & set(times_of("validation"))

train_rows = list(load_instructions(tokenizer, dataset=pairs))
choosing = list(load_instructions(tokenizer, dataset=to_choose))
held_out = list(load_instructions(tokenizer, dataset=questions))

for pair in pairs[:2] + questions[:2]:
    print(pair["prompt"], pair["completion"], sep="\n  ")
print()
print(decode_with_mask(train_rows[0], tokenizer))

# %% [markdown]
# Between ⟦ and ⟧ is the question. Its labels are -100, which PyTorch's cross-entropy skips: the model should learn to write the answer.
#
# ### Labels that are wrong train without an error
#
# With wrong labels the loss falls, too, and the model learns something else. Here is the same row with three mistakes, and what `check_labels` says of each:

# %%
from recipes_lib.core.data.chat import IGNORED
from recipes_lib.fine_tuning.completion_only_loss import check_labels

row = train_rows[0]
ids = row["input_ids"]
labels = row["labels"]
end = [label for label in labels if label != IGNORED][-1]
mistakes = {
    # The model shifts labels by itself: each token would learn the one after next.
    "shifted twice": [*labels[1:], IGNORED],
    # The template and the question would be learned as well.
    "question not masked": ids,
    # Whoever masks padding, and pads with the end mark, has a model that never stops.
    "end mark masked": [IGNORED if label == end else label for label in labels],
}
for mistake, wrong in mistakes.items():
    try:
        check_labels([{"input_ids": ids, "labels": wrong}], tokenizer)
    except ValueError as error:
        print(f"{mistake}: {error}\n")
targets = check_labels(train_rows, tokenizer)
print(f"right: {targets:.0%} of the tokens carry loss")

# %% [markdown]
# **The line you will write tomorrow:** in TRL, rows with `prompt` and `completion`: `completion_only_loss=True` is then the default. For rows of `messages` it is `assistant_only_loss=True`; in Unsloth, `train_on_responses_only`. They do not check labels that you bring. Without this repository, print `tokenizer.decode([label for label in labels if label != -100])` of three rows. **When not:** with long questions, short answers and few rows it can help to learn the questions, too (Shi et al.).
#
# ## Baseline: the loop
#
# This is all of the training, for every row below. A recipe changes what goes in: the model, the batches, the rate or the loss. `autocast` rounds the inputs of the matrix products to 16 bits. The scaler is for fp16 alone, where small gradients would become zero.

# %%
from transformers import get_cosine_schedule_with_warmup

half = here.compute_dtype  # bf16 where it is native, fp16 on a T4, else fp32
scaler = torch.amp.GradScaler(here.device, enabled=half is torch.float16)


def in_half():
    """Matrix products in 16 bits, where this machine has fast ones."""
    return torch.autocast(here.device, dtype=half, enabled=half is not torch.float32)


def own_loss(model, batch):
    """The mean over all labels that are not -100."""
    return model(**batch, use_cache=False).loss


def take_step(model, batch, optimizer, loss_of=own_loss):
    with in_half():
        loss = loss_of(model, batch)  # forward
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the longest allowed
    scaler.step(optimizer)  # the weights change
    scaler.update()
    optimizer.zero_grad()
    return loss.item()


def optimizer_of(model, rate):
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, fused=True)


def train(model, batches, rate, loss_of=own_loss):
    """Yields the loss of each step. The rate rises for a tenth of them, then falls to zero."""
    optimizer = optimizer_of(model, rate)
    warmup = max(1, len(batches) // 10)
    schedule = get_cosine_schedule_with_warmup(optimizer, warmup, len(batches))
    model.train()
    for batch in batches:
        yield take_step(model, batch, optimizer, loss_of)
        schedule.step()


# %% [markdown]
# Every way of training sees the same rows in the same order, and each row once. More turns through the rows, *epochs*, are for small data: stop where the held-out loss rises, for from there the model only remembers.

# %%
gc.freeze()  # to count bytes, Python looks at all objects: not at those of the imports


def batch_of(rows):
    return collate(rows, device=here.device, **padding)


batches = [
    batch_of(train_rows[start : start + sizes.rows])
    for start in range(0, len(train_rows), sizes.rows)
]
compared = batch_of(train_rows[: sizes.compared])
tokens = compared["input_ids"].numel()
print(f"{len(batches)} batches to train on; the compared step has {tokens} tokens")


def base(dtype=torch.float32):
    """The pretrained model, each time with the same weights."""
    seed_everything(0)
    return load_model(sizes.model, dtype=dtype)


# %% [markdown]
# ## What a step needs: two equations
#
# A weight that trains has 4 bytes, and AdamW keeps two more numbers of 4 bytes for it, its *states*. A weight that is frozen has no states and no gradient.
#
# $$\text{bytes} = b \cdot \text{frozen} + (4 + 8) \cdot \text{trained} + \max(\text{activations} + \text{logits},\ 4 \cdot \text{trained})$$
#
# Here *b* is the size of a frozen weight: 2 in 16 bits, 0.52 in four bits with their scales. *Activations* are what forward keeps for backward. *Logits* are one number per token and word of the vocabulary; the loss needs that table about three times. Both are freed in backward while the gradients arrive, so the peak has one or the other. The equation leaves one thing out: a model that shares its embedding with its output holds two more gradients of it for a moment. The cell below prints them.
#
# A trained weight costs six operations per token: two in forward, two for the gradient of its input, two for its own. A frozen one costs four. Padding costs as much as text.
#
# $$\text{operations} = (4 \cdot \text{frozen} + 6 \cdot \text{trained}) \cdot \text{tokens, with padding}$$
#
# So a step of LoRA should take a little more than 4/6 of the time of full fine-tuning. These bytes stay between two steps:

# %%
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.fine_tuning.lora import lora_parameters

shapes = load_model(sizes.model)
weights = shapes.num_parameters()
in_blocks = sum(weight.numel() for weight in decoder_blocks(shapes).parameters())
adapters = lora_parameters(shapes, rank=16)
kept = {
    "full fine-tuning": (4 + 8) * weights,
    "LoRA": 2 * weights + (4 + 8) * adapters,
    "QLoRA": 0.52 * in_blocks + 2 * (weights - in_blocks) + (4 + 8) * adapters,
}
print(f"{weights:,} weights, {in_blocks:,} of them in blocks; adapters {adapters:,}")
for name, size in kept.items():
    print(f"{name:<17}{size / 2**20:7,.0f} MiB")
gradients = 4 * weights
both_ends = 2 * 4 * shapes.get_input_embeddings().weight.numel()
peak = kept["full fine-tuning"] + gradients + both_ends
for name, size in {
    "gradients": gradients,
    "both ends": both_ends,
    "peak": peak,
}.items():
    print(f"full fine-tuning, {name:<10}{size / 2**20:7,.0f} MiB")
del shapes

# %% [markdown]
# ## 1. Is it better, or is it luck?
#
# **What happens.** Two numbers judge a model: the *held-out loss*, in nats per token of the answers (the natural logarithm: 0.69 nats are a coin toss), and the share of answers that are right to the letter. Other sentences would give other numbers, so each has an interval. For the loss we draw as many sentences as we have out of ours, with replacement, 2,000 times. The middle 95 % of the means are the interval. For a share of right answers Wilson's formula gives the interval; it holds for 0 and for 100 %, too.
#
# To compare two models, draw the differences on the *same* sentences: what makes a sentence hard for both is then gone.
#
# **Guess first.** How many answers are right before training, if the question stands alone, and if three examples stand before it?

# %%
import math
from types import SimpleNamespace

from recipes_lib.core.data.chat import tokenize_chat
from recipes_lib.core.data.corpus import load_text
from recipes_lib.core.data.evaluation import evaluate, generate_answers, text_windows
from recipes_lib.fine_tuning.honest_evaluation import (
    compare,
    held_out_losses,
    plain_paired_bootstrap,
)
from recipes_lib.report.show import show

show(plain_paired_bootstrap)
wanted = [pair["completion"] for pair in questions]


def losses_of(model, rows):
    with in_half():
        return held_out_losses(model, rows, batch_size=32, **padding)


def wilson(right, count, z=1.96):
    """The 95 % interval of a share."""
    share = right / count
    middle = share + z * z / (2 * count)
    half_width = z * (share * (1 - share) / count + (z / (2 * count)) ** 2) ** 0.5
    whole = 1 + z * z / count
    return (middle - half_width) / whole, (middle + half_width) / whole


def write(model, prompts):
    with in_half():
        return generate_answers(model, tokenizer, prompts, batch_size=64)


def are_right(answers):
    """1 for each answer that is right to the letter, else 0."""
    return torch.tensor([a == b for a, b in zip(answers, wanted)]).double()


def examine(model):
    """Losses and answers on the sentences that judge."""
    answers = write(model, held_out)
    losses = losses_of(model, held_out)
    return SimpleNamespace(losses=losses, answers=answers, right=are_right(answers))


def share_in_words(right):
    low, high = wilson(right.sum().item(), len(right))
    return f"{right.sum():.0f} of {len(right)} right ({low:.0%} to {high:.0%})"


model = base()
before = examine(model)
print(f"alone:                {share_in_words(before.right)}, loss {before.losses}")


def turns_of(pair, train=True):
    """A question and its answer; with `train` False nothing is learned of the answer."""
    answer = {"role": "assistant", "content": pair["completion"], "train": train}
    return [{"role": "user", "content": pair["prompt"]}, answer]


# The form in words, then three examples as earlier turns.
form = "Answer with JSON: the day, the time as HH:MM of 24 hours, and what to do."
examples = [{"role": "system", "content": form}]
for pair in pairs[:3]:
    examples += turns_of(pair, train=False)
conversations = []
for question in questions:
    conversations += tokenize_chat(tokenizer, [*examples, *turns_of(question)])
answers = write(model, conversations)
prompted = are_right(answers)
print("after three examples:", share_in_words(prompted))
print(f"one of them: {answers[0]}, wanted: {wanted[0]}")
# Python's own modules, where every token is a target.
other_text = text_windows(tokenizer, text=load_text(split="validation"))


def predicts_other_text(model):
    with in_half():
        return math.exp(evaluate(model, other_text, **padding))


forgotten = {"before": predicts_other_text(model)}
del model

# %% [markdown]
# The two lines answer the guess. A prompt with examples costs no training, and is what fine-tuning has to beat. For a model this small it is a weak opponent: ask a large one before you train it. **When not:** with fewer than about thirty sentences the interval of the loss is too narrow. No interval covers another seed of the training, nor sentences that this program would not make. Your users write other forms: hold out a form, too.
#
# ## 2. LoRA: train a small correction
#
# **What happens.** The model is frozen. Beside each linear layer two thin matrices train. Their product is added to what the layer gives.
#
# ```text
# x --+------ W ------+--> y        W  [out, in]  frozen
#     '-- A -- r -- B-'             A  [r, in],  B  [out, r]  train; B begins as zero
# ```
#
# **Guess first.** 3.6 % of the numbers train. By how much does the peak fall?

# %%
from peft import LoraConfig, get_peft_model

from recipes_lib.fine_tuning.lora import plain_lora

show(plain_lora)
on_all = dict(target_modules="all-linear", task_type="CAUSAL_LM")


def with_adapters(model):
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, **on_all))


def with_lora():
    return with_adapters(base(half))


# A layer of peft beside ours, with a B that is not zero.
adapted = with_lora().float()
layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
a = layer.lora_A["default"].weight
b = torch.nn.init.normal_(layer.lora_B["default"].weight)
x = torch.randn(2, 5, layer.in_features, device=here.device)
by_hand = plain_lora(x, layer.base_layer.weight, a, b, alpha=32)
assert torch.allclose(layer(x), by_hand, atol=1e-3)
print("a layer of peft and the plain lines: equal")
del adapted, layer

# %% [markdown]
# `LoraConfig` and `get_peft_model` are the lines that you will write tomorrow. `apply_lora` of this repository calls both, and refuses layers that an adapter would not reach (recipe 7).
#
# The results go into a table, the *ladder*. `climb` predicts the bytes of a step from tensors that have a shape and no numbers, and then measures a real one. Each step is described at its own peak. The learning rate of these steps is zero, so *loss* is that of the model before training.

# %%
from functools import partial

from recipes_lib.report.ladders.memory import MemoryLadder

# The rows have unequal lengths: to count operations they are one long row.
ladder = MemoryLadder("05_fine_tuning_pretrained_models", rows=1, length=tokens)


def climb(name, make, loss_of=own_loss):
    def build():
        model = make().train()
        return model, optimizer_of(model, 0.0), partial(compared_step, loss_of=loss_of)

    ladder.climb(name, build, dtype=half)


def compared_step(model, optimizer, loss_of):
    return take_step(model, compared, optimizer, loss_of)


climb("full fine-tuning", base)
climb("LoRA", with_lora)
print(f"the guess: LoRA's peak is {-ladder['LoRA'].change:.0%} lower")

# %% [markdown]
# ## 3. QLoRA: the frozen weights in four bits
#
# **What happens.** 64 weights share a scale, and each becomes one of 16 levels. A layer unpacks its weights when it is called, and multiplies in 16 bits, as LoRA does here.
#
# **Guess first.** What do four bits cost before any training, and does training win it back?

# %%
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from recipes_lib.fine_tuning.adapter_files import save_merged
from recipes_lib.fine_tuning.qlora import apply_qlora, plain_nf4, quantize_nf4

show(plain_nf4)
in_four_bits = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",  # the default, fp4, has other levels
    bnb_4bit_use_double_quant=True,  # the scales are rounded, too
    bnb_4bit_compute_dtype=half,
)
save_merged(base(half), folder / "base", tokenizer=tokenizer, dtype=half)
theirs = AutoModelForCausalLM.from_pretrained(
    folder / "base", quantization_config=in_four_bits, dtype=half
)
ours = quantize_nf4(base(half), compute_dtype=half)
some = compared["input_ids"][:1]
# In eval mode a CPU would repack the weights of `theirs`, see below.
assert torch.equal(theirs.train()(some).logits, ours.train()(some).logits)
print("loaded by transformers, and rounded by quantize_nf4: the same logits")
rounded = compare(before.losses, losses_of(ours, held_out))
print("the guess: before training, four bits cost", rounded)
del theirs, ours


def with_qlora():
    return apply_qlora(base(half), rank=16, alpha=32, compute_dtype=half)


climb("QLoRA", with_qlora)

# %% [markdown]
# `apply_qlora` does one thing more than these lines. On CPUs with AVX512-BF16, bitsandbytes repacks the weights at the first forward in eval mode, for a kernel that has no gradient. Who examines the model before training then trains adapters of which most get a gradient of zero, without an error. `apply_qlora` prevents that.
#
# **When not:** where the 16-bit weights fit. Recipe 6 prints what is left of the difference after training.
#
# ## 4. Logits of the answers only, and everything combined
#
# **What happens.** Now that weights and states are small, the logits are large. Most of them belong to tokens without a label.
#
# **Guess first.** About a third of the tokens carry loss. How much of the peak goes?
#
# **The idea.** Ask for logits at the places where some row of the batch has a label. The change to the loop is another `loss_of`.

# %%
from recipes_lib.fine_tuning.completion_only_loss import (
    completion_only_loss,
    plain_answer_loss,
)

show(plain_answer_loss)


def answer_loss(model, batch):
    targets = (batch["labels"][:, 1:] != IGNORED).sum()
    return completion_only_loss(model, batch) / targets


model = base().eval()
with torch.no_grad():
    learnt = (compared["labels"][:, 1:] != IGNORED).sum()
    by_hand = plain_answer_loss(model, compared) / learnt
    assert torch.allclose(by_hand, answer_loss(model, compared), rtol=1e-4)
    assert torch.allclose(by_hand, own_loss(model, compared), rtol=1e-4)
print("by hand, by transformers and from some logits: the same loss")
del model
climb("everything combined", with_qlora, loss_of=answer_loss)

# %% [markdown]
# **The line you will write tomorrow:** `SFTConfig(loss_type="nll")` of TRL 1.16, its default, which was called `chunked_nll` before. On a GPU it drops the tokens without a label, and takes the rest in tiles. Without TRL: `model(…, logits_to_keep=places)`.
#
# *Everything combined* is QLoRA with this loss, and a step is timed beside the others, in turns:

# %%
ladder.take_turns(sizes.rounds)
ladder

# %%
ladder.chart()

# %%
for name, size in kept.items():
    found = ladder.predictions[name].kept / 2**20
    print(f"{name}: {size / 2**20:,.0f} MiB stay between steps, found {found:,.0f}")
counted = ladder["LoRA"].operations / ladder["full fine-tuning"].operations
print(f"LoRA's operations: {counted:.2f} of full fine-tuning's")
for name in ("LoRA", "QLoRA", "everything combined"):
    row = ladder[name]
    print(f"{name}: peak {row.change:+.0%}, time {row.ratio:.2f}×")
saved = 1 - ladder["everything combined"].peak_bytes / ladder["QLoRA"].peak_bytes
print(f"the guess: logits of the answers only take {saved:.0%} off QLoRA's peak")
to_lora = ladder["QLoRA"].seconds / ladder["LoRA"].seconds
print(f"QLoRA takes {to_lora:.2f}× the time of LoRA, both in the same precision")

# %% [markdown]
# These lines answer the guesses. In the lines of `climb` above, *other* is the two embedding gradients for full fine-tuning, and two more tables of logits in the loss for the rest. Where a time is above the share of operations, the adapters and the unpacking cost it. A small matrix leaves most of a processor idle, and each step unpacks the weights, however few its rows are. With more rows and on a large model both weigh less.
#
# ## 5. Which learning rate?
#
# **What happens.** *LoRA Without Regret* (Thinking Machines, 2025) found in many long runs: adapters want about ten times the learning rate of full fine-tuning, belong on all linear layers, and need no large rank for little data. We try the first, with rates a decade apart. QLoRA gets two rates of its own.
#
# **Guess first.** At which rate does each of them learn most in a short run?

# %%
short = batches[: sizes.short]


def short_run(model, rate):
    """The loss after a short run, on the sentences that choose."""
    for _ in train(model, short, rate, answer_loss):
        pass
    return losses_of(model, choosing).mean


trials = {
    "full fine-tuning": (base, (2e-5, 2e-4, 2e-3)),
    "LoRA": (with_lora, (2e-4, 2e-3, 2e-2)),
    "QLoRA": (with_qlora, (5e-4, 2e-3)),
}
sweep = {}
best_rate = {}
for name, (make, rates) in trials.items():
    sweep[name] = [(rate, short_run(make(), rate)) for rate in rates]
    best_rate[name], _ = min(sweep[name], key=lambda point: point[1])
    words = "  ".join(f"{rate:.0e}: {loss:.3f}" for rate, loss in sweep[name])
    print(f"{name:<18}{words}")
times = best_rate["LoRA"] / best_rate["full fine-tuning"]
print(f"the guess: LoRA's best rate is {times:.0f} times that of full fine-tuning")

# %%
from recipes_lib.report.lines import lines

of_all, of_lora = best_rate["full fine-tuning"], best_rate["LoRA"]
lines(
    sweep,
    title=f"Best after {sizes.short} steps: {of_all:.0e} for all, {of_lora:.0e} for LoRA",
    xlabel="learning rate",
    ylabel="held-out loss, nats per token",
    xscale="log",
    yscale="log",
    source=f"one run each, {len(choosing)} held-out sentences",
)

# %% [markdown]
# **The line you will write tomorrow:** `LoraConfig(target_modules="all-linear")` and a rate that you have looked for. Our grid has decades, so it can only find factors of 1, 10 or 100; and a best rate at the edge of its grid, as QLoRA's may be, is no optimum: look further. **When not:** a rate is best for a length and a batch. That of a short run is a guess for a long one: with time to spare, look again at a third of the length.
#
# ## 6. The run: does the model learn the task?
#
# **What happens.** All three ways take the same rows in the same order, each at its own best rate of the short runs. Then each is examined. A model that learns a task can forget what it knew, so one thing more is asked: how well does it still predict other text, the source code of Python?
#
# **Guess first.** Which of the three ends best, and by more than chance?

# %%
from recipes_lib.fine_tuning.qlora import check_gradient_flow

curves = {}
after = {}
adapted = {}
for name, (make, _) in trials.items():
    model = make()
    curves[name] = list(train(model, batches, best_rate[name], answer_loss))
    after[name] = examine(model)
    forgotten[name] = predicts_other_text(model)
    print(f"{name}, rate {best_rate[name]:.0e}: {share_in_words(after[name].right)}")
    print(f"    loss {after[name].losses}")
    if name != "full fine-tuning":
        adapted[name] = model
del model
with in_half():
    check_gradient_flow(adapted["QLoRA"], batches[0])
print("QLoRA: after the examination, too, the first block gets its gradients")
words = ", ".join(f"{name} {found:.2f}" for name, found in forgotten.items())
print(f"perplexity of other text, lower is better: {words}")

# %%
part = max(1, sizes.steps // 12)  # a point is the mean of so many steps


def in_parts(losses):
    ends = range(part, len(losses) + 1, part)
    return [(end, sum(losses[end - part : end]) / part) for end in ends]


lines(
    {name: in_parts(losses) for name, losses in curves.items()},
    title="The loss of each sentence, just before it is trained on",
    xlabel="optimizer step",
    ylabel="loss, nats per token",
    yscale="log",
    source=f"one seed; each sentence is met once; a point is the mean of {part} steps",
)

# %%
from recipes_lib.report.figure import new_figure
from recipes_lib.report.style import INK, RECIPE

shares = {"before training": before.right, "three examples": prompted}
shares |= {name: found.right for name, found in after.items()}
count = len(wanted)
result = f"{after['LoRA'].right.sum():.0f} of {count} after {sizes.steps} steps of LoRA"
figure, axes = new_figure(
    f"Right answers: {before.right.sum():.0f} of {count} before, {result}",
    height=2.6,
    source="one seed; lines are 95 % intervals over the sentences",
)
for place, right in enumerate(shares.values()):
    low, high = wilson(right.sum().item(), count)
    axes.plot([100 * low, 100 * high], [place, place], color=INK)
    axes.plot(100 * right.mean().item(), place, "o", color=RECIPE)
axes.set_yticks(range(len(shares)), list(shares))
axes.invert_yaxis()
axes.margins(y=0.2)
axes.set(xlabel="held-out answers that are right, % · better →")
figure

# %% [markdown]
# Two sentences, before and after LoRA, and then three of QLoRA's errors. Read them as data: is it the form that is wrong, or one part of the answer?

# %%
for number in range(2):
    print(questions[number]["prompt"])
    print(f"  before: {before.answers[number][:70]!r}")
    print(f"  after:  {after['LoRA'].answers[number]}")
wrong = (after["QLoRA"].right == 0).nonzero().flatten().tolist()
print(f"\nQLoRA has {len(wrong)} wrong answers; the first three:")
for number in wrong[:3]:
    print(f"  {questions[number]['prompt']}\n    {after['QLoRA'].answers[number]}")

# %% [markdown]
# The guess, sentence by sentence. Below zero, the second of the two has the lower loss.

# %%
looks = {"full → LoRA": ("full fine-tuning", "LoRA"), "LoRA → QLoRA": ("LoRA", "QLoRA")}
paired = {}
ones = torch.ones(count)
for look, (first, second) in looks.items():
    paired[look] = compare(after[first].losses, after[second].losses)
    low, high = plain_paired_bootstrap(after[first].right, after[second].right, ones)
    points = (after[second].right - after[first].right).mean()
    print(f"{look}: {paired[look]}")
    print(f"    right answers {points:+.0%} (95 % interval {low:+.0%} to {high:+.0%})")
most = max(after, key=lambda name: after[name].right.sum())
print(f"\nmost right answers: {most}")
price = paired["LoRA → QLoRA"].difference
print(
    f"four bits cost {rounded.difference:+.3f} nats per token before, {price:+.3f} after"
)

# %% [markdown]
# In our run the form, the day and the task are right in all five, and the time is wrong: often its half of the day. Such errors ask for more pairs of that kind, not for more steps.
#
# **Read it so.** Full fine-tuning wins here, by more than other sentences of this program would explain. *LoRA Without Regret* finds no such gap on small data; not tried here are another seed, a rate chosen in longer runs, and more rows in a step. So this is no general price of LoRA. But on a small model with memory to spare, try all weights. Loss and score disagree in size: most tokens are form, and one wrong digit makes an answer wrong. Choose by the score where you can.
#
# Forgetting is the other price. By the perplexity of Python's code, LoRA did not protect what the model knew, and QLoRA lost most, its rounding included. If your model must keep other skills, hold out text of them, too.
#
# What if QLoRA is *worse*? Its rate is its own, and its gradients were seen above. What is left is its rate, of which two were tried, the rounding, or chance. These weights had been rounded to four bits before, as the setup cell says, and are rounded in other groups once more. So do not read this as the price of four bits: weights that come in 16 bits are rounded once. Recipe 9 puts the same adapter on exact weights, and it does not help.
#
# How many pairs does a task need? We did not measure it. Train on a half and on all: where the held-out loss still falls, more pairs help.

# %% [markdown]
# ## 7. What LoRA leaves untrained, in silence
#
# **What happens.** Qwen3-VL-MoE reads images with a *vision tower*, and each block of its language model has many MLPs, the *experts*. transformers 5 stores the experts of a block in two large tensors, which are no linear layers. Here is a tiny one with random weights.
#
# **Guess first.** `target_modules="all-linear"`, the advice of recipe 5: what does it train here?

# %%
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from recipes_lib.fine_tuning.lora import apply_lora

rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
text = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
text |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
tower = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=4)
tower |= dict(out_hidden_size=64, num_position_embeddings=64)
tower |= dict(deepstack_visual_indexes=[0])
special = dict(image_token_id=120, video_token_id=121)
special |= dict(vision_start_token_id=122, vision_end_token_id=123)
# Of each part, what the names of its parameters have in common.
PARTS = {"vision tower": "visual", "experts": "experts", "attention": "self_attn"}
tiny_vision = Qwen3VLMoeConfig(
    text_config=text | {"rope_parameters": rotary}, vision_config=tower, **special
)


def with_images():
    seed_everything(0)
    return Qwen3VLMoeForConditionalGeneration(tiny_vision).to(here.device)


def count_trained(model):
    """The numbers that train in each part, printed beside those that are frozen."""
    trained = {}
    for part, mark in PARTS.items():
        weights = [weight for name, weight in model.named_parameters() if mark in name]
        trained[part] = sum(each.numel() for each in weights if each.requires_grad)
        frozen = sum(each.numel() for each in weights) - trained[part]
        print(f"  {part:<13}{trained[part]:>7,} train, {frozen:>7,} are frozen")
    return trained


print("peft, all-linear:")
careless = LoraConfig(r=4, target_modules="all-linear")
silent = count_trained(get_peft_model(with_images(), careless))
real = 48 * 128 * 3 * 2048 * 768  # blocks, experts, matrices of each, their two sides
print(f"experts of Qwen3-VL-30B-A3B, by its config: {real / 1e9:.0f} billion weights")
try:
    apply_lora(with_images(), rank=4)
except ValueError as reason:
    print(f"\nours: {reason}")

# %% [markdown]
# No word of warning. The vision tower has adapters, and the experts have none; in the real model they hold nearly all of the weights. Say what you mean. Attention of the language model alone, or with the experts by `target_parameters`:

# %%
attention = r".*language_model.*(q_proj|k_proj|v_proj|o_proj)"
both = LoraConfig(
    r=4,
    target_modules=attention,
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)
print("peft, with target_parameters:")
vision = get_peft_model(with_images(), both)
meant = count_trained(vision)

ids = torch.tensor([[1, 2, 122, *[120] * 4, 123, 5, 6, 7, 8]], device=here.device)
image = dict(
    pixel_values=torch.randn(16, 96, device=here.device),  # 4 × 4 patches of 96 numbers
    image_grid_thw=torch.tensor([[1, 4, 4]], device=here.device),
    mm_token_type_ids=(ids == 120).long(),
)
labels = ids.clone()
labels[ids >= 120] = IGNORED  # no token of the image is an answer
pictured = dict(input_ids=ids, labels=labels, **image)
losses = list(train(vision, [pictured] * 4, 1e-2))
print(f"four steps on an image and text: loss {losses[0]:.2f} → {losses[-1]:.2f}")
del vision

# %% [markdown]
# The loop is the same; an image is four tokens and three tensors more, which the processor of a real model makes. bitsandbytes does not round experts of this form to four bits either. **When not:** adapt the vision tower only if your images look unlike those of the pretraining.
#
# ## 8. Packing: no padding
#
# **What happens.** A short row is padded to the longest of its batch, and padding is computed. Packing puts several documents into one row. Positions restart at each, and from them attention learns the borders.
#
# ```text
# padded   a a a a      packed     a a a a b b b c
#          b b b .      position   0 1 2 3 0 1 2 0      0: a new document begins
#          c . . .
# ```
#
# Reminders have nearly one length, so the data here are functions of Python's standard library with their docstrings.
#
# **Guess first.** What happens to the loss if the positions are forgotten?

# %%
from recipes_lib.training.sequence_packing import (
    check_document_mask,
    collate_packed,
    document_mask,
    fill_rows,
    pack_sequences,
)

show(document_mask, fill_rows)
documents = list(load_instructions(tokenizer, max_tokens=192, limit=16))
lengths = [len(row["labels"]) for row in documents]
first = pack_sequences(documents[:3], length=3 * 192)
packed = collate_packed(first, device=here.device, **padding)

model = base().eval()
check_document_mask(model, packed)  # refuses a model that ignores the positions
alone = held_out_losses(model, documents[:3], **padding)
leaky = {name: packed[name] for name in ("input_ids", "labels")}
with torch.no_grad():
    together = completion_only_loss(model, packed).item() / alone.targets.sum()
    leaking = completion_only_loss(model, leaky).item() / alone.targets.sum()
print(f"each document alone       {alone.mean:.4f}")
print(f"packed                    {together:.4f}")
print(f"packed without positions  {leaking:.4f}")

# %% [markdown]
# Without positions the loss looks *better*: a later document reads the earlier ones, as none does in use. With positions, the loss is that of each document alone. So packing adds no quality; it saves time. How much? Sixteen documents, four rows at a time:

# %%
from recipes_lib.core.measure import in_turns

in_fours = {
    "padded": documents,
    "sorted by length": sorted(documents, key=lambda row: len(row["labels"])),
    "packed": pack_sequences(documents, length=256),
}
del decoder_blocks(model)[10:]  # to be quick: what counts is the ratio
model = with_adapters(model).train()
work = {}
for name, rows in in_fours.items():
    make_batch = collate_packed if name == "packed" else collate
    work[name] = [
        make_batch(rows[start : start + 4], device=here.device, **padding)
        for start in range(0, len(rows), 4)
    ]


def forward_and_backward(model, name):
    for batch in work[name]:
        with in_half():
            loss = answer_loss(model, batch)
        scaler.scale(loss).backward()


turns = {name: partial(forward_and_backward, model, name) for name in work}
seconds = in_turns(turns, rounds=1 + sizes.rounds)
useful = {}
for name, times in seconds.items():
    speeds = sorted(sum(lengths) / each for each in times[1:])  # the first one warms up
    useful[name] = speeds[-1]
    computed = sum(batch["input_ids"].numel() for batch in work[name])
    print(
        f"{name:<17}{useful[name]:6,.0f} useful tokens/s (slowest {speeds[0]:,.0f}), "
        f"{1 - sum(lengths) / computed:.0%} padding, {len(work[name])} batches, "
        f"{useful[name] / useful['padded']:.2f}× padded"
    )
del model, turns

# %% [markdown]
# **The line you will write tomorrow:** `SFTConfig(packing=True)`, on a GPU with flash-attn, whose kernels skip what the mask hides. Other attention computes the masked part and throws it away. **When not:** rows of one length; models without attention that reads positions, such as Mamba's (`check_document_mask` refuses them). Sorting gains a part of it, and its steps are no longer random samples. What packing adds to sorting here is fewer batches, each with a fixed cost: expect less where a batch already fills the processor. A packed batch holds more pairs, so an epoch has fewer steps: look for the learning rate again.
#
# ## 9. Save, merge, deploy
#
# **What happens.** An adapter belongs to one base. `PeftModel.from_pretrained` only compares shapes, so it takes any base of the same shape. `save_adapter` keeps a fingerprint of the base beside peft's files, and `load_adapter` refuses any other model. A merge adds B A to W, so that nothing of LoRA is left to slow an answer.
#
# First the adapter as its user meets it: from its folder, by peft alone, with two new sentences. No training sentence has the form of the second one.

# %%
from peft import PeftModel

from recipes_lib.fine_tuning.adapter_files import (
    base_fingerprint,
    load_adapter,
    save_adapter,
)

fingerprint = base_fingerprint(base(half))
for name, model in adapted.items():
    size = save_adapter(model, folder / name, base=fingerprint)
print(f"an adapter file has {size / 2**20:.0f} MiB\n")

served = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=half)
served = PeftModel.from_pretrained(served, folder / "LoRA").to(here.device)
new = [
    "Remind me to call the dentist on Friday at 6:40 pm.",
    "Could you wake me on Sunday at 7:05 am?",
]
for question, answer in zip(new, write(served, new)):
    print(question, answer, sep="\n  ")
del model, served

# %% [markdown]
# **Guess first.** QLoRA learned beside weights in four bits. Is its adapter better on those, or on the base that they were made from?

# %%
from recipes_lib.fine_tuning.lora import merge_lora
from recipes_lib.fine_tuning.qlora import merge_qlora

on_16_bits = load_adapter(base(half), folder / "QLoRA")
deployed = {
    "QLoRA's adapter on the 16-bit base": (on_16_bits, "QLoRA"),
    "LoRA, merged": (merge_lora(adapted["LoRA"]), "LoRA"),
    "QLoRA, merged": (merge_qlora(adapted["QLoRA"]), "QLoRA"),
}
merged = {}
for name, (model, judged) in deployed.items():
    merged[name] = compare(after[judged].losses, losses_of(model, held_out))
    print(f"{name}, against {judged}:\n    {merged[name]}")
del model, deployed, on_16_bits, adapted

# %% [markdown]
# The guess: where the interval holds zero, neither. Not shown to differ is not shown to be equal, so run `examine` on what you deploy.
#
# | your case | deploy |
# |---|---|
# | LoRA, one task | the merged model: `model.merge_and_unload()`, which `merge_lora` calls |
# | LoRA, many tasks on one base | `vllm serve BASE --enable-lora --lora-modules mine=FOLDER` |
# | QLoRA, 16-bit weights fit when serving | the merged model, or the 16-bit base where it is *better* |
# | QLoRA, only four bits fit | the four-bit base with the adapter beside it |
# | llama.cpp, Ollama | the merged model, saved, then `python convert_hf_to_gguf.py FOLDER` of llama.cpp |
#
# `merge_qlora` unpacks the base first. peft's own merge into four-bit weights rounds the sum to four bits once more.
#
# ## 10. The same in TRL, and as a command
#
# Four steps of TRL and of our loop, on the same rows, with the same schedule:

# %%
from datasets import Dataset, disable_progress_bars
from trl import SFTConfig, SFTTrainer

disable_progress_bars()
few = train_rows[: 4 * sizes.rows]  # with our tokens and labels
settings = SFTConfig(
    output_dir=str(folder / "trl"),
    max_steps=4,
    per_device_train_batch_size=sizes.rows,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    loss_type="nll",  # the default: in tiles, for labels only
    bf16=half is torch.bfloat16,
    fp16=half is torch.float16,
    gradient_checkpointing=False,  # TRL's default is True
    train_sampling_strategy="sequential",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=here.device == "cpu",
)
trainer = SFTTrainer(
    model=with_lora(),  # or a base, and peft_config=LoraConfig(…)
    args=settings,
    train_dataset=Dataset.from_list(few),
    processing_class=tokenizer,
)
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
del trainer

ours = list(train(with_lora(), batches[:4], 1e-3, answer_loss))
print("TRL ", *(f"{loss:.3f}" for loss in theirs))
print("ours", *(f"{loss:.3f}" for loss in ours))
apart = max(abs(a - b) for a, b in zip(theirs, ours))
print(f"they are {apart:.3f} apart at most")

# %% [markdown]
# The Trainer has what our loop has not: evaluation while training, callbacks, several GPUs. For a run of yours give it `prompt` and `completion` as lists of messages (plain strings get no chat template), a base and `peft_config`, `eval_dataset` with `eval_strategy="steps"`, `max_length`, and `num_train_epochs` for `max_steps`.
#
# Without code there is a command. It checks a file of pairs, holds out every tenth, and says at its end whether their loss has fallen. Here the process is killed two steps after a checkpoint, as by the out-of-memory killer, and a second one goes on.

# %%
import json

from recipes_lib.workflows.finetune import command

file = folder / "pairs.jsonl"
file.write_text("\n".join(json.dumps(pair) for pair in reminder_pairs(limit=300)))
options = [
    f"--model={folder / 'base'}",
    f"--data={file}",
    f"--output={folder / 'run'}",
    "--steps=6",
    "--save-steps=3",
    "--rows-per-step=2",
    "--dropout=0.1",  # random numbers, which a resumed run must repeat
]
print("python -m recipes_lib finetune", *options, "\n")
killed = command.run_command(*options, kill_at=4)
resumed = command.run_command(*options, "--resume")
print(f"killed   {killed}")
print(f"resumed  {dict(list(resumed.items())[:4])} …")
verdict = (folder / "run" / "adapter" / "README.md").read_text()
print(*[line for line in verdict.splitlines() if "difference" in line], sep="\n")

# %% [markdown]
# Both processes took steps 3 and 4, with the same losses in every digit: weights, states, schedule, place in the data and random state come back. In the Trainer the line is `trainer.train(resume_from_checkpoint=True)`. All options of the command: [docs/finetune.md](../docs/finetune.md).
#
# ## A trap: all weights in bf16
#
# `from_pretrained` of transformers 5 loads a model as its file is, most often in bf16. Who then trains all of its weights has no fp32 numbers anywhere. The next bf16 number after 1 is 0.8 % away; rounding to the nearest loses an update of less than half of that.
#
# **Guess first.** At 2e-5, the default of TRL: which share of the weights of two blocks has changed after three steps?

# %%
from recipes_lib.precision.pure_bf16 import bf16_adamw


def share_that_changed(dtype, make):
    model = base(dtype).requires_grad_(False)
    trained = list(decoder_blocks(model)[-2:].requires_grad_(True).parameters())
    old = [weight.detach().clone() for weight in trained]
    optimizer = make(trained, lr=2e-5)
    for batch in batches[:3]:
        take_step(model, batch, optimizer, answer_loss)
    moved = sum((a != b).sum().item() for a, b in zip(old, trained))
    return moved / sum(weight.numel() for weight in trained)


in_fp32 = partial(torch.optim.AdamW, fused=True)
changed = {
    "weights in fp32": share_that_changed(torch.float32, in_fp32),
    "weights in bf16": share_that_changed(torch.bfloat16, in_fp32),
    "bf16, rounded at random": share_that_changed(
        torch.bfloat16, partial(bf16_adamw, rounding="stochastic")
    ),
}
for name, share in changed.items():
    print(f"{name:<24}{share:.0%} of the weights changed")

# %% [markdown]
# These lines count the weights that three steps at a usual rate move, not quality: a larger rate loses fewer. Rounding at random moves few weights, each by more, and is right on average. So load in fp32 and use autocast, as the first row of the ladder does, or round at random: torchao's `AdamW8bit(bf16_stochastic_round=True)`. Adapters are not concerned: peft keeps them in fp32.
#
# ## When to use what, and what is not here
#
# **Which way?** If 16 bytes per weight are there, 12 that stay and 4 for the gradient, try all weights: here they won. Else LoRA on all linear layers, at a rate from a sweep, with logits of the answers only. QLoRA where the 16-bit weights do not fit; its price on your weights is the line *LoRA → QLoRA*, run on them. Packing where lengths are unequal.
#
# | recipe | why it has no section | where it helps |
# |---|---|---|
# | 8-bit states, checkpointing, accumulation | few states, short rows | all weights, long rows: notebooks [01](../notebooks/01_large_models_limited_hardware.ipynb) and [04](../notebooks/04_training_long_sequences.ipynb) |
# | DoRA, rsLoRA | other forms of the same correction | compared in PEFT's [method_comparison](https://github.com/huggingface/peft/tree/main/method_comparison) |
#
# ## Your own data
#
# A file has one pair in each line. What is too long is left out and never cut, for a cut answer teaches to stop anywhere. Hold out by *source*, such as a customer or a document: rows of one source are alike. Look at what is learned before you train:

# %%
lines_of_mine = [
    {"prompt": "Ticket: the app is slow.", "completion": "performance"},
    {"prompt": "Ticket: I cannot log in.", "completion": "account"},
]
mine_file = folder / "mine.jsonl"
mine_file.write_text("\n".join(json.dumps(pair) for pair in lines_of_mine))
mine_pairs = list(load_pairs(dataset=str(mine_file)))
mine_rows = list(load_instructions(tokenizer, dataset=mine_pairs, max_tokens=512))
check_labels(mine_rows, tokenizer)
print(f"{len(mine_pairs)} pairs, {len(mine_pairs) - len(mine_rows)} are too long")
for row in mine_rows:
    learned_ids = [label for label in row["labels"] if label != IGNORED]
    print("learned:", repr(tokenizer.decode(learned_ids)))

# %% [markdown]
# ## Take this home
#
# These lines use functions from above; the file that stands alone is [scripts/finetune.py](../scripts/finetune.py). *Better* after a few steps is mostly the form of the answer: count right answers before you ship.

# %%
name = folder / "base"  # or a hub id: "HuggingFaceTB/SmolLM2-135M-Instruct"
mine = AutoModelForCausalLM.from_pretrained(name, dtype=half).to(here.device)
config = LoraConfig(r=16, lora_alpha=32, **on_all)
mine = get_peft_model(mine, config)
rows = train_rows[:16]  # or mine_rows, some hundreds of them
parts = [batch_of(rows[start : start + 4]) for start in range(0, len(rows), 4)]
first = losses_of(mine, held_out)
for loss in train(mine, parts, best_rate["LoRA"], answer_loss):
    print(f"loss {loss:.3f}")
print(compare(first, losses_of(mine, held_out)))
mine.save_pretrained(folder / "mine")  # recipe 9 loads such a folder, and asks
del mine

# %% [markdown]
# The whole of it as one file, with dtype and device of your card, packed rows, checkpoints and the score: [scripts/finetune.py](../scripts/finetune.py). Its first lines say which number it reaches. The switches of the libraries stand side by side in the [cheatsheet](../CHEATSHEET.md).
#
# ## Exercises
#
# 1. How many held-out sentences would show a difference of 0.01 nats between full fine-tuning and LoRA?
# 2. How many bytes stay between two steps for a model of 7 billion weights: with all weights, with LoRA of 40 million numbers, with QLoRA?
# 3. Let the model learn the questions, too (`labels` = `input_ids`). Are fewer answers right?
#
# <details><summary>Solutions</summary>
#
# 1. `rows_needed(after["LoRA"].losses - after["full fine-tuning"].losses, difference=0.01)` of honest_evaluation.py; the last cell prints it. Take at least thirty: with fewer the interval itself is too narrow.
# 2. By the equation, in 10⁹ bytes: 12 · 7 = 84; 2 · 7 + 12 · 0.04 = 14.5; 0.52 · 7 + 12 · 0.04 = 4.1, and more for the embedding, which stays in 16 bits.
# 3. `check_labels` refuses such rows. Train on them without the check, then call `examine` and `compare`: the interval decides.
#
# </details>
#
# ## References
#
# - Hu et al., *LoRA*, [2106.09685](https://arxiv.org/abs/2106.09685); Dettmers et al., *QLoRA*, [2305.14314](https://arxiv.org/abs/2305.14314)
# - Schulman et al., [*LoRA Without Regret*](https://thinkingmachines.ai/blog/lora/), 2025
# - Miller, *Adding Error Bars to Evals*, [2411.00640](https://arxiv.org/abs/2411.00640); Wilson, *Probable Inference*, 1927
# - Shi et al., *Instruction Tuning With Loss Over Instructions*, [2405.14394](https://arxiv.org/abs/2405.14394)
# - Krell et al., *Efficient Sequence Packing without Cross-contamination*, [2107.02027](https://arxiv.org/abs/2107.02027)
#
# The last cell checks the claims above on this machine: orderings, and what has to be equal.

# %%
from recipes_lib.core.measure.machine import fast
from recipes_lib.fine_tuning.honest_evaluation import rows_needed

difference = after["LoRA"].losses - after["full fine-tuning"].losses
print(f"exercise 1: {rows_needed(difference, difference=0.01)} sentences")
exact = all(killed[step] == resumed[step] for step in killed.keys() & resumed.keys())
gain = compare(before.losses, after["LoRA"].losses)
learned = dict(
    steps=sizes.steps,
    held_out=sizes.held_out,
    few_shot=int(prompted.sum()),
    right_before=int(before.right.sum()),
    right={name: int(found.right.sum()) for name, found in after.items()},
    before=before.losses.mean,
    losses={name: found.losses.mean for name, found in after.items()},
)
ladder.note(
    targets=targets,
    learned=learned,
    verdict=vars(gain),
    paired={look: vars(change) for look, change in paired.items()},
    best_rate=best_rate,
    forgotten=forgotten,
    useful=useful,
    moved=changed,
    exact=exact,
    silent=silent,
    merged={name: vars(change) for name, change in merged.items()},
    trl={"difference": apart},
)
assert all(abs(row.prediction_error) < 0.005 for row in ladder.rows), "predicted"
assert abs(together / alone.mean - 1) < 1e-4, "packing is exact"
assert apart < 0.05, "the same training in TRL"
# A GPU adds in another order from run to run.
assert exact or here.device == "cuda", "the resumed run is the one that was killed"
assert {3, 4} <= killed.keys() & resumed.keys(), "steps that both have taken"
assert silent["experts"] == 0 < silent["vision tower"], "what all-linear trains"
assert meant["vision tower"] == 0 < meant["experts"], "what was meant"
if not fast():  # random weights learn nothing in so few steps
    peaks = [row.peak_bytes for row in ladder.rows]
    assert peaks == sorted(peaks, reverse=True), "each recipe takes less memory"
    assert leaking < alone.mean, "the leak looks better"
    assert changed["weights in bf16"] < changed["weights in fp32"]
    assert all(found.right.sum() > before.right.sum() for found in after.values())
    assert gain.high < 0, "better, beyond chance"
print("all checks passed")
