"""INT8 for inference: each weight is a whole number of 8 bits, and each row has a scale.

Problem    For one token every weight is read once and used in one product. The time is that of
           reading the weights: 4 bytes each in fp32.
Idea       A row is stored as whole numbers from -127 to 127 and one scale, which multiplies the sum
           of the products:

               W[n, k] = scale[n] Q[n, k]        scale[n] = max |W[n, :]| / 127
               y[n]    = scale[n] sum_k Q[n, k] x[k]

           "weight_only" keeps the activations x in 16 bits, or makes two rows of 8 bits of each row
           (x = high + rest / 126, as a number of two digits has tens and ones). "dynamic" rounds
           them to 8 bits as they come, with one scale for all of a call, and sums up whole numbers:
           fewer instructions per weight. "per_token" gives each token a scale of its own.
Saves      3 of the 4 bytes of an fp32 weight; a row's scale takes 2 bytes. A step of one token
           reads a quarter.
Costs      Weights are rounded by up to 1/254 of the largest in their row. With "dynamic" a prompt,
           a batch and a single token are rounded differently. "per_token" costs a few small
           operators per layer, "weight_only" some ten. There is no backward. Until the check on a
           few tokens is through, old and new weights exist.
Use when   Tokens are made one at a time and memory or its bandwidth is the limit: "dynamic" for
           speed on CPUs with instructions for whole numbers (VNNI), "weight_only" for quality.
Not when   Large batches and long prompts on a GPU, whose products are limited by arithmetic: bf16
           or fp8 there. Training. Where `int8_sensitivity` says that a layer suffers: leave it out.
In production   torchao `quantize_(model, Int8WeightOnlyConfig())` and
           `Int8DynamicActivationInt8WeightConfig()` (per token), compiled; bitsandbytes
           `load_in_8bit=True` (LLM.int8, which keeps columns of large activations in 16 bits); ONNX
           Runtime `quantize_dynamic`; llama.cpp Q8_0; vLLM loads W8A8 from llm-compressor.
Source     Jacob et al., arXiv 1712.05877; Dettmers et al., "LLM.int8()", arXiv 2208.07339; Xiao et
           al., "SmoothQuant", arXiv 2211.10438.

Shapes: M rows, K inputs, N outputs of a layer. An embedding that shares its weight with the output
layer stays as it is.

packed_weights  its products, with weights packed for FBGEMM and with a plain tensor of them
sensitivity     which layers suffer from 8 bits, by measurement
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.linears import layers_to_quantize
from recipes_lib.core.model.marks import ONE_SCALE_PER_CALL, mark
from recipes_lib.core.model.probe import proves
from recipes_lib.precision._converted_weights import native_bf16_on_cpu
from recipes_lib.precision._packed_linear import (
    PackedLinear,
    refuse_backward,
    with_packed_layers,
)
from recipes_lib.precision.int8.packed_weights import (
    has_packed_kernel,
    plain_product,
    reduced_range,
    weights_for_kernel,
)

KINDS = ("weight_only", "dynamic", "per_token")

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [N, K] as whole numbers from -127 to 127, and a scale [N] for each row."""
    scale = weight.abs().amax(dim=1) / 127  # [N]
    scale = scale.bfloat16().float()  # stored in two bytes: rounded before it divides
    return (weight / scale[:, None]).round().clamp(-127, 127), scale


def plain_weight_only(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times the quantized `weight` [N, K]: the sum of products first, then the scale."""
    whole, scale = plain_quantize(weight)
    return (x @ whole.T) * scale  # [M, N]


def plain_two_halves(x: Tensor) -> Tensor:
    """Activations x [M, K] in two halves of 8 bits: what is left of them."""
    largest = x.abs().amax(dim=1, keepdim=True)  # [M, 1]
    steps = x / largest * 63
    high = steps.round()  # whole numbers up to 63
    rest = ((steps - high) * 126).round()  # what is left, again up to 63
    return (high + rest / 126) * largest / 63


def plain_dynamic(x: Tensor, weight: Tensor) -> Tensor:
    """The same with activations in 8 bits: 256 steps from the smallest number to the largest."""
    whole, scale = plain_quantize(weight)
    low = x.min().clamp(max=0)  # zero is one of the steps
    high = x.max().clamp(min=0)
    step = (high - low) / 255
    zero = (-low / step).round()
    steps = (x / step + zero).round().clamp(0, 255)  # [M, K], 8 bits each
    return step * ((steps - zero) @ whole.T) * scale


# --- the technique --------------------------------------------------------------------------------


# Off by 0.01–0.03 on tiny models, and by up to 0.20 on SmolLM2 ("dynamic"), whose first token has
# large activations. Other weights would be off by more than 1.
@proves("rounds", bound=0.5, causal_lm=False)
def apply_int8(model: Any, *, kind: str = "weight_only", names: Iterable[str] | None = None) -> Any:
    """Replace linear layers of `model` by int8 ones, in place, one after the other.

    The model is for inference from then on: in eval mode, and nothing of it trains. Two calls with
    different `names` make a hybrid: some layers of one kind, some of another, the rest as it was.

    Args:
        model: a Hugging Face causal LM, or a decoder that `apply_decode_loop` made.
        kind: "weight_only", "dynamic" or "per_token".
        names: of the layers, as in `linear_layers(model)`. Default is all but the output layer
            and those whose weight the model's code reads by itself, as in Mamba.
    Warns where this machine has no fast kernel.
    """
    check_choice(KINDS, kind=kind)
    chosen = layers_to_quantize(model, names)
    _warn_of_slow_path(kind, model.get_submodule(chosen[0]).weight.device)
    return with_packed_layers(model, chosen, functools.partial(int8_linear, kind=kind))


def int8_linear(linear: nn.Linear, *, kind: str = "weight_only") -> Int8Linear:
    """The int8 layer that takes the place of `linear`; arguments as in `apply_int8`."""
    weight, scale = quantize_rows(linear.weight.detach())
    return Int8Linear(weight, scale, bias=linear.bias, kind=kind).eval()


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [N, K] as int8 [N, K] and bf16 scales [N], as `plain_quantize` does it."""
    weight = weight.float()
    # A row of zeros has the smallest scale instead of a division by zero.
    largest = weight.abs().amax(dim=1).clamp_min(1e-30)
    scale = (largest / 127).bfloat16()
    whole = (weight / scale.float()[:, None]).round().clamp(-127, 127)
    return whole.to(torch.int8), scale


class Int8Linear(PackedLinear):
    """y = x W^T + bias with W in 8 bits. Any leading shape [..., K], any floating dtype.

    The weights exist once: as a tensor `weight`, or packed for a kernel. A file holds the tensor in
    any case, so it does not depend on kind or machine.
    """

    in_a_file = "weight"
    dtype_in_a_file = torch.int8
    scales = "scale"

    def __init__(self, weight: Tensor, scale: Tensor, *, bias: Tensor | None, kind: str) -> None:
        """A layer with int8 `weight` and a scale for each row."""
        super().__init__(weight.shape[1], len(weight), bias, by="apply_int8")
        self.kind = kind
        self._has_bias = bias is not None  # a buffer takes nn.Module longer to find
        self.register_buffer("scale", scale)
        self.place(weight)

    def place(self, plain: Tensor) -> None:
        """Pack the int8 weight for the kernel of its kind, if there is one here."""
        self._packed = weights_for_kernel(self.kind, plain, self.scale)
        # Without packed weights, activations are not rounded.
        packed = self._packed is not None
        mark(self, ONE_SCALE_PER_CALL, self.kind == "dynamic" and packed)
        self.register_buffer("weight", None if packed else plain, persistent=False)

    def plain(self) -> Tensor:
        if self._packed is not None:
            return self._packed.whole_numbers()
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """The product with int8 weights: [..., K] -> [..., N], in the dtype of `x`."""
        refuse_backward(x)
        if x.numel() == 0:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        if self._packed is not None:
            y = self._packed.product(x)
        else:
            y = plain_product(x.reshape(-1, self.in_features), self.weight, self.scale)
            y = y.view(*x.shape[:-1], self.out_features)
        if self._has_bias:
            y = y + self.bias.to(y.dtype)
        return y

    def dequantized(self) -> Tensor:
        return self.plain().float() * self.scale.float()[:, None]

    @property
    def bytes_per_weight(self) -> float:
        return 1 + self.scale.element_size() / self.in_features

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickle: packed weights are a tensor there."""
        state = self.__dict__ | {"_packed": None, "_buffers": dict(self._buffers)}
        state["_buffers"]["weight"] = self.plain()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.place(self.weight)


def _warn_of_slow_path(kind: str, device: torch.device) -> None:
    """Say once per call what this machine lacks for int8; results are right either way."""
    if device.type != "cpu":
        return
    problem = None
    if kind == "weight_only":
        whole_numbers = has_packed_kernel(device) and not reduced_range()
        if not whole_numbers and not native_bf16_on_cpu():
            problem = "this CPU has no VNNI and no native bf16: prompts are computed in fp32"
    elif not has_packed_kernel(device):
        problem = "this CPU has no FBGEMM: activations stay in their dtype, which is slower"
    elif reduced_range():
        problem = "this CPU has no VNNI: activations get 7 bits instead of 8"
    if problem:
        warnings.warn(problem, stacklevel=4)
