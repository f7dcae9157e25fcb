"""What one rank of tensor parallelism keeps, what of it is whole, and how many bytes it sends.

Legend: T tokens of a rank, D hidden, L layers, V vocabulary, N ranks; `size` is the bytes of one
element.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from recipes_lib.core.model.causal_lm import decoder_blocks, norms_of, trunk
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import head_of, normalising_bytes
from recipes_lib.parallel.tensor_parallel import require_divisible, require_layers

READERS = 2  # per block: attention and the feed-forward layers each read [T, D] as a whole


@estimate(Order.SHARDING)
def estimate_tensor_parallel(
    budget: Budget,
    model: Any,
    shape: Shape,
    *,
    ranks: int,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
) -> Budget:
    """The budget of one of `ranks` ranks. `model` is the whole one, as it was before it was cut.

    All ranks have the same rows, so `shape.ranks` counts the groups of ranks with rows of their
    own. Activations fall by N but for what stays whole: what cut layers read, and without sequence
    parallelism all that norms save.
    """
    require_layers(model)
    require_divisible(model, ranks=ranks)
    tokens = shape.tokens
    checkpointed = any(done.order is Order.CHECKPOINTS for done in budget.applied)
    whole = tokens * _whole_activations(
        model, sequence_parallel=sequence_parallel, checkpointed=checkpointed
    )
    in_a_block = tokens * _whole_in_a_block(model, sequence_parallel=sequence_parallel)

    def cut(size: int, staying: int) -> int:
        """The bytes of one rank when `staying` of `size` bytes are whole on each."""
        staying = min(staying, size)
        return staying + (size - staying) // ranks

    small = _whole_parameter_bytes(model)
    buffers = sum(tensor_bytes(buffer) for buffer in model.buffers())
    plan = budget.change(
        weights=cut(budget.weights, small + buffers),
        gradients=cut(budget.gradients, small),
        states=cut(budget.states, 2 * small),
        carried=cut(budget.carried, small),
        activations=cut(budget.activations, whole),
        one_block=cut(budget.one_block, in_a_block),
        block_gradients=cut(budget.block_gradients, tokens * _stream_bytes(model)),
        last_gradients=budget.last_gradients // ranks,
        embedding_gradient=budget.embedding_gradient // ranks,
        loss=budget.loss // ranks if loss_parallel else budget.loss,
    )
    if not checkpointed:
        return plan
    # The moment in a block was larger than the loss by the activations: both are taken apart.
    return plan.with_moment_in_a_block(
        as_backward_begins=tokens
        * _checkpoint_bytes(model, ranks=ranks, sequence_parallel=sequence_parallel),
        in_a_block=cut(budget.activations + budget.after_activations, whole),
    )


def predicted_sent_bytes(
    model: Any,
    shape: Shape,
    *,
    ranks: int,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
) -> int:
    """Bytes that one rank sends in the forward and backward of one micro-batch.

    The stream [T, D] is exchanged at 2 L + 1 places, twice in forward and twice in backward with
    sequence parallelism (a reduce-scatter and an all-gather, each (N-1)/N of it), and once each
    without (an all-reduce, 2 (N-1)/N). So both send the same. The gradients of norms follow, and
    three numbers per token for the loss, or all logits without loss parallelism.

    `model` is the whole one, before it is cut.
    """
    tokens = shape.tokens
    blocks = decoder_blocks(model)
    places = READERS * len(blocks) + 1  # the first is behind the embedding
    bytes_in_rings = 4 * places * tokens * _stream_bytes(model)
    of_heads = [norm for block in blocks for norm in norms_of(block.self_attn)]
    for norm in _whole_norms(model):
        # A norm of the stream has a part of the gradient only where the tokens are cut.
        if sequence_parallel or norm in of_heads:
            bytes_in_rings += sum(2 * tensor_bytes(weight) for weight in norm.parameters())
    if loss_parallel:
        bytes_in_rings += 2 * 3 * 4 * tokens
    else:
        bytes_in_rings += tokens * head_of(model).shape[0] * model.dtype.itemsize
    return bytes_in_rings * (ranks - 1) // ranks


def _stream_bytes(model: Any) -> int:
    """Bytes per token of the residual stream: D x size."""
    return model.config.hidden_size * model.dtype.itemsize


def _whole_norms(model: Any) -> list[nn.Module]:
    """All norms: those of the blocks, those of heads inside of them, and the last one."""
    norms = norms_of(trunk(model))[-1:]
    for block in decoder_blocks(model):
        norms += norms_of(block) + norms_of(block.self_attn)
    return norms


def _whole_parameter_bytes(model: Any) -> int:
    """Bytes of the parameters that each rank has whole: those of the norms, and biases after sums.

    A layer that is cut by its input adds its bias once, after the sum.
    """
    modules = _whole_norms(model)
    whole = sum(tensor_bytes(p) for module in modules for p in module.parameters())
    for block in decoder_blocks(model):
        for layer in (block.self_attn.o_proj, block.mlp.down_proj):
            if layer.bias is not None:
                whole += tensor_bytes(layer.bias)
    return whole


def _whole_in_a_block(model: Any, *, sequence_parallel: bool) -> int:
    """Bytes per token that a block saves and that no rank shares: what its cut layers read.

    Without sequence parallelism also what its norms save, since each rank computes them whole.
    """
    whole = READERS * _stream_bytes(model)
    if not sequence_parallel:
        norms = norms_of(decoder_blocks(model)[0])
        whole += len(norms) * _norm_bytes(model, norms[0])
    return whole


def _whole_activations(model: Any, *, sequence_parallel: bool, checkpointed: bool) -> int:
    """The same for the whole model: its blocks, the last norm, and what the output layer reads.

    With checkpoints the worst moment is in a block, where the gradient that has arrived is whole,
    too. Each other block keeps its input, which is whole without sequence parallelism.
    """
    blocks = decoder_blocks(model)
    in_a_block = _whole_in_a_block(model, sequence_parallel=sequence_parallel)
    if checkpointed:
        inputs = 0
        if not sequence_parallel:
            inputs = len(blocks) * _stream_bytes(model)
        return inputs + in_a_block + _stream_bytes(model)
    whole = len(blocks) * in_a_block + _stream_bytes(model)
    if not sequence_parallel:
        whole += _norm_bytes(model, norms_of(blocks[0])[0])
    return whole


def _checkpoint_bytes(model: Any, *, ranks: int, sequence_parallel: bool) -> int:
    """Bytes per token of one rank as backward begins, when each block has kept its input alone.

    The last norm and the input of the output layer are there as well.
    """
    blocks = decoder_blocks(model)
    kept = len(blocks) * _stream_bytes(model) + _norm_bytes(model, norms_of(blocks[0])[0])
    if sequence_parallel:
        kept //= ranks
    return kept + _stream_bytes(model)


def _norm_bytes(model: Any, norm: nn.Module) -> int:
    """What a norm saves per token, without its output."""
    return model.config.hidden_size * normalising_bytes(norm, model.config, model.dtype.itemsize)
