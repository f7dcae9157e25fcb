import torch

from benchmarks import int8_images


def test_the_kinds_are_in_the_order_of_the_network():
    """The mistake: the times of depthwise layers count as those of 1 x 1 layers."""
    network = int8_images.mobile_net(width=0.35, image_size=32, seed=0)
    expected = []
    for layer in network.modules():
        if not isinstance(layer, torch.nn.Conv2d):
            continue
        kind = "1 x 1"
        if layer.groups > 1:
            kind = "depthwise"
        elif layer.kernel_size == (3, 3):
            kind = "first"
        expected.append(kind)
    assert int8_images.kinds_of_convolutions(len(expected)) == expected


def event(operator, name, microseconds):
    return {
        "cat": "Node",
        "name": f"{name}_kernel_time",
        "dur": microseconds,
        "args": {"op_name": operator},
    }


def test_a_profile_by_kind():
    """Medians over the forwards: the first of them is slow."""
    events = [{"cat": "Session", "name": "model_run", "dur": 9}]
    for slower in (100, 1, 1):
        events.append(event("QuantizeLinear", "q", 5 * slower))
        for number in range(4):
            events.append(event("QLinearConv", f"c{number}", 10 * slower * (number + 1)))
    found = int8_images.by_kind(events)
    assert found == {"other": 5, "first": 10, "depthwise": 20, "1 x 1": 30 + 40}


def test_a_profile_is_that_of_the_file(tmp_path):
    """Through a real session: its events have the names that are looked for."""
    from recipes_lib.edge.onnx_export import export_to_onnx

    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3),
        torch.nn.Conv2d(8, 8, 3, groups=8),
        torch.nn.Conv2d(8, 16, 1),
        torch.nn.Conv2d(16, 16, 1),
        torch.nn.Flatten(),
    )
    exported = export_to_onnx(network, (torch.randn(1, 1, 32, 32),), path=tmp_path / "m.onnx")
    found = int8_images.microseconds(exported.path, 32, 3)
    assert set(found) == {"first", "depthwise", "1 x 1", "other"}
    assert all(value > 0 for value in found.values())
    assert list(tmp_path.iterdir()) == [exported.path]


def test_enlarged_images_keep_their_labels():
    images, _ = int8_images.handwritten_digits(train=20, test=10)
    larger = int8_images.enlarged(images, 64)
    assert larger.images.shape == (20, 1, 64, 64)
    assert torch.equal(larger.labels, images.labels)
