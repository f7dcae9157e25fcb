"""Measure the recipes on this machine, in under ten minutes on one large GPU.

python -m benchmarks.gpu                                the first five parts, in the order below
python -m benchmarks.gpu --parts limits ladder
python -m benchmarks.gpu --parts finetune notebook_05   each such line a call of its own, under ten minutes
python -m benchmarks.gpu --parts attention loss rope notebook_04
python -m benchmarks.gpu --parts ablation               and likewise longest, context
python -m benchmarks.gpu --tier cpu --fast              the same code in small sizes, without a GPU

Each part runs in a process of its own under a time limit, and its numbers are kept as soon as it ends:
a part that fails or takes too long costs only itself.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import long_sequences
from benchmarks.finetune import Sizes, compare_updates, compare_ways
from benchmarks.record import RESULTS, keep, keep_ladder
from benchmarks.render import LADDERS
from benchmarks.versus import compare, pairs
from recipes_lib.core.machine import GIB, TIERS, fast, machine, provenance, runs_dir
from recipes_lib.core.measure import PeakMemory, measure
from recipes_lib.report.ladder import Ladder
from recipes_lib.workflows.bench.run import LR, Bench, techniques

ROOT = Path(__file__).resolve().parents[1]


def limits() -> dict[str, Any]:
    """What the device can do: bf16 matrix products and memory traffic. Shares of these are honest; x-fold is not."""
    n = 8192 if machine().device == "cuda" else 1024
    a, b = (torch.randn(n, n, device=machine().device, dtype=torch.bfloat16) for _ in range(2))
    product = measure(lambda: a @ b, warmup=3, repeats=10).seconds
    source = torch.empty(
        GIB // (1 if machine().device == "cuda" else 16), dtype=torch.uint8, device=machine().device
    )
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), warmup=3, repeats=10).seconds
    return {
        "bf16_tflops": 2 * n**3 / product / 1e12,
        "copy_gb_per_s": 2 * source.numel() / copy / 1e9,
    }


def notebook(name: str = LADDERS["01"]) -> dict[str, Any]:
    """Notebook 01 in the sizes of this tier; its source is a plain script."""
    runpy.run_path(str(ROOT / "notebooks" / "source" / f"{name}.py"), run_name="__main__")
    keep_ladder(runs_dir() / f"{name}.json", folder=out_dir())
    return {}


def notebook_05() -> dict[str, Any]:
    """Notebook 05, likewise."""
    return notebook(LADDERS["05"])


def notebook_04() -> dict[str, Any]:
    """Notebook 04, likewise."""
    return notebook(LADDERS["04"])


def keep_each(part: str, contents: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Keep what a part has whenever it has more."""
    for content in contents:
        keep(part, content, folder=out_dir())
    return {}


def attention() -> dict[str, Any]:
    """Attention of one layer at growing length: eager, and the best kernel."""
    return keep_each("attention", long_sequences.compare_attention(*long_size("attention")))


def loss() -> dict[str, Any]:
    """The loss over a large vocabulary, beside the libraries."""
    return keep_each("loss", long_sequences.compare_losses(*long_size("loss")))


def rope() -> dict[str, Any]:
    """SmolLM2 on texts longer than its training, with each RoPE scaling."""
    return keep_each("rope", long_sequences.stretched(*long_size("rope")))


def ablation() -> dict[str, Any]:
    """Full fine-tuning of an 8B shape on one card: which recipe brings how many tokens."""
    return keep_each("ablation", long_sequences.ablation(*long_size("ablation")))


def longest() -> dict[str, Any]:
    """One full-causal, full-parameter step of the 8B shape, as long as fits into ten minutes."""
    return keep_each("longest", long_sequences.longest_step(*long_size("longest")))


def context() -> dict[str, Any]:
    """QLoRA of the 8B shape under a 24 GB cap: the longest context."""
    return keep_each("context", long_sequences.qlora_context(*long_size("context")))


def long_size(part: str) -> tuple:
    return LONG["fast" if fast() else machine().tier][part]


def full_bench(*, at_once: int = 1) -> Bench:
    """The model of the full fine-tuning parts, in the size of this tier, with fewer layers if two are alive at once."""
    shape, layers, batch_size, seq_len = SIZES["fast" if fast() else machine().tier][0]
    return Bench(shape, batch_size, seq_len, micro_batches=batch_size, layers=layers // at_once)


def ladder() -> dict[str, Any]:
    """Peak bytes and tokens per second of each technique alone, against plain training."""
    bench, kept, failed = full_bench(), Ladder("benchmark_ladder"), {}
    names = ["baseline", *techniques()]
    if machine().device == "cpu":
        names.remove("optimizer_offload")  # refuses: the states are in host memory already
    for name in names:
        try:
            step, plan = getattr(bench, f"arrange_{name}")(bench.fresh())
            measured = measure(step, tokens=bench.batch_size * bench.seq_len, repeats=3)
            kept.add(name, measured, predicted=plan.peak, loss=measured.result)
            print(kept.line(name), flush=True)
        except (
            Exception
        ) as error:  # one technique that fails, for whatever reason, costs only its row
            failed[name] = f"{type(error).__name__}: {error}"
        step = None
        keep(
            "ladder", {"rows": [vars(row) for row in kept.rows], "failed": failed}, folder=out_dir()
        )
    return {}


def qlora() -> dict[str, Any]:
    """QLoRA of the largest shape for this tier under an emulated 24 GB card (16 GB on a smaller one)."""
    from recipes_lib.core.sizes import weight_bytes
    from recipes_lib.fine_tuning.qlora import apply_qlora
    from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
    from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
    from recipes_lib.training.gradient_accumulation import accumulate_gradients

    shape, layers, rows, tokens = SIZES["fast" if fast() else machine().tier][1]
    bench = Bench(shape, rows, tokens, micro_batches=rows, layers=layers, dtype=torch.bfloat16)
    # Random weights are drawn on the device and quantized there, which is outside the cap: a real load
    # streams them from disk.
    model = apply_activation_checkpointing(apply_qlora(bench.fresh(), rank=16))
    batch, optimizer = bench.batch(model), eight_bit_adamw(model, lr=LR)

    def step() -> float:
        loss = accumulate_gradients(model, batch, micro_batches=rows)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    cap = min(24 * 10**9, machine().memory_bytes)
    with PeakMemory(limit_bytes=cap):
        measured = measure(step, tokens=rows * tokens, repeats=1)
    return {
        "shape": shape,
        "tokens": rows * tokens,
        "cap_gib": cap / GIB,
        "weights_gib": weight_bytes(model) / GIB,
        "peak_gib": measured.peak_bytes / GIB,
        "tokens_per_second": measured.tokens_per_second,
    }


def versus() -> dict[str, Any]:
    """Each recipe in turns with the library that does the same: ratios of step time and peak."""
    results: dict[str, Any] = {}
    for technique, (ours, name, library) in pairs().items():
        try:
            found = compare(full_bench(at_once=2), ours, library, rounds=2 if fast() else 9)
        except Exception as error:  # one pair that fails, for whatever reason, costs only its row
            found = {"failed": f"{type(error).__name__}: {error}"}
        results[technique] = {"library": name} | found
        print(f"{technique} / {name}: {found}", flush=True)
        keep("versus", {"pairs": results}, folder=out_dir())
    return {}


def finetune() -> dict[str, Any]:
    """QLoRA of an 8B shape by our loop and by the Trainer, with and without Liger; AdamW's update in 8 bits."""
    content: dict[str, Any] = {}
    for content in compare_ways(SIZES["fast" if fast() else machine().tier][2]):
        keep("finetune", content, folder=out_dir())
    for updates in compare_updates(full_bench()):
        keep("finetune", content | updates, folder=out_dir())
    return {}


# shape, layers, batch, sequence of the full fine-tuning parts; shape, layers, rows, tokens of QLoRA; those of finetune
SIZES: dict[str, tuple[tuple, tuple, Sizes]] = {
    "fast": (
        ("tiny-llama", 4, 8, 64),
        ("tiny-llama", 4, 4, 32),
        Sizes("tiny-llama", 2, 3, 128, 2, 3, True),
    ),
    "cpu": (
        ("smollm2-135m", 30, 4, 64),
        ("smollm2-135m", None, 4, 64),
        Sizes("smollm2-135m", 4, 6, 256, 4, 4, False),
    ),
    "gpu16": (
        ("llama-3.2-1b", 6, 8, 256),
        ("llama-3.2-3b", None, 8, 512),
        Sizes("llama-3.2-3b", None, 6, 512, 4, 6, True),
    ),
    "gpu24": (
        ("llama-3.2-1b", 12, 8, 256),
        ("llama-3.1-8b", None, 8, 1024),
        Sizes("llama-3.1-8b", None, 8, 512, 6, 6, True),
    ),
    "gpu80": (
        ("llama-3.2-3b", 28, 8, 256),
        ("qwen2.5-32b", None, 8, 1024),
        Sizes("llama-3.1-8b", None, 12, 512, 8, 6, False),
    ),
}
# What the parts of notebook 04 are given: see the functions of long_sequences.
LONG: dict[str, dict[str, tuple]] = {
    "fast": {
        "attention": ("tiny-llama", [64, 128], 128),
        "loss": (128, 64, 1024),
        "rope": (300, 100, 1),
        "ablation": ("tiny-llama", 4, 8 * 2**20),
        "longest": ("tiny-llama", 4, 512),
        "context": ("tiny-llama", 4, 512, 4 * 2**20),
    },
    "cpu": {
        "attention": ("smollm2-135m", [1024, 2048, 4096, 8192, 16384], 4096),
        "loss": (2048, 576, 49152),
        "rope": (12288, 1024, 1),
        "ablation": ("smollm2-135m", 4, GIB),
        "longest": ("smollm2-135m", None, 2048),
        "context": ("smollm2-135m", 4, 8192, 400 * 2**20),
    },
    "gpu16": {
        "attention": ("llama-3.2-1b", [1024, 4096, 16384], 4096),
        "loss": (4096, 2048, 128256),
        "rope": (14336, 1024, 3),
        "ablation": ("llama-3.2-1b", 4, 13 * 10**9),
        "longest": ("llama-3.2-1b", 4, 65536),
        "context": ("llama-3.2-1b", None, 65536, 14 * 10**9),
    },
    "gpu24": {
        "attention": ("llama-3.1-8b", [1024, 4096, 16384, 65536], 8192),
        "loss": (8192, 4096, 128256),
        "rope": (16384, 1024, 4),
        "ablation": ("llama-3.2-1b", None, 21 * 10**9),
        "longest": ("llama-3.2-1b", None, 131072),
        "context": ("llama-3.1-8b", None, 65536, 23 * 10**9),
    },
    "gpu80": {
        "attention": ("llama-3.1-8b", [1024, 4096, 16384, 65536], 16384),
        "loss": (8192, 4096, 128256),
        "rope": (16384, 1024, 8),
        "ablation": ("llama-3.1-8b", None, 76 * 10**9),
        "longest": ("llama-3.1-8b", None, 393216),
        "context": ("llama-3.1-8b", None, 262144, 24 * 10**9),
    },
}
FOR_04 = (attention, loss, rope, notebook_04, ablation, longest, context)
PARTS = {
    part.__name__: part
    for part in (limits, notebook, ladder, versus, qlora, finetune, notebook_05, *FOR_04)
}
# Seconds that each part may take; every line is a call of its own, under ten minutes together.
CALLS: list[dict[str, int]] = [
    {"limits": 30, "notebook": 210, "ladder": 120, "versus": 120, "qlora": 110},
    {"finetune": 300, "notebook_05": 280},
    {"attention": 60, "loss": 60, "rope": 60, "notebook_04": 400},
    *({part: 590} for part in ("ablation", "longest", "context")),
]
SECONDS = {part: seconds for call in CALLS for part, seconds in call.items()}
DEFAULT = list(CALLS[0])


def out_dir() -> Path:
    """Small sizes prove that the code runs; they do not belong beside real results."""
    return Path(
        os.environ.get("RECIPES_RESULTS") or (runs_dir() / "results" if fast() else RESULTS)
    )


def main() -> None:
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
    parser.add_argument(
        "--here", action="store_true", help=argparse.SUPPRESS
    )  # one part, in this process
    options = parser.parse_args()
    if options.here:
        name = options.parts[0]
        if machine().device == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32: what a careful user of fp32 has
        content = PARTS[name]()
        if content:
            keep(name, content, folder=out_dir())
        return
    if options.tier:
        os.environ["RECIPES_TIER"] = options.tier
    if options.fast:
        os.environ["RECIPES_FAST"] = "1"
    print(machine())
    # Tensors of many sizes, each a large part of the card: without it the gaps between them are lost.
    environment, failed = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ, []
    for name in options.parts:
        start = time.perf_counter()
        print(f"\n== {name}: {(PARTS[name].__doc__ or '').splitlines()[0]}", flush=True)
        command = [sys.executable, "-m", "benchmarks.gpu", "--here", "--parts", name]
        # A CPU run has no ten-minute limit to keep.
        limit = SECONDS[name] if machine().device == "cuda" else 1800
        try:
            subprocess.run(command, check=True, cwd=ROOT, timeout=limit, env=environment)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed.append(name)
            print(f"-- {name} failed: {error}", flush=True)
        print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"\nresults in {out_dir()}, commit {provenance()['commit']}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
