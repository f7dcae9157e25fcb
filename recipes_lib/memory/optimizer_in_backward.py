"""Optimizer step in backward: each gradient is used and freed the moment it is complete.

Problem    Between backward and the optimizer step every gradient is alive: as many bytes as
           weights.
Idea       AdamW updates one parameter from that parameter's gradient alone, so nothing has to wait:

               plain   backward:  g_n ... g_2 g_1  all alive   ->  step: update n ... 2, 1
               here    backward:  g_n -> update n, free;  ...  ;  g_1 -> update 1, free
Saves      Gradients: from bytes of all trainable parameters down to those of the largest one. A
           tied embedding is the largest: its output half arrives first and waits for the input
           half.
Costs      A call per parameter instead of one for all: little beside the backward of a large model,
           much on a GPU beside that of a small one. Nothing that needs all gradients at once is
           possible: no clipping by global norm, no loss scaling (fp16), no accumulation.
Use when   Full fine-tuning in bf16 or fp32 with one backward per step and gradients that do not
           fit.
Not when   You clip or accumulate (see above), under DDP or FSDP (the local gradient is not the
           sum), or with LoRA, whose gradients are small.
In production   torchtune `optimizer_in_bwd: True`; torchtitan's early step in backward; in the
           Trainer only the layer-wise optimizers (`optim="galore_adamw_layerwise"`).
Source     "How to save memory by fusing the optimizer step into the backward pass", PyTorch
           tutorial; LOMO, arXiv 2306.09782.

Trap: `clip_grad_norm_` called after backward finds no gradient, returns 0 and clips nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from recipes_lib.core.model.trainable import parameters_to_train
from recipes_lib.memory._gradients_in_backward import GradientsInBackward, refuse_second_taker

# --- the idea: what a learner can copy ------------------------------------------------------------


def one_optimizer_per_parameter(
    model: nn.Module, optimizer_class: type[torch.optim.Optimizer], **options: Any
) -> list[RemovableHandle]:
    """From now on `loss.backward()` updates the weights, and no gradient is left after it.

    Call `remove()` on what it returns: otherwise the hooks keep the model alive for ever.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers = {parameter: optimizer_class([parameter], **options) for parameter in parameters}

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()  # frees the gradient

    return [parameter.register_post_accumulate_grad_hook(update) for parameter in parameters]


# --- the technique --------------------------------------------------------------------------------


def apply_optimizer_in_backward(
    model: nn.Module,
    *,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    max_grad_norm: float | None = None,
    **kwargs: Any,
) -> StepInBackward:
    """Let `loss.backward()` update the parameters; keep the loop, with the handle as its optimizer.

    `model` is any module: what counts are its parameters.

    Args:
        optimizer_class: called as `optimizer_class(parameters, **kwargs)`; must update each
            parameter from its own gradient (AdamW, SGD, bitsandbytes' AdamW8bit; not Muon across
            ranks, LBFGS).
        max_grad_norm: is None; the error for a number says why it cannot work.
        kwargs: for AdamW give `fused=True`, without which a step allocates temporary tensors.
    """
    if max_grad_norm is not None:
        raise ValueError(
            f"max_grad_norm={max_grad_norm}: the global norm is unknown while the first parameters "
            f"step, so it cannot clip them; pass None, or use optimizer_offload, which can wait"
        )
    parameters = list(parameters_to_train(model))
    refuse_second_taker(parameters)
    return StepInBackward(optimizer_class(parameters, **kwargs), parameters)


class StepInBackward(torch.optim.Optimizer):
    """The handle: an optimizer for the loop and for LR schedulers, around the one that steps.

    `optimizer` is an ordinary one over all parameters, shown one of them at a time. So the state
    dict is that of plain training, and either kind of run can resume from the other's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        """Let `optimizer` step in backward, each parameter by itself."""
        # No super().__init__(): groups and states are those of the wrapped optimizer.
        self.optimizer = optimizer
        self.defaults = optimizer.defaults
        self._stepped: set[nn.Parameter] = set()  # since the last step()
        self._hooks = GradientsInBackward(parameters, self._update_and_free, steps=True)

    def _update_and_free(self, parameter: nn.Parameter) -> None:
        """In backward: step one parameter, whose gradient is complete, and free that gradient."""
        if parameter in self._stepped:
            raise RuntimeError(
                "a second backward before step(): the first one has updated the parameters "
                "already, so its gradients cannot be accumulated; call step() after each backward"
            )
        self._stepped.add(parameter)
        group = self.optimizer.param_groups[0]  # made from a plain list, so there is only this one
        everyone = group["params"]
        group["params"] = [parameter]
        try:
            self.optimizer.step()
        finally:
            group["params"] = everyone
        parameter.grad = None

    def step(self) -> None:
        if not self._stepped:
            raise RuntimeError("step() without a backward before it: no parameter was updated")
        self._stepped.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free gradients that an error left behind; after a complete backward there are none."""
        self.optimizer.zero_grad(set_to_none)

    def remove(self) -> None:
        """Give the model back as it was: gradients stay in `.grad` again."""
        self._hooks.remove()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        return self.optimizer.state

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
