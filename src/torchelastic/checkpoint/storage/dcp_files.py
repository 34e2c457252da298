"""Files of torch.distributed.checkpoint: each rank writes its part, rank 0 completes them.

torch's own `save` agrees on a plan by collectives, in the background over a separate process group,
which hangs when the world changes. Here the plan needs no agreement (`write_plan`), and the ranks
communicate through the storage: each leaves a record of its files, and rank 0 builds torch's
`.metadata` from the records. torch's `load` can read the result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import (
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from torchelastic.checkpoint import write_plan as planning
from torchelastic.checkpoint.catalog import Draft
from torchelastic.checkpoint.marker import File
from torchelastic.checkpoint.storage import safe_pickle
from torchelastic.checkpoint.storage.storage import Storage
from torchelastic.errors import CheckpointError
from torchelastic.tensors.dtensors import local_of, region_of
from torchelastic.tensors.shard_layout import Box, Region

_METADATA = ".metadata"


@dataclass(frozen=True)
class Part:
    """The record of the files that a rank has written."""

    plan: SavePlan
    results: list[WriteResult]
    files: dict[str, File]


# --- writing --------------------------------------------------------------------------------------


def write_part(
    draft: Draft, plan: SavePlan, tensors: Mapping[str, torch.Tensor], rank: int
) -> Part:
    """Write this rank's files."""
    writer = _writer(draft)
    # torch names files after a plan's place in the list.
    named = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    results = writer.write_data(named, _Staged(plan, tensors)).wait()
    return Part(plan, results, dict(draft.files))


def complete(draft: Draft, parts: Sequence[Part]) -> dict[str, File]:
    """Write the metadata of all parts; return every file of the checkpoint."""
    _, metadata = create_default_global_save_plan([part.plan for part in parts])
    _writer(draft).finish(metadata, [part.results for part in parts])
    files = {name: file for part in parts for name, file in part.files.items()}
    return files | {_METADATA: draft.files[_METADATA]}


def part_from_bytes(data: bytes) -> Part:
    part = safe_pickle.loads(data)
    if not isinstance(part, Part):
        raise CheckpointError("The record of a rank's checkpoint files is unreadable.")
    return part


def _writer(draft: Draft) -> FileSystemWriter:
    """Return torch's writer over our storage, which syncs every file as it is closed."""
    writer = FileSystemWriter(draft.directory, sync_files=False)
    files: Any = _Files(draft.storage, draft)
    writer.fs, writer.path = files, draft.directory
    return writer


class _Staged(DefaultSavePlanner):
    """Finds the tensors of a plan where they were copied to."""

    def __init__(self, plan: SavePlan, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors
        self._boxes: dict[str, list[Box]] = {}
        for item in plan.items:
            if item.tensor_data is not None:
                chunk = item.tensor_data.chunk
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                self._boxes.setdefault(item.index.fqn, []).append(box)

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor, boxes = self._tensors[index.fqn], self._boxes[index.fqn]
        if len(boxes) == 1 or index.offset is None:
            return tensor
        return planning.at_offset(Region.of_boxes(boxes), tensor, index.offset)


class _Files(FileSystemBase):
    """Our storage, as torch's writers and readers want it."""

    def __init__(self, storage: Storage, draft: Draft | None = None) -> None:
        self._storage, self._draft = storage, draft

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if "w" not in mode:
            with self._storage.reader(os.fspath(path)) as stream:
                yield stream
            return
        if self._draft is None:
            raise CheckpointError(f"{path} is not open for writing.")
        name = os.fspath(path).rpartition("/")[2]
        summed = self._draft.writer(name)
        try:
            yield _Once(summed)
        finally:
            # On an error too: otherwise the garbage collector would write it at some later time.
            self._draft.close_file(name, summed)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._storage.make(os.fspath(path))

    def exists(self, path: str | os.PathLike[str]) -> bool:
        directory, _, name = os.fspath(path).rpartition("/")
        return name in self._storage.sizes(directory)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        old, new = os.fspath(path), os.fspath(new_path)
        self._storage.rename_file(old, new)
        if self._draft is not None:
            files = self._draft.files
            files[new.rpartition("/")[2]] = files.pop(old.rpartition("/")[2])

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._storage.remove_file(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Once:
    """A stream whose `close` does nothing: torch closes it too early."""

    def __init__(self, stream: Any) -> None:
        self.write, self.tell, self.flush = stream.write, stream.tell, stream.flush

    def close(self) -> None:
        """Ignored: `create_stream` closes it."""


# --- reading --------------------------------------------------------------------------------------


def read(storage: Storage, directory: str, like: Any = None, *, rank: int = 0) -> tuple[Any, Any]:
    """Return the shared tree, and the `own` data of `rank` (None if it had none).

    Tensors are new, on the CPU. Where `like` has a DTensor, the result is a DTensor with the same
    layout, of which only this rank's shard is read; so a state can be read by any number of ranks.
    `like` is a tree, or a function from the stored metadata by name to DTensors by name.
    """
    reader = _reader(storage, directory)
    metadata = reader.read_metadata()
    names = {
        name: found
        for name, found in metadata.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata) and _concerns(name, rank)
    }
    shards = like(names) if callable(like) else _dtensors(like)
    tensors = {name: _room(found, shards.get(name)) for name, found in names.items()}
    _fill(reader, metadata, tensors)
    shared = planning.restore(planning.from_tensor(tensors[planning.SKELETON]), tensors)
    own = tensors.get(planning.own_skeleton(rank))
    return shared, None if own is None else planning.restore(planning.from_tensor(own), tensors)


def _reader(storage: Storage, directory: str) -> _Reader:
    reader = _Reader(directory)
    files: Any = _Files(storage)
    reader.fs, reader.path = files, directory
    return reader


def _dtensors(like: Any) -> dict[str, DTensor]:
    if like is None:
        return {}
    _, tensors = planning.flatten(like)
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}


def _concerns(name: str, rank: int) -> bool:
    return not name.startswith(f"{planning.OWN}.") or name.startswith(f"{planning.OWN}.{rank}.")


def _room(found: TensorStorageMetadata, like: DTensor | None) -> torch.Tensor:
    if like is None:
        return torch.empty(found.size, dtype=found.properties.dtype)
    return torch.empty_like(like, dtype=found.properties.dtype, requires_grad=False)


def _fill(reader: _Reader, metadata: Metadata, tensors: dict[str, torch.Tensor]) -> None:
    """Load like torch's `load`, but for one rank alone, without a process group."""
    planner = _Parts(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    plans = reader.prepare_global_plan(planner.create_global_plan([local]))
    reader.read_data(planner.finish_plan(plans[0]), planner).wait()


class _Parts(DefaultLoadPlanner):
    """Reads this rank's part of DTensors, whatever its boxes are."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        everything, self._parts = self.state_dict, dict[str, Region]()
        self.state_dict = {}
        items: list[ReadItem] = []
        for name, tensor in everything.items():
            if isinstance(tensor, DTensor):
                found = self.metadata.state_dict_metadata[name]
                if not isinstance(found, TensorStorageMetadata) or found.size != tensor.size():
                    raise CheckpointError(
                        f"'{name}' in the checkpoint does not have the shape {tuple(tensor.shape)}."
                    )
                self._parts[name] = part = region_of(name, tensor)
                items += create_read_items_for_chunk_list(name, found, planning.chunks(part))
            else:
                self.state_dict[name] = tensor
        plain = super().create_local_plan()
        self.state_dict = everything
        return LoadPlan([*plain.items, *items])

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        if (part := self._parts.get(index.fqn)) is None or index.offset is None:
            return super().lookup_tensor(index)
        local = local_of(self.state_dict[index.fqn])
        return planning.at_offset(part, local, index.offset)


class _Reader(FileSystemReader):
    """torch's reader, but the pickled metadata may contain only metadata classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self.fs.concat_path(self.path, _METADATA), "rb") as stream:
            metadata = safe_pickle.load(cast(IO[bytes], stream))
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{self.path}/{_METADATA} is not checkpoint metadata.")
        return metadata
