"""What data parallelism and ZeRO begin with: a model that is whole, on one device, and trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.model.marks import GRADIENT_TAKER, any_marked


def require_whole_model(model: Any) -> None:
    """Raise ValueError for a model that cannot be copied to all ranks, or divided, as it is.

    It may be spread over ranks already, be on no device, on several, or on one for which the ranks
    have no collectives, have no parameter that trains, or an optimizer that steps in backward.
    """
    parameters = list(model.parameters())
    in_parts = any(isinstance(parameter, DTensor) for parameter in parameters)
    if in_parts or isinstance(model, FSDPModule | DistributedDataParallel):
        raise ValueError(
            "this model is spread over ranks already: give a plain one; for copies of shards, give "
            "apply_fully_sharded a mesh of two dimensions"
        )
    _require_one_device(parameters)
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError("no parameter trains: there are no gradients to average, and no states")
    if any_marked(parameters, GRADIENT_TAKER):
        raise ValueError(
            "the optimizer takes gradients in backward, before they are averaged, and every rank "
            "would train a model of its own: call its remove() first, and use a plain one"
        )


def _require_one_device(parameters: list[torch.Tensor]) -> None:
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise ValueError(f"the parameters are on {sorted(map(str, devices))}: move them to one")
    [device] = devices
    backends = str(distributed.get_backend_config())  # such as "cpu:gloo,cuda:nccl"
    if f"{device.type}:" not in backends:
        raise ValueError(
            f"the model is on {device}, and the ranks have collectives for {backends} only: move "
            f"the model to the device of the ranks first"
        )
