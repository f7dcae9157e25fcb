"""What short texts cannot say of notebook 04's recipes: their time, and the training, at length.

python -m benchmarks.long_texts

Forward and backward run through a few blocks, without the loss, on a text for which the recipes are
meant. Then a small model learns from fresh weights, plain and with the five lines, on texts of
several tiles. Products are in 16 bits where the machine has units for bf16.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import study
from recipes_lib.core.measure import in_turns
from recipes_lib.core.measure.free_memory import keep_freed_memory
from recipes_lib.core.measure.machine import machine, seed_everything
from recipes_lib.core.model import load_tokenizer, model_of_shape
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.nested_checkpointing import apply_nested_checkpointing
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp

Around = Callable[[], AbstractContextManager]  # what stands around forward and backward


@dataclass(frozen=True)
class Settings:
    """What is timed, and what learns."""

    shape: str = "smollm2-135m"
    tokens: int = 16_384  # of the text on the clock
    layers: int = 4  # on the clock: one group of nested checkpoints
    rounds: int = 3  # of turns
    learns: int = 4096  # tokens of a text that is learned: four tiles
    learning_layers: int = 6
    texts: int = 2  # that are learned, again and again
    steps: int = 10


# --- the ways: each changes a model, and says what stands around its step -------------------------


def plain(model: Any) -> Around:
    return contextlib.nullcontext


def checkpoints(model: Any) -> Around:
    model.activation_checkpointing_enable()
    return contextlib.nullcontext


def inputs_wait(model: Any) -> Around:
    """Checkpoints, whose inputs wait on the host, and on a CPU on the disk."""
    checkpoints(model)
    elsewhere = "host" if machine().device == "cuda" else "disk"
    return partial(offload_activations, model, to=elsewhere, in_flight=1)


def with_tiles(way: Callable[[Any], Around], model: Any) -> Around:
    """The MLP and the norms in tiles of the default size."""
    apply_tiled_mlp(model, norms=True, check=False)
    return way(model)


def nested(model: Any) -> Around:
    """All blocks are one group."""
    apply_nested_checkpointing(model, group=model.config.num_hidden_layers, check=False)
    return contextlib.nullcontext


def five_lines(model: Any) -> Around:
    apply_chunked_cross_entropy(model, check=False)
    return with_tiles(inputs_wait, model)


ON_THE_CLOCK = {
    "plain": plain,
    "checkpoints": checkpoints,
    "checkpoints, tiles": partial(with_tiles, checkpoints),
    "nested checkpoints, tiles": partial(with_tiles, nested),
    "offloaded inputs": inputs_wait,
    "offloaded inputs, tiles": partial(with_tiles, inputs_wait),
}
LEARNS = {
    "plain": (plain, study.in_16_bits),
    "five lines": (five_lines, study.in_16_bits),
    "plain, in fp32": (plain, contextlib.nullcontext),
}


# --- what is measured -----------------------------------------------------------------------------


def measured(settings: Settings) -> Iterator[dict[str, Any]]:
    """The times, and then the losses of each way."""
    turns = {name: turn_of(way, settings) for name, way in ON_THE_CLOCK.items()}
    for turn in turns.values():
        turn()
    took = in_turns(turns, rounds=settings.rounds)
    rows = [{"name": name, "seconds": seconds} for name, seconds in took.items()]
    content: dict[str, Any] = {"rows": rows, "losses": {}}
    yield content
    del turns
    texts = texts_of(settings)
    for name, (way, precision) in LEARNS.items():
        content["losses"][name] = learned(way, texts, settings, precision)
        yield content


def turn_of(way: Callable[[Any], Around], settings: Settings) -> Callable[[], None]:
    """Forward and backward through some blocks."""
    model = model_of_shape(settings.shape, layers=settings.layers).train()
    around = way(model)
    ids = torch.arange(settings.tokens, device=model.device)[None] % model.config.vocab_size

    def turn() -> None:
        with around():
            with study.in_16_bits():
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            hidden.sum().backward()
        model.zero_grad()

    return turn


def texts_of(settings: Settings) -> list[dict[str, torch.Tensor]]:
    """Batches of one real text [1, S] each."""
    tokenizer = load_tokenizer(settings.shape.removesuffix("-135m"))
    rows = study.text_rows(tokenizer, "validation", tokens=settings.learns, count=settings.texts)
    ids = [study.batch_of([row])["input_ids"] for row in rows]
    return [{"input_ids": each, "labels": each} for each in ids]


def learned(
    way: Callable[[Any], Around],
    texts: list[dict[str, torch.Tensor]],
    settings: Settings,
    precision: Callable[[], AbstractContextManager],
) -> list[float]:
    """The loss of each step."""
    seed_everything(0)
    model = model_of_shape(settings.shape, layers=settings.learning_layers).train()
    around = way(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    losses = []
    for step in range(settings.steps):
        with around():
            losses.append(study.train_step(model, optimizer, texts[step % len(texts)], precision))
    return losses


if __name__ == "__main__":
    keep_freed_memory()
    threads = os.cpu_count() or 1  # as the notebook
    study.run("long_texts", Settings(), measured, about=__doc__, threads=threads)
