"""One rank of a pool: join the others, then take one task after the other.

`core.rank_process` starts it with a folder and a number; nobody else does. In the folder are the
setup, the file through which ranks find each other, the tasks, and the answers. The numbers of the
tasks come through the input.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from recipes_lib.core.ranks.rank_process import END_OF_CALL, JOINED, Answer

SEED = 0
# The parent ends ranks that wait too long. The group itself never has to.
GROUP_TIMEOUT = timedelta(days=7)


def main() -> None:
    """Be the rank that the command line names, until the input ends."""
    folder = Path(sys.argv[1])
    rank = int(sys.argv[2])
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(_own_input(), numbers), daemon=True).start()
    # On this signal the rank writes down in which functions it is, whatever it is doing.
    stack = (folder / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    _answer(folder, rank, JOINED, partial(_join, folder, rank))
    while True:
        number = numbers.get()
        _answer(folder, rank, number, partial(_call, folder / f"task-{number}"))


def _own_input() -> TextIO:
    """The input of this process. What the functions start gets an empty one instead."""
    own = os.fdopen(os.dup(0))
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return own


def _listen(own_input: TextIO, numbers: queue.SimpleQueue[int]) -> None:
    """Read numbers until nobody holds the other end any more; then end the whole session."""
    for line in own_input:
        numbers.put(int(line))
    os.killpg(0, signal.SIGKILL)


def _answer(folder: Path, rank: int, number: int, action: Callable[[], Any]) -> None:
    """Act, and write down the result, if this is rank 0, or the error."""
    answer = Answer()
    try:
        result = action()
        if rank == 0:
            answer.result = pickle.dumps(result)
        del result
        gc.collect()  # models refer to themselves, and the next task may count bytes
    except BaseException as error:
        answer.error = (type(error).__name__, str(error), traceback.format_exc())
    sys.stderr.flush()
    print(END_OF_CALL, end="", flush=True)
    # Whole or not at all: who finds the file can read it.
    file = folder / f"answer-{number}-{rank}"
    part = file.with_suffix(".part")
    part.write_bytes(pickle.dumps(answer))
    part.rename(file)


def _join(folder: Path, rank: int) -> None:
    """Join the process group, on the device of this rank."""
    setup = pickle.loads((folder / "setup").read_bytes())
    import torch
    from torch import distributed

    torch.set_num_threads(setup["threads"])
    device = None
    if setup["device"] == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    distributed.init_process_group(
        setup["backend"],
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=setup["ranks"],
        timeout=GROUP_TIMEOUT,
        device_id=device,
    )
    distributed.barrier()


def _call(task_file: Path) -> Any:
    """Call the function of a task."""
    import torch

    task = pickle.loads(task_file.read_bytes())
    sys.path[:] = task["path"]
    torch.manual_seed(SEED)
    function, arguments = pickle.loads(task["call"])
    gc.freeze()  # what the imports have made stays: spare the collector the walk through it
    return function(**arguments)


if __name__ == "__main__":
    main()
