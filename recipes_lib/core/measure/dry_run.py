"""Tensors without data: the same operators on shapes alone, which cost no memory and little time.

    with dry_run():
        model, optimizer, step = build()      # as always; recipes and libraries included
        with PeakMemory() as memory:
            step(model, optimizer)
    memory.peak                               # bytes that this step would take

Six things do not work on such tensors by themselves, and have a place here or in the recipe:

    `module.to(...)`               swaps parameters, which PyTorch refuses without data
    `from_pretrained(...)`         would read a file: the configuration is enough
    weights of bitsandbytes        a class that takes no tensor without data
    grouped products of experts    their shape rule knows bf16 only
    values that are read           see `values.py`
    threads                        see no pretence: recipes work at once while `dry()` is true
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

import torch
from torch import _meta_registrations, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from recipes_lib.core.measure.dry_values import Values, values_of

# What a weight of bitsandbytes knows of the way in which it was quantized.
HOW_IN_FOUR_BITS = ("blocksize", "compress_statistics", "quant_type", "quant_storage")


def dry() -> bool:
    """True inside `dry_run`, where tensors have no data."""
    return active_fake_mode() is not None


class AtOnce:
    """An executor that works when it is handed something, in this thread: the one that is dry."""

    def __init__(self, **ignored: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        """Call the function, and give a Future that is done."""
        done: Future = Future()
        done.set_result(function(*args))
        return done

    def shutdown(self, **ignored: Any) -> None:
        """Nothing waits."""


def pretend_a_card() -> None:
    """From here to the end of the dry run the device is a GPU, with a host beside it."""
    active_fake_mode().pretends_a_card = True


def pretends_a_card() -> bool:
    """True inside a dry run whose device is a GPU that may not be there."""
    return getattr(active_fake_mode(), "pretends_a_card", False)


@contextlib.contextmanager
def on_the_host() -> Iterator[None]:
    """What is made inside is in the memory of the host, and no account of a GPU counts it.

    In a dry run all tensors say that they are on one device. Elsewhere this changes nothing.
    """
    if not pretends_a_card():
        yield
        return
    values = active_fake_mode().values
    before = values.of_the_host
    values.of_the_host = True
    try:
        yield
    finally:
        values.of_the_host = before


def without_repetition(parts: Sequence[Any]) -> Sequence[Any]:
    """In a dry run the first two and the last of parts that differ in nothing but their values.

    Time is per operator there, and a third turn of a loop takes the bytes of the second.
    """
    if not dry() or len(parts) <= 3:
        return parts
    return [*parts[:2], parts[-1]]


def real_tensors() -> contextlib.AbstractContextManager:
    """Inside, tensors have data in a dry run, too: those that say where ranks are, for instance."""
    return _disable_current_modes() if dry() else contextlib.nullcontext()


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Inside, tensors have shapes and no data.

    `PeakMemory` counts the bytes that they would take, kernel by kernel as on this device. Raises
    ValueError where a decision hangs on a value.
    """
    from transformers import PreTrainedModel
    from transformers.utils import import_utils

    patches = [
        mock.patch.object(import_utils, "is_fake_tensor", _without_values),
        mock.patch.object(nn.Module, "_apply", _apply),
        mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(_from_configuration)),
        mock.patch.object(
            _meta_registrations, "_meta_grouped_mm_common", _grouped_product, create=True
        ),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(out_of_the_collectors_sight())
        stack.enter_context(_weights_of_bitsandbytes())
        mode = stack.enter_context(FakeTensorMode())
        mode.values = stack.enter_context(Values())
        yield


def _without_values(tensor: Any) -> bool:
    """transformers looks for padding and documents only where values can be read: here of some."""
    return isinstance(tensor, FakeTensor) and values_of(tensor) is None


def _apply(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, by which `to`, `half` and `cuda` change all tensors of a module.

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
    """The model of a hub id or folder with weights without data: no file of them is read."""
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

    def quantized(data: torch.Tensor, requires_grad: bool = False, **options: Any) -> nn.Parameter:
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
            stack.enter_context(mock.patch.object(module, "Params4bit", quantized))
        yield


def _grouped_product(
    rows: torch.Tensor, weights: torch.Tensor, *scales: Any, offs: Any = None, **ignored: Any
) -> torch.Tensor:
    """The product of rows and the weights of their experts, without data.

    PyTorch's own allows bf16 only, as its kernel on a GPU does. That on a CPU takes fp32 as well.
    """
    out_dtype = ignored.get("out_dtype")
    return _meta_registrations._create_grouped_mm_output_tensor(rows, weights, offs, out_dtype)


@contextlib.contextmanager
def out_of_the_collectors_sight() -> Iterator[None]:
    """Let the collector forget the objects that are there, until the end of this context.

    `PeakMemory` walks through all objects to find the tensors that are alive. In a dry run only
    its fake tensors count, and they are made inside: older objects need no look.
    """
    if gc.get_freeze_count() > 0:  # somebody has done so before, and would lose it at our end
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
