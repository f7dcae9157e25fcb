"""An export in another process, while the notebook goes on: its noise in a file, its result kept.

An export of a language model takes minutes of one core and gigabytes of memory, and prints hundreds
of lines. So a process of its own does it:

    job = in_background(export_language_model, model=model, path="smollm2.pte")
    …                                             the next cells
    exported = job.result(timeout=600)            an ExportedFile, or the error of the export

The result is kept under the path, with a hash of everything that it depends on: the weights, the
settings, the code of the export, the versions of the libraries. The same job a second time is done
at once.

    smollm2.pte             the file: it appears when it is complete
    smollm2.pte.job         the hash, and what the function returned; written last
    smollm2.pte.log         what the libraries printed
    smollm2.pte.work-…      a folder while the job runs: its arguments, and the unfinished file

The process reads a pipe from this one. When this one ends, by whatever cause, the pipe ends: the
process deletes its folder, and ends as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from filelock import FileLock
from torch import Tensor, nn

from recipes_lib.core.checks import check_number
from recipes_lib.core.measure.machine import runs_dir

PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = ("edge", "core")  # of the package: the code that makes a file
LIBRARIES = ("torch", "torchao", "executorch", "transformers", "onnx", "gguf")
LOOK_AGAIN = 0.2  # seconds between two looks at the job before
LINES_SHOWN = 20  # of the log, in the report of a process that was killed


class Job:
    """A function at work in another process; `in_background` makes one.

    path   of the file that it makes
    log    of what it prints
    """

    def __init__(self, path: Path, key: str, work: Path | None, process: Any) -> None:
        self.path = path
        self.log = _beside(path, "log")
        self._key = key
        self._work = work
        self._process = process
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether a result or an error is there."""
        return self._process is None or self._process.poll() is not None

    def result(self, timeout: float | None = None) -> Any:
        """Wait for what the function returns; its errors are raised here.

        Args:
            timeout: seconds to wait; None waits as long as it takes.
        Raises TimeoutError if it is not done by then (and it works on), RuntimeError with the last
        lines of the log if the process was killed, and what the function raised.
        """
        if timeout is not None:
            check_number(least=0, timeout=timeout)
        if self._process is not None:
            self._wait(timeout)
        kept = _kept(self.path, self._key)
        if kept is not None:
            self._tidy()
            return kept.value
        if self._error is None:
            self._error = self._read_error()
            self._tidy()
        raise self._error

    def cancel(self) -> None:
        """End the process with all that it has started. Nothing of the job stays."""
        if self.done:  # its number may be that of another process by now
            self._tidy()
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._tidy()

    def _wait(self, timeout: float | None) -> None:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(
                f"{self.path.name} is not ready after {timeout:g} s: wait on, or read {self.log}"
            ) from error

    def _read_error(self) -> BaseException:
        """What the function raised, or how the process ended."""
        failure = self._work / "error"
        if failure.exists():
            return pickle.loads(failure.read_bytes())
        code = self._process.returncode
        if code == 0:
            return RuntimeError(
                f"{self.path} was made, and then another job has written it with other arguments: "
                f"give each job a path of its own"
            )
        lines = []
        for log in (self.log, (self._work / self.path.name).with_suffix(".log")):
            if log.exists():
                lines += log.read_text(errors="replace").splitlines()
        last = "\n".join(lines[-LINES_SHOWN:])
        return RuntimeError(
            f"the process ended with code {code} and made no file. It printed last:\n{last}"
        )

    def _tidy(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            shutil.rmtree(self._work, ignore_errors=True)

    def __del__(self) -> None:
        """A notebook that forgets its job ends it."""
        if not self.done:
            self.cancel()


@dataclasses.dataclass(frozen=True)
class Kept:
    """What stands in the `.job` file: a hash of all arguments, and what the function returned."""

    key: str
    bytes: int  # of the file, to see whether it was changed since
    value: Any


def in_background(
    function: Callable[..., Any],
    *,
    path: str | Path | None = None,
    after: Job | None = None,
    **arguments: Any,
) -> Job:
    """Call `function(path=…, **arguments)` in another process, and go on.

    Args:
        function: of a module, such as `export_language_model`; it takes `path` and writes this
            file.
        path: of the file; None is one under `runs/edge`, named by the hash.
        after: a job that has to end first, well or badly: exports one after the other leave a core
            for the notebook.
        arguments: what can be pickled: models, tensors, numbers, texts.
    Returns a Job. If the file is there already, from the same arguments, its result is at hand.
    Raises ValueError for a function that another process cannot import, and for arguments that
    cannot be pickled.
    """
    _check_function(function)
    key = key_of(function, arguments)
    if path is None:
        path = runs_dir() / "edge" / f"{function.__name__}-{key[:12]}.pte"
    path = Path(path).resolve()
    if _kept(path, key) is not None:
        return Job(path, key, work=None, process=None)
    path.parent.mkdir(parents=True, exist_ok=True)
    _delete_leftovers(path)
    work = Path(tempfile.mkdtemp(prefix=f"{path.name}.work-{os.getpid()}-", dir=path.parent))
    # Written before the process begins: whatever happens to the model here, the job has its own.
    try:
        torch.save((function, path, key, arguments, _process_of(after)), work / "task")
    # The last one is that of layers with masks.
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        shutil.rmtree(work)
        raise ValueError(
            f"the arguments cannot be sent to another process ({error}): give plain models, "
            f"without hooks and without layers that a recipe has changed"
        ) from error
    with _beside(path, "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "recipes_lib.edge._export_process", str(work)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            # A session of its own: an interrupt of the notebook's cell does not end the job.
            start_new_session=True,
        )
    return Job(path, key, work, process)


def key_of(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """A hash of the function's name and code, all arguments, and the libraries' versions."""
    digest = hashlib.sha256()
    _add(digest, f"{function.__module__}.{function.__qualname__}")
    for source in sources_of(function):
        _add(digest, source.read_bytes())
    for name in sorted(arguments):
        _add(digest, name)
        _add(digest, arguments[name])
    for library in LIBRARIES:
        _add(digest, f"{library} {_version(library)}")
    return digest.hexdigest()


def sources_of(function: Callable[..., Any]) -> list[Path]:
    """The files whose code decides what `function` writes, in an order that stays the same.

    That of its module; for a function of this package also all of its floors `FOLDERS`.
    """
    found = {Path(inspect.getsourcefile(function)).resolve()}
    if PACKAGE in next(iter(found)).parents:
        for folder in FOLDERS:
            found |= set((PACKAGE / folder).rglob("*.py"))
    return sorted(found)


def _add(digest: Any, value: Any) -> None:
    """Weights by their bytes, settings as text, everything else as it is pickled."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        digest.update(f"{plain.dtype} {list(plain.shape)}".encode())
        digest.update(plain.view(-1).view(torch.uint8).numpy())
    elif isinstance(value, nn.Module):
        digest.update(repr(value).encode())
        if hasattr(value, "config"):
            digest.update(value.config.to_json_string(use_diff=False).encode())
        if getattr(value, "generation_config", None) is not None:  # which tokens end a text
            digest.update(value.generation_config.to_json_string(use_diff=False).encode())
        for name, tensor in value.state_dict().items():
            digest.update(name.encode())
            _add(digest, tensor)
    elif isinstance(value, tuple | list):
        for part in value:
            _add(digest, part)
    elif hasattr(value, "get_vocab"):  # a tokenizer: its pickle is not the same each time
        digest.update(_tokenizer_text(value).encode())
    else:
        digest.update(pickle.dumps(value))
    digest.update(b"\0")  # [1, 23] is not [12, 3]


def _tokenizer_text(tokenizer: Any) -> str:
    """All that a file takes from a tokenizer: words, merges, special tokens, form of a chat."""
    special = sorted(getattr(tokenizer, "special_tokens_map", {}).items())
    chat = getattr(tokenizer, "chat_template", None)
    described = sorted(tokenizer.get_vocab().items())
    if hasattr(tokenizer, "backend_tokenizer"):
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        for of_last_call in ("padding", "truncation"):
            described.pop(of_last_call, None)
    return repr((type(tokenizer), special, chat, described))


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _check_function(function: Callable[..., Any]) -> None:
    module = getattr(function, "__module__", "__main__")
    name = getattr(function, "__qualname__", "")
    found = getattr(sys.modules.get(module), name, None)
    if module == "__main__" or found is not function:
        raise ValueError(
            f"{function!r} is no function of a module: another process cannot import it; give one "
            f"of the package, such as export_language_model"
        )


def _environment() -> dict[str, str]:
    """The package is found wherever this process has found it; one thread leaves the other core."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return dict(os.environ) | own


def _delete_leftovers(path: Path) -> None:
    """Folders of jobs that were killed together with the process that had started them."""
    for folder in path.parent.glob(f"{path.name}.work-*"):
        parent = folder.name.rpartition("work-")[2].partition("-")[0]
        if not psutil.pid_exists(int(parent)):
            shutil.rmtree(folder, ignore_errors=True)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


def _kept(path: Path, key: str) -> Kept | None:
    """The result of a job with this key, if its file is still what it was."""
    record = _beside(path, "job")
    if not record.exists() or not path.exists():
        return None
    try:
        kept = pickle.loads(record.read_bytes())
    except Exception:  # of another version, or not ours at all: as if there were none
        return None
    if kept.key != key or kept.bytes != path.stat().st_size:
        return None
    return kept


def _process_of(job: Job | None) -> tuple[int, float] | None:
    """The number of a job's process and when it began; together no other process has them."""
    if job is None or job.done:
        return None
    try:
        return job._process.pid, psutil.Process(job._process.pid).create_time()
    except psutil.NoSuchProcess:  # it has ended in this moment
        return None


# --- in the other process -------------------------------------------------------------------------


def work_on(folder: Path) -> None:
    """The other process: call the function, keep its result, or write down its error."""
    threading.Thread(target=_end_with_parent, args=[folder], daemon=True).start()
    function, path, key, arguments, before = torch.load(folder / "task", weights_only=False)
    (folder / "task").unlink()  # as large as the model
    _wait_for(before)
    try:
        # Two notebooks that want the same file: the second one waits, and finds it.
        with FileLock(str(_beside(path, "lock"))):
            if _kept(path, key) is None:
                _keep(path, key, _call(function, folder, path, arguments))
    except BaseException as error:
        traceback.print_exc(file=sys.stdout)
        _write_whole(folder / "error", pickle.dumps(_portable(error)))
        sys.exit(1)
    shutil.rmtree(folder, ignore_errors=True)


def _wait_for(before: tuple[int, float] | None) -> None:
    """Return when this process has ended."""
    if before is None:
        return
    number, began = before
    while True:
        try:
            process = psutil.Process(number)
            ended = process.status() == psutil.STATUS_ZOMBIE  # nobody has asked for its result yet
            if ended or process.create_time() != began:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(LOOK_AGAIN)


def _call(function: Callable[..., Any], folder: Path, path: Path, arguments: dict) -> Any:
    """The function writes into the job's folder; a complete file moves to its place."""
    unfinished = folder / path.name
    own_log = unfinished.with_suffix(".log")  # where exports put the noise of libraries
    try:
        value = function(path=unfinished, **arguments)
    finally:
        if own_log.exists():
            print(own_log.read_text(errors="replace"))
    # Beside a new file the record of an older one would lie: of other weights, with equal bytes.
    _beside(path, "job").unlink(missing_ok=True)
    os.replace(unfinished, path)
    for field in getattr(value, "__dataclass_fields__", {}):
        if getattr(value, field) == unfinished:
            value = dataclasses.replace(value, **{field: path})
    return value


def _keep(path: Path, key: str, value: Any) -> None:
    kept = Kept(key, bytes=path.stat().st_size, value=value)
    _write_whole(_beside(path, "job"), pickle.dumps(kept))


def _write_whole(path: Path, content: bytes) -> None:
    """Whoever reads it finds all of it, or nothing."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def _portable(error: BaseException) -> BaseException:
    """The error itself if it can travel, otherwise its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _end_with_parent(folder: Path) -> None:
    """In a thread: the pipe ends when the parent does."""
    # Not `sys.stdin.read()`: it holds a lock, and Python aborts where it ends with that lock held.
    os.read(sys.stdin.fileno(), 1)  # nothing is ever written: this is the end
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    # As a module with its own name, so that what it pickles can be read by the parent.
    from recipes_lib.edge._export_process import work_on as work

    work(Path(sys.argv[1]))
