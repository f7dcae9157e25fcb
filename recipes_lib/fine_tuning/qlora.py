"""QLoRA: LoRA on a base model whose weights are stored in 4 bits.

Problem    With LoRA the frozen weights fill the memory: 8 billion of them in bf16 are 16 GB.
Idea       64 weights share a scale, and each is the index of one of the 16 quantiles of a normal
           distribution (NF4). The scales are quantized in their turn (double quantization):

               y = dequantize(W) x + (alpha / r) * B A x      W is dequantized one layer at a time
Saves      A weight of the blocks takes 0.5 + 1/64 + 4/(64*256) = 0.516 bytes, not 2 (bf16) or 4
           (fp32): its index, its part of a scale, and its part of a scale of scales.
Costs      The weights are rounded to 16 levels, which small models feel most. Dequantizing takes
           time, as much for one token as for many. With fp16 compute the gradient is fp16: scale
           the loss.
Use when   The bf16 weights do not fit, or leave no room for the batch.
Not when   They fit: LoRA is faster and starts from the exact model. Or activations are what does
           not fit: they stay.
In production   `from_pretrained(…, quantization_config=BitsAndBytesConfig(load_in_4bit=True,
           bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True))` quantizes while it loads,
           then `peft.prepare_model_for_kbit_training` and `get_peft_model`. `apply_qlora` takes
           such a model too.
Source     Dettmers et al., "QLoRA" (arXiv 2305.14314); bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recipes_lib.core.checks import check_choice
from recipes_lib.core.measure.dry_run import dry
from recipes_lib.core.measure.machine import machine, require
from recipes_lib.core.model.causal_lm import decoder_blocks, require_causal_lm
from recipes_lib.core.model.probe.outcome import Limits, outcome
from recipes_lib.core.model.probe.undo import undone_on_error
from recipes_lib.fine_tuning.lora import (
    apply_lora,
    target_linears,
    without_peft_warnings,
)

# --- the idea: what a learner can copy ------------------------------------------------------------


def nf4_levels() -> torch.Tensor:
    """The 16 numbers that a weight can become: quantiles of a normal distribution, from -1 to 1."""
    last = 0.9677083  # bitsandbytes' largest probability: at 1 the quantile would be infinite
    positive = torch.special.ndtri(torch.linspace(last, 0.5, 9)[:-1])
    negative = -torch.special.ndtri(torch.linspace(last, 0.5, 8)[:-1])
    levels = torch.cat([negative, torch.zeros(1), positive.flip(0)])
    return levels / levels.max()  # [16]


def plain_nf4(weight: torch.Tensor, *, block_size: int = 64) -> torch.Tensor:
    """What is left of `weight` [out, in] after quantizing and dequantizing it.

    Without double quantization. With `quantize_4bit` and `dequantize_4bit` of bitsandbytes:

        dequantize_4bit(*quantize_4bit(weight, blocksize=64, quant_type="nf4"))
    """
    levels = nf4_levels()
    blocks = weight.reshape(-1, block_size)  # [blocks, 64]
    scales = blocks.abs().amax(dim=1, keepdim=True)  # [blocks, 1]
    distances = (blocks / scales)[:, :, None] - levels  # [blocks, 64, 16]
    index = distances.abs().argmin(dim=-1)  # [blocks, 64], four bits each: what is stored
    return (levels[index] * scales).view_as(weight)


def nf4_layer(
    linear: torch.nn.Linear,
    *,
    block_size: int = 64,
    compute_dtype: torch.dtype | None = None,
    double_quant: bool = True,
    device: torch.device | str | None = None,
) -> torch.nn.Module:
    """The frozen 4-bit layer that takes the place of `linear`; arguments as in `quantize_nf4`."""
    bnb = require("bitsandbytes")
    if compute_dtype is None:
        compute_dtype = torch.bfloat16 if machine().native_bf16 else torch.float32
    layer = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=compute_dtype,
        quant_type="nf4",
        device="meta",
    )
    layer.weight = bnb.nn.Params4bit(
        linear.weight.data,
        blocksize=block_size,
        compress_statistics=double_quant,
        quant_type="nf4",
        module=layer,
    )
    layer.bias = linear.bias
    layer.support_avx512bf16_for_cpu = False  # trap 1: never repack
    layer.requires_grad_(False).train(linear.training)
    # The move to a device is what quantizes.
    if device is None:
        device = linear.weight.device
    return layer.to(device)


# --- the technique --------------------------------------------------------------------------------


COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the matrix products


def apply_qlora(
    model: Any,
    *,
    rank: int = 16,
    alpha: float = 32,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    compute_dtype: torch.dtype | None = None,
) -> Any:
    """Quantize the blocks of `model` in place, put LoRA adapters on them; returns the `PeftModel`.

    A model that is in 4 bits already gets the guards and the adapters. Raises what `quantize_nf4`
    and `apply_lora` raise. What was rounded cannot be undone, so there is no run on a few tokens
    here: `check_gradient_flow` looks whether the adapters learn.
    """
    require_causal_lm(model)
    # Bad arguments are refused before the weights are gone.
    lora_options = {"rank": rank, "alpha": alpha, "dropout": dropout}
    check_choice([None, *COMPUTE_DTYPES], compute_dtype=compute_dtype)
    target_linears(model, target_modules=target_modules)
    if not quantized_layers(model):
        quantize_nf4(model, compute_dtype=compute_dtype)
    # Those of a model that was loaded in 4 bits have not been looked at yet.
    for name, layer in quantized_layers(model).items():
        _refuse_wrong_scales(name, layer.in_features, layer.weight.blocksize)
        if compute_dtype is not None:
            layer.compute_dtype = compute_dtype
            layer.compute_type_is_set = True  # else the dtype of the first input would replace it
        layer.support_avx512bf16_for_cpu = False  # trap 1: never repack
    return apply_lora(model, **lora_options, target_modules=target_modules, check=False)


def quantize_nf4(
    model: Any,
    *,
    compute_dtype: torch.dtype | None = None,
    double_quant: bool = True,
    device: torch.device | str | None = None,
) -> Any:
    """Replace the linear layers of the blocks by 4-bit ones, in place, one after the other.

    Each full weight is freed before the next one is quantized. Embeddings, norms and the output
    layer keep their dtype.

    Args:
        compute_dtype: of the matrix products; default is bf16 where it is native, else fp32. fp16
            needs loss scaling.
        double_quant: quantize the scales as well.
        device: of the 4-bit layers. A model that only host memory can hold whole gets "cuda" here,
            and `model.to("cuda")` afterwards.
    """
    require_causal_lm(model)
    if quantized_layers(model):
        raise ValueError("the model is quantized already: give one in full precision")
    check_choice([None, *COMPUTE_DTYPES], compute_dtype=compute_dtype)
    linears = target_linears(model)
    # All layers are checked before the first one is gone.
    sizes = {name: block_size_of(name, layer) for name, layer in linears.items()}
    for name, size in sizes.items():
        # `pop`: from here on, only the model refers to the full weight.
        layer = nf4_layer(
            linears.pop(name),
            block_size=size,
            compute_dtype=compute_dtype,
            double_quant=double_quant,
            device=device,
        )
        model.set_submodule(name, layer)
    model.is_loaded_in_4bit = True  # peft then builds its 4-bit adapter layers
    return model


def merge_qlora(model: Any) -> Any:
    """Dequantize the base and fold the adapters in: a plain model, in the dtype that was quantized.

    It computes what the QLoRA model computes; peft's merge rounds the sum to 4 bits again. The
    adapters may be of any kind that peft merges: they move to the plain base as from a file, and
    peft's own arithmetic folds them in.
    """
    if not quantized_layers(model) or not hasattr(model, "merge_and_unload"):
        raise ValueError("nothing to merge: give the model that apply_qlora returned")
    with undone_on_error(model, "merge_qlora"):
        for layer in quantized_layers(model).values():
            layer.support_avx512bf16_for_cpu = False  # trap 1: never repack
        dtype = _dtype_of_nf4_layers(model)
        before = _logits_of_few_tokens(model)
        merged = _on_a_plain_base(model).merge_and_unload(safe_merge=True)
        # Rounded otherwise, and nothing else: adapters that have been merged before, for example.
        # By their length: trained adapters in 16 bits move a single logit by more than the bound.
        off = ((_logits_of_few_tokens(merged) - before).norm() / before.norm()).item()
        if not off < Limits("grows").of("logits", dtype):  # NaN is no small number either
            raise ValueError(f"the logits are off by {off:.1e}")
    return merged.requires_grad_(True)


def _on_a_plain_base(model: Any) -> Any:
    """A `PeftModel` with the adapters of `model` around its base, which is dequantized in place."""
    from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    dequantize = require("bitsandbytes").functional.dequantize_4bit
    configs = dict(model.peft_config)
    active = list(model.active_adapters)
    weights = {}
    for name in active:
        weights[name] = get_peft_model_state_dict(
            model, adapter_name=name, save_embedding_layers=False
        )
    # Nothing is merged into four bits here: peft would refuse to unload IA3 otherwise.
    model.get_base_model().is_loaded_in_4bit = False
    base = model.unload()
    for name, layer in quantized_layers(base).items():
        weight = dequantize(layer.weight.data, layer.weight.quant_state)
        base.set_submodule(name, _dequantized_layer(layer, weight))
    if hasattr(base, "hf_quantizer"):
        base.hf_quantizer.remove_quantization_config(base)
    with without_peft_warnings():
        plain = PeftModel(base, configs[active[0]], adapter_name=active[0])
    for name in active[1:]:
        plain.add_adapter(name, configs[name])
    for name in active:
        set_peft_model_state_dict(plain, weights[name], adapter_name=name)
    plain.base_model.set_adapter(active)
    return plain


def _logits_of_few_tokens(model: Any) -> torch.Tensor:
    """To compare a merged model: logits of a few tokens. AdaLoRA adds a term to the loss."""
    return outcome(model, promise="rounds")["logits"].float()


def _dtype_of_nf4_layers(model: Any) -> torch.dtype:
    dtypes = {layer.compute_dtype for layer in quantized_layers(model).values()}
    if dtypes | {model.dtype} == {torch.float32}:
        return torch.float32
    return torch.bfloat16


def _dequantized_layer(layer: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Linear:
    """A plain layer with the dequantized weight of a 4-bit one, in the dtype that was quantized."""
    dtype = layer.weight.quant_state.dtype
    plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    plain.weight = torch.nn.Parameter(weight.to(dtype))
    if layer.bias is not None:
        plain.bias = torch.nn.Parameter(layer.bias.to(dtype))
    return plain.train(layer.training)


# --- Hugging Face glue and guards -----------------------------------------------------------------
#
# Two silent traps of bitsandbytes on CPUs are closed here.
#
# Trap 1   With AVX512-BF16, the first forward in eval mode repacks the weights for a kernel without
#          backward, and from then on no gradient passes the layer.
# Trap 2   With AVX-512, rows whose length is a multiple of 16, but not of the block size, are
#          dequantized with wrong scales.


def check_gradient_flow(model: Any, batch: dict[str, torch.Tensor]) -> None:
    """Raise RuntimeError unless `batch` gives each adapter of the 4-bit first block a gradient.

    `batch` holds tensors [B, S], labels among them. One forward and backward; `.grad` stays as it
    is. Zero counts as none: past a layer that cuts the gradient the residual stream still carries
    some, but the adapters in front of that layer get zeros.
    """
    # B starts at zero, so the gradient of A is zero in the first step: B tells.
    adapters = {}
    for name, parameter in decoder_blocks(model)[0].named_parameters():
        if "lora_B" in name and parameter.requires_grad:
            adapters[name] = parameter
    if not adapters:
        raise ValueError(
            "the first block has no trainable adapter: give the model that apply_qlora returned"
        )
    loss = model(**batch, use_cache=False).loss
    gradients = torch.autograd.grad(loss, list(adapters.values()), allow_unused=True)
    dead = []
    for name, gradient in zip(adapters, gradients, strict=True):
        # Without data nobody knows whether it is zero.
        reached = gradient is not None and (dry() or gradient.any())
        if not reached:
            dead.append(name)
    if dead:
        raise RuntimeError(
            f"no gradient reaches {', '.join(dead)} of the first block, which would not learn"
        )


def quantized_layers(model: Any) -> dict[str, torch.nn.Module]:
    """The 4-bit linear layers of `model` by name."""
    kind = require("bitsandbytes").nn.Linear4bit
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


BLOCK_SIZES = (64, 32)  # NF4 weights that share a scale: the first that divides a row


def block_size_of(name: str, layer: torch.nn.Module) -> int:
    """The block size of NF4 for a layer that is to be quantized; ValueError if it cannot be."""
    if type(layer) is not torch.nn.Linear:
        raise ValueError(
            f"{name} is a {type(layer).__name__} and only nn.Linear is quantized here (GPT-2 "
            f"stores its weights transposed): use apply_lora without quantization"
        )
    for size in BLOCK_SIZES:
        if layer.in_features % size == 0:
            return size
    # No size divides the row: any is right where the slow, flat kernel runs.
    _refuse_wrong_scales(name, layer.in_features, BLOCK_SIZES[0])
    return BLOCK_SIZES[0]


def _refuse_wrong_scales(name: str, in_features: int, block_size: int) -> None:
    """Raise ValueError for rows of 4-bit weights that fall into trap 2."""
    if in_features % 16 == 0 and in_features % block_size:
        raise ValueError(
            f"{name} has {in_features} inputs, a multiple of 16 but not of the block size "
            f"{block_size}: bitsandbytes dequantizes such rows wrongly on CPUs with AVX-512; "
            f"use apply_lora on the unquantized model"
        )
