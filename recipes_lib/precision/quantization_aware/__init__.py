"""Quantization-aware training: the model trains with the rounding that its file will have.

Problem    Rounded to four bits after training, a model loses quality: nothing in its training has
           asked for weights that lie well on a grid of 16 levels.
Idea       Round in every forward, and let the optimizer move the weights that are not rounded:

               forward     y = q(x) q(W)^T         q: round to the nearest level of the grid
               backward    dW = (dy^T q(x))        as if q were not there (straight through),
                           dx = (dy q(W))          and 0 where a number was cut off at the end
               step        W  = W - lr dW          W is in full precision: small steps add up

           A weight near the middle of two levels goes to the one with the smaller loss, and others
           make up for what its rounding costs.
Saves      Quality at the same bits. The file and its speed are those of rounding after training.
Costs      Training, with the weights in full precision. A forward rounds each weight once, and
           backward twice. Nothing more is kept: backward rounds again. Around a product there is
           a copy of its weight, and a quarter of one more.
Use when   Rounding a trained model costs quality that a longer run does not win back: 4 bits and
           fewer, small models, one scale for many weights.
Not when   8 bits: rounding costs about nothing (measure with `apply_rounding`). No text like that
           of the model's training can be had. The grid is not known yet: another group size or
           another runtime is another model. With a loss that reads the output layer's weight itself
           (chunked, distillation): give output_bits=None, and round that layer at the end.
In production   torchao `quantize_(model, QATConfig(Int8DynamicActivationIntxWeightConfig(...),
           step="prepare"))`, and step="convert" behind training; torchtune's
           `qat_distributed`; for convolutions `prepare_qat_pt2e` and ExecuTorch's XNNPACKQuantizer.
Source     Jacob et al., arXiv 1712.05877; the gradient: Bengio et al., arXiv 1308.3432; of language
           models: Liu et al., "LLM-QAT", arXiv 2305.17888.

An exporter rounds the weights itself. Give it those in full precision, by
`remove_quantization_aware`: it finds the grid of training, to the last bit. A model that is rounded
already would be rounded a second time, on another grid (`core/model/integer_grid.py` says why): it
is for measuring quality.

Shapes: K inputs and N outputs of a layer, G = K / group groups of a row, T tokens.

layers  its linear layers, embeddings and convolutions, and rounding that trains
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import check_whole
from recipes_lib.core.model.causal_lm import is_causal_lm, without_adapters
from recipes_lib.core.model.evaluating import evaluating
from recipes_lib.core.model.integer_grid import check_bits, check_group_divides
from recipes_lib.core.model.linears import refuse_quantized
from recipes_lib.core.model.marks import QUANTIZED_BY, mark, unmark
from recipes_lib.core.model.mixins import mix_in, unmix, unmixed_class
from recipes_lib.core.model.probe import proves
from recipes_lib.precision._packed_linear import refuse_save_pretrained
from recipes_lib.precision.quantization_aware.layers import (
    FIXED,
    KINDS,
    LIMITS,
    AwareConv2d,
    aware_class,
    rounded_weight,
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


# In 8 bits tiny models are off by 0.01–0.02 and SmolLM2 by 0.07; with 2 bits, by more than 1.
AT_FIRST = {"weight_bits": 8, "activation_bits": 8}


@proves("rounds", bound=0.5, tried_with=AT_FIRST, causal_lm=False)
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
    """
    grids = Grids(weight_bits, group, activation_bits, output_bits, embedding_bits)
    return _train_on_grids(model, grids, calibration)


def remove_quantization_aware(model: Any) -> Any:
    """The model in full precision, as training has left it: what an exporter takes."""
    for layer in _aware_layers(model):
        if isinstance(layer, AwareConv2d):
            del layer.observing
            delattr(layer, LIMITS)
        unmix(layer, _mixin(layer))
        unmark(layer, QUANTIZED_BY)
    return model


def convert_quantization_aware(model: Any) -> Any:
    """End training: each weight becomes what is left of it on its grid. Returns `model`.

    It gives the same outputs as before in eval mode, and faster: weights are rounded once.
    Activations are still rounded as they come. Nothing trains any more. Embedding and output layer
    get a table each, where their grids differ.
    """
    return _put_on_grids(model, by="convert_quantization_aware")


@proves("rounds", bound=0.5, tried_with=AT_FIRST, causal_lm=False)
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
    return _put_on_grids(_train_on_grids(model, grids, calibration), by="apply_rounding")


# --- which layers get which grid ------------------------------------------------------------------


@dataclass(frozen=True)
class Grids:
    """The options of `apply_quantization_aware` about bits and groups."""

    weight_bits: int
    group: int | None
    activation_bits: int | None
    output_bits: int | None
    embedding_bits: int | None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if "group" in given:
            check_whole(least=2, group=given.pop("group"))
        check_bits(**given)

    def of(self, model: Any, name: str, layer: nn.Module) -> tuple[int | None, int | None]:
        """Bits and group of a layer's weight while it trains with rounding; no bits: it stays."""
        if not is_causal_lm(model):
            if isinstance(layer, nn.Conv2d):
                return self.weight_bits, None
            return self.output_bits, None
        if layer is model.get_input_embeddings():
            return self.embedding_bits, None
        if layer is model.get_output_embeddings():
            return self.output_bits, None
        if isinstance(layer, nn.Embedding):
            return None, None
        if self.group is not None:
            check_group_divides(layer.in_features, self.group, name)
        return self.weight_bits, self.group


def _train_on_grids(model: Any, grids: Grids, calibration: Tensor | None) -> Any:
    """Mix rounding into each layer that has bits, and give convolutions a range of their input."""
    _require_rounding_means_what_it_says(model, grids.output_bits)
    found = []
    for name, layer in model.named_modules():
        if isinstance(layer, KINDS):
            bits, group = grids.of(model, name, layer)
            if bits is not None:
                found.append((layer, bits, group))
    for layer, bits, group in found:
        options = {"weight_bits": bits, "group": group, "activation_bits": grids.activation_bits}
        mix_in(layer, aware_class(layer), **options)
        mark(layer, QUANTIZED_BY, "apply_quantization_aware")
        if isinstance(layer, AwareConv2d):
            layer.observing = False
            limits = torch.full((2,), torch.nan, device=layer.weight.device)
            layer.register_buffer(LIMITS, limits)
    if calibration is not None:
        _observe(model, calibration)
    return model


def _require_rounding_means_what_it_says(model: Any, output_bits: int | None) -> None:
    """Raise ValueError where a part would stay in full precision, and nobody would notice."""
    if hasattr(model, "peft_config"):
        raise ValueError("the model has adapters: call model.merge_and_unload() first")
    refuse_quantized(model, way_out="give a model in full precision")
    convolutions = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if not is_causal_lm(model) and not convolutions:
        raise ValueError(
            f"{type(model).__name__} has no nn.Conv2d and is no causal LM: other networks are "
            f"trained on a grid by torchao's prepare_qat_pt2e"
        )
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and not isinstance(module, KINDS):
                raise ValueError(
                    f"{name}.{own} {list(parameter.shape)} is a weight of "
                    f"{unmixed_class(module).__name__}: only those of nn.Linear, nn.Embedding and "
                    f"nn.Conv2d can be rounded"
                )
    if output_bits is not None and is_causal_lm(model) and _has_another_loss(model):
        raise ValueError(
            f"output_bits={output_bits}: this {type(model).__name__} has another loss, which may "
            f"read the output layer's weight as it is. Give output_bits=None, and round that layer "
            f"at the end"
        )


def _has_another_loss(model: Any) -> bool:
    """Losses that read the output layer's weight themselves do not see its rounding."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    causal = without_adapters(model)
    return type(causal) is not unmixed_class(causal) or causal.loss_function is not ForCausalLMLoss


# --- after training -------------------------------------------------------------------------------


def _aware_layers(model: Any) -> list[nn.Module]:
    layers = [layer for layer in model.modules() if _mixin(layer) in FIXED]
    if not layers:
        raise ValueError(
            f"no layer of {type(model).__name__} trains on a grid: call "
            f"apply_quantization_aware(model) first"
        )
    return layers


def _mixin(layer: nn.Module) -> type | None:
    return vars(type(layer)).get("mixed_in")


@torch.no_grad()
def _put_on_grids(model: Any, *, by: str) -> Any:
    """Each weight becomes what is left of it on its grid; nothing of the model trains."""
    for layer in _aware_convolutions(model):
        if layer.activation_bits is not None and not getattr(layer, LIMITS).isfinite().all():
            raise ValueError(
                "a convolution has seen no batch, so there is no range of its input: train a step, "
                "or give calibration=images"
            )
    shared = False
    if is_causal_lm(model):
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        shared = embedding.weight is output.weight
    for layer in _aware_layers(model):
        weight = nn.Parameter(rounded_weight(layer), requires_grad=False)
        mixin = _mixin(layer)
        attributes = {"activation_bits": layer.activation_bits}
        unmix(layer, mixin)
        layer.weight = weight
        mark(layer, QUANTIZED_BY, by)
        if FIXED[mixin] is not None:
            mix_in(layer, FIXED[mixin], **attributes)
    if shared and torch.equal(embedding.weight, output.weight):
        output.weight = embedding.weight  # both were rounded alike
    elif shared:
        model.config.get_text_config().tie_word_embeddings = False
    refuse_save_pretrained(model)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _observe(model: nn.Module, calibration: Tensor) -> None:
    """Let the grids of all convolutions have the ranges of these images."""
    for layer in _aware_convolutions(model):
        layer.observing = True
    with evaluating(model):
        for images in calibration.split(IMAGES_AT_A_TIME):
            model(images)
    for layer in _aware_convolutions(model):
        layer.observing = False


def _aware_convolutions(model: nn.Module) -> list[AwareConv2d]:
    return [layer for layer in model.modules() if isinstance(layer, AwareConv2d)]
