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
# # The model has to run on a device
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your-username/llm-training-recipes/blob/main/notebooks/06_training_for_edge_devices.ipynb)
#
# <!-- numbers:headline-06 -->
# > **1.5 → 0.43 MB:** the file of a classifier of handwritten digits, from teacher to pruned, 8 bits, ExecuTorch, with 97.7% and 97.7% right. It answers 92.9× (79.0–143) as fast. For files above 1 MB, the arithmetic of their weights is off by 9.9% at most: a graph comes on top.
# >
# > Measured on AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-23.
# <!-- end -->
#
# A phone, a board or a browser has little memory, little time and no Python. A model gets there along a chain: a *teacher* teaches a smaller student, parts that do little are removed, the rest learns to live with few bits, and an *export* writes one file that a small C++ program runs. This notebook walks the whole chain twice, with a classifier of images and with a language model. After every link it measures three numbers: how good, how large, how fast. And it runs the files, in the same runtime that a phone uses.
#
# | | |
# |---|---|
# | **You will learn** | what each link of the chain saves and costs, how to see that an export is fast before it is on the device, and which links your budget needs |
# | **You need** | nothing: no GPU, no login, no device |
# | **Time** | about nine minutes on two CPU cores |
# | **Cost** | free on a laptop or on Colab |

# %% [markdown]
# ## The map
#
# | | recipe | what it changes | file |
# |---|---|---|---|
# | 1 | efficient bases | fewer multiplications for the same picture | [mobile_net.py](../recipes_lib/architecture/mobile_net.py) |
# | 2 | distillation | a small model learns from a large one | [distillation.py](../recipes_lib/compression/distillation.py) |
# | 3 | pruning | removes what does little | [pruning.py](../recipes_lib/compression/pruning.py), [channel_pruning.py](../recipes_lib/compression/channel_pruning.py) |
# | 4 | quantization-aware training | few bits that the model has learned to live with | [quantization_aware.py](../recipes_lib/precision/quantization_aware.py) |
# | 5 | export | one file, without Python | [export.py](../recipes_lib/edge/export.py), [onnx_export.py](../recipes_lib/edge/onnx_export.py) |
# | 6 | deep and thin | the shape of a small language model | [deep_thin.py](../recipes_lib/architecture/deep_thin.py) |
# | 7 | export of a language model | with its cache, token by token | [language_model.py](../recipes_lib/edge/language_model.py), [gguf_export.py](../recipes_lib/edge/gguf_export.py) |
# | 8 | size budget | which links are needed at all | [size_budget.py](../recipes_lib/edge/size_budget.py) |
#
# Each file is short, and its first lines explain the recipe.
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
    pip_install = [sys.executable, "-m", "pip", "install", "-q", "-e"]
    subprocess.run([*pip_install, f"{code}[notebooks,edge]"], check=True)
    sys.path.insert(0, str(code))

# %%
import copy
from functools import partial

import torch
from torch.nn import functional as F

from recipes_lib.core.machine import choose_sizes, machine, runs_dir, seed_everything

print(machine())
# A device has few cores, and exports take the second one: everything here has one thread.
torch.set_num_threads(1)
files = runs_dir() / "edge"  # what is copied to the device
files.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# All sizes stand in one cell. A device is a CPU for most of this notebook, so a machine with a GPU has the same sizes as one without.

# %%
full = dict(
    train=3000,  # images to learn from
    test=2000,  # images that are only looked at to measure
    few=1000,  # what a student has where images are short
    teacher_epochs=10,
    student_epochs=10,
    few_epochs=12,
    healing_epochs=4,
    aware_epochs=2,
    layers=6,  # blocks of the language model that is exported here
    ways=("32 bits", "4 bits, plain attention", "4 bits"),
    text_windows=8,  # of 256 tokens, to measure perplexity
    new_tokens=48,
    rounds=5,
)
brief = full | dict(
    train=600,
    test=300,
    few=300,
    teacher_epochs=1,
    student_epochs=1,
    few_epochs=1,
    healing_epochs=1,
    aware_epochs=1,
    layers=2,
    ways=("32 bits", "4 bits"),
    text_windows=2,
    new_tokens=12,
    rounds=2,
)
sizes = choose_sizes(cpu=full, gpu16=full, gpu24=full, gpu80=full, fast=brief)
sizes

# %% [markdown]
# The language model takes minutes to export. So its exports start now, one after the other on the second core, and their files wait until part B needs them. What the libraries print goes into a log beside each file.

# %%
from recipes_lib.compression.student import make_student
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.edge.export_process import in_background
from recipes_lib.edge.language_model import export_language_model

seed_everything(0)
language_model = load_model(device="cpu").eval()
tokenizer = load_tokenizer()
# Its first blocks alone: an export takes about 15 seconds for each block.
few_blocks = make_student(language_model, blocks=range(sizes.layers))
options_of = {
    "32 bits": dict(weight_bits=None),
    "4 bits, plain attention": dict(custom_attention=False),
    "4 bits": dict(),
}
exports = {}
job = None
for way in sizes.ways:
    job = in_background(
        export_language_model,
        path=files / f"language-{way.replace(', ', '-').replace(' ', '-')}.pte",
        after=job,  # one at a time: the other core is for the next cells
        model=few_blocks,
        **options_of[way],
    )
    exports[way] = job

# %% [markdown]
# ## What runs out: three numbers
#
# A device gives a model three numbers: bytes in its flash memory, bytes in its working memory, and milliseconds until the answer is there.
#
# $$\\text{file} = \\text{weights} \\times \\frac{\\text{bits}}{8} + 4 \\times \\text{scales} + \\text{graph} \\qquad \\text{time} = \\text{overhead} + \\frac{\\text{work}}{\\text{speed}}$$
#
# For an image, work is the number of multiplications (each goes with an addition: *multiply-adds*). For a token of a language model, work is the bytes of the weights that are read. The graph is some hundred kilobytes. The links of the chain change one factor each: a better architecture and pruning have fewer weights and less work, quantization has fewer bits, and the runtime has less overhead and more speed. What no equation says is the quality. It has to be measured, on data that nothing was trained or calibrated on.
#
# ## Part A: a classifier of images
#
# The images are real: 5,000 handwritten digits of MNIST, which a package of PyPI carries. Each has 28 x 28 pixels and a border around it.

# %%
from recipes_lib.core.images import handwritten_digits
from recipes_lib.report.image_grid import image_grid

train, test = handwritten_digits(train=sizes.train, test=sizes.test)
print(f"{len(train):,} images to learn from, {len(test):,} to measure with")
image_grid(test.first(24), title="What the device has to read")

# %% [markdown]
# ### Baseline: the teacher
#
# The teacher is an EfficientNet, a network that is made for accuracy per multiplication. It comes from transformers with first weights of ours: those that transformers gives it make all answers equal. It trains on all images. Its file is what PyTorch saves.

# %%
from recipes_lib.architecture.efficient_net import efficient_net
from recipes_lib.core.classify import accuracy, multiply_adds, train_classifier
from recipes_lib.report.edge_ladder import EdgeLadder

ladder = EdgeLadder("06_training_for_edge_devices")
image = test.images[:1]  # a device sees one image at a time: [1, 1, 32, 32]


def saved(model, name):
    """The path of a file with the weights of a model."""
    path = files / f"{name}.pt"
    torch.save(model.state_dict(), path)
    return path


def answer(model, image):
    """One forward without gradients, as a device does it."""
    with torch.no_grad():
        return model(image)


def climb_in_pytorch(name, model):
    """A row of the ladder: a classifier that runs in PyTorch."""
    weights = sum(tensor.numel() for tensor in model.state_dict().values())
    ladder.climb(
        name,
        partial(answer, model, image),
        file=saved(model, name),
        accuracy=accuracy(model, test),
        predicted_bytes=4 * weights,  # 32 bits each
        group="digits",
    )
    print(f"  {multiply_adds(model, image) / 1e6:.2f} million multiply-adds")


teacher = efficient_net(width=0.35, depth=0.5, seed=0)
train_classifier(teacher, train, epochs=sizes.teacher_epochs, learning_rate=0.1)
climb_in_pytorch("teacher", teacher)

# %% [markdown]
# ### 1. Efficient bases
#
# **What is going on?** A usual convolution does two things at once: it looks at the neighbours of a pixel, and it mixes channels. MobileNet does one after the other. A *depthwise* convolution looks at neighbours, in each channel alone. A 1 x 1 convolution mixes channels, in each pixel alone.
#
# ```text
# usual          K filters, each over all C channels:       K · C · 9   products per pixel
# depthwise      C filters, each over its own channel:          C · 9
# then 1 x 1     K sums over C channels:                        K · C
# ```
#
# MobileNetV2 packs this into a block that is wide inside and narrow outside.
#
# **Guess first.** With C = K = 64, how many times fewer products are that?
#
# **The idea.** Both steps in plain lines, compared with PyTorch's convolutions:

# %%
from recipes_lib.architecture.mobile_net import (
    mobile_net,
    plain_depthwise_separable,
    predicted_multiply_adds,
    predicted_parameters,
)
from recipes_lib.report.show import show

show(plain_depthwise_separable)
x = torch.randn(2, 64, 8, 8)
filters = torch.randn(64, 3, 3)
mixing = torch.randn(64, 64)
by_hand = plain_depthwise_separable(x, filters, mixing)
places = F.conv2d(x, filters[:, None], padding=1, groups=64)
library = F.conv2d(places, mixing[:, :, None, None])
assert torch.allclose(by_hand, library, atol=1e-3)

usual = 64 * 64 * 9
separable = 64 * 9 + 64 * 64
print(
    f"{usual:,} or {separable:,} products per pixel: {usual / separable:.1f} times fewer"
)

# %%
for width in (0.35, 0.5, 1.0):
    network = mobile_net(width=width)
    predicted = predicted_multiply_adds(network, image_size=32)
    counted = multiply_adds(network, image)
    print(
        f"width {width}: {predicted_parameters(network):9,} parameters, {predicted:10,} "
        f"multiply-adds predicted, {counted:10,} counted"
    )

# %% [markdown]
# Both numbers grow with the square of the width, nearly. That is how a network is fitted to a device: by one number.
#
# **Why not more?** The time falls less than the multiply-adds. A depthwise filter does nine products for each number that it reads, so it waits for memory. And each layer is a call of its own.
#
# **How do I use it?** `MobileNetV2ForImageClassification.from_pretrained("google/mobilenet_v2_0.35_96")`, or timm's `mobilenetv4_conv_small`: both begin with weights that are trained already.
#
# **What does it cost?** Accuracy, which the next recipe wins back in part.
#
# ### 2. Distillation
#
# **What is going on?** A label says "this is a 7". A trained teacher says "a 7, a little like a 1, and not at all like an 8". That is more to learn from per image, and most for a student with few images. The teacher's logits are divided by a *temperature*, so that the small probabilities count.
#
# **Guess first.** A small student has a third of the images. How many more of the test images does it read if its teacher helps?
#
# **The idea.** The same loss as for language models in [notebook 03](../notebooks/03_optimizing_inference_speed.ipynb):

# %%
from recipes_lib.compression.distillation import plain_distillation_loss

show(plain_distillation_loss)


def taught(teacher):
    """A loss that asks the teacher about the same images."""

    def loss(logits, images, labels):
        with torch.no_grad():
            teacher_logits = teacher(images).logits
        return plain_distillation_loss(
            logits, teacher_logits, labels, temperature=4.0, teacher_share=0.9
        )

    return loss


few_images = train.first(sizes.few)
small = {}
for name, loss in {"labels": None, "teacher": taught(teacher)}.items():
    network = mobile_net(width=0.25, seed=1)
    train_classifier(
        network, few_images, epochs=sizes.few_epochs, learning_rate=0.1, loss=loss
    )
    small[name] = accuracy(network, test)
    print(f"{len(few_images):,} images, {name:<8} {small[name]:.1%} right")

# %% [markdown]
# The student of the chain is wider, and sees all images:

# %%
student = mobile_net(width=0.5, seed=1)
train_classifier(
    student,
    train,
    epochs=sizes.student_epochs,
    learning_rate=0.1,
    loss=taught(teacher),
)
climb_in_pytorch("student", student)

# %% [markdown]
# **Why not more?** With all images the labels say nearly as much as the teacher. And the teacher has seen all of them, so what it passes on to the small student is also what the student has not seen. One run of each says little about the size of the gain.
#
# Look at the two rows. The student has far fewer multiply-adds than its teacher, and takes about as long. PyTorch starts some two hundred operators for one image, and that is what takes the time. Section 5 comes back to it.
#
# **How do I use it?** Any loop with a second forward. For language models `apply_distillation(student, teacher)` does it in chunks; TRL has `GKDTrainer`.
#
# **What does it cost?** A forward of the teacher in each step. Its answers can be kept, if the images do not change from epoch to epoch.

# %% [markdown]
# ### 3. Pruning
#
# **What is going on?** Some of a trained network does little. Two kinds of parts can go: single weights, or whole channels.
#
# ```text
# magnitude    W = [ 0.3  0.0  0.0 -0.7 ]     the small weights become zero, the matrix stays
# channels     W = [ 0.3 -0.7 ]               columns go, the matrix is smaller
# ```
#
# **Guess first.** Half of the weights become zero. How much smaller is the file, and how much faster is an image?
#
# **The idea.** Order the weights by magnitude, and let the smaller half be zero in every forward:

# %%
from recipes_lib.compression.pruning import (
    apply_pruning,
    compressed_bytes,
    plain_mask,
    predicted_compressed_share,
    remove_pruning,
    zero_share,
)

show(plain_mask)
for share in (0.5, 0.8):
    pruned = apply_pruning(copy.deepcopy(student), share=share, scope="layer")
    at_once = accuracy(pruned, test)
    train_classifier(pruned, train, epochs=2, learning_rate=0.02)
    remove_pruning(pruned)  # the masks go, the zeros stay
    zipped = compressed_bytes(pruned) / compressed_bytes(student)
    print(
        f"{zero_share(pruned):.0%} zeros: {at_once:.1%} right at once, "
        f"{accuracy(pruned, test):.1%} after two more epochs\n"
        f"  file {saved(pruned, 'zeros').stat().st_size:,} bytes, zipped {zipped:.0%} of "
        f"before (predicted at best {predicted_compressed_share(share=share):.0%})"
    )
climb_in_pytorch("zeros 0.8", pruned)

# %% [markdown]
# The same file, and the same time: a zero takes four bytes like any other number, and dense kernels multiply it like any other number. Only a compressed file is smaller. That is the answer to a question that users have asked for years: "pruned, same size, same speed, why?" On NVIDIA's tensor cores there is one pattern that kernels can skip, two zeros in every four (`apply_two_four`). CPUs and phones have nothing of the kind.
#
# Now whole channels. Inside of a block nobody else reads them, so they can really go. Which ones do least? The output changes by what a channel holds, times the column of weights that reads it:

# %%
from recipes_lib.compression.channel_pruning import (
    apply_channel_pruning,
    channel_importance,
    choose_channels,
    plain_importance,
)

show(plain_importance)
importance = channel_importance(student, train.images[:250])
kept = choose_channels(importance, share=0.5)

pruned = apply_channel_pruning(copy.deepcopy(student), kept=kept)
same_from_the_start = copy.deepcopy(pruned)  # the shapes; new weights below
share_of_work = multiply_adds(pruned, image) / multiply_adds(student, image)
print(
    f"{share_of_work:.0%} of the multiply-adds are left, {accuracy(pruned, test):.1%} right at once"
)

# %%
from recipes_lib.architecture.mobile_net import initialise_

from recipes_lib.workflows.on_device.pruning_library import pruned_by_torch_pruning

by_library = pruned_by_torch_pruning(copy.deepcopy(student), image, kept=kept)
heal = dict(epochs=sizes.healing_epochs, learning_rate=0.05)
for network in (pruned, by_library):
    train_classifier(network, train, **heal)
print(f"healed: ours {accuracy(pruned, test):.1%}, ", end="")
print(f"torch-pruning {accuracy(by_library, test):.1%} right")
# The same small network from the start: as long as the healing, and as long as all training.
for epochs in (sizes.healing_epochs, sizes.student_epochs + sizes.healing_epochs):
    seed_everything(2)
    initialise_(same_from_the_start)
    train_classifier(same_from_the_start, train, epochs=epochs, learning_rate=0.1)
    print(f"from the start, {epochs} epochs: ", end="")
    print(f"{accuracy(same_from_the_start, test):.1%} right")
climb_in_pytorch("pruned, healed", pruned)
climb_in_pytorch("as small, from the start", same_from_the_start)

# %% [markdown]
# After as many epochs as the healing had, the fresh network is far behind: the pruned weights are a good place to begin. After as many epochs as all training together, compare the two rows: the fresh network catches up, and may pass. Liu et al. found the same for larger networks (*Rethinking the Value of Network Pruning*). So pruning saves training where a trained model is there already. It is no way to a better small model, if you have all the data. And one run of each decides no difference of half a per cent.
#
# **Why not more?** Each further channel does more than the one before, so accuracy falls faster and faster.
#
# **How do I use it?** For any network of images torch-pruning traces what depends on what. For language models [student.py](../recipes_lib/compression/student.py) takes blocks, heads and MLP channels.
#
# **What does it cost?** Training after it. Without that the network is useless, as the line above shows.

# %% [markdown]
# ### 4. Quantization-aware training
#
# **What is going on?** With b bits a weight has one of 2^b levels. Rounding *after* training (PTQ) takes the nearest level of each weight. Quantization-aware training (QAT) rounds in every forward, so that the other weights learn to make up for it. Rounding has no useful gradient: it is zero nearly everywhere. So backward goes *straight through*, as if nothing had been rounded.
#
# ```text
# forward    y = x · round(W / s) · s            what the device will compute
# backward   dW = as if W had not been rounded
# step       W - lr · dW                         W stays in full precision
# ```
#
# **Guess first.** At which number of bits does rounding begin to hurt: 8, 4 or 3?
#
# **The idea**, in plain lines, beside the real one:

# %%
from recipes_lib.core.integer_grid import to_grid
from recipes_lib.precision.quantization_aware import (
    apply_quantization_aware,
    apply_rounding,
    convert_quantization_aware,
    plain_fake_quantize,
)

show(plain_fake_quantize)
weight = torch.randn(8, 64, requires_grad=True)
by_hand = plain_fake_quantize(weight, bits=4, group=64)
assert torch.allclose(by_hand, to_grid(weight, bits=4, group=64).weight())
by_hand.sum().backward()
print(
    f"16 levels, and {(weight.grad != 0).float().mean():.0%} of the gradients are not zero"
)

# %%
bits_of = {8: {}, 4: {}, 3: {}}
images_to_calibrate = train.images[:250]
for bits, found in bits_of.items():
    options = dict(weight_bits=bits, calibration=images_to_calibrate)
    rounded = apply_rounding(copy.deepcopy(student), **options)
    found["after training"] = accuracy(rounded, test)
    if bits < 8:
        aware = apply_quantization_aware(copy.deepcopy(student), **options)
        train_classifier(
            aware,
            train,
            epochs=sizes.aware_epochs,
            learning_rate=0.03,
            loss=taught(teacher),
        )
        convert_quantization_aware(aware)
        found["aware"] = accuracy(aware, test)
    line = ", ".join(f"{name} {share:.1%}" for name, share in found.items())
    print(f"{bits} bits: {line}")

# %% [markdown]
# With 8 bits there is no gap, so there is nothing to win back: do not train for it. With fewer bits there is one, and a few epochs win most of it back.
#
# **Why not more?** The levels of a whole filter share one scale. A filter with one large weight has few levels left for the others.
#
# **How do I use it?** torchao's `prepare_qat_pt2e` and ExecuTorch's `XNNPACKQuantizer` for graphs; `QATConfig` for linear layers. Kernels of phones take 8 bits for convolutions, and 4 bits for linear layers.
#
# **What does it cost?** Training, in which every weight is rounded in every step.
#
# ### 5. Export
#
# **What is going on?** The device has no Python. `torch.export` runs the model once and writes down every operator: a graph. A *backend* with fast kernels for the device (XNNPACK for the CPUs of phones) takes over the parts of the graph that it knows. What it does not know stays outside, on *portable* kernels: plain loops.
#
# ```text
# model -> graph -> [ XNNPACK: convolution, clamp, add, … ] mean [ linear ] -> model.pte
#                     inside: fast                         outside: slow
# ```
#
# **Guess first.** In PyTorch the student was about as slow as its teacher. How many times as fast is it without PyTorch?
#
# **The idea.** A program is a list of operators. Record it, and run the list without the model:

# %%
from recipes_lib.edge.export import PlainRecorder, export_to_executorch, plain_replay
from recipes_lib.edge.runtime import load_pte, measured_peak_bytes
from recipes_lib.report.delegation_chart import delegation_chart

show(PlainRecorder)
show(plain_replay)
with torch.no_grad(), PlainRecorder() as recorder:
    recorded = student(image).logits
other = test.images[1:2]
replayed = plain_replay(recorder.program, (image, recorded), other)
assert torch.equal(replayed, answer(student, other).logits)
print(f"{len(recorder.program)} operators, and the list alone gives the same answer")

# %%
portable = export_to_executorch(
    student, (image,), path=files / "portable.pte", delegate=False
)
student_file = export_to_executorch(student, (image,), path=files / "student.pte")
delegation_chart(
    {"portable kernels": portable.delegation, "XNNPACK": student_file.delegation},
    title="What the fast kernels take over",
)


# %%
def climb_in_executorch(name, exported, predicted_bytes):
    """A row of the ladder: a .pte in the runtime of devices."""
    program = load_pte(exported.path)
    ladder.climb(
        name,
        partial(program, image),
        file=exported.path,
        accuracy=accuracy(program, test, batch_size=1),
        predicted_bytes=predicted_bytes,
        load_seconds=program.load_seconds,
        peak_bytes=measured_peak_bytes(exported.path),
        group="digits",
    )
    return program


def weights_of(model):
    """How many numbers the parameters of a model are."""
    return sum(parameter.numel() for parameter in model.parameters())


exported_teacher = export_to_executorch(teacher, (image,), path=files / "teacher.pte")
four_each = 4 * weights_of(teacher)
climb_in_executorch("teacher, ExecuTorch", exported_teacher, four_each)
four_each = 4 * weights_of(student)
climb_in_executorch("student, portable kernels", portable, four_each)
program = climb_in_executorch("student, ExecuTorch", student_file, four_each)
difference = (program(image) - answer(student, image).logits).abs().max()
assert difference < 1e-3
print(f"  logits differ from PyTorch's by {difference:.0e}")

# %% [markdown]
# The answer is the same, and the three rows of one student are far apart in time. And in the runtime of devices the student is faster than its teacher, as its multiply-adds say. PyTorch spends most of its time between the operators. The portable kernels spend it inside of them. So check before you copy a file to a device: `export_to_executorch` raises an error if a convolution or a pooling stays outside. The pooling of transformers' EfficientNet is such an operator: it asks for a window of 1,280 pixels, which no backend takes. `efficient_net` replaces it by one that computes the same.
#
# Now the combined chain: the pruned student in 8 bits. The kernels need whole numbers, so the graph is quantized (*PT2E*: a PyTorch 2 export), with some images to calibrate the ranges of the activations. ONNX Runtime is another program for the same purpose, with other kernels:

# %%
from recipes_lib.edge.onnx_export import export_to_onnx, load_onnx, quantize_onnx
from recipes_lib.edge.pt2e import quantize_pt2e

quantized = quantize_pt2e(pruned, images_to_calibrate)
in_eight = export_to_executorch(quantized, (image,), path=files / "chain.pte")
one_each = weights_of(pruned)
chain = climb_in_executorch("pruned, 8 bits, ExecuTorch", in_eight, one_each)

# %%
in_onnx = {}
onnx_file = export_to_onnx(student, (image,), path=files / "student.onnx")
in_onnx["student, ONNX Runtime"] = onnx_file
in_onnx["student, 8 bits, ONNX Runtime"] = quantize_onnx(
    onnx_file.path, calibration=images_to_calibrate, to=files / "student-8.onnx"
)
for name, exported_onnx in in_onnx.items():
    session = load_onnx(exported_onnx.path)
    ladder.climb(
        name,
        partial(session, image),
        file=exported_onnx.path,
        accuracy=accuracy(session, test, batch_size=1),
        group="digits",
    )

# %%
ladder.take_turns(rounds=sizes.rounds)
ladder

# %%
from recipes_lib.report.runtime_chart import Runtime, runtime_chart

in_chart = [
    row for row in ladder.rows if "ExecuTorch" in row.name or "ONNX" in row.name
]
runtime_chart(
    [Runtime(row.name, row.seconds, row.file_bytes) for row in in_chart],
    title="The same student in two programs, and its teacher",
)

# %%
ladder.chart("digits", title="Size against wrong answers: all variants")

# %% [markdown]
# **Why not more?** With 8 bits the files are smaller, but on this processor and with images this small they are not faster: compare the two rows of ONNX Runtime. The pruned student takes half of the time because half of its work is gone. An image takes so little time that starting each layer counts. With larger images and on other processors 8 bits may save time as well: measure on the device.
#
# **How do I use it?** From Kotlin and Swift, [the page for devices](../launch/edge.md) has the commands. And from C++, in thirty lines that are built with the headers of the wheel:

# %%
from recipes_lib.edge.cpp_runner import build_runner, run_in_cpp

runner = build_runner(files / "runner")
in_cpp = run_in_cpp(runner, files / "chain.pte", image, calls=100)
from_python = chain(image).flatten()
assert torch.allclose(in_cpp.output, from_python, atol=1e-4)
print(
    f"a program of {runner.stat().st_size / 1e3:.0f} kB gives the same answer ", end=""
)
print(f"in {in_cpp.seconds_per_call * 1e3:.3f} ms")

# %% [markdown]
# That is the mean of the first hundred calls of a new process, so its first calls are in it.
#
# **What does it cost?** Seconds for each export, and a fixed shape: one image of this size.

# %% [markdown]
# ## Part B: a language model
#
# SmolLM2-135M has 30 blocks. Here its first few blocks are exported and timed, because an export of all 30 takes too long for a notebook. They are in the recorded run below. A model that has lost most of its blocks writes nonsense, so the ladder of this part is about size, time and exactness. In place of a quality it says how often the likeliest next token is the same as in PyTorch.
#
# ### 6. Deep and thin
#
# **What is going on?** A language model for a device has few weights. They can be spent on few wide blocks, or on many narrow ones. Large models are wide. For small ones MobileLLM found that depth is worth more, at 125 million weights.
#
# **Guess first.** SmolLM2-135M has 30 blocks of width 576. How wide are 12 blocks with as many weights?
#
# **The idea.** The weights of a block grow with the square of its width:

# %%
from recipes_lib.architecture.deep_thin import (
    choose_proportions,
    plain_block_weights,
    predicted_weights,
)

show(plain_block_weights)
vocabulary = language_model.config.vocab_size
weights = language_model.num_parameters()
for layers in (6, 12, 30, 48):
    shape = choose_proportions(weights=weights, layers=layers, vocabulary=vocabulary)
    total = predicted_weights(shape, vocabulary=vocabulary)
    print(
        f"{layers:2} blocks of width {shape.hidden_size:4}: {total / 1e6:.1f} million weights"
    )

# %% [markdown]
# <!-- numbers:depths-06 -->
# The recorded comparison trains each depth for 600 steps:
#
# | blocks × width | weights | held-out loss | difference | verdict | time |
# |---|--:|--:|--:|--:|--:|
# | 2 × 128 | 422,528 | 1.919 |  |  | 1.0× |
# | 4 × 96 | 418,656 | 1.946 | +0.026 (+0.005 to +0.045) | worse | 1.3× |
# | 8 × 64 | 418,880 | 2.058 | +0.139 (+0.109 to +0.186) | worse | 2.0× |
# | 16 × 48 | 425,520 | 2.163 | +0.244 (+0.190 to +0.311) | worse | 3.5× |
# | 32 × 32 | 411,680 | 2.334 | +0.414 (+0.400 to +0.437) | worse | 6.5× |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-23. 3 seeds, 600 steps of 8 × 64 bytes. Held-out loss: the mean over the seeds, in nats per byte. The difference is to the first line with the same seed; in brackets are the smallest and the largest. It decides only if all seeds agree. Time: one token in eager mode on one thread, to that of the first line.*
# <!-- end -->
#
# The recorded comparison says the opposite of MobileLLM: with more depth the loss is higher, for every seed. These models are 300 times smaller, and they have read few bytes. So this shows only that depth is no rule for all sizes. MobileLLM's finding is for 125 million weights and far more tokens; we have not repeated it.
#
# **Why not more?** Each block is a step that waits for the one before it, and in eager mode each step costs calls. So in eager mode a token takes longer, the more blocks there are. In an exported file the bytes count more.
#
# **How do I use it?** `num_hidden_layers=30, hidden_size=576, tie_word_embeddings=True` in a `LlamaConfig`, as SmolLM2 has it; `deep_thin_model` finds the widths for any depth. Notebook 03 has the recipes for one table and for few heads of keys and values.
#
# **What does it cost?** A training from the start.
#
# ### 4 again: four bits that the model has learned to live with
#
# **What is going on?** Kernels of phones multiply weights of four bits, in groups of 64 that share a scale, with activations of eight bits. Rounded after training, SmolLM2 loses much. (Its embedded file was stored in four bits already, but on another grid, with groups of 32 and an offset each. To round to *that* grid again costs nothing and says nothing.)
#
# **Guess first.** How much worse is the perplexity with four bits everywhere: 5 %, 50 %, or twice as much? And with eight bits in the output layer alone?

# %%
from recipes_lib.core.data import load_text
from recipes_lib.core.evaluation import evaluate, text_windows

windows = text_windows(
    tokenizer, text=load_text(split="validation"), windows=sizes.text_windows
)


def perplexity_of(model):
    """exp of the mean loss on text that nobody has trained on."""
    loss = evaluate(model, windows, pad_token_id=tokenizer.pad_token_id)
    return float(torch.tensor(loss).exp())


exact = perplexity_of(language_model)
print(f"{'full precision':<38}{exact:6.2f}")
formats = {
    "8 bits": dict(weight_bits=8, group=None),
    "4 bits everywhere": dict(weight_bits=4, group=64, output_bits=4),
    "4 bits, output layer in 8": dict(weight_bits=4, group=64, output_bits=8),
}
perplexities = {}
for name, options in formats.items():
    rounded = apply_rounding(copy.deepcopy(language_model), **options)
    perplexities[name] = perplexity_of(rounded)
    print(f"{name:<38}{perplexities[name]:6.2f}  {perplexities[name] / exact:.2f}×")
del rounded

# %% [markdown]
# <!-- numbers:grids-06 -->
# Rounding takes the perplexity of the untrained model from 11.03 to 16.77, 1.52×. After 30 steps with the rounding it is 10.70; after as many without it, 13.33. The difference is 63 % of what rounding costs the model that trained without it.
#
# | training | full precision | rounded | won back | of the control |
# |---|--:|--:|--:|--:|
# | not at all | 11.03 | 16.77 |  |  |
# | in full precision, rounded at the end | 9.15 | 13.33 | 60 % |  |
# | with the rounding | 10.12 | 10.70 | 106 % | 63 % |
# | with the rounding, and a teacher | 10.59 | 10.57 | 108 % | 66 % |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-23. 30 steps of 4 × 256 tokens, one seed. Perplexity of 8 held-out rows; weights in 4 bits and groups of 64, output layer, embedding and activations in 8 bits. Won back: the part of what rounding costs that is saved. Of the untrained model it counts what the text has taught as well; the fair number is that of the model that trained as long in full precision. In brackets are the smallest and the largest of the seeds.*
# <!-- end -->
#
# ### 7. Export of a language model
#
# **What is going on?** A token of a language model needs the keys and values of all tokens before it. So the file holds a cache, and two operators that are made for it: one writes a token into the cache in place, the other attends only to what is there. The weights are quantized before the export, on the grid of training.
#
# **Guess first.** `generate` writes a number of tokens per second. How much of the gain of an exported 4-bit file comes from the four bits?
#
# **The idea.** Two things have to be right, and nothing fails if they are not. Rotary positions turn pairs of numbers. Hugging Face takes number i and number i + D/2, and ExecuTorch takes neighbours, so rows of the weights change places:

# %%
from recipes_lib.edge.language_model import (
    load_language_model,
    plain_greedy,
    plain_pairs,
)

show(plain_pairs)
show(plain_greedy)
language_files = {way: job.result(timeout=900) for way, job in exports.items()}
for way, exported in language_files.items():
    print(
        f"{way:<24}{exported.bytes / 1e6:6.1f} MB, exported in {exported.seconds:.0f} s"
    )
delegation_chart(
    {way: exported.delegation for way, exported in language_files.items()},
    most=9,
    title="Every linear layer of the language model is delegated",
)

# %%
from recipes_lib.edge.language_model import predicted_bytes

few_blocks.eval()
prompt = tokenizer("def read_lines(path):", return_tensors="pt")["input_ids"]
text = windows[0]["input_ids"]  # 256 tokens


def generate(model):
    """What transformers writes after the prompt, greedily."""
    written = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=sizes.new_tokens,
        min_new_tokens=sizes.new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return written[0, prompt.shape[1] :].tolist()


def same_tokens(program):
    """How often the likeliest next token of a text is that of PyTorch."""
    likeliest = answer(few_blocks, torch.tensor([text])).logits[0].argmax(-1).tolist()
    same = 0
    for position, token in enumerate(text):
        same += int(program.step(token, position).argmax()) == likeliest[position]
    return same / len(text)


ladder.climb(
    f"generate, {sizes.layers} blocks",
    partial(generate, few_blocks),
    file=saved(few_blocks, "few-blocks"),
    agreement=1.0,
    units=sizes.new_tokens,
    group="language",
)
programs = {}
for way, exported in language_files.items():
    programs[way] = load_language_model(exported.path)
    bits = None if way == "32 bits" else 4
    ladder.climb(
        way,
        partial(programs[way].greedy, prompt, sizes.new_tokens),
        file=exported.path,
        agreement=same_tokens(programs[way]),
        predicted_bytes=predicted_bytes(few_blocks, weight_bits=bits),
        load_seconds=programs[way].load_seconds,
        units=sizes.new_tokens,
        group="language",
    )

# %%
same = programs["32 bits"].greedy(prompt, sizes.new_tokens) == generate(few_blocks)
assert same, "the exported file writes the same tokens"
ladder.take_turns(rounds=sizes.rounds)
ladder

# %% [markdown]
# The file in 32 bits writes the same tokens as `generate`, one by one: so weights, positions and cache are right. It is faster, and it is larger: the embedding and the output layer share one table in PyTorch, and have one each in the file. What it saves is what `generate` does between the layers. The four bits bring most of the gain, but only together with the operators that are made for the cache: compare the two rows with four bits. That is the answer to the guess.
#
# **All 30 blocks**, recorded:
#
# <!-- numbers:edge-06 -->
# With 6 blocks, the fp32 file writes 1.5× as fast as `generate`, and 33 of 33 tokens are the same: this is the price of Python and of `generate` itself. In 4 bits, the attention that is made for a cache writes 2.2× as fast as one of plain operators. The whole model is 114 MB, 42 % of bf16, and writes 6.9× (6.7 to 7.2) as fast as `generate` in fp32, on one thread. Its perplexity goes from 11.03 to 16.66; rounded in eager mode, the model has 16.77.
#
# | way | blocks | MB | of bf16 | tokens/s | faster | memory | perplexity |
# |---|--:|--:|--:|--:|--:|--:|--:|
# | `generate`, fp32 | 6 |  |  | 49 |  |  |  |
# | `generate`, fp32 | 30 |  |  | 18 |  | 539 MB | 11.03 |
# | `generate`, bf16 | 30 |  |  | 19 | 1.1× (1.0 to 1.1) | 274 MB |  |
# | `.pte`, fp32 | 6 | 311.6 | 314 % | 71 | 1.5× (1.4 to 1.5) |  |  |
# | `.pte`, 4 bits, attention of plain operators | 6 | 68.7 | 69 % | 155 | 3.1× (2.9 to 3.5) |  |  |
# | `.pte`, 4 bits, attention made for a cache | 6 | 68.5 | 69 % | 341 | 6.9× (6.6 to 8.6) |  |  |
# | `.pte`, 4 bits, attention made for a cache | 30 | 114.3 | 42 % | 119 | 6.9× (6.7 to 7.2) | 113 MB | 16.66 |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-23. SmolLM2-135M, 6 or all 30 blocks, one thread. In the blocks 4 bits in groups of 64, output layer and embedding in 8 bits. Tokens per second: the median of 7 turns behind a prompt of 32 tokens. Faster: than `generate` in fp32 with as many blocks, in the same turn; in brackets are the smallest and the largest. Perplexity: of the file, token by token, over 2,040 tokens. Memory: what a process grows by until the first token, with the libraries loaded before.*
# <!-- end -->
#
# **Why not more?** The output layer has 28 million of the 135 million weights, and keeps eight bits. In a model of few blocks it is most of the work.
#
# **How do I use it?** `python -m executorch.extension.llm.export.export_llm`, with `quantization.group_size=64` and `use_hqq=False`: with its default group of 128 it skips most layers of this model without a word, because 128 does not divide 576. On the device: `LlmModule` on Android, `TextLLMRunner` on iOS and in Python.
#
# **What does it cost?** Quality, see above; and minutes for each export.
#
# #### Another exit: GGUF
#
# llama.cpp and all programs around it (Ollama, LM Studio) read GGUF files. The weights are the same, in groups of 32 with a scale each:

# %%
from recipes_lib.edge.gguf_export import export_to_gguf, load_gguf

gguf_file = export_to_gguf(
    few_blocks, path=files / "few-blocks.gguf", tokenizer=tokenizer
)
loaded = load_gguf(gguf_file.path)
with torch.no_grad():
    theirs = loaded(prompt).logits
    ours = few_blocks(prompt).logits
agree = (theirs.argmax(-1) == ours.argmax(-1)).float().mean()
print(
    f"{gguf_file.bytes / 1e6:.0f} MB, and {agree:.0%} of the most likely tokens are the same"
)

# %% [markdown]
# ## Everything combined: which links does your device need?
#
# **What is going on?** A chain has a price for each link: training time, and quality. So take the first chain that fits, in the order of the price. Bytes and time follow from numbers that are known before anything is trained, and from the speed of a runtime, for which two files with random weights are enough.
#
# **The idea.** Check both limits, one chain after the other:

# %%
from recipes_lib.edge.size_budget import (
    Chain,
    Speed,
    choose_chain,
    plain_first_that_fits,
    predicted_choices,
)

show(plain_first_that_fits)


def work_of(model):
    """Weights and multiply-adds of a model, which exist before it is trained."""
    return dict(weights=weights_of(model), work=multiply_adds(model, image))


def speed_from(name, model):
    """A runtime and a format, from one row of the ladder: all time is taken as work."""
    return Speed(0.0, multiply_adds(model, image) / ladder[name].seconds)


speeds = {
    "fp32": speed_from("student, ExecuTorch", student),
    "int8": speed_from("pruned, 8 bits, ExecuTorch", pruned),
}
# What is in a file beside the weights: from one file of each format, like the speeds.
graph = student_file.bytes - 4 * weights_of(student)
plain = dict(graph=graph)
eight_bits = dict(bits=8, graph=in_eight.bytes - weights_of(pruned), format="int8")
chains = [
    Chain((), **work_of(teacher), **plain),
    Chain(("distil",), **work_of(student), **plain),
    Chain(("distil", "8 bits"), **work_of(student), **eight_bits),
    Chain(("distil", "prune"), **work_of(pruned), **plain),
    Chain(("distil", "prune", "8 bits"), **work_of(pruned), **eight_bits),
]
measured = {
    "as it is": "teacher, ExecuTorch",
    "distil": "student, ExecuTorch",
    "distil + prune + 8 bits": "pruned, 8 bits, ExecuTorch",
}
for choice in predicted_choices(chains, speeds=speeds):
    name = choice.chain.name
    print(
        f"{name:<24}{choice.file_bytes / 1e6:6.2f} MB {choice.seconds * 1e3:7.3f} ms",
        end="",
    )
    if name in measured:
        row = ladder[measured[name]]
        print(
            f"   measured {row.file_bytes / 1e6:.2f} MB {row.seconds * 1e3:.3f} ms",
            end="",
        )
    print()
for megabytes in (20, 1.3, 0.8, 0.5):
    choice = choose_chain(chains, megabytes=megabytes, milliseconds=100, speeds=speeds)
    print(f"{megabytes:>5} MB: {choice.chain.name}")

# %% [markdown]
# The rows of the student and of the last chain agree by construction, because speed and graph come from them. The teacher's row is a prediction: another architecture has another speed. For a new device two files with random weights give the same numbers.
#
# **What goes together.** Distillation goes with everything: it is how the other links heal. Pruning comes before quantization, because the ranges change with the channels. The export comes last. **What does not.** A model that is rounded already cannot be exported to 4 bits: it would be rounded a second time, on another grid. Single zeros bring nothing to any runtime here.
#
# ## Take this into your code
#
# For images, with a trained network of the hub and your own images in `images` [N, 3, 224, 224]:
#
# ```python
# from transformers import AutoModelForImageClassification
#
# from recipes_lib.edge.export import export_to_executorch
# from recipes_lib.edge.pt2e import quantize_pt2e
#
# model = AutoModelForImageClassification.from_pretrained("google/mobilenet_v2_1.0_224")
# quantized = quantize_pt2e(model.eval(), images[:250])
# export_to_executorch(quantized, (images[:1],), path="model.pte")
# ```
#
# For a language model:
#
# ```python
# from transformers import AutoModelForCausalLM, AutoTokenizer
#
# from recipes_lib.edge.language_model import export_language_model, load_language_model
#
# name = "HuggingFaceTB/SmolLM2-135M-Instruct"
# model = AutoModelForCausalLM.from_pretrained(name).eval()
# tokenizer = AutoTokenizer.from_pretrained(name)
# export_language_model(model, path="smollm2.pte", tokenizer=tokenizer)
# program = load_language_model("smollm2.pte")
# ids = tokenizer("def read_lines(path):")["input_ids"]
# print(tokenizer.decode(program.greedy(ids, 48)))
# ```
#
# ## What it costs, and when not to use it
#
# | recipe | price | not when |
# |---|---|---|
# | efficient bases | accuracy per weight is better, accuracy is lower | a GPU with large batches |
# | distillation | a forward of the teacher per step | the student has all the data that it can use |
# | pruning single weights | nothing but a smaller download | you want time or memory |
# | pruning channels | training after it | a model of that size is trained already |
# | quantization-aware training | training on the grid | 8 bits |
# | export | fixed shapes, seconds to minutes | the model still changes every day |
# | deep and thin | time per token in eager mode | the model is trained already |
#
# **Three things that do not help here.** Zeros in an ordinary file, training on the grid of 8 bits, and 8 bits for time in XNNPACK on this processor: all are measured above. They stay in, so that you see it.
#
# ## Exercises
#
# 1. Give the small student all images. How much of the teacher's advantage is left?
# 2. Prune 75 % of the channels. Is the healed network better than the same one from the start?
# 3. Export the student with a batch of 8 images. How much less time does an image take, and why?
#
# ## References
#
# - Howard et al., *MobileNets*, 2017; Sandler et al., *MobileNetV2*, 2018; Tan and Le, *EfficientNet*, 2019
# - Hinton et al., *Distilling the Knowledge in a Neural Network*, 2015
# - Han et al., *Learning both Weights and Connections*, 2015; Liu et al., *Rethinking the Value of Network Pruning*, 2018
# - Jacob et al., *Quantization and Training of Neural Networks*, 2017; Liu et al., *LLM-QAT*, 2023
# - Liu et al., *MobileLLM*, 2024
# - ExecuTorch's documentation, *Exporting LLMs* and *XNNPACK backend*; ONNX Runtime's, *Quantize ONNX models*
#
# The last cell checks that the story above is true on this machine: orderings and signs, never absolute speed.

# %%
ladder.note(
    few_images=small,
    bits=bits_of,
    perplexities={"full precision": exact} | perplexities,
    share_of_work=share_of_work,
    delegated=student_file.delegation.share,
)
fp32 = ladder["student, ExecuTorch"]
assert ladder["zeros 0.8"].file_bytes > 0.9 * ladder["student"].file_bytes, "zeros"
assert ladder["pruned, healed"].file_bytes < 0.6 * ladder["student"].file_bytes
assert fp32.seconds < ladder["student"].seconds, "no Python between the operators"
assert fp32.seconds < ladder["teacher, ExecuTorch"].seconds, "less work is faster"
assert fp32.seconds < ladder["student, portable kernels"].seconds, "delegated"
assert ladder["pruned, 8 bits, ExecuTorch"].file_bytes < fp32.file_bytes / 3
assert ladder["4 bits"].seconds < ladder["32 bits"].seconds, "fewer bits are faster"
assert ladder["4 bits"].file_bytes < ladder["32 bits"].file_bytes / 3
budgeted = predicted_choices(chains[:1], speeds=speeds)[0].file_bytes
off = budgeted / ladder["teacher, ExecuTorch"].file_bytes - 1
assert abs(off) < 0.1, "weights and graph are the file"
assert perplexities["8 bits"] < 1.1 * exact, "8 bits cost little"
assert perplexities["4 bits, output layer in 8"] < perplexities["4 bits everywhere"]
print("all checks passed")
