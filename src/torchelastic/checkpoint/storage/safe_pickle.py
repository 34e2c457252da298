"""Unpickling without running code: torch's metadata, and our own records and jobs.

torch writes the metadata of a checkpoint as a pickle, and a pickle can call any function. Here only
the listed data classes are allowed.
"""

from __future__ import annotations

import io
import pickle
from typing import IO, Any

import torch

from torchelastic.errors import CheckpointError

_DCP = "torch.distributed.checkpoint"
_OURS = "torchelastic.checkpoint"

#: By module. No name has a dot: `os.system` would be found in any module that imports os.
_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    f"{_DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    f"{_DCP}.storage": {"WriteResult"},
    f"{_DCP}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_OURS}.storage.dcp_files": {"Part"},
    f"{_OURS}.fence": {"Fence", "WorldStart"},
    f"{_OURS}.save_job": {"Job", "Written"},
    f"{_OURS}.marker": {"File", "History"},
    f"{_OURS}.staging": {"Slot"},
}


def dumps(value: object) -> bytes:
    return pickle.dumps(value)


def loads(data: bytes | bytearray) -> Any:
    return load(io.BytesIO(data))


def load(stream: IO[bytes]) -> Any:
    """Unpickle; CheckpointError if it contains any other class."""
    return _Unpickler(stream).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        found = vars(torch).get(name) if module == "torch" else None
        if isinstance(found, torch.dtype | torch.layout):
            return found
        raise CheckpointError(
            f"Refused to unpickle '{module}.{name}': only plain data is allowed here."
        )
