"""The arithmetic of a plain training step: what each part of a model saves, before any recipe.

Legend: B rows, S sequence, T = B*S tokens, D hidden, F feed-forward, H heads, Q = H*head_dim,
KV = KV heads*head_dim, L layers, V vocabulary; `size` is the bytes of one element.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model.causal_lm import (
    decoder_blocks,
    final_softcap,
    is_layer_norm,
    leaf_names,
    norms_of,
    projection_widths,
)
from recipes_lib.core.model.sizes import tensor_bytes, weight_bytes
from recipes_lib.core.predict.block_bytes import DryBlocks
from recipes_lib.core.predict.budget import Budget, Shape, require_adapters
from recipes_lib.core.predict.closed_formula import FAMILIES, why_no_formula
from recipes_lib.core.predict.dry_step import dry_step

# --- the budget of the step -----------------------------------------------------------------------


def budget_of(model: Any, shape: Shape) -> Budget:
    """Budget of one plain AdamW step on all rows of `shape` in one pass, for `model` as it is now.

    Frozen parameters cost neither gradients nor states; quantized ones count as they are stored.
    Where the formula below does not hold for all blocks of the model, the terms are those of a dry
    step, and the budget says so (`Budget.source`). Raises ValueError if that cannot run either.
    """
    whole = shape.whole()
    reason = why_no_formula(model, seq=shape.seq)
    if reason is not None:
        return dry_budget(model, whole, reason=reason)
    gradients = trainable_bytes(model)
    return Budget(
        weights=weight_bytes(model),
        states=2 * gradients,
        gradients=gradients,
        carried=0,
        activations=activation_bytes(model, whole),
        loss=loss_bytes(model, whole.tokens, head_trains=head_of(model).requires_grad),
        one_block=whole.tokens * block_bytes(model, seq=shape.seq),
        block_gradients=whole.tokens * block_gradient_bytes(model, seq=shape.seq),
        last_gradients=_last_gradient_bytes(model),
        embedding_gradient=embedding_copies(model),
        shape=whole,
    )


def dry_budget(model: Any, shape: Shape, *, reason: str, **how: Any) -> Budget:
    """The budget of one plain AdamW step on `shape`, of which a dry step has counted the bytes.

    Args:
        reason: why no formula holds, as the end of "because …".
        how: `autocast`, `prepare` and `key` of `core.dry_step.dry_step`. Weights, gradients and
            states are those of `model` as it is, whatever `prepare` does.
    Raises ValueError if the step cannot run on tensors without data.
    """
    step = dry_step(model, rows=shape.rows, length=shape.seq, **how)
    gradients = trainable_bytes(model)
    inside = [block.at_once - block.saved for block in step.blocks]
    return Budget(
        weights=weight_bytes(model),
        states=2 * gradients,
        gradients=gradients,
        carried=0,
        activations=step.activations,
        loss=step.loss,
        one_block=max(block.saved for block in step.blocks),
        block_gradients=max(0, *inside),
        last_gradients=_last_gradient_bytes(model),
        embedding_gradient=max(0, step.end - gradients),
        shape=shape,
        dry=DryBlocks(
            reason=reason,
            blocks=step.blocks,
            behind=step.behind,
            head=step.head,
            waiting=step.waiting,
        ),
    )


def with_activations_of(budget: Budget, other: Budget) -> Budget:
    """`budget` with all that forward makes in `other`: activations, loss, and the blocks."""
    return budget.change(
        activations=other.activations,
        loss=other.loss,
        one_block=other.one_block,
        block_gradients=other.block_gradients,
        dry=other.dry,
    )


def trainable_bytes(model: Any) -> int:
    """Bytes of the parameters that train, and so of their gradients."""
    return sum(tensor_bytes(p) for p in model.parameters() if p.requires_grad)


def head_of(model: Any) -> torch.Tensor:
    """The weight of the output layer [V, D]."""
    return model.get_output_embeddings().weight


def head_trains(budget: Budget, model: Any) -> bool:
    """Whether the output layer will train, as far as the recipes in `budget` have decided."""
    return head_of(model).requires_grad and not budget.base_frozen


@contextlib.contextmanager
def all_frozen(model: Any) -> Iterator[None]:
    """Nothing trains in this context: for a second budget, of the base under adapters."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _last_gradient_bytes(model: Any) -> int:
    """Gradients that do not exist yet when backward enters the first block."""
    first_block = trainable_bytes(decoder_blocks(model)[0])
    embedding = model.get_input_embeddings().weight
    if embedding is head_of(model) or not embedding.requires_grad:
        return first_block
    return first_block + tensor_bytes(embedding)


def embedding_copies(model: Any) -> int:
    """Bytes of the copies of a tied embedding while its gradient is summed.

    The output layer's part waits until the embedding's arrives, and their sum is a new tensor.
    """
    embedding = model.get_input_embeddings().weight
    if embedding is head_of(model) and embedding.requires_grad:
        return 2 * tensor_bytes(embedding)
    return 0


def free_gradients(budget: Budget, model: Any) -> Budget:
    """The budget when each gradient goes as soon as it is complete.

    Only that of a tied embedding waits, for its second half.
    """
    require_adapters(budget, model)
    trainable = [tensor_bytes(p) for p in model.parameters() if p.requires_grad]
    largest = max(trainable, default=0)
    last_gradients = largest
    copies = embedding_copies(model)
    if copies:
        # The largest gradient is that of the embedding, and its first half exists already.
        last_gradients = 0
    dry = budget.dry
    if dry is not None:
        dry = replace(dry, gradients_stay=False)
    activations = budget.activations
    if budget.activations_if_gradients_go is not None:
        activations = budget.activations_if_gradients_go
    return budget.change(
        activations=activations,
        gradients=largest,
        carried=0,
        last_gradients=last_gradients,
        embedding_gradient=copies,
        dry=dry,
    )


# --- the loss -------------------------------------------------------------------------------------


def loss_bytes(model: Any, tokens: int, *, head_trains: bool) -> int:
    """Peak of the output layer: log-softmax and two gradients of the logits, all fp32 [T, V].

    Where the logits are capped (Gemma 2), there is one more, in the dtype of the model.
    If the layer trains and the tokens are few, the peak comes later: one [T, V] is left, beside the
    gradient of the layer's weight [V, D].
    """
    elements = tokens * model.config.get_text_config().vocab_size
    logits = 4 * elements
    capped = 0
    if final_softcap(model) is not None:
        capped = model.dtype.itemsize * elements  # tanh saves what it returns
    if not head_trains:
        return 3 * logits + capped
    return max(3 * logits + capped, logits + tensor_bytes(head_of(model)))


# --- the blocks -----------------------------------------------------------------------------------


def saved_outside_the_blocks(budget: Budget, model: Any) -> int:
    """Bytes of the activations in `budget` that no block saves.

    They are those of the norm behind the blocks, and what recipes have added for the whole model.
    """
    if budget.dry is not None:
        return budget.activations - budget.dry.saved
    return budget.activations - len(decoder_blocks(model)) * budget.one_block


def activation_bytes(model: Any, shape: Shape) -> int:
    """Bytes that a plain forward saves for backward: T x (L blocks + the final norm)."""
    blocks = len(decoder_blocks(model)) * block_bytes(model, seq=shape.seq)
    return shape.tokens * (blocks + final_norm_bytes(model))


def block_bytes(model: Any, *, seq: int) -> int:
    """Bytes that one block saves per token, read off the operators of Hugging Face's code.

    RMSNorm saves its input in fp32, the normalised input (only if its weight trains) and, where
    linear layers read it, its output. LayerNorm saves its input as it is, and its output likewise.
    Attention saves Q, K, V and its output. A gated MLP saves both projections, the activated gate
    and the product. Raises ValueError for a block that is built otherwise.
    """
    _require_formula(model, seq=seq)
    _, _, feed_forward = projection_widths(model.config)
    in_mlp = model.dtype.itemsize * feed_forward * saved_mlp_tensors(model)
    return bytes_beside_mlp(model, seq=seq) + in_mlp


def bytes_beside_mlp(model: Any, *, seq: int) -> int:
    """Bytes that the norms and the attention of one block save per token."""
    block = decoder_blocks(model)[0]
    config = model.config
    size = model.dtype.itemsize
    q, kv, _ = projection_widths(config)

    norms = norms_of(block)
    normalising = normalising_bytes(norms[0], config, size)
    # Norms 3 and 4 (Gemma) feed the residual stream, and no linear layer saves their output.
    in_norms = config.hidden_size * (len(norms) * normalising + 2 * size)

    in_attention = size * (2 * q + 2 * kv)
    if repeats_kv(model, dtype=model.dtype):
        in_attention = size * 4 * q
    in_attention += saved_score_bytes(model) * config.num_attention_heads * seq
    if "q_norm" in leaf_names(block):
        in_attention += normalising * (q + kv)
    return in_norms + in_attention


def block_gradient_bytes(model: Any, *, seq: int) -> int:
    """Bytes per token of the gradients that backward holds inside a block at its worst moment.

    That moment is in the MLP or in attention. In the MLP, gate and up are multiplied: there are
    gradients of both and of the block's output. In attention there are those of the scores and the
    softmax, and what the MLP had saved is free again.
    """
    config = model.config
    size = model.dtype.itemsize
    _, _, feed_forward = projection_widths(config)
    in_mlp = size * (config.hidden_size + 2 * feed_forward)
    in_attention = score_gradient_bytes(model) * config.num_attention_heads * seq
    freed_by_mlp = 4 * size * feed_forward
    return max(in_mlp, in_attention - freed_by_mlp)


def saved_mlp_tensors(model: Any) -> int:
    """How many [T, F] one MLP saves: four if it is gated, five in GPT-2.

    GPT-2's gelu_new is made of elementary operators, each of which saves its input.
    """
    gated = "gate_proj" in leaf_names(decoder_blocks(model)[0])
    return 4 if gated else 5


def _require_formula(model: Any, *, seq: int) -> None:
    reason = why_no_formula(model, seq=seq)
    if reason is not None:
        raise ValueError(
            f"no memory formula for the blocks of {type(model).__name__}, because {reason}: it "
            f"covers plain decoders ({', '.join(FAMILIES)}); budget_of(model, shape) takes a dry "
            f"step for all others"
        )


# --- attention scores -----------------------------------------------------------------------------


def saved_score_bytes(model: Any) -> int:
    """Bytes that are saved per attention score: of the softmax, and of a soft cap.

    0 where no [S, S] is made.
    """
    if not makes_scores(model):
        return 0
    size = model.dtype.itemsize
    saved = size
    if _softmax_in_fp32(model):
        saved += 4
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        saved += size
    return saved


def score_gradient_bytes(model: Any) -> int:
    """Bytes per attention score of the gradients that backward makes of them.

    0 where no [S, S] is made.
    """
    if not makes_scores(model):
        return 0
    size = model.dtype.itemsize
    if _softmax_in_fp32(model):
        # Of the softmax and of the scores, both in fp32. The softmax's 16-bit copy is free by then.
        return 2 * 4 - size
    return 2 * size


def makes_scores(model: Any) -> bool:
    """Whether attention makes [heads, S, S] tensors.

    Eager attention does. So does SDPA on CUDA in fp32, or before Ampere, where no fast kernel takes
    grouped KV heads.
    """
    return makes_scores_in(model, dtype=model.dtype)


def makes_scores_in(model: Any, *, dtype: torch.dtype) -> bool:
    """The same if attention computes in `dtype`, as under autocast."""
    kind = model.config._attn_implementation
    if kind == "eager":
        return True
    q, kv, _ = projection_widths(model.config)
    return kind == "sdpa" and kv < q and without_grouped_heads(model.device, dtype)


def repeats_kv(model: Any, *, dtype: torch.dtype) -> bool:
    """Whether attention in `dtype` saves K and V repeated to as many heads as Q has.

    What makes scores does. So does `apply_flash_attention` where no fast kernel takes grouped KV
    heads, to have one at all.
    """
    if makes_scores_in(model, dtype=dtype):
        return True
    ours = model.config._attn_implementation in ("fused", "fused_cudnn")
    q, kv, _ = projection_widths(model.config)
    return ours and kv < q and without_grouped_heads(model.device, dtype)


def without_grouped_heads(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether, on this CUDA device, SDPA's fast kernels want as many heads of K and V as of Q.

    Only the flash kernel takes fewer: it needs 16 bits and Ampere or newer. A model without weights
    stands for one on this machine.
    """
    if device.type == "meta":
        device = torch.device(machine().device)
    if device.type != "cuda":
        return False
    return dtype.itemsize == 4 or torch.cuda.get_device_capability(device) < (8, 0)


def _softmax_in_fp32(model: Any) -> bool:
    """Whether a 16-bit model keeps an fp32 softmax beside its 16-bit copy: all do but GPT-2."""
    return model.dtype.itemsize == 2 and model.config.model_type != "gpt2"


# --- norms ----------------------------------------------------------------------------------------


def final_norm_bytes(model: Any, *, base_frozen: bool = False) -> int:
    """Bytes per token that the norm behind the last block saves.

    Its output is included if a trained output layer reads it. `base_frozen` is that of a budget:
    the model's own weights will not train, whatever they do now.
    """
    size = model.dtype.itemsize
    norm = norms_of(decoder_blocks(model)[0])[0]
    saved = normalising_bytes(norm, model.config, size, base_frozen=base_frozen)
    if head_of(model).requires_grad and not base_frozen:
        saved += size
    return model.config.hidden_size * saved


def normalising_bytes(
    norm: torch.nn.Module, config: Any, size: int, *, base_frozen: bool = False
) -> int:
    """Bytes per element that a norm saves, without its output.

    `base_frozen` is that of a budget: the norm's weight will not train, whatever it does now.
    """
    if is_layer_norm(norm):
        return size
    input_in_fp32 = 4
    trained = any(p.requires_grad for p in norm.parameters())
    if base_frozen or not trained:
        return input_in_fp32
    if config.model_type.startswith("gemma"):
        # Gemma multiplies by the weight in fp32.
        return input_in_fp32 + 4
    return input_in_fp32 + size


# --- linear layers --------------------------------------------------------------------------------


def is_linear(module: torch.nn.Module) -> bool:
    """Whether this is a linear layer: `nn.Linear`, or GPT-2's Conv1D, which multiplies as well."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, torch.nn.Linear | Conv1D)


def features(layer: torch.nn.Module) -> tuple[int, int]:
    """Input and output features of a linear layer. Conv1D stores its weight as [in, out]."""
    if isinstance(layer, torch.nn.Linear):
        return layer.in_features, layer.out_features
    inputs, outputs = layer.weight.shape
    return inputs, outputs
