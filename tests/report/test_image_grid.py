"""Images beside each other."""

from types import SimpleNamespace

import pytest
import torch

from recipes_lib.report.image_grid import image_grid


def test_each_image_stands_above_its_class():
    """Catches images and classes of different orders."""
    images = torch.arange(5.0)[:, None, None, None].expand(5, 1, 4, 4)
    figure = image_grid(SimpleNamespace(images=images, labels=torch.arange(5)), columns=3)
    drawn = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in drawn] == ["0", "1", "2", "3", "4"]
    assert [axes.images[0].get_array()[0, 0] for axes in drawn] == [0, 1, 2, 3, 4]


def test_nothing_to_draw():
    empty = SimpleNamespace(images=torch.zeros(0, 1, 4, 4), labels=torch.zeros(0))
    with pytest.raises(ValueError, match="nothing to draw"):
        image_grid(empty)
