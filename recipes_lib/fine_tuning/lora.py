"""LoRA: freeze the model and train a low-rank correction of each linear layer.

Problem    Gradients and AdamW states take three times the bytes of the weights, for a change of the
           weights that is small and of low rank.
Idea       y = W x + (alpha / r) * B A x        W [out, in] frozen,  A [r, in],  B [out, r]

               x --+------ W ------+--> y       B starts at zero, so the adapted model *is* the base
                   '-- A -- r -- B-'            model until the first step.
Saves      Gradients and states: from 12 bytes per weight to 12 bytes per adapter parameter, of
           which a layer has r * (in + out). A fine-tuned model is a file of megabytes.
Costs      Activations stay, and so does backward, but for the gradients of frozen weights. Where
           the dtypes differ (peft trains fp32 adapters, also on a bf16 base) or dropout > 0, each
           adapter keeps its own copy of its input.
Use when   The weights fit and gradients and states do not, or one base serves many tasks.
Not when   The weights alone do not fit (QLoRA), or there is much new to learn (full fine-tuning).
In production   `peft.get_peft_model(model, LoraConfig(target_modules="all-linear"))`, which this
           calls; its "all-linear" also takes routers of a mixture of experts.
Source     Hu et al., "LoRA" (arXiv 2106.09685); all linear layers: Dettmers et al. (2305.14314).

Shapes: r rank, B batch, S sequence.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.causal_lm import (
    ROUTERS,
    decoder_blocks,
)
from recipes_lib.core.model.linears import features, is_linear, read_by_the_model
from recipes_lib.core.model.probe import proves
from recipes_lib.core.model.vocabulary import trainable_rows

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


# --- the technique --------------------------------------------------------------------------------


@proves("grows")
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
    """
    from peft import LoraConfig, get_peft_model

    targets = target_linears(model, target_modules=target_modules)
    # Rows of tokens that were added to the model: nobody has trained them yet.
    rows = trainable_rows(model)
    if rows:
        peft_options = {"trainable_token_indices": rows} | peft_options
    transposed = not any(isinstance(layer, torch.nn.Linear) for layer in targets.values())
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(targets),
        fan_in_fan_out=transposed,  # GPT-2 stores its weights as [in, out]
        task_type="CAUSAL_LM",
        **peft_options,
    )
    with without_peft_warnings():
        return get_peft_model(model, config)


@contextlib.contextmanager
def without_peft_warnings() -> Iterator[None]:
    """Without the warnings about what peft itself calls by an old name of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def merge_lora(model: Any) -> Any:
    """Fold the adapters into the weights: a plain model again, every weight trainable."""
    if any(getattr(parameter, "quant_state", None) for parameter in model.parameters()):
        raise ValueError(
            "peft would round the merged weights to 4 bits again: "
            "use merge_qlora, which dequantizes them"
        )
    return model.merge_and_unload(safe_merge=True).requires_grad_(True)


# --- which layers ---------------------------------------------------------------------------------


def target_linears(
    model: Any, *, target_modules: str | Sequence[str] = "all-linear"
) -> dict[str, torch.nn.Module]:
    """The linear layers of the blocks that `target_modules` selects, by their full names."""
    if hasattr(model, "peft_config"):
        raise ValueError("the model has adapters already: merge them first (merge_lora)")
    linears = linears_of_blocks(model)
    if target_modules == "all-linear":
        _require_all_weights(model, linears)
        chosen = list(linears)
    elif target_modules == "attention":
        chosen = [name for name in linears if _is_attention(name)]
    else:
        chosen = _by_name(linears, target_modules)
    _refuse_unfit(model, chosen, linears)
    return {name: linears[name] for name in chosen}


def linears_of_blocks(model: Any) -> dict[str, torch.nn.Module]:
    """What LoRA can adapt: all linear layers of the blocks but routers, by their full names."""
    inside = set(decoder_blocks(model).modules())
    linears = {}
    for name, module in model.named_modules():
        if module in inside and is_linear(module) and ROUTERS.isdisjoint(name.split(".")):
            linears[name] = module
    return linears


def _is_attention(name: str) -> bool:
    """Whether the layer of this full name belongs to the attention, for LoRA's targets.

    Not its gate (AFMoE), whose name peft takes for a part of an expert, also when it loads a file.
    """
    return ("attn" in name or "attention" in name) and not name.endswith(".gate_proj")


def _require_all_weights(model: Any, linears: dict[str, torch.nn.Module]) -> None:
    """LoRA does not reach experts: a mixture keeps their weights in one tensor, in no layer."""
    for name, _ in model.named_parameters():
        owner, _, _ = name.rpartition(".")
        if ".experts." in name and owner not in linears:
            raise ValueError(
                f"'all-linear' does not reach the experts, which are no linear layers ({name}): "
                f"for LoRA give target_modules='attention', or names; QLoRA cannot store them"
            )


def _by_name(linears: dict[str, torch.nn.Module], names: str | Sequence[str]) -> list[str]:
    """LoRA's targets: names in `linears` that end with one of `names`; none may be misspelt."""
    endings = [names] if isinstance(names, str) else names
    chosen = set()
    for ending in endings:
        # With the dot in front, "proj" does not match "q_proj".
        matching = {name for name in linears if f".{name}".endswith(f".{ending}")}
        if not matching:
            check_choice(["all-linear", "attention", *_leaves(linears)], target_modules=ending)
        chosen |= matching
    return [name for name in linears if name in chosen]


def _refuse_unfit(model: Any, chosen: Sequence[str], linears: dict[str, torch.nn.Module]) -> None:
    """What LoRA cannot adapt: layers that nobody calls, and layers that share a weight.

    Adapters on both of these would pull them apart, and merged, each would count for both.
    """
    weights = [id(layer.weight) for layer in linears.values()]
    shared = {name for name, layer in linears.items() if weights.count(id(layer.weight)) > 1}
    unfit = shared | read_by_the_model(model)
    wrong = _leaves([name for name in chosen if name in unfit])
    fit = _leaves([name for name in linears if name not in unfit])
    if not chosen or wrong:
        raise ValueError(
            f"{type(model).__name__} reads {wrong} without a call, or in several places: "
            f"use LoRA on others, target_modules={fit}"
        )


def _leaves(names: Sequence[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


# --- the arithmetic -------------------------------------------------------------------------------


def lora_parameters(
    model: Any, *, rank: int = 16, target_modules: str | Sequence[str] = "all-linear"
) -> int:
    """Trainable parameters that `apply_lora` will add: r * (in + out), summed over the targets."""
    targets = target_linears(model, target_modules=target_modules)
    return rank * sum(sum(features(layer)) for layer in targets.values())
