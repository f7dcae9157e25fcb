"""A graph with fake quantization, calibrated and trained."""

import pytest
import torch
from torch import nn

from recipes_lib.edge.export import export_to_executorch
from recipes_lib.edge.pt2e import plain_fake_quantize, plain_grid, plain_weight, quantize_pt2e
from recipes_lib.edge.runtime import load_pte
from recipes_lib.workflows.on_device.classify import image_logits

STEPS = 60  # of training on the grid


def tiny():
    """A convolution with its norm, and a layer that reads all of the image."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU6(), nn.Flatten()]
    net = nn.Sequential(*layers, nn.Linear(4 * 36, 3)).train()
    for _ in range(20):
        net(torch.randn(16, 1, 8, 8))
    return net.eval()


def images(number=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(number, 1, 8, 8, generator=generator)


@pytest.fixture(scope="module")
def calibrated():
    return quantize_pt2e(tiny(), images())


def test_a_grid_by_hand():
    """A zero that is no level, numbers outside that are not cut off, a gradient that is lost."""
    scale, zero = plain_grid(-1.0, 4.1)
    assert (scale, zero) == (pytest.approx(0.02), -78)
    x = torch.tensor([-9.0, 0.0, 0.011, 4.1, 9.0], requires_grad=True)
    rounded = plain_fake_quantize(x, scale, zero, most=127)
    torch.testing.assert_close(rounded, torch.tensor([-1.0, 0, 0.02, 4.1, 4.1]))
    rounded.sum().backward()
    assert torch.equal(x.grad, torch.ones(5)), "straight through"
    assert plain_grid(1.0, 2.55)[1] == -128, "0 is a level, also where no number is 0"


def test_eight_bits_are_near(calibrated):
    """Nothing rounded, or another network; a graph of one batch size, or of training."""
    net = tiny()
    x = images(9)
    expected = net(x)
    assert 0 < (calibrated(x) - expected).abs().max() < 0.02 * expected.abs().max()
    assert not calibrated.training
    torch.testing.assert_close(calibrated.eval()(x[:1]), calibrated(x)[:1], atol=0.03, rtol=0)
    assert not any(weight.requires_grad for weight in calibrated.parameters())


def test_the_file_computes_what_the_graph_computes(calibrated, tmp_path):
    """Within one level of the output; every rounding is with XNNPACK, a weight takes a byte."""
    x = images(1)
    exported = export_to_executorch(calibrated, (x,), path=tmp_path / "q.pte")
    assert exported.delegation.outside() == ()
    program = load_pte(exported.path)
    expected = calibrated(x)
    level = (calibrated(images()).max() - calibrated(images()).min()) / 255
    assert (program(x) - expected).abs().max() < 1.5 * level
    weights = 4 * 9 + 3 * 144 + 8 * (4 + 3)  # and a bias and a scale for each channel
    assert weights < exported.bytes < weights + 8_000


def running_statistics(module):
    """Copies of what batch norms keep."""
    state = module.state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if "running" in name}


def test_a_look_at_the_accuracy_moves_no_batch_norm_and_a_diverged_training_is_refused():
    """Without the setter of `training`, image_logits runs with the batch norms of training.

    A NaN would be made a whole number, and nobody would see it any more.
    """

    def look_and_diverge(module):
        assert module.training
        before = running_statistics(module)
        assert before, "the graph keeps the statistics under names of its own"
        image_logits(module, 5 * images(8))
        assert module.training
        for name, tensor in running_statistics(module).items():
            assert torch.equal(tensor, before[name]), name
        next(module.parameters()).data.fill_(float("nan"))

    with pytest.raises(ValueError, match="not finite after the training"):
        quantize_pt2e(tiny(), images(), weight_bits=3, train=look_and_diverge)


def test_three_bits_lose_and_training_wins_back(capfd):
    """What is trained has the roundings in it, and it is what is converted.

    Notebook 06 does the same with batch norms, which torchao folds when it converts.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU6(), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()
    x = images()
    expected = net(x).detach()
    rounded = []

    def train(module):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.003)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 0.003 * (1 - step / STEPS)
            optimizer.zero_grad()
            (module(x) - expected).square().mean().backward()
            optimizer.step()
        rounded.append((module.eval()(x) - expected).square().mean().item())

    kept = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    calibrated = quantize_pt2e(net, x, weight_bits=3)
    aware = quantize_pt2e(net, x, weight_bits=3, train=train)
    assert capfd.readouterr() == ("", "")
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, kept[name]), "the model stays as it is"
    lost = (calibrated(x) - expected).square().mean()
    left = (aware(x) - expected).square().mean()
    assert left < 0.7 * lost
    assert left == pytest.approx(rounded[0], rel=0.1), (
        "the grid that was trained is the one it gets"
    )
    whole = calibrated.graph._frozen_param0
    assert (whole.dtype, whole.min(), whole.max()) == (torch.int8, -3, 3)
    dequantized = whole.float() * calibrated.graph._scale_0.view(-1, 1, 1, 1)
    torch.testing.assert_close(dequantized, plain_weight(net[0].weight.detach(), bits=3))


def test_one_scale_for_a_whole_weight():
    """A channel of small weights loses its levels to the largest channel."""
    layer = nn.Linear(20, 2, bias=False)
    with torch.no_grad():
        layer.weight[0] *= 0.001
    graph = quantize_pt2e(layer, torch.randn(50, 20), per_channel=False).graph
    assert torch.equal(graph._frozen_param0[0], torch.zeros(20, dtype=torch.int8))
    assert graph._frozen_param0[1].abs().max() == 127


def test_nothing_to_quantize_or_quantized_already(calibrated):
    """A second rounding uses another grid, and loses a second time."""
    with pytest.raises(ValueError, match="no convolution and no linear layer"):
        quantize_pt2e(nn.Sequential(nn.ReLU(), nn.Flatten()), images(2))
    with pytest.raises(ValueError, match="quantized already, and a second rounding"):
        quantize_pt2e(calibrated, images(2))
    with pytest.raises(ValueError, match="weight_bits=16"):
        quantize_pt2e(tiny(), images(2), weight_bits=16)
