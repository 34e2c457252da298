"""The random states of this process, as bytes: torch's, and together Python's, numpy's and CUDA's.

They are read at every step and before every collective, so reading must be cheap: `get_state` of
torch, Python and numpy takes 8, 11 and 41 microseconds. So torch's state is read directly from
memory, if that is found to equal what `get_state` returns; for the others, a few bytes in memory
show whether they have changed. Unchanged states are not read.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchelastic.torch_private import address_of

#: Of torch's generator as `get_state` tells: seed, words left, whether seeded, position; 624 words;
#: of three numbers the second is a normal deviate that it may keep, and whether it does; another
#: one in single precision, and whether.
_TORCH_TOLD = struct.Struct("=QiiQ624Qdddi4xf?3x")
#: The same where it lies in memory.
_TORCH_THERE = struct.Struct("=Qi?3xI624I4xf?3xd?")
#: Of a Mersenne Twister as Python keeps it: the index, then 624 words.
_PYTHON = struct.Struct("=i624I")
_GAUSS = struct.Struct("=d")
#: Of numpy's legacy generator: 624 words; then the position, and the normal deviate it may keep.
_NUMPY_WORDS = 624 * 4
_NUMPY_TAIL = struct.Struct("=qqd")
#: How long the states of Python, numpy and CUDA are.
_LENGTHS = struct.Struct("=qqq")
#: Torch's is not further than this into its generator, which is much longer.
_TORCH_WITHIN = 128
#: By which a generator is known.
_SEED = 0x5EED0FA7081A1
#: Four words next to the position: whatever is drawn changes one of them, or the position.
_SIGN = 16

_generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
_cuda_in_use: Callable[[], bool] = torch.cuda.is_initialized


class Random(NamedTuple):
    """The random states of a process at one moment; those unchanged are the same objects."""

    #: Raw memory, with other meaningless bytes; or the result of `get_state`.
    torch: bytes
    others: bytes

    def told(self) -> Random:
        """Return the states as from `get_state`: equal for states that draw the same."""
        read = len(self.torch) == _TORCH_THERE.size
        return Random(_told(self.torch), self.others) if read else self


def restore(states: Random) -> None:
    torch.default_generator.set_state(_tensor(states.told().torch))
    python, numpy, cuda = _split(states.others)
    _restore_python(python)
    if numpy and "numpy" in sys.modules:
        _restore_numpy(numpy)
    if cuda:
        torch.cuda.set_rng_state(_tensor(cuda))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a contiguous CPU tensor's bytes. (`numpy()` is slower, and may be missing.)"""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _cuda() -> bytes:
    """Return the state of this rank's device only, without initialising CUDA."""
    return bytes_of(torch.cuda.get_rng_state()) if _cuda_in_use() else b""


def _split(others: bytes) -> tuple[bytes, bytes, bytes]:
    python, numpy, cuda = _LENGTHS.unpack_from(others)
    at = _LENGTHS.size
    ends = at + python, at + python + numpy, at + python + numpy + cuda
    return others[at : ends[0]], others[ends[0] : ends[1]], others[ends[1] : ends[2]]


class Reader:
    """Reads the generators directly from memory if the place is known, else by `get_state`."""

    def __init__(self, torch_at: _Window | None, python_at: _Window | None) -> None:
        self._torch, self._python = torch_at, python_at
        self._numpy: _Window | None = None
        #: Whether `look` notices every draw from Python's and numpy's generators.
        self._shipper = python_at is not None
        #: The bytes that `look` saw when they were last read.
        self._seen: tuple[Any, ...] = ()
        self._last = Random(b"", b"")

    def capture(self) -> Random:
        """Return the current states. If another thread draws meanwhile, torch's may be torn."""
        # One function, twice a step: with one for each generator it takes three times as long.
        last, place, python, numpy = self._last, self._torch, self._python, self._numpy
        own = place.raw if place is not None else _ask_torch()
        if self._shipper and python is not None:
            numbers = numpy.raw if numpy is not None else "numpy" in sys.modules
            cuda = _cuda() if _cuda_in_use() else b""
            seen = (python.raw, _generator.gauss_next, numbers, cuda)
            others = last[1] if seen == self._seen else self._read_others(seen)
        else:
            others = self._read_others(())
        if own == last[0] and others is last[1]:
            return last
        self._last = tuple.__new__(Random, (own, others))  # faster than Random(own, others)
        return self._last

    def look(self) -> None:
        """Find numpy's generator, which the script may have imported or replaced."""
        self._numpy, self._seen = _numpy_window(), ()
        known = self._numpy is not None or "numpy" not in sys.modules
        self._shipper = known and self._python is not None

    def _read_others(self, seen: tuple[Any, ...]) -> bytes:
        if self._numpy is None and "numpy" in sys.modules:
            self.look()
            seen = ()
        state, keeps_deviate = _read()
        # numpy's cached deviate can be used up without a change in the bytes we look at.
        self._seen = () if keeps_deviate else seen
        return self._last.others if state == self._last.others else state


def _read() -> tuple[bytes, bool]:
    """Return all three, and whether numpy has a cached deviate."""
    numpy, keeps_deviate = _read_numpy()
    python, cuda = _read_python(), _cuda()
    return (
        b"".join((_LENGTHS.pack(len(python), len(numpy), len(cuda)), python, numpy, cuda)),
        keeps_deviate,
    )


# --- torch ----------------------------------------------------------------------------------------


def _ask_torch() -> bytes:
    return bytes_of(torch.default_generator.get_state())


def _told(there: bytes) -> bytes:
    """Return what `get_state` would return for a generator with this memory."""
    seed, left, seeded, position, *more = _TORCH_THERE.unpack(there)
    *words, single, keeps_single, double, keeps_double = more
    kept = double if keeps_double else 0.0
    head, deviate = (seed, left, seeded, position), (0.0, kept, 0.0, keeps_double)
    single = single if keeps_single else 0.0
    return _TORCH_TOLD.pack(*head, *words, *deviate, single, keeps_single)


def _torch_window() -> _Window | None:
    """Return the place of the global generator's state in memory, or None if not known."""
    trial: Any = torch.Generator("cpu")
    own: Any = torch.default_generator
    trial.manual_seed(_SEED)
    if trial.get_state().nbytes != _TORCH_TOLD.size:
        return None
    for offset in range(0, _TORCH_WITHIN, 8):
        begins = ctypes.string_at(address_of(trial) + offset, 8) == _SEED.to_bytes(8, sys.byteorder)
        if begins and _lies_at(offset, trial):
            return _window(address_of(own) + offset, _TORCH_THERE.size)
    return None


def _lies_at(offset: int, trial: Any) -> bool:
    """Return whether a generator's state is always at this offset."""
    there = _window(address_of(trial) + offset, _TORCH_THERE.size)
    for precision in (torch.float32, torch.float64):
        for _ in range(3):  # keeps a deviate, uses it up, keeps another
            if not _means(there, trial):
                return False
            torch.randn(1, generator=trial, dtype=precision, device="cpu")
    fields = list(_TORCH_TOLD.unpack(bytes_of(trial.get_state())))
    fields[-2:] = 0.5, True
    trial.set_state(_tensor(_TORCH_TOLD.pack(*fields)))
    torch.rand(1000, generator=trial, device="cpu")  # all words are new
    return _means(there, trial)


def _means(there: _Window, generator: Any) -> bool:
    """Return whether the memory there matches the generator's `get_state`."""
    return _told(there.raw) == bytes_of(generator.get_state())


# --- Python ---------------------------------------------------------------------------------------


def _read_python() -> bytes:
    _, (*words, index), gauss = random.getstate()
    return _PYTHON.pack(index, *words) + (b"" if gauss is None else _GAUSS.pack(gauss))


def _restore_python(state: bytes) -> None:
    index, *words = _PYTHON.unpack_from(state)
    gauss = _GAUSS.unpack_from(state, _PYTHON.size)[0] if len(state) > _PYTHON.size else None
    random.setstate((random.Random.VERSION, (*words, index), gauss))


# --- numpy ----------------------------------------------------------------------------------------


def _read_numpy() -> tuple[bytes, bool]:
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


# --- where they lie in memory ---------------------------------------------------------------------

_Window = ctypes.Array[ctypes.c_char]


def _window(address: int, size: int = _SIGN) -> _Window:
    return (ctypes.c_char * size).from_address(address)


def _python_window() -> _Window | None:
    """Return the place of the index and the first words; None if the layout is unknown."""
    room = type(_generator).__basicsize__ - object.__basicsize__
    if sys.implementation.name != "cpython" or room < _PYTHON.size:
        return None
    address = id(_generator) + object.__basicsize__
    expected = _read_python()[: _PYTHON.size]
    return _window(address) if ctypes.string_at(address, _PYTHON.size) == expected else None


def _numpy_window() -> _Window | None:
    """Return the place of the last words and the position; None for another generator."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy.random, "get_bit_generator"):  # before numpy 1.24
        return None
    generator = numpy.random.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return None
    window = _window(generator.ctypes.state_address + _NUMPY_WORDS + 4 - _SIGN)
    window.generator = generator  # type: ignore[attr-defined]  # whose memory it is
    return window


reader = Reader(_torch_window(), _python_window())
capture, look = reader.capture, reader.look
