"""What a smaller model takes from the larger one: its settings, and its tensors.

Part of student. Which rows and columns belong to a channel or a head say student_mlps and
student_heads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recipes_lib.compression.student.heads import attention_of, with_fewer_heads
from recipes_lib.compression.student.mlps import mlp_of
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.linears import refuse_quantized
from recipes_lib.core.model.sizes import quantization_tensors

# Settings of a configuration that are a list with one entry per block.
PER_BLOCK = ("layer_types", "no_rope_layers", "mlp_layer_types")

# What a configuration calls the width of the feed-forward, beside `intermediate_size`.
NAMES_OF_WIDTH = ("intermediate_size", "n_inner", "ffn_dim")

# Attributes of modules that tell where a block is, or how wide it is, and not what it computes.
PLACE_AND_WIDTH = {"training", "layer_idx", "in_features", "out_features", "intermediate_size"}
PLACE_AND_WIDTH |= {"nf", "nx", "num_heads", "num_attention_heads", "num_key_value_heads"}


# --- settings -------------------------------------------------------------------------------------


def smaller_config(
    teacher: Any,
    *,
    blocks: Sequence[int],
    channels: Sequence[torch.Tensor] | None,
    heads: Sequence[torch.Tensor] | None,
) -> Any:
    """A copy of the teacher's configuration for a model with these blocks, channels and heads."""
    whole = copy.deepcopy(teacher.config)
    config = whole.get_text_config()
    config.num_hidden_layers = len(blocks)
    for name in PER_BLOCK:
        entries = vars(config).get(name)  # not what is computed of the number of blocks (Mamba)
        if isinstance(entries, list | tuple) and len(entries) == len(decoder_blocks(teacher)):
            setattr(config, name, [entries[number] for number in blocks])
    if channels is not None:
        known = [name for name in NAMES_OF_WIDTH if hasattr(config, name)]
        if not known:
            raise ValueError(
                f"the configuration of {type(teacher).__name__} has none of "
                f"{', '.join(NAMES_OF_WIDTH)}: leave its channels as they are"
            )
        for name in known:
            setattr(config, name, len(channels[0]))
    if heads is not None:
        with_fewer_heads(config, groups=len(heads[0]))
    return whole


def require_plain_model(teacher: Any) -> None:
    """Raise ValueError for a model whose weights cannot be copied block by block."""
    config = teacher.config.get_text_config()
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(
            f"blocks of {type(teacher).__name__} share keys and values with others: "
            f"a model without some of them computes something else; give one that shares none"
        )
    if hasattr(teacher, "peft_config"):
        raise ValueError("the teacher has adapters: give teacher.merge_and_unload()")
    refuse_quantized(teacher, way_out="make the student of the model in full precision")
    quantized = getattr(config, "quantization_config", None) is not None
    for parameter in teacher.parameters():
        quantized = quantized or not parameter.is_floating_point()
        quantized = quantized or bool(quantization_tensors(parameter))
    if quantized:
        raise ValueError("the teacher is quantized: load it in 16 or 32 bits")


def require_same_settings(student: Any, teacher: Any, *, blocks: Sequence[int]) -> None:
    """Raise ValueError if a block of the student would compute otherwise than its original.

    Blocks read settings by their number: a sliding window in every other block, no RoPE in every
    fourth, scores that are scaled by the number itself (an option of GPT-2).
    """
    of_teacher = decoder_blocks(teacher)
    of_student = decoder_blocks(student)
    if len(of_student) != len(blocks):
        raise ValueError(
            f"{type(teacher).__name__} makes {len(of_student)} blocks where {len(blocks)} are "
            f"asked for, because its configuration lists them elsewhere: keep all blocks"
        )
    for number, block in enumerate(of_student):
        original = of_teacher[blocks[number]]
        ours = _settings(block)
        theirs = _settings(original)
        # What only the original has is a mark of a technique, and none of the model's settings.
        shared = [name for name in theirs if name in ours]
        different = [name for name in shared if ours[name] != theirs[name]]
        if different:
            raise ValueError(
                f"block {blocks[number]} of {type(teacher).__name__} computes otherwise as block "
                f"{number} of a student, for its {different[0]} depends on its number or on the "
                f"number of heads: keep all blocks and heads, or choose others"
            )


def require_same_shapes(student: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if the student's class makes a tensor in another shape than it was cut to.

    With fewer heads: one norm over all heads, a parameter for each, or heads that get wider.
    """
    for name, tensor in student.state_dict().items():
        if name in tensors and tensors[name].shape != tensor.shape:
            raise ValueError(
                f"{name} of {type(student).__name__} would be {list(tensor.shape)} in the student, "
                f"and {list(tensors[name].shape)} of it are known: leave its heads as they are"
            )


def _settings(block: nn.Module) -> dict[str, Any]:
    """The plain attributes of all modules in a block, but those of its place and its width."""
    found = {}
    for name, module in block.named_modules():
        for attribute, value in vars(module).items():
            plain = isinstance(value, bool | int | float | str | None)
            if plain and not attribute.startswith("_") and attribute not in PLACE_AND_WIDTH:
                found[f"{name}.{attribute}"] = value
    return found


# --- tensors --------------------------------------------------------------------------------------


def tensors_of_student(
    teacher: Any,
    *,
    blocks: Sequence[int],
    channels: Sequence[torch.Tensor] | None,
    heads: Sequence[torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """The student's state dict, made of the teacher's."""
    prefix = _name_of_blocks(teacher)
    new_numbers = {old: new for new, old in enumerate(blocks)}
    found = {}
    for name, tensor in teacher.state_dict().items():
        if not name.startswith(prefix):
            found[name] = tensor
            continue
        number, _, inside = name.removeprefix(prefix).partition(".")
        old = int(number)
        if old not in new_numbers:
            continue
        block = decoder_blocks(teacher)[old]
        if channels is not None:
            tensor = mlp_of(block).narrowed(inside, tensor, channels[old])
        if heads is not None:
            tensor = attention_of(block, teacher.config).narrowed(inside, tensor, heads[old])
        found[f"{prefix}{new_numbers[old]}.{inside}"] = tensor
    return found


def _name_of_blocks(model: Any) -> str:
    """What the names of all tensors in blocks begin with: "model.layers."."""
    blocks = decoder_blocks(model)
    return next(f"{name}." for name, module in model.named_modules() if module is blocks)
