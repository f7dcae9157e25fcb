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
# <!-- end -->
#
# A pretrained model knows a language, and not your task. This notebook teaches a task to a small model, from sentences that ask for a reminder to reminders that a program can read. It does so with all weights, with LoRA and with QLoRA, in one loop of a dozen lines. Each time it asks three things: how much memory, how much time, and how many answers are right on sentences that the model has never seen.
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
# | 5 | a sweep | which learning rate, which layers? | [lora.py](../recipes_lib/fine_tuning/lora.py) |
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
from recipes_lib.core.measure.memory import keep_freed_memory
from recipes_lib.core.model.default_model import model_source, source_note

warnings.simplefilter("ignore", FutureWarning)  # about peft's own calls
transformers.utils.logging.disable_progress_bar()
keep_freed_memory()  # a CPU's steps are slower where the system takes freed memory back
here = machine()
print(here)
print(f"SmolLM2 comes from: {model_source()}\n{source_note()}")

# %% [markdown]
# All sizes stand in one cell. A larger card trains on more rows, for more steps. For a model of your own write its hub id or its folder in the place of `smollm2`.

# %%
cpu = dict(
    model="smollm2",
    rows=4,  # sentences in a step
    steps=120,  # of the three long runs
    points=(0, 40, 120),  # steps after which the model is examined
    short=12,  # steps of each run that looks for a learning rate
    held_out=48,  # sentences that are never trained on
    rounds=3,  # of timing
)
more = dict(points=(0, 100, 300), short=40, held_out=200)
# Continuous integration checks that the code runs, on a model with random weights.
tiny = dict(model="tiny-smollm2", steps=4, points=(0, 4), short=2, held_out=8, rounds=1)

sizes = choose_sizes(
    cpu=cpu,
    gpu16=cpu | more | dict(rows=16, steps=300),
    gpu24=cpu | more | dict(rows=16, steps=300),
    gpu80=cpu | more | dict(rows=32, steps=300),
    fast=cpu | tiny,
)
sizes

# %% [markdown]
# ## The task, and what is learned of it
#
# The task is made by a program, so that an answer is right or wrong. A sentence asks for a reminder, and the answer is the reminder as JSON. The clock has 288 times of five minutes. A fifth of them stands in held-out sentences only, with things to do that no training sentence has. So a right answer cannot be remembered.

# %%
import gc
import os
import shutil

from recipes_lib.core.data import collate, load_instructions
from recipes_lib.core.data.chat import decode_with_mask
from recipes_lib.core.data.reminders import reminder_pairs, times_of
from recipes_lib.core.measure.runs import runs_dir
from recipes_lib.core.model import load_model, load_tokenizer

# Files of this notebook, made anew in each run.
folder = Path(os.path.relpath(runs_dir() / f"notebook-05-{sizes.tier}"))
shutil.rmtree(folder, ignore_errors=True)

tokenizer = load_tokenizer(sizes.model)
padding = {"pad_token_id": tokenizer.pad_token_id}
pairs = reminder_pairs(limit=sizes.rows * sizes.steps)
questions = reminder_pairs(split="validation", limit=sizes.held_out)
train_rows = list(load_instructions(tokenizer, dataset=pairs))
held_out = list(load_instructions(tokenizer, dataset=questions))
assert not set(times_of("train")) & set(times_of("validation"))

for pair in pairs[:2] + questions[:2]:
    print(pair["prompt"], pair["completion"], sep="\n  ")
print()
print(decode_with_mask(train_rows[0], tokenizer))

# %% [markdown]
# In the last print the part between ⟦ and ⟧ is the question. Its labels are -100, which PyTorch's cross-entropy skips: the model should learn to write the answer, not the question.
#
# ### Labels that are wrong train without an error
#
# The loss falls as well with wrong labels, and the model learns something else. Here is the same row with three mistakes, and what `check_labels` says of each:

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
# **The line you will write tomorrow:** in TRL, rows with `prompt` and `completion`, and `SFTConfig(completion_only_loss=True)`. It masks; it does not check labels that you bring. **When not:** with long questions, short answers and few rows it can help to learn the questions, too (Shi et al., 2024).
#
# ## Baseline: the loop
#
# This is all of the training. Every row below goes through it, and a recipe is a change to what goes in: another model, other batches, another rate, another loss. In 16 bits PyTorch's `autocast` rounds the inputs of the matrix products. The scaler is for fp16 alone, where small gradients would become zero; it does nothing elsewhere.

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
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # no gradient is longer than 1
    scaler.step(optimizer)  # the weights change
    scaler.update()
    optimizer.zero_grad()
    return loss.item()


def optimizer_of(model, rate):
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=rate, fused=True)


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
# The batches are made once, so that every way of training sees the same rows in the same order.

# %%
gc.freeze()  # to count bytes, Python looks at all objects: not at those of the imports
batches = [
    collate(train_rows[start : start + sizes.rows], device=here.device, **padding)
    for start in range(0, len(train_rows), sizes.rows)
]
tokens = batches[0]["input_ids"].numel()
print(f"{len(batches)} batches, {tokens} tokens in the first one")


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
# Here *b* is the size of a frozen weight: 2 in 16 bits, 0.52 in four bits with their scales. *Activations* are what forward keeps for backward. *Logits* are one number per token and word of the vocabulary, and the loss needs that table about three times. Both go in backward, while the gradients come, 4 bytes per trained weight: so the peak has one or the other.
#
# Each trained weight costs about six operations per token: two in forward, two for the gradient of its input, two for its own. A frozen one needs no gradient of its own, so it costs four. Padding costs as much as text.
#
# $$\text{operations} = (4 \cdot \text{frozen} + 6 \cdot \text{trained}) \cdot \text{tokens, with padding}$$
#
# So a step of LoRA should take about 4/6 of the time of full fine-tuning. The table lists the bytes that stay between two steps, without gradients:

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
del shapes

# %% [markdown]
# ## 1. Is it better, or is it luck?
#
# **What happens.** Two numbers judge a model: the *held-out loss*, in nats per token of the answers, and the share of answers that are right to the letter. Both come from some sentences, and others would give other numbers. So each has an interval. For the loss we draw as many sentences out of ours, with replacement, 2,000 times, and keep the middle 95 %. For a share of right answers Wilson's formula gives the interval; it holds for 0 and for 100 %, too.
#
# To compare two models, take the *same* sentences and draw the differences: what makes a sentence hard for both is then gone.
#
# **Guess first.** How many answers are right before training, if the question stands alone, and if three examples stand before it?

# %%
from types import SimpleNamespace

from recipes_lib.core.data.chat import tokenize_chat
from recipes_lib.core.data.evaluation import generate_answers
from recipes_lib.fine_tuning.honest_evaluation import (
    compare,
    held_out_losses,
    plain_paired_bootstrap,
)
from recipes_lib.report.show import show

show(plain_paired_bootstrap)
wanted = [pair["completion"] for pair in questions]


def wilson(right, count, z=1.96):
    """The 95 % interval of a share."""
    share = right / count
    middle = share + z * z / (2 * count)
    half_width = z * (share * (1 - share) / count + (z / (2 * count)) ** 2) ** 0.5
    whole = 1 + z * z / count
    return (middle - half_width) / whole, (middle + half_width) / whole


def write(model, prompts):
    with in_half():
        return generate_answers(
            model, tokenizer, prompts, max_new_tokens=32, batch_size=64
        )


def examine(model):
    """Losses and answers on the held-out sentences."""
    with in_half():
        losses = held_out_losses(model, held_out, batch_size=32, **padding)
    answers = write(model, held_out)
    right = torch.tensor([a == b for a, b in zip(answers, wanted)]).double()
    return SimpleNamespace(losses=losses, answers=answers, right=right)


def in_words(found):
    right = int(found.right.sum())
    low, high = wilson(right, len(found.right))
    return f"{right} of {len(found.right)} right ({low:.0%} to {high:.0%}), loss {found.losses}"


model = base()
before = examine(model)
print("alone:               ", in_words(before))

# Three examples as earlier turns of the conversation. `train` False: nothing to learn.
examples = []
for pair in pairs[:3]:
    examples.append({"role": "user", "content": pair["prompt"]})
    examples.append({"role": "assistant", "content": pair["completion"], "train": False})
conversations = []
for pair in questions:
    asked = {"role": "user", "content": pair["prompt"]}
    answer = {"role": "assistant", "content": pair["completion"]}
    conversations += tokenize_chat(tokenizer, [*examples, asked, answer])
answers = write(model, conversations)
few_shot = sum(a == b for a, b in zip(answers, wanted))
low, high = wilson(few_shot, len(wanted))
print(f"after three examples: {few_shot} of {len(wanted)} right ({low:.0%} to {high:.0%})")
print(f"one of them: {answers[0]}")
del model

# %% [markdown]
# That is the answer to the guess, and what fine-tuning has to beat: a prompt with examples costs no training. **Price:** a forward pass and the answers. **When not:** with fewer than about thirty sentences the interval of the loss is too narrow. No interval here covers another seed of the training. In lm-evaluation-harness the line is `simple_evaluate(bootstrap_iters=…)`; the Trainer's `eval_loss` has no interval.
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
every_linear = LoraConfig(
    r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
)


def with_lora():
    return get_peft_model(base(half), every_linear)


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
# `LoraConfig` and `get_peft_model` are the lines that you will write tomorrow, and the rows below are made by them. `apply_lora` of this repository calls both; it also refuses layers that an adapter would not reach (recipe 7 shows why).
#
# The results go into a table, the *ladder*. `climb` predicts the bytes of a step by running it on tensors without data, then measures a real one.

# %%
from functools import partial

from recipes_lib.report.ladders.memory import MemoryLadder

ladder = MemoryLadder(
    "05_fine_tuning_pretrained_models", rows=1, length=tokens
)  # rows of unequal length, counted as one


def climb(name, make, rate=1e-3, loss_of=own_loss):
    def build():
        model = make().train()
        step = partial(take_first_batch, loss_of=loss_of)
        return model, optimizer_of(model, rate), step

    ladder.climb(name, build, dtype=half)


def take_first_batch(model, optimizer, loss_of):
    return take_step(model, batches[0], optimizer, loss_of)


climb("full fine-tuning", base, rate=1e-4)
climb("LoRA", with_lora)

# %% [markdown]
# ## 3. QLoRA: the frozen weights in four bits
#
# **What happens.** 64 weights share a scale, and each becomes one of 16 levels. A layer unpacks its weights when it is called, and multiplies in 16 bits, as LoRA does here.
#
# **Guess first.** What do four bits cost before any training, and is it made good by training?

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
some = batches[0]["input_ids"][:1]
assert torch.equal(theirs.train()(some).logits, ours.train()(some).logits)
print("loaded by transformers, and rounded by quantize_nf4: the same logits")
four_bits = examine(ours)
print("in four bits, before training:", in_words(four_bits))
print("cost of four bits:", compare(before.losses, four_bits.losses))
del theirs, ours


def with_qlora():
    return apply_qlora(base(half), rank=16, alpha=32, compute_dtype=half)


climb("QLoRA", with_qlora)

# %% [markdown]
# `apply_qlora` does one thing more than these lines. On CPUs with AVX512-BF16, bitsandbytes repacks the weights at the first forward in eval mode, for a kernel that has no gradient. Whoever examines the model before training, as we do, then trains adapters of which most get a gradient of zero, without an error. `apply_qlora` keeps the weights as they are.
#
# Whether training makes good what four bits cost, recipe 6 answers. **When not:** where the 16-bit weights fit. LoRA then begins with the exact model.
#
# ## 4. Logits of the answers only, and everything combined
#
# **What happens.** Now that weights and states are small, the logits are large. Most of them belong to tokens without a label.
#
# **Guess first.** About a third of the tokens carry loss. How much of the peak goes?
#
# **The idea.** Ask the model for logits at the places where some row of the batch has a label. This is the one change to the loop: another `loss_of`.

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
    first = batches[0]
    by_hand = plain_answer_loss(model, first) / (first["labels"][:, 1:] != IGNORED).sum()
    assert torch.allclose(by_hand, answer_loss(model, first), rtol=1e-4)
    assert torch.allclose(by_hand, own_loss(model, first), rtol=1e-4)
print("by hand, by transformers and from some logits: the same loss")
del model
climb("everything combined", with_qlora, loss_of=answer_loss)

# %% [markdown]
# **The line you will write tomorrow:** `SFTConfig(loss_type="nll")` of TRL 1.16, its default. On a GPU it drops the tokens without a label, and goes through the rest in tiles. On a CPU it takes all of them. Without TRL: `model(…, logits_to_keep=places)`.
#
# *Everything combined* is QLoRA with this loss, and a step is timed beside the others, in turns:

# %%
ladder.take_turns(sizes.rounds)
ladder

# %%
ladder.chart()

# %%
from recipes_lib.report.timeline import timeline_chart

ends = ("full fine-tuning", "everything combined")
timeline_chart(
    {name: ladder.timelines[name] for name in ends},
    predicted={name: ladder.predictions[name].timeline for name in ends},
    title="States and gradients are gone; activations are left",
)

# %%
for name, size in kept.items():
    found = ladder.predictions[name].kept
    print(f"{name}: {size / 2**20:,.0f} MiB stay between steps, found {found / 2**20:,.0f}")
for name in ("LoRA", "QLoRA", "everything combined"):
    row = ladder[name]
    print(f"{name}: peak {row.change:+.0%}, time {row.ratio:.2f}× (4/6 = 0.67 expected)")
saved = 1 - ladder["everything combined"].peak_bytes / ladder["QLoRA"].peak_bytes
print(f"logits of the answers only: {saved:.0%} of QLoRA's peak is gone")
to_lora = ladder["QLoRA"].seconds / ladder["LoRA"].seconds
print(f"QLoRA takes {to_lora:.2f}× the time of LoRA, both in the same precision")

# %% [markdown]
# That answers the guesses about bytes and time. In the first picture *other* is the gradient of the embedding, twice: the model uses that table at its input and at its output, and both ends give one. Where the time is above 4/6, the adapters and the unpacking cost it: small matrices keep a processor badly busy. On a large model they weigh less.
#
# ## 5. Which learning rate, and which layers?
#
# **What happens.** *LoRA Without Regret* (Thinking Machines, 2025) found in many runs: adapters want about ten times the learning rate of full fine-tuning, they belong on all linear layers, and the rank matters little as long as it can hold the data. We try the first two here, with rates a decade apart.
#
# **Guess first.** At which of three rates does each of them learn most in a short run?

# %%
short = batches[: sizes.short]


def short_run(model, rate):
    """The held-out loss after a short run."""
    for _ in train(model, short, rate, answer_loss):
        pass
    with in_half():
        return held_out_losses(model, held_out, batch_size=32, **padding)



def with_attention_only():
    config = LoraConfig(
        r=42,  # as many numbers as rank 16 on all layers
        lora_alpha=84,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base(half), config)


trials = {
    "full fine-tuning": (base, (2e-5, 2e-4, 2e-3)),
    "LoRA": (with_lora, (2e-4, 2e-3, 2e-2)),
    "LoRA, attention only": (with_attention_only, (2e-3,)),
}
sweep = {}
best_rate = {}
best = {}
for name, (make, rates) in trials.items():
    found = {rate: short_run(make(), rate) for rate in rates}
    sweep[name] = [(rate, losses.mean) for rate, losses in found.items()]
    best_rate[name] = min(found, key=lambda rate: found[rate].mean)
    best[name] = found[best_rate[name]]
    words = "  ".join(f"{rate:.0e}: {loss:.3f}" for rate, loss in sweep[name])
    print(f"{name:<21}{words}")
times = best_rate["LoRA"] / best_rate["full fine-tuning"]
print(f"\nbest rate of LoRA: {times:.0f} times that of full fine-tuning")
print("attention only, against all layers:", end=" ")
print(compare(best["LoRA"], best["LoRA, attention only"]))

# %%
from recipes_lib.report.lines import lines

lines(
    {name: sweep[name] for name in ("full fine-tuning", "LoRA")},
    title="Adapters want a higher learning rate than all weights",
    xlabel="learning rate",
    ylabel="held-out loss, nats per token",
    xscale="log",
    yscale="log",
    source=f"{sizes.short} steps, one run each, {sizes.held_out} held-out sentences",
)

# %% [markdown]
# **The line you will write tomorrow:** `LoraConfig(target_modules="all-linear")` and a rate that you have looked for in runs as short as these. Where the interval of a difference holds zero, this run does not rank the two. **When not:** a rate is best for a length and a batch. Look again if yours are others.
#
# ## 6. The run: does the model learn the task?
#
# **What happens.** All three ways take the same rows in the same order, each at its best rate; QLoRA takes that of LoRA. After some steps each is examined.
#
# **Guess first.** Which of the three ends best, and by more than chance?

# %%
ways = {
    "full fine-tuning": (base, best_rate["full fine-tuning"]),
    "LoRA": (with_lora, best_rate["LoRA"]),
    "QLoRA": (with_qlora, best_rate["LoRA"]),
}
curves = {}
for name, (make, rate) in ways.items():
    model = make()
    curves[name] = {0: four_bits if name == "QLoRA" else before}
    for done, _ in enumerate(train(model, batches, rate, answer_loss), 1):
        if done in sizes.points:
            curves[name][done] = examine(model)
            print(f"{name}, step {done}: {in_words(curves[name][done])}")
    if name == "LoRA":
        lora = model
after = {name: list(curve.values())[-1] for name, curve in curves.items()}
qlora = model
del model

# %%
def share_by_step(curve):
    return [(step, 100 * found.right.mean().item()) for step, found in curve.items()]


lines(
    {name: share_by_step(curve) for name, curve in curves.items()},
    title=f"{sizes.steps} steps teach the task, with all weights and with adapters",
    xlabel="optimizer step",
    ylabel="held-out answers that are right, %",
    ylim=(0, 105),
    source=f"one seed, {sizes.held_out} held-out sentences",
)

# %% [markdown]
# Three sentences that it has never seen, before and after:

# %%
for number in range(3):
    print(questions[number]["prompt"])
    print(f"  before: {before.answers[number][:70]!r}")
    print(f"  after:  {after['LoRA'].answers[number]}")

# %% [markdown]
# The answer to the guess, sentence by sentence. Below zero means that the second of the two has the lower loss.

# %%
from recipes_lib.report.figure import new_figure
from recipes_lib.report.style import INK, RECIPE

looks = {
    "full → LoRA": ("full fine-tuning", "LoRA"),
    "LoRA → QLoRA": ("LoRA", "QLoRA"),
    "full → QLoRA": ("full fine-tuning", "QLoRA"),
}
paired = {}
ones = torch.ones(len(wanted))
for look, (first, second) in looks.items():
    paired[look] = compare(after[first].losses, after[second].losses)
    low, high = plain_paired_bootstrap(after[first].right, after[second].right, ones)
    points = (after[second].right - after[first].right).mean()
    print(f"{look}: {paired[look]}")
    print(f"    right answers {points:+.0%} (95 % interval {low:+.0%} to {high:+.0%})")

# %%
figure, axes = new_figure(
    "What LoRA and QLoRA cost in held-out loss",
    height=2.2,
    source=f"{sizes.steps} steps, one seed; 95 % intervals over {sizes.held_out} sentences",
)
axes.axvline(0, color=INK, linewidth=1)
for place, change in enumerate(paired.values()):
    axes.plot([change.low, change.high], [place, place], color=INK)
    axes.plot(change.difference, place, "o", color=RECIPE)
axes.set_yticks(range(len(paired)), paired)
axes.invert_yaxis()
axes.set(xlabel="difference of the held-out loss, nats per token")
figure

# %% [markdown]
# An interval says what other sentences would show, not what another seed would. On other text, full fine-tuning and LoRA were compared for 120 steps, too (`python -m benchmarks.long_finetune`): functions and their docstrings, where nothing is simply right.

# %%
from recipes_lib.report.records import recorded

for method, verdict in recorded("long_finetune")["verdicts"].items():
    print(
        f"docstrings, {method}: {verdict['value']:+.3f} nats per token "
        f"({verdict['low']:+.3f} to {verdict['high']:+.3f})"
    )

# %% [markdown]
# ## 7. What LoRA leaves untrained, in silence
#
# **What happens.** Qwen3-VL-MoE reads images with a *vision tower*, and each block of its language model has many MLPs, the *experts*. transformers 5 stores the experts of a block in two large tensors, which are no linear layers. Here is a tiny one with random weights.
#
# **Guess first.** `target_modules="all-linear"`, the advice of recipe 5: what does it train here?

# %%
from collections import Counter

from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from recipes_lib.fine_tuning.lora import apply_lora

rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
text = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
text |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
tower = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=4)
tower |= dict(out_hidden_size=64, num_position_embeddings=64, deepstack_visual_indexes=[0])
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


def part_of(name):
    """The part of the model that a parameter of this name belongs to."""
    for part, mark in PARTS.items():
        if mark in name:
            return part
    return "others"


def count_trained(model):
    """The numbers that train in each part, printed beside those that are frozen."""
    trained = Counter()
    frozen = Counter()
    for name, weight in model.named_parameters():
        counts = trained if weight.requires_grad else frozen
        counts[part_of(name)] += weight.numel()
    for part in PARTS:
        print(f"  {part:<13}{trained[part]:>7,} train, {frozen[part]:>7,} are frozen")
    return {part: trained[part] for part in PARTS}


print("peft, all-linear:")
silent = count_trained(
    get_peft_model(with_images(), LoraConfig(r=4, target_modules="all-linear"))
)
try:
    apply_lora(with_images(), rank=4)
except ValueError as reason:
    print(f"\nours: {reason}")

# %% [markdown]
# No word of warning: most adapters are on the vision tower, and the experts, which hold most of the weights of such a model, have none. Say what you mean. Attention of the language model alone, or with the experts by `target_parameters`:

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
pictured = dict(input_ids=ids, labels=ids, **image)
losses = list(train(vision, [pictured] * 6, 1e-2))
print(f"six steps on an image and text: loss {losses[0]:.2f} → {losses[-1]:.2f}")
del vision

# %% [markdown]
# The loop is the same; an image is four tokens more and three more tensors, which the processor of a real model makes. bitsandbytes does not round experts of this form to four bits either. **When not:** adapt the vision tower only if your images look unlike those of the pretraining.
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
# Reminders have nearly one length. So this recipe takes pairs of unequal length: functions of the standard library, and their docstrings.
#
# **Guess first.** What happens to the loss if the positions are forgotten?

# %%
from recipes_lib.report.pattern import pattern_chart
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
mask = document_mask(packed["position_ids"])[0].cpu()
pattern_chart(
    {"one long text": torch.ones_like(mask).tril(), "three documents": mask},
    title="In a packed row a token reads its own document only",
)

# %%
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
# Without positions the loss looks *better*: a later document reads the earlier ones. That gain is false, for in use no other document stands before the question. With positions, packed rows are the same training to the fourth digit. So packing adds no quality. What it saves is time. How much? Sixteen documents, four rows at a time: as they come, sorted by length, and packed:

# %%
from recipes_lib.core.measure import in_turns

in_fours = {
    "padded": documents,
    "sorted by length": sorted(documents, key=lambda row: len(row["labels"])),
    "packed": pack_sequences(documents, length=256),
}
del decoder_blocks(model)[10:]  # to be quick: what counts is the ratio
model = get_peft_model(model, every_linear).train()
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
    useful[name] = sum(lengths) / min(times[1:])  # the first turn warms up
    computed = sum(batch["input_ids"].numel() for batch in work[name])
    print(
        f"{name:<17}{useful[name]:6,.0f} useful tokens/s, "
        f"{1 - sum(lengths) / computed:.0%} padding, "
        f"{useful[name] / useful['padded']:.2f}× padded"
    )
del model, turns

# %% [markdown]
# **The line you will write tomorrow:** `SFTConfig(packing=True)`, on a GPU with flash-attn, whose kernels skip what the mask hides. Without them attention computes it and throws it away. **When not:** rows of one length; models without attention that reads positions, such as Mamba's (`check_document_mask` refuses them). Sorting gains about as much, and its steps are no longer random samples.
#
# ## 9. Save, merge, deploy
#
# **What happens.** An adapter belongs to one base. On another of the same shape it runs, and answers badly. So `save_adapter` keeps a fingerprint of the base, and `load_adapter` refuses any other model; peft's `save_pretrained` compares shapes. A merge adds B A to W, and then nothing of LoRA is left to slow an answer.
#
# **Guess first.** QLoRA learned beside weights in four bits. Is its adapter better on those, or on the base as it was before?

# %%
from recipes_lib.fine_tuning.adapter_files import (
    base_fingerprint,
    load_adapter,
    save_adapter,
)
from recipes_lib.fine_tuning.lora import merge_lora
from recipes_lib.fine_tuning.qlora import merge_qlora

fingerprint = base_fingerprint(base(half))
size = save_adapter(qlora, folder / "adapter", base=fingerprint)
print(f"adapter file: {size / 2**20:.0f} MiB\n")
on_16_bits = load_adapter(base(half), folder / "adapter")
deployed = {
    "LoRA, merged": (merge_lora(lora), "LoRA"),
    "QLoRA, merged": (merge_qlora(qlora), "QLoRA"),
    "QLoRA's adapter on the 16-bit base": (on_16_bits, "QLoRA"),
}
merged = {}
for name, (model, judged) in deployed.items():
    found = examine(model)
    merged[name] = compare(after[judged].losses, found.losses)
    print(f"{name}: {int(found.right.sum())} of {len(wanted)} right, against {judged}:")
    print(f"    {merged[name]}")
del model, deployed, on_16_bits, lora, qlora

# %% [markdown]
# | your case | deploy |
# |---|---|
# | LoRA | the merged model: `model.merge_and_unload()`, which `merge_lora` calls |
# | QLoRA, 16-bit weights fit | what the lines above call *better*, or the merged model if neither |
# | QLoRA, only four bits fit | the four-bit base with the adapter beside it |
#
# `merge_qlora` unpacks the base first. peft's own merge into four-bit weights rounds the sum to four bits once more.
#
# ## 10. The same in TRL, and as a command
#
# This is the run of recipe 6 for TRL, with its real names. Four steps of both, on the same rows:

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
    lr_scheduler_type="constant",
    loss_type="nll",  # in tiles, for labels only
    completion_only_loss=True,
    bf16=half is torch.bfloat16,
    fp16=half is torch.float16,
    gradient_checkpointing=False,  # TRL's default is True
    train_sampling_strategy="sequential",
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
    use_cpu=here.device == "cpu",
)
trainer = SFTTrainer(
    model=with_lora(),  # or a base, and peft_config=every_linear
    args=settings,
    train_dataset=Dataset.from_list(few),
    processing_class=tokenizer,
)
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
del trainer

model = with_lora().train()
optimizer = optimizer_of(model, 1e-3)
ours = [take_step(model, batch, optimizer, answer_loss) for batch in batches[:4]]
print("TRL ", *(f"{loss:.3f}" for loss in theirs))
print("ours", *(f"{loss:.3f}" for loss in ours))
del model, optimizer

# %% [markdown]
# The losses agree. The Trainer has what our loop has not: evaluation while training, callbacks, several GPUs. Rows with `prompt` and `completion` work as well, as lists of messages: plain strings get no chat template.
#
# Without code there is a command. It reads a file of pairs, checks each, keeps every tenth out of the training, and says at its end whether the loss of those has fallen. Here the process is killed two steps after a checkpoint, as an operating system does that runs out of memory, and a second one goes on.

# %%
import json

from recipes_lib.workflows.finetune import command

file = folder / "pairs.jsonl"
file.write_text("\n".join(json.dumps(pair) for pair in reminder_pairs(limit=60)))
options = [
    f"--model={folder / 'base'}",
    f"--data={file}",
    f"--output={folder / 'run'}",
    "--steps=9",
    "--save-steps=3",
    "--rows-per-step=4",
    "--dropout=0.1",  # random numbers, which a resumed run must repeat
]
print("python -m recipes_lib finetune", *options, "\n")
killed = command.run_command(*options, kill_at=4)
resumed = command.run_command(*options, "--resume")
print(f"killed   {killed}")
print(f"resumed  {dict(list(resumed.items())[:4])} …")
verdict = (folder / "run" / "adapter" / "README.md").read_text()
print(*[line for line in verdict.splitlines() if "nats" in line], sep="\n")

# %% [markdown]
# Both processes took steps 3 and 4, and their losses agree in every digit: weights, states, schedule, place in the data and random state come back. In the Trainer the line is `trainer.train(resume_from_checkpoint=True)`. The command also writes the run as a file for Axolotl ([docs/finetune.md](../docs/finetune.md)).
#
# ## A trap: all weights in bf16
#
# `from_pretrained` of transformers 5 loads a model as its file is, most often in bf16. Whoever then trains all of its weights has no fp32 numbers anywhere. The next bf16 number after 1 is 0.8 % away, and an update of less than half of that is lost when it is rounded to the nearest.
#
# **Guess first.** At the usual learning rate of 1e-5: which share of the weights of two blocks has changed after three steps?

# %%
from recipes_lib.precision.pure_bf16 import bf16_adamw


def share_that_changed(dtype, make):
    model = base(dtype).requires_grad_(False)
    trained = list(decoder_blocks(model)[-2:].requires_grad_(True).parameters())
    old = [weight.detach().clone() for weight in trained]
    optimizer = make(trained, lr=1e-5)
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
# So load in fp32 and use autocast, as the first row of the ladder does, or round up and down at random, which is right on average: torchao's `AdamW8bit(bf16_stochastic_round=True)`. Adapters are not concerned: peft keeps them in fp32.
#
# ## When to use what, and what is not here
#
# **Which way?** LoRA on all linear layers, at a rate from a short sweep, with logits of the answers only. QLoRA where the 16-bit weights do not fit. All weights where there is much to learn, and 16 bytes per weight are there. Packing where lengths are unequal.
#
# | recipe | why it has no section | where it helps |
# |---|---|---|
# | 8-bit states, paged AdamW | adapters have hardly any states | all weights: −24 % for 7B in torchao's figures, [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) |
# | activation checkpointing, accumulation | the rows are short | long rows, large batches: notebooks 01 and [04](../notebooks/04_training_long_sequences.ipynb) |
# | DoRA | 17 % slower and 2 GiB more than LoRA for 46.9 against 47.8 % on GSM8K | PEFT's comparison, Llama-3.2-3B, one seed each |
# | rsLoRA | a scale of α / √r, for large ranks | the same comparison: 51.3 % with rank 64 |
# | Muon | DeepSpeed: 34.5 → 31.4 GiB for 3B; gains in fine-tuning are disputed, here seeds do not agree (`python -m benchmarks.muon`) | pretraining |
# | a template that drops thinking | Qwen3 keeps that of the last answer only | `load_instructions` makes one row per answer |
#
# ## Take this home

# %%
name = folder / "base"  # or a hub id: "HuggingFaceTB/SmolLM2-135M-Instruct"
mine = AutoModelForCausalLM.from_pretrained(name, dtype=half).to(here.device)
mine = get_peft_model(mine, every_linear)
rows = list(load_instructions(tokenizer, dataset=pairs[:16]))  # or a file: "mine.jsonl"
parts = [rows[start : start + 4] for start in range(0, len(rows), 4)]
mine_batches = [collate(part, device=here.device, **padding) for part in parts]
first = held_out_losses(mine, held_out[:8], **padding)
for loss in train(mine, mine_batches, 2e-3, answer_loss):
    print(f"loss {loss:.3f}")
print(compare(first, held_out_losses(mine, held_out[:8], **padding)))
mine.save_pretrained(folder / "mine")
del mine

# %% [markdown]
# The whole of it as one file, with dtype and device of your card, packed rows, checkpoints and the score: [scripts/finetune.py](../scripts/finetune.py). Its first lines say which number it reaches. The switches of the libraries stand side by side in the [cheatsheet](../CHEATSHEET.md).
#
# ## Exercises
#
# 1. How many held-out sentences would show a difference of 0.01 nats between LoRA and QLoRA?
# 2. Train LoRA with rank 1 for the same steps. What does *LoRA Without Regret* say about so little data?
# 3. Let the model learn the questions, too (`labels` = `input_ids`). Are fewer answers right?
#
# <details><summary>Solutions</summary>
#
# 1. `rows_needed(after["QLoRA"].losses - after["LoRA"].losses, difference=0.01)` of honest_evaluation.py.
# 2. `get_peft_model(base(half), LoraConfig(r=1, lora_alpha=2, target_modules="all-linear", task_type="CAUSAL_LM"))`, then the loop of recipe 6: a small data set fits into a small rank.
# 3. Copy each batch with `labels=batch["input_ids"]`, and train on those.
#
# </details>
#
# ## References
#
# - Hu et al., *LoRA*, 2021; Dettmers et al., *QLoRA*, 2023; Schulman et al., *LoRA Without Regret*, 2025
# - Miller, *Adding Error Bars to Evals*, 2024; Wilson, *Probable Inference*, 1927
# - Shi et al., *Instruction Tuning With Loss Over Instructions*, 2024
# - Krell et al., *Efficient Sequence Packing without Cross-contamination*, 2021
# - PEFT, *method_comparison*; TRL, *Default SFT loss to chunked_nll*, pull request 5846
#
# The last cell checks the claims above on this machine: orderings, and what has to be equal.

# %%
from recipes_lib.core.measure.machine import fast
from recipes_lib.fine_tuning.honest_evaluation import rows_needed

print(f"exercise 1: {rows_needed(after['QLoRA'].losses - after['LoRA'].losses, difference=0.01)}")
exact = all(killed[step] == resumed[step] for step in killed.keys() & resumed.keys())
gain = compare(before.losses, after["LoRA"].losses)
learned = dict(
    steps=sizes.steps,
    held_out=sizes.held_out,
    few_shot=few_shot,
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
    useful=useful,
    moved=changed,
    exact=exact,
    silent=silent,
    merged={name: vars(change) for name, change in merged.items()},
    trl={"difference": max(abs(a - b) for a, b in zip(theirs, ours))},
)
assert all(abs(row.prediction_error) < 0.005 for row in ladder.rows), "predicted"
assert abs(together / alone.mean - 1) < 1e-4, "packing is exact"
for a, b in zip(theirs, ours):
    assert abs(a - b) < 0.02, "the same training in TRL"
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
    assert all(found.right.mean() > before.right.mean() for found in after.values())
    assert gain.high < 0, "better, beyond chance"
print("all checks passed")
