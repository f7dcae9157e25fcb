"""Mixed precision: matrix products in 16 bits, weights and sums in fp32.

Problem    fp32 matrix products leave the device's fast units idle, and an activation takes 4 bytes.
Idea       Keep the weights in fp32 and cast what a matrix product reads:

               weights W, AdamW states, gradients       fp32    the masters: small updates survive
               x16 = x.to(16 bit), W16 = W.to(16 bit)   16 bit  y = x16 W16^T on the fast units
               norms, softmax, loss                     fp32    sums over many elements

                     bits  exponent  smallest > 0  largest  a weight of 1 moves by at least
               fp16   16      5        6e-8         65504   0.0005   small gradients vanish: scale
               bf16   16      8        1e-40        3e38    0.004    the range of fp32: no scaling
               fp32   32      8        1e-45        3e38    6e-8

           Loss scaling multiplies the loss, so every gradient, by a large s (2**12 at first), and
           divides before the step. Infinite gradients skip the step and halve s; 2000 good steps
           double it.
Saves      Half of what matrix products save for backward; the norms stay in fp32. Time, on tensor
           cores and on CPUs with AVX512-BF16 or AMX.
Costs      A 16-bit copy of every weight from its forward to its backward (2 bytes per parameter),
           and the accuracy of 16-bit products (3 digits in fp16, 2 in bf16). fp16 skips some steps.
Use when   The device multiplies 16-bit numbers natively: prefer bf16, take fp16 on a T4 or V100.
Not when   A CPU emulates 16-bit products, which is slower than fp32. Nor to shrink the weights:
           they stay fp32.
In production   `TrainingArguments(bf16=True)` or `fp16=True`;
           `Accelerator(mixed_precision="bf16")`. FSDP's `MixedPrecisionPolicy` casts the shards
           before it gathers them, which halves the traffic too.
Source     Micikevicius et al., "Mixed Precision Training", 2018; the AMP recipe of the PyTorch
           documentation.

Shapes: T tokens, L blocks, D hidden, F feed-forward, Q = heads*head_dim, KV = KV heads*head_dim,
S sequence.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes_lib.core.checks import check_choice
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model.marks import TAKES_GRADIENTS_IN_BACKWARD, marked

# PyTorch begins with 2**16. A gradient of 1 is infinite then, so the first steps of most models are
# skipped, and a run of few steps trains less than it says. Here one of 15 is still finite.
FIRST_SCALE = 2**12
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


# --- the idea: what a learner can copy ------------------------------------------------------------


def linear_by_hand(x: torch.Tensor, weight: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """What autocast makes of a linear layer: an fp32 master `weight`, a product in 16 bits."""
    x16 = x.to(dtype)  # [T, D]
    weight16 = weight.to(dtype)  # [F, D], a copy that lives until its backward
    return x16 @ weight16.T  # [T, F], in 16 bits


# --- the technique --------------------------------------------------------------------------------


def mixed_precision(*, dtype: torch.dtype | None = None) -> MixedPrecision:
    """Choose the precision of a training loop: of its forward, its backward and its step.

        mp = mixed_precision()
        with mp.autocast():
            loss = model(**batch, use_cache=False).loss
        mp.backward(loss)
        mp.step(optimizer, max_grad_norm=1.0)

    Args:
        dtype: bf16, fp16 or fp32 (autocast off); default is the fastest of this machine.
    """
    if dtype is None:
        dtype = machine().compute_dtype
    check_choice(NAMES, dtype=dtype)
    return MixedPrecision(dtype, torch.device(machine().device).type)


class MixedPrecision:
    """What `mixed_precision` returns. `print(mp)` says what it does on this machine, and why.

    `gradient_norm` is that of the last step that clipped, before it clipped.
    """

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        """Mixed precision in this dtype; in fp16 with a scaler of the loss."""
        self.dtype = dtype
        self.device = device
        self.gradient_norm: torch.Tensor | None = None
        # bf16 and fp32 have the range for every gradient: there the scaler does nothing.
        in_fp16 = dtype is torch.float16
        self.scaler = torch.amp.GradScaler(device, init_scale=FIRST_SCALE, enabled=in_fp16)
        self._backward_ran = False

    def autocast(self) -> torch.autocast:
        """A new context for one forward.

        Leave it before `backward`, which repeats the forward's dtypes by itself. Inside of the
        context the 16-bit copies of all weights stay, also those that checkpoints would let go.
        """
        return torch.autocast(self.device, self.dtype, enabled=self.dtype is not torch.float32)

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, of the scaled loss in fp16."""
        self.scaler.scale(loss).backward()
        self._backward_ran = True

    def step(self, optimizer: torch.optim.Optimizer, *, max_grad_norm: float | None = None) -> bool:
        """Unscale the gradients, clip their norm to `max_grad_norm`, step, and adapt the scale.

        Returns whether the optimizer stepped: False when an fp16 gradient was infinite or NaN.
        """
        parameters = _trainable_masters(optimizer)
        scales = self.scaler.is_enabled()
        if (scales or max_grad_norm is not None) and marked(optimizer, TAKES_GRADIENTS_IN_BACKWARD):
            raise ValueError(
                "this optimizer took the gradients in backward: "
                "too late to unscale or clip them here"
            )
        if scales and not self._backward_ran:
            # Divided by the scale they would be far too small, and Adam would hide it.
            raise ValueError(
                "fp16 gradients that are not scaled: call mp.backward(loss), not loss.backward()"
            )
        self._backward_ran = False

        if max_grad_norm is not None:
            # The norm of scaled gradients is so large that all of them would be clipped.
            self.scaler.unscale_(optimizer)
            self.gradient_norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)

        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        # A skipped step is the only one that lowers the scale.
        return self.scaler.get_scale() >= before

    def state_dict(self) -> dict[str, Any]:
        return {"dtype": NAMES[self.dtype], "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = NAMES[self.dtype]
        if state["dtype"] != own:
            raise ValueError(
                f"the checkpoint was trained in {state['dtype']}, this run computes in {own}: "
                f"pass the same dtype to mixed_precision, or start without its state"
            )
        self.scaler.load_state_dict(state["scaler"])

    def __str__(self) -> str:
        if self.dtype is torch.float32:
            name = machine().name
            return f"fp32 on {self.device}: autocast is off. {name} has no fast 16-bit products"
        scaling = "no loss scaling: bf16 has the range of fp32"
        if self.scaler.is_enabled():
            scaling = f"dynamic loss scaling, now {self.scaler.get_scale():,.0f}"
        return f"{NAMES[self.dtype]} autocast on {self.device}, fp32 weights, {scaling}"


def _trainable_masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What the optimizer trains. Raises ValueError for weights in 16 bits without masters."""
    parameters = []
    for group in optimizer.param_groups:
        parameters += [parameter for parameter in group["params"] if parameter.requires_grad]
    for parameter in parameters:
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"{NAMES[parameter.dtype]} weights without masters: a small update rounds to "
                f"nothing. Load the model in torch.float32; frozen weights may be 16-bit"
            )
    return parameters
