"""What a family keeps in fp32 when it is loaded in 16 bits, and what is rounded by hand has to.

A router that is rounded sends tokens to other experts, and some recurrences lose their memory. So
many families of transformers name such parameters, and `from_pretrained(dtype=…)` leaves them in
fp32. Of buffers, most stay: the frequencies of rotary positions need their digits. But a few, such
as the table of positions of XGLM, are made in the dtype of the model, and its code relies on that.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch


def kept_in_fp32(model: Any, dtype: torch.dtype) -> set[str]:
    """The names of the parameters of a Hugging Face model that stay in fp32 beside `dtype`.

    The model's class names some for fp16 alone, and some for bf16 as well.
    """
    patterns = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        patterns |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not patterns:
        return set()
    # As in transformers: a part of the name, in which a star stands for anything.
    parts = [re.escape(pattern).replace(r"\*", ".*") for pattern in sorted(patterns)]
    named = re.compile("|".join(parts))
    return {name for name, _ in model.named_parameters() if named.search(name)}


def buffers_made_in(model: Any, dtype: torch.dtype) -> set[str]:
    """The names of the buffers that are fp32 in `model`, and that its class makes in `dtype`.

    Inside of peft's or torch.compile's wrapper as well. Empty for what is no Hugging Face model.
    """
    inside = _hugging_face_model(model)
    if inside is None:
        return set()
    with torch.device("meta"):
        made = type(inside)._from_config(copy.deepcopy(inside.config), dtype=dtype)
    in_16_bits = {name for name, buffer in made.named_buffers() if buffer.dtype is dtype}
    found = {
        id(buffer)
        for name, buffer in inside.named_buffers()
        if name in in_16_bits and buffer.dtype is torch.float32
    }
    # By the names that `model` has for them: a wrapper puts something before each.
    return {name for name, buffer in model.named_buffers() if id(buffer) in found}


def _hugging_face_model(model: torch.nn.Module) -> Any:
    """`model`, or the one in its wrappers; None if there is none.

    The class is asked: a wrapper passes on what it has not itself, so the object says yes.
    """
    for module in model.modules():
        if hasattr(type(module), "_from_config"):
            return module
    return None
