"""ZeRO by DeepSpeed itself, from the files in launch/deepspeed: the same stages, other details.

    engine = apply_deepspeed(model, torch.optim.AdamW, config=config_file("zero2"), rows=4, lr=1e-4)
    loss = deepspeed_step(engine, batches)

DeepSpeed lays all parameters end to end and cuts that row into N equal parts. It keeps an fp32 copy
of its part, the master weights of bf16, even if the model is fp32. P bytes of fp32 weights, AdamW:

    stage   weights   gradients   masters   states
    1       P         P           P / N     2 P / N
    2       P         P / N       P / N     2 P / N
    3       P / N     P / N       P / N     2 P / N    and small parameters whole, on every rank

In (N-1) / N x P bytes, a rank sends 3 per step in stages 1 and 2, for all gradients are averaged on
all ranks (`"use_multi_rank_bucket_allreduce": false` makes it 2), and 2 in stage 3: see below.

What it does without a word, and what is done about it here:

    it compiles        Its own all-reduce for CPUs and its optimizers, for minutes. Here both are
                       PyTorch's.
    stage 3 keeps      Up to 1,000,000,000 numbers that stage 3 has gathered stay whole until
                       backward. With `stage3_max_live_parameters` and `stage3_max_reuse_distance` 0
                       they are split: it saves memory, and sends 3.
    a mean of means    It averages over ranks and micro-batches, whatever their tokens are.
                       `deepspeed_step` undoes both.
    another count      `engine.step()` counts micro-batches by itself. With another number of them
                       than was configured, it steps in the middle of the next batch.

TRAPS.md has its large defaults, which "auto" in the files replaces. Under accelerate and the
Trainer, launch/guards.py sees whether DeepSpeed trains on all ranks.
DeepSpeed is optional: `DS_ACCELERATOR=cpu pip install deepspeed` installs it without a compiler.

Source: DeepSpeed, "DeepSpeed Configuration JSON"; Rajbhandari et al., arXiv 1910.02054.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.model.bytes_of_tensors import storage_bytes
from recipes_lib.core.model.causal_lm import require_causal_lm, without_adapters
from recipes_lib.core.ranks import rank, world_size
from recipes_lib.core.ranks.agreement import agree, same_error_on_all_ranks
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.weighted_step import Batch, sum_of_losses, tokens_of_all_ranks

FOLDER = Path(__file__).resolve().parents[3] / "launch" / "deepspeed"
AUTO = "auto"


def config_file(name: str) -> Path:
    """The file of DeepSpeed's configuration that we ship, such as "zero2" or "zero3_offload"."""
    check_choice(sorted(path.stem for path in FOLDER.glob("*.json")), name=name)
    return FOLDER / f"{name}.json"


def apply_deepspeed(
    model: Any,
    optimizer_class: type[torch.optim.Optimizer],
    *,
    config: Path | str | dict[str, Any],
    rows: int,
    micro_batches: int = 1,
    max_norm: float | None = None,
    **optimizer_options: Any,
) -> Any:
    """DeepSpeed's engine around `model`, for `deepspeed_step`. It starts with rank 0's weights.

    Args:
        optimizer_class: of PyTorch, such as torch.optim.AdamW.
        config: a JSON file, or what is in it. "auto" stands for what the other arguments say.
        rows: of one micro-batch of one rank.
        micro_batches: of one step.
        max_norm: clip the gradients of all ranks together to this norm.
        optimizer_options: of the optimizer, such as lr.
    """
    # First of all, so that no rank waits for one that has raised.
    with same_error_on_all_ranks():
        if not isinstance(config, dict):
            config = json.loads(Path(config).read_text(encoding="utf-8"))
    agree(
        model=model,
        config=config,
        optimizer=optimizer_class,
        options=optimizer_options,
        numbers=(rows, micro_batches, max_norm),
    )
    require_causal_lm(model)
    check_whole(rows=rows, micro_batches=micro_batches)
    device = next(model.parameters()).device
    filled = filled_config(config, model, rows=rows, micro_batches=micro_batches, max_norm=max_norm)
    deepspeed = _import_deepspeed(device)
    if device.type == "cpu":
        _without_pinned_memory(filled)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer_class(trained, **optimizer_options)
    with _no_deprecations():
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=filled)
    return engine


def deepspeed_step(engine: Any, batches: Sequence[Batch]) -> float:
    """One step on this rank's micro-batches `batches`, each token weighing the same.

    Returns the mean loss over all tokens of all ranks, the same on every rank.
    """
    tokens = tokens_of_all_ranks(batches)
    configured = engine.gradient_accumulation_steps()
    if len(batches) != configured:
        raise ValueError(
            f"{len(batches)} micro-batches, and the engine steps after {configured}: give as many, "
            f"or micro_batches={len(batches)} to apply_deepspeed"
        )
    weight = world_size() / tokens
    own_sum = 0.0
    with _no_deprecations():
        for batch in batches:
            loss = sum_of_losses(engine, batch)
            # DeepSpeed would divide by the number of micro-batches once more.
            engine.backward(loss * weight, scale_wrt_gas=False)
            engine.step()  # does nothing before the last one
            own_sum += loss.detach()
    (loss_of_all,) = sums_over_ranks(float(own_sum))
    return loss_of_all / tokens


def filled_config(
    config: dict[str, Any],
    model: Any,
    *,
    rows: int,
    micro_batches: int = 1,
    max_norm: float | None = None,
) -> dict[str, Any]:
    """A copy of DeepSpeed's `config` with a number for each "auto", as by the Trainer."""
    stage = config.get("zero_optimization", {}).get("stage")  # DeepSpeed takes none for 0
    check_choice((1, 2, 3), stage=stage)
    if "optimizer" in config:
        raise ValueError(
            "the configuration names an optimizer of DeepSpeed, which it would compile: remove "
            "`optimizer`, and give a class of PyTorch"
        )
    filled = copy.deepcopy(config)
    hidden = without_adapters(model).config.get_text_config().hidden_size
    numbers = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": micro_batches,
        "train_batch_size": rows * micro_batches * world_size(),
        "gradient_clipping": max_norm or 0.0,  # 0 does not clip
    }
    of_zero = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    of_bf16 = {"enabled": model.dtype == torch.bfloat16}
    _fill_auto(filled, numbers)
    _fill_auto(filled["zero_optimization"], of_zero)
    _fill_auto(filled.get("bf16", {}), of_bf16)
    return filled


def held_bytes(engine: Any) -> dict[str, int]:
    """Bytes of weights, fp32 masters and states that this rank of DeepSpeed keeps between steps."""
    parameters = list(engine.module.parameters())
    split = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    zero = engine.optimizer
    masters = getattr(zero, "single_partition_of_fp32_groups", None)
    if masters is None:  # stage 3
        masters = zero.fp32_partitioned_groups_flat
    states = []
    for state in zero.optimizer.state.values():
        states += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return {
        "weights": storage_bytes([*parameters, *split]),
        "masters": storage_bytes(masters),
        "states": storage_bytes(states),
    }


# --- guards, and what DeepSpeed needs to be told --------------------------------------------------


def _fill_auto(place: dict[str, Any], numbers: dict[str, Any]) -> None:
    for name, number in numbers.items():
        if place.get(name) == AUTO:
            place[name] = number


def _import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed for this device, without the code that it would compile at the start."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Its launcher would set it. Ranks of one machine have their own number there.
    os.environ.setdefault("LOCAL_RANK", str(rank()))
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _without_pinned_memory(config: dict[str, Any]) -> None:
    """DeepSpeed pins memory for copies to a GPU. Without one there is none."""
    for name in ("offload_optimizer", "offload_param"):
        place = config["zero_optimization"].get(name)
        if place is not None:
            place["pin_memory"] = False


@contextlib.contextmanager
def _no_deprecations() -> Iterator[None]:
    """Without PyTorch's warnings of the names by which DeepSpeed calls collectives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        yield
