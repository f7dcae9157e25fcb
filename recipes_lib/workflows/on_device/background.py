"""An export in another process, while the notebook goes on: its noise in a log, its result kept.

    job = in_background(export_language_model, model=model, path="smollm2.pte")
    …                                             the next cells
    exported = job.result(timeout=600)            what the function returns, or its error

An export of a language model takes minutes of one core and gigabytes of memory, and prints hundreds
of lines. One process beside the notebook does it; jobs wait for each other there.

    smollm2.pte        the file
    smollm2.pte.job    what the file was made of, and what the function returned; written last
    smollm2.pte.log    what the libraries printed

The same job a second time, of the same weights, settings, code and libraries, is done at once. In
FAST mode a job is done before the next cell: with tiny models, another process would spend most of
its time on its imports.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.measure.machine import fast

LIBRARIES = ("torch", "torchao", "executorch", "transformers", "onnx", "gguf")
EDGE = Path(__file__).resolve().parents[2] / "edge"  # the code that makes the files


def in_background(function: Callable[..., Any], *, path: str | Path, **arguments: Any) -> Future:
    """Call `function(path=…, **arguments)` in another process, and go on.

    Args:
        function: of a module, such as `export_language_model`; it takes `path`, and writes there.
        arguments: what can be pickled: models, tensors, numbers, texts.
    Returns a Future, whose `result()` has the errors of `function`, too. What cannot be pickled is
    an error here.
    """
    path = Path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    done: Future = Future()
    if fast():
        done.set_result(function(path=path, **arguments))
        return done
    key = key_of(function, arguments)
    record = path.with_name(f"{path.name}.job")
    if path.exists() and _kept(record)[0] == key:
        done.set_result(_kept(record)[1])
        return done
    # A copy. The executor's own pickling would move the tensors into shared memory, in a thread and
    # at a time of its own: the next call would hash weights that are just going.
    copied = pickle.dumps(arguments)
    return _process().submit(_work, function, path, record, key, copied)


def _kept(record: Path) -> tuple[str, Any]:
    """The key of a file that is there, and what the function returned; two blanks if unknown."""
    try:
        return pickle.loads(record.read_bytes())
    except Exception:  # not there, cut short, or of a version whose classes are gone
        return "", None


@functools.cache
def _process() -> ProcessPoolExecutor:
    """One process, which starts with the first job and ends with this one."""
    # Not a fork: this process has threads, of PyTorch and of the notebook.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_begin)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # to interrupt a cell does not end the export
    torch.set_num_threads(1)  # the other core is the notebook's


def _work(function: Callable[..., Any], path: Path, record: Path, key: str, copied: bytes) -> Any:
    """In the other process: call the function, and keep its result."""
    record.unlink(missing_ok=True)
    _send_output_to(path.with_name(f"{path.name}.log"))
    value = function(path=path, **pickle.loads(copied))
    record.write_bytes(pickle.dumps((key, value)))
    return value


def _send_output_to(log: Path) -> None:
    """All that this process prints from now on, the C++ of libraries included."""
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())


# --- what a file was made of ----------------------------------------------------------------------


def key_of(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """A hash of the function, all arguments, the code of exports, and the libraries' versions."""
    digest = hashlib.sha256(f"{function.__module__}.{function.__qualname__}".encode())
    for source in sorted(EDGE.rglob("*.py")):
        digest.update(source.read_bytes())
    for library in LIBRARIES:
        digest.update(importlib.metadata.version(library).encode())
    for name in sorted(arguments):
        digest.update(f"{name} {_described(arguments[name])};".encode())
    return digest.hexdigest()


def _described(value: Any) -> str:
    """What tells one value from another, as a text that is the same in the next process."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        content = hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy()).hexdigest()
        return f"{plain.dtype} {list(plain.shape)} {content}"
    if isinstance(value, nn.Module):
        settings = getattr(value, "config", "")
        # Every byte, and not a fingerprint of some: weights in whole numbers count as well.
        weights = {name: _described(tensor) for name, tensor in value.state_dict().items()}
        return f"{value} {settings} {weights}"
    if isinstance(value, tuple | list):
        return " ".join(map(_described, value))
    if hasattr(value, "get_vocab"):  # a tokenizer
        return f"{value.name_or_path} {len(value)} {value.chat_template}"
    return repr(value)
