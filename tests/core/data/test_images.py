"""The digits are the same on every machine, and no image is in training and in test."""

import torch

from recipes_lib.core.data.images import handwritten_digits


def numbers(images):
    """One number for each image, different for different images."""
    weights = torch.arange(1, 1025, dtype=torch.float64).sqrt()
    return set((images.images.double().flatten(1) @ weights).tolist())


def test_no_image_is_trained_on_and_tested_with():
    """An overlap would make every accuracy of the notebook too good."""
    train, test = handwritten_digits()
    assert train.images.shape == (3000, 1, 32, 32) and test.images.shape == (2000, 1, 32, 32)
    assert train.images.dtype is torch.float32 and train.labels.dtype is torch.int64
    assert len(train) == 3000 and len(test) == 2000
    assert len(numbers(train)) > 2990 and not numbers(train) & numbers(test)


def test_any_part_has_every_digit_as_often():
    """Else a student that sees 1,000 images would see another share of each digit."""
    train, test = handwritten_digits(train=500, test=100)
    for part in (train, test, train.first(30)):
        assert torch.equal(part.labels.bincount(minlength=10), torch.full((10,), len(part) // 10))
    assert len(set(map(tuple, train.labels.view(-1, 10).tolist()))) > 40  # in no fixed order
    _, same_test = handwritten_digits(train=100, test=100)
    assert torch.equal(test.images, same_test.images), "less training keeps the test"
