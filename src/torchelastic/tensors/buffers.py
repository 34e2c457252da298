"""The buffers of modules: saved at the beginning of every step, put back when it is undone.

Light buffers, small and on the CPU, become one run of bytes, which can be left for a replacement.
Heavy buffers are copied only when they have changed. `_version` shows every change but that of the
running statistics of normalisation layers, which native code writes without counting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchelastic.tensors.tensor_bytes import bytes_of
from torchelastic.torch_private import NormBase, buffers_of, copy_all, version_of

#: Up to this many bytes a buffer is light: copying it costs less than finding out whether to.
LIGHT = 64 << 10
_ALIGNMENT = 16

_Place = tuple[dict[str, torch.Tensor | None], str]
_View = tuple[torch.dtype, tuple[int, ...], int]


class Buffers:
    """All buffers of some modules, looked up by name each time: a forward may replace them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self.find()

    def find(self) -> None:
        """Find the buffers; call again for buffers registered later."""
        light: list[tuple[_Place, torch.Tensor]] = []
        self.heavy: list[_Heavy] = []
        for owner, place in _places(self._modules):
            buffer = place[0][place[1]]
            if buffer is not None and _is_light(buffer):
                light.append((place, buffer))
            else:
                self.heavy.append(_Heavy(place, traceless=isinstance(owner, NormBase)))
        #: The places of the light buffers.
        self.light = [place for place, _ in light]
        self._views, size = _views(buffer for _, buffer in light)
        self._block, self._copies = _block(size, self._views)

    def capture(self) -> bytes:
        """Return the content of the light buffers."""
        if not self.light:
            return b""
        live: list[Any] = [buffers[name] for buffers, name in self.light]
        try:
            copy_all(self._copies, live)
        except (RuntimeError, TypeError):  # one is gone, or has another shape than it had
            self.find()
            return self.capture()
        return bytes_of(self._block)

    def save_heavy(self) -> None:
        for one in self.heavy:
            one.save()

    def restore_heavy(self) -> None:
        for one in self.heavy:
            one.restore()

    def heavy_changes(self) -> list[torch.Tensor | None]:
        """Return copies of the heavy buffers that have changed since they were saved."""
        return [one.change() for one in self.heavy]

    def put_heavy(self, changes: Sequence[torch.Tensor | None]) -> None:
        """Put in place what `heavy_changes` returned, unless there are other buffers now."""
        for one, change in zip(self.heavy, changes, strict=False):
            if change is not None and len(changes) == len(self.heavy):
                one.put(change)

    @torch.no_grad()
    def restore(self, light: bytes) -> bool:
        """Put back what `capture` returned; do nothing and return False if buffers differ."""
        if len(light) != self._block.nbytes:
            return False
        if light:
            block = torch.frombuffer(bytearray(light), dtype=torch.uint8)
            for (buffers, name), saved in zip(self.light, _cut(block, self._views), strict=True):
                buffers[name] = _put_back(buffers[name], saved)
        return True


class _Heavy:
    """One buffer that is not light, or is None so far."""

    def __init__(self, place: _Place, *, traceless: bool) -> None:
        self._buffers, self._name = place
        self._traceless = traceless
        self._saved: torch.Tensor | None = None
        self._mark: tuple[int, int] | None = None

    def save(self) -> None:
        live = self._buffers[self._name]
        mark = None if live is None else (id(live), version_of(live))
        if mark == self._mark and not self._traceless:
            return
        self._saved = None if live is None else _copy_into(self._saved, live)
        self._mark = mark

    def change(self) -> torch.Tensor | None:
        live = self._buffers[self._name]
        if live is None or not (self._traceless or (id(live), version_of(live)) != self._mark):
            return None
        return live.detach().clone()

    @torch.no_grad()
    def put(self, value: torch.Tensor) -> None:
        self._buffers[self._name] = _put_back(self._buffers[self._name], value)

    @torch.no_grad()
    def restore(self) -> None:
        live = self._buffers[self._name]
        if self._saved is None or live is None:
            self._buffers[self._name] = None if self._saved is None else self._saved.clone()
        elif self._traceless or (id(live), version_of(live)) != self._mark:
            self._buffers[self._name] = _put_back(live, self._saved)
        live = self._buffers[self._name]
        self._mark = None if live is None else (id(live), version_of(live))


def _places(modules: tuple[nn.Module, ...]) -> Iterator[tuple[nn.Module, _Place]]:
    seen: set[int] = set()
    for module in modules:
        for part in module.modules():
            if id(part) in seen:
                continue
            seen.add(id(part))
            yield from ((part, (buffers_of(part), name)) for name in buffers_of(part))


def _is_light(buffer: torch.Tensor) -> bool:
    plain = buffer.layout == torch.strided and not buffer.is_quantized
    return plain and buffer.device.type == "cpu" and 0 < buffer.nbytes <= LIGHT


def _views(buffers: Iterable[torch.Tensor]) -> tuple[list[_View], int]:
    """Return each buffer's place in one block, and the block's size."""
    views, at = [], 0
    for buffer in buffers:
        views.append((buffer.dtype, tuple(buffer.shape), at))
        at += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
    return views, at


def _block(size: int, views: list[_View]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    block = torch.zeros(size, dtype=torch.uint8)
    return block, list(_cut(block, views))


def _cut(block: torch.Tensor, views: list[_View]) -> Iterator[torch.Tensor]:
    for dtype, shape, at in views:
        count = torch.Size(shape).numel() * dtype.itemsize
        yield block[at : at + count].view(dtype).view(shape)


def _same_kind(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


@torch.no_grad()
def _copy_into(room: torch.Tensor | None, live: torch.Tensor) -> torch.Tensor:
    if room is None or not _same_kind(room, live):
        return live.detach().clone()
    return room.copy_(live)


def _put_back(live: torch.Tensor | None, saved: torch.Tensor) -> torch.Tensor:
    """Restore a buffer, in place where possible: others may hold the tensor."""
    if live is None or not _same_kind(live, saved):
        return saved.clone()
    return live.copy_(saved)
