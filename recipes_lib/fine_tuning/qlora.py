"""QLoRA: LoRA on a base model whose weights are stored in 4 bits.

Problem    With LoRA the frozen weights are what fills the memory: 16 GB for 8 billion of them in bf16.
Idea       64 weights share a scale, and each is the index of one of the 16 quantiles of a normal
           distribution (NF4). The scales are quantized in their turn (double quantization):

               y = dequantize(W) x + (alpha / r) * B A x      W is dequantized one layer at a time
Saves      weights of the blocks: 0.5 + 1/64 + 4/(64*256) = 0.516 bytes each, against 2 (bf16) or 4 (fp32).
Costs      The weights are rounded to 16 levels, which small models feel most. Dequantizing takes
           time, as much for one token as for many. With fp16 compute the gradient is fp16: scale the loss.
Use when   The bf16 weights do not fit, or leave no room for the batch. Not when they fit: LoRA is faster and
           starts from the exact model. Not against activations, which stay.
In production   `from_pretrained(…, quantization_config=BitsAndBytesConfig(load_in_4bit=True,
           bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True))` quantizes while it loads, then
           `peft.prepare_model_for_kbit_training` and `get_peft_model`. `apply_qlora` takes such a model too.
Source     Dettmers et al., "QLoRA" (arXiv 2305.14314); bitsandbytes.

Two silent traps of bitsandbytes on CPUs are closed here. Trap 1, with AVX512-BF16: the first forward in eval
mode repacks the weights for a kernel without backward, and from then on no gradient passes the layer. Trap 2,
with AVX-512: rows of a multiple of 16, but not of the block size, are dequantized with wrong scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.machine import machine, require
from recipes_lib.core.sizes import tensor_bytes
from recipes_lib.fine_tuning.lora import add_adapters, estimate_lora, lora_config, target_linears


def apply_qlora(
    model: Any,
    *,
    rank: int = 16,
    alpha: float = 32,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    compute_dtype: torch.dtype | None = None,
) -> Any:
    """Quantize the blocks of `model` in place and put LoRA adapters on them; returns the `PeftModel`.

    A model that is in 4 bits already gets the guards and the adapters. Errors as in `quantize_nf4`, `apply_lora`.
    """
    # Bad arguments are refused before the weights are gone.
    config = lora_config(
        model, rank=rank, alpha=alpha, dropout=dropout, target_modules=target_modules
    )
    if not quantized_layers(model):
        quantize_nf4(model, compute_dtype=compute_dtype)
    for name, layer in quantized_layers(model).items():
        _block_size(name, layer, (layer.weight.blocksize,))
        _guard(layer, compute_dtype)
    return add_adapters(model, config)


def quantize_nf4(
    model: Any,
    *,
    compute_dtype: torch.dtype | None = None,
    double_quant: bool = True,
    device: torch.device | str | None = None,
) -> Any:
    """Replace the linear layers of the blocks by 4-bit ones, in place; each weight is freed before the next.

    Embeddings, norms and the output layer keep their dtype.

    Args:
        compute_dtype: of the matrix products; default is bf16 where it is native, else fp32. fp16 needs loss scaling.
        device: of the 4-bit layers, "cuda" for a model that only host memory holds (then `model.to("cuda")`).
    Raises ValueError for a model in 4 bits or with adapters, and for block weights that are not `nn.Linear`.
    """
    bnb = require("bitsandbytes")
    if quantized_layers(model):
        raise ValueError("the model is quantized already: give one in full precision")
    linears = target_linears(model)
    sizes = {name: _block_size(name, layer) for name, layer in linears.items()}
    for name, size in sizes.items():
        old = linears.pop(name)  # the only other reference is the model's
        new = bnb.nn.Linear4bit(
            old.in_features, old.out_features, bias=False, device="meta", quant_type="nf4"
        )
        new.weight = bnb.nn.Params4bit(
            old.weight.data,
            blocksize=size,
            compress_statistics=double_quant,
            quant_type="nf4",
            module=new,
        )
        new.bias = old.bias
        _guard(new, compute_dtype or (torch.bfloat16 if machine().native_bf16 else torch.float32))
        new.requires_grad_(False).train(old.training).to(
            device or old.weight.device
        )  # `to` quantizes
        model.set_submodule(name, new)
    model.is_loaded_in_4bit = True  # peft then builds its 4-bit adapter layers
    return model


def check_gradient_flow(model: Any, batch: dict[str, torch.Tensor]) -> None:
    """Raise RuntimeError unless `batch` [B, S], with labels, gives every adapter of the first block a gradient.

    One forward and backward; `.grad` stays as it is. Zero counts as none: past a layer that cuts the gradient
    the residual stream still carries some, but the adapters in front of that layer get zeros.
    """
    # B starts at zero, so the gradient of A is zero in the first step: B tells.
    adapters = {
        n: p
        for n, p in decoder_blocks(model)[0].named_parameters()
        if "lora_B" in n and p.requires_grad
    }
    if not adapters:
        raise ValueError(
            "the first block has no trainable adapter: give the model that apply_qlora returned"
        )
    loss = model(**batch, use_cache=False).loss
    gradients = torch.autograd.grad(loss, list(adapters.values()), allow_unused=True)
    dead = [n for n, g in zip(adapters, gradients, strict=True) if g is None or not g.any()]
    if dead:
        raise RuntimeError(
            f"no gradient reaches {', '.join(dead)} of the first block, which would not learn"
        )


def merge_qlora(model: Any) -> Any:
    """Dequantize the base and fold the adapters in: a plain model, in the dtype that was quantized.

    It computes what the QLoRA model computes; peft's merge rounds the sum to 4 bits again.
    Raises ValueError for a model that `apply_qlora` did not return.
    """
    if not quantized_layers(model) or not hasattr(model, "merge_and_unload"):
        raise ValueError("nothing to merge: give the model that apply_qlora returned")
    base = model.get_base_model()
    for name, layer in quantized_layers(base).items():
        state = layer.weight.quant_state
        weight = require("bitsandbytes").functional.dequantize_4bit(layer.weight.data, state)
        if name.endswith(".base_layer"):
            name = name.removesuffix(".base_layer")
            adapted = base.get_submodule(name)
            weight = weight + sum(
                adapted.get_delta_weight(adapter) for adapter in adapted.active_adapters
            )
        new = torch.nn.Linear(
            layer.in_features, layer.out_features, bias=False, device="meta"
        ).train(layer.training)
        new.weight = torch.nn.Parameter(weight.to(state.dtype))
        new.bias = None if layer.bias is None else torch.nn.Parameter(layer.bias.to(state.dtype))
        base.set_submodule(name, new)
    base = model.merge_and_unload()  # adapters of layers that are not in 4 bits
    if hasattr(base, "hf_quantizer"):
        base.hf_quantizer.remove_quantization_config(base)
    base.is_loaded_in_4bit = False
    return base.requires_grad_(True)


def quantized_layers(model: Any) -> dict[str, torch.nn.Module]:
    """The 4-bit linear layers of `model` by name."""
    kind = require("bitsandbytes").nn.Linear4bit
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def nf4_bytes(model: Any, *, double_quant: bool = True) -> int:
    """Bytes that the linear layers of the blocks take once they are in NF4, scales and code tables included."""
    total = 0
    for name, layer in target_linears(model).items():
        scales = -(-layer.weight.numel() // _block_size(name, layer))
        # The 8-bit scales come with a table of 256 codes, scales of their own and their mean.
        total += scales + 4 * (256 + -(-scales // 256) + 1) if double_quant else 4 * scales
        total += -(-layer.weight.numel() // 2) + 4 * 16  # the indices, and the 16 quantiles
    return total


def estimate_qlora(
    budget: Budget, model: Any, *, rank: int = 16, dropout: float = 0.0, target_modules: Any = "all-linear",
    double_quant: bool = True, batch_size: int, seq_len: int,
) -> Budget:  # fmt: skip
    """The budget after `apply_qlora` on `model`, which is the full-precision base as it is now."""
    sizes = {"batch_size": batch_size, "seq_len": seq_len}
    plan = estimate_lora(
        budget, model, rank=rank, dropout=dropout, target_modules=target_modules, **sizes
    )
    full = [tensor_bytes(layer.weight) for layer in target_linears(model).values()]
    weights = plan.weights - sum(full) + nf4_bytes(model, double_quant=double_quant)
    return plan.change(weights=weights, loss=max(plan.loss, max(full)))  # or one dequantized layer


def _guard(layer: Any, compute_dtype: torch.dtype | None) -> None:
    if compute_dtype is not None:
        layer.compute_dtype, layer.compute_type_is_set = compute_dtype, True
    layer.support_avx512bf16_for_cpu = False  # trap 1: never repack
    if _refuse_cut_gradient not in layer._forward_hooks.values():
        layer.register_forward_hook(_refuse_cut_gradient)


def _refuse_cut_gradient(layer: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    if torch.is_grad_enabled() and inputs[0].requires_grad and not output.requires_grad:
        raise RuntimeError(
            "a 4-bit layer passes no gradient on (trap 1): call apply_qlora before any other forward"
        )


def _block_size(name: str, layer: torch.nn.Module, choices: tuple[int, ...] = (64, 32)) -> int:
    """The first choice that divides a row; any is right where the slow, flat kernel runs."""
    if (
        len(choices) > 1 and type(layer) is not torch.nn.Linear
    ):  # one choice: it is in 4 bits already
        raise ValueError(
            f"{name} is a {type(layer).__name__} and only nn.Linear is quantized here (GPT-2 stores its weights "
            f"transposed): use apply_lora without quantization"
        )
    in_features = layer.in_features
    size = next((choice for choice in choices if in_features % choice == 0), choices[0])
    if in_features % 16 == 0 and in_features % size:  # trap 2
        raise ValueError(
            f"{name} has {in_features} inputs, a multiple of 16 but not of the block size {size}: bitsandbytes "
            f"dequantizes such rows wrongly on CPUs with AVX-512; use apply_lora on the unquantized model"
        )
    return size
