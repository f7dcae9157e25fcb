"""Mixed precision: matrix products in 16 bits, weights and sums in fp32.

Problem    fp32 matrix products leave the fast units of the device idle, and every activation takes 4 bytes.
Idea       Keep the weights in fp32 and cast what a matrix product reads:

               weights W, AdamW states, gradients     fp32   the masters: small updates survive
               x16 = x.to(16 bit), W16 = W.to(16 bit) 16 bit y = x16 W16^T on the fast units
               norms, softmax, loss                   fp32   sums over many elements

                        bits  exponent  smallest > 0  largest  a weight of 1 moves by at least
               fp16      16      5        6e-8          65504     0.0005  -> gradients vanish: scale the loss
               bf16      16      8        1e-40         3e38      0.004   -> range of fp32: no scaling
               fp32      32      8        1e-45         3e38      6e-8

           Loss scaling multiplies the loss, so every gradient, by a large s (2**16 at first), and divides
           before the step. Infinite gradients skip the step and halve s; 2000 good steps double it.
Saves      Half of what matrix products save for backward; the norms stay in fp32. Time, on tensor
           cores and on CPUs with AVX512-BF16 or AMX.
Costs      A 16-bit copy of every weight from its forward to its backward (2 bytes per parameter), and the
           accuracy of 16-bit products (3 digits in fp16, 2 in bf16). fp16 skips some steps.
Use when   The device multiplies 16-bit numbers natively: prefer bf16, take fp16 on a T4 or V100. Not when a
           CPU emulates them (slower than fp32), and not to shrink the weights: they stay fp32.
In production   `TrainingArguments(bf16=True)` or `fp16=True`; `Accelerator(mixed_precision="bf16")`. FSDP's
           `MixedPrecisionPolicy` casts the shards before it gathers them, which halves the traffic too.
Source     Micikevicius et al., "Mixed Precision Training", 2018; the AMP recipe of the PyTorch documentation.

Shapes: T tokens, L blocks, D hidden, F feed-forward, Q = heads*head_dim, KV = KV heads*head_dim, S sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.causal_lm import decoder_blocks, norms_of, projection_widths
from recipes_lib.core.machine import machine
from recipes_lib.core.plain_step import block_bytes

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def mixed_precision(
    *, dtype: torch.dtype | None = None, device: str | None = None
) -> MixedPrecision:
    """Choose the precision of a training loop: its forward context, its backward and its optimizer step.

        mp = mixed_precision()
        with mp.autocast():
            loss = model(**batch, use_cache=False).loss
        mp.backward(loss)
        mp.step(optimizer, max_grad_norm=1.0)

    Args:
        dtype: bf16, fp16 or fp32 (autocast off); default is the fastest of this machine.
        device: "cpu" or "cuda"; default is this machine's.
    Raises ValueError for another dtype, or for "cuda" on a machine without it.
    """
    dtype, device = dtype or machine().compute_dtype, torch.device(device or machine().device).type
    if dtype not in NAMES:
        raise ValueError(
            f"dtype={dtype}: mixed precision computes in torch.bfloat16, float16 or float32 (off)"
        )
    # Here GradScaler would only warn, switch itself off, and let fp16 gradients vanish.
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no CUDA device: use device='cpu'")
    return MixedPrecision(dtype, device)


class MixedPrecision:
    """What `mixed_precision` returns. `print(mp)` says what it does on this machine, and why."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device
        self.scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
        self._backward_ran = False
        self.gradient_norm: torch.Tensor | None = (
            None  # before clipping, of the last step that clipped
        )

    def autocast(self) -> torch.autocast:
        """A new context for one forward; leave it before `backward`, which repeats the forward's dtypes."""
        return torch.autocast(self.device, self.dtype, enabled=self.dtype is not torch.float32)

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, of the scaled loss in fp16: until `step`, the gradients are scaled as well."""
        self.scaler.scale(loss).backward()
        self._backward_ran = True

    def step(self, optimizer: torch.optim.Optimizer, *, max_grad_norm: float | None = None) -> bool:
        """Unscale the gradients, clip their norm to `max_grad_norm`, step, and adapt the scale.

        Returns whether the optimizer stepped: False when an fp16 gradient was infinite or NaN.
        Raises ValueError for 16-bit parameters, for no gradients, and for gradients that `backward`
        did not scale: divided by the scale they would be far too small, and Adam would hide it.
        """
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        low = {NAMES[p.dtype] for p in parameters if p.dtype in (torch.float16, torch.bfloat16)}
        if low:
            raise ValueError(
                f"{' and '.join(low)} weights without masters: a small update rounds to nothing. Load the "
                f"model in torch.float32; mixed precision casts it where that is fast. Frozen weights may be 16-bit"
            )
        if getattr(optimizer, "takes_gradients_in_backward", False):
            if self.scaler.is_enabled() or max_grad_norm is not None:
                raise ValueError(
                    "this optimizer took the gradients in backward: too late to unscale or clip them here"
                )
        elif all(p.grad is None for p in parameters):
            raise ValueError(
                "no parameter of this optimizer has a gradient: call backward(loss) before step"
            )
        if self.scaler.is_enabled() and not self._backward_ran:
            raise ValueError(
                "fp16 gradients that are not scaled: call mp.backward(loss), not loss.backward()"
            )
        self._backward_ran = False
        if max_grad_norm is not None:  # the norm of scaled gradients would clip everything
            self.scaler.unscale_(optimizer)
            self.gradient_norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        scale = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= scale

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to resume: the scale and how long it has held."""
        return {"dtype": NAMES[self.dtype], "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict()`. Raises ValueError if that was of another dtype."""
        if state["dtype"] != NAMES[self.dtype]:
            raise ValueError(
                f"the checkpoint was trained in {state['dtype']}, this run computes in {NAMES[self.dtype]}: "
                f"pass the same dtype to mixed_precision, or start without its state"
            )
        self.scaler.load_state_dict(state["scaler"])

    def __str__(self) -> str:
        if self.dtype is torch.float32:
            return f"fp32 on {self.device}: autocast is off. {machine().name} has no fast 16-bit products"
        scaling = "no loss scaling: bf16 has the range of fp32"
        if self.scaler.is_enabled():
            scaling = f"dynamic loss scaling, now {self.scaler.get_scale():,.0f}"
        return f"{NAMES[self.dtype]} autocast on {self.device}, fp32 weights, {scaling}"


def estimate_mixed_precision(
    budget: Budget,
    model: Any,
    *,
    batch_size: int,
    seq_len: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Budget:
    """The same step under autocast, for fp32 weights: activations shrink, 16-bit copies of the weights add.

    Weights, states, gradients and the loss stay in fp32. `model` is as it is now, with its adapters, and
    `batch_size` that of a micro-batch; estimate checkpointing and offloading afterwards.
    Raises ValueError if the linear layers hold 16-bit weights, whose activations are 16-bit already.
    """
    if dtype is torch.float32:
        return budget
    weights = [weight for _, _, weight in _linears(model)]
    if any(weight.dtype is not torch.float32 for weight in weights):
        raise ValueError(
            f"the weights are {model.dtype}: this estimate is for fp32 weights under autocast"
        )
    tokens, blocks, head = (
        batch_size * seq_len,
        decoder_blocks(model),
        model.get_output_embeddings().weight,
    )
    block = autocast_block_bytes(model, seq_len=seq_len)
    final_norm = model.config.hidden_size * (8 + 2 * head.requires_grad)
    copies = 2 * sum(weight.numel() for weight in weights)  # saved for backward, frozen or not
    copied = 2 * max(sum(weight.numel() for *_, weight in _linears(block)) for block in blocks)
    return budget.change(
        activations=tokens * (len(blocks) * block + final_norm) + copies,
        one_block=tokens * block + copied,
    )


def autocast_block_bytes(model: Any, *, seq_len: int) -> int:
    """Bytes that one block saves per token under autocast; raises ValueError where `block_bytes` does."""
    block_bytes(model, seq_len=seq_len)
    config, block = model.config, decoder_blocks(model)[0]
    leaves = {name.rsplit(".", 1)[-1] for name, _ in block.named_modules()}
    hidden, heads = config.hidden_size, config.num_attention_heads
    q, kv, feed_forward = projection_widths(config)
    norms = norms_of(block)
    trained = any(p.requires_grad for p in norms[0].parameters())
    layer_norm = isinstance(norms[0], torch.nn.LayerNorm)
    total = (
        len(norms) * hidden * (8 if trained and not layer_norm else 4)
    )  # fp32: input, normalised input
    # Each linear casts its input for itself (Q, K and V: three copies), and keeps it if its weight trains.
    for name, inputs, weight in _linears(block):
        # The attention's output is in 16 bits already and is counted below.
        if weight.requires_grad and not re.search(r"attn.*(o_proj|c_proj)", name):
            total += 2 * inputs
    total += 2 * (2 * q + 2 * kv)
    if (
        config._attn_implementation == "eager"
    ):  # K and V repeated; softmax in fp32 and cast, soft-capped scores
        total += 2 * (2 * q - 2 * kv) + heads * seq_len * (
            8 if config.model_type.startswith("gemma2") else 6
        )
    if "q_norm" in leaves:  # an fp32 copy of the 16-bit input, and the normalised one
        total += (4 + 2 * trained) * (q + kv)
    if (
        "gate_proj" in leaves
    ):  # gate, activated gate and up; the down projection keeps its own input
        return total + 6 * feed_forward
    # GPT-2's gelu_new keeps four tensors; on CUDA its power, and what follows, runs in fp32.
    return total + (8 if model.device.type == "cpu" else 14) * feed_forward


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Name, input features and weight of the layers that autocast casts; quantized ones cast for themselves."""
    for name, module in model.named_modules():
        conv1d = (
            type(module).__name__ == "Conv1D"
        )  # GPT-2's linear layer, with its weight transposed
        if (conv1d or isinstance(module, torch.nn.Linear)) and module.weight.is_floating_point():
            yield name, module.weight.shape[0 if conv1d else 1], module.weight
