"""The recipes from a terminal.

python -m recipes_lib list
python -m recipes_lib bench gradient_accumulation --model smollm2 --batch-size 8 --micro-batches 4
python -m recipes_lib doctor --model llama-3.1-8b --memory 24 --batch-size 8 --seq-len 2048
python -m recipes_lib finetune --data pairs.jsonl --method lora --output runs/my-adapter
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import sys
from pathlib import Path

import torch

from recipes_lib.core.machine import GIB, fast, machine
from recipes_lib.core.model import SHAPES, load_model, model_of_shape
from recipes_lib.workflows.bench.run import Bench, techniques

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def list_techniques(_: argparse.Namespace) -> None:
    """Print every technique: its file and the first line of its docstring."""
    root = Path(__file__).parent
    for path in sorted(root.glob("*/*.py")):
        if path.name != "__init__.py" and path.parent.name != "core":
            first = (
                ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            ).splitlines()[0]
            print(f"{path.relative_to(root).as_posix():<44}{first}")


def bench(options: argparse.Namespace) -> None:
    """Measure one technique beside the plain step and print both rows."""
    micro = options.micro_batches or options.batch_size
    print(machine())
    setting = Bench(options.model, options.batch_size, options.seq_len, micro, options.layers)
    ladder = setting.run(options.technique, repeats=1 if fast() else 3)
    print(ladder)
    print(f"rows: {ladder.path}")


def doctor(options: argparse.Namespace) -> None:
    """Say what to try against running out of memory, in which order."""
    from recipes_lib.workflows.out_of_memory_doctor import diagnose

    model = None
    if options.model in SHAPES:
        model = model_of_shape(
            options.model, dtype=DTYPES[options.dtype], device="meta"
        )  # arithmetic needs no memory
    elif options.model:
        model = load_model(options.model, dtype=DTYPES[options.dtype], device="cpu")
    if options.memory is not None and options.memory <= 0:
        raise ValueError(
            f"--memory {options.memory}: give the GiB of the device, or leave it out for this machine's"
        )
    memory = int(options.memory * GIB) if options.memory else None
    sizes = {"batch_size": options.batch_size, "seq_len": options.seq_len}
    print(diagnose(error=options.error, model=model, memory_bytes=memory, **sizes))


def finetune(options: argparse.Namespace) -> None:
    """Fine-tune a pretrained model on pairs and leave the adapter, its log and the production files in a folder."""
    from recipes_lib import export
    from recipes_lib.workflows.finetune.command import finetune

    fields = {field.name for field in dataclasses.fields(export.Settings)}
    settings = {name: value for name, value in vars(options).items() if name in fields}
    low = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[
        machine().compute_dtype
    ]
    settings["output_dir"] = str(Path(options.output_dir).expanduser())
    settings["learning_rate"] = options.learning_rate or (
        1e-4 if options.method == "full" else 1e-3
    )
    warmup = options.warmup_steps if options.warmup_steps < options.steps else 0
    settings |= {"precision": options.precision or low, "warmup_steps": warmup}
    print(machine())
    how = {"held_out_file": options.held_out, "limit": options.limit, "resume": options.resume}
    finetune(export.Settings(**settings), **how)


def add_finetune(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", dest="base_model", default="smollm2", help="hub id or folder")
    add(
        "--data",
        dest="data_file",
        default="",
        help=".jsonl with prompt and completion, or messages; else docstrings",
    )
    add("--held-out", help=".jsonl of held-out pairs; else every tenth pair of --data")
    add("--limit", type=int, help="use the first pairs only, to try a run")
    add(
        "--output",
        dest="output_dir",
        required=True,
        help="folder for adapter, checkpoint, log and configurations",
    )
    add("--resume", action="store_true", help="go on from the checkpoint in --output")
    add("--method", choices=("lora", "qlora", "full"), default="lora", help="what is trained")
    add("--rank", type=int, default=16, help="of the adapters")
    add(
        "--alpha", type=float, default=32, help="the adapters' correction is scaled by alpha / rank"
    )
    add("--dropout", type=float, default=0.0, help="of what the adapters read")
    add("--learning-rate", type=float, help="else 1e-3 for adapters, 1e-4 for the full model")
    add("--optimizer", default="adamw_torch_fused", help="or adamw_bnb_8bit, paged_adamw_8bit")
    add("--max-grad-norm", type=float, default=1.0, help="clip gradients to it; 0: not at all")
    add("--steps", type=int, default=50, help="optimizer steps")
    add(
        "--warmup-steps",
        type=int,
        default=5,
        help="of the learning rate, which then falls to 0 in a cosine; none if --steps is not more",
    )
    add("--rows-per-step", type=int, default=8, help="rows, or packed rows, of one optimizer step")
    add("--micro-batch-size", type=int, default=1, help="rows in memory at a time")
    add("--seq-len", type=int, default=256, help="tokens of the longest row, and of a packed one")
    add("--no-packing", dest="packing", action="store_false", help="pad each micro-batch instead")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="else the fastest of this machine")
    add("--gradient-checkpointing", action="store_true", help="less memory, more time")
    add("--seed", type=int, default=0, help="of the order of the rows and of the adapters")
    add("--save-steps", type=int, default=10, help="steps between checkpoints")
    trackers = ("none", "tensorboard", "mlflow", "wandb")
    add("--report-to", choices=trackers, default="tensorboard", help="kind of the log")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="recipes_lib",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("list", help="every technique, one line each")
    command.set_defaults(run=list_techniques)

    command = commands.add_parser("bench", help="measure one technique beside the plain step")
    command.add_argument("technique", choices=techniques())
    command.add_argument(
        "--model", default="smollm2", help=f"hub id, folder, or a shape: {', '.join(SHAPES)}"
    )
    command.add_argument("--layers", type=int, help="fewer layers of a shape")
    command.add_argument("--batch-size", type=int, default=4)
    command.add_argument("--seq-len", type=int, default=64)
    command.add_argument(
        "--micro-batches", type=int, help="for gradient accumulation; default: one per row"
    )
    command.set_defaults(run=bench)

    command = commands.add_parser("doctor", help="out of memory: what to try, in which order")
    command.add_argument("--error", default="", help="the text of the error")
    command.add_argument("--model", default="", help="hub id, folder, or a shape")
    command.add_argument(
        "--memory",
        type=float,
        help="of the device in GiB; default: what the error says, or this machine's",
    )
    command.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights")
    command.add_argument("--batch-size", type=int, default=8)
    command.add_argument("--seq-len", type=int, default=1024)
    command.set_defaults(run=doctor)

    shown = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    command = commands.add_parser(
        "finetune", help="adapt a pretrained model to pairs of your own", **shown
    )
    add_finetune(command)
    command.set_defaults(run=finetune)

    options = parser.parse_args()
    try:
        options.run(options)
    except (ValueError, ImportError, torch.OutOfMemoryError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
