"""8-bit Adam: the two averages of AdamW in one byte per element each.

Problem    AdamW keeps two fp32 averages per parameter: 8 bytes, twice the fp32 weights themselves.
Idea       Store each average as an 8-bit code and one fp32 scale per block of 256 elements:

               m[i] = scale[i // 256] * table[code[i]]      scale = largest |m| of the block

           A block confines the damage of an outlier to 256 elements. The table is spaced finely near
           zero and coarsely near one, because the averages span many orders of magnitude. A step
           decodes a block, does the usual AdamW update in fp32 and encodes it again.
Saves      6 of 8 bytes per parameter: 2 x (1 + 4/256) = 2.03 stay. Tensors under 4,096 elements and
           embeddings keep their 32 bits: few or sparse gradients make their averages hard to encode.
Costs      The update is close to AdamW's, not equal. On a CPU the step takes much longer than
           fused AdamW's and decodes one tensor at a time into fp32: 20 bytes per
           element of the largest, inside an operator, so no account of tensors sees them. With bf16
           weights there is no fp32 copy: small updates round away, as in plain bf16 AdamW.
Use when   Full fine-tuning, where the states are the largest term of the budget.
Not when   With LoRA, whose states are small; on a CPU that has the memory. `paged=True` helps only
           where long batches spill over a GPU's memory: it moves states to host memory on demand.
In production   `TrainingArguments(optim="adamw_8bit")`, or `"paged_adamw_8bit"`: this same optimizer, 32
           bits for embeddings included; `optim="adamw_torch_8bit"` is torchao's.
Source     "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861; bitsandbytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from recipes_lib.core.budget import Budget
from recipes_lib.core.machine import require

BLOCK = 256  # elements that share one scale
SMALLEST = 4096  # elements: below this a tensor keeps 32-bit states


def eight_bit_adamw(
    model_or_params: torch.nn.Module | Iterable[Any],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    paged: bool = False,
    embedding_bits: int = 32,
    library: str = "bitsandbytes",
) -> torch.optim.Optimizer:
    """Make an AdamW whose states take 8 bits; use it like any other optimizer.

    Args:
        model_or_params: a model (its trainable parameters), or parameters or groups of them. Embeddings
            are known only from a model; a group may say `optim_bits` itself, 8 (the default) or 32.
        paged: keep the states in memory that moves between GPU and host on demand.
        embedding_bits: 32 or 8, for the embedding and for an output layer tied to it.
        library: "bitsandbytes", or "torchao", which is PyTorch code that torch.compile fuses: the first step takes
            long, and it can neither page nor keep the embedding in 32 bits.
    Raises ValueError for no trainable parameter, for other bits, for what torchao cannot do, and for `paged` on a
    CPU, where bitsandbytes would only warn and page nothing; ImportError without the library.
    """
    if embedding_bits not in (8, 32):
        raise ValueError(f"embedding_bits={embedding_bits}: states have 8 or 32 bits")
    if library not in ("bitsandbytes", "torchao"):
        raise ValueError(f"library={library!r}: choose 'bitsandbytes' or 'torchao'")
    if library == "torchao":
        if paged or embedding_bits != 8:
            raise ValueError(
                "torchao does not page and stores every state in 8 bits: paged=False, embedding_bits=8"
            )
        module = isinstance(model_or_params, torch.nn.Module)
        params = (
            [p for p in model_or_params.parameters() if p.requires_grad]
            if module
            else model_or_params
        )
        return _torchao_class()(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    if isinstance(model_or_params, torch.nn.Module):
        params = _groups(model_or_params, embedding_bits)
    else:
        params = list(model_or_params)
    optimizer = _optimizer_class()(
        params,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        min_8bit_size=SMALLEST,
        is_paged=paged,
    )
    if paged and any(p.device.type == "cpu" for g in optimizer.param_groups for p in g["params"]):
        raise ValueError("paged=True moves states between GPU and host: on a CPU pass paged=False")
    return optimizer


def state_bytes(model: Any, *, embedding_bits: int = 32) -> int:
    """Bytes of the states once they exist: 2 codes and 2 / 256 fp32 scales per element, or 8 bytes."""
    total = 2 * 256 * 4  # the two code tables, one value per code, which all parameters share
    for group in _groups(model, embedding_bits):
        for n in (p.numel() for p in group["params"]):
            full = n < SMALLEST or group["optim_bits"] == 32
            total += 8 * n if full else 2 * n + 8 * -(-n // BLOCK)
    return total


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all states that `optimizer` holds now, each storage once; torchao's are tensors made of tensors."""

    def parts(value: Any) -> Iterator[torch.Tensor]:
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from parts(getattr(value, name))
        elif isinstance(value, torch.Tensor):
            yield value

    tensors = [
        t for state in optimizer.state.values() for value in state.values() for t in parts(value)
    ]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def estimate_eight_bit_adam(budget: Budget, model: Any, *, embedding_bits: int = 32) -> Budget:
    """The states shrink, nothing else changes."""
    return budget.change(states=state_bytes(model, embedding_bits=embedding_bits))


def _groups(model: torch.nn.Module, embedding_bits: int) -> list[dict[str, Any]]:
    """Trainable parameters, those of the embeddings apart. A tied output layer is the same parameter."""
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter: set requires_grad before this call")
    groups = [
        {"params": [p for p in trainable if p not in tables], "optim_bits": 8},
        {"params": [p for p in trainable if p in tables], "optim_bits": embedding_bits},
    ]
    return [group for group in groups if group["params"]]


def _torchao_class() -> type[torch.optim.Optimizer]:
    class AdamW8bit(require("torchao.optim").AdamW8bit):
        """Runs operator by operator, slowly, where torch.compile cannot: on a CPU without a C++ compiler, and under a
        mode that looks at every operator, as `PeakMemory` does on a CPU."""

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            on_cpu = any(
                p.device.type == "cpu" for group in self.param_groups for p in group["params"]
            )
            compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
            eager = (on_cpu and not compiler) or _get_current_dispatch_mode() is not None
            stance = torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()
            with stance, warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", UserWarning
                )  # of torch.compile's cache, about torchao's tensors
                return super().step(closure)

    return AdamW8bit


def _optimizer_class() -> type[torch.optim.Optimizer]:
    class AdamW8bitByGroup(require("bitsandbytes").optim.AdamW8bit):
        """Reads `optim_bits` from the parameter group.

        The library's own way, `GlobalOptimManager`, is one table per process keyed by position: the
        embedding of one optimizer makes the first parameter of the next one 32-bit, silently.
        """

        def __init__(self, params: list[Any], **kwargs: Any):
            super().__init__(params, **kwargs)
            bits = {group.setdefault("optim_bits", 8) for group in self.param_groups}
            if not bits <= {8, 32}:
                raise ValueError(f"optim_bits={bits}: states have 8 or 32 bits")

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            config = super().get_config(gindex, pindex, group)
            return config | {"optim_bits": group["optim_bits"]}

    return AdamW8bitByGroup
