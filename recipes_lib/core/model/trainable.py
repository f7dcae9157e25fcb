"""What an optimizer is given: what trains in a model, or parameters that the caller has chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def parameters_to_train(model_or_params: torch.nn.Module | Iterable[Any]) -> Iterable[Any]:
    """The trainable parameters of a model; parameters, or groups of them, come back as they are."""
    if not isinstance(model_or_params, torch.nn.Module):
        return model_or_params
    return [p for p in model_or_params.parameters() if p.requires_grad]


def require_whole_fp32(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ValueError for trainable parameters in 16 bits, and for parts of them.

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
