"""An AdamW with numbers in bf16: a step in chunks, stochastic rounding, exact resuming.

    parameter, exp_avg, exp_avg_sq   ->   flat, in chunks   ->   fp32, AdamW, rounded, written back

An optimizer that stores numbers in bf16 changes them by less than the spacing of bf16. Rounded to
nearest such a change disappears, in every step. Rounded stochastically it happens sometimes, and is
right on average (`pure_bf16` has the numbers).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

from recipes_lib.core.measure.dry_run import dry
from recipes_lib.core.model.bytes_of_tensors import parts_needed

UPPER_HALF = -(2**16)  # as int32: the 16 upper bits are 1, the lower ones 0

# --- stochastic rounding --------------------------------------------------------------------------


def stochastic_round(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 to one of the two bf16 neighbours, to the nearer more often."""
    return stochastic_round_(values.clone(), bits).to(torch.bfloat16)


def stochastic_round_(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round in place. The values stay fp32 and are now such that bf16 can represent them.

    bf16 is the upper half of fp32. A random number below 2**16, added to the whole, carries into
    the upper half with the probability (lower half) / 2**16; then the lower half is cut off. So
    over all `bits` the mean is the value. What bf16 can represent stays, infinities and NaN
    included. Above its largest number the upper neighbour is infinity, as in rounding to nearest.
    """
    # CUDA's NaN has all bits set: a carry would turn it into -0. Python's NaN, which this writes
    # in its place, has a lower half of zeros.
    values.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    raw = values.view(torch.int32)
    raw += bits
    raw &= UPPER_HALF
    return values


def random_bits(count: int, *, generator: torch.Generator) -> torch.Tensor:
    """For stochastic rounding: draw `count` int32 numbers from 0 to 2**16 - 1 on the device."""
    # Four of them come from each 64-bit number.
    words = torch.empty(parts_needed(count, 4), dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.uint16)[:count].to(torch.int32)


# --- the optimizer --------------------------------------------------------------------------------


class ChunkedAdamW(torch.optim.Optimizer):
    """An AdamW that updates a chunk of a parameter at a time, so that fp32 copies stay small."""

    cpu_chunk: int  # elements, on a CPU: what its cache holds
    gpu_chunk = 2**22  # what keeps a GPU busy

    def __init__(self, params: Iterable[Any], *, seed: int | None, **defaults: Any) -> None:
        if seed is None:
            seed = torch.initial_seed()
        self._seeds = torch.Generator().manual_seed(seed)
        super().__init__(params, defaults)

    # What a subclass says.

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for parameters that this AdamW does not train."""
        raise NotImplementedError

    def first_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The states of a parameter before its first step: `averages`, and a master if there is."""
        raise NotImplementedError

    def stochastic(self, group: dict[str, Any]) -> list[bool]:
        """Which of weight, exp_avg and exp_avg_sq are rounded stochastically in each step."""
        raise NotImplementedError

    # What all have in common.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that this AdamW trains; others are refused."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]  # the optimizer has filled in the defaults by now
        self.check_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter that has a gradient, in chunks; return what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Every step has a seed of its own, so a checkpoint can resume on other devices.
        seed = int(torch.randint(2**63 - 1, (), generator=self._seeds))
        drawn: dict[torch.device, _RoundingBits] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                device = parameter.device
                if device not in drawn:
                    drawn[device] = _RoundingBits(self._largest_chunk(device), device, seed)
                self._update_parameter(parameter, group, drawn[device])
        return loss

    def _update_parameter(
        self, parameter: torch.Tensor, group: dict[str, Any], bits: _RoundingBits
    ) -> None:
        """Update a parameter and its averages, chunk by chunk, so that fp32 copies stay small."""
        state = self.state[parameter]
        if not state:
            state.update(self.first_state(parameter, group))
        state["step"] += 1
        weight = state.get("master")
        if weight is None:
            # A transposed parameter has no flat view: a copy is updated, and written back below.
            weight = parameter.contiguous()
        stored = [weight.view(-1), state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)]
        gradient = parameter.grad.reshape(-1)
        size = self.chunk(parameter.device)
        starts = range(0, parameter.numel(), size)
        if dry():  # all chunks take the same bytes
            starts = starts[:1]
        for start in starts:
            chunk = slice(start, start + size)
            parts = [tensor[chunk] for tensor in stored]
            self._update_chunk(parts, gradient[chunk], state["step"], group, bits)
        if weight is not parameter:
            parameter.copy_(weight)

    def _update_chunk(
        self,
        parts: list[torch.Tensor],
        gradient: torch.Tensor,
        step: int,
        group: dict[str, Any],
        bits: _RoundingBits,
    ) -> None:
        """Update a chunk [n] of weight, exp_avg and exp_avg_sq in place."""
        values = [part.float() for part in parts]  # what is fp32 is updated where it is
        fused_adamw(values, gradient, step, group)
        for part, value, stochastic in zip(parts, values, self.stochastic(group)):
            if stochastic:
                stochastic_round_(value, bits.some(len(value)))
            if value is not part:
                part.copy_(value)  # to the nearest: what is rounded already stays

    def _largest_chunk(self, device: torch.device) -> int:
        elements = 0
        for group in self.param_groups:
            elements += sum(p.numel() for p in group["params"] if p.device == device)
        return min(elements, self.chunk(device))

    @classmethod
    def chunk(cls, device: torch.device) -> int:
        return cls.cpu_chunk if device.type == "cpu" else cls.gpu_chunk

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and pickle take along: also where the random stream is."""
        return super().__getstate__() | {"_seeds": self._seeds}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to resume exactly, the random stream included."""
        return super().state_dict() | {"seeds": self._seeds.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict()`, the rounding of its groups included.

        PyTorch casts every state to the dtype of its parameter: fp32 masters of bf16 weights would
        lose their lower half, and bf16 averages of fp32 weights would take twice the bytes. So the
        states are taken over once more, as they were saved.
        """
        super().load_state_dict(state_dict)
        for theirs, ours in zip(state_dict["param_groups"], self.param_groups):
            for number, parameter in zip(theirs["params"], ours["params"]):
                for name, value in state_dict["state"].get(number, {}).items():
                    if torch.is_tensor(value):
                        self.state[parameter][name] = value.to(parameter.device, copy=True)
        self._seeds.set_state(state_dict["seeds"].cpu())


class _RoundingBits:
    """The random bits of one step on one device.

    Drawing random numbers costs more than the update, so a step draws them once. Every tensor of
    every chunk reads them from a place that is drawn, too. So each element gets an evenly drawn
    number in each step, which does not depend on those of the steps before: its rounding has no
    bias. Two elements of one step may get the same number. That changes no mean.
    """

    def __init__(self, size: int, device: torch.device, seed: int) -> None:
        self._size = size
        self._places = torch.Generator().manual_seed(seed)
        self._generator = torch.Generator(device).manual_seed(seed)

    @functools.cached_property
    def _bits(self) -> torch.Tensor:
        return random_bits(2 * self._size, generator=self._generator)

    def some(self, count: int) -> torch.Tensor:
        """Bits for the stochastic rounding of `count` numbers."""
        place = int(torch.randint(self._size, (), generator=self._places))
        return self._bits[place : place + count]


def averages(parameter: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """The states of an AdamW with numbers in bf16, before its first step."""
    like = {"dtype": dtype, "device": parameter.device}
    return {
        "step": 0,
        "exp_avg": torch.zeros(parameter.shape, **like),
        "exp_avg_sq": torch.zeros(parameter.shape, **like),
    }


def fused_adamw(
    parts: list[torch.Tensor], gradient: torch.Tensor, step: int, group: dict[str, Any]
) -> None:
    """PyTorch's fused AdamW on one chunk of weight, exp_avg and exp_avg_sq; `step` is from 1."""
    weight, exp_avg, exp_avg_sq = parts
    beta1, beta2 = group["betas"]
    adamw(
        [weight],
        [gradient.to(weight.dtype)],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.full((), step - 1.0, device=gradient.device)],  # `adamw` adds 1 by itself
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
    )
