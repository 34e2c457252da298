"""A state in a snapshot: a skeleton, and the bytes of its tensors one after the other.

The skeleton has three lines of JSON: a number that identifies the form of state, and the skeletons
(`tensor_tree`) of two halves. The *lasting* half is what only `optimizer.step` writes, parameters
and optimizer state: nearly all of the bytes, in the same tensors step after step. The *passing*
half is everything else: buffers, hyperparameters, and the other parts of the state.

In the bytes, the large tensors of the lasting half come first (`tensor_bytes.Layout`).

Sharded tensors are only listed here, not stored (`shards`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchelastic import env
from torchelastic.errors import SnapshotError, TransferError
from torchelastic.snapshot.shards import Sharded, put_in, read_shapes, shapes_of, take_out
from torchelastic.tensors import dtensors, module_state, tensor_tree
from torchelastic.tensors.shard_layout import TensorShape
from torchelastic.tensors.small_state import Hyperparameters
from torchelastic.tensors.tensor_bytes import PIECE, Flat, Layout, address_of, copy_in
from torchelastic.tensors.tensor_tree import Spec
from torchelastic.torch_private import local_of, own_parameters_of

#: More threads than this are limited by memory bandwidth.
MOST_THREADS = 8


class Tree:
    """The part of a state that snapshots hold: modules, optimizers, and the rest."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        rest: Callable[[], Mapping[str, Any]],
        put_rest: Callable[[Mapping[str, Any]], None],
        form: module_state.Form,
    ) -> None:
        """`rest` returns the rest of the state, `put_rest` puts it back."""
        self.modules, self._optimizers = modules, optimizers
        self._rest, self._put_rest = rest, put_rest
        self.form, self.form_lines = str(module_state.form_number(form)), form
        #: The lasting half as last flattened, and the tensors it was made of.
        self._marks: list[tuple[int, int]] = []
        self._flat: Lasting | None = None

    def flatten(self, lasting: Lasting) -> Flat:
        """Flatten the current state, given its lasting half."""
        passing, others = tensor_tree.flatten(self._passing())
        skeleton = "\n".join((self.form, lasting.skeleton, passing)).encode()
        return Flat(skeleton, lasting.tensors, others)

    def flatten_lasting(self) -> Lasting:
        """Flatten the lasting half; again only if its tensors changed: there may be thousands."""
        marks = self._current_marks()
        if marks is None:
            return Lasting.of(self._lasting())
        if self._flat is None or marks != self._marks:
            self._marks, self._flat = marks, Lasting.of(self._lasting())
        return self._flat

    def _current_marks(self) -> list[tuple[int, int]] | None:
        """Return marks that identify the tensors; None if there is more, such as numbers."""
        values = self._values()
        if not all(isinstance(one, torch.Tensor) for one in values):
            return None
        sharded = dtensors.kind()
        return [
            (id(one), (local_of(one) if isinstance(one, sharded) else one).data_ptr())
            for one in values
        ]

    def _values(self) -> list[Any]:
        """Return the parameters and the values in the optimizers' state."""
        values: list[Any] = []
        for module in self.modules:
            for one in module_state.submodules(module):
                values += [part for part in own_parameters_of(one).values() if part is not None]
        for optimizer in self._optimizers:
            for entries in optimizer.state.values():
                values += entries.values()
        return values

    def _lasting(self) -> dict[str, Any]:
        return {
            "parameters": [dict(module.named_parameters()) for module in self.modules],
            "state": [module_state.optimizer_state(one) for one in self._optimizers],
        }

    def _passing(self) -> dict[str, Any]:
        return {
            "buffers": [module_state.named_buffers(module) for module in self.modules],
            "groups": [Hyperparameters(one).tree() for one in self._optimizers],
            "rest": self._rest(),
        }

    # --- taking it back --------------------------------------------------------------------------

    def read(self, skeleton: bytes, data: memoryview) -> Stored:
        """Read a state in memory. `SnapshotError` if it is invalid or of another training."""
        try:
            form, lasting, passing = skeleton.decode().split("\n")
            stored = Stored(
                lasting, passing, tensor_tree.specs(lasting), tensor_tree.specs(passing), data
            )
        except (ValueError, TransferError) as error:
            raise SnapshotError(f"Cannot read the snapshot: {error}.") from None
        if form != self.form:
            raise SnapshotError(
                "The snapshot belongs to a different model, or has different parts than this "
                "script's state."
            )
        if stored.layout.size > len(data):
            raise SnapshotError("The snapshot is shorter than its skeleton says.")
        return stored

    def load(self, stored: Stored, sharded: Sharded) -> None:
        """Load it into the modules, the optimizers and the rest; shards are already loaded."""
        live = self._lasting()
        take_out(live)
        own = dict(tensor_tree.tensors_by_path(live))
        tensors = stored.tensors(lambda spec: _destination(spec, own.get(spec.path)))
        count = len(stored.lasting_specs)
        lasting = tensor_tree.restore(stored.lasting, tensors[:count])
        put_in(lasting, sharded)
        passing = tensor_tree.restore(stored.passing, tensors[count:])
        self.put([lasting, passing])

    def whole(self) -> list[dict[str, Any]]:
        """Return both halves, in a form that can be sent to other ranks."""
        return [self._lasting(), self._passing()]

    def put(self, whole: Sequence[Mapping[str, Any]]) -> None:
        """Load both halves; a tensor already in its place is not copied."""
        lasting, passing = whole
        for module, parameters, buffers in zip(
            self.modules, lasting["parameters"], passing["buffers"], strict=True
        ):
            module_state.load_module(module, {"parameters": parameters, "buffers": buffers})
        for optimizer, state, groups in zip(
            self._optimizers, lasting["state"], passing["groups"], strict=True
        ):
            module_state.load_optimizer(optimizer, {"state": state, "groups": groups})
        self._put_rest(passing["rest"])


@dataclass(frozen=True)
class Lasting:
    """The lasting half, flattened."""

    skeleton: str
    tensors: Sequence[torch.Tensor]
    #: The sharded tensors, which are not in it.
    sharded: Sharded

    @classmethod
    def of(cls, tree: dict[str, Any]) -> Lasting:
        sharded = take_out(tree)
        said = {"sharded": shapes_of(sharded)} if sharded else {}
        return cls(*tensor_tree.flatten(tree | said), sharded)


@dataclass(frozen=True)
class Stored:
    """A state in memory."""

    lasting: str
    passing: str
    lasting_specs: Sequence[Spec]
    passing_specs: Sequence[Spec]
    data: memoryview

    @property
    def layout(self) -> Layout:
        lasting, passing = self.lasting_specs, self.passing_specs
        return Layout.of([one.nbytes for one in lasting], [one.nbytes for one in passing])

    def sharded(self) -> dict[str, TensorShape]:
        """Return the tensors that are sharded over ranks, which are stored elsewhere."""
        nowhere = [
            torch.empty(one.shape, dtype=one.dtype, device="meta") for one in self.lasting_specs
        ]
        tree = tensor_tree.restore(self.lasting, nowhere)
        return read_shapes(tree.get("sharded", {}))

    def tensors(self, room_for: Callable[[Spec], torch.Tensor]) -> list[torch.Tensor]:
        """Return its tensors, copied into existing ones where they fit: lasting, then passing."""
        layout, begin = self.layout, address_of(self.data)
        found = [room_for(spec) for spec in (*self.lasting_specs, *self.passing_specs)]
        places = (*layout.lasting, *layout.passing)
        fill([(one, begin + at) for one, at in zip(found, places, strict=True)])
        return found


def _destination(spec: Spec, own: torch.Tensor | None) -> torch.Tensor:
    """Return the existing tensor if the bytes fit, since optimizers and DDP refer to it."""
    return own.detach() if own is not None and spec.describes(own) else spec.empty()


# --- copying into tensors -------------------------------------------------------------------------

#: A tensor without gaps, and the address of its bytes.
Source = tuple[torch.Tensor, int]
#: Destination, source, and number of bytes.
Move = tuple[int, int, int]


def fill(sources: Sequence[Source]) -> None:
    """Fill every tensor with its bytes, in parallel on the worker's cores.

    Copying is the smaller part of the time. A new worker has touched neither the pages of the
    memory it maps nor those of its new optimizer tensors, and getting a page takes longer than
    filling it. So several threads wait for pages at the same time.
    """
    for tensor, address in sources:
        if tensor.device.type != "cpu":
            copy_in(tensor, address)
    shares = list(shared_out([one for one in sources if one[0].device.type == "cpu"]))
    threads = min(threads_of(os.sched_getaffinity(0)), len(shares))
    if threads <= 1:
        for share in shares:
            _move(share)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="torchelastic-load") as pool:
        for _ in pool.map(_move, shares):
            pass  # an error of a thread is raised here


def threads_of(cores: set[int]) -> int:
    """Return this worker's share of the cores, which it shares with others on its node.

    >>> threads_of({0, 1})
    2
    """
    workers = max(int(env.get("LOCAL_WORLD_SIZE", "1")), 1)
    return max(min(len(cores) // workers, MOST_THREADS), 1)


def shared_out(sources: Sequence[Source]) -> Iterator[list[Move]]:
    """Split the moves into shares of about equal size."""
    share: list[Move] = []
    left = PIECE
    for tensor, address in sources:
        begin, size = tensor.data_ptr(), tensor.nbytes
        at = 0
        while at < size:
            count = min(left, size - at)
            share.append((begin + at, address + at, count))
            at, left = at + count, left - count
            if not left:
                yield share
                share, left = [], PIECE
    if share:
        yield share


def _move(share: Sequence[Move]) -> None:
    """Copy without holding the GIL."""
    for move in share:
        ctypes.memmove(*move)
