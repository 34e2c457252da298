"""A state as it is kept: a skeleton, and the bytes of its tensors one after the other.

The skeleton has three lines of JSON: a number that tells one form of state from another, and the
skeletons (`parts`) of two halves. The *lasting* half is what only `optimizer.step` writes,
parameters and optimizer state: nearly all of the bytes, in the same tensors step after step. The
*passing* half is everything else: buffers, hyperparameters, and the other parts of the state.

In the bytes the large tensors of the lasting half come first (`Layout`).

Of tensors that are sharded over ranks there is only said that they are (`keeping_dtensor`).
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

#: Where a tensor begins in a buffer.
ALIGNMENT = 64


@dataclass(frozen=True)
class Flat:
    """A state taken apart. Its tensors are the state's own memory wherever possible."""

    skeleton: bytes
    lasting: Sequence[torch.Tensor]
    passing: Sequence[torch.Tensor]
    #: What counts writes to the large tensors of the lasting half, where they do not themselves.
    watched: Sequence[torch.Tensor] | None = None


class Tree:
    """What is kept of some modules and optimizers, and of the rest of a state."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        rest: Callable[[], Mapping[str, Any]],
        put_rest: Callable[[Mapping[str, Any]], None],
        form: module_state.Form,
    ) -> None:
        """`rest` says what else there is, `put_rest` puts it back."""
        self._modules, self._optimizers = modules, optimizers
        self._rest, self._put_rest = rest, put_rest
        self.form = str(module_state.form_number(form))
        #: The lasting half as it was flattened last, and of which tensors it was made.
        self._marks: list[tuple[int, int]] = []
        self._flat: _Lasting | None = None

    def flatten(self) -> Flat:
        """The state now."""
        lasting = self._flatten_lasting()
        passing, others = tensor_tree.flatten(self._passing())
        skeleton = "\n".join((self.form, lasting.skeleton, passing)).encode()
        return Flat(skeleton, lasting.tensors, others)

    def sharded(self) -> Sharded:
        """The tensors that are not in it, since each rank has a part of them."""
        return self._flatten_lasting().sharded

    def _flatten_lasting(self) -> _Lasting:
        """Anew only if it is in other tensors: a model may have thousands."""
        marks = self._current_marks()
        if marks is None:
            return _Lasting.of(self._lasting())
        if self._flat is None or marks != self._marks:
            self._marks, self._flat = marks, _Lasting.of(self._lasting())
        return self._flat

    def _current_marks(self) -> list[tuple[int, int]] | None:
        """By which the tensors are known; None if there is more than tensors, such as numbers."""
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
        """A state found in memory. `SnapshotError` if it is none, or not one of this training."""
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
        """Put it into the modules, the optimizers and the rest; sharded tensors are loaded."""
        live = self._lasting()
        dtensors.take_out(live)
        own = dict(tensor_tree.tensors_by_path(live))
        tensors = stored.tensors(lambda spec: _room(spec, own.get(spec.path)))
        count = len(stored.lasting_specs)
        lasting = tensor_tree.restore(stored.lasting, tensors[:count])
        dtensors.put_in(lasting, sharded)
        passing = tensor_tree.restore(stored.passing, tensors[count:])
        self.put([lasting, passing])

    def whole(self) -> list[dict[str, Any]]:
        """Both halves, as they can be sent to others."""
        return [self._lasting(), self._passing()]

    def put(self, whole: Sequence[Mapping[str, Any]]) -> None:
        """Take both halves; a tensor that lies where it belongs is not copied."""
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
    """The lasting half, taken apart."""

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
    """A state that lies in memory."""

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
        """The tensors that are sharded over ranks, which lie elsewhere."""
        nowhere = [
            torch.empty(one.shape, dtype=one.dtype, device="meta") for one in self.lasting_specs
        ]
        tree = tensor_tree.restore(self.lasting, nowhere)
        return dtensors.read_shapes(tree.get("sharded", {}))

    def tensors(self, room_for: Callable[[Spec], torch.Tensor]) -> list[torch.Tensor]:
        """Its tensors, copied to where there is room for each: lasting ones, then the others."""
        layout, begin = self.layout, address_of(self.data)
        found = [room_for(spec) for spec in (*self.lasting_specs, *self.passing_specs)]
        places = (*layout.lasting, *layout.passing)
        fill_tensors.load([(one, begin + at) for one, at in zip(found, places, strict=True)])
        return found


def _room(spec: Spec, own: torch.Tensor | None) -> torch.Tensor:
    """In the tensor that is there, if its bytes fit: optimizers and DDP refer to it."""
    return own.detach() if own is not None and spec.describes(own) else spec.empty()


# --- bytes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where in a buffer each tensor of the two halves begins."""

    lasting: Sequence[int]
    passing: Sequence[int]
    #: Where all that is not both lasting and large begins.
    small_at: int
    size: int

    @classmethod
    def of(cls, lasting: Sequence[int], passing: Sequence[int]) -> Layout:
        """For tensors of so many bytes each."""
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
    """Copies of small tensors, put together as they lie in a buffer, in memory used again."""

    def __init__(self) -> None:
        self._forms: list[object] = []
        self._copies: list[torch.Tensor] = []
        self.block = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, tensors: Sequence[torch.Tensor], places: Sequence[int], size: int) -> None:
        """Copy them to these places of the block, which has this size."""
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
