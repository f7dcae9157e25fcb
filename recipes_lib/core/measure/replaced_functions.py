"""Functions of PyTorch, transformers and bitsandbytes that want data: a dry run replaces them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import _meta_registrations, nn
from torch._subclasses.fake_tensor import FakeTensor

from recipes_lib.core.measure.dry_values import values_of

# What a weight of bitsandbytes knows of the way in which it was quantized.
HOW_IN_FOUR_BITS = ("blocksize", "compress_statistics", "quant_type", "quant_storage")


@contextlib.contextmanager
def functions_without_data() -> Iterator[None]:
    """Inside, functions that want data are replaced: they are content with shapes."""
    from transformers import PreTrainedModel
    from transformers.utils import import_utils

    patches = [
        mock.patch.object(import_utils, "is_fake_tensor", _has_no_known_values),
        mock.patch.object(nn.Module, "_apply", _apply_without_data),
        mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(_from_configuration)),
        mock.patch.object(
            _meta_registrations, "_meta_grouped_mm_common", _grouped_product, create=True
        ),
        _weights_of_bitsandbytes(),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _has_no_known_values(tensor: Any) -> bool:
    """transformers looks for padding and documents only where values can be read: here of some."""
    return isinstance(tensor, FakeTensor) and values_of(tensor) is None


def _apply_without_data(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """In place of `nn.Module._apply`, by which `to`, `half` and `cuda` change all tensors.

    PyTorch's own swaps the old parameter with the new one, and refuses that for fake tensors. Here
    a parameter that becomes another tensor is replaced, and a tied one at both of its places.
    """
    if recurse:
        for child in module.children():
            child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if hasattr(parameter, "became"):
            module._parameters[name] = parameter.became
            continue
        with torch.no_grad():
            changed = change(parameter)
        same = (changed.dtype, changed.device) == (parameter.dtype, parameter.device)
        if changed is not parameter and not same:
            parameter.became = nn.Parameter(changed, requires_grad=parameter.requires_grad)
            module._parameters[name] = parameter.became
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module


def _from_configuration(
    cls: type, name: Any, *args: Any, config: Any = None, **options: Any
) -> Any:
    """In place of `from_pretrained`: a model without data, of which no file is read."""
    from transformers import AutoConfig, PretrainedConfig

    if options.get("quantization_config") is not None:
        raise ValueError(
            "from_pretrained(quantization_config=…) quantizes while it reads a file, and a dry run "
            "reads none: load in 16 bits and call apply_qlora"
        )
    if not isinstance(config, PretrainedConfig):
        config = AutoConfig.from_pretrained(name)
    config = copy.deepcopy(config)  # for the dtype is written into it
    dtype = options.get("dtype", options.get("torch_dtype"))
    if dtype in (None, "auto"):
        dtype = config.dtype or torch.float32
    return cls._from_config(config, dtype=dtype).eval()


@contextlib.contextmanager
def _weights_of_bitsandbytes() -> Iterator[None]:
    """Let `Params4bit` be a plain parameter with its scales: the layer asks for no more."""
    try:
        from bitsandbytes import functional
        from bitsandbytes import nn as layers
    except ImportError:
        yield
        return

    def quantized_weight(
        data: torch.Tensor, requires_grad: bool = False, **options: Any
    ) -> nn.Parameter:
        """In place of `Params4bit`: a plain parameter with its scales, without data."""
        if data.device.type == "meta":  # a layer that waits for its weight
            return nn.Parameter(data, requires_grad=False)
        how = {name: options[name] for name in HOW_IN_FOUR_BITS if name in options}
        packed, scales = functional.quantize_4bit(data, **how)
        weight = nn.Parameter(packed, requires_grad=False)
        layer = options.get("module")
        vars(weight).update(how, quant_state=scales, bnb_quantized=True, module=layer)
        if layer is not None:
            layer.quant_state = scales
        return weight

    with contextlib.ExitStack() as stack:
        # Tables of codes that are made in here have no data, and must not stay.
        stack.enter_context(mock.patch.dict(functional.name2qmap))
        for module in (layers, layers.modules):
            stack.enter_context(mock.patch.object(module, "Params4bit", quantized_weight))
        yield


def _grouped_product(
    rows: torch.Tensor, weights: torch.Tensor, *scales: Any, offs: Any = None, **ignored: Any
) -> torch.Tensor:
    """In place of PyTorch's: the product of rows and the weights of their experts, without data.

    PyTorch's own allows bf16 only, as its kernel on a GPU does. That on a CPU takes fp32 as well.
    """
    out_dtype = ignored.get("out_dtype")
    return _meta_registrations._create_grouped_mm_output_tensor(rows, weights, offs, out_dtype)
