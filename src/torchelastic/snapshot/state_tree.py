"""A state in a snapshot: a skeleton, and the bytes of its tensors one after the other.

The skeleton has three lines of JSON: a number that identifies the form of state, and the skeletons
(`tensor_tree`) of two halves. The *lasting* half is what only `optimizer.step` writes, parameters
and optimizer state: nearly all of the bytes, in the same tensors step after step. The *passing*
half is everything else: buffers, hyperparameters, and the other parts of the state.

In the bytes, the large tensors of the lasting half come first (`Layout`).

Sharded tensors are only listed here, not stored (`dtensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchelastic import torch_private
from torchelastic.errors import SnapshotError, TransferError
from torchelastic.snapshot import dtensors, fill_tensors
from torchelastic.snapshot.dtensors import Sharded
from torchelastic.snapshot.shard_boxes import Shape
from torchelastic.tensors import module_state, tensor_tree
from torchelastic.tensors.tensor_bytes import SMALL, address_of
from torchelastic.tensors.tensor_tree import Spec

#: The alignment of tensors in a buffer.
ALIGNMENT = 64


@dataclass(frozen=True)
class Flat:
    """A flattened state. Its tensors are the state's own memory wherever possible."""

    skeleton: bytes
    lasting: Sequence[torch.Tensor]
    passing: Sequence[torch.Tensor]
    #: The tensors whose version counts writes to large lasting tensors, where not their own.
    watched: Sequence[torch.Tensor] | None = None


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
        self._modules, self._optimizers = modules, optimizers
        self._rest, self._put_rest = rest, put_rest
        self.form = str(module_state.form_number(form))
        #: The lasting half as last flattened, and the tensors it was made of.
        self._marks: list[tuple[int, int]] = []
        self._flat: _Lasting | None = None

    def flatten(self) -> Flat:
        """Flatten the current state."""
        lasting = self._flatten_lasting()
        passing, others = tensor_tree.flatten(self._passing())
        skeleton = "\n".join((self.form, lasting.skeleton, passing)).encode()
        return Flat(skeleton, lasting.tensors, others)

    def sharded(self) -> Sharded:
        """Return the sharded tensors, which are not in it."""
        return self._flatten_lasting().sharded

    def _flatten_lasting(self) -> _Lasting:
        """Flatten the lasting half again only if its tensors changed: there may be thousands."""
        marks = self._current_marks()
        if marks is None:
            return _Lasting.of(self._lasting())
        if self._flat is None or marks != self._marks:
            self._marks, self._flat = marks, _Lasting.of(self._lasting())
        return self._flat

    def _current_marks(self) -> list[tuple[int, int]] | None:
        """Return marks that identify the tensors; None if there is more, such as numbers."""
        tensors: list[torch.Tensor] = []
        for module in self._modules:
            tensors.extend(module.parameters())
        for optimizer in self._optimizers:
            for entries in optimizer.state.values():
                for value in entries.values():
                    if not isinstance(value, torch.Tensor):
                        return None
                    tensors.append(value)
        return [(id(one), one.data_ptr()) for one in tensors]

    def _lasting(self) -> dict[str, Any]:
        return {
            "parameters": [dict(module.named_parameters()) for module in self._modules],
            "state": [module_state.optimizer_tree(one)["state"] for one in self._optimizers],
        }

    def _passing(self) -> dict[str, Any]:
        return {
            "buffers": [dict(module.named_buffers()) for module in self._modules],
            "groups": [module_state.optimizer_tree(one)["groups"] for one in self._optimizers],
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
        dtensors.take_out(live)
        own = dict(tensor_tree.tensors_by_path(live))
        tensors = stored.tensors(lambda spec: _destination(spec, own.get(spec.path)))
        count = len(stored.lasting_specs)
        lasting = tensor_tree.restore(stored.lasting, tensors[:count])
        dtensors.put_in(lasting, sharded)
        passing = tensor_tree.restore(stored.passing, tensors[count:])
        self.put([lasting, passing])

    def whole(self) -> list[dict[str, Any]]:
        """Return both halves, in a form that can be sent to other ranks."""
        return [self._lasting(), self._passing()]

    def put(self, whole: Sequence[Mapping[str, Any]]) -> None:
        """Load both halves; a tensor already in its place is not copied."""
        lasting, passing = whole
        for module, parameters, buffers in zip(
            self._modules, lasting["parameters"], passing["buffers"], strict=True
        ):
            module_state.load_module(module, {"parameters": parameters, "buffers": buffers})
        for optimizer, state, groups in zip(
            self._optimizers, lasting["state"], passing["groups"], strict=True
        ):
            module_state.load_optimizer(optimizer, {"state": state, "groups": groups})
        self._put_rest(passing["rest"])


@dataclass(frozen=True)
class _Lasting:
    """The lasting half, flattened."""

    skeleton: str
    tensors: Sequence[torch.Tensor]
    sharded: Sharded

    @classmethod
    def of(cls, tree: dict[str, Any]) -> _Lasting:
        sharded = dtensors.take_out(tree)
        said = {"sharded": dtensors.shapes_of(sharded)} if sharded else {}
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

    def sharded(self) -> dict[str, Shape]:
        """Return the tensors that are sharded over ranks, which are stored elsewhere."""
        nowhere = [
            torch.empty(one.shape, dtype=one.dtype, device="meta") for one in self.lasting_specs
        ]
        tree = tensor_tree.restore(self.lasting, nowhere)
        return dtensors.read_shapes(tree.get("sharded", {}))

    def tensors(self, room_for: Callable[[Spec], torch.Tensor]) -> list[torch.Tensor]:
        """Return its tensors, copied into existing ones where they fit: lasting, then passing."""
        layout, begin = self.layout, address_of(self.data)
        found = [room_for(spec) for spec in (*self.lasting_specs, *self.passing_specs)]
        places = (*layout.lasting, *layout.passing)
        fill_tensors.load([(one, begin + at) for one, at in zip(found, places, strict=True)])
        return found


def _destination(spec: Spec, own: torch.Tensor | None) -> torch.Tensor:
    """Return the existing tensor if the bytes fit, since optimizers and DDP refer to it."""
    return own.detach() if own is not None and spec.describes(own) else spec.empty()


# --- bytes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The offset of each tensor of the two halves in a buffer."""

    lasting: Sequence[int]
    passing: Sequence[int]
    #: Where the tensors begin that are not both lasting and large.
    small_at: int
    size: int

    @classmethod
    def of(cls, lasting: Sequence[int], passing: Sequence[int]) -> Layout:
        """Lay out tensors of these sizes in bytes."""
        large = [size if size >= SMALL else 0 for size in lasting]
        small = [size if size < SMALL else 0 for size in lasting]
        large_places, small_at = _end_to_end(large, 0)
        small_places, passing_at = _end_to_end(small, small_at)
        passing_places, end = _end_to_end(passing, passing_at)
        places = [
            first if size else second
            for size, first, second in zip(large, large_places, small_places, strict=True)
        ]
        return cls(places, passing_places, small_at, end)


def _end_to_end(sizes: Sequence[int], at: int) -> tuple[list[int], int]:
    places = []
    for size in sizes:
        places.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return places, at


class Staging:
    """Copies of small tensors, arranged as in a buffer, in reused memory."""

    def __init__(self) -> None:
        self._forms: list[object] = []
        self._copies: list[torch.Tensor] = []
        self.block = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, tensors: Sequence[torch.Tensor], places: Sequence[int], size: int) -> None:
        """Copy them to these offsets of the block, which has this size."""
        forms: list[object] = [(one.dtype, one.shape, one.stride()) for one in tensors]
        if forms != self._forms or size != len(self.block):
            self.block = torch.zeros(size, dtype=torch.uint8)
            self._copies = [
                self._view(Spec.of("", one), at) for one, at in zip(tensors, places, strict=True)
            ]
            self._forms = forms
        if self._copies:
            torch_private.copy_all(self._copies, list(tensors))

    def _view(self, spec: Spec, at: int) -> torch.Tensor:
        memory = self.block[at : at + spec.nbytes].view(spec.dtype)
        return memory.as_strided(spec.shape, spec.stride)
