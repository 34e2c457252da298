"""The worker's end of its channel to the agent: one JSON line a message, over a unix socket.

A process that is no worker of an agent has no channel, and what it sends goes nowhere; so do a
worker's children, which inherit the environment but must not speak for it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Mapping
from typing import Any

from torchelastic import env

VARIABLE = "TORCHELASTIC_CHANNEL_FD"
#: Longest message in bytes, below the 208 KiB that Linux lets a unix socket take in one piece.
LIMIT = 128 * 1024

_opened: tuple[int, socket.socket | None] | None = None


def send(message: Mapping[str, Any], *, patience: float = 0.0) -> None:
    """Tell the agent. Waits `patience` seconds at most; a full socket drops the message."""
    data = json.dumps(message).encode() + b"\n"
    if len(data) > LIMIT:
        raise ValueError(f"A message to the agent has {len(data)} bytes; the limit is {LIMIT}.")
    channel = _channel()
    if channel is None:
        return
    if patience:
        _wait_for_room(channel, patience)
    try:
        channel.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return  # the agent is busy or gone: training matters more than telling


def _wait_for_room(channel: socket.socket, seconds: float) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLOUT)
    poll.poll(seconds * 1000)


def adopt() -> None:
    """Keep the descriptor to this process: programs that it starts are no workers."""
    descriptor = _descriptor()
    if descriptor is not None:
        os.set_inheritable(descriptor, False)


def _channel() -> socket.socket | None:
    """This process's own channel; a forked child finds that it has none."""
    global _opened
    if _opened is None or _opened[0] != os.getpid():
        _opened = (os.getpid(), _open())
    return _opened[1]


def _open() -> socket.socket | None:
    descriptor = _descriptor()
    if descriptor is None:
        return None
    try:
        channel = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    if _peer(channel) == os.getppid():
        return channel
    # Somebody else's socket that has got the number, or our parent's: only the copy is closed.
    channel.close()
    return None


def _descriptor() -> int | None:
    text = env.get(VARIABLE)
    return int(text) if text.isdecimal() else None


def _peer(channel: socket.socket) -> int:
    """The process that made the socket; for a worker that is its parent, the agent."""
    try:
        made_by = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return 0
    return int(struct.unpack("3i", made_by)[0])
