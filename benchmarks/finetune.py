"""QLoRA by our loop and by `transformers.Trainer`, and what an AdamW update costs.

Every way trains a model of its own, of the same random weights, on the same real pairs of unequal
length, with the loss on their answers, with or without Liger's kernels. A step of a padded way
takes `documents` pairs, each padded to the longest; a step of a packed way takes `packs` rows of
`max_tokens`, filled with whole pairs. The row of a way holds

    tokens_per_second   of text: padding does not count
    peak_bytes          of tensors on the device, weights included
    losses              in nats per target, one per step: ways of one layout must agree
    before_bytes        alive before the way began: what another had left would count in its peak

and a row of `updates` the `seconds` of one `optimizer.step()` and the bytes of states per
parameter. The Trainer gets our batches, without attention mask, which is kinder to it than its own
padding, and its time excludes making them.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from recipes_lib.core.data import Batch, load_instructions
from recipes_lib.core.data.chat import IGNORED, Row
from recipes_lib.core.measure import PeakMemory, measure
from recipes_lib.core.measure.machine import machine, require, seed_everything
from recipes_lib.core.measure.memory import release_memory
from recipes_lib.core.model import SHAPES, load_tokenizer, model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.sizes import state_bytes
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.mixed_precision import NAMES
from recipes_lib.training.sequence_packing import (
    check_document_mask,
    pack_sequences,
    padded_tokens,
)
from recipes_lib.workflows.bench.run import LR, Bench
from recipes_lib.workflows.finetune.libraries import hf_trainer
from recipes_lib.workflows.finetune.loop import (
    Step,
    adapt,
    micro_batches,
    rows_of_optimizer_step,
    training_steps,
)
from recipes_lib.workflows.finetune.settings import Settings

TOLERANCE = 0.02  # nats between losses: 16-bit sums in another order
PAD = 0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the ways are given."""

    shape: str
    layers: int | None
    documents: int  # pairs of a padded step
    max_tokens: int  # of a pair, and of a packed row
    packs: int  # packed rows of a step
    steps: int
    gradient_checkpointing: bool  # of every way; the Trainer has its own


@dataclasses.dataclass(frozen=True)
class Way:
    """Who trains, on which layout of the rows, after which changes to the adapted model."""

    train: Callable[..., Sequence[Step]]
    layout: str
    changes: tuple[Callable[[Any, Batch], None], ...] = ()


# --- the ways -----------------------------------------------------------------------------------


def ways(sizes: Sizes) -> dict[str, Way]:
    """The most important first: a time limit cuts off the last."""
    found = {
        "Trainer": Way(hf_trainer, "padded"),
        "ours": Way(our_loop, "packed"),
        "Trainer + Liger": Way(hf_trainer, "padded", (liger,)),
        "Trainer, packed rows": Way(hf_trainer, "packed"),
    }
    if machine().device == "cuda":  # flex attention has no backward on a CPU
        found["ours, flex attention"] = Way(our_loop, "one row", (flex_attention,))
        if not sizes.gradient_checkpointing:  # torch.compile does not trace it
            both = (flex_attention, compiled_blocks)
            found["ours, compiled blocks"] = Way(our_loop, "packed", (compiled_blocks,))
            found["ours, flex attention, compiled blocks"] = Way(our_loop, "one row", both)
    found["Trainer + Liger, packed rows"] = Way(hf_trainer, "packed", (liger,))
    return found


def our_loop(model: Any, rows: Sequence[Row], *, run: Settings, pad_token_id: int) -> list[Step]:
    """All steps of our own loop, as `hf_trainer` returns those of the Trainer."""
    return list(training_steps(model, rows, run=run, pad_token_id=pad_token_id))


def liger(model: Any, batch: Batch) -> None:
    """What `TrainingArguments(use_liger_kernel=True)` does."""
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(model, None)


def flex_attention(model: Any, batch: Batch) -> None:
    """Attention that skips what lies outside a token's document: a row needs no mask [L, L]."""
    model.get_base_model().set_attn_implementation("flex_attention")
    check_document_mask(model, batch)


def compiled_blocks(model: Any, batch: Batch) -> None:
    """Fuse what lies between the matrix products.

    The blocks are alike: one compilation serves nearly all.
    """
    for block in decoder_blocks(model):
        block.compile(dynamic=True)  # packed rows differ a little in length


# --- the rows -----------------------------------------------------------------------------------


def layouts(sizes: Sizes) -> dict[str, tuple[list[Row], Settings]]:
    """The rows and settings of a run: padded, packed, and packed into one long row per step."""
    pairs = _pairs_of(sizes)
    padded = _settings(sizes, rows=sizes.documents, length=sizes.max_tokens, packing=False)
    found = {"padded": (pairs, padded)}
    tokens = sizes.packs * sizes.max_tokens  # of a packed step
    for name, rows in (("packed", sizes.packs), ("one row", 1)):
        length = tokens // rows
        run = _settings(sizes, rows=rows, length=length, packing=True)
        found[name] = (pack_sequences(pairs, length=length, seed=0), run)
    return found


def _pairs_of(sizes: Sizes) -> list[Row]:
    # The vocabulary of a small shape is smaller than the tokenizer's.
    vocabulary = SHAPES[sizes.shape].vocabulary
    limit = 4 * sizes.steps * sizes.documents
    pairs = []
    for row in load_instructions(load_tokenizer(), max_tokens=sizes.max_tokens, limit=limit):
        ids = [token % vocabulary for token in row["input_ids"]]
        labels = list(row["labels"])
        for i, label in enumerate(labels):
            if label != IGNORED:
                labels[i] = label % vocabulary
        pairs.append({"input_ids": ids, "labels": labels})
    return pairs


def _settings(sizes: Sizes, *, rows: int, length: int, packing: bool) -> Settings:
    """QLoRA with all rows of a step in one micro-batch."""
    return Settings(
        base_model=sizes.shape,
        data_file="",  # rows and model are given, and nothing is written
        output_dir="unused",
        method="qlora",
        learning_rate=2e-4,
        steps=sizes.steps,
        warmup_steps=0,
        rows_per_step=rows,
        micro_batch_size=rows,
        seq_len=length,
        packing=packing,
        precision=NAMES[machine().compute_dtype],
        gradient_checkpointing=sizes.gradient_checkpointing,
    )


def useful_share(rows: Sequence[Row], run: Settings) -> float:
    """The part of the tokens of all steps that is text."""
    lengths = []
    for number in range(run.steps):
        chosen = rows_of_optimizer_step(number, rows, run=run)
        lengths += [len(row["input_ids"]) for row in chosen]
    return sum(lengths) / padded_tokens(lengths, batch_size=run.micro_batch_size)


# --- the measurement ----------------------------------------------------------------------------


def compare_ways(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """The result so far, after each way."""
    data = layouts(sizes)
    shares = {name: useful_share(rows, run) for name, (rows, run) in data.items()}
    facts = dataclasses.asdict(sizes) | {"useful_share": shares}
    found: dict[str, Any] = {}
    expected: dict[str, list[float]] = {}  # losses of the first way of each layout
    classes = _classes_that_liger_replaces()
    for name, way in ways(sizes).items():
        rows, run = data[way.layout]
        try:
            found[name] = run_way(way, sizes, rows, run)
            losses = found[name]["losses"]
            others = expected.get(way.layout, losses)
            _require_agreement(losses, others)
            expected[way.layout] = others
        except Exception as error:  # one way that fails, for whatever reason, costs only its row
            found[name] = found.get(name, {}) | _failure(error)
        _clean_up(classes)
        print(f"{name}: {found[name]}", flush=True)
        yield facts | {"ways": found}


def run_way(way: Way, sizes: Sizes, rows: Sequence[Row], run: Settings) -> dict[str, Any]:
    """Train a fresh model for the losses and the peak, then again on the same rows for the time.

    So the memory account of a CPU slows nothing that is timed, and every compiler has met every
    length of batch.
    """
    if liger in way.changes:
        require("liger_kernel")  # before the model takes its time
    with PeakMemory() as memory:
        before = memory.current
    model = _changed_model(way, sizes, rows, run)
    with tempfile.TemporaryDirectory() as folder:  # where the Trainer puts a checkpoint
        run = dataclasses.replace(run, output_dir=folder)
        with PeakMemory() as memory:
            losses = [step.loss for step in way.train(model, rows, run=run, pad_token_id=PAD)]
        timed = way.train(model, rows, run=run, pad_token_id=PAD)
    steps = timed[1:]  # the first one makes AdamW's states
    speed = sum(step.tokens for step in steps) / sum(step.seconds for step in steps)
    return {
        "tokens_per_second": speed,
        "peak_bytes": memory.peak,
        "losses": losses,
        "before_bytes": before,
    }


def _changed_model(way: Way, sizes: Sizes, rows: Sequence[Row], run: Settings) -> Any:
    """A fresh model with adapters and the changes of this way."""
    seed_everything(0)
    model = model_of_shape(sizes.shape, layers=sizes.layers, dtype=machine().compute_dtype)
    if way.train is not our_loop:
        # The Trainer switches its own checkpointing on, as its users have it.
        run = dataclasses.replace(run, gradient_checkpointing=False)
    model = adapt(model, run=run)
    first = rows[: run.micro_batch_size]
    batches = micro_batches(first, run=run, pad_token_id=PAD, device=str(model.device))
    for change in way.changes:
        change(model, batches[0])
    return model


def _require_agreement(losses: Sequence[float], others: Sequence[float]) -> None:
    """Raise ValueError unless all losses are those of the others, but for rounding."""
    for a, b in zip(losses, others, strict=True):
        if not abs(a - b) < TOLERANCE:  # nan is no agreement
            raise ValueError(f"it does not train as others do: losses {losses}, not {others}")


def _failure(error: Exception) -> dict[str, str]:
    return {"failed": f"{type(error).__name__}: {error}"}


def _classes_that_liger_replaces() -> dict[str, Any]:
    from transformers.models.llama import modeling_llama

    return dict(vars(modeling_llama))


def _clean_up(classes: dict[str, Any]) -> None:
    """Leave nothing of a way to the next: Liger replaces classes for all models that come after."""
    from transformers.models.llama import modeling_llama

    vars(modeling_llama).update(classes)
    torch.compiler.reset()
    release_memory()


# --- AdamW's update -----------------------------------------------------------------------------


def compare_updates(bench: Bench) -> Iterator[dict[str, Any]]:
    """The result so far, after each kind of AdamW updated all weights with real gradients."""
    model = bench.fresh()
    model(**bench.batch(model), use_cache=False).loss.backward()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    kinds: dict[str, dict[str, Any] | None] = {
        "fp32, fused": None,
        "8 bits, bitsandbytes": {},
    }
    if machine().device == "cuda":
        kinds["8 bits, torchao"] = {"library": "torchao", "embedding_bits": 8}
        kinds["8 bits, bitsandbytes, paged"] = {"paged": True}
    found = {}
    for name, options in kinds.items():
        try:
            found[name] = _measured_update(model, options, parameters)
        except Exception as error:  # one that fails costs only its row
            found[name] = _failure(error)
        print(f"{name}: {found[name]}", flush=True)
        yield {"parameters": parameters, "updates": found}


def _measured_update(
    model: Any, eight_bit_options: dict[str, Any] | None, parameters: int
) -> dict[str, float]:
    """Seconds and bytes of one kind; its states are gone when this returns."""
    if eight_bit_options is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    else:
        optimizer = eight_bit_adamw(model, lr=LR, **eight_bit_options)
    seconds = measure(optimizer.step, repeats=3).seconds
    return {"seconds": seconds, "bytes_per_parameter": state_bytes(optimizer) / parameters}
