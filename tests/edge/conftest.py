"""One small convolutional net for all exits, and its .pte, exported once."""

import pytest
import torch
from torch import nn

from recipes_lib.edge.export import export_to_executorch

SHAPE = (1, 1, 16, 16)


class SmallNet(nn.Module):
    """An inverted residual between a stem and a head: what MobileNetV2 repeats."""

    def __init__(self, channels=8):
        super().__init__()
        wide = 4 * channels
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(channels)
        self.expand = nn.Conv2d(channels, wide, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(wide)
        self.project = nn.Conv2d(wide, channels, 1, bias=False)
        self.project_norm = nn.BatchNorm2d(channels)
        self.relu6 = nn.ReLU6()
        self.head = nn.Linear(channels, 10)

    def forward(self, images):
        x = self.relu6(self.stem_norm(self.stem(images)))
        wide = self.relu6(self.expand_norm(self.expand(x)))
        wide = self.relu6(self.depthwise_norm(self.depthwise(wide)))
        x = x + self.project_norm(self.project(wide))
        # With `keepdim` XNNPACK takes the mean; without, it stays outside.
        return self.head(x.mean((2, 3), keepdim=True).flatten(1))


def small_net():
    """With statistics of its norms that are not those of its first day."""
    torch.manual_seed(0)
    net = SmallNet().train()
    for _ in range(20):
        net(torch.randn(16, *SHAPE[1:]))
    return net.eval()


@pytest.fixture
def net():
    return small_net()


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("edge") / "small.pte"
    return export_to_executorch(small_net(), (torch.randn(SHAPE),), path=path)
