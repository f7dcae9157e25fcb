"""Pure bf16: weights, gradients and optimizer states in 16 bits, without losing the small updates.

Problem    fp32 training holds 16 bytes per parameter: weight, gradient and AdamW's two averages.
Idea       Store all four in bf16 and compute each step in fp32. The difficulty is the end of the
           step, where the result goes back into 8 significant bits. Between two numbers of bf16
           there is a spacing, and an update of less than half of it disappears:

               a weight of 1 has the neighbours 0.9961 and 1.0078, and the step asks for 0.9999

               "nearest"      1, every time: small learning rates never move it
               "stochastic"   0.9961 in 1 of 39 steps, else 1: right on average
               "master"       0.9999 in an fp32 copy in the optimizer; the model computes with its
                              rounding, 1

           The same happens to the averages: with beta2 = 0.999 a bf16 `exp_avg_sq` can rise but
           never fall, because 0.1% of it is under half a spacing. "stochastic" rounds weights and
           averages alike; how, is in precision/_rounding.py.
Saves      Bytes per parameter: 16 in fp32 -> 8 ("stochastic", "nearest"); "master" stays at 16. The
           activations are those of a bf16 model in all three.
Costs      On a CPU a stochastic step takes several times as long as fused AdamW's. Each rounding
           adds noise of up to one spacing, 0.4 to 0.8% of the number. With "master" the model sees
           small updates only when they have added up to half a spacing: after a few steps its loss
           is still far above that of fp32.
Use when   Full fine-tuning where weights and states are most of the budget ("stochastic"), or long
           training in bf16 that must lose no update ("master").
Not when   fp32 weights fit: mixed precision rounds no update. With LoRA: adapters are small enough
           for fp32. Under FSDP2, whose sharded parameters it does not take. "nearest" is here to
           show what goes wrong.
In production   torchao `_AdamW(bf16_stochastic_round=True)`, which rounds the averages to nearest;
           fp32 masters in DeepSpeed (`"bf16": {"enabled": true}`) and Megatron (`--bf16`).
           `TrainingArguments(bf16=True)` is mixed precision instead: its weights are fp32.
Source     Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192. Its other rescue is
           Kahan summation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.model.trainable import check_adamw, parameters_to_train
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import require_adapters
from recipes_lib.precision._rounding import random_bits, stochastic_round_
from recipes_lib.precision._saved_states import load_as_saved

# Of each rounding: bytes of the states per parameter, and of the step per element of its chunk.
STATE_BYTES = {"stochastic": 4, "nearest": 4, "master": 12}
STEP_BYTES = {"stochastic": 18, "nearest": 0, "master": 4}


# --- the idea: what a learner can copy ------------------------------------------------------------


@torch.no_grad()
def step_with_masters(
    weights: list[torch.Tensor], masters: list[torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """fp32 masters by hand: `optimizer` is any optimizer of the `masters`, and steps with them.

    The model's bf16 `weights` only make the gradients, and take over the masters' rounding.
    """
    for weight, master in zip(weights, masters):
        master.grad = weight.grad.float()
    optimizer.step()
    for weight, master in zip(weights, masters):
        weight.copy_(master)


# --- the technique --------------------------------------------------------------------------------


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
    """Make an AdamW for bf16 weights; use it like any other optimizer, with any model.

    Args:
        model_or_params: a model (its trainable parameters), or parameters or groups of them.
        rounding: "stochastic", "nearest" or "master"; a group may have its own.
        seed: of the random bits; None takes `torch.initial_seed()`. Under DDP it must be the same
            on every rank: replicas that round differently drift apart.
    Raises ValueError for trainable parameters that are not bf16 (norms included), for a model that
    has none, for another rounding, and for numbers that AdamW cannot use.
    """
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    check_adamw(**options)
    params = parameters_to_train(model_or_params)
    return BF16AdamW(params, seed=seed, rounding=rounding, **options)


class BF16AdamW(torch.optim.Optimizer):
    """What `bf16_adamw` returns.

    The first step with "master" copies the weights into fp32. From then on every step overwrites
    them from that copy, so load other weights before the first step.
    """

    def __init__(self, params: Iterable[Any], *, seed: int | None, **defaults: Any) -> None:
        if seed is None:
            seed = torch.initial_seed()
        check_whole(seed=seed, least=0, most=2**64 - 1)
        self._seeds = torch.Generator().manual_seed(seed)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; raises ValueError as `bf16_adamw` does."""
        super().add_param_group(param_group)
        # The optimizer has filled in the defaults by now.
        group = self.param_groups[-1]
        try:
            _check(group["params"], rounding=group["rounding"])
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Every step seeds its generators anew, so a checkpoint can resume on other devices.
        seed = int(torch.randint(2**63 - 1, (), generator=self._seeds))
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                device = parameter.device
                if device not in generators:
                    generators[device] = torch.Generator(device).manual_seed(seed)
                self._update(parameter, group, generators[device])
        return loss

    def _update(
        self, parameter: torch.Tensor, group: dict[str, Any], generator: torch.Generator
    ) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_first_state(parameter, group["rounding"]))
        state["step"] += 1

        weight = state.get("master")
        if weight is None:
            # A transposed parameter has no flat view: a copy is updated, and written back below.
            weight = parameter.contiguous()
        stored = [weight.view(-1), state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)]
        gradient = parameter.grad.reshape(-1)

        # In chunks, so that the fp32 values in between take little memory.
        size = _chunk(parameter)
        for start in range(0, parameter.numel(), size):
            chunk = slice(start, start + size)
            parts = [tensor[chunk] for tensor in stored]
            _step(parts, gradient[chunk], state["step"], group, generator)

        if weight is not parameter:
            parameter.copy_(weight)

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and pickle take along: also where the random stream is."""
        return super().__getstate__() | {"_seeds": self._seeds}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to resume exactly, the random stream included."""
        return super().state_dict() | {"seeds": self._seeds.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict()`.

        Raises ValueError if that is of another optimizer or rounding.
        """
        saved = [group.get("rounding") for group in state_dict["param_groups"]]
        own = [group["rounding"] for group in self.param_groups]
        if saved != own:
            raise ValueError(
                f"the checkpoint has rounding {saved}, this optimizer {own}: make it with the same"
            )
        load_as_saved(self, state_dict)
        self._seeds.set_state(state_dict["seeds"].cpu())


def _first_state(parameter: torch.Tensor, rounding: str) -> dict[str, Any]:
    dtype = torch.float32 if rounding == "master" else torch.bfloat16
    like = {"dtype": dtype, "device": parameter.device}
    state = {
        "step": 0,
        "exp_avg": torch.zeros(parameter.shape, **like),
        "exp_avg_sq": torch.zeros(parameter.shape, **like),
    }
    if rounding == "master":
        state["master"] = parameter.float().contiguous()
    return state


# By how many elements the random bits of one tensor are shifted against those of the next. A
# multiple of 8 keeps them aligned in memory.
SPARE = 8


def _step(
    parts: list[torch.Tensor],
    gradient: torch.Tensor,
    step: int,
    group: dict[str, Any],
    generator: torch.Generator,
) -> None:
    """Update a chunk of weight, exp_avg and exp_avg_sq in place, in fp32 and then rounded."""
    if group["rounding"] != "stochastic":
        # On bf16 tensors the fused kernel computes in fp32 as well, and rounds to nearest.
        _fused_adamw(parts, gradient, step, group)
        return
    values = [part.float() for part in parts]
    _fused_adamw(values, gradient, step, group)

    # Drawing costs more than rounding, so the three tensors share one draw. Each reads it from
    # another place, so that a weight and its averages are not rounded by the same bits.
    bits = random_bits(len(gradient) + 2 * SPARE, generator=generator)
    for number, (part, value) in enumerate(zip(parts, values)):
        start = number * SPARE
        part.copy_(stochastic_round_(value, bits[start : start + len(value)]))


def _fused_adamw(
    values: list[torch.Tensor], gradient: torch.Tensor, step: int, group: dict[str, Any]
) -> None:
    """PyTorch's fused AdamW on one weight, exp_avg and exp_avg_sq, in place."""
    weight, exp_avg, exp_avg_sq = values
    beta1, beta2 = group["betas"]
    # `adamw` adds 1 by itself.
    steps_before = torch.full((), step - 1.0, device=gradient.device)
    adamw(
        [weight],
        [gradient.to(weight.dtype)],
        [exp_avg],
        [exp_avg_sq],
        [],
        [steps_before],
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
    )


def _chunk(parameter: torch.Tensor) -> int:
    """Elements updated at a time: what a CPU's cache holds, or what keeps a GPU busy."""
    return 2**17 if parameter.device.type == "cpu" else 2**22


# --- guards ---------------------------------------------------------------------------------------


def _check(parameters: list[torch.Tensor], *, rounding: str) -> None:
    check_choice(STATE_BYTES, rounding=rounding)
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    wrong = {str(p.dtype) for p in trainable if p.dtype is not torch.bfloat16}
    if wrong:
        raise ValueError(
            f"trainable weights in {', '.join(sorted(wrong))}: "
            f"call model.to(torch.bfloat16) before this"
        )


# --- the arithmetic -------------------------------------------------------------------------------


@estimate(Order.STATES)
def estimate_pure_bf16(budget: Budget, model: Any, shape: Shape, *, rounding: str) -> Budget:
    """The budget of the bf16 model with the states of this rounding.

    Raises ValueError as `bf16_adamw` does.
    """
    require_adapters(budget, model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _check(trainable, rounding=rounding)
    elements = [parameter.numel() for parameter in trainable]
    # In the step the fp32 copies of a chunk exist beside all gradients, and so do the embedding's
    # copies in backward. The budget has one term for both.
    chunks = [min(parameter.numel(), _chunk(parameter)) for parameter in trainable]
    in_step = STEP_BYTES[rounding] * max(chunks, default=0)
    return budget.change(
        states=STATE_BYTES[rounding] * sum(elements),
        embedding_gradient=max(budget.embedding_gradient, in_step),
    )
