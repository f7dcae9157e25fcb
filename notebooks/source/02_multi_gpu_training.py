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
# # One GPU is not enough: training on many
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your-username/llm-training-recipes/blob/main/notebooks/02_multi_gpu_training.ipynb)
#
# <!-- numbers:headline-02 -->
# > **106 → 27 MiB per rank:** weights, gradients and optimizer states of one training, by one process and by 4 with FSDP × TP; FSDP alone on as many ranks keeps the same share, and tensor parallelism is there for layers that are too large. In 10 strategies, every loss is that of one process to 1e-06. Predictions are off by less than 0.1% for the bytes that a rank keeps, and by less than 0.1% for those that it sends, where both sides count the messages of each collective as a ring sends them: that no message is forgotten, and no measurement of a wire.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-26.
# <!-- end -->
#
# A model that trains on one GPU can train on many, in about a dozen ways. This notebook starts real processes that train together, on any machine. For each row of its table it predicts what a process keeps and sends, then measures both, and checks that the loss is the same number as that of one process.
#
# | | |
# |---|---|
# | **You will learn** | what each strategy splits, what it sends for that, and which one your model needs |
# | **You need** | [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) or its equation; no GPU, no login |
# | **Time** | about eight minutes on two CPU cores |
# | **Cost** | free on a laptop or on Colab |

# %% [markdown]
# ## The map
#
# | | recipe | what is split | file |
# |---|---|---|---|
# | 1 | launch and bandwidth test | nothing: who is there, and how fast do they talk | [rank_pool.py](../recipes_lib/core/ranks/rank_pool.py), [bandwidth.py](../recipes_lib/parallel/bandwidth.py) |
# | 2 | data parallel (DDP) | rows | [data_parallel.py](../recipes_lib/parallel/data_parallel/__init__.py) |
# | 3 | ZeRO 1, 2, 3 | states, gradients, weights | [zero.py](../recipes_lib/parallel/zero/__init__.py) |
# | 4 | FSDP2, HSDP, mixed precision | all three, block by block | [fully_sharded.py](../recipes_lib/parallel/fully_sharded/__init__.py) |
# | 5 | FSDP with QLoRA | a base in four bits | [quantized_shards.py](../recipes_lib/parallel/quantized_shards/__init__.py) |
# | 6 | tensor parallel | every matrix | [tensor_parallel.py](../recipes_lib/parallel/tensor_parallel/__init__.py) |
# | 7 | pipeline parallel | the stack of blocks | [pipeline_parallel.py](../recipes_lib/parallel/pipeline_parallel/__init__.py) |
# | 8 | context parallel | the sequence | [context_parallel.py](../recipes_lib/parallel/context_parallel/__init__.py) |
# | 9 | mixture of experts | experts | [mixture_of_experts.py](../recipes_lib/architecture/mixture_of_experts/__init__.py) |
# | 10 | data loading | rows, which are read while the step before runs | [data_loading.py](../recipes_lib/training/data_loading.py) |
# | 11 | checkpoints and restarts | what is saved: each rank writes its part | [checkpoint.py](../recipes_lib/parallel/checkpoint/__init__.py) |
#
# The first lines of each file explain its recipe. At the end there are files to start the same training with `torchrun`, accelerate, DeepSpeed, SLURM, Axolotl and Megatron.
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
import tempfile
import time
from functools import partial

import torch

from recipes_lib.core.measure.machine import choose_sizes, machine

print(machine())
# Each rank has one thread of its own: more threads than cores wait for each other.
torch.set_num_threads(1)

# %% [markdown]
# A training on many GPUs is many copies of one program, one process for each GPU. Such a process is called a *rank*, and the number of ranks N is the *world size*. It has nothing to do with the rank of LoRA's matrices. Ranks exchange tensors by *collectives*, calls that all of them make together. On GPUs the library for that is NCCL, on CPUs it is gloo. The programs are the same. So with four GPUs or more the ranks below run on GPUs, and on any other machine on its CPU.
#
# All sizes stand in one cell, and with `RECIPES_FAST=1` they are tiny. The model is small, and each byte of the text is a token. What a rank keeps and sends depends on shapes only, so it is the same on GPUs. Without four GPUs the times are CPU times: they do not say how fast a network of GPUs is.

# %%
# A Llama-like model: every number of ranks up to eight divides its sizes.
small = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=8)
small |= dict(num_attention_heads=8, num_key_value_heads=8)
large = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16)
large |= dict(num_attention_heads=32, num_key_value_heads=8)
tiny = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=4)
tiny |= dict(num_attention_heads=4, num_key_value_heads=4)

# Deep and thin, for the bars of up to 64 ranks: each gets a block or a head of its own.
deep = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=64)
deep |= dict(num_attention_heads=64, num_key_value_heads=64)

on_gpus = torch.cuda.device_count() >= 4
ranks_on = "cuda" if on_gpus else "cpu"
full = dict(
    model=small,
    bars_model=deep,
    rows=8,  # of the whole batch of a step
    tokens=128,  # of a row
    steps=5,  # of each run; the first two warm up
    rounds=3,  # of timing, at the end
    largest_message=24,  # of the bandwidth test: 2^24 bytes
    slow_rows=12,  # batches of section 10
    dry_layers=None,  # blocks of the model with 70 billion weights: all 80
    peak_layers=4,  # blocks of the model with 8 billion weights
)
brief = full | dict(model=tiny, bars_model=tiny, tokens=32, steps=3, rounds=1)
brief |= dict(largest_message=15, slow_rows=6, dry_layers=2, peak_layers=1)
# A machine with fewer than four GPUs runs its ranks on the CPU: its sizes are those of a CPU.
# The first of four GPUs has a rank of three pools, so cards below 80 GiB take fewer blocks.
middle = large | dict(num_hidden_layers=2)
gpus = full | dict(model=middle) if on_gpus else full
gpus_of_80 = full | dict(model=large) if on_gpus else full
sizes = choose_sizes(cpu=full, gpu16=gpus, gpu24=gpus, gpu80=gpus_of_80, fast=brief)
sizes

# %% [markdown]
# ## What runs out: the equation of one rank
#
# [Notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) has one equation for the memory of a training step. With AdamW in fp32, P parameters, the single numbers that are trained, take 4 P bytes of weights, 4 P of gradients and 8 P of optimizer states. On many ranks each of these terms is either *whole* on every rank, or *split*: divided by N.
#
# $$\text{bytes of a rank} = \frac{4P}{a} + \frac{4P}{b} + \frac{8P}{c} + \text{activations of its rows} \qquad a, b, c \in \{1, N\}$$
#
# What is split has to travel, because each rank needs all of it at some time. So every strategy has a second number: the bytes that a rank sends in a step. A collective over a tensor of B bytes on N ranks in a *ring*, where each rank talks to its neighbour only, sends
#
# ```text
# all-gather       every rank has a part, and all get the whole     (N-1)/N · B
# reduce-scatter   every rank gets one part of the sum              (N-1)/N · B
# all-reduce       every rank gets the whole sum: both of them    2 (N-1)/N · B
# send             from one rank to another                                 B
# ```
#
# An *all-to-all*, in which each rank has a different part for every other rank, sends (N-1)/N · B as well, and so does a *broadcast* from one rank to all, on average over the ranks. The table of this notebook, the *ladder*, counts what a rank holds when its optimizer steps: weights, gradients and states. It does not count activations. What it predicts comes from the equation and from these lines.
#
# ## Part A: ranks, and how they talk
#
# ### 1. Launch
#
# **What is going on?** A notebook is one process, and another process cannot import a function that is written in a cell. A *pool* starts N processes that stay, and lets each of them call the same function, which is in a file. If one of them fails, all are ended within seconds, and every error is shown. The processes listen on the loopback address only, so nobody outside of this machine can reach them.
#
# ```text
# this notebook  --function-->  rank 0   rank 1   rank 2   rank 3
#                <--result----       \______|________|_______/   collectives
# ```
#
# **Guess first.** Rank r holds the number r + 1. After an all-reduce of two ranks, what does each of them hold?

# %%
from recipes_lib.core.ranks.rank_pool import RankPool
from recipes_lib.workflows.on_ranks.demonstrations import who_is_there

# The processes of a pool start at its first call, and stay for the next ones.
pools = {count: RankPool(ranks=count, device=ranks_on) for count in (1, 2, 4)}
for call in ("first", "second"):
    begin = time.perf_counter()
    answers = pools[2].run(who_is_there)
    print(f"the {call} call took {time.perf_counter() - begin:.2f} s")
for rank, process, total in answers:
    print(f"rank {rank} is process {process}, and its sum is {total:.0f}")

# %% [markdown]
# Both ranks hold 1 + 2 = 3: an all-reduce gives the sum to every rank.
#
# **How do I use it?** In a notebook as above. A script is started with `torchrun --standalone --nproc-per-node 4 train.py`.
#
# **What does it cost?** Each process imports PyTorch and takes memory of its own. That is why the first call takes seconds, and the second does not. The functions have to be in a module, and a process reads a module once. After a change of the file, `pools[2].close()` lets the next call start new processes, which read it again.
#
# #### Bandwidth test
#
# **What is going on?** Before anything trains, measure how fast the ranks talk. The *bus bandwidth* is the bytes that a rank has to send by the ring's formula, divided by the seconds. So it is one number for all collectives, if the links are the limit. Where it is not one number, something else takes the time.
#
# **Guess first.** A message of 4 KiB takes some time. How much longer does one of 1 MiB take: 256 times?
#
# **The idea.** An all-reduce in a ring: first the sums of parts travel, then the parts.

# %%
from recipes_lib.parallel.bandwidth import (
    fit_link,
    measure_bus_bandwidth,
    ring_all_reduce,
)
from recipes_lib.report.charts.lines import lines
from recipes_lib.report.show import show
from recipes_lib.workflows.on_ranks.demonstrations import ring_by_hand

# In every section: the idea in a few lines, run, and compared with the library's call.
show(ring_all_reduce)
difference = pools[4].run(ring_by_hand)
assert difference < 1e-5
print(f"by hand and library differ by {difference:.0e}")

# %%
# From 4 KiB on, each message is eight times as large as the one before.
message_sizes = [2**power for power in range(12, sizes.largest_message + 1, 3)]
curves = {}
links = {}
for kind in ("all_reduce", "all_gather", "reduce_scatter", "send"):
    points = pools[2].run(measure_bus_bandwidth, kind=kind, sizes=message_sizes)
    curves[kind] = [(point.size / 2**20, point.bus_bandwidth / 1e9) for point in points]
    try:
        # The line through the times: seconds = latency + bytes / bandwidth.
        links[kind] = fit_link(points)
    except ValueError as reason:  # too few sizes, or times that are too uneven
        print(f"{kind}: {reason}")
for kind, link in links.items():
    print(f"{kind:<15}{link.latency * 1e6:6.0f} µs per message", end="")
    print(f", then {link.bytes_per_second / 1e9:.2f} GB/s")
if "all_reduce" in links:
    seconds_of = links["all_reduce"].seconds
    small_call, large_call = seconds_of(2**12), seconds_of(2**20)
    print(f"an all-reduce by its line: {small_call * 1e6:.0f} µs for 4 KiB, ", end="")
    print(f"{large_call / small_call:.1f} times as long for 1 MiB")
lines(
    curves,
    title="Small messages wait for the start, large ones for the wire",
    xscale="log",
    yscale="log",
    xlabel="MiB in one call",
    ylabel="bus bandwidth, GB/s",
)

# %% [markdown]
# **Why not more?** A call has a fixed price, its *latency*: two processes have to meet. The line seconds = latency + bytes / bandwidth goes through the smallest and the largest message; those between scatter around it. The *latency* of the line is that of one message of a collective, and a whole call of two messages takes twice as long. For 4 KiB nearly all of the time is latency, so 256 times as many bytes take far less than 256 times as long: the last line above answers the guess. That is why libraries collect small tensors into large *buckets*. The four bandwidths are not one number here. On a CPU the "network" is a copy in memory, so the additions and further copies of a collective count as well.
#
# **How do I use it?** On GPUs the same numbers come from `nccl-tests`: `all_reduce_perf -b 8 -e 8G -f 2 -g 8`. Compare them with the data sheets: inside a machine with that of NVLink or PCIe, between machines with that of the network cards.

# %% [markdown]
# ## Baseline: one process alone
#
# One process trains on the whole batch. It is what all other rows are compared with. `train_on_ranks` builds the model, lets the strategy change it, and takes the steps. The list of all strategies is one file: [strategies.py](../recipes_lib/workflows/on_ranks/strategies.py).
#
# All rows use AdamW with a large epsilon. In its first step Adam moves every weight by the same amount, in the direction of the gradient's sign. Where a gradient is nearly zero, the order of a sum decides its sign, and then no two programs agree. With the large epsilon such weights stay where they are, and two strategies can be compared digit by digit.
#
# Each row prints what the arithmetic expects, then what came. In brackets are the collectives of one step. Even one process has an all-gather and an all-reduce: they count the tokens of all ranks and add up the losses. With one rank they send nothing.

# %%
from recipes_lib.report.ladders.ranks import RankLadder
from recipes_lib.workflows.on_ranks.plans import plan_of
from recipes_lib.workflows.on_ranks.train import small_llama, train_on_ranks

batch = dict(rows=sizes.rows, tokens=sizes.tokens)
# For the arithmetic. The ranks build the same model themselves, from the same seed.
model = small_llama(sizes=sizes.model, tokens=sizes.tokens)
ladder = RankLadder("02_multi_gpu_training")


def climb(strategy, ranks, group):
    """A row of the ladder: predicted, run on so many ranks, measured."""
    plan = plan_of(strategy, model, ranks=ranks, **batch)

    # The ladder calls it now, and later again, when all rows take turns.
    def run():
        return pools[ranks].run(
            train_on_ranks,
            strategy=strategy,
            sizes=sizes.model,
            steps=sizes.steps,
            timeout=300,  # seconds; a rank that hangs ends the run
            **batch,
        )

    ladder.climb(
        strategy,
        run,
        predicted=plan.kept,
        predicted_sent=plan.sent,
        group=group,
    )


print(f"{model.num_parameters():,} parameters P: 16 P are ", end="")
print(f"{16 * model.num_parameters() / 2**20:.0f} MiB")
climb("one process", 1, "alone")

# %% [markdown]
# ## Part B: more rows
#
# ### 2. Data parallel (DDP)
#
# **What is going on?** Every rank has the whole model and some rows of the batch. After backward, the gradients of all ranks are averaged, so all ranks take the same step.
#
# ```text
# rank 0   rows 0-3   forward  backward  \               / step
# rank 1   rows 4-7   forward  backward  /  all-reduce   \ step
# ```
#
# **Guess first.** Two ranks on two cores. Is a step twice as fast?
#
# **The idea.** After backward, add up and divide.

# %%
from recipes_lib.parallel.data_parallel import averaged_by_hand
from recipes_lib.workflows.on_ranks.demonstrations import data_parallel_by_hand

show(averaged_by_hand)
difference = pools[2].run(data_parallel_by_hand)
assert difference < 1e-6
print(f"by hand and DDP differ by {difference:.0e}")

# %%
climb("DDP", 2, "rows are split")

# %% [markdown]
# Each rank keeps as much as one process alone: two ranks have twice the memory, and keep the same numbers twice. What DDP saves is time, and the activations of the other rows. The answer to the guess is no. The ladder at the end measures all rows in turns: there a step takes about three quarters of the time of one process, and not half.
#
# **Why not more?** Look at one step. The gradients of the last block are ready when most of backward is still to come. DDP puts them into buckets and sends each bucket as soon as it is full, while the rest of backward goes on. If all gradients are in one bucket, nothing can be sent before the end:

# %%
from recipes_lib.report.charts.spans import Span, spans
from recipes_lib.workflows.on_ranks.demonstrations import lanes_of_a_step


def spans_of(lanes):
    """The recorded step as spans of two lanes."""
    found = []
    for part in lanes.compute:
        kind = "backward" if part.name.startswith("backward") else "forward"
        # After backward a rank waits for the buckets, and then its optimizer steps.
        if part.name.startswith("waiting"):
            kind = "step"
        found.append(Span("computes", kind, part.start, part.end, kind))
    sent_until = 0.0
    for part in lanes.communication:
        # A bucket that is full waits until the one before it is sent.
        begin = max(part.start, sent_until)
        found.append(Span("sends", "send", begin, part.end, "send"))
        sent_until = part.end
    return found


gradient_megabytes = 4 * model.num_parameters() / 2**20
# One bucket that holds everything, and about six.
bucket_sizes = {"one bucket": 2 * gradient_megabytes, "buckets": gradient_megabytes / 6}
panels = {}
for name, megabytes in bucket_sizes.items():
    lanes = pools[2].run(
        lanes_of_a_step, sizes=sizes.model, bucket_megabytes=megabytes, **batch
    )
    panels[name] = spans_of(lanes)
    print(f"{name:<11}{len(lanes.communication)} sent, ", end="")
    print(f"{lanes.hidden_share:.0%} of the sending while backward still runs")
spans(panels, title="Buckets are sent while backward goes on")

# %% [markdown]
# The last span of the upper lane is the wait for the buckets, and the step of the optimizer. Compare where the sends are: with one bucket nothing is sent during backward, with several most of it is. Each panel is one recorded step, the one of median length among five. On a CPU buckets need not save time at all: a rank needs its core to send as well, and each bucket has its own latency. On a GPU sending takes a small part of the card, and there the hidden share is time that is saved.
#
# #### A mean of means is not the mean
#
# Rows have unequal numbers of tokens with a loss. DDP takes the mean over the ranks. If each rank divides by the number of its own tokens, a token on a rank with short rows weighs more than others, and no error says so. Here both means are computed from the same batch, without any ranks:

# %%
from recipes_lib.core.ranks.weighted_step import sum_of_losses
from recipes_lib.workflows.on_ranks.train import byte_batches

(whole,) = byte_batches(steps=1, **batch)
half = sizes.rows // 2  # the rows of each of two ranks
halves = [{name: part[:half] for name, part in whole.items()}]
halves += [{name: part[half:] for name, part in whole.items()}]
# Nothing predicts the first token of a row, and a label of -100 has no loss.
counts = [int((part["labels"][:, 1:] != -100).sum()) for part in halves]
with torch.no_grad():
    sums = [sum_of_losses(model, part).item() for part in halves]
mean_of_means = (sums[0] / counts[0] + sums[1] / counts[1]) / 2
true_mean = sum(sums) / sum(counts)
print(f"tokens that count: {counts}")
print(f"mean of the ranks' means {mean_of_means:.5f}, mean {true_mean:.5f}")

# %% [markdown]
# So all strategies here divide the sum of a rank's losses by the tokens of *all* ranks. Here the two counts are close, and so are the two means. The larger the difference between the ranks, the larger the error; recipe 1 of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) shows it for the gradient.
#
# **What came before.** `torch.nn.DataParallel` runs replicas in threads of one process. It copies the weights to all replicas in each step. Python code runs in one thread at a time; PyTorch's operators themselves run side by side:

# %%
from recipes_lib.core.measure import in_turns
from recipes_lib.parallel.data_parallel import make_replicas, threaded_step

seconds = {}
for count in (1, 2):
    replicas = make_replicas(small_llama(sizes=small, tokens=sizes.tokens), count)
    optimizer = torch.optim.SGD(replicas[0].parameters(), lr=1e-3)
    parts = [whole] if count == 1 else halves  # a part of the rows for each replica
    seconds[f"{count} in threads"] = partial(
        threaded_step, replicas, optimizer, parts, sum(counts)
    )
for name, took in in_turns(seconds, rounds=sizes.rounds).items():
    print(f"{name}: {min(took):.2f} s per step, the fastest of its turns")

# %% [markdown]
# On two CPU cores the threads do well: the operators are long, and all replicas lie in one memory. With many GPUs, one Python process has to start every kernel of every card. It copies the weights in each step, and it cannot reach a second machine. So PyTorch [recommends DDP](https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html) in its place.
#
# **How do I use it?** `torchrun --nproc-per-node 8 train.py` and `DistributedDataParallel(model)`; the Trainer of transformers wraps the model by itself when torchrun has started it. With several micro-batches, gradients add up on each rank, and one all-reduce at the last micro-batch is enough: put `with model.no_sync():` around the forward *and* the backward of all others.
#
# **What does it cost?** 16 P bytes on each rank, and an all-reduce of all gradients per step.
#
# ## Part C: less on each rank
#
# ### 3. ZeRO 1, 2, 3
#
# **What is going on?** All ranks keep the same optimizer states, and each needs them only for its own step. *ZeRO* splits what is kept N times: in stage 1 the states, in stage 2 the gradients as well, in stage 3 also the weights.
#
# ```text
#           weights  gradients  states      bytes of a rank, N = 2
# DDP       whole    whole      whole       16 P
# stage 1   whole    whole      1/N          8 P + 8 P / N   = 12 P
# stage 2   whole    1/N        1/N          4 P + 12 P / N  = 10 P, while a step computes
# stage 3   1/N      1/N        1/N         16 P / N         =  8 P
# ```
#
# **Guess first.** A rank that keeps half of the states updates half of the weights. How do the other ranks get them?
#
# **The idea.** Each parameter has an owner. Only the owner steps it, and sends the new value to all others.

# %%
from recipes_lib.parallel.zero import step_of_own_part
from recipes_lib.workflows.on_ranks.demonstrations import zero_by_hand

show(step_of_own_part)
difference = pools[2].run(zero_by_hand)
assert difference < 1e-6
print(f"by hand and ZeRO-1 differ by {difference:.0e}")

# %%
climb("ZeRO-1", 2, "rows are split")
climb("ZeRO-2", 2, "rows are split")

# %% [markdown]
# All ranks get the new values from the owner: the broadcasts above.
#
# **Why not more?** In stage 1, PyTorch's optimizer gives whole parameters to ranks. Here they can be divided evenly, and the states fall to one half. With one very large parameter they would not. Stage 1 also sends 40 MiB, where the paper needs DDP's 27: gradients are all-reduced, although a rank needs only those that it owns. Stage 2 is built from `fully_shard` here, which keeps the weights whole from forward to backward, and in parts when the optimizer steps. So the ladder shows 8 P for it, 53 MiB, and not the 10 P of the drawing.
#
# **DeepSpeed** is the library of the authors of ZeRO. It lays all parameters into one long row and cuts that, so its parts are equal. Beside the weights it keeps an fp32 copy of its part, the *masters*, even where the weights are fp32 already. This is the same training with the files of [launch/deepspeed](../launch/deepspeed):

# %%
from recipes_lib.core.measure.machine import fast
from recipes_lib.workflows.on_ranks.libraries import train_with_deepspeed

reference = ladder["one process"].losses
stages = (1, 2, 3)
if fast():
    stages = (3,)  # each of them starts an engine of its own, which takes seconds
deepspeed = {}
if importlib.util.find_spec("deepspeed") is None:
    print("DeepSpeed is not installed: DS_ACCELERATOR=cpu pip install deepspeed")
else:
    for stage in stages:
        # The same model, batches and learning rate as in the rows of the ladder.
        came = pools[2].run(
            train_with_deepspeed,
            stage=stage,
            sizes=sizes.model,
            steps=sizes.steps,
            timeout=300,
            **batch,
        )
        pairs = zip(came["losses"], reference, strict=True)
        off = max(abs(loss - other) for loss, other in pairs)
        deepspeed[f"stage {stage}"] = came | {"difference": off}
        kept = ", ".join(
            f"{kind} {came[kind] / 2**20:.1f}"
            for kind in ("weights", "masters", "states")
        )
        print(f"DeepSpeed, stage {stage}: MiB of {kept}; losses to {off:.0e}")

# %% [markdown]
# **How do I use it?** `TrainingArguments(deepspeed="zero2.json")`, or `accelerate launch` with a DeepSpeed plugin. On CPU ranks both may train without splitting anything, and raise no error. [TRAPS.md](../TRAPS.md#many-ranks) says how to see that.
#
# **What does it cost?** Stages 1 and 2 need to send no more than DDP, if the library reduces each gradient to its owner only. Stage 3 sends one and a half times as much as DDP.
#
# ### 4. FSDP2: everything in parts
#
# **What is going on?** `fully_shard` keeps a part of each parameter on each rank. Before a block computes, its weights are gathered; after it, they are dropped. Backward gathers them again, and its gradients are scattered: each rank gets the sum for its own part.
#
# ```text
# at rest        rank 0 [W0 |  ]      rank 1 [  | W1]
# block runs     all-gather → [W0 | W1] on both, then dropped
# its backward   all-gather again, gradients → reduce-scatter → each rank its part
# ```
#
# **Guess first.** Weights are gathered twice and gradients reduced once. How many bytes is that, in units of DDP's all-reduce?
#
# **The idea.** One layer, whose weight is whole only while it is used.

# %%
from recipes_lib.parallel.fully_sharded import _GatheredLinear, linear_of_shards
from recipes_lib.workflows.on_ranks.demonstrations import sharded_layer_by_hand

show(linear_of_shards, _GatheredLinear)
difference = pools[2].run(sharded_layer_by_hand)
assert difference < 1e-4
print(f"by hand and the whole layer differ by {difference:.0e}")

# %%
climb("FSDP (ZeRO-3)", 2, "rows are split")
climb("HSDP", 4, "rows are split")

# %% [markdown]
# The answer to the guess: one and a half times as many. The three transfers send (N-1)/N · 4 P each, and DDP's all-reduce is two of them. The row of FSDP says 40 MiB, and the row of DDP said 27. It is slightly less than one and a half times, because the embedding and the output layer are gathered only once.
#
# **Why not more?** During a step a rank also holds the block that is gathered, the next one that is fetched ahead, and the gradients of a whole block until they are scattered. So its peak is 16 P / N, plus two to four blocks, plus the activations of its rows. The ladder counts only what stays, 16 P / N. The peak can be predicted without the ranks, in two ways that know nothing of each other. One is arithmetic: the sentence before. The other is a *dry step*: `predict(build, ranks=64)` lets this process pretend that it is one of 64, with tensors that have shapes and no data. Both are asked for one step on the shape of Llama 3.1 8B, with a few of its blocks, and a row of 512 tokens:

# %%
from recipes_lib.workflows.on_ranks.train import sharded_peak

peaks = {}
for count in (2, 8, 64):
    peak = sharded_peak(
        shape="llama-3.1-8b", layers=sizes.peak_layers, ranks=count, tokens=512
    )
    peaks[count] = list(peak)
    arithmetic, dry_step, parts = [size / 2**30 for size in peak]
    print(f"{count:>2} ranks: 16 P / N is {parts:5.2f} GiB, the peak ", end="")
    print(f"{arithmetic:5.2f} by arithmetic, {dry_step:5.2f} by a dry step: ", end="")
    print(f"{dry_step - parts:.2f} more")

# %% [markdown]
# The last number is what a rank holds beside 16 P / N: blocks that are gathered, the output layer, activations and logits. It does not fall with N. It even grows, because 16 P / N counts all gradients, and at the peak a part of them does not exist yet: with few ranks this part is large. With many ranks nearly all of the peak is beside 16 P / N. Then smaller blocks or checkpoints help, and more ranks do not.
#
# **HSDP** is the same on a grid of ranks: parts within a machine, copies between machines. Its row has four ranks: two copies of two parts. So each rank keeps as much as with FSDP on two ranks, and twice as much as with FSDP on four. In return only one all-reduce of a part crosses the slow links between machines.
#
# **Mixed precision.** With `MixedPrecisionPolicy` the gathered weights and the products have 16 bits. What is kept from step to step stays fp32:

# %%
from recipes_lib.workflows.on_ranks.demonstrations import (
    dtypes_in_sixteen_bits,
    strategies_in_bytes,
)

dtypes = pools[2].run(dtypes_in_sixteen_bits, sizes=sizes.model, **batch)
for what, dtype in dtypes.items():
    print(f"{what:<32}{dtype}")

# %% [markdown]
# The weights at rest stay fp32, because a step of AdamW often changes a weight by less than 16 bits can show; see [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb). Gathering weights in 16 bits sends half of the bytes. Gradients are summed in fp32 here, and send as much as before.
#
# **The sharding strategies.** Courses show a table of them, mostly without numbers. Here it is measured on four ranks. *Between* is what a rank holds of the weights after forward and before backward:

# %%
table = pools[4].run(strategies_in_bytes, sizes=sizes.model, timeout=300, **batch)
print(
    f"{'MiB':<22}{'weights':>9}{'gradients':>11}{'states':>8}{'between':>9}{'sent':>7}"
)
for name, row in table.items():
    parts = [row.weights, row.gradients, row.states, row.weights_between, row.sent]
    cells = [f"{part / 2**20:.1f}" for part in parts]
    print(
        f"{name:<22}{cells[0]:>9}{cells[1]:>11}{cells[2]:>8}{cells[3]:>9}{cells[4]:>7}"
    )

# %% [markdown]
# *No shard* is DDP. *Gradients and states* is ZeRO-2 by `fully_shard`: between forward and backward a rank holds the whole weights *and* its own part of them, which is more than DDP holds. *Hybrid* is HSDP with two copies, and *full* is FSDP. Full keeps and holds least, and sends half as much again as no shard.
#
# **How do I use it?** `fully_shard(block)` for each block and then for the model, or `fsdp_version: 2` in accelerate. To compile as well, call `block.compile()` on each block *before* sharding, in the order of torchtitan. `torch.compile(block)` returns a wrapper instead, and the hooks that `fully_shard` adds to the block later may never be called. In accelerate such steps took 2.4 times as long as without compiling, until its [pull request 4022](https://github.com/huggingface/accelerate/pull/4022). That was on 16 GPUs; we have not measured it.
#
# **What does it cost?** Half as many bytes again as DDP, and small models wait for many small gathers.
#
# ### 5. FSDP with QLoRA
#
# **What is going on?** In QLoRA, recipe 10 of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb), the base is frozen in four bits, and small adapters train. The base has no gradients and no states, so it is nearly all that a rank keeps. A weight in four bits is a *code*, an index into a table of 16 values, and 64 codes share one *scale*. Both can be split like any other weight, if both are parameters of the model.
#
# ```text
# rank 0 [codes 0, scales 0]  → all-gather →  a block in four bits
# rank 1 [codes 1, scales 1]  → all-gather →  layer by layer to 16 bits → x Wᵀ
# ```
#
# **Guess first.** 70 billion weights in four bits, two cards of 24 GB. Do they fit?

# %%
from recipes_lib.parallel.quantized_shards import weight_of_shards
from recipes_lib.workflows.on_ranks.libraries import train_quantized

show(weight_of_shards)
tuned = {}
# Each run has its number of ranks, and whether they share the base.
for name, (count, shards) in {"one process": (1, False), "sharded": (2, True)}.items():
    tuned[name] = pools[count].run(
        train_quantized,
        shards=shards,
        sizes=sizes.model,
        steps=sizes.steps,
        timeout=300,
        **batch,
    )
    # Nearly all of it is the base: what one process has, divided by the ranks.
    expected = tuned["one process"]["parameters"] / count / 2**20
    kept = tuned[name]["parameters"] / 2**20
    print(f"{name:<12}{kept:6.2f} MiB of parameters per rank", end="")
    print(f", predicted {expected:.2f}")
pairs = zip(tuned["one process"]["losses"], tuned["sharded"]["losses"], strict=True)
quantized_difference = max(abs(one - other) for one, other in pairs)
print(f"the losses differ by {quantized_difference:.0e}")

# %% [markdown]
# The claim about 70 billion weights can be checked without any card. PyTorch can pretend that other ranks exist, and that tensors have shapes and no data. So this machine takes a step of rank 0 of 2 on the shape of Llama 3.1 70B, one row of 1,024 tokens, every block checkpointed, and counts every byte:

# %%
from recipes_lib.parallel.quantized_shards.predicted_rank import (
    beside_parts,
    dry_quantized_rank,
)

dry = dry_quantized_rank(
    "llama-3.1-70b", ranks=2, rows=1, seq=1024, layers=sizes.dry_layers
)
print(f"one of 2 ranks: {dry.peak / 2**30:.2f} GiB at its peak")
# What it consists of at that moment.
for kind, size in sorted(dry.at_peak().items(), key=lambda pair: -pair[1]):
    print(f"  {kind:<20}{size / 2**30:6.2f} GiB")
on_the_card = beside_parts(dry) / 2**30
print(f"with its parts in host memory: {on_the_card:.2f} GiB on the card")

# %% [markdown]
# So the tensors of 70 billion weights do fit two cards of 24 GB, with little left. Half of the weights takes most of it: the codes, their scales, and the embedding, which stays in 16 bits. On top of these tensors a card needs memory for its CUDA context, the driver's own memory, and for gaps between tensors. The last line is the case with *offload*, where the parts wait in host memory. [Those who first published this](https://www.answer.ai/posts/2024-03-06-fsdp-qlora) measured 14.92 GiB per card with offload. Our number is much smaller, and the two do not compare directly: they trained Llama 2 70B with longer rows, and counted all memory that PyTorch had reserved, and not only tensors.
#
# **How do I use it?** Axolotl with `load_in_4bit: true`, `adapter: qlora` and an `fsdp_config`. The file [llama-3-70b-qlora-fsdp.yaml](../launch/axolotl/llama-3-70b-qlora-fsdp.yaml) is such a training, and says why it takes version 1 of FSDP. There the codes are split and the scales stay whole.
#
# **What does it cost?** Every layer is turned into 16 bits in forward and again in backward, with checkpoints once more. All ranks wait for the gathers.
#
# ## Part D: split the model's work
#
# ### 6. Tensor parallel
#
# **What is going on?** FSDP splits what is *kept*. Tensor parallelism splits what is *computed*: each rank has some of the heads of attention and some features of the MLP, for all rows. Two layers in a row need only one exchange: the first is cut by its outputs, the second by its inputs.
#
# ```text
# y = down(silu(gate x) · up x)
# rank 0   gate, up: features 0-383     down: reads those     → a part of the sum
# rank 1   gate, up: features 384-767   down: reads those     → the other part
#                                                all-reduce   → y on both
# ```
#
# **Guess first.** How often must the ranks of a block talk in forward: for each of its seven matrices?
#
# **The idea.** A loop over the ranks, in one process.

# %%
from torch.nn import functional

from recipes_lib.parallel.tensor_parallel import cut_mlp

show(cut_mlp)
mlp = model.model.layers[0].mlp
x = torch.randn(5, sizes.model["hidden_size"])  # five tokens
weights = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
with torch.no_grad():
    difference = (cut_mlp(x, *weights, ranks=4) - mlp(x)).abs().max()
assert difference < 1e-5
print(f"four parts and the whole layer differ by {difference:.0e}")

# %% [markdown]
# PyTorch can also run four *simulated* ranks inside of this process, so that the part of each rank can be printed between two lines of a program. The MLP here has whole numbers only, so that the sums are exact and can be checked by hand:

# %%
from recipes_lib.parallel.tensor_parallel.simulated import simulated_mlp

print(simulated_mlp(ranks=4))

# %%
climb("tensor parallel", 2, "work is split")
climb("FSDP × TP", 4, "work is split")

# %% [markdown]
# The answer to the guess is two times, not seven: once for attention, once for the MLP. Backward talks at two places as well. The norms are whole on each rank.
#
# Two more settings are on here. With *sequence parallelism*, what goes from layer to layer is split by tokens between these places. Each all-reduce then becomes a reduce-scatter and an all-gather, which together send as much. With *loss parallelism* no rank ever has the logits of the whole vocabulary.
#
# **Why not more?** What is sent is not weights but activations, so it grows with the batch. The activations between two layers are 1 MiB with the sizes of a CPU. Each of 34 all-gathers and 34 reduce-scatters sends half of it, which makes 34 MiB. The exchanges are in the middle of the work of a block, and nothing else can be computed meanwhile. So tensor parallelism stays within a machine, where links are fast.
#
# **How do I use it?** `from_pretrained(…, tp_plan="auto")` under torchrun, `parallelize_module` of PyTorch, or Megatron-core. Together with FSDP: tensor parallel first, on the inner axis of the mesh.
#
# **What does it cost?** The number of heads limits the number of ranks, and every exchange is waited for.
#
# ### 7. Pipeline parallel
#
# **What is going on?** Each rank has some blocks, a *stage*. The batch goes through in *micro-batches*, so that several stages work at the same time. At the beginning and the end some have nothing to do: the *bubble*.
#
# ```text
# 1F1B     rank 0   F0 F1  . B0 F2 B1 F3 B2  . B3     F: forward, B: backward
#          rank 1    . F0 B0 F1 B1 F2 B2 F3 B3  .     a dot is a slot in which the rank is idle
# ```
#
# **Guess first.** With p stages and m micro-batches, which part of the time is a rank idle?
#
# **The idea.** A schedule is an order of actions for each rank. In *GPipe* a rank does all forwards, then all backwards. In *1F1B*, one forward and one backward, it changes between them as soon as it can. The two differ only in how many forwards come before the first backward.

# %%
from recipes_lib.parallel.pipeline_parallel.timed_actions import bubble_of
from recipes_lib.parallel.pipeline_parallel import (
    order_of_rank,
    predicted_bubble,
    warm_up_of_rank,
)
from recipes_lib.workflows.on_ranks.demonstrations import grid_of_a_pipeline

show(warm_up_of_rank, order_of_rank)

# %%
micro_batches = 4  # of two rows each
grids = {}
panels = {}
for schedule in ("gpipe", "1f1b", "interleaved"):
    grids[schedule] = pools[2].run(
        grid_of_a_pipeline,
        schedule=schedule,
        sizes=sizes.model,
        micro_batches=micro_batches,
        **batch,
    )
    stages_per_rank = 2 if schedule == "interleaved" else 1
    expected = predicted_bubble(
        ranks=2, micro_batches=micro_batches, stages_per_rank=stages_per_rank
    )
    print(f"{schedule:<12}idle by the formula {expected:.0%}", end="")
    print(f", in one recorded step {bubble_of(grids[schedule]):.0%}")
    # A lane per rank; the number in a span is that of the micro-batch.
    panels[schedule] = [
        Span(f"rank {each.rank}", each.direction, *each[4:], str(each.micro_batch))
        for each in sorted(grids[schedule])
    ]
spans(panels, title="A pipeline begins and ends with idle ranks")

# %% [markdown]
# The answer to the guess is (p - 1) / (m + p - 1), here 1 / 5. It counts idle slots as if all stages took the same time and sending took none. An *interleaved* schedule gives each rank v thin stages in place of one. A rank then waits only for thin ones: (p - 1) / (v m + p - 1), here 1 / 9. In return it sends more often.
#
# The idle part of a recorded step can be larger than the formula says: the stages are unequal, because one has the output layer, and sending takes time. Each grid of the figure is one recorded step. It shows who waits for whom, and not which schedule is the fastest.

# %%
climb("pipeline (1F1B)", 2, "work is split")

# %% [markdown]
# **Why not more?** GPipe and 1F1B have the same bubble, and only more micro-batches make it smaller. What 1F1B saves is memory, which this ladder does not count: a stage keeps the activations of at most p micro-batches, and not of all m. A pipeline sends least of all strategies. With the sizes of a CPU, the hidden states between two stages are 1,024 tokens × 256 numbers × 4 bytes = 1 MiB; one rank sends them, and the other one sends as many bytes of gradients back.
#
# **How do I use it?** `torch.distributed.pipelining` with `Schedule1F1B`, Megatron-core's `--pipeline-model-parallel-size`.
#
# **What does it cost?** The bubble, and a model that has to be cut into equal stages.
#
# ### 8. Context parallel
#
# **What is going on?** One text is so long that its activations do not fit. All layers but attention look at each token alone, so tokens can be dealt out to ranks. Only attention has to talk. In a *ring*, keys and values travel from rank to rank, and each rank joins what it has seen. *Ulysses* exchanges tokens for heads instead.
#
# ```text
# ring      step 0: own keys   step 1: the neighbour's   …   N steps
# Ulysses   all-to-all: my tokens, all heads → all tokens, my heads
# ```
#
# **Guess first.** Attention is causal: the first tokens see few keys, the last ones see many. Which rank is the slowest, and what can be done?
#
# **The idea.** Two results can be joined: attention on some keys, and attention on others. Each is weighted by the sum of its exponentials, of which the logarithm is kept. Flash attention joins its blocks in the same way ([notebook 04](../notebooks/04_training_long_sequences.ipynb)).

# %%
from recipes_lib.parallel.context_parallel import (
    attention_and_sums,
    merge,
    predicted_ring_work,
    ring_by_hand,
)

show(attention_and_sums, merge, ring_by_hand)
q, k, v = torch.randn(3, 1, 4, 32, 16).unbind(0)  # [B, H, S, E] each
in_a_ring = ring_by_hand(q, k, v, ranks=4)
whole_attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
difference = (in_a_ring - whole_attention).abs().max()
assert difference < 1e-5
print(f"the ring and whole attention differ by {difference:.0e}")
for name, zig_zag in {"in one piece": False, "zig-zag": True}.items():
    work = predicted_ring_work(4, zig_zag=zig_zag)  # for each step, of each rank
    # In each step all ranks wait for the one that has most to do.
    slowest = sum(max(step) for step in work)
    mean = sum(sum(step) / len(step) for step in work)
    print(f"tokens {name}: a step takes {slowest / mean:.2f} times the mean work")

# %%
climb("context parallel (ring)", 2, "work is split")
climb("context parallel (Ulysses)", 2, "work is split")

# %% [markdown]
# The answer to the guess: with tokens in one piece the last rank has most work, because its queries see all keys, and the first rank is idle in all steps but one. The *zig-zag* cuts the text into 2 N pieces and gives each rank one from the front and one from the back: rank 0 gets pieces 0 and 7, rank 3 gets 3 and 4. Then all have the same work in every step.
#
# **Why not more?** Weights, gradients and states stay whole. What falls is the activations, which the columns of this ladder do not count. So it is combined with FSDP over the same ranks. The gradients are all-reduced as under DDP, which sends 27 MiB with the sizes of a CPU. Attention sends the rest: 32 MiB more in the ring, 16 with Ulysses. [Notebook 04](../notebooks/04_training_long_sequences.ipynb) shows what a long sequence takes on one device.
#
# **How do I use it?** `context_parallel` of PyTorch on GPUs, `ParallelismConfig(cp_size=…)` in accelerate. Labels have to be shifted *before* the cut, and positions have to be those of the whole text.
#
# **What does it cost?** In the ring, keys and values go round in forward, and again in backward, together with their gradients. Ulysses sends less here, but the ranks must divide the heads.
#
# ### 9. Mixture of experts
#
# **What is going on?** A block has many feed-forward layers (MLPs), the *experts*, and each token goes through a few of them. All experts take memory; the active ones take time. With *expert parallelism* each rank has some experts, and tokens travel to them and back.
#
# ```text
# token → router → the 2 best of 8 experts → weighted sum
# ```
#
# **Guess first.** Eight experts, two active. How much of the weights does a token meet?
#
# **The idea.** A loop over the experts. The grouped product does the same in one call, with the rows sorted by expert.

# %%
from recipes_lib.architecture.mixture_of_experts import (
    Grouped,
    apply_grouped_experts,
    looped_experts,
    predicted_bytes,
    predicted_parameters,
    small_mixture,
)
from recipes_lib.core.model.mixins import take_out
from recipes_lib.workflows.on_ranks.libraries import train_experts

show(looped_experts)
mixture = small_mixture(experts=8, active=2, vocabulary=256)
parameters = predicted_parameters(mixture)
print(f"{parameters.total:,} weights, of which a token meets {parameters.active:,}")

# The same row by the experts of transformers, one after the other, and by one grouped product.
one_row = whole["input_ids"][:1]
with torch.no_grad():
    plain = mixture(input_ids=one_row).logits
    apply_grouped_experts(mixture)
    grouped = mixture(input_ids=one_row).logits
take_out(mixture, Grouped)
assert (grouped - plain).abs().max() < 1e-4
print(f"grouped and plain differ by {(grouped - plain).abs().max():.0e}")

# %%
mixtures = {}
for name, (count, shared) in {"one process": (1, False), "shared": (2, True)}.items():
    mixtures[name] = pools[count].run(
        train_experts, shared=shared, experts=8, steps=sizes.steps, timeout=300, **batch
    )
    predicted = predicted_bytes(mixture, ranks=count)["weights"]
    measured_bytes = mixtures[name]["parameters"]
    print(f"{name:<12}{measured_bytes / 2**20:.2f} MiB of weights per rank", end="")
    print(f", predicted {predicted / 2**20:.2f}")
pairs = zip(
    mixtures["one process"]["losses"], mixtures["shared"]["losses"], strict=True
)
expert_difference = max(abs(one - other) for one, other in pairs)
print(f"the losses differ by {expert_difference:.0e}")

# %% [markdown]
# The answer to the guess is not a quarter, but about half: a token meets 2 of 8 experts, and all of the attention and of the embedding. In large models nearly all weights are in experts. In Mixtral 8x7B, which has 2 of 8 as well, a token meets 13 of 47 billion (Jiang et al., 2024), and that is close to a quarter.
#
# **Why not more?** Only the experts are divided among the ranks. Attention and embedding are whole on each rank, as under DDP, so a rank keeps more than half. And routers are unfair: without a loss that rewards balance, a few experts get most of the tokens, and their rank is the slowest.
#
# **How do I use it?** transformers does the grouped product by itself. Experts are shared by `DistributedConfig(ep_size=2)` or Megatron's `--expert-model-parallel-size`.
#
# **What does it cost?** All experts in memory, and two exchanges per block.
#
# ## Part E: around the step
#
# ### 10. Data loading
#
# **What is going on?** A step waits until its batch is read, tokenized and padded. Other processes can make the next batches meanwhile. With several ranks, each must get rows of its own: none twice, none left out.
#
# ```text
# without   [make 0][step 0][make 1][step 1]
# worker    [make 0][make 1][make 2] …
# training          [step 0][step 1] …
# ```
#
# **Guess first.** Making a batch takes as long as a step. How much of the time is waiting, without and with a worker?

# %%
from recipes_lib.training.data_loading import (
    measure_stalls,
    predicted_stall_share,
    prefetched_by_hand,
)

show(prefetched_by_hand)
STEP = 0.05  # seconds, of making a batch and of training on it


def slow_batches():
    """Batches that take as long to make as a step takes."""
    for _ in range(sizes.slow_rows):
        time.sleep(STEP)  # a disk, a network
        yield whole


def slow_step(_):
    """A step on another device: this process only waits for it."""
    time.sleep(STEP)


stalls = {
    "no worker": measure_stalls(slow_batches(), slow_step).share,
    "a worker": measure_stalls(prefetched_by_hand(slow_batches()), slow_step).share,
}
for workers, (name, share) in enumerate(stalls.items()):  # 0 workers, then 1
    expected = predicted_stall_share(
        make_seconds=STEP, step_seconds=STEP, workers=workers
    )
    print(f"{name}: waits {share:.0%} of the time, predicted {expected:.0%}")

# %% [markdown]
# Both are pauses of equal length here, so this shows the principle, and measures no loader. Half of the time is waiting without a worker, and next to none with one: the next batch is made while the step runs. If making a batch took longer than a step, one worker would not be enough.
#
# **Why not more?** The worker here is a thread, which helps where making a batch means waiting for a disk or a network. Python code that computes, as padding and filtering do, needs other processes, and these need cores of their own.
#
# **How do I use it?** `DataLoader(num_workers=4, prefetch_factor=2, pin_memory=True)`; `split_dataset_by_node` for streams of `datasets`. `step_loader` of the file does it by rank, and continues in the middle of an epoch.
#
# **What does it cost?** Processes, and the memory of the batches that wait.
#
# ### 11. Checkpoints, and ranks that die
#
# **What is going on?** Each rank writes its part, together with its place in the whole. So any other number of ranks can read them. If a rank is killed, `torchrun` starts all of them again, and they continue from the last checkpoint.
#
# **Guess first.** Four ranks save, two ranks continue. Are the next losses the same numbers?

# %%
from recipes_lib.parallel.checkpoint import load_by_hand, save_by_hand
from recipes_lib.workflows.on_ranks.demonstrations import (
    losses_across_a_checkpoint,
    stalls_of_a_save,
)

show(save_by_hand, load_by_hand)
with tempfile.TemporaryDirectory() as folder:
    shape = dict(sizes=sizes.model, **batch)
    # Steps 0 and 1 on four ranks, then 2 and 3 on two, from what the four have saved.
    before = pools[4].run(
        losses_across_a_checkpoint, folder=folder, steps=2, first=0, **shape
    )
    after = pools[2].run(
        losses_across_a_checkpoint, folder=folder, steps=2, first=2, **shape
    )
# The same four steps without an interruption, and what a save costs.
with tempfile.TemporaryDirectory() as folder:
    through = pools[2].run(
        losses_across_a_checkpoint, folder=folder, steps=4, first=0, **shape
    )
    stall = pools[2].run(
        stalls_of_a_save, folder=f"{folder}/stalls", sizes=sizes.model, tokens=64
    )
print("4 ranks, then 2:", [round(loss, 5) for loss in before + after])
print("2 ranks through:", [round(loss, 5) for loss in through])
print(f"a save stops the training for {stall['foreground'] * 1e3:.0f} ms", end="")
print(f", in the background for {stall['background'] * 1e3:.0f} ms")

# %% [markdown]
# The answer to the guess is yes: all digits above are equal.
#
# **Why not more?** A save in the background still stops the training for a while (each number is of one save): the parts are copied first, so that the next step does not change what is being written. The copy takes memory as well.
#
# **How do I use it?** `torch.distributed.checkpoint.save` and `async_save`, with a process group of its own for the background. `torchrun --max-restarts 3` restarts; [launch/train.py](../launch/train.py) is the whole program, and a test kills one of its ranks.
#
# **What does it cost?** 12 bytes per parameter on disk, 4 of weights and 8 of states, for each checkpoint that is kept.
#
# ## The ladder, and everything combined
#
# All rows take turns now: each strategy runs again, once per round, and the order is turned around from round to round. The column *time* divides the fastest step of a row by the fastest of one process; in brackets are the smallest and the largest ratio of a single round. *Sends* is counted: the size of the tensor at each call of a step, times the ring's factor. *Expected* is computed before, from the shapes of the model alone. The rows with four ranks share the same two cores, so their times say nothing about four GPUs.

# %%
ladder.take_turns(rounds=sizes.rounds)
ladder

# %%
# What sending takes by the bandwidth test: a latency for each call of its kind, and the bytes at
# the rate of the slowest kind.
for name in ("DDP", "tensor parallel"):
    row = ladder[name]
    if not row.calls.keys() <= links.keys():  # a kind whose times lie on no line
        continue
    calls = sum(row.calls.values())
    waits = sum(count * links[kind].latency for kind, count in row.calls.items())
    rate = min(links[kind].bytes_per_second for kind in row.calls)
    sending = waits + row.sent_bytes / rate
    print(f"{name}: {calls} calls and {row.sent_bytes / 2**20:.0f} MiB ", end="")
    print(f"take {sending * 1e3:.0f} ms by the bandwidth test, ", end="")
    print(f"{sending / row.seconds:.0%} of a step")

# %% [markdown]
# By this estimate sending is a part of what is lost. If two ranks shared the work and only had to send beside it, a step would take half the time of one process, and these milliseconds. It takes longer. On a CPU two ranks also share one memory, a rank needs its own core to send, and all of them wait for the slowest at each call. We have not measured these three apart.

# %%
ladder.chart()

# %% [markdown]
# **Is it the same training?** The last column is the largest difference of any loss from that of one process. It is about one millionth, which is what rounding leaves when sums are taken in another order. In these few steps it does not grow:

# %%
from recipes_lib.report.charts.figure import new_figure
from recipes_lib.report.charts.lines import draw_lines

others = ["DDP", "FSDP (ZeRO-3)", "tensor parallel", "pipeline (1F1B)"]
others += ["context parallel (ring)"]
steps = range(1, 1 + len(reference))
figure, (above, below) = new_figure(
    "The loss is the same number, however many ranks compute it", height=5, nrows=2
)
losses = {"one process": reference} | {name: ladder[name].losses for name in others}
draw_lines(
    above,
    {name: list(zip(steps, values)) for name, values in losses.items()},
    ylabel="loss, nats per token",
)
differences = {}
for name in others:
    pairs = zip(ladder[name].losses, reference)
    # A logarithm has no place for a difference of zero.
    off = [max(abs(loss - expected), 1e-9) for loss, expected in pairs]
    differences[name] = list(zip(steps, off))
draw_lines(
    below,
    differences,
    yscale="log",
    ylim=(5e-10, 1e-3),
    xlabel="step",
    ylabel="difference to one process",
)
figure

# %% [markdown]
# **How much faster?** The same batch by one rank and by two, each with one thread:

# %%
from recipes_lib.report.charts.bars import Bars, bars
from recipes_lib.report.style import LOST, RECIPE

tokens_in_a_step = sizes.rows * sizes.tokens
scaling = {1: tokens_in_a_step / ladder["one process"].seconds}
scaling[2] = tokens_in_a_step / ladder["DDP"].seconds
ideal = 2 * scaling[1]
bars(
    ["1 rank", "2 ranks"],
    Bars(
        "tokens per second, all ranks together",
        {
            "reached": [scaling[1], scaling[2]],
            "lost": [0, max(ideal - scaling[2], 0)],
        },
        ["", f"{scaling[2] / ideal:.0%} of the ideal"],
        colors={"reached": RECIPE, "lost": LOST},
    ),
    title=f"Two ranks train on {scaling[2] / scaling[1]:.2f} times as many tokens",
)

# %% [markdown]
# Red is what is missing to the ideal, which is twice the speed. These are CPU numbers. What carries over to GPUs is the arithmetic: bytes that are kept, and bytes that are sent.
#
# ### From 2 ranks to 1,024
#
# The formulas do not need the ranks. And a rank can be measured without the others: PyTorch lets a process pretend that it is one of 8 or of 64. Its collectives move nothing, so its losses would be wrong, but it makes all tensors that a real rank would make.

# %%
from types import SimpleNamespace

from recipes_lib.report.ladders.ranks import rank_bytes_chart
from recipes_lib.workflows.on_ranks.train import bytes_on_one_of

strategies = ["DDP", "ZeRO-1", "ZeRO-2", "FSDP (ZeRO-3)"]
strategies += ["tensor parallel", "pipeline (1F1B)"]
deep_model = small_llama(sizes=sizes.bars_model, tokens=sizes.tokens)
rows = []
measured = {}
for count in (2, 8, 64):
    for strategy in strategies:
        # A row for each rank; in a pipeline each row is a micro-batch.
        many = dict(rows=count, tokens=sizes.tokens, ranks=count, micro_batches=count)
        try:
            plan = plan_of(strategy, deep_model, **many).kept
            kept = bytes_on_one_of(
                strategy=strategy,
                ranks=count,
                sizes=sizes.bars_model,
                tokens=sizes.tokens,
            )
        except ValueError as reason:  # a small model has too few blocks and heads
            print(f"{strategy}, {count} ranks: {reason}")
            continue
        row = SimpleNamespace(name=strategy, group=f"{count} ranks", **vars(kept))
        row.predicted_bytes = plan.total
        rows.append(row)
        measured.setdefault(strategy, []).append(
            (count, kept.parameters + kept.gradients + kept.states)
        )
rank_bytes_chart(rows, title="Only what is split falls with the number of ranks")

# %%
P = deep_model.num_parameters()
formulas = {"DDP": [], "ZeRO-1": [], "ZeRO-2": [], "FSDP (ZeRO-3)": []}
for count in (1, 2, 4, 8, 16, 64, 256, 1024):
    p = P / 2**20  # so all below is in MiB
    formulas["DDP"].append((count, 16 * p))
    formulas["ZeRO-1"].append((count, 8 * p + 8 * p / count))
    formulas["ZeRO-2"].append((count, 4 * p + 12 * p / count))
    formulas["FSDP (ZeRO-3)"].append((count, 16 * p / count))
figure = lines(
    formulas,
    title="16 P bytes, divided by 1,024 or not at all (dots: measured)",
    dots=False,
    xscale="log",
    yscale="log",
    xlabel="ranks",
    ylabel="MiB per rank",
)
# The points of stage 2 are those of `fully_shard`, which keeps less between two steps.
for name in ("DDP", "ZeRO-1", "FSDP (ZeRO-3)"):
    for count, kept in measured[name]:
        figure.axes[0].plot(count, kept / 2**20, "o", color=RECIPE, zorder=4)
figure

# %% [markdown]
# The model of these bars is deeper and thinner than that of the ladder: with 64 blocks and 64 heads, 64 ranks can share it in every way. A pipeline's bar is that of its fullest rank: besides its blocks it has the embedding or the output layer. Where a bar of tensor parallelism is longer than that of FSDP, the norms and what else is not cut stay whole on each rank.
#
# ### Which strategy when?
#
# Take the first that fits, from the one that sends least to the one that keeps least. The map is computed by arithmetic alone, for a training of all weights in fp32 with AdamW, on cards of 80 GiB of which 10 are for activations. It has two rules beside memory, from *The Ultra-Scale Playbook*: tensor parallelism (TP) takes the 8 ranks of one machine, and FSDP alone is not used on more than 512 ranks, because its gathers then take too long:

# %%
from recipes_lib.report.charts.figure import readable_on
from recipes_lib.report.style import BY_ARITHMETIC, LINES
from recipes_lib.workflows.which_strategy import STRATEGIES, which_strategy

billions = [1, 3, 8, 14, 32, 70, 405]
gpus = [1, 2, 4, 8, 16, 64, 256, 1024]
# Grey is the last one: it does not fit.
colors = dict(zip(STRATEGIES, [*LINES[1:], "#2f9e82", "#b59a2b"])) | {
    STRATEGIES[-1]: LINES[0]
}
title = "The simplest strategy that fits into cards of 80 GiB"
figure, axes = new_figure(title, height=4, source=BY_ARITHMETIC)
for row, size in enumerate(billions):
    for column, count in enumerate(gpus):
        name = which_strategy(parameters=size * 1e9, gpus=count)
        axes.barh(row, 0.96, left=column - 0.48, height=0.92, color=colors[name])
        text = name.replace(" (", "\n(").replace("does not", "does\nnot")
        look = {"color": readable_on(colors[name]), "fontsize": 7.5, "ha": "center"}
        axes.text(column, row, text, va="center", **look)
axes.set_xticks(range(len(gpus)), gpus)
axes.set_yticks(range(len(billions)), [f"{size} B" for size in billions])
axes.set(xlabel="GPUs", ylabel="parameters")
axes.spines[:].set_visible(False)
figure

# %% [markdown]
# Where a cell says that nothing fits, adapters or QLoRA still may. In the row of 70 billion, 16 cards take TP and 64 do not: on 16 cards the parts of a rank fit, and a gathered block beside them does not. TP splits that block as well.
#
# **What goes together.** FSDP with tensor parallelism is a row of the ladder: each has its own axis of a *mesh*, a grid of ranks. FSDP with QLoRA is recipe 5, and the tests train context parallelism with FSDP. Megatron-core and torchtitan add a pipeline to both; this notebook does not run that.
#
# **What does not.** An optimizer that steps in backward does not combine with strategies that average gradients: it would step before the average is there. A pipeline does not go well with FSDP that gathers weights for each micro-batch: it would gather them m times. A block that is sharded already should not be compiled: `apply_fully_sharded` then raises an error.
#
# <!-- numbers:gpu-02 -->
# <!-- end -->
#
# ## Leaving the notebook
#
# | you have | file |
# |---|---|
# | one machine | [torchrun_one_node.sh](../launch/torchrun_one_node.sh), [train.py](../launch/train.py) |
# | several machines | [torchrun_many_nodes.sh](../launch/torchrun_many_nodes.sh) |
# | a cluster with SLURM | [launch/slurm](../launch/slurm) |
# | accelerate or the Trainer | [launch/accelerate](../launch/accelerate), [launch/deepspeed](../launch/deepspeed) |
# | Axolotl | [launch/axolotl](../launch/axolotl) |
# | a training from scratch | [launch/megatron](../launch/megatron) |
#
# What changes when one machine is not enough is on one page: [launch/README.md](../launch/README.md).
#
# ## Take this into your code
#
# A whole training for N ranks, with FSDP2. Save it as `train.py`, and start it with `torchrun --standalone --nproc-per-node 2 train.py`.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch.distributed.fsdp import fully_shard
# from transformers import AutoModelForCausalLM, AutoTokenizer
#
# texts = ["def add(a, b):\n    return a + b"] * 4 + ["import math"] * 4  # yours
# name = "HuggingFaceTB/SmolLM2-135M-Instruct"
#
# dist.init_process_group()  # NCCL on GPUs, gloo on CPUs
# rank, ranks = dist.get_rank(), dist.get_world_size()
# tokenizer = AutoTokenizer.from_pretrained(name)
# model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)  # not 16 bits
# for block in model.model.layers:
#     fully_shard(block)  # a group of weights that is gathered together
# fully_shard(model)  # what is left: the embedding and the last norm
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # it gets the parts
#
# for _ in range(10):
#     own = texts[rank::ranks]  # as many rows on every rank
#     batch = tokenizer(own, padding=True, return_tensors="pt").to(model.device)
#     labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
#     tokens = (labels[:, 1:] != -100).sum()
#     dist.all_reduce(tokens)  # of all ranks; else each would take a mean of its own
#     # FSDP averages the gradients over the ranks, so the sum is divided by tokens / ranks.
#     loss = model(**batch, labels=labels, num_items_in_batch=tokens / ranks).loss
#     loss.backward()
#     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#     optimizer.step()
#     optimizer.zero_grad()
#     dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)
#     print(loss.item())
# dist.destroy_process_group()
# ```
#
# The weights are loaded in fp32: in the 16 bits of the file, small steps would be lost. The optimizer is made after sharding, and gets each rank's parts.
#
# We ran it with the weights of this model on one and on two CPU ranks: the loss of the first step is the same to six digits. The same in transformers 5 is `TrainingArguments(fsdp=True)`, started with torchrun. FSDP2 is its default. On a CPU it may train with DDP instead; [TRAPS.md](../TRAPS.md#many-ranks) says how to see that.
#
# ## What it costs, and when not to use it
#
# | strategy | price | not when |
# |---|---|---|
# | DDP | every rank keeps everything | 16 P bytes do not fit |
# | ZeRO-1, ZeRO-2 | an optimizer that knows the ranks | DDP fits |
# | FSDP | half as many bytes again as DDP | DDP fits, or the links are slow |
# | HSDP | copies of all parts | there is one machine |
# | QLoRA on shards | each layer becomes 16 bits twice or more | the base fits one card |
# | tensor parallel | every block waits for exchanges | the ranks are in several machines |
# | pipeline | the bubble | there are few micro-batches |
# | context parallel | keys and values travel to all ranks | texts are short |
# | experts | memory for all experts | the card is small |
#
# **What does not help here.** The model of this notebook fits one process. On two CPU cores DDP, ZeRO-1 and the pipeline take less time than one process. FSDP saves no time, and tensor parallelism takes longer than one process, although two cores work. Where DDP fits, there is no reason to take them.
#
# ## Exercises
#
# 1. In the cell of the sizes, give the model three times as many blocks, and run all cells again. Which columns of the ladder triple, and which do not?
# 2. In [strategies.py](../recipes_lib/workflows/on_ranks/strategies.py) give `hybrid` a mesh of 4 copies of 1 part. Close the pool, so that new ranks read the file: `pools[4].close()`. Then `run = pools[4].run(train_on_ranks, strategy="HSDP", sizes=sizes.model, steps=3, **batch)`. Which row of the ladder keeps `run.kept_bytes`, and why?
# 3. Compute the bytes that FSDP sends for 8 billion parameters on 8 cards, and the seconds at 300 GB/s. Compare with a step on 8,192 tokens per card: 3 · 2 · 8e9 · 8,192 operations at 400 TFLOP/s.
#
# ## References
#
# - Li et al., *PyTorch Distributed*, 2020: DDP; Rajbhandari et al., *ZeRO*, 2020; Zhao et al., *PyTorch FSDP*, 2023
# - Shoeybi et al., *Megatron-LM*, 2019; Korthikanti et al., *Reducing Activation Recomputation*, 2022: sequence parallelism
# - Huang et al., *GPipe*, 2019; Narayanan et al., *Efficient Large-Scale Training with Megatron-LM*, 2021
# - Liu et al., *Ring Attention*, 2023; Jacobs et al., *DeepSpeed Ulysses*, 2023
# - Fedus et al., *Switch Transformers*, 2021; Jiang et al., *Mixtral of Experts*, 2024
# - Dettmers et al., *QLoRA*, 2023; Answer.AI, *You can now train a 70b language model at home*, 2024
# - Tazi et al., *The Ultra-Scale Playbook*, 2025
#
# The last cell checks that the story above is true on this machine: bytes and equal losses, never speed.

# %%
for pool in pools.values():
    pool.close()
# Kept beside the rows, for the cheatsheet and the page of results.
ladder.note(
    links={kind: [link.latency, link.bytes_per_second] for kind, link in links.items()},
    deepspeed=deepspeed,
    quantized={name: run["parameters"] for name, run in tuned.items()},
    quantized_difference=quantized_difference,
    dry_quantized=[dry.peak, beside_parts(dry)],
    peaks=peaks,
    experts={name: run["parameters"] for name, run in mixtures.items()},
    expert_difference=expert_difference,
    stalls=stalls,
    checkpoint=stall,
    scaling=scaling,
    pretended={name: points for name, points in measured.items()},
    mean_of_means=[mean_of_means, true_mean],
)

for row in ladder.rows:
    off = row.kept_bytes / row.predicted_bytes - 1
    assert abs(off) < 0.03, f"{row.name}: kept bytes are {off:+.1%} off"
    if row.predicted_sent:
        off = row.sent_bytes / row.predicted_sent - 1
        assert abs(off) < 0.03, f"{row.name}: sent bytes are {off:+.1%} off"
    if row.loss_difference is not None:
        assert row.loss_difference < 1e-5, f"{row.name} is the same training"
for arithmetic, dry_step, _ in peaks.values():
    assert abs(arithmetic / dry_step - 1) < 0.03, "the peak of a rank of many"
assert quantized_difference < 1e-5
assert expert_difference < 1e-5
pairs = zip(before + after, through, strict=True)
assert max(abs(one - other) for one, other in pairs) < 1e-5, "4 ranks, then 2"
assert stalls["a worker"] < stalls["no worker"], "a worker helps"
assert ladder["FSDP (ZeRO-3)"].kept_bytes < 0.51 * ladder["DDP"].kept_bytes
print("all checks passed")
