"""The parts of `benchmarks.gpu`: each measures one thing, and keeps what it has by itself.

What is beside a library, or long, is in files of its own: `versus`, `rope`, `long_steps`. The
arguments of all parts are in `sizes`.
"""

from __future__ import annotations

import contextlib
import os
import runpy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import long_steps
from benchmarks.record import RESULTS, keep, keep_run
from benchmarks.rope import stretched
from benchmarks.sizes import size_of
from benchmarks.versus import compare, pairs
from recipes_lib.core.measure import PeakMemory, measure
from recipes_lib.core.measure.free_memory import release_memory
from recipes_lib.core.measure.machine import GIB, fast, machine
from recipes_lib.core.measure.provenance import runs_dir
from recipes_lib.core.model.sizes import weight_bytes
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.report.ladders.memory import MemoryLadder
from recipes_lib.training.gradient_accumulation import accumulate_gradients
from recipes_lib.workflows.bench.run import LR, Bench, techniques

ROOT = Path(__file__).resolve().parents[1]

# --- the parts ----------------------------------------------------------------------------------


def limits() -> None:
    """What the device can do: bf16 matrix products and memory traffic.

    Shares of these are honest; x-fold is not.
    """
    device = machine().device
    n = 1024
    copied_bytes = GIB // 16
    if device == "cuda":
        n = 8192
        copied_bytes = GIB

    left = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    right = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    product = measure(lambda: left @ right, warmup=3, repeats=10).seconds

    source = torch.empty(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), warmup=3, repeats=10).seconds

    operations = 2 * n**3  # a multiplication and an addition per element of each dot product
    traffic = 2 * copied_bytes  # read and written
    content = {
        "bf16_tflops": operations / product / 1e12,
        "copy_gb_per_s": traffic / copy / 1e9,
    }
    keep("limits", content, folder=out_dir())


def notebook() -> None:
    """Notebook 01 in the sizes of this tier; its source is a plain script."""
    run_notebook("01")


def notebook_02() -> None:
    """Notebook 02, likewise, on a machine with four GPUs or more.

    With fewer its ranks run on the CPU, and a CPU's times do not belong to a GPU.
    """
    if machine().device == "cuda" and torch.cuda.device_count() < 4:
        print("left out: notebook 02 wants four GPUs")
        return
    run_notebook("02")


def notebook_04() -> None:
    """Notebook 04, likewise."""
    run_notebook("04")


def notebook_05() -> None:
    """Notebook 05, likewise."""
    run_notebook("05")


def ladder() -> None:
    """Peak bytes and tokens per second of each technique alone, against plain training."""
    bench = full_bench()
    kept = MemoryLadder("benchmark_ladder")
    failed: dict[str, str] = {}
    names = ["baseline", *techniques()]
    if machine().device == "cpu":
        names.remove("optimizer_offload")  # refuses: the states are in host memory already
    for name in names:
        try:
            model, optimizer, step = bench.arrange(name, bench.fresh())
            predicted = None
            with contextlib.suppress(ValueError):  # what has none says so in its file
                predicted = bench.predict(name).peak
            tokens = bench.batch_size * bench.seq_len
            measured = measure(partial(step, model, optimizer), tokens=tokens, repeats=3)
            kept.add(name, measured, predicted=predicted, loss=measured.result)
            print(kept.line(name), flush=True)
        except Exception as error:  # one technique that fails costs only its row
            failed[name] = f"{type(error).__name__}: {error}"
        # Its model would be alive beside the next: hooks of parameters refer to it in a cycle.
        model = optimizer = step = None
        release_memory()
        rows = [vars(row) for row in kept.rows]
        keep("ladder", {"rows": rows, "failed": failed}, folder=out_dir())


def versus() -> None:
    """Each recipe in turns with the library that does the same: ratios of step time and peak."""
    rounds = 9
    if fast():
        rounds = 2
    results: dict[str, Any] = {}
    for technique, pair in pairs().items():
        try:
            # Both models are alive at once while they take turns.
            found = compare(full_bench(at_once=2), pair.recipe, pair.library, rounds=rounds)
        except Exception as error:  # one pair that fails costs only its row
            found = {"failed": f"{type(error).__name__}: {error}"}
        results[technique] = {"library": pair.library_name} | found
        print(f"{technique} / {pair.library_name}: {found}", flush=True)
        keep("versus", {"pairs": results}, folder=out_dir())


def qlora() -> None:
    """QLoRA of the largest shape for this tier, as on a card of 24 GB (16 GB on a smaller one)."""
    sizes = size_of("qlora")
    rows = sizes["rows"]
    tokens = rows * sizes["tokens"]
    bench = Bench(
        sizes["shape"],
        rows,
        sizes["tokens"],
        micro_batches=rows,
        layers=sizes["layers"],
        dtype=torch.bfloat16,
    )
    # Random weights are drawn on the device and quantized there, which is outside the cap: a real
    # load streams them from disk.
    model = apply_activation_checkpointing(apply_qlora(bench.fresh(), rank=16))
    batch = bench.batch(model)
    optimizer = eight_bit_adamw(model, lr=LR)

    def step() -> float:
        loss = accumulate_gradients(model, batch, micro_batches=rows)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    cap = min(24 * 10**9, machine().memory_bytes)
    with PeakMemory(limit_bytes=cap):
        step()  # makes the states; under the limit too, as every step on such a card
        peak = measure(step, warmup=0, repeats=0).peak_bytes
    # The limit looks at every operator, which takes time: on the clock the step runs without it.
    timed = measure(step, tokens=tokens, warmup=0, repeats=1)
    content = {
        "shape": sizes["shape"],
        "tokens": tokens,
        "cap_gib": cap / GIB,
        "weights_gib": weight_bytes(model) / GIB,
        "peak_gib": peak / GIB,
        "tokens_per_second": timed.tokens_per_second,
    }
    keep("qlora", content, folder=out_dir())


def rope() -> None:
    """SmolLM2 on texts longer than its training, with each RoPE scaling."""
    keep_each("rope", stretched(**size_of("rope")))


def longest() -> None:
    """One full-causal, full-parameter step of the 8B shape, as long as fits into ten minutes."""
    keep_each("longest", long_steps.longest_step(**size_of("longest")))


def context() -> None:
    """QLoRA of the 8B shape under a 24 GB cap: the longest context."""
    keep_each("context", long_steps.qlora_context(**size_of("context")))


# --- what the parts share -----------------------------------------------------------------------


def out_dir() -> Path:
    """Small sizes prove that the code runs; they do not belong beside real results."""
    wanted = os.environ.get("RECIPES_RESULTS")
    if wanted:
        return Path(wanted)
    if fast():
        return runs_dir() / "results"
    return RESULTS


def keep_each(part: str, contents: Iterator[dict[str, Any]]) -> None:
    """Keep what a part has whenever it has more."""
    for content in contents:
        keep(part, content, folder=out_dir())


def run_notebook(number: str) -> None:
    """Run the source of a notebook, and keep its ladder."""
    (source,) = (ROOT / "notebooks" / "source").glob(f"{number}_*.py")
    runpy.run_path(str(source), run_name="__main__")
    keep_run(runs_dir() / f"{source.stem}.json", folder=out_dir())


def full_bench(*, at_once: int = 1) -> Bench:
    """The model of the full fine-tuning parts, in the size of this machine.

    Args:
        at_once: so many models will be alive together, each with its share of the layers.
    """
    sizes = size_of("full")
    return Bench(
        sizes["shape"],
        sizes["batch_size"],
        sizes["seq_len"],
        micro_batches=sizes["batch_size"],
        layers=sizes["layers"] // at_once,
    )


# --- the table of parts -------------------------------------------------------------------------

PARTS: dict[str, Callable[[], None]] = {
    "limits": limits,
    "notebook": notebook,
    "ladder": ladder,
    "versus": versus,
    "qlora": qlora,
    "notebook_05": notebook_05,
    "rope": rope,
    "notebook_04": notebook_04,
    "notebook_02": notebook_02,
    "longest": longest,
    "context": context,
}
