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
