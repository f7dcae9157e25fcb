"""The longest texts that notebook 04 promises on a card of 24 GB, as real steps on a larger card.

python -m benchmarks.gpu --parts lengths     on the larger card
python -m benchmarks.card_lengths            what is predicted of these steps; minutes of one core

The allocator gets no more memory than the small card has for tensors, so a length that is too long
fails here as it does there. Seconds are those of the large card.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.long_steps import made_up_ids
from benchmarks.record import keep, newest
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.dry_run import pretends_a_card
from recipes_lib.core.measure.free_memory import release_memory
from recipes_lib.core.measure.machine import GIB, machine, seed_everything, synchronize
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import CARDS, Build, predict
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.precision.pure_bf16 import bf16_adamw
from recipes_lib.workflows.out_of_memory_doctor.longest_texts import (
    ALL_SWITCHES,
    CHECKPOINTS,
    CHECKPOINTS_AND_CHUNKS,
    FIVE_LINES,
    longest_text,
)

METHODS = {"all weights": "step in backward", "QLoRA": "QLoRA"}
STACKS = {
    "checkpoints": CHECKPOINTS,
    "chunked loss": CHECKPOINTS_AND_CHUNKS,
    "all switches": ALL_SWITCHES,
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
        for method in METHODS:
            promised = promised_lengths(shape, method, card)
            if min(promised.values()) < FEW:  # the table has a dash there
                continue
            if cut:
                promised = {name: min(tokens, most) for name, tokens in promised.items()}
            for stack, tokens in promised.items():
                if tokens > most:
                    continue
                found = under(room, build_of(shape, method, stack, tokens))
                rows.append({"name": f"{shape}, {method}, {stack}", "tokens": tokens} | found)
                print(rows[-1], flush=True)
                yield {"card": card, "room_bytes": room, "rows": rows}


def promised_lengths(shape: str, method: str, card: str) -> dict[str, int]:
    """The four lengths of an entry of the notebook's table, by the name of their stack."""
    model = model_of_shape(shape, dtype=torch.bfloat16, device="meta")
    return {
        name: longest_text(model, card=card, stack=(*stack, METHODS[method]))
        for name, stack in STACKS.items()
    }


def build_of(shape: str, method: str, stack: str, tokens: int) -> Build:
    """The step of the notebook's lines on a text of so many tokens, or of as many as it gets."""

    def step(model: Any, optimizer: Any, tokens: int = tokens) -> None:
        ids = made_up_ids(model, tokens)
        around: Any = contextlib.nullcontext()
        if "activation offload" in STACKS[stack]:
            # A CPU has no other memory than its own.
            on_a_card = model.device.type == "cuda" or pretends_a_card()
            around = offload_activations(model, to="host" if on_a_card else "disk", in_flight=1)
        autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=method == "QLoRA")
        with around:
            with autocast:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def build() -> tuple[Any, Any, Any]:
        seed_everything(0)
        model, optimizer = trained_by(method, shape)
        model.activation_checkpointing_enable()
        if "loss in chunks" in STACKS[stack]:
            apply_chunked_cross_entropy(model, check=False)
        if "tiled MLP" in STACKS[stack]:
            apply_tiled_mlp(model, norms=True, check=False)
        return model, optimizer, step

    return build


def trained_by(method: str, shape: str) -> tuple[Any, Any]:
    """The model in bf16 on the device, and what trains it."""
    model = model_of_shape(shape, dtype=torch.bfloat16).train()
    if method == "all weights":
        rounded = partial(bf16_adamw, rounding="stochastic")
        return model, apply_optimizer_in_backward(model, optimizer_class=rounded, lr=2e-5)
    model = apply_qlora(model, compute_dtype=torch.bfloat16)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(adapters, lr=1e-4)


def under(room: int, build: Build) -> dict[str, Any]:
    """Peak bytes and seconds of a step, with `room` bytes for the allocator of a GPU.

    Each step has a fresh model: who ran out of memory leaves half a step.
    """
    model, optimizer, step = build()
    take: Callable[..., None] = partial(step, model, optimizer)
    take(tokens=FEW)
    release_memory()
    seconds = None
    with allocator_of(room), PeakMemory() as memory:
        start = time.perf_counter()
        with contextlib.suppress(torch.OutOfMemoryError):
            take()
            synchronize()
            seconds = time.perf_counter() - start
    found = {"fits": seconds is not None, "peak_bytes": memory.peak, "seconds": seconds}
    del model, optimizer, step, take
    release_memory()
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


# --- what is predicted of them --------------------------------------------------------------------


def main() -> None:
    """Predict each step that a GPU has taken, on that card without having it, and keep it."""
    run = newest("lengths", gpu=True)
    (card,) = (each for each in CARDS.values() if each.name in run.machine)
    rows = []
    for name, row in run.rows.items():
        shape, method, stack = name.split(", ")
        found = predict(build_of(shape, method, stack, int(row["tokens"])), card=card)
        rows.append({"name": name, "predicted_bytes": found.allocated})
        off = found.allocated / row["peak_bytes"] - 1
        print(f"{name:<40} {found.allocated / GIB:.2f} GiB, off by {off:+.2%}", flush=True)
        keep("lengths_predicted", {"rows": rows})


if __name__ == "__main__":
    main()
