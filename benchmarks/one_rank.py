"""What one GPU can show of training on many: every strategy of notebook 02 on one rank, with NCCL.

A part of `benchmarks.gpu`. One rank sends nothing to others, so what is left of a strategy is what
it costs by itself: wrappers, copies into buckets, gathers of shards that are whole already. And the
bytes that it keeps are those of the plan for one rank. What several ranks gain is in notebook 02.

Each function yields its content whenever there is more of it, so that a part which is cut keeps
what it has.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from recipes_lib.architecture.mixture_of_experts import (
    Grouped,
    apply_grouped_experts,
    small_mixture,
)
from recipes_lib.core.measure import in_turns
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model.mixing import take_out
from recipes_lib.core.ranks.rank_pool import RankPool
from recipes_lib.core.ranks.rank_run import RankRun
from recipes_lib.workflows.on_ranks import demonstrations, libraries
from recipes_lib.workflows.on_ranks.plans import plan_of
from recipes_lib.workflows.on_ranks.strategies import STRATEGIES
from recipes_lib.workflows.on_ranks.train import small_llama, train_on_ranks

NEED_FOUR = ("HSDP", "FSDP × TP")  # grids of ranks
ON_ONE = [name for name in STRATEGIES if name not in NEED_FOUR]
THREADS = 8  # beside a GPU: with one, the weights of a large model are drawn for a long time
SECONDS = 120.0  # for one strategy; a rank that hangs ends its row

Sizes = dict[str, int]


def strategies(*, sizes: Sizes, rows: int, tokens: int, steps: int) -> Iterator[dict[str, Any]]:
    """Every strategy on one rank: bytes that are kept, predicted and measured, and seconds.

    Args:
        sizes: of the model, see `on_ranks.train.small_llama`.
        rows: of the batch of a step.
        tokens: of a row.
        steps: three or more; the first two warm up.
    """
    batch = {"rows": rows, "tokens": tokens}
    model = small_llama(sizes=sizes, tokens=tokens)
    content: dict[str, Any] = {"sizes": sizes, **batch, "parameters": model.num_parameters()}
    content["strategies"] = {}
    reference: list[float] = []
    with _pool() as pool:
        for name in ON_ONE:
            options = {"strategy": name, "sizes": sizes, "steps": steps, **batch}
            run = _or_failed(partial(pool.run, train_on_ranks, timeout=SECONDS, **options))
            if isinstance(run, RankRun):
                plan = plan_of(name, model, ranks=1, **batch).kept
                reference = reference or run.losses  # those of the first row
                run = _row(run, plan.total, reference)
            content["strategies"][name] = run
            yield content


def by_libraries(*, sizes: Sizes, rows: int, tokens: int, steps: int) -> Iterator[dict[str, Any]]:
    """DeepSpeed, QLoRA on shards, and a checkpoint in the foreground and in the background."""
    content: dict[str, Any] = {"sizes": sizes, "rows": rows, "tokens": tokens}
    training = {"sizes": sizes, "rows": rows, "tokens": tokens, "steps": steps, "timeout": SECONDS}
    with _pool() as pool, tempfile.TemporaryDirectory() as folder:
        save = {"folder": folder, "sizes": sizes, "tokens": tokens, "timeout": SECONDS}
        qlora = partial(pool.run, libraries.train_quantized, **training)
        deepspeed = partial(pool.run, libraries.train_with_deepspeed, **training)
        measurements: dict[str, Callable[[], Any]] = {
            "QLoRA, whole": partial(qlora, shards=False),
            "QLoRA, shards": partial(qlora, shards=True),
            "checkpoint": partial(pool.run, demonstrations.stalls_of_a_save, **save),
            "DeepSpeed 1": partial(deepspeed, stage=1),
            "DeepSpeed 2": partial(deepspeed, stage=2),
            "DeepSpeed 3": partial(deepspeed, stage=3),
        }
        for name, measured in measurements.items():
            content[name] = _or_failed(measured)
            yield content


def experts(
    *, hidden: int, width: int, experts: int, layers: int, rows: int, tokens: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """A step of a mixture of experts: the loop of transformers against the grouped product.

    Args:
        hidden: the width of the model.
        width: of an expert.
        experts: in each block; two of them are active.
    """
    device = machine().device
    model = small_mixture(hidden=hidden, expert_width=width, experts=experts, layers=layers)
    model = model.to(device)
    model.set_experts_implementation("eager")  # the loop, and not the library's grouped product
    ids = torch.randint(0, model.config.vocab_size, (rows, tokens), device=device)
    content: dict[str, Any] = {"parameters": model.num_parameters(), "tokens": rows * tokens}
    content |= {"experts": experts, "ways": {}}

    def step() -> float:
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=machine().native_bf16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.item()

    def grouped() -> float:
        apply_grouped_experts(model)
        loss = step()
        take_out(model, Grouped)
        return loss

    ways = {"loop": step, "grouped": grouped}
    losses = {name: way() for name, way in ways.items()}  # they warm up, too
    for name, seconds in in_turns(ways, rounds=rounds).items():
        content["ways"][name] = {
            "loss": losses[name],
            "seconds": statistics.median(seconds),
            "spread": [min(seconds), max(seconds)],
        }
    yield content


# --- what the functions share ---------------------------------------------------------------------


def _pool() -> RankPool:
    device = machine().device
    threads = 1
    if device == "cuda":
        threads = min(THREADS, machine().cores)
    return RankPool(ranks=1, device=device, threads=threads)


def _row(run: Any, predicted: int, reference: list[float]) -> dict[str, Any]:
    pairs = zip(run.losses, reference, strict=True)
    return {
        "kept_bytes": run.parameters + run.gradients + run.states,
        "predicted_bytes": predicted,
        "seconds": statistics.median(run.seconds),
        "losses": run.losses,
        "difference": max(abs(loss - other) for loss, other in pairs),
        "calls": run.calls,
    }


def _or_failed(measured: Callable[[], Any]) -> Any:
    """What was measured. A row that fails costs only itself."""
    try:
        return measured()
    except Exception as error:
        last = str(error).strip().splitlines()[-1:]
        return {"failed": f"{type(error).__name__}: {' '.join(last)}"}
