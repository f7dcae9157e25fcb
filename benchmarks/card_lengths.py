"""The longest texts that notebook 04 promises on a card of 24 GB, as real steps on a larger card.

A part of `benchmarks.gpu`. The allocator gets no more memory than the small card has for tensors,
so a length that is too long fails here as it does there. Seconds are those of the large card.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.long_steps import made_up_ids
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.free_memory import release_memory
from recipes_lib.core.measure.machine import machine, seed_everything, synchronize
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict.card import CARDS
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.precision.pure_bf16 import bf16_adamw
from recipes_lib.workflows.out_of_memory_doctor.longest_texts import (
    CHECKPOINTS,
    CHECKPOINTS_AND_CHUNKS,
    FIVE_LINES,
    longest_text,
)

METHODS = {"all weights": "step in backward", "QLoRA": "QLoRA"}
STACKS = {
    "checkpoints": CHECKPOINTS,
    "chunked loss": CHECKPOINTS_AND_CHUNKS,
    "five lines": FIVE_LINES,
}
FEW = 64  # tokens of the step that makes the states


def card_lengths(
    *, shapes: tuple[str, ...], card: str, most: int, cut: bool = False
) -> Iterator[dict[str, Any]]:
    """One step of each length of the table, under the memory of `card`, a key of `CARDS`.

    Args:
        most: tokens. Longer steps take minutes, and are left out.
        cut: take `most` tokens of them instead, for tests.
    """
    rows: list[dict[str, Any]] = []
    room = CARDS[card].for_tensors
    for shape in shapes:
        for method, recipe in METHODS.items():
            weightless = model_of_shape(shape, dtype=torch.bfloat16, device="meta")
            promised = {
                name: longest_text(weightless, card=card, stack=(*stack, recipe))
                for name, stack in STACKS.items()
            }
            if min(promised.values()) < FEW:  # the table has a dash there
                continue
            if cut:
                promised = {name: min(tokens, most) for name, tokens in promised.items()}
            promised = {name: tokens for name, tokens in promised.items() if tokens <= most}
            for name, row in steps_of(shape, method, promised, room=room):
                rows.append({"name": f"{shape}, {method}, {name}"} | row)
                print(rows[-1], flush=True)
                yield {"card": card, "room_bytes": room, "rows": rows}


def steps_of(
    shape: str, method: str, promised: dict[str, int], *, room: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The steps of one model, each of a fresh one: who ran out of memory leaves half a step."""
    for name, tokens in promised.items():
        model, optimizer = trained_by(method, shape)
        model.activation_checkpointing_enable()
        if name in ("chunked loss", "five lines"):
            apply_chunked_cross_entropy(model, check=False)
        if name == "five lines":
            apply_tiled_mlp(model, norms=True, check=False)
        one_step = partial(step, model, optimizer, method, away=name == "five lines")
        yield name, {"tokens": tokens, **under(room, one_step, tokens)}
        del model, optimizer, one_step
        release_memory()


def trained_by(method: str, shape: str) -> tuple[Any, Any]:
    """The model in bf16 on the GPU, and what trains it: the lines of notebook 04."""
    seed_everything(0)
    model = model_of_shape(shape, dtype=torch.bfloat16).train()
    if method == "all weights":
        rounded = partial(bf16_adamw, rounding="stochastic")
        return model, apply_optimizer_in_backward(model, optimizer_class=rounded, lr=2e-5)
    model = apply_qlora(model, compute_dtype=torch.bfloat16)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(adapters, lr=1e-4)


def step(model: Any, optimizer: Any, method: str, tokens: int, *, away: bool) -> None:
    ids = made_up_ids(model, tokens)
    around: Any = contextlib.nullcontext()
    if away:
        # A CPU has no other memory than its own.
        elsewhere = "host" if model.device.type == "cuda" else "disk"
        around = offload_activations(model, to=elsewhere, in_flight=1)
    autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=method == "QLoRA")
    with around:
        with autocast:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def under(room: int, one_step: Callable[[int], None], tokens: int) -> dict[str, Any]:
    """Peak bytes and seconds of a step, with `room` bytes for the allocator of a GPU."""
    one_step(FEW)
    release_memory()
    seconds = None
    with allocator_of(room), PeakMemory() as memory:
        start = time.perf_counter()
        with contextlib.suppress(torch.OutOfMemoryError):
            one_step(tokens)
            synchronize()
            seconds = time.perf_counter() - start
    found = {"fits": seconds is not None, "peak_bytes": memory.peak, "seconds": seconds}
    if machine().device == "cuda":
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


@contextlib.contextmanager
def allocator_of(room: int) -> Iterator[None]:
    """Inside, PyTorch's allocator of this machine's GPU gets no more than `room` bytes."""
    if machine().device != "cuda":
        yield
        return
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / machine().memory_bytes))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
