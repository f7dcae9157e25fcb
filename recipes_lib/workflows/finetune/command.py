"""The fine-tuning loop as a command, from a file of pairs to an adapter that is proven and saved.

    python -m recipes_lib finetune --data pairs.jsonl --output runs/my-adapter
    python -m recipes_lib finetune --data pairs.jsonl --output runs/my-adapter --resume

It refuses bad data before it computes anything, packs short rows, keeps checkpoints from which a
killed run goes on exactly, logs to a tracker, and compares the held-out loss before and after.
The folder then holds the adapter, the log, and the file with which Axolotl repeats the run.

`finetune(settings)` is the command in this process; `run_command` starts it in one of its own.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from recipes_lib.core.checks import check_whole
from recipes_lib.core.data.tokens_and_labels import Row
from recipes_lib.core.measure.machine import seed_everything
from recipes_lib.core.ranks import meet, rank
from recipes_lib.training.sequence_packing import pack_sequences
from recipes_lib.workflows.finetune.axolotl import write_axolotl
from recipes_lib.workflows.finetune.base_model import (
    adapted,
    base_to_measure,
    load_base,
    model_to_save,
    placed,
)
from recipes_lib.workflows.finetune.checkpoints import where_it_goes_on
from recipes_lib.workflows.finetune.checks import (
    check_output,
    check_packing,
    check_rows_fit_base,
    check_run,
    check_unfinished,
)
from recipes_lib.workflows.finetune.data import Data, load_data, tokenizer_of
from recipes_lib.workflows.finetune.held_out_loss import difference_of, held_out_loss
from recipes_lib.workflows.finetune.loop import training_steps
from recipes_lib.workflows.finetune.model_card import lines_that_generate, model_card
from recipes_lib.workflows.finetune.result import result_folder, save_result
from recipes_lib.workflows.finetune.settings import Settings
from recipes_lib.workflows.finetune.step_log import log_steps

REPOSITORY = Path(__file__).resolve().parents[3]
STEP_LINE = re.compile(r"step (\d+): loss (\S+),")  # what log_steps prints


# --- the command ----------------------------------------------------------------------------------


def finetune(
    run: Settings,
    *,
    held_out_file: str | None = None,
    resume: bool = False,
    epochs: int | None = None,
    **of_data: Any,
) -> None:
    """The command: check the data, train, compare the held-out loss, save all that is promised.

    Prints what it does, a line per step. `run.output_dir` gets all that it leaves.

    Args:
        held_out_file: held-out pairs; without them every tenth pair is held out.
        resume: go on from the checkpoint in `run.output_dir`; begin, if there is none. A run of
            more steps goes on behind the end of a shorter one, with the rates of the longer one.
        epochs: set `run.steps` to so many passes over the rows.
        of_data: more options of `load_data`.
    Raises ValueError before training for bad data, and for an output folder with another run or
    with a result.
    """
    # Everything that can be refused comes first.
    check_output(run, held_out_file, resume=resume)
    folder = Path(run.output_dir)
    run = placed(run)
    print("reading the data", flush=True)
    tokenizer, added = tokenizer_of(run)
    pad = tokenizer.pad_token_id
    data = load_data(tokenizer, run=run, held_out_file=held_out_file, **of_data)
    run = data.run
    check_rows_fit_base([*data.rows, *data.held_out], tokenizer, run=run, added=added)
    rows, run = _packed_rows(data, epochs)
    check_unfinished(run)
    check_run(rows, run=run, folder=folder, resume=resume)
    if resume:
        print(where_it_goes_on(run))

    print("loading the model", flush=True)
    meet()  # no rank writes before all have looked at the folder
    folder.mkdir(parents=True, exist_ok=True)
    seed_everything(run.seed)  # of the adapters and of dropout
    whole, name_of_base, base = load_base(run, tokenizer=tokenizer, added=added, ends=data.ends)
    check_run(rows, run=run, folder=folder, resume=resume, base=base)
    model = base_to_measure(whole, run)
    if run.packing:
        check_packing(model, rows, pad_token_id=pad)

    before = held_out_loss(model, data.held_out, "before", run=run, pad_token_id=pad)
    del model  # a model in parts makes room for the one that trains
    model, modules = adapted(whole, rows, run=run, pad_token_id=pad)
    del whole
    steps = training_steps(
        model, rows, run=run, pad_token_id=pad, folder=folder, resume=resume, base=base
    )
    log_steps(steps, run)
    after = held_out_loss(model, data.held_out, "after", run=run, pad_token_id=pad)
    print(difference_of(before, after, run=run))
    model = model_to_save(model, modules, run=run)
    if rank() > 0:
        return

    asked = {"tokenizer": tokenizer, "pair": data.pairs[0]}
    losses = {"before": before, "after": after}
    card = model_card(run, base=name_of_base, rows=len(data.rows), **asked, **losses)
    write_axolotl(run, data.pairs, tokenizer=tokenizer)
    # The result comes last: a run is finished when it is there.
    save_result(model, tokenizer, run=run, base=base, card=card)
    print(f"saved: {', '.join(sorted(path.name for path in folder.iterdir()))} in {folder}")
    result = str(result_folder(run))
    lines = lines_that_generate(run, base=run.base_model, folder=result, **asked)
    print(f"\nThese lines ask it:\n\n{lines}")


def _packed_rows(data: Data, epochs: int | None) -> tuple[list[Row], Settings]:
    """For the command: rows to train on, packed if so, and the run with the steps of `epochs`.

    Prints how many there are.
    """
    rows, run = data.rows, data.run
    print(f"{len(rows)} rows to train on, {len(data.held_out)} held out")
    if run.packing:
        rows = pack_sequences(rows, length=run.seq_len, seed=run.seed)
        print(f"packed into {len(rows)} rows of at most {run.seq_len} tokens")
    if epochs is not None:
        check_whole(epochs=epochs)
        check_whole(most=len(rows), rows_per_step=run.rows_per_step)
        steps = epochs * (len(rows) // run.rows_per_step)
        warmup_steps = run.warmup_steps if run.warmup_steps < steps else 0
        run = dataclasses.replace(run, steps=steps, warmup_steps=warmup_steps)
    passes = run.steps * run.rows_per_step / len(rows)
    print(f"{run.steps} steps of {run.rows_per_step} rows: {passes:.1f} passes over the data")
    return rows, run


# --- in a process of its own ----------------------------------------------------------------------


def run_command(*options: str, kill_at: int | None = None) -> dict[int, str]:
    """`python -m recipes_lib finetune` in a process of its own: step -> loss, as it printed them.

    Args:
        kill_at: send SIGKILL as soon as this step is printed, as an operating system does that
            runs out of memory.
    Raises RuntimeError with its last line if the command fails.
    """
    losses: dict[int, str] = {}
    # So the process finds the package, installed or not.
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    # A file for the errors: a pipe that nobody reads would fill up and stop the command.
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "recipes_lib", "finetune", *options],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        for text in process.stdout:
            match = STEP_LINE.match(text)
            if match:
                step = int(match[1])
                losses[step] = match[2]
                if step == kill_at:
                    process.kill()
        expected = 0 if kill_at is None else -signal.SIGKILL
        if process.wait() != expected:
            errors.seek(0)
            said = errors.read().strip().splitlines() or ["(no error message)"]
            raise RuntimeError(f"{said[-1]}; the command ended with {process.returncode}")
    return losses
