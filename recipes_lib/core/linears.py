"""The linear layers of a model by name, and other modules in their places.

Precision for inference changes linear layers only: they hold nearly all weights. A technique lists
them, picks those that it changes, and puts a module of its own where each one was:

    names = [name for name in linear_layers(model) if name != output_layer_name(model)]
    replace_linears(model, make, names=names)        make(name, linear) -> the new module

All three take a Hugging Face causal LM and a decoder of `recipes_lib.inference` alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from recipes_lib.core.causal_lm import without_adapters


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every `nn.Linear` of `model` by its qualified name, the output layer among them.

    An embedding is no linear layer, even where the output layer shares its weight.
    """
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, nn.Linear)}


def output_layer_name(model: nn.Module) -> str | None:
    """The qualified name of the layer that makes logits; None if `model` has none."""
    output = _output_layer(model)
    for name, module in model.named_modules():
        if module is output:
            return name
    return None


def _output_layer(model: nn.Module) -> Any:
    causal = without_adapters(model)
    if hasattr(causal, "get_output_embeddings"):
        return causal.get_output_embeddings()
    return getattr(causal, "head", None)


def replace_linears(
    model: nn.Module,
    make: Callable[[str, nn.Linear], nn.Module],
    *,
    names: Iterable[str],
) -> nn.Module:
    """Put `make(name, linear)` in the place of each linear layer in `names`. Returns `model`.

    All new modules are made one by one, so that at most one layer exists twice. Raises ValueError,
    before anything changes, for a name that is no linear layer of `model`.
    """
    wanted = list(names)
    layers = linear_layers(model)
    unknown = [name for name in wanted if name not in layers]
    if unknown:
        raise ValueError(
            f"{type(model).__name__} has no linear layer {', '.join(unknown[:3])}: "
            f"give names from linear_layers(model)"
        )
    for name in wanted:
        # `pop`: the dictionary would keep the old layer's weights alive.
        new = make(name, layers.pop(name))
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new)
    return model


def refuse_save_pretrained(model: Any) -> None:
    """Let `model.save_pretrained` raise ValueError, where a model has one.

    transformers would write the whole numbers of a quantized layer as if they were its weights, and
    `from_pretrained` would load them without an error as another model.
    """
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = _refused


def _refused(*_: Any, **__: Any) -> None:
    raise ValueError(
        "the model is quantized, and from_pretrained would load other weights from its file: save "
        "the model before it is quantized, and quantize after loading; or keep its state_dict()"
    )


def bytes_per_token(model: nn.Module) -> int:
    """Bytes of weights that a step of one token reads: of all products, the output layer's too.

    Of the embedding it reads one row. A quantized layer says its `bytes_per_weight`; keys and
    values of the cache are not counted.
    """
    total = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            total += module.weight.nbytes
        elif hasattr(module, "bytes_per_weight"):
            total += module.bytes_per_weight * module.in_features * module.out_features
    return round(total)
