"""The way out of a sharded checkpoint: safetensors files that every other program reads.

Each rank writes its parts, rank 0 joins the files into whole tensors, and no rank ever holds the
whole model. `AutoModelForCausalLM.from_pretrained(folder)` loads the result.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from recipes_lib.core.model.kept_in_fp32 import kept_in_fp32
from recipes_lib.core.ranks import rank
from recipes_lib.core.ranks.agreement import agree, same_error_on_all_ranks
from recipes_lib.parallel.checkpoint import files_of_all_ranks

PARTS_FOLDER = "sharded"  # PyTorch's name for what the ranks write before it is joined


def export_safetensors(
    folder: Path | str,
    *,
    model: Any,
    dtype: torch.dtype | None = None,
    file_bytes: int = 5 * 10**9,
) -> None:
    """Write all weights of `model`, and its configuration, as a folder for `from_pretrained`.

    All ranks call it. The tokenizer is not part of a model: save it into the same folder.

    Args:
        model: a Hugging Face model, sharded, inside of DDP, or plain.
        dtype: of the files, but for what the model's class keeps in fp32; None for the weights'.
        file_bytes: of the weights of a file at most, if no single one has more.
    Raises ValueError on every rank if the folder holds a model already.
    """
    folder = Path(folder)
    if distributed.is_initialized():
        agree(folder=str(folder), dtype=dtype, there=_models_in(folder))
    inside = getattr(model, "module", model)  # of DDP
    require_new_folder(folder)

    # A tied weight under its first name only: `from_pretrained` ties the other one again.
    names = dict(inside.named_parameters(remove_duplicate=False))
    tied = names.keys() - dict(inside.named_parameters()).keys()
    weights = get_model_state_dict(model)
    weights = {name: tensor for name, tensor in weights.items() if name not in tied}
    if dtype is not None:
        weights = _in_dtype(weights, inside, dtype)
    writer = dcp.HuggingFaceStorageWriter(
        str(folder),
        fqn_to_index_mapping=_file_numbers(weights, file_bytes),
        # Both are needed. Without the first, the folder holds the part of one rank, and no error
        # tells. Without the second, each rank's file holds parts of tensors.
        save_distributed=True,
        enable_consolidation=True,
    )
    with files_of_all_ranks():
        dcp.save(weights, storage_writer=writer)
    # No rank returns before rank 0 is done, and none waits for it if it fails.
    with same_error_on_all_ranks():
        if rank() == 0:
            shutil.rmtree(folder / PARTS_FOLDER)
            config = copy.deepcopy(inside.config)
            config.dtype = next(iter(weights.values())).dtype
            config.save_pretrained(folder)


def require_new_folder(folder: Path) -> None:
    """Raise ValueError if `folder` holds a model already. A long run asks before it begins."""
    found = _models_in(folder)
    if found:
        raise ValueError(f"{folder} holds {found[0]} already: give another folder")


def _in_dtype(
    weights: dict[str, torch.Tensor], model: Any, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """In fp32 what the class keeps so; whole numbers, as in buffers of positions, stay."""
    in_fp32 = kept_in_fp32(model, dtype)
    cast = {}
    for name, tensor in weights.items():
        if name in in_fp32:
            cast[name] = tensor.to(torch.float32)
        elif tensor.is_floating_point():
            cast[name] = tensor.to(dtype)
        else:
            cast[name] = tensor
    return cast


def _file_numbers(weights: dict[str, torch.Tensor], file_bytes: int) -> dict[str, int]:
    """The number of the file of each weight, from 1 on, one after the other."""
    numbers = {}
    number = 1
    filled = 0
    for name, tensor in weights.items():
        size = tensor.numel() * tensor.element_size()  # of the whole tensor, on all ranks alike
        if filled > 0 and filled + size > file_bytes:
            number += 1
            filled = 0
        numbers[name] = number
        filled += size
    return numbers


def _models_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))
