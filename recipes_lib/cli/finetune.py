"""`python -m recipes_lib finetune`: adapt a pretrained model to pairs of your own.

An option is named as people say it, `--model`, and its parameter as the field of `Settings` that it
fills, `base_model`: so the options become settings by their names.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from recipes_lib.cli.progress import working

if TYPE_CHECKING:
    from recipes_lib.workflows.finetune.settings import Settings

# The headings under which --help lists the options.
DATA = "What is trained on"
WEIGHTS = "What is trained"
TRAINING = "How it is trained"
OUTPUT = "What is kept"

AUTO = "auto"  # --seq-len: as long as the longest row
REPLACED = 1  # tokens, until the rows are read


def _option(panel: str, text: str, *names: str) -> Any:
    """An option under the heading `panel`; `names` where they are not those of the parameter."""
    return typer.Option(*names, help=text, rich_help_panel=panel)


# --- what is trained on ---------------------------------------------------------------------------
DataFile = Annotated[
    str,
    _option(
        DATA,
        "pairs: JSON Lines, JSON, CSV, Parquet, a saved data set or a hub id, with prompt and "
        "completion, or messages; else docstrings",
        "--data",
    ),
]
HeldOut = Annotated[str | None, _option(DATA, "held-out pairs; else every tenth pair of --data")]
Limit = Annotated[int | None, _option(DATA, "use the first pairs only, to try a run")]
SeqLen = Annotated[
    str, _option(DATA, "tokens of the longest row, and of a packed one; auto: what the data needs")
]
DropLong = Annotated[bool, _option(DATA, "leave out rows beyond --seq-len", "--drop-long")]
NoPacking = Annotated[bool, _option(DATA, "pad each micro-batch instead", "--no-packing")]

# --- what is trained ------------------------------------------------------------------------------
BaseModel = Annotated[str, _option(WEIGHTS, "hub id or folder", "--model")]
Method = Annotated[Literal["lora", "qlora", "full"], _option(WEIGHTS, "all weights, or adapters")]
Rank = Annotated[int, _option(WEIGHTS, "of the adapters")]
Alpha = Annotated[float, _option(WEIGHTS, "the adapters' correction is scaled by alpha / rank")]
Dropout = Annotated[float, _option(WEIGHTS, "of what the adapters read")]

# --- how it is trained ----------------------------------------------------------------------------
LearningRate = Annotated[
    float | None, _option(TRAINING, "else 1e-3 for adapters, 1e-4 for the full model")
]
Optimizer = Annotated[str, _option(TRAINING, "or adamw_bnb_8bit, paged_adamw_8bit")]
MaxGradNorm = Annotated[float, _option(TRAINING, "clip gradients to it; 0: not at all")]
Steps = Annotated[int, _option(TRAINING, "optimizer steps")]
WarmupSteps = Annotated[
    int,
    _option(
        TRAINING,
        "of the learning rate, which then falls to 0 in a cosine; none if --steps is not more",
    ),
]
RowsPerStep = Annotated[int, _option(TRAINING, "rows, or packed rows, of one optimizer step")]
MicroBatchSize = Annotated[int, _option(TRAINING, "rows in memory at a time")]
Precision = Annotated[
    Literal["fp32", "bf16", "fp16"] | None, _option(TRAINING, "else the fastest of this machine")
]
Checkpointing = Annotated[
    bool, _option(TRAINING, "less memory, more time", "--gradient-checkpointing")
]
Seed = Annotated[int, _option(TRAINING, "of the order of the rows and of the adapters")]

# --- what is kept ---------------------------------------------------------------------------------
OutputDir = Annotated[
    str, _option(OUTPUT, "folder for adapter, checkpoint, log and configurations", "--output")
]
Resume = Annotated[bool, _option(OUTPUT, "go on from the checkpoint in --output", "--resume")]
SaveSteps = Annotated[int, _option(OUTPUT, "steps between checkpoints")]
ReportTo = Annotated[
    Literal["none", "tensorboard", "mlflow", "wandb"], _option(OUTPUT, "kind of the log")
]


def finetune(
    context: typer.Context,
    output_dir: OutputDir,
    base_model: BaseModel = "smollm2",
    data_file: DataFile = "",
    held_out: HeldOut = None,
    limit: Limit = None,
    seq_len: SeqLen = "256",
    drop_long: DropLong = False,
    no_packing: NoPacking = False,
    method: Method = "lora",
    rank: Rank = 16,
    alpha: Alpha = 32,
    dropout: Dropout = 0.0,
    learning_rate: LearningRate = None,
    optimizer: Optimizer = "adamw_torch_fused",
    max_grad_norm: MaxGradNorm = 1.0,
    steps: Steps = 50,
    warmup_steps: WarmupSteps = 5,
    rows_per_step: RowsPerStep = 8,
    micro_batch_size: MicroBatchSize = 1,
    precision: Precision = None,
    gradient_checkpointing: Checkpointing = False,
    seed: Seed = 0,
    resume: Resume = False,
    save_steps: SaveSteps = 10,
    report_to: ReportTo = "tensorboard",
) -> None:
    """Adapt a pretrained model to pairs of your own."""
    from recipes_lib.core.measure.machine import machine
    from recipes_lib.workflows.finetune import command

    run = _settings(context.params)
    print(machine())
    with working("fine-tuning") as announce:
        command.finetune(
            run,
            held_out_file=_without_tilde(held_out),
            limit=limit,
            longest=seq_len == AUTO,
            drop_long=drop_long,
            resume=resume,
            announce=announce,
        )


def _settings(options: dict[str, Any]) -> Settings:
    """What the options say, and the values of this machine and method where they say nothing."""
    from recipes_lib.workflows.finetune.settings import Settings

    fields = {field.name for field in dataclasses.fields(Settings)}
    settings = {name: value for name, value in options.items() if name in fields}
    settings["packing"] = not options["no_packing"]
    for name in ("output_dir", "data_file", "base_model"):
        settings[name] = _without_tilde(options[name])
    settings["seq_len"] = _whole_length(options["seq_len"])
    if options["precision"] is None:
        settings["precision"] = _fastest_precision()
    if options["learning_rate"] is None:
        settings["learning_rate"] = _usual_learning_rate(options["method"])
    # A run that is tried for a few steps would end before its learning rate is reached.
    if options["warmup_steps"] >= options["steps"]:
        settings["warmup_steps"] = 0
    return Settings(**settings)


def _without_tilde(path: str | None) -> str | None:
    """The shell expands a `~` at the start of a word only, not in --output=~/runs."""
    if path is None or not path.startswith("~"):
        return path
    return str(Path(path).expanduser())


def _whole_length(text: str) -> int:
    """The number of --seq-len; for "auto" one that the longest row will replace."""
    if text == AUTO:
        return REPLACED
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"--seq-len {text}: give a number of tokens, or {AUTO}") from error


def _fastest_precision() -> str:
    """The name of the type in which this machine multiplies fastest."""
    import torch

    from recipes_lib.core.measure.machine import machine

    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    return names[machine().compute_dtype]


def _usual_learning_rate(method: str) -> float:
    """Adapters start at zero, and take larger steps than weights that know something already."""
    if method == "full":
        return 1e-4
    return 1e-3
