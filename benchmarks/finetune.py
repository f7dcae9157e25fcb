"""QLoRA by our loop and by `transformers.Trainer`, with and without Liger's kernels, and what an AdamW update costs.

Every way trains a model of its own, of the same random weights, on the same real pairs of unequal length, with the
loss on their answers. A step of a padded way takes `documents` pairs, each padded to the longest; a step of a packed
way takes `packs` rows of `max_tokens`, filled with whole pairs. The row of a way holds

    tokens_per_second   of text: padding does not count
    peak_bytes          of tensors on the device, weights included
    losses              in nats per target, one per step: ways of one layout must agree
    before_bytes        alive before the way began: what another had left would count in its peak

and a row of `updates` the `seconds` of one `optimizer.step()` and the bytes of states per parameter. The Trainer gets
our batches, without attention mask, which is kinder to it than its own padding, and its time excludes making them.
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.data import IGNORED, load_instructions
from recipes_lib.core.machine import machine, require, seed_everything
from recipes_lib.core.measure import PeakMemory, measure
from recipes_lib.core.model import SHAPES, load_tokenizer, model_of_shape
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw, held_bytes
from recipes_lib.precision.mixed_precision import NAMES
from recipes_lib.training.exact_resume import rows_of_step
from recipes_lib.training.sequence_packing import check_document_mask, pack_sequences, padded_tokens
from recipes_lib.workflows.bench.run import LR, Bench
from recipes_lib.workflows.finetune.libraries import hf_trainer
from recipes_lib.workflows.finetune.loop import (
    Batch,
    Row,
    Step,
    adapt,
    micro_batches,
    training_steps,
)
from recipes_lib.workflows.finetune.settings import Settings

TOLERANCE = 0.02  # nats between losses: 16-bit sums in another order
PAD = {"pad_token_id": 0}


@dataclasses.dataclass(frozen=True)
class Sizes:
    shape: str
    layers: int | None
    documents: int
    max_tokens: int
    packs: int
    steps: int
    gradient_checkpointing: bool  # of every way; the Trainer has its own


@dataclasses.dataclass(frozen=True)
class Way:
    train: Callable[..., Sequence[Step]]
    layout: str
    changes: tuple[Callable[[Any, Batch], None], ...] = ()  # to the model with its adapters


def our_loop(model: Any, rows: Sequence[Row], *, run: Settings, pad_token_id: int) -> list[Step]:
    return list(training_steps(model, rows, run=run, pad_token_id=pad_token_id))


def liger(model: Any, batch: Batch) -> None:
    """What `TrainingArguments(use_liger_kernel=True)` does."""
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(model, None)


def flex_attention(model: Any, batch: Batch) -> None:
    """Attention that skips what lies outside a token's document: one long row needs no mask [L, L]."""
    model.get_base_model().set_attn_implementation("flex_attention")
    check_document_mask(model, batch)


def compiled_blocks(model: Any, batch: Batch) -> None:
    """Fuse what lies between the matrix products. The blocks are alike: one compilation serves nearly all."""
    for block in decoder_blocks(model):
        block.compile(dynamic=True)  # packed rows differ a little in length


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
            found["ours, compiled blocks"] = Way(our_loop, "packed", (compiled_blocks,))
            found["ours, flex attention, compiled blocks"] = Way(
                our_loop, "one row", (flex_attention, compiled_blocks)
            )
    return found | {"Trainer + Liger, packed rows": Way(hf_trainer, "packed", (liger,))}


def layouts(sizes: Sizes) -> dict[str, tuple[list[Row], Settings]]:
    """The rows and settings of a run: the same pairs padded, packed, and packed into one long row per step."""
    vocabulary = SHAPES[sizes.shape][5]  # that of a small shape is smaller than the tokenizer's
    data = load_instructions(
        load_tokenizer(), max_tokens=sizes.max_tokens, limit=4 * sizes.steps * sizes.documents
    )
    pairs = [
        {k: [i if i == IGNORED else i % vocabulary for i in ids] for k, ids in row.items()}
        for row in data
    ]
    run = {
        "base_model": sizes.shape,
        "data_file": "",
        "output_dir": "",
        "method": "qlora",
        "learning_rate": 2e-4,
    }
    run |= {
        "steps": sizes.steps,
        "warmup_steps": 0,
        "gradient_checkpointing": sizes.gradient_checkpointing,
    }
    run |= {"precision": NAMES[machine().compute_dtype]}

    def sized(rows: int, length: int, packing: bool) -> Settings:
        return Settings(
            **run, rows_per_step=rows, micro_batch_size=rows, seq_len=length, packing=packing
        )

    found = {"padded": (pairs, sized(sizes.documents, sizes.max_tokens, False))}
    for name, rows in (("packed", sizes.packs), ("one row", 1)):
        length = sizes.packs * sizes.max_tokens // rows
        found[name] = pack_sequences(pairs, length=length, seed=0), sized(rows, length, True)
    return found


def useful_share(rows: Sequence[Row], run: Settings) -> float:
    """The part of the tokens of all steps that is text."""
    options = {"rows": len(rows), "rows_per_step": run.rows_per_step, "seed": run.seed}
    lengths = [
        len(rows[i]["input_ids"])
        for step in range(run.steps)
        for i in rows_of_step(step, **options)
    ]
    return sum(lengths) / padded_tokens(lengths, batch_size=run.micro_batch_size)


def run_way(way: Way, sizes: Sizes, rows: Sequence[Row], run: Settings) -> dict[str, Any]:
    """Train a fresh model for the losses and the peak, and then again on the same rows for the time.

    So the memory account of a CPU slows nothing that is timed, and every compiler has met every length of batch.
    """
    if liger in way.changes:
        require("liger_kernel")  # before the model takes its time
    with PeakMemory() as memory:
        before = memory.current
    seed_everything(0)
    model = model_of_shape(sizes.shape, layers=sizes.layers, dtype=machine().compute_dtype)
    # The Trainer switches its own checkpointing on, as its users have it.
    own = run if way.train is our_loop else dataclasses.replace(run, gradient_checkpointing=False)
    model = adapt(model, run=own)
    batch = micro_batches(rows[: run.micro_batch_size], run=run, device=str(model.device), **PAD)[0]
    for change in way.changes:
        change(model, batch)
    with tempfile.TemporaryDirectory() as folder:  # where the Trainer puts a checkpoint
        run = dataclasses.replace(run, output_dir=folder)
        with PeakMemory() as memory:
            losses = [step.loss for step in way.train(model, rows, run=run, **PAD)]
        timed = way.train(model, rows, run=run, **PAD)[1:]  # the first makes AdamW's states
    speed = sum(step.tokens for step in timed) / sum(step.seconds for step in timed)
    return {
        "tokens_per_second": speed,
        "peak_bytes": memory.peak,
        "losses": losses,
        "before_bytes": before,
    }


def compare_ways(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """The result so far, after each way."""
    from transformers.models.llama import modeling_llama

    data, found, expected, original = layouts(sizes), {}, {}, dict(vars(modeling_llama))
    facts = dataclasses.asdict(sizes) | {
        "useful_share": {name: useful_share(*run) for name, run in data.items()}
    }
    for name, way in ways(sizes).items():
        try:
            found[name] = run_way(way, sizes, *data[way.layout])
            losses = found[name]["losses"]
            others = expected.get(way.layout, losses)
            if not all(abs(a - b) < TOLERANCE for a, b in zip(losses, others, strict=True)):
                raise ValueError(f"it does not train as others do: losses {losses}, not {others}")
            expected[way.layout] = others
        except Exception as error:  # one way that fails, for whatever reason, costs only its row
            found[name] = found.get(name, {}) | {"failed": f"{type(error).__name__}: {error}"}
        vars(modeling_llama).update(
            original
        )  # Liger replaces classes, for all models that come after
        torch.compiler.reset()
        gc.collect()
        if machine().device == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}: {found[name]}", flush=True)
        yield facts | {"ways": found}


def compare_updates(bench: Bench) -> Iterator[dict[str, Any]]:
    """The same for AdamW's update of all weights of the model in `bench`, with real gradients."""
    model, found = bench.fresh(), {}
    model(**bench.batch(model), use_cache=False).loss.backward()
    kinds = {
        "fp32, fused": lambda: torch.optim.AdamW(model.parameters(), lr=LR, fused=True),
        "8 bits, bitsandbytes": lambda: eight_bit_adamw(model, lr=LR),
    }
    if machine().device == "cuda":
        kinds["8 bits, torchao"] = lambda: eight_bit_adamw(
            model, lr=LR, library="torchao", embedding_bits=8
        )
        kinds["8 bits, bitsandbytes, paged"] = lambda: eight_bit_adamw(model, lr=LR, paged=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for name, make in kinds.items():
        try:
            optimizer = make()
            seconds = measure(optimizer.step, repeats=3).seconds
            found[name] = {
                "seconds": seconds,
                "bytes_per_parameter": held_bytes(optimizer) / parameters,
            }
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
        optimizer = None  # its states would be alive beside the next one's
        print(f"{name}: {found[name]}", flush=True)
        yield {"parameters": parameters, "updates": found}
