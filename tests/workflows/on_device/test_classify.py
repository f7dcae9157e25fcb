"""Whatever answers a batch of images is measured alike; training and counting do what they say."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from recipes_lib.core.data.images import Images, handwritten_digits
from recipes_lib.workflows.on_device.classify import (
    accuracy,
    image_logits,
    multiply_adds,
    shifted,
    train_classifier,
)


def small_net(classes=10):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(64, classes),
    )


def random_images(count=7, size=12):
    return Images(torch.randn(count, 1, size, size), torch.arange(count) % 3)


# --- answers --------------------------------------------------------------------------------------


def answers_of_all_kinds(model):
    """The same model, as runtimes answer."""
    model = copy.deepcopy(model).eval()

    def as_array(batch):
        return model(batch).detach().numpy()

    def as_list(batch):
        return [model(batch)]

    def as_hugging_face(batch):
        return SimpleNamespace(logits=model(batch))

    return [model, as_array, as_list, as_hugging_face]


def test_whatever_answers_has_the_same_logits():
    """A last batch that is not full must not be lost, and dropout must be off."""
    model = small_net().train()
    images = random_images(size=32)
    expected = copy.deepcopy(model).eval()(images.images)
    for answering in answers_of_all_kinds(model):
        logits = image_logits(answering, images, batch_size=3)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert logits.dtype is torch.float32
    assert not logits.requires_grad


# --- training -------------------------------------------------------------------------------------


def test_training_learns_the_digits():
    """The mistake: gradients that nobody clears, or a learning rate that never rises."""
    train, test = handwritten_digits(train=1000, test=500)
    model = small_net()
    before = accuracy(model, test)
    losses = train_classifier(model, train, epochs=2, learning_rate=0.1, batch_size=20, shift=1)
    assert before < 0.3 and accuracy(model, test) > 0.8
    assert len(losses) == 2 and losses[1] < losses[0]
    assert not model.training
    assert model[3].weight.is_contiguous()  # exporters take weights in the usual order only


def test_a_seed_decides_all_of_it():
    """With dropout and shifts; and the random state of the caller is left as it was."""
    train, _ = handwritten_digits(train=100, test=10)
    weights = []
    for seed in (4, 4):
        model = small_net()
        state = torch.get_rng_state()
        train_classifier(model, train, epochs=1, learning_rate=0.01, batch_size=20, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        weights.append(model[9].weight)
    assert torch.equal(*weights)


def test_a_loss_of_ones_own_sees_what_the_student_sees():
    """A teacher that is asked about images that are not shifted would teach the wrong answers."""
    train, _ = handwritten_digits(train=60, test=10)
    model = small_net()
    seen = []
    model.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))

    def loss(logits, images, labels):
        assert torch.equal(images, seen[-1]) and logits.shape == (20, 10)
        assert labels.shape == (20,) and logits.requires_grad
        return F.cross_entropy(logits, labels)

    train_classifier(model, train, epochs=2, learning_rate=0.01, batch_size=20, loss=loss)
    assert len(seen) == 6


def test_a_training_ends_when_its_loss_is_no_number():
    """The mistake: the epochs that are left are trained, and the net answers nothing."""
    train, _ = handwritten_digits(train=40, test=10)

    def loss(logits, images, labels):
        return logits.sum() * torch.nan

    with pytest.raises(ValueError, match="the loss is nan after 1 epochs"):
        train_classifier(small_net(), train, epochs=2, learning_rate=0.01, batch_size=20, loss=loss)


def test_images_move_and_keep_their_pixels():
    """The mistake: rows move as columns do, or pixels get lost."""
    images = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    generator = torch.Generator().manual_seed(0)
    moved = shifted(images, most=2, generator=generator)
    assert torch.equal(moved.flatten(1).sort().values, images.flatten(1))
    expected = torch.roll(images[:1], (1, -1), dims=(2, 3))
    found = [shifted(images[:1], most=1, generator=generator) for _ in range(60)]
    assert any(torch.equal(image, expected) for image in found)


# --- work -----------------------------------------------------------------------------------------


def test_multiply_adds_are_those_of_the_formulas():
    """Groups, strides, borders and dilation change the number; a bias does not."""
    image = torch.randn(1, 4, 13, 10)
    cases = [
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), 6 * 7 * 5 * 4 * 9),
        (nn.Conv2d(4, 8, (5, 1), groups=2), 8 * 9 * 10 * 2 * 5),
        (nn.Conv2d(4, 4, 3, dilation=2, groups=4), 4 * 9 * 6 * 1 * 9),
        (nn.Sequential(nn.Flatten(), nn.Linear(520, 7)), 520 * 7),
    ]
    for model, expected in cases:
        assert multiply_adds(model, image) == expected
        assert multiply_adds(model, torch.cat([image, image])) == 2 * expected
