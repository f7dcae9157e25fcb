"""The programs that write the same text with the same weights: ours, and those on top of PyTorch.

Each `Peer` says how to load a program. What it loads can read a prompt, and can write greedily.
The one that reads files of its own is in `peer_llama_cpp.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import nn

from recipes_lib.core.measure.machine import require
from recipes_lib.core.model import load_model
from recipes_lib.core.model.decoding import greedy
from recipes_lib.core.model.linears import linear_layers, replace_linears
from recipes_lib.inference.decode_loop import apply_decode_loop
from recipes_lib.precision.int4 import apply_int4
from recipes_lib.precision.int8 import apply_int8
from recipes_lib.precision.sixteen_bit_weights import apply_sixteen_bit_weights

OUTLIERS = 6.0  # LLM.int8() keeps columns with larger activations in 16 bits


Write = Callable[[Sequence[int], int], list[int]]


@dataclass(frozen=True)
class Loaded:
    """A program with its weights.

    `write(prompt, new_tokens)` gives the new tokens, and `read(prompt)` computes the
    logits of the last token.
    """

    write: Write
    read: Callable[[Sequence[int]], None]
    version: str


@dataclass(frozen=True)
class Peer:
    """A row of the table. `beside` names the row of ours with as many bits per weight."""

    name: str
    bits: int
    load: Callable[[], Loaded]
    beside: str | None = None


# --- ours -----------------------------------------------------------------------------------------


def unchanged(decoder: Any) -> Any:
    """The weights as they come, in fp32."""
    return decoder


def all_in_int8(decoder: Any, *, kind: str) -> Any:
    """All products in 8 bits, the output layer's among them."""
    return apply_int8(decoder, kind=kind, names=list(linear_layers(decoder)))


def int4_with_int8_head(decoder: Any) -> Any:
    """Blocks in four bits in groups of 32, as in a Q4_0 file, and the output layer in eight."""
    apply_int4(decoder, group=32, symmetric=True)
    return apply_int8(decoder, kind="weight_only", names=["head"])


def load_ours(change: Callable[[Any], Any]) -> Loaded:
    """The decode loop with its layers changed."""
    decoder = change(apply_decode_loop(_model()))

    def write(prompt: Sequence[int], new_tokens: int) -> list[int]:
        return greedy(decoder, prompt, new_tokens=new_tokens)

    def read(prompt: Sequence[int]) -> None:
        greedy(decoder, prompt, new_tokens=1)

    return Loaded(write, read, metadata.version("llm-training-recipes"))


# --- transformers, and what changes its layers ----------------------------------------------------


def load_transformers(
    dtype: torch.dtype, change: Callable[[Any], Any] = unchanged, package: str = "transformers"
) -> Loaded:
    """`model.generate` with its layers changed by `package`."""
    model = change(_model(dtype))

    def write(prompt: Sequence[int], new_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        prompt_and_answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return prompt_and_answer[0, len(prompt) :].tolist()

    def read(prompt: Sequence[int]) -> None:
        with torch.inference_mode():
            model(torch.tensor([prompt]), logits_to_keep=1)

    return Loaded(write, read, metadata.version(package))


def torchao_weight_only(model: Any) -> Any:
    """Each weight as a whole number of 8 bits with a scale per row."""
    require("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


def torchao_compiled(model: Any) -> Any:
    """The same, compiled as its documentation advises. The length of the cache stays open."""
    model = torchao_weight_only(model)
    model.forward = torch.compile(model.forward, dynamic=True)
    return model


def bitsandbytes_eight_bits(model: Any) -> Any:
    """LLM.int8() in all linear layers."""
    layers = require("bitsandbytes").nn

    def make(linear: nn.Linear) -> nn.Module:
        eight_bits = layers.Linear8bitLt(
            linear.in_features,
            linear.out_features,
            bias=False,
            has_fp16_weights=False,
            threshold=OUTLIERS,
        )
        # The copy: an output layer shares its weight with the embedding, which stays as it is.
        weight = linear.weight.detach().clone()
        eight_bits.weight = layers.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        return eight_bits.to("cpu")  # this is when the weights become whole numbers

    return replace_linears(model, make, names=list(linear_layers(model)))


def _model(dtype: torch.dtype = torch.float32) -> Any:
    """The default model on the CPU, which goes on writing until it is told to stop."""
    model = load_model(dtype=dtype, device="cpu").eval()
    model.generation_config.eos_token_id = None
    return model


# --- all of them ----------------------------------------------------------------------------------


def programs_on_pytorch() -> list[Peer]:
    """Ours, and every program that runs inside of PyTorch."""
    fp32, bf16 = torch.float32, torch.bfloat16
    ours = [
        ("fp32", 32, unchanged),
        ("16 bits", 16, apply_sixteen_bit_weights),
        ("int8 weight-only", 8, partial(all_in_int8, kind="weight_only")),
        ("int8 dynamic", 8, partial(all_in_int8, kind="dynamic")),
        ("int4", 4, int4_with_int8_head),
    ]
    peers = []
    for name, bits, change in ours:
        peers.append(Peer(f"ours, {name}", bits, partial(load_ours, change)))
    with_torchao = partial(load_transformers, bf16, package="torchao")
    by_generate = {
        "transformers, fp32": (32, partial(load_transformers, fp32), "fp32"),
        "transformers, bf16": (16, partial(load_transformers, bf16), "16 bits"),
        "torchao, int8 weight-only": (
            8,
            partial(with_torchao, torchao_weight_only),
            "int8 weight-only",
        ),
        "torchao, int8 weight-only, compiled": (
            8,
            partial(with_torchao, torchao_compiled),
            "int8 weight-only",
        ),
        "bitsandbytes, LLM.int8": (
            8,
            partial(load_transformers, fp32, bitsandbytes_eight_bits, package="bitsandbytes"),
            "int8 dynamic",
        ),
    }
    for name, (bits, load, beside) in by_generate.items():
        peers.append(Peer(name, bits, load, f"ours, {beside}"))
    return peers
