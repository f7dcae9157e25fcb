"""16-bit weights for inference: half the bytes per token, on the path that is fast for one row.

Problem    For one token every weight is read once and used in one product. The time is that of
           reading the weights: 4 bytes each in fp32.
Idea       Store weights and hidden states in bf16 or fp16, and add up in fp32. On a GPU that is
           all. On a CPU the same call is fast or slow depending on dtype and number of rows:

                                         one row                 many rows (a prompt)
               bf16 through oneDNN       half of the gain        fast, where bf16 is native
               bf16 without oneDNN       fast                    as many times one row
               fp16                      fast                    as many times one row

           So each layer picks its product by the number of rows that come in.
Saves      2 of the 4 bytes of an fp32 weight: a step of one token reads half.
Costs      bf16 has 8 significant bits, fp16 has 11. fp16 ends at 65,504: hidden states of some
           models are larger and overflow. For a prompt fp16 weights are converted, block by block.
Use when   Always, for inference: it is the first step, and the dtype that most models come in.
Not when   A CPU without fast 16-bit products, which the function warns of. Nor by `model.half()` or
           `model.bfloat16()`: they also round the frequencies of rotary positions, which are
           buffers, and token 2,000 then stands at another position. Here they stay.
In production   `from_pretrained(…, dtype=torch.bfloat16)` or `dtype="auto"`; vLLM `--dtype auto`;
           llama.cpp F16 and BF16 files.
Source     Kalamkar et al., "A Study of BFLOAT16", arXiv 1905.12322; oneDNN, "Primitive attributes:
           bf16"; PyTorch, ATen's matrix-vector products for reduced floating-point types.

Shapes: M rows, K inputs, N outputs of a layer.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.decoding import require_causal_lm_or_decoder
from recipes_lib.core.model.linears import linear_layers, replace_linears
from recipes_lib.core.model.loading import kept_in_fp32
from recipes_lib.core.model.probe import proves
from recipes_lib.precision._converted_weights import converted_product, native_bf16_on_cpu

DTYPES = (torch.bfloat16, torch.float16)
# Up to this many rows, the CPU's product for one row is faster, repeated, than a matrix product.
FEW_ROWS = {torch.bfloat16: 1, torch.float16: 4}

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_sixteen_bit_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x [M, K] and `weight` [N, K] are stored in 16 bits; products are summed up in fp32."""
    x = x.to(dtype).float()
    y = x @ weight.to(dtype).float().T  # [M, N]
    if bias is not None:
        y = y + bias.to(dtype).float()
    return y.to(dtype)


# --- the technique --------------------------------------------------------------------------------


# bf16 is off by 0.005–0.009 on tiny models and by 0.023 on SmolLM2.
@proves("rounds", bound=0.1, causal_lm=False)
def apply_sixteen_bit_weights(model: Any, *, dtype: torch.dtype | None = None) -> Any:
    """Store all parameters of `model` in 16 bits, in place, and pick the product by rows.

    Hidden states have this dtype from then on, because the embedding has it. The model is for
    inference: in eval mode, and nothing of it trains. What `from_pretrained(dtype=…)` leaves in
    fp32 stays there: the frequencies of rotary positions, most other buffers, and the parameters
    that the model's class names, such as routers.

    Args:
        model: a Hugging Face causal LM, or a decoder that `apply_decode_loop` made.
        dtype: torch.bfloat16 or torch.float16. Default is that of `sixteen_bit_path` for the
            model's device, which says what is computed how.
    Warns on a CPU without native bf16.
    """
    require_causal_lm_or_decoder(model)
    path = sixteen_bit_path(next(model.parameters()).device, dtype=dtype)
    if path.lacks:
        warnings.warn(path.lacks, stacklevel=3)
    _round_as_loaded(model, path.dtype)
    layers = linear_layers(model)
    names = [name for name, layer in layers.items() if layer.weight.dtype is path.dtype]
    return replace_linears(model, SixteenBitLinear, names=names).eval().requires_grad_(False)


def _round_as_loaded(model: nn.Module, dtype: torch.dtype) -> None:
    """What would be in 16 bits if the model had been loaded so. What is tied stays tied.

    Each weight is a new one, so the check on a few tokens can give the old ones back.
    """
    stay = kept_in_fp32(model, dtype)
    made = _buffers_made_in(model, dtype)
    rounded: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and name not in stay:
            rounded[id(parameter)] = nn.Parameter(parameter.data.to(dtype), requires_grad=False)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, rounded.get(id(parameter), parameter))
        for name, buffer in module.named_buffers(recurse=False):
            if ".".join(filter(None, [path, name])) in made:
                setattr(module, name, buffer.to(dtype))


def _buffers_made_in(model: Any, dtype: torch.dtype) -> set[str]:
    """Buffers that are fp32 in `model`, and that its class makes in the 16-bit `dtype`.

    Inside of peft's or torch.compile's wrapper as well. Empty for what is no Hugging Face model.
    """
    inside = _hugging_face_model(model)
    if inside is None:
        return set()
    with torch.device("meta"):
        made = type(inside)._from_config(copy.deepcopy(inside.config), dtype=dtype)
    in_16_bits = {name for name, buffer in made.named_buffers() if buffer.dtype is dtype}
    found = {
        id(buffer)
        for name, buffer in inside.named_buffers()
        if name in in_16_bits and buffer.dtype is torch.float32
    }
    # By the names that `model` has for them: a wrapper puts something before each.
    return {name for name, buffer in model.named_buffers() if id(buffer) in found}


def _hugging_face_model(model: torch.nn.Module) -> Any:
    """`model`, or the one in its wrappers; None if there is none.

    The class is asked: a wrapper passes on what it has not itself, so the object says yes.
    """
    for module in model.modules():
        if hasattr(type(module), "_from_config"):
            return module
    return None


class SixteenBitLinear(nn.Linear):
    """An `nn.Linear` that has weight and bias of another, and picks its product by rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """16-bit weights times one row by the product that is fast for it, or many by another."""
        weight, bias = self.weight, self.bias
        if weight.device.type != "cpu":
            return functional.linear(x.to(weight.dtype), weight, bias).to(x.dtype)
        rows = x.numel() // self.in_features
        if rows <= FEW_ROWS.get(weight.dtype, 0):
            return few_rows_product(x, weight, bias)
        return many_rows_product(x, weight, bias)


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """16-bit weights times one row, with x [..., K] in the dtype of `weight`: [..., N]."""
    rows = x.to(weight.dtype)
    if weight.dtype is torch.bfloat16:
        with _without_onednn():
            return functional.linear(rows, weight, bias).to(x.dtype)
    return functional.linear(rows, weight, bias).to(x.dtype)


def many_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """16-bit weights times many rows, in the dtype that is fast here: [..., K] -> [..., N]."""
    rows = x.reshape(-1, x.shape[-1])  # [M, K]
    y = converted_product(rows, weight)  # [M, N]
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype).view(*x.shape[:-1], len(weight))


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """ATen's own product of one bf16 row is faster than oneDNN's. The switch is global."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


class SixteenBitPath(NamedTuple):
    """What is computed how on one device; `lacks` names what would be faster and is missing."""

    dtype: torch.dtype
    one_row: str
    many_rows: str
    lacks: str | None

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} weights; one token: {self.one_row}; a prompt: {self.many_rows}"


def sixteen_bit_path(
    device: torch.device | str, *, dtype: torch.dtype | None = None
) -> SixteenBitPath:
    """The fast path for 16-bit weights on this machine, with the dtype that it is for."""
    device = torch.device(device)
    native = device.type != "cpu" or native_bf16_on_cpu()
    if device.type == "cuda":
        # `torch.cuda.is_bf16_supported()` says yes where bf16 is emulated, as on a T4.
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    if dtype is None:
        dtype = torch.bfloat16 if native else torch.float16
    check_choice(DTYPES, dtype=dtype)
    if device.type != "cpu":
        return SixteenBitPath(dtype, "cuBLAS", "cuBLAS", None)
    one_row = "ATen's product of a row"
    if dtype is torch.bfloat16:
        one_row += ", oneDNN switched off"
    if native:
        return SixteenBitPath(dtype, one_row, "a bf16 product of oneDNN", None)
    lacks = "this CPU has no native bf16 products: prompts are computed in fp32"
    return SixteenBitPath(dtype, one_row, "an fp32 product", lacks)
