"""A MobileNet with an EfficientNet as its teacher, over three seeds: wrong answers, and time.

python -m benchmarks.image_students      some ten minutes of one core

    seeds    per seed a teacher, a student from the labels alone, and a student with the teacher;
             the latter two once with all images, and once smaller, with few of them
    times    milliseconds of one image, teacher and student in turns, in ExecuTorch on one thread

A student begins with the same weights and sees the same images in the same order, with its teacher
and without. All seeds have the same images. A time does not depend on the weights, so `times` takes
networks as they begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import study
from recipes_lib.architecture.efficient_net import efficient_net
from recipes_lib.architecture.mobile_net import mobile_net
from recipes_lib.compression.distillation import plain_distillation_loss
from recipes_lib.core.data.images import Images, handwritten_digits
from recipes_lib.core.measure.provenance import runs_dir
from recipes_lib.edge.export import export_to_executorch
from recipes_lib.edge.runtime import load_pte
from recipes_lib.workflows.on_device.classify import (
    Loss,
    image_logits,
    multiply_adds,
    train_classifier,
)

ALONE = "labels"
TAUGHT = "teacher"
LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Settings:
    """How much is learned, and how often is measured."""

    train: int = 3000
    test: int = 2000
    few: int = 1000  # images of the small student
    epochs: int = 10
    few_epochs: int = 12
    width: float = 0.5  # of the student
    few_width: float = 0.25  # of the small student
    temperature: float = 4.0
    teacher_share: float = 0.9
    seeds: int = 3
    turns: int = 31


# --- seeds ----------------------------------------------------------------------------------------


def of_seed(seed: int, settings: Settings) -> dict[str, Any]:
    """How many of the held-out images each network of one seed reads wrong."""
    train, test = handwritten_digits(train=settings.train, test=settings.test)
    teacher = the_teacher(seed)
    train_classifier(teacher, train, epochs=settings.epochs, learning_rate=LEARNING_RATE, seed=seed)
    found: dict[str, Any] = {"seed": seed, "teacher": wrong(teacher, test)}
    losses = {ALONE: None, TAUGHT: taught(teacher, settings)}
    kinds = {
        "student": (settings.width, train, settings.epochs),
        "few": (settings.few_width, train.first(settings.few), settings.few_epochs),
    }
    for kind, (width, images, epochs) in kinds.items():
        found[kind] = {}
        for way, loss in losses.items():
            student = mobile_net(width=width, seed=seed + 1)
            train_classifier(
                student, images, epochs=epochs, learning_rate=LEARNING_RATE, seed=seed, loss=loss
            )
            found[kind][way] = wrong(student, test)
    return found


def the_teacher(seed: int) -> nn.Module:
    """A third of B0's channels and half of its blocks: the digits are small and easy."""
    return efficient_net(width=0.35, depth=0.5, seed=seed)


def taught(teacher: nn.Module, settings: Settings) -> Loss:
    """A loss that asks the teacher about the same images."""

    def loss(logits: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_logits = teacher(images).logits
        return plain_distillation_loss(
            logits,
            teacher_logits,
            labels,
            temperature=settings.temperature,
            teacher_share=settings.teacher_share,
        )

    return loss


def wrong(model: nn.Module, images: Images) -> int:
    """How many of the images get another class than their own."""
    answers = image_logits(model, images).argmax(dim=1)  # [N]
    return int((answers != images.labels).sum())


# --- times ----------------------------------------------------------------------------------------


def times(settings: Settings, folder: Path) -> dict[str, Any]:
    """Milliseconds of one image in each turn, and the multiply-adds of both networks."""
    image = handwritten_digits(train=10, test=10)[0].first(1).images  # [1, 1, 32, 32]
    networks = {"teacher": the_teacher(0), "student": mobile_net(width=settings.width, seed=1)}
    programs = {}
    work = {}
    for name, network in networks.items():
        exported = export_to_executorch(network.eval(), (image,), path=folder / f"{name}.pte")
        programs[name] = load_pte(exported.path)
        work[name] = multiply_adds(network, image)
    milliseconds = study.in_turns(programs, image, turns=settings.turns)
    return {"milliseconds": milliseconds, "multiply_adds": work}


# --- the run --------------------------------------------------------------------------------------


def measured(settings: Settings) -> Iterator[dict[str, Any]]:
    """What there is after each seed, and the times."""
    rows = []
    for seed in range(settings.seeds):
        rows.append(of_seed(seed, settings))
        yield {"seeds": rows}
    of_both = times(settings, runs_dir() / "image_students")
    yield {"times": of_both, "executorch": version("executorch")}


if __name__ == "__main__":
    study.run("image_students", Settings(), measured, about=__doc__)
