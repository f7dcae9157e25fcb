"""One rank of `core.launch`: join the others, call the function, report.

`core.launch` starts it with a folder and a number; nobody else does. In the folder are the task,
the file through which ranks find each other, and later the result of rank 0 and the errors.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the rank that the command line names, and end without waiting for the others."""
    folder = Path(sys.argv[1])
    rank = int(sys.argv[2])
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    code = 0
    try:
        result = _call(folder, rank)
        if rank == 0:
            _write(folder / "result", result)
    except BaseException as error:
        report = (type(error).__name__, str(error), traceback.format_exc())
        _write(folder / f"error-{rank}", report)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: after an error, the threads of a process group may wait for the others.
    os._exit(code)


def _call(folder: Path, rank: int) -> Any:
    """Join the process group, call the function, and leave."""
    task = pickle.loads((folder / "task").read_bytes())
    sys.path[:] = task["path"]
    import torch
    from torch import distributed

    torch.set_num_threads(task["threads"])
    device = None
    if task["device"] == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    distributed.init_process_group(
        task["backend"],
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=task["ranks"],
        timeout=timedelta(seconds=task["timeout"]),
        device_id=device,
    )
    function, arguments = pickle.loads(task["call"])
    result = function(**arguments)
    # No rank leaves while another may still want something from it.
    distributed.barrier()
    distributed.destroy_process_group()
    return result


def _write(file: Path, content: Any) -> None:
    """Whole or not at all: who finds the file can read it."""
    part = file.with_suffix(".part")
    part.write_bytes(pickle.dumps(content))
    part.rename(file)


def _end_with_the_parent() -> None:
    """Wait until nobody holds the other end of the input any more; then end the whole session."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
