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
# > **0 → 64 of 64 answers right with full fine-tuning, 56 with LoRA and 44 with QLoRA**, to the letter, on new sentences: 120 steps on the same 480 pairs, one seed. A rule that copies the time as it stands gets 32, and a prompt with four examples 1.
# >
# > | way | rate | right, of 64 | of the 32 that the rule gets wrong | perplexity of Python source code | peak of a step, MiB | time of a step |
# > |---|--:|--:|--:|--:|--:|--:|
# > | full fine-tuning | 1e-04 | 64 | 32 | × 1.35 | 2,269 | 1.00× (1.00–1.04) |
# > | LoRA | 1e-03 | 56 | 26 | × 13.45 | 600 | 0.78× (0.75–0.79) |
# > | LoRA, small rate | 1e-04 | 24 | 4 | × 1.05 | 600 | 0.78× (0.75–0.79) |
# > | QLoRA | 1e-03 | 44 | 18 | × 18.69 | 450 | 0.88× (0.88–0.93) |
# >
# > **The rate decides what is forgotten:** at 1e-04 LoRA changes the source code's perplexity less than full fine-tuning does, and learns 24 of 64. LoRA takes 74% less peak memory than full fine-tuning, which multiplies in the same precision and stores its weights in 32 bits; QLoRA with logits of the answers only takes 83% less, in 0.93× (0.89–0.93) the time.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-26.
# <!-- end -->
#
# A pretrained model knows a language, and not your task. This notebook teaches a small model to turn a sentence into a reminder that a program can read, as JSON. It trains in three ways, with one loop. *Full fine-tuning* changes all weights. *LoRA* freezes them and trains small matrices beside them, the *adapters*. *QLoRA* also stores the frozen weights in four bits; the weights here had been rounded to four bits before, so its row may look worse than yours. How much memory and time does each take, and how many answers are right on new sentences?
#
# **In a hurry?** [Ten lines](#Ten-lines) train a model. [The run](#5.-The-run:-does-the-model-learn-the-task?) shows what each way learned. [Settings](#Which-settings-matter?) and [cards](#Which-card?) are two tables.
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
transformers.utils.logging.set_verbosity_error()
keep_freed_memory()  # a CPU's steps are slower where the system takes freed memory back
here = machine()
print(here)
print(f"SmolLM2 comes from: {model_source()}\n{source_note()}")

# %% [markdown]
# For a model of your own write its hub id or its folder in the place of `smollm2`.

# %%
cpu = dict(
    model="smollm2",
    rows=4,  # sentences in a step
    steps=120,  # of the long runs
    script_steps=10,  # of the ten lines
    held_out=64,  # sentences that judge, and are never trained on
    rounds=3,  # of timing
)
more = dict(rows=16, steps=300, held_out=200)
# Continuous integration checks that the code runs, on a model with random weights.
tiny = dict(model="tiny-smollm2", rows=2, steps=4, script_steps=4, held_out=8, rounds=1)

sizes = choose_sizes(
    cpu=cpu,
    gpu16=cpu | more,
    gpu24=cpu | more,
    gpu80=cpu | more | dict(rows=32),
    fast=cpu | tiny,
)
sizes

# %% [markdown]
# ## The task, and one row of it
#
# A program makes the task, so an answer is right or wrong, to the letter. In one half of the sentences the digits of the time are *copied*: 8:45 am is 08:45. In the other half the hour is *changed*: 8:45 pm is 20:45, and 12:05 am is 00:05. A rule that copies, and understands nothing, is right in half of them. A model that gets no more has learned the form, and not the clock.
#
# *Held-out* sentences judge a model, and it never trains on them. A fifth of the times of the clock is in held-out sentences only, with four things to do that no training sentence has. So no answer can be remembered. The four forms of the sentences are the same in both parts.

# %%
import gc
import os
import re
import shutil

from recipes_lib.core.data import collate, load_instructions
from recipes_lib.core.data.chat_template import CHATML
from recipes_lib.core.data.reminder_task import reminder_pairs
from recipes_lib.core.data.tokens_and_labels import IGNORED, decode_with_mask
from recipes_lib.core.measure.provenance import runs_dir
from recipes_lib.core.model import load_model, load_tokenizer

# Files of this notebook, made anew in each run.
folder = Path(os.path.relpath(runs_dir() / f"notebook-05-{sizes.tier}"))
shutil.rmtree(folder, ignore_errors=True)

tokenizer = load_tokenizer(sizes.model)
tokenizer.chat_template = CHATML  # its own, without the system turn that it adds
padding = {"pad_token_id": tokenizer.pad_token_id}
pairs = reminder_pairs(limit=sizes.rows * sizes.steps)
some = sizes.held_out // 2
different = reminder_pairs(split="validation", limit=some + sizes.held_out)
to_watch, questions = different[:some], different[some:]


def copied(question):
    """The answer's time, by a rule that looks at no am or pm."""
    hour, minute = re.search(r"(\d+):(\d+)", question["prompt"]).groups()
    return f"{int(hour):02}:{minute}"


changes_hour = [copied(pair) not in pair["completion"] for pair in questions]
print(f"{sum(changes_hour)} of {len(questions)} held-out hours change\n")

train_rows = list(load_instructions(tokenizer, dataset=pairs))
held_out = list(load_instructions(tokenizer, dataset=questions))
for pair in pairs[:2] + questions[:2]:
    print(pair["prompt"], pair["completion"], sep="\n  ")

# %% [markdown]
# A pair becomes a row in three steps: the chat template writes it as one text, the tokenizer cuts the text into tokens, and the mask says which tokens are learned.

# %%
row = train_rows[0]
print(decode_with_mask(row, tokenizer))
print()
border = row["labels"].count(IGNORED)  # here the answer begins
for place in range(border - 2, border + 3):
    token = tokenizer.decode(row["input_ids"][place])
    print(f"{token!r:<14}label {row['labels'][place]}")

# %% [markdown]
# Between ⟦ and ⟧ is the question. Its labels are -100, which PyTorch's cross-entropy skips: the model learns to write the answer. Look at three rows of your own data in this way before anything else.
#
# SmolLM2's own template adds a system turn to each row. This page takes the template without it, so rows and steps are shorter. A template belongs to the model that was trained with it: it is saved with the tokenizer.
#
# ### Labels that are wrong train without an error
#
# The loss falls, too, and the model learns something else. Here is one row with three mistakes, and what `check_labels` says of each:

# %%
from recipes_lib.fine_tuning.completion_only_loss import check_labels

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
# **The line you will write tomorrow:** in TRL, rows with `prompt` and `completion`: only the completion is learned, by default. Rows of `messages` need `assistant_only_loss=True` and a chat template with `{% generation %}` marks; TRL adds the marks to templates that it knows, and to no other. In Unsloth it is `train_on_responses_only`. **When not:** with long questions, short answers and few rows it can help to learn the questions, too (Shi et al.).
#
# ## Ten lines
#
# ```python
# from datasets import load_dataset
# from peft import LoraConfig
# from trl import SFTConfig, SFTTrainer
#
# pairs = load_dataset("json", data_files="pairs.jsonl", split="train")
# adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
# half = {"dtype": "bfloat16"}  # of the frozen weights; "float16" on a T4
# settings = SFTConfig("adapter", learning_rate=2e-4, model_init_kwargs=half)
# trainer = SFTTrainer(BASE, settings, train_dataset=pairs, peft_config=adapters)
# trainer.train()
# trainer.save_model()
# ```
#
# `BASE` is a hub id or a folder. On a T4 add `fp16=True, bf16=False`; on a CPU, `use_cpu=True`. A line of `pairs.jsonl` has lists of messages, because plain strings get no chat template: `{"prompt": [{"role": "user", "content": "…"}], "completion": [{"role": "assistant", "content": "…"}]}`. Begin with a rate of 2e-4, that of the QLoRA paper for 7 billion weights. Recipe 5 shows what a rate of 1e-3 learns here, and what it spoils.
#
# The same lines run below. Before them come a model in a folder, as one of the hub would be, data as messages, and settings of this machine and this page.

# %%
from datasets import Dataset, disable_progress_bars

from recipes_lib.fine_tuning.adapter_files import save_merged

half = here.compute_dtype  # bf16 where it is native, fp16 on a T4, else fp32
disable_progress_bars()


def base(dtype=torch.float32):
    """The pretrained model, each time with the same weights."""
    seed_everything(0)
    return load_model(sizes.model, dtype=dtype)


def as_messages(pairs):
    """Lists of messages get the chat template; plain strings would get none."""
    rows = []
    for pair in pairs:
        question = {"role": "user", "content": pair["prompt"]}
        answer = {"role": "assistant", "content": pair["completion"]}
        rows.append({"prompt": [question], "completion": [answer]})
    return Dataset.from_list(rows)


save_merged(base(half), folder / "base", tokenizer=tokenizer, dtype=half)
NAME = str(folder / "base")  # or a hub id: "HuggingFaceTB/SmolLM2-135M-Instruct"
of_machine = dict(
    use_cpu=here.device == "cpu",
    bf16=half is torch.bfloat16,
    fp16=half is torch.float16,
    model_init_kwargs={"dtype": str(half).removeprefix("torch.")},  # else fp32
)
of_this_page = dict(
    output_dir=str(folder / "trl"),
    save_strategy="no",
    report_to="none",
    logging_steps=1,
    disable_tqdm=True,
    train_sampling_strategy="sequential",  # to compare with our loop
)
data = dict(
    train_dataset=as_messages(pairs[: sizes.rows * sizes.script_steps]),
    eval_dataset=as_messages(to_watch),
)

# %% [markdown]
# The rate is the one of recipe 5, which learns the task in few steps and forgets much:

# %%
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer


def adapters():
    linear = dict(target_modules="all-linear", task_type="CAUSAL_LM")
    return LoraConfig(r=16, lora_alpha=32, **linear)


settings = SFTConfig(
    learning_rate=1e-3,  # of adapters; a tenth of it for all weights
    lr_scheduler_type="cosine",
    warmup_steps=1,
    num_train_epochs=1,
    per_device_train_batch_size=sizes.rows,
    gradient_checkpointing=False,  # on by default: it computes each block twice
    eval_strategy="epoch",
    **of_machine,
    **of_this_page,
)
trainer = SFTTrainer(NAME, settings, peft_config=adapters(), **data)
# QLoRA on a GPU: SFTTrainer(…, quantization_config=…) with the lines of recipe 3.

# %%
from peft import get_peft_model_state_dict


def ask(model, question):
    """As a user does, with transformers alone."""
    turns = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(
        turns,
        add_generation_prompt=True,  # the answer begins here
        return_dict=True,
        return_tensors="pt",
    ).to(model.device)
    written = model.eval().generate(**asked, max_new_tokens=40, do_sample=False)
    answer = written[0, asked["input_ids"].shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True)


state = get_peft_model_state_dict(trainer.model)
begun = {name: tensor.clone() for name, tensor in state.items()}
question = questions[1]["prompt"]
print(question)
print(f"  before: {ask(trainer.model, question)[:70]!r} …")
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
print(f"  after:  {ask(trainer.model, question)}")
history = trainer.state.log_history
their_losses = [entry["loss"] for entry in history if "loss" in entry]
print("training loss", *(f"{loss:.3f}" for loss in their_losses))
print("held-out loss", *(f"{e['eval_loss']:.3f}" for e in history if "eval_loss" in e))

# %% [markdown]
# Ten steps teach the form: the answer is JSON with the right day. Its time is copied, and 11:10 pm is 23:10. The rest of this page asks what more steps bring, what they take, and whether the number they end with is luck.
#
# ## The loop inside
#
# The same training without the Trainer, which all that follows uses. A recipe changes what goes in: the model, the batches, the rate or the loss. `autocast` rounds the inputs of the matrix products to 16 bits. The scaler is for fp16 alone, where small gradients would become zero.

# %%
from transformers import get_cosine_schedule_with_warmup

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


# %%
from itertools import islice

from peft import get_peft_model, set_peft_model_state_dict


def batch_of(rows):
    return collate(rows, device=here.device, **padding)


def in_batches(rows, size):
    return [batch_of(rows[start : start + size]) for start in range(0, len(rows), size)]


def with_lora():
    return get_peft_model(base(half), adapters())


ours = with_lora()
set_peft_model_state_dict(ours, begun)  # the adapters that the trainer began with
their_batches = in_batches(list(trainer.train_dataset), sizes.rows)
our_losses = list(islice(train(ours, their_batches, 1e-3), 4))
apart = max(abs(a - b) for a, b in zip(their_losses, our_losses))
print("TRL      ", *(f"{loss:.3f}" for loss in their_losses[:4]))
print("our loop ", *(f"{loss:.3f}" for loss in our_losses))
print(f"they are {apart:.3f} apart at most")
del trainer, ours

# %% [markdown]
# The same losses, to a hundredth. The Trainer also has checkpoints, callbacks and several GPUs. A run here sees each row once. For gradient accumulation, call backward for several batches before `scaler.step`, and divide each sum of losses by the answers' tokens of all of them ([notebook 01](../notebooks/01_large_models_limited_hardware.ipynb)).
#
# ## What a step needs: two equations
#
# A weight that trains has 4 bytes, and AdamW keeps two more numbers of 4 bytes for it, its *states*. A weight that is frozen has no states and no gradient.
#
# $$\text{bytes} = b \cdot \text{frozen} + (4 + 8) \cdot \text{trained} + \max(\text{activations} + \text{logits},\ 4 \cdot \text{trained})$$
#
# Here *b* is the size of a frozen weight: 2 in 16 bits, 0.52 in four bits with their scales. *Activations* are what forward keeps for backward, and are measured below. *Logits* are the scores of all words of the vocabulary for the next token: 4 bytes for each token and word, about twice. Both go while the gradients arrive, so the peak has one or the other. A model that shares its embedding with its output holds two more gradients of it for a moment.
#
# A trained weight costs six operations per token: two in forward, two for the gradient of its input, two for its own. A frozen one costs four.
#
# $$\text{operations} = (4 \cdot \text{frozen} + 6 \cdot \text{trained}) \cdot \text{tokens, with padding}$$
#
# So a step of LoRA should take a little more than 4/6 of the time of full fine-tuning. The first two terms of the bytes stay between two steps:

# %%
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.fine_tuning.lora import lora_parameters

batches = in_batches(train_rows, sizes.rows)
compared = batches[0]  # the batch whose step is measured
tokens = compared["input_ids"].numel()
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
# **What happens.** Two numbers judge a model. The *held-out loss* is the cross-entropy on new sentences, per token of the answers; its unit, a nat, is that of the natural logarithm. The score is the number of answers that are right to the letter. Other sentences would give other numbers, so each has an interval. For the loss we draw as many sentences as we have, with replacement, 2,000 times; the middle 95 % of the means are the interval. For a share of right answers it is Wilson's formula, which holds for 0 % and 100 %, too.
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
# A model that learns a task can forget what it knew. So an examination also asks how well it predicts other text, 32 pieces of the source code of Python, as *perplexity*: e to the loss per token, which says among how many tokens the model hesitates.

# %%
import math
from types import SimpleNamespace

from recipes_lib.core.data.corpus import load_text
from recipes_lib.core.data.losses_and_answers import generate_answers, text_windows

wanted = [pair["completion"] for pair in questions]
changed = torch.tensor(changes_hour)
other_text = text_windows(
    tokenizer, text=load_text(split="validation"), context=64, windows=32
)


def write(model, prompts):
    """An answer for each prompt, many at a time."""
    with in_half():
        return generate_answers(model, tokenizer, prompts, batch_size=64)


def losses_of(model, rows):
    with in_half():
        return held_out_losses(model, rows, batch_size=32, **padding)


def are_right(answers):
    """1 for each answer that is right to the letter, else 0."""
    return torch.tensor([a == b for a, b in zip(answers, wanted)]).double()


def examine(model):
    answers = write(model, held_out)
    return SimpleNamespace(
        answers=answers,
        right=are_right(answers),
        losses=losses_of(model, held_out),
        other=losses_of(model, other_text),
    )


def in_words(right):
    low, high = wilson(right.sum().item(), len(right))
    return (
        f"{right.sum():.0f} of {len(right)} right ({low:.0%} to {high:.0%}): "
        f"{right[~changed].sum():.0f} copied hours, {right[changed].sum():.0f} changed ones"
    )


# %% [markdown]
# A prompt with examples costs no training, and neither does the rule that copies. They are what fine-tuning has to beat. **Guess first.** How many answers are right before training, if the question stands alone, and if four examples stand before it?

# %%
from recipes_lib.core.data.tokens_and_labels import tokenize_chat

model = base()
before = examine(model)


def turns_of(pair, train=True):
    """A question and its answer; with `train` False nothing is learned of the answer."""
    answer = {"role": "assistant", "content": pair["completion"], "train": train}
    return [{"role": "user", "content": pair["prompt"]}, answer]


# The form in words, then examples as earlier turns, two of each half.
form = "Answer with JSON: the day, the time as HH:MM of 24 hours, and what to do."
examples = [{"role": "system", "content": form}]
for pair in pairs[:4]:
    examples += turns_of(pair, train=False)
conversations = []
for question in questions:
    conversations += tokenize_chat(tokenizer, [*examples, *turns_of(question)])
answers = write(model, conversations)
prompted = are_right(answers)
rule = 1 - changed.double()  # right where the digits are copied
print("copying the digits:", in_words(rule))
print("question alone:    ", in_words(before.right))
print("after 4 examples:  ", in_words(prompted))
print(f"one of them: {answers[0]}\nwanted:      {wanted[0]}")
print(f"held-out loss {before.losses}")
print(f"perplexity of other text {math.exp(before.other.mean):.1f}")
del model

# %% [markdown]
# For a model this small, examples are a weak opponent: with a large model, try a prompt before you train anything. **When not:** with few sentences, some thirty or fewer, the interval of the loss tends to be too narrow. No interval covers another seed of the training, nor other forms of sentence: hold out a form, too.
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
from recipes_lib.fine_tuning.lora import plain_lora

show(plain_lora)

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
# The line you will write tomorrow is `get_peft_model(model, LoraConfig(…))`, as in `with_lora` above. `apply_lora` of this repository calls both, and refuses layers that an adapter would not reach.
#
# `climb` predicts the bytes of a step from tensors that have a shape and no numbers, then measures a real step, and adds a row to a table, the *ladder*. Both are the bytes of tensors, by the same count. The process takes more: the interpreter, the libraries and what kernels need for a moment are in neither. The rate of these steps is zero, so *loss* is that of the model before training. **Guess first.** By how much does LoRA lower the peak?

# %%
from functools import partial

from recipes_lib.report.ladders.memory import MemoryLadder

gc.freeze()  # to count bytes, Python looks at all objects: not at those of the imports
ladder = MemoryLadder("05_fine_tuning_pretrained_models")


def climb(name, make, loss_of=own_loss):
    def build():
        model = make().train()
        return model, optimizer_of(model, 0.0), partial(compared_step, loss_of=loss_of)

    ladder.climb(name, build)


def compared_step(model, optimizer, loss_of):
    return take_step(model, compared, optimizer, loss_of)


climb("full fine-tuning", base)
climb("LoRA", with_lora)

# %% [markdown]
# The last line of a row says when the peak is, and what is there at that moment. *Other* is none of the four: two gradients of the embedding with all weights, two tables of logits with LoRA. So the equation closes:
#
# | | stays | at the peak | sum, MiB | measured |
# |---|--:|---|--:|--:|
# | full fine-tuning | 1,539 | gradients 513, of the embedding 216 | 2,268 | 2,269 |
# | LoRA | 312 | activations 210, logits 78 | 600 | 600 |
#
# The states and the gradients of the frozen weights are gone. The loss differs although *B* is zero, because the base is in 16 bits here and in 32 there.
#
# ## 3. QLoRA: the frozen weights in four bits
#
# **What happens.** 64 weights share a scale, and each becomes one of 16 levels. A layer unpacks its weights when it is called, and multiplies in 16 bits, as LoRA does here.

# %%
from recipes_lib.fine_tuning.qlora import plain_nf4

show(plain_nf4)

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
    NAME, quantization_config=in_four_bits, dtype=half
)
theirs = get_peft_model(theirs, adapters())

# %% [markdown]
# `prepare_model_for_kbit_training` is not called: it turns on activation checkpointing, which computes each block twice to keep less and which short rows do not need; and it makes the embedding fp32, which doubles its bytes. `apply_qlora` does the same from a model that is already in memory. It also closes a trap of bitsandbytes on CPUs, where a model that is examined before it trains gets no gradients ([TRAPS.md](../TRAPS.md)).

# %%
from recipes_lib.fine_tuning.qlora import apply_qlora


def with_qlora():
    return apply_qlora(base(half), rank=16, alpha=32, compute_dtype=half)


ours = with_qlora()
one_row = compared["input_ids"][:1]
assert torch.equal(theirs.train()(one_row).logits, ours.train()(one_row).logits)
print("loaded by transformers, and rounded by apply_qlora: the same logits")
rounded = SimpleNamespace(
    losses=losses_of(ours, held_out), other=losses_of(ours, other_text)
)
print("before training, four bits cost", compare(before.losses, rounded.losses))
del theirs, ours

climb("QLoRA", with_qlora)

# %% [markdown]
# The equation gives 163 + 210 + 78 = 451 MiB, and 450 are measured. Four bits cost +0.290 on the held-out sentences, and +0.237 on the batch of the measured step.
#
# **When not:** where the 16-bit weights fit. Recipe 5 shows what is left of the difference after training.
#
# ## 4. Logits of the answers only
#
# **What happens.** Now the logits are large, and most of them belong to tokens without a label. So ask for logits only at the places where some row of the batch has a label. **Guess first.** Half of the tokens carry loss. How much of the peak goes?

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
# 12 % and not half, for two reasons. A place is kept if any of the four rows has a label there, and answers begin at different places. And the weights and the activations of the blocks stay. **The line you will write tomorrow:** `SFTConfig(loss_type="nll")` of TRL 1.16, its default. On a GPU it drops the tokens without a label, and takes the rest in tiles. `completion_only_loss` of this repository is `answer_loss` with its refusals.
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
# LoRA takes 0.78 of the time, and not 4/6: adapters take time of their own. QLoRA also unpacks all weights in each step. *Everything combined* takes the least memory, and no less time than QLoRA: their ranges meet.
#
# ## 5. The run: does the model learn the task?
#
# **What happens.** All ways take the same sentences in the same order, as many steps, and the loss of recipe 4. *LoRA Without Regret* (Thinking Machines, 2025) found in many long runs: adapters want about ten times the learning rate of full fine-tuning, belong on all linear layers, and need no large rank for little data. So full fine-tuning trains at 1e-4, and LoRA and QLoRA at 1e-3. One more run shows what LoRA learns at the rate of full fine-tuning. **Guess first.** Which of the four ends best, and by more than chance?

# %%
ways = {
    "full fine-tuning": (base, 1e-4),
    "LoRA": (with_lora, 1e-3),
    "LoRA, small rate": (with_lora, 1e-4),
    "QLoRA": (with_qlora, 1e-3),
}
after = {}
losses = {}
adapted = {}
for name, (make, rate) in ways.items():
    model = make()
    losses[name] = list(train(model, batches, rate, answer_loss))
    after[name] = examine(model)
    print(f"{name}: {in_words(after[name].right)}")
    if name in ("LoRA", "QLoRA"):
        adapted[name] = model
del model

# %%
from recipes_lib.report.charts.lines import lines

WINDOW = min(10, sizes.steps)


def smooth(losses):
    """The mean over ten steps: single batches are easy or hard."""
    curve = []
    for end in range(WINDOW, len(losses) + 1):
        curve.append((end, sum(losses[end - WINDOW : end]) / WINDOW))
    return curve


lines(
    {name: smooth(each) for name, each in losses.items()},
    title="First the form is learned, then the clock; at a small rate LoRA learns the form only",
    dots=False,
    xlabel="step",
    ylabel="nats per token, mean of ten steps",
    yscale="log",
    source="one run each, the same batches in the same order",
)

# %% [markdown]
# In the table, peak and time are those of a step with all logits, as measured above. The runs take logits of the answers only. *Other text* is source code of Python.

# %%
from IPython.display import display

from recipes_lib.report.style import mib

count = len(wanted)
half_count = count // 2
table = (
    f"| way | rate | peak | time | copied, of {half_count} | changed, of {half_count} "
    f"| right of {count} (interval) | held-out loss | perplexity of other text, × before |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
)


def score(right):
    low, high = wilson(right.sum().item(), count)
    return (
        f"{right[~changed].sum():.0f} | {right[changed].sum():.0f} "
        f"| {right.sum():.0f} ({count * low:.0f} to {count * high:.0f})"
    )


def forgotten(found):
    """By which factor the perplexity of other text rises, with its interval."""
    change = compare(before.other, found.other)
    low, high = math.exp(change.low), math.exp(change.high)
    return f"{math.exp(change.difference):.2f} ({low:.2f} to {high:.2f})"


table += f"| copying the digits | | | | {score(rule)} | | |\n"
table += f"| four examples | | | | {score(prompted)} | | |\n"
table += f"| before | | | | {score(before.right)} | {before.losses.mean:.3f} | |\n"
for name, found in after.items():
    row = ladder[name.split(",")[0]]  # the rate changes neither its peak nor its time
    table += (
        f"| {name} | {ways[name][1]:.0e} | {mib(row.peak_bytes)} | {row.ratio:.2f}× "
        f"| {score(found.right)} | {found.losses.mean:.3f} "
        f"| {forgotten(found)} |\n"
    )
display({"text/markdown": table, "text/plain": table}, raw=True)
print(f"four bits alone, untrained: other text × {forgotten(rounded)}")

# %% [markdown]
# Differences on the same sentences say what is more than chance:

# %%
looks = {
    "before → LoRA": (before, after["LoRA"]),
    "full → LoRA": (after["full fine-tuning"], after["LoRA"]),
    "LoRA, small rate → LoRA": (after["LoRA, small rate"], after["LoRA"]),
    "LoRA → QLoRA": (after["LoRA"], after["QLoRA"]),
}
ones = torch.ones(count)


def points(first, second):
    """By how many percentage points more answers are right, with the paired interval."""
    low, high = plain_paired_bootstrap(first, second, ones)
    difference = (second - first).mean()
    return f"{100 * difference:+.0f} points ({100 * low:+.0f} to {100 * high:+.0f})"


changes = {}
for look, (first, second) in looks.items():
    changes[look] = compare(first.losses, second.losses)
    print(f"{look}: right {points(first.right, second.right)}")
    print(f"    loss {changes[look]}")

# %% [markdown]
# **What was learned.** From the same 480 pairs full fine-tuning gets 64 of 64 answers right, LoRA 56 and QLoRA 44. The rule that copies gets 32, so look at the changed hours, where it gets none: 32, 26 and 18 of 32. At a tenth of its rate LoRA gets 24 in all, no more than the rule: it has learned the form and not the clock. The picture shows both stages. The loss falls to about 0.1, which is the form, and later at the small rate. It stays there for a while, and falls again where the hours are learned.
#
# **What was forgotten belongs to the rate.** At the same rate, 1e-4, LoRA learned less than full fine-tuning and forgot less: the perplexity of other text is × 1.05 against × 1.35. Biderman et al. found this order with 7 billion weights, on code and mathematics, with a rate tuned for each (*LoRA Learns Less and Forgets Less*). At ten times the rate LoRA forgot far more, × 13.45. So a frozen base alone protects nothing: the adapters act on all text, and a large rate makes them large. These are two rates of LoRA and one of full fine-tuning, so this page does not say which is better when each has its best rate.
#
# A model for this one task can pay that price. If yours must keep other skills, hold out text of them, as here: short pieces of source code, 64 tokens each, stand for no conversation and no long text. Then look between the two rates, with more pairs, or with rows of other kinds among yours. No run here tried those.
#
# **Do more steps help?** After 120 steps at 1e-3 LoRA is behind full fine-tuning, by 8 answers. [scripts/finetune.py](../scripts/finetune.py) trains LoRA at the same rate for 200 steps of packed rows, with up to 800 pairs, and gets 48 of 48 held-out answers right: one run on two CPU cores, recorded in its first lines. So LoRA can learn this task, and here it needs longer. What that run forgot, it did not ask.
#
# **QLoRA** learned less than LoRA, by 19 points. Its base was rounded twice here; for a model that comes in 16 bits this row may look better. Of its × 18.69 on other text, the rounding alone is × 1.26; the interval overlaps that of LoRA.
#
# **How far to trust it.** Each way ran once, with one seed. The intervals say what other sentences would show, and not what another seed would. 64 against 24 is a large difference; 64, 56 and 44 may change places.
#
# Three questions, with the answers before and after:

# %%
for number in range(1, 4):
    print(questions[number]["prompt"])
    print(f"  before            {before.answers[number][:60]!r} …")
    for name, found in after.items():
        verdict = "right" if found.right[number] else "wrong"
        print(f"  {name:<18}{found.answers[number]}  {verdict}")

# %% [markdown]
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
# No word of warning from peft: the experts, nearly all of the weights, have no adapters, and the vision tower has. Say what you mean, by name. `apply_qlora` refuses such a model: it cannot store the experts in four bits. **When not:** adapt the vision tower only if your images look unlike those of the pretraining.
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
model = get_peft_model(model, adapters()).train()


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
# Sorting by length gets a part of the gain, and its steps are no longer random samples: `train_sampling_strategy="group_by_length"`. **The line you will write tomorrow:** `SFTConfig(packing=True)`, on a GPU with flash-attn, whose kernels skip what the mask hides. Its default strategy cuts what is longer than `max_length`: leave long rows out before. **When not:** rows of one length; models without attention that reads positions, such as Mamba's (`check_document_mask` refuses them). A packed batch holds more pairs, so an epoch has fewer steps: look for the learning rate again.
#
# ## 8. Save, merge, serve
#
# **What happens.** An adapter's file holds the small matrices, and belongs to one base. A *merge* adds B A to W: the model has its old shape, any engine runs it, and nothing of LoRA is left to slow an answer.
#
# **Guess first.** Is the model still the one that was judged, after a merge, or with QLoRA's adapter on the 16-bit base?

# %%
from peft import PeftModel

from recipes_lib.fine_tuning.qlora import merge_qlora

adapted["QLoRA"].save_pretrained(folder / "adapter", save_embedding_layers=False)
size = (folder / "adapter" / "adapter_model.safetensors").stat().st_size
print(f"an adapter file has {size / 2**20:.0f} MiB\n")

mine = adapted["LoRA"].merge_and_unload()
mine.save_pretrained(folder / "mine")
tokenizer.save_pretrained(folder / "mine")
mine = AutoModelForCausalLM.from_pretrained(folder / "mine", dtype=half)
deployed = {
    "LoRA, merged, saved and loaded again": (mine.to(here.device), "LoRA"),
    "QLoRA's adapter on the 16-bit base": (
        PeftModel.from_pretrained(base(half), folder / "adapter"),
        "QLoRA",
    ),
    "QLoRA, merged": (merge_qlora(adapted["QLoRA"]), "QLoRA"),
}
merged = {}
served = {}
for name, (model, judged) in deployed.items():
    served[name] = are_right(write(model, held_out))
    merged[name] = compare(after[judged].losses, losses_of(model, held_out))
    print(
        f"{name}: {served[name].sum():.0f} right, judged {after[judged].right.sum():.0f}"
    )
    print(f"    {points(after[judged].right, served[name])}, loss {merged[name]}")
del model, deployed, adapted

# %% [markdown]
# A merge changes an answer or two of 64: LoRA's 56 right become 55, QLoRA's 44 become 46. LoRA's loss rises by 0.0009, because the sum is rounded to 16 bits: more than chance, and too little to matter. QLoRA's adapter on the 16-bit base, beside which it has not learned, gets 36 for 44, and its loss does not show that. The interval, -27 to +2 points, holds zero: these rows do not prove a harm, and do not exclude a large one. Examine what you deploy, by its answers.
#
# The merged model, loaded from its folder, answers as its user will ask. These are two examples and no score; the second has a form that no training sentence has:

# %%
new = {
    "Remind me to call the dentist on Friday at 6:40 pm.": "18:40",
    "Could you wake me on Sunday at 7:05 am?": "07:05",
}
for question, time in new.items():
    answer = ask(mine, question)
    print(f"{question}\n  {answer}\n  {'right' if time in answer else 'wrong'}: {time}")
del mine

# %% [markdown]
# A wrong time is valid JSON, so no parser catches it. Check such an answer against the sentence: where it says *pm*, the hour is 12 or more.
#
# | your case | deploy |
# |---|---|
# | LoRA, one task | the merged model: `model.merge_and_unload()` |
# | LoRA, many tasks on one base | `vllm serve BASE --enable-lora --lora-modules mine=FOLDER` |
# | QLoRA, 16-bit weights fit when serving | the merged model; the adapter on the 16-bit base only after a test like this one |
# | QLoRA, only four bits fit | `PeftModel.from_pretrained` on the four-bit base |
# | llama.cpp, Ollama | the folder `mine` as saved above, then `python convert_hf_to_gguf.py FOLDER` of llama.cpp |
#
# `merge_qlora` unpacks the base first. peft's own merge into four-bit weights rounds the sum to four bits once more.
#
# ## 9. Take this home
#
# - **The ten lines** above, for one GPU or several (`accelerate launch`).
# - [scripts/finetune.py](../scripts/finetune.py): one file with our recipes, packed rows, checkpoints and the score. Its LoRA gets 48 of 48 held-out answers right after 200 steps, as its first lines record.
# - A command, without code. Here its process is killed between two checkpoints, and a second one goes on:

# %%
import json

from recipes_lib.workflows.finetune import command

file = folder / "pairs.jsonl"
file.write_text("\n".join(json.dumps(pair) for pair in reminder_pairs(limit=60)))
options = [
    f"--model={NAME}",
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
# ## Which settings matter?
#
# | setting | begin with | why |
# |---|---|---|
# | **labels** | answers only | wrong ones train something else, without an error |
# | **learning rate** | LoRA 2e-4, and more only while text of another kind stays where it was; all weights 1e-4, as here | decides what is learned and what is forgotten: recipe 5 |
# | **pairs** | as many as you can check | a few hundred teach a form; the score says when it is enough |
# | **what trains** | all linear layers | name the layers where a model has experts: recipe 6 |
# | bits of the base | 16, and 4 only where 16 do not fit | recipes 3 and 5 |
# | rank and alpha | 16 and 32 | few pairs need no more; look at the rate first |
# | rows in a step | 4 to 32, by accumulation if need be | adapters like large batches less than all weights do (LoRA Without Regret) |
# | epochs, turns through all rows | 1 to 3 | stop where the held-out loss rises |
# | packing | on where lengths are unequal | time, and fewer steps in an epoch: recipe 7 |
# | checkpointing | off, until activations do not fit | memory for time |
# | warmup, schedule | a tenth of the steps, cosine | little |
# | dropout, weight decay | 0 | little in short runs |
#
# ## Which card?
#
# The same arithmetic for 8 billion parameters and four rows of 2,048 tokens. The rows that train all weights count weights and states in 16 bits, which flatters them: this notebook gave them 32. These peaks are predicted; no card has run them here.

# %%
from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.out_of_memory_doctor import diagnose

eight_billion = model_of_shape("llama-3.1-8b", dtype=torch.bfloat16, device="meta")
for card in ("T4", "RTX 4090", "H100"):
    diagnosis = diagnose(model=eight_billion, batch_size=4, seq_len=2048, card=card)
    print(f"{card}, predicted:")
    for remedy in diagnosis.remedies:
        print(f"  {remedy.name}: {remedy.outcome}")

# %% [markdown]
# | card | train | with |
# |---|---|---|
# | 16 GB, T4 | QLoRA | fp16, checkpointing, the loss in chunks |
# | 24 GB | LoRA on a base in 16 bits | bf16, checkpointing, the loss in chunks |
# | 24 GB, longer rows | QLoRA | bf16, checkpointing, the loss in chunks |
# | 80 GB | LoRA on a base in 16 bits, longer rows | bf16; checkpointing and the loss in chunks where rows need them |
# | 80 GB, all weights | only in 16 bits, with stochastic rounding (`bf16_adamw`) | bf16, one row at a time, the loss in chunks |
#
# All weights with fp32 and autocast take 16 bytes each, 12 that stay and 4 for the gradient: 8 · 16 = 128 GB, so two cards of 80 GB. Checkpointing, 59.8 GiB, would fit the H100 too. The list stops before it, because micro-batches of 1 compute nothing twice.
#
# In TRL: `gradient_checkpointing=True`, and `loss_type="nll"` is the loss in chunks, which never holds all logits at once ([01](../notebooks/01_large_models_limited_hardware.ipynb)). A model below a billion weights trains fully on any of these cards. For your model and card: `python -m recipes_lib doctor --model NAME --dtype bf16 --card T4 --batch-size 4 --seq-len 2048`.
#
# ## Your own data
#
# `load_dataset("json", data_files="pairs.jsonl")` reads a file with one pair in each line. Leave out what is longer than `max_length`: a cut answer teaches to stop anywhere. Hold out by *source*, such as a customer or a document: rows of one source are alike.
#
# ## When to use what
#
# Where 16 bytes per weight are there, take full fine-tuning at 1e-4: here it learned most. All weights need fp32 and autocast: in pure bf16 most updates round to nothing ([TRAPS.md](../TRAPS.md)).
#
# Else take LoRA on all linear layers, with logits of the answers only. Start at 2e-4 or 3e-4, which no run here tried. Raise the rate only while the text of another kind stays where it was; 1e-3 learned most of this task in 120 steps and spoiled that text. Judge by a score that a simple rule does not get; add pairs and steps until both are enough. QLoRA where the 16-bit weights do not fit.
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
# 1. 52, by `rows_needed(after["LoRA"].losses - after["full fine-tuning"].losses, difference=0.01)`.
# 2. By the equation, in 10⁹ bytes: 12 · 7 = 84; 2 · 7 + 12 · 0.04 = 14.5; 0.52 · 7 + 12 · 0.04 = 4.1, and more for the embedding, which stays in 16 bits.
# 3. They grow as the rank does: a quarter and four times of the 4,884,480 at rank 16. With 4 bytes each the files have about 5 and 75 MiB.
#
# </details>
#
# ## References
#
# - Hu et al., *LoRA*, [2106.09685](https://arxiv.org/abs/2106.09685); Dettmers et al., *QLoRA*, [2305.14314](https://arxiv.org/abs/2305.14314)
# - Biderman et al., *LoRA Learns Less and Forgets Less*, [2405.09673](https://arxiv.org/abs/2405.09673)
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
        pairs=len(train_rows),
        held_out=sizes.held_out,
        rule=int(rule.sum()),
        few_shot=int(prompted.sum()),
        right_before=int(before.right.sum()),
        right={name: int(found.right.sum()) for name, found in after.items()},
        changed={
            name: int(found.right[changed].sum()) for name, found in after.items()
        },
        before=before.losses.mean,
        losses={name: found.losses.mean for name, found in after.items()},
    ),
    verdict=vars(changes["before → LoRA"]),
    learning_rates={name: rate for name, (_, rate) in ways.items()},
    forgotten={
        name: vars(compare(before.other, found.other)) for name, found in after.items()
    },
    useful=useful,
    exact=exact,
    silent=silent,
    merged={name: vars(change) for name, change in merged.items()},
    served={name: int(right.sum()) for name, right in served.items()},
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
