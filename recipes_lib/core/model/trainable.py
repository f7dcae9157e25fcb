"""What an optimizer is given: the trainable parameters of a model, or what the caller has chosen.

PyTorch's optimizers take parameters. Those of the recipes take a model as well, because that is
what the caller has at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from recipes_lib.core.checks import check_number


def check_adamw(*, betas: tuple[float, float] = (0.9, 0.999), **options: Any) -> None:
    """The options of an AdamW: finite numbers of 0 or more, and betas below 1.

    All may be tensors, as PyTorch's own optimizers take them. Raises ValueError.
    """
    check_number(least=0, **{name: _number(value) for name, value in options.items()})
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"betas={betas!r}: give two numbers, such as (0.9, 0.999)")
    beta1, beta2 = betas
    check_number(least=0, below=1, beta1=_number(beta1), beta2=_number(beta2))


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def parameters_to_train(model_or_params: torch.nn.Module | Iterable[Any]) -> Iterable[Any]:
    """The trainable parameters of a model; parameters, or groups of them, come back as they are.

    Raises ValueError for a model that has none.
    """
    if not isinstance(model_or_params, torch.nn.Module):
        return model_or_params
    trainable = [p for p in model_or_params.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter: set requires_grad before this call")
    return trainable


def require_whole_fp32(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ValueError for trainable weights in 16 bits, and for parts of weights.

    16 bits round small steps away, and a part of a matrix (DTensor) has other directions.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype is not torch.float32:
            raise ValueError(
                f"trainable weights in {parameter.dtype}: call model.float() before this; "
                f"recipes_lib.precision.pure_bf16 has an AdamW for bf16"
            )
        if hasattr(parameter, "device_mesh"):
            raise ValueError("sharded parameters (DTensor): use torch.optim.AdamW under FSDP2")
