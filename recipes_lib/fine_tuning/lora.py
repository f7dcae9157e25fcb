"""LoRA: freeze the model and train a low-rank correction of each linear layer.

Problem    Gradients and AdamW states take three times the bytes of the weights, for a change of the
           weights that is small and of low rank.
Idea       y = W x + (alpha / r) * B A x        W [out, in] frozen,  A [r, in],  B [out, r]

               x --+------ W ------+--> y       B starts at zero, so the adapted model *is* the base
                   '-- A -- r -- B-'            model until the first step.
Saves      gradients and states: from 12 bytes per weight to 12 bytes per adapter parameter, of which a
           layer has r * (in + out). A fine-tuned model is a file of megabytes. Frozen norms save less.
Costs      Activations stay, and so does the backward pass through every block: the step is hardly
           faster. Each adapter keeps its own copy of its input where the dtypes differ (peft trains fp32
           adapters, also on a bf16 base) or where dropout > 0, which is why dropout is 0 here.
Use when   The weights fit and gradients and states do not, or when one base serves many tasks. Not when
           the weights alone do not fit (QLoRA), nor to teach much new knowledge (full fine-tuning).
In production   `peft.get_peft_model(model, LoraConfig(target_modules="all-linear"))`, which this calls; its
           "all-linear" also takes routers of a mixture of experts. `model.save_pretrained(folder)` writes
           the adapters, `PeftModel.from_pretrained(base, folder)` puts them on a fresh base.
Source     Hu et al., "LoRA" (arXiv 2106.09685); all linear layers: Dettmers et al. (arXiv 2305.14314).

Shapes: r rank, B batch, S sequence.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.causal_lm import decoder_blocks, projection_widths
from recipes_lib.core.machine import require
from recipes_lib.core.plain_step import budget_of

ROUTERS = {"gate", "router", "shared_expert_gate", "wg"}  # of a mixture of experts
# Layers of a block that read the same tensor, which is saved once for all of them. The attention's output
# layer is not listed: what it reads is saved by the attention itself.
READERS = (
    ("q_proj", "k_proj", "v_proj", "c_attn"),
    ("gate_proj", "up_proj", "c_fc"),
    ("down_proj", "mlp.c_proj"),
)


def apply_lora(
    model: Any,
    *,
    rank: int = 16,
    alpha: float = 32,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    **peft_options: Any,
) -> Any:
    """Freeze `model` and put a trainable adapter on each target; returns the `PeftModel` that wraps it.

    Checkpoint its blocks with `use_reentrant=False`: the first block's input needs no gradient.

    Args:
        rank: r, of each adapter. alpha: the correction is scaled by alpha / r.
        target_modules: "all-linear" (every linear layer of the blocks but routers), or names of layers.
        peft_options: more fields of peft's `LoraConfig`: use_rslora (scale by alpha / sqrt(r)), use_dora.
    Raises ValueError for rank < 1, alpha <= 0, dropout outside [0, 1), a name that matches no linear layer
    of the blocks, and a model that already has adapters.
    """
    options = {
        "rank": rank,
        "alpha": alpha,
        "dropout": dropout,
        "target_modules": target_modules,
    } | peft_options
    return add_adapters(model, lora_config(model, **options))


def add_adapters(model: Any, config: Any) -> Any:
    """`peft.get_peft_model`, without a warning about peft itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return require("peft").get_peft_model(model, config)


def lora_config(
    model: Any, *, rank: int, alpha: float, dropout: float, target_modules: Any, **more: Any
) -> Any:
    """Check the arguments of `apply_lora` against `model` and make peft's `LoraConfig` of them."""
    if rank < 1 or alpha <= 0 or not 0 <= dropout < 1:
        raise ValueError(
            f"rank={rank}, alpha={alpha}, dropout={dropout}: give rank >= 1, alpha > 0, 0 <= dropout < 1"
        )
    targets = target_linears(model, target_modules=target_modules)
    # GPT-2 stores its weights as [in, out].
    transposed = not any(isinstance(layer, torch.nn.Linear) for layer in targets.values())
    return require("peft").LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(targets),
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
        **more,
    )


def merge_lora(model: Any) -> Any:
    """Fold the adapters into the weights: a plain model again, as fast as before, every weight trainable.

    Raises ValueError for a model without adapters, for 4-bit weights, and if a merged weight is not finite.
    """
    if not isinstance(model, require("peft").PeftModel):
        raise ValueError(
            f"{type(model).__name__} has no adapters to merge: give the model that apply_lora returned"
        )
    if any(getattr(parameter, "quant_state", None) for parameter in model.parameters()):
        raise ValueError(
            "peft would round the merged weights to 4 bits again: use merge_qlora, which dequantizes them"
        )
    return model.merge_and_unload(safe_merge=True).requires_grad_(True)


def target_linears(
    model: Any, *, target_modules: str | Sequence[str] = "all-linear"
) -> dict[str, torch.nn.Module]:
    """The linear layers of the blocks that `target_modules` selects, by their full names."""
    from transformers.pytorch_utils import Conv1D

    if hasattr(model, "peft_config"):
        raise ValueError(
            "the model already has adapters: give the base model, or merge them first (merge_lora)"
        )
    blocks = decoder_blocks(model)
    prefix = next(name for name, module in model.named_modules() if module is blocks)
    linears = {
        f"{prefix}.{name}": module
        for name, module in blocks.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and ROUTERS.isdisjoint(name.split("."))
    }
    if target_modules == "all-linear":
        experts = [
            f"{prefix}.{name}" for name, _ in blocks.named_parameters() if ".experts." in name
        ]
        fused = [name for name in experts if name.rpartition(".")[0] not in linears]
        if fused or not linears:
            raise ValueError(
                f"'all-linear' does not reach the weights of {type(model).__name__}, which are no linear layers "
                f"({', '.join(fused[:2]) or 'there is none in its blocks'}): name the target_modules to adapt"
            )
        return linears
    wanted = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    found = {w: [name for name in linears if f".{name}".endswith(f".{w}")] for w in wanted}
    if not wanted or not all(found.values()):
        raise ValueError(
            f"target_modules={target_modules!r}: each name must match a linear layer of the blocks; "
            f"give 'all-linear' or some of {sorted({name.rsplit('.', 1)[-1] for name in linears})}"
        )
    chosen = {name for names in found.values() for name in names}
    return {name: module for name, module in linears.items() if name in chosen}


def lora_parameters(
    model: Any, *, rank: int = 16, target_modules: str | Sequence[str] = "all-linear"
) -> int:
    """Trainable parameters that `apply_lora` will add: the sum of r * (in + out) over the targets."""
    return sum(
        rank * sum(_in_out(layer))
        for layer in target_linears(model, target_modules=target_modules).values()
    )


def estimate_lora(budget: Budget, model: Any, *, rank: int = 16, dropout: float = 0.0, batch_size: int, seq_len: int,
                  target_modules: str | Sequence[str] = "all-linear") -> Budget:  # fmt: skip
    """The budget after `apply_lora` on `model`, the base as it is now. Estimate it before other recipes."""
    targets = target_linears(model, target_modules=target_modules)
    trainable = 4 * lora_parameters(model, rank=rank, target_modules=target_modules)  # fp32
    sizes = {"batch_size": batch_size, "seq_len": seq_len}
    blocks, plain = len(decoder_blocks(model)), budget_of(model, **sizes)
    with _frozen(model):
        alone = budget_of(model, **sizes)
    adapters = batch_size * seq_len * _change_per_token(model, rank, targets, dropout=dropout)
    # On a 16-bit base, backward also holds the fp32 gradients of an adapter's output and input.
    casts = (
        4
        * (model.config.hidden_size + projection_widths(model.config)[2])
        * (model.dtype != torch.float32)
    )
    return budget.change(
        weights=budget.weights + trainable,
        gradients=trainable,
        states=2 * trainable,
        carried=min(budget.carried, trainable),
        activations=budget.activations - plain.activations + alone.activations + adapters,
        loss=min(budget.loss, alone.loss),
        one_block=budget.one_block - plain.one_block + alone.one_block + adapters // blocks,
        block_gradients=budget.block_gradients + batch_size * seq_len * casts,
        last_gradients=trainable // blocks,
        embedding_gradient=0,
    )


def _change_per_token(
    model: Any, rank: int, targets: dict[str, torch.nn.Module], *, dropout: float
) -> int:
    """Bytes per token that the adapters save for backward, less what the frozen layers no longer do."""
    size = model.dtype.itemsize
    copies = (
        model.dtype != torch.float32
    )  # peft casts the input to the adapter's fp32, once for each adapter
    kept = (
        4 * copies if not dropout else 5 if model.device.type == "cuda" else 8
    )  # what was dropped, and its mask
    change = sum(4 * rank + kept * _in_out(layer)[0] for layer in targets.values())
    adapted = set(targets.values())
    for block in decoder_blocks(model):
        for readers in READERS:
            layers = [layer for name, layer in block.named_modules() if name.endswith(readers)]
            if layers and (
                kept or adapted.isdisjoint(layers)
            ):  # a frozen layer does not need its input
                change -= size * _in_out(layers[0])[0]
    return change


def _in_out(layer: torch.nn.Module) -> tuple[int, int]:
    return (
        (layer.in_features, layer.out_features)
        if isinstance(layer, torch.nn.Linear)
        else tuple(layer.weight.shape)
    )


@contextlib.contextmanager
def _frozen(model: Any) -> Iterator[None]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
