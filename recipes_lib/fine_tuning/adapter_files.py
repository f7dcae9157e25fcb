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
           `merge_qlora`), then `save_merged` and `check_merged`. A bit that the disk has flipped is
           not found: keep a checksum for that.
In production   `model.save_pretrained(folder)` and `PeftModel.from_pretrained(base, folder)`,
           which this calls; they compare shapes only. vLLM serves adapters with
           `--enable-lora --lora-modules name=folder`.
Source     peft documentation, "Checkpoint format".

Shapes: B rows, S sequence.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.model.evaluating import evaluating
from recipes_lib.core.model.fingerprint import fingerprint
from recipes_lib.core.model.loading import kept_in_fp32
from recipes_lib.core.model.marks import ADDED_TOKENS, LEARNT_END
from recipes_lib.core.model.probe import undone_on_error
from recipes_lib.core.model.vocabulary import grow_vocabulary, stop_at, stops_of

BASE_FILE = "base_model.json"
CARD_FILE = "README.md"

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


def base_fingerprint(model: Any) -> str:
    """A short hash of the base's weights for adapters, the same in fp32 and bf16.

    Take it before adapters and quantization.
    """
    quantized = any(getattr(p, "quant_state", None) for p in model.parameters())
    if quantized or _has_adapters(model):
        raise ValueError(
            "adapters and 4-bit weights hide the base: take the fingerprint before you apply them"
        )
    return fingerprint(model.named_parameters(), rounded_to=torch.bfloat16)


def save_adapter(
    model: Any,
    folder: Path | str,
    *,
    base: str,
    card: str | None = None,
    overwrite: bool = False,
    tokenizer: Any = None,
) -> int:
    """Save the adapters of a `PeftModel` with the fingerprint of their base; returns the bytes.

    The folder appears whole or not at all: it is written beside, as `.<name>-…`, and renamed.

    Args:
        base: `base_fingerprint` of the model before it was adapted or quantized.
        card: the text of README.md, in the place of peft's, which has gaps to fill in.
        overwrite: replace a folder that is there already, which otherwise raises ValueError.
        tokenizer: kept beside the adapter, with its template, added tokens and end mark.
    """
    folder = Path(folder)
    if not _has_adapters(model):
        raise ValueError("the model has no adapters to save: give what apply_lora returned")
    if folder.exists() and not overwrite:
        raise ValueError(f"{folder} is there already: name another folder, or pass overwrite=True")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        with without_hub_warnings():
            # Rows of added tokens are saved by themselves, and not the table that holds them.
            added = getattr(model.get_base_model(), ADDED_TOKENS, {})
            tables = False if added else "auto"
            model.save_pretrained(new, save_embedding_layers=tables)
        facts = {"fingerprint": base, "added_tokens": added}
        if getattr(model.get_base_model(), LEARNT_END, None) is not None:
            facts["stops"] = stops_of(model)
        (new / BASE_FILE).write_text(json.dumps(facts))
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        if card is not None:
            (new / CARD_FILE).write_text(card)
        if folder.exists():
            os.replace(folder, Path(scratch) / "old")
        os.replace(new, folder)
    return sum(file.stat().st_size for file in folder.iterdir())


def load_adapter(model: Any, folder: Path | str, *, trainable: bool = False) -> Any:
    """Put saved adapters on the base `model`, in full precision; returns the `PeftModel`.

    Any kind of adapter that peft knows. The base gets the tokens that were added for it, and stops
    where it was taught to. A folder without a fingerprint, as others write it, is checked for
    shapes only.
    """
    from peft import PeftModel

    if _has_adapters(model):
        raise ValueError("the model has adapters already: give the base model")
    facts = _check_fingerprint(model, Path(folder))
    grow_vocabulary(model, facts.get("added_tokens", {}))
    if facts.get("stops"):
        stop_at(model, None, facts["stops"])
    # peft warns of what is missing and leaves it as it was drawn, and it stops halfway.
    with undone_on_error(model, f"the adapter in {folder}"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about peft itself
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return PeftModel.from_pretrained(model, folder, is_trainable=trainable)


def save_merged(
    model: Any, folder: Path | str, *, tokenizer: Any, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Save a merged model and its tokenizer, the weights in `dtype`.

    Those that its class keeps in fp32, such as routers, are saved in fp32. The tokenizer gets the
    end mark that the adapters have learnt.
    """
    if _has_adapters(model):
        raise ValueError("the model still has adapters: merge them first (merge_lora, merge_qlora)")
    if Path(folder).exists():
        raise ValueError(f"{folder} is there already: name another folder")
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
    end = getattr(model, LEARNT_END, None)
    if end is not None and tokenizer.eos_token_id != end:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.save_pretrained(folder)


def check_merged(folder: Path | str, model: Any, rows: torch.Tensor) -> float:
    """How far the logits of a saved merged model are from those of `model`, on `rows` [B, S]."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    with evaluating(model):
        expected = model(input_ids=rows, use_cache=False).logits.float().cpu()  # [B, S, V]
    with evaluating(loaded):
        found = loaded(input_ids=rows.cpu(), use_cache=False).logits.float()
    return ((found - expected).norm() / expected.norm()).item()


@contextlib.contextmanager
def without_hub_warnings() -> Iterator[None]:
    """Without peft's warnings that it cannot ask the hub."""
    with warnings.catch_warnings():
        for message in ("Could not find a config file", "Unable to fetch remote file"):
            warnings.filterwarnings("ignore", message=message)
        yield


def _has_adapters(model: Any) -> bool:
    # A PeftModel has this attribute, and so has a model whose layers peft has replaced.
    return hasattr(model, "peft_config")


def _check_fingerprint(model: Any, folder: Path) -> dict[str, Any]:
    """What the folder of adapters says of its base; another one is refused, if it names one."""
    recorded = folder / BASE_FILE
    if not recorded.is_file():
        return {}
    facts = json.loads(recorded.read_text())
    if facts["fingerprint"] != base_fingerprint(model):
        raise ValueError(f"the adapter in {folder} was trained on another base: load that one")
    return facts
