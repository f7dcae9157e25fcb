"""The command line. Each command is a file beside this one; here they become one program.

Importing a command is quick. Torch and the recipes are imported when the command runs, so that
`list` and `--help` answer at once.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

import typer

from recipes_lib.cli.bench import bench
from recipes_lib.cli.doctor import doctor
from recipes_lib.cli.finetune import finetune
from recipes_lib.cli.list import list_techniques

# `\b` keeps the lines of its paragraph apart.
HELP = """The recipes from a terminal.

\b
python -m recipes_lib list
python -m recipes_lib bench activation_checkpointing
python -m recipes_lib doctor --model llama-3.1-8b --memory 24 --seq-len 2048
python -m recipes_lib finetune --data pairs.jsonl --output runs/my-adapter
"""

# The disk is full, or this user or this place does not allow it.
OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

# A traceback in colours, with the values of variables, helps nobody who mistyped an option.
app = typer.Typer(
    help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


app.command(name="list")(list_techniques)
app.command()(bench)
app.command()(doctor)
app.command()(finetune)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that `arguments`, or the command line, name; ends with the exit status.

    What a user can put right (a wrong value, a missing package, too little memory, a full disk) is
    one line and status 1. Everything else is a defect of ours and shows its traceback.
    """
    try:
        app(args=arguments)
    except (ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
    except (OSError, RuntimeError) as error:
        if not _can_be_put_right(error):
            raise
        sys.exit(f"error: {error}")


def _can_be_put_right(error: Exception) -> bool:
    """Whether the user of a command can put the error right: then one line is enough."""
    if isinstance(error, OSError):
        return error.errno in OF_THE_MACHINE
    # Asked only when an error is here, so torch is imported already, or is not what raised it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)
