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
# > **106 → 27 MiB per rank:** weights, gradients and optimizer states of one training, by one process and by 4 with FSDP × TP. FSDP alone on as many ranks keeps the same share; tensor parallelism is for layers that are too large. In 10 strategies, every loss is that of one process to 1e-06. Predictions are off by less than 0.1% for the bytes that a rank keeps, and by less than 0.1% for those that it sends: both are counted as a ring sends them, and no wire is measured.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-26.
# <!-- end -->
#
# A model that trains on one GPU can train on many, in about a dozen ways. They differ in what each GPU keeps and sends. This notebook starts real processes that train together. It predicts both numbers for each way, measures them, and compares the loss with that of one process.
#
# **You need** [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) or its equation; no GPU, no login. **Minutes**: eight to run on two CPU cores, about forty to read. **Has run on** two CPU cores. With four GPUs or more the processes run on them, with fewer on the CPU. No GPU has run them yet. What a process keeps and sends follows from shapes, so it is the same there. Times are not.
#
# **In a hurry?** See [which strategy when](#Which-strategy-when), [lines to copy](#Take-this-home), and the page for [two GPUs, or more](../docs/two-gpus.md).
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
import tempfile
import time
from functools import partial

import torch

from recipes_lib.core.measure.machine import choose_sizes, machine

print(machine())
# Each rank has one thread of its own: more threads than cores wait for each other.
torch.set_num_threads(1)

# %% [markdown]
# A training on many GPUs is one program, started once for each GPU. Such a process is called a *rank*, and the number of ranks N is the *world size*. Ranks exchange tensors by *collectives*: calls that all of them make together. NCCL carries them out on GPUs, gloo on CPUs.
#
# The model is small, and each byte of the text is a token.

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
# P is the number of parameters that train. With AdamW in fp32, weights take 4 P bytes, gradients 4 P, and optimizer states 8 P. On N ranks each of these terms is either *whole* on every rank, or *split*: divided by N.
#
# $$\text{bytes of a rank} = \frac{4P}{a} + \frac{4P}{b} + \frac{8P}{c} + \text{activations of its rows} \qquad a, b, c \in \{1, N\}$$
#
# What is split has to travel, because each rank needs all of it at some time. So every strategy has a second number: the bytes that a rank sends in a step. In a *ring* each rank sends to its neighbour only. For a tensor of B bytes it sends
#
# ```text
# all-gather       every rank has a part, and all get the whole     (N-1)/N · B
# reduce-scatter   every rank gets one part of the sum              (N-1)/N · B
# all-reduce       every rank gets the whole sum: both of them    2 (N-1)/N · B
# all-to-all       every rank has a part for every other rank       (N-1)/N · B
# broadcast        from one rank to all, on average over the ranks  (N-1)/N · B
# send             from one rank to another                                 B
# ```
#
# The table of this notebook, the *ladder*, predicts both numbers from these lines. It counts weights, gradients and states at the moment when the optimizer steps, and no activations.
#
# ## Part A: ranks, and how they talk
#
# ### 1. Launch
#
# **What happens.** A notebook is one process, and another process cannot import a function that is written in a cell. A *pool* starts N processes that stay, and all of them call one function from a file.
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
# **The answer.** Both hold 1 + 2 = 3: every rank gets the sum.
#
# The first call takes seconds: it imports PyTorch and starts the processes.
#
# **In your code.** `torchrun --standalone --nproc-per-node 4 train.py` starts a script as four ranks.
#
# ### Bandwidth test
#
# **What happens.** Before anything trains, measure how fast the ranks talk. The *bus bandwidth* is the bytes that a rank has to send by the ring's formula, divided by the seconds. If only the links took time, it would be one number for all collectives.
#
# **Guess first.** A message of 4 KiB takes some time. Does one of 1 MiB take 256 times as long?
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
# **The answer.** Only 2.9 times as long. A call has a fixed price, its *latency*: the processes have to meet. For 4 KiB nearly all of the time is latency, and an all-reduce of two ranks pays it twice. That is why libraries collect small tensors in large *buckets*.
#
# On a CPU the network is a copy in memory. Additions and further copies of a collective count, too, so the four rates are not one number.
#
# **In your code.** On GPUs `all_reduce_perf -b 8 -e 8G -f 2 -g 8` of nccl-tests prints such numbers; [nccl_tests.sh](../launch/nccl_tests.sh) starts it. Compare them with the data sheets of NVLink, PCIe or the network cards.

# %% [markdown]
# ## Baseline: one process alone
#
# One process trains on the whole batch, and all other rows are compared with it. `train_on_ranks` builds the model, lets the strategy change it, and takes the steps. Each strategy is a few lines of [strategies.py](../recipes_lib/workflows/on_ranks/strategies.py).
#
# A row prints what arithmetic predicts, and then what came. *Sends* is counted: the size of the tensor at each call, times the ring's factor. *Expected* is computed before, from shapes alone. *Loss to 1st* is the largest difference of any loss from that of one process.
#
# All rows use AdamW with an epsilon of 1e-3, which is large. With the usual one, the first step moves a weight just as far where its gradient is nearly zero. There rounding decides the direction, and equal trainings would look different.

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
# **What happens.** Every rank has the whole model and some rows of the batch. After backward the gradients of all ranks are averaged, so all ranks take the same step.
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
# **The answer.** No. In [the ladder](#The-ladder), where all rows take turns, a step takes 0.70 times as long as that of one process. Each rank still keeps all 106 MiB.
#
# **Send early.** The gradients of the last block are ready when most of backward is still to come. DDP puts gradients into buckets, and sends a bucket as soon as it is full. If all gradients are in one bucket, nothing can be sent before the end:

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
# With one bucket nothing is sent during backward, with six it is 85 % of the sending. A GPU computes while it sends, so there this share is time that is saved. Here a rank needs its core to send, too: of these two recorded steps, the one with six buckets is even the longer one. (The span *step* is the wait for the buckets, and the optimizer.)
#
# #### A mean of means is not the mean
#
# Rows have unequal numbers of tokens with a loss. If each rank divides by the number of its own tokens, and DDP averages that, a token on a rank with short rows weighs more than others. No error says so. Here are both means of one batch, without any ranks:

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
# The two counts are close here, and so are the two means; recipe 1 of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb) has a large error. So all strategies divide by the tokens of *all* ranks, and so do [the lines to copy](#Take-this-home).
#
# **And `torch.nn.DataParallel`?** It runs replicas in threads of one process:

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
# Two threads are not faster than one here, and one process cannot reach a second machine. PyTorch [recommends DDP](https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html) in its place.
#
# **In your code.** `DistributedDataParallel(model)`, under torchrun; the Trainer of transformers wraps the model by itself. With several micro-batches put `with model.no_sync():` around the forward *and* the backward of all but the last. Then one all-reduce is enough. **Not when** 16 P bytes do not fit.
#
# ## Part C: less on each rank
#
# ### 3. ZeRO 1, 2, 3
#
# **What happens.** Under DDP all N ranks keep the same numbers. *ZeRO* splits them: in stage 1 the states, in stage 2 the gradients as well, in stage 3 also the weights.
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
# **The answer.** By the broadcasts above. They come on top of DDP's all-reduce: where DDP sends 27 MiB, PyTorch's stage 1 sends 40. It also gives whole parameters to ranks, and cannot divide one that is very large.
#
# The row *ZeRO-2* is `fully_shard`, with weights that are whole from forward to backward and in parts when the optimizer steps. So the ladder has 8 P for it, 53 MiB, and not the 10 P of the drawing.
#
# **DeepSpeed** is the library of the authors of ZeRO. It cuts one long row of all parameters, so its parts are equal. Beside the weights it keeps an fp32 copy of its part, the *masters*, even of weights in fp32:

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
# **In your code.** `TrainingArguments(deepspeed="zero2.json")`, with a file of [launch/deepspeed](../launch/deepspeed). On CPU ranks it may split nothing, and raise no error: [TRAPS.md](../TRAPS.md#many-ranks) says how to see that. **Not when** DDP fits.
#
# ### 4. FSDP2: everything in parts
#
# **What happens.** `fully_shard` keeps a part of each parameter on each rank. Before a block computes, its weights are gathered; after it, they are dropped. Backward gathers them again, and its gradients are scattered: each rank gets the sum for its own part.
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
# **The answer.** One and a half times as many: three transfers of (N-1)/N · 4 P, where DDP's all-reduce is two. The rows say 40 MiB and 27. In return a rank keeps half, 53 MiB.
#
# **HSDP** has parts within a machine, and copies between machines. Its row has two copies of two parts, so each of four ranks keeps as much as with FSDP on two. In return only an all-reduce of a part crosses the slow links between machines.
#
# **The peak.** During a step a rank also holds the block that is gathered, the next one, the gradients of a whole block, and activations. The ladder does not count that. Arithmetic does, and so does a *dry step*: this process pretends to be one of N ranks, with tensors that have shapes and no data. Here are four blocks of Llama 3.1 8B, with a row of 512 tokens:

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
# The last number is what a rank holds beside 16 P / N, and it does not fall with N. (It grows, because 16 P / N counts all gradients, and at the peak some do not exist yet.) With 64 ranks it is nearly all of the peak. Then smaller blocks or checkpoints help, and more ranks do not.
#
# **Mixed precision.** With `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`, a step has these dtypes:

# %%
from recipes_lib.workflows.on_ranks.demonstrations import (
    dtypes_in_sixteen_bits,
    strategies_in_bytes,
)

dtypes = pools[2].run(dtypes_in_sixteen_bits, sizes=sizes.model, **batch)
for what, dtype in dtypes.items():
    print(f"{what:<32}{dtype}")

# %% [markdown]
# Unlike with autocast, norms and the residual stream have 16 bits, too. Gathers send half as many bytes, and sums of gradients as many as before. The weights at rest stay fp32: a step of AdamW often changes a weight by less than 16 bits can show.
#
# **All strategies of FSDP**, on four ranks. *Between* is what a rank holds of the weights after forward and before backward:

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
# *No shard* is DDP, *gradients and states* is ZeRO-2 by `fully_shard`, *hybrid* is HSDP, and *full* is FSDP. *Between*, ZeRO-2 holds the whole weights *and* its own part of them: more than DDP. Full keeps least, and sends most.
#
# **In your code.** `fully_shard(block)` for each block and then for the model, as [below](#Take-this-home), or `fsdp_version: 2` in accelerate. To compile as well, call `block.compile()` on each block *before* sharding. (A wrapper by `torch.compile(block)` may never call the hooks that `fully_shard` adds later: [accelerate, pull request 4022](https://github.com/huggingface/accelerate/pull/4022).) **Not when** DDP fits.
#
# ### 5. FSDP with QLoRA
#
# **What happens.** In QLoRA, recipe 10 of [notebook 01](../notebooks/01_large_models_limited_hardware.ipynb), the base is frozen in four bits, and small adapters train. So the base is nearly all that a rank keeps. A weight in four bits is a *code*, an index into a table of 16 values, and 64 codes share one *scale*. Both are split like any other weight, if both are parameters of the model.
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
# Each of two ranks keeps half of the small base. The guess needs no card: a dry step answers it, of one of two ranks, on the shape of Llama 3.1 70B, with one row of 1,024 tokens and every block checkpointed.

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
# **The answer.** The tensors do, with 21.92 GiB. But notebook 01 leaves a fifth more for holes between tensors, and half a GiB for CUDA, and that is more than such a card has. With *offload*, where the parts wait in host memory, 2.94 GiB are on the card. ([Answer.AI](https://www.answer.ai/posts/2024-03-06-fsdp-qlora) measured 14.92 GiB: all memory that PyTorch had reserved, with longer rows of Llama 2 70B.)
#
# **In your code.** Axolotl with `load_in_4bit: true`, `adapter: qlora` and an `fsdp_config`: [llama-3-70b-qlora-fsdp.yaml](../launch/axolotl/llama-3-70b-qlora-fsdp.yaml) is such a training, with offload. **Not when** the base fits one card: each layer is turned into 16 bits in forward and in backward, with checkpoints once more.
#
# ## Part D: split the model's work
#
# ### 6. Tensor parallel
#
# **What happens.** FSDP splits what is *kept*. Tensor parallelism (TP) splits what is *computed*: each rank has some of the heads of attention and some features of the MLP, for all rows. Two layers in a row need only one exchange: the first is cut by its outputs, the second by its inputs.
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

# %%
climb("tensor parallel", 2, "work is split")
climb("FSDP × TP", 4, "work is split")

# %% [markdown]
# **The answer.** Two times, not seven: once for attention, once for the MLP. Backward talks at two places as well.
#
# *Sequence parallelism* is on as well: between these places activations are split by tokens, and as much is sent.
#
# What is sent is activations, 34 MiB here, and more with a larger batch. All ranks wait for it: in the ladder a step takes 1.38 times as long as that of one process, although two cores work. So tensor parallelism stays within a machine, where links are fast.
#
# **In your code.** `from_pretrained(…, tp_plan="auto")` under torchrun, `parallelize_module` of PyTorch, or Megatron-core. The row *FSDP × TP* has a *mesh*, a grid of ranks, with an axis for each: tensor parallel first, on the inner axis. **Not when** the ranks are in several machines, or do not divide the heads.
#
# ### 7. Pipeline parallel
#
# **What happens.** Each rank has some blocks, a *stage*. The batch goes through in *micro-batches*, so that several stages work at the same time. At the beginning and the end some have nothing to do: the *bubble*.
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
# **The answer.** (p - 1) / (m + p - 1), here 1 / 5. It counts slots as if all took the same time, so a recorded step can be idle for longer. An *interleaved* schedule gives each rank v thin stages in place of one, and waits for thin ones only: (p - 1) / (v m + p - 1), here 1 / 9. In return it sends more often. One recorded step does not say which schedule is the fastest.

# %%
climb("pipeline (1F1B)", 2, "work is split")

# %% [markdown]
# A pipeline sends least of all strategies: the hidden states between two stages, here 1,024 tokens × 256 numbers × 4 bytes = 1 MiB, and as many bytes of gradients back from the other rank. GPipe and 1F1B have the same bubble. What 1F1B saves is activations: a stage keeps those of at most p micro-batches, and not of all m.
#
# **In your code.** `Schedule1F1B` of `torch.distributed.pipelining`, Megatron-core's `--pipeline-model-parallel-size`. **Not when** there are few micro-batches, or the blocks do not make equal stages.
#
# ### 8. Context parallel
#
# **What happens.** One text is so long that its activations do not fit. All layers but attention look at each token alone, so tokens can be dealt out to ranks. Only attention has to talk. In a *ring*, keys and values travel from rank to rank, and each rank joins what it has seen. *Ulysses* exchanges tokens for heads instead.
#
# ```text
# ring      step 0: own keys   step 1: the neighbour's   …   N steps
# Ulysses   all-to-all: my tokens, all heads → all tokens, my heads
# ```
#
# **Guess first.** Attention is causal: the first tokens see few keys, the last ones see many. Which rank is the slowest, and what can be done?
#
# **The idea.** Attention on some keys and attention on others can be joined. Each is weighted by the sum of its exponentials, of which the logarithm is kept.

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
# **The answer.** With tokens in one piece the last rank has most work, and a step takes 1.75 times the mean. The *zig-zag* cuts the text into 2 N pieces and gives each rank one from the front and one from the back: of four ranks, rank 0 gets pieces 0 and 7, rank 3 gets 3 and 4. Then all have the same work.
#
# Weights, gradients and states stay whole, so context parallelism is combined with FSDP over the same ranks. Ulysses sends less, 43 MiB in place of 59, but the ranks must divide the heads.
#
# **In your code.** `context_parallel` of PyTorch on GPUs, `ParallelismConfig(cp_size=…)` in accelerate. Shift the labels *before* the cut, and give the positions of the whole text. **Not when** the text fits one card: [notebook 04](../notebooks/04_training_long_sequences.ipynb) shows how far that goes.
#
# ### 9. Mixture of experts
#
# **What happens.** A block has many feed-forward layers (MLPs), the *experts*, and each token goes through a few of them. All experts take memory; the active ones take time. With *expert parallelism* each rank has some experts, and tokens travel to them and back.
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
# **The answer.** Not a quarter, but about half: a token meets 2 of 8 experts, and all of the attention and of the embedding. So each of two ranks keeps more than half, too. In large models nearly all weights are in experts: in Mixtral 8x7B a token meets 13 of 47 billion (Jiang et al., 2024).
#
# Without a loss that rewards balance, a few experts get most of the tokens, and their rank is the slowest. In transformers that loss counts only with `output_router_logits=True`.
#
# **In your code.** transformers does the grouped product by itself, and shares the experts with `DistributedConfig(ep_size=2)`. **Not when** memory is what you lack: all experts have to be somewhere.
#
# ## Part E: around the step
#
# ### 10. Data loading
#
# **What happens.** A step waits until its batch is read, tokenized and padded. Other processes can make the next batches meanwhile. With several ranks, each must get rows of its own: none twice, none left out.
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
# **The answer.** Half of it, and next to nothing. (Both are pauses here: this shows the principle, and measures no loader.) This worker is a thread, which helps where a batch waits for a disk. Python code that computes, such as padding, needs other processes, and cores for them.
#
# **In your code.** `DataLoader(num_workers=4, prefetch_factor=2, pin_memory=True)`, with `split_dataset_by_node` for streams of `datasets`. Our [step_loader](../recipes_lib/training/data_loading.py) gives each rank its rows, and continues in the middle of an epoch. **Not when** batches are ready sooner than steps.
#
# ### 11. Checkpoints, and ranks that die
#
# **What happens.** Each rank writes its part, together with its place in the whole. So any other number of ranks can read them. If a rank is killed, `torchrun` starts all of them again, and they continue from the last checkpoint.
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
# **The answer.** Yes, in all digits above. A save stopped the training for 278 ms, one in the background for 75, each taken once. The parts are copied first, and the copy takes memory.
#
# **In your code.** `torch.distributed.checkpoint.save`, or `async_save` with a process group of its own. `torchrun --max-restarts 3` restarts; [launch/train.py](../launch/train.py) is the whole program, and a test kills one of its ranks. Each checkpoint takes 12 P bytes on disk.
#
# ## The ladder
#
# All rows take turns now. *Time* divides the fastest step of a row by the fastest of one process; in brackets are the smallest and the largest ratio of a round. Rows with four ranks share the same two cores, so their times say nothing about four GPUs.

# %%
ladder.take_turns(rounds=sizes.rounds)
ladder

# %% [markdown]
# **Is it the same training?** The last column says so: the losses differ by about one millionth, which is rounding. In these few steps it does not grow:

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
# ### From 2 ranks to 64
#
# Here one process pretends again, now with real tensors, on a model that is deep enough for 64 ranks. Its collectives move nothing, so only its bytes are right.

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

# %% [markdown]
# ZeRO-1 does not get below 8 P bytes, however many ranks there are. A pipeline's bar is that of its fullest rank.
#
# ## Which strategy when
#
# Take the first that fits, from the one that sends least to the one that keeps least. The map is arithmetic, for a training of all weights in fp32 with AdamW, on cards of 80 GiB of which 10 are for activations. Two of its rules are from *The Ultra-Scale Playbook*: tensor parallelism takes the 8 ranks of one machine, and FSDP alone is not used on more than 512 ranks.

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
# For your cards, `which_strategy(parameters=3e9, gpus=4, card_bytes=24 * 2**30)` answers: here with FSDP. Where nothing fits, LoRA or QLoRA still may.
#
# | | recipe | take it when |
# |---|---|---|
# | 2 | [data parallel (DDP)](../recipes_lib/parallel/data_parallel/__init__.py) | the model fits, and time is short |
# | 3 | [ZeRO](../recipes_lib/parallel/zero/__init__.py) | states or gradients do not fit |
# | 4 | [FSDP2, HSDP](../recipes_lib/parallel/fully_sharded/__init__.py) | weights do not fit either |
# | 5 | [FSDP with QLoRA](../recipes_lib/parallel/quantized_shards/__init__.py) | you fine-tune, and 16 bits of the base do not fit |
# | 6 | [tensor parallel](../recipes_lib/parallel/tensor_parallel/__init__.py) | one block, or its activations, is too large |
# | 7 | [pipeline parallel](../recipes_lib/parallel/pipeline_parallel/__init__.py) | the links are slow |
# | 8 | [context parallel](../recipes_lib/parallel/context_parallel/__init__.py) | one text is too long for a card |
# | 9 | [mixture of experts](../recipes_lib/architecture/mixture_of_experts/__init__.py) | you want more weights, and not more time per token |
#
# **What does not go together.** An optimizer that steps in backward would step before gradients are averaged. FSDP in a pipeline would gather its weights for each micro-batch. More of both: [cheatsheet](../CHEATSHEET.md), [TRAPS.md](../TRAPS.md#many-ranks).
#
# <!-- numbers:gpu-02 -->
# <!-- end -->
#
# ## Take this home
#
# A whole training for N ranks, with FSDP2. Save it as `train.py`, and start it with `torchrun --standalone --nproc-per-node 2 train.py`.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
# from torch.distributed.fsdp import fully_shard
# from transformers import AutoModelForCausalLM, AutoTokenizer
#
# texts = ["def add(a, b):\n    return a + b"] * 4 + ["import math"] * 4  # yours
# name = "HuggingFaceTB/SmolLM2-135M-Instruct"
#
# dist.init_process_group()  # NCCL on GPUs, gloo on CPUs
# rank, ranks = dist.get_rank(), dist.get_world_size()
# tokenizer = AutoTokenizer.from_pretrained(name)
# # In the 16 bits of the file, small steps would be lost.
# model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
# for block in model.model.layers:
#     fully_shard(block)  # a group of weights that is gathered together
# fully_shard(model)  # what is left: the embedding and the last norm
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # after: it gets the parts
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
#     if rank == 0:
#         print(loss.item())
#
# options = StateDictOptions(full_state_dict=True, cpu_offload=True)
# weights = get_model_state_dict(model, options=options)  # all ranks send their parts
# if rank == 0:
#     model.save_pretrained("trained", state_dict=weights)
#     tokenizer.save_pretrained("trained")
# dist.destroy_process_group()
# ```
#
# On one and on two CPU ranks the losses of its first step agree to six digits.
#
# The same in transformers 5 is `TrainingArguments(fsdp=True)`, started with torchrun. [launch/README.md](../launch/README.md) has files for accelerate, DeepSpeed, SLURM, Axolotl and Megatron, and says what changes when one machine is not enough.
#
# ## Exercise
#
# How many bytes does FSDP send in a step, for 8 billion parameters on 8 cards? How long does that take at 300 GB/s, and how long do 8,192 tokens per card compute, at 400 TFLOP/s and 6 operations per token and parameter?
#
# <details><summary>Answer</summary>
#
# 3 · 7/8 · 4 · 8e9 bytes are 84 GB, and take 0.28 s. The step computes for 6 · 8e9 · 8,192 / 400e12 = 0.98 s. So the sending can hide behind it.
#
# </details>
#
# ## References
#
# - Rajbhandari et al., *ZeRO*, 2020; Zhao et al., *PyTorch FSDP*, 2023
# - Shoeybi et al., *Megatron-LM*, 2019; Narayanan et al., *Efficient Large-Scale Training*, 2021
# - Liu et al., *Ring Attention*, 2023; Jacobs et al., *DeepSpeed Ulysses*, 2023
# - Jiang et al., *Mixtral of Experts*, 2024; Tazi et al., *The Ultra-Scale Playbook*, 2025
#
# The last cell checks the story on this machine: bytes and equal losses, never speed.

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
