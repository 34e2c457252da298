"""The random states of this process, as bytes: torch's, and together Python's, numpy's and CUDA's.

They are read at every step and before every collective. Asking numpy takes 31 microseconds and
Python 13, torch less than 2. So those two are asked only when the memory of their generators has
changed. numpy publishes its address; where Python's is, is found by looking for the known state.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchelastic.tensors.tensor_bytes import bytes_of

#: A Mersenne Twister as Python has it: the index, then 624 words; then the normal deviate, if any.
_PYTHON = struct.Struct("=i624I")
_GAUSS = struct.Struct("=d")
#: numpy's legacy generator: 624 words; then the position, and the normal deviate it may keep.
_NUMPY_WORDS = 624 * 4
_NUMPY_TAIL = struct.Struct("=qqd")
#: The bytes of its generator in memory: the words and the position.
_NUMPY_MEMORY = _NUMPY_WORDS + 4
#: The lengths of the states of Python, numpy and CUDA.
_LENGTHS = struct.Struct("=qqq")

_cuda_in_use: Callable[[], bool] = torch.cuda.is_initialized


class Random(NamedTuple):
    """The random states of a process at one moment; those unchanged are the same objects."""

    torch: bytes
    others: bytes


class RngReader:
    """Reads the random states, and remembers the last ones."""

    def __init__(self) -> None:
        self._last = Random(b"", b"")
        #: The states that `_last.others` was packed from.
        self._seen: tuple[object, ...] = ()

    def capture(self) -> Random:
        """Return the current states; the same object as before if nothing has changed."""
        last = self._last
        own = bytes_of(torch.default_generator.get_state())
        seen = _python_memory(), _numpy_memory(), _cuda()
        others = last.others if seen == self._seen else self._read_others(*seen)
        if own != last.torch or others is not last.others:
            self._last = Random(own, others)
        return self._last

    def _read_others(self, python: bytes | None, memory: bytes | None, cuda: bytes) -> bytes:
        numpy, numpy_keeps_deviate = _read_numpy()
        packed = _pack_python(random.getstate())
        # A deviate that is kept can be used up without a change in the memory we look at.
        keeps_deviate = numpy_keeps_deviate or len(packed) > _PYTHON.size
        unknown = python is None or memory is None
        self._seen = () if keeps_deviate or unknown else (python, memory, cuda)
        state = _LENGTHS.pack(len(packed), len(numpy), len(cuda)) + packed + numpy + cuda
        return self._last.others if state == self._last.others else state


capture = RngReader().capture


def seed(*key: int) -> None:
    """Seed torch's, Python's and numpy's generators by some numbers."""
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    torch.manual_seed(number - (1 << 63))
    random.seed(number)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


def restore(states: Random) -> None:
    torch.default_generator.set_state(_tensor(states.torch))
    python, numpy, cuda = _split(states.others)
    _restore_python(python)
    if numpy and "numpy" in sys.modules:
        _restore_numpy(numpy)
    if cuda:
        torch.cuda.set_rng_state(_tensor(cuda))


def _split(others: bytes) -> tuple[bytes, bytes, bytes]:
    python, numpy, cuda = _LENGTHS.unpack_from(others)
    at = _LENGTHS.size
    ends = at + python, at + python + numpy, at + python + numpy + cuda
    return others[at : ends[0]], others[ends[0] : ends[1]], others[ends[1] : ends[2]]


# --- torch ----------------------------------------------------------------------------------------


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _cuda() -> bytes:
    """Return the state of this rank's device only, without initialising CUDA."""
    return bytes_of(torch.cuda.get_rng_state()) if _cuda_in_use() else b""


# --- Python ---------------------------------------------------------------------------------------


def _pack_python(state: tuple[Any, ...]) -> bytes:
    _, (*words, index), gauss = state
    return _PYTHON.pack(index, *words) + (b"" if gauss is None else _GAUSS.pack(gauss))


def _find_python() -> int | None:
    """Return the address of the index and the words in the memory of Python's generator.

    None if it is not where other versions of Python have it; then Python is asked every time.
    """
    generator = random.getstate.__self__  # type: ignore[attr-defined]
    state = _pack_python(random.getstate())[: _PYTHON.size]
    found = ctypes.string_at(id(generator), type(generator).__basicsize__).find(state)
    return None if found < 0 else id(generator) + found


_python_at = _find_python()


def _python_memory() -> bytes | None:
    """Return bytes that change with every draw; None if unknown."""
    return None if _python_at is None else ctypes.string_at(_python_at, _PYTHON.size)


def _restore_python(state: bytes) -> None:
    index, *words = _PYTHON.unpack_from(state)
    gauss = _GAUSS.unpack_from(state, _PYTHON.size)[0] if len(state) > _PYTHON.size else None
    random.setstate((random.Random.VERSION, (*words, index), gauss))


# --- numpy ----------------------------------------------------------------------------------------


def _numpy_memory() -> bytes | None:
    """Return bytes that change with every draw; None if unknown (numpy before 1.24)."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return b""
    if not hasattr(numpy.random, "get_bit_generator"):
        return None
    generator = numpy.random.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _NUMPY_MEMORY)


def _read_numpy() -> tuple[bytes, bool]:
    """Return the state, and whether it has a cached deviate."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return b"", False
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return b"", False
    keeps_deviate = bool(state["has_gauss"])
    tail = _NUMPY_TAIL.pack(state["state"]["pos"], keeps_deviate, state["gauss"])
    return state["state"]["key"].tobytes() + tail, keeps_deviate


def _restore_numpy(state: bytes) -> None:
    numpy: Any = sys.modules["numpy"]
    words = numpy.frombuffer(state, dtype=numpy.uint32, count=624)
    position, keeps_deviate, deviate = _NUMPY_TAIL.unpack_from(state, _NUMPY_WORDS)
    numpy.random.set_state(("MT19937", words, position, keeps_deviate, deviate))
