"""The way out of a sharded checkpoint: safetensors files that every other program reads.

Each rank writes its parts, rank 0 joins the files into whole tensors, and no rank ever holds the
whole model. `AutoModelForCausalLM.from_pretrained(folder)` loads the result.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from recipes_lib.core.ranks import rank
from recipes_lib.core.ranks.agreement import agree, same_error_on_all_ranks
from recipes_lib.parallel.checkpoint import files_of_all_ranks

PARTS_FOLDER = "sharded"  # PyTorch's name for what the ranks write before it is joined


def export_safetensors(folder: Path | str, *, model: Any) -> None:
    """Write all weights of a sharded model, and its configuration, for `from_pretrained`.

    All ranks call it. `model` is sharded, inside of DDP, or plain. The file has the dtypes of its
    weights. The tokenizer is not part of a model: save it into the same folder.
    """
    folder = Path(folder)
    agree(folder=str(folder), there=_models_in(folder))
    inside = getattr(model, "module", model)  # of DDP
    require_new_folder(folder)

    # A tied weight under its first name only: `from_pretrained` ties the other one again.
    names = dict(inside.named_parameters(remove_duplicate=False))
    tied = names.keys() - dict(inside.named_parameters()).keys()
    weights = get_model_state_dict(model)
    weights = {name: tensor for name, tensor in weights.items() if name not in tied}
    writer = dcp.HuggingFaceStorageWriter(
        str(folder),
        fqn_to_index_mapping=dict.fromkeys(weights, 1),
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


def _models_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))
