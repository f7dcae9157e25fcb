"""Which layers of a model get which grid, and what has to be refused before anything changes.

Part of quantization_aware.

    causal LM          linear layers of blocks: groups of inputs · output layer and input embedding:
                       one scale for each row
    convolutions       one scale for each filter · linear layers: as the output layer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from recipes_lib.core.checks import check_whole
from recipes_lib.core.data.evaluation import evaluating
from recipes_lib.core.measure import dry
from recipes_lib.core.model.causal_lm import require_causal_lm, without_adapters
from recipes_lib.core.model.integer_grid import check_bits, check_group_divides
from recipes_lib.core.model.linears import refuse_quantized, require_module
from recipes_lib.core.model.mixing import require_forward_of_class, unmixed_class

KINDS = (nn.Linear, nn.Embedding, nn.Conv2d)

Plan = list[tuple[nn.Module, dict[str, Any]]]  # a layer, and the attributes of what is mixed in


@dataclass(frozen=True)
class Grids:
    """The options of `apply_quantization_aware` about bits and groups."""

    weight_bits: int
    group: int | None
    activation_bits: int | None
    output_bits: int | None
    embedding_bits: int | None

    def check(self) -> None:
        """Raise ValueError for bits and groups that are none."""
        check_bits(weight_bits=self.weight_bits)
        for name in ("activation_bits", "output_bits", "embedding_bits"):
            bits = getattr(self, name)
            if bits is not None:
                check_bits(**{name: bits})
        if self.group is not None:
            check_whole(least=2, group=self.group)


def plan_of(model: Any, grids: Grids) -> Plan:
    """Which layers change, and how. Raises ValueError for all that apply_... names."""
    if not is_causal_lm(model) and not has_convolutions(model):
        require_module(model)
        if not hasattr(model, "config"):
            raise ValueError(
                f"{type(model).__name__} has no nn.Conv2d and is no Hugging Face causal LM: give a "
                f"decoder-only model or a network with nn.Conv2d; other networks are trained on a "
                f"grid by quantize_pt2e(model, calibration, train=…)"
            )
        require_causal_lm(model)  # says what it has to be
    if hasattr(model, "peft_config"):
        raise ValueError("the model has adapters: call model.merge_and_unload() first")
    grids.check()
    refuse_quantized(model, way_out="give a model in full precision")
    _require_known_weights(model)
    if is_causal_lm(model):
        _require_output_layer_in_use(model, grids.output_bits)
        plan = _plan_of_causal_lm(model, grids)
    else:
        plan = _plan_of_convolutions(model, grids)
    require_forward_of_class([layer for layer, _ in plan])
    return plan


def _plan_of_causal_lm(model: Any, grids: Grids) -> Plan:
    plan = []
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    widths = [layer.in_features for layer in linears if layer not in ends]
    for name, layer in model.named_modules():
        bits = None
        group = None
        if layer is model.get_input_embeddings():
            bits = grids.embedding_bits
        elif layer is model.get_output_embeddings():
            bits = grids.output_bits
        elif isinstance(layer, nn.Linear):
            bits = grids.weight_bits
            group = grids.group
            if group is not None:
                check_group_divides(layer.in_features, group, name, all_widths=widths)
        if bits is not None:
            _check_layer(name, layer)
            plan.append((layer, _attributes(bits, group, grids)))
    return plan


def _plan_of_convolutions(model: nn.Module, grids: Grids) -> Plan:
    plan = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            _check_layer(name, layer)
            attributes = _attributes(grids.weight_bits, None, grids)
            plan.append((layer, attributes | {"observing": False}))
        elif isinstance(layer, nn.Linear) and grids.output_bits is not None:
            _check_layer(name, layer)
            plan.append((layer, _attributes(grids.output_bits, None, grids)))
    return plan


def _attributes(bits: int, group: int | None, grids: Grids) -> dict[str, Any]:
    return {"weight_bits": bits, "group": group, "activation_bits": grids.activation_bits}


def is_causal_lm(model: Any) -> bool:
    """Whether this is what `require_causal_lm` lets through."""
    try:
        require_causal_lm(model)
    except ValueError:
        return False
    return True


def has_convolutions(model: Any) -> bool:
    """Whether this is a network with nn.Conv2d layers."""
    if not isinstance(model, nn.Module):
        return False
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


# --- guards ---------------------------------------------------------------------------------------


def _require_known_weights(model: nn.Module) -> None:
    """Raise ValueError for matrices that are the weight of none of the three kinds of layers.

    They would stay in full precision, and nobody would notice.
    """
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            raise ValueError(
                f"a weight of {name} is computed of others in each forward, such as with a mask: "
                f"call remove_pruning(model) first; zeros stay zeros on a grid"
            )
        if isinstance(module, KINDS):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2:
                raise ValueError(
                    f"{name}.{own} {list(parameter.shape)} is a weight of "
                    f"{unmixed_class(module).__name__}: only those of nn.Linear, nn.Embedding and "
                    f"nn.Conv2d can be rounded; give a model of another family"
                )


def _require_output_layer_in_use(model: Any, output_bits: int | None) -> None:
    """Raise ValueError if a loss reads the output layer's weight, and the layer is to be rounded.

    Distillation and the chunked loss do. Their models are no longer what transformers makes them.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    causal = without_adapters(model)
    plain = type(causal) is unmixed_class(causal) and causal.loss_function is ForCausalLMLoss
    if output_bits is not None and not plain:
        raise ValueError(
            f"output_bits={output_bits}: this {type(causal).__name__} has another loss, which may "
            f"read the output layer's weight as it is. Give output_bits=None, and round that layer "
            f"at the end"
        )


def _check_layer(name: str, layer: nn.Module) -> None:
    for kind in (nn.Linear, nn.Conv2d):
        if isinstance(layer, kind) and unmixed_class(layer).forward is not kind.forward:
            # Such as a convolution that standardizes its weight first: that would be left out.
            raise ValueError(
                f"{name} is a {type(layer).__name__} with a forward of its own, which differs from "
                f"that of nn.{kind.__name__}: give a model with plain layers"
            )
    if isinstance(layer, nn.Embedding):
        plain = unmixed_class(layer).forward is nn.Embedding.forward
        if not plain and not hasattr(layer, "embed_scale"):
            raise ValueError(
                f"{name} is a {type(layer).__name__} with a forward of its own, which does more "
                f"than to read rows and to multiply them by embed_scale: give embedding_bits=None"
            )
    if isinstance(layer.weight, nn.UninitializedParameter):
        raise ValueError(
            f"{name} is a lazy layer, which has no size yet: call the model once on an input first"
        )
    if not layer.weight.is_floating_point():
        raise ValueError(
            f"{name} has weights in {layer.weight.dtype}: give a model that is not quantized yet"
        )
    if layer.weight.is_meta or dry():
        return  # there are no values
    if not layer.weight.isfinite().all():
        raise ValueError(f"{name} has weights that are not finite: no scale can hold them")


def check_calibration(model: Any, plan: Plan, calibration: Any) -> None:
    """Raise ValueError unless these are images, and convolutions to read them; None is fine.

    The model runs on the first of them as it is: what fails there must not fail half-way.
    """
    if calibration is None:
        return
    if not any(isinstance(layer, nn.Conv2d) for layer, _ in plan):
        raise ValueError(
            "calibration is for convolutions, and this model has none: its tokens are rounded by "
            "what is in them; leave it out"
        )
    if not isinstance(calibration, Tensor) or calibration.dim() != 4 or len(calibration) == 0:
        shown = type(calibration).__name__
        if isinstance(calibration, Tensor):
            shown = str(list(calibration.shape))
        raise ValueError(f"calibration={shown}: give one image or more, as a tensor [N, C, H, W]")
    if not calibration.isfinite().all():
        raise ValueError("calibration has numbers that are not finite: no grid can hold them")
    if not calibration.any():
        raise ValueError(
            "calibration is zero everywhere, and no range comes of it: give images as the model "
            "will see them"
        )
    try:
        with evaluating(model):
            model(calibration[:1])
    except Exception as error:  # the model's own code may raise anything
        raise ValueError(
            f"the model does not run on calibration={list(calibration.shape)} in "
            f"{calibration.dtype} on {calibration.device}: give images as it was trained on, in "
            f"its dtype and on its device ({type(error).__name__}: {error})"
        ) from error
