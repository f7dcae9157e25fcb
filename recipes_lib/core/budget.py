"""Predict the peak bytes of a training step, before anything runs.

    peak = weights + states + the largest of three moments of backward:

        it begins                carried + activations + loss
        it enters the first block   gradients - last_gradients + one_block + block_gradients
        the last gradient arrives   gradients + embedding_gradient

Each term is plain arithmetic on the model's shape, so that a recipe can say which one it shrinks:

    weights      4 bytes x parameters (2 in bf16, about 0.52 in NF4)
    states       twice the bytes of the trainable parameters: AdamW keeps two averages in their dtype
    gradients    the bytes of the trainable parameters
    carried      gradients that already exist while a micro-batch runs (only with accumulation)
    activations  what the blocks save for backward: grows with batch x sequence
    loss         logits and their gradients: three [batch x sequence, vocabulary] fp32 tensors
    one_block    what one block saves for backward
    block_gradients     gradients of activations that backward makes inside a block
    last_gradients      gradients that the first block, and an embedding of its own, have still to make
    embedding_gradient  copies of the embedding table that are alive as its gradient is summed

Legend: B batch, S sequence, T = B*S tokens, D hidden, F feed-forward, H heads, Q = H*head_dim,
KV = KV heads*head_dim, L layers, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from recipes_lib.core.measure import tensor_bytes, weight_bytes
from recipes_lib.core.model import decoder_blocks


@dataclass(frozen=True)
class Budget:
    """The terms of the equation above, in bytes. `change(term=…)` gives a new budget."""

    weights: int
    states: int
    gradients: int
    carried: int
    activations: int
    loss: int
    one_block: int
    block_gradients: int
    last_gradients: int
    embedding_gradient: int

    @property
    def peak(self) -> int:
        return sum(self.at_peak().values())

    @property
    def after_activations(self) -> int:
        """What joins the activations of all blocks: the loss, or what backward makes in the last block."""
        return max(self.loss, self.block_gradients)

    def at_peak(self) -> dict[str, int]:
        """What the peak consists of, at the moment that is largest; embedding copies count as gradients."""
        moments = (
            (self.carried, self.activations, self.after_activations),
            (self.gradients - self.last_gradients, self.one_block + self.block_gradients, 0),
            (self.gradients + self.embedding_gradient, 0, 0),
        )
        gradients, activations, loss = max(moments, key=sum)
        parts = {"weights": self.weights, "states": self.states, "gradients": gradients}
        return parts | {"activations": activations, "loss": loss}

    def change(self, **terms: int) -> Budget:
        return replace(self, **terms)

    def __str__(self) -> str:
        lines = [f"{name.replace('_', ' '):<19}{size / 2**20:>9,.0f} MiB" for name, size in asdict(self).items()]
        return "\n".join([*lines, f"{'predicted peak':<19}{self.peak / 2**20:>9,.0f} MiB"])


def budget_of(model: Any, *, batch_size: int, seq_len: int) -> Budget:
    """Budget of one plain AdamW step on a [batch_size, seq_len] batch, for `model` as it is now.

    Frozen parameters cost neither gradients nor states; quantized ones count as they are stored.
    Raises ValueError for sizes below 1 and for an architecture without a formula.
    """
    if batch_size < 1 or seq_len < 1:
        raise ValueError(f"batch_size={batch_size}, seq_len={seq_len}: both must be 1 or more")
    sizes = {"batch_size": batch_size, "seq_len": seq_len}
    gradients = sum(tensor_bytes(p) for p in model.parameters() if p.requires_grad)
    last = sum(tensor_bytes(p) for p in decoder_blocks(model)[0].parameters() if p.requires_grad)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    size, hidden, wide = model.dtype.itemsize, model.config.hidden_size, projection_widths(model.config)[2]
    scores = _score_bytes(model)[1] * model.config.num_attention_heads * seq_len
    return Budget(
        weights=weight_bytes(model),
        states=2 * gradients,
        gradients=gradients,
        carried=0,
        activations=activation_bytes(model, **sizes),
        loss=loss_bytes(model, **sizes),
        one_block=batch_size * seq_len * block_bytes(model, seq_len=seq_len),
        # Of the block's output and, as they are multiplied, of gate and up; or, with the MLP's activations freed, of
        # the scores and the softmax.
        block_gradients=batch_size * seq_len * max(size * (hidden + 2 * wide), scores - 4 * size * wide),
        last_gradients=last + tensor_bytes(embedding) * (embedding.requires_grad and head is not embedding),
        embedding_gradient=_embedding_copies(model),
    )


def activation_bytes(model: Any, *, batch_size: int, seq_len: int) -> int:
    """Bytes that the blocks of a plain forward save for backward: T x (L blocks + the final norm)."""
    blocks = len(decoder_blocks(model)) * block_bytes(model, seq_len=seq_len)
    return batch_size * seq_len * (blocks + final_norm_bytes(model))


def block_bytes(model: Any, *, seq_len: int) -> int:
    """Bytes that one block saves per token, read off the operators of the Hugging Face implementation.

    RMSNorm saves its input in fp32, the normalised input (only if its weight trains) and, where linear layers
    read it, its output; LayerNorm the first and the last. Attention saves Q, K, V and its output. A gated MLP
    saves both projections, the activated gate and the product.
    """
    block = decoder_blocks(model)[0]
    names, norms = {name.rsplit(".", 1)[-1] for name, _ in block.named_modules()}, block_norms(block)
    if not norms or not ({"gate_proj", "c_fc"} & names):
        raise ValueError(
            f"no memory formula for the blocks of {type(model).__name__}: it covers decoders with pre-norm and "
            f"a gated or GPT-2 MLP (Llama, Mistral, Qwen, Gemma, GPT-2); measure this one with PeakMemory"
        )
    config, size, hidden = model.config, model.dtype.itemsize, model.config.hidden_size
    q, kv, feed_forward = projection_widths(config)
    inner = _normalising_bytes(norms[0], config, size)
    norm = hidden * (len(norms) * inner + 2 * size)  # norms 3 and 4 (Gemma) feed the residual stream, not a linear
    attention = size * (2 * q + 2 * kv)
    if saved := _score_bytes(model)[0]:  # K and V are repeated to all heads
        attention = size * 4 * q + saved * config.num_attention_heads * seq_len
    # GPT-2's gelu_new is made of elementary operators, each of which saves its input.
    mlp = size * feed_forward * (4 if "gate_proj" in names else 5)
    return norm + attention + inner * (q + kv) * ("q_norm" in names) + mlp


def _score_bytes(model: Any) -> tuple[int, int]:
    """Per attention score, saved and as gradients: of the softmax, which all but GPT-2 take in fp32, and of a soft cap.

    Eager attention makes [heads, S, S]; so does SDPA on CUDA in fp32, or before Ampere, where no kernel takes grouped
    KV heads.
    """
    (q, kv, _), size, family = projection_widths(model.config), model.dtype.itemsize, model.config.model_type
    kind = model.config._attn_implementation
    plain = kind == "sdpa" and kv < q and without_grouped_heads(model.device, model.dtype)
    if not plain and kind != "eager":
        return 0, 0
    in_fp32 = size == 2 and family != "gpt2"
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    return size + 4 * in_fp32 + size * capped, 2 * size + 2 * in_fp32


def without_grouped_heads(device: torch.device, dtype: torch.dtype) -> bool:
    """True on CUDA if none of SDPA's fast kernels takes fewer heads of K and V than of Q: all but flash want equal."""
    return device.type == "cuda" and (dtype.itemsize == 4 or torch.cuda.get_device_capability(device) < (8, 0))


def final_norm_bytes(model: Any) -> int:
    """Bytes per token that the norm behind the last block saves, its output included if a trained layer reads it."""
    size, head = model.dtype.itemsize, model.get_output_embeddings().weight
    inner = _normalising_bytes(block_norms(decoder_blocks(model)[0])[0], model.config, size)
    return model.config.hidden_size * (inner + size * head.requires_grad)


def block_norms(block: torch.nn.Module) -> list[torch.nn.Module]:
    """The norms of the residual stream (not those of Q and K)."""
    return [module for module in block.children() if "Norm" in type(module).__name__]


def projection_widths(config: Any) -> tuple[int, int, int]:
    """Output features of the query, of the key and of the feed-forward projection: Q, KV, F."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    feed_forward = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return heads * head_dim, kv_heads * head_dim, feed_forward or 4 * config.hidden_size


def _normalising_bytes(norm: torch.nn.Module, config: Any, size: int) -> int:
    """Bytes per element that a norm saves, without its output."""
    if isinstance(norm, torch.nn.LayerNorm):
        return size
    trained = any(p.requires_grad for p in norm.parameters())
    return 4 + trained * (4 if config.model_type.startswith("gemma") else size)  # Gemma multiplies in fp32


def loss_bytes(model: Any, *, batch_size: int, seq_len: int) -> int:
    """Peak of the output layer: log-softmax and two gradients of the logits, all fp32 [T, V].

    With a trainable output layer and few tokens, one of them beside the layer's gradient [V, D] is more.
    """
    logits = 4 * batch_size * seq_len * model.config.vocab_size
    head = model.get_output_embeddings().weight
    return max(3 * logits, head.requires_grad * (logits + tensor_bytes(head)))


def split_budget(budget: Budget, model: Any, *, batch_size: int, seq_len: int, micro_batches: int) -> Budget:
    """The same batch in k micro-batches: what grows with it shrinks, gradients are carried from one to the next."""
    if micro_batches < 1 or batch_size % micro_batches:
        raise ValueError(f"micro_batches={micro_batches} must be 1 or more and divide batch_size={batch_size}")
    if micro_batches == 1:
        return budget
    embedding = model.get_input_embeddings().weight
    return budget.change(
        activations=budget.activations // micro_batches,
        loss=loss_bytes(model, batch_size=batch_size // micro_batches, seq_len=seq_len),
        carried=budget.gradients,
        one_block=budget.one_block // micro_batches,
        block_gradients=budget.block_gradients // micro_batches,
        last_gradients=0,
        # The embedding's gradient can no longer become `.grad`: it is added to the one that is there.
        embedding_gradient=_embedding_copies(model) + tensor_bytes(embedding) * embedding.requires_grad,
    )


def checkpoint_budget(budget: Budget, model: Any, *, tokens: int, every: int = 1, kept: int = 0) -> Budget:
    """Every `every`-th block keeps its input and `kept` elements per token; backward makes the rest anew.

    Backward enters the last block when the loss has freed its memory, so the loss, the adapters and the precision
    must be final: estimate what changes them first. `tokens` are those of a micro-batch.
    """
    blocks, whole = len(decoder_blocks(model)), budget.one_block
    kept_bytes = tokens * model.dtype.itemsize * (model.config.hidden_size + kept)
    count = len(range(0, blocks, every))
    stored = count * kept_bytes + (blocks - count) * whole
    at_loss = stored + budget.activations - blocks * whole  # what is saved outside the blocks stays
    head = model.get_output_embeddings().weight
    head_gradient = min(budget.gradients, tensor_bytes(head) * head.requires_grad)
    in_block = stored - kept_bytes + whole + budget.block_gradients + head_gradient
    last_kept = (blocks - 1) % every == 0  # a plain last block is freed before the first is recomputed
    return budget.change(activations=max(at_loss, last_kept * (in_block - budget.after_activations)))


def free_gradients(budget: Budget, model: Any) -> Budget:
    """Each gradient goes as soon as it is complete: only that of a tied embedding waits, for its second half."""
    largest = max((tensor_bytes(p) for p in model.parameters() if p.requires_grad), default=0)
    copies = _embedding_copies(model)
    last = 0 if copies else largest
    return budget.change(gradients=largest, carried=0, last_gradients=last, embedding_gradient=copies)


def _embedding_copies(model: Any) -> int:
    """Tied weights: the output layer's part waits until the embedding's arrives, and their sum is new."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return 2 * tensor_bytes(embedding) if head is embedding and embedding.requires_grad else 0
