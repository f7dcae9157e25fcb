"""docs/long-card.md: does a step of 262,144 tokens of QLoRA on an 8B model fit a card of 24 GB?

python -m benchmarks.long_card    some minutes of one core, no weights and no GPU

The step is that of the part `context` of `make gpu`. Here it runs on tensors without data with a
few blocks, which say exactly what all of them need.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.long_steps import RANK, qlora_build
from benchmarks.record import keep
from recipes_lib.core.measure.machine import GIB
from recipes_lib.core.model import SHAPES
from recipes_lib.core.predict import CARDS
from recipes_lib.core.predict.any_size import AnySize, any_size

SHAPE = "llama-3.1-8b"
TOKENS = 262_144
TILE = 4096
CARD = "L4"  # of 24 GB that with the least memory
FEW = (4, 5)  # blocks: with fewer, none is fetched while backward is in another
WAYS = {
    "all heads at once, fetched ahead": {"in_groups": False, "in_flight": 1},
    "in groups, fetched ahead": {"in_groups": True, "in_flight": 1},
    "in groups, fetched when needed": {"in_groups": True, "in_flight": 0},
}


def step_of(
    *, in_groups: bool, in_flight: int, shape: str = SHAPE, tokens: int = TOKENS
) -> AnySize:
    """The step with any number of blocks."""
    how = {"in_groups": in_groups, "in_flight": in_flight, "tile": min(TILE, tokens)}
    on = {"dtype": torch.bfloat16, "device": "cpu"}
    build_of = partial(qlora_build, shape, tokens=tokens, **how, **on)
    return any_size(build_of, layers=FEW, card=CARDS[CARD])


def main() -> None:
    """Predict the step in each way, and keep it."""
    layers = SHAPES[SHAPE].layers
    rows = []
    for name, how in WAYS.items():
        found = step_of(**how).at(layers=layers)
        rows.append({"name": name, "peak_bytes": sum(found.values()), "at_peak_bytes": found})
        print(name, f"{rows[-1]['peak_bytes'] / GIB:.2f} GiB", flush=True)
    settings = {"few": FEW[0], "tokens": TOKENS, "tile": TILE, "rank": RANK, "blocks": layers}
    settings |= {"card": CARD, "room_bytes": CARDS[CARD].for_tensors}
    print(keep("long_card", settings | {"rows": rows}))


if __name__ == "__main__":
    main()
