"""What a file in runs/ lacks before it can be recorded.

A long run writes its file again and again, so a file may be that of a run which was cut, or which
still goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = dict[str, Any]

ARCHITECTURE = ("norms", "healing", "small_models")
EDGE = ("export", "quality", "load", "times")
IMAGE_STUDENTS = ("seeds", "times")
INT8_IMAGES = ("accuracy", "layers", "times")
INT8_SIZES = (32, 64, 96, 128, 160, 224)  # pixels of a side
ROUNDS = 5  # of programs in turns, at least
COMPARED = ("labels", "teacher")  # ways of distillation; there may be more
COMPARED_ON_GRID = ("full precision", "aware")  # and of training on a grid


def lacking_in_architecture(run: Run) -> list[str]:
    """The parts of `benchmarks.architecture` that did not run, or only in small sizes."""
    lacking = []
    for part in ARCHITECTURE:
        if part not in run:
            lacking.append(f"the part {part}")
        elif run[part]["short"]:
            lacking.append(f"the part {part} without --short")
    return lacking


def lacking_in_distillation(run: Run) -> list[str]:
    """The runs of `benchmarks.distillation` that have not ended: one per way and seed."""
    return _lacking_runs(run, COMPARED)


def lacking_in_quantization_aware(run: Run) -> list[str]:
    """The runs of `benchmarks.quantization_aware` that have not ended: one per way and seed."""
    return _lacking_runs(run, COMPARED_ON_GRID)


def _lacking_runs(run: Run, compared: tuple[str, ...]) -> list[str]:
    settings = run["settings"]
    ended = {(each["way"], each["seed"]) for each in run["runs"]}
    lacking = [f"the way {way!r}" for way in compared if way not in settings["ways"]]
    for seed in range(settings["seeds"]):
        for way in settings["ways"]:
            if (way, seed) not in ended:
                lacking.append(f"the run {way!r} with seed {seed}")
    return lacking


def lacking_in_peers(run: Run) -> list[str]:
    """Rounds of `benchmarks.inference_peers`, and programs with numbers: it writes after each."""
    lacking = []
    if run["rounds"] < ROUNDS:
        lacking.append(f"{ROUNDS - run['rounds']} of {ROUNDS} rounds")
    for row in run["rows"]:
        if row["reason"] is not None:
            continue
        for time in ("decode_ms", "prefill_ms"):
            if row[time] is None or len(row[time]["rounds"]) < run["rounds"]:
                lacking.append(f"rounds of {time} of {row['name']}")
    if all(row["reason"] is not None for row in run["rows"]):
        lacking.append("a program that ran")
    return lacking


def lacking_in_depths(run: Run) -> list[str]:
    """`benchmarks.depths` writes once, at the end; only its size can be wrong."""
    if run["short"]:
        return ["the run without --short"]
    return []


def lacking_in_edge(run: Run) -> list[str]:
    """The parts of `benchmarks.edge` that did not run, and rounds of its times."""
    lacking = [f"the part {part}" for part in EDGE if part not in run]
    for way, rows in run.get("times", {}).items():
        if len(rows) < ROUNDS:
            lacking.append(f"{ROUNDS - len(rows)} of {ROUNDS} rounds of {way}")
    return lacking


def lacking_in_int8_images(run: Run) -> list[str]:
    """The parts of `benchmarks.int8_images` that did not run, and sizes of its times."""
    if run["short"]:
        return ["the run without --short"]
    lacking = [f"the part {part}" for part in INT8_IMAGES if part not in run]
    measured = {row["pixels"] for row in run.get("times", [])}
    if measured:
        for pixels in INT8_SIZES:
            if pixels not in measured:
                lacking.append(f"the times at {pixels} pixels")
    return lacking


def lacking_in_image_students(run: Run) -> list[str]:
    """The parts of `benchmarks.image_students` that did not run, and its seeds."""
    if run["short"]:
        return ["the run without --short"]
    lacking = [f"the part {part}" for part in IMAGE_STUDENTS if part not in run]
    ended = {row["seed"] for row in run.get("seeds", [])}
    if ended:
        for seed in range(run["settings"]["seeds"]):
            if seed not in ended:
                lacking.append(f"the seed {seed}")
    return lacking


def lacking_in_muon(run: Run) -> list[str]:
    study = run["settings"]
    wanted = 2 * study["seeds"] * len(study["rates"])
    lacking = wanted - len(run["runs"])
    return [f"{lacking} of {wanted} runs"] if lacking else []


def lacking_in_long_finetune(run: Run) -> list[str]:
    return [method for method in run["settings"]["rates"] if method not in run["verdicts"]]


# By the name of the file, which is that of the program and of the part.
LACKING: dict[str, Callable[[Run], list[str]]] = {
    "architecture": lacking_in_architecture,
    "depths": lacking_in_depths,
    "distillation": lacking_in_distillation,
    "edge": lacking_in_edge,
    "image_students": lacking_in_image_students,
    "inference_peers": lacking_in_peers,
    "int8_images": lacking_in_int8_images,
    "long_finetune": lacking_in_long_finetune,
    "muon": lacking_in_muon,
    "quantization_aware": lacking_in_quantization_aware,
}
