"""Optimizer offload: AdamW's states, and the step itself, live in host memory.

Problem    AdamW's states take twice the bytes of fp32 weights, and only the cheap step needs them.
Idea       Send each gradient to the host as backward completes it, step there, send the weight
           back:

               GPU     backward:  g_n ---- g_2 ---- g_1 |  wait  | next forward
               link           g_n down | g_2 down  w_n up | ... w_1 up
               CPU                       AdamW n | AdamW 2 | AdamW 1
Saves      On the GPU all states and all gradients but the largest. bf16 weights get fp32 masters on
           the host.
Costs      Host memory: 16 bytes per parameter and one pinned copy of the weights. Time: the weights
           twice over the link and AdamW at the speed of host memory, hidden behind backward as far
           as that is long enough.
Use when   Full fine-tuning: the weights fit the GPU and the states do not.
Not when   The states fit in 8 bits (eight_bit_adam), or there is no GPU.
In production   DeepSpeed `offload_optimizer`; torchao `CPUOffloadOptimizer`; FSDP2
           `CPUOffloadPolicy` (it shards too).
Source     "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv 2101.06840.

The words: the master is the fp32 copy of a parameter on the host. "Down" is from the GPU to the
host, "up" is back. The worker is the one thread of the host that adds up gradients and steps.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from recipes_lib.core.measure.dry_run import AtOnce, dry, on_the_host, pretends_a_card
from recipes_lib.core.measure.free_memory import free_host_bytes
from recipes_lib.core.model.bytes_of_tensors import tensor_bytes
from recipes_lib.core.model.causal_lm import require_causal_lm
from recipes_lib.core.model.marks import MASTER_OF, mark
from recipes_lib.memory._gradients_in_backward import GradientsInBackward, refuse_second_taker

# --- the idea: what a learner can copy ------------------------------------------------------------


@torch.no_grad()
def step_on_the_host(
    parameters: list[nn.Parameter], masters: list[torch.Tensor], adamw: torch.optim.AdamW
) -> None:
    """One step after backward. `adamw` is over `masters`, the fp32 host copies of `parameters`."""
    for parameter, master in zip(parameters, masters):
        master.grad = parameter.grad.to("cpu", torch.float32)  # down
        parameter.grad = None
    adamw.step()  # states and arithmetic are where the masters are
    for parameter, master in zip(parameters, masters):
        parameter.copy_(master)  # up, rounded to the parameter's dtype
        master.grad = None


# --- the technique --------------------------------------------------------------------------------


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

    Use it like any optimizer. No gradient stays in `.grad`, so `clip_grad_norm_` clips nothing.
    Weights are complete after `step()`. Write others under `torch.no_grad()`: what goes through
    `.data` is not noticed, and the next `step()` undoes it.

    Args:
        micro_batches: backward passes per step, of which the last one updates already. With None
            the number is not known, and `step()` updates.
        max_grad_norm: clip to this global norm. It needs every gradient, so `step()` updates.
        allow_cpu: accept parameters in host memory, for tests: it saves nothing there.
    """
    require_causal_lm(model)
    adamw = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _require_one_device(parameters, allow_cpu=allow_cpu)
    _require_host_memory(host_bytes(model))
    _require_free_gradients(parameters)
    return OffloadedAdamW(parameters, micro_batches, max_grad_norm, **adamw)


class OffloadedAdamW(torch.optim.AdamW):
    """The fused CPU AdamW over the masters, and the traffic down and up."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        micro_batches: int | None,
        max_grad_norm: float | None,
        **adamw: Any,
    ) -> None:
        """Make AdamW over masters on the host, one for each parameter."""
        with on_the_host():
            self._slots = {parameter: Slot(parameter) for parameter in parameters}
        super().__init__([slot.master for slot in self._slots.values()], fused=True, **adamw)
        # A fused AdamW says that it can undo loss scaling. This one cannot: GradScaler refuses it.
        self._step_supports_amp_scaling = False
        self._max_grad_norm = max_grad_norm
        # The number of the gradient that starts the update; None leaves it to `step()`.
        self._last = micro_batches
        if max_grad_norm is not None:
            self._last = None
        # A thread of its own would be outside of a dry run, which is one of this thread.
        workers = AtOnce if dry() else ThreadPoolExecutor
        self._worker = workers(max_workers=1, thread_name_prefix="offloaded-adamw")
        self._link = HostLink(parameters[0].device)
        self._hooks = GradientsInBackward(parameters, self._receive, steps=self._last == 1)
        for slot in self._slots.values():
            # A checkpoint names the masters as the parameters that they stand for.
            mark(slot.master, MASTER_OF, slot.parameter)

    @torch.no_grad()
    def _receive(self, parameter: nn.Parameter) -> None:
        """In backward: start the copy of a finished gradient, and free it on the device."""
        slot = self._slots[parameter]
        slot.wait()  # an earlier micro-batch may still use the staging memory
        if slot.arrived == self._last:
            raise RuntimeError(
                f"backward {slot.arrived} before step() has updated: pass micro_batches=k or None"
            )
        if parameter._version != slot.version:
            # Somebody has written new weights since the last step: they become the master.
            slot.master.copy_(parameter)
        copied = self._link.down(parameter.grad, slot.staging)
        parameter.grad = None
        slot.work = self._worker.submit(self._add_up, slot, copied)

    @torch.no_grad()
    def _add_up(self, slot: Slot, copied: torch.cuda.Event | None) -> None:
        """In the worker on the host: empty the staging memory; with the last gradient, update."""
        if copied is not None:
            copied.synchronize()
        if slot.arrived == 0:
            slot.gradient.copy_(slot.staging)
        else:
            slot.gradient.add_(slot.staging)
        slot.arrived += 1
        if slot.arrived == self._last:
            self._update_slot(slot)

    def _update_slot(self, slot: Slot) -> None:
        """AdamW on one master, which is the only parameter that it is shown; then the way up."""
        group = self.param_groups[0]  # made from a plain list, so there is only this one
        masters = group["params"]
        group["params"] = [slot.master]
        slot.master.grad = slot.gradient
        with on_the_host():  # the first step makes AdamW's states
            super().step()
        group["params"] = masters
        slot.master.grad = None
        slot.staging.copy_(slot.master)  # rounds to the parameter's dtype
        self._link.up(slot.staging, slot.parameter)
        slot.version = slot.parameter._version

    def _slots_with_gradients(self) -> list[Slot]:
        """Wait for the worker, then give the slots with a gradient since the last step()."""
        for slot in self._slots.values():
            slot.wait()
        return [slot for slot in self._slots.values() if slot.arrived > 0]

    @torch.no_grad()
    def step(self) -> None:
        """Update on the host what the last gradient has not updated, and send it up."""
        arrived = self._slots_with_gradients()
        if not arrived:
            raise RuntimeError(
                "no gradient has arrived: call backward first, on the model itself and not a copy"
            )
        if self._max_grad_norm is not None:
            self._clip([slot.gradient for slot in arrived])
        for slot in arrived:
            if slot.arrived != self._last:
                self._update_slot(slot)
            slot.arrived = 0
        self._link.wait()  # the next forward reads the new weights

    def _clip(self, gradients: list[torch.Tensor]) -> None:
        """On the host: what `torch.nn.utils.clip_grad_norm_` does, on gradients in no `.grad`."""
        norm = torch.nn.utils.get_total_norm(gradients)
        factor = (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for slot in self._slots_with_gradients():
            slot.arrived = 0

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state, and the fp32 masters, which bf16 weights are only a rounding of."""
        # Detached, they are without the mark, which leads to the model.
        masters = [slot.master.detach() for slot in self._slots.values()]
        return super().state_dict() | {"masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume on the host from `state_dict()`, which sets weights, too; or from AdamW's.

        A plain AdamW's has no masters: they are made from the weights that the model has now.
        """
        super().load_state_dict(state_dict)
        slots = list(self._slots.values())
        masters = state_dict.get("masters")
        if masters is None:
            masters = [slot.parameter for slot in slots]
        for slot, master in zip(slots, masters, strict=True):
            slot.master.copy_(master)
            slot.parameter.copy_(slot.master)
            slot.version = slot.parameter._version

    def remove(self) -> None:
        self._worker.shutdown()
        self._hooks.remove()


class Slot:
    """What the host keeps of one parameter, beside AdamW's states."""

    def __init__(self, parameter: nn.Parameter) -> None:
        """What the host keeps of a parameter: master, gradient, staging memory."""
        self.parameter = parameter
        self.version = parameter._version  # another one means that somebody wrote new weights
        self.master = parameter.detach().to("cpu", torch.float32, copy=True)
        self.gradient = torch.empty_like(self.master)  # the sum over micro-batches
        # Gradients come down and weights go up in their own dtype, through memory that the GPU
        # can reach by itself.
        self.staging = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
        self.arrived = 0  # gradients since the last step()
        self.work: Future | None = None  # the worker's last task here

    def wait(self) -> None:
        if self.work is not None:
            self.work.result()


class HostLink:
    """Copies between the device and host memory, each way in a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        """Two streams between a GPU and the host; without a GPU none."""
        self._device = device
        self._down = None
        self._up = None
        if device.type == "cuda":  # without a GPU all copies are plain ones
            self._down = torch.cuda.Stream(device)
            self._up = torch.cuda.Stream(device)

    def down(self, gradient: torch.Tensor, staging: torch.Tensor) -> torch.cuda.Event | None:
        """Start copying a gradient into host memory; the event that says that it is there."""
        if self._down is None:
            staging.copy_(gradient)
            return None
        self._down.wait_stream(torch.cuda.current_stream(self._device))  # backward has written it
        gradient.record_stream(self._down)  # its memory is reused only after the copy
        with torch.cuda.stream(self._down):
            staging.copy_(gradient, non_blocking=True)
        # The worker waits for it. "Blocking" lets that thread sleep instead of spin.
        return self._down.record_event(torch.cuda.Event(blocking=True))

    def up(self, staging: torch.Tensor, parameter: nn.Parameter) -> None:
        if self._up is None:
            parameter.copy_(staging)
            return
        with torch.cuda.stream(self._up):
            parameter.copy_(staging, non_blocking=True)

    def wait(self) -> None:
        """Let the device's computation wait for all weights on their way up."""
        if self._up is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._up)


# --- what it needs --------------------------------------------------------------------------------


def _require_one_device(parameters: list[nn.Parameter], *, allow_cpu: bool) -> None:
    """Raise ValueError unless all that trains is on one device, which is no host."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1:
        raise ValueError(
            f"the trainable parameters are on {len(devices)} devices: exactly one is needed"
        )
    on_a_card = parameters[0].is_cuda or pretends_a_card()
    if not on_a_card and not allow_cpu:
        raise ValueError(
            "the parameters are in host memory already: "
            "to shrink the states there use eight_bit_adam"
        )


def _require_free_gradients(parameters: list[nn.Parameter]) -> None:
    """The optimizer on the host takes gradients: raise ValueError if another wants them first."""
    if any(parameter.dtype == torch.float16 for parameter in parameters):
        raise ValueError(
            "fp16 needs loss scaling, which must see all gradients first: use bf16 or fp32"
        )
    refuse_second_taker(parameters)


def _require_host_memory(needed: int) -> None:
    """Raise ValueError if the host has no room for the masters and the states."""
    if pretends_a_card():  # in another machine, whose host is another one, too
        return
    free = free_host_bytes()
    if needed > 0.8 * free:  # the loader of the data and everybody else need some, too
        raise ValueError(
            f"{needed:,} bytes of host memory are needed and {free:,} are free: use eight_bit_adam"
        )


# --- the arithmetic -------------------------------------------------------------------------------


def host_bytes(model: nn.Module) -> int:
    """Bytes on the host: fp32 master, gradient and two averages, and the staging memory."""
    total = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            total += 4 * 4 * parameter.numel()
            # Of pinned memory torch takes the next power of two.
            total += 2 ** (tensor_bytes(parameter) - 1).bit_length()
    return total
