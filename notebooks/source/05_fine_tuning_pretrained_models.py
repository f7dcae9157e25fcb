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
# > **0 → 62, 61, 63 of 64 answers right with full fine-tuning, and 36, 51, 60 with LoRA in 22% of its peak memory**, to the letter, on new sentences, after 192 steps on the same 288 pairs. (Three seeds; in twice as many steps LoRA has 64, 63 with two of them.) A rule that copies the time as it stands gets 32, and a prompt with four examples 1.
# >
# > | way | right, of 64 (95 %); with two more seeds | ordinary questions answered in the braces of the task, of 36 | perplexity of source code and of prose, × before | peak of a step, MiB | time of a step |
# > |---|--:|--:|--:|--:|--:|
# > | full fine-tuning | 63 (59–64); 62, 61 | 36 | 1.04; 1.04 | 2,161 | 1.00× (1.00–1.42) |
# > | LoRA | 60 (54–62); 36, 51 | 36 | 1.43; 1.54 | 481 | 0.85× (0.71–0.88) |
# > | QLoRA | 35 (27–42); 26, 34 | 36 | 1.78; 2.09 | 331 | 0.94× (0.89–1.00) |
# > | **full fine-tuning with own answers**, 384 steps | 62, 63 | 0 | 1.11, 1.10; 1.18, 1.18 | | |
# > | **LoRA with own answers**, 384 steps | 58, 61 | 0 | 1.48, 1.50; 1.65, 1.72 | | |
# >
# > **So that it still answers in words**, put ordinary questions to the model before training, and mix its own answers in, one row in four: the last two rows, with two seeds. Of 12 capitals they name 11, and with LoRA 8 and 9, and the model before training 10 (section 5).
# >
# > Peaks and times are of one step with the plain loss, on CPU cores. Full fine-tuning has fp32 weights and bf16 autocast, LoRA a base in bf16. Three seeds, other rates and ranks, and a second task from real code are in section 5.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-28.
# <!-- end -->
#
# A pretrained model knows a language, and not your task. This page teaches a small model to turn a sentence into a reminder that a program can read, as JSON. It trains in three ways. *Full fine-tuning* changes all weights. *LoRA* freezes them and trains small matrices beside them, the *adapters*. *QLoRA* also stores the frozen weights in four bits. The weights here had been rounded to four bits before, so QLoRA rounds a second time: read its row as a warning, and not as its price on 16-bit weights. Afterwards all three answer [ordinary questions](#5.-The-run:-does-the-model-learn-the-task?) with the braces of JSON, unless [answers of their own](#Keep-ordinary-answers) were mixed in.
#
# **What to take, by what was measured here.** Where 16 bytes per weight fit: all weights, at a rate of 3e-5. Else LoRA on all linear layers, four times through the pairs, once at 1e-4, where it forgets little, and once at 3e-4, where it learns faster; where the scores are alike, serve the one that forgets less. ([The script](#A-script-to-copy) is the run at 3e-4.) If it has to go on answering, mix in the model's own answers to ordinary questions: LoRA then learned the task in these steps at 3e-4 only.
#
# **In a hurry?** [The loop](#The-loop) is what trains on this page, and [a script](#A-script-to-copy) does the same with TRL. [The run](#5.-The-run:-does-the-model-learn-the-task?) shows what each way learned and forgot, [three seeds](#Which-rate?-Three-seeds) which rate, rank and layers, [real code](#Does-it-hold-on-real-data?) whether that holds, and [own answers](#Keep-ordinary-answers) how a model goes on answering. [Settings](#Which-settings-matter?) and [cards](#Which-card?) are two tables.
#
# | | |
# |---|---|
# | **You need** | Python, the basics of PyTorch; no GPU, no login |
# | **Time** | ten minutes to a quarter of an hour to run on two CPU cores, by how fast they are in that hour; half an hour to read |
# | **Hardware that has run this** | two CPU cores. An H100 has run an earlier version in the small sizes of a test. No training here is from a GPU; [cards](#Which-card?) quotes steps on an H100 |

# %% [markdown]
# ## Setup
#
# Where the package is missing, as on Colab, this cell fetches it.

# %%
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

started = time.perf_counter()
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
# For a model of your own write its hub id or its folder in the place of `smollm2`, and leave out the line with `CHATML` below: that template is SmolLM2's. A GPU gets more rows and steps: tables, charts and prints are then your own, and the sentences below keep the numbers of the CPU run that the head names.

# %%
cpu = dict(
    model="smollm2",
    rows=3,  # sentences in a step
    steps=96,  # of one pass through the pairs
    script_steps=10,  # of the script
    held_out=64,  # sentences that judge, and are never trained on
    rounds=5,  # of timing
    few=4,  # blocks on which packing is timed
)
more = dict(rows=16, steps=300, held_out=200)
# Continuous integration checks that the code runs, on a model with random weights.
tiny = dict(model="tiny-smollm2", rows=2, steps=4, script_steps=4, held_out=8, rounds=1)
tiny |= dict(few=2)

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
# A program makes the task, so an answer is right or wrong, to the letter. In one half of the sentences the digits of the time are *copied*: 8:45 am is 08:45. In the other half the hour is *changed*: 8:45 pm is 20:45, and 12:05 am is 00:05. A rule that copies the time, and is given day and task, is right in half of them. A model that gets no more has learned the form, and not the clock.
#
# *Held-out* sentences judge a model, and it never trains on them. Their times, and the things to do in them, are in no training sentence. So no answer can be remembered. The forms of the sentences are the same in both parts.

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
# The chat template writes a pair as one text, the tokenizer cuts the text into tokens, and the mask says which tokens are learned.

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
# In TRL, rows with `prompt` and `completion` learn the completion only. Rows of `messages` need `assistant_only_loss=True`, and a chat template with `{% generation %}` marks. TRL adds the marks to templates that it knows. In Unsloth it is `train_on_responses_only`.
#
# ## The loop
#
# All training of this page is one loop: forward, backward, clip, step. A recipe changes what goes in: the model, the batches, the rate or the loss. `autocast` rounds the inputs of the matrix products to 16 bits. The scaler is for fp16 alone, where small gradients would become zero.

# %%
from peft import LoraConfig, get_peft_model
from transformers import get_cosine_schedule_with_warmup

half = here.compute_dtype  # bf16 where it is native, fp16 on a T4, else fp32
scaler = torch.amp.GradScaler(here.device, enabled=half is torch.float16)


def in_half():
    """Matrix products in 16 bits, where this machine has fast ones."""
    return torch.autocast(here.device, dtype=half, enabled=half is not torch.float32)


def own_loss(model, batch):
    """The mean over all labels that are not -100."""
    return model(**batch, use_cache=False).loss


def take_step(model, optimizer, batch, loss_of=own_loss):
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
        yield take_step(model, optimizer, batch, loss_of)
        schedule.step()


def batch_of(rows):
    return collate(rows, device=here.device, **padding)


def in_batches(rows, size):
    return [batch_of(rows[start : start + size]) for start in range(0, len(rows), size)]


# %% [markdown]
# Ten steps of it, with LoRA (section 2), and one held-out question before and after:


# %%
def base(dtype=torch.float32):
    """The pretrained model, each time with the same weights."""
    seed_everything(0)
    return load_model(sizes.model, dtype=dtype)


def adapters():
    linear = dict(target_modules="all-linear", task_type="CAUSAL_LM")
    return LoraConfig(r=4, lora_alpha=32, **linear)


def with_lora():
    return get_peft_model(base(half), adapters())


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


few_pairs = pairs[: sizes.rows * sizes.script_steps]
batches = in_batches(train_rows[: len(few_pairs)], sizes.rows)
question = questions[1]["prompt"]
print(question)
model = with_lora()
print(f"  before: {ask(model, question)[:70]!r} …")
rate = 1e-3  # to see something in ten steps; begin with 3e-4
print("loss", *(f"{loss:.3f}" for loss in train(model, batches, rate)))
print(f"  after:  {ask(model, question)}")
del model

# %% [markdown]
# Ten steps teach the form: the answer is JSON with the right day. Its time is copied, and 11:10 pm is 23:10.
#
# ## A script to copy
#
# TRL's `SFTTrainer` has that loop inside, and checkpoints, callbacks and several GPUs around it. Its settings say what the loop says in code: rate, warmup, cosine, adapters.
#
# ```python
# # pip install "trl>=1.16" "transformers>=5" peft datasets bitsandbytes
# import gc
# import random
# import re
# import torch
# from datasets import Dataset, load_dataset
# from peft import AutoPeftModelForCausalLM, LoraConfig
# from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
# from trl import SFTConfig, SFTTrainer
#
# BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"  # a hub id or a folder, with a chat template
# FOUR_BITS = False  # True is QLoRA
# HALF = torch.bfloat16  # on a T4 torch.float16
#
# tokenizer = AutoTokenizer.from_pretrained(BASE)
# four_bits = BitsAndBytesConfig(
#     load_in_4bit=True,
#     bnb_4bit_quant_type="nf4",
#     bnb_4bit_use_double_quant=True,
#     bnb_4bit_compute_dtype=HALF,
# )
# model = AutoModelForCausalLM.from_pretrained(
#     BASE, dtype=HALF, quantization_config=four_bits if FOUR_BITS else None, device_map="auto"
# )
#
#
# def ask(model, turns, longest=256):  # more tokens than an answer has: one that is cut is wrong
#     asked = tokenizer.apply_chat_template(
#         turns,
#         add_generation_prompt=True,
#         enable_thinking=False,  # where the template knows it
#         return_dict=True,
#         return_tensors="pt",
#     ).to(model.device)
#     written = model.eval().generate(**asked, max_new_tokens=longest, do_sample=False)
#     answer = written[0, asked["input_ids"].shape[1] :]
#     return tokenizer.decode(answer, skip_special_tokens=True).split("</think>")[-1].strip()  # not the thoughts
#
#
# def own_answer(question):  # what the model says before it is trained, in whole sentences
#     turns = [{"role": "user", "content": question}]
#     # About as long as an answer of the task, which a longer one would drown. It teaches
#     # short answers: where long ones matter, allow more tokens, and keep what ended by itself.
#     whole = re.match(r".*\S\S[.!?]\B", ask(model, turns, longest=40), re.DOTALL)
#     said = "" if whole is None or "<think>" in whole[0] else whole[0]
#     return {"prompt": turns, "completion": [{"role": "assistant", "content": said}]}
#
#
# def short_enough(row):  # longer rows would be cut, in silence
#     turns = row["prompt"] + row["completion"]
#     return len(tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]) <= 1024
#
#
# pairs = load_dataset("json", data_files="pairs.jsonl", split="train").filter(short_enough)
# # With rows of one source: split by source. `score` asks each test row, one by one, before and
# # after. Who chooses rate and epochs by it keeps a third part, for one score at the end.
# parts = pairs.train_test_split(test_size=100, seed=0)
# # A question per line, of all kinds that the model must go on answering. 20 of them judge.
# # Without them the model of this page answers everything in the form of the task.
# questions = [line for line in open("ordinary.txt").read().splitlines() if line.strip()]
# random.Random(0).shuffle(questions)
# questions = questions[: 20 + len(parts["train"]) // 3]
# ordinary = [row for row in map(own_answer, questions) if row["completion"][0]["content"]]
# print(len(ordinary), "ordinary answers; wanted", 20 + len(parts["train"]) // 3)
# rows = [{part: row[part] for part in ("prompt", "completion")} for row in parts["train"]]
#
# settings = SFTConfig(
#     output_dir="adapter",
#     learning_rate=3e-4,  # of adapters; with billions of weights 1e-4 to 2e-4
#     lr_scheduler_type="cosine",
#     warmup_steps=0.1,  # of all steps
#     num_train_epochs=4,  # times through all rows
#     per_device_train_batch_size=4,
#     per_device_eval_batch_size=4,  # the default of 8 takes more memory than training
#     max_length=1024,
#     fp16=HALF is torch.float16,  # else TRL takes bf16
#     gradient_checkpointing=False,  # True for 8 billion on 24 GB: each block is computed twice
#     eval_strategy="epoch",
#     report_to="none",  # on a CPU also use_cpu=True
# )
# trainer = SFTTrainer(
#     model,
#     settings,
#     train_dataset=Dataset.from_list(rows + ordinary[20:]).shuffle(seed=0),
#     eval_dataset={"task": parts["test"], "ordinary": Dataset.from_list(ordinary[:20])},
#     processing_class=tokenizer,
#     peft_config=LoraConfig(
#         r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
#     ),  # experts of a mixture are not among these: section 8
# )
#
# for weight in trainer.model.parameters():  # TRL gives QLoRA's adapters 16 bits, which lose updates
#     if weight.requires_grad:
#         weight.data = weight.data.float()
#
# labels = next(iter(trainer.get_train_dataloader()))["labels"][0]
# print(tokenizer.decode(labels[labels != -100]))  # the answer and its end mark, perhaps a line break behind it, and nothing else
#
#
# def score(model):
#     answers = [ask(model, row["prompt"]) for row in parts["test"]]
#     wanted = [row["completion"][0]["content"].strip() for row in parts["test"]]
#     return f"{sum(a == b for a, b in zip(answers, wanted))} of {len(wanted)}"
#
#
# print("right before:", score(trainer.model))
# print("losses before:", trainer.evaluate())  # of the task, and of ordinary answers
# trainer.train()
# trainer.save_model()
#
# # In a new process, or after the card is free: the model that is served, judged.
# del trainer, model, weight
# gc.collect()  # a trainer refers to itself
# torch.cuda.empty_cache()
# served = AutoPeftModelForCausalLM.from_pretrained(
#     "adapter",
#     dtype=HALF,
#     quantization_config=four_bits if FOUR_BITS else None,  # another base is another model: section 6
#     device_map="auto",
# )
# if not FOUR_BITS:
#     served = served.merge_and_unload()  # the adapter is added to the weights
# print("right after:", score(served))
# for row in ordinary[:5]:
#     print(row["prompt"][0]["content"], ask(served, row["prompt"]), sep="\n  ")
# if not FOUR_BITS:  # else "adapter" is served, on the four-bit base
#     served.save_pretrained("mine")
#     tokenizer.save_pretrained("mine")
# ```
#
# On a CPU these lines ran from the first to the last, on fewer pairs and with `use_cpu=True`; no GPU has run them. `ordinary.txt` has one question per line, a third as many as there are pairs, and 20 more, of the kinds that your users also ask; the model answers them itself before it trains ([why](#Keep-ordinary-answers)). To try it, write those of this page: `open("ordinary.txt", "w").write("\n".join(ordinary_questions()))`, from `recipes_lib.core.data.ordinary_questions`. A line of `pairs.jsonl` is `{"prompt": [{"role": "user", "content": "…"}], "completion": [{"role": "assistant", "content": "…"}]}`: lists of messages, because plain strings get no chat template. The pairs of this page as such a file: `Dataset.from_list([as_messages(pair) for pair in pairs]).to_json("pairs.jsonl")`, with the names of the next cells. `score` counts answers that are right to the letter. For free text compare `eval_loss`, and read 30 answers side by side. *All weights*: leave `peft_config` out, load in `torch.float32`, take a rate of 3e-5 (with billions of weights 1e-5), and load with `AutoModelForCausalLM`, without `merge_and_unload`.
#
# The calls of the training run here, for four steps with the loop's larger rate.

# %%
from recipes_lib.fine_tuning.adapter_files import save_merged


def as_messages(pair):
    """Lists of messages get the chat template; plain strings would get none."""
    question = {"role": "user", "content": pair["prompt"]}
    answer = {"role": "assistant", "content": pair["completion"]}
    return {"prompt": [question], "completion": [answer]}


# A folder with a model, as one of the hub would be.
NAME = str(folder / "base")  # or "HuggingFaceTB/SmolLM2-135M-Instruct"
save_merged(base(half), NAME, tokenizer=tokenizer, dtype=half)

# %%
from datasets import Dataset, disable_progress_bars
from trl import SFTConfig, SFTTrainer

disable_progress_bars()
of_this_page = dict(
    output_dir=str(folder / "trl"),
    use_cpu=here.device == "cpu",
    bf16=half is torch.bfloat16,
    fp16=half is torch.float16,
    model_init_kwargs={"dtype": str(half).removeprefix("torch.")},
    save_strategy="no",
    report_to="none",
    logging_steps=1,
    disable_tqdm=True,
    train_sampling_strategy="sequential",  # to compare with our loop
)
settings = SFTConfig(
    learning_rate=rate,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    num_train_epochs=1,
    per_device_train_batch_size=sizes.rows,
    gradient_checkpointing=False,
    eval_strategy="epoch",
    **of_this_page,
)
trainer = SFTTrainer(
    NAME,
    settings,
    train_dataset=Dataset.from_list(list(map(as_messages, pairs[: 4 * sizes.rows]))),
    eval_dataset=Dataset.from_list(list(map(as_messages, to_watch[:8]))),
    peft_config=adapters(),
)

# %%
import trl
from peft import get_peft_model_state_dict, set_peft_model_state_dict

state = get_peft_model_state_dict(trainer.model)
begun = {name: tensor.clone() for name, tensor in state.items()}
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
history = trainer.state.log_history
their_losses = [entry["loss"] for entry in history if "loss" in entry]

ours = with_lora()
set_peft_model_state_dict(ours, begun)  # the adapters that the trainer began with
their_batches = in_batches(list(trainer.train_dataset), sizes.rows)
our_losses = list(train(ours, their_batches, rate))
apart = max(abs(a - b) for a, b in zip(their_losses, our_losses))
print(f"TRL {trl.__version__:<8}", *(f"{loss:.3f}" for loss in their_losses))
print("our loop    ", *(f"{loss:.3f}" for loss in our_losses))
print(f"they are {apart:.3f} apart at most")
print("held-out loss", *(f"{e['eval_loss']:.3f}" for e in history if "eval_loss" in e))
del trainer, ours

# %% [markdown]
# On the same rows, TRL's, the losses are the same, to a hundredth. (TRL also learns the line break that this template has behind the end mark. Our rows leave it out, so their losses are higher than these.) What do more steps bring, and what do they take?
#
# ## What a step needs
#
# A weight that trains has 4 bytes, and AdamW keeps two more numbers of 4 bytes for it, its *states*. A weight that is frozen has no states and no gradient. In full fine-tuning nothing is frozen.
#
# $$\text{bytes} = b \cdot \text{frozen} + (4 + 8) \cdot \text{trained} + \max(\text{activations} + \text{logits},\ 4 \cdot \text{trained})$$
#
# Here *b* is the size of a frozen weight: 2 in 16 bits, and 0.52 in four bits, where 64 weights share a scale. *Activations* are what forward keeps for backward. *Logits* are the scores of all words of the vocabulary for the next token: 4 bytes for each word at each token, and as much for their gradient. Both go while the gradients of the weights arrive, so the peak has one or the other.
#
# A trained weight costs six operations per token: two in forward, two for the gradient of its input, two for its own. A frozen one costs four. So a step of LoRA should take a little more than 4/6 of the time of full fine-tuning.

# %%
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.fine_tuning.lora import lora_parameters

batches = in_batches(train_rows, sizes.rows)
compared = batches[0]  # the batch whose step is measured
tokens = compared["input_ids"].numel()
shapes = load_model(sizes.model)
weights = shapes.num_parameters()
in_blocks = sum(weight.numel() for weight in decoder_blocks(shapes).parameters())
in_adapters = lora_parameters(shapes, rank=4)
kept = {
    "full fine-tuning": (4 + 8) * weights,
    "LoRA": 2 * weights + (4 + 8) * in_adapters,
    "QLoRA": 0.52 * in_blocks + 2 * (weights - in_blocks) + (4 + 8) * in_adapters,
}
print(f"{weights:,} weights, {in_blocks:,} of them in blocks; adapters {in_adapters:,}")
print(f"adapters of rank 16: {lora_parameters(shapes, rank=16):,};", end=" ")
of_attention = lora_parameters(shapes, rank=16, target_modules="attention")
print(f"on attention alone: {of_attention:,}")
for name, size in kept.items():
    print(f"{name:<18}{size / 2**20:7,.0f} MiB stay between two steps")
table_of_logits = 4 * tokens * shapes.config.vocab_size
print(f"one table of logits {table_of_logits / 2**20:6,.0f} MiB")
del shapes

# %% [markdown]
# ## 1. Is it better, or is it luck?
#
# Two numbers judge a model. The *score* counts the answers that are right to the letter. The *held-out loss* is the cross-entropy on new sentences, per token of the answers. Its unit is the *nat*. Other sentences would give other numbers, so each has an interval of 95 %. Two models are compared on the *same* sentences: what makes a sentence hard for both is then gone. The interval of a difference comes from drawing the sentences anew, with replacement, 2,000 times.
#
# A model that learns a task can forget what it knew. So an examination also asks how well it predicts text of two other kinds, 32 pieces of 64 tokens of each: the source code of Python, and the English prose of its manual. *Perplexity*, e to the loss per token, says among how many tokens the model hesitates. And it puts 36 ordinary questions: how many are answered in the braces of the task, and how many of 12 capitals are named?

# %%
import math
import pydoc_data.topics
from types import SimpleNamespace

from recipes_lib.core.data.corpus import load_text
from recipes_lib.core.data.losses_and_answers import generate_answers, text_windows
from recipes_lib.core.data.ordinary_questions import (
    capitals_named,
    ordinary_questions,
    whole_sentences,
)
from recipes_lib.fine_tuning.honest_evaluation import (
    compare,
    held_out_losses,
    plain_paired_bootstrap,
    score_interval,
)

wanted = [pair["completion"] for pair in questions]
ordinary = ordinary_questions(split="validation")
changed = torch.tensor(changes_hour)
manual = "\n\n".join(pydoc_data.topics.topics.values())
other_texts = {
    kind: text_windows(tokenizer, text=text, context=64, windows=32)
    for kind, text in {
        "source code": load_text(split="validation"),
        "prose": manual,
    }.items()
}


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
        other={kind: losses_of(model, rows) for kind, rows in other_texts.items()},
        ordinary=write(model, ordinary),
    )


def marks(right):
    """How many are right, with the interval, and how many of the changed hours."""
    low, high = score_interval(right)
    return f"{right.sum():.0f} ({low:.0f} to {high:.0f}) | {right[changed].sum():.0f}"


# %% [markdown]
# A prompt with examples costs no training, and neither does the rule that copies. They are what fine-tuning has to beat. **Guess first:** how many answers are right before training, if the question stands alone, and if four examples stand before it?

# %%
model = base(half)  # as the others will be judged
before = examine(model)

# The form in words, then examples as earlier turns, two of each half.
form = "Answer with JSON: the day, the time as HH:MM of 24 hours, and what to do."
examples = [{"role": "system", "content": form}]
for turns in map(as_messages, pairs[:4]):
    examples += turns["prompt"] + turns["completion"]
asked = []
for turns in map(as_messages, questions):
    asked.append(turns | {"prompt": examples + turns["prompt"]})
answers = write(model, load_instructions(tokenizer, dataset=asked))

prompted = are_right(answers)
rule = 1 - changed.double()  # right where the digits are copied
print(f"right of {len(wanted)} (interval) | of the {sum(changes_hour)} changed hours")
print("copying the digits:", marks(rule))
print("question alone:    ", marks(before.right))
print("after 4 examples:  ", marks(prompted))
print(f"one of them: {answers[0]}\nwanted:      {wanted[0]}")
for kind, found in before.other.items():
    print(f"perplexity of {kind} {math.exp(found.mean):.1f}")
del model

# %% [markdown]
# The question alone gets 0 of 64 answers, and the prompt with examples 1. (One prompt was tried, on a small model. With a large one, try prompts before any training.)
#
# ## 2. LoRA: train a small correction
#
# The model is frozen. Beside each linear layer two thin matrices train, and their product is added to what the layer gives.
#
# ```text
# x --+------ W ------+--> y        W  [out, in]  frozen
#     '-- A -- r -- B-'             A  [r, in],  B  [out, r]  train
# ```
#
# *B* begins as zero, so training begins at the pretrained model. The *rank* r is the width of the correction: how much it can learn. *Alpha* scales it by alpha / r. Here they are 4 and 32, [three seeds](#Which-rate?-Three-seeds) found rank 4 as good as 16. The line to write is `get_peft_model(model, LoraConfig(…))`, as in `with_lora` above.
#
# `climb` predicts the bytes of a step from tensors that have a shape and no numbers. Then it counts those of a real step, and adds a row to a table. Both count tensors only: the process takes more. *Change* is against full fine-tuning. The rate is zero, so *loss* is that of the model before training. **Guess first:** by how much does LoRA lower the peak?

# %%
from functools import partial

from recipes_lib.fine_tuning.lora import plain_lora
from recipes_lib.report.ladders.memory import MemoryLadder
from recipes_lib.report.show import show

show(plain_lora)
gc.freeze()  # to count bytes, Python looks at all objects: not at those of the imports
ladder = MemoryLadder("05_fine_tuning_pretrained_models")


def climb(name, make, loss_of=own_loss):
    def build():
        model = make().train()
        step = partial(take_step, batch=compared, loss_of=loss_of)
        return model, optimizer_of(model, 0.0), step

    ladder.climb(name, build)


climb("full fine-tuning", base)
climb("LoRA", with_lora)

# %% [markdown]
# LoRA lowers the peak by 78 %, from 2,161 to 481 MiB; 252 of these 1,680 MiB are the frozen weights, which have 16 bits in place of 32. Each row says when its peak is, and what is there at that moment. *Other* is the rest. In full fine-tuning it is a second gradient of the embedding, which is the output layer, too; in LoRA it is two tables of logits. The equation has those logits, and leaves out the embedding's second gradient. Add it, and the sum agrees with the count. Full fine-tuning: 1,539 that stay + 513 of gradients + 108 of the embedding = 2,160 MiB, and 2,161 are counted. LoRA: 271 that stay + 152 of activations + 59 of logits = 482 MiB, and 481 are counted.
#
# ## 3. QLoRA: the frozen weights in four bits
#
# 64 weights share a scale, and each becomes one of 16 levels. A layer unpacks its weights when it is called, and multiplies in 16 bits, as LoRA does here. Below are the lines of transformers, and `apply_qlora` of this repository, which starts from a model in memory.

# %%
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from recipes_lib.fine_tuning.qlora import apply_qlora

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


def with_qlora():
    return apply_qlora(base(half), rank=4, alpha=32, compute_dtype=half)


ours = with_qlora()
one_row = compared["input_ids"][:1]
assert torch.equal(theirs.train()(one_row).logits, ours.train()(one_row).logits)
print("loaded by transformers, and rounded by apply_qlora: the same logits")
rounded = {kind: losses_of(ours, rows) for kind, rows in other_texts.items()}
del theirs, ours

climb("QLoRA", with_qlora)

# %% [markdown]
# 121 that stay + 152 + 59 = 332 MiB, and 331 are counted. Before training, the loss on this batch is 0.287 nats above that of full fine-tuning. LoRA's is no higher. The difference is the price of a second rounding, on three rows. Use four bits only where the 16-bit weights do not fit (a caution: no weights in 16 bits were rounded here).
#
# `prepare_model_for_kbit_training` is not called: it turns checkpointing on (blocks are [computed twice](#Which-card?)), and makes the embedding fp32, which doubles its bytes. `apply_qlora` also closes a trap of bitsandbytes on CPUs ([TRAPS.md](../TRAPS.md)).
#
# ## 4. Logits of the answers only
#
# Two tables of logits are 59 of the 331 MiB now, and about half of them belong to tokens without a label. So ask for logits only at the places where some row of the batch has a label.

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

# %% [markdown]
# That is 41 MiB, 12 % less than QLoRA: 27 of the tables of logits, 59 → 32, and 14 of what is counted as activations. The tables do not halve, for answers begin at different places in the rows. In TRL it is `SFTConfig(loss_type="nll")`, its default. On a GPU that one drops the tokens without a label, and takes the rest in parts.
#
# *Everything combined* is QLoRA with this loss. Now the steps are timed in turns, and each time is that of the fastest turn, beside the range of the five turns; × divides the fastest by the fastest, and its range is that of the ratios turn by turn (in the first row, of its own turns):

# %%
ladder.take_turns(sizes.rounds)
errors = [abs(row.prediction_error) for row in ladder.rows]
ladder

# %%
ladder.chart()

# %% [markdown]
# By the count LoRA takes 4/6 of the time, and 1 % more for the adapters. Here it saves less than that. QLoRA also unpacks all weights in each step. *Everything combined* takes the least memory, and no less time than QLoRA.
#
# ## 5. The run: does the model learn the task?
#
# All ways see the same 288 pairs twice, in the same order, with the loss of section 4. Rates are the best [below](#Which-rate?-Three-seeds), on 480 pairs: 3e-5 (two tried) for all weights; for LoRA 3e-4 (three tried), ten times that, which *LoRA Without Regret* (Thinking Machines, 2025) advises. QLoRA takes LoRA's. The same sentences chose and judge, so the best rows are a little too good. An examination judges the model that will be served, in 16 bits: adapters are added to the weights first. **Guess first:** which ends best, and which forgets least?

# %%
from recipes_lib.fine_tuning.qlora import merge_qlora

ways = {  # the model, the rate, and how often it sees each pair
    "full fine-tuning": (base, 3e-5, 2),
    "LoRA": (with_lora, 3e-4, 2),
    "QLoRA": (with_qlora, 3e-4, 2),
}


def to_serve(model, name):
    """The model as it will be served, in its old shape: W becomes W + B A · alpha / r."""
    if name == "full fine-tuning":
        return model.to(half)
    # The adapters alone.
    model.save_pretrained(folder / name, save_embedding_layers=False)
    if name == "QLoRA":
        return merge_qlora(model)
    return model.merge_and_unload()


after = {}
losses = {}
for name, (make, rate, passes) in ways.items():
    model = make()
    losses[name] = list(train(model, passes * batches, rate, answer_loss))
    model = to_serve(model, name)
    after[name] = examine(model)
    if name == "LoRA":
        served = model
del model

for number in (0, 1, 3):  # in the first the time is copied, in the others it changes
    print(questions[number]["prompt"])
    print(f"  before: {before.answers[number][:60]!r} …")
    for name, found in after.items():
        print(f"  {name}: {found.answers[number]}")

# %%
from recipes_lib.report.charts.lines import lines

WINDOW = min(10, sizes.steps)  # steps: single batches are easy or hard
curves = {}
for name in ("full fine-tuning", "LoRA", "QLoRA"):
    means = torch.tensor(losses[name]).unfold(0, WINDOW, 1).mean(1).tolist()
    curves[name] = list(enumerate(means, start=WINDOW))
lines(
    curves,
    title="First the form is learned, then the clock",
    dots=False,
    xlabel="step",
    ylabel="nats per token, mean of ten steps",
    yscale="log",
    source="one run each, the same pairs in the same order",
)

# %%
from IPython.display import display


def forgotten(other):
    """By which factor the perplexity of each kind rises, with its interval."""
    cells = []
    for kind, losses in other.items():
        change = compare(before.other[kind], losses)
        low, high = math.exp(change.low), math.exp(change.high)
        cells.append(f"{math.exp(change.difference):.2f} ({low:.2f} to {high:.2f})")
    return " | ".join(cells)


def held_out_loss(losses):
    low, high = losses.interval()
    return f"{losses.mean:.3f} ({low:.3f} to {high:.3f})"


table = (
    f"| way | rate | steps | right of {len(wanted)} (interval) "
    f"| of the {sum(changes_hour)} changed hours | held-out loss (interval) "
    "| perplexity of source code, × before (interval) | of prose, × before |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|\n"
    f"| copying the digits | | | {marks(rule)} | | | |\n"
    f"| before | | | {marks(before.right)} | {held_out_loss(before.losses)} | 1 | 1 |\n"
)
for name, found in after.items():
    table += (
        f"| {name} | {ways[name][1]:.0e} | {len(losses[name])} | {marks(found.right)} "
        f"| {held_out_loss(found.losses)} | {forgotten(found.other)} |\n"
    )
table += f"| four bits, untrained | | | | | | {forgotten(rounded)} |\n"
display({"text/markdown": table, "text/plain": table}, raw=True)


def more_right(first, second):
    """By how many percentage points more answers are right, with the paired interval."""
    low, high = plain_paired_bootstrap(first, second, torch.ones(len(wanted)))
    difference = (second - first).mean()
    return f"{100 * difference:+.0f} points ({100 * low:+.0f} to {100 * high:+.0f})"


pairs_of_ways = [
    ("full fine-tuning", "LoRA"),
    ("LoRA", "QLoRA"),
]
for one, other in pairs_of_ways:
    print(f"{one} → {other}: right {more_right(after[one].right, after[other].right)}")
    for kind in other_texts:
        print(f"    {kind} {compare(after[one].other[kind], after[other].other[kind])}")

# %% [markdown]
# **Guess:** what does a model that learned to write reminders answer to an ordinary question?


# %%
def show_ordinary(answers, name):
    """How many are in braces, how many capitals are named, and three of them."""
    braces = sum(answer.startswith("{") for answer in answers)
    named = capitals_named(answers)
    print(f"{name}: {braces} of {len(ordinary)} in braces, {named} of 12 capitals")
    for number in (0, 12, 24):  # one of each kind
        print(f"  {ordinary[number]}  {' '.join(answers[number].split())[:80]}")
    return {"braces": braces, "capitals": named}


answered = {
    name: show_ordinary(found.ordinary, name)
    for name, found in {"before": before, **after}.items()
}

# %% [markdown]
# **The answer.** All 36 answers of all three models are in braces, and of 12 capitals they name one at most, where the pretrained model names 10. After full fine-tuning, too, whose perplexity of other text hardly rose: × 1.04 says that it still predicts source code and prose, and not that it still answers. 192 steps taught it that an answer is JSON. A model for one task may do that. For one that has to do more, [a third as many answers of its own](#Keep-ordinary-answers) keep it answering in words.
#
# **Guess:** which part of an answer is wrong where it is not right?

# %%
import json
from collections import Counter


def parts_of(answer):
    """What an answer says; nothing, where it has another form."""
    try:
        fields = json.loads(answer)
        hour, minutes = fields["time"].split(":")
        return dict(day=fields["day"], hour=hour, minutes=minutes, task=fields["do"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


wrong_parts = {}
for name, found in after.items():
    wrong = [number for number in range(len(wanted)) if not found.right[number]]
    counts = Counter()
    for number in wrong:
        said, right = parts_of(found.answers[number]), parts_of(wanted[number])
        counts.update(part for part in right if said.get(part) != right[part])
    wrong_parts[name] = dict(counts)
    print(f"{name}: {len(wrong)} wrong;", end=" ")
    print(*[f"{part} {count}" for part, count in counts.most_common()], sep=", ")
    for number in wrong[:3]:
        print(f"  {questions[number]['prompt']}\n    {found.answers[number]}")

# %% [markdown]
# **What was learned: the form by all three, the clock by all weights and, with this seed, by LoRA.** The rule that copies gets none of the changed hours. Full fine-tuning has all 32, LoRA 31 and QLoRA 9. What is wrong is the hour: in each of LoRA's 4 wrong answers, as 10:20 am → 00:20, and in 24 of QLoRA's 29. In the picture the loss falls to about 0.1 in thirty to forty steps: that is the form. The clock is what comes after. The held-out losses have the order of the ways, and do not say how many answers are right: judge by the score.
#
# **What was forgotten**, besides ordinary answers: the perplexity of source code and of prose is × 1.04 after full fine-tuning, × 1.43 and × 1.54 after LoRA, and × 1.78 and × 2.09 after QLoRA, of which the rounding alone is × 1.26 and × 1.34. A frozen base does not protect what the model knew, for the adapters act on all text. Text that the model must keep can be mixed in: so [source code improved](#Which-rate?-Three-seeds).
#
# **LoRA or all weights?** Here all weights, where they fit.
#
# - They learn earlier: with three seeds 61 to 63 are right after these 192 steps, and 36, 51 and 60 with LoRA. After 384 steps LoRA has 64 and 63 ([table](#Keep-ordinary-answers)). So where LoRA's score is low, train longer before you leave it.
# - They forget less than LoRA at 3e-4. LoRA at 1e-4 forgets little, too, and learns more slowly: after 240 steps it gets fewer right than the rule, and after 384 it has 58 and 57, with × 1.2 for both kinds of text ([table](#Keep-ordinary-answers)). Of [another task](#Does-it-hold-on-real-data?) it had hardly fewer right.
# - LoRA saves memory, 78 % of the peak, and a part of the time of a step.
# - Biderman et al. found the other order with 7 billion weights, on code and mathematics: LoRA learns less and forgets less. So try both, each at a rate of its own.
#
# **QLoRA** has 35 right, where the rule has 32; of the 32 that copy 26 are right. With two other seeds it has 26 and 34: hardly the rule. Its base was rounded twice here, so this is not its price on 16-bit weights.
#
# **How far to trust it.** A small model and a made task ([one from real code](#Does-it-hold-on-real-data?) is below); three seeds, which decide the order of the pairs and the numbers that adapters begin with. 288 pairs are few for LoRA in 192 steps: with [480](#Which-rate?-Three-seeds) and 240 steps three seeds have 62 to 64. The intervals say what other sentences would show; and the sentences share four things to do, so they are too narrow. 32 pieces of each kind of text stand for no conversation and no long text.
#
# ### Which rate? Three seeds
#
# Each way with three seeds, all weights and LoRA at further rates, on 480 pairs, four in a step. Adapters have rank 16 unless a row says otherwise. A seed decides the order of the pairs, and the numbers that adapters begin with. Three seeds show a direction, and are no verdict:
#
# <!-- numbers:fine_tuning_seeds-05 -->
# | way | rate | steps | right with each seed, of 64 | held-out loss | perplexity of source code, × before |
# |---|--:|--:|--:|--:|--:|
# | before | | | 0 | 2.326 | 1 |
# | full fine-tuning | 1e-04 | 120 | 58 64 58 | 0.013 0.003 0.011 | 1.39 1.33 1.28 |
# | full fine-tuning, small rate | 3e-05 | 240 | 63 63 62 | 0.004 0.003 0.003 | 1.05 1.05 1.04 |
# | LoRA | 3e-04 | 240 | 63 61 64 | 0.006 0.012 0.007 | 1.47 1.52 1.56 |
# | LoRA, attention alone | 3e-04 | 240 | 42 40 45 | 0.050 0.044 0.044 | 1.39 1.39 1.40 |
# | LoRA, large rate | 1e-03 | 120 | 49 29 54 | 0.032 0.051 0.033 | 9.70 4.94 7.55 |
# | LoRA, longer | 3e-04 | 480 | 62 64 64 | 0.003 0.001 0.001 | 1.40 1.44 1.41 |
# | LoRA, rank 4 | 3e-04 | 240 | 62 64 63 | 0.008 0.003 0.005 | 1.51 1.62 1.50 |
# | LoRA, rank 64 | 3e-04 | 240 | 58 56 61 | 0.013 0.024 0.012 | 1.42 1.42 1.45 |
# | LoRA, small rate | 1e-04 | 240 | 25 26 28 | 0.065 0.065 0.062 | 1.09 1.09 1.09 |
# | LoRA, with source code | 3e-04 | 240 | 48 36 51 | 0.035 0.052 0.031 | 0.78 0.77 0.78 |
# | LoRA, with source code, longer | 3e-04 | 480 | 62 62 63 | 0.004 0.004 0.003 | 0.75 0.75 0.75 |
# | QLoRA | 3e-04 | 240 | 56 41 48 | 0.032 0.060 0.045 | 2.42 1.97 2.03 |
# | QLoRA, the rest in 32 bits | 3e-04 | 240 | 56 46 50 | 0.030 0.057 0.046 | 2.45 2.00 2.12 |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-27. The task of notebook 05, with 480 pairs. The seeds are 1, 2, 3, in this order in each cell.*
# <!-- end -->
#
# - *All weights* at 3e-5, twice through the pairs, have 62 or 63 right each time, and keep the source code. At 1e-4, once through, they spread from 58 to 64 and forget more. (The largest rate of each way ran once through the pairs, and the others twice, so rate and steps are not told apart.)
# - *LoRA* at 3e-4 has as many, 61 to 64, and forgets far more. A third of that rate forgets little, and gets fewer right than the rule after 240 steps; [after 384 of three pairs](#Keep-ordinary-answers) it has learned the clock, too. At 1e-3, once through, the perplexity is 5 to 10 times as large, and fewer answers are right.
# - *LoRA, with source code* adds 64 tokens of it to the four pairs of each step, which have about 100 learned tokens. The modules are not those that judge. (The loss is a mean over tokens: long rows of text would drown the task.) Then its perplexity ends below that of the start: the model has trained on that kind of text. Prose was not looked at in these runs. In as many steps it learns less, 36 to 51 right; in twice as many 62 or 63, as without it. LoRA alone, for as long, has 62 to 64 right and × 1.4. (A row of text has all its tokens as labels, and is no pair: `trained` in [fine_tuning_seeds.py](../benchmarks/fine_tuning_seeds.py).)
# - *Rank*: 4 has 62 to 64 right, as many as 16, with a quarter of the adapters' numbers; 64 has 56 to 61 in as many steps. Alpha stays 32, so what the adapters add is scaled by 8, 2 and 0.5: that may be what the rank of 64 misses. So this page takes 4.
# - *Attention alone* (rank 16): where the MLPs have no adapters, 40 to 45 are right in place of 61 to 64, though these adapters have more numbers than those of rank 4, 1,843,200 and 1,221,120 (section *What a step needs*). They forget hardly less, × 1.4. So put adapters on all linear layers, as *LoRA Without Regret* found, too.
# - *QLoRA* spreads widely, 41 to 56. Embedding and norms in 32 bits, as peft's `prepare_model_for_kbit_training` leaves them, bring 0 to 5 answers.
#
# This table judges full fine-tuning in 32 bits; the run above judged it in 16.
#
# ### Does it hold on real data?
#
# A program made the reminders. Here is a task from real code, in the same way: the source and docstring of a short function of the standard library, its name blotted out wherever it stands, and the answer is that name.
#
# <!-- numbers:function_names-05 -->
# | way | rate | steps | right with each seed, of 200 | held-out loss | perplexity of source code, × before | of prose, × before |
# |---|--:|--:|--:|--:|--:|--:|
# | a rule: the docstring's first word | | | 19 | | | |
# | before | | | 0 | 7.254 | 1 | 1 |
# | full fine-tuning | 3e-05 | 240 | 27 29 31 | 2.186 2.184 2.138 | 1.07 1.06 1.06 | 1.04 1.04 1.05 |
# | LoRA | 3e-04 | 240 | 20 27 26 | 2.131 2.125 2.116 | 1.27 1.23 1.25 | 1.19 1.17 1.19 |
# | LoRA, small rate | 1e-04 | 240 | 22 24 23 | 2.221 2.212 2.222 | 1.08 1.09 1.07 | 1.03 1.05 1.04 |
#
# *Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-28. Names of short functions of Python's standard library, from 480 of them; adapters have rank 4. No module is in training and in the judgement. The seeds are 1, 2, 3, in this order in each cell.*
# <!-- end -->
#
# - *What is learned.* 20 to 31 of 200 names are right, to the letter, where the docstring's first word is right in 19. All weights have the most with each seed, and LoRA at 3e-4 has the lowest loss with each seed; one such count has an interval of about 9 to each side. So the ways are not told apart. 480 pairs teach the form here, and little of the content: a task with so many answers needs more pairs or a larger model, and its score says so before any user does.
# - *What is forgotten* has the order of the reminders: × 1.04 to 1.07 with all weights, and × 1.17 to 1.27 with LoRA at 3e-4, less than there. (Ordinary questions were not put to these models.)
# - *The rate.* LoRA at 1e-4 has 22 to 24 names, not told apart from those at 3e-4, and a loss that is about 0.1 higher. It forgets as little as all weights do, × 1.03 to 1.09. With the reminders it had not learned the clock by then. So try both rates, and where the scores are alike take what forgets less.
#
# ### Keep ordinary answers
#
# The same run can keep them, and no data of others are needed: put ordinary questions to the model *before* training, and mix its own answers in. They are pairs like all others, so the loop and TRL take them as they are. Three rules. Ask in many forms: other forms judge. Take answers about as long as those of the task: the loss is a mean over tokens, and long rows would drown it. Take whole sentences: a cut one would be learned with an end mark in it. (Whole sentences of 40 tokens teach short answers, and a list of three is cut after its first item, as below. Where that matters, allow more tokens and keep the answers that ended by themselves.)
#
# First in small: the pairs of [the ten steps](#The-loop), and a third as many answers of its own, in TRL.

# %%
base_model = base(half)
asked = ordinary_questions()[: len(few_pairs) // 3]
own = []
for question, answer in zip(asked, map(whole_sentences, write(base_model, asked))):
    if answer:
        own.append({"prompt": question, "completion": answer})
del base_model
for pair in own[:3]:
    print(pair["prompt"], pair["completion"], sep="\n  ")

trainer = SFTTrainer(
    NAME,
    settings,
    train_dataset=Dataset.from_list(list(map(as_messages, few_pairs + own))).shuffle(
        seed=0
    ),
    eval_dataset=Dataset.from_list(list(map(as_messages, to_watch[:8]))),
    peft_config=adapters(),
)
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
print(f"\n{questions[1]['prompt']}\n  {ask(trainer.model, questions[1]['prompt'])}")
few_steps = show_ordinary(write(trainer.model, ordinary), "after a few steps")
del trainer

# %% [markdown]
# After one pass through these few rows 19 of 36 answers are in words (they begin with no brace), and 2 of 12 capitals are named. The reminder is JSON, and its clock is not learned yet, as after the ten steps.
#
# Then in full: the run of this page with two other seeds, and in each step one answer of its own beside the three pairs (`python -m benchmarks.own_answers`).
#
# <!-- numbers:own_answers-05 -->
# | way | steps | right with each seed, of 64 | ordinary questions answered in braces, of 36 | capitals named, of 12 | perplexity of source code, × before | of prose, × before |
# |---|--:|--:|--:|--:|--:|--:|
# | before | | 0 | 0 | 10 | 1 | 1 |
# | full fine-tuning | 192 | 62 61 | 35 35 | 0 1 | 1.05 1.05 | 1.04 1.04 |
# | full fine-tuning, with own answers | 192 | 48 47 | 0 0 | 12 12 | 1.06 1.06 | 1.09 1.09 |
# | full fine-tuning, with own answers, longer | 384 | 62 63 | 0 0 | 11 11 | 1.11 1.10 | 1.18 1.18 |
# | LoRA | 192 | 36 51 | 36 36 | 1 3 | 1.42 1.36 | 1.50 1.45 |
# | LoRA, longer | 384 | 64 63 | 36 36 | 1 3 | 1.49 1.41 | 1.56 1.53 |
# | LoRA, small rate, longer | 384 | 58 57 | 35 36 | 1 2 | 1.17 1.16 | 1.15 1.16 |
# | LoRA, small rate, with own answers, longer | 384 | 38 31 | 0 0 | 11 11 | 1.20 1.19 | 1.27 1.27 |
# | LoRA, with own answers | 192 | 27 30 | 0 0 | 11 11 | 1.26 1.22 | 1.33 1.31 |
# | LoRA, with own answers, longer | 384 | 58 61 | 0 0 | 8 9 | 1.48 1.50 | 1.65 1.72 |
# | QLoRA | 192 | 26 34 | 36 36 | 0 0 | 1.80 1.74 | 2.11 2.02 |
#
# *Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-28. The task of notebook 05, with 288 pairs, 3 in a step; adapters have rank 4. *With own answers*: each step also has an answer that the model gave to an ordinary question before it was trained. Other questions judge. The seeds are 1, 2, in this order in each cell.*
# <!-- end -->
#
# - *Ordinary answers.* Without them 35 or 36 of 36 are in braces, after all weights and LoRA, and at most 3 capitals are named. With them none is in braces, and 8 to 12 capitals are named, where the pretrained model names 10. No form and no thing of these questions was in training. How good the sentences are was not judged: read some.
# - *The task* is learned later. In as many steps all weights have 48 and 47 right in place of 62 and 61, LoRA 27 and 30 in place of 36 and 51. In twice the steps all weights have 62 and 63, and LoRA 58 and 61, where it has 64 and 63 without them. So plan twice the steps.
# - *The rate*: LoRA at 1e-4 without own answers has 58 and 57 right after 384 steps, and the perplexity of both kinds of text is × 1.2 in place of × 1.4 to 1.6. It answers in braces all the same. With own answers, in as many steps, it has 38 and 31 right, and × 1.2 and × 1.3: this rate needs more steps than these for both.
# - *Other text*: after twice the steps LoRA's perplexity is × 1.5 and × 1.7, as without them or a little more; that of all weights is × 1.1 and × 1.2, more than the × 1.05 and × 1.04 of half the steps without them. What must be predicted, and not answered, has to be mixed in as text.
#
# ## 6. Save, serve
#
# An adapter's file holds the small matrices, and belongs to one base. A *merge* adds B A to W: the model has its old shape, any engine runs it, and nothing of LoRA is left to slow an answer. Is the model from the files still the one that was judged?

# %%
from peft import PeftModel

size = (folder / "LoRA" / "adapter_model.safetensors").stat().st_size
print(f"an adapter file has {size / 2**20:.0f} MiB")
served.save_pretrained(folder / "mine")
tokenizer.save_pretrained(folder / "mine")
again = AutoModelForCausalLM.from_pretrained(folder / "mine", dtype=half)
loaded = again.state_dict()
for name, tensor in served.state_dict().items():
    assert torch.equal(tensor.cpu(), loaded[name])
print("LoRA, merged, saved and loaded: the same weights, bit by bit")

elsewhere = PeftModel.from_pretrained(base(half), folder / "QLoRA").merge_and_unload()
moved = are_right(write(elsewhere.to(here.device), held_out))
print(f"QLoRA's adapter, where it was trained:   {marks(after['QLoRA'].right)}")
print(f"QLoRA's adapter on the 16-bit base:      {marks(moved)}")
print(f"    {more_right(after['QLoRA'].right, moved)}")
del served, again, loaded, elsewhere

# %% [markdown]
# The weights that were loaded are those that were judged. QLoRA's adapter beside the 16-bit weights is another model: it learned beside the rounded ones. Here it gets 24 answers for 35, and 2 changed hours for 9. Examine what you deploy, by its answers.
#
# A wrong time is valid JSON, so no parser catches it. Here a rule can, because a program made the task: beside the sentence the minutes are the same, the hour is the same modulo 12, and it is 12 or more where the sentence says *pm*, and less than 12 where it says *am*. (By *am* and *pm* alone 00:20 would pass for 10:20 am.)
#
# | your case | deploy |
# |---|---|
# | LoRA, one task | the merged model: the last lines of the script |
# | LoRA, many tasks on one base | `vllm serve BASE --enable-lora --lora-modules mine=FOLDER` |
# | QLoRA, 16-bit weights fit when serving | the merged model, by `merge_qlora` where it was trained (peft's own merge rounds the sum to four bits once more). Added to the 16-bit weights, it is judged anew (here 24 for 35) |
# | QLoRA, only four bits fit | `PeftModel.from_pretrained` on the four-bit base |
# | llama.cpp, Ollama | the merged model in its folder, then `python convert_hf_to_gguf.py FOLDER` of llama.cpp |
#
# ## 7. Rows of unequal length: packing
#
# A short row is padded to the longest of its batch, and padding is computed. Packing puts several documents into one row. Positions restart at each, and tell attention the borders.
#
# ```text
# padded   a a a a      packed     a a a a b b b c
#          b b b .      position   0 1 2 3 0 1 2 0      0: a new document begins
#          c . . .
# ```
#
# Reminders have nearly one length, so the data here are functions of Python with their docstrings. **Guess first:** what happens to the loss if the positions are forgotten?

# %%
from recipes_lib.core.measure import in_turns
from recipes_lib.training.sequence_packing import (
    check_document_mask,
    collate_packed,
    pack_sequences,
)

documents = list(load_instructions(tokenizer, max_tokens=192, limit=16))
three = pack_sequences(documents[:3], length=3 * 192)
packed = collate_packed(three, device=here.device, **padding)

model = base().eval()
check_document_mask(model, packed)  # refuses a model that ignores the positions
alone = held_out_losses(model, documents[:3], **padding)
leaky = {name: packed[name] for name in ("input_ids", "labels")}
with torch.no_grad():
    together = answer_loss(model, packed).item()
    leaking = answer_loss(model, leaky).item()
print(f"each document alone       {alone.mean:.4f}")
print(f"packed                    {together:.4f}")
print(f"packed without positions  {leaking:.4f}\n")
del model

rows = pack_sequences(documents, length=256)
by_length = sorted(documents, key=lambda row: len(row["labels"]))
work = {
    "padded": in_batches(documents, 4),
    "sorted by length": in_batches(by_length, 4),
    "packed": [
        collate_packed(rows[start : start + 2], device=here.device, **padding)
        for start in range(0, len(rows), 2)
    ],
}
some_blocks = base().model  # without the output layer, for the time alone
some_blocks.layers = some_blocks.layers[: sizes.few]


def forward_and_backward(batches):
    for batch in batches:
        inputs = {name: each for name, each in batch.items() if name != "labels"}
        with in_half():
            hidden = some_blocks(**inputs, use_cache=False).last_hidden_state
        hidden.sum().backward()


steps_of = {name: partial(forward_and_backward, each) for name, each in work.items()}
took = in_turns(steps_of, rounds=3)
padding_of = {}
read = sum(len(row["labels"]) for row in documents)
for name, batches_of_work in work.items():
    computed = sum(batch["input_ids"].numel() for batch in batches_of_work)
    padding_of[name] = 1 - read / computed
    _, *seconds = took[name]  # the first turn warms up
    ratio = min(seconds) / min(took["padded"][1:])
    print(f"{name:<17}{padding_of[name]:4.0%} padding, {ratio:.2f}× the time", end=" ")
    print(f"({min(seconds):.2f} to {max(seconds):.2f} s)")

# %% [markdown]
# Without positions the loss looks *better*, 2.92 and not 3.23: a later document reads the earlier ones, as none does in use. With positions, the loss is that of each document alone. Padding falls from 37 % to 11 %, and by sorting alone to 13 %; both save time, and how much changes from run to run: try sorting first.
#
# In TRL it is `SFTConfig(packing=True)`, on a GPU with flash-attn, whose kernels skip what the mask hides. TRL cuts what is longer than `max_length`: leave long rows out before. A packed batch holds more pairs, so an epoch has fewer steps: look for the learning rate again. Models that cannot keep documents apart, like Mamba, take sorted rows: `train_sampling_strategy="group_by_length"`.
#
# ## 8. Experts: what LoRA leaves untrained, in silence
#
# Qwen3-VL-MoE reads images with a *vision tower*, and each block of its language model has many MLPs, the *experts*. transformers 5 stores the experts of a block in two large tensors, which are no linear layers. On the device "meta" a model has no numbers, so a large one fits here. What does `target_modules="all-linear"` train?

# %%
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

# Of each part, what the names of its parameters have in common.
PARTS = {"vision tower": "visual", "experts": "experts", "attention": "self_attn"}


def with_experts(config, lora):
    return get_peft_model(Qwen3VLMoeForConditionalGeneration(config), lora)


all_linear = LoraConfig(r=16, target_modules="all-linear")
with torch.device("meta"):
    model = with_experts(Qwen3VLMoeConfig(), all_linear)
silent = {}
for part, mark in PARTS.items():
    weights = [weight for name, weight in model.named_parameters() if mark in name]
    silent[part] = sum(each.numel() for each in weights if each.requires_grad)
    frozen = sum(each.numel() for each in weights) - silent[part]
    print(f"{part:<13}{silent[part]:>10,} train {frozen:>15,} are frozen")

# %% [markdown]
# Now by name, with a small model of the same kind that runs: random weights, an image of noise, random words.

# %%
named = LoraConfig(
    r=16,
    target_modules=r".*language_model.*(q_proj|k_proj|v_proj|o_proj)",
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)
IMAGE = 1  # the token that stands for a part of an image
text = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
text |= dict(num_key_value_heads=2, vocab_size=100)
text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
eyes = dict(hidden_size=64, depth=2, num_heads=4, intermediate_size=128)
eyes |= dict(out_hidden_size=64, deepstack_visual_indexes=[0])
small = Qwen3VLMoeConfig(text_config=text, vision_config=eyes, image_token_id=IMAGE)

seed_everything(0)
words = torch.randint(2, 100, (1, 40))
words[0, 4:8] = IMAGE
picture = dict(
    input_ids=words,
    labels=words.masked_fill(words == IMAGE, IGNORED),
    mm_token_type_ids=(words == IMAGE).int(),
    pixel_values=torch.randn(16, 3 * 2 * 16 * 16),  # 16 patches; an image is 2 frames
    image_grid_thw=torch.tensor([[1, 4, 4]]),  # 4 rows of 4 patches
)

# %% [markdown]
# One step, on the CPU. *B* begins as zero: if it is not zero afterwards, it got a gradient. A *router* chooses two of the four experts for each token.

# %%
trained = {}
for way, lora in {"all-linear": all_linear, "by name": named}.items():
    model = with_experts(small, lora)
    output = model(**picture, output_router_logits=True)
    output.loss.backward()
    optimizer_of(model, 1e-3).step()
    every_b = {name: b for name, b in model.named_parameters() if "lora_B" in name}
    print(f"{way}: adapters with a gradient")
    for part, mark in PARTS.items():
        of_part = [b.any().item() for name, b in every_b.items() if mark in name]
        trained[way, part] = sum(of_part)
        print(f"  {part:<13}{sum(of_part):>3} of {len(of_part)}")
for block, scores in enumerate(output.router_logits):  # [tokens, experts]
    counts = scores.topk(2).indices.flatten().bincount(minlength=4)
    print(f"block {block}, tokens of each expert:", *counts.tolist())
del model, output

# %% [markdown]
# No word of warning from peft: with "all-linear" the experts, 93 % of the weights listed first, have no adapters, and the vision tower has. By name the tower has none, and so no gradient. Each block has two adapters of experts, one for each large tensor, and all of them got one. An expert without tokens learns nothing in a step, so count. Say what you mean, by name. This repository's `apply_lora` refuses such a model with "all-linear", and `apply_qlora` with any targets: it cannot store experts in four bits.
#
# ## Take this home
#
# - The script above, for one GPU. For several, what follows `trainer.save_model()` is a program of its own, which one process runs after `accelerate launch` of the first part.
# - [scripts/finetune.py](../scripts/finetune.py): one file with our recipes, packed rows, checkpoints and the score. Its first lines say what it reached. Interrupted and started again, it ends with the same weights, bit by bit: `test_two_steps_and_a_resume` in [its tests](../tests/scripts/test_scripts.py) checks that.
# - A command: `python -m recipes_lib finetune --model NAME --data pairs.jsonl --learning-rate 3e-4 --output run`. After a crash it goes on with `--resume` ([docs/finetune.md](../docs/finetune.md)).
#
# ## Which settings matter?
#
# | setting | begin with | why |
# |---|---|---|
# | **labels** | answers only | wrong ones train something else, without an error |
# | **learning rate** | LoRA 1e-4 for twice the steps, and 3e-4 beside it; with billions of weights 1e-4 to 2e-4; all weights 3e-5, with billions 1e-5 (billions: not run here) | decides what is learned and what is forgotten: section 5 |
# | **pairs** | some hundred that you have read | the score of twice as many says whether more are needed |
# | **what trains** | all linear layers | attention alone learned far less: section 5. Name the layers where a model has experts: section 8 |
# | rank and alpha | 4 and 32 for some hundred pairs; 16 and 32 above (not run) | few pairs need no more. Rate and alpha / r go together: who takes another alpha looks for the rate again |
# | rows in a step | 4 to 32 (3 here, for a CPU) | adapters like large batches less than all weights do (LoRA Without Regret) |
# | epochs, times through all pairs | 2 or more | 2 and 4, each a whole run in a folder of its own, because the rate falls to zero at its end; where the score is the same, keep what forgets less |
# | ordinary questions | a third as many as pairs, with the model's own answers, and twice the steps | without them it answers everything in the form of the task: section 5 |
# | packing | sort by length first; pack where lengths differ much | time, and fewer steps in an epoch: section 7 |
#
# ## Which card?
#
# The same arithmetic for 8 billion parameters and four rows of 2,048 tokens: what fits, of what the *doctor* of this repository, its command against errors of memory, tries on each card. None of these rows has run on a card. The method has:
#
# <!-- numbers:held_elsewhere-05 -->
# **How far predictions of this kind hold elsewhere.** 12 steps on an H100 that was limited to 24 GB, of up to 8 billion weights, are predicted on a CPU to 0.1% at most, after two faults that they showed were mended. Of 41 peaks that others have published, 37 are within 5 %; of 8 of them reserved bytes are known, too, +4% to +25% beside those of tensors, 7 of them by no more than a fifth ([predicted peaks](../docs/predictions.md)).
# <!-- end -->
#
# One of these steps was *QLoRA* with checkpoints, 8 billion weights, one row of 9,523 tokens: 21.97 GiB predicted and measured, 1.6 s. At that speed 2,000 pairs of 500 tokens take six minutes for two passes if they are packed, by arithmetic; a card of 24 GB is slower.

# %%
from recipes_lib.core.model import model_of_shape
from recipes_lib.workflows.out_of_memory_doctor import diagnose

eight_billion = model_of_shape("llama-3.1-8b", dtype=torch.bfloat16, device="meta")
for card in ("T4", "RTX 4090", "H100"):
    diagnosis = diagnose(model=eight_billion, batch_size=4, seq_len=2048, card=card)
    for remedy in diagnosis.remedies:
        if "fits" in remedy.outcome:
            print(f"{card}: {remedy.name}: {remedy.outcome}")

# %% [markdown]
# *Checkpointing* computes each block twice, and keeps less for backward. *Loss in chunks* never holds all logits at once. In TRL they are `gradient_checkpointing=True` and `loss_type="nll"`. [Notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) has both, and *optimizer offload*. *Micro-batches of 1* are single rows, whose gradients add up; in TRL `per_device_train_batch_size=1`, with as many `gradient_accumulation_steps` as a step has rows. The row of the H100 trains all weights with weights and states in 16 bits, which needs stochastic rounding (`bf16_adamw`). These are bytes of tensors: what the allocator reserves was 4 to 25 % more, so 73.2 of 80 GiB and 20.2 of 24 are tight.
#
# | card | train 8 billion |
# |---|---|
# | 16 GB, T4 | QLoRA with checkpointing, in fp16, 9.7 GiB |
# | 24 GB | LoRA on a base in 16 bits: the script with `gradient_checkpointing=True`, one row at a time and `gradient_accumulation_steps=4` (20.4 GiB of tensors are for four rows of 2,048 tokens at once; 16.8 for one, by [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb)). If that fails, QLoRA with checkpointing, 9.7 GiB for four such rows |
# | 80 GB | LoRA, as on 24 GB; all weights only in 16 bits with stochastic rounding (`bf16_adamw`), one row at a time |
# | 2 × 80 GB, by arithmetic | all weights in fp32, 16 bytes for each: 8 · 16 = 128 GB in two halves ([notebook 02](../notebooks/02_multi_gpu_training.ipynb)) |
#
# Half a billion weights need 8 GB by that rule. Logits come on top, 9 GiB for 4 × 2,048 tokens and 152,000 words, unless the loss is in chunks. For your model and card: `python -m recipes_lib doctor --model NAME --dtype bf16 --card T4 --batch-size 4 --seq-len 2048`.
#
# ## If it does not work
#
# | what you see | look at |
# |---|---|
# | the loss falls, and the answers are nonsense | the labels: decode what carries loss |
# | the answers never stop | the end mark: is it learned, and is padding another token? |
# | the form is right, the content is not | twice the steps, or more pairs |
# | it is no better than a simple rule | the wrong answers, one by one |
# | everything is answered in the form of the task | [answers of its own](#Keep-ordinary-answers) among the rows |
# | the text to keep gets worse | text of that kind, mixed in; or a third of the rate, for twice the steps |
# | it is worse where it is served | QLoRA: serve on the base it was trained on |
#
# ## Your own data
#
# Leave out what is longer than `max_length`: a cut answer teaches to stop anywhere. Hold out by *source*, such as a customer: rows of one source are alike. Of text of the kind that your model must keep, mix one part in, and hold another one out.
#
# ## When to use what
#
# Take the model that answers best before training, an instruct one where you have few pairs. (Small and whole, or large with LoRA, was not compared.) Where 16 bytes per weight are there, on 24 GB for about one billion, try full fine-tuning at a small rate, too: here it learned as much as LoRA, and predicts other text better. All weights need fp32 and autocast, or 16 bits with stochastic rounding: in pure bf16 most updates round to nothing ([TRAPS.md](../TRAPS.md)). Else take LoRA on all linear layers, with the loss of section 4. Take QLoRA where the 16-bit weights do not fit. Judge by a score that a simple rule does not get, and by text that the model must keep.
#
# Not here, with the figures of others:
#
# - DoRA: 46.9 % right at 5,937 tokens a second, and 2.1 GiB more. LoRA of rank 32 has 47.8 % (PEFT's [method_comparison](https://github.com/huggingface/peft/tree/main/method_comparison), a model of 3 billion on an L40S, July 2026).
# - rsLoRA of rank 64: 51.3 % at 7,038 tokens a second (the same table).
# - Muon: 34.5 → 31.4 GiB, Qwen2.5-3B with ZeRO-2 (DeepSpeed's blog, May 2026). What it does to the quality of fine-tuning is disputed ([torchtune#2803](https://github.com/meta-pytorch/torchtune/pull/2803)).
#
# Long rows are in [04](../notebooks/04_training_long_sequences.ipynb), and all switches in the [cheatsheet](../CHEATSHEET.md).
#
# ## Exercise
#
# How many held-out sentences would it take to show that one way has five answers in a hundred more than another? The last cell has the answer for a power of 80 %, from the differences between full fine-tuning and LoRA on this page. (Both are near all 64 here; with a seed that has 36 it takes more.)
#
# ## References
#
# - Hu et al., *LoRA*, [2106.09685](https://arxiv.org/abs/2106.09685); Dettmers et al., *QLoRA*, [2305.14314](https://arxiv.org/abs/2305.14314)
# - Biderman et al., *LoRA Learns Less and Forgets Less*, [2405.09673](https://arxiv.org/abs/2405.09673)
# - Schulman et al., [*LoRA Without Regret*](https://thinkingmachines.ai/blog/lora/), 2025
# - Miller, *Adding Error Bars to Evals*, [2411.00640](https://arxiv.org/abs/2411.00640)
# - Krell et al., *Efficient Sequence Packing without Cross-contamination*, [2107.02027](https://arxiv.org/abs/2107.02027)
#
# The last cell keeps the numbers and checks the claims above on this machine.

# %%
from recipes_lib.core.measure.machine import fast
from recipes_lib.fine_tuning.honest_evaluation import RowLosses, rows_needed


def factors(kind):
    """What each way did to the perplexity of a kind of text."""
    was = before.other[kind]
    return {name: vars(compare(was, now.other[kind])) for name, now in after.items()}


of_each = after["full fine-tuning"].right - after["LoRA"].right
of_each = RowLosses(of_each, torch.ones(len(wanted)))
print(f"exercise: {rows_needed(of_each, difference=0.05)} sentences")
ladder.note(
    targets=targets,
    learned=dict(
        pairs=len(train_rows),
        held_out=sizes.held_out,
        rule=int(rule.sum()),
        few_shot=int(prompted.sum()),
        right_before=int(before.right.sum()),
        right={name: int(found.right.sum()) for name, found in after.items()},
        changed={
            name: int(found.right[changed].sum()) for name, found in after.items()
        },
        intervals={name: score_interval(found.right) for name, found in after.items()},
    ),
    wrong_parts=wrong_parts,
    verdict=vars(compare(before.losses, after["LoRA"].losses)),
    learning_rates={name: rate for name, (_, rate, _) in ways.items()},
    steps={name: len(each) for name, each in losses.items()},
    forgotten=factors("source code"),
    forgotten_prose=factors("prose"),
    padding=padding_of,
    silent=silent,
    served={"QLoRA on the 16-bit base": int(moved.sum())},
    ordinary=answered | {"a few steps": few_steps, "asked": len(ordinary)},
    trl={"difference": apart},
)
assert max(errors) < 0.005, "predicted"
assert abs(together / alone.mean - 1) < 1e-4, "packing is exact"
assert apart < 0.05, "the same training in TRL"
assert silent["experts"] == 0 < silent["vision tower"], "what all-linear trains"
assert trained["all-linear", "experts"] == 0 < trained["by name", "experts"]
assert trained["by name", "vision tower"] == 0, "it is frozen"
if not fast():  # random weights learn nothing in so few steps
    assert few_steps["braces"] < len(ordinary), "some answers are in words"
    peaks = [row.peak_bytes for row in ladder.rows]
    assert peaks == sorted(peaks, reverse=True), "each recipe takes less memory"
    assert leaking < alone.mean, "the leak looks better"
    assert all(found.right.sum() > before.right.sum() for found in after.values())
minutes = (time.perf_counter() - started) / 60
print(f"all checks passed; the page took {minutes:.1f} minutes")
