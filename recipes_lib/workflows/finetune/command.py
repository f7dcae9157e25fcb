"""The fine-tuning loop as a command, from a file of pairs to an adapter that is proven and saved.

    python -m recipes_lib finetune --data pairs.jsonl --output runs/my-adapter
    python -m recipes_lib finetune --data pairs.jsonl --output runs/my-adapter --resume

It refuses bad data before it computes anything, packs short rows, keeps checkpoints from which a
killed run goes on exactly, logs to a tracker, and compares the held-out loss before and after.
The folder then holds the adapter, the log, and the file with which Axolotl repeats the run.

`finetune(settings)` is the command in this process; `run_command` starts it in one of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes_lib.core.checks import check_whole
from recipes_lib.core.data.tokens_and_labels import Row
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.machine import machine, seed_everything
from recipes_lib.core.model import load_config
from recipes_lib.core.model.causal_lm import longest_text
from recipes_lib.core.model.vocabulary import check_vocabulary
from recipes_lib.core.ranks import meet, rank
from recipes_lib.fine_tuning.adapter_files import save_adapter
from recipes_lib.training.sequence_packing import check_document_mask, pack_sequences
from recipes_lib.training.tracking import Tracker, track
from recipes_lib.workflows.finetune.axolotl import write_axolotl
from recipes_lib.workflows.finetune.base_model import (
    adapted,
    base_to_measure,
    gathered,
    load_base,
    placed,
)
from recipes_lib.workflows.finetune.data import Data, load_data, tokenizer_of
from recipes_lib.workflows.finetune.evaluation import (
    difference_of,
    held_out_loss,
    lines_that_generate,
    model_card,
)
from recipes_lib.workflows.finetune.loop import (
    CHECKPOINT,
    CHECKPOINTS,
    Step,
    check_run,
    checkpoint_of,
    facts_in,
    keeps_checkpoint,
    micro_batches,
    training_steps,
)
from recipes_lib.workflows.finetune.settings import MAY_CHANGE_ON_RESUME, Settings

REPOSITORY = Path(__file__).resolve().parents[3]
STEP_LINE = re.compile(r"step (\d+): loss (\S+),")  # what log_steps prints
BESIDE_THE_RESULT = ("log", "axolotl", "axolotl.yml", CHECKPOINT, CHECKPOINTS)

Announce = Callable[[str], None]  # takes a few words on what is going on now


def say_nothing(words: str) -> None:
    """What is announced where nobody listens."""


# --- the command ----------------------------------------------------------------------------------


def finetune(
    run: Settings,
    *,
    held_out_file: str | None = None,
    limit: int | None = None,
    longest: bool = False,
    drop_long: bool = False,
    resume: bool = False,
    epochs: int | None = None,
    columns: Mapping[str, str] | None = None,
    announce: Announce = say_nothing,
) -> None:
    """Read and check the data, train, compare the held-out loss, and save all that is promised.

    Prints what it does, a line per step. `run.output_dir` gets all that it leaves.

    Args:
        held_out_file: held-out pairs; without them every tenth pair is held out.
        limit: take the first pairs only.
        longest: set `run.seq_len` to the length of the longest row.
        drop_long: leave out the rows that are longer than `run.seq_len`.
        resume: go on from the checkpoint in `run.output_dir`; begin, if there is none. A run of
            more steps goes on behind the end of a shorter one, with the rates of the longer one.
        epochs: set `run.steps` to so many passes over the rows.
        columns: `prompt` and `completion` by the names that they have in the data.
        announce: is called with a few words on what is going on now, for a terminal.
    Raises ValueError before training for bad data, and for an output folder with another run or
    with a result.
    """
    # Everything that can be refused comes first.
    check_output(run, held_out_file, resume=resume)
    folder = Path(run.output_dir)
    run = placed(run)
    announce("reading the data")
    tokenizer, added = tokenizer_of(run)
    pad = tokenizer.pad_token_id
    data = load_data(
        tokenizer,
        run=run,
        held_out_file=held_out_file,
        limit=limit,
        longest=longest,
        drop_long=drop_long,
        columns=columns,
    )
    run = data.run
    _check_rows([*data.rows, *data.held_out], tokenizer, run=run, added=added)
    rows, run = _packed(data, epochs)
    check_unfinished(run)
    check_run(rows, run=run, folder=folder, resume=resume)
    if resume:
        print(_where_it_goes_on(run))

    announce("loading the model")
    meet()  # no rank writes before all have looked at the folder
    folder.mkdir(parents=True, exist_ok=True)
    seed_everything(run.seed)  # of the adapters and of dropout
    whole, name_of_base, base = load_base(run, tokenizer=tokenizer, added=added, ends=data.ends)
    check_run(rows, run=run, folder=folder, resume=resume, base=base)
    model = base_to_measure(whole, run)
    if run.packing:
        check_packing(model, rows, run=run, pad_token_id=pad)

    announce("held-out loss before")
    before = held_out_loss(model, data.held_out, "before", run=run, pad_token_id=pad)
    del model  # a model in parts makes room for the one that trains
    model, modules = adapted(whole, rows, run=run, pad_token_id=pad)
    del whole
    steps = training_steps(
        model, rows, run=run, pad_token_id=pad, folder=folder, resume=resume, base=base
    )
    log_steps(steps, run, announce=announce)
    announce("held-out loss after")
    after = held_out_loss(model, data.held_out, "after", run=run, pad_token_id=pad)
    print(difference_of(before, after, run=run))
    model = gathered(model, modules, run=run)
    if rank() > 0:
        return

    announce("saving")
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


def _packed(data: Data, epochs: int | None) -> tuple[list[Row], Settings]:
    """The rows to train on, packed where the run says so, and the run with the steps of `epochs`.

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


def _where_it_goes_on(run: Settings) -> str:
    """The checkpoint, and what a longer run than its own means for the learning rate."""
    folder = Path(run.output_dir)
    checkpoint = checkpoint_of(run, folder)
    if not checkpoint.exists():  # a mistyped folder would begin anew in silence
        return f"nothing to go on from, there is no {checkpoint}: beginning at step 0"
    there = facts_in(run, folder)
    words = f"going on from {checkpoint}"
    if there["steps"] == run.steps:
        return words
    return (
        f"{words}, of a run of {there['steps']} steps: from step {there['done']} on the learning "
        f"rate is that of a run of {run.steps}, so it rises where the other had come near 0"
    )


def _check_rows(
    rows: Sequence[Row], tokenizer: Any, *, run: Settings, added: Mapping[str, int]
) -> None:
    """Refuse rows beyond the positions or the tokens of the base, before it is loaded."""
    check_positions(run, longest=max(len(row["input_ids"]) for row in rows))
    size = load_config(run.base_model).get_text_config().vocab_size
    size = max([size, *(token + 1 for token in added.values())])
    check_vocabulary(rows, tokenizer=tokenizer, size=size)


def result_folder(run: Settings) -> Path:
    """Where the trained weights go: it exists when a run is finished, and not before."""
    return Path(run.output_dir) / ("model" if run.method == "full" else "adapter")


def save_result(model: Any, tokenizer: Any, *, run: Settings, base: str, card: str) -> None:
    """Save the adapters, or the whole model with its tokenizer: whole or not at all."""
    result = result_folder(run)
    if run.method != "full":
        # A shorter run may have left its own.
        save_adapter(model, result, base=base, card=card, tokenizer=tokenizer, overwrite=True)
        return
    # Saving takes several files: the folder gets its name when all are written.
    scratch = result.with_name("model.part")
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    (scratch / "README.md").write_text(card)
    if result.exists():
        shutil.rmtree(result)
    os.replace(scratch, result)


# --- what is refused ------------------------------------------------------------------------------


def check_output(run: Settings, held_out_file: str | None, *, resume: bool) -> None:
    """Raise ValueError if the run would overwrite what it reads, or what another one has left."""
    folder = Path(run.output_dir)
    if folder.is_file():
        raise ValueError(f"output_dir={str(folder)!r} is a file: give the name of a folder")
    inputs = [Path(file).resolve() for file in (*run.data_files, held_out_file) if file]
    for name in (result_folder(run).name, *BESIDE_THE_RESULT):
        path = folder / name
        # A run that goes on has left them itself, unless it reads them.
        left_by_another = path.exists() and not resume
        is_read = any(file.is_relative_to(path.resolve()) for file in inputs)
        if left_by_another or is_read:
            raise ValueError(
                f"{path} would be overwritten: "
                f"resume the run it belongs to, or choose another folder"
            )


def check_unfinished(run: Settings) -> None:
    """Raise ValueError for a folder with a result, if there are no other steps to go on to."""
    result = result_folder(run)
    if not result.exists():
        return
    folder = Path(run.output_dir)
    goes_on = checkpoint_of(run, folder).exists()
    if goes_on and facts_in(run, folder)["done"] != run.steps:
        return
    raise ValueError(
        f"{result} is there already, a finished run: choose another folder, or go on with "
        f"--resume and more --steps"
    )


def check_packing(model: Any, rows: Sequence[Row], *, run: Settings, pad_token_id: int) -> None:
    """Raise ValueError if the model cannot keep the documents of a packed row apart."""
    packed = [row for row in rows if row["position_ids"].count(0) > 1]
    if not packed:
        return
    device = str(model.device)
    batches = micro_batches(packed[:1], run=run, pad_token_id=pad_token_id, device=device)
    try:
        check_document_mask(model, batches[0])
    except RuntimeError as error:
        raise ValueError(f"{error} (--no-packing)") from error


def check_positions(run: Settings, *, longest: int) -> None:
    """Raise ValueError if a row of `longest` tokens is more than the base model was made for.

    It would read positions that it has never seen, without an error. A packed row may be longer:
    each of its documents begins at position 0.
    """
    positions = longest_text(load_config(run.base_model))
    if positions is not None and longest > positions:
        raise ValueError(
            f"the longest row has {longest} tokens, and {run.base_model} knows {positions} "
            f"positions: leave out the long rows with --seq-len {positions} --drop-long"
        )


# --- the log --------------------------------------------------------------------------------------


def log_steps(steps: Iterable[Step], run: Settings, *, announce: Announce = say_nothing) -> None:
    """Print every step, and log it to the tracker of `run.report_to`.

    On a CPU the memory account slows every operator, so it ends with the third step: AdamW has
    its states by then.
    """
    seconds: list[float] = []
    with contextlib.ExitStack() as log, contextlib.ExitStack() as account:
        tracker: Tracker | None = None
        memory = account.enter_context(PeakMemory())
        for count, step in enumerate(steps, 1):
            if tracker is None and run.report_to != "none" and rank() == 0:
                # A resumed run says only now at which step it goes on.
                tracker = log.enter_context(open_log(run, first_step=step.number))
            speed = step.tokens / step.seconds  # of text: padding does not count
            if tracker is not None:
                tracker.log(
                    step.number,
                    loss=step.loss,
                    gradient_norm=step.gradient_norm,
                    learning_rate=step.learning_rate,
                    tokens_per_second=speed,
                    peak_bytes=memory.peak,
                )
                if keeps_checkpoint(step.number, run=run):
                    tracker.flush()  # the checkpoint comes next
            seconds.append(step.seconds)
            done = f"{step.number + 1} of {run.steps} done{_rest(seconds, step.number, run)}"
            line = f"step {step.number}: loss {step.loss:.6f}, {speed:,.0f} tokens/s, {done}"
            if not step.updated:
                line += "; it changed nothing, because gradients overflowed in fp16"
            print(line, flush=True)
            announce(f"training: {done}")
            if count == 3 and machine().device == "cpu":
                account.close()


def _rest(seconds: Sequence[float], number: int, run: Settings) -> str:
    """The time that the steps after step `number` will take: ", 0:03:00 left"."""
    steps = run.steps - number - 1
    if steps == 0:
        return ""
    # The last ones: the first steps of a process are slower.
    left = datetime.timedelta(seconds=round(steps * statistics.median(seconds[-5:])))
    return f", {left} left"


def open_log(run: Settings, *, first_step: int) -> Tracker:
    """The run's log in `<output_dir>/log`; one that is there is continued at `first_step`."""
    folder = Path(run.output_dir) / "log"
    settings = {name: str(value) for name, value in dataclasses.asdict(run).items()}
    for name in MAY_CHANGE_ON_RESUME:
        del settings[name]
    resume_step = None
    if folder.exists():
        resume_step = first_step
        del settings["steps"]  # a longer run; MLflow would refuse another value
    return track(folder, settings=settings, resume_step=resume_step, backend=run.report_to)


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
