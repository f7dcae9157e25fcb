"""Adapter files: save adapters, and put them on the base that they belong to, and on no other.

Problem    An adapter is a correction of one particular model. Loaded onto another of the same
           shape (the base instead of the instruct version, a newer release) it runs without an
           error and answers badly.
Idea       Keep beside the adapter a fingerprint of the base: names, shapes, and some values of
           every weight rounded to bf16, so that the base in fp32 and bf16 is the same (fp16
           rounds otherwise). Compare first.
Saves      A fine-tuned model is a file of megabytes; one base in memory serves many of them.
Costs      4 bytes per adapter parameter on disk. Unmerged adapters slow every layer down: merge
           them to deploy.
Use when   An adapter leaves the process that trained it.
Not when   The model goes to an engine that cannot apply adapters: merge (`merge_lora`,
           `merge_qlora`), then `save_merged`, and `check_merged` in a fresh process.
In production   `model.save_pretrained(folder)` and `PeftModel.from_pretrained(base, folder)`,
           which this calls; they compare shapes only. vLLM serves adapters with
           `--enable-lora --lora-modules name=folder`.
Source     peft documentation, "Checkpoint format".

Shapes: B rows, S sequence; an adapter is A [r, in] and B [out, r] beside a weight [out, in].
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.checks import check_flag
from recipes_lib.core.data.evaluation import evaluating
from recipes_lib.core.measure.machine import require
from recipes_lib.core.model.fingerprint import fingerprint
from recipes_lib.core.model.kept_in_fp32 import kept_in_fp32
from recipes_lib.core.model.sizes import tensor_bytes

BASE_FILE = "base_model.json"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
OLDER_WEIGHTS_FILE = "adapter_model.bin"
CARD_FILE = "README.md"

# What a process without our model in memory does: load the folder, compute logits, save them.
FRESH_PROCESS = """
import json, sys, torch
from transformers import AutoModelForCausalLM

folder, rows, file = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
with torch.no_grad():
    output = model(input_ids=torch.tensor(json.loads(rows)), use_cache=False)
torch.save(output.logits.float(), file)
"""

# --- the idea: what a learner can copy ------------------------------------------------------------


def save_trained_tensors(model: torch.nn.Module, file: Path | str) -> None:
    """An adapter file is no more than this: the tensors that trained, by name."""
    trained = {name: p.detach().cpu() for name, p in model.named_parameters() if p.requires_grad}
    torch.save(trained, file)


def load_trained_tensors(model: torch.nn.Module, file: Path | str) -> None:
    """Put them into a model with the same adapters. Nothing asks whether its base is the same."""
    trained = torch.load(file, weights_only=True)
    model.load_state_dict(trained, strict=False)  # the base's own weights are not in the file


# --- the technique --------------------------------------------------------------------------------


def save_adapter(
    model: Any,
    folder: Path | str,
    *,
    base: str,
    card: str | None = None,
    overwrite: bool = False,
) -> int:
    """Save the adapters of a `PeftModel` with the fingerprint of their base; returns the bytes.

    The folder appears whole or not at all. With `overwrite`, it replaces one that is there: an
    error leaves the old one, a kill may leave it beside, as `.<name>-...-replaced`.

    Args:
        base: `base_fingerprint` of the model before it was adapted or quantized.
        card: the text of README.md, in the place of peft's, which has gaps to fill in.
    Raises ValueError for a model without adapters, and for a folder that is there already without
    `overwrite`.
    """
    check_flag(overwrite=overwrite)
    folder = Path(folder)
    if not isinstance(model, require("peft").PeftModel):
        raise ValueError(
            f"{type(model).__name__} has no adapters to save: "
            f"give the model that apply_lora returned"
        )
    if folder.exists() and not overwrite:
        raise ValueError(
            f"{folder} is there already: name another folder, or pass overwrite=True to replace it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with without_hub_warnings():
            model.save_pretrained(scratch)
        facts = {"fingerprint": base, "sha256": _checksum(scratch / WEIGHTS_FILE)}
        (scratch / BASE_FILE).write_text(json.dumps(facts))
        if card is not None:
            (scratch / CARD_FILE).write_text(card)
        scratch.chmod(0o755)  # mkdtemp lets nobody else read
        _put_in_place(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return sum(file.stat().st_size for file in folder.iterdir())


def load_adapter(model: Any, folder: Path | str, *, trainable: bool = False) -> Any:
    """Put saved adapters on the base `model`, in full precision; returns the `PeftModel`.

    Any kind of adapter that peft knows. A folder without a fingerprint, as others write it, is
    checked for the names and shapes of the layers only, and only if it holds LoRA. Raises
    ValueError, and leaves `model` as it was, if the folder holds no adapter or a damaged one, if
    `model` has adapters already or is not the base that they were trained on.
    """
    check_flag(trainable=trainable)
    folder = Path(folder)
    peft = require("peft")
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{folder} holds no adapter: give the folder that save_adapter or save_pretrained wrote"
        )
    if _has_adapters(model):
        raise ValueError("the model has adapters already: give the base model")
    config = _checked_config(folder / CONFIG_FILE)
    _check_fingerprint(model, folder)
    _check_weights_file(folder)
    if config["peft_type"] == "LORA":
        _check_shapes(model, folder, config)
    with _unchanged_after_an_error(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about peft itself
        loaded = peft.PeftModel.from_pretrained(model, folder, is_trainable=trainable)
        if config["peft_type"] == "LORA":
            _refuse_different_adapters(loaded, folder)
    return loaded


def base_fingerprint(model: Any) -> str:
    """A short hash of the weights of `model`, the same in fp32 and bf16.

    Take it before adapters and quantization. Raises ValueError for a model that has either.
    """
    quantized = any(getattr(p, "quant_state", None) for p in model.parameters())
    if quantized or _has_adapters(model):
        raise ValueError(
            "adapters and 4-bit weights hide the base: take the fingerprint before you apply them"
        )
    return fingerprint(model.named_parameters(), rounded_to=torch.bfloat16)


def save_merged(
    model: Any, folder: Path | str, *, tokenizer: Any, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Save a merged model and its tokenizer, the weights in `dtype`.

    Those that its class keeps in fp32, such as routers, are saved in fp32.

    Raises ValueError for adapters that are left, and for a folder that is there already.
    """
    if _has_adapters(model):
        raise ValueError("the model still has adapters: merge them first (merge_lora, merge_qlora)")
    if Path(folder).exists():
        raise ValueError(f"{folder} is there already: name another folder")
    if not hasattr(tokenizer, "save_pretrained"):
        raise ValueError(
            f"tokenizer={tokenizer!r}: give the one of the base model, load_tokenizer(name)"
        )
    # One by one: `model.to(dtype)` would round the frequencies of the rotary embedding, too.
    in_fp32 = kept_in_fp32(model, dtype)
    for name, parameter in model.named_parameters():
        # A model that was cast as a whole has these in 16 bits, too.
        own_dtype = torch.float32 if name in in_fp32 else dtype
        parameter.data = parameter.data.to(own_dtype)
    model.config.dtype = dtype
    # To save, transformers imports DeepSpeed where it is installed, which wonders aloud about a
    # machine without a GPU unless it is told.
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_merged(folder: Path | str, model: Any, rows: torch.Tensor) -> float:
    """How far the logits of a saved model are from those of `model`, on `rows` [B, S].

    A fresh process loads the folder: what was in memory proves nothing about what is in the
    folder. Returns the norm of the difference over the norm. Raises ValueError with the process's
    error if it cannot load.
    """
    with evaluating(model):
        expected = model(input_ids=rows, use_cache=False).logits.float().cpu()  # [B, S, V]
    with tempfile.TemporaryDirectory() as scratch:
        file = f"{scratch}/logits"
        arguments = [str(folder), json.dumps(rows.tolist()), file]
        done = subprocess.run(
            [sys.executable, "-c", FRESH_PROCESS, *arguments], capture_output=True, text=True
        )
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
            raise ValueError(f"{folder} does not load in a fresh process: {said[-1]}")
        found = torch.load(file)  # [B, S, V]
    return ((found - expected).norm() / expected.norm()).item()


def _put_in_place(scratch: Path, folder: Path) -> None:
    """Give `scratch` the name `folder`; what had that name is deleted at the end."""
    replaced = scratch.with_name(f"{scratch.name}-replaced")
    try:
        if folder.exists():  # moved aside, not deleted
            os.replace(folder, replaced)
        os.replace(scratch, folder)
    finally:
        # After an error there is no new one: the old one gets its name back.
        if replaced.exists() and not folder.exists():
            os.replace(replaced, folder)
        shutil.rmtree(replaced, ignore_errors=True)


@contextlib.contextmanager
def without_hub_warnings() -> Iterator[None]:
    """Without peft's warnings that it cannot ask the hub.

    It would compare the vocabulary with that of the base on the hub. Offline it cannot, and saves
    the adapters as they are, which is right.
    """
    with warnings.catch_warnings():
        for message in ("Could not find a config file", "Unable to fetch remote file"):
            warnings.filterwarnings("ignore", message=message)
        yield


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _has_adapters(model: Any) -> bool:
    # A PeftModel has this attribute, and so has a model whose layers peft has replaced.
    return hasattr(model, "peft_config")


def _read_json(file: Path) -> dict[str, Any]:
    """What a file of the folder says. Raises ValueError for one that is cut off or damaged."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(_damaged(file)) from error
    if not isinstance(content, dict):
        raise ValueError(_damaged(file))
    return content


def _checked_config(file: Path) -> dict[str, Any]:
    """What a configuration says, of a kind that peft knows; LoRA's with its rank.

    peft finds out what is wrong with a configuration halfway, with adapters on the model.
    """
    from peft import PeftType

    config = _read_json(file)
    kind = config.get("peft_type")
    known = [of_peft.value for of_peft in PeftType]
    if kind not in known:
        raise ValueError(
            f"{file} has the peft_type {kind!r}, which the installed peft does not know: "
            f"update peft, or save the adapter anew"
        )
    rank = config.get("r")
    if kind == "LORA" and (not isinstance(rank, int) or rank < 1):
        raise ValueError(_damaged(file))
    return config


@contextlib.contextmanager
def _unchanged_after_an_error(model: Any) -> Iterator[None]:
    """peft freezes the base and puts it into eval mode, before anything can be compared."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    in_training = [module for module in model.modules() if module.training]
    try:
        yield
    except Exception:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module in in_training:
            module.training = True
        raise


def _refuse_different_adapters(loaded: Any, folder: Path) -> None:
    """Take the adapters off and raise ValueError if only one of model and file knows a tensor.

    peft leaves those of the model as they are drawn, and leaves out those of the file.
    """
    from peft import get_peft_model_state_dict
    from peft.utils import load_peft_weights

    on_model = get_peft_model_state_dict(loaded, save_embedding_layers=False)
    stored = load_peft_weights(str(folder), device="cpu")
    different = sorted(name for name in on_model.keys() ^ stored.keys() if ".lora_" in name)
    if different:
        loaded.unload()
        raise ValueError(
            f"the weights and the configuration in {folder} name different adapters, "
            f"{len(different)} of them, such as {different[0]}: copy or save the adapter anew"
        )


def _damaged(file: Path) -> str:
    return f"{file} is damaged or not complete: copy or save the adapter anew"


def _check_fingerprint(model: Any, folder: Path) -> None:
    """Refuse another base than the one that the folder names, if it names one."""
    recorded = folder / BASE_FILE
    if not recorded.is_file():
        return
    if _read_json(recorded).get("fingerprint") == base_fingerprint(model):
        return
    name = _read_json(folder / CONFIG_FILE).get("base_model_name_or_path")
    raise ValueError(
        f"the adapter in {folder} was trained on another base ({name}): load that one first"
    )


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check_weights_file(folder: Path) -> None:
    """The weights are there, whole, and those that the folder's checksum is of, if it has one."""
    from safetensors import SafetensorError, safe_open

    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        if (folder / OLDER_WEIGHTS_FILE).is_file():
            return  # a pickle, which peft reads
        raise ValueError(f"{folder} has no {WEIGHTS_FILE}: copy or save the adapter anew")
    try:
        with safe_open(weights, "pt"):
            pass
    except SafetensorError as error:
        raise ValueError(_damaged(weights)) from error
    # safetensors has no checksums: a bit that a disk has flipped would be loaded.
    recorded = folder / BASE_FILE
    if recorded.is_file() and _read_json(recorded).get("sha256") != _checksum(weights):
        raise ValueError(_damaged(weights))


def _check_shapes(model: Any, folder: Path, config: dict[str, Any]) -> None:
    """Each pair A [r, in], B [out, r] of LoRA must fit the rank and a layer of that name.

    peft checks it as well, but it stops halfway, with adapters on the model.
    """
    if config.get("target_parameters") or config.get("layer_replication"):
        # One pair of all experts has a multiple of the rank, and copies of layers are not there
        # yet: left to peft.
        return
    rank = config["r"]
    if config.get("rank_pattern"):
        rank = None  # pairs have ranks of their own
    layers = dict(model.named_modules())
    for name, found_rank, size in _pairs(folder / WEIGHTS_FILE):
        if rank not in (None, found_rank):
            raise ValueError(
                f"{folder}: {name} has rank {found_rank}, and {CONFIG_FILE} says r={rank}: "
                f"copy or save the adapter anew"
            )
        weight = getattr(layers.get(name), "weight", None)
        if weight is not None and size in weight.shape:
            continue
        found = "no such layer"
        if weight is not None:
            found = f"a weight of {tuple(weight.shape)}"
        raise ValueError(
            f"the adapter in {folder} was trained on another base: its {name} has size {size}, "
            f"and this {type(model).__name__} has {found}"
        )


def _pairs(weights: Path) -> Iterator[tuple[str, int, int]]:
    """Of each A and each B: the name of its layer, its rank, and its other size.

    Nothing of an older file, a pickle.
    """
    from safetensors import safe_open

    if not weights.is_file():
        return
    with safe_open(weights, "pt") as file:
        for key in file.keys():  # noqa: SIM118  (not a dictionary)
            # "base_model.model.<layer>.lora_A.weight"
            name, _, kind = key.removeprefix("base_model.model.").partition(".lora_")
            shape = file.get_slice(key).get_shape()
            if len(shape) != 2:
                continue  # a bias [out], or of a convolution [r, in, height, width]
            if kind.startswith("A."):
                yield name, shape[0], shape[1]  # [r, in]
            elif kind.startswith("B."):
                yield name, shape[1], shape[0]  # [out, r]


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_adapter_bytes(model: Any) -> int:
    """Bytes of the weights that `save_adapter` will write, without the small files beside them."""
    return sum(tensor_bytes(p) for name, p in model.named_parameters() if "lora_" in name)
