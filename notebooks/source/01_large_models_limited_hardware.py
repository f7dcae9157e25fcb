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
# # My model does not fit: training large models on limited hardware
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your-username/llm-training-recipes/blob/main/notebooks/01_large_models_limited_hardware.ipynb)
#
# <!-- numbers:headline-01 -->
# > **2,720 MiB → 309 MiB:** the peak memory of tensors of one training step of a real pretrained model, from full fine-tuning in fp32 to everything combined, on the same batch: **89% less**. Held-out loss in 8 steps, one run each: LoRA 3.81 → 2.80; everything combined 4.06 → 2.86. Every row was predicted first; the arithmetic is off by less than 0.1%.
# >
# > Measured on AMD EPYC, 2 CPU cores, no native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-22.
# <!-- end -->
#
# | | |
# |---|---|
# | **You will learn** | to predict the memory of a training step with arithmetic, and which recipe removes which term |
# | **You need** | Python and PyTorch basics; no GPU, no login |
# | **Time** | five to fifteen minutes on two CPU cores |
# | **Cost** | free on a laptop or a Colab T4 |

# %% [markdown]
# ## The map
#
# | | recipe | shrinks | file |
# |---|---|---|---|
# | 1 | gradient accumulation | activations, loss | [gradient_accumulation.py](../recipes_lib/training/gradient_accumulation.py) |
# | 2 | activation checkpointing | activations | [activation_checkpointing.py](../recipes_lib/memory/activation_checkpointing.py) |
# | 3 | activation offloading | activations | [activation_offload.py](../recipes_lib/memory/activation_offload.py) |
# | 4 | mixed precision | activations, time | [mixed_precision.py](../recipes_lib/precision/mixed_precision.py) |
# | 5 | 8-bit or offloaded optimizer states | states | [eight_bit_adam.py](../recipes_lib/precision/eight_bit_adam.py), [optimizer_offload.py](../recipes_lib/memory/optimizer_offload.py) |
# | 6 | optimizer step in backward | gradients | [optimizer_in_backward.py](../recipes_lib/memory/optimizer_in_backward.py) |
# | 7 | LoRA | gradients, states | [lora.py](../recipes_lib/fine_tuning/lora.py) |
# | 8 | QLoRA | weights too | [qlora.py](../recipes_lib/fine_tuning/qlora.py) |
# | 9 | dynamic batch size | the guesswork | [dynamic_batch.py](../recipes_lib/training/dynamic_batch.py) |
#
# ## Setup
#
# Where the package is missing, as on Colab, the first cell fetches this repository and adds what is lacking; it keeps the installed PyTorch. After `make run` or `make lab` it does nothing.

# %%
import importlib.util
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("recipes_lib") is None:
    code = Path(".." if Path("../recipes_lib").exists() else "llm-training-recipes").resolve()
    if not code.exists():
        url = "https://github.com/your-username/llm-training-recipes"
        subprocess.run(["git", "clone", "-q", url, str(code)], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-e", f"{code}[notebooks]"], check=True)
    sys.path.insert(0, str(code))

import torch

from recipes_lib.core.budget import Shape
from recipes_lib.core.chat import decode_with_mask
from recipes_lib.core.data import batches, load_instructions
from recipes_lib.core.default_model import model_source
from recipes_lib.core.evaluation import evaluate
from recipes_lib.core.machine import fast, machine, seed_everything
from recipes_lib.core.measure import PeakMemory, in_turns, measure
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.report.charts import budget_chart, loss_chart
from recipes_lib.report.ladder import Ladder
from recipes_lib.report.show import show

# %%
from functools import partial

here, tokenizer = machine(), load_tokenizer()
print(here, "default model from " + model_source(), sep="\n")

# %% [markdown]
# ## What runs out: one equation
#
# A training step holds weights, optimizer states, gradients, activations and the loss. In the plain loop activations and gradients are never whole at the same time: backward frees the ones as it makes the others. So the peak is
#
# $$\text{peak} = \text{weights} + \text{states} + \max(\text{activations} + \text{loss},\ \text{gradients})$$
#
# The printed budget has small terms more: gradients that are *carried* between micro-batches, what backward holds inside the first block, and copies of the embedding's gradient.
#
# In fp32 with AdamW, weights and gradients take 4 bytes per parameter each and the two averages of AdamW another 8: **16 bytes per parameter** before the first token. The rest grows with batch times sequence. On a CPU the model is the real SmolLM2-135M; a GPU gets the shape of a larger one, with random weights, because speed and memory do not depend on what the weights are.

# %%
sizes = {
    "cpu": ("smollm2", None, 8, 80),
    "gpu16": ("llama-3.2-1b", 6, 8, 256),  # 6 of its 16 layers: plain fp32 training of all is too much
    "gpu24": ("llama-3.2-1b", 12, 8, 256),
    "gpu80": ("llama-3.2-3b", None, 8, 256),
}
name, layers, B, S = ("smollm2-135m", 5, 8, 64) if fast() else sizes[here.tier]


def fresh(name=name):
    seed_everything(0)
    return load_model(name) if name == "smollm2" else model_of_shape(name, layers=layers)


model, shape = fresh(), Shape(batch=B, seq=S)
baseline_plan = budget_of(model, shape)
print(f"{name}: {model.num_parameters():,} parameters, batch of {B} x {S} tokens\n{baseline_plan}")

# %% [markdown]
# The text is real too: functions of Python's standard library, each with its docstring as the answer. The loss is on the answer only; the part between ⟦ and ⟧ carries none.

# %%
train = load_instructions(tokenizer, split="train", max_tokens=min(S, 96), limit=40 if fast() else 400)  # short
held_out = load_instructions(tokenizer, split="validation", max_tokens=min(S, 96), limit=12 if fast() else 32)
feed = {"pad_token_id": tokenizer.pad_token_id, "device": here.device}
batch = next(batches(train, batch_size=B, length=S, **feed))
tokens = sum(map(len, train[:B]["input_ids"]))  # without the padding
print(decode_with_mask(train[1], tokenizer))

# %% [markdown]
# ## Baseline: the plain loop
#
# This is what every row below is compared with. (`fused=True` updates in one kernel without temporary tensors.) `climb` says what to expect, measures, and adds a row to the ladder: first a warm-up, in which AdamW makes its states, then one step under the memory account. Seconds come last.


# %%
ladder, plans, losses, again = Ladder("01_large_models_limited_hardware"), {}, {}, {}


def adamw(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def plain_step(model, optimizer):
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# %%
def ready(adapt, optimizer, step):
    global model
    model = None  # free the one before
    model = adapt(fresh())
    states, seen = optimizer(model, lr=2e-5), []
    while not states.state:  # made by the first step that is not skipped
        seen.append(step(model, states))
    return lambda: seen.append(step(model, states)), seen


def climb(row, plan, adapt=lambda model: model, optimizer=adamw, step=plain_step):
    print(f"expected: {plan.peak / 2**20:,.0f} MiB")
    take, losses[row] = ready(adapt, optimizer, step)
    warmup = 0 if fast() else 1  # beside the step that made the states
    measured = measure(take, tokens=tokens, warmup=warmup, repeats=3 if here.device == "cuda" else 0)
    ladder.add(row, measured, predicted=plan.peak, loss=losses[row][-1])
    plans[row], again[row] = plan, partial(ready, adapt, optimizer, step)
    print(ladder.line(row, timed=here.device == "cuda"))


climb("baseline", baseline_plan)

# %% [markdown]
# The loss is that of a batch seen three times or more: lower than any adapter reaches.
#
# ## Part A: what grows with the batch
#
# ### 1. Gradient accumulation
#
# **Split the batch, add up the gradients, step once.** Activations and loss are those of one micro-batch. The price: gradients stay alive while the next micro-batch runs, so they now stand *beside* the activations.

# %%
from recipes_lib.training.gradient_accumulation import accumulate_gradients, estimate_gradient_accumulation

show(accumulate_gradients)
row_by_row = Shape(batch=B, seq=S, micro_batches=B)
accumulation_plan = estimate_gradient_accumulation(baseline_plan, model, row_by_row)


def accumulated_step(model, optimizer):
    loss = accumulate_gradients(model, batch, micro_batches=B)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


climb("gradient accumulation", accumulation_plan, step=accumulated_step)

# %% [markdown]
# The loss is the baseline's: same data, same steps, same updates. **The popular bug** divides each micro-batch by its *own* number of target tokens. Our answers have unequal lengths, so let us see how wrong that gradient is.


# %%
def gradient():
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return flat


model(**batch, use_cache=False).loss.backward()
right = gradient()
for row in range(B):
    (model(**{k: v[row : row + 1] for k, v in batch.items()}, use_cache=False).loss / B).backward()
naive_error = ((gradient() - right).norm() / right.norm()).item()
accumulate_gradients(model, batch, micro_batches=B)
exact_error = ((gradient() - right).norm() / right.norm()).item()
del right  # as large as all gradients: it would count in every row below
print(f"relative error of the gradient: token-weighted {exact_error:.1e}, mean of means {naive_error:.1%}")

# %% [markdown]
# ### 2. Activation checkpointing
#
# **Keep only the input of each block and recompute the rest in backward.** That trades about one more forward pass for most of the activations. Gradients are the same to the last bit, so the loss must be too.

# %%
from recipes_lib.memory.activation_checkpointing import (
    InputOnly,
    apply_activation_checkpointing,
    checkpointed_by_hand,
    estimate_activation_checkpointing,
)

show(checkpointed_by_hand, InputOnly)
checkpoint_plan = estimate_activation_checkpointing(baseline_plan, model, shape)
climb("activation checkpointing", checkpoint_plan, apply_activation_checkpointing)

# %% [markdown]
# The loss is the same number again, and so is every gradient. What remains at the peak are the gradients themselves: the activations no longer decide.
#
# ### 3. Activation offloading
#
# **Keep every activation, but somewhere else.** On a GPU that is pinned host memory, copied on a side stream. On a CPU the host memory *is* the device, so only the disk is left. With enough free memory the system caches the file, and the clock is kinder than a real disk.

# %%
from recipes_lib.memory.activation_offload import (
    estimate_activation_offload,
    offload_activations,
    offloaded_by_hand,
)

show(offloaded_by_hand)
offload_plan = estimate_activation_offload(baseline_plan, model, shape)


def offloaded_step(model, optimizer):
    with offload_activations(model, to="host" if here.device == "cuda" else "disk"):
        return plain_step(model, optimizer)


climb("activation offloading", offload_plan, step=offloaded_step)

# %% [markdown]
# The same peak and the same loss as with checkpointing. Which one is faster depends on the disk or link against the processor.
#
# ### 4. Mixed precision
#
# **Multiply in 16 bits, keep the weights in fp32.** PyTorch's `autocast` casts what a matrix product reads: half the bytes for most activations, but a 16-bit copy of every weight on top. Time depends on the machine: where the first lines say *no native bf16* on a CPU, the products are emulated. A step would take minutes, so it is only predicted; notebook 05 shows the factor on a few tokens.

# %%
from recipes_lib.precision.mixed_precision import estimate_mixed_precision, mixed_precision

mp = mixed_precision(dtype=torch.bfloat16 if here.compute_dtype == torch.float32 else here.compute_dtype)
plans["mixed precision"] = estimate_mixed_precision(baseline_plan, model, shape, dtype=mp.dtype)
print(mp, plans["mixed precision"], sep="\n")


def mixed_step(model, optimizer):
    with mp.autocast():
        loss = model(**batch, use_cache=False).loss
    mp.backward(loss)
    mp.step(optimizer)
    optimizer.zero_grad()
    return loss.item()


if here.compute_dtype != torch.float32:  # emulated products would take minutes
    climb("mixed precision", plans["mixed precision"], step=mixed_step)

# %% [markdown]
# It is time that is saved, if any; the copies of the weights eat what the activations save, until the batch is larger. The loss is no longer the same number: 16-bit products round, and Adam's first steps follow the sign of every gradient.
#
# Why fp16 needs loss scaling and bf16 does not: fp16 has no number between zero and its smallest one, and gradients live there. Scaling the loss moves all of them up; dividing by the scale before the step moves them back.

# %%
for scale in (1, 2**16):
    x = torch.ones(4, dtype=torch.float16, device=here.device, requires_grad=True)
    (scale * 1e-8 * x.float().sum()).backward()  # the gradient of each element is 1e-08, times the scale
    print(f"loss scale {scale:>6,}: the fp16 gradient, unscaled again, is {x.grad[0].item() / scale:.1e}")

# %% [markdown]
# ## Part B: what every parameter costs
#
# On this small batch the first three recipes stop near the same floor: gradients, states and weights, which no batch size touches. We keep checkpointing on.
#
# ### 5. 8-bit optimizer states, or states in host memory
#
# **Store AdamW's two averages in one byte per element each, with a scale per block.** On a GPU the other way is to keep them in host memory and step there. On a CPU-only machine there is nowhere to move them to, and `offload_optimizer` refuses with that reason.

# %%
from recipes_lib.memory.optimizer_offload import estimate_optimizer_offload, offload_optimizer
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw, estimate_eight_bit_adam

eight_bit_plan = estimate_eight_bit_adam(checkpoint_plan, model, shape)
climb("+ 8-bit AdamW", eight_bit_plan, apply_activation_checkpointing, eight_bit_adamw)
print("fp32 and 8-bit", *zip(*[[round(x, 4) for x in losses[row]] for row in ("baseline", "+ 8-bit AdamW")]), sep="\n")

# %%
try:
    host_plan = estimate_optimizer_offload(checkpoint_plan, model, shape)
    climb("+ states on the host", host_plan, apply_activation_checkpointing, offload_optimizer)
except ValueError as reason:
    print(reason)

# %% [markdown]
# The states shrink, and the loss follows that of fp32 AdamW step by step. The embedding keeps 32-bit states, as bitsandbytes advises.
#
# ### 6. Optimizer step in backward
#
# **Update each parameter the moment its gradient is complete, then free it.** Only the largest gradient is ever alive. Nothing that needs all gradients at once is possible: no accumulation, no clipping by the global norm. `accumulate_gradients` and `max_grad_norm` refuse, with the reason.

# %%
from recipes_lib.memory.optimizer_in_backward import (
    StepInBackward,
    apply_optimizer_in_backward,
    estimate_optimizer_in_backward,
)

show(StepInBackward._update)
in_backward_plan = estimate_optimizer_in_backward(checkpoint_plan, model, shape)
in_backward = partial(apply_optimizer_in_backward, fused=True)
climb("+ step in backward", in_backward_plan, apply_activation_checkpointing, in_backward)

# %% [markdown]
# The same updates, only earlier: the loss agrees.
#
# ### 7. LoRA
#
# **Freeze the model and train a low-rank correction beside each linear layer.** Gradients and states now belong to the adapters, a few per cent of the parameters. This is no longer the same optimisation problem, so its loss is its own; the proof comes later, on held-out text.

# %%
from recipes_lib.fine_tuning.lora import apply_lora, estimate_lora

lora_plan = estimate_activation_checkpointing(estimate_lora(baseline_plan, model, shape, rank=16), model, shape)
climb("+ LoRA", lora_plan, lambda model: apply_activation_checkpointing(apply_lora(model, rank=16, alpha=32)))
print(f"{lora_plan.gradients // 4:,} parameters expected, {model.num_parameters(only_trainable=True):,} trainable")

# %% [markdown]
# The large drop comes from two terms at once. What is left is mostly weights.
#
# ### 8. QLoRA
#
# **Store the frozen weights in four bits.** They are only read now, so they can be stored roughly: NF4 codes in blocks, whose scales are quantized again. Each product unpacks one layer for a moment. Embeddings stay as they are; in a model this small they are a large share.

# %%
from recipes_lib.fine_tuning.qlora import apply_qlora, check_gradient_flow, estimate_qlora


def small(model):
    return apply_activation_checkpointing(apply_qlora(model, rank=16, alpha=32))


qlora_plan = estimate_qlora(baseline_plan, fresh(), shape, rank=16)
check_gradient_flow(model := small(fresh()), batch)
climb("+ QLoRA", estimate_activation_checkpointing(qlora_plan, model, shape), small)

# %% [markdown]
# The weights shrink, and the loss starts higher by what rounding costs. Where bf16 is native, the 4-bit layers multiply in it: hence the time. `check_gradient_flow` is there for a silent trap: on CPUs with AVX512-BF16, one forward in evaluation mode repacks the 4-bit weights, and from then on no gradient reaches the lower layers. `apply_qlora` switches the repacking off, and the check refuses to train if a gradient is missing.
#
# ### 9. Dynamic batch size
#
# **On out-of-memory, halve the micro-batch and double the accumulation**, so the gradient stays that of the same effective batch. An emulated limit stands in for a smaller card; the same code catches a real CUDA error.

# %%
from recipes_lib.training.dynamic_batch import fit_micro_batches, predicted_micro_batches


def split_qlora(shape):
    plan = estimate_gradient_accumulation(budget_of(base, shape), base, shape)
    return estimate_qlora(plan, base, shape, rank=16)


def split_plan(shape):
    plan = estimate_activation_checkpointing(split_qlora(shape), base, shape)
    return plan.change(states=0)  # gradients alone are made here


base, limit = fresh(), int(0.7 * plans["+ QLoRA"].peak)
expected_k = predicted_micro_batches(split_plan, shape=shape, limit_bytes=limit)
base = None  # free it: it would count
with PeakMemory(limit_bytes=limit):
    fitted = fit_micro_batches(lambda k: accumulate_gradients(model, batch, micro_batches=k), model=model, batch_size=B)
print(f"limit {limit / 2**20:,.0f} MiB, expected {expected_k} micro-batches", *fitted.attempts, sep="\n")

# %% [markdown]
# A failed attempt leaves nothing behind; the last one adds the gradient of the whole batch.
#
# ## Everything combined
#
# QLoRA for weights, gradients and states; checkpointing for activations; accumulation for the loss; 8-bit AdamW for what is left of the states; 16-bit products where the machine has them. The step in backward stays out: it excludes accumulation, and adapters have hardly any gradients to free. On a CPU all rows then take turns, there and back.


# %%
k, mp, base = 4, mixed_precision(), fresh()
parts = Shape(batch=B, seq=S, micro_batches=k)
combined_plan = split_qlora(parts)
combined_plan = estimate_mixed_precision(combined_plan, model, parts, dtype=mp.dtype)
combined_plan = estimate_activation_checkpointing(combined_plan, model, parts)
combined_plan = estimate_eight_bit_adam(combined_plan, model, parts)
base = None


def combined_step(model, optimizer, batch=batch, mp=mp):
    loss = accumulate_gradients(model, batch, micro_batches=k, autocast=mp.autocast, backward=mp.backward)
    mp.step(optimizer)
    optimizer.zero_grad()
    return loss.item()


climb("everything combined", combined_plan, small, eight_bit_adamw, combined_step)
took = {row: [] for row in again}
for row in [*again, *reversed(again)] if here.device == "cpu" and not fast() else []:  # there and back
    took[row] += in_turns({row: again[row]()[0]}, rounds=1)[row]
    ladder.retime(row, sum(took[row]) / len(took[row]), tokens=tokens)
ladder

# %% [markdown]
# ### Does it still learn?
#
# Memory is worth nothing if the model does not get better. Plain LoRA in full precision and the combination train on the same batches of real text, from the same pretrained weights, on every machine SmolLM2's; the loss on held-out modules decides.


# %%
def learn(model, optimizer, mp, steps):
    data, curve = batches(train, batch_size=4 if fast() else 8, **feed), []
    for step in range(steps + 1):
        if step % (steps if fast() else steps // 2) == 0:
            curve.append((step, evaluate(model, held_out, pad_token_id=tokenizer.pad_token_id)))
        if step < steps:
            combined_step(model, optimizer, next(data), mp)
    return curve


curves, steps = {}, 2 if fast() else 8
model, plain = apply_lora(fresh("smollm2"), rank=16, alpha=32), mixed_precision(dtype=torch.float32)
curves["LoRA, fp32"] = learn(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plain, steps)
model = small(fresh("smollm2"))
curves["everything combined"] = learn(model, eight_bit_adamw(model, lr=1e-3), mp, steps)
ladder.note(held_out_loss=curves, naive_error=naive_error, micro_batches=[expected_k, fitted.micro_batches])
for which, curve in curves.items():
    print(f"{which:<20}", "   ".join(f"step {step}: {loss:.2f}" for step, loss in curve))
loss_chart(curves)

# %% [markdown]
# Before training the two differ by what four bits per weight cost this model. Training the adapters repairs most of it.
#
# ## The picture
#
# First which term each recipe removes at the peak, by arithmetic. Then what was measured.

# %%
budget_chart(plans)

# %%
ladder.chart()

# %% [markdown]
# Ticks are predictions. In Part A the first three recipes attack the same terms and end near the same floor; with long sequences yellow and green grow, and they part. Part B lowers the floor.
#
# The same notebook on a GPU:
#
# <!-- numbers:gpu-01 -->
# <!-- end -->
#
# ## Out-of-memory doctor
#
# The same equation as a decision: given a model, a card and the text of an error, what to try first? Here memory was reserved but in pieces, which is a setting; the rest is arithmetic. The model is only a shape and costs nothing. `python -m recipes_lib doctor` does the same in a terminal.

# %%
from recipes_lib.workflows.out_of_memory_doctor import diagnose

large = model_of_shape("llama-3.1-8b", dtype=torch.bfloat16, device="meta")
error = """CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 24.00 GiB of which 512.00 MiB is
free. Of the allocated memory 20.10 GiB is allocated by PyTorch, and 2.40 GiB is reserved by PyTorch but unallocated."""
diagnose(error=error, model=large, batch_size=4, seq_len=2048, memory_bytes=24 * 2**30)

# %% [markdown]
# ## What it costs, and when not to use it
#
# | recipe | price | not when |
# |---|---|---|
# | gradient accumulation | gradients stay alive; small products are slower | the batch fits |
# | checkpointing | about one more forward pass | activations are not the largest term |
# | offloading | traffic over a link or to a disk | checkpointing is enough: it is simpler |
# | mixed precision | a copy of the weights; slower without native support | a CPU without bf16: see notebook 05 |
# | 8-bit AdamW | slightly different updates; slow on a CPU | with LoRA, whose states are small |
# | step in backward | no accumulation, no clipping | you need either |
# | LoRA | a low-rank update only | teaching much new knowledge |
# | QLoRA | unpacking in each product; rounded weights | the 16-bit weights fit |
#
# **Where next.** Each file names its production switch under *In production*: `gradient_accumulation_steps`, `gradient_checkpointing`, `bf16` and `optim` in `TrainingArguments`, `LoraConfig` in peft, `BitsAndBytesConfig` in transformers. The [cheatsheet](../CHEATSHEET.md) puts them side by side, with the traps.
#
# ## Exercises
#
# 1. Predict, then measure: double `S`. Which rows change, and by what factor? Which do not?
# 2. Checkpoint every second block (`every=2`). Does the estimate follow? When would you choose it?
# 3. Add step in backward to the LoRA row. Use the equation to explain why almost nothing happens.
#
# ## References
#
# - Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016: checkpointing
# - Micikevicius et al., *Mixed Precision Training*, 2018
# - Rajbhandari et al., *ZeRO*, 2020: where the bytes of a training step go
# - Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, 2022, and *QLoRA*, 2023
# - Hu et al., *LoRA*, 2021
#
# The last cell checks that the story above is true on this machine: orderings and signs, never absolute speed.

# %%
errors = [abs(row.prediction_error) for row in ladder.rows]
assert max(errors) < 0.15 and sum(errors) / len(errors) < 0.08, "the predictions hold"
for row in ("gradient accumulation", "activation checkpointing", "activation offloading", "+ step in backward"):
    same = 1e-3 if here.device == "cpu" else 2e-2  # a GPU adds up in another order each time
    assert abs(ladder[row].loss - ladder["baseline"].loss) < same, f"{row} keeps the maths"
assert exact_error < 1e-4 < 0.01 < naive_error, "token-weighted accumulation is exact, the popular one is not"
falling = ["baseline", "activation checkpointing", "+ 8-bit AdamW", "+ LoRA", "+ QLoRA", "everything combined"]
assert [ladder[row].peak_bytes for row in falling] == sorted((ladder[row].peak_bytes for row in falling), reverse=True)
assert 1 < expected_k <= fitted.micro_batches <= 2 * expected_k, "the search finds what the arithmetic says"
assert ladder.saved("everything combined") > (0.7 if fast() else 0.85)
(lora_start, lora_end), (start, end) = [(curve[0][1], curve[-1][1]) for curve in curves.values()]
assert start - end > 0.95 * (lora_start - lora_end) > 0, "it learns as much as plain LoRA"
assert end < (1.1 if fast() else 1.05) * lora_end, "and ends about where plain LoRA does"
print(f"all checks passed: {ladder.saved('everything combined'):.0%} less peak memory")
