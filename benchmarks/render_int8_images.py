"""The run of `benchmarks.int8_images` in the texts: tables, the block of a notebook, and a cell.

Times are those of one image on one thread. A ratio is the time of fp32 over that of 8 bits in the
same turn: the median of the turns, and in brackets where their middle half lies.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import turns
from benchmarks.int8_images import FP32, INT8, WAYS, ratios
from benchmarks.record import machine_line
from benchmarks.table_text import line, table

Run = dict[str, Any]

KINDS = {
    "first": "the first convolution",
    "depthwise": "depthwise convolutions",
    "1 x 1": "1 × 1 convolutions",
    "other": "the rest",
}

# --- tables -------------------------------------------------------------------------------------


def times(run: Run | None) -> str:
    """Milliseconds and ratios at each size. Nothing where no run is recorded."""
    if run is None:
        return ""
    lines = []
    for row in run["times"]:
        cells = [f"{row['pixels']} × {row['pixels']}"]
        for way in (FP32, INT8):
            cells.append(f"{statistics.median(row['milliseconds'][way]):.2f}")
        cells += [turns.in_words(ratios(row, way)) for way in WAYS]
        lines.append(line(cells))
    settings = run["settings"]
    notes = [
        f"{machine_line(run)}, ONNX Runtime {run['onnxruntime']}. MobileNetV2 of width "
        f"{run['width']}, one image on one thread, {settings['turns']} turns. Ratios: time of fp32 "
        f"over that of 8 bits in the same turn, the median; in brackets is the middle half of the "
        f"turns."
    ]
    columns = ["image", "fp32, ms", "8 bits, ms", "ratio"]
    columns += ["first layer in 8 bits as well", "one scale per layer"]
    return table(columns, lines, notes)


def layers(run: Run | None) -> str:
    """Where the time goes in fp32 and in 8 bits. Nothing where no run is recorded."""
    if run is None:
        return ""
    before = run["layers"][FP32]
    after = run["layers"][INT8]
    lines = []
    for kind, words in KINDS.items():
        lines.append(
            line(
                [
                    words,
                    _share(before, kind),
                    _share(after, kind),
                    f"{before[kind] / after[kind]:.2f}×",
                ]
            )
        )
    notes = [
        f"{machine_line(run)}, ONNX Runtime {run['onnxruntime']}. {run['pixels']} × "
        f"{run['pixels']} pixels, by the profile of {run['settings']['forwards']} forwards. The "
        f"rest has the sums and the steps into 8 bits and back; fp32 sums inside a convolution.",
    ]
    return table(["layers", "fp32", "8 bits", "time of fp32 to 8 bits"], lines, notes)


def both(run: Run | None) -> str:
    """The two tables, one below the other."""
    if run is None:
        return ""
    return f"{times(run)}\n\n{layers(run)}"


# --- a notebook ---------------------------------------------------------------------------------


def block(run: Run | None) -> str:
    """The tables below the sentences that say what came out."""
    if run is None:
        return ""
    after = run["layers"][INT8]
    depthwise = after["depthwise"] / sum(after.values())
    return (
        f"{in_words(run)} of {run['settings']['test']:,} digits. The 1 × 1 convolutions gain "
        f"{_gain(run, '1 x 1'):.1f}×, for an instruction sums four of their products. A depthwise "
        f"convolution sums over no channels, and gains {_gain(run, 'depthwise'):.1f}×: in 8 bits "
        f"it is {depthwise:.0%} of the time."
        f"\n\n{both(run)}"
    )


def in_words(run: Run) -> str:
    """Speed and accuracy of the trained network, for a sentence or a cell."""
    row = next(each for each in run["times"] if each["pixels"] == run["pixels"])
    files = run["accuracy"]["files"]
    speed = turns.in_words(ratios(row, INT8))
    return (
        f"MobileNetV2 at {run['pixels']} × {run['pixels']} pixels: {speed} as fast in 8 bits, "
        f"{files[INT8]['accuracy']:.2%} right instead of {files[FP32]['accuracy']:.2%}"
    )


def _gain(run: Run, kind: str) -> float:
    return run["layers"][FP32][kind] / run["layers"][INT8][kind]


def _share(of_kinds: dict[str, float], kind: str) -> str:
    """Milliseconds, and the part of all."""
    share = of_kinds[kind] / sum(of_kinds.values())
    return f"{of_kinds[kind] / 1000:.2f} ms ({share:.0%})"
