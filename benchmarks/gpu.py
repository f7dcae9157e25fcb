"""Measure the recipes on this machine's GPU: `make gpu`.

python -m benchmarks.gpu                             notebook 01
python -m benchmarks.gpu --parts versus qlora        recipes beside libraries
python -m benchmarks.gpu --parts notebook_05
python -m benchmarks.gpu --parts rope notebook_04
python -m benchmarks.gpu --parts notebook_02         on four GPUs or more
python -m benchmarks.gpu --parts lengths             and likewise longest, context
python -m benchmarks.gpu --tier cpu --fast           the same code in small sizes, without a GPU

Each of these lines takes less than ten minutes on one large GPU. Each part runs in a process of its
own under a time limit, and its numbers are kept as soon as it ends: a part that fails or takes too
long costs only itself. The sizes are in `sizes`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import long_steps
from benchmarks.card_lengths import card_lengths
from benchmarks.record import RESULTS, keep, keep_run
from benchmarks.rope import stretched
from benchmarks.sizes import size_of
from benchmarks.versus import compare, pairs
from recipes_lib.core.measure import PeakMemory, measure
from recipes_lib.core.measure.machine import GIB, TIERS, fast, machine
from recipes_lib.core.measure.provenance import provenance, runs_dir
from recipes_lib.core.model.bytes_of_tensors import weight_bytes
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.training.gradient_accumulation import accumulate_gradients
from recipes_lib.workflows.bench.run import LR, Bench

ROOT = Path(__file__).resolve().parents[1]
# Seconds that each part may take. Every line is a call of its own, under ten minutes together.
CALLS: list[dict[str, int]] = [
    {"notebook_01": 590},
    {"versus": 300, "qlora": 290},
    {"notebook_05": 580},
    {"rope": 60, "notebook_04": 520},
    {"notebook_02": 590},
    {"lengths": 400},
    {"longest": 590},
    {"context": 590},
]
SECONDS = {part: seconds for call in CALLS for part, seconds in call.items()}
DEFAULT = list(CALLS[0])
# A CPU has no ten minutes to keep. The limit only ends what hangs.
SECONDS_ON_A_CPU = 3600

# --- the parts ----------------------------------------------------------------------------------


def notebook(number: str) -> None:
    """Run a notebook in the sizes of this tier, and keep its ladder: its source is a script."""
    if number == "02" and machine().device == "cuda" and torch.cuda.device_count() < 4:
        # With fewer its ranks run on the CPU, and a CPU's times do not belong to a GPU.
        print("left out: notebook 02 wants four GPUs")
        return
    (source,) = (ROOT / "notebooks" / "source").glob(f"{number}_*.py")
    runpy.run_path(str(source), run_name="__main__")
    keep_run(runs_dir() / f"{source.stem}.json", folder=out_dir())


def versus() -> None:
    """Each recipe in turns with the library that does the same: ratios of step time and peak."""
    rounds = 2 if fast() else 9
    sizes = size_of("full")
    rows = sizes["batch_size"]
    half = sizes["layers"] // 2  # both models are alive at once while they take turns
    bench = Bench(sizes["shape"], rows, sizes["seq_len"], micro_batches=rows, layers=half)
    results: dict[str, Any] = {}
    for technique, pair in pairs().items():
        try:
            found = compare(bench, pair.recipe, pair.library, rounds=rounds)
        except Exception as error:  # one pair that fails costs only its row
            found = {"failed": f"{type(error).__name__}: {error}"}
        results[technique] = {"library": pair.library_name} | found
        print(f"{technique} / {pair.library_name}: {found}", flush=True)
        keep("versus", {"pairs": results}, folder=out_dir())


def qlora() -> None:
    """QLoRA of the largest shape for this tier, as on a card of 24 GB (16 GB on a smaller one)."""
    sizes = size_of("qlora")
    rows = sizes["rows"]
    on = {"micro_batches": rows, "layers": sizes["layers"], "dtype": torch.bfloat16}
    bench = Bench(sizes["shape"], rows, sizes["tokens"], **on)
    # Random weights are drawn on the device and quantized there, which is outside the cap: a real
    # load streams them from disk.
    model = apply_activation_checkpointing(apply_qlora(bench.fresh(), rank=16))
    batch = bench.batch(model)
    optimizer = eight_bit_adamw(model, lr=LR)

    def step() -> None:
        accumulate_gradients(model, batch, micro_batches=rows)
        optimizer.step()
        optimizer.zero_grad()

    cap = min(24 * 10**9, machine().memory_bytes)
    with PeakMemory(limit_bytes=cap):
        step()  # makes the states; under the limit too, as every step on such a card
        peak = measure(step, warmup=0, repeats=0).peak_bytes
    # The limit looks at every operator, which takes time: on the clock the step runs without it.
    seconds = measure(step, warmup=0, repeats=1).seconds
    found = {"weights_gib": weight_bytes(model) / GIB, "peak_gib": peak / GIB}
    found |= {"cap_gib": cap / GIB, "tokens_per_second": rows * sizes["tokens"] / seconds}
    keep("qlora", {"shape": sizes["shape"]} | found, folder=out_dir())


def long_part(name: str, measured: Callable[..., Iterator[dict[str, Any]]]) -> None:
    """Keep what such a part has whenever it has more."""
    for content in measured(**size_of(name)):
        keep(name, content, folder=out_dir())


PARTS: dict[str, Callable[[], None]] = {
    "notebook_01": partial(notebook, "01"),
    "versus": versus,
    "qlora": qlora,
    "notebook_05": partial(notebook, "05"),
    "rope": partial(long_part, "rope", stretched),
    "notebook_04": partial(notebook, "04"),
    "notebook_02": partial(notebook, "02"),
    "lengths": partial(long_part, "lengths", card_lengths),
    "longest": partial(long_part, "longest", long_steps.longest_step),
    "context": partial(long_part, "context", long_steps.qlora_context),
}


def out_dir() -> Path:
    """Small sizes prove that the code runs; they do not belong beside real results."""
    wanted = os.environ.get("RECIPES_RESULTS")
    if wanted:
        return Path(wanted)
    if fast():
        return runs_dir() / "results"
    return RESULTS


# --- the command --------------------------------------------------------------------------------


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=DEFAULT, metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--tier", choices=TIERS, help="run as another kind of machine")
    parser.add_argument(
        "--fast", action="store_true", help="small sizes; the numbers go to runs/results"
    )
    # How the command calls itself: one part, in this process.
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_here(part: str) -> None:
    """Measure one part in this process."""
    if machine().device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: what a careful user of fp32 has
    PARTS[part]()


def run_apart(part: str) -> bool:
    """Measure one part in a process of its own, under its time limit. False if it failed."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--here", "--parts", part]
    # Tensors of many sizes, each a large part of the card: without it gaps between them are lost.
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ
    limit = SECONDS_ON_A_CPU
    if machine().device == "cuda":
        limit = SECONDS[part]
    start = time.time()
    try:
        subprocess.run(command, check=True, cwd=ROOT, timeout=limit, env=environment)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"-- {part} failed: {error}", flush=True)
        keep_what_was_measured(part, since=start)
        return False
    return True


def keep_what_was_measured(part: str, *, since: float) -> None:
    """Of a notebook that was cut: its ladder writes each row as soon as it is measured."""
    number = part.removeprefix("notebook_")
    for path in runs_dir().glob(f"{number}_*.json"):
        if path.stat().st_mtime > since:
            keep_run(path, folder=out_dir(), cut=f"it was cut after {time.time() - since:.0f} s")


def main(arguments: list[str]) -> None:
    """Run the parts one after the other. Exits with an error that names those which failed."""
    options = options_of(arguments)
    if options.here:
        run_here(options.parts[0])
        return
    # The parts read the sizes from the environment, which they inherit.
    if options.tier:
        os.environ["RECIPES_TIER"] = options.tier
    if options.fast:
        os.environ["RECIPES_FAST"] = "1"
    print(machine())
    failed = []
    for part in options.parts:
        start = time.perf_counter()
        print(f"\n== {part}", flush=True)
        if not run_apart(part):
            failed.append(part)
        print(f"-- {part}: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"\nresults in {out_dir()}, commit {provenance()['commit']}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
