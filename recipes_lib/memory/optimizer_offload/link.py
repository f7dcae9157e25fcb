"""What optimizer_offload keeps on the host of each parameter, and the link to the device."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import nn


class Slot:
    """What the host keeps of one parameter, beside AdamW's states."""

    def __init__(self, parameter: nn.Parameter) -> None:
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
        """Wait until the worker has done its task here; an error in it is raised again."""
        if self.work is not None:
            self.work.result()


class Link:
    """Copies between the device and host memory, each way in a stream of its own."""

    def __init__(self, device: torch.device) -> None:
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
        """Start copying a new weight to the device."""
        if self._up is None:
            parameter.copy_(staging)
            return
        with torch.cuda.stream(self._up):
            parameter.copy_(staging, non_blocking=True)

    def wait(self) -> None:
        """Let the device's computation wait for all weights on their way up."""
        if self._up is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._up)
