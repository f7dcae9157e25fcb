"""Adapter files: save adapters, and put them on the base that they were trained on, and on no other.

Problem    An adapter is a correction of one particular model. Loaded onto another of the same shape (the base instead
           of the instruct version, a newer release) it runs without an error and answers badly.
Idea       Keep beside the adapter a fingerprint of the base: names, shapes, and the first values of every weight
           rounded to bf16, so that the base in fp32 and bf16 is the same (fp16 rounds otherwise). Compare first.
Saves      A fine-tuned model is a file of megabytes; one base in memory serves many of them.
Costs      4 bytes per adapter parameter on disk. Unmerged adapters slow every layer down: merge them to deploy.
Use when   An adapter leaves the process that trained it.
Not when   The model goes to an engine that cannot apply adapters: merge (`merge_lora`, `merge_qlora`), then
           `save_merged`, and `check_merged` in a fresh process.
In production   `model.save_pretrained(folder)` and `PeftModel.from_pretrained(base, folder)`, which this calls; they
           compare shapes only. vLLM serves adapters with `--enable-lora --lora-modules name=folder`.
Source     peft documentation, "Checkpoint format".
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.machine import require
from recipes_lib.core.sizes import tensor_bytes

BASE_FILE = "base_model.json"
FRESH_PROCESS = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", local_files_only=True)
with torch.no_grad():
    torch.save(model(input_ids=torch.tensor(json.loads(sys.argv[2])), use_cache=False).logits.float(), sys.argv[3])
"""
VALUES = 64  # of each weight: another model differs in the first ones already


def save_adapter(model: Any, folder: Path | str, *, base: str, overwrite: bool = False) -> int:
    """Save the adapters of a `PeftModel` with the fingerprint of their base; returns the bytes written.

    The folder appears whole or not at all. Raises ValueError for a model without adapters, and for a folder that is
    there already unless `overwrite`, which replaces it: an error leaves the old one, a kill may leave it beside, as
    `.<name>-...-replaced`.

    Args:
        base: `base_fingerprint` of the model before it was adapted or quantized.
    """
    folder = Path(folder)
    if not isinstance(model, require("peft").PeftModel):
        raise ValueError(
            f"{type(model).__name__} has no adapters to save: give the model that apply_lora returned"
        )
    if folder.exists() and not overwrite:
        raise ValueError(
            f"{folder} is there already: name another folder, or pass overwrite=True to replace it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    replaced = scratch.with_name(f"{scratch.name}-replaced")
    try:
        model.save_pretrained(scratch)
        (scratch / BASE_FILE).write_text(json.dumps({"fingerprint": base}))
        scratch.chmod(0o755)
        if folder.exists():  # moved aside, not deleted, until the new one is in its place
            os.replace(folder, replaced)
        os.replace(scratch, folder)
    finally:
        if replaced.exists() and not folder.exists():
            os.replace(replaced, folder)
        for left in (scratch, replaced):
            shutil.rmtree(left, ignore_errors=True)
    return sum(file.stat().st_size for file in folder.iterdir())


def load_adapter(model: Any, folder: Path | str, *, trainable: bool = False) -> Any:
    """Put saved adapters on the base `model`, in full precision; returns the `PeftModel`.

    Raises ValueError before anything is loaded if the folder holds no adapter, if `model` has adapters already or is
    not the base that they were trained on. A folder without a fingerprint, as others write it, is checked for the
    names and shapes of the layers only.
    """
    folder, peft = Path(folder), require("peft")
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds no adapter: give the folder that save_adapter or save_pretrained wrote"
        )
    if isinstance(model, peft.PeftModel) or hasattr(model, "peft_config"):
        raise ValueError("the model has adapters already: give the base model")
    recorded = folder / BASE_FILE
    if recorded.is_file() and json.loads(recorded.read_text())["fingerprint"] != base_fingerprint(
        model
    ):
        name = json.loads((folder / "adapter_config.json").read_text()).get(
            "base_model_name_or_path"
        )
        raise ValueError(
            f"the adapter in {folder} was trained on another base ({name}): load that one first"
        )
    _check_shapes(model, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about peft itself
        return peft.PeftModel.from_pretrained(model, folder, is_trainable=trainable)


def save_merged(
    model: Any, folder: Path | str, *, tokenizer: Any, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Save a merged model and its tokenizer, the weights in `dtype`. Raises ValueError for adapters that are left,
    and for a folder that is there already.

    The parameters are cast one by one: `model.to(dtype)` would round the frequencies of the rotary embedding, too.
    """
    if hasattr(model, "peft_config"):
        raise ValueError("the model still has adapters: merge them first (merge_lora, merge_qlora)")
    if Path(folder).exists():
        raise ValueError(f"{folder} is there already: name another folder")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_merged(folder: Path | str, model: Any, rows: torch.Tensor) -> float:
    """Load a merged model in a fresh process and return how far its logits of `rows` [B, S] are from those of `model`:
    the norm of the difference over the norm. What was in memory proves nothing about what is in the folder.

    Raises ValueError with the process's error if the folder cannot be loaded.
    """
    was_training = model.training
    with torch.no_grad():
        expected = model.eval()(input_ids=rows, use_cache=False).logits.float().cpu()
    model.train(was_training)
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-c",
            FRESH_PROCESS,
            str(folder),
            json.dumps(rows.tolist()),
            f"{scratch}/logits",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
            raise ValueError(f"{folder} does not load in a fresh process: {said[-1]}")
        return ((torch.load(f"{scratch}/logits") - expected).norm() / expected.norm()).item()


def base_fingerprint(model: Any) -> str:
    """A short hash of the weights of `model`, the same in fp32 and bf16; take it before adapters and quantization.

    Raises ValueError for a model that has either.
    """
    if hasattr(model, "peft_config") or any(
        getattr(p, "quant_state", None) for p in model.parameters()
    ):
        raise ValueError(
            "adapters and 4-bit weights hide the base: take the fingerprint before you apply them"
        )
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()[:VALUES].to("cpu", torch.bfloat16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def estimate_adapter_bytes(model: Any) -> int:
    """Bytes of the weights that `save_adapter` will write, without the small files beside them."""
    return sum(tensor_bytes(p) for name, p in model.named_parameters() if "lora_" in name)


def _check_shapes(model: Any, folder: Path) -> None:
    """Each pair A [r, in], B [out, r] must fit a layer of that name; peft stops halfway, with adapters on the model."""
    from safetensors import safe_open

    layers = dict(model.named_modules())
    if not (folder / "adapter_model.safetensors").is_file():
        return  # other formats: peft compares
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118  (not a dictionary)
            name, _, kind = key.removeprefix("base_model.model.").partition(".lora_")
            if not kind.startswith(("A.", "B.")):
                continue
            weight = getattr(layers.get(name), "weight", None)
            size = file.get_slice(key).get_shape()[1 if kind.startswith("A.") else 0]
            if weight is None or size not in weight.shape:
                found = "no such layer" if weight is None else f"a weight of {tuple(weight.shape)}"
                raise ValueError(
                    f"the adapter in {folder} was trained on another base: its {name} has size {size}, and this "
                    f"{type(model).__name__} has {found}"
                )
