"""Measure the recipes on this machine, in under ten minutes on one large GPU.

python -m benchmarks.gpu                             the first five parts, in the order below
python -m benchmarks.gpu --parts limits ladder
python -m benchmarks.gpu --tier cpu --fast           the same code in small sizes, without a GPU

Other parts, each of these lines a call of its own, under ten minutes:

python -m benchmarks.gpu --parts notebook_05
python -m benchmarks.gpu --parts rope notebook_04
python -m benchmarks.gpu --parts notebook_02         on four GPUs or more
python -m benchmarks.gpu --parts longest             and likewise context

Each part runs in a process of its own under a time limit, and its numbers are kept as soon as it
ends: a part that fails or takes too long costs only itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.parts import PARTS, out_dir
from recipes_lib.core.measure.machine import TIERS, machine
from recipes_lib.core.measure.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]

# Seconds that each part may take. Every line is a call of its own, under ten minutes together.
CALLS: list[dict[str, int]] = [
    {"limits": 30, "notebook": 210, "ladder": 120, "versus": 120, "qlora": 110},
    {"notebook_05": 580},
    {"rope": 60, "notebook_04": 520},
    {"notebook_02": 590},
    {"longest": 590},
    {"context": 590},
]
SECONDS = {part: seconds for call in CALLS for part, seconds in call.items()}
DEFAULT = list(CALLS[0])
# A CPU has no ten minutes to keep. The limit only ends what hangs.
SECONDS_ON_A_CPU = 3600

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
    try:
        subprocess.run(command, check=True, cwd=ROOT, timeout=limit, env=environment)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"-- {part} failed: {error}", flush=True)
        return False
    return True


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
        title, *_ = PARTS[part].__doc__.splitlines()
        print(f"\n== {part}: {title}", flush=True)
        if not run_apart(part):
            failed.append(part)
        print(f"-- {part}: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"\nresults in {out_dir()}, commit {provenance()['commit']}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
