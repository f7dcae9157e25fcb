"""The memory of a training step of a mixture of experts: with a loop, grouped, and on many ranks.

    plan = budget_of_mixture(model, shape)                        transformers' loop over experts
    plan = estimate_grouped_experts(plan, model, shape)           grouped products
    plan = estimate_expert_parallel(plan, model, shape)           shape.ranks share the experts

`core.plain_step` has the formula of blocks with one feed-forward layer. A block with experts saves,
for each of the k rows that a token becomes:

    2 D + 4 F    its input sorted by expert, gate and up, the activated gate, the product, and the
                 output of the expert, which waits for the gradient of its share
    D            once more, in the loop: what is added to the sum of the experts

Beside that there are the probabilities of all experts, and whole numbers that say which row is
whose. How many rows an expert gets does not matter on one rank. Where ranks share experts, the
formula takes it that all of them get as many rows.

Legend: T tokens of a rank, D hidden, E experts, k experts per token, F width of an expert, N ranks;
`size` is the bytes of one element.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recipes_lib.architecture.mixture_of_experts import active_per_token, experts_of
from recipes_lib.core.model.causal_lm import decoder_blocks, require_causal_lm
from recipes_lib.core.model.sizes import tensor_bytes, weight_bytes
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import (
    bytes_beside_mlp,
    embedding_copies,
    final_norm_bytes,
    head_of,
    loss_bytes,
    trainable_bytes,
)

INDEX = 8  # bytes of a whole number that says which row is whose
PROBABILITY = 4  # bytes: routers compute in fp32


def budget_of_mixture(model: Any, shape: Shape) -> Budget:
    """Budget of one plain AdamW step on all rows of `shape`, with a loop over the experts.

    The loop is that of transformers, `set_experts_implementation("eager")`. With its own grouped
    product, which is its default, a step takes what `estimate_grouped_experts` says. Raises
    ValueError for a model without experts, and for one whose blocks do not all have some.
    """
    require_causal_lm(model)
    _require_experts_everywhere(model)
    whole = shape.whole()
    blocks = decoder_blocks(model)
    gradients = trainable_bytes(model)
    one_block = bytes_beside_mlp(model, seq=shape.seq) + _saved_in_loop(model)
    embedding = model.get_input_embeddings().weight
    first_weight = experts_of(model)[0].gate_up_proj
    last_gradients = trainable_bytes(blocks[0])
    if embedding is not head_of(model) and embedding.requires_grad:
        last_gradients += tensor_bytes(embedding)
    return Budget(
        weights=weight_bytes(model),
        states=2 * gradients,
        gradients=gradients,
        carried=0,
        activations=whole.tokens * (len(blocks) * one_block + final_norm_bytes(model)),
        loss=loss_bytes(model, whole.tokens, head_trains=head_of(model).requires_grad),
        one_block=whole.tokens * one_block,
        block_gradients=_gradients_in_loop(model, whole.tokens),
        last_gradients=last_gradients,
        # The loop's last gradients of a weight are added to those of its other experts.
        embedding_gradient=max(embedding_copies(model), 2 * _gradient_bytes(first_weight)),
        shape=whole,
    )


@estimate(Order.MLP)
def estimate_grouped_experts(budget: Budget, model: Any, shape: Shape) -> Budget:
    """The budget of `apply_grouped_experts`, and of the grouped product of transformers.

    `budget` is that of `budget_of_mixture`. Raises ValueError for a model without experts.
    """
    hidden, _ = _sizes(model)
    less_per_row = hidden * model.dtype.itemsize - INDEX  # one number more per row, to go back
    less = shape.tokens * active_per_token(model) * less_per_row
    return budget.change(
        activations=budget.activations - len(decoder_blocks(model)) * less,
        one_block=budget.one_block - less,
        block_gradients=_gradients_grouped(model, shape.tokens),
        embedding_gradient=embedding_copies(model),
    )


@estimate(Order.SHARDING)
def estimate_expert_parallel(budget: Budget, model: Any, shape: Shape) -> Budget:
    """The budget of one of `shape.ranks` ranks, each of which has 1/N of the experts.

    `model` is the whole one, as it was before its experts were shared. Activations are those of the
    rank's own rows: as many rows come from other ranks as leave for them. Raises ValueError for a
    model without experts, and if the ranks do not divide them.
    """
    modules = experts_of(model)
    for module in modules:
        experts = len(module.gate_up_proj)
        if experts % shape.ranks:
            raise ValueError(
                f"{shape.ranks} ranks do not divide {experts} experts: give a shape whose ranks do"
            )
    weights = sum(_bytes_of(module, trained_only=False) for module in modules)
    trained = sum(_bytes_of(module, trained_only=True) for module in modules)
    in_first_block = _bytes_of(modules[0], trained_only=True)
    elsewhere = 1 - 1 / shape.ranks
    carried = budget.carried
    if carried > 0:
        carried -= round(trained * elsewhere)
    return budget.change(
        weights=budget.weights - round(weights * elsewhere),
        gradients=budget.gradients - round(trained * elsewhere),
        states=budget.states - round(2 * trained * elsewhere),
        carried=carried,
        last_gradients=budget.last_gradients - round(in_first_block * elsewhere),
    )


# --- pieces ---------------------------------------------------------------------------------------


def _saved_in_loop(model: Any) -> int:
    """Bytes per token that router and experts of one block save, in a loop over the experts."""
    hidden, width = _sizes(model)
    active = active_per_token(model)
    experts = len(experts_of(model)[0].gate_up_proj)
    per_row = model.dtype.itemsize * (3 * hidden + 4 * width)
    # The row and the expert of a row, each twice; and the share, before and after it is sorted.
    per_row += 3 * INDEX + 2 * PROBABILITY
    of_router = PROBABILITY * (experts + 1)  # the probabilities, and the sum of the largest
    return active * per_row + of_router


def _gradients_in_loop(model: Any, tokens: int) -> int:
    """Bytes of the gradients that are alive in the experts of a block, in a loop over them.

    Each expert makes gradients of all experts' weights, with zeros for the others, and they are
    added to what has come so far. So at the second expert there are two of the larger weight, but
    what the first one had saved is free. Beside that there is the gradient of the block's output,
    and what the last norm has saved is free as well.
    """
    hidden, width = _sizes(model)
    experts = experts_of(model)[0]
    size = model.dtype.itemsize
    of_output = tokens * hidden * size
    first = _gradient_bytes(experts.gate_up_proj)
    second = _gradient_bytes(experts.down_proj)
    rows_of_expert = tokens * active_per_token(model) // len(experts.gate_up_proj)
    freed = rows_of_expert * (3 * hidden + 4 * width) * size
    of_weights = second + max(first, 2 * first - freed)
    free = tokens * final_norm_bytes(model)
    return max(of_output + of_weights - free, of_output)


def _gradients_grouped(model: Any, tokens: int) -> int:
    """Bytes of the gradients that are alive in the experts of a block, beside all activations.

    The worst moment is one of two. As the sum over the experts goes back, there are three gradients
    of all rows. Or it is when gate and up are multiplied: two of their width, and the gradient of
    the second weight, while the outputs of the experts are free again. By then, what the last norm
    has saved is free as well.
    """
    hidden, width = _sizes(model)
    active = active_per_token(model)
    size = model.dtype.itemsize
    of_output = tokens * hidden * size
    as_sum = tokens * active * 3 * hidden * size
    second_weight = _gradient_bytes(experts_of(model)[0].down_proj)
    as_product = tokens * active * (2 * width - hidden) * size + second_weight
    free = tokens * final_norm_bytes(model)
    return max(of_output + max(as_sum, as_product) - free, of_output)


def _sizes(model: Any) -> tuple[int, int]:
    """D and F: hidden, and the width of an expert."""
    _, hidden, width = experts_of(model)[0].down_proj.shape
    return hidden, width


def _gradient_bytes(weight: Tensor) -> int:
    if not weight.requires_grad:
        return 0
    return tensor_bytes(weight)


def _bytes_of(module: Any, *, trained_only: bool) -> int:
    total = 0
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad or not trained_only:
            total += tensor_bytes(parameter)
    return total


def _require_experts_everywhere(model: Any) -> None:
    blocks = len(decoder_blocks(model))
    with_experts = len(experts_of(model))
    if with_experts < blocks:
        raise ValueError(
            f"{with_experts} of {blocks} blocks have experts: there is a formula for models with "
            f"experts in all of them; measure this one with PeakMemory"
        )
