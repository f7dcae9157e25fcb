"""Each recipe beside the library that does the same: step time in turns, peak bytes, and the loss.

Each side takes a fresh model and a `Bench`, and gives its step. Both sides train the same random
weights on the same batch, so their losses must agree, and the time is a ratio measured in turns.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from recipes_lib.core.data import IGNORED
from recipes_lib.core.measure import in_turns, measure
from recipes_lib.core.measure.free_memory import release_memory
from recipes_lib.core.measure.machine import machine
from recipes_lib.workflows.bench.run import LR, Bench

LOSS_TOLERANCE = 1e-2  # two ways that train the same differ by rounding only


def nothing() -> None:
    """Most sides leave nothing behind."""


@dataclass(frozen=True)
class Side:
    """A step that trains and returns its loss, and `close`, which frees what holds the model."""

    step: Callable[[], float]
    close: Callable[[], None] = nothing


Arrange = Callable[[Any, Bench], Side]


@dataclass(frozen=True)
class Pair:
    """A recipe, and the library that does the same."""

    recipe: Arrange
    library_name: str
    library: Arrange


# --- our side -----------------------------------------------------------------------------------


def recipe(technique: str) -> Arrange:
    """Our side is the entry that `python -m recipes_lib bench` measures."""

    def arrange(model: Any, bench: Bench) -> Side:
        model, optimizer, step = bench.arrange(technique, model)
        return Side(partial(step, model, optimizer))

    return arrange


# --- the libraries' side ------------------------------------------------------------------------


def trainer_accumulation(model: Any, bench: Bench) -> Side:
    """The loop of `transformers.Trainer`: the model divides by the tokens of the whole batch."""
    batch = bench.batch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    # A label is the target of the token before it, so the first one of a row is never a target.
    tokens = (batch["labels"][:, 1:] != IGNORED).sum()

    def step() -> float:
        total = torch.zeros((), device=tokens.device)
        for index in range(bench.micro_batches):
            micro_batch = {k: rows.chunk(bench.micro_batches)[index] for k, rows in batch.items()}
            loss = model(**micro_batch, use_cache=False, num_items_in_batch=tokens).loss
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return Side(step)


def transformers_checkpointing(model: Any, bench: Bench) -> Side:
    """The library's own checkpointing, with use_reentrant=False by default."""
    model.train()  # without this, transformers does not checkpoint
    model.activation_checkpointing_enable()
    return Side(bench.plain(model))


def torch_save_on_cpu(model: Any, bench: Bench) -> Side:
    """PyTorch's own offload of activations."""
    plain_step = bench.plain(model)

    def step() -> float:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return plain_step()

    return Side(step)


def tutorial_step_in_backward(model: Any, bench: Bench) -> Side:
    """PyTorch's tutorial: one optimizer per parameter, called by a hook."""
    batch = bench.batch(model)
    optimizers = {}
    for parameter in model.parameters():
        optimizers[parameter] = torch.optim.AdamW([parameter], lr=LR, fused=True)

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]

    def step() -> float:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return loss.item()

    def close() -> None:  # the hooks keep the model until they are removed
        for hook in hooks:
            hook.remove()

    return Side(step, close)


def torchao_offload(model: Any, bench: Bench) -> Side:
    """torchao's AdamW, with states and gradients in host memory."""
    from torchao.optim import CPUOffloadOptimizer

    parameters = list(model.parameters())
    optimizer = CPUOffloadOptimizer(
        parameters, torch.optim.AdamW, offload_gradients=True, fused=True, lr=LR
    )

    def close() -> None:  # its hooks refer to it, and so to the model and its pinned copy
        for parameter in parameters:
            parameter._post_accumulate_grad_hooks = None

    return Side(bench.plain(model, optimizer), close)


# --- both sides ---------------------------------------------------------------------------------


def pairs() -> dict[str, Pair]:
    """What can be compared on this machine, by technique."""
    libraries = {
        "gradient_accumulation": ("transformers, num_items_in_batch", trainer_accumulation),
        "activation_checkpointing": (
            "transformers activation_checkpointing_enable",
            transformers_checkpointing,
        ),
        "optimizer_in_backward": (
            "PyTorch tutorial, a hook per parameter",
            tutorial_step_in_backward,
        ),
    }
    if machine().device == "cuda":
        libraries["activation_offload"] = ("torch save_on_cpu(pin_memory=True)", torch_save_on_cpu)
        if importlib.util.find_spec("torchao"):
            libraries["optimizer_offload"] = ("torchao CPUOffloadOptimizer", torchao_offload)
    found = {}
    for technique, (name, arrange) in libraries.items():
        found[technique] = Pair(recipe(technique), name, arrange)
    return found


def compare(bench: Bench, ours: Arrange, library: Arrange, *, rounds: int = 9) -> dict[str, Any]:
    """Peaks one after the other; then both models side by side, one step each in turns.

    The ratio of times is the median over the rounds. Raises ValueError if the losses differ: then
    the two do not train the same.
    """
    sides = {"recipe": ours, "library": library}
    peaks = {}
    losses = {}
    for who, arrange in sides.items():
        peaks[who], losses[who] = _peak_and_loss(bench, arrange)
    if abs(losses["recipe"] - losses["library"]) > LOSS_TOLERANCE:
        raise ValueError(
            f"the two do not train the same, so their times say nothing: losses {losses}"
        )
    seconds = _seconds_in_turns(bench, sides, rounds)
    ratios = [a / b for a, b in zip(seconds["recipe"], seconds["library"], strict=True)]
    return {
        "seconds": {who: statistics.median(values) for who, values in seconds.items()},
        "time_ratio": statistics.median(ratios),
        "peak_bytes": peaks,
        "peak_ratio": peaks["recipe"] / peaks["library"],
        "loss": losses,
    }


def _peak_and_loss(bench: Bench, arrange: Arrange) -> tuple[int, float]:
    """Of the third step: AdamW's states exist, and two updates lie behind it."""
    side = arrange(bench.fresh(), bench)
    try:
        measured = measure(side.step, warmup=2, repeats=0)
        return measured.peak_bytes, measured.result
    finally:
        side.close()
        del side
        release_memory()


def _seconds_in_turns(
    bench: Bench, sides: dict[str, Arrange], rounds: int
) -> dict[str, list[float]]:
    open_sides = []
    steps = {}
    try:
        for who, arrange in sides.items():
            side = arrange(bench.fresh(), bench)
            open_sides.append(side)
            steps[who] = side.step
            side.step()  # makes AdamW's states
        return in_turns(steps, rounds=rounds)
    finally:
        for side in open_sides:
            side.close()
