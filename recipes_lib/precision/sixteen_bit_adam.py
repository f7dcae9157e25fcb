"""16-bit AdamW states: the weights stay fp32, and each of the two averages takes two bytes.

Problem    AdamW keeps two fp32 averages per parameter: 8 bytes, twice the fp32 weights themselves.
Idea       Store both averages in bf16, and compute each step in fp32 as before. The difficulty is
           that bf16 has 8 significant bits. A number keeps its value unless the step changes it by
           more than half a spacing, and that is 0.2 to 0.4% of the number:

                                gradients of 0 take off    rounded to nearest
               exp_avg          1 - beta1 = 10%            it follows the gradients
               exp_avg_sq       1 - beta2 = 0.1%           it never falls: 0.999 rounds to 1

           An average that cannot fall keeps the largest gradients of the past, and the weights
           move too little for ever. So `exp_avg_sq` is rounded stochastically, which is right on
           average. `exp_avg` is rounded to nearest. The rule is the change that a step makes: an
           average with a beta of more than 0.9 is rounded stochastically.
Saves      4 of the 16 bytes per parameter that weight, gradient and two fp32 averages take.
Costs      The update is close to AdamW's, not equal. `exp_avg` may stop up to 4% short of a
           gradient that stays the same. `exp_avg_sq` has a random error with a standard deviation
           of some 5% at beta2 = 0.999, half of that after the root. A step on a CPU takes two to
           three times as long as fused AdamW's. Only a chunk is in fp32 at a time.
Use when   Full fine-tuning in fp32 or with mixed precision, where the states are a large term and
           8 bits are slow or not precise enough. It needs no library.
Not when   With LoRA, whose states are small. Where 8-bit states do: they save 6 bytes instead of
           4. Under FSDP2, whose sharded parameters it does not take.
In production   torchtitan `--optimizer.implementation fused_opt_states_bf16`: PyTorch's fused AdamW
           on CUDA with states made in bf16 before the first step; Megatron
           `--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16`.
           torchtitan's documentation mentions no stochastic rounding. In transformers
           `optim="adamw_anyprecision"` needs torchdistX from its repository; any other optimizer
           is handed to the Trainer.
Source     DeepSeek-V3 technical report, arXiv 2412.19437, section 3.3.2: both averages in bf16.
           Stochastic rounding: Zamirai et al., arXiv 2010.06192.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.optim.adamw import adamw

from recipes_lib.core.checks import check_whole
from recipes_lib.core.model.trainable import check_adamw, parameters_to_train
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import require_adapters
from recipes_lib.precision._rounding import random_bits, stochastic_round, stochastic_round_
from recipes_lib.precision._saved_states import load_as_saved

# Up to this beta, a step changes an average by 10% of what is new in it. That is 25 times half a
# spacing of bf16, and rounding to nearest loses little.
NEAREST_UP_TO = 0.9

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_sixteen_bit_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    bits: torch.Tensor,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """The whole idea: a step of AdamW in fp32 with averages that are stored in bf16.

    `weight` and `gradient` are fp32 [N], `exp_avg` and `exp_avg_sq` bf16 [N]; `bits` int32 [N] are
    random numbers below 2**16, new in every step; `step` counts from 1.
    """
    beta1, beta2 = betas
    mean = beta1 * exp_avg.float() + (1 - beta1) * gradient  # [N], in fp32
    square = beta2 * exp_avg_sq.float() + (1 - beta2) * gradient**2
    spread = (square / (1 - beta2**step)).sqrt()
    weight.mul_(1 - lr * weight_decay)
    weight.sub_(lr * (mean / (1 - beta1**step)) / (spread + eps))
    exp_avg.copy_(mean)  # to the nearest
    exp_avg_sq.copy_(stochastic_round(square, bits))  # to a neighbour, right on average


# --- the technique --------------------------------------------------------------------------------


def sixteen_bit_adamw(
    model_or_params: torch.nn.Module | Iterable[Any],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    seed: int | None = None,
) -> torch.optim.Optimizer:
    """Make an AdamW whose states take 16 bits; use it like any other optimizer, with any model.

    Args:
        model_or_params: a model (its trainable parameters), or parameters or groups of them.
        seed: of the random bits; None takes `torch.initial_seed()`. Under DDP it must be the same
            on every rank: replicas that round differently drift apart.
    Raises ValueError for trainable parameters that are not fp32 or are sharded, for a model that
    has none, and for numbers outside their bounds. The step raises one for sparse gradients.
    """
    params = parameters_to_train(model_or_params)
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return SixteenBitAdamW(params, seed=seed, **options)


class SixteenBitAdamW(torch.optim.Optimizer):
    """What `sixteen_bit_adamw` returns."""

    def __init__(self, params: Iterable[Any], *, seed: int | None, **defaults: Any) -> None:
        if seed is None:
            seed = torch.initial_seed()
        check_whole(seed=seed, least=0, most=2**64 - 1)
        self._seeds = torch.Generator().manual_seed(seed)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; raises ValueError as `sixteen_bit_adamw`."""
        super().add_param_group(param_group)
        # The optimizer has filled in the defaults by now.
        group = self.param_groups[-1]
        try:
            _check_options(group)
            _check_parameters(group["params"])
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
        # Every step has a seed of its own, so a checkpoint can resume on other devices.
        seed = int(torch.randint(2**63 - 1, (), generator=self._seeds))
        benches: dict[torch.device, _Workbench] = {}
        for group in self.param_groups:
            self._update_group(group, benches, seed)
        return loss

    def _update_group(
        self, group: dict[str, Any], benches: dict[torch.device, _Workbench], seed: int
    ) -> None:
        pieces = []
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.is_contiguous() and parameter.grad.is_contiguous():
                pieces += self._pieces(parameter, parameter)
            else:
                self._update_transposed(parameter, group, benches, seed)
        self._update_pieces(pieces, group, benches, seed)

    def _update_transposed(
        self,
        parameter: torch.Tensor,
        group: dict[str, Any],
        benches: dict[torch.device, _Workbench],
        seed: int,
    ) -> None:
        """What is transposed has no flat view: a copy is updated, and written back.

        One parameter at a time is copied whole, and its gradient with it.
        """
        weight = parameter.contiguous()
        self._update_pieces(self._pieces(parameter, weight), group, benches, seed)
        parameter.copy_(weight)

    def _update_pieces(
        self,
        pieces: Iterable[_Piece],
        group: dict[str, Any],
        benches: dict[torch.device, _Workbench],
        seed: int,
    ) -> None:
        for batch in _batches(pieces):
            device = batch[0].weight.device
            if device not in benches:
                benches[device] = _Workbench(self._largest_batch(device), device, seed)
            benches[device].update(batch, group)

    def _pieces(self, parameter: torch.Tensor, weight: torch.Tensor) -> Iterator[_Piece]:
        """Count the step of a parameter, and cut its tensors into pieces of at most a chunk."""
        _check_gradient(parameter)
        state = self.state[parameter]
        if not state:
            state.update(_first_state(parameter))
        state["step"] += 1
        tensors = [weight.view(-1), parameter.grad.reshape(-1)]
        tensors += [state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)]
        size = _chunk(parameter.device)
        for start in range(0, parameter.numel(), size):
            parts = [tensor[start : start + size] for tensor in tensors]
            yield _Piece(*parts, step=state["step"])

    def _largest_batch(self, device: torch.device) -> int:
        """Elements that are updated at a time on this device."""
        elements = 0
        for group in self.param_groups:
            elements += sum(p.numel() for p in group["params"] if p.device == device)
        return min(elements, _chunk(device))

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and pickle take along: also where the random stream is."""
        return super().__getstate__() | {"_seeds": self._seeds}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to resume exactly, the random stream included."""
        return super().state_dict() | {"seeds": self._seeds.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict()`. Raises ValueError if that is of another optimizer."""
        _check_saved(state_dict)
        load_as_saved(self, state_dict)
        self._seeds.set_state(state_dict["seeds"].cpu())


class _Piece(NamedTuple):
    """A part of a parameter, flat [n], and the number of this step."""

    weight: torch.Tensor  # fp32
    gradient: torch.Tensor  # fp32
    exp_avg: torch.Tensor  # bf16
    exp_avg_sq: torch.Tensor  # bf16
    step: int

    def goes_with(self, other: _Piece) -> bool:
        """Whether both can be updated in one go."""
        return self.weight.device == other.weight.device and self.step == other.step


class _Workbench:
    """What the updates of one step share on one device: room for fp32 averages, and random bits.

    Drawing random numbers costs more than the update, so a step draws them once. Every batch reads
    them from a place that is drawn, too. So each element gets an evenly drawn number in each step,
    which does not depend on those of the steps before: its rounding has no bias. Two elements of
    one step may get the same number. That changes no mean.
    """

    def __init__(self, size: int, device: torch.device, seed: int) -> None:
        self._size = size
        self._places = torch.Generator().manual_seed(seed)
        self._bits = random_bits(2 * size, generator=torch.Generator(device).manual_seed(seed))
        self._room = torch.empty(2, size, dtype=torch.float32, device=device)

    def update(self, batch: list[_Piece], group: dict[str, Any]) -> None:
        """Do a step of AdamW in fp32 on all pieces, and round their averages."""
        sizes = [len(piece.weight) for piece in batch]
        elements = sum(sizes)
        exp_avg, exp_avg_sq = self._room[:, :elements]
        exp_avgs = list(exp_avg.split(sizes))
        exp_avg_sqs = list(exp_avg_sq.split(sizes))

        torch._foreach_copy_(exp_avgs, [piece.exp_avg for piece in batch])
        torch._foreach_copy_(exp_avg_sqs, [piece.exp_avg_sq for piece in batch])
        _fused_adamw(batch, exp_avgs, exp_avg_sqs, group)
        for beta, average in zip(group["betas"], (exp_avg, exp_avg_sq)):
            if beta > NEAREST_UP_TO:
                stochastic_round_(average, self._bits_anywhere(elements))
        # From fp32 to bf16 PyTorch rounds to nearest. What is rounded already stays.
        torch._foreach_copy_([piece.exp_avg for piece in batch], exp_avgs)
        torch._foreach_copy_([piece.exp_avg_sq for piece in batch], exp_avg_sqs)

    def _bits_anywhere(self, count: int) -> torch.Tensor:
        """`count` of the random bits of this step, from a place that is drawn."""
        place = int(torch.randint(self._size, (), generator=self._places))
        return self._bits[place : place + count]


def _fused_adamw(
    batch: list[_Piece],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    group: dict[str, Any],
) -> None:
    """PyTorch's fused AdamW on the weights of the batch, with these fp32 averages, in place."""
    beta1, beta2 = group["betas"]
    # `adamw` adds 1 to each by itself.
    steps_before = torch.full((len(batch),), batch[0].step - 1.0, device=exp_avgs[0].device)
    adamw(
        [piece.weight for piece in batch],
        [piece.gradient for piece in batch],
        exp_avgs,
        exp_avg_sqs,
        [],
        list(steps_before.unbind()),
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
    )


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Put small pieces together, so that a step has few kernels: each batch is at most a chunk."""
    batch: list[_Piece] = []
    elements = 0
    for piece in pieces:
        size = len(piece.weight)
        full = elements + size > _chunk(piece.weight.device)
        if batch and (full or not piece.goes_with(batch[0])):
            yield batch
            batch = []
            elements = 0
        batch.append(piece)
        elements += size
    if batch:
        yield batch


def _first_state(parameter: torch.Tensor) -> dict[str, Any]:
    like = {"dtype": torch.bfloat16, "device": parameter.device}
    return {
        "step": 0,
        "exp_avg": torch.zeros(parameter.shape, **like),
        "exp_avg_sq": torch.zeros(parameter.shape, **like),
    }


def _chunk(device: torch.device) -> int:
    """Elements updated at a time: what a CPU's cache holds, or what keeps a GPU busy."""
    return 2**20 if device.type == "cpu" else 2**22


# --- guards ---------------------------------------------------------------------------------------


def _check_options(group: dict[str, Any]) -> None:
    options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    check_adamw(**options)


def _check_parameters(parameters: Iterable[torch.Tensor]) -> None:
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if any(hasattr(parameter, "device_mesh") for parameter in trainable):
        raise ValueError(
            "sharded parameters (DTensor): give whole ones, or use torch.optim.AdamW under FSDP2"
        )
    wrong = {str(p.dtype) for p in trainable if p.dtype is not torch.float32}
    if wrong:
        raise ValueError(
            f"trainable weights in {', '.join(sorted(wrong))}: call model.float() before this; "
            f"for weights in bf16 there is recipes_lib.precision.pure_bf16.bf16_adamw"
        )


def _check_gradient(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    if gradient.layout != torch.strided or gradient.dtype is not torch.float32:
        raise ValueError(
            f"a gradient in {gradient.dtype}, {gradient.layout}: give a dense one in fp32 "
            f"(an embedding with sparse=False)"
        )


def _check_saved(state_dict: dict[str, Any]) -> None:
    dtypes = set()
    for state in state_dict["state"].values():
        dtypes |= {value.dtype for value in state.values() if torch.is_tensor(value)}
    # The states of `bf16_adamw` look the same, and its groups have a rounding.
    rounded = any("rounding" in group for group in state_dict["param_groups"])
    if "seeds" not in state_dict or rounded or not dtypes <= {torch.bfloat16}:
        raise ValueError(
            "the checkpoint is that of another optimizer: load it with the one that saved it"
        )


# --- the arithmetic -------------------------------------------------------------------------------


@estimate(Order.STATES)
def estimate_sixteen_bit_adam(budget: Budget, model: Any, shape: Shape) -> Budget:
    """The states shrink to 4 bytes per parameter. The step needs room for a chunk at a time.

    Raises ValueError as `sixteen_bit_adamw` does.
    """
    require_adapters(budget, model)
    _check_parameters(model.parameters())
    # In the step the fp32 averages of a chunk exist beside all gradients, and so do the
    # embedding's copies in backward. The budget has one term for both.
    in_step = predicted_step_bytes(model)
    return budget.change(
        states=predicted_state_bytes(model),
        embedding_gradient=max(budget.embedding_gradient, in_step),
    )


def predicted_state_bytes(model: Any) -> int:
    """Bytes of the states once they exist: two bf16 averages of each trainable parameter."""
    return 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def predicted_step_bytes(model: Any) -> int:
    """Bytes that a step needs for a chunk: two fp32 averages, and two int32 random numbers.

    Beside them lies a copy of the largest transposed weight and of its gradient, if there is one.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in trainable)
    chunk = min((_chunk(parameter.device) for parameter in trainable), default=0)
    transposed = [parameter.numel() for parameter in trainable if not parameter.is_contiguous()]
    return 16 * min(elements, chunk) + 8 * max(transposed, default=0)
