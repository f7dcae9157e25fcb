"""The recipes from a terminal.

python -m recipes_lib list
python -m recipes_lib bench gradient_accumulation --model smollm2 --batch-size 8 --micro-batches 4
python -m recipes_lib doctor --model llama-3.1-8b --memory 24 --batch-size 8 --seq-len 2048
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

import torch

from recipes_lib.bench import Bench, techniques
from recipes_lib.core.machine import GIB, fast, machine
from recipes_lib.core.model import SHAPES, load_model, model_of_shape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def list_techniques(_: argparse.Namespace) -> None:
    """Print every technique: its file and the first line of its docstring."""
    root = Path(__file__).parent
    for path in sorted(root.glob("*/*.py")):
        if path.name != "__init__.py" and path.parent.name != "core":
            first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]
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
    from recipes_lib.memory.out_of_memory_doctor import diagnose

    model = None
    if options.model in SHAPES:
        model = model_of_shape(options.model, dtype=DTYPES[options.dtype], device="meta")  # arithmetic needs no memory
    elif options.model:
        model = load_model(options.model, dtype=DTYPES[options.dtype], device="cpu")
    if options.memory is not None and options.memory <= 0:
        raise ValueError(f"--memory {options.memory}: give the GiB of the device, or leave it out for this machine's")
    memory = int(options.memory * GIB) if options.memory else None
    sizes = {"batch_size": options.batch_size, "seq_len": options.seq_len}
    print(diagnose(error=options.error, model=model, memory_bytes=memory, **sizes))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="recipes_lib", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("list", help="every technique, one line each")
    command.set_defaults(run=list_techniques)

    command = commands.add_parser("bench", help="measure one technique beside the plain step")
    command.add_argument("technique", choices=techniques())
    command.add_argument("--model", default="smollm2", help=f"hub id, folder, or a shape: {', '.join(SHAPES)}")
    command.add_argument("--layers", type=int, help="fewer layers of a shape")
    command.add_argument("--batch-size", type=int, default=4)
    command.add_argument("--seq-len", type=int, default=64)
    command.add_argument("--micro-batches", type=int, help="for gradient accumulation; default: one per row")
    command.set_defaults(run=bench)

    command = commands.add_parser("doctor", help="out of memory: what to try, in which order")
    command.add_argument("--error", default="", help="the text of the error")
    command.add_argument("--model", default="", help="hub id, folder, or a shape")
    command.add_argument(
        "--memory", type=float, help="of the device in GiB; default: what the error says, or this machine's"
    )
    command.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights")
    command.add_argument("--batch-size", type=int, default=8)
    command.add_argument("--seq-len", type=int, default=1024)
    command.set_defaults(run=doctor)

    options = parser.parse_args()
    try:
        options.run(options)
    except (ValueError, ImportError, torch.OutOfMemoryError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
