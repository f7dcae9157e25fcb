import pytest
import torch

from benchmarks import complete, int8_images, render_int8_images, turns
from tests.benchmarks.test_record import machine_facts


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


def row(fp32, int8):
    of_ways = {int8_images.FP32: fp32} | {way: int8 for way in int8_images.WAYS}
    return {"pixels": 96, "milliseconds": of_ways}


def test_ratios_are_those_of_the_same_turn():
    """The machine may be slower in one turn than in another: both sides are."""
    found = int8_images.ratios(row([2.0, 4.0, 9.0], [1.0, 2.0, 3.0]))
    assert found == pytest.approx([2, 2, 3])
    assert turns.middle_half(found) == pytest.approx((2, 2, 2.5))
    assert "8 bits 2.00× (2.00 to 2.50)" in int8_images.line_of(row([2.0, 4.0, 9.0], [1, 2, 3]))


def test_enlarged_images_keep_their_labels():
    images, _ = int8_images.handwritten_digits(train=20, test=10)
    larger = int8_images.enlarged(images, 64)
    assert larger.images.shape == (20, 1, 64, 64)
    assert torch.equal(larger.labels, images.labels)


def a_run():
    in_fp32 = {"first": 100.0, "depthwise": 200.0, "1 x 1": 600.0, "other": 100.0}
    in_8_bits = {"first": 100.0, "depthwise": 100.0, "1 x 1": 200.0, "other": 100.0}
    rows = [row([2.0] * 31, [1.0] * 31) | {"pixels": pixels} for pixels in int8_images.SIZES]
    files = {"fp32": {"accuracy": 0.961}, "8 bits": {"accuracy": 0.96}}
    return {
        "short": False,
        "pixels": 96,
        "width": 1.0,
        "onnxruntime": "1.0",
        "settings": {"turns": 31, "test": 2000, "forwards": 100},
        "accuracy": {"files": files},
        "layers": {"fp32": in_fp32, "8 bits": in_8_bits},
        "times": rows,
    }


def test_a_run_that_was_cut_is_not_complete():
    run = a_run()
    assert complete.lacking_in_int8_images(run) == []
    assert complete.lacking_in_int8_images(run | {"short": True}) == ["the run without --short"]
    cut = run | {"times": run["times"][:-1]}
    assert complete.lacking_in_int8_images(cut) == ["the times at 224 pixels"]
    del run["accuracy"]
    assert complete.lacking_in_int8_images(run) == ["the part accuracy"]
    assert set(complete.INT8_IMAGES) == set(int8_images.PARTS)
    assert complete.INT8_SIZES == int8_images.SIZES


def test_the_run_in_words_and_numbers():
    text = render_int8_images.block(machine_facts() | a_run())
    assert "2.00× (2.00 to 2.00) as fast in 8 bits, 96.00% right instead of" in text
    assert "1 × 1 convolutions gain 3.0×" in text
    assert "gains 2.0×: in 8 bits it is 20% of the time" in text
    assert "| 96 × 96 | 2.00 | 1.00 | 2.00× (2.00 to 2.00) |" in text
    assert "| 1 × 1 convolutions | 0.60 ms (60%) | 0.20 ms (40%) | 3.00× |" in text
    assert "Test CPU" in text
    assert render_int8_images.block(None) == render_int8_images.both(None) == ""
