"""Measure one technique beside the plain step: `python -m recipes_lib bench <technique>`.

Each arrangement below is the shortest use of one technique in a training step, with the budget that its
arithmetic predicts. The notebooks explain them; this is for a quick look at your own model and sizes.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.data import IGNORED
from recipes_lib.core.machine import machine, seed_everything
from recipes_lib.core.measure import PeakMemory, in_turns, measure
from recipes_lib.core.model import SHAPES, load_model, model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.report.ladder import Ladder

LR = 2e-5


@dataclass
class Bench:
    """One model and one random batch [B, S]; `arrange_…` methods give (step, predicted budget)."""

    model_name: str
    batch_size: int
    seq_len: int
    micro_batches: int
    layers: int | None = None
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.seq_len < 2:
            raise ValueError(
                f"batch_size={self.batch_size}, seq_len={self.seq_len}: at least 1 row and 2 tokens are needed"
            )
        if self.layers and self.model_name not in SHAPES:
            raise ValueError(
                f"layers={self.layers}: only a shape can be built with fewer layers ({', '.join(SHAPES)})"
            )
        if self.micro_batches < 1 or self.batch_size % self.micro_batches:
            raise ValueError(
                f"micro_batches={self.micro_batches} must divide batch_size={self.batch_size}"
            )

    @property
    def size(self) -> dict[str, int]:
        return {"batch_size": self.batch_size, "seq_len": self.seq_len}

    def fresh(self) -> Any:
        seed_everything(0)
        if self.model_name in SHAPES:
            return model_of_shape(self.model_name, layers=self.layers, dtype=self.dtype)
        return load_model(self.model_name, dtype=self.dtype)

    def batch(self, model: Any) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch_size, self.seq_len)
        ids = torch.randint(0, model.config.vocab_size, shape, generator=generator).to(model.device)
        labels = ids.clone()
        labels[:, : self.seq_len // 2] = (
            IGNORED  # as in instruction tuning: the prompt carries no loss
        )
        return {"input_ids": ids, "labels": labels}

    def plain(
        self, model: Any, optimizer: torch.optim.Optimizer | None = None
    ) -> Callable[[], float]:
        batch = self.batch(model)
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

        def step() -> float:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    def arrange_baseline(self, model: Any) -> tuple[Callable[[], float], Budget]:
        return self.plain(model), budget_of(model, **self.size)

    def arrange_gradient_accumulation(self, model: Any) -> tuple[Callable[[], float], Budget]:
        from recipes_lib.training.gradient_accumulation import (
            accumulate_gradients,
            estimate_gradient_accumulation,
        )

        plan = budget_of(model, **self.size)
        plan = estimate_gradient_accumulation(
            plan, model, **self.size, micro_batches=self.micro_batches
        )
        batch = self.batch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

        def step() -> float:
            loss = accumulate_gradients(model, batch, micro_batches=self.micro_batches)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step, plan

    def arrange_activation_checkpointing(self, model: Any) -> tuple[Callable[[], float], Budget]:
        from recipes_lib.memory.activation_checkpointing import (
            apply_activation_checkpointing,
            estimate_activation_checkpointing,
        )

        plan = estimate_activation_checkpointing(budget_of(model, **self.size), model, **self.size)
        return self.plain(apply_activation_checkpointing(model)), plan

    def arrange_activation_offload(self, model: Any) -> tuple[Callable[[], float], Budget]:
        from recipes_lib.memory.activation_offload import (
            estimate_activation_offload,
            offload_activations,
        )

        plan = estimate_activation_offload(budget_of(model, **self.size), model, **self.size)
        step = self.plain(model)

        def offloaded() -> float:
            with offload_activations(model, to="host" if model.device.type == "cuda" else "disk"):
                return step()

        return offloaded, plan

    def arrange_mixed_precision(self, model: Any) -> tuple[Callable[[], float], Budget]:
        from recipes_lib.precision.mixed_precision import estimate_mixed_precision, mixed_precision

        native = machine().compute_dtype
        dtype = torch.bfloat16 if native is torch.float32 else native  # emulated: shown as it is
        plan = estimate_mixed_precision(
            budget_of(model, **self.size), model, **self.size, dtype=dtype
        )
        mp, batch = mixed_precision(dtype=dtype), self.batch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

        def step() -> float:
            with mp.autocast():
                loss = model(**batch, use_cache=False).loss
            mp.backward(loss)
            mp.step(optimizer)
            optimizer.zero_grad()
            return loss.item()

        return step, plan

    def arrange_eight_bit_adam(self, model: Any) -> tuple[Callable[[], float], Budget]:
        from recipes_lib.precision.eight_bit_adam import eight_bit_adamw, estimate_eight_bit_adam

        plan = estimate_eight_bit_adam(budget_of(model, **self.size), model)
        return self.plain(model, eight_bit_adamw(model, lr=LR)), plan

    def arrange_optimizer_offload(self, model: Any) -> tuple[Callable[[], float], Budget]:
        from recipes_lib.memory.optimizer_offload import (
            estimate_optimizer_offload,
            offload_optimizer,
        )

        plan = estimate_optimizer_offload(budget_of(model, **self.size), model)
        return self.plain(model, offload_optimizer(model, lr=LR)), plan

    def arrange_optimizer_in_backward(self, model: Any) -> tuple[Callable[[], float], Budget]:
        from recipes_lib.memory.optimizer_in_backward import (
            apply_optimizer_in_backward,
            estimate_optimizer_in_backward,
        )

        plan = estimate_optimizer_in_backward(budget_of(model, **self.size), model)
        return self.plain(model, apply_optimizer_in_backward(model, lr=LR, fused=True)), plan

    def arrange_chunked_cross_entropy(self, model: Any) -> tuple[Callable[[], float], Budget]:
        from recipes_lib.memory.chunked_cross_entropy import (
            apply_chunked_cross_entropy,
            estimate_chunked_cross_entropy,
        )

        targets = self.batch_size * (self.seq_len - self.seq_len // 2)
        plan = estimate_chunked_cross_entropy(
            budget_of(model, **self.size), model, **self.size, targets=targets
        )
        return self.plain(apply_chunked_cross_entropy(model)), plan

    def arrange_tiled_mlp(self, model: Any) -> tuple[Callable[[], float], Budget]:
        from recipes_lib.memory.tiled_mlp import apply_tiled_mlp, estimate_tiled_mlp

        plan = estimate_tiled_mlp(budget_of(model, **self.size), model, **self.size)
        return self.plain(apply_tiled_mlp(model)), plan

    def arrange_nested_checkpointing(self, model: Any) -> tuple[Callable[[], float], Budget]:
        from recipes_lib.memory.nested_checkpointing import (
            apply_nested_checkpointing,
            best_group,
            estimate_nested_checkpointing,
        )

        group = best_group(model.config.num_hidden_layers)
        plan = estimate_nested_checkpointing(
            budget_of(model, **self.size), model, **self.size, group=group
        )
        return self.plain(apply_nested_checkpointing(model, group=group)), plan

    def arrange_lora(self, model: Any) -> tuple[Callable[[], float], Budget]:
        from recipes_lib.fine_tuning.lora import apply_lora, estimate_lora

        plan = estimate_lora(budget_of(model, **self.size), model, rank=16, **self.size)
        return self.plain(apply_lora(model, rank=16)), plan

    def arrange_qlora(self, model: Any) -> tuple[Callable[[], float], Budget]:
        from recipes_lib.fine_tuning.qlora import apply_qlora, estimate_qlora

        plan = estimate_qlora(budget_of(model, **self.size), model, rank=16, **self.size)
        return self.plain(apply_qlora(model, rank=16)), plan

    def run(self, technique: str, *, repeats: int = 2) -> Ladder:
        """Ladder of two rows, the plain step and the technique. Raises ValueError for an unknown name."""
        if technique not in techniques():
            raise ValueError(
                f"no arrangement for {technique!r}; choose one of {', '.join(techniques())}"
            )
        ladder = Ladder(f"bench_{technique}")
        for name in ("baseline", technique):
            model = self.fresh()
            step, plan = getattr(self, f"arrange_{name}")(model)
            del model
            tokens = self.batch_size * self.seq_len
            measured = measure(step, tokens=tokens, repeats=repeats)
            ladder.add(name, measured, predicted=plan.peak, loss=measured.result)
            del step
            gc.collect()  # the next row must not pay for this one's model
        return ladder


def techniques() -> list[str]:
    """Names that `Bench.run` takes."""
    names = [name.removeprefix("arrange_") for name in dir(Bench) if name.startswith("arrange_")]
    return [name for name in names if name != "baseline"]


@dataclass(frozen=True)
class LossCost:
    """Of output layer and loss, forward and backward: seconds, bytes beside the inputs, relative error of the value.

    On a CPU, PyTorch's own fused loss is one operator, whose inside is not seen: its `peak_bytes` is None.
    """

    seconds: float
    peak_bytes: int | None
    error: float

    def __str__(self) -> str:
        size = "not seen" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:,.0f} MiB"
        return f"{self.seconds:8.3f} s {size:>12}   value off by {self.error:.0e}"


def compare_losses(
    *,
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
    chunk_size: int | None = None,
    rounds: int = 3,
) -> dict[str, LossCost]:
    """Cross-entropy over all logits, our chunks, and the libraries that are here: PyTorch's (from 2.13 on), Liger's.

    Random hidden states [tokens, hidden] and weights [vocab, hidden]; the error is against fp64.
    """
    from recipes_lib.memory.chunked_cross_entropy import chunked_cross_entropy

    F, device = torch.nn.functional, machine().device
    h, w = (
        torch.randn(n, hidden, device=device, dtype=dtype).div_(hidden**0.25)
        for n in (tokens, vocab)
    )
    y = torch.randint(vocab, (tokens,), device=device)
    parts = zip(h.split(256), y.split(256))  # fp64 logits of all tokens are gigabytes
    exact = (
        sum(F.cross_entropy(a.double() @ w.double().T, b, reduction="sum").item() for a, b in parts)
        / tokens
    )
    h, w = h.requires_grad_(), w.requires_grad_()
    ways = {"plain": lambda: F.cross_entropy((h @ w.T).float(), y)}
    ways["ours"] = lambda: chunked_cross_entropy(h, w, y, chunk_size=chunk_size)
    if hasattr(F, "linear_cross_entropy"):  # without options it makes all logits
        default, rows = (
            torch.nn.LinearCrossEntropyOptions(**o)
            for o in ({}, {"chunking_method": None, "batch_chunk_size": 256})
        )
        ways["torch"] = lambda: F.linear_cross_entropy(h, w, y, options=default)
        ways["torch, 256 rows"] = lambda: F.linear_cross_entropy(h, w, y, options=rows)
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        ways["Liger"] = lambda: LigerFusedLinearCrossEntropyFunction.apply(h, w, y)[0]
    values, peaks = {}, {}
    for name, way in ways.items():
        h.grad = w.grad = None
        with PeakMemory() as memory:
            before = memory.current
            loss = way()
            loss.backward()
        seen = device == "cuda" or not name.startswith("torch")
        values[name], peaks[name] = loss.item(), memory.peak - before if seen else None
    h.grad = w.grad = None
    steps = {name: lambda way=way: torch.autograd.grad(way(), (h, w)) for name, way in ways.items()}
    seconds = in_turns(steps, rounds=rounds)
    return {
        name: LossCost(min(seconds[name]), peaks[name], abs(values[name] / exact - 1))
        for name in ways
    }
