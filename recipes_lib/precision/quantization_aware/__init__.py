"""Quantization-aware training: the model trains with the rounding that its file will have.

Problem    Rounded to four bits after training, a model loses quality: nothing in its training has
           asked for weights that lie well on a grid of 16 levels.
Idea       Round in every forward, and let the optimizer move the weights that are not rounded:

               forward     y = q(x) q(W)^T         q: round to the nearest level of the grid
               backward    dW = (dy^T q(x))        as if q were not there (straight through),
                           dx = (dy q(W))          and 0 where a number was cut off at the end
               step        W  = W - lr dW          W is in full precision: small steps add up

           The loss is that of the model on its grid. A weight near the middle of two levels goes to
           the one with the smaller loss, and others make up for what its rounding costs.
Saves      Quality at the same bits. The file and its speed are those of rounding after training.
Costs      Training, with the weights in full precision. A forward rounds each weight once, and
           backward twice. Nothing more is kept: backward rounds again. Around a product there is
           a copy of its weight, and a quarter of one more.
Use when   Rounding a trained model costs quality that a longer run does not win back: 4 bits and
           fewer, small models, one scale for many weights.
Not when   8 bits: rounding costs about nothing (measure with `apply_rounding`). No text like that
           of the model's training can be had. The grid is not known yet: another group size or
           another runtime is another model.
In production   torchao `quantize_(model, QATConfig(Int8DynamicActivationIntxWeightConfig(...),
           step="prepare"))`, and step="convert" behind training; torchtune's
           `qat_distributed`; for convolutions `prepare_qat_pt2e` and ExecuTorch's XNNPACKQuantizer.
Source     Jacob et al., "Quantization and Training of Neural Networks for Efficient
           Integer-Arithmetic-Only Inference", arXiv 1712.05877; the gradient: Bengio et al., arXiv
           1308.3432; of language models: Liu et al., "LLM-QAT", arXiv 2305.17888.

What is exported. An exporter rounds the weights itself. Give it the weights in full precision, by
`remove_quantization_aware`: it finds the grid of training, to the last bit. A model that is rounded
already, from `convert_quantization_aware` or `apply_rounding`, would be rounded a second time, on
another grid (`core.integer_grid` says why), so its layers are marked as quantized. That model is
for measuring quality.

A loss that multiplies with the weight of the output layer itself (chunked cross-entropy,
distillation) goes past the rounding of that layer: train with output_bits=None then, and round the
layer at the end.

Shapes: K inputs and N outputs of a layer, G = K / group groups of a row, T tokens, V vocabulary.

layers  its linear layers, embeddings and convolutions, in training and after
plan  which layers get which grid, and what is refused
rounding  rounding that trains: forward on the grid, gradients straight through
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.data.evaluation import evaluating
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.integer_grid import check_bits
from recipes_lib.core.model.linears import refuse_save_pretrained, require_module
from recipes_lib.core.model.marks import QUANTIZED_BY, mark, unmark
from recipes_lib.core.model.mixing import mix_in, unmix
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import head_of
from recipes_lib.precision.quantization_aware.layers import (
    FIXED,
    LIMITS,
    AwareConv2d,
    aware_class,
    rounded_weight,
)
from recipes_lib.precision.quantization_aware.plan import (
    Grids,
    check_calibration,
    has_convolutions,
    is_causal_lm,
    plan_of,
)

IMAGES_AT_A_TIME = 250  # of a calibration

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_fake_quantize(weight: Tensor, *, bits: int, group: int) -> Tensor:
    """`weight` [N, K] rounded to levels of a grid, with gradients that go straight through."""
    half = 2 ** (bits - 1)
    groups = weight.unflatten(1, (-1, group))  # [N, G, group]
    largest = groups.detach().abs().amax(dim=-1, keepdim=True)
    scale = largest / (half - 0.5)  # 4 bits: the largest weight is 7.5 steps from zero

    # Not divided: the largest weight may be half-way between -8 and -7, and the last bit decides.
    steps = groups * (1 / scale)
    rounding = steps.round() - steps
    steps = steps + rounding.detach()  # the value is rounded, and the gradient sees `steps`
    levels = steps.clamp(-half, half - 1)  # no gradient where this cuts off
    return (levels * scale).flatten(1)


def plain_fake_quantize_tokens(x: Tensor, *, bits: int = 8) -> Tensor:
    """Tokens x [T, K], each on a grid between its smallest and its largest number."""
    low = x.detach().amin(dim=-1, keepdim=True).clamp(max=0)  # zero is one of the levels
    high = x.detach().amax(dim=-1, keepdim=True).clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    zero = (-low / scale).round()

    steps = x * (1 / scale)
    rounding = steps.round() - steps
    levels = (steps + rounding.detach() + zero).clamp(0, 2**bits - 1)
    return (levels - zero) * scale


# --- the technique --------------------------------------------------------------------------------


def apply_quantization_aware(
    model: Any,
    *,
    weight_bits: int = 4,
    group: int | None = 64,
    activation_bits: int | None = 8,
    output_bits: int | None = 8,
    embedding_bits: int | None = 8,
    calibration: Tensor | None = None,
) -> Any:
    """Let `model` compute on its grids, and train with them, in place. Returns `model`.

    Any loop trains it, also under autocast: weights and grids stay in fp32. Parameters keep their
    names, so the optimizer, `state_dict` and `save_pretrained` see the weights in full precision.
    Weights that are shared stay shared, also where each of the two layers has its own grid.

    Args:
        model: a Hugging Face causal LM, or a network with nn.Conv2d layers. In such a network each
            filter has one scale, all linear layers count as output layers, and `group` and
            `embedding_bits` are not used.
        weight_bits: of linear layers, or of convolutions.
        group: inputs that share a scale. None: the whole row.
        activation_bits: of what a layer reads: a grid for each token, or for a convolution one grid
            for all. None: not rounded.
        output_bits: of the layer that makes logits, with one scale for each row. None: that layer
            stays as it is.
        embedding_bits: of the input embedding, with one scale for each row. None: as it is.
        calibration: of a network with convolutions, images [N, C, H, W], one or more, that give the
            ranges of its activations. None: the steps of training give them.
    Raises ValueError, before anything changes, for bits and groups that are none, a group that does
    not divide the inputs of a layer, no images or others than the model takes, adapters, layers
    that are quantized already or have a forward of their own, a model that is neither of the two
    kinds, weights that no layer above holds (mixture of experts, GPT-2's Conv1D), and an output
    layer that a loss goes past.
    """
    grids = Grids(weight_bits, group, activation_bits, output_bits, embedding_bits)
    return _aware(model, grids, calibration)


def remove_quantization_aware(model: Any) -> Any:
    """The model in full precision, as training has left it: what an exporter takes.

    Raises ValueError if there is nothing to remove, and for a model that was converted.
    """
    for layer in _aware_layers(model):
        attributes = ["weight_bits", "group", "activation_bits"]
        if isinstance(layer, AwareConv2d):
            attributes += [LIMITS, "observing"]
        unmix(layer, _mixin(layer), attributes=attributes)
        unmark(layer, QUANTIZED_BY)
    return model


def convert_quantization_aware(model: Any) -> Any:
    """End training: each weight becomes what is left of it on its grid. Returns `model`.

    It gives the same outputs as before in eval mode, and faster: weights are rounded once.
    Activations are still rounded as they come. Nothing trains any more. Embedding and output layer
    get a table each, where their grids differ. Raises ValueError, before anything changes, for a
    model that `apply_quantization_aware` has not changed, or that was converted, and for a
    convolution that has seen no batch: it has no range of its input.
    """
    _require_ranges(model)
    return _fixed(model, by="convert_quantization_aware")


def apply_rounding(
    model: Any,
    *,
    weight_bits: int = 4,
    group: int | None = 64,
    activation_bits: int | None = 8,
    output_bits: int | None = 8,
    embedding_bits: int | None = 8,
    calibration: Tensor | None = None,
) -> Any:
    """Quantization after training, as the runtime computes it, in place. Returns `model`.

    For measuring what the grid costs: the weights are rounded and in their dtype as before, so
    nothing is smaller or faster. Arguments and errors are those of `apply_quantization_aware`, and
    a network with convolutions needs `calibration` for the ranges of its activations.
    """
    grids = Grids(weight_bits, group, activation_bits, output_bits, embedding_bits)
    needs_ranges = has_convolutions(model) and not is_causal_lm(model)
    if needs_ranges and activation_bits is not None and calibration is None:
        raise ValueError(
            "calibration=None: give images [N, C, H, W], from which the ranges of activations come"
        )
    _aware(model, grids, calibration)
    return _fixed(model, by="apply_rounding")


# --- pieces ---------------------------------------------------------------------------------------


def _aware(model: Any, grids: Grids, calibration: Tensor | None) -> Any:
    """Let all layers of the plan round in each forward."""
    plan = plan_of(model, grids)
    check_calibration(model, plan, calibration)
    for layer, options in plan:
        mix_in(layer, aware_class(layer), **options)
        mark(layer, QUANTIZED_BY, "apply_quantization_aware")
        if isinstance(layer, AwareConv2d):
            limits = torch.full((2,), torch.nan, device=layer.weight.device)
            layer.register_buffer(LIMITS, limits)
    if calibration is not None:
        _observe(model, calibration)
    return model


@torch.no_grad()
def _fixed(model: Any, *, by: str) -> Any:
    """Round all weights for good."""
    layers = list(_aware_layers(model))
    shared = _shared_tables(model)
    for layer in layers:
        weight = nn.Parameter(rounded_weight(layer), requires_grad=False)
        mixin = _mixin(layer)
        attributes = {"activation_bits": layer.activation_bits}
        unmix(layer, mixin, attributes=["weight_bits", "group", "activation_bits"])
        layer.weight = weight
        mark(layer, QUANTIZED_BY, by)
        if FIXED[mixin] is not None:
            mix_in(layer, FIXED[mixin], **attributes)
    if shared:
        _share_again(model)
    refuse_save_pretrained(model)
    return model.eval().requires_grad_(False)


def _shared_tables(model: Any) -> bool:
    """Whether embedding and output layer of a causal LM are one parameter."""
    if not is_causal_lm(model):
        return False
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _share_again(model: Any) -> None:
    """Let embedding and output layer be one parameter again, where both were rounded alike."""
    embedding = model.get_input_embeddings()
    output = model.get_output_embeddings()
    if torch.equal(embedding.weight, output.weight):
        output.weight = embedding.weight
    else:
        model.config.get_text_config().tie_word_embeddings = False


@torch.no_grad()
def _observe(model: nn.Module, calibration: Tensor) -> None:
    """Let the ranges of all convolutions be those of these images."""
    convolutions = [layer for layer in model.modules() if isinstance(layer, AwareConv2d)]
    for layer in convolutions:
        layer.observing = True
    try:
        with evaluating(model):
            for images in calibration.split(IMAGES_AT_A_TIME):
                model(images)
    finally:
        for layer in convolutions:
            layer.observing = False


def _require_ranges(model: Any) -> None:
    """Afterwards nothing could give a convolution its range, and its weights would be rounded."""
    layers = _aware_layers(model)
    names = {layer: name for name, layer in model.named_modules()}
    for layer in layers:
        if not isinstance(layer, AwareConv2d) or layer.activation_bits is None:
            continue
        limits = getattr(layer, LIMITS)
        if not limits.is_meta and not limits.isfinite().all():
            raise ValueError(
                f"{names[layer]} has seen no batch, so there is no range of its input: train a "
                f"step, or give calibration=images to apply_quantization_aware; "
                f"remove_quantization_aware(model) takes the grids off"
            )


def _aware_layers(model: Any) -> list[nn.Module]:
    """The layers that train on a grid. Raises ValueError where there are none."""
    require_module(model)
    layers = [layer for layer in model.modules() if _mixin(layer) in FIXED]
    if not layers:
        raise ValueError(
            f"no layer of {type(model).__name__} trains on a grid: call "
            f"apply_quantization_aware(model) first"
        )
    return layers


def _mixin(layer: nn.Module) -> type | None:
    return vars(type(layer)).get("mixed_in")


# --- the arithmetic -------------------------------------------------------------------------------

# Copies of a weight while its gradient is cut off: its steps in fp32, and a byte that says where.
BESIDE_A_GRADIENT = 1.25


@estimate(Order.PRECISION)
def estimate_quantization_aware(
    budget: Budget, model: Any, shape: Shape, *, output_bits: int | None = 8
) -> Budget:
    """The same step on grids, for a causal LM in fp32 and without autocast.

    What is kept is what a plain step keeps. The rounded copies of a weight live around its
    product: with them, backward of the output layer may be the peak. Raises ValueError for
    `output_bits` that are none, for weights that are not fp32, and for a budget under autocast,
    whose 16-bit copies do not exist here: measure such a step with `core.measure.dry_run`.
    """
    if output_bits is not None:
        check_bits(output_bits=output_bits)
    if head_of(model).dtype is not torch.float32:
        raise ValueError(f"the weights are {model.dtype}: this estimate is for fp32 weights")
    before = [done.name for done in budget.applied if done.order is Order.PRECISION]
    if before:
        raise ValueError(
            f"the budget is that of {before[0]}: this estimate is for a step in fp32, and under "
            f"autocast a dry_run counts what is kept"
        )
    largest = max(tensor_bytes(layer.weight) for layer in _linears(decoder_blocks(model)[0]))
    loss = budget.loss
    if output_bits is not None:
        logits = 4 * shape.tokens * model.config.vocab_size
        of_weight = tensor_bytes(head_of(model))
        loss = max(loss, logits + of_weight + round(BESIDE_A_GRADIENT * of_weight))
    in_block = round(BESIDE_A_GRADIENT * largest)
    return budget.change(loss=loss, block_gradients=budget.block_gradients + in_block)


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
