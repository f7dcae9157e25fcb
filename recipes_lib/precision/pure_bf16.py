"""Pure bf16: weights, gradients and optimizer states in 16 bits, without losing the small updates.

Problem    fp32 training holds 16 bytes per parameter: the weight, its gradient and AdamW's two averages.
Idea       Store all four in bf16 and compute each step in fp32. The problem is its end, where the result goes back
           into 8 significant bits: an update of less than half a spacing disappears.

               a weight of 1 has the neighbours 0.9961 and 1.0078, and the step asks for 0.9999

               "nearest"      1, every time: small learning rates never move it
               "stochastic"   0.9961 in 1 of 39 steps, else 1: right on average
               "master"       0.9999 in an fp32 copy in the optimizer; the model computes with its rounding, 1

           The same happens to the averages: with beta2 = 0.999 a bf16 `exp_avg_sq` can rise but never fall, because
           0.1% of it is under half a spacing. "stochastic" rounds weights and averages alike.
Saves      Bytes per parameter: 16 in fp32 -> 8 ("stochastic", "nearest"); "master" stays at 16. The activations are
           those of a bf16 model in all three.
Costs      On a CPU a stochastic step takes several times as long as fused AdamW's. Each rounding adds noise of up to
           one spacing, 0.4 to 0.8% of the number. With "master" the model sees small updates only when they have
           added up to half a spacing: after a few steps its loss is still far above that of fp32.
Use when   Full fine-tuning where weights and states are most of the budget ("stochastic"), or long training in bf16
           that must lose no update ("master").
Not when   fp32 weights fit: mixed precision rounds no update. With LoRA: adapters are small enough for fp32.
           Under FSDP2, whose sharded parameters it does not take. "nearest" is here to show what goes wrong.
In production   torchao `_AdamW(bf16_stochastic_round=True)`, which rounds the averages to nearest; fp32 masters in
           DeepSpeed (`"bf16": {"enabled": true}`) and Megatron (`--bf16`). `TrainingArguments(bf16=True)` is mixed
           precision instead: its weights are fp32.
Source     Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192. Its other rescue is Kahan summation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

from recipes_lib.core.budget import Budget

STATE_BYTES = {"stochastic": 4, "nearest": 4, "master": 12}  # per parameter
STEP_BYTES = {
    "stochastic": 22,
    "nearest": 0,
    "master": 4,
}  # per element of the chunk that is being updated
SPARE = 8  # elements: shifts the random bits, and keeps them aligned


def bf16_adamw(
    model_or_params: torch.nn.Module | Iterable[Any],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    rounding: str = "stochastic",
    seed: int | None = None,
) -> torch.optim.Optimizer:
    """Make an AdamW for bf16 weights; use it like any other optimizer.

    Args:
        model_or_params: a model (its trainable parameters), or parameters or groups of them.
        rounding: "stochastic", "nearest" or "master"; a group may have its own.
        seed: of the random bits; None takes `torch.initial_seed()`. Under DDP it must be the same on every rank:
            replicas that round differently drift apart.
    Raises ValueError for trainable parameters that are not bf16 (norms included), for none, for another rounding.
    """
    if isinstance(model_or_params, torch.nn.Module):
        model_or_params = [p for p in model_or_params.parameters() if p.requires_grad]
        if not model_or_params:
            raise ValueError(
                "the model has no trainable parameter: set requires_grad before this call"
            )
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return BF16AdamW(model_or_params, seed=seed, rounding=rounding, **options)


class BF16AdamW(torch.optim.Optimizer):
    """What `bf16_adamw` returns. The first step with "master" copies the weights into fp32; from then on every step
    overwrites them from that copy, so load other weights before the first step."""

    def __init__(self, params: Iterable[Any], *, seed: int | None, **defaults: Any) -> None:
        self._seeds = torch.Generator().manual_seed(torch.initial_seed() if seed is None else seed)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; raises ValueError as `bf16_adamw` does."""
        super().add_param_group(param_group)
        _check(self.param_groups[-1]["params"], rounding=self.param_groups[-1]["rounding"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        # Every step seeds the generators of its devices anew, so a checkpoint can resume on other devices.
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
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros(p.shape, dtype=dtype, device=p.device) for _ in "mv"
            )
            if rounding == "master":
                state["master"] = p.float().contiguous()
        state["step"] += 1
        weight = state["master"] if rounding == "master" else p.contiguous()
        stored = [tensor.view(-1) for tensor in (weight, state["exp_avg"], state["exp_avg_sq"])]
        gradient, size = p.grad.reshape(-1), _chunk(p)
        for start in range(0, p.numel(), size):
            parts = [tensor[start : start + size] for tensor in stored]
            _step(parts, gradient[start : start + size], state["step"], group, generator)
        if weight is not p:
            p.copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to resume exactly, the random stream included."""
        return super().state_dict() | {"seeds": self._seeds.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict()`; raises ValueError if that is of another optimizer or rounding."""
        saved = [group.get("rounding") for group in state_dict["param_groups"]]
        own = [group["rounding"] for group in self.param_groups]
        if saved != own:
            raise ValueError(
                f"the checkpoint has rounding {saved}, this optimizer {own}: make it with the same"
            )
        super().load_state_dict(state_dict)
        # That cast every state to its parameter's dtype: without what follows, fp32 masters resume as bf16.
        for theirs, ours in zip(state_dict["param_groups"], self.param_groups):
            for number, p in zip(theirs["params"], ours["params"]):
                for name, value in state_dict["state"].get(number, {}).items():
                    if torch.is_tensor(value):
                        self.state[p][name] = value.to(p.device, copy=True)
        self._seeds.set_state(state_dict["seeds"].cpu())


def stochastic_round(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 to one of the two bf16 neighbours, to the nearer more often: over all `bits` the mean is the value.

    bf16 is the upper half of fp32. A random number below 2**16, added to the whole, carries into the upper half with
    the probability (lower half) / 2**16; then the lower half is cut off. What bf16 can represent stays, infinities
    and NaN included. Above its largest number the upper neighbour is infinity, as in rounding to nearest.

    Args:
        values: fp32 [N]; bits: int32 [N] from `random_bits`.
    """
    # CUDA's NaN has all bits set: a carry would turn it into -0. Python's NaN has a lower half of zeros.
    raw = values.nan_to_num(nan=math.nan, posinf=math.inf, neginf=-math.inf).view(torch.int32)
    raw += bits
    raw >>= 16
    return raw.to(torch.int16).view(torch.bfloat16)


def random_bits(count: int, *, generator: torch.Generator) -> torch.Tensor:
    """Draw `count` int32 numbers from 0 to 2**16 - 1 on the generator's device, four from each 64-bit number."""
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=generator.device)
    return (
        words.random_(-(2**63), None, generator=generator)
        .view(torch.uint16)[:count]
        .to(torch.int32)
    )


def estimate_pure_bf16(budget: Budget, model: Any, *, rounding: str) -> Budget:
    """The budget of the bf16 model with the states of this rounding; raises ValueError as `bf16_adamw` does."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    _check(trainable, rounding=rounding)
    # The fp32 copies of the chunk, like those of the embedding before them, exist beside all gradients.
    chunk = STEP_BYTES[rounding] * max((min(p.numel(), _chunk(p)) for p in trainable), default=0)
    states = STATE_BYTES[rounding] * sum(p.numel() for p in trainable)
    return budget.change(states=states, embedding_gradient=max(budget.embedding_gradient, chunk))


def _step(
    parts: list, gradient: torch.Tensor, step: int, group: dict, generator: torch.Generator
) -> None:
    """Update a chunk of weight, exp_avg and exp_avg_sq in place: PyTorch's fused AdamW, then the rounding."""
    stochastic = group["rounding"] == "stochastic"
    # On bf16 tensors the fused kernel computes in fp32 as well, and rounds to nearest.
    values = [part.float() for part in parts] if stochastic else parts
    weight, exp_avg, exp_avg_sq = ([value] for value in values)
    steps = [torch.full((), step - 1.0, device=gradient.device)]  # the function counts up by itself
    options = {name: group[name] for name in ("lr", "eps", "weight_decay")} | {
        "amsgrad": False,
        "maximize": False,
    }
    options |= dict(zip(("beta1", "beta2"), group["betas"]))
    adamw(
        weight,
        [gradient.to(weight[0].dtype)],
        exp_avg,
        exp_avg_sq,
        [],
        steps,
        fused=True,
        **options,
    )
    if stochastic:
        # Drawing costs more than rounding, so the three share one draw, shifted: no element meets its own bits again.
        bits = random_bits(len(gradient) + 2 * SPARE, generator=generator)
        for i, (part, value) in enumerate(zip(parts, values)):
            part.copy_(stochastic_round(value, bits[i * SPARE :][: len(value)]))


def _chunk(p: torch.Tensor) -> int:
    """Elements updated at a time: on a CPU what its cache holds, elsewhere what keeps the device busy."""
    return 2**17 if p.device.type == "cpu" else 2**22


def _check(params: list[torch.Tensor], *, rounding: str) -> None:
    if rounding not in STATE_BYTES:
        raise ValueError(f"rounding={rounding!r}: choose one of {', '.join(STATE_BYTES)}")
    wrong = {str(p.dtype) for p in params if p.requires_grad and p.dtype is not torch.bfloat16}
    if wrong:
        raise ValueError(
            f"trainable weights in {', '.join(wrong)}: call model.to(torch.bfloat16) before this"
        )
