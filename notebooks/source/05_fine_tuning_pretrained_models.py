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
# > **0 → 43 of 48 answers right with full fine-tuning, 31 with LoRA, 30 with QLoRA, and 45 with LoRA at 5 times the rate and twice the pairs per step**, to the letter, on sentences that the model has never seen: 120 steps of one seed. The last is a run of about twice the compute; full fine-tuning was tried with neither. A prompt with three examples gets 1. LoRA's held-out loss falls from 2.34 to 0.06 nats per token (-2.27, 95 % interval -2.34 to -2.21). A step of QLoRA with logits of the answers only takes **80% less memory** than one of full fine-tuning, which multiplies in the same precision and stores its weights in 32 bits, and 0.90× (0.87–1.00) its time: no gain that so few turns can show. Each row was predicted before it ran, by the same count on tensors without data: off by less than 0.1%.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-26.
# <!-- end -->
#
# Thirty of the 48 need no more than copying: recipe 5 shows what that says about 31 and 30.
#
# A pretrained model knows a language, and not your task. This notebook teaches a small model to turn a sentence into a reminder that a program can read, as JSON. It trains in three ways, with one loop. *Full fine-tuning* changes all weights. *LoRA* freezes them and trains small matrices beside them, the *adapters*. *QLoRA* also stores the frozen weights in four bits. How much memory and time does each take, and how many answers are right on new sentences?
#
# | | |
# |---|---|
# | **You will learn** | to choose what trains, at which rate, in how many bits; to prove that the model got better; to ship what you have proven |
# | **You need** | Python, the basics of PyTorch; no GPU, no login |
# | **Time to run** | about eleven minutes on two CPU cores |
# | **Time to read** | half an hour |
# | **Hardware that has run this** | two CPU cores; no GPU yet |

# %% [markdown]
# ## Setup
#
# Where the package is missing, as on Colab, this cell fetches it.

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
# For a model of your own write its hub id or its folder in the place of `smollm2`.

# %%
cpu = dict(
    model="smollm2",
    rows=2,  # sentences in a step
    compared=4,  # sentences in the step whose bytes and time are compared
    steps=120,  # of the long runs
    script_steps=10,  # of the script with TRL
    held_out=48,  # sentences that judge, and are never trained on
    rounds=3,  # of timing
)
more = dict(rows=16, compared=16, steps=300, held_out=200)
# Continuous integration checks that the code runs, on a model with random weights.
tiny = dict(model="tiny-smollm2", steps=4, script_steps=2, held_out=8, rounds=1)

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
# A program makes the task, so an answer is right or wrong. The clock has 288 times of five minutes. A fifth of them stands in held-out sentences only, with four things to do that no training sentence has. So no answer can be remembered whole. But the forms of the sentences are the same.
#
# One part of the held-out sentences is for looking while we work, and another part gives the verdicts. Recipe 5 runs five ways; they are chosen and reported on the same 48 sentences, so the best of five is a little flattered.

# %%
import gc
import os
import shutil

from recipes_lib.core.data import collate, load_instructions
from recipes_lib.core.data.tokens_and_labels import decode_with_mask
from recipes_lib.core.data.reminder_task import reminder_pairs, times_of
from recipes_lib.core.measure.provenance import runs_dir
from recipes_lib.core.model import load_model, load_tokenizer

# Files of this notebook, made anew in each run.
folder = Path(os.path.relpath(runs_dir() / f"notebook-05-{sizes.tier}"))
shutil.rmtree(folder, ignore_errors=True)

tokenizer = load_tokenizer(sizes.model)
padding = {"pad_token_id": tokenizer.pad_token_id}
pairs = reminder_pairs(limit=2 * sizes.rows * sizes.steps)
drawn = reminder_pairs(split="validation", limit=3 * sizes.held_out)
# Each answer once, so that no pair is in both parts.
different = list({pair["completion"]: pair for pair in drawn}.values())
to_watch = different[: sizes.held_out // 2]
questions = different[-sizes.held_out :]
assert len(to_watch) + len(questions) <= len(different)
assert not set(times_of("train")) & set(times_of("validation"))

train_rows = list(load_instructions(tokenizer, dataset=pairs))
watched = list(load_instructions(tokenizer, dataset=to_watch))
held_out = list(load_instructions(tokenizer, dataset=questions))

for pair in pairs[:2] + questions[:2]:
    print(pair["prompt"], pair["completion"], sep="\n  ")
print()
print(decode_with_mask(train_rows[0], tokenizer))

# %% [markdown]
# Between ⟦ and ⟧ is the question. Its labels are -100, which PyTorch's cross-entropy skips: the model learns to write the answer.
#
# ### Labels that are wrong train without an error
#
# The loss falls, too, and the model learns something else. Here is one row with three mistakes, and what `check_labels` says of each:

# %%
from recipes_lib.core.data.tokens_and_labels import IGNORED
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
# **The line you will write tomorrow:** in TRL, rows with `prompt` and `completion`: only the completion is learned, by default. Rows of `messages` need `assistant_only_loss=True` and a chat template with `{% generation %}` marks; TRL adds the marks to templates that it knows, and to no other. In Unsloth it is `train_on_responses_only`. To look without this repository, decode the labels of three rows that are not -100. **When not:** with long questions, short answers and few rows it can help to learn the questions, too (Shi et al.).
#
# ## Baseline: the loop
#
# This is all of the training. A recipe changes what goes in: the model, the batches, the rate or the loss. `autocast` rounds the inputs of the matrix products to 16 bits. The scaler is for fp16 alone, where small gradients would become zero.

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
# A run sees each row once. More turns, *epochs*, are for small data: stop where the held-out loss rises. For gradient accumulation, call backward for several batches before `scaler.step`, and divide each sum of losses by the answers' tokens of all of them ([notebook 01](../notebooks/01_large_models_limited_hardware.ipynb)).

# %%
gc.freeze()  # to count bytes, Python looks at all objects: not at those of the imports


def batch_of(rows):
    return collate(rows, device=here.device, **padding)


def in_batches(rows, size):
    return [batch_of(rows[start : start + size]) for start in range(0, len(rows), size)]


twice_the_pairs = in_batches(train_rows, 2 * sizes.rows)
batches = in_batches(train_rows[: len(train_rows) // 2], sizes.rows)
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
# Here *b* is the size of a frozen weight: 2 in 16 bits, 0.52 in four bits with their scales. *Activations* are what forward keeps for backward, and are measured below. *Logits* are 4 bytes per token and word of the vocabulary, about three times. Both go while the gradients arrive, so the peak has one or the other. A model that shares its embedding with its output holds two more gradients of it for a moment.
#
# A trained weight costs six operations per token: two in forward, two for the gradient of its input, two for its own. A frozen one costs four.
#
# $$\text{operations} = (4 \cdot \text{frozen} + 6 \cdot \text{trained}) \cdot \text{tokens, with padding}$$
#
# So a step of LoRA should take a little more than 4/6 of the time of full fine-tuning. The first two terms of the bytes stay between two steps:

# %%
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.fine_tuning.lora import lora_parameters

shapes = load_model(sizes.model)
weights = shapes.num_parameters()
in_blocks = sum(weight.numel() for weight in decoder_blocks(shapes).parameters())
in_adapters = lora_parameters(shapes, rank=16)
kept = {
    "full fine-tuning": (4 + 8) * weights,
    "LoRA": 2 * weights + (4 + 8) * in_adapters,
    "QLoRA": 0.52 * in_blocks + 2 * (weights - in_blocks) + (4 + 8) * in_adapters,
}
print(f"{weights:,} weights, {in_blocks:,} of them in blocks; adapters {in_adapters:,}")
for name, size in kept.items():
    print(f"{name:<18}{size / 2**20:7,.0f} MiB stay between two steps")
table_of_logits = 4 * tokens * shapes.config.vocab_size
print(f"one table of logits {table_of_logits / 2**20:6,.0f} MiB")
del shapes

# %% [markdown]
# ## 1. Is it better, or is it luck?
#
# **What happens.** Two numbers judge a model. The *held-out loss* is in nats per token of the answers. The score is the number of answers that are right to the letter. Other sentences would give other numbers, so each has an interval. For the loss we draw as many sentences as we have, with replacement, 2,000 times; the middle 95 % of the means are the interval. For a share of right answers it is Wilson's formula, which holds for 0 % and 100 %, too.
#
# To compare two models, draw the differences on the *same* sentences: what makes a sentence hard for both is then gone.

# %%
from recipes_lib.fine_tuning.honest_evaluation import (
    compare,
    held_out_losses,
    plain_paired_bootstrap,
)
from recipes_lib.report.show import show

show(plain_paired_bootstrap)


def wilson(right, count, z=1.96):
    """The 95 % interval of a share."""
    share = right / count
    middle = share + z * z / (2 * count)
    half_width = z * (share * (1 - share) / count + (z / (2 * count)) ** 2) ** 0.5
    whole = 1 + z * z / count
    return (middle - half_width) / whole, (middle + half_width) / whole


# %% [markdown]
# A model that learns a task can forget what it knew. So an examination also asks how well it predicts other text, the source code of Python, as *perplexity*: e to the loss per token, which says among how many tokens the model hesitates.

# %%
import math
from types import SimpleNamespace

from recipes_lib.core.data.corpus import load_text
from recipes_lib.core.data.evaluation import evaluate, generate_answers, text_windows

wanted = [pair["completion"] for pair in questions]
other_text = text_windows(tokenizer, text=load_text(split="validation"))


def write(model, prompts):
    """An answer for each prompt; recipe 9 shows the call of `generate` by itself."""
    with in_half():
        return generate_answers(model, tokenizer, prompts, batch_size=64)


def losses_of(model, rows):
    with in_half():
        return held_out_losses(model, rows, batch_size=32, **padding)


def perplexity_of(model):
    with in_half():
        return math.exp(evaluate(model, other_text, **padding))


def are_right(answers, wanted):
    """1 for each answer that is right to the letter, else 0."""
    return torch.tensor([a == b for a, b in zip(answers, wanted)]).double()


def examine(model):
    answers = write(model, held_out)
    return SimpleNamespace(
        answers=answers,
        right=are_right(answers, wanted),
        losses=losses_of(model, held_out),
        perplexity=perplexity_of(model),
    )


def share_in_words(right):
    low, high = wilson(right.sum().item(), len(right))
    return f"{right.sum():.0f} of {len(right)} right ({low:.0%} to {high:.0%})"


# %% [markdown]
# A prompt with examples costs no training, and is what fine-tuning has to beat. **Guess first.** How many answers are right before training, if the question stands alone, and if three examples stand before it?

# %%
from recipes_lib.core.data.tokens_and_labels import tokenize_chat

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
prompted = are_right(answers, wanted)
print("after three examples:", share_in_words(prompted))
print(f"one of them: {answers[0]}, wanted: {wanted[0]}")
del model

# %% [markdown]
# For a model this small, examples are a weak opponent: ask a large one before you train it. **When not:** with few sentences, some thirty or fewer, the interval of the loss tends to be too narrow. No interval covers another seed of the training, nor other forms of sentence: hold out a form, too.
#
# ## 2. LoRA: train a small correction
#
# **What happens.** The model is frozen. Beside each linear layer two thin matrices train. Their product is added to what the layer gives.
#
# ```text
# x --+------ W ------+--> y        W  [out, in]  frozen
#     '-- A -- r -- B-'             A  [r, in],  B  [out, r]  train
# ```
#
# *B* begins as zero, so training begins at the pretrained model. The *rank* r is the width of the correction: how much it can learn. *Alpha* scales it by alpha / r. 16 and 32 are usual; who leaves them alone has one thing to look for, the learning rate.

# %%
from peft import LoraConfig, get_peft_model

from recipes_lib.fine_tuning.lora import plain_lora

show(plain_lora)


def adapters():
    linear = dict(target_modules="all-linear", task_type="CAUSAL_LM")
    return LoraConfig(r=16, lora_alpha=32, **linear)


def with_adapters(model):
    return get_peft_model(model, adapters())


def with_lora():
    return with_adapters(base(half))


# A layer of peft beside ours, with a B that is not zero.
adapted = with_lora().float()
adapted.print_trainable_parameters()
layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
a = layer.lora_A["default"].weight
b = torch.nn.init.normal_(layer.lora_B["default"].weight)
x = torch.randn(2, 5, layer.in_features, device=here.device)
by_hand = plain_lora(x, layer.base_layer.weight, a, b, alpha=32)
assert torch.allclose(layer(x), by_hand, atol=1e-3)
print("a layer of peft and the plain lines: equal")
del adapted, layer

# %% [markdown]
# `LoraConfig` and `get_peft_model` are the lines that you will write tomorrow. `apply_lora` of this repository calls both, and refuses layers that an adapter would not reach.
#
# `climb` predicts the bytes of a step from tensors that have a shape and no numbers, then measures a real step, and adds a row to a table, the *ladder*. Both are the bytes of tensors, by the same count. The process takes more: the interpreter, the libraries and what kernels need for a moment are in neither. The rate of these steps is zero, so *loss* is that of the model before training. **Guess first.** By how much does LoRA lower the peak?

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

# %% [markdown]
# The states and the gradients of the frozen weights are gone; weights, activations and logits are left. The loss differs although *B* is zero, because the base is in 16 bits here and in 32 there.
#
# ## 3. QLoRA: the frozen weights in four bits
#
# **What happens.** 64 weights share a scale, and each becomes one of 16 levels. A layer unpacks its weights when it is called, and multiplies in 16 bits, as LoRA does here.

# %%
from recipes_lib.fine_tuning.adapter_files import save_merged
from recipes_lib.fine_tuning.qlora import plain_nf4

show(plain_nf4)
# A folder, as a model of the hub would be.
save_merged(base(half), folder / "base", tokenizer=tokenizer, dtype=half)

# %% [markdown]
# **The lines you will write tomorrow:**

# %%
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

in_four_bits = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",  # the default, fp4, has other levels
    bnb_4bit_use_double_quant=True,  # the scales are rounded, too
    bnb_4bit_compute_dtype=half,
)
theirs = AutoModelForCausalLM.from_pretrained(
    folder / "base", quantization_config=in_four_bits, dtype=half
)
theirs = with_adapters(theirs)

# %% [markdown]
# `prepare_model_for_kbit_training` is not called: it turns on checkpointing, which short rows do not need, and makes the embedding fp32, which doubles its bytes. `apply_qlora` does the same from a model that is already in memory, and closes a trap of CPUs. On those with AVX512-BF16, bitsandbytes repacks the weights at the first forward in eval mode, for a kernel without a gradient. Who examines the model and then trains it gets a warning at most, and adapters that learn nothing:

# %%
from recipes_lib.fine_tuning.qlora import apply_qlora, check_gradient_flow


def with_qlora():
    return apply_qlora(base(half), rank=16, alpha=32, compute_dtype=half)


ours = with_qlora()
some = compared["input_ids"][:1]
assert torch.equal(theirs.train()(some).logits, ours.train()(some).logits)
print("loaded by transformers, and rounded by apply_qlora: the same logits")


def gradients_after_examination(model):
    losses_of(model, watched)
    try:
        with in_half(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of it once, and goes on
            check_gradient_flow(model.train(), compared)
    except RuntimeError as error:
        return str(error)[:76] + " …"
    return "each adapter of the first block gets its gradient"


print("by transformers:", gradients_after_examination(theirs))
print("by apply_qlora: ", gradients_after_examination(ours))
untrained = losses_of(ours, held_out)
forgotten = {
    "before": before.perplexity,
    "in four bits, untrained": perplexity_of(ours),
}
print("before training, four bits cost", compare(before.losses, untrained))
del theirs, ours

climb("QLoRA", with_qlora)

# %% [markdown]
# On a GPU nothing is repacked. **When not:** where the 16-bit weights fit. Recipe 5 prints what is left of the difference after training.
#
# ## 4. Logits of the answers only
#
# **What happens.** Now the logits are large, and most of them belong to tokens without a label. So ask for logits only at the places where some row of the batch has a label. **Guess first.** About a third of the tokens carry loss. How much of the peak goes?

# %%
from torch.nn.functional import cross_entropy


def answer_loss(model, batch):
    """The mean over the answers, from logits at the places that some row learns."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    targets = batch["labels"][:, 1:]  # the token at t predicts the one at t + 1
    places = (targets != IGNORED).any(0).nonzero()[:, 0]
    output = model(**inputs, logits_to_keep=places, use_cache=False)
    logits = output.logits.float().flatten(0, 1)
    return cross_entropy(logits, targets[:, places].flatten())


model = base().eval()
with torch.no_grad():
    few, all_of_them = answer_loss(model, compared), own_loss(model, compared)
assert torch.allclose(few, all_of_them, rtol=1e-4)
print("from some logits and from all: the same loss")
del model
climb("everything combined", with_qlora, loss_of=answer_loss)
saved = 1 - ladder["everything combined"].peak_bytes / ladder["QLoRA"].peak_bytes
print(f"logits of the answers only take {saved:.0%} off QLoRA's peak")

# %% [markdown]
# 18 % and not two thirds, for two reasons. A place is kept if any of the four rows has a label there, and answers begin at different places. And the weights and the activations of the blocks stay. **The line you will write tomorrow:** `SFTConfig(loss_type="nll")` of TRL 1.16, its default. On a GPU it drops the tokens without a label, and takes the rest in tiles. `completion_only_loss` of this repository is `answer_loss` with its refusals.
#
# *Everything combined* is QLoRA with this loss. Now the steps are timed in turns, and each time is that of the fastest turn:

# %%
ladder.take_turns(sizes.rounds)
errors = [abs(row.prediction_error) for row in ladder.rows]
print(f"predictions are off by {max(errors):.2%} at most")
ladder

# %%
ladder.chart()

# %% [markdown]
# LoRA takes 0.87 of the time, and not 4/6. A guess, which nothing here tests: adapters take time of their own, and it weighs less with more rows and on a large model. QLoRA also unpacks all weights in each step. Where a range of times holds 1.00, three turns cannot show a gain.
#
# ## 5. The run: does the model learn the task?
#
# **What happens.** All ways take the same sentences in the same order. *LoRA Without Regret* (Thinking Machines, 2025) found in many long runs: adapters want about ten times the learning rate of full fine-tuning, belong on all linear layers, and need no large rank for little data. Unsloth and many scripts begin at 2e-4. So here every way trains at 2e-4, and LoRA also at 1e-3. A last run of LoRA, at 1e-3, sees twice as many pairs in as many steps. **Guess first.** Which of the five ends best, and by more than chance?

# %%
ways = {
    "full fine-tuning": (base, batches, 2e-4),
    "LoRA": (with_lora, batches, 2e-4),
    "LoRA, larger rate": (with_lora, batches, 1e-3),
    "LoRA, more pairs": (with_lora, twice_the_pairs, 1e-3),
    "QLoRA": (with_qlora, batches, 2e-4),
}
after = {}
adapted = {}
for name, (make, data, rate) in ways.items():
    model = make()
    for _ in train(model, data, rate, answer_loss):
        pass
    after[name] = examine(model)
    forgotten[name] = after[name].perplexity
    print(f"{name}: {share_in_words(after[name].right)}")
    if name in ("LoRA", "QLoRA"):
        adapted[name] = model
del model

# %%
from IPython.display import display

from recipes_lib.report.style import mib

count = len(wanted)


def row_of(name):
    """In the ladder: neither the rate nor the pairs change the compared step."""
    return ladder[name.split(",")[0]]


table = (
    f"| way | rate | pairs | peak | time | right of {count} (interval) "
    "| held-out loss | other text |\n|---|--:|--:|--:|--:|--:|--:|--:|\n"
    f"| three examples | | | | | {prompted.sum():.0f} | | |\n"
)
losses = {"before": before.losses.mean, "in four bits, untrained": untrained.mean}
for name, loss in losses.items():
    table += f"| {name} | | | | | | {loss:.3f} | {forgotten[name]:.1f} |\n"
for name, found in after.items():
    _, data, rate = ways[name]
    seen = sum(len(batch["labels"]) for batch in data)
    low, high = wilson(found.right.sum().item(), count)
    table += (
        f"| {name} | {rate:.0e} | {seen} "
        f"| {mib(row_of(name).peak_bytes)} | {row_of(name).ratio:.2f}× "
        f"| {found.right.sum():.0f} ({count * low:.0f} to {count * high:.0f}) "
        f"| {found.losses.mean:.3f} | {found.perplexity:.1f} |\n"
    )
display({"text/markdown": table, "text/plain": table}, raw=True)

# %% [markdown]
# Peak and time are those of a step with four rows and all logits. The runs take logits of the answers only, and two rows in a step; *more pairs* takes four. So 0.87× holds for equal rows: the run of *more pairs* takes about twice the compute of the other two with LoRA.
#
# Differences on the same sentences say what is more than chance:

# %%
after["before training"] = before
looks = {
    "before training → LoRA": ("before training", "LoRA"),
    "full → LoRA": ("full fine-tuning", "LoRA"),
    "LoRA → larger rate": ("LoRA", "LoRA, larger rate"),
    "larger rate → more pairs": ("LoRA, larger rate", "LoRA, more pairs"),
    "full → LoRA, more pairs": ("full fine-tuning", "LoRA, more pairs"),
    "LoRA → QLoRA": ("LoRA", "QLoRA"),
}
changes = {}
ones = torch.ones(count)
for look, (first, second) in looks.items():
    changes[look] = compare(after[first].losses, after[second].losses)
    low, high = plain_paired_bootstrap(after[first].right, after[second].right, ones)
    points = 100 * (after[second].right - after[first].right).mean()
    print(f"{look}: right {points:+.0f} points ({100 * low:+.0f} to {100 * high:+.0f})")
    print(f"    loss {changes[look]}")
del after["before training"]

# %%
from recipes_lib.report.charts.figure import new_figure
from recipes_lib.report.style import INK, RECIPE

at_left = {"QLoRA": {"ha": "right", "xytext": (-7, 3)}}
at_right = {"ha": "left", "xytext": (7, 3)}
places = {name: row_of(name).peak_bytes / 2**20 for name in after}
full, more_pairs = "full fine-tuning", "LoRA, more pairs"
figure, axes = new_figure(
    f"LoRA on more pairs gets {after[more_pairs].right.sum():.0f} of {count} right, "
    f"full fine-tuning {after[full].right.sum():.0f}: the first takes "
    f"{places[more_pairs] / places[full]:.0%} of the memory",
    height=3.6,
    source="one seed; lines are 95 % intervals over the sentences",
)
for name in (full, more_pairs, "LoRA", "QLoRA"):
    right = after[name].right
    place = places[name] + (40 if name == more_pairs else 0)  # beside LoRA
    low, high = wilson(right.sum().item(), count)
    axes.plot([place, place], [count * low, count * high], color=INK)
    axes.plot(place, right.sum(), "o", color=RECIPE)
    side = at_left.get(name, at_right)
    axes.annotate(name, (place, right.sum()), textcoords="offset points", **side)
axes.margins(x=0.25, y=0.15)
axes.set(xlabel="peak memory of a step, MiB", ylabel=f"right answers of {count}")
figure

# %% [markdown]
# **Read it so.** From 240 pairs at 2e-4 full fine-tuning gets 43 answers right, and LoRA 31. That is one rate, and no other was tried with full fine-tuning. Five times the rate gives LoRA one more answer, which may be chance, and a loss that is better by 0.005, hardly more than chance. With twice the pairs per step as well it gets 45, in a third of the memory and about twice the compute. Full fine-tuning was tried with neither, and 45 against 43 is no difference that 48 sentences can show.
#
# In the figure the dot of *more pairs* stands at 753 MiB, 40 to the right of its 713, so that it is beside LoRA's.
#
# At 1e-3 twice the pairs bring 13 answers; with 240 pairs the larger rate brings one. So look for more pairs first. Whether 2e-4 is enough with them, no run here says: try both rates.
#
# The price is what is forgotten. At the same rate and pairs LoRA forgot less than full fine-tuning, 11.7 against 15.0, and learned less. At 1e-3 it is 14.3. Where it learned as much it forgot more: 17.1. These perplexities have no intervals. So do not count on LoRA to protect what a model knew: if yours must keep other skills, hold out text of them.
#
# QLoRA's score differs from LoRA's by -10 to +6 points, an interval so wide that it shows no equality. Its loss is worse, by 0.0076. The rounding alone takes the other text from 11.0 to 13.9. But these weights had been rounded to four bits before, and are rounded in other groups once more: this is not the price of four bits for a model that comes in 16.
#
# Loss and score disagree in size: most tokens are form, and one wrong digit makes an answer wrong. Choose by the score where you can. All of this is one seed, on a small model; *LoRA Without Regret* finds no gap on small data.

# %% [markdown]
# ### Where it fails
#
# An answer is right only if all of it is. So count the parts, over all held-out answers:

# %%
import json
from collections import defaultdict


def parsed(answer):
    try:
        return dict(json.loads(answer))
    except (ValueError, TypeError):
        return {}


def parts_right(answers):
    """For each part of an answer: in how many it is right, of how many that have it."""
    right = defaultdict(list)
    for answer, text in zip(answers, wanted):
        found, expected = parsed(answer), json.loads(text)
        right["is JSON"].append(bool(found))
        for part in ("day", "do"):
            right[part].append(found.get(part) == expected[part])
        time = "time, am" if expected["time"] < "12" else "time, pm"
        right[time].append(found.get("time") == expected["time"])
    return {part: f"{sum(each)} of {len(each)}" for part, each in right.items()}


for name, found in after.items():
    parts = parts_right(found.answers)
    print(f"{name:<20}", *(f"{part} {right};" for part, right in parts.items()))

print("\nLoRA, the first answer that is right and the first that is not:")
for is_right in (1, 0):
    for number in (after["LoRA"].right == is_right).nonzero().flatten().tolist()[:1]:
        print(f"  {questions[number]['prompt']}")
        print(f"    before {before.answers[number][:60]!r}")
        print(f"    after  {after['LoRA'].answers[number]}")
        print(f"    wanted {wanted[number]}")

# %% [markdown]
# The form is always right, and day and task nearly always. What is wrong is the time. LoRA reads 28 of 34 times in the morning, and 3 of 14 in the afternoon. With twice the pairs these are 34 and 11. Before you believe a score, ask what a rule gets that understands nothing. Most times can be copied: 8:35 am is 08:35. Only from 1 pm on, and at 12 am, the hour changes.

# %%
import re


def digits_of(question):
    """The time as it stands in the sentence: whoever copies it looks at no am or pm."""
    hour, minute = re.search(r"(\d+):(\d+)", question["prompt"]).groups()
    return f"{int(hour):02}:{minute}"


copied = [
    digits_of(question) == json.loads(answer)["time"]
    for question, answer in zip(questions, wanted)
]
print(f"a rule that copies the digits: {sum(copied)} of {len(copied)} right")

# %% [markdown]
# So LoRA and QLoRA, which get 31 and 30 from 240 pairs, are no better than this rule: they learned the form, and hardly the clock. Full fine-tuning, with 43, and LoRA on twice the pairs, with 45, learned it. Put such a rule into the table of any task of yours, and count the rows that it cannot answer.
#
# ## 6. What LoRA leaves untrained, in silence
#
# **What happens.** Qwen3-VL-MoE reads images with a *vision tower*, and each block of its language model has many MLPs, the *experts*. transformers 5 stores the experts of a block in two large tensors, which are no linear layers. On the device "meta" a model has shapes and no numbers, so a large one fits here. **Guess first.** `target_modules="all-linear"`: what does it train?

# %%
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from recipes_lib.fine_tuning.lora import apply_lora

# Of each part, what the names of its parameters have in common.
PARTS = {"vision tower": "visual", "experts": "experts", "attention": "self_attn"}


def with_images():
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig())


def count_trained(config):
    """Prints what trains and what is frozen in each part; returns what trains."""
    model = get_peft_model(with_images(), config)
    trained = dict.fromkeys(PARTS, 0)
    for part, mark in PARTS.items():
        weights = [weight for name, weight in model.named_parameters() if mark in name]
        trained[part] = sum(each.numel() for each in weights if each.requires_grad)
        frozen = sum(each.numel() for each in weights) - trained[part]
        print(f"  {part:<13}{trained[part]:>12,} train {frozen:>15,} are frozen")
    return trained


named = LoraConfig(
    r=16,
    target_modules=r".*language_model.*(q_proj|k_proj|v_proj|o_proj)",
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)
with torch.device("meta"):
    print("peft, all-linear:")
    silent = count_trained(LoraConfig(r=16, target_modules="all-linear"))
    print("peft, by name, with target_parameters:")
    count_trained(named)
    try:
        apply_lora(with_images(), rank=16)
    except ValueError as reason:
        print(f"\nours: {reason}")

# %% [markdown]
# No word of warning from peft: the experts, nearly all of the weights, have no adapters, and the vision tower has. Say what you mean, by name. **When not:** adapt the vision tower only if your images look unlike those of the pretraining.
#
# ## 7. Packing: no padding
#
# **What happens.** A short row is padded to the longest of its batch, and padding is computed. Packing puts several documents into one row. Positions restart at each, and from them attention learns the borders.
#
# ```text
# padded   a a a a      packed     a a a a b b b c
#          b b b .      position   0 1 2 3 0 1 2 0      0: a new document begins
#          c . . .
# ```
#
# Reminders have nearly one length, so the data here are functions of Python with their docstrings. **Guess first.** What happens to the loss if the positions are forgotten?

# %%
from recipes_lib.training.sequence_packing import (
    check_document_mask,
    collate_packed,
    document_mask,
    pack_sequences,
)

show(document_mask)
documents = list(load_instructions(tokenizer, max_tokens=192, limit=16))
lengths = [len(row["labels"]) for row in documents]
first = pack_sequences(documents[:3], length=3 * 192)
packed = collate_packed(first, device=here.device, **padding)

model = base().eval()
check_document_mask(model, packed)  # refuses a model that ignores the positions
alone = held_out_losses(model, documents[:3], **padding)
leaky = {name: packed[name] for name in ("input_ids", "labels")}
with torch.no_grad():
    together = answer_loss(model, packed).item()
    leaking = answer_loss(model, leaky).item()
print(f"each document alone       {alone.mean:.4f}")
print(f"packed                    {together:.4f}")
print(f"packed without positions  {leaking:.4f}")

# %% [markdown]
# Without positions the loss looks *better*: a later document reads the earlier ones, as none does in use. With positions, the loss is that of each document alone. So packing changes no document's loss. How much time does it save? Sixteen documents, four to a batch, against two packed rows to a batch:

# %%
from recipes_lib.core.measure import in_turns

work = {
    "padded": in_batches(documents, 4),
    "sorted by length": in_batches(
        sorted(documents, key=lambda row: len(row["labels"])), 4
    ),
}
rows = pack_sequences(documents, length=256)
work["packed"] = [
    collate_packed(rows[start : start + 2], device=here.device, **padding)
    for start in range(0, len(rows), 2)
]
del decoder_blocks(model)[10:]  # to be quick: what counts is the ratio
model = with_adapters(model).train()


def forward_and_backward(model, name):
    for batch in work[name]:
        with in_half():
            loss = answer_loss(model, batch)
        scaler.scale(loss).backward()


turns = {name: partial(forward_and_backward, model, name) for name in work}
useful = {}
for name, times in in_turns(turns, rounds=1 + sizes.rounds).items():
    useful[name] = sum(lengths) / min(times[1:])  # the first one warms up
    computed = sum(batch["input_ids"].numel() for batch in work[name])
    print(
        f"{name:<17}{useful[name]:6,.0f} useful tokens/s, {useful[name] / useful['padded']:.2f}×, "
        f"{1 - sum(lengths) / computed:.0%} padding, {len(work[name])} batches"
    )
del model, turns

# %% [markdown]
# Sorting by length gets most of the gain, and its steps are no longer random samples. **The line you will write tomorrow:** `SFTConfig(packing=True)`, on a GPU with flash-attn, whose kernels skip what the mask hides. Its default strategy cuts what is longer than `max_length`: leave long rows out before. **When not:** rows of one length; models without attention that reads positions, such as Mamba's (`check_document_mask` refuses them). Here each way takes four batches. Where a packed batch holds more pairs than a padded one, an epoch has fewer steps: then look for the learning rate again.
#
# ## 8. Save, merge, deploy
#
# **What happens.** An adapter belongs to one base, and `PeftModel.from_pretrained` takes any of the same shape. `save_adapter` keeps a fingerprint of the base beside peft's files, and `load_adapter` refuses another. A merge adds B A to W, so that nothing of LoRA is left to slow an answer.
#
# First the adapter as its user meets it: from its folder, by peft alone, with two new sentences, the second in a new form.

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
new = {
    "Remind me to call the dentist on Friday at 6:40 pm.": "18:40",
    "Could you wake me on Sunday at 7:05 am?": "07:05",
}
for (question, time), answer in zip(new.items(), write(served, list(new))):
    verdict = "right" if parsed(answer).get("time") == time else "wrong"
    print(f"{question}\n  {answer}\n  wanted {time}: {verdict}")
del model, served

# %% [markdown]
# A wrong time is valid JSON, so no parser catches it. Before a user meets such a model, train on more pairs, or check the answer against the sentence: where it says *pm*, the hour is 12 or more.
#
# **Guess first.** Is the model still the one that was judged, after a merge, or with QLoRA's adapter on the 16-bit base?

# %%
from recipes_lib.fine_tuning.lora import merge_lora
from recipes_lib.fine_tuning.qlora import merge_qlora

on_16_bits = load_adapter(base(half), folder / "QLoRA")
deployed = {
    "LoRA, merged": (merge_lora(adapted["LoRA"]), "LoRA"),
    "QLoRA's adapter on the 16-bit base": (on_16_bits, "QLoRA"),
    "QLoRA, merged": (merge_qlora(adapted["QLoRA"]), "QLoRA"),
}
merged = {}
for name, (model, judged) in deployed.items():
    merged[name] = compare(after[judged].losses, losses_of(model, held_out))
    right = are_right(write(model, held_out), wanted)
    print(f"{name}: {right.sum():.0f} right, judged {after[judged].right.sum():.0f}")
    print(f"    loss {merged[name]}")
deployed["LoRA, merged"][0].save_pretrained(
    folder / "merged"
)  # plain weights, for any engine
tokenizer.save_pretrained(folder / "merged")
del model, deployed, adapted, on_16_bits

# %% [markdown]
# A merge makes no difference that 48 rows can show: LoRA's 31 right become 32, and QLoRA's 30 stay 30. QLoRA's adapter on the 16-bit base does: it learned beside rounded weights, and 30 right become 19 right. The loss saw it, too, higher by 0.017 (+0.007 to +0.026), but nobody would guess eleven lost answers from that. This base was rounded twice, so with one that comes in 16 bits expect less: test it. Examine what you deploy, by its answers.
#
# | your case | deploy |
# |---|---|
# | LoRA, one task | the merged model: `model.merge_and_unload()`, which `merge_lora` calls |
# | LoRA, many tasks on one base | `vllm serve BASE --enable-lora --lora-modules mine=FOLDER` |
# | QLoRA, 16-bit weights fit when serving | the merged model; the adapter on the 16-bit base only after a test like this one |
# | QLoRA, only four bits fit | the four-bit base with the adapter beside it |
# | llama.cpp, Ollama | `merged` as saved above, then `python convert_hf_to_gguf.py FOLDER` of llama.cpp |
#
# `merge_qlora` unpacks the base first. peft's own merge into four-bit weights rounds the sum to four bits once more.
#
# ## 9. Take this home: a script with TRL
#
# All of it in TRL. `prompt` and `completion` are lists of messages, which get the chat template; plain strings get none. The rate here is 1e-3, because ten steps are few: for a real run begin at 2e-4. And TRL 1.16 turns checkpointing on by default, which computes each block twice: short rows do not need it, and `gradient_checkpointing=False` turns it off.

# %%
from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

disable_progress_bars()
NAME = str(folder / "base")  # or a hub id: "HuggingFaceTB/SmolLM2-135M-Instruct"


def as_messages(pair):
    """A pair in the form of TRL, in which it gets the chat template."""
    return {
        "prompt": [{"role": "user", "content": pair["prompt"]}],
        "completion": [{"role": "assistant", "content": pair["completion"]}],
    }


settings = SFTConfig(
    output_dir=str(folder / "trl"),
    model_init_kwargs={"dtype": str(half).removeprefix("torch.")},  # else fp32
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    warmup_steps=max(1, sizes.script_steps // 10),
    num_train_epochs=1,
    per_device_train_batch_size=sizes.compared,
    gradient_accumulation_steps=1,
    max_length=512,  # what is longer is cut
    bf16=half is torch.bfloat16,
    fp16=half is torch.float16,
    eval_strategy="steps",
    eval_steps=10,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=here.device == "cpu",
    train_sampling_strategy="sequential",  # to compare; leave it out
)
some_pairs = pairs[: sizes.compared * sizes.script_steps]
trainer = SFTTrainer(
    model=NAME,
    args=settings,
    train_dataset=Dataset.from_list([as_messages(pair) for pair in some_pairs]),
    eval_dataset=Dataset.from_list([as_messages(pair) for pair in to_watch]),
    peft_config=adapters(),  # the LoraConfig of recipe 2
    # quantization_config=in_four_bits,  # this line makes it QLoRA, on a GPU
)

# %%
from itertools import islice

from peft import get_peft_model_state_dict, set_peft_model_state_dict

ours = with_lora()  # with the adapters that the trainer begins with, and its rows
set_peft_model_state_dict(ours, get_peft_model_state_dict(trainer.model))
their_batches = in_batches(list(trainer.train_dataset), sizes.compared)
our_losses = list(islice(train(ours, their_batches, 1e-3, answer_loss), 4))
del ours

trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
history = trainer.state.log_history
their_losses = [entry["loss"] for entry in history if "loss" in entry][:4]
apart = max(abs(a - b) for a, b in zip(their_losses, our_losses))
print("TRL      ", *(f"{loss:.3f}" for loss in their_losses))
print("our loop ", *(f"{loss:.3f}" for loss in our_losses))
print(f"they are {apart:.3f} apart at most")
for entry in history:
    if "eval_loss" in entry:
        print(f"step {entry['step']}: held-out loss {entry['eval_loss']:.3f}")

# %% [markdown]
# The same first four losses, to 0.004, and the Trainer has evaluation on the way, checkpoints, callbacks, several GPUs. Then merge, save, and ask, as a user does:

# %%
mine = trainer.model.merge_and_unload()
mine.save_pretrained(folder / "mine")
trainer.processing_class.save_pretrained(folder / "mine")
del trainer, mine

reader = AutoTokenizer.from_pretrained(folder / "mine")
mine = AutoModelForCausalLM.from_pretrained(folder / "mine", dtype=half).to(here.device)
messages = [{"role": "user", "content": questions[0]["prompt"]}]
asked = reader.apply_chat_template(
    messages,
    add_generation_prompt=True,  # the answer begins here
    return_dict=True,
    return_tensors="pt",
).to(here.device)
written = mine.generate(**asked, max_new_tokens=40, do_sample=False)
answer = written[0, asked["input_ids"].shape[1] :]
print(questions[0]["prompt"])
print(reader.decode(answer, skip_special_tokens=True))
del mine

# %% [markdown]
# After ten steps the form is right and the time is not yet. [scripts/finetune.py](../scripts/finetune.py) is one file with our recipes: packed rows, checkpoints and the score. Its first lines say which number it reaches.
#
# Without code there is a command. Here its process is killed between two checkpoints, and a second one goes on.

# %%
from recipes_lib.workflows.finetune import command

file = folder / "pairs.jsonl"
file.write_text("\n".join(json.dumps(pair) for pair in reminder_pairs(limit=60)))
options = [
    f"--model={folder / 'base'}",
    f"--data={file}",
    f"--output={folder / 'run'}",
    "--steps=5",
    "--save-steps=2",
    "--rows-per-step=2",
    "--dropout=0.1",  # random numbers, which a resumed run must repeat
]
print("python -m recipes_lib finetune", *options, "\n")
killed = command.run_command(*options, kill_at=3)
resumed = command.run_command(*options, "--resume")
print(f"killed   {killed}")
print(f"resumed  {resumed}")

# %% [markdown]
# Where both processes took a step, the losses are the same in every digit. In the Trainer the line is `trainer.train(resume_from_checkpoint=True)`. All options of the command: [docs/finetune.md](../docs/finetune.md).
#
# ## Which card?
#
# The same arithmetic for 8 billion parameters and four rows of 2,048 tokens. The rows that train all weights count weights and states in 16 bits, which flatters them: this notebook gave them 32. These peaks are predicted; no card has run them here.

# %%
from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.out_of_memory_doctor import diagnose

eight_billion = model_of_shape("llama-3.1-8b", dtype=torch.bfloat16, device="meta")
for card in ("T4", "RTX 4090"):
    diagnosis = diagnose(model=eight_billion, batch_size=4, seq_len=2048, card=card)
    print(f"{card}, predicted:")
    for remedy in diagnosis.remedies:
        if "micro-batches" not in remedy.name:
            print(f"  {remedy.name:<52}{remedy.outcome}")

# %% [markdown]
# So a free T4 should train an 8B model, by this count, with QLoRA alone: in fp16, with checkpointing and with the loss in chunks, which never holds all logits at once ([01](../notebooks/01_large_models_limited_hardware.ipynb)). A card of 24 GiB should do it by LoRA, too. For your model and card: `python -m recipes_lib doctor --model NAME --dtype bf16 --card T4 --batch-size 4 --seq-len 2048`.
#
# ## Your own data
#
# `load_dataset("json", data_files="pairs.jsonl")` reads a file with one pair in each line. Leave out what is longer than `max_length`: a cut answer teaches to stop anywhere. Hold out by *source*, such as a customer or a document: rows of one source are alike. And look at three rows as tokens, as the cell with ⟦ and ⟧ does.
#
# ## When to use what
#
# If 16 bytes per weight are there, 12 that stay and 4 for the gradient, take full fine-tuning: from 240 pairs at 2e-4 it learned most here, which is one untuned point. Else LoRA on all linear layers, with logits of the answers only. Begin at 2e-4, look for more pairs, and try a larger rate with them: at 1e-3 with twice the pairs per step it got as far here, in about twice the compute. QLoRA where the 16-bit weights do not fit. Packing where lengths are unequal. All weights need fp32 and autocast: in pure bf16 most updates round to nothing ([TRAPS.md](../TRAPS.md)).
#
# Not here: 8-bit states, checkpointing and accumulation, which help with all weights and long rows ([01](../notebooks/01_large_models_limited_hardware.ipynb), [04](../notebooks/04_training_long_sequences.ipynb)); DoRA and rsLoRA, which PEFT's [method_comparison](https://github.com/huggingface/peft/tree/main/method_comparison) compares. All switches stand in the [cheatsheet](../CHEATSHEET.md).
#
# ## Exercises
#
# 1. How many held-out sentences would show a difference of 0.01 nats between full fine-tuning and LoRA?
# 2. How many bytes stay between two steps for a model of 7 billion weights: with all weights, with LoRA of 40 million numbers, with QLoRA?
# 3. How many numbers train at rank 4 and at rank 64, and how many MiB has the adapter's file?
#
# <details><summary>Solutions</summary>
#
# 1. 99, by `rows_needed(after["LoRA"].losses - after["full fine-tuning"].losses, difference=0.01)`.
# 2. By the equation, in 10⁹ bytes: 12 · 7 = 84; 2 · 7 + 12 · 0.04 = 14.5; 0.52 · 7 + 12 · 0.04 = 4.1, and more for the embedding, which stays in 16 bits.
# 3. They grow as the rank does: a quarter and four times of the 4,884,480 at rank 16. With 4 bytes each the files have about 5 and 75 MiB.
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
# The last cell keeps the numbers and checks the claims above on this machine.

# %%
from recipes_lib.core.measure.machine import fast
from recipes_lib.fine_tuning.honest_evaluation import rows_needed

difference = after["LoRA"].losses - after["full fine-tuning"].losses
print(f"exercise 1: {max(30, rows_needed(difference, difference=0.01))} sentences")
exact = all(killed[step] == resumed[step] for step in killed.keys() & resumed.keys())
ladder.note(
    targets=targets,
    learned=dict(
        steps=sizes.steps,
        held_out=sizes.held_out,
        few_shot=int(prompted.sum()),
        right_before=int(before.right.sum()),
        right={name: int(found.right.sum()) for name, found in after.items()},
        before=before.losses.mean,
        losses={name: found.losses.mean for name, found in after.items()},
    ),
    verdict=vars(changes["before training → LoRA"]),
    learning_rates={name: rate for name, (_, _, rate) in ways.items()},
    forgotten=forgotten,
    useful=useful,
    exact=exact,
    silent=silent,
    merged={name: vars(change) for name, change in merged.items()},
    trl={"difference": apart},
)
assert max(errors) < 0.005, "predicted"
assert abs(together / alone.mean - 1) < 1e-4, "packing is exact"
assert apart < 0.05, "the same training in TRL"
assert exact or here.device == "cuda", "the resumed run is the one that was killed"
assert silent["experts"] == 0 < silent["vision tower"], "what all-linear trains"
if not fast():  # random weights learn nothing in so few steps
    peaks = [row.peak_bytes for row in ladder.rows]
    assert peaks == sorted(peaks, reverse=True), "each recipe takes less memory"
    assert leaking < alone.mean, "the leak looks better"
    assert all(found.right.sum() > before.right.sum() for found in after.values())
print("all checks passed")
