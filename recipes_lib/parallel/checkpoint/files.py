"""Are the files of a sharded checkpoint what was written?

PyTorch writes a checksum with each part and does not read it: a bit that a disk has flipped is
loaded, and a damaged file is found after other weights were overwritten. So all is read once before
anything is loaded, an N-th by each of N ranks. The list of the parts has a checksum of its own
beside it, and may name no other classes than those of such lists: another one could run code.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from recipes_lib.core.model.run_state import check_checksums
from recipes_lib.core.ranks import rank, world_size
from recipes_lib.parallel.checkpoint.latest import METADATA

SEAL = "metadata.sha256"
ADVICE = "write the name of an older folder into LATEST, or start again"

# What PyTorch's list of the parts is made of, beside dtypes.
METADATA_MODULE = "torch.distributed.checkpoint.metadata"
CLASSES = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its name in Python 3.13
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (METADATA_MODULE, "BytesStorageMetadata"),
    (METADATA_MODULE, "ChunkStorageMetadata"),
    (METADATA_MODULE, "Metadata"),
    (METADATA_MODULE, "MetadataIndex"),
    (METADATA_MODULE, "StorageMeta"),
    (METADATA_MODULE, "TensorProperties"),
    (METADATA_MODULE, "TensorStorageMetadata"),
    (METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
}


class ListUnpickler(pickle.Unpickler):
    """Reads PyTorch's list of the parts, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of this name, if such a list may hold it."""
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a list of parts")


def seal(place: Path) -> None:
    """Write the checksum of the list of the parts. One rank calls it when all have written."""
    with (place / SEAL).open("w", encoding="utf-8") as file:
        file.write(_checksum((place / METADATA).read_bytes()))
        file.flush()
        os.fsync(file.fileno())


def read_list(place: Path) -> Metadata:
    """PyTorch's list of the parts. ValueError if it is damaged."""
    path = place / METADATA
    content = path.read_bytes()
    sealed = place / SEAL
    # A checkpoint of an earlier version has no seal.
    if sealed.is_file() and sealed.read_text(encoding="utf-8") != _checksum(content):
        raise ValueError(f"{path} is damaged (its checksum differs): {ADVICE}")
    try:
        return ListUnpickler(io.BytesIO(content)).load()
    # Damaged bytes are any other program for the machine that a pickle is.
    except Exception as error:
        raise ValueError(f"{path} is damaged ({error}): {ADVICE}") from error


def check_files(place: Path) -> None:
    """Raise ValueError if a part is not as it was written. Each rank reads its share of them."""
    held = {}
    for index, part in read_list(place).storage_data.items():
        held[part.relative_path, part.offset, part.length] = index.fqn
    everywhere = sorted(held)
    for name, offset, length in everywhere[rank() :: world_size()]:
        path = place / name
        try:
            with path.open("rb") as file:
                file.seek(offset)
                part = io.BytesIO(file.read(length))
            check_checksums(part)
            # PyTorch reads settings later in the way that runs a file's code; this one does not.
            part.seek(0)
            torch.load(part, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{path} is as it was written, but {held[name, offset, length]} in it has a class "
                f"that torch.load does not take, because it may be code of a stranger: if you "
                f"trust who wrote it, allow the class by torch.serialization.add_safe_globals; if "
                f"not, {ADVICE}"
            ) from error
        except (OSError, RuntimeError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is damaged ({error}): {ADVICE}") from error


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
