"""Tensor parallelism: every layer is cut into parts, and each rank holds one part of each.

Problem    One layer with its activations does not fit a card, or one token has to be fast. To cut
           the batch brings nothing: each rank would still hold and read all weights.
Idea       Cut the first matrix of a pair by its output features and the second one by its input
           features. Then nothing has to be exchanged between them:

               rank 0    x ->  gate, up  [F/2, D]  ->  silu  ->  down [D, F/2]  -> part 0
               rank 1    x ->  gate, up  [F/2, D]  ->  silu  ->  down [D, F/2]  -> part 1
                                                                   y = part 0 + part 1

           Attention is cut likewise by heads. The sum is one all-reduce for each pair. Sequence
           parallelism takes it apart: a reduce-scatter leaves each rank the sum for its part of
           the tokens, where norms and residuals go on, and an all-gather joins the tokens before
           the next pair. Loss parallelism never joins the logits: each rank has a part of the
           vocabulary, and the ranks exchange three numbers per token.
Saves      1/N of weights, gradients, states and logits for N ranks. With sequence parallelism also
           of all activations, but for what the cut layers read: two [T, D] per block stay whole.
Costs      Four exchanges of [T, D] per block and step, on the way of every token, that nothing
           hides: N is at most the number of cards that a fast link joins. Matrix products get
           smaller. All ranks read the same rows.
Use when   One layer is too large for a card, or a batch too small to share; inside of one machine.
Not when   The model fits: fully_sharded exchanges weights, which can be hidden behind computing.
           Together with it: tensor parallelism first, on the dimension of the mesh with the fast
           link, and fully_sharded after it on the other one. Adapters and quantized weights.
In production   `parallelize_module(model, mesh, {"layers.0.mlp.up_proj": ColwiseParallel(), …})`,
           as torchtitan does; transformers `from_pretrained(…, tp_plan="auto")`; Megatron-LM
           `--tensor-model-parallel-size 8 --sequence-parallel`; vLLM `tensor_parallel_size`.
Source     Shoeybi et al., "Megatron-LM" (arXiv 1909.08053); Korthikanti et al., "Reducing
           Activation Recomputation in Large Transformer Models" (arXiv 2205.05198).

Shapes: T tokens, D hidden, F feed-forward, V vocabulary, N ranks.

loss  the loss of logits that are cut by the vocabulary
styles  a table of tokens that is cut, and norms that are whole
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from recipes_lib.core.measure import dry
from recipes_lib.core.model.bytes_of_tensors import tensor_bytes
from recipes_lib.core.model.causal_lm import decoder_blocks, norms_of, require_causal_lm, trunk
from recipes_lib.core.ranks import world_size
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.meshes import one_axis
from recipes_lib.parallel._predicted_bytes import STATES, Kept, kept_whole
from recipes_lib.parallel.tensor_parallel.loss import cut_causal_lm_loss
from recipes_lib.parallel.tensor_parallel.styles import CutTable, WholeWeights

BY_OUTPUT = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
BY_OUTPUT += ["mlp.gate_proj", "mlp.up_proj"]
BY_INPUT = ["self_attn.o_proj", "mlp.down_proj"]
READERS = 2  # per block: attention and the feed-forward layers each read [T, D] as a whole

# --- the idea: what a learner can copy ------------------------------------------------------------


def cut_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, ranks: int) -> Tensor:
    """x [T, D], gate and up [F, D], down [D, F] -> [T, D], as `ranks` ranks compute it in turn."""
    parts = []
    for rank in range(ranks):
        my_gate = gate.chunk(ranks, dim=0)[rank]  # [F/N, D]: some features of the middle
        my_up = up.chunk(ranks, dim=0)[rank]  # [F/N, D]
        my_down = down.chunk(ranks, dim=1)[rank]  # [D, F/N]: reads those features alone
        middle = nn.functional.silu(x @ my_gate.T) * (x @ my_up.T)  # [T, F/N]
        parts.append(middle @ my_down.T)  # [T, D]: one of N parts of a sum
    return torch.stack(parts).sum(dim=0)  # what the all-reduce does


# --- the technique --------------------------------------------------------------------------------


def apply_tensor_parallel(model: Any, *, mesh: DeviceMesh | None = None) -> Any:
    """Cut all layers of a Llama-like `model` over the ranks of `mesh`, in place; returns `model`.

    All ranks call this, and the weights of the first rank count. Then all give the model the same
    rows, and `model(input_ids=…, labels=…).loss.backward()` is that of the whole model on each of
    them. Parameters and gradients are DTensors: `.full_tensor()` joins the parts, and
    `core.ranks.gradient_norm.clip_gradients` clips them by the norm of the whole. So are logits, a
    part of the vocabulary on each rank: give labels also to evaluate, and to generate, load the
    saved weights into one process.

    Args:
        mesh: of one dimension, such as `mesh_of(data=2, tensor=4)["tensor"]`; by default all ranks.
            A vocabulary that they do not divide leaves the last rank fewer tokens.
    """
    mesh = one_axis(mesh, such_as="tensor")
    if mesh.size() == world_size():
        agree(model=model)
    require_causal_lm(model)
    require_layers(model)
    require_divisible(model, ranks=mesh.size())
    plan = tensor_parallel_plan(model)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head.weight is embedding.weight
    parallelize_module(model, mesh, plan)
    if tied:
        # PyTorch has cut one parameter twice, and each copy would learn its own half.
        head.weight = embedding.weight
    model.loss_function = cut_causal_lm_loss
    _check_rows_once(model, mesh)
    return model


def tensor_parallel_plan(model: Any) -> dict[str, ParallelStyle]:
    """How each layer is cut: the name of a module -> its style. `print` it to read it.

    Between the layers there is the residual stream, [B, S, D], of which each rank has some tokens.
    It is a DTensor whose shape is that of all tokens, and so masks and positions are those of all.
    """
    stream = Shard(1)  # by tokens
    names = {module: name for name, module in model.named_modules()}
    by_output = ColwiseParallel()
    by_input = RowwiseParallel(output_layouts=stream, use_local_output=False)
    norm = WholeWeights(inputs=stream, local_outputs=False)
    norm_of_heads = WholeWeights(inputs=Shard(2), local_outputs=True)  # [B, S, heads / N, E]

    plan: dict[str, ParallelStyle] = {names[model.get_input_embeddings()]: CutTable(outputs=stream)}
    for block in decoder_blocks(model):
        for each in norms_of(block):
            plan[names[each]] = norm
        # One all-gather for all layers that read the same.
        plan[names[block.self_attn]] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": stream},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan[names[block.mlp]] = PrepareModuleInput(
            input_layouts=stream, desired_input_layouts=Replicate()
        )
        for each in BY_OUTPUT:
            plan[names[block.get_submodule(each)]] = by_output
        for each in BY_INPUT:
            plan[names[block.get_submodule(each)]] = by_input
        for each in norms_of(block.self_attn):
            plan[names[each]] = norm_of_heads
    plan[names[norms_of(trunk(model))[-1]]] = norm

    by_vocabulary = {"output_layouts": Shard(-1), "use_local_output": False}
    output = names[model.get_output_embeddings()]
    plan[output] = ColwiseParallel(input_layouts=stream, **by_vocabulary)
    return plan


# --- what would silently train something else, or does not divide ---------------------------------


def _check_rows_once(model: Any, mesh: DeviceMesh) -> None:
    """At the first forward of cut layers, see whether all ranks got the same rows."""

    def check_same_rows(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Raise ValueError on every rank of cut layers if the rows differ."""
        handle.remove()
        ids = options.get("input_ids", inputs[0] if inputs else None)
        if ids is None or dry():
            return
        of_ranks: list[Any] = [None] * mesh.size()
        distributed.all_gather_object(of_ranks, ids.tolist(), group=mesh.get_group())
        if any(rows != of_ranks[0] for rows in of_ranks):
            raise ValueError(
                "the ranks of one tensor-parallel group got different rows: all of them compute "
                "parts of the same layers, so give each the same input_ids; a sampler counts "
                "groups, not ranks"
            )

    handle = model.register_forward_pre_hook(check_same_rows, with_kwargs=True)


def require_layers(model: Any) -> None:
    """Raise ValueError unless the layers that the plan cuts are there, plain and whole."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    for block in decoder_blocks(model):
        for name in BY_OUTPUT + BY_INPUT:
            try:
                layers.append(block.get_submodule(name))
            except AttributeError:
                raise ValueError(
                    f"{type(model).__name__} has no {name}: tensor parallelism knows decoders with "
                    f"the layers of Llama (Llama, Mistral, Qwen, Gemma); for others use "
                    f"transformers' tp_plan='auto'"
                ) from None
    for layer in layers:
        # Gemma's embedding has a class of its own, which multiplies by a scale.
        plain = type(layer) in (nn.Linear, nn.Embedding) or hasattr(layer, "embed_scale")
        if not plain or isinstance(layer.weight, DTensor):
            raise ValueError(
                f"there is a {type(layer).__name__}: only plain layers can be cut, without "
                f"adapters, not quantized, and not cut or sharded already"
            )


def require_divisible(model: Any, *, ranks: int) -> None:
    """Raise ValueError unless the ranks divide the heads and features of layers that are cut."""
    config = model.config
    counts = {
        "heads": config.num_attention_heads,
        "heads of keys and values": config.num_key_value_heads,
        "features of the feed-forward layers": config.intermediate_size,
    }
    for name, count in counts.items():
        if count % ranks:
            raise ValueError(
                f"{ranks} ranks do not divide {count} {name}: give a mesh whose size divides "
                f"{math.gcd(*counts.values())}"
            )


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_sent_bytes(model: Any, *, rows: int, tokens: int, ranks: int) -> int:
    """Bytes that a rank with cut layers sends in forward and backward of one micro-batch.

    The stream [T, D] is exchanged at 2 L + 1 places, twice in forward and twice in backward: a
    reduce-scatter and an all-gather, each (N-1)/N of it. The gradients of norms follow, and three
    numbers per token for the loss.

    `model` is the whole one, before it is cut.
    """
    tokens = rows * tokens
    places = READERS * len(decoder_blocks(model)) + 1  # the first is behind the embedding
    of_token = model.config.hidden_size * model.dtype.itemsize  # in the residual stream
    bytes_in_rings = 4 * places * tokens * of_token
    for norm in _whole_norms(model):
        bytes_in_rings += sum(2 * tensor_bytes(weight) for weight in norm.parameters())
    bytes_in_rings += 2 * 3 * 4 * tokens
    return bytes_in_rings * (ranks - 1) // ranks


def _whole_norms(model: Any) -> list[nn.Module]:
    """All norms, which stay whole: those of blocks, those of heads inside, and the last one."""
    norms = norms_of(trunk(model))[-1:]
    for block in decoder_blocks(model):
        norms += norms_of(block) + norms_of(block.self_attn)
    return norms


def predicted_rank_bytes(model: Any, *, ranks: int) -> Kept:
    """Under tensor parallelism: a part of each matrix, and small weights and buffers whole."""
    whole = kept_whole(model)
    small = _whole_parameter_bytes(model)
    buffers = sum(tensor_bytes(buffer) for buffer in model.buffers())
    staying = Kept(small + buffers, small, STATES * small)
    parts = []
    for size, stays in zip(whole, staying, strict=True):
        stays = min(stays, size)  # of a frozen norm there is no gradient
        parts.append(stays + (size - stays) // ranks)
    return Kept(*parts)


def _whole_parameter_bytes(model: Any) -> int:
    """Bytes of norms, and of the biases of layers that are cut by their input.

    Such a layer adds its bias once, after the sum.
    """
    modules = _whole_norms(model)
    whole = sum(tensor_bytes(p) for module in modules for p in module.parameters())
    for block in decoder_blocks(model):
        for layer in (block.self_attn.o_proj, block.mlp.down_proj):
            if layer.bias is not None:
                whole += tensor_bytes(layer.bias)
    return whole
