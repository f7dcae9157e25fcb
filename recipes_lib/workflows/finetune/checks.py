"""What a run is refused: bad rows, what cannot train, and a folder of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes_lib.core.data.tokens_and_labels import Row
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import load_config
from recipes_lib.core.model.causal_lm import longest_text
from recipes_lib.core.model.checkpoint_state import check_same_run
from recipes_lib.core.model.vocabulary import check_vocabulary
from recipes_lib.training.sequence_packing import check_document_mask, collate_packed
from recipes_lib.workflows.finetune.checkpoints import (
    CHECKPOINT,
    CHECKPOINTS,
    checkpoint_of,
    facts_in_checkpoint,
    facts_of_run,
)
from recipes_lib.workflows.finetune.result import result_folder
from recipes_lib.workflows.finetune.settings import Settings

BESIDE_THE_RESULT = ("log", "axolotl", "axolotl.yml", CHECKPOINT, CHECKPOINTS)


def check_rows_fit_base(
    rows: Sequence[Row], tokenizer: Any, *, run: Settings, added: Mapping[str, int]
) -> None:
    """Refuse rows beyond the positions or the tokens of the base, before it is loaded."""
    check_positions(run, longest=max(len(row["input_ids"]) for row in rows))
    size = load_config(run.base_model).get_text_config().vocab_size
    size = max([size, *(token + 1 for token in added.values())])
    check_vocabulary(rows, tokenizer=tokenizer, size=size)


def check_output(run: Settings, held_out_file: str | None, *, resume: bool) -> None:
    """Refuse a run that would overwrite what it reads, or what another one has left."""
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
    """Refuse a run in a folder with a result, if there are no other steps to go on to."""
    result = result_folder(run)
    if not result.exists():
        return
    folder = Path(run.output_dir)
    goes_on = checkpoint_of(run, folder).exists()
    if goes_on and facts_in_checkpoint(run, folder)["done"] != run.steps:
        return
    raise ValueError(
        f"{result} is there already, a finished run: choose another folder, or go on with "
        f"--resume and more --steps"
    )


def check_packing(model: Any, rows: Sequence[Row], *, pad_token_id: int) -> None:
    """Refuse a run whose model cannot keep the documents of a packed row apart."""
    packed = [row for row in rows if row["position_ids"].count(0) > 1]
    if not packed:
        return
    batch = collate_packed(packed[:1], pad_token_id=pad_token_id, device=str(model.device))
    try:
        check_document_mask(model, batch)
    except RuntimeError as error:
        raise ValueError(f"{error} (--no-packing)") from error


def check_positions(run: Settings, *, longest: int) -> None:
    """Refuse a run with a row of `longest` tokens, more than the base model was made for.

    It would read positions that it has never seen, without an error. A packed row may be longer:
    each of its documents begins at position 0.
    """
    positions = longest_text(load_config(run.base_model))
    if positions is not None and longest > positions:
        raise ValueError(
            f"the longest row has {longest} tokens, and {run.base_model} knows {positions} "
            f"positions: leave out the long rows with --seq-len {positions} --drop-long"
        )


def check_run(
    rows: Sequence[Row], *, run: Settings, folder: Path, resume: bool, base: str = ""
) -> None:
    """Refuse a run of what cannot train, or into a folder with the checkpoint of another run.

    The base is compared when its fingerprint is known.
    """
    if run.optimizer.startswith("paged") and machine().device == "cpu":
        raise ValueError(f"optimizer={run.optimizer!r} needs a GPU: choose another")
    if len(rows) < run.rows_per_step:
        raise ValueError(f"{len(rows)} rows are fewer than rows_per_step={run.rows_per_step}")
    if not checkpoint_of(run, folder).exists():
        return
    if not resume:
        raise ValueError(
            f"{folder} holds the checkpoint of a run: resume it, or choose another folder"
        )
    there = facts_in_checkpoint(run, folder)
    done = there.pop("done")
    if run.steps < done:
        raise ValueError(f"steps={run.steps}: the checkpoint in {folder} has {done} already")
    here = facts_of_run(run, rows, base or there["base"]) | {"steps": there["steps"]}
    check_same_run(checkpoint_of(run, folder), saved={"run": there}, given={"run": here})
