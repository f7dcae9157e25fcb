"""A frozen 4-bit linear layer whose codes and scales are parameters, so that each can be sharded.

bitsandbytes keeps the codes of a weight in a parameter, and its scales beside it, where
`fully_shard` does not see them: they stay whole on every rank. Here all of them are parameters of
whole numbers, with a dimension that can be cut into parts:

    codes         uint8 [O, I/2]     two 4-bit indices in a byte
    scales        uint8 [O, I/64]    each an index, too (double quantization)
    group_scales  uint8 [G, 4]       the bytes of one fp32 number for 256 scales

The last one holds bytes since mixed precision would round an fp32 parameter to bf16 on the way. The
16 levels of NF4 and the 256 of the scales, about a kilobyte, are buffers and stay whole.

O outputs, I inputs, B x S tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recipes_lib.core.measure.machine import require
from recipes_lib.core.model.bytes_of_tensors import parts_needed
from recipes_lib.core.model.second_derivatives import first_derivatives_only

BLOCK = 64  # weights that share a scale
GROUP = 256  # scales that share a scale


class NF4Linear(nn.Module):
    """`x -> x W^T + bias` with W in NF4, computed as bitsandbytes' `Linear4bit` computes it.

    W is made of codes and scales when it is needed, in forward and again in backward, and kept in
    between by nobody. Only `x` gets a gradient.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        group_scales: torch.Tensor,
        *,
        levels: torch.Tensor,
        scale_levels: torch.Tensor,
        mean: torch.Tensor,
        bias: torch.Tensor | None,
        weight_dtype: torch.dtype,
        compute_dtype: torch.dtype | None,
    ) -> None:
        """NF4's codes and scales as the top of the file says; `levels` [16], `scale_levels` [256].

        Args:
            mean: fp32 scalar, which was taken off all scales before they were quantized.
            weight_dtype: of the weight that was quantized, and of W when it is made.
            compute_dtype: of the product; None takes the dtype of `x`.
        """
        super().__init__()
        self.out_features, half = codes.shape
        self.in_features = 2 * half
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.group_scales = nn.Parameter(group_scales, requires_grad=False)
        self.register_buffer("levels", levels, persistent=False)
        self.register_buffer("scale_levels", scale_levels, persistent=False)
        self.register_buffer("mean", mean, persistent=False)
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        self.weight_dtype = weight_dtype
        self.compute_dtype = compute_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with an NF4 weight: x [B, S, I] -> [B, S, O], in the dtype of x."""
        computing = x.dtype if self.compute_dtype is None else self.compute_dtype
        y = _NF4Product.apply(x.to(computing), self.codes, self.scales, self.group_scales, self)
        if self.bias is not None:
            y = y + self.bias.to(computing)
        return y.to(x.dtype)

    def dequantized_weight(
        self, codes: torch.Tensor, scales: torch.Tensor, group_scales: torch.Tensor
    ) -> torch.Tensor:
        """W [O, I] of whole codes and scales, by the kernels of bitsandbytes."""
        functional = require("bitsandbytes").functional
        of_scales = functional.QuantState(
            absmax=group_scales.flatten().view(torch.float32),
            blocksize=GROUP,
            code=self.scale_levels,
            dtype=torch.float32,
        )
        state = functional.QuantState(
            absmax=scales.flatten(),
            shape=torch.Size((self.out_features, self.in_features)),
            dtype=self.weight_dtype,
            blocksize=2 * codes.shape[1] // scales.shape[1],
            quant_type="nf4",
            code=self.levels,
            offset=self.mean,
            state2=of_scales,
        )
        return functional.dequantize_4bit(codes.view(-1, 1), state)


class _NF4Product(torch.autograd.Function):
    """The product, which keeps codes and scales for backward, and not W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: Any, scales: Any, group_scales: Any, layer: Any):
        # `fully_shard` frees their memory after forward and fills it again before backward.
        ctx.save_for_backward(codes, scales, group_scales)
        ctx.layer = layer
        weight = layer.dequantized_weight(codes, scales, group_scales).to(x.dtype)
        return F.linear(x, weight)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, gradient: torch.Tensor):
        weight = ctx.layer.dequantized_weight(*ctx.saved_tensors).to(gradient.dtype)
        return gradient @ weight, None, None, None, None


# --- how a layer gets packed ----------------------------------------------------------------------


def pack_layers(model: Any) -> Any:
    """Make parameters of the codes and scales of all 4-bit layers, in place. Returns `model`."""
    layers = {}
    already = False
    for name, module in model.named_modules():
        already = already or isinstance(module, NF4Linear)
        if type(module).__name__ == "Linear4bit" and hasattr(module, "compute_dtype"):
            layers[name] = nf4_linear_of(name, module)
    if not layers and not already:
        raise ValueError(
            "this model has no layer in 4 bits: give the model that apply_qlora returned, or use "
            "apply_fully_sharded"
        )
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    return model


def nf4_linear_of(name: str, layer: Any) -> NF4Linear:
    """The codes and scales of bitsandbytes' `Linear4bit` as a `NF4Linear`, without a copy."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None or state.quant_type != "nf4" or not state.nested:
        raise ValueError(
            f"{name} has no weight in NF4 with double quantization, as apply_qlora makes it; on "
            f"some CPUs a forward in eval mode repacks it for inference"
        )
    outputs, inputs = state.shape
    if inputs % state.blocksize:
        raise ValueError(
            f"{name} has {inputs} inputs, and {state.blocksize} weights share a scale: a row would "
            f"share a scale with the next one, which may be on another rank"
        )
    codes = layer.weight.data.view(torch.uint8).view(outputs, inputs // 2)
    return NF4Linear(
        codes,
        state.absmax.view(outputs, inputs // state.blocksize),
        _as_bytes(state.state2.absmax),
        levels=state.code,
        scale_levels=state.state2.code,
        mean=state.offset,
        bias=layer.bias,
        weight_dtype=state.dtype,
        compute_dtype=layer.compute_dtype,
    )


def nf4_linear_like(linear: nn.Linear, *, compute_dtype: torch.dtype | None = None) -> NF4Linear:
    """A `NF4Linear` of the size of `linear` and without its numbers, for a dry run."""
    outputs, inputs = linear.weight.shape
    device = linear.weight.device
    scales = inputs // BLOCK
    groups = parts_needed(outputs * scales, GROUP)
    bias = linear.bias
    if bias is not None:
        bias = bias.data
    return NF4Linear(
        torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=device),
        torch.empty(outputs, scales, dtype=torch.uint8, device=device),
        torch.empty(groups, 4, dtype=torch.uint8, device=device),
        levels=torch.empty(16, device=device),
        scale_levels=torch.empty(256, device=device),
        mean=torch.empty((), device=device),
        bias=bias,
        weight_dtype=linear.weight.dtype,
        compute_dtype=compute_dtype,
    )


def _as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Scales of NF4 as bytes: fp32 [G] as uint8 [G, 4], the same memory."""
    return numbers.view(torch.uint8).view(-1, 4)
