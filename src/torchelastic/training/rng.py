"""The random states of this process, as bytes: torch's, Python's, numpy's and CUDA's.

They are read at every step, and before every collective, so reading has to be cheap. Python's and
numpy's generators are read where they lie in memory (11 and 41 microseconds otherwise): Python's
only after a comparison with what `getstate` says, numpy's at the address it publishes.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

#: Of a Mersenne Twister as Python keeps it: the index, then 624 words.
_PYTHON = struct.Struct("=i624I")
_GAUSS = struct.Struct("=d")
#: Of numpy's legacy generator: 624 words and the position, then whether a normal deviate is kept.
_NUMPY_WORDS = 624 * 4
_NUMPY_RAW = _NUMPY_WORDS + 4
_NUMPY_TAIL = struct.Struct("=qqd")


class Random(NamedTuple):
    """The random states; one that is empty was not in use, or cannot be kept."""

    torch: bytes
    python: bytes
    numpy: bytes
    cuda: bytes


def capture() -> Random:
    return Random(
        bytes_of(torch.default_generator.get_state()), _python(), _numpy.capture(), _cuda()
    )


def restore(states: Random) -> None:
    torch.default_generator.set_state(_tensor(states.torch))
    _restore_python(states.python)
    if states.numpy:
        _numpy.restore(states.numpy)
    if states.cuda:
        torch.cuda.set_rng_state(_tensor(states.cuda))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """What a contiguous CPU tensor holds. (`numpy()` takes longer, and numpy may be missing.)"""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _cuda() -> bytes:
    """This rank's device only; asking must not be what initialises CUDA."""
    return bytes_of(torch.cuda.get_rng_state()) if _cuda_in_use() else b""


_cuda_in_use: Callable[[], bool] = torch.cuda.is_initialized


# --- Python ---------------------------------------------------------------------------------------

_generator: Any = random.getstate.__self__  # type: ignore[attr-defined]


def _slow_python() -> bytes:
    words = random.getstate()[1]
    return _PYTHON.pack(words[-1], *words[:-1])


def _fast_python() -> bytes:
    return ctypes.string_at(id(_generator) + object.__basicsize__, _PYTHON.size)


def _lies_where_expected() -> bool:
    """Whether the interpreter keeps the generator as expected: CPython's layout is its own."""
    room = type(_generator).__basicsize__ - object.__basicsize__
    return (
        sys.implementation.name == "cpython"
        and room >= _PYTHON.size
        and _fast_python() == _slow_python()
    )


_words = _fast_python if _lies_where_expected() else _slow_python


def _python() -> bytes:
    gauss = _generator.gauss_next
    return _words() if gauss is None else _words() + _GAUSS.pack(gauss)


def _restore_python(state: bytes) -> None:
    index, *words = _PYTHON.unpack_from(state)
    gauss = _GAUSS.unpack_from(state, _PYTHON.size)[0] if len(state) > _PYTHON.size else None
    random.setstate((random.Random.VERSION, (*words, index), gauss))


# --- numpy ----------------------------------------------------------------------------------------


class _Numpy:
    """numpy's global generator. A full reading is repeated only when it may have changed."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._address = 0
        self._raw = b""
        self._state = b""

    def capture(self) -> bytes:
        numpy: Any = sys.modules.get("numpy")
        if numpy is None:
            return b""
        raw = self._read_raw(numpy.random)
        if raw and raw == self._raw:
            return self._state
        self._state, keeps_deviate = self._read(numpy.random.get_state(legacy=False))
        # A normal deviate that is kept can be used up without a change in the words.
        self._raw = b"" if keeps_deviate else raw
        return self._state

    def restore(self, state: bytes) -> None:
        numpy: Any = sys.modules.get("numpy")
        if numpy is None:
            return
        words = numpy.frombuffer(state, dtype=numpy.uint32, count=624)
        position, keeps_deviate, deviate = _NUMPY_TAIL.unpack_from(state, _NUMPY_WORDS)
        numpy.random.set_state(("MT19937", words, position, keeps_deviate, deviate))
        self._raw = b""

    def _read_raw(self, numpy_random: Any) -> bytes:
        """The words in use; empty if another generator was put in the legacy one's place."""
        if not hasattr(numpy_random, "get_bit_generator"):  # before numpy 1.24
            return b""
        generator = numpy_random.get_bit_generator()
        if generator is not self._generator:
            self._generator = generator
            known = type(generator).__name__ == "MT19937"
            self._address = generator.ctypes.state_address if known else 0
        return ctypes.string_at(self._address, _NUMPY_RAW) if self._address else b""

    @staticmethod
    def _read(state: Any) -> tuple[bytes, bool]:
        if state["bit_generator"] != "MT19937":
            return b"", False
        words, keeps_deviate = state["state"]["key"], bool(state["has_gauss"])
        tail = _NUMPY_TAIL.pack(state["state"]["pos"], keeps_deviate, state["gauss"])
        return words.tobytes() + tail, keeps_deviate


_numpy = _Numpy()
