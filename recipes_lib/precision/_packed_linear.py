"""What layers of few bits have in common: packed for a kernel here, in plain order in a file.

A kernel reads weights in the order of its instructions. Read with other instructions they are other
weights, of the same shape. So files, copies and moves to another device see them in plain order:

    plain()         the whole numbers in plain order, as a file holds them
    place(plain)    the same, as the kernel of their device wants them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.model.linears import replace_linears
from recipes_lib.core.model.marks import QUANTIZED_BY, mark


class PackedLinear(nn.Module):
    """y = x W^T + bias for inference. Scales stay in bf16 when the model is cast: kernels want it.

    A subclass has `plain`, `place` and a `forward`, and says what one weight takes.
    """

    in_a_file: str  # the name of the whole numbers
    dtype_in_a_file: torch.dtype
    scales: str  # and of the buffer that holds their scales

    def __init__(self, inputs: int, outputs: int, bias: Tensor | None, *, by: str) -> None:
        super().__init__()
        self.in_features = inputs
        self.out_features = outputs
        mark(self, QUANTIZED_BY, by)
        if bias is not None:
            bias = bias.detach().clone()
        self.register_buffer("bias", bias)

    def plain(self) -> Tensor:
        """The whole numbers in plain order."""
        raise NotImplementedError

    def place(self, plain: Tensor) -> None:
        """Pack the whole numbers as the kernel of their device wants them."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        scales = getattr(self, self.scales)
        device = fn(scales).device
        moves = device != scales.device
        if moves:
            plain = self.plain()
        super()._apply(fn, recurse)
        setattr(self, self.scales, scales.to(device))
        if moves:
            self.place(plain.to(device))
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + self.in_a_file] = self.plain()

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *others: Any) -> None:
        """Pack the whole numbers of a file, which has them in plain order."""
        # Without the whole numbers, which are no buffer of this layer: else they are unexpected.
        rest = dict(state_dict)
        plain = rest.pop(prefix + self.in_a_file, None)
        super()._load_from_state_dict(rest, prefix, *others)
        _strict, missing, _unexpected, errors = others[-4:]
        if plain is None:
            missing.append(prefix + self.in_a_file)
        elif plain.dtype is not self.dtype_in_a_file:
            errors.append(f"{prefix}{self.in_a_file} is {plain.dtype}: give whole numbers")
        else:
            self.place(plain.to(getattr(self, self.scales).device, copy=True))


def refuse_backward(x: Tensor) -> None:
    """A packed layer has no backward: raise ValueError where a gradient is wanted."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "layers in 8 or 4 bits have no backward: run the model under torch.no_grad(), train it "
            "before, or with recipes_lib.fine_tuning.qlora"
        )


def with_packed_layers(
    model: Any, names: Iterable[str], make: Callable[[nn.Linear], PackedLinear]
) -> Any:
    """Put packed layers, `make(linear)`, in the place of these; `model` is for inference then."""
    replace_linears(model, make, names=names)
    refuse_save_pretrained(model)
    return model.eval().requires_grad_(False)


def refuse_save_pretrained(model: Any) -> None:
    """With packed layers `model.save_pretrained` raises ValueError, where a model has one.

    transformers would write the whole numbers of a quantized layer as if they were its weights, and
    `from_pretrained` would load them without an error as another model.
    """
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = _refuse_to_save_packed


def _refuse_to_save_packed(*_: Any, **__: Any) -> None:
    raise ValueError(
        "the model is quantized, and from_pretrained would load other weights from its file: save "
        "the model before it is quantized, and quantize after loading; or keep its state_dict()"
    )
