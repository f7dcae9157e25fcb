"""The result of a run: where it goes, and how it is saved, whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from recipes_lib.fine_tuning.adapter_files import save_adapter
from recipes_lib.workflows.finetune.settings import Settings


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
