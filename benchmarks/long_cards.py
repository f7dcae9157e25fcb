"""The longest text on a card, by model and method: predicted without a card, with a few blocks.

python -m benchmarks.long_cards    some minutes of one core, no weights and no GPU

Each step runs twice over tensors without data, in two ways: with the two switches that every
library has, and with every recipe for length. With few blocks it says exactly what all of them
need, and a line through two lengths says where a card is full.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch

from benchmarks.long_steps import LEAST_BYTES, RANK, elsewhere, made_up_ids
from benchmarks.record import keep
from recipes_lib.attention.flash import apply_flash_attention
from recipes_lib.attention.head_groups import apply_head_groups
from recipes_lib.core.measure.machine import GIB, seed_everything
from recipes_lib.core.model import SHAPES, model_of_shape
from recipes_lib.core.predict import CARDS, Build, Card
from recipes_lib.core.predict.any_size import any_size
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.memory.activation_offload import offload_activations
from recipes_lib.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.pure_bf16 import bf16_adamw

MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
METHODS = ("full", "QLoRA")
WAYS = ("switches", "every recipe")
# The kernels of all three are the same. Of 16 and of 24 GB a card that leaves little.
ROOMS = {"16 GB": "RTX 4080", "24 GB": "L4", "80 GB": "A100-80GB"}
FILLED = 0.95  # of a card: holes between tensors take the rest
FEW = (2, 3)  # blocks
TILE = 4096  # tokens of a tile
# Tokens. What does not fit with the fewest, no recipe for length mends. In the others the text is
# the peak, and bytes lie on a line.
LENGTHS = (512, 4 * TILE, 16 * TILE)


def build_of(
    shape: str, method: str, way: str, *, layers: int, tokens: int, tile: int = TILE
) -> Build:
    """`build` of `core.predict`: weights in bf16, and 16-bit or 8-bit states."""
    return partial(_build, shape, method, way, layers, tokens, tile)


def _build(
    shape: str, method: str, way: str, layers: int, tokens: int, tile: int
) -> tuple[Any, Any, Any]:
    seed_everything(0)
    model = model_of_shape(shape, layers=layers, dtype=torch.bfloat16, device="cpu")
    if method == "QLoRA":
        model = apply_qlora(model, rank=RANK)
        for parameter in model.parameters():
            if parameter.requires_grad:
                # Beside adapters in fp32 each layer would keep its input in fp32 as well.
                parameter.data = parameter.data.to(torch.bfloat16)
    apply_flash_attention(model)
    if way == "every recipe":
        apply_chunked_cross_entropy(model)
        apply_tiled_mlp(model, tile_size=min(tile, tokens), norms=True)
        apply_head_groups(model)
    apply_activation_checkpointing(model)
    optimizer = _optimizer(model, method, way)
    return model, optimizer, partial(_step, tokens=tokens, offload=way == "every recipe")


def _optimizer(model: Any, method: str, way: str) -> Any:
    if method == "QLoRA":
        return eight_bit_adamw(model, lr=1e-4)
    adamw = partial(bf16_adamw, rounding="stochastic")
    if way == "every recipe":
        return apply_optimizer_in_backward(model, optimizer_class=adamw, lr=1e-5)
    return adamw(model.parameters(), lr=1e-5)


def _step(model: Any, optimizer: Any, *, tokens: int, offload: bool) -> None:
    ids = made_up_ids(model, tokens)
    surroundings = contextlib.nullcontext()
    if offload:
        away = {"to": elsewhere(model), "min_bytes": LEAST_BYTES, "in_flight": 0}
        surroundings = offload_activations(model, **away)
    with surroundings:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def room_of(card: Card) -> float:
    """Bytes of a card that tensors may take."""
    return FILLED * card.for_tensors - 2 * card.workspace


class Lengths:
    """The bytes of one step at any length, each length asked once."""

    def __init__(self, shape: str, method: str, way: str, *, tile: int = TILE) -> None:
        self.layers = SHAPES[shape].layers
        self.shape = shape
        self.way = way
        self._build_at = partial(build_of, shape, method, way, tile=tile)
        self._known: dict[int, dict[str, int]] = {}

    def at(self, tokens: int) -> dict[str, int]:
        """The bytes at the peak by kind."""
        if tokens not in self._known:
            step = any_size(partial(self._build_at, tokens=tokens), layers=FEW, card=CARDS["L4"])
            self._known[tokens] = step.at(layers=self.layers)
        return self._known[tokens]

    def peak(self, tokens: int) -> int:
        """The bytes at the peak."""
        return sum(self.at(tokens).values())

    def longest(self, room: float) -> int:
        """The longest text within `room` bytes; 0 if not even the shortest of LENGTHS fits."""
        shortest, middle, long = LENGTHS
        if self.peak(shortest) > room:
            return 0
        few, more = (shortest, middle) if self.peak(middle) > room else (middle, long)
        per_token = (self.peak(more) - self.peak(few)) / (more - few)
        return int(few + (room - self.peak(few)) / per_token)

    def breaks_first(self, room: float) -> str:
        """What grows most with the text where the card is full."""
        if self.longest(room) == 0:
            return "weights and states"
        if self.way == "every recipe":
            return "one block"  # the loss comes in chunks, and the inputs of blocks are away
        _, middle, long = LENGTHS
        per_token = (self.peak(long) - self.peak(middle)) / (long - middle)
        # Logits, and what softmax makes of them, in fp32.
        logits = 4 * 2 * SHAPES[self.shape].vocabulary
        return "logits" if logits > per_token / 2 else "one block"


def main() -> None:
    """Predict all of it, and keep it."""
    rows = []
    for shape in MODELS:
        for method in METHODS:
            for way in WAYS:
                lengths = Lengths(shape, method, way)
                row = {"name": f"{shape}, {method}, {way}", "short_bytes": lengths.peak(LENGTHS[0])}
                for size, card in ROOMS.items():
                    room = room_of(CARDS[card])
                    row[size] = {
                        "longest": lengths.longest(room),
                        "first": lengths.breaks_first(room),
                    }
                rows.append(row)
                print(row, flush=True)
    settings = {"cards": ROOMS, "filled": FILLED, "rank": RANK, "tile": TILE, "few": FEW[0]}
    settings["room_gib"] = {size: room_of(CARDS[card]) / GIB for size, card in ROOMS.items()}
    print(keep("long_cards", settings | {"rows": rows}))


if __name__ == "__main__":
    main()
