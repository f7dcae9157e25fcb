"""The linear layers of a model by name, and other modules in their places.

Precision for inference changes linear layers only: they hold nearly all weights. A technique lists
them, picks those that it changes, and puts a module of its own where each one was:

    names = [name for name in linear_layers(model) if name != output_layer_name(model)]
    replace_linears(model, make, names=names)        make(linear) -> the new module

All take a Hugging Face causal LM and a decoder of `recipes_lib.inference` alike.

A quantized layer is no `nn.Linear` any more. It says how many `bytes_per_weight` it has, and in
marks (`core.model.marks`) by whom it was quantized, and whether it rounds all tokens of a call by
one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from recipes_lib.core.model.causal_lm import without_adapters
from recipes_lib.core.model.decoding import require_causal_lm_or_decoder
from recipes_lib.core.model.marks import QUANTIZED_BY, marked

READ_BY_KERNELS = {"x_proj", "dt_proj", "out_proj"}  # of Mamba and its kin
# By AltUp of Gemma 3n, hashed attention of Reformer, and by routers and indexers, which are asked
# for the dtype of their weight.
READ_WITHOUT_A_CALL = {"correction_coefs", "prediction_coefs", "query_key"}
READ_WITHOUT_A_CALL |= {"weights_proj", "wg", "classifier"}
SCALED_IN_PLACE = ("attention.output", "feed_forward.value")  # by RWKV


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every `nn.Linear` of `model` by its qualified name, the output layer among them.

    An embedding is no linear layer, even where the output layer shares its weight.
    """
    modules = model.named_modules()
    return {name: module for name, module in modules if _is_plain(module)}


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a linear layer and returns one product.

    Some routers of transformers are subclasses of `nn.Linear` that return more (Llama 4, PhiMoE).
    """
    if not isinstance(module, nn.Linear):
        return False
    kind = type(module)
    of_a_family = kind.__module__.startswith("transformers.models")
    return not of_a_family or "forward" not in vars(kind)


def read_by_the_model(model: nn.Module) -> set[str]:
    """The linear layers whose weight the code of a model reads by itself, on some device at least.

    Another kind of layer in their place would not be called, or has no weight to read.
    """
    names = set()
    for name in linear_layers(model):
        owner, _, leaf = name.rpartition(".")
        beside = dict(model.get_submodule(owner).named_children())
        is_mixer = "conv1d" in beside and "in_proj" in beside  # of a state space model
        if leaf in READ_WITHOUT_A_CALL or (is_mixer and leaf in READ_BY_KERNELS):
            names.add(name)
        if name.endswith(SCALED_IN_PLACE):
            names.add(name)
    return names


def output_layer_name(model: nn.Module) -> str | None:
    """The qualified name of the layer that makes logits; None if `model` has none."""
    causal = without_adapters(model)
    output = getattr(causal, "head", None)  # as a decoder calls it
    if hasattr(causal, "get_output_embeddings"):
        output = causal.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is output), None)


def quantized_layers(model: Any) -> dict[str, str]:
    """The linear layers that are quantized already, and what did it, as "apply_int4"."""
    found = {}
    for name, module in model.named_modules():
        if marked(module, QUANTIZED_BY):
            found[name] = getattr(module, QUANTIZED_BY)
    return found


def refuse_quantized(model: Any, names: Iterable[str] | None = None, *, way_out: str) -> None:
    """Raise ValueError if one of these linear layers is quantized; None means any layer.

    The message says by what, and `way_out` says what to do.
    """
    done = quantized_layers(model)
    if names is not None:
        wanted = set(names)
        done = {name: by for name, by in done.items() if name in wanted}
    if done:
        name, by = next(iter(done.items()))
        raise ValueError(f"{name} is quantized already, with {by}: {way_out}")


def layers_to_quantize(
    model: Any,
    names: Iterable[str] | None,
    *,
    way_out: str = "give a model in full precision, or `names` of its other layers",
) -> list[str]:
    """The names of the layers to quantize, each once.

    None means all but the output layer, and those whose weight the model reads by itself. `way_out`
    says what to do with a layer that is quantized already.
    """
    if hasattr(model, "peft_config"):
        raise ValueError("the model has adapters: call model.merge_and_unload() first")
    require_causal_lm_or_decoder(model)
    if names is not None:
        names = list(dict.fromkeys(names))
    refuse_quantized(model, names, way_out=way_out)
    layers = linear_layers(model)
    if names is None:
        left_out = {output_layer_name(model)} | read_by_the_model(model)
        names = [name for name in layers if name not in left_out]
    unknown = [name for name in names if name not in layers]
    if unknown or not names:
        raise ValueError(
            f"{type(model).__name__} has no linear layer {', '.join(unknown[:3])}: give names from "
            f"linear_layers(model), or another family (GPT-2 stores its weights as Conv1D)"
        )
    return names


def replace_linears(
    model: nn.Module,
    make: Callable[[nn.Linear], nn.Module],
    *,
    names: Iterable[str],
) -> nn.Module:
    """Put `make(linear)` in the place of each linear layer in `names`. Returns `model`."""
    layers = linear_layers(model)
    for name in names:
        # `pop`: the dictionary would keep the old weights alive. So one layer at most exists twice.
        new = make(layers.pop(name))
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new)
    return model


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


def is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer: `nn.Linear`, or GPT-2's Conv1D, which multiplies as well."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def features(layer: nn.Module) -> tuple[int, int]:
    """Input and output features of a linear layer. Conv1D stores its weight as [in, out]."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    inputs, outputs = layer.weight.shape
    return inputs, outputs
