"""Functions for a job in another process: they stand in for exports."""

import os
import time
from pathlib import Path

from recipes_lib.edge._exported_file import ExportedFile


def export_quickly(model, *, path, text="x"):
    """Counts its calls in a file beside the one that it writes."""
    print("a line of noise")
    path.write_text(text)
    with Path(text).open("a") as calls:
        calls.write("called\n")
    return ExportedFile(path, bytes=len(text), seconds=0.0)


def export_badly(*, path):
    path.write_text("half")
    raise ValueError("group=7: give another")


def export_forever(*, path):
    path.write_text("half")
    path.with_name("pid").write_text(str(os.getpid()))
    print("now it hangs", flush=True)
    time.sleep(600)
