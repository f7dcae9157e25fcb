"""Optimizer offload: AdamW's states, and the step itself, live in host memory.

Problem    AdamW's states take twice the bytes of fp32 weights, and only the cheap step needs them.
Idea       Send each gradient to the host as backward completes it, step there, send the weight back:

               GPU     backward:  g_n ---- g_2 ---- g_1 |  wait  | next forward
               link           g_n down | g_2 down  w_n up | ... w_1 up
               CPU                       AdamW n | AdamW 2 | AdamW 1
Saves      On the GPU all states and all gradients but the largest. bf16 weights get fp32 masters on the host.
Costs      Host memory: 16 bytes per parameter and one pinned copy of the weights. Time: the weights twice over the
           link and AdamW at the speed of host memory, hidden behind backward as far as that is long enough.
Use when   Full fine-tuning: the weights fit the GPU and the states do not. Not when they do in 8 bits, or without GPU.
In production   DeepSpeed `offload_optimizer`; torchao `CPUOffloadOptimizer`; FSDP2 `CPUOffloadPolicy` (it shards too).
Source     "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv 2101.06840.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.plain_step import free_gradients
from recipes_lib.core.sizes import tensor_bytes


def offload_optimizer(
    model: Any,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    micro_batches: int | None = 1,
    max_grad_norm: float | None = None,
    allow_cpu: bool = False,
) -> OffloadedAdamW:
    """Make an AdamW for the trainable parameters of `model` that keeps everything on the host.

    Use it like any optimizer. No gradient stays in `.grad`, so `clip_grad_norm_` clips nothing. Weights are complete
    after `step()`, which undoes what was written through `.data`: write under `torch.no_grad()`.

    Args:
        micro_batches: backward passes per step: the last one already updates. None: not known, `step()` updates.
        max_grad_norm: clip to this global norm, which needs every gradient: `step()` updates.
        allow_cpu: accept parameters in host memory, for tests: it saves nothing there.
    Raises ValueError for parameters on a CPU, on several devices or in fp16, for numbers that are not positive, and
    if the host has too little free memory: taking it all would end the process without an error.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    devices = {p.device for p in parameters}
    if len(devices) != 1:
        raise ValueError(
            f"the trainable parameters are on {len(devices)} devices: exactly one is needed"
        )
    if not parameters[0].is_cuda and not allow_cpu:
        raise ValueError(
            "the parameters are in host memory already: to shrink the states there use eight_bit_adam"
        )
    needed, free = host_bytes(model), psutil.virtual_memory().available
    if needed > 0.8 * free:
        raise ValueError(
            f"{needed:,} bytes of host memory are needed and {free:,} are free: use eight_bit_adam"
        )
    if any(p.dtype == torch.float16 for p in parameters):
        raise ValueError(
            "fp16 needs loss scaling, which must see all gradients first: use bf16 or fp32"
        )
    if any(hasattr(p, "steps_in_backward") for p in parameters):
        raise ValueError(
            "an optimizer takes these gradients in backward already: remove() it first"
        )
    if any(number is not None and number <= 0 for number in (micro_batches, max_grad_norm)):
        raise ValueError(
            f"micro_batches={micro_batches}, max_grad_norm={max_grad_norm}: positive numbers, or None"
        )
    adamw = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return OffloadedAdamW(parameters, micro_batches, max_grad_norm, **adamw)


class _Slot:
    """What the host keeps of one parameter, beside AdamW's states."""

    def __init__(self, parameter: torch.nn.Parameter):
        self.parameter, self.version = parameter, parameter._version
        self.master = parameter.detach().to("cpu", torch.float32, copy=True)
        self.gradient = torch.empty_like(self.master)
        # Gradients come down and weights go up in their own dtype, through memory that the GPU can reach.
        self.staging = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
        self.arrived = 0  # gradients since the last step()
        self.work: Future | None = (
            None  # the worker's last task here: result() waits for it, or raises its error
        )


class OffloadedAdamW(torch.optim.AdamW):
    """The fused CPU AdamW over fp32 host copies of the parameters, the masters; and the traffic down and up."""

    def __init__(
        self, parameters, micro_batches: int | None, max_grad_norm: float | None, **adamw: Any
    ):
        self._slots = {parameter: _Slot(parameter) for parameter in parameters}
        super().__init__([slot.master for slot in self._slots.values()], fused=True, **adamw)
        self._step_supports_amp_scaling, self.takes_gradients_in_backward = (
            False,
            True,
        )  # loss scaling then refuses
        self._max_grad_norm = max_grad_norm
        self._last = None if max_grad_norm else micro_batches  # the gradient that starts an update
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offloaded-adamw")
        self._down, self._up = (
            torch.cuda.Stream(p.device) if p.is_cuda else None for p in parameters[:1] * 2
        )
        # The garbage collector cannot see these hooks, so they are weak, and parameters hold the optimizer.
        receive = weakref.WeakMethod(self._receive)
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p: receive()(p)) for p in parameters
        ]
        for parameter in parameters:  # gradient accumulation reads the first of these
            parameter.steps_in_backward, parameter.offloaded_optimizer = self._last == 1, self

    @torch.no_grad()
    def _receive(self, parameter: torch.nn.Parameter) -> None:
        """In backward: start the copy of a finished gradient, and free it on the device."""
        slot = self._slots[parameter]
        if slot.work:
            slot.work.result()  # an earlier micro-batch may still use the staging memory
        if slot.arrived == self._last:
            raise RuntimeError(
                f"backward {slot.arrived} before step() has updated: pass micro_batches=k or None"
            )
        if parameter._version != slot.version:  # weights were loaded since: they are the master now
            slot.master.copy_(parameter)
        if self._down:
            self._down.wait_stream(torch.cuda.current_stream(parameter.device))
            parameter.grad.record_stream(self._down)  # its memory is reused only after the copy
        with torch.cuda.stream(self._down):  # without a GPU this is None and changes nothing
            slot.staging.copy_(parameter.grad, non_blocking=True)
        copied = self._down.record_event(torch.cuda.Event(blocking=True)) if self._down else None
        parameter.grad = None
        slot.work = self._worker.submit(self._add_up, slot, copied)

    @torch.no_grad()
    def _add_up(self, slot: _Slot, copied: torch.cuda.Event | None) -> None:
        """In the worker: empty the staging memory; with the last gradient, update."""
        if copied:
            copied.synchronize()
        slot.gradient.add_(slot.staging) if slot.arrived else slot.gradient.copy_(slot.staging)
        slot.arrived += 1
        if slot.arrived == self._last:
            self._update(slot)

    def _update(self, slot: _Slot) -> None:
        """AdamW on one master, which is the only parameter that it is shown."""
        group = self.param_groups[0]  # made from a plain list, so there is only this one
        group["params"], masters = [slot.master], group["params"]
        slot.master.grad = slot.gradient
        super().step()
        group["params"], slot.master.grad = masters, None
        slot.staging.copy_(slot.master)  # rounds to the parameter's dtype
        with torch.cuda.stream(self._up):
            slot.parameter.copy_(slot.staging, non_blocking=True)
        slot.version = slot.parameter._version

    def _arrived(self) -> list[_Slot]:
        """Wait for the worker; those that have had a gradient since the last step()."""
        for slot in filter(lambda slot: slot.work, self._slots.values()):
            slot.work.result()
        return [slot for slot in self._slots.values() if slot.arrived]

    @torch.no_grad()
    def step(self) -> None:
        """Update what backward has not. Raises RuntimeError if no gradient has arrived since the last step."""
        arrived = self._arrived()
        if not arrived:
            raise RuntimeError(
                "no gradient has arrived: call backward first, on the model itself and not a copy"
            )
        if self._max_grad_norm:
            gradients = [slot.gradient for slot in arrived]
            norm = torch.nn.utils.get_total_norm(gradients)
            torch._foreach_mul_(gradients, (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        for slot in arrived:
            if slot.arrived != self._last:
                self._update(slot)
            slot.arrived = 0
        if self._up:  # the next forward reads the new weights
            torch.cuda.current_stream(self._up.device).wait_stream(self._up)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients on the host; RuntimeError if backward has applied them already."""
        for slot in self._arrived():
            if slot.arrived == self._last:
                raise RuntimeError(
                    "backward has applied these gradients already: call step() before zero_grad()"
                )
            slot.arrived = 0

    def state_dict(self) -> dict[str, Any]:
        """AdamW's, and the fp32 masters, which bf16 weights cannot replace."""
        return super().state_dict() | {"masters": [slot.master for slot in self._slots.values()]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From `state_dict()`, weights included; or from a plain AdamW, to go with the weights of the model."""
        super().load_state_dict(state_dict)
        for i, slot in enumerate(self._slots.values()):
            slot.master.copy_(
                state_dict["masters"][i] if "masters" in state_dict else slot.parameter
            )
            slot.parameter.copy_(slot.master)
            slot.version = slot.parameter._version

    def remove(self) -> None:
        """Give the model back as it was: gradients stay in `.grad` again."""
        self._worker.shutdown()
        for hook, parameter in zip(self._hooks, self._slots):
            hook.remove()
            del parameter.steps_in_backward, parameter.offloaded_optimizer


def host_bytes(model: Any) -> int:
    """Host memory that it takes: fp32 master, gradient, two averages, and a pinned copy, which torch rounds to 2**n."""
    return sum(
        16 * p.numel() + 2 ** (tensor_bytes(p) - 1).bit_length()
        for p in model.parameters()
        if p.requires_grad
    )


def estimate_optimizer_offload(budget: Budget, model: Any) -> Budget:
    """No states on the device, and one gradient at a time, with accumulation too."""
    return free_gradients(budget.change(states=0), model)
