"""docs/predictions.md: what is predicted, beside what was measured here and published elsewhere.

python -m benchmarks.family_predictions     measure first: some minutes of one core
python -m benchmarks.predictions_page       predict the published peaks, and write the page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import published_peaks
from benchmarks.family_predictions import FILE, SHAPE, error
from recipes_lib.core.measure.machine import runs_dir

PAGE = Path(__file__).parents[1] / "docs" / "predictions.md"

HEAD = """# Predicted peaks of memory

Made by `python -m benchmarks.predictions_page`. It predicts the peaks in the second table, and
takes the first table from the last run of `python -m benchmarks.family_predictions`.

## Families, predicted and measured

One AdamW step of a tiny random model of each family, in fp32 on a CPU: {batch} rows of {seq}
tokens, with a window of the model's own below that length. Measured on {date} with transformers
{transformers} and torch {torch}, by an account of all live tensors. "Difference" is predicted over
measured, less 1, as it is and with all blocks checkpointed.

Where a closed formula holds for all blocks of a model, the prediction is arithmetic. Everywhere
else it is a dry step: one step on tensors without data. `budget_of(model, shape).source` says which
it is, and why.

"""

BETWEEN = """
## Peaks that others have published

Measured by others on GPUs, and predicted here by arithmetic, without weights and without a GPU. The
libraries are torchtune (8B and 3B: Llama 3.1 and 3.2) and FSDP-QLoRA of Answer.AI (7B: Llama 2).
Their code is another than ours. A number in brackets is a reason, and stands below the table for
each difference of more than {large:.0%}. "Guessed" is what a source does not say of its setting.

"""

END = """
Two things make other published peaks larger, and not these. PyTorch's AdamW with `foreach`, which
is its default on a GPU, makes a temporary copy of 2 bytes per bf16 parameter in its step. The
configurations of torchtune ask for the fused one or for one in 8 bits, and in FSDP-QLoRA only the
adapters have a step. `prepare_model_for_kbit_training` of peft casts norms, embedding and output
layer to fp32. Neither library calls it.
"""


def page(run: dict[str, Any]) -> str:
    """The page, with the families of this run of `benchmarks.family_predictions`."""
    head = HEAD.format(
        batch=SHAPE.batch,
        seq=SHAPE.seq,
        date=run["date"],
        transformers=run["versions"]["transformers"],
        torch=run["versions"]["torch"],
    )
    compared = [published_peaks.compare(row) for row in published_peaks.PUBLISHED]
    between = BETWEEN.format(large=published_peaks.LARGE)
    return head + families(run["rows"]) + between + published_peaks.table(compared) + "\n" + END


def families(rows: list[dict[str, Any]]) -> str:
    """The table of the families."""
    lines = ["| family | measured | difference | checkpointed | difference | predicted |"]
    lines.append("| :-- | --: | --: | --: | --: | :-- |")
    for row in rows:
        cells = [row["family"]]
        for step in ("plain", "checkpointed"):
            cells.append(f"{row[f'{step}_measured'] / 2**20:.2f} MiB")
            cells.append(_percent(error(row, step)))
        lines.append(f"| {' | '.join(cells)} | {row['source']} |")
    return "\n".join(lines) + "\n"


def _percent(share: float) -> str:
    """With a sign, but for what rounds to nothing."""
    if abs(share) < 0.0005:
        return "0.0%"
    return f"{share:+.1%}"


def main() -> Path:
    """Write the page, and return where it is. Raises ValueError before the families are there."""
    file = runs_dir() / FILE
    if not file.exists():
        raise ValueError(f"{file} is not there: run `python -m benchmarks.family_predictions`")
    PAGE.write_text(page(json.loads(file.read_text())))
    print(f"written: {PAGE}")
    return PAGE


if __name__ == "__main__":
    main()
