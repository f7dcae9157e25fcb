"""The fine-tuning loop as a command, from a file of pairs to an adapter that is proven, saved and reproducible.

    python -m recipes_lib finetune --model smollm2 --data pairs.jsonl --output runs/my-adapter
    python -m recipes_lib finetune --model smollm2 --data pairs.jsonl --output runs/my-adapter --resume

It refuses bad data before it computes anything, packs short rows, keeps checkpoints from which a killed run goes on
exactly, logs to a tracker, and compares the held-out loss before and after. The folder then holds the adapter, the
log, the file with which Axolotl repeats the run, and launch settings for accelerate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.machine import machine, seed_everything
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.fine_tuning.adapter_files import base_fingerprint, save_adapter
from recipes_lib.fine_tuning.honest_evaluation import compare, held_out_losses
from recipes_lib.fine_tuning.qlora import check_gradient_flow
from recipes_lib.training.sequence_packing import check_document_mask, pack_sequences
from recipes_lib.training.tracking import Tracker, read_back, track
from recipes_lib.workflows.finetune.data import load_data
from recipes_lib.workflows.finetune.libraries import WRITTEN, write_production
from recipes_lib.workflows.finetune.loop import (
    FREE,
    Step,
    adapt,
    check_run,
    keeps_checkpoint,
    micro_batches,
    training_steps,
)
from recipes_lib.workflows.finetune.settings import Settings


def finetune(
    run: Settings,
    *,
    held_out_file: str | None = None,
    limit: int | None = None,
    resume: bool = False,
) -> None:
    """The command: read and check the data, train, compare the held-out loss, save, and write the production files.

    Raises ValueError before training for bad data, and for an output folder with another run or with a result.
    """
    folder, tokenizer = Path(run.output_dir), load_tokenizer(run.base_model)
    result = folder / ("model" if run.method == "full" else "adapter")
    check_output(folder, result, inputs=[run.data_file, held_out_file], resume=resume)
    pairs, rows, held_out = load_data(tokenizer, run=run, held_out_file=held_out_file, limit=limit)
    print(f"{len(rows)} rows to train on, {len(held_out)} held out")
    if run.packing:
        rows = pack_sequences(rows, length=run.seq_len, seed=run.seed)
        print(f"packed into {len(rows)} rows of at most {run.seq_len} tokens")
    check_run(rows, run=run, folder=folder, resume=resume)
    passes = run.steps * run.rows_per_step / len(rows)
    print(f"{run.steps} steps of {run.rows_per_step} rows: {passes:.1f} passes over the data")
    seed_everything(run.seed)
    # Adapters leave the base as it is, so it can have 16 bits. Not fp16: its file could name no other base.
    half = run.method != "full" and run.precision == "bf16" and machine().native_bf16
    model = load_model(run.base_model, dtype=torch.bfloat16 if half else torch.float32)
    base, feed = base_fingerprint(model), {"pad_token_id": tokenizer.pad_token_id}
    if run.packing:
        check_packing(model, rows, run=run, **feed)
    before = held_out_losses(model, held_out, **feed)
    model = adapt(model, run=run)
    if run.method == "qlora":
        check_gradient_flow(
            model, micro_batches(rows[:1], run=run, device=str(model.device), **feed)[0]
        )
    log_steps(
        training_steps(model, rows, run=run, folder=folder, resume=resume, base=base, **feed), run
    )
    few = (
        ""
        if len(held_out) >= 30
        else f" (of {len(held_out)} rows, too few to rely on: hold out 30 or more)"
    )
    print(f"held-out loss: {compare(before, held_out_losses(model, held_out, **feed))}{few}")
    write_production(run, pairs)
    if run.method == "full":
        scratch = folder / "model.part"  # whole or not at all
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        os.replace(scratch, result)
    else:
        save_adapter(model, result, base=base)
    print(f"saved: {', '.join(sorted(path.name for path in folder.iterdir()))} in {folder}")


def check_output(folder: Path, result: Path, *, inputs: Sequence[Any], resume: bool) -> None:
    """Raise ValueError if the run would overwrite a file of its input, or what another run or someone else left."""
    if result.exists():
        raise ValueError(f"{result} is there already, a finished run: choose another folder")
    read = {Path(path).resolve() for path in inputs if path}
    for path in [folder / "log", *(folder / name for name in WRITTEN)]:
        if path.resolve() in read or (path.exists() and not resume):
            raise ValueError(
                f"{path} would be overwritten: resume the run it belongs to, or choose another folder"
            )


def check_packing(
    model: Any, rows: Sequence[dict[str, Any]], *, run: Settings, pad_token_id: int
) -> None:
    """Raise ValueError if the model cannot keep the documents of a packed row apart."""
    packed = [row for row in rows if row["position_ids"].count(0) > 1][:1]
    if packed:
        batch = micro_batches(packed, run=run, pad_token_id=pad_token_id, device=str(model.device))[
            0
        ]
        try:
            check_document_mask(model, batch)
        except RuntimeError as error:
            raise ValueError(f"{error} (--no-packing)") from error


def log_steps(steps: Iterable[Step], run: Settings) -> None:
    """Print every step and log it to the tracker of `run.report_to`, continuing a log that is there.

    On a CPU the memory account slows every operator, so it ends with the third step (AdamW has its states by then).
    """
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as account:
        tracker: Tracker | None = None
        memory = account.enter_context(PeakMemory())
        for count, step in enumerate(steps, 1):
            if tracker is None and run.report_to != "none":
                tracker = stack.enter_context(open_log(run, first_step=step.number))
            values = {
                "loss": step.loss,
                "gradient_norm": step.gradient_norm,
                "learning_rate": step.learning_rate,
            }
            values |= {"tokens_per_second": step.tokens / step.seconds, "peak_bytes": memory.peak}
            if tracker:
                tracker.log(step.number, **values)
                if keeps_checkpoint(step.number, run=run):
                    tracker.flush()  # the checkpoint comes next
            print(
                f"step {step.number}: loss {step.loss:.6f}, {values['tokens_per_second']:,.0f} tokens/s",
                flush=True,
            )
            if count == 3 and machine().device == "cpu":
                account.close()


def open_log(run: Settings, *, first_step: int) -> Tracker:
    """The run's log in `<output_dir>/log`, from `first_step` on; one that holds values is continued."""
    folder, options = Path(run.output_dir) / "log", {"backend": run.report_to}
    settings = {
        name: str(value) for name, value in dataclasses.asdict(run).items() if name not in FREE
    }
    try:
        read_back(folder, **options)
    except ValueError:  # killed before the first value, or another backend's log
        return track(folder, settings=settings, **options)
    return track(folder, settings=settings, resume_step=first_step, **options)


def run_command(*options: str, kill_at: int | None = None, echo: bool = False) -> dict[int, str]:
    """`python -m recipes_lib finetune` in a process of its own; returns step -> loss, as it printed them.

    Args:
        kill_at: send SIGKILL as soon as this step is printed, as an operating system does that runs out of memory.
        echo: print what it says beside the steps.
    Raises RuntimeError with its last line if the command fails.
    """
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    line = [sys.executable, "-m", "recipes_lib", "finetune", *options]
    losses: dict[int, str] = {}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        for text in process.stdout:
            if match := re.match(r"step (\d+): loss (\S+),", text):
                losses[int(match[1])] = match[2]
                if int(match[1]) == kill_at:
                    process.kill()
            elif echo:
                print(text, end="")
        if process.wait() != (0 if kill_at is None else -signal.SIGKILL):
            errors.seek(0)
            said = errors.read().strip().splitlines() or ["(no error message)"]
            raise RuntimeError(f"{said[-1]}; the command ended with {process.returncode}")
    return losses
