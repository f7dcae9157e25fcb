"""Load an optimizer's states in the dtypes in which they were saved.

`torch.optim.Optimizer.load_state_dict` casts every state to the dtype of its parameter. So states
in bf16 of fp32 weights come back twice as large, and fp32 masters of bf16 weights lose their lower
half. Neither raises an error.
"""

from __future__ import annotations

from typing import Any

import torch


def load_as_saved(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load `state_dict` as PyTorch does, then take over the states once more, without a cast."""
    torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    for theirs, ours in zip(state_dict["param_groups"], optimizer.param_groups):
        for number, parameter in zip(theirs["params"], ours["params"]):
            for name, value in state_dict["state"].get(number, {}).items():
                if torch.is_tensor(value):
                    optimizer.state[parameter][name] = value.to(parameter.device, copy=True)
