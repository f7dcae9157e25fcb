"""LoRA: freeze the model and train a low-rank correction of each linear layer.

Problem    Gradients and AdamW states take three times the bytes of the weights, for a change of the
           weights that is small and of low rank.
Idea       y = W x + (alpha / r) * B A x        W [out, in] frozen,  A [r, in],  B [out, r]

               x --+------ W ------+--> y       B starts at zero, so the adapted model *is* the base
                   '-- A -- r -- B-'            model until the first step.
Saves      Gradients and states: from 12 bytes per weight to 12 bytes per adapter parameter, of
           which a layer has r * (in + out). A fine-tuned model is a file of megabytes. Frozen norms
           also save less for backward.
Costs      Activations stay, and so does backward, but for the gradients of frozen weights. Each
           adapter keeps its own copy of its input where the dtypes differ (peft trains fp32
           adapters, also on a bf16 base) or where dropout > 0, which is why dropout is 0 here.
Use when   The weights fit and gradients and states do not, or when one base serves many tasks.
Not when   The weights alone do not fit (QLoRA), or there is much new to learn (full fine-tuning).
In production   `peft.get_peft_model(model, LoraConfig(target_modules="all-linear"))`, which this
           calls; its "all-linear" also takes routers of a mixture of experts.
           `model.save_pretrained(folder)` writes the adapters,
           `PeftModel.from_pretrained(base, folder)` puts them on a fresh base.
Source     Hu et al., "LoRA" (arXiv 2106.09685); all linear layers: Dettmers et al. (arXiv
           2305.14314).

Shapes: r rank, B batch, S sequence.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import torch

from recipes_lib.core.checks import check_number, check_several, check_whole
from recipes_lib.core.measure.machine import require
from recipes_lib.core.model.causal_lm import (
    ROUTERS,
    decoder_blocks,
    projection_widths,
    require_causal_lm,
)
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import (
    all_frozen,
    budget_of,
    dry_budget,
    features,
    is_linear,
    with_activations_of,
)

# Layers of a block that read the same tensor, which is saved once for all of them. The attention's
# output layer is not listed: what it reads is saved by the attention itself.
READERS = (
    ("q_proj", "k_proj", "v_proj", "c_attn"),
    ("gate_proj", "up_proj", "c_fc"),
    ("down_proj", "mlp.c_proj"),
)


# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_lora(
    x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alpha: float
) -> torch.Tensor:
    """One adapted layer: `weight` [out, in] is frozen, `a` [r, in] and `b` [out, r] train."""
    rank = a.shape[0]
    frozen = x @ weight.detach().T  # [B, S, out]
    narrow = x @ a.T  # [B, S, r]
    correction = narrow @ b.T  # [B, S, out]
    return frozen + alpha / rank * correction


def plain_merge(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alpha: float
) -> torch.Tensor:
    """The one weight [out, in] that computes what the adapted layer computes."""
    rank = a.shape[0]
    return weight + alpha / rank * (b @ a)


# --- the technique --------------------------------------------------------------------------------


def apply_lora(
    model: Any,
    *,
    rank: int = 16,
    alpha: float = 32,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    **peft_options: Any,
) -> Any:
    """Freeze `model` and put a trainable adapter on each target; returns the `PeftModel` around it.

    Checkpoint its blocks with `use_reentrant=False`: the first block's input needs no gradient.

    Args:
        rank: r, of each adapter.
        alpha: the correction is scaled by alpha / r.
        dropout: of the adapters' inputs.
        target_modules: "all-linear" (every linear layer of the blocks but routers), "attention"
            (those of the attention: what is left in a mixture of experts), or names.
        peft_options: more fields of peft's `LoraConfig`, such as use_dora, or use_rslora (scale by
            alpha / sqrt(r)).
    Raises ValueError for rank < 1, alpha <= 0, dropout outside [0, 1), a name that matches no
    linear layer of the blocks, layers that the model runs without calling them (Mamba), layers that
    share a weight with another one (Zamba), and a model that already has adapters.
    """
    require_causal_lm(model)
    config = lora_config(
        model,
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        target_modules=target_modules,
        **peft_options,
    )
    return add_adapters(model, config)


def merge_lora(model: Any) -> Any:
    """Fold the adapters into the weights: a plain model again, every weight trainable.

    Raises ValueError for a model without adapters, for 4-bit weights, and if a merged weight is not
    finite.
    """
    if not isinstance(model, require("peft").PeftModel):
        raise ValueError(
            f"{type(model).__name__} has no adapters to merge: "
            f"give the model that apply_lora returned"
        )
    if any(getattr(parameter, "quant_state", None) for parameter in model.parameters()):
        raise ValueError(
            "peft would round the merged weights to 4 bits again: "
            "use merge_qlora, which dequantizes them"
        )
    return model.merge_and_unload(safe_merge=True).requires_grad_(True)


# --- Hugging Face glue and guards -----------------------------------------------------------------


def lora_config(
    model: Any, *, rank: int, alpha: float, dropout: float, target_modules: Any, **more: Any
) -> Any:
    """Check the arguments of `apply_lora` against `model` and make peft's `LoraConfig` of them."""
    check_whole(rank=rank)
    check_number(above=0, alpha=alpha)
    check_number(least=0, below=1, dropout=dropout)
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


def add_adapters(model: Any, config: Any) -> Any:
    """`peft.get_peft_model`, without a warning about peft itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return require("peft").get_peft_model(model, config)


def target_linears(
    model: Any, *, target_modules: str | Sequence[str] = "all-linear"
) -> dict[str, torch.nn.Module]:
    """The linear layers of the blocks that `target_modules` selects, by their full names.

    Raises ValueError for a model with adapters, and for targets that are not there.
    """
    if not isinstance(target_modules, str):
        check_several(target_modules=target_modules)
    if hasattr(model, "peft_config"):
        raise ValueError(
            "the model already has adapters: give the base model, or merge them first (merge_lora)"
        )
    blocks = decoder_blocks(model)
    prefix = next(name for name, module in model.named_modules() if module is blocks)
    linears = {}
    for name, module in blocks.named_modules():
        # A router picks experts: a small change of it sends tokens elsewhere.
        is_router = not ROUTERS.isdisjoint(name.split("."))
        if is_linear(module) and not is_router:
            linears[f"{prefix}.{name}"] = module
    chosen = linears
    if target_modules == "all-linear":
        _require_all_weights(model, prefix, blocks, linears)
    elif target_modules == "attention":
        chosen = {name: layer for name, layer in linears.items() if _is_attention(name)}
        _require_some(model, chosen)
    else:
        chosen = _by_name(linears, target_modules)
    _refuse_read_past(model, chosen, linears)
    _refuse_shared(model, chosen, linears)
    return chosen


def _leaf(name: str) -> str:
    """The last part of a full name, as `target_modules` takes it."""
    return name.rpartition(".")[2]


def _is_attention(name: str) -> bool:
    """Whether a layer of this full name belongs to an attention: "h.0.attn.c_proj" does."""
    return any("attn" in part or "attention" in part for part in name.split("."))


def _require_some(model: Any, chosen: dict[str, torch.nn.Module]) -> None:
    if not chosen:
        raise ValueError(
            f"target_modules='attention': {type(model).__name__} has no linear layer in an "
            f"attention; give names, or 'all-linear'"
        )


def _refuse_read_past(
    model: Any, chosen: dict[str, torch.nn.Module], linears: dict[str, torch.nn.Module]
) -> None:
    """Raise ValueError for layers whose weight another module reads or changes by itself.

    Mixers of state space models hand it to a kernel, Gemma 3n clamps it in each step of training.
    The layer is not called then. An adapter on it would not count, and a weight in four bits would
    be read as a matrix.
    """
    read_past = [name for name in chosen if _is_read_past(model, name)]
    if read_past:
        names = sorted({_leaf(name) for name in read_past})
        left = sorted({_leaf(name) for name in linears if not _is_read_past(model, name)})
        raise ValueError(
            f"{type(model).__name__} runs {', '.join(names)} without calling these layers, so "
            f"neither an adapter nor 4 bits would reach them: use LoRA on others, "
            f"target_modules={left}"
        )


def _is_read_past(model: Any, name: str) -> bool:
    """Whether the code around the layer `name` takes its weight, beyond asking for its dtype."""
    owner_name, _, leaf = name.rpartition(".")
    owner = type(model.get_submodule(owner_name))
    if owner.__module__.startswith("torch."):  # a container, which calls its layers
        return False
    asks = r"\.(dtype|device|shape)\b"
    return re.search(rf"self\.{leaf}\.weight\b(?!{asks})", _source(owner)) is not None


@functools.cache
def _source(kind: type) -> str:
    """The code of a class; nothing for one that was written at a prompt."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _refuse_shared(
    model: Any, chosen: dict[str, torch.nn.Module], linears: dict[str, torch.nn.Module]
) -> None:
    """Raise ValueError for layers that have one weight together.

    Each would get an adapter of its own, and training would pull them apart. Merged into the one
    weight, every adapter would count for all of these layers.
    """
    names_of: dict[int, list[str]] = {}
    for name, layer in linears.items():
        names_of.setdefault(id(layer.weight), []).append(name)
    shared = {name for names in names_of.values() if len(names) > 1 for name in names}
    first = next((name for name in chosen if name in shared), None)
    if first is not None:
        second = next(name for name in names_of[id(chosen[first].weight)] if name != first)
        bad = {name for name in linears if name in shared or _is_read_past(model, name)}
        left = sorted({_leaf(name) for name in linears} - {_leaf(name) for name in bad})
        raise ValueError(
            f"{first} and {second} of {type(model).__name__} share one weight, and an adapter on "
            f"each would pull them apart: use LoRA on others, target_modules={left}"
        )


def _require_all_weights(
    model: Any, prefix: str, blocks: torch.nn.ModuleList, linears: dict[str, torch.nn.Module]
) -> None:
    """Raise ValueError if "all-linear" would leave out most of the model without a word.

    A mixture of experts keeps the weights of all its experts in one tensor, and no layer holds it.
    """
    fused = []
    for name, _ in blocks.named_parameters():
        full_name = f"{prefix}.{name}"
        owner, _, _ = full_name.rpartition(".")
        if ".experts." in name and owner not in linears:
            fused.append(full_name)
    if fused or not linears:
        examples = ", ".join(fused[:2]) or "there is none in its blocks"
        raise ValueError(
            f"'all-linear' does not reach the weights of {type(model).__name__}, which are no "
            f"linear layers ({examples}): for LoRA give target_modules='attention', or names; "
            f"QLoRA cannot store them in 4 bits"
        )


def _by_name(
    linears: dict[str, torch.nn.Module], target_modules: str | Sequence[str]
) -> dict[str, torch.nn.Module]:
    """Those of `linears` whose names end with one of `target_modules`.

    Raises ValueError if there is none for one of them: a misspelt name must not pass.
    """
    endings = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    matches = [_ending_with(ending, linears) for ending in endings]
    if not matches or not all(matches):
        known = sorted({name.rsplit(".", 1)[-1] for name in linears})
        raise ValueError(
            f"target_modules={target_modules!r}: each name must match a linear layer of the "
            f"blocks; give 'all-linear', 'attention' or some of {known}"
        )
    chosen = set().union(*matches)
    return {name: layer for name, layer in linears.items() if name in chosen}


def _ending_with(ending: str, names: Iterable[str]) -> set[str]:
    # With the dot in front, "proj" does not match "q_proj".
    return {name for name in names if f".{name}".endswith(f".{ending}")}


# --- the arithmetic -------------------------------------------------------------------------------


def lora_parameters(
    model: Any, *, rank: int = 16, target_modules: str | Sequence[str] = "all-linear"
) -> int:
    """Trainable parameters that `apply_lora` will add: r * (in + out), summed over the targets."""
    check_whole(rank=rank)
    targets = target_linears(model, target_modules=target_modules)
    return rank * sum(sum(features(layer)) for layer in targets.values())


@estimate(Order.ADAPTERS)
def estimate_lora(
    budget: Budget,
    model: Any,
    shape: Shape,
    *,
    rank: int = 16,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
) -> Budget:
    """The budget after `apply_lora` on `model`, which is the base as it is now."""
    check_number(least=0, below=1, dropout=dropout)
    trainable = 4 * lora_parameters(model, rank=rank, target_modules=target_modules)  # fp32
    blocks = len(decoder_blocks(model))
    if budget.dry is not None:
        options = {"rank": rank, "dropout": dropout, "target_modules": target_modules}
        return _estimate_by_dry_step(budget, model, shape, trainable=trainable, options=options)

    # What the frozen base saves, and what the adapters add to it.
    micro = shape.micro()
    plain = budget_of(model, micro)
    with all_frozen(model):
        frozen = budget_of(model, micro)
    targets = target_linears(model, target_modules=target_modules)
    adapters = shape.tokens * _change_per_token(model, rank, targets, dropout=dropout)

    carried = 0
    last_gradients = trainable // blocks
    if shape.micro_batches > 1:
        # Carried from one micro-batch to the next: in the first block none has still to be made.
        carried = trainable
        last_gradients = 0
    return budget.change(
        weights=budget.weights + trainable,
        gradients=trainable,
        states=2 * trainable,
        carried=carried,
        activations=budget.activations - plain.activations + frozen.activations + adapters,
        loss=min(budget.loss, frozen.loss),
        one_block=budget.one_block - plain.one_block + frozen.one_block + adapters // blocks,
        block_gradients=budget.block_gradients + shape.tokens * _cast_gradient_bytes(model),
        last_gradients=last_gradients,
        embedding_gradient=0,
        base_frozen=True,
    )


def _estimate_by_dry_step(
    budget: Budget, model: Any, shape: Shape, *, trainable: int, options: dict[str, Any]
) -> Budget:
    """The same where no formula holds for the base: a dry step of a copy that has the adapters."""

    def adapted(copy: Any) -> Any:
        # peft converts new adapters in place, which tensors without data do not allow. Made where
        # the base is, in fp32, they are what its conversions end with, so there is nothing to swap.
        layers = require("peft").tuners.tuners_utils.BaseTunerLayer
        stays = mock.patch.object(layers, "_move_adapter_to_device_of_base_layer")
        nothing_to_swap = mock.patch("torch.utils.swap_tensors")
        made_at = copy.get_input_embeddings().weight.device
        with warnings.catch_warnings(), stays, nothing_to_swap, made_at:
            warnings.simplefilter("ignore")  # peft's words about a copy that nobody sees
            return apply_lora(copy, **options)

    plain = dry_budget(
        model,
        shape.micro(),
        reason=budget.dry.reason,
        prepare=adapted,
        key=("lora", str(options)),
    )
    carried = 0
    if shape.micro_batches > 1:
        carried = trainable
    return with_activations_of(budget, plain).change(
        weights=budget.weights + trainable,
        gradients=trainable,
        states=2 * trainable,
        carried=carried,
        last_gradients=0,
        embedding_gradient=0,
        base_frozen=True,
    )


def _cast_gradient_bytes(model: Any) -> int:
    """On a 16-bit base, backward also holds the fp32 gradients of an adapter's output and input."""
    if model.dtype == torch.float32:
        return 0
    _, _, feed_forward = projection_widths(model.config)
    return 4 * (model.config.hidden_size + feed_forward)


def _change_per_token(
    model: Any, rank: int, targets: dict[str, torch.nn.Module], *, dropout: float
) -> int:
    """Bytes per token that the adapters save for backward, less what frozen layers leave out.

    An example: in an fp32 model with D = 512, q_proj, k_proj and v_proj read the same tensor of 512
    numbers. The frozen base in `estimate_lora` still counts it once, with 4 x 512 = 2048 bytes. On
    q_proj alone stands an adapter of rank 16. Added are always 4 x 16 = 64 bytes, for A x. Then:

        dropout = 0     the adapter reads the tensor itself, which stays saved       +64
        dropout > 0     the adapter saves its own (CPU: 8 bytes per number), and
                        nobody needs the shared one any more        +64 + 8 x 512 - 2048
        no adapter on any of the three: nobody needs the shared one                -2048
    """
    own_input = _own_input_bytes(model, dropout)
    change = 0
    for layer in targets.values():
        inputs, _ = features(layer)
        # A x, which is r numbers in fp32, and what the adapter keeps of its input.
        change += 4 * rank + own_input * inputs

    adapted = set(targets.values())
    for block in decoder_blocks(model):
        for readers in READERS:
            layers = [layer for name, layer in block.named_modules() if name.endswith(readers)]
            if not layers:
                continue
            # A frozen layer does not need its input. An adapter that makes no copy does.
            if own_input or adapted.isdisjoint(layers):
                inputs, _ = features(layers[0])
                change -= model.dtype.itemsize * inputs
    return change


def _own_input_bytes(model: Any, dropout: float) -> int:
    """Bytes per element of the input that each adapter keeps for itself."""
    if dropout:
        # What was dropped in fp32, and the mask: of bytes on CUDA, of fp32 on a CPU.
        return 5 if model.device.type == "cuda" else 8
    if model.dtype != torch.float32:
        # peft casts the input to the adapter's fp32.
        return 4
    return 0
