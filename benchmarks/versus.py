"""Each recipe beside the library that does the same: step time in turns, peak bytes, and the loss.

A pair is (recipe, library); each side takes a model and a `Bench` and returns (step, close). Both sides train
the same random weights on the same batch, so their losses must agree, and the time is a ratio measured in turns.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import torch

from recipes_lib.core.data import IGNORED
from recipes_lib.core.machine import machine
from recipes_lib.core.measure import in_turns, measure
from recipes_lib.workflows.bench.run import LR, Bench

Side = Callable[[Any, Bench], tuple[Callable[[], float], Callable[[], None]]]


def recipe(technique: str) -> Side:
    """Our side is the arrangement that `python -m recipes_lib bench` measures."""

    def side(model: Any, bench: Bench) -> tuple[Callable[[], float], Callable[[], None]]:
        step, _ = getattr(bench, f"arrange_{technique}")(model)
        return step, lambda: None

    return side


def trainer_accumulation(
    model: Any, bench: Bench
) -> tuple[Callable[[], float], Callable[[], None]]:
    """The loop of `transformers.Trainer`: the model divides by the tokens of the whole batch."""
    batch, optimizer = bench.batch(model), torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    tokens = (batch["labels"][:, 1:] != IGNORED).sum()

    def step() -> float:
        total = torch.zeros((), device=tokens.device)
        for i in range(bench.micro_batches):
            micro = {name: tensor.chunk(bench.micro_batches)[i] for name, tensor in batch.items()}
            loss = model(**micro, use_cache=False, num_items_in_batch=tokens).loss
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step, lambda: None


def transformers_checkpointing(
    model: Any, bench: Bench
) -> tuple[Callable[[], float], Callable[[], None]]:
    model.train()  # without this, transformers does not checkpoint
    # The newer name came in transformers 5.2x; the older one warns there. Both default to use_reentrant=False.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return bench.plain(model), lambda: None


def torch_save_on_cpu(model: Any, bench: Bench) -> tuple[Callable[[], float], Callable[[], None]]:
    step = bench.plain(model)

    def offloaded() -> float:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return step()

    return offloaded, lambda: None


def tutorial_step_in_backward(
    model: Any, bench: Bench
) -> tuple[Callable[[], float], Callable[[], None]]:
    """PyTorch's tutorial: one optimizer per parameter, called by a hook. The hooks keep the model until removed."""
    optimizers = {p: torch.optim.AdamW([p], lr=LR, fused=True) for p in model.parameters()}
    batch = bench.batch(model)

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]

    def step() -> float:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return loss.item()

    return step, lambda: [hook.remove() for hook in hooks]


def torchao_offload(model: Any, bench: Bench) -> tuple[Callable[[], float], Callable[[], None]]:
    from torchao.optim import CPUOffloadOptimizer

    parameters = list(model.parameters())
    optimizer = CPUOffloadOptimizer(
        parameters, torch.optim.AdamW, offload_gradients=True, fused=True, lr=LR
    )

    def close() -> None:  # its hooks refer to it, and so to the model and its pinned copy
        for parameter in parameters:
            parameter._post_accumulate_grad_hooks = None

    return bench.plain(model, optimizer), close


def pairs() -> dict[str, tuple[Side, str, Side]]:
    """What can be compared on this machine: technique -> (recipe, name of the library's way, library)."""
    found = {
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
        found["activation_offload"] = ("torch save_on_cpu(pin_memory=True)", torch_save_on_cpu)
        if importlib.util.find_spec("torchao"):
            found["optimizer_offload"] = ("torchao CPUOffloadOptimizer", torchao_offload)
    return {
        technique: (recipe(technique), name, library)
        for technique, (name, library) in found.items()
    }


def compare(bench: Bench, ours: Side, library: Side, *, rounds: int = 9) -> dict[str, Any]:
    """Peaks one after the other; then both models side by side, one step each in turns, for the ratio of times."""
    sides, steps, closers = {"recipe": ours, "library": library}, {}, []
    peaks, losses = {}, {}
    for who, side in sides.items():
        peaks[who], losses[who] = _peak_and_loss(bench, side)
    if abs(losses["recipe"] - losses["library"]) > 1e-2:
        raise ValueError(
            f"the two do not train the same, so their times say nothing: losses {losses}"
        )
    try:
        for who, side in sides.items():
            steps[who], close = side(bench.fresh(), bench)
            closers.append(close)
            steps[who]()  # makes AdamW's states
        seconds = in_turns(steps, rounds=rounds)
    finally:
        for close in closers:
            close()
    return {
        "seconds": {who: statistics.median(values) for who, values in seconds.items()},
        "time_ratio": statistics.median(
            a / b for a, b in zip(seconds["recipe"], seconds["library"], strict=True)
        ),
        "peak_bytes": peaks,
        "peak_ratio": peaks["recipe"] / peaks["library"],
        "loss": losses,
    }


def _peak_and_loss(bench: Bench, side: Side) -> tuple[int, float]:
    """Of the third step: AdamW's states exist, and two updates lie behind it."""
    step, close = side(bench.fresh(), bench)
    try:
        measured = measure(step, warmup=2, repeats=0)
        return measured.peak_bytes, measured.result
    finally:
        close()
        del step
        gc.collect()
