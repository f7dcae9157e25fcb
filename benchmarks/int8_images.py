"""MobileNetV2 in 8 bits through ONNX Runtime: its time at several image sizes, and its accuracy.

python -m benchmarks.int8_images      some six minutes of one core

Three things are measured:

    accuracy    a network is trained on digits, enlarged to `PIXELS` a side: how many of the
                held-out digits each of its files reads
    layers      microseconds of each kind of layer in that network, in fp32 and in 8 bits
    times       milliseconds of one image on one thread, in turns, at each size of `SIZES`

A time does not depend on the weights, so in `times` only the size of `PIXELS` is trained. The other
networks have their first weights.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks import study
from recipes_lib.architecture.mobile_net import mobile_net
from recipes_lib.core.data.images import Images, handwritten_digits
from recipes_lib.core.measure.provenance import runs_dir
from recipes_lib.edge.onnx_export import export_to_onnx, load_onnx, quantize_onnx
from recipes_lib.workflows.on_device.classify import accuracy, train_classifier

PIXELS = 96  # of a side, in the network that is trained
SIZES = (32, 64, 96, 128, 160, 224)
WIDTH = 1.0
FP32 = "fp32"
INT8 = "8 bits"

# Options of `quantize_onnx`, by the name of the way. The first is the default.
WAYS: dict[str, dict[str, bool]] = {
    INT8: {},
    "8 bits, first layer as well": {"first_in_fp32": False},
    "8 bits, one scale per weight": {"per_channel": False},
}
ENLARGED = 32  # pixels of a side, before


@dataclass(frozen=True)
class Settings:
    """How much is learned, and how often is measured."""

    train: int = 3000
    test: int = 2000
    epochs: int = 3
    learning_rate: float = 0.05
    calibration: int = 256
    turns: int = 31
    forwards: int = 100  # whose layers are timed
    seed: int = 1


def enlarged(images: Images, pixels: int) -> Images:
    """The same images with so many pixels a side."""
    larger = F.interpolate(images.images, size=(pixels, pixels), mode="bilinear")
    return Images(larger, images.labels)


def files_of(model: Any, calibration: torch.Tensor, folder: Path) -> dict[str, Path]:
    """By way: the network in fp32, and in each form of 8 bits. Any batch size."""
    example = calibration[:2]
    exported = export_to_onnx(model, (example,), path=folder / "fp32.onnx", any_batch=True)
    files = {FP32: exported.path}
    for way, options in WAYS.items():
        name = way.replace(", ", "-").replace(" ", "-")
        path = folder / f"{name}.onnx"
        files[way] = quantize_onnx(exported.path, calibration=calibration, to=path, **options).path
    return files


# --- accuracy -------------------------------------------------------------------------------------


def trained_files(settings: Settings, folder: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    """Train, write the files, and say how many held-out images each reads."""
    small, small_test = handwritten_digits(train=settings.train, test=settings.test)
    images = enlarged(small, PIXELS)
    test = enlarged(small_test, PIXELS)
    model = mobile_net(width=WIDTH, image_size=PIXELS, seed=settings.seed)
    train_classifier(
        model,
        images,
        epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        batch_size=64,
        seed=settings.seed,
        shift=2 * PIXELS // ENLARGED,  # the border of two pixels has grown with the image
    )
    # Calibration sees images of the training: those that are counted have to be new.
    files = files_of(model, images.first(settings.calibration).images, folder)
    found = {way: {"accuracy": accuracy(load_onnx(path), test)} for way, path in files.items()}
    return files, {"files": found}


# --- layers ---------------------------------------------------------------------------------------


def layers(files: dict[str, Path], forwards: int) -> dict[str, dict[str, float]]:
    """Microseconds by kind of layer, in fp32 and in each form of 8 bits."""
    return {way: microseconds(path, PIXELS, forwards) for way, path in files.items()}


def microseconds(path: Path, pixels: int, forwards: int) -> dict[str, float]:
    """Of one forward by kind of layer: the median of each operator over the forwards, summed."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        name = session.get_inputs()[0].name
        image = an_image(pixels).numpy()
        for _ in range(forwards):
            session.run(None, {name: image})
        events = json.loads(Path(session.end_profiling()).read_text())
    return by_kind(events)


def by_kind(events: list[dict[str, Any]]) -> dict[str, float]:
    """Of a profile of ONNX Runtime: microseconds of one forward by kind of layer."""
    durations: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            key = (event["args"]["op_name"], event["name"])
            durations.setdefault(key, []).append(event["dur"])
    # They are in the order of the first forward, which is that of the network.
    convolutions = [key for key in durations if key[0] in ("Conv", "FusedConv", "QLinearConv")]
    kinds = dict(zip(convolutions, kinds_of_convolutions(len(convolutions))))
    found: dict[str, float] = {}
    for key, of_operator in durations.items():
        kind = kinds.get(key, "other")
        found[kind] = found.get(kind, 0.0) + statistics.median(of_operator)
    return found


def kinds_of_convolutions(count: int) -> list[str]:
    """What each convolution of a MobileNetV2 is, from the image to the classifier.

    It begins with the first layer, a depthwise one and a 1 x 1. Each block has a 1 x 1, a depthwise
    one and a 1 x 1, and one more 1 x 1 is the last.
    """
    blocks = (count - 4) // 3
    return ["first", "depthwise", "1 x 1", *["1 x 1", "depthwise", "1 x 1"] * blocks, "1 x 1"]


# --- times ----------------------------------------------------------------------------------------


def times(
    trained: dict[str, Path], settings: Settings, folder: Path
) -> Iterator[list[dict[str, Any]]]:
    """Milliseconds of one image in each way, turn by turn; after each size, what there is."""
    rows = []
    for pixels in SIZES:
        files = trained
        if pixels != PIXELS:
            files = untrained_files(pixels, settings, folder / str(pixels))
        models = {way: load_onnx(path) for way, path in files.items()}
        of_ways = study.in_turns(models, an_image(pixels), turns=settings.turns)
        rows.append({"pixels": pixels, "milliseconds": of_ways})
        yield rows


def untrained_files(pixels: int, settings: Settings, folder: Path) -> dict[str, Path]:
    model = mobile_net(width=WIDTH, image_size=pixels, seed=settings.seed)
    images, _ = handwritten_digits(train=settings.train, test=settings.test)
    return files_of(model, enlarged(images.first(10), pixels).images, folder)


def an_image(pixels: int) -> torch.Tensor:
    """[1, 1, pixels, pixels]"""
    images, _ = handwritten_digits(train=10, test=10)
    return enlarged(images.first(1), pixels).images


# --- the run --------------------------------------------------------------------------------------


def measured(settings: Settings) -> Iterator[dict[str, Any]]:
    """What each part found, one after the other."""
    folder = runs_dir() / "int8_images"
    files, found = trained_files(settings, folder / "trained")
    facts = {"pixels": PIXELS, "width": WIDTH, "onnxruntime": version("onnxruntime")}
    yield facts | {"accuracy": found}
    yield {"layers": layers(files, settings.forwards)}
    for rows in times(files, settings, folder):
        yield {"times": rows}


if __name__ == "__main__":
    study.run("int8_images", Settings(), measured, about=__doc__)
