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
# # My texts are too long: training on very long sequences
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your-username/llm-training-recipes/blob/main/notebooks/04_training_long_sequences.ipynb)
#
# <!-- numbers:headline-04 -->
# > **Llama 3.1 8B with QLoRA in 24 GB: a step on 135,015 tokens ran**, in 91 s on an H100 held to that memory, with an earlier version of five lines of code.
# >
# > | 8B, QLoRA, 24 GB | longest text, by arithmetic | has run | then waits on the host |
# > |---|--:|--:|--:|
# > | checkpoints alone | 9,523 | 9,523 | |
# > | a loss in chunks, too | 33,937 | 26,519 | |
# > | offloaded inputs, too (here TRL's switches end; counted with our offload) | 64,614 | | 16 GB |
# > | tiles, too: **the five lines** | 161,072 | 135,015 | 41 GB |
# >
# > With embedding and norms in 16 bits. In 32 bits, as peft's `prepare_model_for_kbit_training` leaves them, the text is shorter (*Two ways for larger models*).
# >
# > **On two CPU cores**, all weights of smollm2-135m within 4 GiB of tensors: 895 tokens with eager attention, 1,589 by default, 54,182 with all the switches, **92,346 with the five lines**, counted in *dry steps*, on tensors without data. On 16,384 tokens the blocks take 1.32× (1.28–1.34) the time of plain ones; a step of 92,346 would take 2.6 hours there, by a line through two shorter ones. In 10 steps of 6 fresh blocks on texts of 4,096 tokens no loss differs from that of the plain steps by more than 0.0003; plain steps in fp32 differ by 0.0006.
# >
# > Lengths counted in dry steps, times measured, on AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-27.
# <!-- end -->
#
# Memory holds weights, gradients, the optimizer's averages (*states*), and what forward keeps (*activations*). Only the last grows with the text, and the five lines shrink it. A *checkpoint* here is no file: of a block only its input is kept, and the rest is computed again. In *tiles* an MLP works on some of the tokens at a time. The steps on the H100 had random weights, and Llama knows 131,072 positions. (That run pinned 67 GB of the host's memory, where today's code pins 34, [which no card has run](#Do-such-predictions-hold-on-a-card?).) An RTX 4090 would take some 9 to 12 minutes for 131,072, [by arithmetic](#What-do-16K-to-128K-take-on-24-GB?). Axolotl and Unsloth have [switches](#With-Axolotl-or-Unsloth) for all of this, transformers and TRL for all but the tiles.
#
# **Which lines are yours?** The longest texts on 24 GB, by arithmetic; each column has one recipe more:
#
# | what trains | checkpoints and a loss in chunks | inputs on the host, too | tiles, too: five lines | the lines |
# |---|--:|--:|--:|---|
# | Llama 3.2 1B, all weights in fp32 | 22,700 | 22,900 | 50,500 | the block below |
# | 1B, all weights in 16 bits | 74K | 102K | 293K | [step in backward](#Two-ways-for-larger-models): no clipping |
# | 3B, all weights in 16 bits | 9K | 19K | 43K | the same |
# | 3B, QLoRA | 64K | 123K | 254K | [QLoRA](#Two-ways-for-larger-models) |
# | 8B, QLoRA | 34K | 65K | 161K | the same |
#
# Take the first column that holds your text. The first one needs `apply_chunked_cross_entropy` and the checkpoints, the second also the `with offload_activations`, the third also `apply_tiled_mlp`; leave the other lines out (never `autocast`). Whether far tokens help at all, measure first: on one text a model that reads 512 of 2,048 tokens and the first four [loses 0.03](#7.-Sliding-window). [Other cards](#The-longest-texts), [times](#What-do-16K-to-128K-take-on-24-GB?) and [all cases](#Which-row-is-yours) stand below. It is for dense causal language models of transformers with RMSNorm, such as Llama, Qwen3, Mistral and SmolLM. (Tiles refuse a mixture of experts, and a model with LayerNorm needs `norms=False`.)
#
# **The five lines** are the three calls and the two `with`. Weights in fp32 take 16 bytes each: weight, gradient and AdamW's two averages.
#
# ```python
# # pip install "llm-training-recipes @ git+https://github.com/your-username/llm-training-recipes"
# # (your-username: who holds your copy; for QLoRA also bitsandbytes, for TRL trl and peft)
# # Start Python with PYTORCH_ALLOC_CONF=expandable_segments:True in the environment.
# import torch
# from transformers import AutoModelForCausalLM, AutoTokenizer
# from recipes_lib.memory.activation_offload import offload_activations
# from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
# from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
#
# name = "meta-llama/Llama-3.2-1B"  # it asks for a login; or a folder
# text = open("long.txt").read()
# ids = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids  # [1, S]
# length = 50_000  # all of an empty RTX 4090; each GiB in use takes 14,000: 27_000 on an L4
# model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).cuda()
# model.train()  # without it no chunks, and no checkpoints
# optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
#
# apply_chunked_cross_entropy(model)                        # no table of logits
# apply_tiled_mlp(model, norms=True)                        # an MLP sees some tokens at a time
# model.activation_checkpointing_enable()                   # of a block only its input stays,
# for piece in ids.cuda().split(length, dim=1):
#     with offload_activations(model, to="host", in_flight=1):  # and that input waits on the host
#         with torch.autocast("cuda", torch.bfloat16):          # products in 16 bits
#             loss = model(input_ids=piece, labels=piece, use_cache=False).loss
#         loss.backward()
#     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#     optimizer.step()
#     optimizer.zero_grad()
#     print(f"{loss.item():.3f}, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
# ```
#
# The last piece is shorter, and a whole step, too; one of a single token is refused. Many documents, of which only the answers are learned, a held-out loss and a saved model are in [documents with questions](#Documents-with-questions). To judge, stay in training mode, under `torch.no_grad()`: with `model.eval()` all logits come back, and these models have no dropout. At 50,000 tokens 15 inputs (of 16 blocks) × 50,000 × 2,048 × 4 bytes = 6 GB wait on the host. Before transformers 5.17 the third call is `gradient_checkpointing_enable()`. For a T4 see [below](#On-a-T4).
#
# | | |
# |---|---|
# | **You will learn** | which recipe your length needs, and to predict the longest text that fits |
# | **You need** | Python and the basics of PyTorch; no GPU, no login |
# | **Minutes to run** | nine to thirteen on two CPU cores, by how fast they are in that hour |
# | **Minutes to read** | five for the tables of *My card*, 15 up to *What runs out*, which is all you need to act; 35 in all |
# | **Which hardware has run this** | two CPU cores; and an H100 held to the memory of 24 GB, for twelve steps of up to 135,015 tokens, which all fitted ([below](#Do-such-predictions-hold-on-a-card?)). No card has run the three blocks of lines exactly as printed |
#
# ## Setup
#
# Where the package is missing, as on Colab, this cell fetches it. `your-username` stands for the account that holds your copy, here and in the badge.

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
import contextlib
import functools
import gc
import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from IPython.display import Markdown

from recipes_lib.core.data import load_text
from recipes_lib.core.measure import PeakMemory, dry, in_turns
from recipes_lib.core.measure.free_memory import keep_freed_memory
from recipes_lib.core.measure.machine import (
    GIB,
    choose_sizes,
    fast,
    machine,
    seed_everything,
    synchronize,
)
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape
from recipes_lib.report.show import show

here = machine()
on_gpu = here.device == "cuda"
elsewhere = "host" if on_gpu else "disk"  # where tensors can wait
tokenizer = load_tokenizer()
keep_freed_memory()  # a CPU's steps are slower where the system takes freed memory back
dtype = torch.bfloat16 if on_gpu and here.native_bf16 else torch.float32
print(here)

# %% [markdown]
# On a CPU all weights of the real SmolLM2-135M train, and all tensors together get 4 GiB. Nothing fails at the limit: we count bytes. On a GPU the notebook builds the shape of Llama 3.2 1B, with random weights.

# %%
cpu = dict(
    shape="smollm2-135m",
    layers=None,  # all of them
    limit=4 * GIB,
    common=512,  # tokens of a text that every row can train on
    grows=8192,  # tokens up to which we see how bytes grow
    tile=256,  # tokens of a tile
    short=2048,  # tokens of a real step, in three ways
    long=4096,  # tokens of a real step with the five lines
    few=6,  # blocks of a model that learns in many steps
    steps=20,  # of them
    fewer=8,  # of the two ways for 24 GB
    learns=256,  # tokens of each of their texts
    cost=2048,  # tokens at which the rows are timed
    read=8192,  # tokens at which attention alone is timed
    window=512,  # of them
    rounds=2,  # of turns on the clock
    trained="smollm2",  # the model whose losses say something
    cards=("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"),  # shapes for the cards
    most=2**20,  # tokens, of a dry step on a card
    checked=None,  # ways on 24 GB whose dry step is taken: all of them
)
gpu16 = cpu | dict(shape="llama-3.2-1b", layers=4, limit=11 * GIB, common=1024)
gpu16 |= dict(tile=512, cost=16384, read=65536, window=4096)
gpu24 = gpu16 | dict(layers=None, limit=14 * GIB)
# Continuous integration checks that the code works, not how much it saves.
brief = cpu | dict(shape="tiny-smollm2", trained="tiny-smollm2", limit=80 * 2**20)
brief |= dict(common=32, grows=256, tile=16, short=256, long=512, cost=256)
brief |= dict(few=2, steps=2, fewer=2, learns=32, read=1024, window=64, rounds=1)
brief |= dict(cards=("tiny-smollm2",), most=256)
brief |= dict(checked=("all five lines", "QLoRA by TRL, tiles, too"))
sizes = choose_sizes(cpu=cpu, gpu16=gpu16, gpu24=gpu24, gpu80=gpu24, fast=brief)
sizes

# %% [markdown]
# ## The loop, and real steps with it
#
# The training loop. Every step of this notebook is one of it.


# %%
def train(
    model,
    optimizer,
    texts,
    around=contextlib.nullcontext,
    precision=contextlib.nullcontext,
    clip=None,
):
    """One step from several texts [1, S], in which each token counts the same."""
    targets = sum(ids.shape[1] - 1 for ids in texts)
    total = 0.0
    for ids in texts:
        with around():
            with precision():
                mean = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss = mean * ((ids.shape[1] - 1) / targets)
            loss.backward()
        total += loss.detach()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return total


# %% [markdown]
# A *way* says what is changed in the model, and what stands around forward and backward. Three of them: nothing; *all switches* that transformers and TRL have for long texts; and the five lines. The switches have no tiles. Of their two offloads we take transformers', which waits for each copy and so takes the least memory; TRL's `activation_offloading=True` copies beside the computation. Both need a GPU, so our own stands in for them here; and ours for TRL's loss in chunks.

# %%
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp


def adamw(model, lr):
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, fused=True)


class Way(NamedTuple):
    """What a step does beyond the plain loop."""

    adapt: Callable  # changes the model
    around: Callable = lambda model: contextlib.nullcontext()  # forward and backward
    precision: Callable = contextlib.nullcontext  # of forward
    clip: float | None = None
    optimizer: Callable = adamw  # of a model and a learning rate


def unchanged(model):
    return model  # SDPA is the default of transformers


def with_all_switches(model):
    apply_chunked_cross_entropy(model)
    model.activation_checkpointing_enable()
    return model


def with_five_lines(model, **tiles):
    apply_chunked_cross_entropy(model)
    apply_tiled_mlp(model, norms=True, **tiles)
    model.activation_checkpointing_enable()
    return model


def inputs_wait(model):
    """On their way beside the computation; the default of 4 at a time is much for long texts."""
    return offload_activations(model, to=elsewhere, in_flight=1)


def inputs_wait_in_turns(model):
    return offload_activations(model, to=elsewhere, min_bytes=4096, in_flight=0)


in_16_bits = partial(
    torch.autocast, here.device, torch.bfloat16, enabled=here.native_bf16
)
as_one_trains = {"precision": in_16_bits, "clip": 1.0}
plain_way = Way(unchanged, **as_one_trains)
all_switches = Way(with_all_switches, inputs_wait_in_turns, **as_one_trains)
five_lines = Way(with_five_lines, inputs_wait, **as_one_trains)


# %%
def prepare(way, model, lr):
    """A function that takes a step on texts, and its optimizer."""
    model = way.adapt(model)
    optimizer = way.optimizer(model, lr=lr)
    around = partial(way.around, model)

    def step(*texts):
        return train(model, optimizer, texts, around, way.precision, way.clip)

    return step, optimizer


book = tokenizer(load_text(split="validation")[:200_000])["input_ids"]


def text_of(tokens, start=0):
    """Real text [1, S]; where tensors have no data, any."""
    if dry():
        return torch.ones(1, tokens, dtype=torch.long, device=here.device)
    ids = torch.tensor([book], device=here.device)
    return ids[:, torch.arange(start, start + tokens) % ids.shape[1]]


# %% [markdown]
# Real steps on real text, all in bf16: the plain one, all switches, the five lines, and the five lines on a long text. The first step of AdamW makes its averages, so a short step comes before. The learning rate is 0, so each turn repeats the same step: its work and its bytes are those of any step.

# %%
real = {}
ways_of_today = {
    "plain": plain_way,
    "all switches": all_switches,
    "five lines": five_lines,
}
steps = [(way, sizes.short, sizes.rounds) for way in ways_of_today]
for which, tokens, turns in [*steps, ("five lines", sizes.long, 1)]:
    # Yours: AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    model = load_model(sizes.trained).train()
    step, optimizer = prepare(ways_of_today[which], model, lr=0.0)
    step(text_of(16))
    seconds, losses = [], []
    for _ in range(turns):
        start = time.perf_counter()
        with PeakMemory() as memory:
            losses.append(step(text_of(tokens)).item())
        seconds.append(time.perf_counter() - start)
    took = {"loss": losses[0], "bytes": memory.peak, "seconds": min(seconds)}
    real[which, tokens] = took
    print(f"{which:<12} {tokens:>6,} tokens: loss {losses[0]:.4f},", end=" ")
    print(f"{memory.peak / 2**20:,.0f} MiB at the peak,", end=" ")
    print(*[f"{each:.1f}" for each in seconds], sep=" and ", end=" s, ")
    print(f"{1e3 * min(seconds) / tokens:.1f} ms per token")
for which in ("all switches", "five lines"):
    ratio = real[which, sizes.short]["seconds"] / real["plain", sizes.short]["seconds"]
    print(f"{which}: {ratio:.2f} times the plain step")
del model, step, optimizer, memory  # what is alive would be counted below

# %% [markdown]
# At 2,048 tokens weights, two averages and gradients are 4 × 513 = 2,052 of the 2,165 MiB. So the tiles save nothing yet: use them when memory runs out, and not before. The losses are the same to four decimals.
#
# **Where do the bytes go?** `predict` takes the step of 8,192 tokens on tensors that have a shape and no data, and keeps account of every byte:

# %%
from recipes_lib.core.predict import predict
from recipes_lib.report.charts.memory_timeline import timeline_chart


def without_data(way, tokens, shape=sizes.shape, layers=sizes.layers):
    """What `predict` builds and takes: a model, its optimizer and a step."""

    def build():
        model = model_of_shape(shape, layers=layers)
        step, optimizer = prepare(way, model, lr=2e-5)
        return model, optimizer, lambda model, optimizer: step(text_of(tokens))

    return build


plain_bytes = predict(without_data(plain_way, sizes.grows)).timeline
few_bytes = predict(without_data(five_lines, sizes.grows)).timeline
timeline_chart(
    {"plain": plain_bytes, "the five lines": few_bytes},
    title=f"One step on {sizes.grows:,} tokens: what forward keeps, and the logits, are gone",
    source="predicted, on tensors without data",
)

# %% [markdown]
# Orange, the *activations*, is what forward keeps for backward, 8.7 GiB at the peak. Its steep end, and the green hill (*other*), are tables of logits: one number for each token and word of the vocabulary. With the five lines 0.1 GiB of each is left. The rest has the same size for any text: the weights, their gradients and AdamW's averages, 2 GiB.
#
# **Do they learn the same?** A model of a few such blocks learns from fresh weights, on four texts of 256 tokens, in two tiles, again and again. A third run says what *the same* means: plain steps in fp32, which differ by rounding alone.


# %%
blocks_that_learn = partial(model_of_shape, sizes.shape, layers=sizes.few)


def learned(way, steps=sizes.steps, build=blocks_that_learn, lr=5e-4):
    """The losses of all steps."""
    seed_everything(0)
    step, _ = prepare(way, build().train(), lr)
    texts = [text_of(sizes.learns, start * sizes.learns) for start in range(4)]
    return numpy.array([step(texts[each % 4]).item() for each in range(steps)])


def beside_plain(curves):
    """Print how far the losses of each way are from those of the first one."""
    plain, *_ = curves.values()
    apart = {
        which: float(abs(losses - plain).max()) for which, losses in curves.items()
    }
    for which, losses in curves.items():
        first, last = losses[:4].mean(), losses[-4:].mean()  # of all four texts
        print(f"{which:<30} loss {first:6.3f} → {last:.3f},", end=" ")
        print(f"from plain {apart[which]:.4f} at most")
    return apart


in_tiles = partial(with_five_lines, tile_size=sizes.learns // 2)
curves = {
    "plain": learned(plain_way),
    "five lines": learned(five_lines._replace(adapt=in_tiles)),
    "plain, in fp32": learned(plain_way._replace(precision=contextlib.nullcontext)),
}
apart = beside_plain(curves)

# %% [markdown]
# While the loss falls by nearly five, the five lines are never more than 0.003 away from the plain steps, and plain steps in fp32 0.0013. (Small tiles round more often. These have 128 tokens; the default is 1,024 or more.) It is one seed, one rate and 20 steps on short texts; ten steps on 4,096 tokens, in tiles of the default size, are [below](#What-it-costs). A long training was not compared.
#
# To accumulate, hand the loop several texts. As a program, which can resume, for all weights or adapters: [`python scripts/train_long_sequences.py`](../scripts/train_long_sequences.py).
#
# **With TRL** (1.16) all but the tiles is a configuration, and the tiles are one call before. The loss is in chunks by default, since 1.7. (The line with `offload` needs a GPU, and was not run here; the next cell runs tiles, bf16 and checkpoints, on short texts.)
#
# ```python
# import torch
# from transformers import AutoModelForCausalLM
# from datasets import Dataset
# from trl import SFTConfig, SFTTrainer
# from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
#
# name = "meta-llama/Llama-3.2-1B"  # it asks for a login; or a folder
# texts = Dataset.from_list([{"text": open("long.txt").read()}])
# # Without a dtype the weights have that of the file, bf16, which rounds small updates away.
# model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
# apply_tiled_mlp(model, norms=True)
# config = SFTConfig(
#     max_length=32_768,  # longer texts are cut here
#     per_device_train_batch_size=1,
#     bf16=True,
#     activation_checkpointing=True,
#     activation_checkpointing_kwargs={"offload": True},
# )
# SFTTrainer(model=model, args=config, train_dataset=texts).train()  # in fp32 up to about 1B on 24 GB
# ```
#
# `activation_offloading=True` in place of the last line of the configuration copies beside the computation, and takes more memory. *QLoRA*: load `model` with `quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)`, and give the trainer `peft_config=LoraConfig(r=16, target_modules="all-linear")`. Do tiles train the same in TRL?

# %%
import logging
import warnings

import transformers
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, get_peft_model

from recipes_lib.fine_tuning.qlora import apply_qlora, quantize_nf4

logging.disable(logging.WARNING)  # of what TRL imports
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # an old name, in TRL
from trl import SFTConfig, SFTTrainer

disable_progress_bars()
transformers.utils.logging.set_verbosity_error()


def losses_in_trl(adapt, build=blocks_that_learn, peft_config=None):
    """Of three steps on the texts from above."""
    seed_everything(0)
    texts = [text_of(sizes.learns, start * sizes.learns) for start in range(4)]
    config = SFTConfig(
        output_dir="runs/tiles-in-trl",
        max_steps=3,
        learning_rate=5e-4,
        per_device_train_batch_size=1,
        bf16=here.native_bf16,
        activation_checkpointing=True,
        use_cpu=not on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        adapt(build().train()),
        config,
        peft_config=peft_config,
        train_dataset=Dataset.from_list(
            [{"input_ids": ids[0].tolist()} for ids in texts]
        ),
        processing_class=tokenizer,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


small_tiles = partial(apply_tiled_mlp, norms=True, tile_size=sizes.learns // 2)


def in_four_bits():
    return quantize_nf4(load_model(sizes.trained), compute_dtype=torch.bfloat16)


qlora = {
    "build": in_four_bits,
    "peft_config": LoraConfig(r=16, target_modules="all-linear"),
}
in_trl = {}
for which, options in {"TRL": {}, "TRL, QLoRA": qlora}.items():
    pair = losses_in_trl(unchanged, **options), losses_in_trl(small_tiles, **options)
    print(f"{which:<17}", *(f"{loss:.4f}" for loss in pair[0]))
    print(f"{which + ', tiles':<17}", *(f"{loss:.4f}" for loss in pair[1]))
    in_trl[which] = max(abs(a - b) for a, b in zip(*pair))

# %% [markdown]
# In tiles TRL has the same losses: of all weights to 0.001, and of *QLoRA*, whose adapters TRL itself adds, to 0.003, less than rounding does to adapters below. Both are without an offload, and `quantize_nf4` packed the base; the line with `BitsAndBytesConfig` was not run. The lengths of [the table below](#The-longest-texts) hold in dry steps of TRL's *QLoRA*, too: its adapters, with our chunked loss and offload in the place of TRL's, without and with tiles, [fill 1 to 2 % less](#What-do-16K-to-128K-take-on-24-GB?) than the table gives them.
#
# ### With Axolotl or Unsloth
#
# Tiles of the MLP are a switch there, too: `unsloth_tiled_mlp=True` in Unsloth's `from_pretrained` ([its post](https://docs.unsloth.ai/new/500k-context-length-fine-tuning)), and in Axolotl ([its page](https://github.com/axolotl-ai-cloud/axolotl/blob/19e03744e01f1f2be0768e3dd8554fef8674f2f0/docs/gradient_checkpointing.qmd)) these lines. We have run neither.
#
# ```yaml
# bf16: true
# cut_cross_entropy: true               # with its plugin
# gradient_checkpointing: true
# tiled_mlp: true
# activation_offloading: hidden_states  # inputs of blocks, copied beside the computation
# ```
#
# ## The map
#
# | | recipe | makes smaller | the switch of a library |
# |---|---|---|---|
# | 1 | [flash attention](../recipes_lib/attention/flash.py) | scores: tokens × tokens | `attn_implementation="sdpa"`, the default |
# | 2 | [chunked loss](../recipes_lib/memory/chunked_cross_entropy.py) | logits: tokens × vocabulary | `F.linear_cross_entropy`, Liger, TRL |
# | 3 | [checkpointing](../recipes_lib/memory/activation_checkpointing.py) | activations of all blocks but one | `model.activation_checkpointing_enable()` |
# | 4 | [tiled MLP](../recipes_lib/memory/tiled_mlp.py) | the widest part of that one block | Axolotl `tiled_mlp: true`, Unsloth `unsloth_tiled_mlp=True` |
# | 5 | [nested checkpoints](../recipes_lib/memory/nested_checkpointing.py) | inputs of the blocks | none |
# | 6 | [offloaded inputs](../recipes_lib/memory/activation_offload.py) | the same, to the host or the disk | `activation_checkpointing_enable(offload=True)` |
# | 7 | [sliding window](../recipes_lib/attention/sliding_window/__init__.py) | time of attention | `config.sliding_window`, FlexAttention |
# | 8 | [RoPE scaling](../recipes_lib/architecture/rope.py) | the loss beyond the trained length | `rope_parameters` in config.json |
#
# Recipes 1 to 6 are **Part A**: the same mathematics, in less memory. Recipes 7 and 8 are **Part B**: they change the model.
#
# ## My card, my model, my length: what do I do?
#
# ### Two ways for larger models
#
# Beside the block at the top:
#
# - *all weights*, in 16 bits. The optimizer takes its step inside of backward. That spares the gradients of all weights, and allows no clipping and no accumulation: each text is a step;
# - *QLoRA*: adapters train, on a frozen base of 4 bits ([notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb)).
#
# ```python
# # All weights, with the imports and `text` of the block at the top
# from functools import partial
# from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
# from recipes_lib.precision.pure_bf16 import bf16_adamw
#
# name = "meta-llama/Llama-3.2-3B"
# ids = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids
# length = 40_000  # on 24 GB
# model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).cuda().train()
# rounded = partial(bf16_adamw, rounding="stochastic")
# optimizer = apply_optimizer_in_backward(model, optimizer_class=rounded, lr=2e-5)
#
# apply_chunked_cross_entropy(model)
# apply_tiled_mlp(model, norms=True)
# model.activation_checkpointing_enable()
# for piece in ids.cuda().split(length, dim=1):
#     with offload_activations(model, to="host", in_flight=1):
#         loss = model(input_ids=piece, labels=piece, use_cache=False).loss
#         loss.backward()  # each weight moves in here
#     optimizer.step()  # closes the step
#     optimizer.zero_grad()
# ```
#
# ```python
# # QLoRA, with the imports and `text` of the block at the top
# from recipes_lib.fine_tuning.qlora import apply_qlora
# from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
#
# name = "meta-llama/Llama-3.1-8B"
# ids = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids
# length = 131_072  # on 24 GB, of 161,000 by arithmetic; 33 GB wait on the host
# model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).cuda().train()
# model = apply_qlora(model, compute_dtype=torch.bfloat16)  # rank 16, on all linear layers
# adapters = [weight for weight in model.parameters() if weight.requires_grad]
# optimizer = torch.optim.AdamW(adapters, lr=2e-4, fused=True)
#
# apply_chunked_cross_entropy(model)
# apply_tiled_mlp(model, norms=True)
# apply_activation_checkpointing(model)  # transformers' own keeps one input more with adapters
# for piece in ids.cuda().split(length, dim=1):
#     with offload_activations(model, to="host", in_flight=1):
#         with torch.autocast("cuda", torch.bfloat16):
#             loss = model(input_ids=piece, labels=piece, use_cache=False).loss
#         loss.backward()
#     torch.nn.utils.clip_grad_norm_(adapters, 1.0)
#     optimizer.step()
#     optimizer.zero_grad()
# ```
#
# The last block has 16 bits on the card before it packs them, 16 GB for 8B: more than about 11B are packed on the host, as [on a T4](#On-a-T4). To save and to go on after a cut, take [the script](../scripts/train_long_sequences.py).
#
# **Do these two learn the same?** The lines of both blocks, each beside plain steps from the same start: weights in 16 bits in the model from above, and adapters on SmolLM2. A third run says what rounding alone does: other random numbers, by which an update of 16-bit weights is rounded, and adapters in fp32.

# %%
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.precision.pure_bf16 import bf16_adamw

rounded = partial(bf16_adamw, rounding="stochastic")
otherwise = partial(rounded, seed=1)


def in_backward(model, lr):
    return apply_optimizer_in_backward(model, optimizer_class=rounded, lr=lr)


def with_adapters(model):
    return apply_qlora(model, compute_dtype=torch.bfloat16)


def adapters_in_five_lines(model, **tiles):
    model = with_adapters(model)
    apply_chunked_cross_entropy(model)
    apply_tiled_mlp(model, norms=True, **tiles)
    apply_activation_checkpointing(model)
    return model


all_weights = {
    "plain": Way(unchanged, optimizer=rounded),
    "five lines, step in backward": Way(in_tiles, inputs_wait, optimizer=in_backward),
    "plain, other random numbers": Way(unchanged, optimizer=otherwise),
}
of_adapters = {
    "plain": Way(with_adapters, precision=in_16_bits),
    "five lines": Way(
        partial(adapters_in_five_lines, tile_size=sizes.learns // 2),
        inputs_wait,
        in_16_bits,
    ),
    "plain, adapters in fp32": Way(with_adapters),
}
on_24_gb = {
    "all weights": (all_weights, blocks_that_learn, 5e-4),
    "QLoRA": (of_adapters, partial(load_model, sizes.trained), 2e-4),
}
for method, (its_ways, build, lr) in on_24_gb.items():
    print(f"{method}:")
    build = partial(build, dtype=torch.bfloat16)
    learn = partial(learned, steps=sizes.fewer, build=build, lr=lr)
    curves = {which: learn(way) for which, way in its_ways.items()}
    on_24_gb[method] = beside_plain(curves)

# %% [markdown]
# With all weights the five lines are 0.004 away from the plain steps, and so are other random numbers. With *QLoRA* they are 0.008 away, and plain steps with the adapters in fp32 0.012. It is one seed, two small models, and eight steps on texts of 256 tokens: no long training was compared.
#
# *QLoRA* has its embedding and norms in bf16 here; peft's `prepare_model_for_kbit_training` leaves them in fp32. That had 0 to 5 more right answers of 64 after a run of 240 steps on short texts ([three seeds](../notebooks/05_fine_tuning_pretrained_models.ipynb#Which-rate?-Three-seeds)). It leaves 91,400 tokens of 161,000 for 8B on 24 GB, with 31 inputs × 91,400 × 4,096 × 4 bytes = 46 GB on the host. Where that is enough, write after `apply_qlora`:
#
# ```python
# for weight in model.parameters():
#     if weight.dtype == torch.bfloat16:
#         weight.data = weight.data.float()
# ```
#
# The entries below have bf16.
#
# ### Documents with questions
#
# The blocks learn each token of one text. With documents of your own, mostly only the answers are to be learned: a document and its question get the label -100, and stay in the text that the answer reads. Here the documents are modules of Python, and the answer is what the module says about itself, its docstring. One step takes two of them, each alone and as long as it is, and a third one judges.

# %%
import ast
import fnmatch
import linecache
import sched
import tempfile

from transformers import AutoModelForCausalLM


def document_of(module):
    """The source of a module without its docstring, and that docstring."""
    source = Path(module.__file__).read_text()
    docstring = ast.get_docstring(ast.parse(source), clean=False)
    return source.replace(docstring, "", 1), docstring


def row_of(document, answer, question="What is this module for?"):
    """Tokens and labels [1, S]; the answer alone is learned, and its end mark."""
    turn = {"role": "user", "content": f"{document}\n\n{question}"}
    asked = tokenizer.apply_chat_template(
        [turn], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    told = tokenizer(answer + tokenizer.eos_token)["input_ids"]
    ids = torch.tensor([asked + told], device=here.device)
    labels = ids.clone()
    labels[:, : len(asked)] = -100
    return ids, labels


def loss_of(model, row):
    ids, labels = row
    with in_16_bits():
        return model(input_ids=ids, labels=labels, use_cache=False).loss


def judged(model):
    with torch.no_grad():
        return loss_of(model, held_out).item()


*train_rows, held_out = (
    row_of(*document_of(each)) for each in (fnmatch, linecache, sched)
)
model = with_five_lines(load_model(sizes.trained)).train()
optimizer = adamw(model, lr=2e-5)
before = judged(model)  # in training mode: with model.eval() all logits come back

learned_tokens = [(labels != -100).sum() for _, labels in train_rows]
for row, count in zip(train_rows, learned_tokens):
    with inputs_wait(model):
        # Each learned token counts the same, in a long answer and in a short one.
        (loss_of(model, row) * count / sum(learned_tokens)).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
optimizer.zero_grad()
after = judged(model)

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder).to(here.device)
for saved, loaded in zip(model.parameters(), again.parameters(), strict=True):
    assert torch.equal(saved, loaded), "the file holds what was trained"
for (ids, _), count in zip(train_rows, learned_tokens):
    print(f"{ids.shape[1]:,} tokens, {count} of them learned")
print(f"held-out loss {before:.3f} → {after:.3f}", end=", ")
print(f"of the plain model from the file {judged(again):.3f}")
del model, optimizer, again

# %% [markdown]
# It shows that it runs: one step on two documents teaches nothing. The model that was saved is a plain one, without any recipe. Adapters are saved by the same line, and loaded by peft's `AutoPeftModelForCausalLM`. Short documents that share a row need [packing](../notebooks/05_fine_tuning_pretrained_models.ipynb#7.-Rows-of-unequal-length:-packing), and what a model learns from such pairs is the matter of [notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb).
#
# ### The longest texts
#
# Each entry of the table has four lengths, in thousands of tokens, and each arrow adds to the recipes before it:
#
# 1. *checkpoints*;
# 2. *a chunked loss*, too;
# 3. the inputs on the host, too: all that transformers and TRL have switches for;
# 4. tiles, too: **all five lines** (four with *all weights*, which need no `autocast`).
#
# The last column has two: the five lines without the host, and these with nested checkpoints (recipe 5) in the place of checkpoints. All lengths come from arithmetic. The last one on 24 GB is then checked by the step itself, on tensors without data. Before the table the cell prints, for the four lengths on 24 GB, which growing part is the largest at the peak: what the next recipe has to make smaller.

# %%
from recipes_lib.core.predict import CARDS
from recipes_lib.core.predict.any_size import any_size
from recipes_lib.core.predict.flops import step_operations
from recipes_lib.report.ladders.length import LengthLadder, duration
from recipes_lib.report.records import recorded
from recipes_lib.workflows.out_of_memory_doctor.longest_texts import (
    ALL_SWITCHES,
    CHECKPOINTS,
    CHECKPOINTS_AND_CHUNKS,
    FIVE_LINES,
    NESTED,
    WITHOUT_OFFLOAD,
    longest_text,
    share_of_memory,
    what_fills,
)
from recipes_lib.workflows.out_of_memory_doctor.remedies import limit_of


@functools.cache
def on_meta(shape):
    # Yours: model_without_weights("Qwen/Qwen3-4B", dtype=torch.bfloat16)
    return model_of_shape(shape, dtype=torch.bfloat16, device="meta")


def in_thousands(lengths):
    return " → ".join(
        f"{each / 1000:,.0f}K" if each > 1000 else "–" for each in lengths
    )


cards = {
    "T4": "T4, 16 GB, at most",
    "RTX 4090": "RTX 4090, 24 GB",
    "A100-80GB": "A100, 80 GB",
}
methods = {"all weights": "step in backward", "QLoRA": "QLoRA"}
stacks = {
    "checkpoints": CHECKPOINTS,
    "+ chunked loss": CHECKPOINTS_AND_CHUNKS,
    "+ offload": ALL_SWITCHES,
    "+ tiles": FIVE_LINES,
}
header = ["length 1 → 2 → 3 → 4", *cards.values(), "24 GB, no offload"]
table = [header, ["---", *["--:" for _ in header[1:]]]]
on_24, shares = {}, []
for shape in sizes.cards:
    model = on_meta(shape)
    for method, recipe in methods.items():
        fits = {}
        for card in cards:
            fits[card] = [
                longest_text(model, card=card, stack=(*stack, recipe))
                for stack in stacks.values()
            ]
            if max(fits[card]) < 1000:
                fits[card] = [0]
        if method == "all weights":  # a step in backward has no scaled loss for fp16
            fits["T4"] = [0]
        on_24[f"{shape}, {method}"] = fits["RTX 4090"]
        longest = fits["RTX 4090"][-1]
        if longest > 1000:
            on = {"card": "RTX 4090", "stack": (*FIVE_LINES, recipe)}
            shares.append(share_of_memory(model, longest, **on))
            grows = []
            for tokens, stack in zip(fits["RTX 4090"], stacks.values()):
                parts = what_fills(model, tokens, **on | {"stack": (*stack, recipe)})
                part = next(name for name in parts if name not in ("weights", "states"))
                grows.append(f"{part} {parts[part]:.0%}")
            more_room = limit_of(CARDS["A100-80GB"]) - limit_of(CARDS["RTX 4090"])
            per_gib = (fits["A100-80GB"][-1] - longest) / (more_room / GIB)
            print(
                f"{shape}, {method}, 24 GB are filled by:", " → ".join(grows), end=" "
            )
            print(f"({per_gib:,.0f} tokens for each further GiB)")
        no_host = [
            longest_text(model, card="RTX 4090", stack=(*stack, recipe))
            for stack in (WITHOUT_OFFLOAD, NESTED)
        ]
        row = [f"{shape}, {method}", *map(in_thousands, fits.values())]
        table.append([*row, in_thousands(no_host if max(no_host) > 1000 else [0])])
if shares:
    print("the steps themselves fill", end=" ")
    print(f"{min(shares):.1%} to {max(shares):.1%} of what the table gives to tensors")
Markdown("\n".join(f"| {' | '.join(row)} |" for row in table))

# %% [markdown]
# **Your own model**, with the imports of the cell:
#
# ```python
# from recipes_lib.core.model import model_without_weights
#
# model = model_without_weights("Qwen/Qwen3-4B", dtype=torch.bfloat16)
# print(longest_text(model, card="L4", stack=(*FIVE_LINES, "QLoRA")))
# ```
#
# What breaks first is mostly the loss. Behind it wait the inputs of the blocks, here the *activations*, and the one block that is computed again. With all five lines it is always that block.
#
# ### What do 16K to 128K take on 24 GB?
#
# In each field the first of the four that fits, the time of a step, and what waits on the host.
#
# Time is by arithmetic, for an RTX 4090 that reaches as much of its data sheet's rate as the steps of that kind did on the H100, from the fastest to the slowest: with tiles those of the five lines, else those of a chunked loss, and 5 % more for the offload, the most that others [measured](#6.-Offloaded-inputs). The five lines' steps hold the pinning of host memory, too, which a run does once; what tiles cost alone on a GPU is not known. Weights that are frozen are counted as if they trained, in the rates and in the times.

# %%
# Of the rate in the data sheet, by stack. Shorter steps had not warmed up.
print("of its data sheet's rate the H100 reached")
reached = {}
for which, step in recorded("lengths").items():
    if which.startswith(sizes.cards) and step["seconds"] > 5:
        shape, _, stack = which.split(", ")
        operations = step_operations(on_meta(shape), rows=1, length=step["tokens"])
        share = operations / step["seconds"] / CARDS["H100"].rate
        reached.setdefault(stack, []).append(share)
        print(f"  {share:.0%} with {which}, {step['tokens']:,} tokens")


def least(which, tokens):
    """The first stack that holds so many tokens, its time, and its bytes on the host."""
    if max(on_24[which]) < tokens:
        return "–"
    stack = next(name for name, most in zip(stacks, on_24[which]) if most >= tokens)
    model = on_meta(which.split(", ")[0])
    rates = reached.get("five lines" if stack == "+ tiles" else "chunked loss", [1])
    operations = step_operations(model, rows=1, length=tokens)
    seconds = operations / CARDS["RTX 4090"].rate
    if stack == "+ offload":
        seconds *= 1.05
    fastest, slowest = (duration(seconds / rate) for rate in (max(rates), min(rates)))
    answer = f"{stack}, {fastest} to {slowest}"
    if stack in ("+ offload", "+ tiles"):
        width = (model.config.num_hidden_layers - 1) * model.config.hidden_size
        answer += f", {2 * width * tokens / 1e9:,.0f} GB"
    return answer


wanted = (16_384, 32_768, 65_536, 131_072)  # tokens
table = [["24 GB", *[f"{tokens:,}" for tokens in wanted]], ["---"] * 5]
for which in on_24:
    table.append([which, *[least(which, tokens) for tokens in wanted]])
Markdown("\n".join(f"| {' | '.join(row)} |" for row in table))

# %% [markdown]
# So a million tokens for 8B are 31 steps of 32K, 21 to 26 minutes, or 8 of 131K, 1.2 to 1.6 hours.
#
# *The block at the top* has weights in fp32 and products in 16 bits, and so have *QLoRA*'s embedding and norms where they are kept in fp32. The arithmetic knows one precision at a time, so these lengths were found by bisection, and dry steps with that card's limit say how full it would be. The last two are *QLoRA* as TRL's trainer makes it, on lengths of the table:


# %%
def with_checkpoints(model):
    model.activation_checkpointing_enable()
    return model


def rest_in_fp32(model):
    """As peft prepares it: embedding, norms and output layer in 32 bits."""
    for weight in model.parameters():
        if weight.dtype == torch.bfloat16:
            weight.data = weight.data.float()
    return model


def adapters_beside_fp32(model):
    return rest_in_fp32(adapters_in_five_lines(model))


def qlora_of_trl(model, tiles):
    """As its trainer makes it from a base in four bits: the adapters have 16 bits, too."""
    model = quantize_nf4(model.to(torch.bfloat16), compute_dtype=torch.bfloat16)
    if tiles:
        apply_tiled_mlp(model, norms=True)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    model.enable_input_require_grads()
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.bfloat16()
    return with_all_switches(model)


stays = Way(with_checkpoints, **as_one_trains)  # no offload
with_chunks = stays._replace(adapt=with_all_switches)
no_offload = with_chunks._replace(adapt=with_five_lines)
by_trl, by_trl_in_tiles = (
    Way(partial(qlora_of_trl, tiles=tiles), inputs_wait_in_turns, in_16_bits, 1.0)
    for tiles in (False, True)
)
small, large = sizes.cards[0], sizes.cards[-1]
tried = {
    "checkpoints": (small, stays, 4_300),
    "a chunked loss": (small, with_chunks, 22_700),
    "the offload": (small, with_chunks._replace(around=inputs_wait), 22_900),
    "five lines, no offload": (small, no_offload, 29_300),
    "all five lines": (small, five_lines, 50_500),
    "QLoRA, rest in fp32": (
        large,
        Way(adapters_beside_fp32, inputs_wait, in_16_bits),
        91_400,
    ),
    "QLoRA by TRL, all switches": (large, by_trl, 64_600),
    "QLoRA by TRL, tiles, too": (large, by_trl_in_tiles, 161_000),
}
card = CARDS["RTX 4090"]
filled = {}


def dry_peak(shape, way, tokens):
    """Bytes of a step of the whole shape on that card."""
    dry_step = partial(without_data, way, min(tokens, sizes.most), shape)
    # A few blocks say what all need: each one more adds the same bytes.
    few = any_size(dry_step, layers=(3, 4), card=card)
    return few.peak(layers=on_meta(shape).config.num_hidden_layers)


for which in sizes.checked or tried:
    shape, way, tokens = tried[which]
    filled[which] = dry_peak(shape, way, tokens) / limit_of(card)
    print(f"{shape}, 24 GB, {which}: {tokens:,} tokens fill {filled[which]:.1%}")
longer = min(50_500, sizes.most)
shorter = longer * 4 // 5
fewer_bytes = filled["all five lines"] * limit_of(card)
fewer_bytes -= dry_peak(small, five_lines, shorter)
per_gib = (longer - shorter) / (fewer_bytes / GIB)
print(f"{small}, all five lines: {per_gib:,.0f} tokens for each GiB")

# %% [markdown]
# In the block at the top the offload brings 1 % without tiles (22,700 → 22,900), for there the MLP is the peak, and 1.7 times the length with them (29,300 → 50,500).
#
# **Before you use an entry:**
#
# - Nothing else may use the card. Each GiB that others have in `nvidia-smi` takes about 10,000 of the 161K tokens of 8B *QLoRA*. An RTX 3090 has as much. An L4 or A10G shows less than the 23.15 GiB that an RTX 4090 leaves for tensors: compare `torch.cuda.mem_get_info()`, and ask the doctor with your card.
# - These models know 131,072 positions. Entries above 131K are about memory only.
# - It counts tensors, and leaves 5 % of the card for holes between them; up to 0.4 % too much comes out of these 5 %. On the H100 seven steps filled the other 95 %, and fitted. An eighth took 22.87 of 23.15 GiB, and fitted, too. Your program needs `PYTORCH_ALLOC_CONF=expandable_segments:True` in its environment for that; in this notebook `machine()` sets it.
# - It knows PyTorch's kernels. Buffers of a library come on top, and what others measured with kernels of their own was up to 24 % away ([below](#Do-such-predictions-hold-on-a-card?)).
# - A dash says that it does not fit. All weights on a T4 have one because fp16 needs a scaled loss, and a step in backward has none.
# - The host has a limit, too. In the second table it is the last number of a field, with inputs in 16 bits; in fp32 they take twice that.
# - Times are forward and backward at that rate, second forward and copies included. No RTX 4090 has run one.
#
# ### Which row is yours
#
# | if | then | it costs |
# |---|---|---|
# | the doctor says that it fits *as it is* | nothing | nothing |
# | it fits with *checkpoints* | `model.activation_checkpointing_enable()`, and nothing else | one more forward |
# | with *+ chunked loss* | a chunked loss, too: TRL's default, Liger, or one line | little (recipe 2) |
# | with *+ offload* | the inputs on the host, too: `SFTConfig` above, or `offload_activations` (with the block at the top, in fp32, take tiles first) | on an H100 prime-rl took 2 to 5 % longer (recipe 6) |
# | with *+ tiles* | all five lines | on two CPU cores 1.3 times the plain blocks, nearly all of it for checkpoints. On a GPU the parts are not timed apart: of its data sheet's rate the H100 reached 16 and 23 % with the five lines, pinning included, and 28 to 34 % with a chunked loss, at other lengths |
# | longer, and the host has no room, as on a free Colab | the five lines without `offload_activations`, up to the first length of *24 GB, no offload*; up to its second `apply_nested_checkpointing(model, group=best_group(blocks))` of `recipes_lib.memory.nested_checkpointing` in place of the third call | one more forward; nested, nearly two |
# | none, with all weights | *QLoRA* | only adapters train, on a rounded base |
# | it is longer than your model knows | recipe 8, before all else; Llama 3.1 and 3.2 are scaled already, and end at 131,072 | some loss within the trained length |
# | memory is enough, and a step takes too long | a window (recipe 7), or several GPUs ([notebook 02](../notebooks/02_multi_gpu_training.ipynb)) | another model, or more cards |
# | your model is a hybrid (Qwen3.5, Qwen3-Next, LFM2, Mamba) | install the packages of its kernels, which `load_model` names (published: 1.22 → 0.70 → 0.49 s a step), and do not pack short texts without `check_document_mask` ([why](../TRAPS.md)) | nothing |
#
# **Your own model and length** are one command. Its `--model` is an id of the hub, a folder or a shape:

# %%
from recipes_lib.workflows.out_of_memory_doctor import diagnose

shape = sizes.cards[-1]
options = '--card "RTX 4090" --dtype bf16 --batch-size 1 --seq-len 32768'
print(f"$ python -m recipes_lib doctor --model {shape} {options}")
model = model_of_shape(shape, dtype=torch.bfloat16, device="meta")
diagnosis = diagnose(model=model, batch_size=1, seq_len=32_768, card="RTX 4090")
for remedy in diagnosis.remedies:
    print(f"{remedy.name}: {remedy.outcome}", *filter(None, [remedy.costs]), sep="; ")
print(diagnosis.check())
# Before the command come imports, for a loop of your own.
print(*[line for line in diagnosis.lines if "import" not in line], sep="\n")

# %% [markdown]
# **Two ways hold 32K.** *LoRA* on a base in 16 bits, whose inputs wait on the host: the doctor takes it first, because its base is not rounded. And *QLoRA* without an offload. (The list is the equation, here 5 % above the dry step that checks it.) The last command is for LoRA, and is run in a clone of the repository: [the five lines in one flat file](../scripts/train_long_sequences.py), on a text of yours. No GPU has run it. For *QLoRA* write `--method qlora`, without `--inputs host`: 32K lies below the second length of its entry (34K).
#
# ### On a T4
#
# It has no bf16, and its fast kernels refuse models with fewer heads of keys than of queries, as Llama 3 and Qwen3 are. So call `apply_flash_attention(model)` first. It copies keys and values for all heads, which the entries leave out. The block at the top then takes no `autocast`, and has room for half a billion weights. *QLoRA* multiplies in fp16, and packs before the model is on the card. No T4 has run these lines:
#
# ```python
# from recipes_lib.attention.flash import apply_flash_attention
# from recipes_lib.fine_tuning.qlora import apply_qlora, quantize_nf4
#
# model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16).train()  # on the host: 16 GB for 8B, which a free Colab has not; 6.4 for 3B
# quantize_nf4(model, compute_dtype=torch.float16, device="cuda")
# model = apply_qlora(apply_flash_attention(model.to("cuda")))  # packed already: adds adapters
# scaler = torch.amp.GradScaler()
# # Then as above, with autocast in torch.float16, and for backward and step:
# scaler.scale(loss).backward()
# scaler.step(optimizer)
# scaler.update()
# ```
#
# <!-- numbers:gpu-04 -->
# <!-- end -->
#
# ## What runs out: one equation
#
# Weights and optimizer states (AdamW keeps two averages per weight) take the same bytes for any text. The rest grows with its length $S$:
#
# $$\text{peak}(S) = \text{fixed} + a\,S^2 + b\,S$$
#
# $a$ counts attention *scores*: one number for each pair of tokens, in each head of each layer. $b$ counts what every single token leaves behind: *activations*, which forward keeps for backward, and *logits*, one number for each entry of the vocabulary. *Embedding copies* are there for a moment of backward, because the embedding is also the output layer. [equation.py](../recipes_lib/core/predict/equation.py) has every term in lines to read aloud.
#
# **Guess first.** Within 4 GiB, in fp32 and with all scores stored, how many tokens can a text have on which SmolLM2-135M trains?

# %%
from recipes_lib.core.predict import equation
from recipes_lib.workflows.longest_sequence import predicted_longest

build = partial(model_of_shape, sizes.shape, layers=sizes.layers, dtype=dtype)
weightless = build(device="meta")  # weighs nothing: enough for arithmetic
blocks_here = weightless.config.num_hidden_layers


def eager_terms(tokens):
    plain = equation.plain_step(weightless, rows=1, length=tokens)
    return equation.with_eager_attention(plain)


def longest_by(terms, limit=sizes.limit):
    """The longest text within the limit by arithmetic."""
    return predicted_longest(lambda tokens: terms(tokens).peak, limit_bytes=limit)


common = eager_terms(sizes.common)
print(common)
fixed = common.weights + common.states  # bytes
heads = weightless.config.num_attention_heads * blocks_here
a = heads * dtype.itemsize
b = (common.activations + common.loss - a * sizes.common**2) / sizes.common
print(f"fixed {fixed / 2**20:,.0f} MiB")
print(f"a     {a:,} bytes per pair of tokens")
print(f"b     {b / 1024:,.0f} KiB per token")
print(f"longest text: {longest_by(eager_terms):,} tokens")

# %% [markdown]
# Check it by hand. Fixed are weights and states, 513 + 1,026 MiB. The scores are 9 heads × 30 layers × 512² pairs × 4 bytes = 270 MiB, a part of the activations. The loss is 512 tokens × 49,152 logits × 4 bytes × 3 = 288 MiB, because it needs this table three times: the logarithms, their gradients, and those of the logits. With $a$ and $b$ the limit is a quadratic equation for $S$, and its root is the length printed above. The terms add up to more than the peak, because gradients come when activations go.
#
# ## Baseline: every score is stored
#
# The plain formula of attention, softmax(QKᵀ/√E) V with a query, a key and a value per token, is called *eager*: all scores are made, and they wait for backward.
#
# Each recipe is one row of a table, the *ladder*. `climb` makes a row:
#
# - *predicted*: the longest text by the equation, before the search.
# - *longest*: the search goes on until one length fits and another, 2 % longer, does not.
# - *off by*: the prediction against the place where a straight line between these two meets the limit.
# - *gradients off by*: from a real forward and backward on 512 tokens. It is the length of their difference from those of the first row, over the length of those.
#
# A step of the longest texts takes more than an hour here. So on a CPU the search takes **dry steps**: the loop above on PyTorch's fake tensors, which have shapes and no data. Bytes are counted, and nothing is computed. The equation and a dry step know nothing of each other. And the real step of 4,096 tokens checks the dry one.

# %%
from recipes_lib.workflows.longest_sequence import search

gc.collect()
gc.freeze()  # counting bytes walks through all objects: not through those of the imports
ladder = LengthLadder(
    "04_training_long_sequences", timed_at=sizes.cost, against="flash attention"
)
ways = {}  # by row
found = {}  # by row: what the search has found
size_of = numpy.linalg.norm  # the length of a vector


def climb(row, way, predicted=None, start=None, also=()):
    """Find the longest text of a row, and add it to the ladder. Returns gradients of a real step."""
    ways[row] = way

    def arrange():
        step, optimizer = prepare(way, build(), lr=2e-5)
        return lambda tokens: step(text_of(tokens)), optimizer.zero_grad

    options = {"limit_bytes": sizes.limit, "resolution": 0.02, "also": also}
    found[row] = search(arrange, start=start or predicted, **options)
    loss, gradient = loss_and_gradient(way)
    ladder.add(
        row,
        tokens=found[row].tokens,
        crossing=found[row].crossing,
        peak_bytes=found[row].peak_bytes,
        predicted=predicted,
        loss=loss,
        gradient_error=apart_by(gradient, first_gradient),
    )
    print(ladder.line(row))
    return gradient


def loss_and_gradient(way):
    """Of a real step on a text that every row can do: the loss, and all gradients in one [P]."""
    seed_everything(0)
    # Random weights on a GPU, and trained ones on a CPU.
    model = way.adapt(build() if on_gpu else load_model(sizes.trained))
    ids = text_of(sizes.common)
    with way.around(model):
        with way.precision():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    gradients = [each.grad.flatten().float().cpu() for each in model.parameters()]
    # As an array it is not among the tensors that are counted.
    return loss.item(), numpy.concatenate(gradients)


def apart_by(gradient, other):
    return float(size_of(gradient - other) / size_of(other))


def eager(model):
    model.set_attn_implementation("eager")
    return model


first_loss, first_gradient = loss_and_gradient(Way(eager))
climb("baseline", Way(eager), longest_by(eager_terms), also=(sizes.grows,))
print(f"loss of {sizes.common} tokens {first_loss:.4f}")

# %% [markdown]
# ## Part A: the same mathematics, in less memory
#
# ### 1. Flash attention
#
# Eager attention keeps a score for every pair of tokens, in every head of every layer.
#
# ```text
# eager    scores [H, S, S] -> softmax -> times V        S x S numbers wait for backward
# flash    for each block of keys: scores of a block, running maximum, running sum
# ```
#
# **Guess first.** Without the scores, how many times as long can the text be?
#
# **The idea.** A softmax divides by a sum over *all* keys. Before that the largest score is subtracted, so that exp does not overflow. Block by block, neither is known yet. So keep the largest score so far and the sum so far. If a later block has a larger score, what was summed before is multiplied by a correction.

# %%
from recipes_lib.attention.flash import best_kernel, running_softmax_attention

show(running_softmax_attention)
query, key, value = torch.randn(3, 1, 4, 100, 16)  # [B, H, S, E] each
by_hand = running_softmax_attention(query, key, value, block_size=16)
library = F.scaled_dot_product_attention(query, key, value, is_causal=True)
assert torch.allclose(by_hand, library.transpose(1, 2), atol=1e-5)

# %% [markdown]
# **The line you will write tomorrow** is `set_attn_implementation("sdpa")`, or nothing, because SDPA is the default of transformers. On a GPU `flash_attention_2` and `_3` are faster, and store as little.


# %%
def sdpa(model):
    model.set_attn_implementation("sdpa")
    return model


def sdpa_terms(tokens):
    return equation.plain_step(weightless, rows=1, length=tokens)


def exponent(search):
    """Bytes beside the fixed ones grow as tokens to this power."""
    lengths = (search.tokens, sizes.grows)
    small, large = [search.peaks[tokens] - fixed for tokens in lengths]
    return math.log(large / small) / math.log(lengths[1] / lengths[0])


print(best_kernel(weightless).why)
climb("flash attention", Way(sdpa), longest_by(sdpa_terms), also=(sizes.grows,))
slopes = {row: exponent(each) for row, each in found.items()}
for row, slope in slopes.items():
    print(f"{row:<16} memory grows as S^{slope:.2f}")
print(f"to the guess: {ladder['flash attention'].times_previous:.2f}× as long")

# %% [markdown]
# Without the scores memory grows with S. With them it grows faster, and not yet with S² at these lengths, because *b S* is still a large part. Activations and logits stay, so the text is only that much longer. *Not when* you need the attention weights, or when the model caps its scores with a tanh, as Gemma 2 does.
#
# ### 2. Chunked loss
#
# Now the logits are the largest tensor.
#
# ```text
# at once   hidden [T, D] -> logits [T, V] -> softmax [T, V] -> gradient [T, V]
# chunks    for C tokens: logits [C, V] -> loss and both gradients at once -> free
# ```
#
# **Guess first.** Without all logits at once, by which factor does the text grow?
#
# **The idea.** The gradient of one token's logits is softmax(logits) minus one-hot(target). It needs no other token. The loss is one number, so all that backward adds later is one factor. So a chunk gives its part of the loss and of both gradients, and its logits are freed.

# %%
from recipes_lib.memory.chunked_cross_entropy import plain_chunked_loss

show(plain_chunked_loss)
states = torch.randn(50, 16, requires_grad=True)  # [T, D]
head = torch.randn(40, 16, requires_grad=True)  # [V, D]
labels = torch.randint(0, 40, (50,))
at_once = F.cross_entropy(states @ head.T, labels)
exact = (at_once, *torch.autograd.grad(at_once, (states, head)))
chunked = plain_chunked_loss(states, head, labels, chunk_size=16)
for ours, expected in zip(chunked, exact):
    assert torch.allclose(ours, expected, atol=1e-5)
if hasattr(F, "linear_cross_entropy"):  # PyTorch's own, since 2.13
    chunks = torch.nn.LinearCrossEntropyOptions(
        chunking_method=None, batch_chunk_size=16
    )
    theirs = F.linear_cross_entropy(states, head, labels, options=chunks)
    assert torch.allclose(theirs, at_once, atol=1e-5)

# %% [markdown]
# | you use | set |
# |---|---|
# | TRL's `SFTTrainer` | nothing: the default is chunked since 1.7, in 1.16 by the name `"nll"`; before, set `loss_type="chunked_nll"` |
# | transformers' `Trainer` | `use_liger_kernel=True` on a GPU |
# | Axolotl | `cut_cross_entropy: true`, or its Liger plugin |
# | a loop of your own | `apply_chunked_cross_entropy(model)`, or `F.linear_cross_entropy` |
# | the logits themselves | no chunks |
#
# Ours is one call on a model of any family, and checks itself against the model's own loss. `F.linear_cross_entropy` needs `batch_chunk_size=256`: on this CPU its defaults are slow. Forward and backward of the loss alone, on few tokens (so that 256 rows are one chunk):

# %%
from recipes_lib.workflows.bench.kernels import compare_losses

beside = compare_losses(
    tokens=sizes.common // 2,
    hidden=weightless.config.hidden_size,
    vocab=weightless.config.vocab_size,
    dtype=dtype,
    rounds=1,
)
for which in ("plain", "ours", "torch", "torch, 256 rows"):
    if which in beside:
        print(f"{which:<16}{beside[which].seconds:.3f} s")


def lean(model):
    # A recipe proves itself on the model. The ladder compares more, so here it need not.
    return apply_chunked_cross_entropy(sdpa(model), check=False)


def lean_terms(tokens):
    return equation.with_chunked_loss(sdpa_terms(tokens))


climb("+ chunked loss", Way(lean), longest_by(lean_terms))
print(f"to the guess: {ladder['+ chunked loss'].times_previous:.2f}× as long")

# %% [markdown]
# The activations of all layers are now nearly all that grows, so the gain is small, 1.33 times. It becomes large together with the next recipe.
#
# ### 3. Activation checkpointing
#
# Every block keeps its activations until backward reaches it. But backward visits one block at a time.
#
# ```text
# plain        x0 [a0] x1 [a1] x2 [a2] -> loss      all [a] wait
# checkpoints  x0      x1      x2      -> loss      [a2] once more from x2, used, freed, then [a1] …
# ```
#
# **Guess first.** For each number of its input, a block of this model keeps 19 for backward: query, key, value, the inputs of norms and matmuls, and what the MLP multiplies. With the input alone, is the text 19 times as long?
#
# **The idea.** Forward without recording; in backward, forward once more with recording, and backward through that.

# %%
from recipes_lib.memory.activation_checkpointing import (
    InputOnly,
    checkpointed_by_hand,
)

show(checkpointed_by_hand, InputOnly)
layers = [torch.nn.Linear(8, 8) for _ in range(9)]
hidden = torch.randn(1, 5, 8, requires_grad=True)
plain = torch.nn.Sequential(*layers)(hidden).sum()
(expected,) = torch.autograd.grad(plain, hidden)
(ours,) = torch.autograd.grad(checkpointed_by_hand(layers, hidden).sum(), hidden)
assert torch.equal(ours, expected)

# %% [markdown]
# **The line you will write tomorrow** is `model.activation_checkpointing_enable()`, before transformers 5.17 `gradient_checkpointing_enable()`, and `activation_checkpointing=True` in the Trainer. The rows are that line.


# %%
def checkpointing(model):
    model.activation_checkpointing_enable()
    return model


def usual_terms(tokens):
    return equation.with_checkpointing(sdpa_terms(tokens))


def checkpoint_terms(tokens):
    return equation.with_checkpointing(lean_terms(tokens))


def usual(model):
    return checkpointing(sdpa(model))


def lean_and_checkpointed(model):
    return checkpointing(lean(model))


climb("SDPA + checkpoints", Way(usual), longest_by(usual_terms))
climb("+ checkpointing", Way(lean_and_checkpointed), longest_by(checkpoint_terms))
saved = sdpa_terms(sizes.common).activations / (sizes.common * dtype.itemsize)
saved /= blocks_here * weightless.config.hidden_size
print(f"a block keeps {saved:.0f} numbers for each one of its input")
tokens = ladder["+ checkpointing"].tokens
one_input = tokens * weightless.config.hidden_size * dtype.itemsize
everything, checkpointed = lean_terms(tokens), checkpoint_terms(tokens)
print(f"in inputs of a block: all {everything.activations / one_input:.0f};", end=" ")
print(f"with checkpoints {checkpointed.activations / one_input:.0f} that wait", end=" ")
print(f"and {checkpointed.one_block / one_input:.0f} of one block")
alone = ladder["SDPA + checkpoints"].tokens / ladder["flash attention"].tokens
both = ladder["+ checkpointing"].tokens / ladder["+ chunked loss"].tokens
print(f"checkpoints alone make the text {alone:.1f}× as long,", end=" ")
print(f"beside the chunked loss {both:.1f}×")

# %% [markdown]
# Without the chunked loss, checkpoints stop at the logits. Without checkpoints, the chunked loss gains little. The large factor belongs to the pair: **switch both on**. It is 11 and not 19, because the inputs stay, and because one block is there in full while it is computed again: bytes of 33 + 24 inputs (30 blocks and three of the last norm wait) in the place of 583, ten times fewer. *Not when* activations are not at the peak: then you pay a forward for nothing.
#
# ### 4. Tiled MLP
#
# In the block that is computed again, the MLP has the widest tensors: tokens × feed-forward width.
#
# ```text
# whole    x [S, D] -> up, gate [S, F] -> down -> [S, D]       all S rows at once
# tiled    for t rows of x:  the same [t, F]                   one tile at a time, also in backward
# ```
#
# **Guess first.** What is larger now: the inputs of all blocks, or one block with its MLP?
#
# **The idea.** An MLP treats each token by itself, so it can run tile by tile, and be computed again tile by tile in backward.

# %%
from recipes_lib.memory.tiled_mlp import tiled_by_hand

show(tiled_by_hand)
mlp = torch.nn.Sequential(
    torch.nn.Linear(8, 32), torch.nn.SiLU(), torch.nn.Linear(32, 8)
)
hidden = torch.randn(1, 50, 8)
assert torch.allclose(tiled_by_hand(mlp, hidden, tile_size=16), mlp(hidden), atol=1e-6)


def tiled(model):
    return apply_tiled_mlp(lean(model), tile_size=sizes.tile, check=False)


def tiled_terms(tokens):
    in_tiles = equation.with_tiled_mlp(lean_terms(tokens), tile=sizes.tile)
    return equation.with_checkpointing(in_tiles)


def tiled_and_checkpointed(model):
    return checkpointing(tiled(model))


climb("+ tiled MLP", Way(tiled_and_checkpointed), longest_by(tiled_terms))

before, after = checkpoint_terms(16_384), tiled_terms(16_384)
print("to the guess, of 16,384 tokens:")
print(f"  inputs of the blocks {before.activations / 2**20:6,.0f} MiB")
print(f"  one block            {before.one_block / 2**20:6,.0f} MiB")
print(f"  one block, tiled     {after.one_block / 2**20:6,.0f} MiB")

# %% [markdown]
# The inputs, with what waits beside them, are larger, and a tile does not touch them: hence the small gain, 1.3 times. Once they are elsewhere, as in recipe 6, the one block is most of what grows. The price is many small products; the MLP's forward still runs twice, as with checkpoints, because the checkpoint of the block stops at the MLP's input. *Not when* no block is checkpointed yet.
#
# **The line you will write tomorrow**: Axolotl `tiled_mlp: true`, Unsloth `unsloth_tiled_mlp=True` in `from_pretrained` (published: 1.3 times the step), DeepSpeed's `TiledMLP`. None of them is installed here, and transformers has none, so the row is ours.
#
# ### 5. Nested checkpoints
#
# What still grows is the input of every block: L tensors of tokens × width.
#
# ```text
# checkpoints   x0  x1  x2  x3  x4  x5  x6  x7  x8       L inputs
# nested        x0          x3          x6               L / k, and k - 1 more inside of one group
# ```
#
# **Guess first.** With 30 blocks, which k keeps the fewest inputs?
#
# **The idea.** Checkpoints inside checkpoints. Backward computes a group of k blocks again, keeping their inputs, and then each block once more.

# %%
from recipes_lib.memory.nested_checkpointing import (
    apply_nested_checkpointing,
    best_group,
    nested_by_hand,
)

show(nested_by_hand)
hidden = torch.randn(1, 5, 8, requires_grad=True)
plain = torch.nn.Sequential(*layers)(hidden).sum()
gradients = torch.autograd.grad(plain, hidden)
by_hand = nested_by_hand(layers, hidden, group=3).sum()
assert torch.equal(*gradients, *torch.autograd.grad(by_hand, hidden))
group = best_group(blocks_here)


def nested(model):
    return apply_nested_checkpointing(tiled(model), group=group, check=False)


def nested_terms(tokens):
    in_tiles = equation.with_tiled_mlp(lean_terms(tokens), tile=sizes.tile)
    return equation.with_checkpointing(in_tiles, group=group)


climb("+ nested checkpoints", Way(nested), longest_by(nested_terms))
print(
    f"to the guess: k = {group}, the smallest of the best, which computes the least again"
)

# %% [markdown]
# With k = 4 the last of 8 groups has two blocks. The inputs of 7 groups wait, and 3 inside the group that is computed again: 10, and as many with k = 5 and 6. transformers, TRL, Axolotl and Unsloth have no switch for it: they offload the inputs instead, which is the next recipe. *Not when* the inputs fit into host memory.
#
# ### 6. Offloaded inputs
#
# The same inputs can wait elsewhere: a GPU has the host's memory, a CPU has the disk.
#
# ```text
# forward       block 0  ->  block 1  -> … ->  block L-1  -> loss
#                 | x0         | x1               | stays: backward needs it first
# host or disk    v            v                  |
#                 | back       | back             |
# backward      block 0  <-  block 1  <- … <-  block L-1
# ```
#
# **Guess first.** Nested checkpoints leave about 2√L inputs; with the inputs elsewhere one stays. How many times as long is the text then, and how much of that is left without tiles?
#
# **The idea.** Autograd asks a pair of hooks where to keep each saved tensor.

# %%
from recipes_lib.memory.activation_offload import offloaded_by_hand

show(offloaded_by_hand)


def untiled_away(tokens):
    return equation.with_inputs_elsewhere(checkpoint_terms(tokens))


def tiled_away(tokens):
    return equation.with_inputs_elsewhere(tiled_terms(tokens))


# Inputs of checkpointed blocks are all that autograd keeps, so they are all that goes.
waits = Way(tiled_and_checkpointed, inputs_wait_in_turns)
climb("+ offloaded inputs", waits, longest_by(tiled_away))
print("to the guess: as long as")
for row in ("+ nested checkpoints", "+ tiled MLP"):
    more = ladder["+ offloaded inputs"].tokens / ladder[row].tokens
    print(f"  {row}: {more:.1f}×")
print(f"without tiles, by the equation: {longest_by(untiled_away):,} tokens")

# %% [markdown]
# To the guess: 1.5 times as long as nested checkpoints, and without tiles less than half as long. *+ offloaded inputs* replaces *+ nested checkpoints*: the other answer to the same question, without the additional forward.
#
# **The line you will write tomorrow**: `model.activation_checkpointing_enable(offload=True)`, since [transformers 5.17](https://github.com/huggingface/transformers/pull/48444). It needs a GPU, and the computation waits for each copy. TRL's and Axolotl's copy beside it, as ours does with `in_flight=1`; ours also goes to disk. This row waits, which takes the least memory.
#
# **What it gives on a card, and what it costs there.** Others have measured that: [prime-rl](https://github.com/PrimeIntellect-ai/prime-rl/blob/30bf494fe5b44777ee10764ba8a32b579a91f65e/benchmarks/results/BENCHMARKS.md) on one H100, with checkpoints that stay and with checkpoints that go to the host. The arithmetic is (blocks − 1) × tokens × width × 2 bytes:

# %%
# Published: GiB and seconds of a step, where checkpoints stay and where they go.
measured_by_others = (
    ("Qwen3-0.6B, all weights", (28, 1024), 65_536, (19.6, 16.1), (6.46, 6.57)),
    ("Qwen3-0.6B, LoRA", (28, 1024), 65_536, (11.5, 7.9), (6.58, 6.70)),
    ("Qwen3-4B, LoRA", (36, 2560), 16_384, (23.3, 20.6), (2.63, 2.75)),
    ("Qwen3-4B, LoRA", (36, 2560), 65_536, (42.0, 31.1), (15.74, 16.21)),
)
for which, (layers_of, width), tokens, memory, clock in measured_by_others:
    gone = (layers_of - 1) * tokens * width * 2 / GIB
    print(f"{which:<24}{tokens:>7,} tokens: by arithmetic −{gone:4.1f} GiB,", end=" ")
    print(f"measured −{memory[0] - memory[1]:4.1f},", end=" ")
    print(f"time +{clock[1] / clock[0] - 1:.1%}")

# %% [markdown]
# The arithmetic is right to 0.2 GiB. The price is 2 to 5 % of the time. From 16,384 to 65,536 tokens it falls: computing grows faster than the text, and the copies as it does. *Not when* the link is slow and the text short.
#
# ## The five lines
#
# Now the default, all switches and the five lines, all in bf16 and with clipping. The five lines hold recipes 1 to 4 and 6 (SDPA is the default), with the norms in tiles like the MLP, of 1,024 tokens, the default; the rows above had tiles of 256. The equation knows one precision only, so these rows have no prediction.

# %%
start = ladder["+ tiled MLP"].tokens
in_fp32 = ladder["flash attention"].tokens
plain_gradient = climb("SDPA, bf16", plain_way, start=in_fp32)
climb("all switches", all_switches, start=2 * start)
climb("the five lines", five_lines, start=3 * start, also=(sizes.long,))
longest = ladder["the five lines"].tokens
switches = ladder["all switches"].tokens
print(f"{longest / switches:.1f}× the length of all switches,", end=" ")
print(f"{longest / ladder['SDPA, bf16'].tokens:.0f}× that of the default")

# The same gradients? In bf16 the plain step has others than in fp32, too.
off = {"the plain step in bf16, from fp32": apart_by(plain_gradient, first_gradient)}
beside_it = {"all switches": all_switches}
beside_it["the five lines, in tiles of a few tokens"] = five_lines._replace(
    adapt=in_tiles
)
for which, way in beside_it.items():
    _, gradient = loss_and_gradient(way)
    off[f"{which}, from the plain step in bf16"] = apart_by(gradient, plain_gradient)
for which, distance in off.items():
    print(f"gradients of {which}: {distance:.0e}")
if not on_gpu:  # there the search has taken real steps
    step = real["five lines", sizes.long]
    dry_bytes = found["the five lines"].peaks[sizes.long]
    print(f"{sizes.long:,} tokens, the real step: {step['bytes']:,} bytes,", end=" ")
    print(f"the dry one is off by {abs(dry_bytes / step['bytes'] - 1):.2%}")

# %% [markdown]
# At equal precision the tiles make the text 1.7 times as long. The 4e-02 of the rows is bf16 itself, because the plain step has it, too. From that step all switches are 1e-02 away, and so are the five lines, even in tiles of 128 tokens. Each tile adds its part of the weights' gradients, rounded, and on another processor that may count: the default is large tiles, of 1,024 tokens or more. None of the longest steps was computed.
#
# ## What it costs
#
# Forward and backward run through as many blocks as one group of nested checkpoints has, without the loss, on 2,048 tokens, with which the plain step exceeds the 4 GiB. The rows take turns, and the fastest turn of each counts.

# %%
# The first two have the blocks of another row. Those in bf16 were timed above.
in_bf16 = ("SDPA, bf16", "all switches", "the five lines")
untimed = ("+ chunked loss", "SDPA + checkpoints", *in_bf16)
timed = [row for row in ways if row not in untimed]
slice_of = partial(model_of_shape, sizes.shape, layers=max(group, 2), dtype=dtype)


def blocks_of(way):
    """Forward and backward through some blocks of a row."""
    model = way.adapt(slice_of())
    ids = text_of(sizes.cost)

    def turn():
        with way.around(model):
            outputs = model.base_model(input_ids=ids, use_cache=False)
            outputs.last_hidden_state.sum().backward()
        model.zero_grad()
        synchronize()

    return turn


took = in_turns({row: blocks_of(ways[row]) for row in timed}, rounds=sizes.rounds)
ladder.set_times(took)
ladder

# %% [markdown]
# *Time* is that of the blocks against SDPA, all in fp32, in brackets the two rounds: what overlaps has no order. One more forward adds a third of the operations, and nested checkpoints nearly two thirds. Tiles have 256 tokens here.
#
# At these 2,048 tokens nobody needs tiles or an offload. So the same was recorded on 16,384, in bf16, with tiles of 1,024 tokens, the default (`python -m benchmarks.long_texts`, some twenty minutes):
#
# <!-- numbers:long_texts-04 -->
# | 16,384 tokens, 4 blocks | seconds | to plain, with the range of 3 rounds |
# |---|--:|--:|
# | plain | 34.7 | 1.00× (1.00–1.00) |
# | checkpoints | 45.1 | 1.30× (1.28–1.30) |
# | checkpoints, tiles | 46.9 | 1.35× (1.31–1.37) |
# | nested checkpoints, tiles | 54.2 | 1.56× (1.52–1.62) |
# | offloaded inputs | 45.0 | 1.30× (1.26–1.34) |
# | offloaded inputs, tiles | 45.9 | 1.32× (1.28–1.34) |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-27. Forward and backward through the blocks, without the loss, in turns; the fastest turn counts.*
#
# **Learning at length**: 6 such blocks, fresh weights, 2 texts of 4,096 tokens in tiles of the default size, 10 steps. The loss of the plain steps goes from 10.88 to 7.20. The five lines are 0.0003 away from them at most, and plain steps in fp32 0.0006.
# <!-- end -->
#
# There checkpoints cost 30 % (25 % at 2,048 tokens, in fp32), tiles 2 to 4 % more, by rounds whose ranges overlap (10 % there, with tiles of 256), nested checkpoints 56 %, and the offload nothing: without tiles 45.0 s against 45.1, with them 45.9 against 46.9. (The disk is in free memory here. A GPU has a link to the host between: on an H100 others found 2 to 5 %, recipe 6.)

# %%
title = f"The five lines: {longest / switches:.1f} times as long as all switches"
ladder.chart(title=title, strong=in_bf16, key=("in bf16", "in fp32"))

# %%
near, far = real["five lines", sizes.short], real["five lines", sizes.long]
per_token = {"plain": real["plain", sizes.short]["seconds"] / sizes.short}
per_token |= {"near": near["seconds"] / sizes.short, "far": far["seconds"] / sizes.long}
slope = (per_token["far"] - per_token["near"]) / (sizes.long - sizes.short)
print("on the line through both real steps:")
for tokens in (16_384, longest):
    at_length = per_token["near"] + slope * (tokens - sizes.short)
    print(f"{tokens:,} tokens: {1e3 * at_length:.0f} ms per token,", end=" ")
    print(f"{duration(at_length * tokens)} for the step")

# %% [markdown]
# A token reads all tokens before it, so it takes longer in a longer text. Two points make this line, and one of them ran once. At 16,384 tokens it can be checked: the four blocks of the table above took 45.9 s, so thirty take 5.7 minutes, without the loss.
#
# ## Do such predictions hold on a card?
#
# **On an H100 that plays a smaller card.** PyTorch's allocator got the memory that an RTX 4090 leaves for tensors, and nothing beyond. Then *checkpoints*, *a chunked loss* or *all five lines*, with *all weights* in 16 bits or *QLoRA*, took one step of each length up to 140,000 tokens that the table of that day promised on 24 GB. All twelve fitted. (Longer ones were left out to save time.)
#
# The predictions beside them were made *after* the run, by code that it had corrected in two places, so they are no forecast: they show that it accounts for these twelve. Five of the lengths differ from today's table for that reason. Of today's longest texts 3B (43K) is below a step that ran, which took some of the 5 % that the table leaves, and 8B (161K) a fifth above one; none of the others has run. Below five seconds the seconds say nothing: no step had warmed up. That run pinned whole inputs, which PyTorch rounds up to a power of two: 67 GB for the last row. Today's lines pin pieces of 64 MiB, 34 GB, which no card has run.
#
# <!-- numbers:lengths_on_a_card-04 -->
# | model, what trains, lines | tokens | predicted, GiB | measured, GiB | difference | seconds |
# |---|--:|--:|--:|--:|--:|
# | llama-3.2-1b, all weights, checkpoints | 9,982 | 22.05 | 22.04 | +0.05% | 1.5 |
# | llama-3.2-1b, all weights, chunked loss | 74,141 | 22.07 | 22.05 | +0.08% | 5.9 |
# | llama-3.2-1b, QLoRA, checkpoints | 13,873 | 21.99 | 21.99 | +0.01% | 0.8 |
# | llama-3.2-1b, QLoRA, chunked loss | 79,892 | 16.28 | 16.28 | +0.01% | 6.6 |
# | llama-3.2-3b, all weights, checkpoints | 2,489 | 22.04 | 22.04 | +0.02% | 1.5 |
# | llama-3.2-3b, all weights, chunked loss | 9,031 | 22.06 | 22.05 | +0.03% | 1.0 |
# | llama-3.2-3b, all weights, five lines | 53,513 | 22.87 | 22.87 | +0.00% | 15.4 |
# | llama-3.2-3b, QLoRA, checkpoints | 12,175 | 21.97 | 21.97 | +0.01% | 1.2 |
# | llama-3.2-3b, QLoRA, chunked loss | 49,869 | 17.78 | 17.78 | +0.04% | 6.7 |
# | llama-3.1-8b, QLoRA, checkpoints | 9,523 | 21.97 | 21.97 | +0.01% | 1.6 |
# | llama-3.1-8b, QLoRA, chunked loss | 26,519 | 18.52 | 18.51 | +0.04% | 4.9 |
# | llama-3.1-8b, QLoRA, five lines | 135,015 | 20.51 | 20.52 | -0.07% | 91.4 |
#
# *NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, transformers 5.23.0, 2026-11-26. PyTorch's allocator got 23.15 GiB, what an RTX 4090 leaves beside CUDA's context. One step each, with random weights. Measured: the peak of what the allocator gave out. Predicted: the same step on tensors without data, with what the allocator adds, by 2026-11-26's code.*
# <!-- end -->
#
# **By others.** We predicted steps that others have published for their cards, in their settings and in full size, on a CPU. Their code is not ours: [predictions.md](../docs/predictions.md#peaks-that-others-have-published) has all of them, how far each is off, and what was guessed of their settings.
#
# **Recipe after recipe** has been measured by [ArcticTraining](https://github.com/snowflakedb/ArcticTraining/tree/2771b4b1b9c8cbb54895ccb940dcaa76d33bf7ef/projects/sequence-parallelism) for all weights of Llama 3.1 8B on one H200, with weights and optimizer on the host. Each of its four files says how much of the card was in use. The equation, within the same bytes:
#
# <!-- numbers:lengths_elsewhere-04 -->
# | on one H200 | measured, tokens | predicted, tokens | difference |
# |---|--:|--:|--:|
# | SDPA + checkpoints | 65,000 | 80,397 | +24% |
# | + chunked loss (Liger) | 300,000 | 272,003 | -9% |
# | + offloaded inputs | 650,000 | 491,411 | -24% |
# | + tiled MLP | 1,200,000 | 1,468,783 | +22% |
# <!-- end -->
#
# On their card, too, each recipe makes the text 1.8 to 4.6 times as long. The offload gave 2.2 times, where the equation says 1.8, and the tiles 1.8, where it says 3.0. So with DeepSpeed, Liger or FlashAttention 3 expect tiles to give 1.8 times, and not 3; and the 2.5 times of 8B (161K / 65K) may be less there. (The equation knows the operators of PyTorch. What theirs keep we could not see.)
#
# A stack with more kernels of its own, [Unsloth](https://docs.unsloth.ai/basics/unsloth-benchmarks), reports for 8B *QLoRA* 78,475 tokens on 24 GB and 342,733 on 80, without tiles. With tiles it reports [500K and more in place of 290K](https://docs.unsloth.ai/new/500k-context-length-fine-tuning) for gpt-oss-20b on an H100.
#
# ## Part B: another model, for less time or longer texts
#
# ### 7. Sliding window
#
# Flash attention stores no scores, but it still computes one for every pair of tokens.
#
# **Guess first.** With a window of a sixteenth of the text: how many times as fast is attention?
#
# **The idea.** Let each token read its last W tokens only: about S × W pairs in place of S²/2. *Sinks* are a few first tokens that stay readable. Each line is a token that reads, each column one that can be read:

# %%
from recipes_lib.attention.block_sparse import (
    block_sparse_attention,
    predicted_share_of_pairs,
)
from recipes_lib.attention.sliding_window import (
    apply_sliding_window,
    predicted_speedup,
    sliding_window_attention,
)
from recipes_lib.report.charts.pattern import pattern_chart

positions = torch.arange(64)
distance = positions[:, None] - positions  # of a query (down) from a key (right)
causal = distance >= 0
in_window = causal & (distance < 16)
sinks = causal & (positions < 4)
patterns = {"window of 16": in_window, "window and 4 sinks": in_window | sinks}
pattern_chart(patterns, title="Reading less: which keys each query reads")

# %%
tokens = sizes.read
qkv = []
key_heads = weightless.config.num_key_value_heads
for count in (weightless.config.num_attention_heads, key_heads, key_heads):
    of_heads = (1, count, tokens, weightless.config.head_dim)  # [B, H, S, E]
    made = torch.randn(of_heads, device=here.device, dtype=dtype, requires_grad=True)
    qkv.append(made)
# A block reads itself and the 3 blocks before it, and the first block of the text.
pattern = {"block_size": sizes.window // 4, "local": 4, "global_blocks": 1}
attentions = {
    # With a window as long as the text it is PyTorch's causal attention.
    "full": partial(sliding_window_attention, window=tokens),
    "sliding window": partial(sliding_window_attention, window=sizes.window),
    "block-sparse": partial(block_sparse_attention, **pattern),
}


def forward_and_backward(attention):
    attention(*qkv).sum().backward()


turns = in_turns(
    {way: partial(forward_and_backward, each) for way, each in attentions.items()},
    rounds=sizes.rounds,
)
fewer_pairs = {
    "sliding window": predicted_speedup(seq_len=tokens, window=sizes.window),
    "block-sparse": 1 / predicted_share_of_pairs(seq_len=tokens, **pattern),
}
speedup = {}
for way, fewer in fewer_pairs.items():
    ratios = [full / mine for full, mine in zip(turns["full"], turns[way])]
    speedup[way] = min(turns["full"]) / min(turns[way])
    print(f"{way:<14} on {tokens:,} tokens: {speedup[way]:4.1f}× as fast", end=" ")
    print(f"({min(ratios):.1f} to {max(ratios):.1f}), {fewer:4.1f}× fewer scores")

# %% [markdown]
# To the guess: about an eighth of the pairs is left, because a token reads half of the text on average, and a sixteenth of the text is an eighth of that. In whole blocks 6.6 times fewer scores are left, and the clock of two CPU cores says about 7. *Block-sparse* lets a block of tokens read the blocks just before it and a few that all read ([its file](../recipes_lib/attention/block_sparse/__init__.py)).
#
# The model was trained to read more. What does it cost to read less?

# %%
# No proof on the model: the loss says how much it changes.
quarter = sizes.short // 4
windowed = partial(apply_sliding_window, window=quarter, check=False)
reads_less = {
    "full": sdpa,
    "window": windowed,
    "window and 4 sinks": partial(windowed, sinks=4),
}
read_ids = text_of(sizes.short)
price = {}
for which, adapt in reads_less.items():
    model = adapt(load_model(sizes.trained).eval())
    with torch.no_grad():
        price[which] = model(input_ids=read_ids, labels=read_ids).loss.item()
    print(f"{which:<18} loss {price[which]:.3f}")

# %% [markdown]
# With a window of 512 on this one text the loss goes from 1.89 to 2.47, and four sinks bring it back to 1.92. A softmax must add up to one, so a head that needs no token sends its attention to the first ones (Xiao et al., 2023). Look at the loss on your own texts. *Not when* far tokens decide.
#
# **The line you will write tomorrow.** Models that were trained with a window (the first Mistral 7B, Gemma 3) take it from `config.sliding_window`, and `attn_implementation="flex_attention"` makes a kernel of the rule on a GPU. Llama has no such field: there it is `apply_sliding_window(model, window=…, sinks=4)`.
#
# ### 8. RoPE scaling: beyond the trained length
#
# In RoPE, *rotary position embeddings*, each pair of numbers of a query and of a key is turned by an angle: position × frequency. A text longer than those of the training has angles that the model has never seen. Nothing raises an error there, so `check_length` does.
#
# **Guess first.** Where does the loss begin to climb: at the trained length, or later?
#
# **The idea.** Turn the pairs more slowly. *linear*: all of them. *yarn*: slow the pairs that made less than one full turn in the training, leave those alone that made more than 32, and slow those between by a part. *dynamic*: plain, until a text is too long, and then more slowly the longer it is. The code is plain RoPE, and scaling changes its `frequencies`. Here are those of YaRN as a share of the plain ones:

# %%
from recipes_lib.architecture.rope import apply_rope_scaling, check_length, rotate

show(rotate)
model = load_model(sizes.trained)
try:
    check_length(model, 2 * model.config.max_position_embeddings)
except ValueError as reason:
    print(reason)
plain_frequencies = model.model.rotary_emb.inv_freq
apply_rope_scaling(model, kind="yarn", factor=2)
kept = model.model.rotary_emb.inv_freq / plain_frequencies
print("kept, from the fastest pair to the slowest:", *(f"{x:.2f}" for x in kept[::4]))

# %% [markdown]
# These texts take minutes, so the curves were recorded before, on the CPU named below the picture: the mean of three texts, without further training (`python -m benchmarks.gpu --parts rope`).

# %%
from recipes_lib.report.charts.figure import NARROW
from recipes_lib.report.charts.lines import lines
from recipes_lib.report.style import INK

rope = recorded("rope")
means = {
    kind: torch.tensor(each).mean(0).tolist() for kind, each in rope["losses"].items()
}
places = [rope["window"] * (number + 0.5) for number in range(len(means["none"]))]
curves = {kind: list(zip(places, means[kind])) for kind in ("none", "linear", "yarn")}
figure = lines(
    curves,
    title="Without scaling the loss climbs from about 10,000 tokens on (trained: 8,192)",
    source=rope["measured_on"],
    xlabel="position in the text, tokens",
    ylabel="loss",
    ylim=(0, None),
    width=NARROW,
)
figure.axes[0].axvline(8192, color=INK, linestyle="--", linewidth=1)
print(
    "last window:", ", ".join(f"{kind} {each[-1]:.2f}" for kind, each in means.items())
)
figure

# %% [markdown]
# To the guess: later, from about 10,000 tokens on. (*dynamic* is not drawn, and ends where *yarn* does.) *Linear* changes every angle, and costs much over most of the text. Training repairs it, published *within 1,000 steps* ([Chen et al., 2023](https://arxiv.org/abs/2306.15595)); nothing is trained here. The curves have factor 2, enough for 16,384 tokens, and end at 12,288. Yours is your length over the trained one. *yarn* costs a little in the trained part, so *not when* your texts are no longer than that. Llama 3.1 and 3.2 are scaled already (`rope_type` is `llama3`), and `apply_rope_scaling` refuses them.
#
# **The line you will write tomorrow** is `rope_parameters` in config.json, which transformers and vLLM read. `apply_rope_scaling(model, kind="yarn", factor=2)` writes it and checks it.
#
# **Short texts first.** A *curriculum* of lengths trains on short texts first, with as many tokens in each step. It saves attention's share of those steps, by arithmetic:

# %%
model = on_meta(sizes.cards[-1])
for tokens in (2048, 4096, 32_768, 131_072):
    # A text of one token has nearly no attention.
    without = tokens * step_operations(model, rows=1, length=1)
    share = 1 - without / step_operations(model, rows=1, length=tokens)
    print(f"{sizes.cards[-1]}, {tokens:>7,} tokens: attention is {share:.0%} of a step")

# %% [markdown]
# So [it](../recipes_lib/training/curriculum.py) brings nothing where all texts are short, and much at 32K and more.
#
# **Not shown here**: a text that several GPUs share (ring attention and Ulysses, [notebook 02](../notebooks/02_multi_gpu_training.ipynb)), packing short texts ([notebook 05](../notebooks/05_fine_tuning_pretrained_models.ipynb)), and [a step of 262,144 tokens](../docs/long-card.md) on 24 GB, which is predicted and has not run.
#
# ## Exercise
#
# Llama 3.2 1B has a vocabulary of 128,256. All weights train in 16 bits. Alone, which of recipes 2 and 3 gains more there, in 24 GB?

# %%
wide = model_of_shape("llama-3.2-1b", dtype=torch.bfloat16, device="meta")
for stack in ((), ("loss in chunks",), CHECKPOINTS, CHECKPOINTS_AND_CHUNKS):
    tokens = longest_text(wide, card="RTX 4090", stack=stack)
    print(f"{' and '.join(stack) or 'plain'}: {tokens:,} tokens")

# %% [markdown]
# Checkpointing, by little: 9,982 tokens against 8,254. Together 74,141, because each alone is stopped by what the other removes. (A step in backward changes neither 9,982 nor 74,141: the peak comes before the gradients.)
#
# ## References
#
# - Dao et al., *FlashAttention*, 2022; Dao, *FlashAttention-2*, 2023
# - Hsu et al., *Liger Kernel*, 2024; Wijmans et al., *Cut Your Losses*, 2024
# - Bekman et al., *Arctic Long Sequence Training*, 2025: tiled MLP and loss, checkpoints on the host
# - Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016
# - TRL, [Training Beyond 1M Tokens](https://huggingface.co/docs/trl/en/long_context_training): Qwen3-8B, 1,048,576 tokens on eight H100s, 380 s a step, 56.2 GB a GPU, measured
# - Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, 2023
# - Su et al., *RoFormer*, 2021; Peng et al., *YaRN*, 2023; Chen et al., *Positional Interpolation*, 2023

# %%
rows_in_fp32 = [row for row in ladder.rows if ways[row.name].clip is None]
loss_error = max(abs(row.loss - first_loss) for row in rows_in_fp32)
gradient_error = max(row.gradient_error for row in rows_in_fp32)
steps_of = {f"{way}, {tokens}": step for (way, tokens), step in real.items()}
ladder.note(
    model=sizes.shape,
    limit_bytes=sizes.limit,
    timed_at=sizes.cost,
    loss_at=sizes.common,
    loss_error=loss_error,
    gradient_error=gradient_error,
    gradients_off=off,
    slopes=slopes,
    local={"tokens": sizes.read, "speedup": speedup, "ideal": fewer_pairs},
    price=price,
    loss={which: vars(cost) for which, cost in beside.items()},
    steps=steps_of,
    short={which: real[which, sizes.short]["seconds"] for which in ways_of_today},
    short_tokens=sizes.short,
    real=real["five lines", sizes.long] | {"tokens": sizes.long},
    learned={"steps": sizes.steps, "apart": apart, "on 24 GB": on_24_gb},
    longest_of_8b=dict(zip(stacks, on_24[f"{sizes.cards[-1]}, QLoRA"])),
    per_token=per_token | {"longest": at_length},
)
if not on_gpu:
    ladder.note(predicted={"bytes": dry_bytes})
assert loss_error < (2e-2 if on_gpu else 1e-4), "the same loss"
assert gradient_error < (1e-1 if on_gpu else 1e-3), "the same gradients"
if not fast():  # lengths as short as those of FAST mode say nothing
    assert all(abs(row.prediction_error) < 0.1 for row in rows_in_fp32), "predictions"
    assert 0.85 < min(shares) < max(shares) < 1.1, "the arithmetic of the cards"
    assert 0.98 < min(filled.values()) < max(filled.values()) <= 1, (
        "the block at the top"
    )
    assert ladder.rows[0].tokens < switches < longest, "each is longer"
    for each in (apart, *on_24_gb.values()):
        five = [off for which, off in each.items() if which.startswith("five lines")]
        assert max(five) < 0.05, "they learn the same"
assert max(in_trl.values()) < 0.02, "TRL learns the same in tiles"
print(f"all checks passed: loss to {loss_error:.0e}, gradients to {gradient_error:.0e}")
