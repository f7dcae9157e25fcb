"""What a fine-tuned model says about itself: the README.md in its folder, as the hub shows it.

Base, data, settings, the held-out losses before and after, and the command that repeats the run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from recipes_lib.core.measure.runs import provenance
from recipes_lib.core.model.default_model import model_source
from recipes_lib.fine_tuning.honest_evaluation import RowLosses
from recipes_lib.workflows.finetune.settings import Settings

OUR_DATA = "functions of Python's standard library, with their docstrings"


def model_card(
    run: Settings,
    *,
    base: str,
    rows: int,
    before: RowLosses,
    after: RowLosses,
    difference: str,
) -> str:
    """The text of README.md.

    Args:
        base: the hub id of the base model, or its folder.
        rows: how many rows were trained on.
        before: the held-out losses of the base, `after` those of the result.
        difference: the second less the first, in words.
    """
    return "\n".join(
        [
            *_head(run, base),
            f"# {Path(run.output_dir).name}",
            "",
            *_facts(run, base, rows),
            "",
            "| held-out loss, nats per token | |",
            "|---|--:|",
            f"| before | {before.mean:.4f} |",
            f"| after | {after.mean:.4f} |",
            "",
            *difference.splitlines(),
            "",
            "## The command",
            "",
            "```bash",
            command_of(run),
            "```",
            "",
            _versions(),
            "",
        ]
    )


def _head(run: Settings, base: str) -> list[str]:
    """What the hub reads: which model this one comes from, and what loads it."""
    lines = ["---"]
    if not Path(base).exists():  # a folder of this machine says nothing elsewhere
        lines.append(f"base_model: {base}")
    if run.method != "full":
        lines.append("library_name: peft")
    return [*lines, "pipeline_tag: text-generation", "---", ""]


def _facts(run: Settings, base: str, rows: int) -> list[str]:
    data = OUR_DATA
    if run.data_file:
        data = f"`{Path(run.data_file).name}`"
    what = "All weights"
    if run.method != "full":
        what = f"Adapters of rank {run.rank} ({run.method})"
    lines = [
        f"- {what}, trained for {run.steps} steps of {run.rows_per_step} rows.",
        f"- Base: {base}.",
        f"- Data: {data}, {rows:,} rows to train on.",
    ]
    if run.base_model == "smollm2":
        lines.append(f"- Weights of the base: {model_source()}.")
    return lines


def command_of(run: Settings) -> str:
    """The command line of this process if it is the command, or a call that does the same."""
    if Path(sys.argv[0]).parent.name == "recipes_lib":
        return " ".join(["python -m recipes_lib", *sys.argv[1:]])
    return f"python -m recipes_lib finetune --data {run.data_file} --output {run.output_dir}"


def _versions() -> str:
    facts = provenance()
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{versions}, {facts['date']}."
