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

    An `lr` and betas may be tensors, as PyTorch's own optimizers take them. Raises ValueError.
    """
    numbers = dict(options)
    if "lr" in numbers:
        numbers["lr"] = _without_tensor(numbers["lr"])
    check_number(least=0, **numbers)
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ValueError(f"betas={betas!r}: give two numbers, such as (0.9, 0.999)")
    beta1, beta2 = (_without_tensor(beta) for beta in betas)
    check_number(least=0, below=1, beta1=beta1, beta2=beta2)


def _without_tensor(number: Any) -> Any:
    """The number in a tensor; everything else as it is."""
    if isinstance(number, torch.Tensor) and number.numel() == 1:
        return number.item()
    return number


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
