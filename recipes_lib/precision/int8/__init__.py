"""INT8 for inference: each weight is a whole number of 8 bits, and each row has a scale.

Problem    For one token every weight is read once and used in one product. The time is that of
           reading the weights: 4 bytes each in fp32.
Idea       A row is stored as whole numbers from -127 to 127 and one scale. The products use the
           whole numbers, and the scale multiplies the sum:

               W[n, k] = scale[n] Q[n, k]        scale[n] = max |W[n, :]| / 127
               y[n]    = scale[n] sum_k Q[n, k] x[k]

           "weight_only" keeps the activations x in 16 bits. "dynamic" rounds them to 8 bits as
           they come, with one scale for all of a call, and sums up whole numbers: fewer
           instructions per weight. "per_token" gives each token a scale of its own.
           With the same instructions, "weight_only" makes two rows of 8 bits of each row:

               x  =  high + rest / 126     as a number of two digits has tens and ones
Saves      3 of the 4 bytes of an fp32 weight; a row's scale takes 2 bytes. A step of one token
           reads a quarter.
Costs      Weights are rounded by up to 1/254 of the largest in their row. "weight_only" rounds
           activations to two halves of 8 bits, or to bf16 where the CPU has no instructions for
           whole numbers (VNNI), and costs some ten small operators per layer. "dynamic" rounds
           them to 256 steps between the smallest and the largest number of the call, so a prompt,
           a batch and a single token are rounded differently. "per_token" costs a few small
           operators per layer, and a token no longer depends on the others. There is no backward.
Use when   Tokens are made one at a time and memory or its bandwidth is the limit: "dynamic" for
           speed on CPUs with VNNI, "weight_only" for quality.
Not when   Large batches and long prompts on a GPU, whose products are limited by arithmetic: bf16
           or fp8 there. Training. Where `int8_sensitivity` says that a layer suffers: leave it out.
In production   torchao `quantize_(model, Int8WeightOnlyConfig())` and
           `Int8DynamicActivationInt8WeightConfig()` (per token), compiled; bitsandbytes
           `BitsAndBytesConfig(load_in_8bit=True)` (LLM.int8, which keeps columns of large
           activations in 16 bits); ONNX Runtime `quantize_dynamic(…, per_channel=True)`; llama.cpp
           Q8_0 (groups of 32); vLLM loads checkpoints of W8A8 from llm-compressor.
Source     Jacob et al., arXiv 1712.05877; Dettmers et al., "LLM.int8()", arXiv 2208.07339; Xiao et
           al., "SmoothQuant", arXiv 2211.10438.

The embedding stays as it is: a step reads one row of it. If the output layer shares its weight,
that layer gets an int8 copy of its own, if it is among `names`.

Shapes: M rows, K inputs, N outputs of a layer.

kernels  its products with a plain tensor of weights, and what slows them silently
packed  its products on a CPU's instructions for whole numbers, with packed weights
sensitivity  which layers suffer from 8 bits, by measurement
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.linears import (
    layers_to_quantize,
    refuse_save_pretrained,
    replace_linears,
    require_linear,
    require_module,
)
from recipes_lib.core.model.marks import ONE_SCALE_PER_CALL, QUANTIZED_BY, mark
from recipes_lib.core.model.sizes import storage_bytes
from recipes_lib.precision._converted_weights import native_bf16_on_cpu
from recipes_lib.precision.int8.kernels import integer_product, weight_only_product
from recipes_lib.precision.int8.packed import has_packed_kernel, packed_weights, reduced_range

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


def apply_int8(model: Any, *, kind: str = "weight_only", names: Iterable[str] | None = None) -> Any:
    """Replace linear layers of `model` by int8 ones, in place, one after the other.

    The model is for inference from then on: in eval mode, and nothing of it trains. Two calls with
    different `names` make a hybrid: some layers of one kind, some of another, the rest as it was.

    Args:
        model: a Hugging Face causal LM, or a decoder that `apply_decode_loop` made.
        kind: "weight_only", "dynamic" or "per_token".
        names: of the layers, as in `linear_layers(model)`. Default is all but the output layer
            and those whose weight the model's code reads by itself, as in Mamba.
    Raises ValueError, before anything changes, for an unknown kind or name, a text instead of a
    list of names, layers that are quantized already, adapters, weights that are not finite or no
    floating-point numbers, and a model that is no causal LM or has no linear layer to replace.
    Warns where this machine has no fast kernel.
    """
    check_choice(KINDS, kind=kind)
    chosen = layers_to_quantize(model, names)
    for name in chosen:
        _check_layer(name, model.get_submodule(name))
    _warn_of_slow_path(kind, model.get_submodule(chosen[0]).weight.device)

    def make(name: str, linear: nn.Linear) -> Int8Linear:
        return int8_linear(linear, kind=kind)

    replace_linears(model, make, names=chosen)
    refuse_save_pretrained(model)
    return model.eval().requires_grad_(False)


def int8_linear(linear: nn.Linear, *, kind: str = "weight_only") -> Int8Linear:
    """The int8 layer that takes the place of `linear`; arguments as in `apply_int8`.

    Raises ValueError for what is no `nn.Linear`, and for an unknown kind.
    """
    require_linear(linear)
    check_choice(KINDS, kind=kind)
    weight, scale = quantize_rows(linear.weight.detach())
    return Int8Linear(weight, scale, bias=linear.bias, kind=kind).eval()


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [N, K] as int8 [N, K] and bf16 scales [N], as `plain_quantize` does it.

    Raises ValueError for another number of dimensions.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight {list(weight.shape)}: give the weight [N, K] of a linear layer")
    weight = weight.float()
    # A row of zeros has the smallest scale instead of a division by zero.
    largest = weight.abs().amax(dim=1).clamp_min(1e-30)
    scale = (largest / 127).bfloat16()
    whole = (weight / scale.float()[:, None]).round().clamp(-127, 127)
    return whole.to(torch.int8), scale


class Int8Linear(nn.Module):
    """y = x W^T + bias with W in 8 bits. Any leading shape [..., K], any floating dtype.

    The weights exist once: as a tensor `weight`, or packed for a kernel. `state_dict` holds the
    tensor in any case, so a file does not depend on kind or machine.
    """

    def __init__(self, weight: Tensor, scale: Tensor, *, bias: Tensor | None, kind: str) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kind = kind
        mark(self, QUANTIZED_BY, "apply_int8")
        self._has_bias = bias is not None  # a buffer takes nn.Module longer to find
        if bias is not None:
            bias = bias.detach().clone()
        self.register_buffer("bias", bias)
        self.register_buffer("scale", scale)
        self._place(weight)

    def _place(self, weight: Tensor) -> None:
        """Keep int8 `weight` [N, K] as the kernel of its device wants it."""
        self._packed = packed_weights(self.kind, weight, self.scale)
        # Without packed weights, "dynamic" gives each row a scale of its own.
        packed = self._packed is not None
        mark(self, ONE_SCALE_PER_CALL, self.kind == "dynamic" and packed)
        if packed:
            weight = None
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], in the dtype of `x`. Raises ValueError where it should train."""
        if self.training or x.requires_grad:
            self._refuse_training(x)
        if x.numel() == 0:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        if self._packed is not None:
            y = self._packed.product(x)
        else:
            y = self._product(x.reshape(-1, self.in_features))
            y = y.view(*x.shape[:-1], self.out_features)
        if self._has_bias:
            y = y + self.bias.to(y.dtype)
        return y

    def _product(self, rows: Tensor) -> Tensor:
        if self.kind == "weight_only":
            return weight_only_product(rows, self.weight, self.scale)
        return integer_product(rows, self.weight, self.scale)

    def _refuse_training(self, x: Tensor) -> None:
        if self.training:
            raise ValueError("int8 layers do not train: call model.eval() first")
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                "int8 layers have no backward: run them under torch.no_grad(), or train before "
                "apply_int8"
            )

    def whole_numbers(self) -> Tensor:
        """The int8 weight [N, K]."""
        if self._packed is not None:
            return self._packed.whole_numbers()
        return self.weight

    def dequantized(self) -> Tensor:
        """The weight that this layer computes with, in fp32 [N, K]."""
        return self.whole_numbers().float() * self.scale.float()[:, None]

    @property
    def bytes_per_weight(self) -> float:
        """Stored bytes for each weight, with its part of a scale."""
        return 1 + self.scale.element_size() / self.in_features

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.in_features}, {self.out_features}, kind={self.kind}"

    # Weights may be packed, and scales stay in bf16 when the model is cast: in fp16 small ones
    # would lose digits, and the kernel is slow with fp32.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        scale = self.scale
        device = fn(scale).device
        weight = None
        if device != scale.device:
            weight = self.whole_numbers()
        super()._apply(fn, recurse)
        self.scale = scale.to(device)
        if weight is not None:
            self._place(weight.to(device))
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.whole_numbers()

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *others: Any) -> None:
        state_dict = dict(state_dict)
        weight = state_dict.pop(f"{prefix}weight", None)
        super()._load_from_state_dict(state_dict, prefix, *others)
        _strict, missing, _unexpected, errors = others[-4:]
        shape = (self.out_features, self.in_features)
        if weight is None:
            missing.append(f"{prefix}weight")
        elif weight.dtype is not torch.int8 or weight.shape != shape:
            errors.append(
                f"{prefix}weight is {weight.dtype} {list(weight.shape)}: give int8 {list(shape)}, "
                f"as apply_int8 makes it"
            )
        else:
            self._place(weight.to(self.scale.device, copy=True))

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickle: packed weights are a tensor there."""
        state = self.__dict__ | {"_packed": None, "_buffers": dict(self._buffers)}
        state["_buffers"]["weight"] = self.whole_numbers()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._place(self.weight)


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _check_layer(name: str, linear: nn.Linear) -> None:
    if linear.weight.is_meta:
        raise ValueError(f"{name} has no weights yet (device meta): load them first")
    if not linear.weight.is_floating_point():
        raise ValueError(
            f"{name} has weights in {linear.weight.dtype}: give a model that is not quantized yet"
        )
    if not linear.weight.isfinite().all():
        raise ValueError(f"{name} has weights that are not finite: no scale can hold them")


def _warn_of_slow_path(kind: str, device: torch.device) -> None:
    """Say once per call what this machine lacks; the results are right either way."""
    if device.type != "cpu":
        return
    problem = None
    if kind == "weight_only":
        whole_numbers = has_packed_kernel(device) and not reduced_range()
        if not whole_numbers and not native_bf16_on_cpu():
            problem = "this CPU has no VNNI and no native bf16: prompts are computed in fp32"
    elif not has_packed_kernel(device):
        problem = "this CPU has no FBGEMM: int8 products are computed without packed weights"
    elif reduced_range():
        problem = "this CPU has no VNNI: activations get 7 bits instead of 8"
    if problem:
        warnings.warn(problem, stacklevel=3)


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_int8_bytes(model: Any, *, names: Iterable[str] | None = None) -> int:
    """Bytes of all weights after `apply_int8` on `model`, which is in full precision as it is now.

    A weight takes a byte, and each row a scale of two bytes. An embedding that shares the weight of
    a layer stays as it is. Packed weights are counted as if they were in plain order. Raises
    ValueError as `apply_int8` does.
    """
    chosen = layers_to_quantize(model, names)
    replaced = {f"{name}.weight" for name in chosen}
    rest = [tensor for name, tensor in _named_tensors(model) if name not in replaced]
    eight_bits = 0
    for name in chosen:
        rows, columns = model.get_submodule(name).weight.shape
        eight_bits += rows * columns + 2 * rows
    return storage_bytes(rest) + eight_bits


def stored_bytes(model: Any) -> int:
    """Bytes of all weights as stored, int8 ones among them, packed or not; tied ones count once.

    Raises ValueError for what is no model.
    """
    require_module(model)
    total = storage_bytes([tensor for _, tensor in _named_tensors(model)])
    for layer in model.modules():
        if isinstance(layer, Int8Linear) and layer.weight is None:
            total += layer.out_features * layer.in_features
    return total


def _named_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers under every name that they have."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
