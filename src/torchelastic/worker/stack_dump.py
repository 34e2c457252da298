"""The stack of a worker's main thread, written to the agent's memory at the agent's signal.

The thread writes it itself, in C, without the GIL and whatever it is hung in, as long as the
kernel delivers signals to it: not while it is frozen, nor in an uninterruptible system call. It
costs nothing until the signal comes.
"""

from __future__ import annotations

import faulthandler
import os
import signal

from torchelastic import env
from torchelastic.system import shared_memory

VARIABLE = "TORCHELASTIC_STACKS_FD"
#: The memory's name, as the kernel shows it.
NAME = "torchelastic-stacks"
#: A real-time signal, which programs do not use otherwise; the timers use the one before.
SIGNAL = signal.SIGRTMIN + 8
#: At the beginning of the memory: which descriptor of the worker's it is, from when on the signal
#: may be sent. Sent before, it would end the process. The stack comes behind it.
_READY = shared_memory.Field("=q")
STACKS_AT = _READY.size


def create() -> int:
    """Memory for one worker; the descriptor is the caller's."""
    descriptor = shared_memory.create("stacks", _READY.size)
    os.write(descriptor, _READY.pack(-1))
    return descriptor


def adopt() -> None:
    """In the worker, before the user's code: write the stack at the signal from now on."""
    text = env.get(VARIABLE)
    if not text.isdecimal():
        return
    env.remove(VARIABLE)
    descriptor = int(text)
    os.set_inheritable(descriptor, False)
    # Not those of all threads: the others run meanwhile, and a frame that is gone when it is read
    # would end the process.
    faulthandler.register(SIGNAL, descriptor, all_threads=False, chain=False)
    os.pwrite(descriptor, _READY.pack(descriptor), 0)


def written_to(memory: int) -> int | None:
    """The worker's descriptor of it, for its agent; None while the signal must not be sent."""
    number: int = (_READY.read(memory) or (-1,))[0]
    return number if number >= 0 else None
