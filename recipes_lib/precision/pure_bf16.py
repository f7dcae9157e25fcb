"""Pure bf16: weights, gradients and optimizer states in 16 bits, without losing the small updates.

Problem    fp32 training keeps 16 bytes per parameter: weight, gradient and AdamW's two averages.
Idea       Keep all four in bf16 and compute each step in fp32. What is lost is at the end of the step, when the
           result goes back into 8 significant bits: an update under half a spacing rounds to nothing.

               a weight of 1 has the neighbours 0.996 and 1.008; lr 1e-4 asks for 0.9999

               "nearest"      0.9999 -> 1                                every time: it never moves
               "stochastic"   0.9999 -> 0.996 in 1 of 39 steps, else 1   right on average: E[rounded] = value
               "master"       0.9999 stays in an fp32 copy; the model computes with its rounding, 1

           The averages have the same illness: with beta2 = 0.999 a bf16 exp_avg_sq can rise, but it never falls,
           because 0.1% of it is less than half a spacing. So "stochastic" rounds weight and averages that way.
Saves      Bytes per parameter, gradient included: 16 in fp32 -> 8 ("stochastic", "nearest") or 16 ("master", which
           halves gradients and activations only). Activations take half, as in every bf16 forward.
Costs      A step on a CPU takes several times that of fused AdamW, which "nearest" equals. Stochastic rounding adds
           noise of up to one spacing, 0.4 to 0.8% of a weight: the loss ends slightly above that of fp32.
Use when   Full fine-tuning, where weights and states are most of the budget: "stochastic". "master" where the result
           must be that of fp32 training.
Not when   Mixed precision fits: fp32 weights under autocast lose nothing. Not with LoRA: frozen weights are not
           rounded, and the adapters are small enough for fp32. "nearest" only to see what goes wrong.
In production   torchao `_AdamW(bf16_stochastic_round=True)`, which rounds the averages to nearest; fp32 masters in
           DeepSpeed (`"bf16": {"enabled": true}`) and Megatron (`--bf16`). `TrainingArguments(bf16=True)` is mixed
           precision: the weights are fp32.
Source     Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192.

Under DDP give every rank the same seed, or the replicas drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

from recipes_lib.core.budget import Budget

STATE_BYTES = {"stochastic": 4, "nearest": 4, "master": 12}  # per parameter
SPARE = 8  # elements, 16 bytes: keeps the windows into the random bits aligned


def bf16_adamw(
    model_or_params: torch.nn.Module | Iterable[Any],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    rounding: str = "stochastic",
    seed: int | None = None,
) -> BF16AdamW:
    """Make an AdamW for bf16 weights; use it like any other optimizer.

    Args:
        model_or_params: a model (its trainable parameters), or parameters or groups of them.
        rounding: "stochastic", "nearest" or "master"; a group may say its own.
        seed: of the random bits; None takes `torch.initial_seed()`.
    Raises ValueError for trainable parameters that are not bf16 (norms included), for none, and for another rounding.
    """
    params = model_or_params
    if isinstance(model_or_params, torch.nn.Module):
        params = [p for p in model_or_params.parameters() if p.requires_grad]
        if not params:
            raise ValueError("the model has no trainable parameter: set requires_grad before this call")
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rounding": rounding}
    return BF16AdamW(params, seed=seed, **options)


class BF16AdamW(torch.optim.Optimizer):
    """What `bf16_adamw` returns. With "master" the fp32 copies made by the first step are the truth: weights that
    change afterwards by other means are overwritten by the next step."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        rounding: str = "stochastic",
        seed: int | None = None,
    ) -> None:
        self._seeds = torch.Generator().manual_seed(torch.initial_seed() if seed is None else seed)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rounding": rounding}
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `__init__` does. Raises ValueError for what it cannot train."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["rounding"] not in STATE_BYTES:
            raise ValueError(f"rounding={group['rounding']!r}: choose one of {', '.join(STATE_BYTES)}")
        wrong = {str(p.dtype) for p in group["params"] if p.requires_grad and p.dtype is not torch.bfloat16}
        if wrong:
            raise ValueError(f"trainable weights in {', '.join(wrong)}: call model.to(torch.bfloat16) before this")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # One seed per step for the generators of all devices: a checkpoint resumes on any of them.
        seed = int(torch.randint(2**63 - 1, (), generator=self._seeds))
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if p.device not in generators:
                        generators[p.device] = torch.Generator(p.device).manual_seed(seed)
                    self._update(p, group, generators[p.device])
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any], generator: torch.Generator) -> None:
        state, rounding = self.state[p], group["rounding"]
        if not state:
            dtype = torch.float32 if rounding == "master" else torch.bfloat16
            state |= {"step": 0, "exp_avg": torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)}
            state["exp_avg_sq"] = state["exp_avg"].clone()
            if rounding == "master":
                state["master"] = p.float().contiguous()
        state["step"] += 1
        weight = state["master"] if rounding == "master" else p.contiguous()
        stored = [tensor.view(-1) for tensor in (weight, state["exp_avg"], state["exp_avg_sq"])]
        gradient, size = p.grad.reshape(-1), _chunk(p)
        for start in range(0, p.numel(), size):
            chunk = [tensor[start : start + size] for tensor in stored]
            values = [part.float() for part in chunk]  # an fp32 part is itself, and is updated in place
            _adamw(values, gradient[start : start + size].float(), state["step"], group)
            if rounding == "stochastic":
                n = len(chunk[0])
                bits = random_bits(n + 2 * SPARE, generator=generator)
                # Three windows into the same bits: a weight and its own averages still get different ones.
                for i in range(3):
                    values[i] = stochastic_round(values[i], bits[i * SPARE : i * SPARE + n])
            for part, value in zip(chunk, values):
                if part is not value:
                    part.copy_(value)
        if rounding == "master" or not p.is_contiguous():
            p.copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to resume exactly, the random stream included."""
        return super().state_dict() | {"seeds": self._seeds.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict()`. Raises ValueError if that was of another rounding."""
        saved, own = ([g.get("rounding") for g in d["param_groups"]] for d in (state_dict, self.__dict__))
        if saved != own:
            raise ValueError(f"the checkpoint is of rounding={saved}, this optimizer of {own}: make it with the same")
        super().load_state_dict(state_dict)  # casts every state to the parameter's dtype: fp32 masters become bf16
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(numbers, parameters):
            for name, value in state_dict["state"].get(i, {}).items():
                self.state[p][name] = value.to(p.device, copy=True) if torch.is_tensor(value) else value
        self._seeds.set_state(state_dict["seeds"].cpu())


def stochastic_round(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 to one of its two bf16 neighbours, the nearer the likelier: unbiased over random `bits`.

    bf16 is the upper half of fp32. Adding a number below 2**16 to the whole carries into the upper half with a
    probability of lower half / 2**16; then the lower half is cut off. Exact values, infinities and NaN stay. Above
    the largest bf16 number the upper neighbour is infinity, as it is in rounding to nearest.

    Args:
        values: fp32 [N]; bits: uint16 [N].
    """
    # A NaN can have all bits set (on CUDA it has) and the carry would make it -0: give it the bits of Python's.
    raw = values.nan_to_num(nan=math.nan, posinf=math.inf, neginf=-math.inf).view(torch.int32)
    raw += bits.to(torch.int32)
    raw >>= 16
    return raw.to(torch.int16).view(torch.bfloat16)


def random_bits(count: int, *, generator: torch.Generator) -> torch.Tensor:
    """Draw `count` uint16 numbers on the generator's device, four from one call of the generator."""
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=generator.device)
    return words.random_(-(2**63), None, generator=generator).view(torch.uint16)[:count]


def estimate_pure_bf16(budget: Budget, model: Any, *, rounding: str) -> Budget:
    """The budget of the bf16 model with the states of this rounding, and with the step's fp32 chunk.

    Raises ValueError for another rounding.
    """
    if rounding not in STATE_BYTES:
        raise ValueError(f"rounding={rounding!r}: choose one of {', '.join(STATE_BYTES)}")
    trainable = [p for p in model.parameters() if p.requires_grad]
    return budget.change(states=STATE_BYTES[rounding] * sum(p.numel() for p in trainable))


def _adamw(values: list[torch.Tensor], gradient: torch.Tensor, step: int, group: dict[str, Any]) -> None:
    """PyTorch's fused AdamW on one chunk of weight, exp_avg and exp_avg_sq, all fp32, in place."""
    weight, exp_avg, exp_avg_sq = ([value] for value in values)
    steps = [torch.full((), step - 1.0, device=gradient.device)]  # it counts up by itself
    options = {name: group[name] for name in ("lr", "eps", "weight_decay")} | {"amsgrad": False, "maximize": False}
    beta1, beta2 = group["betas"]
    adamw(weight, [gradient], exp_avg, exp_avg_sq, [], steps, fused=True, beta1=beta1, beta2=beta2, **options)


def _chunk(p: torch.Tensor) -> int:
    """Elements per pass: on a CPU what its cache holds, elsewhere enough to fill the device."""
    return 2**17 if p.device.type == "cpu" else 2**22
